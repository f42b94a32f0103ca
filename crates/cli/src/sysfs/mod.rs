//! A container's /sys: a sysfs of its own network namespace, and in it the RDMA device as the kernel shows one. The
//! host's own devices do not appear.

mod device_files;
mod live;

use std::fs;
use std::io;
use std::net::Ipv6Addr;
use std::os::fd::OwnedFd;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use rustix::mount::MountAttrFlags;
use unirdma_ipc::vrnic::VrnicInfo;

use crate::errors;
use crate::mounts;
use device_files::{Entry, Files, Interface};

/// Directories of /sys with mounts of other file systems, such as cgroups. They are the same for all networks.
const CARRIED: [&str; 3] = ["/sys/fs", "/sys/kernel", "/sys/firmware"];
/// Where /sys is.
pub(crate) const SYS: &str = "/sys";
/// The directory of network interfaces.
const NETS: &str = "/sys/class/net";
const CLASS: &str = "class";
const VIRTUAL: &str = "devices/virtual";
const HARMLESS: MountAttrFlags =
    MountAttrFlags::MOUNT_ATTR_NOSUID.union(MountAttrFlags::MOUNT_ATTR_NODEV).union(MountAttrFlags::MOUNT_ATTR_NOEXEC);

/// The interfaces that a container's /sys/class/net shows.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Net {
    /// The container has the host's network.
    Host = b'h',
    /// Its own.
    Own = b'o',
    /// Those of the host, although the container has its own: no other sysfs could be mounted.
    OwnUnseen = b'u',
}

impl Net {
    /// As a byte of the protocol between the first process and the outside.
    pub fn step(self) -> u8 {
        self as u8
    }

    pub fn of_step(step: u8) -> Option<Net> {
        [Net::Host, Net::Own, Net::OwnUnseen].into_iter().find(|net| net.step() == step)
    }
}

/// Mounts on /sys a sysfs of the network namespace that this process is in. Before it is mounted, nothing may cover any
/// part of the /sys that is there: otherwise the kernel refuses.
///
/// # Errors
/// The kernel refuses. /sys is then as it was.
pub(crate) fn mount_own() -> io::Result<()> {
    let sysfs = mounts::mount_new("sysfs", &[], HARMLESS | MountAttrFlags::MOUNT_ATTR_RDONLY)?;
    let carried = CARRIED.iter().map(Path::new).filter(|dir| dir.is_dir());
    let carried: Vec<_> = carried.map(|dir| Ok((mounts::copy(dir)?, dir))).collect::<io::Result<_>>()?;
    mounts::attach(&sysfs, Path::new("/sys"))?;
    carried.iter().try_for_each(|(tree, dir)| mounts::attach(tree, dir))
}

/// A device of a container.
#[derive(Clone, Copy)]
pub(crate) struct Device<'a> {
    pub info: &'a VrnicInfo,
    pub name: &'a str,
    /// Its number among the container's devices.
    pub number: usize,
    /// The name of its network interface, where the container has its own network.
    pub interface: &'a str,
}

/// File systems whose files have present figures, one for each device. They are not attached yet.
pub(crate) struct Live(Vec<(OwnedFd, OwnedFd)>);

