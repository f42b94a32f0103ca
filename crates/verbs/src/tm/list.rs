//! The matching list of a tag-matching SRQ, and the headers of its messages.

use unirdma_abi::Sge;

/// Bytes of `struct ibv_tmh`, and of `struct ibv_rvh`, which follows it in a rendezvous request.
pub const TMH: usize = 16;
pub const RVH: usize = 16;

/// `enum ibv_tmh_op`.
pub const RENDEZVOUS: u8 = 1;
pub const FIN: u8 = 2;
pub const EAGER: u8 = 3;

/// `struct ibv_tmh`: the beginning of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    pub op: u8,
    /// The sender's own number, as the receiver reads it.
    pub app_ctx: u32,
    pub tag: u64,
}

/// `struct ibv_rvh`: the place of a rendezvous's data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rendezvous {
    pub addr: u64,
    pub rkey: u32,
    pub len: u32,
}

fn number<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at + N)?.try_into().ok()
}

impl Header {
    /// Parses a message's header, if the message is long enough.
    pub fn parse(bytes: &[u8]) -> Option<Header> {
        Some(Header {
            op: *bytes.first()?,
            app_ctx: u32::from_be_bytes(number(bytes, 4)?),
            tag: u64::from_be_bytes(number(bytes, 8)?),
        })
    }
}

impl Rendezvous {
    /// Parses a request's header, if the request is long enough.
    pub fn parse(bytes: &[u8]) -> Option<Rendezvous> {
        Some(Rendezvous {
            addr: u64::from_be_bytes(number(bytes, TMH)?),
            rkey: u32::from_be_bytes(number(bytes, TMH + 8)?),
            len: u32::from_be_bytes(number(bytes, TMH + 12)?),
        })
    }
}

/// A tagged buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    pub wr_id: u64,
    pub tag: u64,
    /// Bits of a message's tag that are compared.
    pub mask: u64,
    pub sges: Vec<Sge>,
}

impl Entry {
    /// Its size, bytes.
    pub fn room(&self) -> u64 {
        self.sges.iter().map(|s| u64::from(s.length)).sum()
    }
}

/// Buffers in the order in which they were posted. A message goes to the first buffer that matches.
///
/// The program itself handles a message that matches no buffer. A buffer that is posted before the program has done so
/// must not take a later message. So the buffer waits until the program reports that it has handled all such messages.
#[derive(Debug)]
pub struct List {
    entries: Vec<(u32, Entry)>,
    /// Number of entries at the beginning of `entries` that may match.
    active: usize,
    next: u32,
    most: usize,
    /// Number of messages that matched no buffer, and number of them that the program has handled.
    unexpected: u32,
    handled: u32,
}

impl List {
    /// An empty list for at most `most` buffers.
    pub fn new(most: u32) -> List {
        List { entries: Vec::new(), active: 0, next: 1, most: most as usize, unexpected: 0, handled: 0 }
    }

    /// True if the program has handled all messages that matched no buffer.
    pub fn in_step(&self) -> bool {
        self.unexpected == self.handled
    }

    /// The program has handled `handled` messages that matched no buffer.
    pub fn sync(&mut self, handled: u32) {
        self.handled = handled;
        self.activate();
    }

    fn activate(&mut self) {
        if self.in_step() {
            self.active = self.entries.len();
        }
    }

    pub fn is_full(&self) -> bool {
        self.entries.len() >= self.most
    }

    /// Appends a buffer, if there is room. Returns its handle.
    pub fn add(&mut self, e: Entry) -> Option<u32> {
        if self.is_full() {
            return None;
        }
        let handle = self.next;
        self.next = self.next.wrapping_add(1);
        self.entries.push((handle, e));
        self.activate();
        Some(handle)
    }

    fn take_at(&mut self, i: usize) -> Entry {
        self.active -= usize::from(i < self.active);
        self.entries.remove(i).1
    }

    pub fn remove(&mut self, handle: u32) -> Option<Entry> {
        let i = self.entries.iter().position(|e| e.0 == handle)?;
        Some(self.take_at(i))
    }

    /// Takes the buffer for a message. If there is none, the message counts as unexpected.
    pub fn take(&mut self, tag: u64) -> Option<Entry> {
        let found = self.entries[..self.active].iter().position(|(_, e)| tag & e.mask == e.tag);
        self.unexpected = self.unexpected.wrapping_add(found.is_none().into());
        found.map(|i| self.take_at(i))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(wr_id: u64, tag: u64, mask: u64) -> Entry {
        Entry { wr_id, tag, mask, sges: Vec::new() }
    }

    fn taken(l: &mut List, tag: u64) -> Option<u64> {
        l.take(tag).map(|e| e.wr_id)
    }

    #[test]
    fn headers_are_in_network_order() {
        let mut m = [0u8; TMH + RVH];
        (m[0], m[7], m[15]) = (RENDEZVOUS, 5, 9);
        (m[23], m[27], m[31]) = (1, 2, 3);
        assert_eq!(Header::parse(&m), Some(Header { op: RENDEZVOUS, app_ctx: 5, tag: 9 }));
        assert_eq!(Rendezvous::parse(&m), Some(Rendezvous { addr: 1, rkey: 2, len: 3 }));
        assert_eq!(Header::parse(&m[..TMH - 1]), None);
        assert_eq!(Rendezvous::parse(&m[..TMH + RVH - 1]), None);
    }

    #[test]
    fn the_first_that_matches_is_taken() {
        let mut l = List::new(4);
        for e in [entry(1, 0x10, u64::MAX), entry(2, 0, 0), entry(3, 0x10, 0xff)] {
            assert!(l.add(e).is_some());
        }
        assert_eq!([0x10, 0x110, 0x110].map(|t| taken(&mut l, t)), [Some(1), Some(2), Some(3)]);
        assert_eq!(taken(&mut l, 0x10), None);
    }

    #[test]
    fn a_new_buffer_waits_until_the_program_has_handled_what_came_before_it() {
        let mut l = List::new(4);
        assert!(l.add(entry(1, 1, u64::MAX)).is_some());
        assert_eq!(taken(&mut l, 2), None);
        assert!(!l.in_step());
        assert!(l.add(entry(2, 2, u64::MAX)).is_some());
        assert_eq!(taken(&mut l, 2), None, "the first message belongs into this buffer");
        assert_eq!(taken(&mut l, 1), Some(1), "older buffers go on matching");
        l.sync(1);
        assert_eq!(taken(&mut l, 2), None);
        l.sync(3);
        assert_eq!(taken(&mut l, 2), Some(2));
    }

    #[test]
    fn a_list_has_an_end_and_handles_are_good_once() {
        let mut l = List::new(2);
        let a = l.add(entry(1, 1, 1)).unwrap();
        assert!(l.add(entry(2, 1, 1)).is_some() && l.is_full());
        assert_eq!(l.add(entry(3, 1, 1)), None);
        assert_eq!(l.remove(a).map(|e| e.wr_id), Some(1));
        assert_eq!(l.remove(a), None);
        assert_eq!(taken(&mut l, 1), Some(2));
    }
}
