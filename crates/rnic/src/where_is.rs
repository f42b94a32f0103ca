//! Asks other hosts by which VFs their vRNICs are reached ([`WhereIs`]), and answers their questions. Only the host
//! that the routes name for a GID is asked about it and believed.

use std::net::IpAddr;

use unirdma_formats::cm::{GSI_QKEY, GSI_QPN, MAD_BYTES};
use unirdma_formats::net::Flow;
use unirdma_formats::where_is::{ByVf, HOST_QPN, Method, WhereIs};
use unirdma_formats::wire::{Deth, Extra, Op, Opcode, Packet, Part, Transport};
use unirdma_formats::{Gid, Psn};

use crate::core::Core;
use crate::objects::{SessionId, VfPath, VrnicId};
use crate::output::Output;
use crate::path::Route;
use crate::vf_peers::{Ask, FIRST_REPEAT_NS, PATIENCE_NS, VfQuestions};

impl Core {
    /// To be called before [`Core::resolve_by_vf`]. True if a host has been asked about `dgid`: the command is to be
    /// executed again, from here, when [`Core::is_asking`] is false, which [`Output::Released`] announces.
    pub fn ask_to_resolve(&mut self, s: SessionId, dgid: Gid) -> bool {
        let Some(group) = self.group_of(s) else { return false };
        if dgid.ip().is_multicast() || self.objects.find_vrnic(group, dgid).is_some() {
            return false;
        }
        if self.net.routes.contains_key(&(group, dgid)) {
            return self.ask_first(s, group, &[dgid]);
        }
        self.ask_to_name(s, dgid)
    }

    /// As [`Core::ask_to_resolve`], before [`Core::name_of_vf`].
    pub fn ask_to_name(&mut self, s: SessionId, real: Gid) -> bool {
        let Some(group) = self.group_of(s) else { return false };
        let is_here = !self.objects.vrnics_on_vf(group, real).is_empty();
        !is_here && self.ask_first(s, group, &self.vf_peers.holders(group, real))
    }

    /// True while an answer to the question of a session is waited for.
    pub fn is_asking(&self, s: SessionId) -> bool {
        self.vf_peers.asks.get(&s).is_some_and(|a| !a.is_over)
    }

    /// Counters of questions.
    pub fn vf_questions(&self) -> VfQuestions {
        self.vf_peers.counts
    }

    /// The group of a session whose programs have a VF.
    fn group_of(&self, s: SessionId) -> Option<u32> {
        let vrnic = self.objects.vrnic_of(s).ok()?;
        self.objects.vrnics.get(vrnic.0).filter(|v| v.vf_use.vf.is_some()).map(|v| v.group)
    }

    /// Asks about the first of these GIDs without an answer that holds. False if a GID before it has one, or if there
    /// is no such GID: the GID that this session asked about before has no VF, or its host did not answer.
    fn ask_first(&mut self, s: SessionId, group: u32, gids: &[Gid]) -> bool {
        let before = self.vf_peers.end(s);
        for &gid in gids {
            let Some(host) = self.host_of_peer(group, gid) else { continue };
            if self.vf_peers.believed((group, gid), host, self.now).is_some() {
                return false;
            }
            if before != Some(gid) && self.ask_about(s, group, gid) {
                return true;
            }
        }
        false
    }

    /// The host of a GID of a group on another host. Plain devices and other groups are not reached by VFs.
    pub(crate) fn host_of_peer(&self, group: u32, gid: Gid) -> Option<IpAddr> {
        let is_peer = |r: &&Route| !r.foreign && !r.host.is_unspecified() && self.net.other_group(group, r).is_none();
        self.net.routes.get(&(group, gid)).filter(is_peer).map(|r| r.host)
    }

    /// The vRNICs on other hosts that have this GID, or a VF with this GID, and the paths to them.
    pub(crate) fn peers_by_vf(&self, group: u32, gid: Gid) -> Vec<(Gid, VfPath)> {
        let believed = |gid: Gid| {
            let host = self.host_of_peer(group, gid)?;
            Some((gid, self.vf_peers.believed((group, gid), host, self.now)?))
        };
        if self.net.routes.contains_key(&(group, gid)) {
            return believed(gid).into_iter().collect();
        }
        let of_vf = self.vf_peers.holders(group, gid).into_iter().filter_map(believed);
        of_vf.filter(|(_, path)| path.gid == gid.0).collect()
    }

