//! Dead objects, which no lookup finds any more and which are not freed yet.

use std::collections::{VecDeque, btree_map, hash_map};

use super::datagram::Ah;
use super::ids::{SessionId, VrnicId};
use super::mr::Mr;
use super::queues::Pd;
use crate::slab::Handle;

/// Dead objects of a session.
pub(crate) struct DeadObject {
    pub vrnic: VrnicId,
    pub session: SessionId,
    pub dead: Dead,
}

pub(crate) enum Dead {
    /// All objects of the session.
    Session(Box<Remains>),
    /// The session lives, but has lost memory regions: the MRs in them are dead. They are still in the session's table.
    Regions,
}

/// Objects of a session that do nothing by themselves.
pub(crate) struct Remains {
    pub mrs: btree_map::IntoIter<u32, Handle<Mr>>,
    pub ahs: hash_map::IntoIter<u32, Handle<Ah>>,
    pub pds: btree_map::IntoIter<u32, Handle<Pd>>,
}

impl Remains {
    pub fn len(&self) -> usize {
        self.mrs.len() + self.ahs.len() + self.pds.len()
    }
}

/// All dead objects, session by session.
pub(crate) type DeadObjects = VecDeque<DeadObject>;
