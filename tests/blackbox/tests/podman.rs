//! Containers of podman that get their vRNIC by the mounts of `docs/user/podman.md`, connected with each other. The
//! image has a few of Debian's programs and their libraries, copied from this machine, so nothing is downloaded.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::support::*;

pub(crate) const IMAGE: &str = "unirdma-test";

/// Programs of the image.
const PROGRAMS: &[&str] = &[
    "ib_write_bw",
    "ibv_devinfo",
    "ibv_rc_pingpong",
    "rping",
    "ucx_perftest",
    "sh",
    "cat",
    "grep",
    "ls",
    "ip",
    "sleep",
    "touch",
    "id",
    "stat",
];

/// Servers and clients that run against each other in two containers, and an option of `podman run`. `ADDR` is the
/// server's address in podman's network.
const PAIRS: &[(&str, &str, &str)] = &[
    ("ib_write_bw -F -n 500", "ib_write_bw -F -n 500 ADDR", ""),
    ("ibv_rc_pingpong -g 0 -c", "ibv_rc_pingpong -g 0 -c ADDR", ""),
    ("rping -s -C 20 -v", "rping -c -a 10.0.0.1 -C 20 -V", ""),
    ("ucx_perftest", "ucx_perftest ADDR -n 500 -w 50 -s 8192 -t tag_bw", "-e UCX_TLS=rc,self"),
];

const DEVINFO: &str = "podman: the documented command line";
const OVER_ITS_OWN: &str = "podman: the library over the image's own, without an environment";
const GROUPS: &str = "podman: groups do not connect";

fn title(server: &str) -> String {
    format!("podman: {server}")
}

/// The page with the command line for podman.
const PAGE: &str = "docs/user/podman.md";

/// The command line that users are told to type, which begins with this.
pub(crate) fn documented_command(begin: &str) -> Result<String> {
    let page = std::fs::read_to_string(harness::root().join(PAGE)).map_err(failed(PAGE))?;
    let block = page.split("```").find_map(|b| b.strip_prefix("text\n").filter(|b| b.starts_with(begin)));
    block.map(String::from).ok_or_else(|| format!("{PAGE} has no command line that begins with `{begin}`"))
}

/// podman with its own store, configuration and network namespace, in which it makes its usual network. Dropping this
/// value removes them.
pub(crate) struct Podman {
    pub lab: Lab,
    dir: PathBuf,
    netns: String,
    /// A process whose mount namespace it has, and in which it finds devices (CDI) in a directory of the test's.
    mounts: Option<Running>,
    /// The documented command line.
    command: String,
}

impl Podman {
    pub(crate) fn start(lab: Lab, command: String, devices: Option<PathBuf>) -> Result<Podman> {
        let dir = lab.dir.join("podman");
        let netns = format!("ur{}-podman", std::process::id());
        let mut podman = Podman { lab, dir, netns, mounts: None, command };
        std::fs::create_dir(&podman.dir).map_err(failed("podman"))?;
        podman.configure().map_err(failed("podman"))?;
        harness::ip(&format!("netns add {}", podman.netns))?;
        harness::ip(&format!("-n {} link set lo up", podman.netns))?;
        if let Some(devices) = devices {
            let at = "/run/cdi";
            let script =
                format!("mkdir -p {at} && mount --bind {} {at} && echo ready && exec sleep 1h", devices.display());
            let mut c = Command::new("unshare");
            c.args(["--mount", "sh", "-c", &script]);
            let mounts = Running::start(c, &podman.lab.dir.join("mounts.log"))?;
            wait_for(&mounts, "ready")?;
            podman.mounts = Some(mounts);
        }
        let root = podman.image()?;
        podman.import(&root, IMAGE)?;
        Ok(podman)
    }

    /// Makes an image of a directory.
    pub(crate) fn import(&self, root: &Path, name: &str) -> Check {
        let archive = self.dir.join("image.tar");
        require_success(Command::new("tar").arg("-C").arg(root).arg("-cf").arg(&archive).arg("."))?;
        require_success(self.podman().arg("import").arg(archive).arg(name))
    }

