//! The part of the hook inside of the container: its interface, directories, libraries, `/sys` and `/dev`.
//!
//! Nothing of the image is trusted, and another container that shares a volume may change it meanwhile. This process
//! has the image as its root directory when it looks for files there. Where it makes something, or copies a mount,
//! paths are opened without links of /proc, by which an image could lead out of itself (`mounts::open_within`).

use std::fs;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags, open};
use rustix::process::DumpableBehavior;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use unirdma_abi::container::vrnic_dir;
use unirdma_ipc::fdpass;

use super::image;
use crate::errors::{self, context};
use crate::mounts::{self, LIBRARIES, REAL};
use crate::sandbox::{self, READY};
use crate::sysfs::{self, Device, Live, Net};
use crate::{idmap, loader, net};

/// Directories of images with further copies of libraries, which programs find by their own ways: an asterisk is any
/// name.
const FURTHER: [&str; 4] = ["/opt/*/lib", "/opt/*/lib64", "/opt/conda/envs/*/lib", "/usr/local/lib"];

/// Most files of a name that are covered.
const MOST_PLACES: usize = 100;

/// Parameters of a container's inside.
pub(super) struct Plan<'a> {
    /// Its root directory, in `view`.
    pub root: &'a Path,
    /// The root directory that its first process has at present.
    pub view: String,
    /// Its network namespace; `None`: the host's.
    pub network: Option<String>,
    /// The vRNICs have interfaces of their own.
    pub interfaces: bool,
    /// Its user namespace; `None`: the host's.
    pub users: Option<String>,
    /// Its mount namespace.
    pub mounts: String,
    pub devices: &'a [Device<'a>],
    pub libraries: &'a Path,
    /// Programs that bring a libibverbs of their own use ours, too.
    pub preload: bool,
}

impl Plan<'_> {
    /// Makes it, and has the keeper, at the other end of `sock`, take the steps outside.
    pub fn make(&self, mut sock: UnixStream) -> io::Result<()> {
        sandbox::end_with_parent()?;
        let spaces = |path: &str| fs::File::open(path).map_err(context("cannot open the container's namespaces"));
        let (mounts, network) = (spaces(&self.mounts)?, self.network.as_deref().map(spaces).transpose()?);
        let users = self.users.as_deref().map(spaces).transpose()?;
        let interfaces = match &network {
            Some(network) => {
                enter(network, LinkNameSpaceType::Network)?;
                if self.interfaces { net::set_up(&sandbox::interfaces(self.devices)?, false)? } else { Vec::new() }
            }
            None => Vec::new(),
        };
        // While the host's files are in sight.
        let needed = image::needed(&self.libraries.join("libibverbs.so.1"))?;
        let live = Live::make(self.devices);
        let directories = self.devices.iter().map(|d| mounts::copy_read_only(Path::new(&d.info.dir)));
        let directories = directories.collect::<io::Result<Vec<_>>>()?;
        let mut libraries = Vec::new();
        for name in loader::NAMES.into_iter().chain([loader::PRELOAD]) {
            // The names are links to one file, so that a program that has both has one state.
            libraries.push((name, mounts::copy_read_only(&fs::canonicalize(self.libraries.join(name))?)?));
        }
        let null = mounts::copy(Path::new("/dev/null"))?;
        let view = open(&self.view, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
        let root = mounts::open_within(&view, self.root);
        let root = root.map_err(context(format!("cannot find the image at {}", self.root.display())))?;
        enter(&mounts, LinkNameSpaceType::Mount)?;
        if let Some(users) = &users {
            become_root_of(users)?;
        }
        go_to(&root)?;
        image::check(needed)?;
        let covered = loader::NAMES.map(|name| (name, places(name)));
        let preload =
            self.preload.then(|| loader::preloaded(&loader::read("/etc/ld.so.preload"), Path::new(LIBRARIES)));
        put_libraries(&root, libraries, &covered, preload.as_deref())?;
        for (number, directory) in directories.iter().enumerate() {
            mounts::put_within(&root, directory, Path::new(&vrnic_dir(number)), true)?;
        }
        // Only a mount that is attached can be copied.
        let device = |number: usize| PathBuf::from(format!("/dev/infiniband/uverbs{number}"));
        mounts::put_within(&root, &null, &device(0), false)?;
        for number in 1..self.devices.len() {
            mounts::put_within(&root, &mounts::again(&null)?, &device(number), false)?;
        }
        let net = if network.is_some() { Net::Own } else { Net::Host };
        let files = self.sysfs(&root, net, live).unwrap_or_else(|e| {
            let e = errors::plain(&e.to_string());
            eprintln!("unirdma: programs that look for devices in /sys will find none: {e}");
            Vec::new()
        });
        if !files.is_empty() {
            let files: Vec<_> = files.iter().map(AsFd::as_fd).collect();
            fdpass::send(sock.as_fd(), &[net.step()], &files)?;
        }
        let interfaces: Vec<_> = interfaces.iter().map(AsFd::as_fd).collect();
        fdpass::send(sock.as_fd(), &[READY], &interfaces)?;
        sock.read_exact(&mut [0]).map_err(|_| io::Error::other("the container was not set up"))
    }

    /// Puts the devices into the container's /sys. Returns the descriptors for the files to serve.
    fn sysfs(&self, root: &OwnedFd, net: Net, live: Live) -> io::Result<Vec<OwnedFd>> {
        let sys = mounts::open_within(root, Path::new(sysfs::SYS))?;
        if rustix::fs::fstatfs(&sys)?.f_type != SYSFS_MAGIC {
            return Err(io::Error::other("the container has no /sys"));
        }
        // All paths are the kernel's now.
        go_to(&sys)?;
        let files = sysfs::set_up(Path::new("/"), Path::new("/kernel"), self.devices, net, live)?;
        sysfs::CHANGED.iter().try_for_each(|at| mounts::set_read_only(&Path::new("/").join(at)))?;
        Ok(files)
    }
}

