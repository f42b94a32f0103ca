//! Errors of system calls, with the step that failed.

use std::io;

/// Puts the step that failed before the error's text.
pub(crate) fn context<E: Into<io::Error>>(what: impl std::fmt::Display) -> impl FnOnce(E) -> io::Error {
    move |e| {
        let e = e.into();
        io::Error::new(e.kind(), format!("{what}: {e}"))
    }
}
