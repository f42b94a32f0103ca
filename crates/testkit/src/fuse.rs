//! A FUSE file system with one file whose data comes late or never: memory that is slow.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::path::Path;

use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_change};
use rustix::thread::UnshareFlags;

// Opcodes of the requests, and offsets in the headers (linux/fuse.h).
const LOOKUP: u32 = 1;
const FORGET: u32 = 2;
const GETATTR: u32 = 3;
const OPEN: u32 = 14;
const READ: u32 = 15;
const RELEASE: u32 = 18;
const FLUSH: u32 = 25;
const INIT: u32 = 26;
const BATCH_FORGET: u32 = 42;
const OPCODE: usize = 4;
const UNIQUE: usize = 8;
const NODE: usize = 16;

const ROOT: u64 = 1;
const FILE: u64 = 2;
/// Seconds for which the kernel may cache entries and attributes.
const VALID: u64 = 1000;

/// Mounts the file system at `dir`, in a mount namespace of this thread and of threads that it starts, and opens its
/// file of `len` bytes. A thread answers the kernel as long as the process lives. It calls `data` for each READ and
/// replies with the result. If that is `None`, it sends no reply.
///
/// # Errors
/// A text, if the namespace, the mount or the file cannot be had.
///
/// # Panics
/// Never: the name of the file system has no zero byte within.
pub fn slow_file(dir: &Path, len: u64, data: impl FnMut() -> Option<Vec<u8>> + Send + 'static) -> Result<File, String> {
    let failed = |what: &'static str| move |e: io::Error| format!("{what}: {e}");
    let device = File::options().read(true).write(true).open("/dev/fuse").map_err(failed("/dev/fuse"))?;
    own_mounts().map_err(failed("cannot make a mount namespace"))?;
    let (user, group) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    let options = format!("fd={},rootmode=40000,user_id={user},group_id={group}\0", device.as_raw_fd());
    let options = std::ffi::CStr::from_bytes_with_nul(options.as_bytes()).expect("one zero byte");
    mount(c"slow", dir, c"fuse", MountFlags::NOSUID | MountFlags::NODEV, Some(options))
        .map_err(|e| format!("cannot mount a FUSE file system: {e}"))?;
    std::thread::spawn(move || serve(device, len, data));
    File::open(dir.join("file")).map_err(failed("cannot open a FUSE file"))
}

/// Moves this thread to a mount namespace of its own. Threads that it starts share it.
fn own_mounts() -> io::Result<()> {
    let (user, group) = (rustix::process::geteuid(), rustix::process::getegid());
    let spaces = if user.is_root() { UnshareFlags::NEWNS } else { UnshareFlags::NEWNS | UnshareFlags::NEWUSER };
    // SAFETY: no descriptor table is unshared. The kernel refuses a new user namespace to one of several threads.
    unsafe { rustix::thread::unshare_unsafe(spaces) }?;
    if !user.is_root() {
        let (user, group) = (user.as_raw(), group.as_raw());
        std::fs::write("/proc/self/uid_map", format!("{user} {user} 1"))?;
        std::fs::write("/proc/self/setgroups", "deny")?;
        std::fs::write("/proc/self/gid_map", format!("{group} {group} 1"))?;
    }
    Ok(mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?)
}

/// Answers all requests of the kernel. `data` makes the replies to READs.
fn serve(mut device: File, len: u64, mut data: impl FnMut() -> Option<Vec<u8>>) {
    let mut request = vec![0; 1 << 17];
    while let Ok(n) = device.read(&mut request) {
        let word = |at: usize| u64::from_ne_bytes(request[at..at + 8].try_into().expect("eight bytes"));
        debug_assert!(n >= NODE + 8, "the kernel sends whole headers");
        let (error, body) = match word(OPCODE) as u32 {
            FORGET | BATCH_FORGET => continue,
            READ => match data() {
                Some(bytes) => (0, bytes),
                None => continue,
            },
            // Version 7.31 with no features, and WRITEs of one page.
            INIT => (0, [words32(&[7, 31, 0, 0, 0, 4096]), vec![0; 40]].concat()),
            LOOKUP => (0, [words(&[FILE, 0, VALID, VALID, 0]), attributes(FILE, len)].concat()),
            GETATTR => (0, [words(&[VALID, 0]), attributes(word(NODE), len)].concat()),
            OPEN => (0, words(&[1, 0])),
            RELEASE | FLUSH => (0, Vec::new()),
            _ => (-libc::ENOSYS, Vec::new()),
        };
        let head = words32(&[16 + body.len() as u32, error as u32]);
        // The kernel may have cancelled the request meanwhile.
        let _ = device.write(&[head, words(&[word(UNIQUE)]), body].concat());
    }
}

/// `struct fuse_attr`.
fn attributes(node: u64, len: u64) -> Vec<u8> {
    let mode = if node == ROOT { libc::S_IFDIR | 0o777 } else { libc::S_IFREG | 0o666 };
    // Inode number, size, blocks, three times; nanoseconds of the times, mode, links, and zeroes.
    [words(&[node, len, 0, 0, 0, 0]), words32(&[0, 0, 0, mode, 1]), vec![0; 20]].concat()
}

fn words(w: &[u64]) -> Vec<u8> {
    w.iter().flat_map(|w| w.to_ne_bytes()).collect()
}

fn words32(w: &[u32]) -> Vec<u8> {
    w.iter().flat_map(|w| w.to_ne_bytes()).collect()
}
