//! Packages, installed and used as their users do.

use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::support::*;

/// The tests of a project that uses the fixtures.
const PROJECT: &str = "import subprocess\n\n\
    def test_a_pair_reaches_each_other(vrnic_pair):\n    a, b = vrnic_pair\n    \
    server = a.popen(['ib_write_bw', '-n', '100'], stderr=subprocess.PIPE)\n    \
    client = ['sh', '-c', f'until ib_write_bw -n 100 {a.address}; do sleep 0.1; done']\n    \
    b.run(client, check=True, timeout=60)\n    assert server.wait(20) == 0\n    \
    assert a.show()['counters']['received_bytes'] >= 100 * 65536\n\n\
    def test_a_container_has_the_device(vrnic):\n    \
    assert b'unirdma0' in vrnic.run(['ibv_devices'], capture_output=True, check=True).stdout\n    \
    vrnic.popen(['sleep', '4321'])\n";

/// An environment of Python with the package, and a project with tests. An ordinary user may read both.
struct Installed {
    dir: PathBuf,
}

impl Installed {
    fn new(lab: &Lab) -> Result<Installed> {
        let wheel = harness::package::wheel()?;
        let dir = lab.dir.join("installed");
        let venv = dir.join("venv");
        std::fs::create_dir_all(&dir).map_err(failed("the directory"))?;
        let mut python = Command::new("/usr/bin/python3");
        let made = Output::of(python.args(["-m", "venv", "--system-site-packages"]).arg(&venv));
        require(made.ok(), made.text)?;
        let mut pip = Command::new(venv.join("bin/pip"));
        let o = Output::of(pip.args(["install", "--quiet", "--no-index", "--disable-pip-version-check"]).arg(wheel));
        require(o.ok(), o.text)?;
        std::fs::create_dir_all(dir.join("project")).map_err(failed("project"))?;
        std::fs::write(dir.join("project/test_rdma.py"), PROJECT).map_err(failed("project"))?;
        Ok(Installed { dir })
    }

    /// Runs a shell command in the project's directory with the package in PATH, as this user.
    fn shell(&self, user: Option<u32>, home: &Path, script: &str) -> Output {
        let mut c = Command::new("setpriv");
        if let Some(id) = user {
            c.args([format!("--reuid={id}"), format!("--regid={id}"), "--clear-groups".into()]);
        }
        let path = format!("{}:/usr/bin:/bin:/usr/sbin:/sbin", self.dir.join("venv/bin").display());
        c.args(["sh", "-c", script]).env("PATH", path).env("HOME", home).env_remove("XDG_RUNTIME_DIR");
        Output::of(c.env_remove("XDG_CACHE_HOME").env_remove("UNIRDMA_HOST_DIR").current_dir(self.dir.join("project")))
    }
}

/// What our packages depend on, or the tests use.
const FOR_PACKAGES: &str = "ibverbs-utils,mount,passwd,systemd-standalone-sysusers";
/// What a project in Python has that uses RDMA. Nothing of it is for building.
const FOR_PYTHON: &str = "ibverbs-utils,mount,perftest,python3-pytest,python3-venv";

/// Runs a script as the first process of a Debian with these packages, which has the files in /mnt. All that it makes
/// ends with it.
fn in_debian(lab: &Lab, root: &Path, files: &[PathBuf], script: &str) -> Result<Output> {
    let own = lab.dir.join("debian");
    std::fs::create_dir_all(&own).map_err(failed("the directory"))?;
    let steps = lab.dir.join("steps");
    std::fs::write(&steps, script).map_err(failed("the steps"))?;
    let files: Vec<String> = files.iter().chain([&steps]).map(|f| f.display().to_string()).collect();
    let enter = format!(
        "set -e; mount -t tmpfs tmpfs {own}; cd {own}; cp {files} .; mkdir up work root; \
         mount -t overlay -o lowerdir={root},upperdir=up,workdir=work overlay root; cd root; \
         mount -t proc proc proc; mount --rbind /dev dev; mount --rbind /sys sys; mount -t tmpfs tmpfs run; \
         mount --bind .. mnt; pivot_root . .; umount -l .; cd /; exec sh /mnt/steps",
        own = own.display(),
        files = files.join(" "),
        root = root.display(),
    );
    let mut c = Command::new("unshare");
    Ok(Output::of(c.args(["--mount", "--pid", "--fork", "--kill-child", "sh", "-c", &enter])))
}

