//! Receives packets: finds the QP or the vRNIC that a packet is for. A packet that is for none of them is dropped and
//! counted by reason.

use unirdma_formats::cm::GSI_QPN;
use unirdma_formats::net::Flow;
use unirdma_formats::where_is::{HOST_QPN, WhereIs};
use unirdma_formats::wire::{DEFAULT_PKEY, ICRC_BYTES, Packet, ROCE_PORT, Transport, icrc};
use unirdma_formats::{Gid, QpType, Qpn};

use crate::core::{Core, OP_NS, copy_ns};
use crate::multicast::MULTICAST_QPN;
use crate::objects::{Note, Pause, Qp, Vrnic, VrnicId};
use crate::path::{Arrival, Route};
use crate::slab::Handle;

/// A packet for the general services (QP 1), to be handled by connection management.
pub(crate) struct ReceivedMad<'a> {
    pub packet: Packet<'a>,
    /// GID of the sender.
    pub from: Gid,
    /// The vRNIC and the address that the packet is for. `None` for a packet of a plain device: only the contents of
    /// such a packet name its receiver.
    pub to: Option<(VrnicId, Gid)>,
}

impl Core {
    /// Handles a packet. `bytes` begin with the BTH and end before the ICRC, which the port has checked. If the packet
    /// came inside VXLAN, `bytes` begin with the inner IP header and end with the ICRC. Returns the packet if it is for
    /// connection management.
    pub(crate) fn receive<'a>(&mut self, a: &Arrival, bytes: &'a [u8]) -> Option<ReceivedMad<'a>> {
        match a.group {
            None => self.receive_plain(a, bytes),
            Some(group) => self.receive_encapsulated(a, group, bytes),
        }
    }

    fn receive_plain<'a>(&mut self, a: &Arrival, bytes: &'a [u8]) -> Option<ReceivedMad<'a>> {
        let p = self.parse(bytes)?;
        if a.to.is_multicast() {
            self.on_multicast(a, &p);
            return None;
        }
        if p.dest_qp == GSI_QPN {
            if !self.is_of_partition(&p, DEFAULT_PKEY) {
                let h = self.plain_gsi(a);
                h.into_iter().for_each(|h| self.objects.count(h, |c| c.pkey_violations += 1));
                return None;
            }
            let Some(h) = self.plain_gsi(a) else {
                return Some(ReceivedMad { packet: p, from: Gid::from_ip(a.from), to: None });
            };
            if self.is_of_services(&p) {
                self.execute_with(|e, core| e.packet(core, h, a, &p, bytes));
            }
            return None;
        }
        let h = self.find_qp(&p)?;
        self.execute_with(|e, core| e.packet(core, h, a, &p, bytes));
        self.charge_pieces(h);
        None
    }

    /// Handles a plain packet to an IP multicast group. It is delivered to the members in every group of vRNICs that
    /// knows the sender.
    fn on_multicast(&mut self, a: &Arrival, p: &Packet<'_>) {
        if p.opcode.transport != Transport::Ud || p.dest_qp != MULTICAST_QPN {
            self.net.drops.bad_state += 1;
            return;
        }
        if !self.is_of_partition(p, DEFAULT_PKEY) {
            return;
        }
        let (src, dst) = (Gid::from_ip(a.from), Gid::from_ip(a.to));
        let knows = |group: &u32| self.net.is_foreign(*group, a.from);
        let groups: Vec<u32> = self.multicast.groups_of(dst).filter(knows).collect();
        self.net.drops.wrong_source += u64::from(groups.is_empty());
        for group in groups {
            self.deliver_multicast(group, &Flow::roce(src, dst), p, p.payload, Note::of_arrival(p), 0..u32::MAX);
        }
    }

    /// Handles the inner IP packet of a datagram that another host has sent to `group` inside VXLAN.
    fn receive_encapsulated<'a>(&mut self, a: &Arrival, group: u32, packet: &'a [u8]) -> Option<ReceivedMad<'a>> {
        let Some((flow, udp)) = Flow::parse(packet).filter(|(f, _)| f.dst_port == ROCE_PORT) else {
            self.net.drops.malformed += 1;
            return None;
        };
        let e = flow.envelope();
        let Some((body, _)) =
            udp.split_last_chunk::<ICRC_BYTES>().filter(|(b, crc)| icrc(&e, b).to_le_bytes() == **crc)
        else {
            self.net.drops.bad_icrc += 1;
            return None;
        };
        let (src, dst) = (Gid::from_ip(flow.src), Gid::from_ip(flow.dst));
        let p = self.parse(body)?;
        if !self.is_of_partition(&p, DEFAULT_PKEY) {
            if let Some(vrnic) = self.objects.find_vrnic(group, dst).and_then(|v| self.objects.vrnics.get_mut(v.0)) {
                vrnic.counters.pkey_violations += 1;
            }
            return None;
        }
        let route = self.net.routes.get(&(group, src)).copied();
        let is_his = |r: &Route| !r.foreign && r.host == a.from && self.net.other_group(group, r) == a.source;
        let Some(route) = route.filter(is_his) else {
            self.net.drops.wrong_source += 1;
            return None;
        };
        if flow.dst.is_multicast() {
            self.tap_encapsulated(None, a.from, route.vni, &flow, packet);
            self.deliver_multicast(group, &flow, &p, p.payload, Note::of_arrival(&p), 0..u32::MAX);
            return None;
        }
        let Some(vrnic) = self.objects.find_vrnic(group, dst) else {
            self.net.drops.wrong_source += 1;
            return None;
        };
        let across = self.net.other_group(group, &route);
        if p.dest_qp == GSI_QPN {
            self.tap_encapsulated(Some(vrnic), a.from, route.vni, &flow, packet);
            if !self.may_hear_mad(vrnic, src, across, p.payload) {
                return None;
            }
            if p.deth.src_qp == HOST_QPN {
                match WhereIs::parse(p.payload).filter(|_| across.is_none()) {
                    Some(m) => self.on_where_is(vrnic, dst, src, a.from, &m),
                    None => self.net.drops.malformed += 1,
                }
                return None;
            }
            if let Some(h) = self.objects.gsi_of(vrnic) {
                if self.is_of_services(&p) {
                    self.on_datagram(h, &flow, &p);
                }
                return None;
            }
            return Some(ReceivedMad { packet: p, from: src, to: Some((vrnic, dst)) });
        }
        let h = self.find_qp(&p)?;
        if !self.objects.qps.get(h).is_some_and(|q| q.typ == QpType::Ud && q.vrnic == vrnic) {
            self.net.drops.wrong_source += 1;
            return None;
        }
        self.tap_encapsulated(Some(vrnic), a.from, route.vni, &flow, packet);
        if self.allows_rx(vrnic, src, across) {
            self.on_datagram(h, &flow, &p);
            self.charge_pieces(h);
        }
        None
    }

    /// The QP 1 that a plain device's packet is for. It belongs to the vRNIC that has the packet's destination address
    /// and whose group knows the sender.
    fn plain_gsi(&self, a: &Arrival) -> Option<Handle<Qp>> {
        let own = Gid::from_ip(a.to);
        let is_it = |v: &Vrnic| v.gids.contains(&own) && self.net.is_foreign(v.group, a.from);
        self.objects.vrnics.iter().filter(|(_, v)| v.gsi.is_some()).find(|(_, v)| is_it(v))?.1.gsi
    }

    /// True if a packet for QP 1 was sent by a QP 1, which no program has.
    fn is_of_services(&mut self, p: &Packet<'_>) -> bool {
        let is = p.opcode.transport == Transport::Ud && p.deth.src_qp == GSI_QPN;
        self.net.drops.bad_state += u64::from(!is);
        is
    }

    /// Parses a packet; a malformed one is counted and dropped.
    fn parse<'a>(&mut self, bytes: &'a [u8]) -> Option<Packet<'a>> {
        let Ok(p) = Packet::parse(bytes) else {
            self.net.drops.malformed += 1;
            return None;
        };
        Some(p)
    }

    /// True if a packet has this P_Key. The membership bit does not count (IBTA vol. 1, 9.6.1.1.5).
    fn is_of_partition(&mut self, p: &Packet<'_>, pkey: u16) -> bool {
        let is = p.pkey & 0x7fff == pkey & 0x7fff;
        self.net.drops.bad_pkey += u64::from(!is);
        is
    }

    /// Finds the QP that a packet names, and checks the packet's P_Key. The vRNIC of the QP is charged for the packet
    /// even if the QP is paused or the P_Key is wrong.
    fn find_qp(&mut self, p: &Packet<'_>) -> Option<Handle<Qp>> {
        let found = self.objects.qpns.get(&Qpn(p.dest_qp)).copied();
        self.net.drops.no_qp += u64::from(found.is_none());
        self.objects.pieces.set(0);
        if let Some(q) = found.and_then(|h| self.objects.qps.get(h)) {
            self.sched.charge(q.vrnic, OP_NS + copy_ns(p.payload.len() as u64));
            if q.pause != Pause::No {
                self.net.drops.bad_state += 1;
                return None;
            }
            let pkey = q.wire().map_or(DEFAULT_PKEY, |w| w.path.pkeys.1);
            if !self.is_of_partition(p, pkey) {
                found.into_iter().for_each(|h| self.objects.count(h, |c| c.pkey_violations += 1));
                return None;
            }
        }
        found
    }

    /// Charges the vRNIC of QP `h` for the pieces that the packet was cut into. [`Core::find_qp`] has reset their
    /// count.
    fn charge_pieces(&mut self, h: Handle<Qp>) {
        let ns = self.pieces_ns();
        if ns > 0
            && let Some(vrnic) = self.objects.vrnic_of_qp(h)
        {
            self.sched.charge(vrnic, ns);
        }
    }
}
