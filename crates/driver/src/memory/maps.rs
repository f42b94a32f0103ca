//! The process's own address space, as `/proc/self/maps` shows it, which is the only reliable source.
//!
//! Linux 6.11 and later answer one query at a time (`PROCMAP_QUERY`); older kernels print everything. Nothing here
//! allocates, because a fork handler calls it, too, and may run in a signal handler that has interrupted `malloc`.

use std::os::fd::{AsFd, AsRawFd};

use unirdma_mem::fds::Known;

/// Longest name of a mapping that is kept.
const NAME: usize = 264;

/// One mapping.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Vma {
    pub start: u64,
    pub end: u64,
    pub read: bool,
    pub write: bool,
    pub exec: bool,
    pub shared: bool,
    pub offset: u64,
    /// Device, as `major << 32 | minor`, and inode of the file; the inode is 0 without one.
    pub file: FileId,
    name: [u8; NAME],
    name_len: usize,
}

/// A file, by device and inode.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct FileId {
    /// `major << 32 | minor`.
    pub dev: u64,
    /// 0 for no file.
    pub inode: u64,
}

impl FileId {
    /// The file that is open as `fd`.
    pub fn of(fd: impl AsFd) -> Option<Self> {
        let s = rustix::fs::fstat(fd).ok()?;
        let dev = u64::from(rustix::fs::major(s.st_dev)) << 32 | u64::from(rustix::fs::minor(s.st_dev));
        Some(FileId { dev, inode: s.st_ino })
    }
}

impl Vma {
    /// Parses a line of `/proc/self/maps`.
    pub fn parse(line: &[u8]) -> Option<Vma> {
        // start-end perms offset major:minor inode [name]
        let mut rest = line;
        let mut word = || {
            let from = rest.iter().position(|&b| b != b' ')?;
            let len = rest[from..].iter().position(|&b| b == b' ').unwrap_or(rest.len() - from);
            let (w, tail) = (&rest[from..from + len], &rest[from + len..]);
            rest = tail;
            Some(w)
        };
        let (start, end) = pair(word()?, b'-')?;
        let perms = word()?;
        let offset = number(word()?, 16)?;
        let (major, minor) = pair(word()?, b':')?;
        let inode = number(word()?, 10)?;
        let has = |i: usize, c: u8| perms.get(i) == Some(&c);
        let mut v = Vma {
            start,
            end,
            read: has(0, b'r'),
            write: has(1, b'w'),
            exec: has(2, b'x'),
            shared: has(3, b's'),
            offset,
            file: FileId { dev: major << 32 | minor, inode },
            name: [0; NAME],
            name_len: 0,
        };
        let from = rest.iter().position(|&b| b != b' ').unwrap_or(rest.len());
        v.set_name(&rest[from..]);
        Some(v)
    }

    fn set_name(&mut self, name: &[u8]) {
        self.name_len = name.len().min(NAME);
        self.name[..self.name_len].copy_from_slice(&name[..self.name_len]);
    }

    /// The path of its file, or the kernel's name for it, such as `[heap]`.
    pub fn name(&self) -> &[u8] {
        &self.name[..self.name_len]
    }

    /// True for private anonymous memory that may be moved into a memory file: heap, bss and plain mappings; not the
    /// main thread's stack, not code.
    pub fn is_movable(&self) -> bool {
        let n = self.name();
        let named = n.is_empty() || n == b"[heap]" || n.starts_with(b"[anon:");
        !self.shared && self.file.inode == 0 && self.read && self.write && !self.exec && named
    }

    /// True for a shared mapping of a memory file.
    pub fn is_shared_memory(&self) -> bool {
        let n = self.name();
        self.shared && self.read && self.write && (n.starts_with(b"/memfd:") || n.starts_with(b"/dev/shm/"))
    }

    /// True for memory that another copy of this library has moved.
    pub fn is_anothers(&self) -> bool {
        self.shared && self.name().starts_with(b"/memfd:unirdma-mr")
    }

    /// Protection bits as `mmap(2)` takes them.
    pub fn prot(&self) -> i32 {
        let bit = |on: bool, p: i32| if on { p } else { 0 };
        bit(self.read, libc::PROT_READ) | bit(self.write, libc::PROT_WRITE) | bit(self.exec, libc::PROT_EXEC)
    }

