//! CQs and QPs: rings in shared memory, posted to and polled without a system call.

use std::sync::{Arc, Mutex};

use unirdma_abi as abi;
use unirdma_abi::Command;
use unirdma_mem::{CqTail, QpRings, Span};
use unirdma_queues::{Batch, Completions, Held, Post, QueueLock, SendWr, WorkQueue};

use crate::arena::Block;
use crate::bounce::{BounceReader, SendRing};
use crate::context::Context;
use crate::memory::look_at_brief;
use crate::poll_rest::{self, PollBackoff};
use crate::{Result, lock};

/// A completion queue.
pub struct Cq {
    ctx: Arc<Context>,
    /// Its handle.
    pub cqn: u32,
    tail: QueueLock<Tails>,
}

/// The rings of a CQ, each with the blocks of its ring and control block.
struct Tails {
    /// CQEs that it holds.
    capacity: u32,
    rings: Completions<Vec<Block>>,
    rest: PollBackoff,
}

/// A ring for at least `cqe` completions, its blocks and its slots.
fn ring(ctx: &Context, cqe: u32) -> Result<(CqTail, Vec<Block>, u32)> {
    if cqe == 0 || cqe > ctx.device.config.max_cqe {
        return Err(libc::EINVAL);
    }
    let entries = cqe.next_power_of_two();
    let ring = ctx.alloc(entries as usize * size_of::<abi::Cqe>())?;
    let ctrl = match ctx.alloc(size_of::<abi::CqCtrl>()) {
        Ok(ctrl) => ctrl,
        Err(e) => {
            ctx.free(ring);
            return Err(e);
        }
    };
    let tail = CqTail::new(ctrl.span.clone(), ring.span.clone(), entries).ok_or(libc::EINVAL)?;
    Ok((tail, vec![ring, ctrl], entries))
}

fn free(ctx: &Context, blocks: impl IntoIterator<Item = Block>) {
    blocks.into_iter().for_each(|b| ctx.free(b));
}

impl Tails {
    /// The next completion. Completions of older rings come first.
    #[inline]
    fn pop(&mut self, ctx: &Context) -> Option<abi::Cqe> {
        self.rings.pop(|c| ctx.discard(c), |blocks| free(ctx, blocks))
    }
}

impl Cq {
    /// A CQ for at least `cqe` completions, with events on completion event queue `comp_queue`. `alone`: no two threads
    /// use it at a time.
    ///
    /// # Errors
    /// `EINVAL` if `cqe` is 0 or above the device's limit, otherwise the device's errno.
    pub fn create(ctx: &Arc<Context>, cqe: u32, comp_queue: Option<u32>, alone: bool) -> Result<Self> {
        let (tail, blocks, entries) = ring(ctx, cqe)?;
        let req = abi::CreateCqReq {
            cqe,
            entries,
            ring_addr: blocks[0].bus,
            ctrl_addr: blocks[1].bus,
            comp_queue: comp_queue.unwrap_or(abi::NO_COMP_QUEUE),
            reserved: 0,
        };
        let resp: Result<abi::HandleResp> = ctx.command(Command::CreateCq, &req);
        match resp {
            Ok(r) => {
                let capacity = entries.min(ctx.device.config.max_cqe);
                let tails = Tails { capacity, rings: Completions::new(tail, blocks), rest: PollBackoff::default() };
                Ok(Cq { ctx: ctx.clone(), cqn: r.handle, tail: QueueLock::new(tails, alone) })
            }
            Err(e) => {
                free(ctx, blocks);
                Err(e)
            }
        }
    }

    /// CQEs that it holds.
    pub fn capacity(&self) -> u32 {
        self.tail.lock().capacity
    }

