//! Captures packets of the network, and the packets that a message between two vRNICs of this host would have been.

use std::net::IpAddr;

use unirdma_formats::net::{ETH_BYTES, Flow, VXLAN_BYTES, vxlan};
use unirdma_formats::wire::{Aeth, Extra, ICRC_BYTES, MAX_HEADER_BYTES, Op, Opcode, Packet, Part, padding, syndrome};
use unirdma_formats::{Gid, WrOpcode, psn_count};

use crate::access::{NeedsJob, local_side};
use crate::capture::{Capture, Captured, Tap};
use crate::core::{Core, copy_ns};
use crate::objects::{Qp, SendOp, VrnicId, transport_of};
use crate::path::Path;
use crate::slab::Handle;
use crate::tx::ethernet;
use crate::wire::request_packet;

/// Most packets of a message that one step captures.
const MAX_PACKETS: u64 = 4;
/// Approximate cost of a captured packet beside its bytes, nanoseconds.
const PACKET_NS: u64 = 200;
/// Most bytes of a message that one step captures.
const MAX_STEP_BYTES: u64 = 16 << 10;

impl Core {
    /// Captures packets from now on.
    pub fn start_capture(&mut self, what: Capture) {
        self.tap = Some(Box::new(Tap::new(what)));
    }

    /// Captures no more. Returns the number of packets that were lost since the start.
    pub fn stop_capture(&mut self) -> u64 {
        self.tap.take().map_or(0, |t| t.lost)
    }

    /// Takes the packets that were captured since this was called last, in exchange for `into`, whose memory is used
    /// for the next ones. No packets if nothing is captured.
    pub fn take_captured(&mut self, into: &mut Captured) {
        match &mut self.tap {
            Some(t) => t.take(into),
            None => into.clear(),
        }
    }

    fn wants(&self, vrnic: Option<VrnicId>) -> bool {
        let wanted = |t: &Tap| t.what.vrnic.is_none() || t.what.vrnic == vrnic;
        self.tap.as_ref().is_some_and(|t| wanted(t))
    }

    /// Captures the packet that a vRNIC has just put into [`crate::Tx`].
    pub(crate) fn tap_sent(&mut self, vrnic: Option<VrnicId>) {
        if !self.wants(vrnic) {
            return;
        }
        let Some(&p) = self.net.tx.packets().last() else { return };
        let bytes = self.net.tx.bytes(&p);
        let body = &bytes[..bytes.len() - p.tail()];
        if let Some(t) = &mut self.tap {
            let flow = t.outer_flow(&p.path, false, p.outer() > 0);
            t.packet(self.now, &flow, p.outer(), &[body], body.len());
        }
    }

    /// Captures a packet that came from `path.to` for a vRNIC. `own` is the address of this end if it is not the
    /// host's.
    pub(crate) fn tap_received(&mut self, vrnic: Option<VrnicId>, path: Path, body: &[u8]) {
        if !self.wants(vrnic) {
            return;
        }
        if let Some(t) = &mut self.tap {
            let flow = t.outer_flow(&path, true, false);
            t.packet(self.now, &flow, 0, &[body], body.len() + ICRC_BYTES);
        }
    }

    /// Captures a datagram that came from host `from` inside VXLAN.
    pub(crate) fn tap_encapsulated(
        &mut self,
        vrnic: Option<VrnicId>,
        from: IpAddr,
        vni: u32,
        flow: &Flow,
        packet: &[u8],
    ) {
        if !self.wants(vrnic) {
            return;
        }
        let head = (vxlan(vni), ethernet(flow));
        let parts = [&head.0[..], &head.1, packet];
        if let Some(t) = &mut self.tap {
            let outer = t.outer_flow(&Path::new(from), true, true);
            let all = parts.iter().map(|p| p.len()).sum();
            t.packet(self.now, &outer, VXLAN_BYTES + ETH_BYTES + flow.header_bytes(), &parts, all);
        }
    }

