//! Checks that a record is consistent: unique numbers, references to existing objects, and values that a live vRNIC can
//! have. Values that are not checked here cannot hurt the RNIC, because a driver could have made them, too.

use std::collections::{HashMap, HashSet};
use std::hash::Hash;

use unirdma_abi as abi;
use unirdma_formats::cm::MAD_BYTES;
use unirdma_formats::{
    AsyncEvent, Gid, MAX_MSG_BYTES, QpState, QpType, Qpn, WcStatus, WrOpcode, access, psn_count, rate_kbps, send_flags,
};

use super::data::*;
use super::{Flaw, Object, What};
use crate::cm;
use crate::objects::{MAX_MTU, MAX_RD_ATOMIC, PageList, WINDOW_MAX, WINDOW_MIN, is_range};

type Result<T = ()> = std::result::Result<T, Flaw>;

/// Bytes of the longest ring slot.
const MAX_STRIDE: u32 = 4096;
/// Most WQEs under way of a QP, most answers that wait, and groups of a QP: more than a live one has.
const MAX_LIST: usize = 1024;

fn fail<T>(object: Object, what: What) -> Result<T> {
    Err(Flaw { object, what })
}

fn ensure(ok: bool, object: Object, value: &'static str) -> Result {
    if ok { Ok(()) } else { fail(object, What::Range(value)) }
}

/// Numbers that must be unique.
struct Once<T>(HashSet<T>);

impl<T: Hash + Eq> Once<T> {
    fn new() -> Self {
        Once(HashSet::new())
    }

    fn add(&mut self, key: T, object: Object) -> Result {
        if self.0.insert(key) { Ok(()) } else { fail(object, What::Twice) }
    }
}

/// The objects that other objects name.
struct Known<'a> {
    d: &'a VrnicData,
    sessions: HashSet<u32>,
    pds: HashSet<At>,
    cqs: HashSet<At>,
    xrcds: HashSet<At>,
    srqs: HashSet<At>,
}

/// Checks a record.
///
/// # Errors
/// The first object that is not valid.
pub(super) fn check(d: &VrnicData) -> Result {
    let known = Known::new(d)?;
    for s in &d.sessions {
        known.session(s)?;
    }
    let (mut qpns, mut slots) = (Once::new(), Once::new());
    for q in &d.qps {
        let object = Object::Qp { qpn: q.qpn };
        qpns.add(q.qpn, object)?;
        if let Some((door, slot)) = q.slot {
            slots.add((q.owner, door, slot), object)?;
        }
        known.qp(q)?;
    }
    for s in &d.sessions {
        for d in &s.doors {
            for &slot in &d.free_slots {
                slots.add((s.number, d.number, slot), Object::Session(s.number))?;
            }
        }
    }
    // For each page, the number of its bits that QPs have, and the highest of them plus one.
    let mut bits: HashMap<(u32, u32), (u32, u32)> = HashMap::new();
    for &(session, door, slot) in &slots.0 {
        let (count, end) = bits.entry((session, door)).or_default();
        (*count, *end) = (*count + 1, (*end).max(slot.saturating_add(1)));
    }
    for s in &d.sessions {
        for door in &s.doors {
            let (count, end) = bits.remove(&(s.number, door.number)).unwrap_or_default();
            let fits = count == door.slots && end <= door.slots && door.slots <= abi::MAX_QP;
            ensure(fits, Object::Session(s.number), "a doorbell bit")?;
        }
    }
    if let Some(&(session, number)) = bits.keys().min() {
        return fail(Object::Doorbell { session, number }, What::Missing("doorbell page"));
    }
    known.quotas()?;
    known.cm()
}

