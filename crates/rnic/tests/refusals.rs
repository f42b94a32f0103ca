//! The requests that a responder refuses, the order of its checks, and who is told: the same on one host and over the
//! wire (IBTA vol. 1, 9.7.4.1 and 9.9.3).

use unirdma_abi as abi;
use unirdma_formats::AsyncEvent::{self, QpAccessErr, QpReqErr};
use unirdma_formats::WcStatus::{self, RemAccessErr, RemInvReqErr, RnrRetryExcErr, WrFlushErr};
use unirdma_formats::WrOpcode::{self, *};
use unirdma_formats::access::{FLUSH_GLOBAL, REMOTE_ATOMIC, REMOTE_READ, REMOTE_WRITE};
use unirdma_formats::{QpType, wire::flush};
use unirdma_rnic::Output;
use unirdma_simkit::net::{Faults, Net};
use unirdma_simkit::*;

const RTS: u8 = 3;
const ERR: u8 = 6;

/// The outcome of a request.
#[derive(Debug, PartialEq)]
struct Outcome {
    /// The status of the request.
    request: WcStatus,
    /// The status of the responder's receive, if one was posted and has completed.
    receive: Option<WcStatus>,
    /// The responder's event.
    event: Option<AsyncEvent>,
    /// The state of the responder's QP.
    state: u8,
}

/// A request for a responder.
struct Case {
    op: WrOpcode,
    bytes: u32,
    /// A receive waits at the responder.
    recv: bool,
    /// The rights that the responder's QP lacks.
    without: u32,
    /// The request names a key that is nobody's.
    bad_key: bool,
}

const GOOD: Case = Case { op: Write, bytes: 8, recv: false, without: 0, bad_key: false };

impl Case {
    /// Makes the request on one host, or between two.
    fn run(&self, hosts: usize) -> Outcome {
        let mut net = Net::hosts(hosts, &[QpType::Rc; 2], 3, Faults::default());
        let rights = (ALL | FLUSH_GLOBAL) & !self.without;
        let qp = |a| abi::QpAttr { qp_access_flags: rights, rnr_retry: 1, min_rnr_timer: 1, ..a };
        net.connect(QpType::Rc, 0, 1, &qp);
        net.connect(QpType::Rc, 1, 0, &qp);
        if self.recv {
            let room = net.ends[1].sge(0, 8);
            net.ends[1].recv(5, &[room]);
        }
        let key = net.ends[1].key ^ u32::from(self.bad_key) << 20;
        let word = if self.op == Flush { flush::GLOBAL } else { key };
        let w = abi::SqWqe { rkey: key, imm: word, compare_add: self.bytes.into(), ..net.remote(self.op, 1, 0) };
        let sges = if self.op == Flush { vec![] } else { vec![net.ends[0].sge(0, self.bytes)] };
        net.ends[0].post(w, &sges);
        net.run(SECOND);
        let mut outputs = Vec::new();
        net.rnic(1).drain_outputs(&mut outputs);
        let event = |o: &Output| if let Output::Async { kind, .. } = *o { Some(kind) } else { None };
        let mut events = outputs.iter().filter_map(event);
        let outcome = Outcome {
            request: status(&net.ends[0].done()),
            receive: net.ends[1].poll().iter().map(status).next(),
            event: events.next(),
            state: net.state(1),
        };
        assert_eq!(events.next(), None, "one event at most");
        outcome
    }

    fn ends_so(self, request: WcStatus, receive: Option<WcStatus>, event: Option<AsyncEvent>) {
        let state = if request == RnrRetryExcErr { RTS } else { ERR };
        for hosts in [1, 2] {
            let what = format!("{:?} of {} bytes, receive {}, {hosts} hosts", self.op, self.bytes, self.recv);
            assert_eq!(self.run(hosts), Outcome { request, receive, event, state }, "{what}");
        }
    }
}

#[test]
fn a_request_that_the_qp_is_not_set_up_for_is_invalid() {
    let all = [
        (Write, REMOTE_WRITE),
        (WriteImm, REMOTE_WRITE),
        (AtomicWrite, REMOTE_WRITE),
        (Read, REMOTE_READ),
        (CmpSwap, REMOTE_ATOMIC),
        (FetchAdd, REMOTE_ATOMIC),
        (Flush, FLUSH_GLOBAL),
    ];
    for (op, without) in all {
        for bad_key in [false, true] {
            // A receive is not looked for, even if the request takes one.
            Case { op, without, bad_key, ..GOOD }.ends_so(RemInvReqErr, None, Some(QpReqErr));
        }
    }
}

#[test]
fn a_bad_key_is_denied_access() {
    for op in [Write, AtomicWrite, Read, CmpSwap, FetchAdd, Flush] {
        Case { op, bad_key: true, ..GOOD }.ends_so(RemAccessErr, None, Some(QpAccessErr));
    }
}

#[test]
fn a_receive_is_looked_for_before_a_key() {
    for op in [SendInv, WriteImm] {
        Case { op, bad_key: true, ..GOOD }.ends_so(RnrRetryExcErr, None, None);
    }
    Case { op: SendInv, bytes: 10_000, bad_key: true, ..GOOD }.ends_so(RnrRetryExcErr, None, None);
    // The packet with the key comes before the packet that takes a receive.
    Case { op: WriteImm, bytes: 10_000, bad_key: true, ..GOOD }.ends_so(RemAccessErr, None, Some(QpAccessErr));
}

#[test]
fn a_receive_that_a_refused_request_has_taken_tells_of_it() {
    for op in [SendInv, WriteImm] {
        Case { op, recv: true, bad_key: true, ..GOOD }.ends_so(RemAccessErr, Some(RemAccessErr), None);
    }
    let long = Case { op: WriteImm, bytes: 10_000, recv: true, bad_key: true, ..GOOD };
    long.ends_so(RemAccessErr, Some(WrFlushErr), Some(QpAccessErr));
}
