//! `cargo xtask bench local`: one run, every figure beside TCP loopback and beside one memcpy.

use std::hint::black_box;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde::Serialize;

use super::{print_json, rows};
use crate::lab::{self, Lab};
use crate::tcp::Tcp;
use crate::{Result, packages};

#[derive(Serialize)]
struct Report {
    topology: String,
    latency: Vec<Latency>,
    floor_us: f64,
    bandwidth: Vec<Bandwidth>,
    /// Milliseconds for one vRNIC, over 100.
    create_vrnic_ms: f64,
    /// Processor time of the virtual layer over wall time, idle with 100 vRNICs, per cent.
    idle_cpu_percent: f64,
}

#[derive(Serialize)]
struct Latency {
    operation: String,
    typical_us: f64,
    average_us: f64,
    p99_us: f64,
    /// TCP's time over ours, typical.
    times_faster_than_tcp: f64,
}

#[derive(Serialize)]
struct Bandwidth {
    bytes: u64,
    write: f64,
    read: f64,
    send: f64,
    tcp: f64,
    memcpy: f64,
    write_over_memcpy: f64,
    write_over_tcp: f64,
}

/// MiB/s of copying `size` bytes from one buffer to another.
pub(super) fn memcpy(size: usize) -> f64 {
    let (src, mut dst) = (vec![1u8; size], vec![0u8; size]);
    let count = ((1usize << 30) / size).clamp(200, 4_000_000);
    let mut best = f64::MAX;
    for _ in 0..3 {
        let start = Instant::now();
        for _ in 0..count {
            dst.copy_from_slice(black_box(&src));
            black_box(&mut dst);
        }
        best = best.min(start.elapsed().as_secs_f64());
    }
    (size * count) as f64 / (1 << 20) as f64 / best
}

/// One-way time of a token that three yielding threads pass on: sender, virtual layer, receiver, virtual
/// layer, and again. Microseconds.
fn floor() -> f64 {
    const ROUNDS: u64 = 100_000;
    let token = AtomicU64::new(0);
    let pass = |mine: fn(u64) -> bool| {
        loop {
            match token.load(Ordering::Acquire) {
                t if t >= ROUNDS * 4 => break,
                t if mine(t % 4) => token.store(t + 1, Ordering::Release),
                _ => std::thread::yield_now(),
            }
        }
    };
    let start = Instant::now();
    std::thread::scope(|s| {
        s.spawn(|| pass(|t| t == 0));
        s.spawn(|| pass(|t| t == 2));
        s.spawn(|| pass(|t| t % 2 == 1));
    });
    start.elapsed().as_secs_f64() * 1e6 / ROUNDS as f64 / 2.0
}

fn perftest(lab: &Lab, command: &str) -> Result<Vec<Vec<f64>>> {
    rows(command, lab.pair(("a", command), ("b", &format!("{command} 10.0.0.1")), &[])?)
}

/// Processor time of a process, in clock ticks.
fn ticks(pid: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let after = stat.rsplit(')').next().unwrap_or_default();
    let field = |i: usize| after.split_whitespace().nth(i).and_then(|w| w.parse::<u64>().ok()).unwrap_or(0);
    field(11) + field(12)
}

fn idle(lab: &Lab) -> Result<(f64, f64)> {
    // The time of `unirdma status` is what starting the program and asking costs.
    let timed = |args: &[&str]| {
        let start = Instant::now();
        let o = lab.unirdma(args);
        (start.elapsed().as_secs_f64() * 1e3, o)
    };
    let mut asking = f64::MAX;
    for _ in 0..20 {
        asking = asking.min(timed(&["status"]).0);
    }
    let mut total = 0.0;
    for i in 0..100 {
        let (ms, o) = timed(&["vrnic", "add", &format!("idle{i}")]);
        if !o.ok() {
            return Err(o.text);
        }
        total += ms;
    }
    std::thread::sleep(Duration::from_millis(500));
    let (before, start) = (ticks(lab.pid()), Instant::now());
    std::thread::sleep(Duration::from_secs(3));
    let used = (ticks(lab.pid()) - before) as f64 / 100.0;
    Ok(((total / 100.0 - asking).max(0.0), used / start.elapsed().as_secs_f64() * 100.0))
}

