//! Sealed packets: with a secret of a group, every packet between the hosts of the group shows that its sender has the secret. Packets between
//! two groups that a rule joins do the same with a secret of the pair: neither group's own opens them, so that a host that has one of the two
//! groups only can pose as that one only.
//!
//! `secrets` has the secrets of a group, `session` the keys that two hosts derive from one, and what is done with each packet, `replay` the
//! window of the packets that have come, and `hello` the messages by which two hosts find a session. Two threads use what was found: the
//! switch's ([`Handshakes`]: messages and frames of the tunnel) and whoever has the port ([`Seals`]: RoCEv2, and datagrams that leave by the
//! tunnel). [`Board`] stands between them. The format is in docs/spec/tunnel.md.
//!
//! A sender without the secret makes this host keep nothing: a session begins only when a peer has returned, under the secret, a number
//! that this host has just drawn. So no packet of an earlier session is taken, whichever of the two hosts has been started anew, and no
//! key is used with a packet's number twice.

mod board;
mod handshakes;
mod hello;
mod port;
mod replay;
mod secrets;
mod session;

use std::net::IpAddr;

pub use board::{PairInfo, SealDrops, SealInfo};
pub use secrets::{GroupSecrets, Secret, Secrets};

pub(crate) use board::Board;
use board::Complaint;
pub(crate) use handshakes::{Around, Handshakes, JoinedHosts};
pub(crate) use port::{Opened, Seals, mark_datagram};
pub(crate) use session::{Sender, TAIL_BYTES};

/// Who is at the other end: a host, and the number of its group if that is another one than this worker's.
pub(crate) type End = (IpAddr, Option<u32>);

/// What a packet of the tunnel is, in the last byte of its VXLAN header, which is 0 without a secret.
pub(crate) mod kind {
    /// A frame of a container's interface, sealed.
    pub const FRAME: u8 = 1;
    /// A datagram, sealed.
    pub const DATAGRAM: u8 = 2;
    /// A message of the handshake.
    pub const HELLO: u8 = 3;
    /// Where it stands.
    pub const AT: usize = 7;
}
