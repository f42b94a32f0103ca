//! Faults of a real RNIC under programs in containers, whose device goes away or loses its link, and what many leases
//! leave.

use std::time::Instant;

use harness::vm::{Task, Vfs};

use super::pool::{DIR, SOON};
use super::way_vf::Layer;
use crate::support::*;

/// Ways to wait for an event in `vf-events`.
const WAYS: [&str; 4] = ["blocks", "polls", "epolls", "selects"];
/// Longest time from the fault to the program's event. It is about 1 s while nothing else runs on the machine, which
/// emulates the guest.
const TOLD: Duration = Duration::from_secs(10);

/// `vf-events` on the VF of vRNIC a.
struct Program<'a> {
    layer: &'a Layer<'a>,
    task: Task,
    vf: usize,
}

impl<'a> Program<'a> {
    /// Starts it, and waits until it has traffic.
    fn start(layer: &'a Layer<'a>, mode: &str) -> Result<Program<'a>> {
        let task = layer.vfs.spawn(&Layer::container("a", &format!("vf-events {mode}")))?;
        let mut program = Program { layer, task, vf: 0 };
        program.prints("has traffic")?;
        let leased = (0..4).find(|&vf| layer.pool.of(vf, "kind").is_ok_and(|kind| kind == "leased"));
        program.vf = leased.ok_or_else(|| layer.pool.explain("no VF is leased"))?;
        Ok(program)
    }

    fn of(&self, key: &str) -> Result<String> {
        self.layer.pool.of(self.vf, key)
    }

    fn prints(&self, text: &str) -> Check {
        self.layer.prints(&self.task, text)
    }

    fn explain(&self, error: &str) -> String {
        self.layer.pool.explain(&format!("{error}: {}", self.task.text()))
    }

    /// Its process, as the host sees it.
    fn pid(&self) -> Result<String> {
        Ok(self.layer.vfs.must("pidof vf-events")?.trim().to_owned())
    }

    /// Waits for its end, and checks that each of its contexts has got one fatal event.
    fn ends_after_one_fatal_event(self) -> Result<String> {
        self.prints("closed")?;
        let o = self.task.finish();
        let lines = |line: String| o.text.lines().filter(|l| l.trim() == line).count();
        let is_told_once = |way: &&str| {
            lines(format!("{way}: local catastrophic error")) == 1 && lines(format!("{way}: 1 fatal")) == 1
        };
        require(o.ok() && WAYS.iter().all(is_told_once), self.layer.pool.explain(&o.text))?;
        Ok(o.text)
    }
}

