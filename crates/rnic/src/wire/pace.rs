//! How fast an unreliable connection may send: nobody answers, so only congestion notifications tell (DCQCN, SIGCOMM 2015).

/// Rates are bytes in a millisecond. A connection begins at this one, and a quarter more in each period, until it is told.
const START_RATE: u64 = 256 << 10;
const MIN_RATE: u64 = 10 << 10;
/// No connection is faster.
const MAX_RATE: u64 = 20 << 20;
/// After a notification what the rate aims at grows by this in each period.
const STEP: u64 = 40 << 10;
/// Time between two raises, ns.
const PERIOD_NS: u64 = 300_000;
/// Bytes that may go at once.
const BURST: u64 = 256 << 10;

/// The pace of one connection.
pub(super) struct Pace {
    rate: u64,
    target: u64,
    /// It was never told.
    fresh: bool,
    /// When what was sent would have gone at this rate, ns.
    drained: u64,
    raised: u64,
}

impl Default for Pace {
    fn default() -> Self {
        Pace { rate: START_RATE, target: START_RATE, fresh: true, drained: 0, raised: 0 }
    }
}

impl Pace {
    /// When the next packet may go, if not now.
    pub fn wait(&mut self, now: u64) -> Option<u64> {
        let periods = (now.saturating_sub(self.raised) / PERIOD_NS).min(1000);
        self.raised = if periods == 1000 { now } else { self.raised + periods * PERIOD_NS };
        for _ in 0..periods {
            if self.fresh {
                self.rate += self.rate / 4;
            } else {
                if self.rate + STEP >= self.target {
                    self.target += STEP;
                }
                self.rate = (self.rate + self.target) / 2;
            }
            self.rate = self.rate.min(MAX_RATE);
            self.target = self.target.min(MAX_RATE);
        }
        let early = BURST * 1_000_000 / self.rate;
        Some(self.drained.saturating_sub(early)).filter(|&t| t > now)
    }

    /// A packet with `bytes` went. What was not sent in time is not made up for.
    pub fn sent(&mut self, now: u64, bytes: u64) {
        // A quiet connection keeps its rate, but does not raise it.
        if self.drained < now {
            self.raised = self.raised.max(now.saturating_sub(PERIOD_NS));
        }
        self.drained = self.drained.max(now) + bytes * 1_000_000 / self.rate;
    }

    /// The network is congested; `alpha` 1024ths of the packets are marked.
    pub fn notified(&mut self, now: u64, alpha: u64) {
        self.fresh = false;
        self.target = self.rate;
        self.rate = (self.rate - self.rate * alpha / 2048).max(MIN_RATE);
        self.raised = now;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sends as fast as it may from `now` on for `time`; bytes.
    fn send(p: &mut Pace, mut now: u64, time: u64) -> u64 {
        let (end, mut bytes) = (now + time, 0);
        while now < end {
            match p.wait(now) {
                Some(t) => now = t,
                None => {
                    p.sent(now, 4096);
                    bytes += 4096;
                    now += 100;
                }
            }
        }
        bytes
    }

    #[test]
    fn the_pace_rises_falls_with_notifications_and_recovers() {
        let mut p = Pace::default();
        let first = send(&mut p, 0, 1_000_000);
        assert!((START_RATE..4 * START_RATE).contains(&first), "{first}");
        send(&mut p, 1_000_000, 9_000_000);
        let fast = send(&mut p, 10_000_000, 1_000_000);
        assert!(fast > 20 * START_RATE, "{fast}");
        p.notified(11_000_000, 1024);
        p.notified(11_000_000, 1024);
        let slow = send(&mut p, 11_000_000, 250_000) * 4;
        assert!(slow < fast / 2, "{slow} after {fast}");
        let later = send(&mut p, 11_250_000, 20_000_000) / 20;
        assert!(later > slow, "{later} after {slow}");
    }
}
