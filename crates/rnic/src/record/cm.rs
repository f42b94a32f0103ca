//! Connection management: to data, and back.

use std::cmp::Reverse;
use std::collections::HashMap;

use unirdma_formats::Gid;
use unirdma_formats::cm::MAD_BYTES;

use super::data::*;
use super::save::Saver;
use crate::cm::{Addr, CmId, EVENT_BYTES, Early, Ends, Id, State};
use crate::objects::{SessionId, VrnicId};
use crate::rnic::Rnic;

impl State {
    const ALL: [State; 14] = [
        State::Idle,
        State::Bound,
        State::AddrQuery,
        State::AddrResolved,
        State::RouteResolved,
        State::Listening,
        State::ReqSent,
        State::ReqReceived,
        State::RepSent,
        State::RepReceived,
        State::Established,
        State::DreqSent,
        State::TimeWait,
        State::Closed,
    ];

    /// Its number in records.
    fn number(self) -> u8 {
        match self {
            State::Idle => 0,
            State::Bound => 1,
            State::AddrQuery => 2,
            State::AddrResolved => 3,
            State::RouteResolved => 4,
            State::Listening => 5,
            State::ReqSent => 6,
            State::ReqReceived => 7,
            State::RepSent => 8,
            State::RepReceived => 9,
            State::Established => 10,
            State::DreqSent => 11,
            State::TimeWait => 12,
            State::Closed => 13,
        }
    }

    /// The state with this number in records.
    pub(crate) fn from_number(n: u8) -> Option<State> {
        Self::ALL.into_iter().find(|s| s.number() == n)
    }
}

impl Saver<'_> {
    pub(super) fn cm(&self) -> CmData {
        let cm = self.cm;
        let timers: HashMap<(Id, u32), u64> = cm.timers.iter().map(|t| ((t.0.1, t.0.2), self.until(t.0.0))).collect();
        let mut ids: Vec<(u32, Id, &CmId)> =
            cm.ids.iter().filter_map(|(h, c)| Some((*self.ids.get(&h)?, h, c))).collect();
        ids.sort_unstable_by_key(|e| e.0);
        let ids = ids.into_iter().map(|(_, h, c)| self.cm_id(h, c, timers.get(&(h, c.timer)))).collect();
        let place = |h: &Id| self.ids.get(h).copied();
        let ports = cm.ports.iter().map(|(k, ids)| PortData {
            space: k.1,
            port: k.2,
            ids: ids.iter().filter_map(place).collect(),
        });
        let mut ports: Vec<PortData> = ports.filter(|p| !p.ids.is_empty()).collect();
        ports.sort_unstable_by_key(|p| (p.space, p.port));
        let early = cm.early.iter().filter(|e| e.vrnic == self.id).map(|e| {
            let Early { until, vrnic: _, own, from, service, mad } = e;
            EarlyData { until_ns: self.until(*until), own: own.0, from: from.0, service: *service, mad: mad.to_vec() }
        });
        let waiting = cm.events.iter().filter(|(_, events)| !events.is_empty());
        let mut events: Vec<EventsData> = waiting
            .filter_map(|((s, queue), events)| {
                let session = *self.sessions.get(s)?;
                Some(EventsData { session, queue: *queue, events: events.iter().map(|&e| Raw(e)).collect() })
            })
            .collect();
        events.sort_unstable_by_key(|e| (e.session, e.queue));
        CmData { ids, ports, early: early.collect(), events }
    }

    pub(super) fn cm_id(&self, h: Id, c: &CmId, timer_ns: Option<&u64>) -> CmIdData {
        let CmId {
            number,
            owner,
            vrnic,
            queue,
            space,
            xrc,
            state,
            src,
            dst,
            across: _,
            reuse,
            one_family,
            tos,
            ack_timeout,
            mtu,
            backlog,
            waiting,
            listener,
            answers,
            local_id,
            remote_id,
            tid,
            active,
            own,
            peer,
            sent,
            tries,
            timer: _,
            peer_qkey,
        } = c;
        let addr = |a: &Option<Addr>| a.map(|Addr { ip, port }| (ip, port));
        let asked = dst.map(|d| (*vrnic, Gid::from_ip(d.ip), *remote_id, c.is_datagram()));
        CmIdData {
            number: *number,
            owner: owner.and_then(|s| self.sessions.get(&s).copied()),
            queue: *queue,
            space: *space,
            xrc: *xrc,
            state: state.number(),
            src: addr(src),
            dst: addr(dst),
            reuse: *reuse,
            one_family: *one_family,
            tos: *tos,
            ack_timeout: *ack_timeout,
            mtu: *mtu,
            backlog: *backlog,
            waiting: *waiting,
            listener: self.ids.get(listener).copied(),
            answers: *answers,
            local_id: *local_id,
            remote_id: *remote_id,
            tid: *tid,
            active: *active,
            own: ends(own),
            peer: ends(peer),
            sent: sent.as_ref().map(|mad| mad.to_vec()),
            tries: *tries,
            timer_ns: timer_ns.copied(),
            peer_qkey: *peer_qkey,
            requested: asked.is_some_and(|key| self.cm.requests.get(&key) == Some(&h)),
        }
    }
}

