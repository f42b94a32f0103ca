//! A virtual machine with the Linux kernel's own soft RNIC (rxe), the reference for the wire format.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use super::image::Image;
use super::machine::{Config, Machine, Task};
use super::{Parts, write};
use crate::{Lab, Output, Result, failed, siw, within};

/// Address of the guest.
pub const GUEST: &str = "10.0.0.2";
/// Address of this end of its cable.
pub const OURS: &str = "10.0.0.254";
/// IPv6 address of the guest.
pub const GUEST6: &str = "fd01::2";
/// IPv6 address of this end of its cable.
pub const OURS6: &str = "fd01::254";

/// Kernel modules, in the order of loading.
const MODULES: &[&str] = &["crc32_generic", "ib_uverbs", "rdma_ucm", "rdma_rxe"];
/// Further modules for siw.
const SIW_MODULES: &[&str] = &["crc32c_generic", "libcrc32c"];
/// Programs of this machine that the guest gets.
const PROGRAMS: &[&str] = &[
    "rdma",
    "ibv_devinfo",
    "ibv_rc_pingpong",
    "ibv_uc_pingpong",
    "ibv_ud_pingpong",
    "ib_write_bw",
    "ib_read_bw",
    "ib_send_bw",
    "ib_atomic_bw",
    "ib_write_lat",
    "rping",
    "ucmatose",
    "udaddy",
    "rstream",
    "riostream",
    "rdma_server",
    "rdma_client",
    "ibv_srq_pingpong",
    "ib_send_lat",
    "mckey",
];

/// Makes the kernel and the initial RAM file system. `siw`: with the kernel's software iWARP device, if that can be
/// built.
fn image(parts: &Parts, siw: bool, dir: &Path) -> Result<(PathBuf, PathBuf)> {
    let kernel = parts.kernel_here()?;
    let mut image = Image::new(&kernel, dir.join("root"))?;
    image.modules(MODULES)?;
    if siw {
        image.modules(SIW_MODULES)?;
        match siw::module(parts, &kernel) {
            Ok(file) => {
                image.file(&file, "modules/siw.ko")?;
                image.provider("siw")?;
            }
            Err(e) => eprintln!("no siw: {e}"),
        }
    }
    for p in PROGRAMS {
        image.program(p)?;
    }
    image.provider("rxe")?;
    // Our own programs, for comparisons inside the guest.
    let ours = crate::unirdma();
    image.runtime()?;
    image.file(&ours, "bin/unirdma")?;
    image.file(&ours.with_file_name("libibverbs.so"), "dropin/libibverbs.so.1")?;
    let then = format!(
        "echo 0 >/proc/sys/net/ipv6/conf/eth0/accept_dad\n\
         ip addr add {GUEST}/24 dev eth0\nip link set eth0 up\nrdma link add rxe0 type rxe netdev eth0\n\
         ip addr add {GUEST6}/64 dev eth0\n\
         [ -e /modules/siw.ko ] && insmod /modules/siw.ko && rdma link add siw0 type siw netdev eth0\n"
    );
    let initrd = dir.join("initrd.cpio");
    image.pack(&then, &initrd)?;
    Ok((kernel.image.clone(), initrd))
}

/// A guest with rxe, and a virtual layer on the other end of its cable, with a vRNIC that has this end's address.
/// Dropping this value ends both.
pub struct Rxe {
    machine: Option<Machine>,
    lab: Option<Lab>,
    netns: String,
    dir: PathBuf,
}

impl Rxe {
    /// Boots the guest, and starts a virtual layer on this side. Needs root, for the network namespace.
    ///
    /// # Errors
    /// The step that failed.
    pub fn start() -> Result<Rxe> {
        let mut g = Rxe::boot_alone(false)?;
        g.serve(&[])?;
        Ok(g)
    }

    /// The network namespace at this end of its cable.
    pub fn netns(&self) -> &str {
        &self.netns
    }

    /// Starts a virtual layer on this side with these further arguments. It replaces the previous one.
    ///
    /// # Errors
    /// If the virtual layer does not come up.
    pub fn serve(&mut self, more: &[&str]) -> Result<()> {
        self.serve_beside("", more)
    }

