//! Limits of connections, for each kind of caller. A connection that has shown neither certificate nor token is a
//! stranger's: it lasts a short time, and is the first to be closed when there are too many.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::sync::Notify;
use tokio::time::Instant;
use unirdma_fleet::Refusal;

use crate::rate_limits::{Full, Limit, Limits, Party, Share, Shares};

/// How long a stranger's connection lasts at most.
const STRANGER: Duration = Duration::from_secs(30);
/// Time for which a stranger's connection cannot be closed in favour of a newer one.
const GRACE: Duration = Duration::from_secs(3);
/// Descriptors that are not for connections.
const RESERVED: usize = 128;

/// The connections of one listener.
pub(crate) struct Connections {
    connections: Arc<Shares>,
    strangers: Mutex<BTreeMap<u64, Stranger>>,
    /// How long a stranger's connection lasts at most.
    lasts: Duration,
    next: AtomicU64,
}

struct Stranger {
    share: Share,
    since: Instant,
    out: Arc<Notify>,
}

/// A connection, as its calls see it.
pub(crate) struct Guest {
    doors: Arc<Connections>,
    number: u64,
    address: IpAddr,
    /// Notified when the connection must end.
    out: Arc<Notify>,
    /// The party that is charged for the connection, once it is known.
    known: OnceLock<Share>,
}

/// Raises this process's limit of descriptors to its maximum. Returns how many of them connections may use.
pub(crate) fn descriptors() -> usize {
    let limit = getrlimit(Resource::Nofile);
    let highest = Rlimit { current: limit.maximum, maximum: limit.maximum };
    let most = if setrlimit(Resource::Nofile, highest).is_ok() { limit.maximum } else { limit.current };
    most.map_or(usize::MAX, |n| usize::try_from(n).unwrap_or(usize::MAX)).saturating_sub(RESERVED)
}

impl Connections {
    /// The limits of a centre with this number of descriptors for connections. Most are for hosts, each of which has
    /// one.
    pub fn of_centre(descriptors: usize) -> Arc<Connections> {
        let part = |n: usize| n.min(descriptors.saturating_mul(n) / 30_000).max(8);
        Connections::new(Limits {
            strangers: Limit { all: part(2_000), each: 512 },
            tokens: Limit { all: part(4_000), each: 64 },
            admins: Limit { all: part(2_000), each: 512 },
            hosts: Limit { all: part(20_000), each: 8 },
            centres: Limit { all: part(2_000), each: 512 },
        })
    }

    /// The limits of a metrics page, which needs no authentication.
    pub fn of_metrics() -> Arc<Connections> {
        let none = Limit { all: 0, each: 0 };
        let strangers = Limit { all: 64, each: 8 };
        Connections::new(Limits { strangers, tokens: none, admins: none, hosts: none, centres: none })
    }

    fn new(limits: Limits) -> Arc<Connections> {
        let connections = Shares::new("connections", limits);
        Arc::new(Connections { connections, strangers: Mutex::default(), lasts: STRANGER, next: AtomicU64::new(0) })
    }

    fn strangers(&self) -> MutexGuard<'_, BTreeMap<u64, Stranger>> {
        self.strangers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Accepts a stranger's connection. If the limit is reached, the oldest stranger of this address, or of all
    /// addresses, is closed, provided that it is older than [`GRACE`]. `None`: there is no room.
    pub fn enter(self: &Arc<Self>, address: IpAddr, now: Instant) -> Option<Arc<Guest>> {
        let party = Party::stranger(address);
        let mut strangers = self.strangers();
        let share = match self.connections.take(&party, 1) {
            Ok(share) => share,
            Err(full) => {
                let (&oldest, _) = strangers.iter().find(|(_, s)| full == Full::All || s.share.party == party)?;
                if now.saturating_duration_since(strangers[&oldest].since) < GRACE {
                    return None;
                }
                strangers.remove(&oldest)?.out.notify_one();
                self.connections.take(&party, 1).ok()?
            }
        };
        let (number, out) = (self.next.fetch_add(1, Ordering::Relaxed), Arc::new(Notify::new()));
        strangers.insert(number, Stranger { share, since: now, out: out.clone() });
        Some(Arc::new(Guest { doors: self.clone(), number, address, out, known: OnceLock::new() }))
    }
}

