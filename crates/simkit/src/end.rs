//! A program with one QP. It handles rings, a doorbell and a CQ as a driver does.

use std::ops::{Deref, DerefMut};

use unirdma_abi as abi;
use unirdma_formats::cm::GSI_QKEY;
use unirdma_formats::{Gid, QpState, QpType, WcStatus, WrOpcode, access, attr_mask as m, send_flags};
use unirdma_mem::{Bell, CqRing, CqTail, ProcMem, QpRings, Span};
use unirdma_rnic::{Backing, CreateQp, Limits, Rng, Rnic, SessionId, Share, VrnicConfig, VrnicId};
use zerocopy::IntoBytes;

use crate::QKEY;

/// Size of an end's memory.
pub const MR_BYTES: usize = 1 << 20;
/// The address at which an end's memory is registered.
pub const IOVA: u64 = 0x10_0000;
/// Local writes, and all access from the other side.
pub const ALL: u32 = access::LOCAL_WRITE | access::REMOTE_WRITE | access::REMOTE_READ | access::REMOTE_ATOMIC;

/// The driver's side of the queues of a QP.
pub struct Queues {
    /// The number of the QP.
    pub qpn: u32,
    /// The doorbell page of its session.
    pub bell: Bell,
    /// Its doorbell slot there.
    pub slot: u32,
    /// Its rings.
    pub rings: QpRings,
    /// How many send WQEs were posted.
    pub sq_prod: u32,
    /// How many receive WQEs were posted.
    pub rq_prod: u32,
}

/// Capacity of the QPs in simulations.
pub const CAP: abi::QpCap =
    abi::QpCap { max_send_wr: 16, max_recv_wr: 16, max_send_sge: 4, max_recv_sge: 4, max_inline_data: 256 };

/// Parameters of a QP with these CQs and new rings.
pub fn create_of(pd: u32, send_cq: u32, recv_cq: u32) -> CreateQp {
    let layout = abi::QpLayout::of(&CAP).unwrap();
    let rings = QpRings::new(aligned(128), aligned(layout.sq_bytes()), aligned(layout.rq_bytes()), layout).unwrap();
    CreateQp { pd, send_cq, recv_cq, srq: None, xrcd: None, door: 0, sig_all: false, cap: CAP, rings }
}

/// Creates a CQ of `cqes` entries. Returns its number, and the driver's side of it.
pub fn new_cq(rnic: &mut Rnic, session: SessionId, cqes: u32) -> (u32, CqTail) {
    let (ctrl, ring) = (aligned(128), aligned(cqes as usize * 64));
    let dev = CqRing::new(ctrl.clone(), ring.clone(), cqes).unwrap();
    (rnic.create_cq(session, dev, Some(0)).unwrap(), CqTail::new(ctrl, ring, cqes).unwrap())
}

impl Queues {
    /// Makes a QP.
    pub fn new(rnic: &mut Rnic, session: SessionId, bell: Bell, typ: u8, create: CreateQp) -> Queues {
        let rings = create.rings.clone();
        let (qpn, slot) = rnic.create_qp(session, typ, create).unwrap();
        Queues { qpn, bell, slot, rings, sq_prod: 0, rq_prod: 0 }
    }

    /// Posts a send WQE with these SGEs; true if the device asks for a kick.
    pub fn post(&mut self, mut wqe: abi::SqWqe, sges: &[abi::Sge]) -> bool {
        wqe.num_sge = sges.len() as u8;
        self.rings.sq_put(self.sq_prod, abi::SQ_DATA, sges.as_bytes());
        self.post_raw(wqe)
    }

    /// Posts a datagram.
    pub fn post_to(&mut self, w: abi::SqWqe, ah: u32, dest_qpn: u32, sges: &[abi::Sge]) {
        self.post(abi::SqWqe { ah, dest_qpn, qkey: QKEY, ..w }, sges);
    }

    /// Posts a send WQE as it is; its SGEs or inline data must be in the ring. As [`Queues::post`].
    pub fn post_raw(&mut self, wqe: abi::SqWqe) -> bool {
        self.rings.sq_put(self.sq_prod, 0, wqe.as_bytes());
        self.sq_prod = self.sq_prod.wrapping_add(1);
        self.rings.set_sq_prod(self.sq_prod);
        self.bell.ring(self.slot) != abi::AWAKE
    }

