//! The real centre: `unirdma control` as a separate process, and the calls of its administrator.

use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio_rustls::rustls::ClientConfig;
use tonic::transport::Channel;
use tonic::{Request, Status};
use unirdma_fleet::v1::fleet_client::FleetClient;
use unirdma_fleet::v1::hosts_client::HostsClient;
use unirdma_fleet::v1::{self, object::Object};

use super::dial;

/// Most objects of one `apply` call.
const MAX_APPLY: usize = 20_000;

/// The process of the centre.
pub struct Centre {
    exe: PathBuf,
    dir: PathBuf,
    child: Child,
    pub admin: Admin,
}

/// The administrator's connection to the centre.
#[derive(Clone)]
pub struct Admin {
    token: String,
    pub authority: String,
    pub address: String,
    client: FleetClient<Channel>,
}

fn other(e: impl std::fmt::Display) -> io::Error {
    io::Error::other(e.to_string())
}

/// Converts a refusal by the centre into an error with its message.
fn said(e: Status) -> io::Error {
    io::Error::other(format!("the centre says: {}", e.message()))
}

impl Drop for Centre {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn control(exe: &Path, dir: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(exe);
    command.arg("control").args(args).stdin(Stdio::null());
    // Keeps the command from reading and writing this user's own configuration of a centre.
    command.env("XDG_CONFIG_HOME", dir.join("config")).env_remove("UNIRDMA_TOKEN").env_remove("UNIRDMA_CENTRE");
    command
}

/// Starts the centre. Returns its process and the address at which it listens. Kills the process if it prints no
/// address.
fn start(exe: &Path, dir: &Path, listen: &str) -> io::Result<(Child, String)> {
    let fleet = dir.join("fleet").display().to_string();
    let mut child = control(exe, dir, &["run", &fleet, "--listen", listen]).stdout(Stdio::piped()).spawn()?;
    let mut line = String::new();
    if let Some(out) = child.stdout.take() {
        BufReader::new(out).read_line(&mut line)?;
    }
    match line.trim().rsplit_once("https://") {
        Some((_, address)) => Ok((child, address.into())),
        None => {
            let _ = child.kill();
            let _ = child.wait();
            Err(other(format!("the centre did not begin to serve: {line:?}")))
        }
    }
}

impl Centre {
    /// Creates a fleet in `dir` and starts its centre.
    pub async fn begin(exe: &Path, dir: &Path) -> io::Result<Centre> {
        let fleet = dir.join("fleet");
        let made = control(exe, dir, &["init", &fleet.display().to_string()]).output()?;
        if !made.status.success() {
            return Err(other(String::from_utf8_lossy(&made.stderr)));
        }
        let text = String::from_utf8_lossy(&made.stdout);
        let token = text.lines().find_map(|l| l.split_once("not shown again: ")).map(|(_, t)| t.trim().to_owned());
        let token = token.ok_or_else(|| other("`unirdma control init` printed no token"))?;
        let authority = std::fs::read_to_string(fleet.join("authority.pem"))?;
        let (child, address) = start(exe, dir, "127.0.0.1:0")?;
        let client = client(&address, &dial::trust(&authority, None)?).await?;
        Ok(Centre { exe: exe.into(), dir: dir.into(), child, admin: Admin { token, authority, address, client } })
    }

    /// Kills the centre and starts it again. Returns the time until it serves.
    pub async fn kill_and_start(&mut self) -> io::Result<Duration> {
        self.child.kill()?;
        self.child.wait()?;
        let began = Instant::now();
        let (child, _) = start(&self.exe, &self.dir, &self.admin.address)?;
        self.child = child;
        let took = began.elapsed();
        self.admin.client = client(&self.admin.address, &dial::trust(&self.admin.authority, None)?).await?;
        Ok(took)
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The store's size.
    pub fn store_bytes(&self) -> u64 {
        std::fs::metadata(self.dir.join("fleet/fleet.redb")).map_or(0, |m| m.len())
    }
}

async fn client(address: &str, tls: &Arc<ClientConfig>) -> io::Result<FleetClient<Channel>> {
    Ok(FleetClient::new(dial::channel(address, tls, None).await?).max_decoding_message_size(usize::MAX))
}

impl Admin {
    fn with_token<T>(&self, message: T) -> io::Result<Request<T>> {
        let mut request = Request::new(message);
        let bearer = format!("Bearer {}", self.token).parse().map_err(other)?;
        request.metadata_mut().insert("authorization", bearer);
        Ok(request)
    }

