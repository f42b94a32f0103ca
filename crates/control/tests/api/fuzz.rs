//! Sends random and nearly valid messages to every call. The calls are taken from the compiled .proto file and from the
//! OpenAPI document, so new calls are included automatically. Messages are made from the descriptors of their fields;
//! some are then corrupted.

use std::pin::Pin;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use axum::body::{Body, HttpBody};
use axum::http::Request;
use prost::Message;
use prost_types::field_descriptor_proto::{Label, Type};
use prost_types::{DescriptorProto, EnumDescriptorProto, FieldDescriptorProto, FileDescriptorProto, FileDescriptorSet};
use tonic::transport::Channel;
use tower::ServiceExt;

use super::*;

/// How often each call is tried. `UNIRDMA_FUZZ_ROUNDS` sets another number, for runs of hours.
const ROUNDS: usize = 25;
/// Time limit for an answer.
const PATIENCE: Duration = Duration::from_secs(20);
/// Most growth of this process's memory, which includes the centre's.
const MOST_KIB: u64 = 256 << 10;
/// Words for nearly valid messages.
const WORDS: [&str; 28] = [
    "",
    "a",
    "b",
    "blue",
    "red",
    "default",
    "h1",
    "h2",
    "default.x",
    "10.0.0.0/16",
    "10.0.0.7",
    "10.0.0.1/16",
    "10.0.255.255",
    "fd00::/64",
    "fd00::1",
    "0.0.0.0/0",
    "::ffff:10.0.0.1",
    "255.255.255.255",
    "group:blue",
    "group:red",
    "vrnic:a",
    "vrnic:",
    ":",
    "../../x",
    "\u{0}\n",
    "\u{202e}é",
    "-----BEGIN CERTIFICATE REQUEST-----\nAAAA\n-----END CERTIFICATE REQUEST-----\n",
    "00:11:22:33:44:55",
];
const NUMBERS: [u64; 12] =
    [0, 1, 2, 3, 100, 255, 65_535, 65_536, 0xff_ffff, u32::MAX as u64, i64::MAX as u64, u64::MAX];

/// Pseudo-random numbers, the same in each run.
struct Dice(u64);

impl Dice {
    /// A number below `n`.
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % n as u64) as usize
    }

    /// True in one of `n` cases.
    fn once_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    fn of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len())]
    }

    fn bytes(&mut self, most: usize) -> Vec<u8> {
        (0..self.below(most + 1)).map(|_| self.below(256) as u8).collect()
    }
}

/// The messages of the .proto files.
struct Proto(Vec<FileDescriptorProto>);

const PACKAGE: &str = ".unirdma.fleet.v1.";

impl Proto {
    fn new() -> Proto {
        let set = FileDescriptorSet::decode(unirdma_fleet::DESCRIPTORS).unwrap();
        Proto(set.file.into_iter().filter(|f| f.package() == PACKAGE.trim_matches('.')).collect())
    }

    fn message(&self, name: &str) -> &DescriptorProto {
        let name = name.strip_prefix(PACKAGE).unwrap();
        let mut all = self.0.iter().flat_map(|f| &f.message_type);
        all.find(|m| m.name() == name).unwrap_or_else(|| panic!("no message {name}"))
    }

    fn enumeration(&self, name: &str) -> &EnumDescriptorProto {
        let name = name.strip_prefix(PACKAGE).unwrap();
        let messages = self.0.iter().flat_map(|f| &f.message_type);
        let inner = messages.flat_map(|m| m.enum_type.iter().map(move |e| (m.name(), e)));
        let mut all = self.0.iter().flat_map(|f| &f.enum_type).map(|e| ("", e)).chain(inner);
        let found = all.find(|(m, e)| name == e.name() || name == format!("{m}.{}", e.name()));
        found.unwrap_or_else(|| panic!("no enumeration {name}")).1
    }

    /// How often a field is put into a message.
    fn count(dice: &mut Dice, field: &FieldDescriptorProto, depth: usize) -> usize {
        match (field.label(), field.r#type()) {
            (_, Type::Message) if depth == 0 => 0,
            (Label::Repeated, _) => dice.below(4),
            _ => usize::from(!dice.once_in(3)),
        }
    }

