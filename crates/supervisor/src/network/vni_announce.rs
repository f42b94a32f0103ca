//! Announcements of groups' numbers between this host and its peers, for all groups. They are packets with the number
//! 0, which the supervisor receives and no worker does.

use std::collections::BTreeSet;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use unirdma_formats::net::{ETH_BYTES, VXLAN_BYTES, VXLAN_PORT};
use unirdma_ipc::counters::TunnelDrops;
use unirdma_ipc::network::Members;
use unirdma_ipc::timer::Timer;

use super::vni_agreement::{ANNOUNCEMENT, Agreement, Disagreement};

/// Time before the first repetition to uninformed peers. It doubles with each repetition, up to the maximum.
const FIRST_REPEAT: Duration = Duration::from_millis(50);
const LAST_REPEAT: Duration = Duration::from_secs(30);
/// Most disagreements that are logged while the groups and their peers do not change.
const MAX_LOGGED: usize = 100;

/// Announces this host's groups to its peers, and repeats that until they know.
pub(super) struct Announcer {
    /// The groups of this host, and the groups that rules join with them.
    groups: Vec<Members>,
    joined: Vec<Members>,
    agreement: Agreement,
    timer: Timer,
    repeat: Duration,
    disagreements: Vec<Disagreement>,
    /// Disagreements that were logged already.
    logged: BTreeSet<Disagreement>,
    drops: TunnelDrops,
}

/// Sends packets, and knows the address of this host that a peer sees.
pub(super) trait Outlet {
    fn send(&self, packet: &[u8], to: IpAddr);
    fn own_address(&self, to: IpAddr) -> IpAddr;
}

impl Announcer {
    /// Announces nothing before [`Announcer::set_groups`].
    ///
    /// # Errors
    /// Errors of timers.
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

    /// A descriptor that becomes readable when [`Announcer::on_timer`] must be called.
    pub fn timer(&self) -> BorrowedFd<'_> {
        self.timer.as_fd()
    }

    /// Sets this host's groups, and the groups that rules join with them. Announces them to the peers.
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

    /// Repeats the announcement if it is due.
    pub fn on_timer(&mut self, out: &impl Outlet) {
        if self.timer.has_fired() {
            self.announce(out);
        }
    }

    /// Announces this host's groups to all uninformed peers, and sets the timer for a repetition.
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

    /// Handles a packet of the supervisor's socket: an announcement, or a packet with a number that no worker has. True
    /// if a peer has announced something new.
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

    /// Determines the present disagreements, and logs new ones.
    fn note_disagreements(&mut self, out: &impl Outlet) {
        self.disagreements = self.agreement.disagreements(|peer| out.own_address(peer));
        for d in &self.disagreements {
            if self.logged.len() < MAX_LOGGED && self.logged.insert(d.clone()) {
                tracing::warn!("{d}");
            }
        }
    }

    /// True if a host has announced that a group has this number there.
    pub fn agrees(&self, host: IpAddr, vni: u32, group: &str) -> bool {
        self.agreement.agrees(host, vni, group)
    }

    /// Packets that the supervisor's socket has dropped.
    pub fn drops(&self) -> TunnelDrops {
        self.drops
    }

    /// Differences between this host's numbers and those that peers have announced.
    pub fn disagreements(&self) -> &[Disagreement] {
        &self.disagreements
    }

    /// Peers that have announced nothing yet.
    pub fn silent(&self) -> Vec<IpAddr> {
        self.agreement.silent()
    }
}
