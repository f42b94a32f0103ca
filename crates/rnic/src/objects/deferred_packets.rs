//! Packets that wait for a job: their payload goes into the private memory of a process, or they came after one whose
//! payload does.

use std::collections::VecDeque;
use std::ops::Range;

use unirdma_formats::Psn;
use unirdma_formats::wire::{Op, Packet};
use unirdma_mem::Fault;

use super::buffer_limits::{Room, Taken};

/// Most bytes of packets that wait at one QP, in each direction.
const INBOX_BYTES: usize = 256 << 10;
/// Most bytes that packets give to one job.
const RUN_BYTES: usize = 64 << 10;

/// A packet to be executed, and its payload together with the payload of waiting packets that continue the same
/// message.
#[derive(Clone, Copy)]
pub(crate) struct PacketRun<'a> {
    pub first: &'a Packet<'a>,
    bytes: &'a [u8],
    packets: u32,
}

impl<'a> PacketRun<'a> {
    /// A run of one packet.
    pub fn of(p: &'a Packet<'a>) -> Self {
        PacketRun { first: p, bytes: p.payload, packets: 1 }
    }

    /// The payload that a job writes if at most `room` bytes fit, and the number of packets that it comes from.
    pub fn within(self, room: u64) -> (&'a [u8], u32) {
        if self.bytes.len() as u64 <= room { (self.bytes, self.packets) } else { (self.first.payload, 1) }
    }
}

/// Packets of one direction of a connection, in the order in which they came.
#[derive(Default)]
pub(crate) struct DeferredPackets {
    /// The packets without their payloads, and the payloads' lengths.
    heads: VecDeque<(Packet<'static>, usize)>,
    /// The payloads, from `at` on.
    bytes: Vec<u8>,
    at: usize,
    /// The job that the first packets wait for, and their number.
    job: Option<(u64, u32)>,
    /// The number of the first packets, and the result of their job.
    known: Option<(u32, Result<u64, Fault>)>,
    taken: Taken,
}

/// Bytes that a waiting packet with `payload` bytes counts as.
fn size(payload: usize) -> usize {
    payload + size_of::<(Packet<'static>, usize)>()
}

impl DeferredPackets {
    /// True if no packet waits.
    pub fn is_empty(&self) -> bool {
        self.heads.is_empty()
    }

    /// True while a job works for the first packet.
    pub fn waits(&self) -> bool {
        self.job.is_some()
    }

    /// True if its first packet can be executed.
    pub fn is_ready(&self) -> bool {
        !self.is_empty() && !self.waits()
    }

    /// Keeps a copy of the packet that a job works for. `buffer` holds payloads from now on.
    pub fn begin(&mut self, p: &Packet<'_>, room: &Room, buffer: Vec<u8>) {
        (self.bytes, self.at) = (buffer, 0);
        self.taken.force(room, size(p.payload.len()));
        self.append(p);
    }

    /// Appends a copy of a packet; false if there is no room.
    pub fn push(&mut self, p: &Packet<'_>, room: &Room) -> bool {
        let size = size(p.payload.len());
        if self.taken.bytes() + size > INBOX_BYTES || !self.taken.take(room, size) {
            return false;
        }
        if self.at > 0 && self.bytes.len() + p.payload.len() > self.bytes.capacity() {
            self.bytes.drain(..self.at);
            self.at = 0;
        }
        self.append(p);
        true
    }

    fn append(&mut self, p: &Packet<'_>) {
        self.bytes.extend_from_slice(p.payload);
        self.heads.push_back((p.head(), p.payload.len()));
    }

    /// Job `number` works for the first `packets` packets, which are done when it has ended.
    pub fn wait(&mut self, number: u64, packets: u32) {
        self.job = Some((number, packets));
    }

    /// A job has ended; false if no packet waits for it.
    pub fn end(&mut self, number: u64, done: Result<u64, Fault>) -> bool {
        let Some((_, packets)) = self.job.take_if(|job| job.0 == number) else { return false };
        // `SourceMoves` means here that the job was stopped, because payloads do not move: the packets are tried again.
        self.known = (done != Err(Fault::SourceMoves)).then_some((packets, done));
        true
    }

    /// The result of the job of the first packets, if that is known.
    pub fn known(&self) -> Option<Result<u64, Fault>> {
        self.known.map(|k| k.1)
    }

    /// The first packet, if it can be executed. It goes to [`DeferredPackets::take_back`] afterwards.
    pub fn lend(&mut self) -> Option<Lent> {
        let &(head, n) = self.heads.front().filter(|_| !self.waits())?;
        let (mut end, mut packets, mut last) = (self.at + n, 1, head);
        for &(next, len) in self.heads.iter().skip(1) {
            // All packets of a message but its last are of one size.
            let whole = end - self.at == n * packets as usize;
            if !whole || len == 0 || len > n || end + len - self.at > RUN_BYTES || !goes_on(&last, &next) {
                break;
            }
            (end, packets, last) = (end + len, packets + 1, next);
        }
        Some(Lent { head, bytes: std::mem::take(&mut self.bytes), payload: self.at..self.at + n, end, packets })
    }

    /// The packet that was lent was executed, unless a job works for it now. Returns the buffer when no packet is left.
    pub fn take_back(&mut self, lent: Lent) -> Option<Vec<u8>> {
        self.bytes = lent.bytes;
        if self.waits() {
            return None;
        }
        self.known = self.known.filter(|k| k.0 > 1).map(|(packets, done)| (packets - 1, done));
        let (_, n) = self.heads.pop_front()?;
        self.at += n;
        self.taken.give(size(n));
        if !self.is_empty() {
            return None;
        }
        // Otherwise the memory of a long list would never be freed.
        self.heads.shrink_to(super::SPARE_ENTRIES);
        Some(std::mem::take(&mut self.bytes))
    }
}

/// True if a packet continues the message of the one before it.
fn goes_on(before: &Packet<'_>, next: &Packet<'_>) -> bool {
    let same_message = match (before.opcode.op, next.opcode.op) {
        (Op::Send(a), Op::Send(b)) | (Op::Write(a), Op::Write(b)) => !a.ends() && !b.begins(),
        (Op::ReadResponse(_), Op::ReadResponse(_)) => true,
        _ => false,
    };
    same_message && Psn::new(next.psn) == Psn::new(before.psn).advance(1)
}

/// The first packet of an inbox while it is executed.
pub(crate) struct Lent {
    head: Packet<'static>,
    bytes: Vec<u8>,
    payload: Range<usize>,
    /// End of the run's payload, and the number of its packets.
    end: usize,
    packets: u32,
}

impl Lent {
    pub fn packet(&self) -> Packet<'_> {
        Packet { payload: &self.bytes[self.payload.clone()], ..self.head }
    }

    /// The run that begins with `p`, which is [`Lent::packet`].
    pub fn run<'a>(&'a self, p: &'a Packet<'a>) -> PacketRun<'a> {
        PacketRun { first: p, bytes: &self.bytes[self.payload.start..self.end], packets: self.packets }
    }
}

