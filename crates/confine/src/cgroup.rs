//! A cgroup for each worker, in a directory of this virtual layer below the supervisor's cgroup: version 1 if root may
//! create directories there, version 2 if the cgroup is delegated (or root may use free parts of it).
//!
//! Pages of memory files stay charged to the cgroup of the worker that has filled them, even after the worker's death.
//! So a worker that is started anew gets a new cgroup: [`Cgroup::remove`], then [`Cgroups::make`].

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::process::Pid;
use serde::{Deserialize, Serialize};

use super::limits;

/// The controllers that are used. The memory controller is required.
const MEMORY: &str = "memory";
const CPU: &str = "cpu";
const PIDS: &str = "pids";
/// Cgroup to which the supervisor moves in version 2, since a cgroup with members of its own cannot enable controllers
/// for its children.
const SUPERVISOR: &str = "supervisor";

/// Why a worker has no cgroup.
#[derive(Clone, Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum CgroupError {
    #[error("no cgroups are mounted")]
    NotMounted,
    #[error("{} has no memory controller", .0.display())]
    NoMemory(PathBuf),
    #[error("{}: {error}", .path.display())]
    File { path: PathBuf, error: Arc<io::Error> },
    /// The supervisor's cgroup is not delegated to it.
    #[error("{error} (systemd-run{user} --scope -p Delegate=yes unirdma host ... gives it a cgroup of its own)")]
    NotDelegated { error: Box<CgroupError>, user: &'static str },
    #[error("workers are threads")]
    Threads,
    #[error("it has no process id")]
    NoProcess,
}

/// A directory for cgroups in one hierarchy.
#[derive(Debug)]
struct Tree {
    /// The directory of this virtual layer.
    dir: PathBuf,
    unified: bool,
    controllers: Vec<&'static str>,
}

/// The directories of this virtual layer's cgroups.
#[derive(Debug)]
pub struct Cgroups {
    trees: Vec<Tree>,
    /// The reason why the cgroups do not share processors, if they do not.
    no_weights: Option<String>,
}

/// Limits of a worker's cgroup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CgroupLimits {
    /// Bytes of memory, including pages that the worker is the first to touch in memory files of its tenants.
    pub memory: u64,
    /// Number of threads.
    pub threads: u32,
    /// CPU weight when processors are scarce; [`USUAL_GROUP_WEIGHT`] is the usual one, [`MAX_GROUP_WEIGHT`] the
    /// largest. It has an effect only if the cgroups share processors.
    pub weight: u32,
}

/// Largest weight of a group.
pub const MAX_GROUP_WEIGHT: u32 = 10_000;
/// Weight of a group by default.
pub const USUAL_GROUP_WEIGHT: u32 = 100;

impl CgroupLimits {
    /// Limits for this machine. A worker that takes more than three quarters of the memory is killed, before other
    /// processes have none left.
    pub fn of_machine() -> Self {
        CgroupLimits { memory: limits::memory() / 4 * 3, threads: 256, weight: USUAL_GROUP_WEIGHT }
    }
}

/// The cgroup of one worker: one directory in each tree.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cgroup {
    dirs: Vec<PathBuf>,
}

/// A mount of the kernel's cgroups.
#[derive(Debug, PartialEq, Eq)]
struct Mount {
    /// The part of the hierarchy that is mounted.
    root: String,
    point: PathBuf,
    unified: bool,
    /// Mount options; in version 1 they include the controllers.
    options: String,
}

impl Mount {
    /// The mounts in the text of `/proc/self/mountinfo`.
    fn all(mountinfo: &str) -> Vec<Self> {
        let parse = |line: &str| {
            let (own, kind) = line.split_once(" - ")?;
            let mut own = own.split(' ').skip(3);
            let (root, point) = (own.next()?, own.next()?);
            let mut kind = kind.split(' ');
            let name = kind.next()?;
            let options = kind.nth(1)?;
            let unified = name == "cgroup2";
            (unified || name == "cgroup").then(|| Mount {
                root: root.into(),
                point: point.into(),
                unified,
                options: options.into(),
            })
        };
        mountinfo.lines().filter_map(parse).collect()
    }

    fn has(&self, controller: &str) -> bool {
        self.options.split(',').any(|o| o == controller)
    }

