//! A virtual machine with the Linux kernel's own soft RNIC (rxe): the peer that the wire format is measured by.
//!
//! It is made from Debian's packages: the distribution's kernel, downloaded and not installed, and this machine's own
//! programs in an initial RAM file system. QEMU emulates the processor, so that it runs anywhere.

use std::fs;
use std::io::Write;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::Result;
use crate::lab::{self, Lab, Output, Running};
use crate::siw;

/// Address of the guest, and of this end of its cable.
pub(crate) const GUEST: &str = "10.0.0.2";
pub(crate) const OURS: &str = "10.0.0.254";
/// The same for IPv6.
pub(crate) const GUEST6: &str = "fd01::2";
pub(crate) const OURS6: &str = "fd01::254";

/// Kernel modules, in the order in which they are wanted.
const MODULES: &[&str] = &["virtio_pci", "virtio_net", "crc32_generic", "ib_uverbs", "rdma_ucm", "rdma_rxe"];
/// Those that siw wants more.
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
/// The guest's commands: one connection each, the line in, output and `rc=N` out.
const SERVE: &str = "#!/bin/sh\nread -r line\nsh -c \"$line\" 2>&1\necho \"rc=$?\"\n";
const PORT: &str = "7000";
/// How long the guest may take to come up; emulation now and then fails, so there is another try.
const BOOT: Duration = Duration::from_secs(90);
const TRIES: u32 = 3;

pub(crate) fn failed(what: &str) -> impl Fn(std::io::Error) -> String + '_ {
    move |e| format!("{what}: {e}")
}

/// Runs a program in `dir`; what it prints.
pub(crate) fn run(dir: &Path, words: &[&str]) -> Result<String> {
    let o = Command::new(words[0]).args(&words[1..]).current_dir(dir).output().map_err(failed(words[0]))?;
    if o.status.success() {
        return Ok(String::from_utf8_lossy(&o.stdout).into_owned());
    }
    Err(format!("{}: {}", words.join(" "), String::from_utf8_lossy(&o.stderr)))
}

/// Kernel and initial RAM file system, in `target/vm`.
struct Parts {
    kernel: PathBuf,
    initrd: PathBuf,
}

/// Copies a file to its own place below `root`, following links.
fn copy(file: &str, root: &Path) -> Result<()> {
    let to = root.join(file.trim_start_matches('/'));
    fs::create_dir_all(to.parent().unwrap_or(root)).map_err(failed(file))?;
    fs::copy(file, &to).map(|_| ()).map_err(failed(file))
}

/// Copies a program or library with the libraries that it needs.
fn copy_program(file: &str, root: &Path) -> Result<()> {
    copy(file, root)?;
    // A static program needs none, and ldd says so by failing.
    let needs = run(root, &["ldd", file]).unwrap_or_default();
    for library in needs.split_whitespace().filter(|w| w.starts_with('/')) {
        if !root.join(library.trim_start_matches('/')).exists() {
            copy(library, root)?;
        }
    }
    Ok(())
}

/// Copies rdma-core's provider for a kind of device.
fn copy_provider(kind: &str, root: &Path) -> Result<()> {
    let providers = "/usr/lib/x86_64-linux-gnu/libibverbs";
    let all = fs::read_dir(providers).map_err(failed(providers))?.flatten();
    let found = all.map(|e| e.path().display().to_string()).find(|p| p.contains(&format!("/lib{kind}-")));
    copy_program(&found.ok_or(format!("no {kind} provider in {providers}"))?, root)?;
    copy(&format!("/etc/libibverbs.d/{kind}.driver"), root)
}

fn write(path: PathBuf, text: &str, mode: u32) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    let name = path.display().to_string();
    fs::write(&path, text).map_err(failed(&name))?;
    fs::set_permissions(&path, fs::Permissions::from_mode(mode)).map_err(failed(&name))
}

