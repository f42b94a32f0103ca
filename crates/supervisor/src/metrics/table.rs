//! The names of figures.
//!
//! A figure of a vRNIC is exported twice: as `unirdma_vrnic_NAME` for each vRNIC, and as `unirdma_group_NAME`, the sum
//! over a group. The counters of removed vRNICs stay in the sum.

use unirdma_device::HoldTimes;
use unirdma_ipc::vrnic::VrnicInfo;
use unirdma_metrics::{Kind, Value};

use crate::supervisor::stats::GroupFigures;

/// The objects for which a family is exported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Whose {
    /// For each vRNIC, and as a sum for each group.
    Both,
    /// For each vRNIC.
    Vrnic,
}

/// Figures with one name: one without a label, or one for each value of the label.
pub(super) struct Family<T: 'static> {
    pub name: &'static str,
    pub help: &'static str,
    pub kind: Kind,
    pub whose: Whose,
    pub label: &'static str,
    pub values: Values<T>,
}

/// The values of a label, and a function for each that gets the figure.
pub(super) type Values<T> = &'static [(&'static str, fn(&T) -> Value)];

const fn counter<T>(name: &'static str, help: &'static str, label: &'static str, values: Values<T>) -> Family<T> {
    Family { name, help, kind: Kind::Counter, whose: Whose::Both, label, values }
}

const fn gauge<T>(name: &'static str, help: &'static str, label: &'static str, values: Values<T>) -> Family<T> {
    Family { name, help, kind: Kind::Gauge, whose: Whose::Both, label, values }
}

const fn limit(name: &'static str, help: &'static str, values: Values<VrnicInfo>) -> Family<VrnicInfo> {
    Family { name, help, kind: Kind::Gauge, whose: Whose::Vrnic, label: "", values }
}

