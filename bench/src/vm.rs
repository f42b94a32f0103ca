//! `cargo xtask bench vm`: a guest with a vRNIC, relative to the kernel's own soft RNIC and virtio-net in the same
//! guest, and to containers.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use harness::{
    Lab, Output, Result, compile, figures, median, print_json,
    vm::{self, Guest, Plan, Systems, Task},
};
use serde::Serialize;

/// Name of the measuring program, `tests/c/vm-bench.c`.
const PROGRAM: &str = "vm-bench";
const GUEST: &str = "guest";
/// The container that the guest and the other container call, and that other container.
const CALLED: (&str, &str) = ("c", "10.0.0.3");
const OTHER: (&str, &str) = ("d", "10.0.0.4");
/// How long the program may take: emulated processors are slow.
const LIMIT: Duration = Duration::from_secs(120);

/// Figures of the program by their names.
type Figures = BTreeMap<String, f64>;

/// (name in the program, description, unit)
const OPERATIONS: [(&str, &str, &str); 6] = [
    ("write-2-p50", "WRITE, 2 B, typical", "us"),
    ("write-2-p99", "WRITE, 2 B, 99 %", "us"),
    ("send-2-p50", "SEND, 2 B, typical", "us"),
    ("send-2-p99", "SEND, 2 B, 99 %", "us"),
    ("write-65536", "WRITE, 64 KiB", "MiB/s"),
    ("write-1048576", "WRITE, 1 MiB", "MiB/s"),
];
const PAGES: [u32; 5] = [1, 16, 256, 4096, 65_536];
/// (description, number of WRITEs, pause before each in microseconds, the way that the program waits)
const NOTIFICATIONS: [(&str, u32, u32, &str); 3] = [
    ("one after the other, polled", 1000, 0, "poll"),
    ("each after a pause of 20 ms, polled", 100, 20_000, "poll"),
    ("one after the other, by completion events", 200, 0, "event"),
];
/// Trace events of QEMU: a processor of the guest reads or writes a register of a device. Under KVM each of them is an
/// exit.
const TRACE: [&str; 2] = ["memory_region_ops_read", "memory_region_ops_write"];
/// Parts of the names of the vRNIC's registers in the trace.
const REGISTERS: [&str; 2] = ["virtio-pci-", "-virtio-rdma'"];

#[derive(Serialize)]
struct Report {
    topology: String,
    runs: u32,
    within: Vec<Within>,
    to_container: Vec<ToContainer>,
    registration: Vec<Registration>,
    notifications: Vec<Notifications>,
}

/// A figure between two QPs of one process.
#[derive(Serialize)]
struct Within {
    what: &'static str,
    unit: &'static str,
    guest: f64,
    /// The kernel's own soft RNIC in the same guest.
    rxe: f64,
    guest_over_rxe: f64,
    container: f64,
    guest_over_container: f64,
}

/// A figure from the guest to a container.
#[derive(Serialize)]
struct ToContainer {
    what: &'static str,
    unit: &'static str,
    guest: f64,
    /// TCP over the vRNIC's network interface. Times are round trips.
    tcp: f64,
    /// The same if both ends spin instead of sleeping.
    tcp_spinning: Option<f64>,
    /// Ratio to the better of both.
    guest_over_tcp: f64,
    /// From a container to a container.
    container: f64,
    guest_over_container: f64,
}

/// Microseconds to register, or to deregister, an MR of fresh memory.
#[derive(Serialize)]
struct Registration {
    what: &'static str,
    pages: u32,
    guest: f64,
    rxe: f64,
    guest_over_rxe: f64,
    /// With pages that are moved into a memory file.
    container_share: f64,
    container_copy: f64,
    guest_over_share: f64,
}

/// Costs of posting WRITEs of 2 B from the guest's program, apart from memory accesses.
#[derive(Serialize)]
struct Notifications {
    what: &'static str,
    operations: u32,
    /// Notifications that woke the worker, from `vrnic show`.
    kicks: u64,
    /// Accesses of the guest to other registers of the device, from QEMU's trace.
    registers: usize,
    /// Sum of both, per operation.
    per_operation: f64,
}

