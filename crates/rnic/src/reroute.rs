//! The destinations of connections and address handles: QPs of this host, or other hosts. When a vRNIC moves,
//! connections and address handles to it are led to its new host.

use std::net::IpAddr;

use unirdma_formats::net::{Flow, source_port};
use unirdma_formats::{Gid, Qpn, class_of};

use crate::core::Core;
use crate::objects::{Qp, SessionId, Target, Vrnic, VrnicId};
use crate::path::Path;

impl Core {
    /// Sets this host's own address in the network of hosts. A connection over the wire between two vRNICs of this host
    /// sends its packets there, and the network brings them back. Without an address such packets are lost.
    pub fn set_own_host(&mut self, host: IpAddr) {
        self.net.own_host = Some(host);
    }

    /// Sets the first UDP source port of new connections and address handles (by default
    /// [`unirdma_formats::net::FIRST_SOURCE_PORT`]). RNICs of one host that have different ones are different flows to
    /// the network.
    pub fn set_first_source_port(&mut self, port: u16) {
        self.net.first_port = port;
    }

    /// Called after a vRNIC has moved. Connections and address handles of this host with its GID as destination are led
    /// to it again: to this host if the vRNIC is here, else to the host that [`crate::Rnic::set_routes`] has named.
    /// Packets that went to its former host are lost; requests are repeated after their timeouts.
    pub fn reroute(&mut self, group: u32, gid: Gid) {
        let of_group = |core: &Self, id: VrnicId| core.objects.vrnics.get(id.0).is_some_and(|v| v.group == group);
        let leads = |core: &Self, q: &Qp| Gid(q.attr.ah_attr.grh.dgid) == gid && of_group(core, q.vrnic);
        for h in self.objects.qps.handles(|q| q.wire().is_some() && leads(self, q)) {
            let Some(q) = self.objects.qps.get(h) else { continue };
            let there = self.objects.vrnics.get(q.vrnic.0).and_then(|v| self.way_to(v, q.own.unwrap_or_default(), gid));
            if let Some(q) = self.objects.qps.get_mut(h) {
                let linked = q.linked;
                q.wire_mut().into_iter().for_each(|w| w.path = w.path.led(there, linked));
            }
            self.make_runnable(h);
        }
        let lost = |q: &Qp| q.local().is_some_and(|l| self.objects.vrnics.get(l.vrnic.0).is_none());
        for h in self.objects.qps.handles(|q| lost(q) && leads(self, q)) {
            self.recouple(h);
        }
        let sessions: Vec<SessionId> =
            self.objects.sessions.iter().filter(|(_, s)| of_group(self, s.vrnic)).map(|(h, _)| SessionId(h)).collect();
        for s in sessions {
            let Some(session) = self.objects.sessions.get(s.0) else { continue };
            for h in session.names.ahs.values() {
                let Some(ah) = self.objects.ahs.get(*h).filter(|a| Gid::from_ip(a.flow.dst) == gid) else { continue };
                let target =
                    self.target_of(session.vrnic, &ah.flow, ah.target.port(self.net.first_port, ah.own(), gid));
                self.objects.ahs.get_mut(*h).into_iter().for_each(|a| a.target = target);
            }
        }
    }

    /// True if a group has this GID, on this host or behind a route, or if it is a multicast GID.
    pub(crate) fn is_reachable(&self, group: u32, gid: Gid) -> bool {
        gid.ip().is_multicast()
            || self.objects.find_vrnic(group, gid).is_some()
            || self.net.routes.contains_key(&(group, gid))
    }

    /// The target of the datagrams of an AH, whose packets have this flow and, between hosts, this UDP source port.
    pub(crate) fn target_of(&self, vrnic: VrnicId, flow: &Flow, port: u16) -> Target {
        let gid = Gid::from_ip(flow.dst);
        if flow.dst.is_multicast() {
            return Target::Many;
        }
        let way = |to: Path| {
            let mut path = Path { port, class: class_of(flow.traffic_class, 0), ..to };
            // `Ah::linked` says whether the vRNIC has a link.
            path.link(true);
            path
        };
        let Some(v) = self.objects.vrnics.get(vrnic.0) else { return Target::There(way(Path::nowhere()), 0) };
        match (self.objects.find_vrnic(v.group, gid), self.net.routes.get(&(v.group, gid))) {
            (Some(id), _) => Target::Here(id),
            (None, Some(r)) if r.foreign => Target::Foreign(way(Path { from: Some(flow.src), ..Path::new(r.host) })),
            (None, Some(r)) => Target::There(way(Path::new(r.host).between(self.net.vni(v.group), r.vni)), r.vni),
            (None, None) => Target::There(way(Path::nowhere()), 0),
        }
    }

    /// The path of packets from `own`, an address of the vRNIC, to `gid`.
    pub(crate) fn way_to(&self, v: &Vrnic, own: Gid, gid: Gid) -> Option<Path> {
        if self.objects.find_vrnic(v.group, gid).is_some() {
            let own = self.net.vni(v.group);
            return self.net.own_host.map(|host| Path::new(host).between(own, own));
        }
        let r = self.net.routes.get(&(v.group, gid))?;
        // A plain device knows the default partition only.
        Some(match r.foreign {
            true => Path { from: Some(own.ip()), ..Path::new(r.host) },
            false => Path::new(r.host).between(self.net.vni(v.group), r.vni),
        })
    }

    /// The path of a QP to `dgid` over the wire, if there is one: to another host, or to this one.
    pub(crate) fn path_to(&self, v: &Vrnic, sgid_index: u8, dgid: Gid) -> Option<Path> {
        let mut path = self.way_to(v, v.gid(sgid_index)?, dgid)?;
        path.link(v.up);
        Some(path)
    }

    /// True if QP `qpn` of vRNIC `peer` has a connection over the wire with the QP `own` of this host.
    pub(crate) fn is_wired(&self, peer: VrnicId, qpn: Qpn, own: Qpn) -> bool {
        let found = self.objects.qpns.get(&qpn).and_then(|&h| self.objects.qps.get(h));
        found.is_some_and(|p| p.vrnic == peer && p.wire().is_some() && p.dest() == own)
    }
}

impl Target {
    /// The UDP source port of packets from `own` to `gid`, where `first` is the first port of the range.
    pub(crate) fn port(&self, first: u16, own: Gid, gid: Gid) -> u16 {
        match self {
            Target::Foreign(path) | Target::There(path, _) => path.port,
            Target::Here(_) | Target::Many => source_port(first, 0, own.low_bits(), gid.low_bits()),
        }
    }
}
