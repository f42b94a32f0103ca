//! Rules between groups: allowed and forbidden connections, on one host and between two, with programs that do not know
//! the rules.

use std::path::Path;
use std::time::{Duration, Instant};

use crate::support::*;

/// Time within which a removed rule ends its connections. Programs take a moment to notice.
const SECOND: Duration = Duration::from_secs(1);
pub(crate) const BOTH: &str = "rule allow from group:red to group:blue both\n";

/// Writes a file of rules, and waits until the virtual layer has read them.
pub(crate) fn write_rules(lab: &Lab, file: impl AsRef<Path>, places: &str, rules: &str) -> Check {
    std::fs::write(file, format!("{places}{rules}")).map_err(|e| e.to_string())?;
    let expected = if rules.is_empty() { "no rules" } else { "allow from" };
    soon(|| lab.unirdma(&["rule", "ls"]).text.contains(expected), expected)
}

pub(crate) fn group_add(lab: &Lab, group: &str) -> Check {
    let o = lab.unirdma(&["group", "add", group]);
    require(o.ok(), o.text)
}

/// Starts a virtual layer with a vRNIC in each of the groups red, blue and green. Returns it, the file with its rules,
/// and the other lines in that file.
pub(crate) fn three_groups() -> Result<(Lab, Peers, String)> {
    let places: String = [("10.0.0.1", "red"), ("10.0.0.2", "blue"), ("10.0.0.3", "green")]
        .map(|(ip, group)| format!("{ip} {group} 127.0.8.1\n"))
        .concat();
    let file = Peers::new(&format!("{places}{BOTH}"))?;
    let own = file.start(None, &["--address", "127.0.8.1"])?;
    for (name, group, ip) in [("a", "red", "10.0.0.1"), ("b", "blue", "10.0.0.2"), ("c", "green", "10.0.0.3")] {
        group_add(&own, group)?;
        own.vrnic(name, &["--group", group, "--ip", ip])?;
    }
    Ok((own, file, places))
}

/// Runs a long `ib_write_bw` from a container of `from` to a container of `to`. Removes the rule meanwhile, and checks
/// that the programs end.
pub(crate) fn ends_with_its_rule(to: (&Lab, &str), from: (&Lab, &str), take_away: impl FnOnce() -> Check) -> Check {
    let long = "ib_write_bw -F -D 60";
    let mut server = to.0.spawn(to.1, &[], long)?;
    require(server.wait_listening(|| false), "the server does not listen")?;
    let mut client = from.0.spawn(from.1, &[], &format!("{long} 10.0.0.1"))?;
    let moves = || from.0.unirdma(&["vrnic", "show", from.1]).text.contains("RTS");
    soon(moves, "the client does not connect")?;
    std::thread::sleep(SECOND);
    require(!client.has_ended(), client.text())?;
    take_away()?;
    let begin = Instant::now();
    soon(|| client.has_ended(), "the client goes on without a rule")?;
    let (took, text) = (begin.elapsed(), client.finish().text);
    // IBV_WC_RETRY_EXC_ERR
    require(text.contains("status 12"), text)?;
    require(took < SECOND, format!("the client ended after {took:?}"))?;
    let o = from.0.unirdma(&["vrnic", "show", from.1]);
    require(!o.text.contains("refused by rules        0 conn"), o.text)
}

