//! Saves a vRNIC. Live structures are taken apart field by field, so that a new field does not compile until it is
//! saved here, or named as one that is not saved.

use std::collections::HashMap;

use unirdma_formats::Gid;
use unirdma_formats::net::Flow;

use super::data::*;
use super::{Attached, Record};
use crate::cm::{Cm, Id};
use crate::core::Core;
use crate::objects::{
    Ah, Backing, Backlog, BounceMemory, Connection, Cq, Datagrams, DoorbellPage, Held, Local, Moderation, Mr, NO_SLOT,
    Note, Pause, Pd, Qp, Session, SessionId, Srq, Vrnic, VrnicId, Wait, Window, XrcSrq, Xrcd,
};
use crate::output::Output;
use crate::pace::{Limit, Pace};
use crate::rnic::Rnic;
use crate::sched::Due;
use crate::slab::Handle;

/// The numbers of the objects that others name by handles, and the time.
pub(super) struct Saver<'a> {
    pub(super) core: &'a Core,
    pub(super) cm: &'a Cm,
    pub(super) sessions: HashMap<SessionId, u32>,
    pub(super) pds: HashMap<Handle<Pd>, At>,
    pub(super) cqs: HashMap<Handle<Cq>, At>,
    pub(super) srqs: HashMap<Handle<Srq>, At>,
    pub(super) xrcds: HashMap<Handle<Xrcd>, At>,
    /// Places of identifiers in their list.
    pub(super) ids: HashMap<Id, u32>,
    pub(super) id: VrnicId,
    /// When the waits of QPs end.
    pub(super) waits: HashMap<(Handle<Qp>, u32), u64>,
}

impl Rnic {
    /// Saves a vRNIC as it is now; `None` if there is none. The vRNIC goes on. Copies that are under way for it as jobs
    /// are stopped. They are tried again here, and also wherever the record is restored. [`Core::has_copies`] says when
    /// the last of them has ended.
    pub fn save_vrnic(&mut self, now: u64, id: VrnicId) -> Option<Record> {
        self.at(now).settle(id);
        while self.tear_down_of(id, usize::MAX) {}
        Saver::new(&self.core, &self.cm, id).vrnic(id).map(Record)
    }

    /// Saves a vRNIC and removes it. Its programs and peers are not notified: to them it looks as if all packets were
    /// lost from now on. Its memory is returned with the record, and may be used by others when [`Core::has_copies`] is
    /// false for all its sessions.
    ///
    /// Connections between it and other vRNICs of this host are connections over the wire from now on, at both ends.
    pub fn take_vrnic(&mut self, now: u64, id: VrnicId) -> Option<(Record, Attached)> {
        self.at(now).objects.vrnics.get(id.0)?;
        self.core.settle(id);
        self.core.move_to_wire(id);
        let record = self.save_vrnic(now, id)?;
        let attached = self.core.attached(id);
        for (_, s) in self.numbered_sessions(id) {
            self.cm.events.retain(|k, _| k.0 != s);
            self.cm.kept.remove(&s);
        }
        self.manager().forget_vrnic(id);
        self.core.forget_vrnic(id);
        Some((record, attached))
    }
}

impl Core {
    /// The sessions of a vRNIC, with their numbers in records.
    pub fn numbered_sessions(&self, id: VrnicId) -> Vec<(u32, SessionId)> {
        let of_vrnic = self.objects.sessions.iter().filter(|(_, s)| s.vrnic == id && !s.gone);
        let mut all: Vec<_> = of_vrnic.map(|(h, s)| (s.number, SessionId(h))).collect();
        all.sort_unstable();
        all
    }

    /// Stops the jobs of a vRNIC. An atomic that one of them has executed already is not executed again, here or
    /// elsewhere.
    fn settle(&mut self, id: VrnicId) {
        for (_, s) in self.numbered_sessions(id) {
            self.jobs.stop(s);
        }
        for qp in self.end_words(id) {
            self.take_up(qp, 1);
        }
    }

    /// True while a job copies to or from the memory of a session, even if the session is gone.
    pub fn has_copies(&self, s: SessionId) -> bool {
        self.jobs.reach(s)
    }

