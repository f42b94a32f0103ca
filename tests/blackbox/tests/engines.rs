//! Containers of podman that get their vRNIC by its name, by files of the Container Device Interface.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::podman::{IMAGE, Podman, documented_command};
use crate::support::*;

/// Where the virtual layer writes its files for engines, and podman finds them.
fn devices() -> PathBuf {
    std::env::temp_dir().join(format!("unirdma-cdi-{}", std::process::id()))
}

/// podman beside a virtual layer with vRNICs a and b of one group, and c of another one.
struct Engine {
    podman: Podman,
    /// The documented options that name the device of a vRNIC a.
    option: String,
}

impl Engine {
    fn start() -> Result<Engine> {
        let line = documented_command("podman run --device ")?;
        let option = line.strip_prefix("podman run ").and_then(|l| l.split(" IMAGE").next()).unwrap_or_default();
        let lab = abc_with(&["--cdi", &devices().display().to_string()])?;
        let option = option.to_string();
        Ok(Engine { podman: Podman::start(lab, line, Some(devices()))?, option })
    }

    /// A command that runs a program in a container.
    fn command(&self, image: &str, options: &str, program: &[&str]) -> Command {
        let mut c = self.podman.podman();
        c.args(["run", "--rm"]).args(options.split_whitespace()).arg(image).args(program);
        c
    }

    fn run(&self, options: &str, program: &[&str]) -> Output {
        Output::of(&mut self.command(IMAGE, options, program))
    }

    /// Removes a container, also what podman leaves in /run/runc of one whose watcher was killed.
    fn remove(&self, name: &str) {
        let id = Output::of(self.podman.podman().args(["inspect", name, "-f", "{{.Id}}"])).text;
        let _ = Output::of(self.podman.podman().args(["rm", "-f", "-t", "0", name]));
        let _ = Output::of(Command::new("runc").args(["delete", "--force", id.trim()]));
    }

    fn spawn(&self, name: &str, options: &str, program: &[&str]) -> Result<Running> {
        let options = format!("--name {name} {options}");
        Running::start(self.command(IMAGE, &options, program), &self.podman.lab.dir.join(format!("engine-{name}.log")))
    }

    /// The option that asks for a vRNIC.
    fn vrnic(&self, name: &str) -> Result<String> {
        let end = "unirdma.io/vrnic=a";
        self.option.strip_suffix(end).map(|o| format!("{o}unirdma.io/vrnic={name}")).ok_or_else(|| self.option.clone())
    }

    /// Nothing has a vRNIC soon.
    fn is_free(&self, vrnic: &str) -> Check {
        let free = || self.podman.lab.show(vrnic).is_ok_and(|v| v["attached"] == false && v["container"].is_null());
        soon(free, "the vRNIC is not free")
    }

    /// The process of a container, and of the process of podman that watches it.
    fn processes(&self, name: &str) -> Result<(i32, u32)> {
        let o = Output::of(self.podman.podman().args(["inspect", name, "-f", "{{.State.Pid}} {{.State.ConmonPid}}"]));
        let both = o.text.trim().split_once(' ').and_then(|(a, b)| Some((a.parse().ok()?, b.parse().ok()?)));
        both.ok_or(o.text)
    }

    /// Runs a server in the container of a, and its client in b's, with more options of `podman run`.
    fn pair(&self, options: &str, server: &'static str, client: &'static str) -> Result<(Output, Output)> {
        let words = |line: &'static str| line.split(' ').collect::<Vec<_>>();
        let mut s = self.spawn("server", &format!("{options} {}", self.vrnic("a")?), &words(server))?;
        let listens = || {
            let by_tcp = self.processes("server").is_ok_and(|(_, watcher)| harness::listens(watcher));
            by_tcp || self.podman.lab.rdma_listens("a") || s.has_ended()
        };
        soon(listens, "the server does not listen")?;
        let c = self.run(&format!("{options} {}", self.vrnic("b")?), &words(client));
        Ok((s.finish_within(Duration::from_secs(20)), c))
    }

    /// Makes an image whose root directory `change` has changed.
    fn image(&self, name: &str, change: impl FnOnce(&Path) -> std::io::Result<()>) -> Check {
        let (from, to) = (self.podman.image()?, self.podman.lab.dir.join(name));
        let o = Output::of(Command::new("cp").arg("-a").arg(from).arg(&to));
        require(o.ok(), o.text)?;
        change(&to).map_err(failed(name))?;
        self.podman.import(&to, name)
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(devices());
    }
}

