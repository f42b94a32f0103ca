//! Extended reliable connections (IBTA vol. 1, annex A14): a sender names the shared receive queue of each message, so
//! that one connection serves all programs of a peer. Domains say which connections reach which queues.

use unirdma_abi::Status;

use super::Result;
use crate::core::Core;
use crate::objects::{OpenXrcd, SessionId, Xrcd};

impl Core {
    /// CREATE_XRCD.
    ///
    /// # Errors
    /// `BadHandle` if there is no such domain and `create` is not set, `BadValue` if there is one and `exclusive` is
    /// set, `Exhausted`.
    pub fn create_xrcd(&mut self, s: SessionId, o: OpenXrcd) -> Result<u32> {
        let vrnic = self.objects.vrnic_of(s)?;
        self.objects.quota(s, |u| u.xrcds, |l| l.max_pd)?;
        let file = o.key.map(|key| (vrnic, key));
        match file.map(|f| self.objects.domains.by_file.contains_key(&f)) {
            Some(true) if o.exclusive => return Err(Status::BadValue),
            Some(false) if !o.create => return Err(Status::BadHandle),
            _ => {}
        }
        let number = self.objects.new_number(s)?;
        let h =
            self.objects.xrcds.insert(Xrcd { owner: s, number, uses: 0, file, domain: 0 }).ok_or(Status::Exhausted)?;
        let domain = self.objects.domains.open(file);
        self.objects.xrcds.get_mut(h).into_iter().for_each(|x| x.domain = domain);
        self.objects.names(s).and_then(|n| n.xrcds.insert(number, h));
        self.objects.count_used(s, |u| u.xrcds += 1);
        Ok(number)
    }

    /// DESTROY_XRCD.
    ///
    /// # Errors
    /// `Busy` while the session has QPs or SRQs in it.
    pub fn destroy_xrcd(&mut self, s: SessionId, xrcd: u32) -> Result<()> {
        let (h, _) = self.objects.own_xrcd(s, xrcd)?;
        if self.objects.xrcds.get(h).is_some_and(|x| x.uses > 0) {
            return Err(Status::Busy);
        }
        self.objects.remove_xrcd(h);
        Ok(())
    }
}