    /// Writes a podman configuration that works on any machine: also without systemd, with control groups of both
    /// versions at once, or if root may not raise its limits.
    fn configure(&self) -> std::io::Result<()> {
        let dir = self.dir.display();
        let containers = format!(
            "[containers]\ndefault_ulimits = [\"nofile=4096:4096\", \"nproc=4000:4000\"]\n\
             [engine]\nruntime = \"runc\"\ncgroup_manager = \"cgroupfs\"\nevents_logger = \"none\"\ntmp_dir = \"{dir}/tmp\"\n"
        );
        std::fs::write(self.dir.join("containers.conf"), containers)?;
        let storage = format!("[storage]\ndriver = \"vfs\"\ngraphroot = \"{dir}/graph\"\nrunroot = \"{dir}/run\"\n");
        std::fs::write(self.dir.join("storage.conf"), storage)
    }

    /// A command in podman's namespaces.
    pub(crate) fn command(&self, program: &str) -> Command {
        let mut c = Command::new("nsenter");
        c.arg(format!("--net=/run/netns/{}", self.netns)).stdin(Stdio::null());
        if let Some(mounts) = &self.mounts {
            c.arg(format!("--mount=/proc/{}/ns/mnt", mounts.pid()));
        }
        c.arg(program);
        c.env("CONTAINERS_CONF", self.dir.join("containers.conf"));
        c.env("CONTAINERS_STORAGE_CONF", self.dir.join("storage.conf"));
        c
    }

    pub(crate) fn podman(&self) -> Command {
        self.command("podman")
    }

    /// A directory with the image's files, which lie where Debian has them.
    pub(crate) fn image(&self) -> Result<PathBuf> {
        let root = self.dir.join("image");
        if root.exists() {
            return Ok(root);
        }
        for d in ["bin", "lib", "lib64"] {
            std::fs::create_dir_all(root.join("usr").join(d)).map_err(failed(d))?;
            std::os::unix::fs::symlink(format!("usr/{d}"), root.join(d)).map_err(failed(d))?;
        }
        let mut files: Vec<PathBuf> = PROGRAMS.iter().map(|p| Path::new("/usr/bin").join(p)).collect();
        // UCX loads its parts by itself.
        let parts = format!("/usr/lib/{}-linux-gnu/ucx", std::env::consts::ARCH);
        let parts = std::fs::read_dir(&parts).map_err(failed(&parts))?.flatten().map(|e| e.path());
        files.extend(parts.filter(|p| p.extension().is_some_and(|e| e == "0")));
        let ours = self.library();
        let needed = files.iter().chain([&ours]).map(|f| libraries(f)).collect::<Result<Vec<_>>>()?.concat();
        for f in files.iter().chain(&needed) {
            let name = f.display().to_string();
            let (Some(parent), Some(file)) = (f.parent(), f.file_name()) else { continue };
            let parent = parent.canonicalize().map_err(failed(&name))?;
            let to = root.join(parent.strip_prefix("/").unwrap_or(&parent));
            std::fs::create_dir_all(&to).and_then(|()| std::fs::copy(f, to.join(file))).map_err(failed(&name))?;
        }
        Ok(root)
    }

    fn library(&self) -> PathBuf {
        self.lab.exe().with_file_name("libibverbs.so")
    }

    /// Starts a program in a container by the documented command line, with `change` applied to it.
    fn start_as(
        &self,
        name: &str,
        vrnic: &str,
        options: &str,
        program: &str,
        change: impl FnOnce(String) -> Result<String>,
    ) -> Result<Running> {
        let socket = self.lab.socket(vrnic);
        let directory = socket.parent().unwrap_or(&socket).display().to_string();
        let built = self.library().parent().unwrap_or(Path::new("/")).display().to_string();
        let mut line = self.command.clone();
        for (from, to) in [
            ("podman run ", format!("exec podman run --rm --replace --name {name} ")),
            ("/run/unirdma/vrnics/a", directory),
            ("$PWD/target/release", built),
            ("IMAGE", format!("{options} {IMAGE}")),
            ("ibv_devinfo", program.into()),
        ] {
            line = replaced(&line, from, &to)?;
        }
        let mut c = self.command("sh");
        c.arg("-c").arg(change(line)?);
        Running::start(c, &self.lab.dir.join(format!("podman-{name}.log")))
    }

    fn start_program(&self, name: &str, vrnic: &str, options: &str, program: &str) -> Result<Running> {
        self.start_as(name, vrnic, options, program, Ok)
    }

