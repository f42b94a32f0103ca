//! Two well-behaved programs, one of which writes to the other, and measurements of them.

use std::path::Path;
use std::time::{Duration, Instant};

use unirdma_formats::WrOpcode;
use unirdma_testkit::{Program, connect};

use crate::{Until, ready};

const SMALL: usize = 8;
const LARGE: usize = 64 << 10;
/// Number of outstanding WRITEs of [`LARGE`] bytes.
const OUTSTANDING: usize = 8;

/// Measures latency for `seconds`, then bandwidth for the same time.
pub(crate) fn measure(a: &Path, b: &Path, seconds: f64) -> Result<(), String> {
    let (a, b) = (Program::new(a, LARGE), Program::new(b, LARGE));
    connect(&a, &b);
    let post = |len| a.post(WrOpcode::Write, &b, 0, len).map_err(|e| format!("a WRITE cannot be posted: error {e}"));
    let wait = || match a.wait() {
        Ok(c) if c.status == 0 => Ok(()),
        Ok(c) => Err(format!("a WRITE ended with status {}", c.status)),
        Err(110) => Err("no completion for a minute".into()),
        Err(e) => Err(format!("polling failed: error {e}")),
    };
    for _ in 0..1000 {
        post(LARGE)?;
        wait()?;
    }
    ready();
    std::io::stdin().read_line(&mut String::new()).map_err(|e| e.to_string())?;

    let time = Duration::from_secs_f64(seconds);
    let (mut each_ns, start) = (Vec::new(), Instant::now());
    while start.elapsed() < time {
        let begin = Instant::now();
        post(SMALL)?;
        wait()?;
        each_ns.push(begin.elapsed().as_nanos() as u64);
    }
    each_ns.sort_unstable();
    let percentile = |p: usize| each_ns[(each_ns.len() - 1) * p / 100] as f64 / 1e3;
    println!("p50_us {}\np99_us {}\nworst_us {}", percentile(50), percentile(99), percentile(100));

    for _ in 0..OUTSTANDING {
        post(LARGE)?;
    }
    let (mut writes, start) = (0, Instant::now());
    while start.elapsed() < time {
        wait()?;
        writes += 1;
        post(LARGE)?;
    }
    println!("mib_s {}", (writes * LARGE) as f64 / f64::from(1 << 20) / start.elapsed().as_secs_f64());
    // No WRITE may be outstanding when the memory is freed.
    for _ in 0..OUTSTANDING {
        wait()?;
    }
    Ok(())
}

/// Measures the bandwidth of SENDs of 4 KiB on several connections, for `seconds`.
pub(crate) fn many(a: &Path, b: &Path, seconds: f64) -> Result<(), String> {
    /// Number of connections, and of outstanding SENDs of each.
    const CONNECTIONS: usize = 8;
    const WAITING: usize = 8;
    const LEN: usize = 4 << 10;
    let pair = |_| {
        let pair = (Program::new(a, LEN), Program::new(b, LEN));
        connect(&pair.0, &pair.1);
        pair
    };
    let pairs: Vec<(Program, Program)> = (0..CONNECTIONS).map(pair).collect();
    let send = |(a, b): &(Program, Program)| {
        b.recv(0, LEN).map_err(|e| format!("a receive cannot be posted: error {e}"))?;
        a.post(WrOpcode::Send, b, 0, LEN).map_err(|e| format!("a SEND cannot be posted: error {e}"))
    };
    let wait = |(a, b): &(Program, Program)| {
        [a, b].into_iter().try_for_each(|p| match p.wait() {
            Ok(c) if c.status == 0 => Ok(()),
            Ok(c) => Err(format!("a SEND ended with status {}", c.status)),
            Err(e) => Err(format!("a SEND has no completion: error {e}")),
        })
    };
    ready();
    std::io::stdin().read_line(&mut String::new()).map_err(|e| e.to_string())?;
    for pair in &pairs {
        (0..WAITING).try_for_each(|_| send(pair))?;
    }
    let (mut sends, start) = (0, Instant::now());
    while start.elapsed().as_secs_f64() < seconds {
        for pair in &pairs {
            wait(pair)?;
            send(pair)?;
            sends += 1;
        }
    }
    println!("mib_s {}", (sends * LEN) as f64 / f64::from(1 << 20) / start.elapsed().as_secs_f64());
    pairs.iter().try_for_each(|pair| (0..WAITING).try_for_each(|_| wait(pair)))
}

/// A well-behaved neighbour that is always busy.
pub(crate) fn honest(from: &Path, to: &Path, until: Until) {
    const LEN: usize = 1 << 20;
    let (a, b) = (Program::new(from, LEN), Program::new(to, LEN));
    connect(&a, &b);
    let post = || a.post(WrOpcode::Write, &b, 0, LEN).expect("post");
    (0..8).for_each(|_| post());
    ready();
    while !until.over() {
        a.wait().expect("a completion");
        post();
    }
}

/// Opens the devices of two programs and checks the data of a WRITE, a READ and a SEND.
pub(crate) fn check(a: &Path, b: &Path) -> Result<(), String> {
    let (mut a, mut b) = (Program::new(a, LARGE), Program::new(b, LARGE));
    connect(&a, &b);
    let byte = |i: usize, turn: usize| (i * 31 + i / 251 + turn) as u8;
    for (turn, op) in [WrOpcode::Write, WrOpcode::Read, WrOpcode::Send].into_iter().enumerate() {
        let (from, to) = if op == WrOpcode::Read { (&mut b, &mut a) } else { (&mut a, &mut b) };
        from.buf.iter_mut().enumerate().for_each(|(i, x)| *x = byte(i, turn));
        to.buf.fill(0);
        if op == WrOpcode::Send {
            b.recv(0, LARGE).map_err(|e| format!("a receive cannot be posted: error {e}"))?;
        }
        a.post(op, &b, 0, LARGE).map_err(|e| format!("{op:?} cannot be posted: error {e}"))?;
        let c = a.wait().map_err(|e| format!("{op:?} has no completion: error {e}"))?;
        if op == WrOpcode::Send {
            b.wait().map_err(|e| format!("the receive has no completion: error {e}"))?;
        }
        let to = if op == WrOpcode::Read { &a } else { &b };
        if let Some(i) = (0..LARGE).find(|&i| to.byte(i) != byte(i, turn)) {
            return Err(format!("{op:?}: status {}, byte {i} is wrong", c.status));
        }
    }
    Ok(())
}
