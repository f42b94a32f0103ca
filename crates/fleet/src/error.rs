//! Why a call is refused.

use std::fmt;

/// What kind of refusal it is. Each has a code of gRPC and of HTTP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// What was asked for cannot be.
    Invalid,
    /// It names something that does not exist.
    NotFound,
    /// It contradicts what exists.
    Conflict,
    /// Something was changed since the caller looked.
    Stale,
    /// The caller is not known.
    Unknown,
    /// The caller may not.
    Denied,
    /// There is no room for more.
    Full,
    /// The centre cannot change anything at the moment.
    Unavailable,
}

/// A call that is refused: nothing was changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what}")]
pub struct Refusal {
    /// What kind of refusal it is.
    pub kind: Kind,
    /// One line that says what is wrong and what to do.
    pub what: String,
}

/// Most characters of a line: callers may be quoted in it.
const MAX_LINE: usize = 500;

/// One line of a text.
fn line(text: &dyn fmt::Display) -> String {
    text.to_string().chars().map(|c| if c.is_control() { ' ' } else { c }).take(MAX_LINE).collect()
}

/// Shorthands that make a refusal of a line.
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

    /// The same with more said before it.
    pub fn within(self, place: impl fmt::Display) -> Refusal {
        Refusal { kind: self.kind, what: line(&format_args!("{place}: {}", self.what)) }
    }
}

/// What an error comes from: the network or TLS has said it, and the errors around it say less.
pub fn root_cause(e: &dyn std::error::Error) -> String {
    e.source().map_or_else(|| e.to_string(), root_cause)
}

/// What the other end of a call has said, or what happened on the way, in one line.
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
