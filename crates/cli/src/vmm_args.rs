//! Arguments or XML that start a virtual machine with a vRNIC, for common VMMs, and a container, for LXC.

use std::io;
use std::path::Path;

use unirdma_abi::{CONFIG_BYTES, VIRTIO_ID_RDMA, VQ_COMP_FIRST};
use unirdma_ipc::vrnic::VrnicInfo;
use unirdma_supervisor::cdi::Class;
use unirdma_supervisor::{NET_SOCKET, VHOST_SOCKET};

/// The VMM to print for, or LXC.
#[derive(clap::Args)]
#[group(multiple = false)]
pub(crate) struct VmmArgs {
    /// Print QEMU's arguments for a virtual machine with it
    #[arg(long)]
    qemu: bool,
    /// Print libvirt's XML for a virtual machine with it
    #[arg(long, value_name = "WHAT", num_args = 0..=1, require_equals = true, default_missing_value = "parts")]
    libvirt: Option<Libvirt>,
    /// Print Cloud Hypervisor's arguments for a virtual machine with it
    #[arg(long)]
    cloud_hypervisor: bool,
    /// Print the lines for the configuration of an LXC container with it
    #[arg(long)]
    lxc: bool,
}

/// `--libvirt`: how much of a domain to print.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Libvirt {
    /// The parts for a domain that exists
    Parts,
    /// A whole domain, with a disk at libvirt's usual place
    Domain,
}

/// Number of queues: control, asynchronous events, wake, and a completion event queue for each of 8 processors. The
/// guest's driver uses no more.
const QUEUES: u32 = VQ_COMP_FIRST + 8;
const QUEUE_SIZE: u32 = 256;
/// QEMU's device for any vhost-user backend.
pub(crate) const DEVICE: &str = "vhost-user-test-device-pci";

impl VmmArgs {
    /// Whether arguments of a virtual machine are asked for.
    pub fn is_asked(&self) -> bool {
        self.qemu || self.libvirt.is_some() || self.cloud_hypervisor || self.lxc
    }

    /// The text to print, if one is asked for. `dir`: the virtual layer's directory. `memory`: size of the machine's
    /// memory.
    ///
    /// # Errors
    /// The size is none, which only libvirt's domain needs to be known.
    pub fn text(&self, dir: &Path, v: &VrnicInfo, memory: &str) -> io::Result<Option<String>> {
        let (device, net) = sockets(v);
        Ok(match self {
            VmmArgs { qemu: true, .. } => Some(lines(&qemu(v, memory, false))),
            VmmArgs { libvirt: Some(Libvirt::Parts), .. } => Some(LibvirtParts::of(v, &device, &net).text()),
            VmmArgs { libvirt: Some(Libvirt::Domain), .. } => {
                Some(LibvirtParts::of(v, &device, &net).domain(&v.name, mebibytes(memory)?))
            }
            VmmArgs { cloud_hypervisor: true, .. } => Some(cloud_hypervisor(v, memory, &device, &net).join("\n")),
            VmmArgs { lxc: true, .. } => Some(lxc(dir, &v.name)),
            _ => None,
        })
    }
}

/// A size of memory as QEMU takes it, in MiB: a number of MiB, or of K, M, G or T.
fn mebibytes(size: &str) -> io::Result<u64> {
    let (number, unit) = size.split_at(size.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(size.len()));
    let factor = match unit.to_ascii_uppercase().as_str() {
        "K" => 1.0 / 1024.0,
        "" | "M" => 1.0,
        "G" => 1024.0,
        "T" => 1024.0 * 1024.0,
        _ => 0.0,
    };
    match number.parse::<f64>().map_or(0.0, |n| n * factor) {
        n if n >= 1.0 => Ok(n as u64),
        _ => {
            let text = format!("--memory `{size}` is no size of a machine; write 512M or 4G");
            Err(io::Error::new(io::ErrorKind::InvalidInput, text))
        }
    }
}

/// The paths of the vRNIC's sockets: for its device and for its network interface.
fn sockets(v: &VrnicInfo) -> (String, String) {
    let socket = |name: &str| Path::new(&v.dir).join(name).display().to_string();
    (socket(VHOST_SOCKET), socket(NET_SOCKET))
}

