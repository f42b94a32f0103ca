//! Metrics of this host for Prometheus: `unirdma host --metrics ADDR:PORT`.
//!
//! Counters are kept by the workers and read all together, so there is no registry of counters here. A table
//! ([`table`]) assigns names to figures, and [`text`] writes the format. [`http`] answers scrapers. A page is at most a
//! second old. It is made once in that time, regardless of the number of scrapers.
//!
//! Label values are groups, vRNICs and fixed words, so the number of series is proportional to the number of vRNICs and
//! groups, up to a limit of vRNICs.

mod http;
mod table;
mod text;

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use hyper::body::Bytes;
use unirdma_device::lock;

use crate::supervisor::Supervisor;
use crate::supervisor::stats::Reader;

/// Time for which one page is served to all readers.
const FRESH: Duration = Duration::from_secs(1);

/// Where metrics are served, and for how many vRNICs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MetricsConfig {
    /// Where scrapers connect.
    pub address: SocketAddr,
    /// Most vRNICs with their own series, at most [`MAX_METRICS_VRNICS`]. The sums of groups include all vRNICs.
    pub most_vrnics: usize,
}

/// Default number of vRNICs with their own series.
pub const DEFAULT_METRICS_VRNICS: usize = 10_000;
/// Largest number of vRNICs with their own series.
pub const MAX_METRICS_VRNICS: usize = 20_000;

/// The page as it was made last.
struct Page {
    supervisor: Arc<Supervisor>,
    reader: Arc<Reader>,
    most: usize,
    kept: Mutex<Option<(Instant, Bytes)>>,
}

impl http::Source for Page {
    fn page(&self) -> Bytes {
        // Scrapers that come meanwhile wait for the lock, and get the same page.
        let mut kept = lock(&self.kept);
        if let Some((_, page)) = kept.as_ref().filter(|k| k.0.elapsed() < FRESH) {
            return page.clone();
        }
        let figures = self.supervisor.figures(&self.reader, self.most);
        let page: Bytes = text::page(&figures, self.most).into();
        *kept = Some((Instant::now(), page.clone()));
        page
    }

    fn forget(&self) -> bool {
        // The thread that accepts connections must not wait while a page is made.
        let Ok(mut kept) = self.kept.try_lock() else { return false };
        kept.take_if(|k| k.0.elapsed() >= FRESH);
        kept.is_none()
    }
}

/// Opens the address, before the supervisor gives up the privilege to do so.
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
