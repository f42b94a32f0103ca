//! PFs and VFs in sysfs, their settings in `/proc/sys`, and device nodes.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use unirdma_vf::{NetdevSeen, PfSeen, VerbsSeen, VfSeen};

const IFF_UP: u32 = 1;

/// The major and the minor number of a device.
pub(super) type Number = (u32, u32);

/// Where the kernel shows its state.
#[derive(Clone, Debug)]
pub(super) struct Roots {
    pub sys: PathBuf,
    pub proc: PathBuf,
    pub dev: PathBuf,
}

impl Default for Roots {
    fn default() -> Self {
        Roots { sys: "/sys".into(), proc: "/proc".into(), dev: "/dev".into() }
    }
}

/// What [`PfSeen`] does not say of one VF.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct More {
    /// The number of its network device.
    pub ifindex: Option<u32>,
    /// Its VFIO devices.
    pub vfio: Vec<Number>,
}

/// The device node of a verbs device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Node {
    pub path: PathBuf,
    pub number: Number,
}

impl Roots {
    /// A PF and its first VFs, `most` of them, by the name of its network device. Settings at the PF, addresses,
    /// neighbours, objects and users are known from elsewhere.
    pub fn pf(&self, netdev: &str, most: u16) -> Option<(PfSeen, BTreeMap<u16, More>)> {
        let device = self.pf_device(netdev);
        if !device.is_dir() {
            return None;
        }
        let indices = entries(&device).into_iter().filter_map(|name| name.strip_prefix("virtfn")?.parse().ok());
        let mut pf = PfSeen {
            driver: link_name(&device.join("driver")).unwrap_or_default(),
            // `sriov_numvfs` cannot be read while a removal of VFs waits for programs.
            numvfs: indices.max().map_or(0, |last: u16| last.saturating_add(1)),
            totalvfs: read(&device.join("sriov_totalvfs")).unwrap_or(0),
            vfs: BTreeMap::new(),
        };
        let mut more = BTreeMap::new();
        for index in 0..most {
            if let Some((vf, m)) = self.vf(&device.join(format!("virtfn{index}"))) {
                pf.vfs.insert(index, vf);
                more.insert(index, m);
            }
        }
        Some((pf, more))
    }

    /// The PCI device of a network device.
    pub fn pf_device(&self, netdev: &str) -> PathBuf {
        self.sys.join("class/net").join(netdev).join("device")
    }

    /// A PCI device by its address.
    pub fn pci_device(&self, pci: &str) -> PathBuf {
        self.sys.join("bus/pci/devices").join(pci)
    }

    /// The file of a network device's IPv4 setting.
    pub fn sysctl(&self, netdev: &str, name: &str) -> PathBuf {
        self.proc.join("sys/net/ipv4/conf").join(netdev).join(name)
    }

    /// The number of a network device.
    pub fn ifindex(&self, netdev: &str) -> Option<u32> {
        read(&self.sys.join("class/net").join(netdev).join("ifindex"))
    }

    /// True if a network device is up.
    pub fn is_up(&self, netdev: &str) -> bool {
        let flags = read::<String>(&self.sys.join("class/net").join(netdev).join("flags"));
        let flags = flags.and_then(|f| u32::from_str_radix(f.strip_prefix("0x")?, 16).ok());
        flags.is_some_and(|f| f & IFF_UP != 0)
    }

    /// `net.ipv4.conf.all.rp_filter`.
    pub fn rp_filter_all(&self) -> u8 {
        read(&self.sysctl("all", "rp_filter")).unwrap_or(0)
    }

    /// The nodes of all verbs devices, by the names of the devices.
    pub fn nodes(&self) -> BTreeMap<String, Node> {
        let class = self.sys.join("class/infiniband_verbs");
        let node = |name: String| {
            let device = read(&class.join(&name).join("ibdev"))?;
            let number = number(&class.join(&name).join("dev"))?;
            Some((device, Node { path: self.dev.join("infiniband").join(&name), number }))
        };
        entries(&class).into_iter().filter_map(node).collect()
    }

