//! Restores a vRNIC. First, all memory is asked for and everything is checked. After that nothing can fail, so a record
//! is restored as a whole or not at all.

use std::cell::Cell;
use std::collections::HashMap;

use unirdma_formats::net::Flow;
use unirdma_formats::{AsyncEvent, Gid, Psn, QpState, QpType, Qpn, rate_kbps};
use unirdma_mem::Span;

use super::data::*;
use super::{Attach, Attached, Object, Record, RestoreError};
use crate::budget::TimeBudget;
use crate::core::Core;
use crate::multicast::MAX_MULTICAST_QPS;
use crate::objects::{
    Ah, Backing, Backlog, Begun, BounceMemory, Connection, Cq, Datagrams, DoorbellPage, Handles, Held, Local,
    MemoryState, Moderation, Mr, NO_SLOT, Note, PAGE_TIME, Pause, Pd, Prefetched, Qp, Revoked, Room, Rooms, SendOp,
    Served, Session, SessionId, Srq, Used, VfUse, Vrnic, VrnicId, Wait, Window, XrcSrq, Xrcd,
};
use crate::output::Output;
use crate::pace::{Limit, Pace};
use crate::rnic::Rnic;
use crate::slab::Handle;

/// The objects that were made, by their numbers in the record.
pub(super) struct Restorer<'a> {
    pub(super) core: &'a mut Core,
    vrnic: VrnicId,
    given: Attached,
    sessions: HashMap<u32, SessionId>,
    doors: HashMap<At, Handle<DoorbellPage>>,
    pds: HashMap<At, Handle<Pd>>,
    cqs: HashMap<At, Handle<Cq>>,
    xrcds: HashMap<At, (Handle<Xrcd>, u32)>,
    srqs: HashMap<At, Handle<Srq>>,
}

impl Rnic {
    /// Makes a vRNIC of a record, with the numbers, keys and QPNs that it had, on this host or another. `attach`
    /// provides its memory. [`Core::numbered_sessions`] returns the identities that its sessions have here.
    ///
    /// From now on its doorbells are polled, its timers run and its QPs work. Connections and address handles of this
    /// host that lead to its addresses lead to it. Other hosts learn of it by [`Rnic::set_routes`] and
    /// [`Core::reroute`].
    ///
    /// # Errors
    /// A [`RestoreError`] that says why not. Then nothing has changed.
    pub fn restore_vrnic(&mut self, now: u64, r: &Record, attach: &mut dyn Attach) -> Result<VrnicId, RestoreError> {
        self.at(now);
        let d = &r.0;
        self.check_host(d)?;
        let given = Attached::ask(d, attach)?;
        let vrnic = self.core.restore_vrnic_alone(d).ok_or(RestoreError::NoRoom("vRNICs"))?;
        let sessions = Restorer::new(&mut self.core, vrnic, given).all(d);
        self.restore_cm(d, vrnic, &sessions);
        self.manager().addresses_changed();
        for &gid in d.gids.iter().filter(|g| !Gid(**g).is_zero()) {
            self.core.reroute(d.group, Gid(gid));
        }
        // The rules here may differ from those where it was saved.
        self.core.recheck_vrnic(vrnic);
        Ok(vrnic)
    }

