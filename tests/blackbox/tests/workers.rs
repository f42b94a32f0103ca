//! Tests that kill or stop workers, supervisors and the keeper, and check the effects on programs.

use std::path::Path;

use std::process::Command;

use crate::support::*;

/// Programs that exchange and check data between two containers of a group until this is dropped.
struct Checked {
    server: Running,
    client: Running,
}

impl Checked {
    fn start(server: (&Lab, &str), client: (&Lab, &str), address: &str) -> Result<Checked> {
        let (on, vrnic) = server;
        let server = serve(on, vrnic, "rping -s -V -S 4000 -C 100000000")?;
        let client = client.0.spawn(client.1, &[], &format!("rping -c -V -S 4000 -C 100000000 -a {address}"))?;
        let mut checked = Checked { server, client };
        goes_on(on, vrnic)?;
        checked.goes_on().map(|()| checked)
    }

    fn goes_on(&mut self) -> Check {
        let ended = self.server.has_ended() || self.client.has_ended();
        let text = format!("{}{}", self.server.text(), self.client.text());
        require(!ended && text.is_empty(), format!("the data of the other group stopped: {text}"))
    }

    fn end(mut self) -> Check {
        self.goes_on()?;
        self.client.kill();
        self.server.kill();
        self.client.finish();
        self.server.finish();
        Ok(())
    }
}

fn signal(pid: i32, signal: i32) -> Check {
    // SAFETY: a process that a virtual layer of ours has started; no memory is passed.
    let done = unsafe { libc::kill(pid, signal) };
    require(done == 0, format!("process {pid}: {}", std::io::Error::last_os_error()))
}

/// True for a process that has not ended. A zombie counts as ended.
fn runs(pid: i32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    status.lines().any(|l| l.starts_with("State:") && !l.contains('Z'))
}

/// Process ID of a lab's keeper.
fn keeper(lab: &Lab) -> Result<i32> {
    let o = Command::new("pgrep").args(["-f", "^unirdma keeper$", "-P"]).arg(lab.pid().to_string()).output();
    let o = o.map_err(|e| e.to_string())?;
    String::from_utf8_lossy(&o.stdout).trim().parse().map_err(|_| "there is no keeper".into())
}

/// The file with the CPU weight of a process's cgroup, and the default.
fn cpu_weight_file(pid: i32) -> Result<(String, u32)> {
    let of = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).map_err(|e| e.to_string())?;
    for line in of.lines() {
        let mut fields = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (fields.next(), fields.next(), fields.next()) else { continue };
        let (file, usual) = match controllers {
            "" => (format!("/sys/fs/cgroup{path}/cpu.weight"), 100),
            c if c.split(',').any(|c| c == "cpu") => (format!("/sys/fs/cgroup/{c}{path}/cpu.shares"), 1024),
            _ => continue,
        };
        if std::fs::exists(&file).unwrap_or(false) {
            return Ok((file, usual));
        }
    }
    Err(format!("no cgroup shares processors with process {pid}: {of}"))
}

/// CPU weight of a process's cgroup, in percent of the default.
fn cpu_weight(pid: i32) -> Result<u32> {
    let (file, usual) = cpu_weight_file(pid)?;
    let text = std::fs::read_to_string(file).map_err(|e| e.to_string())?;
    text.trim().parse::<u32>().map(|n| n * 100 / usual).map_err(|e| e.to_string())
}

/// Starts a virtual layer with vRNICs a and b, and with other vRNICs in a group of their own.
fn two_groups(user: Option<u32>) -> Result<Lab> {
    let lab = Lab::start(user)?;
    lab.vrnic("a", &["--ip", "10.0.0.1"])?;
    lab.vrnic("b", &["--ip", "10.0.0.2"])?;
    require(lab.unirdma(&["group", "add", "blue"]).ok(), "no group")?;
    lab.vrnic("c", &["--ip", "10.0.0.1", "--group", "blue"])?;
    lab.vrnic("d", &["--ip", "10.0.0.2", "--group", "blue"])?;
    Ok(lab)
}

fn works(lab: &Lab) -> Check {
    let p = "ibv_rc_pingpong -g 0 -n 200";
    both_end_well(lab.pair(("a", p), ("b", &format!("{p} 10.0.0.1")), &[])?)
}

/// Waits until the worker of a group is another process than this one.
fn wait_for_another(lab: &Lab, group: &str, pid: i32) -> Check {
    soon(|| lab.worker(group).is_ok_and(|w| w.0 != pid), "there is no new worker")
}

