//! Socket addresses.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use unirdma_abi as abi;

/// Reads a socket address of a program; NULL means no address.
///
/// # Safety
/// `a` is NULL or points to an address as long as its family's.
pub(crate) unsafe fn read(a: *const libc::sockaddr) -> Result<abi::CmAddr, i32> {
    if a.is_null() {
        return Ok(abi::CmAddr::default());
    }
    // SAFETY: by the contract; addresses may lie at any place.
    unsafe {
        match i32::from((&raw const (*a).sa_family).read_unaligned()) {
            libc::AF_INET => {
                let v4 = a.cast::<libc::sockaddr_in>().read_unaligned();
                let ip = Ipv4Addr::from(u32::from_be(v4.sin_addr.s_addr)).to_ipv6_mapped().octets();
                Ok(abi::CmAddr { ip, port: u16::from_be(v4.sin_port), family: 4, ..Default::default() })
            }
            libc::AF_INET6 => {
                let v6 = a.cast::<libc::sockaddr_in6>().read_unaligned();
                let ip = v6.sin6_addr.s6_addr;
                Ok(abi::CmAddr { ip, port: u16::from_be(v6.sin6_port), family: 6, ..Default::default() })
            }
            libc::AF_UNSPEC => Ok(abi::CmAddr::default()),
            _ => Err(libc::EAFNOSUPPORT),
        }
    }
}

/// Writes an address into a program's storage; nothing if there is no address.
pub(crate) fn write(a: &abi::CmAddr, to: &mut libc::sockaddr_storage) {
    let place = std::ptr::from_mut(to);
    let v6 = Ipv6Addr::from(a.ip);
    // SAFETY: the storage has room for each kind of address, and is aligned for it.
    unsafe {
        match a.family {
            4 => {
                let mut v4: libc::sockaddr_in = std::mem::zeroed();
                v4.sin_family = libc::AF_INET as u16;
                v4.sin_port = a.port.to_be();
                v4.sin_addr.s_addr = u32::from(v6.to_ipv4_mapped().unwrap_or(Ipv4Addr::UNSPECIFIED)).to_be();
                place.cast::<libc::sockaddr_in>().write(v4);
            }
            6 => {
                let mut out: libc::sockaddr_in6 = std::mem::zeroed();
                out.sin6_family = libc::AF_INET6 as u16;
                out.sin6_port = a.port.to_be();
                out.sin6_addr.s6_addr = a.ip;
                place.cast::<libc::sockaddr_in6>().write(out);
            }
            _ => {}
        }
    }
}

/// The port of an address, in network order.
pub(super) fn port(a: &libc::sockaddr_storage) -> u16 {
    // SAFETY: the storage holds an address of its family, or zeroes.
    unsafe { read(std::ptr::from_ref(a).cast()) }.map_or(0, |a| a.port.to_be())
}

/// The GID of an address.
pub(crate) fn gid(a: &abi::CmAddr) -> [u8; 16] {
    let v6 = Ipv6Addr::from(a.ip);
    unirdma_formats::Gid::from_ip(v6.to_ipv4_mapped().map_or(IpAddr::V6(v6), IpAddr::V4)).0
}
