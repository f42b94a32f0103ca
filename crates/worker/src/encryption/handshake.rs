//! The handshake by which two hosts establish a session.
//!
//! A message has a number that its sender has drawn, and the receiver's number if the sender has received one. When a
//! host gets its own number back, it knows that the other host is present and that the message is no replay. Then it
//! can open packets of the session. It sends with the session only after the other host has announced that it can open
//! packets, too, so that no packet is lost.

use std::net::IpAddr;
use std::sync::Arc;

use ring::hmac;
use unirdma_formats::net::VXLAN_BYTES;

use super::kind;
use super::session::{DRAWN_BYTES, Direction, Drawn, Root, Session};

const VERSION: u8 = 1;
/// The sender can open packets of the session that the two numbers identify.
const READY: u8 = 1;
/// The sender does not know yet whether the receiver can, and wants an answer.
const WAITS: u8 = 2;
const TAG_BYTES: usize = 32;
const SIGNED_BYTES: usize = VXLAN_BYTES + 4 + 2 * DRAWN_BYTES;
/// Bytes of a message with its VXLAN header.
pub(super) const HELLO_BYTES: usize = SIGNED_BYTES + TAG_BYTES;
/// A session younger than this is not replaced, ns: messages of its own handshake may still arrive.
const YOUNG_NS: u64 = 1_000_000_000;
/// A session is replaced by another one, with fresh keys, after this time, ns.
pub(super) const OLD_NS: u64 = 3_600_000_000_000;

/// A message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    own: Drawn,
    heard: Option<Drawn>,
    ready: bool,
    waits: bool,
}

impl Hello {
    /// Number of the secret that a message names; `None` if the message is not of this version.
    pub fn secret_of(packet: &[u8]) -> Option<u8> {
        let of_version = packet.len() == HELLO_BYTES && packet[VXLAN_BYTES] == VERSION;
        of_version.then(|| packet[VXLAN_BYTES + 1])
    }

    fn read(packet: &[u8], key: &hmac::Key) -> Option<Hello> {
        let (signed, tag) = packet.split_first_chunk::<SIGNED_BYTES>()?;
        hmac::verify(key, signed, tag).ok()?;
        let (own, heard) = signed[VXLAN_BYTES + 4..].split_first_chunk::<DRAWN_BYTES>()?;
        let heard: Drawn = *heard.first_chunk()?;
        let flags = signed[VXLAN_BYTES + 2];
        let heard = (heard != [0; DRAWN_BYTES]).then_some(heard);
        Some(Hello { own: *own, heard, ready: flags & READY != 0, waits: flags & WAITS != 0 })
    }

    fn write(&self, root: &Root, key: &hmac::Key) -> [u8; HELLO_BYTES] {
        let mut b = [0; HELLO_BYTES];
        b[..VXLAN_BYTES].copy_from_slice(&root.header());
        b[kind::AT] = kind::HELLO;
        let flags = if self.ready { READY } else { 0 } | if self.waits { WAITS } else { 0 };
        b[VXLAN_BYTES..][..3].copy_from_slice(&[VERSION, root.id(), flags]);
        b[VXLAN_BYTES + 4..][..DRAWN_BYTES].copy_from_slice(&self.own);
        b[VXLAN_BYTES + 4 + DRAWN_BYTES..][..DRAWN_BYTES].copy_from_slice(&self.heard.unwrap_or_default());
        let tag = hmac::sign(key, &b[..SIGNED_BYTES]);
        b[SIGNED_BYTES..].copy_from_slice(tag.as_ref());
        b
    }
}

/// An established session of this host.
pub(super) struct Open {
    pub session: Arc<Session>,
    /// The other host has announced that it can open packets.
    pub sends: bool,
    since_ns: u64,
}

/// A session that is being established.
struct Seeking {
    own: Drawn,
    heard: Option<Drawn>,
}

/// Result of a message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Outcome {
    /// The sender must be sent this host's state.
    pub answer: bool,
    /// There is a new session, or the present one can be used to send now.
    pub changed: bool,
}

