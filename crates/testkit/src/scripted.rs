//! A session without a driver. Its user writes WQEs, indices and doorbell bits directly.

use std::path::Path;
use std::sync::atomic::Ordering::{Release, SeqCst};

use unirdma_abi as abi;
use unirdma_formats::{QpType, WrOpcode, attr_mask as m};
use unirdma_link::RegionDesc;
use unirdma_mem::{Bell, MemFd, Span};
use zerocopy::{FromBytes, IntoBytes};

use crate::Hostile;

/// Offset of the doorbell page in the session's memory. [`Scripted::alloc`] has everything from the next page on.
const DOORBELL: u64 = 0x3_0000;
const PAGE: u64 = 4096;
/// Bus address of the first region that [`Scripted::add_memory`] adds.
const MORE_MEMORY: u64 = 1 << 52;
const ALL_ACCESS: u32 = 15;

/// A session with a doorbell page, a PD and a CQ, made by control commands only.
pub struct Scripted {
    /// The frontend, the session's memory, and its control virtqueue.
    pub hostile: Hostile,
    /// The PD of the session.
    pub pdn: u32,
    /// GID 0 of the vRNIC.
    pub gid: [u8; 16],
    /// The CQ of new QPs.
    pub cqn: u32,
    /// The control block of the CQ that [`Scripted::own_cq`] made.
    cq_ctrl: Option<Span>,
    bell: Bell,
    free: u64,
    regions: u64,
}

/// A QP of a scripted session, and where its rings are in the session's memory.
#[derive(Clone, Copy, Debug)]
pub struct Queue {
    /// Its number.
    pub qpn: u32,
    qp_type: QpType,
    db_slot: u32,
    ctrl: usize,
    sq: usize,
    rq: usize,
    layout: abi::QpLayout,
}

impl Queue {
    /// Slots of the SQ.
    pub fn entries(&self) -> u32 {
        self.layout.sq_entries
    }

    /// Slots of the RQ.
    pub fn receives(&self) -> u32 {
        self.layout.rq_entries
    }
}

impl Scripted {
    /// Connects to a vRNIC and makes the objects.
    ///
    /// # Panics
    /// If any of it fails.
    pub fn new(socket: &Path) -> Self {
        let hostile = Hostile::new(socket);
        let page = hostile.memory().sub(DOORBELL, PAGE).expect("a page of the memory");
        let mut s = Scripted {
            hostile,
            pdn: 0,
            gid: [0; 16],
            cqn: 0,
            cq_ctrl: None,
            bell: Bell::new(page).expect("a doorbell page"),
            free: DOORBELL + PAGE,
            regions: 0,
        };
        let page = s.hostile.bus(DOORBELL);
        s.order(abi::Command::SetDoorbell, &page);
        s.pdn = s.ask::<abi::HandleResp>(abi::Command::CreatePd, &[0u8; 0]).handle;
        s.gid = s.ask::<abi::QueryGidResp>(abi::Command::QueryGid, &abi::QueryGidReq { port: 1, index: 0 }).gid;
        let entries = 64;
        let (ring, ctrl) = (s.alloc(u64::from(entries) * size_of::<abi::Cqe>() as u64), s.alloc(128));
        s.make_cq(entries, s.hostile.bus(ring), s.hostile.bus(ctrl), abi::NO_COMP_QUEUE);
        s
    }

    /// Creates a CQ whose ring and control block are at these bus addresses, and whose events go to this event queue.
    /// QPs that are created later use it.
    ///
    /// # Panics
    /// If the device refuses it.
    pub fn make_cq(&mut self, entries: u32, ring_addr: u64, ctrl_addr: u64, comp_queue: u32) {
        let cq = abi::CreateCqReq { cqe: entries, entries, ring_addr, ctrl_addr, comp_queue, reserved: 0 };
        self.cqn = self.ask::<abi::HandleResp>(abi::Command::CreateCq, &cq).handle;
    }

    /// As [`Scripted::make_cq`], in memory of its own.
    ///
    /// # Panics
    /// If the device refuses it.
    pub fn own_cq(&mut self, entries: u32, comp_queue: u32) {
        let ring = entries as usize * size_of::<abi::Cqe>();
        let file = MemFd::new(c"cq", (ring + size_of::<abi::CqCtrl>()).next_multiple_of(4096)).expect("memory file");
        let at = self.add_memory(&file);
        self.make_cq(entries, at, at + ring as u64, comp_queue);
        self.cq_ctrl = file.span().sub(ring as u64, size_of::<abi::CqCtrl>() as u64);
    }

