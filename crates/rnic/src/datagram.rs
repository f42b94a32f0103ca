//! Unreliable datagrams: sending, and delivery from this host and from others (IBTA vol. 1, 9.8).
//!
//! A datagram names its destination by an address handle, which is resolved once, when it is created. A datagram to a
//! plain RoCEv2 device is sent as it is. A datagram to another virtual layer is sent inside VXLAN, as a whole packet
//! with the virtual addresses in its IP header, because nothing else in a datagram says which vRNIC of a host has sent
//! it.

use std::ops::Range;

use unirdma_formats::cm::{GSI_QKEY, GSI_QPN, MAD_BYTES};
use unirdma_formats::net::{Flow, GRH_BYTES};
use unirdma_formats::wire::{Deth, Extra, Op, Opcode, Packet, Part, Transport};
use unirdma_formats::{Gid, QpState, QpType, Qpn, WcStatus, class_of, rate_kbps, send_flags};
use unirdma_mem::Fault;

use crate::access::{NeedsJob, local_side, recv_side};
use crate::core::Core;
use crate::exec::{NoRecv, Outcome, RecvDone};
use crate::job::JobResult;
use crate::objects::{Ah, Datagrams, Held, Note, Pause, Placing, Qp, SendOp, Target, VrnicId, Wait};
use crate::path::{Arrival, Path};
use crate::sched::{Due, MOMENT_NS};
use crate::slab::Handle;

/// A Q_Key with this bit stands for the QP's own (IBTA vol. 1, 10.2.5).
const OWN_QKEY: u32 = 1 << 31;

/// Time that a datagram without a receive waits for one, ns. A program that shares its core with others may not have
/// run yet. To the sender this looks like a slower network.
const HOLD_NS: u64 = 10_000_000;
/// Most MADs that wait for connection management, which takes them after each round.
const MAX_MADS: usize = 1024;
/// Members of a multicast group that get a datagram of this host in one turn. Other work follows before the next ones.
const MEMBERS_AT_ONCE: u32 = 2;
/// Most bytes of datagrams that wait at one QP. The QP may also take at most half of the room that the other QPs of its
/// vRNIC leave.
const HOLD_BYTES: usize = 1 << 20;
/// Most waiting datagrams that are delivered or dropped at a time. Other work follows before the next ones.
const DRAINED_AT_ONCE: usize = 16;
/// A driver rings no doorbell for the receives of an SRQ, nor when memory has moved. So a QP that waits for either
/// tries again after this part of the time that its first datagram has waited,
const LOOK_AGAIN_PART: u64 = 4;
/// but after this time at the latest, ns.
const LOOK_AGAIN_NS: u64 = 50_000;