    /// The memory of a vRNIC.
    fn attached(&self, id: VrnicId) -> Attached {
        let (mut all, objects) = (Attached::default(), &self.objects);
        for (number, s) in self.numbered_sessions(id) {
            let Some(session) = objects.sessions.get(s.0) else { continue };
            let doors = session.doors().filter_map(|door| objects.doors.get(door));
            all.doorbells.extend(doors.map(|d| ((number, d.number), d.bell.clone())));
            all.memories.extend(session.memory.clone().map(|memory| (number, memory)));
            all.stages.extend(session.stage.as_ref().map(|stage| (number, stage.span().clone())));
            for (&n, &h) in &session.names.cqs {
                all.cqs.extend(objects.cqs.get(h).map(|c| ((number, n), c.ring.at(c.ring.position()))));
            }
            for (&n, &h) in &session.names.srqs {
                all.srqs.extend(objects.srqs.get(h).map(|q| ((number, n), q.rings.clone())));
            }
            for (&n, &h) in &session.names.mrs {
                let mr = objects.mrs.get(h).filter(|m| m.window.is_none());
                all.mrs.extend(mr.map(|m| ((number, n), m.backing.share())));
            }
        }
        all.qps.extend(objects.qps.iter().filter(|(_, q)| q.vrnic == id).map(|(_, q)| (q.qpn.0, q.rings.clone())));
        all
    }

    /// Removes a vRNIC, and touches nothing but the RNIC's own tables.
    fn forget_vrnic(&mut self, id: VrnicId) {
        for h in self.objects.qps.handles(|q| q.vrnic == id) {
            self.detach_all(h);
            if let Some(q) = self.objects.qps.remove(h) {
                self.objects.qpns.remove(&q.qpn);
            }
        }
        for s in self.sessions_of(id) {
            self.objects.doors_of(s).into_iter().for_each(|door| self.remove_door(door));
            let objects = &mut self.objects;
            let Some(session) = objects.sessions.remove(s.0) else { continue };
            let names = session.names;
            names.pds.values().for_each(|&h| _ = objects.pds.remove(h));
            names.cqs.values().for_each(|&h| _ = objects.cqs.remove(h));
            names.mrs.values().for_each(|&h| _ = objects.mrs.remove(h));
            names.ahs.values().for_each(|&h| _ = objects.ahs.remove(h));
            names.xrcds.values().for_each(|&h| objects.remove_xrcd(h));
            for &h in names.srqs.values() {
                if let Some(x) = objects.srqs.remove(h).and_then(|q| q.xrc) {
                    objects.srq_numbers.remove(&x.number);
                }
            }
            self.outputs.retain(|o| o.session() != s);
            self.jobs.forget(s);
        }
        self.remove_vrnic(id);
    }
}

/// The list of a table of names, in the order of the numbers.
fn sorted<'a, T: 'a>(names: impl IntoIterator<Item = (&'a u32, &'a Handle<T>)>) -> Vec<(u32, Handle<T>)> {
    let mut all: Vec<_> = names.into_iter().map(|(&n, &h)| (n, h)).collect();
    all.sort_unstable_by_key(|e| e.0);
    all
}

fn flow(f: &Flow) -> FlowData {
    let Flow { src, dst, src_port, dst_port, traffic_class, hop_limit, ip_id } = *f;
    FlowData { src, dst, src_port, dst_port, traffic_class, hop_limit, ip_id }
}

/// The doorbell page itself says whether a bell has rung and whether the device sleeps. A restored page is polled at
/// first.
fn door(d: &DoorbellPage) -> DoorData {
    let DoorbellPage { session: _, number, bell: _, slots, free_slots, words: _, parked: _, rung: _, last_rung_ns: _ } =
        d;
    DoorData { number: *number, slots: slots.len() as u32, free_slots: free_slots.clone() }
}

fn moderation(m: &Moderation, now: u64) -> ModerationData {
    // A restore sets the timer again, and then knows whether it runs.
    let Moderation { count, period_ns, waiting, solicited, due, timed: _ } = *m;
    let due_ns = if waiting > 0 { due.saturating_sub(now) } else { 0 };
    ModerationData { count, period_ns, waiting, solicited, due_ns }
}

