//! Two hosts joined by a network: all programs, and bad networks.

use std::process::Command;

use harness::reruns;

use super::captures::{CAPTURED, capture};
use super::connecting::{CONNECTING, multicast, ucx, udpong};
use super::programs::programs;
use crate::support::*;

/// Number of datagrams that the two hosts have lost, as UD allows: because a socket or a receive queue was full.
fn lost_datagrams(two: &TwoHosts) -> u64 {
    let sockets = |host: usize| {
        let tables = ["netns", "exec", two.netns(host), "cat", "/proc/net/udp", "/proc/net/udp6"];
        let text = Output::of(Command::new("ip").args(tables)).text;
        text.lines().filter_map(|l| l.split_whitespace().next_back()?.parse::<u64>().ok()).sum::<u64>()
    };
    let receives = |(lab, name): (&Lab, &str)| {
        let text = lab.unirdma(&["vrnic", "show", name]).text;
        let line = text.lines().find_map(|l| l.strip_prefix("dropped (UC, UD)"));
        line.and_then(|l| l.split(',').next()?.trim().parse::<u64>().ok()).unwrap_or(0)
    };
    sockets(0) + sockets(1) + two.labs.iter().zip(["a", "b"]).map(receives).sum::<u64>()
}

pub(crate) fn tests(t: &mut Tests) {
    t.topic(&[packages::RUN, packages::CONNECTING, packages::CAPTURE]);
    t.need_root("network namespaces need root");
    let links = [
        ("IPv4, MTU 1024", Link { name: "a", ipv6: false, mtu: 1500, args: &[] }),
        ("IPv6, MTU 4096", Link { name: "b", ipv6: true, mtu: 9000, args: &[] }),
    ];
    for (title, link) in links {
        let two = &Shared::new(move || TwoHosts::start(link));
        // Messages of all sizes (-a) go over the link with the small MTU, where they have the more packets.
        for p in programs().into_iter().filter(|p| !link.ipv6 || !p.contains(" -a ")) {
            t.on(two, format!("two hosts, {title}: {p}"), move |two| {
                if !is_unreliable(&p) {
                    return both_end_well(two.pair(&p, &format!("{p} 10.0.0.1"))?);
                }
                let p = format!("timeout 60 {p}");
                let run = || both_end_well(two.pair(&p, &format!("{p} 10.0.0.1"))?);
                if is_of_datagrams(&p) { reruns::of_lost_packets(|| Some(lost_datagrams(two)), run) } else { run() }
            });
        }
        for (server, client) in CONNECTING {
            t.on(two, format!("two hosts, {title}: {server}"), move |two| {
                both_end_well(two.pair(server, &client.replace("ADDR", "10.0.0.1"))?)
            });
        }
        t.on(two, format!("two hosts, {title}: udpong"), move |two| udpong(&two.labs[0], &two.labs[1], "10.0.0.1"));
        t.on(two, format!("two hosts, {title}: multicast"), move |two| multicast(&two.labs[0], &two.labs[1]));
        for transport in ["rc", "ud"] {
            t.on(two, format!("two hosts, {title}: UCX over {transport}"), move |two| {
                ucx(&two.labs[0], &two.labs[1], transport, "tag_bw")
            });
        }
        t.on(two, format!("two hosts, {title}: tshark reads a capture"), move |two| {
            let run = |p: &str| both_end_well(two.pair(p, &format!("{p} 10.0.0.1"))?);
            let count = capture(&two.labs[0], || CAPTURED.iter().try_for_each(|p| run(p)))?;
            require(count > 20 * CAPTURED.len(), format!("{count} packets only"))
        });
        t.on(two, format!("two hosts, {title}: the counters say that it went over the network"), move |two| {
            let p = "ibv_rc_pingpong -g 0 -n 100";
            both_end_well(two.pair(p, &format!("{p} 10.0.0.1"))?)?;
            clean_packets(&two.labs[0])
        });
    }
    t.test("two hosts, --full-icrc", || {
        let two = TwoHosts::start(Link { name: "f", ipv6: false, mtu: 9000, args: &["--full-icrc"] })?;
        for p in ["ibv_rc_pingpong -g 0 -c -s 100000 -n 100", "ib_write_bw -q 4 -n 500"] {
            both_end_well(two.pair(p, &format!("{p} 10.0.0.1"))?)?;
        }
        clean_packets(&two.labs[0])
    });
    t.test("two hosts, 1 % of the packets lost, doubled and reordered: 10 MB arrive", || {
        let two = TwoHosts::start(Link { name: "c", ipv6: false, mtu: 1500, args: &["--faults", "1"] })?;
        let p = "ibv_rc_pingpong -g 0 -c -s 100000 -n 100";
        both_end_well(two.pair(p, &format!("{p} 10.0.0.1"))?)?;
        for p in ["ib_read_bw -n 50", "ib_write_bw -n 100", "ib_atomic_bw -n 500"] {
            both_end_well(two.pair(p, &format!("{p} 10.0.0.1"))?)?;
        }
        let o = two.labs[0].unirdma(&["vrnic", "show", "a", "--json"]);
        let seen = !o.text.contains("\"retransmitted_pkts\": 0") && !o.text.contains("\"out_of_seq_request\": 0");
        require(seen, o.text)
    });
    t.test("two hosts, a host that is gone is IBV_WC_RETRY_EXC_ERR", || {
        let mut two = TwoHosts::start(Link { name: "d", ipv6: false, mtu: 1500, args: &[] })?;
        let server = serve(&two.labs[0], "a", "ib_write_bw -D 20 -f 1")?;
        let client = two.labs[1].spawn("b", &[], "ib_write_bw -D 20 -f 1 10.0.0.1")?;
        goes_on(&two.labs[0], "a")?;
        two.labs[0].stop_host();
        let c = client.finish();
        drop(server);
        require(c.text.contains("status 12"), format!("{:?}: {}", c.code, c.text))
    });
}