impl<'a> Known<'a> {
    fn new(d: &'a VrnicData) -> Result<Self> {
        let mut sessions = Once::new();
        let (mut pds, mut cqs, mut xrcds, mut srqs) = (Once::new(), Once::new(), Once::new(), Once::new());
        let (mut keys, mut srq_numbers) = (Once::new(), Once::new());
        for s in &d.sessions {
            let session = s.number;
            sessions.add(session, Object::Session(session))?;
            ensure(session != 0 && session <= d.last_session, Object::Session(session), "its number")?;
            // All objects of a session share one sequence of numbers.
            let mut numbers = Once::new();
            let mut name = |number: u32, object: Object| {
                numbers.add(number, object)?;
                ensure(number <= s.last_name, object, "its number")
            };
            for number in s.doors.iter().map(|d| d.number) {
                name(number, Object::Doorbell { session, number })?;
            }
            for &number in &s.pds {
                name(number, Object::Pd { session, number })?;
                pds.0.insert(At { session, number });
            }
            for number in s.cqs.iter().map(|c| c.number) {
                name(number, Object::Cq { session, number })?;
                cqs.0.insert(At { session, number });
            }
            for number in s.xrcds.iter().map(|x| x.number) {
                name(number, Object::Xrcd { session, number })?;
                xrcds.0.insert(At { session, number });
            }
            for q in &s.srqs {
                let number = q.number;
                name(number, Object::Srq { session, number })?;
                srqs.0.insert(At { session, number });
                if let Some(x) = q.xrc {
                    let object = Object::XrcSrq { number: x.number };
                    srq_numbers.add(x.number, object)?;
                    ensure(x.number != 0 && x.number <= Qpn::MASK, object, "its number")?;
                }
            }
            for m in &s.mrs {
                let number = m.number;
                name(number, Object::Mr { session, number })?;
                keys.add(m.key >> 8, Object::Key(m.key))?;
            }
            for number in s.ahs.iter().map(|a| a.number) {
                name(number, Object::Ah { session, number })?;
            }
            for c in d.cm.ids.iter().filter(|c| c.owner == Some(session)) {
                name(c.number, Object::CmId { session: c.owner, number: c.number })?;
            }
        }
        let mut gids = Once::new();
        for &gid in d.gids.iter().filter(|g| !Gid(**g).is_zero()) {
            gids.add(gid, Object::Gid(Gid(gid)))?;
        }
        ensure(d.share.weight > 0, Object::Vrnic, "its weight")?;
        Ok(Known { d, sessions: sessions.0, pds: pds.0, cqs: cqs.0, xrcds: xrcds.0, srqs: srqs.0 })
    }

