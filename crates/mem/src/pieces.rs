//! Memory that lies in several windows, one piece after the other, without a mapping of its own.

use std::any::Any;
use std::collections::BTreeMap;

use crate::{Loc, Place, Span};

/// The first piece of a list may begin, and the last one end, anywhere in memory. Every other end of a piece is a
/// multiple of this, so the length of a list limits its pieces.
pub const PIECE_ALIGN: u64 = 4096;

/// Pieces of windows, in order. A mapping for each piece would use up the mappings that a process may have; this takes
/// 24 bytes for each.
pub struct Pieces {
    first: List,
    /// Lists that were added, by the offset in the whole where each begins.
    more: BTreeMap<u64, List>,
    len: u64,
}

struct List {
    windows: Vec<Span>,
    pieces: Vec<Piece>,
    len: u64,
    /// A value of the list's creator that lives as long as the list.
    _hold: Box<dyn Any + Send + Sync>,
}

struct Piece {
    /// Offset in its list.
    start: u64,
    /// Offset in its window.
    off: u64,
    window: u32,
}

impl Pieces {
    /// Pieces of `windows`: for each piece the index of its window, the offset there and its bytes. `None` if a piece
    /// leaves its window, is empty, or begins or ends where only the first or the last one may ([`PIECE_ALIGN`]).
    pub fn new(
        windows: Vec<Span>,
        pieces: impl Iterator<Item = (u32, u64, u64)>,
        hold: Box<dyn Any + Send + Sync>,
    ) -> Option<Self> {
        let mut list = List { windows, pieces: Vec::with_capacity(pieces.size_hint().0), len: 0, _hold: hold };
        for (window, off, len) in pieces {
            let span = list.windows.get(window as usize)?;
            if len == 0 || off.checked_add(len)? > span.len() as u64 {
                return None;
            }
            let begin = span.addr() as u64 + off;
            if list.end().is_some_and(|end| !is_aligned(end) || !is_aligned(begin)) {
                return None;
            }
            list.pieces.push(Piece { start: list.len, off, window });
            list.len = list.len.checked_add(len)?;
        }
        let len = list.len;
        Some(Pieces { first: list, more: BTreeMap::new(), len })
    }

    /// All of a window, as one piece.
    pub fn of(window: Span) -> Self {
        let len = window.len() as u64;
        let pieces = vec![Piece { start: 0, off: 0, window: 0 }];
        let first = List { windows: vec![window], pieces, len, _hold: Box::new(()) };
        Pieces { first, more: BTreeMap::new(), len }
    }

    /// Adds others at the end. The present pieces are neither copied nor read. False, and nothing is changed, if the
    /// sum is too long.
    pub fn extend(&mut self, others: Pieces) -> bool {
        let Some(len) = self.len.checked_add(others.len) else { return false };
        let lists = std::iter::once((0, others.first)).chain(others.more).filter(|(_, list)| list.len > 0);
        self.more.extend(lists.map(|(start, list)| (self.len + start, list)));
        self.len = len;
        true
    }

    /// Bytes of all pieces.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// True if there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The place of byte `off` of the whole, up to the end of its piece; `None` beyond the end.
    #[inline]
    pub fn at(&self, off: u64) -> Option<Place<'_>> {
        if off < self.first.len {
            return self.first.at(off);
        }
        if off >= self.len {
            return None;
        }
        let (start, list) = self.more.range(..=off).next_back()?;
        list.at(off - start)
    }
}

fn is_aligned(addr: u64) -> bool {
    addr % PIECE_ALIGN == 0
}

impl List {
    #[inline]
    fn at(&self, off: u64) -> Option<Place<'_>> {
        let i = self.pieces.partition_point(|p| p.start <= off).checked_sub(1)?;
        let piece = &self.pieces[i];
        let end = self.pieces.get(i + 1).map_or(self.len, |next| next.start);
        let at = Loc::Mapped(&self.windows[piece.window as usize], piece.off + (off - piece.start));
        Some(Place::new(at, end - off))
    }

    /// The address where the last piece ends.
    fn end(&self) -> Option<u64> {
        let last = self.pieces.last()?;
        let window = self.windows.get(last.window as usize)?;
        Some(window.addr() as u64 + last.off + (self.len - last.start))
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::MemFd;

    fn windows() -> Vec<Span> {
        [4, 2].map(|pages| MemFd::new(c"t", pages * 4096).unwrap().span().clone()).to_vec()
    }

    /// The length of a window identifies it.
    fn at(p: &Pieces, off: u64) -> Option<(usize, u64, u64)> {
        let place = p.at(off)?;
        let Loc::Mapped(span, off) = place.at() else { panic!("it is mapped") };
        Some((span.len() / 4096, off, place.len()))
    }

    #[test]
    fn each_byte_is_in_its_piece() {
        let pieces = [(1, 4090, 4102), (0, 8192, 4096), (1, 0, 1)];
        let p = Pieces::new(windows(), pieces.into_iter(), Box::new(())).unwrap();
        assert_eq!((p.len(), p.is_empty()), (8199, false));
        assert_eq!([at(&p, 0), at(&p, 4101)], [Some((2, 4090, 4102)), Some((2, 8191, 1))]);
        assert_eq!([at(&p, 4102), at(&p, 8197)], [Some((4, 8192, 4096)), Some((4, 12_287, 1))]);
        assert_eq!([at(&p, 8198), at(&p, 8199), at(&p, u64::MAX)], [Some((2, 0, 1)), None, None]);
        for wrong in [(0, 12_288, 4097), (2, 0, 1), (0, 0, 0), (0, u64::MAX, 2)] {
            assert!(Pieces::new(windows(), [(0, 0, 4096), wrong].into_iter(), Box::new(())).is_none());
        }
    }

    #[test]
    fn only_the_first_piece_begins_and_only_the_last_one_ends_within_a_page() {
        let new = |pieces: &[_]| Pieces::new(windows(), pieces.iter().copied(), Box::new(()));
        assert!(new(&[(0, 5, 3)]).is_some() && new(&[(0, 4095, 1), (1, 0, 4096), (0, 0, 3)]).is_some());
        for wrong in
            [&[(0, 0, 3), (1, 0, 4096)][..], &[(0, 0, 4096), (1, 64, 4032)], &[(0, 4095, 1), (0, 8192, 3), (0, 0, 3)]]
        {
            assert!(new(wrong).is_none(), "{wrong:?}");
        }
    }

    #[test]
    fn pieces_follow_each_other() {
        let p = || Pieces::new(windows(), [(1, 4096, 4096), (0, 8192, 8192)].into_iter(), Box::new(())).unwrap();
        let first = windows()[0].sub(4093, 4099).unwrap();
        let mut all = Pieces::of(first);
        assert!(all.extend(p()) && all.extend(p()));
        let at = |off| at(&all, off);
        assert_eq!(all.len(), 4099 + 2 * 12_288);
        assert_eq!([at(0), at(4098)], [Some((1, 0, 4099)), Some((1, 4098, 1))]);
        assert_eq!([at(4099), at(8194), at(8195)], [Some((2, 4096, 4096)), Some((2, 8191, 1)), Some((4, 8192, 8192))]);
        let second = 4099 + 12_288;
        assert_eq!([at(second - 1), at(second), at(all.len())], [Some((4, 16_383, 1)), Some((2, 4096, 4096)), None]);
    }
}
