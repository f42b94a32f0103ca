//! The exchanges with all hosts of a group, and the tunnel's part of the sessions that came of them.

use std::collections::{BTreeSet, HashMap};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use unirdma_device::now_ns;

use super::board::{Board, SealInfo, Way};
use super::hello::{Draw, Exchange, HELLO_BYTES, Hello};
use super::secrets::Secrets;
use super::session::{Channel, DRAWN_BYTES, Drawn, Receiver, Refusal, Root, Sender, Session, index_of};
use super::{Complaint, kind};

/// What a host has not answered is said again after this time, then after twice as long each time, up to the maximum.
const FIRST_REPEAT: Duration = Duration::from_millis(50);
const LAST_REPEAT: Duration = Duration::from_secs(5);

/// What sessions are about.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Around {
    pub name: String,
    pub vni: u32,
    /// Hosts of the group.
    pub hosts: BTreeSet<IpAddr>,
    /// Other hosts, of groups that are joined with it. They have no secret of this group, and nothing of theirs is taken if it has one.
    pub joined: BTreeSet<IpAddr>,
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

/// Another host of the group.
#[derive(Default)]
struct Peer {
    /// One for each secret, in the order in which this host prefers to send with them.
    exchanges: Vec<Exchange>,
    links: Vec<Link>,
    /// Number of the session that is sent with, and of its secret.
    send: Option<u64>,
    secret: Option<u8>,
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
        // All zeros means that nothing was heard.
        (drawn != [0; DRAWN_BYTES]).then_some(drawn)
    }
}

/// All exchanges, with the hosts of the group. Each method that sends hands the messages to a function.
pub(crate) struct Handshakes {
    board: Arc<Board>,
    /// This host's addresses; the first of a family is its own in that family.
    own: Vec<IpAddr>,
    secrets: Option<Secrets>,
    around: Around,
    roots: Vec<Arc<Root>>,
    peers: HashMap<IpAddr, Peer>,
    /// Sessions of this host with itself.
    itself: Vec<(IpAddr, Arc<Session>)>,
    fresh: Fresh,
    repeat: Duration,
}

impl Handshakes {
    /// Without a secret.
    pub fn new(board: Arc<Board>, own: Vec<IpAddr>) -> Self {
        Handshakes {
            board,
            own,
            secrets: None,
            around: Around::default(),
            roots: Vec::new(),
            peers: HashMap::new(),
            itself: Vec::new(),
            fresh: Fresh(0),
            repeat: FIRST_REPEAT,
        }
    }

    /// True if the group has a secret.
    pub fn on(&self) -> bool {
        self.secrets.is_some()
    }

    /// From now on these are the secrets.
    pub fn set_secrets(&mut self, secrets: Option<Secrets>, out: impl FnMut(&[u8], IpAddr)) {
        self.set(secrets, self.around.clone(), out);
    }

    /// From now on this is the group, and where its hosts are.
    pub fn set_around(&mut self, around: Around, out: impl FnMut(&[u8], IpAddr)) {
        self.set(self.secrets.clone(), around, out);
    }

