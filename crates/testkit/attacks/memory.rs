//! MRs over private memory of this process that is slow to reach. The virtual layer reaches it through `/proc/PID/mem`.

use std::fs::File;
use std::os::fd::AsFd;
use std::path::Path;
use std::ptr::null_mut;

use rustix::mm::{Advice, MapFlags, ProtFlags};
use unirdma_abi as abi;
use unirdma_formats::WrOpcode;
use unirdma_link::RegionDesc;
use unirdma_testkit::Scripted;
use unirdma_testkit::fuse::slow_file;

use crate::requests::one_by_one;
use crate::{MTU_4096, Until, ready};

const PAGE: u64 = 4096;
/// Bytes of the MR.
const LEN: u64 = 1 << 20;

/// READs of pages whose file server never answers. A thread that copies such a page waits for the server.
pub(crate) fn fuse(socket: &Path, until: Until) {
    let s = Scripted::new(socket);
    // The vRNIC's directory is hidden by the mount, but only from this process, which is connected already.
    let dir = socket.parent().expect("a socket in a directory");
    let file = match slow_file(dir, LEN, || None) {
        Ok(f) => f,
        Err(e) => return println!("skip: {e}"),
    };
    // SAFETY: a new mapping, which replaces nothing.
    let at = unsafe { rustix::mm::mmap(null_mut(), LEN as usize, ProtFlags::READ, MapFlags::PRIVATE, &file, 0) };
    // Closing the file waits for an answer of this process, so it must not be open when this process is killed.
    drop(file);
    read_all_the_time(s, at.expect("mmap") as u64, until);
}

/// READs of an address space that is copied by one fork after the other. A thread that looks up a page in it waits for
/// the fork.
pub(crate) fn fork(socket: &Path, until: Until) {
    const LARGE: usize = 16 << 30;
    let s = Scripted::new(socket);
    let at = anonymous(LEN as usize);
    let large = anonymous(LARGE);
    // SAFETY: the mapping is ours and has this length. It is only read, except for one byte, so all of it is the zero
    // page, and a fork copies only its page tables.
    unsafe {
        rustix::mm::madvise(large.cast(), LARGE, Advice::LinuxNoHugepage).expect("madvise");
        rustix::mm::madvise(large.cast(), LARGE, Advice::LinuxPopulateRead).expect("madvise");
        large.write_volatile(1);
    }
    std::thread::spawn(move || {
        while !until.over() {
            // SAFETY: the child does nothing but end.
            unsafe {
                match libc::fork() {
                    0 => libc::_exit(0),
                    child => libc::waitpid(child, null_mut(), 0),
                };
            }
        }
    });
    read_all_the_time(s, at as u64, until);
}

fn anonymous(len: usize) -> *mut u8 {
    let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::NORESERVE);
    // SAFETY: a new mapping, which replaces nothing.
    unsafe { rustix::mm::mmap_anonymous(null_mut(), len, access, flags) }.expect("mmap").cast()
}

/// READs the first page of each 64 KiB of `[at, at + LEN)` of this process, one at a time.
fn read_all_the_time(mut s: Scripted, at: u64, until: Until) {
    let me = File::options().read(true).write(true).open("/proc/self/mem").expect("/proc/self/mem");
    let region = RegionDesc { bus_addr: at, size: LEN, user_addr: at, mmap_offset: at };
    s.hostile.frontend.add_region(region, me.as_fd()).expect("region");
    let slow = s.mr(at, LEN);
    let to = s.alloc(PAGE);
    let own = s.mr(s.hostile.bus(to), PAGE);
    let (q, _) = s.pair(16, MTU_4096);
    ready();
    let local = abi::Sge { addr: 0, length: PAGE as u32, lkey: own.lkey };
    one_by_one(&s, &q, until, |i| {
        s.write(&q, i, WrOpcode::Read, local, (u64::from(i) * 16 * PAGE % LEN, slow.rkey));
    });
}
