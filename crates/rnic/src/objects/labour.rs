//! Whether the copies of a vRNIC take longer than memory needs. The kernel maps the pages of a region when somebody reaches them for the first
//! time, which takes much longer than to copy them; a page of another kind may be slow as well.

/// After so many quick jobs without a slow one among them, copies are made in turns again. So a program that goes on reaching new pages has
/// at most one slow turn for each sixteen jobs.
const CALM_JOBS: u8 = 16;
/// A turn that took so long did not copy as fast as memory allows, nanoseconds.
pub(crate) const LONG_TURN_NS: u64 = 40_000;

/// How a vRNIC's copies went lately.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Labour {
    /// Quick jobs to come before its copies are made in turns again.
    left: u8,
}

impl Labour {
    /// True if its next long copies are left to careful jobs.
    #[inline]
    pub fn is_hard(self) -> bool {
        self.left > 0
    }

    /// A turn took [`LONG_TURN_NS`] or longer.
    pub fn begin(&mut self) {
        self.left = CALM_JOBS;
    }

    /// A job has copied so many bytes from mapping to mapping in so many nanoseconds. Below 1 GB/s it mapped pages, above 2 GB/s it did
    /// not; in between, or with 0 bytes, it says nothing.
    pub fn end_job(&mut self, bytes: u64, took_ns: u64) {
        if took_ns > bytes && bytes > 0 {
            self.begin();
        } else if took_ns < bytes / 2 {
            self.left = self.left.saturating_sub(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_over_after_many_quick_jobs_in_a_row() {
        let mut l = Labour::default();
        l.begin();
        let quick = |l: &mut Labour, n| (0..n).for_each(|_| l.end_job(8192, 2000));
        quick(&mut l, CALM_JOBS - 1);
        assert!(l.is_hard());
        // One that mapped pages, one that may have, and one that copied nothing.
        l.end_job(8192, 9000);
        l.end_job(8192, 6000);
        l.end_job(0, 1);
        quick(&mut l, CALM_JOBS - 1);
        assert!(l.is_hard());
        quick(&mut l, 1);
        assert!(!l.is_hard());
    }
}
