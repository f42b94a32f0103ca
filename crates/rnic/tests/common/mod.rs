//! Two endpoints on a virtual clock: drivers that post and poll, and an RNIC between them.
#![allow(dead_code, missing_docs)]

pub mod cm;
pub mod cm_peer;
pub mod group;
pub mod net;
pub mod peer;
pub mod shared;

use unirdma_abi as abi;
use unirdma_formats::{Gid, QpType, WcStatus, WrOpcode, access, attr_mask as m, send_flags};
use unirdma_mem::{Bell, CqRing, CqTail, QpRings, Span};
use unirdma_rnic::{Backing, CreateQp, Limits, Output, Rnic, SessionId, Share, VnicConfig, VnicId};
use zerocopy::IntoBytes;

pub const MR_BYTES: usize = 1 << 20;
pub const IOVA: u64 = 0x10_0000;
pub const QKEY: u32 = 0x1234_5678;
pub const SECOND: u64 = 1_000_000_000;
pub const ALL: u32 = access::LOCAL_WRITE | access::REMOTE_WRITE | access::REMOTE_READ | access::REMOTE_ATOMIC;

/// Polls an RNIC, and does the jobs that it gives; true if there was anything to do.
pub fn poll(rnic: &mut Rnic, now: u64) -> bool {
    let mut found = rnic.poll(now);
    while let Some(mut job) = rnic.take_job() {
        job.run(&mut [0; 4096]);
        rnic.end_job(job);
        found = true;
    }
    found
}

/// A window at a multiple of 64.
pub fn aligned(len: usize) -> Span {
    let s = Span::anonymous(len + 64);
    s.sub((64 - s.addr() as u64 % 64) % 64, len as u64).unwrap()
}

pub struct End {
    pub vnic: VnicId,
    pub session: SessionId,
    pub bell: Bell,
    pub pd: u32,
    pub cqn: u32,
    pub cq: CqTail,
    pub qpn: u32,
    pub slot: u32,
    pub rings: QpRings,
    pub memory: Span,
    pub key: u32,
    pub mr: u32,
    pub sq_prod: u32,
    pub rq_prod: u32,
}

pub fn ip(n: u8) -> Gid {
    Gid::from_ip(std::net::IpAddr::from([10, 0, 0, n]))
}

impl End {
    pub fn new(rnic: &mut Rnic, group: u32, n: u8) -> End {
        Self::of_type(rnic, group, n, QpType::Rc)
    }

    pub fn of_type(rnic: &mut Rnic, group: u32, n: u8, typ: QpType) -> End {
        let vnic = rnic
            .add_vnic(VnicConfig { group, gids: vec![ip(n)], limits: Limits::default(), share: Share::default() })
            .unwrap();
        Self::of_vnic(rnic, vnic, 64, typ)
    }

    pub fn of_vnic(rnic: &mut Rnic, vnic: VnicId, cqes: u32, typ: QpType) -> End {
        let session = rnic.add_session(vnic).unwrap();
        let bell = Bell::new(aligned(4096)).unwrap();
        rnic.set_doorbell(session, bell.clone()).unwrap();
        rnic.unpark(session, 0);
        let pd = rnic.create_pd(session).unwrap();
        let (ctrl, ring) = (aligned(128), aligned(cqes as usize * 64));
        let dev = CqRing::new(ctrl.clone(), ring.clone(), cqes).unwrap();
        let cqn = rnic.create_cq(session, dev, Some(0)).unwrap();
        let cq = CqTail::new(ctrl, ring, cqes).unwrap();
        let cap =
            abi::QpCap { max_send_wr: 16, max_recv_wr: 16, max_send_sge: 4, max_recv_sge: 4, max_inline_data: 256 };
        let layout = abi::QpLayout::of(&cap).unwrap();
        let rings = QpRings::new(aligned(128), aligned(layout.sq_bytes()), aligned(layout.rq_bytes()), layout).unwrap();
        let create = CreateQp {
            pd,
            send_cq: cqn,
            recv_cq: cqn,
            srq: None,
            xrcd: None,
            sig_all: false,
            cap,
            rings: rings.clone(),
        };
        let (qpn, slot) = rnic.create_qp(session, typ as u8, create).unwrap();
        let memory = aligned(MR_BYTES);
        let (mr, key) =
            rnic.reg_mr(session, pd, ALL, IOVA, MR_BYTES as u64, (Backing::Mapped(memory.clone()), vec![7])).unwrap();
        End { vnic, session, bell, pd, cqn, cq, qpn, slot, rings, memory, key, mr, sq_prod: 0, rq_prod: 0 }
    }

