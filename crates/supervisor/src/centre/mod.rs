//! A host's side of the control centre. [`identity`] is this host's identity, [`dial`] connects to the centre, `talk`
//! exchanges messages with it on a separate thread, and [`update_log`] stores its updates on disk. The supervisor does
//! the work that follows from the updates (`supervisor::centre_orders`); [`centre_peers`] turns the centre's peers into
//! changes of a
//! [`crate::peer_source`].
//!
//! Nothing here is on the path of a packet. While the centre is unreachable, everything goes on, and a restarted host
//! begins with the updates on disk.

mod centre_peers;
mod dial;
mod identity;
mod talk;
#[cfg(test)]
mod tests;
mod update_log;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use tokio::sync::mpsc;
use unirdma_device::lock;
use unirdma_fleet::agent::{self, Status};
use unirdma_fleet::v1;

pub(crate) use centre_peers::Neighbours;
pub(crate) use identity::Identity;
pub(crate) use talk::start;

use crate::centre_config::CentreInfo;

/// Time limit for the centre's answer to a request of this host's administrator.
const PATIENCE: Duration = Duration::from_secs(20);
/// Clocks that differ by more than this are reported as a problem.
const CLOCKS_MS: i64 = 5_000;

/// State that the thread shares with other threads.
#[derive(Default)]
struct Shared {
    status: Status,
    clock_ms: Option<i64>,
    /// Why the last update could not be written to disk.
    disk: Option<String>,
    /// The centre's vRNICs of this host.
    vrnics: BTreeMap<String, v1::Vrnic>,
}

/// Channel for the answer to a request.
type Answerer = std::sync::mpsc::SyncSender<agent::Answer>;

/// Why the centre does not make a change.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AskError {
    #[error("the thread that speaks with the control centre has ended")]
    Ended,
    #[error(
        "the control centre has not answered for {} s; `unirdma vrnic ls` shows whether it was done",
        PATIENCE.as_secs()
    )]
    Timeout,
    #[error(transparent)]
    Refused(#[from] agent::AskError),
}

/// A message to the thread.
enum Order {
    Ask(Box<v1::ask::Change>, Answerer),
    /// A vRNIC unknown to the centre was removed.
    Removed(String),
    Stop,
}

/// The thread that talks to the centre.
pub(crate) struct Centre {
    url: String,
    host: String,
    orders: mpsc::UnboundedSender<Order>,
    shared: Arc<Mutex<Shared>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Centre {
    /// This host's name in the fleet.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// The centre's description of a vRNIC of this host.
    pub fn vrnic(&self, name: &str) -> Option<v1::Vrnic> {
        lock(&self.shared).vrnics.get(name).cloned()
    }

    /// Asks the centre for a change, and waits until it is in force here.
    ///
    /// # Errors
    /// The centre refuses, or is unreachable.
    pub fn ask(&self, change: v1::ask::Change) -> Result<Option<v1::Vrnic>, AskError> {
        let (answerer, answer) = std::sync::mpsc::sync_channel(1);
        self.orders.send(Order::Ask(Box::new(change), answerer)).map_err(|_| AskError::Ended)?;
        match answer.recv_timeout(PATIENCE) {
            Ok(answer) => Ok(answer?),
            Err(std::sync::mpsc::RecvTimeoutError::Disconnected) => Err(AskError::Ended),
            Err(std::sync::mpsc::RecvTimeoutError::Timeout) => Err(AskError::Timeout),
        }
    }

    /// Reports the removal of a vRNIC that the centre does not know.
    pub fn removed(&self, name: &str) {
        let _ = self.orders.send(Order::Removed(name.into()));
    }

    /// The control centre's state.
    pub fn info(&self) -> CentreInfo {
        let s = lock(&self.shared);
        let mut problems = s.status.problems.clone();
        problems.extend(s.disk.clone());
        if let Some(ms) = s.clock_ms.filter(|ms| ms.abs() > CLOCKS_MS) {
            let (by, how) = (ms.abs() / 1000, if ms > 0 { "ahead of" } else { "behind" });
            problems.push(format!("this host's clock is {by} s {how} the control centre's; set one of them right"));
        }
        CentreInfo {
            url: self.url.clone(),
            host: self.host.clone(),
            connected: s.status.connected,
            seconds: s.status.for_ms / 1000,
            why: s.status.why.clone(),
            revision: s.status.revision,
            fleet: s.status.fleet.clone(),
            clock_ms: s.clock_ms,
            problems,
        }
    }

    /// Ends the thread.
    pub fn stop(&self) {
        let _ = self.orders.send(Order::Stop);
        if let Some(t) = lock(&self.thread).take() {
            let _ = t.join();
        }
    }
}
