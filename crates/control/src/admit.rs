//! Checks before a call is served, for both interfaces. The head of the request tells who calls. Then the body is read
//! within a length limit, a time limit, and the caller's limit of bytes under way. A call that is not admitted costs no
//! more than its head, and no unfinished body stays in memory.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use axum::extract::{Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, StatusCode, Version, header};
use axum::middleware::Next;
use axum::response::Response;
use http_body_util::BodyExt;
use hyper::body::{Frame, SizeHint};
use prost::bytes::BytesMut;
use tonic::{Code, Status};
use unirdma_fleet::Refusal;

use crate::connections::Guest;
use crate::errors::{self, http_status};
use crate::message_cost;
use crate::pki::Caller;
use crate::rate_limits::{Party, Share};
use crate::shared::Shared;

/// Longest body of `apply` and `delete`, and of all other calls with a token.
pub(crate) const MAX_BODY: usize = 16 << 20;
const SMALL_BODY: usize = 256 << 10;
/// Longest message of a host, and of another centre.
pub(crate) const MAX_HOST_MESSAGE: usize = 8 << 20;
/// Longest message of a host that joins, which has no certificate yet.
const MAX_JOIN: usize = 32 << 10;
/// Bytes before each message of gRPC: whether it is compressed, and its length.
const FRAME: usize = 5;

/// Longest name of a host.
const MAX_NAME: usize = 64;

/// The most memory that a message may take once it is decoded, bytes: see [`message_cost`].
const MAX_WEIGHT: usize = 64 << 20;

/// Time limit for reading a body.
const PATIENCE: Duration = Duration::from_secs(30);
/// How long the rest of a refused call's body is read and dropped. An HTTP/1.1 client reads no answer before it has
/// sent everything.
const LINGER: Duration = Duration::from_secs(5);

/// The bearer token of a call.
pub(crate) fn token(headers: &HeaderMap) -> Option<&str> {
    headers.get(header::AUTHORIZATION)?.to_str().ok()?.strip_prefix("Bearer ")
}

/// How a caller must authenticate itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pass {
    /// Not at all. Credentials may be in the body.
    None,
    Token,
    Host,
    Centre,
}

/// Properties of a call that follow from its address: required authentication, and the longest body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Kind {
    pass: Pass,
    /// Longest body, bytes. `None`: the body is a stream of messages, each of which is read as it comes.
    most: Option<usize>,
    grpc: bool,
}

impl Kind {
    /// The kind of the call at an address. Calls that are not named here take a token and a small body.
    fn of(path: &str) -> Kind {
        if let Some(call) = path.strip_prefix("/unirdma.fleet.v1.") {
            let (pass, most) = match call {
                "Hosts/Join" => (Pass::None, Some(MAX_JOIN)),
                "Hosts/Attach" => (Pass::Host, None),
                "Fleet/Apply" | "Fleet/Delete" => (Pass::Token, Some(MAX_BODY)),
                _ if call.starts_with("Centres/") => (Pass::Centre, Some(MAX_HOST_MESSAGE)),
                _ => (Pass::Token, Some(SMALL_BODY)),
            };
            return Kind { pass, most: most.map(|n| n + FRAME), grpc: true };
        }
        let (pass, most) = match path.strip_prefix("/api/v1/") {
            // The web page, and the OpenAPI document.
            None | Some("openapi.json") => (Pass::None, 0),
            Some("apply" | "delete") => (Pass::Token, MAX_BODY),
            Some(_) => (Pass::Token, SMALL_BODY),
        };
        Kind { pass, most: Some(most), grpc: false }
    }
}

/// Why a call is not admitted.
#[derive(Debug, PartialEq, Eq)]
enum Stop {
    Refused(Refusal),
    TooLong(usize),
    TooMuch,
    Late,
    CutOff,
}

impl From<Refusal> for Stop {
    fn from(e: Refusal) -> Self {
        Stop::Refused(e)
    }
}

