//! Tenants that try to harm their neighbours or the virtual layer, and pairs of programs that measure the harm. `cargo
//! xtask attack` and `cargo xtask bench isolation` run each of them as a process against the vRNICs of a running
//! virtual layer. Each has only the socket of its own vRNIC.
//!
//! An attack prints `ready` when it begins, or `skip: REASON` if it is impossible on this machine, and ends after its
//! time. If it sees the virtual layer do something forbidden, it prints `broken: WHAT`. The victim prints `ready` when
//! its programs are connected, measures after it has read a line, and prints its figures, a name and a number on each
//! line.

mod field;
mod guest;
mod memory;
mod messages;
mod net;
mod objects;
mod pieces;
mod random;
mod requests;
mod vanish;
mod victim;

use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

const USAGE: &str = "usage: attacks NAME SECONDS SOCKET [ARGUMENT]
  victim SECONDS SOCKET SOCKET          measures WRITEs between two vRNICs
  many SECONDS SOCKET SOCKET            measures SENDs of 4 KiB on eight connections between two vRNICs
  check SECONDS SOCKET SOCKET           programs that begin now, and bytes that must arrive, between two vRNICs
  honest SECONDS SOCKET SOCKET          WRITEs of 1 MiB between two vRNICs, without a pause
work requests
  rnr SECONDS SOCKET QPS                SENDs to QPs that never post a receive
  bells SECONDS SOCKET                  64 sessions ring all their doorbell bits
  flood SECONDS SOCKET                  one QP posts WRITEs of 64 B without a pause
  capw SECONDS SOCKET                   WRITEs of 128 MiB with the smallest MTU, for a vRNIC that is captured
  mcast SECONDS SOCKET                  datagrams to a group of 2,048 QPs without receives
  backlog SECONDS SOCKET                datagrams to 2,000 QPs without receives, one after the other
  crumbs SECONDS SOCKET                 WRITEs through MRs whose pieces are one byte long
memory
  slowmm SECONDS SOCKET fuse|fork       READs of memory that is slow to reach
  sigbus SECONDS SOCKET mr|doorbell     WRITEs to a file that is truncated; a doorbell page in one
  huge SECONDS SOCKET                   a huge page that is truncated
  sparse SECONDS SOCKET fill|punch      WRITEs to files that have no pages yet, or lose them all the time
  vaspace SECONDS SOCKET                sparse files that would take all addresses
  remap SECONDS SOCKET                  regions that are mapped and unmapped without a pause
objects
  regmr SECONDS SOCKET                  registers and deregisters memory beside 60,000 MRs
  pages SECONDS SOCKET                  registers lists of very many pages
  lists SECONDS SOCKET                  an MR of as many lists as there may be
  revoked SECONDS SOCKET                a memory region with 30,000 MRs, which goes and comes back
  ranges SECONDS SOCKET                 as many ranges of addresses as there may be
  cqaba SECONDS SOCKET SOCKET           a completion for a CQ that is destroyed, beside a program on another vRNIC
  cmjoin SECONDS SOCKET                 joins multicast groups and fetches no event
  cmreq SECONDS SOCKET                  asks for connections that nobody takes
  objects SECONDS SOCKET                as many objects of each kind as there may be
  teardown SECONDS SOCKET               sessions with very many QPs that end at once
messages and descriptors
  blockfd SECONDS SOCKET                an eventfd that is always full, and blocks
  flush SECONDS SOCKET                  event buffers of one byte
  fds SECONDS SOCKET                    descriptors beside half a message
  linger SECONDS SOCKET                 descriptors whose closing waits
  connect SECONDS SOCKET                connections that come and go
  junk SECONDS SOCKET                   connections with random bytes
  logs SECONDS SOCKET                   requests that are refused
  channels SECONDS SOCKET               opens and closes event channels
  unread SECONDS SOCKET                 requests whose answers nobody reads
  kicks SECONDS SOCKET                  kicks for nothing
  strange SECONDS SOCKET                kick descriptors that are always readable
  halfclosed SECONDS SOCKET             connections of which one direction is closed
published matrices
  field SECONDS SOCKET NAME             an attacker of Husky or HT-Verbs; `field.rs` has their names
virtual machines
  guest SECONDS SOCKET                  commands that are nearly right, junk in rings and pages, forged messages, changes of memory
  net SECONDS SOCKET                    frames, rings and messages of a network interface that nobody should send";

