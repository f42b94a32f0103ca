//! Groups with a secret, between two hosts: programs, forged and replayed packets, new secrets, hosts without one.

use std::process::Command;

use super::rules::{BOTH, ends_with_its_rule, group_add, three_groups, write_rules};
use crate::support::*;

/// Makes a new secret in a file. Returns its path.
pub(crate) fn make(lab: &Lab, name: &str) -> Result<String> {
    let path = lab.dir.join(name).display().to_string();
    let o = lab.unirdma(&["secret", &path]);
    require(o.ok(), o.text)?;
    Ok(path)
}

/// Sets the secret of the group `default`.
pub(crate) fn set(lab: &Lab, secret: &str) -> Check {
    set_of(lab, &["default", "--secret", secret])
}

fn set_of(lab: &Lab, args: &[&str]) -> Check {
    let o = lab.unirdma(&[&["group", "set"], args].concat());
    require(o.ok(), o.text)
}

/// Numbers of packets that a host has dropped: not sealed, with a wrong tag, replayed.
pub(crate) fn dropped(lab: &Lab) -> Result<[u64; 3]> {
    dropped_of(lab, "default")
}

fn dropped_of(lab: &Lab, group: &str) -> Result<[u64; 3]> {
    let o = lab.unirdma(&["status", "--json"]);
    let status: serde_json::Value = serde_json::from_str(&o.text).map_err(|e| format!("{e}: {}", o.text))?;
    let worker = status["workers"].as_array().and_then(|all| all.iter().find(|w| w["group"] == group));
    let drops = &worker.ok_or(format!("group {group} has no worker"))?["seal"]["drops"];
    Ok(["unsealed", "wrong_tag", "replayed"].map(|name| drops[name].as_u64().unwrap_or(u64::MAX)))
}

/// Runs `forge` on the first host as root: an attacker who controls that host.
fn forge(two: &TwoHosts, exe: &str, what: &str) -> Output {
    let mut c = Command::new("ip");
    Output::of(c.args(["netns", "exec", two.netns(0), exe]).args(what.split_whitespace()))
}

/// Runs a program of two ends that compares data, again and again until `act` has returned. A packet that is lost for
/// good, as with UC, leaves both ends waiting.
fn while_they_play(two: &TwoHosts, program: &str, act: impl FnOnce() -> Check) -> Check {
    let (stop, play) = (two.labs[1].dir.join("stop"), format!("timeout 40 {program} -g 0 -c -n 2000"));
    let _ = std::fs::remove_file(&stop);
    let mut server = two.labs[0].spawn("a", &[], &format!("sh -c 'while {play} || true; do :; done'"))?;
    require(server.wait_listening(|| false), "the server does not listen")?;
    // The server may not be listening again yet.
    let rounds = format!(
        "sh -c 'while [ ! -e {} ]; do {play} 10.0.0.1; case $? in 0) echo played;; 124) echo lost; exit 1;; *) sleep 0.1;; esac; done'",
        stop.display()
    );
    let client = two.labs[1].spawn("b", &[], &rounds)?;
    let acted = wait_for(&client, "played").and_then(|()| act());
    let before = client.text().matches("played").count();
    let goes_on = || client.text().matches("played").count() > before || client.text().contains("lost");
    let went_on = acted.and_then(|()| soon(goes_on, "they did not go on"));
    std::fs::write(&stop, "").map_err(|e| e.to_string())?;
    let client = client.finish();
    server.kill();
    let server = server.finish();
    let text = format!("client: {}\nserver: {}", client.text, server.text);
    went_on.map_err(|e| format!("{e}: {text}"))?;
    require(client.ok() && !text.contains("invalid data") && !text.contains("Failed status"), text)
}

