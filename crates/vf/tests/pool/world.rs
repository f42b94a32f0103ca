//! A pool on the simulated kernel, with its programs, its log, and what happens to it.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use proptest::prelude::*;
use unirdma_vf::*;

use crate::kernel::{Kernel, address, config, second_pf};

/// Plans until nothing is left: make VFs, bind them, set them up, and change the mode of the new device node.
const MAX_PLANS: usize = 4;

#[derive(Clone, Debug)]
pub enum Event {
    Ask {
        instance: u8,
        vrnic: u8,
        vfio: bool,
        pf: Option<bool>,
        rate: u32,
    },
    /// A context is closed. Its process may keep the descriptor.
    End {
        nth: usize,
        keeps: bool,
    },
    Cancel {
        nth: usize,
    },
    /// All processes with descriptors of a VF end.
    Exit {
        vf: VfId,
    },
    /// The second PF is taken out, which does not end its VFs' programs, or put in again.
    Plug {
        on: bool,
    },
    /// Somebody without a lease opens the device, or puts an address on the network device, or takes it by VFIO.
    Intrude {
        vf: VfId,
        how: u8,
    },
    Unbind {
        vf: VfId,
    },
    /// The port of a VF becomes active, or is not any more.
    Link {
        vf: VfId,
        on: bool,
    },
    Drain {
        vf: VfId,
        whole: bool,
        on: bool,
    },
    Refuse {
        vf: VfId,
        on: bool,
    },
    /// The supervisor is started again with its log, of which a part may be damaged.
    Restart {
        damage: Option<(usize, u8)>,
    },
    Wait {
        seconds: u64,
    },
}

pub fn event() -> impl Strategy<Value = Event> {
    let vf = || (any::<bool>(), 0..3u16).prop_map(|(one, index)| VfId { pf: pf_name(one), index });
    prop_oneof![
        10 => (0..5u8, 0..2u8, prop::bool::weighted(0.1), prop::option::weighted(0.2, any::<bool>()), 0..3u32)
            .prop_map(|(instance, vrnic, vfio, pf, rate)| Event::Ask { instance, vrnic, vfio, pf, rate }),
        8 => (0..9usize, any::<bool>()).prop_map(|(nth, keeps)| Event::End { nth, keeps }),
        1 => (0..9usize).prop_map(|nth| Event::Cancel { nth }),
        4 => vf().prop_map(|vf| Event::Exit { vf }),
        2 => (vf(), 0..3u8).prop_map(|(vf, how)| Event::Intrude { vf, how }),
        1 => any::<bool>().prop_map(|on| Event::Plug { on }),
        1 => vf().prop_map(|vf| Event::Unbind { vf }),
        2 => (vf(), any::<bool>()).prop_map(|(vf, on)| Event::Link { vf, on }),
        2 => (vf(), any::<bool>(), any::<bool>()).prop_map(|(vf, whole, on)| Event::Drain { vf, whole, on }),
        1 => (vf(), any::<bool>()).prop_map(|(vf, on)| Event::Refuse { vf, on }),
        1 => prop::option::of((0..4_000usize, 1..255u8)).prop_map(|damage| Event::Restart { damage }),
        8 => (0..12u64).prop_map(|seconds| Event::Wait { seconds }),
    ]
}

/// Instance 4 has vRNICs in two groups, the others in one.
fn group_of(instance: u8, vrnic: u8) -> u8 {
    if instance == 4 { vrnic } else { instance % 2 }
}

pub fn pf_name(one: bool) -> String {
    if one { "ens1" } else { "ens2" }.into()
}

/// A request of the vRNIC `iN-M` of the instance `iN`.
pub fn request(instance: u8, vrnic: u8) -> Request {
    let group = group_of(instance, vrnic);
    Request {
        instance: format!("i{instance}"),
        vrnic: format!("i{instance}-{vrnic}"),
        group: format!("g{group}"),
        vlan: Some(100 + u16::from(group)),
        rate_mbps: 0,
        pf: None,
        purpose: Purpose::Verbs,
        when_dry: None,
    }
}