    fn quotas(&self) -> Result {
        let (d, limits) = (self.d, &self.d.limits);
        let sum = |f: &dyn Fn(&SessionData) -> usize| d.sessions.iter().map(f).sum::<usize>();
        let within = |n: usize, most: u32, what: &'static str| {
            if n <= most as usize { Ok(()) } else { fail(Object::Vrnic, What::Quota(what)) }
        };
        within(d.qps.len(), limits.max_qp, "QPs")?;
        within(sum(&|s| s.cqs.len()), limits.max_cq, "CQs")?;
        within(sum(&|s| s.pds.len()), limits.max_pd, "PDs")?;
        within(sum(&|s| s.xrcds.len()), limits.max_pd, "XRC domains")?;
        within(sum(&|s| s.mrs.len()), limits.max_mr, "MRs")?;
        within(sum(&|s| s.ahs.len()), limits.max_ah, "AHs")?;
        within(sum(&|s| s.srqs.len()), limits.max_srq, "SRQs")?;
        let bytes = d.sessions.iter().flat_map(|s| &s.mrs).map(counted).fold(0, u64::saturating_add);
        if bytes > limits.max_mr_bytes { fail(Object::Vrnic, What::Quota("bytes of memory")) } else { Ok(()) }
    }

    fn session(&self, s: &SessionData) -> Result {
        let session = s.number;
        let has = |set: &HashSet<At>, number: u32, object: Object, what: &'static str| {
            if set.contains(&At { session, number }) { Ok(()) } else { fail(object, What::Missing(what)) }
        };
        if let Some(stage) = &s.stage {
            check_stage(stage, Object::BounceMemory { session })?;
        }
        for c in &s.cqs {
            let object = Object::Cq { session, number: c.number };
            ensure(c.entries.is_power_of_two(), object, "its size")?;
            ensure(c.notify & !(abi::NOTIFY_NEXT | abi::NOTIFY_SOLICITED) == 0, object, "its arming")?;
            ensure(c.moderation.is_none_or(|m| m.count > 1 && m.waiting < m.count), object, "its moderation")?;
        }
        for q in &s.srqs {
            let object = Object::Srq { session, number: q.number };
            has(&self.pds, q.pd, object, "PD")?;
            check_layout(&q.layout, object)?;
            ensure(q.limit <= q.max_wr && q.max_sge <= abi::MAX_SGE, object, "its size")?;
            if let Some(x) = &q.xrc {
                has(&self.xrcds, x.xrcd, object, "XRC domain")?;
                has(&self.cqs, x.cq, object, "CQ")?;
            }
        }
        for m in &s.mrs {
            let object = Object::Mr { session, number: m.number };
            has(&self.pds, m.pd, object, "PD")?;
            ensure(is_range(m.iova, m.len), object, "its length")?;
            ensure(m.kind == MrKind::Region(WayData::Pages) || m.pages.is_none(), object, "its pages")?;
            if m.kind == MrKind::Region(WayData::Pages) {
                check_pages(m, object)?;
            }
            let MrKind::Window { bound: Some((parent, off)), .. } = m.kind else { continue };
            let Some(p) = s.mrs.iter().find(|p| p.number == parent) else { return fail(object, What::Missing("MR")) };
            let MrKind::Region(way) = p.kind else { return fail(object, What::Missing("MR")) };
            ensure(way != WayData::Pages, object, "the MR that it is bound to")?;
            let inside = off.checked_add(m.len).is_some_and(|end| end <= p.len);
            // By bus address a window has no offset.
            let fits = inside && (off == 0 || !matches!(p.kind, MrKind::Region(WayData::Session | WayData::Null)));
            ensure(fits && p.pd == m.pd, object, "the range that it is bound to")?;
        }
        for a in &s.ahs {
            let object = Object::Ah { session, number: a.number };
            has(&self.pds, a.pd, object, "PD")?;
            check_flow(&a.flow, object)?;
            ensure(rate_kbps(a.static_rate).is_some(), object, "its static rate")?;
        }
        for o in &s.outputs {
            if let OutputData::Async { kind, .. } = *o {
                ensure(AsyncEvent::from_raw(kind).is_some(), Object::Session(session), "an event")?;
            }
        }
        Ok(())
    }

    fn qp(&self, q: &QpData) -> Result {
        let object = Object::Qp { qpn: q.qpn };
        let has = |set: &HashSet<At>, at: Option<At>, what: &'static str| match at {
            Some(at) if !set.contains(&at) => fail(object, What::Missing(what)),
            _ => Ok(()),
        };
        let session = |s: Option<u32>| match s {
            Some(s) if !self.sessions.contains(&s) => fail(object, What::Missing("session")),
            _ => Ok(()),
        };
        ensure(q.qpn > 1 && q.qpn <= Qpn::MASK, object, "its number")?;
        let Some(typ) = QpType::from_raw(q.typ.into()) else { return fail(object, What::Range("its type")) };
        session(Some(q.owner))?;
        session(q.memory)?;
        let domain = q.xrcd.map(|number| At { session: q.owner, number });
        has(&self.xrcds, domain, "XRC domain")?;
        ensure((typ == QpType::XrcRecv) == domain.is_some(), object, "its XRC domain")?;
        for &opener in &q.openers {
            has(&self.xrcds, Some(opener), "XRC domain")?;
        }
        ensure(q.openers.is_empty() || typ == QpType::XrcRecv, object, "its type")?;
        has(&self.pds, q.pd, "PD")?;
        has(&self.cqs, q.send_cq, "CQ")?;
        has(&self.cqs, q.recv_cq, "CQ")?;
        has(&self.srqs, q.srq, "SRQ")?;
        let complete = q.pd.is_some() && q.send_cq.is_some() && q.recv_cq.is_some();
        if typ != QpType::XrcRecv && !complete {
            return fail(object, What::Missing("PD or CQ"));
        }
        let own = [q.pd, q.send_cq, q.recv_cq, q.srq].into_iter().flatten().all(|at| at.session == q.owner);
        ensure(typ == QpType::XrcRecv || own && q.memory == Some(q.owner), object, "its owner")?;
        check_layout(&q.layout, object)?;
        let cap = q.cap.0;
        let sges = cap.max_send_sge.max(cap.max_recv_sge) <= abi::MAX_SGE && cap.max_inline_data <= abi::MAX_INLINE;
        ensure(sges, object, "its capabilities")?;
        ensure(QpState::from_raw(q.state.into()).is_some(), object, "its state")?;
        let mtu = q.mtu.is_power_of_two() && (256..=MAX_MTU).contains(&q.mtu);
        ensure(mtu, object, "its path MTU")?;
        ensure(psns([q.sq_psn, q.rq_psn]), object, "a PSN")?;
        let a = q.attr.0;
        let attr = a.timeout <= 31
            && a.retry_cnt <= 7
            && a.rnr_retry <= 7
            && a.min_rnr_timer <= 31
            && a.max_rd_atomic <= MAX_RD_ATOMIC
            && a.max_dest_rd_atomic <= MAX_RD_ATOMIC
            && a.dest_qp_num <= Qpn::MASK
            && rate_kbps(a.ah_attr.static_rate).is_some();
        ensure(attr, object, "an attribute")?;
        if let Some(w) = &q.work {
            check_work(w, object)?;
        }
        if let Some(r) = &q.recv {
            ensure(r.sges.len() <= abi::MAX_SGE as usize, object, "a receive")?;
            if let Some(s) = r.staged {
                session(Some(s.owner))?;
                self.staged(s, object)?;
            }
        }
        ensure(!q.gsi || typ == QpType::Ud, object, "its type")?;
        ensure(q.wait.is_none() || q.work.is_some(), object, "its wait")?;
        ensure(
            (typ == QpType::Ud) == matches!(q.connection, ConnectionData::Datagram { .. }),
            object,
            "its connection",
        )?;
        match &q.connection {
            ConnectionData::None | ConnectionData::Local { .. } => Ok(()),
            ConnectionData::Datagram { backlog, groups } => {
                for d in backlog {
                    check_flow(&d.flow, object)?;
                    ensure(d.data.len() <= MAX_MTU as usize, object, "a datagram")?;
                }
                ensure(groups.len() <= MAX_LIST, object, "its groups")?;
                let mut known = Once::new();
                for &g in groups {
                    known.add(g, object)?;
                    ensure(Gid(g).ip().is_multicast(), object, "a multicast group")?;
                }
                Ok(())
            }
            ConnectionData::Wire(w) => {
                ensure(q.work.is_none(), object, "its request")?;
                self.wire(q, typ, w)
            }
        }
    }

    /// A receive may only name a stage record that is in use.
    fn staged(&self, s: StagedData, object: Object) -> Result {
        let stage = self.d.sessions.iter().find(|d| d.number == s.owner).and_then(|d| d.stage.as_ref());
        let Some(stage) = stage else { return fail(object, What::Missing("stage")) };
        let granule = abi::STAGE_GRANULE as u32;
        let found = stage.given.iter().find(|(first, _)| first.checked_mul(granule) == Some(s.record));
        let Some(&(first, count)) = found else { return fail(object, What::Missing("record of a stage")) };
        let end = (u64::from(first) + u64::from(count)) * u64::from(granule);
        let fits = s.data >= u64::from(s.record) && s.data.checked_add(s.room).is_some_and(|e| e <= end);
        ensure(fits, object, "its record of a stage")
    }

    fn wire(&self, q: &QpData, typ: QpType, w: &WireData) -> Result {
        let object = Object::Qp { qpn: q.qpn };
        ensure(psns([w.una, w.next, w.high, w.window.cut_until]), object, "a PSN")?;
        ensure(psns(w.reads.iter().copied()), object, "a PSN")?;
        let since = |a: u32, b: u32| a.wrapping_sub(b) & 0xff_ffff;
        // The next PSN lies between the oldest one without an answer and the newest one sent.
        let ordered = since(w.high, w.una) < 0x80_0000 && since(w.next, w.una) <= since(w.high, w.una);
        ensure(ordered || typ == QpType::Uc, object, "a PSN")?;
        ensure(w.flight.len() <= MAX_LIST && w.cursor as usize <= w.flight.len(), object, "its requests")?;
        ensure(w.reads.len() <= MAX_LIST, object, "its READs")?;
        let mut next = None;
        for f in &w.flight {
            check_work(&f.work, object)?;
            let status = f.status.map(|s| WcStatus::from_raw(s.into()));
            ensure(status != Some(None), object, "the status of a request")?;
            ensure(psns([f.first]) && next.is_none_or(|n| n == f.first), object, "the PSN of a request")?;
            let op = WrOpcode::from_raw(f.work.wqe.0.opcode.into());
            ensure(f.status.is_some() || op.is_some(), object, "the operation of a request")?;
            let sent = op.is_some_and(|op| !op.is_local());
            let packets = if sent { psn_count(f.work.total, q.mtu) } else { 0 };
            let right = f.packets == packets || f.status.is_some() && f.packets == 0;
            ensure(right, object, "the packets of a request")?;
            next = Some(since(f.first.wrapping_add(f.packets), 0));
        }
        ensure(next.is_none_or(|n| n == q.sq_psn), object, "its next PSN")?;
        if matches!(QpState::from_raw(q.state.into()), Some(QpState::Rts | QpState::Sqd)) {
            let placed = match w.flight.get(w.cursor as usize) {
                None => w.next == q.sq_psn,
                Some(f) => since(w.next, f.first) < f.packets.max(1),
            };
            ensure(placed, object, "its place among its requests")?;
        }
        let c = &w.window;
        ensure((WINDOW_MIN..=WINDOW_MAX).contains(&c.packets) && c.alpha <= 1 << 11, object, "its window")?;
        ensure(c.threshold <= WINDOW_MAX && c.acked <= 1 << 24, object, "its window")?;
        ensure(w.retries_left <= 7 && w.rnr_left <= 7, object, "its retries")?;
        let r = &w.responder;
        ensure(r.got <= 2 * MAX_MSG_BYTES, object, "the message under way")?;
        ensure(r.answers.len() <= MAX_LIST && r.atomics.len() <= MAX_LIST, object, "its answers")?;
        ensure(psns(r.atomics.iter().map(|a| a.0)), object, "a PSN")?;
        for a in &r.answers {
            let (psn, session) = match *a {
                AnswerData::Ack { psn, .. } | AnswerData::Atomic { psn, .. } => (psn, None),
                AnswerData::Read { psn, len, done, pd, memory, .. } => {
                    ensure(done <= len, object, "an answer")?;
                    if pd.is_some_and(|pd| !self.pds.contains(&pd)) {
                        return fail(object, What::Missing("PD"));
                    }
                    (psn, memory)
                }
                AnswerData::Nak { psn, fails, .. } => {
                    let event = fails.flatten();
                    ensure(event.is_none_or(|e| AsyncEvent::from_raw(e).is_some()), object, "an event")?;
                    (psn, None)
                }
            };
            ensure(psns([psn]), object, "a PSN")?;
            if session.is_some_and(|s| !self.sessions.contains(&s)) {
                return fail(object, What::Missing("session"));
            }
        }
        match r.message {
            Some(MessageData::Send) => ensure(q.recv.is_some(), object, "the message under way"),
            Some(MessageData::Write { len, .. }) => ensure(r.got <= len, object, "the message under way"),
            None => Ok(()),
        }
    }

    fn cm(&self) -> Result {
        let cm = &self.d.cm;
        let mut local_ids = Once::new();
        for c in &cm.ids {
            let object = Object::CmId { session: c.owner, number: c.number };
            if c.owner.is_some_and(|s| !self.sessions.contains(&s)) {
                return fail(object, What::Missing("session"));
            }
            if c.local_id != 0 {
                local_ids.add(c.local_id, Object::CommunicationId(c.local_id))?;
            }
            ensure(cm::State::from_number(c.state).is_some(), object, "its state")?;
            if c.listener.is_some_and(|l| l as usize >= cm.ids.len()) {
                return fail(object, What::Missing("listener"));
            }
            ensure(c.sent.as_ref().is_none_or(|m| m.len() == MAD_BYTES), object, "its message")?;
            ensure(c.ack_timeout <= 31, object, "its ACK timeout")?;
            ensure(!c.requested || c.dst.is_some(), object, "its peer")?;
            ensure(u32::from(c.queue) < abi::MAX_CHANNELS, object, "its queue")?;
        }
        let mut ports = Once::new();
        for p in &cm.ports {
            ports.add((p.space, p.port), Object::Vrnic)?;
            let mut ids = Once::new();
            for &at in &p.ids {
                let Some(c) = cm.ids.get(at as usize) else {
                    return fail(Object::Vrnic, What::Missing("identifier of a port"));
                };
                let object = Object::CmId { session: c.owner, number: c.number };
                ids.add(at, object)?;
                ensure(c.space == p.space && c.src.is_some_and(|a| a.1 == p.port), object, "its port")?;
            }
        }
        for e in &cm.early {
            ensure(e.mad.len() == MAD_BYTES, Object::Vrnic, "a request that waits")?;
        }
        let mut queues = Once::new();
        for e in &cm.events {
            let object = Object::CmEvents { session: e.session, queue: e.queue };
            queues.add((e.session, e.queue), object)?;
            if !self.sessions.contains(&e.session) {
                return fail(object, What::Missing("session"));
            }
        }
        Ok(())
    }
}

