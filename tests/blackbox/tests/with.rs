//! `unirdma with`: a command that has a virtual layer of its own, which ends with it.

use std::path::Path;
use std::process::Command;

use crate::support::*;

/// A command that shows its device and talks to itself, and leaves a process behind.
const TALKS: &str = "echo $UNIRDMA_HOST_DIR; ibv_devices | awk 'NR > 2 {print $1}'; unset LD_LIBRARY_PATH LD_PRELOAD; \
    ibv_devices | awk 'NR > 2 {print $1}'; cd /sys/class/infiniband && ls; cat */ports/1/state; ls /dev/infiniband; \
    ls /dev/null /dev/shm -d; echo >/dev/null; ib_write_bw -n 10 >/dev/null & sleep 1; \
    ib_write_bw -n 10 localhost | grep -c 65536; sleep 1000 & echo $! >&2; exit 9";

/// The directory of a virtual layer that a command has printed in its first line, which must be gone.
fn is_gone(text: &str) -> Check {
    let line = text.lines().find(|l| l.contains("/unirdma-with-")).ok_or_else(|| text.to_string())?;
    let dir = Path::new(line).parent().ok_or(line)?;
    require(!dir.exists(), format!("{} is left", dir.display()))
}

pub(crate) fn tests(t: &mut Tests) {
    t.topic(&[packages::RUN]);
    for (who, user) in [("root", None), ("an ordinary user", Some(own_user()))] {
        t.test(format!("with: a command of {who} has a device, and nothing is left behind"), move || {
            let lab = Lab::start(user)?;
            let o = lab.unirdma(&["with", "2", "--", "bash", "-c", TALKS]);
            is_gone(&o.text)?;
            let says = "unirdma: vRNIC v1 with address 10.77.0.1; v2 with address 10.77.0.2 (the command has v1; all \
                end with it)";
            let expected =
                ["unirdma0", "unirdma0", "unirdma0", "4: ACTIVE", "uverbs0", "/dev/null", "/dev/shm", "1", says];
            let lines: Vec<&str> = o.text.lines().skip(1).collect();
            let (process, lines) = lines.split_last().ok_or("it printed nothing")?;
            require(o.code == Some(9) && lines == expected, &*o.text)?;
            require(!Path::new("/proc").join(process).exists(), format!("process {process} is left"))
        });
        t.test(format!("with: {who} without namespaces has a device by the environment"), move || {
            let lab = Lab::start(user)?;
            let talks = "echo $UNIRDMA_HOST_DIR; ib_write_bw -n 10 >/dev/null & sleep 1; \
                ib_write_bw -n 10 localhost | grep -c 65536; readlink /proc/self/ns/mnt";
            let bare = lab.unirdma(&["with", "1", "--quiet", "--bare", "--", "bash", "-c", talks]);
            is_gone(&bare.text)?;
            let own = std::fs::read_link("/proc/self/ns/mnt").map_err(failed("the mount namespace"))?;
            require(bare.ok() && bare.text.ends_with(&format!("\n1\n{}\n", own.display())), bare.text)?;
            // Where the kernel allows none: a root user without capabilities.
            let exe = lab.exe().display().to_string();
            let script = format!(
                "echo 0 >/proc/sys/user/max_user_namespaces; exec setpriv --bounding-set=-all --inh-caps=-all \
                 --reuid 0 {exe} with 1 -q -- ibv_devices"
            );
            let mut refused = Command::new("setpriv");
            let id = own_user().to_string();
            refused.args(["--reuid", &id, "--regid", &id, "--clear-groups", "unshare", "-U", "--map-root-user"]);
            let o = Output::of(refused.env_remove("XDG_RUNTIME_DIR").args(["sh", "-c", &script]));
            let line = "unirdma: no namespaces, so the command finds the vRNIC by its environment only, and not in \
                /sys and /dev: Operation not permitted\n";
            require(o.ok() && o.text.contains(line) && o.text.contains("unirdma0"), o.text)
        });
        t.test(format!("with: a second vRNIC of {who} is for a container"), move || {
            let lab = Lab::start(user)?;
            let exe = lab.exe().display();
            let script = format!(
                "echo $UNIRDMA_HOST_DIR; ib_write_bw -n 10 >/dev/null & sleep 1; \
                 {exe} run --vrnic v2 --net host -- ib_write_bw -n 10 localhost | grep -c 65536; \
                 {exe} run --vrnic v2 -- sh -c 'ls /sys/class/infiniband; ip -4 -o a show eth0 | grep -c 10.77.0.2'; \
                 {exe} vrnic add more -q; {exe} vrnic ls -q | xargs"
            );
            let o = lab.unirdma(&["with", "2", "-q", "--", "bash", "-c", &script]);
            is_gone(&o.text)?;
            require(o.ok() && o.text.contains("/host\n1\nunirdma0\n1\nmore v1 v2\n"), o.text)
        });
    }
    t.test("with: a virtual layer ends with a command that is killed", || {
        let lab = Lab::start(Some(own_user()))?;
        let command = "echo $UNIRDMA_HOST_DIR; echo begun; exec sleep 1000";
        let mut program = lab.start_unirdma(&["with", "1", "-q", "--", "sh", "-c", command])?;
        wait_for(&program, "begun")?;
        let text = program.text();
        let dir = text.lines().next().unwrap_or_default();
        let serves = || Output::of(Command::new(lab.exe()).args(["--dir", dir, "status"])).ok();
        require(serves(), text.clone())?;
        program.kill();
        program.finish();
        soon(|| !serves(), "it serves on")?;
        let private = Path::new(dir).parent().ok_or(dir)?;
        std::fs::remove_dir_all(private).map_err(failed("the directory"))
    });
    t.test("with: the first vRNIC has an address of this machine, if it is asked for", || {
        let lab = Lab::start(Some(own_user()))?;
        let finds = "cat /sys/class/infiniband/unirdma0/ports/1/gid_attrs/ndevs/0; ibv_devinfo -v | grep -c ::ffff:10.9.0.7; \
            rping -s -C 1 & sleep 1; rping -c -C 1 -v -a 10.9.0.7";
        let inside = format!(
            "ip link set lo up; ip link add e0 type veth peer name e1; ip addr add 10.9.0.7/24 dev e0; ip link set e0 up; \
             ip link set e1 up; ip route add default dev e0; exec {} with 1 --ip host -- sh -c '{finds}'",
            lab.exe().display()
        );
        let id = own_user().to_string();
        let mut c = Command::new("setpriv");
        c.args(["--reuid", &id, "--regid", &id, "--clear-groups", "unshare", "-U", "--map-root-user", "--net"]);
        let o = Output::of(c.env_remove("XDG_RUNTIME_DIR").args(["sh", "-c", &inside]));
        let expected = ["unirdma: vRNIC v1 with address 10.9.0.7 ", "e0\n1\n", "ping data: rdma-ping-0"];
        require(o.ok() && expected.iter().all(|e| o.text.contains(e)), o.text)?;
        let o = lab.unirdma(&["with", "1", "--ip", "127.0.0.1", "--", "true"]);
        require(o.code == Some(2) && o.text.contains("`127.0.0.1` cannot be the address of a vRNIC"), o.text)
    });
    t.test("with: a command that does not exist", || {
        let lab = Lab::start(Some(own_user()))?;
        let o = lab.unirdma(&["with", "1", "-q", "--", "/nowhere"]);
        refused(&o, "unirdma: cannot run /nowhere: there is no such command")?;
        require(o.code == Some(127), o.text)
    });
}