impl Guest {
    /// The party that is charged for a call without certificate and token.
    pub fn stranger(&self) -> Party {
        Party::stranger(self.address)
    }

    /// Assigns the connection to the first party that authenticates itself, which is charged for it.
    ///
    /// # Errors
    /// The party has too many connections.
    pub fn is_of(&self, party: &Party) -> Result<(), Refusal> {
        if self.known.get().is_some() {
            return Ok(());
        }
        let connections = &self.doors.connections;
        let share = connections.take(party, 1).map_err(|full| connections.refusal(party, full))?;
        // Of two concurrent calls, the first one sets the party.
        let _ = self.known.set(share);
        self.doors.strangers().remove(&self.number);
        Ok(())
    }

    /// Returns when the connection must end.
    pub async fn must_go(&self) {
        tokio::select! {
            () = self.out.notified() => return,
            () = tokio::time::sleep(self.doors.lasts) => {}
        }
        if self.known.get().is_some() {
            std::future::pending().await
        }
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.doors.strangers().remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn doors(each: usize, all: usize) -> Arc<Connections> {
        let l = Limit { all, each };
        Connections::new(Limits { strangers: l, tokens: l, admins: l, hosts: l, centres: l })
    }

    fn address(n: u8) -> IpAddr {
        [10, 0, 0, n].into()
    }

    #[tokio::test]
    async fn the_oldest_stranger_makes_room_once_it_had_its_time() {
        let (doors, begun) = (doors(2, 3), Instant::now());
        let enter = |n, at| doors.enter(address(n), at);
        let (first, second) = (enter(1, begun).unwrap(), enter(1, begun).unwrap());
        assert!(enter(1, begun).is_none(), "the others have just come");
        let other = enter(2, begun).unwrap();
        assert!(enter(3, begun).is_none());
        let later = begun + GRACE;
        let third = enter(1, later).unwrap();
        first.must_go().await;
        let fourth = enter(3, later).unwrap();
        second.must_go().await;
        assert_eq!(doors.strangers().len(), 3);
        drop((first, second, third, other, fourth));
        assert!(doors.strangers().is_empty());
        (1..=3).for_each(|n| drop(enter(n, later).unwrap()));
    }

    #[tokio::test]
    async fn who_is_known_stays_and_takes_no_room_of_strangers() {
        let mut doors = doors(1, 1);
        Arc::get_mut(&mut doors).unwrap().lasts = Duration::from_millis(20);
        let guest = doors.enter(address(1), Instant::now()).unwrap();
        let token = Party::Token("t".into());
        guest.is_of(&token).unwrap();
        guest.is_of(&Party::Token("u".into())).unwrap();
        let next = doors.enter(address(1), Instant::now()).unwrap();
        let e = next.is_of(&token).unwrap_err();
        assert_eq!(e.what, "token t has the most connections, 1; try again when some have ended");
        next.must_go().await;
        assert!(tokio::time::timeout(Duration::from_millis(40), guest.must_go()).await.is_err());
        drop(guest);
        next.is_of(&token).unwrap();
    }

    #[test]
    fn few_descriptors_are_shared_as_many_are() {
        let limits = |descriptors| {
            let doors = Connections::of_centre(descriptors);
            let stranger = |n: u32| Party::Stranger(IpAddr::from(n.to_be_bytes()));
            (0..3_000).map_while(|n| doors.connections.take(&stranger(n), 1).ok()).collect::<Vec<_>>().len()
        };
        assert_eq!((limits(usize::MAX), limits(3_000)), (2_000, 200));
    }
}
