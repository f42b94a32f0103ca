//! The types that `--json` prints. They are no part of the administration socket's protocol, so scripts do not depend
//! on it. Their schemas are in `docs/schema`. Fields may be added; none is renamed or removed within a major version.

use std::io;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use unirdma_rnic::MrNote;

pub(crate) use self::host::{Rules, Status, Vfs};

mod host;

/// A vRNIC.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct Vrnic {
    /// Its name.
    name: String,
    /// Its group.
    group: String,
    /// Its addresses.
    ips: Vec<Address>,
    /// Its GID table.
    gids: Vec<String>,
    /// Its link is up.
    up: bool,
    /// MAC of its network interface.
    mac: String,
    /// GUID of its device.
    guid: String,
    /// MTU of its network interface, bytes.
    mtu: u32,
    /// Its directory on this host.
    dir: String,
    /// A container holds its network interface.
    attached: bool,
    /// Its interface may send with any IP address.
    allow_spoof: bool,
    /// Frames of its interface that were refused, by reason.
    frames_refused: FramesRefused,
    /// PID of the first process of its container; null: it has none. If several were started, of the last one.
    container: Option<i32>,
    /// It was made for its container, and ends with it.
    temporary: bool,
    /// Programs and virtual machines that have opened it.
    sessions: u64,
    /// QPs that exist.
    qps: u64,
    /// CQs that exist.
    cqs: u64,
    /// MRs whose memory the virtual layer maps (ways `direct` and `share`).
    mrs_mapped: u64,
    /// MRs whose bytes are copied in and out of the program (way `copy`).
    mrs_copied: u64,
    /// Bytes of MRs that are mapped.
    bytes_mapped: u64,
    /// Bytes of MRs that are copied.
    bytes_copied: u64,
    /// Its quotas.
    limits: Limits,
    /// The resources that it uses in the virtual layer.
    held: Held,
    /// Its part of the RNIC.
    share: Share,
    /// How long the RNIC has worked for it, nanoseconds.
    busy_ns: u64,
    /// Kicks by its programs or its guest while the RNIC was asleep.
    kicks: u64,
    /// Its counters since it was made, or since its worker's start.
    counters: Counters,
    /// The rules that concern its group. Empty in lists.
    rules: Vec<String>,
    /// Addresses at which its programs listen for RDMA connections, such as `TCP 0.0.0.0:7174`. Empty in lists.
    listeners: Vec<String>,
    /// How the memory of its MRs is reached, and why. Empty in lists.
    memory: Vec<Memory>,
    /// Its QPs. Empty in lists.
    queue_pairs: Vec<QueuePair>,
    /// The way of its programs' data.
    way: Way,
}

/// An address of a vRNIC.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct Address {
    /// IPv4 or IPv6.
    addr: String,
    /// Its prefix length.
    prefix: u8,
}

/// Frames of a vRNIC's interface that were refused, by reason.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct FramesRefused {
    /// Sent from another MAC.
    mac: u64,
    /// Sent from another IP address.
    address: u64,
    /// ARP or neighbour discovery that announced another interface's address, or spoke as a router.
    neighbour: u64,
    /// Neither IPv4, IPv6 nor ARP, or with a VLAN tag.
    protocol: u64,
    /// Too short, or ambiguous.
    malformed: u64,
    /// To or from an address with which no rule allows it to talk.
    rules: u64,
}

/// Quotas of a vRNIC.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct Limits {
    /// Queue pairs.
    max_qp: u32,
    /// Completion queues.
    max_cq: u32,
    /// Memory regions.
    max_mr: u32,
    /// Protection domains.
    max_pd: u32,
    /// Address handles.
    max_ah: u32,
    /// Shared receive queues.
    max_srq: u32,
    /// Bytes of registered memory, all MRs together.
    max_mr_bytes: u64,
    /// Programs that use it at a time.
    max_sessions: u32,
}

/// The resources that a vRNIC uses in the virtual layer.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct Held {
    /// Descriptors of the group's worker.
    descriptors: Amount,
    /// Mappings of memory files.
    mappings: Amount,
    /// Bytes of addresses that these mappings take.
    address_space: Amount,
    /// Pieces of MRs that are kept as lists.
    pieces: Amount,
    /// Bytes of pages that transfers have made in sparse memory files.
    filled: Amount,
    /// Bytes of the worker's own memory.
    kept: Amount,
}

/// An amount, and its limit.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct Amount {
    /// The amount that is used.
    used: u64,
    /// The most that may be used at present.
    limit: u64,
}

/// A vRNIC's part of the RNIC.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct Share {
    /// While several vRNICs want the RNIC, each gets time in proportion to its weight.
    weight: u32,
    /// Most bits that its QPs send in a second; 0: not limited.
    rate_bps: u64,
    /// Most work requests that its QPs begin in a second; 0: not limited.
    ops: u64,
    /// How far ahead of both limits it may be after a pause, microseconds.
    burst_us: u64,
}

