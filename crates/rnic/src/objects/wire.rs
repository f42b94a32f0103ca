//! The state of a connection to another host: what its requester has under way, and what its responder has to say.

use std::collections::VecDeque;

use unirdma_formats::wire::Transport;
use unirdma_formats::{AsyncEvent, Psn, QpType, Rkey};
use unirdma_mem::Fault;

use super::buffer_limits::{Room, Taken};
use super::deferred_packets::DeferredPackets;
use super::mr::Reach;
use super::prefetch::Prefetched;
use super::send_op::{SendOp, Spare};
use crate::backoff::Stall;
use crate::path::Path;

/// The state of a connection to another host.
pub(crate) struct Wire {
    pub path: Path,
    pub flight: VecDeque<Flight>,
    /// Where the requests of `flight` are kept.
    pub copies: Copies,
    /// PSN of the oldest packet without an answer.
    pub una: Psn,
    /// PSN of the next packet to send; goes back to `una` for a retransmission.
    pub next: Psn,
    /// The PSN that follows the highest one sent so far.
    pub high: Psn,
    /// Place of `next` in `flight`.
    pub cursor: usize,
    /// Ends of the READ requests and atomics that were sent and not answered.
    pub reads: VecDeque<Psn>,
    pub retries_left: u8,
    pub rnr_left: u8,
    /// Sequence number of the next message.
    pub ssn: u32,
    /// Messages up to this sequence number have a receive at the responder; `None`: it gives no credits.
    pub credit_limit: Option<u32>,
    /// When the oldest packet without an answer is given up, ns; `u64::MAX` for never.
    pub deadline: u64,
    /// Of an unreliable connection to a host of ours: the PSN after the last packet that this host has said it has
    /// taken out of its socket.
    pub taken: Psn,
    /// How often in a row that host may say nothing in time until nothing is held back for it any more; see
    /// [`Wire::is_held_back`].
    pub patience: u8,
    /// Nothing is sent before this time: the responder had no receive.
    pub rnr_until: u64,
    /// When the timer of the heap fires.
    pub timer_at: u64,
    /// A lost response was noticed and asked for again; cleared by progress.
    pub recovering: bool,
    /// It stands among those that wait for room in [`crate::Tx`].
    pub waits_for_tx: bool,
    pub cc: Window,
    /// When the peer may be told of congestion again.
    pub cnp_after: u64,
    /// Payload of the request at the cursor, by the number of its WQE.
    pub fetched: Prefetched,
    /// Answers of the peer that wait for a job: for one that stores the data of a READ or atomic, mostly.
    pub inbox: DeferredPackets,
    pub resp: Responder,
}

impl Wire {
    /// The state of a new connection; `adapts`: to congestion.
    pub fn new(path: Path, adapts: bool) -> Self {
        Wire {
            path,
            flight: VecDeque::new(),
            copies: Copies::default(),
            una: Psn::new(0),
            next: Psn::new(0),
            high: Psn::new(0),
            cursor: 0,
            reads: VecDeque::new(),
            retries_left: 0,
            rnr_left: 0,
            ssn: 1,
            credit_limit: None,
            taken: Psn::new(0),
            patience: 1,
            deadline: u64::MAX,
            rnr_until: 0,
            timer_at: u64::MAX,
            recovering: false,
            waits_for_tx: false,
            cc: Window::new(adapts),
            cnp_after: 0,
            fetched: Prefetched::default(),
            inbox: DeferredPackets::default(),
            resp: Responder::default(),
        }
    }

    /// True if packets have waited for a job and can be executed now.
    pub fn has_arrivals(&self) -> bool {
        self.resp.inbox.is_ready() || self.inbox.is_ready()
    }

    /// A job has ended, and `data` is what it has brought.
    pub fn end_job(&mut self, number: u64, done: Result<u64, Fault>, data: &mut Vec<u8>) {
        let _ = self.fetched.end(number, done, data)
            || self.resp.fetched.end(number, done, data)
            || self.inbox.end(number, done)
            || self.resp.inbox.end(number, done);
    }

    /// The QP goes to RTS with this first PSN.
    pub fn start(&mut self, psn: Psn) {
        (self.una, self.next, self.high, self.taken, self.cc.cut_until) = (psn, psn, psn, psn, psn);
    }

