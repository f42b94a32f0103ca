//! Guests with a vRNIC: with the guest driver of `guest/linux`, our provider, and Debian's unmodified programs.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use super::image::Image;
use super::machine::{Config, Machine, Task};
use super::{Kernel, Parts};
use crate::{Lab, Output, Result, failed};

/// Debian's programs that guests have.
const PROGRAMS: &[&str] = &[
    "ibv_asyncwatch",
    "ibv_devices",
    "ibv_devinfo",
    "ibv_rc_pingpong",
    "ibv_uc_pingpong",
    "ibv_ud_pingpong",
    "ibv_srq_pingpong",
    "ib_write_bw",
    "ib_write_lat",
    "ib_send_bw",
    "ib_send_lat",
    "ib_read_bw",
    "ib_atomic_bw",
    "rping",
    "ucmatose",
    "udaddy",
    "mckey",
    "rdma",
    "ip",
    "ping",
    "dmesg",
];
/// Our C programs that guests have.
const OURS: &[&str] = &["queues", "guest-hostile"];
/// Name of the driver's module.
const DRIVER: &str = "unirdma_rdma";
/// Longest time for a driver to show its device.
const READY: Duration = Duration::from_secs(30);

/// A kernel with the programs of its release. It can be started any number of times.
pub struct System {
    /// Version and release number of the kernel: 6.12.
    pub name: String,
    /// The kernel as an ELF file.
    pub kernel: PathBuf,
    /// The initial RAM file system.
    pub initrd: PathBuf,
    /// The command that starts QEMU, without arguments for the machine.
    pub qemu: Vec<String>,
}

/// Systems for guests. Dropping this value removes their files.
pub struct Systems {
    /// One for each kernel.
    pub all: Vec<System>,
    dir: PathBuf,
}

/// Parameters of a guest, apart from its system and its vRNIC.
pub struct Plan<'a> {
    /// Number of emulated processors.
    pub processors: u32,
    /// Size of memory, as QEMU takes it.
    pub memory: &'a str,
    /// The terminal is its console.
    pub interactive: bool,
    /// Network namespace that its machine runs in.
    pub netns: Option<&'a str>,
    /// Replacements (from, to) in QEMU's arguments for the vRNIC.
    pub changes: &'a [(&'a str, &'a str)],
    /// More arguments of QEMU.
    pub more: &'a [&'a str],
    /// Parameters of its driver.
    pub driver: &'a str,
}

impl Default for Plan<'_> {
    fn default() -> Self {
        Plan { processors: 2, memory: "1G", interactive: false, netns: None, changes: &[], more: &[], driver: "" }
    }
}

/// A guest with a vRNIC. Dropping this value ends it.
pub struct Guest {
    machine: Machine,
    /// Name of its system.
    name: String,
    /// Name of its vRNIC.
    pub vrnic: String,
    /// IPv4 address of its vRNIC.
    pub ip: String,
    /// Parameters of its driver.
    driver: String,
    dir: PathBuf,
}

/// Name by which the kernel of Debian's unstable release is selected.
const UNSTABLE: &str = "unstable";

/// Version and release number of a kernel.
fn release(kernel: &Kernel) -> String {
    kernel.version.split('.').take(2).collect::<Vec<_>>().join(".")
}

impl Systems {
    /// The parts of guests, and the wanted kernels: all, or one by its name.
    ///
    /// # Errors
    /// The failed download, or an error if there is no such kernel.
    pub fn parts(only: Option<&str>) -> Result<(Parts, Vec<Kernel>)> {
        let parts = Parts::make()?;
        let mut kernels = match only {
            Some(UNSTABLE) => vec![parts.kernel_unstable()?],
            _ => vec![parts.kernel_13()?, parts.kernel_here()?],
        };
        kernels.dedup_by_key(|k| release(k));
        let names = kernels.iter().map(release).collect::<Vec<_>>().join(", ");
        kernels.retain(|k| only.is_none_or(|o| o == UNSTABLE || release(k) == o));
        if kernels.is_empty() {
            return Err(format!("there is no such kernel, but {names} and {UNSTABLE}"));
        }
        Ok((parts, kernels))
    }

    /// Makes the systems with the wanted kernels.
    ///
    /// # Errors
    /// As [`Systems::parts`], or the failed build.
    pub fn make(only: Option<&str>) -> Result<Systems> {
        Systems::make_with(only, &|_, _| Ok(()))
    }

