//! The file system of a container: a tree of mounts that is built from nothing.
//!
//! The host's mounts are copied while they are still visible. The copies get their flags while they are not attached
//! anywhere, and are then put into a new root, which becomes the only one. No path leads out of it. A process that
//! enters a user namespace below this one and copies these mounts can neither remove any of them nor change their
//! flags.

use std::cell::RefCell;
use std::ffi::{CString, OsStr};
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags, ResolveFlags, mkdirat, openat, openat2, readlinkat};
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MountFlags, MountPropagationFlags, MoveMountFlags, OpenTreeFlags,
    UnmountFlags, fsconfig_create, fsconfig_set_flag, fsconfig_set_string, fsmount, fsopen, move_mount, open_tree,
};

use unirdma_abi::container::{MAX_VRNICS, vrnic_dir};
use unirdma_supervisor::VHOST_SOCKET;

use crate::bind::Bind;
use crate::errors::context;
use crate::home::{self, Home, Show};
use crate::idmap::Ids;
use crate::masked::Hidden;
use crate::workdir::Working;

/// The directory in which programs find our libraries.
pub(crate) const LIBRARIES: &str = "/run/unirdma-lib";
/// Directory of what our libraries cover: the real ones, which programs on a VF use.
pub(crate) const REAL: &str = "/run/unirdma-lib/real";

/// Entries of the host's root directory that the container has its own of, or none.
const OWN: [&str; 5] = ["proc", "dev", "tmp", "run", "lost+found"];
/// Entries of the host's root directory with programs, their configuration, and what the kernel says about the machine.
const SYSTEM: [&str; 11] = ["bin", "sbin", "lib", "lib32", "lib64", "libx32", "usr", "etc", "nix", "gnu", "sys"];
/// Devices that everybody may use.
const DEVICES: [&str; 6] = ["null", "zero", "full", "random", "urandom", "tty"];
/// Devices that reach only what a program has already: its memory, its network namespace, its mounts. If root makes a
/// container, its user may use them whatever the host's permissions say.
const OPEN_DEVICES: [&str; 3] = ["userfaultfd", "net/tun", "fuse"];

/// The part of the host that a container shows.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Host {
    /// All files.
    All,
    /// Programs and their configuration ([`SYSTEM`]), and an empty working directory.
    System,
}

/// True if a container that shows no more than [`Host::System`] shows what is at this path.
pub(crate) fn is_of_system(path: &Path) -> bool {
    let within = |path: &Path| SYSTEM.iter().any(|name| path.starts_with(Path::new("/").join(name)));
    within(path) && fs::canonicalize(path).is_ok_and(|real| within(&real))
}

/// Parameters of a container's file system.
pub(crate) struct Plan<'a> {
    /// The virtual layer's directory, which the container must not see.
    pub dir: &'a Path,
    pub host: Host,
    /// The vRNICs' directories.
    pub vrnics: &'a [&'a Path],
    /// The directory of our libraries, for a container whose programs use the vRNICs by them.
    pub libraries: Option<&'a Path>,
    /// The system's files of the names of our libraries, which ours cover.
    pub covered: &'a [(&'a str, Vec<PathBuf>)],
    /// Directories that do not show as they are; each comes after the directories that contain it.
    pub homes: &'a [Home],
    pub working: Option<&'a Working>,
    /// The working directory of the command.
    pub starts_in: Option<&'a Path>,
    pub binds: &'a [Bind],
    pub ids: Ids,
    /// The container's user namespace.
    pub users: BorrowedFd<'a>,
}

/// The directories of the vRNICs of the container in which this process is.
pub(crate) fn vrnics() -> Vec<PathBuf> {
    let dirs = (0..MAX_VRNICS).map(|number| PathBuf::from(vrnic_dir(number)));
    dirs.take_while(|dir| dir.join(VHOST_SOCKET).exists()).collect()
}

const CLONE: OpenTreeFlags =
    OpenTreeFlags::OPEN_TREE_CLONE.union(OpenTreeFlags::OPEN_TREE_CLOEXEC).union(OpenTreeFlags::AT_RECURSIVE);

/// A tree of mounts that is not attached yet.
struct Tree {
    mount: OwnedFd,
    directory: bool,
    /// True if the container's user has the rights on its files that this user has outside.
    owned: bool,
}

impl Tree {
    /// Copies the mounts at `path` and below.
    fn copy(path: &Path) -> io::Result<Tree> {
        Ok(Tree { mount: copy(path)?, directory: fs::metadata(path)?.is_dir(), owned: false })
    }