fn ended_well(what: &str, o: &Output) -> Result<Figures> {
    if o.ok() { Ok(figures(&o.text)) } else { Err(format!("{what}: exit code {:?}: {}", o.code, o.text)) }
}

fn get(of: &Figures, name: &str) -> f64 {
    of.get(name).copied().unwrap_or(f64::NAN)
}

/// Measures each part `runs` times, in rounds over all parts, so that a slow phase of the machine affects all of them.
fn in_turn<const N: usize>(runs: u32, parts: [&dyn Fn() -> Result<Figures>; N]) -> Result<[Figures; N]> {
    let mut all: [Vec<Figures>; N] = std::array::from_fn(|_| Vec::new());
    for run in 1..=runs {
        eprintln!("  round {run} of {runs}");
        for (part, all) in parts.iter().zip(&mut all) {
            all.push(part()?);
        }
    }
    Ok(all.map(|runs| {
        let names: BTreeSet<&String> = runs.iter().flat_map(BTreeMap::keys).collect();
        names.into_iter().map(|n| (n.clone(), median(runs.iter().filter_map(|r| r.get(n).copied())))).collect()
    }))
}

struct Bench<'a> {
    lab: &'a Lab,
    guest: &'a Guest,
    /// The program for containers.
    program: String,
    runs: u32,
}