    /// As [`Systems::make`]; `add` adds files to each image.
    ///
    /// # Errors
    /// As [`Systems::make`], and the errors of `add`.
    pub fn make_with(only: Option<&str>, add: &dyn Fn(&Kernel, &mut Image<'_>) -> Result<()>) -> Result<Systems> {
        let (parts, kernels) = Systems::parts(only)?;
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name = format!("unirdma-guests-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let dir = std::env::temp_dir().join(name);
        let mut systems = Systems { all: Vec::new(), dir };
        for k in kernels {
            let system = System::make(&parts, &k, &systems.dir, add)?;
            systems.all.push(system);
        }
        Ok(systems)
    }
}

impl Drop for Systems {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.dir);
    }
}

impl System {
    fn make(
        parts: &Parts,
        kernel: &Kernel,
        dir: &Path,
        add: &dyn Fn(&Kernel, &mut Image<'_>) -> Result<()>,
    ) -> Result<System> {
        let mut image = Image::new(kernel, dir.join("root"))?;
        image.modules(&["ib_uverbs", "rdma_ucm"])?;
        for p in PROGRAMS {
            image.program(p)?;
        }
        super::storage::add(&mut image)?;
        let driver = parts.module(kernel, &crate::root().join("guest/linux"), DRIVER)?;
        image.file(&driver, &format!("{DRIVER}.ko"))?;
        let target = crate::unirdma();
        let target = target.ancestors().nth(2).ok_or("no target directory")?;
        let [target, into] = [target, image.root()].map(|p| p.display().to_string());
        let make = ["make", "-C", "guest/provider", "install", &format!("TARGET={target}"), &format!("DESTDIR={into}")];
        super::run(&crate::root(), &make)?;
        image.runtime()?;
        OURS.iter().try_for_each(|name| image.compile(name))?;
        add(kernel, &mut image)?;
        let name = release(kernel);
        let initrd = dir.join(format!("{name}.cpio"));
        image.pack("", &initrd)?;
        Ok(System { name, kernel: kernel.image.clone(), initrd, qemu: parts.qemu() })
    }
}

impl Guest {
    /// Starts a guest that has a vRNIC with an IPv4 address, and its driver.
    ///
    /// # Errors
    /// The failed step, with the end of the guest's console.
    pub fn start(lab: &Lab, system: &System, vrnic: &str, plan: &Plan<'_>) -> Result<Guest> {
        let guest = Guest::boot(lab, system, vrnic, plan)?;
        guest.come_up()?;
        guest.set_up()?;
        Ok(guest)
    }

    /// Starts a guest's machine. Several machines can boot at the same time before [`Guest::come_up`] of each.
    ///
    /// # Errors
    /// If there is no such vRNIC, or no QEMU.
    pub fn boot(lab: &Lab, system: &System, vrnic: &str, plan: &Plan<'_>) -> Result<Guest> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let dir = lab.dir.join(format!("guest-{}", COUNT.fetch_add(1, Ordering::Relaxed)));
        fs::create_dir_all(&dir).map_err(failed("a guest's directory"))?;
        let arguments = lab.unirdma(&["vrnic", "show", vrnic, "--qemu", "--memory", plan.memory]);
        if !arguments.ok() {
            return Err(arguments.text);
        }
        let arguments = plan.changes.iter().fold(arguments.text, |text, (from, to)| text.replace(from, to));
        let enter = plan.netns.map_or(Vec::new(), |n| ["ip", "netns", "exec", n].map(String::from).to_vec());
        let machine = Machine::start(&Config {
            qemu: [enter, system.qemu.clone()].concat(),
            dir: &dir,
            kernel: &system.kernel,
            initrd: &system.initrd,
            processors: plan.processors,
            more: arguments.split_whitespace().chain(plan.more.iter().copied()).map(String::from).collect(),
            interactive: plan.interactive,
        })?;
        let ip = lab.show(vrnic)?["ips"][0]["addr"].as_str().unwrap_or_default().to_string();
        let (name, vrnic, driver) = (system.name.clone(), vrnic.into(), plan.driver.into());
        Ok(Guest { machine, name, vrnic, ip, driver, dir })
    }

    /// Waits until its machine takes commands.
    ///
    /// # Errors
    /// If it does not, with the end of its console.
    pub fn come_up(&self) -> Result<()> {
        self.machine.wait_up()
    }

    /// Gives the network interface the vRNIC's address, and loads the driver.
    ///
    /// # Errors
    /// The failed step, with the guest's kernel log.
    pub fn set_up(&self) -> Result<()> {
        self.must(&format!(
            "echo 0 >/proc/sys/net/ipv6/conf/eth0/accept_dad; ip addr add {}/24 dev eth0 && ip link set eth0 up",
            self.ip
        ))?;
        self.load()
    }

