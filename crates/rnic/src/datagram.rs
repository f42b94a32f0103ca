//! Unreliable datagrams: address handles, sending, and delivery from this host and from others (IBTA vol. 1, 9.8).
//!
//! A datagram names its destination by an address handle, which is resolved once, when it is created. To a plain RoCEv2
//! device it goes as it is. To another virtual layer it goes as a whole packet, with the virtual addresses in its IP
//! header, inside VXLAN: nothing else in a datagram says which vRNIC of a host it comes from.

use std::collections::VecDeque;
use std::net::IpAddr;

use unirdma_abi as abi;
use unirdma_abi::Status;
use unirdma_formats::cm::{GSI_QPN, Mad, Message};
use unirdma_formats::net::{ETH_BYTES, Flow, GRH_BYTES, HOP_LIMIT, source_port};
use unirdma_formats::wire::{Deth, Extra, ICRC_BYTES, Op, Opcode, Packet, Part, ROCE_PORT, Transport, icrc};
use unirdma_formats::{Gid, QpType, WcStatus, WrOpcode, send_flags};

use crate::access::{Tables, local_side, recv_side};
use crate::exec::Outcome;
use crate::objects::{Pd, Qp, SessionId, VnicId, Wait, Work};
use crate::rnic::Rnic;
use crate::slab::Handle;
use crate::wire::{ACK_DELAY_NS, Arrival, DSCP, Path};
use crate::wqe::{NoRecv, RecvDone};

/// MAC address, both ways, of the frames that carry datagrams between virtual layers. No vRNIC has it.
pub const DATAGRAM_MAC: [u8; 6] = *b"\x06RoCEv";

/// An address handle.
pub(crate) struct Ah {
    pub pd: Handle<Pd>,
    flow: Flow,
    target: Target,
    /// What is sent with it leaves.
    pub linked: bool,
}

impl Ah {
    /// The address that it sends from.
    pub fn own(&self) -> Gid {
        Gid::from_ip(self.flow.src)
    }
}

#[derive(Clone, Copy)]
enum Target {
    /// A vRNIC of this host.
    Here(VnicId),
    /// A plain RoCEv2 device.
    Foreign(Path),
    /// A vRNIC of another host: the host, and its group's VXLAN network identifier.
    There(Path, u32),
    /// The members of a multicast group.
    Many,
}

/// A Q_Key with this bit stands for the QP's own (IBTA vol. 1, 10.2.5).
const OWN_QKEY: u32 = 1 << 31;

/// Datagrams that found no receive wait this long for one, ns: a program that shares its processor with others may not
/// have had its turn yet. It is as if the network had been slower.
const HOLD_NS: u64 = 10_000_000;
/// Most bytes that wait so at one QP.
const HOLD_BYTES: usize = 1 << 20;

/// Datagrams that wait a moment for a receive.
#[derive(Default)]
pub(crate) struct Backlog {
    held: VecDeque<Held>,
    bytes: usize,
    /// Its QP stands among those that want a turn in a moment.
    listed: bool,
}

struct Held {
    until: u64,
    flow: Flow,
    data: Box<[u8]>,
    note: Note,
}

impl Backlog {
    pub fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    /// Its QP has its turn.
    pub fn has_turn(&mut self) {
        self.listed = false;
    }
}

/// What a datagram says beside its bytes.
#[derive(Clone, Copy)]
pub(crate) struct Note {
    imm: Option<u32>,
    src_qp: u32,
    solicited: bool,
}

impl Note {
    pub fn of(p: &Packet<'_>) -> Self {
        let imm = (p.opcode.extra == Extra::Imm).then_some(p.extra);
        Note { imm, src_qp: p.deth.src_qp, solicited: p.solicited }
    }
}

