//! A minimal HTTP server for scrapers: a client requests one page, gets it, and the connection is closed.
//!
//! Each connection has a thread while it lasts, which is a few seconds at most. The number of connections is limited,
//! in total and for each address. So a client that opens many connections, sends nothing or reads nothing excludes only
//! itself.

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv6Addr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, poll};
use unirdma_device::lock;

/// Most connections, and most from one address.
const MOST: usize = 64;
const MOST_EACH: usize = 8;
/// Most bytes of a request.
const MAX_REQUEST: usize = 8 << 10;
/// Time limit for receiving a request, and for sending the answer.
const REQUEST: Duration = Duration::from_secs(5);
const ANSWER: Duration = Duration::from_secs(20);
/// Bytes of an answer that are written between two checks of the clock.
const CHUNK: usize = 256 << 10;
/// Time after which a page is dropped if nobody asks for it.
const KEEP: Timespec = Timespec { tv_sec: 2, tv_nsec: 0 };
/// Pause after a connection could not be accepted.
const PAUSE: Duration = Duration::from_millis(100);

/// The content that is served.
pub(super) trait Source: Send + Sync + 'static {
    /// The current page.
    fn page(&self) -> Arc<str>;
    /// Drops a stored page that is not fresh any more; true if nothing is stored.
    fn forget(&self) -> bool;
}

/// Serves until it is dropped.
pub(super) struct Server {
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    pub fn start(listener: TcpListener, source: Arc<dyn Source>) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let stop = Arc::new(rustix::event::eventfd(0, EventfdFlags::CLOEXEC)?);
        let stopped = stop.clone();
        let serve = move || serve(&listener, &stopped, &source);
        let thread = std::thread::Builder::new().name("metrics".into()).spawn(serve)?;
        Ok(Server { stop, thread: Some(thread) })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = rustix::io::write(&*self.stop, &1u64.to_ne_bytes());
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

fn serve(listener: &TcpListener, stop: &OwnedFd, source: &Arc<dyn Source>) {
    let open: Arc<Open> = Arc::default();
    loop {
        let mut wait = [PollFd::new(stop, PollFlags::IN), PollFd::new(listener, PollFlags::IN)];
        let limit = if source.forget() { None } else { Some(&KEEP) };
        match poll(&mut wait, limit) {
            Ok(_) if !wait[0].revents().is_empty() => return,
            Ok(0) => continue,
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(e) => {
                tracing::error!(error = %e, "metrics are not served any more");
                return;
            }
        }
        let (stream, from) = match listener.accept() {
            Ok(got) => got,
            Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::ConnectionAborted) => continue,
            Err(e) => {
                tracing::warn!(error = %e, "a scraper cannot be served");
                std::thread::sleep(PAUSE);
                continue;
            }
        };
        let Some(counted) = open.count(from.ip()) else { continue };
        let source = source.clone();
        let answer = move || {
            let _counted = counted;
            let _ = converse(stream, &*source);
        };
        if let Err(e) = std::thread::Builder::new().name("scrape".into()).spawn(answer) {
            tracing::warn!(error = %e, "a scraper cannot be served");
        }
    }
}

/// Reads a request and answers it.
fn converse(mut stream: TcpStream, source: &dyn Source) -> io::Result<()> {
    stream.set_nonblocking(false)?;
    let asked = read(&mut stream)?.map_or(Err("431 Request Header Fields Too Large"), |r| understand(&r));
    let (status, kind, body): (&str, &str, Arc<str>) = match asked {
        Ok(_) => ("200 OK", unirdma_metrics::CONTENT_TYPE, source.page()),
        Err(status) => (status, "text/plain; charset=utf-8", format!("{status}\n").into()),
    };
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    let parts = [head.as_bytes(), if asked == Ok(Asked::Head) { &[] } else { body.as_bytes() }];
    let until = Instant::now() + ANSWER;
    for chunk in parts.into_iter().flat_map(|p| p.chunks(CHUNK)) {
        stream.set_write_timeout(Some(left(until)?))?;
        stream.write_all(chunk)?;
    }
    // Without this, unread bytes that the scraper sent beyond its request would reset the connection before it has read
    // the answer.
    stream.shutdown(std::net::Shutdown::Write)
}

/// Time left until a deadline; an error if that has passed.
fn left(until: Instant) -> io::Result<Duration> {
    let left = until.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
}

/// Reads a request up to the empty line after its head; `None` if it is too long.
fn read(stream: &mut TcpStream) -> io::Result<Option<Vec<u8>>> {
    let until = Instant::now() + REQUEST;
    let mut request = Vec::new();
    let mut buffer = [0; 1024];
    while !request.windows(4).any(|w| w == b"\r\n\r\n") {
        stream.set_read_timeout(Some(left(until)?))?;
        match stream.read(&mut buffer)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            n if request.len() + n > MAX_REQUEST => return Ok(None),
            n => request.extend_from_slice(&buffer[..n]),
        }
    }
    Ok(Some(request))
}

/// The kind of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Asked {
    Page,
    Head,
}

/// Parses the first line of a request.
///
/// # Errors
/// The status with which it is refused.
fn understand(request: &[u8]) -> Result<Asked, &'static str> {
    let line = request.split(|&b| b == b'\r').next().and_then(|l| std::str::from_utf8(l).ok());
    let words: Vec<&str> = line.unwrap_or_default().split(' ').collect();
    let [method, target, version] = words[..] else { return Err("400 Bad Request") };
    if !version.starts_with("HTTP/1.") {
        return Err("400 Bad Request");
    }
    let path = target.split_once('?').map_or(target, |t| t.0);
    match (method, path) {
        ("GET", "/metrics") => Ok(Asked::Page),
        ("HEAD", "/metrics") => Ok(Asked::Head),
        ("GET" | "HEAD", _) => Err("404 Not Found: metrics are at /metrics"),
        _ => Err("405 Method Not Allowed"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::SocketAddr;
    use std::sync::atomic::{AtomicU32, Ordering};

    #[derive(Default)]
    struct Counts(AtomicU32);

    impl Source for Counts {
        fn page(&self) -> Arc<str> {
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
            ("\r\n\r\n", "400"),
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