impl Bench<'_> {
    fn in_guest(&self, words: &str) -> Result<Figures> {
        let o = self.guest.spawn(&format!("{PROGRAM} {words}"))?.finish_within(LIMIT);
        ended_well(words, &o).map_err(|e| self.guest.explain(&e))
    }

    fn in_container(&self, vrnic: &str, environment: &str, words: &str) -> Result<Figures> {
        let o = self.lab.spawn(vrnic, &[], &format!("env {environment} {} {words}", self.program))?;
        ended_well(words, &o.finish_within(LIMIT))
    }

    /// Runs `call` while a program in a container serves it.
    fn called(&self, call: impl FnOnce(&str) -> Result<Figures>) -> Result<Figures> {
        let mut server = self.lab.spawn(CALLED.0, &[], &format!("{} unirdma0 serve", self.program))?;
        if !server.wait_listening(|| false) {
            return Err(format!("the server does not listen: {}", server.text()));
        }
        let result = call(&format!("unirdma0 call {}", CALLED.1))?;
        ended_well("serve", &server.finish_within(LIMIT))?;
        Ok(result)
    }

    fn within(&self) -> Result<Vec<Within>> {
        let (ours, rxe) = (|| self.in_guest("unirdma0 self"), || self.in_guest("rxe0 self"));
        let there = || self.in_container(OTHER.0, "", "unirdma0 self");
        let [ours, rxe, there] = in_turn(self.runs, [&ours, &rxe, &there])?;
        let row = |(name, what, unit)| {
            let [guest, rxe, container] = [&ours, &rxe, &there].map(|f| get(f, name));
            let (guest_over_rxe, guest_over_container) = (guest / rxe, guest / container);
            Within { what, unit, guest, rxe, guest_over_rxe, container, guest_over_container }
        };
        Ok(OPERATIONS.map(row).into())
    }

    fn to_container(&self) -> Result<Vec<ToContainer>> {
        let ours = || self.called(|words| self.in_guest(words));
        let there = || self.called(|words| self.in_container(OTHER.0, "", words));
        let [ours, there] = in_turn(self.runs, [&ours, &there])?;
        let row = |(name, what, unit): (&str, _, _)| {
            let percentile = name.rsplit_once("-2-").map(|(_, p)| p);
            let (tcp, tcp_spinning) = match percentile {
                Some(p) => (get(&ours, &format!("tcp-sleep-{p}")), Some(get(&ours, &format!("tcp-spin-{p}")))),
                None => (get(&ours, &name.replace("write", "tcp")), None),
            };
            let [guest, container] = [&ours, &there].map(|f| get(f, name));
            let guest_over_tcp = guest / tcp_spinning.map_or(tcp, |spinning| spinning.min(tcp));
            let guest_over_container = guest / container;
            ToContainer { what, unit, guest, tcp, tcp_spinning, guest_over_tcp, container, guest_over_container }
        };
        Ok(OPERATIONS.map(row).into())
    }

    fn registration(&self) -> Result<Vec<Registration>> {
        let (ours, rxe) = (|| self.in_guest("unirdma0 register"), || self.in_guest("rxe0 register"));
        let there = |way: &str| self.in_container(OTHER.0, &format!("UNIRDMA_MR={way}"), "unirdma0 register");
        let (share, copy) = (|| there("share"), || there("copy"));
        let [ours, rxe, share, copy] = in_turn(self.runs, [&ours, &rxe, &share, &copy])?;
        let row = |what: &'static str, name: &str, pages: u32| {
            let name = format!("{name}-{pages}-p50");
            let [guest, rxe, container_share, container_copy] = [&ours, &rxe, &share, &copy].map(|f| get(f, &name));
            let (guest_over_rxe, guest_over_share) = (guest / rxe, guest / container_share);
            Registration { what, pages, guest, rxe, guest_over_rxe, container_share, container_copy, guest_over_share }
        };
        let rows = |pages| [row("register", "reg", pages), row("deregister", "dereg", pages)];
        Ok(PAGES.into_iter().flat_map(rows).collect())
    }

    /// Kicks of the vRNIC so far, and accesses to registers that QEMU has traced.
    fn counts(&self) -> Result<(u64, usize)> {
        let kicks = self.lab.show(GUEST)?["kicks"].as_u64().ok_or("vrnic show has no kicks")?;
        let log = self.guest.qemu_log();
        let is_one = |l: &&str| TRACE.iter().any(|t| l.contains(t)) && REGISTERS.iter().all(|r| l.contains(r));
        Ok((kicks, log.lines().filter(is_one).count()))
    }

    fn trace(&self, enable: bool) -> Result<()> {
        TRACE.iter().try_for_each(|name| {
            self.guest.monitor("trace-event-set-state", &format!("{{\"name\": \"{name}\", \"enable\": {enable}}}"))
        })
    }

    fn notifications(&self) -> Result<Vec<Notifications>> {
        let one = |(what, operations, pause_us, way): (&'static str, u32, u32, &str)| {
            let task = self.guest.spawn(&format!("{PROGRAM} unirdma0 notify {operations} {pause_us} {way}"))?;
            wait_for(&task, "ready")?;
            self.trace(true)?;
            let before = self.counts()?;
            self.guest.must("touch /tmp/go")?;
            wait_for(&task, "done")?;
            let after = self.counts()?;
            self.trace(false)?;
            self.guest.must("rm /tmp/go")?;
            ended_well(what, &task.finish_within(LIMIT))?;
            let (kicks, registers) = (after.0 - before.0, after.1 - before.1);
            let per_operation = (kicks as f64 + registers as f64) / f64::from(operations);
            Ok(Notifications { what, operations, kicks, registers, per_operation })
        };
        NOTIFICATIONS.into_iter().map(one).collect()
    }
}

