//! The configuration file of `unirdma host`: each key is an option of the command, so the command's own parser judges
//! the values. Options of the command line win over the environment, and that wins over the file.

use std::any::TypeId;
use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};

use clap::error::{ContextKind, ContextValue};
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command, Parser};
use toml::Spanned;
use toml::de::{DeTable, DeValue};

const HOST: &str = "host";
/// Options that say what to do with the file, so they are not in it.
const ABOUT_THE_FILE: [&str; 3] = ["config", "print-config", "help"];
const COLUMNS: usize = 100;

/// Why a configuration file is wrong.
#[derive(Debug, thiserror::Error)]
enum ConfigError {
    #[error("cannot read {}: {error}", .path.display())]
    File { path: PathBuf, error: io::Error },
    #[error("{at}: {text}")]
    Syntax { at: Place, text: String },
    #[error("{at}: there is no option `{key}`; `unirdma host --print-config` shows all")]
    Unknown { at: Place, key: String },
    #[error("{at}: `{key}` has to be {wanted}, not a value of the type {found}")]
    Type { at: Place, key: String, wanted: &'static str, found: &'static str },
}

/// A line of a file.
#[derive(Clone, Debug)]
struct Place {
    path: PathBuf,
    line: usize,
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}", self.path.display(), self.line)
    }
}

/// An option that the file gives.
#[derive(Debug)]
struct Given {
    key: String,
    at: Place,
    arguments: Vec<OsString>,
}

/// Parses the arguments of this process, and the options in the file that `host --config` names. Ends the process if
/// they are wrong, and after `host --print-config`.
pub(crate) fn parse<C: Parser>() -> C {
    let mut arguments: Vec<OsString> = std::env::args_os().collect();
    let given = match from_file(C::command(), &arguments) {
        Ok(given) => given,
        Err(e) => {
            eprintln!("unirdma: {e}");
            std::process::exit(2);
        }
    };
    arguments.extend(given.iter().flat_map(|g| g.arguments.clone()));
    let parsed = C::command().try_get_matches_from(arguments).and_then(|m| Ok((C::from_arg_matches(&m)?, m)));
    let (command, matches) = parsed.unwrap_or_else(|e| fail(&e, &given));
    if let Some(m) = matches.subcommand_matches(HOST).filter(|m| m.get_flag("print_config")) {
        print!("{}", text(&host_of(C::command()), m));
        std::process::exit(0);
    }
    command
}

/// Ends the process. If the file has what is wrong, the message begins with its place.
fn fail(error: &clap::Error, given: &[Given]) -> ! {
    let of_option = match error.get(ContextKind::InvalidArg) {
        Some(ContextValue::String(option)) => option.split([' ', '=', '[']).next(),
        _ => None,
    };
    match given.iter().find(|g| of_option.and_then(|o| o.strip_prefix("--")) == Some(&g.key)) {
        Some(g) => {
            let text = error.to_string();
            // Up to the hint to see `--help`.
            let lines: Vec<&str> = text.lines().take_while(|l| !l.is_empty()).map(str::trim).collect();
            eprintln!("unirdma: {}: {}", g.at, lines.join(" ").trim_start_matches("error: "));
            std::process::exit(2);
        }
        None => error.exit(),
    }
}

/// The command `host` with its own options and with the options of all commands.
fn host_of(mut all: Command) -> Command {
    all.build();
    all.find_subcommand(HOST).cloned().unwrap_or_default()
}

/// The options that the file of these arguments adds to them.
fn from_file(all: Command, arguments: &[OsString]) -> Result<Vec<Given>, ConfigError> {
    // An option that is missing here may be in the file.
    let Ok(matches) = all.clone().ignore_errors(true).try_get_matches_from(arguments) else { return Ok(Vec::new()) };
    let Some(matches) = matches.subcommand_matches(HOST) else { return Ok(Vec::new()) };
    let Some(path) = matches.get_one::<PathBuf>("config") else { return Ok(Vec::new()) };
    let text = std::fs::read_to_string(path).map_err(|error| ConfigError::File { path: path.clone(), error })?;
    let is_said = |a: &Arg| {
        let source = matches.value_source(a.get_id().as_str());
        matches!(source, Some(ValueSource::CommandLine | ValueSource::EnvVariable))
    };
    let given = read(&host_of(all), path, &text)?;
    Ok(given.into_iter().filter(|(arg, _)| !is_said(arg)).map(|(_, given)| given).collect())
}

