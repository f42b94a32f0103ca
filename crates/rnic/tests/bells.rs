//! Doorbells of vRNICs with many sessions: each is seen, and the others do not wait for all of them.

use unirdma_abi as abi;
use unirdma_formats::{QpType, WrOpcode};
use unirdma_simkit::*;

const SESSIONS: usize = 40;
/// Rounds in which the doorbell of each session is looked at.
const ROUNDS: usize = SESSIONS / 8 + 1;

/// A pair, and more sessions of a's vRNIC.
fn crowd() -> (Pair, Vec<End>) {
    let mut p = Pair::new();
    p.settle();
    let vnic = p.a.vnic;
    let crowd = (0..SESSIONS).map(|_| End::of_vnic(&mut p.rnic, vnic, 64, QpType::Rc)).collect();
    (p, crowd)
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

#[test]
fn each_doorbell_is_seen_after_a_bounded_number_of_rounds() {
    let (mut p, crowd) = crowd();
    for e in &crowd {
        e.bell.ring(e.slot);
        for _ in 0..ROUNDS {
            p.rnic.poll(0);
        }
        assert!(!e.bell.has_rung());
    }
}

#[test]
fn a_session_that_rings_is_not_put_to_sleep_before_it_is_looked_at() {
    let (mut p, crowd) = crowd();
    let bells = |p: &Pair| p.rnic.active_changes();
    for round in 0..3 {
        for e in &crowd {
            p.rnic.unpark(e.session, 0);
        }
        let before = bells(&p);
        // The last one rings when rounds have begun to find the others idle.
        let last = &crowd[SESSIONS - 1];
        p.rnic.poll(SECOND * (round + 1));
        p.rnic.park_idle(SECOND * (round + 1), 1000);
        assert!(bells(&p) - before <= 16, "only those that were looked at sleep");
        assert!(!last.bell.ring(last.slot), "it is polled and needs no kick");
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
        assert!(last.bell.ring(last.slot), "whoever sleeps kicks");
        assert!(!p.rnic.poll(SECOND * (round + 2)));
    }
}
