//! Calls to etcd. A call goes to the member that answered last. If that member does not answer, the next call goes to
//! another member.

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use serde::Deserialize;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};
use tonic::{Code, Request, Status};

use super::StoreError;
use super::api::auth_client::AuthClient;
use super::api::{self, kv_client::KvClient, lease_client::LeaseClient, watch_client::WatchClient};

/// Time limit of a call.
pub(super) const PATIENCE: Duration = Duration::from_secs(2);
/// Interval of pings on a connection with calls under way. etcd closes a connection that pings more often than every 5
/// s.
const PING: Duration = Duration::from_secs(6);

/// The content of `etcd.toml` in the centre's directory. Paths of files are relative to that directory.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Settings {
    /// Certificate of the authority of etcd's members (PEM). If it is set, the centre uses TLS.
    authority: Option<String>,
    /// Certificate and key of the centre as etcd's client (PEM).
    certificate: Option<String>,
    key: Option<String>,
    user: Option<String>,
    password: Option<String>,
}

impl Settings {
    fn read(dir: &Path) -> Result<Settings, StoreError> {
        let path = dir.join("etcd.toml");
        match std::fs::read_to_string(&path) {
            Ok(text) => toml::from_str(&text).map_err(|e| {
                let line = e.message().lines().next().unwrap_or_default().to_owned();
                StoreError::Broken(format!("cannot be used: {}: {line}", path.display()))
            }),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(Settings::default()),
            Err(e) => Err(StoreError::Broken(format!("cannot be used: cannot read {}: {e}", path.display()))),
        }
    }

    fn tls(&self, dir: &Path) -> Result<Option<ClientTlsConfig>, StoreError> {
        let read = |file: &str| {
            let path = dir.join(file);
            std::fs::read_to_string(&path)
                .map_err(|e| StoreError::Broken(format!("cannot be used: cannot read {}: {e}", path.display())))
        };
        let wrong = |what: &str| Err(StoreError::Broken(format!("cannot be used: etcd.toml has {what}")));
        let Some(authority) = &self.authority else {
            return match &self.certificate.as_ref().or(self.key.as_ref()) {
                Some(_) => wrong("a certificate or a key, but no authority, without which there is no TLS"),
                None => Ok(None),
            };
        };
        let mut tls = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(read(authority)?));
        match (&self.certificate, &self.key) {
            (Some(c), Some(k)) => tls = tls.identity(Identity::from_pem(read(c)?, read(k)?)),
            (None, None) => {}
            _ => return wrong("only one of certificate and key"),
        }
        Ok(Some(tls))
    }
}

/// A client of etcd's members.
pub(crate) struct Client {
    members: Vec<Channel>,
    /// The member that calls go to.
    at: AtomicUsize,
    /// User and password.
    login: Option<(String, String)>,
    /// The token that etcd gave for them.
    token: Mutex<Option<MetadataValue<Ascii>>>,
}

/// True if etcd may have executed the failed request.
pub(super) fn is_unclear(e: &Status) -> bool {
    !matches!(
        e.code(),
        Code::InvalidArgument
            | Code::PermissionDenied
            | Code::FailedPrecondition
            | Code::OutOfRange
            | Code::ResourceExhausted
            | Code::NotFound
    )
}

impl Client {
    /// A client of these members (`HOST:PORT`) with the settings of `etcd.toml` in `dir`. It does not connect yet.
    ///
    /// # Errors
    /// An address is invalid, or the file is wrong.
    pub fn new(members: &[&str], dir: &Path) -> Result<Client, StoreError> {
        let settings = Settings::read(dir)?;
        let tls = settings.tls(dir)?;
        let scheme = if tls.is_some() { "https" } else { "http" };
        let channel = |member: &&str| {
            let wrong = |why: String| StoreError::Broken(format!("cannot be at `{member}`: {why}"));
            let mut endpoint = Endpoint::from_shared(format!("{scheme}://{member}"))
                .map_err(|_| wrong("write etcd://HOST:PORT[,HOST:PORT...][/PREFIX]".into()))?
                .connect_timeout(PATIENCE)
                .http2_keep_alive_interval(PING)
                .keep_alive_timeout(PATIENCE);
            if let Some(tls) = tls.clone() {
                endpoint = endpoint.tls_config(tls).map_err(|e| wrong(e.to_string()))?;
            }
            Ok(endpoint.connect_lazy())
        };
        let login = match (settings.user, settings.password) {
            (Some(user), Some(password)) => Some((user, password)),
            (None, None) => None,
            _ => {
                return Err(StoreError::Broken("cannot be used: etcd.toml has only one of user and password".into()));
            }
        };
        let members = members.iter().map(channel).collect::<Result<_, _>>()?;
        Ok(Client { members, at: AtomicUsize::new(0), login, token: Mutex::default() })
    }

    /// How many members there are.
    pub fn members(&self) -> usize {
        self.members.len()
    }

    fn channel(&self) -> Channel {
        self.members[self.at.load(Ordering::Relaxed) % self.members.len()].clone()
    }

    /// Lets the next call go to another member.
    fn next_member(&self) {
        self.at.fetch_add(1, Ordering::Relaxed);
    }