impl Live {
    /// Makes them, or none with a line that says why.
    pub fn make(devices: &[Device<'_>]) -> Live {
        let made: io::Result<_> = devices.iter().map(|_| live::mount()).collect();
        Live(made.unwrap_or_else(|e| {
            let e = errors::plain(&e.to_string());
            eprintln!("unirdma: counters and GIDs in /sys/class/infiniband stay as they are now: {e}");
            Vec::new()
        }))
    }
}

/// Directories of /sys that [`set_up`] replaces.
pub(crate) const CHANGED: [&str; 2] = [CLASS, VIRTUAL];

/// Puts the devices into the /sys of this mount namespace, which is at `sys`. `staging`: a directory on which something
/// else is mounted later. Returns a descriptor for [`serve`] for each device, or none if the files keep their present
/// texts. Until they are served, a process that looks into a device's directory waits.
///
/// # Errors
/// A mount fails.
pub(crate) fn set_up(
    sys: &Path,
    staging: &Path,
    devices: &[Device<'_>],
    net: Net,
    live: Live,
) -> io::Result<Vec<OwnedFd>> {
    mounts::staged(staging, || {
        let new = staging.join("class");
        class(&new, devices)?;
        mounts::replace(&sys.join(CLASS), &new)?;
        make(&sys.join(VIRTUAL), &staging.join("virtual"), devices, net, live.0)
    })
}

/// Serves the files of devices outside of their container, with the descriptors of [`set_up`], in threads of this
/// process. A device whose files cannot be served is told.
pub(crate) fn serve(devices: &[Device<'_>], files: Vec<OwnedFd>, dir: &Path, net: Net) {
    for (device, files) in devices.iter().zip(files) {
        if let Err(e) = live::serve(files, dir, *device, net) {
            eprintln!("unirdma: the files of {} in /sys cannot be read: {e}", device.name);
        }
    }
}

/// Makes the devices' entries in `/sys/class`. `class`: an empty directory for them.
fn class(class: &Path, devices: &[Device<'_>]) -> io::Result<()> {
    let link = |to: &str, path: PathBuf| {
        fs::create_dir_all(path.parent().unwrap_or(class))?;
        symlink(format!("../../devices/virtual/{to}"), path)
    };
    for Device { name, number, .. } in devices {
        link(&format!("infiniband/{name}"), class.join("infiniband").join(name))?;
        let verbs = format!("infiniband_verbs/uverbs{number}");
        link(&verbs, class.join(&verbs))?;
    }
    fs::write(class.join("infiniband_verbs/abi_version"), "6\n")
}

/// Makes the devices in `virtuals`, the directory /sys/devices/virtual. `dir`: an empty directory for what is there.
fn make(
    virtuals: &Path,
    dir: &Path,
    devices: &[Device<'_>],
    net: Net,
    live: Vec<(OwnedFd, OwnedFd)>,
) -> io::Result<Vec<OwnedFd>> {
    let of_device = |device: &Device<'_>| Path::new("infiniband").join(device.name);
    for device in devices {
        let place = dir.join(of_device(device));
        if live.is_empty() {
            let interface = interface(device.info, device.interface, net);
            write(&place, &device_files::files(*device, interface.as_ref()))?;
        } else {
            fs::create_dir_all(&place)?;
        }
        write(&dir.join(format!("infiniband_verbs/uverbs{}", device.number)), &device_files::verbs_files(*device))?;
    }
    // No overlay, which would read files with the rights of its maker.
    mounts::replace(virtuals, dir)?;
    let mut served = Vec::new();
    for (device, (mount, files)) in devices.iter().zip(live) {
        mounts::attach(&mount, &virtuals.join(of_device(device)))?;
        served.push(files);
    }
    Ok(served)
}

/// Makes these files in a directory, except those that cannot be read.
fn write(dir: &Path, files: &Files) -> io::Result<()> {
    for (path, entry) in files {
        let path = dir.join(path);
        fs::create_dir_all(path.parent().unwrap_or(dir))?;
        match entry {
            Entry::Text(text) => fs::write(path, text)?,
            Entry::Link(to) => symlink(to, path)?,
            Entry::Empty => {}
        }
    }
    Ok(())
}

/// The network interface of the device. All GIDs belong to one interface, as with a real device.
fn interface(info: &VrnicInfo, own: &str, net: Net) -> Option<Interface> {
    match net {
        Net::Own | Net::OwnUnseen => Some(Interface { name: own.into(), in_sys: net == Net::Own }),
        Net::Host => {
            let addresses = info.gids.iter().filter_map(|gid| gid.parse().ok());
            addresses.into_iter().find_map(interface_of).map(|name| {
                let in_sys = Path::new(NETS).join(&name).exists();
                Interface { name, in_sys }
            })
        }
    }
}

/// The interface of this network namespace that has an address.
fn interface_of(addr: Ipv6Addr) -> Option<String> {
    addr.to_ipv4_mapped()
        .map_or_else(|| crate::net::interface_of(addr.into()), |v4| crate::net::interface_of(v4.into()))
}