    /// A binary message. Each field has a plausible value.
    fn wire(&self, dice: &mut Dice, name: &str, depth: usize) -> Vec<u8> {
        use prost::encoding::encode_varint;
        let mut out = Vec::new();
        for field in &self.message(name).field {
            for _ in 0..Self::count(dice, field, depth) {
                let number = u64::from(field.number.unwrap_or_default().unsigned_abs()) << 3;
                let value = match field.r#type() {
                    Type::Message => self.wire(dice, field.type_name(), depth - 1),
                    Type::String | Type::Bytes if dice.once_in(12) => dice.bytes(40),
                    Type::String | Type::Bytes => dice.of(&WORDS).as_bytes().to_vec(),
                    _ => {
                        encode_varint(number, &mut out);
                        encode_varint(self.number(dice, field), &mut out);
                        continue;
                    }
                };
                encode_varint(number | 2, &mut out);
                encode_varint(value.len() as u64, &mut out);
                out.extend(value);
            }
        }
        out
    }

    fn number(&self, dice: &mut Dice, field: &FieldDescriptorProto) -> u64 {
        match field.r#type() {
            Type::Enum if !dice.once_in(8) => dice.below(self.enumeration(field.type_name()).value.len()) as u64,
            Type::Bool => dice.below(2) as u64,
            _ => dice.of(&NUMBERS),
        }
    }

    /// A message as JSON.
    fn json(&self, dice: &mut Dice, name: &str, depth: usize) -> serde_json::Value {
        let mut fields = serde_json::Map::new();
        for field in &self.message(name).field {
            let count = Self::count(dice, field, depth);
            let mut values: Vec<_> = (0..count).map(|_| self.json_value(dice, field, depth)).collect();
            if field.label() == Label::Repeated {
                fields.insert(field.json_name().into(), values.into());
            } else if let Some(value) = values.pop() {
                fields.insert(field.json_name().into(), value);
            }
        }
        if dice.once_in(12) {
            fields.insert("x".into(), dice.below(9).into());
        }
        fields.into()
    }

    fn json_value(&self, dice: &mut Dice, field: &FieldDescriptorProto, depth: usize) -> serde_json::Value {
        if dice.once_in(12) {
            // A value of a wrong type.
            return dice.of::<fn() -> serde_json::Value>(&[
                || serde_json::Value::Null,
                || serde_json::json!([[[]]]),
                || serde_json::json!({ "name": 1 }),
                || serde_json::json!(-1.5e300),
                || serde_json::json!("\u{0}"),
            ])();
        }
        match field.r#type() {
            Type::Message => self.json(dice, field.type_name(), depth - 1),
            Type::Bool => (dice.below(2) == 1).into(),
            Type::String | Type::Bytes => dice.of(&WORDS).into(),
            Type::Enum if !dice.once_in(8) => {
                let all = &self.enumeration(field.type_name()).value;
                all[dice.below(all.len())].name().into()
            }
            _ => match (dice.of(&NUMBERS), dice.below(2)) {
                (n, 0) => n.into(),
                (n, _) => n.to_string().into(),
            },
        }
    }
}

/// Changes some bytes.
fn spoil(dice: &mut Dice, bytes: &mut Vec<u8>) {
    for _ in 0..1 + dice.below(4) {
        let at = dice.below(bytes.len() + 1);
        match dice.below(4) {
            0 => bytes.truncate(at),
            1 => bytes.insert(at, dice.below(256) as u8),
            2 if at < bytes.len() => bytes[at] ^= 1 << dice.below(8),
            _ => bytes.extend(dice.bytes(8)),
        }
    }
}

/// A message in a gRPC frame, whose length is sometimes wrong.
fn frame(dice: &mut Dice, message: &[u8]) -> Vec<u8> {
    let length = match dice.below(24) {
        0 => u32::MAX,
        1 => message.len() as u32 + 1,
        2 => (message.len() as u32).saturating_sub(1),
        _ => message.len() as u32,
    };
    let mut out = vec![u8::from(dice.once_in(24))];
    out.extend(length.to_be_bytes());
    out.extend(message);
    out
}

