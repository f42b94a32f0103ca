//! The server over real sockets, with a kernel that is data and a stand-in for opening device nodes.

use std::collections::BTreeSet;
use std::os::fd::BorrowedFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, bind, connect, listen, socket_with};
use unirdma_abi::lease::{EVICTED, HAS, REFUSED, SOFT, SYSFS, WAITS};
use unirdma_formats::Gid;
use unirdma_rnic::Share;
use unirdma_vf::{
    ARP_IGNORE, Address, Config, Dry, Isolation, NetdevSeen, PfConfig, PfSeen, Seen, Setting, Step, VerbsSeen, VfId,
    VfSeen, states,
};

use super::super::Pool;
use super::super::tree::tests::Temporary;
use super::*;
use crate::admin::VfAnswers;

const PF: &str = "lo";
const VLAN: u16 = 100;

/// A host with a pool, its lender, and a kernel that does what the plan says.
struct Host {
    tree: Temporary,
    config: Config,
    pool: Arc<Pool>,
    lender: Arc<Lender>,
    seen: Arc<Mutex<Seen>>,
    /// Everything that the workers are told, in order.
    told: Arc<Mutex<Vec<String>>>,
    /// Workers answer.
    workers_answer: Arc<AtomicBool>,
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Host {
    fn new(vfs: u16, when_dry: Dry) -> Host {
        let tree = Temporary::new().with_pf(1);
        let class = tree.0.sys.join("class/infiniband_verbs");
        for index in 0..vfs {
            tree.write(&class.join(format!("uverbs{index}/ibdev")), &format!("mlx5_{index}\n"));
            tree.write(&class.join(format!("uverbs{index}/dev")), &format!("231:{}\n", 192 + index));
        }
        std::fs::create_dir_all(tree.0.sys.parent().unwrap().join("vrnics")).unwrap();
        let addresses = vec![Address { addr: [10, 50, 0, 10].into(), prefix: 24 }];
        let pfs = vec![PfConfig { netdev: PF.into(), vfs, isolation: Isolation::Vlan, addresses, rxe: false }];
        let config = Config { pfs, when_dry, linger: Duration::ZERO };
        let seen = Seen { pfs: [(PF.to_owned(), pf(vfs, &config))].into(), ..Seen::default() };
        Host::start(tree, config, seen)
    }

    fn start(tree: Temporary, config: Config, seen: Seen) -> Host {
        let (pool, _) = Pool::open_at(config.clone(), tree.0.sys.parent().unwrap(), tree.0.clone()).unwrap();
        let lender = Arc::new(Lender::new(Some(pool.clone()), tree.0.sys.parent().unwrap()).unwrap());
        let mut host = Host {
            tree,
            config,
            pool,
            lender,
            seen: Arc::new(Mutex::new(seen)),
            told: Arc::default(),
            workers_answer: Arc::new(AtomicBool::new(true)),
            stop: Arc::default(),
            threads: Vec::new(),
        };
        settle(&host.pool, &host.seen);
        host.serve();
        host
    }

    fn serve(&mut self) {
        let (told, lender, answer) = (self.told.clone(), self.lender.clone(), self.workers_answer.clone());
        let tell = move |vrnic: String, done: Box<dyn FnOnce() + Send>| {
            let has = lender.vf_use(&vrnic).vf.map_or("nothing".into(), |vf| Gid(vf.gid).to_string());
            lock(&told).push(format!("{vrnic} has {has}"));
            let answer = answer.clone();
            std::thread::spawn(move || {
                while !answer.load(Ordering::SeqCst) {
                    std::thread::sleep(Duration::from_millis(5));
                }
                done();
            });
        };
        let open = |_: &Node| Ok(std::fs::File::open("/dev/null")?.into());
        let server = LeaseServer::with(self.lender.clone(), self.tree.0.clone(), Box::new(tell), Box::new(open));
        self.threads.push(std::thread::spawn(move || server.run()));
        let (pool, seen, stop) = (self.pool.clone(), self.seen.clone(), self.stop.clone());
        self.threads.push(std::thread::spawn(move || {
            while !stop.load(Ordering::SeqCst) {
                settle(&pool, &seen);
                std::thread::sleep(Duration::from_millis(10));
            }
        }));
    }

    /// Ends the threads, and nothing else.
    fn end(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        self.lender.stop();
        self.threads.drain(..).for_each(|t| t.join().unwrap());
    }

    /// The next supervisor, on the same kernel and with the same log.
    fn restart(self) -> Host {
        let Host { ref tree, ref config, ref seen, .. } = self;
        let (roots, config, seen) = (tree.0.clone(), config.clone(), lock(seen).clone());
        // The directory stays.
        std::mem::ManuallyDrop::new(self).end();
        Host::start(Temporary(roots), config, seen)
    }

    fn vrnics(&self) -> PathBuf {
        self.lender.vrnics.clone()
    }

    /// A vRNIC whose programs may ask.
    fn add(&self, name: &str, way: Way) {
        self.add_with(name, |b| b.way = way);
    }

    fn add_with(&self, name: &str, change: impl FnOnce(&mut Borrower)) {
        let dir = self.vrnics().join(name);
        std::fs::create_dir_all(&dir).unwrap();
        let path = dir.join(lease::SOCKET);
        let _ = std::fs::remove_file(&path);
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let listener = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        bind(&listener, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        listen(&listener, 64).unwrap();
        let mut borrower = Borrower {
            way: Way::Vf,
            instance: name.into(),
            group: "blue".into(),
            vlan: VLAN,
            is_sealed: false,
            share: Share::default(),
            max_programs: 4,
        };
        change(&mut borrower);
        self.lender.add(name, borrower, listener);
    }

    fn connect(&self, name: &str) -> Program {
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        set_socket_timeout(&socket, Timeout::Recv, Some(Duration::from_secs(5))).unwrap();
        let path = self.vrnics().join(name).join(lease::SOCKET);
        connect(&socket, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        Program(socket)
    }

    /// A program that has asked.
    fn ask(&self, name: &str) -> Program {
        let program = self.connect(name);
        program.send(&[1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        program
    }

    fn vf(&self, index: u16, change: impl FnOnce(&mut VfSeen)) {
        change(lock(&self.seen).pfs.get_mut(PF).unwrap().vfs.get_mut(&index).unwrap());
    }

    fn states(&self) -> Vec<String> {
        let state = lock(&self.pool.state);
        states(&self.config, &state.seen, &state.leases)
            .into_iter()
            .map(|(_, s)| super::super::kind(&s).into())
            .collect()
    }

    fn shows(&self, vrnic: &str) -> bool {
        self.vrnics().join(vrnic).join(SYSFS).join("infiniband_verbs").exists()
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.end();
    }
}

/// Waits for a condition.
fn until(what: &str, mut is_true: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is_true() {
        assert!(began.elapsed() < Duration::from_secs(5), "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn pf(vfs: u16, config: &Config) -> PfSeen {
    let vf = |index| {
        let mac = config.pfs[0].mac_of(index);
        let netdev = NetdevSeen { name: format!("v{index}"), mac, mtu: 1500, ..NetdevSeen::default() };
        let verbs = VerbsSeen { name: format!("mlx5_{index}"), mode: 0o666, active: true };
        let driver = Some("mlx5_core".into());
        VfSeen { driver, netdev: Some(netdev), verbs: Some(verbs), ..VfSeen::default() }
    };
    let vfs = (0..vfs).map(|index| (index, vf(index))).collect::<BTreeMap<_, _>>();
    PfSeen { numvfs: vfs.len() as u16, totalvfs: 8, vfs, ..PfSeen::default() }
}

/// Looks, and does what the plan says, until nothing is left.
fn settle(pool: &Pool, seen: &Mutex<Seen>) {
    for _ in 0..8 {
        let mut seen = lock(seen);
        seen.at = pool.began.elapsed();
        let (plan, ..) = pool.observe(seen.clone());
        if plan.steps.is_empty() {
            return;
        }
        for step in plan.steps {
            let vf = vf_of(&step).cloned();
            let vf = vf.and_then(|id| seen.pfs.get_mut(&id.pf)?.vfs.get_mut(&id.index));
            match (step, vf) {
                (Step::Set { what, .. }, Some(vf)) => match what {
                    Setting::Mac(mac) => vf.settings.mac = mac,
                    Setting::Vlan(vlan) => vf.settings.vlan = vlan,
                    Setting::RateMbps(rate) => vf.settings.rate_mbps = rate,
                    Setting::SpoofCheck(on) => vf.settings.spoof_check = on,
                    Setting::Trust(on) => vf.settings.trust = on,
                },
                (Step::Netdev { addresses, neighbours, .. }, Some(VfSeen { netdev: Some(n), .. })) => {
                    (n.up, n.accept_local, n.rp_filter, n.arp_ignore) = (true, true, 0, ARP_IGNORE);
                    n.addresses.extend(addresses);
                    n.neighbours.extend(neighbours);
                }
                (Step::NodeMode { mode, .. }, Some(VfSeen { verbs: Some(v), .. })) => v.mode = mode,
                (Step::Evict { lease }, _) => pool.evict(lease),
                (step, _) => panic!("{step:?}"),
            }
        }
    }
}

fn vf_of(step: &Step) -> Option<&VfId> {
    super::super::apply::vf_of(step)
}

/// A program's end of a connection.
struct Program(OwnedFd);

/// A message to a program.
#[derive(Debug, PartialEq, Eq)]
struct Heard {
    kind: u32,
    place: u32,
    text: String,
    descriptors: usize,
}

impl Program {
    fn send(&self, bytes: &[u8]) {
        let none: [BorrowedFd<'_>; 0] = [];
        let _ = fdpass::send(self.0.as_fd(), bytes, &none);
    }

    /// The next message; `None` at the end of the connection.
    fn next(&self) -> Option<(Told, usize)> {
        let mut told = Told::new_zeroed();
        let (n, fds) = fdpass::receive(self.0.as_fd(), told.as_mut_bytes()).expect("a message");
        (n > 0).then(|| {
            assert_eq!(n, 256);
            (told, fds.len())
        })
    }

    fn hear(&self) -> Heard {
        let (told, descriptors) = self.next().expect("no end");
        Heard { kind: told.kind, place: told.place, text: text(&told.text), descriptors }
    }

    fn kind(&self) -> u32 {
        self.hear().kind
    }

    fn has_ended(&self) -> bool {
        self.next().is_none()
    }
}

fn text(field: &[u8]) -> String {
    let end = field.iter().position(|b| *b == 0).expect("a zero byte");
    String::from_utf8(field[..end].to_vec()).unwrap()
}

#[test]
fn a_program_gets_a_vf_that_is_set_up_and_that_the_worker_knows() {
    let host = Host::new(2, Dry::Refuse);
    host.add("a", Way::Vf);
    host.workers_answer.store(false, Ordering::SeqCst);
    let first = host.ask("a");
    until("the worker is told", || lock(&host.told).len() == 1);
    assert_eq!(lock(&host.told)[0], "a has ::ffff:10.50.0.10");
    std::thread::sleep(Duration::from_millis(50));
    assert!(!host.shows("a"), "before the worker has answered");
    host.workers_answer.store(true, Ordering::SeqCst);
    let (told, descriptors) = first.next().unwrap();
    assert_eq!(
        (told.kind, descriptors, text(&told.node), text(&told.device)),
        (HAS, 1, "uverbs0".into(), "mlx5_0".into())
    );
    assert_eq!((Gid(told.gid).to_string(), told.rdev), ("::ffff:10.50.0.10".into(), rustix::fs::makedev(231, 192)));
    assert!(host.shows("a"));
    assert_eq!(lock(&host.seen).pfs[PF].vfs[&0].settings.vlan, VLAN);
    let way = host.lender.way("a");
    assert_eq!((way.in_force, way.vf.as_deref(), way.contexts), (Way::Vf, Some("lo/0"), 1));
    // Another context of the vRNIC has the same VF, without anything new.
    let second = host.ask("a");
    assert_eq!((second.hear().descriptors, lock(&host.told).len()), (1, 1));
    drop(first);
    until("one context is left", || host.lender.way("a").contexts == 1);
    assert!(host.shows("a"));
    drop(second);
    until("the worker is told", || lock(&host.told).last().is_some_and(|t| t == "a has nothing"));
    until("the VF is free again", || host.states() == ["ready", "ready"]);
    until("nothing is shown", || !host.shows("a"));
    assert_eq!(lock(&host.seen).pfs[PF].vfs[&0].settings.vlan, 0);
}

#[test]
fn a_vrnic_of_another_instance_or_group_has_another_vf() {
    let host = Host::new(2, Dry::Refuse);
    for (name, instance, group, vlan) in
        [("a", "one", "blue", VLAN), ("b", "one", "blue", VLAN), ("c", "two", "blue", VLAN), ("d", "three", "red", 7)]
    {
        host.add_with(name, |b| (b.instance, b.group, b.vlan) = (instance.into(), group.into(), vlan));
    }
    let programs: Vec<(u32, String)> = ["a", "b", "c", "d"]
        .map(|name| host.ask(name))
        .iter()
        .map(|p| p.next().map(|(told, _)| (told.kind, text(&told.device))).unwrap())
        .collect();
    let has = |device: &str| (HAS, device.to_owned());
    assert_eq!(programs[..3], [has("mlx5_0"), has("mlx5_0"), has("mlx5_1")]);
    assert_eq!(programs[3], (REFUSED, String::new()));
}

#[test]
fn programs_wait_in_order() {
    let host = Host::new(1, Dry::Wait(Duration::from_secs(60)));
    ["a", "b", "c", "d"].iter().for_each(|name| host.add(name, Way::Vf));
    let a = host.ask("a");
    assert_eq!(a.kind(), HAS);
    let waits = |p: &Program, place| {
        assert_eq!(p.hear(), Heard { kind: WAITS, place, text: String::new(), descriptors: 0 });
    };
    let b = host.ask("b");
    waits(&b, 1);
    let c = host.ask("c");
    waits(&c, 2);
    let d = host.ask("d");
    waits(&d, 3);
    // One hangs up while it waits.
    drop(c);
    waits(&d, 2);
    drop(a);
    assert_eq!(b.kind(), HAS);
    waits(&d, 1);
    drop(b);
    assert_eq!(d.kind(), HAS);
    drop(d);
    until("the VF is free again", || host.states() == ["ready"]);
}

#[test]
fn a_program_that_has_waited_for_too_long_gets_nothing() {
    let host = Host::new(1, Dry::Wait(Duration::from_millis(100)));
    ["a", "b"].iter().for_each(|name| host.add(name, Way::Vf));
    let a = host.ask("a");
    assert_eq!(a.kind(), HAS);
    let b = host.ask("b");
    assert_eq!(b.kind(), WAITS);
    let last = b.hear();
    assert_eq!((last.kind, last.text.as_str()), (REFUSED, "no VF has become free in time"));
    assert!(b.has_ended());
}

#[test]
fn while_one_program_is_soft_the_vrnics_others_are() {
    let host = Host::new(1, Dry::Soft);
    ["a", "b"].iter().for_each(|name| host.add(name, Way::Vf));
    let a = host.ask("a");
    assert_eq!(a.kind(), HAS);
    let soft = host.ask("b");
    assert_eq!((soft.kind(), host.ask("b").kind()), (SOFT, SOFT));
    drop(a);
    until("the VF is free again", || host.states() == ["ready"]);
    assert_eq!(host.ask("b").hear().text, "another program of the vRNIC has the software RNIC");
    drop(soft);
    until("b has a VF", || host.ask("b").kind() == HAS);
}

#[test]
fn auto_is_soft_without_a_vf_and_vf_is_refused() {
    let host = Host::new(1, Dry::Refuse);
    host.add("a", Way::Auto);
    host.add("b", Way::Vf);
    host.lender.set_group("blue", 0, false);
    for (name, kind) in [("a", SOFT), ("b", REFUSED)] {
        let heard = host.ask(name).hear();
        assert!(heard.kind == kind && heard.text.starts_with("no PF serves the group `blue`"), "{heard:?}");
    }
    host.lender.set_group("blue", VLAN, true);
    until("the first program has ended", || host.ask("a").hear().text.starts_with("group blue has a secret"));
    host.lender.set_group("blue", VLAN, false);
    until("the second program has ended", || host.ask("a").kind() == HAS);
}

#[test]
fn a_vf_that_the_kernel_does_not_set_up_is_given_to_nobody() {
    let host = Host::new(1, Dry::Refuse);
    host.add("a", Way::Vf);
    host.add("b", Way::Auto);
    for (name, kind) in [("a", REFUSED), ("b", SOFT)] {
        // Refused after the lease has begun: a VF with a refusal gets none.
        let program = host.connect(name);
        let mut seen = lock(&host.seen);
        program.send(&[1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        until("there is a lease", || host.pool.loan(name).is_some());
        seen.pfs.get_mut(PF).unwrap().vfs.get_mut(&0).unwrap().refused =
            Some("VLAN 100: Operation not permitted".into());
        drop(seen);
        let heard = program.hear();
        assert_eq!(heard.text, "the kernel refuses to set up VF lo/0: VLAN 100: Operation not permitted");
        assert_eq!((heard.kind, heard.descriptors), (kind, 0));
        until("the VF is dirty", || host.states() == ["dirty"]);
        assert!(!host.shows(name));
        host.vf(0, |vf| vf.refused = None);
        until("the VF is free again", || host.states() == ["ready"]);
    }
}

#[test]
fn a_program_waits_for_the_link_of_its_vf() {
    let host = Host::new(1, Dry::Wait(Duration::from_secs(60)));
    host.add("a", Way::Vf);
    let link = |on| host.vf(0, |vf| vf.verbs.as_mut().unwrap().active = on);
    link(false);
    until("the VF has no link", || host.states() == ["raw"]);
    let first = host.ask("a");
    assert_eq!(first.kind(), WAITS);
    link(true);
    assert_eq!(first.kind(), HAS);
    // The link goes while the vRNIC has the VF: its first program keeps it, and the next one waits.
    link(false);
    let second = host.ask("a");
    until("the second program has a context", || host.lender.way("a").contexts == 2);
    assert_eq!(host.states(), ["leased"]);
    link(true);
    assert_eq!(second.kind(), HAS);
}

#[test]
fn programs_whose_vf_or_vrnic_is_gone_are_told() {
    let host = Host::new(1, Dry::Refuse);
    host.add("a", Way::Vf);
    let programs = [host.ask("a"), host.ask("a")];
    programs.iter().for_each(|p| assert_eq!(p.kind(), HAS));
    host.vf(0, |vf| vf.verbs = None);
    for p in &programs {
        let heard = p.hear();
        assert_eq!((heard.kind, heard.text.as_str()), (EVICTED, "the VF is gone"));
        assert!(p.has_ended());
    }
    until("the worker is told", || lock(&host.told).last().is_some_and(|t| t == "a has nothing"));
    host.vf(0, |vf| vf.verbs = Some(VerbsSeen { name: "mlx5_0".into(), mode: 0o600, active: true }));
    until("it is back", || host.ask("a").kind() == HAS);
    until("the VF is free again", || host.states() == ["ready"]);
    let a = host.ask("a");
    assert_eq!(a.kind(), HAS);
    host.lender.remove("a");
    assert_eq!(a.hear().text, "the vRNIC was removed");
}

#[test]
fn answers_are_counted() {
    let answers = |host: &Host| lock(&host.pool.state).answers;
    let host = Host::new(1, Dry::Refuse);
    host.add_with("a", |b| b.max_programs = 1);
    host.add("b", Way::Vf);
    host.add_with("c", |b| (b.group, b.vlan) = ("red".into(), 0));
    let a = host.ask("a");
    assert_eq!((a.kind(), host.ask("a").kind()), (HAS, REFUSED));
    assert_eq!((host.ask("b").kind(), host.ask("c").kind()), (REFUSED, REFUSED));
    host.vf(0, |vf| vf.verbs = None);
    assert_eq!(a.kind(), EVICTED);
    let expected = VfAnswers { evicted: 1, refusals: [1, 0, 1, 0, 1], ..VfAnswers::default() };
    assert_eq!(answers(&host), expected);
    let host = Host::new(1, Dry::Wait(Duration::from_millis(50)));
    ["a", "b"].iter().for_each(|name| host.add(name, Way::Vf));
    let _a = host.ask("a");
    let b = host.ask("b");
    assert_eq!((b.kind(), b.kind()), (WAITS, REFUSED));
    assert_eq!(answers(&host), VfAnswers { waits: 1, refusals: [0, 1, 0, 0, 0], ..VfAnswers::default() });
}

#[test]
fn a_hostile_program_costs_itself_only() {
    let host = Host::new(1, Dry::Refuse);
    host.add("a", Way::Vf);
    host.add("bad", Way::Vf);
    let a = host.ask("a");
    assert_eq!(a.kind(), HAS);
    // Half a request, more than one, nothing at all, and another version.
    for bytes in [&[1; 8][..], &[1; 17], &[0; 4000]] {
        let p = host.connect("bad");
        p.send(bytes);
        assert!(p.has_ended(), "{} bytes", bytes.len());
    }
    let p = host.connect("bad");
    p.send(&[2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!((p.hear().text.as_str(), p.has_ended()), ("the request has version 2, and 1 is known here", true));
    // Descriptors that nobody asked for.
    let p = host.connect("bad");
    let null = std::fs::File::open("/dev/null").unwrap();
    fdpass::send(p.0.as_fd(), &[1; 16], &[null.as_fd(), null.as_fd()]).unwrap();
    assert_eq!(p.kind(), REFUSED);
    // Connections beyond the vRNIC's limit, which is 4.
    let silent: Vec<Program> = (0..4).map(|_| host.connect("bad")).collect();
    let more = host.connect("bad");
    assert_eq!((more.kind(), more.has_ended()), (REFUSED, true));
    // Its requests are not read, and it gets the refusal all the same.
    for _ in 0..8 {
        let more = host.connect("bad");
        (0..3).for_each(|_| more.send(&[1; 16]));
        assert_eq!((more.kind(), more.has_ended()), (REFUSED, true));
    }
    drop(silent);
    // Many connections in a short time: others are served meanwhile.
    let crowd: Vec<Program> = (0..64).map(|_| host.connect("bad")).collect();
    assert_eq!(host.ask("a").kind(), HAS);
    drop(crowd);
    // A second message ends the context.
    let second = host.ask("a");
    assert_eq!(second.kind(), HAS);
    second.send(&[1]);
    assert!(second.has_ended());
    until("one context is left", || host.lender.way("a").contexts == 1);
    drop(a);
    until("the VF is free again", || host.states() == ["ready"]);
}

#[test]
fn a_vf_that_a_program_keeps_open_is_given_to_nobody() {
    let host = Host::new(1, Dry::Refuse);
    ["a", "b"].iter().for_each(|name| host.add(name, Way::Vf));
    let a = host.ask("a");
    assert_eq!(a.kind(), HAS);
    host.vf(0, |vf| vf.users = BTreeSet::from([77]));
    drop(a);
    until("the VF is dirty", || host.states() == ["dirty"]);
    assert_eq!(host.ask("b").kind(), REFUSED);
    // Nor while a descriptor waits in a socket, and belongs to no process.
    host.vf(0, |vf| (vf.users, vf.descriptors) = (BTreeSet::new(), 1));
    until("the descriptor is seen", || host.pool.info().vfs[0].state.contains("1 descriptors"));
    assert_eq!(host.ask("b").kind(), REFUSED);
    host.vf(0, |vf| vf.descriptors = 0);
    until("b has a VF", || host.ask("b").kind() == HAS);
}

#[test]
fn the_next_supervisor_keeps_a_vf_until_it_has_no_users() {
    let host = Host::new(1, Dry::Refuse);
    host.add("a", Way::Vf);
    let programs = [host.ask("a"), host.ask("a")];
    programs.iter().for_each(|p| assert_eq!(p.kind(), HAS));
    host.vf(0, |vf| vf.users = BTreeSet::from([77]));
    let host = host.restart();
    host.add("a", Way::Vf);
    host.add("b", Way::Vf);
    assert!(programs[0].has_ended(), "without a message");
    let way = host.lender.way("a");
    assert_eq!((way.vf.as_deref(), way.contexts), (Some("lo/0"), 2));
    until("the worker is told", || lock(&host.told).iter().any(|t| t == "a has ::ffff:10.50.0.10"));
    assert!(host.shows("a"), "the programs may still look");
    assert_eq!(host.ask("b").kind(), REFUSED);
    // A third program of the vRNIC, which lives longer than the two.
    let third = host.ask("a");
    assert_eq!(third.kind(), HAS);
    assert_eq!(host.lender.way("a").contexts, 3);
    host.vf(0, |vf| vf.users.clear());
    until("one context is left", || host.lender.way("a").contexts == 1);
    drop(third);
    until("b has a VF", || host.ask("b").kind() == HAS);
}

#[test]
fn texts_are_cut_between_letters() {
    let mut field = [0xff; 6];
    put(&mut field, "abc\u{e4}\u{e4}");
    assert_eq!(field[..5], *"abc\u{e4}".as_bytes());
    let mut short = [0; 5];
    put(&mut short, "abc\u{e4}");
    assert_eq!(short, *b"abc\0\0");
}
