//! Two connected ends on one RNIC.

use unirdma_abi as abi;
use unirdma_formats::{QpType, attr_mask as m};
use unirdma_rnic::{Output, Rnic};

use crate::{End, attrs, ip};

/// Two ends with an RC QP each, connected, on one RNIC.
pub struct Pair {
    /// The RNIC of both.
    pub rnic: Rnic,
    /// The virtual clock, in nanoseconds.
    pub now: u64,
    /// The end with the address `ip(1)`.
    pub a: End,
    /// The end with the address `ip(2)`.
    pub b: End,
    /// All outputs of the RNIC so far.
    pub outputs: Vec<Output>,
}

/// Polls an RNIC and does the jobs that it makes. True if there was anything to do.
pub fn poll(rnic: &mut Rnic, now: u64) -> bool {
    let mut found = rnic.poll(now);
    while let Some(mut job) = rnic.take_job() {
        job.run(&mut [0; 4096], || 0);
        rnic.end_job(job);
        found = true;
    }
    found
}

impl Pair {
    /// Makes both ends and connects them.
    #[expect(clippy::new_without_default, reason = "this makes an RNIC, which a default value should not")]
    pub fn new() -> Pair {
        let mut rnic = Rnic::new(1, 0);
        let a = End::new(&mut rnic, 0, 1);
        let b = End::new(&mut rnic, 0, 2);
        Pair::connected(rnic, a, b, 2)
    }

    /// The same with both ends on one vRNIC, which has the address `ip(1)`.
    pub fn of_one_vrnic() -> Pair {
        let mut rnic = Rnic::new(1, 0);
        let a = End::new(&mut rnic, 0, 1);
        let b = End::of_vrnic(&mut rnic, a.vrnic, 64, QpType::Rc);
        Pair::connected(rnic, a, b, 1)
    }

    /// Connects end a, with the address `ip(1)`, and end b, with `ip(ip_b)`.
    fn connected(rnic: Rnic, a: End, b: End, ip_b: u8) -> Pair {
        let mut p = Pair { rnic, now: 0, a, b, outputs: Vec::new() };
        for (mask, attr) in attrs(&p.b, ip(ip_b)) {
            p.rnic.modify_qp(p.a.session, p.a.qpn, mask, &attr).unwrap();
        }
        for (mask, attr) in attrs(&p.a, ip(1)) {
            p.rnic.modify_qp(p.b.session, p.b.qpn, mask, &attr).unwrap();
        }
        p
    }

    /// Runs until nothing happens any more at this time.
    pub fn settle(&mut self) {
        while poll(&mut self.rnic, self.now) {}
        self.rnic.drain_outputs(&mut self.outputs);
    }

    /// Settles, then lets time pass up to `limit` nanoseconds, from timer to timer.
    pub fn run(&mut self, limit: u64) {
        let end = self.now + limit;
        self.settle();
        while let Some(t) = self.rnic.next_timeout().filter(|&t| t <= end) {
            self.now = self.now.max(t);
            self.settle();
        }
        self.now = end;
        self.settle();
    }

    /// Modifies the QP of end a or b.
    pub fn modify(&mut self, of_a: bool, mask: u32, attr: abi::QpAttr) {
        let e = if of_a { &self.a } else { &self.b };
        self.rnic.modify_qp(e.session, e.qpn, mask, &attr).unwrap();
    }

    /// Resets one QP and connects it to the other again, with its attributes changed.
    pub fn reconnect(&mut self, of_a: bool, change: impl Fn(abi::QpAttr) -> abi::QpAttr) {
        self.modify(of_a, m::STATE, abi::QpAttr::default());
        let steps = if of_a { attrs(&self.b, ip(2)) } else { attrs(&self.a, ip(1)) };
        let e = if of_a { &mut self.a } else { &mut self.b };
        (e.sq_prod, e.rq_prod) = (0, 0);
        e.rings.set_sq_prod(0);
        e.rings.set_rq_prod(0);
        for (mask, attr) in steps {
            self.modify(of_a, mask, change(attr));
        }
    }

    /// State of the QP of end a or b, as QUERY_QP returns it.
    pub fn state(&self, of_a: bool) -> u8 {
        let e = if of_a { &self.a } else { &self.b };
        self.rnic.query_qp(e.session, e.qpn).unwrap().qp_state
    }
}
