//! A port of an address that the workers of all groups share, and by which socket the kernel gives each packet to its worker.
//!
//! Sockets with SO_REUSEPORT stand in an array of the kernel, and a BPF program says the index of the one that gets a packet
//! ([`crate::steer`]). A new socket is the last; when one leaves, the last one takes its place (net/core/sock_reuseport.c). A lane
//! does the same in an array of its own. A socket stays while anybody has it open. So a worker that dies changes no index, since the
//! supervisor has duplicates of its sockets, and a supervisor that dies changes none, since its own socket is always the last.
//!
//! The program is attached through that own socket: those of workers are locked, so that no worker can attach another one.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, UdpSocket};

use crate::port::open::{self, Kind, Options};
use crate::steer::{self, Instruction};

/// Who has a socket.
enum Occupant {
    /// The supervisor.
    Own(UdpSocket),
    /// The worker of a group; this is the supervisor's duplicate.
    Group(Member),
}

/// A group's socket, and its inode, by which it is known whoever has it open.
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

/// Where the socket of each group stands.
pub(super) type Indices<'a> = HashMap<&'a str, u32>;

/// The sockets of a port of an address.
pub(super) struct Lane {
    pub kind: Kind,
    pub address: IpAddr,
    options: Options,
    order: Vec<Occupant>,
}

impl Lane {
    /// Claims the port.
    ///
    /// # Errors
    /// One line: somebody else has it, or it is no address of this host.
    pub fn claim(kind: Kind, address: IpAddr) -> io::Result<Lane> {
        let own = open::claim(kind, address)?;
        Ok(Lane { kind, address, options: Options::default(), order: vec![Occupant::Own(own)] })
    }

    /// A lane of a supervisor that is gone, with the sockets of its workers in the order in which the kernel has them.
    pub fn adopt(kind: Kind, address: IpAddr, options: Options, members: Vec<Member>) -> Lane {
        let order = members.into_iter().map(Occupant::Group).collect();
        Lane { kind, address, options, order }
    }

    /// The groups' sockets, in the kernel's order.
    pub fn members(&self) -> impl Iterator<Item = &Member> {
        self.order.iter().filter_map(|o| if let Occupant::Group(m) = o { Some(m) } else { None })
    }

    /// Gives these options to the supervisor's socket, and to those that are made from now on.
    ///
    /// # Errors
    /// Marks take a privilege.
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

    /// Makes a socket for a group. [`Lane::steer`] is to follow.
    ///
    /// # Errors
    /// Those of sockets.
    pub fn enter(&mut self, group: &str) -> io::Result<()> {
        let udp = open::share(self.kind, self.address, self.options)?;
        // If this fails, the socket is the last, and moves none when it is closed.
        open::lock_filter(&udp)?;
        self.order.push(Occupant::Group(Member::new(group, udp)?));
        Ok(())
    }

    /// Takes a group's socket out, whoever has it open. [`Lane::steer`] is to follow.
    pub fn leave(&mut self, group: &str) {
        if let Some(at) = self.order.iter().position(|o| matches!(o, Occupant::Group(m) if m.group == group)) {
            self.remove(at);
        }
    }

    fn remove(&mut self, at: usize) {
        let (Occupant::Own(udp) | Occupant::Group(Member { udp, .. })) = self.order.swap_remove(at);
        open::depart(&udp);
    }

    /// Puts a program in force. It is made by a function that is told the index of each group's socket and of the supervisor's.
    ///
    /// # Errors
    /// Those of sockets and programs; the program is then the old one.
    pub fn steer(&mut self, program: impl FnOnce(&Indices<'_>, u32) -> Vec<Instruction>) -> io::Result<()> {
        if self.order.iter().all(|o| matches!(o, Occupant::Own(_))) && !self.order.is_empty() {
            // Nobody shares the port, so there is nothing to steer.
            return Ok(());
        }
        if let Some(at) = self.order.iter().position(|o| matches!(o, Occupant::Own(_))) {
            self.remove(at);
        }
        let own = open::share(self.kind, self.address, self.options)?;
        if self.kind == Kind::Roce {
            steer::attach(&own, libc::SO_ATTACH_FILTER, &[steer::end(0)])?;
        }
        let index = self.order.len() as u32;
        let groups = self.order.iter().zip(0..).filter_map(|(o, i)| match o {
            Occupant::Group(m) => Some((m.group.as_str(), i)),
            Occupant::Own(_) => None,
        });
        let program = program(&groups.collect(), index);
        let attached = steer::attach(&own, libc::SO_ATTACH_REUSEPORT_CBPF, &program);
        self.order.push(Occupant::Own(own));
        // On the port of RoCEv2 nothing is for the supervisor.
        if self.kind == Kind::Roce && self.order.len() > 1 {
            self.remove(index as usize);
        }
        attached
    }
}