    /// Gives the CQ room for at least `cqe` completions. Waiting completions stay.
    ///
    /// # Errors
    /// `EINVAL` if more completions wait, or `cqe` is out of range, otherwise the device's errno.
    pub fn resize(&self, cqe: u32) -> Result<()> {
        let mut tails = self.tail.lock();
        if tails.rings.waiting() > cqe {
            return Err(libc::EINVAL);
        }
        let (tail, blocks, entries) = ring(&self.ctx, cqe)?;
        let (ring_addr, ctrl_addr) = (blocks[0].bus, blocks[1].bus);
        let req = abi::ResizeCqReq { cqn: self.cqn, cqe, entries, reserved: 0, ring_addr, ctrl_addr };
        if let Err(e) = self.ctx.command_void(Command::ResizeCq, &req) {
            free(&self.ctx, blocks);
            return Err(e);
        }
        tails.capacity = entries.min(self.ctx.device.config.max_cqe);
        tails.rings.replace(tail, blocks);
        Ok(())
    }

    /// Lets completion events wait for `count` completions or `period_us` microseconds (`ibv_modify_cq(3)`).
    ///
    /// # Errors
    /// The errno of the device.
    pub fn moderate(&self, count: u16, period_us: u16) -> Result<()> {
        self.ctx.command_void(Command::ModifyCq, &abi::ModifyCqReq { cqn: self.cqn, count, period_us })
    }

    /// Destroys the CQ.
    ///
    /// # Errors
    /// `EBUSY` while QPs use it; the CQ lives on.
    pub fn destroy(&self) -> Result<()> {
        gone_is_fine(
            self.ctx.command_void(Command::DestroyCq, &abi::HandleReq { handle: self.cqn, reserved: 0 }),
            &self.ctx,
        )?;
        let mut tails = self.tail.lock();
        while let Some(cqe) = tails.pop(&self.ctx) {
            self.ctx.discard(&cqe);
        }
        tails.rings.memory().for_each(|blocks| free(&self.ctx, blocks.drain(..)));
        Ok(())
    }

    /// Takes up to `max` completions and gives each to `f`. Returns their number.
    ///
    /// # Errors
    /// `EIO` if the CQ has overrun or the virtual layer is gone.
    #[inline]
    pub fn poll(&self, max: usize, mut f: impl FnMut(usize, &abi::Cqe)) -> Result<usize> {
        let mut tail = self.tail.lock();
        let mut n = 0;
        while n < max
            && let Some(cqe) = tail.pop(&self.ctx)
        {
            if cqe.staged != 0 {
                self.ctx.place(&cqe);
            }
            f(n, &cqe);
            n += 1;
        }
        if n > 0 {
            tail.rings.release();
            tail.rest.found();
            return Ok(n);
        }
        let lost = tail.rings.overrun();
        let rests = max > 0 && tail.rest.after_empty_poll(poll_rest::clocks);
        drop(tail);
        if lost || self.ctx.is_dead() {
            return Err(libc::EIO);
        }
        if max > 0 && self.ctx.relax() {
            look_at_brief();
        }
        if rests {
            poll_rest::rest();
        }
        Ok(0)
    }

    /// Drops the completions of QP `qpn` that wait in the CQ.
    pub fn forget(&self, qpn: u32) {
        self.tail.lock().rings.forget(qpn);
    }

    /// Arms the CQ for one event.
    pub fn arm(&self, solicited_only: bool) {
        // A program that waits for events has a moment now, and may never make an empty poll.
        look_at_brief();
        self.ctx.kick_now();
        self.tail.lock().rings.arm(if solicited_only { abi::NOTIFY_SOLICITED } else { abi::NOTIFY_NEXT });
    }
}

/// Destroying an object succeeds if the virtual layer is gone.
pub(crate) fn gone_is_fine(r: Result<()>, ctx: &Context) -> Result<()> {
    if ctx.is_dead() { Ok(()) } else { r }
}

