//! Limits that callers share: one for all callers of a kind together, and one for each caller. Kinds do not share
//! limits, so strangers cannot exclude known callers, and tenants cannot exclude administrators.

use std::collections::HashMap;
use std::fmt;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use unirdma_fleet::Refusal;

/// A caller that is charged.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Party {
    /// A caller without certificate and token, by address.
    Stranger(IpAddr),
    /// A token of a tenant or of a reader.
    Token(String),
    /// A token of an administrator.
    Admin(String),
    /// A host of the fleet.
    Host(String),
    /// The other centres of the fleet.
    Centre,
}

/// How many kinds of parties there are.
const KINDS: usize = 5;

impl Party {
    /// A stranger. IPv6 addresses count by their /64 network, since one machine may use all of it.
    pub fn stranger(address: IpAddr) -> Party {
        Party::Stranger(match address.to_canonical() {
            IpAddr::V6(a) => IpAddr::V6(Ipv6Addr::from_bits(a.to_bits() >> 64 << 64)),
            v4 => v4,
        })
    }

    /// The number of its kind, and the name of the whole kind.
    fn kind(&self) -> (usize, &'static str) {
        match self {
            Party::Stranger(_) => (0, "callers without a token"),
            Party::Token(_) => (1, "tenants and readers"),
            Party::Admin(_) => (2, "administrators"),
            Party::Host(_) => (3, "hosts"),
            Party::Centre => (4, "centres"),
        }
    }
}

impl fmt::Display for Party {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Party::Stranger(address) => write!(f, "address {address}"),
            Party::Token(id) | Party::Admin(id) => write!(f, "token {id}"),
            Party::Host(name) => write!(f, "host {name}"),
            Party::Centre => f.write_str("other centre"),
        }
    }
}

/// The most for all parties of a kind together, and for each of them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limit {
    pub all: usize,
    pub each: usize,
}

/// The limits of each kind of parties.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub strangers: Limit,
    pub tokens: Limit,
    pub admins: Limit,
    pub hosts: Limit,
    pub centres: Limit,
}

#[derive(Default)]
struct Taken {
    all: [usize; KINDS],
    each: HashMap<Party, usize>,
}

/// The limit that was reached: the party's own, or the limit of its kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Full {
    Each,
    All,
}

/// A limited resource.
pub(crate) struct Shares {
    what: &'static str,
    limits: [Limit; KINDS],
    taken: Mutex<Taken>,
}

/// A party's share of a limited resource. Dropping it returns the share.
pub(crate) struct Share {
    shares: Arc<Shares>,
    pub party: Party,
    amount: usize,
}

impl Shares {
    /// `what` is the name of the resource, in the plural.
    pub fn new(what: &'static str, l: Limits) -> Arc<Shares> {
        let limits = [l.strangers, l.tokens, l.admins, l.hosts, l.centres];
        Arc::new(Shares { what, limits, taken: Mutex::default() })
    }

    fn taken(&self) -> MutexGuard<'_, Taken> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes an amount of the resource.
    ///
    /// # Errors
    /// The limit that it would exceed.
    pub fn take(self: &Arc<Self>, party: &Party, amount: usize) -> Result<Share, Full> {
        let mut share = Share { shares: self.clone(), party: party.clone(), amount: 0 };
        share.set(amount)?;
        Ok(share)
    }

    /// The refusal for a party that has reached a limit.
    pub fn refusal(&self, party: &Party, full: Full) -> Refusal {
        let ((kind, all), what) = (party.kind(), self.what);
        let limit = self.limits[kind];
        match full {
            Full::Each => Refusal::full(format_args!(
                "{party} has the most {what}, {}; try again when some have ended",
                limit.each
            )),
            Full::All => Refusal::unavailable(format_args!(
                "{all} together have the most {what}, {}; try again in a while",
                limit.all
            )),
        }
    }
}

impl Share {
    /// Changes the amount. Reducing it always succeeds.
    ///
    /// # Errors
    /// The limit that it would exceed. The amount is unchanged then.
    pub fn set(&mut self, amount: usize) -> Result<(), Full> {
        let (kind, _) = self.party.kind();
        let limit = self.shares.limits[kind];
        let mut taken = self.shares.taken();
        let all = taken.all[kind] - self.amount + amount;
        let each = taken.each.get(&self.party).map_or(0, |n| n - self.amount) + amount;
        if amount > self.amount {
            if each > limit.each {
                return Err(Full::Each);
            }
            if all > limit.all {
                return Err(Full::All);
            }
        }
        taken.all[kind] = all;
        if each == 0 {
            taken.each.remove(&self.party);
        } else {
            taken.each.insert(self.party.clone(), each);
        }
        drop(taken);
        self.amount = amount;
        Ok(())
    }

