//! Measures the RNIC alone: a virtual layer in this process, and pairs of vRNICs whose send queues are filled before
//! the measurement. No program polls or posts; one thread posts the executed WQEs again from time to time. `cargo xtask
//! bench engine` runs it.
//!
//! Prints these lines (times in nanoseconds):
//!
//! * `row`, for each number of pollers and each size: pollers, bytes of a WRITE, WRITEs per second, and the median, the
//!   99.9th percentile and the maximum of the time for which the lock of the RNIC was held.
//! * `nothing`, for each number of pollers: the same three figures of steps that only read the clock for some
//!   microseconds, on the same number of threads. The time by which they are longer was taken by the machine.
//! * `stages`, with one poller: WRITEs per second of no bytes, of 8 bytes, and of 8 bytes with a completion.
//! * `latency`, with one poller on a core of its own: the median and the 99th percentile of the time from the post of a
//!   WRITE of 8 bytes until its slot in the send queue is free again, and the time that a word takes from one core to
//!   the other.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use unirdma_abi as abi;
use unirdma_device::HoldTimes;
use unirdma_formats::{WrOpcode, send_flags};
use unirdma_ipc::config::{EngineConfig, Polling};
use unirdma_mem::MemFd;
use unirdma_supervisor::admin::{Request, Response};
use unirdma_testkit::{Queue, Scripted, TestHost};

/// Number of pairs of vRNICs. Each pair has one QP that writes.
const PAIRS: u8 = 2;
const POLLERS: [usize; 2] = [1, 2];
const SIZES: [u32; 4] = [8, 4096, 64 << 10, 1 << 20];
const LARGEST: u64 = 1 << 20;
/// Slots of a send queue, and most bytes that are posted at a time. Both keep the pollers busy while the other thread
/// sleeps.
const ENTRIES: u32 = 16_384;
const POSTED_BYTES: u32 = 256 << 20;
const REFILL: Duration = Duration::from_millis(1);
/// Entries of a CQ. More than the completions between two refills.
const CQ_ENTRIES: u32 = 4 * ENTRIES;
/// Number of WRITEs that are measured one at a time.
const SINGLE: u32 = 200_000;
/// Length of a step that only reads the clock. About as long as the lock of the RNIC is held.
const STEP: Duration = Duration::from_micros(3);
const WARM_UP: Duration = Duration::from_millis(200);
const MEASURED: Duration = Duration::from_secs(1);
/// `IBV_MTU_4096`.
const MTU: u8 = 5;

/// A session that writes, its QP, and the owner of the QP's peer.
struct Writer {
    session: Scripted,
    queue: Queue,
    local_key: u32,
    remote_key: u32,
    _peer: Scripted,
}

impl Writer {
    fn new(host: &TestHost, pair: u8) -> Writer {
        let add = |side: u8| {
            let socket = host.add(&format!("pair{pair}-{side}"), &format!("10.0.{pair}.{side}"));
            let mut session = Scripted::new(&socket);
            let file = MemFd::new(c"data", LARGEST as usize).expect("memory file");
            let at = session.add_memory(&file);
            let key = session.mr(at, LARGEST).lkey;
            (session, key)
        };
        let ((mut session, local_key), (mut peer, remote_key)) = (add(1), add(2));
        session.own_cq(CQ_ENTRIES, abi::NO_COMP_QUEUE);
        let (queue, other) = (session.queue(ENTRIES), peer.queue(1));
        session.connect(&queue, peer.gid, other.qpn, MTU);
        peer.connect(&other, session.gid, queue.qpn, MTU);
        Writer { session, queue, local_key, remote_key, _peer: peer }
    }

    /// Fills the whole send queue with WRITEs of `len` bytes, without posting them.
    fn fill(&self, len: u32, flags: u32) {
        let local = abi::Sge { addr: 0, length: len, lkey: self.local_key };
        for i in 0..ENTRIES {
            self.session.write_with(&self.queue, i, WrOpcode::Write, local, (0, self.remote_key), flags);
        }
    }

    /// Posts WRITEs until `depth` of them wait. Returns the number of executed WRITEs, modulo 2^32.
    fn refill(&self, depth: u32) -> u32 {
        self.session.drain_cq();
        let executed = self.session.executed(&self.queue);
        self.session.post(&self.queue, executed.wrapping_add(depth));
        executed
    }

    /// Waits until all posted WRITEs have been executed.
    fn drain(&self) {
        while self.session.executed(&self.queue) != self.session.posted(&self.queue) {
            std::thread::sleep(REFILL);
        }
    }
}