#[cfg(test)]
mod tests {
    use super::super::buffer_limits::Rooms;
    use super::*;
    use unirdma_formats::wire::{Extra, Opcode, Part, Transport};

    fn packet(op: Op, psn: u32, payload: &[u8]) -> Packet<'_> {
        Packet { payload, ..Packet::new(Opcode { transport: Transport::Rc, op, extra: Extra::None }, 5, psn) }
    }

    /// An inbox whose first packet waits for job 9.
    fn waiting(packets: &[Packet<'_>], room: &Room) -> DeferredPackets {
        let mut inbox = DeferredPackets::default();
        inbox.wait(9, 1);
        inbox.begin(&packets[0], room, Vec::new());
        assert!(packets[1..].iter().all(|p| inbox.push(p, room)) && inbox.lend().is_none());
        inbox
    }

    #[test]
    fn a_job_takes_the_packets_of_one_message() {
        let room = Rooms::default().jobs;
        let all = [
            packet(Op::Write(Part::First), 0xff_fffe, &[1; 4]),
            packet(Op::Write(Part::Middle), 0xff_ffff, &[2; 4]),
            packet(Op::Write(Part::Last), 0, &[3; 2]),
            packet(Op::Write(Part::First), 1, &[4; 4]),
            packet(Op::Write(Part::Last), 3, &[5; 4]),
        ];
        let mut inbox = waiting(&all, &room);
        assert!(!inbox.end(8, Ok(0)) && inbox.end(9, Err(Fault::SourceMoves)));
        assert!(inbox.known().is_none(), "it was stopped");
        let lent = inbox.lend().unwrap();
        let p = lent.packet();
        let run = lent.run(&p);
        assert_eq!((p, run.within(10)), (all[0], (&[1, 1, 1, 1, 2, 2, 2, 2, 3, 3][..], 3)));
        assert_eq!(run.within(9), (&[1; 4][..], 1), "there is no room for all of it");
        inbox.wait(10, 3);
        assert!(inbox.take_back(lent).is_none() && inbox.end(10, Ok(7)));
        for (i, want) in all.iter().enumerate() {
            assert_eq!(inbox.known(), (i < 3).then_some(Ok(7)), "{i}");
            let lent = inbox.lend().unwrap();
            let p = lent.packet();
            assert_eq!(p, *want);
            assert!(i < 3 || lent.run(&p).within(100).1 == 1, "a packet is missing in between");
            assert_eq!(inbox.take_back(lent).is_some(), i == 4);
        }
        assert!(inbox.is_empty() && inbox.lend().is_none());
    }

    #[test]
    fn an_inbox_has_a_limit() {
        let room = Rooms::default().jobs;
        let data = [7; 4096];
        let mut inbox = waiting(&[packet(Op::Send(Part::First), 0, &data)], &room);
        let more = (1..1000).take_while(|&psn| inbox.push(&packet(Op::Send(Part::Middle), psn, &data), &room)).count();
        assert!((50..64).contains(&more), "{more}");
        assert!(inbox.end(9, Ok(0)));
        // Each packet that leaves makes room for another one.
        for psn in 1000..2000 {
            let lent = inbox.lend().unwrap();
            inbox.take_back(lent);
            assert!(inbox.push(&packet(Op::Send(Part::Middle), psn, &data), &room));
        }
        assert!(inbox.bytes.capacity() <= 2 * INBOX_BYTES);
        drop(inbox);
        let mut taken = Taken::default();
        assert!(taken.take(&room, 4 << 20), "all room was given back");
    }
}
