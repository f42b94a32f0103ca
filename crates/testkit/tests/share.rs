//! The way *share*, in a process that starts with one thread. It has no test harness, because a harness starts more
//! threads.
//!
//! The virtual layer is another process: this program starts itself again as the host.
#![allow(missing_docs)]

use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use unirdma_driver::{Way, Why};
use unirdma_formats::WrOpcode;
use unirdma_ipc::config::EngineConfig;
use unirdma_ipc::vrnic::AddVrnic;
use unirdma_supervisor::admin::{Client, Request, Response};
use unirdma_supervisor::{HostConfig, serve, vrnic_dir, wait_ready};
use unirdma_testkit::{Program, WORKER_THREADS, connect};

fn host(dir: &str) -> ! {
    use std::os::fd::AsFd;
    // The host ends when its standard input ends, that is, with the test.
    let stdin = std::io::stdin();
    let config = HostConfig {
        dir: dir.into(),
        engine: EngineConfig::default(),
        wire: None,
        isolation: WORKER_THREADS,
        user: None,
        metrics: None,
        vfs: None,
        cdi: None,
        admin_group: None,
        ends_unused: false,
        centre: None,
    };
    let _ = serve(&config, stdin.as_fd(), || (), || ());
    std::process::exit(0);
}

/// Threads count in memory that is registered and deregistered meanwhile, and a child is forked now and then. If
/// threads cannot be stopped for a moment, the memory is copied, and nothing is lost either.
fn threads_count(a: &Program) {
    const WORDS: usize = 1 << 18;
    const THREADS: usize = 3;
    let pd: unirdma_abi::HandleResp = a.ctx.command(unirdma_abi::Command::CreatePd, &[0u8; 0]).expect("PD");
    let words: Vec<AtomicU64> = (0..WORDS).map(|_| AtomicU64::new(0)).collect();
    let stop = AtomicBool::new(false);
    let counted = std::thread::scope(|s| {
        let count = |t: usize| {
            let (mut n, mut i) = (0u64, t);
            while !stop.load(Ordering::Relaxed) {
                // No atomic addition: each word belongs to one thread.
                words[i].store(words[i].load(Ordering::Relaxed) + 1, Ordering::Relaxed);
                n += 1;
                i = if i + 67 * THREADS < WORDS { i + 67 * THREADS } else { t };
            }
            n
        };
        let counters: Vec<_> = (0..THREADS).map(|t| s.spawn(move || count(t))).collect();
        let (mut shared, mut rounds) = (0, 0);
        while rounds < 60 {
            // Parts that touch and overlap; their ends are not page-aligned.
            let (from, len) = ((rounds * 4999) % (WORDS / 2), 1000 + (rounds * 7919) % (WORDS / 3));
            let at = words[from..].as_ptr() as u64;
            let mut mr = unirdma_driver::Mr::register(&a.ctx, pd.handle, at, len as u64 * 8, at, 1).expect("MR");
            // Some MRs live long enough that the move pays off.
            std::thread::sleep(Duration::from_millis(if rounds % 4 == 0 { 30 } else { 0 }));
            shared += usize::from(mr.way().0 == Way::Share);
            if rounds % 10 == 0 {
                // SAFETY: the child only ends.
                let pid = unsafe { libc::fork() };
                if pid == 0 {
                    // SAFETY: as above.
                    unsafe { libc::_exit(0) };
                }
                let mut status = 0;
                // SAFETY: waits for our own child.
                unsafe { libc::waitpid(pid, &mut status, 0) };
                assert_eq!(status, 0);
            }
            mr.deregister().expect("deregister");
            rounds += 1;
        }
        stop.store(true, Ordering::Relaxed);
        println!("     {shared} of {rounds} registrations moved memory under running threads");
        counters.into_iter().map(|c| c.join().expect("thread")).sum::<u64>()
    });
    assert_eq!(words.iter().map(|w| w.load(Ordering::Relaxed)).sum::<u64>(), counted, "stores were lost");
}

/// Number of mappings of this process's memory file.
fn moved_mappings() -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("maps");
    maps.lines().filter(|l| l.contains("/memfd:unirdma-mr")).count()
}