    fn vf(&self, link: &Path) -> Option<(VfSeen, More)> {
        let pci = link_name(link)?;
        let mut vf = VfSeen { pci, driver: link_name(&link.join("driver")), ..VfSeen::default() };
        let mut more = More { ifindex: None, vfio: self.vfio(link) };
        if let Some(name) = entries(&link.join("net")).into_iter().next() {
            more.ifindex = self.ifindex(&name);
            vf.netdev = Some(self.netdev(&name));
        }
        let verbs = entries(&link.join("infiniband")).into_iter().next();
        vf.verbs = verbs.map(|name| VerbsSeen { name, mode: 0, active: false });
        Some((vf, more))
    }

    fn netdev(&self, name: &str) -> NetdevSeen {
        let mac = read(&self.sys.join("class/net").join(name).join("address"));
        NetdevSeen {
            name: name.into(),
            mac: mac.unwrap_or_default(),
            up: self.is_up(name),
            mtu: read(&self.sys.join("class/net").join(name).join("mtu")).unwrap_or(0),
            accept_local: read::<u8>(&self.sysctl(name, "accept_local")).is_some_and(|v| v != 0),
            // A value that cannot be read is set again.
            rp_filter: read(&self.sysctl(name, "rp_filter")).unwrap_or(u8::MAX),
            arp_ignore: read(&self.sysctl(name, "arp_ignore")).unwrap_or(0),
            ..NetdevSeen::default()
        }
    }

    /// The devices by which a VMM has a PCI device: the one of its IOMMU group, and its own.
    fn vfio(&self, device: &Path) -> Vec<Number> {
        let group = link_name(&device.join("iommu_group"));
        let group = group.and_then(|g| number(&self.sys.join("class/vfio").join(g).join("dev")));
        let own = device.join("vfio-dev");
        let own = entries(&own).into_iter().filter_map(|name| number(&own.join(name).join("dev")));
        group.into_iter().chain(own).collect()
    }
}

impl Node {
    /// Its permissions; 0 if there is no such file.
    pub fn mode(&self) -> u32 {
        fs::metadata(&self.path).map_or(0, |m| m.permissions().mode() & 0o7777)
    }
}

/// The names in a directory, in order.
pub(super) fn entries(dir: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(dir) else { return Vec::new() };
    let mut names: Vec<String> = entries.filter_map(|e| e.ok()?.file_name().into_string().ok()).collect();
    names.sort();
    names
}

/// The value in a file.
fn read<T: FromStr>(file: &Path) -> Option<T> {
    fs::read_to_string(file).ok()?.trim().parse().ok()
}

/// The last part of a link's target.
fn link_name(link: &Path) -> Option<String> {
    fs::read_link(link).ok()?.file_name()?.to_str().map(String::from)
}

