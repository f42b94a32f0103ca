//! Hostile programs that have a VF of a real RNIC. `tests/c/vf-attack.c` is the program; it ends with an error if
//! something succeeds that must not.

use harness::vm::Vfs;

use super::leases::Program;
use super::pool::{DIR, PF, Pool, SOON};
use super::way_vf::Layer;
use crate::support::*;

/// The address of the PF in one of the tests, which is in the network of its VFs.
const PF_ADDRESS: &str = "10.50.0.1";

/// A pool whose vRNICs a and b are of the group blue, and c of the group red, with a VLAN each.
fn two_groups(vfs: &Vfs) -> Result<Layer<'_>> {
    let layer = Layer::on(vfs, Pool::start(vfs, &format!("{PF} --vf-linger 0s --vf-dry wait=60s"))?)?;
    layer.pool.must("group add blue --vlan 100")?;
    layer.pool.must("group add red --vlan 101")?;
    for (name, group, address) in [("a", "blue", "10.0.0.1"), ("b", "blue", "10.0.0.2"), ("c", "red", "10.0.0.3")] {
        layer.pool.must(&format!("vrnic add {name} --way vf --group {group} --ip {address}"))?;
    }
    Ok(layer)
}

/// Runs two programs that connect to each other past the library. Returns the text of both.
fn past_the_library(layer: &Layer<'_>, serve: &str, reach: &str) -> Result<String> {
    let server = layer.vfs.spawn(serve)?;
    layer.prints(&server, "listens")?;
    let client = layer.vfs.run(reach)?;
    let server = server.finish();
    let text = format!("{}{}", server.text, client.text);
    require(server.ok() && client.ok() && text.matches("connected").count() == 2, layer.pool.explain(&text))?;
    Ok(text)
}

/// Checks that nothing has come to the receiver, although the sender was connected.
fn nothing_arrived(text: &str) -> Check {
    let signs = ["rc: 0 arrived", "uc: 0 arrived", "ud: 0 arrived", "memory: untouched"];
    let signs = signs.iter().all(|sign| text.contains(sign));
    require(signs && text.contains("rc sent: transport retry counter exceeded"), text)
}

