//! Work requests, doorbells and timers that cost their owner less than the virtual layer.

use std::path::Path;
use std::time::Duration;

use unirdma_abi as abi;
use unirdma_formats::{Gid, QpType, WrOpcode};
use unirdma_mem::MemFd;
use unirdma_testkit::{Queue, Scripted};
use zerocopy::IntoBytes;

use crate::{MTU_4096, Until, ready};

/// `IBV_MTU_256`.
const MTU_256: u8 = 1;

/// SENDs whose receivers are never ready. Each is retried after the shortest RNR timer, at no cost to this process.
pub(crate) fn rnr(socket: &Path, mut qps: u32, until: Until) {
    let mut sessions = Vec::new();
    while qps > 0 {
        let some = qps.min(abi::MAX_QP);
        qps -= some;
        let mut s = Scripted::new(socket);
        let queues: Vec<Queue> = (0..some).map(|_| s.queue(1)).collect();
        for pair in queues.chunks_exact(2) {
            s.connect(&pair[0], s.gid, pair[1].qpn, MTU_4096);
            s.connect(&pair[1], s.gid, pair[0].qpn, MTU_4096);
        }
        sessions.push((s, queues));
    }
    for (s, queues) in &sessions {
        for q in queues {
            s.write(q, 0, WrOpcode::Send, abi::Sge::default(), (0, 0));
            s.post(q, 1);
        }
    }
    ready();
    until.sleep();
}

pub(crate) fn bells(socket: &Path, until: Until) {
    let sessions: Vec<Scripted> = (0..64).map(|_| Scripted::new(socket)).collect();
    ready();
    while !until.over() {
        sessions.iter().for_each(Scripted::ring_all);
    }
}

pub(crate) fn flood(socket: &Path, until: Until) {
    let mut s = Scripted::new(socket);
    let (q, _) = s.pair(4096, MTU_4096);
    let data = s.alloc(128);
    let mr = s.mr(s.hostile.bus(data), 128);
    let local = abi::Sge { addr: 0, length: 64, lkey: mr.lkey };
    for i in 0..q.entries() {
        s.write(&q, i, WrOpcode::Write, local, (64, mr.rkey));
    }
    ready();
    while !until.over() {
        let executed = s.executed(&q);
        if s.posted(&q).wrapping_sub(executed) < q.entries() / 2 {
            s.post(&q, executed.wrapping_add(q.entries()));
        }
        std::thread::sleep(Duration::from_micros(100));
    }
}

/// Posts one request after the other, each in the next slot of the SQ, and waits for each without a busy loop.
pub(crate) fn one_by_one(s: &Scripted, q: &Queue, until: Until, mut write: impl FnMut(u32)) {
    while !until.over() {
        let index = s.posted(q);
        write(index);
        s.post(q, index.wrapping_add(1));
        while s.executed(q) == index && !until.over() {
            std::thread::sleep(Duration::from_micros(20));
        }
    }
}

/// Large WRITEs, each of which is very many packets in a capture.
pub(crate) fn capw(socket: &Path, until: Until) {
    const LEN: u64 = 128 << 20;
    let mut s = Scripted::new(socket);
    let file = MemFd::new(c"capw", 2 * LEN as usize).expect("memory file");
    let at = s.add_memory(&file);
    let mr = s.mr(at, 2 * LEN);
    let (q, _) = s.pair(16, MTU_256);
    ready();
    let local = abi::Sge { addr: 0, length: LEN as u32, lkey: mr.lkey };
    one_by_one(&s, &q, until, |i| s.write(&q, i, WrOpcode::Write, local, (LEN, mr.rkey)));
}

/// Datagrams to a multicast group of very many QPs without receives. One request makes a message for each member, and
/// each message is kept for a while in case a receive is posted.
pub(crate) fn mcast(socket: &Path, until: Until) {
    const MEMBERS: u32 = 2048;
    const SLOTS: u32 = 64;
    const LEN: u32 = 4096;
    /// The QPN of all members of a group.
    const ALL: u32 = 0xff_ffff;
    const QKEY: u32 = 0x1111_1111;
    let mut s = Scripted::new(socket);
    let group = Gid::from_ip([239, 1, 1, 1].into()).0;
    let mut members = 0;
    for _ in 0..MEMBERS {
        let q = s.queue_of(QpType::Ud, 1, 0);
        s.enable(&q, QKEY);
        let attach = abi::McastReq { qpn: q.qpn, gid: group, ..Default::default() };
        if s.hostile.command(abi::Command::AttachMcast as u8, attach.as_bytes()).0 != 0 {
            break;
        }
        members += 1;
    }
    assert!(members > 0, "no QP may be a member");
    let q = s.queue_of(QpType::Ud, SLOTS, 0);
    s.enable(&q, QKEY);
    let grh = abi::GlobalRoute { dgid: group, hop_limit: 1, ..Default::default() };
    let attr = abi::AhAttr { grh, is_global: 1, port_num: 1, ..Default::default() };
    let ah =
        s.ask::<abi::HandleResp>(abi::Command::CreateAh, &abi::CreateAhReq { pdn: s.pdn, reserved: 0, attr }).handle;
    let data = s.alloc(LEN.into());
    let mr = s.mr(s.hostile.bus(data), LEN.into());
    let local = abi::Sge { addr: 0, length: LEN, lkey: mr.lkey };
    for i in 0..SLOTS {
        let send = WrOpcode::Send as u8;
        s.write_wqe(&q, i, abi::SqWqe { opcode: send, ah, dest_qpn: ALL, qkey: QKEY, ..Default::default() }, local);
    }
    ready();
    while !until.over() {
        s.post(&q, s.executed(&q).wrapping_add(SLOTS));
        std::thread::sleep(Duration::from_micros(100));
    }
}