/// Becomes the root user of a container that has its own user namespace, whose files belong to that user.
fn become_root_of(users: &fs::File) -> io::Result<()> {
    // Root of that namespace may do anything to processes in it.
    rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    idmap::leave_groups();
    enter(users, LinkNameSpaceType::User)?;
    idmap::become_first_user()?;
    // A change of the user has cleared it.
    sandbox::end_with_parent()
}

/// Makes a directory the root directory of this process.
fn go_to(root: &OwnedFd) -> io::Result<()> {
    rustix::process::fchdir(root)?;
    rustix::process::chroot(".").map_err(context("cannot enter the image"))
}

/// `f_type` of a sysfs, statfs(2).
const SYSFS_MAGIC: rustix::fs::FsWord = 0x6265_6572;

pub(super) fn enter(space: &fs::File, kind: LinkNameSpaceType) -> io::Result<()> {
    move_into_link_name_space(space.as_fd(), Some(kind)).map_err(context("cannot enter the container's namespaces"))
}

/// Puts our libraries into a directory of their own, and over all others of their names, which are `covered`.
/// `preload`: the names of libraries that every program preloads.
fn put_libraries(
    root: &OwnedFd,
    libraries: Vec<(&str, OwnedFd)>,
    covered: &[(&str, Vec<PathBuf>)],
    preload: Option<&[u8]>,
) -> io::Result<()> {
    let own = Path::new(LIBRARIES);
    let directory = mounts::mount_new("tmpfs", &[("mode", "0755"), ("size", "1m")], mounts::HARMLESS)?;
    mounts::put_within(root, &directory, own, true)?;
    for (name, library) in &libraries {
        mounts::put_within(&directory, library, Path::new(name), false)?;
    }
    let real = Path::new(REAL).strip_prefix(own).unwrap_or(own);
    for ((name, places), (_, library)) in covered.iter().zip(&libraries) {
        if let Some(first) = places.first() {
            mounts::put_within(&directory, &mounts::copy_within(root, first)?, &real.join(name), false)?;
        }
        let usual = loader::USUAL.iter().filter_map(|dir| Some(fs::canonicalize(dir).ok()?.join(name)));
        for place in places.iter().cloned().chain(usual.filter(|place| !places.contains(place))) {
            mounts::put_within(root, &mounts::again(library)?, &place, false)?;
        }
    }
    if let Some(names) = preload {
        let file = rustix::fs::openat(
            &directory,
            loader::NAME_FILE,
            OFlags::CREATE | OFlags::WRONLY | OFlags::CLOEXEC,
            Mode::from_raw_mode(0o644),
        )?;
        fs::File::from(file).write_all(names)?;
        let file = mounts::copy_within(&directory, Path::new(loader::NAME_FILE))?;
        mounts::put_within(root, &file, &Path::new("/etc").join(loader::NAME_FILE), false)?;
    }
    mounts::fix(directory)
}

/// The files of a library's name in the image, first those that the loader finds.
fn places(name: &str) -> Vec<PathBuf> {
    let mut all = loader::found(name);
    for pattern in FURTHER {
        let directories = match pattern.split_once('*') {
            None => vec![PathBuf::from(pattern)],
            Some((within, below)) => {
                let entries = fs::read_dir(within).into_iter().flatten().flatten();
                entries.map(|e| e.path().join(below.trim_start_matches('/'))).collect()
            }
        };
        for file in directories.iter().filter_map(|dir| fs::canonicalize(dir.join(name)).ok()) {
            if all.len() < MOST_PLACES && !all.contains(&file) {
                all.push(file);
            }
        }
    }
    all
}