    /// An unreliable connection sends no more than its congestion window until the peer's host has said what it has
    /// taken. Only a host of ours says that, so one that has never said so, or not for long, is not waited for.
    pub fn is_held_back(&self) -> bool {
        self.patience > 0 && self.path.is_ours()
    }

    /// The peer's host has taken packets of an unreliable connection, up to the one with this PSN.
    pub fn taken_up_to(&mut self, psn: Psn) {
        let taken = psn.advance(1);
        // Anything else answers no packet that has been sent.
        let packets = taken.since(self.taken);
        if packets <= self.next.since(self.taken) {
            self.cc.grow(packets);
            (self.taken, self.patience, self.deadline) = (taken, PATIENCE, u64::MAX);
        }
    }

    /// The peer's host has not said in time what it has taken of an unreliable connection: what was sent counts as
    /// lost.
    pub fn is_unheard(&mut self) {
        self.patience = self.patience.saturating_sub(1);
        self.taken = self.next;
        self.deadline = u64::MAX;
        self.cc.shrink(ALPHA_ONE);
    }

    /// True if nothing is under way, in or out.
    pub fn is_idle(&self) -> bool {
        self.flight.is_empty() && self.resp.answers.is_empty()
    }

    /// True while requests are under way.
    pub fn is_busy(&self) -> bool {
        !self.flight.is_empty()
    }

    /// When memory that moves is tried again; `u64::MAX` if nothing waits for it.
    pub fn memory_due(&self, now: u64) -> u64 {
        let request = self.flight.get(self.cursor).map(|f| f.work.stall);
        let due = |s: Stall| s.due().filter(|&at| at > now);
        [request, Some(self.resp.stall())].into_iter().flatten().filter_map(due).min().unwrap_or(u64::MAX)
    }

    /// Forgets all work: the QP failed or was reset.
    pub fn clear(&mut self, spare: &mut Spare) {
        self.clear_requests(spare);
        self.resp.clear();
    }

    /// Takes the oldest request away.
    pub fn pop_flight(&mut self) -> Option<Flight> {
        let f = self.flight.pop_front()?;
        self.copies.shrink(self.flight.len());
        Some(f)
    }

    /// Forgets what it was about to send.
    pub fn clear_requests(&mut self, spare: &mut Spare) {
        while let Some(f) = self.pop_flight() {
            spare.keep_work(f.work);
        }
        self.reads.clear();
        self.cursor = 0;
        self.deadline = u64::MAX;
        self.fetched.clear();
        self.inbox = DeferredPackets::default();
    }
}

impl Wire {
    /// Place of the WQE that PSN `psn` belongs to.
    pub fn find(&self, psn: Psn) -> Option<usize> {
        self.flight.iter().position(|f| f.packets > 0 && psn.since(f.first) < f.packets)
    }

    /// True if no receive is promised for the message with sequence number `ssn` (IBTA vol. 1, 9.7.7.2).
    pub fn lacks_credit(&self, ssn: u32) -> bool {
        self.credit_limit.is_some_and(|limit| limit.wrapping_sub(ssn) & 0xff_ffff >= 0x80_0000)
    }

    /// Sends again from `psn` on.
    pub fn go_back(&mut self, psn: Psn) {
        self.next = psn;
        self.reads.retain(|&end| end.since(self.una) <= psn.since(self.una));
        if self.fetched.coming().is_none() {
            self.fetched.clear();
        }
        self.cursor = self.find(psn).unwrap_or(self.flight.len());
    }

    /// PSN up to which answers that carry no data may complete requests: the first READ or atomic stops them.
    pub fn data_limit(&self, to: Psn) -> Psn {
        for f in &self.flight {
            if f.first.since(self.una) >= to.since(self.una) && !f.first.is_before(self.una) {
                break;
            }
            if f.packets > 0 && f.work.op.returns_data() {
                return if f.first.is_before(self.una) { self.una } else { f.first };
            }
        }
        to
    }
}

