//! Sealing at the port: RoCEv2 packets, and datagrams that leave by the tunnel. Used by the thread that holds the port.

use std::cell::Cell;
use std::collections::{BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::Arc;

use unirdma_formats::wire::ICRC_BYTES;

use super::session::{Channel, Receiver, Refusal, Sender, Session, index_of};
use super::session_table::SessionTable;
use super::{Complaint, End, kind};

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

/// The sessions with one other end.
#[derive(Default)]
struct Links {
    all: Vec<Link>,
    /// Index of the session with which packets are sealed.
    send: Option<usize>,
    /// Name of its group, if that is another one.
    with: Option<Arc<str>>,
}

/// All sessions, as the port uses them.
pub(crate) struct Seals {
    table: Arc<SessionTable>,
    group: String,
    /// [`SessionTable::changes`] when the sessions were read.
    seen: u64,
    /// The ends whose packets are sealed, sorted. Empty without a secret.
    ends: Vec<(End, Links)>,
    /// Hosts whose packets need not be sealed, since some of their groups have no secret.
    plain: BTreeSet<IpAddr>,
    /// Index of the end that was looked up last.
    recent: Cell<usize>,
}

impl Seals {
    /// Takes present and future sessions from the table.
    pub fn new(table: Arc<SessionTable>, group: &str) -> Seals {
        Seals { table, group: group.into(), seen: 0, ends: Vec::new(), plain: BTreeSet::new(), recent: Cell::new(0) }
    }

    /// Reads the table if it has changed. If not, this costs one load of a number.
    pub fn refresh(&mut self) {
        let changes = self.table.changes();
        if changes == self.seen {
            return;
        }
        let mut before: HashMap<End, Links> = std::mem::take(&mut self.ends).into_iter().collect();
        let published = self.table.read();
        for (end, way) in published.ways {
            let mut had = before.remove(&end).unwrap_or_default().all;
            let link = |s: &Arc<Session>| {
                let at = had.iter().position(|l| l.number == s.number);
                at.map(|at| had.swap_remove(at)).or_else(|| Link::new(s))
            };
            let all: Vec<Link> = way.sessions.iter().filter_map(link).collect();
            let send = all.iter().position(|l| Some(l.number) == way.send);
            self.ends.push((end, Links { all, send, with: way.with }));
        }
        self.ends.sort_unstable_by_key(|e| e.0);
        (self.plain, self.seen) = (published.plain, changes);
    }

    fn find(&self, to: End) -> Option<usize> {
        if self.ends.get(self.recent.get()).is_some_and(|e| e.0 == to) {
            return Some(self.recent.get());
        }
        let at = self.ends.binary_search_by_key(&to, |e| e.0).ok()?;
        self.recent.set(at);
        Some(at)
    }

    /// True if packets to the other end can be sealed.
    pub fn reaches(&self, to: End) -> bool {
        self.find(to).is_some_and(|at| self.ends[at].1.send.is_some())
    }

    /// The sender that seals RoCEv2 packets to the other end or, with `tunnel`, datagrams for the tunnel.
    pub fn sender(&mut self, to: End, tunnel: bool) -> Option<&mut Sender> {
        let at = self.find(to)?;
        let links = &mut self.ends[at].1;
        let link = links.all.get_mut(links.send?)?;
        Some(if tunnel { &mut link.datagrams } else { &mut link.roce.0 })
    }

    /// The opener of a host's packets, if any of its groups seals them. It includes sessions that were published after
    /// the port was asked for packets.
    pub fn opener(&mut self, from: IpAddr) -> Option<Opener<'_>> {
        self.refresh();
        if self.ends.is_empty() {
            return None;
        }
        let first = self.ends.partition_point(|e| e.0.0 < from);
        let count = self.ends[first..].iter().take_while(|e| e.0.0 == from).count();
        let ends = &mut self.ends[first..first + count];
        let plain = self.plain.contains(&from);
        (count > 0).then_some(Opener { from, ends, plain, table: &self.table, group: &self.group })
    }
}

/// Result of opening a packet. Its ICRC is removed.
pub(crate) enum Opened<'a> {
    /// Sealed by a host of the group with this number, or of this worker's own group.
    Sealed(Option<u32>, &'a [u8]),
    /// Not sealed.
    Plain(&'a [u8]),
    /// Not sealed, with a wrong ICRC.
    WrongIcrc,
    /// Dropped and counted.
    Dropped,
}

impl<'a> Opened<'a> {
    /// Handles a packet that need not be sealed. `plain` checks and removes its ICRC.
    pub fn unsealed(packet: &'a [u8], plain: impl FnOnce(&'a [u8]) -> Option<&'a [u8]>) -> Opened<'a> {
        plain(packet).map_or(Opened::WrongIcrc, Opened::Plain)
    }
}

/// Opens the packets of one host.
pub(crate) struct Opener<'s> {
    from: IpAddr,
    ends: &'s mut [(End, Links)],
    plain: bool,
    table: &'s SessionTable,
    group: &'s str,
}

impl Opener<'_> {
    /// Opens a RoCEv2 packet to address `to`. If it belongs to no session, `plain` checks and removes its ICRC.
    pub fn open<'a>(
        &mut self,
        to: IpAddr,
        packet: &'a mut [u8],
        plain: impl FnOnce(&'a [u8]) -> Option<&'a [u8]>,
    ) -> Opened<'a> {
        let index = index_of(packet);
        let mut links = self.ends.iter_mut().flat_map(|(end, l)| l.all.iter_mut().map(|l| (end.1, l)));
        let Some((group, link)) = links.find(|(_, l)| Some(l.index) == index && l.here == to) else {
            return self.unknown(packet, plain);
        };
        match link.roce.1.open(packet) {
            Ok(opened) => match opened.split_last_chunk::<ICRC_BYTES>() {
                Some((body, _)) => return Opened::Sealed(group, body),
                None => self.table.drop_packet(Refusal::WrongTag),
            },
            Err(why) => self.table.drop_packet(why),
        }
        Opened::Dropped
    }

    /// Handles a packet that belongs to no session.
    fn unknown<'a>(&self, packet: &'a [u8], plain: impl FnOnce(&'a [u8]) -> Option<&'a [u8]>) -> Opened<'a> {
        if self.plain {
            return Opened::unsealed(packet, plain);
        }
        if plain(packet).is_some() {
            let with = self.ends.first().and_then(|e| e.1.with.as_deref());
            self.table.complain(self.from, self.group, with, Complaint::Unsealed);
            self.table.drop_packet(Refusal::Unknown);
        } else {
            self.table.drop_packet(Refusal::WrongTag);
        }
        Opened::Dropped
    }
}

/// Marks a datagram as sealed in its VXLAN header.
pub(crate) fn mark_datagram(packet: &mut [u8]) {
    packet.get_mut(kind::AT).into_iter().for_each(|b| *b = kind::DATAGRAM);
}
