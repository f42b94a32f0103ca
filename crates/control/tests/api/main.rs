//! The centre over real sockets: certificates, roles, hosts, JSON, metrics, and forbidden calls.

mod fuzz;
mod limits;
mod metrics;
mod wrong;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::time::Duration;

use rcgen::{CertificateParams, DnType, ExtendedKeyUsagePurpose, Issuer, KeyPair};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};
use tonic::{Code, Request, Status};
use unirdma_control::{Options, copy, init, listen};
use unirdma_fleet::v1::{
    self, fleet_client::FleetClient, from_host, hosts_client::HostsClient, object::Object, to_host,
};

/// A centre that serves, in a separate directory.
struct Lab {
    dir: PathBuf,
    url: String,
    admin: String,
    metrics: Option<SocketAddr>,
    task: tokio::task::JoinHandle<std::io::Result<()>>,
}

/// Waits until a condition is true.
async fn wait_until(so: impl Fn() -> bool) {
    for _ in 0..400 {
        if so() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("it does not become so");
}

fn options(dir: &std::path::Path, plain: bool) -> Options {
    Options {
        dir: dir.into(),
        listen: "127.0.0.1:0".parse().unwrap(),
        store: None,
        plain,
        names: Vec::new(),
        metrics: None,
    }
}

impl Lab {
    async fn new(plain: bool) -> Lab {
        Lab::of(|dir| options(dir, plain)).await
    }

    async fn with_metrics() -> Lab {
        Lab::of(|dir| Options { metrics: Some("127.0.0.1:0".parse().unwrap()), ..options(dir, false) }).await
    }

    async fn of(options: impl Fn(&std::path::Path) -> Options) -> Lab {
        let mut random = [0; 8];
        getrandom::fill(&mut random).unwrap();
        let dir = std::env::temp_dir().join(format!("unirdma-control-{:016x}", u64::from_ne_bytes(random)));
        let admin = init(&dir, None).await.unwrap();
        let listening = listen(&options(&dir)).await.unwrap();
        let (url, metrics) = (listening.url.clone(), listening.metrics);
        Lab { dir, url, admin, metrics, task: tokio::spawn(listening.serve()) }
    }

    /// Ends the centre. The tasks of its connections release the store when their connections have ended.
    async fn end(&self) {
        self.task.abort();
        for _ in 0..400 {
            if listen(&options(&self.dir, true)).await.is_ok() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        panic!("the store is still in use");
    }

    /// Ends the centre, and starts another one on its store.
    async fn restart(self) -> Lab {
        self.end().await;
        let options = options(&self.dir, false);
        self.begin(options).await
    }

    /// Starts a centre after the former one has ended.
    async fn begin(mut self, options: Options) -> Lab {
        let listening = listen(&options).await.unwrap();
        self.url = listening.url.clone();
        self.task = tokio::spawn(listening.serve());
        self
    }

    fn address(&self) -> SocketAddr {
        self.url.split("://").nth(1).unwrap().parse().unwrap()
    }

    async fn channel(&self, identity: Option<Identity>) -> Result<Channel, tonic::transport::Error> {
        let mut endpoint = Endpoint::from_shared(self.url.clone()).unwrap();
        if self.url.starts_with("https") {
            let pem = std::fs::read_to_string(self.dir.join("authority.pem")).unwrap();
            let mut tls = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(pem));
            if let Some(identity) = identity {
                tls = tls.identity(identity);
            }
            endpoint = endpoint.tls_config(tls).unwrap();
        }
        endpoint.connect().await
    }

    async fn fleet(&self) -> FleetClient<Channel> {
        FleetClient::new(self.channel(None).await.unwrap())
    }

    fn by<T>(&self, token: &str, message: T) -> Request<T> {
        let mut r = Request::new(message);
        r.metadata_mut().insert("authorization", format!("Bearer {token}").parse().unwrap());
        r
    }

    async fn apply(&self, objects: Vec<Object>) -> Result<v1::ApplyResponse, Status> {
        let objects = objects.into_iter().map(|o| v1::Object { object: Some(o), revision: 0 }).collect();
        let request = v1::ApplyRequest { objects, ..Default::default() };
        Ok(self.fleet().await.apply(self.by(&self.admin, request)).await?.into_inner())
    }

    async fn token(&self, token: v1::Token) -> String {
        let request = v1::CreateTokenRequest { token: Some(token) };
        self.fleet().await.create_token(self.by(&self.admin, request)).await.unwrap().into_inner().secret
    }

    /// The identity of another centre of the fleet: a certificate that the authority issues only to centres.
    fn centre(&self) -> Identity {
        let read = |name: &str| std::fs::read_to_string(self.dir.join(name)).unwrap();
        let authority = KeyPair::from_pem(&read("authority.key")).unwrap();
        let issuer = Issuer::from_ca_cert_pem(&read("authority.pem"), authority).unwrap();
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::OrganizationalUnitName, "uniRDMA centres");
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &issuer).unwrap();
        Identity::from_pem(certificate.pem(), key.serialize_pem())
    }

    /// Lets a host join. Returns its certificate with its key.
    async fn join(&self, host: &str) -> Identity {
        let token =
            self.token(v1::Token { role: v1::Role::Join.into(), host: host.into(), ..Default::default() }).await;
        assert_eq!(token.split('.').count(), 3, "the token says which authority to believe");
        let key = KeyPair::generate().unwrap();
        let csr = CertificateParams::default().serialize_request(&key).unwrap().pem().unwrap();
        let mut hosts = HostsClient::new(self.channel(None).await.unwrap());
        let request = v1::JoinRequest { token: token.clone(), host: host.into(), request: csr };
        let joined = hosts.join(request.clone()).await.unwrap().into_inner();
        assert_eq!(
            hosts.join(request).await.unwrap_err().code(),
            Code::Unauthenticated,
            "a token lets one host join, once"
        );
        Identity::from_pem(joined.certificate, key.serialize_pem())
    }

    fn http(&self, head: &str, token: &str, body: &[u8]) -> (u16, String) {
        let mut stream = TcpStream::connect(self.address()).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let text = format!(
            "{head} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {token}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
            body.len()
        );
        stream.write_all(text.as_bytes()).unwrap();
        stream.write_all(body).unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).unwrap();
        let answer = String::from_utf8_lossy(&answer).into_owned();
        let code = answer.split(' ').nth(1).and_then(|c| c.parse().ok()).unwrap_or(0);
        (code, answer.split_once("\r\n\r\n").map(|(_, b)| b.to_owned()).unwrap_or_default())
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        self.task.abort();
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

