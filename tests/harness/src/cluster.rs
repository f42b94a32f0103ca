//! `cargo xtask cluster`: several hosts, one control centre, and a check of all pairs of vRNICs.
//!
//! The centre declares thirty vRNICs in three groups; two of the groups have the same addresses. `ibv_rc_pingpong` runs
//! between all pairs, and must connect exactly where the rules allow. Its two ends find each other by TCP between the
//! hosts, so only the virtual layer decides. Then the rules change at the centre, and finally the centre is stopped.

use std::collections::BTreeSet;
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::fleet::{Fleet, address};
use crate::{Result, packages};

/// Number of pairs that are tried at the same time.
const AT_ONCE: usize = 6;
/// Time within which the hosts must have put a change in force.
const DEADLINE: Duration = Duration::from_secs(1);
/// Longest time to wait for a change before giving up.
const PATIENCE: Duration = Duration::from_secs(20);

/// Groups: name, range, and whether it has a secret. Groups that a rule joins with it then have a secret with it. The
/// first two ranges overlap.
const GROUPS: [(&str, &str, bool); 3] =
    [("blue", "10.1.0.0/16", false), ("red", "10.1.0.0/16", false), ("green", "10.2.0.0/16", true)];
/// The lines of a host's status about secrets.
const SEALED: [&str; 2] = [
    "group green: packets between hosts are sealed with secret",
    "groups blue and green: packets between hosts are sealed",
];
const VRNICS: usize = 30;

/// All vRNICs of green and blue may connect, except one.
const RULES: &str = "[[rule]]\nname = \"meet\"\nfrom = \"group:blue\"\nto = \"group:green\"\nboth = true\npriority = 10\n\
    [[rule]]\nname = \"not-green3\"\nfrom = \"group:blue\"\nto = \"vrnic:green3\"\nboth = true\naction = \"DENY\"\npriority = 20\n";

/// A vRNIC as it is declared.
#[derive(Clone, Debug)]
struct Vrnic {
    name: String,
    group: &'static str,
    host: usize,
}

type Pairs = BTreeSet<(String, String)>;

/// Runs `ibv_rc_pingpong` between two vRNICs. True if both ends succeed.
///
/// # Errors
/// If it cannot be started.
fn connects(fleet: &Fleet, server: &Vrnic, client: &Vrnic, port: u16) -> Result<bool> {
    let run = |v: &Vrnic, to: Option<&str>| {
        let mut c = Command::new("ip");
        c.args([
            "netns",
            "exec",
            &fleet.netns[v.host],
            "timeout",
            "20",
            "ibv_rc_pingpong",
            "-g",
            "0",
            "-n",
            "4",
            "-s",
            "64",
        ]);
        c.args(["-p", &port.to_string()]).args(to);
        c.env("LD_LIBRARY_PATH", crate::unirdma().with_file_name("dropin"));
        c.env("UNIRDMA_DIR", fleet.labs[v.host].socket(&v.name).with_file_name(""));
        c.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        c.spawn().map_err(|e| format!("ibv_rc_pingpong: {e}"))
    };
    let mut s = run(server, None)?;
    let mut ended = false;
    let is_over = || {
        ended = s.try_wait().is_ok_and(|e| e.is_some());
        ended || crate::listens(s.id())
    };
    let listens = crate::wait_until(PATIENCE, is_over, &format!("the server of {} does not listen", server.name));
    let listens = listens.and_then(|()| crate::require(!ended, format!("the server of {} has ended", server.name)));
    if listens.is_err() {
        let _ = s.kill();
        let _ = s.wait();
        listens?;
    }
    let client = run(client, Some(&address(server.host)))?.wait().map_err(|e| e.to_string())?;
    if !client.success() {
        // timeout(1) ends its program, too.
        crate::terminate(&s);
    }
    let server = s.wait().map_err(|e| e.to_string())?;
    Ok(client.success() && server.success())
}