/// The handshake between this host and another one under one secret.
pub(super) struct Exchange {
    root: Arc<Root>,
    here: IpAddr,
    there: IpAddr,
    ours: hmac::Key,
    theirs: hmac::Key,
    seeking: Option<Seeking>,
    /// The newest session comes first, then the one before it, whose packets may still be under way.
    open: Vec<Open>,
}

/// Source of fresh numbers.
pub(super) trait Draw {
    /// Number for a session, never used before.
    fn number(&mut self) -> u64;
    /// 16 unpredictable bytes; `None` if the kernel gives none.
    fn drawn(&mut self) -> Option<Drawn>;
}

impl Exchange {
    /// A new exchange. `None` if the kernel gives no random bytes.
    pub fn new(root: Arc<Root>, here: IpAddr, there: IpAddr, draw: &mut impl Draw) -> Option<Self> {
        let (ours, theirs) =
            (root.hello_key(Direction::Out, here, there)?, root.hello_key(Direction::In, there, here)?);
        let seeking = Some(Seeking { own: draw.drawn()?, heard: None });
        Some(Exchange { root, here, there, ours, theirs, seeking, open: Vec::with_capacity(2) })
    }

    /// Number of its secret.
    pub fn secret(&self) -> u8 {
        self.root.id()
    }

    /// True if the exchange is under this secret of this group.
    pub fn is_of(&self, root: &Arc<Root>) -> bool {
        Arc::ptr_eq(&self.root, root)
    }

    /// The sessions, newest first.
    pub fn open(&self) -> &[Open] {
        &self.open
    }

    /// True if an answer of the other host is needed.
    pub fn waits(&self) -> bool {
        self.seeking.is_some() || self.open.first().is_some_and(|o| !o.sends)
    }

    /// When the session has to be replaced.
    pub fn old_at_ns(&self) -> Option<u64> {
        self.open.first().filter(|_| self.seeking.is_none()).map(|o| o.since_ns + OLD_NS)
    }

    /// Starts replacing the session if it is old enough.
    pub fn age(&mut self, now_ns: u64, draw: &mut impl Draw) {
        if self.old_at_ns().is_some_and(|at| now_ns >= at) {
            self.seeking = draw.drawn().map(|own| Seeking { own, heard: None });
        }
    }

    /// The message that tells the other host the present state.
    pub fn message(&self) -> Option<[u8; HELLO_BYTES]> {
        let hello = match (&self.seeking, self.open.first()) {
            (Some(s), _) => Hello { own: s.own, heard: s.heard, ready: false, waits: true },
            (None, Some(o)) => self.confirmation(o),
            (None, None) => return None,
        };
        Some(hello.write(&self.root, &self.ours))
    }

    fn confirmation(&self, o: &Open) -> Hello {
        Hello { own: o.session.own, heard: Some(o.session.theirs), ready: true, waits: !o.sends }
    }