impl Rnic {
    /// CREATE_AH: the destination is looked up here, once.
    ///
    /// # Errors
    /// `BadValue` for an address vector that is not global or names no own GID, `Unreachable`, `Exhausted`.
    pub fn create_ah(&mut self, s: SessionId, pd: u32, a: &abi::AhAttr) -> Result<u32, Status> {
        let pd = self.own_pd(s, pd)?;
        self.quota(s, |u| u.ahs, |l| l.max_ah)?;
        let vnic = self.vnic_of(s)?;
        let v = self.vnics.get(vnic.0).ok_or(Status::BadHandle)?;
        let own = v.gid(a.grh.sgid_index).filter(|_| a.is_global != 0 && a.port_num == 1);
        let linked = v.is_linked(own);
        let (own, dgid) = (own.ok_or(Status::BadValue)?, Gid(a.grh.dgid));
        let target = match (self.find_vnic(v.group, dgid), self.routes.get(&(v.group, dgid))) {
            _ if dgid.ip().is_multicast() => Target::Many,
            (Some(id), _) => Target::Here(id),
            (None, Some(r)) => {
                let path = self.route(vnic, a.grh.sgid_index, dgid).ok_or(Status::Unreachable)?;
                let port = source_port(a.grh.flow_label, own.low_bits(), dgid.low_bits());
                // `linked` says whether there is a link.
                let path = Path { port, class: a.grh.traffic_class & DSCP, cut: false, ..path };
                if r.foreign { Target::Foreign(path) } else { Target::There(path, r.vni) }
            }
            (None, None) => return Err(Status::Unreachable),
        };
        let hop_limit = if a.grh.hop_limit == 0 { HOP_LIMIT } else { a.grh.hop_limit };
        let flow = Flow { traffic_class: a.grh.traffic_class, hop_limit, ..Flow::roce(own, dgid) };
        let number = self.new_number(s)?;
        let h = self.ahs.insert(Ah { pd, flow, target, linked }).ok_or(Status::Exhausted)?;
        self.names(s).and_then(|n| n.ahs.insert(number, h));
        self.count_used(s, |u| u.ahs += 1);
        self.use_pd(pd, true);
        Ok(number)
    }

    /// DESTROY_AH. Datagrams that were posted with it and not sent yet fail: ask [`Rnic::is_behind`] before.
    ///
    /// # Errors
    /// `BadHandle` if the session has no such AH.
    pub fn destroy_ah(&mut self, s: SessionId, ah: u32) -> Result<(), Status> {
        let h = self.own_ah(s, ah)?;
        self.names(s).and_then(|n| n.ahs.remove(&ah));
        self.remove_ah(s, h);
        Ok(())
    }

    pub(crate) fn remove_ah(&mut self, s: SessionId, h: Handle<Ah>) {
        let Some(ah) = self.ahs.remove(h) else { return };
        self.count_used(s, |u| u.ahs -= 1);
        self.use_pd(ah.pd, false);
    }

    /// Sends the datagram of a checked WQE.
    pub(crate) fn send_datagram(&mut self, h: Handle<Qp>, w: &mut Work) -> Outcome {
        let Some(q) = self.qps.get(h) else { return Outcome::Failed(WcStatus::FatalErr) };
        let Some(op) = WrOpcode::from_raw(w.wqe.opcode.into()) else { return Outcome::Failed(WcStatus::LocQpOpErr) };
        if w.total > u64::from(self.wire_mtu) {
            return Outcome::Failed(WcStatus::LocLenErr);
        }
        if let Err(status) = self.check_local(q, w, op) {
            return Outcome::Failed(status);
        }
        let ah = self.own_ah(q.owner, w.wqe.ah).ok().and_then(|ah| self.ahs.get(ah)).filter(|a| a.pd == q.pd);
        let Some(&Ah { flow, target, linked, .. }) = ah else { return Outcome::Failed(WcStatus::LocQpOpErr) };
        let len = w.total as usize;
        let (src_qp, psn) = (q.qpn, q.sq_psn);
        let qkey = if w.wqe.qkey & OWN_QKEY != 0 { q.attr.qkey } else { w.wqe.qkey };
        let solicited = w.wqe.send_flags & send_flags::SOLICITED != 0;
        let extra = if op.has_imm() { Extra::Imm } else { Extra::None };
        let opcode = Opcode { transport: Transport::Ud, op: Op::Send(Part::Only), extra };
        let mut head = Packet::new(opcode, w.wqe.dest_qpn, psn.get());
        (head.extra, head.solicited) = (w.wqe.imm, solicited);
        head.deth = Deth { qkey, src_qp };
        let tables = Tables { mrs: &self.mrs, sessions: &self.sessions };
        let local = local_side(q, w, op);
        let sent = match target {
            _ if !linked => {
                self.count(h, |c| c.wire.send_err += 1);
                Ok(())
            }
            Target::Many if self.tx.is_full() => {
                self.wait_for_tx(h);
                return Outcome::Waits;
            }
            Target::Here(_) | Target::Many => {
                let mut buffer = std::mem::take(&mut self.datagram);
                let data = &mut buffer[..len];
                let mut sent = tables.load(local, 0, data);
                if sent.is_ok() {
                    if let Target::Here(vnic) = target {
                        self.tap_datagram(h, Some(vnic), &flow, &head, data);
                        self.deliver_here(vnic, w.wqe.dest_qpn, qkey, &flow, data, Note::of(&head));
                    } else {
                        sent = self.send_multicast(h, &flow, &head, data);
                    }
                }
                self.datagram = buffer;
                sent
            }
            Target::Foreign(path) | Target::There(path, _) => {
                if self.tx.is_full() {
                    self.wait_for_tx(h);
                    return Outcome::Waits;
                }
                let inside = if let Target::There(_, vni) = target { Some((vni, flow)) } else { None };
                let sent = self.tx.push_datagram(path, inside, &head, len, |to| tables.load(local, 0, to));
                if sent.is_ok() {
                    self.note_sent(h, &path);
                }
                sent
            }
        };
        match sent {
            Ok(()) => {}
            Err(fault) if fault.passes() && self.waits_for_memory(h, w) => return Outcome::Waits,
            Err(_) => return Outcome::Failed(WcStatus::LocProtErr),
        }
        if let Some(q) = self.qps.get_mut(h) {
            q.sq_psn = q.sq_psn.advance(1);
        }
        w.done = w.total;
        Outcome::Done
    }

