//! A look at the kernel: all that the planner needs.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;
use std::time::Duration;

use unirdma_vf::{Config, PfSeen, Seen, VerbsSeen, VfId, VfSeen};

use super::given::Given;
use super::rdma::Rdma;
use super::route::Route;
use super::tree::{More, Node, Number, Roots};
use super::users::users;

/// Looks at the kernel. It remembers the numbers of devices that have been removed while programs had them open.
pub(super) struct Looker {
    pub roots: Roots,
    pub route: Route,
    given: Arc<Given>,
    /// `None` while the kernel has no verbs.
    rdma: Option<Rdma>,
    /// Devices of VFs by their numbers.
    owners: BTreeMap<Number, VfId>,
}

/// Why the kernel cannot be looked at.
#[derive(Debug, thiserror::Error)]
#[error("cannot read {what}: {error}")]
pub(super) struct LookError {
    what: String,
    error: io::Error,
}

fn failed(what: impl Into<String>) -> impl FnOnce(io::Error) -> LookError {
    let what = what.into();
    move |error| LookError { what, error }
}

impl Looker {
    /// # Errors
    /// There is no rtnetlink.
    pub fn new(roots: Roots, given: Arc<Given>) -> io::Result<Looker> {
        Ok(Looker { roots, route: Route::open()?, given, rdma: None, owners: BTreeMap::new() })
    }

