//! Metrics of a centre for Prometheus: `unirdma control run --metrics ADDR:PORT`. Numbers of objects are taken from the
//! state when a page is read.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use axum::Router;
use axum::extract::State;
use axum::http::header;
use axum::routing::get;
use unirdma_fleet::Actor;
use unirdma_metrics::{CONTENT_TYPE, Kind as Family, Value, Writer};

use crate::shared::{Shared, now_ms};

/// Time for which one page is served to all readers.
const FRESH: Duration = Duration::from_secs(1);

/// The whole page.
fn page(shared: &Shared) -> String {
    let now = now_ms();
    let (status, figures) = (shared.status(&Actor::centre()), shared.centre().figures(now));
    let mut w = Writer::default();
    w.head("unirdma_build_info", "gauge", "Which program this is.");
    w.line("unirdma_build_info", &[("version", &status.version)], Value::N(1));
    let mut one = |name: &str, help: &str, value: u64| w.one(name, Family::Gauge, help, value);
    one("unirdma_control_allocates", "1 if this centre makes changes, 0 if another one does.", status.allocates.into());
    one("unirdma_control_revision", "How many changes made the state.", status.revision);
    one("unirdma_control_hosts_connected", "Hosts that are connected.", status.hosts_connected.into());
    let help = "Connected hosts that have not put in force yet all that they were told.";
    one("unirdma_control_hosts_behind", help, figures.behind);
    let help = "Connected hosts with something that they could not do; `unirdma get host` says what.";
    one("unirdma_control_hosts_with_problems", help, figures.with_problems);
    let help = "Connected hosts whose clock is more than 5 s from the centre's.";
    one("unirdma_control_hosts_clock_off", help, figures.clock_off);
    let watching = shared.watchers.count();
    one("unirdma_control_watchers", "Who watches: web pages and `unirdma watch`.", watching as u64);
    let name = "unirdma_control_objects";
    w.head(name, "gauge", "What is declared, by kind.");
    for (kind, n) in
        [("host", status.hosts), ("group", status.groups), ("vrnic", status.vrnics), ("rule", status.rules)]
    {
        w.line(name, &[("kind", kind)], Value::N(n.into()));
    }
    shared.metrics.write(&mut w);
    w.finish()
}

/// A centre, and the last page made for it.
struct Pages {
    shared: Arc<Shared>,
    kept: Mutex<Option<(Instant, String)>>,
}

impl Pages {
    /// A page that is at most [`FRESH`] old. Making one iterates over all hosts.
    fn page(&self) -> String {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, page)) = kept.as_ref().filter(|k| k.0.elapsed() < FRESH) {
            return page.clone();
        }
        let page = page(&self.shared);
        *kept = Some((Instant::now(), page.clone()));
        page
    }
}

/// Answers scrapers at `/metrics`.
pub(crate) fn routes(shared: Arc<Shared>) -> Router {
    let pages = Arc::new(Pages { shared, kept: Mutex::default() });
    let answer =
        |State(pages): State<Arc<Pages>>| async move { ([(header::CONTENT_TYPE, CONTENT_TYPE)], pages.page()) };
    Router::new().route("/metrics", get(answer)).with_state(pages)
}
