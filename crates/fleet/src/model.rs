//! The declared objects, and checks of each object on its own.

use std::fmt;

use crate::error::Refusal;
use crate::net::{Net, address, is_usable};
use crate::tokens::Actor;
use crate::v1::{self, object};

/// A limit of the whole fleet. Each token, host and group has a part of it, so that none can use up the whole. The last
/// eighth is reserved for administrators.
#[derive(Clone, Copy, Debug)]
pub struct Limit {
    what: &'static str,
    /// The limit.
    pub all: usize,
}

/// Most vRNICs of a fleet.
pub const VRNICS: Limit = Limit::new("vRNICs", 1_000_000);
/// Most rules.
pub const RULES: Limit = Limit::new("rules", 65_536);
/// Most groups.
pub const GROUPS: Limit = Limit::new("groups", 65_536);
/// Most hosts.
pub const HOSTS: Limit = Limit::new("hosts", 65_536);
/// Most tokens.
pub const TOKENS: Limit = Limit::new("tokens", 10_000);
/// Most watchers at a time.
pub const WATCHERS: Limit = Limit::new("watchers", 512);
/// Most bytes of the audit log.
pub const AUDIT: Limit = Limit::new("bytes of the audit log", 32 << 20);

impl Limit {
    const fn new(what: &'static str, all: usize) -> Limit {
        Limit { what, all }
    }

    /// The default part of one token, host or group.
    pub const fn part(&self) -> usize {
        self.all / 16
    }

    /// Checks a limit for an actor: there would be `all`, of which the actor, whose part is `part`, would have `own`.
    ///
    /// # Errors
    /// A limit would be exceeded.
    pub fn room(&self, actor: &Actor, all: usize, own: usize, part: usize) -> Result<(), Refusal> {
        let what = self.what;
        match actor.is_admin() {
            true if all <= self.all => Ok(()),
            true => Err(Refusal::full(format_args!("the fleet may have {} {what} at most", self.all))),
            false if own > part => Err(Refusal::full(format_args!(
                "{} would have {own} {what}, and may have {part} at most",
                actor.title()
            ))),
            false if all > self.all - self.all / 8 => {
                Err(Refusal::full(format_args!("there is no room for more {what}; ask an administrator")))
            }
            false => Ok(()),
        }
    }

    /// Checks the limit `most` of a group, which an administrator sets by `field`.
    ///
    /// # Errors
    /// The limit would be exceeded.
    pub fn room_in_group(&self, group: &str, have: usize, most: usize, field: &str) -> Result<(), Refusal> {
        if have <= most {
            return Ok(());
        }
        Err(Refusal::full(format_args!(
            "group {group} would have {have} {}, and may have {most} at most; an administrator sets {field}",
            self.what
        )))
    }
}

/// Most objects of one call.
pub const MAX_APPLY: usize = 20_000;
/// Most addresses of a vRNIC.
pub const MAX_IPS: usize = 16;
/// Most addresses of a host.
pub const MAX_ADDRESSES: usize = 16;
/// The range of a group that states none.
pub const DEFAULT_RANGE: &str = "10.77.0.0/16";
/// The largest number of a group.
pub const MAX_VNI: u32 = 0xff_ffff;
/// The largest VLAN of a group.
pub const MAX_VLAN: u32 = 4_094;
/// The largest weight of a group or a vRNIC.
pub const MAX_WEIGHT: u32 = 10_000;
/// The longest burst, microseconds.
pub const MAX_BURST_US: u64 = 10_000_000;

/// Kinds of objects, in the order of dependency: rules name vRNICs, which belong to groups and hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// A machine.
    Host,
    /// A virtual network.
    Group,
    /// A virtual RDMA NIC.
    Vrnic,
    /// A permission or a ban of connections between groups or vRNICs.
    Rule,
}

impl Kind {
    /// All of them.
    pub const ALL: [Kind; 4] = [Kind::Host, Kind::Group, Kind::Vrnic, Kind::Rule];