pub(crate) fn local(json: bool, svg: &Path) -> Result<()> {
    packages::ensure(&[packages::RUN])?;
    let say = |s: &str| eprintln!("{s}");
    say("building");
    lab::build()?;
    let lab = Lab::start(None)?;
    lab.vrnic("a", &["--ip", "10.0.0.1"])?;
    lab.vrnic("b", &["--ip", "10.0.0.2"])?;
    let topology = super::topology();
    say("latency");
    let mut tcp = Tcp::start()?;
    tcp.latencies(2, 2000, false)?;
    let mut latency = Vec::new();
    let t = tcp.latencies(2, 20_000, false)?;
    // Its other process spins: nothing else is measured while it lives.
    drop(tcp);
    let tcp_typical = t[t.len() / 2];
    for (name, program) in [("WRITE", "ib_write_lat"), ("SEND", "ib_send_lat"), ("READ", "ib_read_lat")] {
        let row = perftest(&lab, &format!("{program} -s 2 -n 20000"))?.pop().unwrap_or_default();
        latency.push(Latency {
            operation: format!("{name} ({program})"),
            typical_us: row[4],
            average_us: row[5],
            p99_us: row[7],
            times_faster_than_tcp: tcp_typical / row[4],
        });
    }
    latency.push(Latency {
        operation: "TCP loopback, spinning".into(),
        typical_us: tcp_typical,
        average_us: t.iter().sum::<f64>() / t.len() as f64,
        p99_us: t[t.len() * 99 / 100],
        times_faster_than_tcp: 1.0,
    });
    let floor_us = floor();
    say("bandwidth: 64 B to 8 MiB");
    let all = |program: &str| perftest(&lab, &format!("{program} -a -n 1000"));
    let (write, read, send) = (all("ib_write_bw")?, all("ib_read_bw")?, all("ib_send_bw")?);
    let mut tcp = Tcp::start()?;
    let mut bandwidth = Vec::new();
    for log in 6..=23 {
        let size = 1usize << log;
        let of = |rows: &[Vec<f64>]| rows.iter().find(|r| r[0] as usize == size).map_or(0.0, |r| r[3]);
        let over_tcp = tcp.bandwidth(size, ((256 << 20) / size).clamp(50, 100_000))?;
        bandwidth.push(Bandwidth {
            bytes: size as u64,
            write: of(&write),
            read: of(&read),
            send: of(&send),
            tcp: over_tcp,
            memcpy: 0.0,
            write_over_memcpy: 0.0,
            write_over_tcp: of(&write) / over_tcp,
        });
    }
    drop(tcp);
    for b in &mut bandwidth {
        b.memcpy = memcpy(b.bytes as usize);
        b.write_over_memcpy = b.write / b.memcpy;
    }
    say("idle with 100 vRNICs");
    let (create_vrnic_ms, idle_cpu_percent) = idle(&lab)?;
    let report = Report { topology, latency, floor_us, bandwidth, create_vrnic_ms, idle_cpu_percent };
    if let Some(dir) = svg.parent() {
        let _ = std::fs::create_dir_all(dir);
    }
    std::fs::write(svg, plot(&report)).map_err(|e| format!("cannot write {}: {e}", svg.display()))?;
    if json {
        print_json(&report)?;
    } else {
        print(&report);
    }
    say(&format!("plot: {}", svg.display()));
    Ok(())
}