impl Stop {
    /// The answer to the caller, for HTTP and for gRPC.
    fn said(self) -> (StatusCode, Status) {
        let (http, code, line) = match self {
            Stop::Refused(e) => return (http_status(&e), errors::status(&e)),
            Stop::TooLong(most) => {
                let most = if most < 1 << 20 { format!("{} KiB", most >> 10) } else { format!("{} MiB", most >> 20) };
                let line = format!("the body is longer than {most}; make several calls of it");
                (StatusCode::PAYLOAD_TOO_LARGE, Code::ResourceExhausted, line)
            }
            Stop::TooMuch => {
                let line = "the body has too many parts; make several calls of it".into();
                (StatusCode::PAYLOAD_TOO_LARGE, Code::ResourceExhausted, line)
            }
            Stop::Late => {
                let line = format!("the body did not come within {} s; call again", PATIENCE.as_secs());
                (StatusCode::REQUEST_TIMEOUT, Code::DeadlineExceeded, line)
            }
            Stop::CutOff => (StatusCode::BAD_REQUEST, Code::Aborted, "the body was cut off; call again".into()),
        };
        (http, Status::new(code, line))
    }
}

/// Middleware: admits a call and passes it on to its handler.
pub(crate) async fn admit(State(shared): State<Arc<Shared>>, request: Request, next: Next) -> Response {
    let kind = Kind::of(request.uri().path());
    let admitted = admitted(&shared, kind, request, next).await;
    admitted.unwrap_or_else(|stop| match stop.said() {
        (_, status) if kind.grpc => status.into_http(),
        (code, status) => errors::said(code, status.message()),
    })
}

async fn admitted(shared: &Shared, kind: Kind, request: Request, next: Next) -> Result<Response, Stop> {
    let (mut parts, body) = request.into_parts();
    let (party, call, mut held) = match begin(shared, kind, &parts) {
        Ok(begun) => begun,
        Err(e) => {
            linger(&parts, body);
            return Err(e.into());
        }
    };
    let body = match kind.most {
        None => {
            let (call, held) = (parts.uri.path().into(), shared.under_way.bytes(&party)?);
            Body::new(Messages { call, body, held, coming: BytesMut::new() })
        }
        // The page and the document take no body, so a body is not read.
        Some(0) => Body::empty(),
        Some(most) => {
            let mut bytes = whole(&parts, body, most, &mut held, PATIENCE).await?;
            if kind.grpc {
                // Cuts off messages behind the first one. They would be decoded and dropped.
                let end = FRAME + message_of(&bytes).len();
                bytes.truncate(end);
            }
            let weight = match kind.grpc {
                true => message_cost::of_call(parts.uri.path(), message_of(&bytes)),
                false => message_cost::of_json(&bytes),
            };
            weigh(&mut held, bytes.len(), weight)?;
            Body::from(bytes)
        }
    };
    parts.extensions.insert(party);
    let response = next.run(Request::from_parts(parts, body)).await;
    Ok(response.map(|body| Body::new(Answer { body, held, _call: call })))
}

/// Authenticates the caller by the request's head and charges it one call.
fn begin(shared: &Shared, kind: Kind, parts: &Parts) -> Result<(Party, Share, Share), Refusal> {
    let guest =
        parts.extensions.get::<Arc<Guest>>().ok_or_else(|| Refusal::denied("the call came by no connection"))?;
    let caller = parts.extensions.get::<Caller>().unwrap_or(&Caller::Anybody);
    // Without TLS, which is on loopback only, hosts and centres say who they are.
    let plain = shared.authority.is_none();
    let party = match (kind.pass, caller) {
        (Pass::None, _) => guest.stranger(),
        (Pass::Token, _) => shared.actor(token(&parts.headers)).map(|actor| match actor.is_admin() {
            true => Party::Admin(actor.who().into()),
            false => Party::Token(actor.who().into()),
        })?,
        (Pass::Host, Caller::Host(name)) => Party::Host(name.clone()),
        (Pass::Host, _) if plain => {
            let name = parts.headers.get("unirdma-host").and_then(|v| v.to_str().ok()).filter(|n| n.len() <= MAX_NAME);
            let needs = || Refusal::unknown("a host without TLS says its name as `unirdma-host: NAME`");
            Party::Host(name.ok_or_else(needs)?.into())
        }
        (Pass::Host, _) => {
            let text = "a host needs the certificate that it gets when it joins: `unirdma host --centre --token`";
            return Err(Refusal::unknown(text));
        }
        (Pass::Centre, Caller::Centre) => Party::Centre,
        (Pass::Centre, _) if plain => Party::Centre,
        (Pass::Centre, _) => {
            return Err(Refusal::denied("only another centre of the fleet, by its certificate, may call this"));
        }
    };
    // `Shared::actor` counts its refusals itself.
    let counted = |e: &Refusal| shared.metrics.refused(e);
    if kind.pass != Pass::None {
        guest.is_of(&party).inspect_err(counted)?;
    }
    let call = shared.under_way.call(&party).inspect_err(counted)?;
    Ok((party.clone(), call, shared.under_way.bytes(&party)?))
}