/// Installs Debian's packages. Ends at the first command that fails.
const IN_DEBIAN: &str = r#"set -eu
export PATH=/usr/sbin:/usr/bin:/sbin:/bin DEBIAN_FRONTEND=noninteractive
files() { find / -xdev ! -path '/var/lib/dpkg/*' ! -path '/var/log/*' ! -path '/etc/*-' ! -path '/tmp/*' | sort; }
files >/tmp/before
here="/mnt/unirdma_*.deb /mnt/unirdma-libs_*.deb /mnt/unirdma-control_*.deb /mnt/unirdma-provider_*.deb"
dpkg --install $here
unirdma --version
unirdma with 2 -q -- ibv_devices
echo 'admin-group = "unirdma"' >>/etc/unirdma/host.toml
unirdma --dir /tmp/none host --admin-group nobodys 2>&1 | grep 'there is no group of users "nobodys"'
unirdma host --config /etc/unirdma/host.toml --polling shared &
host=$!
until unirdma status >/tmp/status 2>/dev/null; do kill -0 $host; sleep 0.1; done
grep 'user (unirdma, uid' /tmp/status
unirdma vrnic add a -q
as() { setpriv --reuid 65534 --regid 65534 --groups "$1" unirdma --dir /run/unirdma vrnic ls -q; }
echo "the group sees: $(as unirdma)"
as 65534 2>&1 || echo "others see nothing"
dpkg --install $here
kill -0 $host
unirdma vrnic ls -q
kill $host
wait $host
dpkg --purge unirdma unirdma-libs unirdma-control unirdma-provider
files >/tmp/after
diff /tmp/before /tmp/after
for left in "test -e /run/unirdma" "getent passwd unirdma unirdma-control" "getent group unirdma"
do
    if $left; then echo "$left"; exit 1; fi
done
echo "nothing is left"
"#;

/// Installs the package for pip, and uses it as root and as another user. Ends at the first command that fails.
const IN_PYTHON: &str = r#"set -eu
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
for builder in cargo rustc cc; do if command -v $builder; then exit 1; fi; done
echo 127.0.0.1 localhost >/etc/hosts
python3 -m venv --system-site-packages /opt/tests
/opt/tests/bin/pip install --quiet --no-index --disable-pip-version-check /mnt/unirdma-*.whl
export PATH=/opt/tests/bin:$PATH
for user in 0 65534
do
    home=/home/$user
    mkdir $home
    chown $user $home
    as() { setpriv --reuid $user --regid $user --clear-groups env HOME=$home "$@"; }
    echo "begin of $user"
    as sh -e /mnt/lines
    as sh -c 'cd /mnt && unirdma with 2 -q -- python -B -m pytest -q -p no:cacheprovider test_rdma.py'
    echo "end of $user"
done
if find /tmp /run -mindepth 1 | grep .; then exit 1; fi
echo "nothing is left"
"#;

/// The first lines of the page for users' own tests.
fn documented_lines() -> Result<String> {
    let page = "docs/user/ci.md";
    let text = std::fs::read_to_string(harness::root().join(page)).map_err(failed(page))?;
    let lines = text.split("```sh\n").nth(1).and_then(|block| block.split("```").next());
    lines.map(String::from).ok_or_else(|| format!("{page} has no lines for a shell"))
}

