//! The log of leases as a file in the virtual layer's directory.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use unirdma_vf::log::{Kept, Record, encode, read};

/// The file's name in the directory.
pub(super) const NAME: &str = "vf-leases";
/// Size from which the log is written anew, with the present leases only.
const MOST_BYTES: u64 = 1 << 20;

/// A log to which records are appended.
pub(super) struct LogFile {
    path: PathBuf,
    file: File,
    bytes: u64,
}

impl LogFile {
    /// The log of the last supervisor; without one, an empty log.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn read(dir: &Path) -> io::Result<Kept> {
        match fs::read(dir.join(NAME)) {
            Ok(bytes) => Ok(read(&bytes)),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Kept::default()),
            Err(e) => Err(e),
        }
    }

    /// Writes a log with these records in place of the one that was there.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn create(dir: &Path, records: &[Record]) -> io::Result<LogFile> {
        LogFile::replace(dir.join(NAME), records)
    }

    fn replace(path: PathBuf, records: &[Record]) -> io::Result<LogFile> {
        let bytes: Vec<u8> = records.iter().flat_map(encode).collect();
        let file = crate::replace_file(&path, &bytes)?;
        Ok(LogFile { path, file, bytes: bytes.len() as u64 })
    }

    /// Appends records. `all` gives the records of a whole log, for one that has grown.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn append(&mut self, records: &[Record], all: impl FnOnce() -> Vec<Record>) -> io::Result<()> {
        if records.is_empty() {
            return Ok(());
        }
        if self.bytes > MOST_BYTES {
            *self = LogFile::replace(self.path.clone(), &all())?;
            return Ok(());
        }
        let bytes: Vec<u8> = records.iter().flat_map(encode).collect();
        let done = self.file.write_all(&bytes).and_then(|()| self.file.sync_data());
        // After an error the next append writes the whole log.
        self.bytes = if done.is_ok() { self.bytes + bytes.len() as u64 } else { u64::MAX };
        done
    }
}

#[cfg(test)]
mod tests {
    use unirdma_vf::LeaseId;

    use super::super::tree::tests::Temporary;
    use super::*;

    #[test]
    fn records_are_read_again_and_a_long_log_is_written_anew() {
        let tree = Temporary::new();
        let dir = tree.0.sys.parent().unwrap();
        let returned = |n| Record::Returned(LeaseId(n));
        assert_eq!(LogFile::read(dir).unwrap(), Kept::default());
        let mut log = LogFile::create(dir, &[returned(1)]).unwrap();
        log.append(&[returned(2), returned(3)], Vec::new).unwrap();
        assert_eq!(LogFile::read(dir).unwrap().records, [returned(1), returned(2), returned(3)]);
        log.bytes = MOST_BYTES + 1;
        log.append(&[returned(4)], || vec![returned(4)]).unwrap();
        log.append(&[returned(5)], Vec::new).unwrap();
        assert_eq!(LogFile::read(dir).unwrap().records, [returned(4), returned(5)]);
    }
}
