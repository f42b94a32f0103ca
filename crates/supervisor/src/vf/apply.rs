//! Steps of a plan, applied to the kernel.

use std::fmt;
use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use unirdma_vf::{ARP_IGNORE, Driver, Setting, Step, VfId};

use super::look::Looker;

/// Why a step was not done.
#[derive(Debug, thiserror::Error)]
pub(super) enum ApplyError {
    #[error("writing {text:?} to {}: {error}", .file.display())]
    Write { file: PathBuf, text: String, error: io::Error },
    #[error("the permissions of {}: {error}", .node.display())]
    Mode { node: PathBuf, error: io::Error },
    #[error("{verbs} has no device node; it comes with the kernel's module ib_uverbs")]
    NoNode { verbs: String },
    #[error("{what}: {error}")]
    Netlink { what: String, error: io::Error },
}

fn netlink(what: impl Into<String>) -> impl FnOnce(io::Error) -> ApplyError {
    let what = what.into();
    move |error| ApplyError::Netlink { what, error }
}

impl Looker {
    /// Applies a step, except [`Step::Evict`].
    ///
    /// A VF's driver waits for programs that have the device open, so [`Step::Rebind`] may take any time.
    ///
    /// # Errors
    /// The kernel's answer.
    pub fn apply(&mut self, step: &Step) -> Result<(), ApplyError> {
        match step {
            Step::Create { pf, vfs } => write(self.roots.pf_device(pf).join("sriov_numvfs"), &vfs.to_string()),
            Step::Set { vf, what } => {
                let done = self.route.set(&vf.pf, vf.index, *what);
                done.map_err(netlink(Shown(step).to_string()))
            }
            Step::Rebind { pci, driver, .. } => self.rebind(pci, *driver),
            Step::Netdev { netdev, addresses, neighbours, .. } => {
                write(self.roots.sysctl(netdev, "accept_local"), "1")?;
                write(self.roots.sysctl(netdev, "rp_filter"), "0")?;
                write(self.roots.sysctl(netdev, "arp_ignore"), &ARP_IGNORE.to_string())?;
                let index = self.roots.ifindex(netdev).ok_or_else(|| io::ErrorKind::NotFound.into());
                let index = index.map_err(netlink(format!("network device {netdev}")))?;
                self.route.up(index).map_err(netlink(format!("taking {netdev} up")))?;
                for address in addresses {
                    let done = self.route.add_address(index, *address);
                    done.map_err(netlink(format!("the address {address} for {netdev}")))?;
                }
                for (addr, mac) in neighbours {
                    let done = self.route.add_neighbour(index, *addr, *mac);
                    done.map_err(netlink(format!("the neighbour {addr} of {netdev}")))?;
                }
                Ok(())
            }
            Step::AddRxe { netdev, .. } => {
                let done = self.rdma().and_then(|r| r.add_rxe(&format!("rxe_{netdev}"), netdev));
                done.map_err(netlink(format!("a software RNIC on {netdev}")))
            }
            Step::NodeMode { verbs, mode, .. } => {
                let node = self.roots.nodes().remove(verbs).map(|n| n.path).filter(|n| n.exists());
                let node = node.ok_or_else(|| ApplyError::NoNode { verbs: verbs.clone() })?;
                let done = fs::set_permissions(&node, fs::Permissions::from_mode(*mode));
                done.map_err(|error| ApplyError::Mode { node, error })
            }
            Step::Evict { .. } => Ok(()),
        }
    }

    fn rebind(&self, pci: &str, driver: Driver) -> Result<(), ApplyError> {
        let device = self.roots.pci_device(pci);
        let only = match driver {
            // Any driver that knows the device.
            Driver::Kernel => "\n",
            Driver::Vfio => "vfio-pci",
        };
        write(device.join("driver_override"), only)?;
        if device.join("driver").exists() {
            write(device.join("driver/unbind"), pci)?;
        }
        write(self.roots.sys.join("bus/pci/drivers_probe"), pci)
    }
}

/// Writes to a file of the kernel, which must exist.
fn write(file: PathBuf, text: &str) -> Result<(), ApplyError> {
    let done = |file: &Path| OpenOptions::new().write(true).open(file)?.write_all(text.as_bytes());
    done(&file).map_err(|error| ApplyError::Write { file, text: text.trim().into(), error })
}

/// The VF of a step.
pub(super) fn vf_of(step: &Step) -> Option<&VfId> {
    match step {
        Step::Create { .. } | Step::Evict { .. } => None,
        Step::Set { vf, .. }
        | Step::Rebind { vf, .. }
        | Step::Netdev { vf, .. }
        | Step::AddRxe { vf, .. }
        | Step::NodeMode { vf, .. } => Some(vf),
    }
}

