//! The ledger: an account for each vRNIC of the scarce resources that it makes its worker hold, and which all vRNICs of
//! the worker share.
//!
//! Apart from the operator's limits, a vRNIC may hold half of what the others leave. The first vRNIC gets at most half,
//! the next one half of the rest, and so on, so that a further vRNIC always gets something.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use unirdma_mem::holes::Room;

use crate::closer::Closer;

/// A resource that accounts count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resource {
    /// File descriptors: sockets, memory regions, event channels, kick and call eventfds, and descriptors of incomplete
    /// messages.
    Descriptors,
    /// Mappings of memory files (`vm.max_map_count`).
    Mappings,
    /// Bytes of address space taken by mappings.
    AddressSpace,
    /// Pieces of MRs that are kept as lists.
    Pieces,
    /// Bytes of pages that the worker has allocated in sparse memory files. A page is charged when a transfer touches
    /// it, so there is no request that could be refused: a vRNIC that exceeds its limit may lose the session that has
    /// the file.
    Filled,
    /// Bytes of the worker's own memory: data that waits for a vRNIC's programs, and data besides objects that their
    /// commands have made.
    Kept,
}

/// Number of kinds of [`Resource`].
pub const KINDS: usize = 6;
/// Most descriptors that a vRNIC may hold beyond its account. Above that, no more are taken from its programs.
const MAX_BEYOND: u64 = 64;

impl Resource {
    /// All resources, in the order of limits.
    pub const ALL: [Resource; KINDS] = [
        Resource::Descriptors,
        Resource::Mappings,
        Resource::AddressSpace,
        Resource::Pieces,
        Resource::Filled,
        Resource::Kept,
    ];
}

#[derive(Debug, Default)]
struct Account {
    used: [AtomicU64; KINDS],
    limit: [AtomicU64; KINDS],
    /// Amount that it holds although the account had no room.
    beyond: AtomicU64,
    /// When more bytes than this are filled, a recount is due. `u64::MAX` until a due recount is done.
    mark: AtomicU64,
}

impl Account {
    fn new(limit: [u64; KINDS]) -> Arc<Self> {
        Arc::new(Account { used: Default::default(), limit: limit.map(AtomicU64::new), ..Account::default() })
    }
}

/// The account of one vRNIC, linked to the account of its host.
#[derive(Clone, Debug)]
pub struct Ledger {
    vrnic: Arc<Account>,
    host: Arc<Account>,
    closer: Option<Closer>,
}

impl Default for Ledger {
    /// An account without limits.
    fn default() -> Self {
        Ledger::of_host([u64::MAX; KINDS]).for_vrnic([None; KINDS])
    }
}

/// Permission to hold an amount of a resource. It is given back when it is dropped.
#[derive(Debug)]
pub struct Ticket {
    ledger: Ledger,
    resource: Resource,
    n: u64,
    beyond: bool,
}

impl Ticket {
    /// The closer of this account's descriptors; `None` if they are closed where they are dropped.
    pub(crate) fn closer(&self) -> Option<&Closer> {
        self.ledger.closer.as_ref()
    }

    /// Identifies the account while the ticket lives.
    pub(crate) fn account(&self) -> usize {
        Arc::as_ptr(&self.ledger.vrnic).addr()
    }

    /// True if the account had no room.
    pub(crate) fn is_beyond(&self) -> bool {
        self.beyond
    }

    /// The account.
    pub(crate) fn ledger(&self) -> &Ledger {
        &self.ledger
    }
}

/// A varying number of bytes of [`Resource::Kept`] of one owner, which is given back when it is dropped.
#[derive(Debug, Default)]
pub struct Kept {
    ledger: Ledger,
    bytes: u64,
}

impl Kept {
    /// Nothing kept yet, on the account `ledger`.
    pub fn new(ledger: Ledger) -> Self {
        Kept { ledger, bytes: 0 }
    }

    /// True if the account has room for `bytes` more.
    pub fn has_room(&self, bytes: u64) -> bool {
        self.ledger.has_room(Resource::Kept, bytes)
    }

