//! Pollers that are added and removed, and the cost of polling the port.

use std::net::IpAddr;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use unirdma_ipc::config::{EngineConfig, Polling};
use unirdma_ipc::counters::PortCounters;
use unirdma_rnic::{Arrival, Tx};

use super::policy::{BACKLOG_NS, Past, TURN_NS, Then};
use super::poller::{LOOKS_BETWEEN_ROUNDS, Round, Watch};
use super::pollers::Pollers;
use super::sleepers::Sleeper;
use crate::port::Port;

/// A port without packets, which counts how often it was asked.
struct Quiet(Arc<AtomicUsize>);

impl Port for Quiet {
    fn send(&mut self, _: &mut Tx) {}
    fn receive(&mut self, _: &mut dyn FnMut(Arrival, &[u8])) -> bool {
        self.0.fetch_add(1, Ordering::Relaxed);
        false
    }
    fn join(&mut self, _: Vec<(IpAddr, OwnedFd)>) {}
    fn leave_others(&mut self, _: &[IpAddr]) {}
    fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        Vec::new()
    }
    fn counters(&self) -> PortCounters {
        PortCounters::default()
    }
}

#[test]
fn pollers_come_with_the_load_and_go() {
    let config = EngineConfig { polling: Polling::Dedicated, pollers: Some((1, 3)), ..EngineConfig::default() };
    let pollers = Pollers::start(&config, None).unwrap();
    assert_eq!(pollers.wanted(), 1);
    pollers.note_backlog(true, 1000);
    pollers.note_backlog(true, 1000 + BACKLOG_NS / 2);
    assert_eq!(pollers.wanted(), 1, "it may be over in a moment");
    pollers.note_backlog(false, 1000 + BACKLOG_NS);
    pollers.note_backlog(true, 2000 + BACKLOG_NS);
    assert_eq!(pollers.wanted(), 1, "it was over in between");
    pollers.note_backlog(true, 2000 + 2 * BACKLOG_NS);
    let began = Instant::now();
    while pollers.wanted() != 1 {
        assert!(began.elapsed() < Duration::from_secs(20), "{} pollers stay", pollers.wanted());
        pollers.sleepers.all().for_each(Sleeper::call);
        std::thread::sleep(Duration::from_millis(1));
    }
    for i in 1..9 {
        pollers.backlog_since_ns.store(1, Ordering::Relaxed);
        pollers.note_backlog(true, 1 + i * BACKLOG_NS);
        assert!((1..=3).contains(&pollers.wanted()));
    }
    pollers.stop();
}

/// A round without packets does not take the RNIC. A round with work in the RNIC does not ask the port again at once.
#[test]
fn a_port_without_packets_costs_no_look_at_the_rnic() {
    const ROUNDS: u64 = 640;
    let asked = Arc::new(AtomicUsize::new(0));
    let pollers = Pollers::start(&EngineConfig::default(), Some(Box::new(Quiet(asked.clone())))).unwrap();
    pollers.stop();
    while Arc::strong_count(&pollers) > 1 {
        std::thread::yield_now();
    }
    let port = pollers.port.as_ref().unwrap();
    let mut watch = Watch::new(0, 1);
    pollers.round(&mut watch);
    let count = |calls: bool, asked_ns: u64, watch: &mut Watch| {
        let before = (asked.load(Ordering::Relaxed) as u64, pollers.rnic.held().times);
        for _ in 0..ROUNDS {
            pollers.signs.runnable.store(calls, Ordering::Relaxed);
            port.poll(pollers.now() + 1_000_000_000);
            port.lock().asked_ns = asked_ns;
            pollers.round(watch);
        }
        (asked.load(Ordering::Relaxed) as u64 - before.0, pollers.rnic.held().times - before.1)
    };
    let (looks, holds) = count(false, u64::MAX, &mut watch);
    assert!(looks == ROUNDS - holds && holds <= 2 * ROUNDS / u64::from(LOOKS_BETWEEN_ROUNDS), "{looks}, {holds}");
    assert_eq!(count(true, u64::MAX, &mut watch), (0, ROUNDS));
    assert_eq!(count(true, 0, &mut watch), (ROUNDS, ROUNDS));
}

/// A program that spins on the poller's core can delay a poller's turn for longer than the port is polled.
#[test]
fn a_port_with_packets_is_polled_however_late_the_turn_comes() {
    let asked = Arc::new(AtomicUsize::new(0));
    let pollers = Pollers::start(&EngineConfig::default(), Some(Box::new(Quiet(asked.clone())))).unwrap();
    pollers.stop();
    while Arc::strong_count(&pollers) > 1 {
        std::thread::yield_now();
    }
    let port = pollers.port.as_ref().unwrap();
    port.poll(pollers.now());
    let late = pollers.now() + 1_000_000_000;
    for turn in [late, late + 1] {
        port.receive(&mut port.lock(), turn, &pollers.rnic);
        assert_eq!(asked.load(Ordering::Relaxed), 1);
    }
}

/// A poller on a shared core ends its turn, unless it carries a finished job to the RNIC, for which a program waits.
#[test]
fn a_turn_ends_unless_a_job_is_on_its_way_back() {
    let round = |ended_ns, starved| Round { found: true, starved, idle: false, ended_ns };
    let (within, after) = (round(TURN_NS - 1, false), round(TURN_NS, false));
    for (polling, leaves) in [(Polling::Shared, true), (Polling::Dedicated, false)] {
        let config = EngineConfig { polling, pollers: Some((1, 1)), ..EngineConfig::default() };
        let pollers = Pollers::start(&config, None).unwrap();
        let then = |round: &Round, carries_job| pollers.after_work(&mut Past::default(), round, carries_job);
        let if_shared = |then| if leaves { then } else { Then::Looks };
        assert_eq!(then(&within, false), Then::Looks);
        assert_eq!(then(&after, false), if_shared(Then::Leaves));
        assert_eq!(then(&round(0, true), false), if_shared(Then::Starves));
        assert_eq!(then(&after, true), Then::Looks);
        assert_eq!(then(&round(0, true), true), Then::Looks);
        pollers.stop();
    }
}
