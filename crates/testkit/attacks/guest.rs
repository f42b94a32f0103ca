//! A hostile kernel driver of a virtual machine. It sends commands that are nearly right, fills rings and doorbell
//! pages with junk, names memory outside its own, and forges MADs, while its VMM changes all of these.

use std::os::fd::AsFd;
use std::path::Path;
use std::sync::atomic::Ordering::SeqCst;

use unirdma_abi as abi;
use unirdma_formats::cm::{GSI_QKEY, GSI_QPN, MAD_BYTES};
use unirdma_formats::{Gid, attr_mask as m, send_flags};
use unirdma_link::RegionDesc;
use unirdma_mem::MemFd;
use unirdma_testkit::Hostile;
use zerocopy::{FromBytes, IntoBytes};

use crate::random::Random;
use crate::vanish::region;
use crate::{Until, ready};

/// The session's memory from here on is for rings, pages and lists, which may overlap. The control virtqueue lies
/// before it.
const BEGIN: u64 = 0x3_0000;
const END: u64 = 4 << 20;
/// Bus address of the memory that is added and removed.
const MORE: u64 = 1 << 53;
const MORE_BYTES: u64 = 1 << 20;
/// Number of steps of one connection.
const STEPS: u32 = 4000;
/// Number of handles that are remembered.
const KEPT: usize = 64;

macro_rules! lengths {
    ($($name:ident = $code:literal, $handler:ident($req:ident) -> $resp:ident;)*) => {
        /// Codes of all commands, and the lengths of their requests.
        const LENGTHS: &[(u8, usize)] = &[$(($code, size_of::<abi::$req>())),*];
    };
}

abi::for_each_command!(lengths);

/// A QP, and the addresses of its areas.
#[derive(Clone, Copy)]
struct Made {
    qpn: u32,
    slot: u32,
    typ: u8,
    ctrl: usize,
    sq: usize,
    layout: abi::QpLayout,
}

struct Driver {
    h: Hostile,
    r: Random,
    /// Handles that the device has returned.
    numbers: Vec<u32>,
    /// Bus addresses that MAP_RUNS has returned.
    mapped: Vec<u64>,
    keys: Vec<u32>,
    pages: Vec<u64>,
    qps: Vec<Made>,
    more: (MemFd, bool),
}

/// Adds an element, or replaces a random one when there are [`KEPT`].
fn keep<T>(all: &mut Vec<T>, r: &mut Random, one: T) {
    if all.len() < KEPT {
        all.push(one);
    } else {
        all[r.below(KEPT as u64) as usize] = one;
    }
}

impl Driver {
    fn new(socket: &Path, seed: u64) -> Driver {
        let more = MemFd::new(c"more", MORE_BYTES as usize).expect("memory file");
        let (numbers, mapped, keys, pages, qps) = Default::default();
        Driver { h: Hostile::new(socket), r: Random::new(seed), numbers, mapped, keys, pages, qps, more: (more, false) }
    }

    fn number(&mut self) -> u32 {
        let known = [&self.numbers, &self.keys][self.r.below(2) as usize];
        match self.r.below(8) {
            0 => 0,
            1 => u32::MAX,
            2 => self.r.below(64) as u32,
            3 => 1 << self.r.below(32),
            4 => self.r.next() as u32,
            _ if known.is_empty() => 1,
            _ => known[self.r.below(known.len() as u64) as usize],
        }
    }

    /// Offset of a random page of its own memory.
    fn page(&mut self) -> u64 {
        BEGIN + self.r.below((END - BEGIN) / 4096) * 4096
    }

    /// A random bus address, mostly of existing memory.
    fn address(&mut self) -> u64 {
        let page = self.page();
        match self.r.below(12) {
            0 => MORE + self.r.below(MORE_BYTES) / 4096 * 4096,
            1 => self.r.next(),
            2 => self.h.bus(END) - self.r.below(3) * 64,
            3 => u64::MAX - self.r.below(10_000),
            4 if !self.mapped.is_empty() => self.mapped[self.r.below(self.mapped.len() as u64) as usize],
            5 => 1 << self.r.below(64),
            _ => self.h.bus(page),
        }
    }

