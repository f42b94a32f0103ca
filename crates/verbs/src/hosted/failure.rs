//! Why a program gets no context on a VF, and what to do.

use std::ffi::CStr;
use std::fmt;
use std::path::PathBuf;

/// The cause.
#[derive(Debug)]
pub(super) enum Failure {
    /// The lease socket cannot be asked.
    Ask(PathBuf, i32),
    /// The lease socket has ended, or has sent something else than an answer.
    Answer(PathBuf, i32),
    /// The virtual layer refuses, with its reason.
    Refused(String),
    /// There are too many descriptors in this process.
    Descriptors(i32),
    /// There is no real library in the usual directories.
    NoLibrary,
    /// The variable that names the real library has a relative path.
    Relative(PathBuf),
    /// That variable names this library.
    Ours(PathBuf),
    /// The file that the variable names cannot be read.
    Unreadable(PathBuf, std::io::Error),
    /// The loader's words about the real library.
    NotLoaded(PathBuf, String),
    /// The real library has a private interface of a version that is not known.
    Unknown(PathBuf),
    /// The real library does not have this function.
    Lacks(PathBuf, &'static CStr),
    /// The real library's tables cannot be changed.
    Unchangeable(PathBuf, i32),
    /// The real library cannot list devices.
    NoDevices(i32),
    /// The real library does not list this device.
    NoProvider(String),
    /// The provider does not open this device.
    NotOpened(String, i32),
}

/// The variable that names another real library.
pub(super) const VARIABLE: &str = "UNIRDMA_REAL_VERBS";

impl Failure {
    /// There are too many descriptors in this process.
    pub fn descriptors(e: std::io::Error) -> Failure {
        Failure::Descriptors(e.raw_os_error().unwrap_or(libc::EMFILE))
    }

    /// The errno for the program.
    pub fn errno(&self) -> i32 {
        match self {
            Failure::Ask(_, e)
            | Failure::Answer(_, e)
            | Failure::Descriptors(e)
            | Failure::NoDevices(e)
            | Failure::NotOpened(_, e) => *e,
            Failure::Refused(_) => libc::EBUSY,
            Failure::NoProvider(_) => libc::ENODEV,
            Failure::NoLibrary
            | Failure::Relative(_)
            | Failure::Ours(_)
            | Failure::Unreadable(..)
            | Failure::NotLoaded(..)
            | Failure::Unknown(_)
            | Failure::Lacks(..)
            | Failure::Unchangeable(..) => libc::ELIBACC,
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let os = |e: &i32| crate::words(*e);
        match self {
            Failure::Ask(path, e) => write!(f, "cannot ask for a VF at {}: {}", path.display(), os(e)),
            Failure::Answer(path, e) => write!(f, "got no answer about a VF from {}: {}", path.display(), os(e)),
            Failure::Refused(why) => write!(f, "this program gets no VF: {why}"),
            Failure::Descriptors(e) => write!(f, "cannot keep the connection for a VF: {}", os(e)),
            Failure::NoLibrary => write!(
                f,
                "this vRNIC has a VF, but there is no libibverbs of rdma-core; install it with the VF's provider \
                 (Debian: ibverbs-providers), or name it by {VARIABLE}"
            ),
            Failure::Relative(path) => write!(f, "{VARIABLE} is {}; it must be an absolute path", path.display()),
            Failure::Ours(path) => {
                write!(f, "{VARIABLE} names uniRDMA's own library {}; it must name rdma-core's", path.display())
            }
            Failure::Unreadable(path, e) => write!(f, "{VARIABLE} names {}: {e}", path.display()),
            Failure::NotLoaded(path, why) => write!(f, "cannot load {}: {why}", path.display()),
            Failure::Unknown(path) => write!(
                f,
                "the private interface of {} is not known; a newer uniRDMA may know it, or name another libibverbs of \
                 rdma-core by {VARIABLE}",
                path.display()
            ),
            Failure::Lacks(path, name) => {
                write!(f, "{} has no {}; rdma-core must be newer", path.display(), name.to_string_lossy())
            }
            Failure::Unchangeable(path, e) => write!(f, "cannot redirect the calls of {}: {}", path.display(), os(e)),
            Failure::NoDevices(e) => write!(f, "rdma-core's libibverbs cannot list devices: {}", os(e)),
            Failure::NoProvider(device) => {
                write!(f, "rdma-core's libibverbs has no provider for {device}; install it (Debian: ibverbs-providers)")
            }
            Failure::NotOpened(device, e) => {
                write!(f, "rdma-core's provider cannot open {device}: {}", os(e))?;
                match *e {
                    libc::EPERM | libc::EACCES | libc::ENOSYS => {
                        f.write_str("; let the container's seccomp profile allow ioctl(2)")
                    }
                    _ => Ok(()),
                }
            }
        }
    }
}