    /// RDMA netlink.
    ///
    /// # Errors
    /// The kernel has no verbs.
    pub fn rdma(&mut self) -> io::Result<&mut Rdma> {
        if self.rdma.is_none() {
            self.rdma = Some(Rdma::open()?);
        }
        self.rdma.as_mut().ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    /// Looks at the PFs of the pool. `except`: processes that do not count as users.
    ///
    /// # Errors
    /// The kernel does not say something, for instance because a PF is just being removed.
    pub fn look(&mut self, config: &Config, at: Duration, except: &BTreeSet<u32>) -> Result<Seen, LookError> {
        let mut seen = Seen { at, rp_filter_all: self.roots.rp_filter_all(), ..Seen::default() };
        let mut more = BTreeMap::new();
        for pf in &config.pfs {
            let Some((mut found, others)) = self.roots.pf(&pf.netdev, pf.vfs) else { continue };
            self.add_settings(&pf.netdev, &mut found)?;
            more.extend(others.into_iter().map(|(index, m)| (VfId { pf: pf.netdev.clone(), index }, m)));
            seen.pfs.insert(pf.netdev.clone(), found);
        }
        self.add_addresses(&mut seen, &more)?;
        self.add_verbs(&mut seen, &more)?;
        self.add_users(&mut seen, &more, except);
        self.add_descriptors(&mut seen)?;
        Ok(seen)
    }

    fn add_settings(&mut self, name: &str, pf: &mut PfSeen) -> Result<(), LookError> {
        let settings = self.route.settings(name).map_err(failed(format!("the settings of the VFs of {name}")))?;
        for (index, vf) in &mut pf.vfs {
            vf.settings = settings.get(index).copied().unwrap_or_default();
        }
        Ok(())
    }

    fn add_addresses(&mut self, seen: &mut Seen, more: &BTreeMap<VfId, More>) -> Result<(), LookError> {
        let mut addresses = self.route.addresses().map_err(failed("the addresses of network devices"))?;
        let mut neighbours = self.route.neighbours().map_err(failed("the neighbours of network devices"))?;
        for (id, vf) in vfs(seen) {
            let (Some(netdev), Some(index)) = (&mut vf.netdev, more.get(&id).and_then(|m| m.ifindex)) else { continue };
            netdev.addresses = addresses.remove(&index).unwrap_or_default();
            netdev.neighbours = neighbours.remove(&index).unwrap_or_default();
        }
        Ok(())
    }

    /// Finds the verbs device of each VF, in sysfs or by its network device, and counts the objects of programs.
    fn add_verbs(&mut self, seen: &mut Seen, more: &BTreeMap<VfId, More>) -> Result<(), LookError> {
        let nodes = self.roots.nodes();
        self.learn_owners(&nodes, more);
        // Without verbs, the kernel has no RDMA netlink.
        let Ok(rdma) = self.rdma() else { return Ok(()) };
        let mut devices = rdma.devices().map_err(failed("the verbs devices"))?;
        let is_listed = |v: &VerbsSeen| devices.iter().any(|d| d.name == v.name);
        if !vfs(seen).filter_map(|(_, vf)| vf.verbs.as_ref()).all(is_listed) {
            // A long list lacks a device if another one is removed meanwhile.
            devices = rdma.devices().map_err(failed("the verbs devices"))?;
        }
        for (id, vf) in vfs(seen) {
            let netdev = more.get(&id).and_then(|m| m.ifindex);
            let known = vf.verbs.take().map(|v| v.name);
            let device = devices.iter().find(|d| match &known {
                Some(name) => d.name == *name,
                None => netdev.is_some() && d.netdev == netdev,
            });
            let Some(device) = device else { continue };
            vf.objects = rdma.objects(device.index).map_err(failed(format!("the objects of {}", device.name)))?;
            let mode = nodes.get(&device.name).map_or(0, Node::mode);
            vf.verbs = Some(VerbsSeen { name: device.name.clone(), mode, active: device.active });
        }
        for (id, vf) in vfs(seen) {
            let node = vf.verbs.as_ref().and_then(|v| nodes.get(&v.name));
            self.owners.extend(node.map(|n| (n.number, id.clone())));
        }
        Ok(())
    }

    /// Forgets the owners of numbers that the kernel has given to present verbs devices, and learns those of VFIO.
    fn learn_owners(&mut self, nodes: &BTreeMap<String, Node>, more: &BTreeMap<VfId, More>) {
        let present: BTreeSet<Number> = nodes.values().map(|n| n.number).collect();
        self.owners.retain(|number, _| !present.contains(number));
        let vfio = more.iter().flat_map(|(id, m)| m.vfio.iter().map(|n| (*n, id.clone())));
        self.owners.extend(vfio);
    }

    /// Counts the descriptors that programs have got and not closed.
    fn add_descriptors(&self, seen: &mut Seen) -> Result<(), LookError> {
        let counts = self.given.count().map_err(failed("the descriptors that programs have got"))?;
        for (number, count) in counts {
            let id = self.owners.get(&number);
            let vf = id.and_then(|id| seen.pfs.get_mut(&id.pf)?.vfs.get_mut(&id.index));
            vf.into_iter().for_each(|vf| vf.descriptors = count);
        }
        Ok(())
    }

    fn add_users(&mut self, seen: &mut Seen, more: &BTreeMap<VfId, More>, except: &BTreeSet<u32>) {
        let devices: BTreeSet<Number> = self.owners.keys().copied().collect();
        let users = users(&self.roots.proc, &devices, except);
        for (number, pids) in &users {
            let Some(id) = self.owners.get(number) else { continue };
            match seen.pfs.get_mut(&id.pf).and_then(|pf| pf.vfs.get_mut(&id.index)) {
                Some(vf) => vf.users.extend(pids),
                None => seen.leaving.entry(id.clone()).or_default().extend(pids),
            }
        }
        // A number is remembered while a device or a descriptor has it.
        let nodes = self.roots.nodes();
        let is_present = |number: &Number| {
            nodes.values().any(|n| n.number == *number) || more.values().any(|m| m.vfio.contains(number))
        };
        self.owners.retain(|number, _| users.contains_key(number) || is_present(number));
    }
}

fn vfs(seen: &mut Seen) -> impl Iterator<Item = (VfId, &mut VfSeen)> {
    seen.pfs
        .iter_mut()
        .flat_map(|(pf, p)| p.vfs.iter_mut().map(move |(index, vf)| (VfId { pf: pf.clone(), index: *index }, vf)))
}

#[cfg(test)]
impl Looker {
    /// One for a tree of a test, with no descriptors given.
    pub fn of(roots: Roots) -> Looker {
        Looker::new(roots, Arc::new(Given::new().unwrap())).unwrap()
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use unirdma_vf::{Address, Dry, Isolation, PfConfig};

    use super::super::tree::tests::Temporary;
    use super::*;

    #[test]
    fn a_removed_device_still_has_its_users() {
        let tree = Temporary::new().with_pf(1);
        // The number of /dev/null.
        let number = tree.0.sys.join("class/infiniband_verbs/uverbs4/dev");
        std::fs::write(&number, "1:3\n").unwrap();
        tree.link(&tree.0.proc.join("77/fd/5"), Path::new("/dev/null"));
        let id = VfId { pf: "pf".into(), index: 0 };
        let mut looker = Looker::of(tree.0.clone());
        let users = |looker: &mut Looker, except: &[u32]| {
            let (pf, more) = looker.roots.pf("pf", 1).unwrap();
            let mut seen = Seen { pfs: [("pf".into(), pf)].into(), ..Seen::default() };
            let more = more.into_values().map(|m| (id.clone(), m)).collect();
            looker.add_users(&mut seen, &more, &except.iter().copied().collect());
            seen.vf(&id).unwrap().users.iter().copied().collect::<Vec<_>>()
        };
        looker.owners.insert((1, 3), id.clone());
        assert_eq!(users(&mut looker, &[]), [77]);
        assert_eq!(users(&mut looker, &[77]), [0; 0]);
        std::fs::remove_dir_all(tree.0.sys.join("class/infiniband_verbs")).unwrap();
        assert_eq!(users(&mut looker, &[]), [77]);
        // Its VF is removed, too.
        let mut seen = Seen::default();
        looker.add_users(&mut seen, &BTreeMap::new(), &BTreeSet::new());
        assert_eq!(seen.leaving, BTreeMap::from([(id.clone(), BTreeSet::from([77]))]));
        std::fs::remove_file(tree.0.proc.join("77/fd/5")).unwrap();
        assert_eq!(users(&mut looker, &[]), [0; 0]);
        assert!(looker.owners.is_empty());
    }

    #[test]
    fn a_host_without_the_pf_shows_nothing() {
        let tree = Temporary::new();
        let addresses = vec![Address { addr: [10, 50, 0, 10].into(), prefix: 24 }];
        let pfs = vec![PfConfig { netdev: "pf".into(), vfs: 2, isolation: Isolation::Vlan, addresses, rxe: false }];
        let config = Config { pfs, when_dry: Dry::Soft, linger: Duration::ZERO };
        let at = Duration::from_secs(3);
        let seen = Looker::of(tree.0.clone()).look(&config, at, &BTreeSet::new()).unwrap();
        assert_eq!(seen, Seen { at, ..Seen::default() });
    }
}
