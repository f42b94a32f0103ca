//! Doorbells of vRNICs with many sessions: each is seen, and other vRNICs do not wait for all of them.

use unirdma_abi as abi;
use unirdma_formats::{QpType, WrOpcode};
use unirdma_simkit::*;

const SESSIONS: usize = 40;
/// Rounds in which the doorbell of each session is polled.
const ROUNDS: usize = SESSIONS / 8 + 1;
/// Longest time for which the doorbells of a vRNIC that rings for nothing are not polled, nanoseconds.
const MUTE_NS: u64 = 50_000;

/// A pair, and more sessions of a's vRNIC.
fn crowd() -> (Pair, Vec<End>) {
    let mut p = Pair::new();
    p.settle();
    let vrnic = p.a.vrnic;
    let crowd = (0..SESSIONS).map(|_| End::of_vrnic(&mut p.rnic, vrnic, 64, QpType::Rc)).collect();
    (p, crowd)
}

fn polls(p: &mut Pair, rounds: usize, now: u64) {
    for _ in 0..rounds {
        p.rnic.poll(now);
    }
}

#[test]
fn sessions_that_ring_all_the_time_do_not_delay_another_vrnic() {
    let (mut p, crowd) = crowd();
    for _ in 0..20 {
        for e in &crowd {
            e.bell.ring(e.slot);
        }
        p.b.post(abi::SqWqe { remote_addr: IOVA, rkey: p.a.key, ..wqe(WrOpcode::Write, 1) }, &[p.b.sge(0, 8)]);
        assert!(p.rnic.poll(0));
        assert_eq!(p.b.poll().len(), 1);
    }
}

/// Doorbells without requests cost their program nothing. So a poller should give its core to programs before it goes
/// on with such doorbells, but not before other vRNICs have had their turns.
#[test]
fn a_round_ends_with_a_doorbell_that_rings_in_vain_unless_others_have_turns() {
    let (mut p, crowd) = crowd();
    for e in &crowd {
        e.bell.ring(e.slot);
    }
    p.b.post(abi::SqWqe { remote_addr: IOVA, rkey: p.a.key, ..wqe(WrOpcode::Write, 1) }, &[p.b.sge(0, 8)]);
    assert!(p.rnic.poll(0));
    assert!(p.rnic.is_in_vain() && p.rnic.has_turns(), "it ended before it came to the others of the crowd");
    assert_eq!(p.b.poll().len(), 1);
    let (mut rounds, mut now) = (0, 0);
    while p.rnic.poll(now) {
        assert!(p.rnic.is_in_vain());
        (rounds, now) = (rounds + 1, now + MUTE_NS);
    }
    assert!((SESSIONS - 4..=SESSIONS).contains(&rounds), "{rounds}");
    assert!(!p.rnic.is_in_vain());
    p.b.post(abi::SqWqe { remote_addr: IOVA, rkey: p.a.key, ..wqe(WrOpcode::Write, 2) }, &[p.b.sge(0, 8)]);
    assert!(p.rnic.poll(now) && !p.rnic.is_in_vain());
}

/// A vRNIC that keeps ringing for nothing is polled seldom, until it posts a request.
#[test]
fn doorbells_that_ring_for_nothing_all_the_time_are_looked_at_later() {
    let (mut p, crowd) = crowd();
    // Its first doorbells are polled at once.
    for e in &crowd[..4] {
        e.bell.ring(e.slot);
        while e.bell.has_rung() {
            p.rnic.poll(0);
        }
    }
    let ringing = &crowd[0];
    // The time for which it is not polled grows up to the longest one.
    for step in 1..=60 {
        let now = step * MUTE_NS;
        ringing.bell.ring(ringing.slot);
        while ringing.bell.has_rung() {
            p.rnic.poll(now);
        }
        ringing.bell.ring(ringing.slot);
        let muted = (step * 1_000).min(MUTE_NS);
        polls(&mut p, 2 * ROUNDS, now + muted - 1);
        assert!(ringing.bell.has_rung(), "it was looked at after less than {muted} ns");
        // A poller that will poll again in a moment may doze meanwhile.
        assert!(p.rnic.kick(ringing.session, now + muted - 1));
        assert_eq!(p.rnic.doze(false), Some(true));
        p.rnic.rouse();
        // Another vRNIC does not wait for it.
        p.b.post(abi::SqWqe { remote_addr: IOVA, rkey: p.a.key, ..wqe(WrOpcode::Write, step) }, &[p.b.sge(0, 8)]);
        assert!(p.rnic.poll(now + muted - 1));
        assert_eq!(p.b.poll().len(), 1);
    }
    let mut now = 61 * MUTE_NS;
    while ringing.bell.has_rung() {
        p.rnic.poll(now);
    }
    // A request ends that as soon as it is found.
    now += MUTE_NS;
    p.a.post(abi::SqWqe { remote_addr: IOVA, rkey: p.b.key, ..wqe(WrOpcode::Write, 1) }, &[p.a.sge(0, 8)]);
    polls(&mut p, ROUNDS, now);
    assert_eq!(p.a.poll().len(), 1);
    p.a.post(abi::SqWqe { remote_addr: IOVA, rkey: p.b.key, ..wqe(WrOpcode::Write, 2) }, &[p.a.sge(0, 8)]);
    polls(&mut p, ROUNDS, now);
    assert_eq!(p.a.poll().len(), 1);
}