impl Parts {
    /// `siw`: with the kernel's software iWARP device too, if it can be built.
    fn make(siw: bool) -> Result<Parts> {
        let dir = lab::root().join("target/vm");
        fs::create_dir_all(&dir).map_err(failed("target/vm"))?;
        let kernel = run(&dir, &["apt-cache", "depends", "linux-image-amd64"])?;
        let kernel = kernel.split_whitespace().find(|w| w.starts_with("linux-image-") && *w != "linux-image-amd64");
        let kernel = kernel.ok_or("apt knows no linux-image-amd64")?.to_string();
        let k = dir.join(&kernel);
        if !k.join("boot").exists() {
            println!("downloading {kernel} for the virtual machine");
            run(&dir, &["apt-get", "download", "-q", &kernel])?;
            let deb = run(&dir, &["sh", "-c", &format!("ls -t {kernel}_*.deb | head -1")])?;
            run(&dir, &["dpkg-deb", "-x", deb.trim(), &kernel])?;
            run(&dir, &["rm", "-f", deb.trim()])?;
        }
        let version = kernel.trim_start_matches("linux-image-");
        let base = if k.join("lib/modules").exists() { k.clone() } else { k.join("usr") };
        let base = base.display().to_string();
        run(&dir, &["depmod", "-b", &base, version])?;
        let root = dir.join("root");
        let _ = fs::remove_dir_all(&root);
        for d in ["bin", "dev", "proc", "sys", "run", "tmp", "modules"] {
            fs::create_dir_all(root.join(d)).map_err(failed(d))?;
        }
        let mut modules = Vec::new();
        for m in MODULES.iter().chain(SIW_MODULES.iter().filter(|_| siw)) {
            let chain = run(&dir, &["modprobe", "-d", &base, "-S", version, "--show-depends", m])?;
            for file in chain.lines().filter_map(|l| l.strip_prefix("insmod ")).map(str::trim) {
                let name = Path::new(file).file_name().unwrap_or_default().to_string_lossy().into_owned();
                let plain = name.trim_end_matches(".xz").to_string();
                if modules.contains(&plain) {
                    continue;
                }
                fs::copy(file, root.join("modules").join(&name)).map_err(failed(file))?;
                if name != plain {
                    run(&root.join("modules"), &["xz", "-d", &name])?;
                }
                modules.push(plain);
            }
        }
        if siw {
            match siw::module(version, &dir) {
                Ok(file) => {
                    fs::copy(&file, root.join("modules/siw.ko")).map_err(failed("siw.ko"))?;
                    copy_provider("siw", &root)?;
                }
                Err(e) => eprintln!("no siw: {e}"),
            }
        }
        copy_program("/bin/busybox", &root)?;
        for applet in run(&dir, &["/bin/busybox", "--list"])?.lines().filter(|a| *a != "busybox") {
            let _ = symlink("busybox", root.join("bin").join(applet));
        }
        for p in PROGRAMS {
            copy_program(&format!("/usr/bin/{p}"), &root)?;
        }
        copy_provider("rxe", &root)?;
        // Our own programs, for comparisons inside the guest.
        let ours = lab::unirdma();
        copy_program(&ours.display().to_string(), &root)?;
        fs::rename(root.join(ours.strip_prefix("/").unwrap_or(&ours)), root.join("bin/unirdma"))
            .map_err(failed("unirdma"))?;
        fs::create_dir_all(root.join("dropin")).map_err(failed("dropin"))?;
        fs::copy(ours.with_file_name("libibverbs.so"), root.join("dropin/libibverbs.so.1"))
            .map_err(failed("dropin"))?;
        let insmod: String = modules.iter().map(|m| format!("insmod /modules/{m}\n")).collect();
        let init = format!(
            "#!/bin/sh\nexport PATH=/usr/bin:/bin HOME=/\nmount -t proc proc /proc\nmount -t sysfs sys /sys\n\
             mount -t devtmpfs dev /dev\nulimit -l unlimited\n{insmod}ip link set lo up\n\
             echo 0 >/proc/sys/net/ipv6/conf/eth0/accept_dad\n\
             ip addr add {GUEST}/24 dev eth0\nip link set eth0 up\nrdma link add rxe0 type rxe netdev eth0\n\
             ip addr add {GUEST6}/64 dev eth0\n\
             [ -e /modules/siw.ko ] && insmod /modules/siw.ko && rdma link add siw0 type siw netdev eth0\n\
             nc -ll -p {PORT} -e /serve &\nuntil netstat -ltn | grep -q :{PORT}; do sleep 0.1; done\n\
             echo GUEST-READY\nwait\n"
        );
        write(root.join("init"), &init, 0o755)?;
        write(root.join("serve"), SERVE, 0o755)?;
        let initrd = dir.join("initrd.cpio");
        let pack = format!("find . | cpio -o -H newc --quiet > {}", initrd.display());
        run(&root, &["sh", "-c", &pack])?;
        let boot = k.join("boot").join(format!("vmlinuz-{version}"));
        Ok(Parts { kernel: boot, initrd })
    }
}

/// A guest with rxe, and a virtual layer on the other end of its cable, with a vRNIC that has this end's address. All
/// ends with this value.
pub(crate) struct Guest {
    qemu: Option<Child>,
    pub lab: Option<Lab>,
    netns: String,
    dir: PathBuf,
}

