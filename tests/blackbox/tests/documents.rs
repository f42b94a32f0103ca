//! The commands that README.md and `docs/user` tell users to type: all ```sh blocks of a page run, in order; and the
//! documents as a book.

use std::process::Command;

use crate::support::*;

/// Prepares a shell for a page: places of its own for what commands write, the release build in the PATH, and nothing
/// to install or to build.
const PREPARE: &str = "
set -e
for dir in /run /var/lib /root /home; do [ -d $dir ] && mount -t tmpfs tmpfs $dir; done
ip link set lo up
export HOME=/run/home PATH=$RELEASE:$PATH
mkdir -p $HOME
apt-get() { :; }
cargo() { :; }
";

/// What pages that go on from the quick start take for granted.
const QUICK_START: &str = "
unirdma host &
until unirdma status >/dev/null 2>&1; do sleep 0.1; done
unirdma vrnic add a --ip 10.0.0.1
unirdma vrnic add b --ip 10.0.0.2
";

/// The shell blocks of a page, one after the other.
fn blocks(page: &str) -> String {
    let mut inside = false;
    let mut script = String::new();
    for line in page.lines() {
        match line.trim_end() {
            "```sh" => inside = true,
            "```" => inside = false,
            _ if inside => script.extend([line, "\n"]),
            _ => {}
        }
    }
    script
}

/// Runs a page's blocks in namespaces of their own, whose end is the end of all that they started.
fn run_page(name: &str, script: &str) -> Check {
    let goes_on =
        if script.contains("unirdma host &") || script.contains("unirdma control run") { "" } else { QUICK_START };
    let release = harness::unirdma();
    let release = release.parent().unwrap_or(&release).display().to_string();
    let mut c = Command::new("unshare");
    c.args(["--mount", "--net", "--pid", "--fork", "--mount-proc", "timeout", "100", "bash", "-c"]);
    c.arg(format!("{PREPARE}{goes_on}{script}")).current_dir(harness::root()).env("RELEASE", release);
    let o = Output::of(&mut c);
    require(o.ok(), format!("{name}, {:?}: {}", o.code, o.text))
}

pub(crate) fn tests(t: &mut Tests) {
    t.topic(&[packages::RUN, packages::RELEASES]);
    t.need_root("namespaces need root");
    t.test("documents: they are a book, whose links lead somewhere", || harness::book::make().map(drop));
    let root = harness::root();
    let mut pages: Vec<_> =
        std::fs::read_dir(root.join("docs/user")).into_iter().flatten().flatten().map(|e| e.path()).collect();
    pages.push(root.join("README.md"));
    pages.sort();
    for page in pages {
        let name = page.strip_prefix(&root).unwrap_or(&page).display().to_string();
        let script = std::fs::read_to_string(&page).map(|text| blocks(&text)).unwrap_or_default();
        if !script.is_empty() {
            t.test(format!("documents: the commands of {name}"), move || run_page(&name, &script));
        }
    }
}