    /// Copies a tree that is already in the new root.
    fn again(&self) -> io::Result<Tree> {
        let mount = again(&self.mount)?;
        Ok(Tree { mount, directory: self.directory, owned: self.owned })
    }

    fn set(&self, attributes: MountAttrFlags, users: Option<BorrowedFd<'_>>, recursive: bool) -> io::Result<()> {
        let users = users.map_or(0, |u| u.as_raw_fd() as u64);
        MountAttr { set: u64::from(attributes.bits()), users, ..MountAttr::default() }.change(&self.mount, recursive)
    }

    /// Gives the container's user the rights on its files that this user has outside.
    fn own(mut self, plan: &Plan<'_>) -> Tree {
        let map = |recursive| self.set(MountAttrFlags::MOUNT_ATTR_IDMAP, Some(plan.users), recursive).is_ok();
        self.owned = !plan.ids.are_mapped() || map(true) || map(false);
        self
    }

    /// Forbids setuid programs and, unless the tree is a device itself, devices.
    fn harmless(self, read_only: bool, device: bool) -> io::Result<Tree> {
        let mut flags = MountAttrFlags::MOUNT_ATTR_NOSUID;
        flags.set(MountAttrFlags::MOUNT_ATTR_NODEV, !device);
        flags.set(MountAttrFlags::MOUNT_ATTR_RDONLY, read_only);
        self.set(flags, None, true)
            .map_err(context("cannot set the flags of a mount (Linux 5.12 or later is needed)"))?;
        Ok(self)
    }
}

/// `struct mount_attr` of mount_setattr(2).
#[repr(C)]
#[derive(Default)]
struct MountAttr {
    set: u64,
    clear: u64,
    propagation: u64,
    users: u64,
}