/// Parameters of a QP.
#[derive(Clone, Copy, Debug)]
pub struct QpInit {
    /// PD handle.
    pub pdn: u32,
    /// `IBV_QPT_*`.
    pub qp_type: u8,
    /// All sends are signaled.
    pub sig_all: bool,
    /// CQ handle for sends.
    pub send_cqn: u32,
    /// CQ handle for receives.
    pub recv_cqn: u32,
    /// SRQ handle, if receives come from there.
    pub srqn: Option<u32>,
    /// XRC domain handle, for the target of an XRC connection.
    pub xrcdn: Option<u32>,
    /// Wanted capabilities.
    pub cap: abi::QpCap,
    /// No two threads use the SQ, or the RQ, at a time.
    pub alone: bool,
}

/// The SQ of a QP.
struct SendQueue {
    work: WorkQueue,
    /// Send data that was taken when it was posted.
    taken: SendRing,
}

impl SendQueue {
    fn new(rings: QpRings, alone: bool) -> QueueLock<Self> {
        QueueLock::new(SendQueue { work: WorkQueue::new(rings), taken: SendRing::default() }, alone)
    }
}

/// A queue pair.
pub struct Qp {
    ctx: Arc<Context>,
    /// Its number.
    pub qpn: u32,
    /// Its capabilities when it was created. [`Qp::resize`] changes only how many requests it holds.
    pub cap: abi::QpCap,
    slot: u32,
    pdn: u32,
    sq: QueueLock<SendQueue>,
    rq: QueueLock<WorkQueue>,
    blocks: Mutex<Vec<Block>>,
}

impl Qp {
    /// Creates a QP.
    ///
    /// # Errors
    /// `EINVAL` for capabilities above the device's limits, otherwise the device's errno.
    pub fn create(ctx: &Arc<Context>, init: &QpInit) -> Result<Self> {
        let layout = abi::QpLayout::of(&init.cap).ok_or(libc::EINVAL)?;
        let mut blocks = Vec::new();
        let r = Self::create_in(ctx, init, layout, &mut blocks);
        match r {
            Ok((resp, rings)) => Ok(Qp {
                ctx: ctx.clone(),
                qpn: resp.qpn,
                cap: resp.cap,
                slot: resp.db_slot,
                pdn: init.pdn,
                sq: SendQueue::new(rings.clone(), init.alone),
                rq: QueueLock::new(WorkQueue::new(rings), init.alone),
                blocks: Mutex::new(blocks),
            }),
            Err(e) => {
                blocks.into_iter().for_each(|b| ctx.free(b));
                Err(e)
            }
        }
    }

    fn create_in(
        ctx: &Arc<Context>,
        init: &QpInit,
        layout: abi::QpLayout,
        blocks: &mut Vec<Block>,
    ) -> Result<(abi::CreateQpResp, QpRings)> {
        for len in [size_of::<abi::QpCtrl>(), layout.sq_bytes(), layout.rq_bytes()] {
            blocks.push(ctx.alloc(len)?);
        }
        let [ctrl, sq, rq] = &blocks[..] else { return Err(libc::ENOMEM) };
        let req = abi::CreateQpReq {
            pdn: init.pdn,
            qp_type: init.qp_type,
            sq_sig_all: init.sig_all.into(),
            send_cqn: init.send_cqn,
            recv_cqn: init.recv_cqn,
            has_srq: init.srqn.is_some().into(),
            srqn: init.srqn.unwrap_or(0),
            xrcdn: init.xrcdn.unwrap_or(0),
            cap: init.cap,
            ctrl_addr: ctrl.bus,
            sq_addr: sq.bus,
            rq_addr: rq.bus,
            ..Default::default()
        };
        let resp: abi::CreateQpResp = ctx.command(Command::CreateQp, &req)?;
        if resp.db_slot >= abi::MAX_QP {
            return Err(libc::EPROTO);
        }
        let rings = QpRings::new(ctrl.span.clone(), sq.span.clone(), rq.span.clone(), layout).ok_or(libc::EPROTO)?;
        Ok((resp, rings))
    }

