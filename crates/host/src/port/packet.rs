//! The port as packet sockets: it sees the IPv4 header of what comes in, and checks the ICRC with it.

use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use unirdma_formats::net::Flow;
use unirdma_formats::wire::{Envelope, ROCE_PORT};
use unirdma_rnic::{Arrival, Tx};

use super::icrc::open;
use super::socket::{Inbox, enlarge_buffers, filter, ip_header_at, is_congested, keep, set};
use super::{Port, PortCounters, UdpPort};
use crate::wire::interface_index;

/// Comparisons of a packet that is kept.
const CHECKS: usize = 6;
/// Bytes of a `virtio_net_hdr`.
const VNET_BYTES: usize = 10;

/// Packet sockets for what comes in by IPv4; everything else is the UDP port's.
pub(crate) struct PacketPort {
    udp: UdpPort,
    sockets: Vec<OwnedFd>,
    inbox: Inbox,
    received: u64,
    icrc_errors: u64,
}

impl PacketPort {
    /// Opens a socket for each IPv4 address on its interface.
    ///
    /// # Errors
    /// One line that says what is wrong and what to do.
    pub fn open(mut udp: UdpPort, addresses: &[IpAddr]) -> io::Result<Self> {
        let refused = |e: io::Error| {
            let text = format!("--full-icrc takes packet sockets ({e}): run as root, or with CAP_NET_RAW");
            io::Error::new(e.kind(), text)
        };
        let ipv4 = addresses.iter().filter_map(|a| if let IpAddr::V4(a) = a { Some(*a) } else { None });
        let sockets = ipv4.map(bind).collect::<io::Result<_>>().map_err(refused)?;
        udp.silence_ipv4()?;
        Ok(PacketPort { udp, sockets, inbox: Inbox::new(), received: 0, icrc_errors: 0 })
    }
}

