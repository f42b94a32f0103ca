//! Programs that bring a libibverbs of their own, by each way in which a loader finds one, or that have lost their
//! environment: they find the vRNIC. So do programs that ask the kernel for RDMA devices.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::support::*;

/// How a program comes to its libibverbs, and its command line. `LIB` is the path that the loader's cache has.
const WAYS: &[(&str, &str)] = &[
    ("the system's library", "./plain"),
    ("an own library by RUNPATH", "./runpath"),
    ("an own library by RPATH", "./rpath"),
    ("an own library under another name", "./renamed"),
    ("the system's library by dlopen of its path", "./opens LIB"),
    ("the system's library in a namespace of its own", "./opens new libibverbs.so.1"),
    ("no environment", "env -i ./plain"),
    ("a package of Python", "python3 -c 'import ctypes; print(ctypes.CDLL(\"./native.so\").devices())'"),
    (
        "a package of Python without an environment",
        "env -i python3 -c 'import ctypes; print(ctypes.CDLL(\"./native.so\").devices())'",
    ),
];

/// Compiles one of our C programs in `dir`.
fn compile(dir: &Path, source: &str, exe: &str, args: &[&str]) -> Check {
    let source = harness::root().join(format!("tests/c/{source}.c"));
    let mut gcc = Command::new("gcc");
    let o = Output::of(gcc.current_dir(dir).args(["-O1", "-o", exe]).arg(source).args(args));
    require(o.ok(), format!("{exe}: {}", o.text))
}

/// Makes programs with libraries of their own.
fn programs(lab: &Lab) -> Result<PathBuf> {
    let dir = lab.dir.join("programs");
    for part in ["own", "other"] {
        std::fs::create_dir_all(dir.join(part)).map_err(failed(part))?;
    }
    std::fs::write(dir.join("map"), "IBVERBS_1.1 { global: ibv_*; local: *; };\n").map_err(failed("map"))?;
    // Names as tools that put libraries into packages make them.
    for file in ["own/libibverbs.so.1", "other/libibverbs-1a2b3c4d.so.1"] {
        let name = format!("-Wl,-soname,{}", file.split_once('/').unwrap_or_default().1);
        compile(&dir, "no-devices", file, &["-shared", "-fPIC", "-Wl,--version-script=map", &name])?;
    }
    compile(&dir, "devices", "plain", &["-libverbs"])?;
    compile(&dir, "devices", "opens", &["-DOPEN_ONLY"])?;
    let path = |sub: &str, kind: &str| format!("-Wl,--{kind}-new-dtags,-rpath,{}/{sub}", dir.display());
    compile(&dir, "devices", "runpath", &["own/libibverbs.so.1", &path("own", "enable")])?;
    compile(&dir, "devices", "rpath", &["own/libibverbs.so.1", &path("own", "disable")])?;
    let renamed = "other/libibverbs-1a2b3c4d.so.1";
    compile(&dir, "devices", "renamed", &[renamed, &path("other", "enable")])?;
    let native = ["-shared", "-fPIC", "-DNATIVE", renamed, &path("other", "enable")];
    compile(&dir, "devices", "native.so", &native)?;
    Ok(dir)
}

/// Runs a shell command in a container, in the directory of the programs.
fn run(lab: &Lab, dir: &Path, options: &[&str], command: &str) -> Output {
    let command = format!("cd {} && {command}", dir.display());
    let bind = format!("{}:ro", dir.display());
    lab.unirdma(&[&["run", "--vrnic", "a", "--bind", &bind], options, &["--", "sh", "-c", &command]].concat())
}

fn finds(lab: &Lab, dir: &Path, what: &str, command: &str) -> Check {
    let o = run(lab, dir, &[], command);
    require(o.ok() && o.text == "1\n", format!("{what}: {:?} {}", o.code, o.text))
}

/// A socket of NETLINK_RDMA, then another file with its descriptor, by which a message goes as it should.
const REUSE: &str = "import socket; rdma = socket.socket(16, 3, 20); fd = rdma.fileno(); rdma.bind((0, 0)); \
    rdma.close(); a, b = socket.socketpair(); print(fd in (a.fileno(), b.fileno())); \
    a.send(b'1'); a.sendmsg([b'2', b'3']); b.sendall(b'4'); print(b.recv(3), a.recv(1))";