fn group(name: &str) -> Object {
    v1::Group { name: name.into(), ranges: vec!["10.0.0.0/16".into()], ..Default::default() }.into()
}

fn vrnic(name: &str, group: &str, host: &str) -> Object {
    v1::Vrnic { name: name.into(), group: group.into(), host: host.into(), ..Default::default() }.into()
}

/// A host's side of its connection.
struct Attached {
    send: mpsc::Sender<v1::FromHost>,
    receive: tonic::Streaming<v1::ToHost>,
}

impl Attached {
    async fn new(channel: Channel, instance: u64) -> Result<Attached, Status> {
        let (send, receive) = mpsc::channel(8);
        let hello = v1::Hello {
            protocol: 1,
            version: "test".into(),
            instance,
            addresses: vec!["192.168.7.1".into()],
            ..Default::default()
        };
        let message = |m| v1::FromHost { message: Some(m) };
        send.send(message(from_host::Message::Hello(hello))).await.unwrap();
        let receive = HostsClient::new(channel).attach(ReceiverStream::new(receive)).await?.into_inner();
        Ok(Attached { send, receive })
    }

    /// The next message that is not `Alive`.
    async fn next(&mut self) -> Option<to_host::Message> {
        loop {
            let m = tokio::time::timeout(Duration::from_secs(30), self.receive.message())
                .await
                .expect("the centre is silent")
                .ok()??;
            match m.message? {
                to_host::Message::Alive(_) => {}
                m => return Some(m),
            }
        }
    }

