//! The network between hosts, as the RNIC sees it.

use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;

use unirdma_formats::Gid;
use unirdma_formats::net::FIRST_SOURCE_PORT;

use crate::objects::{MAX_MTU, Qp};
use crate::path::{Route, WireDrops};
use crate::slab::Handle;
use crate::tx::Tx;

/// What leads to other hosts.
pub(crate) struct Network {
    /// By group and GID.
    pub routes: HashMap<(u32, Gid), Route>,
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
    /// True if `from` is the address of a plain device of this group.
    pub fn is_foreign(&self, group: u32, from: IpAddr) -> bool {
        self.routes.get(&(group, Gid::from_ip(from))).is_some_and(|r| r.foreign && r.host == from)
    }
}
