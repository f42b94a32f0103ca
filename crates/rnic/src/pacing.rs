//! Holds QPs back: QPs with a rate limit, QPs of a vRNIC with limits, and connections without answers whose network is
//! congested.

use crate::core::Core;
use crate::objects::Qp;
use crate::sched::Due;
use crate::slab::Handle;

/// Nanoseconds that a kilobit takes at 1 kilobit a second, over the bits of a byte.
const NS_PER_BYTE_AT_1_KBPS: u64 = 8_000_000;
/// A connection without answers may send its congestion window in this time, ns. For the widest window that is more
/// than a port can send.
const SPREAD_NS: u64 = 200_000;
/// A connection that was too fast waits for this much longer than it must, ns, and then sends some packets at once.
const SPREAD_REST_NS: u64 = SPREAD_NS / 4;

impl Qp {
    /// It has a rate limit.
    fn is_paced(&self) -> bool {
        self.attr.rate_limit | self.pace.path_kbps != 0
    }

    /// Its rate limit, kilobits a second: the lower one if it has two.
    fn most_kbps(&self) -> Option<u32> {
        [self.attr.rate_limit, self.pace.path_kbps].into_iter().filter(|&kbps| kbps != 0).min()
    }
}

impl Core {
    /// True if QP `h` may send now. Otherwise, if a rate limit holds it back, it gets a turn when it may send again.
    pub(crate) fn may_send(&mut self, h: Handle<Qp>) -> bool {
        let Some(q) = self.objects.qps.get_mut(h) else { return false };
        let Some(v) = self.objects.vrnics.get(q.vrnic.0) else { return false };
        let own = if q.is_paced() { q.pace.after } else { 0 };
        let spread = if q.pace.spread_until > self.now { q.pace.spread_until + SPREAD_REST_NS } else { 0 };
        let own = own.max(spread);
        let after = if v.limit.is_set() { own.max(v.limit.after()) } else { own };
        if after <= self.now {
            return true;
        }
        let vrnic = q.vrnic;
        if !std::mem::replace(&mut q.pace.waits, true) {
            self.arm(vrnic, after, Due::Pace(h));
        }
        false
    }

    /// True if QP `h` or its vRNIC has a rate limit.
    pub(crate) fn is_limited(&self, h: Handle<Qp>) -> bool {
        let vrnic = |q: &Qp| self.objects.vrnics.get(q.vrnic.0).is_some_and(|v| v.limit.is_set());
        self.objects.qps.get(h).is_some_and(|q| q.is_paced() || vrnic(q))
    }

    /// Counts `begun` new work requests and `bytes` sent bytes of QP `h` against its limits.
    pub(crate) fn has_sent(&mut self, h: Handle<Qp>, begun: u64, bytes: u64) {
        let now = self.now;
        let Some(q) = self.objects.qps.get_mut(h) else { return };
        if let Some(kbps) = q.most_kbps() {
            let ns = bytes.saturating_mul(NS_PER_BYTE_AT_1_KBPS) / u64::from(kbps);
            q.pace.after = q.pace.after.max(now).saturating_add(ns);
        }
        if let Some(v) = self.objects.vrnics.get_mut(q.vrnic.0).filter(|v| v.limit.is_set()) {
            v.limit.has_sent(now, begun, bytes);
        }
    }

    /// QP `h` has sent a packet. Answers that could slow the connection down do not exist, so congestion notifications
    /// do it: they narrow its `window`, which is the number of packets that it may send in [`SPREAD_NS`].
    pub(crate) fn spread(&mut self, h: Handle<Qp>, window: u32) {
        let earliest = self.now.saturating_sub(SPREAD_NS);
        if let Some(q) = self.objects.qps.get_mut(h) {
            q.pace.spread_until = q.pace.spread_until.max(earliest) + SPREAD_NS / u64::from(window.max(1));
        }
    }

    /// QP `h` has waited until its time.
    pub(crate) fn end_pace(&mut self, h: Handle<Qp>) {
        if let Some(q) = self.objects.qps.get_mut(h) {
            q.pace.waits = false;
            self.make_runnable(h);
        }
    }
}
