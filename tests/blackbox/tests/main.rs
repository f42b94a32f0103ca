//! Black-box tests: Debian's programs in containers, wrong input at the command line, lost peers.

mod attacks;
mod changes;
mod documents;
mod etcd;
mod guest;
mod kernel;
mod network;
mod page;
mod podman;
mod rules;
mod sandbox;
mod secret;
mod storage;
mod vm_run;
mod watching;
mod workers;

use std::time::{Duration, Instant};

use crate::Result;
use crate::cluster;
use crate::conformance;
use crate::harness::{self, Lab, Link, Output, TwoHosts, require};
use crate::memory;
use crate::vm;

pub(crate) use network::{arp_spoof, vxlan_injection};
pub(crate) use sandbox::escape;

type Check = Result<()>;

/// Number of slowest tests that are listed at the end.
const LONGEST: usize = 20;

/// Waits up to 10 s until `is_so` returns true.
fn wait_until(is_so: impl FnMut() -> bool, otherwise: &str) -> Check {
    harness::wait_until(Duration::from_secs(10), is_so, otherwise)
}

/// Waits until the output of a program contains a text.
fn wait_for(r: &harness::Running, text: &str) -> Check {
    wait_until(|| r.text().contains(text), text).map_err(|e| format!("expected `{e}` in: {}", r.text()))
}

/// Starts a container that does nothing. Returns when its interface exists.
fn idle(lab: &Lab, vrnic: &str) -> Result<harness::Running> {
    let container = lab.spawn(vrnic, &[], "sh -c 'echo begun; sleep 60'")?;
    wait_for(&container, "begun")?;
    Ok(container)
}

pub(crate) struct Suite<'a> {
    lab: &'a Lab,
    only: Option<&'a str>,
    passed: u32,
    /// Names of the failed tests, and their errors.
    failed: Vec<(String, String)>,
    /// Duration of each test.
    took: Vec<(Duration, String)>,
}

impl<'a> Suite<'a> {
    /// Tests whose name contains `only`, in this lab.
    pub fn new(lab: &'a Lab, only: Option<&'a str>) -> Self {
        Suite { lab, only, passed: 0, failed: Vec::new(), took: Vec::new() }
    }

    /// The text that names of tests must contain.
    pub fn only(&self) -> Option<&'a str> {
        self.only
    }

    /// Prints the failures once more, and the closing line.
    ///
    /// # Errors
    /// If some tests failed.
    pub fn close(mut self) -> Result<()> {
        if self.took.len() > LONGEST {
            self.took.sort_by(|a, b| b.cmp(a));
            println!("tests that took longest:");
            for (took, name) in &self.took[..LONGEST] {
                println!("{:>5} s  {name}", took.as_secs());
            }
        }
        for (name, why) in &self.failed {
            println!("failed: {name}\n{why}");
        }
        let failed = self.failed.len();
        println!("{} passed, {failed} failed", self.passed);
        if failed == 0 { Ok(()) } else { Err(format!("{failed} black-box tests failed")) }
    }

    /// True if a test of this name is wanted.
    fn wants(&self, name: &str) -> bool {
        self.only.is_none_or(|o| name.contains(o))
    }

    /// Runs a test if it is wanted.
    pub fn check(&mut self, name: &str, f: impl FnOnce(&Lab) -> Check) {
        if !self.wants(name) {
            return;
        }
        let began = Instant::now();
        let result = f(self.lab);
        self.took.push((began.elapsed(), name.into()));
        match result {
            Ok(()) => {
                println!("test {name} ... ok");
                self.passed += 1;
            }
            Err(e) => {
                println!("test {name} ... FAILED\n{e}");
                self.failed.push((name.into(), e));
            }
        }
    }

    /// Checks that the same program succeeds in both containers.
    fn pair(&mut self, command: &str) {
        self.check(command, |lab| {
            both_end_well(lab.pair(("a", command), ("b", &format!("{command} 10.0.0.1")), &[])?)
        });
    }
}

fn both_end_well((s, c): (Output, Output)) -> Check {
    let text = format!("server ({:?}): {}\nclient ({:?}): {}", s.code, s.text, c.code, c.text);
    let bad = ["error", "Error", "mismatch", "Failed", "invalid data"];
    let seen = bad.iter().any(|b| s.text.contains(b) || c.text.contains(b));
    require(s.ok() && c.ok() && !seen, text)
}

/// True for programs that wait for ever if the network loses a message.
fn is_unreliable(program: &str) -> bool {
    ["-c UC", "_uc_"].iter().any(|u| program.contains(u)) || is_of_datagrams(program)
}

/// True for programs that use UD. Nothing slows down the sender of datagrams, unlike the sender on an unreliable
/// connection.
fn is_of_datagrams(program: &str) -> bool {
    ["-c UD", "_ud_"].iter().any(|u| program.contains(u))
}

