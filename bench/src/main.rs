//! `cargo xtask bench`: figures relative to a peer in the same run.

mod ab;
mod busy;
mod engine;
mod isolation;
mod local;
mod memory;
mod vm;
mod wire;
mod workers;

use std::collections::BTreeMap;

use serde::Serialize;

use crate::Result;
use crate::harness;

pub(crate) use ab::ab;
pub(crate) use busy::busy;
pub(crate) use engine::engine;
pub(crate) use isolation::isolation;
pub(crate) use local::local;
pub(crate) use memory::memory;
pub(crate) use vm::vm;
pub(crate) use wire::{PARTS, tcp, wire};
pub(crate) use workers::workers;

/// Description of the distribution of cores while programs on vRNICs of one host are measured.
pub(crate) fn topology() -> String {
    let (pollers, shared) = pollers();
    format!("{pollers}; the two programs spin on {}", if shared { "the same cores" } else { "two others" })
}

/// Where the pollers of a virtual layer run, and whether they share their cores with programs.
fn pollers() -> (String, bool) {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let shared = cores <= 3;
    let which = if shared { "one poller on each core, which sleeps" } else { "one poller spins on a core of its own" };
    (format!("{cores} cores; {which}"), shared)
}

/// Processor time of a process, and of its children that have ended, in seconds.
fn cpu_times(pid: impl std::fmt::Display) -> (f64, f64) {
    /// Ticks per second.
    const TICKS: f64 = 100.0;
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let after = stat.rsplit(')').next().unwrap_or_default();
    let field = |i: usize| after.split_whitespace().nth(i).and_then(|w| w.parse::<f64>().ok()).unwrap_or(0.0) / TICKS;
    (field(11) + field(12), field(13) + field(14))
}

/// Processor time that processes have used, in seconds.
fn cpu_of(pids: &[i32]) -> f64 {
    pids.iter().map(|pid| cpu_times(pid).0).sum()
}

/// The elements of a list whose names contain a text.
///
/// # Errors
/// If there is none. `kind` says in the message what the list has.
pub(crate) fn named<T>(list: Vec<T>, name: impl Fn(&T) -> &str, only: Option<&str>, kind: &str) -> Result<Vec<T>> {
    let Some(text) = only else { return Ok(list) };
    if list.iter().any(|entry| name(entry).contains(text)) {
        return Ok(list.into_iter().filter(|entry| name(entry).contains(text)).collect());
    }
    let names: Vec<&str> = list.iter().map(name).collect();
    Err(format!("no {kind}'s name contains {text}; there are: {}", names.join(", ")))
}

/// Figures that a program of ours printed: a name and a number on each line.
pub(crate) fn figures(text: &str) -> BTreeMap<String, f64> {
    let number = |l: &str| l.split_once(' ').and_then(|(k, v)| Some((k.to_string(), v.parse().ok()?)));
    text.lines().filter_map(number).collect()
}

/// The median, or the upper of two middle values. NaN for an empty list.
pub(crate) fn median(x: impl IntoIterator<Item = f64>) -> f64 {
    let mut x: Vec<f64> = x.into_iter().collect();
    x.sort_by(f64::total_cmp);
    x.get(x.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Prints a report as JSON.
pub(crate) fn print_json(report: &impl Serialize) -> Result<()> {
    println!("{}", serde_json::to_string_pretty(report).map_err(|e| e.to_string())?);
    Ok(())
}

/// Rows of numbers of a client. Fails unless server and client both succeeded.
fn rows(command: &str, (s, c): (harness::Output, harness::Output)) -> Result<Vec<Vec<f64>>> {
    let rows = harness::rows(&c.text);
    if rows.is_empty() || !s.ok() || !c.ok() {
        return Err(format!("{command} failed:\nserver: {}\nclient: {}", s.text, c.text));
    }
    Ok(rows)
}
