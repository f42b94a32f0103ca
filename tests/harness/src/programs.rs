//! The programs under test: where they are, and how they are built. And the user and the cores that this process has.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::Result;

/// This user's id.
pub fn uid() -> u32 {
    // SAFETY: cannot fail and touches no memory.
    unsafe { libc::geteuid() }
}

/// An id without privileges: `nobody` for root, else this user.
pub fn own_user() -> u32 {
    match uid() {
        0 => 65534,
        u => u,
    }
}

/// The workspace's directory.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap_or(Path::new(".")).to_path_buf()
}

/// The built `unirdma`.
pub fn unirdma() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), PathBuf::from).join("release/unirdma")
}

/// Builds the programs.
///
/// # Errors
/// If the build fails.
pub fn build() -> Result<()> {
    cargo_build(&[])
}

/// Cargo, in the root of this checkout. It sees none of the variables that cargo sets for the programs that it runs:
/// ring's build script asks for some of them, so all that depends on ring would be built anew with each change of them.
pub fn cargo() -> Command {
    let mut c = Command::new("cargo");
    let is_of_program = |name: &str| name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_");
    let names = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
    names.filter(|name| is_of_program(name)).for_each(|name| _ = c.env_remove(name));
    c.current_dir(root());
    c
}

/// Builds what containers need. A new build leaves out the commands about fleets, since their dependencies take longer
/// than all the rest. A build that has them keeps them.
///
/// # Errors
/// If the build fails.
pub fn build_for_containers() -> Result<()> {
    let has_fleet = Command::new(unirdma()).args(["control", "--help"]).output().is_ok_and(|o| o.status.success());
    if has_fleet || std::env::var_os(BUILT).is_some() {
        return build();
    }
    let packages = ["--package", "unirdma-cli", "--package", "unirdma-verbs"];
    succeed(cargo().args(["build", "--release", "--no-default-features"]).args(packages))
}

/// Builds an example program of a package. Returns its path.
///
/// # Errors
/// If the build fails.
pub fn build_example(package: &str, name: &str) -> Result<PathBuf> {
    cargo_build(&["--package", package, "--example", name])?;
    Ok(unirdma().with_file_name("examples").join(name))
}

/// Builds the programs of another checkout, into that checkout's `target`.
///
/// # Errors
/// If the build fails.
pub fn build_in(tree: &Path) -> Result<()> {
    let mut c = cargo();
    c.args(["build", "--release", "--quiet"]).current_dir(tree).env_remove("CARGO_TARGET_DIR");
    succeed(&mut c)
}

/// If this environment variable is set, the programs are used as they are.
const BUILT: &str = "UNIRDMA_TEST_BUILT";

fn cargo_build(what: &[&str]) -> Result<()> {
    if std::env::var_os(BUILT).is_some() {
        return Ok(());
    }
    succeed(cargo().args(["build", "--release", "--quiet"]).args(what))
}

fn succeed(build: &mut Command) -> Result<()> {
    let ok = build.status().is_ok_and(|s| s.success());
    if ok { Ok(()) } else { Err("cargo build --release failed".into()) }
}

/// The cores that this program may use, in ascending order.
pub fn cores() -> Vec<usize> {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let list = status.lines().find_map(|l| l.strip_prefix("Cpus_allowed_list:")).unwrap_or_default().trim();
    let range = |r: &str| {
        let (first, last) = r.split_once('-').unwrap_or((r, r));
        Some(first.parse().ok()?..=last.parse().ok()?)
    };
    list.split(',').filter_map(range).flatten().collect()
}
