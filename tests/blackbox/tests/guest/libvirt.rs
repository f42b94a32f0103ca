//! A guest that libvirt starts, from the XML that `unirdma vrnic show --libvirt=domain` prints. libvirt's QEMU is
//! another user than root, so it gets the vRNIC's directory at a place that it may enter, as
//! docs/user/virtual-machines.md says.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use harness::vm::System;

use super::*;

const VRNIC: &str = "virt";
const ADDRESS: &str = "10.0.0.8";
/// Longest time for libvirt to look at QEMU, and for the guest to come up and talk.
const WHOLE: Duration = Duration::from_secs(180);
const END: &str = "guest ends";
/// What the guest's first process does: the first steps of the image's own script, and a client of the container.
const SCRIPT: &str = "export PATH=/usr/bin:/bin HOME=/; mount -t proc proc /proc; mount -t sysfs sys /sys; \
    mount -t devtmpfs dev /dev; ulimit -l unlimited; for m in $(sed -n 's/^insmod //p' /init); do insmod $m; done; \
    ip addr add 10.0.0.8/24 dev eth0; ip link set eth0 up; insmod /unirdma_rdma.ko; \
    until g=$(cd /sys/class/infiniband/unirdma0/ports/1/gids && grep -l ffff:0a00:0008 *); do sleep 0.1; done; \
    ibv_devinfo; ip link show eth0; ib_write_bw -F -x $g -n 200 10.0.0.3; echo guest ends; poweroff -f";

/// Text as XML has it.
fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

/// The domain that `vrnic show` prints, with the changes that this machine needs: emulation, a QEMU of another release,
/// and a kernel in the place of a disk. `sockets`: where the vRNIC's directory is.
fn domain(lab: &Lab, system: &System, qemu: &Path, sockets: &Path) -> Result<String> {
    let o = lab.unirdma(&["vrnic", "show", VRNIC, "--libvirt=domain", "--memory", "1G"]);
    require(o.ok(), &*o.text)?;
    let between = |text: &str, from: &str, to: &str, new: &str| -> Result<String> {
        let begin = text.find(from).ok_or_else(|| format!("no {from} in {text}"))?;
        let end = begin + text[begin..].find(to).ok_or_else(|| format!("no {to} in {text}"))? + to.len();
        Ok(format!("{}{new}{}", &text[..begin], &text[end..]))
    };
    let kernel = format!(
        "<kernel>{}</kernel><initrd>{}</initrd><cmdline>console=ttyS0 quiet panic=-1 mitigations=off rdinit=/bin/sh -- \
         -c \"{}\"</cmdline></os>",
        system.kernel.display(),
        system.initrd.display(),
        escaped(SCRIPT)
    );
    let console = format!("<serial type='file'><source path='{}/serial.log'/></serial>", lab.dir.display());
    let text = between(&o.text, "<disk ", "</disk>", &format!("<emulator>{}</emulator>", qemu.display()))?;
    let text = between(&text, "<serial ", "</serial>", &console)?;
    let text = between(&text, "<console ", "/>", "")?;
    let text = text.replace("type='kvm'", "type='qemu'").replace("mode='host-passthrough'", "mode='maximum'");
    let text = text
        .replace("</os>", &kernel)
        .replace("/usr/local/lib/unirdma-name.so", &format!("{}/name.so", lab.dir.display()));
    Ok(text.replace(&lab.dir.join("run/vrnics").display().to_string(), &sockets.display().to_string()))
}

/// A script that starts QEMU as libvirt does, without what is preloaded elsewhere.
fn emulator(lab: &Lab, system: &System) -> Result<PathBuf> {
    let file = lab.dir.join("emulator");
    let begin = system.qemu.iter().position(|w| w == "env").ok_or("no env")?;
    let mut words = system.qemu[begin..].to_vec();
    let preload = words.iter().position(|w| w == "--preload").ok_or("no --preload")?;
    words.drain(preload..preload + 2);
    std::fs::write(&file, format!("#!/bin/sh\nexec {} \"$@\"\n", words.join(" "))).map_err(failed("emulator"))?;
    std::fs::set_permissions(&file, PermissionsExt::from_mode(0o755)).map_err(failed("emulator"))?;
    Ok(file)
}

