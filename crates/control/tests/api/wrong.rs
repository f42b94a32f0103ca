//! Wrong input, over real sockets. The answer is one line that says what to do, and nothing is changed.

use super::*;

impl Lab {
    async fn revision(&self) -> u64 {
        self.fleet().await.status(self.by(&self.admin, v1::StatusRequest {})).await.unwrap().into_inner().revision
    }
}

/// The line of a refusal.
fn line<T: std::fmt::Debug>(answer: Result<T, Status>, code: Code) -> String {
    let e = answer.unwrap_err();
    assert_eq!(e.code(), code, "{e:?}");
    assert!(!e.message().is_empty() && !e.message().contains('\n'), "{e:?}");
    e.message().to_owned()
}

fn now() -> u64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_cannot_be_is_refused_in_a_line_and_changes_nothing() {
    let lab = Lab::new(false).await;
    let small = v1::Group { name: "small".into(), ranges: vec!["10.1.0.0/30".into()], ..Default::default() };
    lab.apply(vec![group("blue"), group("red"), small.into(), vrnic("a", "blue", "")]).await.unwrap();
    let before = lab.revision().await;
    let with = |ips: &[&str], group: &str| -> Object {
        let ips = ips.iter().map(ToString::to_string).collect();
        v1::Vrnic { name: "x".into(), group: group.into(), ips, ..Default::default() }.into()
    };
    let ranges = |text: &str| -> Object {
        v1::Group { name: "g".into(), ranges: vec![text.into()], ..Default::default() }.into()
    };
    let rule = |from: &str, to: &str| -> Object {
        v1::Rule { name: "r".into(), from: from.into(), to: to.into(), ..Default::default() }.into()
    };
    for (objects, code, what) in [
        (vec![with(&[], "green")], Code::NotFound, "vRNIC x: there is no group green"),
        (
            vec![with(&["10.9.0.1"], "blue")],
            Code::InvalidArgument,
            "10.9.0.1 is outside the ranges of group blue: 10.0.0.0/16",
        ),
        (vec![with(&["10.0.0.1"], "blue")], Code::FailedPrecondition, "10.0.0.1"),
        (vec![with(&["ten"], "blue")], Code::InvalidArgument, "`ten` is no IP address; write 10.0.0.1"),
        (vec![vrnic("x", "blue", "h9")], Code::NotFound, "there is no host h9"),
        (vec![vrnic("x", "blue", ""), vrnic("x", "blue", "")], Code::InvalidArgument, "vRNIC x is declared twice"),
        (vec![ranges("10.0.0.0")], Code::InvalidArgument, "`10.0.0.0` has no prefix length; write 10.0.0.0/16"),
        (vec![ranges("10.0.0.0/33")], Code::InvalidArgument, "the prefix length must be 0 to 32"),
        (vec![ranges("blue")], Code::InvalidArgument, "`blue` has no prefix length"),
        (vec![rule("", "")], Code::InvalidArgument, "`` is no end of a rule; write group:NAME or vrnic:NAME"),
        (vec![rule("group:blue", "vrnic:z")], Code::NotFound, "there is no vRNIC z"),
        (vec![rule("group:nobody", "group:red")], Code::NotFound, "there is no group nobody"),
        // A call is executed completely or not at all. The third object is one too many.
        (
            vec![vrnic("s1", "small", ""), vrnic("s2", "small", ""), vrnic("s3", "small", "")],
            Code::ResourceExhausted,
            "all addresses of 10.1.0.0/30 in group small are taken",
        ),
    ] {
        let said = line(lab.apply(objects).await, code);
        assert!(said.contains(what), "{said}");
        assert_eq!(lab.revision().await, before, "{said}");
    }
    let stale = v1::Object { object: Some(vrnic("a", "blue", "")), revision: before + 7 };
    let request = v1::ApplyRequest { objects: vec![stale], ..Default::default() };
    let said = line(lab.fleet().await.apply(lab.by(&lab.admin, request)).await, Code::Aborted);
    assert!(said.contains("vRNIC a was changed since") && said.contains("get it again"), "{said}");
    assert_eq!(lab.revision().await, before);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_reach_no_further_than_they_say_and_no_longer() {
    let lab = Lab::new(false).await;
    lab.apply(vec![group("blue"), group("red"), vrnic("a", "blue", "")]).await.unwrap();
    let tenant = v1::Token { role: v1::Role::Tenant.into(), groups: vec!["red".into()], ..Default::default() };
    let tenant = lab.token(tenant).await;
    let short = lab.token(v1::Token { id: "short".into(), expires: now() + 1, ..Default::default() }).await;
    let join = lab.token(v1::Token { role: v1::Role::Join.into(), ..Default::default() }).await;
    let before = lab.revision().await;
    let mut fleet = lab.fleet().await;
    let delete = |name: &str| {
        let names = vec![v1::Name { kind: v1::Kind::Vrnic.into(), name: name.into() }];
        v1::DeleteRequest { names, ..Default::default() }
    };
    let said = line(fleet.delete(lab.by(&tenant, delete("a"))).await, Code::NotFound);
    assert_eq!(said, "there is no vRNIC a", "what is another's does not exist for a tenant");
    let request = v1::MoveRequest { vrnic: "a".into(), host: "h1".into() };
    assert_eq!(line(fleet.r#move(lab.by(&tenant, request)).await, Code::NotFound), "there is no vRNIC a");
    let said = line(
        fleet.rotate_secret(lab.by(&tenant, v1::RotateSecretRequest { group: "blue".into() })).await,
        Code::PermissionDenied,
    );
    assert!(said.contains("a token with the role admin"), "{said}");
    let said = line(
        fleet.get(lab.by(join.rsplit_once('.').unwrap().0, v1::GetRequest::default())).await,
        Code::PermissionDenied,
    );
    assert!(said.contains("lets a host join, and no more"), "{said}");
    for bad in ["admin", "admin.", ".", "x.y", &"a".repeat(300)] {
        line(fleet.get(lab.by(bad, v1::GetRequest::default())).await, Code::Unauthenticated);
    }
    let past = v1::CreateTokenRequest { token: Some(v1::Token { expires: 1_000, ..Default::default() }) };
    let said = line(fleet.create_token(lab.by(&lab.admin, past)).await, Code::InvalidArgument);
    assert!(said.contains("it would be expired at once: 1970-01-01 00:16:40 UTC; the centre's clock says "), "{said}");
    while now() < before_expiry(&lab, &mut fleet, "short").await {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let said = line(fleet.get(lab.by(&short, v1::GetRequest::default())).await, Code::Unauthenticated);
    assert!(said.starts_with("token short expired at ") && said.contains("; the centre's clock says "), "{said}");
    assert_eq!(lab.revision().await, before);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_tenant_leaves_others_their_places_and_hears_nothing_of_them() {
    let lab = Lab::new(false).await;
    lab.apply(vec![group("blue"), group("red"), vrnic("a", "blue", ""), vrnic("b", "red", "")]).await.unwrap();
    let tenant =
        |group: &str| v1::Token { role: v1::Role::Tenant.into(), groups: vec![group.into()], ..Default::default() };
    let (red, blue) = (lab.token(tenant("red")).await, lab.token(tenant("blue")).await);
    let mut fleet = lab.fleet().await;
    let mut held = Vec::new();
    let refused = loop {
        match fleet.watch(lab.by(&red, v1::WatchRequest::default())).await {
            Ok(stream) => held.push(stream),
            Err(e) => break e,
        }
    };
    assert_eq!((held.len(), refused.code()), (32, Code::ResourceExhausted), "{refused:?}");
    let mut other = fleet.watch(lab.by(&blue, v1::WatchRequest::default())).await.unwrap().into_inner();
    assert!(other.message().await.unwrap().is_some());
    held.clear();
    // The places become free when the centre notices that the streams have ended.
    while fleet.watch(lab.by(&red, v1::WatchRequest::default())).await.is_err() {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let status = fleet.status(lab.by(&red, v1::StatusRequest {})).await.unwrap().into_inner();
    let store = (status.store.as_str(), status.allocator.as_str(), status.hosts);
    assert_eq!((store, status.groups, status.vrnics), (("", "", 0), 1, 1));
    let status = fleet.status(lab.by(&lab.admin, v1::StatusRequest {})).await.unwrap().into_inner();
    assert!(status.store.ends_with("fleet.redb") && status.groups == 3 && status.vrnics == 2, "{status:?}");
}

/// When a token expires.
async fn before_expiry(lab: &Lab, fleet: &mut FleetClient<Channel>, id: &str) -> u64 {
    let all = fleet.list_tokens(lab.by(&lab.admin, v1::ListTokensRequest {})).await.unwrap().into_inner();
    all.tokens.iter().find(|t| t.id == id).unwrap().expires
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_name_is_for_one_host_and_a_wrong_clock_changes_nothing() {
    let lab = Lab::new(false).await;
    let identity = lab.join("h1").await;
    let any = lab.token(v1::Token { role: v1::Role::Join.into(), ..Default::default() }).await;
    let again = lab.token(v1::Token { role: v1::Role::Join.into(), host: "h1".into(), ..Default::default() }).await;
    let h2 = lab.token(v1::Token { role: v1::Role::Join.into(), host: "h2".into(), ..Default::default() }).await;
    let mut h1 = Attached::new(lab.channel(Some(identity.clone())).await.unwrap(), 1).await.unwrap();
    assert!(h1.update().await.whole);
    let before = lab.revision().await;
    let mut hosts = HostsClient::new(lab.channel(None).await.unwrap());
    let key = KeyPair::generate().unwrap();
    let csr = CertificateParams::default().serialize_request(&key).unwrap().pem().unwrap();
    for (token, host, csr, code, what) in [
        (&any, "h1", csr.as_str(), Code::FailedPrecondition, "there is a host h1 already; choose another name"),
        (&again, "h1", &csr, Code::FailedPrecondition, "host h1 is connected: a host name is for one host"),
        (&h2, "h3", &csr, Code::PermissionDenied, "is for host h2, not for h3"),
        (&h2, "../h2", &csr, Code::InvalidArgument, "no host name"),
        (&h2, "h2", "", Code::InvalidArgument, ""),
        (
            &h2,
            "h2",
            "-----BEGIN CERTIFICATE REQUEST-----\nAAAA\n-----END CERTIFICATE REQUEST-----\n",
            Code::InvalidArgument,
            "",
        ),
        (
            &lab.admin,
            "h4",
            &csr,
            Code::PermissionDenied,
            "lets no host join: make one with `unirdma token create --role join`",
        ),
        (&String::new(), "h4", &csr, Code::Unauthenticated, "the token is not known here"),
    ] {
        let request = v1::JoinRequest { token: token.clone(), host: host.into(), request: csr.into() };
        let said = line(hosts.join(request).await, code);
        assert!(said.contains(what), "{said}");
    }
    assert_eq!(lab.revision().await, before, "no token is used up, and no host is made");

    // An hour in the future.
    let report = v1::Report { vrnics: Vec::new(), clock_ms: (now() + 3_600) * 1_000, pools: Vec::new() };
    h1.send.send(v1::FromHost { message: Some(from_host::Message::Report(report)) }).await.unwrap();
    let q = v1::GetRequest { kind: v1::Kind::Host.into(), ..Default::default() };
    let mut fleet = lab.fleet().await;
    for _ in 0..200 {
        let state = fleet.get(lab.by(&lab.admin, q.clone())).await.unwrap().into_inner().hosts.remove(0);
        if (3_590_000..3_610_000).contains(&state.clock_ms) {
            assert!(state.connected);
            assert_eq!(lab.revision().await, before);
            return;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("the centre does not see that the clock is wrong");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_sends_too_much_or_nothing_holds_up_nobody() {
    let lab = Lab::new(true).await;
    let silent: Vec<TcpStream> = (0..300).map(|_| TcpStream::connect(lab.address()).unwrap()).collect();
    let half = TcpStream::connect(lab.address()).unwrap();
    (&half).write_all(b"POST /api/v1/apply HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999\r\n").unwrap();
    let before = lab.revision().await;
    let (code, answer) = lab.http("POST /api/v1/apply", &lab.admin, &vec![b' '; (16 << 20) + 1]);
    assert!(code == 413 && answer.contains("longer than 16 MiB"), "{code} {answer}");
    let objects = (0..20_001).map(|_| vrnic("x", "default", "")).collect();
    let said = line(lab.apply(objects).await, Code::InvalidArgument);
    assert_eq!(said, "a call has at most 20000 objects, not 20001");
    assert_eq!(lab.revision().await, before);
    drop((silent, half));
}
