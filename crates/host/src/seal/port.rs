//! Sealing at the port, by whoever has it: RoCEv2 packets, and datagrams that leave by the tunnel.

use std::cell::Cell;
use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;

use unirdma_formats::wire::ICRC_BYTES;

use super::board::Board;
use super::session::{Channel, Receiver, Refusal, Sender, Session, index_of};
use super::{Complaint, kind};

/// The port's part of a session.
struct Link {
    number: u64,
    index: [u8; 4],
    here: IpAddr,
    roce: (Sender, Receiver),
    datagrams: Sender,
}

impl Link {
    fn new(s: &Session) -> Option<Link> {
        let roce = (s.sender(Channel::Roce)?, s.receiver(Channel::Roce)?);
        let datagrams = s.sender(Channel::Datagrams)?;
        Some(Link { number: s.number, index: Session::index(&s.own), here: s.here, roce, datagrams })
    }
}

/// The sessions with a host.
#[derive(Default)]
struct Links {
    all: Vec<Link>,
    /// Place of the one that is sent with.
    send: Option<usize>,
}

/// All sessions, as the port has them.
pub(crate) struct Seals {
    board: Arc<Board>,
    group: String,
    /// [`Board::changes`] when they were read.
    seen: u64,
    /// Hosts of the group, by their addresses; none without a secret.
    hosts: Vec<(IpAddr, Links)>,
    /// Place of the one that was looked for last.
    recent: Cell<usize>,
}

impl Seals {
    /// Sessions that are, and will be, on the board.
    pub fn new(board: Arc<Board>, group: &str) -> Seals {
        Seals { board, group: group.into(), seen: 0, hosts: Vec::new(), recent: Cell::new(0) }
    }

    /// Takes over what is new on the board. If nothing is, this is one look at a number.
    pub fn refresh(&mut self) {
        let changes = self.board.changes();
        if changes == self.seen {
            return;
        }
        let mut before: HashMap<IpAddr, Links> = std::mem::take(&mut self.hosts).into_iter().collect();
        for (host, way) in self.board.read() {
            let mut had = before.remove(&host).unwrap_or_default().all;
            let link = |s: &Arc<Session>| {
                let at = had.iter().position(|l| l.number == s.number);
                at.map(|at| had.swap_remove(at)).or_else(|| Link::new(s))
            };
            let all: Vec<Link> = way.sessions.iter().filter_map(link).collect();
            let send = all.iter().position(|l| Some(l.number) == way.send);
            self.hosts.push((host, Links { all, send }));
        }
        self.hosts.sort_unstable_by_key(|h| h.0);
        self.seen = changes;
    }

    fn find(&self, host: IpAddr) -> Option<usize> {
        if self.hosts.get(self.recent.get()).is_some_and(|h| h.0 == host) {
            return Some(self.recent.get());
        }
        let at = self.hosts.binary_search_by_key(&host, |h| h.0).ok()?;
        self.recent.set(at);
        Some(at)
    }

    /// True if packets to a host can be sealed.
    pub fn reaches(&self, to: IpAddr) -> bool {
        self.find(to).is_some_and(|at| self.hosts[at].1.send.is_some())
    }

    /// What seals RoCEv2 packets to a host, or datagrams for the tunnel.
    pub fn sender(&mut self, to: IpAddr, tunnel: bool) -> Option<&mut Sender> {
        let at = self.find(to)?;
        let links = &mut self.hosts[at].1;
        let link = links.all.get_mut(links.send?)?;
        Some(if tunnel { &mut link.datagrams } else { &mut link.roce.0 })
    }

    /// What opens the packets of a host, if they are taken sealed only: the host is one of the group's, and the group has a secret.
    /// That includes sessions of which the host has heard since the port was asked for packets.
    pub fn opener(&mut self, from: IpAddr) -> Option<Opener<'_>> {
        self.refresh();
        if self.hosts.is_empty() {
            return None;
        }
        let at = self.find(from)?;
        Some(Opener { from, links: &mut self.hosts[at].1.all, board: &self.board, group: &self.group })
    }
}

/// What opens the packets of a host.
pub(crate) struct Opener<'s> {
    from: IpAddr,
    links: &'s mut [Link],
    board: &'s Board,
    group: &'s str,
}

impl Opener<'_> {
    /// Opens a RoCEv2 packet that came to `to`, and cuts its ICRC off. `None` if it is dropped, and counted; `plain` says of one that is of
    /// no session whether it is right as a packet without a secret.
    pub fn open<'a>(
        &mut self,
        to: IpAddr,
        packet: &'a mut [u8],
        plain: impl FnOnce(&[u8]) -> bool,
    ) -> Option<&'a [u8]> {
        let index = index_of(packet);
        let why = match self.links.iter_mut().find(|l| Some(l.index) == index && l.here == to) {
            None if plain(packet) => {
                self.board.complain(self.from, self.group, Complaint::Unsealed);
                Refusal::Unknown
            }
            None => Refusal::WrongTag,
            Some(link) => match link.roce.1.open(packet) {
                Ok(opened) => return opened.split_last_chunk::<ICRC_BYTES>().map(|s| s.0),
                Err(why) => why,
            },
        };
        self.board.drop_packet(why);
        None
    }
}

/// Says in a datagram's VXLAN header that it is sealed.
pub(crate) fn mark_datagram(packet: &mut [u8]) {
    packet.get_mut(kind::AT).into_iter().for_each(|b| *b = kind::DATAGRAM);
}
