//! How many event channels there may be: each holds a descriptor of the host.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

#[derive(Debug)]
struct Count {
    used: AtomicUsize,
    limit: usize,
}

impl Count {
    fn new(limit: usize) -> Arc<Self> {
        Arc::new(Count { used: AtomicUsize::new(0), limit })
    }
}

/// One channel's share of a count.
struct Share(Arc<Count>);

impl Share {
    fn take(of: &Arc<Count>) -> Option<Self> {
        // Counted before it is checked, so that a refusal gives its own count back.
        let share = Share(of.clone());
        (of.used.fetch_add(1, Ordering::Relaxed) < of.limit).then_some(share)
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.0.used.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Counts the event channels of all sessions of one vRNIC, and those of the host.
#[derive(Clone, Debug)]
pub struct ChannelBudget {
    vrnic: Arc<Count>,
    host: Arc<Count>,
}

/// Leave to have one channel; given back when it is dropped.
pub struct ChannelTicket {
    _vrnic: Share,
    _host: Share,
}

impl ChannelBudget {
    /// A budget of a host that may open `descriptors` descriptors: half of them may be channels.
    pub fn of_host(descriptors: usize) -> Self {
        ChannelBudget { vrnic: Count::new(0), host: Count::new(descriptors / 2) }.for_vrnic()
    }

    /// A budget for another vRNIC of the same host: half of what all may have, and at most 65,536.
    #[must_use]
    pub fn for_vrnic(&self) -> Self {
        let limit = (self.host.limit / 2).min(unirdma_abi::MAX_CHANNELS as usize);
        ChannelBudget { vrnic: Count::new(limit), host: self.host.clone() }
    }

    /// Leave for one more channel; `None` if there are too many.
    pub fn take(&self) -> Option<ChannelTicket> {
        Some(ChannelTicket { _vrnic: Share::take(&self.vrnic)?, _host: Share::take(&self.host)? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vrnic_has_half_of_the_channels_and_all_have_the_rest() {
        let first = ChannelBudget::of_host(80);
        let (second, third) = (first.for_vrnic(), first.for_vrnic());
        let mut held: Vec<_> = (0..20).map(|_| first.take().unwrap()).collect();
        assert!(first.take().is_none());
        held.extend((0..20).map(|_| second.take().unwrap()));
        assert!(third.take().is_none(), "the host has no more");
        held.pop();
        // What was refused is counted nowhere.
        held.push(third.take().unwrap());
        assert!(third.take().is_none() && second.take().is_none());
        held.clear();
        assert_eq!((0..40).filter_map(|_| second.take()).count(), 40);
    }
}
