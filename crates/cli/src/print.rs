//! Tables and JSON on standard output.

use std::io::{self, Write};
use std::net::IpAddr;

use anstream::adapter::strip_str;
use anstyle::AnsiColor;
use unirdma_confine::USUAL_GROUP_WEIGHT;
use unirdma_ipc::vrnic::VrnicInfo;
use unirdma_supervisor::CentreInfo;
use unirdma_supervisor::admin::{GroupInfo, Response, RulesInfo, StatusInfo, VfsInfo, WireInfo, WorkerInfo};

use crate::{Out, output, units};

/// Lines up columns. The first row is the heading.
pub(crate) fn table(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    // Colours take no place.
    let shown = |s: &str| strip_str(s).map(|part| part.chars().count()).sum::<usize>();
    let width = |c: usize| rows.iter().filter_map(|r| r.get(c)).map(|s| shown(s)).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let line = |r: &Vec<String>| {
        let cell = |(s, w): (&String, &usize)| format!("{s}{}", " ".repeat(w - shown(s)));
        let cells: Vec<String> = r.iter().zip(&widths).map(cell).collect();
        cells.join("  ").trim_end().to_string()
    };
    rows.iter().map(line).collect::<Vec<_>>().join("\n")
}

/// A text in a colour. [`line`] and the macros of `anstream` leave it out where standard output or error is no terminal
/// or the user wants none.
pub(crate) fn coloured(colour: AnsiColor, text: &str) -> String {
    let style = colour.on_default();
    format!("{style}{text}{style:#}")
}

/// Does work during which a person waits. A moving sign stands on standard error meanwhile if that is a terminal.
#[cfg(feature = "fleet")]
pub(crate) fn while_waiting<T>(for_what: &'static str, work: impl FnOnce() -> T) -> T {
    let sign = indicatif::ProgressBar::new_spinner().with_message(for_what);
    sign.enable_steady_tick(std::time::Duration::from_millis(100));
    let done = work();
    sign.finish_and_clear();
    done
}

fn ips(v: &VrnicInfo) -> String {
    v.ips.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
}

fn link(v: &VrnicInfo) -> String {
    if v.up { "up".into() } else { coloured(AnsiColor::Red, "down") }
}

fn container(v: &VrnicInfo) -> String {
    let end = if v.temporary { ", with which it ends" } else { "" };
    let what = match (v.attached, v.container) {
        (true, Some(pid)) => format!("attached, first process {pid}"),
        (false, Some(pid)) => format!("on the host's network, first process {pid}"),
        (true, None) => "attached".into(),
        (false, None) => "none".into(),
    };
    what + end
}

