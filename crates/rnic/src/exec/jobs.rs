//! Gives jobs to callers, and handles their results.

use unirdma_formats::QpState;
use unirdma_mem::Fault;

use crate::core::Core;
use crate::job::{Job, Waiter};
use crate::objects::{Connection, Qp, SendOp, SessionId, VrnicId, Wait};
use crate::output::Output;
use crate::slab::Handle;

impl Core {
    /// Takes a job for the caller, which does it with [`Job::run`] and then returns it with [`Core::end_job`].
    pub fn take_job(&mut self) -> Option<Box<Job>> {
        self.jobs.take()
    }

    /// Like [`Core::take_job`], but never returns a job that may wait for a process.
    pub fn take_brief_job(&mut self) -> Option<Box<Job>> {
        self.jobs.take_brief()
    }

    /// True if [`Core::take_job`] has a job to return.
    pub fn has_jobs(&self) -> bool {
        self.jobs.has_any()
    }

    /// True if jobs wait or are being done.
    pub fn are_jobs_under_way(&self) -> bool {
        self.jobs.are_flying()
    }

    /// Handles a job that was done.
    pub fn end_job(&mut self, mut job: Box<Job>) {
        let (took_ns, requester) = (job.took_ns(), self.objects.vrnic_of_qp(job.qp));
        let (sparse, touched) = job.sparse();
        if let Some(v) = sparse.or(requester).and_then(|id| self.objects.vrnics.get_mut(id.0)) {
            v.memory_state.end_job(touched, job.copied(), took_ns);
            if touched {
                v.page_time.charge(self.now, took_ns);
            }
        }
        // The vRNIC that has the holes pays for the pages that are made there, also for requests of a peer.
        let payer = if touched { sparse } else { requester };
        payer.into_iter().for_each(|vrnic| self.sched.charge(vrnic, took_ns));
        if let Some(p) = self.objects.qps.get_mut(job.peer) {
            p.served_by -= 1;
            // A QP in ERR does not flush a receive that a job fills. Now that the job has ended, it can.
            if p.state == QpState::Err {
                self.make_runnable(job.peer);
            }
        }
        if self.jobs.end(&job) {
            let (ends, number, copied) = ([job.qp, job.peer], job.number(), job.result());
            let mut data = std::mem::take(&mut job.data);
            let first = copied.first.unwrap_or(Err(Fault::SourceMoves));
            self.hear(ends, number, first, job.next().drain(..copied.next), &mut data);
            job.data = data;
        }
        job.next().drain(..).for_each(|w| self.objects.spare.keep_work(w));
        self.jobs.keep(job);
        while let Some((session, waiter)) = self.jobs.passed() {
            match waiter {
                Waiter::Command => self.push_output(Output::Released { session }),
                Waiter::Away(away) => {
                    if let Some(s) = self.objects.sessions.get(session.0).filter(|s| s.away == away)
                        && let Some(bell) = &s.bell
                    {
                        bell.confirm_away(away);
                    }
                }
            }
        }
    }

    /// Passes the result of job `number` to QP `h`: `first` for its first request, the `next` requests that it has
    /// copied whole, and the `data` that it has fetched or kept.
    fn hear(
        &mut self,
        [h, peer]: [Handle<Qp>; 2],
        number: u64,
        first: Result<u64, Fault>,
        next: impl IntoIterator<Item = Box<SendOp>>,
        data: &mut Vec<u8>,
    ) {
        let Some(q) = self.objects.qps.get_mut(h) else { return };
        match &mut q.connection {
            Connection::Wire(w) => w.end_job(number, first, data),
            Connection::Datagram(d) => {
                d.backlog.end(number, first);
                d.fetched.end(number, first, data);
                q.work.iter_mut().filter(|w| w.wait == Wait::Job(number)).for_each(|w| w.wait = Wait::No);
            }
            Connection::Local(_) | Connection::None => self.copied([h, peer], number, first, next, data),
        }
        self.make_runnable(h);
    }

    /// Completes the operations on words that jobs have executed for QPs of a vRNIC, or are executing at this moment,
    /// as if those jobs had ended. Returns the QPs that requested them.
    pub(crate) fn end_words(&mut self, id: VrnicId) -> Vec<Handle<Qp>> {
        let qps = &self.objects.qps;
        let executed = self.jobs.take_executed(|h| qps.get(h).is_some_and(|q| q.vrnic == id));
        let end = |(ends, number, found): ([Handle<Qp>; 2], u64, u64)| {
            self.hear(ends, number, Ok(found), None, &mut Vec::new());
            ends[0]
        };
        executed.into_iter().map(end).collect()
    }

    /// Notes that the job with this number takes long. Before it has ended, its process gets no other job; jobs for
    /// other processes do not wait for it.
    pub fn note_slow(&mut self, number: u64) {
        for job in self.jobs.note_slow(number) {
            // It was not begun; its request is tried again.
            self.end_job(job);
        }
    }

    /// Fails the QP of a job that takes too long. A thread may still be in an access of the job, but nothing waits for
    /// it any more.
    pub fn give_up(&mut self, number: u64) {
        if let Some((f, fault)) = self.jobs.give_up(number) {
            let ends = [f.qp, f.peer];
            self.hear(ends, number, Err(fault), None, &mut Vec::new());
        }
    }

    /// Called after a command that takes memory away from the RNIC. False if no job reaches that memory any more. Else
    /// the answer to the command is to be held back until [`Core::is_delayed`] is false, which [`Output::Released`]
    /// announces.
    pub fn delay_command(&mut self, s: SessionId) -> bool {
        self.jobs.fence(s, Waiter::Command)
    }

    /// True while the answer to a session's command is to be held back (see [`Core::delay_command`]).
    pub fn is_delayed(&self, s: SessionId) -> bool {
        self.jobs.delays(s)
    }
}