/// The numbers of a device in a file, such as `231:192`.
fn number(file: &Path) -> Option<Number> {
    let text: String = read(file)?;
    let (major, minor) = text.split_once(':')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

#[cfg(test)]
pub(super) mod tests {
    use std::os::unix::fs::symlink;
    use std::sync::atomic::{AtomicU32, Ordering};

    use unirdma_formats::Mac;

    use super::*;

    /// A directory that ends with this value.
    pub struct Temporary(pub Roots);

    impl Temporary {
        pub fn new() -> Temporary {
            static COUNT: AtomicU32 = AtomicU32::new(0);
            let n = COUNT.fetch_add(1, Ordering::Relaxed);
            let dir = std::env::temp_dir().join(format!("unirdma-vf-tree-{}-{n}", std::process::id()));
            fs::create_dir(&dir).unwrap();
            let at = |name| dir.join(name);
            Temporary(Roots { sys: at("sys"), proc: at("proc"), dev: at("dev") })
        }

        pub fn write(&self, file: &Path, text: &str) {
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, text).unwrap();
        }

        pub fn link(&self, from: &Path, to: &Path) {
            fs::create_dir_all(from.parent().unwrap()).unwrap();
            symlink(to, from).unwrap();
        }

        /// The PF `pf` with VFs of which the first has a network device `v0` and a verbs device `mlx5_7`.
        pub fn with_pf(self, vfs: u16) -> Temporary {
            let sys = self.0.sys.clone();
            let pf = sys.join("devices/0000:01:00.0");
            self.link(&sys.join("class/net/pf/device"), &pf);
            self.link(&pf.join("driver"), &sys.join("bus/pci/drivers/mlx5_core"));
            self.write(&pf.join("sriov_numvfs"), &format!("{vfs}\n"));
            self.write(&pf.join("sriov_totalvfs"), "8\n");
            self.write(&pf.join("net/pf/flags"), "0x1003\n");
            for vf in 0..vfs {
                let device = sys.join(format!("devices/0000:01:10.{vf}"));
                fs::create_dir_all(&device).unwrap();
                self.link(&pf.join(format!("virtfn{vf}")), &device);
            }
            let device = sys.join("devices/0000:01:10.0");
            self.link(&device.join("driver"), &sys.join("bus/pci/drivers/mlx5_core"));
            self.write(&device.join("net/v0/ifindex"), "12\n");
            self.link(&sys.join("class/net/v0"), &device.join("net/v0"));
            self.write(&device.join("net/v0/flags"), "0x1003\n");
            self.write(&device.join("net/v0/address"), "02:56:0a:32:00:0a\n");
            self.write(&device.join("net/v0/mtu"), "1500\n");
            self.write(&device.join("infiniband/mlx5_7/node_type"), "1: CA\n");
            self.link(&device.join("iommu_group"), &sys.join("kernel/iommu_groups/33"));
            self.write(&self.0.sysctl("v0", "accept_local"), "1\n");
            self.write(&self.0.sysctl("v0", "rp_filter"), "2\n");
            self.write(&self.0.sysctl("v0", "arp_ignore"), "1\n");
            self.write(&self.0.sysctl("all", "rp_filter"), "1\n");
            self.write(&sys.join("class/infiniband_verbs/uverbs4/ibdev"), "mlx5_7\n");
            self.write(&sys.join("class/infiniband_verbs/uverbs4/dev"), "231:196\n");
            self.write(&self.0.dev.join("infiniband/uverbs4"), "");
            self
        }
    }

    impl Drop for Temporary {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(self.0.sys.parent().unwrap());
        }
    }

    #[test]
    fn a_pf_and_its_vfs_are_seen() {
        let tree = Temporary::new().with_pf(3);
        let (pf, more) = tree.0.pf("pf", 2).unwrap();
        assert_eq!((pf.driver.as_str(), pf.numvfs, pf.totalvfs, pf.vfs.len()), ("mlx5_core", 3, 8, 2));
        let vf = &pf.vfs[&0];
        assert_eq!((vf.pci.as_str(), vf.driver.as_deref()), ("0000:01:10.0", Some("mlx5_core")));
        let netdev = NetdevSeen {
            name: "v0".into(),
            mac: Mac([0x02, 0x56, 0x0a, 0x32, 0, 0x0a]),
            up: true,
            mtu: 1500,
            accept_local: true,
            rp_filter: 2,
            arp_ignore: 1,
            ..NetdevSeen::default()
        };
        assert_eq!(vf.netdev, Some(netdev));
        assert_eq!(vf.verbs, Some(VerbsSeen { name: "mlx5_7".into(), mode: 0, active: false }));
        assert_eq!(more[&0].ifindex, Some(12));
        assert_eq!(pf.vfs[&1], VfSeen { pci: "0000:01:10.1".into(), ..VfSeen::default() });
        assert_eq!(tree.0.rp_filter_all(), 1);
        assert!(tree.0.is_up("v0") && !tree.0.is_up("none"));
        assert_eq!(tree.0.pf("other", 2), None);
    }

    #[test]
    fn a_verbs_device_has_a_node() {
        let tree = Temporary::new().with_pf(1);
        let nodes = tree.0.nodes();
        let node = &nodes["mlx5_7"];
        assert_eq!((nodes.len(), node.number), (1, (231, 196)));
        fs::set_permissions(&node.path, fs::Permissions::from_mode(0o600)).unwrap();
        assert_eq!(node.mode(), 0o600);
        fs::remove_file(&node.path).unwrap();
        assert_eq!(node.mode(), 0);
    }

    #[test]
    fn a_vmm_has_a_vf_by_its_group_or_by_itself() {
        let tree = Temporary::new().with_pf(1);
        tree.write(&tree.0.sys.join("class/vfio/33/dev"), "236:3\n");
        let device = tree.0.sys.join("devices/0000:01:10.0");
        tree.write(&device.join("vfio-dev/vfio0/dev"), "235:0\n");
        let (_, more) = tree.0.pf("pf", 1).unwrap();
        assert_eq!(more[&0].vfio, [(236, 3), (235, 0)]);
    }
}