    /// The kind of a message; `None` for `ANY`.
    ///
    /// # Errors
    /// There is no such kind.
    pub fn of(kind: i32) -> Result<Option<Kind>, Refusal> {
        match v1::Kind::try_from(kind) {
            Ok(v1::Kind::Any) => Ok(None),
            Ok(v1::Kind::Host) => Ok(Some(Kind::Host)),
            Ok(v1::Kind::Group) => Ok(Some(Kind::Group)),
            Ok(v1::Kind::Vrnic) => Ok(Some(Kind::Vrnic)),
            Ok(v1::Kind::Rule) => Ok(Some(Kind::Rule)),
            Err(_) => Err(Refusal::invalid(format_args!("there is no kind {kind} of object"))),
        }
    }

    /// Its word in keys of records and in the API's paths.
    pub fn word(self) -> &'static str {
        match self {
            Kind::Host => "host",
            Kind::Group => "group",
            Kind::Vrnic => "vrnic",
            Kind::Rule => "rule",
        }
    }

    /// The kind with this word.
    pub fn of_word(word: &str) -> Option<Kind> {
        Kind::ALL.into_iter().find(|k| k.word() == word)
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if *self == Kind::Vrnic { "vRNIC" } else { self.word() })
    }
}

/// Makes an object of a message of each kind.
macro_rules! objects {
    ($($kind:ident)*) => { $(
        impl From<v1::$kind> for object::Object {
            fn from(o: v1::$kind) -> Self {
                object::Object::$kind(o)
            }
        }
    )* };
}

objects! { Host Group Vrnic Rule }

impl object::Object {
    /// Its kind.
    pub fn kind(&self) -> Kind {
        match self {
            object::Object::Host(_) => Kind::Host,
            object::Object::Group(_) => Kind::Group,
            object::Object::Vrnic(_) => Kind::Vrnic,
            object::Object::Rule(_) => Kind::Rule,
        }
    }

    /// Its name.
    pub fn name(&self) -> &str {
        match self {
            object::Object::Host(o) => &o.name,
            object::Object::Group(o) => &o.name,
            object::Object::Vrnic(o) => &o.name,
            object::Object::Rule(o) => &o.name,
        }
    }
}

/// Checks a name, which becomes a directory and a command's argument.
///
/// # Errors
/// It is not valid.
pub fn check_name(what: impl fmt::Display, name: &str) -> Result<(), Refusal> {
    let ok = (1..=32).contains(&name.len())
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"_.-".contains(&b))
        && name.as_bytes()[0].is_ascii_alphanumeric();
    if ok {
        return Ok(());
    }
    let shown: String = name.chars().take(40).collect();
    Err(Refusal::invalid(format_args!(
        "`{}` is no {what} name: use 1 to 32 letters, digits, `_`, `.` or `-`, a letter or digit first",
        shown.escape_debug()
    )))
}

fn within<T: PartialOrd + fmt::Display>(what: &str, value: Option<T>, first: T, last: T) -> Result<(), Refusal> {
    match value {
        Some(v) if v < first || v > last => {
            Err(Refusal::invalid(format_args!("{what} is {v}, but must be {first} to {last}")))
        }
        _ => Ok(()),
    }
}

fn check_share(share: Option<&v1::Share>) -> Result<(), Refusal> {
    let Some(share) = share else { return Ok(()) };
    within("the weight", share.weight, 1, MAX_WEIGHT)?;
    within("the burst", share.burst, 0, MAX_BURST_US)
}

fn check_limits(limits: Option<&v1::Limits>) -> Result<(), Refusal> {
    let Some(l) = limits else { return Ok(()) };
    within("max_qp", l.max_qp, 1, 1 << 24)?;
    within("max_cq", l.max_cq, 1, 1 << 24)?;
    within("max_mr", l.max_mr, 1, 1 << 24)?;
    within("max_sessions", l.max_sessions, 1, 1 << 16)
}

/// The address ranges of a group, or the default range if it states none.
///
/// # Errors
/// A range is invalid, or there are two of one family.
pub fn ranges(group: &v1::Group) -> Result<Vec<Net>, Refusal> {
    let texts: Vec<&str> =
        if group.ranges.is_empty() { vec![DEFAULT_RANGE] } else { group.ranges.iter().map(String::as_str).collect() };
    let mut nets: Vec<Net> = Vec::new();
    for text in texts {
        let net: Net = text.parse().map_err(Refusal::invalid)?;
        if net != net.network() {
            return Err(Refusal::invalid(format_args!("the range {net} names a host; write {}", net.network())));
        }
        if !is_usable(net.addr) && net.prefix > 0 {
            return Err(Refusal::invalid(format_args!("vRNICs can have no addresses of {net}")));
        }
        if nets.iter().any(|n| n.addr.is_ipv4() == net.addr.is_ipv4()) {
            return Err(Refusal::invalid("a group has at most one range of IPv4 and one of IPv6"));
        }
        nets.push(net);
    }
    Ok(nets)
}

