//! Refusals of calls.

use std::fmt;

/// The kind of a refusal. Each kind has a gRPC code and an HTTP status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The request is not valid.
    Invalid,
    /// It names an object that does not exist.
    NotFound,
    /// It contradicts existing objects.
    Conflict,
    /// An object was changed since the caller read it.
    Stale,
    /// The caller is not known.
    Unknown,
    /// The caller lacks the right.
    Denied,
    /// A limit is reached.
    Full,
    /// The centre cannot change anything at the moment.
    Unavailable,
}

/// The refusal of a call. Nothing was changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what}")]
pub struct Refusal {
    /// Its kind.
    pub kind: Kind,
    /// One line that says what is wrong and what to do.
    pub what: String,
}

/// Most characters of the line, which may quote the caller.
const MAX_LINE: usize = 500;

/// Converts a text to one line.
fn line(text: &dyn fmt::Display) -> String {
    text.to_string().chars().map(|c| if c.is_control() { ' ' } else { c }).take(MAX_LINE).collect()
}

/// Constructors of refusals, by kind.
macro_rules! refusals {
    ($($name:ident $kind:ident)*) => { $(
        #[doc = concat!("A refusal of the kind [`Kind::", stringify!($kind), "`].")]
        pub fn $name(what: impl fmt::Display) -> Refusal {
            Refusal { kind: Kind::$kind, what: line(&what) }
        }
    )* };
}

impl Refusal {
    refusals! { invalid Invalid not_found NotFound conflict Conflict stale Stale unknown Unknown denied Denied full Full unavailable Unavailable }

    /// The same refusal, with its place in front.
    pub fn within(self, place: impl fmt::Display) -> Refusal {
        Refusal { kind: self.kind, what: line(&format_args!("{place}: {}", self.what)) }
    }
}

/// The innermost cause of an error. It comes from the network or TLS; the errors around it say less.
pub fn root_cause(e: &dyn std::error::Error) -> String {
    e.source().map_or_else(|| e.to_string(), root_cause)
}

/// The message of a failed call in one line: from the other end, or from the transport.
#[cfg(any(feature = "client", feature = "server"))]
pub fn said(status: &tonic::Status) -> String {
    let text = match std::error::Error::source(status) {
        Some(e) => root_cause(e),
        None if status.message().is_empty() => status.code().description().into(),
        None => status.message().into(),
    };
    text.lines().next().unwrap_or_default().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_is_one_line_whatever_it_quotes() {
        let e = Refusal::invalid(format_args!("`{}` is no name", "a\n\0b")).within("x\r");
        assert_eq!(e.what, "x : `a  b` is no name");
        assert_eq!(Refusal::invalid("é".repeat(1_000)).what.chars().count(), MAX_LINE);
    }
}
