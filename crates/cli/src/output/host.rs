//! The output of `status`, `rule ls` and `vf ls` with `--json`. A field whose schema allows any value is for people who
//! look into a fault: what it contains may change with any version.

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// A virtual layer.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct Status {
    /// PID of its supervisor.
    pid: u32,
    /// Its version.
    version: String,
    /// Its directory.
    dir: String,
    /// How many vRNICs it has.
    vrnics: u64,
    /// Programs and virtual machines that have opened one.
    sessions: u64,
    /// Its workers, one for each group.
    workers: Vec<Worker>,
    /// The network to other hosts; null: none is configured.
    wire: Option<Wire>,
    /// The control centre; null: this host belongs to no fleet.
    centre: Option<Centre>,
    /// How its supervisor is confined.
    confinement: Value,
    /// How long the locks of the workers' RNICs were held.
    rnic_held: Value,
}

/// The worker of a group.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct Worker {
    /// The group.
    group: String,
    /// PID; null while it is started again.
    pid: Option<u32>,
    /// How many vRNICs the group has.
    vrnics: u64,
    /// Programs and virtual machines that have opened one of them.
    sessions: u64,
    /// How often it has ended unexpectedly and was started again.
    restarts: u64,
    /// The thread that does not answer, and for how long; null: all answer.
    stuck: Option<String>,
    /// Its own memory, bytes. The memory of programs does not count.
    memory: u64,
    /// How it is confined.
    confinement: Value,
    /// How long the lock of its RNIC was held.
    rnic_held: Value,
    /// The secrets of the group, and packets dropped by encryption.
    seal: Value,
}

/// The network to other hosts.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct Wire {
    /// Addresses of this host.
    addresses: Vec<String>,
    /// The peers file.
    peers_file: String,
    /// Peers in force.
    peers: u64,
    /// Why the present content of the peers file is not in force; null: it is.
    peers_error: Option<String>,
    /// Largest path MTU, bytes.
    mtu: u32,
    /// The packet filter's table that lets only the virtual layer use its ports; null: there is none.
    firewall: Option<String>,
    /// The rules between groups.
    rules: Rules,
    /// Packets and system calls of the port.
    port: Value,
    /// Packets that belonged to no QP, by reason.
    drops: Value,
    /// The network of containers' interfaces between hosts.
    tunnel: Value,
}

/// The rules between groups.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct Rules {
    /// The rules in force, a text each.
    rules: Vec<String>,
    /// Addresses that a rule would make reachable, but that mean something else to the group that would reach them.
    hidden: Vec<Hidden>,
}

/// An address that a group cannot reach in spite of a rule.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct Hidden {
    /// The address.
    address: String,
    /// The group that has it.
    group: String,
    /// The group that cannot reach it.
    seer: String,
}

/// The control centre of a host.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct Centre {
    /// Its URL.
    url: String,
    /// Name of this host in the fleet.
    host: String,
    /// Whether this host is connected.
    connected: bool,
    /// For how many seconds it has been connected, or not connected.
    seconds: u64,
    /// Why it is not connected; empty: it is.
    why: String,
    /// The revision in force.
    revision: u64,
    /// The fleet whose changes the revision counts.
    fleet: String,
    /// Clock of this host minus the clock of the centre, ms; null: not known yet.
    clock_ms: Option<i64>,
    /// Deviations from the state that the centre wants, a line each.
    problems: Vec<String>,
}

/// The pool of VFs.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct Vfs {
    /// The VFs.
    vfs: Vec<Vf>,
    /// Requests that wait for a VF.
    waiting: u64,
    /// PFs and VFs that take no new leases.
    drained: Vec<String>,
    /// Reasons why VFs are not in the pool, and what to do.
    notices: Vec<String>,
    /// Counters of answers to programs.
    answers: Value,
}

/// A VF.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct Vf {
    /// The PF's network device and the VF's number, such as `ens1f0/3`.
    name: String,
    /// The PF's network device.
    pf: String,
    /// Its PCI address; null: the kernel does not have it.
    pci: Option<String>,
    /// Its driver.
    driver: Option<String>,
    /// Its network device.
    netdev: Option<String>,
    /// Its verbs device.
    verbs: Option<String>,
    /// Its state: `absent`, `raw`, `ready`, `leased`, `dirty` or `foreign`.
    kind: String,
    /// The state in words, with what to do.
    state: String,
    /// Number of its lease; null: it has none.
    lease: Option<u64>,
    /// The group that has the lease.
    group: Option<String>,
    /// The container or virtual machine that has the lease.
    instance: Option<String>,
}
