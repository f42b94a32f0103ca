//! The control centre of a fleet as a program: its store, its certificates, and its calls as gRPC and as JSON on one
//! port.
//!
//! The crate `unirdma-fleet` defines what a fleet is and what follows from a call. This crate feeds it with messages
//! and time, and has all the sockets, files and tasks. It must not decide anything about a fleet.

mod admit;
mod calls;
mod change_turns;
mod connections;
mod election;
mod errors;
mod grpc;
mod host;
mod http;
mod message_cost;
mod metrics;
mod metrics_page;
mod openapi;
mod peer_centres;
mod peer_channels;
mod pki;
mod rate_limits;
mod routes;
mod serve;
mod shared;
mod store;
mod watch;
mod watchers;
mod web;

use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;
use unirdma_fleet::v1::centres_server::CentresServer;
use unirdma_fleet::v1::fleet_server::FleetServer;
use unirdma_fleet::v1::hosts_server::HostsServer;
use unirdma_fleet::{Actor, Centre, v1};

use connections::Connections;
use pki::Authority;
pub use pki::write_private;
use shared::Shared;

/// How a centre runs.
#[derive(Clone, Debug)]
pub struct Options {
    /// The directory that [`init`] made.
    pub dir: PathBuf,
    /// Where it listens.
    pub listen: SocketAddr,
    /// Its store, if it is not the file in its directory: another file, or `etcd://HOST:PORT[,HOST:PORT...][/PREFIX]`,
    /// which several centres can share.
    pub store: Option<String>,
    /// Without TLS, on loopback only.
    pub plain: bool,
    /// Names of this centre, in addition to the names of this machine. Other centres of the fleet use the first one.
    pub names: Vec<String>,
    /// Where scrapers read metrics.
    pub metrics: Option<SocketAddr>,
}

/// A centre that listens, and does not serve yet.
pub struct Listening {
    listener: TcpListener,
    tls: Option<TlsAcceptor>,
    shared: Arc<Shared>,
    doors: Arc<Connections>,
    scrapers: Option<TcpListener>,
    /// Where it listens.
    pub url: String,
    /// Where metrics are.
    pub metrics: Option<SocketAddr>,
}

fn other(e: impl std::fmt::Display) -> io::Error {
    io::Error::other(e.to_string())
}

fn seed() -> io::Result<[u8; 32]> {
    let mut seed = [0; 32];
    getrandom::fill(&mut seed).map_err(other)?;
    Ok(seed)
}

/// Makes the directory of a new fleet, with its authority and its store. Returns the token of its first administrator.
///
/// # Errors
/// There is an authority already, or the directory cannot be written.
pub async fn init(dir: &Path, store: Option<&str>) -> io::Result<String> {
    use std::os::unix::fs::DirBuilderExt;
    let named = |e: io::Error| io::Error::new(e.kind(), format!("cannot make {}: {e}", dir.display()));
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(named)?;
    if dir.join("authority.key").exists() {
        return Err(other(format!(
            "{} has an authority already; run it with `unirdma control run {}`",
            dir.display(),
            dir.display()
        )));
    }
    let (fleet, token) = found(dir, store).await?;
    Authority::create(dir, &fleet).map_err(named)?;
    Ok(token)
}

/// Writes the first records of a fleet. Returns the fleet's number and its administrator's token.
async fn found(dir: &Path, store: Option<&str>) -> io::Result<(String, String)> {
    let opened = store::open(store, dir).map_err(other)?;
    let store = opened.store();
    if store.load().await.map_err(other)?.revision != 0 {
        return Err(other(format!(
            "{} has a fleet already; copy the directory of its authority, or choose another store",
            store.name()
        )));
    }
    // All hosts know the fleet's number, so the token must not be derived from it.
    let (number, random) = (seed()?, seed()?);
    let fleet: String = number[..8].iter().map(|b| format!("{b:02x}")).collect();
    let records = Centre::found(&fleet);
    store.commit(1, &records).await.map_err(other)?;
    let (centre, mut planner) = Centre::load(1, &records, seed()?).map_err(other)?;
    let token = v1::Token { id: "admin".into(), role: v1::Role::Admin.into(), ..v1::Token::default() };
    let made = planner.create_token(&Actor::centre(), token, random, &centre, shared::now_ms()).map_err(other)?;
    if let Some(plan) = made.plan {
        store.commit(plan.revision, &plan.writes).await.map_err(other)?;
    }
    Ok((fleet, made.answer.secret))
}

/// Result of [`copy`].
#[derive(Clone, Debug)]
pub struct Copied {
    /// The store that it was copied from.
    pub from: String,
    /// The store that it was copied to.
    pub to: String,
    /// The revision that the fleet has in both.
    pub revision: u64,
    /// How many records it has.
    pub records: usize,
}

