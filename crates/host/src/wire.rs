//! The network to other hosts as the control thread sees it: addresses, MTU, and the peers file.

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::inotify;
use unirdma_formats::mtu_bytes;
use unirdma_formats::wire::{ICRC_BYTES, MAX_HEADER_BYTES};
use unirdma_rnic::MAX_OUTER_BYTES;

use crate::WireConfig;
use crate::faults::FaultyPort;
use crate::firewall::{self, Firewall};
use crate::peers::{self, Peers};
use crate::port::{PacketPort, Port, UdpPort};
use crate::tunnel::{TUNNEL_BYTES, Tunnel};
use crate::vrnic;

/// The state of the network.
pub(crate) struct Wire {
    addresses: Vec<IpAddr>,
    file: PathBuf,
    peers: Peers,
    error: Option<String>,
    mtu_code: u8,
    net_mtu: u32,
    congestion_control: bool,
    changes: OwnedFd,
    firewall: Option<Firewall>,
}

impl Wire {
    /// Opens the port and the tunnel, and reads the file.
    ///
    /// # Errors
    /// One line: an address, the port or the MTU does not fit this host, or the file is bad.
    pub fn open(c: &WireConfig, dir: &Path) -> io::Result<(Box<dyn Port>, Tunnel, Wire)> {
        let mut port = UdpPort::open(&c.addresses, c.icrc)?;
        let tunnel = Tunnel::open(&c.addresses)?;
        port.encapsulate_by(&c.addresses, &tunnel.sockets)?;
        if c.firewall {
            port.mark_packets(firewall::MARK).map_err(|e| {
                let text = format!("--firewall marks what this host sends ({e}): run as root, or with CAP_NET_ADMIN");
                io::Error::new(e.kind(), text)
            })?;
        }
        let (mut fits, mut net_mtu) = (u32::MAX, vrnic::NET_MTU);
        for &a in &c.addresses {
            let mtu = interface_mtu(a)?;
            if let Some(wanted) = c.mtu.filter(|&m| m + overhead(a) > mtu) {
                let text = format!(
                    "--mtu {wanted} and its headers take {} bytes, but the interface of {a} has an MTU of {mtu}; raise that or choose a smaller one",
                    wanted + overhead(a)
                );
                return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
            }
            net_mtu = net_mtu.min(mtu.saturating_sub(TUNNEL_BYTES));
            fits = fits.min(mtu.saturating_sub(overhead(a)));
        }
        let limit = c.mtu.unwrap_or(fits);
        let mtu_code = (1..=5).rev().find(|&code| mtu_bytes(code).is_some_and(|b| b <= limit)).ok_or_else(|| {
            io::Error::new(
                io::ErrorKind::InvalidInput,
                "the interface's MTU is too small for RoCEv2 (256 bytes and headers)",
            )
        })?;
        let changes = inotify::init(inotify::CreateFlags::CLOEXEC | inotify::CreateFlags::NONBLOCK)?;
        // The directory: editors replace a file by another.
        let watched = c.peers.parent().filter(|d| !d.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let events = inotify::WatchFlags::CLOSE_WRITE | inotify::WatchFlags::MOVED_TO;
        inotify::add_watch(&changes, watched, events).map_err(|e| {
            io::Error::new(io::Error::from(e).kind(), format!("cannot watch {}: {e}", watched.display()))
        })?;
        let mut wire = Wire {
            addresses: c.addresses.clone(),
            file: c.peers.clone(),
            peers: Peers::default(),
            error: None,
            mtu_code,
            net_mtu,
            congestion_control: c.congestion_control,
            changes,
            firewall: None,
        };
        wire.peers = read(&c.peers, &c.addresses).map_err(|e| io::Error::new(io::ErrorKind::InvalidInput, e))?;
        if c.firewall {
            wire.firewall = Some(Firewall::start(dir, &c.addresses, &wire.peers.hosts())?);
        }
        let port: Box<dyn Port> =
            if c.full_icrc { Box::new(PacketPort::open(port, &c.addresses)?) } else { Box::new(port) };
        Ok(match c.faults {
            Some(percent) => (Box::new(FaultyPort::new(port, percent, 1)), tunnel, wire),
            None => (port, tunnel, wire),
        })
    }

    /// What becomes readable when the file may have changed.
    pub fn changes(&self) -> BorrowedFd<'_> {
        self.changes.as_fd()
    }

    /// Reads the file again; true if other peers are in force now. A bad file changes nothing but the error.
    pub fn reload(&mut self) -> bool {
        let mut events = [0; 4096];
        while rustix::io::read(&self.changes, &mut events[..]).is_ok_and(|n| n > 0) {}
        match read(&self.file, &self.addresses) {
            Ok(p) => {
                self.error = None;
                let changed = p != self.peers;
                if let Some(f) = self.firewall.as_ref().filter(|_| changed) {
                    f.set_peers(p.hosts());
                }
                self.peers = p;
                changed
            }
            Err(e) => {
                if self.error.as_ref() != Some(&e) {
                    tracing::warn!("{e}; the peers as they were stay in force");
                }
                self.error = Some(e);
                false
            }
        }
    }

    /// The peers in force.
    pub fn peers(&self) -> &Peers {
        &self.peers
    }
    /// Why the file as it is now is not in force.
    pub fn error(&self) -> Option<&str> {
        self.error.as_deref()
    }
    /// This host's addresses.
    pub fn addresses(&self) -> &[IpAddr] {
        &self.addresses
    }
    /// The file.
    pub fn file(&self) -> &Path {
        &self.file
    }
    /// MTU of the containers' interfaces: their frames go through the tunnel whole.
    pub fn net_mtu(&self) -> u32 {
        self.net_mtu
    }
    /// The firewall, if it was asked for.
    pub fn firewall(&self) -> Option<&Firewall> {
        self.firewall.as_ref()
    }
    /// Heed losses and ECN marks.
    pub fn congestion_control(&self) -> bool {
        self.congestion_control
    }
    /// Largest path MTU as a code.
    pub fn mtu_code(&self) -> u8 {
        self.mtu_code
    }
    /// Largest path MTU, bytes.
    pub fn mtu(&self) -> u32 {
        mtu_bytes(self.mtu_code).unwrap_or(256)
    }
}

/// Reads a peers file for a host with these addresses.
pub(crate) fn read(file: &Path, addresses: &[IpAddr]) -> Result<Peers, String> {
    let name = file.display();
    let text = match std::fs::metadata(file) {
        Ok(m) if m.len() > peers::MAX_BYTES => Err(io::Error::other("too long")),
        Ok(_) => std::fs::read_to_string(file),
        Err(e) => Err(e),
    };
    let text = text.map_err(|e| format!("peers file {name}: {e}"))?;
    Peers::parse(&text, addresses).map_err(|e| format!("peers file {name}, {e}"))
}

/// Bytes that headers and ICRC add to a payload, at most: those of a datagram inside VXLAN.
fn overhead(a: IpAddr) -> u32 {
    let ip = if a.is_ipv4() { 20 } else { 40 };
    ip + 8 + (MAX_OUTER_BYTES + MAX_HEADER_BYTES + ICRC_BYTES) as u32
}

/// MTU of the interface that has an address.
fn interface_mtu(a: IpAddr) -> io::Result<u32> {
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
            // Every 127.x.y.z is the loopback interface's.
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
