//! The device's directory as a file system whose files have present figures: FUSE, served by `unirdma run` outside of
//! the container.
//!
//! The virtual layer is asked when something is read, at most once in [`FRESH`]. So a container that reads much costs
//! itself, and one that reads nothing costs nothing. A virtual layer that does not answer is waited for once, for
//! [`PATIENCE`]; until it answers, the last figures are shown.

use std::collections::{BTreeMap, HashMap};
use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, UNIX_EPOCH};

use fuser::{
    Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo, LockOwner, OpenFlags,
    ReplyAttr, ReplyData, ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyOpen, Request, Session, SessionACL,
};
use rustix::fs::{Mode, OFlags};
use unirdma_ipc::vrnic::VrnicInfo;
use unirdma_supervisor::Client;
use unirdma_supervisor::admin;

use super::device_files::{self, Entry, LIFESPAN_MS};
use super::{Device, HARMLESS, Net, interface};
use crate::{mounts, vrnics};

/// Figures that are not older are shown without asking.
const FRESH: Duration = Duration::from_millis(LIFESPAN_MS);
/// How long a reader waits for the virtual layer.
const PATIENCE: Duration = Duration::from_millis(300);
/// How long the kernel may believe that a name exists.
const NAME_TTL: Duration = Duration::from_millis(200);
/// Most files that are open at the same time.
const MAX_OPEN: usize = 4096;
/// Size of a file of sysfs, whatever it contains.
const SIZE: u64 = 4096;

/// Makes the file system, which is not attached yet, and the descriptor by which it is served.
///
/// # Errors
/// There is no /dev/fuse, or the kernel refuses.
pub(super) fn mount() -> io::Result<(OwnedFd, OwnedFd)> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    let device = rustix::fs::open("/dev/fuse", flags, Mode::empty()).map_err(crate::errors::context("/dev/fuse"))?;
    let id = |id: u32| id.to_string();
    let options = [
        ("fd", &*id(device.as_raw_fd() as u32)),
        ("rootmode", "40000"),
        ("user_id", &*id(rustix::process::geteuid().as_raw())),
        ("group_id", &*id(rustix::process::getegid().as_raw())),
        // For the users of the container, whose user namespace is below that of this process. The kernel lets nobody
        // of another one in.
        ("allow_other", ""),
        ("default_permissions", ""),
    ];
    let attributes = HARMLESS | rustix::mount::MountAttrFlags::MOUNT_ATTR_RDONLY;
    Ok((mounts::mount_new("fuse", &options, attributes)?, device))
}

/// Serves the file system of a device in threads of this process until it is unmounted. Until the virtual layer is
/// asked, it shows what the device's vRNIC was.
///
/// # Errors
/// The kernel speaks no version of FUSE that we know, or no thread can be made.
pub(super) fn serve(files: OwnedFd, dir: &Path, device: Device<'_>, net: Net) -> io::Result<()> {
    let Device { info, name, number, interface } = device;
    let known = Known { info: info.clone(), asked: None, answered: Instant::now(), number: 0 };
    let figures = Arc::new(Figures { known: Mutex::new(known), wanted: Condvar::new(), came: Condvar::new() });
    let (asker, dir, vrnic) = (figures.clone(), dir.to_owned(), info.name.clone());
    std::thread::Builder::new().name("figures".into()).spawn(move || asker.ask_for_ever(&dir, &vrnic))?;
    let mut shown = Shown {
        name: name.into(),
        device: number,
        interface: interface.into(),
        net,
        number: 0,
        tree: BTreeMap::new(),
        numbers: HashMap::new(),
        paths: Vec::new(),
    };
    shown.show(info, 0);
    let state = State { shown, open: HashMap::new(), opened: 0 };
    let served = Served { figures, state: Mutex::new(state) };
    Session::from_fd(served, files, SessionACL::All, Config::default())?.spawn().map(drop)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The vRNIC's figures.
struct Figures {
    known: Mutex<Known>,
    wanted: Condvar,
    came: Condvar,
}

struct Known {
    info: VrnicInfo,
    /// Counts the answers.
    number: u64,
    /// When the question was asked that has no answer yet.
    asked: Option<Instant>,
    /// When the last question was answered, or failed.
    answered: Instant,
}

impl Figures {
    /// The figures as they are now or, if the virtual layer does not say, as they were. Waits at most [`PATIENCE`].
    fn now(&self) -> MutexGuard<'_, Known> {
        let mut known = lock(&self.known);
        if known.asked.is_none() {
            if known.answered.elapsed() < FRESH {
                return known;
            }
            known.asked = Some(Instant::now());
            self.wanted.notify_one();
        }
        let patience = PATIENCE.saturating_sub(known.asked.map_or(Duration::ZERO, |a| a.elapsed()));
        let waited = self.came.wait_timeout_while(known, patience, |k| k.asked.is_some());
        waited.unwrap_or_else(PoisonError::into_inner).0
    }

    /// Asks the virtual layer whenever a reader wants figures. An own thread, because the virtual layer may never
    /// answer.
    fn ask_for_ever(&self, dir: &Path, vrnic: &str) {
        let mut client: Option<Client> = None;
        loop {
            let wanted = self.wanted.wait_while(lock(&self.known), |k| k.asked.is_none());
            drop(wanted);
            let answer = ask(&mut client, dir, vrnic);
            if answer.is_err() {
                client = None;
            }
            let mut known = lock(&self.known);
            if let Ok(info) = answer {
                known.info = info;
                known.number += 1;
            }
            (known.asked, known.answered) = (None, Instant::now());
            self.came.notify_all();
        }
    }
}