pub(crate) fn bytes(n: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut v = n as f64;
    let mut unit = 0;
    while v >= 1024.0 && unit + 1 < UNITS.len() {
        v /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{n} B") } else { format!("{v:.1} {}", UNITS[unit]) }
}

fn list(vs: &[VrnicInfo]) -> String {
    let head = ["NAME", "GROUP", "ADDRESS", "LINK", "CONTAINER", "PROGRAMS", "QPS", "MEMORY", "SENT", "RECEIVED"];
    let mut rows = vec![head.map(String::from).to_vec()];
    rows.extend(vs.iter().map(|v| {
        vec![
            v.name.clone(),
            v.group.clone(),
            ips(v),
            link(v),
            if v.attached { "yes" } else { "-" }.into(),
            v.sessions.to_string(),
            v.qps.to_string(),
            bytes(v.bytes_mapped + v.bytes_copied),
            bytes(v.counters.sent_bytes),
            bytes(v.counters.received_bytes),
        ]
    }));
    table(&rows)
}

/// A vRNIC after a change, in a line.
fn changed(v: &VrnicInfo) -> String {
    let spoof = if v.allow_spoof { format!(", {}", frame_rule(v)) } else { String::new() };
    format!("{}: {} in group {}, link {}, {}{spoof}, way {}", v.name, ips(v), v.group, link(v), share(v), way(v))
}

fn show(v: &VrnicInfo) -> String {
    let c = &v.counters;
    let mut rows: Vec<(&str, String)> = vec![
        ("name", v.name.clone()),
        ("group", v.group.clone()),
        ("addresses", ips(v)),
        ("GIDs", v.gids.join(", ")),
        ("link", link(v)),
        ("MAC", v.mac.clone()),
        ("GUID", v.guid.clone()),
        ("MTU", v.mtu.to_string()),
        ("directory", v.dir.clone()),
        ("container", container(v)),
        ("programs", format!("{} of {}", v.sessions, v.limits.max_sessions)),
        ("QPs", format!("{} of {}", v.qps, v.limits.max_qp)),
        ("CQs", format!("{} of {}", v.cqs, v.limits.max_cq)),
        ("MRs", format!("{} of {}", v.mrs_mapped + v.mrs_copied, v.limits.max_mr)),
        ("  mapped (direct, share)", format!("{}, {}", v.mrs_mapped, bytes(v.bytes_mapped))),
        ("  copied", format!("{}, {}", v.mrs_copied, bytes(v.bytes_copied))),
        ("descriptors held", format!("{} of {}", v.held.descriptors.used, v.held.descriptors.limit)),
        ("mappings held", format!("{} of {}", v.held.mappings.used, v.held.mappings.limit)),
        ("addresses held", format!("{} of {}", bytes(v.held.address_space.used), bytes(v.held.address_space.limit))),
        ("pieces held", format!("{} of {}", v.held.pieces.used, v.held.pieces.limit)),
        ("filled in sparse files", format!("{} of {}", bytes(v.held.filled.used), bytes(v.held.filled.limit))),
        ("kept in the worker", format!("{} of {}", bytes(v.held.kept.used), bytes(v.held.kept.limit))),
        ("way", way(v)),
        ("share", share(v)),
        ("time of the RNIC", units::seconds(v.busy_ns)),
        ("kicks", format!("{}, each when the RNIC slept", v.kicks)),
        ("eth0", frames(v)),
        ("rules", if v.rules.is_empty() { "none".into() } else { v.rules.join("; ") }),
        ("refused by rules", format!("{} connections and datagrams, {} frames", c.refused, v.frames_refused.rules)),
        ("listens on", if v.listeners.is_empty() { "nothing".into() } else { v.listeners.join(", ") }),
        ("sent", format!("{} requests, {}", c.sent_wrs, bytes(c.sent_bytes))),
        ("received", format!("{} receives, {}", c.received_wrs, bytes(c.received_bytes))),
        ("RNR waits", c.rnr_waits.to_string()),
        ("timeouts", c.timeouts.to_string()),
        ("errors", c.errors.to_string()),
        ("dropped (UC, UD)", format!("{}, {} with a wrong Q_Key", c.dropped, c.qkey_violations)),
    ];
    let w = &c.wire;
    let packets = [
        ("sent", w.sent_pkts),
        ("not sent", w.send_err),
        ("links lost", w.link_downed),
        ("received", w.rcvd_pkts),
        ("sent again", w.retransmitted_pkts),
        ("duplicate requests", w.duplicate_request),
        ("requests after a gap", w.out_of_seq_request),
        ("RNR NAKs sent", w.send_rnr_err),
        ("RNR NAKs received", w.rcvd_rnr_err),
        ("sequence NAKs received", w.rcvd_seq_err),
        ("gaps in responses", w.implied_nak),
        ("ACKs deferred", w.ack_deferred),
        ("congestion marks received", w.np_ecn_marked_roce_packets),
        ("congestion notifications sent", w.np_cnp_sent),
        ("congestion notifications received", w.rp_cnp_handled),
        ("retries", w.completer_retry_err),
        ("retries exceeded", w.retry_exceeded_err),
        ("RNR retries exceeded", w.retry_rnr_exceeded_err),
    ];
    let packets = packets.iter().filter(|p| p.1 > 0).map(|p| format!("{} {}", p.1, p.0)).collect::<Vec<_>>();
    if !packets.is_empty() {
        rows.push(("packets", packets.join(", ")));
    }
    let mut text = table(&rows.into_iter().map(|(k, v)| vec![k.to_string(), v]).collect::<Vec<_>>());
    if !v.memory.is_empty() {
        let head = ["MEMORY", "MRS", "BYTES", "BECAUSE"].map(String::from).to_vec();
        let row = |m: &unirdma_rnic::MrNote| vec![m.way.clone(), m.mrs.to_string(), bytes(m.bytes), m.why.clone()];
        text += "\n\n";
        text += &table(&std::iter::once(head).chain(v.memory.iter().map(row)).collect::<Vec<_>>());
    }
    if !v.queue_pairs.is_empty() {
        text += "\n\n";
        text += &queue_pairs(v);
    }
    text
}

/// The reasons with a count above 0, each with its count; `None` if all counts are 0.
fn reasons(counted: &[(&str, u64)]) -> Option<String> {
    let why: Vec<String> = counted.iter().filter(|c| c.1 > 0).map(|(why, n)| format!("{n} {why}")).collect();
    (!why.is_empty()).then(|| why.join(", "))
}

/// The frames that the interface may send.
fn frame_rule(v: &VrnicInfo) -> &'static str {
    if v.allow_spoof { "may send with any IP address" } else { "sends with its own addresses only" }
}

