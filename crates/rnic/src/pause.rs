//! Sessions that pause: the frontend has stopped, for example a virtual machine, and its memory must stay as it is.
//!
//! Nothing is done for the QPs of such a session, and nothing comes in for them: to its peers it is a device whose
//! packets are lost. Work under way goes on when the session does.

use crate::core::Core;
use crate::objects::{Pause, SessionId};

impl Core {
    /// Pauses a session. Its memory is left alone as soon as [`Core::has_copies`] is false for it.
    pub fn pause_session(&mut self, id: SessionId) {
        let Some(s) = self.objects.sessions.get_mut(id.0).filter(|s| !s.paused) else { return };
        s.paused = true;
        for &h in &s.names.qps {
            self.objects.qps.get_mut(h).into_iter().for_each(|q| q.pause = Pause::Yes);
        }
        // The pages must not change: to ask for kicks would be a write.
        for door in self.objects.doors_of(id) {
            self.polled.remove(door);
        }
        self.jobs.stop(id);
    }

    /// Resumes a paused session.
    pub fn resume_session(&mut self, id: SessionId) {
        let Some(s) = self.objects.sessions.get_mut(id.0).filter(|s| s.paused) else { return };
        s.paused = false;
        let qps: Vec<_> = s.names.qps.iter().copied().collect();
        for h in qps {
            let Some(q) = self.objects.qps.get_mut(h) else { continue };
            let was = std::mem::replace(&mut q.pause, Pause::No);
            if was == Pause::Overdue {
                self.execute_with(|e, core| e.timer(core, h));
            }
            self.make_runnable(h);
        }
        for door in self.objects.doors_of(id) {
            self.objects.doors.get_mut(door).into_iter().for_each(|d| d.parked = true);
            self.unpark_door(door, self.now);
        }
    }
}
