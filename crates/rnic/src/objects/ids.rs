//! Identities of vRNICs and sessions.

use crate::slab::Handle;

/// Stands for a vRNIC in handles.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum VrnicKind {}

/// Stands for a session in handles.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum SessionKind {}

/// A vRNIC of this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct VrnicId(pub(crate) Handle<VrnicKind>);

/// One frontend of a vRNIC: a process of a container, or a VM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SessionId(pub(crate) Handle<SessionKind>);

impl SessionId {
    /// The session with this number; there may be none.
    pub fn from_number(n: u64) -> Self {
        SessionId(Handle::from_raw(n))
    }

    /// Its number, which no later session has.
    pub fn number(self) -> u64 {
        self.0.raw()
    }
}
