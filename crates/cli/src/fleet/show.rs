//! Output of commands about a fleet.

use std::io;

use anstyle::AnsiColor;
use serde::Serialize;
use serde_json::Value;
use unirdma_fleet::Kind;
use unirdma_fleet::v1::{self, object::Object};

use super::KindArg;
use crate::print::{coloured, table};
use crate::units;

fn out(text: &str) -> io::Result<()> {
    crate::print::line(text)
}

/// Prints an answer as JSON or as text.
pub(super) fn json_or(answer: &impl Serialize, json: bool, text: impl FnOnce() -> String) -> io::Result<()> {
    if json { out(&serde_json::to_string_pretty(answer)?) } else { out(&text()) }
}

/// Seconds since 1970.
pub(super) fn now() -> u64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

fn of(change: &v1::Change) -> Option<&Object> {
    change.after.as_ref().or(change.before.as_ref())?.object.as_ref()
}

fn line(change: &v1::Change) -> Option<String> {
    let verb = match (&change.before, &change.after) {
        (None, _) => "made",
        (_, None) => "deleted",
        _ => "changed",
    };
    let object = of(change)?;
    let more = match object {
        Object::Vrnic(v) if change.after.is_some() => format!(": {}", v.ips.join(" ")),
        _ => String::new(),
    };
    Some(format!("{verb} {} {}{more}", object.kind(), object.name()))
}

/// Prints the changes that were made, or would be made.
pub(super) fn applied(done: &v1::ApplyResponse, dry_run: bool, json: bool) -> io::Result<()> {
    json_or(done, json, || {
        let mut lines: Vec<String> = done.changes.iter().filter_map(line).collect();
        match (lines.is_empty(), dry_run) {
            (true, _) => lines.push("nothing changes".into()),
            (false, true) => lines.push("nothing was changed: this was a dry run".into()),
            (false, false) => lines.push(format!("revision {}", done.revision)),
        }
        lines.join("\n")
    })
}

/// The fields of an object, as in JSON.
fn fields(object: Option<&v1::Object>) -> serde_json::Map<String, Value> {
    let value = object.and_then(|o| o.object.as_ref()).and_then(|o| match o {
        Object::Host(o) => serde_json::to_value(o).ok(),
        Object::Group(o) => serde_json::to_value(o).ok(),
        Object::Vrnic(o) => serde_json::to_value(o).ok(),
        Object::Rule(o) => serde_json::to_value(o).ok(),
    });
    if let Some(Value::Object(map)) = value { map } else { serde_json::Map::new() }
}

/// Prints the changes that would be made, field by field.
pub(super) fn difference(done: &v1::ApplyResponse, json: bool) -> io::Result<()> {
    json_or(done, json, || {
        let mut lines = Vec::new();
        for change in &done.changes {
            let Some(object) = of(change) else { continue };
            let sign = match (&change.before, &change.after) {
                (None, _) => '+',
                (_, None) => '-',
                _ => '~',
            };
            lines.push(format!("{sign} {} {}", object.kind(), object.name()));
            let (before, after) = (fields(change.before.as_ref()), fields(change.after.as_ref()));
            let names: std::collections::BTreeSet<&String> = before.keys().chain(after.keys()).collect();
            for name in names.into_iter().filter(|n| *n != "name" && before.get(*n) != after.get(*n)) {
                lines.extend(before.get(name).map(|v| format!("    - {name}: {v}")));
                lines.extend(after.get(name).map(|v| format!("    + {name}: {v}")));
            }
        }
        if lines.is_empty() {
            lines.push("nothing would change".into());
        }
        lines.join("\n")
    })
}

fn or_dash(text: &str) -> String {
    if text.is_empty() { "-".into() } else { text.into() }
}

fn number(n: Option<impl ToString>) -> String {
    n.map_or("-".into(), |n| n.to_string())
}

/// A limit with a decimal prefix, as it is declared; 0 means that there is none.
fn limit(n: Option<u64>, unit: &str) -> String {
    match n {
        None => "-".into(),
        Some(0) => "none".into(),
        Some(n) => format!("{}{unit}", units::decimal(n)).trim_end().into(),
    }
}

/// Weight, rate and operations of a share; `-` for a value that is not stated, which a vRNIC takes from its group.
fn share(s: Option<&v1::Share>) -> [String; 3] {
    let s = s.copied().unwrap_or_default();
    [number(s.weight), limit(s.rate, "bit/s"), limit(s.ops, "")]
}

/// Problems of a host: a wrong clock, and work that failed.
fn problems(s: &v1::HostState) -> String {
    let off = s.clock_ms.unsigned_abs() / 1_000;
    let clock = (s.connected && off >= 5).then(|| {
        let side = if s.clock_ms > 0 { "ahead of" } else { "behind" };
        format!("its clock is {off} s {side} the centre's")
    });
    clock.into_iter().chain(s.problems.iter().cloned()).collect::<Vec<_>>().join("; ")
}

