//! Rates: the changes from one answer of the virtual layer to the next.

use std::cmp::Ordering;
use std::collections::HashMap;
use std::time::Instant;

use serde::Serialize;
use unirdma_ipc::vrnic::VrnicInfo;

use super::short;

/// All vRNICs at one time.
pub(super) struct Sample {
    pub at: Instant,
    vrnics: HashMap<String, VrnicInfo>,
}

impl Sample {
    pub fn new(at: Instant, vrnics: Vec<VrnicInfo>) -> Self {
        Sample { at, vrnics: vrnics.into_iter().map(|v| (v.name.clone(), v)).collect() }
    }
}

/// A row of the table: one vRNIC.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(super) struct Row {
    /// Its name.
    pub name: String,
    /// Its group.
    pub group: String,
    /// Its link is up.
    pub up: bool,
    /// Bytes sent per second.
    #[serde(rename = "sent_bytes_per_second")]
    pub sent_bytes: f64,
    /// Bytes received per second.
    #[serde(rename = "received_bytes_per_second")]
    pub received_bytes: f64,
    /// Work requests sent per second.
    #[serde(rename = "sends_per_second")]
    pub sends: f64,
    /// Receives completed per second.
    #[serde(rename = "receives_per_second")]
    pub receives: f64,
    /// Errors and dropped messages per second.
    #[serde(rename = "errors_per_second")]
    pub errors: f64,
    /// Share of one processor.
    pub cpu: f64,
    /// QPs that exist.
    #[serde(rename = "queue_pairs")]
    pub qps: usize,
    /// MRs that exist.
    #[serde(rename = "memory_regions")]
    pub mrs: usize,
    /// Programs and virtual machines that have opened it.
    pub sessions: usize,
}

/// A column of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Column {
    Name,
    Group,
    Sent,
    Received,
    Sends,
    Recvs,
    Errors,
    Cpu,
    Qps,
    Mrs,
}

impl Column {
    pub const ALL: [Column; 10] = [
        Column::Name,
        Column::Group,
        Column::Sent,
        Column::Received,
        Column::Sends,
        Column::Recvs,
        Column::Errors,
        Column::Cpu,
        Column::Qps,
        Column::Mrs,
    ];

    pub fn head(self) -> &'static str {
        match self {
            Column::Name => "VRNIC",
            Column::Group => "GROUP",
            Column::Sent => "SENT",
            Column::Received => "RECEIVED",
            Column::Sends => "SENDS",
            Column::Recvs => "RECVS",
            Column::Errors => "ERRORS",
            Column::Cpu => "CPU",
            Column::Qps => "QPS",
            Column::Mrs => "MRS",
        }
    }

    pub fn is_text(self) -> bool {
        matches!(self, Column::Name | Column::Group)
    }
}

impl Row {
    pub fn matches(&self, filter: &str) -> bool {
        let contains = |text: &str| text.to_lowercase().contains(&filter.to_lowercase());
        contains(&self.name) || contains(&self.group)
    }

    /// The value by which a column sorts, and which it shows as a number.
    fn number(&self, column: Column) -> f64 {
        match column {
            Column::Name | Column::Group => 0.0,
            Column::Sent => self.sent_bytes,
            Column::Received => self.received_bytes,
            Column::Sends => self.sends,
            Column::Recvs => self.receives,
            Column::Errors => self.errors,
            Column::Cpu => self.cpu,
            Column::Qps => self.qps as f64,
            Column::Mrs => self.mrs as f64,
        }
    }

    pub fn cell(&self, column: Column) -> String {
        match column {
            Column::Name => self.name.clone(),
            Column::Group => self.group.clone(),
            Column::Sent | Column::Received => match short(self.number(column)) {
                zero if zero == "0" => zero,
                n => n + "B",
            },
            Column::Cpu => format!("{:.0}%", self.cpu * 100.0),
            _ => short(self.number(column)),
        }
    }

    /// Adds another row's numbers.
    pub fn add(&mut self, o: &Row) {
        self.sent_bytes += o.sent_bytes;
        self.received_bytes += o.received_bytes;
        self.sends += o.sends;
        self.receives += o.receives;
        self.errors += o.errors;
        self.cpu += o.cpu;
        self.qps += o.qps;
        self.mrs += o.mrs;
        self.sessions += o.sessions;
    }
}

