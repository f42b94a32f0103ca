//! Metrics of this host for Prometheus: `unirdma host --metrics ADDR:PORT`.
//!
//! What is counted lies in the workers and is read as a whole, so there is no registry of counters here: a table ([`table`]) says which
//! figure has which name, and [`text`] writes the format. [`http`] answers scrapers. All that is read is at most a second old and is
//! read once in that time, however many ask.
//!
//! Labels are groups, vRNICs and fixed words, so there are as many series as vRNICs and groups need, up to a limit of vRNICs.

mod http;
mod table;
mod text;

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use unirdma_device::lock;

use crate::supervisor::Supervisor;
use crate::supervisor::figures::Reader;

/// How long what was read is given to all who ask.
const FRESH: Duration = Duration::from_secs(1);

/// Where metrics are served, and of how many vRNICs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MetricsConfig {
    /// Where scrapers connect.
    pub address: SocketAddr,
    /// Most vRNICs that have series of their own, [`MAX_METRICS_VRNICS`] at most. All of them are in the sums of their groups.
    pub most_vrnics: usize,
}

/// vRNICs with series of their own unless the operator says otherwise.
pub const DEFAULT_METRICS_VRNICS: usize = 10_000;
/// Most of them.
pub const MAX_METRICS_VRNICS: usize = 20_000;

/// The page, as it was read last.
struct Page {
    supervisor: Arc<Supervisor>,
    reader: Arc<Reader>,
    most: usize,
    kept: Mutex<Option<(Instant, Arc<str>)>>,
}

impl http::Source for Page {
    fn page(&self) -> Arc<str> {
        // Who comes meanwhile waits, and gets the same.
        let mut kept = lock(&self.kept);
        if let Some((_, page)) = kept.as_ref().filter(|k| k.0.elapsed() < FRESH) {
            return page.clone();
        }
        let figures = self.supervisor.figures(&self.reader, self.most);
        let page: Arc<str> = text::page(&figures, self.most).into();
        *kept = Some((Instant::now(), page.clone()));
        page
    }

    fn forget(&self) -> bool {
        // Who accepts connections must not wait until a page is made.
        let Ok(mut kept) = self.kept.try_lock() else { return false };
        kept.take_if(|k| k.0.elapsed() >= FRESH);
        kept.is_none()
    }
}

/// Opens the address, before the supervisor gives up the right to.
///
/// # Errors
/// One line that says what to do.
pub(crate) fn listen(config: &MetricsConfig) -> io::Result<TcpListener> {
    TcpListener::bind(config.address).map_err(|e| {
        let text = format!("cannot serve metrics at {}: {e}; choose another --metrics", config.address);
        io::Error::new(e.kind(), text)
    })
}

/// Serves metrics until this is dropped.
pub(crate) struct Metrics {
    _server: http::Server,
}

impl Metrics {
    /// # Errors
    /// There is no thread for it.
    pub fn start(listener: TcpListener, config: &MetricsConfig, supervisor: Arc<Supervisor>) -> io::Result<Self> {
        let most = config.most_vrnics.min(MAX_METRICS_VRNICS);
        let page = Page { supervisor, reader: Arc::default(), most, kept: Mutex::default() };
        Ok(Metrics { _server: http::Server::start(listener, Arc::new(page))? })
    }
}
