//! What this host and its peers tell each other of their groups' numbers, for all groups: packets with the number 0, which come to the
//! supervisor and to no worker.

use std::collections::BTreeSet;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use unirdma_formats::net::{ETH_BYTES, VXLAN_BYTES, VXLAN_PORT};

use super::agree::{ANNOUNCEMENT, Agreement, Disagreement};
use crate::timer::Timer;
use crate::tunnel::{Members, TunnelDrops};

/// What peers do not know is said again after this time, then after twice as long each time, up to the maximum.
const FIRST_REPEAT: Duration = Duration::from_millis(50);
const LAST_REPEAT: Duration = Duration::from_secs(30);
/// Most lines in the log about disagreements, for as long as the peers file is the same.
const MAX_LOGGED: usize = 100;

/// What has been said, and to whom it is to be said again.
pub(super) struct Announcer {
    /// The groups of this host, and those that rules join with them.
    groups: Vec<Members>,
    joined: Vec<Members>,
    agreement: Agreement,
    timer: Timer,
    repeat: Duration,
    disagreements: Vec<Disagreement>,
    /// The log has these.
    logged: BTreeSet<Disagreement>,
    drops: TunnelDrops,
}

/// How packets leave, and which address of this host a peer sees.
pub(super) trait Outlet {
    fn send(&self, packet: &[u8], to: IpAddr);
    fn own_address(&self, to: IpAddr) -> IpAddr;
}

impl Announcer {
    /// Says nothing before [`Announcer::set_groups`].
    ///
    /// # Errors
    /// Those of timers.
    pub fn new() -> io::Result<Self> {
        let timer = Timer::new()?;
        Ok(Announcer {
            groups: Vec::new(),
            joined: Vec::new(),
            agreement: Agreement::default(),
            timer,
            repeat: FIRST_REPEAT,
            disagreements: Vec::new(),
            logged: BTreeSet::new(),
            drops: TunnelDrops::default(),
        })
    }

    /// What becomes readable when something is to be said again: [`Announcer::on_timer`].
    pub fn timer(&self) -> BorrowedFd<'_> {
        self.timer.as_fd()
    }

    /// From now on this host has these groups, and rules join those with them; tells the peers.
    pub fn set_groups(&mut self, groups: Vec<Members>, joined: Vec<Members>, out: &impl Outlet) {
        if (&groups, &joined) == (&self.groups, &self.joined) {
            return;
        }
        (self.groups, self.joined) = (groups, joined);
        let epoch = getrandom::u64().unwrap_or_default().max(1);
        self.agreement.set_groups(self.groups.iter(), epoch);
        self.agreement.set_joined(self.joined.iter());
        self.logged.clear();
        self.repeat = FIRST_REPEAT;
        self.announce(out);
        self.note_disagreements(out);
    }

    /// Says again what peers do not know, if it is time.
    pub fn on_timer(&mut self, out: &impl Outlet) {
        if self.timer.has_fired() {
            self.announce(out);
        }
    }

    /// Says to all peers that do not know what this host has, and once more later.
    fn announce(&mut self, out: &impl Outlet) {
        let uninformed = self.agreement.uninformed();
        for &host in &uninformed {
            self.agreement.messages(host).iter().for_each(|m| out.send(m, host));
        }
        let after = (!uninformed.is_empty()).then_some(self.repeat);
        self.repeat = (2 * self.repeat).min(LAST_REPEAT);
        if let Err(e) = self.timer.set(after) {
            tracing::error!("what peers do not know of this host's groups is not said again: {e}");
        }
    }

    /// A packet came to the supervisor's socket: an announcement, or one with a number that no worker has. True if a peer has said
    /// something new.
    pub fn on_packet(&mut self, from: SocketAddr, packet: &[u8], out: &impl Outlet) -> bool {
        let from_peer = from.port() == VXLAN_PORT;
        let from = from.ip();
        let vni = packet.get(4..7).map(|n| u32::from_be_bytes([0, n[0], n[1], n[2]]));
        let frame = packet.get(VXLAN_BYTES..).filter(|f| f.len() >= ETH_BYTES && packet[0] & 8 != 0);
        let count = match (vni, frame) {
            // Any user of a peer host can bind another port.
            _ if !from_peer => &mut self.drops.not_a_peer,
            (Some(ANNOUNCEMENT), Some(frame)) => {
                if !self.agreement.has_peer(from) {
                    &mut self.drops.not_a_peer
                } else if let Some(news) = self.agreement.on_message(from, frame) {
                    if news {
                        self.agreement.messages(from).iter().for_each(|m| out.send(m, from));
                        self.note_disagreements(out);
                    }
                    return news;
                } else {
                    &mut self.drops.malformed
                }
            }
            (Some(_), Some(_)) => &mut self.drops.no_group,
            _ => &mut self.drops.malformed,
        };
        *count += 1;
        false
    }

    /// Finds out who disagrees now, and logs what the log does not have yet.
    fn note_disagreements(&mut self, out: &impl Outlet) {
        self.disagreements = self.agreement.disagreements(|peer| out.own_address(peer));
        for d in &self.disagreements {
            if self.logged.len() < MAX_LOGGED && self.logged.insert(d.clone()) {
                tracing::warn!("{d}");
            }
        }
    }

    /// True if a host has said that a group has this number there.
    pub fn agrees(&self, host: IpAddr, vni: u32, group: &str) -> bool {
        self.agreement.agrees(host, vni, group)
    }

    /// What the supervisor's socket has dropped.
    pub fn drops(&self) -> TunnelDrops {
        self.drops
    }

    /// Where peers have other numbers than this host.
    pub fn disagreements(&self) -> &[Disagreement] {
        &self.disagreements
    }

    /// Peers that have said nothing yet.
    pub fn silent(&self) -> Vec<IpAddr> {
        self.agreement.silent()
    }
}