    /// Posts a receive.
    pub fn recv(&mut self, wr_id: u64, sges: &[abi::Sge]) {
        self.recv_raw(abi::RqWqe { wr_id, num_sge: sges.len() as u32, reserved: 0 }, sges);
    }

    /// Posts a receive WQE with this header, which may be wrong.
    pub fn recv_raw(&mut self, head: abi::RqWqe, sges: &[abi::Sge]) {
        self.rings.rq_put(self.rq_prod, 0, head.as_bytes());
        self.rings.rq_put(self.rq_prod, abi::RQ_DATA, sges.as_bytes());
        self.rq_prod = self.rq_prod.wrapping_add(1);
        if self.rings.set_rq_prod(self.rq_prod) {
            self.bell.ring(self.slot);
        }
    }

    /// The QP was reset: its queues begin at 0 again.
    pub fn restart(&mut self) {
        (self.sq_prod, self.rq_prod) = (0, 0);
        self.rings.set_sq_prod(0);
        self.rings.set_rq_prod(0);
    }
}

/// A program: one session with a PD, a CQ, a QP and registered memory.
pub struct End {
    /// Its vRNIC.
    pub vrnic: VrnicId,
    /// Its session.
    pub session: SessionId,
    /// The PD of everything that it has.
    pub pd: u32,
    /// The number of its CQ.
    pub cqn: u32,
    /// The driver's side of its CQ.
    pub cq: CqTail,
    /// Its QP, whose queues it dereferences to.
    pub queues: Queues,
    /// [`MR_BYTES`] of memory, registered at [`IOVA`].
    pub memory: Span,
    /// lkey and rkey of its memory.
    pub key: u32,
    /// The MR of its memory.
    pub mr: u32,
    /// Its memory is reached as private memory of a process.
    pub in_process: bool,
}

impl Deref for End {
    type Target = Queues;

    fn deref(&self) -> &Queues {
        &self.queues
    }
}

impl DerefMut for End {
    fn deref_mut(&mut self) -> &mut Queues {
        &mut self.queues
    }
}

impl End {
    /// A program with an RC QP on a new vRNIC with the address `ip(n)` in this group.
    pub fn new(rnic: &mut Rnic, group: u32, n: u8) -> End {
        Self::of_type(rnic, group, n, QpType::Rc)
    }

    /// A program with a QP of this type on a new vRNIC with the address `ip(n)` in this group.
    pub fn of_type(rnic: &mut Rnic, group: u32, n: u8, typ: QpType) -> End {
        let vrnic = rnic
            .add_vrnic(VrnicConfig { group, gids: vec![ip(n)], limits: Limits::default(), share: Share::default() })
            .unwrap();
        Self::of_vrnic(rnic, vrnic, 64, typ)
    }

    /// A program on this vRNIC, with a QP of this type and a CQ of `cqes` entries.
    pub fn of_vrnic(rnic: &mut Rnic, vrnic: VrnicId, cqes: u32, typ: QpType) -> End {
        Self::with_raw(rnic, vrnic, cqes, typ as u8)
    }

    /// A driver with the vRNIC's QP for general services (GSI), in RTS.
    pub fn of_services(rnic: &mut Rnic, vrnic: VrnicId) -> End {
        let e = Self::with_raw(rnic, vrnic, 64, abi::QP_TYPE_GSI);
        // The attributes that kernels set in each step.
        let steps = [(QpState::Init, m::PKEY_INDEX | m::QKEY), (QpState::Rtr, 0), (QpState::Rts, m::SQ_PSN)];
        for (state, mask) in steps {
            let attr = abi::QpAttr { qp_state: state as u8, qkey: GSI_QKEY, ..Default::default() };
            rnic.modify_qp(e.session, e.qpn, m::STATE | mask, &attr).unwrap();
        }
        e
    }

