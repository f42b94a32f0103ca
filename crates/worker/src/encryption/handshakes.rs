//! Exchanges with all hosts of a group and of joined groups, and the tunnel's part of the resulting sessions.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use unirdma_device::now_ns;
use unirdma_formats::net::{VXLAN_BYTES, vxlan_source};
use unirdma_ipc::counters::{PairInfo, SealInfo};
use unirdma_ipc::secrets::{GroupSecrets, Secrets};

use super::handshake::{Draw, Exchange, HELLO_BYTES, Hello};
use super::session::{Channel, DRAWN_BYTES, Drawn, Named, Receiver, Refusal, Root, Sender, Session, index_of};
use super::session_table::{PublishedSessions, SessionEntry, SessionTable};
use super::{Complaint, End, kind};

/// Interval after which an unanswered message is repeated, and the longest interval, ns. It doubles each time.
const FIRST_REPEAT_NS: u64 = 50_000_000;
const LAST_REPEAT_NS: u64 = 5_000_000_000;

/// The group with its hosts, and its joined groups.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Around {
    pub name: String,
    pub vni: u32,
    /// Hosts of the group.
    pub hosts: BTreeSet<IpAddr>,
    /// The groups that rules join with it, by number. This host may be one of their hosts.
    pub joined: BTreeMap<u32, JoinedHosts>,
}

/// A group that rules join with this one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct JoinedHosts {
    pub name: String,
    pub hosts: BTreeSet<IpAddr>,
}

impl Around {
    /// The group itself (`None`) and its joined groups, with their hosts.
    fn groups(&self) -> impl Iterator<Item = (Option<u32>, &BTreeSet<IpAddr>)> {
        let joined = self.joined.iter().map(|(&vni, j)| (Some(vni), &j.hosts));
        [(None, &self.hosts)].into_iter().chain(joined)
    }

    /// Name of a joined group.
    fn name_of(&self, group: Option<u32>) -> Option<&str> {
        group.and_then(|vni| self.joined.get(&vni)).map(|j| j.name.as_str())
    }

    fn own(&self) -> Named<'_> {
        (self.vni, &self.name)
    }
}

/// The tunnel's part of a session.
struct Link {
    number: u64,
    index: [u8; 4],
    here: IpAddr,
    frames: (Sender, Receiver),
    datagrams: Receiver,
}

impl Link {
    fn new(s: &Session) -> Option<Link> {
        let frames = (s.sender(Channel::Frames)?, s.receiver(Channel::Frames)?);
        let datagrams = s.receiver(Channel::Datagrams)?;
        Some(Link { number: s.number, index: Session::index(&s.own), here: s.here, frames, datagrams })
    }
}

/// Another host of the group or of a joined group.
#[derive(Default)]
struct Peer {
    /// One exchange for each secret, in the order in which this host prefers to send with them.
    exchanges: Vec<Exchange>,
    links: Vec<Link>,
    /// Number of the session with which packets are sealed, and number of its secret.
    send: Option<u64>,
    secret: Option<u8>,
    /// When unanswered messages are repeated, and the interval after that. Messages of other hosts do not change these.
    due_ns: u64,
    repeat_ns: u64,
}

impl Peer {
    fn waits(&self) -> bool {
        self.exchanges.iter().any(Exchange::waits)
    }

    /// Makes sure that the peer soon gets a message.
    fn hurry(&mut self, now: u64) {
        self.repeat_ns = FIRST_REPEAT_NS;
        self.due_ns = self.due_ns.min(now + FIRST_REPEAT_NS);
    }

    /// Sends the messages that are due.
    fn say(&mut self, now: u64, mut out: impl FnMut(&[u8])) {
        if self.due_ns > now || !self.waits() {
            return;
        }
        self.repeat_ns = self.repeat_ns.clamp(FIRST_REPEAT_NS, LAST_REPEAT_NS);
        self.due_ns = now + self.repeat_ns;
        self.repeat_ns *= 2;
        self.exchanges.iter().filter(|e| e.waits()).filter_map(Exchange::message).for_each(|m| out(&m));
    }
}

struct Fresh(u64);

