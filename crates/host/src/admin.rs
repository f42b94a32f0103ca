//! The administration socket: one JSON line a request, one a response; a request may carry a descriptor.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

use serde::{Deserialize, Serialize};

use unirdma_device::HoldTimes;

use crate::centre::CentreInfo;
use crate::confine::InForce;
use crate::fdpass;
pub use crate::network::{Hidden, RulesInfo, WireInfo};
use crate::seal::SealInfo;
use crate::vrnic::{AddVrnic, IpNet, SetHeld, SetShare, VrnicInfo};

/// What may be asked.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "kebab-case")]
#[allow(missing_docs)]
pub enum Request {
    VrnicAdd(AddVrnic),
    VrnicList,
    VrnicShow {
        name: String,
    },
    VrnicRemove {
        name: String,
        force: bool,
    },
    /// Gives a vRNIC another part of the virtual layer, while programs run.
    VrnicSet {
        name: String,
        share: SetShare,
        /// Its interface may send with any IP address, or not any more.
        #[serde(default)]
        allow_spoof: Option<bool>,
        #[serde(default)]
        held: SetHeld,
    },
    /// Sets the link of a vRNIC up or down.
    VrnicLink {
        name: String,
        up: bool,
    },
    /// Gives a vRNIC an address, or takes one away, while programs run.
    VrnicAddress {
        name: String,
        ip: IpNet,
        add: bool,
    },
    GroupAdd {
        name: String,
        /// Its worker's share of the processors: 1 to [`MAX_GROUP_WEIGHT`](crate::confine::MAX_GROUP_WEIGHT).
        #[serde(default)]
        weight: Option<u32>,
        /// The file that comes along has its secret.
        #[serde(default)]
        secret: bool,
    },
    GroupSet {
        name: String,
        #[serde(default)]
        weight: Option<u32>,
        /// The secret is one of the two groups, for packets between them.
        #[serde(default)]
        with: Option<String>,
        #[serde(default)]
        secret: Option<SecretChange>,
    },
    GroupList,
    /// The rules between groups that are in force here.
    RuleList,
    GroupRemove {
        name: String,
    },
    /// Puts the interface whose descriptor comes along into the vRNIC's network, for as long as the
    /// connection stays open.
    Attach {
        name: String,
    },
    /// The first process of a container of this vRNIC is the one whose pidfd comes along, for as long as the connection stays
    /// open.
    Container {
        name: String,
    },
    /// Takes this connection's interface and container out again. The vRNIC is free for another one when this is answered.
    Detach,
    /// Sends packets as pcap records, one a message, to the socket whose descriptor comes along, for as long as the
    /// connection stays open.
    Capture {
        vrnic: Option<String>,
        /// Most bytes of each packet.
        snap: u32,
    },
    /// Ends this connection's capture.
    CaptureStop,
    Status,
}

/// What becomes of the secrets of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SecretChange {
    /// The file that comes along has a new one to send with. Those before it are taken on.
    File,
    /// Only the one to send with is taken any more.
    ForgetOld,
    /// There is none any more.
    None,
}

/// A group and how many vRNICs it has.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct GroupInfo {
    pub name: String,
    pub vrnics: usize,
    /// Its number between hosts, if it has one.
    #[serde(default)]
    pub vni: Option<u32>,
    /// Its worker's share of the processors, in hundredths of the usual one.
    pub weight: u32,
    /// Why that does not count.
    #[serde(default)]
    pub weight_lacks: Option<String>,
    /// Number of the secret that it sends with, if it has one.
    #[serde(default)]
    pub secret: Option<u8>,
}

/// The virtual layer itself.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct StatusInfo {
    pub pid: u32,
    pub version: String,
    pub dir: String,
    pub vrnics: usize,
    pub sessions: usize,
    /// How long the locks of the workers' RNICs were held; the largest of each.
    #[serde(default)]
    pub rnic_held: HoldTimes,
    /// The workers, one for each group.
    #[serde(default)]
    pub workers: Vec<WorkerInfo>,
    /// What the supervisor may not do.
    #[serde(default)]
    pub confinement: InForce,
    /// The network, if it was asked for.
    pub wire: Option<WireInfo>,
    /// The control centre, if this host is of a fleet.
    #[serde(default)]
    pub centre: Option<CentreInfo>,
}

