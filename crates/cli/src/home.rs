//! The part of the user's home directory that a container shows.
//!
//! Files that the user's next shell, ssh, cron, git or our own command line reads must be neither readable nor writable
//! inside. They lie below names of the home directory that begin with a dot, and in the directories that XDG variables
//! name in their place.

use std::ffi::CStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use clap::ValueEnum;
use rustix::process::geteuid;

/// `--home`: how a container shows the home directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Show {
    /// As it is, to read and to write, keys and tokens included: the command can change what your next shell runs
    Rw,
    /// Read-only and without names that begin with a dot; the working directory below it can be written
    Ro,
    /// Not at all: an empty directory in its place, which is the container's own and ends with it
    None,
}

/// Names that show although they begin with a dot: programs that users install for themselves.
pub(crate) const PROGRAMS: [&str; 4] = [".local/bin", ".local/lib", ".cargo/bin", ".rustup"];
/// Directories to which programs write without being asked. The container has its own, which are empty.
pub(crate) const PRIVATE: [&str; 4] = [".cache", ".config", ".local/share", ".local/state"];
/// Variables that name other directories in the place of [`PRIVATE`].
const PRIVATE_VARIABLES: [&str; 4] = ["XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME"];

/// Home directories of service accounts. A container has its own directories at these paths.
const NO_HOME: [&str; 4] = ["/", "/tmp", "/var/tmp", "/run"];
const NO_HOME_WITHIN: [&str; 3] = ["/dev", "/proc", "/sys"];

/// A directory that a container does not show as it is, wherever it would show.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Home {
    /// Without symbolic links.
    pub path: PathBuf,
    pub show: Show,
    /// True if it belongs to this user.
    pub own: bool,
    /// True if it is not a home directory, but a directory that a variable names in the place of one of [`PRIVATE`].
    pub by_variable: bool,
}

impl Home {
    fn at(path: PathBuf, show: Show) -> Option<Home> {
        let path = std::fs::canonicalize(path).ok()?;
        let meta = std::fs::metadata(&path).ok().filter(std::fs::Metadata::is_dir)?;
        // Programs of the system, which everybody may read, are not a home directory either.
        let is_none = NO_HOME.iter().any(|n| path == Path::new(n))
            || NO_HOME_WITHIN.iter().any(|n| path.starts_with(n))
            || path.starts_with("/usr") && meta.uid() == 0;
        (!is_none).then(|| Home { path, show, own: meta.uid() == geteuid().as_raw(), by_variable: false })
    }
}

/// The directories that a container does not show as they are; each comes after the directories that contain it. They
/// are the directory that HOME names, which shows as `show` says; the home directory of the user's account; and
/// directories that XDG variables name.
///
/// # Errors
/// `show` is `Rw`, and the directory that HOME names does not belong to this user.
pub(crate) fn all(show: Show) -> io::Result<Vec<Home>> {
    let named = std::env::var_os("HOME").filter(|h| !h.is_empty()).map(PathBuf::from).or_else(of_account);
    let mut homes: Vec<Home> = named.and_then(|path| Home::at(path, show)).into_iter().collect();
    if show == Show::Rw && !homes.first().is_some_and(|h| h.own) {
        let text = "--home rw: HOME names no directory that belongs to this user and could be given";
        return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
    }
    // `--home rw` gives only the directory that HOME names, not the account's.
    let others = if show == Show::Rw { Show::Ro } else { show };
    homes.extend(
        of_account().and_then(|path| Home::at(path, others)).filter(|h| homes.iter().all(|o| o.path != h.path)),
    );
    let variables = PRIVATE_VARIABLES.iter().filter_map(std::env::var_os).map(PathBuf::from);
    for dir in variables.filter(|p| p.is_absolute()).filter_map(|path| Home::at(path, Show::None)) {
        let given = |h: &Home| h.path.starts_with(&dir.path) || h.show == Show::Rw && dir.path.starts_with(&h.path);
        if dir.own && !homes.iter().any(given) {
            homes.push(Home { by_variable: true, ..dir });
        }
    }
    homes.sort_by_key(|h| h.path.as_os_str().len());
    Ok(homes)
}

/// The home directory of this user's account.
fn of_account() -> Option<PathBuf> {
    let mut room = vec![0u8; 1 << 16];
    // SAFETY: an all-zero passwd is valid: null pointers, which nobody follows.
    let mut user: libc::passwd = unsafe { std::mem::zeroed() };
    let mut found = std::ptr::null_mut();
    let uid = geteuid().as_raw();
    // SAFETY: the structure, the room of the given length and the pointer are ours.
    let e = unsafe { libc::getpwuid_r(uid, &raw mut user, room.as_mut_ptr().cast(), room.len(), &raw mut found) };
    if e != 0 || found.is_null() || user.pw_dir.is_null() {
        return None;
    }
    // SAFETY: the call has put a string there, which lies in `room`.
    let dir = unsafe { CStr::from_ptr(user.pw_dir) };
    Some(PathBuf::from(std::ffi::OsStr::from_bytes(dir.to_bytes())))
}

/// Variables with our own secrets.
const SECRET_VARIABLES: [&CStr; 2] = [c"UNIRDMA_TOKEN", c"UNIRDMA_JOIN"];

/// Removes the fleet's tokens from the environment, and from the memory that `/proc/PID/environ` shows.
pub(crate) fn forget_tokens() {
    for name in SECRET_VARIABLES {
        // SAFETY: this program has one thread. The variable's string may be overwritten up to its end.
        unsafe {
            let value = libc::getenv(name.as_ptr());
            if !value.is_null() {
                libc::memset(value.cast(), 0, libc::strlen(value));
                libc::unsetenv(name.as_ptr());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_of_the_system_are_no_homes() {
        for none in ["/", "/tmp", "/usr/bin", "/bin", "/proc/self", "/dev", "/nonexistent", "/etc/passwd"] {
            assert_eq!(Home::at(none.into(), Show::Ro), None, "{none}");
        }
        let dir = std::env::temp_dir().join(format!("unirdma-home-{}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        let link = dir.join("link");
        std::os::unix::fs::symlink(&dir, &link).unwrap();
        let found = Home::at(link, Show::None).unwrap();
        let path = std::fs::canonicalize(&dir).unwrap();
        assert_eq!(found, Home { path, show: Show::None, own: true, by_variable: false });
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
