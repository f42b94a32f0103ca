//! The administration socket. A request is one line of JSON, and so is a response. A request may carry a file
//! descriptor.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt, chown};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};
use serde::{Deserialize, Serialize};

use unirdma_confine::InForce;
use unirdma_device::HoldTimes;
use unirdma_ipc::counters::SealInfo;
use unirdma_ipc::fdpass;
use unirdma_ipc::vrnic::{AddVrnic, IpNet, SetHeld, SetShare, VrnicInfo};

use crate::centre_config::CentreInfo;
pub use crate::network::{Hidden, RulesInfo, WireInfo};

/// A request.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "kebab-case")]
#[allow(missing_docs)]
pub enum Request {
    VrnicAdd(AddVrnic),
    /// Gives the connection a vRNIC until it is closed.
    VrnicTake(TakeVrnic),
    VrnicList,
    /// The names of all vRNICs and groups. No worker is asked.
    Names,
    VrnicShow {
        name: String,
    },
    /// Like `VrnicShow`, but without what grows by what its programs do: QPs, MRs, listeners, rules.
    VrnicFigures {
        name: String,
    },
    VrnicRemove {
        name: String,
        force: bool,
    },
    /// Changes a vRNIC's weight, limits or permissions, while programs run.
    VrnicSet {
        name: String,
        share: SetShare,
        /// Whether its interface may send with any IP address.
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
    /// Adds or removes an address of a vRNIC, while programs run.
    VrnicAddress {
        name: String,
        ip: IpNet,
        add: bool,
    },
    GroupAdd {
        name: String,
        /// Its worker's share of the processors: 1 to [`MAX_GROUP_WEIGHT`](unirdma_confine::MAX_GROUP_WEIGHT).
        #[serde(default)]
        weight: Option<u32>,
        /// The file sent along contains the group's secret.
        #[serde(default)]
        secret: bool,
        /// Its VLAN on real RNICs.
        #[serde(default)]
        vlan: Option<u16>,
    },
    GroupSet {
        name: String,
        #[serde(default)]
        weight: Option<u32>,
        /// The other group, if the secret is for packets between two groups.
        #[serde(default)]
        with: Option<String>,
        #[serde(default)]
        secret: Option<SecretChange>,
        /// Its VLAN on real RNICs; 0: none.
        #[serde(default)]
        vlan: Option<u16>,
    },
    GroupList,
    /// The rules between groups in force on this host.
    RuleList,
    GroupRemove {
        name: String,
    },
    /// Connects the interface whose descriptor is sent along to the vRNIC's network, until the connection is closed.
    Attach {
        name: String,
    },
    /// Registers the first process of a container of this vRNIC, whose pidfd is sent along, until the connection is
    /// closed.
    Container {
        name: String,
    },
    /// Undoes this connection's `Attach`, `Container` and `VrnicTake`. After the response the vRNIC is free for another
    /// one.
    Detach,
    /// Sends packets to the socket whose descriptor is sent along, as pcap records, one in each message, until the
    /// connection is closed.
    Capture {
        vrnic: Option<String>,
        /// Most bytes of each packet.
        snap: u32,
    },
    /// Ends this connection's capture.
    CaptureStop,
    /// The VFs of real RNICs.
    VfList,
    /// Takes a PF (`NETDEV`) or a VF (`NETDEV/N`) out of the pool's use, or back.
    VfDrain {
        part: String,
        on: bool,
    },
    Status,
}

/// A vRNIC to take: one of the default group that nothing uses or, if there is none, one that is made for the
/// connection and removed with it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct TakeVrnic {
    /// One that is made in any case.
    pub new: bool,
    /// The name of one that is made; `None`: any.
    pub name: Option<String>,
    /// The group of one that is made; `None`: the default group.
    pub group: Option<String>,
    /// The addresses of one that is made; if empty, the next free 10.77.x.y is taken.
    pub ips: Vec<IpNet>,
}

/// A change of the secrets of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SecretChange {
    /// The file sent along contains a new secret to send with. Earlier secrets are still accepted.
    File,
    /// Only the secret to send with is still accepted.
    ForgetOld,
    /// The group has no secret any more.
    None,
}

/// A group, and the number of its vRNICs.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct GroupInfo {
    pub name: String,
    pub vrnics: usize,
    /// Its number between hosts, if it has one.
    #[serde(default)]
    pub vni: Option<u32>,
    /// Its worker's share of the processors, in hundredths of the default share.
    pub weight: u32,
    /// Why the weight has no effect; `None`: it has.
    #[serde(default)]
    pub weight_lacks: Option<String>,
    /// Number of the secret that it sends with; `None`: it has no secret.
    #[serde(default)]
    pub secret: Option<u8>,
    /// Its VLAN on real RNICs; 0: none.
    #[serde(default)]
    pub vlan: u16,
}

/// Names, in ascending order.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct Names {
    pub vrnics: Vec<String>,
    pub groups: Vec<String>,
}

/// The pool of VFs.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct VfsInfo {
    pub vfs: Vec<VfInfo>,
    /// Requests that wait for a VF.
    pub waiting: usize,
    /// PFs and VFs that take no new leases.
    pub drained: Vec<String>,
    /// Reasons why VFs are not in the pool, and what to do.
    pub notices: Vec<String>,
    /// Counters of answers to programs.
    #[serde(default)]
    pub answers: VfAnswers,
}

/// Counters of answers to programs that asked for VFs, since the supervisor's start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VfAnswers {
    /// They had to wait, because no VF was free.
    pub waits: u64,
    /// They have the software RNIC.
    pub soft: u64,
    /// They had a VF that is gone.
    pub evicted: u64,
    /// They were refused, for each of [`VF_REFUSALS`].
    pub refusals: [u64; VF_REFUSALS.len()],
}