/// VFs that programs may have at once, of all in the host's pool.
fn free_vfs(s: Option<&v1::HostState>) -> String {
    let pools = s.map_or(&[][..], |s| &s.pools);
    let (ready, vfs) = pools.iter().fold((0u64, 0u64), |(r, n), p| (r + u64::from(p.ready), n + u64::from(p.vfs)));
    if pools.is_empty() { "-".into() } else { format!("{ready}/{vfs}") }
}

/// The way of a vRNIC's programs, and the VF that they have.
fn way(asked: v1::Way, s: Option<&v1::VrnicState>) -> String {
    let word = |way: v1::Way| way.as_str_name().to_lowercase();
    match s.filter(|s| s.there) {
        Some(s) if !s.vf.is_empty() => format!("{} ({})", word(asked), s.vf),
        Some(s) if s.way() != asked => format!("{} ({})", word(asked), word(s.way())),
        _ => word(asked),
    }
}

fn rows(head: &[&str], rows: impl Iterator<Item = Vec<String>>) -> String {
    let head = head.iter().map(ToString::to_string).collect();
    table(&std::iter::once(head).chain(rows).collect::<Vec<_>>())
}

/// Prints objects and their state.
pub(super) fn objects(kind: KindArg, found: &v1::GetResponse, json: bool) -> io::Result<()> {
    let all = || found.objects.iter().filter_map(|o| o.object.as_ref());
    json_or(found, json, || match kind {
        KindArg::Host => {
            let states: std::collections::HashMap<&str, &v1::HostState> =
                found.hosts.iter().map(|s| (s.name.as_str(), s)).collect();
            let hosts = all().filter_map(|o| if let Object::Host(h) = o { Some(h) } else { None });
            let lines = hosts.map(|h| {
                let s = states.get(h.name.as_str());
                let connected = s.is_some_and(|s| s.connected);
                let here = if connected { "yes".into() } else { coloured(AnsiColor::Red, "no") };
                let applied = s.map_or(0, |s| s.applied);
                let problems = s.map_or(String::new(), |s| problems(s));
                vec![
                    h.name.clone(),
                    or_dash(&h.addresses.join(",")),
                    here,
                    applied.to_string(),
                    free_vfs(s.copied()),
                    or_dash(&problems),
                ]
            });
            rows(&["NAME", "ADDRESSES", "CONNECTED", "REVISION", "FREE VFS", "PROBLEMS"], lines)
        }
        KindArg::Group => {
            let groups = all().filter_map(|o| if let Object::Group(g) = o { Some(g) } else { None });
            let lines = groups.map(|g| {
                let ranges = if g.ranges.is_empty() { "10.77.0.0/16".into() } else { g.ranges.join(",") };
                let secret = if g.secret { "yes" } else { "no" };
                let [_, rate, ops] = share(g.share.as_ref());
                let most = [number(g.max_vrnics), number(g.max_rules)].join("/");
                let [vni, vlan, weight] = [g.vni, g.vlan, g.weight].map(number);
                vec![g.name.clone(), vni, vlan, ranges, weight, most, secret.into(), rate, ops]
            });
            let head = ["NAME", "VNI", "VLAN", "RANGES", "WEIGHT", "MAX VRNICS/RULES", "SECRET", "RATE", "OPS"];
            rows(&head, lines)
        }
        KindArg::Vrnic => {
            let states: std::collections::HashMap<&str, &v1::VrnicState> =
                found.vrnics.iter().map(|s| (s.name.as_str(), s)).collect();
            let vrnics = all().filter_map(|o| if let Object::Vrnic(v) = o { Some(v) } else { None });
            let lines = vrnics.map(|v| {
                let s = states.get(v.name.as_str());
                let there = if s.is_some_and(|s| s.there) { "yes" } else { "no" };
                let programs = s.map_or(0, |s| s.programs).to_string();
                let [weight, rate, ops] = share(v.share.as_ref());
                vec![
                    v.name.clone(),
                    v.group.clone(),
                    or_dash(&v.host),
                    v.ips.join(","),
                    v.mac.clone(),
                    there.into(),
                    way(v.way(), s.copied()),
                    programs,
                    weight,
                    rate,
                    ops,
                ]
            });
            let head = ["NAME", "GROUP", "HOST", "ADDRESS", "MAC", "THERE", "WAY", "PROGRAMS", "WEIGHT", "RATE", "OPS"];
            rows(&head, lines)
        }
        KindArg::Rule => {
            let rules = all().filter_map(|o| if let Object::Rule(r) = o { Some(r) } else { None });
            let lines = rules.map(|r| {
                let both = if r.both { "both" } else { "one" };
                vec![
                    r.name.clone(),
                    r.action().as_str_name().into(),
                    r.from.clone(),
                    r.to.clone(),
                    both.into(),
                    r.priority.to_string(),
                ]
            });
            rows(&["NAME", "ACTION", "FROM", "TO", "WAYS", "PRIORITY"], lines)
        }
    })
}

