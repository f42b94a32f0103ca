//! Records: a vRNIC written out as data, and read in again, on this host or on another.
//!
//! [`crate::Rnic::save_vrnic`] may be called at any moment; nothing is drained. A record has all that the RNIC knows of
//! a vRNIC: objects with their numbers, keys and QPNs, the requests under way with their PSNs, receives that are half
//! filled, answers that wait, connection management, timers, and events that were not delivered. It has no memory.
//! Rings, doorbell pages, stages and the memory of MRs belong to programs, and the caller that restores a record gives
//! them back through [`Attach`].
//!
//! To its peers, a vRNIC that moves looks like one whose packets are lost for a while. Connections within a host have
//! no packets, so [`crate::Rnic::take_vrnic`] first makes them connections over the wire, at both ends
//! (`crate::to_wire`). [`crate::Core::reroute`] leads the peers to the new host of the vRNIC.
//!
//! The QP state in a record is the state that the software RNIC has.
//!
//! `data` defines the contents of a record. `save` writes it, `check` checks that it is consistent, and `restore` makes
//! a vRNIC of it. `wire` and `cm` do both for requests, connections and connection management.

mod attach;
mod check;
mod cm;
mod data;
mod restore;
mod save;
#[cfg(test)]
mod tests;
mod wire;

use std::fmt;

use unirdma_formats::Gid;

pub use attach::{Attach, Attached, Way};
use data::VrnicData;

/// The first bytes of a record.
const MAGIC: [u8; 8] = *b"uniRDMA\0";
/// The version that is written, and the only one that is read so far.
const VERSION: u32 = 8;
/// Magic, version, length of the data after the header, and a checksum of everything but itself.
const HEADER_BYTES: usize = 8 + 4 + 8 + 4;

/// A vRNIC as data. A record that was read from bytes is consistent in itself.
#[derive(Clone, Debug, PartialEq)]
pub struct Record(VrnicData);

/// Why bytes are no valid record.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecordError {
    /// They do not begin as a record does.
    #[error("this is not the record of a vRNIC")]
    NotARecord,
    /// Another version.
    #[error("the record has version {found}; only version {VERSION} can be read")]
    Version {
        /// The version of the record.
        found: u32,
    },
    /// The end is missing.
    #[error("the record is truncated: {found} bytes of {expected}")]
    Truncated {
        /// Bytes of the record.
        expected: u64,
        /// Bytes that there are.
        found: u64,
    },
    /// There are further bytes after the end.
    #[error("{0} bytes follow the end of the record")]
    Trailing(u64),
    /// Some byte has changed since the record was written.
    #[error("the checksum of the record is wrong")]
    Checksum,
    /// The bytes do not encode a vRNIC.
    #[error("the record cannot be read: {0}")]
    Encoding(#[from] postcard::Error),
    /// An object in it is not valid.
    #[error("the record is inconsistent: {0}")]
    Inconsistent(#[from] Flaw),
}

/// An object that makes a record inconsistent, and why.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{object}: {what}")]
pub struct Flaw {
    /// The object.
    pub object: Object,
    /// The reason.
    pub what: What,
}

/// Why an object of a record is not valid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum What {
    /// There are two of them.
    #[error("stands there twice")]
    Twice,
    /// It names something that does not exist.
    #[error("there is no such {0}")]
    Missing(&'static str),
    /// A value that no vRNIC can have.
    #[error("a value is out of range: {0}")]
    Range(&'static str),
    /// More than its quota.
    #[error("more {0} than its quota")]
    Quota(&'static str),
}

/// The name of an object of a vRNIC.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum Object {
    Vrnic,
    Gid(Gid),
    Session(u32),
    Doorbell { session: u32, number: u32 },
    Memory { session: u32 },
    BounceMemory { session: u32 },
    Pd { session: u32, number: u32 },
    Cq { session: u32, number: u32 },
    Xrcd { session: u32, number: u32 },
    Srq { session: u32, number: u32 },
    XrcSrq { number: u32 },
    Mr { session: u32, number: u32 },
    Key(u32),
    Ah { session: u32, number: u32 },
    Qp { qpn: u32 },
    CmId { session: Option<u32>, number: u32 },
    CommunicationId(u32),
    CmEvents { session: u32, queue: u16 },
}

impl fmt::Display for Object {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Object::Vrnic => write!(f, "the vRNIC"),
            Object::Gid(gid) => write!(f, "GID {gid}"),
            Object::Session(s) => write!(f, "session {s}"),
            Object::Doorbell { session, number: 0 } => write!(f, "the doorbell page of session {session}"),
            Object::Doorbell { session, number } => write!(f, "doorbell page {number} of session {session}"),
            Object::Memory { session } => write!(f, "the memory of session {session}"),
            Object::BounceMemory { session } => write!(f, "the stage of session {session}"),
            Object::Pd { session, number } => write!(f, "PD {number} of session {session}"),
            Object::Cq { session, number } => write!(f, "CQ {number} of session {session}"),
            Object::Xrcd { session, number } => write!(f, "XRC domain {number} of session {session}"),
            Object::Srq { session, number } => write!(f, "SRQ {number} of session {session}"),
            Object::XrcSrq { number } => write!(f, "the XRC SRQ with number {number}"),
            Object::Mr { session, number } => write!(f, "MR {number} of session {session}"),
            Object::Key(key) => write!(f, "key {key:#010x}"),
            Object::Ah { session, number } => write!(f, "AH {number} of session {session}"),
            Object::Qp { qpn } => write!(f, "QP {qpn}"),
            Object::CmId { session: Some(session), number } => write!(f, "identifier {number} of session {session}"),
            Object::CmId { session: None, number } => write!(f, "identifier {number} that was given back"),
            Object::CommunicationId(id) => write!(f, "communication ID {id:#010x}"),
            Object::CmEvents { session, queue } => write!(f, "the events on queue {queue} of session {session}"),
        }
    }
}