fn print(r: &Report) {
    println!("topology: {}\n", r.topology);
    println!(
        "{:28} {:>12} {:>12} {:>12} {:>12}",
        "latency, 2 B, one way", "typical us", "average us", "99 % us", "TCP / this"
    );
    for l in &r.latency {
        println!(
            "{:28} {:>12.2} {:>12.2} {:>12.2} {:>11.1}x",
            l.operation, l.typical_us, l.average_us, l.p99_us, l.times_faster_than_tcp
        );
    }
    println!("{:28} {:>12.2}   (three threads that pass a token and yield)\n", "floor", r.floor_us);
    println!(
        "{:>10} {:>10} {:>10} {:>10} {:>10} {:>10} {:>14} {:>10}",
        "MiB/s of", "WRITE", "READ", "SEND", "TCP", "memcpy", "WRITE/memcpy", "WRITE/TCP"
    );
    for b in &r.bandwidth {
        println!(
            "{:>8} B {:>10.0} {:>10.0} {:>10.0} {:>10.0} {:>10.0} {:>14.2} {:>9.1}x",
            b.bytes, b.write, b.read, b.send, b.tcp, b.memcpy, b.write_over_memcpy, b.write_over_tcp
        );
    }
    println!(
        "\ncreating a vRNIC: {:.2} ms; idle with 100 vRNICs: {:.2} % of a core",
        r.create_vrnic_ms, r.idle_cpu_percent
    );
}

/// Bandwidth by message size, both axes logarithmic.
fn plot(r: &Report) -> String {
    const W: f64 = 720.0;
    const H: f64 = 440.0;
    const PAD: f64 = 64.0;
    let top =
        r.bandwidth.iter().flat_map(|b| [b.write, b.read, b.send, b.tcp, b.memcpy]).fold(1.0, f64::max).log10().ceil();
    let x = |bytes: u64| PAD + (bytes as f64).log2().mul_add(1.0, -6.0) / 17.0 * (W - 2.0 * PAD);
    let y = |v: f64| H - PAD - (v.max(1.0).log10() / top) * (H - 2.0 * PAD);
    let mut s = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {W} {H}\" font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"{W}\" height=\"{H}\" fill=\"white\"/>\n<text x=\"{PAD}\" y=\"24\" font-size=\"15\">Bandwidth between two containers of one host</text>\n<text x=\"{PAD}\" y=\"42\" fill=\"#555\">{}</text>\n",
        r.topology
    );
    for d in 0..=top as u32 {
        let at = y(10f64.powi(d as i32));
        s += &format!(
            "<line x1=\"{PAD}\" x2=\"{}\" y1=\"{at}\" y2=\"{at}\" stroke=\"#ddd\"/><text x=\"{}\" y=\"{}\" text-anchor=\"end\">{}</text>\n",
            W - PAD,
            PAD - 6.0,
            at + 4.0,
            10u64.pow(d)
        );
    }
    for (label, bytes) in [
        ("64 B", 64u64),
        ("1 KiB", 1 << 10),
        ("16 KiB", 1 << 14),
        ("256 KiB", 1 << 18),
        ("1 MiB", 1 << 20),
        ("8 MiB", 1 << 23),
    ] {
        s += &format!("<text x=\"{}\" y=\"{}\" text-anchor=\"middle\">{label}</text>\n", x(bytes), H - PAD + 18.0);
    }
    s += &format!(
        "<text x=\"14\" y=\"{}\" transform=\"rotate(-90 14 {})\" text-anchor=\"middle\">MiB/s</text>\n",
        H / 2.0,
        H / 2.0
    );
    type Of = fn(&Bandwidth) -> f64;
    let series: [(&str, &str, Of); 5] = [
        ("memcpy", "#999999", |b| b.memcpy),
        ("WRITE", "#1f77b4", |b| b.write),
        ("READ", "#2ca02c", |b| b.read),
        ("SEND", "#9467bd", |b| b.send),
        ("TCP", "#d62728", |b| b.tcp),
    ];
    for (i, (name, colour, of)) in series.iter().enumerate() {
        let points: Vec<String> = r.bandwidth.iter().map(|b| format!("{:.1},{:.1}", x(b.bytes), y(of(b)))).collect();
        let at = H - PAD - 90.0 + 16.0 * i as f64;
        s += &format!(
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>\n",
            points.join(" ")
        );
        s += &format!("<text x=\"{}\" y=\"{at}\" fill=\"{colour}\">{name}</text>\n", W - PAD - 70.0);
    }
    s + "</svg>\n"
}
