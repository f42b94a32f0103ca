//! Landlock: the worker cannot open, create, remove or execute files by path, use TCP ports, signal processes outside,
//! or connect to abstract sockets outside. Open descriptors stay usable. Raw system calls suffice, because the rule set
//! is empty.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

/// Rights on files in version 1 of the interface, and the rights that versions 2, 3 and 5 added.
const FILES: u64 = (1 << 13) - 1;
const REFER: u64 = 1 << 13;
const TRUNCATE: u64 = 1 << 14;
const IOCTL_DEV: u64 = 1 << 15;
/// Binding and connecting TCP sockets (version 4).
const TCP: u64 = 0b11;
/// Abstract Unix sockets and signals (version 6).
const SCOPES: u64 = 0b11;
/// Flag that asks for the version instead of making a rule set.
const VERSION: u32 = 1;

/// `struct landlock_ruleset_attr`. Older kernels accept only its beginning.
#[repr(C)]
struct Ruleset {
    files: u64,
    network: u64,
    scopes: u64,
}

/// The rights that a version of the interface can refuse, and the size of its structure.
fn refused(version: i64) -> (Ruleset, usize) {
    let from = |least: i64, rights: u64| if version >= least { rights } else { 0 };
    let files = FILES | from(2, REFER) | from(3, TRUNCATE) | from(5, IOCTL_DEV);
    let len = match version {
        ..4 => 8,
        4..6 => 16,
        _ => 24,
    };
    (Ruleset { files, network: from(4, TCP), scopes: from(6, SCOPES) }, len)
}

/// Refuses everything that the kernel can refuse, for this thread and all threads that it starts later. Needs
/// `no_new_privs`.
///
/// # Errors
/// The reason, in words.
pub(super) fn restrict() -> Result<String, String> {
    let version = version().map_err(|e| match e.raw_os_error() {
        Some(libc::ENOSYS | libc::EOPNOTSUPP) => "this kernel has none, or it is switched off".to_string(),
        _ => e.to_string(),
    })?;
    apply(version).map_err(|e| e.to_string())?;
    Ok(format!("version {version}, no access to files by path"))
}

fn version() -> io::Result<i64> {
    // SAFETY: asks for a number; no memory is passed.
    let n = unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, std::ptr::null::<Ruleset>(), 0usize, VERSION) };
    if n < 0 { Err(io::Error::last_os_error()) } else { Ok(n) }
}

fn apply(version: i64) -> io::Result<()> {
    let (ruleset, len) = refused(version);
    // SAFETY: the kernel reads `len` bytes of the structure, which is at least that long, and returns a new descriptor.
    let fd = unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, &raw const ruleset, len, 0u32) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor was just made, and nothing else owns it.
    let fd = unsafe { OwnedFd::from_raw_fd(fd as RawFd) };
    // SAFETY: passes a descriptor and no memory.
    let done = unsafe { libc::syscall(libc::SYS_landlock_restrict_self, fd.as_raw_fd(), 0u32) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_older_kernel_gets_what_it_knows() {
        let of = |version| {
            let (r, len) = refused(version);
            (r.files, r.network, r.scopes, len)
        };
        assert_eq!(of(1), (0x1fff, 0, 0, 8));
        assert_eq!(of(3), (0x7fff, 0, 0, 8));
        assert_eq!(of(4), (0x7fff, 3, 0, 16));
        assert_eq!(of(5), (0xffff, 3, 0, 16));
        assert_eq!(of(9), (0xffff, 3, 3, 24));
    }
}
