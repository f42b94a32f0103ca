//! Protection domains, completion queues, shared receive queues and XRC domains.

use std::collections::HashMap;

use unirdma_mem::{CqRing, QpRings};

use super::ids::{SessionId, VrnicId};
use super::mr::Mr;
use crate::slab::{ByNumber, Handle};

pub(crate) struct Pd {
    pub owner: SessionId,
    /// Its number in its owner's session.
    pub number: u32,
    /// MRs, windows, AHs, SRQs and QPs in it. It cannot be destroyed before them.
    pub uses: u32,
    /// Null MRs in it, by their numbers. They are destroyed with it.
    pub nulls: ByNumber<Handle<Mr>>,
}

impl Pd {
    pub fn new(owner: SessionId, number: u32) -> Pd {
        Pd { owner, number, uses: 0, nulls: ByNumber::default() }
    }
}

pub(crate) struct Cq {
    pub owner: SessionId,
    /// Its number in its owner's session.
    pub number: u32,
    /// The number of QP queues and XRC SRQs that complete to it.
    pub uses: u32,
    pub ring: CqRing,
    pub comp_queue: Option<u16>,
    /// Set by REQ_NOTIFY_CQ: `NOTIFY_*` flags, served once.
    pub notify: u32,
    pub moderation: Option<Moderation>,
    pub dead: bool,
}

/// Moderation of a CQ's completion events (`ibv_modify_cq(3)`): an event comes after `count` completions or `period_ns`
/// after the first one, whichever is earlier.
#[derive(Clone, Copy, Default)]
pub(crate) struct Moderation {
    pub count: u16,
    pub period_ns: u64,
    /// Completions that wait for an event, and whether one of them is solicited.
    pub waiting: u16,
    pub solicited: bool,
    /// When the first of them is to be reported, ns, and whether a timer runs. The timer may have been set for earlier
    /// completions.
    pub due: u64,
    pub timed: bool,
}

/// A shared receive queue.
pub(crate) struct Srq {
    pub owner: SessionId,
    /// Its number in its owner's session.
    pub number: u32,
    /// QPs that take their receives here, and target QPs of XRC connections that are writing a message into one.
    pub uses: u32,
    pub pd: Handle<Pd>,
    pub rings: QpRings,
    pub max_wr: u32,
    pub max_sge: u32,
    pub cons: u32,
    /// An event is raised once, when fewer receives than this are left; 0: none.
    pub limit: u32,
    /// The driver moved an index too far: the ring is never read again.
    pub broken: bool,
    pub xrc: Option<XrcSrq>,
}

/// The XRC domain, CQ and number of an XRC SRQ.
#[derive(Clone, Copy, Debug)]
pub(crate) struct XrcSrq {
    pub xrcd: Handle<Xrcd>,
    pub domain: u32,
    pub cq: Handle<Cq>,
    /// Its number in packets, 24 bits.
    pub number: u32,
}

/// An open XRC domain.
pub(crate) struct Xrcd {
    pub owner: SessionId,
    /// Its number in its owner's session.
    pub number: u32,
    /// QPs, openers of QPs, and SRQs in it.
    pub uses: u32,
    /// The file by which programs share it, if they do.
    pub file: Option<File>,
    /// The number that all open XRC domains of one file have in common.
    pub domain: u32,
}

/// A file by which programs of a vRNIC share a domain.
type File = (VrnicId, (u64, u64));

/// The XRC domains that programs share.
#[derive(Default)]
pub(crate) struct Domains {
    pub last: u32,
    /// The domain of a file, and the number of times that it is open.
    pub by_file: HashMap<File, (u32, u32)>,
}

impl Domains {
    pub fn open(&mut self, file: Option<File>) -> u32 {
        let mut new = || {
            self.last = self.last.wrapping_add(1);
            self.last
        };
        let Some(file) = file else { return new() };
        let shared = self.by_file.entry(file).or_insert_with(|| (new(), 0));
        shared.1 += 1;
        shared.0
    }

    pub fn close(&mut self, file: File) {
        if let Some(shared) = self.by_file.get_mut(&file) {
            shared.1 -= 1;
            if shared.1 == 0 {
                self.by_file.remove(&file);
            }
        }
    }
}

/// The attributes of an SRQ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SrqAttr {
    /// Receives that it holds.
    pub max_wr: u32,
    /// SGEs of one receive.
    pub max_sge: u32,
    /// An event is raised when fewer receives than this are left; 0: none.
    pub limit: u32,
    /// XRC domain and CQ, for an XRC SRQ.
    pub xrc: Option<(u32, u32)>,
}

/// An SRQ as QUERY_SRQ shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SrqInfo {
    /// As in [`SrqAttr`].
    pub max_wr: u32,
    /// As in [`SrqAttr`].
    pub max_sge: u32,
    /// As in [`SrqAttr`].
    pub limit: u32,
}

/// How a domain is opened (`ibv_open_xrcd(3)`).
#[derive(Clone, Copy, Debug, Default)]
pub struct OpenXrcd {
    /// Device and inode of a file, by which programs share it.
    pub key: Option<(u64, u64)>,
    /// A new domain may be made.
    pub create: bool,
    /// A new domain must be made.
    pub exclusive: bool,
}
