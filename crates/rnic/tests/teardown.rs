//! The end of large objects: a memory region with the MRs in it, and a session with all its objects. They are dead at
//! once for each lookup, and are freed a part at a time.

use unirdma_abi as abi;
use unirdma_abi::Status;
use unirdma_formats::{QpType, WcStatus, WrOpcode, access};
use unirdma_mem::Span;
use unirdma_rnic::{Backing, MAX_TORN_DOWN, Usage};
use unirdma_simkit::net::{Faults, Net};
use unirdma_simkit::*;

const MANY: usize = 3 * MAX_TORN_DOWN + 10;
const OK: u8 = WcStatus::Success as u8;
const DENIED: u8 = WcStatus::RemAccessErr as u8;

fn each() -> [(&'static str, Net); 2] {
    [1, 2].map(|hosts| {
        let mut net = Net::hosts(hosts, &[QpType::Rc, QpType::Rc], 3, Faults::default());
        net.connect(QpType::Rc, 0, 1, &|a| a);
        net.connect(QpType::Rc, 1, 0, &|a| a);
        (["one host", "two hosts"][hosts - 1], net)
    })
}

/// An MR of end 1, at address 0 and in these memory regions: its number and its key.
fn mr(net: &mut Net, regions: &[u64]) -> (u32, u32) {
    let (s, pd) = (net.ends[1].session, net.ends[1].pd);
    let memory = (Backing::Mapped(aligned(4096)), regions.to_vec());
    net.rnic(1).reg_mr(s, pd, ALL | access::MW_BIND, 0, 4096, memory).unwrap()
}

/// Posts a request of an end. Returns the status of its completion.
fn run(net: &mut Net, end: usize, w: abi::SqWqe, sges: &[abi::Sge]) -> u8 {
    net.ends[end].post(w, sges);
    net.run(SECOND);
    net.ends[end].done().status
}

fn write(net: &mut Net, rkey: u32) -> u8 {
    let sge = net.ends[0].sge(0, 8);
    run(net, 0, abi::SqWqe { rkey, ..wqe(WrOpcode::Write, 1) }, &[sge])
}

fn used(net: &mut Net) -> Usage {
    let vrnic = net.ends[1].vrnic;
    net.rnic(1).usage(vrnic)
}

/// The number of MRs that are freed each time that the RNIC is held for that.
fn freed(net: &mut Net) -> Vec<usize> {
    let mut all = Vec::new();
    while net.rnic(1).has_dead() {
        let before = used(net).mrs_mapped;
        net.rnic(1).tear_down(MAX_TORN_DOWN);
        all.push(before - used(net).mrs_mapped);
    }
    all
}

#[test]
fn mrs_in_a_region_that_is_gone_are_dead_at_once_and_freed_in_parts() {
    for (place, mut net) in each() {
        let s = net.ends[1].session;
        let other = mr(&mut net, &[8]);
        let dead: Vec<_> = (0..MANY).map(|_| mr(&mut net, &[7])).collect();
        let both = mr(&mut net, &[9, 8, 7]);
        let before = used(&mut net).mrs_mapped;
        let last = dead[MANY - 1];
        assert_eq!((write(&mut net, last.1), write(&mut net, both.1)), (OK, OK), "{place}");
        net.rnic(1).revoke_regions(s, &[7]);
        // The other MRs stay, and new ones come. The first walk has visited some of the MRs.
        let new = mr(&mut net, &[8, 9]);
        assert_eq!((write(&mut net, other.1), write(&mut net, new.1)), (OK, OK), "{place}");
        assert!(used(&mut net).mrs_mapped >= before - MAX_TORN_DOWN, "{place}");
        for gone in [last, both] {
            assert_eq!(net.rnic(1).dereg_mr(s, gone.0), Err(Status::BadHandle), "{place}");
            assert_eq!(net.rnic(1).rereg_mr(s, other.0, gone.0), Err(Status::BadHandle), "{place}");
        }
        assert_eq!(write(&mut net, last.1), DENIED, "{place}");
        let parts = freed(&mut net);
        assert!(
            parts.len() <= MANY / MAX_TORN_DOWN + 2 && parts.iter().all(|&n| n <= MAX_TORN_DOWN),
            "{place}: {parts:?}"
        );
        // The end's own MR is in region 7, too.
        assert_eq!(used(&mut net).mrs_mapped, 2, "{place}");
        net.rnic(1).dereg_mr(s, other.0).unwrap();
        net.rnic(1).dereg_mr(s, new.0).unwrap();
    }
}

#[test]
fn an_mr_in_several_regions_is_dead_with_any_of_them() {
    for (place, mut net) in each() {
        let s = net.ends[1].session;
        (0..MANY).for_each(|_| _ = mr(&mut net, &[1]));
        let both = mr(&mut net, &[9, 8, 7]);
        net.rnic(1).revoke_regions(s, &[1]);
        assert_eq!(write(&mut net, both.1), OK, "{place}");
        // While the first walk is under way.
        assert!(net.rnic(1).has_dead());
        net.rnic(1).revoke_regions(s, &[8, 12]);
        assert_eq!(write(&mut net, both.1), DENIED, "{place}");
        freed(&mut net);
        assert_eq!(net.rnic(1).dereg_mr(s, both.0), Err(Status::BadHandle), "{place}");
        assert_eq!(used(&mut net).mrs_mapped, 1, "{place}: that of the end itself");
    }
}

#[test]
fn windows_die_with_the_region_of_their_mr_and_can_be_bound_again() {
    for (place, mut net) in each() {
        let (s, pd) = (net.ends[1].session, net.ends[1].pd);
        (0..MANY).for_each(|_| _ = mr(&mut net, &[7]));
        let (parent, other) = (mr(&mut net, &[7]), mr(&mut net, &[8]));
        let (_, key) = net.rnic(1).alloc_mw(s, pd, 2).unwrap();
        let bind = |lkey: u32| abi::SqWqe {
            rkey: key,
            compare_add: 100,
            swap: u64::from(access::REMOTE_WRITE) << 32 | u64::from(lkey),
            ..wqe(WrOpcode::BindMw, 7)
        };
        assert_eq!(run(&mut net, 1, bind(parent.1), &[]), OK, "{place}");
        assert_eq!(write(&mut net, key), OK, "{place}");
        net.rnic(1).revoke_regions(s, &[7]);
        assert!(net.rnic(1).has_dead());
        assert_eq!(run(&mut net, 1, bind(other.1), &[]), OK, "{place}: the window is free");
        assert_eq!(write(&mut net, key), OK, "{place}");
        freed(&mut net);
        assert_eq!(write(&mut net, key), OK, "{place}: what it is bound to now lives");
        assert_eq!(net.rnic(1).dereg_mr(s, other.0), Err(Status::Busy), "{place}");
    }
    for (place, mut net) in each() {
        let (s, pd) = (net.ends[1].session, net.ends[1].pd);
        (0..MANY).for_each(|_| _ = mr(&mut net, &[7]));
        let parent = mr(&mut net, &[7]);
        let (_, key) = net.rnic(1).alloc_mw(s, pd, 2).unwrap();
        net.rnic(1).revoke_regions(s, &[7]);
        assert!(net.rnic(1).has_dead());
        let swap = u64::from(access::REMOTE_WRITE) << 32 | u64::from(parent.1);
        let bind = abi::SqWqe { rkey: key, compare_add: 100, swap, ..wqe(WrOpcode::BindMw, 7) };
        assert_eq!(run(&mut net, 1, bind, &[]), WcStatus::MwBindErr as u8, "{place}");
    }
}

#[test]
fn a_session_that_begins_anew_has_nothing_and_its_memory_goes_in_parts() {
    for (place, mut net) in each() {
        let (s, pd) = (net.ends[1].session, net.ends[1].pd);
        let window = aligned(4096);
        let memory = || (Backing::Mapped(window.clone()), vec![7]);
        let all: Vec<_> = (0..MANY).map(|_| net.rnic(1).reg_mr(s, pd, ALL, 0, 4096, memory()).unwrap()).collect();
        let qps = used(&mut net).qps;
        let still: Vec<bool> =
            std::iter::from_fn(|| Some(net.rnic(1).quiesce_session(s, 1)).filter(|&more| more)).collect();
        // A QP and a CQ.
        assert_eq!((still.len(), used(&mut net).qps), (2, qps - 1), "{place}");
        net.rnic(1).renew_session(s);
        assert_eq!(net.rnic(1).dereg_mr(s, all[MANY - 1].0), Err(Status::BadHandle), "{place}");
        assert_eq!(net.rnic(1).destroy_pd(s, pd), Err(Status::BadHandle), "{place}");
        let (new, _) = {
            let pd = net.rnic(1).create_pd(s).unwrap();
            net.rnic(1).reg_mr(s, pd, ALL, 0, 4096, memory()).unwrap()
        };
        let parts = freed(&mut net);
        assert!(parts.len() > 1 && parts.iter().all(|&n| n <= MAX_TORN_DOWN), "{place}: {parts:?}");
        assert_eq!(used(&mut net).mrs_mapped, 1, "{place}");
        net.rnic(1).dereg_mr(s, new).unwrap();
        assert!(window.is_last(), "{place}: nobody holds the memory");
        assert_eq!(used(&mut net), Usage { sessions: 1, ..Usage::default() }, "{place}");
    }
}

#[test]
fn a_session_is_gone_before_what_it_had_and_a_vrnic_after() {
    let window: Span = aligned(4096);
    for (place, mut net) in each() {
        let (s, pd, vrnic) = (net.ends[1].session, net.ends[1].pd, net.ends[1].vrnic);
        for _ in 0..MANY {
            net.rnic(1).reg_mr(s, pd, ALL, 0, 4096, (Backing::Mapped(window.clone()), vec![])).unwrap();
        }
        net.rnic(1).remove_session(s);
        let gone = used(&mut net);
        assert_eq!((gone.sessions, gone.qps, gone.cqs), (0, 0, 0), "{place}");
        assert!(net.rnic(1).has_dead() && gone.mrs_mapped + MAX_TORN_DOWN > MANY, "{place}");
        assert_eq!(net.rnic(1).create_pd(s), Err(Status::BadHandle), "{place}");
        assert!(net.rnic(1).numbered_sessions(vrnic).is_empty(), "{place}");
        net.rnic(1).remove_vrnic(vrnic);
        assert!(!net.rnic(1).has_dead() && window.is_last(), "{place}");
    }
}

/// A record has no dead objects.
#[test]
fn a_vrnic_is_written_out_without_what_is_dead() {
    for (place, mut net) in each() {
        let (s, vrnic, now) = (net.ends[1].session, net.ends[1].vrnic, net.now);
        let alone = net.rnic(1).save_vrnic(now, vrnic).unwrap().to_bytes().unwrap();
        (0..MANY).for_each(|_| _ = mr(&mut net, &[7, 8]));
        net.rnic(1).revoke_regions(s, &[8]);
        assert!(net.rnic(1).has_dead());
        let record = net.rnic(1).save_vrnic(now, vrnic).unwrap().to_bytes().unwrap();
        // They differ in the number of the last object.
        assert_eq!((record.len().abs_diff(alone.len()) <= 4, net.rnic(1).has_dead()), (true, false), "{place}");
    }
}
