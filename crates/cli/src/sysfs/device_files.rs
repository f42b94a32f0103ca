//! The files of the RDMA device's directory in /sys, as a pure function of what the virtual layer says about the vRNIC.
//! Names and units are the kernel's (Documentation/ABI/stable/sysfs-class-infiniband).

use std::collections::BTreeMap;
use std::net::Ipv6Addr;

use unirdma_ipc::vrnic::VrnicInfo;
use unirdma_rnic::Counters;

use super::Device;

/// Relative path from the device's directory to /sys.
const SYS: &str = "../../../..";

/// Least number of entries of the GID table, as `ibv_query_port` reports it.
const MIN_GIDS: usize = 16;
/// Bytes in a packet of the path MTU.
const PACKET: u64 = 4096;
/// Figures are at most this old, milliseconds.
pub(super) const LIFESPAN_MS: u64 = 50;

/// A name that is not a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Entry {
    /// A file, with its text.
    Text(String),
    /// A file that belongs to an empty entry of a table: reading it fails with EINVAL.
    Empty,
    /// A symbolic link.
    Link(String),
}

/// The network interface that has the vRNIC's addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Interface {
    pub name: String,
    /// True if the container's /sys/class/net has it.
    pub in_sys: bool,
}

/// Everything below the device's directory, by relative path.
pub(super) type Files = BTreeMap<String, Entry>;

/// The files of a device. `net`: its network interface, if it has one.
pub(super) fn files(Device { info, name, number, .. }: Device<'_>, net: Option<&Interface>) -> Files {
    let mut all = Files::new();
    let mut put = |path: String, entry| {
        all.insert(path, entry);
    };
    let text = |t: &str| Entry::Text(format!("{t}\n"));
    for (file, value) in device(info, name) {
        put(file.into(), text(&value));
    }
    put("subsystem".into(), Entry::Link(format!("{SYS}/class/infiniband")));
    // Scripts use these to get from one class to the other.
    put(format!("device/infiniband/{name}"), Entry::Link(format!("../../../{name}")));
    let verbs = format!("infiniband_verbs/uverbs{number}");
    put(format!("device/{verbs}"), Entry::Link(format!("../../../../{verbs}")));
    for (name, value) in port(info.up) {
        put(format!("ports/1/{name}"), text(value));
    }
    for (name, value) in counters(&info.counters) {
        put(format!("ports/1/counters/{name}"), text(&value.to_string()));
    }
    for (name, value) in hw_counters(&info.counters) {
        put(format!("ports/1/hw_counters/{name}"), text(&value.to_string()));
    }
    for (i, gid) in gid_table(&info.gids).into_iter().enumerate() {
        put(format!("ports/1/gids/{i}"), text(&groups(&gid.octets())));
        let used = |value: &str| if gid.is_unspecified() { Entry::Empty } else { text(value) };
        put(format!("ports/1/gid_attrs/types/{i}"), used("RoCE v2"));
        put(format!("ports/1/gid_attrs/ndevs/{i}"), net.map_or(Entry::Empty, |n| used(&n.name)));
    }
    match net {
        Some(Interface { name, in_sys: true }) => {
            put(format!("device/net/{name}"), Entry::Link(format!("../../{SYS}/class/net/{name}")));
            put(format!("ports/1/net/{name}"), Entry::Link(format!("../../../{SYS}/class/net/{name}")));
        }
        Some(Interface { name, in_sys: false }) => {
            for (file, value) in [("address", &*info.mac), ("dev_id", "0x0"), ("dev_port", "0"), ("type", "1")] {
                put(format!("device/net/{name}/{file}"), text(value));
            }
            put(format!("ports/1/net/{name}"), Entry::Link(format!("../../../device/net/{name}")));
        }
        None => {}
    }
    all
}

/// The files of the device's directory in `infiniband_verbs`.
pub(super) fn verbs_files(Device { name, number, .. }: Device<'_>) -> Files {
    let text = |t: &str| Entry::Text(format!("{t}\n"));
    let all = [
        ("ibdev", text(name)),
        ("abi_version", text("1")),
        // The device number of /dev/null, which is mounted there.
        ("dev", text("1:3")),
        ("uevent", text(&format!("MAJOR=1\nMINOR=3\nDEVNAME=infiniband/uverbs{number}"))),
        ("device", Entry::Link(format!("../../infiniband/{name}/device"))),
        ("subsystem", Entry::Link(format!("{SYS}/class/infiniband_verbs"))),
    ];
    all.map(|(name, entry)| (name.into(), entry)).into()
}

