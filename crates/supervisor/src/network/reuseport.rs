//! A UDP port of an address, which the workers of all groups share. The kernel gives each packet to one of their
//! sockets.
//!
//! The kernel has sockets with SO_REUSEPORT in an array, and a BPF program returns the index of the socket that gets a
//! packet ([`super::bpf`]). A new socket is appended. When a socket is removed, the last one takes its place
//! (net/core/sock_reuseport.c). A [`ReuseportGroup`] has an array of its own with the same order. A socket is removed
//! only when no process has it open. So a worker that dies changes no index, since the supervisor has duplicates of its
//! sockets. A supervisor that dies changes none, since its own socket is always the last.
//!
//! The program is attached through the supervisor's own socket. Workers' sockets are locked, so that no worker can
//! attach another program.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, UdpSocket};

use super::bpf::{self, Instruction};
use super::open::{self, Kind, Options};

/// The owner of a socket.
enum Occupant {
    /// The supervisor.
    Own(UdpSocket),
    /// The worker of a group; this is the supervisor's duplicate.
    Group(Member),
}

/// A group's socket, and its inode, which identifies the socket in every process that has it open.
pub(super) struct Member {
    pub group: String,
    pub udp: UdpSocket,
    pub inode: u64,
}

impl Member {
    /// # Errors
    /// Those of `fstat(2)`.
    pub fn new(group: &str, udp: UdpSocket) -> io::Result<Self> {
        let inode = rustix::fs::fstat(&udp)?.st_ino;
        Ok(Member { group: group.into(), udp, inode })
    }
}

/// The index of each group's socket.
pub(super) type Indices<'a> = HashMap<&'a str, u32>;

/// The sockets of a port of an address.
pub(super) struct ReuseportGroup {
    pub kind: Kind,
    pub address: IpAddr,
    options: Options,
    order: Vec<Occupant>,
}

impl ReuseportGroup {
    /// Binds the port.
    ///
    /// # Errors
    /// One line: another program has the port, or the address does not belong to this host.
    pub fn claim(kind: Kind, address: IpAddr) -> io::Result<ReuseportGroup> {
        let own = open::claim(kind, address)?;
        Ok(ReuseportGroup { kind, address, options: Options::default(), order: vec![Occupant::Own(own)] })
    }

    /// A reuseport group of a supervisor that died, with the sockets of its workers in the kernel's order.
    pub fn adopt(kind: Kind, address: IpAddr, options: Options, members: Vec<Member>) -> ReuseportGroup {
        let order = members.into_iter().map(Occupant::Group).collect();
        ReuseportGroup { kind, address, options, order }
    }

    /// The groups' sockets, in the kernel's order.
    pub fn members(&self) -> impl Iterator<Item = &Member> {
        self.order.iter().filter_map(|o| if let Occupant::Group(m) = o { Some(m) } else { None })
    }

    /// Sets options of the supervisor's socket, and of sockets that are made later.
    ///
    /// # Errors
    /// Marks need a privilege.
    pub fn set_options(&mut self, options: Options) -> io::Result<()> {
        self.options = options;
        match (self.own(), options.mark) {
            (Some(own), Some(mark)) => open::mark(own, mark),
            _ => Ok(()),
        }
    }

    /// The supervisor's socket, if there is one.
    pub fn own(&self) -> Option<&UdpSocket> {
        self.order.iter().find_map(|o| if let Occupant::Own(udp) = o { Some(udp) } else { None })
    }

    /// The socket of a group.
    pub fn socket(&self, group: &str) -> Option<&UdpSocket> {
        self.members().find(|m| m.group == group).map(|m| &m.udp)
    }

    /// Makes a socket for a group. [`ReuseportGroup::steer`] must follow.
    ///
    /// # Errors
    /// Errors of sockets.
    pub fn enter(&mut self, group: &str) -> io::Result<()> {
        let udp = open::share(self.kind, self.address, self.options)?;
        // If this fails, the socket is the last one in the kernel's array, so closing it moves no other socket.
        open::lock_filter(&udp)?;
        self.order.push(Occupant::Group(Member::new(group, udp)?));
        Ok(())
    }

    /// Removes a group's socket, even if other processes have it open. [`ReuseportGroup::steer`] must follow.
    pub fn leave(&mut self, group: &str) {
        if let Some(at) = self.order.iter().position(|o| matches!(o, Occupant::Group(m) if m.group == group)) {
            self.remove(at);
        }
    }

    fn remove(&mut self, at: usize) {
        let (Occupant::Own(udp) | Occupant::Group(Member { udp, .. })) = self.order.swap_remove(at);
        open::depart(&udp);
    }

    /// Attaches a new program. `program` makes it from the index of each group's socket and the index of the
    /// supervisor's socket.
    ///
    /// # Errors
    /// Errors of sockets and programs. Then the old program stays.
    pub fn steer(&mut self, program: impl FnOnce(&Indices<'_>, u32) -> Vec<Instruction>) -> io::Result<()> {
        if self.order.iter().all(|o| matches!(o, Occupant::Own(_))) && !self.order.is_empty() {
            // Nobody shares the port, so no program is needed.
            return Ok(());
        }
        if let Some(at) = self.order.iter().position(|o| matches!(o, Occupant::Own(_))) {
            self.remove(at);
        }
        let own = open::share(self.kind, self.address, self.options)?;
        if self.kind == Kind::Roce {
            bpf::attach(&own, libc::SO_ATTACH_FILTER, &[bpf::end(0)])?;
        }
        let index = self.order.len() as u32;
        let groups = self.order.iter().zip(0..).filter_map(|(o, i)| match o {
            Occupant::Group(m) => Some((m.group.as_str(), i)),
            Occupant::Own(_) => None,
        });
        let program = program(&groups.collect(), index);
        let attached = bpf::attach(&own, libc::SO_ATTACH_REUSEPORT_CBPF, &program);
        self.order.push(Occupant::Own(own));
        // The supervisor receives nothing on the port of RoCEv2.
        if self.kind == Kind::Roce && self.order.len() > 1 {
            self.remove(index as usize);
        }
        attached
    }
}
