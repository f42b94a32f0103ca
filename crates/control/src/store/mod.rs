//! Storage of a fleet's state: records with keys, and the number of changes that made them. A change is kept as a whole
//! or not at all.

pub(crate) mod etcd;
mod file;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use etcd::News;
use unirdma_fleet::Write;

pub use etcd::EtcdStore;
pub use file::FileStore;

/// The content of a store.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Snapshot {
    /// The number of changes that made it; 0: there is no fleet yet.
    pub revision: u64,
    /// All records, in the order of their keys.
    pub records: Vec<Write>,
}

/// Why a store cannot do what it was asked for.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// Another process uses the store.
    #[error("{0} is in use by another `unirdma control`; one centre runs on one store in a file")]
    InUse(String),
    /// A centre runs on the store.
    #[error(
        "the centre at {url} runs on {name}; end all centres of the fleet first, and wait 5 s if one of them was killed"
    )]
    Runs {
        /// The store's name.
        name: String,
        /// The URL of one of the centres.
        url: String,
    },
    /// The store has another revision than the centre expected.
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
    /// The store does not answer. It may have kept the change.
    #[error("the store {name} does not answer: {why}")]
    Away {
        /// The store's name.
        name: String,
        /// The error.
        why: String,
    },
    /// The store cannot be read or written.
    #[error("the store {0}")]
    Broken(String),
}

/// A store of a fleet's state.
#[tonic::async_trait]
pub trait Store: Send + Sync {
    /// All records, and the revision.
    ///
    /// # Errors
    /// The store cannot be read.
    async fn load(&self) -> Result<Snapshot, StoreError>;

    /// Keeps the writes that lead from revision `from` to a later revision `to`.
    ///
    /// # Errors
    /// The writes cannot be kept. Nothing was changed, except perhaps after [`StoreError::Away`].
    async fn advance(&self, from: u64, to: u64, writes: &[Write]) -> Result<(), StoreError>;

    /// Keeps one change, which leads from the revision before to `revision`.
    ///
    /// # Errors
    /// As [`Store::advance`].
    async fn commit(&self, revision: u64, writes: &[Write]) -> Result<(), StoreError> {
        self.advance(revision.saturating_sub(1), revision, writes).await
    }

    /// The store's name, without passwords.
    fn name(&self) -> String;
}

/// A store that was opened.
#[derive(Clone)]
pub enum Opened {
    /// A file, for one centre.
    File(Arc<FileStore>),
    /// etcd, for several centres.
    Etcd(Arc<EtcdStore>),
}

impl Opened {
    /// The store as a trait object.
    pub fn store(&self) -> &dyn Store {
        match self {
            Opened::File(s) => &**s,
            Opened::Etcd(s) => &**s,
        }
    }

    /// All records, provided that no centre runs on the store.
    ///
    /// # Errors
    /// A centre runs on it, or it cannot be read.
    pub async fn load_at_rest(&self) -> Result<Snapshot, StoreError> {
        match self {
            // Only one process can have the file open.
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

/// Opens the store that `--store` names: a file, by default `fleet.redb` in the centre's directory, or
/// `etcd://HOST:PORT[,HOST:PORT...][/PREFIX]`.
///
/// # Errors
/// It cannot be opened, or another process uses it.
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

/// The path of the store, if it is a file.
pub fn path(text: Option<&str>, dir: &Path) -> Option<PathBuf> {
    match text {
        None => Some(dir.join("fleet.redb")),
        Some(text) => (!text.contains("://")).then(|| text.into()),
    }
}

#[cfg(test)]
mod tests;
