//! Memory that lies in several windows, one piece after the other, without a mapping of its own.

use std::any::Any;

use crate::Span;

/// Pieces of windows, in order. A mapping for each would use up those of the process; this takes 24 bytes for each.
pub struct Pieces {
    windows: Vec<Span>,
    pieces: Vec<Piece>,
    len: u64,
    /// Kept as long as this, for whoever asked for it.
    _hold: Box<dyn Any + Send + Sync>,
}

struct Piece {
    /// Where in the whole it begins.
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
        let mut all = Pieces { windows, pieces: Vec::with_capacity(pieces.size_hint().0), len: 0, _hold: hold };
        for (window, off, len) in pieces {
            let room = all.windows.get(window as usize)?.len() as u64;
            if len == 0 || off.checked_add(len)? > room {
                return None;
            }
            all.pieces.push(Piece { start: all.len, off, window });
            all.len = all.len.checked_add(len)?;
        }
        Some(all)
    }

    /// Bytes of all pieces.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// True if there is none.
    pub fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    /// The window of byte `off` of the whole, its offset there, and how many bytes of the piece begin with it; `None` beyond the end.
    #[inline]
    pub fn at(&self, off: u64) -> Option<(&Span, u64, u64)> {
        if off >= self.len {
            return None;
        }
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
}
