//! Tests that take too long for each push, and run by `cargo xtask vm rnic`: more vRNICs than VFs, in four groups with
//! a VLAN each, and all of perftest on VFs.

use harness::vm::Vfs;

use super::leases::Program;
use super::pool::{PF, Pool, SOON};
use super::way_vf::Layer;
use crate::support::*;

const GROUPS: u32 = 4;

/// The first and the second vRNIC of a group, and the address of the first.
fn members(group: u32) -> (String, String, String) {
    (format!("a{group}"), format!("b{group}"), format!("10.0.{group}.1"))
}

/// Eight vRNICs of four groups, two in each, on four VFs. Programs wait for a VF.
fn eight_on_four(vfs: &Vfs) -> Result<Layer<'_>> {
    let layer = Layer::on(vfs, Pool::start(vfs, &format!("{PF} --vf-linger 0s --vf-dry wait=100s"))?)?;
    for group in 0..GROUPS {
        let (a, b, address) = members(group);
        layer.pool.must(&format!("group add g{group} --vlan {}", 100 + group))?;
        layer.pool.must(&format!("vrnic add {a} --way vf --group g{group} --ip {address}"))?;
        layer.pool.must(&format!("vrnic add {b} --way vf --group g{group} --ip 10.0.{group}.2"))?;
    }
    Ok(layer)
}

impl Layer<'_> {
    /// Waits until this many VFs are leased and this many programs wait.
    fn has(&self, leased: usize, waiting: u64) -> Check {
        let is = || {
            let info = self.pool.info()?;
            let vfs = info["vfs"].as_array().map(Vec::as_slice).unwrap_or_default();
            let count = vfs.iter().filter(|vf| vf["kind"] == "leased").count();
            Ok(count == leased && info["waiting"] == waiting)
        };
        let what = format!("there are not {leased} leases and {waiting} that wait");
        harness::within(SOON, is, &what).map_err(|e| self.pool.explain(&e)).map(drop)
    }
}

pub(super) fn tests(t: &mut Tests, vfs: &Shared<Vfs>) {
    t.on_mut(vfs, "VFs, long: pingpongs of eight vRNICs of four groups on four VFs", |vfs| {
        let layer = eight_on_four(vfs)?;
        for group in 0..GROUPS {
            let (a, b, address) = members(group);
            for kind in ["rc", "uc", "ud", "srq"] {
                layer.works_between(&a, &b, &address, &format!("ibv_{kind}_pingpong -n 20 -g 0"))?;
            }
        }
        layer.pool.all_ready()
    });
    t.on_mut(vfs, "VFs, long: vRNICs of different groups do not reach each other", |vfs| {
        let layer = eight_on_four(vfs)?;
        for group in 0..GROUPS {
            let ((a, _, _), (_, b, _)) = (members(group), members((group + 1) % GROUPS));
            let run = |vrnic: &str, server: &str| {
                let program = format!("ibv_rc_pingpong -n 20 -g 0 -p {} {server}", 18600 + group);
                Layer::on_host_network(vrnic, &program)
            };
            let server = vfs.spawn(&run(&a, ""))?;
            let listens = || Ok(server.has_ended() || vfs.run("netstat -ltn")?.text.contains("LISTEN"));
            harness::within(SOON, listens, "the server does not listen")?;
            let (client, server) = (vfs.run(&run(&b, "127.0.0.1"))?, server.finish());
            let text = format!("{}\n{}", server.text, client.text);
            let is_refused = !client.ok() && !server.ok() && text.contains("Failed to modify QP to RTR");
            require(is_refused, layer.pool.explain(&text))?;
        }
        layer.pool.all_ready()
    });
    t.on_mut(vfs, "VFs, long: a fifth program waits, gets the VF that comes free, and all VFs come back", |vfs| {
        let layer = eight_on_four(vfs)?;
        let holders: Vec<Program<'_>> = (1..GROUPS).map(|g| Program::ask(vfs, &members(g).0)).collect::<Result<_>>()?;
        holders.iter().try_for_each(|h| h.prints("context: works")).map_err(|e| layer.pool.explain(&e))?;
        let (a, b, address) = members(0);
        let program = "ibv_rc_pingpong -n 20 -g 0";
        let server = vfs.spawn(&Layer::container(&a, program))?;
        layer.has(4, 0)?;
        let info = layer.pool.info()?;
        let groups: Vec<_> = (0..4).filter_map(|vf| info["vfs"][vf]["group"].as_str()).collect();
        require((0..GROUPS).all(|g| groups.contains(&format!("g{g}").as_str())), info.to_string())?;
        let shown = vfs.must("ip link show pf")?;
        require((0..GROUPS).all(|g| shown.contains(&format!("vlan {}", 100 + g))), shown)?;
        let client = vfs.spawn(&Layer::container(&b, &format!("{program} {address}")))?;
        layer.has(4, 1)?;
        for holder in holders {
            holder.end()?;
        }
        both_end_well((server.finish(), client.finish())).map_err(|e| layer.pool.explain(&e))?;
        layer.has(0, 0)?;
        layer.pool.all_ready()?;
        let shown = vfs.must("ip link show pf")?;
        require(!shown.contains("vlan"), shown)
    });
    t.on_mut(vfs, "VFs, long: vRNICs of one instance share a VF", |vfs| {
        let layer = eight_on_four(vfs)?;
        for (name, address) in [("x", "10.0.0.3"), ("y", "10.0.0.4")] {
            layer.pool.must(&format!("vrnic add {name} --way vf --group g0 --instance box --ip {address}"))?;
        }
        let both = [Program::ask(vfs, "x")?, Program::ask(vfs, "y")?];
        both.iter().try_for_each(|p| p.prints("context: works")).map_err(|e| layer.pool.explain(&e))?;
        layer.has(1, 0)?;
        let info = layer.pool.info()?;
        require(info["vfs"][0]["instance"] == "box" && info["vfs"][0]["group"] == "g0", info.to_string())?;
        layer.works_between("x", "y", "10.0.0.3", "ibv_rc_pingpong -n 20 -g 0")?;
        layer.works_between("x", "b0", "10.0.0.3", "ibv_rc_pingpong -n 20 -g 0")?;
        both.into_iter().try_for_each(Program::end)?;
        layer.pool.all_ready()
    });
    for connecting in ["", " -R"] {
        t.on_mut(vfs, format!("VFs, long: all of perftest{connecting}"), move |vfs| {
            let layer = Layer::start(vfs)?;
            for kind in ["write", "read", "send", "atomic"] {
                for figure in ["bw", "lat"] {
                    layer.works(&format!("ib_{kind}_{figure} -F -n 20{connecting}"))?;
                }
            }
            Ok(())
        });
    }
}