/// The vRNICs of `after`, with their rates since `before`. A vRNIC that is not in `before` has no rates yet.
pub(super) fn rows(before: &Sample, after: &Sample) -> Vec<Row> {
    let seconds = after.at.duration_since(before.at).as_secs_f64().max(1e-3);
    let row = |v: &VrnicInfo| {
        let of = |count: fn(&VrnicInfo) -> u64| {
            let Some(was) = before.vrnics.get(&v.name) else { return 0.0 };
            let (was, is) = (count(was), count(v));
            // Counters begin at 0 when a worker is started again or a vRNIC is made again.
            is.checked_sub(was).unwrap_or(is) as f64 / seconds
        };
        Row {
            name: v.name.clone(),
            group: v.group.clone(),
            up: v.up,
            sent_bytes: of(|v| v.counters.sent_bytes),
            received_bytes: of(|v| v.counters.received_bytes),
            sends: of(|v| v.counters.sent_wrs),
            receives: of(|v| v.counters.received_wrs),
            errors: of(|v| v.counters.errors + v.counters.dropped + v.counters.qkey_violations),
            cpu: of(|v| v.busy_ns) / 1e9,
            qps: v.qps,
            mrs: v.mrs_mapped + v.mrs_copied,
            sessions: v.sessions,
        }
    };
    after.vrnics.values().map(row).collect()
}

/// Sorts numbers largest first, and names alphabetically; `reversed`: the other way round. Equal rows are in the order
/// of their names.
pub(super) fn sort(rows: &mut [Row], column: Column, reversed: bool) {
    let order = |a: &Row, b: &Row| match column {
        Column::Name => Ordering::Equal,
        Column::Group => a.group.cmp(&b.group),
        _ => b.number(column).total_cmp(&a.number(column)),
    };
    rows.sort_by(|a, b| {
        let (by, names) = (order(a, b), a.name.cmp(&b.name));
        match (reversed, column) {
            (true, Column::Name) => names.reverse(),
            (true, _) => by.reverse().then(names),
            (false, _) => by.then(names),
        }
    });
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn vrnic(name: &str, bytes: u64, errors: u64, busy_ns: u64) -> VrnicInfo {
        let mut v = VrnicInfo { name: name.into(), group: "g".into(), busy_ns, ..VrnicInfo::default() };
        (v.counters.sent_bytes, v.counters.errors) = (bytes, errors);
        v
    }

    #[test]
    fn rates_are_differences_by_the_time_between() {
        let now = Instant::now();
        let before = Sample::new(now, vec![vrnic("a", 100, 1, 0), vrnic("b", 5000, 0, 0)]);
        let vrnics = vec![vrnic("a", 2100, 1, 500_000_000), vrnic("b", 300, 4, 0), vrnic("new", 77, 7, 7)];
        let after = Sample::new(now + Duration::from_secs(2), vrnics);
        let mut rows = rows(&before, &after);
        sort(&mut rows, Column::Name, false);
        let got: Vec<_> = rows.iter().map(|r| (r.name.as_str(), r.sent_bytes, r.errors, r.cpu)).collect();
        // The worker of b was started again meanwhile, so its counters began at 0. The activity of the new vRNIC before
        // it was first seen does not belong to this interval.
        assert_eq!(got, [("a", 1000.0, 0.0, 0.25), ("b", 150.0, 2.0, 0.0), ("new", 0.0, 0.0, 0.0)]);
    }

    #[test]
    fn rows_are_sorted_by_any_column_and_found_by_name_or_group() {
        let row =
            |name: &str, group: &str, cpu: f64| Row { name: name.into(), group: group.into(), cpu, ..Row::default() };
        let mut rows = vec![row("c", "x", 1.0), row("a", "y", 2.0), row("b", "x", 2.0)];
        let mut names = |column, reversed| {
            sort(&mut rows, column, reversed);
            rows.iter().map(|r| r.name.clone()).collect::<String>()
        };
        assert_eq!(names(Column::Cpu, false), "abc");
        assert_eq!(names(Column::Cpu, true), "cab");
        assert_eq!(names(Column::Group, false), "bca");
        assert_eq!((names(Column::Name, false), names(Column::Name, true)), ("abc".into(), "cba".into()));
        let found = |text| rows.iter().filter(|r| r.matches(text)).count();
        assert_eq!((found("X"), found("a"), found(""), found("nobody")), (2, 1, 3, 0));
    }
}