    /// Resets it, in any state, and waits until it is up.
    ///
    /// # Errors
    /// If it does not come up.
    pub fn restart(&self) -> Result<()> {
        self.machine.reset()?;
        self.set_up()
    }

    /// Ends it like a loss of power.
    pub fn power_off(&self) {
        self.machine.kill();
    }

    /// Loads the driver, and waits until its device has the vRNIC's address.
    ///
    /// # Errors
    /// If the driver or its device does not come up.
    pub fn load(&self) -> Result<()> {
        self.insert()?;
        self.wait_ready()
    }

    /// Waits until its device has the vRNIC's address.
    ///
    /// # Errors
    /// If the device does not come up.
    pub fn wait_ready(&self) -> Result<()> {
        let start = Instant::now();
        while self.gid().is_err() {
            if start.elapsed() > READY {
                return Err(self.explain("the driver shows no device with the vRNIC's address"));
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        Ok(())
    }

    /// Loads the driver, without a check of its device.
    ///
    /// # Errors
    /// If the kernel refuses the module.
    pub fn insert(&self) -> Result<()> {
        self.must(&format!("insmod /{DRIVER}.ko {}", self.driver))
    }

    /// Unloads the driver.
    ///
    /// # Errors
    /// If it is in use.
    pub fn unload(&self) -> Result<()> {
        self.must(&format!("rmmod {DRIVER}"))
    }

    /// Index of the GID that is its IPv4 address.
    ///
    /// # Errors
    /// If there is none.
    pub fn gid(&self) -> Result<u32> {
        let octets: Vec<u8> = self.ip.split('.').filter_map(|o| o.parse().ok()).collect();
        let digits = octets.chunks(2).map(|c| c.iter().map(|o| format!("{o:02x}")).collect::<String>());
        let tail = digits.collect::<Vec<_>>().join(":");
        let o = self.run(&format!("cd /sys/class/infiniband/unirdma0/ports/1/gids && grep -l ffff:{tail} *"))?;
        o.text.trim().parse().map_err(|_| format!("no GID ends with {tail}: {}", o.text))
    }

    /// Starts a command.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn spawn(&self, command: &str) -> Result<Task> {
        self.machine.spawn(command)
    }

    /// Runs a command.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn run(&self, command: &str) -> Result<Output> {
        self.machine.run(command)
    }

    /// Runs a command that must succeed.
    ///
    /// # Errors
    /// The command's output, with the guest's kernel log.
    pub fn must(&self, command: &str) -> Result<()> {
        let o = self.run(command)?;
        if o.ok() { Ok(()) } else { Err(self.explain(&format!("{command}: {}", o.text))) }
    }

    /// Adds the guest's kernel log to an error.
    pub fn explain(&self, what: &str) -> String {
        let log = self.machine.spawn("dmesg | tail -n 30").map(|t| t.finish_within(Duration::from_secs(5)).text);
        format!(
            "{what}\nguest with kernel {}, its log:\n{}\n{}",
            self.name,
            log.unwrap_or_default(),
            self.machine.console()
        )
    }

    /// True if a program listens, on TCP or for RDMA connections.
    pub fn listens(&self) -> bool {
        self.run("netstat -ltn; rdma resource show cm_id").is_ok_and(|o| o.text.contains("LISTEN"))
    }

    /// Stops its processors.
    ///
    /// # Errors
    /// QEMU's error.
    pub fn pause(&self) -> Result<()> {
        self.machine.monitor("stop", "{}")
    }

    /// Resumes its processors.
    ///
    /// # Errors
    /// QEMU's error.
    pub fn go_on(&self) -> Result<()> {
        self.machine.monitor("cont", "{}")
    }

    /// Executes a command of QEMU's monitor protocol, for example to plug memory.
    ///
    /// # Errors
    /// QEMU's error.
    pub fn monitor(&self, command: &str, arguments: &str) -> Result<()> {
        self.machine.monitor(command, arguments)
    }

    /// True if its machine has ended.
    pub fn has_ended(&self) -> bool {
        self.machine.has_ended()
    }

    /// Output of QEMU and of the guest's kernel.
    pub fn console(&self) -> String {
        self.machine.console()
    }

    /// All output of QEMU, including traces.
    pub fn qemu_log(&self) -> String {
        self.machine.qemu_log()
    }

    /// Waits until it is powered off.
    pub fn wait(&self) {
        self.machine.wait();
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.dir);
    }
}