impl Draw for Fresh {
    fn number(&mut self) -> u64 {
        self.0 += 1;
        self.0
    }

    fn drawn(&mut self) -> Option<Drawn> {
        let mut drawn = [0; DRAWN_BYTES];
        getrandom::fill(&mut drawn).ok()?;
        // All zeros means that no number was received.
        (drawn != [0; DRAWN_BYTES]).then_some(drawn)
    }
}

/// The exchanges with all hosts of the group and of joined groups. Methods that send pass the messages to a function.
pub(crate) struct Handshakes {
    table: Arc<SessionTable>,
    /// This host's addresses. The first one of each family is used.
    own: Vec<IpAddr>,
    secrets: GroupSecrets,
    around: Around,
    roots: Vec<Arc<Root>>,
    /// The ends whose packets are sealed.
    peers: HashMap<End, Peer>,
    /// Sessions of this host with itself.
    itself: Vec<(IpAddr, Arc<Session>)>,
    fresh: Fresh,
}

impl Handshakes {
    /// Without secrets.
    pub fn new(table: Arc<SessionTable>, own: Vec<IpAddr>) -> Self {
        Handshakes {
            table,
            own,
            secrets: GroupSecrets::default(),
            around: Around::default(),
            roots: Vec::new(),
            peers: HashMap::new(),
            itself: Vec::new(),
            fresh: Fresh(0),
        }
    }

    /// True if packets within the group are sealed, or packets between it and group `group`.
    pub fn seals(&self, group: Option<u32>) -> bool {
        let pair = || self.around.name_of(group).is_some_and(|name| self.secrets.with.contains_key(name));
        self.secrets.own.is_some() || pair()
    }

    /// Numbers of the joined groups with which there is a secret.
    pub fn sealed_groups(&self) -> BTreeSet<u32> {
        self.around
            .joined
            .iter()
            .filter(|(_, j)| self.secrets.with.contains_key(&j.name))
            .map(|(&vni, _)| vni)
            .collect()
    }

    /// Replaces the secrets.
    pub fn set_secrets(&mut self, secrets: GroupSecrets, out: impl FnMut(&[u8], IpAddr)) {
        self.set(secrets, self.around.clone(), out);
    }

    /// Replaces the data about the group and its hosts.
    pub fn set_around(&mut self, around: Around, out: impl FnMut(&[u8], IpAddr)) {
        self.set(self.secrets.clone(), around, out);
    }

    /// Replaces secrets and hosts. Sessions that are still valid stay.
    fn set(&mut self, secrets: GroupSecrets, around: Around, mut out: impl FnMut(&[u8], IpAddr)) {
        if self.secrets == secrets && self.around == around {
            return;
        }
        (self.secrets, self.around) = (secrets, around);
        let (before, mut peers) = (std::mem::take(&mut self.roots), std::mem::take(&mut self.peers));
        let now = now_ns();
        for (group, hosts) in self.around.groups() {
            if !self.seals(group) {
                continue;
            }
            let other = group.zip(self.around.name_of(group));
            let of_group = self.secrets.of(other.map(|o| o.1));
            let root = |s| {
                let kept = before.iter().find(|r| r.is_of(s, self.around.own(), other)).cloned();
                kept.unwrap_or_else(|| Arc::new(Root::new(s, self.around.own(), other)))
            };
            let roots: Vec<Arc<Root>> = of_group.into_iter().flat_map(Secrets::by_preference).map(root).collect();
            for &there in hosts {
                let mut peer = peers.remove(&(there, group)).unwrap_or_default();
                let mut had = std::mem::take(&mut peer.exchanges);
                let here = self.own.iter().find(|a| a.is_ipv4() == there.is_ipv4()).copied();
                for (root, here) in roots.iter().filter_map(|r| Some((r, here?))) {
                    let at = had.iter().position(|e| e.is_of(root));
                    if at.is_none() {
                        (peer.due_ns, peer.repeat_ns) = (now, FIRST_REPEAT_NS);
                    }
                    let kept = at.map(|at| had.swap_remove(at));
                    let made = || Exchange::new(root.clone(), here, there, &mut self.fresh);
                    peer.exchanges.extend(kept.or_else(made));
                }
                self.peers.insert((there, group), peer);
            }
            self.roots.extend(roots);
        }
        self.meet_itself();
        self.publish();
        for (&(host, _), peer) in &mut self.peers {
            peer.say(now, |m| out(m, host));
        }
    }

