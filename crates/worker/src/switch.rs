//! The Ethernet switch for the interfaces of containers and virtual machines: it passes frames to vRNICs of the same
//! group on this host and, through the tunnel, on others.
//!
//! A container's interface is a descriptor that reads and writes whole frames (a tap, or a packet socket on one end of
//! a veth pair). A virtual machine's interface is a virtio device of this process. A frame is dropped if it has other
//! addresses than its vRNIC (`anti_spoof`), or if it comes from another host and claims addresses of a vRNIC here.

use std::collections::HashMap;
use std::io;
use std::mem::MaybeUninit;
use std::net::IpAddr;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use rustix::event::{EventfdFlags, epoll};
use unirdma_confine::{self as confine, Kind};
use unirdma_device::{NetDevice, lock};
use unirdma_formats::frame::{Claims, Heading};
use unirdma_ipc::counters::{SealInfo, TunnelDrops};
use unirdma_ipc::network::{Changes, Plan};
use unirdma_ipc::secrets::GroupSecrets;
use unirdma_rnic::Sealed;

use crate::anti_spoof::Guard;
use crate::engine::Engine;
use crate::rule_filter::{End, Filter};
use crate::tunnel::{Tunnel, Tunneled};

/// How frames get to an interface.
enum Route {
    Container(OwnedFd),
    Machine(Arc<NetDevice>),
}

impl Route {
    /// Reads the next frame into `frame`, if there is one; returns its length.
    ///
    /// # Errors
    /// The interface is gone.
    fn receive(&self, frame: &mut [u8]) -> Result<Option<usize>, ()> {
        use rustix::io::Errno;
        match self {
            Route::Machine(m) => Ok(m.receive(frame)),
            Route::Container(fd) => match rustix::io::read(fd, frame) {
                Ok(n) if n >= ETH_HEADER => Ok(Some(n)),
                Ok(_) | Err(Errno::AGAIN | Errno::INTR | Errno::NETDOWN) => Ok(None),
                Err(_) => Err(()),
            },
        }
    }

    /// Sends a frame. A full queue drops it, as a wire would.
    fn send(&self, frame: &[u8]) {
        match self {
            Route::Machine(m) => m.send(frame),
            Route::Container(fd) => _ = rustix::io::write(fd, frame),
        }
    }
}

struct Port {
    way: Route,
    group: u32,
    guard: Arc<Guard>,
    /// The link is up: frames pass, both ways.
    up: AtomicBool,
}

/// The switch, whose thread runs until [`Switch::stop`].
#[derive(Clone)]
pub struct Switch {
    ports: Arc<Mutex<HashMap<u64, Arc<Port>>>>,
    /// Filters of the groups that rules concern.
    filters: Arc<Mutex<HashMap<u32, Arc<Filter>>>>,
    epoll: Arc<OwnedFd>,
    tunnel: Option<Arc<Tunnel>>,
    engine: Arc<Engine>,
    stop: Arc<OwnedFd>,
}

const ETH_HEADER: usize = 14;
/// Longest frame, bytes.
const MAX_FRAME: usize = 65_536;
/// Most frames from one port, and copies of them, before the others get a turn. A broadcast frame counts one copy for
/// each member.
const BURST: usize = 64;
/// Most turns for the frames that are left when an interface is removed. A tap keeps 500 frames.
const LAST_TURNS: u32 = 16;
/// Token of the tunnel's first socket; interfaces have smaller tokens.
const TUNNEL: u64 = 1 << 63;
/// Token of the eventfd that stops the thread.
const STOP: u64 = u64::MAX;
/// Token of the tunnel's timer.
const TIMER: u64 = u64::MAX - 1;

