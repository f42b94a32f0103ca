//! Where a fleet's state is kept: records with keys, and how many changes made them. A change is kept as a whole or not at all.

mod file;

use std::path::Path;

use unirdma_fleet::Write;

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
    #[error("the store is at revision {has}, not at {expected}: another centre changed it; start this one anew")]
    Moved {
        /// The revision that it has.
        has: u64,
        /// The revision that the change was made for.
        expected: u64,
    },
    /// It cannot be read or written.
    #[error("the store {0}")]
    Broken(String),
}

/// A store of a fleet's state. Its calls may block: they are made on a thread that may.
pub trait Store: Send + Sync {
    /// All that it has.
    ///
    /// # Errors
    /// It cannot be read.
    fn load(&self) -> Result<Snapshot, StoreError>;

    /// Keeps a change: the store had the revision before `revision`, and has this one then.
    ///
    /// # Errors
    /// It cannot be kept. Nothing was changed.
    fn commit(&self, revision: u64, writes: &[Write]) -> Result<(), StoreError>;

    /// What it is called, without what is secret.
    fn name(&self) -> String;
}

/// Opens the store that `--store` names: a file, or by default the file `fleet.redb` in the centre's directory.
///
/// # Errors
/// It cannot be opened, or another centre uses it.
pub fn open(text: Option<&str>, dir: &Path) -> Result<Box<dyn Store>, StoreError> {
    let path = match text {
        None => dir.join("fleet.redb"),
        Some(text) if text.contains("://") => {
            let shown = text.split("://").next().unwrap_or_default();
            return Err(StoreError::Broken(format!(
                "`{shown}://...` is of no kind that this version has; give the path of a file"
            )));
        }
        Some(text) => text.into(),
    };
    Ok(Box::new(FileStore::open(&path)?))
}

#[cfg(test)]
mod tests;