    /// Makes sessions of this host with itself: packets between two of its vRNICs may be sent to its own addresses.
    fn meet_itself(&mut self) {
        let first = |f: &fn(&&IpAddr) -> bool| self.own.iter().find(f).copied();
        let families: [fn(&&IpAddr) -> bool; 2] = [|a| a.is_ipv4(), |a| a.is_ipv6()];
        let own: Vec<IpAddr> = families.iter().filter_map(first).collect();
        let Some(root) = self.secrets.own.as_ref().and(self.roots.first()).cloned() else {
            self.itself.clear();
            return;
        };
        if self.itself.iter().all(|(_, s)| Arc::ptr_eq(&s.root, &root)) && self.itself.len() == own.len() {
            return;
        }
        self.itself.clear();
        for here in own {
            let Some(drawn) = self.fresh.drawn() else { continue };
            let number = self.fresh.number();
            let session = Session { number, root: root.clone(), here, there: here, own: drawn, theirs: drawn };
            self.itself.push((here, Arc::new(session)));
        }
    }

    /// Publishes all sessions in the table, and makes the tunnel's part of each.
    fn publish(&mut self) {
        let mut published = PublishedSessions::default();
        let names: HashMap<u32, Arc<str>> =
            self.around.joined.iter().map(|(&vni, j)| (vni, Arc::from(j.name.as_str()))).collect();
        for (&end, peer) in &mut self.peers {
            let all = || peer.exchanges.iter().flat_map(Exchange::open);
            let sessions: Vec<Arc<Session>> = all().map(|o| o.session.clone()).collect();
            let sends = all().find(|o| o.sends).map(|o| &o.session);
            let (send, secret) = (sends.map(|s| s.number), sends.map(|s| s.root.id()));
            let mut had = std::mem::take(&mut peer.links);
            let link = |s: &Arc<Session>| {
                let at = had.iter().position(|l| l.number == s.number);
                at.map(|at| had.swap_remove(at)).or_else(|| Link::new(s))
            };
            peer.links = sessions.iter().filter_map(link).collect();
            (peer.send, peer.secret) = (send, secret);
            let with = end.1.and_then(|vni| names.get(&vni)).cloned();
            published.ways.push((end, SessionEntry { sessions, send, with }));
        }
        for (own, s) in &self.itself {
            published
                .ways
                .push(((*own, None), SessionEntry { sessions: vec![s.clone()], send: Some(s.number), with: None }));
        }
        let plain = self.around.groups().filter(|(group, _)| !self.seals(*group));
        published.plain = plain.flat_map(|(_, hosts)| hosts).copied().collect();
        if self.secrets.own.is_none() {
            published.plain.extend(&self.own);
        }
        self.table.publish(published);
    }

    /// When [`Handshakes::on_timer`] has to be called, on the monotonic clock, ns; `None`: never.
    pub fn timer(&self) -> Option<u64> {
        let due = |p: &Peer| match p.waits() {
            true => Some(p.due_ns),
            false => p.exchanges.iter().filter_map(Exchange::old_at_ns).min().map(|at| at.max(p.due_ns)),
        };
        self.peers.values().filter_map(due).min()
    }

    /// Repeats unanswered messages, and starts replacing old sessions.
    pub fn on_timer(&mut self, mut out: impl FnMut(&[u8], IpAddr)) {
        let now = now_ns();
        for (&(host, _), peer) in &mut self.peers {
            for e in peer.exchanges.iter_mut().filter(|e| e.old_at_ns().is_some_and(|at| now >= at)) {
                e.age(now, &mut self.fresh);
                // If the kernel gives no random bytes, this is tried again at `due_ns`.
                (peer.due_ns, peer.repeat_ns) =
                    if e.waits() { (now, FIRST_REPEAT_NS) } else { (now + LAST_REPEAT_NS, 0) };
            }
            peer.say(now, |m| out(m, host));
        }
    }

