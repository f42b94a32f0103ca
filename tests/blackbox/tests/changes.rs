//! Changes while programs run: links and addresses by an administrator, and attributes of working QPs by programs.

use crate::support::*;

/// Runs `unirdma`, which must succeed.
fn admin(lab: &Lab, args: &[&str]) -> Check {
    let o = lab.unirdma(args);
    require(o.ok(), format!("unirdma {}: {}", args.join(" "), o.text))
}

fn rping(lab: &Lab, address: &str) -> Check {
    let client = format!("timeout 30 rping -c -a {address} -C 3 -V");
    both_end_well(lab.pair(("a", &format!("timeout 30 rping -s -a {address} -C 3")), ("b", &client), &[])?)
}

pub(crate) fn tests(t: &mut Tests) {
    t.topic(&[packages::RUN, packages::CONNECTING]);
    t.test("queue sizes, rate limits, shared targets (C program)", || {
        let lab = &abc()?;
        let exe = compile(lab, "changes", &["-libverbs"])?;
        for way in ["", "env UNIRDMA_MR=copy "] {
            let o = lab.spawn("a", &[], &format!("timeout 60 {way}{exe}"))?.finish();
            require(o.ok() && o.text.contains("all changes made"), o.text)?;
        }
        Ok(())
    });
    t.test("vrnic link, vrnic ip: programs hear of it", || {
        let lab = &abc()?;
        let watch = lab.spawn("a", &[], "timeout 30 stdbuf -oL ibv_asyncwatch")?;
        wait_for(&watch, "async event FD")?;
        admin(lab, &["vrnic", "link", "a", "down"])?;
        wait_for(&watch, "IBV_EVENT_PORT_ERR (10), port 1")?;
        let o = lab.unirdma(&["vrnic", "show", "a", "--json"]);
        require(o.text.contains("\"up\": false"), o.text)?;
        admin(lab, &["vrnic", "link", "a", "up"])?;
        wait_for(&watch, "IBV_EVENT_PORT_ACTIVE (9), port 1")?;
        admin(lab, &["vrnic", "ip", "add", "a", "fd00::7"])?;
        wait_for(&watch, "IBV_EVENT_GID_CHANGE (18), port 1")?;
        admin(lab, &["vrnic", "ip", "rm", "a", "fd00::7"])
    });
    t.test("vrnic link: a port that is down, and what runs over it", || {
        let lab = &abc()?;
        let server = serve(lab, "a", "timeout 60 ib_write_bw -D 5 -f 1")?;
        let client = lab.spawn("b", &[], "timeout 60 ib_write_bw -D 5 -f 1 10.0.0.1")?;
        goes_on(lab, "a")?;
        // The link is down for a shorter time than the retries of perftest's QPs and of its TCP connection last.
        admin(lab, &["vrnic", "link", "b", "down"])?;
        let shown = lab.unirdma(&["vrnic", "ls"]);
        std::thread::sleep(Duration::from_millis(150));
        admin(lab, &["vrnic", "link", "b", "up"])?;
        require(shown.text.contains("down"), shown.text)?;
        both_end_well((server.finish(), client.finish()))?;
        admin(lab, &["vrnic", "link", "a", "down"])?;
        let o = lab.spawn("a", &[], "ibv_devinfo")?.finish();
        let unreachable = lab.spawn("b", &[], "timeout 3 rping -c -a 10.0.0.1 -C 1")?.finish();
        admin(lab, &["vrnic", "link", "a", "up"])?;
        require(o.text.contains("PORT_DOWN"), o.text)?;
        require(!unreachable.ok(), unreachable.text)?;
        rping(lab, "10.0.0.1")
    });
    t.test("vrnic wait: a container, a listening program, and their end", || {
        let lab = &abc()?;
        let waits = |args: &[&str]| lab.start_unirdma(&[&["vrnic", "wait"], args].concat());
        let reached = waits(&["a", "--attached", "--container", "--open", "--listening"])?;
        let o = lab.unirdma(&["vrnic", "wait", "a", "--listening", "--timeout", "0"]);
        require(o.code == Some(3) && o.text.contains("vRNIC a, after 0ns: no program listens on it"), o.text)?;
        let server = lab.spawn("a", &[], "timeout 60 rping -s -a 10.0.0.1 -C 3")?;
        let o = reached.finish();
        require(o.ok() && o.text.is_empty(), o.text)?;
        let o = lab.unirdma(&["exec", "--vrnic", "a", "--", "true"]);
        require(o.ok(), o.text)?;
        let free = waits(&["a", "b", "--free"])?;
        let client = lab.spawn("b", &[], "timeout 30 rping -c -a 10.0.0.1 -C 3")?;
        both_end_well((server.finish(), client.finish()))?;
        let o = free.finish();
        require(o.ok(), o.text)
    });
    t.test("vrnic ip: a new address is used, and one that is taken away is not", || {
        let lab = &abc()?;
        admin(lab, &["vrnic", "ip", "add", "a", "fd00::a:7/64"])?;
        let o = lab.spawn("a", &[], "ibv_devinfo -v")?.finish();
        let used = rping(lab, "fd00::a:7");
        admin(lab, &["vrnic", "ip", "rm", "a", "fd00::a:7"])?;
        require(o.text.contains("fd00::a:7"), o.text)?;
        used?;
        let o = lab.spawn("a", &[], "timeout 5 rping -s -a fd00::a:7 -C 1")?.finish();
        require(!o.ok() && o.text.contains("No such device"), o.text)?;
        let o = lab.spawn("b", &[], "timeout 5 rping -c -a fd00::a:7 -C 1")?.finish();
        require(!o.ok() && o.text.contains("RDMA_CM_EVENT_ADDR_ERROR, error -110"), o.text)
    });
    t.test("a vRNIC that is removed is a removed device to rdma_cm", || {
        let lab = &abc()?;
        admin(lab, &["vrnic", "add", "gone", "--ip", "10.0.0.77"])?;
        let server = serve(lab, "gone", "timeout 30 rping -s -C 100000000")?;
        let mut client = lab.spawn("b", &[], "timeout 30 rping -c -a 10.0.0.77 -C 100000000")?;
        goes_on(lab, "gone")?;
        admin(lab, &["vrnic", "rm", "gone", "--force"])?;
        let o = server.finish();
        client.kill();
        client.finish();
        require(o.code.is_some_and(|c| c != 124) && o.text.contains("cma detected device removal"), o.text)
    });
    let abc = &Shared::new(abc);
    let cases: &[(&str, &[&str], &str)] = &[
        ("an_address_of_another_vrnic", &["vrnic", "ip", "add", "a", "10.0.0.2"], "belongs to vRNIC b"),
        ("a_second_IPv4_address", &["vrnic", "ip", "add", "a", "10.0.0.77"], "at most one IPv4 address"),
        ("a_link_local_address", &["vrnic", "ip", "add", "a", "fe80::5"], "has one of those by itself"),
        ("an_address_that_it_does_not_have", &["vrnic", "ip", "rm", "a", "10.9.9.9"], "unirdma vrnic show a"),
        ("the_only_address", &["vrnic", "ip", "rm", "c", "10.0.0.1"], "add another one first"),
        ("the_link_of_nobody", &["vrnic", "link", "z", "down"], "there is no vRNIC z"),
    ];
    for (name, args, text) in cases {
        t.on(abc, format!("wrong_input_{name}"), move |lab| refused(&lab.unirdma(args), text));
    }
}
