//! `unirdma check`: whether programs use RDMA. For each process of a container it says which libibverbs it has, and for
//! the vRNIC how much went by RDMA and by `eth0`, and how the memory of MRs is reached.
//!
//! Inside of a container, where the virtual layer cannot be asked, the same comes from `/proc` and `/sys`.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use clap::Args;
use serde::Serialize;
use unirdma_ipc::vrnic::VrnicInfo;
use unirdma_rnic::MrNote;
use unirdma_supervisor::Client;

use crate::container;
use crate::loader::PRELOAD;
use crate::mounts::VRNIC;
use crate::print::{self, bytes, table};

pub(crate) const EXAMPLES: &str = "Examples:
  unirdma check                   all containers of this host; in a container: this one
  unirdma check --vrnic a         the container of a
  unirdma check 4711              one process
  unirdma check --json | jq '.[].processes[] | select(.served == false)'

A process is served if it has no libibverbs, or if its calls go to uniRDMA's.

Exit code: 0 if all processes are served, 3 if one is not, 1 if nothing could be checked.";

/// Exit code if a process is not served.
const NOT_SERVED: u8 = 3;
/// Our library has this text, and no other libibverbs does.
const MARK: &[u8] = b"unirdma_answer_netlink";

#[derive(Args)]
pub(crate) struct CheckArgs {
    /// A process. Otherwise all processes of the containers
    #[arg(value_name = "PID", conflicts_with = "vrnic")]
    process: Option<u32>,
    /// The vRNIC whose container is checked
    #[arg(long, value_name = "NAME")]
    vrnic: Option<String>,
    /// Print JSON instead of tables
    #[arg(long)]
    json: bool,
}

/// Bytes that were sent and received.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
struct Traffic {
    sent: u64,
    received: u64,
}

#[derive(Debug, PartialEq, Serialize)]
struct Process {
    pid: u32,
    command: String,
    /// The files of libibverbs that it has, as it sees them.
    libraries: Vec<PathBuf>,
    served: bool,
    verdict: String,
}

/// The findings about a vRNIC, or about a process that has none.
#[derive(Default, Serialize)]
struct Report {
    vrnic: Option<String>,
    gids: Vec<String>,
    rdma: Option<Traffic>,
    eth0: Option<Traffic>,
    memory: Vec<MrNote>,
    processes: Vec<Process>,
}

impl Process {
    /// # Errors
    /// The process has gone, or this user may not look at it.
    fn look(pid: u32) -> io::Result<Process> {
        let root = PathBuf::from(format!("/proc/{pid}"));
        let why = |e: io::Error| match e.kind() {
            io::ErrorKind::NotFound => io::Error::new(e.kind(), format!("there is no process {pid}")),
            io::ErrorKind::PermissionDenied => io::Error::new(
                e.kind(),
                format!("process {pid} is not this user's: check it as its user, as root, or in its container"),
            ),
            _ => e,
        };
        let command = fs::read_to_string(root.join("comm")).map_err(why)?.trim().to_string();
        let files = mapped(&fs::read_to_string(root.join("maps")).map_err(why)?);
        let named = |path: &Path, name: &str| path.file_name().is_some_and(|n| n.to_string_lossy().starts_with(name));
        let preloaded = files.iter().any(|path| named(path, PRELOAD));
        let libraries: Vec<_> = files.into_iter().filter(|path| named(path, "libibverbs")).collect();
        let is_ours = |path: &PathBuf| {
            let inside = root.join("root").join(path.strip_prefix("/").unwrap_or(path));
            fs::read(inside).is_ok_and(|file| memchr::memmem::find(&file, MARK).is_some())
        };
        let (ours, others): (Vec<_>, Vec<_>) = libraries.iter().partition(|path| is_ours(path));
        let (served, verdict) = verdict(!ours.is_empty(), preloaded, others.first().map(|path| path.as_path()));
        Ok(Process { pid, command, libraries, served, verdict })
    }
}

/// Whether a process is served, in words too. `other`: a libibverbs that is not ours.
fn verdict(ours: bool, preloaded: bool, other: Option<&Path>) -> (bool, String) {
    match (other.map(Path::display), ours, preloaded) {
        (None, true, _) => (true, "uniRDMA's".into()),
        (None, false, _) => (true, "none".into()),
        (Some(path), true, true) => (true, format!("uniRDMA's; calls of {path} are led to it")),
        (Some(path), false, true) => (true, format!("{path}, whose calls are led to uniRDMA's")),
        (Some(path), true, false) => {
            (true, format!("uniRDMA's, beside {path}: calls by that library's own handle find no vRNIC"))
        }
        (Some(path), false, false) => {
            (false, format!("{path}, which finds no vRNIC: preload {PRELOAD} (`unirdma run` does)"))
        }
    }
}

