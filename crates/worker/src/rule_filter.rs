//! Rules between groups, applied to the frames of containers' interfaces.
//!
//! Where only one side may begin, the first segment of a TCP connection from the other side is dropped, and all other
//! segments pass. Any other packet to the side that may begin passes if that side has sent something to the packet's
//! sender within the last minute. ARP and neighbour discovery pass both ways.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use unirdma_device::lock;
use unirdma_formats::frame::{Heading, Talk};
use unirdma_policy::{Party, Policy, Rule};
use unirdma_rnic::Route;

use unirdma_ipc::network::Changes;

/// Longest time for an answer.
const ANSWER_TIME: Duration = Duration::from_secs(60);
/// Most pairs of addresses that are remembered because one may answer the other.
const MAX_BEGUN: usize = 16_384;

/// Sender or receiver of a frame: the number of its group if that is not the switch's own, and its known addresses.
#[derive(Clone, Copy)]
pub(crate) struct End<'a> {
    pub group: Option<u32>,
    pub addresses: &'a [IpAddr],
}

/// The rules of one group.
pub(crate) struct Filter {
    vni: u32,
    policy: Policy<u32, IpAddr>,
    /// Addresses of other groups that this group reaches, with the numbers of those groups.
    others: HashMap<IpAddr, u32>,
    /// Pairs of sender and receiver of which only the sender may begin, and when it last sent something.
    begun: Mutex<HashMap<(IpAddr, IpAddr), Instant>>,
}

impl Filter {
    /// The filter of group `vni`. `others` are addresses of other groups that it reaches, with the numbers of those
    /// groups.
    pub fn new(vni: u32, rules: &[Rule<u32>], others: impl Iterator<Item = (IpAddr, u32)>) -> Filter {
        Filter { vni, policy: Policy::new(rules), others: others.collect(), begun: Mutex::default() }
    }

    /// The filter after `changes`; `None` if no rule concerns the group any more. `before`: the filter before, if there
    /// was one.
    pub fn after(before: Option<&Filter>, changes: &Changes) -> Option<Filter> {
        let mut after = match before {
            Some(f) => {
                let begun = Mutex::new(lock(&f.begun).clone());
                Filter { vni: f.vni, policy: f.policy.clone(), others: f.others.clone(), begun }
            }
            None => Filter::new(changes.vni, &[], std::iter::empty()),
        };
        if let Some(rules) = &changes.rules {
            after.policy = Policy::new(rules);
        }
        for (address, route) in &changes.addresses {
            match route.filter(|r| r.vni != after.vni) {
                Some(r) => after.others.insert(*address, r.vni),
                None => after.others.remove(address),
            };
        }
        (!after.policy.is_empty() || !after.others.is_empty()).then_some(after)
    }

    /// True if these changes affect the filter.
    pub fn is_concerned(&self, changes: &Changes) -> bool {
        let concerned = |&(address, route): &(IpAddr, Option<Route>)| {
            route.is_some_and(|r| r.vni != self.vni) || self.others.contains_key(&address)
        };
        changes.rules.is_some() || changes.addresses.iter().any(concerned)
    }

    /// The number of the group that has an address, if it is another group.
    pub fn other_group(&self, address: IpAddr) -> Option<u32> {
        self.others.get(&address).copied()
    }

    /// True if a frame with this heading may pass from `from` to `to`.
    pub fn passes(&self, h: &Heading, from: End<'_>, to: End<'_>, now: Instant) -> bool {
        if from.group.is_none() && to.group.is_none() && self.policy.is_empty() {
            return true;
        }
        let (a, b) = (from.group.unwrap_or(self.vni), to.group.unwrap_or(self.vni));
        let (from, to) = (Party { group: &a, addresses: from.addresses }, Party { group: &b, addresses: to.addresses });
        match (self.policy.may_begin(from, to), self.policy.may_begin(to, from)) {
            (true, true) => true,
            (false, false) => false,
            (true, false) => {
                if let (Talk::Other, Some(source)) = (h.talk, h.from) {
                    self.note(source, h.to, now);
                }
                true
            }
            (false, true) => match h.talk {
                Talk::Neighbour | Talk::Segment => true,
                Talk::Opening => false,
                Talk::Other => h.from.is_some_and(|source| self.has_begun(h.to, source, now)),
            },
        }
    }

    fn note(&self, from: IpAddr, to: IpAddr, now: Instant) {
        let mut begun = lock(&self.begun);
        if begun.len() >= MAX_BEGUN && !begun.contains_key(&(from, to)) {
            begun.retain(|_, at| now.saturating_duration_since(*at) < ANSWER_TIME);
            // One sender has many receivers. Pairs that are forgotten can be begun again.
            if begun.len() >= MAX_BEGUN {
                begun.clear();
            }
        }
        begun.insert((from, to), now);
    }

