//! The time slice that a thread asks the kernel for. A thread that yields gives up what is left of its slice (EEVDF, Linux 6.12 or later), so
//! one that asks for long slices lets others run for longer each time.

use std::io;

/// The calling thread has slices of so many nanoseconds from now on, 100,000 to 100,000,000; 0: as the kernel likes. Earlier kernels take no
/// notice of it.
///
/// # Errors
/// Those of `sched_setattr(2)`.
pub(super) fn set(ns: u64) -> io::Result<()> {
    let mut attr = get()?;
    attr.sched_runtime = ns;
    // SAFETY: a whole structure that says how long it is, which the kernel only reads.
    succeeded(unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attr, 0) })
}

/// How the calling thread is scheduled.
fn get() -> io::Result<libc::sched_attr> {
    const SIZE: u32 = size_of::<libc::sched_attr>() as u32;
    // SAFETY: integers only.
    let mut attr: libc::sched_attr = unsafe { std::mem::zeroed() };
    // SAFETY: room for as many bytes as it says.
    succeeded(unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attr, SIZE, 0) })?;
    Ok(attr)
}

fn succeeded(result: libc::c_long) -> io::Result<()> {
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_has_the_slices_that_it_asks_for_and_is_otherwise_as_before() {
        let before = get().unwrap();
        set(30_000_000).unwrap();
        let asked = get().unwrap();
        if asked.sched_runtime == before.sched_runtime {
            eprintln!("skipped: this kernel lets no thread choose its slice (Linux 6.12 does)");
        } else {
            assert_eq!(asked.sched_runtime, 30_000_000);
        }
        set(0).unwrap();
        let after = get().unwrap();
        assert_eq!(after.sched_runtime, before.sched_runtime);
        for a in [asked, after] {
            assert_eq!((a.sched_policy, a.sched_nice), (before.sched_policy, before.sched_nice));
        }
    }
}