fn ask(client: &mut Option<Client>, dir: &Path, vrnic: &str) -> io::Result<VrnicInfo> {
    let client = match client {
        Some(client) => client,
        none => none.insert(Client::connect(dir)?),
    };
    vrnics::ask(client, &admin::Request::VrnicFigures { name: vrnic.into() })
}

/// A name of the file system.
enum Node {
    Directory,
    Entry(Entry),
}

/// The tree of names for the figures of an answer.
struct Shown {
    /// The device's name, number and interface.
    name: String,
    device: usize,
    interface: String,
    net: Net,
    /// Number of the answer.
    number: u64,
    /// All names by path; the root directory is the empty path.
    tree: BTreeMap<String, Node>,
    /// Inode numbers: the place in `paths`, and one more. A path keeps its number when the name vanishes.
    numbers: HashMap<String, u64>,
    paths: Vec<String>,
}

impl Shown {
    fn show(&mut self, info: &VrnicInfo, number: u64) {
        let net = interface(info, &self.interface, self.net);
        let device = Device { info, name: &self.name, number: self.device, interface: &self.interface };
        let files = device_files::files(device, net.as_ref());
        self.number = number;
        self.tree = BTreeMap::from([(String::new(), Node::Directory)]);
        for (path, entry) in files {
            for (slash, _) in path.match_indices('/') {
                self.tree.insert(path[..slash].into(), Node::Directory);
            }
            self.tree.insert(path, Node::Entry(entry));
        }
        for path in self.tree.keys().filter(|p| !self.numbers.contains_key(*p)) {
            self.paths.push(path.clone());
        }
        for (i, path) in self.paths.iter().enumerate().skip(self.numbers.len()) {
            self.numbers.insert(path.clone(), i as u64 + 1);
        }
    }

    /// The path of an inode that exists now, and what it is.
    fn find(&self, ino: INodeNo) -> Option<(&str, &Node)> {
        let path = self.paths.get(usize::try_from(u64::from(ino).checked_sub(1)?).ok()?)?;
        Some((path, self.tree.get(path)?))
    }

    fn attributes(&self, path: &str, node: &Node) -> FileAttr {
        let (kind, perm, size) = match node {
            Node::Directory => (FileType::Directory, 0o555, 0),
            Node::Entry(Entry::Link(to)) => (FileType::Symlink, 0o777, to.len() as u64),
            Node::Entry(_) => (FileType::RegularFile, 0o444, SIZE),
        };
        FileAttr {
            ino: INodeNo(self.numbers.get(path).copied().unwrap_or_default()),
            size,
            blocks: 0,
            atime: UNIX_EPOCH,
            mtime: UNIX_EPOCH,
            ctime: UNIX_EPOCH,
            crtime: UNIX_EPOCH,
            kind,
            perm,
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            blksize: SIZE as u32,
            flags: 0,
        }
    }

