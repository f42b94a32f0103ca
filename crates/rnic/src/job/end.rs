//! The two ends of a job's copy: memory that stays mapped until the job releases it.

use unirdma_mem::{Bell, Fault, Loc, Place, ProcMem, Span, fetch, transfer};

use super::task::Phase;
use crate::access::{Side, Tables};

/// Memory that a job holds. It stays mapped until the job releases it.
pub(super) enum Held {
    Mapped(Span, u64),
    /// Mapped memory where pages may be missing. If it `waits`, an access may take as long as the owner likes.
    Sparse {
        span: Span,
        off: u64,
        waits: bool,
    },
    Process(ProcMem, u64, Option<Bell>),
    Null,
    Away,
    /// Private bytes of the job, from this offset on.
    Own(usize),
}

/// One end of a copy.
#[derive(Default)]
pub(super) struct End {
    /// Places, in order, with the number of bytes up to the end of each.
    places: Vec<(Held, u64)>,
    /// Data that came with the WQE.
    own: Vec<u8>,
}

impl End {
    pub fn clear(&mut self) {
        self.places.clear();
        self.own.clear();
    }

    /// Pins bytes `[off, off + len)` of a side of a message, and returns the number of bytes pinned. It is less than
    /// `len` if the bytes lie in more than `most` places.
    ///
    /// # Errors
    /// `fault` if they are not all there.
    pub fn pin(
        &mut self,
        tables: &Tables<'_>,
        side: Side<'_>,
        (off, len): (u64, u64),
        most: usize,
        fault: Fault,
    ) -> Result<u64, Fault> {
        self.clear();
        let mut done = 0;
        while done < len && self.places.len() < most {
            let place = tables.at(side, off + done, len - done).ok_or(fault)?;
            let held = match place.at() {
                Loc::Mapped(span, off) => Held::Mapped(span.clone(), off),
                Loc::Sparse { span, off, waits } => Held::Sparse { span: span.clone(), off, waits },
                Loc::Process(mem, addr, bell) => Held::Process(mem.clone(), addr, bell.cloned()),
                Loc::Null => Held::Null,
                Loc::Away => Held::Away,
                Loc::Bytes(b) => {
                    let start = self.own.len();
                    self.own.extend_from_slice(b.get(..place.len() as usize).ok_or(fault)?);
                    Held::Own(start)
                }
            };
            tables.count_piece(done);
            done += place.len();
            self.places.push((held, done));
        }
        Ok(done)
    }

    /// Makes this end a private copy of these parts, one after the other.
    pub fn copy_of(&mut self, parts: &[&[u8]]) {
        self.clear();
        parts.iter().for_each(|part| self.own.extend_from_slice(part));
        self.places.push((Held::Own(0), self.own.len() as u64));
    }

    /// Number of bytes.
    pub fn len(&self) -> u64 {
        self.places.last().map_or(0, |p| p.1)
    }

    /// Number of places.
    pub fn pieces(&self) -> usize {
        self.places.len()
    }

    /// True if an access may take as long as the owner likes, for example because the memory is private memory of a
    /// process.
    pub fn may_wait(&self) -> bool {
        self.places.iter().any(|(p, _)| matches!(p, Held::Process(..) | Held::Sparse { waits: true, .. }))
    }

    /// True if pages may be missing.
    pub fn is_sparse(&self) -> bool {
        self.places.iter().any(|(p, _)| matches!(p, Held::Sparse { .. }))
    }

    /// True if this address lies in a window of this end.
    pub fn holds(&self, addr: usize) -> bool {
        self.places.iter().any(|(p, _)| match p {
            Held::Mapped(span, _) | Held::Sparse { span, .. } => addr.wrapping_sub(span.addr()) < span.len(),
            _ => false,
        })
    }