/// A pool with its kernel and its programs.
pub struct World {
    pub config: Config,
    pub kernel: Kernel,
    pub leases: Leases,
    pub log: Vec<u8>,
    pub now: Duration,
    /// Open contexts.
    pub contexts: Vec<(LeaseId, String)>,
    waiting: BTreeMap<Ticket, String>,
    /// Leases that were used already, and the greatest number of all.
    leased: BTreeSet<LeaseId>,
    last: LeaseId,
}

impl World {
    pub fn new() -> World {
        let (config, leases) = (config(), Leases::default());
        config.check().unwrap();
        let (log, contexts, waiting, leased) = (Vec::new(), Vec::new(), BTreeMap::new(), BTreeSet::new());
        World {
            config,
            kernel: Kernel::new(),
            leases,
            log,
            now: Duration::ZERO,
            contexts,
            waiting,
            leased,
            last: LeaseId(0),
        }
    }

    pub fn exists(&self, vf: &VfId) -> bool {
        self.kernel.0.vf(vf).is_some()
    }

    pub fn states(&self) -> BTreeMap<VfId, State> {
        states(&self.config, &self.kernel.0, &self.leases).into_iter().collect()
    }

    /// A request has a VF. `before` are the requests that waited already and got nothing.
    pub fn opened(&mut self, lease: LeaseId, vrnic: String, vf: &VfId, before: &[Waiter]) {
        if self.leased.insert(lease) {
            assert!(lease > self.last, "{lease} is a number of another lease");
            assert!(!self.kernel.vf(vf).is_used(), "{vf} was leased while it is used");
            let is_verbs = self.leases.iter().any(|l| l.id == lease && l.purpose == Purpose::Verbs);
            let is_active = self.kernel.vf(vf).verbs.as_ref().is_some_and(|v| v.active);
            assert!(!is_verbs || is_active, "{vf} was leased without a link");
            let is_first = |w: &&Waiter| {
                (vf.pf == "ens1" || w.request.group == "g0") && w.request.pf.as_ref().is_none_or(|pf| *pf == vf.pf)
            };
            assert_eq!(before.iter().find(is_first), None, "overtaken on {vf}");
            self.last = lease;
        }
        // The program gets the device when the plan is applied.
        self.apply();
        self.contexts.push((lease, vrnic));
        self.kernel.vf(vf).users.insert(100 + lease.0 as u32);
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Ask { instance, vrnic, vfio, pf, rate } => {
                let request = Request {
                    rate_mbps: rate * 1_000,
                    pf: pf.map(pf_name),
                    purpose: if vfio { Purpose::Vfio } else { Purpose::Verbs },
                    when_dry: (rate == 2).then_some(Dry::Refuse),
                    ..request(instance, vrnic)
                };
                let vrnic = request.vrnic.clone();
                match self.leases.ask(&self.config, &self.kernel.0, request, self.now) {
                    Answer::Has { lease, vf } => {
                        let before: Vec<Waiter> = self.leases.waiting().cloned().collect();
                        self.opened(lease, vrnic, &vf, &before);
                    }
                    Answer::Waits { ticket, place } => {
                        assert_eq!(self.leases.waiting().position(|w| w.ticket == ticket), Some(place - 1));
                        self.waiting.insert(ticket, vrnic);
                    }
                    Answer::Soft => panic!("nobody asked for that"),
                    Answer::Refused(_) => {}
                }
            }
            Event::End { nth, keeps } if nth < self.contexts.len() => {
                let (lease, vrnic) = self.contexts.remove(nth);
                self.leases.end(lease, &vrnic, self.now);
                if !keeps && !self.contexts.iter().any(|(l, _)| *l == lease) {
                    let pid = 100 + lease.0 as u32;
                    self.kernel.exit(pid);
                }
            }
            Event::Cancel { nth } => {
                if let Some(ticket) = self.waiting.keys().nth(nth).copied() {
                    self.leases.cancel(ticket);
                    self.waiting.remove(&ticket);
                }
            }
            Event::Exit { vf } => {
                self.kernel.exit_all(&vf);
                let gone = self.leases.of(&vf).map(|l| l.id);
                let (ended, open) = std::mem::take(&mut self.contexts).into_iter().partition(|c| Some(c.0) == gone);
                self.contexts = open;
                let ended: Vec<(LeaseId, String)> = ended;
                ended.iter().for_each(|(lease, vrnic)| self.leases.end(*lease, vrnic, self.now));
            }
            Event::Intrude { vf, how } if self.exists(&vf) => {
                let is_free = self.leases.of(&vf).is_none();
                let vf = self.kernel.vf(&vf);
                let is_unused = !vf.is_used();
                match (how, &mut vf.netdev) {
                    (0, _) if vf.verbs.is_some() => drop(vf.users.insert(1)),
                    (1, Some(n)) if is_free => drop(n.addresses.insert(address([192, 168, 0, 1]))),
                    (2, _) if is_free && is_unused => {
                        (vf.driver, vf.netdev, vf.verbs) = (Some("vfio-pci".into()), None, None);
                    }
                    _ => {}
                }
            }
            Event::Plug { on: false } => self.kernel.unplug("ens2"),
            Event::Plug { on: true } => {
                self.kernel.0.pfs.entry("ens2".into()).or_insert_with(second_pf);
            }
            Event::Unbind { vf } if self.exists(&vf) => {
                let vf = self.kernel.vf(&vf);
                (vf.driver, vf.netdev, vf.verbs) = (None, None, None);
            }
            Event::Link { vf, on } if self.exists(&vf) => {
                self.kernel.vf(&vf).verbs.as_mut().into_iter().for_each(|v| v.active = on);
            }
            Event::Drain { vf, whole, on } => {
                self.leases.drain(if whole { Part::Pf(vf.pf) } else { Part::Vf(vf) }, on);
            }
            Event::Refuse { vf, on } if self.exists(&vf) => {
                self.kernel.vf(&vf).refused = on.then(|| "vlan: EOPNOTSUPP".into());
            }
            Event::Restart { damage } => self.restart(damage),
            Event::Wait { seconds } => self.now += Duration::from_secs(seconds),
            _ => {}
        }
    }

    pub fn restart(&mut self, damage: Option<(usize, u8)>) {
        if let Some((at, bits)) = damage
            && let Some(byte) = self.log.get_mut(at)
        {
            *byte ^= bits;
        }
        let kept = log::read(&self.log);
        let old = std::mem::take(&mut self.leases);
        let (leases, _) = Leases::adopt(&self.config, &self.kernel.0, kept, self.now);
        if damage.is_none() {
            let vfs = |l: &Leases| l.iter().map(|l| (l.id, l.vf.clone())).collect::<Vec<_>>();
            assert_eq!(vfs(&leases), vfs(&old));
            assert!(leases.drained().eq(old.drained()));
        }
        self.log = leases.snapshot().iter().flat_map(log::encode).collect();
        self.leases = leases;
        if damage.is_some() {
            self.last = LeaseId(0);
        }
        self.leased = self.leases.iter().map(|l| l.id).collect();
        // The workers say which contexts there are. Requests that waited are made anew.
        let told: Vec<_> = self.leases.iter().map(|l| (l.id, l.vrnics.keys().cloned().collect::<Vec<_>>())).collect();
        self.contexts.retain(|c| told.iter().any(|(id, names)| *id == c.0 && names.contains(&c.1)));
        for (id, vrnic) in told.into_iter().flat_map(|(id, names)| names.into_iter().map(move |n| (id, n))) {
            let count = self.contexts.iter().filter(|c| **c == (id, vrnic.clone())).count();
            self.leases.recount(id, &vrnic, count as u32, self.now);
        }
        self.waiting.clear();
    }

    /// Looks at the kernel and ticks. Of the requests that could have a VF, the first one gets it.
    pub fn tick(&mut self) {
        self.now += Duration::from_millis(1);
        self.kernel.0.at = self.now;
        let before: Vec<Waiter> = self.leases.waiting().cloned().collect();
        for change in self.leases.tick(&self.config, &self.kernel.0, self.now) {
            match change {
                Change::Granted { ticket, lease, vf } => {
                    let vrnic = self.waiting.remove(&ticket).unwrap();
                    let is_before = |w: &&Waiter| w.ticket < ticket && self.waiting.contains_key(&w.ticket);
                    let before: Vec<Waiter> = before.iter().filter(is_before).cloned().collect();
                    self.opened(lease, vrnic, &vf, &before);
                }
                Change::TimedOut { ticket } => drop(self.waiting.remove(&ticket).unwrap()),
                Change::Returned { vf, .. } => {
                    let seen = &self.kernel.0;
                    assert!(seen.vf(&vf).is_none_or(|vf| !vf.is_used()), "{vf} is used");
                    assert!(!seen.leaving.contains_key(&vf), "{vf} is used, and gone");
                }
                Change::Ended { .. } => {}
            }
        }
        assert!(self.leases.next_timeout(&self.config).is_none_or(|t| t > self.now || !self.waiting.is_empty()));
    }

    /// Applies plans until there is nothing to do.
    pub fn apply(&mut self) {
        for _ in 0..=MAX_PLANS {
            let plan = plan(&self.config, &self.kernel.0, &self.leases);
            if plan.steps.is_empty() {
                return;
            }
            let (before, states) = (self.kernel.0.clone(), self.states());
            for step in plan.steps {
                self.kernel.apply(step, &mut self.leases, self.now);
            }
            assert_eq!(before.pfs["other"], self.kernel.0.pfs["other"]);
            assert_eq!(before.pfs["ens1"].vfs[&3], self.kernel.0.pfs["ens1"].vfs[&3], "not of the pool");
            for (id, _) in
                states.iter().filter(|(_, s)| matches!(s, State::Foreign(_) | State::Dirty(Why::Used { .. })))
            {
                assert_eq!(before.vf(id), self.kernel.0.vf(id), "{id} is not ours");
            }
        }
        panic!("the plan does not end: {:?}", plan(&self.config, &self.kernel.0, &self.leases).steps);
    }

    fn check(&mut self) {
        let of: BTreeMap<&VfId, &Lease> = self.leases.iter().map(|l| (&l.vf, l)).collect();
        assert_eq!(of.len(), self.leases.iter().count(), "two leases of one VF");
        let mut vrnics = BTreeMap::new();
        for lease in self.leases.iter().filter(|l| l.is_live()) {
            for vrnic in lease.vrnics.keys() {
                assert!(vrnic.starts_with(&lease.instance), "two instances on {}", lease.vf);
                assert_eq!(vrnics.insert(vrnic, &lease.vf), None, "a vRNIC on two VFs");
                let group = group_of(vrnic.as_bytes()[1] - b'0', vrnic.as_bytes()[3] - b'0');
                assert_eq!(lease.group, format!("g{group}"), "{vrnic} has a VF of another group");
            }
            let settings = self.kernel.0.vf(&lease.vf).map(|vf| (vf.refused.is_some(), vf.settings.vlan));
            let vlan = (lease.vf.pf == "ens1").then(|| 100 + lease.group[1..].parse::<u16>().unwrap());
            assert!(lease.vlan == vlan && (vlan.is_some() || lease.group == "g0"), "{lease:?}");
            assert!(settings.is_none_or(|(refused, now)| refused || now == vlan.unwrap_or(0)), "{settings:?}");
        }
        let kept = log::read(&{
            self.log.extend(self.leases.take_records().iter().flat_map(log::encode));
            self.log.clone()
        });
        let (again, _) = Leases::adopt(&self.config, &self.kernel.0, kept, self.now);
        assert!(
            again.iter().map(|l| (l.id, &l.vf)).eq(self.leases.iter().map(|l| (l.id, &l.vf))),
            "the log lacks something"
        );
    }

    pub fn turn(&mut self, event: Event) {
        let is_late = matches!(event, Event::Exit { .. } | Event::Drain { .. } | Event::Refuse { .. });
        self.happen(event);
        self.apply();
        // Sometimes a request comes before the tick.
        if !is_late {
            self.tick();
            self.apply();
        }
        self.check();
    }
}