    /// Sets the number of bytes kept, whether there is room or not.
    pub fn set(&mut self, bytes: u64) {
        if bytes >= self.bytes {
            self.ledger.add(Resource::Kept, bytes - self.bytes);
        } else {
            self.ledger.sub(Resource::Kept, self.bytes - bytes);
        }
        self.bytes = bytes;
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        self.set(0);
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.ledger.sub(self.resource, self.n);
        if self.beyond {
            self.ledger.vrnic.beyond.fetch_sub(self.n, Ordering::Relaxed);
        }
    }
}

impl Ledger {
    /// The account of a host. `limits` are for all its vRNICs together.
    pub fn of_host(limits: [u64; KINDS]) -> Self {
        Ledger { vrnic: Account::new([u64::MAX; KINDS]), host: Account::new(limits), closer: None }
    }

    /// Lets `closer` close the descriptors of vRNICs that are added from now on.
    #[must_use]
    pub fn with_closer(self, closer: Closer) -> Self {
        Ledger { closer: Some(closer), ..self }
    }

    /// The account of another vRNIC of the same host. `None`: limited only by what the others leave.
    #[must_use]
    pub fn for_vrnic(&self, limits: [Option<u64>; KINDS]) -> Self {
        Ledger {
            vrnic: Account::new(limits.map(|l| l.unwrap_or(u64::MAX))),
            host: self.host.clone(),
            closer: self.closer.clone(),
        }
    }

    /// Changes the limits that are given. Amounts that a vRNIC holds beyond a new limit stay.
    pub fn set_limits(&self, limits: [Option<u64>; KINDS]) {
        for (old, new) in self.vrnic.limit.iter().zip(limits) {
            new.into_iter().for_each(|n| old.store(n, Ordering::Relaxed));
        }
    }

    /// How much of a resource the vRNIC holds, and how much it may hold now.
    pub fn usage(&self, of: Resource) -> (u64, u64) {
        let [used, all] = [&self.vrnic, &self.host].map(|a| a.used[of as usize].load(Ordering::Relaxed));
        let [limit, host] = [&self.vrnic, &self.host].map(|a| a.limit[of as usize].load(Ordering::Relaxed));
        let left = host.saturating_sub(all.saturating_sub(used));
        // For memory, an operator may allow one vRNIC more than half of what is left, since only its programs determine
        // what they need.
        let shared = if of == Resource::Filled && limit != u64::MAX { left } else { left / 2 };
        (used, limit.min(shared))
    }

    /// As [`Ledger::take`], for [`Resource::Filled`], which [`Ledger::empty`] gives back. Called in a signal
    /// handler.
    pub(crate) fn fill(&self, bytes: u64) -> Room {
        let at = Resource::Filled as usize;
        let sum = loop {
            let (used, limit) = self.usage(Resource::Filled);
            let Some(sum) = used.checked_add(bytes).filter(|&sum| sum <= limit) else { return Room::None };
            // Several threads may allocate pages for one vRNIC at once.
            if self.vrnic.used[at].compare_exchange(used, sum, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
                break sum;
            }
        };
        self.host.used[at].fetch_add(bytes, Ordering::Relaxed);
        let over = |mark: u64| (sum > mark).then_some(u64::MAX);
        match self.vrnic.mark.fetch_update(Ordering::Relaxed, Ordering::Relaxed, over) {
            Ok(_) => Room::Little,
            Err(_) => Room::Enough,
        }
    }

    /// Gives back `bytes` filled bytes.
    pub(crate) fn empty(&self, bytes: u64) {
        self.sub(Resource::Filled, bytes);
    }

    /// True if the filled bytes should be recounted. [`Ledger::was_recounted`] must be called afterwards.
    pub fn wants_recount(&self) -> bool {
        self.vrnic.mark.load(Ordering::Relaxed) == u64::MAX
    }