    /// The place of byte `off`.
    pub fn at(&self, off: u64) -> Option<Place<'_>> {
        let i = self.places.partition_point(|p| p.1 <= off);
        let (held, end) = self.places.get(i)?;
        let begin = i.checked_sub(1).map_or(0, |before| self.places[before].1);
        let skip = off - begin;
        let at = match held {
            Held::Mapped(span, start) => Loc::Mapped(span, start + skip),
            Held::Sparse { span, off: start, waits } => Loc::Sparse { span, off: start + skip, waits: *waits },
            Held::Process(mem, addr, bell) => Loc::Process(mem, addr.wrapping_add(skip), bell.as_ref()),
            Held::Null => Loc::Null,
            Held::Away => Loc::Away,
            Held::Own(start) => Loc::Bytes(self.own.get(start + skip as usize..)?),
        };
        Some(Place::new(at, end - off))
    }
}

/// The part of a job for one request.
#[derive(Default)]
pub(super) struct Part {
    pub from: End,
    pub to: End,
    pub bytes: u64,
    /// True if the bytes after these are left to another job, because they lie in too many places.
    pub cut: bool,
}

impl Part {
    pub fn clear(&mut self) {
        self.from.clear();
        self.to.clear();
    }

    /// Pins both ends of a copy, in at most `most` places each.
    pub fn pin(
        &mut self,
        tables: &Tables<'_>,
        [from, to]: [Side<'_>; 2],
        (off, bytes): (u64, u64),
        most: usize,
    ) -> Result<(), Fault> {
        let n = self.from.pin(tables, from, (off, bytes), most, Fault::Source)?;
        self.bytes = self.to.pin(tables, to, (off, n), most, Fault::Destination)?;
        self.cut = self.bytes < bytes;
        Ok(())
    }

    /// Number of places of both ends.
    pub fn pieces(&self) -> usize {
        self.from.pieces() + self.to.pieces()
    }

    pub fn may_wait(&self) -> bool {
        self.from.may_wait() || self.to.may_wait()
    }

    pub fn is_sparse(&self) -> bool {
        self.from.is_sparse() || self.to.is_sparse()
    }

    /// Copies up to `most` bytes from `done` on.
    pub fn copy(&self, mut done: u64, most: u64) -> Result<(), Fault> {
        let end = self.bytes.min(done + most);
        while done < end {
            let from = self.from.at(done).ok_or(Fault::Source)?;
            let to = self.to.at(done).ok_or(Fault::Destination)?;
            let n = from.len().min(to.len()).min(end - done);
            transfer(from, to, n as usize, &mut [])?;
            done += n;
        }
        Ok(())
    }

    /// Copies through `scratch`, one end at a time, and appends the copied bytes to `kept`. `None` if the job was
    /// stopped.
    pub fn bounce(
        &self,
        phase: &Phase,
        scratch: &mut [u8],
        mut kept: Option<&mut Vec<u8>>,
    ) -> Option<Result<(), Fault>> {
        let mut done = 0;
        while done < self.bytes {
            let (from, to) = (self.from.at(done)?, self.to.at(done)?);
            let n = from.len().min(to.len()).min(self.bytes - done) as usize;
            let bytes = match from.at() {
                Loc::Bytes(own) => own.get(..n)?,
                _ => {
                    let n = n.min(scratch.len());
                    match phase.enter(Phase::READS, || fetch(from, &mut scratch[..n]))? {
                        Ok(()) => &scratch[..n],
                        Err(fault) => return Some(Err(fault)),
                    }
                }
            };
            let write = || transfer(Place::bytes(bytes), to, bytes.len(), &mut []);
            if let Err(fault) = phase.enter(Phase::WRITES, write)? {
                return Some(Err(fault));
            }
            if let Some(kept) = &mut kept {
                kept.extend_from_slice(bytes);
            }
            done += bytes.len() as u64;
        }
        Some(Ok(()))
    }

    /// Reads the source. `None` if the job was stopped.
    pub fn bring(&self, phase: &Phase, data: &mut [u8]) -> Option<Result<(), Fault>> {
        let mut done = 0;
        while done < data.len() {
            let from = self.from.at(done as u64)?;
            let end = data.len().min(done + from.len() as usize);
            if let Err(fault) = phase.enter(Phase::READS, || fetch(from, &mut data[done..end]))? {
                return Some(Err(fault));
            }
            done = end;
        }
        Some(Ok(()))
    }
}