    /// The directory of the cgroup that this process is in, from the text of `/proc/self/cgroup`.
    fn own(&self, cgroups: &str) -> Option<PathBuf> {
        let path = cgroups.lines().find_map(|line| {
            let mut fields = line.splitn(3, ':');
            let (number, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
            let ours = if self.unified { number == "0" } else { controllers.split(',').any(|c| self.has(c)) };
            ours.then_some(path)
        })?;
        // The cgroup must lie within the mounted part.
        let path = Path::new(path).strip_prefix(&self.root).ok()?;
        path.components().all(|c| matches!(c, std::path::Component::Normal(_))).then(|| self.point.join(path))
    }
}

/// A name encoded as one path component.
fn component(name: &[u8]) -> String {
    let plain = |b: &u8| b.is_ascii_alphanumeric() || *b == b'-';
    name.iter().map(|b| if plain(b) { char::from(*b).to_string() } else { format!("_{b:02x}") }).collect()
}

fn at(path: &Path) -> impl Fn(io::Error) -> CgroupError {
    move |e| CgroupError::File { path: path.into(), error: e.into() }
}

fn make_dir(path: &Path) -> Result<(), CgroupError> {
    match fs::create_dir(path) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => Err(at(path)(e)),
        _ => Ok(()),
    }
}

fn write(path: &Path, text: &str) -> Result<(), CgroupError> {
    fs::write(path, text).map_err(at(path))
}

/// The controllers in a file that lists a version 2 cgroup's own or delegated ones.
fn listed(file: &Path) -> Result<Vec<&'static str>, CgroupError> {
    let text = fs::read_to_string(file).map_err(at(file))?;
    Ok([MEMORY, CPU, PIDS].into_iter().filter(|c| text.split_whitespace().any(|w| w == *c)).collect())
}

impl Cgroups {
    /// Makes the directories for the cgroups of the virtual layer that serves `dir`. With `weights`, cgroups also share
    /// processors. Without, threads of workers and programs stay in one scheduling group, within which the weight of a
    /// poller has an effect.
    ///
    /// # Errors
    /// A controller or a permission is missing.
    pub fn open(dir: &Path, weights: bool) -> Result<Self, CgroupError> {
        let read = |path: &str| fs::read_to_string(path).map_err(at(Path::new(path)));
        let (mounts, own) = (Mount::all(&read("/proc/self/mountinfo")?), read("/proc/self/cgroup")?);
        let name = format!("unirdma{}", component(dir.as_os_str().as_encoded_bytes()));
        let wanted: Vec<&'static str> = [MEMORY, PIDS].into_iter().chain(weights.then_some(CPU)).collect();
        let (mut trees, mut why) = (Vec::<Tree>::new(), CgroupError::NotMounted);
        let shared = "pollers share their cores with programs; see --polling";
        let mut no_cpu = if weights { "the cgroups here have no CPU controller" } else { shared }.to_string();
        for m in &mounts {
            let Some(base) = m.own(&own) else { continue };
            let found = if m.unified {
                unified(&base, &name, &wanted)
            } else {
                let has: Vec<_> = wanted.iter().copied().filter(|c| m.has(c)).collect();
                if has.is_empty() {
                    continue;
                }
                let dir = base.join(&name);
                make_dir(&dir).map(|()| Tree { dir, unified: false, controllers: has })
            };
            match found {
                Ok(tree) => trees.push(tree),
                // The memory controller's error says most.
                Err(e) if m.unified || m.has(MEMORY) => why = e,
                Err(e) if m.has(CPU) => no_cpu = e.to_string(),
                Err(_) => {}
            }
        }
        let mut cgroups = Cgroups { trees, no_weights: None };
        cgroups.no_weights = (!cgroups.have(CPU)).then_some(no_cpu);
        if cgroups.have(MEMORY) {
            return Ok(cgroups);
        }
        cgroups.remove();
        Err(why)
    }

    fn have(&self, controller: &str) -> bool {
        self.trees.iter().any(|t| t.controllers.contains(&controller))
    }

    /// The reason why weights have no effect; `None` if they have.
    pub fn why_no_weights(&self) -> Option<&str> {
        self.no_weights.as_deref()
    }

    /// The limits that a cgroup really gets here, in words.
    pub fn describe(&self, limits: &CgroupLimits) -> String {
        let mut said = format!("{} MiB of memory", limits.memory >> 20);
        if self.have(PIDS) {
            said += &format!(", {} threads", limits.threads);
        }
        if self.have(CPU) {
            said += &format!(", weight {}", limits.weight);
        }
        said
    }

