//! The centre's peers, and the changes of the network that follow from their changes.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;

use unirdma_fleet::agent::{addresses, mac};
use unirdma_fleet::v1;
use unirdma_formats::Mac;

use crate::peer_change::{Change, Place};

/// The centre's table of other hosts and their vRNICs.
#[derive(Default)]
pub(crate) struct Neighbours {
    /// This host's name and addresses. It cannot reach hosts that have no address of the same IP version.
    me: String,
    own: Vec<IpAddr>,
    places: BTreeMap<String, Vec<IpAddr>>,
    peers: BTreeMap<String, v1::Peer>,
    at: BTreeMap<String, BTreeSet<String>>,
    /// The peer that has each address and MAC of a group. Two peers may exchange them, in any order.
    holders: HashMap<(String, IpAddr), String>,
    macs: HashMap<(String, Mac), String>,
}

impl Neighbours {
    /// The table of a host with these addresses.
    pub fn new(own: &[IpAddr]) -> Self {
        Neighbours { own: own.to_vec(), ..Neighbours::default() }
    }

    /// Sets this host's name.
    pub fn set_me(&mut self, name: &str) {
        self.me = name.into();
    }

    /// Sets or removes a vRNIC of this host. For groups that a rule joins with its group, it is a peer at this host.
    pub fn set_own(&mut self, name: &str, vrnic: Option<&v1::Vrnic>) -> Vec<Change> {
        let peer = |v: &v1::Vrnic| v1::Peer {
            name: own_name(name),
            group: v.group.clone(),
            host: self.me.clone(),
            ips: v.ips.iter().map(|a| a.split('/').next().unwrap_or_default().into()).collect(),
            mac: v.mac.clone(),
        };
        let peer = vrnic.map(peer);
        self.set_peer(&own_name(name), peer.as_ref())
    }

    /// Sets or removes the addresses of a host.
    pub fn set_place(&mut self, host: &str, place: Option<&v1::Place>) -> Vec<Change> {
        match place {
            Some(p) => _ = self.places.insert(host.into(), addresses(&p.addresses).unwrap_or_default()),
            None => _ = self.places.remove(host),
        }
        let there: Vec<v1::Peer> =
            self.at.get(host).into_iter().flatten().filter_map(|name| self.peers.get(name).cloned()).collect();
        there.iter().flat_map(|p| self.show(p)).collect()
    }

    /// Sets or removes a vRNIC on another host.
    pub fn set_peer(&mut self, name: &str, peer: Option<&v1::Peer>) -> Vec<Change> {
        let before = match peer {
            Some(p) => self.peers.insert(name.into(), p.clone()),
            None => self.peers.remove(name),
        };
        let mut changes = Vec::new();
        if let Some(b) = &before {
            if let Some(at) = self.at.get_mut(&b.host) {
                at.remove(name);
            }
            self.at.retain(|host, at| *host != b.host || !at.is_empty());
            changes = self.hide(b, peer);
        }
        if let Some(p) = peer {
            self.at.entry(p.host.clone()).or_default().insert(name.into());
            changes.extend(self.show(p));
        }
        changes
    }

    /// The peer's name at an address of a group.
    pub fn name_of(&self, group: &str, address: IpAddr) -> Option<&str> {
        self.holders.get(&(group.into(), address)).map(|name| name.trim_start_matches(OWN))
    }

    /// The address at which a host is reached. Of the IP versions that both hosts have, IPv4 comes first, regardless of
    /// the order of addresses. So each host sends from the address at which the other one reaches it.
    fn reach(&self, host: &str) -> Option<IpAddr> {
        if host == self.me {
            return self.own.first().copied();
        }
        let ours = |a: &&IpAddr| self.own.iter().any(|o| o.is_ipv4() == a.is_ipv4());
        self.places.get(host)?.iter().filter(ours).min_by_key(|a| a.is_ipv6()).copied()
    }

    fn show(&mut self, p: &v1::Peer) -> Vec<Change> {
        let host = self.reach(&p.host);
        let (mut changes, group) = (Vec::new(), || p.group.clone());
        for address in addresses(&p.ips).unwrap_or_default() {
            self.holders.insert((group(), address), p.name.clone());
            let place = host.map(|host| Place { host, foreign: false });
            changes.push(Change::Address { group: group(), address, place });
        }
        if let Some(mac) = mac(&p.mac).map(Mac) {
            self.macs.insert((group(), mac), p.name.clone());
            changes.push(Change::Mac { group: group(), mac, host });
        }
        changes
    }

    /// Removes the addresses and the MAC that `p` has and `now` has not, unless another peer has them meanwhile.
    fn hide(&mut self, p: &v1::Peer, now: Option<&v1::Peer>) -> Vec<Change> {
        let now = now.filter(|n| n.group == p.group);
        let (mut changes, group) = (Vec::new(), || p.group.clone());
        let (stay, stays) = (now.and_then(|n| addresses(&n.ips)).unwrap_or_default(), now.and_then(|n| mac(&n.mac)));
        for address in addresses(&p.ips).unwrap_or_default().into_iter().filter(|a| !stay.contains(a)) {
            if self.holders.get(&(group(), address)) == Some(&p.name) {
                self.holders.remove(&(group(), address));
                changes.push(Change::Address { group: group(), address, place: None });
            }
        }
        if let Some(mac) = mac(&p.mac).filter(|m| stays != Some(*m)).map(Mac)
            && self.macs.get(&(group(), mac)) == Some(&p.name)
        {
            self.macs.remove(&(group(), mac));
            changes.push(Change::Mac { group: group(), mac, host: None });
        }
        changes
    }
}

/// Prefix of this host's own vRNICs, which may be on another host before or afterwards. No name begins with it.
const OWN: char = '=';

