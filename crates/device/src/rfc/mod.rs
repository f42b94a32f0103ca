//! The RFC mode: the device as the virtio-rdma RFC of 2022 describes it, with a virtqueue for each CQ, SQ and RQ
//! (`docs/spec/virtio-rdma-rfc.md`).
//!
//! There is no second RNIC behind it. For each CQ and QP the device keeps, in memory of its own, the rings that drivers
//! of the native mode keep themselves. It copies WQEs from the chains of virtqueues into rings, and completions from
//! rings into the buffers of virtqueues. The RNIC sees a session like any other.
//!
//! Two kinds of threads copy. The control thread takes WQEs when their virtqueues are kicked, a bounded number at a
//! time ([`Rfc::serve`]). Pollers deliver completions when the RNIC raises the completion event for which each CQ ring
//! is always armed ([`Rfc::complete`]). Both lock the session's state. Neither locks the RNIC while it holds that lock;
//! a thread that has locked the RNIC may take it.

mod commands;
mod convert;
mod cq;
mod gids;
mod qp;
mod vq;

use std::sync::{Arc, Mutex};

use unirdma_abi as abi;
use unirdma_abi::{Status, rfc};
use unirdma_formats::{AsyncEvent, Gid};
use unirdma_link::{BlockingFd, Ledger};
use unirdma_mem::{Bell, Span};
use virtio_queue::Queue;
use vm_memory::GuestMemoryMmap;

use crate::lock;
use cq::Cq;
use gids::Gids;
use qp::{Qp, WQE_ROOM};
use vq::Vq;

/// Most WQEs taken from one virtqueue before the others get a turn.
const MAX_TURN: u32 = 32;
/// Most completions delivered for one CQ before others get a turn.
const MAX_DELIVERED: u32 = 64;

/// Use of a data virtqueue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    /// The virtqueue of the CQ with this index in [`Inner::cqs`].
    Cq(usize),
    /// The SQ of a pair.
    Sq(usize),
    /// The RQ of a pair.
    Rq(usize),
}

/// The numbers of CQs and of SQ and RQ pairs, which determine the numbers of virtqueues.
#[derive(Clone, Copy)]
struct Shape {
    cqs: usize,
    qps: usize,
}

impl Shape {
    fn role(self, vq: usize) -> Option<Role> {
        let at = vq.checked_sub(1)?;
        match at.checked_sub(self.cqs) {
            None => Some(Role::Cq(at)),
            Some(n) if n >= 2 * self.qps => None,
            Some(n) => Some(if n % 2 == 0 { Role::Sq(n / 2) } else { Role::Rq(n / 2) }),
        }
    }

    /// The virtqueue of a CQ.
    fn cq(self, index: usize) -> usize {
        1 + index
    }

    /// The virtqueue of a pair's SQ. Its RQ has the next number.
    fn sq(self, pair: usize) -> usize {
        1 + self.cqs + 2 * pair
    }
}

struct Inner {
    shape: Shape,
    guest: Option<GuestMemoryMmap>,
    /// By virtqueue index. Entry 0, the control virtqueue, is not used.
    vqs: Vec<Vq>,
    cqs: Vec<Option<Cq>>,
    /// By pair.
    qps: Vec<Option<Qp>>,
    /// Virtqueues that are served without kicks.
    active: Vec<usize>,
    gids: Gids,
    bell: Bell,
    buffer: Box<[u8]>,
}

/// Result of [`Rfc::serve`].
pub(crate) struct Served {
    /// The RNIC sleeps and has to be woken.
    pub wakes: bool,
}

/// The state of a session of this mode.
pub(crate) struct Rfc {
    inner: Mutex<Inner>,
    ledger: Ledger,
}

/// Zeroed memory of the device, aligned to 64 bytes.
fn aligned(len: usize) -> Span {
    let memory = Span::anonymous(len + 64);
    let skip = (64 - memory.addr() % 64) % 64;
    memory.sub(skip as u64, len as u64).unwrap_or_else(|| Span::anonymous(0))
}

fn new_bell() -> Option<Bell> {
    Bell::new(aligned(size_of::<abi::DoorbellPage>()))
}

impl Rfc {
    /// The state of a new session of a device whose native configuration is `config`. Its memory is charged to
    /// `ledger`.
    pub fn new(config: &abi::Config, ledger: Ledger) -> Option<Self> {
        let inner = Inner::new(shape(config), new_bell()?);
        Some(Rfc { inner: Mutex::new(inner), ledger })
    }

    /// The doorbell page by which the RNIC learns of WQEs.
    pub fn bell(&self) -> Bell {
        lock(&self.inner).bell.clone()
    }

    /// Forgets all objects and virtqueues. The guest memory stays.
    pub fn clear(&self) {
        let inner = &mut *lock(&self.inner);
        let bell = new_bell().unwrap_or_else(|| inner.bell.clone());
        *inner = Inner { guest: inner.guest.take(), ..Inner::new(inner.shape, bell) };
    }

    pub fn set_memory(&self, guest: Option<GuestMemoryMmap>) {
        lock(&self.inner).guest = guest;
    }

