//! Commands that are programs of other packages.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// The words of a command, and the name of its program.
const PROGRAMS: &[(&[&str], &str)] = &[
    (&["attack"], "attack"),
    (&["bench"], "bench"),
    (&["page"], "page"),
    (&["scale"], "scale"),
    (&["sim"], "sim"),
    (&["test", "centres"], "centres"),
];

/// Becomes the program of this command, if it has one. Then it returns only if that fails, with the reason.
pub(crate) fn exec() -> Option<String> {
    let mut args: Vec<OsString> = std::env::args_os().skip(1).collect();
    if args.first().is_some_and(|a| a == "help") {
        // `help bench wire` is `bench wire --help`.
        args.remove(0);
        args.push("--help".into());
    }
    let (words, program) = PROGRAMS
        .iter()
        .find(|(words, _)| args.len() >= words.len() && words.iter().zip(&args).all(|(word, arg)| arg == word))?;
    // As a part of the workspace, so that all programs and tests are built with the same dependencies.
    let mut build = harness::cargo();
    build.args(["build", "--quiet", "--workspace", "--bin", program]);
    match build.status() {
        Ok(s) if s.success() => {}
        Ok(_) => return Some(format!("{program} cannot be built")),
        Err(e) => return Some(format!("cargo: {e}")),
    }
    let exe = std::env::current_exe().map(|e| e.with_file_name(program));
    let failed = exe.map(|exe| Command::new(exe).args(&args[words.len()..]).exec());
    Some(format!("{program}: {}", failed.unwrap_or_else(|e| e)))
}
