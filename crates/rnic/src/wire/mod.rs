//! The transport over a network: reliable connections in RoCEv2 packets, sans-IO (IBTA vol. 1, chapter 9).
//!
//! A QP whose destination GID lies on another host has a [`Wire`]: the state of its requester and completer
//! (`requester`) and of its responder (`responder`). Packets come in by [`Rnic::handle_packet`] and leave through
//! [`Tx`], from the base transport header up to the payload's padding; IP, UDP and the invariant CRC are the port's.

mod requester;
mod responder;

use std::collections::VecDeque;
use std::net::IpAddr;

use unirdma_formats::cm::GSI_QPN;
use unirdma_formats::net::{ETH_BYTES, Flow, MAX_IP_UDP_BYTES, VXLAN_BYTES, vxlan};
use unirdma_formats::wire::{
    DEFAULT_PKEY, Extra, ICRC_BYTES, MAX_HEADER_BYTES, Op, Opcode, Packet, ROCE_PORT, Transport, padding,
};
use unirdma_formats::{Gid, Psn, QpState, QpType};
use unirdma_mem::Fault;

use crate::datagram::ethernet;
use crate::objects::{Qp, VnicId, Wait, Work};
use crate::rnic::{MAX_WOKEN, OP_NS, Rnic, copy_ns};
use crate::slab::Handle;
use crate::stall::Stall;
pub(crate) use requester::request_packet;
pub(crate) use responder::{ACK_DELAY_NS, Responder};

/// Where the holder of a GID is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Route {
    /// Address of its host.
    pub host: IpAddr,
    /// A plain RoCEv2 device: it knows this side by the vRNIC's own GID, so packets leave from that address.
    pub foreign: bool,
    /// VXLAN network identifier of the group, 24 bits.
    pub vni: u32,
}

/// The two ends of a QP's packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Path {
    /// The peer's host.
    pub to: IpAddr,
    /// Source address; `None`: the host's own.
    pub from: Option<IpAddr>,
    /// UDP source port: one for all packets of a connection, which keeps them in order, and others for other connections.
    pub port: u16,
    /// Traffic class of the address vector, its two ECN bits aside: those are the network's.
    pub class: u8,
    /// There is no link: what is sent is lost.
    pub cut: bool,
}

impl Path {
    /// From this host to another one, on the port of RoCEv2.
    pub fn new(to: IpAddr) -> Self {
        Path { to, from: None, port: ROCE_PORT, class: 0, cut: false }
    }
}

/// The bits of a traffic class that say how a packet is treated (RFC 2474); the others are ECN.
pub(crate) const DSCP: u8 = 0xfc;

/// Where a packet came from and went to.
#[derive(Clone, Copy, Debug)]
pub struct Arrival {
    /// The sender's address.
    pub from: IpAddr,
    /// The sender's UDP port.
    pub port: u16,
    /// An address of this host, or of an IP multicast group.
    pub to: IpAddr,
    /// The network has marked it (ECN, RFC 3168).
    pub congested: bool,
}

/// What came in from the network and was not for any QP, by reason; counted for the whole host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct WireDrops {
    /// Truncated, an opcode that does not exist, a bad version.
    pub malformed: u64,
    /// No such QP or connection, or one that is not connected over the wire.
    pub no_qp: u64,
    /// From a host that the QP is not connected to.
    pub wrong_source: u64,
    /// A P_Key that is not the default one.
    pub bad_pkey: u64,
    /// The QP's state or type does not take it.
    pub bad_state: u64,
    /// A datagram from another virtual layer with a wrong ICRC.
    pub bad_icrc: u64,
}

/// Packets that wait for the port, in one flat buffer.
pub struct Tx {
    bytes: Box<[u8]>,
    used: usize,
    packets: Vec<TxPacket>,
    /// How many of `packets` are gone.
    gone: usize,
}

/// A packet of [`Tx`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TxPacket {
    /// Where from and to.
    pub path: Path,
    start: usize,
    len: usize,
    outer: usize,
}

