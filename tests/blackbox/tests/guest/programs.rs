//! Debian's programs within a guest, between guests, and between a guest and a container.

use std::time::Instant;

use super::*;

/// Runs a member of a multicast group, and a program that sends to the group.
fn mckey(member: End<'_>, sender: End<'_>) -> Check {
    let program = |e: End<'_>| format!("mckey -m 239.1.1.1 -b {}", e.address());
    let mut m = member.spawn(&program(member))?;
    // Nothing shows that the member has joined. Earlier messages are lost, so the sender repeats.
    loop {
        let s = sender.spawn(&format!("{} -s", program(sender)))?.finish_within(LIMIT);
        let enough = Instant::now() + Duration::from_secs(2);
        while !m.has_ended() && Instant::now() < enough {
            std::thread::sleep(Duration::from_millis(50));
        }
        if m.has_ended() || !s.ok() {
            return both_end_well((m.finish_within(LIMIT), s));
        }
    }
}

/// Programs that connect by address. In a guest they use the kernel's rdma_cm.
fn by_address(s: &mut Suite<'_>, name: &str, run: impl Fn(&dyn Fn(End<'_>, End<'_>) -> Check) -> Check) {
    for programs in BY_ADDRESS {
        s.check(&format!("{name}, by address: {}", programs.0), |_| {
            run(&|server, client| connect(server, client, *programs))
        });
    }
    s.check(&format!("{name}, by address: mckey"), |_| run(&|server, client| mckey(server, client)));
}

/// Programs for two processes of one guest. On few processors polling processes delay each other, so these programs
/// wait for events if they can.
const WITHIN: &[&str] = &[
    "ibv_rc_pingpong -e -n 50",
    "ibv_uc_pingpong -e -n 50",
    "ibv_ud_pingpong -e -n 50",
    "ibv_srq_pingpong -e -n 50",
    "ib_write_bw -s 65536 -n 50",
    "ib_send_bw -e -s 65536 -n 50",
    "ib_read_bw -e -s 65536 -n 50",
    "ib_atomic_bw -e -n 50",
];
/// Programs for a guest and a container. Each of the two is the server once.
const WITH_CONTAINER: &[&str] = &[
    "ibv_rc_pingpong -c -n 200",
    "ibv_ud_pingpong -e -n 100",
    "ibv_srq_pingpong -n 200",
    "ib_write_lat -n 200",
    "ib_write_bw -s 65536 -n 200",
    "ib_write_bw -s 33554432 -n 5",
    "ib_send_bw -c UD -q 4 -n 200",
    "ib_send_bw -s 65536 -n 200",
    "ib_read_bw -s 1000000 -n 50",
    "ib_atomic_bw -n 200",
];
/// Programs for two guests.
const BETWEEN: &[&str] = &[
    "ibv_rc_pingpong -e -n 100",
    "ibv_uc_pingpong -e -n 100",
    "ib_write_bw -s 65536 -n 100",
    "ib_send_bw -e -s 65536 -n 100",
    "ib_read_bw -e -s 65536 -n 100",
];

/// Servers and clients that connect by address.
const BY_ADDRESS: &[(&str, &str)] = &[
    ("rping -s -C 20 -v", "rping -c -a ADDR -C 20 -V"),
    ("ib_write_bw -R -F -s 65536 -n 50", "ib_write_bw -R -F -s 65536 -n 50 ADDR"),
    ("ucmatose -c 5", "ucmatose -c 5 -s ADDR"),
    ("udaddy -c 3", "udaddy -c 3 -s ADDR"),
];

pub(super) fn run(s: &mut Suite<'_>, stage: &Stage<'_>, i: usize) {
    let which = NAMES[i];
    s.check(&format!("{which} guest: ibv_devices, ibv_devinfo -v"), |_| {
        stage.explained(i, &|g, _| {
            let o = g.run("ibv_devices")?;
            require(o.ok() && o.text.contains("unirdma0"), o.text)?;
            let o = g.run("ibv_devinfo -v")?;
            let shows = ["unirdma0", "PORT_ACTIVE", "Ethernet", &format!("::ffff:{}", g.ip)];
            require(o.ok() && shows.iter().all(|t| o.text.contains(t)), o.text)
        })
    });
    s.check(&format!("{which} guest alone: queues in all ways (C program)"), |_| {
        stage.explained(i, &|g, _| {
            let o = g.run(&format!("timeout {} queues", LIMIT.as_secs()))?;
            require(o.ok() && o.text.contains("all queues worked"), o.text)
        })
    });
    for p in WITHIN {
        s.check(&format!("{which} guest alone: {p}"), |_| {
            stage.explained(i, &|g, _| pair(End::Guest(g), End::Guest(g), p))
        });
    }
    for p in WITH_CONTAINER {
        s.check(&format!("{which} guest serves a container: {p}"), |_| {
            stage.explained(i, &|g, lab| pair(End::Guest(g), container(lab), p))
        });
        s.check(&format!("{which} guest calls a container: {p}"), |_| {
            stage.explained(i, &|g, lab| pair(container(lab), End::Guest(g), p))
        });
    }
    for p in BETWEEN {
        s.check(&format!("{which} guest calls the other: {p}"), |_| {
            stage.explained(i, &|g, _| pair(End::Guest(&stage.scene()?.guests[1 - i]), End::Guest(g), p))
        });
    }
    by_address(s, &format!("{which} guest alone"), |both| {
        stage.explained(i, &|g, _| both(End::Guest(g), End::Guest(g)))
    });
    by_address(s, &format!("{which} guest serves a container"), |both| {
        stage.explained(i, &|g, lab| both(End::Guest(g), container(lab)))
    });
    by_address(s, &format!("{which} guest calls a container"), |both| {
        stage.explained(i, &|g, lab| both(container(lab), End::Guest(g)))
    });
    by_address(s, &format!("{which} guest calls the other"), |both| {
        stage.explained(i, &|g, _| both(End::Guest(&stage.scene()?.guests[1 - i]), End::Guest(g)))
    });
    s.check(&format!("{which} guest: its network"), |_| {
        stage.explained(i, &|g, lab| {
            let _there = idle(lab, "c")?;
            let other = &stage.scene()?.guests[1 - i].ip;
            for to in [ADDRESS_OF_CONTAINER, other] {
                let o = g.run(&format!("ping -c 2 -i 0.2 -W 2 -s 8900 -M do {to}"))?;
                require(o.text.contains(" 0% packet loss"), o.text)?;
            }
            Ok(())
        })
    });
}