    fn deliver_here(&mut self, vnic: VnicId, qpn: u32, qkey: u32, flow: &Flow, data: &[u8], note: Note) {
        let found = self.qpns.get(&qpn).copied();
        let of_vnic = |h: &Handle<Qp>| self.qps.get(*h).is_some_and(|q| q.vnic == vnic && q.typ == QpType::Ud);
        if let Some(h) = found.filter(of_vnic) {
            self.accept(h, qkey, flow, data, note);
        }
    }

    /// Puts a datagram into a receive of UD QP `h`, if it takes it.
    pub(crate) fn accept(&mut self, h: Handle<Qp>, qkey: u32, flow: &Flow, data: &[u8], note: Note) {
        let Some(q) = self.qps.get_mut(h) else { return };
        if !q.receives() {
            return self.count_dropped(h);
        }
        if qkey != q.attr.qkey {
            return self.count(h, |c| c.qkey_violations += 1);
        }
        if !q.backlog.is_empty() {
            self.drain_backlog(h);
        }
        let Some(q) = self.qps.get_mut(h) else { return };
        if !q.backlog.is_empty() {
            return self.hold(h, flow, data, note);
        }
        match self.take_recv(h) {
            Ok(()) => {
                if !self.put(h, flow, data, note) {
                    self.hold(h, flow, data, note);
                }
            }
            Err(NoRecv::Broken) => self.break_qp(h),
            Err(NoRecv::Empty) => self.hold(h, flow, data, note),
        }
    }

    /// Keeps a datagram, on the heap, until there is a receive for it, and the receive's memory can be reached.
    fn hold(&mut self, h: Handle<Qp>, flow: &Flow, data: &[u8], note: Note) {
        self.starved = true;
        let until = self.now.saturating_add(HOLD_NS);
        let Some(q) = self.qps.get_mut(h) else { return };
        let size = data.len() + size_of::<Held>();
        if q.backlog.bytes + size > HOLD_BYTES {
            return self.count_dropped(h);
        }
        q.backlog.bytes += size;
        q.backlog.held.push_back(Held { until, flow: *flow, data: data.into(), note });
        if q.srq.is_some() {
            return self.look_again(h);
        }
        // From now on the driver rings for receives; one that came before is seen by the QP's turn.
        q.rings.set_rq_notify(true);
        self.make_runnable(h);
    }

