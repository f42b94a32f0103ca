//! The network of a container: an Ethernet interface for each vRNIC, whose frames the virtual layer switches.
//!
//! An interface is a tap or, where `/dev/net/tun` may not be opened, one end of a veth pair whose other end is read
//! through a packet socket. Neither needs a privilege outside of the container's own namespaces.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use unirdma_ipc::vrnic::{self, IpNet};

/// An interface to make.
pub(crate) struct Interface<'a> {
    pub name: &'a str,
    pub mac: [u8; 6],
    pub mtu: u32,
    pub ips: &'a [IpNet],
}

fn check(r: i32, what: &str) -> io::Result<i32> {
    if r < 0 {
        let e = io::Error::last_os_error();
        return Err(io::Error::new(e.kind(), format!("{what}: {e}")));
    }
    Ok(r)
}

fn owned(fd: i32, what: &str) -> io::Result<OwnedFd> {
    let fd = check(fd, what)?;
    // SAFETY: the kernel just returned this descriptor; nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn ifreq(name: &str) -> libc::ifreq {
    // SAFETY: all zero is a valid ifreq.
    let mut r: libc::ifreq = unsafe { std::mem::zeroed() };
    for (d, s) in r.ifr_name.iter_mut().zip(name.as_bytes()) {
        *d = *s as libc::c_char;
    }
    r
}

fn control() -> io::Result<OwnedFd> {
    // SAFETY: plain system call.
    owned(unsafe { libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) }, "socket")
}

fn ioctl(fd: &OwnedFd, request: libc::c_ulong, r: &mut libc::ifreq, what: &str) -> io::Result<()> {
    // SAFETY: the request reads and writes one ifreq, which r is.
    check(unsafe { libc::ioctl(fd.as_raw_fd(), request as _, std::ptr::from_mut(r)) }, what).map(|_| ())
}

fn index(ctl: &OwnedFd, name: &str) -> io::Result<i32> {
    let mut r = ifreq(name);
    ioctl(ctl, libc::SIOCGIFINDEX, &mut r, "interface index")?;
    // SAFETY: SIOCGIFINDEX has set this member.
    Ok(unsafe { r.ifr_ifru.ifru_ifindex })
}

fn up(ctl: &OwnedFd, name: &str) -> io::Result<()> {
    let mut r = ifreq(name);
    r.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as libc::c_short;
    ioctl(ctl, libc::SIOCSIFFLAGS, &mut r, "bringing an interface up")
}

fn tap(name: &str) -> io::Result<OwnedFd> {
    // SAFETY: plain system call with a C string.
    let fd = owned(
        unsafe { libc::open(c"/dev/net/tun".as_ptr(), libc::O_RDWR | libc::O_CLOEXEC | libc::O_NONBLOCK) },
        "/dev/net/tun",
    )?;
    let mut r = ifreq(name);
    r.ifr_ifru.ifru_flags = (libc::IFF_TAP | libc::IFF_NO_PI) as libc::c_short;
    ioctl(&fd, libc::TUNSETIFF as libc::c_ulong, &mut r, "creating a tap")?;
    Ok(fd)
}

