//! Where this host learns of others: which virtual addresses live on which host, and which number each group has between hosts.
//!
//! A source says what has changed, not what there is, so that one vRNIC that moves among many costs what it touches, down to the worker
//! of its group. The peers file is one source ([`PeersFile`]), the control centre another ([`Bulletin`]).

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use rustix::fs::inotify;
use unirdma_device::lock;
use unirdma_formats::Mac;
use unirdma_policy::Rule;

use crate::WireConfig;
use crate::peers::{self, Peers};

/// Where a virtual address is: at another host, or at this one, for groups that a rule joins with that of the address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub host: IpAddr,
    /// It is a plain RoCEv2 device.
    pub foreign: bool,
}

/// A change of what is known of other hosts. `None`: it is not known any more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// The number of a group between hosts.
    Vni { group: String, vni: Option<u32> },
    /// Where a virtual address of a group is.
    Address { group: String, address: IpAddr, place: Option<Place> },
    /// At which host a vRNIC of a group is that has this Ethernet address.
    Mac { group: String, mac: Mac, host: Option<IpAddr> },
    /// A rule between groups is said, or not any more. It holds for as long as it was said more often than taken back.
    Rule { rule: Rule, there: bool },
}

/// Who knows other hosts.
pub(crate) trait Source: Send {
    /// What it is, for people.
    fn name(&self) -> String;

    /// What becomes readable when there may be changes. `None`: whoever changes the source says so itself.
    fn descriptor(&self) -> Option<BorrowedFd<'_>>;

    /// What has changed since the last call, the first time everything. `None`: nothing was looked at, since nothing has happened.
    ///
    /// # Errors
    /// One line; what was known before is still so.
    fn changes(&mut self) -> Option<Result<Vec<Change>, String>>;
}

/// The source of a configuration: its peers file, or else what the control centre says.
///
/// # Errors
/// Those of [`PeersFile::new`].
pub(crate) fn of(c: &WireConfig, bulletin: &Bulletin) -> io::Result<Box<dyn Source>> {
    Ok(match &c.peers {
        Some(file) => Box::new(PeersFile::new(file, &c.addresses)?),
        None => Box::new(bulletin.clone()),
    })
}

/// What the control centre has said of other hosts, and the network has not looked at yet.
#[derive(Clone, Default)]
pub(crate) struct Bulletin(Arc<Mutex<Vec<Change>>>);

impl Bulletin {
    /// Adds to it. The network is to look at it then.
    pub fn add(&self, changes: impl IntoIterator<Item = Change>) {
        lock(&self.0).extend(changes);
    }
}

impl Source for Bulletin {
    fn name(&self) -> String {
        "the control centre".into()
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn changes(&mut self) -> Option<Result<Vec<Change>, String>> {
        let changes = std::mem::take(&mut *lock(&self.0));
        (!changes.is_empty()).then_some(Ok(changes))
    }
}

/// The peers file, read again when it changes.
pub(crate) struct PeersFile {
    path: PathBuf,
    own: Vec<IpAddr>,
    /// Of the directory: editors replace a file by another.
    watch: OwnedFd,
    /// As it was read the last time.
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

    fn changes(&mut self) -> Option<Result<Vec<Change>, String>> {
        if !self.something_happened() && self.peers.is_some() {
            return None;
        }
        Some(peers::read(&self.path, &self.own).map(|now| {
            let changes = now.changes(self.peers.as_ref().unwrap_or(&Peers::default()));
            self.peers = Some(now);
            changes
        }))
    }
}