/// The figures of a vRNIC. The names follow `unirdma_vrnic_` and `unirdma_group_`.
pub(super) const VRNIC: &[Family<VrnicInfo>] = &[
    counter(
        "sent_bytes_total",
        "Payload bytes of completed requests: SEND, WRITE and atomics sent, READ returned. Path: within this host, or over the wire.",
        "path",
        &[
            ("local", |v| Value::N(v.counters.sent_bytes.saturating_sub(v.counters.wire.sent_bytes))),
            ("wire", |v| Value::N(v.counters.wire.sent_bytes)),
        ],
    ),
    counter(
        "received_bytes_total",
        "Payload bytes that peers have put into its memory.",
        "path",
        &[
            ("local", |v| Value::N(v.counters.received_bytes.saturating_sub(v.counters.wire.received_bytes))),
            ("wire", |v| Value::N(v.counters.wire.received_bytes)),
        ],
    ),
    counter(
        "send_requests_total",
        "Send work requests completed with success.",
        "path",
        &[
            ("local", |v| Value::N(v.counters.sent_wrs.saturating_sub(v.counters.wire.sent_wrs))),
            ("wire", |v| Value::N(v.counters.wire.sent_wrs)),
        ],
    ),
    counter(
        "receive_requests_total",
        "Receive work requests completed with success.",
        "path",
        &[
            ("local", |v| Value::N(v.counters.received_wrs.saturating_sub(v.counters.wire.received_wrs))),
            ("wire", |v| Value::N(v.counters.wire.received_wrs)),
        ],
    ),
    counter(
        "sent_packets_total",
        "RoCEv2 packets sent to other hosts.",
        "",
        &[("", |v| Value::N(v.counters.wire.sent_pkts))],
    ),
    counter(
        "received_packets_total",
        "RoCEv2 packets received from other hosts.",
        "",
        &[("", |v| Value::N(v.counters.wire.rcvd_pkts))],
    ),
    counter(
        "retransmitted_packets_total",
        "Packets that were sent again.",
        "",
        &[("", |v| Value::N(v.counters.wire.retransmitted_pkts))],
    ),
    counter(
        "unsent_packets_total",
        "Packets that were lost because their sender had no link.",
        "",
        &[("", |v| Value::N(v.counters.wire.send_err))],
    ),
    counter(
        "completion_errors_total",
        "Work requests completed with an error, flushes not counted: nobody answered, the peer had no receive, the peer refused, wrong on this side.",
        "reason",
        &[
            ("retries_exceeded", |v| Value::N(v.counters.failed.retries)),
            ("rnr_retries_exceeded", |v| Value::N(v.counters.failed.rnr_retries)),
            ("remote", |v| Value::N(v.counters.failed.remote)),
            ("local", |v| Value::N(v.counters.failed.local)),
            ("other", |v| Value::N(v.counters.failed.other)),
        ],
    ),
    counter(
        "dropped_messages_total",
        "Messages for UC and UD queue pairs that were dropped: no receive, too long or no access; a wrong Q_Key.",
        "reason",
        &[("not_receivable", |v| Value::N(v.counters.dropped)), ("q_key", |v| Value::N(v.counters.qkey_violations))],
    ),
    counter(
        "refused_frames_total",
        "Ethernet frames of its eth0 that were refused, by what was not its own or not allowed.",
        "reason",
        &[
            ("mac", |v| Value::N(v.frames_refused.mac)),
            ("address", |v| Value::N(v.frames_refused.address)),
            ("neighbour", |v| Value::N(v.frames_refused.neighbour)),
            ("protocol", |v| Value::N(v.frames_refused.protocol)),
            ("malformed", |v| Value::N(v.frames_refused.malformed)),
            ("rules", |v| Value::N(v.frames_refused.rules)),
        ],
    ),
    counter(
        "refused_by_rules_total",
        "Connections, address handles, datagrams and connection requests that a rule between groups did not allow.",
        "",
        &[("", |v| Value::N(v.counters.refused))],
    ),
    counter(
        "rnr_waits_total",
        "Times a request found no receive at its peer and waited.",
        "",
        &[("", |v| Value::N(v.counters.rnr_waits))],
    ),
    counter(
        "timeouts_total",
        "Times a request got no answer and was tried again.",
        "",
        &[("", |v| Value::N(v.counters.timeouts))],
    ),
    counter(
        "sequence_errors_total",
        "Packets out of sequence: requests received after a gap or again, gaps that the peer told of, gaps in responses.",
        "kind",
        &[
            ("request_gap", |v| Value::N(v.counters.wire.out_of_seq_request)),
            ("request_duplicate", |v| Value::N(v.counters.wire.duplicate_request)),
            ("nak", |v| Value::N(v.counters.wire.rcvd_seq_err)),
            ("response_gap", |v| Value::N(v.counters.wire.implied_nak)),
        ],
    ),
    counter(
        "congestion_total",
        "Signs of congestion: marked packets received, notifications sent and received.",
        "kind",
        &[
            ("marks_received", |v| Value::N(v.counters.wire.np_ecn_marked_roce_packets)),
            ("notifications_sent", |v| Value::N(v.counters.wire.np_cnp_sent)),
            ("notifications_received", |v| Value::N(v.counters.wire.rp_cnp_handled)),
        ],
    ),
    counter("links_lost_total", "Times its link went down.", "", &[("", |v| Value::N(v.counters.wire.link_downed))]),
    counter(
        "cpu_seconds_total",
        "How long the RNIC has worked for it: what --weight divides.",
        "",
        &[("", |v| Value::Ns(v.busy_ns))],
    ),
    counter(
        "kicks_total",
        "Times its programs or its guest woke the RNIC, each a system call there.",
        "",
        &[("", |v| Value::N(v.kicks))],
    ),
    gauge("sessions", "Programs and virtual machines that use it.", "", &[("", |v| Value::N(v.sessions as u64))]),
    gauge("queue_pairs", "Queue pairs.", "", &[("", |v| Value::N(v.qps as u64))]),
    gauge("completion_queues", "Completion queues.", "", &[("", |v| Value::N(v.cqs as u64))]),
    gauge(
        "memory_regions",
        "Memory regions, by how their memory is reached: mapped, or copied in and out of private memory.",
        "way",
        &[("mapped", |v| Value::N(v.mrs_mapped as u64)), ("copied", |v| Value::N(v.mrs_copied as u64))],
    ),
    gauge(
        "registered_bytes",
        "Bytes of its memory regions.",
        "way",
        &[("mapped", |v| Value::N(v.bytes_mapped)), ("copied", |v| Value::N(v.bytes_copied))],
    ),
    gauge(
        "held_descriptors",
        "Descriptors that it makes its worker hold.",
        "",
        &[("", |v| Value::N(v.held.descriptors.used))],
    ),
    gauge(
        "held_mappings",
        "Mappings of memory files that it makes its worker hold.",
        "",
        &[("", |v| Value::N(v.held.mappings.used))],
    ),
    gauge(
        "held_address_space_bytes",
        "Bytes of addresses that these mappings take.",
        "",
        &[("", |v| Value::N(v.held.address_space.used))],
    ),
    gauge(
        "held_pieces",
        "Pieces of memory regions that are kept as lists.",
        "",
        &[("", |v| Value::N(v.held.pieces.used))],
    ),
    gauge(
        "held_filled_bytes",
        "Bytes of pages that transfers have made in sparse memory files.",
        "",
        &[("", |v| Value::N(v.held.filled.used))],
    ),
    gauge(
        "held_kept_bytes",
        "Bytes of the worker's own memory: events and datagrams that wait, and the like.",
        "",
        &[("", |v| Value::N(v.held.kept.used))],
    ),
    limit("sessions_limit", "Most programs.", &[("", |v| Value::N(v.limits.max_sessions.into()))]),
    limit("queue_pairs_limit", "Most queue pairs.", &[("", |v| Value::N(v.limits.max_qp.into()))]),
    limit("completion_queues_limit", "Most completion queues.", &[("", |v| Value::N(v.limits.max_cq.into()))]),
    limit("memory_regions_limit", "Most memory regions and windows.", &[("", |v| Value::N(v.limits.max_mr.into()))]),
    limit("registered_bytes_limit", "Most bytes of memory regions.", &[("", |v| Value::N(v.limits.max_mr_bytes))]),
    limit(
        "held_descriptors_limit",
        "Most descriptors at this moment.",
        &[("", |v| Value::N(v.held.descriptors.limit))],
    ),
    limit("held_mappings_limit", "Most mappings at this moment.", &[("", |v| Value::N(v.held.mappings.limit))]),
    limit(
        "held_address_space_bytes_limit",
        "Most bytes of addresses at this moment.",
        &[("", |v| Value::N(v.held.address_space.limit))],
    ),
    limit("held_pieces_limit", "Most pieces at this moment.", &[("", |v| Value::N(v.held.pieces.limit))]),
    limit(
        "held_filled_bytes_limit",
        "Most bytes in sparse files at this moment.",
        &[("", |v| Value::N(v.held.filled.limit))],
    ),
    limit(
        "held_kept_bytes_limit",
        "Most bytes of the worker's own memory at this moment.",
        &[("", |v| Value::N(v.held.kept.limit))],
    ),
    limit("link_up", "1 if its link is up.", &[("", |v| Value::N(v.up.into()))]),
    limit("interface_up", "1 if a container has its eth0.", &[("", |v| Value::N(v.attached.into()))]),
    limit(
        "weight",
        "Its part of its group's worker, in hundredths of the usual one.",
        &[("", |v| Value::N(v.share.weight.into()))],
    ),
];

