//! A driver of the RFC mode. It uses virtqueues over vhost-user as `docs/spec/virtio-rdma-rfc.md` defines them, without
//! a virtual machine.

mod queue;

use std::io;
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::path::Path;

use unirdma_abi::rfc;
use unirdma_abi::{Command, MAX_INLINE};
use unirdma_formats::{Gid, attr_mask as m};
use unirdma_link::{Frontend, RegionDesc, Segment};
use unirdma_mem::{MemFd, Span};
use vhost::vhost_user::message::FrontendReq;
use zerocopy::{FromBytes, Immutable, IntoBytes};

use queue::{CQE_ROOM, new_queue};
pub use queue::{RfcCq, Virtqueue, wait_for};

/// Bus address of the driver's memory.
pub const BUS: u64 = 1 << 50;
const MEMORY: usize = 32 << 20;
const PAGE: u64 = rfc::PAGE;
/// Bytes of a buffer of an SQ: the length of the longest WQE.
const WQE_ROOM: u32 = size_of::<rfc::SqReq>() as u32 + MAX_INLINE;
/// Number of chains of the virtqueues that [`RfcDriver::cq`] and [`RfcDriver::qp`] set up.
pub const CHAINS: u16 = 64;

/// A queue pair.
pub struct RfcQp {
    /// Its number.
    pub qpn: u32,
    /// Its send queue.
    pub sq: Virtqueue,
    /// Its receive queue.
    pub rq: Virtqueue,
    pd: u32,
}

/// A range of the driver's memory that was registered.
#[derive(Clone, Copy, Debug)]
pub struct RfcMr {
    /// Its handle.
    pub mrn: u32,
    /// Its local key.
    pub lkey: u32,
    /// Its remote key.
    pub rkey: u32,
    /// The IOVA of its first byte.
    pub iova: u64,
    /// Offset of its first byte in the driver's memory.
    pub offset: usize,
}

impl RfcMr {
    /// The SGE for `len` bytes from `off` on.
    pub fn sge(&self, off: u64, len: u32) -> rfc::Sge {
        rfc::Sge { addr: (self.iova + off).into(), length: len.into(), lkey: self.lkey.into() }
    }

    /// The remote range that begins at `off`.
    pub fn remote(&self, off: u64) -> rfc::Rdma {
        rfc::Rdma { remote_addr: (self.iova + off).into(), rkey: self.rkey.into() }
    }
}

/// The CREATE_QP request of [`RfcDriver::qp`], for callers that change it.
pub fn qp_request(pd: u32, send_cqn: u32, recv_cqn: u32, typ: u8) -> rfc::CreateQp {
    rfc::CreateQp {
        pdn: pd.into(),
        qp_type: typ,
        sq_sig_type: 1,
        max_send_wr: 32.into(),
        max_send_sge: 4.into(),
        send_cqn: send_cqn.into(),
        max_recv_wr: 32.into(),
        max_recv_sge: 4.into(),
        recv_cqn: recv_cqn.into(),
        max_inline_data: 128.into(),
        ..rfc::CreateQp::default()
    }
}

/// A signaled send WQE.
pub fn send(opcode: u32, wr_id: u64) -> rfc::SqReq {
    rfc::SqReq {
        opcode: opcode.into(),
        wr_id: wr_id.into(),
        send_flags: rfc::send_flags::SIGNALED.into(),
        ..rfc::SqReq::default()
    }
}

/// The driver of one session.
pub struct RfcDriver {
    /// The link.
    pub frontend: Frontend,
    memory: MemFd,
    used: usize,
    control: Virtqueue,
    /// The configuration space when the driver started.
    pub config: rfc::Config,
    /// The GID of its vRNIC that the driver put at index 0 of its table.
    pub gid: [u8; 16],
}

