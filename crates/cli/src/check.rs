//! `unirdma check`: whether programs use RDMA. For each process of a container it says which libibverbs it has, and for
//! the vRNIC how much went by RDMA and by Ethernet, and how the memory of MRs is reached.
//!
//! Inside of a container, where the virtual layer cannot be asked, the same comes from `/proc` and `/sys`.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use clap::Args;
use serde::Serialize;
use unirdma_ipc::vrnic::VrnicInfo;
use unirdma_supervisor::Client;

use crate::loader::PRELOAD;
use crate::mounts;
use crate::output::Memory;
use crate::print::{self, bytes, table};
use crate::vrnics;

pub(crate) const EXAMPLES: &str = "Examples:
  unirdma check                   all containers of this host; in a container: this one
  unirdma check --vrnic a         the container of a
  unirdma check 4711              one process
  unirdma check --json | jq '.[].processes[] | select(.served == false)'

A process is served if it has no libibverbs, or if its calls go to uniRDMA's.

Exit code: 0 if all processes are served, 3 if one is not, 1 if nothing could be checked.";

pub(crate) const CLASS: &str = "/sys/class/infiniband";
/// Exit code if a process is not served.
const NOT_SERVED: u8 = 3;
/// How this user gets a full userfaultfd.
pub(crate) const FULL_USERFAULTFD: &str = "sysctl vm.unprivileged_userfaultfd=1, or let the user open /dev/userfaultfd";
/// Our library has this text, and no other libibverbs does.
pub(crate) const MARK: &[u8] = b"unirdma_answer_netlink";

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
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct Traffic {
    /// Bytes sent.
    sent: u64,
    /// Bytes received.
    received: u64,
}

/// The findings about a process.
#[derive(Debug, PartialEq, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct Process {
    /// Its ID.
    pid: u32,
    /// The name of its program.
    command: String,
    /// The files of libibverbs that it has, as it sees them.
    libraries: Vec<PathBuf>,
    /// It has no libibverbs, or its calls go to uniRDMA's.
    served: bool,
    /// The same in words.
    verdict: String,
}

/// The findings about a vRNIC.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct Vrnic {
    /// Its name.
    name: String,
    /// Its GIDs.
    gids: Vec<String>,
    /// MTU of its Ethernet interface, bytes; null: not known.
    mtu: Option<u32>,
    /// The bytes that went by RDMA; null: not known.
    rdma: Option<Traffic>,
    /// How the memory of its MRs is reached, and why.
    memory: Vec<Memory>,
}

/// The findings about a container, or about a process that is in none.
#[derive(Default, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct Report {
    /// Its vRNICs.
    vrnics: Vec<Vrnic>,
    /// Names of the RDMA devices that its programs see.
    devices: Vec<String>,
    /// Of all Ethernet interfaces of the container.
    ethernet: Option<Traffic>,
    /// Its processes.
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
        let is_ours = |path: &PathBuf| is_ours(&root.join("root").join(path.strip_prefix("/").unwrap_or(path)));
        let (ours, others): (Vec<_>, Vec<_>) = libraries.iter().partition(|path| is_ours(path));
        let (served, verdict) = verdict(!ours.is_empty(), preloaded, others.first().map(|path| path.as_path()));
        Ok(Process { pid, command, libraries, served, verdict })
    }
}

/// Whether a file is our libibverbs.
pub(crate) fn is_ours(library: &Path) -> bool {
    fs::read(library).is_ok_and(|file| memchr::memmem::find(&file, MARK).is_some())
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

/// The traffic of all interfaces `eth0`, `eth1` and so on of a network namespace (proc_net(5)).
fn ethernet(net: &str) -> Option<Traffic> {
    let traffic = |line: &str| {
        let (_, figures) = line.trim().strip_prefix("eth")?.split_once(':')?;
        let figures: Vec<u64> = figures.split_whitespace().filter_map(|n| n.parse().ok()).collect();
        Some(Traffic { received: *figures.first()?, sent: *figures.get(8)? })
    };
    let sum = |a: Traffic, b: Traffic| Traffic { sent: a.sent + b.sent, received: a.received + b.received };
    net.lines().filter_map(traffic).reduce(sum)
}

/// The names in a directory, sorted.
pub(crate) fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let mut all: Vec<_> = entries.filter_map(|e| e.file_name().into_string().ok()).collect();
    all.sort();
    all
}

