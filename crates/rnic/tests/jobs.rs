//! Copies that leave the core as jobs, and what happens while a thread does them.

use unirdma_abi as abi;
use unirdma_formats::{WcStatus, WrOpcode, attr_mask as m};
use unirdma_rnic::{Job, Output, Share};
use unirdma_simkit::*;

const BYTES: usize = 100_000;

fn remote(op: WrOpcode, wr_id: u64, peer: &End, off: u64) -> abi::SqWqe {
    abi::SqWqe { remote_addr: IOVA + off, rkey: peer.key, ..wqe(op, wr_id) }
}

fn run(p: &mut Pair, mut job: Box<Job>) {
    job.run(&mut [0; 4096], || 0);
    p.rnic.end_job(job);
}

/// The jobs of two rounds, because a round ends after it has made one.
fn take_two(p: &mut Pair) -> [Box<Job>; 2] {
    [(); 2].map(|()| {
        p.rnic.poll(0);
        p.rnic.take_job().unwrap()
    })
}

/// Each end writes to the other: both writes become jobs, because neither vRNIC is the only one with work. Returns the
/// jobs of a and of b.
fn two_jobs(p: &mut Pair) -> [Box<Job>; 2] {
    p.a.fill(0, &pattern(BYTES, 1));
    p.b.fill(BYTES, &pattern(BYTES, 2));
    p.a.post(remote(WrOpcode::Write, 1, &p.b, 0), &[p.a.sge(0, BYTES as u32)]);
    p.b.post(remote(WrOpcode::Write, 2, &p.a, BYTES as u64), &[p.b.sge(BYTES as u64, BYTES as u32)]);
    let jobs = take_two(p);
    assert!(!p.rnic.has_jobs() && p.a.poll().is_empty() && p.b.poll().is_empty());
    jobs
}

/// Makes the memory of an end private memory of a process.
fn through_process(p: &mut Pair, of_a: bool) {
    let e = if of_a { &mut p.a } else { &mut p.b };
    e.go_through_process(&mut p.rnic);
}

fn released(p: &mut Pair) -> bool {
    let mut out = Vec::new();
    p.rnic.drain_outputs(&mut out);
    out.iter().any(|o| matches!(o, Output::Released { .. }))
}

#[test]
fn two_copies_are_done_side_by_side_and_end_in_any_order() {
    let mut p = Pair::new();
    let [of_a, of_b] = two_jobs(&mut p);
    run(&mut p, of_b);
    assert_eq!((p.a.poll().len(), p.b.done().wr_id), (0, 2));
    assert_eq!(p.a.bytes(BYTES, BYTES), pattern(BYTES, 2));
    run(&mut p, of_a);
    assert_eq!(p.a.done().wr_id, 1);
    assert_eq!(p.b.bytes(0, BYTES), pattern(BYTES, 1));
}

/// A vRNIC with one QP would lose its part of the time if turns of others came between the making of its job and the
/// copy.
#[test]
fn no_turn_of_another_delays_a_job() {
    let mut p = Pair::new();
    for wr_id in 0..8 {
        p.b.post(remote(WrOpcode::Write, wr_id, &p.a, 0), &[p.b.sge(0, 8)]);
    }
    p.a.post(remote(WrOpcode::Write, 9, &p.b, 0), &[p.a.sge(0, BYTES as u32)]);
    p.rnic.poll(0);
    assert!(p.rnic.has_jobs() && p.b.poll().is_empty(), "b has had no turn after the job was made");
    let job = p.rnic.take_job().unwrap();
    p.rnic.poll(0);
    assert_eq!(p.b.poll().len(), 8, "b works while somebody copies for a");
    run(&mut p, job);
    p.rnic.poll(0);
    assert_eq!(p.a.done().wr_id, 9);
}

#[test]
fn a_pair_that_is_alone_needs_no_job() {
    let mut p = Pair::new();
    p.settle();
    p.a.post(remote(WrOpcode::Write, 1, &p.b, 0), &[p.a.sge(0, BYTES as u32)]);
    while p.rnic.poll(0) {
        assert!(!p.rnic.has_jobs());
    }
    assert_eq!(status(&p.a.done()), WcStatus::Success);
}

#[test]
fn memory_that_a_command_takes_away_is_written_no_more() {
    let mut p = Pair::new();
    let [of_a, of_b] = two_jobs(&mut p);
    p.rnic.dereg_mr(p.b.session, p.b.mr).unwrap();
    assert!(!p.rnic.delay_command(p.b.session), "nobody copies at this moment");
    let before = p.b.bytes(0, BYTES);
    run(&mut p, of_a);
    p.run(SECOND);
    // The copy that was stopped is tried again, and the key is gone.
    assert_eq!(status(&p.a.done()), WcStatus::RemAccessErr);
    run(&mut p, of_b);
    p.run(SECOND);
    assert!(p.b.bytes(0, BYTES) == before, "nothing was written after the command");
    assert!(p.b.poll().iter().any(|c| c.status != 0));
}

