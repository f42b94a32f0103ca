//! The keys that two hosts derive from a secret, and the sealing of packets: AES-128-GCM. The first bytes of a packet
//! stay readable, because kernels find the worker by them, and the network the flow.

use std::net::IpAddr;
use std::sync::Arc;

use ring::aead::{AES_128_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
use ring::{hkdf, hmac};
use unirdma_formats::Gid;
use unirdma_formats::net::{VXLAN_BYTES, vxlan, vxlan_from};
use unirdma_ipc::secrets::{Secret, TAIL_BYTES};

use super::replay::Window;

const TAG_BYTES: usize = 16;
const INDEX_BYTES: usize = 4;
const NUMBER_BYTES: usize = 8;
const _: () = assert!(TAIL_BYTES == TAG_BYTES + INDEX_BYTES + NUMBER_BYTES);
/// Unencrypted bytes of a packet: up to the destination QPN, or a VXLAN header.
const CLEAR_BYTES: usize = 8;
/// Bytes of a number that a host draws for a session.
pub(super) const DRAWN_BYTES: usize = 16;

/// A number that a host has drawn for a session.
pub(super) type Drawn = [u8; DRAWN_BYTES];

/// The use of a key. Each channel counts its own packet numbers, so that no two threads share a counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Channel {
    /// RoCEv2 on its own port.
    Roce = 0,
    /// Frames of containers' interfaces, in the tunnel.
    Frames = 1,
    /// Datagrams, in the tunnel.
    Datagrams = 2,
}

/// The reason why a packet is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// It belongs to no session with its sender; perhaps it is not sealed.
    Unknown,
    /// Its tag is wrong.
    WrongTag,
    /// It was received before, or arrived so late that this cannot be told.
    Replayed,
}

/// Number and name of a group.
pub(super) type Named<'a> = (u32, &'a str);

/// The direction of packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    Out,
    In,
}

/// The root of all keys of a secret: for one group, or for a pair of groups.
pub(super) struct Root {
    secret: Secret,
    prk: hkdf::Prk,
    /// Number and name of this worker's group, and of the other group of a pair.
    own: Vec<u8>,
    other: Option<Vec<u8>>,
    /// VXLAN header of packets that this host sends.
    header: [u8; VXLAN_BYTES],
}

impl Root {
    pub fn new(secret: &Secret, own: Named<'_>, other: Option<Named<'_>>) -> Root {
        let salt: &[u8] = if other.is_some() { b"unirdma pair 1" } else { b"unirdma seal 1" };
        let prk = hkdf::Salt::new(hkdf::HKDF_SHA256, salt).extract(secret.key());
        let header = other.map_or(vxlan(own.0), |(vni, _)| vxlan_from(vni, own.0));
        Root { secret: secret.clone(), prk, own: bytes_of(own), other: other.map(bytes_of), header }
    }

    /// True if this is the root for this secret and these groups.
    pub fn is_of(&self, secret: &Secret, own: Named<'_>, other: Option<Named<'_>>) -> bool {
        self.secret == *secret && self.own == bytes_of(own) && self.other == other.map(bytes_of)
    }

    /// Number of the secret.
    pub fn id(&self) -> u8 {
        self.secret.id()
    }

    /// VXLAN header of packets that this host sends.
    pub fn header(&self) -> [u8; VXLAN_BYTES] {
        self.header
    }

    /// The data that distinguishes a key from all others of the secret: its purpose, the groups and hosts of sender and
    /// receiver, and the numbers that the hosts have drawn.
    fn info(&self, purpose: &[u8], way: Direction, from: (IpAddr, &Drawn), to: (IpAddr, &Drawn)) -> Vec<u8> {
        let groups = match (&self.other, way) {
            (None, _) => [&self.own[..], &[]],
            (Some(other), Direction::Out) => [&self.own[..], other],
            (Some(other), Direction::In) => [&other[..], &self.own],
        };
        let [from_gid, to_gid] = [from.0, to.0].map(|a| Gid::from_ip(a).0);
        [purpose, &[0], groups[0], groups[1], &from_gid, &to_gid, from.1, to.1].concat()
    }

    fn packet_key(
        &self,
        channel: Channel,
        way: Direction,
        from: (IpAddr, &Drawn),
        to: (IpAddr, &Drawn),
    ) -> Option<LessSafeKey> {
        let purpose: &[u8] = match channel {
            Channel::Roce => b"RoCEv2",
            Channel::Frames => b"frames",
            Channel::Datagrams => b"datagrams",
        };
        let info = self.info(purpose, way, from, to);
        let info = [&info[..]];
        let okm = self.prk.expand(&info, &AES_128_GCM);
        okm.ok().map(|okm| LessSafeKey::new(UnboundKey::from(okm)))
    }

