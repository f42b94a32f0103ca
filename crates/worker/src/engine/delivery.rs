//! Delivery of what the RNIC puts out: events to the channels of sessions, and to the control thread the sessions that
//! it has to serve.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, RwLock, RwLockReadGuard};

use unirdma_abi as abi;
use unirdma_device::{EventQueues, lock};
use unirdma_rnic::{Output, SessionId};

/// The event queues of all sessions, and the sessions that wait for the control thread.
#[derive(Default)]
pub(crate) struct EventDelivery {
    queues: RwLock<HashMap<SessionId, Arc<EventQueues>>>,
    /// Held for reading by threads that have taken outputs from the RNIC and not delivered them yet.
    delivering: RwLock<()>,
    /// Sessions that the control thread has to serve, because their delayed command can be answered or, in the RFC
    /// mode, completions wait.
    released: Mutex<Vec<SessionId>>,
    notify: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

impl EventDelivery {
    /// Sets the callback that wakes the control thread: see [`EventDelivery::notify`]. Only the first call has an
    /// effect.
    pub fn set_notify(&self, f: Box<dyn Fn() + Send + Sync>) {
        let _ = self.notify.set(f);
    }

    /// Wakes the control thread, which then looks at [`EventDelivery::released`] and at the groups that the port
    /// should receive from.
    pub fn notify(&self) {
        self.notify.get().into_iter().for_each(|f| f());
    }

    /// Registers the queues to which a session's events are delivered.
    pub fn add_session(&self, s: SessionId, events: Arc<EventQueues>) {
        self.queues.write().unwrap_or_else(|e| e.into_inner()).insert(s, events);
    }

    /// Removes the event queues of a session.
    pub fn remove_session(&self, s: SessionId) {
        self.queues.write().unwrap_or_else(|e| e.into_inner()).remove(&s);
    }

    /// Asks the control thread to serve a session.
    pub fn release(&self, session: SessionId) {
        lock(&self.released).push(session);
        self.notify();
    }

    /// Takes the list of sessions that the control thread has to serve.
    pub fn released(&self) -> Vec<SessionId> {
        std::mem::take(&mut lock(&self.released))
    }

    /// Returns a guard if there are outputs. It must be taken while the RNIC is still locked, and held until the
    /// outputs are delivered.
    pub fn begin(&self, out: &[Output]) -> Option<RwLockReadGuard<'_, ()>> {
        (!out.is_empty()).then(|| self.delivering.read().unwrap_or_else(|e| e.into_inner()))
    }

    /// Waits until all outputs that were taken from the RNIC before are delivered.
    pub fn settle(&self) {
        drop(self.delivering.write().unwrap_or_else(|e| e.into_inner()));
    }

    /// Delivers outputs of the RNIC, without the RNIC.
    pub fn deliver(&self, out: &mut Vec<Output>) {
        if out.is_empty() {
            return;
        }
        let queues = self.queues.read().unwrap_or_else(|e| e.into_inner());
        for o in out.drain(..) {
            let (session, queue, event) = match o {
                Output::Released { session } => {
                    self.release(session);
                    continue;
                }
                Output::Completion { session, queue, cqn, asked } => {
                    if queues.get(&session).is_some_and(|q| q.complete(queue, cqn, asked)) {
                        self.release(session);
                    }
                    continue;
                }
                Output::Connection { session, queue } => {
                    let e = abi::Event { kind: abi::EVENT_CM, handle: 0, reserved: 0 };
                    (session, abi::VQ_COMP_FIRST + u32::from(queue), e)
                }
                Output::Async { session, kind, handle } => {
                    (session, abi::VQ_ASYNC, abi::Event { kind: kind as u32, handle, reserved: 0 })
                }
            };
            if let Some(q) = queues.get(&session) {
                q.deliver(queue, event);
            }
        }
    }
}