#[test]
fn a_copy_that_is_stopped_for_something_else_is_done_again() {
    let mut p = Pair::new();
    let jobs = two_jobs(&mut p);
    assert!(!p.rnic.delay_command(p.b.session));
    for job in jobs {
        run(&mut p, job);
    }
    p.run(SECOND);
    assert_eq!((status(&p.a.done()), status(&p.b.done())), (WcStatus::Success, WcStatus::Success));
    assert_eq!(p.b.bytes(0, BYTES), pattern(BYTES, 1));
}

/// While a thread copies, a command that takes the memory away waits for it, and for nothing else.
#[test]
fn a_command_waits_for_the_copy_of_the_moment() {
    let mut p = Pair::new();
    through_process(&mut p, true);
    p.a.fill(0, &pattern(BYTES, 1));
    p.a.post(remote(WrOpcode::Write, 1, &p.b, 0), &[p.a.sge(0, BYTES as u32)]);
    p.rnic.poll(0);
    let mut job = p.rnic.take_job().unwrap();
    let (go, gone) = (std::sync::Barrier::new(2), std::sync::Barrier::new(2));
    std::thread::scope(|s| {
        let bell = p.a.bell.clone();
        let thread = s.spawn(|| {
            go.wait();
            // The copy through a process begins again and again, until it is stopped.
            for _ in 0..1000 {
                job.run(&mut [0; 64], || 0);
            }
            gone.wait();
            job
        });
        go.wait();
        while !bell.is_copying() {
            std::hint::spin_loop();
        }
        let delayed = p.rnic.delay_command(p.a.session);
        assert_eq!(p.rnic.is_delayed(p.a.session), delayed);
        gone.wait();
        let job = thread.join().unwrap();
        p.rnic.end_job(job);
        assert!(!p.rnic.is_delayed(p.a.session));
        assert_eq!(released(&mut p), delayed);
    });
    p.run(SECOND);
    assert_eq!(status(&p.a.done()), WcStatus::Success);
}

#[test]
fn a_qp_that_is_reset_or_destroyed_hears_of_no_old_copy() {
    for destroyed in [false, true] {
        let mut p = Pair::new();
        let [of_a, of_b] = two_jobs(&mut p);
        if destroyed {
            p.rnic.destroy_qp(p.a.session, p.a.qpn).unwrap();
        } else {
            p.reconnect(true, |a| a);
            p.reconnect(false, |a| a);
        }
        run(&mut p, of_a);
        run(&mut p, of_b);
        assert!(p.a.poll().is_empty());
        if !destroyed {
            p.a.post(remote(WrOpcode::Write, 7, &p.b, 0), &[p.a.sge(0, 8)]);
            p.run(SECOND);
            assert_eq!((p.a.done().wr_id, p.state(true)), (7, 3));
        }
    }
}

/// A receive that a copy writes to is flushed when the copy has ended, not before.
#[test]
fn a_receive_is_its_programs_again_when_nobody_writes_it() {
    let mut p = Pair::new();
    let to = p.b.sge(0, BYTES as u32);
    p.b.recv(5, &[to]);
    p.a.post(wqe(WrOpcode::Send, 1), &[p.a.sge(0, BYTES as u32)]);
    p.b.post(remote(WrOpcode::Write, 2, &p.a, 0), &[p.b.sge(0, BYTES as u32)]);
    let jobs = take_two(&mut p);
    p.modify(false, m::STATE, abi::QpAttr { qp_state: 6, ..Default::default() });
    p.rnic.poll(0);
    assert!(p.b.poll().is_empty(), "it is being written");
    for job in jobs {
        run(&mut p, job);
    }
    p.run(SECOND);
    let flushed: Vec<u64> = p.b.poll().iter().filter(|c| c.status != 0).map(|c| c.wr_id).collect();
    assert!(flushed.contains(&5), "{flushed:?}");
}