    /// Joins a host. Returns its certificate and its private key (PEM).
    pub async fn join(&self, host: &str) -> io::Result<(String, String)> {
        let token = v1::Token { id: format!("join-{host}"), role: v1::Role::Join.into(), ..v1::Token::default() };
        let request = self.with_token(v1::CreateTokenRequest { token: Some(token) })?;
        let token = self.client.clone().create_token(request).await.map_err(said)?.into_inner().secret;
        let key = rcgen::KeyPair::generate().map_err(other)?;
        let mut params = rcgen::CertificateParams::default();
        params.distinguished_name.push(rcgen::DnType::CommonName, host);
        let request = params.serialize_request(&key).and_then(|r| r.pem()).map_err(other)?;
        let channel = dial::channel(&self.address, &dial::trust(&self.authority, None)?, None).await?;
        let request = v1::JoinRequest { token, host: host.into(), request };
        let joined = HostsClient::new(channel).join(request).await.map_err(said)?.into_inner();
        Ok((joined.certificate, key.serialize_pem()))
    }

    /// Declares objects, at most [`MAX_APPLY`] per call.
    pub async fn apply(&self, objects: Vec<Object>) -> io::Result<Vec<v1::ApplyResponse>> {
        let mut answers = Vec::new();
        for part in objects.chunks(MAX_APPLY) {
            let objects = part.iter().map(|o| v1::Object { object: Some(o.clone()), revision: 0 }).collect();
            let request = self.with_token(v1::ApplyRequest { objects, ..v1::ApplyRequest::default() })?;
            answers.push(self.client.clone().apply(request).await.map_err(said)?.into_inner());
        }
        Ok(answers)
    }

    pub async fn delete(&self, kind: v1::Kind, name: &str) -> io::Result<v1::ApplyResponse> {
        let names = vec![v1::Name { kind: kind.into(), name: name.into() }];
        let request = self.with_token(v1::DeleteRequest { names, ..v1::DeleteRequest::default() })?;
        Ok(self.client.clone().delete(request).await.map_err(said)?.into_inner())
    }

    pub async fn move_vrnic(&self, vrnic: &str, host: &str) -> io::Result<v1::ApplyResponse> {
        let request = self.with_token(v1::MoveRequest { vrnic: vrnic.into(), host: host.into() })?;
        Ok(self.client.clone().r#move(request).await.map_err(said)?.into_inner())
    }

    pub async fn status(&self) -> io::Result<v1::StatusResponse> {
        let request = self.with_token(v1::StatusRequest {})?;
        Ok(self.client.clone().status(request).await.map_err(said)?.into_inner())
    }
}

/// Resident memory of a process, bytes: now, and at its peak.
pub fn memory(pid: u32) -> (u64, u64) {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let of = |what: &str| {
        let line = text.lines().find_map(|l| l.strip_prefix(what));
        line.and_then(|l| l.split_whitespace().next()?.parse::<u64>().ok()).unwrap_or(0) << 10
    };
    (of("VmRSS:"), of("VmHWM:"))
}

/// The processor time of a process, in seconds.
pub fn processor_s(pid: u32) -> f64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let words = text.rsplit_once(')').map(|(_, rest)| rest.split_whitespace().collect::<Vec<_>>()).unwrap_or_default();
    let ticks = |n: usize| words.get(n).and_then(|w| w.parse::<f64>().ok()).unwrap_or(0.0);
    // User and system time, in ticks of 10 ms.
    (ticks(11) + ticks(12)) / 100.0
}