    fn with_raw(rnic: &mut Rnic, vrnic: VrnicId, cqes: u32, typ: u8) -> End {
        let session = rnic.add_session(vrnic).unwrap();
        let bell = Bell::new(aligned(4096)).unwrap();
        rnic.set_doorbell(session, bell.clone()).unwrap();
        rnic.unpark(session, 0);
        let pd = rnic.create_pd(session).unwrap();
        let (cqn, cq) = new_cq(rnic, session, cqes);
        let queues = Queues::new(rnic, session, bell, typ, create_of(pd, cqn, cqn));
        let memory = aligned(MR_BYTES);
        let (mr, key) =
            rnic.reg_mr(session, pd, ALL, IOVA, MR_BYTES as u64, (Backing::Mapped(memory.clone()), vec![7])).unwrap();
        End { vrnic, session, pd, cqn, cq, queues, memory, key, mr, in_process: false }
    }

    /// Registers its memory as private memory of a process, and uses that MR from now on.
    pub fn go_through_process(&mut self, rnic: &mut Rnic) {
        self.in_process = true;
        let made = rnic.reg_mr(self.session, self.pd, ALL, IOVA, MR_BYTES as u64, (self.backing(), vec![8])).unwrap();
        (self.mr, self.key) = made;
    }

    /// Where its memory lies.
    pub fn backing(&self) -> Backing {
        if !self.in_process {
            return Backing::Mapped(self.memory.clone());
        }
        Backing::Process(ProcMem::of_self().unwrap(), self.memory.addr() as u64)
    }

    /// An SGE of its memory.
    pub fn sge(&self, off: u64, length: u32) -> abi::Sge {
        abi::Sge { addr: IOVA + off, length, lkey: self.key }
    }

    /// As [`Queues::post`]; arguments may borrow the end.
    pub fn post(&mut self, wqe: abi::SqWqe, sges: &[abi::Sge]) -> bool {
        self.queues.post(wqe, sges)
    }

    /// As [`Queues::post_to`].
    pub fn post_to(&mut self, w: abi::SqWqe, ah: u32, dest_qpn: u32, sges: &[abi::Sge]) {
        self.queues.post_to(w, ah, dest_qpn, sges);
    }

    /// As [`Queues::post_raw`].
    pub fn post_raw(&mut self, wqe: abi::SqWqe) -> bool {
        self.queues.post_raw(wqe)
    }

    /// As [`Queues::recv`].
    pub fn recv(&mut self, wr_id: u64, sges: &[abi::Sge]) {
        self.queues.recv(wr_id, sges);
    }

    /// Takes all completions from the CQ.
    pub fn poll(&mut self) -> Vec<abi::Cqe> {
        let mut v = Vec::new();
        while let Some(c) = self.cq.pop() {
            v.push(c);
        }
        self.cq.release();
        v
    }

    /// The completion of the CQ, which must have exactly one.
    pub fn done(&mut self) -> abi::Cqe {
        let v = self.poll();
        assert_eq!(v.len(), 1, "{v:?}");
        v[0]
    }

    /// Writes to its memory.
    pub fn fill(&self, off: usize, bytes: &[u8]) {
        self.memory.write(off, bytes);
    }

    /// Reads from its memory.
    pub fn bytes(&self, off: usize, len: usize) -> Vec<u8> {
        let mut v = vec![0; len];
        self.memory.read(off, &mut v);
        v
    }
}

/// New memory that begins at a multiple of 64.
pub fn aligned(len: usize) -> Span {
    let s = Span::anonymous(len + 64);
    s.sub((64 - s.addr() as u64 % 64) % 64, len as u64).unwrap()
}

/// The GID of the address 10.0.0.n.
pub fn ip(n: u8) -> Gid {
    Gid::from_ip(std::net::IpAddr::from([10, 0, 0, n]))
}

/// A signaled send WQE of this operation.
pub fn wqe(op: WrOpcode, wr_id: u64) -> abi::SqWqe {
    abi::SqWqe { wr_id, opcode: op as u8, send_flags: send_flags::SIGNALED, ..Default::default() }
}

/// Bytes that look random.
pub fn pattern(n: usize, salt: u64) -> Vec<u8> {
    let mut r = Rng::new(salt);
    let mut bytes: Vec<u8> = (0..n.div_ceil(8)).flat_map(|_| r.next_u64().to_le_bytes()).collect();
    bytes.truncate(n);
    bytes
}

/// The status of a completion.
pub fn status(c: &abi::Cqe) -> WcStatus {
    WcStatus::from_raw(c.status.into()).unwrap()
}
