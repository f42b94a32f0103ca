//! Atomics and atomic writes between QPs of this host, and FLUSHes, which have nothing to do.

use unirdma_formats::WrOpcode;

use super::local::Outcome;
use super::responder::word_of;
use crate::access::{NeedsJob, local_side, remote_side};
use crate::core::Core;
use crate::job::{JobResult, Word};
use crate::objects::{Qp, SendOp};
use crate::slab::Handle;

impl Core {
    /// Executes an atomic, an atomic write or a FLUSH, or makes a job for it.
    pub(super) fn execute_word(&mut self, h: Handle<Qp>, ph: Handle<Qp>, w: &mut SendOp) -> Outcome {
        match w.op {
            WrOpcode::AtomicWrite => self.write_word(h, ph, w),
            WrOpcode::CmpSwap | WrOpcode::FetchAdd => self.fetch_word(h, ph, w),
            // A FLUSH has nothing to do, because earlier copies are visible already.
            _ => self.moved(h, ph, w, w.total - w.done, Ok(())),
        }
    }

    fn write_word(&mut self, h: Handle<Qp>, ph: Handle<Qp>, w: &mut SendOp) -> Outcome {
        let (Some(q), Some(p)) = (self.objects.qps.get(h), self.objects.qps.get(ph)) else {
            return self.no_answer(h, w);
        };
        let (from, to) = ((local_side(q, w), q.memory, q.vrnic), (remote_side(p, w), p.memory, p.vrnic));
        let (tables, mut value) = (self.objects.memory(), [0; 8]);
        let loaded = tables.load(from.0, 0, &mut value, &[]);
        let word = Word::Write(u64::from_ne_bytes(value));
        match loaded.and_then(|()| tables.word(to.0, word)) {
            Ok(_) => self.moved(h, ph, w, 8, Ok(())),
            Err(NeedsJob::Fault(fault)) => self.moved(h, ph, w, 8, Err(fault)),
            Err(NeedsJob::Job) => {
                let rest_ns = self.rest_of([q.vrnic, p.vrnic]);
                if rest_ns > 0 {
                    return self.rests(h, w, rest_ns);
                }
                let made = self.jobs.word(&tables, [h, ph], loaded.is_err().then_some(from), to, word);
                self.waits_for_job(h, ph, w, made)
            }
        }
    }

    fn fetch_word(&mut self, h: Handle<Qp>, ph: Handle<Qp>, w: &mut SendOp) -> Outcome {
        let (Some(q), Some(p)) = (self.objects.qps.get(h), self.objects.qps.get(ph)) else {
            return self.no_answer(h, w);
        };
        let tables = self.objects.memory();
        let found = match w.found {
            Some(found) => found,
            None => {
                let to = (remote_side(p, w), p.memory, p.vrnic);
                let word = word_of(w.op, w.wqe.compare_add, w.wqe.swap);
                match tables.word(to.0, word) {
                    Ok(found) => found,
                    Err(NeedsJob::Fault(fault)) => return self.moved(h, ph, w, 8, Err(fault)),
                    Err(NeedsJob::Job) => {
                        let rest_ns = self.rest_of([q.vrnic, p.vrnic]);
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
        let (result, to) = (found.to_ne_bytes(), (local_side(q, w), q.memory, q.vrnic));
        match tables.store(to.0, 0, &result) {
            Ok(()) => self.moved(h, ph, w, 8, Ok(())),
            Err(NeedsJob::Fault(fault)) => self.moved(h, ph, w, 8, Err(fault.reversed())),
            Err(NeedsJob::Job) => {
                let made = match self.jobs.store(&tables, h, to, 0, &[&result]) {
                    JobResult::Nothing(fault) => JobResult::Nothing(fault.reversed()),
                    made => made,
                };
                self.waits_for_job(h, h, w, made)
            }
        }
    }
}