    /// The names in a directory, with what they are.
    fn within(&self, directory: &str) -> impl Iterator<Item = (&str, &String, &Node)> {
        let before = if directory.is_empty() { String::new() } else { format!("{directory}/") };
        let below = self.tree.range(before.clone()..).take_while({
            let before = before.clone();
            move |(path, _)| path.starts_with(&before)
        });
        below.filter_map(move |(path, node)| {
            let name = &path[before.len()..];
            (!name.is_empty() && !name.contains('/')).then_some((name, path, node))
        })
    }
}

struct State {
    shown: Shown,
    /// Texts of open files, by handle: a text does not change between two reads of its parts.
    open: HashMap<u64, String>,
    opened: u64,
}

/// The file system.
struct Served {
    figures: Arc<Figures>,
    state: Mutex<State>,
}

impl Served {
    /// The state, with present figures.
    fn now(&self) -> MutexGuard<'_, State> {
        let known = self.figures.now();
        let mut state = lock(&self.state);
        if known.number != state.shown.number {
            state.shown.show(&known.info, known.number);
        }
        state
    }
}

fn child(directory: &str, name: &OsStr) -> Option<String> {
    let name = name.to_str()?;
    Some(if directory.is_empty() { name.into() } else { format!("{directory}/{name}") })
}

impl Filesystem for Served {
    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let state = self.now();
        let path = state.shown.find(parent).and_then(|(directory, _)| child(directory, name));
        match path.as_ref().and_then(|p| Some((p, state.shown.tree.get(p)?))) {
            Some((path, node)) => reply.entry(&NAME_TTL, &state.shown.attributes(path, node), Generation(0)),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        let state = lock(&self.state);
        match state.shown.find(ino) {
            Some((path, node)) => reply.attr(&NAME_TTL, &state.shown.attributes(path, node)),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn readlink(&self, _: &Request, ino: INodeNo, reply: ReplyData) {
        match lock(&self.state).shown.find(ino) {
            Some((_, Node::Entry(Entry::Link(to)))) => reply.data(to.as_bytes()),
            _ => reply.error(Errno::ENOENT),
        }
    }

    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        let mut state = lock(&self.state);
        if state.open.len() >= MAX_OPEN {
            return reply.error(Errno::ENFILE);
        }
        state.opened += 1;
        let handle = state.opened;
        state.open.insert(handle, String::new());
        // Each read comes here, whatever size the file seems to have.
        reply.opened(FileHandle(handle), FopenFlags::FOPEN_DIRECT_IO);
    }

    fn read(
        &self,
        _: &Request,
        ino: INodeNo,
        handle: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let mut state = if offset == 0 { self.now() } else { lock(&self.state) };
        if offset == 0 {
            let text = match state.shown.find(ino) {
                Some((_, Node::Entry(Entry::Text(text)))) => text.clone(),
                Some((_, Node::Entry(Entry::Empty))) => return reply.error(Errno::EINVAL),
                _ => return reply.error(Errno::ENODEV),
            };
            state.open.insert(handle.into(), text);
        }
        let text = state.open.get(&handle.into()).map_or("", String::as_str).as_bytes();
        let begin = text.len().min(usize::try_from(offset).unwrap_or(usize::MAX));
        let end = text.len().min(begin.saturating_add(size as usize));
        reply.data(&text[begin..end]);
    }

    fn release(
        &self,
        _: &Request,
        _: INodeNo,
        handle: FileHandle,
        _: OpenFlags,
        _: Option<LockOwner>,
        _: bool,
        reply: ReplyEmpty,
    ) {
        lock(&self.state).open.remove(&handle.into());
        reply.ok();
    }

    fn readdir(&self, _: &Request, ino: INodeNo, _: FileHandle, offset: u64, mut reply: ReplyDirectory) {
        let state = self.now();
        let Some((directory, Node::Directory)) = state.shown.find(ino) else { return reply.error(Errno::ENOTDIR) };
        let own = [".", ".."].map(|name| (name, ino, FileType::Directory));
        let names = state.shown.within(directory).map(|(name, path, node)| {
            let attributes = state.shown.attributes(path, node);
            (name, attributes.ino, attributes.kind)
        });
        let skipped = usize::try_from(offset).unwrap_or(usize::MAX);
        for (i, (name, ino, kind)) in own.into_iter().chain(names).enumerate().skip(skipped) {
            if reply.add(ino, i as u64 + 1, kind, name) {
                break;
            }
        }
        reply.ok();
    }
}
