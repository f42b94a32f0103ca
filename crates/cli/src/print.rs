//! Tables and JSON on standard output.

use std::io::{self, Write};

use unirdma_host::VrnicInfo;
use unirdma_host::admin::Response;

/// Lines up columns; the first row is the heading.
fn table(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |c: usize| rows.iter().filter_map(|r| r.get(c)).map(|s| s.chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let line = |r: &Vec<String>| {
        let cells: Vec<String> = r.iter().zip(&widths).map(|(s, &w)| format!("{s:w$}")).collect();
        cells.join("  ").trim_end().to_string()
    };
    rows.iter().map(line).collect::<Vec<_>>().join("\n")
}

fn ips(v: &VrnicInfo) -> String {
    v.ips.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
}

fn bytes(n: u64) -> String {
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
    let head = ["NAME", "GROUP", "ADDRESS", "CONTAINER", "PROGRAMS", "QPS", "MEMORY", "SENT", "RECEIVED"];
    let mut rows = vec![head.map(String::from).to_vec()];
    rows.extend(vs.iter().map(|v| {
        vec![
            v.name.clone(),
            v.group.clone(),
            ips(v),
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

fn show(v: &VrnicInfo) -> String {
    let c = &v.counters;
    let rows: Vec<(&str, String)> = vec![
        ("name", v.name.clone()),
        ("group", v.group.clone()),
        ("addresses", ips(v)),
        ("GIDs", v.gids.join(", ")),
        ("MAC", v.mac.clone()),
        ("GUID", v.guid.clone()),
        ("MTU", v.mtu.to_string()),
        ("directory", v.dir.clone()),
        ("container", if v.attached { "attached" } else { "none" }.into()),
        ("programs", v.sessions.to_string()),
        ("QPs", format!("{} of {}", v.qps, v.limits.max_qp)),
        ("CQs", format!("{} of {}", v.cqs, v.limits.max_cq)),
        ("MRs", format!("{} of {}", v.mrs_mapped + v.mrs_copied, v.limits.max_mr)),
        ("  mapped (direct, share)", format!("{}, {}", v.mrs_mapped, bytes(v.bytes_mapped))),
        ("  copied", format!("{}, {}", v.mrs_copied, bytes(v.bytes_copied))),
        ("sent", format!("{} requests, {}", c.sent_wrs, bytes(c.sent_bytes))),
        ("received", format!("{} receives, {}", c.received_wrs, bytes(c.received_bytes))),
        ("RNR waits", c.rnr_waits.to_string()),
        ("timeouts", c.timeouts.to_string()),
        ("errors", c.errors.to_string()),
    ];
    table(&rows.into_iter().map(|(k, v)| vec![k.to_string(), v]).collect::<Vec<_>>())
}

fn json(r: &Response) -> serde_json::Result<String> {
    match r {
        Response::Vrnic(v) => serde_json::to_string_pretty(v),
        Response::Vrnics(v) => serde_json::to_string_pretty(v),
        Response::Groups(g) => serde_json::to_string_pretty(g),
        Response::Status(s) => serde_json::to_string_pretty(s),
        Response::Done => Ok("{}".into()),
        Response::Error(e) => serde_json::to_string_pretty(e),
    }
}

fn text(r: &Response) -> String {
    match r {
        Response::Vrnic(v) => show(v),
        Response::Vrnics(v) => list(v),
        Response::Groups(g) => {
            let mut rows = vec![vec!["GROUP".to_string(), "VRNICS".into()]];
            rows.extend(g.iter().map(|g| vec![g.name.clone(), g.vrnics.to_string()]));
            table(&rows)
        }
        Response::Status(s) => format!(
            "virtual layer {} (pid {}) serves {}: {} vRNICs, {} programs",
            s.version, s.pid, s.dir, s.vrnics, s.sessions
        ),
        Response::Done => String::new(),
        Response::Error(e) => e.clone(),
    }
}

/// Prints a response.
pub(crate) fn response(r: &Response, as_json: bool) -> io::Result<()> {
    let out = if as_json { json(r)? } else { text(r) };
    if out.is_empty() {
        return Ok(());
    }
    match writeln!(io::stdout(), "{out}") {
        // Whoever reads has seen enough.
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        r => r,
    }
}
