//! Where a fleet's state is kept: records with keys, and how many changes made them. A change is kept as a whole or not at all.

pub(crate) mod etcd;
mod file;

use std::path::Path;
use std::sync::Arc;

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

    /// Keeps a change: the store had the revision before `revision`, and has this one then.
    ///
    /// # Errors
    /// It cannot be kept. Nothing was changed, but for [`StoreError::Away`], after which that is not known.
    async fn commit(&self, revision: u64, writes: &[Write]) -> Result<(), StoreError>;

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
}

/// Opens the store that `--store` names: a file, by default `fleet.redb` in the centre's directory, or `etcd://HOST:PORT[,HOST:PORT...][/PREFIX]`.
///
/// # Errors
/// It cannot be opened, or another centre uses it.
pub fn open(text: Option<&str>, dir: &Path) -> Result<Opened, StoreError> {
    let path = match text.map(|t| (t, t.split_once("://"))) {
        None => dir.join("fleet.redb"),
        Some((_, Some(("etcd", address)))) => return Ok(Opened::Etcd(Arc::new(EtcdStore::open(address, dir)?))),
        Some((_, Some((scheme, _)))) => {
            return Err(StoreError::Broken(format!(
                "`{scheme}://...` is of no kind that this version has; give the path of a file, or etcd://HOST:PORT"
            )));
        }
        Some((path, None)) => path.into(),
    };
    Ok(Opened::File(Arc::new(FileStore::open(&path)?)))
}

#[cfg(test)]
mod tests;