/// Kills the worker of a group and waits for its successor.
pub(crate) fn kill_worker(lab: &Lab, group: &str) -> Check {
    let (pid, _) = lab.worker(group)?;
    signal(pid, libc::SIGKILL)?;
    wait_for_another(lab, group, pid)
}

fn killed_50_times(user: Option<u32>) -> Check {
    let lab = two_groups(user)?;
    let mut other = Checked::start((&lab, "c"), (&lab, "d"), "10.0.0.1")?;
    let blue = lab.worker("blue")?;
    // Programs that restart again and again, and mostly lose their device.
    let again = |command: &str| format!("sh -c 'while :; do timeout 5 {command} > /dev/null 2>&1; done'");
    let mut server = lab.spawn("a", &[], &again("ibv_rc_pingpong -g 0 -n 100000"))?;
    let mut client = lab.spawn("b", &[], &again("ibv_rc_pingpong -g 0 -n 100000 10.0.0.1"))?;
    for _ in 0..50 {
        std::thread::sleep(Duration::from_millis(60));
        kill_worker(&lab, "default")?;
        other.goes_on()?;
    }
    server.kill();
    client.kill();
    server.finish();
    client.finish();
    let restarts = lab.worker("default")?.1;
    require(restarts == 50 && lab.worker("blue")? == blue, format!("{restarts} restarts, {:?}", lab.workers()?))?;
    other.end()?;
    works(&lab)
}