    /// From now on these are the secrets, and these hosts have them, or are to have them. Sessions that still hold stay.
    fn set(&mut self, secrets: Option<Secrets>, around: Around, out: impl FnMut(&[u8], IpAddr)) {
        if self.secrets == secrets && self.around == around {
            return;
        }
        let same_group = self.around.name == around.name && self.around.vni == around.vni;
        let before = std::mem::take(&mut self.roots);
        let had = std::mem::replace(&mut self.secrets, secrets);
        self.around = around;
        let same = |id: u8| {
            let find = |s: &Option<Secrets>| s.iter().flat_map(|s| s.by_preference()).find(|s| s.id() == id).cloned();
            same_group && find(&had) == find(&self.secrets)
        };
        for s in self.secrets.iter().flat_map(Secrets::by_preference) {
            let kept = before.iter().find(|r| r.id == s.id() && same(s.id())).cloned();
            self.roots.push(kept.unwrap_or_else(|| Arc::new(Root::new(s, self.around.vni, &self.around.name))));
        }
        let mut peers = std::mem::take(&mut self.peers);
        if self.on() {
            for &there in &self.around.hosts {
                let mut peer = peers.remove(&there).unwrap_or_default();
                let mut exchanges = std::mem::take(&mut peer.exchanges);
                let here = self.own.iter().find(|a| a.is_ipv4() == there.is_ipv4()).copied();
                for (root, here) in self.roots.iter().filter_map(|r| Some((r, here?))) {
                    let at = exchanges.iter().position(|e| e.is_of(root));
                    let kept = at.map(|at| exchanges.swap_remove(at));
                    let made = || Exchange::new(root.clone(), self.around.vni, here, there, &mut self.fresh);
                    peer.exchanges.extend(kept.or_else(made));
                }
                self.peers.insert(there, peer);
            }
        }
        self.meet_itself();
        self.post();
        self.repeat = FIRST_REPEAT;
        self.say(out);
    }

    /// Packets between two vRNICs of this host may go by its own addresses.
    fn meet_itself(&mut self) {
        let first = |f: &fn(&&IpAddr) -> bool| self.own.iter().find(f).copied();
        let families: [fn(&&IpAddr) -> bool; 2] = [|a| a.is_ipv4(), |a| a.is_ipv6()];
        let own: Vec<IpAddr> = families.iter().filter_map(first).collect();
        let Some(root) = self.roots.first().cloned() else {
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

    /// Puts all sessions on the board, and makes the tunnel's part of each.
    fn post(&mut self) {
        let mut posted = Vec::with_capacity(self.peers.len() + self.itself.len());
        for (&host, peer) in &mut self.peers {
            let all = || peer.exchanges.iter().flat_map(Exchange::open);
            let sessions: Vec<Arc<Session>> = all().map(|o| o.session.clone()).collect();
            let sends = all().find(|o| o.sends).map(|o| &o.session);
            let (send, secret) = (sends.map(|s| s.number), sends.map(|s| s.root.id));
            let mut had = std::mem::take(&mut peer.links);
            let link = |s: &Arc<Session>| {
                let at = had.iter().position(|l| l.number == s.number);
                at.map(|at| had.swap_remove(at)).or_else(|| Link::new(s))
            };
            peer.links = sessions.iter().filter_map(link).collect();
            (peer.send, peer.secret) = (send, secret);
            posted.push((host, Way { sessions, send }));
        }
        for &host in self.around.joined.iter().filter(|h| self.secrets.is_some() && !self.own.contains(h)) {
            posted.push((host, Way::default()));
        }
        for (own, s) in &self.itself {
            posted.push((*own, Way { sessions: vec![s.clone()], send: Some(s.number) }));
        }
        self.board.post(posted);
    }

    /// Says how it stands to all hosts that have something to answer.
    fn say(&self, mut out: impl FnMut(&[u8], IpAddr)) {
        for (&host, peer) in &self.peers {
            for message in peer.exchanges.iter().filter(|e| e.waits()).filter_map(Exchange::message) {
                out(&message, host);
            }
        }
    }

    /// When [`Handshakes::on_timer`] is to be called; `None`: never.
    pub fn timer(&self) -> Option<Duration> {
        let exchanges = || self.peers.values().flat_map(|p| &p.exchanges);
        if exchanges().any(Exchange::waits) {
            return Some(self.repeat);
        }
        let now = now_ns();
        let old = exchanges().filter_map(Exchange::old_at_ns).min();
        old.map(|at| Duration::from_nanos(at.saturating_sub(now)).max(LAST_REPEAT))
    }

    /// Says again what was not answered, and seeks new sessions in the place of old ones.
    pub fn on_timer(&mut self, out: impl FnMut(&[u8], IpAddr)) {
        let now = now_ns();
        let Handshakes { peers, fresh, .. } = self;
        peers.values_mut().flat_map(|p| &mut p.exchanges).for_each(|e| e.age(now, fresh));
        self.say(out);
        self.repeat = (2 * self.repeat).min(LAST_REPEAT);
    }

    /// A message came from a host of the group.
    pub fn on_message(&mut self, from: SocketAddr, packet: &[u8], mut out: impl FnMut(&[u8], IpAddr)) {
        let Handshakes { peers, fresh, board, around, .. } = self;
        let from = from.ip();
        let Some(peer) = peers.get_mut(&from) else { return };
        let Some(id) = Hello::secret_of(packet) else {
            board.drop_packet(Refusal::WrongTag);
            return;
        };
        let Some(exchange) = peer.exchanges.iter_mut().find(|e| e.secret() == id) else {
            // While secrets change, a host may have one more than the other.
            if peer.send.is_none() {
                board.complain(from, &around.name, Complaint::OtherSecret);
            }
            return;
        };
        let Some(outcome) = exchange.on_message(packet, now_ns(), fresh) else {
            board.drop_packet(Refusal::WrongTag);
            if peer.send.is_none() {
                board.complain(from, &around.name, Complaint::OtherSecret);
            }
            return;
        };
        let message = exchange.message().filter(|_| outcome.answer);
        if outcome.changed {
            // Before the other host hears of it.
            self.post();
        }
        message.into_iter().for_each(|m: [u8; HELLO_BYTES]| out(&m, from));
        self.repeat = FIRST_REPEAT;
    }

    /// Opens a packet of the tunnel, whose kind its header says. What it was before it was sealed; `None` if it is dropped, and counted.
    pub fn open<'a>(&mut self, from: IpAddr, to: IpAddr, packet: &'a mut [u8]) -> Option<&'a mut [u8]> {
        let opened = self.try_open(from, to, packet);
        if let Err(why) = opened {
            self.board.drop_packet(why);
            if why == Refusal::Unknown {
                self.board.complain(from, &self.around.name, Complaint::Unsealed);
            }
        }
        opened.ok()
    }

