//! Which fleet a host belongs to, and what it says of its control centre.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// `/var/lib/unirdma` for root, else `$XDG_STATE_HOME/unirdma` or `~/.local/state/unirdma`.
pub fn default_state() -> PathBuf {
    if rustix::process::geteuid().is_root() {
        return "/var/lib/unirdma".into();
    }
    match (std::env::var_os("XDG_STATE_HOME"), std::env::var_os("HOME")) {
        (Some(d), _) => Path::new(&d).join("unirdma"),
        (None, Some(home)) => Path::new(&home).join(".local/state/unirdma"),
        (None, None) => crate::default_dir().join("state"),
    }
}

/// The fleet that this host belongs to.
#[derive(Clone, Debug)]
pub struct CentreConfig {
    /// Such as `https://192.168.7.100:7471`; `http` only for this machine. URLs of several centres are separated by
    /// commas.
    pub url: String,
    /// The token with which it joins. Needed only once.
    pub token: Option<String>,
    /// Its name in the fleet; `None`: the machine's name.
    pub name: Option<String>,
    /// The directory of its key, its certificate and the centre's updates.
    pub state: PathBuf,
}

/// The control centre's state, for people.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
#[allow(missing_docs)]
pub struct CentreInfo {
    pub url: String,
    /// This host's name in the fleet.
    pub host: String,
    pub connected: bool,
    /// For how many seconds it has been connected, or not connected.
    pub seconds: u64,
    /// Why it is not connected.
    pub why: String,
    /// The revision in force. It counts changes of `fleet`.
    pub revision: u64,
    pub fleet: String,
    /// This host's clock minus the centre's, if the centre has sent its time.
    pub clock_ms: Option<i64>,
    /// Deviations from the centre's state, a line each.
    pub problems: Vec<String>,
}
