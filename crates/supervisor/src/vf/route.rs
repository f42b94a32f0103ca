//! rtnetlink: settings of VFs at their PF, addresses, neighbours.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::IpAddr;

use netlink_packet_core::NetlinkDeserializable;
use netlink_packet_core::{NLM_F_CREATE, NLM_F_DUMP, NLM_F_REPLACE, NetlinkHeader, NetlinkSerializable};
use netlink_packet_route::address::{AddressAttribute, AddressFlags, AddressHeaderFlags, AddressMessage, AddressScope};
use netlink_packet_route::link::{
    LinkAttribute, LinkExtentMask, LinkFlags, LinkMessage, LinkVfInfo, VfInfo, VfInfoMac, VfInfoRate, VfInfoSpoofCheck,
    VfInfoTrust, VfInfoVlan,
};
use netlink_packet_route::neighbour::{NeighbourAddress, NeighbourAttribute, NeighbourMessage, NeighbourState};
use netlink_packet_route::route::RouteType;
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use unirdma_formats::Mac;
use unirdma_vf::{Address, Setting, Settings};

use super::netlink::Requests;

/// Multicast groups that tell of links and addresses (`RTNLGRP_LINK`, `IPV4_IFADDR`, `IPV6_IFADDR`). Neighbours of all
/// kinds change all the time, so nobody listens to these.
pub(super) const GROUPS: [u32; 3] = [1, 5, 9];

/// rtnetlink.
pub(super) struct Route(Requests);

impl Route {
    /// # Errors
    /// The kernel's error.
    pub fn open() -> io::Result<Route> {
        Requests::open(netlink_sys::protocols::NETLINK_ROUTE).map(Route)
    }