    /// Destroys the QP.
    ///
    /// # Errors
    /// The errno of the device; the QP lives on.
    pub fn destroy(&self) -> Result<()> {
        gone_is_fine(
            self.ctx.command_void(Command::DestroyQp, &abi::HandleReq { handle: self.qpn, reserved: 0 }),
            &self.ctx,
        )?;
        self.sq.lock().taken.free(&self.ctx);
        lock(&self.blocks).drain(..).for_each(|b| self.ctx.free(b));
        Ok(())
    }

    /// MODIFY_QP. A reset empties both rings.
    ///
    /// # Errors
    /// The errno of the device.
    pub fn modify(&self, mask: u32, attr: &abi::QpAttr) -> Result<()> {
        let (mut sq, mut rq) = (self.sq.lock(), self.rq.lock());
        self.ctx.command_void(Command::ModifyQp, &abi::ModifyQpReq { qpn: self.qpn, attr_mask: mask, attr: *attr })?;
        if mask & unirdma_formats::attr_mask::STATE != 0 && attr.qp_state == 0 {
            (sq.work.post, rq.post) = (Post::default(), Post::default());
            sq.taken.clear();
            rq.rings.set_sq_prod(0);
            rq.rings.set_rq_prod(0);
        }
        Ok(())
    }

    /// Opens the target of an XRC connection that somebody has made in domain `xrcdn`. Nothing is ever posted to it.
    ///
    /// # Errors
    /// The errno of the device.
    pub fn open(ctx: &Arc<Context>, xrcdn: u32, qpn: u32) -> Result<Self> {
        let cap = abi::QpCap::default();
        let layout = abi::QpLayout::of(&cap).ok_or(libc::EINVAL)?;
        // Only this side has rings for it, which stay empty.
        let ctrl = ctx.alloc(size_of::<abi::QpCtrl>())?;
        let (sq, rq) = (Span::anonymous(layout.sq_bytes()), Span::anonymous(layout.rq_bytes()));
        let rings = QpRings::new(ctrl.span.clone(), sq, rq, layout).ok_or(libc::EPROTO);
        let opened = ctx.command_void(Command::OpenQp, &abi::OpenQpReq { xrcdn, qpn });
        match opened.and(rings) {
            Ok(rings) => {
                let (sq, rq) = (SendQueue::new(rings.clone(), false), QueueLock::new(WorkQueue::new(rings), false));
                Ok(Qp { ctx: ctx.clone(), qpn, cap, slot: 0, pdn: 0, sq, rq, blocks: Mutex::new(vec![ctrl]) })
            }
            Err(e) => {
                ctx.free(ctrl);
                Err(e)
            }
        }
    }

    /// Gives the QP room for at least `max_send_wr` and `max_recv_wr` requests. Requests that wait or are under way
    /// stay.
    ///
    /// # Errors
    /// `EINVAL` if there are more requests, or for more than the device's limits, otherwise the device's errno.
    pub fn resize(&self, max_send_wr: u32, max_recv_wr: u32) -> Result<()> {
        let (mut sq, mut rq) = (self.sq.lock(), self.rq.lock());
        let mut blocks = lock(&self.blocks);
        let [ctrl, _, _] = &blocks[..] else { return Err(libc::EINVAL) };
        let ctrl_addr = ctrl.bus;
        let layout = abi::QpLayout::of(&abi::QpCap { max_send_wr, max_recv_wr, ..self.cap }).ok_or(libc::EINVAL)?;
        let mut new = Vec::new();
        let moved = (|| {
            new.push(self.ctx.alloc(layout.sq_bytes())?);
            new.push(self.ctx.alloc(layout.rq_bytes())?);
            let rings =
                sq.work.rings.with_rings(new[0].span.clone(), new[1].span.clone(), layout).ok_or(libc::EPROTO)?;
            sq.work.copy_sends(&rings)?;
            rq.copy_receives(&rings)?;
            let (sq_addr, rq_addr) = (new[0].bus, new[1].bus);
            let (qpn, reserved, reserved2) = (self.qpn, 0, 0);
            let req =
                abi::ResizeQpReq { qpn, max_send_wr, max_recv_wr, reserved, ctrl_addr, sq_addr, rq_addr, reserved2 };
            self.ctx.command_void(Command::ResizeQp, &req).map(|()| rings)
        })();
        let done = moved.map(|rings| {
            (sq.work.rings, rq.rings) = (rings.clone(), rings);
            blocks[1..].swap_with_slice(&mut new);
        });
        new.into_iter().for_each(|b| self.ctx.free(b));
        done
    }

