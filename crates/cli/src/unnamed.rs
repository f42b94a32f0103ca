//! `unirdma run` without `--vrnic`: a vRNIC of the virtual layer that runs or, if none does, of one that is started and
//! ends with its last vRNIC.

use std::fs::File;
use std::io::{self, Read, Seek};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use unirdma_ipc::vrnic::VrnicInfo;
use unirdma_supervisor::admin::{Request, TakeVrnic};
use unirdma_supervisor::{Client, served_by};

use crate::vrnics;

/// Longest time for a virtual layer to start, or to end before the next one starts.
const PATIENCE: Duration = Duration::from_secs(20);
/// Longest time that a command waits at its end for the virtual layer that ends with it.
const PATIENCE_AT_END: Duration = Duration::from_secs(2);
const PAUSE: Duration = Duration::from_millis(10);

/// A vRNIC that was taken. It is given back when the connection is closed.
pub(crate) struct Taken {
    pub client: Client,
    pub info: VrnicInfo,
    /// Process ID of the virtual layer.
    pub host: Option<u32>,
}

/// Takes a vRNIC, and prints which one it is.
///
/// # Errors
/// One line: no virtual layer can be started, or it makes no vRNIC.
pub(crate) fn take(dir: &Path, new: bool, quiet: bool) -> io::Result<Taken> {
    let limit = Instant::now() + PATIENCE;
    let (client, info) = loop {
        let mut client = connect(dir, limit)?;
        match vrnics::ask(&mut client, &Request::VrnicTake(TakeVrnic { new, ..TakeVrnic::default() })) {
            Ok(info) => break (client, info),
            // It has ended with its last vRNIC at this moment.
            Err(e) if vrnics::has_ended(&e) && Instant::now() < limit => std::thread::sleep(PAUSE),
            Err(e) => return Err(e),
        }
    };
    if !quiet {
        let end = match info.temporary {
            true => "it ends with this command",
            false => "nothing used it; --new makes another one",
        };
        eprintln!("unirdma: vRNIC {} ({end})", with_addresses(&info));
    }
    Ok(Taken { client, info, host: served_by(dir) })
}

/// The name of a vRNIC and its addresses.
pub(crate) fn with_addresses(v: &VrnicInfo) -> String {
    let addresses: Vec<String> = v.ips.iter().map(|ip| ip.addr.to_string()).collect();
    format!("{} with address {}", v.name, addresses.join(", "))
}

/// Starts a virtual layer in a directory that nobody else uses, and makes these vRNICs, which end with the connection,
/// and the virtual layer with the last one.
///
/// # Errors
/// One line, as [`take`].
pub(crate) fn start(dir: &Path, all: &[TakeVrnic]) -> io::Result<(Client, Vec<VrnicInfo>)> {
    let mut client = connect(dir, Instant::now() + PATIENCE)?;
    let vrnics = all.iter().map(|take| vrnics::ask(&mut client, &Request::VrnicTake(take.clone())));
    let vrnics = vrnics.collect::<io::Result<_>>()?;
    Ok((client, vrnics))
}

/// Waits for the end of a virtual layer that answers no more, so that nothing of it is left when the command has ended.
pub(crate) fn wait_for_end(dir: &Path, host: u32) {
    let limit = Instant::now() + PATIENCE_AT_END;
    while served_by(dir) == Some(host) && Instant::now() < limit {
        std::thread::sleep(PAUSE);
    }
}

/// Connects to the virtual layer. If none serves the directory, starts one.
fn connect(dir: &Path, limit: Instant) -> io::Result<Client> {
    let mut started: Option<Started> = None;
    loop {
        let error = match Client::connect(dir) {
            Ok(client) => return Ok(client),
            // It is another user's.
            Err(e) if e.kind() == io::ErrorKind::PermissionDenied => return Err(e),
            Err(e) => e,
        };
        let ended = started.as_mut().map(Started::has_ended).transpose()?;
        // Another `unirdma run` may start one at the same time, or one is about to end.
        match (ended, served_by(dir).is_some()) {
            (None, false) => started = Some(Started::start(dir)?),
            (Some(true), false) => return Err(started.map_or(error, Started::error)),
            (Some(true), true) => started = None,
            (Some(false), _) | (None, true) => {}
        }
        if Instant::now() > limit {
            return Err(error);
        }
        std::thread::sleep(PAUSE);
    }
}

/// A virtual layer that this process has started.
struct Started {
    host: Child,
    /// Its output, in memory.
    log: File,
}

impl Started {
    fn start(dir: &Path) -> io::Result<Started> {
        let log = File::from(rustix::fs::memfd_create(c"unirdma", rustix::fs::MemfdFlags::CLOEXEC)?);
        let mut host = Command::new(std::env::current_exe()?);
        host.arg("--dir").arg(dir).args(["host", "--ends-unused"]);
        host.current_dir("/").stdin(Stdio::null()).stdout(Stdio::null()).stderr(log.as_fd().try_clone_to_owned()?);
        // Signals of the terminal are for the command.
        host.process_group(0);
        Ok(Started { host: host.spawn()?, log })
    }

    fn has_ended(&mut self) -> io::Result<bool> {
        Ok(self.host.try_wait()?.is_some())
    }

    /// Its last line.
    fn error(mut self) -> io::Error {
        let mut text = String::new();
        let _ = self.log.rewind().and_then(|()| self.log.read_to_string(&mut text));
        let last = text.lines().last().unwrap_or("it printed nothing").trim_start_matches("unirdma: ");
        io::Error::other(format!("no virtual layer could be started: {last}"))
    }
}
