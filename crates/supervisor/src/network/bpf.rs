//! Steering: classic BPF programs (linux/filter.h) by which the kernel finds the worker for a packet, using a number in
//! the packet.
//!
//! A program is a binary search in a table of ranges. It returns the value of the number's range: the index of a socket
//! in a group that shares a port (SO_ATTACH_REUSEPORT_CBPF). If the packet is too short to have the number, the program
//! returns 0.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, AsRawFd};

use unirdma_formats::Qpn;

/// One instruction.
pub(crate) type Instruction = libc::sock_filter;

/// Most instructions of a program (BPF_MAXINSNS).
pub(crate) const MAX_INSTRUCTIONS: usize = 4096;
/// Farthest that a conditional jump goes.
const MAX_JUMP: usize = 255;
/// Offset of the word with the destination QPN in a BTH, and of the word with the VNI in a VXLAN header.
const QPN_WORD: u32 = 4;
const VNI_WORD: u32 = 4;
/// Offsets from this value on are counted from the IP header (SKF_NET_OFF).
pub(crate) const IP_HEADER: u32 = -0x10_0000_i32 as u32;
/// Bytes from an IPv4 header without options to the UDP payload.
const PAYLOAD_AT: u32 = 20 + 8;

const LOAD_WORD: u16 = 0x20;
const AND: u16 = 0x54;
const SHIFT_RIGHT: u16 = 0x74;
const JUMP: u16 = 0x05;
const JUMP_EQUAL: u16 = 0x15;
const JUMP_AT_LEAST: u16 = 0x35;
const RETURN: u16 = 0x06;

fn plain(code: u16, k: u32) -> Instruction {
    Instruction { code, jt: 0, jf: 0, k }
}

/// Ends a program with a value.
pub(crate) fn end(value: u32) -> Instruction {
    plain(RETURN, value)
}

/// Continues with the next instruction if the number equals `k`, otherwise skips it.
pub(crate) fn if_equal(k: u32) -> Instruction {
    Instruction { code: JUMP_EQUAL, jt: 0, jf: 1, k }
}

/// Maps numbers to values. Entries are the first number of a range and its value, sorted; a range ends where the next
/// one begins. The first range begins at 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Table(Vec<(u32, u32)>);

impl Table {
    /// A table of disjoint ranges, each given as first number, length and value. All other numbers have the value
    /// `others`.
    pub fn new(ranges: impl IntoIterator<Item = (u32, u32, u32)>, others: u32) -> Self {
        let mut starts = BTreeMap::from([(0, others)]);
        for (start, length, value) in ranges {
            starts.insert(start, value);
            starts.entry(start.saturating_add(length)).or_insert(others);
        }
        let mut table: Vec<(u32, u32)> = starts.into_iter().collect();
        table.dedup_by_key(|range| range.1);
        Table(table)
    }

    /// This table with its values replaced.
    pub fn map(&self, value: impl Fn(u32) -> u32) -> Table {
        let mut table: Vec<(u32, u32)> = self.0.iter().map(|&(start, v)| (start, value(v))).collect();
        table.dedup_by_key(|range| range.1);
        Table(table)
    }

    /// Instructions that search the number in the accumulator.
    fn search(&self) -> Vec<Instruction> {
        search(&self.0)
    }
}

fn search(table: &[(u32, u32)]) -> Vec<Instruction> {
    if let [(_, value)] = table {
        return vec![end(*value)];
    }
    let (below, from) = table.split_at(table.len() / 2);
    let lower = search(below);
    let (start, distance) = (from[0].0, lower.len());
    let mut program = if distance <= MAX_JUMP {
        vec![Instruction { code: JUMP_AT_LEAST, jt: distance as u8, jf: 0, k: start }]
    } else {
        vec![Instruction { code: JUMP_AT_LEAST, jt: 0, jf: 1, k: start }, plain(JUMP, distance as u32)]
    };
    program.extend(lower);
    program.extend(search(from));
    program
}

/// Finds the value of a packet's destination QPN. QPN 1 belongs to an address instead of a worker, and has the value
/// `manager`.
fn by_qpn_at(at: u32, table: &Table, manager: u32) -> Vec<Instruction> {
    let load = [plain(LOAD_WORD, at + QPN_WORD), plain(AND, Qpn::MASK), if_equal(1), end(manager)];
    load.into_iter().chain(table.search()).collect()
}

/// As a program for a UDP port, which sees the UDP payload.
pub(crate) fn by_qpn(table: &Table, manager: u32) -> Vec<Instruction> {
    by_qpn_at(0, table, manager)
}

/// As the end of a program that sees whole packets and has checked that this one is UDP in IPv4 without options.
pub(crate) fn by_qpn_of_ipv4(table: &Table, manager: u32) -> Vec<Instruction> {
    by_qpn_at(IP_HEADER.wrapping_add(PAYLOAD_AT), table, manager)
}

/// Finds the value of a packet's VNI, as a program for a UDP port.
pub(crate) fn by_vni(table: &Table) -> Vec<Instruction> {
    let load = [plain(LOAD_WORD, VNI_WORD), plain(SHIFT_RIGHT, 8)];
    load.into_iter().chain(table.search()).collect()
}