    /// Asks the host of a GID. False if the rules do not let the session's vRNIC reach it, or no address of the vRNIC
    /// can be its sender.
    fn ask_about(&mut self, s: SessionId, group: u32, gid: Gid) -> bool {
        let Ok(vrnic) = self.objects.vrnic_of(s) else { return false };
        let own = self.objects.vrnics.get(vrnic.0).and_then(|v| v.first(gid.ip().is_ipv4()));
        let Some(own) = own.filter(|_| self.may_connect(vrnic, gid, None)) else { return false };
        let tid = self.random.where_is.next_u64();
        let (wait_ns, until_ns) = (FIRST_REPEAT_NS, self.now.saturating_add(PATIENCE_NS));
        let due_ns = self.now.saturating_add(wait_ns);
        let ask = Ask { vrnic, group, own, gid, tid, due_ns, wait_ns, until_ns, is_over: false };
        self.vf_peers.asks.insert(s, ask);
        self.vf_peers.by_tid.insert(tid, s);
        self.vf_peers.due.insert((due_ns, s));
        self.vf_peers.counts.asked += 1;
        self.send_where_is(vrnic, own, gid, Method::Get, tid);
        true
    }

    /// Repeats questions, and ends those that nobody has answered in time; true if there were any.
    pub(crate) fn ask_again(&mut self) -> bool {
        let mut found = false;
        while let Some(&(at, s)) = self.vf_peers.due.first().filter(|(at, _)| *at <= self.now) {
            found = true;
            self.vf_peers.due.remove(&(at, s));
            let Some(a) = self.vf_peers.asks.get_mut(&s) else { continue };
            let (vrnic, own, gid, tid, key) = (a.vrnic, a.own, a.gid, a.tid, (a.group, a.gid));
            if a.until_ns <= self.now {
                self.vf_peers.counts.unanswered += 1;
                self.vf_peers.forget(key);
                self.end_question(s);
                continue;
            }
            a.wait_ns *= 2;
            a.due_ns = self.now.saturating_add(a.wait_ns).min(a.until_ns);
            let due_ns = a.due_ns;
            self.vf_peers.due.insert((due_ns, s));
            self.send_where_is(vrnic, own, gid, Method::Get, tid);
        }
        found
    }

    fn end_question(&mut self, s: SessionId) {
        if self.vf_peers.finish(s) {
            self.push_output(Output::Released { session: s });
        }
    }

    /// A message to the vRNIC with GID `own` has come from the host of GID `from`, which is of the same group.
    pub(crate) fn on_where_is(&mut self, vrnic: VrnicId, own: Gid, from: Gid, host: IpAddr, m: &WhereIs) {
        let Some(group) = self.objects.vrnics.get(vrnic.0).map(|v| v.group) else { return };
        let asker = self.vf_peers.by_tid.get(&m.tid).copied().filter(|s| {
            self.vf_peers.asks.get(s).is_some_and(|a| (a.vrnic, a.own, a.gid) == (vrnic, own, from) && !a.is_over)
        });
        // An answer that nobody waits for may be old.
        if m.method == Method::GetResp && asker.is_none() {
            return;
        }
        // No host has a VF of this one.
        let is_there = |vf: &ByVf| self.objects.vrnics_on_vf(group, vf.gid).is_empty();
        let path = m.vf.filter(is_there).map(|vf| VfPath { gid: vf.gid.0, mtu: vf.mtu });
        self.vf_peers.tell((group, from), host, path, self.now);
        match asker.filter(|_| m.method == Method::GetResp) {
            Some(s) => self.end_question(s),
            None => self.send_where_is(vrnic, own, from, Method::GetResp, m.tid),
        }
    }

    /// Sends a question or an answer, which says how the vRNIC is reached.
    fn send_where_is(&mut self, vrnic: VrnicId, own: Gid, to: Gid, method: Method, tid: u64) {
        let vf = self.objects.vf_of(vrnic).map(|vf| ByVf { gid: Gid(vf.gid), mtu: vf.mtu });
        let psn = self.vf_peers.psn;
        self.vf_peers.psn = psn.advance(1);
        self.put_mad(vrnic, own, to, &mad_head(HOST_QPN, psn), &WhereIs { method, tid, vf }.bytes());
    }

    /// Sends a MAD to a GID that is not on this host; it may be lost.
    pub(crate) fn put_mad(&mut self, vrnic: VrnicId, own: Gid, to: Gid, head: &Packet<'_>, mad: &[u8; MAD_BYTES]) {
        let Some(v) = self.objects.vrnics.get(vrnic.0).filter(|v| v.is_linked(Some(own))) else { return };
        let Some(route) = self.net.routes.get(&(v.group, to)).copied() else { return };
        if self.net.tx.is_full() {
            return;
        }
        let Some(path) = self.way_to(v, own, to) else { return };
        let inside = (!route.foreign).then_some((route.vni, Flow::roce(own, to)));
        self.net.tx.put(path, inside, head, mad);
        self.tap_sent(Some(vrnic));
    }
}

/// The headers of a MAD from a QP to QP 1.
pub(crate) fn mad_head(src_qp: u32, psn: Psn) -> Packet<'static> {
    let opcode = Opcode { transport: Transport::Ud, op: Op::Send(Part::Only), extra: Extra::None };
    let mut head = Packet::new(opcode, GSI_QPN, psn.get());
    head.deth = Deth { qkey: GSI_QKEY, src_qp };
    head
}