    /// Called when the driver has set up or changed a virtqueue.
    pub fn set_queue(&self, index: usize, queue: Option<Queue>, base: u16, call: Option<Arc<BlockingFd>>) {
        let inner = &mut *lock(&self.inner);
        if let (Some(guest), Some(vq)) = (&inner.guest, inner.vqs.get_mut(index)) {
            vq.set(queue, base, call, guest);
            // Chains may be waiting that nobody kicks for.
            inner.activate(index);
        }
    }

    /// Stops a virtqueue; returns the index from which it goes on.
    pub fn stop(&self, index: usize) -> Option<u16> {
        let inner = &mut *lock(&self.inner);
        inner.active.retain(|&i| i != index);
        inner.vqs.get_mut(index)?.stop(inner.guest.as_ref())
    }

    /// Called when a virtqueue was kicked. [`Rfc::serve`] serves it from now on.
    pub fn on_kick(&self, index: usize) {
        let inner = &mut *lock(&self.inner);
        if inner.shape.role(index).is_some() {
            inner.activate(index);
        }
    }

    /// Takes WQEs from the virtqueues that were kicked, a bounded number of each, and delivers completions that had to
    /// wait for buffers. `None` if there was nothing to do.
    pub fn serve(&self) -> Option<Served> {
        let inner = &mut *lock(&self.inner);
        let (mut found, mut wakes) = (false, false);
        for at in 0..inner.active.len() {
            let index = inner.active[at];
            match inner.shape.role(index) {
                Some(Role::Cq(cq)) => {
                    let done = inner.deliver(cq);
                    found |= done.wrote || done.more;
                }
                Some(_) => {
                    let (n, wake) = inner.take(index, MAX_TURN);
                    found |= n > 0;
                    wakes |= wake;
                }
                None => {}
            }
        }
        found.then_some(Served { wakes })
    }

    /// Enables kicks again; false if [`Rfc::serve`] has work already.
    pub fn listen(&self) -> bool {
        let inner = &mut *lock(&self.inner);
        let Some(guest) = inner.guest.clone() else { return true };
        let mut again = false;
        for index in std::mem::take(&mut inner.active) {
            let usable = inner.is_usable(index);
            let vq = &mut inner.vqs[index];
            vq.active = false;
            if !vq.listen(&guest) && usable {
                vq.active = true;
                inner.active.push(index);
                again = true;
            }
        }
        !again
    }

    /// Called when the RNIC has completions for the CQ of virtqueue `index`. `asked`: REQ_NOTIFY_CQ waits for one of
    /// them. Returns true if [`Rfc::serve`] has to go on.
    pub fn complete(&self, index: usize, asked: bool) -> bool {
        let inner = &mut *lock(&self.inner);
        let Some(Role::Cq(cq)) = inner.shape.role(index) else { return false };
        if let Some(c) = &mut inner.cqs[cq] {
            c.asked |= asked;
        }
        let more = inner.deliver(cq).more;
        if more {
            inner.activate(index);
        }
        more
    }

    /// Takes an asynchronous event. This mode cannot pass it to the driver (R84c).
    pub fn on_event(&self, event: &abi::Event) {
        if event.kind == AsyncEvent::GidChange as u32 {
            lock(&self.inner).gids.stale = true;
        }
    }

    /// True if [`Rfc::look_at_gids`] has to be called.
    pub fn has_stale_gids(&self) -> bool {
        lock(&self.inner).gids.stale
    }

    /// Updates the vRNIC's indices of the driver's GIDs. `granted` is the vRNIC's table.
    pub fn look_at_gids(&self, granted: &[Gid]) {
        lock(&self.inner).gids.look(granted);
    }
}

fn shape(c: &abi::Config) -> Shape {
    Shape { cqs: c.max_cq.clamp(1, rfc::MAX_CQ) as usize, qps: c.max_qp.clamp(1, rfc::MAX_QP) as usize }
}

/// The pair that has this QP.
fn pair_of(qps: &[Option<Qp>], qpn: u32) -> Option<usize> {
    qps.iter().position(|q| q.as_ref().is_some_and(|q| q.qpn == qpn))
}

/// Result of [`Inner::deliver`].
#[derive(Default)]
struct Delivered {
    wrote: bool,
    /// Delivery was cut short, so that others get a turn.
    more: bool,
}

impl Inner {
    fn new(shape: Shape, bell: Bell) -> Self {
        Inner {
            shape,
            guest: None,
            vqs: (0..1 + shape.cqs + 2 * shape.qps).map(|_| Vq::default()).collect(),
            cqs: (0..shape.cqs).map(|_| None).collect(),
            qps: (0..shape.qps).map(|_| None).collect(),
            active: Vec::new(),
            gids: Gids::default(),
            bell,
            buffer: vec![0; WQE_ROOM].into(),
        }
    }

    fn activate(&mut self, index: usize) {
        if !std::mem::replace(&mut self.vqs[index].active, true) {
            self.active.push(index);
        }
    }