fn programs(two: &TwoHosts) -> Check {
    for (server, client) in [
        ("ib_write_bw -n 500", "ib_write_bw -n 500 10.0.0.1"),
        ("ib_read_bw -n 200", "ib_read_bw -n 200 10.0.0.1"),
        ("ib_write_lat -n 500", "ib_write_lat -n 500 10.0.0.1"),
        ("ib_send_bw -c UC -n 500", "ib_send_bw -c UC -n 500 10.0.0.1"),
        ("ib_send_bw -c UD -n 500", "ib_send_bw -c UD -n 500 10.0.0.1"),
        ("rping -s -C 20 -v", "rping -c -a 10.0.0.1 -C 20 -V"),
        ("rping -s -a fd00::1 -C 5", "rping -c -a fd00::1 -C 5 -V"),
    ] {
        let pair = two.pair(&format!("timeout 60 {server}"), &format!("timeout 60 {client}"))?;
        both_end_well(pair).map_err(|e| format!("{client}: {e}"))?;
    }
    let drops = two.labs.iter().map(dropped).collect::<Result<Vec<_>>>()?;
    require(drops == [[0; 3]; 2], format!("dropped: {drops:?}"))
}

/// The number of a vRNIC's QP, as soon as it has one. The numbers of QPs that end stay their group's.
fn present_qpn(lab: &Lab, vrnic: &str) -> Result<u64> {
    let mut qpn = None;
    let look = || {
        qpn = lab.show(vrnic).ok().and_then(|v| v["queue_pairs"][0]["qpn"].as_u64());
        qpn.is_some()
    };
    soon(look, "the program has no QP")?;
    qpn.ok_or_else(|| "the program has no QP".into())
}

/// Packets from the other host's own address, sent by its root.
fn hostile(two: &TwoHosts) -> Check {
    let lab = &two.labs[1];
    // A container sees only its own lab's directory.
    let (exe, listener) = (compile(&two.labs[0], "forge", &[])?, compile(lab, "forge", &[])?);
    // A QP that is connected to the first host.
    while_they_play(two, "ibv_rc_pingpong", || {
        let qpn = present_qpn(lab, "b")?;
        let o = forge(two, &exe, &format!("roce 192.168.7.1 192.168.7.2 {qpn}"));
        require(o.text.contains("sent"), o.text)?;
        let drops = || dropped(lab).unwrap_or_default();
        soon(|| drops()[0] >= 5, "not counted").map_err(|e| format!("{e}: {:?}", drops()))?;
        let o = forge(two, &exe, "again veth0 192.168.7.1 1");
        require(o.text.contains("again") && !o.text.contains("sent 0"), o.text)?;
        soon(|| drops()[2] > 0, "no packet was found to be a copy").map_err(|e| format!("{e}: {:?}", drops()))
    })?;
    let [unsealed, wrong_tag, _] = dropped(lab)?;
    require((unsealed, wrong_tag) == (5, 0), format!("{unsealed} unsealed, {wrong_tag} with a wrong tag"))?;
    // VXLAN, from the tunnel's own address and port.
    let victim = lab.spawn("b", &[], &format!("{listener} listen 3"))?;
    wait_for(&victim, "listening")?;
    let o = forge(two, &exe, "vxlan-pktinfo 192.168.7.1 4789 192.168.7.2 1");
    require(o.text.contains("sent"), o.text)?;
    let text = victim.finish().text;
    require(text.contains("nothing"), text)?;
    require(dropped(lab)?[0] == 10, format!("{:?}", dropped(lab)?))?;
    let o = lab.unirdma(&["status"]);
    require(o.text.contains("group default: dropped packets of its hosts: 10 not sealed"), o.text)?;
    let log = lab.log();
    require(log.contains("packets of group default come from 192.168.7.1 without the group's secret"), log)
}

/// Sets new secrets, on one host after the other, while data is sent and compared.
fn rotated(two: &TwoHosts) -> Check {
    while_they_play(two, "ibv_uc_pingpong", || {
        for n in 0..3 {
            two.give_secret(&format!("new-{n}"))?;
        }
        for lab in &two.labs {
            let o = lab.unirdma(&["group", "set", "default", "--forget-old"]);
            require(o.ok(), o.text)?;
        }
        Ok(())
    })?;
    let o = two.labs[0].unirdma(&["status"]);
    require(o.text.contains("are sealed with secret") && !o.text.contains("; takes"), o.text)
}