    /// Captures a datagram between two vRNICs of this host.
    pub(crate) fn tap_datagram(
        &mut self,
        h: Handle<Qp>,
        to: Option<VrnicId>,
        flow: &Flow,
        p: &Packet<'_>,
        payload: &[u8],
    ) {
        if self.tap.is_some() && (self.wants(self.objects.vrnic_of_qp(h)) || self.wants(to)) {
            self.tap_local(flow, p, payload, payload.len());
        }
    }

    /// Captures a MAD between two vRNICs of this host.
    pub(crate) fn tap_mad(&mut self, from: VrnicId, to: VrnicId, flow: &Flow, p: &Packet<'_>, mad: &[u8]) {
        if self.tap.is_some() && (self.wants(Some(from)) || self.wants(Some(to))) {
            self.tap_local(flow, p, mad, mad.len());
        }
    }

    /// Captures a packet with `len` bytes of payload. `payload` has at least the bytes that the capture keeps.
    fn tap_local(&mut self, flow: &Flow, p: &Packet<'_>, payload: &[u8], len: usize) {
        if let Some(t) = &mut self.tap {
            let mut head = [0; MAX_HEADER_BYTES];
            let n = p.put(&mut head, len);
            t.packet(self.now, flow, 0, &[&head[..n], payload], n + len + padding(len) + ICRC_BYTES);
        }
    }

    /// True if packets between QP `q` and its peer on this host are captured.
    fn taps(&self, q: &Qp) -> bool {
        self.tap.is_some() && (self.wants(Some(q.vrnic)) || self.wants(q.local().map(|l| l.vrnic)))
    }

    /// Most bytes of a message of QP `q` that may be copied in one step, because captured bytes are copied once more
    /// under the RNIC's lock. `None` if the message is not captured.
    pub(crate) fn most_tapped(&self, q: &Qp) -> Option<u64> {
        self.taps(q).then(|| MAX_STEP_BYTES.min(MAX_PACKETS * u64::from(q.mtu)))
    }

    /// Approximate cost of capturing `bytes` of a message of QP `h`, nanoseconds; 0 if they are not captured.
    pub(crate) fn tap_ns(&self, h: Handle<Qp>, bytes: u64) -> u64 {
        let tapped = self.tap.as_ref().and_then(|_| self.objects.qps.get(h)).filter(|q| self.taps(q));
        tapped.map_or(0, |q| copy_ns(bytes) + PACKET_NS * (bytes / u64::from(q.mtu) + 2))
    }

    /// A job has copied these bytes of a message from offset `from` on. The packets that are captured next contain
    /// them. Leaves the previous buffer in `copied`.
    pub(crate) fn tap_kept(&mut self, from: u64, copied: &mut Vec<u8>) {
        if let Some(t) = &mut self.tap {
            t.copied.0 = from;
            std::mem::swap(&mut t.copied.1, copied);
        }
    }

    /// Captures packet `index` of request `w` of QP `h`, or of its answer.
    fn tap_packet(&mut self, h: Handle<Qp>, w: &SendOp, index: u32, as_answer: bool) {
        let Some(q) = self.objects.qps.get(h) else { return };
        let (packets, psn) = (psn_count(w.total, q.mtu), q.sq_psn.advance(index));
        let there = self.flow(q);
        let off = u64::from(index) * u64::from(q.mtu);
        let (flow, head, len) = if as_answer {
            let part = Part::of(index == 0, index + 1 == packets);
            let len = (w.total - off.min(w.total)).min(q.mtu.into()) as usize;
            (back(&there), answer(q, Op::ReadResponse(part), psn.get(), syndrome::ACK), len)
        } else {
            let span = if w.op == WrOpcode::Read { packets } else { 1 };
            let (mut head, len) = request_packet(q, w, psn, index, packets, span);
            head.ack_req = q.typ.is_reliable() && index + span == packets;
            (there, head, len)
        };
        let Some(t) = &mut self.tap else { return };
        let mut payload = std::mem::take(&mut t.payload);
        let mut kept = &mut payload[..len.min(t.what.snap as usize)];
        if !kept.is_empty() {
            let (from, copied) = &t.copied;
            let had = copied.get(off.saturating_sub(*from) as usize..).unwrap_or_default();
            // Private memory of a process is not captured unless a job has copied it.
            if self.objects.memory().load(local_side(q, w), off, kept, had) == Err(NeedsJob::Job) {
                kept = &mut [];
            }
        }
        self.tap_local(&flow, &head, kept, len);
        self.tap.iter_mut().for_each(|t| t.payload = std::mem::take(&mut payload));
    }