/// Bytes that [`Tx`] holds; beyond [`TX_FULL`] connected QPs wait, and nobody else.
const TX_BYTES: usize = 1 << 20;
const TX_FULL: usize = TX_BYTES - (64 << 10);
/// Most bytes that an encapsulation puts before a packet.
pub const MAX_OUTER_BYTES: usize = VXLAN_BYTES + ETH_BYTES + MAX_IP_UDP_BYTES;

impl TxPacket {
    /// Bytes, the ICRC included.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Bytes of the headers of an encapsulation before the base transport header: 0, or VXLAN, Ethernet, IP and UDP.
    pub fn outer(&self) -> usize {
        self.outer
    }

    /// True for a packet of no bytes, which there is none of.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Default for Tx {
    fn default() -> Self {
        Tx { bytes: vec![0; TX_BYTES].into_boxed_slice(), used: 0, packets: Vec::with_capacity(4096), gone: 0 }
    }
}

impl Tx {
    /// The packets that are not sent yet, in order.
    pub fn packets(&self) -> &[TxPacket] {
        &self.packets[self.gone..]
    }

    /// Bytes of a packet: headers, payload and padding, then room for the ICRC.
    pub fn bytes(&mut self, p: &TxPacket) -> &mut [u8] {
        &mut self.bytes[p.start..p.start + p.len]
    }

    /// Bytes of `n` packets from number `at` on, which lie one after the other.
    pub fn span(&self, at: usize, n: usize) -> &[u8] {
        let packets = &self.packets()[at..at + n];
        match (packets.first(), packets.last()) {
            (Some(first), Some(last)) => &self.bytes[first.start..last.start + last.len],
            _ => &[],
        }
    }

    /// The first `n` packets are sent, or lost.
    pub fn sent(&mut self, n: usize) {
        self.gone += n;
        if self.gone >= self.packets.len() {
            (self.used, self.gone) = (0, 0);
            self.packets.clear();
        }
    }

    /// Appends a packet that is made already, its ICRC aside.
    pub fn push_raw(&mut self, path: Path, bytes: &[u8]) {
        let (start, end) = (self.used, self.used + bytes.len());
        let Some(room) = self.bytes.get_mut(start..end + ICRC_BYTES) else { return };
        room[..bytes.len()].copy_from_slice(bytes);
        self.used = end + ICRC_BYTES;
        self.packets.push(TxPacket { path, start, len: self.used - start, outer: 0 });
    }

    pub(crate) fn is_full(&self) -> bool {
        self.used >= TX_FULL
    }

    /// Appends a packet whose payload `fill` writes; nothing if it fails.
    fn push(
        &mut self,
        path: Path,
        head: &Packet<'_>,
        len: usize,
        fill: impl FnOnce(&mut [u8]) -> Result<(), Fault>,
    ) -> Result<(), Fault> {
        self.push_datagram(path, None, head, len, fill)
    }

