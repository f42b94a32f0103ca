//! The interfaces of this host: which one has an address, and its MTU.

use std::io;
use std::net::IpAddr;

/// MTU of the interface that has an address.
pub(super) fn interface_mtu(a: IpAddr) -> io::Result<u32> {
    let name = interface_of(a)
        .ok_or_else(|| io::Error::new(io::ErrorKind::AddrNotAvailable, format!("no interface has the address {a}")))?;
    let ask = || -> io::Result<u32> {
        let fd = rustix::net::socket(rustix::net::AddressFamily::INET, rustix::net::SocketType::DGRAM, None)?;
        // SAFETY: all zero is a valid ifreq.
        let mut r: libc::ifreq = unsafe { std::mem::zeroed() };
        for (d, s) in r.ifr_name.iter_mut().zip(name.bytes()) {
            *d = s as libc::c_char;
        }
        // SAFETY: the request reads and writes one ifreq.
        let ok = unsafe {
            libc::ioctl(std::os::fd::AsRawFd::as_raw_fd(&fd), libc::SIOCGIFMTU as _, std::ptr::from_mut(&mut r))
        };
        if ok < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: SIOCGIFMTU has set this member.
        Ok(unsafe { r.ifr_ifru.ifru_mtu } as u32)
    };
    ask().map_err(|e| io::Error::new(e.kind(), format!("MTU of {name}: {e}")))
}

/// Index of the interface that has an address; 0, which leaves the choice to the kernel, if there is none.
pub(crate) fn interface_index(a: IpAddr) -> u32 {
    let name = interface_of(a).and_then(|n| std::ffi::CString::new(n).ok());
    // SAFETY: a string that ends with zero.
    name.map_or(0, |n| unsafe { libc::if_nametoindex(n.as_ptr()) })
}

fn interface_of(a: IpAddr) -> Option<String> {
    let mut list = std::ptr::null_mut();
    // SAFETY: getifaddrs makes a list that is valid until freeifaddrs; names and addresses in it are too.
    unsafe {
        if libc::getifaddrs(&mut list) != 0 {
            return None;
        }
        let mut found = None;
        let mut at = list;
        while let Some(i) = at.as_ref() {
            let ip = i.ifa_addr.as_ref().and_then(|s| match i32::from(s.sa_family) {
                libc::AF_INET => {
                    let v4 = i.ifa_addr.cast::<libc::sockaddr_in>().read_unaligned();
                    Some(IpAddr::from(v4.sin_addr.s_addr.to_ne_bytes()))
                }
                libc::AF_INET6 => {
                    Some(IpAddr::from(i.ifa_addr.cast::<libc::sockaddr_in6>().read_unaligned().sin6_addr.s6_addr))
                }
                _ => None,
            });
            // Every address 127.x.y.z belongs to the loopback interface.
            let loopback = |b: IpAddr| a.is_loopback() && b.is_loopback() && a.is_ipv4() == b.is_ipv4();
            if ip.is_some_and(|b| b == a || loopback(b)) {
                found = Some(std::ffi::CStr::from_ptr(i.ifa_name).to_string_lossy().into_owned());
                break;
            }
            at = i.ifa_next;
        }
        libc::freeifaddrs(list);
        found
    }
}