/// The first process of a vRNIC's container.
fn first(v: &VrnicInfo) -> Option<u32> {
    v.container.and_then(|pid| u32::try_from(pid).ok())
}

/// These processes, except those that have ended meanwhile.
fn look_at(all: Vec<u32>) -> Vec<Process> {
    all.into_iter().filter_map(|pid| Process::look(pid).ok()).collect()
}

impl Vrnic {
    fn of(v: VrnicInfo) -> Vrnic {
        let rdma = Some(Traffic { sent: v.counters.sent_bytes, received: v.counters.received_bytes });
        Vrnic {
            name: v.name,
            gids: v.gids,
            mtu: Some(v.mtu),
            rdma,
            memory: v.memory.into_iter().map(Memory::from).collect(),
        }
    }

    /// The vRNIC of a device in `/sys`.
    fn of_device(device: &Path) -> Vrnic {
        let read = |file: &str| fs::read_to_string(device.join(file)).ok();
        // Counters of the port are in units of 4 bytes.
        let words = |file: &str| read(file)?.trim().parse::<u64>().ok().map(|n| n.saturating_mul(4));
        let rdma = words("ports/1/counters/port_xmit_data").zip(words("ports/1/counters/port_rcv_data"));
        let gids = (0..).map_while(|i| read(&format!("ports/1/gids/{i}"))).map(|gid| gid.trim().to_string());
        let interface = read("ports/1/gid_attrs/ndevs/0").unwrap_or_default();
        let mtu = fs::read_to_string(format!("/sys/class/net/{}/mtu", interface.trim()));
        Vrnic {
            name: read("node_desc").unwrap_or_default().trim().into(),
            mtu: mtu.ok().and_then(|mtu| mtu.trim().parse().ok()),
            gids: gids.filter(|gid| gid.bytes().any(|b| b != b'0' && b != b':')).collect(),
            rdma: rdma.map(|(sent, received)| Traffic { sent, received }),
            memory: Vec::new(),
        }
    }

    fn text(&self) -> String {
        let mut text = table(&[
            vec!["vRNIC".into(), self.name.clone()],
            vec!["GIDs".into(), self.gids.join(", ")],
            vec!["MTU".into(), self.mtu.map_or("not known".into(), |mtu| mtu.to_string())],
            vec!["by RDMA".into(), traffic(self.rdma)],
        ]);
        if !self.memory.is_empty() {
            text += &format!("\n\n{}", memory(&self.memory));
        }
        text
    }
}

fn traffic(t: Option<Traffic>) -> String {
    t.map_or("not known".into(), |t| format!("{} sent, {} received", bytes(t.sent), bytes(t.received)))
}

impl Report {
    /// The containers of these vRNICs, without processes.
    fn all(vrnics: impl Iterator<Item = VrnicInfo>) -> Vec<(Option<u32>, Report)> {
        let mut found: Vec<(Option<u32>, Report)> = Vec::new();
        for v in vrnics.filter(|v| v.container.is_some()) {
            let first = first(&v);
            match found.iter_mut().find(|(pid, _)| *pid == first) {
                Some((_, report)) => report.vrnics.push(Vrnic::of(v)),
                None => {
                    let net = first.and_then(|pid| fs::read_to_string(format!("/proc/{pid}/net/dev")).ok());
                    let ethernet = net.as_deref().and_then(ethernet);
                    let class = first.map(|pid| PathBuf::from(format!("/proc/{pid}/root{CLASS}")));
                    let devices = class.map(|class| names(&class)).unwrap_or_default();
                    let vrnics = vec![Vrnic::of(v)];
                    found.push((first, Report { vrnics, devices, ethernet, processes: Vec::new() }));
                }
            }
        }
        found
    }

    /// The container with all its processes. The first one is `unirdma` itself, which is left out.
    fn with_processes((first, report): (Option<u32>, Report)) -> Report {
        let mut all = first.map(beside).unwrap_or_default();
        all.retain(|&pid| Some(pid) != first);
        Report { processes: look_at(all), ..report }
    }