/// The option of this name that a file may have.
fn option<'a>(host: &'a Command, key: &str) -> Option<&'a Arg> {
    options(host).find(|a| a.get_long() == Some(key))
}

/// The options that a file may have.
fn options(host: &Command) -> impl Iterator<Item = &Arg> {
    host.get_arguments().filter(|a| !a.is_hide_set() && a.get_long().is_some_and(|l| !ABOUT_THE_FILE.contains(&l)))
}

/// Reads a file.
fn read(host: &Command, path: &Path, text: &str) -> Result<Vec<(Arg, Given)>, ConfigError> {
    let place = |offset: usize| Place { path: path.into(), line: text[..offset].matches('\n').count() + 1 };
    let table = DeTable::parse(text).map_err(|e| {
        let at = place(e.span().map_or(0, |s| s.start));
        ConfigError::Syntax { at, text: e.message().lines().next().unwrap_or_default().into() }
    })?;
    let read = |(key, value): (&Spanned<_>, &Spanned<DeValue<'_>>)| {
        let at = place(key.span().start);
        let key: &std::borrow::Cow<'_, str> = key.get_ref();
        let Some(arg) = option(host, key) else { return Err(ConfigError::Unknown { at, key: key.to_string() }) };
        let wrong = |(wanted, found)| ConfigError::Type { at: at.clone(), key: key.to_string(), wanted, found };
        let arguments = arguments_of(arg, value.get_ref()).map_err(wrong)?;
        Ok((arg.clone(), Given { key: key.to_string(), at, arguments }))
    };
    table.get_ref().iter().map(read).collect()
}

/// The arguments that say the same as this value. On a wrong type, the wanted type and the found type.
fn arguments_of(arg: &Arg, value: &DeValue<'_>) -> Result<Vec<OsString>, (&'static str, &'static str)> {
    let kind = arg.get_value_parser().type_id();
    let takes_number = kind == TypeId::of::<u64>();
    let takes_text = kind == TypeId::of::<String>() || kind == TypeId::of::<PathBuf>();
    let takes_text = takes_text && arg.get_value_parser().possible_values().is_none();
    let is_list = matches!(arg.get_action(), ArgAction::Append);
    let is_flag = matches!(arg.get_action(), ArgAction::SetTrue);
    let may_be_flag = is_flag || arg.get_num_args().is_some_and(|n| n.min_values() == 0);
    let wanted = match () {
        () if is_flag => "true or false",
        () if may_be_flag => "true, false or a text in quotes",
        () if takes_number => "a whole number without quotes",
        () if is_list => "a list of texts in quotes",
        () if takes_text => "a text in quotes",
        () => "a text in quotes or a whole number",
    };
    let option = format!("--{}", arg.get_long().unwrap_or_default());
    let with = |text: &str| Ok(vec![OsString::from(format!("{option}={text}"))]);
    match value {
        DeValue::Boolean(true) if may_be_flag => Ok(vec![option.into()]),
        DeValue::Boolean(false) if may_be_flag => Ok(Vec::new()),
        DeValue::String(text) if !is_flag && !takes_number => with(text),
        DeValue::Integer(n) if !is_flag && !takes_text => with(&n.to_string()),
        DeValue::Array(all) if is_list => {
            let each = all.iter().map(|one| match one.get_ref() {
                DeValue::String(text) => with(text),
                other => Err((wanted, other.type_str())),
            });
            Ok(each.collect::<Result<Vec<_>, _>>()?.concat())
        }
        other => Err((wanted, other.type_str())),
    }
}

/// A file with all options: those that were given, and the others as comments.
fn text(host: &Command, matches: &ArgMatches) -> String {
    let mut out = "# The options of `unirdma host`, by their names (unirdma host --help). This is TOML.\n".to_string();
    for arg in options(host) {
        let (name, id) = (arg.get_long().unwrap_or_default(), arg.get_id().as_str());
        out += "\n";
        for line in wrap(&arg.get_help().map(ToString::to_string).unwrap_or_default()) {
            out += &format!("# {line}\n");
        }
        let values: Vec<String> = match matches.value_source(id) {
            Some(ValueSource::CommandLine) => raw(matches, id),
            _ => Vec::new(),
        };
        let is_list = matches!(arg.get_action(), ArgAction::Append);
        let shown = match values.as_slice() {
            [] => format!("# {name} = {}", example(arg)),
            all if is_list => format!("{name} = [{}]", all.iter().map(|v| quoted(v)).collect::<Vec<_>>().join(", ")),
            [value, ..] => format!("{name} = {}", typed(arg, value)),
        };
        out += &format!("{shown}\n");
    }
    out
}

