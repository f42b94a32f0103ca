//! Memory that lies in several windows, one piece after the other, without a mapping of its own.

use std::any::Any;
use std::sync::Arc;

use crate::Span;

/// Pieces of windows, in order. A mapping for each would use up those of the process; this takes 24 bytes for each.
#[derive(Clone)]
pub struct Pieces {
    /// Lists of pieces, each with the place in the whole where it begins.
    lists: Vec<(u64, Arc<List>)>,
    len: u64,
}

struct List {
    windows: Vec<Span>,
    pieces: Vec<Piece>,
    len: u64,
    /// Kept as long as this, for whoever asked for it.
    _hold: Box<dyn Any + Send + Sync>,
}

struct Piece {
    /// Where in its list it begins.
    start: u64,
    /// Where in its window it begins.
    off: u64,
    window: u32,
}

impl Pieces {
    /// Pieces of `windows`: for each the index of its window, the offset there and its bytes. `None` if one leaves its window, or is
    /// empty.
    pub fn new(
        windows: Vec<Span>,
        pieces: impl Iterator<Item = (u32, u64, u64)>,
        hold: Box<dyn Any + Send + Sync>,
    ) -> Option<Self> {
        let mut list = List { windows, pieces: Vec::with_capacity(pieces.size_hint().0), len: 0, _hold: hold };
        for (window, off, len) in pieces {
            let room = list.windows.get(window as usize)?.len() as u64;
            if len == 0 || off.checked_add(len)? > room {
                return None;
            }
            list.pieces.push(Piece { start: list.len, off, window });
            list.len = list.len.checked_add(len)?;
        }
        let len = list.len;
        Some(Pieces { lists: vec![(0, Arc::new(list))], len })
    }

    /// All of a window, as one piece.
    pub fn of(window: Span) -> Self {
        let len = window.len() as u64;
        let pieces = vec![Piece { start: 0, off: 0, window: 0 }];
        let list = List { windows: vec![window], pieces, len, _hold: Box::new(()) };
        Pieces { lists: vec![(0, Arc::new(list))], len }
    }

    /// These, and then the others; `None` if that is too long.
    pub fn followed_by(&self, others: &Pieces) -> Option<Pieces> {
        let mut all = self.clone();
        all.lists.extend(others.lists.iter().map(|(start, list)| (self.len.wrapping_add(*start), list.clone())));
        all.len = self.len.checked_add(others.len)?;
        Some(all)
    }

    /// Bytes of all pieces.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// True if there is none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The window of byte `off` of the whole, its offset there, and how many bytes of the piece begin with it; `None` beyond the end.
    #[inline]
    pub fn at(&self, off: u64) -> Option<(&Span, u64, u64)> {
        if off >= self.len {
            return None;
        }
        let (start, list) = match &self.lists[..] {
            [only] => only,
            lists => &lists[lists.partition_point(|l| l.0 <= off).checked_sub(1)?],
        };
        list.at(off - start)
    }
}

impl List {
    #[inline]
    fn at(&self, off: u64) -> Option<(&Span, u64, u64)> {
        let i = self.pieces.partition_point(|p| p.start <= off).checked_sub(1)?;
        let piece = &self.pieces[i];
        let end = self.pieces.get(i + 1).map_or(self.len, |next| next.start);
        Some((&self.windows[piece.window as usize], piece.off + (off - piece.start), end - off))
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn each_byte_is_in_its_piece() {
        let windows = || vec![Span::anonymous(100), Span::anonymous(50)];
        let p = Pieces::new(windows(), [(1, 10, 40), (0, 90, 10), (1, 0, 1)].into_iter(), Box::new(())).unwrap();
        let at = |off| p.at(off).map(|(s, off, n)| (s.len(), off, n));
        assert_eq!((p.len(), p.is_empty()), (51, false));
        assert_eq!([at(0), at(39)], [Some((50, 10, 40)), Some((50, 49, 1))]);
        assert_eq!([at(40), at(49)], [Some((100, 90, 10)), Some((100, 99, 1))]);
        assert_eq!([at(50), at(51), at(u64::MAX)], [Some((50, 0, 1)), None, None]);
        for wrong in [(0, 91, 10), (2, 0, 1), (0, 0, 0), (0, u64::MAX, 2)] {
            assert!(Pieces::new(windows(), [(0, 0, 1), wrong].into_iter(), Box::new(())).is_none());
        }
    }

    #[test]
    fn pieces_follow_each_other() {
        let windows = || vec![Span::anonymous(100), Span::anonymous(50)];
        let p = Pieces::new(windows(), [(1, 10, 40), (0, 90, 10)].into_iter(), Box::new(())).unwrap();
        let all = Pieces::of(Span::anonymous(7)).followed_by(&p).unwrap().followed_by(&p).unwrap();
        let at = |off| all.at(off).map(|(s, off, n)| (s.len(), off, n));
        assert_eq!((all.len(), p.len()), (107, 50));
        assert_eq!([at(0), at(6), at(7)], [Some((7, 0, 7)), Some((7, 6, 1)), Some((50, 10, 40))]);
        assert_eq!([at(46), at(47), at(56)], [Some((50, 49, 1)), Some((100, 90, 10)), Some((100, 99, 1))]);
        assert_eq!([at(57), at(106), at(107)], [Some((50, 10, 40)), Some((100, 99, 1)), None]);
    }
}