/// Whether a worker answers. It is known for every group. The name follows `unirdma_worker_`.
pub(super) const UP: Family<GroupFigures> =
    gauge("up", "1 if the worker of the group answers.", "", &[("", |g| Value::N(g.told.is_some().into()))]);

/// Figures of a worker that its supervisor knows. The names follow `unirdma_worker_`.
pub(super) const WORKER: &[Family<GroupFigures>] = &[
    gauge("stuck", "1 if a thread of it does not pause as it should.", "", &[("", |g| Value::N(g.stuck.into()))]),
    gauge("vrnics", "vRNICs of the group.", "", &[("", |g| Value::N(g.vrnics as u64))]),
    gauge("memory_bytes", "Memory of its own.", "", &[("", |g| Value::N(g.memory))]),
    counter("restarts_total", "Times it has died and was started anew.", "", &[("", |g| Value::N(g.restarts))]),
    counter(
        "cpu_seconds_total",
        "Processor time of the process, which waits for work by looking for it.",
        "",
        &[("", |g| Value::Ns(g.cpu.map_or(0, |c| c.as_nanos() as u64)))],
    ),
];

/// Figures that a worker reports. They are missing while it does not answer.
pub(super) struct Told {
    pub prefix: &'static str,
    pub families: &'static [Family<unirdma_ipc::message::WorkerStatus>],
}

