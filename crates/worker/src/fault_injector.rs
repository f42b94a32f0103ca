//! A port that loses, doubles and reorders packets: a layer over another port, for tests.

use std::net::IpAddr;
use std::os::fd::{BorrowedFd, OwnedFd};

use unirdma_ipc::counters::PortCounters;
use unirdma_rnic::{Arrival, Rng, Tx};

use crate::port::Port;

/// Loses, doubles and delays incoming packets, each with the same probability.
pub(crate) struct FaultyPort {
    inner: Box<dyn Port>,
    percent: u64,
    rng: Rng,
    /// A packet that is delayed until another one has passed it.
    held: Option<(Arrival, Vec<u8>)>,
}

impl FaultyPort {
    /// `percent`: probability of each kind of fault; `seed` determines which packets have one.
    pub fn new(inner: Box<dyn Port>, percent: u64, seed: u64) -> Self {
        FaultyPort { inner, percent, rng: Rng::new(seed), held: None }
    }
}

impl Port for FaultyPort {
    fn send(&mut self, tx: &mut Tx) {
        self.inner.send(tx);
    }

    fn receive(&mut self, f: &mut dyn FnMut(Arrival, &[u8])) -> bool {
        let FaultyPort { inner, percent, rng, held } = self;
        let mut chance = || rng.next_u64() % 100 < *percent;
        inner.receive(&mut |arrival, bytes| {
            if chance() {
                return;
            }
            if held.is_none() && chance() {
                *held = Some((arrival, bytes.to_vec()));
                return;
            }
            f(arrival, bytes);
            if chance() {
                f(arrival, bytes);
            }
            if let Some((arrival, bytes)) = held.take() {
                f(arrival, &bytes);
            }
        })
    }

    fn join(&mut self, sockets: Vec<(IpAddr, OwnedFd)>) {
        self.inner.join(sockets);
    }

    fn leave_others(&mut self, groups: &[IpAddr]) {
        self.inner.leave_others(groups);
    }

    fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        self.inner.descriptors()
    }

    fn counters(&self) -> PortCounters {
        self.inner.counters()
    }
}