/// The files that `/proc/PID/maps` names, each once.
fn mapped(maps: &str) -> Vec<PathBuf> {
    let path = |line: &str| line.split_once('/').map(|(_, path)| PathBuf::from(format!("/{path}")));
    let mut all: Vec<_> = maps.lines().filter_map(path).collect();
    all.sort();
    all.dedup();
    all
}

/// The identity of the PID namespace in which a process is.
fn space(pid: u32) -> Option<(u64, u64)> {
    fs::metadata(format!("/proc/{pid}/ns/pid")).map(|m| (m.dev(), m.ino())).ok()
}

/// The processes of the PID namespace in which `first` is.
fn beside(first: u32) -> Vec<u32> {
    let Some(wanted) = space(first) else { return Vec::new() };
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let mut all: Vec<u32> = entries.filter_map(|e| e.file_name().to_str()?.parse().ok()).collect();
    all.retain(|&pid| space(pid) == Some(wanted));
    all.sort_unstable();
    all
}

/// The traffic of `eth0` in the network namespace of a process (proc_net(5)).
fn eth0(net: &str) -> Option<Traffic> {
    let figures = net.lines().find_map(|l| l.trim().strip_prefix("eth0:"))?;
    let figures: Vec<u64> = figures.split_whitespace().filter_map(|n| n.parse().ok()).collect();
    Some(Traffic { received: *figures.first()?, sent: *figures.get(8)? })
}

/// The first process of a vRNIC's container.
fn first(v: &VrnicInfo) -> Option<u32> {
    v.container.and_then(|pid| u32::try_from(pid).ok())
}

/// These processes, except those that have ended meanwhile.
fn look_at(all: Vec<u32>) -> Vec<Process> {
    all.into_iter().filter_map(|pid| Process::look(pid).ok()).collect()
}

impl Report {
    /// A vRNIC, without processes.
    fn of(v: VrnicInfo) -> Report {
        let net = first(&v).and_then(|pid| fs::read_to_string(format!("/proc/{pid}/net/dev")).ok());
        Report {
            rdma: Some(Traffic { sent: v.counters.sent_bytes, received: v.counters.received_bytes }),
            eth0: net.as_deref().and_then(eth0),
            processes: Vec::new(),
            vrnic: Some(v.name),
            gids: v.gids,
            memory: v.memory,
        }
    }

    /// A vRNIC with all processes of its container. The first one is `unirdma` itself, which is left out.
    fn of_container(v: VrnicInfo) -> Report {
        let first = first(&v);
        let mut all = first.map(beside).unwrap_or_default();
        all.retain(|&pid| Some(pid) != first);
        Report { processes: look_at(all), ..Report::of(v) }
    }

    /// The vRNIC of the container in which this process is, without processes.
    fn inside() -> Report {
        let class = Path::new("/sys/class/infiniband");
        let device = fs::read_dir(class).into_iter().flatten().flatten().next().map(|e| e.path());
        let read = |file: &str| fs::read_to_string(device.as_ref()?.join(file)).ok();
        // Counters of the port are in units of 4 bytes.
        let words = |file: &str| read(file)?.trim().parse::<u64>().ok().map(|n| n.saturating_mul(4));
        let rdma = words("ports/1/counters/port_xmit_data").zip(words("ports/1/counters/port_rcv_data"));
        let gids = (0..).map_while(|i| read(&format!("ports/1/gids/{i}"))).map(|gid| gid.trim().to_string());
        Report {
            vrnic: read("node_desc").map(|name| name.trim().into()),
            gids: gids.filter(|gid| gid.bytes().any(|b| b != b'0' && b != b':')).collect(),
            rdma: rdma.map(|(sent, received)| Traffic { sent, received }),
            eth0: fs::read_to_string("/proc/net/dev").ok().as_deref().and_then(eth0),
            memory: Vec::new(),
            processes: Vec::new(),
        }
    }

    fn text(&self) -> String {
        let traffic = |t: Option<Traffic>| {
            t.map_or("not known".into(), |t| format!("{} sent, {} received", bytes(t.sent), bytes(t.received)))
        };
        let mut text = String::new();
        if let Some(name) = &self.vrnic {
            text += &table(&[
                vec!["vRNIC".into(), name.clone()],
                vec!["GIDs".into(), self.gids.join(", ")],
                vec!["by RDMA".into(), traffic(self.rdma)],
                vec!["by eth0".into(), traffic(self.eth0)],
            ]);
            text += "\n\n";
        }
        if !self.memory.is_empty() {
            text += &format!("{}\n\n", memory(&self.memory));
        }
        let head = ["PID", "COMMAND", "LIBIBVERBS"].map(String::from).to_vec();
        let row = |p: &Process| vec![p.pid.to_string(), p.command.clone(), p.verdict.clone()];
        if self.processes.is_empty() {
            return text + "no processes";
        }
        text + &table(&std::iter::once(head).chain(self.processes.iter().map(row)).collect::<Vec<_>>())
    }
}