pub(crate) fn tests(t: &mut Tests) {
    t.topic(&[packages::RUN, packages::CONNECTING, packages::SANDBOX]);
    let abc = &Shared::new(abc);
    let user = Some(own_user());
    t.test("workers: one is killed 50 times, and another group's data goes on", || killed_50_times(None));
    t.test("workers: one of an ordinary user is killed 50 times", move || killed_50_times(user));
    t.test("workers: programs of a killed one get IBV_EVENT_DEVICE_FATAL", move || {
        let lab = two_groups(user)?;
        let watch = lab.spawn("a", &[], "timeout 20 ibv_asyncwatch")?;
        let other = lab.spawn("c", &[], "timeout 20 ibv_asyncwatch")?;
        soon(|| lab.unirdma(&["status"]).text.contains(", 2 programs"), "no programs")?;
        kill_worker(&lab, "default")?;
        wait_for(&watch, "IBV_EVENT_DEVICE_FATAL")?;
        require(!other.text().contains("FATAL"), other.text())?;
        works(&lab)
    });
    t.test("workers: one that hangs is ended, and keeps nobody else waiting", move || {
        let lab = two_groups(user)?;
        let (pid, _) = lab.worker("blue")?;
        signal(pid, libc::SIGSTOP)?;
        let began = std::time::Instant::now();
        let hung = lab.start_unirdma(&["vrnic", "show", "c"])?;
        std::thread::sleep(Duration::from_millis(200));
        let o = lab.unirdma(&["vrnic", "show", "a"]);
        require(o.ok() && began.elapsed() < Duration::from_secs(5), format!("{:?} {}", began.elapsed(), o.text))?;
        works(&lab)?;
        refused(&hung.finish(), "the worker of group blue does not answer")?;
        wait_for_another(&lab, "blue", pid)?;
        let o = lab.unirdma(&["vrnic", "show", "c"]);
        require(o.ok(), o.text)
    });
    t.test("workers: a supervisor that a signal ends says which, and whose", || {
        let mut lab = Lab::start(None)?;
        lab.stop_host();
        let said = format!("unirdma: ends by SIGTERM from process {} (", std::process::id());
        require(lab.log().contains(&said), lab.log())
    });
    t.test("workers: a supervisor is killed, and the next one takes over", move || {
        let mut lab = two_groups(user)?;
        require(lab.unirdma(&["vrnic", "set", "a", "--weight", "70"]).ok(), "no weight")?;
        require(lab.unirdma(&["vrnic", "ip", "add", "a", "fd00::7/64"]).ok(), "no address")?;
        let before = lab.workers()?;
        let mut data = Checked::start((&lab, "c"), (&lab, "d"), "10.0.0.1")?;
        lab.kill_host();
        std::thread::sleep(Duration::from_millis(300));
        data.goes_on()?;
        lab.start_again()?;
        require(lab.workers()? == before, format!("{before:?}, then {:?}", lab.workers()?))?;
        data.goes_on()?;
        // The new supervisor knows all names, shares, addresses and containers.
        let o = lab.unirdma(&["vrnic", "show", "a"]);
        require(o.text.contains("weight 70") && o.text.contains("fd00::7"), o.text)?;
        refused(&lab.unirdma(&["vrnic", "add", "a"]), "exists already")?;
        refused(&lab.unirdma(&["run", "--vrnic", "c", "--", "true"]), "has a container already")?;
        let o = lab.unirdma(&["exec", "--vrnic", "c", "--", "ibv_devinfo"]);
        require(o.ok() && o.text.contains("unirdma0"), o.text)?;
        lab.vrnic("z", &["--ip", "10.0.0.9"])?;
        works(&lab)?;
        data.end()?;
        // A container that ends releases its vRNIC, although the supervisor that started it has ended.
        let free = || lab.unirdma(&["run", "--vrnic", "c", "--", "true"]).ok();
        soon(free, "the vRNIC is not free again")?;
        // A worker that dies while there is no supervisor is replaced, too.
        let (pid, _) = lab.worker("default")?;
        lab.kill_host();
        signal(pid, libc::SIGKILL)?;
        lab.start_again()?;
        wait_for_another(&lab, "default", pid)?;
        works(&lab)?;
        lab.stop_host();
        let left: Vec<i32> = before.iter().map(|w| w.1).filter(|&p| runs(p)).collect();
        require(left.is_empty(), format!("workers are left: {left:?}"))
    });
    t.test("workers: the weight of a group is that of its worker's cgroup, also of its next one", || {
        // Group weights apply only to pollers on dedicated cores.
        let mut lab = Lab::start_in(None, None, &["--polling", "dedicated"])?;
        let o = lab.unirdma(&["group", "add", "blue", "--weight", "300"]);
        require(o.ok(), o.text)?;
        lab.vrnic("c", &["--ip", "10.0.0.1", "--group", "blue"])?;
        let shown = |lab: &Lab, weight: u32| -> Result<bool> {
            let o = lab.unirdma(&["group", "ls", "--json"]);
            let groups: serde_json::Value = serde_json::from_str(&o.text).map_err(|e| format!("{e}: {}", o.text))?;
            let blue = groups.as_array().into_iter().flatten().find(|g| g["name"] == "blue").ok_or(o.text.clone())?;
            require(blue["weight"] == weight, o.text.clone())?;
            Ok(blue["weight_lacks"].is_null())
        };
        let counts = shown(&lab, 300)?;
        let in_force = |lab: &Lab, weight: u32| -> Check {
            let of = if counts { cpu_weight(lab.worker("blue")?.0)? } else { weight };
            require(of == weight, format!("{of}, not {weight}"))
        };
        in_force(&lab, 300)?;
        let o = lab.unirdma(&["group", "set", "blue", "--weight", "50"]);
        require(o.ok(), o.text)?;
        shown(&lab, 50)?;
        in_force(&lab, 50)?;
        kill_worker(&lab, "blue")?;
        in_force(&lab, 50)?;
        refused(&lab.unirdma(&["group", "set", "blue", "--weight", "0"]), "the weight 0 is not 1 to 10000")?;
        refused(&lab.unirdma(&["group", "add", "red", "--weight", "20000"]), "the weight 20000 is not 1 to 10000")?;
        refused(&lab.unirdma(&["group", "set", "red", "--weight", "5"]), "there is no group red")?;
        shown(&lab, 50)?;
        let o = lab.unirdma(&["group", "ls"]);
        require(counts != o.text.contains("weights of groups do not count here: "), o.text)?;
        let (pid, _) = lab.worker("blue")?;
        lab.kill_host();
        if counts {
            // As if the kernel had forgotten it.
            let (file, usual) = cpu_weight_file(pid)?;
            std::fs::write(file, usual.to_string()).map_err(|e| e.to_string())?;
        }
        lab.start_again()?;
        shown(&lab, 50)?;
        in_force(&lab, 50)
    });
    t.test("workers: a keeper is killed, and the next one knows all", move || {
        let mut lab = two_groups(user)?;
        let before = lab.workers()?;
        let pid = keeper(&lab)?;
        signal(pid, libc::SIGKILL)?;
        soon(|| keeper(&lab).is_ok_and(|p| p != pid), "there is no new keeper")?;
        lab.vrnic("z", &["--ip", "10.0.0.9"])?;
        lab.kill_host();
        lab.start_again()?;
        require(lab.workers()? == before, format!("{before:?}, then {:?}", lab.workers()?))?;
        refused(&lab.unirdma(&["vrnic", "add", "z"]), "exists already")?;
        works(&lab)
    });
    t.need_root("only root can make network namespaces, and workers of another user");
    t.test("workers: supervisors of two hosts are killed and come again, and data between them goes on", || {
        let mut two = TwoHosts::start(Link { name: "w", ipv6: false, mtu: 1500, args: &[] })?;
        let mut data = Checked::start((&two.labs[0], "a"), (&two.labs[1], "b"), "10.0.0.1")?;
        for host in [0, 1] {
            let before = two.labs[host].workers()?;
            two.labs[host].kill_host();
            std::thread::sleep(Duration::from_millis(200));
            two.labs[host].start_again()?;
            require(two.labs[host].workers()? == before, format!("{before:?}"))?;
            data.goes_on()?;
        }
        // Groups are added and removed afterwards, each with sockets of its own.
        for lab in &two.labs {
            require(lab.unirdma(&["group", "add", "late"]).ok(), "no group")?;
        }
        data.goes_on()?;
        kill_worker(&two.labs[0], "default")?;
        data.client.kill();
        data.server.kill();
        data.client.finish();
        data.server.finish();
        let p = "timeout 30 ib_write_bw -n 500";
        both_end_well(two.pair(p, &format!("{p} 10.0.0.1"))?)
    });
    t.test("workers: as root they run as another user, without a capability, and filters hold each thread", || {
        let lab = Lab::start(None)?;
        let (pid, _) = lab.worker("default")?;
        for task in Path::new(&format!("/proc/{pid}/task")).read_dir().map_err(|e| e.to_string())?.flatten() {
            let status = std::fs::read_to_string(task.path().join("status")).map_err(|e| e.to_string())?;
            let is = |name: &str| status.lines().find_map(|l| l.strip_prefix(name)).unwrap_or_default().trim();
            let uid = is("Uid:").split_whitespace().next() != Some("0");
            let held = ["CapEff:", "CapPrm:", "CapBnd:"].iter().all(|c| is(c).bytes().all(|b| b == b'0'));
            // One filter of the whole process, one of the thread.
            let filters = is("Seccomp_filters:").parse::<u32>().unwrap_or(2) >= 2 && is("Seccomp:") == "2";
            require(uid && held && filters && is("NoNewPrivs:") == "1", status.clone())?;
        }
        Ok(())
    });
    t.need_no_root();
    t.on(abc, "wrong_input_a_worker_by_hand", |lab| {
        refused(&lab.unirdma(&["worker", "x"]), "what `unirdma host` starts")?;
        refused(&lab.unirdma(&["keeper"]), "what `unirdma host` starts")
    });
    t.on(abc, "wrong_input_an_unknown_user_for_workers", |lab| {
        let mut c = Command::new(harness::unirdma());
        c.arg("--dir").arg(lab.dir.join("other")).args(["host", "--user", "nobody-at-all"]);
        let o = c.output().map_err(|e| e.to_string())?;
        let o = Output { code: o.status.code(), text: String::from_utf8_lossy(&o.stderr).into_owned() };
        refused(&o, if harness::uid() == 0 { "there is no user" } else { "only root can" })
    });
    // In a mount namespace of its own.
    t.on(abc, "wrong_input_a_full_disk", |lab| {
        let script = "mkdir -p $LAB/small; exec unshare -rm sh -c 'mount -t tmpfs -o nr_inodes=40 none $LAB/small; \
             D=\"${U%% *} --dir $LAB/small\"; $D host 2> /dev/null & P=$!; until $D status > /dev/null 2>&1; do sleep 0.05; done; \
             i=0; while touch $LAB/small/f$i 2> /dev/null; do i=$((i + 1)); done; \
             $D vrnic add x; echo code $?; $D group add g; echo code $?; $D vrnic ls; rm $LAB/small/f*; \
             $D vrnic add x > /dev/null && $D group add g && echo later; kill $P; wait $P'";
        let text = lab.shell(script).text;
        let said = |what: &str| text.lines().filter(|l| l.contains(what)).count();
        let ok = said("No space left on device") == 2 && said("code 1") == 2 && said("later") == 1 && said(" x ") == 0;
        require(ok, text.clone())
    });
}
