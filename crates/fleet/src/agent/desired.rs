//! The pieces of a host's table, with their keys and their checks.

use std::net::IpAddr;

use crate::model::{MAX_VLAN, MAX_VNI, MAX_WEIGHT};
use crate::v1::{self, item::Item, item_key};

/// The key of a piece. Its order is the order in which pieces are applied: a vRNIC serves programs once its peers and
/// rules are known.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[allow(missing_docs)]
pub enum Key {
    Group(String),
    /// A group, a second group or nothing, and the secret's number.
    Secret(String, String, u32),
    Rule(String),
    /// A host.
    Place(String),
    /// A vRNIC on another host.
    Peer(String),
    /// A vRNIC on this host.
    Vrnic(String),
}

impl Key {
    /// Parses the key of a message; `None`: there is none.
    pub fn of(key: v1::ItemKey) -> Option<Key> {
        Some(match key.key? {
            item_key::Key::Group(name) => Key::Group(name),
            item_key::Key::Vrnic(name) => Key::Vrnic(name),
            item_key::Key::Place(name) => Key::Place(name),
            item_key::Key::Peer(name) => Key::Peer(name),
            item_key::Key::Rule(name) => Key::Rule(name),
            item_key::Key::Secret(s) => Key::Secret(s.group, s.other, s.id),
        })
    }

    /// The key as a message.
    pub fn message(&self, force: bool) -> v1::ItemKey {
        let key = match self.clone() {
            Key::Group(name) => item_key::Key::Group(name),
            Key::Vrnic(name) => item_key::Key::Vrnic(name),
            Key::Place(name) => item_key::Key::Place(name),
            Key::Peer(name) => item_key::Key::Peer(name),
            Key::Rule(name) => item_key::Key::Rule(name),
            Key::Secret(group, other, id) => item_key::Key::Secret(v1::SecretKey { group, other, id }),
        };
        v1::ItemKey { key: Some(key), force }
    }
}

/// An error in a piece.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum ItemError {
    #[error("{0:?} is no name")]
    Name(String),
    #[error("group {} has the VNI {}, the weight {} and the VLAN {}", .0.name, .0.vni, .0.weight, .0.vlan)]
    Group(v1::HostGroup),
    #[error("vRNIC {name} has the addresses {ips:?}, the MAC {mac:?} and the GUID {guid:?}")]
    Vrnic { name: String, ips: Vec<String>, mac: String, guid: String },
    #[error("host {host} has the addresses {addresses:?}")]
    Place { host: String, addresses: Vec<String> },
    #[error("peer {name} has the addresses {ips:?} and the MAC {mac:?}")]
    Peer { name: String, ips: Vec<String>, mac: String },
    #[error("rule {0} has one end")]
    RuleEnd(String),
    #[error("rule {name} has the addresses {ips:?}")]
    RuleAddresses { name: String, ips: Vec<String> },
    #[error("rule {name} has the action {action} and the priority {priority}")]
    Rule { name: String, action: i32, priority: u32 },
    #[error("a secret is of no group")]
    SecretKey,
    #[error("a secret of group {group} and {other:?} has the number {id} and {bytes} bytes")]
    Secret { group: String, other: String, id: u32, bytes: usize },
}