    /// The container in which this process is, without processes.
    fn inside() -> Report {
        let devices = names(Path::new(CLASS));
        Report {
            vrnics: devices.iter().map(|device| Vrnic::of_device(&Path::new(CLASS).join(device))).collect(),
            devices,
            ethernet: fs::read_to_string("/proc/net/dev").ok().as_deref().and_then(ethernet),
            processes: Vec::new(),
        }
    }

    fn text(&self) -> String {
        let mut parts: Vec<_> = self.vrnics.iter().map(Vrnic::text).collect();
        if !self.vrnics.is_empty() {
            parts.push(table(&[
                vec!["devices".into(), self.devices.join(", ")],
                vec!["by Ethernet".into(), traffic(self.ethernet)],
            ]));
        }
        let head = ["PID", "COMMAND", "LIBIBVERBS"].map(String::from).to_vec();
        let row = |p: &Process| vec![p.pid.to_string(), p.command.clone(), p.verdict.clone()];
        parts.push(match &self.processes[..] {
            [] => "no processes".into(),
            all => table(&std::iter::once(head).chain(all.iter().map(row)).collect::<Vec<_>>()),
        });
        parts.join("\n\n")
    }
}

/// How the memory of MRs is reached, what that costs, and what would be faster.
fn memory(notes: &[Memory]) -> String {
    let cost = |m: &Memory| if m.way == "copy" { "copied in and out besides" } else { "one copy for each transfer" };
    let row = |m: &Memory| vec![m.way.clone(), m.mrs.to_string(), bytes(m.bytes), cost(m).to_string(), m.why.clone()];
    let head = ["MEMORY", "MRS", "BYTES", "COST", "BECAUSE"].map(String::from).to_vec();
    let mut text = table(&std::iter::once(head).chain(notes.iter().map(row)).collect::<Vec<_>>());
    if notes.iter().any(|m| m.why.ends_with("no full userfaultfd")) {
        text += &format!("\nfaster: {FULL_USERFAULTFD}");
    }
    text
}

/// Whether this process is in a container that has a vRNIC, and not beside the virtual layer.
pub(crate) fn is_inside(dir: &Path) -> bool {
    !mounts::vrnics().is_empty() && !dir.join("admin.sock").exists()
}

fn reports(dir: &Path, args: &CheckArgs) -> io::Result<Vec<Report>> {
    if let Some(pid) = args.process {
        let process = Process::look(pid)?;
        let found = match Client::connect(dir) {
            Err(_) if is_inside(dir) => Report::inside(),
            Err(_) => Report::default(),
            Ok(mut client) => {
                let has = |v: &VrnicInfo| first(v).and_then(space).is_some_and(|s| Some(s) == space(pid));
                Report::all(vrnics::all(&mut client)?.into_iter().filter(has))
                    .pop()
                    .map(|(_, report)| report)
                    .unwrap_or_default()
            }
        };
        return Ok(vec![Report { processes: vec![process], ..found }]);
    }
    if is_inside(dir) && args.vrnic.is_none() {
        let own = std::process::id();
        let mut all = beside(own);
        all.retain(|&pid| pid != own && pid != 1);
        return Ok(vec![Report { processes: look_at(all), ..Report::inside() }]);
    }
    let mut client = Client::connect(dir)?;
    let mut shown = vrnics::all(&mut client)?;
    if let Some(name) = &args.vrnic {
        let named = vrnics::show(&mut client, name)?;
        if named.container.is_none() {
            let how = format!("vRNIC {name} has no container; start one with `unirdma run --vrnic {name} -- CMD`");
            return Err(io::Error::other(how));
        }
        shown.retain(|v| v.container == named.container);
    }
    let found: Vec<_> = Report::all(shown.into_iter()).into_iter().map(Report::with_processes).collect();
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
    fn the_traffic_of_ethernet_is_read() {
        let head = "Inter-| Receive\n face |bytes\n    lo: 1 2 3 4 5 6 7 8 9 10\n";
        let net =
            format!("{head}  eth0: 100 2 0 0 0 0 0 0 300 4 0 0 0 0 0 0\n  eth1:1 2 0 0 0 0 0 0 3 4 0 0 0 0 0 0\n");
        assert_eq!(ethernet(&net), Some(Traffic { sent: 303, received: 101 }));
        assert_eq!(ethernet("lo: 1"), None);
    }
}