    /// Captures the packets that bytes `from` to `w.done` of request `w` of QP `h` would have been. The bytes have just
    /// been copied. These are packets of the request or of its answer, and at the end of the message its
    /// acknowledgment.
    pub(crate) fn tap_slice(&mut self, h: Handle<Qp>, w: &SendOp, from: u64) {
        let Some(q) = self.objects.qps.get(h).filter(|q| self.taps(q)) else { return };
        let (mtu, reliable, flow) = (u64::from(q.mtu), q.typ.is_reliable(), back(&self.flow(q)));
        let (packets, is_read) = (psn_count(w.total, q.mtu), w.op == WrOpcode::Read);
        let ends = w.done >= w.total;
        if is_read && from == 0 {
            self.tap_packet(h, w, 0, false);
        }
        for index in (from / mtu) as u32..if ends { packets } else { (w.done / mtu) as u32 } {
            self.tap_packet(h, w, index, is_read);
        }
        let Some(q) = self.objects.qps.get(h).filter(|_| reliable && ends && !is_read) else { return };
        let last = q.sq_psn.advance(packets - 1).get();
        let p = match w.op {
            WrOpcode::CmpSwap | WrOpcode::FetchAdd => {
                Packet { original: w.found.unwrap_or_default(), ..answer(q, Op::AtomicAck, last, syndrome::ACK) }
            }
            WrOpcode::AtomicWrite | WrOpcode::Flush => answer(q, Op::ReadResponse(Part::Only), last, syndrome::ACK),
            _ => answer(q, Op::Ack, last, syndrome::ACK),
        };
        self.tap_local(&flow, &p, &[], 0);
    }

    /// Captures the packet of request `w` of QP `h` that was refused, and the answer with syndrome `code`.
    pub(crate) fn tap_refused(&mut self, h: Handle<Qp>, w: &SendOp, code: u8) {
        let Some(q) = self.objects.qps.get(h).filter(|q| self.taps(q)) else { return };
        let index = if w.op == WrOpcode::Read { 0 } else { (w.done / u64::from(q.mtu)) as u32 };
        let p = answer(q, Op::Ack, q.sq_psn.advance(index).get(), code);
        let (reliable, flow) = (q.typ.is_reliable(), back(&self.flow(q)));
        self.tap_packet(h, w, index, false);
        if reliable {
            self.tap_local(&flow, &p, &[], 0);
        }
    }

    /// The virtual addresses that a connected QP uses.
    fn flow(&self, q: &Qp) -> Flow {
        let grh = q.attr.ah_attr.grh;
        Flow::roce(q.own.unwrap_or_default(), Gid(grh.dgid))
    }
}

/// The flow of the answers to a flow.
fn back(there: &Flow) -> Flow {
    Flow { src: there.dst, dst: there.src, ..*there }
}

/// An answer to QP `q`.
fn answer(q: &Qp, op: Op, psn: u32, code: u8) -> Packet<'static> {
    let mut p = Packet::new(Opcode { transport: transport_of(q.typ), op, extra: Extra::None }, q.qpn.0, psn);
    p.aeth = Aeth { syndrome: code, msn: 0 };
    p
}