pub(crate) fn tests(t: &mut Tests) {
    t.topic(&[packages::RUN, packages::CONNECTING, packages::NETWORK]);
    t.test("rules, two groups on one host talk, the third one stays outside", || {
        let (own, _file, _) = three_groups()?;
        for p in ["ibv_rc_pingpong -g 0", "ib_write_bw -R -F -n 500", "ibv_ud_pingpong -g 0", "ibv_uc_pingpong -g 0"] {
            both_end_well(own.pair(("a", p), ("b", &format!("{p} 10.0.0.1")), &[])?)?;
        }
        let ping =
            |from: &str, to: &str| Ok::<_, String>(own.spawn(from, &[], &format!("ping -c 2 -W 2 {to}"))?.finish());
        let there = idle(&own, "a")?;
        let o = ping("b", "10.0.0.1")?;
        require(o.ok() && o.text.contains(" 0% packet loss"), o.text)?;
        let o = ping("c", "10.0.0.1")?;
        require(!o.ok() && o.text.contains("100% packet loss"), o.text)?;
        drop(there);
        let o = own.spawn("c", &[], "timeout 20 rping -c -a 10.0.0.1 -C 1")?.finish();
        require(!o.ok(), o.text)
    });
    t.test("rules, one way: who may begin is answered, and nobody else begins", || {
        let (own, file, places) = three_groups()?;
        write_rules(&own, &file, &places, "rule allow from group:blue to group:red\n")?;
        // A vRNIC that must not be reached does not answer, although it exists. The vRNIC that asked is answered.
        for (from, to, ip, answered) in [("a", "b", "10.0.0.2", false), ("b", "a", "10.0.0.1", true)] {
            let _there = idle(&own, to)?;
            let o = own.spawn(from, &[], &format!("ping -c 2 -W 2 {ip}"))?.finish();
            require(o.ok() == answered, o.text)?;
        }
        let p = "ib_write_bw -R -F -n 500";
        both_end_well(own.pair(("a", p), ("b", &format!("{p} 10.0.0.1")), &[])?)?;
        let server = own.spawn("b", &[], "rping -s -C 1")?;
        let o = own.spawn("a", &[], "timeout 20 rping -c -a 10.0.0.2 -C 1")?.finish();
        drop(server);
        require(!o.ok(), o.text)
    });
    t.test("rules, a rule that goes ends ib_write_bw within a second, on one host", || {
        let (own, file, places) = three_groups()?;
        ends_with_its_rule((&own, "a"), (&own, "b"), || write_rules(&own, &file, &places, ""))
    });
    t.test("wrong_input_rules", || {
        let (own, file, places) = three_groups()?;
        for (bad, says) in [
            ("rule allow from red to group:blue", "line 4: `red` selects nobody"),
            ("rule allow group:red group:blue", "line 4: a rule reads `allow|deny from"),
            ("rule deny from group:red to group:blue priority 70000", "`70000` is no priority"),
        ] {
            std::fs::write(&file, format!("{places}{bad}\n")).map_err(|e| e.to_string())?;
            soon(|| own.unirdma(&["status"]).text.contains(says), says)?;
            let o = own.unirdma(&["rule", "ls"]);
            require(o.text.contains("allow from group:red to group:blue both priority 0"), o.text)?;
        }
        Ok(())
    });
    t.need_root("network namespaces need root");
    t.test("rules, two groups on two hosts talk until the rule goes", || {
        let two = TwoHosts::start(Link { name: "r", ipv6: false, mtu: 1500, args: &[] })?;
        let places = "10.0.0.1 red 192.168.7.1\n10.0.0.2 blue 192.168.7.2\n";
        let rules = |rules: &str| (0..2).try_for_each(|h| write_rules(&two.labs[h], two.peers(h), places, rules));
        for (lab, name, group, ip) in [(&two.labs[0], "a", "red", "10.0.0.1"), (&two.labs[1], "b", "blue", "10.0.0.2")]
        {
            let o = lab.unirdma(&["vrnic", "rm", name]);
            require(o.ok(), o.text)?;
            group_add(lab, group)?;
            lab.vrnic(name, &["--group", group, "--ip", ip])?;
        }
        rules(BOTH)?;
        for p in ["ibv_rc_pingpong -g 0", "ib_write_bw -R -F -n 500", "ibv_ud_pingpong -g 0"] {
            both_end_well(two.pair(p, &format!("{p} 10.0.0.1"))?)?;
        }
        ends_with_its_rule((&two.labs[0], "a"), (&two.labs[1], "b"), || rules(""))?;
        let o = two.labs[1].spawn("b", &[], "ping -c 1 -W 1 10.0.0.1")?.finish();
        require(!o.ok(), o.text)
    });
}
