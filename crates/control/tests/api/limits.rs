//! Limits of each caller: connections, calls, and bytes under way. A caller that exceeds a limit excludes only itself.

use axum::body::{Body, Bytes};
use axum::http::{Request as Asked, Response as Answered};
use tokio::net::TcpSocket;
use tower::ServiceExt;

use super::*;

const MIB: usize = 1 << 20;
/// Limits of calls of a tenant's token, of connections of an unknown address, and of connections of an address that
/// reads metrics.
const CALLS: usize = 64;
const CONNECTIONS: usize = 512;
const SCRAPERS: usize = 8;

/// The sending end of a body. The body ends when this is dropped.
type Sender = mpsc::Sender<Result<Bytes, std::io::Error>>;

/// A call in progress.
type Answering = tokio::task::JoinHandle<Result<Answered<tonic::body::Body>, tonic::transport::Error>>;

/// Begins a gRPC call with an unfinished body.
fn begin(channel: &Channel, url: &str, call: &str, token: &str) -> (Sender, Answering) {
    let (send, receive) = mpsc::channel(1);
    let request = Asked::post(format!("{url}/unirdma.fleet.v1.{call}"))
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .header("authorization", format!("Bearer {token}"))
        .body(tonic::body::Body::new(Body::from_stream(ReceiverStream::new(receive))))
        .unwrap();
    let call = channel.clone().oneshot(request);
    (send, tokio::spawn(call))
}

/// The gRPC status in the head of an answer, which must arrive within 20 s.
async fn said(answer: Answering) -> Status {
    let answer = tokio::time::timeout(Duration::from_secs(20), answer).await.expect("no answer").unwrap().unwrap();
    Status::from_header_map(answer.headers()).expect("the call goes on")
}

/// The frame header of a message of this length.
fn head(length: usize) -> Bytes {
    [&[0][..], &u32::try_from(length).unwrap().to_be_bytes()].concat().into()
}

/// Sends at most `most` bytes of a longer message, until nobody reads for 1 s. Returns the number of bytes sent.
async fn feed(send: &Sender, most: usize) -> usize {
    let piece = Bytes::from(vec![b'\n'; MIB / 16]);
    let mut sent = 0;
    while sent < most
        && matches!(tokio::time::timeout(Duration::from_secs(1), send.send(Ok(piece.clone()))).await, Ok(Ok(())))
    {
        sent += piece.len();
    }
    sent
}

