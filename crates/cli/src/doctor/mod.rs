//! `unirdma doctor`: whether this machine has what uniRDMA needs, with a remedy for what it lacks. `unirdma check` asks
//! the same about programs.
//!
//! A right that this user lacks makes a finding, never an error of the command.

mod machine;
mod network;
mod software;

use std::io;
use std::path::Path;

use anstyle::AnsiColor;
use clap::Args;
use serde::Serialize;

use crate::print::{self, coloured, table};

pub(crate) const EXAMPLES: &str = "Examples:
  unirdma doctor
  sudo unirdma doctor                    also what only root can see: the firewall, other users' ports
  unirdma doctor --json | jq '.[] | select(.level != \"ok\")'

A warning is about something that costs speed, or that only some uses need. An error keeps uniRDMA from working.

Exit code: 0 if there is no error, 3 if there is one.";

/// Exit code if there is an error.
const ERROR: u8 = 3;

#[derive(Args)]
pub(crate) struct DoctorArgs {
    /// Print JSON instead of a table
    #[arg(long)]
    json: bool,
}

/// How bad a fact is.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
enum Level {
    Ok,
    Warning,
    Error,
}

/// A fact about this machine.
#[derive(Debug, PartialEq, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct Finding {
    /// How bad it is.
    level: Level,
    /// The thing that was looked at.
    topic: &'static str,
    /// The fact in words.
    fact: String,
    /// The thing to do; null if nothing is to be done.
    remedy: Option<String>,
}

impl Finding {
    fn ok(topic: &'static str, fact: impl Into<String>) -> Finding {
        Finding { level: Level::Ok, topic, fact: fact.into(), remedy: None }
    }

    fn warning(topic: &'static str, fact: impl Into<String>, remedy: impl Into<String>) -> Finding {
        Finding { level: Level::Warning, topic, fact: fact.into(), remedy: Some(remedy.into()) }
    }

    fn error(topic: &'static str, fact: impl Into<String>, remedy: impl Into<String>) -> Finding {
        Finding { level: Level::Error, ..Finding::warning(topic, fact, remedy) }
    }

    fn row(&self) -> Vec<String> {
        let (colour, level) = match self.level {
            Level::Ok => (AnsiColor::Green, "ok"),
            Level::Warning => (AnsiColor::Yellow, "warning"),
            Level::Error => (AnsiColor::Red, "error"),
        };
        let remedy = self.remedy.as_ref().map(|r| format!("; {r}")).unwrap_or_default();
        vec![coloured(colour, level), self.topic.into(), format!("{}{remedy}", self.fact)]
    }
}

pub(crate) fn doctor(dir: &Path, args: &DoctorArgs) -> io::Result<u8> {
    // The machine comes first: it forks, which a process with several threads must not do.
    let mut all = machine::look();
    all.extend(network::look());
    all.extend(software::look(dir));
    let text = if args.json {
        serde_json::to_string_pretty(&all)?
    } else {
        table(&all.iter().map(Finding::row).collect::<Vec<_>>())
    };
    print::line(&text)?;
    Ok(if all.iter().any(|f| f.level == Level::Error) { ERROR } else { 0 })
}
