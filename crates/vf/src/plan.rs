//! The plan: steps that the supervisor applies, and notices to the operator.

use crate::config::{Config, PfConfig};
use crate::leases::Leases;
use crate::seen::{Seen, VfId};
use crate::state::{State, Step, state, steps};

/// The result of [`plan`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// Changes, in the order in which they are applied.
    pub steps: Vec<Step>,
    /// Reasons why VFs are not in the pool.
    pub notices: Vec<Notice>,
}

/// A reason why VFs are not in the pool, and what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum Notice {
    #[error("there is no PF `{0}`; load its driver, or remove it from the configuration")]
    NoPf(String),
    #[error("`{pf}` (driver {driver}) has no SR-IOV; turn it on in the firmware, or name another PF")]
    NoSriov { pf: String, driver: String },
    #[error("PF `{pf}` can have {most} VFs, not {wanted}; lower the number, or raise it in the firmware")]
    TooMany { pf: String, wanted: u16, most: u16 },
    #[error(
        "PF `{pf}` already has {found} VFs, not {wanted}, and they are taken as they are; to change that, end their users, write 0 to sriov_numvfs and start again"
    )]
    OtherNumber { pf: String, wanted: u16, found: u16 },
    #[error("VF {vf} (driver {driver}) has no verbs device; load the driver's RDMA module")]
    NoVerbs { vf: VfId, driver: String },
    #[error("net.ipv4.conf.all.rp_filter is {0}, so VFs of this host do not reach each other; set it to 0")]
    RpFilter(u8),
}

/// Plans what has to be applied. When everything is applied, the next plans have fewer steps, and soon none.
pub fn plan(config: &Config, seen: &Seen, leases: &Leases) -> Plan {
    let mut plan = Plan::default();
    if seen.rp_filter_all != 0 {
        plan.notices.push(Notice::RpFilter(seen.rp_filter_all));
    }
    for pf in &config.pfs {
        plan.create(pf, seen);
    }
    for (pf, id) in config.vfs() {
        let lease = leases.of(&id);
        match seen.vf(&id) {
            Some(vf) => {
                let next = steps(config, pf, &id, vf, lease);
                if next.is_empty() && state(config, pf, &id, seen, lease) == State::Raw {
                    plan.notices.push(Notice::NoVerbs { vf: id, driver: vf.driver.clone().unwrap_or_default() });
                }
                plan.steps.extend(next);
            }
            None => plan.steps.extend(lease.filter(|l| l.is_live()).map(|l| Step::Evict { lease: l.id })),
        }
    }
    // Other steps may wait in the kernel until programs have closed the devices that are gone.
    plan.steps.sort_by_key(|step| !matches!(step, Step::Evict { .. }));
    plan
}

impl Plan {
    /// Plans the VFs of a PF that has none. The kernel changes their number only from and to 0.
    fn create(&mut self, pf: &PfConfig, seen: &Seen) {
        let (name, wanted) = (pf.netdev.clone(), pf.vfs);
        let Some(pf) = seen.pfs.get(&name) else { return self.notices.push(Notice::NoPf(name)) };
        let most = pf.totalvfs;
        if most == 0 {
            return self.notices.push(Notice::NoSriov { pf: name, driver: pf.driver.clone() });
        }
        if wanted > most {
            self.notices.push(Notice::TooMany { pf: name.clone(), wanted, most });
        }
        let vfs = wanted.min(most);
        if seen.leaving.keys().any(|vf| vf.pf == name) {
            // Somebody is removing the VFs.
        } else if pf.numvfs == 0 {
            self.steps.push(Step::Create { pf: name, vfs });
        } else if pf.numvfs != vfs {
            self.notices.push(Notice::OtherNumber { pf: name, wanted: vfs, found: pf.numvfs });
        }
    }
}

