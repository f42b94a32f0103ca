//! Sources and destinations of packets.

use std::net::{IpAddr, Ipv4Addr};

use unirdma_formats::wire::{DEFAULT_PKEY, ROCE_PORT};

/// Where the holder of a GID is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub struct Route {
    /// Address of its host. The unspecified address stands for a host that is not known yet, for example of a vRNIC
    /// that moves. Packets to it are lost, but connections may be made already.
    pub host: IpAddr,
    /// The holder is a plain RoCEv2 device. Such a device knows this side by the vRNIC's own GID, so packets to it
    /// leave from that address.
    pub foreign: bool,
    /// VXLAN network identifier of the holder's group, 24 bits.
    pub vni: u32,
}

/// P_Keys below this one come from the number of a group; the one above them is the default partition's.
const PKEYS: u32 = 0x7fff;

/// The P_Key of packets for a group with this number, with the membership bit of full members. Groups whose numbers
/// differ by a multiple of 32,766 have the same P_Key.
pub(crate) fn pkey_of(vni: u32) -> u16 {
    if vni == 0 { DEFAULT_PKEY } else { 0x8000 | (1 + (vni - 1) % (PKEYS - 1)) as u16 }
}

/// The two ends of a QP's packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Path {
    /// The peer's host.
    pub to: IpAddr,
    /// Source address; `None`: the host's own.
    pub from: Option<IpAddr>,
    /// UDP source port. All packets of a connection have the same one, so that the network keeps them in order.
    pub port: u16,
    /// How the network treats the packets ([`unirdma_formats::class_of`]). The two ECN bits belong to the network.
    pub class: u8,
    /// There is no link: packets are lost.
    pub cut: bool,
    /// Numbers of the peer's group and of the own one, if these are two groups that a rule joins.
    pub across: Option<(u32, u32)>,
    /// P_Keys of a connection: of packets that are sent, and of packets that come in.
    pub pkeys: (u16, u16),
}

impl Path {
    /// A path from this host to another one, on the port of RoCEv2.
    pub fn new(to: IpAddr) -> Self {
        Path {
            to,
            from: None,
            port: ROCE_PORT,
            class: 0,
            cut: false,
            across: None,
            pkeys: (DEFAULT_PKEY, DEFAULT_PKEY),
        }
    }

    /// The peer's host is part of this virtual layer. A plain RoCEv2 device knows this end by the vRNIC's own address.
    pub(crate) fn is_ours(&self) -> bool {
        self.from.is_none()
    }

    /// The path to a GID that no known host has at the moment. Packets on it are lost.
    pub(crate) fn nowhere() -> Self {
        Path { cut: true, ..Path::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED)) }
    }

    /// Records whether this end has a link. A path to no known host stays cut.
    pub(crate) fn link(&mut self, linked: bool) {
        self.cut = !linked || self.to.is_unspecified();
    }

    /// This path between groups with these numbers, if both hosts are part of this virtual layer; 0 is an unknown
    /// number.
    pub(crate) fn between(self, own: u32, peer: u32) -> Path {
        let across = (own != 0 && own != peer).then_some((peer, own));
        let pkeys = if own == 0 { self.pkeys } else { (pkey_of(peer), pkey_of(own)) };
        Path { across, pkeys, ..self }
    }

    /// This path with the two hosts of `there`, or to no known host. `linked` says whether this end has a link.
    pub(crate) fn led(self, there: Option<Path>, linked: bool) -> Path {
        let Path { to, from, across, pkeys, .. } = there.unwrap_or(Path::nowhere());
        let mut path = Path { to, from, across, pkeys, ..self };
        path.link(linked);
        path
    }
}

/// Source and destination of a packet that came in.
#[derive(Clone, Copy, Debug)]
pub struct Arrival {
    /// The sender's address.
    pub from: IpAddr,
    /// The sender's UDP port.
    pub port: u16,
    /// An address of this host, or of an IP multicast group.
    pub to: IpAddr,
    /// The network has marked it (ECN, RFC 3168), or it waited in a socket more than half full.
    pub congested: bool,
    /// The group in whose VXLAN network it came. Its bytes then begin with the inner IP header, which has the
    /// addresses.
    pub group: Option<u32>,
    /// The number of the sender's group, if that is another one than the group that it is for. For a packet of a
    /// connection, only its seal tells that.
    pub source: Option<u32>,
    /// The port has verified by a secret that a host of the sender's group made it ([`crate::Sealed`]).
    pub sealed: bool,
}

impl Arrival {
    /// A datagram's IP packet that came from a host inside the VXLAN network of a group.
    pub fn inside(from: IpAddr, group: u32) -> Self {
        Arrival { from, port: 0, to: from, congested: false, group: Some(group), source: None, sealed: false }
    }
}

/// Packets from the network that were for no QP, by reason, of the whole host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct WireDrops {
    /// Truncated, an opcode that does not exist, a bad version.
    pub malformed: u64,
    /// No such QP or connection, or one that is not connected over the wire.
    pub no_qp: u64,
    /// From a host that the QP is not connected to. Or the packets of the connection are sealed, and the peer's group
    /// has not sealed this one.
    pub wrong_source: u64,
    /// Neither the default P_Key nor the P_Key of the QP's group.
    pub bad_pkey: u64,
    /// The QP takes no such packet in its state, or because of its type.
    pub bad_state: u64,
    /// A datagram from another virtual layer with a wrong ICRC.
    pub bad_icrc: u64,
}

impl std::ops::AddAssign for WireDrops {
    fn add_assign(&mut self, o: Self) {
        let WireDrops { malformed, no_qp, wrong_source, bad_pkey, bad_state, bad_icrc } = self;
        *malformed += o.malformed;
        *no_qp += o.no_qp;
        *wrong_source += o.wrong_source;
        *bad_pkey += o.bad_pkey;
        *bad_state += o.bad_state;
        *bad_icrc += o.bad_icrc;
    }
}