    /// Sends a command. Returns the data of its response if it succeeds. No response comes if the driver has damaged
    /// its control virtqueue.
    fn command(&mut self, code: u8, data: &[u8]) -> Option<Vec<u8>> {
        let head = abi::ReqHeader { command: code, ..Default::default() };
        let answer = self.h.request(&[head.as_bytes(), data].concat(), 1024)?;
        (answer.len() >= 8 && answer[0] == 0).then(|| answer[8..].to_vec())
    }

    /// Sends a command whose response begins with a number.
    fn make<R: FromBytes>(&mut self, code: abi::Command, data: &[u8]) -> Option<R> {
        let answer = self.command(code as u8, data)?;
        let number = abi::HandleResp::read_from_prefix(&answer).ok()?.0.handle;
        keep(&mut self.numbers, &mut self.r, number);
        R::read_from_prefix(&answer).ok().map(|r| r.0)
    }

    /// Sends a random command with random data, of the right length or another.
    fn any_command(&mut self) {
        let (code, len) = LENGTHS[self.r.below(LENGTHS.len() as u64) as usize];
        let (code, len) = match self.r.below(16) {
            0 => (self.r.next() as u8, self.r.below(300) as usize),
            1 => (code, self.r.below(1100) as usize),
            _ => (code, len),
        };
        let mut data = Vec::new();
        while data.len() < len {
            if data.len() % 8 == 0 && self.r.below(3) == 0 {
                data.extend(self.address().to_ne_bytes());
            } else {
                data.extend(self.number().to_ne_bytes());
            }
        }
        data.truncate(len);
        if let Some(answer) = self.command(code, &data).filter(|a| a.len() >= 4) {
            let number = u32::from_ne_bytes([answer[0], answer[1], answer[2], answer[3]]);
            keep(&mut self.numbers, &mut self.r, number);
        }
    }

    /// Writes a list of runs, of which some are wrong. Returns its bus address and its length.
    fn runs(&mut self) -> (u64, u32, u64) {
        let at = self.page();
        let (n, mut sum) = (1 + self.r.below(40), 0u64);
        for i in 0..n {
            let len = match self.r.below(12) {
                0 => 0,
                1 => self.r.next(),
                2 => 1 + self.r.below(5000),
                _ => 4096 * (1 + self.r.below(8)),
            };
            let run = abi::Run { addr: self.address(), length: len };
            sum = sum.wrapping_add(len);
            self.h.memory().write((at + i * 16) as usize, run.as_bytes());
        }
        let length = if self.r.below(8) == 0 { self.r.next() } else { sum };
        (self.h.bus(at), if self.r.below(16) == 0 { self.number() } else { n as u32 }, length)
    }

    /// Sends a command that creates an object, with mostly valid parameters.
    fn object(&mut self) {
        use abi::Command as C;
        let (pdn, addr, ctrl_addr) = (self.number(), self.address(), self.address());
        match self.r.below(8) {
            0 => _ = self.make::<abi::HandleResp>(C::CreatePd, &[]),
            1 => {
                let entries = 1 << self.r.below(9);
                let comp_queue = self.number();
                let cq =
                    abi::CreateCqReq { cqe: entries, entries, ring_addr: addr, ctrl_addr, comp_queue, reserved: 0 };
                self.make::<abi::HandleResp>(C::CreateCq, cq.as_bytes());
            }
            2 => {
                let first = self.r.below(4) == 0;
                let page = self.page();
                let bus = if self.r.below(8) == 0 { addr } else { self.h.bus(page) };
                let made = if first {
                    self.command(C::SetDoorbell as u8, bus.as_bytes()).is_some()
                } else {
                    self.make::<abi::HandleResp>(C::CreateDoorbell, bus.as_bytes()).is_some()
                };
                if made {
                    keep(&mut self.pages, &mut self.r, page);
                }
            }
            3 | 4 => self.qp(),
            5 => {
                let (runs_addr, num_runs, length) = self.runs();
                let mr = abi::RegMrRunsReq { pdn, access_flags: 15, length, runs_addr, num_runs, ..Default::default() };
                if let Some(mr) = self.make::<abi::MrResp>(C::RegMrRuns, mr.as_bytes()) {
                    keep(&mut self.keys, &mut self.r, mr.lkey);
                }
            }
            6 => {
                let (runs_addr, num_runs, length) = self.runs();
                let extend = abi::ExtendMrReq { mrn: pdn, num_runs, runs_addr, length };
                self.command(C::ExtendMr as u8, extend.as_bytes());
            }
            _ => {
                let (runs_addr, num_runs, length) = self.runs();
                let map = abi::MapRunsReq { runs_addr, num_runs, length, ..Default::default() };
                if let Some(made) = self.make::<abi::MapRunsResp>(C::MapRuns, map.as_bytes()) {
                    keep(&mut self.mapped, &mut self.r, made.addr);
                }
            }
        }
    }

