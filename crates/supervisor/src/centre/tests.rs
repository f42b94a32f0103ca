//! A host, with its workers as threads, and a control centre whose messages the test determines.

use unirdma_fleet::v1::hosts_server::{Hosts, HostsServer};
use unirdma_fleet::v1::{FromHost, JoinRequest, JoinResponse, ToHost, Update, from_host, item::Item, to_host};
use unirdma_ipc::config::EngineConfig;
use unirdma_ipc::vrnic::{AddVrnic, SetHeld, SetShare, Way};

use super::*;
use crate::admin::{Request, Response, StatusInfo};
use crate::{CentreConfig, Client, HostConfig, Isolation, WireConfig, serve, wait_ready};
use rcgen::{
    BasicConstraints, CertificateParams, CertificateSigningRequestParams, CertifiedIssuer, IsCa, KeyPair, SanType,
};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Instant;
use tokio::sync::mpsc::UnboundedSender;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::transport::{Certificate, Server, ServerTlsConfig};
use tonic::{Status as Refusal, Streaming};

const TOKEN: &str = "id.secret";
const PATIENCE: Duration = Duration::from_secs(20);

/// A certificate authority.
struct Authority(CertifiedIssuer<'static, KeyPair>);

impl Authority {
    fn new() -> Authority {
        let mut params = CertificateParams::new(Vec::<String>::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Authority(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    fn pin(&self) -> String {
        let hash = ring::digest::digest(&ring::digest::SHA256, self.0.der());
        hash.as_ref().iter().map(|b| format!("{b:02x}")).collect()
    }
}

/// The messages of an attached host, and the channel to it.
struct Attached {
    host: String,
    out: UnboundedSender<Result<ToHost, Refusal>>,
    said: Receiver<FromHost>,
}

struct Script {
    authority: Arc<Authority>,
    attached: Sender<Attached>,
}

#[tonic::async_trait]
impl Hosts for Script {
    async fn join(&self, request: tonic::Request<JoinRequest>) -> Result<tonic::Response<JoinResponse>, Refusal> {
        let r = request.into_inner();
        if !r.token.starts_with(TOKEN) {
            return Err(Refusal::unauthenticated("the token has expired"));
        }
        let request = CertificateSigningRequestParams::from_pem(&r.request).unwrap();
        let certificate = request.signed_by(&self.authority.0).unwrap().pem();
        Ok(tonic::Response::new(JoinResponse { certificate, authority: self.authority.0.pem() }))
    }

    type AttachStream = UnboundedReceiverStream<Result<ToHost, Refusal>>;

    async fn attach(
        &self,
        request: tonic::Request<Streaming<FromHost>>,
    ) -> Result<tonic::Response<Self::AttachStream>, Refusal> {
        let plain = request.metadata().get("unirdma-host").map(|n| n.to_str().unwrap().to_string());
        let certified = request.peer_certs().is_some_and(|c| !c.is_empty());
        let host = plain.or(certified.then(|| "certified".into())).ok_or(Refusal::unauthenticated("nobody"))?;
        let (said, hear) = channel();
        let mut stream = request.into_inner();
        tokio::spawn(async move {
            while let Some(Ok(m)) = stream.next().await {
                let _ = said.send(m);
            }
        });
        let (out, messages) = tokio::sync::mpsc::unbounded_channel();
        self.attached.send(Attached { host, out, said: hear }).unwrap();
        Ok(tonic::Response::new(UnboundedReceiverStream::new(messages)))
    }
}

/// A centre that serves until it is dropped.
struct TestCentre {
    runtime: Option<tokio::runtime::Runtime>,
    address: SocketAddr,
    attached: Receiver<Attached>,
}

impl TestCentre {
    fn start(authority: &Arc<Authority>, tls: bool, address: &str) -> TestCentre {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let (attached, come) = channel();
        let script = Script { authority: authority.clone(), attached };
        let mut params = CertificateParams::new(vec!["localhost".into()]).unwrap();
        params.subject_alt_names.push(SanType::IpAddress([127, 0, 0, 1].into()));
        let key = KeyPair::generate().unwrap();
        let chain = params.signed_by(&key, &authority.0).unwrap().pem() + &authority.0.pem();
        let address: SocketAddr = address.parse().unwrap();
        let listener = runtime.block_on(tokio::net::TcpListener::bind(address)).unwrap();
        let address = listener.local_addr().unwrap();
        let mut server = Server::builder();
        if tls {
            let identity = tonic::transport::Identity::from_pem(chain, key.serialize_pem());
            let ca = Certificate::from_pem(authority.0.pem());
            let tls = ServerTlsConfig::new().identity(identity).client_ca_root(ca).client_auth_optional(true);
            server = server.tls_config(tls).unwrap();
        }
        let incoming = tokio_stream::wrappers::TcpListenerStream::new(listener);
        runtime.spawn(server.add_service(HostsServer::new(script)).serve_with_incoming(incoming));
        TestCentre { runtime: Some(runtime), address, attached: come }
    }

    /// The next connection of a host, and its first message.
    fn attached(&self) -> (Attached, v1::Hello) {
        let a = self.attached.recv_timeout(PATIENCE).expect("the host attaches");
        match a.said.recv_timeout(PATIENCE).unwrap().message {
            Some(from_host::Message::Hello(hello)) => (a, hello),
            other => panic!("{other:?} is no Hello"),
        }
    }
}

impl Drop for TestCentre {
    fn drop(&mut self) {
        self.runtime.take().into_iter().for_each(|r| r.shutdown_background());
    }
}

impl Attached {
    fn say(&self, message: to_host::Message) {
        self.out.send(Ok(ToHost { message: Some(message) })).unwrap();
    }

    fn update(&self, revision: u64, whole: bool, put: Vec<Item>, gone: Vec<v1::ItemKey>) {
        let put = put.into_iter().map(|i| v1::Item { item: Some(i) }).collect();
        self.say(to_host::Message::Update(Update { fleet: "f".into(), revision, whole, more: false, put, gone }));
    }

    /// The next message of a kind.
    fn next<T>(&self, f: impl Fn(from_host::Message) -> Option<T>) -> T {
        let limit = Instant::now() + PATIENCE;
        loop {
            let m = self.said.recv_timeout(limit - Instant::now()).expect("the host says something");
            if let Some(found) = m.message.and_then(&f) {
                return found;
            }
        }
    }

    fn applied(&self) -> (u64, Vec<String>) {
        self.next(|m| if let from_host::Message::Applied(a) = m { Some((a.revision, a.problems)) } else { None })
    }
}

/// A host that serves until it is dropped.
struct TestHost {
    dir: PathBuf,
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<std::io::Result<()>>>,
}

impl TestHost {
    fn config(dir: &Path, address: [u8; 4], url: &str, token: Option<&str>) -> HostConfig {
        HostConfig {
            dir: dir.join("run"),
            engine: EngineConfig::default(),
            metrics: None,
            vfs: None,
            cdi: None,
            admin_group: None,
            ends_unused: false,
            wire: Some(WireConfig::new(vec![address.into()], None)),
            centre: Some(CentreConfig {
                url: url.into(),
                token: token.map(String::from),
                name: Some("h1".into()),
                state: dir.join("state"),
            }),
            isolation: Isolation::Threads(|door| unirdma_worker::work(door, unirdma_worker::Alone::Ends)),
            user: None,
        }
    }

    fn start(c: HostConfig) -> TestHost {
        let stop = Arc::new(rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap());
        let (dir, s) = (c.dir.clone(), stop.clone());
        let thread = std::thread::spawn(move || {
            let limit = Instant::now() + PATIENCE;
            loop {
                match serve(&c, s.as_fd(), || (), || ()) {
                    // For a moment, a process just forked by another test may hold the sockets of a host that has
                    // ended.
                    Err(e) if e.kind() == std::io::ErrorKind::AddrInUse && Instant::now() < limit => {
                        std::thread::sleep(Duration::from_millis(10));
                    }
                    ended => return ended,
                }
            }
        });
        let host = TestHost { dir, stop, thread: Some(thread) };
        if let Err(e) = wait_ready(&host.dir, PATIENCE) {
            let mut host = host;
            let ended = host.thread.take_if(|t| t.is_finished()).map(std::thread::JoinHandle::join);
            panic!("{e}; the host: {ended:?}");
        }
        host
    }

    /// The error with which a host does not start.
    fn refusal(c: &HostConfig) -> String {
        let stop = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
        serve(c, stop.as_fd(), || panic!("it serves"), || ()).unwrap_err().to_string()
    }

    fn ask(&self, request: Request) -> Result<Response, String> {
        Client::connect(&self.dir).unwrap().ask(&request, None).map_err(|e| e.to_string())
    }

    fn status(&self) -> StatusInfo {
        match self.ask(Request::Status) {
            Ok(Response::Status(s)) => *s,
            other => panic!("{other:?}"),
        }
    }

    fn names(&self) -> Vec<String> {
        match self.ask(Request::VrnicList) {
            Ok(Response::Vrnics(all)) => all.into_iter().map(|v| v.name).collect(),
            other => panic!("{other:?}"),
        }
    }

    fn show(&self, name: &str) -> unirdma_ipc::vrnic::VrnicInfo {
        match self.ask(Request::VrnicShow { name: name.into() }) {
            Ok(Response::Vrnic(v)) => *v,
            other => panic!("{other:?}"),
        }
    }
}

impl Drop for TestHost {
    fn drop(&mut self) {
        rustix::io::write(&self.stop, &1u64.to_ne_bytes()).unwrap();
        let Some(thread) = self.thread.take() else { return };
        let ended = thread.join().unwrap();
        assert!(ended.is_ok() || std::thread::panicking(), "{ended:?}");
    }
}

fn new_dir(name: &str) -> PathBuf {
    let dir = std::env::temp_dir().join(format!("unirdma-centre-{name}-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&dir);
    std::fs::create_dir_all(&dir).unwrap();
    dir
}

fn group(weight: u32) -> Item {
    Item::Group(v1::HostGroup { name: "blue".into(), vni: 9, weight, vlan: 0 })
}

fn vrnic(name: &str, n: u8, by_host: bool) -> v1::Vrnic {
    v1::Vrnic {
        name: name.into(),
        group: "blue".into(),
        host: "h1".into(),
        ips: vec![format!("10.0.0.{n}/16")],
        mac: format!("02:00:00:00:00:{n:02x}"),
        guid: format!("02000000000000{n:02x}"),
        by_host,
        ..v1::Vrnic::default()
    }
}

fn peer(name: &str, host: &str, n: u8) -> Item {
    let (ips, mac) = (vec![format!("10.0.0.{n}")], format!("02:00:00:00:00:{n:02x}"));
    Item::Peer(v1::Peer { name: name.into(), group: "blue".into(), host: host.into(), ips, mac })
}

fn place(host: &str, address: &str) -> Item {
    Item::Place(v1::Place { host: host.into(), addresses: vec![address.into()] })
}

fn gone(key: unirdma_fleet::agent::Key) -> Vec<v1::ItemKey> {
    vec![key.message(false)]
}

#[test]
fn a_host_joins_once_and_goes_on_without_its_centre() {
    let dir = new_dir("tls");
    let authority = Arc::new(Authority::new());
    let centre = TestCentre::start(&authority, true, "127.0.0.1:0");
    let url = format!("https://{}", centre.address);
    let token = format!("{TOKEN}.{}", authority.pin());
    let config = |token: Option<&str>| TestHost::config(&dir, [127, 0, 60, 1], &url, token);
    for (token, why) in [
        (None, "this host has not joined the fleet of https://127.0.0.1"),
        (Some("half"), "the token of --join is not whole"),
        (
            Some(&*format!("{TOKEN}.{}", "00".repeat(32))),
            "its certificates are not of the authority that the token names",
        ),
        (Some(&*format!("old.{}", authority.pin())), "the token has expired"),
    ] {
        let said = TestHost::refusal(&config(token));
        assert!(said.contains(why) && said.lines().count() == 1, "{said}");
    }
    let host = TestHost::start(config(Some(&token)));
    let (attached, hello) = centre.attached();
    assert_eq!(
        (attached.host.as_str(), hello.revision, &*hello.addresses),
        ("certified", 0, &["127.0.60.1".into()][..])
    );
    let mut a = vrnic("a", 1, false);
    a.share = Some(v1::Share { weight: Some(300), rate: Some(100_000_000), ..v1::Share::default() });
    let all = vec![Item::Vrnic(a.clone()), group(200), place("h2", "127.0.60.2"), peer("b", "h2", 2)];
    attached.update(5, true, all, Vec::new());
    assert_eq!(attached.applied(), (5, vec![]));
    let shown = host.show("a");
    assert_eq!((&*shown.mac, &*shown.guid, &*shown.group), ("02:00:00:00:00:01", "0200:0000:0000:0001", "blue"));
    assert_eq!((shown.share.weight, shown.share.rate_bps), (300, 100_000_000));
    let status = host.status();
    let said = status.centre.unwrap();
    assert!(said.connected && said.revision == 5 && said.problems.is_empty() && status.wire.unwrap().peers == 1);
    // Changes: a limit, an address, the link, a vRNIC that leaves, and a peer that moves.
    a.share = Some(v1::Share { weight: Some(50), ops: Some(10_000), ..v1::Share::default() });
    (a.down, a.ips) = (true, vec!["10.0.0.1/16".into(), "fd00::1/64".into()]);
    attached.update(6, false, vec![Item::Vrnic(a.clone()), place("h3", "127.0.60.3"), peer("b", "h3", 2)], Vec::new());
    assert_eq!(attached.applied(), (6, vec![]));
    let shown = host.show("a");
    assert_eq!((shown.share.weight, shown.share.ops, shown.share.rate_bps), (50, 10_000, 0));
    assert!(!shown.up && shown.ips.len() == 2 && shown.mac == "02:00:00:00:00:01");
    // The vRNIC and the groups are the centre's, so the administrator cannot change them.
    let (share, held) = (SetShare { weight: Some(1), ..SetShare::default() }, SetHeld::default());
    for request in [
        Request::VrnicSet { name: "a".into(), share, allow_spoof: None, held },
        Request::VrnicRemove { name: "a".into(), force: true },
        Request::GroupAdd { name: "g".into(), weight: None, secret: false, vlan: None },
    ] {
        let e = host.ask(request).unwrap_err();
        assert!(e.contains("the control centre's (https://127.0.0.1"), "{e}");
    }
    // A vRNIC that this host asks for: the centre determines its properties.
    std::thread::scope(|scope| {
        let add = AddVrnic { name: "own".into(), group: Some("blue".into()), ..AddVrnic::default() };
        let asked = scope.spawn(|| host.ask(Request::VrnicAdd(add)));
        let (id, put) = attached.next(|m| match m {
            from_host::Message::Ask(v1::Ask { id, change: Some(v1::ask::Change::Put(v)) }) => Some((id, v)),
            _ => None,
        });
        assert_eq!((&*put.name, put.ips.len(), &*put.host, put.by_host), ("own", 0, "h1", true));
        attached.update(7, false, vec![Item::Vrnic(vrnic("own", 7, true))], Vec::new());
        let reply = v1::Reply { id, error: String::new(), vrnic: Some(vrnic("own", 7, true)) };
        attached.say(to_host::Message::Reply(reply));
        let Ok(Response::Vrnic(v)) = asked.join().unwrap() else { panic!("no vRNIC") };
        assert_eq!(v.ips[0].to_string(), "10.0.0.7/16");
        let asked = scope.spawn(|| host.ask(Request::VrnicAdd(AddVrnic { name: "no".into(), ..AddVrnic::default() })));
        let id = attached.next(|m| if let from_host::Message::Ask(a) = m { Some(a.id) } else { None });
        let error = "host h1 may not make vRNICs".to_string();
        attached.say(to_host::Message::Reply(v1::Reply { id, error, vrnic: None }));
        assert_eq!(asked.join().unwrap().unwrap_err(), "host h1 may not make vRNICs");
    });
    // A wrong clock.
    attached.say(to_host::Message::Alive(v1::Alive { revision: 7, clock_ms: 1 }));
    let limit = Instant::now() + PATIENCE;
    while host.status().centre.unwrap().problems.is_empty() {
        assert!(Instant::now() < limit);
    }
    assert!(
        host.status().centre.unwrap().problems[0].ends_with("ahead of the control centre's; set one of them right")
    );
    // The centre dies.
    let address = centre.address.to_string();
    drop((attached, centre));
    let limit = Instant::now() + PATIENCE;
    while host.status().centre.unwrap().connected {
        assert!(Instant::now() < limit);
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(host.names(), ["a", "own"]);
    let add = AddVrnic { name: "late".into(), ..AddVrnic::default() };
    let e = host.ask(Request::VrnicAdd(add)).unwrap_err();
    assert!(e.starts_with("the control centre has been away for "), "{e}");
    // The host is restarted, without a token and without the centre.
    drop(host);
    let host = TestHost::start(config(None));
    assert_eq!(host.names(), ["a", "own"]);
    assert!(!host.show("a").up && host.show("own").mac == "02:00:00:00:00:07");
    let status = host.status();
    assert_eq!((status.centre.unwrap().revision, status.wire.unwrap().peers), (7, 1));
    // When the centre is back, differences are applied.
    let centre = TestCentre::start(&authority, true, &address);
    let (attached, hello) = centre.attached();
    assert_eq!((hello.revision, &*hello.fleet, &*hello.vrnics[0].name), (7, "f", "own"));
    assert_eq!(attached.applied(), (7, vec![]));
    attached.update(8, false, Vec::new(), gone(unirdma_fleet::agent::Key::Vrnic("a".into())));
    assert_eq!(attached.applied(), (8, vec![]));
    assert_eq!(host.names(), ["own"]);
    // An invalid update changes nothing, and everything is requested again.
    attached.update(9, false, vec![Item::Group(v1::HostGroup::default())], Vec::new());
    let (again, hello) = centre.attached();
    assert_eq!((hello.revision, host.names()), (0, vec!["own".to_string()]));
    let (revision, problems) = again.applied();
    assert!(revision == 8 && problems[0].starts_with("an update of the control centre is refused"), "{problems:?}");
    again.update(9, true, vec![group(100)], Vec::new());
    assert_eq!(again.applied(), (9, vec![]));
    assert!(host.names().is_empty() && host.status().wire.unwrap().peers == 0);
    drop(host);
    std::fs::remove_dir_all(dir).unwrap();
}

#[test]
fn a_vrnic_in_use_stays_until_it_is_taken_by_force() {
    let dir = new_dir("plain");
    let centre = TestCentre::start(&Arc::new(Authority::new()), false, "127.0.0.1:0");
    let url = format!("http://{}", centre.address);
    let host = TestHost::start(TestHost::config(&dir, [127, 0, 61, 1], &url, None));
    let (attached, _) = centre.attached();
    assert_eq!(attached.host, "h1");
    attached.update(1, true, vec![group(100), Item::Vrnic(vrnic("a", 1, false))], Vec::new());
    assert_eq!(attached.applied(), (1, vec![]));
    // A container holds its interface.
    let mut container = Client::connect(&host.dir).unwrap();
    let (tap, _other) = std::os::unix::net::UnixStream::pair().unwrap();
    container.ask(&Request::Attach { name: "a".into() }, Some(tap.as_fd())).unwrap();
    let key = unirdma_fleet::agent::Key::Vrnic("a".into());
    attached.update(2, false, Vec::new(), gone(key.clone()));
    let (revision, problems) = attached.applied();
    assert!(revision == 2 && problems[0].contains("is to leave this host, but programs use it"), "{problems:?}");
    assert_eq!((host.names(), host.status().centre.unwrap().problems), (vec!["a".to_string()], problems));
    attached.update(3, false, vec![Item::Vrnic(vrnic("a", 1, false))], Vec::new());
    assert_eq!(attached.applied(), (3, vec![]));
    attached.update(4, false, Vec::new(), vec![key.message(true)]);
    assert_eq!((attached.applied(), host.names()), ((4, vec![]), Vec::new()));
    drop(host);
    // Files that cannot be read are one line.
    std::fs::write(dir.join("state/host.json"), "{").unwrap();
    let e = TestHost::refusal(&TestHost::config(&dir, [127, 0, 61, 1], &url, None));
    assert!(e.contains("state/host.json is damaged") && e.ends_with("join again"), "{e}");
    std::fs::remove_dir_all(dir).unwrap();
}

#[test]
fn a_host_without_an_address_of_our_family_is_not_reached() {
    let own: Vec<IpAddr> = vec![[127, 0, 0, 1].into()];
    let mut n = Neighbours::new(&own);
    let place = v1::Place { host: "h2".into(), addresses: vec!["fd00::1".into()] };
    n.set_place("h2", Some(&place));
    let peer = v1::Peer {
        name: "b".into(),
        group: "blue".into(),
        host: "h2".into(),
        ips: vec!["10.0.0.2".into()],
        ..v1::Peer::default()
    };
    let changes = n.set_peer("b", Some(&peer));
    assert!(matches!(&changes[..], [crate::peer_change::Change::Address { place: None, .. }]), "{changes:?}");
}

#[test]
fn vlans_of_groups_and_ways_of_vrnics_are_the_centres() {
    let dir = new_dir("ways");
    let centre = TestCentre::start(&Arc::new(Authority::new()), false, "127.0.0.1:0");
    let url = format!("http://{}", centre.address);
    let host = TestHost::start(TestHost::config(&dir, [127, 0, 62, 1], &url, None));
    let (attached, _) = centre.attached();
    let group = |name: &str, vni, vlan| Item::Group(v1::HostGroup { name: name.into(), vni, weight: 100, vlan });
    let vrnic = |name: &str, group: &str, n, way: v1::Way| {
        Item::Vrnic(v1::Vrnic { group: group.into(), way: way.into(), instance: "pod".into(), ..vrnic(name, n, false) })
    };
    let vlans = || match host.ask(Request::GroupList) {
        Ok(Response::Groups(all)) => {
            all.into_iter().filter(|g| g.name != "default").map(|g| (g.name, g.vlan)).collect::<Vec<_>>()
        }
        other => panic!("{other:?}"),
    };
    let (blue, red) = ("blue".to_owned(), "red".to_owned());
    let all = vec![
        group("blue", 9, 100),
        group("red", 8, 200),
        vrnic("a", "blue", 1, v1::Way::Auto),
        vrnic("r", "red", 2, v1::Way::Soft),
    ];
    attached.update(1, true, all, Vec::new());
    assert_eq!(attached.applied(), (1, vec![]));
    assert_eq!(vlans(), [(blue.clone(), 100), (red.clone(), 200)]);
    assert_eq!(host.show("a").way.asked, Way::Auto);
    // This host has no pool: the centre hears of the way in force, and why.
    let (way, why) = attached.next(|m| match m {
        from_host::Message::Report(r) => r.vrnics.into_iter().find(|v| v.name == "a").map(|v| (v.way(), v.why)),
        _ => None,
    });
    assert!(way == v1::Way::Soft && why.starts_with("this host has no pool of VFs"), "{why}");
    // The centre exchanges the VLANs in one step.
    attached.update(2, false, vec![group("blue", 9, 200), group("red", 8, 100)], Vec::new());
    assert_eq!(attached.applied(), (2, vec![]));
    assert_eq!(vlans(), [(blue, 200), (red, 100)]);
    // A way that this host does not have is a problem of this vRNIC only, and the next order mends it.
    attached.update(
        3,
        false,
        vec![vrnic("a", "blue", 1, v1::Way::Vf), vrnic("b", "blue", 3, v1::Way::Soft)],
        Vec::new(),
    );
    let (revision, problems) = attached.applied();
    assert!(
        revision == 3 && problems[0].starts_with("vRNIC a cannot have the way vf: this host has no"),
        "{problems:?}"
    );
    assert_eq!(host.names(), ["b", "r"]);
    attached.update(4, false, vec![vrnic("a", "blue", 1, v1::Way::Soft)], Vec::new());
    assert_eq!(attached.applied(), (4, vec![]));
    assert_eq!(host.show("a").way.asked, Way::Soft);
    // An administrator of the host asks for a VF.
    std::thread::scope(|scope| {
        let add = AddVrnic { name: "own".into(), group: Some("blue".into()), way: Way::Vf, ..AddVrnic::default() };
        let asked = scope.spawn(|| host.ask(Request::VrnicAdd(add)));
        let (id, put) = attached.next(|m| match m {
            from_host::Message::Ask(v1::Ask { id, change: Some(v1::ask::Change::Put(v)) }) => Some((id, v)),
            _ => None,
        });
        assert_eq!(put.way(), v1::Way::Vf);
        attached.update(5, false, vec![vrnic("own", "blue", 7, v1::Way::Vf)], Vec::new());
        attached.say(to_host::Message::Reply(v1::Reply { id, error: String::new(), vrnic: Some(put) }));
        let e = asked.join().unwrap().unwrap_err();
        assert!(e.starts_with("vRNIC own cannot have the way vf: this host has no pool"), "{e}");
    });
    drop(host);
    std::fs::remove_dir_all(dir).unwrap();
}