    /// As [`Rxe::serve`], with these further lines in its peers file.
    ///
    /// # Errors
    /// If the virtual layer does not come up.
    pub fn serve_beside(&mut self, other_peers: &str, more: &[&str]) -> Result<()> {
        self.lab = None;
        let peers = self.dir.join("peers");
        let lines = [GUEST, GUEST6].map(|ip| format!("{ip} default {ip} foreign\n"));
        write(peers.clone(), &(lines.concat() + other_peers), 0o644)?;
        let peers = peers.display().to_string();
        let args = [&["--address", OURS, "--address", OURS6, "--peers", &peers], more].concat();
        let lab = Lab::start_in(None, Some(&self.netns), &args)?;
        lab.vrnic("v", &["--ip", OURS, "--ip", OURS6])?;
        self.lab = Some(lab);
        Ok(())
    }

    /// Boots the guest, with siw too if `siw` is true and it can be built. Needs root, for the network namespace.
    ///
    /// # Errors
    /// The step that failed.
    pub fn boot_alone(siw: bool) -> Result<Rxe> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let netns = format!("ur{}-vm{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let dir = std::env::temp_dir().join(format!("unirdma-{netns}"));
        fs::create_dir_all(&dir).map_err(failed("temporary directory"))?;
        let mut g = Rxe { machine: None, lab: None, netns: netns.clone(), dir };
        let parts = Parts::make()?;
        let (kernel, initrd) = image(&parts, siw, &g.dir)?;
        crate::ip(&format!("netns add {netns}"))?;
        for args in [
            "link set lo up",
            "tuntap add dev tap0 mode tap",
            &format!("addr add {OURS}/24 dev tap0"),
            &format!("addr add {OURS6}/64 dev tap0 nodad"),
            "link set tap0 up",
        ] {
            crate::ip(&format!("-n {netns} {args}"))?;
        }
        let network = ["-netdev", "tap,id=n0,ifname=tap0,script=no,downscript=no"];
        let card = ["-device", "virtio-net-pci,netdev=n0,romfile="];
        let machine = Machine::start(&Config {
            qemu: [["ip", "netns", "exec", &netns].map(String::from).to_vec(), parts.qemu()].concat(),
            dir: &g.dir,
            kernel: &kernel,
            initrd: &initrd,
            processors: 2,
            more: [["-m", "1G"], network, card].concat().iter().map(ToString::to_string).collect(),
            interactive: false,
        })?;
        machine.wait_up()?;
        g.machine = Some(machine);
        Ok(g)
    }

    /// The virtual layer on this side.
    ///
    /// # Errors
    /// If there is none.
    pub fn lab(&self) -> Result<&Lab> {
        self.lab.as_ref().ok_or_else(|| "no virtual layer".into())
    }

    fn machine(&self) -> Result<&Machine> {
        self.machine.as_ref().ok_or_else(|| "no virtual machine".into())
    }

