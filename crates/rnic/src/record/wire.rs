//! The requests that a QP has under way, and the state of its connection over the wire: to data, and back.

use unirdma_abi as abi;
use unirdma_formats::{AsyncEvent, Psn, Rkey, WcStatus, WrOpcode, access, send_flags};

use super::data::*;
use super::restore::Restorer;
use super::save::Saver;
use crate::backoff::Stall;
use crate::objects::{
    Answer, CongestionWindow, Copies, DeferredPackets, Flight, Message, Prefetched, Reach, Recv, Responder, SendOp,
    Staged, Wait, Wire,
};
use crate::path::Path;

impl Saver<'_> {
    pub(super) fn stall(&self, s: &Stall) -> StallData {
        let Stall { now } = s;
        now.map(|(since, next)| (self.core.now.saturating_sub(since), self.until(next)))
    }

    pub(super) fn work(&self, w: &SendOp) -> WorkData {
        // The WQE contains the operation, and the QP the wait.
        let SendOp {
            wqe,
            op: _,
            wait: _,
            sges,
            num_sge,
            inline,
            total,
            done,
            started,
            served: _,
            retries_left,
            rnr_left,
            found,
            stall,
        } = w;
        let is_inline = wqe.send_flags & send_flags::INLINE != 0;
        WorkData {
            wqe: Raw(*wqe),
            sges: sges[..*num_sge].iter().map(|&s| Raw(s)).collect(),
            inline: if is_inline { inline[..*total as usize].to_vec() } else { Vec::new() },
            total: *total,
            done: *done,
            started: *started,
            retries_left: *retries_left,
            rnr_left: *rnr_left,
            found: *found,
            stall: self.stall(stall),
        }
    }

    pub(super) fn recv(&self, r: &Recv) -> RecvData {
        // The total is the sum of the SGEs.
        let Recv { wr_id, sges, num_sge, total: _, valid, staged } = r;
        let staged = staged.and_then(|Staged { owner, record, data, room }| {
            Some(StagedData { owner: *self.sessions.get(&owner)?, record, data, room })
        });
        RecvData { wr_id: *wr_id, sges: sges[..*num_sge].iter().map(|&s| Raw(s)).collect(), valid: *valid, staged }
    }

    pub(super) fn wire(&self, w: &Wire) -> WireData {
        // A restore looks the path up again, except for the parts that are specific to this connection. Timers are set
        // in the QP's first turn. Jobs read their bytes again, and packets that wait for jobs count as lost in the
        // network. For an unreliable connection, the peer's host reports the packets that it takes from then on.
        let Wire {
            path,
            flight,
            copies: _,
            una,
            next,
            high,
            cursor,
            reads,
            retries_left,
            rnr_left,
            ssn,
            credit_limit,
            taken: _,
            patience: _,
            deadline,
            rnr_until,
            timer_at: _,
            recovering,
            waits_for_tx: _,
            cc,
            cnp_after,
            fetched: _,
            inbox: _,
            resp,
        } = w;
        let CongestionWindow { packets, threshold, acked, alpha, cut_until, adapts } = cc;
        WireData {
            port: path.port,
            class: path.class,
            flight: flight.iter().map(|f| self.flight(f)).collect(),
            una: una.get(),
            next: next.get(),
            high: high.get(),
            cursor: *cursor as u32,
            reads: reads.iter().map(|p| p.get()).collect(),
            retries_left: *retries_left,
            rnr_left: *rnr_left,
            ssn: *ssn,
            credit_limit: *credit_limit,
            deadline_ns: (*deadline != u64::MAX).then(|| self.until(*deadline)),
            rnr_ns: self.until(*rnr_until),
            recovering: *recovering,
            window: WindowData {
                packets: *packets,
                threshold: *threshold,
                acked: *acked,
                alpha: *alpha,
                cut_until: cut_until.get(),
                adapts: *adapts,
            },
            cnp_ns: self.until(*cnp_after),
            responder: self.responder(resp),
        }
    }

    pub(super) fn flight(&self, f: &Flight) -> FlightData {
        let Flight { work, first, packets, ssn, status } = f;
        FlightData {
            work: self.work(work),
            first: first.get(),
            packets: *packets,
            ssn: *ssn,
            status: status.map(|s| s as u8),
        }
    }

    pub(super) fn responder(&self, r: &Responder) -> ResponderData {
        // An ACK that waits for a reply goes at once after a restore.
        let Responder {
            msn,
            message,
            got,
            nak_sent,
            failed,
            answers,
            fetched: _,
            inbox: _,
            ack_due: _,
            stall,
            missed,
            atomics,
        } = r;
        ResponderData {
            msn: *msn,
            message: message.map(|m| match m {
                Message::Send => MessageData::Send,
                Message::Write { va, rkey, len } => MessageData::Write { va, rkey: rkey.0, len },
            }),
            got: *got,
            nak_sent: *nak_sent,
            failed: *failed,
            answers: answers.iter().map(|a| self.answer(a)).collect(),
            stall: self.stall(stall),
            missed: *missed,
            atomics: atomics.iter().map(|a| (a.0.get(), a.1)).collect(),
        }
    }

    pub(super) fn answer(&self, a: &Answer) -> AnswerData {
        match *a {
            Answer::Ack { psn, msn } => AnswerData::Ack { psn: psn.get(), msn },
            Answer::Read { psn, msn, va, rkey, len, done, of, again } => {
                // The access is always remote read.
                let Reach { pd, session, access: _ } = of;
                let (pd, memory) = (self.pds.get(&pd).copied(), self.sessions.get(&session).copied());
                AnswerData::Read { psn: psn.get(), msn, va, rkey: rkey.0, len, done, pd, memory, again }
            }
            Answer::Atomic { psn, msn, value, again } => AnswerData::Atomic { psn: psn.get(), msn, value, again },
            Answer::Nak { psn, msn, code, fails } => {
                let fails = fails.map(|event| event.map(|e| e as u32));
                AnswerData::Nak { psn: psn.get(), msn, code, fails }
            }
        }
    }
}

