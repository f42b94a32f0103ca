//! Virtual machines: one with the Linux kernel's own soft RNIC, and guests that have a vRNIC.
//!
//! They are made from Debian's packages: kernels that are downloaded and not installed, and programs in an initial RAM
//! file system. QEMU emulates the processor, so that they run anywhere.

mod guest;
mod image;
mod machine;
mod parts;
mod rxe;
mod storage;
mod vfs;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::Lab;
use crate::{Result, failed, packages};

pub use guest::{Guest, Plan, System, Systems};
pub use image::Image;
pub use machine::Task;
pub use parts::{Kernel, Parts};
pub use rxe::{GUEST as RXE, GUEST6 as RXE6, OURS, OURS6, Rxe};
pub use vfs::{HOSTS, Vfs};

/// Runs a program in `dir`. Returns its output.
pub(crate) fn run(dir: &Path, words: &[&str]) -> Result<String> {
    let o = Command::new(words[0]).args(&words[1..]).current_dir(dir).output().map_err(failed(words[0]))?;
    if o.status.success() {
        return Ok(String::from_utf8_lossy(&o.stdout).into_owned());
    }
    Err(format!("{}: {}", words.join(" "), String::from_utf8_lossy(&o.stderr)))
}

fn write(path: PathBuf, text: &str, mode: u32) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    let name = path.display().to_string();
    fs::write(&path, text).map_err(failed(&name))?;
    fs::set_permissions(&path, fs::Permissions::from_mode(mode)).map_err(failed(&name))
}

/// Checks that guests can be started, and builds the programs of this machine.
///
/// # Errors
/// The missing part.
pub fn prepare() -> Result<()> {
    if crate::uid() != 0 {
        return Err("virtual machines with vRNICs need root, for their network".into());
    }
    packages::ensure(&[
        packages::RUN,
        packages::CONNECTING,
        packages::PYVERBS,
        packages::RELEASES,
        packages::NETWORK,
        packages::GUESTS,
    ])?;
    crate::build()
}

/// Makes the parts of guests.
///
/// # Errors
/// The step that failed.
pub fn build(kernel: Option<&str>) -> Result<()> {
    prepare()?;
    let systems = Systems::make(kernel)?;
    let names: Vec<&str> = systems.all.iter().map(|s| s.name.as_str()).collect();
    println!("guests with the kernels {} can be started", names.join(" and "));
    Ok(())
}

/// Starts a virtual layer with a guest and with a vRNIC for a container, and calls `f`.
fn alone<T>(kernel: Option<&str>, interactive: bool, f: impl FnOnce(&Lab, Guest) -> Result<T>) -> Result<T> {
    prepare()?;
    let systems = Systems::make(kernel)?;
    let system = systems.all.first().ok_or("no kernel")?;
    let lab = Lab::start(None)?;
    lab.vrnic("guest", &["--ip", "10.0.0.1"])?;
    lab.vrnic("peer", &["--ip", "10.0.0.2"])?;
    let guest = Guest::start(&lab, system, "guest", &Plan { interactive, ..Plan::default() })?;
    f(&lab, guest)
}

/// Runs a command in a guest, and exits like it.
///
/// # Errors
/// If the guest does not come up, or the command fails.
pub fn command(kernel: Option<&str>, command: &str) -> Result<()> {
    let o = alone(kernel, false, |_, guest| guest.run(command))?;
    print!("{}", o.text);
    match o.code {
        Some(0) => Ok(()),
        Some(n) => Err(format!("exit code {n}")),
        None => Err("it did not end".into()),
    }
}

/// Starts a guest whose console is the terminal.
///
/// # Errors
/// If the guest does not come up.
pub fn shell(kernel: Option<&str>) -> Result<()> {
    alone(kernel, true, |lab, guest| {
        let (exe, dir) = (lab.exe().display(), lab.dir.join("run").display().to_string());
        println!("\r\nthe peer: {exe} --dir {dir} run --vrnic peer -- COMMAND\r");
        guest.wait();
        Ok(())
    })
}