fn own_name(name: &str) -> String {
    format!("{OWN}{name}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn peer(name: &str, host: &str, address: &str, mac: u8) -> v1::Peer {
        let (name, group, host) = (name.into(), "blue".into(), host.into());
        v1::Peer { name, group, host, ips: vec![address.into()], mac: format!("02:00:00:00:00:{mac:02x}") }
    }

    fn place(host: &str, addresses: &[&str]) -> v1::Place {
        v1::Place { host: host.into(), addresses: addresses.iter().map(|a| a.to_string()).collect() }
    }

    fn address(text: &str, host: Option<&str>) -> Change {
        let place = host.map(|h| Place { host: ip(h), foreign: false });
        Change::Address { group: "blue".into(), address: ip(text), place }
    }

    fn mac_at(mac: u8, host: Option<&str>) -> Change {
        Change::Mac { group: "blue".into(), mac: Mac([2, 0, 0, 0, 0, mac]), host: host.map(ip) }
    }

    #[test]
    fn a_move_is_two_changes_and_a_host_that_moves_takes_its_peers_along() {
        let mut n = Neighbours::new(&[ip("192.168.7.1")]);
        assert!(n.set_place("h2", Some(&place("h2", &["fd00::2", "192.168.7.2"]))).is_empty());
        n.set_place("h3", Some(&place("h3", &["192.168.7.3"])));
        let moved = |host| [address("10.0.0.2", Some(host)), mac_at(2, Some(host))];
        assert_eq!(n.set_peer("b", Some(&peer("b", "h2", "10.0.0.2", 2))), moved("192.168.7.2"));
        assert_eq!(n.set_peer("b", Some(&peer("b", "h3", "10.0.0.2", 2))), moved("192.168.7.3"));
        assert!(n.set_place("h2", None).is_empty(), "nobody is there any more");
        assert_eq!(n.set_place("h3", Some(&place("h3", &["192.168.7.30"]))), moved("192.168.7.30"));
        assert_eq!(n.set_place("h3", None), [address("10.0.0.2", None), mac_at(2, None)]);
        // A peer becomes reachable when its host's addresses are known.
        assert_eq!(n.set_place("h3", Some(&place("h3", &["192.168.7.3"]))), moved("192.168.7.3"));
        assert_eq!(n.name_of("blue", ip("10.0.0.2")), Some("b"));
        assert_eq!(n.set_peer("b", None), [address("10.0.0.2", None), mac_at(2, None)]);
        assert!(n.holders.is_empty() && n.macs.is_empty() && n.at.is_empty());
    }

    #[test]
    fn two_hosts_reach_each_other_by_the_same_kind_of_address_whatever_the_order() {
        let hosts = ["192.168.7.1 fd07::1", "fd07::2 192.168.7.2", "fd07::3", "192.168.7.4"];
        let addresses: Vec<Vec<&str>> = hosts.iter().map(|h| h.split(' ').collect()).collect();
        let kind = |here: usize, there: usize| {
            let own: Vec<IpAddr> = addresses[here].iter().map(|a| ip(a)).collect();
            let mut n = Neighbours::new(&own);
            n.set_place("there", Some(&place("there", &addresses[there])));
            n.reach("there").map(|a| a.is_ipv6())
        };
        let seen = |pairs: [(usize, usize); 6]| pairs.map(|(a, b)| (kind(a, b), kind(b, a)));
        let (v4, v6, none) = (Some(false), Some(true), None);
        assert_eq!(
            seen([(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]),
            [(v4, v4), (v6, v6), (v4, v4), (v6, v6), (v4, v4), (none, none)]
        );
    }

    #[test]
    fn two_peers_may_exchange_their_addresses() {
        let mut n = Neighbours::new(&[ip("192.168.7.1")]);
        n.set_place("h2", Some(&place("h2", &["192.168.7.2"])));
        n.set_peer("a", Some(&peer("a", "h2", "10.0.0.1", 1)));
        n.set_peer("b", Some(&peer("b", "h2", "10.0.0.2", 2)));
        let here = Some("192.168.7.2");
        // `a` takes the address of `b`, which gets another one afterwards.
        let first = n.set_peer("a", Some(&peer("a", "h2", "10.0.0.2", 1)));
        assert_eq!(first, [address("10.0.0.1", None), address("10.0.0.2", here), mac_at(1, here)]);
        let second = n.set_peer("b", Some(&peer("b", "h2", "10.0.0.1", 2)));
        assert_eq!(second, [address("10.0.0.1", here), mac_at(2, here)]);
    }

    #[test]
    fn a_vrnic_that_moves_here_is_here_whichever_of_the_two_changes_comes_first() {
        let mut n = Neighbours::new(&[ip("192.168.7.1")]);
        n.set_me("h1");
        n.set_place("h2", Some(&place("h2", &["192.168.7.2"])));
        n.set_peer("a", Some(&peer("a", "h2", "10.0.0.1", 1)));
        let ips = vec!["10.0.0.1/16".into()];
        let own = v1::Vrnic { group: "blue".into(), ips, mac: "02:00:00:00:00:01".into(), ..v1::Vrnic::default() };
        let here = Some("192.168.7.1");
        assert_eq!(n.set_own("a", Some(&own)), [address("10.0.0.1", here), mac_at(1, here)]);
        assert!(n.set_peer("a", None).is_empty());
        assert_eq!(n.name_of("blue", ip("10.0.0.1")), Some("a"));
        // And in the opposite direction.
        let there = Some("192.168.7.2");
        assert_eq!(
            n.set_peer("a", Some(&peer("a", "h2", "10.0.0.1", 1))),
            [address("10.0.0.1", there), mac_at(1, there)]
        );
        assert!(n.set_own("a", None).is_empty());
    }
}
