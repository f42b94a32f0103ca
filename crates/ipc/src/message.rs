//! The messages between supervisor and worker. The supervisor calls and the worker answers, one call at a time. A
//! message that a worker sends without a call is a notice, on a separate socket.
//!
//! Both sides are of the same version: a worker is the supervisor's own program. A worker left by a supervisor that
//! died first reports its version.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};
use unirdma_confine::InForce;
use unirdma_device::HoldTimes;
use unirdma_rnic::{Limits, Share, VfQuestions, VfUse, WireDrops};

use crate::config::EngineConfig;
use crate::counters::{PortCounters, SealInfo, TunnelDrops};
use crate::network::{Changes, Enrolment, Plan};
use crate::vrnic::{Hardware, IpNet, SetHeld, VrnicInfo, Way};

/// Version of these messages.
pub const VERSION: u32 = 9;

/// A worker's configuration, given at its start.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Begin {
    /// Name of its group.
    pub group: String,
    /// Number of its group on this host.
    pub id: u32,
    /// Its pollers.
    pub engine: EngineConfig,
    /// The network to other hosts. Its sockets are sent along.
    pub network: Option<Enrolment>,
    /// The plan of its confinement; `None`: it is not confined.
    pub confinement: Option<unirdma_confine::Plan>,
}

/// A vRNIC's configuration for its worker.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct NewVrnic {
    pub name: String,
    pub ips: Vec<IpNet>,
    pub hardware: Hardware,
    pub limits: Limits,
    pub share: Share,
    pub held: SetHeld,
    pub allow_spoof: bool,
    /// Whether its link is up.
    pub up: bool,
    /// The way that its programs are to go.
    #[serde(default)]
    pub way: Way,
    /// The container or virtual machine that it belongs to. vRNICs of one instance may share a VF. `None`: its own
    /// name.
    #[serde(default)]
    pub instance: Option<String>,
    /// The VF that its programs have at present. The supervisor fills it in for a worker.
    #[serde(default)]
    pub vf_use: VfUse,
}

/// A call of the supervisor.
#[derive(Debug, Serialize, Deserialize)]
#[allow(missing_docs)]
pub enum Call {
    /// The first call of each connection. The socket for notices is sent along.
    Hello {
        version: u32,
    },
    /// The second call of a worker's first connection: its configuration. The sockets of the network are sent along, if
    /// there is one.
    Begin(Box<Begin>),
    /// Adds a vRNIC. The listening sockets for its programs, for its network interface in a virtual machine, and for
    /// the RFC mode are sent along.
    Add(NewVrnic),
    Remove {
        name: String,
    },
    /// `whole`: include the parts that need a lock or a list for each vRNIC.
    Show {
        name: String,
        whole: bool,
    },
    List,
    Names,
    Share {
        name: String,
        share: Share,
    },
    AllowSpoof {
        name: String,
        on: bool,
    },
    Held {
        name: String,
        held: SetHeld,
    },
    Link {
        name: String,
        up: bool,
    },
    /// Its programs ask for leases, or not; they have a VF, or not.
    VfUse {
        name: String,
        vf_use: VfUse,
    },
    Address {
        name: String,
        ip: IpNet,
        add: bool,
    },
    /// Connects the interface sent along; `id` names it.
    Attach {
        name: String,
        id: u64,
    },
    Detach {
        id: u64,
    },
    /// Sends packets to the socket sent along; `id` names the capture.
    Capture {
        id: u64,
        vrnic: Option<String>,
        snap: u32,
    },
    CaptureStop {
        id: u64,
    },
    Status,
    /// All statistics: of the group, and of its first `most` vRNICs in the order of names.
    Figures {
        most: usize,
    },
    /// The locations of peers.
    Plan(Plan),
    /// Changes of the plan.
    Changes(Changes),
    /// The secrets of the group, in a memory file sent along if `any` is true.
    Secrets {
        any: bool,
    },
    /// Lets the worker receive from these IP multicast groups, through sockets sent along, one for each.
    Hear {
        groups: Vec<IpAddr>,
    },
    /// All its ranges of QPNs: the first number and the length of each.
    Qpns(Vec<(u32, u32)>),
    /// Ends the worker.
    End,
}

/// An answer of a worker.
#[derive(Debug, Serialize, Deserialize)]
#[allow(missing_docs)]
pub enum Answer {
    Done,
    Hello(Hello),
    Begun(InForce),
    Vrnic(Box<VrnicInfo>),
    Vrnics(Vec<VrnicInfo>),
    Names(Vec<String>),
    Status(Box<WorkerStatus>),
    Figures(Box<Figures>),
    /// The capture has ended. `lost` packets came too fast for it.
    Captured {
        lost: u64,
    },
    /// One line that says what is wrong.
    Error(String),
}

/// A worker's answer to `Hello`.
#[derive(Debug, Serialize, Deserialize)]
pub struct Hello {
    /// Version of its messages: [`VERSION`].
    pub version: u32,
    /// Version of its program.
    pub program: String,
    /// Its process.
    pub pid: u32,
    /// Its group, if it has got `Begin`.
    pub group: Option<String>,
}

/// Statistics of a worker.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct WorkerStatus {
    pub sessions: usize,
    pub rnic_held: HoldTimes,
    pub port: PortCounters,
    pub drops: WireDrops,
    pub tunnel: TunnelDrops,
    #[serde(default)]
    pub vf_questions: VfQuestions,
    pub seal: SealInfo,
}

/// All statistics of a worker and its vRNICs.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Figures {
    /// Of the worker.
    pub status: WorkerStatus,
    /// Sums over all vRNICs. They include the counters of removed ones.
    pub all: VrnicInfo,
    /// Of each vRNIC, for as many as were asked for.
    pub vrnics: Vec<VrnicInfo>,
}

impl WorkerStatus {
    /// Adds the statistics of another worker.
    pub fn add(&mut self, other: &WorkerStatus) {
        self.sessions += other.sessions;
        self.rnic_held += other.rnic_held;
        self.port += other.port;
        self.drops += other.drops;
        self.tunnel += other.tunnel;
        self.vf_questions += other.vf_questions;
    }
}

/// A message that a worker sends without a call.
#[derive(Debug, Serialize, Deserialize)]
#[allow(missing_docs)]
pub enum Event {
    /// It wants to receive from exactly these IP multicast groups.
    Groups(Vec<IpAddr>),
    /// It has few QPNs left.
    Qpns,
    /// A thread has worked for `seconds` without a pause.
    Stuck { thread: String, seconds: u64 },
}

/// Longest notice, bytes.
pub const MAX_NOTICE: usize = 64 << 10;
