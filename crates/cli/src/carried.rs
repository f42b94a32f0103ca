//! The libraries that this program carries at its end, where it is one file that is the whole installation, as in the
//! package of Python. `cargo xtask package` appends them: our libibverbs, the library to preload, the length of each, a
//! number that differs for different libraries, and [`MARK`]. Numbers have 8 bytes, little-endian.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt, symlink};
use std::path::{Path, PathBuf};

use crate::errors::context;
use crate::loader::PRELOAD;

const MARK: &[u8; 16] = b"unirdma carries\n";
const END: u64 = 8 + 8 + 8 + MARK.len() as u64;

/// The directory of the libraries that this program carries, if it does. They are written there at the first use.
///
/// # Errors
/// One line: there is no place for them.
pub(crate) fn directory() -> io::Result<Option<PathBuf>> {
    let Some(carried) = Carried::find(File::open("/proc/self/exe")?)? else { return Ok(None) };
    // Root trusts no directory of another user, also not by a variable that such a user may have set.
    let within = if rustix::process::geteuid().is_root() {
        PathBuf::from("/var/cache")
    } else {
        let cache = std::env::var_os("XDG_CACHE_HOME").filter(|d| !d.is_empty()).map(PathBuf::from);
        let home = || Some(PathBuf::from(std::env::var_os("HOME").filter(|h| !h.is_empty())?).join(".cache"));
        cache
            .or_else(home)
            .ok_or_else(|| io::Error::other("set HOME, or name the libraries' directory in UNIRDMA_LIBDIR"))?
    };
    carried.put_into(&within.join("unirdma")).map(Some)
}

struct Carried {
    file: File,
    /// Where the two libraries begin, and how long they are.
    at: u64,
    lengths: [u64; 2],
    number: u64,
}

impl Carried {
    fn find(file: File) -> io::Result<Option<Carried>> {
        let size = file.metadata()?.len();
        let mut end = [0; END as usize];
        let Some(begin) = size.checked_sub(END) else { return Ok(None) };
        file.read_exact_at(&mut end, begin)?;
        let (numbers, mark) = end.split_at(24);
        let mut numbers = numbers.as_chunks::<8>().0.iter().map(|n| u64::from_le_bytes(*n));
        let mut next = || numbers.next().unwrap_or_default();
        let (lengths, number) = ([next(), next()], next());
        let at = lengths[0].checked_add(lengths[1]).and_then(|sum| begin.checked_sub(sum));
        Ok(at.filter(|_| mark == MARK).map(|at| Carried { file, at, lengths, number }))
    }

    /// Writes the libraries into a directory of their own within `cache`, unless they are there.
    fn put_into(&self, cache: &Path) -> io::Result<PathBuf> {
        let directory = cache.join(format!("lib-{:016x}", self.number));
        if directory.is_dir() {
            return Ok(directory);
        }
        let new = cache.join(format!("new-{}", std::process::id()));
        let made = || {
            fs::create_dir_all(&new)?;
            let mut at = self.at;
            for (name, length) in ["libibverbs.so.1", PRELOAD].into_iter().zip(self.lengths) {
                let mut bytes = vec![0; length as usize];
                self.file.read_exact_at(&mut bytes, at)?;
                fs::write(new.join(name), bytes)?;
                at += length;
            }
            // One file, so that a program has one state.
            symlink("libibverbs.so.1", new.join("librdmacm.so.1"))?;
            // Another process may have been faster.
            fs::rename(&new, &directory).or_else(|e| if directory.is_dir() { fs::remove_dir_all(&new) } else { Err(e) })
        };
        made().map_err(context(format!("cannot write the libraries into {}", cache.display())))?;
        Ok(directory)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_carried_is_written_once() {
        let dir = std::env::temp_dir().join(format!("unirdma-carried-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let find = |bytes: &[u8]| {
            fs::write(dir.join("program"), bytes).unwrap();
            Carried::find(File::open(dir.join("program")).unwrap()).unwrap()
        };
        let numbers = |all: [u64; 3]| all.iter().flat_map(|n| n.to_le_bytes()).collect::<Vec<_>>();
        let whole = [&b"a programVERBSload"[..], &numbers([5, 4, 0xabc]), MARK].concat();
        let found = find(&whole).unwrap();
        for _ in 0..2 {
            let put = found.put_into(&dir.join("cache")).unwrap();
            assert_eq!(put, dir.join("cache/lib-0000000000000abc"));
            assert_eq!(fs::read(put.join("librdmacm.so.1")).unwrap(), b"VERBS");
            assert_eq!(fs::read(put.join(PRELOAD)).unwrap(), b"load");
        }
        assert_eq!(fs::read_dir(dir.join("cache")).unwrap().count(), 1);
        // Other programs, also short ones and one that lies.
        for other in [&whole[..whole.len() - 1], b"short", b"", &[&numbers([u64::MAX, 4, 1])[..], MARK].concat()] {
            assert!(find(other).is_none());
        }
        fs::remove_dir_all(dir).unwrap();
    }
}
