//! Checks, the texts of errors, and waits for conditions.

use std::time::{Duration, Instant};

use crate::Result;

/// Fails with this message unless `ok`.
pub fn require(ok: bool, what: impl Into<String>) -> Result<()> {
    if ok { Ok(()) } else { Err(what.into()) }
}

/// The text of an error of the system, after what failed.
pub fn failed(what: &str) -> impl Fn(std::io::Error) -> String + '_ {
    move |e| format!("{what}: {e}")
}

/// Waits until `is_so` returns true. Returns the time that it took.
///
/// # Errors
/// `otherwise`, if that does not happen within `limit`; or the error of `is_so`.
pub fn within(limit: Duration, mut is_so: impl FnMut() -> Result<bool>, otherwise: &str) -> Result<Duration> {
    let start = Instant::now();
    while !is_so()? {
        require(start.elapsed() < limit, otherwise)?;
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(start.elapsed())
}

/// As [`within`], with a condition that cannot fail.
pub fn wait_until(limit: Duration, mut is_so: impl FnMut() -> bool, otherwise: &str) -> Result<()> {
    within(limit, || Ok(is_so()), otherwise).map(drop)
}
