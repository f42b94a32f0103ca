//! Another process's memory behind a file descriptor of `/proc/PID/mem`.
//!
//! The descriptor pins the address space itself, not a process number: after an `execve` or a reused
//! PID it reads nothing, where `process_vm_readv` would reach the new program.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use crate::Span;

/// Memory of one process, by address.
#[derive(Clone, Debug)]
pub struct ProcMem(Arc<File>);

impl ProcMem {
    /// This process's own memory.
    ///
    /// # Errors
    /// Those of `open(2)`; a process that is not dumpable cannot open it.
    pub fn of_self() -> io::Result<Self> {
        File::options().read(true).write(true).open("/proc/self/mem").map(|f| ProcMem(Arc::new(f)))
    }

    /// Takes a descriptor that a peer sent, if it is a file of procfs that can be read and written at
    /// an offset. Whatever address space it is, its sender could open it.
    ///
    /// # Errors
    /// `InvalidInput` for any other file.
    pub fn from_fd(fd: OwnedFd) -> io::Result<Self> {
        Self::check(fd.as_fd())?;
        Ok(ProcMem(Arc::new(File::from(fd))))
    }

    /// As [`ProcMem::from_fd`], for callers that keep a descriptor that is refused.
    ///
    /// # Errors
    /// `InvalidInput` for any other file.
    pub fn check(fd: BorrowedFd<'_>) -> io::Result<()> {
        const PROC_SUPER_MAGIC: u64 = 0x9fa0;
        let name = std::fs::read_link(format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&fd)))?;
        let is_mem = name.file_name().is_some_and(|n| n == "mem");
        if rustix::fs::fstatfs(fd)?.f_type as u64 != PROC_SUPER_MAGIC || !is_mem {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a /proc/PID/mem descriptor"));
        }
        Ok(())
    }

    /// The descriptor, to send it to the virtual layer.
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    /// Reads `dst.len()` bytes at `addr`.
    ///
    /// # Errors
    /// `UnexpectedEof` or `EIO` if the memory is not there.
    pub fn read(&self, addr: u64, dst: &mut [u8]) -> io::Result<()> {
        self.0.read_exact_at(dst, addr)
    }

    /// Writes `src` at `addr`.
    ///
    /// # Errors
    /// As [`ProcMem::read`].
    pub fn write(&self, addr: u64, src: &[u8]) -> io::Result<()> {
        self.0.write_all_at(src, addr)
    }

    /// Reads `len` bytes at `addr` straight into shared memory.
    pub(crate) fn read_span(&self, addr: u64, span: &Span, off: usize, len: usize) -> io::Result<()> {
        self.raw(addr, span.at(off, len), len, |fd, p, n, at| {
            // SAFETY: p..p + n lies in the span, which outlives the call.
            unsafe { libc::pread(fd, p.cast(), n, at) }
        })
    }

    /// Writes `len` bytes of shared memory at `addr`.
    pub(crate) fn write_span(&self, addr: u64, span: &Span, off: usize, len: usize) -> io::Result<()> {
        self.raw(addr, span.at(off, len), len, |fd, p, n, at| {
            // SAFETY: p..p + n lies in the span, which outlives the call.
            unsafe { libc::pwrite(fd, p.cast(), n, at) }
        })
    }

    fn raw(
        &self,
        addr: u64,
        ptr: *mut u8,
        len: usize,
        call: impl Fn(i32, *mut u8, usize, i64) -> isize,
    ) -> io::Result<()> {
        let fd = std::os::fd::AsRawFd::as_raw_fd(&*self.0);
        let mut done = 0;
        while done < len {
            let n = call(fd, ptr.wrapping_add(done), len - done, (addr + done as u64) as i64);
            match n {
                1.. => done += n as usize,
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                _ => {
                    let e = io::Error::last_os_error();
                    if e.kind() != io::ErrorKind::Interrupted {
                        return Err(e);
                    }
                }
            }
        }
        Ok(())
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn only_process_memory_is_taken() {
        let null = OwnedFd::from(File::open("/dev/null").unwrap());
        assert!(ProcMem::from_fd(null).is_err());
        let status = OwnedFd::from(File::open("/proc/self/status").unwrap());
        assert!(ProcMem::from_fd(status).is_err());
        let mem = OwnedFd::from(File::open("/proc/self/mem").unwrap());
        assert!(ProcMem::from_fd(mem).is_ok());
    }
}
