//! `unirdma vrnic wait`: waits until vRNICs are in a state, for scripts.
//!
//! The administration socket does not report changes, so the states are asked for every [`PAUSE`].

use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use clap::Args;
use serde::Serialize;
use unirdma_ipc::vrnic::VrnicInfo;
use unirdma_supervisor::Client;
use unirdma_supervisor::admin::Request;

use crate::print;
use crate::units;
use crate::vrnics;

pub(crate) const EXAMPLES: &str = "Examples:
  unirdma vrnic wait a                        until it exists
  unirdma vrnic wait a --container            until `unirdma exec --vrnic a` can run a command
  unirdma vrnic wait a b --listening          until programs on both listen for RDMA connections
  unirdma vrnic wait a --free --timeout 2m    until nothing uses it
  unirdma vrnic wait a --gone --timeout none

Of several states all must hold, for each of the vRNICs. A vRNIC that does not exist yet is waited for, and so is a virtual layer that
is started again meanwhile.

Exit code: 0 if the states hold, 3 if they did not in time, 1 if no virtual layer answers.";

/// Exit code if the time is over.
const NOT_IN_TIME: u8 = 3;
/// Time from one question to the next.
const PAUSE: Duration = Duration::from_millis(100);

#[derive(Args)]
pub(crate) struct WaitArgs {
    /// Names of the vRNICs
    #[arg(required = true, value_name = "NAME")]
    names: Vec<String>,
    #[command(flatten)]
    states: States,
    /// Longest time to wait: seconds, or a time with ms, s or m, up to 1h; 0 asks once; `none` waits for ever
    #[arg(long, value_name = "TIME", default_value = "30", value_parser = units::timeout)]
    timeout: Duration,
    /// Print the states as JSON, also if the time is over
    #[arg(long)]
    json: bool,
}

/// The states to wait for.
#[derive(Args, Default)]
struct States {
    /// A container holds its network interface
    #[arg(long)]
    attached: bool,
    /// It has a container whose first process runs, so that `unirdma exec` works
    #[arg(long)]
    container: bool,
    /// A program or a virtual machine has opened it
    #[arg(long)]
    open: bool,
    /// A program listens on it for RDMA connections (rdma_cm)
    #[arg(long)]
    listening: bool,
    /// Nothing uses it: no container, and no program
    #[arg(long, conflicts_with_all = ["attached", "container", "open", "listening"])]
    free: bool,
    /// Its link is up
    #[arg(long)]
    up: bool,
    /// Its link is down
    #[arg(long, conflicts_with = "up")]
    down: bool,
    /// It does not exist any more
    #[arg(long, conflicts_with_all = ["attached", "container", "open", "listening", "free", "up", "down"])]
    gone: bool,
}

/// The states of a vRNIC. All are false if it does not exist.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct Now {
    /// It exists.
    exists: bool,
    /// Its link is up.
    up: bool,
    /// A container holds its network interface.
    attached: bool,
    /// It has a container whose first process is known.
    container: bool,
    /// A program or a virtual machine has opened it.
    open: bool,
    /// A program listens on it for RDMA connections.
    listening: bool,
    /// Nothing uses it.
    free: bool,
}

impl Now {
    fn of(v: &VrnicInfo) -> Now {
        let (attached, container, open) = (v.attached, v.container.is_some(), v.sessions > 0);
        Now {
            exists: true,
            up: v.up,
            attached,
            container,
            open,
            listening: !v.listeners.is_empty(),
            free: !(attached || container || open),
        }
    }

    /// The reasons, in words, why it is not in these states; empty if it is.
    fn lacks(&self, wanted: &States) -> Vec<&'static str> {
        if wanted.gone {
            return if self.exists { vec!["it still exists"] } else { Vec::new() };
        }
        if !self.exists {
            return vec!["it does not exist; `unirdma vrnic ls` lists those that do"];
        }
        let all = [
            (wanted.attached, self.attached, "no container holds its interface"),
            (wanted.container, self.container, "it has no container"),
            (wanted.open, self.open, "no program has opened it"),
            (wanted.listening, self.listening, "no program listens on it"),
            (wanted.free, self.free, "it is in use"),
            (wanted.up, self.up, "its link is down"),
            (wanted.down, !self.up, "its link is up"),
        ];
        all.into_iter().filter(|(wanted, is, _)| *wanted && !is).map(|(.., text)| text).collect()
    }
}

