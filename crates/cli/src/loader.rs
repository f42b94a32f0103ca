//! Makes the dynamic loader of a container find our libraries, whatever names, paths and environment a program has.
//!
//! `/etc/ld.so.preload` names a library that leads all calls of libibverbs and librdmacm to ours
//! (`crates/verbs/preload`). The files of these names that the loader would find are covered by ours (`mounts`).

use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::{env, fs};

use crate::errors::context;
use crate::{masked, mounts};

/// The names under which programs ask for our libraries.
pub(crate) const NAMES: [&str; 2] = ["libibverbs.so.1", "librdmacm.so.1"];
/// The file in `/etc` that names libraries to preload.
pub(crate) const NAME_FILE: &str = "ld.so.preload";
/// The library to preload, beside the others.
pub(crate) const PRELOAD: &str = "libunirdma-preload.so";

/// Directories in which loaders look without being told, on Debian and on Fedora.
#[cfg(target_arch = "aarch64")]
pub(crate) const USUAL: [&str; 2] = ["/usr/lib/aarch64-linux-gnu", "/usr/lib64"];
#[cfg(not(target_arch = "aarch64"))]
pub(crate) const USUAL: [&str; 2] = ["/usr/lib/x86_64-linux-gnu", "/usr/lib64"];

/// Makes the loader of all programs preload our library: adds a file to the `/etc` of this mount namespace, by an
/// overlay, since no file can be made there. `staging`: a directory on which something else is mounted later.
/// `libraries`: where the container has our libraries, which are in `ours` outside. `hidden`: directories that the
/// container must not see as they are; in an overlay they would not be recognized.
///
/// # Errors
/// There is no library to preload, a mount fails, or a hidden directory is in `/etc`.
pub(crate) fn set_up<'a>(
    staging: &Path,
    (ours, libraries): (&Path, &Path),
    mut hidden: impl Iterator<Item = &'a Path>,
) -> io::Result<()> {
    fs::metadata(ours.join(PRELOAD)).map_err(context(format!("cannot find {PRELOAD} in {}", ours.display())))?;
    let etc = fs::canonicalize("/etc")?;
    if let Some(dir) = hidden.find(|d| fs::canonicalize(d).is_ok_and(|d| d.starts_with(&etc))) {
        return Err(io::Error::other(format!("{} is in /etc", dir.display())));
    }
    mounts::staged(staging, || name_library(staging, libraries))
}

fn name_library(staging: &Path, libraries: &Path) -> io::Result<()> {
    let ours = staging.join(NAME_FILE);
    match fs::read(Path::new("/etc").join(NAME_FILE)) {
        // The host's own names stay.
        Ok(names) => {
            fs::write(&ours, preloaded(&names, libraries))?;
            rustix::mount::mount_bind(&ours, Path::new("/etc").join(NAME_FILE))
                .map_err(context("cannot mount on /etc/ld.so.preload"))
        }
        Err(_) => {
            fs::write(&ours, preloaded(&[], libraries))?;
            overlay(staging)
        }
    }
}

/// The names of libraries to preload, with ours. Those of `unirdma with` lead to files that a container does not have.
pub(crate) fn preloaded(names: &[u8], libraries: &Path) -> Vec<u8> {
    let others = names.split(|&b| b == b'\n').filter(|name| !name.is_empty() && !name.ends_with(PRELOAD.as_bytes()));
    let ours = libraries.join(PRELOAD);
    let mut all: Vec<u8> = others.chain([ours.as_os_str().as_bytes()]).collect::<Vec<_>>().join(&b'\n');
    all.push(b'\n');
    all
}

