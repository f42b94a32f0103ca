//! Extended reliable connections (IBTA vol. 1, annex A14): a sender names the shared receive queue of each message, so that
//! one connection serves all programs of a peer. Domains say which connections reach which queues.

use std::collections::HashMap;

use unirdma_abi::Status;
use unirdma_formats::{QpType, Qpn};

use crate::objects::{Cq, Qp, SessionId, VnicId};
use crate::rnic::Rnic;
use crate::slab::Handle;
use crate::wqe::RecvDone;

/// An open XRC domain.
pub(crate) struct Xrcd {
    /// QPs, openers of QPs, and SRQs in it.
    pub uses: u32,
    /// What programs share it by.
    file: Option<File>,
    /// The same for all that have opened one domain.
    pub domain: u32,
}

/// A file by which programs of a vRNIC share a domain.
type File = (VnicId, (u64, u64));

/// The XRC domains that programs share.
#[derive(Default)]
pub(crate) struct Domains {
    last: u32,
    /// The domain of a file, and how often it is open.
    by_file: HashMap<File, (u32, u32)>,
}

impl Domains {
    fn open(&mut self, file: Option<File>) -> u32 {
        let mut new = || {
            self.last = self.last.wrapping_add(1);
            self.last
        };
        let Some(file) = file else { return new() };
        let shared = self.by_file.entry(file).or_insert_with(|| (new(), 0));
        shared.1 += 1;
        shared.0
    }

    fn close(&mut self, file: File) {
        if let Some(shared) = self.by_file.get_mut(&file) {
            shared.1 -= 1;
            if shared.1 == 0 {
                self.by_file.remove(&file);
            }
        }
    }
}

/// What makes an SRQ an XRC SRQ.
#[derive(Clone, Copy, Debug)]
pub(crate) struct XrcSrq {
    pub xrcd: Handle<Xrcd>,
    pub domain: u32,
    pub cq: Handle<Cq>,
    /// Its number in packets, 24 bits.
    pub number: u32,
}

/// How a domain is opened (`ibv_open_xrcd(3)`).
#[derive(Clone, Copy, Debug, Default)]
pub struct OpenXrcd {
    /// Device and inode of a file, by which programs share it.
    pub key: Option<(u64, u64)>,
    /// It may be new.
    pub create: bool,
    /// It must be new.
    pub exclusive: bool,
}

impl Rnic {
    /// CREATE_XRCD.
    ///
    /// # Errors
    /// `BadHandle` if it does not exist and may not be made, `BadValue` if it exists and may not, `Exhausted`.
    pub fn create_xrcd(&mut self, s: SessionId, o: OpenXrcd) -> Result<u32, Status> {
        let vnic = self.vnic_of(s)?;
        self.quota(s, |u| u.xrcds, |l| l.max_pd)?;
        let file = o.key.map(|key| (vnic, key));
        match file.map(|f| self.domains.by_file.contains_key(&f)) {
            Some(true) if o.exclusive => return Err(Status::BadValue),
            Some(false) if !o.create => return Err(Status::BadHandle),
            _ => {}
        }
        let number = self.new_number(s)?;
        let h = self.xrcds.insert(Xrcd { uses: 0, file, domain: 0 }).ok_or(Status::Exhausted)?;
        let domain = self.domains.open(file);
        self.xrcds.get_mut(h).into_iter().for_each(|x| x.domain = domain);
        self.names(s).and_then(|n| n.xrcds.insert(number, h));
        self.count_used(s, |u| u.xrcds += 1);
        Ok(number)
    }

    /// DESTROY_XRCD.
    ///
    /// # Errors
    /// `Busy` while the session has QPs or SRQs in it.
    pub fn destroy_xrcd(&mut self, s: SessionId, xrcd: u32) -> Result<(), Status> {
        let (h, _) = self.own_xrcd(s, xrcd)?;
        if self.xrcds.get(h).is_some_and(|x| x.uses > 0) {
            return Err(Status::Busy);
        }
        self.remove_xrcd(h);
        self.names(s).and_then(|n| n.xrcds.remove(&xrcd));
        self.count_used(s, |u| u.xrcds -= 1);
        Ok(())
    }

    pub(crate) fn remove_xrcd(&mut self, h: Handle<Xrcd>) {
        if let Some(file) = self.xrcds.remove(h).and_then(|x| x.file) {
            self.domains.close(file);
        }
    }

    /// A random number for an XRC SRQ: 24 bits, so that it can be found by trying. Access rests on the domain.
    pub(crate) fn new_srq_number(&mut self) -> u32 {
        loop {
            let n = self.random.srq_numbers.next_u64() as u32 & Qpn::MASK;
            if n != 0 && !self.srq_numbers.contains_key(&n) {
                return n;
            }
        }
    }

    /// A message for SRQ number `number` begins at QP `h`: memory and receives are that queue's from now on. False if the QP has no
    /// such queue. A QP of another type has its own always.
    pub(crate) fn aim(&mut self, h: Handle<Qp>, number: u32) -> bool {
        let Some(q) = self.qps.get_mut(h) else { return false };
        if q.typ != QpType::XrcRecv {
            return q.typ != QpType::XrcSend;
        }
        let Some(&srq) = self.srq_numbers.get(&number) else { return false };
        let Some(s) = self.srqs.get(srq) else { return false };
        let Some(x) = s.xrc.filter(|x| q.xrcd.is_some_and(|own| own.1 == x.domain)) else { return false };
        let to = (s.pd, s.owner, Some(srq), x.cq);
        if q.receiving && q.srq != Some(srq) {
            // A message that was broken off has left its receive: the one for this message is another queue's.
            self.finish_recv(h, RecvDone::flushed());
        }
        if let Some(q) = self.qps.get_mut(h) {
            (q.pd, q.memory, q.srq, q.recv_cq) = to;
        }
        true
    }
}