    /// QUERY_QP.
    ///
    /// # Errors
    /// The errno of the device.
    pub fn query(&self) -> Result<abi::QpAttr> {
        let r: abi::QueryQpResp =
            self.ctx.command(Command::QueryQp, &abi::QueryQpReq { qpn: self.qpn, attr_mask: u32::MAX })?;
        Ok(r.attr)
    }

    /// Begins a batch of sends. The WQEs are published when it is dropped, and the bell rings once.
    pub fn send_batch(&self) -> SendBatch<'_> {
        self.begin_sends(false)
    }

    /// As [`Qp::send_batch`], but none of its requests is published before the batch is dropped.
    pub fn whole_send_batch(&self) -> SendBatch<'_> {
        self.begin_sends(true)
    }

    #[inline]
    fn begin_sends(&self, whole: bool) -> SendBatch<'_> {
        self.ctx.expect_ring(self.slot);
        SendBatch { qp: self, sq: self.sq.lock(), whole }
    }

    /// Begins a batch of receives.
    pub fn recv_batch(&self) -> RecvBatch<'_> {
        let max_sge = self.cap.max_recv_sge;
        RecvBatch { ctx: &self.ctx, max_sge, slot: Some(self.slot), rq: self.rq.lock() }
    }
}

/// Sends that are being posted.
pub struct SendBatch<'a> {
    qp: &'a Qp,
    sq: Held<'a, SendQueue>,
    whole: bool,
}

impl SendBatch<'_> {
    /// Writes one WQE.
    ///
    /// # Errors
    /// `ENOMEM` if the SQ is full, `EINVAL` for too many SGEs or too much inline data, `EIO` once the
    /// virtual layer is gone and in a forked child.
    ///
    /// # Safety
    /// The pieces of [`SendWr::Inline`] must be readable memory of this process, and so must the contents of MRs that
    /// the gather list of [`SendWr::Sges`] names.
    #[inline]
    pub unsafe fn push(&mut self, head: &abi::SqWqe, data: SendWr<'_>) -> Result<()> {
        let SendQueue { work, taken } = &mut *self.sq;
        if self.qp.ctx.is_dead() {
            return Err(libc::EIO);
        }
        if !work.has_room_to_send() {
            return Err(libc::ENOMEM);
        }
        let mut head = *head;
        let (SendWr::Sges(list) | SendWr::Inline(list)) = data;
        if list.len() > self.qp.cap.max_send_sge as usize {
            return Err(libc::EINVAL);
        }
        match data {
            SendWr::Sges(s)
                if self.qp.ctx.bounce.is_used() && {
                    let (qp, whole, index) = (self.qp, self.whole, work.post.prod);
                    let (ctx, pdn, max_inline) = (&*qp.ctx, qp.pdn, qp.cap.max_inline_data);
                    let WorkQueue { rings, post } = &mut *work;
                    BounceReader { ctx, pdn, max_inline, rings, ring: taken, index }
                        .take(&mut head, s, || !(whole && post.prod != post.published) && publish(qp, rings, post))
                } => {}
            // SAFETY: the caller vouches for the pieces.
            data => unsafe { work.put_data(&mut head, data, self.qp.cap.max_inline_data)? },
        }
        work.put_head(&head);
        Ok(())
    }
}

impl SendBatch<'_> {
    /// Discards the WQEs that were written.
    pub fn abort(mut self) {
        let SendQueue { work, taken } = &mut *self.sq;
        work.post.abort();
        taken.forget_from(work.post.prod);
    }
}