    /// Gives QP `h` a turn in a moment.
    fn look_again(&mut self, h: Handle<Qp>) {
        let soon = self.now.saturating_add(ACK_DELAY_NS);
        if self.qps.get_mut(h).is_some_and(|q| !std::mem::replace(&mut q.backlog.listed, true)) {
            self.sched.soon(soon, h);
        }
    }

    /// Delivers the datagrams that wait, as far as there are receives, and drops those that waited too long.
    pub(crate) fn drain_backlog(&mut self, h: Handle<Qp>) {
        loop {
            let now = self.now;
            let Some(q) = self.qps.get_mut(h) else { return };
            let Some(first) = q.backlog.held.front() else {
                q.rings.set_rq_notify(false);
                return;
            };
            let (expired, size) = (first.until < now, first.data.len() + size_of::<Held>());
            let shared = q.srq.is_some();
            match self.take_recv(h) {
                Err(NoRecv::Broken) => return self.break_qp(h),
                // Nobody rings for the receives of an SRQ.
                Err(NoRecv::Empty) if !expired && shared => return self.look_again(h),
                Err(NoRecv::Empty) if !expired => return,
                r => {
                    let Some(q) = self.qps.get_mut(h) else { return };
                    let Some(d) = q.backlog.held.pop_front() else { return };
                    q.backlog.bytes -= size;
                    if r.is_err() || expired {
                        self.count_dropped(h);
                    } else if !self.put(h, &d.flow, &d.data, d.note) {
                        let Some(q) = self.qps.get_mut(h) else { return };
                        q.backlog.bytes += size;
                        q.backlog.held.push_front(d);
                        return self.look_again(h);
                    }
                }
            }
        }
    }

    /// Puts a datagram into the receive that QP `h` has taken; false if the receive's memory moves, and then it is still
    /// taken.
    fn put(&mut self, h: Handle<Qp>, flow: &Flow, data: &[u8], note: Note) -> bool {
        let Some(q) = self.qps.get(h) else { return true };
        let Some(r) = &q.recv else { return true };
        let total = (GRH_BYTES + data.len()) as u64;
        if r.valid && total > r.total {
            self.count_dropped(h);
            return true;
        }
        if r.valid {
            let _ = self.stage_receive(h, total);
        }
        let Some((q, r)) = self.qps.get(h).and_then(|q| Some((q, q.recv.as_ref()?))) else { return true };
        let tables = Tables { mrs: &self.mrs, sessions: &self.sessions };
        let to = recv_side(q, r);
        let put = |at: usize, bytes: &[u8]| tables.store(to, at as u64, bytes);
        let status = if !r.valid {
            WcStatus::LocQpOpErr
        } else {
            match put(0, &flow.grh(data.len())).and_then(|()| put(GRH_BYTES, data)) {
                Ok(()) => WcStatus::Success,
                Err(fault) if fault.passes() => return false,
                Err(_) => WcStatus::LocProtErr,
            }
        };
        let Note { imm, src_qp, solicited } = note;
        // Programs tell the two headers apart by the service level, as ConnectX sets it.
        let grh = Some(if flow.src.is_ipv4() { 0xa } else { 0x9 });
        self.establish(h);
        self.finish_recv(
            h,
            RecvDone { status, write: false, imm, invalidated: None, byte_len: total, src_qp, solicited, grh },
        );
        if status != WcStatus::Success {
            self.fail_qp(h, None);
        }
        true
    }

    /// A datagram packet for UD QP `h`, from the vRNIC or device that `flow` names.
    pub(crate) fn on_datagram(&mut self, h: Handle<Qp>, flow: &Flow, p: &Packet<'_>) {
        if p.opcode.transport != Transport::Ud {
            self.drops.bad_state += 1;
            return;
        }
        self.count(h, |c| c.wire.rcvd_pkts += 1);
        self.accept(h, p.deth.qkey, flow, p.payload, Note::of(p));
        self.make_runnable(h);
    }

    /// A plain packet came in for UD QP `h`: only plain devices send those, from the address of their GID.
    pub(crate) fn on_foreign_datagram(&mut self, h: Handle<Qp>, a: &Arrival, p: &Packet<'_>, body: &[u8]) {
        let Some(v) = self.qps.get(h).and_then(|q| self.vnics.get(q.vnic.0)) else { return };
        let src = Gid::from_ip(a.from);
        let known = self.routes.get(&(v.group, src)).is_some_and(|r| r.foreign && r.host == a.from);
        let own = v.first(a.from.is_ipv4());
        match own.filter(|_| known) {
            Some(own) => {
                let path = Path { from: Some(own.ip()), port: a.port, ..Path::new(a.from) };
                self.tap_received(self.vnic_id(h), path, body);
                self.on_datagram(h, &Flow::roce(src, own), p);
            }
            None => self.drops.wrong_source += 1,
        }
    }