/// Bytes of an MR that count against the quota, at most.
fn counted(m: &MrData) -> u64 {
    match m.kind {
        MrKind::Region(WayData::Mapped | WayData::Pages) => m.len,
        // The size of process memory that counts is known when the memory is there.
        _ => 0,
    }
}

fn psns(all: impl IntoIterator<Item = u32>) -> bool {
    all.into_iter().all(|p| p <= 0xff_ffff)
}

/// The pages of an MR that work requests register.
fn check_pages(m: &MrData, object: Object) -> Result {
    let Some(p) = &m.pages else { return fail(object, What::Missing("list of pages")) };
    let size = 1_u64.checked_shl(p.shift).unwrap_or(0);
    let right = match &p.pages {
        None => (m.len, m.iova, m.access, p.skip) == (0, 0, 0, 0),
        Some(pages) => {
            PageList::holds(p.shift, p.skip, m.len, pages.len() as u64)
                && pages.len() <= p.most as usize
                && m.iova & (size - 1) == p.skip
                && pages.iter().all(|a| a % size == 0 && a.checked_add(size).is_some())
                && m.access & !p.granting == 0
        }
    };
    let may = p.granting & !access::FAST_SUPPORTED == 0 && (1..=abi::MAX_FAST_PAGES).contains(&p.most);
    ensure(right && may && m.regions.is_empty(), object, "its pages")
}