impl<'a> Saver<'a> {
    fn new(core: &'a Core, cm: &'a Cm, id: VrnicId) -> Self {
        let mut s = Saver {
            core,
            cm,
            ids: HashMap::new(),
            id,
            sessions: HashMap::new(),
            pds: HashMap::new(),
            cqs: HashMap::new(),
            srqs: HashMap::new(),
            xrcds: HashMap::new(),
            waits: HashMap::new(),
        };
        for (session, h) in core.numbered_sessions(id) {
            s.sessions.insert(h, session);
            let Some(live) = core.objects.sessions.get(h.0) else { continue };
            let at = |(&number, &h)| (h, At { session, number });
            s.pds.extend(live.names.pds.iter().map(at));
            let at = |(&number, &h)| (h, At { session, number });
            s.cqs.extend(live.names.cqs.iter().map(at));
            let at = |(&number, &h)| (h, At { session, number });
            s.srqs.extend(live.names.srqs.iter().map(at));
            let at = |(&number, &h)| (h, At { session, number });
            s.xrcds.extend(live.names.xrcds.iter().map(at));
        }
        let mut ids: Vec<_> = cm.ids.iter().filter(|(_, c)| c.vrnic == id).collect();
        // An identifier that its program has destroyed has only the number of its connection left.
        ids.sort_unstable_by_key(|(_, c)| (c.owner.map(|o| s.sessions.get(&o)), c.number, c.local_id));
        s.ids.extend(ids.iter().zip(0..).map(|((h, _), place)| (*h, place)));
        for (at, due) in core.sched.timers(id) {
            if let Due::Wait(qp, timer) = due {
                s.waits.insert((qp, timer), at);
            }
        }
        s
    }

    /// Nanoseconds until a time.
    pub(super) fn until(&self, at: u64) -> u64 {
        at.saturating_sub(self.core.now)
    }

    fn vrnic(&self, id: VrnicId) -> Option<VrnicData> {
        // A restore counts the used resources again.
        let Vrnic {
            group,
            gids,
            up,
            // Leases do not move.
            vf_use: _,
            limits,
            limit,
            used: _,
            last_session,
            counters,
            begun,
            kicks: _,
            rooms: _,
            memory_state: _,
            page_time: _,
            gsi: _,
        } = self.core.objects.vrnics.get(id.0)?;
        let Limit { share, bits_until, ops_until } = limit;
        let sessions = self.core.numbered_sessions(id);
        let mut qps: Vec<QpData> =
            self.core.objects.qps.iter().filter(|(_, q)| q.vrnic == id).map(|(h, q)| self.qp(h, q)).collect();
        qps.sort_unstable_by_key(|q| q.qpn);
        Some(VrnicData {
            group: *group,
            gids: gids.iter().map(|g| g.0).collect(),
            up: *up,
            limits: LimitsData::save(limits),
            share: ShareData::save(share),
            bits_ns: self.until(*bits_until),
            ops_ns: self.until(*ops_until),
            counters: CountersData::save(counters),
            begun: begun.all().map(|g| g.0).collect(),
            last_session: *last_session,
            sessions: sessions.iter().filter_map(|&(_, s)| self.session(s)).collect(),
            qps,
            cm: self.cm(),
        })
    }

    fn session(&self, id: SessionId) -> Option<SessionData> {
        let live = self.core.objects.sessions.get(id.0)?;
        // Dead objects were freed before the save.
        let Session {
            vrnic: _,
            number,
            names,
            door: _,
            bell: _,
            paused,
            gone: _,
            away,
            dying: _,
            ended: _,
            revoked: _,
            memory,
            stage,
            memory_state: _,
        } = live;
        let mut doors: Vec<_> = live.doors().filter_map(|h| self.core.objects.doors.get(h)).map(door).collect();
        doors.sort_unstable_by_key(|d| d.number);
        let (core, objects) = (self.core, &self.core.objects);
        let outputs = core.outputs.iter().filter(|o| o.session() == id).map(output);
        let delayed = core.is_delayed(id).then_some(OutputData::Released);
        Some(SessionData {
            number: *number,
            last_name: names.last,
            doors,
            paused: *paused,
            memory: memory.is_some(),
            stage: stage.as_ref().map(|s| self.stage(s)),
            away: *away,
            pds: sorted(&names.pds).into_iter().map(|(n, _)| n).collect(),
            cqs: sorted(&names.cqs).into_iter().filter_map(|(_, h)| objects.cqs.get(h)).map(|c| self.cq(c)).collect(),
            xrcds: sorted(&names.xrcds).into_iter().filter_map(|(_, h)| objects.xrcds.get(h)).map(xrcd).collect(),
            srqs: sorted(&names.srqs)
                .into_iter()
                .filter_map(|(_, h)| objects.srqs.get(h))
                .map(|q| self.srq(q))
                .collect(),
            mrs: sorted(&names.mrs).into_iter().filter_map(|(_, h)| objects.mrs.get(h)).map(|m| self.mr(m)).collect(),
            ahs: sorted(&names.ahs).into_iter().filter_map(|(_, h)| objects.ahs.get(h)).map(|a| self.ah(a)).collect(),
            outputs: outputs.chain(delayed).collect(),
        })
    }

