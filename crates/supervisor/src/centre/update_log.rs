//! The centre's updates on disk, in a file to which each update is appended. When the file has grown to several times
//! its necessary size, it is written anew. If the machine stopped in the middle of writing an update, that update is
//! ignored.
//!
//! ```text
//! "uRDMAfl1" | length, 4 bytes | CRC-32 of the message | the message, an Update (protobuf) | length | ...
//! ```
//!
//! Numbers are little-endian. The first update is a whole one.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use prost::Message;
use unirdma_fleet::v1::Update;

const MAGIC: &[u8; 8] = b"uRDMAfl1";
const FILE: &str = "fleet.log";
/// The file may grow to `TIMES` times its necessary size plus `SLACK` bytes before it is written anew.
const SLACK: u64 = 1 << 20;
const TIMES: u64 = 3;

/// The file.
pub(super) struct UpdateLog {
    path: PathBuf,
    /// Open for appending; `None`: the file must be written anew.
    file: Option<File>,
    bytes: u64,
    /// Its size when it was written anew, or opened.
    needed: u64,
}

impl UpdateLog {
    /// Opens the file in a directory, and reads its updates.
    ///
    /// # Errors
    /// It cannot be read: one line.
    pub fn open(dir: &Path) -> io::Result<(UpdateLog, Vec<Update>)> {
        let path = dir.join(FILE);
        let bytes = match std::fs::read(&path) {
            Ok(bytes) => bytes,
            Err(e) if e.kind() == io::ErrorKind::NotFound => Vec::new(),
            Err(e) => return Err(crate::context("cannot read", &path)(e)),
        };
        let (updates, good) = parse(&bytes);
        if good < bytes.len() {
            tracing::warn!("{} is whole up to byte {good} of {}; the rest is left out", path.display(), bytes.len());
        }
        // Updates behind an unreadable part could not be read, so nothing is appended to it.
        let whole = good == bytes.len() && good > 0;
        let file = whole.then(|| File::options().append(true).open(&path)).transpose();
        let file = file.map_err(crate::context("cannot write", &path))?;
        let length = bytes.len() as u64;
        Ok((UpdateLog { path, file, bytes: length, needed: length }, updates))
    }

    /// Appends an update. `all` is the whole state after it, as one update.
    ///
    /// # Errors
    /// One line, for instance that the disk is full. Then the next call writes the whole state.
    pub fn add(&mut self, update: &Update, all: impl FnOnce() -> Update) -> io::Result<()> {
        let record = record(update);
        let small = self.bytes + record.len() as u64 <= TIMES * self.needed + SLACK;
        let done = match self.file.as_mut().filter(|_| small && !update.whole) {
            Some(file) => file.write_all(&record),
            None => self.write(&all()),
        };
        match done {
            Ok(()) => {
                self.bytes += record.len() as u64;
                Ok(())
            }
            Err(e) => {
                // The file may end in the middle of an update.
                self.file = None;
                Err(crate::context("what the control centre says cannot be kept: cannot write", &self.path)(e))
            }
        }
    }

    /// Writes the whole state into a new file, which replaces the old one.
    fn write(&mut self, all: &Update) -> io::Result<()> {
        let bytes = [&MAGIC[..], &record(all)].concat();
        self.file = Some(crate::replace_file(&self.path, &bytes)?);
        (self.bytes, self.needed) = (bytes.len() as u64, bytes.len() as u64);
        Ok(())
    }
}

fn record(update: &Update) -> Vec<u8> {
    let bytes = update.encode_to_vec();
    let (length, crc) = (bytes.len() as u32, crc32fast::hash(&bytes));
    [&length.to_le_bytes()[..], &crc.to_le_bytes(), &bytes].concat()
}

/// The updates at the beginning of the bytes, and the number of bytes that they take.
fn parse(bytes: &[u8]) -> (Vec<Update>, usize) {
    let mut updates = Vec::new();
    let Some(mut rest) = bytes.strip_prefix(MAGIC) else { return (updates, 0) };
    while let Some((head, after)) = rest.split_first_chunk::<8>() {
        let [a, b, c, d, e, f, g, h] = *head;
        let (length, crc) = (u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, g, h]));
        let Some((message, after)) = after.split_at_checked(length as usize) else { break };
        let Some(update) = Some(message).filter(|m| crc32fast::hash(m) == crc).and_then(|m| Update::decode(m).ok())
        else {
            break;
        };
        updates.push(update);
        rest = after;
    }
    (updates, bytes.len() - rest.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn update(revision: u64, whole: bool) -> Update {
        Update { fleet: "f".into(), revision, whole, ..Update::default() }
    }

    fn dir(name: &str) -> PathBuf {
        let dir = std::env::temp_dir().join(format!("unirdma-kept-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        dir
    }

    #[test]
    fn what_was_kept_is_read_again_and_a_torn_end_is_left_out() {
        let dir = dir("torn");
        let (mut kept, nothing) = UpdateLog::open(&dir).unwrap();
        assert!(nothing.is_empty());
        let all: Vec<Update> = (1..=5).map(|i| update(i, i == 1)).collect();
        for u in &all {
            kept.add(u, || u.clone()).unwrap();
        }
        drop(kept);
        let bytes = std::fs::read(dir.join(FILE)).unwrap();
        assert_eq!(UpdateLog::open(&dir).unwrap().1, all);
        for cut in 0..bytes.len() {
            let (updates, good) = parse(&bytes[..cut]);
            assert!(updates == all[..updates.len()] && good <= cut && updates.len() < 5);
        }
        std::fs::write(dir.join(FILE), &bytes[..bytes.len() - 1]).unwrap();
        let (mut kept, updates) = UpdateLog::open(&dir).unwrap();
        assert_eq!(updates, all[..4]);
        // The next update is not appended behind the unreadable part.
        kept.add(&update(9, false), || update(9, true)).unwrap();
        assert_eq!(UpdateLog::open(&dir).unwrap().1, [update(9, true)]);
        let mut wrong = bytes.clone();
        wrong[20] ^= 1;
        assert!(parse(&wrong).0.is_empty() && parse(b"something else").1 == 0);
        std::fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn the_file_is_written_anew_when_it_has_grown_and_a_full_disk_is_one_line() {
        let dir = dir("grown");
        let (mut kept, _) = UpdateLog::open(&dir).unwrap();
        kept.add(&update(1, true), || update(1, true)).unwrap();
        let gone = unirdma_fleet::agent::Key::Peer("p".into()).message(false);
        let large = Update { gone: vec![gone; 10_000], ..update(2, false) };
        let mut longest = 0;
        for _ in 0..60 {
            kept.add(&large, || update(2, true)).unwrap();
            longest = longest.max(std::fs::metadata(dir.join(FILE)).unwrap().len());
        }
        assert!((SLACK / 2..2 * SLACK).contains(&longest), "{longest}");
        kept.file = Some(File::options().write(true).open("/dev/full").unwrap());
        let e = kept.add(&update(3, false), || update(3, true)).unwrap_err().to_string();
        assert!(
            e.starts_with("what the control centre says cannot be kept: cannot write") && e.contains("No space"),
            "{e}"
        );
        kept.add(&update(4, false), || update(4, true)).unwrap();
        assert_eq!(UpdateLog::open(&dir).unwrap().1, [update(4, true)]);
        std::fs::remove_dir_all(dir).unwrap();
    }
}
