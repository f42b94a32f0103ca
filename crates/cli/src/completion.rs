//! `unirdma completion`: completion of words in shells. The script that it prints makes the shell ask this program,
//! which knows all commands, and asks the virtual layer and the control centre for names.
//!
//! Nothing is printed but candidates: without a virtual layer, or if it takes longer than [`PATIENCE`], there are none.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use clap_complete::engine::{ArgValueCompleter, CompletionCandidate, PathCompleter, ValueCompleter};
use clap_complete::env::{Bash, CompleteEnv, EnvCompleter, Fish, Shells, Zsh};
use unirdma_supervisor::admin::Names;
use unirdma_supervisor::{Client, default_dir};

use crate::vrnics::{self, in_time};

pub(crate) const EXAMPLES: &str = "Examples:
  source <(unirdma completion bash)     in this bash; as a line of ~/.bashrc, in all that start from now on
  unirdma completion zsh > ~/.zfunc/_unirdma     a directory of zsh's fpath
  unirdma completion fish > ~/.config/fish/completions/unirdma.fish

Names of vRNICs and groups are those of the virtual layer that runs, and those of a fleet are asked from its control centre.";

/// The environment variable by which a shell asks for candidates.
const ASKED: &str = "UNIRDMA_COMPLETE";
/// Longest time for names.
const PATIENCE: Duration = Duration::from_millis(100);

#[derive(Args)]
pub(crate) struct CompletionArgs {
    /// The shell
    shell: Shell,
}

#[derive(Clone, Copy, ValueEnum)]
enum Shell {
    Bash,
    Zsh,
    Fish,
}

/// Kinds of candidates for an argument.
#[derive(Clone, Copy, Debug)]
enum What {
    /// vRNICs of the virtual layer.
    Vrnics,
    /// Groups of the virtual layer.
    Groups,
    /// A command and its arguments.
    Program,
    /// Objects of a fleet.
    #[cfg(feature = "fleet")]
    Fleet(crate::fleet::KindArg),
    /// Objects of a fleet whose kind was typed before.
    #[cfg(feature = "fleet")]
    OfKind,
}

/// Commands, and the arguments of which are names or programs.
const ARGUMENTS: &[(&str, &str, What)] = &[
    ("run", "vrnic", What::Vrnics),
    ("run", "command", What::Program),
    ("exec", "vrnic", What::Vrnics),
    ("exec", "command", What::Program),
    ("with", "command", What::Program),
    ("check", "vrnic", What::Vrnics),
    ("capture", "vrnic", What::Vrnics),
    ("vm run", "vrnic", What::Vrnics),
    ("vrnic add", "group", What::Groups),
    ("vrnic ls", "group", What::Groups),
    ("vrnic set", "name", What::Vrnics),
    ("vrnic show", "names", What::Vrnics),
    ("vrnic wait", "names", What::Vrnics),
    ("vrnic link", "name", What::Vrnics),
    ("vrnic ip add", "name", What::Vrnics),
    ("vrnic ip rm", "name", What::Vrnics),
    ("vrnic rm", "names", What::Vrnics),
    ("group set", "name", What::Groups),
    ("group set", "with", What::Groups),
    ("group rm", "name", What::Groups),
];

/// The same for commands about a fleet.
#[cfg(feature = "fleet")]
const OF_FLEET: &[(&str, &str, What)] = {
    use crate::fleet::KindArg::{Group, Host, Vrnic};
    &[
        ("vrnic move", "name", What::Fleet(Vrnic)),
        ("vrnic move", "host", What::Fleet(Host)),
        ("get", "name", What::OfKind),
        ("get", "group", What::Fleet(Group)),
        ("get", "host", What::Fleet(Host)),
        ("delete", "names", What::OfKind),
        ("watch", "group", What::Fleet(Group)),
        ("token create", "group", What::Fleet(Group)),
        ("token create", "host", What::Fleet(Host)),
        ("secret rotate", "group", What::Fleet(Group)),
    ]
};
#[cfg(not(feature = "fleet"))]
const OF_FLEET: &[(&str, &str, What)] = &[];

/// The words of the command line that is completed.
fn words() -> impl Iterator<Item = String> {
    let all = std::env::args_os().skip_while(|word| word != "--").skip(1);
    all.map(|word| word.to_string_lossy().into_owned())
}

/// The value of an option among these words, as `--dir DIR` or `--dir=DIR`, of which bash makes three words.
fn given(option: &str, words: impl Iterator<Item = String>) -> Option<String> {
    let mut words = words.take_while(|word| word != "--");
    while let Some(word) = words.next() {
        match word.strip_prefix(option) {
            Some("") => return words.find(|value| value != "="),
            Some(value) if value.starts_with('=') => return Some(value[1..].into()),
            _ => {}
        }
    }
    None
}

/// The names of the virtual layer.
fn names() -> io::Result<Names> {
    let dir = given("--dir", words()).map(PathBuf::from);
    let dir = dir.or_else(|| std::env::var_os("UNIRDMA_HOST_DIR").map(PathBuf::from)).unwrap_or_else(default_dir);
    vrnics::all_names(&mut Client::connect(&dir)?)
}