pub(crate) fn tests(t: &mut Tests) {
    t.topic(&[packages::RUN, packages::LOADER]);
    for (who, user) in [("root", None), ("an ordinary user", Some(own_user()))] {
        t.test(format!("loader: programs of {who} find the vRNIC, whatever libibverbs they bring"), move || {
            let lab = Lab::start(user)?;
            lab.vrnic("a", &[])?;
            let dir = programs(&lab)?;
            let system = run(&lab, &dir, &[], "/sbin/ldconfig -p | awk '/libibverbs.so.1 /{print $NF; exit}'");
            for (what, command) in WAYS {
                finds(&lab, &dir, what, &command.replace("LIB", system.text.trim()))?;
            }
            if user.is_none() {
                finds(&lab, &dir, "a login shell", &format!("su - -c {}/plain", dir.display()))?;
            }
            let shadow = run(&lab, &dir, &[], "cat /etc/shadow");
            require(!shadow.ok() && shadow.text.contains("Permission denied"), "the overlay on /etc gives rights")?;
            let o = run(&lab, &dir, &["--no-preload"], "cat /etc/ld.so.preload; ./renamed");
            require(o.text.starts_with("0\n"), format!("--no-preload: {}", o.text))
        });
    }
    for (who, user) in [("root", None), ("an ordinary user", Some(own_user()))] {
        t.test(format!("loader: RDMA netlink is answered for programs of {who}"), move || {
            let lab = Lab::start(user)?;
            lab.vrnic("a", &[])?;
            let inside = |options: &[&str], command: &str| run(&lab, &lab.dir, options, command);
            let guid = inside(&[], "cat /sys/class/infiniband/unirdma0/node_guid").text.trim().to_string();
            let device = inside(&[], "rdma dev");
            require(device.text.starts_with("0: unirdma0: ") && device.text.contains(&guid), device.text)?;
            let link = inside(&[], "rdma link show unirdma0/1");
            let words = ["link unirdma0/1 ", "state ACTIVE", "netdev eth0"];
            require(words.iter().all(|w| link.text.contains(w)), link.text)?;
            let unknown = inside(&[], "rdma resource show qp");
            require(!unknown.ok() && unknown.text.contains("Operation not supported"), unknown.text)?;
            let reuse = inside(&[], &format!("python3 -c \"{REUSE}\""));
            require(reuse.text == "True\nb'123' b'4'\n", reuse.text)?;
            let bare = inside(&["--no-preload"], "rdma dev");
            require(!bare.ok() && bare.text.contains("Failed to open NETLINK_RDMA socket"), bare.text)
        });
    }
    t.test("loader: a program that has nothing to do with RDMA does not notice", || {
        let lab = Lab::start(Some(own_user()))?;
        lab.vrnic("a", &[])?;
        let all = "ls /proc/self/fd; grep -e Threads -e Sig /proc/self/status; stat -c '%A %u %g' /etc; ls /etc";
        let looks = |options: &[&str]| {
            let o = run(&lab, &lab.dir, options, all);
            let lines = o.text.lines().filter(|l| *l != "ld.so.preload");
            (o.ok(), lines.map(String::from).collect::<Vec<_>>())
        };
        let (with, without) = (looks(&[]), looks(&["--no-preload"]));
        require(with.0 && with == without, format!("{with:?}\n{without:?}"))?;
        let o = run(&lab, &lab.dir, &[], "grep -c -e libibverbs -e libgcc /proc/self/maps");
        require(o.text == "0\n", format!("it has loaded more than the one library: {}", o.text))
    });
    t.test("loader: a program that looks for a device where there is none is told why", || {
        let lab = Lab::start(Some(own_user()))?;
        lab.vrnic("a", &[])?;
        let looks = |options: &[&str], setting: &str| run(&lab, &lab.dir, options, &format!("{setting} ibv_devices"));
        let nowhere = looks(&[], "UNIRDMA_DIR=/run/nowhere").text;
        let line = "unirdma: no RDMA device: cannot connect to /run/nowhere/vhost.sock: No such file or directory; \
            UNIRDMA_DIR must name a vRNIC's directory (unirdma vrnic show), and its virtual layer must run\n";
        require(nowhere.contains(line), nowhere)?;
        let closed = looks(&[], "mkdir -m 0 /tmp/closed; UNIRDMA_DIR=/tmp/closed").text;
        require(closed.contains("/tmp/closed/vhost.sock: Permission denied; this user may not open it\n"), closed)?;
        let found = looks(&[], "").text;
        require(found.contains("unirdma0") && !found.contains("unirdma: "), found)?;
        // Like a machine without RDMA, if nothing says that there should be a device.
        let library = lab.exe().with_file_name("dropin");
        let mut plain = Command::new("ibv_devices");
        let plain = Output::of(plain.env("LD_LIBRARY_PATH", library).env_remove("UNIRDMA_DIR"));
        require(!plain.text.contains("unirdma: ") || Path::new("/run/unirdma/vhost.sock").exists(), plain.text)
    });
    t.test("check: a program with a libibverbs of its own is served with the preload, and not without", || {
        let lab = Lab::start(Some(own_user()))?;
        lab.vrnic("a", &[])?;
        let dir = programs(&lab)?;
        let none = lab.unirdma(&["check"]);
        refused(&none, "no vRNIC has a container; start one with `unirdma run -- CMD`")?;
        let script = "import ctypes, time; n = ctypes.CDLL('./native.so').devices(); print(n, 'devices', flush=True); \
            time.sleep(60)";
        let command = format!("cd {} && exec python3 -c \"{script}\"", dir.display());
        let bind = format!("{}:ro", dir.display());
        for (options, code, says) in [
            (&[][..], 0, "uniRDMA's; calls of "),
            (&["--no-preload"], 3, "which finds no vRNIC: preload libunirdma-preload.so"),
        ] {
            let all = [&["run", "--vrnic", "a", "--bind", &bind], options, &["--", "sh", "-c", &command]].concat();
            let mut program = lab.start_unirdma(&all)?;
            wait_for(&program, "devices")?;
            for args in [&["check"][..], &["check", "--vrnic", "a"]] {
                let o = lab.unirdma(args);
                let words = [
                    "python3",
                    "by RDMA",
                    "MTU",
                    "devices      unirdma0",
                    "by Ethernet",
                    "libibverbs-1a2b3c4d.so.1",
                    says,
                ];
                require(o.code == Some(code) && words.iter().all(|w| o.text.contains(w)), o.text)?;
            }
            let json: serde_json::Value =
                serde_json::from_str(&lab.unirdma(&["check", "--json"]).text).map_err(|e| e.to_string())?;
            let process = &json[0]["processes"][0];
            require(json[0]["vrnics"][0]["name"] == "a" && process["served"] == (code == 0), format!("{json}"))?;
            let pid = process["pid"].to_string();
            let one = lab.unirdma(&["check", &pid]);
            require(one.code == Some(code) && one.text.contains(says) && one.text.contains("vRNIC"), one.text)?;
            let inside = lab.unirdma(&["exec", "--vrnic", "a", "--", &lab.exe().display().to_string(), "check"]);
            require(inside.code == Some(code) && inside.text.contains(says), inside.text)?;
            program.kill();
            program.finish();
        }
        refused(&lab.unirdma(&["check", "2147483647"]), "there is no process 2147483647")?;
        refused(&lab.unirdma(&["check", "--vrnic", "a"]), "vRNIC a has no container")?;
        refused(&lab.unirdma(&["check", "1"]), "process 1 is not this user's")
    });
    t.test("loader: a program that cannot be served says so", || {
        let lab = Lab::start(Some(own_user()))?;
        lab.vrnic("a", &[])?;
        let dir = programs(&lab)?;
        let source = "int main(void) { return __builtin_puts(\"libibverbs of the program itself\") < 0; }\n";
        std::fs::write(dir.join("static.c"), source).map_err(failed("static.c"))?;
        let gcc = Output::of(Command::new("gcc").current_dir(&dir).args(["-static", "-o", "static", "static.c"]));
        require(gcc.ok(), gcc.text)?;
        let exe = dir.join("static").display().to_string();
        let bind = format!("{}:ro", dir.display());
        let o = lab.unirdma(&["run", "--vrnic", "a", "--bind", &bind, "--", &exe]);
        require(o.text.contains("static will not find the vRNIC: it is linked statically"), o.text)?;
        let other = lab.unirdma(&["run", "--vrnic", "a", "--", "/sbin/ldconfig", "-p"]);
        require(!other.text.contains("unirdma: "), other.text)
    });
}
