//! Memory that the RNIC no longer needs. Unmapping takes the kernel long, so the caller drops it after it has released
//! the RNIC.

use std::any::Any;

/// Most things that wait to be dropped. Further ones are dropped at once.
const MAX_WAITING: usize = 4096;

/// Memory to be dropped without holding the RNIC.
#[derive(Default)]
pub struct Dropped(Vec<Box<dyn Any + Send>>);

impl Dropped {
    pub(crate) fn add(&mut self, memory: impl Any + Send) {
        if self.0.len() < MAX_WAITING {
            self.0.push(Box::new(memory));
        }
    }
}
