//! What a capture sees: packets of the network, and those that a message between two vRNICs of this host would have been.

use std::net::IpAddr;

use unirdma_formats::net::{ETH_BYTES, Flow, VXLAN_BYTES, vxlan};
use unirdma_formats::wire::{Aeth, Extra, ICRC_BYTES, MAX_HEADER_BYTES, Op, Opcode, Packet, Part, padding, syndrome};
use unirdma_formats::{Gid, WrOpcode, psn_count};

use crate::access::local_side;
use crate::capture::{Capture, Tap};
use crate::core::Core;
use crate::objects::{MAX_MTU, Qp, VnicId, Work, transport_of};
use crate::path::Path;
use crate::slab::Handle;
use crate::tx::ethernet;
use crate::wire::request_packet;

/// A packet with room for its ICRC.
fn bytes(p: &Packet<'_>, payload: &[u8]) -> Vec<u8> {
    let mut b = vec![0; MAX_HEADER_BYTES + payload.len() + 3 + ICRC_BYTES];
    let n = p.put(&mut b, payload.len());
    b[n..n + payload.len()].copy_from_slice(payload);
    b.truncate(n + payload.len() + padding(payload.len()) + ICRC_BYTES);
    b
}

impl Core {
    /// Captures packets from now on.
    pub fn start_capture(&mut self, what: Capture) {
        self.tap = Some(Box::new(Tap { what, records: Vec::new(), lost: 0 }));
    }

    /// Captures no more; how many packets were lost since the start.
    pub fn stop_capture(&mut self) -> u64 {
        self.tap.take().map_or(0, |t| t.lost)
    }

    /// The pcap records since this was asked last; empty if there are none.
    pub fn take_captured(&mut self) -> Vec<u8> {
        self.tap.as_mut().map_or_else(Vec::new, |t| std::mem::take(&mut t.records))
    }

    fn wants(&self, vnic: Option<VnicId>) -> bool {
        let wanted = |t: &Tap| t.what.vnic.is_none() || t.what.vnic == vnic;
        self.tap.as_ref().is_some_and(|t| wanted(t))
    }

    /// Captures the packet that a vRNIC has just put into [`crate::Tx`].
    pub(crate) fn tap_sent(&mut self, vnic: Option<VnicId>) {
        if !self.wants(vnic) {
            return;
        }
        let Some(&p) = self.net.tx.packets().last() else { return };
        let mut body = self.net.tx.bytes(&p).to_vec();
        if let Some(t) = &mut self.tap {
            let flow = t.outer_flow(&p.path, false, p.outer() > 0);
            t.packet(self.now, &flow, p.outer(), &mut body);
        }
    }

    /// Captures a packet that came from `path.to` for a vRNIC; `own` is this end if it is not the host's address.
    pub(crate) fn tap_received(&mut self, vnic: Option<VnicId>, path: Path, body: &[u8]) {
        if !self.wants(vnic) {
            return;
        }
        let mut body = [body, &[0; ICRC_BYTES]].concat();
        if let Some(t) = &mut self.tap {
            let flow = t.outer_flow(&path, true, false);
            t.packet(self.now, &flow, 0, &mut body);
        }
    }

    /// Captures a datagram that came from host `from` inside VXLAN.
    pub(crate) fn tap_encapsulated(
        &mut self,
        vnic: Option<VnicId>,
        from: IpAddr,
        vni: u32,
        flow: &Flow,
        packet: &[u8],
    ) {
        if !self.wants(vnic) {
            return;
        }
        let mut body = [&vxlan(vni)[..], &ethernet(flow), packet].concat();
        if let Some(t) = &mut self.tap {
            let outer = t.outer_flow(&Path::new(from), true, true);
            t.packet(self.now, &outer, VXLAN_BYTES + ETH_BYTES + flow.header_bytes(), &mut body);
        }
    }

    /// Captures a datagram between two vRNICs of this host.
    pub(crate) fn tap_datagram(
        &mut self,
        h: Handle<Qp>,
        to: Option<VnicId>,
        flow: &Flow,
        p: &Packet<'_>,
        payload: &[u8],
    ) {
        if self.tap.is_some() && (self.wants(self.objects.vnic_of_qp(h)) || self.wants(to)) {
            self.tap_local(flow, p, payload);
        }
    }