impl MountAttr {
    /// Changes a mount, and those below if `recursive`.
    fn change(&self, mount: &OwnedFd, recursive: bool) -> io::Result<()> {
        let at = libc::AT_EMPTY_PATH | if recursive { libc::AT_RECURSIVE } else { 0 };
        let (fd, size) = (mount.as_raw_fd(), size_of::<MountAttr>());
        // SAFETY: the structure is the kernel's and lives until the call returns.
        let r = unsafe { libc::syscall(libc::SYS_mount_setattr, fd, c"".as_ptr(), at, &raw const *self, size) };
        if r == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

/// An entry of a directory of the host.
enum Shown {
    Tree(Tree),
    Link(PathBuf),
}

/// Makes a file system that needs no device. It is not attached yet. Options without a value are flags.
pub(crate) fn mount_new(kind: &str, options: &[(&str, &str)], attributes: MountAttrFlags) -> io::Result<OwnedFd> {
    let made = || {
        let fs = fsopen(kind, FsOpenFlags::FSOPEN_CLOEXEC)?;
        for (key, value) in [("source", "unirdma")].iter().chain(options) {
            match *value {
                "" => fsconfig_set_flag(fs.as_fd(), *key)?,
                value => fsconfig_set_string(fs.as_fd(), *key, value)?,
            }
        }
        fsconfig_create(fs.as_fd())?;
        fsmount(fs.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, attributes)
    };
    made().map_err(context(format!("cannot mount {kind}")))
}

/// A copy of the mounts at `path` and below. It is not attached yet. What is mounted on it later is not mounted on the
/// original, too.
pub(crate) fn copy(path: &Path) -> io::Result<OwnedFd> {
    copy_at(CWD, path, CLONE).map_err(context(format!("cannot mount {}", path.display())))
}

fn copy_at(at: BorrowedFd<'_>, path: &Path, how: OpenTreeFlags) -> io::Result<OwnedFd> {
    let copy = open_tree(at, path, how)?;
    // The copy of a shared mount is one of its peers. On most machines all mounts are shared.
    let private = MountAttr { propagation: libc::MS_PRIVATE, ..MountAttr::default() };
    private.change(&copy, true)?;
    Ok(copy)
}

/// Like [`copy`], but nothing can be changed there, and nothing in it has more rights than who uses it.
pub(crate) fn copy_read_only(path: &Path) -> io::Result<OwnedFd> {
    Ok(Tree::copy(path)?.harmless(true, false)?.mount)
}

/// Has nothing be changed in what is mounted at a path. Mounts below it stay as they are.
pub(crate) fn set_read_only(path: &Path) -> io::Result<()> {
    fix(open_tree(CWD, path, OpenTreeFlags::OPEN_TREE_CLOEXEC)?)
}

/// Has nothing be changed in a mount. Mounts below it stay as they are.
pub(crate) fn fix(mount: OwnedFd) -> io::Result<()> {
    Tree { mount, directory: true, owned: false }.set(MountAttrFlags::MOUNT_ATTR_RDONLY, None, false)
}

/// Attaches a mount at a path that this process sees.
pub(crate) fn attach(mount: &OwnedFd, path: &Path) -> io::Result<()> {
    move_mount(mount, "", CWD, path, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)
        .map_err(context(format!("cannot mount on {}", path.display())))
}

/// Mounts an overlay of these directories, the first on top, over `path`. Nothing can be written there.
pub(crate) fn overlay(layers: [&Path; 2], path: &Path) -> io::Result<()> {
    let [upper, lower] = layers.map(|l| l.as_os_str().as_bytes());
    let options = CString::new([b"lowerdir=", upper, b":", lower].concat()).map_err(io::Error::other)?;
    rustix::mount::mount("unirdma", path, "overlay", MountFlags::RDONLY, Some(options.as_c_str()))
        .map_err(context(format!("cannot mount an overlay on {}", path.display())))?;
    rustix::mount::mount_change(path, MountPropagationFlags::PRIVATE)
        .map_err(context(format!("cannot mount on {}", path.display())))
}

/// Lets `make` work with an empty file system on `staging`, which is taken away afterwards. What `make` has mounted
/// elsewhere of it stays.
pub(crate) fn staged<T>(staging: &Path, make: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    rustix::mount::mount("unirdma", staging, "tmpfs", MountFlags::NOSUID, Some(c"mode=0755"))
        .map_err(context("cannot mount tmpfs"))?;
    // Where mounts are shared, what is mounted in a copy of it would be unmounted with it.
    let private = rustix::mount::mount_change(staging, MountPropagationFlags::PRIVATE);
    let made = private.map_err(context("cannot mount tmpfs")).and_then(|()| make());
    let gone = rustix::mount::unmount(staging, UnmountFlags::DETACH).map_err(context("cannot unmount tmpfs"));
    gone.and(made)
}

/// Puts `new` in the place of a directory of this mount namespace. It gets mounts of all that the directory has and it
/// has not. What the directory gets later does not show.
///
/// # Errors
/// A mount fails.
pub(crate) fn replace(directory: &Path, new: &Path) -> io::Result<()> {
    let mut others = Vec::new();
    for entry in fs::read_dir(directory)?.flatten() {
        let (path, place, kind) = (entry.path(), new.join(entry.file_name()), entry.file_type()?);
        if place.symlink_metadata().is_ok() {
            continue;
        }
        if kind.is_symlink() {
            std::os::unix::fs::symlink(fs::read_link(&path)?, place)?;
            continue;
        }
        // A user who cannot copy it cannot open it either.
        let Ok(mount) = copy(&path) else { continue };
        if kind.is_dir() {
            fs::create_dir(&place)?
        } else {
            fs::write(&place, "")?
        }
        others.push((mount, path));
    }
    rustix::mount::mount_bind(new, directory).map_err(context(format!("cannot mount on {}", directory.display())))?;
    others.iter().try_for_each(|(mount, path)| attach(mount, path))
}

/// Adds a file to the `/dev` of this mount namespace, which opens as /dev/null does. `staging`: a directory on which
/// something else is mounted later.
///
/// # Errors
/// A mount fails.
pub(crate) fn add_to_dev(staging: &Path, name: &Path) -> io::Result<()> {
    let dev = Path::new("/dev");
    if dev.join(name).exists() {
        return Ok(());
    }
    staged(staging, || {
        let new = staging.join(name);
        fs::create_dir_all(new.parent().unwrap_or(staging))?;
        fs::write(&new, "")?;
        replace(dev, staging)?;
        attach(&copy(&dev.join("null"))?, &dev.join(name))
    })
}

/// Opens a path of a container whose root directory is `root`. Symbolic links cannot lead out of it.
pub(crate) fn open_within(root: &OwnedFd, path: &Path) -> rustix::io::Result<OwnedFd> {
    let relative = path.strip_prefix("/").unwrap_or(path);
    let relative = if relative.as_os_str().is_empty() { Path::new(".") } else { relative };
    let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
    openat2(root, relative, OFlags::PATH | OFlags::CLOEXEC, Mode::empty(), resolve)
}

/// Like [`open_within`], but makes a directory or an empty file if there is nothing.
pub(crate) fn place_within(root: &OwnedFd, path: &Path, directory: bool) -> io::Result<OwnedFd> {
    match open_within(root, path) {
        Err(rustix::io::Errno::NOENT) => {}
        found => return Ok(found?),
    }
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(io::ErrorKind::NotFound.into());
    };
    let parent = place_within(root, parent, true)?;
    if directory {
        mkdirat(&parent, name, Mode::from_raw_mode(0o755))?;
    } else {
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::CLOEXEC;
        openat(&parent, name, flags, Mode::from_raw_mode(0o644))?;
    }
    Ok(open_within(root, path)?)
}

/// A copy of the mounts at a path of a container whose root directory is `root`.
pub(crate) fn copy_within(root: &OwnedFd, path: &Path) -> io::Result<OwnedFd> {
    let at = open_within(root, path).map_err(context(format!("cannot find {} of the container", path.display())))?;
    again(&at)
}

/// Copies the mounts that a descriptor is of, and those below. They must be attached.
pub(crate) fn again(at: &OwnedFd) -> io::Result<OwnedFd> {
    copy_at(at.as_fd(), Path::new(""), CLONE | OpenTreeFlags::AT_EMPTY_PATH).map_err(context("cannot copy a mount"))
}

/// Attaches a mount at a path of a container whose root directory is `root`. Makes a directory or an empty file there
/// if there is nothing.
pub(crate) fn put_within(root: &OwnedFd, mount: &OwnedFd, path: &Path, directory: bool) -> io::Result<()> {
    let why = |e: io::Error| {
        let hint = match e.kind() {
            io::ErrorKind::ReadOnlyFilesystem | io::ErrorKind::PermissionDenied => {
                " (nothing can be made there; make it outside of the container first, or choose another place)"
            }
            _ => "",
        };
        io::Error::new(e.kind(), format!("cannot put anything at {} of the container: {e}{hint}", path.display()))
    };
    let at = place_within(root, path, directory).map_err(why)?;
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    move_mount(mount, "", &at, "", flags).map_err(|e| why(e.into()))
}

pub(crate) const HARMLESS: MountAttrFlags = MountAttrFlags::MOUNT_ATTR_NOSUID.union(MountAttrFlags::MOUNT_ATTR_NODEV);

/// The new root directory while it is built.
struct Root<'a> {
    mount: OwnedFd,
    plan: &'a Plan<'a>,
    /// Mounts to make read-only once everything is in its place.
    fixed: RefCell<Vec<OwnedFd>>,
}

