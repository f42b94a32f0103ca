//! A guest whose worker is killed, a guest whose machine gets more memory and loses some, both with traffic, and a
//! guest with a virtual IOMMU.

use super::*;
use crate::workers::kill_worker;

/// A virtual layer with a guest of its own, and a container.
fn alone(systems: &Shared<Systems>, plan: &Plan<'_>) -> Result<(Lab, Guest)> {
    let lab = Lab::start(None)?;
    add_containers(&lab)?;
    lab.vrnic("a", &["--ip", "10.0.0.1"])?;
    let guest = with_system(systems, |system| Guest::start(&lab, system, "a", plan))?;
    Ok((lab, guest))
}

/// Checks that programs on both sides are notified, also those that do nothing. The guest's kernel continues, and its
/// device accepts nothing more.
fn worker_killed(lab: &Lab, g: &Guest) -> Check {
    let watch = g.spawn("ibv_asyncwatch")?;
    let client = connected(g, lab, 30)?;
    kill_worker(lab, "default")?;
    let o = client.finish_within(LIMIT);
    require(!o.ok() && o.code.is_some_and(|c| c != 124), format!("the peer's program: {:?} {}", o.code, o.text))?;
    let told = || watch.text().contains("IBV_EVENT_DEVICE_FATAL");
    soon(told, "no IBV_EVENT_DEVICE_FATAL").map_err(|e| e + &watch.text())?;
    let o = g.run("timeout 20 ibv_rc_pingpong")?;
    require(!o.ok() && o.code.is_some_and(|c| c != 124), format!("a new program: {:?} {}", o.code, o.text))?;
    g.must("dmesg | grep -q 'unirdma_rdma.*the device counts as lost'; killall ibv_asyncwatch ib_write_bw; rmmod unirdma_rdma")
}

/// Free pages of the guest that lie above the memory that it began with.
fn free_above(g: &Guest) -> Result<u64> {
    let o = g.run("awk '/zone +Normal/ { z = 1 } z && /pages free/ { print $3; exit }' /proc/zoneinfo")?;
    o.text.trim().parse().map_err(|_| format!("free pages: {}", o.text))
}

fn total_kib(g: &Guest) -> Result<u64> {
    let o = g.run("awk '/MemTotal/ { print $2 }' /proc/meminfo")?;
    o.text.trim().parse().map_err(|_| format!("memory: {}", o.text))
}

const MIB: u64 = 1 << 20;

/// Plugs more memory into a machine, with this policy of onlining in the guest's kernel.
fn plug(g: &Guest, name: &str, mib: u64, way: &str) -> Check {
    let before = total_kib(g)?;
    let size = mib * MIB;
    let file =
        format!("{{\"qom-type\":\"memory-backend-memfd\",\"id\":\"{name}-file\",\"size\":{size},\"share\":true}}");
    g.monitor("object-add", &file)?;
    g.monitor("device_add", &format!("{{\"driver\":\"pc-dimm\",\"id\":\"{name}\",\"memdev\":\"{name}-file\"}}"))?;
    let online =
        format!("for s in /sys/devices/system/memory/memory*/state; do grep -q offline $s && echo {way} >$s; done");
    let there = || g.run(&online).is_ok() && total_kib(g).is_ok_and(|now| now >= before + mib * 1000);
    soon(there, "the guest does not use its new memory")
}

fn memory_changes(lab: &Lab, g: &Guest) -> Check {
    let before = objects(lab, g)?;
    // The traffic has to last until all is plugged in and out.
    let client = connected(g, lab, 100)?;
    plug(g, "first", 512, "online_kernel")?;
    goes_on(lab, "a")?;
    // The program's memory is allocated there, because kernels take the highest zone first.
    let free = free_above(g)?;
    let p = "ibv_rc_pingpong -c -e -s 67108864 -n 2 -r 2";
    let server = End::Guest(g).serve(p)?;
    let used = free.saturating_sub(free_above(g)?);
    require(used > 15_000, format!("{used} pages of the new memory are used"))?;
    let c = other_container(lab).spawn(&format!("{p} {}", g.ip))?.finish_within(LIMIT);
    both_end_well((server.finish_within(LIMIT), c))?;
    // Memory that can be unplugged again.
    plug(g, "second", 256, "online_movable")?;
    goes_on(lab, "a")?;
    let with = total_kib(g)?;
    g.monitor("device_del", "{\"id\":\"second\"}")?;
    soon(|| total_kib(g).is_ok_and(|now| now < with), "the guest keeps the memory")?;
    let gone = || g.monitor("object-del", "{\"id\":\"second-file\"}").is_ok();
    soon(gone, "the machine keeps the memory")?;
    goes_on(lab, "a")?;
    g.must("killall ib_write_bw")?;
    ends_with_error(client)?;
    pair(End::Guest(g), container(lab), "ib_write_bw -s 65536 -n 200")?;
    as_before(lab, g, &before)
}

/// Checks that bus addresses are guest-physical ones even if the machine's IOMMU translates for other devices.
fn behind_an_iommu(lab: &Lab, g: &Guest) -> Check {
    let o = g.run("ls /sys/class/iommu")?;
    require(o.text.contains("dmar0"), format!("the guest's kernel uses no IOMMU: {}", o.text))?;
    for p in ["ibv_rc_pingpong -c -n 100", "ibv_rc_pingpong -c -e -s 4194304 -n 5 -r 2", "ib_write_bw -s 65536 -n 200"]
    {
        pair(End::Guest(g), container(lab), p)?;
        pair(container(lab), End::Guest(g), p)?;
    }
    Ok(())
}

pub(super) fn tests(t: &mut Tests, systems: &Shared<Systems>) {
    let mut add = |name: &str, f: fn(&Shared<Systems>) -> Check| {
        let systems = systems.clone();
        t.test(name, move || f(&systems));
    };
    add("guest: it has a virtual IOMMU", |systems| {
        // The last of several kernel command lines is used.
        let more = ["-device", "intel-iommu", "-append", "console=ttyS0 quiet panic=-1 intel_iommu=on"];
        let (lab, guest) = alone(systems, &Plan { more: &more, ..Plan::default() })?;
        behind_an_iommu(&lab, &guest).map_err(|e| format!("{}\n{}", guest.explain(&e), lab.log()))
    });
    add("guest: its worker is killed under traffic, and it is started anew", |systems| {
        let (lab, guest) = alone(systems, &Plan { driver: "timeout=3", ..Plan::default() })?;
        worker_killed(&lab, &guest).map_err(|e| format!("{}\n{}", guest.explain(&e), lab.log()))?;
        drop(guest);
        let guest = with_system(systems, |system| Guest::start(&lab, system, "a", &Plan::default()))?;
        pair(container(&lab), End::Guest(&guest), "ibv_rc_pingpong -c -n 100")
    });
    add("guest: memory is plugged in and out under traffic, and MRs lie in it", |systems| {
        let changes = [("-m 1G", "-m 1G,slots=2,maxmem=4G")];
        let (lab, guest) = alone(systems, &Plan { changes: &changes, ..Plan::default() })?;
        memory_changes(&lab, &guest).map_err(|e| format!("{}\n{}", guest.explain(&e), lab.log()))
    });
}
