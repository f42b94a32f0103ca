//! Packet pacing: a QP may have a rate limit (`IBV_QP_RATE_LIMIT` of `ibv_modify_qp(3)`,
//! `ibv_modify_qp_rate_limit(3)`), a static rate in its address vector (IBTA vol. 1, 9.11), or a vRNIC with limits. It
//! then takes its next packet, or its next slice on this host, only when the time of its earlier bytes at that rate is
//! over. Responses are not limited.

/// The weight of a vRNIC unless it is given another one.
pub const DEFAULT_WEIGHT: u32 = 100;
/// Nanoseconds of a second. And the same for the bits of a byte at 1 bit a second.
const SECOND_NS: u128 = 1_000_000_000;
const NS_PER_BYTE_AT_1_BPS: u128 = 8 * SECOND_NS;

/// A vRNIC's part of the RNIC.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Share {
    /// Weight, 1 to 10,000. While several vRNICs want the RNIC, each gets time in proportion to its weight.
    pub weight: u32,
    /// Most bits of payload that its QPs send in a second as requesters; 0: as many as they can.
    pub rate_bps: u64,
    /// Most work requests that its QPs begin in a second as requesters; 0: as many as they can.
    pub ops: u64,
    /// Burst: after a pause it may exceed both limits by what they allow in this time, microseconds.
    pub burst_us: u64,
}

impl Default for Share {
    fn default() -> Self {
        Share { weight: DEFAULT_WEIGHT, rate_bps: 0, ops: 0, burst_us: 10_000 }
    }
}

/// The limits of a vRNIC, and what it has sent, counted against them (generic cell rate algorithm, ITU-T I.371).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limit {
    pub share: Share,
    /// When all that was sent so far would have left at exactly the limit's rate, ns.
    pub bits_until: u64,
    pub ops_until: u64,
}

impl Limit {
    pub fn new(share: Share) -> Self {
        Limit { share, bits_until: 0, ops_until: 0 }
    }

    pub fn share(&self) -> Share {
        self.share
    }

    pub fn is_set(&self) -> bool {
        self.share.rate_bps != 0 || self.share.ops != 0
    }

    /// When its QPs may send again, ns; a time in the past means now.
    pub fn after(&self) -> u64 {
        self.bits_until.max(self.ops_until).saturating_sub(self.share.burst_us.saturating_mul(1000))
    }

    pub fn has_sent(&mut self, now: u64, begun: u64, bytes: u64) {
        let ns = |n: u64, ns: u128, rate: u64| match rate {
            0 => 0,
            rate => u64::try_from(u128::from(n) * ns / u128::from(rate)).unwrap_or(u64::MAX),
        };
        let bits_ns = ns(bytes, NS_PER_BYTE_AT_1_BPS, self.share.rate_bps);
        let ops_ns = ns(begun, SECOND_NS, self.share.ops);
        self.bits_until = self.bits_until.max(now).saturating_add(bits_ns);
        self.ops_until = self.ops_until.max(now).saturating_add(ops_ns);
    }
}

/// When a QP that is held back may send again.
#[derive(Clone, Copy, Default)]
pub(crate) struct Pace {
    /// Static rate of its address vector, or of the address vector of its last datagram, kilobits a second; 0 for none.
    pub path_kbps: u32,
    /// A rate limit: not before this time, ns.
    pub after: u64,
    /// Congestion, of a connection without answers: when all that was sent so far would have left at the permitted
    /// rate, ns.
    pub spread_until: u64,
    /// It waits for its time.
    pub waits: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sends as soon as the limits allow. Returns the number of operations of `bytes` in `ns`.
    fn sent_in(share: Share, bytes: u64, ns: u64) -> u64 {
        let (mut limit, mut sent) = (Limit::new(share), 0);
        let mut now = 1_000_000_000;
        let end = now + ns;
        loop {
            now = now.max(limit.after());
            if now >= end {
                return sent;
            }
            limit.has_sent(now, 1, bytes);
            sent += 1;
        }
    }

    #[test]
    fn limits_hold_with_a_burst() {
        let share = Share { rate_bps: 8_000_000_000, burst_us: 1000, ..Share::default() };
        // 1 GB a second for 10 ms, and 1 ms ahead.
        assert!((2685..=2687).contains(&sent_in(share, 4096, 10_000_000)));
        let share = Share { ops: 1_000_000, burst_us: 0, ..Share::default() };
        assert!((10_000..=10_001).contains(&sent_in(share, 4096, 10_000_000)));
        let both = Share { rate_bps: 8_000_000_000, ops: 100_000, burst_us: 0, ..Share::default() };
        assert!((1000..=1001).contains(&sent_in(both, 4096, 10_000_000)));
        // The slowest rate and the longest message end in no overflow.
        assert_eq!(sent_in(Share { rate_bps: 1, ..Share::default() }, 1 << 31, 10_000_000), 1);
    }
}
