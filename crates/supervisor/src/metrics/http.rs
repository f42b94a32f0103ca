//! An HTTP server for scrapers: a client requests one page, gets it, and the connection is closed.
//!
//! The number of connections is limited, in total and for each address, and so is the time of each. So a client that
//! opens many connections, sends nothing or reads nothing excludes only itself. Everything runs in one thread, except
//! that pages are made in others.

use std::collections::HashMap;
use std::convert::Infallible;
use std::io;
use std::net::{IpAddr, Ipv6Addr, TcpListener};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use http_body_util::Full;
use hyper::body::Bytes;
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::TcpStream;
use tokio::sync::oneshot;
use tokio::time::{sleep, timeout};
use unirdma_device::lock;

/// Most connections, and most from one address.
const MOST: usize = 64;
const MOST_EACH: usize = 8;
/// Most bytes of a request's head.
const MAX_REQUEST: usize = 8 << 10;
/// Time limit for receiving a request's head, and for what comes after it.
const REQUEST: Duration = Duration::from_secs(5);
const ANSWER: Duration = Duration::from_secs(20);
/// Time after which a page is dropped if nobody asks for it.
const KEEP: Duration = Duration::from_secs(2);
/// Pause after a connection could not be accepted.
const PAUSE: Duration = Duration::from_millis(100);

/// The content that is served.
pub(super) trait Source: Send + Sync + 'static {
    /// The current page.
    fn page(&self) -> Bytes;
    /// Drops a stored page that is not fresh any more; true if nothing is stored.
    fn forget(&self) -> bool;
}

/// Serves until it is dropped.
pub(super) struct Server {
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    pub fn start(listener: TcpListener, source: Arc<dyn Source>) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let listener = {
            let _runtime = runtime.enter();
            tokio::net::TcpListener::from_std(listener)?
        };
        let (stop, stopped) = oneshot::channel();
        let run = move || {
            runtime.block_on(async {
                tokio::select! {
                    _ = stopped => {}
                    () = serve(&listener, &source) => {}
                }
            });
            // A page that is being made waits for workers, by its own deadline.
            runtime.shutdown_background();
        };
        let thread = std::thread::Builder::new().name("metrics".into()).spawn(run)?;
        Ok(Server { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.stop.take());
        self.thread.take().map(JoinHandle::join);
    }
}

/// Number of open connections by address.
#[derive(Default)]
struct Open(Mutex<HashMap<IpAddr, usize>>);

/// A counted connection.
struct Counted(Arc<Open>, IpAddr);

impl Open {
    /// Counts one more connection, unless there are too many.
    fn count(self: &Arc<Self>, from: IpAddr) -> Option<Counted> {
        let from = network_of(from);
        let mut open = lock(&self.0);
        if open.values().sum::<usize>() >= MOST || open.get(&from).is_some_and(|&n| n >= MOST_EACH) {
            return None;
        }
        *open.entry(from).or_default() += 1;
        Some(Counted(self.clone(), from))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        let mut open = lock(&self.0.0);
        if let Some(n) = open.get_mut(&self.1) {
            *n -= 1;
        }
        open.retain(|_, n| *n > 0);
    }
}

/// IPv6 addresses count by their /64 network, since one machine may use all of it.
fn network_of(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(a) => IpAddr::V6(Ipv6Addr::from_bits(a.to_bits() >> 64 << 64)),
        v4 => v4,
    }
}

async fn serve(listener: &tokio::net::TcpListener, source: &Arc<dyn Source>) {
    let open: Arc<Open> = Arc::default();
    loop {
        let keep = if source.forget() { Duration::MAX } else { KEEP };
        let (stream, from) = match timeout(keep, listener.accept()).await {
            Ok(Ok(accepted)) => accepted,
            Ok(Err(e)) if e.kind() == io::ErrorKind::ConnectionAborted => continue,
            Ok(Err(e)) => {
                tracing::warn!(error = %e, "a scraper cannot be served");
                sleep(PAUSE).await;
                continue;
            }
            Err(_) => continue,
        };
        if let Some(counted) = open.count(from.ip()) {
            tokio::spawn(converse(stream, source.clone(), counted));
        }
    }
}

/// Reads a request and answers it.
async fn converse(stream: TcpStream, source: Arc<dyn Source>, _counted: Counted) {
    let service = service_fn(|request| answer(request, source.clone()));
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(REQUEST)
        .max_buf_size(MAX_REQUEST)
        .keep_alive(false)
        .title_case_headers(true)
        .auto_date_header(false)
        .serve_connection(TokioIo::new(stream), service);
    let _ = timeout(REQUEST + ANSWER, connection).await;
}

