//! A program with slow memory, and messages from another host that need that memory. Other programs do not notice.
//!
//! Both virtual layers are in this process, in a network namespace of its own; the slow program is another process.
//! Without the privileges to make a namespace and to mount a FUSE file system, the test does nothing.
#![allow(missing_docs)]

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use rustix::mm::{Advice, MapFlags, ProtFlags};
use unirdma_abi as abi;
use unirdma_driver::SendWr;
use unirdma_formats::{Gid, WrOpcode, send_flags};
use unirdma_link::RegionDesc;
use unirdma_testkit::fuse::slow_file;
use unirdma_testkit::{Program, Scripted, TestHost, connect};

const PAGE: usize = 4096;
/// Bytes of the slow program's MR.
const LEN: usize = 64 * PAGE;
/// Value of all bytes of its memory.
const BYTE: u8 = 7;

fn main() {
    let args: Vec<String> = std::env::args().collect();
    match &args[1..] {
        [role, socket, file, gid, qpn] if role == "slow" => {
            let gid = Gid::from_ip(gid.parse().unwrap());
            slow(Path::new(socket), Path::new(file), gid, qpn.parse().unwrap());
        }
        _ => match run() {
            Ok(()) => println!("slow memory holds up nobody else: ok"),
            Err(why) => println!("skipped: {why}"),
        },
    }
}

/// A program whose memory is a mapping of a file. Each page arrives only when the test releases it.
fn slow(socket: &Path, file: &Path, gid: Gid, peer: u32) {
    let mut s = Scripted::new(socket);
    let file = File::open(file).unwrap();
    let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
    // SAFETY: a new mapping, which replaces nothing.
    let at = unsafe { rustix::mm::mmap(std::ptr::null_mut(), LEN, access, flags, &file, 0) }.unwrap();
    // SAFETY: the mapping has this length. Each page is read by itself.
    unsafe { rustix::mm::madvise(at, LEN, Advice::Random) }.unwrap();
    let at = at as u64;
    let me = File::options().read(true).write(true).open("/proc/self/mem").unwrap();
    let region = RegionDesc { bus_addr: at, size: LEN as u64, user_addr: at, mmap_offset: at };
    s.hostile.frontend.add_region(region, me.as_fd()).unwrap();
    let mr = s.mr(at, LEN as u64);
    let q = s.queue(1);
    s.connect(&q, gid.0, peer, 5);
    println!("{} {}", q.qpn, mr.rkey);
    loop {
        std::thread::park();
    }
}

/// The process of the slow program. Dropping this value ends it. The file server is a thread of the test: a thread of
/// the program itself could not touch new memory while the virtual layer looks up a page of that process.
struct Slow {
    process: Child,
    /// QPN and rkey.
    names: (u32, u32),
    touched: Receiver<()>,
    come: Sender<()>,
}

impl Slow {
    fn new(socket: &Path, dir: &Path, gid: &str, peer: u32) -> Result<Self, String> {
        let (say, touched) = channel();
        let (come, comes) = channel();
        drop(slow_file(dir, LEN as u64, move || {
            let _ = say.send(());
            // If the test has failed, the page is delivered too, because the virtual layer waits for it.
            let _ = comes.recv();
            Some(vec![BYTE; PAGE])
        })?);
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.arg("slow").arg(socket).arg(dir.join("file")).args([gid, &peer.to_string()]);
        let mut process = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let mut numbers = line.split_whitespace().map(|n| n.parse().unwrap());
        let names = (numbers.next().unwrap(), numbers.next().unwrap());
        Ok(Slow { process, names, touched, come })
    }
}

impl Drop for Slow {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Moves this thread, and threads that it starts, to a network namespace with the addresses 127.0.0.1 and 127.0.0.2.
fn enter_network() -> Result<(), String> {
    // SAFETY: the thread leaves its network namespace, which concerns no memory.
    if unsafe { libc::unshare(libc::CLONE_NEWNET) } != 0 {
        return Err(format!("unshare: {}", std::io::Error::last_os_error()));
    }
    for args in [&["link", "set", "lo", "up"][..], &["addr", "add", "127.0.0.2/8", "dev", "lo"]] {
        let status = Command::new("ip").args(args).status().map_err(|e| format!("ip: {e}"))?;
        assert!(status.success(), "ip {args:?}");
    }
    Ok(())
}

fn run() -> Result<(), String> {
    enter_network()?;
    let [here, there]: [IpAddr; 2] = [[127, 0, 0, 1].into(), [127, 0, 0, 2].into()];
    let x = TestHost::start_wired(here, &format!("10.0.0.2 default {there}\n"));
    let y = TestHost::start_wired(there, &format!("10.0.0.1 default {here}\n"));
    let (c, d) = (Program::new(&y.add("c", "10.0.0.3"), LEN), Program::new(&y.add("d", "10.0.0.4"), LEN));
    connect(&c, &d);
    let mut a = Program::new(&x.add("a", "10.0.0.1"), LEN);
    let (socket, dir) = (y.add("b", "10.0.0.2"), y.dir().join("slow"));
    std::fs::create_dir(&dir).unwrap();
    let b = Slow::new(&socket, &dir, "10.0.0.1", a.qp.qpn)?;
    let (qpn, rkey) = b.names;
    let gid = Gid::from_ip([10, 0, 0, 2].into());
    a.connect_to(gid.0, qpn, |a| abi::QpAttr { timeout: 18, retry_cnt: 7, ..a }).expect("connect");
    a.buf[60 * PAGE..][..100].fill(1);
    // A READ of one page, a WRITE into another one, and a READ of that page afterwards.
    for (op, page, is_slow) in [(WrOpcode::Read, 0, true), (WrOpcode::Write, 40, true), (WrOpcode::Read, 40, false)] {
        let (off, len) = if op == WrOpcode::Read { (page * PAGE, PAGE) } else { (60 * PAGE, 100) };
        let wqe = abi::SqWqe {
            opcode: op as u8,
            send_flags: send_flags::SIGNALED,
            remote_addr: (page * PAGE) as u64,
            rkey,
            ..Default::default()
        };
        let sge = abi::Sge { addr: a.buf.as_ptr() as u64 + off as u64, length: len as u32, lkey: a.mr.key };
        // SAFETY: the data is a gather list, nothing is read here.
        unsafe { a.qp.send_batch().push(&wqe, SendWr::Sges(&[sge])) }.expect("post");
        if is_slow {
            b.touched.recv_timeout(Duration::from_secs(60)).expect("somebody reaches for the memory of b");
            // The virtual layer is blocked in the memory of b. It also serves c and d.
            for i in 0..20 {
                c.post(WrOpcode::Write, &d, i * 100, 100).expect("post");
                assert_eq!(c.wait().expect("nobody waits for b").status, 0);
            }
            assert_eq!(a.cq.poll(1, |_, _| ()).expect("poll"), 0, "{op:?}");
            b.come.send(()).unwrap();
        }
        assert_eq!(a.wait().expect("b is not slow any more").status, 0, "{op:?}");
    }
    let written = |i| if i < 100 { 1 } else { BYTE };
    assert!((0..PAGE).all(|i| a.byte(40 * PAGE + i) == written(i)), "what was written, and the rest of its page");
    Ok(())
}
