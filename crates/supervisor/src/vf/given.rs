//! The descriptors of device nodes that programs have got.
//!
//! A descriptor need not show at any process: it may be on its way in a socket, or belong to a single thread. Without a
//! context it has no verbs objects either. So each one is opened at a node of its own, which is unlinked at once, and
//! which the kernel forgets when the last copy of the descriptor is closed.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::Mutex;

use rustix::fs::{CWD, FileType, Mode, inotify, makedev, mknodat};
use unirdma_device::lock;

use super::tree::{Node, Number};

/// The descriptors that this supervisor has given to programs. The next one does not know them.
pub(super) struct Given {
    /// Watches the node of each.
    watch: OwnedFd,
    /// Devices by the numbers of watches.
    devices: Mutex<BTreeMap<i32, Number>>,
}

impl Given {
    /// # Errors
    /// There is no inotify instance.
    pub fn new() -> io::Result<Given> {
        let watch = inotify::init(inotify::CreateFlags::CLOEXEC | inotify::CreateFlags::NONBLOCK)?;
        Ok(Given { watch, devices: Mutex::default() })
    }

    /// Opens a device for a program.
    ///
    /// # Errors
    /// There is no node, or none can be made beside it.
    pub fn open(&self, node: &Node) -> io::Result<OwnedFd> {
        let own = node.path.with_file_name(format!(".unirdma-{}", std::process::id()));
        let mut devices = lock(&self.devices);
        let _ = fs::remove_file(&own);
        let device = makedev(node.number.0, node.number.1);
        let made = mknodat(CWD, &own, FileType::CharacterDevice, Mode::RUSR | Mode::WUSR, device);
        let failed = |e: rustix::io::Errno| {
            io::Error::new(e.kind(), format!("no node can be made beside it, which needs CAP_MKNOD: {e}"))
        };
        made.map_err(failed)?;
        let opened = self.open_watched(&own);
        fs::remove_file(&own)?;
        let (watched, fd) = opened?;
        devices.insert(watched, node.number);
        Ok(fd)
    }

    fn open_watched(&self, node: &Path) -> io::Result<(i32, OwnedFd)> {
        let watched = inotify::add_watch(&self.watch, node, inotify::WatchFlags::DELETE_SELF)?;
        let file = fs::File::options().read(true).write(true).open(node)?;
        Ok((watched, file.into()))
    }

    /// The numbers of descriptors that are still open, by their devices.
    ///
    /// # Errors
    /// The kernel does not show the watches.
    pub fn count(&self) -> io::Result<BTreeMap<Number, u32>> {
        let mut devices = lock(&self.devices);
        // Nodes that are gone are known by their absence, so the events need not be understood.
        while rustix::io::read(&self.watch, &mut [0; 4096]).is_ok_and(|n| n > 0) {}
        let text = fs::read_to_string(format!("/proc/self/fdinfo/{}", self.watch.as_raw_fd()))?;
        let number = |line: &str| i32::from_str_radix(line.strip_prefix("inotify wd:")?.split(' ').next()?, 16).ok();
        let open: BTreeSet<i32> = text.lines().filter_map(number).collect();
        devices.retain(|watched, _| open.contains(watched));
        let mut counts = BTreeMap::new();
        devices.values().for_each(|device| *counts.entry(*device).or_default() += 1);
        Ok(counts)
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use unirdma_ipc::fdpass;

    use super::super::tree::tests::Temporary;
    use super::*;

    #[test]
    fn a_descriptor_is_known_until_its_last_copy_is_closed() {
        let has = rustix::thread::capabilities(None).unwrap().effective;
        if !has.contains(rustix::thread::CapabilitySet::MKNOD) {
            return eprintln!("skipped: it needs CAP_MKNOD");
        }
        let tree = Temporary::new();
        fs::create_dir_all(&tree.0.sys).unwrap();
        // The number of /dev/null.
        let node = Node { path: tree.0.sys.join("null"), number: (1, 3) };
        let given = Given::new().unwrap();
        let fd = match given.open(&node) {
            Err(e) if e.kind() == io::ErrorKind::PermissionDenied => {
                return eprintln!("skipped: devices cannot be opened in the directory for temporary files: {e}");
            }
            opened => opened.unwrap(),
        };
        let second = given.open(&node).unwrap();
        assert_eq!(given.count().unwrap(), BTreeMap::from([((1, 3), 2)]));
        assert_eq!(fs::read_dir(&tree.0.sys).unwrap().filter(|e| !e.as_ref().unwrap().path().is_dir()).count(), 0);
        drop(second);
        let (ours, theirs) = UnixStream::pair().unwrap();
        fdpass::send(ours.as_fd(), b"x", &[fd.as_fd()]).unwrap();
        drop((fd, ours));
        assert_eq!(given.count().unwrap(), BTreeMap::from([((1, 3), 1)]));
        drop(theirs);
        assert_eq!(given.count().unwrap(), BTreeMap::new());
    }
}
