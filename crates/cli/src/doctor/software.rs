//! Other software: container engines, libraries of Python environments; and uniRDMA's own libraries and virtual layer.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use unirdma_supervisor::Client;
use unirdma_supervisor::admin::{Request, Response, StatusInfo};

use super::Finding;
use super::machine::version;
use crate::check;
use crate::container::library_dir;
use crate::loader::PRELOAD;
use crate::vrnics::in_time;

/// Longest time for another program, and for an answer of the virtual layer.
const PATIENCE: Duration = Duration::from_secs(5);

pub(super) fn look(dir: &Path) -> Vec<Finding> {
    let mut all = Vec::new();
    all.extend(podman());
    all.extend(docker());
    all.extend(containerd());
    if all.is_empty() {
        all.push(Finding::ok("engines", "neither podman nor docker nor containerd is installed"));
    }
    all.extend(foreign_libraries());
    all.push(own_libraries());
    all.push(virtual_layer(dir));
    all
}

/// The output of another program.
pub(super) enum Told {
    Text(String),
    /// The first line of its error.
    Failed(String),
    /// It is not installed.
    Missing,
}

/// Runs a program, which should end at once.
pub(super) fn run(program: &str, args: &[&str]) -> Told {
    let path = std::env::var("PATH").unwrap_or_default();
    let mut c = Command::new(program);
    // The PATH of an ordinary user may lack directories of the system.
    c.args(args).env("PATH", format!("{path}:/usr/sbin:/sbin")).stdin(Stdio::null());
    let child = c.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let child = match child {
        Ok(child) => child,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Told::Missing,
        // Also if this user may not look into a directory of PATH, which then mostly has no such program.
        Err(e) if e.kind() == io::ErrorKind::PermissionDenied => {
            let visible = std::env::split_paths(&path).any(|dir| dir.join(program).exists());
            return if visible { Told::Failed("this user may not run it".into()) } else { Told::Missing };
        }
        Err(e) => return Told::Failed(e.to_string()),
    };
    let pid = child.id();
    match in_time(PATIENCE, move || child.wait_with_output()) {
        Some(Ok(done)) if done.status.success() => Told::Text(String::from_utf8_lossy(&done.stdout).into_owned()),
        Some(Ok(done)) => {
            let text = String::from_utf8_lossy(&done.stderr).into_owned();
            Told::Failed(text.lines().next().unwrap_or("it failed").to_owned())
        }
        Some(Err(e)) => Told::Failed(e.to_string()),
        None => {
            crate::process::terminate(pid);
            Told::Failed(format!("it has not ended within {PATIENCE:?}"))
        }
    }
}

/// The version of an engine, in words and as numbers.
type Version = (String, (u32, u32));

/// The version of an engine, or the finding that it has none; `None`: it is not installed.
fn engine(topic: &'static str, program: &str) -> Option<Result<Version, Finding>> {
    let text = match run(program, &["--version"]) {
        Told::Missing => return None,
        Told::Failed(why) => return Some(Err(unknown(topic, &why))),
        Told::Text(text) => text,
    };
    let found = text.split([' ', ',', '\n']).find_map(|word| Some((word.to_owned(), version(word)?)));
    Some(found.ok_or_else(|| unknown(topic, text.trim())))
}

fn unknown(topic: &'static str, said: &str) -> Finding {
    Finding::warning(topic, format!("its version is not known: {said}"), "see whether it works at all")
}

/// The remedy for an engine without CDI.
fn mounts(newer: &str) -> String {
    format!("use {newer}, or mount the vRNIC's directory and library (docs/user/podman.md)")
}

fn podman() -> Option<Finding> {
    const TOPIC: &str = "podman";
    Some(match engine(TOPIC, "podman")? {
        Err(finding) => finding,
        Ok((text, v)) if v >= (4, 1) => Finding::ok(TOPIC, format!("{text}, which takes devices by CDI")),
        Ok((text, _)) => Finding::warning(TOPIC, format!("{text} knows no CDI"), mounts("4.1 or later")),
    })
}

