//! Short WRITEs and READs from one mapping to another. What such a message takes is what is looked up for it, so each key is looked up
//! once here, for the check of its grant and for the copy together.

use unirdma_formats::{QpType, WrOpcode};

use super::local::{JOB_BYTES, ends, may_return, request};
use super::responder::check_form;
use crate::core::Core;
use crate::objects::{Qp, Work};
use crate::slab::Handle;

impl Core {
    /// Copies all of request `w` of QP `h`, if it is a short WRITE or READ of one range at each end and nothing is against it; the peer.
    /// `None` if it is anything else, or if anything is against it. Then nothing was done, and [`Core::begin`] makes the checks one by
    /// one.
    pub(super) fn copy_at_once(&mut self, h: Handle<Qp>, w: &mut Work) -> Option<Handle<Qp>> {
        let short = w.num_sge <= 1 && w.total < JOB_BYTES;
        if !short || !matches!(w.op, WrOpcode::Write | WrOpcode::Read) || self.tap.is_some() {
            return None;
        }
        let ph = self.objects.answering_peer(h)?;
        let (q, p) = (self.objects.qps.get(h)?, self.objects.qps.get(ph)?);
        let connected = matches!(q.typ, QpType::Rc | QpType::Uc);
        if !connected || !may_return(q, w) || check_form(p, &request(w)).is_err() {
            return None;
        }
        let [from, to] = ends(q, p, w);
        self.objects.memory().copy(from, to, 0, w.total)?.ok().filter(|&n| n == w.total)?;
        self.establish(ph);
        w.started = true;
        Some(ph)
    }
}
