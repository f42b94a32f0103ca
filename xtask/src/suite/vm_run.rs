//! `unirdma vm run`: a guest that is started by it, by its console.

use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};
use std::time::Instant;

use super::guest::LIMIT;
use super::*;
use crate::lab::Running;
use crate::vm::System;

const VRNIC: &str = "started";
/// How long a guest may take to come up.
const BOOT: Duration = Duration::from_secs(120);
/// What the shell of the console, the first process, is told: to do what the image's own script would do first, and to look.
const SCRIPT: &str = "export PATH=/usr/bin:/bin HOME=/; mount -t proc proc /proc; mount -t sysfs sys /sys; \
    mount -t devtmpfs dev /dev; ulimit -l unlimited; for m in $(sed -n 's/^insmod //p' /init); do insmod $m; done; \
    ip link set eth0 up; insmod /unirdma_rdma.ko; sleep 1; ibv_devinfo; poweroff -f\n";

/// QEMU as a program of one word, without the library that it has preloaded elsewhere.
fn program(lab: &Lab, system: &System) -> Result<String> {
    let file = lab.dir.join("qemu");
    let mut words = system.qemu.clone();
    if let Some(i) = words.iter().position(|w| w == "--preload") {
        words.drain(i..i + 2);
    }
    let quoted: Vec<String> = words.iter().map(|w| format!("'{w}'")).collect();
    std::fs::write(&file, format!("#!/bin/sh\nexec {} \"$@\"\n", quoted.join(" "))).map_err(|e| e.to_string())?;
    std::fs::set_permissions(&file, PermissionsExt::from_mode(0o755)).map_err(|e| e.to_string())?;
    Ok(file.display().to_string())
}

/// A guest starts, its programs see the vRNIC, and it powers off.
pub(super) fn check(lab: &Lab, system: &System) -> Check {
    lab.vrnic(VRNIC, &["--ip", "10.0.0.9"])?;
    let qemu = program(lab, system)?;
    let mut c = Command::new(lab.exe());
    c.arg("--dir").arg(lab.dir.join("run")).args(["vm", "run", "--vrnic", VRNIC, "--qemu", &qemu, "--accel", "tcg"]);
    c.args(["--memory", "1G", "--cpus", "1"]).arg("--kernel").arg(&system.kernel).arg("--initrd").arg(&system.initrd);
    c.args(["--append", "console=ttyS0 quiet panic=-1 mitigations=off rdinit=/bin/sh", "--", "-no-reboot"]);
    c.stdin(Stdio::piped());
    let mut machine = Running::start(c, &lab.dir.join("vm-run.log"))?;
    let start = Instant::now();
    while !machine.text().trim_end().ends_with('#') {
        if machine.has_ended() || start.elapsed() > BOOT {
            return Err(format!("no prompt on the console: {}", machine.text()));
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    if let Some(console) = machine.stdin() {
        console.write_all(SCRIPT.as_bytes()).map_err(|e| e.to_string())?;
    }
    let o = machine.finish_within(LIMIT);
    let shows = ["TCG", "unirdma0", "PORT_ACTIVE"];
    require(o.ok() && shows.iter().all(|t| o.text.contains(t)), format!("exit code {:?}: {}", o.code, o.text))?;
    wait_until(|| lab.show(VRNIC).is_ok_and(|v| v["sessions"] == 0), "the session stays")
}
