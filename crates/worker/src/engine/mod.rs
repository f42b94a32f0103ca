//! The engine of a worker: its RNIC, the pollers that run it, the port, and the delivery of events.
//!
//! [`Pollers`] are threads that run the RNIC while there is work, and sleep while there is none: `policy` decides which
//! one runs when and on which core, `poller` has the steps of one round, `sleepers` the places where they sleep. A
//! round uses [`EventDelivery`] and [`PortIo`]. [`Engine`] is what the control thread and the switch use of all of
//! them.
//!
//! The RNIC is under a lock that is held only briefly. Long copies are jobs, which a poller runs after it has released
//! the RNIC; the system calls of the network happen there, too, and the port has a lock of its own. A thread that needs
//! both locks takes the port's first.

mod delivery;
mod policy;
mod poller;
mod pollers;
mod port_io;
mod sleepers;
mod watcher;

use std::io;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use unirdma_device::{BackgroundLookup, SharedRnic, now_ns};
use unirdma_ipc::config::EngineConfig;
use unirdma_rnic::{Arrival, SessionId, VrnicId};

pub(crate) use self::delivery::EventDelivery;
use self::poller::SCRATCH_BYTES;
pub(crate) use self::pollers::Pollers;
pub(crate) use self::port_io::PortIo;
pub(crate) use self::sleepers::timespec;
pub(crate) use self::watcher::watch;
use crate::background::Background;
use crate::liveness::Liveness;
use crate::port::Port;

/// Most rounds of the RNIC that a command waits for, so that sends posted before it are executed first. A round
/// executes about 12 datagrams. If many vRNICs have work, or the network accepts no packets, the remaining sends are
/// lost.
const CATCH_UP_ROUNDS: u32 = 256;
/// Time that a command waits for a job that a poller runs, before it checks again.
const POLLER_HAS_IT: std::time::Duration = std::time::Duration::from_micros(20);

/// The RNIC and the threads that run it.
pub(crate) struct Engine {
    /// The RNIC.
    pub rnic: Arc<SharedRnic>,
    pollers: Arc<Pollers>,
    /// Runs the background lookups that commands of sessions wait for.
    background: Arc<Background>,
}

impl Engine {
    /// Starts the pollers. `port` leads to other hosts.
    ///
    /// # Errors
    /// Errors of epoll, eventfd and thread creation.
    pub fn start(c: &EngineConfig, port: Option<Box<dyn Port>>) -> io::Result<Arc<Self>> {
        let pollers = Pollers::start(c, port)?;
        let p = pollers.clone();
        let background = Background::new(Box::new(move |session| p.delivery.release(session)));
        Ok(Arc::new(Engine { rnic: pollers.rnic.clone(), pollers, background }))
    }

    /// Ends the pollers.
    pub fn stop(&self) {
        self.pollers.stop();
    }

    /// The pollers, which are woken by kicks.
    pub fn pollers(&self) -> &Arc<Pollers> {
        &self.pollers
    }

    /// Where the RNIC's events go.
    pub fn delivery(&self) -> &EventDelivery {
        &self.pollers.delivery
    }

    /// The way to other hosts.
    pub fn port(&self) -> Option<&PortIo> {
        self.pollers.port.as_ref()
    }

    /// What the watcher knows of the worker's threads.
    pub fn liveness(&self) -> &Liveness {
        &self.pollers.liveness
    }

    /// The present time, as [`now_ns`].
    pub fn now(&self) -> u64 {
        now_ns()
    }

    /// True if control work of a vRNIC delays others: both need the RNIC, and another vRNIC of this worker has work or
    /// has just had some.
    pub fn delays_others(&self, vrnic: VrnicId) -> bool {
        self.rnic.lock().has_work_for_others(Some(vrnic))
    }

    /// True if the RNIC has dead objects to free: [`Engine::after_command`] must be called soon, and repeatedly.
    pub fn has_dead(&self) -> bool {
        self.pollers.has_dead()
    }

    /// See [`Pollers::after_command`].
    pub fn after_command(&self) {
        self.pollers.after_command();
    }

    /// Adds sockets to the port, by which packets to IP multicast groups arrive.
    pub fn join(&self, sockets: Vec<(IpAddr, OwnedFd)>) {
        if let Some(port) = self.port() {
            // For descriptors that are watched already, this fails.
            port.join(sockets, |fd| _ = self.pollers.watch_port(fd));
        }
    }

    /// Handles a datagram from another host, or from another group whose number is `source`.
    pub fn datagram(&self, from: IpAddr, group: u32, source: Option<u32>, packet: &[u8]) {
        let now = self.now();
        self.rnic.lock().handle_packet(now, &Arrival { source, ..Arrival::inside(from, group) }, packet);
        self.after_command();
    }
}

impl unirdma_device::Pollers for Engine {
    fn settle(&self) {
        self.after_command();
        self.delivery().settle();
    }

    fn catch_up(&self, s: SessionId, qpn: Option<u32>) {
        let mut scratch = Vec::new();
        for _ in 0..CATCH_UP_ROUNDS {
            let job = {
                let mut r = self.rnic.lock();
                if !r.is_behind(now_ns(), s, qpn) {
                    return;
                }
                let now = r.since_ns();
                r.poll_by(now, now_ns);
                r.take_brief_job()
            };
            match job {
                Some(mut job) => {
                    scratch.resize(SCRATCH_BYTES, 0);
                    job.run(&mut scratch, now_ns);
                    self.rnic.lock().end_job(job);
                }
                // A poller may be running the job.
                None => std::thread::sleep(POLLER_HAS_IT),
            }
        }
    }

    fn run_in_background(&self, vrnic: VrnicId, s: SessionId, lookup: BackgroundLookup) {
        self.background.take(vrnic, s, lookup);
    }
}

#[cfg(test)]
mod tests;