/// Counters of a vRNIC or of a QP.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct Counters {
    /// Work requests completed with success, as requester.
    sent_wrs: u64,
    /// Payload bytes of SEND, WRITE and atomics sent, and of READ returned.
    sent_bytes: u64,
    /// Receive work requests completed with success.
    received_wrs: u64,
    /// Payload bytes that peers put into this vRNIC's memory.
    received_bytes: u64,
    /// Times a request found no receive and waited.
    rnr_waits: u64,
    /// Times a request got no answer and was tried again.
    timeouts: u64,
    /// Work requests completed with an error, flushes not counted.
    errors: u64,
    /// Messages for UC and UD QPs that were dropped.
    dropped: u64,
    /// Datagrams with another Q_Key than their QP's.
    qkey_violations: u64,
    /// Packets from the network with another P_Key than the group's.
    pkey_violations: u64,
    /// Connections, address handles and datagrams that a rule did not allow.
    refused: u64,
    /// Which errors they were.
    failed: Failures,
    /// Packets over the network.
    wire: Wire,
}

/// Work requests completed with an error, by kind.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct Failures {
    /// Nobody answered.
    retries: u64,
    /// The peer never had a receive.
    rnr_retries: u64,
    /// The peer refused the request.
    remote: u64,
    /// The request, the receive or its memory was wrong on this side.
    local: u64,
    /// Any other.
    other: u64,
}

/// Packets, named as in the kernel's `hw_counters` of rxe and mlx5, and work by way of them.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct Wire {
    /// Packets sent.
    sent_pkts: u64,
    /// Packets that could not be sent, since there was no link.
    send_err: u64,
    /// Times the link went down.
    link_downed: u64,
    /// Packets received.
    rcvd_pkts: u64,
    /// Packets sent again.
    retransmitted_pkts: u64,
    /// Requests received again.
    duplicate_request: u64,
    /// Requests received after a gap.
    out_of_seq_request: u64,
    /// ACKs that waited for the program's own reply.
    ack_deferred: u64,
    /// RNR NAKs sent.
    send_rnr_err: u64,
    /// RNR NAKs received.
    rcvd_rnr_err: u64,
    /// NAKs received for a gap.
    rcvd_seq_err: u64,
    /// Gaps noticed in READ and atomic responses.
    implied_nak: u64,
    /// Times requests were sent again because their answers did not come.
    completer_retry_err: u64,
    /// SENDs completed as requester.
    rdma_sends: u64,
    /// SENDs received.
    rdma_recvs: u64,
    /// The part of the work requests that went to other hosts.
    sent_wrs: u64,
    /// Their payload bytes.
    sent_bytes: u64,
    /// The part of the receives whose message came from other hosts.
    received_wrs: u64,
    /// Their payload bytes.
    received_bytes: u64,
    /// Packets received that the network had marked as congested.
    np_ecn_marked_roce_packets: u64,
    /// Congestion notifications sent.
    np_cnp_sent: u64,
    /// Congestion notifications received.
    rp_cnp_handled: u64,
    /// Requests given up because nobody answered.
    retry_exceeded_err: u64,
    /// Requests given up because the peer never had a receive.
    retry_rnr_exceeded_err: u64,
}

/// MRs whose memory is reached in the same way, for the same reason.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct Memory {
    /// `direct`, `share` or `copy`.
    pub way: String,
    /// The reason in words.
    pub why: String,
    /// How many MRs.
    pub mrs: usize,
    /// Their bytes.
    pub bytes: u64,
}

impl From<MrNote> for Memory {
    fn from(note: MrNote) -> Memory {
        let MrNote { way, why, mrs, bytes } = note;
        Memory { way, why, mrs, bytes }
    }
}

/// A QP.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct QueuePair {
    /// Its number.
    qpn: u32,
    /// `RC`, `UC` or `UD`.
    kind: String,
    /// Its state.
    state: String,
    /// GID that it is connected to.
    peer_gid: Option<String>,
    /// QP that it is connected to.
    peer_qpn: Option<u32>,
    /// The peer's host, if it is another one.
    peer_host: Option<String>,
    /// Its counters.
    counters: Counters,
}

/// The way of a vRNIC's data.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct Way {
    /// As an administrator asks for it: `soft`, `vf` or `auto`.
    asked: String,
    /// `soft` or `vf`.
    in_force: String,
    /// Why it is not a VF although one was asked for, or what a VF does not hold.
    why: Option<String>,
    /// The VF that its programs have, such as `ens1f0/3`.
    vf: Option<String>,
    /// The GID of this VF.
    gid: Option<String>,
    /// The programs that have this VF.
    contexts: u32,
}

