//! Fast registration: MRs that work requests give pages to, and take them away from (IBTA vol. 1, 10.6.4).
//!
//! CREATE_MR makes such an MR. It is free, which means that it grants nothing. REG_MR registers it, under a new key of
//! the same upper 24 bits; LOCAL_INV, or SEND_WITH_INV of a peer, frees it again. Its pages are kept as bus addresses,
//! in memory that it has from the beginning, so that a request costs neither an allocation nor a mapping. They are
//! found in the session's memory at each use.

use std::any::Any;
use std::sync::Arc;

use unirdma_abi as abi;
use unirdma_formats::{Rkey, access};
use unirdma_mem::{Loc, Place};
use zerocopy::IntoBytes;

use super::Objects;
use super::ids::SessionId;
use super::mr::{Backing, Mr, Resolve, is_range};
use super::qp::Qp;
use super::send_op::SendOp;
use crate::slab::Handle;

/// Base-2 logarithm of the smallest page size of an MR.
const MIN_PAGE_SHIFT: u32 = 12;

/// The pages of an MR that work requests register.
#[derive(Clone)]
pub struct PageList {
    /// Bus addresses; none while the MR is free. There is room for `most`.
    pages: Vec<u64>,
    most: u32,
    /// Base-2 logarithm of the page size.
    shift: u32,
    /// Offset of the MR in the first page, bytes.
    skip: u64,
    registered: bool,
    /// The access flags that it may grant.
    granting: u32,
    /// A value of the list's creator that lives as long as the list.
    hold: Arc<dyn Any + Send + Sync>,
}

/// An MR or a window whose grant was taken back. A job may still reach its memory.
#[derive(Clone, Copy)]
pub(crate) struct Freed {
    pub session: SessionId,
    /// The upper 24 bits of its key.
    pub grant: u32,
}

impl PageList {
    /// A list with room for `most` pages, of an MR that is free and may be registered to grant `granting`.
    pub fn new(most: u32, granting: u32, hold: Arc<dyn Any + Send + Sync>) -> Self {
        let pages = Vec::with_capacity(most as usize);
        PageList { pages, most, shift: MIN_PAGE_SHIFT, skip: 0, registered: false, granting, hold }
    }

    fn free(&mut self) {
        self.pages.clear();
        (self.registered, self.skip) = (false, 0);
    }

    /// The list as numbers: the most pages, the access flags that it may grant, the logarithm of the page size, the
    /// offset in the first page, and the pages if it is registered.
    pub(crate) fn parts(&self) -> (u32, u32, u32, u64, Option<&[u64]>) {
        (self.most, self.granting, self.shift, self.skip, self.registered.then_some(&self.pages[..]))
    }

    /// A list from [`PageList::parts`], with the creator's value of this list.
    #[must_use]
    pub(crate) fn with_parts(
        &self,
        (most, granting, shift, skip, pages): (u32, u32, u32, u64, Option<&[u64]>),
    ) -> Self {
        let mut list =
            PageList { shift, skip, registered: pages.is_some(), ..PageList::new(most, granting, self.hold.clone()) };
        list.pages.extend_from_slice(pages.unwrap_or_default());
        list
    }

    /// True if exactly `pages` pages of `1 << shift` bytes hold `len` bytes that begin `skip` bytes into the first
    /// page.
    pub(crate) fn holds(shift: u32, skip: u64, len: u64, pages: u64) -> bool {
        (MIN_PAGE_SHIFT..=abi::MAX_FAST_PAGE_SHIFT).contains(&shift)
            && skip < 1 << shift
            && len > 0
            && skip.checked_add(len).is_some_and(|end| end.div_ceil(1 << shift) == pages)
    }

    /// Reads the list of `count` pages at bus address `addr`, once. `None` if it, or a page, is not in the session's
    /// memory.
    fn read(&mut self, memory: &dyn Resolve, addr: u64, count: u32, shift: u32) -> Option<()> {
        if count > self.most || addr % 8 != 0 {
            return None;
        }
        let (span, off) = memory.resolve(addr, u64::from(count) * 8)?;
        self.pages.resize(count as usize, 0);
        span.read(off as usize, self.pages.as_mut_bytes());
        let size = 1 << shift;
        self.pages.iter_mut().for_each(|p| *p = u64::from_le(*p));
        self.pages.iter().all(|&p| p % size == 0 && memory.resolve(p, size).is_some()).then_some(())
    }