/// A send WQE that is under way: its copy, and the PSNs that its message takes.
pub(crate) struct Flight {
    pub work: Box<SendOp>,
    pub first: Psn,
    pub packets: u32,
    /// Sequence number of its first message, 24 bits. A long READ is several messages.
    pub ssn: u32,
    /// The request failed before anything of it was sent, or is a REG_MR that was executed. It completes with this
    /// status when all requests before it have completed.
    pub status: Option<unirdma_formats::WcStatus>,
}

/// Room for copies of requests under way. The first few of each connection count as a part of its QP. Further ones are
/// on the account of its vRNIC, in steps of several.
#[derive(Debug, Default)]
pub(crate) struct Copies {
    counted: usize,
    taken: Taken,
}

impl Copies {
    /// Number of copies that need no room.
    const FEW: usize = 4;
    /// Number of copies that are counted at a time.
    const STEP: usize = 16;
    /// Bytes that a copy counts as.
    const BYTES: usize = size_of::<SendOp>() + size_of::<Flight>();

    /// True if there may be one more than `len`.
    pub fn may_grow(&mut self, len: usize, room: impl Fn() -> Room) -> bool {
        while len >= Self::FEW + self.counted {
            if !self.taken.take(&room(), Self::STEP * Self::BYTES) {
                return false;
            }
            self.counted += Self::STEP;
        }
        true
    }

    /// There are `len` now.
    fn shrink(&mut self, len: usize) {
        while self.counted > 0 && (len == 0 || len + Self::STEP / 2 < Self::FEW + self.counted - Self::STEP) {
            self.counted -= Self::STEP;
            self.taken.give(Self::STEP * Self::BYTES);
        }
    }
}

impl Flight {
    pub fn end(&self) -> Psn {
        self.first.advance(self.packets)
    }
}

/// [`Wire::patience`] with a host that says what it takes. A host whose processes get no core for half a second is
/// not flooded.
const PATIENCE: u8 = 10;

pub(crate) const WINDOW_MIN: u32 = 4;
const WINDOW_START: u32 = 64;
pub(crate) const WINDOW_MAX: u32 = 512;
const ALPHA_ONE: u32 = 1024;
/// `alpha` moves by this part of its distance (DCQCN's g is 1/256 for a rate; a window sees fewer events).
const ALPHA_GAIN: u32 = 16;

/// Packets that may be without an answer. It grows with each one, halves with each loss, and yields to congestion
/// notifications as DCQCN does (SIGCOMM 2015): by half of `alpha`, an estimate of how many packets are marked.
pub(crate) struct Window {
    pub packets: u32,
    pub threshold: u32,
    pub acked: u32,
    /// In 1024ths.
    pub alpha: u32,
    /// The last cut was for losses before this PSN: they cause no other cut.
    pub cut_until: Psn,
    /// False: always [`WINDOW_MAX`].
    pub adapts: bool,
}

impl Window {
    pub fn new(adapts: bool) -> Self {
        let packets = if adapts { WINDOW_START } else { WINDOW_MAX };
        Window { packets, threshold: WINDOW_MAX, acked: 0, alpha: ALPHA_ONE, cut_until: Psn::new(0), adapts }
    }

    pub fn grow(&mut self, packets: u32) {
        if !self.adapts {
            return;
        }
        if self.packets < self.threshold {
            self.packets = (self.packets + packets).min(WINDOW_MAX);
            return;
        }
        self.acked += packets;
        if self.acked >= self.packets {
            self.acked = 0;
            self.alpha -= self.alpha / ALPHA_GAIN;
            self.packets = (self.packets + 1).min(WINDOW_MAX);
        }
    }

    /// A packet was lost.
    pub fn cut(&mut self, una: Psn, high: Psn) {
        if una.is_before(self.cut_until) {
            return;
        }
        self.cut_until = high;
        self.shrink(ALPHA_ONE);
    }

    /// The network is congested.
    pub fn notified(&mut self) {
        self.alpha = self.alpha - self.alpha / ALPHA_GAIN + ALPHA_ONE / ALPHA_GAIN;
        self.shrink(self.alpha);
    }

    pub fn shrink(&mut self, alpha: u32) {
        if self.adapts {
            self.packets = (self.packets - self.packets * alpha / (2 * ALPHA_ONE)).max(WINDOW_MIN);
            self.threshold = self.packets;
            self.acked = 0;
        }
    }
}

