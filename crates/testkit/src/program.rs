//! A well-behaved program: one PD, one CQ, one QP, one MR.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use unirdma_abi as abi;
use unirdma_driver::{Context, Cq, Mr, Qp, QpInit, SendWr};
use unirdma_formats::{WrOpcode, access, attr_mask as m, send_flags};

/// Objects of a small verbs program.
pub struct Program {
    /// The open device.
    pub ctx: Arc<Context>,
    /// Its completion queue.
    pub cq: Cq,
    /// Its queue pair.
    pub qp: Qp,
    /// Its memory region over [`Program::buf`].
    pub mr: Mr,
    /// Registered memory.
    pub buf: Box<[u8]>,
    pdn: u32,
    gid: [u8; 16],
}

/// Registers a buffer for all accesses.
fn register(ctx: &Arc<Context>, pdn: u32, buf: &[u8]) -> Mr {
    let flags = access::LOCAL_WRITE | access::REMOTE_WRITE | access::REMOTE_READ | access::REMOTE_ATOMIC;
    let addr = buf.as_ptr() as u64;
    Mr::register(ctx, pdn, addr, buf.len() as u64, addr, flags).expect("MR")
}

impl Program {
    /// Opens a vRNIC and creates the objects, with `len` bytes of memory.
    ///
    /// # Panics
    /// If any of it fails.
    pub fn new(socket: &Path, len: usize) -> Self {
        let ctx = Context::open(socket).expect("open");
        let pd: abi::HandleResp = ctx.command(abi::Command::CreatePd, &[0u8; 0]).expect("PD");
        let cq = Cq::create(&ctx, 64, None, false).expect("CQ");
        let cap =
            abi::QpCap { max_send_wr: 16, max_recv_wr: 16, max_send_sge: 2, max_recv_sge: 2, max_inline_data: 64 };
        let init = QpInit {
            pdn: pd.handle,
            qp_type: 2,
            sig_all: true,
            send_cqn: cq.cqn,
            recv_cqn: cq.cqn,
            srqn: None,
            xrcdn: None,
            cap,
            alone: false,
        };
        let qp = Qp::create(&ctx, &init).expect("QP");
        let buf = vec![0u8; len].into_boxed_slice();
        let mr = register(&ctx, pd.handle, &buf);
        let gid: abi::QueryGidResp =
            ctx.command(abi::Command::QueryGid, &abi::QueryGidReq { port: 1, index: 0 }).expect("GID");
        Program { ctx, cq, qp, mr, buf, pdn: pd.handle, gid: gid.gid }
    }

    /// Deregisters the buffer and registers it again.
    ///
    /// # Panics
    /// If that fails.
    pub fn register_again(&mut self) {
        self.mr.deregister().expect("deregister");
        self.mr = register(&self.ctx, self.pdn, &self.buf);
    }

    /// Moves the QP to RTS, connected to `peer`. Timeouts end after about 16 ms.
    ///
    /// # Errors
    /// Those of `ibv_modify_qp(3)`.
    pub fn connect(&self, peer: &Program) -> unirdma_driver::Result<()> {
        self.connect_to(peer.gid, peer.qp.qpn, |a| a)
    }

    /// As [`Program::connect`], to QP `qpn` of the vRNIC with this GID. `change` changes the attributes.
    ///
    /// # Errors
    /// Those of `ibv_modify_qp(3)`.
    pub fn connect_to(
        &self,
        gid: [u8; 16],
        qpn: u32,
        change: impl Fn(abi::QpAttr) -> abi::QpAttr,
    ) -> unirdma_driver::Result<()> {
        let a = change(abi::QpAttr {
            port_num: 1,
            qp_access_flags: 15,
            path_mtu: 5,
            dest_qp_num: qpn,
            max_dest_rd_atomic: 1,
            max_rd_atomic: 1,
            min_rnr_timer: 1,
            timeout: 10,
            retry_cnt: 3,
            rnr_retry: 7,
            ah_attr: abi::AhAttr {
                grh: abi::GlobalRoute { dgid: gid, ..Default::default() },
                is_global: 1,
                port_num: 1,
                ..Default::default()
            },
            ..Default::default()
        });
        let step = |state, mask| self.qp.modify(m::STATE | mask, &abi::QpAttr { qp_state: state, ..a });
        step(1, m::PKEY_INDEX | m::PORT | m::ACCESS_FLAGS)?;
        step(2, m::AV | m::PATH_MTU | m::DEST_QPN | m::RQ_PSN | m::MAX_DEST_RD_ATOMIC | m::MIN_RNR_TIMER)?;
        step(3, m::TIMEOUT | m::RETRY_CNT | m::RNR_RETRY | m::SQ_PSN | m::MAX_QP_RD_ATOMIC)
    }

    /// Posts one request over `[off, off + len)` of the buffer. The remote offset is the same.
    ///
    /// # Errors
    /// Those of `ibv_post_send(3)`.
    pub fn post(&self, op: WrOpcode, peer: &Program, off: usize, len: usize) -> unirdma_driver::Result<()> {
        let wqe = abi::SqWqe {
            wr_id: off as u64,
            opcode: op as u8,
            send_flags: send_flags::SIGNALED,
            remote_addr: peer.buf.as_ptr() as u64 + off as u64,
            rkey: peer.mr.key,
            ..Default::default()
        };
        let sge = abi::Sge { addr: self.buf.as_ptr() as u64 + off as u64, length: len as u32, lkey: self.mr.key };
        // SAFETY: the data is a gather list, nothing is read here.
        unsafe { self.qp.send_batch().push(&wqe, SendWr::Sges(&[sge])) }
    }

    /// Posts one receive over `[off, off + len)` of the buffer.
    ///
    /// # Errors
    /// Those of `ibv_post_recv(3)`.
    pub fn recv(&self, off: usize, len: usize) -> unirdma_driver::Result<()> {
        let sge = abi::Sge { addr: self.buf.as_ptr() as u64 + off as u64, length: len as u32, lkey: self.mr.key };
        self.qp.recv_batch().push(off as u64, &[sge])
    }

    /// Waits for one completion.
    ///
    /// # Errors
    /// `ETIMEDOUT` after a minute, or an error of polling.
    pub fn wait(&self) -> unirdma_driver::Result<abi::Cqe> {
        let start = Instant::now();
        let mut got = None;
        while got.is_none() {
            self.cq.poll(1, |_, c| got = Some(*c))?;
            if start.elapsed() > Duration::from_secs(60) {
                return Err(110);
            }
        }
        got.ok_or(110)
    }

    /// Reads a byte of the buffer from memory: peers write it without the compiler's knowledge.
    pub fn byte(&self, i: usize) -> u8 {
        // SAFETY: a reference to a byte is a valid pointer to it.
        unsafe { std::ptr::read_volatile(&raw const self.buf[i]) }
    }
}

/// Connects two programs with each other.
///
/// # Panics
/// If that fails.
pub fn connect(a: &Program, b: &Program) {
    a.connect(b).expect("connect");
    b.connect(a).expect("connect");
}
