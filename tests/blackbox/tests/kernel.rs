//! Debian's programs on a vRNIC with their peers on the Linux kernel's own soft RNIC (rxe) in a virtual machine, in
//! both directions.

use std::cell::OnceCell;

use super::*;
use crate::vm::Rxe;

pub(super) fn run(s: &mut Suite<'_>) {
    if harness::uid() != 0 {
        println!("skipped: the kernel's rxe (network namespaces need root)");
        return;
    }
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
    let name = |serves: bool, p: &str| format!("kernel's rxe {} us: {p}", if serves { "serves" } else { "calls" });
    let mut connecting = CONNECTING[..8].to_vec();
    connecting.push(("ib_write_bw -R -F -s 65536 -n 200", "ib_write_bw -R -F -s 65536 -n 200 ADDR"));
    connecting.push(("rping -s -a ::0 -C 20 -v", "rping -c -a IPV6 -C 20 -V"));
    let last = "kernel's rxe found no wrong ICRC, nor did we";
    let full = "kernel's rxe and we, with --full-icrc";
    // The first test that needs it boots it.
    let mut cell = OnceCell::new();
    let guest = || cell.get_or_init(Rxe::start).as_ref().map_err(Clone::clone);
    for (ours, guests) in &programs {
        for serves in [true, false] {
            s.check(&name(serves, ours), |_| {
                let g = guest()?;
                if !is_unreliable(ours) {
                    return both_end_well(g.pair(serves, ours, guests)?);
                }
                let [ours, guests] = [ours, guests].map(|p| format!("timeout 30 {p}"));
                one_try_of_many(|| both_end_well(g.pair(serves, &ours, &guests)?))
            });
        }
    }
    for (server, client) in &connecting {
        s.check(&name(true, server), |_| {
            let g = guest()?;
            let run = || g.serve_there(server, &client.replace("ADDR", vm::RXE).replace("IPV6", vm::RXE6));
            // The listening port that was seen may belong to the previous program.
            let early = run().and_then(|o| if o.1.text.contains("REJECTED") { run() } else { Ok(o) });
            both_end_well(early?)
        });
        s.check(&name(false, server), |_| {
            let g = guest()?;
            both_end_well(g.serve_here(server, &client.replace("ADDR", vm::OURS).replace("IPV6", vm::OURS6))?)
        });
    }
    // Datagrams may get lost.
    let there = || both_end_well(guest()?.multicast_there()?);
    let here = || both_end_well(guest()?.multicast_here()?);
    s.check("kernel's rxe hears our multicast: mckey", |_| there().or_else(|_| there()));
    s.check("we hear the multicast of the kernel's rxe: mckey", |_| here().or_else(|_| here()));
    s.check(last, |_| {
        let g = guest()?;
        let log = g.run("dmesg | grep -i icrc | head -3; ibv_devinfo -d rxe0 | grep state")?;
        require(log.ok() && !log.text.to_lowercase().contains("icrc") && log.text.contains("PORT_ACTIVE"), log.text)?;
        clean_packets(g.lab.as_ref().ok_or("no virtual layer")?)
    });
    // Some programs, in both directions, on a virtual layer that was restarted.
    let both_ways = |g: &Rxe, n: usize| {
        for (ours, guests) in programs.iter().filter(|p| !is_unreliable(&p.0)).take(n) {
            both_end_well(g.pair(true, ours, guests)?)?;
            both_end_well(g.pair(false, ours, guests)?)?;
        }
        clean_packets(g.lab.as_ref().ok_or("no virtual layer")?)
    };
    s.check(full, |_| {
        cell.get_or_init(Rxe::start);
        let g = cell.get_mut().ok_or("no guest")?.as_mut().map_err(|e| e.clone())?;
        g.serve(&["--full-icrc"])?;
        both_ways(g, 3)
    });
    s.check("kernel's rxe and we, whose group has a secret", |_| {
        cell.get_or_init(Rxe::start);
        let g = cell.get_mut().ok_or("no guest")?.as_mut().map_err(|e| e.clone())?;
        g.serve(&[])?;
        let lab = g.lab.as_ref().ok_or("no virtual layer")?;
        secret::set(lab, &secret::make(lab, "group.secret")?)?;
        both_ways(g, 4)?;
        let dropped = secret::dropped(lab)?;
        require(dropped == [0; 3], format!("dropped: {dropped:?}"))
    });
}