/// Copies a fleet to an empty store, with its revision, so that the state of hosts stays valid. `from` and `to` are as
/// in [`Options::store`].
///
/// # Errors
/// There is no fleet to copy, a centre runs on it, or the other store has a fleet. In these cases nothing is changed.
pub async fn copy(dir: &Path, from: Option<&str>, to: &str) -> io::Result<Copied> {
    if let Some(path) = store::path(from, dir).filter(|p| !p.exists()) {
        return Err(other(format!("there is no store at {}; give the fleet's one by --from", path.display())));
    }
    let opened = store::open(from, dir).map_err(other)?;
    let source = opened.store();
    let same =
        |p: PathBuf| matches!((p.canonicalize(), Path::new(&source.name()).canonicalize()), (Ok(a), Ok(b)) if a == b);
    if store::path(Some(to), dir).is_some_and(same) || to == source.name() {
        return Err(other(format!("{} is the store that the fleet has; give another one by --to", source.name())));
    }
    let snapshot = opened.load_at_rest().await.map_err(other)?;
    if snapshot.revision == 0 {
        return Err(other(format!("{} has no fleet; give the fleet's store by --from", source.name())));
    }
    // Records that no centre can load are not copied.
    Centre::load(snapshot.revision, &snapshot.records, seed()?).map_err(other)?;
    let opened = store::open(Some(to), dir).map_err(other)?;
    let target = opened.store();
    if target.load().await.map_err(other)?.revision != 0 {
        return Err(other(format!(
            "{} has a fleet already, which stays as it is; choose another store",
            target.name()
        )));
    }
    target.advance(0, snapshot.revision, &snapshot.records).await.map_err(other)?;
    if target.load().await.map_err(other)? != snapshot {
        return Err(other(format!("{} does not give back what it was given; do not use it", target.name())));
    }
    let (from, to) = (source.name(), target.name());
    Ok(Copied { from, to, revision: snapshot.revision, records: snapshot.records.len() })
}

/// Loads a centre's state, and begins to listen.
///
/// # Errors
/// The directory, the store or the address cannot be used.
pub async fn listen(options: &Options) -> io::Result<Listening> {
    let authority = if options.plain {
        serve::check_plain(options.listen)?;
        None
    } else {
        Some(Authority::load(&options.dir)?)
    };
    let store = store::open(options.store.as_deref(), &options.dir).map_err(other)?;
    let snapshot = store.store().load().await.map_err(other)?;
    if snapshot.revision == 0 {
        return Err(other(format!(
            "{} has no fleet yet; `unirdma control init {}` makes one",
            store.store().name(),
            options.dir.display()
        )));
    }
    let centre = Centre::load(snapshot.revision, &snapshot.records, seed()?).map_err(other)?;
    let tls = match &authority {
        None => None,
        Some(a) => {
            let names = [pki::own_names(options.listen.ip()), options.names.clone()].concat();
            Some(TlsAcceptor::from(Arc::new(a.server(&names)?)))
        }
    };
    let listener = TcpListener::bind(options.listen).await;
    let listener = listener.map_err(|e| {
        io::Error::new(e.kind(), format!("cannot listen at {}: {e}; choose another --listen", options.listen))
    })?;
    let scrapers = match options.metrics {
        None => None,
        Some(at) => Some(TcpListener::bind(at).await.map_err(|e| {
            let text = format!("cannot serve metrics at {at}: {e}; choose another --metrics");
            io::Error::new(e.kind(), text)
        })?),
    };
    let metrics = scrapers.as_ref().map(TcpListener::local_addr).transpose()?;
    let scheme = if tls.is_some() { "https" } else { "http" };
    let at = listener.local_addr()?;
    let url = format!("{scheme}://{at}");
    let name = options.names.first().cloned().unwrap_or_else(|| pki::name_of(at.ip()));
    let name = if name.contains(':') { format!("[{name}]") } else { name };
    let shared = Shared::new(centre, store, authority, format!("{scheme}://{name}:{}", at.port()))?;
    let doors = Connections::of_centre(connections::descriptors());
    Ok(Listening { listener, tls, shared, doors, scrapers, url, metrics })
}

impl Listening {
    /// Gives up this centre's lease, so that another one can be elected at once. To be called last.
    pub fn leave(&self) -> impl Future<Output = ()> + Send + 'static {
        let shared = self.shared.clone();
        async move { shared.leave().await }
    }

    /// Serves until the task is ended.
    ///
    /// # Errors
    /// The store was replaced by another one while the centre ran.
    pub async fn serve(self) -> io::Result<()> {
        let services = grpc::Services(self.shared.clone());
        let fleet = FleetServer::new(services.clone())
            .max_decoding_message_size(admit::MAX_BODY)
            .max_encoding_message_size(usize::MAX);
        let hosts = HostsServer::new(services.clone())
            .max_decoding_message_size(admit::MAX_HOST_MESSAGE)
            .max_encoding_message_size(usize::MAX);
        let centres = CentresServer::new(services)
            .max_decoding_message_size(admit::MAX_HOST_MESSAGE)
            .max_encoding_message_size(usize::MAX);
        let routes = tonic::service::Routes::new(fleet).add_service(hosts).add_service(centres);
        let router = web::routes(http::routes(routes.prepare().into_axum_router(), self.shared.clone()));
        let router = router.layer(axum::middleware::from_fn_with_state(self.shared.clone(), admit::admit));
        let shared = self.shared.clone();
        let take_part = async move {
            match shared.store.clone() {
                store::Opened::Etcd(store) => election::take_part(shared, store).await,
                store::Opened::File(_) => std::future::pending().await,
            }
        };
        let scrapers = metrics_page::routes(self.shared.clone());
        let scraped = async move {
            match self.scrapers {
                Some(listener) => serve::serve(listener, None, scrapers, Connections::of_metrics()).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = self.shared.clone().keep_time() => Ok(()),
            () = scraped => Ok(()),
            () = serve::serve(self.listener, self.tls, router, self.doors) => Ok(()),
            e = take_part => Err(e),
        }
    }
}
