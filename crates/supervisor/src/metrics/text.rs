//! The page of a host: each family's description, and a line for each of its figures.

use std::collections::BTreeMap;

use unirdma_ipc::vrnic::VrnicInfo;
use unirdma_metrics::{Kind, Value, Writer};

use super::table::{self, Family, Whose};
use crate::admin::{VF_KINDS, VF_REFUSALS, VfAnswers};
use crate::supervisor::stats::{GroupFigures, HostFigures};

/// Writes a family, with the figures of each object in `of`: its group, its vRNIC and itself.
fn family<'a, T: 'a>(
    w: &mut Writer,
    prefix: &str,
    family: &Family<T>,
    of: impl Iterator<Item = (&'a str, &'a str, &'a T)>,
) {
    let name = format!("{prefix}{}", family.name);
    w.head(&name, family.kind.word(), family.help);
    for (group, vrnic, figures) in of {
        let whose = if vrnic.is_empty() { "" } else { "vrnic" };
        for (word, value) in family.values {
            w.line(&name, &[("group", group), (whose, vrnic), (family.label, word)], value(figures));
        }
    }
}

/// The whole page, with figures of the first `most` vRNICs in the order of groups and names.
pub(super) fn page(host: &HostFigures, most: usize) -> String {
    let mut w = Writer::default();
    w.head("unirdma_build_info", "gauge", "Which program this is.");
    w.line("unirdma_build_info", &[("version", env!("CARGO_PKG_VERSION"))], Value::N(1));
    let told = || host.groups.iter().filter_map(|g| Some((g, g.told.as_ref()?)));
    let vrnics: Vec<(&str, &VrnicInfo)> =
        told().flat_map(|(g, t)| t.vrnics.iter().map(|v| (g.group.as_str(), v))).take(most).collect();
    for f in table::VRNIC {
        family(&mut w, "unirdma_vrnic_", f, vrnics.iter().map(|(g, v)| (*g, v.name.as_str(), *v)));
    }
    for f in table::VRNIC.iter().filter(|f| f.whose == Whose::Both) {
        family(&mut w, "unirdma_group_", f, told().map(|(g, t)| (g.group.as_str(), "", &t.all)));
    }
    let groups = || host.groups.iter().map(|g| (g.group.as_str(), "", &**g));
    family(&mut w, "unirdma_worker_", &table::UP, groups());
    for f in table::WORKER {
        family(&mut w, "unirdma_worker_", f, groups().filter(|g| g.2.known));
    }
    for set in table::TOLD {
        for f in set.families {
            family(&mut w, set.prefix, f, told().map(|(g, t)| (g.group.as_str(), "", &t.status)));
        }
    }
    lock_times(&mut w, told().map(|(g, t)| (&**g, &t.status.rnic_held)));
    w.one("unirdma_vrnics", Kind::Gauge, "vRNICs of this host.", host.vrnics as u64);
    let left_out = host.vrnics.saturating_sub(vrnics.len()) as u64;
    let help = "vRNICs without series of their own: more than --metrics-vrnics, or their worker does not answer.";
    w.one("unirdma_metrics_vrnics_left_out", Kind::Gauge, help, left_out);
    pool(&mut w, host);
    network(&mut w, host);
    w.finish()
}

/// Writes a histogram for each worker.
fn lock_times<'a>(w: &mut Writer, workers: impl Iterator<Item = (&'a GroupFigures, &'a unirdma_device::HoldTimes)>) {
    let (name, help) = table::HELD;
    w.head(name, "histogram", help);
    let (bucket, sum, count) = (format!("{name}_bucket"), format!("{name}_sum"), format!("{name}_count"));
    for (g, held) in workers {
        for (edge, shorter) in table::held(held) {
            w.line(&bucket, &[("group", &g.group), ("le", &(edge as f64 / 1e9).to_string())], Value::N(shorter));
        }
        w.line(&bucket, &[("group", &g.group), ("le", "+Inf")], Value::N(held.times));
        w.line(&sum, &[("group", &g.group)], Value::Ns(held.sum_ns));
        w.line(&count, &[("group", &g.group)], Value::N(held.times));
    }
}

/// Writes the figures of the pool of VFs.
fn pool(w: &mut Writer, host: &HostFigures) {
    let Some(info) = &host.vfs else { return };
    let mut counts: BTreeMap<(&str, &str), u64> = BTreeMap::new();
    for vf in &info.vfs {
        for kind in VF_KINDS {
            *counts.entry((&vf.pf, kind)).or_default() += u64::from(vf.kind == kind);
        }
    }
    w.head("unirdma_vfs", "gauge", "VFs of the pool, by PF and state.");
    for ((pf, kind), count) in counts {
        w.line("unirdma_vfs", &[("pf", pf), ("state", kind)], Value::N(count));
    }
    let leases = info.vfs.iter().filter(|vf| vf.lease.is_some()).count();
    w.one("unirdma_vf_leases", Kind::Gauge, "Leases of VFs, also those that are being returned.", leases as u64);
    w.one("unirdma_vf_waiting", Kind::Gauge, "Requests that wait for a VF.", info.waiting as u64);
    let VfAnswers { waits, soft, evicted, refusals } = info.answers;
    w.one("unirdma_vf_waits_total", Kind::Counter, "Requests that had to wait for a VF.", waits);
    w.one("unirdma_vf_soft_total", Kind::Counter, "Requests for a VF that got the software RNIC.", soft);
    w.one("unirdma_vf_evictions_total", Kind::Counter, "Contexts on a VF that was taken away.", evicted);
    w.head("unirdma_vf_refusals_total", "counter", "Requests for a VF that were refused, by reason.");
    for (why, count) in VF_REFUSALS.into_iter().zip(refusals) {
        w.line("unirdma_vf_refusals_total", &[("why", why)], Value::N(count));
    }
}