/// How the memory of MRs is reached, what that costs, and what would be faster.
fn memory(notes: &[MrNote]) -> String {
    let cost = |m: &MrNote| if m.way == "copy" { "copied in and out besides" } else { "one copy for each transfer" };
    let row = |m: &MrNote| vec![m.way.clone(), m.mrs.to_string(), bytes(m.bytes), cost(m).to_string(), m.why.clone()];
    let head = ["MEMORY", "MRS", "BYTES", "COST", "BECAUSE"].map(String::from).to_vec();
    let mut text = table(&std::iter::once(head).chain(notes.iter().map(row)).collect::<Vec<_>>());
    if notes.iter().any(|m| m.why.ends_with("no full userfaultfd")) {
        text += "\nfaster: sysctl vm.unprivileged_userfaultfd=1, or let the user open /dev/userfaultfd";
    }
    text
}

/// Whether this process is in a container that has a vRNIC, and not beside the virtual layer.
fn is_inside(dir: &Path) -> bool {
    Path::new(VRNIC).join("vhost.sock").exists() && !dir.join("admin.sock").exists()
}

fn reports(dir: &Path, args: &CheckArgs) -> io::Result<Vec<Report>> {
    if let Some(pid) = args.process {
        let process = Process::look(pid)?;
        let mut report = match Client::connect(dir) {
            Err(_) if is_inside(dir) => Report::inside(),
            Err(_) => Report::default(),
            Ok(mut client) => {
                let all = container::all(&mut client)?;
                let mut shown = all.iter().filter_map(|name| container::show(&mut client, name).ok());
                let has = |v: &VrnicInfo| first(v).and_then(space).is_some_and(|s| Some(s) == space(pid));
                shown.find(has).map(Report::of).unwrap_or_default()
            }
        };
        report.processes = vec![process];
        return Ok(vec![report]);
    }
    if is_inside(dir) && args.vrnic.is_none() {
        let own = std::process::id();
        let mut all = beside(own);
        all.retain(|&pid| pid != own && pid != 1);
        return Ok(vec![Report { processes: look_at(all), ..Report::inside() }]);
    }
    let mut client = Client::connect(dir)?;
    if let Some(name) = &args.vrnic {
        let shown = container::show(&mut client, name)?;
        if shown.container.is_none() {
            let how = format!("vRNIC {name} has no container; start one with `unirdma run --vrnic {name} -- CMD`");
            return Err(io::Error::other(how));
        }
        return Ok(vec![Report::of_container(shown)]);
    }
    let mut found = Vec::new();
    for name in container::all(&mut client)? {
        let shown = container::show(&mut client, &name)?;
        found.extend(shown.container.is_some().then(|| Report::of_container(shown)));
    }
    if found.is_empty() {
        return Err(io::Error::other("no vRNIC has a container; start one with `unirdma run -- CMD`"));
    }
    Ok(found)
}

pub(crate) fn check(dir: &Path, args: &CheckArgs) -> io::Result<u8> {
    let found = reports(dir, args)?;
    let text = if args.json {
        serde_json::to_string_pretty(&found)?
    } else {
        found.iter().map(Report::text).collect::<Vec<_>>().join("\n\n")
    };
    print::line(&text)?;
    let served = found.iter().flat_map(|r| &r.processes).all(|p| p.served);
    Ok(if served { 0 } else { NOT_SERVED })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_a_process_are_named_once() {
        let maps = "7f00-7f01 r--p 00000000 08:01 12   /lib/libibverbs.so.1\n7f01-7f02 r-xp 1000 08:01 12   /lib/libibverbs.so.1\n\
            7f02-7f03 rw-p 0 00:00 0 \n7ffc-7ffd rw-p 0 00:00 0   [stack]\n7f04-7f05 r--p 0 08:01 13   /a dir/x (deleted)\n";
        assert_eq!(mapped(maps), [PathBuf::from("/a dir/x (deleted)"), PathBuf::from("/lib/libibverbs.so.1")]);
    }

    #[test]
    fn only_a_process_with_another_library_alone_is_not_served() {
        let other = Some(Path::new("/wheel/libibverbs-1a.so.1"));
        for ours in [false, true] {
            for preloaded in [false, true] {
                assert!(verdict(ours, preloaded, None).0);
                assert_eq!(verdict(ours, preloaded, other).0, ours || preloaded);
            }
        }
        assert!(verdict(false, false, other).1.contains("/wheel/libibverbs-1a.so.1"));
    }

    #[test]
    fn the_traffic_of_eth0_is_read() {
        let net = "Inter-| Receive\n face |bytes\n    lo: 1 2 3 4 5 6 7 8 9 10\n  eth0: 100 2 0 0 0 0 0 0 300 4 0 0 0 0 0 0\n";
        assert_eq!(eth0(net), Some(Traffic { sent: 300, received: 100 }));
        assert_eq!(eth0("lo: 1"), None);
    }
}
