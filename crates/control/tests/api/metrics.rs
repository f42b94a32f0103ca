//! The page that a scraper reads from a centre.

use std::collections::{BTreeMap, BTreeSet};

use super::*;

/// The page, as a scraper gets it.
fn scrape(at: SocketAddr) -> String {
    let mut stream = TcpStream::connect(at).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    write!(stream, "GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200 OK") && head.contains("text/plain; version=0.0.4"), "{head}");
    body.to_owned()
}

/// The figures of a page, by name and labels.
fn figures(page: &str) -> BTreeMap<&str, f64> {
    let lines = page.lines().filter(|l| !l.starts_with('#')).map(|l| l.rsplit_once(' ').unwrap());
    lines.map(|(series, value)| (series, value.parse().unwrap())).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_scraper_reads_what_the_centre_does() {
    let lab = Lab::with_metrics().await;
    let at = lab.metrics.unwrap();
    let identity = lab.join("h1").await;
    lab.apply(vec![group("blue"), vrnic("a", "blue", "h1"), vrnic("b", "blue", "")]).await.unwrap();
    lab.apply(vec![vrnic("a", "white", "h1")]).await.unwrap_err();
    lab.fleet().await.get(lab.by("admin.1234", v1::GetRequest::default())).await.unwrap_err();
    let mut h1 = Attached::new(lab.channel(Some(identity.clone())).await.unwrap(), 1).await.unwrap();
    let revision = h1.update().await.revision;
    let _watch = lab.fleet().await.watch(lab.by(&lab.admin, v1::WatchRequest::default())).await.unwrap();

    let page = scrape(at);
    let seen = figures(&page);
    for (series, value) in [
        ("unirdma_control_objects{kind=\"host\"}", 1.0),
        ("unirdma_control_objects{kind=\"group\"}", 2.0),
        ("unirdma_control_objects{kind=\"vrnic\"}", 2.0),
        ("unirdma_control_object_changes_total{kind=\"vrnic\",change=\"made\"}", 2.0),
        ("unirdma_control_object_changes_total{kind=\"rule\",change=\"deleted\"}", 0.0),
        ("unirdma_control_refusals_total{reason=\"not_found\"}", 1.0),
        ("unirdma_control_hosts_connected", 1.0),
        ("unirdma_control_hosts_behind", 1.0),
        ("unirdma_control_hosts_with_problems", 0.0),
        // The host's Hello has the time 0, which is the year 1970.
        ("unirdma_control_hosts_clock_off", 1.0),
        ("unirdma_control_watchers", 1.0),
        ("unirdma_control_allocates", 1.0),
        ("unirdma_control_updates_sent_total", 1.0),
    ] {
        assert_eq!(seen.get(series), Some(&value), "{series}\n{page}");
    }
    // The second attempt of the joining host with the same token was refused, too.
    assert_eq!(seen["unirdma_control_refusals_total{reason=\"unauthenticated\"}"], 2.0, "{page}");
    assert!(seen["unirdma_control_updates_sent_bytes_total"] > 50.0);
    let commits = seen["unirdma_control_store_commit_seconds_count"];
    assert!(commits >= 3.0 && seen["unirdma_control_store_commit_seconds_bucket{le=\"+Inf\"}"] == commits);
    assert!(seen["unirdma_control_store_commit_seconds_sum"] > 0.0);
    let buckets: Vec<f64> = page
        .lines()
        .filter(|l| l.contains("_bucket{"))
        .map(|l| l.rsplit_once(' ').unwrap().1.parse().unwrap())
        .collect();
    assert!(buckets.windows(2).all(|w| w[0] <= w[1]), "{buckets:?}");

    let applied = v1::Applied { revision, problems: vec!["no room".into()] };
    h1.send.send(v1::FromHost { message: Some(from_host::Message::Applied(applied)) }).await.unwrap();
    let clock_ms = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_millis() as u64;
    let report = v1::Report { vrnics: Vec::new(), clock_ms, pools: Vec::new() };
    h1.send.send(v1::FromHost { message: Some(from_host::Message::Report(report)) }).await.unwrap();
    wait_until(|| {
        let page = scrape(at);
        let seen = figures(&page);
        let is = |name: &str, value: f64| seen[name] == value;
        is("unirdma_control_hosts_behind", 0.0)
            && is("unirdma_control_hosts_with_problems", 1.0)
            && is("unirdma_control_hosts_clock_off", 0.0)
    })
    .await;
    let mut twin = Attached::new(lab.channel(Some(identity)).await.unwrap(), 2).await.unwrap();
    assert!(matches!(twin.next().await, Some(to_host::Message::Refused(_))));
    drop(h1);
    wait_until(|| figures(&scrape(at))["unirdma_control_hosts_connected"] == 0.0).await;
    assert_eq!(figures(&scrape(at))["unirdma_control_host_refusals_total"], 1.0);
}

/// See https://prometheus.io/docs/practices/naming and the rules of `promtool check metrics`. The number of series must
/// not grow with the fleet.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn names_follow_the_conventions_and_no_object_has_series_of_its_own() {
    let lab = Lab::with_metrics().await;
    let at = lab.metrics.unwrap();
    let before = scrape(at);
    let (mut family, mut families, mut seen) = (String::new(), BTreeSet::new(), BTreeSet::new());
    for line in before.lines() {
        if let Some(head) = line.strip_prefix("# HELP ") {
            family = head.split(' ').next().unwrap().to_owned();
            assert!(head.ends_with('.') && families.insert(family.clone()), "{head}");
            assert!(family.starts_with("unirdma_") && family.bytes().all(|b| b.is_ascii_lowercase() || b == b'_'));
        } else if let Some(kind) = line.strip_prefix("# TYPE ") {
            assert_eq!(family.ends_with("_total"), kind.ends_with(" counter"), "{line}");
        } else {
            let (series, _) = line.rsplit_once(' ').unwrap();
            let part = series.split('{').next().unwrap().strip_prefix(&family).unwrap_or("no");
            assert!(["", "_bucket", "_sum", "_count"].contains(&part), "{line} below {family}");
            assert!(seen.insert(series.to_owned()), "{series} twice");
        }
    }
    lab.apply((0..50).map(|n| vrnic(&format!("v{n}"), "default", "")).collect()).await.unwrap();
    lab.apply((0..9).map(|n| group(&format!("g{n}"))).collect()).await.unwrap();
    assert_eq!(scrape(at).lines().count(), before.lines().count());

    // Each panel of the dashboard uses series that exist.
    let board: serde_json::Value =
        serde_json::from_str(include_str!("../../../../docs/grafana/unirdma-control.json")).unwrap();
    let mut expressions = Vec::new();
    collect(&board, &mut expressions);
    assert!(expressions.len() >= 10);
    let names: BTreeSet<&str> = seen.iter().map(|s| s.split('{').next().unwrap()).collect();
    for e in expressions {
        let words = e.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
        let used: Vec<&str> = words.filter(|w| w.starts_with("unirdma_")).collect();
        assert!(!used.is_empty() && used.iter().all(|w| names.contains(w)), "{e}");
    }
}

/// All queries of a dashboard.
fn collect<'a>(value: &'a serde_json::Value, into: &mut Vec<&'a str>) {
    match value {
        serde_json::Value::Object(o) => {
            into.extend(o.get("expr").and_then(|e| e.as_str()));
            o.values().for_each(|v| collect(v, into));
        }
        serde_json::Value::Array(a) => a.iter().for_each(|v| collect(v, into)),
        _ => {}
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_address_that_is_taken_is_said_in_one_line() {
    let lab = Lab::with_metrics().await;
    let other = Lab::new(true).await;
    other.end().await;
    let options = Options { metrics: lab.metrics, ..options(&other.dir, true) };
    let e = listen(&options).await.err().unwrap().to_string();
    assert!(e.starts_with("cannot serve metrics at 127.0.0.1:") && e.ends_with("choose another --metrics"), "{e}");
}
