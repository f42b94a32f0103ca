//! MRs that work requests register (IBTA vol. 1, 10.6.4).

use std::any::Any;
use std::sync::Arc;

use unirdma_abi as abi;
use unirdma_abi::Status;
use unirdma_formats::access;

use super::Result;
use crate::core::Core;
use crate::objects::{Backing, Mr, PageList, SessionId};

impl Core {
    /// CREATE_MR: makes an MR in the state free, which work requests register. It may get at most `most` pages and
    /// grant at most `flags`. `hold` is kept as long as the MR. Returns (handle, key).
    ///
    /// # Errors
    /// `BadValue` for other flags or another number of pages, `BadHandle`, `Exhausted`.
    pub fn create_mr(
        &mut self,
        s: SessionId,
        pd: u32,
        flags: u32,
        most: u32,
        hold: Arc<dyn Any + Send + Sync>,
    ) -> Result<(u32, u32)> {
        let pd = self.objects.own_pd(s, pd)?;
        let granting = flags & !access::OPTIONAL_RANGE;
        if granting & !access::FAST_SUPPORTED != 0 || !(1..=abi::MAX_FAST_PAGES).contains(&most) {
            return Err(Status::BadValue);
        }
        self.objects.quota(s, |u| u.mrs, |l| l.max_mr)?;
        let backing = Backing::Pages(PageList::new(most, granting, hold));
        self.make_mr(Mr { backing, ..Mr::empty(s, pd) })
    }
}
