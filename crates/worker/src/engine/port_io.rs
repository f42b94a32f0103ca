//! Input and output of the port to other hosts: when it is asked for packets, and the packets that wait to be sent.

use std::net::IpAddr;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};

use unirdma_device::{SharedRnic, lock};
use unirdma_ipc::counters::PortCounters;
use unirdma_rnic::Tx;

use crate::port::Port;

/// The port, which has a lock of its own, since its system calls happen without the RNIC.
pub(crate) struct PortIo {
    net: Mutex<Net>,
    /// The port is polled until this time, and once after it in case pollers had no turn in between, ns. 0: it is not
    /// polled, and its descriptors wake a poller.
    until_ns: AtomicU64,
    /// Time for which it is polled after a packet, ns.
    poll_ns: u64,
    /// IP multicast groups that the port should receive from; taken by [`PortIo::wanted_groups`].
    wanted_groups: Mutex<Option<Vec<IpAddr>>>,
}

/// What the port's lock protects.
pub(super) struct Net {
    port: Box<dyn Port>,
    /// Packets that were taken from the RNIC and are not sent yet.
    pub out: Tx,
    /// When the port was last asked for packets, ns.
    pub asked_ns: u64,
}

impl PortIo {
    /// A port that is polled for `poll_ns` after each packet.
    pub(super) fn new(port: Box<dyn Port>, poll_ns: u64) -> Self {
        PortIo {
            net: Mutex::new(Net { port, out: Tx::default(), asked_ns: 0 }),
            until_ns: AtomicU64::new(0),
            poll_ns,
            wanted_groups: Mutex::default(),
        }
    }

    /// Takes the port, if no other thread has it.
    pub(super) fn try_lock(&self) -> Option<MutexGuard<'_, Net>> {
        self.net.try_lock().ok()
    }

    #[cfg(test)]
    pub(super) fn lock(&self) -> MutexGuard<'_, Net> {
        lock(&self.net)
    }

    #[inline]
    pub(super) fn is_polled(&self) -> bool {
        self.until_ns.load(Ordering::Relaxed) != 0
    }

    /// Polls the port for a while.
    pub(super) fn poll(&self, now: u64) {
        self.until_ns.store(now + self.poll_ns, Ordering::Relaxed);
    }

    /// Hands incoming packets to the RNIC if the port is polled; true if there were any.
    pub(super) fn receive(&self, net: &mut Net, now: u64, rnic: &SharedRnic) -> bool {
        if !self.is_polled() {
            return false;
        }
        net.asked_ns = now;
        let any = net.port.receive(&mut |a, bytes| rnic.brief_lock().handle_packet(now, &a, bytes));
        if any {
            self.poll(now);
        } else if now >= self.until_ns.load(Ordering::Relaxed) {
            self.until_ns.store(0, Ordering::Relaxed);
        }
        any
    }

    /// Sends the packets that were taken from the RNIC, until the network accepts no more.
    pub(super) fn send(&self, net: &mut Net, now: u64) {
        if !net.out.packets().is_empty() {
            net.port.send(&mut net.out);
            self.poll(now);
        }
    }

    /// Sets the IP multicast groups that plain devices may send to. The port leaves all others.
    pub(super) fn want_groups(&self, groups: Vec<IpAddr>) {
        lock(&self.net).port.leave_others(&groups);
        *lock(&self.wanted_groups) = Some(groups);
    }

    /// The IP multicast groups that the port should receive from, if they have changed since the last call.
    pub fn wanted_groups(&self) -> Option<Vec<IpAddr>> {
        lock(&self.wanted_groups).take()
    }

    /// Adds sockets to the port, by which packets to IP multicast groups arrive. `watch` gets all descriptors of the
    /// port.
    pub(super) fn join(&self, sockets: Vec<(IpAddr, OwnedFd)>, watch: impl FnMut(BorrowedFd<'_>)) {
        let mut net = lock(&self.net);
        net.port.join(sockets);
        net.port.descriptors().into_iter().for_each(watch);
    }

    /// Counters of the port.
    pub fn counters(&self) -> PortCounters {
        lock(&self.net).port.counters()
    }
}
