//! The keeper: a process that stores descriptors and their descriptions for the supervisor, so that they outlive it.
//!
//! It has one thread, reads only the supervisor's messages, and does nothing by itself. Sockets that are open here stay
//! bound, in the order in which the kernel numbers them. If the keeper dies, the supervisor starts another one and
//! stores everything again.

use std::collections::BTreeMap;
use std::io;
use std::ops::Bound::{Excluded, Unbounded};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use unirdma_ipc::connection::Connection;

use crate::process::{self, Child};

/// Time limit for either side.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long the supervisor may be silent.
const LONG: Duration = Duration::from_secs(1 << 30);
/// Version of these messages and of the stored descriptions.
const VERSION: u32 = 3;
/// Name of its socket in the directory of the virtual layer.
pub(crate) const SOCKET: &str = "keeper.sock";

/// An entry. Its descriptors are sent along.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Kept {
    pub key: String,
    pub what: String,
}

#[derive(Debug, Serialize, Deserialize)]
enum Call {
    Hello,
    /// Stores an entry. It replaces an entry with the same key.
    Keep(Kept),
    Forget(String),
    /// Returns the first entry after this key.
    Next(String),
    End,
}

#[derive(Debug, Serialize, Deserialize)]
enum Answer {
    Done,
    /// Version of its messages, version of its program, and its process ID.
    Hello(u32, String, u32),
    Next(Option<Kept>),
}

/// Serves supervisors until one ends it. A supervisor that connects to `door` is served when the one before has
/// disconnected.
///
/// # Errors
/// Errors of `accept(2)`.
pub fn keep(door: &UnixListener) -> io::Result<()> {
    let mut all = BTreeMap::new();
    loop {
        let (socket, _) = door.accept()?;
        let line = Connection::new(socket.into())?;
        loop {
            match serve(&line, &mut all) {
                Ok(true) => {}
                Ok(false) => return Ok(()),
                Err(_) => break,
            }
        }
    }
}

/// Answers one call; false if it was the last one.
fn serve(line: &Connection, all: &mut BTreeMap<String, (String, Vec<OwnedFd>)>) -> io::Result<bool> {
    let (call, fds) = line.receive(LONG)?;
    let ends = matches!(call, Call::End);
    let answer = match call {
        Call::Hello => Answer::Hello(VERSION, env!("CARGO_PKG_VERSION").into(), std::process::id()),
        Call::Keep(Kept { key, what }) => {
            all.insert(key, (what, fds));
            Answer::Done
        }
        Call::Forget(key) => {
            all.remove(&key);
            Answer::Done
        }
        Call::Next(after) => {
            if let Some((key, (what, fds))) = all.range::<str, _>((Excluded(after.as_str()), Unbounded)).next() {
                let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
                let kept = Kept { key: key.clone(), what: what.clone() };
                line.send(&Answer::Next(Some(kept)), &fds, PATIENCE)?;
                return Ok(true);
            }
            Answer::Next(None)
        }
        Call::End => Answer::Done,
    };
    line.send(&answer, &[], PATIENCE)?;
    Ok(!ends)
}

/// The supervisor's side.
pub(crate) struct Keeper {
    line: Connection,
    child: Child,
}

impl Keeper {
    /// Starts a keeper.
    ///
    /// # Errors
    /// One line: why there is none.
    pub fn start(dir: &Path) -> io::Result<Keeper> {
        let path = dir.join(SOCKET);
        let _ = std::fs::remove_file(&path);
        let door = UnixListener::bind(&path).map_err(crate::context("cannot listen on", &path))?;
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600))?;
        let line = Connection::new(UnixStream::connect(&path)?.into())?;
        let child = process::start(&["keeper"], door.into())?;
        let mut keeper = Keeper { line, child };
        keeper.ask(&Call::Hello, &[])?;
        Ok(keeper)
    }

    /// Connects to the keeper of a supervisor that died.
    ///
    /// # Errors
    /// There is none, or it is of another version (`Unsupported`): one line.
    pub fn find(dir: &Path) -> io::Result<Keeper> {
        let socket = UnixStream::connect(dir.join(SOCKET))?;
        let line = Connection::new(socket.into())?;
        line.send(&Call::Hello, &[], PATIENCE)?;
        let (Answer::Hello(version, program, pid), _) = line.receive(PATIENCE)? else { return Err(nonsense()) };
        let child = Child::adopt(pid)?;
        if version == VERSION && program == env!("CARGO_PKG_VERSION") {
            return Ok(Keeper { line, child });
        }
        let text = format!(
            "{} is served by workers of unirdma {program} (keeper: pid {pid}), and this is {}; serve with that version, or end them first",
            dir.display(),
            env!("CARGO_PKG_VERSION")
        );
        Err(io::Error::new(io::ErrorKind::Unsupported, text))
    }

    fn ask(&mut self, call: &Call, fds: &[BorrowedFd<'_>]) -> io::Result<(Answer, Vec<OwnedFd>)> {
        self.line.send(call, fds, PATIENCE)?;
        self.line.receive(PATIENCE)
    }

    /// Stores an entry. It replaces an entry with the same key.
    ///
    /// # Errors
    /// The keeper is gone.
    pub fn keep(&mut self, key: &str, what: String, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        self.ask(&Call::Keep(Kept { key: key.into(), what }), fds).map(drop)
    }

    /// Removes an entry.
    ///
    /// # Errors
    /// The keeper is gone.
    pub fn forget(&mut self, key: &str) -> io::Result<()> {
        self.ask(&Call::Forget(key.into()), &[]).map(drop)
    }

    /// All entries.
    ///
    /// # Errors
    /// The keeper is gone.
    pub fn all(&mut self) -> io::Result<Vec<(Kept, Vec<OwnedFd>)>> {
        let mut all: Vec<(Kept, Vec<OwnedFd>)> = Vec::new();
        loop {
            let after = all.last().map(|(k, _)| k.key.clone()).unwrap_or_default();
            match self.ask(&Call::Next(after), &[])? {
                (Answer::Next(Some(kept)), fds) => all.push((kept, fds)),
                (Answer::Next(None), _) => return Ok(all),
                _ => return Err(nonsense()),
            }
        }
    }

    /// Its process ID.
    pub fn pid(&self) -> u32 {
        self.child.pid()
    }

    /// A descriptor that becomes readable when the keeper has died.
    pub fn pidfd(&self) -> BorrowedFd<'_> {
        self.child.pidfd()
    }

    /// Ends it. Its entries are lost.
    pub fn end(mut self) {
        let _ = self.ask(&Call::End, &[]);
        self.child.kill();
        self.child.wait();
    }
}