impl Root<'_> {
    /// A tmpfs that belongs to the container's user.
    fn tmpfs(plan: &Plan<'_>, mode: &str, attributes: MountAttrFlags) -> io::Result<OwnedFd> {
        let (uid, gid) = plan.ids.outside;
        mount_new("tmpfs", &[("mode", mode), ("uid", &uid.to_string()), ("gid", &gid.to_string())], attributes)
    }

    fn open(&self, path: &Path) -> rustix::io::Result<OwnedFd> {
        open_within(&self.mount, path)
    }

    fn place(&self, path: &Path, directory: bool) -> io::Result<OwnedFd> {
        place_within(&self.mount, path, directory)
    }

    fn put_mount(&self, mount: &OwnedFd, path: &Path, directory: bool) -> io::Result<()> {
        put_within(&self.mount, mount, path, directory)
    }

    fn put(&self, tree: &Tree, path: &Path) -> io::Result<()> {
        self.put_mount(&tree.mount, path, tree.directory)
    }

    /// Like [`Root::put`], but also makes sure that the container's user can reach the path. A directory on the way
    /// that the user may not search is covered by an empty one; it would show the user nothing anyway.
    fn put_within_reach(&self, tree: &Tree, path: &Path) -> io::Result<()> {
        let ways: Vec<&Path> = path.ancestors().skip(1).collect();
        let (uid, gid) = self.plan.ids.outside;
        for way in ways.into_iter().rev().filter(|_| self.plan.ids.are_mapped()) {
            let Ok(stat) = self.open(way).and_then(rustix::fs::fstat) else { break };
            let search = match (stat.st_uid == uid, stat.st_gid == gid) {
                (true, _) => 0o100,
                (false, true) => 0o010,
                (false, false) => 0o001,
            };
            if stat.st_mode & search == 0 {
                let empty = Root::tmpfs(self.plan, "0755", HARMLESS)?;
                self.put_mount(&empty, way, true)?;
                self.fixed.borrow_mut().push(empty);
                break;
            }
        }
        self.put(tree, path)
    }

    fn put_tmpfs(&self, path: &str, mode: &str) -> io::Result<()> {
        self.put_mount(&Root::tmpfs(self.plan, mode, HARMLESS)?, Path::new(path), true)
    }

    fn link(&self, to: &Path, path: &Path) -> io::Result<()> {
        let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else { return Ok(()) };
        Ok(rustix::fs::symlinkat(to, self.place(parent, true)?, name)?)
    }

    fn put_all(&self, entries: &[(Shown, PathBuf)]) -> io::Result<()> {
        entries.iter().try_for_each(|(shown, path)| match shown {
            Shown::Tree(tree) => self.put(tree, path),
            Shown::Link(to) => self.link(to, path),
        })
    }

    /// An empty directory that only the container's user may enter.
    fn private(&self) -> io::Result<Tree> {
        let mount = Root::tmpfs(self.plan, "0700", HARMLESS)?;
        Ok(Tree { mount, directory: true, owned: true })
    }

    /// Puts the view of a home directory at the path of that directory.
    fn put_home(&self, view: &View) -> io::Result<Tree> {
        let tree = self.private()?;
        self.put_within_reach(&tree, &view.path)?;
        self.put_all(&view.entries)?;
        if view.show == Show::Ro {
            for name in home::PRIVATE {
                self.put(&self.private()?, &view.path.join(name))?;
            }
        }
        if view.is_read_only(self.plan) {
            self.fixed.borrow_mut().push(tree.mount.try_clone()?);
        }
        Ok(tree)
    }

    /// Makes the devices that programs need.
    fn devices(&self, devices: &[(Tree, PathBuf)], terminal: Option<&Tree>) -> io::Result<()> {
        for (tree, path) in devices {
            let open = path.strip_prefix("/dev").is_ok_and(|p| OPEN_DEVICES.iter().any(|o| p == Path::new(o)));
            if !open || !self.plan.ids.are_mapped() || self.make_device(path, path).is_err() {
                self.put(tree, path)?;
            }
        }
        if let Some(t) = terminal {
            self.put(t, Path::new("/dev/console"))?;
        }
        let pts = mount_new("devpts", &[("ptmxmode", "0666"), ("mode", "0620")], MountAttrFlags::MOUNT_ATTR_NOSUID)?;
        self.put_mount(&pts, Path::new("/dev/pts"), true)?;
        self.put_tmpfs("/dev/shm", "1777")?;
        for (path, to) in [
            ("/dev/ptmx", "pts/ptmx"),
            ("/dev/fd", "/proc/self/fd"),
            ("/dev/stdin", "/proc/self/fd/0"),
            ("/dev/stdout", "/proc/self/fd/1"),
            ("/dev/stderr", "/proc/self/fd/2"),
        ] {
            self.link(Path::new(to), Path::new(path))?;
        }
        Ok(())
    }

    /// Makes a device node like the host's at `source` that everybody may use. Only root can.
    fn make_device(&self, source: &Path, path: &Path) -> io::Result<()> {
        let device = fs::metadata(source)?;
        let kind = rustix::fs::FileType::from_raw_mode(device.mode());
        let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else { return Ok(()) };
        let parent = self.place(parent, true)?;
        let mode = Mode::from_raw_mode(0o666);
        rustix::fs::mknodat(&parent, name, kind, mode, device.rdev())?;
        Ok(rustix::fs::chmodat(&parent, name, mode, rustix::fs::AtFlags::empty())?)
    }

    /// Puts what a `--bind` gives at its place. Returns whether the container's user has the rights on it that this
    /// user has outside.
    fn give(&self, tree: &Tree, bind: &Bind) -> io::Result<bool> {
        // No mount can map the ids of a device.
        let makes = is_device(&bind.source) && self.plan.ids.are_mapped() && bind.target.starts_with("/dev");
        if makes && self.make_device(&bind.source, &bind.target).is_ok() {
            return Ok(true);
        }
        self.put_within_reach(tree, &bind.target)?;
        Ok(tree.owned)
    }
}

