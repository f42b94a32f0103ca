//! How a thread stands with the kernel's scheduler: where it runs, with what weight, in what slices, and for how long.

use std::io;

use rustix::process::setpriority_process;

/// The nice value of pollers. Half of a busy one's time goes to programs, so at the usual weight it uses up its fair share of the core, and one
/// request in five hundred waits for the kernel's next tick: p99.9 is 55 us in the place of 3,300 us.
const NICE: i32 = -10;
/// The slice that all threads of a worker ask for, nanoseconds; the least that the kernel gives. So a poller preempts whoever computes on its
/// core as soon as it is woken (EEVDF, Linux 6.12 or later): p99 of a request beside a computing thread is 20 us in the place of 290 us.
const SLICE_NS: u64 = 100_000;

/// The calling thread, which still has the rights of the supervisor, has the weight and the slices of a poller, and so have the threads that
/// it starts. In words, or what the kernel refuses.
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

/// The calling thread has the weight of any program.
pub(super) fn be_usual() {
    let _ = setpriority_process(None, 0);
}

/// The calling thread runs on this core only.
pub(crate) fn pin(core: usize) {
    let mut set = rustix::thread::CpuSet::new();
    set.set(core);
    let _ = rustix::thread::sched_setaffinity(None, &set);
}

/// The calling thread runs only while its core would be idle.
pub(crate) fn be_idle() {
    let _ = change(|a| a.sched_policy = libc::SCHED_IDLE as u32);
}

/// For how long the calling thread has run, nanoseconds.
pub(crate) fn thread_ns() -> u64 {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}

const SIZE: u32 = size_of::<libc::sched_attr>() as u32;

/// How the calling thread is scheduled.
fn attributes() -> io::Result<libc::sched_attr> {
    // SAFETY: integers only.
    let mut attr: libc::sched_attr = unsafe { std::mem::zeroed() };
    // SAFETY: room for as many bytes as it says.
    succeeded(unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attr, SIZE, 0) })?;
    Ok(attr)
}

/// Changes that.
fn change(how: impl FnOnce(&mut libc::sched_attr)) -> io::Result<()> {
    let mut attr = attributes()?;
    how(&mut attr);
    // SAFETY: a whole structure that says how long it is, which the kernel only reads.
    succeeded(unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attr, 0) })
}

fn succeeded(result: libc::c_long) -> io::Result<()> {
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
