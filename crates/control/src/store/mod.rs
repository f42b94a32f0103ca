//! Where a fleet's state is kept: records with keys, and how many changes made them. A change is kept as a whole or not at all.

pub(crate) mod etcd;
mod file;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use etcd::News;
use unirdma_fleet::Write;

pub use etcd::EtcdStore;
pub use file::FileStore;

/// What a store has.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Snapshot {
    /// How many changes made it; 0: there is no fleet yet.
    pub revision: u64,
    /// All records, in the order of their keys.
    pub records: Vec<Write>,
}

/// Why a store cannot do what it was asked for.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// Another centre uses it.
    #[error("{0} is in use by another `unirdma control`; one centre runs on one store in a file")]
    InUse(String),
    /// Centres run on it.
    #[error(
        "the centre at {url} runs on {name}; end all centres of the fleet first, and wait 5 s if one of them was killed"
    )]
    Runs {
        /// What it is called.
        name: String,
        /// Where one of them is reached.
        url: String,
    },
    /// It has another revision than the centre believed.
    #[error("the store is at revision {has}, not at {expected}: another centre changed it")]
    Moved {
        /// The revision that it has.
        has: u64,
        /// The revision that the change was made for.
        expected: u64,
    },
    /// Another centre was elected to make changes.
    #[error("another centre allocates by now")]
    Deposed,
    /// It does not answer. A change may have been kept all the same.
    #[error("the store {name} does not answer: {why}")]
    Away {
        /// What it is called.
        name: String,
        /// What happened.
        why: String,
    },
    /// It cannot be read or written.
    #[error("the store {0}")]
    Broken(String),
}

/// A store of a fleet's state.
#[tonic::async_trait]
pub trait Store: Send + Sync {
    /// All that it has.
    ///
    /// # Errors
    /// It cannot be read.
    async fn load(&self) -> Result<Snapshot, StoreError>;

    /// Keeps what leads from one revision to a later one. The store has `from` until then, and `to` afterwards.
    ///
    /// # Errors
    /// It cannot be kept. Nothing was changed, but for [`StoreError::Away`], after which that is not known.
    async fn advance(&self, from: u64, to: u64, writes: &[Write]) -> Result<(), StoreError>;

    /// Keeps a change: the store had the revision before `revision`, and has this one then.
    ///
    /// # Errors
    /// As [`Store::advance`].
    async fn commit(&self, revision: u64, writes: &[Write]) -> Result<(), StoreError> {
        self.advance(revision.saturating_sub(1), revision, writes).await
    }

    /// What it is called, without what is secret.
    fn name(&self) -> String;
}

/// A store that was opened.
#[derive(Clone)]
pub enum Opened {
    /// Of one centre.
    File(Arc<FileStore>),
    /// Of several centres.
    Etcd(Arc<EtcdStore>),
}

impl Opened {
    /// What every store does.
    pub fn store(&self) -> &dyn Store {
        match self {
            Opened::File(s) => &**s,
            Opened::Etcd(s) => &**s,
        }
    }

    /// All that it has, if no centre runs on it.
    ///
    /// # Errors
    /// A centre does, or it cannot be read.
    pub async fn load_at_rest(&self) -> Result<Snapshot, StoreError> {
        match self {
            // Whoever has it open is the only one.
            Opened::File(s) => s.load().await,
            Opened::Etcd(s) => {
                let (_, snapshot, news) = s.read().await?;
                let runs = |n| if let News::Centre { url, .. } = n { url } else { None };
                match news.into_iter().find_map(runs) {
                    Some(url) => Err(StoreError::Runs { name: s.name(), url }),
                    None => Ok(snapshot),
                }
            }
        }
    }
}

/// Opens the store that `--store` names: a file, by default `fleet.redb` in the centre's directory, or `etcd://HOST:PORT[,HOST:PORT...][/PREFIX]`.
///
/// # Errors
/// It cannot be opened, or another centre uses it.
pub fn open(text: Option<&str>, dir: &Path) -> Result<Opened, StoreError> {
    if let Some(path) = path(text, dir) {
        return Ok(Opened::File(Arc::new(FileStore::open(&path)?)));
    }
    match text.and_then(|t| t.split_once("://")) {
        Some(("etcd", address)) => Ok(Opened::Etcd(Arc::new(EtcdStore::open(address, dir)?))),
        other => Err(StoreError::Broken(format!(
            "`{}://...` is of no kind that this version has; give the path of a file, or etcd://HOST:PORT",
            other.unwrap_or_default().0
        ))),
    }
}

/// Where a store is, if `--store` names one in a file.
pub fn path(text: Option<&str>, dir: &Path) -> Option<PathBuf> {
    match text {
        None => Some(dir.join("fleet.redb")),
        Some(text) => (!text.contains("://")).then(|| text.into()),
    }
}

#[cfg(test)]
mod tests;
