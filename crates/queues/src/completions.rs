//! Polling: the rings of a CQ, with those from before it was resized.

use std::collections::VecDeque;

use unirdma_abi as abi;
use unirdma_mem::CqTail;

/// The rings of a CQ. `M` owns the memory of a ring.
#[derive(Debug)]
pub struct Completions<M> {
    now: CqTail,
    memory: M,
    /// Rings from before it was resized, while completions wait there, the oldest first.
    before: VecDeque<(CqTail, M)>,
}

impl<M> Completions<M> {
    /// A CQ of one ring.
    pub fn new(now: CqTail, memory: M) -> Self {
        Completions { now, memory, before: VecDeque::new() }
    }

    /// The next completion; completions of earlier rings come first. Its slot stays taken until
    /// [`Completions::release`]. `skipped` is called for each completion that is not wanted any more, `empty` with the
    /// memory of each ring that is not needed any more.
    #[inline]
    pub fn pop(&mut self, skipped: impl Fn(&abi::Cqe), empty: impl Fn(M)) -> Option<abi::Cqe> {
        if !self.before.is_empty()
            && let Some(cqe) = self.pop_before(&skipped, empty)
        {
            return Some(cqe);
        }
        self.now.pop_wanted(skipped)
    }

    #[cold]
    fn pop_before(&mut self, skipped: impl Fn(&abi::Cqe), empty: impl Fn(M)) -> Option<abi::Cqe> {
        while let Some((tail, _)) = self.before.front_mut() {
            if let Some(cqe) = tail.pop_wanted(&skipped) {
                return Some(cqe);
            }
            let (_, memory) = self.before.pop_front()?;
            empty(memory);
        }
        None
    }

    /// Gives the slots of popped completions back.
    #[inline]
    pub fn release(&mut self) {
        self.now.release();
    }

    /// True once the device has found the CQ overrun.
    pub fn overrun(&self) -> bool {
        self.now.overrun()
    }

    /// Completions that wait. A CQ cannot be made smaller than that.
    pub fn waiting(&self) -> u32 {
        self.now.waiting() + self.before.iter().map(|b| b.0.waiting()).sum::<u32>()
    }

    /// Completions of QP `qpn` that the device has written so far are not wanted any more.
    pub fn forget(&mut self, qpn: u32) {
        self.now.forget(qpn);
        self.before.iter_mut().for_each(|b| b.0.forget(qpn));
    }

    /// Arms the CQ with `NOTIFY_*` flags.
    pub fn arm(&mut self, flags: u32) {
        self.now.arm(flags);
    }

    /// The device writes to another ring from now on. Completions that wait in earlier rings are still taken from
    /// there.
    pub fn replace(&mut self, now: CqTail, memory: M) {
        let now = std::mem::replace(&mut self.now, now);
        self.before.push_back((now, std::mem::replace(&mut self.memory, memory)));
    }

    /// The owners of the memory of all its rings, for a CQ that is gone.
    pub fn memory(&mut self) -> impl Iterator<Item = &mut M> {
        self.before.iter_mut().map(|b| &mut b.1).chain([&mut self.memory])
    }
}