pub(crate) fn tests(t: &mut Tests) {
    t.topic(&[packages::RUN, packages::PACKAGE]);
    t.test("package: Python's pip installs the program and the fixtures, for root and for an ordinary user", || {
        let lab = Lab::start(Some(own_user()))?;
        let installed = Installed::new(&lab)?;
        let home = lab.dir.join("home");
        std::fs::create_dir_all(&home).map_err(failed("home"))?;
        std::os::unix::fs::chown(&home, Some(own_user()), Some(own_user())).map_err(failed("home"))?;
        for user in [None, Some(own_user())] {
            let shell = |script: &str| installed.shell(user, &home, script);
            let o = shell("unirdma with 2 -q -- ibv_devices && unirdma with 1 -q --bare -- ibv_devices");
            require(o.ok() && o.text.matches("unirdma0").count() == 2, o.text)?;
            for begin in ["", "unirdma with 1 -q -- "] {
                let o = shell(&format!("{begin}python -m pytest -q -p no:cacheprovider"));
                require(o.ok() && o.text.contains("2 passed") && !o.text.contains("ERROR"), o.text)?;
                let left = Output::of(Command::new("pgrep").args(["-f", "^sleep 4321"]));
                require(!left.ok(), format!("a process is left: {}", left.text))?;
            }
        }
        let cache = home.join(".cache/unirdma");
        let kept = std::fs::read_dir(&cache).map_err(failed("the cache"))?.count();
        require(kept == 1, format!("{kept} names in {}", cache.display()))?;
        // Where a user has no directory for the libraries.
        let o = installed.shell(Some(own_user()), &home, "env -u HOME unirdma with 1 -- true");
        refused(&o, "unirdma: set HOME, or name the libraries' directory in UNIRDMA_LIBDIR")
    });
    t.test("package: the GitHub action starts a virtual layer for the steps that follow", || {
        let lab = Lab::start(Some(own_user()))?;
        let temporary = lab.dir.join("temporary");
        let (path, variables) = (temporary.join("path"), temporary.join("variables"));
        std::fs::create_dir_all(&temporary).map_err(failed("the directory"))?;
        let wheel = harness::package::wheel()?;
        let action = |vrnics: &str| {
            let mut c = Command::new("setpriv");
            let id = own_user();
            c.args([format!("--reuid={id}"), format!("--regid={id}"), "--clear-groups".into(), "bash".into()]);
            c.arg(harness::root().join("packaging/github/start.sh")).env("RUNNER_TEMP", &temporary);
            c.env("GITHUB_PATH", &path).env("GITHUB_ENV", &variables).env("HOME", &temporary).env("VRNICS", vrnics);
            Output::of(c.env("PACKAGE", &wheel).env("PATH", "/usr/bin:/bin:/usr/sbin:/sbin"))
        };
        std::os::unix::fs::chown(&temporary, Some(own_user()), Some(own_user())).map_err(failed("the directory"))?;
        refused(&action("two"), "vrnics: `two` is not a number")?;
        let o = action("2");
        require(o.ok(), o.text)?;
        let read = |file: &Path| std::fs::read_to_string(file).map_err(failed("what the action has written"));
        let (path, variables) = (read(&path)?, read(&variables)?);
        let script = format!(
            "PATH={}:$PATH; export {}; unirdma vrnic ls -q | xargs; unirdma run --vrnic v2 -- ibv_devices; \
             kill $(unirdma status --json | sed -n 's/.*\"pid\": \\([0-9]*\\),/\\1/p' | head -n 1)",
            path.trim(),
            variables.trim()
        );
        let mut step = Command::new("setpriv");
        let id = own_user().to_string();
        step.args(["--reuid", &id, "--regid", &id, "--clear-groups", "sh", "-c", &script]).env("HOME", &temporary);
        let o = Output::of(&mut step);
        require(o.ok() && o.text.starts_with("v1 v2\n") && o.text.contains("unirdma0"), o.text)
    });
    t.test("package: a service manager is told when the host is ready, that it lives, and that it ends", || {
        let lab = Lab::start(Some(own_user()))?;
        let address = lab.dir.join("notify");
        let socket = UnixDatagram::bind(&address).map_err(failed("the socket"))?;
        socket.set_read_timeout(Some(Duration::from_secs(10))).map_err(failed("the socket"))?;
        let next = || -> Result<String> {
            let mut text = [0; 512];
            let length = socket.recv(&mut text).map_err(failed("a message of the host"))?;
            Ok(String::from_utf8_lossy(&text[..length]).into_owned())
        };
        let own = lab.dir.join("service");
        let host = |more: &[&str]| {
            let mut c = Command::new(harness::unirdma());
            c.arg("--dir").arg(&own).args(["host", "--polling", "shared"]).args(more);
            c.env("NOTIFY_SOCKET", &address).env("WATCHDOG_USEC", "200000");
            Running::start(c, &lab.dir.join("service.log"))
        };
        let service = host(&[])?;
        let ready = next()?;
        require(ready.contains("READY=1") && ready.contains("STATUS=Serving 0 vRNICs in 1 group"), ready)?;
        let mut client = Command::new(harness::unirdma());
        let o = Output::of(client.arg("--dir").arg(&own).args(["vrnic", "add", "a", "-q"]));
        require(o.ok(), o.text)?;
        // The third sign of life comes after more than the watchdog's time, and the vRNIC is there by then.
        let mut alive = String::new();
        for _ in 0..3 {
            alive = next()?;
            require(alive.contains("WATCHDOG=1"), alive.clone())?;
        }
        require(alive.contains("STATUS=Serving 1 vRNIC in 1 group"), alive)?;
        service.interrupt();
        let mut last = next()?;
        while last.contains("WATCHDOG=1") {
            last = next()?;
        }
        require(last.contains("STOPPING=1"), last)?;
        let o = service.finish();
        require(o.ok(), o.text)?;
        // One that a command starts is no service.
        let service = host(&["--ends-unused"])?;
        soon(|| own.join("admin.sock").exists(), "the host does not answer")?;
        service.interrupt();
        require(service.finish().ok(), "it did not end well")?;
        socket.set_nonblocking(true).map_err(failed("the socket"))?;
        require(next().is_err(), "a host that is no service has said something")
    });
    python(t);
    debian(t);
}

