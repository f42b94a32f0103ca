//! Wrong input for a virtual layer: one clear line. What needs none is in `crates/cli/tests/wrong_input`.

use crate::support::*;

pub(crate) fn tests(t: &mut Tests) {
    t.topic(&[packages::RUN]);
    let abc = &Shared::new(abc);
    let cases: &[(&str, &[&str], &str)] = &[
        ("a_second_host", &["host"], "already serves"),
        ("a_name_that_exists", &["vrnic", "add", "a"], "exists already"),
        ("an_address_that_exists", &["vrnic", "add", "z", "--ip", "10.0.0.1"], "belongs to vRNIC a"),
        ("an_unknown_group", &["vrnic", "add", "z", "--group", "nope"], "unirdma group add nope"),
        ("a_bad_name", &["vrnic", "add", "../z"], "no vRNIC name"),
        ("an_unknown_vrnic", &["vrnic", "show", "z"], "unirdma vrnic ls"),
        ("a_group_in_use", &["group", "rm", "other"], "still has the vRNIC c"),
        ("a_command_that_is_not_there", &["run", "--vrnic", "a", "--", "no-such-command"], "no-such-command"),
        ("a_container_on_an_unknown_vrnic", &["run", "--vrnic", "z", "--", "true"], "there is no vRNIC z"),
    ];
    for (name, args, text) in cases {
        t.on(abc, format!("wrong_input_{name}"), move |lab| refused(&lab.unirdma(args), text));
    }
    t.on(abc, "wrong_input_two_containers_on_one_vrnic", |lab| {
        let mut first = idle(lab, "a")?;
        let second = lab.unirdma(&["run", "--vrnic", "a", "--", "true"]);
        first.kill();
        first.finish();
        refused(&second, "has a container already")
    });
    t.on(abc, "containers_on_one_vrnic_one_after_the_other", |lab| {
        for n in 1..=20 {
            let o = lab.unirdma(&["run", "--vrnic", "a", "--", "true"]);
            require(o.ok(), format!("container {n}: {}", o.text))?;
        }
        Ok(())
    });
    hosts(t);
}

/// The error of a virtual layer that must not start.
fn refusal(started: Result<Lab>) -> Result<String> {
    started.err().ok_or_else(|| "the virtual layer started".into())
}

/// Virtual layers with a network.
fn hosts(t: &mut Tests) {
    t.test("wrong_input_port_4791_in_use", || {
        let _taken = std::net::UdpSocket::bind("127.0.9.1:4791").map_err(|e| e.to_string())?;
        let e = refusal(Peers::new("")?.start(None, &["--address", "127.0.9.1"]))?;
        require(e.contains("UDP port 4791 of 127.0.9.1 is in use") && e.trim_end().lines().count() == 1, e)
    });
    t.test("wrong_input_an_address_of_another_host", || {
        let e = refusal(Peers::new("")?.start(None, &["--address", "203.0.113.5"]))?;
        require(e.contains("203.0.113.5 is no address of this host"), e)
    });
    t.need_root("network namespaces need root");
    t.test("wrong_input_an_mtu_above_the_interfaces", || {
        let n = format!("ur{}-m", std::process::id());
        let made = || -> Check {
            harness::ip(&format!("netns add {n}"))?;
            harness::ip(&format!("-n {n} link add dev veth0 mtu 1500 type veth peer name veth1"))?;
            harness::ip(&format!("-n {n} addr add 192.168.9.1/24 dev veth0"))?;
            harness::ip(&format!("-n {n} link set veth0 up"))?;
            let args = ["--address", "192.168.9.1", "--mtu", "4096"];
            let e = refusal(Peers::new("")?.start(Some(&n), &args))?;
            require(e.contains("has an MTU of 1500"), e)
        };
        let r = made();
        let _ = harness::ip(&format!("netns del {n}"));
        r
    });
    t.need_no_root();
    t.test("wrong_input_a_bad_line_in_the_peers_file", || {
        let peers = Peers::new("10.0.0.2 default 127.0.9.2\nnonsense\n")?;
        let args = ["--address", "127.0.9.1"];
        let e = refusal(peers.start(None, &args))?;
        require(e.contains("line 2: expected"), e)?;
        peers.write("10.0.0.2 default 127.0.9.2\n")?;
        let lab = peers.start(None, &args)?;
        let status = || lab.unirdma(&["status", "--json"]).text;
        let shows =
            |what: &str| soon(|| status().contains(what), what).map_err(|e| format!("expected {e}: {}", status()));
        shows("\"peers\": 1")?;
        peers.write("10.0.0.2 default 127.0.9.2\n10.0.0.3 default x\n")?;
        shows("line 2: `x` is no IP address")?;
        shows("\"peers\": 1")?;
        peers.write("10.0.0.2 default 127.0.9.2\n10.0.0.3 default 127.0.9.3\n")?;
        shows("\"peers\": 2")
    });
}