    /// Returns all entries of the CQ of [`Scripted::own_cq`] to the device.
    pub fn drain_cq(&self) {
        let Some(ctrl) = &self.cq_ctrl else { return };
        ctrl.store32(abi::CQ_CONS, ctrl.load32(abi::CQ_PROD, SeqCst), SeqCst);
    }

    /// Arms the CQ of [`Scripted::own_cq`] for its next completion.
    pub fn arm_cq(&self) {
        let Some(ctrl) = &self.cq_ctrl else { return };
        let sequence = ctrl.load32(abi::CQ_ARM, SeqCst) >> 2;
        ctrl.store32(abi::CQ_ARM, sequence.wrapping_add(1) << 2 | abi::NOTIFY_NEXT, SeqCst);
    }

    /// Sends a control command and ignores the data of its response.
    ///
    /// # Panics
    /// If the device refuses it.
    pub fn order(&mut self, command: abi::Command, request: &(impl IntoBytes + zerocopy::Immutable + ?Sized)) {
        let (status, _) = self.hostile.command(command as u8, request.as_bytes());
        assert_eq!(status, 0, "{command:?} failed");
    }

    /// Sends a control command. Returns its response.
    ///
    /// # Panics
    /// If the device refuses it.
    pub fn ask<R: FromBytes>(
        &mut self,
        command: abi::Command,
        request: &(impl IntoBytes + zerocopy::Immutable + ?Sized),
    ) -> R {
        let (status, data) = self.hostile.command(command as u8, request.as_bytes());
        assert_eq!(status, 0, "{command:?} failed");
        let Ok((response, _)) = R::read_from_prefix(&data) else { panic!("{command:?} answered {} bytes", data.len()) };
        response
    }

    /// Allocates `bytes` of the session's memory. Returns their offset.
    ///
    /// # Panics
    /// If the memory is used up.
    pub fn alloc(&mut self, bytes: u64) -> u64 {
        let at = self.free;
        self.free = (at + bytes).next_multiple_of(128);
        assert!(self.free <= self.hostile.memory().len() as u64, "the session's memory is used up");
        at
    }

    /// End of the memory that [`Scripted::alloc`] has allocated, for [`Scripted::release`].
    pub fn allocated(&self) -> u64 {
        self.free
    }

    /// Frees the memory that was allocated since [`Scripted::allocated`] returned `mark`. The device must not use it
    /// any more.
    pub fn release(&mut self, mark: u64) {
        self.free = mark;
    }

    /// Adds a memory file to the session's memory. Returns its bus address.
    ///
    /// # Panics
    /// If the device refuses it.
    pub fn add_memory(&mut self, file: &MemFd) -> u64 {
        let bus_addr = MORE_MEMORY + (self.regions << 40);
        self.regions += 1;
        let size = file.span().len() as u64;
        let region = RegionDesc { bus_addr, size, user_addr: bus_addr, mmap_offset: 0 };
        self.hostile.frontend.add_region(region, file.fd()).expect("region");
        bus_addr
    }

    /// Request for an MR over a range of bus addresses, with all access, at IOVA 0.
    pub fn mr_request(&self, start: u64, length: u64) -> abi::RegUserMrReq {
        abi::RegUserMrReq { pdn: self.pdn, access_flags: ALL_ACCESS, start, length, ..Default::default() }
    }

    /// Creates an MR over a range of bus addresses, with all access, at IOVA 0.
    ///
    /// # Panics
    /// If the device refuses it.
    pub fn mr(&mut self, start: u64, length: u64) -> abi::MrResp {
        let request = self.mr_request(start, length);
        self.ask(abi::Command::RegUserMr, &request)
    }

    /// Creates an RC QP with `send_wr` slots in its SQ, each with one SGE.
    ///
    /// # Panics
    /// If the device refuses it.
    pub fn queue(&mut self, send_wr: u32) -> Queue {
        self.queue_of(QpType::Rc, send_wr, 0)
    }

    /// As [`Scripted::queue`], with a QP of any type. `xrcdn` is the XRC domain of an XRC target.
    ///
    /// # Panics
    /// If the device refuses it.
    pub fn queue_of(&mut self, qp_type: QpType, send_wr: u32, xrcdn: u32) -> Queue {
        self.queue_with(qp_type, send_wr, 4, xrcdn)
    }

