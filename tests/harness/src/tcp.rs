//! TCP between two processes: the peer in all comparisons. Both ends spin, as RDMA programs do, or both sleep until
//! data arrives, as most socket programs do.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command};
use std::time::Instant;

use crate::Result;

fn text(e: std::io::Error) -> String {
    format!("TCP: {e}")
}

fn read_exact(s: &mut TcpStream, buf: &mut [u8]) -> std::io::Result<()> {
    let mut done = 0;
    while done < buf.len() {
        match s.read(&mut buf[done..]) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(n) => done += n,
            Err(e) if e.kind() == ErrorKind::WouldBlock => std::hint::spin_loop(),
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

fn write_all(s: &mut TcpStream, buf: &[u8]) -> std::io::Result<()> {
    let mut done = 0;
    while done < buf.len() {
        match s.write(&buf[done..]) {
            Ok(n) => done += n,
            Err(e) if e.kind() == ErrorKind::WouldBlock => std::hint::spin_loop(),
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// The other process: receives (size, count, echo, sleep) and then messages; answers each of them, or all at the end.
pub fn peer(to: SocketAddr) -> Result<()> {
    let mut s = TcpStream::connect(to).map_err(text)?;
    s.set_nodelay(true).map_err(text)?;
    let mut head = [0; 32];
    while read_exact(&mut s, &mut head).is_ok() {
        let word = |i: usize| u64::from_ne_bytes(std::array::from_fn(|k| head[i * 8 + k])) as usize;
        s.set_nonblocking(word(3) == 0).map_err(text)?;
        let mut buf = vec![0; word(0)];
        for _ in 0..word(1) {
            read_exact(&mut s, &mut buf).map_err(text)?;
            if word(2) != 0 {
                write_all(&mut s, &buf).map_err(text)?;
            }
        }
        if word(2) == 0 {
            write_all(&mut s, &[1]).map_err(text)?;
        }
    }
    Ok(())
}

/// A connection to a second process of this program.
pub struct Tcp {
    stream: TcpStream,
    child: Child,
}

impl Tcp {
    /// Starts the other process on this machine, over loopback.
    ///
    /// # Errors
    /// The error of the failed call.
    pub fn start() -> Result<Tcp> {
        let exe = std::env::current_exe().map_err(text)?;
        Tcp::start_with((Ipv4Addr::LOCALHOST, 0).into(), Command::new(exe))
    }

    /// Starts the other process by `peer`, a command that runs this program elsewhere. It connects to `listen`.
    ///
    /// # Errors
    /// The error of the failed call.
    pub fn start_with(listen: SocketAddr, mut peer: Command) -> Result<Tcp> {
        let listener = TcpListener::bind(listen).map_err(text)?;
        let address = listener.local_addr().map_err(text)?.to_string();
        let child = peer.args(["tcp-peer", &address]).spawn().map_err(text)?;
        let (stream, _) = listener.accept().map_err(text)?;
        stream.set_nodelay(true).map_err(text)?;
        Ok(Tcp { stream, child })
    }

    fn begin(&mut self, size: usize, count: usize, echo: bool, sleep: bool) -> Result<()> {
        self.stream.set_nonblocking(!sleep).map_err(text)?;
        let words = [size, count, usize::from(echo), usize::from(sleep)];
        let head: Vec<u8> = words.iter().flat_map(|v| v.to_ne_bytes()).collect();
        write_all(&mut self.stream, &head).map_err(text)
    }

    /// Sorted one-way latencies, microseconds. `sleep`: both ends sleep until data arrives; otherwise they spin.
    ///
    /// # Errors
    /// The error of the failed call.
    pub fn latencies(&mut self, size: usize, count: usize, sleep: bool) -> Result<Vec<f64>> {
        self.begin(size, count, true, sleep)?;
        let mut buf = vec![0; size];
        let mut all = Vec::with_capacity(count);
        for _ in 0..count {
            let start = Instant::now();
            write_all(&mut self.stream, &buf).map_err(text)?;
            read_exact(&mut self.stream, &mut buf).map_err(text)?;
            all.push(start.elapsed().as_secs_f64() * 1e6 / 2.0);
        }
        all.sort_by(f64::total_cmp);
        Ok(all)
    }

    /// Process ID of the other process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Bandwidth, MiB/s. `sleep`: both ends sleep while they wait; otherwise they spin.
    ///
    /// # Errors
    /// The error of the failed call.
    pub fn bandwidth(&mut self, size: usize, count: usize, sleep: bool) -> Result<f64> {
        let buf = vec![0; size];
        let start = Instant::now();
        self.begin(size, count, false, sleep)?;
        for _ in 0..count {
            write_all(&mut self.stream, &buf).map_err(text)?;
        }
        read_exact(&mut self.stream, &mut [0]).map_err(text)?;
        Ok((size * count) as f64 / (1 << 20) as f64 / start.elapsed().as_secs_f64())
    }
}

impl Drop for Tcp {
    fn drop(&mut self) {
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
        let _ = self.child.wait();
    }
}