/// Adds the files of `staging` to `/etc`.
fn overlay(staging: &Path) -> io::Result<()> {
    // The overlay covers files that are mounted below /etc, such as resolv.conf in containers of docker.
    let (info, etc) = (fs::read_to_string("/proc/self/mountinfo")?, Path::new("/etc"));
    let below = masked::mounts(&info).map(|(_, at)| at).filter(|at| at.starts_with(etc) && at != etc);
    let copies: Vec<_> = below.filter_map(|at| Some((mounts::copy(&at).ok()?, at))).collect();
    mounts::overlay([etc, staging], etc)?;
    copies.iter().try_for_each(|(copy, at)| mounts::attach(copy, at))
}

/// The files that the loader finds for each of the names: by its cache, and in its usual directories.
pub(crate) fn resolved() -> [(&'static str, Vec<PathBuf>); 2] {
    NAMES.map(|name| (name, found(name)))
}

/// The files that the loader finds for a name.
pub(crate) fn found(name: &str) -> Vec<PathBuf> {
    files(&read("/etc/ld.so.cache"), name)
}

/// The contents of a file that may be anybody's; nothing if it is no file.
pub(crate) fn read(path: impl AsRef<Path>) -> Vec<u8> {
    const MOST: u64 = 64 << 20;
    let mut bytes = Vec::new();
    if fs::metadata(&path).is_ok_and(|m| m.is_file())
        && let Ok(file) = fs::File::open(&path)
    {
        let _ = io::Read::read_to_end(&mut io::Read::take(file, MOST), &mut bytes);
    }
    bytes
}

/// Covers the files that the loader finds by ours, in this mount namespace.
///
/// # Errors
/// A mount fails.
pub(crate) fn cover(libraries: &Path) -> io::Result<()> {
    for (name, real) in resolved() {
        let ours = fs::canonicalize(libraries.join(name))?;
        for at in real.iter().filter(|at| **at != ours) {
            rustix::mount::mount_bind(&ours, at).map_err(context(format!("cannot mount on {}", at.display())))?;
        }
    }
    Ok(())
}

fn files(cache: &[u8], name: &str) -> Vec<PathBuf> {
    let cached = in_cache(cache, name);
    let usual = USUAL.iter().map(|dir| Path::new(dir).join(name));
    // Several paths may lead to one file.
    let mut all: Vec<_> = cached.into_iter().chain(usual).filter_map(|path| fs::canonicalize(path).ok()).collect();
    all.sort();
    all.dedup();
    all
}

/// The paths of a library of this architecture in `ld.so.cache`: a header of 48 bytes, with the number of entries at
/// 20; entries of 24 bytes, each with flags, and the places of its name and its path; texts (glibc,
/// sysdeps/generic/dl-cache.h). Older files have another table in front.
fn in_cache(cache: &[u8], name: &str) -> Vec<PathBuf> {
    const MAGIC: &[u8] = b"glibc-ld.so.cache1.1";
    const ARCHITECTURE: u32 = if cfg!(target_arch = "aarch64") { 0x0a00 } else { 0x0300 };
    let Some(begin) = cache.windows(MAGIC.len()).position(|w| w == MAGIC) else { return Vec::new() };
    let cache = &cache[begin..];
    let number = |at: usize| Some(u32::from_le_bytes(cache.get(at..at + 4)?.try_into().ok()?));
    let text = |at: u32| cache.get(at as usize..)?.split(|&b| b == 0).next();
    let entry = |n: usize| {
        let at = 48 + n * 24;
        let fits = number(at)? & 0xff00 == ARCHITECTURE && text(number(at + 4)?)? == name.as_bytes();
        Some(PathBuf::from(OsStr::from_bytes(text(number(at + 8)?).filter(|_| fits)?)))
    };
    (0..number(20).unwrap_or(0) as usize).take_while(|n| 48 + n * 24 < cache.len()).filter_map(entry).collect()
}

/// Why a command does not find its vRNIC although it uses RDMA; `None`: it does, or it does not use RDMA.
pub(crate) fn unserved(command: &OsStr) -> Option<&'static str> {
    let path = match Path::new(command) {
        path if path.components().count() > 1 => path.to_path_buf(),
        name => env::split_paths(&env::var_os("PATH")?).map(|d| d.join(name)).find(|p| p.is_file())?,
    };
    let file = fs::File::open(path).ok()?;
    let mut head = [0; 64 * 1024];
    let length = std::os::unix::fs::FileExt::read_at(&file, &mut head, 0).ok()?;
    let why = match interpreter(head.get(..length)?)? {
        None => "is linked statically, so it has no other libibverbs than its own; link it with the shared library",
        Some(loader) if loader.windows(7).any(|w| w == b"ld-musl") => {
            "is built for musl, and our libibverbs needs glibc; build it for glibc"
        }
        Some(_) => return None,
    };
    // Many static programs have nothing to do with RDMA.
    let mut rest = Vec::new();
    io::Read::read_to_end(&mut &file, &mut rest).ok()?;
    memchr::memmem::find(&rest, b"libibverbs").map(|_| why)
}

