//! The memory of a stream that its peer writes: the free parts of the peer's receive buffer, and the peer's mappings.

use std::sync::atomic::{AtomicU64, Ordering};

use super::protocol::{Mapping, Sge};

/// Number of parts of the peer's receive buffer. The peer announces them in turn.
pub(super) const PARTS: usize = 2;
const PART_WORDS: usize = size_of::<Sge>() / 8;
const MAPPING_WORDS: usize = size_of::<Mapping>() / 8;

/// The words may change at any time, so each is read once and by itself. The peer writes an entry as a whole and then
/// announces it in a message. A peer that does not do so harms only its own connection.
pub(super) struct Board(Box<[AtomicU64]>);

impl Board {
    /// A board for `mappings` mappings.
    pub fn new(mappings: u32) -> Board {
        let words = PARTS * PART_WORDS + mappings as usize * MAPPING_WORDS;
        Board((0..words).map(|_| AtomicU64::new(0)).collect())
    }

    /// Its address, for the peer, and its size in bytes.
    pub fn memory(&self) -> (*mut std::ffi::c_void, usize) {
        (self.0.as_ptr().cast_mut().cast(), self.0.len() * 8)
    }

    /// Reads an entry that the peer may be writing. The peer's bytes arrive in the order of their addresses, so the
    /// length, which is last, is read first: if it is new, the address is new too.
    fn sge(&self, word: usize) -> Sge {
        let rest = self.0[word + 1].load(Ordering::Acquire).to_ne_bytes();
        let addr = self.0[word].load(Ordering::Acquire);
        let half = |i: usize| u32::from_ne_bytes([rest[i], rest[i + 1], rest[i + 2], rest[i + 3]]);
        Sge { addr, key: half(0), length: half(4) }
    }

    /// The free bytes of one part of the peer's buffer.
    pub fn part(&self, i: usize) -> Sge {
        self.sge(i * PART_WORDS)
    }

    /// Sets a part: to the peer's first announcement, or to the rest after a message.
    pub fn set_part(&self, i: usize, part: Sge) {
        let mut rest = [0; 8];
        rest[..4].copy_from_slice(&part.key.to_ne_bytes());
        rest[4..].copy_from_slice(&part.length.to_ne_bytes());
        for (at, value) in [(0, part.addr), (1, u64::from_ne_bytes(rest))] {
            self.0[i * PART_WORDS + at].store(value, Ordering::Relaxed);
        }
    }

    /// The peer's address of the byte at `offset`, and the number of mapped bytes from there on.
    pub fn find(&self, offset: u64) -> Option<Sge> {
        let table = PARTS * PART_WORDS..self.0.len();
        table.step_by(MAPPING_WORDS).find_map(|word| {
            let memory = self.sge(word + 1);
            let start = self.0[word].load(Ordering::Acquire);
            let into = offset.checked_sub(start).filter(|&i| i < memory.length.into())?;
            let addr = memory.addr.wrapping_add(into);
            Some(Sge { addr, length: memory.length - into as u32, ..memory })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_and_mappings_lie_where_the_peer_writes_them() {
        let board = Board::new(2);
        let (at, len) = board.memory();
        assert_eq!(len, 2 * 16 + 2 * 24);
        let memory = Sge { addr: 0x1000, key: 7, length: 100 };
        // SAFETY: the board's own memory, as a peer's WRITE would reach it.
        unsafe {
            at.cast::<Sge>().add(1).write(Sge { addr: 5, key: 6, length: 7 });
            at.byte_add(32 + 24).cast::<Mapping>().write(Mapping { offset: 50, memory });
        }
        assert_eq!(board.part(1), Sge { addr: 5, key: 6, length: 7 });
        assert_eq!(board.find(50), Some(memory));
        assert_eq!(board.find(149), Some(Sge { addr: 0x1000 + 99, key: 7, length: 1 }));
        assert_eq!((board.find(49), board.find(150), board.find(0)), (None, None, None));
    }

    #[test]
    fn a_part_keeps_what_is_left_of_it() {
        let board = Board::new(0);
        board.set_part(0, Sge { addr: u64::MAX, key: 1, length: 2 });
        assert_eq!(board.part(0), Sge { addr: u64::MAX, key: 1, length: 2 });
        assert_eq!(board.part(1), Sge::default());
        assert_eq!(board.find(0), None);
    }
}