/// The state of each VF of the pool.
pub fn states(config: &Config, seen: &Seen, leases: &Leases) -> Vec<(VfId, State)> {
    config.vfs().map(|(pf, id)| (id.clone(), state(config, pf, &id, seen, leases.of(&id)))).collect()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::lease::{Contexts, Lease, LeaseId, Phase, Purpose};
    use crate::log::{Kept, Record};
    use crate::seen::{NetdevSeen, PfSeen, Settings, VerbsSeen, VfSeen};
    use crate::state::{ARP_IGNORE, NODE_MODE, Why};
    use crate::{Address, Dry, Isolation};

    /// The text of the plan for a PF `p` with 4 VFs that looks like this.
    fn planned(pf: PfSeen) -> (Vec<Step>, Vec<String>) {
        let addresses = vec![Address { addr: [10, 0, 0, 1].into(), prefix: 24 }];
        let pfs = vec![PfConfig { netdev: "p".into(), vfs: 4, isolation: Isolation::Vlan, addresses, rxe: false }];
        let config = Config { pfs, when_dry: Dry::Refuse, linger: Duration::ZERO };
        let seen = Seen { pfs: [("p".to_owned(), pf)].into(), ..Seen::default() };
        let plan = plan(&config, &seen, &Leases::default());
        (plan.steps, plan.notices.iter().map(Notice::to_string).collect())
    }

    #[test]
    fn a_vf_is_ready_once_its_port_is_active() {
        let addresses = vec![Address { addr: [10, 0, 0, 1].into(), prefix: 24 }];
        let isolation = Isolation::Fabric("g".into());
        let pfs = vec![PfConfig { netdev: "p".into(), vfs: 1, isolation, addresses, rxe: false }];
        let config = Config { pfs, when_dry: Dry::Refuse, linger: Duration::ZERO };
        let mac = config.pfs[0].mac_of(0);
        let netdev = NetdevSeen {
            mac,
            up: true,
            accept_local: true,
            arp_ignore: ARP_IGNORE,
            addresses: config.pfs[0].addresses_of(0).into_iter().collect(),
            ..NetdevSeen::default()
        };
        let mut vf = VfSeen {
            driver: Some("mlx5_core".into()),
            netdev: Some(netdev),
            settings: Settings { mac, spoof_check: true, ..Settings::default() },
            verbs: Some(VerbsSeen { name: "mlx5_1".into(), mode: NODE_MODE, active: false }),
            ..VfSeen::default()
        };
        let state = |vf: &VfSeen| {
            let seen = Seen {
                pfs: [("p".into(), PfSeen { vfs: [(0, vf.clone())].into(), ..pf(1, 1) })].into(),
                ..Seen::default()
            };
            let plan = plan(&config, &seen, &Leases::default());
            assert_eq!((plan.steps, plan.notices), (vec![], vec![]));
            states(&config, &seen, &Leases::default())[0].1.clone()
        };
        assert_eq!(state(&vf), State::NoLink);
        vf.verbs.as_mut().unwrap().active = true;
        assert_eq!(state(&vf), State::Ready);
    }

    fn pf(numvfs: u16, totalvfs: u16) -> PfSeen {
        PfSeen { driver: "igb".into(), numvfs, totalvfs, ..PfSeen::default() }
    }

    #[test]
    fn the_number_of_vfs_is_written_only_when_it_is_0() {
        let create = |vfs| vec![Step::Create { pf: "p".into(), vfs }];
        assert_eq!(planned(pf(0, 7)), (create(4), vec![]));
        let (steps, notices) = planned(pf(0, 3));
        assert!(steps == create(3) && notices[0].contains("can have 3 VFs, not 4"), "{notices:?}");
        for found in [1, 7] {
            let (steps, notices) = planned(pf(found, 7));
            assert!(steps.is_empty() && notices[0].contains(&format!("has {found} VFs, not 4")), "{notices:?}");
        }
        let (steps, notices) = planned(pf(0, 0));
        assert!(steps.is_empty() && notices[0].starts_with("`p` (driver igb) has no SR-IOV"), "{notices:?}");
    }

    #[test]
    fn a_pf_whose_vfs_are_being_removed_is_left_alone_once_the_leases_have_ended() {
        let pf = |netdev: &str, addr: [u8; 4]| PfConfig {
            netdev: netdev.into(),
            vfs: 1,
            isolation: Isolation::Fabric("g".into()),
            addresses: vec![Address { addr: addr.into(), prefix: 24 }],
            rxe: false,
        };
        let pfs = vec![pf("empty", [10, 0, 0, 1]), pf("p", [10, 0, 0, 2])];
        let config = Config { pfs, when_dry: Dry::Refuse, linger: Duration::ZERO };
        let vf = VfId { pf: "p".into(), index: 0 };
        let lease = Lease {
            id: LeaseId(7),
            vf: vf.clone(),
            instance: "i".into(),
            group: "g".into(),
            vlan: None,
            rate_mbps: 0,
            purpose: Purpose::Verbs,
            vrnics: [("v".into(), Contexts { count: 1, rate_mbps: 0 })].into(),
            phase: Phase::Open,
        };
        let kept = Kept { records: vec![Record::Lease(lease)], damage: Vec::new() };
        let none = PfSeen { driver: "igb".into(), totalvfs: 7, ..PfSeen::default() };
        let mut seen = Seen { pfs: [("empty".into(), none.clone()), ("p".into(), none)].into(), ..Seen::default() };
        seen.leaving = [(vf.clone(), [77].into())].into();
        let (mut leases, _) = Leases::adopt(&config, &seen, kept, Duration::ZERO);
        let create = |pf: &str| Step::Create { pf: pf.into(), vfs: 1 };
        assert_eq!(plan(&config, &seen, &leases).steps, [Step::Evict { lease: LeaseId(7) }, create("empty")]);
        leases.evict(LeaseId(7), Duration::ZERO);
        assert_eq!(plan(&config, &seen, &leases).steps, [create("empty")]);
        let users = State::Dirty(Why::Used { objects: 0, users: [77].into(), descriptors: 0 });
        assert_eq!(states(&config, &seen, &leases)[1], (vf, users));
        seen.leaving.clear();
        assert_eq!(plan(&config, &seen, &leases).steps, [create("empty"), create("p")]);
    }

    #[test]
    fn a_vf_is_bound_before_its_network_device_is_set_up() {
        let vf = VfSeen { pci: "0000:01:10.0".into(), ..VfSeen::default() };
        let (steps, _) = planned(PfSeen { vfs: [(0, vf.clone())].into(), ..pf(4, 4) });
        assert_eq!(steps.len(), 3, "{steps:?}");
        assert!(matches!(steps[..], [Step::Set { .. }, Step::Set { .. }, Step::Rebind { .. }]), "{steps:?}");
        let refused = VfSeen { refused: Some("spoofchk: EOPNOTSUPP".into()), ..vf };
        let (steps, _) = planned(PfSeen { vfs: [(0, refused)].into(), ..pf(4, 4) });
        assert_eq!(steps, []);
    }
}
