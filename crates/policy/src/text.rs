//! Rules as text: `allow from group:red to vrnic:blue/10.0.0.2 both priority 100`.

use std::fmt;
use std::str::FromStr;

use crate::{Action, Rule, Selector};

/// Why the text of a rule is wrong, in one line that says how to write it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParseError(String);

impl fmt::Display for ParseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for ParseError {}

impl fmt::Display for Selector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Selector::Group(g) => write!(f, "group:{g}"),
            Selector::Vrnic(g, a) => write!(f, "vrnic:{g}/{a}"),
        }
    }
}

impl FromStr for Selector {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        let wrong = || {
            ParseError(format!(
                "`{text}` selects nobody; write `group:NAME` or `vrnic:GROUP/ADDRESS`, as `vrnic:blue/10.0.0.2`"
            ))
        };
        let found = match text.split_once(':').ok_or_else(wrong)? {
            ("group", name) if !name.is_empty() && !name.contains('/') => Selector::Group(name.into()),
            ("vrnic", named) => {
                let (group, address) = named.split_once('/').filter(|(g, _)| !g.is_empty()).ok_or_else(wrong)?;
                let address = address.parse();
                Selector::Vrnic(group.into(), address.map_err(|_| wrong())?)
            }
            _ => return Err(wrong()),
        };
        Ok(found)
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if *self == Action::Allow { "allow" } else { "deny" })
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let both = if self.both { " both" } else { "" };
        write!(f, "{} from {} to {}{both} priority {}", self.action, self.from, self.to, self.priority)
    }
}

impl FromStr for Rule {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        let words: Vec<&str> = text.split_whitespace().collect();
        let form = || {
            let form = "`allow|deny from SELECTOR to SELECTOR [both] [priority NUMBER]`";
            ParseError(format!("a rule reads {form}, as `allow from group:red to group:blue both`"))
        };
        let (action, from, to, rest) = match words[..] {
            ["allow", "from", from, "to", to, ref rest @ ..] => (Action::Allow, from, to, rest),
            ["deny", "from", from, "to", to, ref rest @ ..] => (Action::Deny, from, to, rest),
            _ => return Err(form()),
        };
        let (both, rest) = match rest {
            ["both", rest @ ..] => (true, rest),
            rest => (false, rest),
        };
        let priority = match rest {
            [] => 0,
            ["priority", number] => number.parse().map_err(|_| {
                ParseError(format!("`{number}` is no priority: those are the numbers from 0 to {}", u16::MAX))
            })?,
            _ => return Err(form()),
        };
        Ok(Rule { from: from.parse()?, to: to.parse()?, action, both, priority })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_again() {
        for text in [
            "allow from group:red to group:blue priority 0",
            "deny from vrnic:red/10.0.0.1 to vrnic:blue/fd00::2 both priority 65535",
        ] {
            assert_eq!(text.parse::<Rule>().unwrap().to_string(), text);
        }
        let short: Rule = "  allow from group:red   to group:blue both".parse().unwrap();
        assert_eq!((short.both, short.priority), (true, 0));
    }

    #[test]
    fn a_wrong_rule_says_what_to_write() {
        for (text, what) in [
            ("", "a rule reads"),
            ("allow group:red group:blue", "a rule reads"),
            ("permit from group:red to group:blue", "a rule reads"),
            ("allow from group:red to group:blue twice", "a rule reads"),
            ("allow from group:red to group:blue priority", "a rule reads"),
            ("allow from group:red to group:blue priority 65536", "`65536` is no priority"),
            ("allow from group:red to group:blue priority -1", "`-1` is no priority"),
            ("allow from red to group:blue", "`red` selects nobody"),
            ("allow from group: to group:blue", "`group:` selects nobody"),
            ("allow from vrnic:red to group:blue", "`vrnic:red` selects nobody"),
            ("allow from vrnic:red/x to group:blue", "`vrnic:red/x` selects nobody"),
            ("allow from vrnic:/10.0.0.1 to group:blue", "selects nobody"),
        ] {
            let e = text.parse::<Rule>().unwrap_err().to_string();
            assert!(e.contains(what), "{text}: {e}");
        }
    }
}