/// Programs that must run unmodified between two containers.
fn programs() -> Vec<String> {
    let mut v: Vec<String> = [
        "",
        " -e",
        " -c",
        " -e -c",
        " -N",
        " -N -t",
        " -c -o",
        " -j",
        " -s 1 -n 200",
        " -s 1048576 -n 200 -r 4",
        " -m 256",
    ]
    .iter()
    .map(|o| format!("ibv_rc_pingpong -g 0{o}"))
    .collect();
    let each = |v: &mut Vec<String>, program: &str, options: &[&str]| {
        v.extend(options.iter().map(|o| format!("{program} {o}").trim_end().to_string()));
    };
    // perftest itself refuses -e on WRITE, -a on atomics, and -b and -q on latency tests. Without -C it measures the
    // processor's clock for a fifth of a second for each size, and the search for its peaks takes time quadratic in the
    // number of messages.
    each(
        &mut v,
        "ib_write_bw",
        &["", "-a -n 200", "-b", "-q 8 -n 1000", "-s 1 -n 2000", "-I 220 -s 220", "-m 256", "-t 1", "-x 1"],
    );
    each(&mut v, "ib_read_bw", &["", "-a -n 200", "-b", "-e", "-q 8", "-o 16"]);
    each(&mut v, "ib_send_bw", &["", "-a -n 200", "-b", "-e", "-q 8", "-r 16", "-I 64 -s 64"]);
    each(&mut v, "ib_atomic_bw", &["", "-b", "-e", "-q 8", "-A CMP_AND_SWAP"]);
    each(&mut v, "ib_write_lat", &["", "-a -C -n 100", "-I 64"]);
    each(&mut v, "ib_read_lat", &["", "-a -C -n 100", "-e"]);
    each(&mut v, "ib_send_lat", &["", "-a -C -n 100", "-e"]);
    each(&mut v, "ib_atomic_lat", &["", "-e", "-A FETCH_AND_ADD"]);
    each(&mut v, "ibv_uc_pingpong -g 0", &["", "-e", "-c", "-s 1 -n 200", "-s 1048576 -n 200 -r 4", "-m 256"]);
    each(&mut v, "ibv_ud_pingpong -g 0", &["", "-e", "-c", "-s 1 -n 200"]);
    each(&mut v, "ib_write_bw -c UC", &["", "-a -n 200", "-q 8 -n 1000"]);
    each(&mut v, "ib_write_lat -c UC", &["", "-a -C -n 20"]);
    each(&mut v, "ib_send_bw -c UC", &["", "-q 8"]);
    each(&mut v, "ib_send_lat -c UC", &["", "-e"]);
    // All of them should fit into a socket's buffer, because nothing slows down their sender.
    each(&mut v, "ib_send_bw -c UD", &["", "-e", "-q 8 -n 300", "--use-srq"]);
    each(&mut v, "ibv_srq_pingpong -g 0", &["", "-e", "-c -q 4"]);
    each(&mut v, "ibv_xsrq_pingpong -g 0", &["", "-e"]);
    each(&mut v, "ib_send_bw --use-srq", &["", "-q 8", "-c UC"]);
    each(&mut v, "ib_send_lat -c UD", &["", "-a -C -n 100", "-e"]);
    v
}

/// Programs that connect by IP address (`rdma_cm(7)`): server and client, `ADDR` for the server's address.
const CONNECTING: &[(&str, &str)] = &[
    ("rping -s -C 20 -v", "rping -c -a ADDR -C 20 -V"),
    ("rping -s -C 5 -q", "rping -c -a ADDR -C 5 -q"),
    ("rping -s -C 5 -S 60000", "rping -c -a ADDR -C 5 -V -S 60000"),
    ("ucmatose -c 5", "ucmatose -c 5 -s ADDR"),
    ("udaddy -c 3", "udaddy -c 3 -s ADDR"),
    ("rstream -S 100000 -C 20 -I 5 -T v", "rstream -s ADDR -S 100000 -C 20 -I 5 -T v"),
    ("riostream -S 100000 -C 20 -I 5 -T v", "riostream -s ADDR -S 100000 -C 20 -I 5 -T v"),
    ("rdma_server", "rdma_client -s ADDR"),
    ("rdma_xserver", "rdma_xclient -s ADDR"),
    ("rdma_xserver -c x", "rdma_xclient -s ADDR -c x"),
    ("ib_write_bw -R -F -n 500", "ib_write_bw -R -F -n 500 ADDR"),
    ("ib_read_bw -R -F -n 500 -q 4", "ib_read_bw -R -F -n 500 -q 4 ADDR"),
    ("ib_send_lat -R -F -n 500", "ib_send_lat -R -F -n 500 ADDR"),
    ("ib_atomic_bw -R -F -n 500", "ib_atomic_bw -R -F -n 500 ADDR"),
];

/// Programs of other projects: server, client, and what the client's output contains.
const OTHERS: &[(&str, &str, &str)] = &[
    ("fi_pingpong -p verbs -e msg", "fi_pingpong -p verbs -e msg ADDR", "1m "),
    ("fi_pingpong -p verbs -e rdm", "fi_pingpong -p verbs -e rdm ADDR", "1m "),
    ("fi_pingpong -p verbs -e dgram", "fi_pingpong -p verbs -e dgram ADDR", "4k "),
    (
        "fio --name=s --ioengine=rdma --port=10000 --bs=64k --size=50m --iodepth=16 --rw=read",
        "fio --name=c --ioengine=rdma --port=10000 --bs=64k --size=50m --iodepth=16 --rw=write --hostname=ADDR --verb=write",
        "io=50.0MiB",
    ),
    (
        "fio --name=s --ioengine=rdma --port=10001 --bs=64k --size=50m --iodepth=16 --rw=read",
        "fio --name=c --ioengine=rdma --port=10001 --bs=64k --size=50m --iodepth=16 --rw=write --hostname=ADDR --verb=read",
        "io=50.0MiB",
    ),
];

