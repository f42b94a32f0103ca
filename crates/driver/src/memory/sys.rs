//! Kernel interfaces for moving memory. They are opened with the first device, because a program may have dropped its
//! privileges or changed its root when it registers memory. They belong to one address space: a forked child opens its
//! own.

use std::ffi::CStr;
use std::fs::File;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::{Arc, OnceLock};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::process::{Pid, getpid};
use unirdma_mem::fds::{Known, high};

use super::doorbells::Doorbell;
use super::maps::{FileId, Maps, Vma, each_line};
use super::page_move::{self, MoveTools};
use super::uffd::Uffd;
use crate::clock::{clock_ns, thread_ns};

/// Bytes of the memory file; nearly all of it are holes.
const FILE_BYTES: u64 = 1 << 62;

/// The interfaces that were opened. If one of them could not be opened, it is missing, and less can be done.
pub(crate) struct Tools {
    /// `/proc/self/maps`.
    pub maps: Option<Maps>,
    /// This process's memory, for the way *copy*.
    pub process: Option<Arc<Known>>,
    mover: Option<Mover>,
    tasks: Option<Known>,
    fds: Option<Known>,
    smaps: Option<Known>,
    advised: Advised,
}

/// Settings of a range by `madvise(2)` that a mapping of a file can have, too.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Advice {
    /// Left out of core dumps.
    pub undumped: bool,
    pub huge: bool,
    pub not_huge: bool,
    /// Not inherited by children. Always set for the mapping of the memory file.
    pub unforked: bool,
}

impl Advice {
    /// The calls of `madvise(2)` that change memory with this advice to `new`.
    pub fn changes(self, new: Advice) -> impl Iterator<Item = i32> {
        let dump = if new.undumped { libc::MADV_DONTDUMP } else { libc::MADV_DODUMP };
        let fork = if new.unforked { libc::MADV_DONTFORK } else { libc::MADV_DOFORK };
        [
            (self.undumped != new.undumped, dump),
            (!self.huge && new.huge, libc::MADV_HUGEPAGE),
            (!self.not_huge && new.not_huge, libc::MADV_NOHUGEPAGE),
            (self.unforked != new.unforked, fork),
        ]
        .into_iter()
        .filter_map(|(needed, advice)| needed.then_some(advice))
    }
}

/// Ranges for which the program has given advice, and until when that result is used.
#[derive(Default)]
struct Advised {
    until_ns: u64,
    /// When the last look began; 0 if it failed.
    since_ns: u64,
    /// True if the last look took long.
    long: bool,
    ranges: Vec<(u64, u64, Advice)>,
}

/// Calls `f` with each mapping that `/proc/self/smaps` shows, and with its advice. Nothing is allocated.
fn each_advice(smaps: &Known, mut f: impl FnMut(&Vma, Advice)) {
    let mut current = None;
    each_line(smaps, |line| {
        if let Some(flags) = line.strip_prefix(b"VmFlags:") {
            let has = |name: &[u8]| flags.split(|&b| b == b' ').any(|f| f == name);
            let (undumped, huge, not_huge, unforked) = (has(b"dd"), has(b"hg"), has(b"nh"), has(b"dc"));
            current.iter().for_each(|v| f(v, Advice { undumped, huge, not_huge, unforked }));
        } else if let Some(v) = Vma::parse(line) {
            current = Some(v);
        }
        false
    });
}

/// A look at `/proc/self/smaps` that takes less than this is taken each time. A single longer look may be chance;
/// after two in a row the result is used for a while.
const SHORT_LOOK_NS: u64 = 4_000_000;

struct Mover {
    file: Known,
    id: FileId,
    /// `None` if the process may not open it, because it is not dumpable.
    pagemap: Option<Known>,
    uffd: Option<Uffd>,
    side: u64,
}

fn open(path: &str) -> Option<Known> {
    File::open(Path::new(path)).ok().and_then(|f| Known::new(f.into()).ok())
}

/// This process's memory, opened when the library was loaded. A program that has changed its user, or has made itself
/// not dumpable, cannot open it any more.
static EARLY: OnceLock<(Pid, Known)> = OnceLock::new();

fn open_process() -> Option<Known> {
    let file = File::options().read(true).write(true).open("/proc/self/mem").ok()?;
    Known::new(file.into()).ok()
}

/// Opens files that a program that drops its rights cannot open any more. Called when the library is loaded into a
/// program that has a vRNIC.
pub(crate) fn open_early() {
    if let Some(mem) = open_process() {
        let _ = EARLY.set((getpid(), mem));
    }
}

/// Closes the parent's memory in a child, which may be the part of a program with fewer rights. Called in a fork
/// handler.
pub(crate) fn close_early() {
    EARLY.get().into_iter().for_each(|(_, mem)| mem.close());
}

