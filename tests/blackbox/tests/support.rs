//! Helpers of several topics.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
pub(crate) use std::time::Duration;

pub(crate) use harness::{
    Lab, Link, Output, Result, Running, TwoHosts, compile, failed, own_user, packages, require, shown, soon, wait_for,
};

pub(crate) use crate::suite::{Check, Shared, Tests};

/// A virtual layer with the vRNICs a and b, and c of another group, which has a's address. Tests leave it as it was.
pub(crate) fn abc() -> Result<Lab> {
    abc_with(&[])
}

/// As [`abc`], with more arguments of `unirdma host`.
pub(crate) fn abc_with(args: &[&str]) -> Result<Lab> {
    let lab = Lab::start_in(None, None, args)?;
    lab.vrnic("a", &["--ip", "10.0.0.1", "--ip", "fd00::1"])?;
    lab.vrnic("b", &["--ip", "10.0.0.2", "--ip", "fd00::2"])?;
    lab.unirdma(&["group", "add", "other"]);
    lab.vrnic("c", &["--ip", "10.0.0.1", "--group", "other"])?;
    Ok(lab)
}

/// Starts a container that does nothing. Returns when its interface exists.
pub(crate) fn idle(lab: &Lab, vrnic: &str) -> Result<Running> {
    let container = lab.spawn(vrnic, &[], "sh -c 'echo begun; sleep 60'")?;
    wait_for(&container, "begun")?;
    Ok(container)
}

pub(crate) fn both_end_well((s, c): (Output, Output)) -> Check {
    let text = format!("server ({:?}): {}\nclient ({:?}): {}", s.code, s.text, c.code, c.text);
    let bad = ["error", "Error", "mismatch", "Failed", "invalid data"];
    let seen = bad.iter().any(|b| s.text.contains(b) || c.text.contains(b));
    require(s.ok() && c.ok() && !seen, text)
}

/// True for programs that wait for ever if the network loses a message.
pub(crate) fn is_unreliable(program: &str) -> bool {
    ["-c UC", "_uc_"].iter().any(|u| program.contains(u)) || is_of_datagrams(program)
}

/// True for programs that use UD. Nothing slows down the sender of datagrams, unlike the sender on an unreliable
/// connection.
pub(crate) fn is_of_datagrams(program: &str) -> bool {
    ["-c UD", "_ud_"].iter().any(|u| program.contains(u))
}

/// Checks that a command failed with one line on standard error that contains `text`, and with an exit code that is not
/// 0.
pub(crate) fn refused(o: &Output, text: &str) -> Check {
    let one_line = o.text.trim_end().lines().count() == 1;
    require(
        o.code.is_some_and(|c| c != 0) && one_line && o.text.contains(text),
        format!("expected one line with `{text}`, got ({:?}): {}", o.code, o.text),
    )
}

/// Checks that packets arrived and that none of them was faulty.
pub(crate) fn clean_packets(lab: &Lab) -> Result<()> {
    let o = lab.unirdma(&["status", "--json"]);
    let clean = ["\"icrc_errors\": 0", "\"malformed\": 0", "\"wrong_source\": 0", "\"bad_pkey\": 0"];
    require(clean.iter().all(|c| o.text.contains(c)) && !o.text.contains("\"received\": 0"), o.text)
}

/// Number of bytes that peers have written into a vRNIC's memory.
pub(crate) fn written(lab: &Lab, vrnic: &str) -> Result<u64> {
    lab.show(vrnic)?["counters"]["received_bytes"].as_u64().ok_or_else(|| "no counters".into())
}

/// More than the bytes of connection management, of which a late message to an ended program may be a part.
const DATA: u64 = 64 << 10;

/// Waits until more data is written into a vRNIC's memory, by a program that writes all the time.
pub(crate) fn goes_on(lab: &Lab, vrnic: &str) -> Check {
    let begin = written(lab, vrnic)?;
    soon(|| written(lab, vrnic).is_ok_and(|n| n > begin + DATA), "nothing is written")
}

/// Starts a server, and waits until it listens.
pub(crate) fn serve(lab: &Lab, vrnic: &str, server: &str) -> Result<Running> {
    let mut running = lab.spawn(vrnic, &[], server)?;
    if running.wait_listening(|| lab.rdma_listens(vrnic)) {
        return Ok(running);
    }
    Err(format!("the server does not listen: {}", running.text()))
}

/// A peers file, which is removed at the end.
pub(crate) struct Peers(PathBuf);

impl Peers {
    pub fn new(text: &str) -> Result<Peers> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name = format!("unirdma-{}-{}.peers", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let peers = Peers(std::env::temp_dir().join(name));
        peers.write(text)?;
        Ok(peers)
    }

    pub fn write(&self, text: &str) -> Check {
        std::fs::write(&self.0, text).map_err(|e| e.to_string())
    }

    /// Starts a virtual layer with this file.
    pub fn start(&self, netns: Option<&str>, args: &[&str]) -> Result<Lab> {
        Lab::start_in(None, netns, &[&["--peers", &self.0.display().to_string()], args].concat())
    }
}

impl AsRef<Path> for Peers {
    fn as_ref(&self) -> &Path {
        &self.0
    }
}

impl Drop for Peers {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}
