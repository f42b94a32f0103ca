//! `cargo xtask bench engine`: what the RNIC and its pollers execute when no program takes part. The test kit's example
//! `engine` measures; this prints.

use std::process::Command;

use serde::Serialize;

use super::print_json;
use crate::{Result, lab};

#[derive(Serialize)]
struct Report {
    topology: String,
    rows: Vec<Row>,
    latency: Latency,
}

/// From the post of a WRITE of 8 bytes until its slot is free again, with one poller that has a core for itself.
#[derive(Debug, PartialEq, Serialize)]
struct Latency {
    p50_ns: u64,
    p99_ns: u64,
    /// From one core to the other.
    hop_ns: u64,
    hops: f64,
}

fn latency(line: &str) -> Option<Latency> {
    let mut words = line.strip_prefix("latency ")?.split_whitespace().map_while(|w| w.parse::<u64>().ok());
    let (p50_ns, p99_ns, hop_ns) = (words.next()?, words.next()?, words.next()?);
    Some(Latency { p50_ns, p99_ns, hop_ns, hops: p50_ns as f64 / hop_ns as f64 })
}

#[derive(Serialize)]
struct Row {
    pollers: u32,
    /// Of one WRITE.
    bytes: u64,
    millions_s: f64,
    mib_s: f64,
    /// From one WRITE to the next, of all pairs together.
    ns: f64,
}

/// Pollers, bytes and WRITEs a second, as the example prints them.
fn row(line: &str) -> Option<Row> {
    let mut words = line.split_whitespace();
    let (pollers, bytes) = (words.next()?.parse().ok()?, words.next()?.parse::<u64>().ok()?);
    let rate: f64 = words.next()?.parse().ok()?;
    let mib_s = rate * bytes as f64 / f64::from(1 << 20);
    Some(Row { pollers, bytes, millions_s: rate / 1e6, mib_s, ns: 1e9 / rate })
}

pub(crate) fn engine(json: bool) -> Result<()> {
    eprintln!("building");
    let program = lab::build_example("engine")?;
    eprintln!("WRITEs of 8 B to 1 MiB with one poller and with two");
    let o = Command::new(&program).output().map_err(|e| format!("{}: {e}", program.display()))?;
    let out = String::from_utf8_lossy(&o.stdout);
    let rows: Vec<Row> = out.lines().filter_map(row).collect();
    let failed = || format!("{} failed: {}", program.display(), String::from_utf8_lossy(&o.stderr));
    let latency = out.lines().find_map(latency).filter(|_| o.status.success()).ok_or_else(failed)?;
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let topology =
        format!("{cores} cores; two pairs of vRNICs, one QP each that writes; send queues that are always full");
    let report = Report { topology, rows, latency };
    if json {
        return print_json(&report);
    }
    println!("topology: {}\n", report.topology);
    println!("{:>8} {:>10} {:>12} {:>12} {:>14}", "pollers", "WRITE of", "M/s", "MiB/s", "ns a WRITE");
    for r in &report.rows {
        println!("{:>8} {:>8} B {:>12.3} {:>12.0} {:>14.1}", r.pollers, r.bytes, r.millions_s, r.mib_s, r.ns);
    }
    let l = &report.latency;
    println!(
        "\none poller with a core for itself, nobody yields: a WRITE of 8 B, from its post until its slot is free again"
    );
    println!("p50 {} ns, p99 {} ns; from core to core {} ns: {:.1} hops", l.p50_ns, l.p99_ns, l.hop_ns, l.hops);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_become_bandwidth_and_time() {
        let r = row("2 65536 1000000.0").expect("a row");
        assert_eq!((r.pollers, r.bytes, r.ns), (2, 65536, 1000.0));
        assert!((r.mib_s - 62500.0).abs() < 1e-6 && (r.millions_s - 1.0).abs() < 1e-9);
        assert!(row("warning: nothing").is_none());
        assert_eq!(
            latency("latency 800 1500 200"),
            Some(Latency { p50_ns: 800, p99_ns: 1500, hop_ns: 200, hops: 4.0 })
        );
        assert!(latency("2 65536 1000000.0").is_none() && latency("latency 1 2").is_none());
    }
}
