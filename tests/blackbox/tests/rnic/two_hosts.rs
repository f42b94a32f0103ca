//! vRNICs on VFs of two hosts, in two virtual machines whose network cards are connected by a cable.

use harness::vm::{HOSTS, Vfs};

use super::pool::Pool;
use super::way_vf::Layer;
use crate::support::*;

/// The virtual layers of two hosts. The first one has the vRNIC a; the second one has b, and s of the way `soft`. All
/// are of group blue.
struct Two<'a> {
    a: Layer<'a>,
    b: Layer<'a>,
}

impl<'a> Two<'a> {
    fn start(hosts: &'a [Vfs; 2]) -> Result<Two<'a>> {
        let peers = format!("10.0.0.1 blue {0}\\n10.0.0.2 blue {1}\\n10.0.0.3 blue {1}\\n", HOSTS[0], HOSTS[1]);
        let start = |own: usize, vrnics: &[&str]| {
            hosts[own].must(&format!("printf '{peers}' >/tmp/peers"))?;
            let first = 10 * (own + 1);
            let pf = format!("pf,vfs=4,vlan,10.50.0.{first}/24,rxe --address {} --peers /tmp/peers", HOSTS[own]);
            let layer = Layer::on(&hosts[own], Pool::start(&hosts[own], &pf)?)?;
            layer.pool.must("group add blue --vlan 100")?;
            vrnics.iter().try_for_each(|v| layer.pool.must(&format!("vrnic add --group blue {v}")).map(drop))?;
            Ok::<_, String>(layer)
        };
        let a = start(0, &["a --way vf --ip 10.0.0.1"])?;
        Ok(Two { a, b: start(1, &["b --way vf --ip 10.0.0.2", "s --ip 10.0.0.3"])? })
    }

    fn explain(&self, error: &str) -> String {
        self.b.pool.explain(&self.a.pool.explain(error))
    }

    /// Runs the same program on a, the server, and on b. Both must end well.
    fn works(&self, program: &str) -> Check {
        let both = self.a.pair_with(("a", program), &self.b, ("b", &format!("{program} 10.0.0.1")))?;
        both_end_well(both).map_err(|e| self.explain(&format!("{program}: {e}")))
    }
}

pub(super) fn tests(t: &mut Tests, hosts: &Shared<[Vfs; 2]>) {
    t.on_mut(hosts, "VFs of two hosts, long: pingpongs, perftest and connections by address", |hosts| {
        let two = Two::start(hosts)?;
        for kind in ["rc", "uc", "ud", "srq"] {
            two.works(&format!("ibv_{kind}_pingpong -n 20 -g 0"))?;
        }
        for program in ["ib_write_bw", "ib_read_bw", "ib_send_bw", "ib_atomic_lat"] {
            two.works(&format!("{program} -F -n 20"))?;
            two.works(&format!("{program} -F -n 20 -R"))?;
        }
        let both = two.a.pair_with(("a", "rping -s -C 3 -a 10.0.0.1"), &two.b, ("b", "rping -c -C 3 -a 10.0.0.1"))?;
        both_end_well(both).map_err(|e| two.explain(&e))?;
        // The software RNICs had nothing of it.
        for (layer, vrnic) in [(&two.a, "a"), (&two.b, "b")] {
            let shown = layer.pool.must(&format!("vrnic show {vrnic}"))?;
            require(shown.lines().any(|l| l.starts_with("sent ") && l.contains(" 0 requests")), shown)?;
        }
        Ok(())
    });
    t.on_mut(hosts, "VFs of two hosts, long: a VF and a software RNIC do not reach each other", |hosts| {
        let two = Two::start(hosts)?;
        let program = "ibv_rc_pingpong -n 20 -g 0";
        let (server, client) = two.b.pair_with(("s", program), &two.a, ("a", &format!("{program} 10.0.0.3")))?;
        let text = format!("{}\n{}", server.text, client.text);
        let is_refused = !client.ok() && !server.ok() && client.text.contains("Failed to modify QP to RTR");
        require(is_refused, two.explain(&text))
    });
}
