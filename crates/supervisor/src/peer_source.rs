//! Sources of knowledge about other hosts: the host of each virtual address, and the number of each group between
//! hosts.
//!
//! A source reports changes instead of the whole state. So the cost of a moved vRNIC depends on the change alone, down
//! to the worker of its group. One source is the peers file ([`PeersFile`]), another one the control centre
//! ([`CentrePeers`]).

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use rustix::fs::inotify;
use unirdma_device::lock;

use crate::WireConfig;
use crate::peer_change::Change;
use crate::peers_file::{self, Peers, PeersError};

/// A source of knowledge about other hosts.
pub(crate) trait Source: Send {
    /// Its name, for people.
    fn name(&self) -> String;

    /// A descriptor that becomes readable when there may be changes. `None`: the part of the program that changes the
    /// source calls the network.
    fn descriptor(&self) -> Option<BorrowedFd<'_>>;

    /// The changes since the last call; at the first call, everything. `None`: nothing has happened, so nothing was
    /// read.
    ///
    /// # Errors
    /// The source cannot be read. The former knowledge stays valid.
    fn changes(&mut self) -> Option<Result<Vec<Change>, PeersError>>;
}

/// The source of a configuration: the peers file, or else the control centre.
///
/// # Errors
/// Errors of [`PeersFile::new`].
pub(crate) fn of(c: &WireConfig, bulletin: &CentrePeers) -> io::Result<Box<dyn Source>> {
    Ok(match &c.peers {
        Some(file) => Box::new(PeersFile::new(file, &c.addresses)?),
        None => Box::new(bulletin.clone()),
    })
}

/// The control centre's changes that the network has not read yet.
#[derive(Clone, Default)]
pub(crate) struct CentrePeers(Arc<Mutex<Vec<Change>>>);

impl CentrePeers {
    /// Adds changes. The caller must then make the network read them.
    pub fn add(&self, changes: impl IntoIterator<Item = Change>) {
        lock(&self.0).extend(changes);
    }
}

impl Source for CentrePeers {
    fn name(&self) -> String {
        "the control centre".into()
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn changes(&mut self) -> Option<Result<Vec<Change>, PeersError>> {
        let changes = std::mem::take(&mut *lock(&self.0));
        (!changes.is_empty()).then_some(Ok(changes))
    }
}

/// The peers file. It is read again when it changes.
pub(crate) struct PeersFile {
    path: PathBuf,
    own: Vec<IpAddr>,
    /// Watches the file's directory, because editors replace the file by another one.
    watch: OwnedFd,
    /// The content at the last reading.
    peers: Option<Peers>,
}

impl PeersFile {
    /// The file at `path`, for a host with the addresses `own`.
    ///
    /// # Errors
    /// Its directory cannot be watched.
    pub fn new(path: &Path, own: &[IpAddr]) -> io::Result<PeersFile> {
        let watch = inotify::init(inotify::CreateFlags::CLOEXEC | inotify::CreateFlags::NONBLOCK)?;
        let watched = path.parent().filter(|d| !d.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let events = inotify::WatchFlags::CLOSE_WRITE | inotify::WatchFlags::MOVED_TO;
        inotify::add_watch(&watch, watched, events).map_err(|e| {
            io::Error::new(io::Error::from(e).kind(), format!("cannot watch {}: {e}", watched.display()))
        })?;
        Ok(PeersFile { path: path.into(), own: own.to_vec(), watch, peers: None })
    }

    fn something_happened(&self) -> bool {
        let mut events = [0; 4096];
        let mut any = false;
        while rustix::io::read(&self.watch, &mut events[..]).is_ok_and(|n| n > 0) {
            any = true;
        }
        any
    }
}

impl Source for PeersFile {
    fn name(&self) -> String {
        self.path.display().to_string()
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.watch.as_fd())
    }

    fn changes(&mut self) -> Option<Result<Vec<Change>, PeersError>> {
        if !self.something_happened() && self.peers.is_some() {
            return None;
        }
        Some(peers_file::read(&self.path, &self.own).map(|now| {
            let changes = now.changes(self.peers.as_ref().unwrap_or(&Peers::default()));
            self.peers = Some(now);
            changes
        }))
    }
}
