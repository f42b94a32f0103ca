//! Very many small parts: of an MR, of a message, of a session; and datagrams that wait for receives that never come.

use std::os::fd::AsFd;
use std::path::Path;
use std::time::Duration;

use unirdma_abi as abi;
use unirdma_formats::{QpType, WrOpcode};
use unirdma_mem::MemFd;
use unirdma_testkit::{Queue, Scripted};
use zerocopy::IntoBytes;

use crate::vanish::{region, sparse_file};
use crate::{MTU_4096, Until, ready};

const PAGE: u64 = 4096;
const AT: u64 = 1 << 53;

/// Writes a list of runs to the session's memory. Returns its bus address.
fn list(s: &mut Scripted, runs: &[[u64; 2]]) -> u64 {
    let at = s.alloc(runs.as_bytes().len() as u64);
    s.hostile.memory().write(at as usize, runs.as_bytes());
    s.hostile.bus(at)
}

/// Extends an MR by a run of `length` bytes, at most `times` times or until the device refuses. Returns the number of
/// runs.
fn extend(s: &mut Scripted, mrn: u32, runs_addr: u64, length: u64, times: u32, until: Until) -> u32 {
    let request = abi::ExtendMrReq { mrn, num_runs: 1, runs_addr, length };
    let done = |s: &mut Scripted| s.hostile.command(abi::Command::ExtendMr as u8, request.as_bytes()).0 == 0;
    (0..times).take_while(|_| !until.over() && done(s)).count() as u32
}

/// One MR of the most lists that are allowed, again and again.
pub(crate) fn lists(socket: &Path, until: Until) {
    let mut s = Scripted::new(socket);
    let page = s.alloc(2 * PAGE).next_multiple_of(PAGE);
    let page = s.hostile.bus(page);
    let runs = list(&mut s, &[[page, PAGE]]);
    ready();
    while !until.over() {
        let mr = s.mr(page, PAGE);
        extend(&mut s, mr.mrn, runs, PAGE, u32::MAX, until);
        s.order(abi::Command::DeregMr, &abi::HandleReq { handle: mr.mrn, reserved: 0 });
    }
}

/// WRITEs through two MRs whose pieces are one byte long.
pub(crate) fn crumbs(socket: &Path, until: Until) {
    /// Bytes of a WRITE, and pieces of an MR.
    const LEN: u32 = 16 << 10;
    let mut s = Scripted::new(socket);
    let bytes = s.alloc(PAGE);
    let at = s.hostile.bus(bytes);
    let crumbs = |s: &mut Scripted, at: u64| {
        let (runs, mr) = (list(s, &[[at, 1]]), s.mr(at, 1));
        (mr, 1 + extend(s, mr.mrn, runs, 1, LEN - 1, until))
    };
    let ((from, n), (to, m)) = (crumbs(&mut s, at), crumbs(&mut s, at + 64));
    let local = abi::Sge { addr: 0, length: n.min(m), lkey: from.lkey };
    let (q, _) = s.pair(16, MTU_4096);
    (0..q.entries()).for_each(|i| s.write(&q, i, WrOpcode::Write, local, (0, to.rkey)));
    ready();
    while !until.over() {
        s.post(&q, s.executed(&q).wrapping_add(q.entries()));
        std::thread::sleep(Duration::from_micros(100));
    }
}

/// A region with very many MRs that is removed and added again.
pub(crate) fn revoked(socket: &Path, until: Until) {
    const MRS: u32 = 30_000;
    let mut s = Scripted::new(socket);
    let file = sparse_file(PAGE);
    ready();
    while !until.over() {
        s.hostile.frontend.add_region(region(AT, PAGE), file.as_fd()).expect("region");
        let request = s.mr_request(AT, PAGE);
        let register = |s: &mut Scripted| s.hostile.command(abi::Command::RegUserMr as u8, request.as_bytes()).0 == 0;
        let _ = (0..MRS).take_while(|_| !until.over() && register(&mut s)).count();
        s.hostile.frontend.remove_region(region(AT, PAGE)).expect("removal");
    }
}

/// The most address ranges that a session may have, again and again.
pub(crate) fn ranges(socket: &Path, until: Until) {
    let mut s = Scripted::new(socket);
    let file = MemFd::new(c"ranges", PAGE as usize).expect("memory file");
    let at = s.add_memory(&file);
    let runs_addr = list(&mut s, &[[at, PAGE]]);
    let request = abi::MapRunsReq { runs_addr, num_runs: 1, reserved: 0, length: PAGE };
    ready();
    while !until.over() {
        let mut handles = Vec::new();
        while let (0, data) = s.hostile.command(abi::Command::MapRuns as u8, request.as_bytes()) {
            let Some(handle) = data.first_chunk().map(|b| u32::from_le_bytes(*b)) else { break };
            handles.push(handle);
        }
        for handle in handles {
            s.order(abi::Command::UnmapRuns, &abi::HandleReq { handle, reserved: 0 });
        }
    }
}

/// Datagrams to very many QPs without receives. Each QP keeps some for a while.
pub(crate) fn backlog(socket: &Path, until: Until) {
    const RECEIVERS: u32 = 2_000;
    const SLOTS: u32 = 4_096;
    const LEN: u32 = 4_000;
    const QKEY: u32 = 0x1111_1111;
    let mut s = Scripted::new(socket);
    let enabled = |s: &mut Scripted, slots: u32| {
        let q = s.queue_of(QpType::Ud, slots, 0);
        s.enable(&q, QKEY);
        q
    };
    let receivers: Vec<Queue> = (0..RECEIVERS).map(|_| enabled(&mut s, 1)).collect();
    let q = enabled(&mut s, SLOTS);
    let grh = abi::GlobalRoute { dgid: s.gid, hop_limit: 1, ..Default::default() };
    let attr = abi::AhAttr { grh, is_global: 1, port_num: 1, ..Default::default() };
    let ah = abi::CreateAhReq { pdn: s.pdn, reserved: 0, attr };
    let ah = s.ask::<abi::HandleResp>(abi::Command::CreateAh, &ah).handle;
    let data = s.alloc(LEN.into());
    let mr = s.mr(s.hostile.bus(data), LEN.into());
    let local = abi::Sge { addr: 0, length: LEN, lkey: mr.lkey };
    let send = abi::SqWqe { opcode: WrOpcode::Send as u8, ah, qkey: QKEY, ..Default::default() };
    for i in 0..SLOTS {
        let dest_qpn = receivers[(i % RECEIVERS) as usize].qpn;
        s.write_wqe(&q, i, abi::SqWqe { dest_qpn, ..send }, local);
    }
    ready();
    while !until.over() {
        s.post(&q, s.executed(&q).wrapping_add(SLOTS));
        std::thread::sleep(Duration::from_micros(100));
    }
}