impl Switch {
    /// Starts the switch. `tunnel` leads to other hosts; `engine` gets the datagrams that arrive through it.
    ///
    /// # Errors
    /// Errors of epoll and thread creation.
    pub fn start(tunnel: Option<Tunnel>, engine: Arc<Engine>) -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        for (i, socket) in tunnel.iter().flat_map(Tunnel::sockets).enumerate() {
            epoll::add(&epoll, socket, epoll::EventData::new_u64(TUNNEL + i as u64), epoll::EventFlags::IN)?;
        }
        if let Some(t) = &tunnel {
            epoll::add(&epoll, t.timer(), epoll::EventData::new_u64(TIMER), epoll::EventFlags::IN)?;
        }
        let stop = rustix::event::eventfd(0, EventfdFlags::CLOEXEC)?;
        epoll::add(&epoll, &stop, epoll::EventData::new_u64(STOP), epoll::EventFlags::IN)?;
        let (epoll, stop, tunnel) = (Arc::new(epoll), Arc::new(stop), tunnel.map(Arc::new));
        let s = Switch { ports: Arc::default(), filters: Arc::default(), epoll, tunnel, engine, stop };
        let me = s.clone();
        std::thread::Builder::new().name("switch".into()).spawn(move || {
            confine::thread(Kind::Switch);
            me.run();
        })?;
        Ok(s)
    }

    /// Ends its thread.
    pub fn stop(&self) {
        let _ = rustix::io::write(&*self.stop, &1u64.to_ne_bytes());
    }

    /// Adds the interface of a vRNIC under `id`. `up`: its link is up.
    ///
    /// # Errors
    /// The descriptor cannot be polled.
    pub fn add(&self, id: u64, fd: OwnedFd, group: u32, guard: Arc<Guard>, up: bool) -> io::Result<()> {
        rustix::fs::fcntl_setfl(&fd, rustix::fs::OFlags::NONBLOCK)?;
        let mut ports = lock(&self.ports);
        epoll::add(&*self.epoll, &fd, epoll::EventData::new_u64(id), epoll::EventFlags::IN)?;
        ports.insert(id, Arc::new(Port { way: Route::Container(fd), group, guard, up: up.into() }));
        Ok(())
    }

    /// Adds the interface of a virtual machine under `id`; see [`Switch::add`].
    pub fn add_machine(&self, id: u64, device: Arc<NetDevice>, group: u32, guard: Arc<Guard>, up: bool) {
        let port = Port { way: Route::Machine(device), group, guard, up: up.into() };
        lock(&self.ports).insert(id, Arc::new(port));
    }

    /// Watches the edge-triggered descriptor by which a virtual machine announces frames.
    ///
    /// # Errors
    /// The descriptor cannot be polled.
    pub fn watch(&self, id: u64, kick: BorrowedFd<'_>) -> io::Result<()> {
        let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
        Ok(epoll::add(&*self.epoll, kick, epoll::EventData::new_u64(id), flags)?)
    }

    /// Stops watching such a descriptor.
    pub fn unwatch(&self, kick: BorrowedFd<'_>) {
        let _ = epoll::delete(&*self.epoll, kick);
    }

    /// Sets the link of an interface up or down.
    pub fn set_link(&self, id: u64, up: bool) {
        if let Some(p) = lock(&self.ports).get(&id) {
            p.up.store(up, Ordering::Relaxed);
        }
    }

    /// Removes an interface. Frames that it has sent before are passed on, because a program that has ended does not
    /// repeat its last ones.
    pub fn remove(&self, id: u64) {
        let Some(port) = lock(&self.ports).remove(&id) else { return };
        let Route::Container(fd) = &port.way else { return };
        let _ = epoll::delete(&*self.epoll, fd);
        let mut frame = vec![0; MAX_FRAME];
        (0..LAST_TURNS).any(|_| !self.turn(id, &port, &mut frame));
    }

    fn run(&self) {
        let mut frame = vec![0; MAX_FRAME];
        let mut events = [MaybeUninit::<epoll::Event>::uninit(); 64];
        // Machines that had more frames than a turn allows. No event will announce these frames again.
        let mut more: Vec<u64> = Vec::new();
        let now = rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 };
        loop {
            self.engine.liveness().switch.rest();
            let limit = (!more.is_empty()).then_some(&now);
            let mut ready: Vec<u64> = match epoll::wait(&*self.epoll, &mut events, limit) {
                Ok((ready, _)) => ready.iter().map(|e| e.data.u64()).collect(),
                Err(_) => continue,
            };
            more.retain(|id| !ready.contains(id));
            ready.append(&mut more);
            self.engine.liveness().switch.begin();
            for id in ready {
                if id == STOP {
                    return;
                }
                if let (TIMER, Some(t)) = (id, &self.tunnel) {
                    t.on_timer();
                    continue;
                }
                if let (Some(socket), Some(t)) = (id.checked_sub(TUNNEL), &self.tunnel) {
                    self.tunnel_turn(t, socket as usize, &mut frame);
                    continue;
                }
                let Some(port) = lock(&self.ports).get(&id).cloned() else { continue };
                if self.turn(id, &port, &mut frame) && matches!(port.way, Route::Machine(_)) {
                    more.push(id);
                }
            }
        }
    }

    /// Handles packets that have arrived by a socket of the tunnel, as many as a turn allows. Datagrams go to the RNIC.
    fn tunnel_turn(&self, t: &Tunnel, socket: usize, room: &mut [u8]) {
        for _ in 0..BURST {
            match t.receive(socket, room) {
                None => break,
                Some(Tunneled::Nothing) => {}
                Some(Tunneled::Frame { group, source, frame }) => {
                    if self.claims_ours(group, frame) {
                        t.drop_claim();
                    } else {
                        self.arrive(group, source, frame);
                    }
                }
                Some(Tunneled::Datagram { from, group, source, packet }) => {
                    self.engine.datagram(from, group, source, packet);
                }
            }
        }
    }

    /// Passes on frames that have arrived by a port, as many as a turn allows; true if there may be more.
    fn turn(&self, id: u64, port: &Port, frame: &mut [u8]) -> bool {
        let mut left = BURST;
        while left > 0 {
            match port.way.receive(frame) {
                Ok(Some(n)) => left = left.saturating_sub(1 + self.forward(id, port, &frame[..n])),
                Ok(None) => return false,
                // The interface is gone with its container.
                Err(()) => {
                    self.remove(id);
                    return false;
                }
            }
        }
        true
    }

    /// Passes on a frame; returns the number of copies.
    fn forward(&self, id: u64, port: &Port, frame: &[u8]) -> usize {
        if !port.up.load(Ordering::Relaxed) || frame.len() < ETH_HEADER || !port.guard.passes(frame) {
            return 0;
        }
        let filter = lock(&self.filters).get(&port.group).cloned();
        if let Some(filter) = filter {
            return self.forward_by_rules(&filter, id, port, frame);
        }
        let copies = self.deliver(Some(id), port.group, frame, |_| true);
        if let Some(t) = self.tunnel.as_ref().filter(|_| !is_for_one(frame, copies)) {
            t.send(port.group, frame);
        }
        copies
    }

    /// Passes on a frame of a group that rules concern; returns the number of copies.
    fn forward_by_rules(&self, filter: &Filter, id: u64, port: &Port, frame: &[u8]) -> usize {
        // A frame that cannot be parsed is allowed to no destination.
        let Some(h) = Heading::read(frame) else {
            port.guard.count_ruled_out();
            return 0;
        };
        let (own, now) = (port.guard.addresses(), Instant::now());
        let from = End { group: None, addresses: &own };
        let to =
            End { group: filter.other_group(h.to).filter(|_| !self.is_here(port.group, h.to)), addresses: &[h.to] };
        let mut copies = 0;
        if to.group.is_none() {
            let may = |p: &Port| {
                let to = End { group: None, addresses: &p.guard.addresses() };
                let may = filter.passes(&h, from, to, now);
                if !may {
                    port.guard.count_ruled_out();
                }
                may
            };
            copies = self.deliver(Some(id), port.group, frame, may);
        }
        let Some(t) = self.tunnel.as_ref().filter(|_| !is_for_one(frame, copies)) else { return copies };
        // For a multicast packet, the receiving hosts apply the rules for each of their members.
        match to.group {
            _ if !h.to.is_multicast() && !filter.passes(&h, from, to, now) => port.guard.count_ruled_out(),
            Some(_) => t.send_across(port.group, h.to, frame),
            None => t.send(port.group, frame),
        }
        copies
    }

    /// Handles a frame that has arrived through the tunnel for a group. `source` is the number of its sender's group if
    /// that is another one.
    fn arrive(&self, group: u32, source: Option<u32>, frame: &[u8]) {
        let filter = lock(&self.filters).get(&group).cloned();
        let Some(filter) = filter else {
            if source.is_none() {
                self.deliver(None, group, frame, |_| true);
            }
            return;
        };
        let Some(h) = Heading::read(frame) else { return };
        let (from, now) = (h.from.map(|a| [a]), Instant::now());
        let from = End { group: source, addresses: from.as_ref().map_or(&[], |a| a) };
        self.deliver(None, group, frame, |p| {
            let may = filter.passes(&h, from, End { group: None, addresses: &p.guard.addresses() }, now);
            if !may {
                p.guard.count_ruled_out();
            }
            may
        });
    }

    /// True if an interface here has this address.
    fn is_here(&self, group: u32, address: IpAddr) -> bool {
        lock(&self.ports).values().any(|p| p.group == group && p.guard.has(address))
    }

    /// Delivers a frame to the vRNICs of this host that have its destination address, if the link is up and `may`
    /// allows it. Returns the number of such vRNICs, whether or not they got the frame.
    fn deliver(&self, from: Option<u64>, group: u32, frame: &[u8], may: impl Fn(&Port) -> bool) -> usize {
        let to_all = frame[0] & 1 != 0;
        let mut copies = 0;
        for (&id, p) in lock(&self.ports).iter() {
            if Some(id) != from && p.group == group && (to_all || frame[..6] == p.guard.mac().0) {
                if p.up.load(Ordering::Relaxed) && may(p) {
                    p.way.send(frame);
                }
                copies += 1;
            }
        }
        copies
    }

    /// True if a frame from another host claims an address of an interface here.
    fn claims_ours(&self, group: u32, frame: &[u8]) -> bool {
        let told = Claims::read(frame).ok().and_then(|c| c.located);
        let ports = lock(&self.ports);
        let mut members = ports.values().filter(|p| p.group == group);
        members.any(|p| frame[6..12] == p.guard.mac().0 || told.is_some_and(|a| p.guard.has(a)))
    }

    /// Counters of packets that the tunnel has dropped.
    pub fn tunnel_drops(&self) -> TunnelDrops {
        self.tunnel.as_ref().map(|t| t.drops()).unwrap_or_default()
    }

    /// The packets to other hosts that are sealed.
    pub fn sealed(&self) -> Sealed {
        self.tunnel.as_ref().map(|t| t.sealed()).unwrap_or_default()
    }

    /// Sets the group's secrets in the tunnel. True if there is a tunnel.
    pub fn set_secrets(&self, secrets: GroupSecrets) -> bool {
        self.tunnel.as_ref().map(|t| t.set_secrets(secrets)).is_some()
    }

    /// State of the group's secrets.
    pub fn seal_info(&self) -> SealInfo {
        self.tunnel.as_ref().map(|t| t.seal_info()).unwrap_or_default()
    }

    /// Sets the rules, the places of the group's members and of joined groups' members, and the hosts that agree about
    /// the groups' numbers.
    pub fn set_plan(&self, group: u32, plan: Plan) {
        let Plan { members, agreed, joined, rules, .. } = plan;
        let ruled = !(rules.is_empty() && joined.is_empty());
        let others = joined.iter().flat_map(|j| j.members.places.keys().map(|&a| (a, j.members.vni)));
        let filter = ruled.then(|| Arc::new(Filter::new(members.vni, &rules, others)));
        match filter {
            Some(filter) => _ = lock(&self.filters).insert(group, filter),
            None => _ = lock(&self.filters).remove(&group),
        }
        if let Some(t) = &self.tunnel {
            t.set_plan(group, members, agreed, joined);
        }
    }

    /// Applies changes to the plan.
    pub fn change_plan(&self, group: u32, changes: &Changes) {
        let filter = lock(&self.filters).get(&group).cloned();
        if filter.as_ref().map_or(changes.rules.is_some(), |f| f.is_concerned(changes)) {
            match Filter::after(filter.as_deref(), changes) {
                Some(filter) => _ = lock(&self.filters).insert(group, Arc::new(filter)),
                None => _ = lock(&self.filters).remove(&group),
            }
        }
        if let Some(t) = &self.tunnel {
            t.change_plan(group, changes);
        }
    }
}

