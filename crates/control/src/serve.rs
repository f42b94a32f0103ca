//! Connections: TLS, who is behind them, and HTTP on top. gRPC and JSON come by one port.

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
use tokio::sync::Semaphore;
use tokio_rustls::TlsAcceptor;
use tower::ServiceExt;

use crate::pki::{self, Caller};

/// Most connections at a time. Each host has one.
const MAX_CONNECTIONS: usize = 20_000;
/// How long a handshake may take, or the head of a request.
const PATIENCE: Duration = Duration::from_secs(10);
/// How often a silent connection is asked whether it is still there.
const PING: Duration = Duration::from_secs(5);
/// Most calls at a time of one connection.
const MAX_STREAMS: u32 = 64;

/// Serves connections until the task is ended.
pub(crate) async fn serve(listener: TcpListener, tls: Option<TlsAcceptor>, router: Router) {
    let room = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        let Ok(permit) = room.clone().acquire_owned().await else { return };
        let (stream, peer) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(e) => {
                // No descriptor is free, for one.
                tracing::warn!("a connection could not be taken: {e}");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let (tls, router) = (tls.clone(), router.clone());
        tokio::spawn(async move {
            let _permit = permit;
            if let Err(e) = connection(stream, tls, router).await {
                tracing::debug!("the connection of {peer} ended: {e}");
            }
        });
    }
}

async fn connection(stream: TcpStream, tls: Option<TlsAcceptor>, router: Router) -> io::Result<()> {
    stream.set_nodelay(true)?;
    match tls {
        None => http(TokioIo::new(stream), Caller::Anybody, router).await,
        Some(tls) => {
            let accepted = tokio::time::timeout(PATIENCE, tls.accept(stream)).await;
            let stream = accepted.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??;
            let caller = stream.get_ref().1.peer_certificates().and_then(|c| c.first()).and_then(pki::caller_of);
            http(TokioIo::new(stream), caller.unwrap_or(Caller::Anybody), router).await
        }
    }
}

async fn http<I>(io: I, caller: Caller, router: Router) -> io::Result<()>
where
    I: hyper::rt::Read + hyper::rt::Write + Unpin + Send + 'static,
{
    let service = tower::service_fn(move |mut request: axum::http::Request<hyper::body::Incoming>| {
        request.extensions_mut().insert(caller.clone());
        router.clone().oneshot(request.map(Body::new))
    });
    let mut builder = Builder::new(TokioExecutor::new());
    builder.http1().timer(TokioTimer::new()).header_read_timeout(PATIENCE).keep_alive(true);
    builder
        .http2()
        .timer(TokioTimer::new())
        .keep_alive_interval(PING)
        .keep_alive_timeout(PATIENCE)
        .max_concurrent_streams(MAX_STREAMS);
    builder.serve_connection(io, TowerToHyperService::new(service)).await.map_err(io::Error::other)
}

/// Refuses plain text on an address that others reach.
pub(crate) fn check_plain(listen: SocketAddr) -> io::Result<()> {
    if listen.ip().is_loopback() {
        return Ok(());
    }
    Err(io::Error::other(format!(
        "--plain is for loopback only, and {listen} is not: leave it out, so that the centre speaks TLS"
    )))
}