async fn answer<B>(request: Request<B>, source: Arc<dyn Source>) -> Result<Response<Full<Bytes>>, Infallible> {
    let (status, body) = match (request.method(), request.uri().path()) {
        // Making the page may take long; other connections go on meanwhile.
        (&Method::GET | &Method::HEAD, "/metrics") => match tokio::task::spawn_blocking(move || source.page()).await {
            Ok(page) => (StatusCode::OK, page),
            Err(_) => (StatusCode::INTERNAL_SERVER_ERROR, "the page cannot be made\n".into()),
        },
        (&Method::GET | &Method::HEAD, _) => (StatusCode::NOT_FOUND, "404 Not Found: metrics are at /metrics\n".into()),
        _ => (StatusCode::METHOD_NOT_ALLOWED, "405 Method Not Allowed\n".into()),
    };
    let kind = if status == StatusCode::OK { unirdma_metrics::CONTENT_TYPE } else { "text/plain; charset=utf-8" };
    let mut response = Response::new(Full::new(body));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    Ok(response)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::{SocketAddr, TcpStream};
    use std::sync::atomic::{AtomicU32, Ordering};

    #[derive(Default)]
    struct Counts(AtomicU32);

    impl Source for Counts {
        fn page(&self) -> Bytes {
            self.0.fetch_add(1, Ordering::SeqCst);
            "unirdma_x 1\n".into()
        }
        fn forget(&self) -> bool {
            true
        }
    }

    fn server() -> (Server, SocketAddr, Arc<Counts>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (address, counts) = (listener.local_addr().unwrap(), Arc::new(Counts::default()));
        (Server::start(listener, counts.clone()).unwrap(), address, counts)
    }

    fn ask(address: SocketAddr, request: &str) -> String {
        let mut stream = TcpStream::connect(address).unwrap();
        // The server may close the connection while a refused client still writes.
        let _ = stream.write_all(request.as_bytes());
        let mut answer = String::new();
        let _ = stream.read_to_string(&mut answer);
        answer
    }

    #[test]
    fn a_scraper_gets_the_page_and_nothing_else_is_there() {
        let (_server, address, counts) = server();
        let answer = ask(address, "GET /metrics HTTP/1.1\r\nHost: x\r\nAccept: */*\r\n\r\n");
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("HTTP/1.1 200 OK\r\n") && head.contains("Content-Length: 12"), "{head}");
        assert!(head.contains("Content-Type: text/plain; version=0.0.4"), "{head}");
        assert_eq!(body, "unirdma_x 1\n");
        let head = ask(address, "HEAD /metrics HTTP/1.0\r\n\r\n");
        assert!(head.contains("Content-Length: 12") && head.ends_with("\r\n\r\n"), "{head}");
        assert_eq!(counts.0.load(Ordering::SeqCst), 2);
        for (request, status) in [
            ("GET / HTTP/1.1\r\n\r\n", "404"),
            ("GET /metrics/../etc HTTP/1.1\r\n\r\n", "404"),
            ("POST /metrics HTTP/1.1\r\n\r\n", "405"),
            ("GET /metrics\r\n\r\n", "400"),
            ("nonsense\r\n\r\n", "400"),
            ("GET /metrics HTTP/2\r\n\r\n", "400"),
        ] {
            let answer = ask(address, request);
            assert!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{request:?}: {answer}");
        }
        let long = format!("GET /metrics HTTP/1.1\r\nX: {}", "x".repeat(2 * MAX_REQUEST));
        assert!(!ask(address, &long).contains("200 OK"));
        assert_eq!(counts.0.load(Ordering::SeqCst), 2);
    }

    #[test]
    fn who_opens_many_connections_keeps_itself_out_until_they_are_closed() {
        let (_server, address, _) = server();
        let silent: Vec<TcpStream> = (0..3 * MOST_EACH).map(|_| TcpStream::connect(address).unwrap()).collect();
        let served = || ask(address, "GET /metrics HTTP/1.1\r\n\r\n").contains("200 OK");
        assert!(!served());
        drop(silent);
        assert!((0..100).any(|_| {
            std::thread::sleep(Duration::from_millis(20));
            served()
        }));
    }

    #[test]
    fn connections_are_counted_by_address() {
        let open: Arc<Open> = Arc::default();
        let some = |n: usize, from: &str| (0..n).filter_map(|_| open.count(from.parse().unwrap())).collect::<Vec<_>>();
        let first = some(100, "10.0.0.1");
        assert_eq!((first.len(), some(1, "10.0.0.2").len(), some(1, "::ffff:10.0.0.1").len()), (MOST_EACH, 1, 0));
        let sixth = some(100, "2001:db8::1");
        assert_eq!((sixth.len(), some(1, "2001:db8::ffff").len(), some(1, "2001:db8:0:1::1").len()), (MOST_EACH, 0, 1));
        let rest: Vec<Vec<Counted>> = (1..100).map(|i| some(MOST_EACH, &format!("10.1.0.{i}"))).collect();
        assert_eq!(first.len() + sixth.len() + rest.iter().map(Vec::len).sum::<usize>(), MOST);
        drop((first, sixth, rest));
        assert!(lock(&open.0).is_empty());
    }
}
