//! The control centre's web page in a browser, with a fleet whose hosts report traffic: the checks of the black-box
//! tests and of `cargo xtask page`.

mod browser;
mod checks;
mod fleet;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use checks::Scene;
pub use checks::{CHECKS, Check};
use fleet::{Fleet, Link};
use harness::Result;
use unirdma_fleet::v1::{self, object::Object};

fn host(name: &str) -> Object {
    v1::Host { name: name.into(), ..Default::default() }.into()
}

fn vrnic(name: &str, group: &str, host: &str) -> Object {
    v1::Vrnic { name: name.into(), group: group.into(), host: host.into(), ..Default::default() }.into()
}

const HOSTS: [&str; 5] = ["rack1-a", "rack1-b", "rack2-a", "rack2-b", "spare"];

/// A small fleet: three groups that compute, store and are tried out, a rule between the first two, and two dozen of
/// connections.
fn declare(fleet: &mut Fleet) -> Result<()> {
    let mut objects: Vec<Object> = HOSTS.iter().map(|h| host(h)).collect();
    for (name, range, secret) in
        [("compute", "10.0.0.0/16", true), ("storage", "10.1.0.0/16", false), ("lab", "10.0.0.0/16", false)]
    {
        let ranges = vec![range.into()];
        objects.push(v1::Group { name: name.into(), ranges, secret, ..Default::default() }.into());
    }
    let mut links = Vec::new();
    let mut link = |a: &str, b: &str, qps, rates| links.push(Link { ends: [a.into(), b.into()], qps, rates });
    for i in 0..16 {
        objects.push(vrnic(&format!("mpi-{i:02}"), "compute", HOSTS[i % 4]));
        link(&format!("mpi-{i:02}"), &format!("mpi-{:02}", (i + 1) % 16), 4, [2.4e9, 2.1e9]);
    }
    for i in 0..6 {
        objects.push(vrnic(&format!("store-{i}"), "storage", HOSTS[i % 4]));
        link(&format!("mpi-{:02}", i * 2 + 1), &format!("store-{i}"), 2, [4.0e8, 3.0e7]);
    }
    for (i, name) in ["alice", "bob", "carol"].into_iter().enumerate() {
        objects.push(vrnic(name, "lab", HOSTS[i]));
    }
    link("alice", "bob", 1, [900.0, 120.0]);
    objects.push(vrnic("dora", "lab", "spare"));
    objects.push(vrnic("not-placed", "lab", ""));
    let (from, to) = ("group:compute".into(), "group:storage".into());
    objects.push(
        v1::Rule { name: "compute-to-storage".into(), from, to, both: true, priority: 100, ..Default::default() }
            .into(),
    );
    let (from, to) = ("vrnic:alice".into(), "group:storage".into());
    let action = v1::rule::Action::Deny.into();
    objects.push(v1::Rule { name: "not-alice".into(), from, to, action, priority: 200, ..Default::default() }.into());
    fleet.apply(objects)?;
    let mut world = fleet.world()?;
    world.links = links;
    world.errors.insert("store-3".into(), 3.0);
    world
        .problems
        .insert("rack2-b".into(), vec!["vRNIC x: <img src=x onerror=alert(1)> has no \"room\" & more".into()]);
    drop(world);
    HOSTS[..4].iter().try_for_each(|h| fleet.join(h))
}

/// Starts a fleet in a new directory. Dropping the directory's value removes it.
fn start() -> Result<(Directory, Fleet)> {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let n = COUNT.fetch_add(1, Ordering::Relaxed);
    let path = std::env::temp_dir().join(format!("unirdma-page-{}-{n}", std::process::id()));
    let dir = Directory(path);
    std::fs::create_dir_all(&dir.0).map_err(|e| format!("{}: {e}", dir.0.display()))?;
    let fleet = Fleet::start(&harness::unirdma(), &dir.0)?;
    Ok((dir, fleet))
}

/// A directory that is removed at the end.
struct Directory(PathBuf);

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// An administrator looks at the page of a fleet, in a browser. Dropping this value ends both.
pub struct Visit {
    scene: Scene,
    // Removed last.
    _dir: Directory,
}

impl Visit {
    /// Starts the fleet and the browser. Pictures go to `out`.
    ///
    /// # Errors
    /// The step that failed.
    pub fn start(out: &Path) -> Result<Visit> {
        let (dir, fleet) = start()?;
        let mut scene = Scene::new(fleet, out)?;
        scene.enter()?;
        Ok(Visit { scene, _dir: dir })
    }

    /// Makes one of the checks.
    ///
    /// # Errors
    /// The expectation that the page does not meet, or an error of the page.
    pub fn check(&mut self, check: &Check) -> Result<()> {
        (check.run)(&mut self.scene).and_then(|()| self.scene.has_no_errors())
    }
}

/// Keeps a fleet running, for a person to look at.
///
/// # Errors
/// The step that failed.
pub fn stay() -> Result<()> {
    let (dir, mut fleet) = start()?;
    declare(&mut fleet)?;
    println!("The page: {}", fleet.url);
    println!("A token of its administrator: {}", fleet.admin);
    println!("The authority of its certificate: {}", fleet.authority().display());
    println!("{} goes when this ends: press Enter.", dir.0.display());
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).map(drop).map_err(|e| e.to_string())
}
