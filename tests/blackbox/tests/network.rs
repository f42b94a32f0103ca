//! Attacks over the network: frames from a hostile container's eth0, packets from a hostile user of another host, and
//! hosts that disagree on the numbers of groups.

use std::process::Command;

use super::*;

/// Waits until the output of `unirdma` contains a text.
fn wait_said(lab: &Lab, args: &[&str], text: &str) -> Check {
    let said = || lab.unirdma(args).text;
    wait_until(|| said().contains(text), text).map_err(|e| format!("expected `{e}` in: {}", said()))
}

/// A container answers ARP for the address of vRNIC b, which vRNIC a resolves.
pub(crate) fn arp_spoof(lab: &Lab) -> Check {
    let forge = compile(lab, "forge", &[])?;
    lab.vrnic("evil", &["--ip", "10.0.0.66"])?;
    let (own, others) = (said(lab, "b", "mac")?, said(lab, "evil", "mac")?);
    // The MAC address that vRNIC a resolves while `evil` claims b's address.
    let believed = || {
        let b = lab.spawn("b", &[], "sleep 30")?;
        let a = lab.spawn("a", &[], &format!("{forge} neighbour 10.0.0.2 5"))?;
        wait_for(&a, &format!("10.0.0.2 is at {own}"))?;
        let evil = lab.spawn("evil", &[], &format!("{forge} arp 10.0.0.2 30"))?.finish();
        require(evil.ok(), evil.text)?;
        let text = a.finish().text;
        drop(b);
        require(text.contains(&own), text.clone())?;
        Ok::<_, String>(text)
    };
    let text = believed()?;
    require(!text.contains(&others), text)?;
    let o = lab.unirdma(&["vrnic", "show", "evil"]);
    require(o.text.contains("refused: 30 with ARP or ND of another address"), o.text)?;
    // The same attack by a router succeeds, which shows that the test can detect it.
    let o = lab.unirdma(&["vrnic", "set", "evil", "--allow-spoof", "on"]);
    require(o.ok() && o.text.contains("may send with any IP address"), o.text)?;
    let text = believed()?;
    require(text.contains(&others), text)?;
    let o = lab.unirdma(&["vrnic", "rm", "evil", "--force"]);
    require(o.ok(), o.text)
}

/// Tests on one host.
pub(super) fn spoofing(s: &mut Suite<'_>) {
    s.check("a container answers ARP for itself only, unless it may spoof", arp_spoof);
}

/// Runs a program on a host as a user without privileges.
fn as_nobody(two: &TwoHosts, host: usize, program: &str) -> Output {
    let id = own_user();
    let mut c = Command::new("ip");
    c.args(["netns", "exec", two.netns(host), "setpriv"]);
    c.args([format!("--reuid={id}"), format!("--regid={id}"), "--clear-groups".into()]);
    Output::of(c.args(program.split_whitespace()))
}

/// Runs an attack as a user of the first host. Returns the packets that arrive in the container of the second host.
fn attacked(two: &TwoHosts, forge: &str, attack: &str) -> Result<String> {
    let victim = two.labs[1].spawn("b", &[], &format!("{forge} listen 2"))?;
    wait_for(&victim, "listening")?;
    let o = as_nobody(two, 0, &format!("{forge} {attack}"));
    require(o.text.contains("sent as user 65534"), o.text)?;
    Ok(victim.finish().text)
}

/// The tables of a host's packet filter.
fn tables(two: &TwoHosts, host: usize) -> Result<String> {
    let o = Output::of(Command::new("ip").args(["netns", "exec", two.netns(host), "nft", "list", "tables"]));
    if o.ok() { Ok(o.text) } else { Err(o.text) }
}

const RANDOM_PORT: &str = "vxlan 192.168.7.1 0 192.168.7.2 1";
const OWN_PORT: &str = "vxlan-pktinfo 192.168.7.1 4789 192.168.7.2 1";

/// VXLAN frames from an ordinary user of a peer host, between two hosts of their own. Needs root.
pub(crate) fn vxlan_injection(_: &Lab) -> Check {
    let two = TwoHosts::start(Link { name: "n", ipv6: false, mtu: 1500, args: &[] })?;
    let forge = compile(&two.labs[1], "forge", &[])?;
    let text = attacked(&two, &forge, RANDOM_PORT)?;
    require(text.contains("nothing"), text)?;
    let o = two.labs[1].unirdma(&["status"]);
    require(o.text.contains("dropped 5 not from a peer's port") && o.text.contains("firewall: none"), o.text)?;
    // The attack that remains without the firewall: a socket may send from an address that it is not bound to.
    let text = attacked(&two, &forge, OWN_PORT)?;
    require(text.contains("arrived"), format!("docs/security.md says that this arrives: {text}"))
}

/// Tests between two hosts.
pub(super) fn between_hosts(s: &mut Suite<'_>) {
    s.check("two hosts, VXLAN from another port than 4789 is not believed", vxlan_injection);
    s.check("two hosts, --firewall: nobody else sends from the virtual layer's address to its ports", |_| {
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
    s.check("wrong_input_firewall_without_privilege", |lab| {
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
    s.check("two hosts that disagree on a group's VNI are told, and nothing passes between them", |_| {
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
            wait_until(|| !lab.unirdma(&["status"]).text.contains("has VNI"), "they still disagree")?;
        }
        works()
    });
}