    /// The place of byte `off` of the MR, of up to `len` bytes. Pages that follow each other in one window are one
    /// place. Besides the pages of the place, only the one behind it is read.
    #[inline]
    pub(crate) fn locate<'a>(&self, memory: &'a dyn Resolve, off: u64, len: u64) -> Option<Place<'a>> {
        let (at, size) = (off.checked_add(self.skip)?, 1_u64 << self.shift);
        let (first, within) = ((at >> self.shift) as usize, at & (size - 1));
        let bus = self.pages.get(first)? + within;
        let mut n = (size - within).min(len);
        let (span, start) = memory.resolve(bus, n)?;
        let most = len.min(span.len() as u64 - start);
        let mut next = self.pages[first..].windows(2).take_while(|w| w[0].checked_add(size) == Some(w[1]));
        while n < most && next.next().is_some() {
            n = (n + size).min(most);
        }
        Some(Place::new(Loc::Mapped(span, start), n))
    }
}

impl Mr {
    /// The list of an MR that work requests register.
    pub fn page_list(&self) -> Option<&PageList> {
        if let Backing::Pages(list) = &self.backing { Some(list) } else { None }
    }
}

impl Objects {
    /// REG_MR: the MR whose key differs from `rkey` in its lower 8 bits at most gets the key `rkey`, the `compare_add`
    /// bytes from `remote_addr` on, and the access in `imm`. Its `dest_qpn` pages of `ah` bits are listed at bus
    /// address `swap`.
    pub(super) fn register(&mut self, h: Handle<Qp>, work: &SendOp) -> Option<()> {
        let (wqe, pd) = (&work.wqe, self.qps.get(h)?.pd);
        let handle = self.mrs.like(Rkey(wqe.rkey))?;
        let m = self.mrs.get(handle).filter(|m| m.pd == pd)?;
        let list = m.page_list().filter(|l| !l.registered)?;
        let (flags, iova, len) = (wqe.imm & !access::OPTIONAL_RANGE, wqe.remote_addr, wqe.compare_add);
        let (count, shift, owner) = (wqe.dest_qpn, wqe.ah, m.owner);
        // ibv_reg_mr(3): remote write and atomic need local write.
        let remote_store = flags & (access::REMOTE_WRITE | access::REMOTE_ATOMIC) != 0;
        if flags & !list.granting != 0 || remote_store && flags & access::LOCAL_WRITE == 0 || shift >= u64::BITS {
            return None;
        }
        let skip = iova & ((1 << shift) - 1);
        if !is_range(iova, len) || !PageList::holds(shift, skip, len, count.into()) {
            return None;
        }
        let session = self.sessions.get(owner.0)?;
        let v = self.vrnics.get_mut(session.vrnic.0)?;
        let used = v.used.mr_bytes.checked_add(len).filter(|&n| n <= v.limits.max_mr_bytes)?;
        let m = self.mrs.get_mut(handle)?;
        let Backing::Pages(list) = &mut m.backing else { return None };
        if list.read(&**session.memory.as_ref()?, wqe.swap, count, shift).is_none() {
            list.free();
            return None;
        }
        (list.shift, list.skip, list.registered) = (shift, skip, true);
        (m.key, m.access, m.iova, m.len) = (wqe.rkey, flags, iova, len);
        v.used.mr_bytes = used;
        Some(())
    }

    /// The MR with this key that work requests of QP `q` may free. An MR that is free already may be freed again,
    /// because a request that was lost half way comes twice.
    pub(super) fn freeable(&self, q: &Qp, key: Rkey) -> Option<Handle<Mr>> {
        let handle = self.mrs.remote_handle(key)?;
        self.mrs.get(handle).filter(|m| m.pd == q.pd && m.page_list().is_some()).map(|_| handle)
    }

    /// Frees the MR: it grants nothing any more.
    pub(super) fn free(&mut self, handle: Handle<Mr>) -> Option<Freed> {
        let m = self.mrs.get_mut(handle)?;
        let Backing::Pages(list) = &mut m.backing else { return None };
        list.free();
        let (owner, bytes, grant) = (m.owner, m.len, m.key >> 8);
        (m.access, m.iova, m.len) = (0, 0, 0);
        self.count_used(owner, |u| u.mr_bytes = u.mr_bytes.saturating_sub(bytes));
        Some(Freed { session: owner, grant })
    }
}