/// A worker and a supervisor that are restarted.
fn started_anew(two: &mut TwoHosts) -> Check {
    let (pid, _) = two.labs[0].worker("default")?;
    // SAFETY: the process is a worker of this lab; no memory is passed.
    unsafe { libc::kill(pid, libc::SIGKILL) };
    soon(|| two.labs[0].worker("default").is_ok_and(|w| w.0 != pid), "no worker")?;
    // The other host may need a second until it accepts that the session is over.
    std::thread::sleep(Duration::from_secs(2));
    two.wait_met()?;
    let works = |two: &TwoHosts| {
        both_end_well(two.pair("timeout 60 rping -s -C 5", "timeout 60 rping -c -a 10.0.0.1 -C 5 -V")?)
    };
    works(two)?;
    two.labs[0].kill_host();
    two.labs[0].start_again()?;
    two.wait_met()?;
    works(two)?;
    // The next supervisor must know the new secret, and give it to the next worker.
    two.give_secret("last")?;
    works(two)
}

/// Waits until a host reports that joined groups are sealed, and that no host lacks a secret.
fn wait_pair(lab: &Lab, pair: &str) -> Check {
    let sealed = format!("groups {pair}: packets between hosts are sealed");
    let is_so = || {
        let text = lab.unirdma(&["status"]).text;
        text.contains(&sealed) && !text.contains("has not shown that it has")
    };
    soon(is_so, &sealed).map_err(|e| format!("{e}: {}{}", lab.unirdma(&["status"]).text, lab.log()))
}

/// A group on each of two hosts, joined by a rule. The groups' own secrets do not suffice; a secret of the pair does.
fn joined(two: &TwoHosts) -> Check {
    let places = "10.0.0.1 red 192.168.7.1\n10.0.0.2 blue 192.168.7.2\n";
    let [red, blue] = [&two.labs[0], &two.labs[1]];
    for (lab, name, group, ip) in [(red, "a", "red", "10.0.0.1"), (blue, "b", "blue", "10.0.0.2")] {
        let o = lab.unirdma(&["vrnic", "rm", name]);
        require(o.ok(), o.text)?;
        group_add(lab, group)?;
        lab.vrnic(name, &["--group", group, "--ip", ip])?;
        set_of(lab, &[group, "--secret", &make(lab, "own.secret")?])?;
    }
    let rules = |rules: &str| (0..2).try_for_each(|h| write_rules(&two.labs[h], two.peers(h), places, rules));
    rules(BOTH)?;
    let rping = two.pair("timeout 4 rping -s -C 2", "timeout 3 rping -c -a 10.0.0.1 -C 2")?;
    require(!rping.1.ok(), rping.1.text)?;
    let o = red.unirdma(&["status"]);
    require(o.text.contains("groups red and blue: nothing passes between them"), o.text)?;
    let give = |name: &str| {
        let mut path = make(red, name)?;
        // The number of a secret is one byte. A secret with the number of another one of the group is refused.
        while let Err(e) = set_of(red, &["red", "--with", "blue", "--secret", &path]) {
            require(e.contains("make another one"), e)?;
            path = make(red, &format!("{path}.another"))?;
        }
        set_of(blue, &["blue", "--with", "red", "--secret", &path])?;
        wait_pair(red, "red and blue")?;
        wait_pair(blue, "blue and red")
    };
    give("pair.secret")?;
    for p in ["ibv_rc_pingpong -g 0", "ib_write_bw -R -F -n 500", "ibv_ud_pingpong -g 0"] {
        both_end_well(two.pair(&format!("timeout 30 {p}"), &format!("timeout 30 {p} 10.0.0.1"))?)?;
    }
    let there = idle(red, "a")?;
    let o = blue.spawn("b", &[], "ping -c 2 -W 2 10.0.0.1")?.finish();
    require(o.ok() && o.text.contains(" 0% packet loss"), o.text)?;
    drop(there);
    // The dropped packets may include some that a group sent before it had the pair's secret.
    let before = [dropped_of(red, "red")?, dropped_of(blue, "blue")?];
    let exe = compile(red, "forge", &[])?;
    while_they_play(two, "ibv_rc_pingpong", || {
        let qpn = present_qpn(blue, "b")?;
        // Attacks by red's tenant in its own network, by an attacker on red's host as a plain device, and by replay.
        let o = red.unirdma(&["exec", "--vrnic", "a", "--", &exe, "roce", "10.0.0.1", "10.0.0.2", &qpn.to_string()]);
        require(o.text.contains("sent") || o.text.contains("not permitted"), o.text)?;
        let o = forge(two, &exe, &format!("roce 192.168.7.1 192.168.7.2 {qpn}"));
        require(o.text.contains("sent"), o.text)?;
        let drops = || dropped_of(blue, "blue").unwrap_or_default();
        soon(|| drops()[0] >= before[1][0] + 5, "not counted").map_err(|e| format!("{e}: {:?}", drops()))?;
        let o = forge(two, &exe, "again veth0 192.168.7.1 1");
        require(o.text.contains("again") && !o.text.contains("sent 0"), o.text)?;
        soon(|| drops()[2] > 0, "no packet was found to be a copy").map_err(|e| format!("{e}: {:?}", drops()))?;
        // New secrets of the pair, while packets pass.
        for name in ["second", "third"] {
            give(name)?;
        }
        set_of(red, &["red", "--with", "blue", "--forget-old"])?;
        set_of(blue, &["blue", "--with", "red", "--forget-old"])
    })?;
    let now = [dropped_of(red, "red")?, dropped_of(blue, "blue")?];
    require(now[1][0] == before[1][0] + 5 && now[0][0] == before[0][0], format!("{before:?}, then {now:?}"))?;
    ends_with_its_rule((red, "a"), (blue, "b"), || rules(""))?;
    let o = red.unirdma(&["status"]);
    require(!o.text.contains("groups red and blue"), o.text)
}

