//! Programs that connect by IP address, of Debian and of other projects, multicast, and UCX, which looks for devices by
//! itself.

use crate::support::*;

/// Programs that connect by IP address (`rdma_cm(7)`): server and client, `ADDR` for the server's address.
pub(crate) const CONNECTING: &[(&str, &str)] = &[
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

pub(crate) fn tests(t: &mut Tests) {
    t.topic(&[packages::RUN, packages::CONNECTING]);
    let abc = &Shared::new(abc);
    for (server, client) in CONNECTING {
        t.on(abc, format!("rdma_cm: {server}"), move |lab| {
            both_end_well(lab.pair(("a", server), ("b", &client.replace("ADDR", "10.0.0.1")), &[])?)
        });
    }
    for (server, client, shows) in OTHERS {
        t.on(abc, format!("other projects: {client}"), move |lab| {
            let (s, c) = lab.pair(("a", server), ("b", &client.replace("ADDR", "10.0.0.1")), &[])?;
            require(c.text.contains(shows), &c.text)?;
            both_end_well((s, c))
        });
    }
    t.on(abc, "other projects: iperf3 over rsockets", |lab| {
        // No interface has this address for TCP.
        let preload =
            format!("env LD_PRELOAD=/usr/lib/{}-linux-gnu/rsocket/librspreload.so iperf3", std::env::consts::ARCH);
        let (server, client) = (format!("{preload} -s -1 -4"), format!("{preload} -4 -t 1 -c 10.0.0.1"));
        both_end_well(lab.pair(("a", &server), ("b", &client), &["--net", "host"])?)
    });
    t.on(abc, "rdma_cm: rping over IPv6", |lab| {
        both_end_well(lab.pair(("a", "rping -s -a fd00::1 -C 5"), ("b", "rping -c -a fd00::1 -C 5 -V"), &[])?)
    });
    t.on(abc, "rdma_cm: nobody listens, nobody is there, no such address", |lab| {
        let o = lab.spawn("b", &[], "rping -c -a 10.0.0.1 -C 1")?.finish();
        require(!o.ok() && o.text.contains("RDMA_CM_EVENT_REJECTED, error 8"), o.text)?;
        let o = lab.spawn("b", &[], "rping -c -a 10.0.0.99 -C 1")?.finish();
        require(!o.ok() && o.text.contains("RDMA_CM_EVENT_ADDR_ERROR, error -110"), o.text)?;
        let o = lab.spawn("b", &[], "rping -s -a 10.0.0.1 -C 1")?.finish();
        require(!o.ok() && o.text.contains("No such device"), o.text)
    });
    t.on(abc, "rdma_cm: a client whose server is killed is told", |lab| {
        let mut server = serve(lab, "a", "rping -s -C 100000000")?;
        let client = lab.spawn("b", &[], "timeout 20 rping -c -a 10.0.0.1 -C 100000000")?;
        goes_on(lab, "a")?;
        server.kill();
        server.finish();
        let o = client.finish();
        // The program learns of it by the event, or by the request in progress, whichever it sees first.
        let told = ["DISCONNECT EVENT", "cq completion failed"].iter().any(|t| o.text.contains(t));
        require(o.code.is_some_and(|c| c != 124) && told, format!("{:?} {}", o.code, o.text))
    });
    for address in ["10.0.0.1", "fd00::1"] {
        t.on(abc, format!("rsockets: udpong, {address}"), move |lab| udpong(lab, lab, address));
    }
    t.on(abc, "multicast: mckey", |lab| multicast(lab, lab));
    for transport in ["rc", "ud"] {
        for test in ["tag_lat", "tag_bw", "ucp_put_bw", "ucp_get -n 50", "stream_bw", "ucp_fadd -s 8"] {
            t.on(abc, format!("UCX over {transport}: ucx_perftest -t {test}"), move |lab| {
                ucx(lab, lab, transport, test)
            });
        }
    }
    t.on(abc, "UCX: ucx_info -d", |lab| {
        let o = lab.spawn("a", &[], "ucx_info -d")?.finish();
        require(o.ok() && o.text.contains("rc_verbs") && o.text.contains("ud_verbs"), o.text)
    });
    t.on(abc, "sysfs: the GIDs, their types and their network device, and the way from uverbs0 to it", |lab| {
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
pub(crate) fn multicast(here: &Lab, there: &Lab) -> Check {
    let member = here.spawn("a", &[], "timeout 40 stdbuf -oL mckey -m 239.1.1.1 -b 10.0.0.1")?;
    wait_for(&member, "receiving")?;
    let sender = there.spawn("b", &[], "timeout 20 mckey -m 239.1.1.1 -b 10.0.0.2 -s")?.finish();
    both_end_well((member.finish(), sender))
}

/// Checks datagrams of rsockets. The server never ends by itself.
pub(crate) fn udpong(here: &Lab, there: &Lab, address: &str) -> Check {
    let mut server = serve(here, "a", &format!("udpong -b {address}"))?;
    for options in ["-S 512 -C 5000", "-S 64 -C 1000 -T e", "-S 1000 -C 1000 -T a"] {
        let o = there.spawn("b", &[], &format!("timeout 30 udpong -s {address} {options}"))?.finish();
        require(o.ok() && o.text.contains("custom"), format!("{options}: {:?} {}", o.code, o.text))?;
    }
    server.kill();
    server.finish();
    // A client that found the previous server would wait for its answer for ever.
    soon(|| !here.rdma_listens("a"), "the ended server still listens")?;
    let o = there.spawn("b", &[], &format!("timeout 5 udpong -s {address} -S 512 -C 10"))?.finish();
    require(o.text.contains("Connection refused"), o.text)
}

pub(crate) fn ucx(here: &Lab, there: &Lab, transport: &str, test: &str) -> Check {
    let env = format!("env UCX_TLS={transport},self UCX_NET_DEVICES=unirdma0:1 timeout 60 ucx_perftest");
    let client = format!("{env} 10.0.0.1 -n 500 -w 50 -s 8192 -t {test}");
    both_end_well(here.pair_with(there, ("a", &env), ("b", &client), &[])?)
}