/// Writes the figures of the network to other hosts.
fn network(w: &mut Writer, host: &HostFigures) {
    let Some(wire) = &host.wire else { return };
    let drops = &wire.tunnel.drops;
    w.one("unirdma_peers", Kind::Gauge, "Addresses of other hosts that are known.", wire.peers as u64);
    let help = "1 if the peers file as it is now is in force.";
    w.one("unirdma_peers_file_valid", Kind::Gauge, help, wire.peers_error.is_none().into());
    let help = "1 if only the virtual layer can send from and to its ports.";
    w.one("unirdma_firewall_up", Kind::Gauge, help, wire.firewall.is_some().into());
    let help = "Peers that have not said which groups they have.";
    w.one("unirdma_tunnel_silent_hosts", Kind::Gauge, help, wire.tunnel.silent.len() as u64);
    let help = "Groups that have another number on a peer than here.";
    w.one("unirdma_tunnel_disagreements", Kind::Gauge, help, wire.tunnel.disagreements.len() as u64);
    let name = "unirdma_announcements_dropped_total";
    w.head(name, "counter", "Announcements of other hosts that were dropped, by reason.");
    let reasons = [
        ("not_a_peer", drops.not_a_peer),
        ("no_group", drops.no_group),
        ("not_agreed", drops.not_agreed),
        ("address", drops.address),
        ("malformed", drops.malformed),
    ];
    for (reason, n) in reasons {
        w.line(name, &[("reason", reason)], Value::N(n));
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::sync::Arc;

    use super::*;
    use crate::admin::{VfAnswers, VfInfo, VfsInfo};
    use crate::network::TunnelInfo;
    use crate::network::WireInfo;
    use unirdma_ipc::message::Figures;

    /// A host with these groups, the given number of vRNICs in each, and one more worker, which does not answer.
    fn host(groups: &[(&str, usize)]) -> HostFigures {
        let mut all: Vec<Arc<GroupFigures>> = Vec::new();
        for &(name, count) in groups {
            let mut told = Figures::default();
            for i in 0..count {
                let mut v = VrnicInfo { name: format!("v{i}"), qps: 2, busy_ns: 1_500_000_001, ..VrnicInfo::default() };
                (v.counters.sent_bytes, v.counters.wire.sent_bytes) = (100, 30);
                told.all.add(&v);
                told.vrnics.push(v);
            }
            told.status.rnic_held.times = 7;
            all.push(Arc::new(GroupFigures {
                group: name.into(),
                known: true,
                vrnics: count,
                told: Some(told),
                ..GroupFigures::default()
            }));
        }
        all.push(Arc::new(GroupFigures { group: "gone".into(), ..GroupFigures::default() }));
        let vrnics = groups.iter().map(|g| g.1).sum::<usize>() + 3;
        let wire = WireInfo {
            addresses: Vec::new(),
            peers_file: String::new(),
            peers: 4,
            peers_error: None,
            mtu: 1024,
            port: Default::default(),
            drops: Default::default(),
            tunnel: TunnelInfo::default(),
            firewall: None,
            rules: Default::default(),
        };
        HostFigures { groups: all, vrnics, vfs: None, wire: Some(wire) }
    }

    #[test]
    fn vfs_are_counted_by_pf_and_state() {
        let vf = |kind: &str, lease| VfInfo { pf: "ens1".into(), kind: kind.into(), lease, ..VfInfo::default() };
        let vfs = vec![vf("ready", None), vf("leased", Some(7)), vf("dirty", Some(6)), vf("ready", None)];
        let answers = VfAnswers { waits: 9, soft: 8, evicted: 7, refusals: [1, 2, 3, 4, 5] };
        let info = VfsInfo { vfs, waiting: 3, answers, ..VfsInfo::default() };
        let page = page(&HostFigures { vfs: Some(info), ..HostFigures::default() }, 0);
        for line in [
            "unirdma_vfs{pf=\"ens1\",state=\"ready\"} 2",
            "unirdma_vfs{pf=\"ens1\",state=\"foreign\"} 0",
            "unirdma_vf_leases 2",
            "unirdma_vf_waiting 3",
            "unirdma_vf_waits_total 9",
            "unirdma_vf_soft_total 8",
            "unirdma_vf_evictions_total 7",
            "unirdma_vf_refusals_total{why=\"dry\"} 1",
            "unirdma_vf_refusals_total{why=\"unfit\"} 5",
        ] {
            assert!(page.lines().any(|l| l == line), "{line}: {page}");
        }
        let without_pool = super::page(&HostFigures::default(), 0);
        assert!(!["vfs", "vf_leases", "vf_refusals"].iter().any(|f| without_pool.contains(&format!("unirdma_{f}"))));
    }

    /// The families of a page, with their kinds.
    fn families(page: &str) -> BTreeMap<&str, &str> {
        page.lines().filter_map(|l| l.strip_prefix("# TYPE ")?.split_once(' ')).collect()
    }

    /// There are no figures of a group whose figures are unknown: a counter that is 0 for a moment would look like a
    /// restart.
    #[test]
    fn the_page_is_as_it_was_read() {
        insta::assert_snapshot!(page(&host(&[("blue", 2), ("red", 1)]), 1));
    }

    /// See https://prometheus.io/docs/practices/naming and the rules of `promtool check metrics`.
    #[test]
    fn names_follow_the_conventions_and_each_family_stands_together_once() {
        let page = page(&host(&[("blue", 2)]), 10);
        let families = families(&page);
        assert_eq!(families.len(), page.matches("# TYPE ").count(), "no name twice");
        for (name, kind) in &families {
            let legal = name.bytes().all(|b| b.is_ascii_lowercase() || b == b'_');
            assert!(legal && name.starts_with("unirdma_"), "{name}");
            assert_eq!(name.ends_with("_total"), *kind == "counter", "{name}");
            for unit in ["_ms", "_us", "_ns", "_kib", "_mib", "_bits", "_minutes", "counter", "gauge"] {
                assert!(!name.contains(unit), "{name} has {unit}");
            }
            assert!(page.contains(&format!("# HELP {name} ")), "{name}");
        }
        // Each line belongs to the family whose head is above it.
        let (mut family, mut seen) = ("", BTreeSet::new());
        for line in page.lines() {
            match line.strip_prefix("# HELP ") {
                Some(head) => {
                    family = head.split(' ').next().unwrap();
                    assert!(head.ends_with('.'), "{head}");
                }
                None if line.starts_with('#') => {}
                None => {
                    let (series, value) = line.rsplit_once(' ').unwrap();
                    let name = series.split('{').next().unwrap();
                    let part = name.strip_prefix(family).unwrap_or("no");
                    assert!(["", "_bucket", "_sum", "_count"].contains(&part), "{line} below {family}");
                    assert!(value.parse::<f64>().is_ok(), "{line}");
                    assert!(seen.insert(series.to_string()), "{series} twice");
                }
            }
        }
    }

    #[test]
    fn many_vrnics_make_no_more_series_than_allowed_and_are_in_the_sums() {
        let host = host(&[("blue", 30), ("red", 30)]);
        let series = |most| page(&host, most).lines().filter(|l| l.starts_with("unirdma_vrnic_sent_bytes")).count();
        assert_eq!((series(0), series(40), series(1000)), (0, 80, 120));
        let page = page(&host, 40);
        assert!(page.contains("\nunirdma_metrics_vrnics_left_out 23\n"), "{page}");
        assert!(page.contains("unirdma_group_queue_pairs{group=\"red\"} 60"));
        // The number of lines of one vRNIC, so that the cost of added families is visible.
        let lines = |most| super::page(&host, most).lines().count();
        assert!(lines(40) - lines(39) <= 70, "{}", lines(40) - lines(39));
    }

    /// Each panel of the dashboard uses series that exist.
    #[test]
    fn the_dashboard_names_only_what_is_exported() {
        let dashboard = include_str!("../../../../docs/grafana/unirdma.json");
        let board: serde_json::Value = serde_json::from_str(dashboard).unwrap();
        let page = page(&host(&[("blue", 1)]), 10);
        let names: BTreeSet<&str> =
            page.lines().filter(|l| !l.starts_with('#')).filter_map(|l| l.split(['{', ' ']).next()).collect();
        let mut expressions = Vec::new();
        collect(&board, &mut expressions);
        assert!(expressions.len() > 10);
        for e in expressions {
            let words = e.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
            let used: Vec<&str> = words.filter(|w| w.starts_with("unirdma_")).collect();
            assert!(!used.is_empty(), "{e}");
            used.iter().for_each(|w| assert!(names.contains(w), "{w} in {e}"));
        }
    }

    /// All queries of a dashboard: in its panels and in its variables.
    fn collect<'a>(value: &'a serde_json::Value, into: &mut Vec<&'a str>) {
        match value {
            serde_json::Value::Object(o) => {
                for (key, value) in o {
                    match value.as_str() {
                        Some(text) if ["expr", "query", "definition"].contains(&key.as_str()) => {
                            into.extend((text != "prometheus").then_some(text));
                        }
                        _ => collect(value, into),
                    }
                }
            }
            serde_json::Value::Array(a) => a.iter().for_each(|v| collect(v, into)),
            _ => {}
        }
    }
}