impl Core {
    /// Sends the datagram of a checked WQE.
    pub(crate) fn send_datagram(&mut self, h: Handle<Qp>, w: &mut SendOp) -> Outcome {
        let Some(q) = self.objects.qps.get(h) else { return Outcome::Failed(WcStatus::FatalErr) };
        let op = w.op;
        if w.total > u64::from(self.net.wire_mtu) {
            return Outcome::Failed(WcStatus::LocLenErr);
        }
        if let Err(status) = self.check_local(q, w) {
            return Outcome::Failed(status);
        }
        let Some((flow, target, linked, kbps)) = self.address_of(q, w) else {
            return Outcome::Failed(WcStatus::LocQpOpErr);
        };
        let len = w.total as usize;
        let (src_qp, psn) = (q.source(), q.sq_psn);
        let qkey = if w.wqe.qkey & OWN_QKEY != 0 { q.attr.qkey } else { w.wqe.qkey };
        let solicited = w.wqe.send_flags & send_flags::SOLICITED != 0;
        let extra = if op.has_imm() { Extra::Imm } else { Extra::None };
        let opcode = Opcode { transport: Transport::Ud, op: Op::Send(Part::Only), extra };
        let mut head = Packet::new(opcode, w.wqe.dest_qpn, psn.get());
        (head.extra, head.solicited) = (w.wqe.imm, solicited);
        head.deth = Deth { qkey, src_qp };
        let (tables, number) = (self.objects.memory(), q.sq_cons);
        let local = local_side(q, w);
        let had = q.datagrams().map_or(&[][..], |d| d.fetched.bytes(number, 0));
        let mut more = false;
        let sent = match target {
            _ if !linked => {
                self.objects.count(h, |c| c.wire.send_err += 1);
                Ok(())
            }
            Target::Many if w.served == 0 && self.net.tx.is_full() => {
                self.wait_for_tx(h, w);
                return Outcome::Waits;
            }
            Target::Here(_) | Target::Many => {
                let mut buffer = std::mem::take(&mut self.datagram);
                let data = &mut buffer[..len];
                let sent = tables.load(local, 0, data, had);
                if sent.is_ok() {
                    if let Target::Here(vrnic) = target {
                        self.tap_datagram(h, Some(vrnic), &flow, &head, data);
                        self.deliver_here(vrnic, Qpn(w.wqe.dest_qpn), qkey, &flow, data, Note::of(&head));
                    } else {
                        more = self.send_multicast(h, &flow, &head, data, &mut w.served);
                    }
                }
                self.datagram = buffer;
                sent
            }
            Target::Foreign(path) | Target::There(path, _) => {
                if self.net.tx.is_full() {
                    self.wait_for_tx(h, w);
                    return Outcome::Waits;
                }
                let inside = if let Target::There(_, vni) = target { Some((vni, flow)) } else { None };
                let sent = self.net.tx.push_datagram(path, inside, &head, len, |to| tables.load(local, 0, to, had));
                if sent.is_ok() {
                    self.note_sent(h, &path);
                }
                sent
            }
        };
        let fault = match sent {
            Ok(()) => None,
            Err(NeedsJob::Fault(fault)) => Some(fault),
            Err(NeedsJob::Job) => match self.fetch_datagram(h, w) {
                Ok(outcome) => return outcome,
                Err(fault) => Some(fault),
            },
        };
        match fault {
            None => {}
            Some(fault) if fault.passes() && self.waits_for_memory(h, w) => return Outcome::Waits,
            Some(_) => return Outcome::Failed(WcStatus::LocProtErr),
        }
        if more {
            w.started = true;
            return Outcome::Progress;
        }
        if let Some(d) = self.objects.qps.get_mut(h).and_then(Qp::datagrams_mut)
            && !d.fetched.is_empty()
        {
            self.jobs.keep_buffer(d.fetched.clear());
        }
        if let Some(q) = self.objects.qps.get_mut(h) {
            q.sq_psn = q.sq_psn.advance(1);
            q.pace.path_kbps = kbps;
        }
        w.done = w.total;
        if matches!(target, Target::Foreign(_) | Target::There(..)) {
            self.objects.count(h, |c| {
                c.wire.sent_wrs += 1;
                c.wire.sent_bytes += w.total;
            });
        }
        Outcome::Done
    }

    /// Resolves the destination and the rate of the datagram of a WQE, from its address handle, or from the address in
    /// the WQE itself. The latter is for drivers that cannot create a handle where they learn the address; it is
    /// resolved for each datagram.
    fn address_of(&self, q: &Qp, w: &SendOp) -> Option<(Flow, Target, bool, u32)> {
        if w.wqe.send_flags & send_flags::ADDRESS != 0 {
            // A guest's connection management keeps running when one of its peers is gone. Its datagrams to that peer
            // are lost.
            let to = w.wqe.address();
            let (flow, target, linked) = self.resolve_address(q.vrnic, &to, !q.gsi).ok()?;
            let kbps = rate_kbps(to.static_rate)?;
            let to = Gid::from_ip(flow.dst);
            let allowed = matches!(target, Target::Many) || self.may_send_to(q.vrnic, to, target.across());
            return Some((flow, target, linked && allowed, kbps));
        }
        let ah = self.objects.own_ah(q.owner, w.wqe.ah).ok()?;
        let &Ah { pd, flow, target, linked, static_rate, .. } = self.objects.ahs.get(ah)?;
        (pd == q.pd).then_some((flow, target, linked, rate_kbps(static_rate)?))
    }