fn sges(from: &[Raw<abi::Sge>]) -> [abi::Sge; abi::MAX_SGE as usize] {
    let mut all = [abi::Sge::default(); abi::MAX_SGE as usize];
    for (to, from) in all.iter_mut().zip(from) {
        *to = from.0;
    }
    all
}

impl Restorer<'_> {
    pub(super) fn stall(&self, d: StallData) -> Stall {
        Stall { now: d.map(|(waited, next)| (self.core.now.saturating_sub(waited), self.at(next))) }
    }

    pub(super) fn work(&self, d: &WorkData) -> Box<SendOp> {
        let WorkData { wqe, sges: list, inline, total, done, started, retries_left, rnr_left, found, stall } = d;
        let mut w = Box::new(SendOp {
            wqe: wqe.0,
            op: WrOpcode::from_raw(wqe.0.opcode.into()).unwrap_or(WrOpcode::Send),
            wait: Wait::No,
            sges: sges(list),
            num_sge: list.len(),
            inline: [0; abi::MAX_INLINE as usize],
            total: *total,
            done: *done,
            started: *started,
            // A multicast group may have other members on this host. Members that have no datagram yet count as having
            // lost it.
            served: if *started { u32::MAX } else { 0 },
            retries_left: *retries_left,
            rnr_left: *rnr_left,
            found: *found,
            stall: self.stall(*stall),
        });
        w.inline[..inline.len()].copy_from_slice(inline);
        w
    }

    pub(super) fn recv(&self, d: &RecvData) -> Box<Recv> {
        let RecvData { wr_id, sges: list, valid, staged } = d;
        Box::new(Recv {
            wr_id: *wr_id,
            sges: sges(list),
            num_sge: list.len(),
            total: list.iter().map(|s| u64::from(s.0.length)).sum(),
            valid: *valid,
            staged: staged.map(|StagedData { owner, record, data, room }| Staged {
                owner: self.session_id(Some(owner)),
                record,
                data,
                room,
            }),
        })
    }

    pub(super) fn wire(&self, d: &WireData, there: Option<Path>, linked: bool) -> Wire {
        let WireData {
            port,
            class,
            flight,
            una,
            next,
            high,
            cursor,
            reads,
            retries_left,
            rnr_left,
            ssn,
            credit_limit,
            deadline_ns,
            rnr_ns,
            recovering,
            window,
            cnp_ns,
            responder,
        } = d;
        let WindowData { packets, threshold, acked, alpha, cut_until, adapts } = *window;
        Wire {
            path: Path { port: *port, class: *class, ..Path::nowhere() }.led(there, linked),
            flight: flight.iter().map(|f| self.flight(f)).collect(),
            copies: Copies::default(),
            una: Psn::new(*una),
            next: Psn::new(*next),
            high: Psn::new(*high),
            cursor: *cursor as usize,
            reads: reads.iter().map(|&p| Psn::new(p)).collect(),
            retries_left: *retries_left,
            rnr_left: *rnr_left,
            ssn: *ssn,
            credit_limit: *credit_limit,
            taken: Psn::new(*next),
            patience: 1,
            deadline: deadline_ns.map_or(u64::MAX, |ns| self.at(ns)),
            rnr_until: self.at(*rnr_ns),
            timer_at: u64::MAX,
            recovering: *recovering,
            waits_for_tx: false,
            cc: CongestionWindow { packets, threshold, acked, alpha, cut_until: Psn::new(cut_until), adapts },
            cnp_after: self.at(*cnp_ns),
            fetched: Prefetched::default(),
            inbox: DeferredPackets::default(),
            resp: self.responder(responder),
        }
    }

    pub(super) fn flight(&self, d: &FlightData) -> Flight {
        let FlightData { work, first, packets, ssn, status } = d;
        Flight {
            work: self.work(work),
            first: Psn::new(*first),
            packets: *packets,
            ssn: *ssn,
            status: status.and_then(|s| WcStatus::from_raw(s.into())),
        }
    }

    pub(super) fn responder(&self, d: &ResponderData) -> Responder {
        let ResponderData { msn, message, got, nak_sent, failed, answers, stall, missed, atomics } = d;
        Responder {
            msn: *msn,
            message: message.map(|m| match m {
                MessageData::Send => Message::Send,
                MessageData::Write { va, rkey, len } => Message::Write { va, rkey: Rkey(rkey), len },
            }),
            got: *got,
            nak_sent: *nak_sent,
            failed: *failed,
            answers: answers.iter().map(|a| self.answer(a)).collect(),
            fetched: Prefetched::default(),
            inbox: DeferredPackets::default(),
            ack_due: 0,
            stall: self.stall(*stall),
            missed: *missed,
            atomics: atomics.iter().map(|&(psn, value)| (Psn::new(psn), value)).collect(),
        }
    }

    pub(super) fn answer(&self, d: &AnswerData) -> Answer {
        match *d {
            AnswerData::Ack { psn, msn } => Answer::Ack { psn: Psn::new(psn), msn },
            AnswerData::Read { psn, msn, va, rkey, len, done, pd, memory, again } => {
                let of = Reach { pd: self.pd(pd), session: self.session_id(memory), access: access::REMOTE_READ };
                Answer::Read { psn: Psn::new(psn), msn, va, rkey: Rkey(rkey), len, done, of, again }
            }
            AnswerData::Atomic { psn, msn, value, again } => Answer::Atomic { psn: Psn::new(psn), msn, value, again },
            AnswerData::Nak { psn, msn, code, fails } => {
                let fails = fails.map(|event| event.and_then(AsyncEvent::from_raw));
                Answer::Nak { psn: Psn::new(psn), msn, code, fails }
            }
        }
    }
}