/// Prints a message of `watch`.
pub(super) fn news(m: &v1::WatchResponse, json: bool) -> io::Result<()> {
    if json {
        return out(&serde_json::to_string(m)?);
    }
    for text in m.changes.iter().filter_map(line) {
        out(&text)?;
    }
    if m.complete {
        out(&format!("this is all at revision {}", m.revision))?;
    }
    for h in &m.hosts {
        out(&format!("host {} {}", h.name, if h.connected { "is connected" } else { "is not connected" }))?;
    }
    Ok(())
}

/// Prints the log of changes.
pub(super) fn audit(found: &v1::AuditResponse, json: bool) -> io::Result<()> {
    json_or(found, json, || {
        let lines = found.entries.iter().flat_map(|e| {
            let ago = now().saturating_sub(e.time);
            e.what.iter().map(move |w| vec![e.revision.to_string(), format!("{ago} s ago"), e.who.clone(), w.clone()])
        });
        rows(&["REVISION", "WHEN", "WHO", "WHAT"], lines)
    })
}

/// Prints tokens.
pub(super) fn tokens(found: &v1::ListTokensResponse, json: bool) -> io::Result<()> {
    json_or(found, json, || {
        let lines = found.tokens.iter().map(|t| {
            let expires = match t.expires {
                0 => "never".to_owned(),
                at if at <= now() => "expired".into(),
                at => format!("in {} h", (at - now()).div_ceil(3_600)),
            };
            let role = t.role().as_str_name().to_lowercase();
            let host = if t.host.is_empty() { t.hosts.join(",") } else { t.host.clone() };
            vec![t.id.clone(), role, or_dash(&t.groups.join(",")), or_dash(&host), expires]
        });
        rows(&["NAME", "ROLE", "GROUPS", "HOST", "EXPIRES"], lines)
    })
}

/// Prints the centre's figures.
pub(super) fn status(s: &v1::StatusResponse, json: bool) -> io::Result<()> {
    json_or(s, json, || {
        let line = |name: &str, value: String| vec![name.to_owned(), value];
        let count = |kind: Kind, n: u32| line(&format!("{kind}s"), n.to_string());
        let allocates = match (s.allocates, s.allocator.as_str()) {
            (true, url) => format!("this centre, {url}"),
            (false, "") => "no centre at the moment".into(),
            (false, url) => url.into(),
        };
        // A tenant is told neither of the store nor of hosts.
        let of_all = [
            line("store", s.store.clone()),
            line("allocates", allocates),
            line("hosts", format!("{}, {} of them connected", s.hosts, s.hosts_connected)),
        ];
        let of_all = if s.store.is_empty() { &[][..] } else { &of_all };
        let own = [
            line("version", s.version.clone()),
            line("revision", s.revision.to_string()),
            count(Kind::Group, s.groups),
            count(Kind::Vrnic, s.vrnics),
            count(Kind::Rule, s.rules),
        ];
        table(&[&own[..1], of_all, &own[1..]].concat())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ways_and_pools_are_shown_in_a_few_words() {
        let pool = |ready, vfs| v1::Pool { ready, vfs, ..Default::default() };
        let host = v1::HostState { pools: vec![pool(3, 8), pool(0, 4)], ..Default::default() };
        assert_eq!((free_vfs(Some(&host)), free_vfs(None)), ("3/12".into(), "-".into()));
        let mut s = v1::VrnicState { there: true, ..Default::default() };
        assert_eq!(way(v1::Way::Auto, None), "auto");
        assert_eq!(way(v1::Way::Soft, Some(&s)), "soft");
        assert_eq!(way(v1::Way::Auto, Some(&s)), "auto (soft)");
        s.set_way(v1::Way::Vf);
        assert_eq!(way(v1::Way::Vf, Some(&s)), "vf");
        s.vf = "ens1f0/3".into();
        assert_eq!(way(v1::Way::Auto, Some(&s)), "auto (ens1f0/3)");
    }

    #[test]
    fn limits_and_clocks_are_shown_as_people_write_them() {
        let s = v1::Share { weight: Some(200), rate: Some(2_500_000_000), ops: Some(0), burst: None };
        assert_eq!(share(Some(&s)), ["200", "2.5 Gbit/s", "none"]);
        assert_eq!(share(None), ["-", "-", "-"]);
        assert_eq!(limit(Some(500_000), ""), "500 K");
        let mut h = v1::HostState { connected: true, clock_ms: -7_200_000, ..Default::default() };
        h.problems.push("no room".into());
        assert_eq!(problems(&h), "its clock is 7200 s behind the centre's; no room");
        assert_eq!(problems(&v1::HostState { connected: true, clock_ms: 900, ..Default::default() }), "");
    }
}