fn process() -> Option<Arc<Known>> {
    let early = || EARLY.get().filter(|(pid, _)| *pid == getpid()).and_then(|(_, mem)| dup_high(mem.get().ok()?));
    open_process().or_else(|| Known::new(early()?).ok()).map(Arc::new)
}

impl Mover {
    fn open() -> Option<Self> {
        if limited() {
            return None;
        }
        let file = rustix::fs::memfd_create(c"unirdma-mr", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).ok()?;
        let file = Known::new(file).ok()?;
        rustix::fs::ftruncate(&file, FILE_BYTES).ok()?;
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL).ok()?;
        let id = FileId::of(&file)?;
        let uffd = Uffd::open().and_then(|u| u.with_fd(|fd| high(fd).ok()));
        let side = page_move::make_side()?;
        Some(Mover { file, id, pagemap: open("/proc/self/pagemap"), uffd, side })
    }
}

/// True if the process may not write large files (RLIMIT_FSIZE): a write to the memory file would end it by a signal.
pub(crate) fn limited() -> bool {
    rustix::process::getrlimit(rustix::process::Resource::Fsize).current.is_some()
}

impl Tools {
    /// Opens the interfaces that can be opened.
    pub fn open() -> Self {
        Tools {
            maps: open("/proc/self/maps").map(Maps::new),
            process: process(),
            mover: Mover::open(),
            tasks: open("/proc/self/task"),
            fds: open("/proc/self/fd"),
            smaps: open("/proc/self/smaps"),
            advised: Advised::default(),
        }
    }

    /// The memory file.
    pub fn file(&self) -> Option<BorrowedFd<'_>> {
        self.mover.as_ref().map(|m| m.file.as_fd())
    }

    /// Identity of the memory file.
    pub fn file_id(&self) -> Option<FileId> {
        self.mover.as_ref().map(|m| m.id)
    }

    /// True if other threads may run while memory is moved: they sleep meanwhile, also in system calls.
    pub fn stops_threads(&self) -> bool {
        self.mover.as_ref().and_then(|m| m.uffd.as_ref()).is_some_and(|u| u.full && u.protects)
    }

    /// True if a move detects pages that the kernel holds.
    pub fn sees_pins(&self) -> bool {
        self.mover.as_ref().and_then(|m| m.uffd.as_ref()).is_some_and(|u| u.moves)
    }

    /// Number of threads of this process; the largest number if it is not known.
    pub fn threads(&self) -> u64 {
        // A directory has two links, and one more for each entry.
        let links = self.tasks.as_ref().and_then(|d| rustix::fs::fstat(d).ok()).map(|s| u64::from(s.st_nlink as u32));
        links.map_or(u64::MAX, |n| n.saturating_sub(2))
    }

    /// The means to move pages; `None` if there are none, or if there are other threads that cannot be told to wait.
    pub fn hands<'a>(&'a self, doors: &'a [Doorbell], after_fork: bool) -> Option<MoveTools<'a>> {
        // The program may have closed our descriptors, and given their numbers to files of its own.
        let m = self.mover.as_ref().filter(|m| m.file.still_ours())?;
        let threads = self.threads() > 1;
        if threads && m.uffd.is_none() {
            return None;
        }
        Some(MoveTools {
            file: m.file.as_raw_fd(),
            pagemap: m.pagemap.as_ref().map(AsRawFd::as_raw_fd),
            uffd: m.uffd.as_ref(),
            side: m.side,
            doors,
            threads,
            after_fork,
        })
    }

    /// Reads the advice that the program has given. Only `/proc/self/smaps` shows it, and takes long if there is much
    /// memory; then the result is used for a while.
    pub fn look_at_advice(&mut self) {
        if clock_ns() < self.advised.until_ns {
            return;
        }
        let before = thread_ns();
        while !self.look_now(|_| true) {
            let more = self.advised.ranges.len() + 64;
            self.advised.ranges.reserve(more);
        }
        let cost = thread_ns() - before;
        let long = cost >= SHORT_LOOK_NS;
        self.advised.until_ns = if long && self.advised.long { clock_ns() + cost * 20 } else { 0 };
        self.advised.long = long;
    }

    /// Reads the advice of mappings of the memory file. Allocates nothing, because a fork handler calls it. Returns
    /// false if there was no room for all of it; then some advice is missing.
    pub fn look_at_advice_in_fork(&mut self) -> bool {
        let id = self.file_id();
        // The other mappings are not in the result, so that the next ordinary look must not rely on it.
        self.advised.until_ns = 0;
        self.look_now(|v| Some(v.file) == id)
    }

    /// Makes room for a look at `mappings` mappings that may not allocate.
    pub fn reserve(&mut self, mappings: usize) {
        let have = self.advised.ranges.len();
        self.advised.ranges.reserve(mappings.saturating_sub(have));
    }

    /// Reads the advice of the mappings for which `counts` is true. Returns false if there was no room for all of them.
    fn look_now(&mut self, counts: impl Fn(&Vma) -> bool) -> bool {
        let Tools { smaps, advised, .. } = self;
        advised.ranges.clear();
        advised.since_ns = 0;
        let Some(smaps) = smaps.as_ref().filter(|s| s.still_ours()) else { return true };
        advised.since_ns = clock_ns();
        let mut room = true;
        each_advice(smaps, |v, advice| {
            if advice != Advice::default() && counts(v) {
                room = room && advised.ranges.len() < advised.ranges.capacity();
                if room {
                    advised.ranges.push((v.start, v.end, advice));
                }
            }
        });
        room
    }

    /// When the last look at advice began, on the monotonic clock; 0 if it failed.
    pub fn looked_ns(&self) -> u64 {
        self.advised.since_ns
    }

    /// The program's advice at `at`, as of the last look, and the address up to which it holds.
    pub fn advice(&self, at: u64) -> (Advice, u64) {
        let next = self.advised.ranges.partition_point(|r| r.1 <= at);
        match self.advised.ranges.get(next) {
            Some(&(start, end, advice)) if start <= at => (advice, end),
            Some(&(start, ..)) => (Advice::default(), start),
            None => (Advice::default(), u64::MAX),
        }
    }

    /// True if the process has a descriptor by which the kernel may hold pages of it: io_uring or AF_XDP.
    pub fn holds_pages(&self) -> bool {
        let Some(fds) = self.fds.as_ref().filter(|d| d.still_ours()) else { return true };
        let mut text = [0u8; 64];
        each_name(fds, |entry| {
            let n = rustix::fs::readlinkat_raw(fds, entry, &mut text[..]).unwrap_or(0);
            let name = &text[..n];
            let number = || entry.to_str().ok().and_then(|s| s.parse().ok());
            name.starts_with(b"anon_inode:[io_uring]") || name.starts_with(b"socket:") && number().is_some_and(is_xdp)
        })
    }

    /// A descriptor of this process that is open on the memory file `id` for reading and writing.
    pub fn find_open_file(&self, id: FileId) -> Option<OwnedFd> {
        let fds = self.fds.as_ref().filter(|d| d.still_ours())?;
        let mut found = None;
        each_name(fds, |entry| {
            let Some(n) = entry.to_str().ok().and_then(|s| s.parse::<i32>().ok()) else { return false };
            // SAFETY: the descriptor is only borrowed for these calls; if it was closed meanwhile they fail.
            let fd = unsafe { BorrowedFd::borrow_raw(n) };
            let writable = || rustix::fs::fcntl_getfl(fd).is_ok_and(|f| f.contains(rustix::fs::OFlags::RDWR));
            let memory = || rustix::fs::fstatfs(fd).is_ok_and(|s| s.f_type as u64 == 0x0102_1994);
            if FileId::of(fd) == Some(id) && writable() && memory() {
                found = dup_high(fd);
            }
            found.is_some()
        });
        found
    }
}

