//! Suites that take too long for each push: rdma-core's own tests of data, and UCX, on VFs. Each of rdma-core's tests
//! that passes on the device itself must pass on a VF, except that containers make no raw packet QPs (CAP_NET_RAW) and
//! join no multicast groups.

use std::collections::BTreeMap;

use harness::vm::Vfs;

use super::pool::SOON;
use super::way_vf::Layer;
use crate::support::*;

/// The files of rdma-core's tests that move data or make what data needs.
const FILES: &[&str] = &[
    "addr",
    "atomic",
    "cq",
    "cq_events",
    "cqex",
    "device",
    "fork",
    "mr",
    "parent_domain",
    "pd",
    "qp",
    "qpex",
    "rdmacm",
    "relaxed_ordering",
    "srq",
];

/// The command that runs a file of rdma-core's tests on a device.
fn tests_of(file: &str, device: &str) -> String {
    format!("cd /t && exec timeout 300 python3 tests/run_tests.py --dev {device} -v -k 'tests.test_{file}.*'")
}

/// The result of each test, by its name, which may stand in the line before.
fn results(text: &str) -> BTreeMap<&str, &str> {
    let mut results = BTreeMap::new();
    let mut name = None;
    for line in text.lines() {
        if line.starts_with("test_") {
            name = line.split_once('(').and_then(|(_, rest)| rest.split_once(')')).map(|(name, _)| name);
        }
        if let Some((name, (_, result))) = name.zip(line.rsplit_once(" ... ")) {
            results.insert(name, result);
        }
    }
    results
}

pub(super) fn tests(t: &mut Tests, vfs: &Shared<Vfs>) {
    for file in FILES {
        t.on_mut(vfs, format!("VFs, long: rdma-core's tests, test_{file}.py"), move |vfs| {
            let hosted = {
                let _layer = Layer::start_with(vfs, "--vf-linger 0s --vf-dry refuse")?;
                vfs.run(&Layer::container("a", &format!("sh -c \"{}\"", tests_of(file, "unirdma0"))))?.text
            };
            vfs.must("ip addr add 10.51.0.1/24 dev pf; rdma link add rxe_pf type rxe netdev pf")?;
            let native = vfs.run(&tests_of(file, "rxe_pf"));
            vfs.must("rdma link delete rxe_pf; ip addr del 10.51.0.1/24 dev pf")?;
            let native = native?.text;
            let (on_vf, on_device) = (results(&hosted), results(&native));
            let is_good = |(name, on_device): (&&str, &&str)| {
                let on_vf = on_vf.get(name).copied().unwrap_or("missing");
                let is_skipped = on_vf.starts_with("skipped");
                let may_skip = *on_device != "ok" || name.contains("multicast");
                on_vf == "ok" || is_skipped && may_skip || on_vf == "ERROR" && name.contains("_raw_")
            };
            let has_all = !on_device.is_empty() && on_device.iter().all(is_good);
            require(has_all, format!("on the VF:\n{hosted}\non the device:\n{native}"))
        });
    }
    for transport in ["rc", "ud"] {
        for test in ["tag_lat", "tag_bw", "ucp_put_bw", "ucp_get", "stream_bw", "ucp_fadd -s 8"] {
            t.on_mut(vfs, format!("VFs, long: UCX over {transport}: ucx_perftest -t {test}"), move |vfs| {
                ucx(&Layer::start(vfs)?, transport, test)
            });
        }
    }
}

/// UCX drops datagrams that were not sent to the GID that it knows, unless this variable is set. Other transports begin
/// with datagrams.
const ANY_GID: &str = "UCX_UD_ETH_DGID_CHECK=n";
/// How the server that listens shows in a list of TCP sockets (proc_pid_net(5)): port 13337, state LISTEN.
const LISTENS: &str = ":3419 .* 0A ";

/// Runs a test of UCX on a and b. Debian's program waits at its end for a thread of MPI, so it is killed when it has
/// printed its figures.
fn ucx(layer: &Layer<'_>, transport: &str, test: &str) -> Check {
    let env = format!("env UCX_TLS={transport},self UCX_NET_DEVICES=unirdma0:1 {ANY_GID} ucx_perftest -P 0");
    let server = layer.vfs.spawn(&Layer::container("a", &env))?;
    let is_up = format!("grep -q '{LISTENS}' /proc/$(pidof ucx_perftest)/net/tcp");
    let listens = || Ok(server.has_ended() || layer.vfs.run(&is_up)?.ok());
    harness::within(SOON, listens, "the server does not listen").map_err(|e| layer.pool.explain(&e))?;
    let client = layer.vfs.spawn(&Layer::container("b", &format!("{env} 10.0.0.1 -n 20 -w 5 -s 8192 -t {test}")))?;
    let printed = layer.prints(&client, "Final:");
    layer.vfs.must("killall -9 ucx_perftest")?;
    let (server, client) = (server.finish(), client.finish());
    printed.map_err(|e| format!("{e}\n{}\n{}", server.text, client.text))
}