/// For each of the user's directories, whether the container's user has the rights on its files that this user has
/// outside. `run --explain` prints it.
pub(crate) struct Built {
    pub home: Option<bool>,
    pub working: Option<bool>,
    pub binds: Vec<bool>,
}

/// A home directory of a container.
enum Place {
    /// The directory as it is.
    Whole(Tree, PathBuf),
    View(View),
}

/// Replaces a home directory that does not show as it is.
struct View {
    path: PathBuf,
    hidden: Hidden,
    /// [`Show::Ro`], with directories for programs to write to, or [`Show::None`].
    show: Show,
    entries: Vec<(Shown, PathBuf)>,
}

impl View {
    fn of(home: &Home) -> io::Result<View> {
        let mut entries = Vec::new();
        if home.show == Show::Ro {
            entries = shown(&home.path, |name| name.as_bytes().first() != Some(&b'.')).unwrap_or_default();
            for path in home::PROGRAMS.iter().map(|p| home.path.join(p)).filter(|p| p.is_dir()) {
                entries.push((Shown::Tree(Tree::copy(&path)?.harmless(true, false)?), path));
            }
        }
        let hidden = Hidden::find(&home.path)?;
        Ok(View { path: home.path.clone(), hidden, show: home.show, entries })
    }

    /// Programs of the system alone need no home directory of their own.
    fn is_read_only(&self, plan: &Plan<'_>) -> bool {
        self.show == Show::Ro || plan.host == Host::System
    }
}