    /// The key of handshake messages from one host to another.
    pub fn hello_key(&self, way: Direction, from: IpAddr, to: IpAddr) -> Option<hmac::Key> {
        let nothing = [0; DRAWN_BYTES];
        let info = self.info(b"hello", way, (from, &nothing), (to, &nothing));
        let info = [&info[..]];
        self.prk.expand(&info, hmac::HMAC_SHA256).ok().map(hmac::Key::from)
    }
}

fn bytes_of((vni, name): Named<'_>) -> Vec<u8> {
    [&vni.to_be_bytes()[1..], &[name.len() as u8], name.as_bytes()].concat()
}

/// A session of two hosts: all data from which its keys are derived.
pub(crate) struct Session {
    /// Unique in this process.
    pub number: u64,
    pub root: Arc<Root>,
    pub here: IpAddr,
    pub there: IpAddr,
    pub own: Drawn,
    pub theirs: Drawn,
}

impl Session {
    /// The index by which the receiver of a packet finds the session: the first bytes of the number that the receiver
    /// has drawn.
    pub fn index(drawn: &Drawn) -> [u8; INDEX_BYTES] {
        [drawn[0], drawn[1], drawn[2], drawn[3]]
    }

    /// The sender of a channel. Must be made only once, because its packets are numbered from 0.
    pub fn sender(&self, channel: Channel) -> Option<Sender> {
        let key = self.root.packet_key(channel, Direction::Out, (self.here, &self.own), (self.there, &self.theirs))?;
        Some(Sender { key, index: Session::index(&self.theirs), next: 0 })
    }

    /// The receiver of a channel. Must be made only once, too, because another one would not know the packets received
    /// before.
    pub fn receiver(&self, channel: Channel) -> Option<Receiver> {
        let key = self.root.packet_key(channel, Direction::In, (self.there, &self.theirs), (self.here, &self.own))?;
        Some(Receiver { key, window: Window::new() })
    }
}

/// Seals packets.
pub(crate) struct Sender {
    key: LessSafeKey,
    index: [u8; INDEX_BYTES],
    next: u64,
}

impl Sender {
    /// Seals a packet, which must end with room for [`TAIL_BYTES`]. A packet without room for that and the readable
    /// part stays unchanged.
    pub fn seal(&mut self, packet: &mut [u8]) {
        let Some(end) = packet.len().checked_sub(TAIL_BYTES).filter(|&n| n >= CLEAR_BYTES) else { return };
        let (packet, tail) = packet.split_at_mut(end);
        let (clear, body) = packet.split_at_mut(CLEAR_BYTES);
        let n = self.next;
        self.next += 1;
        if let Ok(tag) = self.key.seal_in_place_separate_tag(nonce(n), Aad::from(&*clear), body) {
            tail[..TAG_BYTES].copy_from_slice(tag.as_ref());
        }
        tail[TAG_BYTES..][..INDEX_BYTES].copy_from_slice(&self.index);
        tail[TAG_BYTES + INDEX_BYTES..].copy_from_slice(&n.to_be_bytes());
    }
}

/// Opens packets.
pub(crate) struct Receiver {
    key: LessSafeKey,
    window: Window,
}

/// The receiver's index of the session that a packet names; `None` if the packet is too short to be sealed.
pub(crate) fn index_of(packet: &[u8]) -> Option<[u8; INDEX_BYTES]> {
    let at = packet.len().checked_sub(INDEX_BYTES + NUMBER_BYTES).filter(|&at| at >= CLEAR_BYTES + TAG_BYTES)?;
    packet[at..].first_chunk().copied()
}

impl Receiver {
    /// Opens a packet of this session; returns the packet as it was before sealing.
    ///
    /// # Errors
    /// The reason. The packet's bytes are meaningless then.
    pub fn open<'a>(&mut self, packet: &'a mut [u8]) -> Result<&'a mut [u8], Refusal> {
        let (sealed, number) = packet.split_last_chunk_mut::<NUMBER_BYTES>().ok_or(Refusal::Unknown)?;
        let n = u64::from_be_bytes(*number);
        let end = sealed.len().checked_sub(INDEX_BYTES).filter(|&n| n >= CLEAR_BYTES + TAG_BYTES);
        let end = end.ok_or(Refusal::Unknown)?;
        if !self.window.is_new(n) {
            return Err(Refusal::Replayed);
        }
        let (clear, body) = sealed[..end].split_at_mut(CLEAR_BYTES);
        let opened = self.key.open_in_place(nonce(n), Aad::from(&*clear), body);
        let len = opened.map_err(|_| Refusal::WrongTag)?.len();
        self.window.note(n);
        Ok(&mut packet[..CLEAR_BYTES + len])
    }
}