/// WRITEs per second of all pairs together.
fn rate(writers: &[Writer], len: u32, flags: u32) -> f64 {
    writers.iter().for_each(|w| w.fill(len, flags));
    let depth = ENTRIES.min(POSTED_BYTES / len.max(1));
    // Keeps the queues full for `time`. Returns the number of WRITEs that each pair has executed at the end.
    let run = |time: Duration| -> Vec<u32> {
        let start = Instant::now();
        loop {
            let executed = writers.iter().map(|w| w.refill(depth)).collect();
            if start.elapsed() >= time {
                return executed;
            }
            std::thread::sleep(REFILL);
        }
    };
    let before = run(WARM_UP);
    let start = Instant::now();
    let after = run(MEASURED);
    let seconds = start.elapsed().as_secs_f64();
    writers.iter().for_each(Writer::drain);
    let executed: u64 = before.iter().zip(after).map(|(b, a)| u64::from(a.wrapping_sub(*b))).sum();
    executed as f64 / seconds
}

/// Sorted latencies of WRITEs of 8 bytes, one at a time, ns.
fn latencies(w: &Writer) -> Vec<u64> {
    w.fill(8, 0);
    let mut times: Vec<u64> = (0..SINGLE)
        .map(|_| {
            let next = w.session.posted(&w.queue).wrapping_add(1);
            let began = Instant::now();
            w.session.post(&w.queue, next);
            while w.session.executed(&w.queue) != next {
                std::hint::spin_loop();
            }
            began.elapsed().as_nanos() as u64
        })
        .collect();
    times.sort_unstable();
    times
}

/// Durations of steps that only read the clock for [`STEP`], on `threads` threads at once: median, 99.9th percentile
/// and maximum, ns.
fn nothing(threads: usize) -> [u64; 3] {
    let steps = || {
        let (begun, mut times) = (Instant::now(), Vec::new());
        while begun.elapsed() < MEASURED {
            let step = Instant::now();
            while step.elapsed() < STEP {}
            times.push(step.elapsed().as_nanos() as u64);
        }
        times
    };
    let mut times = std::thread::scope(|scope| {
        let all: Vec<_> = (0..threads).map(|_| scope.spawn(steps)).collect();
        all.into_iter().flat_map(|t| t.join().expect("a thread")).collect::<Vec<u64>>()
    });
    times.sort_unstable();
    [times[times.len() / 2], times[times.len() * 999 / 1000], times[times.len() - 1]]
}

/// Time that a word takes from one core to another that waits for it, ns: the median of many rounds.
fn hop() -> u64 {
    let words = Arc::new([AtomicU32::new(0), AtomicU32::new(0)]);
    let other = words.clone();
    let echo = std::thread::spawn(move || {
        for n in 1..=SINGLE {
            while other[0].load(Ordering::Acquire) != n {
                std::hint::spin_loop();
            }
            other[1].store(n, Ordering::Release);
        }
    });
    let mut times: Vec<u64> = (1..=SINGLE)
        .map(|n| {
            let began = Instant::now();
            words[0].store(n, Ordering::Release);
            while words[1].load(Ordering::Acquire) != n {
                std::hint::spin_loop();
            }
            began.elapsed().as_nanos() as u64 / 2
        })
        .collect();
    echo.join().expect("the other thread");
    times.sort_unstable();
    times[times.len() / 2]
}

fn start(pollers: usize) -> (TestHost, Vec<Writer>) {
    let host = TestHost::start_with(EngineConfig { pollers: Some((pollers, pollers)), ..EngineConfig::default() });
    let writers = (1..=PAIRS).map(|pair| Writer::new(&host, pair)).collect();
    (host, writers)
}

/// Times for which the lock of the RNIC was held since the virtual layer was started.
fn held(host: &TestHost) -> HoldTimes {
    let Ok(Response::Status(status)) = host.ask(&Request::Status) else { panic!("no status") };
    status.rnic_held
}

fn main() {
    for pollers in POLLERS {
        for len in SIZES {
            let (host, writers) = start(pollers);
            let rate = rate(&writers, len, 0);
            let h = held(&host);
            println!("row {pollers} {len} {rate:.1} {} {} {}", h.p50_ns, h.p999_ns, h.worst_ns);
        }
    }
    for pollers in POLLERS {
        let [p50, p999, worst] = nothing(pollers);
        println!("nothing {pollers} {p50} {p999} {worst}");
    }
    let (host, writers) = start(1);
    let [none, copied, completed] = [(0, 0), (8, 0), (8, send_flags::SIGNALED)].map(|(n, f)| rate(&writers, n, f));
    println!("stages {none:.1} {copied:.1} {completed:.1}");
    drop((host, writers));
    let config = EngineConfig { polling: Polling::Dedicated, pollers: Some((1, 1)), ..EngineConfig::default() };
    let host = TestHost::start_with(config);
    let times = latencies(&Writer::new(&host, 1));
    drop(host);
    println!("latency {} {} {}", times[times.len() / 2], times[times.len() * 99 / 100], hop());
}