/// Makes an interface as one end of a veth pair, and returns a packet socket on the other end.
fn veth(ctl: &OwnedFd, name: &str, uplink: &str) -> io::Result<OwnedFd> {
    let mut peer = vec![0; 16];
    attr(&mut peer, 3, &[uplink.as_bytes(), b"\0"].concat());
    let mut data = Vec::new();
    attr(&mut data, 1, &peer);
    let mut info = Vec::new();
    attr(&mut info, 1, b"veth\0");
    attr(&mut info, 2, &data);
    let mut link = vec![0; 16];
    attr(&mut link, 3, &[name.as_bytes(), b"\0"].concat());
    attr(&mut link, 18, &info);
    const CREATE: u16 = 0x400 | 0x200;
    netlink(libc::RTM_NEWLINK, CREATE, &link)
        .map_err(|e| io::Error::new(e.kind(), format!("creating a veth pair: {e}")))?;
    // Turns offloads off: frames leave the kernel as they are, and nothing fills in checksums or cuts segments later.
    for command in [0x17u32, 0x1f, 0x21, 0x24] {
        let mut value = [command, 0];
        let mut r = ifreq(name);
        r.ifr_ifru.ifru_data = value.as_mut_ptr().cast();
        const SIOCETHTOOL: libc::c_ulong = 0x8946;
        let _ = ioctl(ctl, SIOCETHTOOL, &mut r, "offloads");
    }
    // The uplink only carries frames; it has no addresses. It must be up before it is bound to.
    let _ = std::fs::write(format!("/proc/sys/net/ipv6/conf/{uplink}/disable_ipv6"), "1");
    set_mtu(ctl, uplink, 9000)?;
    up(ctl, uplink)?;
    let all = (libc::ETH_P_ALL as u16).to_be();
    // SAFETY: plain system call.
    let fd =
        unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK, all.into()) };
    let fd = owned(fd, "packet socket")?;
    // SAFETY: zero is a valid address; bind reads exactly its size.
    unsafe {
        let mut a: libc::sockaddr_ll = std::mem::zeroed();
        a.sll_family = libc::AF_PACKET as u16;
        a.sll_protocol = all;
        a.sll_ifindex = index(ctl, uplink)?;
        check(libc::bind(fd.as_raw_fd(), std::ptr::from_ref(&a).cast(), size_of_val(&a) as u32), "packet socket")?;
        let one = 1i32;
        const PACKET_IGNORE_OUTGOING: i32 = 23;
        libc::setsockopt(fd.as_raw_fd(), libc::SOL_PACKET, PACKET_IGNORE_OUTGOING, std::ptr::from_ref(&one).cast(), 4);
    }
    Ok(fd)
}

fn set_mtu(ctl: &OwnedFd, name: &str, mtu: u32) -> io::Result<()> {
    let mut r = ifreq(name);
    r.ifr_ifru.ifru_mtu = mtu as i32;
    ioctl(ctl, libc::SIOCSIFMTU, &mut r, "setting the MTU")
}

/// Appends a netlink attribute.
fn attr(to: &mut Vec<u8>, kind: u16, value: &[u8]) {
    to.extend_from_slice(&((4 + value.len()) as u16).to_ne_bytes());
    to.extend_from_slice(&kind.to_ne_bytes());
    to.extend_from_slice(value);
    to.resize(to.len().next_multiple_of(4), 0);
}

/// Sends one rtnetlink request and waits until it is acknowledged.
fn netlink(kind: u16, flags: u16, body: &[u8]) -> io::Result<()> {
    // SAFETY: plain system call.
    let fd = owned(unsafe { libc::socket(libc::AF_NETLINK, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0) }, "netlink")?;
    let mut m = ((16 + body.len()) as u32).to_ne_bytes().to_vec();
    m.extend_from_slice(&kind.to_ne_bytes());
    const REQUEST_ACK: u16 = 1 | 4;
    m.extend_from_slice(&(flags | REQUEST_ACK).to_ne_bytes());
    m.extend_from_slice(&[0; 8]);
    m.extend_from_slice(body);
    rustix::io::write(&fd, &m)?;
    let mut answer = [0; 4096];
    let n = rustix::io::read(&fd, &mut answer)?;
    if n < 20 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    match i32::from_ne_bytes([answer[16], answer[17], answer[18], answer[19]]) {
        0 => Ok(()),
        e => Err(io::Error::from_raw_os_error(-e)),
    }
}

fn octets(ip: &IpNet) -> (u8, Vec<u8>) {
    match ip.addr {
        IpAddr::V4(a) => (libc::AF_INET as u8, a.octets().to_vec()),
        IpAddr::V6(a) => (libc::AF_INET6 as u8, a.octets().to_vec()),
    }
}

fn add_address(ip: &IpNet, link: i32) -> io::Result<()> {
    let (family, bytes) = octets(ip);
    const NODAD: u8 = 2;
    let mut m = vec![family, ip.prefix, NODAD, 0];
    m.extend_from_slice(&link.to_ne_bytes());
    attr(&mut m, 2, &bytes);
    attr(&mut m, 1, &bytes);
    netlink(libc::RTM_NEWADDR, 0x400 | 0x200, &m)
}