    /// Makes or finds the cgroup of a group's worker, and sets its limits.
    ///
    /// # Errors
    /// The kernel refuses an operation.
    pub fn make(&self, group: &str, limits: &CgroupLimits) -> Result<Cgroup, CgroupError> {
        let name = format!("worker-{}", component(group.as_bytes()));
        let cgroup = Cgroup { dirs: self.trees.iter().map(|t| t.dir.join(&name)).collect() };
        let made = self.trees.iter().zip(&cgroup.dirs).try_for_each(|(tree, dir)| {
            make_dir(dir)?;
            tree.controllers.iter().try_for_each(|&c| {
                let (file, value) = match (c, tree.unified) {
                    (MEMORY, true) => ("memory.max", limits.memory),
                    (MEMORY, false) => ("memory.limit_in_bytes", limits.memory),
                    (PIDS, _) => ("pids.max", limits.threads.into()),
                    (_, true) => ("cpu.weight", limits.weight.clamp(1, MAX_GROUP_WEIGHT).into()),
                    // In version 1, 1024 is the usual share.
                    (_, false) => (
                        "cpu.shares",
                        u64::from(limits.weight.clamp(1, MAX_GROUP_WEIGHT)) * 1024 / u64::from(USUAL_GROUP_WEIGHT),
                    ),
                };
                write(&dir.join(file), &value.to_string())
            })
        });
        match made {
            Ok(()) => Ok(cgroup),
            Err(e) => {
                cgroup.remove();
                Err(e)
            }
        }
    }

    /// Removes the directories if no worker is left. In version 2, a supervisor that has moved into one stays there.
    pub fn remove(&self) {
        for tree in &self.trees {
            let _ = fs::remove_dir(tree.dir.join(SUPERVISOR));
            let _ = fs::remove_dir(&tree.dir);
        }
    }
}

/// The version 2 cgroup above the directory, if the supervisor is in `own`. The supervisor may have moved down already,
/// or systemd has started it one level below (`DelegateSubgroup=supervisor`).
fn above_supervisor<'a>(own: &'a Path, name: &str) -> &'a Path {
    let strip = |path: &'a Path, last: &str| path.parent().filter(|_| path.ends_with(last));
    strip(own, SUPERVISOR).map_or(own, |above| strip(above, name).unwrap_or(above))
}

