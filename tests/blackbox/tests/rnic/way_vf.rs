//! vRNICs of the way `vf`: unmodified programs in containers whose data path is a VF's, in a virtual machine whose
//! network card has four VFs with the kernel's soft RNIC.

use std::collections::BTreeMap;

use harness::vm::{Task, Vfs};
use serde_json::Value;

use super::pool::{DIR, Pool, SOON};
use crate::support::*;

/// A pool whose vRNICs are used by containers.
pub(super) struct Layer<'a> {
    pub(super) vfs: &'a Vfs,
    pub(super) pool: Pool<'a>,
}

impl<'a> Layer<'a> {
    /// One for a pool, when its VFs can be given out.
    pub(super) fn on(vfs: &'a Vfs, pool: Pool<'a>) -> Result<Layer<'a>> {
        pool.all_ready()?;
        Ok(Layer { vfs, pool })
    }

    /// One with the vRNICs a, b of the way `vf` and s of the way `soft`, all of group blue.
    pub(super) fn start(vfs: &'a Vfs) -> Result<Layer<'a>> {
        Layer::start_with(vfs, "--vf-linger 1s --vf-dry soft")
    }

    /// As [`Layer::start`], with these options in place of its own.
    pub(super) fn start_with(vfs: &'a Vfs, options: &str) -> Result<Layer<'a>> {
        let pf = format!("pf,vfs=4,fabric=blue,10.50.0.10/24,rxe {options}");
        let layer = Layer::on(vfs, Pool::start(vfs, &pf)?)?;
        layer.pool.must("group add blue")?;
        layer.pool.must("vrnic add a --way vf --group blue --ip 10.0.0.1")?;
        layer.pool.must("vrnic add b --way vf --group blue --ip 10.0.0.2")?;
        layer.pool.must("vrnic add s --group blue --ip 10.0.0.3")?;
        Ok(layer)
    }

    /// The command that runs a program in a vRNIC's container.
    pub(super) fn container(vrnic: &str, program: &str) -> String {
        format!("timeout 100 unirdma --dir {DIR} run --vrnic {vrnic} -- {program}")
    }

    /// As [`Layer::container`], in the host's network, so that two programs can tell each other their numbers.
    pub(super) fn on_host_network(vrnic: &str, program: &str) -> String {
        format!("timeout 60 unirdma --dir {DIR} run --vrnic {vrnic} --net host -- {program}")
    }

    /// Waits until a program has printed a text.
    pub(super) fn prints(&self, task: &Task, text: &str) -> Check {
        let explain = |error: &str| self.pool.explain(&format!("{error}: {}", task.text()));
        let has = || Ok(task.has_ended() || task.text().contains(text));
        let printed = harness::within(SOON, has, &format!("the program does not print `{text}`"));
        printed.map_err(|e| explain(&e))?;
        require(task.text().contains(text), explain(&format!("the program has not printed `{text}`")))
    }

    pub(super) fn run(&self, vrnic: &str, program: &str) -> Result<Output> {
        self.vfs.run(&Layer::container(vrnic, program))
    }

    /// Runs a server, and its client as soon as the server listens. Each is a vRNIC and a program.
    pub(super) fn pair(&self, server: (&str, &str), client: (&str, &str)) -> Result<(Output, Output)> {
        self.pair_with(server, self, client)
    }

    /// As [`Layer::pair`], with the client at another virtual layer.
    pub(super) fn pair_with(
        &self,
        server: (&str, &str),
        other: &Layer<'_>,
        client: (&str, &str),
    ) -> Result<(Output, Output)> {
        let serving = self.vfs.spawn(&Layer::container(server.0, server.1))?;
        let mut last = None;
        let connects = || {
            let o = other.run(client.0, client.1)?;
            // The last one is what rstream says of a connection that is refused.
            let early = [
                "Couldn't connect",
                "Unable to",
                "refused",
                "REJECTED",
                "UNREACHABLE",
                "error 8",
                "error 7",
                "rpoll: ",
            ];
            let done = o.ok() || serving.has_ended() || !early.iter().any(|e| o.text.contains(e));
            last = Some(o);
            Ok(done)
        };
        let connected = harness::within(SOON, connects, "the client does not connect");
        let text = last.as_ref().map(|o| o.text.clone()).unwrap_or_default();
        connected.map_err(|e| self.pool.explain(&format!("{e}: {text}\n{}", serving.text())))?;
        Ok((serving.finish(), last.ok_or("no client")?))
    }

    /// Runs the same program on a and on b, which must end well.
    pub(super) fn works(&self, program: &str) -> Check {
        self.works_between("a", "b", "10.0.0.1", program)
    }

    /// Runs the same program on a server, which has this address, and on a client. Both must end well.
    pub(super) fn works_between(&self, server: &str, client: &str, address: &str, program: &str) -> Check {
        let both = self.pair((server, program), (client, &format!("{program} {address}")))?;
        both_end_well(both).map_err(|e| self.pool.explain(&format!("{program}: {e}")))
    }
}

/// Checks that a program ended with an error, and that one line of this library says why.
fn says(o: &Output, text: &str) -> Check {
    let lines: Vec<&str> = o.text.lines().filter(|l| l.starts_with("unirdma: ")).collect();
    require(!o.ok() && lines.len() == 1 && lines[0].contains(text), format!("expected `{text}`: {}", o.text))
}

/// Counts of system calls by their numbers, in a section of what `count-calls` has printed.
fn calls_of(o: &Output, section: u32) -> Result<BTreeMap<u32, u64>> {
    let begin = format!("section {section}, call ");
    let lines = o.text.lines().filter_map(|l| l.strip_prefix(&begin)?.split_once(": "));
    let counts: BTreeMap<u32, u64> =
        lines.filter_map(|(n, c)| Some((n.parse().ok()?, c.trim().parse().ok()?))).collect();
    require(o.ok() && !counts.is_empty(), o.text.clone()).map(|()| counts)
}

/// The sum of the counts of these system calls.
fn sum(counts: &BTreeMap<u32, u64>, of: &[u32]) -> u64 {
    of.iter().filter_map(|n| counts.get(n)).sum()
}

/// The system calls of vf-costs, by a vRNIC that has a VF, and on a VF alone.
fn costs(layer: &Layer<'_>) -> Result<(Output, Output)> {
    let hosted = layer.run("a", "count-calls vf-costs unirdma0 calls")?;
    Ok((hosted, layer.vfs.run(&format!("count-calls vf-costs {} calls", layer.pool.of(3, "verbs")?))?))
}

pub(super) fn tests(t: &mut Tests, vfs: &Shared<Vfs>) {
    t.on_mut(vfs, "way vf: pingpongs", |vfs| {
        let layer = Layer::start(vfs)?;
        for kind in ["rc", "uc", "ud", "srq"] {
            layer.works(&format!("ibv_{kind}_pingpong -n 20 -g 0"))?;
        }
        layer.works("ibv_rc_pingpong -n 20 -g 0 -e")
    });
    t.on_mut(vfs, "way vf: bandwidth of write, read, send and atomics", |vfs| {
        let layer = Layer::start(vfs)?;
        for program in ["ib_write_bw -F -s 4096", "ib_read_bw -F -s 4096", "ib_send_bw -F -s 4096", "ib_atomic_bw -F"] {
            layer.works(&format!("{program} -n 20"))?;
        }
        layer.works("ib_send_bw -F -c UD -s 1024 -n 20")
    });
    t.on_mut(vfs, "way vf: connections by address", |vfs| {
        let layer = Layer::start(vfs)?;
        layer.works("ib_write_bw -F -R -s 4096 -n 20")?;
        layer.works("ib_send_bw -F -R -s 4096 -n 20 -e")?;
        let both = layer.pair(("a", "rping -s -a 10.0.0.1 -C 5 -v"), ("b", "rping -c -a 10.0.0.1 -C 5 -v"))?;
        require(both.0.ok() && both.1.ok() && both.1.text.contains("rdma-ping-4"), both.0.text + &both.1.text)?;
        both_end_well(layer.pair(("a", "udaddy -b 10.0.0.1"), ("b", "udaddy -s 10.0.0.1 -b 10.0.0.2"))?)?;
        let stream = "rstream -S 4096 -I 20";
        both_end_well(layer.pair(("a", stream), ("b", &format!("{stream} -s 10.0.0.1")))?)
    });
    t.on_mut(vfs, "way vf: a multicast group cannot be joined by connection management", |vfs| {
        let layer = Layer::start(vfs)?;
        let o = layer.run("a", "mckey -m 239.1.2.3 -b 10.0.0.1")?;
        require(!o.ok() && o.text.contains("Operation not supported"), layer.pool.explain(&o.text))
    });
    t.on_mut(vfs, "way vf: a program sees the vRNIC's names, and no other device", |vfs| {
        let layer = Layer::start(vfs)?;
        let seen = layer.run("a", "ibv_devinfo -v")?;
        let guid = serde_json::from_str::<Value>(&layer.pool.must("vrnic show a --json")?)
            .map_err(|e| e.to_string())?["guid"]
            .as_str()
            .unwrap_or_default()
            .to_owned();
        let parts = ["unirdma0", "GID[  0]:\t\t::ffff:10.0.0.1", &guid, "active_mtu:\t\t1024", "ATOMIC_HCA"];
        let missing: Vec<&str> = parts.into_iter().filter(|p| !seen.text.contains(p)).collect();
        require(seen.ok() && missing.is_empty() && !guid.is_empty(), format!("lacks {missing:?}: {}", seen.text))?;
        require(!seen.text.contains("10.50.0.") && seen.text.matches("hca_id").count() == 1, &seen.text)?;
        let files = layer.run("a", "sh -c 'ls /dev /sys/class'")?;
        require(!files.text.contains("uverbs"), files.text)
    });
    t.on_mut(vfs, "way vf: contexts at a time and one after the other, and the names of a QP's path", |vfs| {
        let layer = Layer::start(vfs)?;
        let o = layer.run("a", "vf-contexts")?;
        require(o.ok() && o.text.contains("done"), layer.pool.explain(&o.text))
    });
    t.on_mut(vfs, "way vf: a destination without a VF, or of no vRNIC, is refused at RTR", |vfs| {
        let layer = Layer::start(vfs)?;
        let program = "ibv_rc_pingpong -n 20 -g 0";
        let (server, client) = layer.pair(("s", program), ("b", &format!("{program} 10.0.0.3")))?;
        let refused = "Failed to modify QP to RTR";
        require(!client.ok() && (client.text.contains(refused) || server.text.contains(refused)), client.text)
    });
    t.on_mut(vfs, "way vf: a program that cannot have a VF gets one line that says why", |vfs| {
        let layer = Layer::start(vfs)?;
        let o = layer.run("a", "env UNIRDMA_REAL_VERBS=/none/libibverbs.so.1 ibv_devinfo")?;
        says(&o, "UNIRDMA_REAL_VERBS names /none/libibverbs.so.1: No such file")?;
        let o = layer.run("a", "env UNIRDMA_REAL_VERBS=/run/unirdma-lib/libibverbs.so.1 ibv_devinfo")?;
        says(&o, "names uniRDMA's own library")?;
        let o = layer.run("a", "vf-attack sealed ibv_devinfo")?;
        says(&o, "let the container's seccomp profile allow ioctl(2)")?;
        let without = |file: &str| -> Result<Output> {
            let path =
                vfs.must(&format!("ls -d /usr/lib/x86_64-linux-gnu/{file} /lib/x86_64-linux-gnu/{file} 2>&- ; :"))?;
            let path = path.lines().next().ok_or("no such file")?;
            vfs.must(&format!("mv {path} {path}.away"))?;
            let o = layer.run("a", "ibv_devinfo");
            vfs.must(&format!("mv {path}.away {path}"))?;
            o
        };
        says(&without("libibverbs.so.1")?, "there is no libibverbs of rdma-core; install it with the VF's provider")?;
        says(&without("libibverbs")?, "has no provider for rxe_")?;
        layer.pool.all_ready()
    });
    t.on_mut(vfs, "way vf: programs go by the software RNIC while no VF is free, if the pool says so", |vfs| {
        let layer = Layer::start(vfs)?;
        layer.pool.must("vf drain pf")?;
        layer.works("ibv_rc_pingpong -n 20 -g 0")?;
        let device = layer.run("a", "ibv_devinfo -v")?;
        require(device.ok() && !device.text.contains("active_mtu:\t\t1024"), device.text)
    });
    t.on_mut(vfs, "way vf: a VF goes back to the pool when its program ends", |vfs| {
        let layer = Layer::start(vfs)?;
        let leased = || layer.pool.count("leased");
        let server = vfs.spawn(&Layer::container("a", "ibv_rc_pingpong -g 0"))?;
        harness::within(SOON, || Ok(leased()? == 1), "no VF is leased").map_err(|e| layer.pool.explain(&e))?;
        vfs.must("killall ibv_rc_pingpong")?;
        server.finish();
        harness::within(SOON, || Ok(leased()? == 0), "the VF does not come back")
            .map(drop)
            .map_err(|e| layer.pool.explain(&e))
    });
    t.on_mut(vfs, "way vf: posting and polling make as many system calls as on the VF alone", |vfs| {
        let layer = Layer::start(vfs)?;
        let (hosted, alone) = costs(&layer)?;
        let (ours, theirs) = (calls_of(&hosted, 3)?, calls_of(&alone, 3)?);
        // The commands are the same, and may come as write(2) or as ioctl(2).
        let same = ours.values().sum::<u64>() == theirs.values().sum::<u64>();
        require(same, format!("1000 requests: {ours:?}, alone {theirs:?}"))
    });
    t.on_mut(vfs, "way vf: RDMA devices that only their own network namespace sees", |vfs| {
        vfs.must("rdma system set netns exclusive")?;
        let tried = Layer::start(vfs).and_then(|layer| layer.works("ibv_rc_pingpong -n 20 -g 0"));
        // The kernel takes the change only when the namespaces of all containers are gone.
        let shared = || Ok(vfs.run("rdma system set netns shared")?.ok());
        let undone = harness::within(SOON, shared, "the mode does not change back");
        tried.and(undone.map(drop))
    });
    t.on_mut(vfs, "way vf: registration sends no message, and a destination is asked for once a second", |vfs| {
        // As on x86-64, which the machine has.
        const WRITE: u32 = 1;
        const IOCTL: u32 = 16;
        const SENDTO: u32 = 44;
        const SENDMSG: u32 = 46;
        let layer = Layer::start(vfs)?;
        let (hosted, alone) = costs(&layer)?;
        let (ours, theirs) = (calls_of(&hosted, 1)?, calls_of(&alone, 1)?);
        let commands = |counts: &BTreeMap<u32, u64>| sum(counts, &[WRITE, IOCTL]);
        let totals = (ours.values().sum::<u64>(), theirs.values().sum::<u64>());
        let same = commands(&ours) == commands(&theirs) && totals.0 == totals.1;
        require(same && sum(&ours, &[SENDTO, SENDMSG]) == 0, format!("registration: {ours:?}, alone {theirs:?}"))?;
        let (ours, theirs) = (calls_of(&hosted, 2)?, calls_of(&alone, 2)?);
        let messages = sum(&ours, &[SENDTO, SENDMSG]);
        // The destination is known before the first of them.
        let seconds =
            hosted.text.split("connections in ").nth(1).and_then(|t| t.split_whitespace().next()?.parse().ok());
        let seconds: u64 = seconds.ok_or_else(|| hosted.text.clone())?;
        let text = format!("connections in {seconds} s: {ours:?}, alone {theirs:?}");
        require(messages <= seconds + 1, text)
    });
}