    /// As [`Tx::push`], for a datagram: inside VXLAN with this network identifier, in an IP packet of this flow.
    pub(crate) fn push_datagram(
        &mut self,
        path: Path,
        inside: Option<(u32, Flow)>,
        head: &Packet<'_>,
        len: usize,
        fill: impl FnOnce(&mut [u8]) -> Result<(), Fault>,
    ) -> Result<(), Fault> {
        let start = self.used;
        if path.cut || self.bytes.len() - start < MAX_OUTER_BYTES + MAX_HEADER_BYTES + len + 3 + ICRC_BYTES {
            // There is room while callers ask `is_full` first; a packet may always be lost.
            return Ok(());
        }
        let mut outer = 0;
        if let Some((vni, flow)) = inside {
            let mut put = |bytes: &[u8]| {
                self.bytes[start + outer..start + outer + bytes.len()].copy_from_slice(bytes);
                outer += bytes.len();
            };
            put(&vxlan(vni));
            put(&ethernet(&flow));
            let udp = head.opcode.header_bytes() + len + padding(len) + ICRC_BYTES;
            outer += flow.put(&mut self.bytes[start + outer..], udp);
        }
        let at = start + outer + head.put(&mut self.bytes[start + outer..], len);
        fill(&mut self.bytes[at..at + len])?;
        let end = at + len + padding(len);
        self.bytes[at + len..end].fill(0);
        self.used = end + ICRC_BYTES;
        self.packets.push(TxPacket { path, start, len: self.used - start, outer });
        Ok(())
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

/// A send WQE that is under way: its copy, and the PSNs that its message takes.
pub(crate) struct Flight {
    work: Box<Work>,
    first: Psn,
    packets: u32,
    /// Sequence number of its first message, 24 bits: a READ may be several.
    ssn: u32,
    /// It could not even begin: completes with this when all before it have.
    status: Option<unirdma_formats::WcStatus>,
}

impl Flight {
    fn end(&self) -> Psn {
        self.first.advance(self.packets)
    }
}

/// The network state of a QP.
pub(crate) struct Wire {
    pub path: Path,
    flight: VecDeque<Flight>,
    /// Boxes of requests that are over, for new ones: no allocation for each request.
    #[allow(clippy::vec_box)]
    spare: Vec<Box<Work>>,
    /// PSN of the oldest packet without an answer.
    una: Psn,
    /// PSN of the next packet to send; goes back to `una` for a retransmission.
    next: Psn,
    /// PSN after the last one that was ever sent.
    high: Psn,
    /// Place of `next` in `flight`.
    cursor: usize,
    /// Ends of the READ requests and atomics that were sent and not answered.
    reads: VecDeque<Psn>,
    retries_left: u8,
    rnr_left: u8,
    /// Sequence number of the next message.
    ssn: u32,
    /// Messages up to this sequence number have a receive at the responder; `None`: it gives no credits.
    credit_limit: Option<u32>,
    /// When the oldest packet without an answer is given up, ns; `u64::MAX` for never.
    deadline: u64,
    /// Nothing is sent before this time: the responder had no receive.
    rnr_until: u64,
    /// When the timer of the heap fires.
    timer_at: u64,
    /// A lost response was noticed and asked for again; cleared by progress.
    recovering: bool,
    /// It stands among those that wait for room in [`Tx`].
    waits_for_tx: bool,
    cc: Window,
    /// When the peer may be told of congestion again.
    cnp_after: u64,
    pub resp: Responder,
}

/// Packets that may be without an answer. It grows with each one, halves with each loss, and yields to congestion
/// notifications as DCQCN does (SIGCOMM 2015): by half of `alpha`, an estimate of how many packets are marked.
struct Window {
    packets: u32,
    threshold: u32,
    acked: u32,
    /// In 1024ths.
    alpha: u32,
    /// Losses before this PSN belong to the last cut.
    cut_until: Psn,
    /// False: always [`WINDOW_MAX`].
    adapts: bool,
}

const WINDOW_MIN: u32 = 4;
const WINDOW_START: u32 = 64;
const WINDOW_MAX: u32 = 512;
const ALPHA_ONE: u32 = 1024;
/// `alpha` moves by this part of its distance (DCQCN's g is 1/256 for a rate; a window sees fewer events).
const ALPHA_GAIN: u32 = 16;
/// Least time between two congestion notifications to one QP, ns (DCQCN's N).
const CNP_INTERVAL_NS: u64 = 50_000;

impl Window {
    fn new(adapts: bool) -> Self {
        let packets = if adapts { WINDOW_START } else { WINDOW_MAX };
        Window { packets, threshold: WINDOW_MAX, acked: 0, alpha: ALPHA_ONE, cut_until: Psn::new(0), adapts }
    }

    fn grow(&mut self, packets: u32) {
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
    fn cut(&mut self, una: Psn, high: Psn) {
        if una.is_before(self.cut_until) {
            return;
        }
        self.cut_until = high;
        self.shrink(ALPHA_ONE);
    }

    /// The network is congested.
    fn notified(&mut self) {
        self.alpha = self.alpha - self.alpha / ALPHA_GAIN + ALPHA_ONE / ALPHA_GAIN;
        self.shrink(self.alpha);
    }

    fn shrink(&mut self, alpha: u32) {
        if self.adapts {
            self.packets = (self.packets - self.packets * alpha / (2 * ALPHA_ONE)).max(WINDOW_MIN);
            self.threshold = self.packets;
            self.acked = 0;
        }
    }
}

impl Wire {
    /// The state of a new connection; `adapts`: to congestion.
    pub fn new(path: Path, adapts: bool) -> Self {
        Wire {
            path,
            flight: VecDeque::new(),
            spare: Vec::new(),
            una: Psn::new(0),
            next: Psn::new(0),
            high: Psn::new(0),
            cursor: 0,
            reads: VecDeque::new(),
            retries_left: 0,
            rnr_left: 0,
            ssn: 1,
            credit_limit: None,
            deadline: u64::MAX,
            rnr_until: 0,
            timer_at: u64::MAX,
            recovering: false,
            waits_for_tx: false,
            cc: Window::new(adapts),
            cnp_after: 0,
            resp: Responder::default(),
        }
    }

    /// The QP goes to RTS with this first PSN.
    pub fn start(&mut self, psn: Psn) {
        (self.una, self.next, self.high, self.cc.cut_until) = (psn, psn, psn, psn);
    }

    /// True while requests are under way.
    pub fn is_busy(&self) -> bool {
        !self.flight.is_empty()
    }

    /// When memory that moves is tried again; `u64::MAX` if nothing waits for it.
    fn memory_due(&self, now: u64) -> u64 {
        let request = self.flight.get(self.cursor).map(|f| f.work.stall);
        let due = |s: Stall| s.due().filter(|&at| at > now);
        [request, Some(self.resp.stall())].into_iter().flatten().filter_map(due).min().unwrap_or(u64::MAX)
    }

    /// Forgets all work: the QP failed or was reset.
    pub fn clear(&mut self) {
        self.clear_requests();
        self.resp.clear();
    }

    /// Forgets what it was about to send.
    pub fn clear_requests(&mut self) {
        while let Some(f) = self.flight.pop_front() {
            self.spare.push(f.work);
        }
        self.reads.clear();
        self.cursor = 0;
        self.deadline = u64::MAX;
    }
}

impl Rnic {
    /// Where GIDs of other hosts are reached, by group. QPs keep the route that they were connected with.
    pub fn set_routes(&mut self, routes: std::collections::HashMap<(u32, Gid), Route>) {
        self.routes = routes;
        self.find_group_hosts();
        self.cm_addresses_changed();
    }

    /// The largest path MTU that the network to other hosts takes, bytes.
    pub fn set_wire_mtu(&mut self, bytes: u32) {
        self.wire_mtu = bytes;
    }

    /// Turns congestion control on or off, for connections made from now on: without it losses and notifications change
    /// no window, and no notification is sent.
    pub fn set_congestion_control(&mut self, on: bool) {
        self.adapts = on;
    }

    /// What came in for no QP.
    pub fn wire_drops(&self) -> WireDrops {
        self.drops
    }

    /// Packets to send. The caller sends what it can and says so with [`Tx::sent`].
    pub fn tx(&mut self) -> &mut Tx {
        &mut self.tx
    }

    /// The path to `dgid` if it lies on another host.
    pub(crate) fn route(&self, vnic: VnicId, sgid_index: u8, dgid: Gid) -> Option<Path> {
        let v = self.vnics.get(vnic.0)?;
        let r = self.routes.get(&(v.group, dgid))?;
        let own = v.gid(sgid_index)?;
        Some(Path { from: r.foreign.then(|| own.ip()), cut: !v.up, ..Path::new(r.host) })
    }

    /// A packet came in; `bytes` are all from the BTH up to the ICRC, which the port has checked.
    pub fn handle_packet(&mut self, now: u64, a: &Arrival, bytes: &[u8]) {
        self.now = self.now.max(now);
        let Some(p) = self.parse(bytes) else { return };
        if a.to.is_multicast() {
            return self.on_multicast(a, &p);
        }
        if p.dest_qp == GSI_QPN {
            return self.on_foreign_mad(a, &p, bytes);
        }
        let Some(h) = self.find_qp(&p) else { return };
        let Some(q) = self.qps.get(h) else { return };
        if q.typ == QpType::Ud {
            return self.on_foreign_datagram(h, a, &p, bytes);
        }
        let Some(wire) = &q.wire else {
            self.drops.no_qp += 1;
            return;
        };
        if wire.path.to != a.from {
            self.drops.wrong_source += 1;
            return;
        }
        let transport = match p.opcode.transport {
            Transport::Rc => q.typ == QpType::Rc,
            Transport::Uc => q.typ == QpType::Uc,
            Transport::Xrc => matches!(q.typ, QpType::XrcSend | QpType::XrcRecv),
            Transport::Ud => false,
            Transport::Cnp => true,
        };
        if !q.receives() || !transport {
            self.drops.bad_state += 1;
            return;
        }
        let path = wire.path;
        self.count(h, |c| c.wire.rcvd_pkts += 1);
        if self.tap.is_some() {
            self.tap_received(self.vnic_id(h), Path { port: a.port, ..path }, bytes);
        }
        self.with_wire(h, |rnic, w| {
            if a.congested {
                rnic.notify_congestion(h, w);
            }
            match p.opcode.op {
                Op::Ack | Op::AtomicAck | Op::ReadResponse(_) => rnic.on_response(h, w, &p),
                Op::Cnp => {
                    rnic.count(h, |c| c.wire.rp_cnp_handled += 1);
                    w.cc.notified();
                }
                _ => rnic.on_request(h, w, &p),
            }
        });
        self.make_runnable(h);
    }

    /// A marked packet came in: its sender is told (annex A17), but not for each one.
    fn notify_congestion(&mut self, h: Handle<Qp>, w: &mut Wire) {
        self.count(h, |c| c.wire.np_ecn_marked_roce_packets += 1);
        if !self.adapts || self.now < w.cnp_after || self.tx.is_full() {
            return;
        }
        w.cnp_after = self.now + CNP_INTERVAL_NS;
        let Some(dest) = self.qps.get(h).map(|q| q.attr.dest_qp_num) else { return };
        let opcode = Opcode { transport: Transport::Cnp, op: Op::Cnp, extra: Extra::None };
        let mut p = Packet::new(opcode, dest, 0);
        p.becn = true;
        if self.tx.push(w.path, &p, 0, |_| Ok(())).is_ok() {
            self.note_sent(h, &w.path);
            self.count(h, |c| c.wire.np_cnp_sent += 1);
        }
    }

    /// QP `h` has put a packet for `path` into [`Tx`]; without a link it is lost.
    pub(crate) fn note_sent(&mut self, h: Handle<Qp>, path: &Path) {
        if path.cut {
            return self.count(h, |c| c.wire.send_err += 1);
        }
        if self.tap.is_some() {
            self.tap_sent(self.vnic_id(h));
        }
        self.count(h, |c| c.wire.sent_pkts += 1);
    }

    /// Reads a packet and finds the QP that it is for; what is for none is counted.
    pub(crate) fn parse<'a>(&mut self, bytes: &'a [u8]) -> Option<Packet<'a>> {
        let Ok(p) = Packet::parse(bytes) else {
            self.drops.malformed += 1;
            return None;
        };
        // IBTA vol. 1, 9.6.1.1.5: the membership bit does not count.
        if p.pkey & 0x7fff != DEFAULT_PKEY & 0x7fff {
            self.drops.bad_pkey += 1;
            return None;
        }
        Some(p)
    }

    /// The QP that a packet names; its vRNIC is charged for the packet.
    pub(crate) fn find_qp(&mut self, p: &Packet<'_>) -> Option<Handle<Qp>> {
        let found = self.qpns.get(&p.dest_qp).copied();
        self.drops.no_qp += u64::from(found.is_none());
        if let Some(q) = found.and_then(|h| self.qps.get(h)) {
            self.sched.charge(q.vnic, OP_NS + copy_ns(p.payload.len() as u64));
        }
        found
    }

    /// Runs `f` with the wire state of QP `h` taken out; what the QP lost meanwhile, its state loses too.
    fn with_wire<R>(&mut self, h: Handle<Qp>, f: impl FnOnce(&mut Self, &mut Wire) -> R) -> Option<R> {
        let mut w = self.qps.get_mut(h)?.wire.take()?;
        let r = f(self, &mut w);
        if self.qps.get(h).is_some_and(|q| q.state == QpState::Err) {
            self.send_last_ack(h, &mut w);
        }
        if let Some(q) = self.qps.get_mut(h) {
            match q.state {
                QpState::Err => w.clear(),
                QpState::Sqe => {
                    w.clear_requests();
                    w.start(q.sq_psn);
                }
                _ => {}
            }
            q.wire = Some(w);
        }
        Some(r)
    }

    /// QP `h` is about to go: what it has received is acknowledged first, or its peer would wait in vain.
    pub(crate) fn acknowledge_all(&mut self, h: Handle<Qp>) {
        self.with_wire(h, |rnic, w| rnic.send_last_ack(h, w));
    }

    /// A turn of a connected QP: responses first, then requests. Its cost, and whether it has more to do.
    pub(crate) fn wire_step(&mut self, h: Handle<Qp>, allowance: u64) -> (u64, bool) {
        let turn = self.with_wire(h, |rnic, w| {
            let mut cost = 0;
            while cost < allowance {
                if rnic.tx.is_full() {
                    if !std::mem::replace(&mut w.waits_for_tx, true) {
                        rnic.tx_waiting.push_back(h);
                    }
                    return (cost, false);
                }
                let answered = rnic.respond(h, w);
                match answered.or_else(|| rnic.request(h, w)) {
                    Some(c) => {
                        if answered.is_none() {
                            w.resp.hurry();
                        }
                        cost += c;
                    }
                    None => {
                        rnic.arm_wire(h, w);
                        return (cost, false);
                    }
                }
            }
            rnic.arm_wire(h, w);
            (cost, true)
        });
        turn.unwrap_or((0, false))
    }

    /// There is room in [`Tx`] again: QPs that waited for it get their turns.
    pub(crate) fn wake_tx_waiting(&mut self) {
        for _ in 0..MAX_WOKEN {
            let Some(h) = self.tx_waiting.pop_front() else { return };
            if let Some(q) = self.qps.get_mut(h) {
                if q.wait == Wait::Tx {
                    q.wait = Wait::No;
                }
                if let Some(w) = &mut q.wire {
                    w.waits_for_tx = false;
                }
            }
            self.make_runnable(h);
        }
    }

    /// Keeps a timer in the heap that fires no later than this QP needs it.
    fn arm_wire(&mut self, h: Handle<Qp>, w: &mut Wire) {
        let rnr = if w.rnr_until > self.now { w.rnr_until } else { u64::MAX };
        let need = w.deadline.min(rnr).min(w.memory_due(self.now));
        if need < w.timer_at {
            w.timer_at = need;
            self.arm_timer(h, need.saturating_sub(self.now));
        }
    }

    /// The timer of a connected QP fired.
    pub(crate) fn on_wire_timer(&mut self, h: Handle<Qp>) {
        self.with_wire(h, |rnic, w| {
            w.timer_at = u64::MAX;
            if w.deadline <= rnic.now {
                rnic.on_timeout(h, w);
            }
            rnic.arm_wire(h, w);
        });
        self.make_runnable(h);
    }
}