/// Attaches a program to a socket, in place of an earlier one. `option` is SO_ATTACH_FILTER, for this socket, or
/// SO_ATTACH_REUSEPORT_CBPF, for all sockets that share a port with it.
///
/// # Errors
/// Errors of the option, or one line that says that the program is too long.
pub(crate) fn attach(socket: &impl AsFd, option: i32, program: &[Instruction]) -> io::Result<()> {
    if program.len() > MAX_INSTRUCTIONS {
        let text = "there are more groups and ranges of QPNs than one BPF program can tell apart";
        return Err(io::Error::new(io::ErrorKind::OutOfMemory, text));
    }
    let value = libc::sock_fprog { len: program.len() as u16, filter: program.as_ptr().cast_mut() };
    let (size, fd) = (size_of::<libc::sock_fprog>() as u32, socket.as_fd().as_raw_fd());
    // SAFETY: the option is a program of `len` instructions, which the kernel only reads, and which lives until after
    // the call.
    let done = unsafe { libc::setsockopt(fd, libc::SOL_SOCKET, option, std::ptr::from_ref(&value).cast(), size) };
    if done == 0 {
        return Ok(());
    }
    let e = io::Error::last_os_error();
    if e.raw_os_error() == Some(libc::ENOMEM) {
        let text = format!(
            "the kernel does not take a BPF program of {} instructions; raise `sysctl net.core.optmem_max`",
            program.len()
        );
        return Err(io::Error::new(io::ErrorKind::OutOfMemory, text));
    }
    Err(e)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Result of a program for a packet. A load beyond the packet's end gives 0.
    fn run(program: &[Instruction], packet: &[u8]) -> u32 {
        let (mut at, mut a, mut steps) = (0, 0u32, 0);
        loop {
            let i = program[at];
            at += 1;
            steps += 1;
            assert!(steps <= 40, "{} instructions are no binary search", program.len());
            match i.code {
                LOAD_WORD => match packet.get(i.k as usize..).and_then(|p| p.first_chunk()) {
                    Some(word) => a = u32::from_be_bytes(*word),
                    None => return 0,
                },
                AND => a &= i.k,
                SHIFT_RIGHT => a >>= i.k,
                JUMP => at += i.k as usize,
                JUMP_EQUAL => at += usize::from(if a == i.k { i.jt } else { i.jf }),
                JUMP_AT_LEAST => at += usize::from(if a >= i.k { i.jt } else { i.jf }),
                RETURN => return i.k,
                code => panic!("code {code:#x}"),
            }
        }
    }

    fn to_qpn(n: u32) -> [u8; 12] {
        let [_, a, b, c] = n.to_be_bytes();
        [4, 0, 0xff, 0xff, 0x80, a, b, c, 0, 0, 0, 0]
    }

    #[test]
    fn a_thousand_ranges_are_found_and_what_lies_between() {
        // Some ranges touch, others have unused numbers between them.
        let ranges: Vec<(u32, u32, u32)> =
            (0..1000).map(|i| (i << 14, if i % 3 == 0 { 1 << 14 } else { 9 }, i)).collect();
        let table = Table::new(ranges.clone(), 5000);
        let program = by_qpn(&table, 7000);
        assert!(program.len() > 3000 && program.len() <= MAX_INSTRUCTIONS, "{}", program.len());
        for &(start, length, value) in &ranges {
            for n in [start, start + length / 2, start + length - 1].into_iter().filter(|&n| n != 1) {
                assert_eq!(run(&program, &to_qpn(n)), value, "QPN {n}");
            }
            let after = if length == 9 || value == 999 { 5000 } else { value + 1 };
            assert_eq!(run(&program, &to_qpn(start + length)), after, "after range {value}");
        }
        assert_eq!((run(&program, &to_qpn(1)), run(&program, &to_qpn(0xff_ffff))), (7000, 5000));
        assert_eq!(run(&program, &to_qpn(77)[..7]), 0, "a packet without a whole QPN");
        // The largest possible table: ranges of one number, far apart.
        let numbers: Vec<(u32, u32, u32)> = (1..=1000).map(|i| (i * 16_000, 1, i)).collect();
        let program = by_vni(&Table::new(numbers, 0));
        assert!(program.len() <= MAX_INSTRUCTIONS, "{}", program.len());
        for i in 1..=1000 {
            let vni = |n: u32| [&[8, 0, 0, 0][..], &(n << 8 | 0xee).to_be_bytes()].concat();
            assert_eq!((run(&program, &vni(i * 16_000)), run(&program, &vni(i * 16_000 + 1))), (i, 0));
        }
    }

    #[test]
    fn ranges_of_one_value_are_one() {
        let table = Table::new([(0x4000, 0x4000, 2), (0x8000, 0x4000, 2), (0xc000, 0x4000, 3)], 0);
        assert_eq!(table, Table(vec![(0, 0), (0x4000, 2), (0xc000, 3), (0x1_0000, 0)]));
        assert_eq!(table.map(|v| u32::from(v == 3)), Table(vec![(0, 0), (0xc000, 1), (0x1_0000, 0)]));
        assert_eq!(Table::new([(0, 5, 1)], 1).search().len(), 1);
    }

    #[test]
    fn what_is_too_long_is_refused() {
        let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let program = vec![end(0); MAX_INSTRUCTIONS + 1];
        assert!(attach(&socket, libc::SO_ATTACH_FILTER, &program).is_err());
        assert!(attach(&socket, libc::SO_ATTACH_FILTER, &program[1..]).is_ok());
    }
}