    /// Checks that this host has room for the record, and that its numbers are free.
    fn check_host(&self, d: &VrnicData) -> Result<(), RestoreError> {
        let objects = &self.core.objects;
        let taken = |object: Object| Err(RestoreError::Taken(object));
        for &gid in d.gids.iter().filter(|g| !Gid(**g).is_zero()) {
            if objects.find_vrnic(d.group, Gid(gid)).is_some() {
                return taken(Object::Gid(Gid(gid)));
            }
        }
        for q in &d.qps {
            if !objects.is_free_qpn(Qpn(q.qpn)) {
                return taken(Object::Qp { qpn: q.qpn });
            }
            let most = self.core.net.wire_mtu;
            if matches!(q.connection, ConnectionData::Wire(_)) && q.mtu > most {
                return Err(RestoreError::Mtu { qpn: q.qpn, mtu: q.mtu, most });
            }
            let ConnectionData::Datagram { groups, .. } = &q.connection else { continue };
            for &g in groups {
                if self.core.multicast.member(d.group, Gid(g), MAX_MULTICAST_QPS - 1).is_some() {
                    return Err(RestoreError::NoRoom("members of a multicast group"));
                }
            }
        }
        for s in &d.sessions {
            if let Some(m) = s.mrs.iter().find(|m| objects.mrs.is_taken(m.key)) {
                return taken(Object::Key(m.key));
            }
            let mut numbers = s.srqs.iter().filter_map(|q| q.xrc).map(|x| x.number);
            if let Some(number) = numbers.find(|n| objects.srq_numbers.contains_key(n)) {
                return taken(Object::XrcSrq { number });
            }
        }
        if let Some(c) = d.cm.ids.iter().find(|c| self.cm.by_local_id.contains_key(&c.local_id)) {
            return taken(Object::CommunicationId(c.local_id));
        }
        let sum = |f: &dyn Fn(&SessionData) -> usize| d.sessions.iter().map(f).sum::<usize>();
        let room = [
            ("vRNICs", 1, objects.vrnics.room()),
            ("sessions", d.sessions.len(), objects.sessions.room()),
            ("QPs", d.qps.len(), objects.qps.room()),
            ("CQs", sum(&|s| s.cqs.len()), objects.cqs.room()),
            ("PDs", sum(&|s| s.pds.len()), objects.pds.room()),
            ("XRC domains", sum(&|s| s.xrcds.len()), objects.xrcds.room()),
            ("SRQs", sum(&|s| s.srqs.len()), objects.srqs.room()),
            ("MRs", sum(&|s| s.mrs.len()), objects.mrs.room()),
            ("AHs", sum(&|s| s.ahs.len()), objects.ahs.room()),
            ("identifiers", d.cm.ids.len(), self.cm.ids.room()),
        ];
        match room.into_iter().find(|(_, needed, free)| needed > free) {
            Some((what, ..)) => Err(RestoreError::NoRoom(what)),
            None => Ok(()),
        }
    }
}

impl Core {
    /// Makes a vRNIC without its objects.
    fn restore_vrnic_alone(&mut self, d: &VrnicData) -> Option<VrnicId> {
        let VrnicData {
            group,
            gids,
            up,
            limits,
            share,
            bits_ns,
            ops_ns,
            counters,
            begun,
            last_session,
            sessions: _,
            qps: _,
            cm: _,
        } = d;
        let (share, now) = (share.restore(), self.now);
        let mut v = Vrnic {
            group: *group,
            gids: gids.iter().map(|&g| Gid(g)).collect(),
            up: *up,
            vf_use: VfUse::default(),
            limits: limits.restore(),
            limit: Limit { share, bits_until: now.saturating_add(*bits_ns), ops_until: now.saturating_add(*ops_ns) },
            used: Used::default(),
            last_session: *last_session,
            counters: counters.restore(),
            kicks: 0,
            rooms: Rooms::default(),
            memory_state: MemoryState::default(),
            page_time: TimeBudget::new(&PAGE_TIME),
            begun: Begun::default(),
            gsi: None,
        };
        begun.iter().for_each(|&g| v.begun.note(Gid(g)));
        let id = self.objects.vrnics.insert(v).map(VrnicId)?;
        self.sched.add(id, share.weight);
        self.list_gids(id, true);
        Some(id)
    }
}

fn flow(f: &FlowData) -> Flow {
    let FlowData { src, dst, src_port, dst_port, traffic_class, hop_limit, ip_id } = *f;
    Flow { src, dst, src_port, dst_port, traffic_class, hop_limit, ip_id }
}

impl<'a> Restorer<'a> {
    fn new(core: &'a mut Core, vrnic: VrnicId, given: Attached) -> Self {
        Restorer {
            core,
            vrnic,
            given,
            sessions: HashMap::new(),
            doors: HashMap::new(),
            pds: HashMap::new(),
            cqs: HashMap::new(),
            xrcds: HashMap::new(),
            srqs: HashMap::new(),
        }
    }

    /// Makes all objects. Returns the identities of the sessions.
    fn all(mut self, d: &VrnicData) -> HashMap<u32, SessionId> {
        for s in &d.sessions {
            self.session(s);
        }
        for q in &d.qps {
            self.qp(q);
        }
        for s in &d.sessions {
            self.wake(s);
        }
        self.sessions
    }

    pub(super) fn at(&self, ns: u64) -> u64 {
        self.core.now.saturating_add(ns)
    }

    pub(super) fn session_id(&self, number: Option<u32>) -> SessionId {
        number.and_then(|n| self.sessions.get(&n)).copied().unwrap_or_default()
    }