pub(super) fn tests(t: &mut Tests, vfs: &Shared<Vfs>) {
    t.on_mut(vfs, "VF attacks: nodes, raw packets, a kept device, and many requests for leases", |vfs| {
        let layer = two_groups(vfs)?;
        let o = vfs.run(&Layer::on_host_network("a", "vf-attack nodes"))?;
        require(o.ok() && o.text.contains("all refused"), layer.pool.explain(&o.text))?;

        let keeps = vfs.spawn(&Layer::container("a", "vf-attack keep"))?;
        layer.prints(&keeps, "goes on")?;
        let state = layer.pool.becomes(0, "dirty")?;
        let pid = vfs.must("pidof vf-attack")?;
        require(state.contains(&format!("[{}]", pid.trim())), state)?;

        let socket = format!("{DIR}/vrnics/b/lease.sock");
        let late = vfs.spawn(&format!("echo pid $$; exec vf-attack late {socket}"))?;
        layer.prints(&late, "does not read")?;
        let state = layer.pool.becomes(1, "dirty")?;
        require(state.contains("1 descriptor"), state)?;

        let floods = vfs.spawn(&format!("exec vf-attack flood {socket}"))?;
        layer.prints(&floods, "floods")?;
        let other = Program::ask(vfs, "c")?;
        other.prints("context: works").map_err(|e| layer.pool.explain(&e))?;
        let kept = ["GID ::ffff:10.50.0.10\n", "GID ::ffff:10.50.0.11\n"];
        let has_kept = kept.iter().any(|gid| other.has_printed(gid));
        require(!has_kept, layer.pool.explain("c has a VF that somebody keeps"))?;
        let text = late.text();
        let pid = text.split_whitespace().nth(1).ok_or("no PID")?;
        vfs.must(&format!("kill -USR1 {pid}"))?;
        layer.prints(&late, "context: works")?;
        require(layer.pool.of(1, "kind")? == "dirty", layer.pool.explain("VF 1 is not kept"))?;
        require(layer.pool.count("leased")? <= 2, layer.pool.explain("b has several VFs"))?;
        // The RNIC keeps programs from sending with another MAC; the emulated one does not show more than the setting.
        let shown = vfs.must("ip link show pf")?;
        let spoofs = ["spoof checking off", "trust on"].iter().any(|sign| shown.contains(sign));
        require(!spoofs && shown.contains("vlan 100") && shown.contains("vlan 101"), shown)?;
        other.end()?;
        vfs.must("killall -9 vf-attack")?;
        [keeps, late, floods].into_iter().for_each(|task| drop(task.finish()));
        layer.pool.all_ready()
    });
    t.on_mut(vfs, "VF attacks: real GIDs as destinations, by the library and past it", |vfs| {
        let layer = two_groups(vfs)?;
        let (serves, reaches) = (|v| Layer::on_host_network(v, "vf-attack serve unirdma0"), "vf-attack reach unirdma0");
        // Within a group, which shows that this way of reaching others works.
        let all = Layer::on_host_network("b", "vf-attack serve unirdma0 all");
        let text = past_the_library(&layer, &all, &Layer::on_host_network("a", reaches))?;
        let signs = ["rc: 1 arrived", "uc: 1 arrived", "ud: 1 arrived", "memory: written"];
        require(signs.iter().all(|sign| text.contains(sign)), text)?;
        layer.pool.all_ready()?;

        let text = past_the_library(&layer, &serves("c"), &Layer::on_host_network("a", reaches))?;
        nothing_arrived(&text)?;
        layer.pool.all_ready()?;

        let mac = vfs.must("cat /sys/class/net/pf/address")?;
        vfs.must(&format!("ip addr add {PF_ADDRESS}/24 dev pf; rdma link add rxe_pf type rxe netdev pf"))?;
        let tried = (|| {
            let others = [10, 12, 13].map(|n| format!("::ffff:10.50.0.{n}")).join(" ");
            let named = format!("vf-attack names {others} ::ffff:{PF_ADDRESS} ::ffff:127.0.0.1 ::1");
            let red = vfs.spawn(&serves("c"))?;
            layer.prints(&red, "listens")?;
            require(layer.pool.way("c")?["vf"] == "pf/0", layer.pool.explain("c has another VF"))?;
            let o = layer.run("a", &named)?;
            require(o.ok() && o.text.contains("all refused"), layer.pool.explain(&o.text))?;
            vfs.must("killall -9 vf-attack")?;
            red.finish();
            // No answer to ARP passes between the VLAN and the PF, so each is told the other's MAC address.
            for vf in 0..4 {
                let (netdev, mac) = (layer.pool.of(vf, "netdev")?, mac.trim());
                vfs.must(&format!(
                    "ip neigh replace {PF_ADDRESS} lladdr {mac} dev {netdev} nud permanent; \
                     ip neigh replace 10.50.0.1{vf} lladdr $(cat /sys/class/net/{netdev}/address) dev pf nud permanent"
                ))?;
            }
            let text = past_the_library(&layer, "vf-attack serve rxe_pf", &Layer::on_host_network("a", reaches))?;
            nothing_arrived(&text)
        })();
        vfs.must(&format!("rdma link delete rxe_pf; ip addr del {PF_ADDRESS}/24 dev pf"))?;
        tried
    });
    t.on_mut(vfs, "VF attacks: objects and pinned memory are limited by the RNIC and the memory lock", |vfs| {
        const OBJECTS: usize = 300;
        let layer = Layer::start_with(vfs, "--vf-linger 0s --vf-dry refuse")?;
        layer.pool.must("vrnic add bad --way vf --group blue --ip 10.0.0.4")?;
        let left = || vfs.must("rdma resource; grep -hs VmPin /proc/[0-9]*/status | sort -u");
        let before = left()?;
        let hostile = vfs.spawn(&Layer::container("bad", &format!("vf-attack exhaust {OBJECTS} 16777216")))?;
        // Quotas of a vRNIC do not hold on a VF, so only the RNIC limits objects. The memory lock limits each process.
        layer.prints(&hostile, &format!("has {OBJECTS} QPs and CQs"))?;
        layer.prints(&hostile, "memory: Cannot allocate memory\nhas pinned 1")?;
        layer.prints(&hostile, "a second process has pinned 1")?;
        layer.works("ibv_rc_pingpong -n 20 -g 0")?;
        vfs.must("killall -9 vf-attack")?;
        hostile.finish();
        layer.pool.all_ready()?;
        let is_same = || Ok(left()? == before);
        harness::within(SOON, is_same, "something is left").map(drop)
    });
    t.on_mut(vfs, "VF attacks: the rdma controller of the container's control group limits its objects", |vfs| {
        const MOST: usize = 40;
        let layer = Layer::start_with(vfs, "--vf-linger 0s --vf-dry refuse")?;
        layer.pool.must("vrnic add bad --way vf --group blue --ip 10.0.0.4")?;
        vfs.must("mkdir -p /limited && mount -t cgroup2 none /limited && mkdir /limited/box")?;
        let tried = (|| {
            vfs.must("echo +rdma >/limited/cgroup.subtree_control")?;
            for vf in 0..4 {
                vfs.must(&format!("echo {} hca_object={MOST} >/limited/box/rdma.max", layer.pool.of(vf, "verbs")?))?;
            }
            let hostile = Layer::container("bad", "vf-attack exhaust 300 16777216");
            let hostile = vfs.spawn(&format!("echo $$ >/limited/box/cgroup.procs; {hostile}"))?;
            layer.prints(&hostile, "a second process has pinned")?;
            let text = hostile.text();
            let made = text.lines().find_map(|l| l.strip_prefix("has ")?.strip_suffix(" QPs and CQs")?.parse().ok());
            let is_limited = text.contains("objects: ") && made.is_some_and(|n: usize| n > 0 && 2 * n < MOST);
            require(is_limited, layer.pool.explain(&text))?;
            layer.works("ibv_rc_pingpong -n 20 -g 0")?;
            vfs.must("killall -9 vf-attack")?;
            hostile.finish();
            layer.pool.all_ready()
        })();
        let undone = vfs.must("rmdir /limited/box; umount /limited");
        tried.and(undone.map(drop))
    });
}