/// A socket for RoCEv2 packets to this address.
fn bind(addr: Ipv4Addr) -> io::Result<OwnedFd> {
    // Until it is bound to a protocol, below, it receives nothing.
    // SAFETY: no memory is passed.
    let fd = unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call has just made it.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    enlarge_buffers(&fd);
    filter(&fd, &mut roce_to(addr))?;
    // A packet that was not cut yet, since it never left this machine, comes whole: the first option says how it is to be cut,
    // the second where its IP header is.
    if ![libc::PACKET_VNET_HDR, libc::PACKET_AUXDATA].into_iter().all(|o| set(&fd, libc::SOL_PACKET, o, 1)) {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: all zero is a valid address.
    let mut to: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    to.sll_family = libc::AF_PACKET as u16;
    to.sll_protocol = (libc::ETH_P_IP as u16).to_be();
    to.sll_ifindex = interface_index(addr.into()) as i32;
    let size = size_of::<libc::sockaddr_ll>() as u32;
    // SAFETY: the address has the size that is given.
    let done = unsafe { libc::bind(fd.as_raw_fd(), std::ptr::from_ref(&to).cast(), size) };
    if done == 0 { Ok(fd) } else { Err(io::Error::last_os_error()) }
}

/// Keeps whole packets for this host, to UDP port 4791 of this address: loads and comparisons in turn (linux/filter.h).
fn roce_to(addr: Ipv4Addr) -> [libc::sock_filter; 2 * CHECKS + 2] {
    // Offsets from the IP header on, and among what the kernel knows of a packet.
    const IP: u32 = -0x10_0000_i32 as u32;
    const KNOWN: u32 = -0x1000_i32 as u32;
    const PACKET_TYPE: u32 = KNOWN + 4;
    const THIS_HOST: u32 = 0;
    let (word, half, byte) = (0x20, 0x28, 0x30);
    let (equal, any_bit) = (0x15, 0x45);
    let checks = [
        (word, PACKET_TYPE, equal, THIS_HOST),
        // Version 4 without options; not a fragment; UDP.
        (byte, IP, equal, 0x45),
        (half, IP + 6, any_bit, 0x3fff),
        (byte, IP + 9, equal, libc::IPPROTO_UDP as u32),
        (word, IP + 16, equal, addr.to_bits()),
        (half, IP + 22, equal, ROCE_PORT.into()),
    ];
    let mut program = [keep(u32::MAX); 2 * CHECKS + 2];
    program[2 * CHECKS + 1] = keep(0);
    for (i, (load, offset, compare, value)) in checks.into_iter().enumerate() {
        let to_end = (2 * (CHECKS - i) - 1) as u8;
        let (jt, jf) = if compare == equal { (0, to_end) } else { (to_end, 0) };
        program[2 * i] = libc::sock_filter { code: load, jt: 0, jf: 0, k: offset };
        program[2 * i + 1] = libc::sock_filter { code: compare, jt, jf, k: value };
    }
    program
}

/// Size of the packets that this one is to be cut into, by the `virtio_net_hdr` before it; `None` for a packet as it is.
fn segment_size(header: &[u8; VNET_BYTES]) -> Option<usize> {
    let size = u16::from_ne_bytes([header[4], header[5]]);
    (header[1] != 0 && size > 0).then_some(size.into())
}

impl Port for PacketPort {
    fn send(&mut self, tx: &mut Tx) {
        self.udp.send(tx);
    }

    fn receive(&mut self, f: &mut dyn FnMut(Arrival, &[u8])) -> bool {
        let PacketPort { udp, sockets, inbox, received, icrc_errors } = self;
        let mut any = udp.receive(f);
        for s in sockets {
            any |= inbox.receive(s.as_fd(), |i| {
                let Some((head, frame)) = i.bytes.split_first_chunk::<VNET_BYTES>() else { return };
                let packet = ip_header_at(i.header).and_then(|at| frame.get(at..));
                // A damaged header is nobody's packet; the kernel drops those too.
                let Some((flow, payload)) = packet.and_then(Flow::parse) else { return };
                let congested = is_congested(flow.traffic_class);
                let arrival = Arrival { from: flow.src, port: flow.src_port, to: flow.dst, congested, group: None };
                let segment = segment_size(head).unwrap_or(payload.len()).max(1);
                for (number, packet) in payload.chunks(segment).enumerate() {
                    *received += 1;
                    let ip_id = flow.ip_id.wrapping_add(number as u16);
                    match open(&Envelope { ip_id, ..flow.envelope() }, packet) {
                        Some(body) => f(arrival, body),
                        None => *icrc_errors += 1,
                    }
                }
            });
        }
        any
    }

    fn join(&mut self, groups: &[IpAddr]) {
        self.udp.join(groups);
    }

    fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        let packets = self.sockets.iter().map(AsFd::as_fd);
        packets.chain(self.udp.descriptors()).collect()
    }

    fn counters(&self) -> PortCounters {
        let c = self.udp.counters();
        PortCounters { received: c.received + self.received, icrc_errors: c.icrc_errors + self.icrc_errors, ..c }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use unirdma_formats::wire::icrc;
    use unirdma_rnic::Path;

    #[test]
    fn the_identification_counts() {
        let [ours, theirs]: [IpAddr; 2] = ["127.0.47.5", "127.0.47.6"].map(|a| a.parse().unwrap());
        let mut theirs_port = UdpPort::open(&[theirs], true).unwrap();
        let udp = UdpPort::open(&[ours], true).unwrap();
        let mut port = match PacketPort::open(udp, &[ours]) {
            Err(e) if e.kind() == io::ErrorKind::PermissionDenied => return println!("skipped: {e}"),
            p => p.unwrap(),
        };
        // Whole buffers of packets, which nobody cuts on this machine, and single ones.
        let mut tx = Tx::default();
        for i in 0..150 {
            tx.push_raw(Path::new(ours), &vec![i; if i == 140 { 40 } else { 600 }]);
        }
        theirs_port.send(&mut tx);
        let mut got = Vec::new();
        while port.receive(&mut |a, bytes| got.push((a.from, a.to, bytes[0]))) {}
        assert_eq!(got, (0..150).map(|i| (theirs, ours, i)).collect::<Vec<_>>());
        // What a device might send with another Identification than the packet has, and to another address.
        let plain = std::net::UdpSocket::bind((theirs, 0)).unwrap();
        set(&plain, libc::IPPROTO_IP, libc::IP_MTU_DISCOVER, libc::IP_PMTUDISC_PROBE);
        let src_port = plain.local_addr().unwrap().port();
        let send = |ip_id, to| {
            let e = Envelope { src: theirs, dst: to, src_port, ip_id };
            plain.send_to(&[&[7; 40][..], &icrc(&e, &[7; 40]).to_le_bytes()].concat(), (to, ROCE_PORT)).unwrap();
        };
        for (ip_id, to) in [(0, ours), (77, ours), (0, theirs)] {
            send(ip_id, to);
        }
        got.clear();
        while port.receive(&mut |a, bytes| got.push((a.from, a.to, bytes[0]))) {}
        assert_eq!((got, port.counters().icrc_errors), (vec![(theirs, ours, 7)], 1));
    }
}