impl Rnic {
    pub(super) fn restore_cm(&mut self, d: &VrnicData, vrnic: VrnicId, sessions: &HashMap<u32, SessionId>) {
        let (cm, now) = (&mut self.cm, self.core.now);
        let core = &self.core;
        let live = |c: &CmIdData| {
            let mut live = cm_id(c, vrnic, sessions);
            live.across = live.remote().and_then(|gid| core.across(d.group, gid));
            live
        };
        let made: Vec<Id> = d.cm.ids.iter().filter_map(|c| cm.ids.insert(live(c))).collect();
        let id = |place: u32| made.get(place as usize).copied().unwrap_or(Id::NONE);
        for (c, &h) in d.cm.ids.iter().zip(&made) {
            let Some(live) = cm.ids.get_mut(h) else { continue };
            live.listener = c.listener.map_or(Id::NONE, id);
            if let Some(owner) = live.owner {
                cm.numbers.insert((owner, c.number), h);
            }
            if c.local_id != 0 {
                cm.by_local_id.insert(c.local_id, h);
            }
            if let Some(peer) = live.remote().filter(|_| c.requested) {
                cm.requests.insert((vrnic, peer, c.remote_id, live.is_datagram()), h);
            }
            if let Some(ns) = c.timer_ns {
                cm.timers.push(Reverse((now.saturating_add(ns), h, live.timer)));
            }
        }
        if !made.is_empty() {
            cm.used.insert(vrnic, made.len());
        }
        for p in &d.cm.ports {
            cm.ports.insert((vrnic, p.space, p.port), p.ids.iter().map(|&place| id(place)).collect());
        }
        for e in &d.cm.early {
            let Ok(mad) = <Box<[u8; MAD_BYTES]>>::try_from(e.mad.clone().into_boxed_slice()) else {
                continue;
            };
            let until = now.saturating_add(e.until_ns);
            // They are in the order of their deadlines.
            let at = cm.early.partition_point(|other| other.until <= until);
            let (own, from, service) = (Gid(e.own), Gid(e.from), e.service);
            cm.early.insert(at, Early { until, vrnic, own, from, service, mad });
        }
        for e in &d.cm.events {
            if let Some(&s) = sessions.get(&e.session) {
                cm.kept.entry(s).or_default().force(&core.objects.other_room(vrnic), e.events.len() * EVENT_BYTES);
                cm.events.insert((s, e.queue), e.events.iter().map(|e| e.0).collect());
            }
        }
    }
}

fn cm_id(d: &CmIdData, vrnic: VrnicId, sessions: &HashMap<u32, SessionId>) -> CmId {
    let CmIdData {
        number,
        owner,
        queue,
        space,
        xrc,
        state,
        src,
        dst,
        reuse,
        one_family,
        tos,
        ack_timeout,
        mtu,
        backlog,
        waiting,
        listener: _,
        answers,
        local_id,
        remote_id,
        tid,
        active,
        own,
        peer,
        sent,
        tries,
        timer_ns: _,
        peer_qkey,
        requested: _,
    } = d;
    let addr = |a: Option<(std::net::IpAddr, u16)>| a.map(|(ip, port)| Addr { ip, port });
    CmId {
        number: *number,
        owner: owner.and_then(|s| sessions.get(&s)).copied(),
        vrnic,
        queue: *queue,
        space: *space,
        xrc: *xrc,
        state: State::from_number(*state).unwrap_or(State::Closed),
        src: addr(*src),
        dst: addr(*dst),
        across: None,
        reuse: *reuse,
        one_family: *one_family,
        tos: *tos,
        ack_timeout: *ack_timeout,
        mtu: *mtu,
        backlog: *backlog,
        waiting: *waiting,
        listener: Id::NONE,
        answers: *answers,
        local_id: *local_id,
        remote_id: *remote_id,
        tid: *tid,
        active: *active,
        own: live_ends(own),
        peer: live_ends(peer),
        sent: sent.as_ref().and_then(|m| m.clone().into_boxed_slice().try_into().ok()),
        tries: *tries,
        timer: 0,
        peer_qkey: *peer_qkey,
    }
}

fn live_ends(d: &EndsData) -> Ends {
    let EndsData { qpn, psn, responder_resources, initiator_depth, retry_count, rnr_retry_count, srq, flow_control } =
        *d;
    Ends { qpn, psn, responder_resources, initiator_depth, retry_count, rnr_retry_count, srq, flow_control }
}

fn ends(e: &Ends) -> EndsData {
    let Ends { qpn, psn, responder_resources, initiator_depth, retry_count, rnr_retry_count, srq, flow_control } = *e;
    EndsData { qpn, psn, responder_resources, initiator_depth, retry_count, rnr_retry_count, srq, flow_control }
}