fn nonce(n: u64) -> Nonce {
    let mut bytes = [0; 12];
    bytes[4..].copy_from_slice(&n.to_be_bytes());
    Nonce::assume_unique_for_key(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: &str = "192.168.7.1";
    const B: &str = "192.168.7.2";

    /// The two ends of a session.
    fn ends(secret: u8, group: (u32, &str), a: &str, b: &str) -> [Session; 2] {
        let root = Arc::new(Root::new(&Secret::numbered(&[secret; 32]), group, None));
        let [a, b] = [a, b].map(|ip| ip.parse::<IpAddr>().unwrap());
        let end = |here, there, own, theirs| Session { number: 1, root: root.clone(), here, there, own, theirs };
        [end(a, b, [1; DRAWN_BYTES], [2; DRAWN_BYTES]), end(b, a, [2; DRAWN_BYTES], [1; DRAWN_BYTES])]
    }

    fn packet(fill: u8, len: usize) -> Vec<u8> {
        [&vec![fill; len][..], &[0; TAIL_BYTES]].concat()
    }

    #[test]
    fn what_is_sealed_is_opened_once_and_by_nobody_else() {
        let [a, b] = ends(7, (5, "blue"), A, B);
        let (mut out, mut back) = (a.sender(Channel::Roce).unwrap(), b.receiver(Channel::Roce).unwrap());
        for len in [8, 9, 16, 24, 1064, 4160] {
            let mut sealed = packet(3, len);
            out.seal(&mut sealed);
            assert_eq!(sealed[..8], [3; 8], "the kernel finds the worker by these");
            assert!(len < 24 || sealed[8..24] != [3; 16], "length {len}");
            assert_eq!(index_of(&sealed), Some([2; 4]));
            // Each bit is protected except the index, by which the key was found.
            for at in (0..len + 16).step_by(7).chain(len + 20..sealed.len()) {
                let mut changed = sealed.clone();
                changed[at] ^= 0x10;
                assert!(back.open(&mut changed).is_err(), "length {len}, byte {at}");
            }
            // Receivers with other keys: other group, secret, host, direction, channel.
            let others = [
                ends(8, (5, "blue"), A, B)[1].receiver(Channel::Roce),
                ends(7, (6, "blue"), A, B)[1].receiver(Channel::Roce),
                ends(7, (5, "red"), A, B)[1].receiver(Channel::Roce),
                ends(7, (5, "blue"), A, "192.168.7.3")[1].receiver(Channel::Roce),
                ends(7, (5, "blue"), "192.168.7.3", B)[1].receiver(Channel::Roce),
                a.receiver(Channel::Roce),
                b.receiver(Channel::Frames),
                b.receiver(Channel::Datagrams),
            ];
            for other in others {
                assert_eq!(other.unwrap().open(&mut sealed.clone()), Err(Refusal::WrongTag));
            }
            let again = sealed.clone();
            assert_eq!(back.open(&mut sealed).map(|p| p.to_vec()), Ok(vec![3; len]));
            assert_eq!(back.open(&mut again.clone()), Err(Refusal::Replayed));
        }
        for short in 0..8 + TAIL_BYTES {
            assert!(index_of(&vec![2; short]).is_none(), "{short} bytes");
            assert!(back.open(&mut vec![2; short]).is_err(), "{short} bytes");
            out.seal(&mut vec![2; short]);
        }
    }

    #[test]
    fn packets_may_overtake_each_other() {
        let [a, b] = ends(7, (5, "blue"), "fd00::1", "fd00::2");
        let (mut out, mut back) = (a.sender(Channel::Frames).unwrap(), b.receiver(Channel::Frames).unwrap());
        let mut sealed: Vec<Vec<u8>> = (0..3000)
            .map(|_| {
                let mut p = packet(9, 40);
                out.seal(&mut p);
                p
            })
            .collect();
        sealed[..1500].reverse();
        sealed[1500..].rotate_left(1000);
        for p in &sealed {
            assert!(back.open(&mut p.clone()).is_ok());
        }
        assert!(sealed.iter().all(|p| back.open(&mut p.clone()) == Err(Refusal::Replayed)));
    }
}