fn device(info: &VrnicInfo, name: &str) -> [(&'static str, String); 12] {
    let (cpus, cpu_list) = processors();
    [
        ("uevent", format!("NAME={name}")),
        ("node_type", "1: CA".into()),
        ("node_guid", info.guid.clone()),
        ("sys_image_guid", info.guid.clone()),
        ("node_desc", info.name.clone()),
        ("board_id", "uniRDMA vRNIC".into()),
        ("hca_type", "uniRDMA".into()),
        ("hw_rev", "1".into()),
        ("fw_ver", env!("CARGO_PKG_VERSION").into()),
        ("device/numa_node", "-1".into()),
        ("device/local_cpus", cpus),
        ("device/local_cpulist", cpu_list),
    ]
}

fn port(up: bool) -> [(&'static str, &'static str); 10] {
    let (state, physical) = if up { ("4: ACTIVE", "5: LinkUp") } else { ("1: DOWN", "3: Disabled") };
    [
        ("state", state),
        ("phys_state", physical),
        ("link_layer", "Ethernet"),
        ("rate", "100 Gb/sec (4X EDR)"),
        ("lid", "0x0"),
        ("lid_mask_count", "0"),
        ("sm_lid", "0x0"),
        ("sm_sl", "0"),
        ("cap_mask", "0x04010000"),
        ("pkeys/0", "0xffff"),
    ]
}

/// Packets sent and received. Messages within the host never were packets: each counts as one, and as one more for
/// every 4096 bytes.
fn packets(c: &Counters) -> (u64, u64) {
    let local = |wrs: u64, of_wire: u64, bytes: u64, wire_bytes: u64| {
        wrs.saturating_sub(of_wire).saturating_add(bytes.saturating_sub(wire_bytes) / PACKET)
    };
    let w = &c.wire;
    let sent = local(c.sent_wrs, w.sent_wrs, c.sent_bytes, w.sent_bytes);
    let received = local(c.received_wrs, w.received_wrs, c.received_bytes, w.received_bytes);
    (w.sent_pkts.saturating_add(sent), w.rcvd_pkts.saturating_add(received))
}

/// `ports/1/counters`. Those that are always 0 are about cables and switches.
fn counters(c: &Counters) -> [(&'static str, u64); 17] {
    let (sent, received) = packets(c);
    [
        // In units of 4 bytes.
        ("port_xmit_data", c.sent_bytes / 4),
        ("port_rcv_data", c.received_bytes / 4),
        ("port_xmit_packets", sent),
        ("port_rcv_packets", received),
        ("port_xmit_discards", c.wire.send_err),
        ("port_rcv_constraint_errors", c.pkey_violations),
        ("link_downed", c.wire.link_downed),
        ("port_rcv_errors", 0),
        ("port_rcv_remote_physical_errors", 0),
        ("port_rcv_switch_relay_errors", 0),
        ("port_xmit_constraint_errors", 0),
        ("port_xmit_wait", 0),
        ("symbol_error", 0),
        ("link_error_recovery", 0),
        ("local_link_integrity_errors", 0),
        ("excessive_buffer_overrun_errors", 0),
        ("VL15_dropped", 0),
    ]
}

/// `ports/1/hw_counters`: rxe's names, and for congestion mlx5's.
fn hw_counters(c: &Counters) -> [(&'static str, u64); 20] {
    let (sent, received) = packets(c);
    let w = &c.wire;
    [
        ("lifespan", LIFESPAN_MS),
        ("sent_pkts", sent),
        ("rcvd_pkts", received),
        ("duplicate_request", w.duplicate_request),
        ("out_of_seq_request", w.out_of_seq_request),
        ("rcvd_rnr_err", w.rcvd_rnr_err),
        ("send_rnr_err", w.send_rnr_err),
        ("rcvd_seq_err", w.rcvd_seq_err),
        ("ack_deferred", w.ack_deferred),
        ("retry_exceeded_err", w.retry_exceeded_err),
        ("retry_rnr_exceeded_err", w.retry_rnr_exceeded_err),
        ("completer_retry_err", w.completer_retry_err),
        ("send_err", w.send_err),
        ("link_downed", w.link_downed),
        ("rdma_sends", w.rdma_sends),
        ("rdma_recvs", w.rdma_recvs),
        ("implied_nak_seq_err", w.implied_nak),
        ("np_ecn_marked_roce_packets", w.np_ecn_marked_roce_packets),
        ("np_cnp_sent", w.np_cnp_sent),
        ("rp_cnp_handled", w.rp_cnp_handled),
    ]
}

/// The GID table, as long as `ibv_query_port` says it is. Empty entries are zero.
fn gid_table(gids: &[String]) -> Vec<Ipv6Addr> {
    let mut table: Vec<Ipv6Addr> = gids.iter().map(|g| g.parse().unwrap_or(Ipv6Addr::UNSPECIFIED)).collect();
    table.resize(gids.len().next_power_of_two().max(MIN_GIDS), Ipv6Addr::UNSPECIFIED);
    table
}

/// A GID in groups of four digits.
fn groups(bytes: &[u8]) -> String {
    let group = |g: &[u8]| g.iter().map(|b| format!("{b:02x}")).collect::<String>();
    bytes.chunks(2).map(group).collect::<Vec<_>>().join(":")
}

/// The set of all processors, as the kernel writes masks and lists.
fn processors() -> (String, String) {
    let n = std::thread::available_parallelism().map_or(1, usize::from);
    let word = |bits: usize| if bits >= 32 { u32::MAX } else { (1 << bits) - 1 };
    let words: Vec<String> = (0..n.div_ceil(32)).rev().map(|w| format!("{:08x}", word(n - w * 32))).collect();
    (words.join(","), if n == 1 { "0".into() } else { format!("0-{}", n - 1) })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vrnic() -> VrnicInfo {
        let mut info = VrnicInfo { up: true, guid: "0200:0000:0000:0001".into(), ..VrnicInfo::default() };
        info.gids = ["::ffff:10.0.0.1", "::", "fd00::7"].map(String::from).into();
        info
    }

    fn device<'a>(info: &'a VrnicInfo, name: &'a str) -> Device<'a> {
        Device { info, name, number: 0, interface: "eth0" }
    }

    fn eth0(in_sys: bool) -> Interface {
        Interface { name: "eth0".into(), in_sys }
    }

    #[test]
    fn the_device_has_the_name_that_was_chosen() {
        let all = files(device(&vrnic(), "mlx5_0"), None);
        assert_eq!(text(&all, "uevent"), "NAME=mlx5_0\n");
        assert!(all.contains_key("device/infiniband/mlx5_0"));
        assert_eq!(text(&verbs_files(device(&vrnic(), "mlx5_0")), "ibdev"), "mlx5_0\n");
    }

    fn text(files: &Files, path: &str) -> String {
        match &files[path] {
            Entry::Text(t) => t.clone(),
            other => panic!("{path}: {other:?}"),
        }
    }

    #[test]
    fn empty_entries_of_the_gid_table_cannot_be_read() {
        let all = files(device(&vrnic(), "unirdma0"), Some(&eth0(true)));
        assert_eq!(text(&all, "ports/1/gids/0"), "0000:0000:0000:0000:0000:ffff:0a00:0001\n");
        assert_eq!(text(&all, "ports/1/gid_attrs/types/2"), "RoCE v2\n");
        assert_eq!(text(&all, "ports/1/gid_attrs/ndevs/2"), "eth0\n");
        assert_eq!(text(&all, "ports/1/gids/1"), "0000:0000:0000:0000:0000:0000:0000:0000\n");
        for i in [1, 3, 15] {
            assert_eq!(all[&format!("ports/1/gid_attrs/types/{i}")], Entry::Empty);
            assert_eq!(all[&format!("ports/1/gid_attrs/ndevs/{i}")], Entry::Empty);
        }
        assert!(!all.contains_key("ports/1/gids/16"));
        let mut many = vrnic();
        many.gids = (0..17).map(|i| format!("fd00::{i}")).collect();
        assert!(files(device(&many, "unirdma0"), None).contains_key("ports/1/gids/31"));
        assert_eq!(files(device(&many, "unirdma0"), None)["ports/1/gid_attrs/ndevs/3"], Entry::Empty);
    }

    #[test]
    fn the_port_follows_the_link() {
        let mut info = vrnic();
        assert_eq!(text(&files(device(&info, "unirdma0"), None), "ports/1/state"), "4: ACTIVE\n");
        info.up = false;
        assert_eq!(text(&files(device(&info, "unirdma0"), None), "ports/1/state"), "1: DOWN\n");
        assert_eq!(text(&files(device(&info, "unirdma0"), None), "ports/1/phys_state"), "3: Disabled\n");
    }

    #[test]
    fn data_is_counted_in_words_and_local_messages_as_packets() {
        let mut info = vrnic();
        let c = &mut info.counters;
        (c.sent_wrs, c.sent_bytes, c.received_bytes) = (13, 3 << 20, 8);
        (c.wire.sent_wrs, c.wire.sent_bytes, c.wire.sent_pkts) = (10, 1 << 20, 1000);
        c.wire.duplicate_request = 5;
        let all = files(device(&info, "unirdma0"), None);
        assert_eq!(text(&all, "ports/1/counters/port_xmit_data"), format!("{}\n", (3 << 20) / 4));
        assert_eq!(text(&all, "ports/1/counters/port_rcv_data"), "2\n");
        assert_eq!(text(&all, "ports/1/counters/port_xmit_packets"), format!("{}\n", 1000 + 3 + (2 << 20) / 4096));
        assert_eq!(text(&all, "ports/1/hw_counters/duplicate_request"), "5\n");
        assert_eq!(text(&all, "ports/1/hw_counters/lifespan"), "50\n");
    }

    #[test]
    fn the_interface_is_a_link_where_sys_has_it() {
        let all = files(device(&vrnic(), "unirdma0"), Some(&eth0(true)));
        assert_eq!(all["device/net/eth0"], Entry::Link("../../../../../../class/net/eth0".into()));
        assert_eq!(all["ports/1/net/eth0"], Entry::Link("../../../../../../../class/net/eth0".into()));
        let all = files(device(&vrnic(), "unirdma0"), Some(&eth0(false)));
        assert_eq!(text(&all, "device/net/eth0/type"), "1\n");
        assert_eq!(all["ports/1/net/eth0"], Entry::Link("../../../device/net/eth0".into()));
        assert!(!files(device(&vrnic(), "unirdma0"), None).keys().any(|path| path.contains("/net/")));
    }
}
