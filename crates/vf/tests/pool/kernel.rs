//! A simulated kernel, to which steps are applied.

use std::time::Duration;

use unirdma_vf::*;

pub const WAIT: Duration = Duration::from_secs(20);
pub const LINGER: Duration = Duration::from_secs(5);

pub fn address(addr: [u8; 4]) -> Address {
    Address { addr: addr.into(), prefix: 24 }
}

/// Three VFs with VLANs on a PF that has four, and three for the group `g0` on a PF that can have two.
pub fn config() -> Config {
    let pf = |netdev: &str, vfs, isolation, first, rxe| {
        let addresses = vec![address([10, 0, 0, first])];
        PfConfig { netdev: netdev.into(), vfs, isolation, addresses, rxe }
    };
    let pfs = vec![pf("ens1", 3, Isolation::Vlan, 1, true), pf("ens2", 3, Isolation::Fabric("g0".into()), 10, false)];
    Config { pfs, when_dry: Dry::Wait(WAIT), linger: LINGER }
}

/// The second PF before it has VFs.
pub fn second_pf() -> PfSeen {
    PfSeen { driver: "mlx5_core".into(), totalvfs: 2, ..PfSeen::default() }
}

/// A kernel with the PFs of the pool and one more.
#[derive(Clone)]
pub struct Kernel(pub Seen);

impl Kernel {
    pub fn new() -> Kernel {
        let mut kernel = Kernel(Seen::default());
        let igb = PfSeen { driver: "igb".into(), totalvfs: 7, ..PfSeen::default() };
        kernel.0.pfs = [("ens1".into(), igb.clone()), ("other".into(), igb), ("ens2".into(), second_pf())].into();
        kernel.make_vfs("ens1", 4);
        kernel.make_vfs("other", 2);
        kernel
    }

    fn make_vfs(&mut self, pf: &str, vfs: u16) {
        let p = self.0.pfs.get_mut(pf).unwrap();
        assert!(p.numvfs == 0 && vfs <= p.totalvfs, "sriov_numvfs: EBUSY or ERANGE");
        p.numvfs = vfs;
        p.vfs = (0..vfs).map(|i| (i, VfSeen { pci: format!("{pf}.{i}"), ..VfSeen::default() })).collect();
    }

    pub fn vf(&mut self, id: &VfId) -> &mut VfSeen {
        self.0.pfs.get_mut(&id.pf).unwrap().vfs.get_mut(&id.index).unwrap()
    }

    /// Takes a PF out. Processes keep what they have open.
    pub fn unplug(&mut self, pf: &str) {
        for (index, vf) in self.0.pfs.remove(pf).into_iter().flat_map(|p| p.vfs) {
            if !vf.users.is_empty() {
                self.0.leaving.insert(VfId { pf: pf.into(), index }, vf.users);
            }
        }
    }

    /// A process closes what it has open.
    pub fn exit(&mut self, pid: u32) {
        let all = self.0.pfs.values_mut().flat_map(|p| p.vfs.values_mut()).map(|vf| &mut vf.users);
        all.chain(self.0.leaving.values_mut()).for_each(|users| _ = users.remove(&pid));
        self.0.leaving.retain(|_, users| !users.is_empty());
    }

    /// All processes that have a VF's device open close it.
    pub fn exit_all(&mut self, id: &VfId) {
        self.0.leaving.remove(id);
        if let Some(vf) = self.0.pfs.get_mut(&id.pf).and_then(|pf| pf.vfs.get_mut(&id.index)) {
            vf.users.clear();
        }
    }

    pub fn apply(&mut self, step: Step, leases: &mut Leases, now: Duration) {
        match step {
            Step::Create { pf, vfs } => {
                assert!(config().pfs.iter().any(|p| p.netdev == pf && vfs <= p.vfs), "{pf}: {vfs} VFs");
                assert!(self.0.leaving.keys().all(|vf| vf.pf != pf), "{pf}: a removal of its VFs waits for programs");
                self.make_vfs(&pf, vfs);
            }
            Step::Set { vf, what } => {
                let s = &mut self.vf(&vf).settings;
                match what {
                    Setting::Mac(mac) => s.mac = mac,
                    Setting::Vlan(vlan) => s.vlan = vlan,
                    Setting::RateMbps(rate) => s.rate_mbps = rate,
                    Setting::SpoofCheck(on) => s.spoof_check = on,
                    Setting::Trust(on) => s.trust = on,
                }
            }
            Step::Rebind { vf: id, pci, driver } => {
                let vf = self.vf(&id);
                assert!(vf.pci == pci && !vf.is_used(), "{id} is used, so unbind would wait");
                (vf.netdev, vf.verbs) = (None, None);
                vf.driver = Some(if driver == Driver::Vfio { "vfio-pci" } else { "kernel" }.into());
                if driver == Driver::Kernel {
                    vf.netdev = Some(NetdevSeen { name: pci.clone(), mac: vf.settings.mac, ..NetdevSeen::default() });
                    vf.verbs = (id.pf != "ens1").then_some(VerbsSeen { name: pci, mode: 0o666, active: true });
                }
            }
            Step::Netdev { vf, netdev, addresses, neighbours } => {
                let n = self.vf(&vf).netdev.as_mut().unwrap();
                assert_eq!(n.name, netdev);
                (n.up, n.accept_local, n.rp_filter, n.arp_ignore) = (true, true, 0, ARP_IGNORE);
                n.addresses.extend(addresses);
                n.neighbours.extend(neighbours);
            }
            Step::AddRxe { vf, netdev } => {
                self.vf(&vf).verbs = Some(VerbsSeen { name: format!("rxe_{netdev}"), mode: 0o666, active: true });
            }
            Step::NodeMode { vf, verbs, mode } => {
                let v = self.vf(&vf).verbs.as_mut().unwrap();
                assert_eq!(v.name, verbs);
                v.mode = mode;
            }
            Step::Evict { lease } => leases.evict(lease, now),
        }
    }
}