fn raw(matches: &ArgMatches, id: &str) -> Vec<String> {
    let values = matches.get_raw(id).into_iter().flatten();
    values.map(|v| v.to_string_lossy().into_owned()).collect()
}

/// A value as the file has it.
fn typed(arg: &Arg, value: &str) -> String {
    let is_number = arg.get_value_parser().type_id() == TypeId::of::<u64>();
    if is_number || matches!(arg.get_action(), ArgAction::SetTrue) { value.into() } else { quoted(value) }
}

/// The value that a comment shows: the default, or the form of a value.
fn example(arg: &Arg) -> String {
    if matches!(arg.get_action(), ArgAction::SetTrue) {
        return "false".into();
    }
    if let Some(default) = arg.get_default_values().first() {
        return typed(arg, &default.to_string_lossy());
    }
    let form = quoted(arg.get_value_names().and_then(|n| n.first()).map_or("...", |n| n.as_str()));
    if matches!(arg.get_action(), ArgAction::Append) { format!("[{form}]") } else { form }
}

fn quoted(text: &str) -> String {
    toml::Value::from(text).to_string()
}

/// Lines of at most [`COLUMNS`], if no word is longer.
fn wrap(text: &str) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line) if line.len() + word.len() < COLUMNS => *line += &format!(" {word}"),
            _ => lines.push(word.into()),
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Args;

    fn host() -> Command {
        crate::host::HostArgs::augment_args(Command::new("host"))
    }

    fn printed(arguments: &[OsString]) -> String {
        let all = [&["host".into()], arguments].concat();
        text(&host(), &host().try_get_matches_from(all).unwrap())
    }

    #[test]
    fn what_is_printed_is_a_file_with_the_same_options() {
        let given = [
            "--address=10.0.0.1",
            "--address=fd00::1",
            "--peers=a \"file\"",
            "--spin-us=7",
            "--full-icrc",
            "--firewall",
            "--mtu=1024",
            "--pollers=1-4",
        ];
        let first = printed(&given.map(OsString::from));
        assert!(first.contains("\naddress = [\"10.0.0.1\", \"fd00::1\"]\n"), "{first}");
        assert!(first.contains("\nspin-us = 7\n") && first.contains("\nfull-icrc = true\n"), "{first}");
        let read = read(&host(), Path::new("a"), &first).unwrap();
        assert_eq!(read.len(), given.len() - 1);
        let again: Vec<OsString> = read.into_iter().flat_map(|(_, g)| g.arguments).collect();
        assert_eq!(printed(&again), first);
        // Without options there are comments only, and each of them has the type that the file wants.
        let nothing = printed(&[]);
        assert!(nothing.lines().all(|l| l.is_empty() || l.starts_with("# ")), "{nothing}");
        for line in nothing.lines().filter_map(|l| l.strip_prefix("# ")).filter(|l| l.contains(" = ")) {
            super::read(&host(), Path::new("a"), line).unwrap();
        }
    }

    #[test]
    fn a_number_may_be_a_whole_number_where_a_text_has_the_form_of_one() {
        let arguments = |line: &str| read(&host(), Path::new("a"), line).map(|all| all[0].1.arguments.clone());
        assert_eq!(arguments("pollers = 4").unwrap(), ["--pollers=4"]);
        assert_eq!(arguments("mtu = 4096").unwrap(), ["--mtu=4096"]);
        assert_eq!(arguments("firewall = false").unwrap(), [""; 0]);
        for wrong in ["peers = 4", "spin-us = \"7\"", "full-icrc = \"yes\"", "address = [1]", "user = [\"a\"]"] {
            assert!(matches!(arguments(wrong), Err(ConfigError::Type { .. })), "{wrong}");
        }
        assert!(matches!(arguments("seed = 1"), Err(ConfigError::Unknown { .. })));
    }
}
