//! Debian's programs in virtual machines whose guests have vRNICs, with each other and with containers.

mod changes;
mod hosts;
mod loss;
mod process;
mod programs;
mod wrong;

use std::cell::OnceCell;

use super::*;
use crate::lab::Running;
use crate::vm::{self, Guest, Plan, Rxe, Systems, Task};

/// Who takes part in a test.
#[derive(Clone, Copy)]
enum End<'a> {
    Guest(&'a Guest),
    Container(Container<'a>),
    /// The Linux kernel's own RNIC in a machine of its own, by one of that machine's addresses.
    Rxe(&'a Rxe, &'static str),
}

/// The container of a vRNIC.
#[derive(Clone, Copy)]
struct Container<'a> {
    lab: &'a Lab,
    vrnic: &'static str,
    address: &'static str,
}

/// That of vRNIC `c`, beside the two guests.
fn container(lab: &Lab) -> End<'_> {
    End::Container(Container { lab, vrnic: "c", address: ADDRESS_OF_CONTAINER })
}

/// That of vRNIC `d`, which is a further peer.
fn other_container(lab: &Lab) -> End<'_> {
    End::Container(Container { lab, vrnic: "d", address: ADDRESS_OF_OTHER })
}

/// Makes the vRNICs of both.
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

/// Emulated processors are slow, and this machine may be busy: how long programs may take.
pub(super) const LIMIT: Duration = Duration::from_secs(60);
/// How long a test as a part of all tests waits for what may never come.
const SOON: Duration = Duration::from_secs(5);
const ADDRESS_OF_CONTAINER: &str = "10.0.0.3";
const ADDRESS_OF_OTHER: &str = "10.0.0.4";

impl End<'_> {
    /// Starts a program, which gets the option for the index of the GID if it takes one.
    fn spawn(&self, program: &str) -> Result<Program> {
        let gid = match self {
            End::Guest(g) => g.gid()?,
            End::Container(_) => 0,
            // The first is that of the link-local address.
            End::Rxe(..) => 1,
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

/// Two guests and a container on one virtual layer.
pub(super) struct Scene {
    pub guests: Vec<Guest>,
    /// What each guest's kernel has for itself.
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

    /// The first of them.
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

    /// Does something with a guest. If it fails, what the guest and the virtual layer have said explains it.
    fn explained(&self, i: usize, f: &dyn Fn(&Guest, &Lab) -> Check) -> Check {
        let (g, lab) = self.guest(i)?;
        f(g, lab).map_err(|e| format!("{}\n{}", g.explain(&e), lab.log()))
    }

    /// Nothing of a guest's is left in the virtual layer but what its kernel had in the beginning.
    fn nothing_left(&self, i: usize) -> Check {
        nothing_left(self.scene()?, i)
    }
}

/// How many QPs, CQs and MRs a guest has.
fn objects(lab: &Lab, guest: &Guest) -> Result<[Option<u64>; 4]> {
    let v = lab.show(&guest.vrnic)?;
    Ok(["qps", "cqs", "mrs_mapped", "mrs_copied"].map(|k| v[k].as_u64()))
}

/// Nothing of a guest's is left in the virtual layer but what its kernel had in the beginning.
pub(super) fn nothing_left(scene: &Scene, i: usize) -> Check {
    as_before(&scene.lab, &scene.guests[i], &scene.objects[i])
}

/// A guest has as many objects again as it had before.
fn as_before(lab: &Lab, guest: &Guest, before: &[Option<u64>; 4]) -> Check {
    let now = || objects(lab, guest);
    wait_until(|| now().as_ref() == Ok(before), "")
        .map_err(|_| format!("QPs, CQs, MRs mapped and copied: {:?}, before {before:?}", now()))
}

/// What has been written into a vRNIC's memory by others, in bytes.
fn written(lab: &Lab, vrnic: &str) -> Result<u64> {
    lab.show(vrnic)?["counters"]["received_bytes"].as_u64().ok_or_else(|| "no counters".into())
}

/// More than messages of connection management bring, of which one to a program that is gone may come late.
const DATA: u64 = 64 << 10;

/// Waits until more is written into a vRNIC's memory, by a program that writes all the time.
fn goes_on(lab: &Lab, vrnic: &str) -> Check {
    let begin = written(lab, vrnic)?;
    wait_until(|| written(lab, vrnic).is_ok_and(|n| n > begin + DATA), "nothing is written")
}

/// Programs that write for so long from the container into the memory of a guest; the container's.
fn connected(guest: &Guest, lab: &Lab, seconds: u32) -> Result<Program> {
    let p = format!("ib_write_bw -s 65536 -D {seconds}");
    End::Guest(guest).serve(&p)?;
    let client = container(lab).spawn(&format!("{p} {}", guest.ip))?;
    goes_on(lab, &guest.vrnic)?;
    Ok(client)
}

/// A peer's program hears of its loss as from hardware: what it had asked for is not answered.
fn ends_with_error(program: Program) -> Check {
    let o = program.finish_within(LIMIT);
    let told = o.text.contains("status 12") && o.code.is_some_and(|c| c != 124);
    require(!o.ok() && told, format!("the peer's program ends so: {:?} {}", o.code, o.text))
}

/// How long a hostile process goes on in each round.
const SECONDS_HOSTILE: u32 = 4;
const NAMES: [&str; 2] = ["first", "second"];

/// `rounds`: how often guests start again and load their drivers again, each time, and how long hostile processes go on.
pub(super) fn run(s: &mut Suite<'_>, kernel: Option<&str>, rounds: u32) {
    if lab::uid() != 0 {
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
    // Two machines at a time.
    drop(stage);
    s.check("a guest that `unirdma vm run` starts", |_| vm_run::check(&Lab::start(None)?, prepared.system()?));
    hosts::run(s, &prepared);
    loss::run(s, &prepared);
    wrong::run(s, &prepared);
}