    fn qp(&mut self) {
        let sizes = [self.r.below(32) as u32, self.r.below(32) as u32];
        let cap = abi::QpCap {
            max_send_wr: sizes[0],
            max_recv_wr: sizes[1],
            max_send_sge: 2,
            max_recv_sge: 2,
            max_inline_data: 64,
        };
        let Some(layout) = abi::QpLayout::of(&cap) else { return };
        let [ctrl, sq, rq] = [(); 3].map(|()| self.page());
        let typ = [1, 2, 2, 3, 4, 4][self.r.below(6) as usize];
        let numbers = [(); 5].map(|()| self.number());
        let bus = |at: u64, d: &mut Driver| if d.r.below(16) == 0 { d.address() } else { d.h.bus(at) };
        let request = abi::CreateQpReq {
            pdn: numbers[0],
            qp_type: typ,
            send_cqn: numbers[1],
            recv_cqn: numbers[2],
            cap,
            srqn: numbers[3],
            has_srq: u8::from(self.r.below(8) == 0),
            ctrl_addr: bus(ctrl, self),
            sq_addr: bus(sq, self),
            rq_addr: bus(rq, self),
            doorbell: if self.r.below(2) == 0 { 0 } else { numbers[4] },
            ..Default::default()
        };
        let Some(made) = self.make::<abi::CreateQpResp>(abi::Command::CreateQp, request.as_bytes()) else { return };
        let made = Made { qpn: made.qpn, slot: made.db_slot, typ, ctrl: ctrl as usize, sq: sq as usize, layout };
        keep(&mut self.qps, &mut self.r, made);
        self.steps(made);
    }

    /// A random address of the group.
    fn gid(&mut self) -> [u8; 16] {
        Gid::from_ip([10, 0, 0, 1 + self.r.below(5) as u8].into()).0
    }