    /// Starts a command in the guest.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn spawn(&self, command: &str) -> Result<Task> {
        self.machine()?.spawn(command)
    }

    /// Runs a command in the guest.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn run(&self, command: &str) -> Result<Output> {
        self.machine()?.run(command)
    }

    /// Waits until a program of the guest listens, on TCP or for RDMA connections.
    ///
    /// # Errors
    /// If none does.
    pub fn wait_listening(&self) -> Result<()> {
        self.wait_for_listeners(true)
    }

    /// Waits until a program of the guest listens, or until none does.
    fn wait_for_listeners(&self, any: bool) -> Result<()> {
        let limit = Duration::from_secs(20);
        let listens = || Ok(self.run("netstat -ltn; rdma resource show cm_id")?.text.contains("LISTEN") == any);
        let otherwise = if any { "no program of the guest listens" } else { "a program of the guest still listens" };
        within(limit, listens, otherwise).map(drop)
    }

    /// Runs a server in the guest and its client on the vRNIC, or the other way round. Returns the outputs of server
    /// and client.
    ///
    /// # Errors
    /// If one of them cannot be started.
    pub fn pair(&self, guest_serves: bool, ours: &str, guests: &str) -> Result<(Output, Output)> {
        let [ours_calls, guests_call] = [(ours, GUEST), (guests, OURS)].map(|(p, a)| format!("{p} {a}"));
        if guest_serves { self.serve_there(guests, &ours_calls) } else { self.serve_here(ours, &guests_call) }
    }

    /// Runs a server in the guest and its client on the vRNIC. Returns their outputs.
    ///
    /// # Errors
    /// If one of them cannot be started.
    pub fn serve_there(&self, server: &str, client: &str) -> Result<(Output, Output)> {
        let lab = self.lab()?;
        // The port of the previous program must not be taken for the port of this one.
        self.wait_for_listeners(false)?;
        // A server whose client has failed must not outlive its test.
        let server = self.spawn(&format!("timeout 60 {server}"))?;
        self.wait_listening()?;
        let client = lab.spawn("v", &["--net", "host"], client)?.finish();
        Ok((server.finish(), client))
    }

    /// Runs a server on the vRNIC and its client in the guest. Returns their outputs.
    ///
    /// # Errors
    /// If one of them cannot be started.
    pub fn serve_here(&self, server: &str, client: &str) -> Result<(Output, Output)> {
        let lab = self.lab()?;
        let mut server = lab.spawn("v", &["--net", "host"], server)?;
        if !server.wait_listening(|| lab.rdma_listens("v")) {
            return Ok((server.finish(), Output::default()));
        }
        let client = self.run(client)?;
        Ok((server.finish(), client))
    }
}

/// The command that sends to a multicast group.
const MULTICAST_SENDER: &str = "timeout 20 mckey -m 239.1.1.1 -s -b";

impl Rxe {
    /// Runs a member of a multicast group in the guest, and a sender on the vRNIC. Returns their outputs.
    ///
    /// # Errors
    /// If one of them cannot be started.
    pub fn multicast_there(&self) -> Result<(Output, Output)> {
        let lab = self.lab()?;
        let member = self.spawn(&format!("timeout 60 mckey -m 239.1.1.1 -b {GUEST}"))?;
        let start = Instant::now();
        // The group, as the kernel prints it.
        while !self.run("cat /proc/net/igmp")?.text.contains("010101EF") && start.elapsed() < Duration::from_secs(10) {
            std::thread::sleep(Duration::from_millis(100));
        }
        // The program attaches its QP a moment after the kernel has joined the group, and nothing shows it. Earlier
        // messages are lost, so the sender repeats.
        loop {
            let sender = lab.spawn("v", &["--net", "host"], &format!("{MULTICAST_SENDER} {OURS}"))?.finish();
            let enough = Instant::now() + Duration::from_secs(2);
            while !member.has_ended() && Instant::now() < enough {
                std::thread::sleep(Duration::from_millis(50));
            }
            if member.has_ended() || !sender.ok() {
                return Ok((member.finish(), sender));
            }
        }
    }

    /// As [`Rxe::multicast_there`], the other way round.
    ///
    /// # Errors
    /// If one of them cannot be started.
    pub fn multicast_here(&self) -> Result<(Output, Output)> {
        let lab = self.lab()?;
        let command = format!("timeout 20 stdbuf -oL mckey -m 239.1.1.1 -b {OURS}");
        let member = lab.spawn("v", &["--net", "host"], &command)?;
        let start = Instant::now();
        while !member.text().contains("receiving") && start.elapsed() < Duration::from_secs(10) {
            std::thread::sleep(Duration::from_millis(10));
        }
        let sender = self.run(&format!("{MULTICAST_SENDER} {GUEST}"))?;
        Ok((member.finish(), sender))
    }
}

impl Drop for Rxe {
    fn drop(&mut self) {
        self.lab = None;
        self.machine = None;
        let _ = crate::ip(&format!("netns del {}", self.netns));
        let _ = fs::remove_dir_all(&self.dir);
    }
}
