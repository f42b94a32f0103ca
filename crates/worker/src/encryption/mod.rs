//! Sealed packets. If a group has a secret, every packet between hosts of the group proves that its sender has the
//! secret. Packets between two groups that a rule joins are sealed with a secret of the pair. The own secret of either
//! group does not open them, so a host that has only one of the two groups cannot pose as a host of the other.
//!
//! [`unirdma_ipc::secrets`] has the secrets of a group; `session` the keys that two hosts derive from a secret, and the
//! sealing of packets; `replay` the window of received packet numbers; and `handshake` the messages by which two hosts
//! establish a session. Two threads use sessions: the switch's thread ([`Handshakes`]: messages and frames of the
//! tunnel), and the thread that holds the port ([`Seals`]: RoCEv2, and datagrams that leave by the tunnel).
//! [`SessionTable`] connects them. The format is in docs/spec/tunnel.md.
//!
//! A sender without the secret cannot make this host store anything: a session begins only when a peer has returned,
//! authenticated with the secret, a number that this host has just drawn. So no packet of an earlier session is
//! accepted, even if one of the hosts was restarted, and no key is used with the same packet number twice.

mod handshake;
mod handshakes;
mod port;
mod replay;
mod session;
mod session_table;

use std::net::IpAddr;

pub(crate) use handshakes::{Around, Handshakes, JoinedHosts};
pub(crate) use port::{Opened, Seals, mark_datagram};
pub(crate) use session::Sender;
use session_table::Complaint;
pub(crate) use session_table::SessionTable;

/// The other end: a host, and the number of its group if that is another one than this worker's.
pub(crate) type End = (IpAddr, Option<u32>);

/// The kind of a packet in the tunnel: the last byte of its VXLAN header, which is 0 without a secret.
pub mod kind {
    /// A frame of a container's interface, sealed.
    pub const FRAME: u8 = 1;
    /// A datagram, sealed.
    pub const DATAGRAM: u8 = 2;
    /// A message of the handshake.
    pub const HELLO: u8 = 3;
    /// Offset of the kind.
    pub const AT: usize = 7;
}