/// `IBV_MTU_4096`.
const MTU_4096: u8 = 5;

/// The end of an attack.
#[derive(Clone, Copy)]
struct Until(Instant);

impl Until {
    fn over(self) -> bool {
        Instant::now() >= self.0
    }

    fn sleep(self) {
        std::thread::sleep(self.0.saturating_duration_since(Instant::now()));
    }
}

fn ready() {
    println!("ready");
}

fn broken(what: &str) {
    println!("broken: {what}");
}

/// Runs an attack. `None` if no attack has that name and such arguments.
fn attack(name: &str, socket: &Path, argument: &[&str], until: Until) -> Option<()> {
    match (name, argument) {
        ("honest", [to]) => victim::honest(socket, Path::new(to), until),
        ("rnr", [qps]) => requests::rnr(socket, qps.parse().ok()?, until),
        ("bells", []) => requests::bells(socket, until),
        ("flood", []) => requests::flood(socket, until),
        ("capw", []) => requests::capw(socket, until),
        ("mcast", []) => requests::mcast(socket, until),
        ("backlog", []) => pieces::backlog(socket, until),
        ("crumbs", []) => pieces::crumbs(socket, until),
        ("lists", []) => pieces::lists(socket, until),
        ("revoked", []) => pieces::revoked(socket, until),
        ("ranges", []) => pieces::ranges(socket, until),
        ("slowmm", ["fuse"]) => memory::fuse(socket, until),
        ("slowmm", ["fork"]) => memory::fork(socket, until),
        ("sigbus", ["mr"]) => vanish::truncated_mr(socket, until),
        ("sigbus", ["doorbell"]) => vanish::truncated_doorbell(socket, until),
        ("huge", []) => vanish::truncated_huge_page(socket, until),
        ("sparse", ["fill"]) => vanish::fill(socket, until),
        ("sparse", ["punch"]) => vanish::punched(socket, until),
        ("vaspace", []) => vanish::addresses(socket, until),
        ("remap", []) => vanish::remapped(socket, until),
        ("regmr", []) => objects::regmr(socket, until),
        ("pages", []) => objects::pages(socket, until),
        ("cqaba", [victim]) => objects::cqaba(socket, Path::new(victim), until),
        ("cmjoin", []) => objects::cmjoin(socket, until),
        ("cmreq", []) => objects::cmreq(socket, until),
        ("objects", []) => objects::exhausted(socket, until),
        ("teardown", []) => objects::teardown(socket, until),
        ("blockfd", []) => messages::blocking_call(socket, until),
        ("flush", []) => messages::tiny_buffers(socket, until),
        ("fds", []) => messages::half_messages(socket, until),
        ("linger", []) => messages::slow_to_close(socket, until),
        ("connect", []) => messages::connections(socket, until),
        ("junk", []) => messages::junk(socket, until),
        ("logs", []) => messages::refused(socket, until),
        ("channels", []) => messages::channels(socket, until),
        ("unread", []) => messages::unread(socket, until),
        ("kicks", []) => messages::kicks(socket, until),
        ("strange", []) => messages::strange_kicks(socket, until),
        ("halfclosed", []) => messages::half_closed(socket, until),
        ("field", [name]) => field::run(socket, name, until)?,
        ("guest", []) => guest::driver(socket, until),
        ("net", []) => net::interface(socket, until),
        _ => return None,
    }
    Some(())
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    let result = match words[..] {
        [name, seconds, socket, ref argument @ ..] => {
            let seconds = seconds.parse::<f64>().map_err(|e| format!("{seconds}: {e}"));
            seconds.and_then(|seconds| match (name, argument) {
                ("victim", [b]) => victim::measure(Path::new(socket), Path::new(b), seconds),
                ("many", [b]) => victim::many(Path::new(socket), Path::new(b), seconds),
                ("check", [b]) => victim::check(Path::new(socket), Path::new(b)),
                _ => {
                    let until = Until(Instant::now() + Duration::from_secs_f64(seconds));
                    attack(name, Path::new(socket), argument, until).ok_or(USAGE.into())
                }
            })
        }
        _ => Err(USAGE.into()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("{e}");
            ExitCode::FAILURE
        }
    }
}
