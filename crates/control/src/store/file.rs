//! The store in one file. It survives a crash at any moment: a change is answered only when it is on the disk.

use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use redb::{Database, DatabaseError, ReadableDatabase, ReadableTable, TableDefinition, TableError};
use unirdma_fleet::Write;

use super::{Snapshot, Store, StoreError};

const RECORDS: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("records");
const HEAD: TableDefinition<'_, (), u64> = TableDefinition::new("head");

/// Most memory for cached pages of the file, bytes. The whole file is read once; after that a change touches few pages.
const CACHE: usize = 16 << 20;

/// A store in one file.
pub struct FileStore {
    inner: Arc<Inner>,
}

struct Inner {
    path: PathBuf,
    db: Database,
}

impl FileStore {
    /// Opens the file, or makes it. Only its owner may read it, because it contains the secrets of groups.
    ///
    /// # Errors
    /// It cannot be opened, is not a store, or is in use by another process.
    pub fn open(path: &Path) -> Result<FileStore, StoreError> {
        let broken =
            |e: &dyn std::fmt::Display| StoreError::Broken(format!("{} cannot be opened: {e}", path.display()));
        let mut options = std::fs::OpenOptions::new();
        let file = options
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(path)
            .map_err(|e| broken(&e))?;
        match Database::builder().set_cache_size(CACHE).create_file(file) {
            Ok(db) => Ok(FileStore { inner: Arc::new(Inner { path: path.into(), db }) }),
            Err(DatabaseError::DatabaseAlreadyOpen) => Err(StoreError::InUse(path.display().to_string())),
            Err(e) => Err(broken(&e)),
        }
    }

    /// Runs a function that waits for the disk on a thread that may block.
    async fn on_disk<T: Send + 'static>(
        &self,
        f: impl FnOnce(&Inner) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, StoreError> {
        let inner = self.inner.clone();
        tokio::task::spawn_blocking(move || f(&inner)).await.unwrap_or_else(|e| Err(self.inner.broken(e)))
    }
}

impl Inner {
    fn broken(&self, e: impl std::fmt::Display) -> StoreError {
        StoreError::Broken(format!("{}: {e}", self.path.display()))
    }

    fn load(&self) -> Result<Snapshot, StoreError> {
        let txn = self.db.begin_read().map_err(|e| self.broken(e))?;
        let revision = match txn.open_table(HEAD) {
            Ok(head) => head.get(()).map_err(|e| self.broken(e))?.map_or(0, |v| v.value()),
            Err(TableError::TableDoesNotExist(_)) => return Ok(Snapshot::default()),
            Err(e) => return Err(self.broken(e)),
        };
        let table = txn.open_table(RECORDS).map_err(|e| self.broken(e))?;
        let mut records = Vec::new();
        for entry in table.iter().map_err(|e| self.broken(e))? {
            let (key, value) = entry.map_err(|e| self.broken(e))?;
            records.push(Write { key: key.value().into(), value: Some(value.value().into()) });
        }
        Ok(Snapshot { revision, records })
    }

    fn advance(&self, from: u64, to: u64, writes: &[Write]) -> Result<(), StoreError> {
        let txn = self.db.begin_write().map_err(|e| self.broken(e))?;
        {
            let mut head = txn.open_table(HEAD).map_err(|e| self.broken(e))?;
            let has = head.get(()).map_err(|e| self.broken(e))?.map_or(0, |v| v.value());
            if has != from {
                return Err(StoreError::Moved { has, expected: from });
            }
            head.insert((), to).map_err(|e| self.broken(e))?;
            let mut table = txn.open_table(RECORDS).map_err(|e| self.broken(e))?;
            for w in writes {
                let done = match &w.value {
                    Some(value) => table.insert(w.key.as_str(), value.as_slice()),
                    None => table.remove(w.key.as_str()),
                };
                done.map_err(|e| self.broken(e))?;
            }
        }
        txn.commit().map_err(|e| self.broken(e))
    }
}

#[tonic::async_trait]
impl Store for FileStore {
    async fn load(&self) -> Result<Snapshot, StoreError> {
        self.on_disk(Inner::load).await
    }

    async fn advance(&self, from: u64, to: u64, writes: &[Write]) -> Result<(), StoreError> {
        let writes = writes.to_vec();
        self.on_disk(move |inner| inner.advance(from, to, &writes)).await
    }

    fn name(&self) -> String {
        self.inner.path.display().to_string()
    }
}
