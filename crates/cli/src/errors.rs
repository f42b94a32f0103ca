//! Errors of system calls, with the step that failed.

use std::io;

/// Puts the step that failed before the error's text.
pub(crate) fn context<E: Into<io::Error>>(what: impl std::fmt::Display) -> impl FnOnce(E) -> io::Error {
    move |e| {
        let e = e.into();
        io::Error::new(e.kind(), format!("{what}: {e}"))
    }
}

/// A text without the numbers that the standard library puts after the texts of system calls' errors.
pub(crate) fn plain(text: &str) -> String {
    const NUMBER: &str = " (os error ";
    let mut parts = text.split(NUMBER);
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |text, part| match part.split_once(')') {
        Some((number, rest)) if number.bytes().all(|b| b.is_ascii_digit()) => text + rest,
        _ => text + NUMBER + part,
    })
}

#[cfg(test)]
mod tests {
    use super::plain;

    #[test]
    fn numbers_of_errors_are_left_out() {
        let e = std::io::Error::from_raw_os_error(2);
        assert_eq!(
            plain(&format!("a: {e}, b: {e}; c")),
            "a: No such file or directory, b: No such file or directory; c"
        );
        assert_eq!(plain("(os error 2"), "(os error 2");
        assert_eq!(plain("x (os error two) y"), "x (os error two) y");
    }
}
