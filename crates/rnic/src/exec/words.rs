//! Atomics and atomic writes between QPs of this host, and FLUSHes, which have nothing to do.

use unirdma_formats::WrOpcode;

use super::local::Outcome;
use super::responder::word_of;
use crate::access::{Miss, local_side, remote_side};
use crate::core::Core;
use crate::job::{Made, Word};
use crate::objects::{Qp, Work};
use crate::slab::Handle;

impl Core {
    /// Executes an atomic, an atomic write or a FLUSH, or makes a job for it.
    pub(super) fn execute_word(&mut self, h: Handle<Qp>, ph: Handle<Qp>, w: &mut Work) -> Outcome {
        match w.op {
            WrOpcode::AtomicWrite => self.write_word(h, ph, w),
            WrOpcode::CmpSwap | WrOpcode::FetchAdd => self.fetch_word(h, ph, w),
            // A FLUSH has nothing to do, because earlier copies are visible already.
            _ => self.moved(h, ph, w, w.total - w.done, Ok(())),
        }
    }

    fn write_word(&mut self, h: Handle<Qp>, ph: Handle<Qp>, w: &mut Work) -> Outcome {
        let (Some(q), Some(p)) = (self.objects.qps.get(h), self.objects.qps.get(ph)) else {
            return self.no_answer(h, w);
        };
        let (from, to) = ((local_side(q, w), q.memory, q.vnic), (remote_side(p, w), p.memory, p.vnic));
        let (tables, mut value) = (self.objects.memory(), [0; 8]);
        let loaded = tables.load(from.0, 0, &mut value, &[]);
        let word = Word::Write(u64::from_ne_bytes(value));
        match loaded.and_then(|()| tables.word(to.0, word)) {
            Ok(_) => self.moved(h, ph, w, 8, Ok(())),
            Err(Miss::Fault(fault)) => self.moved(h, ph, w, 8, Err(fault)),
            Err(Miss::Job) => {
                let rest_ns = self.rest_of([q.vnic, p.vnic]);
                if rest_ns > 0 {
                    return self.rests(h, w, rest_ns);
                }
                let made = self.jobs.word(&tables, [h, ph], loaded.is_err().then_some(from), to, word);
                self.waits_for_job(h, ph, w, made)
            }
        }
    }

    fn fetch_word(&mut self, h: Handle<Qp>, ph: Handle<Qp>, w: &mut Work) -> Outcome {
        let (Some(q), Some(p)) = (self.objects.qps.get(h), self.objects.qps.get(ph)) else {
            return self.no_answer(h, w);
        };
        let tables = self.objects.memory();
        let found = match w.found {
            Some(found) => found,
            None => {
                let to = (remote_side(p, w), p.memory, p.vnic);
                let word = word_of(w.op, w.wqe.compare_add, w.wqe.swap);
                match tables.word(to.0, word) {
                    Ok(found) => found,
                    Err(Miss::Fault(fault)) => return self.moved(h, ph, w, 8, Err(fault)),
                    Err(Miss::Job) => {
                        let rest_ns = self.rest_of([q.vnic, p.vnic]);
                        if rest_ns > 0 {
                            return self.rests(h, w, rest_ns);
                        }
                        let made = self.jobs.word(&tables, [h, ph], None, to, word);
                        return self.waits_for_job(h, ph, w, made);
                    }
                }
            }
        };
        // Keeps the old value: the atomic is executed once, even if its result cannot be stored at once.
        w.found = Some(found);
        let (result, to) = (found.to_ne_bytes(), (local_side(q, w), q.memory, q.vnic));
        match tables.store(to.0, 0, &result) {
            Ok(()) => self.moved(h, ph, w, 8, Ok(())),
            Err(Miss::Fault(fault)) => self.moved(h, ph, w, 8, Err(fault.reversed())),
            Err(Miss::Job) => {
                let made = match self.jobs.store(&tables, h, to, 0, &[&result]) {
                    Made::Nothing(fault) => Made::Nothing(fault.reversed()),
                    made => made,
                };
                self.waits_for_job(h, h, w, made)
            }
        }
    }
}