    /// Moves a QP to RTS, connected to one of its own or to a random one.
    fn steps(&mut self, q: Made) {
        let others = self.qps.len() as u64;
        let peer = self.qps[self.r.below(others) as usize].qpn;
        let dest_qp_num = if self.r.below(4) == 0 { self.number() } else { peer };
        let attr = abi::QpAttr {
            port_num: 1,
            qp_access_flags: 15,
            qkey: GSI_QKEY,
            path_mtu: 1 + self.r.below(5) as u8,
            dest_qp_num,
            max_dest_rd_atomic: 4,
            max_rd_atomic: 4,
            min_rnr_timer: self.r.below(32) as u8,
            timeout: self.r.below(12) as u8,
            retry_cnt: 7,
            rnr_retry: 7,
            ah_attr: abi::AhAttr {
                grh: abi::GlobalRoute { dgid: self.gid(), hop_limit: 1, ..Default::default() },
                is_global: 1,
                port_num: 1,
                ..Default::default()
            },
            ..Default::default()
        };
        let rc = q.typ == 2;
        let connected = rc || q.typ == 3;
        let steps = [
            m::PKEY_INDEX | m::PORT | if connected { m::ACCESS_FLAGS } else { m::QKEY },
            match (connected, rc) {
                (true, true) => {
                    m::AV | m::PATH_MTU | m::DEST_QPN | m::RQ_PSN | m::MAX_DEST_RD_ATOMIC | m::MIN_RNR_TIMER
                }
                (true, false) => m::AV | m::PATH_MTU | m::DEST_QPN | m::RQ_PSN,
                _ => 0,
            },
            m::SQ_PSN | if rc { m::TIMEOUT | m::RETRY_CNT | m::RNR_RETRY | m::MAX_QP_RD_ATOMIC } else { 0 },
        ];
        for (mask, qp_state) in steps.into_iter().zip(1..) {
            let mask = if self.r.below(50) == 0 { self.r.next() as u32 } else { m::STATE | mask };
            let request = abi::ModifyQpReq { qpn: q.qpn, attr_mask: mask, attr: abi::QpAttr { qp_state, ..attr } };
            self.command(abi::Command::ModifyQp as u8, request.as_bytes());
        }
    }

    /// Posts WQEs that are nearly right to a random QP, and rings its doorbell.
    fn post(&mut self) {
        if self.qps.is_empty() {
            return;
        }
        let q = self.qps[self.r.below(self.qps.len() as u64) as usize];
        let first = self.h.memory().load32(q.ctrl + abi::QP_SQ_PROD, SeqCst);
        let n = 1 + self.r.below(8) as u32;
        for i in 0..n {
            let numbers = [(); 4].map(|()| self.number());
            let mut w = abi::SqWqe {
                wr_id: u64::from(i),
                opcode: self.r.below(17) as u8,
                num_sge: self.r.below(3) as u8,
                inline_len: self.r.below(80) as u16,
                send_flags: self.r.below(16) as u32,
                rkey: numbers[0],
                remote_addr: self.r.below(10_000),
                ah: numbers[1],
                dest_qpn: numbers[2],
                qkey: GSI_QKEY,
                ..Default::default()
            };
            if self.r.below(4) == 0 {
                w.send_flags |= [send_flags::STAGED, send_flags::ADDRESS][self.r.below(2) as usize];
            }
            let mut sges = [abi::Sge::default(); 2];
            for sge in &mut sges {
                let addr = if self.r.below(3) == 0 { self.address() } else { self.r.below(5000) };
                *sge = abi::Sge { addr, length: self.r.below(9000) as u32, lkey: numbers[3] };
            }
            if q.typ == abi::QP_TYPE_GSI {
                (w, sges[0]) = self.forged(w);
            }
            let slot = first.wrapping_add(i) % q.layout.sq_entries;
            let at = q.sq + slot as usize * q.layout.sq_stride as usize;
            self.h.memory().write(at, w.as_bytes());
            self.h.memory().write(at + abi::SQ_DATA, sges.as_bytes());
        }
        let jump = if self.r.below(50) == 0 { self.r.next() as u32 } else { n };
        self.h.memory().store32(q.ctrl + abi::QP_SQ_PROD, first.wrapping_add(jump), SeqCst);
        self.ring(q.slot);
    }

    /// A forged message of connection management, to a random address of the group.
    fn forged(&mut self, w: abi::SqWqe) -> (abi::SqWqe, abi::Sge) {
        let at = self.page();
        let mut mad = [0; MAD_BYTES];
        mad.fill_with(|| self.r.next() as u8);
        if self.r.below(8) > 0 {
            // Base version, management class (CM), class version, method.
            mad[..4].copy_from_slice(&[1, 7, 2, 3]);
            mad[16..20].copy_from_slice(&[0, 0x10 + self.r.below(12) as u8, 0, 0]);
        }
        self.h.memory().write(at as usize, &mad);
        let length = if self.r.below(16) == 0 { self.r.below(5000) } else { MAD_BYTES as u64 } as u32;
        let send_flags = send_flags::SIGNALED | send_flags::ADDRESS;
        let mut w = abi::SqWqe { opcode: 2, num_sge: 1, send_flags, dest_qpn: GSI_QPN, qkey: GSI_QKEY, ..w };
        let grh = abi::GlobalRoute { dgid: self.gid(), hop_limit: 1, ..Default::default() };
        let (sl, static_rate) = (self.r.below(16) as u8, self.r.below(26) as u8);
        w.set_address(&abi::AhAttr { grh, sl, static_rate, ..Default::default() });
        let lkey = self.number();
        (w, abi::Sge { addr: at, length, lkey })
    }

