//! Debian's programs in virtual machines whose guests have vRNICs, with each other and with containers.

mod changes;
mod hosts;
mod loss;
mod process;
mod programs;
mod wrong;

use std::cell::OnceCell;

use super::*;
use crate::harness::Running;
use crate::vm::{self, Guest, Plan, Rxe, Systems, Task};

/// An end of a test.
#[derive(Clone, Copy)]
enum End<'a> {
    Guest(&'a Guest),
    Container(Container<'a>),
    /// The Linux kernel's own RNIC in another machine, at one of that machine's addresses.
    Rxe(&'a Rxe, &'static str),
}

/// The container of a vRNIC.
#[derive(Clone, Copy)]
struct Container<'a> {
    lab: &'a Lab,
    vrnic: &'static str,
    address: &'static str,
}

/// The container of vRNIC `c`, the peer of the two guests.
fn container(lab: &Lab) -> End<'_> {
    End::Container(Container { lab, vrnic: "c", address: ADDRESS_OF_CONTAINER })
}

/// The container of vRNIC `d`, a further peer.
fn other_container(lab: &Lab) -> End<'_> {
    End::Container(Container { lab, vrnic: "d", address: ADDRESS_OF_OTHER })
}

/// Creates the vRNICs of both containers.
fn add_containers(lab: &Lab) -> Check {
    lab.vrnic("c", &["--ip", ADDRESS_OF_CONTAINER])?;
    lab.vrnic("d", &["--ip", ADDRESS_OF_OTHER])
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

/// Longest time for a program. Emulated processors are slow, and this machine may be busy.
pub(super) const LIMIT: Duration = Duration::from_secs(60);
/// Time for which a test waits, as a part of all tests, for an event that may never happen.
const SOON: Duration = Duration::from_secs(5);
const ADDRESS_OF_CONTAINER: &str = "10.0.0.3";
const ADDRESS_OF_OTHER: &str = "10.0.0.4";

impl End<'_> {
    /// Starts a program. Adds the option for the GID index if the program takes one.
    fn spawn(&self, program: &str) -> Result<Program> {
        let gid = match self {
            End::Guest(g) => g.gid()?,
            End::Container(_) => 0,
            // Index 0 is the link-local address.
            End::Rxe(..) => 1,
        };
        let program = match program.split_once(' ') {
            Some((name, rest)) if name.ends_with("pingpong") => format!("{name} -g {gid} {rest}"),
            // With -R the address selects the GID.
            Some((name, rest)) if name.starts_with("ib_") && !program.contains(" -R ") => {
                format!("{name} -F -x {gid} {rest}")
            }
            _ => program.into(),
        };
        let program = format!("timeout {} {program}", LIMIT.as_secs());
        match self {
            End::Guest(g) => g.spawn(&program).map(Program::There),
            End::Container(c) => c.lab.spawn(c.vrnic, &[], &program).map(Program::Here),
            End::Rxe(rxe, _) => rxe.spawn(&program).map(Program::There),
        }
    }

    fn address(&self) -> &str {
        match self {
            End::Guest(g) => &g.ip,
            End::Container(c) => c.address,
            End::Rxe(_, address) => address,
        }
    }

    /// Starts a server, and waits until it listens or has ended.
    fn serve(&self, program: &str) -> Result<Program> {
        let mut server = self.spawn(program)?;
        match (self, &mut server) {
            (End::Guest(g), server) => wait_until(|| server.has_ended() || g.listens(), "the server does not listen")?,
            (End::Container(c), Program::Here(r)) => {
                r.wait_listening(|| c.lab.rdma_listens(c.vrnic));
            }
            (End::Rxe(rxe, _), _) => rxe.wait_listening()?,
            _ => {}
        }
        Ok(server)
    }
}

/// Checks that the same program succeeds at both ends.
fn pair(server: End<'_>, client: End<'_>, program: &str) -> Check {
    connect(server, client, (program, &format!("{program} ADDR")))
}

/// Checks that a server and its client succeed. `ADDR` in the client's command stands for the server's address.
fn connect(server: End<'_>, client: End<'_>, programs: (&str, &str)) -> Check {
    let run = || -> Result<(Output, Output)> {
        let s = server.serve(programs.0)?;
        let c = client.spawn(&programs.1.replace("ADDR", server.address()))?.finish_within(LIMIT);
        let limit = if c.ok() { LIMIT } else { Duration::from_secs(5) };
        Ok((s.finish_within(limit), c))
    };
    // perftest compares the processor's clock with the system's, and gives up if the machine was busy meanwhile.
    let (s, c) = run()?;
    let gave_up = |o: &Output| o.text.contains("Can't produce a report");
    both_end_well(if gave_up(&s) || gave_up(&c) { run()? } else { (s, c) })
}

/// Two guests and a container on one virtual layer.
pub(super) struct Scene {
    pub guests: Vec<Guest>,
    /// Numbers of objects that each guest's kernel has for itself.
    objects: Vec<[Option<u64>; 4]>,
    pub lab: Lab,
}

impl Scene {
    fn start(systems: &Systems) -> Result<Scene> {
        let lab = Lab::start(None)?;
        add_containers(&lab)?;
        let mut guests = Vec::new();
        for (i, vrnic) in ["a", "b"].into_iter().enumerate() {
            lab.vrnic(vrnic, &["--ip", &format!("10.0.0.{}", i + 1)])?;
            let system = systems.all.get(i).or(systems.all.first()).ok_or("no kernel")?;
            guests.push(Guest::boot(&lab, system, vrnic, &Plan::default())?);
        }
        let mut scene = Scene { guests, objects: Vec::new(), lab };
        for guest in &scene.guests {
            guest.come_up()?;
            guest.set_up()?;
            scene.objects.push(objects(&scene.lab, guest)?);
        }
        Ok(scene)
    }
}