/// A value for QEMU's options, which need commas doubled.
pub(crate) fn doubled(value: &str) -> String {
    value.replace(',', ",,")
}

fn qemu_device() -> String {
    format!(
        "{DEVICE},chardev=unirdma,virtio-id={VIRTIO_ID_RDMA},num_vqs={QUEUES},vq_size={QUEUE_SIZE},config_size={CONFIG_BYTES}"
    )
}

/// QEMU's arguments. The machine's memory is a file that the virtual layer maps too. `reconnects`: QEMU can connect its
/// device to a worker that was started again.
pub(crate) fn qemu(v: &VrnicInfo, memory: &str, reconnects: bool) -> Vec<String> {
    let again = if reconnects { ",reconnect-ms=500" } else { "" };
    let (device, net) = sockets(v);
    let (device, net, memory) = (doubled(&device), doubled(&net), doubled(memory));
    let pairs = [
        ("-m", memory.clone()),
        ("-object", format!("memory-backend-memfd,id=unirdma-memory,size={memory},share=on")),
        ("-machine", "memory-backend=unirdma-memory".into()),
        ("-chardev", format!("socket,id=unirdma,path={device}{again}")),
        ("-device", qemu_device()),
        ("-chardev", format!("socket,id=unirdma-net,path={net}{again}")),
        ("-netdev", "vhost-user,id=unirdma-net,chardev=unirdma-net".into()),
        ("-device", format!("virtio-net-pci,netdev=unirdma-net,mac={},host_mtu={}", v.mac, v.mtu)),
    ];
    pairs.into_iter().flat_map(|(name, value)| [name.to_string(), value]).collect()
}

/// One argument and its value per line.
fn lines(words: &[String]) -> String {
    words.chunks(2).map(|pair| pair.join(" ")).collect::<Vec<_>>().join("\n")
}

/// The namespace of QEMU's arguments in libvirt's XML.
const LIBVIRT_QEMU: &str = "xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'";
/// The slot of the device in a machine that libvirt makes. libvirt does not know of the device, and gives other devices
/// the slots from 1 on, and some from 26 on.
const LIBVIRT_SLOT: &str = "addr=0x10";

/// The parts of a libvirt domain with a vRNIC.
struct LibvirtParts {
    memory: &'static str,
    interface: String,
    command_line: String,
}

impl LibvirtParts {
    fn of(v: &VrnicInfo, device: &str, net: &str) -> LibvirtParts {
        let (mac, mtu, dev) = (&v.mac, v.mtu, qemu_device());
        // libvirt's own <mtu> is for interfaces of the host, and is an error here.
        LibvirtParts {
            memory: "  <memoryBacking>\n    <source type='memfd'/>\n    <access mode='shared'/>\n  </memoryBacking>\n",
            interface: format!(
                "    <interface type='vhostuser'>\n      <mac address='{mac}'/>\n      \
                 <source type='unix' path='{net}' mode='client'/>\n      <model type='virtio'/>\n      \
                 <alias name='ua-unirdma'/>\n    </interface>\n"
            ),
            command_line: format!(
                "  <qemu:commandline>\n    <qemu:arg value='-chardev'/>\n    \
                 <qemu:arg value='socket,id=unirdma,path={device}'/>\n    <qemu:arg value='-device'/>\n    \
                 <qemu:arg value='{dev},{LIBVIRT_SLOT}'/>\n    \
                 <!-- what `unirdma vm preload` writes; not for a QEMU with the patch in guest/qemu -->\n    \
                 <qemu:env name='LD_PRELOAD' value='/usr/local/lib/unirdma-name.so'/>\n  </qemu:commandline>\n  \
                 <qemu:override>\n    <qemu:device alias='ua-unirdma'>\n      <qemu:frontend>\n        \
                 <qemu:property name='host_mtu' type='unsigned' value='{mtu}'/>\n      </qemu:frontend>\n    \
                 </qemu:device>\n  </qemu:override>\n"
            ),
        }
    }

    fn text(&self) -> String {
        let LibvirtParts { memory, interface, command_line } = self;
        format!(
            "<!-- Parts of a domain that begins with <domain type='kvm' {LIBVIRT_QEMU}> -->\n{memory}\
             <!-- in <devices> -->\n{interface}<!-- at the end of the domain -->\n{}",
            command_line.trim_end()
        )
    }

