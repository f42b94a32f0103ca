//! Delivery of captured packets from the RNIC to the client that has requested the capture. A separate thread does
//! this, so that pollers do not spend time on it.

use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};

use rustix::net::SendFlags;
use unirdma_confine::{self as confine, Kind};
use unirdma_device::{SharedRnic, lock, now_ns};
use unirdma_rnic::{Capture, Captured, VrnicId};

/// Shortest interval at which captured packets are taken.
const LOOK: Duration = Duration::from_millis(1);
/// The thread rests this many times as long as it has worked, so that a capture of very many packets leaves the cores
/// to others.
const REST: u32 = 2;
/// Attempts to take the RNIC without waiting, before the thread waits for it.
const MOST_LOOKS: u32 = 8;
/// Nice value of the thread: programs and pollers on its core get most of the time.
const NICE: i32 = 10;

/// The capture of a worker, if one runs.
pub(crate) struct CaptureDelivery {
    rnic: Arc<SharedRnic>,
    sink: Mutex<Option<Sink>>,
}

/// Why a capture cannot be started or ended.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CaptureError {
    #[error("another capture runs already; end it first")]
    Another,
    #[error("no such capture runs")]
    None,
    #[error("cannot start a thread: {0}")]
    Thread(std::io::Error),
}

/// Destination of captured packets.
struct Sink {
    /// The administration connection that has requested the capture.
    id: u64,
    to: OwnedFd,
    lost: u64,
}

impl Sink {
    /// Sends packets to the client, each as a pcap record.
    fn send(&mut self, captured: &Captured) {
        captured.records(|record| {
            // A reader that is too slow loses packets.
            let sent = rustix::net::send(&self.to, record, SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
            self.lost += u64::from(sent.is_err());
        });
    }
}

impl CaptureDelivery {
    /// Delivers what this RNIC captures. No capture runs yet.
    pub fn new(rnic: Arc<SharedRnic>) -> Arc<Self> {
        Arc::new(CaptureDelivery { rnic, sink: Mutex::default() })
    }

    /// Starts a capture, whose packets are sent to `to`, for administration connection `id`.
    ///
    /// # Errors
    /// Another capture runs, or no thread can be started.
    pub fn start(
        self: &Arc<Self>,
        id: u64,
        to: OwnedFd,
        vrnic: Option<VrnicId>,
        snap: u32,
        hosts: Vec<IpAddr>,
    ) -> Result<(), CaptureError> {
        let mut sink = lock(&self.sink);
        if sink.is_some() {
            return Err(CaptureError::Another);
        }
        let me = self.clone();
        let thread = std::thread::Builder::new().name("capture".into()).spawn(move || {
            confine::thread(Kind::Capture);
            me.hand_over_all(id);
        });
        thread.map_err(CaptureError::Thread)?;
        *sink = Some(Sink { id, to, lost: 0 });
        let since_1970 = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let epoch_ns = (since_1970.as_nanos() as u64).saturating_sub(now_ns());
        self.rnic.lock().start_capture(Capture { vrnic, snap, epoch_ns, hosts });
        Ok(())
    }

    /// Ends the capture of administration connection `id`; returns the number of lost packets.
    ///
    /// # Errors
    /// It has none.
    pub fn stop(&self, id: u64) -> Result<u64, CaptureError> {
        let mut ended = lock(&self.sink).take_if(|s| s.id == id).ok_or(CaptureError::None)?;
        let mut rest = Captured::default();
        let lost = {
            let mut r = self.rnic.lock();
            r.take_captured(&mut rest);
            r.stop_capture()
        };
        ended.send(&rest);
        Ok(ended.lost + lost)
    }

    /// Ends the capture of any connection.
    pub fn end(&self) {
        let id = lock(&self.sink).as_ref().map(|s| s.id);
        let _ = id.map(|id| self.stop(id));
    }

    /// Takes captured packets from the RNIC repeatedly, until the capture of connection `id` ends.
    fn hand_over_all(&self, id: u64) {
        let _ = rustix::process::setpriority_process(Some(rustix::thread::gettid()), NICE);
        let (mut captured, mut looks) = (Captured::default(), 0);
        loop {
            let began = Instant::now();
            match lock(&self.sink).as_mut().filter(|s| s.id == id) {
                Some(sink) => {
                    looks += 1;
                    let free = if looks < MOST_LOOKS { self.rnic.try_lock() } else { Some(self.rnic.spin_lock()) };
                    if let Some(mut r) = free {
                        r.take_captured(&mut captured);
                        drop(r);
                        sink.send(&captured);
                        looks = 0;
                    }
                }
                None => return,
            }
            std::thread::sleep(LOOK.max(REST * began.elapsed()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
    use unirdma_rnic::{Rnic, Seed};

    #[test]
    fn a_capture_has_a_thread_until_it_ends() {
        let rnic = Arc::new(SharedRnic::new(Rnic::new(Seed::from(7), 1)));
        let capture = CaptureDelivery::new(rnic);
        let before = Arc::strong_count(&capture);
        let start = |id| {
            let (_, to) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
            capture.start(id, to, None, 64, Vec::new())
        };
        for _ in 0..2 {
            start(7).unwrap();
            assert!(start(8).is_err(), "one captures at a time");
            assert!(capture.stop(8).is_err(), "only who captures may end it");
            assert!(Arc::strong_count(&capture) > before);
            assert_eq!(capture.stop(7).unwrap(), 0);
        }
        while Arc::strong_count(&capture) > before {
            std::thread::sleep(LOOK);
        }
    }
}