impl RfcDriver {
    /// Connects to the RFC socket of the vRNIC that has this address: maps the memory, sets up the control virtqueue,
    /// and puts the GID into the device's table.
    ///
    /// # Panics
    /// If any of it fails.
    pub fn new(socket: &Path, ip: &str) -> Self {
        let mut frontend = Frontend::connect(socket).expect("connect");
        let config = frontend.config(size_of::<rfc::Config>()).expect("configuration space");
        let config = rfc::Config::read_from_bytes(&config).expect("configuration space");
        let memory = MemFd::new(c"rfc driver", MEMORY).expect("memfd");
        let user_addr = memory.span().addr() as u64;
        let region = RegionDesc { bus_addr: BUS, size: MEMORY as u64, user_addr, mmap_offset: 0 };
        frontend.add_region(region, memory.fd()).expect("region");
        let mut used = 0;
        let control = new_queue(memory.span(), &mut used, 0, CHAINS, 4096);
        start(&mut frontend, &control, 0).expect("control virtqueue");
        let ip: IpAddr = ip.parse().expect("address");
        let mut d = RfcDriver { frontend, memory, used, control, config, gid: Gid::from_ip(ip).0 };
        d.add_gid(0, d.gid).expect("a GID that was granted");
        d
    }

    /// The memory that is shared with the device.
    pub fn memory(&self) -> &Span {
        self.memory.span()
    }