async fn tenant(lab: &Lab, id: &str) -> String {
    let groups = vec!["blue".into()];
    lab.token(v1::Token { id: id.into(), role: v1::Role::Tenant.into(), groups, ..Default::default() }).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_is_refused_by_its_head_before_its_body_comes() {
    let lab = Lab::new(false).await;
    let stranger = lab.channel(None).await.unwrap();
    for (call, code, line) in [
        ("Fleet/Apply", Code::Unauthenticated, "the token is not known here"),
        ("Fleet/Status", Code::Unauthenticated, "the token is not known here"),
        ("Hosts/Attach", Code::Unauthenticated, "needs the certificate"),
        ("Centres/Announce", Code::PermissionDenied, "only another centre"),
    ] {
        let (send, answer) = begin(&stranger, &lab.url, call, "admin.1234");
        let _ = send.send(Ok(head(15 * MIB))).await;
        let status = said(answer).await;
        assert!(status.code() == code && status.message().contains(line), "{call}: {status:?}");
        let taken = feed(&send, 15 * MIB).await;
        assert!(taken < 2 * MIB, "{call}: {taken} bytes were taken of a call that is refused");
    }
    // A join request has no header with a token: the token is in the body, which is limited to 32 KiB.
    let (send, answer) = begin(&stranger, &lab.url, "Hosts/Join", "");
    let _ = send.send(Ok(head(MIB))).await;
    assert!(feed(&send, MIB).await <= MIB);
    let status = said(answer).await;
    assert!(status.code() == Code::ResourceExhausted && status.message().contains("longer than 32 KiB"), "{status:?}");

    // HTTP/1.1: the server answers after the head, or after a whole body.
    let lab = Lab::new(true).await;
    let mut half = TcpStream::connect(lab.address()).unwrap();
    half.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    half.write_all(b"POST /api/v1/apply HTTP/1.1\r\nhost: x\r\ncontent-length: 9999999\r\n\r\n").unwrap();
    let mut answer = [0; 12];
    half.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"HTTP/1.1 401");
    let (code, answer) = lab.http("POST /api/v1/apply", "admin.1234", &vec![b' '; 5 * MIB]);
    assert!(code == 401 && answer.contains("the token is not known here"), "{code} {answer}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_body_that_is_cut_off_changes_nothing() {
    let lab = Lab::new(true).await;
    let before =
        lab.fleet().await.get(lab.by(&lab.admin, v1::GetRequest::default())).await.unwrap().into_inner().revision;
    let text = r#"{"objects":[{"group":{"name":"g","ranges":["10.0.0.0/16"]}}]}"#;
    let mut half = TcpStream::connect(lab.address()).unwrap();
    half.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let head_text = format!(
        "POST /api/v1/apply HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {}\r\ncontent-length: {}\r\n\r\n{text}",
        lab.admin,
        text.len() + 1
    );
    half.write_all(head_text.as_bytes()).unwrap();
    half.shutdown(std::net::Shutdown::Write).unwrap();
    let mut answer = String::new();
    let _ = half.read_to_string(&mut answer);
    assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 400") && answer.contains("cut off"), "{answer}");

    use prost::Message;
    let objects = vec![v1::Object { object: Some(group("g")), revision: 0 }];
    let message = v1::ApplyRequest { objects, ..Default::default() }.encode_to_vec();
    let channel = lab.channel(None).await.unwrap();
    for error in [false, true] {
        let (send, answer) = begin(&channel, &lab.url, "Fleet/Apply", &lab.admin);
        send.send(Ok(head(message.len() + 1))).await.unwrap();
        send.send(Ok(message.clone().into())).await.unwrap();
        if error {
            send.send(Err(std::io::ErrorKind::UnexpectedEof.into())).await.unwrap();
            assert!(answer.await.unwrap().is_err(), "the client has ended the call");
        } else {
            drop(send);
            assert_ne!(said(answer).await.code(), Code::Ok);
        }
    }
    let after =
        lab.fleet().await.get(lab.by(&lab.admin, v1::GetRequest::default())).await.unwrap().into_inner().revision;
    assert_eq!(before, after);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_has_too_many_bytes_under_way_keeps_out_itself_until_they_are_gone() {
    let lab = Lab::new(true).await;
    lab.apply(vec![group("blue")]).await.unwrap();
    let (one, two) = (tenant(&lab, "one").await, tenant(&lab, "two").await);
    let channel = lab.channel(None).await.unwrap();
    let mut held = Vec::new();
    for _ in 0..4 {
        let (send, answer) = begin(&channel, &lab.url, "Fleet/Apply", &one);
        send.send(Ok(head(16 * MIB))).await.unwrap();
        assert_eq!(feed(&send, 16 * MIB - MIB / 16).await, 16 * MIB - MIB / 16);
        held.push((send, answer));
    }
    // The token's limit is 64 MiB. A second connection does not raise it.
    let other = lab.channel(None).await.unwrap();
    let (send, answer) = begin(&other, &lab.url, "Fleet/Apply", &one);
    send.send(Ok(head(MIB))).await.unwrap();
    feed(&send, MIB).await;
    let status = said(answer).await;
    let line =
        "token one has the most bytes of requests and answers under way, 67108864; try again when some have ended";
    assert!(status.code() == Code::ResourceExhausted && status.message() == line, "{status:?}");
    let (code, answer) = lab.http("POST /api/v1/apply", &one, &vec![b' '; MIB]);
    assert!(code == 429 && answer.contains("token one has the most bytes"), "{code} {answer}");

    // Other callers are served.
    let put = || v1::ApplyRequest {
        objects: vec![v1::Object { object: Some(vrnic("x", "blue", "")), revision: 0 }],
        ..Default::default()
    };
    let mut fleet = FleetClient::new(other);
    fleet.apply(lab.by(&two, put())).await.unwrap();
    fleet.apply(lab.by(&lab.admin, put())).await.unwrap();
    let (code, answer) = lab.http("POST /api/v1/apply", &two, &[vec![b' '; MIB], b"{}".to_vec()].concat());
    assert_eq!(code, 200, "{answer}");

    // A short message that would take gigabytes once it is decoded is refused before decoding.
    let (send, answer) = begin(&channel, &lab.url, "Fleet/Apply", &two);
    let many = Bytes::from([0x0a, 0].repeat(MIB));
    send.send(Ok(head(many.len()))).await.unwrap();
    send.send(Ok(many)).await.unwrap();
    drop(send);
    let status = said(answer).await;
    assert!(status.code() == Code::ResourceExhausted && status.message().contains("too many parts"), "{status:?}");
    let (code, answer) =
        lab.http("POST /api/v1/apply", &two, format!("{{\"objects\":[{}{{}}]}}", "{},".repeat(MIB / 2)).as_bytes());
    assert!(code == 413 && answer.contains("too many parts"), "{code} {answer}");

    // Ended calls return their shares.
    drop(held);
    let text = [vec![b' '; MIB], b"{}".to_vec()].concat();
    wait_until(|| lab.http("POST /api/v1/apply", &one, &text).0 == 200).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_has_too_many_calls_under_way_keeps_out_itself_until_they_are_gone() {
    let lab = Lab::new(true).await;
    lab.apply(vec![group("blue")]).await.unwrap();
    let one = tenant(&lab, "one").await;
    let channel = lab.channel(None).await.unwrap();
    let calls: Vec<_> = (0..CALLS).map(|_| begin(&channel, &lab.url, "Fleet/Get", &one)).collect();
    let full = |status: u16, answer: &str| {
        status == 429 && answer.contains("token one has the most calls under way, 64; try again when some have ended")
    };
    wait_until(|| {
        let (code, answer) = lab.http("GET /api/v1/status", &one, b"");
        full(code, &answer)
    })
    .await;
    assert_eq!(lab.http("GET /api/v1/status", &lab.admin, b"").0, 200);
    drop(calls);
    wait_until(|| lab.http("GET /api/v1/status", &one, b"").0 == 200).await;
}

/// Connections from an address that send nothing.
async fn silent(from: &str, to: SocketAddr, n: usize) -> Vec<tokio::net::TcpStream> {
    let mut all = Vec::new();
    for _ in 0..n {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind(format!("{from}:0").parse().unwrap()).unwrap();
        all.push(socket.connect(to).await.unwrap());
    }
    all
}

/// The number of connections that the centre has closed.
async fn closed(all: &[tokio::net::TcpStream]) -> usize {
    let mut closed = 0;
    for stream in all {
        let gone = tokio::time::timeout(Duration::from_millis(2), stream.readable()).await.is_ok();
        closed += usize::from(
            gone && !matches!(stream.try_read(&mut [0]), Err(e) if e.kind() == std::io::ErrorKind::WouldBlock),
        );
    }
    closed
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_opens_too_many_connections_keeps_out_neither_others_nor_who_is_known() {
    let lab = Lab::with_metrics().await;
    let known = lab.join("h1").await;
    let mut h1 = Attached::new(lab.channel(Some(known)).await.unwrap(), 1).await.unwrap();
    assert!(h1.update().await.whole);
    let many = silent("127.0.0.2", lab.address(), CONNECTIONS + 50).await;
    // Exactly as many connections as one address may have stay open.
    wait_until_closed(&many, 50).await;
    lab.apply(vec![group("blue"), vrnic("a", "blue", "h1")]).await.unwrap();
    assert!(!h1.update().await.put.is_empty(), "who is known goes on");
    // After three seconds, the oldest connection is closed in favour of a new one of the same address, which may belong
    // to a token.
    tokio::time::sleep(Duration::from_secs(3)).await;
    let next = silent("127.0.0.2", lab.address(), 1).await;
    wait_until_closed(&many, 51).await;
    assert_eq!(closed(&next).await, 0);

    let at = lab.metrics.unwrap();
    let scrapers = silent("127.0.0.2", at, SCRAPERS + 5).await;
    wait_until_closed(&scrapers, 5).await;
    let mut stream = TcpStream::connect(at).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    // The server does not wait for a body.
    write!(stream, "GET /metrics HTTP/1.1\r\nhost: x\r\ncontent-length: 99999\r\n\r\n").unwrap();
    let mut answer = [0; 15];
    stream.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"HTTP/1.1 200 OK");
}

async fn wait_until_closed(all: &[tokio::net::TcpStream], n: usize) {
    for _ in 0..100 {
        if closed(all).await == n {
            return;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("not {n} of {} connections were closed, but {}", all.len(), closed(all).await);
}