/// The addresses of a vRNIC, each with its prefix length if that is stated.
///
/// # Errors
/// An address is invalid, unusable or repeated, or there are too many.
pub fn ips(vrnic: &v1::Vrnic) -> Result<Vec<(std::net::IpAddr, Option<u8>)>, Refusal> {
    if vrnic.ips.len() > MAX_IPS {
        return Err(Refusal::invalid(format_args!("it has {} addresses; {MAX_IPS} are the most", vrnic.ips.len())));
    }
    let mut out: Vec<(std::net::IpAddr, Option<u8>)> = Vec::new();
    for text in &vrnic.ips {
        let (addr, prefix) = if text.contains('/') {
            let net: Net = text.parse().map_err(Refusal::invalid)?;
            (net.addr, Some(net.prefix))
        } else {
            (address(text).map_err(Refusal::invalid)?, None)
        };
        if !is_usable(addr) {
            return Err(Refusal::invalid(format_args!("`{text}` cannot be the address of a vRNIC")));
        }
        if out.iter().any(|(a, _)| *a == addr) {
            return Err(Refusal::invalid(format_args!("it has the address {addr} twice")));
        }
        out.push((addr, prefix));
    }
    if out.iter().filter(|(a, _)| a.is_ipv4()).count() > 1 {
        return Err(Refusal::invalid("a vRNIC has at most one IPv4 address"));
    }
    Ok(out)
}

/// One end of a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Selector {
    /// All vRNICs of a group.
    Group(String),
    /// One vRNIC.
    Vrnic(String),
}

/// Parses an end of a rule.
///
/// # Errors
/// It is neither `group:NAME` nor `vrnic:NAME`.
pub fn selector(text: &str) -> Result<Selector, Refusal> {
    match text.split_once(':') {
        Some(("group", name)) => check_name("group", name).map(|()| Selector::Group(name.into())),
        Some(("vrnic", name)) => check_name("vRNIC", name).map(|()| Selector::Vrnic(name.into())),
        _ => {
            let shown: String = text.chars().take(40).collect();
            Err(Refusal::invalid(format_args!(
                "`{}` is no end of a rule; write group:NAME or vrnic:NAME",
                shown.escape_debug()
            )))
        }
    }
}

/// Checks an object on its own.
///
/// # Errors
/// The object is invalid. The message begins with its kind and name.
pub fn check(object: &object::Object) -> Result<(), Refusal> {
    check_name(object.kind(), object.name())?;
    let checked = match object {
        object::Object::Host(h) => check_addresses(&h.addresses),
        object::Object::Group(g) => check_group(g),
        object::Object::Vrnic(v) => check_vrnic(v),
        object::Object::Rule(r) => check_rule(r),
    };
    checked.map_err(|e| e.within(format_args!("{} {}", object.kind(), object.name())))
}

/// Checks the addresses that a host announces.
///
/// # Errors
/// An address is invalid, or there are too many.
pub fn check_addresses(addresses: &[String]) -> Result<(), Refusal> {
    if addresses.len() > MAX_ADDRESSES {
        return Err(Refusal::invalid(format_args!(
            "it has {} addresses; {MAX_ADDRESSES} are the most",
            addresses.len()
        )));
    }
    for a in addresses {
        let ip = address(a).map_err(Refusal::invalid)?;
        if ip.is_unspecified() || ip.is_multicast() {
            return Err(Refusal::invalid(format_args!("other hosts cannot reach it at {ip}")));
        }
    }
    Ok(())
}

fn check_group(g: &v1::Group) -> Result<(), Refusal> {
    within("the VNI", g.vni, 1, MAX_VNI)?;
    within("the VLAN", g.vlan, 1, MAX_VLAN)?;
    within("the weight", g.weight, 1, MAX_WEIGHT)?;
    ranges(g)?;
    check_limits(g.limits.as_ref())?;
    check_share(g.share.as_ref())
}

