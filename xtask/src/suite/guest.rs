//! Debian's programs in virtual machines whose guests have vRNICs, with each other and with containers.

use std::cell::OnceCell;
use std::time::Instant;

use super::*;
use crate::lab::Running;
use crate::vm::{Guest, Systems, Task};

/// Who takes part in a test.
#[derive(Clone, Copy)]
enum End<'a> {
    Guest(&'a Guest),
    /// The container of vRNIC `c`.
    Container(&'a Lab),
}

/// A program that runs at an end.
enum Program {
    There(Task),
    Here(Running),
}

impl Program {
    fn finish_within(self, limit: Duration) -> Output {
        match self {
            Program::There(task) => task.finish_within(limit),
            Program::Here(running) => running.finish_within(limit),
        }
    }

    fn has_ended(&mut self) -> bool {
        match self {
            Program::There(task) => task.has_ended(),
            Program::Here(running) => running.has_ended(),
        }
    }
}

/// Emulated processors are slow, and this machine may be busy: how long programs may take.
pub(super) const LIMIT: Duration = Duration::from_secs(60);
const CONTAINER: &str = "c";
const ADDRESS_OF_CONTAINER: &str = "10.0.0.3";

impl End<'_> {
    /// Starts a program, which gets the option for the index of the GID if it takes one.
    fn spawn(&self, program: &str) -> Result<Program> {
        let gid = match self {
            End::Guest(g) => g.gid()?,
            End::Container(_) => 0,
        };
        let program = match program.split_once(' ') {
            Some((name, rest)) if name.ends_with("pingpong") => format!("{name} -g {gid} {rest}"),
            // With -R addresses say it.
            Some((name, rest)) if name.starts_with("ib_") && !program.contains(" -R ") => {
                format!("{name} -F -x {gid} {rest}")
            }
            _ => program.into(),
        };
        let program = format!("timeout {} {program}", LIMIT.as_secs());
        match self {
            End::Guest(g) => g.spawn(&program).map(Program::There),
            End::Container(lab) => lab.spawn(CONTAINER, &[], &program).map(Program::Here),
        }
    }

    fn address(&self) -> &str {
        match self {
            End::Guest(g) => &g.ip,
            End::Container(_) => ADDRESS_OF_CONTAINER,
        }
    }

    /// Starts a server, and waits until it listens or has ended.
    fn serve(&self, program: &str) -> Result<Program> {
        let mut server = self.spawn(program)?;
        match (self, &mut server) {
            (End::Guest(g), server) => wait_until(|| server.has_ended() || g.listens(), "the server does not listen")?,
            (End::Container(lab), Program::Here(r)) => {
                r.wait_listening(|| lab.rdma_listens(CONTAINER));
            }
            _ => {}
        }
        Ok(server)
    }
}

/// The same program at both ends; both must end well.
fn pair(server: End<'_>, client: End<'_>, program: &str) -> Check {
    connect(server, client, (program, &format!("{program} ADDR")))
}

/// A server and its client, which gets the server's address for `ADDR`; both must end well.
fn connect(server: End<'_>, client: End<'_>, programs: (&str, &str)) -> Check {
    let run = || -> Result<(Output, Output)> {
        let s = server.serve(programs.0)?;
        let c = client.spawn(&programs.1.replace("ADDR", server.address()))?.finish_within(LIMIT);
        let limit = if c.ok() { LIMIT } else { Duration::from_secs(5) };
        Ok((s.finish_within(limit), c))
    };
    // perftest measures the processor's clock against the system's, and gives up on a machine that was busy meanwhile.
    let (s, c) = run()?;
    let gave_up = |o: &Output| o.text.contains("Can't produce a report");
    both_end_well(if gave_up(&s) || gave_up(&c) { run()? } else { (s, c) })
}