/// Number of mappings that the virtual layer holds for vRNIC `a`.
fn held(client: &mut Client) -> u64 {
    let show = client.ask(&Request::VrnicShow { name: "a".into() }, None).expect("vRNIC");
    let Response::Vrnic(v) = show else { panic!("no vRNIC") };
    v.held.mappings.used
}

fn check(name: &str, passed: &mut u32, f: impl FnOnce()) {
    f();
    println!("test {name} ... ok");
    *passed += 1;
}

fn main() {
    let args: Vec<String> = std::env::args().collect();
    if args.get(1).map(String::as_str) == Some("--host") {
        host(&args[2]);
    }
    let dir = std::env::temp_dir().join(format!("unirdma-share-{}", std::process::id()));
    let mut child = Command::new(&args[0]).arg("--host").arg(&dir).stdin(Stdio::piped()).spawn().expect("host");
    let mut client = wait_ready(&dir, Duration::from_secs(10)).expect("ready");
    for name in ["a", "b"] {
        let add = AddVrnic { name: name.into(), ..AddVrnic::default() };
        client.ask(&Request::VrnicAdd(add), None).expect("vRNIC");
    }
    let socket = |n: &str| vrnic_dir(&dir, n).join("vhost.sock");
    const LEN: usize = 3 << 20;
    let mut passed = 0;
    let (mut a, b) = (Program::new(&socket("a"), LEN), Program::new(&socket("b"), LEN));
    connect(&a, &b);

    check("one_thread_shares", &mut passed, || {
        assert_eq!((a.mr.way().0, b.mr.way().0), (Way::Share, Way::Share), "{:?}", a.mr.way().1)
    });

    check("bytes_survive_the_move_and_travel", &mut passed, || {
        for i in 0..LEN {
            a.buf[i] = (i * 13 + i / 4096) as u8;
        }
        // A second registration finds the pages already moved, and changes none of them.
        let again = Program::new(&socket("a"), 64);
        drop(again);
        a.post(WrOpcode::Write, &b, 0, LEN).expect("post");
        assert_eq!(a.wait().expect("completion").status, 0);
        assert!((0..LEN).all(|i| b.byte(i) == (i * 13 + i / 4096) as u8));
    });

    check("a_second_registration_of_moved_pages_is_mapped_too", &mut passed, || {
        let addr = a.buf.as_ptr() as u64;
        let pd: unirdma_abi::HandleResp = a.ctx.command(unirdma_abi::Command::CreatePd, &[0u8; 0]).expect("PD");
        let mut mr = unirdma_driver::Mr::register(&a.ctx, pd.handle, addr + 100, 5000, addr + 100, 1).expect("MR");
        assert_eq!(mr.way().0, Way::Share);
        assert_eq!(a.byte(5), (5usize * 13) as u8);
        mr.deregister().expect("deregister");
        a.post(WrOpcode::Write, &b, 0, 64).expect("post");
        assert_eq!(a.wait().expect("completion").status, 0, "the first registration is not disturbed");
    });

    check("neighbours_that_share_pages_lie_in_one_mapping", &mut passed, || {
        const STRIDE: usize = 20_000;
        let pd: unirdma_abi::HandleResp = a.ctx.command(unirdma_abi::Command::CreatePd, &[0u8; 0]).expect("PD");
        let v: Vec<u8> = (0..300 * STRIDE).map(|i| (i * 17 + i / 4096) as u8).collect();
        let register = |i: usize| {
            let at = v[i * STRIDE..].as_ptr() as u64;
            let mr = unirdma_driver::Mr::register(&a.ctx, pd.handle, at, STRIDE as u64, at, 1).expect("MR");
            assert_eq!(mr.way(), (Way::Share, Why::Fastest));
            mr
        };
        let before = (moved_mappings(), held(&mut client));
        let more = |now: u64, before: u64| now.saturating_sub(before);
        let mut mrs: Vec<_> = (0..300).map(register).collect();
        assert_eq!(moved_mappings(), before.0 + 1);
        std::thread::sleep(Duration::from_millis(10));
        // Freed gaps are used again.
        let third = |mrs: &mut [unirdma_driver::Mr]| {
            mrs.iter_mut().step_by(3).for_each(|m| m.deregister().expect("deregister"))
        };
        third(&mut mrs);
        (0..300).step_by(3).for_each(|i| mrs[i] = register(i));
        assert_eq!(moved_mappings(), before.0 + 1);
        let regions = more(held(&mut client), before.1);
        assert!(regions < 20, "{regions} mappings of the virtual layer");
        std::thread::sleep(Duration::from_millis(10));
        mrs.iter_mut().rev().for_each(|m| m.deregister().expect("deregister"));
        assert_eq!((moved_mappings(), held(&mut client)), before);
        assert!(v.iter().enumerate().all(|(i, &x)| x == (i * 17 + i / 4096) as u8));
    });

    check("mrs_are_copied_before_rings_find_no_room", &mut passed, || {
        const MRS: usize = 1200;
        let pd: unirdma_abi::HandleResp = a.ctx.command(unirdma_abi::Command::CreatePd, &[0u8; 0]).expect("PD");
        let v = vec![1u8; (2 * MRS + 1) * 4096];
        let first = v.as_ptr().addr().next_multiple_of(4096) as u64;
        let mut mrs: Vec<_> = (0..MRS as u64)
            .map(|i| {
                let at = first + 2 * i * 4096;
                unirdma_driver::Mr::register(&a.ctx, pd.handle, at, 4096, at, 1).expect("MR")
            })
            .collect();
        let ways: Vec<_> = mrs.iter().map(unirdma_driver::Mr::way).collect();
        let shared = ways.iter().take_while(|w| w.0 == Way::Share).count();
        assert!(shared > 800 && shared < 1000, "{shared} are mapped");
        assert!(ways[shared..].iter().all(|&w| w == (Way::Copy, Why::Limits)));
        let queues: Vec<_> =
            (0..200).map(|_| unirdma_driver::Cq::create(&a.ctx, 4096, None, false).expect("CQ")).collect();
        queues.iter().for_each(|cq| cq.destroy().expect("destroy"));
        mrs.iter_mut().for_each(|m| m.deregister().expect("deregister"));
    });

    check("pages_that_were_moved_before_keep_their_bytes", &mut passed, || {
        let pd: unirdma_abi::HandleResp = a.ctx.command(unirdma_abi::Command::CreatePd, &[0u8; 0]).expect("PD");
        let v: Vec<u8> = (0..200_000usize).map(|i| (i * 11 + i / 4096) as u8).collect();
        for round in 0..3 {
            let at = v.as_ptr() as u64;
            let mut mr = unirdma_driver::Mr::register(&a.ctx, pd.handle, at, v.len() as u64, at, 1).expect("MR");
            // Moving pages for a short-lived MR does not pay off, once that has been noticed.
            let expected = if round == 0 { (Way::Share, Why::Fastest) } else { (Way::Copy, Why::Brief) };
            assert_eq!(mr.way(), expected);
            mr.deregister().expect("deregister");
        }
        assert!(v.iter().enumerate().all(|(i, &x)| x == (i * 11 + i / 4096) as u8));
    });

    check("a_forked_child_has_private_copies", &mut passed, || {
        a.buf[0] = 1;
        // SAFETY: the child only reads and writes its memory and ends.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            let before = a.byte(0);
            a.buf[0] = 99;
            let seen_later = a.byte(1);
            let dead = a.post(WrOpcode::Write, &b, 0, 8).is_err() || a.cq.poll(1, |_, _| ()).is_err();
            let ok = before == 1 && a.byte(0) == 99 && seen_later == 13 && dead;
            // SAFETY: ends the child without running the parent's destructors.
            unsafe { libc::_exit(if ok { 0 } else { 1 }) };
        }
        a.buf[1] = 200;
        let mut status = 0;
        // SAFETY: waits for our own child.
        unsafe { libc::waitpid(pid, &mut status, 0) };
        assert_eq!(status, 0, "the child saw its own memory");
        assert_eq!((a.byte(0), a.byte(1)), (1, 200), "and the parent its own");
        a.post(WrOpcode::Write, &b, 0, 64).expect("post");
        assert_eq!(a.wait().expect("completion").status, 0, "the parent's device works on");
        assert_eq!(b.byte(1), 200);
    });

    check("shared_memory_is_mapped_as_it_is", &mut passed, || {
        let buffer = unirdma_driver::Buffer::new(5000).expect("buffer");
        let pd: unirdma_abi::HandleResp = a.ctx.command(unirdma_abi::Command::CreatePd, &[0u8; 0]).expect("PD");
        let at = buffer.addr() as u64;
        let mr = unirdma_driver::Mr::register(&a.ctx, pd.handle, at + 1, 4000, at + 1, 1).expect("MR");
        assert_eq!(mr.way().0, Way::Direct);
    });

    check("an_mr_that_lives_on_is_moved_later", &mut passed, || {
        let pd: unirdma_abi::HandleResp = a.ctx.command(unirdma_abi::Command::CreatePd, &[0u8; 0]).expect("PD");
        let register = |v: &[u8]| {
            let (at, len) = (v.as_ptr() as u64, v.len() as u64);
            unirdma_driver::Mr::register(&a.ctx, pd.handle, at, len, at, 1).expect("MR")
        };
        let other = [0u8; 64];
        let (polls, arms, registers) = (
            || _ = (0..5000).map(|_| a.cq.poll(1, |_, _| ())).all(|n| n == Ok(0)),
            || a.cq.arm(false),
            || register(&other).deregister().expect("deregister"),
        );
        // A long MR is not moved while the program polls, because that takes long.
        let cases: [(usize, &dyn Fn()); 4] =
            [(100_000, &polls), (100_000, &arms), (100_000, &registers), (3 << 20, &registers)];
        for (len, meanwhile) in cases {
            let v = vec![7u8; len];
            register(&v).deregister().expect("deregister");
            let mut mr = register(&v);
            assert_eq!(mr.way(), (Way::Copy, Why::Brief));
            let key = mr.key;
            let start = std::time::Instant::now();
            while mr.way().0 == Way::Copy && start.elapsed() < Duration::from_secs(10) {
                std::thread::sleep(Duration::from_millis(1));
                meanwhile();
            }
            assert_eq!((mr.way(), mr.key), ((Way::Share, Why::Fastest), key), "{len}");
            mr.deregister().expect("deregister");
            assert!(v.iter().all(|&x| x == 7));
        }
    });

    check("an_mr_that_has_served_much_is_worth_its_move", &mut passed, || {
        const LEN: usize = 8 << 20;
        let (mut c, d) = (Program::new(&socket("a"), LEN), Program::new(&socket("b"), LEN));
        connect(&c, &d);
        let pd: unirdma_abi::HandleResp = c.ctx.command(unirdma_abi::Command::CreatePd, &[0u8; 0]).expect("PD");
        let v = vec![3u8; LEN];
        let again = || {
            let at = v.as_ptr() as u64;
            let pd = pd.handle;
            unirdma_driver::Mr::register(&c.ctx, pd, at, LEN as u64, at, 1).expect("MR")
        };
        let mut idle = again();
        std::thread::sleep(Duration::from_millis(20));
        idle.deregister().expect("deregister");
        let mut mr = again();
        assert_eq!(mr.way(), (Way::Copy, Why::Brief), "20 ms are not worth moving 8 MiB");
        mr.deregister().expect("deregister");
        // The moved MR of `c` serves many requests although it lives only briefly. So does a second MR, by *copy*.
        for expected in [(Way::Share, Why::Fastest), (Way::Copy, Why::Brief)] {
            assert_eq!(c.mr.way(), expected);
            let start = std::time::Instant::now();
            let mut writes = 0;
            while writes < 16 || start.elapsed() < Duration::from_millis(20) {
                c.post(WrOpcode::Write, &d, 0, LEN).expect("post");
                assert_eq!(c.wait().expect("completion").status, 0);
                writes += 1;
            }
            c.register_again();
            assert_eq!(c.mr.way(), (Way::Share, Why::Fastest));
            // Without requests it counts as short-lived.
            c.register_again();
        }
    });

    check("running_threads_lose_no_store", &mut passed, || threads_count(&a));

    drop((a, b));
    drop(child.stdin.take());
    child.wait().expect("host");
    let _ = std::fs::remove_dir_all(&dir);
    println!("{passed} passed, 0 failed");
}