/// The routing table for packets from an interface's addresses; the first interface has the main one. Numbers up to 255
/// may have other uses.
fn table(number: usize) -> u32 {
    const MAIN: u32 = 254;
    if number == 0 { MAIN } else { 1000 + number as u32 }
}

/// The message of a route or a rule: a `struct rtmsg` or `struct fib_rule_hdr`, which are alike, and the table.
fn route(family: u8, source_bits: u8, table: u32, [protocol, scope, kind]: [u8; 3]) -> Vec<u8> {
    const TABLE: u16 = 15;
    let mut m = vec![family, 0, source_bits, 0, 0, protocol, scope, kind, 0, 0, 0, 0];
    attr(&mut m, TABLE, &table.to_ne_bytes());
    m
}

/// Adds a default route to the link. The group is one flat network, so all other addresses are on the link.
fn add_default_route(family: u8, link: i32, table: u32) -> io::Result<()> {
    const BOOT: u8 = 3;
    const LINK_SCOPE: u8 = 253;
    const UNICAST: u8 = 1;
    let mut m = route(family, 0, table, [BOOT, LINK_SCOPE, UNICAST]);
    attr(&mut m, 4, &link.to_ne_bytes());
    netlink(libc::RTM_NEWROUTE, 0x400 | 0x200, &m)
}

/// Has packets that an address sends go by a routing table.
fn add_rule(ip: &IpNet, table: u32) -> io::Result<()> {
    const TO_TABLE: u8 = 1;
    const SOURCE: u16 = 2;
    let (family, bytes) = octets(ip);
    let mut m = route(family, bytes.len() as u8 * 8, table, [0, 0, TO_TABLE]);
    attr(&mut m, SOURCE, &bytes);
    netlink(libc::RTM_NEWRULE, 0x400 | 0x200, &m)
}