/// The frames that the interface may send, and the frames that were refused.
fn frames(v: &VrnicInfo) -> String {
    let rule = frame_rule(v);
    let f = &v.frames_refused;
    let why = reasons(&[
        ("with another MAC", f.mac),
        ("with another IP address", f.address),
        ("with ARP or ND of another address", f.neighbour),
        ("of other protocols", f.protocol),
        ("malformed", f.malformed),
        ("by rules", f.rules),
    ]);
    why.map_or(rule.into(), |why| format!("{rule}; refused: {why}"))
}

fn way(v: &VrnicInfo) -> String {
    let w = &v.way;
    let mut text = w.in_force.name().to_owned();
    if w.asked != w.in_force {
        text += &format!(" ({} was asked for)", w.asked.name());
    }
    if let (Some(vf), Some(gid)) = (&w.vf, &w.gid) {
        text += &format!(", VF {vf} with GID {gid}, {} programs", w.contexts);
    }
    w.why.iter().for_each(|why| text += &format!(": {why}"));
    text
}

fn share(v: &VrnicInfo) -> String {
    let s = &v.share;
    let mut text = format!("weight {}", s.weight);
    if s.rate_bps > 0 {
        text += &format!(", at most {}bit/s", units::decimal(s.rate_bps));
    }
    if s.ops > 0 {
        text += &format!(", at most {}requests/s", units::decimal(s.ops));
    }
    if s.rate_bps > 0 || s.ops > 0 {
        text += &format!(", {} ahead after a pause", units::seconds(s.burst_us * 1000));
    }
    text
}

/// Most QPs of a vRNIC that a table shows.
const MAX_SHOWN: usize = 50;

fn queue_pairs(v: &VrnicInfo) -> String {
    let head = ["QP", "TYPE", "STATE", "PEER", "PEER QP", "HOST", "SENT", "RECEIVED", "AGAIN", "ERRORS"];
    let mut rows = vec![head.map(String::from).to_vec()];
    let or_dash = |s: Option<String>| s.unwrap_or_else(|| "-".into());
    rows.extend(v.queue_pairs.iter().take(MAX_SHOWN).map(|q| {
        vec![
            format!("{:#08x}", q.qpn),
            q.kind.clone(),
            q.state.clone(),
            or_dash(q.peer_gid.clone()),
            or_dash(q.peer_qpn.map(|n| format!("{n:#08x}"))),
            or_dash(q.peer_host.map(|h| h.to_string())),
            format!("{}, {}", q.counters.sent_wrs, bytes(q.counters.sent_bytes)),
            format!("{}, {}", q.counters.received_wrs, bytes(q.counters.received_bytes)),
            (q.counters.wire.retransmitted_pkts + q.counters.rnr_waits).to_string(),
            q.counters.errors.to_string(),
        ]
    }));
    let mut text = table(&rows);
    if let Some(more) = v.queue_pairs.len().checked_sub(MAX_SHOWN).filter(|&n| n > 0) {
        text += &format!("\n{more} more with --json");
    }
    text
}