    /// The part of it that lies in `[lo, hi)`.
    pub fn clip(&self, lo: u64, hi: u64) -> Vma {
        let start = self.start.max(lo);
        Vma { start, end: self.end.min(hi), offset: self.offset + (start - self.start), ..*self }
    }
}

fn number(digits: &[u8], radix: u64) -> Option<u64> {
    let digit = |b: &u8| (*b as char).to_digit(radix as u32).map(u64::from);
    let add = |n: u64, b: &u8| n.checked_mul(radix)?.checked_add(digit(b)?);
    if digits.is_empty() { None } else { digits.iter().try_fold(0, add) }
}

fn pair(word: &[u8], by: u8) -> Option<(u64, u64)> {
    let at = word.iter().position(|&b| b == by)?;
    Some((number(&word[..at], 16)?, number(&word[at + 1..], 16)?))
}

/// `struct procmap_query` of linux/fs.h.
#[derive(Default)]
#[repr(C)]
struct Query {
    size: u64,
    flags: u64,
    addr: u64,
    vma_start: u64,
    vma_end: u64,
    vma_flags: u64,
    page_size: u64,
    offset: u64,
    inode: u64,
    major: u32,
    minor: u32,
    name_size: u32,
    build_id_size: u32,
    name_addr: u64,
    build_id_addr: u64,
}

const PROCMAP_QUERY: libc::c_ulong = 0xc068_6611;
const COVERING_OR_NEXT: u64 = 0x10;

/// `/proc/self/maps`, open.
pub(crate) struct Maps {
    fd: Known,
    answers: bool,
}

impl Maps {
    /// Takes the open file.
    pub fn new(fd: Known) -> Self {
        let mut maps = Maps { fd, answers: true };
        maps.answers = maps.ask(0).is_ok();
        maps
    }

    /// The mapping at `addr`, or the next one after it.
    pub fn find(&self, addr: u64) -> Option<Vma> {
        if self.answers { self.ask(addr).ok().flatten() } else { self.read(addr) }
    }

    fn ask(&self, addr: u64) -> Result<Option<Vma>, i32> {
        let mut name = [0u8; NAME];
        let mut q = Query {
            size: size_of::<Query>() as u64,
            flags: COVERING_OR_NEXT,
            addr,
            name_size: NAME as u32,
            name_addr: name.as_mut_ptr() as u64,
            ..Query::default()
        };
        // SAFETY: the kernel fills the structure and the name that it points to.
        let r = unsafe { libc::syscall(libc::SYS_ioctl, self.fd.as_raw_fd(), PROCMAP_QUERY, &raw mut q) };
        if r != 0 {
            let e = std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO);
            return if e == libc::ENOENT { Ok(None) } else { Err(e) };
        }
        let mut v = Vma {
            start: q.vma_start,
            end: q.vma_end,
            read: q.vma_flags & 1 != 0,
            write: q.vma_flags & 2 != 0,
            exec: q.vma_flags & 4 != 0,
            shared: q.vma_flags & 8 != 0,
            offset: q.offset,
            file: FileId { dev: u64::from(q.major) << 32 | u64::from(q.minor), inode: q.inode },
            name: [0; NAME],
            name_len: 0,
        };
        // The size counts the terminating zero.
        v.set_name(&name[..(q.name_size.max(1) - 1) as usize]);
        Ok(Some(v))
    }

    fn read(&self, addr: u64) -> Option<Vma> {
        let mut found = None;
        each_line(&self.fd, |line| {
            found = Vma::parse(line).filter(|v| v.end > addr);
            found.is_some()
        });
        found
    }

    /// Mappings that intersect `[lo, hi)`, in order.
    pub fn range(&self, lo: u64, hi: u64) -> impl Iterator<Item = Vma> + '_ {
        let mut at = lo;
        std::iter::from_fn(move || {
            let v = self.find(at).filter(|v| at < hi && v.start < hi)?;
            at = v.end;
            Some(v)
        })
    }
}

/// Longest line that is read whole, bytes.
const LINE: usize = 4096;

