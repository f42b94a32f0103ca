//! Memory that the RNIC does not need any more. To unmap it takes the kernel long, so that is left to whoever has just given the RNIC back.

use std::any::Any;

/// Most things that wait. If nobody takes them, the next ones are dropped at once.
const MAX_WAITING: usize = 4096;

/// What is to be dropped without the RNIC.
#[derive(Default)]
pub struct Dropped(Vec<Box<dyn Any + Send>>);

impl Dropped {
    pub(crate) fn add(&mut self, memory: impl Any + Send) {
        if self.0.len() < MAX_WAITING {
            self.0.push(Box::new(memory));
        }
    }
}