    pub fn sge(&self, off: u64, length: u32) -> abi::Sge {
        abi::Sge { addr: IOVA + off, length, lkey: self.key }
    }

    pub fn post(&mut self, mut wqe: abi::SqWqe, sges: &[abi::Sge]) {
        wqe.num_sge = sges.len() as u8;
        self.rings.sq_put(self.sq_prod, abi::SQ_DATA, sges.as_bytes());
        self.post_raw(wqe);
    }

    /// Posts a datagram.
    pub fn post_to(&mut self, w: abi::SqWqe, ah: u32, dest_qpn: u32, sges: &[abi::Sge]) {
        self.post(abi::SqWqe { ah, dest_qpn, qkey: QKEY, ..w }, sges);
    }

    pub fn post_raw(&mut self, wqe: abi::SqWqe) {
        self.rings.sq_put(self.sq_prod, 0, wqe.as_bytes());
        self.sq_prod = self.sq_prod.wrapping_add(1);
        self.rings.set_sq_prod(self.sq_prod);
        self.bell.ring(self.slot);
    }

    pub fn recv(&mut self, wr_id: u64, sges: &[abi::Sge]) {
        let head = abi::RqWqe { wr_id, num_sge: sges.len() as u32, reserved: 0 };
        self.rings.rq_put(self.rq_prod, 0, head.as_bytes());
        self.rings.rq_put(self.rq_prod, abi::RQ_DATA, sges.as_bytes());
        self.rq_prod = self.rq_prod.wrapping_add(1);
        if self.rings.set_rq_prod(self.rq_prod) {
            self.bell.ring(self.slot);
        }
    }

    pub fn poll(&mut self) -> Vec<abi::Cqe> {
        let mut v = Vec::new();
        while let Some(c) = self.cq.pop() {
            v.push(c);
        }
        self.cq.release();
        v
    }

    /// The one completion that must be there.
    pub fn done(&mut self) -> abi::Cqe {
        let v = self.poll();
        assert_eq!(v.len(), 1, "{v:?}");
        v[0]
    }

    pub fn fill(&self, off: usize, bytes: &[u8]) {
        self.memory.write(off, bytes);
    }

    pub fn bytes(&self, off: usize, len: usize) -> Vec<u8> {
        let mut v = vec![0; len];
        self.memory.read(off, &mut v);
        v
    }
}

pub fn wqe(op: WrOpcode, wr_id: u64) -> abi::SqWqe {
    abi::SqWqe { wr_id, opcode: op as u8, send_flags: send_flags::SIGNALED, ..Default::default() }
}

pub struct Pair {
    pub rnic: Rnic,
    pub now: u64,
    pub a: End,
    pub b: End,
    pub outputs: Vec<Output>,
}

/// Attributes of the three steps to RTS of an RC QP.
pub fn attrs(peer: &End, gid: Gid) -> [(u32, abi::QpAttr); 3] {
    attrs_of(QpType::Rc, peer.qpn, gid)
}