    /// Notes that filled bytes were recounted. The next recount is due when half of the present room is used up.
    pub fn was_recounted(&self) {
        let (used, limit) = self.usage(Resource::Filled);
        self.vrnic.mark.store(used + limit.saturating_sub(used) / 2, Ordering::Relaxed);
    }

    /// Permission to hold `n` more; `None` if that is too much.
    pub fn take(&self, resource: Resource, n: u64) -> Option<Ticket> {
        self.has_room(resource, n).then(|| self.give(resource, n, false))
    }

    /// True if `n` more may be held.
    fn has_room(&self, resource: Resource, n: u64) -> bool {
        let (used, limit) = self.usage(resource);
        used.checked_add(n).is_some_and(|sum| sum <= limit)
    }

    /// Keeps `bytes` more until [`Ledger::let_go`]; false if that is too much.
    pub fn keep(&self, bytes: u64) -> bool {
        let room = self.has_room(Resource::Kept, bytes);
        if room {
            self.keep_anyway(bytes);
        }
        room
    }

    /// As [`Ledger::keep`], even if it is too much.
    pub fn keep_anyway(&self, bytes: u64) {
        self.add(Resource::Kept, bytes);
    }

    /// Gives back `bytes` kept bytes.
    pub fn let_go(&self, bytes: u64) {
        self.sub(Resource::Kept, bytes);
    }

    /// A ticket for an amount that is held already: beyond the account if there is no room. The holder of such a ticket
    /// must give the resource up at once, although that may take time.
    pub fn charge(&self, resource: Resource, n: u64) -> Ticket {
        self.take(resource, n).unwrap_or_else(|| self.give(resource, n, true))
    }

    /// True if too many descriptors beyond the account wait to be closed: no more may be taken then.
    pub fn is_overdrawn(&self) -> bool {
        self.vrnic.beyond.load(Ordering::Relaxed) > MAX_BEYOND
    }

    fn add(&self, resource: Resource, n: u64) {
        for account in [&self.vrnic, &self.host] {
            account.used[resource as usize].fetch_add(n, Ordering::Relaxed);
        }
    }

    fn sub(&self, resource: Resource, n: u64) {
        for account in [&self.vrnic, &self.host] {
            account.used[resource as usize].fetch_sub(n, Ordering::Relaxed);
        }
    }