    fn session(&mut self, d: &SessionData) {
        let SessionData {
            number,
            last_name,
            doors,
            paused,
            memory: _,
            stage,
            away,
            pds,
            cqs,
            xrcds,
            srqs,
            mrs,
            ahs,
            outputs: _,
        } = d;
        let session = *number;
        let stage = stage.as_ref().and_then(|s| self.stage(s, session));
        let vrnic = self.core.objects.vrnics.get(self.vrnic.0);
        let memory_state = vrnic.map(|v| v.memory_state.clone()).unwrap_or_default();
        let live = Session {
            vrnic: self.vrnic,
            number: session,
            names: Handles { last: *last_name, ..Handles::default() },
            door: None,
            bell: self.given.doorbells.get(&(session, 0)).cloned(),
            paused: *paused,
            gone: false,
            away: *away,
            dying: 0,
            ended: 0,
            revoked: Revoked::default(),
            memory: self.given.memories.remove(&session),
            stage,
            memory_state,
        };
        let Some(id) = self.core.objects.sessions.insert(live).map(SessionId) else { return };
        self.sessions.insert(session, id);
        self.core.objects.count_used(id, |u| u.sessions += 1);
        for d in doors {
            self.door(id, session, d);
        }
        for &number in pds {
            let Some(h) = self.core.objects.pds.insert(Pd::new(id, number)) else { continue };
            self.pds.insert(At { session, number }, h);
            self.core.objects.names(id).and_then(|n| n.pds.insert(number, h));
        }
        for c in cqs {
            self.cq(id, session, c);
        }
        for x in xrcds {
            self.xrcd(id, session, x);
        }
        for q in srqs {
            self.srq(id, session, q);
        }
        // Windows are bound to MRs.
        let (windows, regions): (Vec<_>, Vec<_>) = mrs.iter().partition(|m| matches!(m.kind, MrKind::Window { .. }));
        for m in regions.into_iter().chain(windows) {
            self.mr(id, session, m);
        }
        for a in ahs {
            self.ah(id, session, a);
        }
        let (pds, cqs, xrcds) = (pds.len(), cqs.len(), xrcds.len());
        self.core.objects.count_used(id, |u| (u.pds, u.cqs, u.xrcds) = (u.pds + pds, u.cqs + cqs, u.xrcds + xrcds));
    }

    fn door(&mut self, id: SessionId, session: u32, d: &DoorData) {
        let Some(bell) = self.given.doorbells.remove(&(session, d.number)) else { return };
        let empty = DoorbellPage { last_rung_ns: self.core.now, ..DoorbellPage::new(id, d.number, bell) };
        let live = empty.with_slots(d.slots, d.free_slots.clone());
        let Some(h) = self.core.objects.doors.insert(live) else { return };
        self.doors.insert(At { session, number: d.number }, h);
        if let Some(s) = self.core.objects.sessions.get_mut(id.0) {
            match d.number {
                0 => s.door = Some(h),
                number => _ = s.names.doors.insert(number, h),
            }
        }
    }

    fn stage(&mut self, d: &StageData, session: u32) -> Option<BounceMemory> {
        let mut stage = BounceMemory::new(self.given.stages.remove(&session)?)?;
        for &(first, count) in &d.given {
            stage.add(first as usize, count as usize);
        }
        stage.cursor = d.cursor as usize;
        stage.released_at = d.released_ns.map(|ns| self.core.now.saturating_sub(ns));
        Some(stage)
    }

    fn cq(&mut self, owner: SessionId, session: u32, d: &CqData) {
        let CqData { number, entries: _, prod, served, comp_queue, notify, moderation, dead } = d;
        let at = At { session, number: *number };
        let Some(ring) = self.given.cqs.remove(&(session, at.number)) else { return };
        let moderation = moderation.map(|m| {
            let ModerationData { count, period_ns, waiting, solicited, due_ns } = m;
            Moderation { count, period_ns, waiting, solicited, due: self.at(due_ns), timed: waiting > 0 }
        });
        let cq = Cq {
            owner,
            number: at.number,
            uses: 0,
            ring: ring.at((*prod, *served)),
            comp_queue: *comp_queue,
            notify: *notify,
            moderation,
            dead: *dead,
        };
        let Some(h) = self.core.objects.cqs.insert(cq) else { return };
        self.cqs.insert(at, h);
        self.core.objects.names(owner).and_then(|n| n.cqs.insert(at.number, h));
        if let Some(m) = moderation.filter(|m| m.timed) {
            self.core.arm_events(h, m.due);
        }
    }