/// All pairs that connect.
///
/// # Errors
/// If a program cannot be started.
fn matrix(fleet: &Fleet, vrnics: &[Vrnic]) -> Result<Pairs> {
    let n = vrnics.len();
    let pairs: Vec<(usize, usize)> = (0..n).flat_map(|a| (a + 1..n).map(move |b| (a, b))).collect();
    let (next, found) = (AtomicUsize::new(0), Mutex::new(Ok(Pairs::new())));
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                while let Some(&(a, b)) = pairs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    // Each pair has a port of its own.
                    let port = 20_000 + u16::try_from(a * n + b).unwrap_or(0);
                    let connects = connects(fleet, &vrnics[a], &vrnics[b], port);
                    let mut found = found.lock().unwrap_or_else(|e| e.into_inner());
                    match (connects, found.as_mut()) {
                        (Ok(true), Ok(set)) => _ = set.insert((vrnics[a].name.clone(), vrnics[b].name.clone())),
                        (Err(e), Ok(_)) => *found = Err(e),
                        _ => {}
                    }
                }
            });
        }
    });
    found.into_inner().unwrap_or_else(|e| e.into_inner())
}

/// Thirty vRNICs, ten of each group, spread over the hosts.
fn vrnics(hosts: usize) -> Vec<Vrnic> {
    let one = |i: usize| {
        let (n, group) = (i / GROUPS.len(), GROUPS[i % GROUPS.len()].0);
        Vrnic { name: format!("{group}{n}"), group, host: n % hosts }
    };
    (0..VRNICS).map(one).collect()
}

/// The fleet in TOML, with these rules.
fn network(vrnics: &[Vrnic], rules: &str) -> String {
    let groups = GROUPS.iter().map(|(name, range, secret)| {
        format!("[[group]]\nname = \"{name}\"\nranges = [\"{range}\"]\nsecret = {secret}\n")
    });
    let vrnics = vrnics
        .iter()
        .map(|v| format!("[[vrnic]]\nname = \"{}\"\ngroup = \"{}\"\nhost = \"h{}\"\n", v.name, v.group, v.host));
    groups.chain(vrnics).collect::<String>() + rules
}

/// The pairs that the rules allow: pairs within one group, and pairs of blue and green for which `meets` returns true.
fn allowed(vrnics: &[Vrnic], meets: impl Fn(&str, &str) -> bool) -> Pairs {
    let mut pairs = Pairs::new();
    for (i, a) in vrnics.iter().enumerate() {
        for b in &vrnics[i + 1..] {
            let met = match (a.group, b.group) {
                ("blue", "green") => meets(&a.name, &b.name),
                ("green", "blue") => meets(&b.name, &a.name),
                (x, y) => x == y,
            };
            if met {
                pairs.insert((a.name.clone(), b.name.clone()));
            }
        }
    }
    pairs
}

fn compare(what: &str, found: &Pairs, expected: &Pairs) -> Result<()> {
    let names =
        |set: Vec<&(String, String)>| -> String { set.iter().take(8).map(|(a, b)| format!(" {a}-{b}")).collect() };
    let (more, less): (Vec<_>, Vec<_>) = (found.difference(expected).collect(), expected.difference(found).collect());
    if more.is_empty() && less.is_empty() {
        return Ok(());
    }
    let (m, l) = (more.len(), less.len());
    Err(format!("{what}: {m} pairs connect that may not:{}; {l} do not that may:{}", names(more), names(less)))
}

/// Waits until a pair connects, or does not connect any more. Returns the time that it took.
fn until(fleet: &Fleet, server: &Vrnic, client: &Vrnic, connected: bool) -> Result<Duration> {
    let start = Instant::now();
    for port in 30_000.. {
        let began = start.elapsed();
        if connects(fleet, server, client, port)? == connected {
            return Ok(began);
        }
        if began > PATIENCE {
            break;
        }
    }
    let (s, c) = (&server.name, &client.name);
    Err(format!("{} s after the rules changed {s} and {c} still do as before", PATIENCE.as_secs()))
}