impl Batch for SendBatch<'_> {
    #[inline]
    unsafe fn push(&mut self, head: &abi::SqWqe, data: SendWr<'_>) -> Result<()> {
        // SAFETY: by the contract.
        unsafe { SendBatch::push(self, head, data) }
    }

    fn abort(self) {
        SendBatch::abort(self);
    }
}

impl Drop for SendBatch<'_> {
    fn drop(&mut self) {
        let WorkQueue { rings, post } = &mut self.sq.work;
        publish(self.qp, rings, post);
    }
}

/// Publishes the written sends to the device. Always returns true.
#[inline]
fn publish(qp: &Qp, rings: &QpRings, post: &mut Post) -> bool {
    if post.publish_sends(rings) {
        qp.ctx.ring(qp.slot);
    }
    true
}

/// A shared receive queue.
pub struct Srq {
    ctx: Arc<Context>,
    /// Its handle.
    pub srqn: u32,
    /// Number by which XRC requests name it; 0 if it is not for XRC.
    pub number: u32,
    /// SGEs of one receive.
    pub max_sge: u32,
    rq: QueueLock<WorkQueue>,
    blocks: Mutex<Vec<Block>>,
}

impl Srq {
    /// Creates an SRQ for at least `max_wr` receives of `max_sge` SGEs; `alone` as in [`Cq::create`].
    ///
    /// # Errors
    /// `EINVAL` for more than the device's limits, otherwise the device's errno.
    pub fn create(
        ctx: &Arc<Context>,
        pdn: u32,
        max_wr: u32,
        max_sge: u32,
        xrc: Option<(u32, u32)>,
        alone: bool,
    ) -> Result<Self> {
        let cap = abi::QpCap { max_recv_wr: max_wr, max_recv_sge: max_sge, ..Default::default() };
        let layout = abi::QpLayout::of(&cap).filter(|_| max_wr > 0).ok_or(libc::EINVAL)?;
        let mut blocks = Vec::new();
        match Self::create_in(ctx, pdn, max_wr, max_sge, xrc, layout, &mut blocks) {
            Ok((resp, rings)) => Ok(Srq {
                ctx: ctx.clone(),
                srqn: resp.srqn,
                number: resp.number,
                max_sge,
                rq: QueueLock::new(WorkQueue::new(rings), alone),
                blocks: Mutex::new(blocks),
            }),
            Err(e) => {
                blocks.into_iter().for_each(|b| ctx.free(b));
                Err(e)
            }
        }
    }

    fn create_in(
        ctx: &Arc<Context>,
        pdn: u32,
        max_wr: u32,
        max_sge: u32,
        xrc: Option<(u32, u32)>,
        layout: abi::QpLayout,
        blocks: &mut Vec<Block>,
    ) -> Result<(abi::CreateSrqResp, QpRings)> {
        for len in [size_of::<abi::QpCtrl>(), layout.rq_bytes()] {
            blocks.push(ctx.alloc(len)?);
        }
        let [ctrl, ring] = &blocks[..] else { return Err(libc::ENOMEM) };
        let (ctrl_addr, ring_addr) = (ctrl.bus, ring.bus);
        let rings = QpRings::receive_only(ctrl.span.clone(), ring.span.clone(), layout).ok_or(libc::EPROTO)?;
        let (xrcdn, cqn) = xrc.unwrap_or_default();
        let is_xrc = xrc.is_some().into();
        let req =
            abi::CreateSrqReq { pdn, max_wr, max_sge, ctrl_addr, ring_addr, is_xrc, xrcdn, cqn, ..Default::default() };
        Ok((ctx.command(Command::CreateSrq, &req)?, rings))
    }

