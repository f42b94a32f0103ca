//! `unirdma vm run`: starts a guest with a disk and user data, and uses it by its console.

use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Instant;

use harness::vm::System;

use super::*;

const VRNIC: &str = "started";
/// Longest time for a guest to come up.
const BOOT: Duration = Duration::from_secs(120);
const ADDRESS: &str = "10.0.0.9";
/// Commands for the shell on the console, which is the first process. They do the first steps of the image's own
/// script, print the state, and write to the disk.
const SCRIPT: &str = "export PATH=/usr/bin:/bin HOME=/; mount -t proc proc /proc; mount -t sysfs sys /sys; \
    mount -t devtmpfs dev /dev; ulimit -l unlimited; for m in $(sed -n 's/^insmod //p' /init); do insmod $m; done; \
    ip link set eth0 up; insmod /unirdma_rdma.ko; /load-vm-disks; mkdir /disk /seed; mount -t ext4 /dev/vda /disk; \
    mount -t vfat -o ro /dev/vdb1 /seed; cat /disk/file /seed/*; echo changed >/disk/file; sync; umount /disk; \
    sleep 1; ibv_devinfo; poweroff -f\n";
const ON_DISK: &str = "this is on the disk";
const USER_DATA: &str = "#cloud-config\nhostname: the-guest\n";

/// A disk image with a file system that has one file.
fn disk(lab: &Lab) -> Result<PathBuf> {
    let (dir, image) = (lab.dir.join("disk"), lab.dir.join("disk.raw"));
    std::fs::create_dir_all(&dir).map_err(|e| e.to_string())?;
    std::fs::write(dir.join("file"), format!("{ON_DISK}\n")).map_err(|e| e.to_string())?;
    let o = Command::new("/usr/sbin/mkfs.ext4").arg("-q").arg("-d").arg(&dir).arg(&image).arg("8M").output();
    let o = o.map_err(|e| format!("mkfs.ext4: {e}"))?;
    require(o.status.success(), String::from_utf8_lossy(&o.stderr))?;
    Ok(image)
}

/// A script that starts QEMU, without the library that is preloaded elsewhere.
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

/// A guest starts with QEMU confined, sees its disk and the files for cloud-init, its programs see the vRNIC, and it
/// powers off. The disk's image stays unchanged.
pub(super) fn check(lab: &Lab, system: &System) -> Check {
    lab.vrnic(VRNIC, &["--ip", ADDRESS])?;
    let mac = lab.show(VRNIC)?["mac"].as_str().unwrap_or_default().to_string();
    let image = disk(lab)?;
    let before = std::fs::read(&image).map_err(|e| e.to_string())?;
    let user_data = lab.dir.join("user-data.yaml");
    std::fs::write(&user_data, USER_DATA).map_err(|e| e.to_string())?;
    let qemu = program(lab, system)?;
    // QEMU of another release, with its libraries, lies beside the kernel.
    let parts = system.kernel.parent().ok_or("no directory of the kernel")?.display();
    let mut c = Command::new(lab.exe());
    c.arg("--dir").arg(lab.dir.join("run")).args(["vm", "run", "--vrnic", VRNIC, "--qemu", &qemu, "--accel", "tcg"]);
    c.arg("--image").arg(&image).args(["--format", "raw", "--snapshot"]).arg("--user-data").arg(&user_data);
    c.args(["--memory", "1G", "--cpus", "1"]).arg("--kernel").arg(&system.kernel).arg("--initrd").arg(&system.initrd);
    c.args(["--append", "console=ttyS0 quiet panic=-1 mitigations=off rdinit=/bin/sh"]);
    c.args(["--bind", &format!("{parts}:ro"), "--", "-no-reboot"]);
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
    let shows = [
        "TCG",
        "unirdma0",
        "PORT_ACTIVE",
        ON_DISK,
        "hostname: the-guest",
        "instance-id: unirdma-started",
        &format!("macaddress: \"{mac}\""),
        &format!("\"{ADDRESS}"),
    ];
    require(o.ok() && shows.iter().all(|t| o.text.contains(t)), format!("exit code {:?}: {}", o.code, o.text))?;
    require(std::fs::read(&image).is_ok_and(|after| after == before), "the image was changed in spite of --snapshot")?;
    soon(|| lab.show(VRNIC).is_ok_and(|v| v["sessions"] == 0), "the session stays")
}
