//! A guest whose host has a network: with the container of another host, and with the Linux kernel's own RNIC.
//!
//! The guest has the address of its host, as a vRNIC that talks to plain RoCEv2 peers must. It shares no Ethernet with
//! those peers. So the guest gets an entry with an unused MAC address for the peer, and programs that first meet by TCP
//! do so over another network interface, through its host.

use harness::vm::{OURS, RXE};

use super::*;

/// Address of the other host, and of its end in the first one.
const OTHER: &str = "10.0.1.2";
const TO_OTHER: &str = "10.0.1.1";
/// The container on the other host.
const REMOTE: &str = "10.0.0.3";
/// Address by which TCP reaches the machine with the kernel's RNIC.
const RXE_TCP: &str = "10.8.0.2";

/// Programs that run at both ends.
const PROGRAMS: &[&str] = &["ibv_rc_pingpong -c -n 200", "ibv_ud_pingpong -n 50", "ib_write_bw -s 65536 -n 200"];
/// Programs that connect by address.
const BY_ADDRESS: &[(&str, &str)] = &[
    ("rping -s -C 20 -v", "rping -c -a ADDR -C 20 -V"),
    ("ib_write_bw -R -F -s 65536 -n 50", "ib_write_bw -R -F -s 65536 -n 50 ADDR"),
];

/// A machine with the kernel's RNIC, a host with a guest, and another host with a container.
struct Hosts {
    guest: Guest,
    other: Lab,
    rxe: Rxe,
    netns: String,
}

impl Hosts {
    fn start(systems: &Shared<Systems>) -> Result<Hosts> {
        let mut rxe = Rxe::boot_alone(false)?;
        let here = rxe.netns().to_string();
        let netns = format!("{here}-other");
        harness::ip(&format!("netns add {netns}"))?;
        harness::ip(&format!("link add veth0 netns {here} type veth peer name veth0 netns {netns}"))?;
        for (n, address) in [(&here, TO_OTHER), (&netns, OTHER)] {
            harness::ip(&format!("-n {n} addr add {address}/24 dev veth0"))?;
            harness::ip(&format!("-n {n} link set veth0 up"))?;
        }
        harness::ip(&format!("-n {netns} link set lo up"))?;
        harness::ip(&format!("-n {netns} route add {OURS} via {TO_OTHER}"))?;
        harness::ip(&format!("-n {here} addr add 10.8.0.1/24 dev tap0"))?;
        rxe.serve_beside(&format!("{REMOTE} default {OTHER}\n"), &[])?;
        let peers = std::env::temp_dir().join(format!("{netns}.peers"));
        std::fs::write(&peers, format!("{OURS} default {OURS}\n")).map_err(|e| e.to_string())?;
        let other = Lab::start_in(None, Some(&netns), &["--address", OTHER, "--peers", &peers.display().to_string()])?;
        other.vrnic("r", &["--ip", REMOTE])?;
        let lab = rxe.lab()?;
        let more = ["-netdev", "user,id=out", "-device", "virtio-net-pci,netdev=out,romfile="];
        let plan = Plan { netns: Some(&here), more: &more, ..Plan::default() };
        let guest = with_system(systems, |system| Guest::start(lab, system, "v", &plan))?;
        guest.must(&format!(
            "ip addr add 10.0.2.15/24 dev eth1 && ip link set eth1 up && ip route add {RXE_TCP} via 10.0.2.2 && \
             ip neigh add {RXE} lladdr 02:00:00:00:00:01 dev eth0 nud permanent"
        ))?;
        let o = rxe.run(&format!("ip addr add {RXE_TCP}/24 dev eth0"))?;
        require(o.ok(), o.text)?;
        Ok(Hosts { guest, other, rxe, netns })
    }

    fn explained(&self, f: impl Fn(&Hosts) -> Check) -> Check {
        let log = || self.rxe.lab().map(Lab::log).unwrap_or_default();
        f(self).map_err(|e| format!("{}\n{}", self.guest.explain(&e), log()))
    }

    fn container(&self) -> End<'_> {
        End::Container(Container { lab: &self.other, vrnic: "r", address: REMOTE })
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        self.other.stop_host();
        let _ = harness::ip(&format!("netns del {}", self.netns));
        let _ = std::fs::remove_file(std::env::temp_dir().join(format!("{}.peers", self.netns)));
    }
}

/// Runs a program, which is repeated if it loses packets.
fn tried(p: &str, server: End<'_>, client: End<'_>) -> Check {
    let run = || pair(server, client, p);
    if is_unreliable(p) { reruns::of_lost_packets(|| None, run) } else { run() }
}

pub(super) fn tests(t: &mut Tests, systems: &Shared<Systems>) {
    let systems = systems.clone();
    let hosts = &Shared::new(move || Hosts::start(&systems));
    let mut add = |name: String, f: Box<dyn Fn(&Hosts) -> Check + Send>| {
        t.on(hosts, name, move |hosts: &Hosts| hosts.explained(&f));
    };
    for p in PROGRAMS {
        let serves = format!("guest serves a container of another host: {p}");
        add(serves, Box::new(|h| tried(p, End::Guest(&h.guest), h.container())));
        let calls = format!("guest calls a container of another host: {p}");
        add(calls, Box::new(|h| tried(p, h.container(), End::Guest(&h.guest))));
    }
    for programs in BY_ADDRESS {
        let serves = format!("guest serves a container of another host: {}", programs.0);
        add(serves, Box::new(|h| connect(End::Guest(&h.guest), h.container(), *programs)));
        let calls = format!("guest calls a container of another host: {}", programs.0);
        add(calls, Box::new(|h| connect(h.container(), End::Guest(&h.guest), *programs)));
    }
    for p in PROGRAMS {
        let calls = format!("guest calls the kernel's rxe: {p}");
        add(calls, Box::new(|h| tried(p, End::Rxe(&h.rxe, RXE_TCP), End::Guest(&h.guest))));
    }
    for programs in BY_ADDRESS {
        let serves = format!("guest serves the kernel's rxe: {}", programs.0);
        add(serves, Box::new(|h| connect(End::Guest(&h.guest), End::Rxe(&h.rxe, RXE), *programs)));
        let calls = format!("guest calls the kernel's rxe: {}", programs.0);
        add(calls, Box::new(|h| connect(End::Rxe(&h.rxe, RXE), End::Guest(&h.guest), *programs)));
    }
}