fn python(t: &mut Tests) {
    t.topic(&[packages::PACKAGE, packages::RELEASES]);
    t.need_root("the root directory of a Debian needs root");
    t.test("package: on a Debian without Rust, pip installs it and the documented lines work", || {
        let lab = Lab::start(None)?;
        let root = harness::package::bare_debian("python", FOR_PYTHON)?;
        let (lines, project) = (lab.dir.join("lines"), lab.dir.join("test_rdma.py"));
        std::fs::write(&lines, documented_lines()?).map_err(failed("the lines"))?;
        std::fs::write(&project, PROJECT).map_err(failed("the project"))?;
        let o = in_debian(&lab, &root, &[harness::package::wheel()?, lines, project], IN_PYTHON)?;
        require(o.ok() && o.text.contains("nothing is left") && !o.text.contains("ERROR"), &*o.text)?;
        for user in ["0", "65534"] {
            let part = o.text.split(&format!("begin of {user}\n")).nth(1).unwrap_or_default();
            let part = part.split(&format!("end of {user}\n")).next().unwrap_or_default();
            let expected = [" 65536 ", "hca_id:\tunirdma0", "PORT_ACTIVE", "2 passed"];
            require(expected.iter().all(|e| part.contains(e)), &*o.text)?;
        }
        Ok(())
    });
}

fn debian(t: &mut Tests) {
    t.topic(&[packages::RUN, packages::DEB, packages::RELEASES]);
    t.need_root("only root can install packages of Debian");
    t.test("package: Debian's packages install without Rust, an upgrade ends nothing, purge leaves nothing", || {
        let lab = Lab::start(None)?;
        let debs = harness::package::deb()?;
        let root = harness::package::bare_debian("bare", FOR_PACKAGES)?;
        let names: Vec<_> = debs.iter().filter_map(|d| d.file_name()?.to_str()?.split('_').next()).collect();
        require(
            names == ["unirdma-control", "unirdma-dkms", "unirdma-libs", "unirdma-provider", "unirdma"],
            names.join(" "),
        )?;
        let dkms = Output::of(Command::new("dpkg-deb").arg("--contents").arg(&debs[1]));
        for file in ["dkms.conf", "main.c", "probe/baseline.c"] {
            require(dkms.text.contains(&format!("/usr/src/unirdma_rdma-0.1.0/{file}")), dkms.text.clone())?;
        }
        let o = in_debian(&lab, &root, &debs, IN_DEBIAN)?;
        let lines = ["the group sees: a", "others see nothing", "nothing is left"];
        require(o.ok() && lines.iter().all(|l| o.text.contains(l)) && o.text.contains("unirdma0"), o.text)
    });
}
