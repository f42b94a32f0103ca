//! Makes the files by which programs find RDMA devices for a container: `/sys/class/infiniband` and the links to it.
//! The host's own devices do not appear.

use std::fs;
use std::io;
use std::net::Ipv6Addr;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use rustix::mount::{MountAttrFlags, MountFlags, MountPropagationFlags, UnmountFlags};
use unirdma_ipc::vrnic::VrnicInfo;

use crate::errors::context;
use crate::mounts;

const DEVICE: &str = "unirdma0";

/// Least number of entries of the GID table, as `ibv_query_port` reports it.
const MIN_GIDS: usize = 16;

/// Mounts the files over `/sys/class` of this mount namespace. `staging`: a directory on which something else is
/// mounted later. `own_net`: the container will have an `eth0` with the vRNIC's addresses; otherwise it sees the host's
/// interfaces.
pub(crate) fn set_up(staging: &Path, info: &VrnicInfo, own_net: bool) -> io::Result<()> {
    let none: Option<&std::ffi::CStr> = None;
    rustix::mount::mount("unirdma", staging, "tmpfs", MountFlags::NOSUID, none)
        .map_err(context("cannot mount tmpfs"))?;
    let made = class_files(&staging.join("class"), info, own_net);
    // Mounts of its subdirectories stay.
    let gone = rustix::mount::unmount(staging, UnmountFlags::DETACH).map_err(context("cannot unmount tmpfs"));
    made.and(gone)
}

/// A GUID or GID in groups of four digits.
fn groups(bytes: &[u8]) -> String {
    let group = |g: &[u8]| g.iter().map(|b| format!("{b:02x}")).collect::<String>();
    bytes.chunks(2).map(group).collect::<Vec<_>>().join(":")
}

/// The interface of this network namespace that has an address.
fn interface_of(addr: Ipv6Addr) -> Option<String> {
    addr.to_ipv4_mapped()
        .map_or_else(|| crate::net::interface_of(addr.into()), |v4| crate::net::interface_of(v4.into()))
}

/// Directories of /sys with mounts of other file systems, such as cgroups. They are the same for all networks.
const CARRIED: [&str; 3] = ["/sys/fs", "/sys/kernel", "/sys/firmware"];

/// Mounts on /sys a sysfs of the network namespace that this process is in. Before it is mounted, nothing may cover any
/// part of the /sys that is there: otherwise the kernel refuses.
///
/// # Errors
/// The kernel refuses. /sys is then as it was.
pub(crate) fn own_sysfs() -> io::Result<()> {
    let flags = MountAttrFlags::MOUNT_ATTR_RDONLY
        | MountAttrFlags::MOUNT_ATTR_NOSUID
        | MountAttrFlags::MOUNT_ATTR_NODEV
        | MountAttrFlags::MOUNT_ATTR_NOEXEC;
    let sysfs = mounts::mount_new("sysfs", &[], flags)?;
    let carried = CARRIED.iter().filter(|dir| Path::new(dir).is_dir());
    let carried: Vec<_> = carried.map(|dir| Ok((mounts::copy(Path::new(dir))?, *dir))).collect::<io::Result<_>>()?;
    mounts::attach(&sysfs, Path::new("/sys"))?;
    carried.iter().try_for_each(|(tree, dir)| mounts::attach(tree, Path::new(dir)))
}