    fn has_begun(&self, from: IpAddr, to: IpAddr, now: Instant) -> bool {
        let begun = lock(&self.begun);
        begun.get(&(from, to)).is_some_and(|at| now.saturating_duration_since(*at) < ANSWER_TIME)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RED: [IpAddr; 1] = [IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 1))];
    const BLUE: [IpAddr; 1] = [IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 2))];

    /// The filter of group 1, which may begin with group 2.
    fn one_way() -> Filter {
        let rule: Rule = "allow from group:1 to group:2".parse().unwrap();
        let rule = rule.translate(|name| name.parse::<u32>().ok(), |a| *a).unwrap();
        Filter::new(1, &[rule], [(BLUE[0], 2)].into_iter())
    }

    #[test]
    fn a_filter_after_changes_is_that_of_the_new_rules_and_still_knows_who_has_begun() {
        let rules = |f: &Filter| (f.vni, f.policy.clone(), f.others.clone());
        let (rule, route) = ("allow from group:1 to group:2".parse::<Rule>().unwrap(), |vni| {
            Some(Route { host: RED[0], foreign: false, vni })
        });
        let rule = rule.translate(|name| name.parse::<u32>().ok(), |a| *a).unwrap();
        let (vni, group) = (1, "red".to_owned());
        let joins = Changes {
            group,
            vni,
            addresses: vec![(BLUE[0], route(2)), (RED[0], route(1))],
            rules: Some(vec![rule]),
            ..Changes::default()
        };
        let joined = Filter::after(None, &joins).unwrap();
        assert_eq!(rules(&joined), rules(&one_way()));
        joined.note(RED[0], BLUE[0], Instant::now());
        let own = Changes { addresses: vec![(RED[0], route(1))], rules: None, ..joins.clone() };
        let moves = Changes { addresses: vec![(BLUE[0], route(3))], rules: None, ..joins.clone() };
        assert!(!joined.is_concerned(&own) && joined.is_concerned(&moves) && joined.is_concerned(&joins));
        let moved = Filter::after(Some(&joined), &moves).unwrap();
        assert_eq!(moved.other_group(BLUE[0]), Some(3));
        assert!(moved.has_begun(RED[0], BLUE[0], Instant::now()));
        let parts = Changes { addresses: vec![(BLUE[0], None)], rules: Some(Vec::new()), ..joins };
        assert!(Filter::after(Some(&moved), &parts).is_none());
    }

    #[test]
    fn who_may_not_begin_may_answer_for_a_minute() {
        let (f, start) = (one_way(), Instant::now());
        let go = |talk, out: bool, after: u64| {
            let (red, blue) = (End { group: None, addresses: &RED }, End { group: Some(2), addresses: &BLUE });
            let heading = |from, to| Heading { from: Some(from), to, talk };
            let now = start + Duration::from_secs(after);
            match out {
                true => f.passes(&heading(RED[0], BLUE[0]), red, blue, now),
                false => f.passes(&heading(BLUE[0], RED[0]), blue, red, now),
            }
        };
        assert_eq!((f.other_group(BLUE[0]), f.other_group(RED[0])), (Some(2), None));
        assert_eq!([Talk::Opening, Talk::Segment, Talk::Neighbour].map(|t| go(t, false, 0)), [false, true, true]);
        assert!(!go(Talk::Other, false, 0) && go(Talk::Other, true, 0));
        assert!(go(Talk::Other, false, 59) && !go(Talk::Other, false, 60));
        assert!([Talk::Opening, Talk::Segment, Talk::Neighbour, Talk::Other].iter().all(|&t| go(t, true, 70)));
        assert!(go(Talk::Other, false, 71));
        // A third group is not allowed.
        let green = End { group: Some(3), addresses: &BLUE };
        let heading = Heading { from: Some(BLUE[0]), to: RED[0], talk: Talk::Neighbour };
        assert!(!f.passes(&heading, green, End { group: None, addresses: &RED }, start));
    }

    #[test]
    fn what_is_remembered_has_a_bound() {
        let (f, start) = (one_way(), Instant::now());
        let address = |n: usize| IpAddr::from((n as u32 | 0x0a00_0000).to_be_bytes());
        (0..3 * MAX_BEGUN).for_each(|n| f.note(RED[0], address(n), start));
        assert!(lock(&f.begun).len() <= MAX_BEGUN);
        assert!(f.has_begun(RED[0], address(3 * MAX_BEGUN - 1), start));
    }
}