/// How an engine that has CDI is told to use it.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Cdi {
    None,
    /// It is off, and its configuration turns it on.
    Asks,
    On,
}

fn docker() -> Option<Finding> {
    const SETTING: &str = "{\"features\": {\"cdi\": true}}";
    configured("docker", "28.2 or later", "/etc/docker/daemon.json", SETTING, |v, config| {
        let said: Option<serde_json::Value> = serde_json::from_str(config).ok();
        docker_cdi(v, said.as_ref().and_then(|s| s["features"]["cdi"].as_bool()))
    })
}

/// The finding about an engine whose configuration says whether it uses CDI: in `file`, by `setting`. `cdi` tells it
/// from the version and the configuration.
fn configured(
    program: &'static str,
    newer: &str,
    file: &str,
    setting: &str,
    cdi: impl FnOnce((u32, u32), &str) -> Cdi,
) -> Option<Finding> {
    Some(match engine(program, program)? {
        Err(finding) => finding,
        Ok((text, v)) => {
            let config = fs::read_to_string(file);
            let cdi = cdi(v, config.as_deref().unwrap_or_default());
            verdict(program, &text, cdi, newer, file, setting, config.err())
        }
    })
}

/// Whether this version of docker has CDI, if its configuration says so.
fn docker_cdi(v: (u32, u32), said: Option<bool>) -> Cdi {
    match said {
        _ if v < (25, 0) => Cdi::None,
        Some(true) => Cdi::On,
        None if v >= (28, 2) => Cdi::On,
        _ => Cdi::Asks,
    }
}

fn containerd() -> Option<Finding> {
    configured("containerd", "2.0 or later", "/etc/containerd/config.toml", "enable_cdi = true", containerd_cdi)
}

/// Whether this version of containerd has CDI, with this configuration.
fn containerd_cdi(v: (u32, u32), config: &str) -> Cdi {
    let setting = config.lines().find_map(|line| line.trim().strip_prefix("enable_cdi")?.trim().strip_prefix('='));
    match setting.map(str::trim) {
        _ if v < (1, 7) => Cdi::None,
        Some("true") => Cdi::On,
        None if v >= (2, 0) => Cdi::On,
        _ => Cdi::Asks,
    }
}

/// The finding about an engine whose configuration says whether it uses CDI. `unread`: why it could not be read.
fn verdict(
    topic: &'static str,
    version: &str,
    cdi: Cdi,
    newer: &str,
    file: &str,
    setting: &str,
    unread: Option<io::Error>,
) -> Finding {
    let hidden = unread.filter(|e| e.kind() == io::ErrorKind::PermissionDenied);
    match (cdi, hidden) {
        (Cdi::None, _) => Finding::warning(topic, format!("{version} knows no CDI"), mounts(newer)),
        (_, Some(_)) => Finding::warning(
            topic,
            format!("{version}; whether it uses CDI is not known: this user may not read {file}"),
            "ask as root",
        ),
        (Cdi::On, None) => Finding::ok(topic, format!("{version}, which takes devices by CDI")),
        (Cdi::Asks, None) => {
            Finding::warning(topic, format!("{version}, with CDI off"), format!("write {setting} into {file}"))
        }
    }
}

/// The directories below which Python keeps packages: of the present environment, of the user and of the system.
fn prefixes() -> BTreeSet<PathBuf> {
    let variable = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let path = std::env::var_os("PATH").unwrap_or_default();
    let python = std::env::split_paths(&path).find(|dir| dir.join("python3").exists());
    let of_python = python.and_then(|bin| bin.parent().map(Path::to_path_buf));
    let of_user = variable("HOME").map(|home| home.join(".local"));
    let all = [variable("VIRTUAL_ENV"), variable("CONDA_PREFIX"), of_python, of_user, Some("/usr/local".into())];
    all.into_iter().flatten().collect()
}

