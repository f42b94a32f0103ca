//! The text format of Prometheus, version 0.0.4, for the pages of hosts and of the control centre. The crate writes
//! text: it has no registry, no socket and no clock, and depends on nothing.

use std::fmt::{self, Write};

/// The `Content-Type` of a page.
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// The kind of a figure, as Prometheus distinguishes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// It only grows, until the program that counts is restarted.
    Counter,
    /// It goes up and down.
    Gauge,
}

impl Kind {
    /// Its word in a page.
    pub fn word(self) -> &'static str {
        match self {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
        }
    }
}

/// The value of a figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Value {
    /// A number.
    N(u64),
    /// Nanoseconds, written as seconds.
    Ns(u64),
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Value::N(n) => write!(f, "{n}"),
            Value::Ns(ns) => write!(f, "{}.{:09}", ns / 1_000_000_000, ns % 1_000_000_000),
        }
    }
}

/// The value of a label, escaped.
struct Escaped<'a>(&'a str);

impl fmt::Display for Escaped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for c in self.0.chars() {
            match c {
                '\\' => f.write_str("\\\\")?,
                '"' => f.write_str("\\\"")?,
                '\n' => f.write_str("\\n")?,
                c => f.write_char(c)?,
            }
        }
        Ok(())
    }
}

/// A page that is being written. Writing to a `String` does not fail.
#[derive(Debug, Default)]
pub struct Writer(String);

impl Writer {
    /// Begins a family: its name, its kind, and its description, which is a sentence.
    pub fn head(&mut self, name: &str, kind: &str, help: &str) {
        let _ = writeln!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    /// Writes a figure of the last family. Labels with an empty name are skipped.
    pub fn line(&mut self, name: &str, labels: &[(&str, &str)], value: Value) {
        self.0.push_str(name);
        let mut before = '{';
        for (label, word) in labels.iter().filter(|l| !l.0.is_empty()) {
            let _ = write!(self.0, "{before}{label}=\"{}\"", Escaped(word));
            before = ',';
        }
        if before == ',' {
            self.0.push('}');
        }
        let _ = writeln!(self.0, " {value}");
    }

    /// A family with one figure.
    pub fn one(&mut self, name: &str, kind: Kind, help: &str, value: u64) {
        self.head(name, kind.word(), help);
        self.line(name, &[], Value::N(value));
    }

    /// The page.
    pub fn finish(self) -> String {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_label_ends_where_it_ends() {
        let mut w = Writer::default();
        w.line("x", &[("a", "q\"\\\n{}"), ("", "left out")], Value::N(1));
        w.line("y", &[], Value::Ns(1_500_000_001));
        assert_eq!(w.finish(), "x{a=\"q\\\"\\\\\\n{}\"} 1\ny 1.500000001\n");
    }
}