/// Waits until a program has printed a word.
fn wait_for(task: &Task, word: &str) -> Result<()> {
    let start = Instant::now();
    while !task.text().contains(word) {
        if task.has_ended() || start.elapsed() > LIMIT {
            return Err(format!("the program does not say {word}: {}", task.text()));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

pub(super) fn vm(json: bool, kernel: Option<&str>, runs: u32) -> Result<()> {
    eprintln!("building");
    vm::prepare()?;
    let systems = Systems::make_with(kernel, &|_, image| {
        image.rxe()?;
        image.compile(PROGRAM)
    })?;
    let system = systems.all.first().ok_or("no kernel")?;
    let lab = Lab::start(None)?;
    for (name, ip) in [(GUEST, "10.0.0.1"), CALLED, OTHER] {
        lab.vrnic(name, &["--ip", ip])?;
    }
    eprintln!("starting a guest with kernel {}", system.name);
    let plan = Plan { memory: "2G", ..Plan::default() };
    let guest = Guest::start(&lab, system, GUEST, &plan)?;
    guest.must("rdma link add rxe0 type rxe netdev eth0")?;
    let bench = Bench { lab: &lab, guest: &guest, program: compile(&lab, PROGRAM, &["-libverbs"])?, runs };
    eprintln!("kicks and exits");
    let notifications = bench.notifications()?;
    eprintln!("within the guest");
    let within = bench.within()?;
    eprintln!("from the guest to a container");
    let to_container = bench.to_container()?;
    eprintln!("registration");
    let registration = bench.registration()?;
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let topology = format!(
        "{cores} cores, which all share: the pollers, the containers' programs, and a guest with {} processors and kernel {}. QEMU emulates \
         these (no KVM): the guest's own instructions take many times longer than on a real processor, those of the virtual layer do not",
        plan.processors, system.name
    );
    let report = Report { topology, runs, within, to_container, registration, notifications };
    if json { print_json(&report) } else { report.print() }
}

impl Report {
    fn print(&self) -> Result<()> {
        println!("topology: {}", self.topology);
        println!("medians of {} runs in turn; a ratio of times below 1 is good, and one of MiB/s above 1\n", self.runs);
        println!(
            "{:26} {:>12} {:>12} {:>10} {:>12} {:>16}",
            "two QPs of one process", "guest", "rxe there", "guest/rxe", "container", "guest/container"
        );
        for r in &self.within {
            let name = format!("{} [{}]", r.what, r.unit);
            println!(
                "{name:26} {:>12.2} {:>12.2} {:>9.2}x {:>12.2} {:>15.2}x",
                r.guest, r.rxe, r.guest_over_rxe, r.container, r.guest_over_container
            );
        }
        println!(
            "\n{:26} {:>12} {:>12} {:>12} {:>10} {:>12} {:>16}",
            "to a container", "guest", "TCP", "TCP spinning", "guest/TCP", "container", "guest/container"
        );
        for r in &self.to_container {
            let name = format!("{} [{}]", r.what, r.unit);
            let spinning = r.tcp_spinning.map_or("-".into(), |t| format!("{t:.2}"));
            println!(
                "{name:26} {:>12.2} {:>12.2} {spinning:>12} {:>9.2}x {:>12.2} {:>15.2}x",
                r.guest, r.tcp, r.guest_over_tcp, r.container, r.guest_over_container
            );
        }
        println!("times are from posting to the completion; TCP's, over virtio-net, are there and back\n");
        println!(
            "{:12} {:>8} {:>12} {:>12} {:>10} {:>17} {:>16} {:>12}",
            "MR [us]", "pages", "guest", "rxe there", "guest/rxe", "container, share", "container, copy", "guest/share"
        );
        for r in &self.registration {
            println!(
                "{:12} {:>8} {:>12.1} {:>12.1} {:>9.2}x {:>17.1} {:>16.1} {:>11.2}x",
                r.what,
                r.pages,
                r.guest,
                r.rxe,
                r.guest_over_rxe,
                r.container_share,
                r.container_copy,
                r.guest_over_share
            );
        }
        println!(
            "\n{:44} {:>10} {:>8} {:>10} {:>14}",
            "WRITEs of 2 B within the guest", "operations", "kicks", "registers", "per operation"
        );
        for r in &self.notifications {
            println!("{:44} {:>10} {:>8} {:>10} {:>14.3}", r.what, r.operations, r.kicks, r.registers, r.per_operation);
        }
        println!(
            "kicks: notifications that woke the virtual layer, as its worker counts them; registers: accesses of the guest to the device's\n\
             other registers (the status of its interrupt), by QEMU's trace. Emulated guests have no exits; under KVM each of both is one.\n\
             Neither counts notifications of control commands, of which none are sent meanwhile"
        );
        Ok(())
    }
}