    /// As [`Scripted::queue_of`], with `recv_wr` slots in its RQ.
    ///
    /// # Panics
    /// If the device refuses it.
    pub fn queue_with(&mut self, qp_type: QpType, send_wr: u32, recv_wr: u32, xrcdn: u32) -> Queue {
        let cap = abi::QpCap {
            max_send_wr: send_wr,
            max_recv_wr: recv_wr,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline_data: 0,
        };
        let layout = abi::QpLayout::of(&cap).expect("the device's limits");
        let (ctrl, sq, rq) =
            (self.alloc(128), self.alloc(layout.sq_bytes() as u64), self.alloc(layout.rq_bytes() as u64));
        let request = abi::CreateQpReq {
            pdn: self.pdn,
            qp_type: qp_type as u8,
            send_cqn: self.cqn,
            recv_cqn: self.cqn,
            cap,
            ctrl_addr: self.hostile.bus(ctrl),
            sq_addr: self.hostile.bus(sq),
            rq_addr: self.hostile.bus(rq),
            xrcdn,
            ..Default::default()
        };
        let made: abi::CreateQpResp = self.ask(abi::Command::CreateQp, &request);
        let [ctrl, sq, rq] = [ctrl, sq, rq].map(|at| at as usize);
        Queue { qpn: made.qpn, qp_type, db_slot: made.db_slot, ctrl, sq, rq, layout }
    }

    /// Moves a QP to RTS, connected to QP `peer` of the vRNIC with `gid`; `path_mtu` is an `ibv_mtu`. The QP retries
    /// for ever if its receiver is not ready, and as a receiver it asks for the shortest RNR timer.
    ///
    /// # Panics
    /// If the device refuses it.
    pub fn connect(&mut self, q: &Queue, gid: [u8; 16], peer: u32, path_mtu: u8) {
        self.connect_with(q, gid, peer, |a| abi::QpAttr { path_mtu, ..a });
    }

    /// As [`Scripted::connect`], for RC, UC and XRC. `change` changes the attributes.
    ///
    /// # Panics
    /// If the device refuses it.
    pub fn connect_with(&mut self, q: &Queue, gid: [u8; 16], peer: u32, change: impl Fn(abi::QpAttr) -> abi::QpAttr) {
        let attr = change(abi::QpAttr {
            port_num: 1,
            qp_access_flags: ALL_ACCESS,
            path_mtu: 5,
            dest_qp_num: peer,
            max_dest_rd_atomic: 1,
            max_rd_atomic: 1,
            min_rnr_timer: 1,
            timeout: 8,
            retry_cnt: 7,
            rnr_retry: 7,
            ah_attr: abi::AhAttr {
                grh: abi::GlobalRoute { dgid: gid, ..Default::default() },
                is_global: 1,
                port_num: 1,
                ..Default::default()
            },
            ..Default::default()
        });
        let (responds, requests) = match q.qp_type {
            QpType::Uc => (false, false),
            typ => (typ != QpType::XrcSend, typ != QpType::XrcRecv),
        };
        let answers = m::MAX_DEST_RD_ATOMIC | m::MIN_RNR_TIMER;
        let asks = m::TIMEOUT | m::RETRY_CNT | m::RNR_RETRY | m::MAX_QP_RD_ATOMIC;
        let steps = [
            m::PKEY_INDEX | m::PORT | m::ACCESS_FLAGS,
            m::AV | m::PATH_MTU | m::DEST_QPN | m::RQ_PSN | if responds { answers } else { 0 },
            m::SQ_PSN | if requests { asks } else { 0 },
        ];
        for (mask, qp_state) in steps.into_iter().zip(1..) {
            let attr = abi::QpAttr { qp_state, ..attr };
            self.order(abi::Command::ModifyQp, &abi::ModifyQpReq { qpn: q.qpn, attr_mask: m::STATE | mask, attr });
        }
    }

    /// Moves a UD QP to RTS.
    ///
    /// # Panics
    /// If the device refuses it.
    pub fn enable(&mut self, q: &Queue, qkey: u32) {
        let steps = [m::PKEY_INDEX | m::PORT | m::QKEY, 0, m::SQ_PSN];
        for (mask, qp_state) in steps.into_iter().zip(1..) {
            let attr = abi::QpAttr { qp_state, qkey, port_num: 1, ..Default::default() };
            self.order(abi::Command::ModifyQp, &abi::ModifyQpReq { qpn: q.qpn, attr_mask: m::STATE | mask, attr });
        }
    }

    /// Creates two connected QPs of this session. The second one has an SQ of one slot.
    ///
    /// # Panics
    /// If the device refuses it.
    pub fn pair(&mut self, send_wr: u32, path_mtu: u8) -> (Queue, Queue) {
        let (a, b) = (self.queue(send_wr), self.queue(1));
        self.connect(&a, self.gid, b.qpn, path_mtu);
        self.connect(&b, self.gid, a.qpn, path_mtu);
        (a, b)
    }