    /// Handles a message of the other host. `None` if it was made without the secret, or for another exchange.
    pub fn on_message(&mut self, packet: &[u8], now_ns: u64, draw: &mut impl Draw) -> Option<Outcome> {
        let h = Hello::read(packet, &self.theirs)?;
        let newest = self.open.first_mut();
        if let Some(o) = newest.filter(|o| o.session.theirs == h.own) {
            // The message concerns the present session. The other end may not know everything yet.
            let returned = h.heard == Some(o.session.own);
            let changed = returned && h.ready && !o.sends;
            o.sends |= changed;
            return Some(Outcome { answer: h.waits && self.seeking.is_none(), changed });
        }
        if self.open.iter().any(|o| o.session.theirs == h.own) {
            return Some(Outcome::default());
        }
        if let Some(own) = self.seeking.as_ref().map(|s| s.own).filter(|own| h.heard == Some(*own)) {
            let session = Session {
                number: draw.number(),
                root: self.root.clone(),
                here: self.here,
                there: self.there,
                own,
                theirs: h.own,
            };
            self.seeking = None;
            self.open.insert(0, Open { session: Arc::new(session), sends: h.ready, since_ns: now_ns });
            self.open.truncate(2);
            return Some(Outcome { answer: true, changed: true });
        }
        let young = self.open.first().is_some_and(|o| now_ns.saturating_sub(o.since_ns) < YOUNG_NS);
        if self.seeking.is_none() && !young {
            self.seeking = draw.drawn().map(|own| Seeking { own, heard: None });
        }
        let Some(s) = &mut self.seeking else { return Some(Outcome::default()) };
        s.heard = Some(h.own);
        Some(Outcome { answer: h.waits, changed: false })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use unirdma_ipc::secrets::Secret;
    use unirdma_rnic::Rng;

    struct Seeded(Rng, u64);

    impl Draw for Seeded {
        fn number(&mut self) -> u64 {
            self.1 += 1;
            self.1
        }

        fn drawn(&mut self) -> Option<Drawn> {
            Some([0; 2].map(|_: u64| self.0.next_u64().to_le_bytes()).concat().try_into().unwrap())
        }
    }

    const SECOND: u64 = 1_000_000_000;

    /// Two hosts, and all messages that they have ever sent to each other.
    struct Pair {
        draw: Seeded,
        now: u64,
        hosts: [Exchange; 2],
        /// Destination host and message.
        under_way: Vec<(usize, Vec<u8>)>,
        said: Vec<(usize, Vec<u8>)>,
        /// Host and both numbers of each session that ever existed.
        sessions: Vec<(usize, Drawn, Drawn)>,
    }

    fn exchange(secret: u8, host: usize, draw: &mut Seeded) -> Exchange {
        let root = Arc::new(Root::new(&Secret::new(1, &[secret; 32]), (5, "blue"), None));
        let at = |n: usize| IpAddr::from([10, 0, 0, n as u8]);
        Exchange::new(root, at(host), at(1 - host), draw).unwrap()
    }

    impl Pair {
        fn new(seed: u64, secrets: [u8; 2]) -> Pair {
            let mut draw = Seeded(Rng::new(seed), 0);
            let hosts = [0, 1].map(|i| exchange(secrets[i], i, &mut draw));
            Pair { draw, now: SECOND, hosts, under_way: Vec::new(), said: Vec::new(), sessions: Vec::new() }
        }

        fn say(&mut self, host: usize) {
            let message = self.hosts[host].message().map(|m| m.to_vec());
            self.under_way.extend(message.clone().map(|m| (1 - host, m)));
            self.said.extend(message.map(|m| (1 - host, m)));
        }

        /// Hands a message to a host; returns the result.
        fn deliver(&mut self, to: usize, message: &[u8]) -> Option<Outcome> {
            let newest = self.hosts[to].open.first().map(|o| o.session.number);
            let outcome = self.hosts[to].on_message(message, self.now, &mut self.draw);
            if let Some(o) = self.hosts[to].open.first().filter(|o| Some(o.session.number) != newest) {
                let now = (to, o.session.own, o.session.theirs);
                assert!(!self.sessions.contains(&now), "a session came back, and its packets' numbers with it");
                self.sessions.push(now);
            }
            if outcome.is_some_and(|o| o.answer) {
                self.say(to);
            }
            // A host seals only with sessions that the other one can open.
            for (i, other) in [(0, 1), (1, 0)] {
                for s in self.hosts[i].open.iter().filter(|o| o.sends).map(|o| &o.session) {
                    let fits = |o: &Open| o.session.own == s.theirs && o.session.theirs == s.own;
                    let restarted = !self.sessions.iter().any(|&(host, own, _)| host == other && own == s.theirs);
                    assert!(restarted || self.hosts[other].open.iter().any(fits) || self.hosts[i].open.len() > 1);
                }
            }
            outcome
        }

        fn settle(&mut self) {
            while let Some((to, message)) = self.under_way.pop() {
                self.deliver(to, &message);
            }
        }

        fn agree(&self) -> bool {
            let [a, b] = [0, 1].map(|i| self.hosts[i].open.first().filter(|o| o.sends && !self.hosts[i].waits()));
            matches!((a, b), (Some(a), Some(b)) if a.session.own == b.session.theirs && a.session.theirs == b.session.own)
        }
    }

    #[test]
    fn hosts_find_a_session_whatever_the_network_does_and_nothing_that_was_said_before_counts() {
        for seed in 0..300 {
            let mut p = Pair::new(seed, [7, 7]);
            let mut rng = Rng::new(seed);
            for step in 0..200 {
                p.now += SECOND / 8;
                if step % 4 == 0 {
                    [0, 1]
                        .into_iter()
                        .filter(|&i| p.hosts[i].waits())
                        .collect::<Vec<_>>()
                        .into_iter()
                        .for_each(|i| p.say(i));
                }
                if rng.next_u64() % 40 == 0 {
                    // One of the two is restarted, and has no state.
                    let i = (rng.next_u64() % 2) as usize;
                    p.hosts[i] = exchange(7, i, &mut p.draw);
                    p.sessions.retain(|s| s.0 != i);
                }
                if rng.next_u64() % 40 == 0 {
                    let i = (rng.next_u64() % 2) as usize;
                    p.hosts[i].age(p.now + OLD_NS, &mut p.draw);
                }
                let from = if rng.next_u64() % 8 == 0 { &p.said } else { &p.under_way };
                if !from.is_empty() {
                    let at = (rng.next_u64() as usize) % from.len();
                    let (to, message) = from[at].clone();
                    p.deliver(to, &message);
                }
                // Some messages are lost, some are repeated.
                if rng.next_u64() % 2 == 0 && !p.under_way.is_empty() {
                    let at = (rng.next_u64() as usize) % p.under_way.len();
                    p.under_way.swap_remove(at);
                }
            }
            for _ in 0..10 {
                p.now += 2 * SECOND;
                [0, 1]
                    .into_iter()
                    .filter(|&i| p.hosts[i].waits())
                    .collect::<Vec<_>>()
                    .into_iter()
                    .for_each(|i| p.say(i));
                p.settle();
            }
            assert!(p.agree(), "seed {seed}");
            // All earlier messages are repeated, and reflected to their senders. This leads to another session at most.
            let said = p.said.clone();
            for (to, message) in &said {
                assert_eq!(p.deliver(1 - to, message), None, "seed {seed}: reflected");
                p.deliver(*to, message);
                p.settle();
            }
            p.now += 2 * SECOND;
            [0, 1].into_iter().filter(|&i| p.hosts[i].waits()).collect::<Vec<_>>().into_iter().for_each(|i| p.say(i));
            p.settle();
            assert!(p.agree(), "seed {seed}");
        }
    }

    #[test]
    fn a_session_takes_four_messages_and_answers_end() {
        let mut p = Pair::new(1, [7, 7]);
        p.say(0);
        p.settle();
        assert!(p.agree() && p.said.len() <= 5, "{} messages", p.said.len());
        // Each bit of a message is protected.
        let (to, message) = p.said[0].clone();
        for at in 0..message.len() {
            let mut changed = message.clone();
            changed[at] ^= 4;
            assert_eq!(p.deliver(to, &changed), None, "byte {at}");
        }
        assert_eq!(p.deliver(to, &message[1..]), None);
        assert_eq!((Hello::secret_of(&message), Hello::secret_of(&message[1..])), (Some(1), None));
    }

    #[test]
    fn who_has_another_secret_says_nothing_that_counts() {
        let mut p = Pair::new(1, [7, 8]);
        for host in [0, 1] {
            p.say(host);
            let (to, message) = p.under_way.pop().unwrap();
            assert_eq!(p.deliver(to, &message), None);
            assert!(p.hosts[to].open.is_empty() && p.hosts[to].waits());
        }
    }
}
