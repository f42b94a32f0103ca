//! `cargo xtask bench wire`: two hosts joined by a veth pair, relative to TCP over the same pair in the same run.

use std::net::SocketAddr;
use std::process::Command;

use harness::{
    Link, Result, TwoHosts, packages, print_json,
    tcp::Tcp,
    vm::{RXE as OWN, Rxe},
};
use serde::{Deserialize, Serialize};

use super::rows;

#[derive(Serialize)]
struct Report {
    topology: String,
    networks: Vec<Network>,
    /// WRITE of 1 MiB, MTU 9000: bandwidth without the invariant CRC / with it.
    bandwidth_without_icrc: Option<f64>,
    /// Cost of a secret of the group.
    secret: Option<Secret>,
    guest: Vec<InGuest>,
}

/// Two hosts without a secret of their group and with one, MTU 9000.
#[derive(Serialize)]
struct Secret {
    /// MiB/s of WRITEs of 1 MiB, and of SENDs of 4 KiB.
    write: [f64; 2],
    send: [f64; 2],
    /// Microseconds of a WRITE of 2 B, one way.
    latency_us: [f64; 2],
}

/// A figure of one guest; bandwidth or latency.
#[derive(Serialize)]
struct InGuest {
    what: String,
    rxe: f64,
    /// The kernel's software iWARP, if it could be built.
    siw: Option<f64>,
    /// Two vRNICs of one virtual layer.
    ours: f64,
    /// Two virtual layers, over the loopback interface.
    by_packets: f64,
    ours_over_rxe: f64,
}

#[derive(Serialize)]
struct Network {
    mtu: u32,
    latency: Vec<Latency>,
    bandwidth: Vec<Bandwidth>,
}

#[derive(Serialize)]
struct Latency {
    operation: String,
    typical_us: f64,
    p99_us: f64,
    /// Ratios to TCP with spinning ends, and to TCP with ends that sleep until data arrives.
    over_spinning_tcp: f64,
    over_sleeping_tcp: f64,
}

#[derive(Serialize)]
struct Bandwidth {
    bytes: usize,
    write: f64,
    read: f64,
    send: f64,
    tcp: f64,
    write_over_tcp: f64,
}

/// Figures of TCP between the two hosts.
#[derive(Serialize, Deserialize)]
struct TcpFigures {
    /// Latency: median and 99 %, microseconds.
    spinning: (f64, f64),
    sleeping: (f64, f64),
    /// (bytes, MiB/s)
    bandwidth: Vec<(usize, f64)>,
}

const SIZES: [usize; 9] = [64, 256, 1024, 4096, 16_384, 65_536, 262_144, 1 << 20, 8 << 20];
const PORT: u16 = 5201;

/// The hidden command that measures TCP between this network namespace and a process in another one.
pub(super) fn tcp(listen: SocketAddr, netns: &str) -> Result<()> {
    let mut peer = Command::new("ip");
    peer.args(["netns", "exec", netns]).arg(std::env::current_exe().map_err(|e| e.to_string())?);
    let mut t = Tcp::start_with(listen, peer)?;
    let mut latency = |sleep: bool| -> Result<(f64, f64)> {
        t.latencies(2, 2000, sleep)?;
        let all = t.latencies(2, 20_000, sleep)?;
        Ok((all[all.len() / 2], all[all.len() * 99 / 100]))
    };
    let (spinning, sleeping) = (latency(false)?, latency(true)?);
    let mut bandwidth = Vec::new();
    for size in SIZES {
        bandwidth.push((size, t.bandwidth(size, ((256 << 20) / size).clamp(50, 100_000), false)?));
    }
    let figures = TcpFigures { spinning, sleeping, bandwidth };
    println!("{}", serde_json::to_string(&figures).map_err(|e| e.to_string())?);
    Ok(())
}

fn measure_tcp(two: &TwoHosts, link: &Link<'_>) -> Result<TcpFigures> {
    let exe = std::env::current_exe().map_err(|e| e.to_string())?;
    let listen = format!("{}:{PORT}", link.address(0));
    let mut c = Command::new("ip");
    c.args(["netns", "exec", two.netns(0)]).arg(exe).args(["tcp-bench", &listen, two.netns(1)]);
    let o = c.output().map_err(|e| e.to_string())?;
    serde_json::from_slice(&o.stdout).map_err(|e| format!("TCP: {e}: {}", String::from_utf8_lossy(&o.stderr)))
}