    fn stage(&self, s: &BounceMemory) -> StageData {
        // A restore derives the granules in use from the records.
        let BounceMemory { span, used: _, ends: _, granules: _, in_use: _, cursor, given: _, released_at, kept: _ } = s;
        StageData {
            bytes: span.len() as u64,
            given: s.records().collect(),
            cursor: *cursor as u64,
            released_ns: released_at.map(|at| self.core.now.saturating_sub(at)),
        }
    }

    fn cq(&self, c: &Cq) -> CqData {
        let Cq { owner: _, number, uses: _, ring, comp_queue, notify, moderation: moderated, dead } = c;
        let (prod, served) = ring.position();
        CqData {
            number: *number,
            entries: ring.entries(),
            prod,
            served,
            comp_queue: *comp_queue,
            notify: *notify,
            moderation: moderated.map(|m| moderation(&m, self.core.now)),
            dead: *dead,
        }
    }

    fn srq(&self, q: &Srq) -> SrqData {
        let Srq { owner: _, number, uses: _, pd, rings, max_wr, max_sge, cons, limit, broken, xrc } = q;
        let xrc = xrc.map(|XrcSrq { xrcd, domain: _, cq, number }| XrcSrqData {
            xrcd: self.xrcds.get(&xrcd).map_or(0, |at| at.number),
            cq: self.cqs.get(&cq).map_or(0, |at| at.number),
            number,
        });
        SrqData {
            number: *number,
            pd: self.pds.get(pd).map_or(0, |at| at.number),
            layout: LayoutData::save(rings.layout()),
            max_wr: *max_wr,
            max_sge: *max_sge,
            cons: *cons,
            limit: *limit,
            broken: *broken,
            xrc,
        }
    }

    fn mr(&self, m: &Mr) -> MrData {
        let Mr {
            key,
            window,
            windows: _,
            owner: _,
            number,
            pd,
            access,
            iova,
            len,
            regions,
            checked: _,
            backing,
            note,
            served: _,
        } = m;
        let kind = match window {
            None => MrKind::Region(backing.way()),
            Some(Window { second, parent, qpn }) => {
                let parent = parent.and_then(|p| self.core.objects.mrs.get(p));
                let bound = parent.map(|p| (p.number, offset(&p.backing, backing)));
                MrKind::Window { second: *second, qpn: qpn.map(|q| q.0), bound }
            }
        };
        let pages = m.page_list().map(|list| {
            let (most, granting, shift, skip, pages) = list.parts();
            PagesData { most, granting, shift, skip, pages: pages.map(<[u64]>::to_vec) }
        });
        MrData {
            pages,
            number: *number,
            key: *key,
            pd: self.pds.get(pd).map_or(0, |at| at.number),
            access: *access,
            iova: *iova,
            len: *len,
            regions: regions.to_vec(),
            note: *note,
            kind,
        }
    }

    fn ah(&self, ah: &Ah) -> AhData {
        // A restore looks up the destination of its packets again.
        let Ah { owner: _, number, pd, flow: f, target, linked: _, denied: _, static_rate } = ah;
        let port = target.port(self.core.net.first_port, ah.own(), Gid::from_ip(f.dst));
        let pd = self.pds.get(pd).map_or(0, |at| at.number);
        AhData { number: *number, pd, flow: flow(f), port, static_rate: *static_rate }
    }

