//! Packet pacing: a QP with a rate limit takes its next packet, or its next slice on this host, when what it sent before has had
//! its time (`IBV_QP_RATE_LIMIT` of `ibv_modify_qp(3)`, `ibv_modify_qp_rate_limit(3)`). Responses are not limited.

use std::cmp::Reverse;

use crate::objects::Qp;
use crate::rnic::Rnic;
use crate::slab::Handle;

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

impl Qp {
    /// It has a rate limit.
    pub fn is_paced(&self) -> bool {
        self.attr.rate_limit != 0
    }

    /// It may send now, as far as its rate limit goes.
    pub fn may_send(&self, now: u64) -> bool {
        !self.is_paced() || self.pace.after <= now
    }
}

impl Rnic {
    /// QP `h`, which may not send now, gets a turn when it may.
    pub(crate) fn wait_for_pace(&mut self, h: Handle<Qp>) {
        let Some(q) = self.qps.get_mut(h) else { return };
        if !std::mem::replace(&mut q.pace.listed, true) {
            self.paced.push(Reverse((q.pace.after, h)));
        }
    }

    /// QP `h`, which has a rate limit, has sent `bytes`.
    pub(crate) fn has_sent(&mut self, h: Handle<Qp>, bytes: u64) {
        let now = self.now;
        let Some(q) = self.qps.get_mut(h).filter(|q| q.is_paced()) else { return };
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