/// Kicks without doorbells count like doorbells without requests, whatever page they are for. A late kick for a request
/// that was found already does not count.
#[test]
fn kicks_for_nothing_need_not_be_heard() {
    let (mut p, crowd) = crowd();
    for step in 1..=60 {
        p.a.post(abi::SqWqe { remote_addr: IOVA, rkey: p.b.key, ..wqe(WrOpcode::Write, step) }, &[p.a.sge(0, 8)]);
        polls(&mut p, ROUNDS, step);
        assert_eq!(p.a.poll().len(), 1);
        assert!(!p.rnic.kick(p.a.session, step));
    }
    let kicks: Vec<bool> = (0..10).map(|_| p.rnic.kick(crowd[0].session, SECOND)).collect();
    assert_eq!(kicks.iter().position(|&for_nothing| for_nothing), Some(3), "the fifth one, after that of p.a");
    assert!(p.rnic.kick(crowd[1].session, SECOND), "another session of that vRNIC");
    assert!(!p.rnic.kick(p.b.session, SECOND), "another vRNIC");
    crowd[0].bell.ring(crowd[0].slot);
    assert!(!p.rnic.kick(crowd[0].session, SECOND + MUTE_NS), "it is heard again");
}

#[test]
fn each_doorbell_is_seen_after_a_bounded_number_of_rounds() {
    let (mut p, crowd) = crowd();
    for (now, e) in (1..).map(|i| i * MUTE_NS).zip(&crowd) {
        e.bell.ring(e.slot);
        polls(&mut p, ROUNDS, now);
        assert!(!e.bell.has_rung());
    }
}

#[test]
fn a_session_that_rings_is_not_put_to_sleep_before_it_is_looked_at() {
    let (mut p, crowd) = crowd();
    let bells = |p: &Pair| p.rnic.active_changes();
    for round in 0..2 {
        for e in &crowd {
            p.rnic.unpark(e.session, 0);
        }
        let before = bells(&p);
        // The last one rings when rounds have begun to find the others idle.
        let last = &crowd[SESSIONS - 1];
        p.rnic.poll(SECOND * (round + 1));
        p.rnic.park_idle(SECOND * (round + 1), 1000);
        assert!(bells(&p) - before <= 16, "only those that were looked at sleep");
        assert_eq!(last.bell.ring(last.slot), abi::AWAKE, "it is polled and needs no kick");
        for _ in 0..ROUNDS {
            if !p.rnic.poll(SECOND * (round + 1)) {
                p.rnic.park_idle(SECOND * (round + 1), 1000);
            }
        }
        assert!(!last.bell.has_rung());
        for _ in 0..2 * ROUNDS {
            p.rnic.poll(SECOND * (round + 2));
            p.rnic.park_idle(SECOND * (round + 2), 1000);
        }
        assert!(!p.rnic.is_busy(), "all sleep in the end");
        assert_eq!(last.bell.ring(last.slot), abi::ASLEEP, "whoever sleeps kicks");
        assert!(!p.rnic.poll(SECOND * (round + 2)));
        let now = SECOND * (round + 2);
        assert!(p.rnic.unpark(last.session, now), "a kick wakes it");
        assert!(!p.rnic.unpark(last.session, now), "another one is for nothing");
    }
}