    /// Writes an unsignaled WQE into slot `index` modulo the SQ's size.
    pub fn write(&self, q: &Queue, index: u32, op: WrOpcode, local: abi::Sge, remote: (u64, u32)) {
        self.write_with(q, index, op, local, remote, 0);
    }

    /// As [`Scripted::write`], with these flags (`ibv_send_flags`).
    pub fn write_with(
        &self,
        q: &Queue,
        index: u32,
        op: WrOpcode,
        local: abi::Sge,
        remote: (u64, u32),
        send_flags: u32,
    ) {
        let wqe =
            abi::SqWqe { opcode: op as u8, send_flags, remote_addr: remote.0, rkey: remote.1, ..Default::default() };
        self.write_wqe(q, index, wqe, local);
    }

    /// Writes any WQE, with at most one SGE, into slot `index` modulo the SQ's size.
    pub fn write_wqe(&self, q: &Queue, index: u32, wqe: abi::SqWqe, local: abi::Sge) {
        let wqe = abi::SqWqe { num_sge: u8::from(local.length > 0), ..wqe };
        let at = q.sq + (index % q.entries()) as usize * q.layout.sq_stride as usize;
        self.hostile.memory().write(at, wqe.as_bytes());
        self.hostile.memory().write(at + abi::SQ_DATA, local.as_bytes());
    }

    /// Posts receives of no bytes with these `wr_id`s. The RQ must have room for them.
    pub fn receive(&self, q: &Queue, wr_ids: &[u64]) {
        let first = self.hostile.memory().load32(q.ctrl + abi::QP_RQ_PROD, SeqCst);
        for (i, &wr_id) in (first..).zip(wr_ids) {
            self.write_receive(q, i, wr_id, abi::Sge::default());
        }
        self.post_receives(q, first.wrapping_add(wr_ids.len() as u32));
    }

    /// Writes a receive, with at most one SGE, into slot `index` modulo the RQ's size.
    pub fn write_receive(&self, q: &Queue, index: u32, wr_id: u64, local: abi::Sge) {
        let wqe = abi::RqWqe { wr_id, num_sge: u32::from(local.length > 0), ..Default::default() };
        let at = q.rq + (index % q.layout.rq_entries) as usize * q.layout.rq_stride as usize;
        self.hostile.memory().write(at, wqe.as_bytes());
        self.hostile.memory().write(at + abi::RQ_DATA, local.as_bytes());
    }

    /// Posts all receives below `index`.
    pub fn post_receives(&self, q: &Queue, index: u32) {
        self.hostile.memory().store32(q.ctrl + abi::QP_RQ_PROD, index, SeqCst);
    }

    /// Moves a QP to a state that needs no attributes, such as 6, IBV_QPS_ERR.
    ///
    /// # Panics
    /// If the device refuses it.
    pub fn set_state(&mut self, q: &Queue, qp_state: u8) {
        let attr = abi::QpAttr { qp_state, ..Default::default() };
        self.order(abi::Command::ModifyQp, &abi::ModifyQpReq { qpn: q.qpn, attr_mask: m::STATE, attr });
    }

    /// Number of WQEs that have been posted, modulo 2^32.
    pub fn posted(&self, q: &Queue) -> u32 {
        self.hostile.memory().load32(q.ctrl + abi::QP_SQ_PROD, SeqCst)
    }

    /// Number of WQEs that the device has executed, modulo 2^32.
    pub fn executed(&self, q: &Queue) -> u32 {
        self.hostile.memory().load32(q.ctrl + abi::QP_SQ_CONS, SeqCst)
    }

    /// Posts all WQEs below `index`, and rings the doorbell.
    pub fn post(&self, q: &Queue, index: u32) {
        self.bell.expect_ring(q.db_slot);
        self.hostile.memory().store32(q.ctrl + abi::QP_SQ_PROD, index, Release);
        if self.bell.ring(q.db_slot) != abi::AWAKE {
            self.hostile.wake();
        }
    }

    /// Sets every doorbell bit of the session, also bits of no QP, and kicks.
    pub fn ring_all(&self) {
        let memory = self.hostile.memory();
        for word in 0..abi::DOORBELL_WORDS {
            memory.swap64(DOORBELL as usize + abi::DB_BITS + word * 8, u64::MAX, SeqCst);
        }
        memory.swap64(DOORBELL as usize + abi::DB_SUMMARY, u64::MAX, SeqCst);
        self.hostile.wake();
    }
}