fn nonsense() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "the keeper says something else than it was asked")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A keeper in a thread, and a way to call it.
    #[test]
    fn what_is_kept_outlives_who_has_brought_it() {
        let dir = std::env::temp_dir().join(format!("unirdma-keeper-{}", std::process::id()));
        let door = UnixListener::bind(&dir).unwrap();
        let thread = std::thread::spawn(move || keep(&door));
        let connect = || Connection::new(UnixStream::connect(&dir).unwrap().into()).unwrap();
        let ask = |line: &Connection, call: &Call, fds: &[BorrowedFd<'_>]| -> (Answer, Vec<OwnedFd>) {
            line.send(call, fds, PATIENCE).unwrap();
            line.receive(PATIENCE).unwrap()
        };
        let kept = |key: &str, what: &str| Kept { key: key.into(), what: what.into() };
        let first = connect();
        let (ours, theirs) = UnixStream::pair().unwrap();
        ask(&first, &Call::Keep(kept("b", "old")), &[]);
        ask(&first, &Call::Keep(kept("b", "socket")), &[theirs.as_fd()]);
        ask(&first, &Call::Keep(kept("a", "nothing")), &[]);
        ask(&first, &Call::Keep(kept("c", "gone")), &[]);
        ask(&first, &Call::Forget("c".into()), &[]);
        drop((first, theirs));

        let second = connect();
        let (Answer::Next(Some(a)), fds) = ask(&second, &Call::Next(String::new()), &[]) else { panic!() };
        assert_eq!((a, fds.len()), (kept("a", "nothing"), 0));
        let (Answer::Next(Some(b)), fds) = ask(&second, &Call::Next("a".into()), &[]) else { panic!() };
        assert_eq!((b, fds.len()), (kept("b", "socket"), 1));
        assert!(matches!(ask(&second, &Call::Next("b".into()), &[]).0, Answer::Next(None)));
        // The socket stays open while it is stored.
        drop(fds);
        ours.set_nonblocking(true).unwrap();
        let mut byte = [0];
        let read = || io::Read::read(&mut &ours, &mut byte.clone()).map_err(|e| e.kind());
        assert_eq!(read(), Err(io::ErrorKind::WouldBlock));
        ask(&second, &Call::End, &[]);
        thread.join().unwrap().unwrap();
        assert_eq!(io::Read::read(&mut &ours, &mut byte).unwrap(), 0);
        std::fs::remove_file(&dir).unwrap();
    }

    #[test]
    fn a_keeper_of_another_version_is_left_alone() {
        let dir = std::env::temp_dir().join(format!("unirdma-keeper-of-another-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let path = dir.join(SOCKET);
        let ours = env!("CARGO_PKG_VERSION");
        for (version, program) in [(VERSION, "9.9.9"), (VERSION + 1, ours)] {
            let _ = std::fs::remove_file(&path);
            let door = UnixListener::bind(&path).unwrap();
            let other = std::thread::spawn(move || {
                let line = Connection::new(door.accept().unwrap().0.into()).unwrap();
                let (Call::Hello, _) = line.receive(PATIENCE).unwrap() else { panic!() };
                line.send(&Answer::Hello(version, program.into(), std::process::id()), &[], PATIENCE).unwrap();
                // It gets no further call, and is not ended.
                assert!(line.receive::<Call>(PATIENCE).is_err());
            });
            let error = Keeper::find(&dir).err().expect("it is of another version");
            assert_eq!(error.kind(), io::ErrorKind::Unsupported);
            let line = error.to_string();
            assert!(
                line.contains(&format!("workers of unirdma {program} (keeper: pid {})", std::process::id())),
                "{line}"
            );
            assert!(!line.contains('\n') && line.contains("serve with that version, or end them first"), "{line}");
            other.join().unwrap();
        }
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