/// Copies of everything of the host that the container shows. All copies are made before any mount could hide what they
/// show.
struct Copies<'a> {
    top: Vec<(Shown, PathBuf)>,
    homes: Vec<Place>,
    working: Option<(Tree, PathBuf)>,
    /// Names in the working directory that are read-only.
    guarded: Vec<(Tree, PathBuf)>,
    binds: Vec<(Tree, &'a Bind)>,
    vrnics: Vec<(Tree, PathBuf)>,
    libraries: Vec<(Tree, PathBuf)>,
    /// The libraries that ours cover.
    covered: Vec<(Tree, PathBuf)>,
    /// The file by which names are resolved, which often lies in /run.
    resolver: Option<(Tree, PathBuf)>,
    devices: Vec<(Tree, PathBuf)>,
    terminal: Option<Tree>,
}

impl<'a> Copies<'a> {
    fn make(plan: &Plan<'a>) -> io::Result<Copies<'a>> {
        let given = |path: PathBuf, read_only| {
            Ok::<_, io::Error>((Tree::copy(&path)?.own(plan).harmless(read_only, false)?, path))
        };
        let place = |h: &Home| match h.show {
            Show::Rw => given(h.path.clone(), false).map(|(tree, path)| Place::Whole(tree, path)),
            Show::Ro | Show::None => View::of(h).map(Place::View),
        };
        let homes = plan.homes.iter().map(place).collect::<io::Result<_>>()?;
        let working = plan.working.map(|w| given(w.path.clone(), w.guard.is_err())).transpose()?;
        let guarded = plan.working.into_iter().flat_map(|w| w.guarded().iter().map(|name| w.path.join(name)));
        let guarded = guarded.map(|path| given(path, true)).collect::<io::Result<_>>()?;
        let mut binds = Vec::new();
        for b in plan.binds {
            let (tree, device) = (Tree::copy(&b.source)?, is_device(&b.source));
            let tree = if device { tree } else { tree.own(plan) };
            binds.push((tree.harmless(b.read_only, device)?, b));
        }
        let (mut libraries, mut covered) = (Vec::new(), Vec::new());
        if let Some(ours) = plan.libraries {
            for entry in fs::read_dir(ours)?.flatten() {
                // The names are links to one file. Each becomes a mount of that file, so that it stays one file.
                if let Ok(file) = fs::canonicalize(entry.path())
                    && file.is_file()
                {
                    libraries.push((given(file, true)?.0, Path::new(LIBRARIES).join(entry.file_name())));
                }
            }
            for (name, real) in plan.covered {
                if let Some(first) = real.first() {
                    covered.push((given(first.clone(), true)?.0, Path::new(REAL).join(name)));
                }
                let ours = fs::canonicalize(ours.join(name))?;
                for at in real.iter().filter(|at| **at != ours) {
                    covered.push((given(ours.clone(), true)?.0, at.clone()));
                }
            }
        }
        let resolver = fs::canonicalize("/etc/resolv.conf").ok().filter(|p| p.starts_with("/run"));
        let mut devices = Vec::new();
        for name in DEVICES.iter().chain(&OPEN_DEVICES) {
            let path = Path::new("/dev").join(name);
            if path.exists() {
                devices.push((Tree::copy(&path)?, path));
            }
        }
        let mut vrnics = Vec::new();
        for (number, dir) in plan.vrnics.iter().enumerate() {
            vrnics.push((Tree::copy(dir)?.harmless(true, false)?, vrnic_dir(number).into()));
            if plan.libraries.is_some() {
                // For programs that look for a character device of RDMA. Our library opens none.
                devices.push((Tree::copy(Path::new("/dev/null"))?, format!("/dev/infiniband/uverbs{number}").into()));
            }
        }
        Ok(Copies {
            top: shown(Path::new("/"), |name| match plan.host {
                Host::All => !OWN.iter().any(|o| name == *o),
                Host::System => SYSTEM.iter().any(|s| name == *s),
            })?,
            homes,
            working,
            guarded,
            binds,
            vrnics,
            libraries,
            covered,
            resolver: resolver.map(|p| Ok::<_, io::Error>((Tree::copy(&p)?.harmless(true, false)?, p))).transpose()?,
            devices,
            terminal: terminal(),
        })
    }
}

fn is_device(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|m| m.file_type().is_char_device() || m.file_type().is_block_device())
}