/// Reads a whole body, and charges each part when it arrives.
async fn whole(
    parts: &Parts,
    mut body: Body,
    most: usize,
    held: &mut Share,
    patience: Duration,
) -> Result<Bytes, Stop> {
    let read = async {
        let mut all = Vec::new();
        while let Some(frame) = body.frame().await {
            let Ok(data) = frame.map_err(|_| Stop::CutOff)?.into_data() else { continue };
            if data.len() > most - all.len() {
                return Err(Stop::TooLong(most));
            }
            held.add(data.len())?;
            all.extend_from_slice(&data);
        }
        Ok(Bytes::from(all))
    };
    let done = tokio::time::timeout(patience, read).await.unwrap_or(Err(Stop::Late));
    if let Err(Stop::TooLong(_) | Stop::Refused(_)) = done {
        linger(parts, body);
    }
    done
}

/// Reads the rest of a body whose call was refused, for a while.
fn linger(parts: &Parts, mut body: Body) {
    if parts.version < Version::HTTP_2 && !body.is_end_stream() {
        tokio::spawn(tokio::time::timeout(LINGER, async move { while let Some(Ok(_)) = body.frame().await {} }));
    }
}

/// The first message of a gRPC body; cut short if the body is incomplete.
fn message_of(body: &[u8]) -> &[u8] {
    let message = body.get(FRAME..).unwrap_or_default();
    &message[..length_of(body).unwrap_or_default().min(message.len())]
}

/// Length of the next message; `None` if its frame header is incomplete.
fn length_of(coming: &[u8]) -> Option<usize> {
    let [_, length @ ..] = coming.first_chunk::<FRAME>()?;
    usize::try_from(u32::from_be_bytes(*length)).ok()
}

/// Charges a body for its own length and the memory that its message takes once it is decoded.
fn weigh(held: &mut Share, length: usize, weight: usize) -> Result<(), Stop> {
    if weight > MAX_WEIGHT {
        return Err(Stop::TooMuch);
    }
    Ok(held.hold(length + weight)?)
}

/// A stream of messages. Each is passed on as soon as it is complete.
struct Messages {
    call: String,
    body: Body,
    held: Share,
    coming: BytesMut,
}

impl Messages {
    /// The next message; `None` if it is incomplete.
    fn next(&mut self) -> Result<Option<Bytes>, Stop> {
        let Some(length) = length_of(&self.coming) else { return Ok(None) };
        if length > MAX_HOST_MESSAGE {
            return Err(Stop::TooLong(MAX_HOST_MESSAGE));
        }
        if self.coming.len() < FRAME + length {
            return Ok(None);
        }
        let message = self.coming.split_to(FRAME + length).freeze();
        let weight = message_cost::of_call(&self.call, &message[FRAME..]);
        weigh(&mut self.held, self.coming.len() + message.len(), weight)?;
        Ok(Some(message))
    }
}

