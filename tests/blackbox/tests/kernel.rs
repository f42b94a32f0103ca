//! Debian's programs on a vRNIC with their peers on the Linux kernel's own soft RNIC (rxe) in a virtual machine, in
//! both directions.

use harness::reruns;
use harness::vm::{OURS, OURS6, RXE, RXE6, Rxe};

use super::connecting::CONNECTING;
use super::secret;
use crate::support::*;

/// Programs of ours and of the guest, which are each other's peers.
fn programs() -> Vec<(String, String)> {
    let mut programs: Vec<(String, String)> = ["rc", "uc", "ud"]
        .iter()
        .map(|t| format!("ibv_{t}_pingpong -c -n 200"))
        .map(|p| (format!("{p} -g 0"), format!("{p} -d rxe0 -g 1")))
        .collect();
    programs.push(("ibv_srq_pingpong -c -n 200 -g 0".into(), "ibv_srq_pingpong -c -n 200 -d rxe0 -g 1".into()));
    let measured = [
        "ib_write_bw -s 65536",
        "ib_read_bw -s 65536",
        "ib_send_bw -s 65536",
        "ib_atomic_bw",
        "ib_send_bw --use-srq -s 65536",
        "ib_send_lat -c UD",
    ];
    for p in measured {
        programs.push((format!("{p} -F -n 200"), format!("{p} -F -n 200 -d rxe0 -x 1")));
    }
    for p in ["ibv_rc_pingpong -c -n 200", "ibv_ud_pingpong -c -n 200"] {
        programs.push((format!("{p} -g 1"), format!("{p} -d rxe0 -g 2")));
    }
    let p = "ib_write_bw -s 65536 -F -n 200";
    programs.push((format!("{p} -x 1"), format!("{p} -d rxe0 -x 2")));
    programs
}

/// Runs some programs, in both directions.
fn both_ways(g: &Rxe, programs: usize) -> Check {
    for (ours, guests) in self::programs().iter().filter(|p| !is_unreliable(&p.0)).take(programs) {
        both_end_well(g.pair(true, ours, guests)?)?;
        both_end_well(g.pair(false, ours, guests)?)?;
    }
    clean_packets(g.lab()?)
}

pub(crate) fn tests(t: &mut Tests) {
    t.topic(&[
        packages::RUN,
        packages::CONNECTING,
        packages::PYVERBS,
        packages::RELEASES,
        packages::NETWORK,
        packages::GUESTS,
    ]);
    t.need_root("network namespaces need root");
    let name = |serves: bool, p: &str| format!("kernel's rxe {} us: {p}", if serves { "serves" } else { "calls" });
    let mut connecting = CONNECTING[..8].to_vec();
    connecting.push(("ib_write_bw -R -F -s 65536 -n 200", "ib_write_bw -R -F -s 65536 -n 200 ADDR"));
    connecting.push(("rping -s -a ::0 -C 20 -v", "rping -c -a IPV6 -C 20 -V"));
    let rxe = &Shared::new(Rxe::start);
    for (ours, guests) in programs() {
        for serves in [true, false] {
            let (ours, guests) = (ours.clone(), guests.clone());
            t.on(rxe, name(serves, &ours), move |g| {
                if !is_unreliable(&ours) {
                    return both_end_well(g.pair(serves, &ours, &guests)?);
                }
                let [ours, guests] = [ours, guests].map(|p| format!("timeout 30 {p}"));
                reruns::of_lost_packets(|| None, || both_end_well(g.pair(serves, &ours, &guests)?))
            });
        }
    }
    for (server, client) in connecting {
        t.on(rxe, name(true, server), move |g| {
            both_end_well(g.serve_there(server, &client.replace("ADDR", RXE).replace("IPV6", RXE6))?)
        });
        t.on(rxe, name(false, server), move |g| {
            both_end_well(g.serve_here(server, &client.replace("ADDR", OURS).replace("IPV6", OURS6))?)
        });
    }
    t.on(rxe, "kernel's rxe hears our multicast: mckey", |g| {
        reruns::of_lost_packets(|| None, || both_end_well(g.multicast_there()?))
    });
    t.on(rxe, "we hear the multicast of the kernel's rxe: mckey", |g| {
        reruns::of_lost_packets(|| None, || both_end_well(g.multicast_here()?))
    });
    t.on(rxe, "kernel's rxe found no wrong ICRC, nor did we", |g| {
        both_ways(g, 1)?;
        let log = g.run("dmesg | grep -i icrc | head -3; ibv_devinfo -d rxe0 | grep state")?;
        require(log.ok() && !log.text.to_lowercase().contains("icrc") && log.text.contains("PORT_ACTIVE"), log.text)
    });
    // Each of these leaves an ordinary virtual layer behind.
    t.on_mut(rxe, "kernel's rxe and we, with --full-icrc", |g| {
        g.serve(&["--full-icrc"])?;
        let done = both_ways(g, 3);
        g.serve(&[])?;
        done
    });
    t.on_mut(rxe, "kernel's rxe and we, whose group has a secret", |g| {
        g.serve(&[])?;
        let lab = g.lab()?;
        secret::set(lab, &secret::make(lab, "group.secret")?)?;
        let done = both_ways(g, 4);
        let dropped = secret::dropped(lab);
        g.serve(&[])?;
        done?;
        let dropped = dropped?;
        require(dropped == [0; 3], format!("dropped: {dropped:?}"))
    });
}