/// Starts the domain in namespaces that end with the test. `prepare`: commands before.
fn start(lab: &Lab, xml: &str, prepare: &str) -> Result<Running> {
    let dir = lab.dir.join("libvirt");
    std::fs::create_dir_all(dir.join("etc")).map_err(failed("libvirt's directory"))?;
    let id = own_user();
    // No libvirt runs here that would take logs or own files.
    let config = format!("user = \"+{id}\"\ngroup = \"+{id}\"\nstdio_handler = \"file\"\ndynamic_ownership = 0\n");
    std::fs::write(dir.join("etc/qemu.conf"), config).map_err(failed("qemu.conf"))?;
    std::fs::write(lab.dir.join("domain.xml"), xml).map_err(failed("domain.xml"))?;
    // Debian's libvirt wants this user to exist, also if another one is configured.
    let mut users = String::new();
    for (file, line) in
        [("passwd", "libvirt-qemu:x:64055:64055::/:/usr/sbin/nologin\n"), ("group", "libvirt-qemu:x:64055:\n")]
    {
        let known = std::fs::read_to_string(format!("/etc/{file}")).map_err(failed(file))?;
        if !known.contains("\nlibvirt-qemu:") {
            let own = lab.dir.join(file);
            std::fs::write(&own, known + line).map_err(failed(file))?;
            users += &format!("mount --bind {} /etc/{file}; ", own.display());
        }
    }
    // The shell is the first process and waits for all others. libvirt wants the processes gone that it has ended.
    let script =
        format!("{users} {prepare} virt-qemu-run --root {} {}/domain.xml; exit $?", dir.display(), lab.dir.display());
    let mut c = Command::new("unshare");
    c.args(["--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--propagation", "private", "sh", "-ec"]);
    c.arg(script).stdin(Stdio::null());
    Running::start(c, &lab.dir.join("libvirt.log"))
}

/// What the guest has printed.
fn console(lab: &Lab) -> String {
    std::fs::read_to_string(lab.dir.join("serial.log")).unwrap_or_default()
}

/// The output of libvirt, of QEMU and of the guest.
fn logs(lab: &Lab, libvirt: &Running) -> String {
    let qemu = lab.dir.join(format!("libvirt/log/qemu/{VRNIC}.log"));
    format!("{}\n{}\n{}", libvirt.text(), std::fs::read_to_string(qemu).unwrap_or_default(), console(lab))
}

pub(super) fn check(lab: &Lab, system: &System) -> Check {
    lab.vrnic(VRNIC, &["--ip", ADDRESS])?;
    add_containers(lab)?;
    let preload = lab.dir.join("name.so").display().to_string();
    require(lab.unirdma(&["vm", "preload", &preload]).ok(), "no library")?;
    let qemu = emulator(lab, system)?;
    // Another user may not enter the directory of all vRNICs.
    let mut refused = start(lab, &domain(lab, system, &qemu, &lab.dir.join("run/vrnics"))?, "")?;
    let begin = Instant::now();
    while !refused.has_ended() && begin.elapsed() < WHOLE {
        std::thread::sleep(Duration::from_millis(20));
    }
    let text = logs(lab, &refused);
    require(refused.has_ended() && text.contains("Permission denied"), text)?;
    let shared = lab.dir.join("shared");
    let (id, vrnics) = (own_user(), lab.dir.join("run/vrnics"));
    let prepare = format!(
        "install -d -m 0710 -g {id} {0}; mkdir {0}/{VRNIC}; mount --bind {1}/{VRNIC} {0}/{VRNIC};",
        shared.display(),
        vrnics.display()
    );
    let server = lab.spawn("c", &[], &format!("timeout {} ib_write_bw -F -x 0 -n 200", WHOLE.as_secs()))?;
    let mut machine = start(lab, &domain(lab, system, &qemu, &shared)?, &prepare)?;
    let begin = Instant::now();
    while !console(lab).contains(END) {
        if machine.has_ended() || begin.elapsed() > WHOLE {
            return Err(logs(lab, &machine));
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    let text = console(lab);
    let shows = ["PORT_ACTIVE", "unirdma0", "mtu 9000", " 65536      200"];
    require(shows.iter().all(|s| text.contains(s)), &*text)?;
    let server = server.finish_within(LIMIT);
    require(server.ok(), server.text)?;
    drop(machine);
    soon(|| lab.show(VRNIC).is_ok_and(|v| v["sessions"] == 0), "the session stays")
}
