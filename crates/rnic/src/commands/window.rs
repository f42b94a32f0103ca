//! Memory windows (IBTA vol. 1, 10.6.7): grants of part of an MR, which work requests bind and invalidate.

use unirdma_abi::Status;

use super::Result;
use crate::core::Core;
use crate::executor::Object;
use crate::objects::{Mr, SessionId, Window};

impl Core {
    /// ALLOC_MW, of type 1 or 2. Returns (handle, rkey).
    ///
    /// # Errors
    /// `BadValue` for another type, `BadHandle`, `Exhausted`.
    pub fn alloc_mw(&mut self, s: SessionId, pd: u32, typ: u32) -> Result<(u32, u32)> {
        let pd = self.objects.own_pd(s, pd)?;
        let second = match typ {
            1 => false,
            2 => true,
            _ => return Err(Status::BadValue),
        };
        self.objects.quota(s, |u| u.mrs, |l| l.max_mr)?;
        let window = Some(Window { second, parent: None, qpn: None });
        self.make_mr(Mr { window, ..Mr::empty(s, pd) })
    }

    /// DEALLOC_MW: removes a window and its grant.
    ///
    /// # Errors
    /// `BadHandle` if the session has no such window.
    pub fn dealloc_mw(&mut self, s: SessionId, mw: u32) -> Result<()> {
        let (h, _) = self.objects.own_mr(s, mw).ok().filter(|m| m.1.window.is_some()).ok_or(Status::BadHandle)?;
        self.objects.unbind(h);
        self.remove(Object::Mr(h));
        Ok(())
    }
}