impl Guest {
    /// Boots it, and starts a virtual layer on this side. Needs root, for the network namespace.
    ///
    /// # Errors
    /// What could not be made.
    pub fn start() -> Result<Guest> {
        let mut g = Guest::boot_alone(false)?;
        g.serve(&[])?;
        Ok(g)
    }

    /// Starts a virtual layer on this side, with these arguments more, in the place of the one before.
    ///
    /// # Errors
    /// Why it does not serve.
    pub fn serve(&mut self, more: &[&str]) -> Result<()> {
        self.lab = None;
        let peers = self.dir.join("peers");
        let lines = [GUEST, GUEST6].map(|ip| format!("{ip} default {ip} foreign\n"));
        write(peers.clone(), &lines.concat(), 0o644)?;
        let peers = peers.display().to_string();
        let args = [&["--address", OURS, "--address", OURS6, "--peers", &peers], more].concat();
        let lab = Lab::start_in(None, Some(&self.netns), &args)?;
        lab.vrnic("v", &["--ip", OURS, "--ip", OURS6])?;
        self.lab = Some(lab);
        Ok(())
    }

    /// Boots it, with siw too if that is wanted and can be built. Needs root, for the network namespace.
    ///
    /// # Errors
    /// What could not be made.
    pub fn boot_alone(siw: bool) -> Result<Guest> {
        let parts = Parts::make(siw)?;
        let netns = format!("ur{}-vm", std::process::id());
        let dir = std::env::temp_dir().join(format!("unirdma-{netns}"));
        fs::create_dir_all(&dir).map_err(failed("temporary directory"))?;
        let mut g = Guest { qemu: None, lab: None, netns: netns.clone(), dir };
        lab::ip(&format!("netns add {netns}"))?;
        for args in [
            "link set lo up",
            "tuntap add dev tap0 mode tap",
            &format!("addr add {OURS}/24 dev tap0"),
            &format!("addr add {OURS6}/64 dev tap0 nodad"),
            "link set tap0 up",
        ] {
            lab::ip(&format!("-n {netns} {args}"))?;
        }
        for left in (0..TRIES).rev() {
            match g.boot(&parts) {
                Ok(()) => break,
                Err(e) if left == 0 => return Err(e),
                Err(_) => g.power_off(),
            }
        }
        Ok(g)
    }