fn class_files(class: &Path, info: &VrnicInfo, own_net: bool) -> io::Result<()> {
    let put = |path: PathBuf, text: &str| {
        fs::create_dir_all(path.parent().unwrap_or(class))?;
        fs::write(path, format!("{text}\n"))
    };
    let ib = class.join("infiniband");
    let device = ib.join(DEVICE);
    for (name, text) in [
        ("node_type", "1: CA"),
        ("node_guid", &info.guid),
        ("sys_image_guid", &info.guid),
        ("node_desc", &info.name),
        ("board_id", "uniRDMA vRNIC"),
        ("hca_type", "uniRDMA"),
        ("hw_rev", "1"),
        ("fw_ver", env!("CARGO_PKG_VERSION")),
        ("device/numa_node", "-1"),
        ("device/local_cpus", &cpu_mask()),
        ("device/infiniband_verbs/uverbs0/ibdev", DEVICE),
    ] {
        put(device.join(name), text)?;
    }
    let addresses = info
        .gids
        .iter()
        .map(|gid| gid.parse().map_err(|_| io::Error::other(format!("the virtual layer gave the GID `{gid}`"))));
    let addresses: Vec<Ipv6Addr> = addresses.collect::<io::Result<_>>()?;
    // All GIDs belong to one interface, as with a real device.
    let net = match own_net {
        true => Some("eth0".to_string()),
        false => addresses.iter().find_map(|&a| interface_of(a)),
    };
    if let Some(net) = &net {
        for (name, text) in [("address", &*info.mac), ("dev_id", "0x0"), ("dev_port", "0"), ("type", "1")] {
            put(device.join("device/net").join(net).join(name), text)?;
        }
    }
    let port = device.join("ports/1");
    for (name, text) in [
        ("state", "4: ACTIVE"),
        ("phys_state", "5: LinkUp"),
        ("link_layer", "Ethernet"),
        ("rate", "100 Gb/sec (4X EDR)"),
        ("lid", "0x0"),
        ("lid_mask_count", "0"),
        ("sm_lid", "0x0"),
        ("sm_sl", "0"),
        ("cap_mask", "0x04010000"),
        ("pkeys/0", "0xffff"),
    ] {
        put(port.join(name), text)?;
    }
    // Programs rely on the directory even if no interface has the addresses.
    fs::create_dir_all(port.join("gid_attrs/ndevs"))?;
    for i in 0..addresses.len().next_power_of_two().max(MIN_GIDS) {
        let gid = addresses.get(i).copied().unwrap_or(Ipv6Addr::UNSPECIFIED);
        put(port.join(format!("gids/{i}")), &groups(&gid.octets()))?;
        // The kernel's files of empty entries cannot be read, so there are none here.
        if !gid.is_unspecified() {
            put(port.join(format!("gid_attrs/types/{i}")), "RoCE v2")?;
            if let Some(net) = &net {
                put(port.join(format!("gid_attrs/ndevs/{i}")), net)?;
            }
        }
    }
    // A link as in the kernel's tree. Scripts use it to get from one class to the other.
    fs::create_dir(device.join("device/infiniband"))?;
    symlink(format!("../../../{DEVICE}"), device.join("device/infiniband").join(DEVICE))?;
    let verbs = class.join("infiniband_verbs");
    put(verbs.join("abi_version"), "6")?;
    put(verbs.join("uverbs0/ibdev"), DEVICE)?;
    put(verbs.join("uverbs0/abi_version"), "1")?;
    // The device number of /dev/null, which is mounted there.
    put(verbs.join("uverbs0/dev"), "1:3")?;
    symlink(format!("../../infiniband/{DEVICE}/device"), verbs.join("uverbs0/device"))?;
    overlay(class)?;
    // Hides the host's devices, which the overlay still shows.
    for name in ["infiniband", "infiniband_verbs"] {
        let to = Path::new("/sys/class").join(name);
        rustix::mount::mount_bind(class.join(name), to).map_err(context("cannot mount on /sys/class"))?;
    }
    Ok(())
}

/// Mounts `class` as an overlay over `/sys/class`, in which no directory can be made.
fn overlay(class: &Path) -> io::Result<()> {
    let mut layers = b"lowerdir=".to_vec();
    layers.extend_from_slice(class.as_os_str().as_encoded_bytes());
    layers.extend_from_slice(b":/sys/class");
    let options = std::ffi::CString::new(layers).map_err(io::Error::other)?;
    rustix::mount::mount("unirdma", "/sys/class", "overlay", MountFlags::RDONLY, Some(options.as_c_str()))
        .map_err(context("cannot mount an overlay on /sys/class"))?;
    rustix::mount::mount_change("/sys/class", MountPropagationFlags::PRIVATE)
        .map_err(context("cannot mount on /sys/class"))
}

/// The set of all processors, in the kernel's notation.
fn cpu_mask() -> String {
    let n = std::thread::available_parallelism().map_or(1, usize::from);
    let word = |bits: usize| if bits >= 32 { u32::MAX } else { (1 << bits) - 1 };
    let words: Vec<String> = (0..n.div_ceil(32)).rev().map(|w| format!("{:08x}", word(n - w * 32))).collect();
    words.join(",")
}