fn network(mtu: u32) -> Result<Network> {
    let link = Link { name: "w", ipv6: false, mtu, args: &[] };
    let two = TwoHosts::start(link)?;
    let run = |command: &str| rows(command, two.pair(command, &format!("{command} 10.0.0.1"))?);
    let tcp = measure_tcp(&two, &link)?;
    let line = |operation: String, (typical_us, p99_us): (f64, f64)| Latency {
        operation,
        typical_us,
        p99_us,
        over_spinning_tcp: typical_us / tcp.spinning.0,
        over_sleeping_tcp: typical_us / tcp.sleeping.0,
    };
    let mut latency = Vec::new();
    for (name, program) in [("WRITE", "ib_write_lat"), ("SEND", "ib_send_lat"), ("READ", "ib_read_lat")] {
        let row = run(&format!("{program} -s 2 -n 20000"))?.pop().unwrap_or_default();
        latency.push(line(format!("{name} ({program})"), (row[4], row[7])));
    }
    latency.push(line("TCP, both ends spin".into(), tcp.spinning));
    latency.push(line("TCP, both ends sleep".into(), tcp.sleeping));
    let all = |program: &str| run(&format!("{program} -a -n 1000"));
    let (write, read, send) = (all("ib_write_bw")?, all("ib_read_bw")?, all("ib_send_bw")?);
    let of = |rows: &[Vec<f64>], size: usize| rows.iter().find(|r| r[0] as usize == size).map_or(0.0, |r| r[3]);
    let line = |&(bytes, over_tcp): &(usize, f64)| Bandwidth {
        bytes,
        write: of(&write, bytes),
        read: of(&read, bytes),
        send: of(&send, bytes),
        tcp: over_tcp,
        write_over_tcp: of(&write, bytes) / over_tcp,
    };
    Ok(Network { mtu, latency, bandwidth: tcp.bandwidth.iter().map(line).collect() })
}

/// The same programs in one guest: on the kernel's rxe, and on two virtual layers over its loopback interface.
fn guest() -> Result<Vec<InGuest>> {
    let g = Rxe::boot_alone(true)?;
    let has_siw = g.run("rdma link show siw0/1")?.ok();
    let run = |command: &str| -> Result<f64> {
        let o = g.run(command)?;
        let row = harness::rows(&o.text).pop().ok_or_else(|| format!("in the guest, {command}: {}", o.text))?;
        Ok(if command.contains("_lat") { row[4] } else { row[3] })
    };
    let pair = |command: &str, server: &str, client: &str, to: &str| {
        format!("({server} {command} >/tmp/server.log 2>&1 &) ; sleep 3; {client} {command} {to}")
    };
    let program =
        |layer: u32, vrnic: &str| format!("env LD_LIBRARY_PATH=/dropin UNIRDMA_DIR=/tmp/{layer}/vrnics/{vrnic}");
    let local = |command: &str| {
        let layer = "unirdma --dir /tmp/0 host >/tmp/log0 2>&1 & sleep 2; unirdma --dir /tmp/0 vrnic add a; \
            unirdma --dir /tmp/0 vrnic add b";
        let programs = pair(command, &program(0, "a"), &program(0, "b"), "127.0.0.1");
        format!("{layer}; {programs}; killall unirdma")
    };
    // rxe has bound UDP port 4791 in this network namespace, so our virtual layers get a namespace of their own.
    let packets = |command: &str| {
        let layers = "ip link set lo up mtu 9000; echo 10.9.0.2 default 127.0.1.2 > /tmp/p1; \
            echo 10.9.0.1 default 127.0.1.1 > /tmp/p2; for i in 1 2; do unirdma --dir /tmp/$i host --address \
            127.0.1.$i --peers /tmp/p$i >/tmp/log$i 2>&1 & sleep 2; unirdma --dir /tmp/$i vrnic add v --ip 10.9.0.$i \
            || cat /tmp/log$i; done";
        let programs = pair(command, &program(1, "v"), &program(2, "v"), "127.0.0.1");
        format!("unshare -n sh -c '{layers}; {programs}; killall unirdma'")
    };
    let mut all = Vec::new();
    for (what, command) in [
        ("WRITE, 1 MiB [MiB/s]", "ib_write_bw -F -s 1048576 -n 100"),
        ("WRITE, 64 KiB [MiB/s]", "ib_write_bw -F -s 65536 -n 500"),
        ("WRITE, 2 B [us]", "ib_write_lat -F -n 1000"),
    ] {
        let rxe = run(&pair(&format!("{command} -d rxe0 -x 1"), "env", "env", OWN))?;
        // iWARP connects only this way.
        let siw = has_siw.then(|| run(&pair(&format!("{command} -d siw0 -R"), "env", "env", OWN))).transpose()?;
        let (ours, by_packets) = (run(&local(command))?, run(&packets(command))?);
        all.push(InGuest { what: what.into(), rxe, siw, ours, by_packets, ours_over_rxe: ours / rxe });
    }
    Ok(all)
}

/// Bandwidth without the ICRC / with it: the best of several alternating runs of each, because now and then a whole run
/// is slower by half.
fn icrc_share() -> Result<f64> {
    let mut best = [0.0f64; 2];
    let command = "ib_write_bw -s 1048576 -n 2000";
    for _ in 0..7 {
        for (best, args) in best.iter_mut().zip([&[][..], &["--no-icrc"]]) {
            let two = TwoHosts::start(Link { name: "i", ipv6: false, mtu: 9000, args })?;
            let rows = rows(command, two.pair(command, &format!("{command} 10.0.0.1"))?)?;
            *best = best.max(rows[0][3]);
        }
    }
    Ok(best[1] / best[0])
}

