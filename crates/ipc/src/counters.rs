//! Counters and states that a worker reports.

use std::net::IpAddr;
use std::ops::AddAssign;

use serde::{Deserialize, Serialize};

/// Counters of a port.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PortCounters {
    /// Packets sent.
    pub sent: u64,
    /// Packets received.
    pub received: u64,
    /// Received with a wrong ICRC, and dropped.
    pub icrc_errors: u64,
    /// Not sent, because the network refused them.
    pub send_errors: u64,
}

impl AddAssign for PortCounters {
    fn add_assign(&mut self, o: Self) {
        let PortCounters { sent, received, icrc_errors, send_errors } = self;
        *sent += o.sent;
        *received += o.received;
        *icrc_errors += o.icrc_errors;
        *send_errors += o.send_errors;
    }
}

/// Dropped packets of the tunnel, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TunnelDrops {
    /// From a host or port that does not belong to a peer.
    pub not_a_peer: u64,
    /// For a group that this host or the sender's host does not have.
    pub no_group: u64,
    /// With a number that the sender's host has not announced for this group.
    pub not_agreed: u64,
    /// With an Ethernet, ARP or neighbour discovery address that lives elsewhere.
    pub address: u64,
    /// Too short, or not VXLAN.
    pub malformed: u64,
}

impl AddAssign for TunnelDrops {
    fn add_assign(&mut self, o: Self) {
        let TunnelDrops { not_a_peer, no_group, not_agreed, address, malformed } = self;
        *not_a_peer += o.not_a_peer;
        *no_group += o.no_group;
        *not_agreed += o.not_agreed;
        *address += o.address;
        *malformed += o.malformed;
    }
}

/// Dropped packets from hosts of a group, which do not prove that their sender has the group's secret.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SealDrops {
    /// Packets that are not sealed.
    pub unsealed: u64,
    /// Packets with a wrong tag, or of an unknown session.
    pub wrong_tag: u64,
    /// Packets that were received before, or arrived far too late.
    pub replayed: u64,
}

/// State of a group's secrets.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SealInfo {
    /// Numbers of the accepted secrets, oldest first.
    pub secrets: Vec<u8>,
    /// Number of the secret with which this host sends, if there is one.
    pub sends_with: Option<u8>,
    /// Hosts of the group that have not shown yet that they have any of the secrets.
    pub silent: Vec<IpAddr>,
    /// Hosts that have shown only that they have an older secret than the one with which this host sends.
    pub behind: Vec<IpAddr>,
    /// Counters of dropped packets.
    pub drops: SealDrops,
    /// The groups that rules join with it and with which packets are sealed.
    #[serde(default)]
    pub joined: Vec<PairInfo>,
}

/// State of the secrets of a pair of groups that a rule joins.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PairInfo {
    /// The other group.
    pub group: String,
    /// Numbers of the accepted secrets, oldest first. Without any, no packets pass between the two groups.
    pub secrets: Vec<u8>,
    /// Number of the secret with which this host sends, if there is one.
    pub sends_with: Option<u8>,
    /// Hosts of the other group that have not shown yet that they have any of the secrets.
    pub silent: Vec<IpAddr>,
    /// Hosts that have shown only that they have an older secret than the one with which this host sends.
    pub behind: Vec<IpAddr>,
}

/// Frames of a vRNIC's interface that were refused, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FrameDrops {
    /// Sent from another Ethernet address.
    pub mac: u64,
    /// Sent from another IP address.
    pub address: u64,
    /// ARP or neighbour discovery that announced another interface's address, or spoke as a router.
    pub neighbour: u64,
    /// Neither IPv4, IPv6 nor ARP, or with a VLAN tag.
    pub protocol: u64,
    /// Too short, or ambiguous.
    pub malformed: u64,
    /// To or from an address with which no rule allows it to talk.
    #[serde(default)]
    pub rules: u64,
}

impl AddAssign for FrameDrops {
    fn add_assign(&mut self, o: Self) {
        let FrameDrops { mac, address, neighbour, protocol, malformed, rules } = self;
        *mac += o.mac;
        *address += o.address;
        *neighbour += o.neighbour;
        *protocol += o.protocol;
        *malformed += o.malformed;
        *rules += o.rules;
    }
}