    /// A descriptor of that memory's file.
    pub fn memory_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.memory.fd()
    }

    /// Allocates memory in whole pages. Returns its bus address.
    ///
    /// # Panics
    /// If there is none left.
    pub fn take(&mut self, bytes: usize) -> u64 {
        let at = self.used;
        self.used += bytes.next_multiple_of(PAGE as usize);
        assert!(self.used <= MEMORY, "the driver's memory is used up");
        BUS + at as u64
    }

    /// A virtqueue in new memory. The device does not know it yet.
    pub fn new_queue(&mut self, index: u32, chains: u16, room: u32) -> Virtqueue {
        new_queue(self.memory.span(), &mut self.used, index, chains, room)
    }

    /// Starts a new virtqueue.
    ///
    /// # Errors
    /// If the device refuses it.
    pub fn start(&mut self, vq: &Virtqueue) -> io::Result<()> {
        start(&mut self.frontend, vq, 0)
    }

    /// Starts a virtqueue at index `base`.
    ///
    /// # Errors
    /// If the device refuses it.
    pub fn start_at(&mut self, vq: &Virtqueue, base: u16) -> io::Result<()> {
        start(&mut self.frontend, vq, base)
    }

    /// Stops a virtqueue. Returns its index.
    ///
    /// # Panics
    /// If the device is gone.
    pub fn stop(&mut self, index: u32) -> u16 {
        self.frontend.stop_vring(index).expect("GET_VRING_BASE")
    }

    /// Stops the control virtqueue, which pauses the session, calls `meanwhile`, and starts the virtqueue where it was.
    ///
    /// # Panics
    /// If the device is gone.
    pub fn pause(&mut self, meanwhile: impl FnOnce(&mut Self)) {
        let base = self.stop(0);
        meanwhile(self);
        start(&mut self.frontend, &self.control, base).expect("control virtqueue");
    }

    /// Sends bytes as a control request, with `room` bytes for the response. Returns the response, which begins with
    /// the status.
    ///
    /// # Panics
    /// If none comes.
    pub fn request(&mut self, bytes: &[u8], room: u32) -> Vec<u8> {
        let at = self.control.buffer(0);
        self.memory.span().write((at - BUS) as usize, bytes);
        let answer = at + 2048;
        let mut chain = Vec::new();
        if !bytes.is_empty() {
            chain.push(Segment { addr: at, len: bytes.len() as u32, write: false });
        }
        if room > 0 || chain.is_empty() {
            chain.push(Segment { addr: answer, len: room, write: true });
        }
        let len = self.chain(&chain);
        let mut v = vec![0; len as usize];
        self.memory.span().read((answer - BUS) as usize, &mut v);
        v
    }

    /// Publishes any chain on the control virtqueue. Returns the number of bytes that the device wrote.
    ///
    /// # Panics
    /// If the chain does not come back.
    pub fn chain(&mut self, chain: &[Segment]) -> u32 {
        self.control.publish(0, chain);
        wait_for("an answer", || self.control.queue.pop_used()).1
    }

    /// Resets the device, and starts the control virtqueue again.
    ///
    /// # Panics
    /// If that is refused.
    pub fn reset(&mut self) {
        self.frontend.tell(FrontendReq::RESET_DEVICE, &[], &[], true).expect("reset");
        self.control = self.new_queue(0, CHAINS, 4096);
        start(&mut self.frontend, &self.control, 0).expect("control virtqueue");
    }

    /// Sends a command. Returns the data of the response.
    ///
    /// # Errors
    /// The status of the response, if the command fails.
    ///
    /// # Panics
    /// If the response is too short.
    pub fn command<T: FromBytes>(&mut self, c: Command, r: &(impl IntoBytes + Immutable)) -> Result<T, u8> {
        let answer = self.request(&[&[c as u8], r.as_bytes()].concat(), 1 + size_of::<T>() as u32);
        match answer.split_first().expect("a status") {
            (0, data) => Ok(T::read_from_bytes(data).expect("the response's length")),
            (&status, _) => Err(status),
        }
    }

    /// ADD_GID.
    ///
    /// # Errors
    /// The status of the response, if the command fails.
    pub fn add_gid(&mut self, index: u16, gid: [u8; 16]) -> Result<rfc::Nothing, u8> {
        let r = rfc::AddGid { gid, gid_type: rfc::GID_TYPE_ROCE_V2.into(), index: index.into(), port_num: 1.into() };
        self.command(Command::AddGid, &r)
    }

    /// A new PD.
    ///
    /// # Panics
    /// If it is refused.
    pub fn pd(&mut self) -> u32 {
        self.command::<rfc::Handle>(Command::CreatePd, &rfc::Nothing {}).expect("PD").handle.get()
    }

    /// A new CQ, whose virtqueue is set up and filled.
    ///
    /// # Panics
    /// If it is refused.
    pub fn cq(&mut self, cqe: u32) -> RfcCq {
        let mut cq = self.cq_without_buffers(cqe, CHAINS);
        cq.vq.fill(CQE_ROOM);
        cq
    }

    /// A new CQ, whose virtqueue is set up and has no buffers.
    ///
    /// # Panics
    /// If it is refused.
    pub fn cq_without_buffers(&mut self, cqe: u32, chains: u16) -> RfcCq {
        let made: rfc::CqCreated = self.command(Command::CreateCq, &rfc::CreateCq { cqe: cqe.into() }).expect("CQ");
        let vq = self.new_queue(made.cqn.get(), chains, CQE_ROOM);
        self.start(&vq).expect("completion virtqueue");
        RfcCq { cqn: made.cqn.get(), vq }
    }

    /// Registers `bytes` of new memory, with a page list that is not in order.
    ///
    /// # Panics
    /// If it is refused.
    pub fn mr(&mut self, pd: u32, bytes: usize, access: u32) -> RfcMr {
        let start = self.take(bytes);
        let (list, npages) = self.page_list(start, bytes);
        let iova = 0x7000_0000_0000 + start;
        let r = rfc::RegUserMr {
            pdn: pd.into(),
            access_flags: access.into(),
            start: start.into(),
            length: (bytes as u64).into(),
            virt_addr: iova.into(),
            pages: list.into(),
            npages: npages.into(),
        };
        let made: rfc::MrCreated = self.command(Command::RegUserMr, &r).expect("MR");
        RfcMr {
            mrn: made.mrn.get(),
            lkey: made.lkey.get(),
            rkey: made.rkey.get(),
            iova,
            offset: (start - BUS) as usize,
        }
    }

    /// Writes the list of the pages of a range. Returns the list's bus address and its length.
    pub fn page_list(&mut self, start: u64, bytes: usize) -> (u64, u32) {
        let n = bytes.div_ceil(PAGE as usize);
        let list = self.take(8 * n);
        for i in 0..n as u64 {
            self.memory.span().write((list - BUS + 8 * i) as usize, &(start + PAGE * i).to_le_bytes());
        }
        (list, n as u32)
    }

    /// A new QP, whose virtqueues are set up.
    ///
    /// # Errors
    /// The status of the response, if the command fails.
    pub fn try_qp(&mut self, r: &rfc::CreateQp) -> Result<RfcQp, u8> {
        let (made, caps) = self.command::<Made>(Command::CreateQp, r).map(|m| (m.qp, m.caps))?;
        let sq = self.new_queue(caps.sq_vq.get(), CHAINS, WQE_ROOM);
        let rq = self.new_queue(caps.rq_vq.get(), CHAINS, WQE_ROOM);
        self.start(&sq).expect("send virtqueue");
        self.start(&rq).expect("receive virtqueue");
        Ok(RfcQp { qpn: made.qpn.get(), sq, rq, pd: r.pdn.get() })
    }

    /// A new QP of a type, with one CQ.
    ///
    /// # Panics
    /// If it is refused.
    pub fn qp(&mut self, pd: u32, cq: &RfcCq, typ: u8) -> RfcQp {
        self.try_qp(&qp_request(pd, cq.cqn, cq.cqn, typ)).expect("QP")
    }

    /// MODIFY_QP.
    ///
    /// # Errors
    /// The status of the response, if the command fails.
    pub fn modify(&mut self, qpn: u32, mask: u32, attrs: rfc::QpAttr) -> Result<rfc::Nothing, u8> {
        let r = rfc::ModifyQp { qpn: qpn.into(), attr_mask: mask.into(), attrs };
        self.command(Command::ModifyQp, &r)
    }

    /// Moves a QP to a state, without other attributes.
    ///
    /// # Errors
    /// The status of the response, if the command fails.
    pub fn move_to(&mut self, qpn: u32, state: u8) -> Result<rfc::Nothing, u8> {
        self.modify(qpn, m::STATE, rfc::QpAttr { qp_state: state, ..rfc::QpAttr::default() })
    }

    /// QUERY_QP.
    ///
    /// # Errors
    /// The status of the response, if the command fails.
    pub fn query(&mut self, qpn: u32) -> Result<rfc::QpAttr, u8> {
        self.command(Command::QueryQp, &rfc::QueryQp { qpn: qpn.into(), attr_mask: u32::MAX.into() })
    }

    /// Moves an RC or UC QP to RTS. Timeouts end after about 16 ms, but RNR retries never end.
    ///
    /// # Errors
    /// The status of the response, if the command fails.
    pub fn connect(&mut self, qpn: u32, typ: u8, gid: [u8; 16], peer: u32) -> Result<rfc::Nothing, u8> {
        self.connect_with(qpn, typ, gid, peer, |a| a)
    }

    /// As [`RfcDriver::connect`]. `change` changes the attributes.
    ///
    /// # Errors
    /// The status of the response, if the command fails.
    pub fn connect_with(
        &mut self,
        qpn: u32,
        typ: u8,
        gid: [u8; 16],
        peer: u32,
        change: impl Fn(rfc::QpAttr) -> rfc::QpAttr,
    ) -> Result<rfc::Nothing, u8> {
        let grh = rfc::GlobalRoute { dgid: gid, hop_limit: 64, ..rfc::GlobalRoute::default() };
        let a = change(rfc::QpAttr {
            port_num: 1,
            qp_access_flags: 15.into(),
            path_mtu: 3,
            dest_qp_num: peer.into(),
            max_dest_rd_atomic: 4,
            max_rd_atomic: 4,
            min_rnr_timer: 1,
            timeout: 10,
            retry_cnt: 3,
            rnr_retry: 7,
            ah_attr: rfc::AhAttr { grh, port_num: 1, ah_flags: rfc::AH_GRH, ..rfc::AhAttr::default() },
            ..rfc::QpAttr::default()
        });
        let reliable = typ == rfc::qp_type::RC;
        let only = |mask: u32| if reliable { mask } else { 0 };
        let steps = [
            (1, m::PKEY_INDEX | m::PORT | m::ACCESS_FLAGS),
            (2, m::AV | m::PATH_MTU | m::DEST_QPN | m::RQ_PSN | only(m::MAX_DEST_RD_ATOMIC | m::MIN_RNR_TIMER)),
            (3, m::SQ_PSN | only(m::TIMEOUT | m::RETRY_CNT | m::RNR_RETRY | m::MAX_QP_RD_ATOMIC)),
        ];
        for (state, mask) in steps {
            self.modify(qpn, m::STATE | mask, rfc::QpAttr { qp_state: state, ..a })?;
        }
        Ok(rfc::Nothing {})
    }

    /// Moves a UD QP to RTS.
    ///
    /// # Errors
    /// The status of the response, if the command fails.
    pub fn open_datagrams(&mut self, qpn: u32, qkey: u32) -> Result<rfc::Nothing, u8> {
        let a = rfc::QpAttr { port_num: 1, qkey: qkey.into(), ..rfc::QpAttr::default() };
        let steps = [(1, m::PKEY_INDEX | m::PORT | m::QKEY), (2, 0), (3, m::SQ_PSN)];
        for (state, mask) in steps {
            self.modify(qpn, m::STATE | mask, rfc::QpAttr { qp_state: state, ..a })?;
        }
        Ok(rfc::Nothing {})
    }

    /// Sends DESTROY_QP, then resets both virtqueues.
    ///
    /// # Errors
    /// The status of the response, if the command fails.
    pub fn destroy_qp(&mut self, qp: &RfcQp) -> Result<(), u8> {
        self.command::<rfc::Nothing>(Command::DestroyQp, &rfc::Handle { handle: qp.qpn.into() })?;
        self.stop(qp.sq.index);
        self.stop(qp.rq.index);
        Ok(())
    }

    /// Sends DESTROY_CQ, then resets its virtqueue.
    ///
    /// # Errors
    /// The status of the response, if the command fails.
    pub fn destroy_cq(&mut self, cq: &RfcCq) -> Result<(), u8> {
        self.command::<rfc::Nothing>(Command::DestroyCq, &rfc::Handle { handle: cq.cqn.into() })?;
        self.stop(cq.vq.index);
        Ok(())
    }

    /// Reads bytes of an MR.
    pub fn read(&self, mr: &RfcMr, off: usize, len: usize) -> Vec<u8> {
        let mut v = vec![0; len];
        self.memory.span().read(mr.offset + off, &mut v);
        v
    }

    /// Writes bytes of an MR.
    pub fn write(&self, mr: &RfcMr, off: usize, bytes: &[u8]) {
        self.memory.span().write(mr.offset + off, bytes);
    }
}