/// Memory that is slow holds up its own process only, and in the end its QP.
#[test]
fn a_process_with_slow_memory_waits_alone_and_not_for_ever() {
    let mut p = Pair::new();
    let other = End::of_vrnic(&mut p.rnic, p.a.vrnic, 64, unirdma_formats::QpType::Rc);
    through_process(&mut p, true);
    p.a.post(remote(WrOpcode::Write, 1, &p.b, 0), &[p.a.sge(0, 100)]);
    p.a.post(remote(WrOpcode::Write, 2, &p.b, 0), &[p.a.sge(0, 100)]);
    p.rnic.poll(0);
    let stuck = p.rnic.take_job().unwrap();
    assert!(stuck.may_wait());
    p.b.post(remote(WrOpcode::Write, 3, &p.a, 0), &[p.b.sge(0, 100)]);
    p.rnic.poll(0);
    assert!(p.rnic.take_job().is_none(), "one at a time goes through private memory");
    p.rnic.note_slow(stuck.number());
    p.run(SECOND);
    assert!(p.rnic.take_job().is_none() && p.b.poll().is_empty(), "the write of b goes into the same memory");
    assert!(!p.rnic.delay_command(other.session), "another session of the vRNIC has nothing to wait for");
    p.rnic.give_up(stuck.number());
    p.run(SECOND);
    let done: Vec<_> = p.a.poll().iter().map(|c| (c.wr_id, status(c))).collect();
    assert_eq!(done, [(1, WcStatus::LocProtErr), (2, WcStatus::WrFlushErr)]);
    // At last the memory answers, but nothing is written any more.
    let before = p.b.bytes(0, 100);
    run(&mut p, stuck);
    assert_eq!(p.b.bytes(0, 100), before);
    assert!(p.a.poll().is_empty() && !released(&mut p));
    p.run(SECOND);
    assert_eq!((p.b.done().wr_id, p.a.poll().len()), (3, 0), "others go on");
}

#[test]
fn slow_memory_of_a_vrnic_gets_no_further_jobs() {
    let mut p = Pair::new();
    through_process(&mut p, true);
    p.a.post(remote(WrOpcode::Write, 1, &p.b, 0), &[p.a.sge(0, 100)]);
    p.rnic.poll(0);
    let stuck = p.rnic.take_job().unwrap();
    p.rnic.note_slow(stuck.number());
    p.b.post(remote(WrOpcode::Write, 3, &p.a, 0), &[p.b.sge(0, 100)]);
    p.run(SECOND);
    assert!(p.b.poll().is_empty() && !p.rnic.has_jobs(), "it waits for the memory");
    run(&mut p, stuck);
    p.run(SECOND);
    assert_eq!((status(&p.a.done()), status(&p.b.done())), (WcStatus::Success, WcStatus::Success));
}

#[test]
fn a_vrnic_keeps_its_limits() {
    let ops = |share: Share| {
        let mut p = Pair::new();
        p.rnic.set_share(p.a.vrnic, share);
        let mut done = 0;
        for ms in 1..=10 {
            for id in 0..16 {
                p.a.post(remote(WrOpcode::Write, id, &p.b, 0), &[p.a.sge(0, 1000)]);
            }
            p.run(ms * 1_000_000 - p.now);
            done += p.a.poll().len();
            if done % 16 != 0 {
                return done;
            }
        }
        done
    };
    assert_eq!(ops(Share::default()), 160);
    assert_eq!(ops(Share { ops: 10_000, burst_us: 0, ..Share::default() }), 11, "one each 100 us");
    assert_eq!(ops(Share { rate_bps: 64_000_000, burst_us: 0, ..Share::default() }), 9, "one each 125 us");
    assert_eq!(ops(Share { ops: 10_000, burst_us: 300, ..Share::default() }), 14, "three more at once");
}

/// End a posts four WRITEs of 20,000 bytes, with `keys` for b's memory, and b posts one, so that both vRNICs have work.
fn four_writes(p: &mut Pair, keys: [u32; 4]) -> [Box<Job>; 2] {
    p.a.fill(0, &pattern(80_000, 1));
    for (i, rkey) in (0..4).zip(keys) {
        let to = abi::SqWqe { rkey, ..remote(WrOpcode::Write, i, &p.b, i * 20_000) };
        p.a.post(to, &[p.a.sge(i * 20_000, 20_000)]);
    }
    p.b.post(remote(WrOpcode::Write, 9, &p.a, BYTES as u64), &[p.b.sge(BYTES as u64, 20_000)]);
    take_two(p)
}

fn completions(e: &mut End) -> Vec<(u64, WcStatus)> {
    e.poll().iter().map(|c| (c.wr_id, status(c))).collect()
}

const ALL_FOUR: [(u64, WcStatus); 4] =
    [(0, WcStatus::Success), (1, WcStatus::Success), (2, WcStatus::Success), (3, WcStatus::Success)];

