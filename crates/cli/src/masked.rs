//! A directory that a container must not see as it is, and the places where it could show. Such a directory is the
//! virtual layer's, which has the sockets of the administration and of all vRNICs.

use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Decodes a path of /proc/self/mountinfo, which writes `\040` for a space, and so on.
fn unescape(text: &str) -> PathBuf {
    let (bytes, mut out, mut i) = (text.as_bytes(), Vec::new(), 0);
    while i < bytes.len() {
        let code = bytes.get(i + 1..i + 4).and_then(|d| u8::from_str_radix(std::str::from_utf8(d).ok()?, 8).ok());
        match code.filter(|_| bytes[i] == b'\\') {
            Some(c) => {
                out.push(c);
                i += 4;
            }
            None => {
                out.push(bytes[i]);
                i += 1;
            }
        }
    }
    PathBuf::from(OsStr::from_bytes(&out))
}

/// For each mount, the directory of its file system that it shows, and its mount point.
pub(crate) fn mounts(mountinfo: &str) -> impl Iterator<Item = (PathBuf, PathBuf)> + '_ {
    mountinfo.lines().filter_map(|l| {
        let mut words = l.split(' ').skip(3);
        Some((unescape(words.next()?), unescape(words.next()?)))
    })
}

/// The path of `path` within its file system.
fn within_its_file_system(mountinfo: &str, path: &Path) -> PathBuf {
    let below =
        mounts(mountinfo).filter_map(|(root, at)| Some((at.as_os_str().len(), root.join(path.strip_prefix(at).ok()?))));
    // Of two mounts at one place, the later one shows.
    below.max_by_key(|b| b.0).map_or_else(|| path.to_path_buf(), |b| b.1)
}

/// A directory that a container must not see as it is, by whatever path it would show.
pub(crate) struct Hidden {
    device: u64,
    inode: u64,
    /// Path within its file system.
    path: PathBuf,
}

impl Hidden {
    /// # Errors
    /// There is no such directory.
    pub fn find(dir: &Path) -> io::Result<Hidden> {
        let meta = std::fs::metadata(dir)?;
        let path = within_its_file_system(&std::fs::read_to_string("/proc/self/mountinfo")?, dir);
        Ok(Hidden { device: meta.dev(), inode: meta.ino(), path })
    }

    /// True if `found` is this directory.
    pub fn is(&self, found: &rustix::fs::Stat) -> bool {
        (found.st_dev, found.st_ino) == (self.device, self.inode)
    }

    /// Places below `at` where mounts show this directory, unless something else is mounted on it there. Paths are
    /// relative to `at`.
    pub fn places(&self, mountinfo: &str, at: &Path) -> Vec<PathBuf> {
        let place = |(shown, mount): (PathBuf, PathBuf)| {
            let (inside, rest) = (mount.strip_prefix(at).ok()?, self.path.strip_prefix(shown).ok()?);
            Some(Path::new("/").join(inside).join(rest))
        };
        mounts(mountinfo).filter_map(place).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INFO: &str = "22 27 0:21 / /proc rw - proc proc rw\n27 1 254:0 / / rw - ext4 /dev/vda rw\n\
                        40 27 254:0 /data/home /home\\040of rw - ext4 /dev/vda rw\n";

    #[test]
    fn a_path_is_found_in_its_file_system() {
        assert_eq!(within_its_file_system(INFO, Path::new("/home of/u/run")), Path::new("/data/home/u/run"));
        assert_eq!(within_its_file_system(INFO, Path::new("/run/unirdma")), Path::new("/run/unirdma"));
    }

    #[test]
    fn a_directory_shows_in_each_mount_of_what_is_above_it() {
        let hidden = Hidden { device: 1, inode: 1, path: "/data/home/u/run".into() };
        let info = "1 0 0:9 / /stage rw - tmpfs t rw\n2 1 254:0 /data /stage/x rw - ext4 /dev/vda rw\n\
                    3 1 254:0 /data/home/u /stage/home/u rw - ext4 /dev/vda rw\n4 1 254:0 /usr /stage/usr rw - ext4 /dev/vda rw\n\
                    5 0 254:0 /data /elsewhere rw - ext4 /dev/vda rw\n";
        let places = hidden.places(info, Path::new("/stage"));
        let expected = ["/data/home/u/run", "/x/home/u/run", "/home/u/run"].map(PathBuf::from);
        assert_eq!(places, expected);
    }

    #[test]
    fn names_of_mounts_are_unescaped() {
        assert_eq!(unescape("/a\\040b\\134c"), Path::new("/a b\\c"));
        assert_eq!(unescape("/a\\"), Path::new("/a\\"));
    }
}
