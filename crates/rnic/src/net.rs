//! The network between hosts, as the RNIC sees it.

use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;

use unirdma_formats::Gid;
use unirdma_formats::net::FIRST_SOURCE_PORT;
use unirdma_policy::Policy;

use crate::objects::{Ah, MAX_MTU, Qp};
use crate::path::{Route, WireDrops};
use crate::slab::Handle;
use crate::tx::Tx;

/// A group of vRNICs, as the rules see it.
#[derive(PartialEq)]
pub(crate) struct GroupRules {
    /// Its number between hosts, not 0.
    pub vni: u32,
    pub policy: Policy<u32, Gid>,
}

/// Connections and address handles that the rules may not allow any more.
#[derive(Default)]
pub(crate) struct Doubts {
    pub qps: Vec<Handle<Qp>>,
    pub ahs: Vec<Handle<Ah>>,
}

/// Routes to other hosts, the rules, and the packets on their way out.
pub(crate) struct Network {
    /// By group and GID.
    pub routes: HashMap<(u32, Gid), Route>,
    /// The rules of each group. In a group that is missing here, every vRNIC may talk to all GIDs that it has routes
    /// to.
    pub rules: HashMap<u32, GroupRules>,
    /// This host's own address in that network, for connections over the wire between its own vRNICs.
    pub own_host: Option<IpAddr>,
    /// The first of the UDP source ports that connections and address handles have.
    pub first_port: u16,
    /// Largest path MTU to other hosts, bytes.
    pub wire_mtu: u32,
    /// Congestion control is on.
    pub adapts: bool,
    pub drops: WireDrops,
    pub tx: Tx,
    /// QPs that wait for room in `tx`.
    pub tx_waiting: VecDeque<Handle<Qp>>,
}

impl Default for Network {
    fn default() -> Self {
        Network {
            routes: HashMap::new(),
            rules: HashMap::new(),
            own_host: None,
            first_port: FIRST_SOURCE_PORT,
            wire_mtu: MAX_MTU,
            adapts: true,
            drops: WireDrops::default(),
            tx: Tx::default(),
            tx_waiting: VecDeque::new(),
        }
    }
}

impl Network {
    /// The number of a group between hosts; 0 if it is unknown.
    pub fn vni(&self, group: u32) -> u32 {
        self.rules.get(&group).map_or(0, |r| r.vni)
    }

    /// The number of the group to which a route from `group` leads, if that is another one.
    pub fn other_group(&self, group: u32, route: &Route) -> Option<u32> {
        let own = self.vni(group);
        (own != 0 && own != route.vni).then_some(route.vni)
    }

    /// True if `from` is the address of a plain device of this group.
    pub fn is_foreign(&self, group: u32, from: IpAddr) -> bool {
        self.routes.get(&(group, Gid::from_ip(from))).is_some_and(|r| r.foreign && r.host == from)
    }
}