    /// The amount.
    pub fn amount(&self) -> usize {
        self.amount
    }

    /// Increases the amount.
    ///
    /// # Errors
    /// A refusal that names the limit.
    pub fn add(&mut self, more: usize) -> Result<(), Refusal> {
        self.hold(self.amount() + more)
    }

    /// As [`Share::set`], with a refusal as the error.
    ///
    /// # Errors
    /// A refusal that names the limit.
    pub fn hold(&mut self, amount: usize) -> Result<(), Refusal> {
        self.set(amount).map_err(|full| self.shares.refusal(&self.party, full))
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        let _ = self.set(0);
    }
}

/// Calls in progress, and the bytes of their requests and answers, charged to the callers.
pub(crate) struct UnderWay {
    calls: Arc<Shares>,
    bytes: Arc<Shares>,
}

impl UnderWay {
    pub fn new() -> UnderWay {
        let of = |all, each| Limit { all, each };
        let calls = Limits {
            strangers: of(1_024, 128),
            tokens: of(2_048, 64),
            admins: of(1_024, 256),
            hosts: of(65_536, 8),
            centres: of(2_048, 2_048),
        };
        let mib = |all: usize, each: usize| Limit { all: all << 20, each: each << 20 };
        let bytes = Limits {
            strangers: mib(16, 2),
            tokens: mib(192, 64),
            admins: mib(384, 128),
            hosts: mib(384, 64),
            centres: mib(384, 384),
        };
        UnderWay {
            calls: Shares::new("calls under way", calls),
            bytes: Shares::new("bytes of requests and answers under way", bytes),
        }
    }

    /// Charges the party one call.
    pub fn call(&self, party: &Party) -> Result<Share, Refusal> {
        self.calls.take(party, 1).map_err(|full| self.calls.refusal(party, full))
    }

    /// An account for bytes of the party, with no bytes charged yet.
    pub fn bytes(&self, party: &Party) -> Result<Share, Refusal> {
        self.bytes.take(party, 0).map_err(|full| self.bytes.refusal(party, full))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shares(each: usize, all: usize) -> Arc<Shares> {
        let l = Limit { all, each };
        Shares::new("things", Limits { strangers: l, tokens: l, admins: l, hosts: l, centres: l })
    }

    #[test]
    fn each_party_and_each_kind_has_its_limit_and_what_is_dropped_is_given_back() {
        let shares = shares(3, 5);
        let stranger = |a: &str| Party::stranger(a.parse().unwrap());
        let (one, two) = (stranger("10.0.0.1"), stranger("10.0.0.2"));
        let held = shares.take(&one, 3).unwrap();
        assert_eq!(shares.take(&one, 1).err(), Some(Full::Each));
        assert_eq!(shares.take(&stranger("::ffff:10.0.0.1"), 1).err(), Some(Full::Each));
        assert_eq!(shares.take(&two, 3).err(), Some(Full::All));
        let mut more = shares.take(&two, 2).unwrap();
        assert_eq!(more.set(3), Err(Full::All));
        // Other kinds are not affected.
        drop((shares.take(&Party::Token("t".into()), 3).unwrap(), shares.take(&Party::Admin("t".into()), 3).unwrap()));
        drop(held);
        more.set(3).unwrap();
        assert_eq!(more.set(4), Err(Full::Each));
        more.set(1).unwrap();
        drop(shares.take(&one, 3).unwrap());
        drop(more);
        let taken = shares.taken();
        assert!(taken.each.is_empty() && taken.all == [0; KINDS]);
    }

    #[test]
    fn a_network_of_ipv6_is_one_stranger() {
        let stranger = |a: &str| Party::stranger(a.parse().unwrap());
        assert_eq!(stranger("2001:db8::1"), stranger("2001:db8::ffff:1"));
        assert_ne!(stranger("2001:db8::1"), stranger("2001:db8:0:1::1"));
    }

    #[test]
    fn a_refusal_says_whose_limit_it_is() {
        let shares = shares(3, 5);
        let (party, say) = (Party::Token("t".into()), |f| shares.refusal(&Party::Token("t".into()), f).what);
        assert_eq!(say(Full::Each), "token t has the most things, 3; try again when some have ended");
        assert_eq!(say(Full::All), "tenants and readers together have the most things, 5; try again in a while");
        assert_eq!(shares.refusal(&party, Full::Each).kind, unirdma_fleet::RefusalKind::Full);
    }
}