/// The worker of a group.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct WorkerInfo {
    pub group: String,
    /// Its process; `None` while it is being started anew.
    pub pid: Option<u32>,
    pub vrnics: usize,
    pub sessions: usize,
    /// How often it has died and was started anew.
    pub restarts: u64,
    /// The thread that is stuck, and for how long.
    pub stuck: Option<String>,
    /// Memory of its own, bytes: neither its program's, which all share, nor that of its tenants' files.
    pub memory: u64,
    /// How long the lock of its RNIC was held.
    pub rnic_held: HoldTimes,
    /// What it may not do.
    pub confinement: InForce,
    /// The secrets of its group, and what was dropped without.
    #[serde(default)]
    pub seal: SealInfo,
}

/// What comes back.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[allow(missing_docs)]
pub enum Response {
    Done,
    Vrnic(Box<VrnicInfo>),
    Vrnics(Vec<VrnicInfo>),
    Groups(Vec<GroupInfo>),
    Rules(RulesInfo),
    Status(Box<StatusInfo>),
    /// A capture has ended; this many packets came too fast for it.
    Captured {
        lost: u64,
    },
    /// One line that says what is wrong and what to do.
    Error(String),
}

/// Longest request line, bytes.
const MAX_LINE: usize = 64 << 10;

/// Opens the socket, for its owner only.
pub(crate) fn listen(path: &Path) -> io::Result<UnixListener> {
    let _ = std::fs::remove_file(path);
    let l = UnixListener::bind(path)
        .map_err(|e| io::Error::new(e.kind(), format!("cannot listen on {}: {e}", path.display())))?;
    std::fs::set_permissions(path, PermissionsExt::from_mode(0o600))?;
    Ok(l)
}

/// Serves one connection: hands each request to `handle`, which returns `None` when the host stops.
pub(crate) fn serve(mut stream: UnixStream, mut handle: impl FnMut(Request, Option<OwnedFd>) -> Option<Response>) {
    let mut line = Vec::new();
    let mut fd = None;
    loop {
        while !line.contains(&b'\n') {
            let mut buf = [0; 4096];
            match fdpass::receive(stream.as_fd(), &mut buf) {
                Ok((n @ 1.., came)) if line.len() + n <= MAX_LINE => {
                    line.extend_from_slice(&buf[..n]);
                    fd = came.into_iter().next_back().or(fd);
                }
                _ => return,
            }
        }
        let end = line.iter().position(|&b| b == b'\n').map_or(line.len(), |i| i + 1);
        let request: Vec<u8> = line.drain(..end).collect();
        let response = match serde_json::from_slice(&request) {
            Ok(r) => match handle(r, fd.take()) {
                Some(r) => r,
                None => return,
            },
            Err(e) => Response::Error(format!("malformed request: {e}")),
        };
        let Ok(mut bytes) = serde_json::to_vec(&response) else { return };
        bytes.push(b'\n');
        if stream.write_all(&bytes).is_err() {
            return;
        }
    }
}

/// A connection to the virtual layer's administration socket.
pub struct Client(BufReader<UnixStream>);

impl Client {
    /// Connects to the virtual layer that serves `dir`.
    ///
    /// # Errors
    /// One line that says what to do.
    pub fn connect(dir: &Path) -> io::Result<Self> {
        crate::check_fallback(dir)?;
        let path = dir.join(crate::ADMIN_SOCKET);
        let stream = UnixStream::connect(&path).map_err(|e| {
            let hint = match e.kind() {
                io::ErrorKind::PermissionDenied => {
                    "it belongs to another user; run as that user, or serve your own with `unirdma host`"
                }
                _ => "start one with `unirdma host`, or name its directory with --dir",
            };
            io::Error::new(e.kind(), format!("no virtual layer answers in {} ({e}): {hint}", dir.display()))
        })?;
        Ok(Client(BufReader::new(stream)))
    }

    /// Asks, with a descriptor if one is given.
    ///
    /// # Errors
    /// The virtual layer's own line, or that it is gone.
    pub fn ask(&mut self, request: &Request, fd: Option<BorrowedFd<'_>>) -> io::Result<Response> {
        let mut bytes = serde_json::to_vec(request)?;
        bytes.push(b'\n');
        fdpass::send(self.0.get_ref().as_fd(), &bytes, fd.as_slice())?;
        let mut line = String::new();
        Read::by_ref(&mut self.0).take(1 << 26).read_line(&mut line)?;
        if line.is_empty() {
            return Err(io::Error::new(io::ErrorKind::ConnectionAborted, "the virtual layer has stopped"));
        }
        match serde_json::from_str(&line)? {
            Response::Error(e) => Err(io::Error::other(e)),
            r => Ok(r),
        }
    }
}