/// Checks that a command that takes the device of a running program away tells the program in time, waits until the
/// program has closed it, and that the pool is well afterwards.
fn removal(vfs: &Vfs, command: impl Fn(&Program<'_>) -> Result<String>) -> Check {
    let layer = Layer::start(vfs)?;
    let program = Program::start(&layer, "")?;
    let command = command(&program)?;
    let began = Instant::now();
    let remover = vfs.spawn(&command)?;
    program.prints("all were told")?;
    let time = began.elapsed();
    require(time < TOLD, program.explain(&format!("the program was told after {time:?}")))?;
    program.ends_after_one_fatal_event()?;
    let has_ended = harness::within(SOON, || Ok(remover.has_ended()), "the removal does not end");
    has_ended.map_err(|e| layer.pool.explain(&e))?;
    require(remover.finish().ok(), "the removal has failed")?;
    layer.pool.all_ready()?;
    layer.works("ibv_rc_pingpong -n 20 -g 0")
}

/// The command that takes the driver of a program's VF away.
fn unbind(program: &Program<'_>) -> Result<String> {
    Ok(format!("echo {} >/sys/bus/pci/drivers/{}/unbind", program.of("pci")?, program.of("driver")?))
}

pub(super) fn tests(t: &mut Tests, vfs: &Shared<Vfs>) {
    t.on_mut(vfs, "VF faults: programs are told of a removed verbs device, and the pool makes it anew", |vfs| {
        removal(vfs, |program| Ok(format!("rdma link delete {}", program.of("verbs")?)))
    });
    t.on_mut(vfs, "VF faults: programs are told of a VF that was taken from its driver", |vfs| removal(vfs, unbind));
    t.on_mut(vfs, "VF faults: programs are told of the removal of all VFs", |vfs| {
        removal(vfs, |_| Ok("echo 0 >/sys/class/net/pf/device/sriov_numvfs".into()))
    });
    t.on_mut(vfs, "VF faults: a program that keeps its descriptor keeps the VF from others, and is shown", |vfs| {
        let layer = Layer::start(vfs)?;
        let program = Program::start(&layer, "keep")?;
        let (vf, pid) = (program.vf, program.pid()?);
        let remover = vfs.spawn(&unbind(&program)?)?;
        program.prints("all were told")?;
        let state = layer.pool.becomes(vf, "dirty")?;
        require(state.contains(&format!("[{pid}]")), &state)?;
        let log = layer.pool.explain("");
        let line = |l: &str| l.contains("whose device is gone") && l.contains(&pid);
        require(log.lines().any(line), format!("the log does not name {pid}: {log}"))?;
        require(layer.pool.of(vf, "kind")? == "dirty" && !remover.has_ended(), layer.pool.explain("it is not kept"))?;
        vfs.must(&format!("kill -9 {pid}"))?;
        program.task.finish();
        layer.pool.all_ready()?;
        require(remover.finish().ok(), "the removal has failed")
    });
    t.on_mut(vfs, "VF faults: a VF that loses its link keeps its program, and gets the link back", |vfs| {
        let layer = Layer::start(vfs)?;
        let program = Program::start(&layer, "port")?;
        vfs.must(&format!("ip link set {} down", program.of("netdev")?))?;
        program.prints("closed")?;
        let vf = program.vf;
        let o = program.task.finish();
        let both = ["polls: port error", "polls: port active"];
        require(o.ok() && both.iter().all(|text| o.text.contains(text)), layer.pool.explain(&o.text))?;
        require(!o.text.contains("fatal"), &o.text)?;
        layer.pool.becomes(vf, "ready").map(drop)
    });
    t.on_mut(vfs, "VF faults: while the PF is down, programs keep their VFs, and nobody gets a new one", |vfs| {
        let layer = Layer::start(vfs)?;
        let program = Program::start(&layer, "port")?;
        vfs.must("ip link set pf down")?;
        let seen = program.prints("polls: port error").and_then(|()| {
            require(program.of("kind")? == "leased", "the VF is not leased any more")?;
            let free = (program.vf + 1) % 4;
            let state = layer.pool.becomes(free, "raw")?;
            require(state.contains("port is not active"), state)
        });
        vfs.must("ip link set pf up")?;
        seen?;
        program.prints("closed")?;
        require(program.task.finish().ok(), "the program has failed")?;
        layer.pool.all_ready()
    });
    t.on_mut(vfs, "VF faults: a hundred leases leave nothing", |vfs| {
        const LEASES: usize = 100;
        let layer = Layer::start_with(vfs, "--vf-linger 0s --vf-dry wait=60s")?;
        let lease = |times: usize| {
            let o = layer.run("a", &format!("vf-contexts {times}"))?;
            require(o.ok() && o.text.contains("done"), layer.pool.explain(&o.text))?;
            layer.pool.all_ready()
        };
        // The first program makes what stays, such as the worker's threads.
        lease(1)?;
        let before = left(vfs)?;
        lease(LEASES)?;
        let log = layer.pool.explain("");
        let returned = log.lines().filter(|l| l.contains("is free again")).count();
        require(returned > LEASES, layer.pool.explain(&format!("{returned} leases")))?;
        let mut after = String::new();
        let is_same = || {
            after = left(vfs)?;
            Ok(after == before)
        };
        let same = harness::within(SOON, is_same, "something is left");
        same.map(drop).map_err(|e| format!("{e}: before {before}\nafter {after}"))
    });
}

/// What leases could leave: objects, pinned memory, descriptors and threads of the virtual layer, and files.
fn left(vfs: &Vfs) -> Result<String> {
    vfs.must(&format!(
        "rdma resource; grep -hs VmPin /proc/[0-9]*/status | sort | uniq -c | grep -v ' 0 kB'; \
         for p in $(pidof unirdma); do echo $p $(ls /proc/$p/fd | wc -l) $(ls /proc/$p/task | wc -l); done | sort; \
         find {DIR} | sort; mount | wc -l"
    ))
}
