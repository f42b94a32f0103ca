//! `cargo xtask bench local`: one run, with every figure relative to TCP loopback and to one memcpy.

use std::hint::black_box;
use std::io::{Read, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use harness::{Lab, Result, median, packages, print_json, tcp::Tcp};
use serde::Serialize;

use super::{cpu_of, cpu_times, rows};

#[derive(Serialize)]
struct Report {
    topology: String,
    latency: Vec<Latency>,
    floor_us: f64,
    bandwidth: Vec<Bandwidth>,
    cpu: Vec<Cpu>,
    events: Events,
    /// Milliseconds for one vRNIC, averaged over 100.
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

/// Processor time for moving data, core-seconds per GB, of both programs and of the virtual layer's processes.
#[derive(Serialize)]
struct Cpu {
    bytes: u64,
    /// WRITEs for whose completions the client spins.
    write: f64,
    /// The part of `write` that the virtual layer uses.
    write_layer: f64,
    /// TCP loopback with ends that sleep while they wait.
    tcp: f64,
    write_over_tcp: f64,
}

/// Cost of sleeping until a message arrives: one-way times of 2 B, typical values in microseconds.
#[derive(Serialize)]
struct Events {
    /// SENDs with a receiver that sleeps (`event_us`) and with one that spins (`poll_us`).
    event_us: f64,
    poll_us: f64,
    added_us: f64,
    /// A byte in a pipe that wakes another process: the cost of a wake-up on this machine.
    wake_us: f64,
    added_over_wake: f64,
    /// TCP loopback with ends that sleep.
    tcp_us: f64,
    event_over_tcp: f64,
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

/// The supervisor and the workers.
fn layer(lab: &Lab) -> Result<Vec<i32>> {
    Ok(lab.workers()?.iter().map(|w| w.1).chain([lab.pid() as i32]).collect())
}

/// Processor time per GB of WRITEs and of TCP. The time of a run with few WRITEs is subtracted: it covers the start of
/// the programs, and perftest's measurement of the processor's clock.
fn cpu(lab: &Lab, size: usize) -> Result<Cpu> {
    const BYTES: usize = 32 << 30;
    const FEW: usize = 100;
    let count = BYTES / size;
    let layer = layer(lab)?;
    let gigabytes = |count: usize| (size * count) as f64 / 1e9;
    let run = |count: usize| -> Result<(f64, f64)> {
        let (programs, of_layer) = (cpu_times("self").1, cpu_of(&layer));
        perftest(lab, &format!("ib_write_bw -s {size} -n {count}"))?;
        Ok((cpu_times("self").1 - programs, cpu_of(&layer) - of_layer))
    };
    let ((programs, of_layer), (programs_few, layer_few)) = (run(FEW + count)?, run(FEW)?);
    let write_layer = (of_layer - layer_few) / gigabytes(count);
    let write = (programs - programs_few) / gigabytes(count) + write_layer;
    let mut peer = Tcp::start()?;
    let both = |peer: &Tcp| cpu_times("self").0 + cpu_times(peer.pid()).0;
    let before = both(&peer);
    peer.bandwidth(size, count / 8, true)?;
    let tcp = (both(&peer) - before) / gigabytes(count / 8);
    Ok(Cpu { bytes: size as u64, write, write_layer, tcp, write_over_tcp: write / tcp })
}

/// One-way time by which a byte in a pipe wakes another process, typical, microseconds.
fn wake_up() -> Result<f64> {
    const ROUNDS: usize = 20_000;
    let text = |e: std::io::Error| format!("cat: {e}");
    let mut cat = Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().map_err(text)?;
    let (Some(mut to), Some(mut from)) = (cat.stdin.take(), cat.stdout.take()) else {
        return Err("cat has no pipes".into());
    };
    let mut times = Vec::with_capacity(ROUNDS);
    for _ in 0..ROUNDS {
        let start = Instant::now();
        to.write_all(&[0]).and_then(|()| from.read_exact(&mut [0])).map_err(text)?;
        times.push(start.elapsed().as_secs_f64() * 1e6 / 2.0);
    }
    drop(to);
    cat.wait().map_err(text)?;
    Ok(median(times))
}

fn events(lab: &Lab) -> Result<Events> {
    let typical =
        |options: &str| -> Result<f64> { Ok(perftest(lab, &format!("ib_send_lat -s 2 -n 20000{options}"))?[0][4]) };
    let (poll_us, event_us) = (typical("")?, typical(" -e")?);
    let wake_us = wake_up()?;
    let mut tcp = Tcp::start()?;
    let tcp_us = median(tcp.latencies(2, 20_000, true)?);
    let added_us = event_us - poll_us;
    Ok(Events {
        event_us,
        poll_us,
        added_us,
        wake_us,
        added_over_wake: added_us / wake_us,
        tcp_us,
        event_over_tcp: event_us / tcp_us,
    })
}

fn idle(lab: &Lab) -> Result<(f64, f64)> {
    // `unirdma status` takes the time to start the program and to send a request.
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
    let layer = layer(lab)?;
    let (before, start) = (cpu_of(&layer), Instant::now());
    std::thread::sleep(Duration::from_secs(3));
    let used = cpu_of(&layer) - before;
    Ok(((total / 100.0 - asking).max(0.0), used / start.elapsed().as_secs_f64() * 100.0))
}

pub(super) fn local(json: bool, svg: &Path) -> Result<()> {
    packages::ensure(&[packages::RUN])?;
    let say = |s: &str| eprintln!("{s}");
    say("building");
    harness::build()?;
    let lab = Lab::start(None)?;
    lab.vrnic("a", &["--ip", "10.0.0.1"])?;
    lab.vrnic("b", &["--ip", "10.0.0.2"])?;
    let topology = harness::topology();
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
        let over_tcp = tcp.bandwidth(size, ((256 << 20) / size).clamp(50, 100_000), false)?;
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
    say("processor time of 64 KiB and 1 MiB; events");
    let cpu = vec![cpu(&lab, 64 << 10)?, cpu(&lab, 1 << 20)?];
    let events = events(&lab)?;
    say("idle with 100 vRNICs");
    let (create_vrnic_ms, idle_cpu_percent) = idle(&lab)?;
    let report = Report { topology, latency, floor_us, bandwidth, cpu, events, create_vrnic_ms, idle_cpu_percent };
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
        "\n{:>10} {:>10} {:>10} {:>10} {:>14}   (both programs and the virtual layer; a program that spins counts, too)",
        "core-s/GB", "WRITE", "of layer", "TCP", "WRITE/TCP"
    );
    for c in &r.cpu {
        println!(
            "{:>8} B {:>10.3} {:>10.3} {:>10.3} {:>14.2}",
            c.bytes, c.write, c.write_layer, c.tcp, c.write_over_tcp
        );
    }
    let e = &r.events;
    println!(
        "\nSEND to a program that sleeps, 2 B: {:.2} us one way, TCP {:.2}, ratio {:.2}",
        e.event_us, e.tcp_us, e.event_over_tcp
    );
    println!(
        "  to one that spins: {:.2} us; sleeping adds {:.2}; to wake a process by a pipe takes {:.2}, ratio {:.2}",
        e.poll_us, e.added_us, e.wake_us, e.added_over_wake
    );
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