    fn xrcd(&mut self, owner: SessionId, session: u32, d: &XrcdData) {
        let XrcdData { number, file } = *d;
        let file = file.map(|key| (self.vrnic, key));
        let objects = &mut self.core.objects;
        let domain = objects.domains.open(file);
        let Some(h) = objects.xrcds.insert(Xrcd { owner, number, uses: 0, file, domain }) else { return };
        objects.names(owner).and_then(|n| n.xrcds.insert(number, h));
        self.xrcds.insert(At { session, number }, (h, domain));
    }

    fn srq(&mut self, owner: SessionId, session: u32, d: &SrqData) {
        let SrqData { number, pd, layout: _, max_wr, max_sge, cons, limit, broken, xrc } = *d;
        let Some(rings) = self.given.srqs.remove(&(session, number)) else { return };
        let pd = self.pd(Some(At { session, number: pd }));
        let xrc = xrc.map(|XrcSrqData { xrcd, cq, number }| {
            let (xrcd, domain) = self.domain(At { session, number: xrcd });
            XrcSrq { xrcd, domain, cq: self.cq_at(Some(At { session, number: cq })), number }
        });
        let live = Srq { owner, number, uses: 0, pd, rings, max_wr, max_sge, cons, limit, broken, xrc };
        let objects = &mut self.core.objects;
        let Some(h) = objects.srqs.insert(live) else { return };
        self.srqs.insert(At { session, number }, h);
        objects.names(owner).and_then(|n| n.srqs.insert(number, h));
        objects.count_used(owner, |u| u.srqs += 1);
        objects.use_pd(pd, true);
        if let Some(x) = xrc {
            objects.use_cq(x.cq, true);
            objects.use_xrcd(x.xrcd, true);
            objects.srq_numbers.insert(x.number, h);
        }
    }

    pub(super) fn pd(&self, at: Option<At>) -> Handle<Pd> {
        at.and_then(|at| self.pds.get(&at)).copied().unwrap_or_default()
    }

    fn cq_at(&self, at: Option<At>) -> Handle<Cq> {
        at.and_then(|at| self.cqs.get(&at)).copied().unwrap_or_default()
    }

    fn domain(&self, at: At) -> (Handle<Xrcd>, u32) {
        self.xrcds.get(&at).copied().unwrap_or_default()
    }

    fn mr(&mut self, owner: SessionId, session: u32, d: &MrData) {
        let MrData { number, key, pd, access, iova, len, regions, note, kind, pages } = d;
        let objects = &mut self.core.objects;
        let nothing = || Backing::Mapped(Span::anonymous(0));
        let (window, backing) = match *kind {
            MrKind::Region(_) => (None, self.given.mrs.remove(&(session, *number)).unwrap_or_else(nothing)),
            MrKind::Window { second, qpn, bound } => {
                let parent = bound.and_then(|(parent, off)| {
                    let h = *objects.sessions.get(owner.0)?.names.mrs.get(&parent)?;
                    let mr = objects.mrs.get_mut(h)?;
                    mr.windows += 1;
                    Some((h, mr.backing.part(off, *len).unwrap_or_else(nothing)))
                });
                let window = Window { second, qpn: qpn.map(Qpn), parent: parent.as_ref().map(|p| p.0) };
                (Some(window), parent.map_or_else(nothing, |p| p.1))
            }
        };
        let backing = match (backing, pages) {
            (Backing::Pages(list), Some(PagesData { most, granting, shift, skip, pages })) => {
                Backing::Pages(list.with_parts((*most, *granting, *shift, *skip, pages.as_deref())))
            }
            (backing, _) => backing,
        };
        let pd = self.pd(Some(At { session, number: *pd }));
        let mr = Mr {
            key: *key,
            window,
            windows: 0,
            owner,
            number: *number,
            pd,
            access: *access,
            iova: *iova,
            len: *len,
            regions: regions.clone().into(),
            checked: Cell::new(0),
            backing,
            note: *note,
            served: Served::default(),
        };
        let objects = &mut self.core.objects;
        let Some(h) = objects.mrs.insert_known(mr) else { return };
        objects.names(owner).and_then(|n| n.mrs.insert(*number, h));
        objects.enter_pd(h);
        objects.count_mr(h);
    }

