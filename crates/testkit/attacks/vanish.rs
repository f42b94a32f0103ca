//! Memory files that change after the virtual layer has mapped them, or that have no memory yet.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::ptr::null_mut;
use std::time::{Duration, Instant};

use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags};
use unirdma_abi as abi;
use unirdma_formats::WrOpcode;
use unirdma_link::{Frontend, RegionDesc};
use unirdma_testkit::{Hostile, Scripted};
use zerocopy::IntoBytes;

use crate::{MTU_4096, Until, broken, ready};

const PAGE: u64 = 4096;
const HUGE_PAGE: u64 = 2 << 20;
const AT: u64 = 1 << 53;
/// Time within which a session must end after its memory is gone.
const PATIENCE: Duration = Duration::from_secs(5);

/// A memory file that can shrink.
pub(crate) fn sparse_file(len: u64) -> OwnedFd {
    let fd = memfd_create(c"attack", MemfdFlags::CLOEXEC).expect("memory file");
    ftruncate(&fd, len).expect("size");
    fd
}

pub(crate) fn region(bus_addr: u64, size: u64) -> RegionDesc {
    RegionDesc { bus_addr, size, user_addr: bus_addr, mmap_offset: 0 }
}

/// True once the virtual layer has ended the session.
fn has_ended(link: &mut Frontend) -> bool {
    let began = Instant::now();
    while began.elapsed() < PATIENCE {
        if link.config(8).is_err() {
            return true;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    broken("a session whose memory is gone goes on");
    false
}

/// WRITEs to every second page of a truncated file. If each fault were repaired by itself, each would need a mapping.
pub(crate) fn truncated_mr(socket: &Path, until: Until) {
    const LEN: u64 = 1 << 30;
    const WRITES: u32 = 512;
    ready();
    while !until.over() {
        let mut s = Scripted::new(socket);
        let file = sparse_file(LEN);
        s.hostile.frontend.add_region(region(AT, LEN), file.as_fd()).expect("region");
        let mr = s.mr(AT, LEN);
        let (q, _) = s.pair(WRITES, MTU_4096);
        for i in 0..WRITES {
            let at = u64::from(i) * 2 * PAGE;
            let local = abi::Sge { addr: at + 8, length: 4, lkey: mr.lkey };
            s.write(&q, i, WrOpcode::Write, local, (LEN / 2 + at, mr.rkey));
        }
        ftruncate(&file, 0).expect("size");
        s.post(&q, WRITES);
        if !has_ended(&mut s.hostile.frontend) {
            return;
        }
    }
}

/// A doorbell page whose file has been truncated.
pub(crate) fn truncated_doorbell(socket: &Path, until: Until) {
    ready();
    while !until.over() {
        let mut h = Hostile::new(socket);
        let file = sparse_file(PAGE);
        h.frontend.add_region(region(AT, PAGE), file.as_fd()).expect("region");
        h.command(abi::Command::SetDoorbell as u8, AT.as_bytes());
        ftruncate(&file, 0).expect("size");
        h.wake();
        if !has_ended(&mut h.frontend) {
            return;
        }
    }
}

/// A huge page as doorbell page, which is gone when the device writes to it. A single page within a huge mapping cannot
/// be replaced.
pub(crate) fn truncated_huge_page(socket: &Path, until: Until) {
    /// Number of attempts to map the huge page. Between attempts another page is mapped, in case the address that the
    /// virtual layer would choose for the huge page is unsuitable.
    const SHIFTS: u64 = 512;
    let has_memory = |fd: &OwnedFd| {
        // SAFETY: a new mapping, which replaces nothing.
        unsafe { rustix::mm::mmap(null_mut(), HUGE_PAGE as usize, ProtFlags::READ, MapFlags::SHARED, fd, 0) }.is_ok()
    };
    let huge = || memfd_create(c"huge", MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB);
    let reason = match huge() {
        Err(e) => Some(e.to_string()),
        Ok(fd) => (ftruncate(&fd, HUGE_PAGE).is_err() || !has_memory(&fd)).then(|| "all are taken".into()),
    };
    if let Some(reason) = reason {
        return println!("skip: no huge pages ({reason}): sysctl vm.nr_hugepages=8");
    }
    ready();
    while !until.over() {
        let mut h = Hostile::new(socket);
        let file = huge().expect("memory file");
        ftruncate(&file, HUGE_PAGE).expect("size");
        let small = sparse_file(PAGE);
        let taken = (0..SHIFTS).any(|i| {
            let taken = h.frontend.add_region(region(AT, HUGE_PAGE), file.as_fd()).is_ok();
            taken || h.frontend.add_region(region((AT << 1) + i * PAGE, PAGE), small.as_fd()).is_err()
        });
        if !taken {
            continue;
        }
        ftruncate(&file, 0).expect("size");
        let head = abi::ReqHeader { command: abi::Command::SetDoorbell as u8, ..Default::default() };
        h.request(&[head.as_bytes(), AT.as_bytes()].concat(), 64);
        h.wake();
        if h.frontend.config(8).is_ok() {
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

/// WRITEs of a few bytes to each page of a sparse file, so that the virtual layer allocates the pages. When all exist,
/// they are freed and allocated again.
pub(crate) fn fill(socket: &Path, until: Until) {
    const LEN: u64 = 1 << 30;
    const SLOTS: u32 = 1024;
    let mut s = Scripted::new(socket);
    let file = sparse_file(LEN);
    s.hostile.frontend.add_region(region(AT, LEN), file.as_fd()).expect("region");
    let mr = s.mr(AT, LEN);
    let source = s.alloc(PAGE);
    let own = s.mr(s.hostile.bus(source), 8);
    let (q, _) = s.pair(SLOTS, MTU_4096);
    ready();
    let local = abi::Sge { addr: 0, length: 8, lkey: own.lkey };
    let mut page = 0;
    while !until.over() {
        let first = s.posted(&q);
        for i in 0..SLOTS {
            s.write(&q, first.wrapping_add(i), WrOpcode::Write, local, (page * PAGE, mr.rkey));
            page += 1;
        }
        s.post(&q, first.wrapping_add(SLOTS));
        while s.executed(&q) != s.posted(&q) && !until.over() {
            std::thread::sleep(Duration::from_micros(20));
        }
        if page == LEN / PAGE {
            page = 0;
            punch(&file, LEN);
        }
    }
}

/// WRITEs into a file whose pages its owner frees all the time. A thread that touches a page meanwhile waits in the
/// kernel until all are free, and the owner has the lowest priority.
pub(crate) fn punched(socket: &Path, until: Until) {
    const LEN: u64 = 4 << 20;
    const WRITE: u64 = 64 << 10;
    const SLOTS: u32 = 64;
    let mut s = Scripted::new(socket);
    let file = sparse_file(LEN);
    s.hostile.frontend.add_region(region(AT, LEN), file.as_fd()).expect("region");
    let mr = s.mr(AT, LEN);
    let (q, _) = s.pair(SLOTS, MTU_4096);
    let local = abi::Sge { addr: 0, length: WRITE as u32, lkey: mr.lkey };
    for i in 0..SLOTS {
        s.write(&q, i, WrOpcode::Write, local, (u64::from(i) * WRITE % LEN, mr.rkey));
    }
    std::thread::scope(|t| {
        t.spawn(|| {
            be_idle();
            while !until.over() {
                punch(&file, LEN);
            }
        });
        ready();
        while !until.over() {
            if s.executed(&q) == s.posted(&q) {
                s.post(&q, s.posted(&q).wrapping_add(SLOTS));
            }
            std::thread::sleep(Duration::from_micros(100));
        }
    });
}

/// Makes this thread run only when no other wants to.
fn be_idle() {
    let none = libc::sched_param { sched_priority: 0 };
    // SAFETY: the kernel reads the parameter, which lives long enough.
    unsafe { libc::sched_setscheduler(0, libc::SCHED_IDLE, &none) };
}

fn punch(file: &OwnedFd, len: u64) {
    fallocate(file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 0, len).expect("a hole");
}

/// Sparse files that would use up the address space of the virtual layer.
pub(crate) fn addresses(socket: &Path, until: Until) {
    const LARGEST: u64 = 1 << 46;
    const SMALLEST: u64 = 1 << 16;
    let mut h = Hostile::new(socket);
    let (mut size, mut at) = (LARGEST, AT);
    let file = sparse_file(LARGEST);
    while size >= SMALLEST && !until.over() {
        match h.frontend.add_region(region(at, size), file.as_fd()) {
            Ok(()) => at += size,
            Err(_) => size /= 2,
        }
    }
    ready();
    until.sleep();
}

/// Regions that are mapped and unmapped without pause. Each change concerns all threads of the virtual layer.
pub(crate) fn remapped(socket: &Path, until: Until) {
    const LEN: u64 = 64 << 20;
    let mut s = Scripted::new(socket);
    let file = sparse_file(LEN);
    // All pages exist, and the device has them in its page table before they are freed.
    fallocate(&file, FallocateFlags::empty(), 0, LEN).expect("memory");
    let (q, _) = s.pair(1, MTU_4096);
    ready();
    while !until.over() {
        if s.hostile.frontend.add_region(region(AT, LEN), file.as_fd()).is_err() {
            return broken("a region that was taken before is refused");
        }
        let mr = s.mr(AT, LEN);
        let local = abi::Sge { addr: 0, length: (LEN / 2) as u32, lkey: mr.lkey };
        let index = s.posted(&q);
        s.write(&q, index, WrOpcode::Write, local, (LEN / 2, mr.rkey));
        s.post(&q, index.wrapping_add(1));
        while s.executed(&q) == index && !until.over() {
            std::thread::sleep(Duration::from_micros(20));
        }
        s.order(abi::Command::DeregMr, &abi::HandleReq { handle: mr.mrn, reserved: 0 });
        s.hostile.frontend.remove_region(region(AT, LEN)).expect("removal");
    }
}