    /// A plain packet came in for QP 1 of some vRNIC.
    pub(crate) fn on_foreign_mad(&mut self, a: &Arrival, p: &Packet<'_>, body: &[u8]) {
        let Some((vnic, own)) = self.mad_target(a.from, p.payload) else {
            // What speaks of a connection that is gone is no stranger's: such messages come late and twice.
            let reason = match Mad::parse(p.payload).map(|m| m.message) {
                None => &mut self.drops.malformed,
                Some(Message::Req(_) | Message::SidrReq { .. }) => &mut self.drops.wrong_source,
                Some(_) => &mut self.drops.no_qp,
            };
            *reason += 1;
            return;
        };
        let path = Path { from: Some(own.ip()), port: a.port, ..Path::new(a.from) };
        self.tap_received(Some(vnic), path, body);
        self.handle_mad(vnic, own, Gid::from_ip(a.from), p);
    }

    /// The IP packet of a datagram that host `from` sent to `group` inside VXLAN came in.
    pub fn handle_encapsulated(&mut self, now: u64, from: IpAddr, group: u32, packet: &[u8]) {
        self.now = self.now.max(now);
        let Some((flow, udp)) = Flow::parse(packet).filter(|(f, _)| f.dst_port == ROCE_PORT) else {
            self.drops.malformed += 1;
            return;
        };
        let e = flow.envelope();
        let Some((body, _)) =
            udp.split_last_chunk::<ICRC_BYTES>().filter(|(b, crc)| icrc(&e, b).to_le_bytes() == **crc)
        else {
            self.drops.bad_icrc += 1;
            return;
        };
        let Some(p) = self.parse(body) else { return };
        let (src, dst) = (Gid::from_ip(flow.src), Gid::from_ip(flow.dst));
        let Some(route) = self.routes.get(&(group, src)).copied().filter(|r| !r.foreign && r.host == from) else {
            self.drops.wrong_source += 1;
            return;
        };
        if flow.dst.is_multicast() {
            self.tap_encapsulated(None, from, route.vni, &flow, packet);
            return self.deliver_multicast(group, &flow, &p, p.payload);
        }
        let Some(vnic) = self.find_vnic(group, dst) else {
            self.drops.wrong_source += 1;
            return;
        };
        if p.dest_qp == GSI_QPN {
            self.tap_encapsulated(Some(vnic), from, route.vni, &flow, packet);
            return self.handle_mad(vnic, dst, src, &p);
        }
        let Some(h) = self.find_qp(&p) else { return };
        if !self.qps.get(h).is_some_and(|q| q.typ == QpType::Ud && q.vnic == vnic) {
            self.drops.wrong_source += 1;
            return;
        }
        self.tap_encapsulated(Some(vnic), from, route.vni, &flow, packet);
        self.on_datagram(h, &flow, &p);
    }

    /// True if datagrams have found no receive since this was asked last: whoever takes packets from the network should
    /// let programs have their turn.
    pub fn take_starved(&mut self) -> bool {
        std::mem::take(&mut self.starved)
    }

    /// Until there is room in [`crate::Tx`] again, QP `h` has nothing to do.
    fn wait_for_tx(&mut self, h: Handle<Qp>) {
        if let Some(q) = self.qps.get_mut(h) {
            q.wait = Wait::Tx;
            self.tx_waiting.push_back(h);
        }
    }
}

/// The Ethernet header of a datagram between virtual layers.
pub(crate) fn ethernet(flow: &Flow) -> [u8; ETH_BYTES] {
    let mut b = [0; ETH_BYTES];
    b[..6].copy_from_slice(&DATAGRAM_MAC);
    b[6..12].copy_from_slice(&DATAGRAM_MAC);
    b[12..].copy_from_slice(&flow.ether_type().to_be_bytes());
    b
}