    /// Makes a job that fetches the data of a datagram from the private memory of a process.
    ///
    /// # Errors
    /// The fault if no job can be made.
    fn fetch_datagram(&mut self, h: Handle<Qp>, w: &mut SendOp) -> Result<Outcome, Fault> {
        let Some(d) = self.objects.qps.get_mut(h).and_then(Qp::datagrams_mut) else { return Err(Fault::Source) };
        let mut fetched = std::mem::take(&mut d.fetched);
        let Some(q) = self.objects.qps.get(h) else { return Err(Fault::Source) };
        let (from, to) = ((local_side(q, w), q.memory, q.vrnic), (&mut fetched, &self.objects.room(q.vrnic)));
        let made = self.jobs.fetch(&self.objects.memory(), h, from, (q.sq_cons, 0, w.total), to);
        if let Some(d) = self.objects.qps.get_mut(h).and_then(Qp::datagrams_mut) {
            d.fetched = fetched;
        }
        match made {
            JobResult::Job(number) => {
                w.wait = Wait::Job(number);
                Ok(Outcome::Copies)
            }
            JobResult::Full => Ok(self.waits_for_room(h, w)),
            JobResult::Slow => Err(Fault::SourceMoves),
            JobResult::Nothing(fault) => Err(fault),
        }
    }

    fn deliver_here(&mut self, vrnic: VrnicId, qpn: Qpn, qkey: u32, flow: &Flow, data: &[u8], note: Note) {
        if qpn.0 == GSI_QPN {
            return self.deliver_mad(vrnic, qkey, flow, data, note);
        }
        if !self.allows_rx(vrnic, Gid::from_ip(flow.src), None) {
            return;
        }
        let found = self.objects.qpns.get(&qpn).copied();
        let of_vrnic =
            |h: &Handle<Qp>| self.objects.qps.get(*h).is_some_and(|q| q.vrnic == vrnic && q.typ == QpType::Ud);
        if let Some(h) = found.filter(of_vrnic) {
            self.accept(h, qkey, flow, data, note);
        }
    }

    /// Delivers a MAD on this host: to the vRNIC's own QP 1, or to connection management. No QP of a program has number
    /// 1, so a MAD from another QPN is dropped.
    pub(crate) fn deliver_mad(&mut self, vrnic: VrnicId, qkey: u32, flow: &Flow, data: &[u8], note: Note) {
        if note.src_qp != GSI_QPN || qkey != GSI_QKEY {
            self.net.drops.bad_state += 1;
            return;
        }
        if !self.may_hear_mad(vrnic, Gid::from_ip(flow.src), None, data) {
            return;
        }
        if let Some(h) = self.objects.gsi_of(vrnic) {
            return self.accept(h, qkey, flow, data, note);
        }
        let Ok(mad) = <[u8; MAD_BYTES]>::try_from(data) else {
            self.net.drops.malformed += 1;
            return;
        };
        if self.mads.len() < MAX_MADS {
            self.mads.push_back((vrnic, Gid::from_ip(flow.dst), Gid::from_ip(flow.src), Box::new(mad)));
        }
    }

