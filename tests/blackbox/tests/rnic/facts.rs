//! Facts about the kernel on which the use of a real RNIC's VFs rests, in a virtual machine with four VFs that have the
//! kernel's soft RNIC. A kernel that differs is seen here first.

use harness::vm::{Task, Vfs};

use crate::support::*;

/// Longest time until the kernel shows a change.
const SOON: Duration = Duration::from_secs(20);

/// Checks that a text has these parts.
fn has(text: &str, parts: &[&str]) -> Check {
    let missing: Vec<&&str> = parts.iter().filter(|p| !text.contains(**p)).collect();
    require(missing.is_empty(), format!("expected {missing:?} in: {text}"))
}

/// Waits until a running command has printed this.
fn prints(task: &Task, text: &str) -> Check {
    let printed = || Ok(task.text().contains(text));
    harness::within(SOON, printed, text).map(drop).map_err(|e| format!("expected {e}: {}", task.text()))
}

/// Waits until a command succeeds.
fn becomes(vfs: &Vfs, command: &str) -> Check {
    harness::within(SOON, || Ok(vfs.run(command)?.ok()), command).map(drop)
}

/// Runs a pair of programs on two VFs.
fn pair(vfs: &Vfs, program: &str, (server, client): (u32, u32)) -> Check {
    let option = if program.starts_with("ibv_") { "-g" } else { "-x" };
    let on = |vf: u32| -> Result<String> {
        let verbs = format!("rxe{vf}");
        Ok(format!("timeout 60 {program} -d {verbs} {option} {}", vfs.gid(&verbs, vf)?))
    };
    let listening = || -> Result<bool> { Ok(vfs.run("netstat -ltn")?.text.contains("LISTEN")) };
    let serving = vfs.spawn(&on(server)?)?;
    harness::within(SOON, || Ok(serving.has_ended() || listening()?), "the server does not listen")?;
    let client = vfs.run(&format!("{} 127.0.0.1", on(client)?))?;
    both_end_well((serving.finish(), client))
}

/// A program that is connected to itself on a VF's device, and keeps it open.
struct User<'a> {
    vfs: &'a Vfs,
    task: Task,
}

