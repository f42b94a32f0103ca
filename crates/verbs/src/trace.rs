//! `UNIRDMA_TRACE=1`: prints each call to standard error.

use std::sync::atomic::{AtomicU8, Ordering};

static STATE: AtomicU8 = AtomicU8::new(0);

/// True if calls are to be printed. One relaxed load after the first call.
#[inline]
pub(crate) fn on() -> bool {
    match STATE.load(Ordering::Relaxed) {
        0 => {
            let on = std::env::var_os("UNIRDMA_TRACE").is_some_and(|v| !v.is_empty() && v != "0");
            STATE.store(if on { 2 } else { 1 }, Ordering::Relaxed);
            on
        }
        s => s == 2,
    }
}

/// Prints a line if tracing is on.
macro_rules! trace {
    ($($arg:tt)*) => {
        if $crate::trace::on() {
            use std::io::Write as _;
            let _ = writeln!(std::io::stderr(), "[unirdma {}] {}", std::process::id(), format_args!($($arg)*));
        }
    };
}
pub(crate) use trace;
