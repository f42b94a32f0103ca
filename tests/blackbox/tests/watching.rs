//! Metrics and `unirdma top`, by which an operator watches a host.

use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpListener};

use crate::support::*;

/// Number of messages of a ping-pong in each direction, and bytes of each.
const MESSAGES: f64 = 100.0;
const BYTES: f64 = 1000.0;

/// A free address.
fn free_address() -> Result<SocketAddr> {
    TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).map_err(|e| e.to_string())
}

/// The metrics of a host, by name and labels.
fn scrape(lab: &Lab, address: &str) -> Result<BTreeMap<String, f64>> {
    let (host, port) = address.rsplit_once(':').ok_or("an address has a port")?;
    let request = format!("exec 3<>/dev/tcp/{host}/{port}; printf 'GET /metrics HTTP/1.1\\r\\n\\r\\n' >&3; cat <&3");
    let o = lab.shell(&format!("bash -c {}", shell_word(&request)));
    let (head, body) = o.text.split_once("\r\n\r\n").ok_or(format!("no answer: {}", o.text))?;
    require(head.starts_with("HTTP/1.1 200 OK"), head)?;
    let lines = body.lines().filter(|l| !l.starts_with('#'));
    let read = |l: &str| l.rsplit_once(' ').and_then(|(name, n)| Some((name.to_string(), n.parse().ok()?)));
    lines.map(|l| read(l).ok_or(format!("no sample: {l}"))).collect()
}

fn shell_word(text: &str) -> String {
    format!("'{}'", text.replace('\'', "'\\''"))
}

fn figure(metrics: &BTreeMap<String, f64>, name: &str) -> Result<f64> {
    metrics.get(name).copied().ok_or(format!("no {name} in {} samples", metrics.len()))
}

/// Scrapes until a figure has this value. The host repeats figures for a second.
fn becomes(lab: &Lab, address: &str, name: &str, is: f64) -> Check {
    let mut last = Err("nothing yet".into());
    for _ in 0..50 {
        last = scrape(lab, address).and_then(|m| figure(&m, name));
        if last.as_ref().is_ok_and(|n| *n == is) {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(200));
    }
    Err(format!("{name} is {last:?} and not {is}"))
}

