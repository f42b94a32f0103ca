//! Checks the outcome of the traffic on a fabric.

use std::hash::Hasher;

use unirdma_formats::{QpType, WcStatus, WrOpcode, wc_flags};

use super::{COUNTER, Fabric, READS, RESULTS, RETRIES, Report, SLOT, Sent, addend, message, offset, peer, reliable};
use super::{slot, source};
use crate::status;

impl Fabric {
    /// Ends the connections that were made by address, and checks all outcomes. Panics if one is not allowed.
    pub fn check(mut self) -> Report {
        let heard = self.group.check(&mut self.net);
        for (by, m) in std::mem::take(&mut self.meetings).into_iter().enumerate() {
            m.end(&mut self.net, by % 2);
        }
        for end in 0..self.types.len() {
            self.check_end(end);
        }
        Report { caught: self.net.caught, heard, moves: self.net.moves, digest: self.net.digest.finish() }
    }

    /// Checks the completions of an end, and the data that arrived at its peer.
    fn check_end(&self, end: usize) {
        let (seed, typ, to) = (self.seed, self.types[end], peer(end));
        let sent = &self.sent[end];
        // Every request completes once, in order, without an error, unless its connection was given up.
        let done: Vec<(u64, WcStatus)> = self.done[end].iter().map(|c| (c.wr_id, status(c))).collect();
        if reliable(typ) && [end, to].iter().any(|&e| self.gave_up(e)) {
            return self.check_given_up(end, &done);
        }
        let all: Vec<(u64, WcStatus)> = sent.iter().map(|s| (s.0, WcStatus::Success)).collect();
        assert_eq!(done, all, "seed {seed}, {typ:?} end {end}");
        if reliable(typ) { self.check_connected(end) } else { self.check_arrived(end) }
    }

    /// Checks the messages that arrived from an unreliable QP: each was sent, and its data is right. The network may
    /// have reordered or duplicated them.
    fn check_arrived(&self, end: usize) {
        let (seed, typ, to) = (self.seed, self.types[end], peer(end));
        for c in &self.received[to] {
            assert_eq!(status(c), WcStatus::Success, "seed {seed}, {typ:?} end {to}");
            let skip = if typ == QpType::Ud { 40 } else { 0 };
            let write = c.opcode == 129;
            let n = if write { u64::from(c.imm) } else { self.number(to, c.wr_id, skip) };
            let found = self.sent[end].get(n as usize);
            let &(_, op, len) = found.unwrap_or_else(|| panic!("seed {seed}: message {n} was never sent"));
            assert_eq!(c.byte_len, len + skip as u32, "seed {seed}, {typ:?} end {to}, message {n}");
            assert_eq!(op == WrOpcode::WriteImm, write, "seed {seed}, {typ:?} end {to}, message {n}");
            let at = slot(op, if write { n } else { c.wr_id }) as usize + skip;
            let got = self.net.ends[to].bytes(at, len as usize);
            assert!(got == message(seed, end, n, len), "seed {seed}, {typ:?} end {to}, message {n}");
        }
    }

    /// True if a request of an end has failed because its retries were exhausted.
    fn gave_up(&self, end: usize) -> bool {
        self.done[end].iter().any(|c| status(c) == WcStatus::RetryExcErr)
    }

    /// Checks a connection of which one end gave up. The network must have lost a packet of the connection for each
    /// try. Requests before the failure completed in order, and all requests after it were flushed.
    fn check_given_up(&self, end: usize, done: &[(u64, WcStatus)]) {
        let (seed, typ, to) = (self.seed, self.types[end], peer(end));
        let targets = [end, to].into_iter().filter_map(|e| self.targets[e]);
        let lost = self.net.lost_between(end, to) + targets.map(|qpn| self.net.lost_for(qpn)).sum::<u32>();
        assert!(lost > u32::from(RETRIES), "seed {seed}, {typ:?} end {end} gave up after {lost} losses: {done:?}");
        let numbers: Vec<u64> = self.sent[end].iter().map(|s| s.0).collect();
        assert_eq!(done.iter().map(|d| d.0).collect::<Vec<_>>(), numbers, "seed {seed}, {typ:?} end {end}");
        let rest = done.iter().skip_while(|d| d.1 == WcStatus::Success).map(|d| d.1).collect::<Vec<_>>();
        let flushed = rest.iter().skip(1).all(|&s| s == WcStatus::WrFlushErr);
        let given_up = rest.first().is_none_or(|&s| s == WcStatus::RetryExcErr);
        assert!(flushed && given_up, "seed {seed}, {typ:?} end {end}: {done:?}");
    }

    /// Checks a reliable connection: everything arrived once, in order.
    fn check_connected(&self, end: usize) {
        let (seed, typ, to) = (self.seed, self.types[end], peer(end));
        let consuming: Vec<&Sent> = self.sent[end].iter().filter(|s| s.1.consumes_recv()).collect();
        let lens: Vec<u32> = self.received[to].iter().map(|c| c.byte_len).collect();
        assert_eq!(lens, consuming.iter().map(|s| s.2).collect::<Vec<_>>(), "seed {seed}, {typ:?} end {to}");
        let (here, there) = (&self.net.ends[end], &self.net.ends[to]);
        let (source, mut counter) = (source(seed, to), 0);
        for &(n, op, len) in &self.sent[end] {
            let what = format!("seed {seed}, {typ:?} end {to}, message {n}, {op:?}");
            let bytes = len as usize;
            match op {
                WrOpcode::Read => {
                    let from = offset(n) as usize;
                    assert!(here.bytes((READS + n * SLOT) as usize, bytes) == source[from..from + bytes], "{what}");
                }
                WrOpcode::FetchAdd => {
                    let found = here.bytes((RESULTS + 8 * n) as usize, 8);
                    assert_eq!(u64::from_ne_bytes(found.try_into().unwrap()), counter, "{what}");
                    counter += addend(n);
                }
                _ => assert!(there.bytes(slot(op, n) as usize, bytes) == message(seed, end, n, len), "{what}"),
            }
        }
        let last = there.bytes(COUNTER as usize, 8);
        assert_eq!(u64::from_ne_bytes(last.try_into().unwrap()), counter, "seed {seed}, {typ:?} end {to}");
        let invalidated = self.received[to].iter().filter(|c| u32::from(c.wc_flags) & wc_flags::WITH_INV != 0);
        let invalidated: Vec<u32> = invalidated.map(|c| c.imm).collect();
        let asked = self.sent[end].iter().any(|s| s.1 == WrOpcode::SendInv);
        assert_eq!(invalidated, Vec::from_iter(asked.then_some(self.windows[to])), "seed {seed}, {typ:?} end {to}");
    }

    /// The number at the beginning of the data in receive `wr_id`.
    fn number(&self, end: usize, wr_id: u64, skip: usize) -> u64 {
        let at = slot(WrOpcode::Send, wr_id) as usize + skip;
        u64::from_le_bytes(self.net.ends[end].bytes(at, 8).try_into().unwrap())
    }
}