/// Reasons for refusals: no VF is free; none has become free in time; there are too many programs of the vRNIC or of
/// the host; the VF could not be set up; the vRNIC cannot have a VF of this pool.
pub const VF_REFUSALS: [&str; 5] = ["dry", "timeout", "limit", "setup", "unfit"];

/// Kinds of states of VFs.
pub const VF_KINDS: [&str; 6] = ["absent", "raw", "ready", "leased", "dirty", "foreign"];

/// A VF of the pool.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct VfInfo {
    /// The PF's network device and the VF's number.
    pub name: String,
    pub pf: String,
    /// Its PCI address; `None`: the kernel does not have it.
    pub pci: Option<String>,
    pub driver: Option<String>,
    pub netdev: Option<String>,
    pub verbs: Option<String>,
    /// One of [`VF_KINDS`].
    pub kind: String,
    /// The state in words, with what to do.
    pub state: String,
    /// The number of its lease.
    pub lease: Option<u64>,
    /// The group that has the lease.
    pub group: Option<String>,
    /// The container or virtual machine that has the lease.
    pub instance: Option<String>,
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
    /// How long the locks of the workers' RNICs were held: the maxima over all workers.
    #[serde(default)]
    pub rnic_held: HoldTimes,
    /// The workers, one for each group.
    #[serde(default)]
    pub workers: Vec<WorkerInfo>,
    /// The supervisor's confinement.
    #[serde(default)]
    pub confinement: InForce,
    /// The network to other hosts, if one is configured.
    pub wire: Option<WireInfo>,
    /// The control centre, if this host belongs to a fleet.
    #[serde(default)]
    pub centre: Option<CentreInfo>,
}

/// The worker of a group.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct WorkerInfo {
    pub group: String,
    /// Its process ID; `None` while it is being restarted.
    pub pid: Option<u32>,
    pub vrnics: usize,
    pub sessions: usize,
    /// How often it has died and was restarted.
    pub restarts: u64,
    /// The thread that is stuck, and for how long.
    pub stuck: Option<String>,
    /// Anonymous memory, bytes. Neither the program's file, which all workers share, nor the tenants' memory files
    /// count.
    pub memory: u64,
    /// How long the lock of its RNIC was held.
    pub rnic_held: HoldTimes,
    /// Its confinement.
    pub confinement: InForce,
    /// The secrets of its group, and the packets dropped by encryption.
    #[serde(default)]
    pub seal: SealInfo,
}

/// A response.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[allow(missing_docs)]
pub enum Response {
    Done,
    Vrnic(Box<VrnicInfo>),
    Vrnics(Vec<VrnicInfo>),
    Names(Names),
    Groups(Vec<GroupInfo>),
    Rules(RulesInfo),
    Status(Box<StatusInfo>),
    Vfs(VfsInfo),
    /// The capture has ended. `lost` packets came too fast for it.
    Captured {
        lost: u64,
    },
    /// One line that says what is wrong and what to do.
    Error(String),
}

/// Connections that may wait to be accepted: as many as the kernel allows.
const BACKLOG: i32 = -1;
/// Longest request line, bytes.
const MAX_LINE: usize = 64 << 10;

/// The socket, which does not answer yet. Its file lasts as long as this, and so does a directory without vRNICs.
pub(crate) struct Bound {
    socket: OwnedFd,
    path: PathBuf,
    vrnics: PathBuf,
}

impl Bound {
    /// Begins to answer.
    pub fn listen(&self) -> io::Result<UnixListener> {
        rustix::net::listen(&self.socket, BACKLOG)?;
        Ok(self.socket.try_clone()?.into())
    }
}

impl Drop for Bound {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
        let _ = std::fs::remove_dir(&self.vrnics);
    }
}

/// Makes the socket and the directory of vRNICs' directories. Only their owner can use them, and the users of `group`.
/// It gives them to the group, for which a supervisor of root has no right any more later.
pub(crate) fn bind(dir: &Path, group: Option<&str>) -> io::Result<Bound> {
    let path = dir.join(crate::ADMIN_SOCKET);
    let vrnics = dir.join("vrnics");
    let gid = group.map(unirdma_confine::group_named).transpose()?;
    let _ = std::fs::remove_file(&path);
    let bind = || {
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        rustix::net::bind(&socket, &SocketAddrUnix::new(&path)?)?;
        Ok(Bound { socket, path: path.clone(), vrnics: vrnics.clone() })
    };
    let bound = bind().map_err(crate::context("cannot listen on", &path))?;
    let make = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&vrnics);
    make.map_err(crate::context("cannot create", &vrnics))?;
    for (path, of_owner, of_group) in [(&path, 0o600, 0o660), (&vrnics, 0o700, 0o750)] {
        if gid.is_some() {
            chown(path, None, gid).map_err(crate::context("cannot give a group (--admin-group)", path))?;
        }
        let mode = if gid.is_some() { of_group } else { of_owner };
        std::fs::set_permissions(path, PermissionsExt::from_mode(mode))?;
    }
    Ok(bound)
}

/// Serves one connection: passes each request to `handle`, which returns `None` when the host stops.
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
                    "it belongs to another user; be that user or one of its --admin-group, or serve your own with `unirdma host`"
                }
                _ => "start one with `unirdma host`, or name its directory with --dir",
            };
            io::Error::new(e.kind(), format!("no virtual layer answers in {} ({e}): {hint}", dir.display()))
        })?;
        Ok(Client(BufReader::new(stream)))
    }

    /// Sends a request, with a descriptor if one is given, and waits for the response.
    ///
    /// # Errors
    /// The virtual layer's error line, or that the virtual layer is gone.
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
