//! Figures that programs print, and what measurements have in common.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::Result;

/// Rows of numbers in perftest's output.
pub fn rows(text: &str) -> Vec<Vec<f64>> {
    let numbers = |l: &str| l.split_whitespace().map(|w| w.parse::<f64>()).collect::<std::result::Result<Vec<_>, _>>();
    text.lines().filter_map(|l| numbers(l).ok()).filter(|r| r.len() >= 5).collect()
}

/// Description of the distribution of cores while programs on vRNICs of one host are measured.
pub fn topology() -> String {
    let (pollers, shared) = pollers();
    format!("{pollers}; the two programs spin on {}", if shared { "the same cores" } else { "two others" })
}

/// Where the pollers of a virtual layer run, and whether they share their cores with programs.
pub fn pollers() -> (String, bool) {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let shared = cores <= 3;
    let which = if shared { "one poller on each core, which sleeps" } else { "one poller spins on a core of its own" };
    (format!("{cores} cores; {which}"), shared)
}

/// The elements of a list whose names contain a text.
///
/// # Errors
/// If there is none. `kind` says in the message what the list has.
pub fn named<T>(list: Vec<T>, name: impl Fn(&T) -> &str, only: Option<&str>, kind: &str) -> Result<Vec<T>> {
    let Some(text) = only else { return Ok(list) };
    if list.iter().any(|entry| name(entry).contains(text)) {
        return Ok(list.into_iter().filter(|entry| name(entry).contains(text)).collect());
    }
    let names: Vec<&str> = list.iter().map(name).collect();
    Err(format!("no {kind}'s name contains {text}; there are: {}", names.join(", ")))
}

/// Figures that a program of ours printed: a name and a number on each line.
pub fn figures(text: &str) -> BTreeMap<String, f64> {
    let number = |l: &str| l.split_once(' ').and_then(|(k, v)| Some((k.to_string(), v.parse().ok()?)));
    text.lines().filter_map(number).collect()
}

/// The median, or the upper of two middle values. NaN for an empty list.
pub fn median(x: impl IntoIterator<Item = f64>) -> f64 {
    let mut x: Vec<f64> = x.into_iter().collect();
    x.sort_by(f64::total_cmp);
    x.get(x.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Prints a report as JSON.
///
/// # Errors
/// If it cannot be written as JSON.
pub fn print_json(report: &impl Serialize) -> Result<()> {
    println!("{}", serde_json::to_string_pretty(report).map_err(|e| e.to_string())?);
    Ok(())
}