/// Copies of libibverbs below a prefix that packages of Python have brought, as auditwheel and conda name them.
fn copies(prefix: &Path) -> Vec<PathBuf> {
    let below = |dir: &Path| check::names(dir).into_iter().map(|name| dir.join(name)).collect::<Vec<_>>();
    let is_named = |path: &Path, begin: &str, end: &str| {
        path.file_name().and_then(|n| n.to_str()).is_some_and(|n| n.starts_with(begin) && n.ends_with(end))
    };
    let lib = prefix.join("lib");
    let versions = below(&lib).into_iter().filter(|dir| is_named(dir, "python3", ""));
    let packages = versions.flat_map(|dir| [dir.join("site-packages"), dir.join("dist-packages")]);
    let bundles = packages.flat_map(|dir| below(&dir)).filter(|dir| is_named(dir, "", ".libs"));
    let mut all: Vec<_> = bundles.flat_map(|dir| below(&dir)).collect();
    if prefix.join("conda-meta").exists() {
        all.extend(below(&lib));
    }
    let is_library = |path: &PathBuf| {
        is_named(path, "libibverbs", "") && path.to_string_lossy().contains(".so") && !path.is_symlink()
    };
    all.retain(|path| is_library(path) && !check::is_ours(path));
    all
}

fn foreign_libraries() -> Vec<Finding> {
    const TOPIC: &str = "libibverbs";
    let found: BTreeSet<PathBuf> = prefixes().iter().flat_map(|prefix| copies(prefix)).collect();
    if found.is_empty() {
        return vec![Finding::ok(TOPIC, "no package of Python here brings one of its own")];
    }
    let finding = |path: &PathBuf| {
        let remedy = format!("start its programs with `unirdma run`; in other containers, preload {PRELOAD}");
        Finding::warning(TOPIC, format!("{} finds no vRNIC by itself", path.display()), remedy)
    };
    found.iter().map(finding).collect()
}

fn own_libraries() -> Finding {
    match library_dir() {
        Ok(dir) => Finding::ok("libraries", format!("uniRDMA's are in {}", dir.display())),
        Err(e) => {
            let text = e.to_string();
            let (fact, remedy) = text.split_once("; ").unwrap_or((&text, "install uniRDMA anew"));
            Finding::error("libraries", fact, remedy)
        }
    }
}

fn virtual_layer(dir: &Path) -> Finding {
    const TOPIC: &str = "virtual layer";
    if check::is_inside(dir) {
        return Finding::ok(TOPIC, "this is a container that has a vRNIC; `unirdma check` looks at its programs");
    }
    let asked = dir.to_owned();
    match in_time(PATIENCE, move || Client::connect(&asked)?.ask(&Request::Status, None)) {
        Some(Ok(Response::Status(status))) => health(&status),
        Some(Ok(_)) => Finding::error(TOPIC, "it answers something else than it was asked", "use one version"),
        Some(Err(e)) if e.kind() == io::ErrorKind::NotFound => Finding::ok(
            TOPIC,
            format!("none serves {}; `unirdma run` starts one, and so does `unirdma host`", dir.display()),
        ),
        Some(Err(e)) => {
            let text = e.to_string();
            let (fact, remedy) = text.rsplit_once(": ").unwrap_or((&text, "start it again"));
            Finding::warning(TOPIC, fact, remedy)
        }
        None => Finding::error(
            TOPIC,
            format!("the one that serves {} has not answered for {PATIENCE:?}", dir.display()),
            "see its log; kill it and start it again: its programs go on",
        ),
    }
}