    fn try_open<'a>(&mut self, from: IpAddr, to: IpAddr, packet: &'a mut [u8]) -> Result<&'a mut [u8], Refusal> {
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

    /// Seals a frame in its VXLAN packet for a host, which ends with room for the tail; false if that host has no session.
    pub fn seal(&mut self, to: IpAddr, packet: &mut [u8]) -> bool {
        let Some(peer) = self.peers.get_mut(&to) else { return false };
        let Some(link) = peer.links.iter_mut().find(|l| Some(l.number) == peer.send) else { return false };
        packet[kind::AT] = kind::FRAME;
        link.frames.0.seal(packet);
        true
    }

    /// A host of the group has sent a packet of this kind, and here is no secret. That it looks for hosts with the secret is no packet lost.
    pub fn complain_of_seal(&self, from: IpAddr, group: &str, kind: u8) {
        if kind != kind::HELLO {
            self.board.drop_packet(Refusal::WrongTag);
        }
        self.board.complain(from, group, Complaint::Sealed);
    }

    /// What there is to know.
    pub fn info(&self) -> SealInfo {
        let which = |is: &dyn Fn(&Peer) -> bool| {
            let mut hosts: Vec<IpAddr> = self.peers.iter().filter(|(_, p)| is(p)).map(|(&host, _)| host).collect();
            hosts.sort_unstable();
            hosts
        };
        let current = self.secrets.as_ref().map(Secrets::sends_with);
        SealInfo {
            secrets: self.secrets.as_ref().map(Secrets::ids).unwrap_or_default(),
            sends_with: current,
            silent: which(&|p| p.send.is_none()),
            behind: which(&|p| p.send.is_some() && p.secret != current),
            drops: self.board.drops(),
        }
    }
}
