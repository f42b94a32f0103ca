//! Whether the programs of an image can use our libraries.

use std::fs;
use std::io;
use std::path::Path;

use crate::errors::context;
use crate::loader;

/// A version of glibc.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Version(u32, u32);

/// The oldest glibc that has all that a library needs.
pub(super) fn needed(library: &Path) -> io::Result<Version> {
    let bytes = fs::read(library).map_err(context(format!("cannot read {}", library.display())))?;
    Ok(versions(&bytes, b"GLIBC_").max().unwrap_or(Version(2, 0)))
}

/// Checks the image that is this process's root directory.
///
/// # Errors
/// One line: its programs cannot use our libraries.
pub(super) fn check(needed: Version) -> io::Result<()> {
    let refused = |why: &str| {
        Err(io::Error::other(format!(
            "the image {why}; take one of Debian 12, Ubuntu 22.04, RHEL 9 or newer, or build it on one"
        )))
    };
    let Some(libc) = loader::found("libc.so.6").into_iter().next() else {
        let musl = fs::read_dir("/lib").into_iter().flatten().flatten();
        let musl = musl.into_iter().any(|e| e.file_name().to_string_lossy().starts_with("ld-musl-"));
        return refused(if musl {
            "is built on musl, and our libraries need glibc"
        } else {
            "has no glibc, which our libraries need"
        });
    };
    let text = loader::read(&libc);
    if let Some(Version(major, minor)) = versions(&text, b"release version ").next().filter(|has| *has < needed) {
        let Version(of, least) = needed;
        return refused(&format!("has glibc {major}.{minor}, and our libraries need {of}.{least}"));
    }
    if loader::found("libgcc_s.so.1").is_empty() {
        return Err(io::Error::other(
            "the image has no libgcc_s.so.1, which our libraries need; install the package libgcc-s1 (Debian) or libgcc in it",
        ));
    }
    Ok(())
}

/// All versions that follow a text.
fn versions<'a>(bytes: &'a [u8], text: &'a [u8]) -> impl Iterator<Item = Version> + 'a {
    memchr::memmem::find_iter(bytes, text).filter_map(move |at| {
        let after = bytes[at + text.len()..].split(|b| !b"0123456789.".contains(b)).next()?;
        let mut numbers = std::str::from_utf8(after).ok()?.split('.').map(|n| n.parse().ok());
        Some(Version(numbers.next()??, numbers.next()??))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_found() {
        let all = |bytes: &[u8]| versions(bytes, b"GLIBC_").collect::<Vec<_>>();
        assert_eq!(all(b"\0GLIBC_2.34\0GLIBC_2.2.5\0GLIBC_PRIVATE\0GLIBC_2"), [Version(2, 34), Version(2, 2)]);
        let libc = b"GNU C Library (Debian GLIBC 2.36-9) stable release version 2.36.\n";
        assert_eq!(versions(libc, b"release version ").next(), Some(Version(2, 36)));
        assert!(Version(2, 9) < Version(2, 34));
    }

    #[test]
    fn this_machine_can_use_its_own_programs() {
        check(needed(&std::env::current_exe().unwrap()).unwrap()).unwrap();
        assert!(check(Version(3, 0)).unwrap_err().to_string().contains("and our libraries need 3.0"));
    }
}