/// Sets up lo and the interfaces in the current network namespace. `default_route`: packets to all addresses leave by
/// the first one. Returns the descriptors that carry the interfaces' frames, and one more that keeps the namespace in
/// existence.
///
/// # Errors
/// A step fails.
pub(crate) fn set_up(interfaces: &[Interface<'_>], default_route: bool) -> io::Result<Vec<OwnedFd>> {
    let ctl = control()?;
    up(&ctl, "lo")?;
    if interfaces.len() > 1 {
        // All are in one network. Each answers for its own addresses, and asks from them.
        for (file, value) in [("arp_ignore", "1"), ("arp_announce", "2")] {
            let path = format!("/proc/sys/net/ipv4/conf/all/{file}");
            std::fs::write(&path, value).map_err(|e| io::Error::new(e.kind(), format!("{path}: {e}")))?;
        }
    }
    let mut made = Vec::new();
    for (number, interface) in interfaces.iter().enumerate() {
        made.push(add_interface(&ctl, number, interface, number > 0 || default_route)?);
    }
    made.push(ctl);
    Ok(made)
}

fn add_interface(
    ctl: &OwnedFd,
    number: usize,
    &Interface { name, mac, mtu, ips }: &Interface<'_>,
    default_route: bool,
) -> io::Result<OwnedFd> {
    let fd = tap(name).or_else(|tap_error| {
        veth(ctl, name, &format!("uplink{number}")).map_err(|e| {
            io::Error::new(
                e.kind(),
                format!("no interface for the container: {tap_error}; {e}; use --net host to share the host's network"),
            )
        })
    })?;
    let mut r = ifreq(name);
    r.ifr_ifru.ifru_hwaddr.sa_family = libc::ARPHRD_ETHER;
    // SAFETY: the union's member for a hardware address was just begun to be filled.
    unsafe {
        for (d, s) in r.ifr_ifru.ifru_hwaddr.sa_data.iter_mut().zip(&mac) {
            *d = *s as libc::c_char;
        }
    }
    ioctl(ctl, libc::SIOCSIFHWADDR, &mut r, "setting the MAC")?;
    set_mtu(ctl, name, mtu)?;
    // The virtual layer assigns addresses, so there are no duplicates to detect.
    let _ = std::fs::write(format!("/proc/sys/net/ipv6/conf/{name}/accept_dad"), "0");
    up(ctl, name)?;
    let link = index(ctl, name)?;
    let table = table(number);
    for ip in ips {
        let of = |e: io::Error| io::Error::new(e.kind(), format!("address {ip}: {e}"));
        add_address(ip, link).map_err(of)?;
        if number > 0 {
            add_rule(ip, table).map_err(of)?;
        }
    }
    for family in [libc::AF_INET as u8, libc::AF_INET6 as u8] {
        if default_route && ips.iter().any(|ip| octets(ip).0 == family) {
            add_default_route(family, link, table)
                .map_err(|e| io::Error::new(e.kind(), format!("default route: {e}")))?;
        }
    }
    Ok(fd)
}

/// The address by which this machine reaches others.
///
/// # Errors
/// It has none.
pub(crate) fn own_address() -> io::Result<IpNet> {
    // Nothing is sent: connecting a socket only chooses a route. The addresses are for documents (RFC 5737, RFC 3849).
    let of = |from: &str, to: &str| {
        let socket = UdpSocket::bind(from)?;
        socket.connect(to)?;
        Ok::<_, io::Error>(socket.local_addr()?.ip())
    };
    let found = of("0.0.0.0:0", "192.0.2.1:1").or_else(|_| of("[::]:0", "[2001:db8::1]:1"));
    let found = found.ok().and_then(|ip| ip.to_string().parse().ok());
    found.ok_or_else(|| {
        io::Error::other("this machine has no route to others, so no own address; name one of an interface")
    })
}

/// The interface of this network namespace that has an address.
pub(crate) fn interface_of(addr: IpAddr) -> Option<String> {
    addresses().ok()?.into_iter().find_map(|(name, has)| (has == addr).then_some(name))
}

/// All addresses of this thread's network namespace, each after the name of its interface.
///
/// # Errors
/// The kernel does not say.
pub(crate) fn addresses() -> io::Result<Vec<(String, IpAddr)>> {
    let mut list: *mut libc::ifaddrs = std::ptr::null_mut();
    // SAFETY: room for the list.
    check(unsafe { libc::getifaddrs(&mut list) }, "addresses of interfaces")?;
    let mut found = Vec::new();
    let mut at = list;
    // SAFETY: the list ends with NULL; an entry's address is NULL or as long as its family's; its name is a string.
    unsafe {
        while let Some(i) = at.as_ref() {
            at = i.ifa_next;
            let has: IpAddr = match i.ifa_addr.as_ref().map(|a| i32::from(a.sa_family)) {
                Some(libc::AF_INET) => {
                    let v4 = i.ifa_addr.cast::<libc::sockaddr_in>().read_unaligned();
                    Ipv4Addr::from(u32::from_be(v4.sin_addr.s_addr)).into()
                }
                Some(libc::AF_INET6) => {
                    let v6 = i.ifa_addr.cast::<libc::sockaddr_in6>().read_unaligned();
                    Ipv6Addr::from(v6.sin6_addr.s6_addr).into()
                }
                _ => continue,
            };
            found.push((std::ffi::CStr::from_ptr(i.ifa_name).to_string_lossy().into_owned(), has));
        }
        libc::freeifaddrs(list);
    }
    Ok(found)
}

/// Whether an address holds for one link only.
pub(crate) fn is_link_local(addr: IpAddr) -> bool {
    match addr {
        IpAddr::V4(v4) => v4.is_link_local(),
        IpAddr::V6(v6) => vrnic::is_link_local(v6),
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn loopback_has_its_address() {
        assert_eq!(super::interface_of("127.0.0.1".parse().unwrap()).as_deref(), Some("lo"));
        assert_eq!(super::interface_of("192.0.2.77".parse().unwrap()), None);
    }
}