/// Attributes of the three steps to RTS.
pub fn attrs_of(typ: QpType, peer_qpn: u32, gid: Gid) -> [(u32, abi::QpAttr); 3] {
    let a = abi::QpAttr {
        port_num: 1,
        qp_access_flags: ALL,
        path_mtu: 3,
        qkey: QKEY,
        dest_qp_num: peer_qpn,
        rq_psn: 100,
        sq_psn: 100,
        max_dest_rd_atomic: 4,
        max_rd_atomic: 4,
        min_rnr_timer: 12,
        timeout: 14,
        retry_cnt: 3,
        rnr_retry: 3,
        ah_attr: address(gid),
        ..Default::default()
    };
    let address = m::AV | m::PATH_MTU | m::DEST_QPN | m::RQ_PSN;
    let (init, rtr, rts) = match typ {
        QpType::Rc => (
            m::ACCESS_FLAGS,
            address | m::MAX_DEST_RD_ATOMIC | m::MIN_RNR_TIMER,
            m::TIMEOUT | m::RETRY_CNT | m::RNR_RETRY | m::SQ_PSN | m::MAX_QP_RD_ATOMIC,
        ),
        QpType::XrcSend => {
            (m::ACCESS_FLAGS, address, m::TIMEOUT | m::RETRY_CNT | m::RNR_RETRY | m::SQ_PSN | m::MAX_QP_RD_ATOMIC)
        }
        QpType::XrcRecv => (m::ACCESS_FLAGS, address | m::MAX_DEST_RD_ATOMIC | m::MIN_RNR_TIMER, m::SQ_PSN),
        QpType::Uc => (m::ACCESS_FLAGS, address, m::SQ_PSN),
        QpType::Ud => (m::QKEY, 0, m::SQ_PSN),
    };
    [
        (m::STATE | m::PKEY_INDEX | m::PORT | init, abi::QpAttr { qp_state: 1, ..a }),
        (m::STATE | rtr, abi::QpAttr { qp_state: 2, ..a }),
        (m::STATE | rts, abi::QpAttr { qp_state: 3, ..a }),
    ]
}

impl Pair {
    pub fn new() -> Pair {
        let mut rnic = Rnic::new(1, 0);
        let a = End::new(&mut rnic, 0, 1);
        let b = End::new(&mut rnic, 0, 2);
        let mut p = Pair { rnic, now: 0, a, b, outputs: Vec::new() };
        for (mask, attr) in attrs(&p.b, ip(2)) {
            p.rnic.modify_qp(p.a.session, p.a.qpn, mask, &attr).unwrap();
        }
        for (mask, attr) in attrs(&p.a, ip(1)) {
            p.rnic.modify_qp(p.b.session, p.b.qpn, mask, &attr).unwrap();
        }
        p
    }

    /// Runs until nothing happens any more at this time.
    pub fn settle(&mut self) {
        while poll(&mut self.rnic, self.now) {}
        self.rnic.drain_outputs(&mut self.outputs);
    }

    /// Settles, then lets time pass up to `limit` nanoseconds, from timer to timer.
    pub fn run(&mut self, limit: u64) {
        let end = self.now + limit;
        self.settle();
        while let Some(t) = self.rnic.next_timeout().filter(|&t| t <= end) {
            self.now = self.now.max(t);
            self.settle();
        }
        self.now = end;
        self.settle();
    }

    pub fn modify(&mut self, of_a: bool, mask: u32, attr: abi::QpAttr) {
        let e = if of_a { &self.a } else { &self.b };
        self.rnic.modify_qp(e.session, e.qpn, mask, &attr).unwrap();
    }

    /// Resets one QP and connects it to the other again, with its attributes changed.
    pub fn reconnect(&mut self, of_a: bool, change: impl Fn(abi::QpAttr) -> abi::QpAttr) {
        self.modify(of_a, m::STATE, abi::QpAttr::default());
        let steps = if of_a { attrs(&self.b, ip(2)) } else { attrs(&self.a, ip(1)) };
        let e = if of_a { &mut self.a } else { &mut self.b };
        (e.sq_prod, e.rq_prod) = (0, 0);
        e.rings.set_sq_prod(0);
        e.rings.set_rq_prod(0);
        for (mask, attr) in steps {
            self.modify(of_a, mask, change(attr));
        }
    }

    pub fn state(&self, of_a: bool) -> u8 {
        let e = if of_a { &self.a } else { &self.b };
        self.rnic.query_qp(e.session, e.qpn).unwrap().qp_state
    }
}

/// An address vector that leads to `gid`.
pub fn address(gid: Gid) -> abi::AhAttr {
    abi::AhAttr {
        grh: abi::GlobalRoute { dgid: gid.0, ..Default::default() },
        is_global: 1,
        port_num: 1,
        ..Default::default()
    }
}

/// Bytes that look random.
pub fn pattern(n: usize, salt: u64) -> Vec<u8> {
    let mut r = unirdma_rnic::Rng::new(salt);
    (0..n).map(|_| r.next_u64() as u8).collect()
}

pub fn status(c: &abi::Cqe) -> WcStatus {
    WcStatus::from_raw(c.status.into()).unwrap()
}