/// Connections by address, multicast, and UCX, which looks for devices by itself.
fn connections(s: &mut Suite<'_>) {
    for (server, client) in CONNECTING {
        s.check(&format!("rdma_cm: {server}"), |lab| {
            both_end_well(lab.pair(("a", server), ("b", &client.replace("ADDR", "10.0.0.1")), &[])?)
        });
    }
    for (server, client, shows) in OTHERS {
        s.check(&format!("other projects: {client}"), |lab| {
            let (s, c) = lab.pair(("a", server), ("b", &client.replace("ADDR", "10.0.0.1")), &[])?;
            require(c.text.contains(shows), &c.text)?;
            both_end_well((s, c))
        });
    }
    s.check("other projects: iperf3 over rsockets", |lab| {
        // No interface has this address for TCP.
        let preload =
            format!("env LD_PRELOAD=/usr/lib/{}-linux-gnu/rsocket/librspreload.so iperf3", std::env::consts::ARCH);
        let (server, client) = (format!("{preload} -s -1 -4"), format!("{preload} -4 -t 1 -c 10.0.0.1"));
        both_end_well(lab.pair(("a", &server), ("b", &client), &["--net", "host"])?)
    });
    s.check("rdma_cm: rping over IPv6", |lab| {
        both_end_well(lab.pair(("a", "rping -s -a fd00::1 -C 5"), ("b", "rping -c -a fd00::1 -C 5 -V"), &[])?)
    });
    s.check("rdma_cm: nobody listens, nobody is there, no such address", |lab| {
        let o = lab.spawn("b", &[], "rping -c -a 10.0.0.1 -C 1")?.finish();
        require(!o.ok() && o.text.contains("RDMA_CM_EVENT_REJECTED, error 8"), o.text)?;
        let o = lab.spawn("b", &[], "rping -c -a 10.0.0.99 -C 1")?.finish();
        require(!o.ok() && o.text.contains("RDMA_CM_EVENT_ADDR_ERROR, error -110"), o.text)?;
        let o = lab.spawn("b", &[], "rping -s -a 10.0.0.1 -C 1")?.finish();
        require(!o.ok() && o.text.contains("No such device"), o.text)
    });
    s.check("rdma_cm: a client whose server is killed is told", |lab| {
        let mut server = lab.spawn("a", &[], "rping -s -C 100000000")?;
        require(server.wait_listening(|| lab.rdma_listens("a")), "the server does not listen")?;
        let client = lab.spawn("b", &[], "timeout 20 rping -c -a 10.0.0.1 -C 100000000")?;
        std::thread::sleep(Duration::from_millis(700));
        server.kill();
        server.finish();
        let o = client.finish();
        // The program learns of it by the event, or by the request in progress, whichever it sees first.
        let told = ["DISCONNECT EVENT", "cq completion failed"].iter().any(|t| o.text.contains(t));
        require(o.code.is_some_and(|c| c != 124) && told, format!("{:?} {}", o.code, o.text))
    });
    for address in ["10.0.0.1", "fd00::1"] {
        s.check(&format!("rsockets: udpong, {address}"), |lab| udpong(lab, lab, address));
    }
    s.check("multicast: mckey", |lab| multicast(lab, lab));
    for transport in ["rc", "ud"] {
        for test in ["tag_lat", "tag_bw", "ucp_put_bw", "ucp_get -n 50", "stream_bw", "ucp_fadd -s 8"] {
            s.check(&format!("UCX over {transport}: ucx_perftest -t {test}"), |lab| ucx(lab, lab, transport, test));
        }
    }
    s.check("UCX: ucx_info -d", |lab| {
        let o = lab.spawn("a", &[], "ucx_info -d")?.finish();
        require(o.ok() && o.text.contains("rc_verbs") && o.text.contains("ud_verbs"), o.text)
    });
    s.check("sysfs: the GIDs, their types and their network device, and the way from uverbs0 to it", |lab| {
        let port = "/sys/class/infiniband/*/ports/1";
        let net = "/sys/class/infiniband_verbs/uverbs0/device/net";
        let show =
            format!("cat {port}/gid_attrs/types/0 {port}/gid_attrs/ndevs/0 {port}/gids/0 {port}/gids/15; ls {net}");
        let o = lab.spawn("a", &[], &format!("sh -c '{show}'"))?.finish();
        let gids = "0000:0000:0000:0000:0000:ffff:0a00:0001\n0000:0000:0000:0000:0000:0000:0000:0000\n";
        require(o.ok() && o.text == format!("RoCE v2\neth0\n{gids}eth0\n"), o.text)
    });
}