impl HttpBody for Messages {
    type Data = Bytes;
    type Error = axum::BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::BoxError>>> {
        // The reader asks for the next message only when it has taken the one before, so that one is no longer charged.
        let mut left = self.coming.len();
        loop {
            self.held.hold(left).map_err(|e| errors::status(&e))?;
            if let Some(message) = self.next().map_err(|stop| stop.said().1)? {
                return Poll::Ready(Some(Ok(Frame::data(message))));
            }
            match ready!(Pin::new(&mut self.body).poll_frame(cx)) {
                Some(frame) => _ = frame?.into_data().map(|data| self.coming.extend_from_slice(&data)),
                // An incomplete message at the end is passed on: the decoder reports the error.
                None if left > 0 => return Poll::Ready(Some(Ok(Frame::data(self.coming.split().freeze())))),
                None => return Poll::Ready(None),
            }
            left = self.coming.len();
        }
    }
}

/// An answer. The part that the caller has not taken yet is charged.
struct Answer {
    body: Body,
    held: Share,
    _call: Share,
}

impl HttpBody for Answer {
    type Data = Bytes;
    type Error = axum::BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::BoxError>>> {
        let Some(frame) = ready!(Pin::new(&mut self.body).poll_frame(cx)) else { return Poll::Ready(None) };
        let frame = frame?;
        // The next part is requested when the caller has taken this one. The length of a part depends on the fleet, not
        // on the reader, so at most `MAX_BODY` of it is charged.
        let part = frame.data_ref().map_or(0, Bytes::len).min(MAX_BODY);
        self.held.hold(part).map_err(|e| errors::status(&e))?;
        Poll::Ready(Some(Ok(frame)))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rate_limits::UnderWay;

    #[tokio::test]
    async fn messages_of_a_stream_come_whole_however_they_are_cut() {
        let under_way = UnderWay::new();
        let party = Party::Host("h".into());
        let frame = |n: usize| [&[0][..], &u32::try_from(n).unwrap().to_be_bytes(), &vec![7; n]].concat();
        let stream = [3, 0, 300, 1].map(frame).concat();
        let messages = |parts: Vec<Vec<u8>>| {
            let parts = tokio_stream::iter(parts.into_iter().map(Ok::<_, std::io::Error>));
            let call = "/unirdma.fleet.v1.Hosts/Attach".into();
            Messages {
                call,
                body: Body::from_stream(parts),
                held: under_way.bytes(&party).unwrap(),
                coming: BytesMut::new(),
            }
        };
        for piece in [1, 2, 5, 7, 100, stream.len()] {
            let mut m = messages(stream.chunks(piece).map(<[u8]>::to_vec).collect());
            for n in [3, 0, 300, 1] {
                assert_eq!(m.frame().await.unwrap().unwrap().into_data().unwrap(), frame(n), "pieces of {piece}");
                assert!(m.held.amount() > n + FRAME);
            }
            assert!(m.frame().await.is_none());
            assert_eq!(m.held.amount(), 0);
        }
        // A part of a message is charged, and passed on at the end, where it is an error.
        let mut m = messages(vec![frame(300)[..100].to_vec()]);
        assert_eq!(m.frame().await.unwrap().unwrap().into_data().unwrap().len(), 100);
        assert_eq!(m.held.amount(), 100);
        let code = |e: axum::BoxError| e.downcast::<Status>().unwrap().code();
        let mut m = messages(vec![[&[0][..], &u32::MAX.to_be_bytes()].concat()]);
        assert_eq!(code(m.frame().await.unwrap().unwrap_err()), Code::ResourceExhausted);
        // FromHost.report.vrnics, of two bytes each: they would be a gigabyte.
        let report = [0x0a, 0].repeat(MAX_HOST_MESSAGE / 2 - 10);
        let v1_report = unirdma_fleet::v1::FromHost {
            message: Some(unirdma_fleet::v1::from_host::Message::Report(Default::default())),
        };
        let mut message = prost::Message::encode_to_vec(&v1_report)[..1].to_vec();
        prost::encoding::encode_varint(report.len() as u64, &mut message);
        message.extend(report);
        let head = [&[0][..], &u32::try_from(message.len()).unwrap().to_be_bytes()].concat();
        let mut m = messages(vec![head, message]);
        assert_eq!(code(m.frame().await.unwrap().unwrap_err()), Code::ResourceExhausted);
    }

    #[tokio::test]
    async fn a_body_comes_whole_within_its_limit_and_time_or_not_at_all() {
        let (parts, ()) = Request::new(()).into_parts();
        let read = async |body: Body, most| {
            let mut held = UnderWay::new().bytes(&Party::Stranger([10, 0, 0, 1].into())).unwrap();
            let read = whole(&parts, body, most, &mut held, Duration::from_millis(20)).await;
            (read, held.amount())
        };
        let pieces = |n: usize| tokio_stream::iter((0..n).map(|_| Ok::<_, std::io::Error>(Bytes::from_static(b"abc"))));
        assert_eq!(read(Body::from_stream(pieces(3)), 9).await, (Ok(Bytes::from_static(b"abcabcabc")), 9));
        assert_eq!(read(Body::from_stream(pieces(3)), 8).await, (Err(Stop::TooLong(8)), 6));
        let silent = Body::from_stream(tokio_stream::StreamExt::chain(pieces(1), tokio_stream::pending()));
        assert_eq!(read(silent, 9).await, (Err(Stop::Late), 3));
        let broken = [Ok(Bytes::from_static(b"abc")), Err(std::io::Error::from(std::io::ErrorKind::UnexpectedEof))];
        assert_eq!(read(Body::from_stream(tokio_stream::iter(broken)), 9).await, (Err(Stop::CutOff), 3));
        // More than a stranger may have under way.
        let large = || Ok::<_, std::io::Error>(Bytes::from(vec![0; 1 << 20]));
        let (stopped, held) = read(Body::from_stream(tokio_stream::iter((0..3).map(move |_| large()))), 9 << 20).await;
        let Err(Stop::Refused(e)) = stopped else { panic!("{stopped:?}") };
        assert!(e.what.starts_with("address 10.0.0.1 has the most bytes") && held == 2 << 20, "{e}");
    }

    #[test]
    fn what_stops_a_call_has_a_status_of_its_own_and_a_line() {
        for (stop, http, code) in [
            (Stop::Refused(Refusal::unknown("no")), 401, Code::Unauthenticated),
            (Stop::Refused(Refusal::full("no")), 429, Code::ResourceExhausted),
            (Stop::Refused(Refusal::unavailable("no")), 503, Code::Unavailable),
            (Stop::TooLong(1 << 20), 413, Code::ResourceExhausted),
            (Stop::TooMuch, 413, Code::ResourceExhausted),
            (Stop::Late, 408, Code::DeadlineExceeded),
            (Stop::CutOff, 400, Code::Aborted),
        ] {
            let (status, said) = stop.said();
            assert_eq!((status.as_u16(), said.code()), (http, code));
            assert!(!said.message().is_empty());
        }
    }

    #[test]
    fn only_a_few_addresses_are_for_strangers() {
        for path in ["/", "/app.js", "/api/v1/openapi.json"] {
            assert_eq!(Kind::of(path), Kind { pass: Pass::None, most: Some(0), grpc: false }, "{path}");
        }
        let join = Kind::of("/unirdma.fleet.v1.Hosts/Join");
        assert_eq!((join.pass, join.most), (Pass::None, Some(MAX_JOIN + FRAME)));
        for (path, pass) in [
            ("/api/v1/status", Pass::Token),
            ("/api/v1/whatever", Pass::Token),
            ("/unirdma.fleet.v1.Fleet/Apply", Pass::Token),
            ("/unirdma.fleet.v1.Fleet/Whatever", Pass::Token),
            ("/unirdma.fleet.v1.Hosts/Attach", Pass::Host),
            ("/unirdma.fleet.v1.Hosts/Whatever", Pass::Token),
            ("/unirdma.fleet.v1.Centres/Live", Pass::Centre),
        ] {
            assert_eq!(Kind::of(path).pass, pass, "{path}");
        }
    }
}
