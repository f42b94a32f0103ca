//! Scheduling attributes of a thread: core, weight, slice, and its CPU time.

use std::io;

use rustix::process::setpriority_process;

/// The nice value of pollers. Half of a busy poller's time goes to programs, so with the usual weight the poller uses
/// up its fair share of the core, and one request in five hundred waits for the kernel's next tick: p99.9 is 55 us
/// instead of 3,300 us.
const NICE: i32 = -10;
/// The time slice that all threads of a worker ask for, ns; the shortest that the kernel gives. With it a poller
/// preempts a computing thread on its core immediately after it is woken (EEVDF, Linux 6.12 or later): p99 of a request
/// beside a computing thread is 20 us instead of 290 us.
const SLICE_NS: u64 = 100_000;

/// Gives the calling thread the weight and the slices of a poller. Threads that it starts inherit both. The thread must
/// still have the supervisor's rights. Returns a description, or the reason why the kernel refuses.
pub(super) fn take_weight() -> Result<String, String> {
    let brief = change(|a| a.sched_runtime = SLICE_NS).and_then(|()| attributes());
    let slices = match brief {
        Ok(a) if a.sched_runtime == SLICE_NS => "slices of 0.1 ms",
        _ => "the kernel's own slices, since only Linux 6.12 and later have others",
    };
    match setpriority_process(None, NICE) {
        Ok(()) => Ok(format!("nice {NICE} for pollers, {slices}")),
        Err(e) => Err(format!("pollers have that of any program: {e}; {slices}")),
    }
}

/// Gives the calling thread the usual weight.
pub(super) fn be_usual() {
    let _ = setpriority_process(None, 0);
}

/// Restricts the calling thread to one core.
pub fn pin(core: usize) {
    let mut set = rustix::thread::CpuSet::new();
    set.set(core);
    let _ = rustix::thread::sched_setaffinity(None, &set);
}

/// Lets the calling thread run only while its core would be idle.
pub fn be_idle() {
    let _ = change(|a| a.sched_policy = libc::SCHED_IDLE as u32);
}

/// CPU time of the calling thread, ns.
pub fn thread_ns() -> u64 {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}

const SIZE: u32 = size_of::<libc::sched_attr>() as u32;

/// The scheduling attributes of the calling thread.
fn attributes() -> io::Result<libc::sched_attr> {
    // SAFETY: integers only.
    let mut attr: libc::sched_attr = unsafe { std::mem::zeroed() };
    // SAFETY: `attr` has room for `SIZE` bytes.
    succeeded(unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attr, SIZE, 0) })?;
    Ok(attr)
}

/// Changes the scheduling attributes of the calling thread.
fn change(how: impl FnOnce(&mut libc::sched_attr)) -> io::Result<()> {
    let mut attr = attributes()?;
    how(&mut attr);
    // SAFETY: a complete structure that has its own size in it; the kernel only reads it.
    succeeded(unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attr, 0) })
}

fn succeeded(result: libc::c_long) -> io::Result<()> {
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