fn status(s: &StatusInfo) -> String {
    let mut text = format!(
        "virtual layer {} (pid {}) serves {}: {} vRNICs, {} programs",
        s.version, s.pid, s.dir, s.vrnics, s.sessions
    );
    let h = &s.rnic_held;
    if h.times > 0 {
        let (p50, p999, worst) = (h.p50_ns as f64 / 1e3, h.p999_ns as f64 / 1e3, h.worst_ns as f64 / 1e3);
        text += &format!("\nlock of the RNIC: held {p50:.1} us (p50), {p999:.1} us (p99.9), {worst:.1} us (worst)");
    }
    text += &format!("\n{}", workers(s));
    text += &s.centre.as_ref().map(centre).unwrap_or_default();
    if let Some(w) = &s.wire {
        let own: Vec<String> = w.addresses.iter().map(ToString::to_string).collect();
        let (p, d) = (&w.port, &w.drops);
        text += &format!(
            "\nnetwork: {} with a path MTU of {}, {} peers from {}",
            own.join(", "),
            w.mtu,
            w.peers,
            w.peers_file
        );
        if let Some(e) = &w.peers_error {
            text += &format!("\n  not in force: {e}");
        }
        text += &format!("\npackets: {} sent, {} received, {} refused", p.sent, p.received, p.send_errors);
        text += &format!(
            "\ndropped: {} wrong ICRC, {} malformed, {} no such QP, {} wrong source, {} wrong P_Key, {} wrong state",
            p.icrc_errors + d.bad_icrc,
            d.malformed,
            d.no_qp,
            d.wrong_source,
            d.bad_pkey,
            d.bad_state
        );
        text += &tunnel(w);
        match w.rules.rules.len() {
            0 => text += "\nrules: none; groups are kept apart",
            n => text += &format!("\nrules: {n} in force (unirdma rule ls)"),
        }
        text += &hidden(&w.rules);
    }
    s.workers.iter().for_each(|w| text += &seal(w));
    text.lines().map(wrapped).collect::<Vec<_>>().join("\n")
}

/// A line in lines of at most 120 columns, if its words allow it. Those after the first are indented.
fn wrapped(line: &str) -> String {
    const COLUMNS: usize = 120;
    let rest = line.trim_start();
    let mut indent = line.len() - rest.len();
    let (mut text, mut column) = (" ".repeat(indent), indent);
    indent += 4;
    for (i, word) in rest.split(' ').enumerate() {
        let width = word.chars().count();
        if i > 0 && column + 1 + width > COLUMNS {
            text += &format!("\n{}", " ".repeat(indent));
            column = indent;
        } else if i > 0 {
            text.push(' ');
            column += 1;
        }
        text += word;
        column += width;
    }
    text
}

/// The secrets of a worker's group, and the packets that were dropped because they do not prove that their sender has
/// one.
fn seal(w: &WorkerInfo) -> String {
    let (group, s) = (&w.group, &w.seal);
    let mut text = secrets(&format!("group {group}"), "the group", (&s.secrets, s.sends_with), [&s.silent, &s.behind]);
    for j in &s.joined {
        let both = format!("groups {group} and {}", j.group);
        if j.secrets.is_empty() {
            text += &format!(
                "\n{both}: nothing passes between them, since they have no secret together (unirdma group set {group} --with {} --secret FILE)",
                j.group
            );
            continue;
        }
        text += &secrets(&both, "the two groups", (&j.secrets, j.sends_with), [&j.silent, &j.behind]);
    }
    let d = &s.drops;
    let why =
        reasons(&[("not sealed", d.unsealed), ("sealed with a wrong tag", d.wrong_tag), ("replayed", d.replayed)]);
    if let Some(why) = why {
        text += &format!("\ngroup {group}: dropped packets of its hosts: {why}");
    }
    text
}

