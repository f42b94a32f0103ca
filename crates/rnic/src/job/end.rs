//! The ends of a copy that a job makes: memory that stays mapped until the job lets it go.

use unirdma_mem::{Bell, Fault, Loc, ProcMem, Span, fetch, transfer};

use super::task::Phase;
use crate::access::{Side, Tables};

/// Memory that a job holds: it stays mapped until the job lets it go.
pub(super) enum Place {
    Mapped(Span, u64),
    /// The same where pages may be missing; touching them may take as long as the owner likes if it `waits`.
    Sparse {
        span: Span,
        off: u64,
        waits: bool,
    },
    Process(ProcMem, u64, Option<Bell>),
    Null,
    Away,
    /// Private bytes of the job, from here on.
    Own(usize),
}

/// One end of a copy.
#[derive(Default)]
pub(super) struct End {
    /// Places and their lengths.
    places: Vec<(Place, u64)>,
    /// Data that came with the WQE.
    own: Vec<u8>,
}

impl End {
    pub fn clear(&mut self) {
        self.places.clear();
        self.own.clear();
    }

    /// Pins bytes `[off, off + len)` of a side of a message.
    ///
    /// # Errors
    /// `fault` if they are not all there.
    pub fn pin(&mut self, tables: &Tables<'_>, side: Side<'_>, off: u64, len: u64, fault: Fault) -> Result<(), Fault> {
        self.clear();
        let mut done = 0;
        while done < len {
            let (at, n) = tables.at(side, off + done, len - done).ok_or(fault)?;
            let place = match at {
                Loc::Mapped(span, off) => Place::Mapped(span.clone(), off),
                Loc::Sparse { span, off, waits } => Place::Sparse { span: span.clone(), off, waits },
                Loc::Process(mem, addr, bell) => Place::Process(mem.clone(), addr, bell.cloned()),
                Loc::Null => Place::Null,
                Loc::Away => Place::Away,
                Loc::Bytes(b) => {
                    let start = self.own.len();
                    self.own.extend_from_slice(b.get(..n as usize).ok_or(fault)?);
                    Place::Own(start)
                }
            };
            self.places.push((place, n));
            done += n;
        }
        Ok(())
    }

    /// Makes it a private copy of these bytes, one part after the other.
    pub fn copy_of(&mut self, parts: &[&[u8]]) {
        self.clear();
        parts.iter().for_each(|part| self.own.extend_from_slice(part));
        self.places.push((Place::Own(0), self.own.len() as u64));
    }

    /// How many bytes it has.
    pub fn len(&self) -> u64 {
        self.places.iter().map(|p| p.1).sum()
    }

    /// True if reaching it may take as long as its owner likes: it lies in the private memory of a process, for example.
    pub fn may_wait(&self) -> bool {
        self.places.iter().any(|(p, _)| matches!(p, Place::Process(..) | Place::Sparse { waits: true, .. }))
    }

    /// True if pages of it may be missing.
    pub fn is_sparse(&self) -> bool {
        self.places.iter().any(|(p, _)| matches!(p, Place::Sparse { .. }))
    }

    /// True if this address lies in a window that it goes through.
    pub fn holds(&self, addr: usize) -> bool {
        self.places.iter().any(|(p, _)| match p {
            Place::Mapped(span, _) | Place::Sparse { span, .. } => addr.wrapping_sub(span.addr()) < span.len(),
            _ => false,
        })
    }

    /// The place of byte `off`, and how many bytes follow it there.
    pub fn at(&self, mut off: u64) -> Option<(Loc<'_>, u64)> {
        for (place, len) in &self.places {
            if off < *len {
                let at = match place {
                    Place::Mapped(span, start) => Loc::Mapped(span, start + off),
                    Place::Sparse { span, off: start, waits } => Loc::Sparse { span, off: start + off, waits: *waits },
                    Place::Process(mem, addr, bell) => Loc::Process(mem, addr.wrapping_add(off), bell.as_ref()),
                    Place::Null => Loc::Null,
                    Place::Away => Loc::Away,
                    Place::Own(start) => Loc::Bytes(self.own.get(start + off as usize..)?),
                };
                return Some((at, len - off));
            }
            off -= len;
        }
        None
    }
}

/// What a job copies for one request.
#[derive(Default)]
pub(super) struct Part {
    pub from: End,
    pub to: End,
    pub bytes: u64,
}

impl Part {
    pub fn clear(&mut self) {
        self.from.clear();
        self.to.clear();
    }

    /// Pins both ends of a copy.
    pub fn pin(&mut self, tables: &Tables<'_>, [from, to]: [Side<'_>; 2], off: u64, bytes: u64) -> Result<(), Fault> {
        self.bytes = bytes;
        self.from.pin(tables, from, off, bytes, Fault::Source)?;
        self.to.pin(tables, to, off, bytes, Fault::Destination)
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
            let (from, n) = self.from.at(done).ok_or(Fault::Source)?;
            let (to, room) = self.to.at(done).ok_or(Fault::Destination)?;
            let n = n.min(room).min(end - done);
            transfer(from, to, n as usize, &mut [])?;
            done += n;
        }
        Ok(())
    }

    /// Copies by way of `scratch`, one end at a time, and appends what it copies to `kept`. `None` if it was stopped.
    pub fn bounce(
        &self,
        phase: &Phase,
        scratch: &mut [u8],
        mut kept: Option<&mut Vec<u8>>,
    ) -> Option<Result<(), Fault>> {
        let mut done = 0;
        while done < self.bytes {
            let (from, n) = self.from.at(done)?;
            let (to, room) = self.to.at(done)?;
            let n = n.min(room).min(self.bytes - done) as usize;
            let bytes = match from {
                Loc::Bytes(own) => own.get(..n)?,
                _ => {
                    let n = n.min(scratch.len());
                    match phase.enter(Phase::READS, || fetch(from, &mut scratch[..n]))? {
                        Ok(()) => &scratch[..n],
                        Err(fault) => return Some(Err(fault)),
                    }
                }
            };
            let write = || transfer(Loc::Bytes(bytes), to, bytes.len(), &mut []);
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

    /// Reads the source; `None` if it was stopped.
    pub fn bring(&self, phase: &Phase, data: &mut [u8]) -> Option<Result<(), Fault>> {
        let mut done = 0;
        while done < data.len() {
            let (from, n) = self.from.at(done as u64)?;
            let end = data.len().min(done + n as usize);
            if let Err(fault) = phase.enter(Phase::READS, || fetch(from, &mut data[done..end]))? {
                return Some(Err(fault));
            }
            done = end;
        }
        Some(Ok(()))
    }
}