/// Calls `f` with each line of an open file of `/proc` until `f` returns true. Of a line longer than [`LINE`] bytes,
/// `f` gets the beginning.
pub(crate) fn each_line(file: &Known, mut f: impl FnMut(&[u8]) -> bool) {
    let (mut text, mut have, mut at, mut skip) = ([0u8; LINE], 0, 0, false);
    while let Ok(n) = rustix::io::pread(file, &mut text[have..], at)
        && n > 0
    {
        have += n;
        at += n as u64;
        let mut from = 0;
        while let Some(len) = text[from..have].iter().position(|&b| b == b'\n') {
            if !skip && f(&text[from..from + len]) {
                return;
            }
            (skip, from) = (false, from + len + 1);
        }
        if from == 0 && have == LINE {
            if !skip && f(&text) {
                return;
            }
            (skip, from) = (true, have);
        }
        text.copy_within(from..have, 0);
        have -= from;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Vma {
        Vma::parse(line.as_bytes()).unwrap()
    }

    fn file() -> Known {
        Known::new(std::fs::File::open("/proc/self/maps").unwrap().into()).unwrap()
    }

    fn open() -> Maps {
        Maps::new(file())
    }

    #[test]
    fn lines_of_every_form_are_understood() {
        let heap = parse("55d0c6a00000-55d0c6a21000 rw-p 00000000 00:00 0                          [heap]");
        assert!(heap.is_movable() && !heap.is_shared_memory());
        let lib = parse("7f00a000-7f00b000 r-xp 00026000 fe:01 1234  /usr/lib/my lib.so");
        assert_eq!((lib.file.inode, lib.name(), lib.offset), (1234, &b"/usr/lib/my lib.so"[..], 0x26000));
        assert_eq!(lib.file.dev, 0xfe_0000_0001);
        assert!(!lib.is_movable());
        let own = parse("7f00a000-7f00b000 rw-s 00001000 00:01 77 /memfd:unirdma-mr (deleted)");
        assert!(own.is_anothers() && own.is_shared_memory());
        let stack = parse("7ffc0000-7ffc2000 rw-p 00000000 00:00 0 [stack]");
        assert!(!stack.is_movable());
        assert!(parse("7ffc0000-7ffc2000 rw-p 00000000 00:00 0").is_movable());
        assert!(Vma::parse(b"").is_none() && Vma::parse(b"7f-zz rw-p 0 0:0 0").is_none());
    }

    #[test]
    fn both_ways_of_asking_give_the_same_answers() {
        let maps = open();
        let v = vec![1u8; 1 << 20];
        let at = v.as_ptr() as u64;
        let text = Maps { fd: file(), answers: false };
        let found: Vec<Vma> = maps.range(at, at + v.len() as u64).collect();
        assert!(found.first().unwrap().start <= at && found.last().unwrap().end >= at + v.len() as u64);
        let lib = maps.find(Maps::new as *const () as u64).unwrap();
        assert!(lib.exec && lib.file.inode != 0);
        assert!(text.find(lib.start) == Some(lib));
        assert!(maps.find(u64::MAX - 4095).is_none());
    }

    #[test]
    fn lines_are_found_whatever_their_length() {
        use std::io::Write;
        let mut f = std::fs::File::from(rustix::fs::memfd_create(c"x", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
        let long = "x".repeat(3 * LINE);
        let exact = "y".repeat(LINE);
        write!(f, "one\n{long}\ntwo\n\n{exact}\nthree\nno end").unwrap();
        let f = Known::new(f.into()).unwrap();
        let mut seen = Vec::new();
        each_line(&f, |l| {
            seen.push(String::from_utf8(l.to_vec()).unwrap());
            false
        });
        assert_eq!(seen, ["one", &long[..LINE], "two", "", &exact, "three"]);
        let mut first = 0;
        each_line(&f, |l| {
            first += 1;
            l == b"two"
        });
        assert_eq!(first, 3);
    }

    #[test]
    fn a_file_is_known_by_its_mapping() {
        let f = rustix::fs::memfd_create(c"x", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&f, 8192).unwrap();
        let span = unirdma_mem::map_file(f.as_fd(), 4096, 4096).unwrap();
        let v = open().find(span.addr() as u64).unwrap();
        assert_eq!((Some(v.file), v.offset), (FileId::of(&f), 4096));
        assert!(v.is_shared_memory() && !v.is_anothers());
    }
}