fn check_vrnic(v: &v1::Vrnic) -> Result<(), Refusal> {
    check_name("group", &v.group)?;
    if !v.host.is_empty() {
        check_name("host", &v.host)?;
    }
    if !v.instance.is_empty() {
        check_name("instance", &v.instance)?;
    }
    if v1::Way::try_from(v.way).is_err() {
        return Err(Refusal::invalid("the way is neither SOFT nor VF nor AUTO"));
    }
    ips(v)?;
    check_limits(v.limits.as_ref())?;
    check_share(v.share.as_ref())
}

fn check_rule(r: &v1::Rule) -> Result<(), Refusal> {
    selector(&r.from)?;
    selector(&r.to)?;
    within("the priority", Some(r.priority), 0, 65_535)?;
    if v1::rule::Action::try_from(r.action).is_err() {
        return Err(Refusal::invalid("the action is neither ALLOW nor DENY"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(object: impl Into<object::Object>, what: &str) {
        let e = check(&object.into()).unwrap_err();
        assert!(e.what.contains(what), "{e}");
    }

    #[test]
    fn objects_that_cannot_be_say_why() {
        let group = |ranges: &[&str]| v1::Group {
            name: "g".into(),
            ranges: ranges.iter().map(|s| s.to_string()).collect(),
            ..Default::default()
        };
        let vrnic = |ips: &[&str]| v1::Vrnic {
            name: "a".into(),
            group: "g".into(),
            ips: ips.iter().map(|s| s.to_string()).collect(),
            ..Default::default()
        };
        let rule = |from: &str, to: &str| v1::Rule {
            name: "r".into(),
            from: from.into(),
            to: to.into(),
            ..Default::default()
        };
        refused(v1::Group { name: "../x".into(), ..Default::default() }, "no group name");
        refused(group(&["10.0.0.1/16"]), "group g: the range 10.0.0.1/16 names a host; write 10.0.0.0/16");
        refused(group(&["10.0.0.0/16", "11.0.0.0/16"]), "at most one range of IPv4");
        refused(group(&["x"]), "`x` has no prefix length");
        refused(group(&["224.0.0.0/8"]), "no addresses of 224.0.0.0/8");
        refused(v1::Group { vni: Some(0), ..group(&[]) }, "the VNI is 0, but must be 1 to 16777215");
        refused(v1::Group { weight: Some(10_001), ..group(&[]) }, "the weight is 10001");
        refused(v1::Group { vlan: Some(4_095), ..group(&[]) }, "the VLAN is 4095, but must be 1 to 4094");
        refused(v1::Vrnic { way: 3, ..vrnic(&[]) }, "neither SOFT nor VF nor AUTO");
        refused(v1::Vrnic { instance: "a b".into(), ..vrnic(&[]) }, "`a b` is no instance name");
        refused(vrnic(&["10.0.0.1", "10.0.0.1/8"]), "vRNIC a: it has the address 10.0.0.1 twice");
        refused(vrnic(&["10.0.0.1", "10.0.0.2"]), "at most one IPv4 address");
        refused(vrnic(&["127.0.0.1"]), "cannot be the address");
        refused(vrnic(&["fe80::1"]), "cannot be the address");
        refused(v1::Vrnic { group: String::new(), ..vrnic(&[]) }, "`` is no group name");
        refused(rule("blue", "group:red"), "rule r: `blue` is no end of a rule");
        refused(v1::Rule { priority: 65_536, ..rule("group:a", "vrnic:b") }, "the priority is 65536");
        refused(v1::Rule { action: 7, ..rule("group:a", "vrnic:b") }, "neither ALLOW nor DENY");
        refused(
            v1::Host { name: "h".into(), addresses: vec!["0.0.0.0".into()], ..Default::default() },
            "cannot reach it at 0.0.0.0",
        );
        assert_eq!(check(&group(&["10.0.0.0/16", "fd00::/64"]).into()), Ok(()));
        assert_eq!(check(&vrnic(&["10.0.0.1", "fd00::1/64", "fd00::2"]).into()), Ok(()));
        assert_eq!(check(&rule("group:a", "vrnic:b").into()), Ok(()));
    }
}