fn check_matrix(fleet: &Fleet, vrnics: &[Vrnic], when: &str, expected: &Pairs) -> Result<()> {
    let began = Instant::now();
    compare(when, &matrix(fleet, vrnics)?, expected)?;
    let (n, all) = (expected.len(), VRNICS * (VRNICS - 1) / 2);
    println!("{when}: {n} of {all} pairs connect, and no others: {:.1} s", began.elapsed().as_secs_f64());
    Ok(())
}

/// Moves the first vRNIC to the next host: it keeps its address, MAC and GUID, and its peers find it there.
fn move_one(fleet: &Fleet, vrnics: &mut [Vrnic]) -> Result<()> {
    // The groups alternate in the list.
    let (moved, peer) = (0, GROUPS.len());
    let host = (vrnics[moved].host + 1) % fleet.labs.len();
    let identity = |v: &Vrnic| -> Result<String> {
        let shown = fleet.labs[v.host].show(&v.name)?;
        Ok(["ips", "mac", "guid"].map(|k| shown[k].to_string()).join(" "))
    };
    let before = identity(&vrnics[moved])?;
    let began = Instant::now();
    fleet.unirdma(&["vrnic", "move", &vrnics[moved].name, &format!("h{host}")])?;
    vrnics[moved].host = host;
    fleet.wait_for(host, &vrnics[moved].name)?;
    let took = began.elapsed() + until(fleet, &vrnics[moved], &vrnics[peer], true)?;
    let after = identity(&vrnics[moved])?;
    if before != after {
        return Err(format!("{} was {before} and is {after} since it moved", vrnics[moved].name));
    }
    if took > DEADLINE {
        return Err(format!("peers found a vRNIC that moved after {} ms", took.as_millis()));
    }
    println!("a vRNIC moves to another host as it is: its peers find it after {} ms at most", took.as_millis());
    Ok(())
}

/// `cargo xtask cluster`, after the programs are built.
///
/// # Errors
/// The first result that contradicts the rules.
pub fn check(hosts: usize) -> Result<()> {
    let started = Instant::now();
    let mut fleet = Fleet::start(hosts)?;
    let mut vrnics = vrnics(hosts);
    fleet.apply(&network(&vrnics, RULES))?;
    vrnics.iter().try_for_each(|v| fleet.wait_for(v.host, &v.name))?;
    let (v, g) = (vrnics.len(), GROUPS.len());
    println!(
        "{hosts} hosts, {v} vRNICs in {g} groups, two with the same addresses: {:.1} s",
        started.elapsed().as_secs_f64()
    );

    let by_name = |name: &str| vrnics.iter().find(|v| v.name == name).ok_or(format!("there is no {name}"));
    let (a, b) = (by_name("blue0")?, by_name("green1")?);
    until(&fleet, a, b, true)?;
    for (host, lab) in fleet.labs.iter().enumerate() {
        let sealed = || SEALED.iter().all(|line| lab.unirdma(&["status"]).text.contains(line));
        crate::wait_until(PATIENCE, sealed, &format!("host {host} does not seal by the centre's secrets"))?;
    }
    check_matrix(&fleet, &vrnics, "by the rules", &allowed(&vrnics, |_, green| green != "green3"))?;

    fleet.apply(&network(&vrnics, &RULES.replace("\"group:blue\"", "\"vrnic:blue7\"")))?;
    let took = until(&fleet, a, b, false)?;
    if took > DEADLINE {
        return Err(format!("a rule that was taken away held for {} ms", took.as_millis()));
    }
    println!("a rule is taken away: refused after {} ms at most", took.as_millis());
    move_one(&fleet, &mut vrnics)?;
    fleet.kill_centre();
    let expected = allowed(&vrnics, |blue, green| blue == "blue7" && green != "green3");
    check_matrix(&fleet, &vrnics, "by the new rules, without the centre", &expected)
}

/// `cargo xtask cluster`.
///
/// # Errors
/// The first result that contradicts the rules.
pub fn run(hosts: usize) -> Result<()> {
    packages::ensure(&[packages::RUN])?;
    eprintln!("building");
    crate::build()?;
    check(hosts)
}