/// Read-only copies of those entries of a directory whose names `name` accepts.
fn shown(dir: &Path, name: impl Fn(&OsStr) -> bool) -> io::Result<Vec<(Shown, PathBuf)>> {
    let mut all = Vec::new();
    for entry in fs::read_dir(dir)?.flatten().filter(|e| name(&e.file_name())) {
        let path = entry.path();
        // Skips entries that have gone meanwhile, or that this user may not look at.
        let Ok(kind) = entry.file_type() else { continue };
        if kind.is_symlink() {
            let Ok(to) = fs::read_link(&path) else { continue };
            all.push((Shown::Link(to), path));
        } else if kind.is_dir() || kind.is_file() {
            let Ok(tree) = Tree::copy(&path) else { continue };
            all.push((Shown::Tree(tree.harmless(true, false)?), path));
        }
    }
    Ok(all)
}

/// Builds the tree and makes it the root directory. `proc`: the container's own /proc.
///
/// # Errors
/// A mount fails.
pub(crate) fn build(plan: &Plan<'_>, proc: &OwnedFd) -> io::Result<Built> {
    // The new root is mounted on this directory while it is built.
    let dir = fs::canonicalize(plan.dir)?;
    let hidden = Hidden::find(&dir)?;
    let copies = Copies::make(plan)?;
    let mount = Root::tmpfs(plan, "0755", MountAttrFlags::MOUNT_ATTR_NOSUID)?;
    let root = Root { mount, plan, fixed: RefCell::default() };
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
    move_mount(&root.mount, "", CWD, &dir, flags).map_err(context("cannot mount the new root"))?;
    root.put_all(&copies.top)?;
    root.put_mount(proc, Path::new("/proc"), true)?;
    root.put_tmpfs("/tmp", "1777")?;
    if root.open(Path::new("/var/tmp")).is_ok() {
        root.put_tmpfs("/var/tmp", "1777")?;
    }
    root.put_tmpfs("/run", "0755")?;
    run_directories(&root)?;
    if let Some((tree, path)) = &copies.resolver {
        root.put(tree, path)?;
    }
    root.devices(&copies.devices, copies.terminal.as_ref())?;
    let mut covers = Covers { views: Vec::new(), given: Vec::new(), root: &root, proc, dir: &dir };
    for home in &copies.homes {
        match home {
            Place::Whole(tree, path) => root.put_within_reach(tree, path)?,
            Place::View(view) => covers.views.push((view, root.put_home(view)?)),
        }
    }
    covers.cover()?;
    if let Some((tree, path)) = &copies.working {
        root.put_within_reach(tree, path)?;
        for (tree, path) in &copies.guarded {
            root.put(tree, path)?;
        }
        covers.cover()?;
    }
    if let (Host::System, Some(at)) = (plan.host, plan.starts_in) {
        // Relative paths in a command are meant from here. What is given may lie in it.
        let _ = root.place(at, true);
    }
    let mut owned = Vec::new();
    for (tree, bind) in &copies.binds {
        owned.push(root.give(tree, bind)?);
        covers.give(&bind.source, &bind.target)?;
    }
    for (tree, path) in copies.vrnics.iter().chain(&copies.libraries).chain(&copies.covered) {
        root.put(tree, path)?;
    }
    hide(&hidden, &root, proc, &dir)?;
    enter(root)?;
    Ok(Built {
        home: copies.homes.iter().find_map(|h| if let Place::Whole(tree, _) = h { Some(tree.owned) } else { None }),
        working: copies.working.map(|w| w.0.owned),
        binds: owned,
    })
}

/// Covers home directories with their views, wherever they show.
struct Covers<'a> {
    /// Each view, with the tree that replaces the home directory.
    views: Vec<(&'a View, Tree)>,
    /// Places where a home directory shows as it is, because it was given there by its name.
    given: Vec<PathBuf>,
    root: &'a Root<'a>,
    proc: &'a OwnedFd,
    /// Where the new root is mounted while it is built.
    dir: &'a Path,
}