    /// Destroys the SRQ.
    ///
    /// # Errors
    /// `EBUSY` while QPs use it; the SRQ lives on.
    pub fn destroy(&self) -> Result<()> {
        gone_is_fine(
            self.ctx.command_void(Command::DestroySrq, &abi::HandleReq { handle: self.srqn, reserved: 0 }),
            &self.ctx,
        )?;
        lock(&self.blocks).drain(..).for_each(|b| self.ctx.free(b));
        Ok(())
    }

    /// Receives that it holds.
    pub fn max_wr(&self) -> u32 {
        self.rq.lock().rings.layout().rq_entries
    }

    /// Gives the SRQ room for at least `max_wr` receives. Waiting receives stay.
    ///
    /// # Errors
    /// `EINVAL` if more receives wait, or for more than the device's limits, otherwise the device's errno.
    pub fn resize(&self, max_wr: u32) -> Result<()> {
        let mut rq = self.rq.lock();
        let cap = abi::QpCap { max_recv_wr: max_wr, max_recv_sge: self.max_sge, ..Default::default() };
        let layout = abi::QpLayout::of(&cap).filter(|_| max_wr > 0).ok_or(libc::EINVAL)?;
        let ring = self.ctx.alloc(layout.rq_bytes())?;
        let mut blocks = lock(&self.blocks);
        let [ctrl, _] = &blocks[..] else { return Err(libc::EINVAL) };
        let made = QpRings::receive_only(ctrl.span.clone(), ring.span.clone(), layout).ok_or(libc::EPROTO);
        let moved = made.and_then(|rings| {
            rq.copy_receives(&rings)?;
            let (ctrl_addr, ring_addr) = (ctrl.bus, ring.bus);
            let req = abi::ResizeSrqReq { srqn: self.srqn, max_wr, ctrl_addr, ring_addr, reserved: 0 };
            self.ctx.command_void(Command::ResizeSrq, &req).map(|()| rings)
        });
        match moved {
            Ok(rings) => {
                rq.rings = rings;
                self.ctx.free(std::mem::replace(&mut blocks[1], ring));
                Ok(())
            }
            Err(e) => {
                self.ctx.free(ring);
                Err(e)
            }
        }
    }

    /// Arms the limit event.
    ///
    /// # Errors
    /// `EINVAL` for a limit above its size.
    pub fn set_limit(&self, limit: u32) -> Result<()> {
        self.ctx.command_void(Command::ModifySrq, &abi::ModifySrqReq { srqn: self.srqn, limit, reserved: [0; 2] })
    }

    /// QUERY_SRQ.
    ///
    /// # Errors
    /// The errno of the device.
    pub fn query(&self) -> Result<abi::QuerySrqResp> {
        self.ctx.command(Command::QuerySrq, &abi::HandleReq { handle: self.srqn, reserved: 0 })
    }

    /// Begins a batch of receives.
    pub fn recv_batch(&self) -> RecvBatch<'_> {
        RecvBatch { ctx: &self.ctx, max_sge: self.max_sge, slot: None, rq: self.rq.lock() }
    }
}

/// Receives that are being posted.
pub struct RecvBatch<'a> {
    ctx: &'a Context,
    max_sge: u32,
    /// Doorbell slot to ring if the device wants it; an SRQ has none.
    slot: Option<u32>,
    rq: Held<'a, WorkQueue>,
}

impl RecvBatch<'_> {
    /// Writes one WQE.
    ///
    /// # Errors
    /// `ENOMEM` if the RQ is full, `EINVAL` for too many SGEs, `EIO` as for sends.
    #[inline]
    pub fn push(&mut self, wr_id: u64, sges: &[abi::Sge]) -> Result<()> {
        if self.ctx.is_dead() {
            return Err(libc::EIO);
        }
        self.rq.put_receive(wr_id, sges, self.max_sge)
    }
}

impl Drop for RecvBatch<'_> {
    fn drop(&mut self) {
        let wanted = self.rq.publish_receives();
        if let Some(slot) = self.slot.filter(|_| wanted) {
            self.ctx.ring(slot);
        }
    }
}