/// The programs in the directories of PATH whose names begin with this.
fn programs(begin: &str) -> BTreeSet<String> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let entries = std::env::split_paths(&path).filter_map(|dir| std::fs::read_dir(dir).ok()).flatten().flatten();
    let named = entries.filter_map(|e| Some((e.file_name().into_string().ok()?, e.path())));
    let begun = named.filter(|(name, _)| name.starts_with(begin));
    let is_program =
        |path: PathBuf| std::fs::metadata(path).is_ok_and(|m| m.is_file() && m.permissions().mode() & 0o111 != 0);
    begun.filter(|(_, path)| is_program(path.clone())).map(|(name, _)| name).collect()
}

/// How many words of a program and its arguments there are, after `--`; 0 if it is not known where they begin.
fn words_of_program() -> usize {
    words().skip_while(|word| word != "--").skip(1).count()
}

impl What {
    /// The names that could stand there.
    fn names(self, begin: &str) -> io::Result<Vec<String>> {
        match self {
            What::Vrnics => Ok(names()?.vrnics),
            What::Groups => Ok(names()?.groups),
            What::Program if words_of_program() > 1 => Ok(Vec::new()),
            What::Program => Ok(programs(begin).into_iter().collect()),
            #[cfg(feature = "fleet")]
            What::Fleet(kind) => crate::fleet::names(kind, given("--centre", words())),
            #[cfg(feature = "fleet")]
            What::OfKind => {
                let kind = words().find_map(|word| crate::fleet::KindArg::from_str(&word, false).ok());
                kind.map_or(Ok(Vec::new()), |kind| What::Fleet(kind).names(begin))
            }
        }
    }
}

impl ValueCompleter for What {
    fn complete(&self, current: &OsStr) -> Vec<CompletionCandidate> {
        let (what, begin) = (*self, current.to_string_lossy().into_owned());
        let is_path = matches!(what, What::Program) && (words_of_program() != 1 || begin.contains('/'));
        let mut candidates = if is_path { PathCompleter::any().complete(current) } else { Vec::new() };
        let of = begin.clone();
        let names = in_time(PATIENCE, move || what.names(&of)).and_then(Result::ok).unwrap_or_default();
        let begun = names.into_iter().filter(|name| name.starts_with(&begin));
        candidates.extend(begun.map(CompletionCandidate::new));
        candidates
    }
}

/// Gives an argument of a command its candidates.
fn completed(command: clap::Command, path: &[&str], argument: &'static str, what: What) -> clap::Command {
    match path {
        // Not `mut_arg`, which puts the argument behind the others.
        [] => command.mut_args(|arg| match arg.get_id() == argument {
            true => arg.add(ArgValueCompleter::new(what)),
            false => arg,
        }),
        [first, rest @ ..] => command.mut_subcommand(*first, |c| completed(c, rest, argument, what)),
    }
}

/// The commands, whose arguments have candidates.
fn with_candidates(mut command: clap::Command) -> clap::Command {
    for &(path, argument, what) in ARGUMENTS.iter().chain(OF_FLEET) {
        command = completed(command, &path.split(' ').collect::<Vec<_>>(), argument, what);
    }
    command
}

/// Answers a shell that asks for candidates, and ends this process then.
pub(crate) fn answer(commands: fn() -> clap::Command) {
    CompleteEnv::with_factory(|| with_candidates(commands()))
        .var(ASKED)
        .shells(Shells(&[&Bash, &Zsh, &Fish]))
        .complete();
}

/// Prints the script for a shell.
pub(crate) fn print(args: &CompletionArgs) -> io::Result<()> {
    let shell: &dyn EnvCompleter = match args.shell {
        Shell::Bash => &Bash,
        Shell::Zsh => &Zsh,
        Shell::Fish => &Fish,
    };
    shell.write_registration(ASKED, "unirdma", "unirdma", "unirdma", &mut io::stdout())
}

/// Of each named argument: whether the commands have it.
#[cfg(test)]
pub(crate) fn known(commands: &clap::Command) -> Vec<(String, bool)> {
    let find = |path: &str, argument: &str| {
        let command = path.split(' ').try_fold(commands, |c, name| c.find_subcommand(name))?;
        command.get_arguments().find(|a| a.get_id() == argument)
    };
    let all = ARGUMENTS.iter().chain(OF_FLEET);
    all.map(|(path, argument, _)| (format!("{path}: {argument}"), find(path, argument).is_some())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_found_among_the_words() {
        let dir = |line: &str| given("--dir", line.split(' ').map(String::from));
        assert_eq!(dir("unirdma --dir /x vrnic show"), Some("/x".into()));
        assert_eq!(dir("unirdma vrnic show --dir=/x"), Some("/x".into()));
        assert_eq!(dir("unirdma vrnic show --dir = /x"), Some("/x".into()));
        assert_eq!(dir("unirdma vrnic show"), None);
        assert_eq!(dir("unirdma run --directory /x -- ls --dir /y"), None);
        assert_eq!(dir("unirdma --dir"), None);
    }

    #[test]
    fn programs_are_found_by_their_beginning() {
        assert!(programs("sh").contains("sh") && programs("no-such-progra").is_empty());
    }
}
