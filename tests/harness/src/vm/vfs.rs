//! A virtual machine with a network card that has virtual functions, each with the kernel's soft RNIC: what an RNIC
//! with SR-IOV looks like to programs and to a supervisor.

use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use super::Parts;
use super::image::Image;
use super::machine::{Config, Machine, Task};
use crate::{Output, Result, conformance, failed, within};

/// The addresses of the cards of [`Vfs::start_two_hosts`].
pub const HOSTS: [&str; 2] = ["10.60.0.1", "10.60.0.2"];
const MACS: [&str; 2] = ["52:54:00:12:34:56", "52:54:00:12:34:57"];
/// The card of a machine that no other one reaches.
const ALONE: (&str, &str) = ("user,id=n0", MACS[0]);
/// VFs of the card. The VF `n` has the network device `vN`, the verbs device `rxeN` and the address 10.50.0.1N; the
/// card itself is the network device `pf`.
pub const VFS: u32 = 4;

const MODULES: &[&str] = &["ib_uverbs", "rdma_ucm", "igb", "igbvf", "tun", "overlay"];
/// Programs of Debian 13.
const PROGRAMS: &[&str] = &[
    "ibv_devices",
    "ibv_devinfo",
    "ibv_rc_pingpong",
    "ibv_uc_pingpong",
    "ibv_ud_pingpong",
    "ibv_srq_pingpong",
    "ib_write_bw",
    "ib_read_bw",
    "ib_send_bw",
    "ib_atomic_bw",
    "ib_write_lat",
    "ib_read_lat",
    "ib_send_lat",
    "ib_atomic_lat",
    "rping",
    "mckey",
    "udaddy",
    "rstream",
    "rdma",
    "ip",
    "prlimit",
    "setpriv",
    "unshare",
    "dmesg",
];
/// Takes the card up.
const PF_UP: &str = "
pf=$(ls -d /sys/class/net/*/device/sriov_numvfs | cut -d/ -f5)
ip link set $pf name pf
ip link set pf up
echo 0 >/proc/sys/net/ipv4/conf/all/rp_filter
";
/// Gives the card an address, `$address`, by which the virtual layer reaches another host. The kernel's soft RNIC has
/// the port of RoCEv2 already, so the virtual layer gets another port in its place, to which no packet comes:
/// containers' packets go by VXLAN.
const HOST_UP: &str = "
ip addr add $address/24 dev pf
mkdir /control
mount -t cgroup2 none /control
move-port /control 4791 14791 >/dev/null &
";
/// Takes the VFs up. Two VFs of one host reach each other only with `accept_local`, without `rp_filter`, and with
/// permanent neighbours.
const VFS_UP: &str = "
echo 4 >/sys/class/net/pf/device/sriov_numvfs
for i in 0 1 2 3; do /vf-up $i; done
for i in 0 1 2 3; do /vf-neighbours $i; done
";
/// Gives the VF `$1` a name, an address and a verbs device.
const VF_UP: &str = "#!/bin/sh
vf=/sys/class/net/pf/device/virtfn$1
until name=$(ls $vf/net 2>/dev/null) && [ \"$name\" ]; do sleep 0.05; done
ip link set $name down
[ $name = v$1 ] || ip link set $name name v$1
echo 1 >/proc/sys/net/ipv4/conf/v$1/accept_local
echo 0 >/proc/sys/net/ipv4/conf/v$1/rp_filter
ip addr replace 10.50.0.1$1/24 dev v$1
ip link set v$1 up
[ -e /sys/class/infiniband/rxe$1 ] || rdma link add rxe$1 type rxe netdev v$1
";
/// Tells the VF `$1` and the others about each other.
const VF_NEIGHBOURS: &str = "#!/bin/sh
for j in 0 1 2 3; do
    [ $j = $1 ] && continue
    ip neigh replace 10.50.0.1$j lladdr $(cat /sys/class/net/v$j/address) dev v$1 nud permanent
    ip neigh replace 10.50.0.1$1 lladdr $(cat /sys/class/net/v$1/address) dev v$j nud permanent
done
";

/// Contents of a machine beside Debian's programs.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Contents {
    /// Programs that show what the kernel does.
    Facts,
    /// Our programs as well.
    Ours,
    /// Our programs, rdma-core's own tests, and UCX.
    Suites,
}

/// A running machine. Dropping this value ends it.
pub struct Vfs {
    machine: Machine,
    dir: PathBuf,
}

impl Vfs {
    /// Boots it, and waits until all VFs can be used.
    ///
    /// # Errors
    /// The step that failed.
    pub fn start() -> Result<Vfs> {
        let vfs = Vfs::boot(new_dir()?, &format!("{PF_UP}{VFS_UP}"), Contents::Facts, ALONE)?;
        (0..VFS).try_for_each(|vf| vfs.wait_usable(vf))?;
        Ok(vfs)
    }

    /// Boots it without VFs, with our own programs.
    ///
    /// # Errors
    /// The step that failed.
    pub fn start_without_vfs() -> Result<Vfs> {
        Vfs::boot(new_dir()?, PF_UP, Contents::Ours, ALONE)
    }

    /// As [`Vfs::start_without_vfs`], with rdma-core's own tests and UCX.
    ///
    /// # Errors
    /// The step that failed.
    pub fn start_with_suites() -> Result<Vfs> {
        Vfs::boot(new_dir()?, PF_UP, Contents::Suites, ALONE)
    }

    /// Boots two of them without VFs, with our own programs, whose cards are connected by a cable. Each card has an
    /// address of [`HOSTS`].
    ///
    /// # Errors
    /// The step that failed.
    pub fn start_two_hosts() -> Result<[Vfs; 2]> {
        let dirs = [new_dir()?, new_dir()?];
        let start = |own: usize| {
            let end = |which: &str, host: usize| {
                format!("{which}.type=unix,{which}.path={}", dirs[host].join("cable").display())
            };
            let netdev = format!("dgram,id=n0,{},{}", end("local", own), end("remote", 1 - own));
            let set_up = format!("{PF_UP}address={}\n{HOST_UP}", HOSTS[own]);
            Vfs::boot(dirs[own].clone(), &set_up, Contents::Ours, (&netdev, MACS[own]))
        };
        Ok([start(0)?, start(1)?])
    }

    /// `card`: what the card is connected to, as QEMU's option `-netdev` has it, and its MAC address.
    fn boot(dir: PathBuf, set_up: &str, contents: Contents, card: (&str, &str)) -> Result<Vfs> {
        let parts = Parts::make()?;
        let kernel = parts.kernel_13()?;
        let mut image = Image::new(&kernel, dir.join("root"))?;
        image.modules(MODULES)?;
        image.rxe()?;
        PROGRAMS.iter().try_for_each(|p| image.program(p))?;
        ["rnic-facts", "lease"].iter().try_for_each(|p| image.compile(p))?;
        image.text("vf-up", VF_UP)?;
        image.text("vf-neighbours", VF_NEIGHBOURS)?;
        if contents == Contents::Suites {
            conformance::add_tests(&kernel, &mut image)?;
            image.program("ucx_perftest")?;
            image.tree("/usr/lib/x86_64-linux-gnu/ucx", &[])?;
        }
        if contents != Contents::Facts {
            image.runtime()?;
            image.file(&crate::unirdma(), "usr/bin/unirdma")?;
            image.our_libraries()?;
            ["count-calls", "move-port", "vf-attack", "vf-contexts", "vf-costs", "vf-events"]
                .iter()
                .try_for_each(|p| image.compile(p))?;
            image.takes_containers();
        }
        let initrd = dir.join("initrd.cpio");
        image.pack(set_up, &initrd)?;
        let (netdev, mac) = card;
        let card = format!("igb,bus=root1,netdev=n0,romfile=,mac={mac}");
        let root = "pcie-root-port,id=root1,chassis=1,slot=1";
        let more = ["-m", "1G", "-device", root, "-netdev", netdev, "-device", &card];
        let machine = Machine::start(&Config {
            qemu: parts.qemu(),
            dir: &dir,
            kernel: &kernel.image,
            initrd: &initrd,
            processors: 2,
            more: more.into_iter().map(String::from).collect(),
            interactive: false,
        })?;
        let vfs = Vfs { machine, dir };
        vfs.machine.wait_up()?;
        Ok(vfs)
    }

    /// Starts a command.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn spawn(&self, command: &str) -> Result<Task> {
        self.machine.spawn(command)
    }

    /// Runs a command to its end.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn run(&self, command: &str) -> Result<Output> {
        self.machine.run(command)
    }

    /// Runs a command that must succeed. Returns its output.
    ///
    /// # Errors
    /// The command's output, with the end of the console.
    pub fn must(&self, command: &str) -> Result<String> {
        let o = self.run(command)?;
        if o.ok() { Ok(o.text) } else { Err(format!("{command}: {}\n{}", o.text, self.machine.console())) }
    }

    /// The index of the GID that is the address of VF `vf`, at its verbs device. Waits until there is one, and until
    /// the port is active. The driver may take seconds to find out that the link is up.
    ///
    /// # Errors
    /// There is none, or the port does not become active.
    pub fn gid(&self, verbs: &str, vf: u32) -> Result<u32> {
        let command = format!(
            "cd /sys/class/infiniband/{verbs}/ports/1 && grep -q ACTIVE state && \
             cd gids && grep -l 'ffff:0a32:00{:02x}' *",
            10 + vf
        );
        let mut index = None;
        let is_there = || {
            index = self.run(&command)?.text.trim().parse().ok();
            Ok(index.is_some())
        };
        within(Duration::from_secs(20), is_there, &format!("{verbs} has no active port with a GID"))?;
        index.ok_or_else(|| "no GID".into())
    }

    /// Waits until a VF of [`Vfs::start`] can be used.
    fn wait_usable(&self, vf: u32) -> Result<()> {
        self.gid(&format!("rxe{vf}"), vf).map(drop)
    }

    /// Makes a VF as it was after the boot, if a test has changed it.
    ///
    /// # Errors
    /// The step that failed.
    pub fn repair(&self, vf: u32) -> Result<()> {
        self.must(&format!("/vf-up {vf} && /vf-neighbours {vf}"))?;
        self.wait_usable(vf)
    }
}

/// A directory of its own for a machine.
fn new_dir() -> Result<PathBuf> {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let name = format!("unirdma-vfs-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
    let dir = std::env::temp_dir().join(name);
    fs::create_dir_all(&dir).map_err(failed("temporary directory"))?;
    Ok(dir)
}

impl Drop for Vfs {
    fn drop(&mut self) {
        self.machine.kill();
        let _ = fs::remove_dir_all(&self.dir);
    }
}
