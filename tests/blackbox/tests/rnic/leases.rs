//! Programs that ask for VFs. `tests/c/lease.c` is the program.

use harness::vm::{Task, Vfs};
use serde_json::Value;

use super::pool::{DIR, PF, Pool, SOON};
use crate::support::*;

/// A pool with one VF.
const ONE: &str = "pf,vfs=1,vlan,10.50.0.10/24,rxe";

/// A program that has connected to a lease socket.
pub(super) struct Program<'a> {
    vfs: &'a Vfs,
    task: Task,
}

impl<'a> Program<'a> {
    /// Starts one that asks for a VF of a vRNIC.
    pub(super) fn ask(vfs: &'a Vfs, vrnic: &str) -> Result<Program<'a>> {
        Program::start(vfs, vrnic, "")
    }

    /// Starts one with further arguments.
    pub(super) fn start(vfs: &'a Vfs, vrnic: &str, arguments: &str) -> Result<Program<'a>> {
        let command = format!("echo pid $$; exec lease {DIR}/vrnics/{vrnic}/lease.sock {arguments}");
        Ok(Program { vfs, task: vfs.spawn(&command)? })
    }

    /// Waits until it has printed a text.
    pub(super) fn prints(&self, text: &str) -> Check {
        let has = || Ok(self.task.text().contains(text));
        let printed = harness::within(SOON, has, &format!("a program does not print `{text}`"));
        printed.map_err(|e| format!("{e}, but: {}", self.task.text())).map(drop)
    }

    /// True if it has printed a text.
    pub(super) fn has_printed(&self, text: &str) -> bool {
        self.task.text().contains(text)
    }

    pub(super) fn end(self) -> Check {
        let text = self.task.text();
        let pid = text.split_whitespace().nth(1).ok_or("no PID")?.to_owned();
        self.vfs.must(&format!("kill -9 {pid}"))?;
        self.task.finish();
        Ok(())
    }
}

impl Pool<'_> {
    /// Makes vRNICs of the way vf, in a group with a VLAN.
    fn add(&self, names: &[&str]) -> Check {
        self.must("group add blue --vlan 100")?;
        names.iter().try_for_each(|name| self.must(&format!("vrnic add {name} --group blue --way vf")).map(drop))
    }

    pub(super) fn way(&self, vrnic: &str) -> Result<Value> {
        let text = self.must(&format!("vrnic show {vrnic} --json"))?;
        let shown: Value = serde_json::from_str(&text).map_err(|e| format!("{e}: {text}"))?;
        Ok(shown["way"].clone())
    }

    /// Waits until a vRNIC has this many contexts on a VF.
    fn has_contexts(&self, vrnic: &str, count: u64) -> Check {
        let is = || Ok(self.way(vrnic)?["contexts"] == count);
        harness::within(SOON, is, &format!("{vrnic} has not {count} contexts")).map_err(|e| self.explain(&e)).map(drop)
    }
}

/// The tests, on a machine with a network card that has SR-IOV.
pub(super) fn tests(t: &mut Tests, vfs: &Shared<Vfs>) {
    t.on_mut(vfs, "VF leases: a program gets a VF in its group's VLAN, and the VF is free when it has ended", |vfs| {
        let pool = Pool::start(vfs, &format!("{PF} --vf-linger 1s"))?;
        pool.all_ready()?;
        pool.add(&["a", "b"])?;
        let way = pool.way("a")?;
        require(way["in_force"] == "vf" && way["vf"].is_null(), way.to_string())?;
        let first = Program::ask(vfs, "a")?;
        first.prints("context: works").map_err(|e| pool.explain(&e))?;
        first.prints("has uverbs")?;
        first.prints("number: right")?;
        first.prints("GID ::ffff:10.50.0.10\n")?;
        let second = Program::ask(vfs, "a")?;
        second.prints("context: works")?;
        let same = |p: &Program<'_>| p.task.text().lines().find(|l| l.starts_with("has ")).map(String::from);
        require(same(&first) == same(&second), second.task.text())?;
        let other = Program::ask(vfs, "b")?;
        other.prints("GID ::ffff:10.50.0.11\n")?;
        pool.has_contexts("a", 2)?;
        let shown = vfs.must("ip link show pf")?;
        require(shown.matches("vlan 100").count() == 2, shown)?;
        let seen =
            vfs.must(&format!("cd {DIR}/vrnics/a/vf/sys/class; ls -d infiniband/*/ports/1/gids infiniband_verbs/*"))?;
        require(seen.contains("infiniband_verbs/uverbs"), seen)?;
        first.end()?;
        pool.has_contexts("a", 1)?;
        second.end()?;
        other.end()?;
        pool.all_ready()?;
        let shown = vfs.must(&format!("ip link show pf; ls {DIR}/vrnics/a"))?;
        require(!shown.contains("vlan") && !shown.contains("vf\n"), shown)
    });
    t.on_mut(vfs, "VF leases: without a free VF programs wait, are refused, or are soft", |vfs| {
        let pool = Pool::start(vfs, &format!("{ONE} --vf-linger 0s --vf-dry wait=60s"))?;
        pool.becomes(0, "ready")?;
        pool.add(&["a", "b", "c"])?;
        let first = Program::ask(vfs, "a")?;
        first.prints("context: works").map_err(|e| pool.explain(&e))?;
        let second = Program::ask(vfs, "b")?;
        second.prints("waits at 1")?;
        let third = Program::ask(vfs, "c")?;
        third.prints("waits at 2")?;
        require(pool.info()?["waiting"] == 2, pool.explain("two programs wait"))?;
        second.end()?;
        third.prints("waits at 1")?;
        first.end()?;
        third.prints("context: works").map_err(|e| pool.explain(&e))?;
        third.end()?;
        drop(pool);
        for (dry, text) in [("refuse", "refused: no VF is free"), ("soft", "soft: no VF is free")] {
            let pool = Pool::start(vfs, &format!("{ONE} --vf-linger 0s --vf-dry {dry}"))?;
            pool.becomes(0, "ready")?;
            pool.add(&["a", "b"])?;
            let first = Program::ask(vfs, "a")?;
            first.prints("context: works").map_err(|e| pool.explain(&e))?;
            let second = Program::ask(vfs, "b")?;
            second.prints(text)?;
            let info = pool.info()?;
            require(info["waiting"] == 0 && info["vfs"][0]["kind"] == "leased", info.to_string())?;
            first.end()?;
            second.end()?;
        }
        Ok(())
    });
    t.on_mut(vfs, "VF leases: a hostile program costs itself only", |vfs| {
        let pool = Pool::start(vfs, &format!("{ONE} --vf-linger 0s"))?;
        pool.becomes(0, "ready")?;
        pool.add(&["a"])?;
        let silent = Program::start(vfs, "a", "0")?;
        for bytes in ["8", "17", "4000"] {
            let wrong = Program::start(vfs, "a", bytes)?;
            wrong.prints("end")?;
            wrong.end()?;
        }
        let good = Program::ask(vfs, "a")?;
        good.prints("context: works").map_err(|e| pool.explain(&e))?;
        good.end()?;
        silent.prints("end")?;
        silent.end()?;
        pool.becomes(0, "ready").map(drop)
    });
    t.on_mut(vfs, "VF leases: a VF stays with its program while the supervisor is started anew", |vfs| {
        let pool = Pool::start(vfs, &format!("{PF} --vf-linger 0s"))?;
        pool.all_ready()?;
        pool.add(&["a", "b"])?;
        let first = Program::ask(vfs, "a")?;
        first.prints("context: works").map_err(|e| pool.explain(&e))?;
        let pool = pool.kill_supervisor(&format!("{PF} --vf-linger 0s"))?;
        first.prints("end")?;
        pool.becomes(0, "leased")?;
        require(pool.way("a")?["vf"] == "pf/0", pool.way("a")?.to_string())?;
        let second = Program::ask(vfs, "b")?;
        second.prints("GID ::ffff:10.50.0.11\n").map_err(|e| pool.explain(&e))?;
        let third = Program::ask(vfs, "a")?;
        third.prints("GID ::ffff:10.50.0.10\n")?;
        [first, second, third].into_iter().try_for_each(Program::end)?;
        pool.all_ready()
    });
    t.on_mut(vfs, "VF leases: what cannot have a VF says why, and auto is soft", |vfs| {
        let pool = Pool::start(vfs, ONE)?;
        pool.becomes(0, "ready")?;
        refused(&pool.unirdma("vrnic add a --way vf")?, "no PF serves the group `default`; give the group a VLAN")?;
        pool.must("vrnic add a --way auto")?;
        let way = pool.way("a")?;
        require(way["asked"] == "auto" && way["in_force"] == "soft", way.to_string())?;
        require(way["why"].as_str().is_some_and(|w| w.starts_with("no PF serves the group")), way.to_string())?;
        let soft = Program::ask(vfs, "a")?;
        soft.prints("soft: no PF serves the group")?;
        pool.must("group set default --vlan 7")?;
        require(pool.way("a")?["in_force"] == "vf", pool.way("a")?.to_string())?;
        let other = Program::ask(vfs, "a")?;
        other.prints("soft: another program of the vRNIC")?;
        soft.end()?;
        other.end()?;
        let third = Program::ask(vfs, "a")?;
        third.prints("context: works").map_err(|e| pool.explain(&e))?;
        third.end()?;
        pool.must("group add red")?;
        refused(&pool.unirdma("group set red --vlan 7")?, "VLAN 7 is that of group default")?;
        refused(&pool.unirdma("group set red --vlan 5000")?, "5000 is no VLAN")
    });
}