pub(crate) fn tests(t: &mut Tests) {
    t.topic(&[packages::RUN, packages::SANDBOX]);
    t.test("metrics: what was transferred, by vRNIC and group, while traffic runs and after it", || {
        let address = free_address()?.to_string();
        let lab = Lab::start_in(None, None, &["--metrics", &address])?;
        lab.vrnic("a", &["--ip", "10.0.0.1"])?;
        lab.vrnic("b", &["--ip", "10.0.0.2"])?;
        let p = format!("ibv_rc_pingpong -g 0 -s {BYTES} -n {MESSAGES}");
        both_end_well(lab.pair(("a", &p), ("b", &format!("{p} 10.0.0.1")), &[])?)?;
        let of = |name: &str, vrnic: &str, path: &str| {
            format!("unirdma_vrnic_{name}{{group=\"default\",vrnic=\"{vrnic}\",path=\"{path}\"}}")
        };
        for vrnic in ["a", "b"] {
            becomes(&lab, &address, &of("sent_bytes_total", vrnic, "local"), MESSAGES * BYTES)?;
            becomes(&lab, &address, &of("received_bytes_total", vrnic, "local"), MESSAGES * BYTES)?;
            becomes(&lab, &address, &of("send_requests_total", vrnic, "local"), MESSAGES)?;
            becomes(&lab, &address, &of("sent_bytes_total", vrnic, "wire"), 0.0)?;
        }
        let sum = "unirdma_group_sent_bytes_total{group=\"default\",path=\"local\"}";
        becomes(&lab, &address, sum, 2.0 * MESSAGES * BYTES)?;
        // The number of bytes grows while a program runs.
        let server = serve(&lab, "a", "ib_write_bw -D 3 -f 1")?;
        let client = lab.spawn("b", &[], "ib_write_bw -D 3 -f 1 10.0.0.1")?;
        let sent = of("sent_bytes_total", "b", "local");
        let grew = || scrape(&lab, &address).and_then(|m| figure(&m, &sent)).is_ok_and(|n| n > 1e8);
        soon(grew, "the metrics do not follow")?;
        let o = lab.unirdma(&["top", "--json", "-d", "0.5", "--sort", "cpu"]);
        let top: serde_json::Value = serde_json::from_str(&o.text).map_err(|e| format!("{e}: {}", o.text))?;
        let rate = |i: usize, what: &str| top["vrnics"][i][what].as_f64().unwrap_or(-1.0);
        let busy = (0..2).any(|i| rate(i, "sent_bytes_per_second") > 1e6 && rate(i, "queue_pairs") == 1.0);
        require(busy && rate(0, "cpu") > 0.01 && rate(0, "cpu") >= rate(1, "cpu"), &o.text)?;
        both_end_well((server.finish(), client.finish()))?;
        // Counters keep the work of removed vRNICs and of workers that have ended.
        let before = scrape(&lab, &address).and_then(|m| figure(&m, sum))?;
        require(lab.unirdma(&["vrnic", "rm", "b"]).ok(), "vrnic rm b")?;
        becomes(&lab, &address, "unirdma_vrnics", 1.0)?;
        let after = scrape(&lab, &address)?;
        require(figure(&after, sum)? >= before && !after.contains_key(&sent), "a sum has become smaller")?;
        let (pid, _) = lab.worker("default")?;
        lab.shell(&format!("kill -9 {pid}"));
        becomes(&lab, &address, "unirdma_worker_restarts_total{group=\"default\"}", 1.0)?;
        becomes(&lab, &address, "unirdma_worker_up{group=\"default\"}", 1.0)?;
        becomes(&lab, &address, sum, 0.0)
    });
    t.test("metrics: fewer series than vRNICs", || {
        let address = free_address()?.to_string();
        let lab = Lab::start_in(None, None, &["--metrics", &address, "--metrics-vrnics", "1"])?;
        lab.vrnic("a", &[])?;
        lab.vrnic("b", &[])?;
        becomes(&lab, &address, "unirdma_metrics_vrnics_left_out", 1.0)?;
        let names = scrape(&lab, &address)?;
        let ours = |v: &str| names.keys().filter(|n| n.contains(&format!("vrnic=\"{v}\""))).count();
        require(ours("a") > 30 && ours("b") == 0, format!("{} and {} series", ours("a"), ours("b")))
    });
    t.test("wrong_input_metrics_at_an_address_that_is_taken", || {
        let taken = TcpListener::bind("127.0.0.1:0").map_err(|e| e.to_string())?;
        let address = taken.local_addr().map_err(|e| e.to_string())?.to_string();
        match Lab::start_in(None, None, &["--metrics", &address]) {
            Ok(_) => Err("the virtual layer started".into()),
            Err(e) => {
                let clear = e.contains(&format!("cannot serve metrics at {address}")) && e.contains("choose another");
                require(clear && e.trim_end().lines().count() == 1, e)
            }
        }
    });
    top(t);
    t.need_root("network namespaces need root");
    t.test("two hosts, metrics: what went over the network", || {
        let two = TwoHosts::start(Link { name: "o", ipv6: false, mtu: 9000, args: &["--metrics", "0.0.0.0:9751"] })?;
        let p = format!("ibv_rc_pingpong -g 0 -s {BYTES} -n {MESSAGES}");
        both_end_well(two.pair(&p, &format!("{p} 10.0.0.1"))?)?;
        let (lab, address) = (&two.labs[0], "192.168.7.1:9751");
        for direction in ["sent", "received"] {
            let bytes = |path| format!("unirdma_group_{direction}_bytes_total{{group=\"default\",path=\"{path}\"}}");
            becomes(lab, address, &bytes("wire"), MESSAGES * BYTES)?;
            becomes(lab, address, &bytes("local"), 0.0)?;
        }
        let metrics = scrape(lab, address)?;
        let packets = figure(&metrics, "unirdma_port_sent_packets_total{group=\"default\"}")?;
        require(packets >= MESSAGES, format!("{packets} packets"))?;
        require(figure(&metrics, "unirdma_peers")? >= 1.0, "no peers")
    });
}

/// `unirdma top`.
fn top(t: &mut Tests) {
    let abc = &Shared::new(abc);
    t.on(abc, "top --once: a table of one interval", |lab| {
        let o = lab.unirdma(&["top", "--once", "-d", "0.2", "--sort", "name", "--filter", "other"]);
        let words: Vec<&str> = o.text.split_whitespace().collect();
        let heads = ["VRNIC", "GROUP", "SENT", "RECEIVED", "SENDS", "RECVS", "ERRORS", "CPU", "QPS", "MRS"];
        require(o.ok() && words.starts_with(&heads) && words[heads.len()..].starts_with(&["c", "other"]), o.text)
    });
    // Each way to quit restores the terminal: its former modes, and the main screen.
    let ways = [
        ("q", "sleep 1; printf q; sleep 1", "$U top -d 0.2", "0"),
        ("Ctrl-C", "sleep 1; printf '/default\\r\\003'; sleep 1", "$U top -d 0.2", "0"),
        ("SIGTERM", "sleep 3", "timeout --foreground -s TERM 1 $U top -d 0.2", "124"),
    ];
    for (name, keys, command, code) in ways {
        t.on(abc, format!("top: a terminal is as it was after {name}"), move |lab| {
            let inner = format!("stty -g >$LAB/tty; {command}; echo code $?; stty -g | cmp - $LAB/tty && echo same");
            let o = lab.shell(&format!("({keys}) | script -qec {} /dev/null | tr -d '\\r'", shell_word(&inner)));
            let (shown, after) =
                o.text.rsplit_once("\x1b[?1049l").ok_or(format!("the screen is not left: {}", o.text))?;
            let table = shown.contains("unirdma top: ") && shown.contains("other") && shown.contains("\x1b[?1049h");
            require(table && after == format!("code {code}\nsame\n"), &o.text)
        });
    }
    t.on(abc, "wrong_input_top_without_a_terminal", |lab| refused(&lab.unirdma(&["top"]), "needs a terminal; --once"));
}
