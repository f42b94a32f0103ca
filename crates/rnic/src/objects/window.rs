//! Requests that stay at their requester, and memory windows (IBTA vol. 1, 10.6.7): grants of part of an MR that work requests make and
//! take back.

use unirdma_formats::{Lkey, Rkey, WcStatus, WrOpcode, access};
use unirdma_mem::Span;

use super::Objects;
use super::fast::Freed;
use super::mr::{Backing, Mr, Window};
use super::qp::Qp;
use super::work::Work;
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

    /// Executes a request that stays at its requester. It is done when no job reaches the memory of the MR that it has freed, if it has.
    ///
    /// # Errors
    /// The status with which it completes.
    pub fn execute_local(&mut self, h: Handle<Qp>, w: &Work) -> Result<Option<Freed>, WcStatus> {
        let key = Rkey(w.wqe.imm);
        let done = match w.op {
            WrOpcode::BindMw => self.bind(h, w).map(|()| None),
            WrOpcode::RegMr => self.register(h, w).map(|()| None),
            _ => match self.take_back(h, key) {
                Some(freed) => Some(Some(freed)),
                None => self.invalidate(h, key).then_some(None),
            },
        };
        done.ok_or(WcStatus::MwBindErr)
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

    /// QP `h` or its peer takes the grant of a window back; false if there is no such grant.
    pub fn invalidate(&mut self, h: Handle<Qp>, key: Rkey) -> bool {
        let window = self.qps.get(h).and_then(|q| self.window_of(q, key));
        window.into_iter().for_each(|mw| self.unbind(mw));
        window.is_some()
    }

    /// Binds the window with key `rkey`, whose lower 8 bits are new, to `compare_add` bytes from `remote_addr` on of the MR with the
    /// lkey that `swap` begins with; the access that it grants is in the upper half of `swap`.
    fn bind(&mut self, h: Handle<Qp>, work: &Work) -> Option<()> {
        let q = self.qps.get(h)?;
        let wqe = &work.wqe;
        let (addr, len, lkey, flags) =
            (wqe.remote_addr, wqe.compare_add, Lkey(wqe.swap as u32), (wqe.swap >> 32) as u32);
        let (pd, qpn) = (q.pd, q.qpn);
        let mw = self.mrs.like(Rkey(wqe.rkey))?;
        let window = self.mrs.get(mw).filter(|m| m.pd == pd)?.window?;
        if window.second && window.parent.is_some() || flags & !(access::MW_SUPPORTED | access::OPTIONAL_RANGE) != 0 {
            return None;
        }
        if len == 0 {
            self.unbind(mw);
            self.mrs.get_mut(mw)?.key = wqe.rkey;
            return Some(());
        }
        let parent = self.mrs.local_handle(lkey)?;
        let p = self.mrs.get(parent).filter(|m| m.grants(pd, access::MW_BIND, addr, len))?;
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
        Some(())
    }
}