/// Why a record was not restored. Nothing has changed then.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RestoreError {
    /// Something on this host has the same number.
    #[error("{0} exists on this host already")]
    Taken(Object),
    /// [`Attach`] did not give it.
    #[error("{0} was not given back")]
    NotGiven(Object),
    /// [`Attach`] gave something else.
    #[error("what was given back as {0} has another size or kind than what was saved")]
    Unlike(Object),
    /// A connection has larger packets than the network of this host takes.
    #[error("QP {qpn} sends packets of {mtu} bytes, and the network of this host takes {most}")]
    Mtu {
        /// Which QP.
        qpn: u32,
        /// Its path MTU, bytes.
        mtu: u32,
        /// The network's, bytes.
        most: u32,
    },
    /// A table of the host is full.
    #[error("this host has no room for more {0}")]
    NoRoom(&'static str),
}

impl Record {
    /// The record as bytes. Equal states have equal bytes.
    ///
    /// # Errors
    /// None is known: the encoding writes to memory.
    pub fn to_bytes(&self) -> Result<Vec<u8>, RecordError> {
        let body = postcard::to_allocvec(&self.0)?;
        let mut out = Vec::with_capacity(HEADER_BYTES + body.len());
        out.extend(MAGIC);
        out.extend(VERSION.to_le_bytes());
        out.extend((body.len() as u64).to_le_bytes());
        out.extend(checksum(&out, &body).to_le_bytes());
        out.extend(body);
        Ok(out)
    }

    /// Reads a record, and checks that it is consistent in itself.
    ///
    /// # Errors
    /// A [`RecordError`] that says what is wrong.
    pub fn from_bytes(bytes: &[u8]) -> Result<Record, RecordError> {
        let truncated =
            |expected: usize| RecordError::Truncated { expected: expected as u64, found: bytes.len() as u64 };
        if !MAGIC.starts_with(bytes.get(..MAGIC.len()).unwrap_or(bytes)) {
            return Err(RecordError::NotARecord);
        }
        let Some((header, body)) = bytes.split_at_checked(HEADER_BYTES) else { return Err(truncated(HEADER_BYTES)) };
        let (head, crc) = header.split_at(HEADER_BYTES - 4);
        let word = |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        let version = word(8);
        if version != VERSION {
            return Err(RecordError::Version { found: version });
        }
        let length = u64::from(word(12)) | u64::from(word(16)) << 32;
        let expected = (HEADER_BYTES as u64).saturating_add(length);
        match (bytes.len() as u64).cmp(&expected) {
            std::cmp::Ordering::Less => return Err(RecordError::Truncated { expected, found: bytes.len() as u64 }),
            std::cmp::Ordering::Greater => return Err(RecordError::Trailing(bytes.len() as u64 - expected)),
            std::cmp::Ordering::Equal => {}
        }
        if checksum(head, body).to_le_bytes() != *crc {
            return Err(RecordError::Checksum);
        }
        let (data, rest): (VrnicData, _) = postcard::take_from_bytes(body)?;
        if !rest.is_empty() {
            return Err(RecordError::Trailing(rest.len() as u64));
        }
        check::check(&data)?;
        Ok(Record(data))
    }

    /// The numbers of the sessions in it, by which [`Attach`] is asked.
    pub fn sessions(&self) -> impl Iterator<Item = u32> {
        self.0.sessions.iter().map(|s| s.number)
    }

    /// Its group, and its GID table.
    pub fn addresses(&self) -> (u32, Vec<Gid>) {
        (self.0.group, self.0.gids.iter().map(|&g| Gid(g)).collect())
    }
}

fn checksum(head: &[u8], body: &[u8]) -> u32 {
    let mut crc = crc32fast::Hasher::new();
    crc.update(head);
    crc.update(body);
    crc.finalize()
}