    async fn update(&mut self) -> v1::Update {
        match self.next().await {
            Some(to_host::Message::Update(u)) => u,
            m => panic!("{m:?}"),
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hosts_join_and_hear_what_concerns_them() {
    let lab = Lab::new(false).await;
    let (one, two) = (lab.join("h1").await, lab.join("h2").await);
    lab.apply(vec![group("blue"), vrnic("a", "blue", "h1"), vrnic("b", "blue", "h2")]).await.unwrap();

    let e = Attached::new(lab.channel(None).await.unwrap(), 1).await.err().unwrap();
    assert!(e.code() == Code::Unauthenticated && e.message().contains("certificate"), "{e:?}");
    let stranger = rcgen::generate_simple_self_signed(vec!["h1".into()]).unwrap();
    let identity = Identity::from_pem(stranger.cert.pem(), stranger.signing_key.serialize_pem());
    let refused = match lab.channel(Some(identity)).await {
        Ok(channel) => Attached::new(channel, 1).await.is_err(),
        Err(_) => true,
    };
    assert!(refused, "a certificate of another authority opens nothing");

    let mut h1 = Attached::new(lab.channel(Some(one.clone())).await.unwrap(), 1).await.unwrap();
    let first = h1.update().await;
    assert!(first.whole && !first.more && first.put.len() == 4, "group, vRNIC, peer, place: {first:?}");
    let mut twin = Attached::new(lab.channel(Some(one)).await.unwrap(), 2).await.unwrap();
    match twin.next().await {
        Some(to_host::Message::Refused(why)) => {
            assert!(why.contains("another host is connected with the certificate of host h1"), "{why}")
        }
        m => panic!("{m:?}"),
    }
    let mut h2 = Attached::new(lab.channel(Some(two)).await.unwrap(), 7).await.unwrap();
    assert!(h2.update().await.whole);
    assert_eq!(h1.update().await.put.len(), 1, "h2 has said where it is");

    let put = v1::Vrnic { name: "c".into(), group: "blue".into(), ..Default::default() };
    let ask = v1::Ask { id: 77, change: Some(v1::ask::Change::Put(put)) };
    h1.send.send(v1::FromHost { message: Some(from_host::Message::Ask(ask)) }).await.unwrap();
    let update = h1.update().await;
    assert!(
        update.put.iter().any(|i| matches!(&i.item, Some(v1::item::Item::Vrnic(v)) if v.name == "c" && v.by_host)),
        "{update:?}"
    );
    match h1.next().await {
        Some(to_host::Message::Reply(r)) => {
            assert!(r.id == 77 && r.error.is_empty() && r.vrnic.unwrap().ips == ["10.0.0.3/16"])
        }
        m => panic!("{m:?}"),
    }
    let update = h2.update().await;
    assert!(update.put.iter().any(|i| matches!(&i.item, Some(v1::item::Item::Peer(p)) if p.name == "c")), "{update:?}");

    let names = vec![v1::Name { kind: v1::Kind::Host.into(), name: "h1".into() }];
    lab.fleet()
        .await
        .delete(lab.by(&lab.admin, v1::DeleteRequest { names, force: true, dry_run: false }))
        .await
        .unwrap();
    match h1.next().await {
        Some(to_host::Message::Refused(why)) => assert!(why.contains("h1 was deleted"), "{why}"),
        m => panic!("{m:?}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn callers_do_what_their_tokens_let_them_and_the_state_outlives_the_centre() {
    let lab = Lab::new(false).await;
    lab.apply(vec![group("blue"), group("red"), vrnic("a", "blue", "")]).await.unwrap();
    let tenant = lab
        .token(v1::Token {
            id: "t".into(),
            role: v1::Role::Tenant.into(),
            groups: vec!["red".into()],
            ..Default::default()
        })
        .await;
    let mut fleet = lab.fleet().await;
    let e = fleet.get(v1::GetRequest::default()).await.unwrap_err();
    assert!(e.code() == Code::Unauthenticated && e.message().contains("UNIRDMA_TOKEN"), "{e:?}");
    let e = fleet.get(lab.by("admin.1234", v1::GetRequest::default())).await.unwrap_err();
    assert_eq!(e.code(), Code::Unauthenticated);
    let one = |o: Object, revision| v1::ApplyRequest {
        objects: vec![v1::Object { object: Some(o), revision }],
        ..Default::default()
    };
    let e = fleet.apply(lab.by(&tenant, one(vrnic("x", "blue", ""), 0))).await.unwrap_err();
    assert!(
        e.code() == Code::PermissionDenied && e.message() == "vRNIC x: token t is for group red, not for blue",
        "{e:?}"
    );
    let e = fleet.apply(lab.by(&lab.admin, one(vrnic("a", "blue", ""), 99))).await.unwrap_err();
    assert!(e.code() == Code::Aborted && e.message().contains("get it again"), "{e:?}");
    fleet.apply(lab.by(&tenant, one(vrnic("x", "red", ""), 0))).await.unwrap();

    let mut watch = fleet.watch(lab.by(&tenant, v1::WatchRequest::default())).await.unwrap().into_inner();
    let mut names = Vec::new();
    loop {
        let m = watch.message().await.unwrap().unwrap();
        names.extend(m.changes.into_iter().filter_map(|c| c.after?.object.map(|o| o.name().to_owned())));
        if m.complete {
            break;
        }
    }
    assert_eq!(names, ["red", "x"], "a tenant sees its groups, and nothing else");
    lab.apply(vec![vrnic("y", "blue", ""), vrnic("z", "red", "")]).await.unwrap();
    let m = watch.message().await.unwrap().unwrap();
    assert!(m.changes.len() == 1 && m.changes[0].before.is_none(), "{m:?}");
    fleet.revoke_token(lab.by(&lab.admin, v1::RevokeTokenRequest { id: "t".into() })).await.unwrap();
    let e = loop {
        match watch.message().await {
            Ok(Some(_)) => {}
            Ok(None) => panic!("the watch ended without a word"),
            Err(e) => break e,
        }
    };
    assert_eq!(e.code(), Code::Unauthenticated, "what a revoked token began ends");

    let all = fleet.get(lab.by(&lab.admin, v1::GetRequest::default())).await.unwrap().into_inner();
    let audit = fleet.audit(lab.by(&lab.admin, v1::AuditRequest::default())).await.unwrap().into_inner();
    assert!(audit.entries.iter().any(|e| e.who == "t" && e.what[0].starts_with("made vRNIC x")), "{audit:?}");
    let e = listen(&options(&lab.dir, false)).await.err().unwrap().to_string();
    assert!(e.contains("in use by another `unirdma control`"), "{e}");
    drop((fleet, watch));
    let lab = lab.restart().await;
    let again = lab.fleet().await.get(lab.by(&lab.admin, v1::GetRequest::default())).await.unwrap().into_inner();
    assert_eq!((again.objects, again.revision), (all.objects, all.revision));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fleet_is_copied_to_another_store_once_no_centre_runs_on_it() {
    let lab = Lab::new(false).await;
    // More records than fit into a transaction, and a revision that differs from the number of records.
    for part in 0..4 {
        lab.apply((0..500).map(|n| vrnic(&format!("v{part}n{n}"), "default", "")).collect()).await.unwrap();
    }
    let all = lab.fleet().await.get(lab.by(&lab.admin, v1::GetRequest::default())).await.unwrap().into_inner();
    let to = lab.dir.join("other.redb").display().to_string();
    let refused = async |from: Option<&str>, to: &str, why: &str| {
        let e = copy(&lab.dir, from, to).await.unwrap_err().to_string();
        assert!(e.contains(why) && !e.contains('\n'), "{e}");
    };
    refused(None, &to, "in use by another `unirdma control`").await;
    lab.end().await;
    let own = lab.dir.join("fleet.redb").display().to_string();
    refused(Some("none.redb"), &to, "there is no store at none.redb").await;
    refused(None, &own, "is the store that the fleet has").await;
    refused(None, &format!("{}/./fleet.redb", lab.dir.display()), "is the store that the fleet has").await;
    refused(None, "ftp://x", "is of no kind that this version has").await;
    refused(None, "etcd://127.0.0.1:1", "does not answer").await;
    let copied = copy(&lab.dir, None, &to).await.unwrap();
    assert_eq!((copied.from, copied.to, copied.revision), (own, to.clone(), all.revision));
    assert!(copied.records > 2_000, "{}", copied.records);
    refused(None, &to, "has a fleet already, which stays as it is").await;
    let empty = lab.dir.join("empty.redb").display().to_string();
    refused(Some(&to), "/proc/none/x.redb", "cannot be opened").await;
    std::fs::write(&empty, "").unwrap();
    refused(Some(&empty), &to, "empty.redb has no fleet").await;

    let options = Options { store: Some(to), ..options(&lab.dir, false) };
    let lab = lab.begin(options).await;
    let again = lab.fleet().await.get(lab.by(&lab.admin, v1::GetRequest::default())).await.unwrap().into_inner();
    assert_eq!((again.objects, again.revision), (all.objects, all.revision));
    lab.apply(vec![group("blue")]).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn json_is_the_same_calls() {
    let lab = Lab::new(true).await;
    let admin = lab.admin.clone();
    let body = br#"{"objects":[{"object":null,"group":{"name":"blue","ranges":["10.0.0.0/16"],"maxVrnics":2}},{"vrnic":{"name":"a","group":"blue"}}]}"#;
    let (code, answer) = lab.http("POST /api/v1/apply", &admin, body);
    assert!(code == 400 && answer.contains("unknown field `object`"), "{code} {answer}");
    let body = br#"{"objects":[{"group":{"name":"blue","ranges":["10.0.0.0/16"],"maxVrnics":2}},{"vrnic":{"name":"a","group":"blue"}}]}"#;
    let (code, answer) = lab.http("POST /api/v1/apply", &admin, body);
    assert!(
        code == 200 && answer.contains(r#""revision":"3""#) && answer.contains(r#""ips":["10.0.0.1/16"]"#),
        "{code} {answer}"
    );
    let (code, answer) = lab.http("GET /api/v1/objects/vrnic?group=blue", &admin, b"");
    assert!(code == 200 && answer.contains(r#""name":"a""#), "{code} {answer}");
    assert_eq!(lab.http("GET /api/v1/objects/vrnic/b", &admin, b"").0, 404);
    assert_eq!(lab.http("GET /api/v1/objects/cable", &admin, b"").0, 404);
    let (code, answer) = lab.http("GET /api/v1/objects?colour=red", &admin, b"");
    assert!(code == 400 && answer.contains("colour"), "{code} {answer}");
    let (code, answer) = lab.http("DELETE /api/v1/objects/group/blue", &admin, b"");
    assert!(code == 409 && answer.contains("use --force"), "{code} {answer}");
    assert_eq!(lab.http("GET /api/v1/status", "", b"").0, 401);
    let (code, answer) = lab.http("GET /api/v1/openapi.json", "", b"");
    assert!(code == 200 && answer.contains("/api/v1/objects/{kind}/{name}"), "{code}");
    let mut stream = TcpStream::connect(lab.address()).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    write!(stream, "GET /api/v1/watch?kind=VRNIC HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {admin}\r\n\r\n")
        .unwrap();
    let mut text = String::new();
    let mut more = [0; 4096];
    while !text.contains(r#""complete":true"#) {
        let n = stream.read(&mut more).unwrap();
        assert!(n > 0, "{text}");
        text += &String::from_utf8_lossy(&more[..n]);
    }
    assert!(text.contains("text/event-stream") && text.contains("data: {") && text.contains(r#""name":"a""#), "{text}");
    let plain = Options { listen: "0.0.0.0:0".parse().unwrap(), ..options(&lab.dir, true) };
    assert!(listen(&plain).await.err().unwrap().to_string().contains("for loopback only"));
}