    /// Delivers a datagram to UD QP `h` if the QP accepts it: into a receive, or into the QP's backlog.
    pub(crate) fn accept(&mut self, h: Handle<Qp>, qkey: u32, flow: &Flow, data: &[u8], note: Note) {
        if self.objects.qps.get(h).is_some_and(Qp::has_backlog) {
            // A receive that fails takes the QP to ERR, where it receives no more.
            self.drain_backlog(h);
        }
        let Some(q) = self.objects.qps.get(h) else { return };
        if !q.receives() {
            return self.objects.count_dropped(h);
        }
        if qkey != q.attr.qkey {
            return self.objects.count(h, |c| c.qkey_violations += 1);
        }
        if self.objects.qps.get(h).is_some_and(Qp::has_backlog) {
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

    /// Keeps a copy of a datagram until there is a receive for it whose memory can be reached. The memory is charged to
    /// the receiver's vRNIC, which may use only a part of its room for that; without room the datagram is dropped. So a
    /// sender can use up nothing else of the receiver.
    fn hold(&mut self, h: Handle<Qp>, flow: &Flow, data: &[u8], note: Note) {
        let until = self.now.saturating_add(HOLD_NS);
        let Some(q) = self.objects.qps.get_mut(h) else { return };
        let (vrnic, shared) = (q.vrnic, q.srq.is_some());
        let (Some(v), Some(Datagrams { backlog, .. })) = (self.objects.vrnics.get(vrnic.0), q.datagrams_mut()) else {
            return;
        };
        let bytes = Held::bytes_of(data.len());
        if backlog.taken.bytes() + bytes > HOLD_BYTES || !backlog.taken.take_part(&v.rooms.datagrams, bytes) {
            return self.objects.count_dropped(h);
        }
        if !backlog.waits() {
            self.starved = true;
            self.sched.starve(vrnic);
        }
        backlog.push(Held { until, flow: *flow, data: data.into(), note });
        if !shared {
            // Asks the driver to ring when it posts a receive. A receive that was posted before is found in the QP's
            // turn.
            q.rings.set_rq_notify(true);
            self.make_runnable(h);
        }
        self.look_again(h, shared);
    }

    /// Sets a timer for the backlog of QP `h`: for the time at which its first datagram has waited too long or, if no
    /// doorbell will announce a receive, for an earlier time.
    fn look_again(&mut self, h: Handle<Qp>, nobody_rings: bool) {
        let now = self.now;
        let Some(q) = self.objects.qps.get_mut(h) else { return };
        let vrnic = q.vrnic;
        let Some(Datagrams { backlog, .. }) = q.datagrams_mut() else { return };
        let Some(first) = backlog.held.front() else { return };
        // A datagram that a job stores, or has stored, in its receive does not expire.
        let over = if matches!(backlog.placing, Placing::No) { first.until.saturating_add(1) } else { u64::MAX };
        let waited = HOLD_NS.saturating_sub(over.saturating_sub(now));
        let soon = now.saturating_add((waited / LOOK_AGAIN_PART).clamp(MOMENT_NS, LOOK_AGAIN_NS));
        let at = if nobody_rings { soon.min(over) } else { over };
        if at < backlog.due_at {
            backlog.due_at = at;
            self.arm(vrnic, at, Due::Backlog(h));
        }
    }

    /// Called when the timer of a backlog fires. Datagrams that have waited too long are dropped; the QP's turn looks
    /// for receives for the others.
    pub(crate) fn backlog_due(&mut self, h: Handle<Qp>) {
        let now = self.now;
        let Some(q) = self.objects.qps.get_mut(h) else { return };
        let runs = q.pause == Pause::No;
        let Some(Datagrams { backlog, .. }) = q.datagrams_mut().filter(|d| d.backlog.due_at <= now) else { return };
        backlog.due_at = u64::MAX;
        let over: Vec<Held> = (0..DRAINED_AT_ONCE).map_while(|_| backlog.pop_expired(now)).collect();
        let n = over.len() as u64;
        self.objects.count(h, |c| c.dropped += n);
        if n > 0 {
            self.objects.dropped.add(over);
        }
        if runs && self.objects.qps.get(h).is_some_and(Qp::has_backlog) {
            self.make_runnable(h);
        }
        self.look_again(h, false);
    }

    /// Delivers waiting datagrams while there are receives, and drops those that have waited too long,
    /// [`DRAINED_AT_ONCE`] at most. Returns the number delivered or dropped.
    pub(crate) fn drain_backlog(&mut self, h: Handle<Qp>) -> usize {
        for drained in 0..DRAINED_AT_ONCE {
            let now = self.now;
            let Some(q) = self.objects.qps.get_mut(h) else { return drained };
            let first = q.datagrams().and_then(|d| Some((d.backlog.held.front()?, d.backlog.placing)));
            let Some((first, placing)) = first else {
                // A QP in ERR keeps the request to ring, because receives that are posted to it are flushed.
                q.rings.set_rq_notify(q.state == QpState::Err);
                return drained;
            };
            let expired = match placing {
                Placing::Job(_) => return drained,
                Placing::Done(_) => false,
                Placing::No => first.until < now,
            };
            let shared = q.srq.is_some();
            match self.take_recv(h) {
                Err(NoRecv::Broken) => {
                    self.break_qp(h);
                    return drained;
                }
                Err(NoRecv::Empty) if !expired => {
                    self.look_again(h, shared);
                    return drained;
                }
                r => {
                    let Some(Datagrams { backlog, .. }) = self.objects.qps.get_mut(h).and_then(Qp::datagrams_mut)
                    else {
                        return drained;
                    };
                    let Some(d) = backlog.pop() else { return drained };
                    if r.is_err() || expired {
                        self.objects.count_dropped(h);
                    } else if !self.put(h, &d.flow, &d.data, d.note) {
                        if self.put_back(h, d) {
                            self.look_again(h, true);
                        }
                        return drained;
                    }
                }
            }
        }
        self.look_again(h, false);
        self.make_runnable(h);
        DRAINED_AT_ONCE
    }

    /// Puts the first datagram back into a backlog, because it could not be stored in its receive now. True unless a
    /// job stores it.
    fn put_back(&mut self, h: Handle<Qp>, d: Held) -> bool {
        let Some(q) = self.objects.qps.get_mut(h) else { return false };
        let Some(v) = self.objects.vrnics.get(q.vrnic.0) else { return false };
        let Some(Datagrams { backlog, .. }) = q.datagrams_mut() else { return false };
        backlog.unpop(d, &v.rooms.datagrams);
        !backlog.waits()
    }

    /// Drops the datagrams that wait at QP `h`, and returns their number.
    pub(crate) fn drop_backlog(&mut self, h: Handle<Qp>) -> usize {
        let backlog = self.objects.qps.get_mut(h).and_then(Qp::datagrams_mut).map(|d| &mut d.backlog);
        let Some(backlog) = backlog.filter(|b| !b.is_empty()) else { return 0 };
        let backlog = std::mem::take(backlog);
        let dropped = backlog.held.len();
        self.objects.dropped.add(backlog);
        dropped
    }

    /// Stores a datagram in the receive that QP `h` has taken, and completes the receive. False if the receive's memory
    /// moves, or if a job has to store the datagram; the receive stays taken then.
    fn put(&mut self, h: Handle<Qp>, flow: &Flow, data: &[u8], note: Note) -> bool {
        let Some(q) = self.objects.qps.get(h) else { return true };
        let Some(r) = &q.recv else { return true };
        let total = (GRH_BYTES + data.len()) as u64;
        let valid = r.valid;
        if valid && total > r.total {
            self.objects.count_dropped(h);
            return true;
        }
        if valid {
            let _ = self.objects.stage_receive(self.now, h, total);
        }
        let status = if valid {
            match self.place(h, &[&flow.grh(data.len()), data]) {
                None => return false,
                Some(Ok(())) => WcStatus::Success,
                Some(Err(fault)) if fault.passes() => return false,
                Some(Err(_)) => WcStatus::LocProtErr,
            }
        } else {
            WcStatus::LocQpOpErr
        };
        let Note { imm, src_qp, solicited, wire } = note;
        // Programs tell the two headers apart by the service level, as ConnectX sets it.
        let grh = Some(if flow.src.is_ipv4() { 0xa } else { 0x9 });
        self.establish(h);
        self.finish_recv(
            h,
            RecvDone {
                status,
                write: false,
                imm,
                invalidated: None,
                byte_len: total,
                src_qp,
                solicited,
                grh,
                datagram_from_afar: wire,
            },
        );
        if status != WcStatus::Success {
            self.fail_qp(h, None);
        }
        true
    }

    /// Stores the parts of a datagram, one after the other, in the receive that QP `h` has taken. `None` if a job
    /// stores them.
    fn place(&mut self, h: Handle<Qp>, parts: &[&[u8]; 2]) -> Option<Result<(), Fault>> {
        let backlog = &mut self.objects.qps.get_mut(h)?.datagrams_mut()?.backlog;
        if let Placing::Done(done) = backlog.placing {
            backlog.placing = Placing::No;
            return Some(done);
        }
        let (q, r) = self.objects.qps.get(h).and_then(|q| Some((q, q.recv.as_ref()?)))?;
        let (tables, to) = (self.objects.memory(), recv_side(q, r));
        let stored = tables.store(to, 0, parts[0]).and_then(|()| tables.store(to, GRH_BYTES as u64, parts[1]));
        let made = match stored {
            Ok(()) => return Some(Ok(())),
            Err(NeedsJob::Fault(fault)) => return Some(Err(fault)),
            Err(NeedsJob::Job) => self.jobs.store(&tables, h, (to, q.memory, q.vrnic), 0, parts),
        };
        match made {
            JobResult::Job(number) => {
                self.objects.serve(h);
                self.objects.qps.get_mut(h)?.datagrams_mut()?.backlog.placing = Placing::Job(number);
                None
            }
            JobResult::Full | JobResult::Slow => Some(Err(Fault::DestinationMoves)),
            JobResult::Nothing(fault) => Some(Err(fault)),
        }
    }

    /// Handles a datagram packet for UD QP `h` from the vRNIC or device that `flow` names.
    pub(crate) fn on_datagram(&mut self, h: Handle<Qp>, flow: &Flow, p: &Packet<'_>) {
        if p.opcode.transport != Transport::Ud {
            self.net.drops.bad_state += 1;
            return;
        }
        self.objects.count(h, |c| c.wire.rcvd_pkts += 1);
        self.accept(h, p.deth.qkey, flow, p.payload, Note::of_arrival(p));
        self.make_runnable(h);
    }

    /// Lets QP `h` wait until there is room in [`crate::Tx`].
    fn wait_for_tx(&mut self, h: Handle<Qp>, w: &mut SendOp) {
        w.wait = Wait::Tx;
        self.net.tx_waiting.push_back(h);
    }

    /// The result that [`Core::take_starved`] would have. Does not clear it.
    pub fn is_starved(&self) -> bool {
        self.starved
    }

    /// True if datagrams have found no receive since the last call. The caller should then let programs run before it
    /// takes more packets from the network.
    pub fn take_starved(&mut self) -> bool {
        std::mem::take(&mut self.starved)
    }

    /// Sends a datagram of QP `h` to a multicast group: first to other hosts, and then to up to [`MEMBERS_AT_ONCE`] of
    /// the members on this host that follow the first `served` ones. True if there may be members that have not got it.
    fn send_multicast(&mut self, h: Handle<Qp>, flow: &Flow, head: &Packet<'_>, data: &[u8], served: &mut u32) -> bool {
        let Some(group) = self.objects.qps.get(h).and_then(|q| self.objects.vrnics.get(q.vrnic.0)).map(|v| v.group)
        else {
            return false;
        };
        if *served == 0 {
            self.tap_datagram(h, None, flow, head, data);
            for (path, vni) in self.multicast.hosts(group) {
                self.net.tx.put(*path, Some((*vni, *flow)), head, data);
            }
            if self.multicast.has_foreign(group) && flow.src.is_ipv4() == flow.dst.is_ipv4() {
                let path = Path { from: Some(flow.src), class: class_of(flow.traffic_class, 0), ..Path::new(flow.dst) };
                self.net.tx.put(path, None, head, data);
            }
        }
        let before = *served;
        *served = self.deliver_multicast(
            group,
            flow,
            head,
            data,
            Note::of(head),
            before..before.saturating_add(MEMBERS_AT_ONCE),
        );
        *served - before == MEMBERS_AT_ONCE
    }

    /// Delivers a datagram to the members of its multicast group on this host whose numbers are in `members`. Returns
    /// the number of the first member that has not got it.
    pub(crate) fn deliver_multicast(
        &mut self,
        group: u32,
        flow: &Flow,
        p: &Packet<'_>,
        data: &[u8],
        note: Note,
        members: Range<u32>,
    ) -> u32 {
        let from = Gid::from_ip(flow.src);
        let across = self.across(group, from);
        for at in members.clone() {
            let Some(h) = self.multicast.member(group, Gid::from_ip(flow.dst), at as usize) else { return at };
            if self.objects.vrnic_of_qp(h).is_some_and(|v| self.allows_rx(v, from, across)) {
                self.accept(h, p.deth.qkey, flow, data, note);
            }
        }
        members.end
    }

    /// Handles a plain packet for UD QP `h`. Only plain devices send such packets, from the address of their GID.
    pub(crate) fn on_foreign_datagram(&mut self, h: Handle<Qp>, a: &Arrival, p: &Packet<'_>, body: &[u8]) {
        let Some(v) = self.objects.qps.get(h).and_then(|q| self.objects.vrnics.get(q.vrnic.0)) else { return };
        match v.first(a.from.is_ipv4()).filter(|_| self.net.is_foreign(v.group, a.from)) {
            Some(own) => {
                let path = Path { from: Some(own.ip()), port: a.port, ..Path::new(a.from) };
                let (from, vrnic) = (Gid::from_ip(a.from), self.objects.vrnic_of_qp(h));
                self.tap_received(vrnic, path, body);
                if vrnic.is_some_and(|v| self.allows_rx(v, from, None)) {
                    self.on_datagram(h, &Flow::roce(from, own), p);
                }
            }
            None => self.net.drops.wrong_source += 1,
        }
    }
}
