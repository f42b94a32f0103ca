//! Applies the rules that say which vRNICs may talk to each other; `docs/rules.md` explains them.
//!
//! The rules are asked when a target is resolved: a QP gets its peer, an address handle is made, or a connection is
//! asked for. They are also asked when a datagram or a message of connection management comes in. An established
//! connection is not checked while it works. When the rules change, all connections and address handles of the group
//! are *in doubt*, and [`crate::Rnic::recheck`] checks each of them once.

use unirdma_formats::cm::{Mad, Message};
use unirdma_formats::{Gid, QpState};
use unirdma_policy::{Party, Policy, Rule};

use crate::core::Core;
use crate::net::GroupRules;
use crate::objects::{Ah, Qp, Target, VrnicId};
use crate::slab::Handle;

impl Core {
    /// Replaces the rules that concern a group of vRNICs. `vni` is its number between hosts, by which rules name it. If
    /// the rules have changed, all connections and address handles of the group are in doubt, and this returns true.
    pub(crate) fn set_rules<'a>(
        &mut self,
        group: u32,
        vni: u32,
        rules: impl IntoIterator<Item = &'a Rule<u32, Gid>>,
    ) -> bool {
        let new = GroupRules { vni, policy: Policy::new(rules) };
        let old = self.net.rules.insert(group, new);
        self.routes_changed();
        if old.is_some_and(|old| Some(&old) == self.net.rules.get(&group)) {
            return false;
        }
        let of_group = |core: &Self, id: VrnicId| core.objects.vrnics.get(id.0).is_some_and(|v| v.group == group);
        let qps = self.objects.qps.handles(|q| of_group(self, q.vrnic));
        let ahs = self.objects.ahs.handles(|a| self.objects.vrnic_of(a.owner).is_ok_and(|v| of_group(self, v)));
        self.doubts.qps.extend(qps);
        self.doubts.ahs.extend(ahs);
        true
    }

    /// Checks the connections and address handles of a vRNIC that was restored.
    pub(crate) fn recheck_vrnic(&mut self, id: VrnicId) {
        self.objects.qps.handles(|q| q.vrnic == id).into_iter().for_each(|h| self.recheck_qp(h));
        let own = |a: &Ah| self.objects.vrnic_of(a.owner).is_ok_and(|v| v == id);
        self.objects.ahs.handles(own).into_iter().for_each(|h| self.recheck_ah(h));
    }

    /// Checks up to `most` connections and address handles that are in doubt, and ends those that the rules forbid.
    /// True if others are left.
    pub(crate) fn recheck_objects(&mut self, most: usize) -> bool {
        for _ in 0..most {
            if let Some(h) = self.doubts.qps.pop() {
                self.recheck_qp(h);
            } else if let Some(h) = self.doubts.ahs.pop() {
                self.recheck_ah(h);
            } else {
                return false;
            }
        }
        true
    }

    fn recheck_qp(&mut self, h: Handle<Qp>) {
        let Some(q) = self.objects.qps.get(h) else { return };
        let lives = matches!(q.state, QpState::Rtr | QpState::Rts | QpState::Sqd | QpState::Sqe);
        if !lives || q.wire().is_none() && q.local().is_none() {
            return;
        }
        let across = q.wire().and_then(|w| w.path.across).map(|(peer, _)| peer);
        let denied = !self.may_connect(q.vrnic, Gid(q.attr.ah_attr.grh.dgid), across);
        if denied == q.denied {
            return;
        }
        let linked = self.objects.vrnics.get(q.vrnic.0).is_some_and(|v| v.is_linked(q.own)) && !denied;
        let Some(q) = self.objects.qps.get_mut(h) else { return };
        (q.denied, q.linked) = (denied, linked);
        let (vrnic, reliable) = (q.vrnic, q.typ.is_reliable());
        q.wire_mut().into_iter().for_each(|w| w.path.link(linked));
        if denied {
            self.count_refused(vrnic);
            // The packets of an unreliable QP are lost from now on, as without a link.
            if reliable {
                self.execute_with(|e, core| e.disconnect(core, h));
            }
        }
    }

    fn recheck_ah(&mut self, h: Handle<Ah>) {
        let Some(a) = self.objects.ahs.get(h) else { return };
        if matches!(a.target, Target::Many) {
            return;
        }
        let across = a.target.across();
        let (own, Ok(vrnic)) = (a.own(), self.objects.vrnic_of(a.owner)) else { return };
        let denied = !self.may_send_to(vrnic, Gid::from_ip(a.flow.dst), across);
        let linked = self.objects.vrnics.get(vrnic.0).is_some_and(|v| v.is_linked(Some(own))) && !denied;
        if let Some(a) = self.objects.ahs.get_mut(h) {
            (a.denied, a.linked) = (denied, linked);
        }
    }

    /// The number of the group that group `group` reaches by `gid`, if that is another group.
    pub(crate) fn across(&self, group: u32, gid: Gid) -> Option<u32> {
        if self.objects.find_vrnic(group, gid).is_some() {
            return None;
        }
        self.net.routes.get(&(group, gid)).and_then(|route| self.net.other_group(group, route))
    }

    /// Whether a vRNIC may begin to talk to the holder of GID `peer`, and whether the holder may begin to talk to the
    /// vRNIC. `across` is the number of the holder's group, if that is another one.
    fn verdict(&self, id: VrnicId, peer: Gid, across: Option<u32>) -> (bool, bool) {
        let Some(v) = self.objects.vrnics.get(id.0) else { return (false, false) };
        let Some(GroupRules { vni, policy }) = self.net.rules.get(&v.group) else { return (true, true) };
        if across.is_none() && policy.is_empty() {
            return (true, true);
        }
        let here = self.objects.find_vrnic(v.group, peer).filter(|_| across.is_none());
        // A vRNIC may always talk to itself.
        if here == Some(id) {
            return (true, true);
        }
        let addresses =
            here.and_then(|h| self.objects.vrnics.get(h.0)).map_or(std::slice::from_ref(&peer), |v| &v.gids);
        let own = Party { group: vni, addresses: &v.gids };
        let there = Party { group: across.as_ref().unwrap_or(vni), addresses };
        (policy.may_begin(own, there), policy.may_begin(there, own))
    }

    /// True if a vRNIC may have a connection with the holder of a GID: one of both may begin.
    pub(crate) fn may_connect(&self, id: VrnicId, peer: Gid, across: Option<u32>) -> bool {
        let (out, back) = self.verdict(id, peer, across);
        out || back
    }

    /// True if a vRNIC may ask the holder of a GID for a connection.
    pub(crate) fn may_ask(&self, id: VrnicId, peer: Gid, across: Option<u32>) -> bool {
        self.verdict(id, peer, across).0
    }

    /// True if a vRNIC may send datagrams to the holder of a GID: it may begin to, or the holder has begun.
    pub(crate) fn may_send_to(&self, id: VrnicId, peer: Gid, across: Option<u32>) -> bool {
        let (out, back) = self.verdict(id, peer, across);
        out || back && self.objects.vrnics.get(id.0).is_some_and(|v| v.begun.has(peer))
    }

    /// A vRNIC is about to send datagrams to the holder of a GID, which may answer.
    pub(crate) fn note_begun(&mut self, id: VrnicId, peer: Gid, across: Option<u32>) {
        if self.verdict(id, peer, across) == (true, false)
            && let Some(v) = self.objects.vrnics.get_mut(id.0)
        {
            v.begun.note(peer);
        }
    }

    /// True if a vRNIC takes a datagram from the holder of a GID: the holder may begin to send, or the vRNIC has begun.
    pub(crate) fn allows_rx(&mut self, id: VrnicId, from: Gid, across: Option<u32>) -> bool {
        let (out, back) = self.verdict(id, from, across);
        if out && back {
            return true;
        }
        let Some(v) = self.objects.vrnics.get_mut(id.0) else { return false };
        if back {
            v.begun.note(from);
        }
        let hears = back || out && v.begun.has(from);
        v.counters.refused += u64::from(!hears);
        hears
    }

    /// True if a vRNIC takes a message of connection management from the holder of a GID. A side that may not begin may
    /// answer.
    pub(crate) fn may_hear_mad(&mut self, id: VrnicId, from: Gid, across: Option<u32>, mad: &[u8]) -> bool {
        let (out, back) = self.verdict(id, from, across);
        if out && back {
            return true;
        }
        let asks =
            |mad: &[u8]| matches!(Mad::parse(mad).map(|m| m.message), Some(Message::Req(_) | Message::SidrReq { .. }));
        let hears = back || out && !asks(mad);
        let Some(v) = self.objects.vrnics.get_mut(id.0) else { return false };
        if back {
            v.begun.note(from);
        }
        v.counters.refused += u64::from(!hears);
        hears
    }

    /// Counts something of a vRNIC that a rule forbids.
    pub(crate) fn count_refused(&mut self, id: VrnicId) {
        if let Some(v) = self.objects.vrnics.get_mut(id.0) {
            v.counters.refused += 1;
        }
    }
}