pub(super) const TOLD: &[Told] = &[
    Told {
        prefix: "unirdma_worker_",
        families: &[gauge(
            "sessions",
            "Programs and virtual machines that it serves.",
            "",
            &[("", |s| Value::N(s.sessions as u64))],
        )],
    },
    Told {
        prefix: "unirdma_port_",
        families: &[
            counter("sent_packets_total", "Packets sent to other hosts.", "", &[("", |s| Value::N(s.port.sent))]),
            counter(
                "received_packets_total",
                "Packets received from other hosts.",
                "",
                &[("", |s| Value::N(s.port.received))],
            ),
            counter(
                "send_errors_total",
                "Packets that the network refused.",
                "",
                &[("", |s| Value::N(s.port.send_errors))],
            ),
            counter(
                "dropped_packets_total",
                "Packets received that were for no queue pair, by reason.",
                "reason",
                &[
                    ("icrc", |s| Value::N(s.port.icrc_errors + s.drops.bad_icrc)),
                    ("malformed", |s| Value::N(s.drops.malformed)),
                    ("no_queue_pair", |s| Value::N(s.drops.no_qp)),
                    ("wrong_source", |s| Value::N(s.drops.wrong_source)),
                    ("p_key", |s| Value::N(s.drops.bad_pkey)),
                    ("state", |s| Value::N(s.drops.bad_state)),
                ],
            ),
        ],
    },
    Told {
        prefix: "unirdma_tunnel_",
        families: &[counter(
            "dropped_packets_total",
            "VXLAN packets received that were dropped, by reason.",
            "reason",
            &[
                ("not_a_peer", |s| Value::N(s.tunnel.not_a_peer)),
                ("no_group", |s| Value::N(s.tunnel.no_group)),
                ("not_agreed", |s| Value::N(s.tunnel.not_agreed)),
                ("address", |s| Value::N(s.tunnel.address)),
                ("malformed", |s| Value::N(s.tunnel.malformed)),
            ],
        )],
    },
    Told {
        prefix: "unirdma_vf_questions_",
        families: &[
            counter(
                "asked_total",
                "Questions to other hosts by which VF a vRNIC is reached, asked when a program on a VF connects.",
                "",
                &[("", |s| Value::N(s.vf_questions.asked))],
            ),
            counter(
                "unanswered_total",
                "Such questions that had no answer within a second; the connection failed.",
                "",
                &[("", |s| Value::N(s.vf_questions.unanswered))],
            ),
        ],
    },
];

/// The histogram of the times for which the lock of a worker's RNIC was held: its name and its description.
pub(super) const HELD: (&str, &str) =
    ("unirdma_worker_rnic_lock_held_seconds", "How long the RNIC of the worker was held at a time.");

/// The upper edges of that histogram, ns, and the number of times below each.
pub(super) fn held(h: &HoldTimes) -> impl Iterator<Item = (u64, u64)> {
    HoldTimes::edges_ns().into_iter().zip(h.shorter)
}