/// True if a frame, of which `copies` copies were made, has no further destinations.
fn is_for_one(frame: &[u8], copies: usize) -> bool {
    frame[0] & 1 == 0 && copies > 0
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
    use unirdma_formats::Mac;
    use unirdma_ipc::config::EngineConfig;
    use unirdma_ipc::vrnic::{Hardware, IpNet};

    /// An interface: its other end, and its guard.
    fn plug(s: &Switch, id: u64, address: &str) -> (OwnedFd, Arc<Guard>) {
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        rustix::fs::fcntl_setfl(&ours, rustix::fs::OFlags::NONBLOCK).unwrap();
        let ips: [IpNet; 1] = [address.parse().unwrap()];
        let guard = Arc::new(Guard::new(Hardware::derived("default", &ips).mac, &ips, false));
        s.add(id, theirs, 0, guard.clone(), true).unwrap();
        (ours, guard)
    }

    /// A broadcast ARP answer: `sender` is at the guard's MAC.
    fn answer(guard: &Guard, sender: u8) -> Vec<u8> {
        let mac = guard.mac().0;
        [&[0xff; 6][..], &mac, &[8, 6, 0, 1, 8, 0, 6, 4, 0, 2], &mac, &[10, 0, 0, sender], &[0; 10]].concat()
    }

    /// A switch whose thread has ended, so that it takes no frames by itself.
    fn without_thread() -> (Arc<Engine>, Switch) {
        let engine = Engine::start(&EngineConfig::default(), None).unwrap();
        let s = Switch::start(None, engine.clone()).unwrap();
        s.stop();
        while Arc::strong_count(&s.stop) > 1 {
            std::thread::yield_now();
        }
        (engine, s)
    }

    fn next(fd: &OwnedFd) -> Option<Vec<u8>> {
        let mut frame = vec![0; 2000];
        for _ in 0..2000 {
            if let Ok(n) = rustix::io::read(fd, &mut frame[..]) {
                return Some(frame[..n].to_vec());
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        None
    }

    /// A broadcast frame costs one copy for each member, so a port's turn has fewer of them.
    #[test]
    fn a_turn_has_fewer_frames_if_they_go_to_all() {
        let (engine, s) = without_thread();
        let members: Vec<_> = (2..5).map(|i| plug(&s, i, &format!("10.0.0.{i}"))).collect();
        let (evil, guard) = plug(&s, 1, "10.0.0.1");
        let port = lock(&s.ports)[&1].clone();
        let to_all = answer(&guard, 1);
        let to_one = [&members[0].1.mac().0[..], &to_all[6..]].concat();
        let stolen = answer(&guard, 9);
        for (frame, a_turn) in [(to_all, BURST / 4), (to_one, BURST / 2), (stolen, BURST)] {
            for _ in 0..a_turn + 1 {
                assert_eq!(rustix::io::write(&evil, &frame), Ok(frame.len()));
            }
            let mut room = vec![0; MAX_FRAME];
            assert!(s.turn(1, &port, &mut room), "one is left");
            assert_eq!(port.way.receive(&mut room), Ok(Some(frame.len())));
            assert!(!s.turn(1, &port, &mut room), "and no other");
            for (fd, _) in &members {
                while rustix::io::read(fd, &mut room[..]).is_ok() {}
            }
        }
        engine.stop();
    }

    #[test]
    fn the_last_frames_of_an_interface_are_passed_on() {
        let (engine, s) = without_thread();
        let [(a, guard), (b, _)] = [(1, "10.0.0.1"), (2, "10.0.0.2")].map(|(id, ip)| plug(&s, id, ip));
        let last = answer(&guard, 1);
        assert_eq!(rustix::io::write(&a, &last), Ok(last.len()));
        s.remove(1);
        assert_eq!(next(&b), Some(last));
        engine.stop();
    }

    #[test]
    fn an_answer_with_anothers_address_reaches_nobody_unless_its_sender_is_a_router() {
        let engine = Engine::start(&EngineConfig::default(), None).unwrap();
        let s = Switch::start(None, engine.clone()).unwrap();
        let [(a, _), (_b, _), (evil, guard)] =
            [(1, "10.0.0.1"), (2, "10.0.0.2"), (3, "10.0.0.3")].map(|(id, ip)| plug(&s, id, ip));
        let (stolen, own) = (answer(&guard, 2), answer(&guard, 3));
        let send = |frame: &[u8]| assert_eq!(rustix::io::write(&evil, frame), Ok(frame.len()));
        send(&stolen);
        send(&own);
        // Frames keep their order, so the first one was dropped.
        assert_eq!(next(&a), Some(own));
        assert_eq!(guard.drops().neighbour, 1);
        // A frame from a peer host may not claim an address of an interface here.
        assert!(s.claims_ours(0, &answer(&guard, 2)) && !s.claims_ours(1, &answer(&guard, 2)));
        let elsewhere = Guard::new(Mac([2, 0, 10, 0, 0, 9]), &[], false);
        assert!(s.claims_ours(0, &answer(&elsewhere, 2)) && !s.claims_ours(0, &answer(&elsewhere, 9)));
        guard.set_allow_spoof(true);
        send(&stolen);
        assert_eq!(next(&a), Some(stolen));
        engine.stop();
    }
}