/// A step in words.
pub(super) struct Shown<'a>(pub &'a Step);

impl fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Step::Create { pf, vfs } => write!(f, "{vfs} VFs of {pf}"),
            Step::Set { vf, what } => {
                write!(f, "VF {vf}: ")?;
                match what {
                    Setting::Mac(mac) => write!(f, "MAC {mac}"),
                    Setting::Vlan(vlan) => write!(f, "VLAN {vlan}"),
                    Setting::RateMbps(rate) => write!(f, "rate {rate} Mbit/s"),
                    Setting::SpoofCheck(on) => write!(f, "spoof check {}", if *on { "on" } else { "off" }),
                    Setting::Trust(on) => write!(f, "trust {}", if *on { "on" } else { "off" }),
                }
            }
            Step::Rebind { vf, pci, driver: Driver::Kernel } => write!(f, "VF {vf}: binding {pci} to its driver anew"),
            Step::Rebind { vf, pci, driver: Driver::Vfio } => write!(f, "VF {vf}: binding {pci} to vfio-pci"),
            Step::Netdev { vf, netdev, .. } => write!(f, "VF {vf}: setting up {netdev}"),
            Step::AddRxe { vf, netdev } => write!(f, "VF {vf}: a software RNIC on {netdev}"),
            Step::NodeMode { vf, verbs, mode } => write!(f, "VF {vf}: permissions {mode:o} of the node of {verbs}"),
            Step::Evict { lease } => write!(f, "the end of lease {lease}, whose device is gone"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tree::tests::Temporary;
    use super::*;

    fn id() -> VfId {
        VfId { pf: "pf".into(), index: 0 }
    }

    #[test]
    fn a_vf_is_bound_to_another_driver() {
        let tree = Temporary::new().with_pf(1);
        let sys = &tree.0.sys;
        let device = sys.join("devices/0000:01:10.0");
        tree.link(&tree.0.pci_device("0000:01:10.0"), &device);
        for file in [
            device.join("driver_override"),
            sys.join("bus/pci/drivers_probe"),
            sys.join("bus/pci/drivers/mlx5_core/unbind"),
        ] {
            tree.write(&file, "");
        }
        let mut looker = Looker::of(tree.0.clone());
        let read = |file: &str| fs::read_to_string(sys.join(file)).unwrap();
        let rebind = |driver| Step::Rebind { vf: id(), pci: "0000:01:10.0".into(), driver };
        looker.apply(&rebind(Driver::Vfio)).unwrap();
        assert_eq!(read("devices/0000:01:10.0/driver_override"), "vfio-pci");
        assert_eq!(read("bus/pci/drivers/mlx5_core/unbind"), "0000:01:10.0");
        assert_eq!(read("bus/pci/drivers_probe"), "0000:01:10.0");
        fs::write(device.join("driver_override"), "").unwrap();
        looker.apply(&rebind(Driver::Kernel)).unwrap();
        assert_eq!(read("devices/0000:01:10.0/driver_override"), "\n");
    }

    #[test]
    fn vfs_are_made_and_nodes_are_closed() {
        let tree = Temporary::new().with_pf(0);
        let mut looker = Looker::of(tree.0.clone());
        looker.apply(&Step::Create { pf: "pf".into(), vfs: 4 }).unwrap();
        assert_eq!(fs::read_to_string(tree.0.pf_device("pf").join("sriov_numvfs")).unwrap().trim(), "4");
        looker.apply(&Step::NodeMode { vf: id(), verbs: "mlx5_7".into(), mode: 0o600 }).unwrap();
        assert_eq!(tree.0.nodes()["mlx5_7"].mode(), 0o600);
    }

    #[test]
    fn an_error_says_what_was_refused() {
        let tree = Temporary::new();
        let mut looker = Looker::of(tree.0.clone());
        let mut error = |step: Step| looker.apply(&step).unwrap_err().to_string();
        let e = error(Step::Create { pf: "none".into(), vfs: 4 });
        assert!(e.starts_with("writing \"4\" to ") && e.contains("sriov_numvfs: No such file"), "{e}");
        let e = error(Step::NodeMode { vf: id(), verbs: "mlx5_7".into(), mode: 0o600 });
        assert!(e.starts_with("mlx5_7 has no device node"), "{e}");
        let e = error(Step::Set { vf: VfId { pf: "no-such-dev".into(), index: 1 }, what: Setting::Vlan(7) });
        assert!(e.starts_with("VF no-such-dev/1: VLAN 7: No such device"), "{e}");
    }
}