/// Makes the directory below a version 2 cgroup.
fn unified(own: &Path, name: &str, wanted: &[&'static str]) -> Result<Tree, CgroupError> {
    let base = above_supervisor(own, name);
    let has = listed(&base.join("cgroup.controllers"))?;
    if !has.contains(&MEMORY) {
        return Err(CgroupError::NoMemory(base.into()));
    }
    let controllers: Vec<_> = wanted.iter().copied().filter(|c| has.contains(c)).collect();
    let dir = base.join(name);
    make_dir(&dir)?;
    let enabled = enable(base, &controllers).or_else(|_| {
        // A process is in the cgroup. If it is only the supervisor, moving the supervisor helps.
        let leaf = dir.join(SUPERVISOR);
        make_dir(&leaf)?;
        enter(&leaf, rustix::process::getpid())?;
        enable(base, &controllers)
    });
    match enabled.and_then(|()| enable(&dir, &controllers)) {
        Ok(()) => Ok(Tree { dir, unified: true, controllers }),
        Err(e) => {
            let _ = enter(own, rustix::process::getpid());
            let _ = fs::remove_dir(dir.join(SUPERVISOR));
            let _ = fs::remove_dir(&dir);
            let user = if rustix::process::geteuid().is_root() { "" } else { " --user" };
            Err(CgroupError::NotDelegated { error: e.into(), user })
        }
    }
}

/// Enables controllers for the children of a version 2 cgroup.
fn enable(base: &Path, controllers: &[&'static str]) -> Result<(), CgroupError> {
    let file = base.join("cgroup.subtree_control");
    let given = listed(&file)?;
    let more: Vec<String> = controllers.iter().filter(|c| !given.contains(c)).map(|c| format!("+{c}")).collect();
    if more.is_empty() { Ok(()) } else { write(&file, &more.join(" ")) }
}

fn enter(dir: &Path, pid: Pid) -> Result<(), CgroupError> {
    write(&dir.join("cgroup.procs"), &pid.as_raw_pid().to_string())
}

impl Cgroup {
    /// Moves a process into the cgroup, with all its threads.
    ///
    /// # Errors
    /// The kernel refuses an operation.
    pub fn enter(&self, pid: Pid) -> Result<(), CgroupError> {
        self.dirs.iter().try_for_each(|dir| enter(dir, pid))
    }

    /// Removes the cgroup, whose process must have ended and been waited for.
    pub fn remove(&self) {
        for dir in &self.dirs {
            if let Err(error) = fs::remove_dir(dir) {
                tracing::debug!(cgroup = %dir.display(), %error, "a cgroup stays");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HYBRID: &str = "\
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755";

    #[test]
    fn the_own_cgroup_is_found_in_each_mount() {
        let mounts = Mount::all(HYBRID);
        let own = "9:name=systemd:/\n4:memory:/a/b\n1:cpu,cpuacct:/\n0::/user.slice/x.scope\n";
        let dirs: Vec<_> = mounts.iter().map(|m| m.own(own).unwrap().display().to_string()).collect();
        let unified = "/sys/fs/cgroup/unified/user.slice/x.scope";
        assert_eq!(dirs, ["/sys/fs/cgroup/memory/a/b", "/sys/fs/cgroup/cpu,cpuacct/", unified]);
        assert!(mounts[0].has(MEMORY) && !mounts[0].has(CPU) && mounts[1].has(CPU) && mounts[2].unified);
    }

    /// As in a container in which only a part of the host's hierarchy is mounted, or which has a cgroup namespace of
    /// its own.
    #[test]
    fn a_cgroup_outside_of_its_mount_is_none() {
        let part = Mount::all("35 31 0:32 /docker/1 /sys/fs/cgroup rw - cgroup2 cgroup2 rw").remove(0);
        assert_eq!(part.own("0::/docker/1/x"), Some("/sys/fs/cgroup/x".into()));
        for outside in ["0::/docker/2", "0::/../x", "0::/docker/1/../2", "4:memory:/docker/1", ""] {
            assert_eq!(part.own(outside), None, "{outside}");
        }
    }

    #[test]
    fn any_name_is_one_component() {
        assert_eq!(component(b"/run/unirdma"), "_2frun_2funirdma");
        assert_eq!(component(b".."), "_2e_2e");
        assert_ne!(component(b"a_2f"), component(b"a/"));
    }

    #[test]
    fn a_supervisor_that_made_room_finds_the_same_place() {
        for own in ["/cg/s", "/cg/s/supervisor", "/cg/s/unirdma-x/supervisor"] {
            assert_eq!(above_supervisor(Path::new(own), "unirdma-x"), Path::new("/cg/s"));
        }
    }

    /// A directory of plain files instead of a real cgroup file system.
    #[test]
    fn version_2_gives_its_controllers_to_workers() {
        let base = std::env::temp_dir().join(format!("unirdma-cgroup-{}", std::process::id()));
        let dir = base.join("unirdma-x");
        fs::create_dir_all(&dir).unwrap();
        let (has, gives) = (base.join("cgroup.controllers"), base.join("cgroup.subtree_control"));
        fs::write(&has, "cpu io pids").unwrap();
        assert!(matches!(unified(&base, "unirdma-x", &[MEMORY]), Err(CgroupError::NoMemory(_))));
        fs::write(&has, "cpu io memory pids").unwrap();
        fs::write(&gives, "memory").unwrap();
        fs::write(dir.join("cgroup.subtree_control"), "").unwrap();
        let tree = unified(&base, "unirdma-x", &[MEMORY, CPU, PIDS]).unwrap();
        assert_eq!(tree.controllers, [MEMORY, CPU, PIDS]);
        let read = |path: PathBuf| fs::read_to_string(path).unwrap();
        assert_eq!(
            (read(gives), read(dir.join("cgroup.subtree_control"))),
            ("+cpu +pids".into(), "+memory +cpu +pids".into())
        );
        let limits = CgroupLimits { memory: 4096, threads: 7, weight: 20_000 };
        let worker = Cgroups { trees: vec![tree], no_weights: None }.make("a", &limits).unwrap();
        let of = |file| read(worker.dirs[0].join(file));
        assert_eq!((of("memory.max"), of("cpu.weight"), of("pids.max")), ("4096".into(), "10000".into(), "7".into()));
        fs::remove_dir_all(&base).unwrap();
    }
}
