//! Arguments or XML that start a virtual machine with a vRNIC, for common VMMs, and a container, for LXC.

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
    #[arg(long)]
    libvirt: bool,
    /// Print Cloud Hypervisor's arguments for a virtual machine with it
    #[arg(long)]
    cloud_hypervisor: bool,
    /// Print the lines for the configuration of an LXC container with it
    #[arg(long)]
    lxc: bool,
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
        self.qemu || self.libvirt || self.cloud_hypervisor || self.lxc
    }

    /// The text to print, if one is asked for. `dir`: the virtual layer's directory. `memory`: size of the machine's
    /// memory.
    pub fn text(&self, dir: &Path, v: &VrnicInfo, memory: &str) -> Option<String> {
        let (device, net) = sockets(v);
        match self {
            VmmArgs { qemu: true, .. } => Some(lines(&qemu(v, memory, false))),
            VmmArgs { libvirt: true, .. } => Some(libvirt(v, &device, &net)),
            VmmArgs { cloud_hypervisor: true, .. } => Some(cloud_hypervisor(v, memory, &device, &net).join("\n")),
            VmmArgs { lxc: true, .. } => Some(lxc(dir, &v.name)),
            _ => None,
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

fn libvirt(v: &VrnicInfo, device: &str, net: &str) -> String {
    let (mac, mtu, dev) = (&v.mac, v.mtu, qemu_device());
    format!(
        "<!-- Parts of a domain that begins with <domain type='kvm' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'> -->\n\
         <memoryBacking>\n  <source type='memfd'/>\n  <access mode='shared'/>\n</memoryBacking>\n\
         <!-- in <devices> -->\n\
         <interface type='vhostuser'>\n  <mac address='{mac}'/>\n  <source type='unix' path='{net}' mode='client'/>\n  \
         <model type='virtio'/>\n  <mtu size='{mtu}'/>\n</interface>\n\
         <!-- at the end of the domain -->\n\
         <qemu:commandline>\n  <qemu:arg value='-chardev'/>\n  <qemu:arg value='socket,id=unirdma,path={device}'/>\n  \
         <qemu:arg value='-device'/>\n  <qemu:arg value='{dev}'/>\n  \
         <!-- what `unirdma vm preload` writes; not for a QEMU with the patch in guest/qemu -->\n  \
         <qemu:env name='LD_PRELOAD' value='/usr/local/lib/unirdma-name.so'/>\n</qemu:commandline>"
    )
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
        let all = [(true, false, false), (false, true, false), (false, false, true)];
        for (qemu, libvirt, cloud_hypervisor) in all {
            let text = VmmArgs { qemu, libvirt, cloud_hypervisor, lxc }.text(dir, &v, "3G").unwrap();
            for part in ["/run/x/vhost.sock", "/run/x/net.sock", &v.mac, "1500"] {
                assert!(text.contains(part), "{part} in {text}");
            }
            assert_eq!(text.contains("3G"), !libvirt);
        }
        let none = VmmArgs { qemu: false, libvirt: false, cloud_hypervisor: false, lxc };
        assert_eq!(none.text(dir, &v, "3G"), None);
        let lxc = VmmArgs { lxc: true, ..none }.text(dir, &v, "3G").unwrap();
        assert!(lxc.contains("\nlxc.hook.start-host = /") && lxc.contains(" --dir /run/unirdma cdi lxc "), "{lxc}");
    }
}