#[derive(FromBytes)]
#[repr(C)]
struct Made {
    qp: rfc::QpCreated,
    caps: rfc::QpCaps,
}

impl RfcQp {
    /// Posts a send with these SGEs.
    ///
    /// # Panics
    /// If the send queue is full.
    pub fn send(&mut self, mut r: rfc::SqReq, sges: &[rfc::Sge]) {
        r.num_sge = (sges.len() as u32).into();
        assert!(self.sq.post(&[r.as_bytes(), sges.as_bytes()].concat()), "the send queue is full");
    }

    /// Posts a send whose data is in the WQE.
    ///
    /// # Panics
    /// If the send queue is full.
    pub fn send_inline(&mut self, mut r: rfc::SqReq, data: &[u8]) {
        r.send_flags = (r.send_flags.get() | rfc::send_flags::INLINE).into();
        assert!(self.sq.post(&[r.as_bytes(), data].concat()), "the send queue is full");
    }

    /// Posts a receive.
    ///
    /// # Panics
    /// If the receive queue is full.
    pub fn receive(&mut self, wr_id: u64, sges: &[rfc::Sge]) {
        let r = rfc::RqReq { num_sge: (sges.len() as u32).into(), wr_id: wr_id.into() };
        assert!(self.rq.post(&[r.as_bytes(), sges.as_bytes()].concat()), "the receive queue is full");
    }

    /// Destination of datagrams to QP `qpn` of the vRNIC with this GID.
    pub fn to(&self, gid: [u8; 16], qpn: u32, qkey: u32) -> rfc::Ud {
        let av = rfc::Av { port: 1.into(), pdn: self.pd.into(), dgid: gid, hop_limit: 64, ..rfc::Av::default() };
        rfc::Ud { remote_qpn: qpn.into(), remote_qkey: qkey.into(), av }
    }
}

fn start(frontend: &mut Frontend, vq: &Virtqueue, base: u16) -> io::Result<()> {
    let (desc, avail, used) = vq.queue.addresses();
    frontend.set_call(vq.index, vq.call.as_fd())?;
    frontend.set_kick(vq.index, vq.kick.as_fd())?;
    frontend.set_vring_at(vq.index, vq.queue.size(), base, desc, avail, used)
}
