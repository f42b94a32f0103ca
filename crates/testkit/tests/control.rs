//! The control virtqueue: which side must notify the other, and which commands wait for others.
#![allow(missing_docs)]

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use unirdma_abi::Command;
use unirdma_supervisor::admin::Request;
use unirdma_testkit::{Hostile, Program, TestHost};

const QUERY: u8 = Command::QueryDevice as u8;

/// CPU time of this process, in which the virtual layer runs.
fn cpu_time() -> Duration {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(t.tv_sec as u64, t.tv_nsec as u32)
}

#[test]
fn an_idle_virtual_layer_takes_no_time_after_commands() {
    let host = TestHost::start();
    let mut h = Hostile::new(&host.add("a", "10.0.0.1"));
    for _ in 0..100 {
        h.command(QUERY, &[]);
    }
    std::thread::sleep(Duration::from_millis(100));
    let before = cpu_time();
    std::thread::sleep(Duration::from_millis(500));
    let took = cpu_time() - before;
    assert!(took < Duration::from_millis(50), "{took:?} of CPU time in half a second without work");
}

#[test]
fn a_driver_that_wants_no_calls_gets_none() {
    let host = TestHost::start();
    let mut h = Hostile::new(&host.add("a", "10.0.0.1"));
    h.command(QUERY, &[]);
    while !h.was_called() {
        std::thread::yield_now();
    }
    h.be_quiet();
    for _ in 0..10 {
        h.command(QUERY, &[]);
    }
    // The device calls after it has written the answer.
    std::thread::sleep(Duration::from_millis(50));
    assert!(!h.was_called());
}

#[test]
fn an_index_that_jumped_gets_nothing_and_costs_nothing_until_it_is_right() {
    let host = TestHost::start();
    let mut h = Hostile::new(&host.add("a", "10.0.0.1"));
    h.command(QUERY, &[]);
    let at = h.available_ring() + 2;
    let right = h.memory().load16(at, Ordering::Relaxed);
    h.memory().store16(at, right.wrapping_add(1000), Ordering::SeqCst);
    h.kick();
    std::thread::sleep(Duration::from_millis(100));
    let before = cpu_time();
    std::thread::sleep(Duration::from_millis(500));
    let took = cpu_time() - before;
    assert!(took < Duration::from_millis(50), "{took:?} of CPU time for a broken queue");
    h.memory().store16(at, right, Ordering::SeqCst);
    assert_eq!(h.command(QUERY, &[]).0, 0);
}

#[test]
fn a_session_whose_commands_never_end_keeps_nobody_waiting() {
    let host = TestHost::start();
    let flood = host.add("flood", "10.0.0.1");
    let other = host.add("other", "10.0.0.2");
    let stop = AtomicBool::new(false);
    std::thread::scope(|s| {
        let floods: Vec<_> = (0..2)
            .map(|_| {
                s.spawn(|| {
                    let mut h = Hostile::new(&flood);
                    let mut n = 0u64;
                    while !stop.load(Ordering::Relaxed) {
                        assert_eq!(h.command_as_asked(QUERY).1, 0);
                        n += 1;
                    }
                    n
                })
            })
            .collect();
        let start = Instant::now();
        for _ in 0..20 {
            // A new session, its commands, and administration: listener, socket, control queue, eventfd.
            drop(Program::new(&other, 4096));
            host.ask(&Request::Status).unwrap();
        }
        let took = start.elapsed();
        stop.store(true, Ordering::Relaxed);
        for f in floods {
            assert!(f.join().unwrap() > 20);
        }
        assert!(took < Duration::from_secs(20), "20 sessions and requests took {took:?}");
    });
}

#[test]
fn a_queue_that_is_stopped_and_set_up_again_serves_what_waits_there() {
    let host = TestHost::start();
    let mut h = Hostile::new(&host.add("a", "10.0.0.1"));
    for _ in 0..20 {
        // The device has just disabled kicks, and must enable them again as it stops.
        assert_eq!(h.command_as_asked(QUERY).1, 0);
        h.restart_control();
        assert_eq!(h.command_as_asked(QUERY).1, 0);
    }
}

#[test]
fn a_program_too_many_sees_the_device_and_is_told_why_it_cannot_use_it() {
    use std::os::unix::net::UnixStream;
    use unirdma_driver::{Context, device_config};
    const EUSERS: i32 = 87;
    let host = TestHost::start();
    let path = host.add_with("a", "10.0.0.1", |a| a.max_sessions = Some(2));
    let first = Context::open(&path).unwrap();
    let _second = Context::open(&path).unwrap();
    for _ in 0..3 {
        assert_eq!(device_config(&path).unwrap().magic, unirdma_abi::CONFIG_MAGIC);
        assert_eq!(Context::open(&path).err(), Some(EUSERS));
    }
    // Connections that do nothing, and never end, do not change that.
    let looks: Vec<_> = (0..300).map(|_| UnixStream::connect(&path).unwrap()).collect();
    assert_eq!(device_config(&path).unwrap().magic, unirdma_abi::CONFIG_MAGIC);
    assert_eq!(Context::open(&path).err(), Some(EUSERS));
    drop(looks);
    drop(first);
    // The virtual layer notices the end after a moment.
    let start = Instant::now();
    while Context::open(&path).is_err() {
        assert!(start.elapsed() < Duration::from_secs(10));
        std::thread::yield_now();
    }
}

#[test]
fn a_vrnic_gets_another_share_while_it_is_there() {
    use unirdma_ipc::vrnic::SetShare;
    use unirdma_supervisor::admin::Response;
    let host = TestHost::start();
    host.add_with("a", "10.0.0.1", |add| add.share.weight = Some(300));
    let shown = |r: Response| match r {
        Response::Vrnic(v) => v.share,
        r => panic!("{r:?}"),
    };
    let set =
        |share| host.ask(&Request::VrnicSet { name: "a".into(), share, allow_spoof: None, held: Default::default() });
    let none = SetShare::default();
    let share = shown(host.ask(&Request::VrnicShow { name: "a".into() }).unwrap());
    assert_eq!((share.weight, share.rate_bps, share.ops), (300, 0, 0));
    let limits = SetShare { rate_bps: Some(1_000_000), ops: Some(10), ..none };
    let share = shown(set(limits).unwrap());
    assert_eq!((share.weight, share.rate_bps, share.ops), (300, 1_000_000, 10), "what is not given stays");
    assert_eq!(shown(set(SetShare { rate_bps: Some(0), ..none }).unwrap()).rate_bps, 0);
    for wrong in [
        none,
        SetShare { weight: Some(0), ..none },
        SetShare { weight: Some(10_001), ..none },
        SetShare { burst_us: Some(10_000_001), ..none },
    ] {
        assert!(set(wrong).is_err(), "{wrong:?}");
    }
    assert_eq!(shown(host.ask(&Request::VrnicShow { name: "a".into() }).unwrap()).ops, 10);
    assert!(
        host.ask(&Request::VrnicSet { name: "b".into(), share: limits, allow_spoof: None, held: Default::default() })
            .is_err()
    );
}