    /// Handles a message from a host. True if it was authenticated with a secret; then [`Handshakes::timer`] may have
    /// changed.
    pub fn on_message(&mut self, from: SocketAddr, packet: &[u8], mut out: impl FnMut(&[u8], IpAddr)) -> bool {
        let Handshakes { peers, fresh, table, around, .. } = self;
        let group = packet.first_chunk::<VXLAN_BYTES>().and_then(vxlan_source);
        let end: End = (from.ip(), group);
        let Some(peer) = peers.get_mut(&end) else { return false };
        let Some(id) = Hello::secret_of(packet) else {
            table.drop_packet(Refusal::WrongTag);
            return false;
        };
        let what = if peer.exchanges.is_empty() { Complaint::NoPair } else { Complaint::OtherSecret };
        let complain = || table.complain(end.0, &around.name, around.name_of(group), what);
        let Some(exchange) = peer.exchanges.iter_mut().find(|e| e.secret() == id) else {
            // While secrets change, one host may have more secrets than the other.
            if peer.send.is_none() {
                complain();
            }
            return false;
        };
        let now = now_ns();
        let Some(outcome) = exchange.on_message(packet, now, fresh) else {
            table.drop_packet(Refusal::WrongTag);
            if peer.send.is_none() {
                complain();
            }
            return false;
        };
        let message = exchange.message().filter(|_| outcome.answer);
        if peer.waits() {
            peer.hurry(now);
        }
        if outcome.changed {
            // Published before the other host is told.
            self.publish();
        }
        message.into_iter().for_each(|m: [u8; HELLO_BYTES]| out(&m, end.0));
        true
    }