/// A script of a container that prints all that a vRNIC has there.
const SHOWS: &str = "ibv_devinfo | grep -e hca_id -e state; ls /sys/class/infiniband /dev/infiniband; \
    cat /sys/class/infiniband/unirdma0/ports/1/gid_attrs/ndevs/0; ip -br address show rdma0; ip route show dev rdma0";

const SHOWN: &str = "\
hca_id:\tunirdma0
\t\t\tstate:\t\t\tPORT_ACTIVE (4)
/dev/infiniband:
uverbs0

/sys/class/infiniband:
unirdma0
rdma0
rdma0            UNKNOWN        10.0.0.1/16 fd00::1/64 ";

/// Tries to change what a container got.
const CHANGES: &str = "for f in /run/unirdma/x /run/unirdma-lib/x /run/unirdma-lib/real/x /sys/class/infiniband/x \
    /sys/devices/virtual/infiniband/x /usr/lib/*-linux-gnu/libibverbs.so.1; do touch $f 2>/dev/null && echo changed $f; \
    done; echo end";

pub(crate) fn tests(t: &mut Tests) {
    t.topic(&[packages::RUN, packages::CONNECTING, packages::PODMAN, packages::LXC]);
    t.need_root("its containers in a network of their own need root");
    let engine = &Shared::new(Engine::start);
    t.on(engine, "engines: a container that names its vRNIC has all of it", |engine| {
        for network in ["", "--network none", "--read-only", "--user 1000", "--uidmap 0:100000:5000"] {
            let o = engine.run(&format!("{network} {}", engine.vrnic("a")?), &["sh", "-c", SHOWS]);
            require(
                o.ok() && o.text.starts_with(SHOWN) && !o.text.contains("default"),
                format!("{network}: {}", o.text),
            )?;
        }
        let o = engine.run(&format!("--network host {}", engine.vrnic("a")?), &["ibv_devinfo"]);
        require(o.ok() && o.text.contains("unirdma0"), o.text)?;
        let o = engine.run(&engine.vrnic("a")?, &["sh", "-c", CHANGES]);
        require(o.ok() && o.text == "end\n", o.text)?;
        engine.is_free("a")
    });
    t.on(engine, "engines: programs of two containers connect by the vRNICs' own network", |engine| {
        for (server, client) in [
            ("ib_write_bw -F -n 500", "ib_write_bw -F -n 500 10.0.0.1"),
            ("rping -s -C 20 -v", "rping -c -a 10.0.0.1 -C 20 -V"),
            ("ibv_rc_pingpong -g 0 -c", "ibv_rc_pingpong -g 0 -c 10.0.0.1"),
        ] {
            both_end_well(engine.pair("--network none", server, client)?)?;
        }
        let p = "ibv_rc_pingpong -g 0";
        let server = engine.spawn("server", &engine.vrnic("a")?, &["ibv_rc_pingpong", "-g", "0"])?;
        let other = engine.run(&engine.vrnic("c")?, &["sh", "-c", &format!("sleep 1; {p} 10.0.0.1")]);
        server.finish_within(Duration::ZERO);
        engine.remove("server");
        require(!other.ok(), other.text)
    });
    t.on(engine, "engines: several vRNICs in one container, and a new one of a group", |engine| {
        let both = format!("{} {}", engine.vrnic("b")?, engine.vrnic("a")?);
        let script =
            "ibv_devinfo | grep hca_id; ls /sys/class/infiniband /dev/infiniband; ip -br address show to 10.0.0.0/16";
        let o = engine.run(&both, &["sh", "-c", script]);
        let expected = [
            "unirdma0",
            "unirdma1",
            "uverbs1",
            "rdma0            UNKNOWN        10.0.0.2/16",
            "rdma1            UNKNOWN        10.0.0.1/16",
        ];
        require(o.ok() && expected.iter().all(|e| o.text.contains(e)), o.text)?;
        let group = "--device unirdma.io/group=other";
        let o = engine.run(group, &["sh", "-c", "ibv_devinfo | grep -e node_guid -e state; ip -br address show rdma0"]);
        require(o.ok() && o.text.contains("PORT_ACTIVE") && o.text.contains("10.77.0."), o.text)?;
        let list = || engine.podman.lab.unirdma(&["vrnic", "ls"]).text;
        soon(|| !list().contains("run-"), "the vRNIC of a container that has ended is left")
    });
    t.on(engine, "engines: a vRNIC with the address that the engine has given to the container", |engine| {
        let option = "--device unirdma.io/group-eth0=other";
        let finds = "cat /sys/class/infiniband/unirdma0/ports/1/gid_attrs/ndevs/0; ls /sys/class/net";
        let o = engine.run(option, &["sh", "-c", finds]);
        require(o.ok() && o.text.starts_with("eth0\n") && !o.text.contains("rdma"), o.text)?;
        for (server, client) in
            [("ib_write_bw -F -n 500", "ib_write_bw -F -n 500"), ("rping -s -C 20", "rping -c -C 20 -a")]
        {
            let mut s = engine.spawn("server", option, &server.split(' ').collect::<Vec<_>>())?;
            let lab = &engine.podman.lab;
            let listens = || {
                let list = lab.unirdma(&["vrnic", "ls", "-q"]).text;
                let by_rdma = list.lines().any(|v| v.starts_with("run-") && lab.rdma_listens(v));
                let by_tcp = engine.processes("server").is_ok_and(|(_, watcher)| harness::listens(watcher));
                by_tcp || by_rdma || s.has_ended()
            };
            soon(listens, "the server does not listen")?;
            let mut inspect = engine.podman.podman();
            let o = Output::of(inspect.args(["inspect", "server", "-f", "{{.NetworkSettings.IPAddress}}"]));
            let client: Vec<&str> = client.split(' ').chain([o.text.trim()]).collect();
            let c = engine.run(option, &client);
            both_end_well((s.finish_within(Duration::from_secs(20)), c))?;
        }
        for (network, why) in [
            ("--network none", "unirdma: eth0 has no address yet"),
            ("--network host", "unirdma: the container has the host's network, and no eth0"),
            ("--device unirdma.io/group=other", "unirdma: a vRNIC with the addresses of eth0 is the only one"),
        ] {
            let o = engine.run(&format!("{network} {option}"), &["id"]);
            require(!o.ok() && o.text.contains(why), format!("{network}: {}", o.text))?;
        }
        let list = || engine.podman.lab.unirdma(&["vrnic", "ls"]).text;
        soon(|| !list().contains("run-"), "the vRNIC of a container that has ended is left")
    });
    t.on(engine, "engines: programs with a libibverbs of their own find the vRNIC, if it is asked for", |engine| {
        let option = engine.vrnic("a")?.replace("/vrnic=", "/vrnic-preload=");
        let o = engine.run(&option, &["sh", "-c", "cat /etc/ld.so.preload; ibv_devinfo | grep hca_id"]);
        require(o.ok() && o.text.starts_with("/run/unirdma-lib/libunirdma-preload.so\nhca_id"), o.text)?;
        let o = engine.run(&engine.vrnic("a")?, &["sh", "-c", "ls /etc/ld.so.preload; id -u"]);
        require(o.text.contains("cannot access"), o.text)
    });
    t.on(engine, "engines: a vRNIC is free when its container has ended, however it ended", |engine| {
        for (nr, killed) in ["the container", "its watcher", "podman"].into_iter().enumerate() {
            let name = format!("killed{nr}");
            let mut running = engine.spawn(&name, &engine.vrnic("a")?, &["sh", "-c", "echo begun; sleep 60"])?;
            wait_for(&running, "begun")?;
            let again = engine.run(&engine.vrnic("a")?, &["ibv_devinfo"]);
            require(!again.ok() && again.text.contains("unirdma: vRNIC a has a container already"), again.text)?;
            let (container, watcher) = engine.processes(&name)?;
            let kill = |pid: &str| Output::of(Command::new("kill").args(["-KILL", pid]));
            match killed {
                "podman" => {
                    running.kill();
                    engine.remove(&name);
                }
                "its watcher" => {
                    kill(&watcher.to_string());
                    // The container goes on, and has its vRNIC.
                    require(engine.podman.lab.show("a")?["attached"] == true, "the vRNIC is free")?;
                    kill(&container.to_string());
                }
                _ => drop(kill(&container.to_string())),
            }
            engine.is_free("a").map_err(|e| format!("{killed}: {e}"))?;
            engine.remove(&name);
        }
        Ok(())
    });
    t.on(engine, "engines: an image that cannot use our libraries is refused with a line", |engine| {
        let libraries = format!("usr/lib/{}-linux-gnu", std::env::consts::ARCH);
        let refused = |image: &str, why: &str| -> Check {
            let o = Output::of(&mut engine.command(image, &engine.vrnic("a")?, &["id"]));
            require(!o.ok() && o.text.contains(why), format!("{image}: {}", o.text))?;
            engine.is_free("a")
        };
        engine.image("old", |root| {
            let libc = root.join(&libraries).join("libc.so.6");
            let text = std::fs::read(&libc)?;
            let text = String::from_utf8_lossy(&text).replace("stable release version 2.", "stable release version 1.");
            std::fs::write(libc, text)
        })?;
        refused("old", "unirdma: the image has glibc 1.")?;
        engine.image("musl", |root| {
            std::fs::remove_file(root.join(&libraries).join("libc.so.6"))?;
            std::fs::write(root.join("lib/ld-musl-x86_64.so.1"), "")
        })?;
        refused("musl", "unirdma: the image is built on musl, and our libraries need glibc")?;
        engine.image("bare", |root| std::fs::remove_file(root.join(&libraries).join("libgcc_s.so.1")))?;
        refused("bare", "unirdma: the image has no libgcc_s.so.1")
    });
    t.on(engine, "engines: programs find our library wherever the image has its own", |engine| {
        let system = format!("usr/lib/{}-linux-gnu/libibverbs.so.1", std::env::consts::ARCH);
        engine.image("conda", |root| {
            let own = root.join("opt/conda/lib");
            std::fs::create_dir_all(&own)?;
            std::fs::copy(root.join(system), own.join("libibverbs.so.1")).map(drop)
        })?;
        let script = "LD_LIBRARY_PATH=/opt/conda/lib ibv_devinfo | grep hca_id; ibv_devinfo | grep hca_id";
        let o = Output::of(&mut engine.command("conda", &engine.vrnic("a")?, &["sh", "-c", script]));
        require(o.ok() && o.text == "hca_id:\tunirdma0\nhca_id:\tunirdma0\n", o.text)
    });
    t.on(engine, "engines: an image with links out of itself makes nothing on the host", |engine| {
        let trap = engine.podman.lab.dir.join("trap");
        std::fs::create_dir(&trap).map_err(failed("trap"))?;
        let to = |root: &Path, at: &str| {
            let at = root.join(at);
            let _ = std::fs::remove_dir_all(&at).or_else(|_| std::fs::remove_file(&at));
            if let Some(parent) = at.parent() {
                std::fs::create_dir_all(parent)?;
            }
            std::os::unix::fs::symlink(format!("/proc/1/root{}", trap.display()), at)
        };
        for (n, at) in ["run", "dev/infiniband", "etc", "usr/lib64", "run/unirdma", "opt"].into_iter().enumerate() {
            let name = format!("link{n}");
            engine.image(&name, |root| to(root, at))?;
            let option = engine.vrnic("a")?.replace("/vrnic=", "/vrnic-preload=");
            let o = Output::of(&mut engine.command(&name, &format!("--network none {option}"), &["ibv_devinfo"]));
            let made = std::fs::read_dir(&trap).map_err(failed("trap"))?.count();
            require(made == 0, format!("{at}: {made} files are made on the host: {}", o.text))?;
            engine.is_free("a")?;
        }
        Ok(())
    });
    t.on(engine, "engines: nothing is mounted on a host whose mounts are shared", |engine| {
        // As systemd shares them.
        let mut c = engine.podman.command("unshare");
        c.args([
            "--mount",
            "--propagation",
            "shared",
            "sh",
            "-c",
            "podman run --rm $*; cat /proc/self/mountinfo",
            "sh",
        ]);
        let o = Output::of(c.args(engine.vrnic("a")?.split(' ')).args([IMAGE, "ibv_devinfo"]));
        require(o.ok() && o.text.contains("unirdma0") && !o.text.contains("libibverbs"), o.text)
    });
    t.on(engine, "engines: files come and go with the vRNICs and the virtual layer", |engine| {
        let names = || {
            let all = std::fs::read_dir(devices()).into_iter().flatten().flatten();
            let mut all: Vec<_> = all.map(|e| e.file_name().to_string_lossy().into_owned()).collect();
            all.sort();
            all
        };
        let file = |what: &str| format!("unirdma.io-{what}.json");
        let lab = &engine.podman.lab;
        require(
            ["vrnic=a", "vrnic-preload=a", "group=other", "group-eth0=other"]
                .iter()
                .all(|f| names().contains(&file(f))),
            format!("{:?}", names()),
        )?;
        let before = names();
        lab.vrnic("d", &[])?;
        require(names().contains(&file("vrnic=d")), format!("{:?}", names()))?;
        require(lab.unirdma(&["vrnic", "rm", "d"]).ok() && names() == before, format!("{:?}", names()))?;
        let o = engine.run("--device unirdma.io/vrnic=d", &["id"]);
        require(!o.ok() && o.text.contains("unirdma.io/vrnic=d"), o.text)
    });
    t.on(engine, "engines: a container of LXC has the vRNIC of its configuration", |engine| {
        let lab = &engine.podman.lab;
        let containers = lab.dir.join("lxc");
        let (root, config) = (containers.join("c/rootfs"), containers.join("c/config"));
        std::fs::create_dir_all(containers.join("c")).map_err(failed("lxc"))?;
        let o = Output::of(Command::new("cp").arg("-a").arg(engine.podman.image()?).arg(&root));
        require(o.ok(), o.text)?;
        for dir in ["proc", "sys", "dev", "run"] {
            std::fs::create_dir(root.join(dir)).map_err(failed(dir))?;
        }
        let lines = format!(
            "lxc.rootfs.path = dir:{}\nlxc.uts.name = c\nlxc.net.0.type = empty\nlxc.console.path = none\nlxc.mount.auto = proc:mixed sys:mixed\n\
             lxc.apparmor.profile = unconfined\n{}",
            root.display(),
            lab.unirdma(&["vrnic", "show", "a", "--lxc"]).text
        );
        std::fs::write(&config, lines).map_err(failed("config"))?;
        let mut c = Command::new("lxc-start");
        c.arg("-P").arg(&containers).args(["-n", "c", "-F", "-o"]).arg(containers.join("log")).args(["--", "sh", "-c", SHOWS]);
        let o = Output::of(&mut c);
        let log = std::fs::read_to_string(containers.join("log")).unwrap_or_default();
        require(o.ok() && o.text.starts_with(SHOWN), format!("{}{log}", o.text))?;
        engine.is_free("a")
    });
    t.test("engines: a hook that cannot do its work says why in a line", || {
        let lab = Lab::start(None)?;
        let host = &lab.dir.join("run");
        let hook = |dir: &Path, state: &str| {
            let script =
                format!("echo '{state}' | {} --dir {} cdi hook unirdma.io/vrnic=a", lab.exe().display(), dir.display());
            Output::of(Command::new("sh").args(["-c", &script]))
        };
        let says = |o: Output, text: &str| {
            require(o.code == Some(1) && o.text.contains(text) && o.text.lines().count() == 1, o.text)
        };
        says(hook(host, ""), "unirdma: standard input is not a container's state")?;
        says(hook(host, r#"{"bundle": "/nowhere"}"#), "unirdma: cannot read /nowhere/config.json: No such file")?;
        let config = lab.dir.join("config.json");
        std::fs::write(&config, r#"{"root": {"path": "/nowhere"}}"#).map_err(failed("config.json"))?;
        let state = format!(r#"{{"pid": {}, "bundle": "{}"}}"#, std::process::id(), lab.dir.display());
        says(hook(host, &state), "unirdma: there is no vRNIC a")?;
        lab.vrnic("a", &[])?;
        says(hook(host, &state), "unirdma: cannot find the image at /nowhere: No such file")?;
        says(hook(Path::new("/nowhere"), &state), "unirdma: no virtual layer")?;
        std::fs::write(&config, "{}").map_err(failed("config.json"))?;
        says(hook(host, &state), "config.json is not a container's configuration: missing field `root`")
    });
}