/// Systems for guests, made by the first test that needs them.
struct Prepared<'a> {
    kernel: Option<&'a str>,
    systems: OnceCell<Result<Systems>>,
}

impl Prepared<'_> {
    fn systems(&self) -> Result<&Systems> {
        self.systems.get_or_init(|| Systems::make(self.kernel)).as_ref().map_err(Clone::clone)
    }

    /// The first system.
    fn system(&self) -> Result<&vm::System> {
        self.systems()?.all.first().ok_or_else(|| "no kernel".into())
    }
}

/// The scene, started by the first test that needs it.
struct Stage<'a> {
    prepared: &'a Prepared<'a>,
    scene: OnceCell<Result<Scene>>,
}

impl Stage<'_> {
    fn scene(&self) -> Result<&Scene> {
        let start = || self.prepared.systems().and_then(Scene::start);
        self.scene.get_or_init(start).as_ref().map_err(Clone::clone)
    }

    /// One of the guests, and the virtual layer.
    fn guest(&self, i: usize) -> Result<(&Guest, &Lab)> {
        let scene = self.scene()?;
        Ok((&scene.guests[i], &scene.lab))
    }

    /// Calls `f` with a guest. If that fails, adds the logs of the guest and of the virtual layer to the error.
    fn explained(&self, i: usize, f: &dyn Fn(&Guest, &Lab) -> Check) -> Check {
        let (g, lab) = self.guest(i)?;
        f(g, lab).map_err(|e| format!("{}\n{}", g.explain(&e), lab.log()))
    }

    /// Checks that the virtual layer has no objects of a guest except those that its kernel had at first.
    fn nothing_left(&self, i: usize) -> Check {
        nothing_left(self.scene()?, i)
    }
}

/// Numbers of the QPs, CQs and MRs of a guest.
fn objects(lab: &Lab, guest: &Guest) -> Result<[Option<u64>; 4]> {
    let v = lab.show(&guest.vrnic)?;
    Ok(["qps", "cqs", "mrs_mapped", "mrs_copied"].map(|k| v[k].as_u64()))
}

/// Checks that the virtual layer has no objects of a guest except those that its kernel had at first.
pub(super) fn nothing_left(scene: &Scene, i: usize) -> Check {
    as_before(&scene.lab, &scene.guests[i], &scene.objects[i])
}

/// Waits until a guest has the same numbers of objects as before.
fn as_before(lab: &Lab, guest: &Guest, before: &[Option<u64>; 4]) -> Check {
    let now = || objects(lab, guest);
    wait_until(|| now().as_ref() == Ok(before), "")
        .map_err(|_| format!("QPs, CQs, MRs mapped and copied: {:?}, before {before:?}", now()))
}

/// Number of bytes that peers have written into a vRNIC's memory.
fn written(lab: &Lab, vrnic: &str) -> Result<u64> {
    lab.show(vrnic)?["counters"]["received_bytes"].as_u64().ok_or_else(|| "no counters".into())
}

/// More than the bytes of connection management, of which a late message to an ended program may be a part.
const DATA: u64 = 64 << 10;

/// Waits until more data is written into a vRNIC's memory, by a program that writes all the time.
fn goes_on(lab: &Lab, vrnic: &str) -> Check {
    let begin = written(lab, vrnic)?;
    wait_until(|| written(lab, vrnic).is_ok_and(|n| n > begin + DATA), "nothing is written")
}

/// Starts programs that write from the container into the memory of a guest for `seconds`. Returns the container's
/// program.
fn connected(guest: &Guest, lab: &Lab, seconds: u32) -> Result<Program> {
    let p = format!("ib_write_bw -s 65536 -D {seconds}");
    End::Guest(guest).serve(&p)?;
    let client = container(lab).spawn(&format!("{p} {}", guest.ip))?;
    goes_on(lab, &guest.vrnic)?;
    Ok(client)
}

/// Checks that a peer's program learns of the loss as from hardware: its requests are not answered.
fn ends_with_error(program: Program) -> Check {
    let o = program.finish_within(LIMIT);
    let told = o.text.contains("status 12") && o.code.is_some_and(|c| c != 124);
    require(!o.ok() && told, format!("the peer's program ends so: {:?} {}", o.code, o.text))
}

/// Duration of a hostile process in each round, s.
const SECONDS_HOSTILE: u32 = 4;
const NAMES: [&str; 2] = ["first", "second"];

/// `rounds`: how often guests restart and reload their drivers in each test, and how many rounds hostile processes run.
pub(super) fn run(s: &mut Suite<'_>, kernel: Option<&str>, rounds: u32) {
    if harness::uid() != 0 {
        println!("skipped: guests with vRNICs (their network needs root)");
        return;
    }
    let prepared = Prepared { kernel, systems: OnceCell::new() };
    let stage = Stage { prepared: &prepared, scene: OnceCell::new() };
    for i in 0..NAMES.len() {
        programs::run(s, &stage, i);
        process::run(s, &stage, i, SECONDS_HOSTILE * rounds);
        changes::run(s, &stage, i, rounds);
    }
    wrong::provider(s, &stage);
    storage::run(s, &|| stage.scene());
    for i in 0..NAMES.len() {
        changes::power(s, &stage, i);
    }
    // Only two machines run at a time.
    drop(stage);
    s.check("a guest that `unirdma vm run` starts", |_| vm_run::check(&Lab::start(None)?, prepared.system()?));
    hosts::run(s, &prepared);
    loss::run(s, &prepared);
    wrong::run(s, &prepared);
}