    /// The settings of the VFs of a PF, by their numbers.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn settings(&mut self, pf: &str) -> io::Result<BTreeMap<u16, Settings>> {
        let mut link = LinkMessage::default();
        let mask = vec![LinkExtentMask::Vf, LinkExtentMask::SkipStats];
        link.attributes = vec![LinkAttribute::IfName(pf.into()), LinkAttribute::ExtMask(mask)];
        let mut answer = self.ask(RouteNetlinkMessage::GetLink(link), 0)?;
        let Some(RouteNetlinkMessage::NewLink(link)) = answer.pop() else {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the kernel says something unknown"));
        };
        let lists = link.attributes.into_iter().filter_map(|a| match a {
            LinkAttribute::VfInfoList(list) => Some(list),
            _ => None,
        });
        Ok(lists.flatten().filter_map(|vf| settings(&vf)).collect())
    }

    /// The addresses of each network device, by its number, without link-local and autoconfigured ones.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn addresses(&mut self) -> io::Result<BTreeMap<u32, BTreeSet<Address>>> {
        let mut found: BTreeMap<u32, BTreeSet<Address>> = BTreeMap::new();
        for message in self.ask(RouteNetlinkMessage::GetAddress(AddressMessage::default()), NLM_F_DUMP)? {
            let RouteNetlinkMessage::NewAddress(message) = message else { continue };
            if let Some(address) = address(&message) {
                found.entry(message.header.index).or_default().insert(address);
            }
        }
        Ok(found)
    }

    /// The permanent neighbours of each network device, by its number.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn neighbours(&mut self) -> io::Result<BTreeMap<u32, BTreeMap<IpAddr, Mac>>> {
        let mut found: BTreeMap<u32, BTreeMap<IpAddr, Mac>> = BTreeMap::new();
        for message in self.ask(RouteNetlinkMessage::GetNeighbour(NeighbourMessage::default()), NLM_F_DUMP)? {
            let RouteNetlinkMessage::NewNeighbour(message) = message else { continue };
            if let Some((addr, mac)) = neighbour(&message) {
                found.entry(message.header.ifindex).or_default().insert(addr, mac);
            }
        }
        Ok(found)
    }

    /// Changes a setting of a VF.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn set(&mut self, pf: &str, vf: u16, what: Setting) -> io::Result<()> {
        let vf = u32::from(vf);
        let info = match what {
            Setting::Mac(mac) => VfInfo::Mac(VfInfoMac::new(vf, &mac.0)),
            Setting::Vlan(vlan) => VfInfo::Vlan(VfInfoVlan::new(vf, vlan.into(), 0)),
            Setting::RateMbps(rate) => VfInfo::Rate(VfInfoRate::new(vf, 0, rate)),
            Setting::SpoofCheck(on) => VfInfo::SpoofCheck(VfInfoSpoofCheck::new(vf, on)),
            Setting::Trust(on) => VfInfo::Trust(VfInfoTrust::new(vf, on)),
        };
        let mut link = LinkMessage::default();
        link.attributes =
            vec![LinkAttribute::IfName(pf.into()), LinkAttribute::VfInfoList(vec![LinkVfInfo(vec![info])])];
        self.change(RouteNetlinkMessage::SetLink(link), 0)
    }

    /// Takes a network device up.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn up(&mut self, netdev: u32) -> io::Result<()> {
        let mut link = LinkMessage::default();
        link.header.index = netdev;
        (link.header.flags, link.header.change_mask) = (LinkFlags::Up, LinkFlags::Up);
        self.change(RouteNetlinkMessage::SetLink(link), 0)
    }

    /// Gives a network device an address.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn add_address(&mut self, netdev: u32, address: Address) -> io::Result<()> {
        let mut message = AddressMessage::default();
        message.header.family = family(address.addr);
        (message.header.prefix_len, message.header.index) = (address.prefix, netdev);
        // The pool's addresses are unique, so there are no duplicates to detect.
        message.header.flags = AddressHeaderFlags::Nodad;
        message.attributes = vec![AddressAttribute::Local(address.addr), AddressAttribute::Address(address.addr)];
        self.change(RouteNetlinkMessage::NewAddress(message), NLM_F_CREATE | NLM_F_REPLACE)
    }

    /// Gives a network device a permanent neighbour.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn add_neighbour(&mut self, netdev: u32, addr: IpAddr, mac: Mac) -> io::Result<()> {
        let mut message = NeighbourMessage::default();
        (message.header.family, message.header.ifindex) = (family(addr), netdev);
        (message.header.state, message.header.kind) = (NeighbourState::Permanent, RouteType::Unicast);
        let destination = match addr {
            IpAddr::V4(a) => NeighbourAddress::Inet(a),
            IpAddr::V6(a) => NeighbourAddress::Inet6(a),
        };
        message.attributes =
            vec![NeighbourAttribute::Destination(destination), NeighbourAttribute::LinkLayerAddress(mac.0.to_vec())];
        self.change(RouteNetlinkMessage::NewNeighbour(message), NLM_F_CREATE | NLM_F_REPLACE)
    }

    fn ask(&mut self, message: RouteNetlinkMessage, flags: u16) -> io::Result<Vec<RouteNetlinkMessage>> {
        let answer = self.0.ask(message.message_type(), flags, &body(&message))?;
        let parse = |kind, body: &[u8]| {
            let mut header = NetlinkHeader::default();
            header.message_type = kind;
            RouteNetlinkMessage::deserialize(&header, body)
        };
        // A message that this version cannot read belongs to a network device of another kind.
        Ok(answer.iter().filter_map(|m| parse(m.kind, &m.body).ok()).collect())
    }

    fn change(&mut self, message: RouteNetlinkMessage, flags: u16) -> io::Result<()> {
        self.0.change(message.message_type(), flags, &body(&message))
    }
}

fn body(message: &RouteNetlinkMessage) -> Vec<u8> {
    let mut bytes = vec![0; message.buffer_len()];
    message.serialize(&mut bytes);
    bytes
}

fn family(addr: IpAddr) -> AddressFamily {
    if addr.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 }
}

/// A VF's number and settings.
fn settings(vf: &LinkVfInfo) -> Option<(u16, Settings)> {
    let (mut number, mut settings) = (None, Settings::default());
    for info in &vf.0 {
        match info {
            VfInfo::Mac(mac) => {
                number = u16::try_from(mac.vf_id).ok();
                let [a, b, c, d, e, f, ..] = mac.mac;
                settings.mac = Mac([a, b, c, d, e, f]);
            }
            VfInfo::Vlan(vlan) => settings.vlan = vlan.vlan_id as u16,
            VfInfo::Rate(rate) => settings.rate_mbps = rate.max_tx_rate,
            VfInfo::SpoofCheck(check) => settings.spoof_check = check.enabled,
            VfInfo::Trust(trust) => settings.trust = trust.enabled,
            _ => {}
        }
    }
    Some((number?, settings))
}

