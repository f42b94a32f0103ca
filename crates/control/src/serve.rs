//! Connections: TLS, client certificates, and HTTP. gRPC and JSON share one port.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::time::Instant;
use tokio_rustls::TlsAcceptor;
use tower::ServiceExt;

use crate::connections::{Connections, Guest};
use crate::pki::{self, Caller};
use crate::rate_limits::Party;

/// Time limit for a handshake, and for the head of a request.
const PATIENCE: Duration = Duration::from_secs(10);
/// Interval of pings on an idle connection.
const PING: Duration = Duration::from_secs(5);
/// Most concurrent calls of one connection.
const MAX_STREAMS: u32 = 64;
/// Most bytes of a request's head.
const MAX_HEAD: u32 = 16 << 10;
/// Most bytes that are received on a connection before somebody reads them.
const WINDOW: u32 = 256 << 10;

/// Serves connections until the task is ended.
pub(crate) async fn serve(listener: TcpListener, tls: Option<TlsAcceptor>, router: Router, doors: Arc<Connections>) {
    loop {
        let (stream, peer) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(e) => {
                // For example, no descriptor is free.
                tracing::warn!("a connection could not be taken: {e}");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let Some(guest) = doors.enter(peer.ip(), Instant::now()) else {
            tracing::debug!("the connection of {peer} is closed: there are too many of callers that are not known");
            continue;
        };
        let (tls, router) = (tls.clone(), router.clone());
        tokio::spawn(async move {
            let ended = tokio::select! {
                ended = connection(stream, tls, router, guest.clone()) => ended,
                () = guest.must_go() => Err(io::Error::other("nobody has said in time who it is")),
            };
            if let Err(e) = ended {
                tracing::debug!("the connection of {peer} ended: {e}");
            }
        });
    }
}

async fn connection(stream: TcpStream, tls: Option<TlsAcceptor>, router: Router, guest: Arc<Guest>) -> io::Result<()> {
    stream.set_nodelay(true)?;
    match tls {
        None => http(TokioIo::new(stream), Caller::Anybody, router, guest).await,
        Some(tls) => {
            let accepted = tokio::time::timeout(PATIENCE, tls.accept(stream)).await;
            let stream = accepted.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??;
            let caller = stream.get_ref().1.peer_certificates().and_then(|c| c.first()).and_then(pki::caller_of);
            let known = match &caller {
                Some(Caller::Host(name)) => guest.is_of(&Party::Host(name.clone())),
                Some(Caller::Centre) => guest.is_of(&Party::Centre),
                Some(Caller::Anybody) | None => Ok(()),
            };
            known.map_err(io::Error::other)?;
            http(TokioIo::new(stream), caller.unwrap_or(Caller::Anybody), router, guest).await
        }
    }
}

async fn http<I>(io: I, caller: Caller, router: Router, guest: Arc<Guest>) -> io::Result<()>
where
    I: hyper::rt::Read + hyper::rt::Write + Unpin + Send + 'static,
{
    let service = tower::service_fn(move |mut request: axum::http::Request<hyper::body::Incoming>| {
        request.extensions_mut().insert(caller.clone());
        request.extensions_mut().insert(guest.clone());
        router.clone().oneshot(request.map(Body::new))
    });
    let mut builder = Builder::new(TokioExecutor::new());
    builder.http1().timer(TokioTimer::new()).header_read_timeout(PATIENCE).max_buf_size(2 * MAX_HEAD as usize);
    builder
        .http2()
        .timer(TokioTimer::new())
        .keep_alive_interval(PING)
        .keep_alive_timeout(PATIENCE)
        .max_concurrent_streams(MAX_STREAMS)
        .max_header_list_size(MAX_HEAD)
        .initial_stream_window_size(WINDOW)
        .initial_connection_window_size(WINDOW)
        .max_send_buf_size(WINDOW as usize);
    builder.serve_connection(io, TowerToHyperService::new(service)).await.map_err(io::Error::other)
}

/// Refuses plain text on an address that is not loopback.
pub(crate) fn check_plain(listen: SocketAddr) -> io::Result<()> {
    if listen.ip().is_loopback() {
        return Ok(());
    }
    Err(io::Error::other(format!(
        "--plain is for loopback only, and {listen} is not: leave it out, so that the centre speaks TLS"
    )))
}