fn check_layout(l: &LayoutData, object: Object) -> Result {
    let entries = |n: u32| n.is_power_of_two() && n <= abi::MAX_QP_WR;
    let fits = entries(l.sq_entries)
        && entries(l.rq_entries)
        && l.sq_stride % 64 == 0
        && l.rq_stride % 16 == 0
        && (abi::SQ_DATA as u32 + 8..=MAX_STRIDE).contains(&l.sq_stride)
        && (abi::RQ_DATA as u32..=MAX_STRIDE).contains(&l.rq_stride);
    ensure(fits, object, "the size of its rings")
}

fn check_flow(f: &FlowData, object: Object) -> Result {
    ensure(f.src.is_ipv4() == f.dst.is_ipv4(), object, "an address")
}

fn check_work(w: &WorkData, object: Object) -> Result {
    let is_inline = w.wqe.0.send_flags & send_flags::INLINE != 0;
    let bytes = w.sges.iter().map(|s| u64::from(s.0.length)).sum::<u64>();
    let op = WrOpcode::from_raw(w.wqe.0.opcode.into());
    // An atomic uses only the first 8 bytes of its SGEs, and a request without data uses none.
    let total = if is_inline { w.total == w.inline.len() as u64 } else { w.total <= bytes && w.inline.is_empty() };
    let lists = w.sges.len() <= abi::MAX_SGE as usize && w.inline.len() <= abi::MAX_INLINE as usize;
    ensure(lists && total && w.done <= w.total, object, "a request")?;
    ensure(w.retries_left <= 7 && w.rnr_left <= 7, object, "its retries")?;
    ensure(w.found.is_none() || op.is_some_and(WrOpcode::is_atomic), object, "what an atomic has found")
}

fn check_stage(s: &StageData, object: Object) -> Result {
    let granules = s.bytes / abi::STAGE_GRANULE as u64;
    ensure(granules >= 2 && s.bytes <= abi::MAX_STAGE, object, "its size")?;
    ensure((1..=granules).contains(&s.cursor), object, "its cursor")?;
    let mut all = s.given.clone();
    all.sort_unstable();
    let mut end = 1;
    for (first, count) in all {
        ensure(count > 0 && u64::from(first) >= end, object, "a record")?;
        end = u64::from(first) + u64::from(count);
    }
    ensure(end <= granules, object, "a record")
}