/// Runs a member of a multicast group, and a program that sends to the group.
fn multicast(here: &Lab, there: &Lab) -> Check {
    let member = here.spawn("a", &[], "timeout 40 stdbuf -oL mckey -m 239.1.1.1 -b 10.0.0.1")?;
    for _ in 0..1500 {
        if member.text().contains("receiving") {
            break;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let sender = there.spawn("b", &[], "timeout 20 mckey -m 239.1.1.1 -b 10.0.0.2 -s")?.finish();
    both_end_well((member.finish(), sender))
}

/// Checks datagrams of rsockets. The server never ends by itself.
fn udpong(here: &Lab, there: &Lab, address: &str) -> Check {
    let mut server = here.spawn("a", &[], &format!("udpong -b {address}"))?;
    require(server.wait_listening(|| here.rdma_listens("a")), "the server does not listen")?;
    for options in ["-S 512 -C 5000", "-S 64 -C 1000 -T e", "-S 1000 -C 1000 -T a"] {
        let o = there.spawn("b", &[], &format!("timeout 30 udpong -s {address} {options}"))?.finish();
        require(o.ok() && o.text.contains("custom"), format!("{options}: {:?} {}", o.code, o.text))?;
    }
    server.kill();
    server.finish();
    // A client that found the previous server would wait for its answer for ever.
    for _ in 0..100 {
        if !here.rdma_listens("a") {
            break;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let o = there.spawn("b", &[], &format!("timeout 5 udpong -s {address} -S 512 -C 10"))?.finish();
    require(o.text.contains("Connection refused"), o.text)
}

fn ucx(here: &Lab, there: &Lab, transport: &str, test: &str) -> Check {
    let env = format!("env UCX_TLS={transport},self UCX_NET_DEVICES=unirdma0:1 timeout 60 ucx_perftest");
    let client = format!("{env} 10.0.0.1 -n 500 -w 50 -s 8192 -t {test}");
    both_end_well(here.pair_with(there, ("a", &env), ("b", &client), &[])?)
}

/// Checks that a command failed with one line on standard error that contains `text`, and with an exit code that is not
/// 0.
fn refused(o: &Output, text: &str) -> Check {
    let one_line = o.text.trim_end().lines().count() == 1;
    require(
        o.code.is_some_and(|c| c != 0) && one_line && o.text.contains(text),
        format!("expected one line with `{text}`, got ({:?}): {}", o.code, o.text),
    )
}

fn wrong_input(s: &mut Suite<'_>) {
    let cases: &[(&str, &[&str], &str)] = &[
        ("a_second_host", &["host"], "already serves"),
        ("a_name_that_exists", &["vrnic", "add", "a"], "exists already"),
        ("an_address_that_exists", &["vrnic", "add", "z", "--ip", "10.0.0.1"], "belongs to vRNIC a"),
        ("an_unknown_group", &["vrnic", "add", "z", "--group", "nope"], "unirdma group add nope"),
        ("a_bad_name", &["vrnic", "add", "../z"], "no vRNIC name"),
        ("an_unknown_vrnic", &["vrnic", "show", "z"], "unirdma vrnic ls"),
        ("a_group_in_use", &["group", "rm", "other"], "still has the vRNIC c"),
        ("a_command_that_is_not_there", &["run", "--vrnic", "a", "--", "no-such-command"], "no-such-command"),
        ("a_container_on_an_unknown_vrnic", &["run", "--vrnic", "z", "--", "true"], "there is no vRNIC z"),
    ];
    for (name, args, text) in cases {
        s.check(&format!("wrong_input_{name}"), |lab| refused(&lab.unirdma(args), text));
    }
    s.check("wrong_input_no_virtual_layer", |lab| {
        let o = std::process::Command::new(harness::unirdma()).args(["--dir", "/nonexistent", "vrnic", "ls"]).output();
        let o = o.map_err(|e| e.to_string())?;
        let text = String::from_utf8_lossy(&o.stderr).into_owned();
        let _ = lab;
        refused(&Output { code: o.status.code(), text }, "start one with `unirdma host`")
    });
    s.check("wrong_input_two_containers_on_one_vrnic", |lab| {
        let mut first = lab.spawn("a", &[], "sleep 30")?;
        std::thread::sleep(Duration::from_millis(300));
        let second = lab.unirdma(&["run", "--vrnic", "a", "--", "true"]);
        first.kill();
        first.finish();
        refused(&second, "has a container already")
    });
    s.check("containers_on_one_vrnic_one_after_the_other", |lab| {
        for n in 1..=20 {
            let o = lab.unirdma(&["run", "--vrnic", "a", "--", "true"]);
            require(o.ok(), format!("container {n}: {}", o.text))?;
        }
        Ok(())
    });
}

/// The text under this name in the output of `unirdma vrnic show`.
fn said(lab: &Lab, vrnic: &str, name: &str) -> Result<String> {
    let o = lab.unirdma(&["vrnic", "show", vrnic, "--json"]);
    let info: serde_json::Value = serde_json::from_str(&o.text).map_err(|e| format!("{e}: {}", o.text))?;
    info[name].as_str().map(String::from).ok_or(o.text)
}

fn isolation(s: &mut Suite<'_>) {
    s.check("a_container_sees_its_own_vrnic_only", |lab| {
        let run = lab.dir.join("run").display().to_string();
        let o = lab.spawn("b", &[], &format!("sh -c 'ls -R $UNIRDMA_DIR; ls -A {run} | wc -l'"))?.finish();
        require(o.ok() && o.text == "/run/unirdma:\nnet.sock\nrfc.sock\nvhost.sock\n0\n", o.text)
    });
    s.check("nothing_of_the_host_shows", |lab| {
        let o = lab.spawn("a", &[], "ibv_devinfo -v")?.finish();
        let host = std::fs::read_to_string("/etc/hostname").unwrap_or_default();
        let named = host.trim().len() > 3 && o.text.contains(host.trim());
        require(
            o.ok() && o.text.contains(&said(lab, "a", "guid")?) && o.text.contains("::ffff:10.0.0.1") && !named,
            o.text,
        )
    });
    s.check("exit_codes_pass_through", |lab| {
        require(lab.spawn("a", &[], "sh -c 'exit 42'")?.finish().code == Some(42), "expected 42")
    });
    s.check("groups_do_not_connect", |lab| {
        let p = "ibv_rc_pingpong -g 0 -p 18601";
        let (s, c) = lab.pair(("b", p), ("c", &format!("{p} 127.0.0.1")), &["--net", "host"])?;
        require(!s.ok() && !c.ok() && c.text.contains("RTR"), format!("server: {}\nclient: {}", s.text, c.text))
    });
    s.check("groups_share_no_ethernet", |lab| {
        let (s, c) =
            lab.pair(("a", "timeout 3 ibv_rc_pingpong -g 0"), ("c", "timeout 2 ibv_rc_pingpong -g 0 10.0.0.2"), &[])?;
        require(!s.ok() && !c.ok(), format!("server: {}\nclient: {}", s.text, c.text))
    });
}

fn refusals(s: &mut Suite<'_>) {
    s.check("the functions that execute work requests lie beside each other in the program", |_| {
        functions_lie_together()
    });
    s.check("ibv_devices", |lab| {
        let o = lab.spawn("a", &[], "ibv_devices")?.finish();
        require(o.ok() && o.text.contains("unirdma0"), o.text)
    });
    s.check("pyverbs: rdma-core's own tests, Debian 12", conformance::debian_12);
    if harness::uid() == 0 {
        s.check("pyverbs: rdma-core's own tests, Debian 13", conformance::debian_13);
    } else {
        println!("skipped: rdma-core's tests of Debian 13 (its root directory needs root)");
    }
    s.check("without a virtual layer there are no devices", |lab| {
        let lib = harness::unirdma().with_file_name("dropin");
        let o =
            std::process::Command::new("ibv_devices").env("LD_LIBRARY_PATH", lib).env("UNIRDMA_DIR", &lab.dir).output();
        let o = o.map_err(|e| e.to_string())?;
        require(o.status.success(), String::from_utf8_lossy(&o.stderr))
    });
    s.check("trace", |lab| {
        let o = lab.spawn("a", &[], "env UNIRDMA_TRACE=1 ibv_devinfo")?.finish();
        require(o.ok() && o.text.contains("ibv_open_device()") && o.text.contains("ibv_query_port(1)"), o.text)
    });
    s.check("every symbol resolves", |lab| {
        for p in ["ib_write_bw --version", "ib_send_lat --version", "ibv_devinfo -l"] {
            let o = lab.spawn("a", &[], &format!("env LD_BIND_NOW=1 LD_WARN=1 {p}"))?.finish();
            require(!o.text.contains("undefined symbol") && !o.text.contains("no version information"), o.text)?;
        }
        Ok(())
    });
}

/// Seeds of the program that makes random calls, and its number of calls with each.
const RANDOM_SEEDS: std::ops::RangeInclusive<u64> = 1..=4;
const RANDOM_STEPS: u32 = 5000;

/// Compiles one of our C programs.
pub(crate) fn compile(lab: &Lab, name: &str, libraries: &[&str]) -> Result<String> {
    compile_as(lab, name, name, libraries)
}

/// Compiles one of our C programs under another name.
pub(crate) fn compile_as(lab: &Lab, name: &str, exe: &str, libraries: &[&str]) -> Result<String> {
    let exe = lab.dir.join(exe);
    let source = harness::root().join(format!("tests/c/{name}.c"));
    let mut gcc = std::process::Command::new("gcc");
    gcc.args(["-O1", "-g", "-Wall", "-o"]).arg(&exe).arg(source).args(libraries);
    let done = gcc.output().map_err(|e| e.to_string())?;
    require(done.status.success(), String::from_utf8_lossy(&done.stderr))?;
    Ok(exe.display().to_string())
}

/// Our C programs: one loads the library as UCX and Python do and uses it from many threads, one uses queues in all
/// ways, one matches tags, one calls all functions with random arguments.
fn c_program(s: &mut Suite<'_>) {
    s.check("dlopen, threads, fork (C program)", |lab| {
        let exe = compile(lab, "verbs-threads", &["-ldl", "-pthread"])?;
        for way in ["", "env UNIRDMA_MR=copy "] {
            let o = lab.spawn("a", &[], &format!("{way}{exe}"))?.finish();
            require(o.ok() && o.text.contains("all threads done"), o.text)?;
        }
        Ok(())
    });
    s.check("as many connections and objects as the device promises (C program)", |lab| {
        let exe = compile(lab, "many", &["-libverbs"])?;
        let o = lab.spawn("a", &[], &format!("{exe} 2000"))?.finish();
        require(o.ok() && o.text.contains("as many as promised"), o.text)
    });
    s.check("programs that drop their rights register memory (C program)", |lab| {
        let exe = compile(lab, "rights", &["-libverbs", "-pthread"])?;
        for way in ["", "env UNIRDMA_MR=copy "] {
            let o = lab.spawn("a", &[], &format!("{way}{exe}"))?.finish();
            require(o.ok() && o.text.contains("all rights were enough"), o.text)?;
        }
        Ok(())
    });
    s.check("queues that are resized, reset and shared, and the extended interfaces (C program)", |lab| {
        let exe = compile(lab, "queues", &["-libverbs", "-pthread"])?;
        let o = lab.spawn("a", &[], &exe)?.finish();
        require(o.ok() && o.text.contains("all queues worked"), o.text)
    });
    s.check("waits for events and their descriptors (C program)", |lab| {
        let exe = compile(lab, "waits", &["-fexceptions", "-pthread", "-libverbs", "-lrdmacm"])?;
        let o = lab.spawn("a", &[], &exe)?.finish();
        require(o.ok() && o.text.contains("all waits ended"), o.text)
    });
    s.check("tag matching (C program)", |lab| {
        let exe = compile(lab, "tags", &["-libverbs"])?;
        let o = lab.spawn("a", &[], &exe)?.finish();
        require(o.ok() && o.text.contains("tags matched"), o.text)
    });
    for seed in RANDOM_SEEDS {
        s.check(&format!("random calls under valgrind, seed {seed} (C program)"), |lab| {
            let exe = compile(lab, "verbs-random", &["-libverbs", "-lrdmacm"])?;
            let valgrind = format!(
                "env UNIRDMA_HEAP=system valgrind -q --error-exitcode=9 --leak-check=full --show-leak-kinds=definite \
                 --errors-for-leak-kinds=definite --suppressions={}",
                harness::root().join("tests/c/valgrind.supp").display()
            );
            let o = lab.spawn("a", &[], &format!("{valgrind} {exe} {seed} {RANDOM_STEPS}"))?.finish();
            require(o.ok() && o.text.contains("all objects destroyed"), o.text)
        });
    }
    s.check("ib_write_bw with UNIRDMA_MR=copy", |lab| {
        let p = "env UNIRDMA_MR=copy ib_write_bw -n 500";
        let (s, c) = lab.pair(("a", p), ("b", &format!("{p} 10.0.0.1")), &[])?;
        require(s.ok() && c.ok(), format!("server: {}\nclient: {}", s.text, c.text))
    });
}

/// Captures while `f` runs, and checks by Wireshark's dissectors that no packet is malformed. Returns the number of
/// packets.
fn capture(lab: &Lab, f: impl FnOnce() -> Check) -> Result<usize> {
    let file = lab.dir.join("capture.pcap");
    let file = file.display().to_string();
    let running = lab.start_unirdma(&["capture", "-w", &file])?;
    std::thread::sleep(Duration::from_millis(300));
    let done = f();
    running.interrupt();
    let o = running.finish();
    done?;
    let count = o.text.split_whitespace().nth(1).and_then(|n| n.parse::<usize>().ok());
    let count = count.filter(|_| o.ok() && o.text.contains(" 0 lost")).ok_or(o.text)?;
    let read = |filter: &str| -> Result<usize> {
        // That dissector takes payload for a protocol above RDMA that is not there.
        let args = ["-n", "-r", &file, "--disable-protocol", "rpcordma", "-Y", filter];
        let o = std::process::Command::new("tshark").args(args).output().map_err(|e| format!("tshark: {e}"))?;
        if o.status.success() {
            return Ok(String::from_utf8_lossy(&o.stdout).lines().count());
        }
        Err(String::from_utf8_lossy(&o.stderr).into_owned())
    };
    require(read("_ws.malformed")? == 0, "tshark finds malformed packets")?;
    require(read("infiniband")? == count, format!("tshark does not see RoCE in all of the {count} packets"))?;
    Ok(count)
}

/// Programs whose packets are captured.
const CAPTURED: &[&str] = &[
    "ibv_rc_pingpong -g 0 -n 20",
    "ibv_uc_pingpong -g 0 -n 20",
    "ibv_ud_pingpong -g 0 -n 20",
    "ib_write_bw -n 20 -s 10000",
    "ib_read_bw -n 20 -s 10000",
    "ib_atomic_bw -n 20",
];

fn captures(s: &mut Suite<'_>) {
    s.check("capture: tshark reads what never left the host", |lab| {
        let run = |p: &str| both_end_well(lab.pair(("a", p), ("b", &format!("{p} 10.0.0.1")), &[])?);
        let count = capture(lab, || CAPTURED.iter().try_for_each(|p| run(p)))?;
        require(count > 20 * CAPTURED.len(), format!("{count} packets only"))
    });
    s.check("capture: a line for each packet, of one vRNIC", |lab| {
        let watch = lab.start_unirdma(&["capture", "--vrnic", "b", "-c", "12"])?;
        std::thread::sleep(Duration::from_millis(300));
        let p = "ibv_rc_pingpong -g 0 -s 100 -n 20";
        both_end_well(lab.pair(("a", p), ("b", &format!("{p} 10.0.0.1")), &[])?)?;
        let o = watch.finish();
        let lines = o.text.lines().filter(|l| l.contains("10.0.0.2 > 10.0.0.1: RC SEND only to QP 0x")).count();
        require(o.ok() && lines >= 3 && o.text.contains("12 packets captured"), o.text)
    });
    s.check("wrong_input_a_second_capture, and one into a directory", |lab| {
        let first = lab.start_unirdma(&["capture", "-w", "/dev/null"])?;
        std::thread::sleep(Duration::from_millis(300));
        let second = lab.unirdma(&["capture", "-w", "/dev/null"]);
        first.interrupt();
        first.finish();
        refused(&second, "another capture runs already")?;
        refused(&lab.unirdma(&["capture", "-w", "/"]), "cannot write /")?;
        refused(&lab.unirdma(&["capture", "--vrnic", "z"]), "there is no vRNIC z")
    });
}

fn losses(s: &mut Suite<'_>) {
    s.check("a killed program frees all and its peer sees the error of hardware", |lab| {
        let mut server = lab.spawn("a", &[], "ib_write_bw -D 30 -f 1")?;
        std::thread::sleep(Duration::from_millis(500));
        let client = lab.spawn("b", &[], "ib_write_bw -D 30 -f 1 10.0.0.1")?;
        std::thread::sleep(Duration::from_millis(2500));
        server.kill();
        server.finish();
        let c = client.finish();
        require(c.code.is_some_and(|c| c != 0) && c.text.contains("status 12"), format!("{:?}: {}", c.code, c.text))?;
        let o = lab.unirdma(&["vrnic", "show", "a", "--json"]);
        require(o.text.contains("\"qps\": 0") && o.text.contains("\"sessions\": 0"), o.text)
    });
}

/// Tests that need a virtual layer of their own.
fn own_labs(s: &mut Suite<'_>) {
    s.check("a lost virtual layer is IBV_EVENT_DEVICE_FATAL", |_| {
        let mut lab = Lab::start(Some(own_user()))?;
        lab.vrnic("x", &[])?;
        let watch = lab.spawn("x", &["--net", "host"], "timeout 20 ibv_asyncwatch")?;
        std::thread::sleep(Duration::from_millis(500));
        lab.stop_host();
        wait_for(&watch, "IBV_EVENT_DEVICE_FATAL")
    });
    s.check("an ordinary user needs no privilege", |_| {
        let lab = Lab::start(Some(own_user()))?;
        lab.vrnic("a", &["--ip", "10.0.0.1"])?;
        lab.vrnic("b", &["--ip", "10.0.0.2"])?;
        for p in ["ib_write_bw -n 500", "ibv_rc_pingpong -g 0 -e"] {
            let (s, c) = lab.pair(("a", p), ("b", &format!("{p} 10.0.0.1")), &[])?;
            require(s.ok() && c.ok(), format!("server: {}\nclient: {}", s.text, c.text))?;
        }
        Ok(())
    });
    if harness::uid() != 0 {
        return println!("skipped: a fallback directory of somebody else (only root can make one)");
    }
    s.check("a fallback directory of somebody else is refused", |_| {
        const USER: &str = "64321";
        let dir = format!("/tmp/unirdma-{USER}");
        let _ = std::fs::create_dir(&dir);
        let mut c = std::process::Command::new("setpriv");
        c.args(["--reuid", USER, "--regid", USER, "--clear-groups"]).arg(harness::unirdma()).args(["vrnic", "ls"]);
        let o = c.env_remove("XDG_RUNTIME_DIR").output();
        let _ = std::fs::remove_dir(&dir);
        let o = o.map_err(|e| e.to_string())?;
        let text = String::from_utf8_lossy(&o.stderr).into_owned();
        refused(&Output { code: o.status.code(), text }, "not this user's own directory")
    });
}

/// Checks that the functions in each line of `link-order.txt` lie close together. Another compiler may have inlined
/// some of them.
fn functions_lie_together() -> Check {
    const PLACE_BYTES: u64 = 512 << 10;
    let list = std::fs::read_to_string(harness::root().join("crates/cli/link-order.txt")).map_err(|e| e.to_string())?;
    let nm = std::process::Command::new("nm").arg(harness::unirdma()).output().map_err(|e| format!("nm: {e}"))?;
    let symbols = String::from_utf8_lossy(&nm.stdout);
    let function = |l| match &str::split_whitespace(l).collect::<Vec<_>>()[..] {
        [address, "t" | "T", name] => Some((u64::from_str_radix(address, 16).ok()?, *name)),
        _ => None,
    };
    let functions: Vec<(u64, &str)> = symbols.lines().filter_map(function).collect();
    let is_named = |name: &str, line: &str| {
        line.split('*').try_fold(name, |rest, part| rest.split_once(part).map(|(_, rest)| rest)).is_some()
    };
    let (mut lines, mut missing, mut places) = (0, Vec::new(), Vec::new());
    for line in list.lines().filter(|l| !l.is_empty() && !l.starts_with('#')) {
        let of_line = functions.iter().filter(|f| is_named(f.1, line)).map(|f| f.0);
        let before = places.len();
        places.extend(of_line);
        lines += 1;
        if places.len() == before {
            missing.push(line);
        }
    }
    require(
        lines > 50 && missing.len() * 5 < lines,
        format!("nothing has these names of link-order.txt: {missing:?}"),
    )?;
    let (first, last) = (places.iter().min().copied().unwrap_or(0), places.iter().max().copied().unwrap_or(u64::MAX));
    require(
        last - first < PLACE_BYTES,
        format!("they lie from {first:#x} to {last:#x}: the linker has not ordered them"),
    )
}

/// Tests with three hosts and a control centre.
fn fleet(s: &mut Suite<'_>) {
    if harness::uid() != 0 {
        println!("skipped: a fleet (network namespaces need root)");
        return;
    }
    s.check("fleet: three hosts, three groups, all pairs, by the rules and after they change", |_| cluster::check(3));
}

/// Runs a program over an unreliable transport that talks to another implementation or runs in a guest, up to six
/// times. A receiver that gets no core for some milliseconds loses packets, and such a program then waits for them
/// until its time is over.
fn one_try_of_many(run: impl Fn() -> Check) -> Check {
    (1..6).fold(run(), |last, _| last.or_else(|_| run()))
}

/// Number of datagrams that the two hosts have lost, as UD allows: because a socket or a receive queue was full.
fn lost_datagrams(two: &TwoHosts) -> u64 {
    let sockets = |host: usize| {
        let tables = ["netns", "exec", two.netns(host), "cat", "/proc/net/udp", "/proc/net/udp6"];
        let text = Output::of(std::process::Command::new("ip").args(tables)).text;
        text.lines().filter_map(|l| l.split_whitespace().next_back()?.parse::<u64>().ok()).sum::<u64>()
    };
    let receives = |(lab, name): (&Lab, &str)| {
        let text = lab.unirdma(&["vrnic", "show", name]).text;
        let line = text.lines().find_map(|l| l.strip_prefix("dropped (UC, UD)"));
        line.and_then(|l| l.split(',').next()?.trim().parse::<u64>().ok()).unwrap_or(0)
    };
    sockets(0) + sockets(1) + two.labs.iter().zip(["a", "b"]).map(receives).sum::<u64>()
}

/// Runs a program that uses UD between two hosts. It is repeated only if datagrams were lost and the program has
/// reported that.
fn unless_datagrams_are_lost(two: &TwoHosts, run: impl Fn() -> Check) -> Check {
    let mut result = Ok(());
    for _ in 0..6 {
        let before = lost_datagrams(two);
        result = run();
        if result.is_ok() || lost_datagrams(two) == before {
            break;
        }
    }
    result
}

/// Tests with two hosts joined by a network: all programs, bad networks, wrong input.
fn wire(s: &mut Suite<'_>) {
    if harness::uid() != 0 {
        println!("skipped: two hosts (network namespaces need root)");
        return;
    }
    let links = [
        ("IPv4, MTU 1024", Link { name: "a", ipv6: false, mtu: 1500, args: &[] }),
        ("IPv6, MTU 4096", Link { name: "b", ipv6: true, mtu: 9000, args: &[] }),
    ];
    for (title, link) in links {
        let programs: Vec<(String, String)> = programs()
            .into_iter()
            .filter(|p| link.mtu > 4200 || !p.contains("-m 4096"))
            .map(|p| (format!("two hosts, {title}: {p}"), p))
            .filter(|(name, _)| s.only.is_none_or(|o| name.contains(o)))
            .collect();
        let mut others = vec!["tshark reads a capture", "the counters say that it went over the network"];
        others.extend(["multicast", "UCX over rc", "UCX over ud"]);
        others.extend(CONNECTING.iter().map(|c| c.0));
        others.push("udpong");
        let wanted = |o: &str| others.iter().any(|n| format!("two hosts, {title}: {n}").contains(o));
        if programs.is_empty() && !s.only.is_none_or(wanted) {
            continue;
        }
        let two = TwoHosts::start(link);
        for (name, p) in programs {
            s.check(&name, |_| {
                let two = two.as_ref().map_err(Clone::clone)?;
                if !is_unreliable(&p) {
                    return both_end_well(two.pair(&p, &format!("{p} 10.0.0.1"))?);
                }
                let p = format!("timeout 60 {p}");
                let run = || both_end_well(two.pair(&p, &format!("{p} 10.0.0.1"))?);
                if is_of_datagrams(&p) { unless_datagrams_are_lost(two, run) } else { run() }
            });
        }
        for (server, client) in CONNECTING {
            s.check(&format!("two hosts, {title}: {server}"), |_| {
                let two = two.as_ref().map_err(Clone::clone)?;
                both_end_well(two.pair(server, &client.replace("ADDR", "10.0.0.1"))?)
            });
        }
        s.check(&format!("two hosts, {title}: udpong"), |_| {
            let two = two.as_ref().map_err(Clone::clone)?;
            udpong(&two.labs[0], &two.labs[1], "10.0.0.1")
        });
        s.check(&format!("two hosts, {title}: multicast"), |_| {
            let two = two.as_ref().map_err(Clone::clone)?;
            multicast(&two.labs[0], &two.labs[1])
        });
        for transport in ["rc", "ud"] {
            s.check(&format!("two hosts, {title}: UCX over {transport}"), |_| {
                let two = two.as_ref().map_err(Clone::clone)?;
                ucx(&two.labs[0], &two.labs[1], transport, "tag_bw")
            });
        }
        s.check(&format!("two hosts, {title}: tshark reads a capture"), |_| {
            let two = two.as_ref().map_err(Clone::clone)?;
            let run = |p: &str| both_end_well(two.pair(p, &format!("{p} 10.0.0.1"))?);
            let count = capture(&two.labs[0], || CAPTURED.iter().try_for_each(|p| run(p)))?;
            require(count > 20 * CAPTURED.len(), format!("{count} packets only"))
        });
        s.check(&format!("two hosts, {title}: the counters say that it went over the network"), |_| {
            let two = two.as_ref().map_err(Clone::clone)?;
            clean_packets(&two.labs[0])
        });
    }
    s.check("two hosts, --full-icrc", |_| {
        let two = TwoHosts::start(Link { name: "f", ipv6: false, mtu: 9000, args: &["--full-icrc"] })?;
        for p in ["ibv_rc_pingpong -g 0 -c -s 100000 -n 100", "ib_write_bw -q 4 -n 500"] {
            both_end_well(two.pair(p, &format!("{p} 10.0.0.1"))?)?;
        }
        clean_packets(&two.labs[0])
    });
    s.check("two hosts, 1 % of the packets lost, doubled and reordered: 10 MB arrive", |_| {
        let two = TwoHosts::start(Link { name: "c", ipv6: false, mtu: 1500, args: &["--faults", "1"] })?;
        let p = "ibv_rc_pingpong -g 0 -c -s 100000 -n 100";
        both_end_well(two.pair(p, &format!("{p} 10.0.0.1"))?)?;
        for p in ["ib_read_bw -n 50", "ib_write_bw -n 100", "ib_atomic_bw -n 500"] {
            both_end_well(two.pair(p, &format!("{p} 10.0.0.1"))?)?;
        }
        let o = two.labs[0].unirdma(&["vrnic", "show", "a", "--json"]);
        let seen = !o.text.contains("\"retransmitted_pkts\": 0") && !o.text.contains("\"out_of_seq_request\": 0");
        require(seen, o.text)
    });
    s.check("two hosts, a host that is gone is IBV_WC_RETRY_EXC_ERR", |_| {
        let mut two = TwoHosts::start(Link { name: "d", ipv6: false, mtu: 1500, args: &[] })?;
        let server = two.labs[0].spawn("a", &[], "ib_write_bw -D 20 -f 1")?;
        std::thread::sleep(Duration::from_millis(800));
        let client = two.labs[1].spawn("b", &[], "ib_write_bw -D 20 -f 1 10.0.0.1")?;
        std::thread::sleep(Duration::from_millis(2500));
        two.labs[0].stop_host();
        let c = client.finish();
        drop(server);
        require(c.text.contains("status 12"), format!("{:?}: {}", c.code, c.text))
    });
    network::between_hosts(s);
    rules::between_hosts(s);
    secret::between_hosts(s);
    watching::between_hosts(s);
    wire_wrong_input(s);
}

/// Checks that packets arrived and that none of them was faulty.
fn clean_packets(lab: &Lab) -> Result<()> {
    let o = lab.unirdma(&["status", "--json"]);
    let clean = ["\"icrc_errors\": 0", "\"malformed\": 0", "\"wrong_source\": 0", "\"bad_pkey\": 0"];
    require(clean.iter().all(|c| o.text.contains(c)) && !o.text.contains("\"received\": 0"), o.text)
}

fn wire_wrong_input(s: &mut Suite<'_>) {
    let peers = std::env::temp_dir().join(format!("unirdma-{}.peers", std::process::id()));
    let write = |text: &str| std::fs::write(&peers, text).map_err(|e| e.to_string());
    let file = peers.display().to_string();
    let start = |args: &[&str]| match Lab::start_in(None, None, &[&["--peers", &file], args].concat()) {
        Ok(_) => Err("the virtual layer started".to_string()),
        Err(e) => Ok(e),
    };
    s.check("wrong_input_port_4791_in_use", |_| {
        write("")?;
        let _taken = std::net::UdpSocket::bind("127.0.9.1:4791").map_err(|e| e.to_string())?;
        let e = start(&["--address", "127.0.9.1"])?;
        require(e.contains("UDP port 4791 of 127.0.9.1 is in use") && e.trim_end().lines().count() == 1, e)
    });
    s.check("wrong_input_an_address_of_another_host", |_| {
        let e = start(&["--address", "203.0.113.5"])?;
        require(e.contains("203.0.113.5 is no address of this host"), e)
    });
    s.check("wrong_input_an_mtu_above_the_interfaces", |_| {
        let n = format!("ur{}-m", std::process::id());
        let made = || -> Check {
            harness::ip(&format!("netns add {n}"))?;
            harness::ip(&format!("-n {n} link add dev veth0 mtu 1500 type veth peer name veth1"))?;
            harness::ip(&format!("-n {n} addr add 192.168.9.1/24 dev veth0"))?;
            harness::ip(&format!("-n {n} link set veth0 up"))?;
            let args = ["--peers", &file, "--address", "192.168.9.1", "--mtu", "4096"];
            match Lab::start_in(None, Some(&n), &args) {
                Ok(_) => Err("the virtual layer started".into()),
                Err(e) => require(e.contains("has an MTU of 1500"), e),
            }
        };
        let r = made();
        let _ = harness::ip(&format!("netns del {n}"));
        r
    });
    s.check("wrong_input_a_bad_line_in_the_peers_file", |_| {
        write("10.0.0.2 default 127.0.9.2\nnonsense\n")?;
        let e = start(&["--address", "127.0.9.1"])?;
        require(e.contains("line 2: expected"), e)?;
        write("10.0.0.2 default 127.0.9.2\n")?;
        let lab = Lab::start_in(None, None, &["--peers", &file, "--address", "127.0.9.1"])?;
        let shows = |what: &str| {
            let mut o = Output::default();
            for _ in 0..100 {
                o = lab.unirdma(&["status", "--json"]);
                if o.text.contains(what) {
                    return Ok(());
                }
                std::thread::sleep(Duration::from_millis(20));
            }
            Err(format!("expected {what}: {}", o.text))
        };
        shows("\"peers\": 1")?;
        write("10.0.0.2 default 127.0.9.2\n10.0.0.3 default x\n")?;
        shows("line 2: `x` is no IP address")?;
        shows("\"peers\": 1")?;
        write("10.0.0.2 default 127.0.9.2\n10.0.0.3 default 127.0.9.3\n")?;
        shows("\"peers\": 2")
    });
    let _ = std::fs::remove_file(&peers);
}

/// An id without privileges: `nobody` for root, else this user.
pub(crate) fn own_user() -> u32 {
    match harness::uid() {
        0 => 65534,
        u => u,
    }
}

pub(crate) fn run(only: Option<&str>) -> Result<()> {
    let lab = Lab::start(None)?;
    lab.vrnic("a", &["--ip", "10.0.0.1", "--ip", "fd00::1"])?;
    lab.vrnic("b", &["--ip", "10.0.0.2", "--ip", "fd00::2"])?;
    lab.unirdma(&["group", "add", "other"]);
    lab.vrnic("c", &["--ip", "10.0.0.1", "--group", "other"])?;
    let mut s = Suite::new(&lab, only);
    refusals(&mut s);
    for p in programs() {
        s.pair(&p);
    }
    connections(&mut s);
    isolation(&mut s);
    network::spoofing(&mut s);
    rules::single_host(&mut s);
    secret::single_host(&mut s);
    sandbox::run(&mut s);
    podman::run(&mut s);
    workers::workers(&mut s);
    workers::full_disk(&mut s);
    attacks::run(&mut s);
    c_program(&mut s);
    captures(&mut s);
    losses(&mut s);
    changes::run(&mut s);
    documents::run(&mut s);
    watching::run(&mut s);
    etcd::run(&mut s);
    page::run(&mut s);
    wrong_input(&mut s);
    own_labs(&mut s);
    memory::fixed(&mut s, &lab);
    wire(&mut s);
    fleet(&mut s);
    kernel::run(&mut s);
    guests_of(&mut s, None, 1);
    s.close()
}

/// All tests with guests.
fn guests_of(s: &mut Suite<'_>, kernel: Option<&str>, rounds: u32) {
    if harness::uid() == 0 {
        s.check("pyverbs: rdma-core's own tests, in a guest", |_| conformance::in_a_guest(kernel));
    }
    guest::run(s, kernel, rounds);
}

/// Runs only the tests with guests, with one kernel if `kernel` names it. `rounds`: how often guests restart in each
/// test.
pub(crate) fn guests(kernel: Option<&str>, only: Option<&str>, rounds: u32) -> Result<()> {
    vm::prepare()?;
    // An unknown kernel is reported once, not by each test.
    vm::Systems::parts(kernel)?;
    let lab = Lab::start(None)?;
    let mut s = Suite::new(&lab, only);
    guests_of(&mut s, kernel, rounds);
    s.close()
}