impl Covers<'_> {
    /// Notes that `source` was put at `target`. If `source` is a home directory itself, it stays visible there; home
    /// directories that show by other paths are covered.
    fn give(&mut self, source: &Path, target: &Path) -> io::Result<()> {
        let source = fs::canonicalize(source)?;
        if self.views.iter().any(|v| v.0.path == source) {
            // The real path, after symbolic links.
            let shown = self.root.open(target)?;
            let link = format!("self/fd/{}", shown.as_raw_fd());
            let at = PathBuf::from(OsStr::from_bytes(readlinkat(self.proc, link, Vec::new())?.to_bytes()));
            self.given.extend(at.strip_prefix(self.dir).map(|inside| Path::new("/").join(inside)));
        }
        self.cover()
    }

    /// Covers all home directories that show.
    fn cover(&self) -> io::Result<()> {
        let shows = |at: &Path, v: &View| self.root.open(at).and_then(rustix::fs::fstat).is_ok_and(|s| v.hidden.is(&s));
        // A view shows entries of its home directory, and so perhaps another home directory.
        loop {
            let info = mountinfo(self.proc)?;
            let places =
                self.views.iter().flat_map(|v| v.0.hidden.places(&info, self.dir).into_iter().map(move |at| (v, at)));
            let mut found: Vec<_> = places.filter(|(v, at)| !self.given.contains(at) && shows(at, v.0)).collect();
            if found.is_empty() {
                return Ok(());
            }
            found.sort_by_key(|(_, at)| at.as_os_str().len());
            for ((view, tree), at) in found.into_iter().filter(|(v, at)| shows(at, v.0)) {
                let tree = tree.again().map_err(context(format!("cannot cover {}", at.display())))?;
                self.root.put(&tree, &at)?;
                if view.is_read_only(self.root.plan) {
                    self.root.fixed.borrow_mut().push(tree.mount);
                }
            }
        }
    }
}

fn mountinfo(proc: &OwnedFd) -> io::Result<String> {
    let info = openat(proc, "self/mountinfo", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    io::read_to_string(File::from(info))
}

/// Covers each place where the hidden directory shows with an empty one. `at`: where the new root is mounted while it
/// is built.
fn hide(hidden: &Hidden, root: &Root<'_>, proc: &OwnedFd, at: &Path) -> io::Result<()> {
    for place in hidden.places(&mountinfo(proc)?, at) {
        if root.open(&place).and_then(rustix::fs::fstat).is_ok_and(|s| hidden.is(&s)) {
            let empty = Root::tmpfs(root.plan, "0755", HARMLESS | MountAttrFlags::MOUNT_ATTR_RDONLY)?;
            root.put_mount(&empty, &place, true)?;
        }
    }
    Ok(())
}

/// Directories of /run that programs expect.
fn run_directories(root: &Root<'_>) -> io::Result<()> {
    let lock = root.place(Path::new("/run/lock"), true)?;
    rustix::fs::chmodat(&lock, ".", Mode::from_raw_mode(0o1777), rustix::fs::AtFlags::empty())?;
    let Some(runtime) = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|d| d.starts_with("/run")) else {
        return Ok(());
    };
    let fd = root.place(&runtime, true)?;
    rustix::fs::chmodat(&fd, ".", Mode::from_raw_mode(0o700), rustix::fs::AtFlags::empty())?;
    let (uid, gid) = root.plan.ids.outside;
    let (uid, gid) = (rustix::fs::Uid::from_raw(uid), rustix::fs::Gid::from_raw(gid));
    Ok(rustix::fs::chownat(&fd, ".", Some(uid), Some(gid), rustix::fs::AtFlags::empty())?)
}

/// The terminal that is standard input. It has a name only in the host's /dev/pts.
fn terminal() -> Option<Tree> {
    let stdin = rustix::stdio::stdin();
    if !rustix::termios::isatty(stdin) {
        return None;
    }
    let path = fs::read_link("/proc/self/fd/0").ok()?;
    Tree::copy(&path).ok()
}

/// Makes the new root the only one, and read-only.
fn enter(root: Root<'_>) -> io::Result<()> {
    rustix::process::fchdir(&root.mount)?;
    for mount in root.fixed.into_inner().into_iter().chain([root.mount]) {
        fix(mount).map_err(context("cannot set the flags of the new root"))?;
    }
    rustix::process::pivot_root(".", ".").map_err(context("cannot enter the new root"))?;
    // The old root is mounted over the new one.
    rustix::mount::unmount(".", UnmountFlags::DETACH).map_err(context("cannot leave the old root"))?;
    Ok(rustix::process::chdir("/")?)
}