    fn give(&self, resource: Resource, n: u64, beyond: bool) -> Ticket {
        self.add(resource, n);
        if beyond {
            self.vrnic.beyond.fetch_add(n, Ordering::Relaxed);
        }
        Ticket { ledger: self.clone(), resource, n, beyond }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Resource::{AddressSpace, Descriptors, Mappings};

    fn most(l: &Ledger) -> Vec<Ticket> {
        std::iter::from_fn(|| l.take(Descriptors, 1)).collect()
    }

    #[test]
    fn each_vrnic_may_have_half_of_what_the_others_leave() {
        let host = Ledger::of_host([80, 1000, 1 << 40, 1000, 1 << 30, 1000]);
        let all: Vec<Ledger> = (0..4).map(|_| host.for_vrnic([None; KINDS])).collect();
        let mut held: Vec<Vec<Ticket>> = all.iter().map(most).collect();
        assert_eq!(held.iter().map(Vec::len).collect::<Vec<_>>(), [40, 20, 10, 5]);
        assert_eq!(all[3].usage(Descriptors), (5, 5));
        // A refused amount is not counted, and an amount that is given back is available to others.
        held[0].clear();
        assert_eq!((all[0].usage(Descriptors), all[3].usage(Descriptors)), ((0, 22), (5, 25)));
        held.clear();
        assert_eq!(most(&all[2]).len(), 40);
    }

    #[test]
    fn an_operator_may_allow_less() {
        let host = Ledger::of_host([80, 1000, 1 << 40, 1000, 1 << 30, 1000]);
        let v = host.for_vrnic([None, Some(7), None, None, None, None]);
        assert_eq!((v.usage(Descriptors), v.usage(Mappings)), ((0, 40), (0, 7)));
        let six = v.take(Mappings, 6).unwrap();
        assert!(v.take(Mappings, 2).is_none() && v.take(Mappings, u64::MAX).is_none());
        v.set_limits([Some(1), Some(3), None, None, None, None]);
        assert_eq!((v.usage(Mappings), v.usage(Descriptors)), ((6, 3), (0, 1)));
        assert!(v.take(Mappings, 1).is_none());
        drop(six);
        assert!(v.take(Mappings, 3).is_some() && v.take(AddressSpace, 1 << 39).is_some());
    }

    #[test]
    fn what_is_there_already_is_charged_beyond_the_account() {
        let v = Ledger::of_host([80; KINDS]).for_vrnic([Some(2), None, None, None, None, None]);
        let mut held: Vec<Ticket> = (0..66).map(|_| v.charge(Descriptors, 1)).collect();
        assert_eq!((v.usage(Descriptors).0, v.is_overdrawn()), (66, false));
        held.push(v.charge(Descriptors, 1));
        assert!(v.is_overdrawn());
        held.clear();
        assert_eq!((v.usage(Descriptors).0, v.is_overdrawn()), (0, false));
    }

    /// By default a vRNIC may fill half of the memory that is left, or all of it if an operator says so. Recounts are
    /// due each time half of the room is used.
    #[test]
    fn threads_that_fill_at_the_same_time_stay_within_the_limit() {
        const LIMIT: u64 = 1_000_000;
        let one = Ledger::default();
        one.set_limits([None, None, None, None, Some(LIMIT), None]);
        let filled: u64 = std::thread::scope(|s| {
            let fill = || (0..).take_while(|_| one.fill(3) != Room::None).count() as u64 * 3;
            let threads = [(); 4].map(|()| s.spawn(fill));
            threads.into_iter().map(|t| t.join().expect("it ends")).sum()
        });
        assert_eq!((filled, one.usage(Resource::Filled).0), (LIMIT / 3 * 3, LIMIT / 3 * 3));
    }

    #[test]
    fn what_is_filled_is_looked_at_before_there_is_no_room() {
        let host = Ledger::of_host([100; KINDS]);
        let [one, two] = [None, Some(80)].map(|most| host.for_vrnic([None, None, None, None, most, None]));
        assert_eq!((one.usage(Resource::Filled), two.usage(Resource::Filled)), ((0, 50), (0, 80)));
        assert_eq!((one.fill(10), one.wants_recount(), one.fill(10)), (Room::Little, true, Room::Enough));
        one.was_recounted();
        assert_eq!((one.fill(15), one.fill(1), one.fill(14), one.fill(1)), {
            (Room::Enough, Room::Little, Room::Enough, Room::None)
        });
        assert_eq!((one.usage(Resource::Filled), two.usage(Resource::Filled)), ((50, 50), (0, 50)));
        one.empty(50);
        assert_eq!((two.fill(80), one.usage(Resource::Filled)), (Room::Little, (0, 10)));
    }

    #[test]
    fn what_is_kept_comes_and_goes() {
        let host = Ledger::of_host([1000; KINDS]);
        let [one, two] = [(); 2].map(|()| host.for_vrnic([None; KINDS]));
        let mut kept = Kept::new(one.clone());
        kept.set(400);
        assert!(kept.has_room(100) && !kept.has_room(101) && one.keep(100) && !one.keep(1));
        one.keep_anyway(10);
        assert_eq!((one.usage(Resource::Kept), two.usage(Resource::Kept)), ((510, 500), (0, 245)));
        kept.set(20);
        one.let_go(110);
        assert_eq!(one.usage(Resource::Kept), (20, 500));
        drop(kept);
        assert_eq!((one.usage(Resource::Kept), two.usage(Resource::Kept)), ((0, 500), (0, 500)));
    }

    #[test]
    fn without_limits_there_is_always_more() {
        let v = Ledger::default();
        let _much = v.take(AddressSpace, 1 << 60).unwrap();
        assert!(v.take(AddressSpace, 1 << 60).is_some());
    }
}