/// A member of a multicast group, and one that sends to it.
fn mckey(member: End<'_>, sender: End<'_>) -> Check {
    let program = |e: End<'_>| format!("mckey -m 239.1.1.1 -b {}", e.address());
    let mut m = member.spawn(&program(member))?;
    // Nothing shows that the member has joined: what is sent before is lost, and the sender comes again.
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

/// What connects by address: in a guest that is the kernel's rdma_cm.
fn by_address(s: &mut Suite<'_>, name: &str, run: impl Fn(&dyn Fn(End<'_>, End<'_>) -> Check) -> Check) {
    for programs in BY_ADDRESS {
        s.check(&format!("{name}, by address: {}", programs.0), |_| {
            run(&|server, client| connect(server, client, *programs))
        });
    }
    s.check(&format!("{name}, by address: mckey"), |_| run(&|server, client| mckey(server, client)));
}

/// Two processes of one guest. On few processors those that poll keep each other from running, so these wait for events where they can.
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
/// A guest and a container, either of which serves.
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
/// Two guests.
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

/// What may happen to a guest.
type Change = fn(&Guest) -> Check;
const CHANGES: &[(&str, Change)] = &[
    ("its program is killed", |g| {
        let o = g.run("killall -9 ib_write_bw")?;
        require(o.ok(), o.text)
    }),
    ("its driver is unloaded, and loaded again", |g| {
        g.unload()?;
        g.run("killall -9 ib_write_bw")?;
        g.load()
    }),
    ("it starts again", |g| g.restart()),
];

/// Two guests and a container on one virtual layer.
pub(super) struct Scene {
    pub guests: Vec<Guest>,
    /// What each guest's kernel has for itself.
    objects: Vec<[Option<u64>; 4]>,
    pub lab: Lab,
    /// The guests' files.
    _systems: Systems,
}

impl Scene {
    fn start(kernel: Option<&str>) -> Result<Scene> {
        let systems = Systems::make(kernel)?;
        let lab = Lab::start(None)?;
        lab.vrnic(CONTAINER, &["--ip", ADDRESS_OF_CONTAINER])?;
        let mut scene = Scene { guests: Vec::new(), objects: Vec::new(), lab, _systems: systems };
        let all = &scene._systems.all;
        for (i, vrnic) in ["a", "b"].into_iter().enumerate() {
            scene.lab.vrnic(vrnic, &["--ip", &format!("10.0.0.{}", i + 1)])?;
            let system = all.get(i).or(all.first()).ok_or("no kernel")?;
            let guest = Guest::start(&scene.lab, system, vrnic, 2, false)?;
            scene.objects.push(objects(&scene.lab, &guest)?);
            scene.guests.push(guest);
        }
        Ok(scene)
    }
}

/// How many QPs, CQs and MRs a guest has.
fn objects(lab: &Lab, guest: &Guest) -> Result<[Option<u64>; 4]> {
    let v = lab.show(&guest.vrnic)?;
    Ok(["qps", "cqs", "mrs_mapped", "mrs_copied"].map(|k| v[k].as_u64()))
}

/// Nothing of a guest's is left in the virtual layer but what its kernel had in the beginning.
pub(super) fn nothing_left(scene: &Scene, i: usize) -> Check {
    let now = || objects(&scene.lab, &scene.guests[i]);
    wait_until(|| now().as_ref() == Ok(&scene.objects[i]), "")
        .map_err(|_| format!("QPs, CQs, MRs mapped and copied: {:?}, in the beginning {:?}", now(), scene.objects[i]))
}

/// Programs that write for long from the container into the memory of a guest; the container's.
fn connected(guest: &Guest, lab: &Lab) -> Result<Program> {
    let p = "ib_write_bw -s 65536 -D 30";
    End::Guest(guest).serve(p)?;
    let client = End::Container(lab).spawn(&format!("{p} {}", guest.ip))?;
    let written = || lab.show(&guest.vrnic).ok()?["counters"]["received_bytes"].as_u64();
    let begin = written();
    wait_until(|| written() > begin, "nothing is written")?;
    Ok(client)
}

fn ends_with_error(program: Program) -> Check {
    let o = program.finish_within(LIMIT);
    require(!o.ok() && o.code.is_some_and(|c| c != 124), format!("the peer's program ends so: {:?} {}", o.code, o.text))
}

pub(super) fn run(s: &mut Suite<'_>, kernel: Option<&str>) {
    if lab::uid() != 0 {
        println!("skipped: guests with vRNICs (their network needs root)");
        return;
    }
    // The first test that needs them starts them.
    let cell = OnceCell::new();
    let scene = || cell.get_or_init(|| Scene::start(kernel)).as_ref().map_err(Clone::clone);
    for (i, which) in ["first", "second"].into_iter().enumerate() {
        let guest = || -> Result<(&Guest, &Lab)> {
            let scene = scene()?;
            Ok((&scene.guests[i], &scene.lab))
        };
        let explained = |f: &dyn Fn(&Guest, &Lab) -> Check| {
            let (g, lab) = guest()?;
            f(g, lab).map_err(|e| format!("{}\n{}", g.explain(&e), lab.log()))
        };
        s.check(&format!("{which} guest: ibv_devices, ibv_devinfo -v"), |_| {
            explained(&|g, _| {
                let o = g.run("ibv_devices")?;
                require(o.ok() && o.text.contains("unirdma0"), o.text)?;
                let o = g.run("ibv_devinfo -v")?;
                let shows = ["unirdma0", "PORT_ACTIVE", "Ethernet", &format!("::ffff:{}", g.ip)];
                require(o.ok() && shows.iter().all(|t| o.text.contains(t)), o.text)
            })
        });
        s.check(&format!("{which} guest alone: queues in all ways (C program)"), |_| {
            explained(&|g, _| {
                let o = g.run(&format!("timeout {} queues", LIMIT.as_secs()))?;
                require(o.ok() && o.text.contains("all queues worked"), o.text)
            })
        });
        for p in WITHIN {
            s.check(&format!("{which} guest alone: {p}"), |_| explained(&|g, _| pair(End::Guest(g), End::Guest(g), p)));
        }
        for p in WITH_CONTAINER {
            s.check(&format!("{which} guest serves a container: {p}"), |_| {
                explained(&|g, lab| pair(End::Guest(g), End::Container(lab), p))
            });
            s.check(&format!("{which} guest calls a container: {p}"), |_| {
                explained(&|g, lab| pair(End::Container(lab), End::Guest(g), p))
            });
        }
        for p in BETWEEN {
            s.check(&format!("{which} guest calls the other: {p}"), |_| {
                explained(&|g, _| pair(End::Guest(&scene()?.guests[1 - i]), End::Guest(g), p))
            });
        }
        by_address(s, &format!("{which} guest alone"), |both| explained(&|g, _| both(End::Guest(g), End::Guest(g))));
        by_address(s, &format!("{which} guest serves a container"), |both| {
            explained(&|g, lab| both(End::Guest(g), End::Container(lab)))
        });
        by_address(s, &format!("{which} guest calls a container"), |both| {
            explained(&|g, lab| both(End::Container(lab), End::Guest(g)))
        });
        by_address(s, &format!("{which} guest calls the other"), |both| {
            explained(&|g, _| both(End::Guest(&scene()?.guests[1 - i]), End::Guest(g)))
        });
        s.check(&format!("{which} guest: its network"), |_| {
            explained(&|g, lab| {
                let mut container = lab.spawn(CONTAINER, &[], "sleep 60")?;
                let other = &scene()?.guests[1 - i].ip;
                for to in [ADDRESS_OF_CONTAINER, other] {
                    // The container may have no interface yet.
                    let o =
                        g.run(&format!("for n in 1 2 3; do ping -c 2 -i 0.2 -W 2 -s 8900 -M do {to} && break; done"))?;
                    require(o.text.contains(" 0% packet loss"), o.text)?;
                }
                container.kill();
                Ok(())
            })
        });
        s.check(&format!("{which} guest: the vRNIC's link goes down and up"), |_| {
            explained(&|g, lab| {
                for (state, shows) in [("down", "PORT_DOWN"), ("up", "PORT_ACTIVE")] {
                    let o = lab.unirdma(&["vrnic", "link", &g.vrnic, state]);
                    require(o.ok(), o.text)?;
                    wait_until(|| g.run("ibv_devinfo").is_ok_and(|o| o.text.contains(shows)), shows)?;
                }
                Ok(())
            })
        });
        s.check(&format!("{which} guest: nothing of its memory is written while it is paused"), |_| {
            explained(&|g, lab| {
                let p = "ib_write_bw -b -s 65536 -D 4 -f 1 -u 22";
                let server = End::Guest(g).serve(p)?;
                let client = End::Container(lab).spawn(&format!("{p} {}", g.ip))?;
                let written = || lab.show(&g.vrnic).map(|v| v["counters"]["received_bytes"].as_u64().unwrap_or(0));
                let begin = written()?;
                wait_until(|| written().is_ok_and(|n| n > begin), "nothing is written")?;
                let mut differs = false;
                for _ in 0..3 {
                    g.pause()?;
                    let before = written();
                    std::thread::sleep(Duration::from_millis(100));
                    differs |= before? != written()?;
                    g.go_on()?;
                    std::thread::sleep(Duration::from_millis(100));
                }
                require(!differs, "it was written")?;
                let c = client.finish_within(LIMIT);
                both_end_well((server.finish_within(LIMIT), c))
            })
        });
        for (what, change) in CHANGES {
            s.check(&format!("{which} guest: {what} while a peer is connected"), |_| {
                explained(&|g, lab| {
                    let client = connected(g, lab)?;
                    change(g)?;
                    ends_with_error(client)?;
                    nothing_left(scene()?, i)?;
                    pair(End::Container(lab), End::Guest(g), "ibv_rc_pingpong -c -n 100")?;
                    nothing_left(scene()?, i)
                })
            });
        }
    }
    storage::run(s, &scene);
    // The last of all: a guest that has no power is no peer.
    for (i, which) in ["first", "second"].into_iter().enumerate() {
        s.check(&format!("{which} guest: loses its power while a peer is connected"), |_| {
            let scene = scene()?;
            let (g, lab) = (&scene.guests[i], &scene.lab);
            let client = connected(g, lab)?;
            g.power_off();
            ends_with_error(client)?;
            wait_until(|| lab.show(&g.vrnic).is_ok_and(|v| v["sessions"] == 0), "the session stays")
        });
    }
}