/// An answer: the HTTP status, the gRPC status if there is one, and the body.
struct Answer {
    http: u16,
    grpc: Option<String>,
    body: Vec<u8>,
}

/// Makes a call, and reads its answer to the end. If the answer `goes_on`, reads until it pauses.
async fn call(channel: &Channel, request: Request<Body>, goes_on: bool) -> Answer {
    let what = format!("{} {}", request.method(), request.uri());
    let begun = Instant::now();
    let sent = channel.clone().oneshot(request.map(tonic::body::Body::new));
    let answer = tokio::time::timeout(PATIENCE, sent).await.unwrap_or_else(|_| panic!("{what}: no answer"));
    let answer = answer.unwrap_or_else(|e| panic!("{what}: the connection is lost: {e:?}"));
    let said = |h: &axum::http::HeaderMap| h.get("grpc-status").map(|v| v.to_str().unwrap().to_owned());
    let mut found = Answer { http: answer.status().as_u16(), grpc: said(answer.headers()), body: Vec::new() };
    let mut body = answer.into_body();
    loop {
        let next = std::future::poll_fn(|cx| Pin::new(&mut body).poll_frame(cx));
        let limit = if goes_on { Duration::from_millis(20) } else { PATIENCE };
        match tokio::time::timeout(limit, next).await {
            Err(_) if goes_on => break,
            Err(_) => panic!("{what}: the answer does not end"),
            Ok(Some(Ok(frame))) => match frame.into_data() {
                Ok(data) => found.body.extend(data),
                Err(frame) => found.grpc = frame.into_trailers().ok().and_then(|t| said(&t)).or(found.grpc),
            },
            Ok(Some(Err(_)) | None) => break,
        }
    }
    assert!(begun.elapsed() < PATIENCE, "{what} took {:?}", begun.elapsed());
    found
}

/// The newest change made with a token. Changes of the centre itself are ignored, and hosts' changes, which may still
/// come.
async fn newest(lab: &Lab, fleet: &mut FleetClient<Channel>) -> u64 {
    let entries = fleet.audit(lab.by(&lab.admin, v1::AuditRequest { limit: 300, before: 0 })).await.unwrap();
    let by_token = |e: &&v1::AuditEntry| e.who != "centre" && !e.who.starts_with("host ");
    entries.into_inner().entries.iter().find(by_token).map_or(0, |e| e.revision)
}

fn resident_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|l| l.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

fn rounds() -> usize {
    std::env::var("UNIRDMA_FUZZ_ROUNDS").ok().map_or(ROUNDS, |n| n.parse().unwrap())
}

/// Counts panics of this process. The centre's tasks run in it and would hide their panics.
fn panics() -> &'static AtomicU32 {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            COUNT.fetch_add(1, Ordering::Relaxed);
            before(info);
        }));
    });
    &COUNT
}

async fn fleet_of_two() -> (Lab, Channel, Channel) {
    let lab = Lab::new(false).await;
    let identity = lab.join("h1").await;
    lab.join("h2").await;
    lab.apply(objects()).await.unwrap();
    let (admin, host) = (lab.channel(None).await.unwrap(), lab.channel(Some(identity)).await.unwrap());
    (lab, admin, host)
}

/// Objects applied at the beginning of each round, unless they contradict the state left by the round before.
fn objects() -> Vec<Object> {
    let host = |name: &str| v1::Host { name: name.into(), ..Default::default() }.into();
    let rule = v1::Rule { name: "r".into(), from: "group:blue".into(), to: "vrnic:b".into(), ..Default::default() };
    // The rule joins both groups, so they must not have a common address.
    let b = v1::Vrnic { name: "b".into(), group: "red".into(), ips: vec!["10.0.5.5".into()], ..Default::default() };
    vec![host("h1"), host("h2"), group("blue"), group("red"), vrnic("a", "blue", "h1"), b.into(), rule.into()]
}

