//! What supervisor and worker say to each other. The supervisor calls and the worker answers, one call at a time; what a worker has to
//! say by itself is a notice, on a socket of its own.
//!
//! Both are of one version: a worker is the supervisor's own program, or, if it was left by a supervisor that died, says at first
//! which version it has.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};
use unirdma_device::HoldTimes;
use unirdma_rnic::{Limits, Share, WireDrops};

use crate::confine::{self, InForce};
use crate::engine::EngineConfig;
use crate::network::{Changes, Enrolment, Plan};
use crate::port::PortCounters;
use crate::seal::SealInfo;
use crate::tunnel::TunnelDrops;
use crate::vrnic::{Hardware, IpNet, SetHeld, VrnicInfo};

/// Version of these messages.
pub(crate) const VERSION: u32 = 8;

/// What a worker is, from its beginning on.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Begin {
    /// Name of its group.
    pub group: String,
    /// Number of its group on this host.
    pub id: u32,
    pub engine: EngineConfig,
    /// The network to other hosts. Its sockets come along.
    pub network: Option<Enrolment>,
    /// How it confines itself; `None`: not at all.
    pub confinement: Option<confine::Plan>,
}

/// A vRNIC as its worker needs to know it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct NewVrnic {
    pub name: String,
    pub ips: Vec<IpNet>,
    pub hardware: Hardware,
    pub limits: Limits,
    pub share: Share,
    pub held: SetHeld,
    pub allow_spoof: bool,
    /// Its link.
    pub up: bool,
}

/// What a supervisor asks of a worker.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Call {
    /// The first call of each connection. With the socket for notices.
    Hello {
        version: u32,
    },
    /// The second call of a worker's first connection: of which group this is the worker. With its sockets, if there is a network, and
    /// at last the table of who wants the cores.
    Begin(Box<Begin>),
    /// With the sockets of its programs, of its network interface in a virtual machine, and of the RFC mode.
    Add(NewVrnic),
    Remove {
        name: String,
    },
    /// With what takes a lock or a list for each vRNIC, if `whole`.
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
    Address {
        name: String,
        ip: IpNet,
        add: bool,
    },
    /// Connects the interface that comes along; `id` names it.
    Attach {
        name: String,
        id: u64,
    },
    Detach {
        id: u64,
    },
    /// Sends packets to the socket that comes along; `id` names the capture.
    Capture {
        id: u64,
        vrnic: Option<String>,
        snap: u32,
    },
    CaptureStop {
        id: u64,
    },
    Status,
    /// All that is counted: of the group, and of each of its first `most` vRNICs in the order of their names.
    Figures {
        most: usize,
    },
    /// Where peers are.
    Plan(Plan),
    /// What is other than that.
    Changes(Changes),
    /// The secrets of the group, in a memory file that comes along, or none.
    Secrets {
        any: bool,
    },
    /// Lets it hear these IP multicast groups, by a socket for each that comes along.
    Hear {
        groups: Vec<IpAddr>,
    },
    /// All its ranges of QPNs, first numbers and how many.
    Qpns(Vec<(u32, u32)>),
    /// Ends it.
    End,
}

/// What a worker answers.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Answer {
    Done,
    Hello(Hello),
    Begun(InForce),
    Vrnic(Box<VrnicInfo>),
    Vrnics(Vec<VrnicInfo>),
    Names(Vec<String>),
    Status(Box<WorkerStatus>),
    Figures(Box<Figures>),
    /// The capture has ended; this many packets came too fast for it.
    Captured {
        lost: u64,
    },
    /// One line that says what is wrong.
    Error(String),
}

/// Who answers.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Hello {
    pub version: u32,
    /// Version of its program.
    pub program: String,
    pub pid: u32,
    /// Its group, if it has begun.
    pub group: Option<String>,
}

/// A worker in figures.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct WorkerStatus {
    pub sessions: usize,
    pub rnic_held: HoldTimes,
    pub port: PortCounters,
    pub drops: WireDrops,
    pub tunnel: TunnelDrops,
    pub seal: SealInfo,
}

/// All that a worker counts.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Figures {
    pub status: WorkerStatus,
    /// Sums over the vRNICs that there are, and of what those that are gone have done.
    pub all: VrnicInfo,
    pub vrnics: Vec<VrnicInfo>,
}

impl WorkerStatus {
    /// Adds what another worker has.
    pub fn add(&mut self, other: &WorkerStatus) {
        self.sessions += other.sessions;
        self.rnic_held += other.rnic_held;
        self.port += other.port;
        self.drops += other.drops;
        self.tunnel += other.tunnel;
    }
}

/// What a worker says by itself.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Notice {
    /// It wants to hear these IP multicast groups, and no others.
    Groups(Vec<IpAddr>),
    /// It has few QPNs left.
    Qpns,
    /// A thread has worked without a pause for so long.
    Stuck { thread: String, seconds: u64 },
}

/// Longest notice, bytes.
pub(crate) const MAX_NOTICE: usize = 64 << 10;