/// The finding about a virtual layer that answers.
fn health(s: &StatusInfo) -> Finding {
    const TOPIC: &str = "virtual layer";
    let stuck = s.workers.iter().find_map(|w| Some((&w.group, w.stuck.as_ref()?)));
    let not_in_force = s.wire.as_ref().and_then(|w| w.peers_error.as_ref());
    if let Some((group, thread)) = stuck {
        let fact = format!("the worker of group {group} is stuck ({thread})");
        return Finding::error(TOPIC, fact, "it ends if it stays so; see the log of `unirdma host`");
    }
    if let Some(why) = not_in_force {
        return Finding::warning(TOPIC, format!("its peers file is not in force: {why}"), "correct the file");
    }
    let fact = format!("version {} (pid {}) serves {}: {} vRNICs", s.version, s.pid, s.dir, s.vrnics);
    match s.version == env!("CARGO_PKG_VERSION") {
        true => Finding::ok(TOPIC, fact),
        false => {
            let own = env!("CARGO_PKG_VERSION");
            Finding::warning(TOPIC, fact, format!("this program is version {own}; start `unirdma host` anew"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Level;
    use super::*;

    #[test]
    fn engines_use_cdi_from_a_version_on() {
        for (v, said, cdi) in [
            ((24, 0), Some(true), Cdi::None),
            ((26, 1), None, Cdi::Asks),
            ((26, 1), Some(true), Cdi::On),
            ((28, 1), None, Cdi::Asks),
            ((28, 2), None, Cdi::On),
            ((28, 5), Some(false), Cdi::Asks),
        ] {
            assert_eq!(docker_cdi(v, said), cdi, "{v:?} {said:?}");
        }
        for (v, config, cdi) in [
            ((1, 6), "enable_cdi = true", Cdi::None),
            ((1, 7), "", Cdi::Asks),
            ((1, 7), "  enable_cdi = true\n", Cdi::On),
            ((1, 7), "# enable_cdi = true", Cdi::Asks),
            ((2, 1), "", Cdi::On),
            ((2, 1), "enable_cdi=false", Cdi::Asks),
        ] {
            assert_eq!(containerd_cdi(v, config), cdi, "{v:?} {config}");
        }
    }

    #[test]
    fn a_configuration_that_may_not_be_read_is_said_to_be() {
        let unread = |kind: io::ErrorKind| verdict("docker", "28.2", Cdi::On, "x", "file", "y", Some(kind.into()));
        assert!(unread(io::ErrorKind::PermissionDenied).fact.contains("may not read file"));
        assert_eq!(unread(io::ErrorKind::NotFound).level, Level::Ok);
    }

    #[test]
    fn libraries_that_packages_bring_are_found() {
        let prefix = std::env::temp_dir().join(format!("unirdma-doctor-{}", std::process::id()));
        let bundle = prefix.join("lib/python3.11/site-packages/nixl.libs");
        fs::create_dir_all(&bundle).unwrap();
        for name in ["libibverbs-1a2b.so.1.14", "libnl-3.so.200", "libibverbs.txt"] {
            fs::write(bundle.join(name), "text").unwrap();
        }
        fs::write(bundle.join("libibverbs-ours.so.1"), check::MARK).unwrap();
        let found = copies(&prefix);
        fs::remove_dir_all(&prefix).unwrap();
        assert_eq!(found, [bundle.join("libibverbs-1a2b.so.1.14")]);
    }

    #[test]
    fn a_virtual_layer_is_judged_by_its_status() {
        let version = env!("CARGO_PKG_VERSION");
        let mut status: StatusInfo = serde_json::from_value(serde_json::json!({
            "pid": 7, "version": version, "dir": "/run/unirdma", "vrnics": 2, "sessions": 0, "wire": null,
        }))
        .unwrap();
        assert_eq!(health(&status).level, Level::Ok);
        status.version = "0.0.1".into();
        assert_eq!(health(&status).level, Level::Warning);
        status.workers = vec![unirdma_supervisor::admin::WorkerInfo {
            group: "blue".into(),
            stuck: Some("control thread for 3 s".into()),
            ..Default::default()
        }];
        assert_eq!(health(&status).level, Level::Error);
    }

    #[test]
    fn what_is_not_installed_is_missing() {
        assert!(matches!(run("no-such-engine", &[]), Told::Missing));
        assert!(matches!(run("false", &[]), Told::Failed(_)));
        assert!(matches!(run("echo", &["x"]), Told::Text(text) if text == "x\n"));
    }
}