/// A vRNIC that was waited for.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct Seen {
    /// Its name.
    name: String,
    /// The states hold that were asked for.
    reached: bool,
    #[serde(flatten)]
    now: Now,
    /// The reasons, in words, why they do not.
    lacks: Vec<String>,
}

/// Asks for the states of all vRNICs.
///
/// # Errors
/// The virtual layer does not answer.
fn look(client: &mut Client, args: &WaitArgs) -> io::Result<Vec<Seen>> {
    let known = vrnics::names(client)?;
    // Listeners are a part of the longer answer, which grows by what the vRNIC's programs do.
    let whole = args.states.listening || args.json;
    let mut all = Vec::new();
    for name in &args.names {
        let request = |name: String| if whole { Request::VrnicShow { name } } else { Request::VrnicFigures { name } };
        let told = known.contains(name).then(|| vrnics::ask(client, &request(name.clone()))).transpose();
        let (now, lacks) = match told {
            Ok(v) => {
                let now = v.as_ref().map(Now::of).unwrap_or_default();
                (now, now.lacks(&args.states).into_iter().map(String::from).collect())
            }
            Err(e) if vrnics::has_ended(&e) => return Err(e),
            // It was removed meanwhile, or its worker does not answer.
            Err(e) => (Now { exists: true, ..Now::default() }, vec![e.to_string()]),
        };
        all.push(Seen { name: name.clone(), reached: lacks.is_empty(), now, lacks });
    }
    Ok(all)
}

pub(crate) fn wait(dir: &Path, args: &WaitArgs) -> io::Result<u8> {
    let end = Instant::now().checked_add(args.timeout);
    let mut connection = Ok(Client::connect(dir)?);
    loop {
        let seen = connection.and_then(|mut client| Ok((look(&mut client, args)?, client)));
        let left = end.map_or(PAUSE, |end| end.saturating_duration_since(Instant::now()));
        let reached = seen.as_ref().is_ok_and(|(all, _)| all.iter().all(|v| v.reached));
        if reached || left.is_zero() {
            return told(&seen?.0, args).map(|()| if reached { 0 } else { NOT_IN_TIME });
        }
        std::thread::sleep(left.min(PAUSE));
        connection = seen.map(|(_, client)| client).or_else(|_| Client::connect(dir));
    }
}

/// Prints how it ended.
fn told(all: &[Seen], args: &WaitArgs) -> io::Result<()> {
    for v in all.iter().filter(|v| !v.reached) {
        eprintln!("unirdma: vRNIC {}, after {:?}: {}", v.name, args.timeout, v.lacks.join(", "));
    }
    if args.json { print::line(&serde_json::to_string_pretty(all)?) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lacks(v: &VrnicInfo, states: &[&str]) -> usize {
        #[derive(clap::Parser)]
        struct Line {
            #[command(flatten)]
            wait: WaitArgs,
        }
        let line = ["wait", "a"].iter().copied().chain(states.iter().copied());
        let line = <Line as clap::Parser>::try_parse_from(line).unwrap();
        Now::of(v).lacks(&line.wait.states).len()
    }

    #[test]
    fn each_state_is_what_the_virtual_layer_says() {
        let mut v = VrnicInfo { up: true, ..VrnicInfo::default() };
        assert_eq!((lacks(&v, &[]), lacks(&v, &["--free", "--up"]), lacks(&v, &["--down"])), (0, 0, 1));
        assert_eq!(lacks(&v, &["--attached", "--container", "--open", "--listening"]), 4);
        assert_eq!(lacks(&v, &["--gone"]), 1);
        v.container = Some(7);
        assert_eq!((lacks(&v, &["--container"]), lacks(&v, &["--attached"]), lacks(&v, &["--free"])), (0, 1, 1));
        v.attached = true;
        v.sessions = 1;
        v.listeners = vec!["TCP 0.0.0.0:7174".into()];
        assert_eq!(lacks(&v, &["--attached", "--container", "--open", "--listening", "--up"]), 0);
        assert_eq!(Now::default().lacks(&States { free: true, ..States::default() }).len(), 1);
        assert!(Now::default().lacks(&States { gone: true, ..States::default() }).is_empty());
    }
}