    /// Rings one doorbell bit, or all, of all pages.
    fn ring(&mut self, slot: u32) {
        let all = self.r.below(8) == 0;
        for &page in &self.pages {
            let (word, bit) = (slot as usize / 64, 1 << (slot % 64));
            let memory = self.h.memory();
            memory.or64(page as usize + abi::DB_BITS + word * 8, if all { u64::MAX } else { bit }, SeqCst);
            memory.or64(page as usize + abi::DB_SUMMARY, if all { u64::MAX } else { 1 << word }, SeqCst);
        }
        self.h.wake();
    }

    /// Writes junk to random places of its memory, often where control blocks and pages begin.
    fn junk(&mut self) {
        for _ in 0..1 + self.r.below(64) {
            let at = self.page() + if self.r.below(2) == 0 { self.r.below(32) * 4 } else { self.r.below(1024) * 4 };
            let word = self.number();
            self.h.memory().write(at as usize, word.as_bytes());
        }
        self.h.wake();
    }

    /// Makes a random change that a VMM may make at any time.
    fn change(&mut self) {
        let desc = region(MORE, MORE_BYTES);
        match self.r.below(6) {
            0 | 1 => {
                let frontend = &mut self.h.frontend;
                if self.more.1 {
                    let _ = frontend.remove_region(desc);
                } else {
                    let _ = frontend.add_region(desc, self.more.0.fd());
                }
                self.more.1 = !self.more.1;
            }
            // Adds the second half of its memory, twice, and a region that would cover the first half.
            2 => {
                let fd = self.h.fd();
                let bus_addr = self.address();
                let desc = RegionDesc { bus_addr, size: 1 << self.r.below(40), user_addr: 1 << 54, mmap_offset: 0 };
                if self.h.frontend.add_region(desc, fd.as_fd()).is_ok() {
                    let _ = self.h.frontend.remove_region(desc);
                }
            }
            // Pauses, and writes junk meanwhile.
            3 => {
                let _ = self.h.frontend.stop_vring(abi::VQ_CONTROL);
                self.junk();
                self.post();
                self.h.restart_control();
            }
            // Sets up event virtqueues at random addresses.
            4 => {
                let base = self.h.memory().addr() as u64;
                let at = [(); 3].map(|()| base + self.page());
                let queue = 1 + self.r.below(6) as u32;
                let size = 1 << self.r.below(9);
                let _ = self.h.frontend.set_vring(queue, size, at[0], at[1], at[2]);
            }
            _ => {
                let session = abi::NewSessionReq { features: self.r.below(4), reserved: 0 };
                self.command(abi::Command::NewSession as u8, session.as_bytes());
                self.qps.clear();
                self.pages.clear();
            }
        }
    }

    fn step(&mut self) {
        match self.r.below(40) {
            0..=11 => self.any_command(),
            12..=21 => self.object(),
            22..=33 => self.post(),
            34..=37 => self.junk(),
            38 => self.h.kick(),
            _ => self.change(),
        }
    }
}

/// Runs the driver, and reconnects now and then.
pub(crate) fn driver(socket: &Path, until: Until) {
    let mut seed = 1;
    ready();
    while !until.over() {
        let mut d = Driver::new(socket, seed);
        for _ in 0..STEPS {
            if until.over() {
                break;
            }
            d.step();
        }
        seed += 1;
    }
}