    /// Captures a MAD between two vRNICs of this host.
    pub(crate) fn tap_mad(&mut self, from: VnicId, to: VnicId, flow: &Flow, p: &Packet<'_>, mad: &[u8]) {
        if self.tap.is_some() && (self.wants(Some(from)) || self.wants(Some(to))) {
            self.tap_local(flow, p, mad);
        }
    }

    fn tap_local(&mut self, flow: &Flow, p: &Packet<'_>, payload: &[u8]) {
        if let Some(t) = &mut self.tap {
            t.packet(self.now, flow, 0, &mut bytes(p, payload));
        }
    }

    /// Captures the packets that request `w` of QP `h` would have been, with those of its answer, which `code` is the
    /// syndrome of.
    pub(crate) fn tap_request(&mut self, h: Handle<Qp>, w: &Work, code: u8) {
        let Some(q) = self.objects.qps.get(h).filter(|_| self.tap.is_some()) else { return };
        if !self.wants(Some(q.vnic)) && !self.wants(q.local().map(|l| l.vnic)) {
            return;
        }
        let op = w.op;
        let there = self.flow(q);
        let back = Flow { src: there.dst, dst: there.src, ..there };
        let (own, mtu, first) = (q.qpn.0, q.mtu, q.sq_psn);
        let transport = transport_of(q.typ);
        let (reliable, failed) = (q.typ.is_reliable(), code != syndrome::ACK);
        let packets = psn_count(w.total, mtu);
        let mut buffer = [0; MAX_MTU as usize];
        let sent = match op {
            // Of what was refused, the first packet tells enough.
            _ if failed => 1,
            WrOpcode::Read => 1,
            _ => packets,
        };
        for index in 0..sent {
            let Some(q) = self.objects.qps.get(h) else { return };
            let span = if op == WrOpcode::Read { packets } else { 1 };
            let (mut head, len) = request_packet(q, w, first.advance(index), index, packets, span);
            head.ack_req = reliable && index + 1 == sent;
            let tables = self.objects.memory();
            let off = u64::from(index) * u64::from(mtu);
            let _ = tables.load(local_side(q, w), off, &mut buffer[..len]);
            self.tap_local(&there, &head, &buffer[..len]);
        }
        if !reliable {
            return;
        }
        let answer = |op: Op, psn: u32, code: u8| {
            let opcode = Opcode { transport, op, extra: Extra::None };
            let mut p = Packet::new(opcode, own, psn);
            p.aeth = Aeth { syndrome: code, msn: 0 };
            p
        };
        if failed {
            return self.tap_local(&back, &answer(Op::Ack, first.get(), code), &[]);
        }
        match op {
            WrOpcode::Read => {
                for index in 0..packets {
                    let Some(q) = self.objects.qps.get(h) else { return };
                    let off = u64::from(index) * u64::from(mtu);
                    let len = (w.total - off.min(w.total)).min(mtu.into()) as usize;
                    let tables = self.objects.memory();
                    let _ = tables.load(local_side(q, w), off, &mut buffer[..len]);
                    let part = Part::of(index == 0, index + 1 == packets);
                    let p = answer(Op::ReadResponse(part), first.advance(index).get(), code);
                    self.tap_local(&back, &p, &buffer[..len]);
                }
            }
            WrOpcode::CmpSwap | WrOpcode::FetchAdd => {
                let Some(q) = self.objects.qps.get(h) else { return };
                let mut found = [0; 8];
                let tables = self.objects.memory();
                let _ = tables.load(local_side(q, w), 0, &mut found);
                let p = Packet { original: u64::from_ne_bytes(found), ..answer(Op::AtomicAck, first.get(), code) };
                self.tap_local(&back, &p, &[]);
            }
            WrOpcode::AtomicWrite | WrOpcode::Flush => {
                self.tap_local(&back, &answer(Op::ReadResponse(Part::Only), first.get(), code), &[]);
            }
            _ => self.tap_local(&back, &answer(Op::Ack, first.advance(packets - 1).get(), code), &[]),
        }
    }

    /// The virtual addresses that a connected QP uses.
    fn flow(&self, q: &Qp) -> Flow {
        let grh = q.attr.ah_attr.grh;
        Flow::roce(q.own.unwrap_or_default(), Gid(grh.dgid))
    }
}