/// A copy of a descriptor, with a number that no program expects.
pub(crate) fn dup_high(fd: BorrowedFd<'_>) -> Option<OwnedFd> {
    const HIGH: i32 = 512;
    rustix::io::fcntl_dupfd_cloexec(fd, HIGH).ok().or_else(|| fd.try_clone_to_owned().ok())
}

/// Calls `f` with the names in an open directory until `f` returns true. Returns whether it did. Opens nothing: the
/// process may have no descriptor left.
fn each_name(dir: &Known, mut f: impl FnMut(&CStr) -> bool) -> bool {
    let mut space = [MaybeUninit::uninit(); 2048];
    if rustix::fs::seek(dir, rustix::fs::SeekFrom::Start(0)).is_err() {
        return false;
    }
    let mut entries = rustix::fs::RawDir::new(dir, &mut space);
    while let Some(Ok(e)) = entries.next() {
        if f(e.file_name()) {
            return true;
        }
    }
    false
}

fn is_xdp(fd: i32) -> bool {
    const AF_XDP: i32 = 44;
    let (mut domain, mut len) = (0i32, size_of::<i32>() as libc::socklen_t);
    // SAFETY: the kernel writes one integer.
    let r = unsafe { libc::getsockopt(fd, libc::SOL_SOCKET, libc::SO_DOMAIN, (&raw mut domain).cast(), &raw mut len) };
    r == 0 && domain == AF_XDP
}

/// Opens a shared memory object by the name under which it is mapped.
pub(crate) fn open_by_name(name: &[u8], id: FileId) -> Option<OwnedFd> {
    use std::os::unix::ffi::OsStrExt;
    let path = Path::new(std::ffi::OsStr::from_bytes(name));
    let file = name.starts_with(b"/dev/shm/").then(|| File::options().read(true).write(true).open(path).ok())??;
    (FileId::of(&file) == Some(id)).then(|| file.into())
}