/// The centre can load the resulting state again: calls created only records that the store may have.
async fn can_be_loaded_again(lab: Lab, mut fleet: FleetClient<Channel>) {
    let request = || v1::GetRequest { kind: v1::Kind::Vrnic.into(), ..Default::default() };
    let before = fleet.get(lab.by(&lab.admin, request())).await.unwrap().into_inner();
    drop(fleet);
    let lab = lab.restart().await;
    let after = lab.fleet().await.get(lab.by(&lab.admin, request())).await.unwrap().into_inner();
    assert_eq!((before.objects, before.revision), (after.objects, after.revision));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_message_of_grpc_breaks_the_centre() {
    let (before, panics_before) = (resident_kib(), panics().load(Ordering::Relaxed));
    let (proto, mut dice) = (Proto::new(), Dice(1));
    let (lab, admin, host) = fleet_of_two().await;
    let mut fleet = lab.fleet().await;
    let centre = lab.channel(Some(lab.centre())).await.unwrap();
    let services = || proto.0.iter().flat_map(|f| &f.service);
    let calls = || services().flat_map(|s| s.method.iter().map(move |m| (s.name(), m)));
    assert!(calls().count() >= 16);
    let (mut done, mut refused, mut by_centres) = (0, 0, 0);
    let csr = CertificateParams::default().serialize_request(&KeyPair::generate().unwrap()).unwrap().pem().unwrap();
    for round in 0..rounds() {
        let _ = lab.apply(objects()).await;
        let join = lab.token(v1::Token { role: v1::Role::Join.into(), ..Default::default() }).await;
        for (service, method) in calls() {
            let streamed = 1 + if method.client_streaming() { dice.below(6) } else { 0 };
            let mut body = Vec::new();
            for n in 0..streamed {
                let mut message = match (method.name(), n) {
                    // After a valid Hello, the centre reads further messages.
                    ("Attach", 0) if !dice.once_in(4) => {
                        v1::FromHost { message: Some(from_host::Message::Hello(hello())) }.encode_to_vec()
                    }
                    ("Announce", _) if !dice.once_in(4) => {
                        v1::HostHello { host: dice.of(&["h1", "h7", ""]).into(), hello: Some(hello()) }.encode_to_vec()
                    }
                    ("Join", _) if !dice.once_in(4) => {
                        let host = dice.of(&["h1", "h7", "h8", "../x", ""]).into();
                        v1::JoinRequest { token: join.clone(), host, request: csr.clone() }.encode_to_vec()
                    }
                    _ => proto.wire(&mut dice, method.input_type(), 5),
                };
                match dice.below(6) {
                    0 => spoil(&mut dice, &mut message),
                    1 => message = dice.bytes(200),
                    _ => {}
                }
                body.extend(frame(&mut dice, &message));
            }
            let path = format!("{}/unirdma.fleet.v1.{service}/{}", lab.url, method.name());
            let request = Request::post(&path)
                .header("content-type", "application/grpc")
                .header("te", "trailers")
                .header("authorization", format!("Bearer {}", lab.admin))
                .body(Body::from(body))
                .unwrap();
            let revision = newest(&lab, &mut fleet).await;
            let caller = match service {
                _ if dice.once_in(8) => dice.of(&[&admin, &host, &centre]),
                "Hosts" => &host,
                "Centres" => &centre,
                _ => &admin,
            };
            let answer = call(caller, request, method.server_streaming()).await;
            let place = format!("round {round}, {path}");
            assert_eq!(answer.http, 200, "{place}");
            let now = newest(&lab, &mut fleet).await;
            by_centres += u32::from(service == "Centres" && answer.grpc.as_deref() == Some("0"));
            match answer.grpc.as_deref() {
                Some("0") | None => done += 1,
                Some(_) => {
                    assert_eq!(now, revision, "{place}: what was refused has changed something");
                    refused += 1;
                }
            }
        }
    }
    assert!(done > rounds() && refused > rounds(), "{done} done, {refused} refused: they are all of one kind");
    assert!(by_centres > 0, "a centre may not even say what a host says");
    assert_eq!(panics().load(Ordering::Relaxed), panics_before);
    assert!(resident_kib() < before + MOST_KIB, "{} KiB, and {before} KiB before", resident_kib());
    drop((admin, host, centre));
    can_be_loaded_again(lab, fleet).await;
}

fn hello() -> v1::Hello {
    let addresses = vec!["192.168.7.1".into()];
    v1::Hello { protocol: 1, instance: 7, addresses, version: "fuzz".into(), ..Default::default() }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_message_of_json_breaks_the_centre() {
    let (before, panics_before) = (resident_kib(), panics().load(Ordering::Relaxed));
    let (proto, mut dice) = (Proto::new(), Dice(2));
    let (lab, admin, _host) = fleet_of_two().await;
    let mut fleet = lab.fleet().await;
    let document = Request::get(format!("{}/api/v1/openapi.json", lab.url)).body(Body::empty()).unwrap();
    let document: serde_json::Value = serde_json::from_slice(&call(&admin, document, false).await.body).unwrap();
    let calls: Vec<(&String, &String, &serde_json::Value)> = document["paths"]
        .as_object()
        .unwrap()
        .iter()
        .flat_map(|(path, verbs)| verbs.as_object().unwrap().iter().map(move |(verb, o)| (verb, path, o)))
        .collect();
    assert!(calls.len() >= 14);
    let words =
        ["a", "b", "blue", "vrnic", "group", "rule", "host", "cable", "%00", "%ff%fe", "..", "h1", "token-1", "x%2fy"];
    let (mut done, mut refused) = (0, 0);
    for round in 0..rounds() {
        let _ = lab.apply(objects()).await;
        for (verb, path, operation) in &calls {
            let filled: Vec<String> =
                path.split('/').map(|p| if p.starts_with('{') { dice.of(&words).into() } else { p.into() }).collect();
            let named = operation["parameters"].as_array().into_iter().flatten();
            let mut query: Vec<String> = Vec::new();
            for p in named.filter(|p| p["in"] == "query" && p["name"] != "dryRun") {
                if dice.once_in(3) {
                    query.push(format!(
                        "{}={}",
                        p["name"].as_str().unwrap(),
                        dice.of(&["1", "true", "a", "-1", "VRNIC", "%00"])
                    ));
                }
            }
            let reference = &operation["requestBody"]["content"]["application/json"]["schema"]["$ref"];
            let body = match reference.as_str().and_then(|r| r.rsplit('/').next()) {
                Some(name) => {
                    let mut text = proto.json(&mut dice, &format!("{PACKAGE}{name}"), 5).to_string().into_bytes();
                    match dice.below(8) {
                        0 => spoil(&mut dice, &mut text),
                        1 => text = dice.bytes(200),
                        2 => text = b"[".repeat(100_000),
                        _ => {}
                    }
                    text
                }
                None => dice.bytes(20),
            };
            let uri = format!("{}{}?{}", lab.url, filled.join("/"), query.join("&"));
            let request = Request::builder()
                .method(verb.to_uppercase().as_str())
                .uri(&uri)
                .header("authorization", format!("Bearer {}", lab.admin))
                .body(Body::from(body))
                .unwrap();
            let revision = newest(&lab, &mut fleet).await;
            let answer = call(&admin, request, path.ends_with("/watch")).await;
            let text = String::from_utf8_lossy(&answer.body);
            let place = format!("round {round}, {verb} {uri}: {} {text}", answer.http);
            if answer.http == 200 {
                done += 1;
            } else {
                refused += 1;
                assert!((400..500).contains(&answer.http), "{place}");
                let now = newest(&lab, &mut fleet).await;
                assert_eq!(now, revision, "what was refused has changed something: {place}");
                let line = serde_json::from_slice::<serde_json::Value>(&answer.body)
                    .ok()
                    .and_then(|v| v["error"].as_str().map(str::to_owned))
                    .unwrap_or_else(|| panic!("not a line of JSON: {place}"));
                assert!(!line.is_empty() && !line.contains(['\n', '\0']) && line.len() < 1_000, "{place}");
            }
        }
    }
    assert!(done > rounds() && refused > rounds(), "{done} done, {refused} refused: they are all of one kind");
    assert_eq!(panics().load(Ordering::Relaxed), panics_before);
    assert!(resident_kib() < before + MOST_KIB, "{} KiB, and {before} KiB before", resident_kib());
    drop((admin, _host));
    can_be_loaded_again(lab, fleet).await;
}
