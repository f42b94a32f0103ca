//! Calls of a control centre.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tonic::metadata::{Ascii, MetadataValue};
use tonic::service::Interceptor;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint};
use tonic::{Request, Status};
use unirdma_fleet::v1::{self, fleet_client::FleetClient};

use super::{Centre, show};

/// How long the centre may take to answer, and to be reached.
const PATIENCE: Duration = Duration::from_secs(60);
const CONNECT: Duration = Duration::from_secs(10);

/// What `control init` writes into the user's configuration.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Config {
    pub url: String,
    pub token: String,
    /// The authority's certificate (PEM).
    pub authority: String,
}

/// The file of the user's configuration that says where the centre is.
pub(super) fn config_path() -> Option<PathBuf> {
    let base = std::env::var_os("XDG_CONFIG_HOME").map(PathBuf::from).filter(|p| p.is_absolute());
    let base = base.or_else(|| std::env::var_os("HOME").map(|h| PathBuf::from(h).join(".config")));
    base.map(|b| b.join("unirdma/centre.toml"))
}

fn other(text: impl std::fmt::Display) -> io::Error {
    io::Error::other(text.to_string())
}

fn config() -> io::Result<Option<Config>> {
    let Some(path) = config_path() else { return Ok(None) };
    match std::fs::read_to_string(&path) {
        Ok(text) => match toml::from_str(&text) {
            Ok(config) => Ok(Some(config)),
            Err(e) => Err(other(format!("{}: {}", path.display(), e.message().lines().next().unwrap_or_default()))),
        },
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(other(format!("cannot read {}: {e}", path.display()))),
    }
}

/// Sends the token with each call.
#[derive(Clone)]
pub(super) struct Bearer(MetadataValue<Ascii>);

impl Interceptor for Bearer {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        request.metadata_mut().insert("authorization", self.0.clone());
        Ok(request)
    }
}

pub(super) type Client = FleetClient<InterceptedService<Channel, Bearer>>;

async fn connect(centre: &Centre, patience: Option<Duration>) -> io::Result<Client> {
    let config = config()?;
    let missing = "no control centre is named: use --centre URL, UNIRDMA_CENTRE, or `unirdma control init` on the centre's machine";
    let url = centre.centre.clone().or(config.as_ref().map(|c| c.url.clone())).ok_or_else(|| other(missing))?;
    let token = std::env::var("UNIRDMA_TOKEN").ok().or(config.as_ref().map(|c| c.token.clone()));
    let token = token.ok_or_else(|| other("no token is given: set UNIRDMA_TOKEN"))?;
    let bearer =
        format!("Bearer {}", token.trim()).parse().map_err(|_| other("the token has characters that no token has"))?;
    let mut endpoint =
        Endpoint::from_shared(url.clone()).map_err(|_| other(format!("`{url}` is no URL; write https://HOST:7443")))?;
    endpoint = endpoint.connect_timeout(CONNECT).http2_keep_alive_interval(CONNECT).keep_alive_timeout(CONNECT);
    if let Some(patience) = patience {
        endpoint = endpoint.timeout(patience);
    }
    if url.starts_with("https://") {
        let pem = match &centre.authority {
            Some(path) => {
                Some(std::fs::read_to_string(path).map_err(|e| other(format!("cannot read {}: {e}", path.display())))?)
            }
            None => config.map(|c| c.authority),
        };
        let pem =
            pem.ok_or_else(|| other("the centre's authority is not known: use --authority FILE, its authority.pem"))?;
        let tls = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(pem));
        endpoint =
            endpoint.tls_config(tls).map_err(|e| other(format!("the authority's certificate cannot be used: {e}")))?;
    }
    let channel =
        endpoint.connect().await.map_err(|e| other(format!("cannot reach the centre at {url}: {}", cause(&e))))?;
    Ok(FleetClient::with_interceptor(channel, Bearer(bearer)).max_decoding_message_size(usize::MAX))
}

/// The innermost cause of an error: what the network or TLS said.
fn cause(e: &dyn std::error::Error) -> String {
    let mut e = e;
    while let Some(inner) = e.source() {
        e = inner;
    }
    e.to_string()
}

fn refused(e: &Status) -> io::Error {
    match e.message() {
        "" => other(format!("the centre did not answer: {}", e.code().description())),
        text => other(text),
    }
}

fn runtime() -> io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()
}

/// One call.
pub(super) fn once<T>(centre: &Centre, call: impl AsyncFnOnce(Client) -> Result<T, Status>) -> io::Result<T> {
    runtime()?.block_on(async {
        let client = connect(centre, Some(PATIENCE)).await?;
        call(client).await.map_err(|e| refused(&e))
    })
}

/// All objects that a question is about, page by page.
pub(super) fn pages(centre: &Centre, mut request: v1::GetRequest) -> io::Result<v1::GetResponse> {
    once(centre, async |mut client| {
        let mut all = v1::GetResponse::default();
        loop {
            let page = client.get(request.clone()).await?.into_inner();
            let last = page.objects.last().and_then(|o| o.object.as_ref()).map(|o| o.name().to_owned());
            all.revision = page.revision;
            all.objects.extend(page.objects);
            all.hosts.extend(page.hosts);
            all.vrnics.extend(page.vrnics);
            match last.filter(|_| page.more) {
                Some(name) => request.after = name,
                None => return Ok(all),
            }
        }
    })
}

/// Prints what there is and each change, until the centre ends or this is interrupted.
pub(super) fn watch(centre: &Centre, request: v1::WatchRequest) -> io::Result<()> {
    runtime()?.block_on(async {
        let mut client = connect(centre, None).await?;
        let mut news = client.watch(request).await.map_err(|e| refused(&e))?.into_inner();
        while let Some(m) = news.message().await.map_err(|e| refused(&e))? {
            show::news(&m, centre.json)?;
        }
        Err(other("the centre has ended the connection"))
    })
}
