//! The control centre as a host sees it: [`identity`] is who this host is to it, [`dial`] reaches it, `talk` speaks with it on a thread of its
//! own, and [`kept`] is what it has said, on disk. What is to be done on the host for that, the supervisor does (`supervisor::fleet`);
//! [`neighbours`] makes of the centre's peers what a [`crate::source`] says.
//!
//! Nothing here is on the way of a packet. While the centre is away everything goes on, and a host that is started meanwhile does what was kept.

mod dial;
mod identity;
mod kept;
mod neighbours;
mod talk;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;
use unirdma_device::lock;
use unirdma_fleet::agent::Status;
use unirdma_fleet::v1;

pub(crate) use identity::Identity;
pub use identity::default_state;
pub(crate) use neighbours::Neighbours;
pub(crate) use talk::start;

/// How long the centre may take to answer what an administrator of this host asks.
const PATIENCE: Duration = Duration::from_secs(20);
/// A clock that is off by more than this is a problem.
const CLOCKS_MS: i64 = 5_000;

/// Which fleet this host is of.
#[derive(Clone, Debug)]
pub struct CentreConfig {
    /// As in `https://192.168.7.100:7471`; `http` is for this machine only. Several centres of the fleet have commas between them.
    pub url: String,
    /// What lets it join, the first time.
    pub token: Option<String>,
    /// Its name in the fleet; `None`: that of the machine.
    pub name: Option<String>,
    /// The directory where it keeps its key, its certificate and what the centre has said.
    pub state: PathBuf,
}

/// The control centre, for people.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
#[allow(missing_docs)]
pub struct CentreInfo {
    pub url: String,
    /// This host's name in the fleet.
    pub host: String,
    pub connected: bool,
    /// For how many seconds it is, or is not.
    pub seconds: u64,
    /// Why it is not.
    pub why: String,
    /// The revision in force, and the number of the centre's state that it counts in.
    pub revision: u64,
    pub fleet: String,
    /// This host's clock minus the centre's, if the centre has said its own.
    pub clock_ms: Option<i64>,
    /// What is not as the centre says, a line each.
    pub problems: Vec<String>,
}

/// What others than the thread that speaks with the centre know.
#[derive(Default)]
struct Shared {
    status: Status,
    clock_ms: Option<i64>,
    /// What could not be written.
    disk: Option<String>,
    /// The centre's vRNICs of this host.
    vrnics: BTreeMap<String, v1::Vrnic>,
}

/// Tells whoever has asked what became of it.
type Answerer = std::sync::mpsc::SyncSender<Result<Option<v1::Vrnic>, String>>;

/// What the thread is told by others.
enum Order {
    Ask(Box<v1::ask::Change>, Answerer),
    /// A vRNIC that the centre does not know was removed.
    Removed(String),
    Stop,
}

/// The thread that speaks with the centre.
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

    /// What the centre says of a vRNIC of this host.
    pub fn vrnic(&self, name: &str) -> Option<v1::Vrnic> {
        lock(&self.shared).vrnics.get(name).cloned()
    }

    /// Asks for a change, and waits until it is in force here.
    ///
    /// # Errors
    /// One line: what the centre says, or that it is away.
    pub fn ask(&self, change: v1::ask::Change) -> Result<Option<v1::Vrnic>, String> {
        let (answerer, answer) = std::sync::mpsc::sync_channel(1);
        let gone = || "the thread that speaks with the control centre has ended".to_string();
        self.orders.send(Order::Ask(Box::new(change), answerer)).map_err(|_| gone())?;
        match answer.recv_timeout(PATIENCE) {
            Ok(answer) => answer,
            Err(std::sync::mpsc::RecvTimeoutError::Disconnected) => Err(gone()),
            Err(std::sync::mpsc::RecvTimeoutError::Timeout) => Err(format!(
                "the control centre has not answered for {} s; `unirdma vrnic ls` shows whether it was done",
                PATIENCE.as_secs()
            )),
        }
    }

    /// A vRNIC that the centre does not know was removed.
    pub fn removed(&self, name: &str) {
        let _ = self.orders.send(Order::Removed(name.into()));
    }

    /// What there is to know.
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