/// Cost of a secret: the best of several alternating runs without and with it.
fn secret() -> Result<Secret> {
    let mut s = Secret { write: [0.0; 2], send: [0.0; 2], latency_us: [f64::INFINITY; 2] };
    for _ in 0..5 {
        for with in [0, 1] {
            let two = TwoHosts::start(Link { name: "s", ipv6: false, mtu: 9000, args: &[] })?;
            if with == 1 {
                two.give_secret("secret")?;
            }
            let run = |command: &str| rows(command, two.pair(command, &format!("{command} 10.0.0.1"))?);
            s.write[with] = s.write[with].max(run("ib_write_bw -s 1048576 -n 2000")?[0][3]);
            s.send[with] = s.send[with].max(run("ib_send_bw -s 4096 -n 50000")?[0][3]);
            s.latency_us[with] = s.latency_us[with].min(run("ib_write_lat -s 2 -n 20000")?[0][4]);
        }
    }
    Ok(s)
}

/// Parts of [`wire`]. All are measured unless some are named.
pub(super) const PARTS: [&str; 4] = ["veth", "icrc", "guest", "secret"];

pub(super) fn wire(json: bool, only: &[String]) -> Result<()> {
    let wanted = |part: &str| only.is_empty() || only.iter().any(|o| o == part);
    packages::ensure(&[packages::RUN, packages::PYVERBS, packages::RELEASES, packages::GUESTS])?;
    eprintln!("building");
    harness::build()?;
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let topology = format!(
        "{cores} cores, which both hosts share: two network namespaces joined by a veth pair; each virtual layer has its own pollers, each program spins"
    );
    let mut networks = Vec::new();
    for mtu in [9000, 1500].into_iter().filter(|_| wanted(PARTS[0])) {
        eprintln!("MTU {mtu}: TCP, latency, bandwidth from 64 B to 8 MiB");
        networks.push(network(mtu)?);
    }
    let mut report = Report { topology, networks, bandwidth_without_icrc: None, secret: None, guest: Vec::new() };
    if wanted(PARTS[1]) {
        eprintln!("the share of the invariant CRC");
        report.bandwidth_without_icrc = Some(icrc_share()?);
    }
    if wanted(PARTS[2]) {
        eprintln!("one guest with the kernel's rxe and siw");
        report.guest = guest()?;
    }
    if wanted(PARTS[3]) {
        eprintln!("the share of a secret of the group");
        report.secret = Some(secret()?);
    }
    if json {
        return print_json(&report);
    }
    println!("topology: {}", report.topology);
    for n in &report.networks {
        println!(
            "\nMTU {}\n{:28} {:>12} {:>12} {:>18} {:>18}",
            n.mtu, "latency, 2 B, one way", "typical us", "99 % us", "/ TCP that spins", "/ TCP that sleeps"
        );
        for l in &n.latency {
            println!(
                "{:28} {:>12.2} {:>12.2} {:>17.2}x {:>17.2}x",
                l.operation, l.typical_us, l.p99_us, l.over_spinning_tcp, l.over_sleeping_tcp
            );
        }
        println!("{:>10} {:>10} {:>10} {:>10} {:>10} {:>10}", "MiB/s of", "WRITE", "READ", "SEND", "TCP", "WRITE/TCP");
        for b in &n.bandwidth {
            println!(
                "{:>8} B {:>10.0} {:>10.0} {:>10.0} {:>10.0} {:>9.2}x",
                b.bytes, b.write, b.read, b.send, b.tcp, b.write_over_tcp
            );
        }
    }
    if !report.guest.is_empty() {
        println!(
            "\n{:28} {:>12} {:>12} {:>12} {:>14} {:>12}",
            "in one emulated guest", "rxe", "siw", "uniRDMA", "in packets", "uniRDMA/rxe"
        );
    }
    for g in &report.guest {
        let siw = g.siw.map_or("-".into(), |v| format!("{v:.2}"));
        println!(
            "{:28} {:>12.2} {siw:>12} {:>12.2} {:>14.2} {:>11.2}x",
            g.what, g.rxe, g.ours, g.by_packets, g.ours_over_rxe
        );
    }
    if let Some(s) = &report.secret {
        println!("\n{:28} {:>12} {:>12} {:>12}", "secret of the group, MTU 9000", "without", "with", "with/without");
        let figures =
            [("WRITE, 1 MiB [MiB/s]", s.write), ("SEND, 4 KiB [MiB/s]", s.send), ("WRITE, 2 B [us]", s.latency_us)];
        for (what, [without, with]) in figures {
            println!("{what:28} {without:>12.2} {with:>12.2} {:>11.2}x", with / without);
        }
    }
    if let Some(ratio) = report.bandwidth_without_icrc {
        println!("\nWRITE of 1 MiB without the invariant CRC: {ratio:.2} of that with it");
    }
    Ok(())
}
