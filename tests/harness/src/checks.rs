//! Checks of what programs and `unirdma` print, and our C programs.

use std::process::Command;
use std::time::Duration;

use crate::{Lab, Result, Running, require, root, wait_until};

/// Longest time for a condition that comes soon. Emulated machines are slow, and this machine may be busy.
const SOON: Duration = Duration::from_secs(30);

/// Waits up to 30 s until `is_so` returns true.
///
/// # Errors
/// `otherwise`, if that does not happen.
pub fn soon(is_so: impl FnMut() -> bool, otherwise: &str) -> Result<()> {
    wait_until(SOON, is_so, otherwise)
}

/// Waits until the output of a program contains a text.
///
/// # Errors
/// The output, if it does not.
pub fn wait_for(r: &Running, text: &str) -> Result<()> {
    soon(|| r.text().contains(text), text).map_err(|e| format!("expected `{e}` in: {}", r.text()))
}

/// The text under this name in the output of `unirdma vrnic show`.
///
/// # Errors
/// The output, if it has no such text.
pub fn shown(lab: &Lab, vrnic: &str, name: &str) -> Result<String> {
    let info = lab.show(vrnic)?;
    info[name].as_str().map(String::from).ok_or_else(|| info.to_string())
}

/// Compiles one of our C programs, in `tests/c`.
///
/// # Errors
/// The compiler's output, if it fails.
pub fn compile(lab: &Lab, name: &str, libraries: &[&str]) -> Result<String> {
    compile_as(lab, name, name, libraries)
}

/// Compiles one of our C programs under another name.
///
/// # Errors
/// The compiler's output, if it fails.
pub fn compile_as(lab: &Lab, name: &str, exe: &str, libraries: &[&str]) -> Result<String> {
    let exe = lab.dir.join(exe);
    let source = root().join(format!("tests/c/{name}.c"));
    let mut gcc = Command::new("gcc");
    gcc.args(["-O1", "-g", "-Wall", "-o"]).arg(&exe).arg(source).args(libraries);
    let done = gcc.output().map_err(|e| e.to_string())?;
    require(done.status.success(), String::from_utf8_lossy(&done.stderr))?;
    Ok(exe.display().to_string())
}