/// Most answers that wait for their turn. Requests beyond that are treated as lost packets: the peer sends them again.
const MAX_ANSWERS: usize = 512;

/// Something that the responder has to send. Answers are sent in order.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Answer {
    Ack {
        psn: Psn,
        msn: u32,
    },
    Read {
        psn: Psn,
        msn: u32,
        va: u64,
        rkey: Rkey,
        len: u64,
        done: u64,
        /// Whose memory.
        of: Reach,
        /// For a duplicate request.
        again: bool,
    },
    Atomic {
        psn: Psn,
        msn: u32,
        value: u64,
        again: bool,
    },
    /// A NAK; `fails` ends the QP once it is sent.
    Nak {
        psn: Psn,
        msn: u32,
        code: u8,
        fails: Option<Option<AsyncEvent>>,
    },
}

/// A message of several packets that has begun.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Message {
    Send,
    Write { va: u64, rkey: Rkey, len: u64 },
}

/// The responder's state of a connected QP. The expected PSN is the QP's `rq_psn`.
#[derive(Default)]
pub(crate) struct Responder {
    pub msn: u32,
    pub message: Option<Message>,
    /// Bytes of the message that have come in.
    pub got: u64,
    /// A NAK went out for the expected PSN. No further NAK is sent until a packet with that PSN comes.
    pub nak_sent: bool,
    /// A fatal NAK is on its way: further requests are dropped.
    pub failed: bool,
    pub answers: VecDeque<Answer>,
    /// Payload of the oldest answer.
    pub fetched: Prefetched,
    /// Requests of the peer that wait for a job: for one that stores their payload or executes an atomic, or behind
    /// such a request.
    pub inbox: DeferredPackets,
    /// When an ACK leaves at the latest. Until then it waits for the program's own reply, so that both leave together.
    pub ack_due: u64,
    /// Memory moves that an answer needs, or a request that was dropped for it.
    pub stall: Stall,
    /// A request was dropped because memory moved: it is asked for again.
    pub missed: bool,
    /// The last atomics, to answer duplicates with what was found then (IBTA vol. 1, 9.4.5).
    pub atomics: VecDeque<(Psn, u64)>,
}

impl Responder {
    pub fn clear(&mut self) {
        *self = Responder { msn: self.msn, ..Responder::default() };
    }

    pub fn push(&mut self, a: Answer) {
        // An ACK covers those before it (ACK coalescing).
        if let (Answer::Ack { .. }, Some(last @ Answer::Ack { .. })) = (a, self.answers.back_mut()) {
            *last = a;
        } else if self.answers.len() < MAX_ANSWERS || matches!(a, Answer::Nak { fails: Some(_), .. }) {
            self.answers.push_back(a);
        }
    }

    pub fn ack(&mut self, psn: Psn) {
        self.ack_due = 0;
        self.push(Answer::Ack { psn, msn: self.msn });
    }

    /// Its wait for memory that moves.
    pub fn stall(&self) -> Stall {
        self.stall
    }

    /// True if memory could not be reached because it moves, and is to be tried again.
    pub fn waits(&mut self, fault: Fault, now: u64) -> bool {
        fault.passes() && self.stall.again(now).is_some()
    }

    /// Lets an ACK leave that waits for company.
    pub fn hurry(&mut self) {
        self.ack_due = 0;
    }

    /// How many READs and atomics wait for their first answer. The requester may have at most `max_dest_rd_atomic` of
    /// them outstanding. Answers to duplicates do not count, since the network makes duplicates too.
    pub fn reads_waiting(&self) -> usize {
        let first = |a: &&Answer| matches!(a, Answer::Read { again: false, .. } | Answer::Atomic { again: false, .. });
        self.answers.iter().filter(first).count()
    }

    pub fn fail(&mut self, psn: Psn, code: u8, event: Option<AsyncEvent>) {
        self.failed = true;
        self.push(Answer::Nak { psn, msn: self.msn, code, fails: Some(event) });
    }
}

/// The transport of a connected QP's packets.
pub(crate) fn transport_of(typ: QpType) -> Transport {
    match typ {
        QpType::Uc => Transport::Uc,
        QpType::XrcSend | QpType::XrcRecv => Transport::Xrc,
        _ => Transport::Rc,
    }
}
