//! Calls to a control centre.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tonic::metadata::{Ascii, MetadataValue};
use tonic::service::Interceptor;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint};
use tonic::{Request, Status};
use unirdma_fleet::root_cause;
use unirdma_fleet::v1::{self, fleet_client::FleetClient};

use super::{Centre, show};
use crate::print;

/// Longest time for an answer, and for a connection.
const PATIENCE: Duration = Duration::from_secs(60);
const CONNECT: Duration = Duration::from_secs(10);

/// The user's configuration, which `control init` writes.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Config {
    pub url: String,
    pub token: String,
    /// The authority's certificate (PEM).
    pub authority: String,
}

/// The file of that configuration.
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

/// True for an address of this machine, where a token may go in plain text.
fn is_here(url: &str) -> bool {
    let host = url.strip_prefix("http://").unwrap_or(url).split('/').next().unwrap_or_default();
    let host = host.rsplit_once(':').filter(|(_, port)| !port.contains(']')).map_or(host, |(host, _)| host);
    let ip = host.trim_matches(['[', ']']).parse::<std::net::IpAddr>();
    host == "localhost" || ip.is_ok_and(|ip| ip.is_loopback())
}

/// Checks the URL of a centre.
fn check_url(url: &str) -> io::Result<()> {
    let shown = url.escape_debug();
    match url.split_once("://") {
        Some(("https", rest)) if !rest.is_empty() => Ok(()),
        Some(("http", rest)) if !rest.is_empty() && is_here(url) => Ok(()),
        Some(("http", _)) => Err(other(format!(
            "{shown} would show the token to the network: write https://HOST:7443, or run this on the centre's machine"
        ))),
        _ => Err(other(format!("`{shown}` is no URL of a centre; write https://HOST:7443"))),
    }
}

/// The certificate of the centre's authority, and where it was found.
fn authority(centre: &Centre, config: Option<&Config>) -> io::Result<(String, String)> {
    let (pem, from) = match (&centre.authority, config) {
        (Some(path), _) => {
            let at = |e| other(format!("cannot read {}: {e}", path.display()));
            (std::fs::read_to_string(path).map_err(at)?, path.display().to_string())
        }
        (None, Some(config)) => {
            let path = config_path().unwrap_or_default();
            (config.authority.clone(), path.display().to_string())
        }
        (None, None) => {
            return Err(other("the centre's authority is not known: use --authority FILE, its authority.pem"));
        }
    };
    if pem.contains("-----BEGIN CERTIFICATE-----") {
        return Ok((pem, from));
    }
    Err(other(format!("{from} has no certificate: use --authority FILE, the authority.pem of the centre's directory")))
}

fn token(config: Option<&Config>) -> io::Result<MetadataValue<Ascii>> {
    let token = match std::env::var("UNIRDMA_TOKEN") {
        Ok(token) => token,
        Err(std::env::VarError::NotPresent) => match config {
            Some(config) => config.token.clone(),
            None => return Err(other("no token is given: set UNIRDMA_TOKEN")),
        },
        Err(e) => return Err(other(format!("UNIRDMA_TOKEN cannot be used: {e}"))),
    };
    match token.trim() {
        "" => Err(other("the token is empty: set UNIRDMA_TOKEN to what `unirdma token create` printed")),
        token if token.contains(char::is_whitespace) => Err(other(
            "the token has a space or several lines: set UNIRDMA_TOKEN to what `unirdma token create` printed, one word",
        )),
        token => {
            let header = format!("Bearer {token}").parse();
            header.map_err(|_| other("the token has characters that no token has"))
        }
    }
}

/// The centres of a fleet, and the means to call them.
struct Centres {
    urls: Vec<String>,
    bearer: Bearer,
    /// The authority's certificate (PEM), and where it was found. None is needed without TLS.
    authority: Option<(String, String)>,
}

fn centres(centre: &Centre) -> io::Result<Centres> {
    let config = config()?;
    let missing = "no control centre is named: use --centre URL, UNIRDMA_CENTRE, or `unirdma control init` on the centre's machine";
    let urls = centre.centre.clone().or(config.as_ref().map(|c| c.url.clone())).ok_or_else(|| other(missing))?;
    let urls: Vec<String> = urls.split(',').map(|u| u.trim().to_owned()).collect();
    urls.iter().try_for_each(|url| check_url(url))?;
    let bearer = Bearer(token(config.as_ref())?);
    let tls = urls.iter().any(|url| url.starts_with("https://"));
    let authority = if tls { Some(authority(centre, config.as_ref())?) } else { None };
    Ok(Centres { urls, bearer, authority })
}

impl Centres {
    fn endpoint(&self, url: &str, patience: Option<Duration>) -> io::Result<Endpoint> {
        let mut endpoint = Endpoint::from_shared(url.to_owned())
            .map_err(|_| other(format!("`{}` is no URL of a centre; write https://HOST:7443", url.escape_debug())))?;
        endpoint = endpoint.connect_timeout(CONNECT).http2_keep_alive_interval(CONNECT).keep_alive_timeout(CONNECT);
        if let Some(patience) = patience {
            endpoint = endpoint.timeout(patience);
        }
        if let Some((pem, from)) = self.authority.as_ref().filter(|_| url.starts_with("https://")) {
            let tls = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(pem));
            endpoint = endpoint
                .tls_config(tls)
                .map_err(|e| other(format!("the certificate in {from} cannot be used: {}", root_cause(&e))))?;
        }
        Ok(endpoint)
    }

    /// Connects to the first centre that can be reached, beginning with number `from`. Returns its number, too.
    async fn connect(&self, from: usize, patience: Option<Duration>) -> io::Result<(usize, Client)> {
        let believed = self.authority.as_ref().map_or("", |a| &a.1);
        let mut failed = Vec::new();
        for n in from..from + self.urls.len() {
            let url = &self.urls[n % self.urls.len()];
            let connected = tokio::time::timeout(CONNECT, self.endpoint(url, patience)?.connect()).await;
            match connected {
                Ok(Ok(channel)) => {
                    let client = FleetClient::with_interceptor(channel, self.bearer.clone());
                    return Ok((n, client.max_decoding_message_size(usize::MAX)));
                }
                Ok(Err(e)) => {
                    let cause = root_cause(&e);
                    failed.push(format!("cannot reach the centre at {url}: {cause}{}", hint(&cause, believed)));
                }
                Err(_) => failed.push(format!("cannot reach the centre at {url}: it does not answer")),
            }
        }
        Err(other(failed.join("; ")))
    }
}

