//! The pool of VFs of `unirdma host --vf-pf`, in a virtual machine whose network card has SR-IOV and no VFs yet. The
//! kernel's soft RNIC on each VF is its verbs device.

use harness::vm::{Task, Vfs};
use serde_json::Value;

use crate::support::*;

/// Longest time until a VF is set up, or is seen to have changed. The machine is emulated.
pub(super) const SOON: Duration = Duration::from_secs(60);
pub(super) const PF: &str = "pf,vfs=4,vlan,10.50.0.10/24,rxe";
pub(super) const DIR: &str = "/tmp/pool";

/// `unirdma host` with a pool.
pub(super) struct Pool<'a> {
    vfs: &'a Vfs,
    host: Option<Task>,
}

impl<'a> Pool<'a> {
    /// Starts it, and waits until it serves.
    pub(super) fn start(vfs: &'a Vfs, pf: &str) -> Result<Pool<'a>> {
        vfs.must(&format!("rm -rf {DIR}"))?;
        Pool::start_again(vfs, pf)
    }

    /// As [`Pool::start`], with the directory of the last one.
    fn start_again(vfs: &'a Vfs, pf: &str) -> Result<Pool<'a>> {
        let host = vfs.spawn(&format!("UNIRDMA_LOG=info exec unirdma --dir {DIR} host --vf-pf {pf}"))?;
        let serves = || Ok(host.has_ended() || vfs.run(&format!("unirdma --dir {DIR} status"))?.ok());
        harness::within(SOON, serves, "the virtual layer does not serve")?;
        require(!host.has_ended(), host.text())?;
        Ok(Pool { vfs, host: Some(host) })
    }

    pub(super) fn unirdma(&self, arguments: &str) -> Result<Output> {
        self.vfs.run(&format!("unirdma --dir {DIR} {arguments}"))
    }

    pub(super) fn must(&self, arguments: &str) -> Result<String> {
        self.vfs.must(&format!("unirdma --dir {DIR} {arguments}"))
    }

    pub(super) fn info(&self) -> Result<Value> {
        let o = self.unirdma("vf ls --json")?;
        serde_json::from_str(&o.text).map_err(|e| format!("{e}: {}", o.text))
    }

    /// A text of a VF.
    pub(super) fn of(&self, vf: usize, key: &str) -> Result<String> {
        Ok(self.info()?["vfs"][vf][key].as_str().unwrap_or_default().to_owned())
    }

    /// The number of VFs in a kind of state.
    pub(super) fn count(&self, kind: &str) -> Result<usize> {
        let info = self.info()?;
        let vfs = info["vfs"].as_array().map(Vec::as_slice).unwrap_or_default();
        Ok(vfs.iter().filter(|vf| vf["kind"] == kind).count())
    }

    /// Waits until a VF is in a kind of state, whose text is returned.
    pub(super) fn becomes(&self, vf: usize, kind: &str) -> Result<String> {
        let is = || Ok(self.of(vf, "kind")? == kind);
        harness::within(SOON, is, &format!("VF {vf} is not {kind}")).map_err(|e| self.explain(&e))?;
        self.of(vf, "state")
    }

    pub(super) fn all_ready(&self) -> Check {
        (0..4).try_for_each(|vf| self.becomes(vf, "ready").map(drop))
    }

    /// Waits until a notice has this text.
    fn notices(&self, text: &str) -> Check {
        let has = || Ok(self.info()?["notices"].to_string().contains(text));
        harness::within(SOON, has, &format!("no notice has `{text}`")).map_err(|e| self.explain(&e)).map(drop)
    }

    pub(super) fn explain(&self, error: &str) -> String {
        let table = self.unirdma("vf ls").map(|o| o.text).unwrap_or_default();
        format!("{error}\n{table}\n{}", self.host.as_ref().map(Task::text).unwrap_or_default())
    }

    /// Kills the supervisor only, and starts the next one.
    pub(super) fn kill_supervisor(mut self, pf: &str) -> Result<Self> {
        let text = self.must("status --json")?;
        let status: Value = serde_json::from_str(&text).map_err(|e| format!("{e}: {text}"))?;
        self.vfs.must(&format!("kill -9 {}", status["pid"]))?;
        self.host.take().into_iter().for_each(|h| drop(h.finish()));
        Pool::start_again(self.vfs, pf)
    }

    /// Kills the supervisor, its workers and its keeper. Returns what it has printed.
    fn kill(mut self) -> Result<String> {
        self.vfs.run("killall -9 unirdma")?;
        Ok(self.host.take().map(|h| h.finish().text).unwrap_or_default())
    }
}

impl Drop for Pool<'_> {
    fn drop(&mut self) {
        if let Some(host) = self.host.take() {
            // Also programs that a failed test has left, so that the next test finds all VFs free.
            let _ = self.vfs.run("killall -9 unirdma lease rnic-facts vf-attack vf-contexts vf-costs vf-events");
            host.finish();
        }
    }
}

pub(super) fn tests(t: &mut Tests, vfs: &Shared<Vfs>) {
    t.on_mut(vfs, "VF pool: VFs are made and set up, and two of them reach each other", |vfs| {
        let pool = Pool::start(vfs, PF)?;
        pool.all_ready()?;
        let (a, b) = (pool.of(0, "verbs")?, pool.of(1, "verbs")?);
        let modes = vfs.must("stat -c %a /dev/infiniband/uverbs*")?;
        require(modes.lines().all(|m| m == "600"), modes)?;
        let shown = vfs.must("ip link show pf")?;
        require(shown.contains("02:56:0a:32:00:0a") && shown.contains("spoof checking on"), shown)?;
        let pingpong = |verbs: &str, vf| -> Result<String> {
            Ok(format!("ibv_rc_pingpong -n 20 -d {verbs} -g {}", vfs.gid(verbs, vf)?))
        };
        let server = vfs.spawn(&pingpong(&a, 0)?)?;
        let listens = || Ok(server.has_ended() || vfs.run("netstat -ltn")?.text.contains(":18515"));
        harness::within(SOON, listens, "the server does not listen")?;
        let client = vfs.run(&format!("{} 127.0.0.1", pingpong(&b, 1)?))?;
        both_end_well((server.finish(), client)).map_err(|e| pool.explain(&e))
    });
    t.on_mut(
        vfs,
        "VF pool: a program that uses a VF without a lease is shown, and its VF is free when it ends",
        |vfs| {
            let pool = Pool::start(vfs, PF)?;
            pool.all_ready()?;
            let user = vfs.spawn(&format!("exec rnic-facts events {}", pool.of(2, "verbs")?))?;
            pool.becomes(2, "dirty")?;
            let pid = format!("[{}]", vfs.must("pidof rnic-facts")?.trim());
            // It may have been seen before it had made its objects.
            let is_shown = || {
                let state = pool.of(2, "state")?;
                Ok(state.contains(&pid) && !state.starts_with("0 objects"))
            };
            let shown = harness::within(SOON, is_shown, "the program and its objects are not shown");
            shown.map_err(|e| pool.explain(&e))?;
            pool.becomes(1, "ready")?;
            vfs.must("killall rnic-facts")?;
            user.finish();
            pool.all_ready()
        },
    );
    t.on_mut(vfs, "VF pool: what somebody changes is put right, and what is somebody else's is left alone", |vfs| {
        let pool = Pool::start(vfs, PF)?;
        pool.all_ready()?;
        let netdev = pool.of(3, "netdev")?;
        vfs.must(&format!("ip link set {netdev} down && ip link set pf vf 3 vlan 7"))?;
        let is_right = || {
            let o = vfs.must(&format!("ip link show pf; ip -o link show {netdev}"))?;
            Ok(!o.contains("vlan 7") && o.contains(",UP"))
        };
        harness::within(SOON, is_right, "the VF is not put right").map_err(|e| pool.explain(&e))?;
        pool.all_ready()?;
        vfs.must(&format!("ip addr add 192.168.9.9/24 dev {netdev}"))?;
        let state = pool.becomes(3, "foreign")?;
        require(state.contains("has the address 192.168.9.9/24; remove it"), state)?;
        vfs.must(&format!("ip addr del 192.168.9.9/24 dev {netdev}"))?;
        pool.all_ready()
    });
    t.on_mut(vfs, "VF pool: the next supervisor finds VFs as they are, and parts that were drained", |vfs| {
        let pool = Pool::start(vfs, PF)?;
        pool.all_ready()?;
        let o = pool.unirdma("vf drain pf/1")?;
        require(o.ok(), o.text)?;
        pool.kill()?;
        let pool = Pool::start_again(vfs, PF)?;
        pool.all_ready()?;
        let o = pool.unirdma("vf ls")?;
        require(o.text.contains("\ndrained: pf/1\n") || o.text.ends_with("\ndrained: pf/1\n"), &o.text)?;
        refused(&pool.unirdma("vf drain pf/9")?, "`pf/9` is neither a PF of the pool nor a VF")?;
        let text = pool.kill()?;
        require(!text.contains("binding"), text)
    });
    t.on_mut(vfs, "VF pool: what is wrong is said below the table", |vfs| {
        let pool = Pool::start(vfs, "none,vfs=2,vlan,10.60.0.10/24 --vf-pf pf,vfs=9,fabric=default,10.50.0.10/24,rxe")?;
        pool.notices("there is no PF `none`")?;
        pool.notices("PF `pf` can have 7 VFs, not 9")?;
        vfs.must("echo 1 >/proc/sys/net/ipv4/conf/all/rp_filter; ip link set pf down")?;
        let seen = pool.notices("rp_filter is 1").and_then(|()| pool.notices("PF `pf` is down"));
        vfs.must("echo 0 >/proc/sys/net/ipv4/conf/all/rp_filter; ip link set pf up")?;
        seen
    });
    t.on_mut(vfs, "VF pool: without the right to set VFs up, a line says which right is missing", |vfs| {
        let host = format!("unirdma --dir {DIR} host --vf-pf {PF}");
        refused(&vfs.run(&format!("setpriv --bounding-set=-net_admin {host}"))?, "needs root with CAP_NET_ADMIN")?;
        refused(&vfs.run(&format!("setpriv --bounding-set=-mknod {host}"))?, "and CAP_MKNOD; run it as root")
    });
    t.on_mut(vfs, "VF pool: without one, a line says which option makes one", |vfs| {
        vfs.must(&format!("rm -rf {DIR}"))?;
        let host = vfs.spawn(&format!("exec unirdma --dir {DIR} host"))?;
        let serves = || Ok(vfs.run(&format!("unirdma --dir {DIR} status"))?.ok());
        harness::within(SOON, serves, "the virtual layer does not serve")?;
        let o = vfs.run(&format!("unirdma --dir {DIR} vf ls"))?;
        vfs.run("killall -9 unirdma")?;
        host.finish();
        refused(&o, "has no pool of VFs; `unirdma host --vf-pf")
    });
}