    fn ah(&mut self, owner: SessionId, session: u32, d: &AhData) {
        let AhData { number, pd, flow: f, port, static_rate } = d;
        let (f, pd) = (flow(f), self.pd(Some(At { session, number: *pd })));
        let own = Gid::from_ip(f.src);
        let linked = self.core.objects.vrnics.get(self.vrnic.0).is_some_and(|v| v.is_linked(Some(own)));
        let target = self.core.target_of(self.vrnic, &f, *port);
        let objects = &mut self.core.objects;
        let (number, static_rate) = (*number, *static_rate);
        let ah = Ah { owner, number, pd, flow: f, target, linked, denied: false, static_rate };
        let Some(h) = objects.ahs.insert(ah) else { return };
        objects.names(owner).and_then(|n| n.ahs.insert(number, h));
        objects.count_used(owner, |u| u.ahs += 1);
        objects.use_pd(pd, true);
    }

    fn qp(&mut self, d: &QpData) {
        let QpData {
            qpn,
            typ,
            gsi,
            owner,
            openers,
            memory,
            xrcd,
            pd,
            send_cq,
            recv_cq,
            srq,
            slot,
            sig_all,
            cap,
            layout: _,
            state,
            attr,
            sq_cons,
            rq_cons,
            sq_psn,
            rq_psn,
            mtu,
            own,
            connection,
            work,
            recv,
            wait,
            broken,
            established,
            pace_ns,
            counters,
        } = d;
        let Some(rings) = self.given.qps.remove(qpn) else { return };
        let (typ, state) = (QpType::from_raw((*typ).into()), QpState::from_raw((*state).into()));
        let (owner_id, own) = (self.session_id(Some(*owner)), own.map(Gid));
        let path_kbps = rate_kbps(attr.0.ah_attr.static_rate).unwrap_or(0);
        let paused = self.core.objects.sessions.get(owner_id.0).is_some_and(|s| s.paused);
        let door = slot.and_then(|s| self.doors.get(&At { session: *owner, number: s.0 })).copied().unwrap_or_default();
        let v = self.core.objects.vrnics.get(self.vrnic.0);
        let linked = v.is_some_and(|v| v.is_linked(own));
        let peer_gid = Gid(attr.0.ah_attr.grh.dgid);
        let is_own = v.is_some_and(|v| v.gids.contains(&peer_gid));
        let connected = match connection {
            ConnectionData::None => Connection::None,
            ConnectionData::Local { found } => {
                // The other end is looked up when all QPs are there.
                let vrnic = if is_own { self.vrnic } else { VrnicId(Handle::NONE) };
                Connection::Local(Local { vrnic, qp: None, found: found.map(|value| (Psn::new(*rq_psn), value)) })
            }
            ConnectionData::Wire(w) => {
                let there = v.and_then(|v| self.core.way_to(v, own.unwrap_or_default(), peer_gid));
                Connection::Wire(Box::new(self.wire(w, there, linked)))
            }
            ConnectionData::Datagram { backlog, groups } => Connection::Datagram(Datagrams {
                backlog: self.backlog(backlog, v.map(|v| &v.rooms.datagrams)),
                fetched: Prefetched::default(),
                groups: groups.iter().map(|&g| Gid(g)).collect(),
            }),
        };
        let why = match wait.map(|w| w.why) {
            None => Wait::No,
            Some(WaitKind::Ack) => Wait::Ack,
            Some(WaitKind::Rnr) => Wait::Rnr,
            Some(WaitKind::Memory) => Wait::Memory,
        };
        let live = Qp {
            owner: owner_id,
            openers: openers.iter().map(|at| (self.session_id(Some(at.session)), self.domain(*at).0)).collect(),
            memory: self.session_id(*memory),
            xrcd: xrcd.map(|number| self.domain(At { session: *owner, number })),
            vrnic: self.vrnic,
            pd: self.pd(*pd),
            qpn: Qpn(*qpn),
            typ: typ.unwrap_or(QpType::Rc),
            gsi: *gsi,
            door,
            by_bus: slot.is_some_and(|s| s.0 == 0),
            slot: slot.map_or(NO_SLOT, |s| s.1),
            sig_all: *sig_all,
            send_cq: self.cq_at(*send_cq),
            recv_cq: self.cq_at(*recv_cq),
            srq: srq.map(|at| self.srqs.get(&at).copied().unwrap_or_default()),
            cap: cap.0,
            rings,
            state: state.unwrap_or(QpState::Err),
            attr: attr.0,
            sq_cons: *sq_cons,
            rq_cons: *rq_cons,
            sq_psn: Psn::new(*sq_psn),
            rq_psn: Psn::new(*rq_psn),
            mtu: *mtu,
            connection: connected,
            own,
            linked,
            denied: false,
            work: work.as_ref().map(|w| Box::new(SendOp { wait: why, ..*self.work(w) })),
            recv: recv.as_ref().map(|r| self.recv(r)),
            served_by: 0,
            pause: if paused { Pause::Yes } else { Pause::No },
            timer: 0,
            queued: false,
            broken: *broken,
            established: *established,
            pace: Pace { after: self.at(*pace_ns), path_kbps, ..Pace::default() },
            counters: counters.restore(),
        };
        let Some(h) = self.core.objects.qps.insert(live) else { return };
        let objects = &mut self.core.objects;
        objects.qpns.insert(Qpn(*qpn), h);
        if let Some(session) = objects.sessions.get_mut(owner_id.0) {
            session.names.qps.insert(h);
        }
        if let Some((_, slot)) = *slot
            && let Some(door) = objects.doors.get_mut(door)
        {
            door.fill_slot(slot, h);
        }
        for at in openers {
            let (id, (xrcd, _)) = (self.session_id(Some(at.session)), self.domain(*at));
            self.core.objects.names(id).map(|n| n.qps.insert(h));
            self.core.objects.use_xrcd(xrcd, true);
        }
        self.core.use_objects(h, true);
        if let Some(q) = self.core.objects.qps.get(h)
            && let Some(srq) = q.srq.filter(|_| q.recv.is_some() && q.typ == QpType::XrcRecv)
        {
            self.core.objects.use_srq(srq, true);
        }
        if let Some(v) = self.core.objects.vrnics.get_mut(self.vrnic.0) {
            v.used.qps += 1;
            if *gsi {
                v.gsi = Some(h);
            }
            let group = v.group;
            if let ConnectionData::Datagram { groups, .. } = connection {
                v.used.attached += groups.len();
                for &g in groups {
                    self.core.multicast.attach(group, Gid(g), h);
                }
            }
        }
        if let Some(ns) = wait.and_then(|w| w.due_ns) {
            self.core.arm_timer(h, ns);
        }
        if matches!(connection, ConnectionData::Local { .. }) && !is_own {
            self.core.recouple(h);
        }
        self.core.make_runnable(h);
    }

