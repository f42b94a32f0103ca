//! Guests that have a vRNIC: with the guest driver of `guest/linux`, our provider, and Debian's programs as they are.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::image::Image;
use super::machine::{Config, Machine, Task};
use super::{Kernel, Parts, failed};
use crate::Result;
use crate::lab::{self, Lab, Output, Running};

/// Programs of Debian that guests have.
const PROGRAMS: &[&str] = &[
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
    "rdma",
    "ip",
    "ping",
    "dmesg",
];
/// The driver, without its ending.
const DRIVER: &str = "unirdma_rdma";
/// What the device has: virtqueues, their size, and bytes of configuration space.
const VIRTQUEUES: u32 = 16;
const VIRTQUEUE_SIZE: u32 = 256;
const CONFIG_SIZE: u32 = 192;
/// MTU of the containers' interfaces, which guests have too.
const MTU: u32 = 9000;
/// How long a driver may take to show its device.
const READY: Duration = Duration::from_secs(30);

/// A kernel with the programs of its release, ready to be started any number of times.
pub(crate) struct System {
    /// Version and release number of the kernel: 6.12.
    pub name: String,
    kernel: PathBuf,
    initrd: PathBuf,
    qemu: Vec<String>,
}

/// Systems for guests. What they take on disk ends with this value.
pub(crate) struct Systems {
    pub all: Vec<System>,
    dir: PathBuf,
}

/// A guest with a vRNIC. It ends with this value.
pub(crate) struct Guest {
    machine: Machine,
    /// Has the vRNIC's interface on the group's switch.
    _holder: Running,
    /// Name of its system.
    pub name: String,
    pub vrnic: String,
    pub ip: String,
    dir: PathBuf,
}

/// Version and release number of a kernel.
fn release(kernel: &Kernel) -> String {
    kernel.version.split('.').take(2).collect::<Vec<_>>().join(".")
}

