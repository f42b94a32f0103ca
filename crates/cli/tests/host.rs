//! Commands that ask a virtual layer, as scripts use them. No program uses its vRNICs.

use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// A virtual layer in a directory of its own, which ends when this is dropped.
struct Layer {
    dir: PathBuf,
    host: Child,
}

impl Layer {
    fn start() -> Layer {
        static COUNT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let n = COUNT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let dir = std::env::temp_dir().join(format!("unirdma-commands-{}-{n}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        let host = Layer::host(&dir);
        let layer = Layer { dir, host };
        layer.wait_up();
        layer
    }

    fn host(dir: &std::path::Path) -> Child {
        let log = std::fs::File::create(dir.join("host.log")).unwrap();
        let mut c = Command::new(env!("CARGO_BIN_EXE_unirdma"));
        c.arg("--dir").arg(dir.join("run")).arg("host").stdin(Stdio::null()).stderr(log).spawn().unwrap()
    }

    fn wait_up(&self) {
        let end = Instant::now() + Duration::from_secs(20);
        while !self.run(&["status"]).status.success() {
            let log = std::fs::read_to_string(self.dir.join("host.log")).unwrap();
            assert!(Instant::now() < end, "the virtual layer does not start: {log}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut c = Command::new(env!("CARGO_BIN_EXE_unirdma"));
        c.arg("--dir").arg(self.dir.join("run")).args(args).stdout(Stdio::piped()).stderr(Stdio::piped());
        c
    }

    fn run(&self, args: &[&str]) -> Output {
        self.command(args).output().unwrap()
    }

    fn ok(&self, args: &[&str]) -> String {
        let done = self.run(args);
        assert!(done.status.success(), "{args:?}: {done:?}");
        String::from_utf8(done.stdout).unwrap()
    }

    /// Starts `vrnic wait`. Returns when it is connected.
    fn waits(&self, args: &[&str]) -> Child {
        let child = self.command(&[&["vrnic", "wait"], args].concat()).spawn().unwrap();
        let fds = format!("/proc/{}/fd", child.id());
        let is_socket = |link: PathBuf| link.to_string_lossy().starts_with("socket:");
        let is_connected = || {
            let links = std::fs::read_dir(&fds).into_iter().flatten().flatten();
            links.filter_map(|fd| std::fs::read_link(fd.path()).ok()).any(is_socket)
        };
        let end = Instant::now() + Duration::from_secs(20);
        while !is_connected() {
            assert!(Instant::now() < end, "vrnic wait does not connect");
            std::thread::sleep(Duration::from_millis(5));
        }
        child
    }
}

impl Drop for Layer {
    fn drop(&mut self) {
        if let Some(pid) = rustix::process::Pid::from_raw(self.host.id().cast_signed()) {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        }
        let _ = self.host.wait();
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

fn ended_well(child: Child) -> bool {
    let done = child.wait_with_output().unwrap();
    done.status.success() && done.stdout.is_empty() && done.stderr.is_empty()
}

#[test]
fn vrnics_are_waited_for() {
    let layer = Layer::start();
    let both = layer.waits(&["a", "b", "--up", "--free"]);
    layer.ok(&["vrnic", "add", "a"]);
    let only_one = layer.run(&["vrnic", "wait", "a", "b", "--timeout", "200ms"]);
    let text = String::from_utf8(only_one.stderr).unwrap();
    assert_eq!(only_one.status.code(), Some(3));
    assert_eq!(text, "unirdma: vRNIC b, after 200ms: it does not exist; `unirdma vrnic ls` lists those that do\n");
    layer.ok(&["vrnic", "add", "b"]);
    assert!(ended_well(both));

    let down = layer.waits(&["a", "--down"]);
    let open = layer.run(&["vrnic", "wait", "a", "--open", "--json", "--timeout", "0"]);
    assert_eq!(open.status.code(), Some(3));
    let shown: serde_json::Value = serde_json::from_slice(&open.stdout).unwrap();
    let wanted = serde_json::json!([{
        "name": "a", "reached": false, "exists": true, "up": true, "attached": false, "container": false, "open": false,
        "listening": false, "free": true, "lacks": ["no program has opened it"],
    }]);
    assert_eq!(shown, wanted);
    layer.ok(&["vrnic", "link", "a", "down"]);
    assert!(ended_well(down));

    let gone = layer.waits(&["a", "b", "--gone", "--timeout", "none"]);
    layer.ok(&["vrnic", "rm", "a", "b"]);
    assert!(ended_well(gone));
}

#[test]
fn a_virtual_layer_that_is_started_again_is_waited_for() {
    let mut layer = Layer::start();
    let waits = layer.waits(&["later"]);
    layer.host.kill().unwrap();
    layer.host.wait().unwrap();
    layer.host = Layer::host(&layer.dir);
    layer.wait_up();
    layer.ok(&["vrnic", "add", "later"]);
    assert!(ended_well(waits));
}

#[test]
fn a_virtual_layer_that_ends_is_an_error() {
    let layer = Layer::start();
    let waits = layer.waits(&["never", "--timeout", "3"]);
    drop(layer);
    let done = waits.wait_with_output().unwrap();
    let text = String::from_utf8(done.stderr).unwrap();
    assert!(done.status.code() == Some(1) && text.contains("no virtual layer answers in"), "{text}");
}

/// Compares JSON with a file of `tests/golden`, which `OVERWRITE=1 cargo test -p unirdma-cli --test host` writes anew.
/// Values that differ from machine to machine are left out: the objects at `varies`, such as `dir` or `held/kept`.
fn is_golden(name: &str, printed: &str, varies: &[&str]) {
    let mut value: serde_json::Value = serde_json::from_str(printed).unwrap();
    let objects = match &mut value {
        serde_json::Value::Array(all) => all.iter_mut().collect(),
        one => vec![one],
    };
    for object in objects {
        for path in varies {
            *object.pointer_mut(&format!("/{path}")).unwrap_or_else(|| panic!("{name} has no {path}")) =
                "varies".into();
        }
    }
    let file = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(format!("{name}.json"));
    let text = serde_json::to_string_pretty(&value).unwrap() + "\n";
    if std::env::var_os("OVERWRITE").is_some() {
        std::fs::write(&file, &text).unwrap();
    }
    let golden = std::fs::read_to_string(&file).unwrap_or_default();
    assert!(golden == text, "{} is not what is printed:\n{text}", file.display());
}

#[test]
fn json_stays_as_it_is() {
    const VARIES: [&str; 5] = ["dir", "mac", "guid", "busy_ns", "held"];
    let layer = Layer::start();
    layer.ok(&["group", "add", "blue", "--weight", "200"]);
    let add = ["vrnic", "add", "a", "--ip", "10.0.0.1/16", "--group", "blue", "--rate", "10G"];
    is_golden("vrnic", &layer.ok(&[&add[..], &["--json"]].concat()), &VARIES);
    let text = layer.ok(&["vrnic", "add", "b", "--ip", "10.0.0.2"]);
    assert_eq!(text.lines().count(), 1, "{text}");
    is_golden("vrnic", &layer.ok(&["vrnic", "show", "a", "--json"]), &VARIES);
    is_golden("vrnics", &layer.ok(&["vrnic", "ls", "--json"]), &VARIES);
    is_golden("vrnics", &layer.ok(&["vrnic", "show", "--json"]), &VARIES);
    assert_eq!(layer.ok(&["vrnic", "ls", "--group", "blue", "-q"]), "a\n");
    assert_eq!(layer.ok(&["vrnic", "ls", "--group", "default", "-q"]), "b\n");
    let unknown = layer.run(&["vrnic", "ls", "--group", "x"]);
    let text = String::from_utf8(unknown.stderr).unwrap();
    assert!(unknown.status.code() == Some(1) && text.contains("no group x (there are: blue, default)"), "{text}");
    is_golden("groups", &layer.ok(&["group", "ls", "--json"]), &["weight_lacks"]);
    let of_workers =
        |n: u32| ["pid", "memory", "confinement", "rnic_held"].map(|field| format!("workers/{n}/{field}")).to_vec();
    let varies: Vec<String> = [of_workers(0), of_workers(1)].concat();
    let varies: Vec<&str> = ["pid", "version", "dir", "confinement", "rnic_held"]
        .into_iter()
        .chain(varies.iter().map(String::as_str))
        .collect();
    is_golden("status", &layer.ok(&["status", "--json"]), &varies);
    is_golden("rules", &layer.ok(&["rule", "ls", "--json"]), &[]);
    is_golden("top", &layer.ok(&["top", "--json", "-d", "0.2"]), &["interval_seconds"]);
    is_golden("wait", &layer.ok(&["vrnic", "wait", "a", "b", "--up", "--json"]), &[]);
}

/// The words that a shell is offered for the last of these words.
fn candidates(dir: &std::path::Path, words: &[&str]) -> Vec<String> {
    let mut c = Command::new(env!("CARGO_BIN_EXE_unirdma"));
    c.env("UNIRDMA_COMPLETE", "bash").env("_CLAP_IFS", "\n").env("_CLAP_COMPLETE_INDEX", words.len().to_string());
    let done = c.args(["--", "unirdma"]).args(words).env("UNIRDMA_HOST_DIR", dir).output().unwrap();
    assert!(done.status.success() && done.stderr.is_empty(), "{words:?}: {done:?}");
    let text = String::from_utf8(done.stdout).unwrap();
    text.lines().filter(|word| !word.starts_with('-')).map(String::from).collect()
}

#[test]
fn names_and_programs_complete() {
    let layer = Layer::start();
    layer.ok(&["vrnic", "add", "first"]);
    layer.ok(&["vrnic", "add", "second"]);
    layer.ok(&["group", "add", "blue"]);
    let dir = layer.dir.join("run");
    let offered = |words: &[&str]| candidates(&dir, words);
    assert_eq!(offered(&["vrnic", "show", ""]), ["first", "second"]);
    assert_eq!(offered(&["vrnic", "rm", "first", "se"]), ["second"]);
    assert_eq!(offered(&["vrnic", "link", "first", ""]), ["up", "down"]);
    assert_eq!(offered(&["group", "set", "b"]), ["blue"]);
    assert_eq!(offered(&["vrnic", "add", "x", "--group", ""]), ["blue", "default"]);
    assert_eq!(offered(&["run", "--vrnic", "f"]), ["first"]);
    assert_eq!(
        candidates("/nonexistent".as_ref(), &["--dir", dir.to_str().unwrap(), "run", "--vrnic", "f"]),
        ["first"]
    );
    assert!(offered(&["run", "--", "tim"]).contains(&"timeout".into()));
    assert!(!offered(&["run", "--", "ls", "tim"]).contains(&"timeout".into()));
}

#[test]
fn without_an_answer_nothing_is_offered() {
    let words = ["vrnic", "show", ""];
    assert!(candidates("/nonexistent".as_ref(), &words).is_empty());
    let dir = std::env::temp_dir().join(format!("unirdma-mute-{}", std::process::id()));
    std::fs::create_dir(&dir).unwrap();
    let mute = std::os::unix::net::UnixListener::bind(dir.join("admin.sock")).unwrap();
    let begin = Instant::now();
    let offered = candidates(&dir, &words);
    let took = begin.elapsed();
    std::fs::remove_dir_all(&dir).unwrap();
    assert!(offered.is_empty() && mute.accept().is_ok());
    assert!(took < Duration::from_secs(5), "{took:?}");
}
