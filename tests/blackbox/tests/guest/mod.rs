//! Debian's programs in virtual machines whose guests have vRNICs, with each other and with containers.

mod changes;
mod hosts;
mod libvirt;
mod loss;
mod process;
mod programs;
mod storage;
mod vm_run;
mod wrong;

use harness::vm::{self, Guest, Plan, Rxe, Systems, Task};
use harness::{conformance, reruns};

use crate::support::*;

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
const LIMIT: Duration = Duration::from_secs(120);
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
            (End::Guest(g), server) => {
                soon(|| server.has_ended() || g.listens(), &format!("`{program}` does not listen"))?
            }
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
    both_end_well(reruns::of_perftest(run)?)
}

/// Two guests and a container on one virtual layer.
struct Scene {
    guests: Vec<Guest>,
    /// Numbers of objects that each guest's kernel has for itself.
    objects: Vec<[Option<u64>; 4]>,
    lab: Lab,
    systems: Shared<Systems>,
}

impl Scene {
    fn start(systems: &Shared<Systems>) -> Result<Scene> {
        let lab = Lab::start(None)?;
        add_containers(&lab)?;
        let mut scene = Scene { guests: Vec::new(), objects: Vec::new(), lab, systems: systems.clone() };
        for (i, vrnic) in VRNICS.into_iter().enumerate() {
            scene.lab.vrnic(vrnic, &["--ip", &format!("10.0.0.{}", i + 1)])?;
            scene.guests.push(scene.boot(i)?);
        }
        for guest in &scene.guests {
            guest.come_up()?;
            guest.set_up()?;
            scene.objects.push(objects(&scene.lab, guest)?);
        }
        Ok(scene)
    }

    fn boot(&self, i: usize) -> Result<Guest> {
        self.systems.with(|systems| {
            let system = systems.all.get(i).or(systems.all.first()).ok_or("no kernel")?;
            Guest::boot(&self.lab, system, VRNICS[i], &Plan::default())
        })
    }

    /// A guest as an end of a test.
    fn end(&self, i: usize) -> End<'_> {
        End::Guest(&self.guests[i])
    }

    /// Starts the guests that a test has ended.
    fn recover(&mut self) -> Check {
        for i in 0..self.guests.len() {
            if self.guests[i].has_ended() {
                self.guests[i] = self.boot(i)?;
                self.guests[i].come_up()?;
                self.guests[i].set_up()?;
                self.objects[i] = objects(&self.lab, &self.guests[i])?;
            }
        }
        Ok(())
    }

    /// Checks that the virtual layer has no objects of a guest except those that its kernel had at first.
    fn nothing_left(&self, i: usize) -> Check {
        as_before(&self.lab, &self.guests[i], &self.objects[i])
    }
}

/// The scene and its tests.
type Stage = Shared<Scene>;

/// Adds a test of guest `i` of the stage. If it fails, the logs of the guest and of the virtual layer are added to its
/// error.
fn explained(
    t: &mut Tests,
    stage: &Stage,
    i: usize,
    name: impl Into<String>,
    f: impl FnOnce(&Guest, &Lab, &Scene) -> Check + Send + 'static,
) {
    t.on_mut(stage, name, move |scene| {
        scene.recover()?;
        let guest = &scene.guests[i];
        f(guest, &scene.lab, scene).map_err(|e| format!("{}\n{}", guest.explain(&e), scene.lab.log()))
    });
}

/// Calls `f` with the first system.
fn with_system<R>(systems: &Shared<Systems>, f: impl FnOnce(&vm::System) -> Result<R>) -> Result<R> {
    systems.with(|systems| f(systems.all.first().ok_or("no kernel")?))
}

/// Numbers of the QPs, CQs and MRs of a guest.
fn objects(lab: &Lab, guest: &Guest) -> Result<[Option<u64>; 4]> {
    let v = lab.show(&guest.vrnic)?;
    Ok(["qps", "cqs", "mrs_mapped", "mrs_copied"].map(|k| v[k].as_u64()))
}

/// Waits until a guest has the same numbers of objects as before.
fn as_before(lab: &Lab, guest: &Guest, before: &[Option<u64>; 4]) -> Check {
    let now = || objects(lab, guest);
    soon(|| now().as_ref() == Ok(before), "")
        .map_err(|_| format!("QPs, CQs, MRs mapped and copied: {:?}, before {before:?}", now()))
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

const VRNICS: [&str; 2] = ["a", "b"];

/// A number that an environment variable gives.
fn parameter(name: &str) -> Option<u32> {
    std::env::var(name).ok()?.parse().ok()
}

pub(crate) fn tests(t: &mut Tests) {
    t.topic(&[
        packages::RUN,
        packages::CONNECTING,
        packages::PYVERBS,
        packages::RELEASES,
        packages::NETWORK,
        packages::GUESTS,
        packages::LIBVIRT,
    ]);
    t.need_root("the network of guests needs root");
    // Which kernel, and how often guests restart and reload their drivers in each test.
    let kernel = std::env::var("BLACKBOX_KERNEL").ok();
    let rounds = parameter("BLACKBOX_ROUNDS").unwrap_or(1);
    let of_tests = kernel.clone();
    t.test("pyverbs: rdma-core's own tests, in a guest", move || conformance::in_a_guest(of_tests.as_deref()));
    let systems = &Shared::new(move || Systems::make(kernel.as_deref()));
    {
        // It ends with its last test, because only two machines run at a time.
        let scene = systems.clone();
        let stage = &Shared::new(move || Scene::start(&scene));
        for i in 0..NAMES.len() {
            programs::tests(t, stage, i);
            process::tests(t, stage, i, SECONDS_HOSTILE * rounds);
            changes::tests(t, stage, i, rounds);
        }
        wrong::provider(t, stage);
        storage::tests(t, stage);
        for i in 0..NAMES.len() {
            changes::power(t, stage, i);
        }
    }
    let of_run = systems.clone();
    t.test("a guest that `unirdma vm run` starts", move || {
        with_system(&of_run, |system| vm_run::check(&Lab::start(None)?, system))
    });
    let of_libvirt = systems.clone();
    t.test("a guest that libvirt starts", move || {
        with_system(&of_libvirt, |system| libvirt::check(&Lab::start(None)?, system))
    });
    hosts::tests(t, systems);
    loss::tests(t, systems);
    wrong::tests(t, systems);
}