/// A group.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct Group {
    /// Its name.
    name: String,
    /// How many vRNICs it has.
    vrnics: u64,
    /// Its number between hosts; null: it has none.
    vni: Option<u32>,
    /// Its worker's share of the processors, in hundredths of the default share.
    weight: u32,
    /// Why the weight has no effect; null: it has.
    weight_lacks: Option<String>,
    /// Number of the secret that it sends with; null: it has no secret.
    secret: Option<u8>,
    /// Its VLAN on real RNICs; 0: none.
    vlan: u16,
}

/// An answer of the virtual layer as the type that is printed, whose fields have the same names.
///
/// # Errors
/// A field is missing.
pub(crate) fn of<T: DeserializeOwned>(told: &impl Serialize) -> io::Result<T> {
    Ok(serde_json::from_value(serde_json::to_value(told)?)?)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use schemars::generate::SchemaSettings;
    use schemars::{JsonSchema, Schema};
    use unirdma_supervisor::admin;

    use super::*;
    use crate::{check, doctor, top, wait};

    fn schema<T: JsonSchema>() -> Schema {
        SchemaSettings::draft2020_12().for_serialize().into_generator().into_root_schema_for::<T>()
    }

    /// The schemas by the names of their files.
    fn schemas() -> [(&'static str, Schema); 10] {
        [
            ("vrnic", schema::<Vrnic>()),
            ("vrnics", schema::<Vec<Vrnic>>()),
            ("groups", schema::<Vec<Group>>()),
            ("wait", schema::<Vec<wait::Seen>>()),
            ("check", schema::<Vec<check::Report>>()),
            ("doctor", schema::<Vec<doctor::Finding>>()),
            ("status", schema::<Status>()),
            ("rules", schema::<Rules>()),
            ("vfs", schema::<Vfs>()),
            ("top", schema::<top::Rates>()),
        ]
    }

    /// `OVERWRITE=1 cargo test -p unirdma-cli schemas` writes them anew.
    #[test]
    fn schemas_in_the_documents_are_those_of_the_code() {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/schema");
        for (name, schema) in schemas() {
            let file = dir.join(format!("{name}.json"));
            let text = serde_json::to_string_pretty(&schema).unwrap() + "\n";
            if std::env::var_os("OVERWRITE").is_some() {
                std::fs::write(&file, &text).unwrap();
            }
            let written = std::fs::read_to_string(&file).unwrap_or_default();
            assert!(written == text, "{} is not what the code says: OVERWRITE=1 writes it anew", file.display());
        }
        let files = std::fs::read_dir(dir).unwrap().count();
        assert_eq!(files, schemas().len(), "a file of docs/schema is of no type");
    }

    /// Checks that nothing of an answer gets lost.
    fn whole<T: Serialize + DeserializeOwned>(told: &impl Serialize) {
        let printed = serde_json::to_value(of::<T>(told).unwrap()).unwrap();
        assert_eq!(printed, serde_json::to_value(told).unwrap());
    }

    #[test]
    fn answers_of_the_virtual_layer_have_all_fields() {
        let queue_pair = unirdma_rnic::QpInfo {
            qpn: 7,
            kind: "RC".into(),
            state: "RTS".into(),
            peer_gid: None,
            peer_qpn: Some(8),
            peer_host: Some([10, 0, 0, 1].into()),
            counters: Default::default(),
        };
        let v = unirdma_ipc::vrnic::VrnicInfo {
            ips: vec!["10.0.0.1/16".parse().unwrap(), "fd00::1/64".parse().unwrap()],
            container: Some(7),
            memory: vec![MrNote { way: "copy".into(), why: "because".into(), mrs: 1, bytes: 2 }],
            queue_pairs: vec![queue_pair],
            ..Default::default()
        };
        whole::<Vrnic>(&v);
        let vf = admin::VfInfo { name: "ens1f0/3".into(), lease: Some(7), ..Default::default() };
        whole::<Vfs>(&admin::VfsInfo { vfs: vec![vf], ..Default::default() });
        let wire = admin::WireInfo {
            addresses: vec!["10.0.0.1".parse().unwrap()],
            peers_file: "peers".into(),
            peers: 1,
            peers_error: None,
            mtu: 4096,
            port: Default::default(),
            drops: Default::default(),
            tunnel: Default::default(),
            firewall: None,
            rules: Default::default(),
        };
        whole::<Status>(&admin::StatusInfo {
            pid: 7,
            version: "1".into(),
            dir: "/run/unirdma".into(),
            vrnics: 1,
            sessions: 2,
            rnic_held: Default::default(),
            workers: vec![Default::default()],
            confinement: Default::default(),
            wire: Some(wire),
            centre: Some(Default::default()),
        });
    }
}
