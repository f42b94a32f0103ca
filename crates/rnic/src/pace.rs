//! Packet pacing: a QP with a rate limit takes its next packet, or its next slice on this host, when what it sent before has had
//! its time (`IBV_QP_RATE_LIMIT` of `ibv_modify_qp(3)`, `ibv_modify_qp_rate_limit(3)`). Responses are not limited.

use std::cmp::Reverse;

use crate::rnic::Rnic;

/// Nanoseconds that a kilobit takes at 1 kilobit a second, over the bits of a byte.
const NS_PER_BYTE_AT_1_KBPS: u64 = 8_000_000;

/// When a QP with a rate limit may send.
#[derive(Clone, Copy, Default)]
pub(crate) struct Pace {
    /// Not before this time, ns.
    after: u64,
    /// It stands among those that wait for their time.
    listed: bool,
}

impl Rnic {
    /// True if QP `h` may send now; if not, it gets a turn when it may.
    pub(crate) fn may_send(&mut self, h: u32) -> bool {
        let now = self.now;
        let Some(q) = self.qps.get_mut(h) else { return false };
        if q.attr.rate_limit == 0 || q.pace.after <= now {
            return true;
        }
        if !std::mem::replace(&mut q.pace.listed, true) {
            self.paced.push(Reverse((q.pace.after, h)));
        }
        false
    }

    /// QP `h` has sent `bytes`.
    pub(crate) fn has_sent(&mut self, h: u32, bytes: u64) {
        let now = self.now;
        let Some(q) = self.qps.get_mut(h).filter(|q| q.attr.rate_limit != 0) else { return };
        let ns = bytes.saturating_mul(NS_PER_BYTE_AT_1_KBPS) / u64::from(q.attr.rate_limit);
        q.pace.after = q.pace.after.max(now).saturating_add(ns);
    }

    /// QPs whose time has come get their turns; true if there were any.
    pub(crate) fn poll_paced(&mut self) -> bool {
        let mut found = false;
        while let Some(&Reverse((at, h))) = self.paced.peek()
            && at <= self.now
        {
            self.paced.pop();
            if let Some(q) = self.qps.get_mut(h) {
                q.pace.listed = false;
                self.make_runnable(h);
                found = true;
            }
        }
        found
    }
}