impl<'a> User<'a> {
    fn start(vfs: &'a Vfs, vf: u32) -> Result<User<'a>> {
        let task = vfs.spawn(&format!("exec rnic-facts events rxe{vf}"))?;
        prints(&task, "status: success")?;
        Ok(User { vfs, task })
    }

    /// Ends it. Returns what it has seen.
    fn end(self) -> Result<String> {
        self.vfs.must("killall rnic-facts")?;
        Ok(self.task.finish().text)
    }
}

/// Checks that `remove`, which takes a device away, waits for a program that has it open, which gets no DEVICE_FATAL.
/// `gone` succeeds once the device does not show any more.
fn removal_waits(vfs: &Vfs, vf: u32, remove: &str, gone: &str) -> Result<String> {
    let user = User::start(vfs, vf)?;
    let removing = vfs.spawn(remove)?;
    let seen = becomes(vfs, gone).and_then(|()| {
        require(!removing.has_ended(), "the removal has not waited")?;
        // Nothing more is to come, so there is no condition to wait for.
        std::thread::sleep(Duration::from_millis(500));
        require(!removing.has_ended(), "the removal has not waited")
    });
    let text = user.end()?;
    let removed = removing.finish();
    let left = vfs.run("ls /sys/class/infiniband /sys/class/infiniband_verbs /dev/infiniband")?.text;
    seen.map_err(|e| format!("{e}\n{text}\n{}\n{left}", removed.text))?;
    require(removed.ok(), removed.text)?;
    require(!text.contains("fatal"), &text)?;
    Ok(text)
}

pub(super) fn tests(t: &mut Tests, vfs: &Shared<Vfs>) {
    for program in [
        "ibv_rc_pingpong -n 50 -c",
        "ibv_uc_pingpong -n 20 -e",
        "ibv_ud_pingpong -n 20 -s 512",
        "ibv_srq_pingpong -n 20 -q 2",
        "ib_write_bw -s 4096 -n 50 -F",
        "ib_send_bw -s 4096 -n 50 -F -e",
    ] {
        t.on(vfs, format!("real RNIC: two VFs, {program}"), move |vfs| pair(vfs, program, (0, 1)));
    }
    t.on(vfs, "real RNIC: the number of VFs changes only from and to 0", |vfs| {
        let o = vfs.run("echo 6 >/sys/class/net/pf/device/sriov_numvfs")?;
        require(!o.ok() && vfs.must("cat /sys/class/net/pf/device/sriov_numvfs")?.trim() == "4", o.text)
    });
    t.on(vfs, "real RNIC: a descriptor that root has opened serves another user, by ioctl", |vfs| {
        let name = vfs.must("grep -l rxe0 /sys/class/infiniband_verbs/*/ibdev | cut -d/ -f5")?;
        let node = format!("/dev/infiniband/{name}");
        let node = node.trim();
        let o = vfs.must(&format!("chmod 600 {node}; rnic-facts passed {node}; chmod 666 {node}"))?;
        let write = "PD by write: Permission denied";
        has(&o, &["open: Permission denied", "context by ioctl: works", "PD by ioctl: works", write])
    });
    t.on(vfs, "real RNIC: the memory lock of a user limits what is registered", |vfs| {
        let as_user = "setpriv --reuid 65534 --clear-groups --inh-caps=-all --bounding-set=-all";
        let register =
            |bytes: u32| vfs.run(&format!("prlimit --memlock=4194304 {as_user} rnic-facts register rxe0 {bytes}"));
        has(&register(1 << 20)?.text, &["register: works"])?;
        has(&register(64 << 20)?.text, &["register: Cannot allocate memory"])
    });
    t.on(vfs, "real RNIC: the rdma control group limits the objects of a device", |vfs| {
        vfs.must("mkdir -p /cg && mount -t cgroup2 none /cg && echo +rdma >/cg/cgroup.subtree_control && mkdir /cg/t")?;
        vfs.must("echo 'rxe0 hca_handle=1 hca_object=2' >/cg/t/rdma.max")?;
        let o = vfs.run("echo 0 >/cg/t/cgroup.procs && ibv_rc_pingpong -d rxe0 -g 1")?;
        let free = vfs.must("rmdir /cg/t && umount /cg");
        require(!o.ok() && o.text.contains("Couldn't create CQ"), o.text)?;
        free.map(drop)
    });
    t.on(vfs, "real RNIC: a program in another network namespace uses the device, too", |vfs| {
        let command = "unshare -n sh -c 'ip link set lo up; rnic-facts register rxe0 4096; ibv_devinfo -d rxe0'";
        has(&vfs.must(command)?, &["register: works", "PORT_ACTIVE"])
    });
    t.on(vfs, "real RNIC: a killed program leaves no objects", |vfs| {
        let objects = || vfs.must("rdma resource show rxe0");
        let before = objects()?;
        let user = User::start(vfs, 0)?;
        require(objects()? != before, "the program has no objects")?;
        vfs.must("killall -9 rnic-facts")?;
        user.task.finish();
        harness::within(SOON, || Ok(objects()? == before), "objects are left").map(drop)
    });
    t.on_mut(vfs, "real RNIC: the link of a VF goes down and up", |vfs| {
        let user = User::start(vfs, 1)?;
        vfs.must("ip link set v1 down")?;
        prints(&user.task, "event: port error")?;
        vfs.must("ip link set v1 up")?;
        prints(&user.task, "event: port active")?;
        user.end()?;
        vfs.repair(1)
    });
    t.on_mut(vfs, "real RNIC: an address that is taken away is a changed GID", |vfs| {
        let user = User::start(vfs, 1)?;
        vfs.must("ip addr flush dev v1")?;
        prints(&user.task, "event: GID table change")?;
        user.end()?;
        vfs.repair(1)
    });
    t.on_mut(vfs, "real RNIC: the removal of a verbs device is told at once, and waits for its users", |vfs| {
        let monitor = vfs.spawn("exec rdma monitor")?;
        let done = removal_waits(vfs, 2, "rdma link delete rxe2", "! grep rxe2 /sys/class/infiniband_verbs/*/ibdev");
        let told = prints(&monitor, "UNREGISTER");
        vfs.must("killall rdma")?;
        done?;
        told?;
        vfs.repair(2)
    });
    t.on_mut(vfs, "real RNIC: the removal of a VF's driver waits for the users of its device", |vfs| {
        let pci = vfs.must("basename $(readlink /sys/class/net/v3/device)")?;
        let drivers = "/sys/bus/pci/drivers/igbvf";
        let unbind = format!("echo {} >{drivers}/unbind", pci.trim());
        let text = removal_waits(vfs, 3, &unbind, "! grep rxe3 /sys/class/infiniband_verbs/*/ibdev")?;
        has(&text, &["event: GID table change"])?;
        vfs.must(&format!("echo {} >{drivers}/bind", pci.trim()))?;
        vfs.repair(3)
    });
    // A machine of its own, which has no VFs afterwards.
    t.test("real RNIC: the removal of all VFs waits for the users of their devices", || {
        let (vfs, numvfs) = (Vfs::start()?, "/sys/class/net/pf/device/sriov_numvfs");
        removal_waits(&vfs, 0, &format!("echo 0 >{numvfs}"), "! grep rxe0 /sys/class/infiniband_verbs/*/ibdev")
            .map(drop)
    });
}