/// Posts 1,000 requests of one byte, executes each, and lets time pass in between. Returns the number of requests that
/// had to kick.
fn kicks_of_1000(p: &mut Pair, pause_ns: u64) -> u64 {
    const IDLE_NS: u64 = 1000;
    let before = p.rnic.kicks(p.b.vrnic);
    let mut asked = 0;
    for i in 1..=1000 {
        let now = i * (pause_ns + 1);
        let write = abi::SqWqe { remote_addr: IOVA, rkey: p.a.key, ..wqe(WrOpcode::Write, i) };
        if p.b.post(write, &[p.b.sge(0, 1)]) {
            asked += 1;
            p.rnic.kick(p.b.session, now);
        }
        assert!(p.rnic.poll(now));
        assert_eq!(p.b.poll().len(), 1);
        assert!(!p.rnic.poll(now + pause_ns));
        p.rnic.park_idle(now + pause_ns, IDLE_NS);
    }
    assert_eq!(p.rnic.kicks(p.b.vrnic) - before, asked);
    asked
}

#[test]
fn whoever_posts_to_a_device_that_polls_never_kicks() {
    let mut p = Pair::new();
    p.settle();
    p.rnic.unpark(p.b.session, 0);
    assert_eq!(kicks_of_1000(&mut p, 500), 0);
}

#[test]
fn a_device_that_sleeps_is_kicked_once_for_each_post() {
    let mut p = Pair::new();
    p.settle();
    p.rnic.unpark(p.b.session, 0);
    // The first one finds it awake.
    assert_eq!(kicks_of_1000(&mut p, 2000), 999);
}

#[test]
fn a_vrnic_that_is_polled_is_one_of_the_others_to_each_but_itself() {
    let mut p = Pair::new();
    p.settle();
    let (a, b) = (p.a.vrnic, p.b.vrnic);
    let others = |p: &Pair| [a, b].map(|v| p.rnic.has_work_for_others(Some(v)));
    let sleep = |p: &mut Pair, now: u64| {
        p.rnic.poll(now);
        p.rnic.park_idle(now, 0);
    };
    sleep(&mut p, SECOND);
    assert_eq!(others(&p), [false, false]);
    assert!(!p.rnic.has_work_for_others(None));
    p.rnic.unpark(p.b.session, SECOND);
    assert_eq!(others(&p), [true, false], "b is polled");
    assert!(p.rnic.has_work_for_others(None));
    p.rnic.unpark(p.a.session, SECOND);
    assert_eq!(others(&p), [true, true]);
    sleep(&mut p, 2 * SECOND);
    assert_eq!(others(&p), [false, false]);
}

/// When polling ends, all doorbells ask for kicks; when it begins again, none does. A page that is added meanwhile is
/// polled.
#[test]
fn while_nobody_looks_all_doorbells_ask_for_kicks() {
    let mut p = Pair::new();
    p.settle();
    let pages = [p.a.bell.clone(), p.b.bell.clone()];
    let ring = |p: &mut Pair| {
        let how = pages.each_ref().map(|bell| bell.ring(0));
        // Doorbells that ring for nothing are polled later, and not asked for kicks meanwhile.
        for _ in 0..2 {
            p.now += 100_000;
            p.rnic.poll(p.now);
        }
        how
    };
    assert_eq!(ring(&mut p), [abi::AWAKE; 2]);
    assert_eq!((p.rnic.doze(false), p.rnic.is_busy()), (Some(false), false));
    assert_eq!(ring(&mut p), [abi::ASLEEP; 2]);
    p.rnic.rouse();
    assert!(p.rnic.is_busy());
    assert_eq!(ring(&mut p), [abi::AWAKE; 2]);
    // A driver that rings in bursts may count on a poll.
    pages[1].set_bursts(true);
    assert_eq!(p.rnic.doze(false), Some(true));
    assert_eq!(ring(&mut p), [abi::NAPS; 2]);
    p.rnic.rouse();
    // A doorbell that was not polled keeps all pollers awake.
    pages[0].ring(0);
    assert_eq!(p.rnic.doze(false), None);
    assert_eq!(ring(&mut p), [abi::AWAKE; 2]);
    assert_eq!(p.rnic.doze(false), Some(true));
    // A session that is unparked without a kick ends the doze, too.
    assert_eq!(pages[0].ring(0), abi::NAPS);
    assert!(!p.rnic.unpark(p.a.session, p.now) && p.rnic.is_busy());
    assert_eq!(ring(&mut p), [abi::AWAKE; 2]);
    assert_eq!(p.rnic.doze(false), Some(true));
    let vrnic = p.a.vrnic;
    let new = End::of_vrnic(&mut p.rnic, vrnic, 64, QpType::Rc);
    p.rnic.unpark(new.session, 0);
    assert!(p.rnic.is_busy(), "somebody has to be called");
    assert_eq!((ring(&mut p), new.bell.ring(0)), ([abi::AWAKE; 2], abi::AWAKE));
}