/// Checks a piece: names, addresses and ranges of numbers. Returns its key.
///
/// # Errors
/// The first mistake in it.
pub fn key_of(item: &Item) -> Result<Key, ItemError> {
    match item {
        Item::Group(g) => {
            check_name(&g.name)?;
            if !(1..=MAX_VNI).contains(&g.vni) || !(1..=MAX_WEIGHT).contains(&g.weight) || g.vlan > MAX_VLAN {
                return Err(ItemError::Group(g.clone()));
            }
            Ok(Key::Group(g.name.clone()))
        }
        Item::Vrnic(v) => {
            check_name(&v.name)?;
            check_name(&v.group)?;
            let ips = v.ips.iter().all(|ip| network(ip).is_some());
            if !ips || v.ips.is_empty() || mac(&v.mac).is_none() || guid(&v.guid).is_none() {
                let v1::Vrnic { name, ips, mac, guid, .. } = v.clone();
                return Err(ItemError::Vrnic { name, ips, mac, guid });
            }
            Ok(Key::Vrnic(v.name.clone()))
        }
        Item::Place(p) => {
            check_name(&p.host)?;
            addresses(&p.addresses)
                .ok_or_else(|| ItemError::Place { host: p.host.clone(), addresses: p.addresses.clone() })?;
            Ok(Key::Place(p.host.clone()))
        }
        Item::Peer(p) => {
            [&p.name, &p.group, &p.host].into_iter().try_for_each(|n| check_name(n))?;
            if addresses(&p.ips).is_none() || mac(&p.mac).is_none() {
                return Err(ItemError::Peer { name: p.name.clone(), ips: p.ips.clone(), mac: p.mac.clone() });
            }
            Ok(Key::Peer(p.name.clone()))
        }
        Item::Rule(r) => {
            check_name(&r.name)?;
            for end in [&r.from, &r.to] {
                let end = end.as_ref().ok_or_else(|| ItemError::RuleEnd(r.name.clone()))?;
                check_name(&end.group)?;
                addresses(&end.ips)
                    .ok_or_else(|| ItemError::RuleAddresses { name: r.name.clone(), ips: end.ips.clone() })?;
            }
            if v1::rule::Action::try_from(r.action).is_err() || r.priority > 0xffff {
                return Err(ItemError::Rule { name: r.name.clone(), action: r.action, priority: r.priority });
            }
            Ok(Key::Rule(r.name.clone()))
        }
        Item::Secret(s) => {
            let key = s.key.as_ref().ok_or(ItemError::SecretKey)?;
            check_name(&key.group)?;
            let pair = key.other.is_empty() || check_name(&key.other).is_ok() && key.group < key.other;
            if s.value.len() != 32 || !(1..=255).contains(&key.id) || !pair {
                let v1::SecretKey { group, other, id } = key.clone();
                return Err(ItemError::Secret { group, other, id, bytes: s.value.len() });
            }
            Ok(Key::Secret(key.group.clone(), key.other.clone(), key.id))
        }
    }
}

fn check_name(name: &str) -> Result<(), ItemError> {
    let letters = name.bytes().all(|b| b.is_ascii_alphanumeric() || b"_.-".contains(&b));
    let ok = (1..=32).contains(&name.len()) && letters && name.as_bytes()[0].is_ascii_alphanumeric();
    if ok { Ok(()) } else { Err(ItemError::Name(name.into())) }
}

/// An address with its prefix length, as in `10.0.0.1/16`.
pub fn network(text: &str) -> Option<(IpAddr, u8)> {
    let (address, prefix) = text.split_once('/')?;
    let address: IpAddr = address.parse().ok()?;
    let prefix = prefix.parse().ok().filter(|p| *p <= if address.is_ipv4() { 32 } else { 128 })?;
    Some((address, prefix))
}

/// Addresses without prefix lengths.
pub fn addresses(texts: &[String]) -> Option<Vec<IpAddr>> {
    texts.iter().map(|t| t.parse().ok()).collect()
}

/// An Ethernet address of a single interface, as in `02:00:0a:00:00:01`.
pub fn mac(text: &str) -> Option<[u8; 6]> {
    let byte = |t: &str| {
        let digits = t.len() == 2 && t.bytes().all(|b| b.is_ascii_hexdigit());
        u8::from_str_radix(t, 16).ok().filter(|_| digits)
    };
    let bytes: Option<Vec<u8>> = text.split(':').map(byte).collect();
    let mac: [u8; 6] = bytes?.try_into().ok()?;
    (mac[0] & 1 == 0).then_some(mac)
}

/// A GUID as 16 hexadecimal digits.
pub fn guid(text: &str) -> Option<u64> {
    let digits = text.len() == 16 && text.bytes().all(|b| b.is_ascii_hexdigit());
    u64::from_str_radix(text, 16).ok().filter(|_| digits)
}