    fn boot(&mut self, parts: &Parts) -> Result<()> {
        let console = self.dir.join("console.log");
        let log = fs::File::create(&console).map_err(failed("console"))?;
        let err = log.try_clone().map_err(failed("console"))?;
        let mut c = Command::new("ip");
        c.args(["netns", "exec", &self.netns, "qemu-system-x86_64", "-accel", "tcg,thread=multi", "-machine", "q35"]);
        c.args(["-cpu", "max", "-smp", "2", "-m", "1024", "-display", "none", "-no-reboot", "-serial", "stdio"]);
        c.arg("-kernel").arg(&parts.kernel).arg("-initrd").arg(&parts.initrd);
        c.args(["-append", "console=ttyS0 nokaslr mitigations=off panic=-1"]);
        c.args([
            "-netdev",
            "tap,id=n0,ifname=tap0,script=no,downscript=no",
            "-device",
            "virtio-net-pci,netdev=n0,romfile=",
        ]);
        let child = c.stdin(Stdio::null()).stdout(log).stderr(err).spawn().map_err(failed("qemu-system-x86_64"))?;
        self.qemu = Some(child);
        let start = Instant::now();
        loop {
            let text = String::from_utf8_lossy(&fs::read(&console).unwrap_or_default()).into_owned();
            if text.contains("GUEST-READY") {
                return Ok(());
            }
            let ended = self.qemu.as_mut().is_none_or(|q| !matches!(q.try_wait(), Ok(None)));
            if ended || start.elapsed() > BOOT {
                let lines: Vec<&str> = text.lines().collect();
                return Err(format!(
                    "the guest did not come up: {}",
                    lines[lines.len().saturating_sub(20)..].join("\n")
                ));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn power_off(&mut self) {
        if let Some(mut q) = self.qemu.take() {
            let _ = q.kill();
            let _ = q.wait();
        }
    }

    /// Starts a command in the guest. Its output ends with `rc=` and its exit code.
    ///
    /// # Errors
    /// It could not be started.
    fn spawn(&self, command: &str) -> Result<Running> {
        let mut c = Command::new("ip");
        c.args(["netns", "exec", &self.netns, "busybox", "nc", GUEST, PORT]).stdin(Stdio::piped());
        let mut r = Running::start(c, &self.dir.join(format!("guest-{:?}.log", Instant::now())))?;
        if let Some(i) = r.stdin() {
            writeln!(i, "{command}").map_err(failed("guest"))?;
        }
        Ok(r)
    }

    /// Runs a command in the guest.
    ///
    /// # Errors
    /// It could not be started.
    pub fn run(&self, command: &str) -> Result<Output> {
        self.spawn(command).map(guest_output)
    }

    /// Waits until a program of the guest listens, on TCP other than for the commands, or for RDMA connections.
    fn wait_listening(&self) -> Result<()> {
        let start = Instant::now();
        while start.elapsed() < Duration::from_secs(20) {
            let o = self.run("netstat -ltn; rdma resource show cm_id")?;
            if o.text.lines().any(|l| l.contains("LISTEN") && !l.contains(&format!(":{PORT} "))) {
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        Err("no program of the guest listens".into())
    }

    /// A server in the guest and its client on the vRNIC, or the other way round. Outputs of server and client.
    ///
    /// # Errors
    /// One of them could not be started.
    pub fn pair(&self, guest_serves: bool, ours: &str, guests: &str) -> Result<(Output, Output)> {
        let [ours_calls, guests_call] = [(ours, GUEST), (guests, OURS)].map(|(p, a)| format!("{p} {a}"));
        if guest_serves { self.serve_there(guests, &ours_calls) } else { self.serve_here(ours, &guests_call) }
    }

    /// A server in the guest and its client on the vRNIC: their outputs.
    ///
    /// # Errors
    /// One of them could not be started.
    pub fn serve_there(&self, server: &str, client: &str) -> Result<(Output, Output)> {
        let lab = self.lab.as_ref().ok_or("no virtual layer")?;
        let server = self.spawn(server)?;
        self.wait_listening()?;
        let client = lab.spawn("v", &["--net", "host"], client)?.finish();
        Ok((guest_output(server), client))
    }

    /// A server on the vRNIC and its client in the guest: their outputs.
    ///
    /// # Errors
    /// One of them could not be started.
    pub fn serve_here(&self, server: &str, client: &str) -> Result<(Output, Output)> {
        let lab = self.lab.as_ref().ok_or("no virtual layer")?;
        let mut server = lab.spawn("v", &["--net", "host"], server)?;
        if !server.wait_listening(|| lab.rdma_listens("v")) {
            return Ok((server.finish(), Output::default()));
        }
        let client = self.run(client)?;
        Ok((server.finish(), client))
    }
}

/// Sends to a multicast group.
const MULTICAST_SENDER: &str = "timeout 20 mckey -m 239.1.1.1 -s -b";

impl Guest {
    /// A member of a multicast group in the guest, and one on the vRNIC that sends to it: their outputs.
    ///
    /// # Errors
    /// One of them could not be started.
    pub fn multicast_there(&self) -> Result<(Output, Output)> {
        let lab = self.lab.as_ref().ok_or("no virtual layer")?;
        let mut member = self.spawn(&format!("timeout 60 mckey -m 239.1.1.1 -b {GUEST}"))?;
        let start = Instant::now();
        // The group, as the kernel prints it.
        while !self.run("cat /proc/net/igmp")?.text.contains("010101EF") && start.elapsed() < Duration::from_secs(10) {
            std::thread::sleep(Duration::from_millis(100));
        }
        // The program attaches its QP a moment after the kernel has joined the group, and nothing shows it: what is sent before
        // is lost, and the sender comes again.
        loop {
            let sender = lab.spawn("v", &["--net", "host"], &format!("{MULTICAST_SENDER} {OURS}"))?.finish();
            let enough = Instant::now() + Duration::from_secs(2);
            while !member.has_ended() && Instant::now() < enough {
                std::thread::sleep(Duration::from_millis(50));
            }
            if member.has_ended() || !sender.ok() {
                return Ok((guest_output(member), sender));
            }
        }
    }

    /// As [`Guest::multicast_there`], the other way round.
    ///
    /// # Errors
    /// One of them could not be started.
    pub fn multicast_here(&self) -> Result<(Output, Output)> {
        let lab = self.lab.as_ref().ok_or("no virtual layer")?;
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

fn guest_output(r: Running) -> Output {
    let text = r.finish().text;
    let code = text.lines().last().and_then(|l| l.strip_prefix("rc=")).and_then(|n| n.parse().ok());
    Output { code, text }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.lab = None;
        self.power_off();
        let _ = lab::ip(&format!("netns del {}", self.netns));
        let _ = fs::remove_dir_all(&self.dir);
    }
}