/// The address of a message, if somebody gave it.
fn address(message: &AddressMessage) -> Option<Address> {
    let header = &message.header;
    let of = |local: bool| {
        message.attributes.iter().find_map(|a| match a {
            AddressAttribute::Local(addr) if local => Some(*addr),
            AddressAttribute::Address(addr) if !local => Some(*addr),
            _ => None,
        })
    };
    // `Address` is the other end's on a point-to-point link.
    let addr = of(true).or_else(|| of(false))?;
    let flags = message.attributes.iter().find_map(|a| match a {
        AddressAttribute::Flags(flags) => Some(*flags),
        _ => None,
    });
    let is_permanent =
        flags.map_or(header.flags.contains(AddressHeaderFlags::Permanent), |f| f.contains(AddressFlags::Permanent));
    // Addresses of router advertisements end some time. Those of DHCP do so, too, but show that the host uses it.
    let is_given = header.scope != AddressScope::Link && (is_permanent || addr.is_ipv4());
    is_given.then_some(Address { addr, prefix: header.prefix_len })
}

/// The permanent neighbour of a message.
fn neighbour(message: &NeighbourMessage) -> Option<(IpAddr, Mac)> {
    if message.header.state != NeighbourState::Permanent {
        return None;
    }
    let addr = message.attributes.iter().find_map(|a| match a {
        NeighbourAttribute::Destination(NeighbourAddress::Inet(a)) => Some(IpAddr::V4(*a)),
        NeighbourAttribute::Destination(NeighbourAddress::Inet6(a)) => Some(IpAddr::V6(*a)),
        _ => None,
    })?;
    let mac = message.attributes.iter().find_map(|a| match a {
        NeighbourAttribute::LinkLayerAddress(mac) => mac.first_chunk().copied(),
        _ => None,
    })?;
    Some((addr, Mac(mac)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_of_a_vf_have_its_number() {
        let mac = Mac([2, 0, 0, 0, 0, 9]);
        let vf = LinkVfInfo(vec![
            VfInfo::Mac(VfInfoMac::new(3, &mac.0)),
            VfInfo::Vlan(VfInfoVlan::new(3, 100, 0)),
            VfInfo::Rate(VfInfoRate::new(3, 0, 500)),
            VfInfo::SpoofCheck(VfInfoSpoofCheck::new(3, true)),
            VfInfo::Trust(VfInfoTrust::new(3, false)),
        ]);
        let wanted = Settings { mac, vlan: 100, rate_mbps: 500, spoof_check: true, trust: false };
        assert_eq!(settings(&vf), Some((3, wanted)));
        assert_eq!(settings(&LinkVfInfo(vec![])), None);
    }

    #[test]
    fn addresses_that_nobody_gave_do_not_count() {
        let shown = |addr: &str, scope, flags| {
            let addr: IpAddr = addr.parse().unwrap();
            let mut message = AddressMessage::default();
            (message.header.scope, message.header.prefix_len) = (scope, 24);
            message.attributes = vec![AddressAttribute::Address(addr), AddressAttribute::Flags(flags)];
            address(&message).map(|a| a.to_string())
        };
        let (all, permanent, none) = (AddressScope::Universe, AddressFlags::Permanent, AddressFlags::empty());
        assert_eq!(shown("10.0.0.1", all, permanent).as_deref(), Some("10.0.0.1/24"));
        assert_eq!(shown("10.0.0.1", all, none).as_deref(), Some("10.0.0.1/24"));
        assert_eq!(shown("fd00::1", all, permanent).as_deref(), Some("fd00::1/24"));
        assert_eq!(shown("fd00::1", all, none), None);
        assert_eq!(shown("fe80::1", AddressScope::Link, permanent), None);
    }

    #[test]
    fn the_kernel_lists_the_addresses_of_lo() {
        let mut route = Route::open().unwrap();
        assert!(route.settings("lo").unwrap().is_empty());
        assert_eq!(route.settings("no-such-dev").unwrap_err().raw_os_error(), Some(libc::ENODEV));
        route.addresses().unwrap();
        route.neighbours().unwrap();
    }
}