    /// True if chains of a virtqueue could be used now, if there are any.
    fn is_usable(&self, index: usize) -> bool {
        match self.shape.role(index) {
            Some(Role::Sq(pair)) => self.qps[pair].as_ref().is_some_and(Qp::has_room_for_sends),
            Some(Role::Rq(pair)) => self.qps[pair].as_ref().is_some_and(Qp::has_room_for_receives),
            Some(Role::Cq(cq)) => self.cqs[cq].as_ref().is_some_and(|cq| cq.tail.waiting() > 0),
            None => false,
        }
    }

    /// Copies at most `limit` WQEs of an SQ or RQ. Returns their number, and whether the RNIC has to be woken.
    fn take(&mut self, index: usize, limit: u32) -> (u32, bool) {
        let (sends, pair) = match self.shape.role(index) {
            Some(Role::Sq(pair)) => (true, pair),
            Some(Role::Rq(pair)) => (false, pair),
            _ => return (0, false),
        };
        let sq = self.shape.sq(pair);
        let (Some(guest), Some(qp)) = (&self.guest, &mut self.qps[pair]) else { return (0, false) };
        if let [sq, rq] = &mut self.vqs[sq..sq + 2] {
            // A driver whose sends raise no completions gets their chains back here.
            qp.give_back(sq, rq, guest);
        }
        let vq = &mut self.vqs[index];
        let (n, rings) = match sends {
            true => {
                let n = qp.take_sends(vq, guest, &self.gids, &mut self.buffer, limit);
                (n, n > 0)
            }
            false => qp.take_receives(vq, guest, &mut self.buffer, limit),
        };
        if n > 0 {
            vq.be_quiet(guest);
        }
        (n, rings && self.bell.ring(qp.slot()) != abi::AWAKE)
    }

    /// Writes completions of a CQ into the driver's buffers until one of the two runs out, but at most
    /// [`MAX_DELIVERED`].
    fn deliver(&mut self, at: usize) -> Delivered {
        let mut done = Delivered::default();
        let Inner { shape, guest, vqs, cqs, qps, .. } = self;
        let (Some(guest), Some(cq)) = (guest.as_ref(), cqs[at].as_mut()) else { return done };
        let (first, pairs) = vqs.split_at_mut(shape.sq(0));
        let vq = &mut first[shape.cq(at)];
        for _ in 0..MAX_DELIVERED {
            if cq.tail.waiting() == 0 {
                cq.tail.arm(abi::NOTIFY_NEXT);
                if cq.tail.waiting() == 0 {
                    return done.called(cq, vq, guest);
                }
            }
            let put = vq.put(guest, || {
                let c = cq.tail.pop()?;
                let qp = pair_of(qps, c.qp_num).and_then(|p| qps[p].as_mut().zip(pairs.get_mut(2 * p..2 * p + 2)));
                Some(match qp {
                    Some((qp, [sq, rq])) => {
                        // The chain of a WQE is returned before its completion.
                        qp.give_back(sq, rq, guest);
                        cq::to_driver(&c, if cq::is_receive(&c) { c.opcode } else { qp.opcode(c.wqe_index) })
                    }
                    _ => cq::to_driver(&c, c.opcode),
                })
            });
            cq.tail.release();
            done.wrote |= put == Some(true);
            // Kicks are needed only while completions wait for buffers.
            match put {
                Some(_) => vq.be_quiet(guest),
                None if vq.listen(guest) => return done.called(cq, vq, guest),
                None => break,
            }
        }
        done.more = true;
        done.called(cq, vq, guest)
    }

    /// The pair that has this QP.
    fn pair(&self, qpn: u32) -> Option<usize> {
        pair_of(&self.qps, qpn)
    }

    /// Index and RNIC handle of the CQ that the driver calls `cqn`, the number of its virtqueue.
    fn cq(&self, cqn: u32) -> Result<(usize, u32), Status> {
        let at = (cqn as usize).checked_sub(1).ok_or(Status::BadHandle)?;
        let cq = self.cqs.get(at).and_then(Option::as_ref).ok_or(Status::BadHandle)?;
        Ok((at, cq.number))
    }
}

impl Delivered {
    /// Calls the driver of a CQ if it has requested that and has a completion, written by this thread or by another one
    /// that came first.
    fn called(self, cq: &mut Cq, vq: &Vq, guest: &GuestMemoryMmap) -> Self {
        if (self.wrote || cq.tail.waiting() == 0) && std::mem::take(&mut cq.asked) {
            vq.call(guest);
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r01_virtqueues_are_numbered_as_the_rfc_says() {
        let s = Shape { cqs: 127, qps: 64 };
        assert_eq!((s.role(0), s.role(1), s.role(127)), (None, Some(Role::Cq(0)), Some(Role::Cq(126))));
        assert_eq!((s.role(128), s.role(129), s.role(130)), (Some(Role::Sq(0)), Some(Role::Rq(0)), Some(Role::Sq(1))));
        assert_eq!((s.role(255), s.role(256)), (Some(Role::Rq(63)), None));
        assert_eq!((s.cq(126), s.sq(63)), (127, 254));
    }
}
