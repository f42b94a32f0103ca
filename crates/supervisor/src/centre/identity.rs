//! This host's identity for the control centre: its name, its key and its certificate, which it gets once with a token.

use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use unirdma_fleet::v1::JoinRequest;
use unirdma_fleet::v1::hosts_client::HostsClient;

use super::dial::{self, DialError, Trust, Url};
use crate::centre_config::CentreConfig;

const ABOUT: &str = "host.json";
const KEY: &str = "key.pem";
const CERTIFICATE: &str = "certificate.pem";
const AUTHORITY: &str = "authority.pem";

/// The content of `host.json`. It is written last, so if it exists, key and certificates exist, too.
#[derive(Serialize, Deserialize)]
struct About {
    name: String,
}

/// A host that has joined.
pub(crate) struct Identity {
    pub name: String,
    /// The centres' URLs, in the order in which they are tried.
    pub urls: Vec<Url>,
    pub(super) trust: Trust,
    pub(super) state: PathBuf,
}

impl Identity {
    /// The identity stored in the directory; if there is none, joins the fleet.
    ///
    /// # Errors
    /// One line: a file that cannot be read or written, a missing token, or the centre's refusal.
    pub fn load_or_join(c: &CentreConfig) -> io::Result<Identity> {
        let urls = Url::parse_all(&c.url).map_err(|e| io::Error::new(io::ErrorKind::InvalidInput, e))?;
        let dir = &c.state;
        std::fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(dir)
            .map_err(crate::context("cannot create", dir))?;
        let Some(about) = read(dir, ABOUT)? else { return join(c, urls) };
        let about: About = serde_json::from_str(&about).map_err(|e| damaged(dir, ABOUT, e))?;
        if let Some(name) = c.name.as_ref().filter(|n| **n != about.name) {
            let text = format!(
                "this host has joined as {}; leave --name out, or remove {} and join again as {name}",
                about.name,
                dir.display()
            );
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        let trust = match urls[0].tls {
            false => Trust::None,
            true => {
                let file = |name| read(dir, name)?.ok_or_else(|| damaged(dir, name, "it is not there"));
                Trust::mutual(&file(AUTHORITY)?, &file(CERTIFICATE)?, &file(KEY)?)
                    .map_err(|e| damaged(dir, CERTIFICATE, e))?
            }
        };
        Ok(Identity { name: about.name, urls, trust, state: dir.clone() })
    }
}

fn damaged(dir: &Path, file: &str, why: impl std::fmt::Display) -> io::Error {
    let text = format!("{} is damaged ({why}); remove {} and join again", dir.join(file).display(), dir.display());
    io::Error::new(io::ErrorKind::InvalidData, text)
}

fn read(dir: &Path, file: &str) -> io::Result<Option<String>> {
    let path = dir.join(file);
    match std::fs::read_to_string(&path) {
        Ok(text) => Ok(Some(text)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(crate::context("cannot read", &path)(e)),
    }
}

fn write(dir: &Path, file: &str, text: &str) -> io::Result<()> {
    let path = dir.join(file);
    crate::replace_file(&path, text.as_bytes()).map(drop).map_err(crate::context("cannot write", &path))
}

/// The first label of the machine's host name.
fn machine_name() -> String {
    let uname = rustix::system::uname();
    let name = uname.nodename().to_string_lossy();
    name.split('.').next().unwrap_or_default().to_string()
}

fn join(c: &CentreConfig, urls: Vec<Url>) -> io::Result<Identity> {
    let name = c.name.clone().unwrap_or_else(machine_name);
    let wrong = |text: String| io::Error::new(io::ErrorKind::InvalidInput, text);
    unirdma_ipc::vrnic::check_name("host", &name).map_err(|e| wrong(format!("{e}, with --name")))?;
    let tls = urls[0].tls;
    if !tls && c.token.is_none() {
        // Within this machine the centre believes the name without a certificate.
        write(&c.state, ABOUT, &serde_json::to_string(&About { name: name.clone() })?)?;
        return Ok(Identity { name, urls, trust: Trust::None, state: c.state.clone() });
    }
    let token = c.token.as_deref().map(str::trim).ok_or_else(|| {
        wrong(format!(
            "this host has not joined the fleet of {}; give it a token with --join, which `unirdma control token --role join` makes",
            c.url
        ))
    })?;
    let trust = match tls {
        false => Trust::None,
        true => {
            let pin = token.rsplit('.').next().and_then(dial::fingerprint);
            Trust::pinned(
                pin.ok_or_else(|| wrong("the token of --join is not whole: it ends in `.` and 64 digits".into()))?,
            )
        }
    };
    let key = rcgen::KeyPair::generate().map_err(io::Error::other)?;
    let params = || -> Result<String, rcgen::Error> {
        let mut params = rcgen::CertificateParams::new(vec![name.clone()])?;
        params.distinguished_name = rcgen::DistinguishedName::new();
        params.distinguished_name.push(rcgen::DnType::CommonName, name.as_str());
        params.serialize_request(&key)?.pem()
    };
    let request = params().map_err(io::Error::other)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let joined = runtime.block_on(async {
        let channel = dial::first(&urls, &trust).await?;
        let request = JoinRequest { token: token.into(), host: name.clone(), request };
        let joined = tokio::time::timeout(dial::PATIENCE, HostsClient::new(channel).join(request)).await;
        Ok(joined.map_err(|_| DialError::Timeout)??)
    });
    let refused = |e: DialError| io::Error::other(format!("this host cannot join the fleet of {}: {e}", c.url));
    let joined = joined.map_err(refused)?.into_inner();
    let (certificate, authority) = (joined.certificate, joined.authority);
    let trust = match tls {
        false => Trust::None,
        true => Trust::mutual(&authority, &certificate, &key.serialize_pem()).map_err(refused)?,
    };
    for (file, text) in [(KEY, &key.serialize_pem()), (CERTIFICATE, &certificate), (AUTHORITY, &authority)] {
        write(&c.state, file, text)?;
    }
    write(&c.state, ABOUT, &serde_json::to_string(&About { name: name.clone() })?)?;
    Ok(Identity { name, urls, trust, state: c.state.clone() })
}
