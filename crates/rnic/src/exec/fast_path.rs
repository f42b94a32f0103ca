//! The fast path for short WRITEs and READs between two mappings. Look-ups are most of the cost of such a message, so
//! each key is looked up once here, for the check of its grant and for the copy together.

use unirdma_formats::{QpType, WrOpcode};

use super::local::{JOB_BYTES, ends, may_return, request};
use super::responder::check_form;
use crate::core::Core;
use crate::objects::{Qp, SendOp};
use crate::slab::Handle;

impl Core {
    /// Copies all of request `w` of QP `h` if it is a short WRITE or READ of one range at each end that passes all
    /// checks. Returns the peer. `None` for any other request, and if a check fails; then nothing was done, and
    /// [`Core::begin`] makes the checks one by one.
    pub(super) fn copy_at_once(&mut self, h: Handle<Qp>, w: &mut SendOp) -> Option<Handle<Qp>> {
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