/// The loader that an ELF file of 64 bits asks for (`None` within: none), from its beginning. `None`: it is no such
/// file.
fn interpreter(head: &[u8]) -> Option<Option<&[u8]>> {
    const PT_INTERP: u64 = 3;
    let number = |at: usize, size: usize| {
        let bytes = head.get(at..at.checked_add(size)?)?;
        Some(bytes.iter().rev().fold(0, |n, &b| n << 8 | u64::from(b)))
    };
    if head.get(..5)? != b"\x7fELF\x02" {
        return None;
    }
    let (table, size, count) = (number(32, 8)? as usize, number(54, 2)? as usize, number(56, 2)? as usize);
    for at in (0..count).map(|n| table.saturating_add(n * size)) {
        if number(at, 4)? == PT_INTERP {
            let (from, length) =
                (number(at.saturating_add(8), 8)? as usize, number(at.saturating_add(32), 8)? as usize);
            return Some(Some(head.get(from..from.checked_add(length)?)?));
        }
    }
    Some(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cache_has_what_the_loader_finds() {
        let names = b"libibverbs.so.1\0/a/libibverbs.so.1\0/b/libibverbs.so.1\0libother.so\0";
        let at = |of: u32| 48 + 4 * 24 + of;
        let entries = [(0x0303u32, 0u32, 16u32), (0x0003, 0, 35), (0x0a03, 0, 35), (0x0303, 54, 35)];
        let mut cache = b"ld.so-1.7.0\0\0\0\0\0glibc-ld.so.cache1.1\x04\0\0\0".to_vec();
        cache.resize(16 + 48, 0);
        for (flags, key, value) in entries {
            cache.extend([flags, at(key), at(value), 0, 0, 0].iter().flat_map(|n| n.to_le_bytes()));
        }
        cache.extend_from_slice(names);
        let expected = if cfg!(target_arch = "aarch64") { "/b/libibverbs.so.1" } else { "/a/libibverbs.so.1" };
        assert_eq!(in_cache(&cache, "libibverbs.so.1"), [PathBuf::from(expected)]);
        // A cache that lies about its size costs nothing.
        cache[16 + 20..16 + 24].copy_from_slice(&u32::MAX.to_le_bytes());
        assert_eq!(in_cache(&cache, "libibverbs.so.1").len(), 1);
        assert!(in_cache(&cache[..70], "libibverbs.so.1").is_empty() && in_cache(b"", "x").is_empty());
    }

    #[test]
    fn the_loader_of_a_program_is_read() {
        let own = fs::read(env::current_exe().unwrap()).unwrap();
        let loader = interpreter(&own).unwrap().unwrap();
        assert!(loader.starts_with(b"/lib"), "{loader:?}");
        assert_eq!(interpreter(&own[..100]), None, "the table is cut off");
        assert_eq!(interpreter(b"#!/bin/sh\n"), None);
        let mut bare = own[..64].to_vec();
        bare[56..58].fill(0);
        assert_eq!(interpreter(&bare), Some(None), "no segments, no loader");
    }
}