/// The secrets that are accepted, the secret that is used to send, and the hosts that have none or not the current one.
fn secrets(of: &str, whose: &str, (all, sends_with): (&[u8], Option<u8>), [silent, behind]: [&[IpAddr]; 2]) -> String {
    let mut text = String::new();
    if let Some(sends_with) = sends_with {
        let others: Vec<String> = all.iter().filter(|&&n| n != sends_with).map(u8::to_string).collect();
        let also = if others.is_empty() { String::new() } else { format!("; takes {} too", others.join(" and ")) };
        text += &format!("\n{of}: packets between hosts are sealed with secret {sends_with}{also}");
    }
    for host in silent {
        text += &format!(
            "\n{of}: {host} has not shown that it has a secret of {whose}; nothing passes from it until it does"
        );
    }
    for host in behind {
        text += &format!(
            "\n{of}: {host} has not shown that it has the current secret; packets to it are sealed with an older one"
        );
    }
    text
}

/// The state of the control centre.
fn centre(c: &CentreInfo) -> String {
    let how = match c.connected {
        true => format!("connected for {} s", c.seconds),
        false => format!("away for {} s ({})", c.seconds, c.why),
    };
    let mut text = format!("\ncontrol centre: {}, {how}; host {}, revision {} in force", c.url, c.host, c.revision);
    c.problems.iter().for_each(|p| text += &format!("\n  not in force: {p}"));
    text
}

/// A table of the workers.
fn workers(s: &StatusInfo) -> String {
    let mut rows = vec![["WORKER", "PID", "VRNICS", "PROGRAMS", "MEMORY", "RESTARTS"].map(String::from).to_vec()];
    rows.extend(s.workers.iter().map(|w| {
        let pid = w.pid.map_or("none".into(), |p| p.to_string());
        let [vrnics, programs] = [w.vrnics, w.sessions].map(|n| n.to_string());
        vec![w.group.clone(), pid, vrnics, programs, bytes(w.memory), w.restarts.to_string()]
    }));
    let mut text = table(&rows);
    for (w, stuck) in s.workers.iter().filter_map(|w| Some((w, w.stuck.as_ref()?))) {
        text += &format!("\nworker of {}: its {stuck} is stuck; it ends if it stays so", w.group);
    }
    text += &format!("\nsupervisor confined by: {}", s.confinement);
    // Mostly the same for all workers.
    let mut kinds: Vec<(String, Vec<&str>)> = Vec::new();
    for w in &s.workers {
        let line = w.confinement.to_string();
        match kinds.iter_mut().find(|k| k.0 == line) {
            Some(k) => k.1.push(&w.group),
            None => kinds.push((line, vec![&w.group])),
        }
    }
    for (line, groups) in &kinds {
        let whose = if kinds.len() == 1 { "workers".into() } else { format!("worker of {}", groups.join(", ")) };
        text += &format!("\n{whose} confined by: {line}");
    }
    text
}

/// The state of the network of the containers' interfaces between hosts.
fn tunnel(w: &WireInfo) -> String {
    let mut text = match &w.firewall {
        Some(table) => format!("\nfirewall: only the virtual layer sends from and to its ports (nft table inet {table})"),
        None => "\nfirewall: none; any user of this host can send to other hosts as if it were the virtual layer (--firewall, as root)".into(),
    };
    let d = &w.tunnel.drops;
    let why = reasons(&[
        ("not from a peer's port", d.not_a_peer),
        ("of no group here", d.no_group),
        ("whose number was not agreed on", d.not_agreed),
        ("with an address that lives elsewhere", d.address),
        ("malformed", d.malformed),
    ]);
    if let Some(why) = why {
        text += &format!("\ntunnel: dropped {why}");
    }
    let elsewhere = if d.not_a_peer > 0 { ". Does it send from another address?" } else { "" };
    for host in &w.tunnel.silent {
        text += &format!(
            "\ntunnel: {host} has not said which groups it has; nothing passes from it until it does{elsewhere}"
        );
    }
    for disagreement in &w.tunnel.disagreements {
        text += &format!("\ntunnel: {disagreement}");
    }
    text
}

