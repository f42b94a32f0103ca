//! `unirdma capture`: packets into a pcap file, or a line each.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use clap::Args;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, recv, socketpair, sockopt};
use rustix::process::setpriority_process;
use unirdma_formats::net::{ETH_BYTES, Flow, VXLAN_BYTES, VXLAN_PORT};
use unirdma_formats::pcap::{self, RECORD_BYTES};
use unirdma_formats::wire::{ICRC_BYTES, Op, Packet};
use unirdma_supervisor::admin::{Client, Request, Response};

pub(crate) const EXAMPLES: &str = "Examples:
  unirdma capture                          a line for each packet
  unirdma capture -w roce.pcap -c 1000     a file that Wireshark reads as RoCE
  unirdma capture --vrnic a -w - | tshark -r -

Traffic between two vRNICs of this host never was packets; it is shown as the packets that it would have been.";

#[derive(Args)]
pub(crate) struct CaptureArgs {
    /// Write a pcap file; `-` is standard output
    #[arg(short, long, value_name = "FILE")]
    write: Option<PathBuf>,
    /// Only packets from or to this vRNIC
    #[arg(long, value_name = "NAME")]
    vrnic: Option<String>,
    /// Stop after N packets
    #[arg(short, long, value_name = "N")]
    count: Option<u64>,
    /// Keep at most BYTES of each packet
    #[arg(short, long, value_name = "BYTES", default_value_t = 65_535, value_parser = clap::value_parser!(u32).range(64..=65_535))]
    snap: u32,
}

/// Longest message: a record's header and a packet.
const MAX_MESSAGE: usize = RECORD_BYTES + 65_535;
/// Requested socket buffer, bytes.
const BUFFER: usize = 8 << 20;
/// Pause between two batches of packets.
const REST: Timespec = Timespec { tv_sec: 0, tv_nsec: 1_000_000 };
/// Nice value, so that a capture gives way to the programs that it watches.
const NICE: i32 = 10;

enum Output {
    Lines(io::Stdout),
    Pcap(BufWriter<Box<dyn Write>>),
}

impl Output {
    fn open(file: Option<&Path>, snap: u32) -> io::Result<Output> {
        let Some(path) = file else { return Ok(Output::Lines(io::stdout())) };
        let to: Box<dyn Write> = if path == Path::new("-") {
            Box::new(io::stdout())
        } else {
            let made = File::create(path);
            Box::new(made.map_err(|e| io::Error::new(e.kind(), format!("cannot write {}: {e}", path.display())))?)
        };
        let mut w = BufWriter::new(to);
        w.write_all(&pcap::header(snap))?;
        Ok(Output::Pcap(w))
    }

    fn put(&mut self, record: &[u8]) -> io::Result<()> {
        match self {
            Output::Lines(to) => writeln!(to, "{}", line(record)),
            Output::Pcap(to) => to.write_all(record),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Output::Lines(to) => to.flush(),
            Output::Pcap(to) => to.flush(),
        }
    }
}

/// One line of text for a packet.
fn line(record: &[u8]) -> String {
    let word = |at: usize| record.get(at..at + 4).map_or(0, |b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]));
    let (seconds, ns, all) = (word(0), word(4), word(12));
    let time = format!("{:02}:{:02}:{:02}.{:06}", seconds / 3600 % 24, seconds / 60 % 60, seconds % 60, ns / 1000);
    let packet = record.get(RECORD_BYTES..).unwrap_or_default();
    let whole = packet.len() == all as usize;
    let Some((flow, payload)) = Flow::parse(packet).filter(|_| whole) else { return format!("{time} {all} bytes") };
    let (flow, payload, around) = match payload.get(VXLAN_BYTES + ETH_BYTES..).filter(|_| flow.dst_port == VXLAN_PORT) {
        None => (flow, payload, String::new()),
        Some(inner) => match Flow::parse(inner) {
            Some((f, p)) => (f, p, format!(" (VXLAN {} > {})", flow.src, flow.dst)),
            None => return format!("{time} {} > {}: {all} bytes of VXLAN", flow.src, flow.dst),
        },
    };
    let body = &payload[..payload.len().saturating_sub(ICRC_BYTES)];
    let Ok(p) = Packet::parse(body) else { return format!("{time} {} > {}: malformed", flow.src, flow.dst) };
    let answer = match p.opcode.op {
        Op::Ack => format!(", syndrome {:#04x}, MSN {}", p.aeth.syndrome, p.aeth.msn),
        Op::ReadRequest => format!(", {} bytes wanted", p.reth.dma_len),
        _ => format!(", {} bytes", p.payload.len()),
    };
    format!("{time} {} > {}: {} to QP {:#08x}, PSN {}{answer}{around}", flow.src, flow.dst, p.opcode, p.dest_qp, p.psn)
}

pub(crate) fn run(dir: &Path, args: &CaptureArgs) -> io::Result<()> {
    let mut client = Client::connect(dir)?;
    let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    for s in [&ours, &theirs] {
        let _ = sockopt::set_socket_send_buffer_size_force(s, BUFFER)
            .or_else(|_| sockopt::set_socket_send_buffer_size(s, BUFFER));
    }
    let mut out = Output::open(args.write.as_deref(), args.snap)?;
    let stop = crate::host::termination()?;
    client.ask(&Request::Capture { vrnic: args.vrnic.clone(), snap: args.snap }, Some(theirs.as_fd()))?;
    drop(theirs);
    let _ = setpriority_process(None, NICE);
    let mut buffer = vec![0; MAX_MESSAGE];
    let mut packets = 0;
    let wants_more = |packets| args.count.is_none_or(|most| packets < most);
    let written = (|| -> io::Result<()> {
        while wants_more(packets) {
            let mut ready = [PollFd::new(&ours, PollFlags::IN), PollFd::new(&stop, PollFlags::IN)];
            if poll(&mut ready, None).is_err() {
                continue;
            }
            let (data, stopped) = (!ready[0].revents().is_empty(), !ready[1].revents().is_empty());
            if stopped {
                break;
            }
            while data && wants_more(packets) {
                match recv(&ours, &mut buffer[..], RecvFlags::DONTWAIT) {
                    Ok((0, _)) => {
                        return Err(io::Error::new(io::ErrorKind::ConnectionAborted, "the virtual layer has stopped"));
                    }
                    Ok((n, _)) => out.put(&buffer[..n])?,
                    Err(Errno::AGAIN | Errno::INTR) => break,
                    Err(e) => return Err(e.into()),
                }
                packets += 1;
            }
            out.flush()?;
            // Reads packets in batches: a wake-up for each packet would take a core from other programs each time.
            let _ = poll(&mut [PollFd::new(&stop, PollFlags::IN)], Some(&REST));
        }
        Ok(())
    })();
    // A reader that has closed the pipe ends a capture as Ctrl-C does.
    if !matches!(&written, Err(e) if e.kind() == io::ErrorKind::BrokenPipe) {
        written?;
    }
    let lost = match client.ask(&Request::CaptureStop, None)? {
        Response::Captured { lost } => lost,
        _ => 0,
    };
    eprintln!("unirdma: {packets} packets captured, {lost} lost because they came too fast");
    Ok(())
}
