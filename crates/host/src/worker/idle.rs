//! Kicks for nothing: a program may notify the worker without a pause although there is nothing to do. Each notification wakes the
//! control thread, which then finds nothing, and the core that it uses is missing elsewhere.

use std::time::Duration;

/// Kicks for nothing are counted for so long, nanoseconds.
const WINDOW_NS: u64 = 10_000_000;
/// So many of them are nothing unusual: a queue that is looked at without a kick may be kicked at that moment.
const USUAL: u32 = 100;
/// How long the control thread rests when there are more, before it looks who has kicked. Kicks that come meanwhile are taken together.
const REST: Duration = Duration::from_micros(200);

/// How many kicks for nothing there were lately.
#[derive(Default)]
pub(super) struct IdleKicks {
    since_ns: u64,
    kicks: u32,
}

impl IdleKicks {
    /// A kick for nothing has come.
    pub fn note(&mut self, now: u64) {
        if now.saturating_sub(self.since_ns) >= WINDOW_NS {
            *self = IdleKicks { since_ns: now, kicks: 0 };
        }
        self.kicks = self.kicks.saturating_add(1);
    }

    /// How long the control thread is to rest before it looks at kicks again.
    pub fn rest(&self, now: u64) -> Option<Duration> {
        (self.kicks > USUAL && now.saturating_sub(self.since_ns) < WINDOW_NS).then_some(REST)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_kicks_for_nothing_are_taken_together_and_a_few_are_not() {
        let mut k = IdleKicks::default();
        (0..USUAL).for_each(|i| k.note(WINDOW_NS + u64::from(i)));
        assert_eq!(k.rest(WINDOW_NS + 200), None);
        k.note(WINDOW_NS + 200);
        assert_eq!(k.rest(WINDOW_NS + 201), Some(REST));
        assert_eq!(k.rest(2 * WINDOW_NS), None, "commands are not delayed for long after it");
        k.note(3 * WINDOW_NS);
        assert_eq!(k.rest(3 * WINDOW_NS), None);
    }
}