    fn forget_token(&self) {
        *self.token.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// Called when a watch has ended: the next call goes to another member, with a new token. A restarted member does
    /// not know earlier tokens, and reports only that the watch is not permitted.
    pub fn lost_watch(&self) {
        self.next_member();
        self.forget_token();
    }

    async fn token(&self) -> Result<Option<MetadataValue<Ascii>>, Status> {
        let Some((name, password)) = &self.login else { return Ok(None) };
        if let Some(token) = self.token.lock().unwrap_or_else(PoisonError::into_inner).clone() {
            return Ok(Some(token));
        }
        let request = api::AuthenticateRequest { name: name.clone(), password: password.clone() };
        let done = tokio::time::timeout(PATIENCE, AuthClient::new(self.channel()).authenticate(request)).await;
        let text = done.map_err(|_| silent())??.into_inner().token;
        let token: MetadataValue<Ascii> = text.parse().map_err(|_| Status::unauthenticated("etcd's token is none"))?;
        *self.token.lock().unwrap_or_else(PoisonError::into_inner) = Some(token.clone());
        Ok(Some(token))
    }

    /// A request with etcd's token, which only a member that has a leader may answer.
    async fn request<T>(&self, message: T) -> Result<Request<T>, Status> {
        let mut request = Request::new(message);
        request.metadata_mut().insert("hasleader", MetadataValue::from_static("true"));
        if let Some(token) = self.token().await? {
            request.metadata_mut().insert("token", token);
        }
        Ok(request)
    }

    /// Evaluates the result of a call.
    fn heard<T>(&self, done: Result<Result<T, Status>, tokio::time::error::Elapsed>) -> Result<T, Status> {
        let done = done.unwrap_or_else(|_| Err(silent()));
        if let Err(e) = &done {
            match e.code() {
                // etcd's tokens expire.
                Code::Unauthenticated => self.forget_token(),
                _ if is_unclear(e) => self.next_member(),
                _ => {}
            }
        }
        done
    }

    pub async fn range(&self, r: api::RangeRequest) -> Result<api::RangeResponse, Status> {
        let request = self.request(r).await;
        let mut client = KvClient::new(self.channel()).max_decoding_message_size(usize::MAX);
        let call = async { Ok(client.range(request?).await?.into_inner()) };
        self.heard(tokio::time::timeout(5 * PATIENCE, call).await)
    }

    pub async fn txn(&self, r: api::TxnRequest) -> Result<api::TxnResponse, Status> {
        let request = self.request(r).await;
        let mut client = KvClient::new(self.channel()).max_decoding_message_size(usize::MAX);
        let call = async { Ok(client.txn(request?).await?.into_inner()) };
        self.heard(tokio::time::timeout(PATIENCE, call).await)
    }

    /// Makes a lease of this number of seconds. Returns its id.
    pub async fn grant(&self, seconds: i64) -> Result<i64, Status> {
        let request = self.request(api::LeaseGrantRequest { ttl: seconds, id: 0 }).await;
        let mut client = LeaseClient::new(self.channel());
        let call = async { Ok(client.lease_grant(request?).await?.into_inner()) };
        let granted = self.heard(tokio::time::timeout(PATIENCE, call).await)?;
        if granted.error.is_empty() { Ok(granted.id) } else { Err(Status::unavailable(granted.error)) }
    }

    pub async fn revoke(&self, id: i64) -> Result<(), Status> {
        let request = self.request(api::LeaseRevokeRequest { id }).await;
        let mut client = LeaseClient::new(self.channel());
        let call = async { client.lease_revoke(request?).await.map(drop) };
        self.heard(tokio::time::timeout(PATIENCE, call).await)
    }

    /// Prolongs a lease; false if it has ended.
    pub async fn keep_alive(&self, id: i64) -> Result<bool, Status> {
        let one = tokio_stream::once(api::LeaseKeepAliveRequest { id });
        let request = self.request(one).await;
        let mut client = LeaseClient::new(self.channel());
        let call = async { client.lease_keep_alive(request?).await?.into_inner().message().await };
        let answer = self.heard(tokio::time::timeout(PATIENCE, call).await)?;
        Ok(answer.is_some_and(|a| a.ttl > 0))
    }

    /// Watches keys from a revision on. The first answer has arrived when this returns.
    pub async fn watch(&self, create: api::WatchCreateRequest) -> Result<tonic::Streaming<api::WatchResponse>, Status> {
        let first = api::WatchRequest { request_union: Some(api::watch_request::RequestUnion::CreateRequest(create)) };
        // etcd ends a watch when the client ends its stream of requests.
        let requests = tokio_stream::StreamExt::chain(tokio_stream::once(first), tokio_stream::pending());
        let request = self.request(requests).await;
        let mut client = WatchClient::new(self.channel()).max_decoding_message_size(usize::MAX);
        let call = async { Ok(client.watch(request?).await?.into_inner()) };
        self.heard(tokio::time::timeout(PATIENCE, call).await)
    }
}

fn silent() -> Status {
    Status::deadline_exceeded("nothing came in time")
}