#[test]
fn one_job_copies_for_the_requests_that_follow() {
    let mut p = Pair::new();
    let key = p.b.key;
    let [of_a, of_b] = four_writes(&mut p, [key; 4]);
    run(&mut p, of_a);
    assert_eq!(completions(&mut p.a), ALL_FOUR);
    assert_eq!(p.b.bytes(0, 80_000), pattern(80_000, 1));
    run(&mut p, of_b);
    p.run(SECOND);
    assert_eq!((completions(&mut p.a).len(), p.b.done().wr_id), (0, 9));
}

/// A job that has used up its time leaves the rest to the next one.
#[test]
fn a_long_job_ends_in_between() {
    let mut p = Pair::new();
    let key = p.b.key;
    let [mut of_a, of_b] = four_writes(&mut p, [key; 4]);
    let time = std::cell::Cell::new(0);
    of_a.run(&mut [], || time.replace(time.get() + 5_000));
    p.rnic.end_job(of_a);
    assert_eq!(completions(&mut p.a), ALL_FOUR[..2]);
    assert_eq!(p.b.bytes(0, 60_000), [pattern(80_000, 1)[..40_000].to_vec(), vec![0; 20_000]].concat());
    run(&mut p, of_b);
    p.run(SECOND);
    assert_eq!(completions(&mut p.a), ALL_FOUR[2..]);
    assert_eq!(p.b.bytes(0, 80_000), pattern(80_000, 1));
}

/// A message that is longer than a job may copy in its time is continued by the next job.
#[test]
fn a_long_message_goes_on_where_its_job_has_ended() {
    let mut p = Pair::new();
    let [mut of_a, of_b] = two_jobs(&mut p);
    of_a.run(&mut [], || if p.b.bytes(0, 1) == [0] { 0 } else { 1_000_000 });
    assert!(p.b.bytes(0, BYTES) != pattern(BYTES, 1), "it was not copied whole");
    p.rnic.end_job(of_a);
    assert!(p.a.poll().is_empty());
    run(&mut p, of_b);
    p.run(SECOND);
    assert_eq!((status(&p.a.done()), p.b.bytes(0, BYTES)), (WcStatus::Success, pattern(BYTES, 1)));
}

/// New pages of a region are mapped when they are accessed, which takes far longer than copying them. After a job that
/// took long the next ones read the clock more often, and no turn copies much, until many jobs were fast.
#[test]
fn after_a_job_that_took_long_the_next_ones_of_its_vrnic_are_careful() {
    let mut p = Pair::new();
    p.settle();
    let [mut of_a, of_b] = two_jobs(&mut p);
    let copied = |p: &Pair| p.b.bytes(0, BYTES).iter().zip(pattern(BYTES, 1)).take_while(|(a, b)| **a == *b).count();
    // The clock shows a millisecond more once the job has copied something.
    let slowly = |p: &Pair, before: usize| if copied(p) > before { 1_000_000 } else { 0 };
    of_a.run(&mut [], || slowly(&p, 0));
    let whole_piece = copied(&p);
    p.rnic.end_job(of_a);
    run(&mut p, of_b);
    p.rnic.poll(0);
    let mut next = p.rnic.take_job().expect("a job, although nobody else has work");
    next.run(&mut [], || slowly(&p, whole_piece));
    assert!(copied(&p) - whole_piece <= whole_piece / 8, "{whole_piece}, {}", copied(&p));
    p.rnic.end_job(next);
    p.rnic.poll(0);
    let last = p.rnic.take_job().expect("a job");
    run(&mut p, last);
    p.rnic.poll(0);
    assert_eq!((status(&p.a.done()), copied(&p)), (WcStatus::Success, BYTES));
    p.b.poll();
    let jobs = (0..100).take_while(|_| {
        p.a.post(remote(WrOpcode::Write, 1, &p.b, 0), &[p.a.sge(0, BYTES as u32)]);
        p.rnic.poll(0);
        p.rnic.take_job().map(|job| run(&mut p, job)).is_some()
    });
    assert_eq!(jobs.count(), 15, "copies are fast again after sixteen fast jobs");
}

/// A turn that took long has copied to or from pages that were not mapped: jobs make the next long copies, and turns
/// the short ones.
#[test]
fn after_a_turn_that_took_long_jobs_make_long_copies() {
    for (took_ns, jobs) in [(65_536, false), (65_537, true)] {
        let mut p = Pair::new();
        p.settle();
        let write = |p: &mut Pair, bytes: u32, took_ns: u64| {
            p.a.post(remote(WrOpcode::Write, 1, &p.b, 0), &[p.a.sge(0, bytes)]);
            p.rnic.poll_by(p.now, || p.now + took_ns);
            p.rnic.take_job().map(|job| run(p, job)).is_some()
        };
        assert!(!write(&mut p, 65_536, took_ns), "nobody else has work");
        assert_eq!((write(&mut p, 65_536, 0), write(&mut p, 1000, 0)), (jobs, false));
    }
}

