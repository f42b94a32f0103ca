//! The containers' Ethernet across hosts: VXLAN (RFC 7348) over UDP 4789, one network identifier for each group.
//!
//! Peers are those of the peers file and nobody else: a frame from another host, or for a group that the sender has
//! no vRNIC in, is dropped. Unknown and broadcast destinations go to every host of the group; what answers is learned.

use std::collections::{BTreeSet, HashMap};
use std::io;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::sync::Mutex;

use unirdma_device::lock;
use unirdma_formats::net::{ETH_BYTES, VXLAN_BYTES, VXLAN_PORT, vxlan};
use unirdma_rnic::DATAGRAM_MAC;

/// Bytes that a tunnel adds to a frame over IPv6; over IPv4 it is 20 less.
pub(crate) const TUNNEL_BYTES: u32 = 40 + 8 + (VXLAN_BYTES + ETH_BYTES) as u32;
/// Most learned addresses.
const MAX_LEARNED: usize = 65_536;

/// The VXLAN network identifier of a group: 24 bits of a hash (FNV-1a) of its name, so that hosts agree without asking.
pub(crate) fn vni(group: &str) -> u32 {
    let hash = group.bytes().fold(0x811c_9dc5_u32, |h, b| (h ^ u32::from(b)).wrapping_mul(0x0100_0193));
    (hash >> 8) ^ (hash & 0xff)
}

/// Where the members of one group are.
#[derive(Clone, Debug, Default)]
pub(crate) struct Members {
    pub vni: u32,
    pub hosts: BTreeSet<IpAddr>,
}

/// What came through the tunnel.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Tunneled<'a> {
    /// A frame of a container's interface, for a group.
    Frame { group: u32, frame: &'a [u8] },
    /// The IP packet of an RDMA datagram, from a host.
    Datagram { from: IpAddr, group: u32, packet: &'a [u8] },
    /// Nothing that a peer may send.
    Nothing,
}

#[derive(Default)]
struct State {
    groups: HashMap<u32, Members>,
    learned: HashMap<(u32, [u8; 6]), IpAddr>,
}

/// The tunnel's sockets and what it knows of its peers.
pub(crate) struct Tunnel {
    pub sockets: Vec<UdpSocket>,
    state: Mutex<State>,
}

impl Tunnel {
    /// Binds UDP port 4789 of each address.
    ///
    /// # Errors
    /// One line: which address, and why.
    pub fn open(addresses: &[IpAddr]) -> io::Result<Self> {
        let bind = |&a: &IpAddr| {
            let s = UdpSocket::bind(SocketAddr::new(a, VXLAN_PORT)).map_err(|e| {
                io::Error::new(e.kind(), format!("cannot bind UDP port {VXLAN_PORT} of {a} for VXLAN: {e}"))
            })?;
            s.set_nonblocking(true)?;
            crate::port::enlarge_buffers(&s);
            Ok(s)
        };
        let sockets = addresses.iter().map(bind).collect::<io::Result<_>>()?;
        Ok(Tunnel { sockets, state: Mutex::default() })
    }

    /// Replaces what is known of the groups, by group number.
    pub fn set_groups(&self, groups: HashMap<u32, Members>) {
        let mut s = lock(&self.state);
        s.groups = groups;
        s.learned.clear();
    }

    /// Sends a frame of a local vRNIC to the hosts of its group.
    pub fn send(&self, group: u32, frame: &[u8]) {
        let s = lock(&self.state);
        let Some(members) = s.groups.get(&group) else { return };
        let mut dst = [0; 6];
        dst.copy_from_slice(&frame[..6]);
        let mut packet = Vec::with_capacity(VXLAN_BYTES + frame.len());
        packet.extend_from_slice(&vxlan(members.vni));
        packet.extend_from_slice(frame);
        let known = s.learned.get(&(group, dst));
        let to: Vec<IpAddr> = known.map_or_else(|| members.hosts.iter().copied().collect(), |&h| vec![h]);
        for host in to {
            let socket = self.sockets.iter().find(|s| s.local_addr().is_ok_and(|a| a.is_ipv4() == host.is_ipv4()));
            if let Some(socket) = socket {
                // A full queue drops the frame, as a wire would.
                let _ = socket.send_to(&packet, SocketAddr::new(host, VXLAN_PORT));
            }
        }
    }

    /// Takes one packet off a socket, its frame in `buffer`; `None` if none waits.
    pub fn receive<'a>(&self, socket: usize, buffer: &'a mut [u8]) -> Option<Tunneled<'a>> {
        let (n, from) = self.sockets.get(socket)?.recv_from(buffer).ok()?;
        let from = from.ip();
        let dropped = Some(Tunneled::Nothing);
        let Some((head, frame)) = buffer[..n].split_first_chunk::<VXLAN_BYTES>() else { return dropped };
        let id = u32::from_be_bytes([0, head[4], head[5], head[6]]);
        let mut s = lock(&self.state);
        let of_peer = |m: &Members| m.vni == id && m.hosts.contains(&from);
        let Some(group) = s.groups.iter().find(|(_, m)| of_peer(m)).map(|(&g, _)| g) else { return dropped };
        if head[0] & 8 == 0 || frame.len() < ETH_BYTES {
            return dropped;
        }
        if frame[6..12] == DATAGRAM_MAC {
            return Some(Tunneled::Datagram { from, group, packet: &frame[ETH_BYTES..] });
        }
        let mut src = [0; 6];
        src.copy_from_slice(&frame[6..12]);
        if src[0] & 1 == 0 && s.learned.len() < MAX_LEARNED {
            s.learned.insert((group, src), from);
        }
        Some(Tunneled::Frame { group, frame })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_come_from_peers_of_the_group_only() {
        let ips: Vec<IpAddr> = (1..=3).map(|i| IpAddr::from([127, 0, 48, i])).collect();
        let t: Vec<Tunnel> = ips.iter().map(|&ip| Tunnel::open(&[ip]).unwrap()).collect();
        let members = |hosts: &[usize]| Members { vni: vni("blue"), hosts: hosts.iter().map(|&i| ips[i]).collect() };
        t[0].set_groups(HashMap::from([(3, members(&[1]))]));
        t[1].set_groups(HashMap::from([(7, members(&[0]))]));
        t[2].set_groups(HashMap::from([(7, members(&[1]))]));
        let frame: Vec<u8> = (0..60).map(|i| i * 2).collect();
        let mut buffer = vec![0; 2000];
        t[0].send(3, &frame);
        assert_eq!(t[1].receive(0, &mut buffer), Some(Tunneled::Frame { group: 7, frame: &frame }));
        let mut datagram = frame.clone();
        datagram[6..12].copy_from_slice(&DATAGRAM_MAC);
        t[0].send(3, &datagram);
        let expected = Tunneled::Datagram { from: ips[0], group: 7, packet: &datagram[ETH_BYTES..] };
        assert_eq!(t[1].receive(0, &mut buffer), Some(expected));
        // Host 2 is nobody to host 1.
        t[2].send(7, &frame);
        assert_eq!(t[1].receive(0, &mut buffer), Some(Tunneled::Nothing));
        assert_eq!(t[1].receive(0, &mut buffer), None);
        assert_ne!(vni("blue"), vni("default"));
        assert!(vni("default") < 1 << 24);
    }
}