    fn domain(&self, name: &str, size_mib: u64) -> String {
        let LibvirtParts { memory, interface, command_line } = self;
        let (arch, machine) = if cfg!(target_arch = "aarch64") { ("aarch64", "virt") } else { ("x86_64", "q35") };
        format!(
            "<domain type='kvm' {LIBVIRT_QEMU}>\n  <name>{name}</name>\n  <memory unit='MiB'>{size_mib}</memory>\n  \
             <vcpu>2</vcpu>\n{memory}  <os>\n    <type arch='{arch}' machine='{machine}'>hvm</type>\n    \
             <boot dev='hd'/>\n  </os>\n  <features>\n    <acpi/>\n  </features>\n  \
             <cpu mode='host-passthrough'/>\n  <devices>\n    <disk type='file' device='disk'>\n      \
             <driver name='qemu' type='qcow2'/>\n      <source file='/var/lib/libvirt/images/{name}.qcow2'/>\n      \
             <target dev='vda' bus='virtio'/>\n    </disk>\n{interface}    <serial type='pty'>\n    </serial>\n    \
             <console type='pty'/>\n  </devices>\n{command_line}</domain>"
        )
    }
}

fn cloud_hypervisor(v: &VrnicInfo, memory: &str, device: &str, net: &str) -> Vec<String> {
    let sizes = vec![QUEUE_SIZE.to_string(); QUEUES as usize].join(",");
    vec![
        format!("--memory size={memory},shared=on"),
        format!("--generic-vhost-user socket={device},device_type={VIRTIO_ID_RDMA},queue_sizes=[{sizes}]"),
        format!("--net vhost_user=on,socket={net},mac={},mtu={}", v.mac, v.mtu),
    ]
}

fn lxc(dir: &Path, name: &str) -> String {
    let program = std::env::current_exe().unwrap_or_else(|_| "unirdma".into());
    let device = format!("{}={name}", Class::Vrnic.kind());
    // systemd in a container mounts a /run over what is in there, unless one is mounted.
    format!(
        "lxc.mount.entry = tmpfs run tmpfs rw,nosuid,nodev,mode=0755,create=dir 0 0\n\
         lxc.hook.start-host = {} --dir {} cdi lxc {device}",
        program.display(),
        dir.display()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_vmm_gets_both_sockets_and_the_address() {
        let v = VrnicInfo { dir: "/run/x".into(), mac: "02:00:0a:00:00:01".into(), mtu: 1500, ..VrnicInfo::default() };
        let (dir, lxc) = (Path::new("/run/unirdma"), false);
        let none = VmmArgs { qemu: false, libvirt: None, cloud_hypervisor: false, lxc };
        let all = [
            VmmArgs { qemu: true, ..none },
            VmmArgs { libvirt: Some(Libvirt::Parts), ..none },
            VmmArgs { libvirt: Some(Libvirt::Domain), ..none },
            VmmArgs { cloud_hypervisor: true, ..none },
        ];
        for args in all {
            let text = args.text(dir, &v, "3G").unwrap().unwrap();
            for part in ["/run/x/vhost.sock", "/run/x/net.sock", &v.mac, "1500"] {
                assert!(text.contains(part), "{part} in {text}");
            }
            let memory = if args.libvirt == Some(Libvirt::Domain) { "<memory unit='MiB'>3072<" } else { "3G" };
            assert_eq!(text.contains(memory), args.libvirt != Some(Libvirt::Parts), "{text}");
        }
        assert_eq!(none.text(dir, &v, "3G").unwrap(), None);
        let domain = VmmArgs { libvirt: Some(Libvirt::Domain), ..none };
        assert!(domain.text(dir, &v, "1.5G").unwrap().unwrap().contains(">1536<"));
        for wrong in ["", "G", "0", "3 apples", "-1G"] {
            assert!(domain.text(dir, &v, wrong).is_err(), "{wrong}");
        }
        let lxc = VmmArgs { lxc: true, ..none }.text(dir, &v, "3G").unwrap().unwrap();
        assert!(lxc.contains("\nlxc.hook.start-host = /") && lxc.contains(" --dir /run/unirdma cdi lxc "), "{lxc}");
    }
}