#[test]
fn a_wrong_request_ends_what_one_job_copies() {
    let mut p = Pair::new();
    let key = p.b.key;
    let [of_a, of_b] = four_writes(&mut p, [key, key, key ^ 1 << 20, key]);
    run(&mut p, of_a);
    assert_eq!(completions(&mut p.a), ALL_FOUR[..2]);
    run(&mut p, of_b);
    p.run(SECOND);
    assert_eq!(completions(&mut p.a), [(2, WcStatus::RemAccessErr), (3, WcStatus::WrFlushErr)]);
    assert_eq!(p.b.bytes(40_000, 40_000), vec![0; 40_000]);
}

/// Requests that a stopped job has not copied are tried again; a key that is gone by then is not used.
#[test]
fn requests_that_follow_heed_a_command_too() {
    let mut p = Pair::new();
    let key = p.b.key;
    let [of_a, of_b] = four_writes(&mut p, [key; 4]);
    p.rnic.dereg_mr(p.b.session, p.b.mr).unwrap();
    assert!(!p.rnic.delay_command(p.b.session));
    run(&mut p, of_a);
    p.run(SECOND);
    run(&mut p, of_b);
    p.run(SECOND);
    let (of_a, first) = (completions(&mut p.a), (0, WcStatus::RemAccessErr));
    assert_eq!((of_a[0], of_a.len(), p.b.bytes(0, 80_000)), (first, 4, vec![0; 80_000]));
    assert!(of_a[1..].iter().all(|c| c.1 == WcStatus::WrFlushErr));
}

#[test]
fn requests_that_follow_are_flushed_if_their_qp_fails_meanwhile() {
    let mut p = Pair::new();
    let key = p.b.key;
    let [of_a, of_b] = four_writes(&mut p, [key; 4]);
    p.modify(true, m::STATE, abi::QpAttr { qp_state: 6, ..Default::default() });
    run(&mut p, of_a);
    run(&mut p, of_b);
    p.run(SECOND);
    assert_eq!(completions(&mut p.a), [0, 1, 2, 3].map(|i| (i, WcStatus::WrFlushErr)));
}

/// Data that came with the WQE goes into the private memory of a process too.
#[test]
fn inline_data_goes_through_a_job() {
    let mut p = Pair::new();
    through_process(&mut p, false);
    let data = pattern(100, 5);
    let flags = unirdma_formats::send_flags::INLINE | unirdma_formats::send_flags::SIGNALED;
    let wqe = abi::SqWqe { send_flags: flags, inline_len: 100, ..remote(WrOpcode::Write, 1, &p.b, 50) };
    p.a.rings.sq_put(p.a.sq_prod, abi::SQ_DATA, &data);
    p.a.post_raw(wqe);
    p.run(SECOND);
    assert_eq!(status(&p.a.done()), WcStatus::Success);
    assert_eq!(p.b.bytes(50, 100), data);
}

/// Any number of QPs whose memory is reached through processes get their turns, and none fails.
#[test]
fn many_qps_share_the_jobs_of_a_vrnic() {
    let mut p = Pair::new();
    through_process(&mut p, false);
    const QPS: usize = 100;
    let mut ends: Vec<(End, End)> = (0..QPS)
        .map(|_| {
            let rc = unirdma_formats::QpType::Rc;
            let from = End::of_vrnic(&mut p.rnic, p.a.vrnic, 64, rc);
            let mut to = End::of_vrnic(&mut p.rnic, p.b.vrnic, 64, rc);
            to.go_through_process(&mut p.rnic);
            for (e, peer, gid) in [(&from, &to, ip(2)), (&to, &from, ip(1))] {
                for (mask, attr) in attrs(peer, gid) {
                    p.rnic.modify_qp(e.session, e.qpn, mask, &attr).unwrap();
                }
            }
            (from, to)
        })
        .collect();
    for (from, to) in &mut ends {
        for id in 0..10 {
            from.post(remote(WrOpcode::Write, id, to, 0), &[from.sge(0, 100)]);
        }
    }
    p.run(SECOND);
    for (from, _) in &mut ends {
        let done: Vec<_> = from.poll().iter().map(|c| (c.wr_id, status(c))).collect();
        assert_eq!(done, (0..10).map(|id| (id, WcStatus::Success)).collect::<Vec<_>>());
    }
}