pub(crate) fn tests(t: &mut Tests) {
    t.topic(&[packages::RUN, packages::CONNECTING, packages::NETWORK]);
    let abc = &Shared::new(abc);
    t.test("rules, two groups on one host with a secret of the two, and of their own", || {
        let (own, file, places) = three_groups()?;
        set_of(&own, &["red", "--secret", &make(&own, "red.secret")?])?;
        let path = make(&own, "pair.secret")?;
        set_of(&own, &["blue", "--with", "red", "--secret", &path])?;
        wait_pair(&own, "red and blue")?;
        wait_pair(&own, "blue and red")?;
        for p in ["ibv_rc_pingpong -g 0", "ib_write_bw -R -F -n 500", "ibv_ud_pingpong -g 0"] {
            both_end_well(own.pair(("a", p), ("b", &format!("{p} 10.0.0.1")), &[])?)?;
        }
        let there = idle(&own, "a")?;
        let o = own.spawn("b", &[], "ping -c 2 -W 2 10.0.0.1")?.finish();
        require(o.ok() && o.text.contains(" 0% packet loss"), o.text)?;
        drop(there);
        require(
            dropped_of(&own, "red")? == [0; 3] && dropped_of(&own, "blue")? == [0; 3],
            own.unirdma(&["status"]).text,
        )?;
        ends_with_its_rule((&own, "a"), (&own, "b"), || write_rules(&own, &file, &places, ""))?;
        let refused = |args: &[&str], why: &str| {
            let o = own.unirdma(&[&["group", "set"], args].concat());
            require(!o.ok() && o.text.contains(why) && o.text.trim().lines().count() == 1, o.text)
        };
        refused(&["red", "--with", "blue"], "nothing to set")?;
        refused(&["red", "--with", "blue", "--weight", "200"], "--with says whose secret")?;
        refused(&["red", "--with", "red", "--secret", &path], "another group than red")?;
        refused(&["red", "--with", "no/name", "--secret", &path], "no group name")?;
        refused(&["red", "--with", "green", "--forget-old"], "groups red and green have no secret")
    });
    t.need_root("network namespaces need root");
    t.test("two hosts with a secret of two groups that a rule joins", || {
        joined(&TwoHosts::start(Link { name: "j", ipv6: false, mtu: 1500, args: &[] })?)
    });
    for (what, name, ipv6, args) in
        [("over IPv6", "6", true, &[][..]), ("with --full-icrc", "f", false, &["--full-icrc"][..])]
    {
        t.test(format!("two hosts with a secret, {what}"), move || {
            let two = TwoHosts::start(Link { name, ipv6, mtu: 1500, args })?;
            two.give_secret("first")?;
            let there = idle(&two.labs[0], "a")?;
            let o = two.labs[1].spawn("b", &[], "ping -c 2 -W 2 10.0.0.1")?.finish();
            require(o.ok() && o.text.contains(" 0% packet loss"), o.text)?;
            drop(there);
            for p in ["ib_write_bw -n 500", "ib_send_bw -c UD -n 500", "ib_write_bw -R -F -n 500"] {
                let p = format!("timeout 30 {p}");
                both_end_well(two.pair(&p, &format!("{p} 10.0.0.1"))?)?;
            }
            let drops = two.labs.iter().map(dropped).collect::<Result<Vec<_>>>()?;
            require(drops == [[0; 3]; 2], format!("dropped: {drops:?}"))
        });
    }
    t.test("two hosts with a secret: programs, forged and repeated packets, new secrets, new workers", || {
        let mut two = TwoHosts::start(Link { name: "k", ipv6: false, mtu: 1500, args: &[] })?;
        two.give_secret("first")?;
        programs(&two)?;
        hostile(&two)?;
        rotated(&two)?;
        started_anew(&mut two)
    });
    t.test("two hosts of which one has no secret: nothing passes, and both logs say why", || {
        let two = TwoHosts::start(Link { name: "o", ipv6: false, mtu: 1500, args: &[] })?;
        set(&two.labs[1], &make(&two.labs[1], "secret")?)?;
        let (server, client) = two.pair("timeout 5 ibv_ud_pingpong -g 0", "timeout 3 ibv_ud_pingpong -g 0 10.0.0.1")?;
        require(!server.ok() && !client.ok(), "frames passed")?;
        let rping = two.pair("timeout 6 rping -s -C 5", "timeout 5 rping -c -a 10.0.0.1 -C 5")?;
        require(!rping.1.ok(), rping.1.text)?;
        let says =
            |lab: &Lab, text: &str| soon(|| lab.log().contains(text), text).map_err(|e| format!("{e}: {}", lab.log()));
        says(&two.labs[1], "packets of group default come from 192.168.7.1 without the group's secret")?;
        says(&two.labs[0], "192.168.7.2 has a secret of group default and this host has none")?;
        let o = two.labs[1].unirdma(&["status"]);
        require(o.text.contains("192.168.7.1 has not shown that it has a secret of the group"), o.text)?;
        set(&two.labs[1], "none")?;
        both_end_well(two.pair("timeout 60 rping -s -C 5", "timeout 60 rping -c -a 10.0.0.1 -C 5 -V")?)
    });
    t.need_no_root();
    t.on(abc, "wrong_input_secret", |lab| {
        let path = make(lab, "open.secret")?;
        let refused = |args: &[&str], why: &str| {
            let o = lab.unirdma(args);
            require(!o.ok() && o.text.contains(why) && o.text.trim().lines().count() == 1, o.text)
        };
        refused(&["secret", &path], "exists")?;
        refused(&["group", "set", "default"], "nothing to set")?;
        refused(&["group", "set", "default", "--forget-old"], "group default has no secret")?;
        refused(&["group", "set", "default", "--secret", "/nowhere"], "/nowhere: No such file")?;
        refused(&["group", "set", "default", "--secret", &path], "this one serves no others")?;
        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o644))
            .map_err(|e| e.to_string())?;
        refused(&["group", "set", "default", "--secret", &path], "chmod 600")?;
        refused(&["group", "add", "blue", "--secret", &path], "chmod 600")?;
        require(!lab.unirdma(&["group", "ls"]).text.contains("blue"), "the group was made all the same")
    });
}