/// Advice for a connection that cannot be made.
fn hint(cause: &str, authority: &str) -> String {
    let has = |words: &[&str]| words.iter().any(|w| cause.contains(w));
    if has(&["UnknownIssuer", "BadSignature"]) {
        format!(
            "; its certificate is of another authority than that in {authority}: use --authority FILE, its authority.pem"
        )
    } else if has(&["NotValidForName", "not valid for"]) {
        "; its certificate is for other names: run it with --name, or use the name or address of its machine".into()
    } else if has(&["NotValidYet", "Expired", "expired", "not valid yet"]) {
        "; is the clock of this machine or of the centre wrong?".into()
    } else if has(&["InvalidContentType"]) {
        "; it speaks no TLS there: is the port right? A centre with --plain is at http://".into()
    } else if has(&["refused"]) {
        "; is the port right, and does `unirdma control run` run there?".into()
    } else {
        String::new()
    }
}

/// The centre's refusal, or the reason why it did not answer.
fn refused(e: &Status) -> io::Error {
    use std::error::Error;
    let nobody = |why: &str| {
        let text = "does a control centre listen there? One that speaks TLS is at https://";
        other(format!("the centre did not answer: {why}; {text}"))
    };
    match (e.source(), e.message()) {
        // A status that the centre itself has sent has no source.
        (Some(inner), _) => nobody(&root_cause(inner)),
        // The peer speaks HTTP but not gRPC.
        (None, text) if text.starts_with("grpc-status header missing") => nobody(text),
        (None, "") => other(format!("the centre did not answer: {}", e.code().description())),
        (None, text) => other(text),
    }
}

/// The runtime for a command's calls.
pub(super) fn runtime() -> io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()
}

/// Does a call, whose answer a person may have to wait for.
fn answered<T>(asked: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    let runtime = runtime()?;
    print::while_waiting("the control centre is asked", || runtime.block_on(asked))
}

/// True if the connection has failed; false if the centre has refused.
fn was_lost(e: &Status) -> bool {
    !e.metadata().contains_key("unirdma-refused") && std::error::Error::source(e).is_some()
}

/// Makes a call that is not repeated once it was sent.
pub(super) fn once<T>(centre: &Centre, call: impl AsyncFnOnce(Client) -> Result<T, Status>) -> io::Result<T> {
    let asked = async {
        let (_, client) = centres(centre)?.connect(0, Some(PATIENCE)).await?;
        call(client).await.map_err(|e| refused(&e))
    };
    answered(asked)
}

/// Makes a call that may be repeated: if its centre goes away before it has answered, the next one is asked.
pub(super) fn again<T>(centre: &Centre, call: impl AsyncFn(Client) -> Result<T, Status>) -> io::Result<T> {
    let asked = async {
        let centres = centres(centre)?;
        let mut from = 0;
        loop {
            let (n, client) = centres.connect(from, Some(PATIENCE)).await?;
            match call(client).await {
                Ok(answer) => return Ok(answer),
                Err(e) if was_lost(&e) && n + 1 < centres.urls.len() => from = n + 1,
                Err(e) => return Err(refused(&e)),
            }
        }
    };
    answered(asked)
}

/// All objects that match a request, page by page.
pub(super) fn pages(centre: &Centre, request: v1::GetRequest) -> io::Result<v1::GetResponse> {
    again(centre, async |mut client| {
        let mut request = request.clone();
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

/// Prints all objects, then each change, until the centre ends the connection or the user interrupts.
pub(super) fn watch(centre: &Centre, request: v1::WatchRequest) -> io::Result<()> {
    runtime()?.block_on(async {
        let (_, mut client) = centres(centre)?.connect(0, None).await?;
        let mut news = client.watch(request).await.map_err(|e| refused(&e))?.into_inner();
        while let Some(m) = news.message().await.map_err(|e| refused(&e))? {
            show::news(&m, centre.json)?;
        }
        Err(other("the centre has ended the connection"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_go_in_plain_text_within_a_machine_only() {
        for url in ["http://127.0.0.1:7443", "http://localhost", "http://[::1]:7443", "http://127.9.9.9/x", "https://h"]
        {
            check_url(url).unwrap();
        }
        for url in ["http://10.0.0.1:7443", "http://localhost.example.org", "http://[fd00::1]:7443"] {
            assert!(check_url(url).unwrap_err().to_string().contains("would show the token"), "{url}");
        }
        for url in ["", "centre:7443", "https://", "ftp://h", "127.0.0.1:7443", "a\nb"] {
            assert!(check_url(url).unwrap_err().to_string().contains("no URL of a centre; write https://"), "{url}");
        }
    }
}