    /// The server's address in podman's network, once it listens there or on its vRNIC.
    fn address_of_server(&self, vrnic: &str) -> Option<String> {
        let format = "{{.NetworkSettings.IPAddress}} {{.State.ConmonPid}}";
        let o = self.podman().args(["inspect", "server", "--format", format]).output().ok()?;
        let text = String::from_utf8_lossy(&o.stdout).into_owned();
        let (address, parent) = text.trim().split_once(' ')?;
        let listens = parent.parse().is_ok_and(harness::listens) || self.lab.rdma_listens(vrnic);
        Some(address.to_string()).filter(|a| listens && !a.is_empty())
    }

    /// Runs a server in a container of one vRNIC and its client in a container of another, with more options of `podman
    /// run`.
    fn pair(&self, server: (&str, &str), client: (&str, &str), options: &str) -> Result<(Output, Output)> {
        let mut s = self.start_program("server", server.0, options, server.1)?;
        let mut address = None;
        let known = soon(
            || {
                address = self.address_of_server(server.0);
                address.is_some() || s.has_ended()
            },
            "the server does not listen",
        );
        let (Ok(()), Some(address)) = (known, address) else {
            return Ok((s.finish_within(Duration::ZERO), Output::default()));
        };
        let c = self.start_program("client", client.0, options, &client.1.replace("ADDR", &address))?;
        let c = c.finish_within(Duration::from_secs(20));
        let limit = Duration::from_secs(if c.ok() { 20 } else { 2 });
        Ok((s.finish_within(limit), c))
    }
}

impl Drop for Podman {
    fn drop(&mut self) {
        let _ = self.podman().args(["rm", "--all", "--force", "--time", "0"]).output();
        let _ = harness::ip(&format!("netns del {}", self.netns));
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

/// Shared libraries, and the dynamic linker, that a program or library needs.
fn libraries(of: &Path) -> Result<Vec<PathBuf>> {
    let o = Command::new("ldd").arg(of).output().map_err(failed("ldd"))?;
    require(o.status.success(), format!("ldd {}: {}", of.display(), String::from_utf8_lossy(&o.stderr)))?;
    let text = String::from_utf8_lossy(&o.stdout).into_owned();
    Ok(text.split_whitespace().filter(|w| w.starts_with('/')).map(PathBuf::from).collect())
}

fn require_success(c: &mut Command) -> Check {
    let o = c.output().map_err(|e| format!("{c:?}: {e}"))?;
    require(o.status.success(), format!("{c:?}: {}", String::from_utf8_lossy(&o.stderr)))
}

/// Replaces a text. Fails if the text is not there.
fn replaced(line: &str, from: &str, to: &str) -> Result<String> {
    require(line.contains(from), format!("the documented command line has no `{from}`: {line}"))?;
    Ok(line.replace(from, to))
}

pub(crate) fn tests(t: &mut Tests) {
    t.topic(&[packages::RUN, packages::CONNECTING, packages::PODMAN]);
    t.need_root("its containers in a network of their own need root");
    let podman = &Shared::new(|| Podman::start(abc()?, documented_command("podman run -v ")?, None));
    t.on(podman, DEVINFO, |podman| {
        // The image alone has Debian's library, which finds nothing.
        let o = podman.podman().args(["run", "--rm", IMAGE, "ibv_devinfo"]).output().map_err(failed("podman"))?;
        let text = String::from_utf8_lossy(&o.stdout).into_owned();
        require(!o.status.success() && !text.contains("hca_id"), text)?;
        let o = podman.start_program("client", "a", "", "ibv_devinfo -v")?.finish();
        require(o.ok() && o.text.contains("unirdma0") && o.text.contains("::ffff:10.0.0.1"), o.text)
    });
    t.on(podman, OVER_ITS_OWN, |podman| {
        let own = format!("/usr/lib/{}-linux-gnu/", std::env::consts::ARCH);
        let change = |line: String| {
            let line = replaced(&line, "-e LD_LIBRARY_PATH=/opt/unirdma", "")?;
            replaced(&line, "/opt/unirdma/", &own)
        };
        let o = podman.start_as("client", "a", "", "ibv_devinfo", change)?.finish();
        require(o.ok() && o.text.contains("unirdma0"), o.text)
    });
    for (server, client, options) in PAIRS {
        t.on(podman, title(server), move |podman| both_end_well(podman.pair(("a", server), ("b", client), options)?));
    }
    t.on(podman, GROUPS, |podman| {
        let p = "ibv_rc_pingpong -g 0";
        let (s, c) = podman.pair(("b", p), ("c", &format!("{p} ADDR")), "")?;
        require(!s.ok() && !c.ok() && c.text.contains("RTR"), format!("server: {}\nclient: {}", s.text, c.text))
    });
}
