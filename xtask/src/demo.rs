//! `cargo xtask demo`: runs unmodified programs in two containers and prints a small table.

use harness::{Lab, Result, packages, tcp::Tcp};

const STEPS: u32 = 7;

fn step(n: u32, what: &str) {
    println!("[{n}/{STEPS}] {what}");
}

/// The last row of a program's output, or an error that says why there is none.
fn figures(what: &str, (server, client): &(harness::Output, harness::Output)) -> Result<Vec<f64>> {
    let row = harness::rows(&client.text).pop().filter(|_| server.ok() && client.ok());
    row.ok_or_else(|| format!("{what} failed:\nserver: {}\nclient: {}", server.text, client.text))
}

pub(crate) fn run() -> Result<()> {
    packages::ensure(&[packages::RUN])?;
    step(1, "building (a few minutes the first time)");
    harness::build_for_containers()?;
    step(2, "starting the virtual layer: one process, no kernel module, no RDMA hardware");
    let lab = Lab::start(None)?;
    step(3, "making the vRNICs a (10.0.0.1) and b (10.0.0.2), and c (10.0.0.1 too) in another group");
    lab.vrnic("a", &["--ip", "10.0.0.1"])?;
    lab.vrnic("b", &["--ip", "10.0.0.2"])?;
    if !lab.unirdma(&["group", "add", "other"]).ok() {
        return Err("cannot make a group".into());
    }
    lab.vrnic("c", &["--ip", "10.0.0.1", "--group", "other"])?;
    step(4, "container a: ib_write_bw -s 1048576; container b: ib_write_bw -s 1048576 10.0.0.1");
    let bw = |peer: &str| format!("ib_write_bw -s 1048576 -n 5000 {peer}");
    let bandwidth = figures("ib_write_bw", &lab.pair(("a", &bw("")), ("b", &bw("10.0.0.1")), &[])?)?[3];
    step(5, "container a: ib_write_lat; container b: ib_write_lat 10.0.0.1");
    let lat = |peer: &str| format!("ib_write_lat -n 20000 {peer}");
    let row = figures("ib_write_lat", &lab.pair(("a", &lat("")), ("b", &lat("10.0.0.1")), &[])?)?;
    let (typical, average) = (row[4], row[5]);
    step(6, "container c of the other group tries to connect to b");
    let host = ["--net", "host"];
    let refused =
        lab.pair(("b", "ibv_rc_pingpong -g 0 -p 18600"), ("c", "ibv_rc_pingpong -g 0 -p 18600 127.0.0.1"), &host)?;
    if refused.0.ok() || refused.1.ok() {
        return Err("a container of another group was connected".into());
    }
    let why = refused.1.text.lines().find(|l| l.contains("RTR")).unwrap_or("no connection").to_string();
    println!("      refused, as it should be: {why}");
    step(7, "the same over TCP loopback, both ends spinning");
    let mut tcp = Tcp::start()?;
    tcp.latencies(2, 2000, false)?;
    let all = tcp.latencies(2, 20_000, false)?;
    let (tcp_typical, tcp_average) = (all[all.len() / 2], all.iter().sum::<f64>() / all.len() as f64);
    let tcp_bandwidth = tcp.bandwidth(1 << 20, 4000, false)?;
    println!();
    println!("{:32} {:>12} {:>12} {:>9}", "", "uniRDMA", "TCP", "ratio");
    let row = |name: &str, ours: f64, theirs: f64, ratio: f64| {
        println!("{name:32} {ours:>12.2} {theirs:>12.2} {ratio:>8.1}x");
    };
    row("write, 1 MiB [MiB/s]", bandwidth, tcp_bandwidth, bandwidth / tcp_bandwidth);
    row("latency, 2 B, typical [us]", typical, tcp_typical, tcp_typical / typical);
    row("latency, 2 B, average [us]", average, tcp_average, tcp_average / average);
    println!();
    println!("The programs are Debian's, unmodified. `docs/user/quick-start.md` says how to run your own.");
    Ok(())
}
