//! Attacks over the network: frames from a hostile container's eth0, packets from a hostile user of another host, and
//! hosts that disagree on the numbers of groups.

use std::process::Command;

use attack::checks::{OWN_PORT, RANDOM_PORT, arp_spoof, attacked, vxlan_injection};

use crate::support::*;

/// Waits until the output of `unirdma` contains a text.
fn wait_said(lab: &Lab, args: &[&str], text: &str) -> Check {
    // Long lines are wrapped between words.
    let said = || lab.unirdma(args).text.split_whitespace().collect::<Vec<_>>().join(" ");
    soon(|| said().contains(text), text).map_err(|e| format!("expected `{e}` in: {}", said()))
}

/// The tables of a host's packet filter.
fn tables(two: &TwoHosts, host: usize) -> Result<String> {
    let o = Output::of(Command::new("ip").args(["netns", "exec", two.netns(host), "nft", "list", "tables"]));
    if o.ok() { Ok(o.text) } else { Err(o.text) }
}

pub(crate) fn tests(t: &mut Tests) {
    t.topic(&[packages::RUN, packages::NETWORK]);
    t.test("a container answers ARP for itself only, unless it may spoof", || arp_spoof(&abc()?));
    t.need_root("network namespaces need root");
    t.test("two hosts, VXLAN from another port than 4789 is not believed", vxlan_injection);
    t.test("two hosts, --firewall: nobody else sends from the virtual layer's address to its ports", || {
        let mut two = TwoHosts::start(Link { name: "w", ipv6: false, mtu: 1500, args: &["--firewall"] })?;
        let forge = compile(&two.labs[1], "forge", &[])?;
        for attack in [RANDOM_PORT, OWN_PORT] {
            let text = attacked(&two, &forge, attack)?;
            require(text.contains("nothing"), format!("{attack}: {text}"))?;
        }
        let o = two.labs[1].unirdma(&["status"]);
        require(!o.text.contains("tunnel:"), format!("something arrived: {}", o.text))?;
        // RDMA, datagrams inside VXLAN, connection management and TCP of the containers still work.
        for p in ["ib_write_bw -n 500", "ib_send_bw -c UD -n 500", "ib_write_bw -R -F -n 500"] {
            let p = format!("timeout 60 {p}");
            both_end_well(two.pair(&p, &format!("{p} 10.0.0.1"))?)?;
        }
        require(tables(&two, 0)?.contains("unirdma/"), tables(&two, 0)?)?;
        two.labs[0].stop_host();
        require(tables(&two, 0)?.is_empty(), tables(&two, 0)?)?;
        // A killed virtual layer leaves its table. The next virtual layer in the same directory removes it.
        let peers = two.peers(0).display().to_string();
        let args = ["host", "--address", "192.168.7.1", "--peers", &peers];
        let mut killed = two.labs[0].start_unirdma(&[&args[..], &["--firewall"]].concat())?;
        wait_said(&two.labs[0], &["status"], "nft table inet unirdma/")?;
        killed.kill();
        killed.finish();
        require(tables(&two, 0)?.contains("unirdma/"), tables(&two, 0)?)?;
        let next = two.labs[0].start_unirdma(&args)?;
        let gone = wait_said(&two.labs[0], &["status"], "firewall: none");
        let left = tables(&two, 0);
        next.interrupt();
        next.finish();
        gone?;
        require(left.as_ref().is_ok_and(String::is_empty), left.unwrap_or_else(|e| e))
    });
    t.test("wrong_input_firewall_without_privilege", || {
        let lab = Lab::start(None)?;
        let peers = lab.dir.join("none.peers");
        std::fs::write(&peers, "10.0.0.2 default 127.0.9.2\n").map_err(|e| e.to_string())?;
        let peers = peers.display().to_string();
        let args = ["--address", "127.0.9.1", "--peers", &peers, "--firewall"];
        match Lab::start_in(Some(own_user()), None, &args) {
            Ok(_) => return Err("the virtual layer started".into()),
            Err(e) => require(e.contains("--firewall marks what this host sends") && e.contains("run as root"), e)?,
        }
        let o = lab.unirdma(&["host", "--address", "127.0.9.1", "--peers", &peers, "--firewall=print"]);
        require(o.ok() && o.text.contains("ip saddr { 127.0.9.1 } udp dport { 4789, 4791 } drop"), o.text)
    });
    t.test("two hosts that disagree on a group's VNI are told, and nothing passes between them", || {
        let two = TwoHosts::start(Link { name: "v", ipv6: false, mtu: 1500, args: &[] })?;
        let p = "timeout 20 ib_send_bw -c UD -n 500";
        let works = || both_end_well(two.pair(p, &format!("{p} 10.0.0.1"))?);
        works()?;
        let o = two.labs[0].unirdma(&["group", "ls", "--json"]);
        require(o.text.contains("\"vni\": 1"), o.text)?;
        let append = |host: usize| {
            let mut text = std::fs::read_to_string(two.peers(host)).map_err(|e| e.to_string())?;
            text += "group default vni 7\n";
            std::fs::write(two.peers(host), text).map_err(|e| e.to_string())
        };
        append(1)?;
        wait_said(
            &two.labs[0],
            &["status"],
            "group default has VNI 1 at 192.168.7.1, this host, and 7 at 192.168.7.2",
        )?;
        wait_said(
            &two.labs[1],
            &["status"],
            "group default has VNI 7 at 192.168.7.2, this host, and 1 at 192.168.7.1",
        )?;
        let (server, client) = two.pair("timeout 5 ibv_ud_pingpong -g 0", "timeout 3 ibv_ud_pingpong -g 0 10.0.0.1")?;
        require(!server.ok() && !client.ok(), "frames passed")?;
        append(0)?;
        wait_said(&two.labs[0], &["group", "ls"], "7")?;
        for lab in &two.labs {
            soon(|| !lab.unirdma(&["status"]).text.contains("has VNI"), "they still disagree")?;
        }
        works()
    });
}