    /// Opens a packet of the tunnel whose header has a kind; returns the original packet. `None` if it was dropped and
    /// counted.
    pub fn open<'a>(&mut self, from: End, to: IpAddr, packet: &'a mut [u8]) -> Option<&'a mut [u8]> {
        let opened = self.try_open(from, to, packet);
        if let Err(why) = opened {
            self.table.drop_packet(why);
            if why == Refusal::Unknown {
                let without_pair = self.peers.get(&from).is_some_and(|p| p.exchanges.is_empty());
                let what = if without_pair { Complaint::NoPair } else { Complaint::Unsealed };
                self.table.complain(from.0, &self.around.name, self.around.name_of(from.1), what);
            }
        }
        opened.ok()
    }

    fn try_open<'a>(&mut self, from: End, to: IpAddr, packet: &'a mut [u8]) -> Result<&'a mut [u8], Refusal> {
        let kind = packet[kind::AT];
        if !matches!(kind, kind::FRAME | kind::DATAGRAM) {
            return Err(Refusal::Unknown);
        }
        let index = index_of(packet).ok_or(Refusal::WrongTag)?;
        let peer = self.peers.get_mut(&from).ok_or(Refusal::WrongTag)?;
        let link = peer.links.iter_mut().find(|l| l.index == index && l.here == to).ok_or(Refusal::WrongTag)?;
        let receiver = if kind == kind::FRAME { &mut link.frames.1 } else { &mut link.datagrams };
        receiver.open(packet)
    }

    /// Seals a frame in its VXLAN packet for the other end. `packet` must end with room for the tail. False if there is
    /// no session.
    pub fn seal(&mut self, to: End, packet: &mut [u8]) -> bool {
        let Some(peer) = self.peers.get_mut(&to) else { return false };
        if peer.exchanges.is_empty() {
            self.table.complain(to.0, &self.around.name, self.around.name_of(to.1), Complaint::NoPair);
        }
        let Some(link) = peer.links.iter_mut().find(|l| Some(l.number) == peer.send) else { return false };
        packet[kind::AT] = kind::FRAME;
        link.frames.0.seal(packet);
        true
    }

    /// Logs that a sealed packet of this kind has arrived although there is no secret. A hello message is not counted
    /// as dropped, since its host only searches for hosts with the secret.
    pub fn complain_of_seal(&self, from: End, kind: u8) {
        if kind != kind::HELLO {
            self.table.drop_packet(Refusal::WrongTag);
        }
        self.table.complain(from.0, &self.around.name, self.around.name_of(from.1), Complaint::Sealed);
    }

    /// State of all secrets.
    pub fn info(&self) -> SealInfo {
        let joined = self.around.joined.iter().filter(|(vni, _)| self.seals(Some(**vni)));
        let own = self.pair_info(None, &self.around.name);
        SealInfo {
            secrets: own.secrets,
            sends_with: own.sends_with,
            silent: own.silent,
            behind: own.behind,
            drops: self.table.drops(),
            joined: joined.map(|(vni, j)| self.pair_info(Some(*vni), &j.name)).collect(),
        }
    }

    /// State of the secrets of the group itself, or of its pair with another group.
    fn pair_info(&self, group: Option<u32>, name: &str) -> PairInfo {
        let which = |is: &dyn Fn(&Peer) -> bool| {
            let hosts = self.peers.iter().filter(|(end, p)| end.1 == group && is(p)).map(|(end, _)| end.0);
            let mut hosts: Vec<IpAddr> = hosts.collect();
            hosts.sort_unstable();
            hosts
        };
        let secrets = self.secrets.of(group.map(|_| name));
        let current = secrets.map(Secrets::sends_with);
        PairInfo {
            group: name.into(),
            secrets: secrets.map(Secrets::ids).unwrap_or_default(),
            sends_with: current,
            silent: which(&|p| p.send.is_none()),
            behind: which(&|p| p.send.is_some() && p.secret != current),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use unirdma_ipc::secrets::Secret;

    const A: [u8; 4] = [192, 168, 7, 1];
    const B: [u8; 4] = [192, 168, 7, 2];
    const C: [u8; 4] = [192, 168, 7, 3];

    /// A host of group blue with others, and the messages that it sends first.
    fn host(own: [u8; 4], others: &[[u8; 4]]) -> (Handshakes, Vec<(Vec<u8>, IpAddr)>) {
        let mut h = Handshakes::new(Arc::default(), vec![own.into()]);
        let hosts = others.iter().map(|&o| o.into()).collect();
        let mut said = Vec::new();
        h.set_around(Around { name: "blue".into(), vni: 5, hosts, ..Around::default() }, |_, _| {});
        let own = Some(Secrets::one(Secret::new(1, &[7; 32])));
        h.set_secrets(GroupSecrets { own, ..GroupSecrets::default() }, |m, to| said.push((m.to_vec(), to)));
        (h, said)
    }

    #[test]
    fn a_flood_puts_off_nothing_and_leaves_nothing() {
        let (mut a, said) = host(A, &[B, C]);
        assert_eq!(said.len(), 2);
        let due = a.timer().unwrap();
        // Messages without the secret, as host B and as a stranger.
        let mut junk = said[0].0.clone();
        for i in 0..10_000u32 {
            junk[60..64].copy_from_slice(&i.to_be_bytes());
            for from in [B, [192, 168, 7, 9]] {
                assert!(!a.on_message((from, 4789).into(), &junk, |_, _| panic!("it is answered")));
            }
        }
        assert_eq!((a.timer(), a.peers.len(), a.info().silent.len()), (Some(due), 2, 2));
        assert_eq!(a.info().drops.wrong_tag, 10_000);
        // Copies of B's message: each is answered once, to B, and C's messages are not delayed.
        let (_, said) = host(B, &[A]);
        let mut answers = 0;
        for _ in 0..1000 {
            assert!(a.on_message((B, 4789).into(), &said[0].0, |m, to| {
                assert_eq!((m.len(), to), (HELLO_BYTES, IpAddr::from(B)));
                answers += 1;
            }));
            assert!(a.timer().unwrap() <= due);
        }
        assert!(answers <= 1000 && a.peers[&(B.into(), None)].exchanges.len() == 1);
        let mut heard = Vec::new();
        std::thread::sleep(std::time::Duration::from_nanos(FIRST_REPEAT_NS + 1_000_000));
        a.on_timer(|_, to| heard.push(to));
        heard.sort_unstable();
        assert_eq!(heard, [IpAddr::from(B), C.into()]);
    }
}