/// The table of VFs, and the notices below it.
fn vfs(info: &VfsInfo) -> String {
    let head = ["VF", "PCI", "NETDEV", "VERBS", "STATE", "GROUP", "INSTANCE"];
    let mut rows = vec![head.map(String::from).to_vec()];
    let or_dash = |s: &Option<String>| s.clone().unwrap_or_else(|| "-".into());
    rows.extend(info.vfs.iter().map(|v| {
        let state = v.state.clone();
        vec![
            v.name.clone(),
            or_dash(&v.pci),
            or_dash(&v.netdev),
            or_dash(&v.verbs),
            state,
            or_dash(&v.group),
            or_dash(&v.instance),
        ]
    }));
    let mut text = table(&rows);
    if info.waiting > 0 {
        text += &format!("\n{} requests wait for a VF", info.waiting);
    }
    if !info.drained.is_empty() {
        text += &format!("\ndrained: {}", info.drained.join(", "));
    }
    info.notices.iter().for_each(|n| text += &format!("\n{n}"));
    text
}

/// Addresses that rules would make reachable, but that belong to another vRNIC in the group that would reach them.
fn hidden(r: &RulesInfo) -> String {
    r.hidden.iter().map(|h| format!("\nrules: {h}")).collect()
}

fn json(r: &Response) -> io::Result<String> {
    Ok(match r {
        Response::Vrnic(v) => serde_json::to_string_pretty(&output::of::<output::Vrnic>(v)?)?,
        Response::Vrnics(v) => serde_json::to_string_pretty(&output::of::<Vec<output::Vrnic>>(v)?)?,
        Response::Names(names) => serde_json::to_string_pretty(names)?,
        Response::Groups(g) => serde_json::to_string_pretty(&output::of::<Vec<output::Group>>(g)?)?,
        Response::Rules(r) => serde_json::to_string_pretty(&output::of::<output::Rules>(r)?)?,
        Response::Status(s) => serde_json::to_string_pretty(&output::of::<output::Status>(s)?)?,
        Response::Vfs(v) => serde_json::to_string_pretty(&output::of::<output::Vfs>(v)?)?,
        Response::Captured { lost } => format!("{{\"lost\": {lost}}}"),
        Response::Done => "{}".into(),
        Response::Error(e) => serde_json::to_string_pretty(e)?,
    })
}

fn text(r: &Response) -> String {
    match r {
        Response::Vrnic(v) => changed(v),
        Response::Vrnics(v) => list(v),
        Response::Names(all) => all.vrnics.join("\n"),
        Response::Groups(g) => {
            let mut rows = vec![["GROUP", "VRNICS", "VNI", "WEIGHT", "SECRET", "VLAN"].map(String::from).to_vec()];
            let vni = |n: Option<u32>| n.map_or("-".into(), |n| n.to_string());
            let row = |g: &GroupInfo| {
                let (weight, secret) = (g.weight.to_string(), vni(g.secret.map(u32::from)));
                let vlan = vni(Some(u32::from(g.vlan)).filter(|v| *v > 0));
                vec![g.name.clone(), g.vrnics.to_string(), vni(g.vni), weight, secret, vlan]
            };
            rows.extend(g.iter().map(row));
            // Only for groups whose weight somebody has changed.
            let mut changed = g.iter().filter(|g| g.weight != USUAL_GROUP_WEIGHT);
            let lacks = changed.find_map(|g| g.weight_lacks.as_ref());
            let lacks = lacks.map(|why| format!("\nweights of groups do not count here: {why}"));
            table(&rows) + &lacks.unwrap_or_default()
        }
        Response::Rules(r) if r.rules.is_empty() => "no rules: groups are kept apart".into(),
        Response::Rules(r) => r.rules.join("\n") + &hidden(r),
        Response::Status(s) => status(s),
        Response::Vfs(v) => vfs(v),
        Response::Captured { lost } => format!("{lost} packets lost"),
        Response::Done => String::new(),
        Response::Error(e) => e.clone(),
    }
}

