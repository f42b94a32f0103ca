//! Payload that jobs read from private memory of processes for the messages that QPs send.

use unirdma_mem::Fault;

use super::buffer_limits::{Room, Taken};

/// Bytes of the message that a QP is about to send. A job reads them, or has read them.
#[derive(Default)]
pub(crate) struct Prefetched {
    /// The job that reads them.
    job: Option<u64>,
    /// Number of the request or answer, and offset of the first byte in it.
    of: u32,
    off: u64,
    bytes: Vec<u8>,
    /// Why they could not be read.
    fault: Option<Fault>,
    taken: Taken,
}

impl Prefetched {
    /// True if it has no bytes, and no job reads any.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty() && self.job.is_none()
    }

    /// The job that reads them, until it has ended.
    pub fn coming(&self) -> Option<u64> {
        self.job
    }

    /// Takes room for `bytes`; false if there is not enough.
    pub fn reserve(&mut self, room: &Room, bytes: usize) -> bool {
        self.clear();
        self.taken.take(room, bytes)
    }

    /// Job `number` reads bytes of request or answer `of` from `off` on.
    pub fn begin(&mut self, number: u64, of: u32, off: u64) {
        (self.job, self.of, self.off) = (Some(number), of, off);
    }

    /// A job has ended and has read `data`. Returns false if it is another job. `data` is another buffer afterwards.
    pub fn end(&mut self, number: u64, done: Result<u64, Fault>, data: &mut Vec<u8>) -> bool {
        if self.job != Some(number) {
            return false;
        }
        self.job = None;
        self.fault = done.err();
        std::mem::swap(&mut self.bytes, data);
        if self.fault.is_some() {
            self.bytes.clear();
        }
        true
    }

    /// Bytes of request or answer `of` from `off` on.
    pub fn bytes(&self, of: u32, off: u64) -> &[u8] {
        let skip = off.checked_sub(self.off).filter(|_| self.of == of);
        skip.and_then(|skip| self.bytes.get(usize::try_from(skip).ok()?..)).unwrap_or_default()
    }

    /// Why the bytes of `of` from `off` on could not be read, if a job has tried.
    pub fn take_fault(&mut self, of: u32, off: u64) -> Option<Fault> {
        self.fault.take().filter(|_| (self.of, self.off) == (of, off))
    }

    /// True if it has the bytes of `of` before `end`, and no further ones.
    pub fn ends_at(&self, of: u32, end: u64) -> bool {
        !self.bytes.is_empty() && self.of == of && self.off + self.bytes.len() as u64 == end
    }

    /// Forgets the bytes and the job. Returns the buffer.
    pub fn clear(&mut self) -> Vec<u8> {
        std::mem::take(self).bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_of_one_request_only() {
        let (room, mut f) = (Room::default(), Prefetched::default());
        assert!(f.reserve(&room, 8));
        f.begin(7, 3, 100);
        assert!(f.coming() == Some(7) && !f.end(6, Ok(0), &mut vec![1]));
        assert!(f.end(7, Ok(0), &mut vec![5; 8]) && f.coming().is_none());
        assert_eq!((f.bytes(3, 100).len(), f.bytes(3, 105).len(), f.bytes(3, 108).len()), (8, 3, 0));
        assert!(f.bytes(4, 100).is_empty() && f.bytes(3, 99).is_empty() && f.bytes(3, 109).is_empty());
        assert!(f.ends_at(3, 108) && !f.ends_at(4, 108) && !f.ends_at(3, 107));
        assert_eq!(f.clear(), [5; 8]);
        assert!(f.is_empty() && room.bytes() == 0);
        f.begin(8, 3, 0);
        assert!(f.end(8, Err(Fault::Source), &mut vec![5; 8]) && f.is_empty());
        assert_eq!((f.take_fault(3, 0), f.take_fault(3, 0)), (Some(Fault::Source), None));
    }
}