    fn backlog(&self, d: &[HeldData], room: Option<&Room>) -> Backlog {
        let mut backlog = Backlog::default();
        for HeldData { until_ns, flow: f, data, imm, src_qp, solicited, wire } in d {
            room.into_iter().for_each(|room| backlog.taken.force(room, Held::bytes_of(data.len())));
            let note = Note { imm: *imm, src_qp: *src_qp, solicited: *solicited, wire: *wire };
            let until = self.at(*until_ns);
            backlog.push(Held { until, flow: flow(f), data: data.clone().into(), note });
        }
        backlog
    }

    /// Starts a session: it gets its notifications, and its doorbell page is polled.
    fn wake(&mut self, d: &SessionData) {
        let session = self.session_id(Some(d.number));
        for o in &d.outputs {
            let output = match *o {
                OutputData::Completion { queue, cqn } => Output::Completion { session, queue, cqn, asked: false },
                OutputData::Released => Output::Released { session },
                OutputData::Connection { queue } => Output::Connection { session, queue },
                OutputData::Async { kind, handle } => match AsyncEvent::from_raw(kind) {
                    Some(kind) => Output::Async { session, kind, handle },
                    None => continue,
                },
            };
            self.core.push_output(output);
        }
        let (wakes, now) = (self.core.wakes, self.core.now);
        for h in self.core.objects.doors_of(session) {
            // A paused driver finds its page unchanged.
            let Some(door) = self.core.objects.doors.get(h).filter(|_| !d.paused) else { continue };
            door.bell.set_wakes(wakes);
            // No job reaches memory that the driver has asked to leave alone.
            door.bell.confirm_away(if door.number == 0 { d.away } else { 0 });
            self.core.unpark_door(h, now);
        }
    }
}