/// The names of what a list has. A change has none.
fn names(r: &Response) -> String {
    let names: Vec<&str> = match r {
        Response::Vrnics(all) => all.iter().map(|v| v.name.as_str()).collect(),
        Response::Groups(all) => all.iter().map(|g| g.name.as_str()).collect(),
        Response::Vfs(info) => info.vfs.iter().map(|v| v.name.as_str()).collect(),
        _ => Vec::new(),
    };
    names.join("\n")
}

/// Prints a response.
pub(crate) fn response(r: &Response, how: &Out) -> io::Result<()> {
    let out = match how {
        Out { json: true, .. } => json(r)?,
        Out { quiet: true, .. } => names(r),
        _ => text(r),
    };
    if out.is_empty() { Ok(()) } else { line(&out) }
}

/// Prints all about these vRNICs. `one`: as JSON, the first one alone and not a list.
pub(crate) fn vrnics(all: &[VrnicInfo], one: bool, how: &Out) -> io::Result<()> {
    let each = |f: fn(&VrnicInfo) -> String, between| all.iter().map(f).collect::<Vec<_>>().join(between);
    line(&match (how, all) {
        (Out { json: true, .. }, [first, ..]) if one => {
            serde_json::to_string_pretty(&output::of::<output::Vrnic>(first)?)?
        }
        (Out { json: true, .. }, _) => serde_json::to_string_pretty(&output::of::<Vec<output::Vrnic>>(&all)?)?,
        (Out { quiet: true, .. }, _) => each(|v| v.name.clone(), "\n"),
        _ => each(show, "\n\n"),
    })
}

/// Prints a text and ends its last line.
pub(crate) fn line(out: &str) -> io::Result<()> {
    match writeln!(anstream::stdout(), "{out}") {
        // The reader has closed the pipe.
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        r => r,
    }
}

#[cfg(test)]
mod tests {
    use unirdma_supervisor::admin::VfInfo;

    use super::*;

    #[test]
    fn lines_are_wrapped_between_words() {
        assert_eq!(wrapped("  short  line"), "  short  line");
        let long = format!("  first {}", "word ".repeat(40));
        let lines = wrapped(long.trim_end());
        assert!(lines.lines().all(|l| l.len() <= 120) && lines.lines().skip(1).all(|l| l.starts_with("      word")));
        assert_eq!(lines.split_whitespace().count(), 41);
        let whole = "x".repeat(200);
        assert_eq!(wrapped(&whole), whole);
    }

    #[test]
    fn a_change_says_what_a_router_may() {
        let mut v = VrnicInfo { name: "r".into(), group: "blue".into(), ..VrnicInfo::default() };
        assert!(!changed(&v).contains("may send"), "{}", changed(&v));
        v.allow_spoof = true;
        assert!(changed(&v).contains(", may send with any IP address, way "), "{}", changed(&v));
    }

    #[test]
    fn notices_stand_below_the_table() {
        let vf = VfInfo { name: "pf/0".into(), state: "absent".into(), ..VfInfo::default() };
        let info = VfsInfo {
            vfs: vec![vf],
            waiting: 2,
            drained: vec!["pf".into(), "pf/0".into()],
            notices: vec!["there is no PF `pf`".into()],
            ..VfsInfo::default()
        };
        let wanted = "VF    PCI  NETDEV  VERBS  STATE   GROUP  INSTANCE\n\
                      pf/0  -    -       -      absent  -      -\n\
                      2 requests wait for a VF\ndrained: pf, pf/0\nthere is no PF `pf`";
        assert_eq!(vfs(&info), wanted);
    }
}