    fn qp(&self, h: Handle<Qp>, q: &Qp) -> QpData {
        // Its vRNIC is the record's. `linked` follows from `own`, and `by_bus` from its doorbell page. Its peer is
        // looked up again, and it gets a turn in any case.
        let Qp {
            owner,
            openers,
            memory,
            xrcd,
            vrnic: _,
            pd,
            qpn,
            typ,
            gsi,
            door,
            by_bus: _,
            slot,
            sig_all,
            send_cq,
            recv_cq,
            srq,
            cap,
            rings,
            state,
            attr,
            sq_cons,
            rq_cons,
            sq_psn,
            rq_psn,
            mtu,
            connection,
            own,
            linked: _,
            denied: _,
            work,
            recv,
            served_by: _,
            pause,
            timer,
            queued: _,
            broken,
            established,
            pace,
            counters,
        } = q;
        // New notifications will limit the rate of a connection without answers.
        let Pace { after, waits: _, spread_until: _, path_kbps: _ } = pace;
        let connection = match connection {
            Connection::None => ConnectionData::None,
            Connection::Local(Local { vrnic: _, qp: _, found: _ }) => {
                ConnectionData::Local { found: self.core.found_at(h) }
            }
            Connection::Wire(w) => ConnectionData::Wire(Box::new(self.wire(w))),
            Connection::Datagram(Datagrams { backlog, fetched: _, groups }) => {
                // Its timer is set again when its QP has its turn.
                let Backlog { held, taken: _, due_at: _, placing: _ } = backlog;
                ConnectionData::Datagram {
                    backlog: held.iter().map(|d| self.held(d)).collect(),
                    groups: groups.iter().map(|g| g.0).collect(),
                }
            }
        };
        // A timer that fired in a pause is due when the pause ends.
        let overdue = (*pause == Pause::Overdue).then_some(0);
        let due = self.waits.get(&(h, *timer)).map(|&at| self.until(at)).or(overdue);
        let why = match q.wait() {
            // A job is tried again, and there is room for packets elsewhere.
            Wait::No | Wait::Tx | Wait::Job(_) => None,
            Wait::Ack => Some(WaitKind::Ack),
            Wait::Rnr => Some(WaitKind::Rnr),
            Wait::Memory => Some(WaitKind::Memory),
        };
        QpData {
            qpn: qpn.0,
            typ: *typ as u8,
            gsi: *gsi,
            owner: self.sessions.get(owner).copied().unwrap_or(0),
            openers: openers.iter().filter_map(|(_, x)| self.xrcds.get(x).copied()).collect(),
            memory: self.sessions.get(memory).copied(),
            xrcd: xrcd.and_then(|(x, _)| self.xrcds.get(&x)).map(|at| at.number),
            pd: self.pds.get(pd).copied(),
            send_cq: self.cqs.get(send_cq).copied(),
            recv_cq: self.cqs.get(recv_cq).copied(),
            srq: srq.and_then(|s| self.srqs.get(&s).copied()),
            slot: self.core.objects.doors.get(*door).filter(|_| *slot != NO_SLOT).map(|d| (d.number, *slot)),
            sig_all: *sig_all,
            cap: Raw(*cap),
            layout: LayoutData::save(rings.layout()),
            state: *state as u8,
            attr: Raw(*attr),
            sq_cons: *sq_cons,
            rq_cons: *rq_cons,
            sq_psn: sq_psn.get(),
            rq_psn: rq_psn.get(),
            mtu: *mtu,
            own: own.map(|g| g.0),
            connection,
            work: work.as_ref().map(|w| self.work(w)),
            recv: recv.as_ref().map(|r| self.recv(r)),
            wait: why.map(|why| WaitData { why, due_ns: due }),
            broken: *broken,
            established: *established,
            pace_ns: self.until(*after),
            counters: CountersData::save(counters),
        }
    }

    fn held(&self, d: &Held) -> HeldData {
        let Held { until, flow: f, data, note: Note { imm, src_qp, solicited, wire } } = d;
        HeldData {
            until_ns: self.until(*until),
            flow: flow(f),
            data: data.to_vec(),
            imm: *imm,
            src_qp: *src_qp,
            solicited: *solicited,
            wire: *wire,
        }
    }
}

fn xrcd(x: &Xrcd) -> XrcdData {
    // The domain follows from the file.
    let Xrcd { owner: _, number, uses: _, file, domain: _ } = x;
    XrcdData { number: *number, file: file.map(|f| f.1) }
}

fn output(o: &Output) -> OutputData {
    match *o {
        Output::Completion { session: _, queue, cqn, asked: _ } => OutputData::Completion { queue, cqn },
        Output::Released { session: _ } => OutputData::Released,
        Output::Connection { session: _, queue } => OutputData::Connection { queue },
        Output::Async { session: _, kind, handle } => OutputData::Async { kind: kind as u32, handle },
    }
}

/// The offset of a window's memory in the memory of its MR.
fn offset(mr: &Backing, window: &Backing) -> u64 {
    match (mr, window) {
        (Backing::Mapped(all), Backing::Mapped(part)) => (part.addr() - all.addr()) as u64,
        (Backing::Pieces(_, all), Backing::Pieces(_, part)) => part - all,
        (Backing::Process(_, all), Backing::Process(_, part)) => part.wrapping_sub(*all),
        _ => 0,
    }
}
