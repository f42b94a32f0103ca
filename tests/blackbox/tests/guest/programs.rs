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

/// Adds programs that connect by address. In a guest they use the kernel's rdma_cm. `ends`: the server and the client.
fn by_address(t: &mut Tests, stage: &Stage, i: usize, name: &str, ends: for<'a> fn(usize, &'a Scene) -> [End<'a>; 2]) {
    for programs in BY_ADDRESS {
        explained(t, stage, i, format!("{name}, by address: {}", programs.0), move |_, _, scene| {
            let [server, client] = ends(i, scene);
            connect(server, client, *programs)
        });
    }
    explained(t, stage, i, format!("{name}, by address: mckey"), move |_, _, scene| {
        let [member, sender] = ends(i, scene);
        mckey(member, sender)
    });
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

pub(super) fn tests(t: &mut Tests, stage: &Stage, i: usize) {
    let which = NAMES[i];
    explained(t, stage, i, format!("{which} guest: ibv_devices, ibv_devinfo -v"), move |g, _, _| {
        let o = g.run("ibv_devices")?;
        require(o.ok() && o.text.contains("unirdma0"), o.text)?;
        let o = g.run("ibv_devinfo -v")?;
        let shows = ["unirdma0", "PORT_ACTIVE", "Ethernet", &format!("::ffff:{}", g.ip)];
        require(o.ok() && shows.iter().all(|t| o.text.contains(t)), o.text)
    });
    explained(t, stage, i, format!("{which} guest alone: queues in all ways (C program)"), move |g, _, _| {
        let o = g.run(&format!("timeout {} queues", LIMIT.as_secs()))?;
        require(o.ok() && o.text.contains("all queues worked"), o.text)
    });
    for p in WITHIN {
        explained(t, stage, i, format!("{which} guest alone: {p}"), move |g, _, _| {
            pair(End::Guest(g), End::Guest(g), p)
        });
    }
    for p in WITH_CONTAINER {
        explained(t, stage, i, format!("{which} guest serves a container: {p}"), move |g, lab, _| {
            pair(End::Guest(g), container(lab), p)
        });
        explained(t, stage, i, format!("{which} guest calls a container: {p}"), move |g, lab, _| {
            pair(container(lab), End::Guest(g), p)
        });
    }
    for p in BETWEEN {
        explained(t, stage, i, format!("{which} guest calls the other: {p}"), move |g, _, scene| {
            pair(End::Guest(&scene.guests[1 - i]), End::Guest(g), p)
        });
    }
    by_address(t, stage, i, &format!("{which} guest alone"), |i, s| [s.end(i), s.end(i)]);
    by_address(t, stage, i, &format!("{which} guest serves a container"), |i, s| [s.end(i), container(&s.lab)]);
    by_address(t, stage, i, &format!("{which} guest calls a container"), |i, s| [container(&s.lab), s.end(i)]);
    by_address(t, stage, i, &format!("{which} guest calls the other"), |i, s| [s.end(1 - i), s.end(i)]);
    explained(t, stage, i, format!("{which} guest: its network"), move |g, lab, scene| {
        let _there = idle(lab, "c")?;
        let other = &scene.guests[1 - i].ip;
        for to in [ADDRESS_OF_CONTAINER, other] {
            let o = g.run(&format!("ping -c 2 -i 0.2 -W 2 -s 8900 -M do {to}"))?;
            require(o.text.contains(" 0% packet loss"), o.text)?;
        }
        Ok(())
    });
}
