//! Requests that no other QP takes part in, and memory windows (IBTA vol. 1, 10.6.7): work requests make and take back
//! grants of a part of an MR.

use unirdma_formats::{Lkey, Rkey, WcStatus, WrOpcode, access};
use unirdma_mem::Span;

use super::Objects;
use super::fast_reg::Freed;
use super::mr::{Backing, Mr, Window};
use super::qp::Qp;
use super::send_op::SendOp;
use crate::slab::Handle;

impl Objects {
    /// A window grants nothing any more.
    pub fn unbind(&mut self, mw: Handle<Mr>) {
        let Some(m) = self.mrs.get_mut(mw) else { return };
        let Some(w) = &mut m.window else { return };
        let parent = w.parent.take();
        w.qpn = None;
        (m.access, m.len, m.iova) = (0, 0, 0);
        m.backing = Backing::Mapped(Span::anonymous(0));
        m.regions = [].into();
        if let Some(p) = parent.and_then(|p| self.mrs.get_mut(p)) {
            p.windows = p.windows.saturating_sub(1);
        }
    }

    /// Executes a request that no other QP takes part in. If it takes a grant back, it is executed again, with the same
    /// effect, until no job uses that grant.
    ///
    /// # Errors
    /// The status with which it completes.
    pub fn execute_local(&mut self, h: Handle<Qp>, w: &SendOp) -> Result<Option<Freed>, WcStatus> {
        let done = match w.op {
            WrOpcode::BindMw => self.bind(h, w),
            WrOpcode::RegMr => self.register(h, w).map(|()| None),
            _ => self.take_back(h, Rkey(w.wqe.imm)).map(Some),
        };
        done.ok_or(WcStatus::MwBindErr)
    }

    /// Takes back the grant of the MR or window with this key, if QP `h` or its peer may do that. A window stays bound
    /// until [`Objects::invalidate`], so that this may be repeated.
    pub fn take_back(&mut self, h: Handle<Qp>, key: Rkey) -> Option<Freed> {
        let q = self.qps.get(h)?;
        if let Some(handle) = self.freeable(q, key) {
            return self.free(handle);
        }
        let window = self.window_of(q, key)?;
        let m = self.mrs.get_mut(window)?;
        m.access = 0;
        Some(Freed { session: m.owner, grant: key.0 >> 8 })
    }

    /// The bound window of type 2 whose grant QP `q` may take back.
    fn window_of(&self, q: &Qp, key: Rkey) -> Option<Handle<Mr>> {
        let handle = self.mrs.remote_handle(key)?;
        let mr = self.mrs.get(handle)?;
        let bound = mr.window.is_some_and(|w| w.second && w.parent.is_some() && w.qpn == Some(q.qpn));
        (bound && mr.pd == q.pd).then_some(handle)
    }

    /// True if a peer of QP `q` may take back the grant of the window or MR with this key.
    pub fn may_invalidate(&self, q: &Qp, key: Rkey) -> bool {
        self.freeable(q, key).is_some() || self.window_of(q, key).is_some()
    }

    /// Unbinds the window with this key, if there is one, after [`Objects::take_back`] and when no job uses its grant.
    pub fn invalidate(&mut self, h: Handle<Qp>, key: Rkey) {
        let window = self.qps.get(h).and_then(|q| self.window_of(q, key));
        window.into_iter().for_each(|mw| self.unbind(mw));
    }

    /// Binds the window with key `rkey`, whose lower 8 bits are new, to `compare_add` bytes from `remote_addr` on of
    /// the MR whose lkey is in the lower half of `swap`. The upper half of `swap` has the access that it grants.
    /// Returns the grant that this takes back: a window of type 1 may have been bound before.
    fn bind(&mut self, h: Handle<Qp>, work: &SendOp) -> Option<Option<Freed>> {
        let q = self.qps.get(h)?;
        let wqe = &work.wqe;
        let (addr, len, lkey, flags) =
            (wqe.remote_addr, wqe.compare_add, Lkey(wqe.swap as u32), (wqe.swap >> 32) as u32);
        let (pd, qpn) = (q.pd, q.qpn);
        let mw = self.mrs.like(Rkey(wqe.rkey))?;
        if self.mrs.get(mw).is_some_and(|m| m.pd == pd && !self.lives(m)) {
            // The memory that it was bound to is gone.
            self.unbind(mw);
        }
        let m = self.mrs.get(mw).filter(|m| m.pd == pd && self.lives(m))?;
        let window = m.window?;
        let freed = (!window.second).then_some(Freed { session: m.owner, grant: wqe.rkey >> 8 });
        if window.second && window.parent.is_some() || flags & !(access::MW_SUPPORTED | access::OPTIONAL_RANGE) != 0 {
            return None;
        }
        if len == 0 {
            self.unbind(mw);
            self.mrs.get_mut(mw)?.key = wqe.rkey;
            return Some(freed);
        }
        let parent = self.mrs.local_handle(lkey)?;
        let p = self.mrs.get(parent).filter(|m| m.grants(pd, access::MW_BIND, addr, len) && self.lives(m))?;
        if flags & (access::REMOTE_WRITE | access::REMOTE_ATOMIC) != 0 && p.access & access::LOCAL_WRITE == 0 {
            return None;
        }
        let off = addr - p.iova;
        let backing = match &p.backing {
            Backing::Session if flags & access::ZERO_BASED != 0 => return None,
            backing => backing.part(off, len)?,
        };
        let regions = p.regions.clone();
        self.unbind(mw);
        let m = self.mrs.get_mut(mw)?;
        (m.key, m.len, m.backing, m.regions) = (wqe.rkey, len, backing, regions);
        m.access = flags & (access::REMOTE_WRITE | access::REMOTE_READ | access::REMOTE_ATOMIC);
        m.iova = if flags & access::ZERO_BASED != 0 { 0 } else { addr };
        m.window = Some(Window { parent: Some(parent), qpn: Some(qpn), ..window });
        self.mrs.get_mut(parent)?.windows += 1;
        Some(freed)
    }
}