impl Systems {
    /// Makes those that are wanted: all, or one by its name.
    ///
    /// # Errors
    /// What could not be downloaded or built, or there is no such kernel.
    pub fn make(only: Option<&str>) -> Result<Systems> {
        let parts = Parts::make()?;
        let mut kernels = vec![parts.kernel_13()?, parts.kernel_here()?];
        if release(&kernels[0]) == release(&kernels[1]) {
            kernels.pop();
        }
        let names = kernels.iter().map(release).collect::<Vec<_>>().join(", ");
        kernels.retain(|k| only.is_none_or(|o| release(k) == o));
        if kernels.is_empty() {
            return Err(format!("there is no such kernel, but {names}"));
        }
        let dir = std::env::temp_dir().join(format!("unirdma-guests-{}", std::process::id()));
        let mut systems = Systems { all: Vec::new(), dir };
        for k in kernels {
            let system = System::make(&parts, &k, &systems.dir)?;
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
    fn make(parts: &Parts, kernel: &Kernel, dir: &Path) -> Result<System> {
        let mut image = Image::new(kernel, dir.join("root"))?;
        image.modules(&["ib_uverbs", "rdma_ucm"])?;
        for p in PROGRAMS {
            image.program(p)?;
        }
        let driver = parts.module(kernel, &lab::root().join("guest/linux"), DRIVER)?;
        image.file(&driver, &format!("{DRIVER}.ko"))?;
        let provider = lab::unirdma().with_file_name("libunirdma_provider.so");
        image.ours(&provider, "usr/lib/x86_64-linux-gnu/libibverbs/libunirdma-rdmav34.so")?;
        image.text("etc/libibverbs.d/unirdma.driver", "driver unirdma\n")?;
        let name = release(kernel);
        let initrd = dir.join(format!("{name}.cpio"));
        image.pack("", &initrd)?;
        Ok(System { name, kernel: kernel.image.clone(), initrd, qemu: parts.qemu() })
    }
}

impl Guest {
    /// Starts a guest that has a vRNIC with this IPv4 address, and its driver. `processors`: of the guest. `interactive`: the terminal
    /// is its console.
    ///
    /// # Errors
    /// What does not work, with the end of its console.
    pub fn start(lab: &Lab, system: &System, vrnic: &str, processors: u32, interactive: bool) -> Result<Guest> {
        let holder = lab.spawn(vrnic, &[], "sleep 1000000")?;
        let (container, mac, ip) = attached(lab, vrnic)?;
        // The vRNIC's interface becomes a port of a bridge, and what is behind the other port has its MAC.
        let netns = format!("--net=/proc/{container}/ns/net");
        let script = format!(
            "ip link set eth0 down; ip addr flush dev eth0; ip link set eth0 address 02:ff:ff:ff:ff:fe\n\
             for c in all default; do echo 1 >/proc/sys/net/ipv6/conf/$c/disable_ipv6; done\n\
             ip tuntap add dev tap0 mode tap; ip link add br0 type bridge mcast_snooping 0\n\
             for d in eth0 tap0; do ip link set $d mtu {MTU} master br0 up; done; ip link set br0 up"
        );
        super::run(Path::new("/"), &["nsenter", &netns, "sh", "-ec", &script])?;
        let dir = lab.dir.join(format!("guest-{vrnic}"));
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir_all(&dir).map_err(failed("a guest's directory"))?;
        let socket = lab.socket(vrnic).display().to_string();
        let memory = 1024;
        let more = [
            "-object",
            &format!("memory-backend-memfd,id=memory,size={memory}M,share=on"),
            "-machine",
            "memory-backend=memory",
            "-chardev",
            &format!("socket,id=vrnic,path={socket}"),
            "-device",
            &format!(
                "vhost-user-test-device-pci,chardev=vrnic,virtio-id=42,num_vqs={VIRTQUEUES},vq_size={VIRTQUEUE_SIZE},\
                 config_size={CONFIG_SIZE},page-per-vq=on"
            ),
            "-netdev",
            "tap,id=net,ifname=tap0,script=no,downscript=no",
            "-device",
            &format!("virtio-net-pci,netdev=net,mac={mac},host_mtu={MTU},romfile="),
        ];
        let machine = Machine::start(&Config {
            qemu: [["nsenter", &netns].map(String::from).to_vec(), system.qemu.clone()].concat(),
            dir: &dir,
            kernel: &system.kernel,
            initrd: &system.initrd,
            processors,
            memory,
            more: more.map(String::from).to_vec(),
            interactive,
        })?;
        let guest = Guest { machine, _holder: holder, name: system.name.clone(), vrnic: vrnic.into(), ip, dir };
        guest.must(&format!(
            "echo 0 >/proc/sys/net/ipv6/conf/eth0/accept_dad; ip addr add {}/24 dev eth0 && ip link set eth0 up",
            guest.ip
        ))?;
        guest.load()?;
        Ok(guest)
    }

    /// Loads the driver, and waits until its device has the vRNIC's address.
    ///
    /// # Errors
    /// The driver, or its device, does not come.
    pub fn load(&self) -> Result<()> {
        self.must(&format!("insmod /{DRIVER}.ko"))?;
        let start = Instant::now();
        while self.gid().is_err() {
            if start.elapsed() > READY {
                return Err(self.explain("the driver shows no device with the vRNIC's address"));
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        Ok(())
    }

    /// Unloads the driver.
    ///
    /// # Errors
    /// It is in use.
    pub fn unload(&self) -> Result<()> {
        self.must(&format!("rmmod {DRIVER}"))
    }

    /// Index of the GID that is its IPv4 address.
    ///
    /// # Errors
    /// There is none.
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
    /// It could not be started.
    pub fn spawn(&self, command: &str) -> Result<Task> {
        self.machine.spawn(command)
    }

    /// Runs a command.
    ///
    /// # Errors
    /// It could not be started.
    pub fn run(&self, command: &str) -> Result<Output> {
        self.machine.run(command)
    }

    fn must(&self, command: &str) -> Result<()> {
        let o = self.run(command)?;
        if o.ok() { Ok(()) } else { Err(self.explain(&format!("{command}: {}", o.text))) }
    }

    /// What failed, with what the guest's kernel says.
    pub fn explain(&self, what: &str) -> String {
        let log = self.machine.spawn("dmesg | tail -n 30").map(|t| t.finish_within(Duration::from_secs(5)).text);
        format!(
            "{what}\nguest with kernel {}, its log:\n{}\n{}",
            self.name,
            log.unwrap_or_default(),
            self.machine.console()
        )
    }

    /// Waits until a program listens, on TCP or for RDMA connections.
    pub fn listens(&self) -> bool {
        self.run("netstat -ltn; rdma resource show cm_id").is_ok_and(|o| o.text.contains("LISTEN"))
    }

    /// Stops its processors.
    ///
    /// # Errors
    /// What QEMU says.
    pub fn pause(&self) -> Result<()> {
        self.machine.monitor("stop", "{}")
    }

    /// Lets them go on.
    ///
    /// # Errors
    /// What QEMU says.
    pub fn go_on(&self) -> Result<()> {
        self.machine.monitor("cont", "{}")
    }

    /// Waits until it is powered off.
    pub fn wait(&mut self) {
        self.machine.wait();
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.dir);
    }
}

/// Waits until a vRNIC's interface is on the switch: the process that has it, and the vRNIC's MAC and IPv4 address.
fn attached(lab: &Lab, vrnic: &str) -> Result<(i64, String, String)> {
    let start = Instant::now();
    loop {
        let v = lab.show(vrnic)?;
        if let (Some(process), Some(true), Some(mac)) =
            (v["container"].as_i64(), v["attached"].as_bool(), v["mac"].as_str())
        {
            let ip = v["ips"][0]["addr"].as_str().unwrap_or_default();
            return Ok((process, mac.into(), ip.into()));
        }
        if start.elapsed() > READY {
            return Err(format!("the container that holds the interface of {vrnic} does not come up"));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}
