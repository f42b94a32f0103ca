//! rdma-core's own tests, of two Debian releases. `docs/conformance.md` lists the tests that may be skipped.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::packages;
use crate::vm::{Guest, Image, Kernel, Plan, System, Systems};
use crate::{Lab, Result, failed, reruns};

const TESTS: &str = "/usr/share/doc/rdma-core/tests";
const RUN: &str = "tests/run_tests.py --dev unirdma0 -v";
/// The line before which `test_resize_cq` makes a CQ smaller than the number of completions in it.
const SHRINKS: &str = "# Decrease the CQ size to less than the CQ unpolled entries.";
const HUGE_PAGES: &str = "/proc/sys/vm/nr_hugepages";
/// Number of 2 MiB pages that the tests need.
const WANTED_PAGES: u32 = 64;

fn run(words: &[&str]) -> Result<()> {
    let o = Command::new(words[0]).args(&words[1..]).output().map_err(failed(words[0]))?;
    if o.status.success() {
        Ok(())
    } else {
        Err(format!("{}: {}", words.join(" "), String::from_utf8_lossy(&o.stderr)))
    }
}

/// Reserves huge pages, if possible, until it is dropped.
struct HugePages(Option<String>);

impl HugePages {
    fn reserve() -> HugePages {
        let before = fs::read_to_string(HUGE_PAGES).ok();
        let enough = before.as_ref().is_none_or(|b| b.trim().parse::<u32>().is_ok_and(|n| n >= WANTED_PAGES));
        if enough || fs::write(HUGE_PAGES, WANTED_PAGES.to_string()).is_err() {
            return HugePages(None);
        }
        HugePages(before)
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        if let Some(before) = &self.0 {
            let _ = fs::write(HUGE_PAGES, before);
        }
    }
}

/// Heading of the part of `docs/conformance.md` about guests.
const GUESTS: &str = "## In a virtual machine";

/// The reasons for skips that `docs/conformance.md` allows: general ones, and for guests also those in their part.
fn known_reasons(guest: bool) -> Result<Vec<String>> {
    let text = fs::read_to_string(crate::root().join("docs/conformance.md")).map_err(failed("docs/conformance.md"))?;
    let part = if guest { &text } else { text.split(GUESTS).next().unwrap_or_default() };
    let reasons = part.lines().filter_map(|l| l.strip_prefix("| `")).filter_map(|l| l.split('`').next());
    Ok(reasons.map(String::from).collect())
}

/// The number after a word.
fn number(line: &str, before: &str) -> Option<usize> {
    let digits: String = line.split(before).nth(1)?.chars().take_while(char::is_ascii_digit).collect();
    digits.parse().ok()
}

/// Checks that nothing was skipped for an unknown reason.
fn check_reasons(text: &str, guest: bool) -> Result<()> {
    let known = known_reasons(guest)?;
    let reason = |l: &str| Some(l.split(" ... skipped ").nth(1)?.trim_matches(['\'', '"']).to_string());
    let unknown: Vec<String> =
        text.lines().filter_map(reason).filter(|r| !known.iter().any(|k| r.starts_with(k))).collect();
    match unknown.is_empty() {
        true => Ok(()),
        false => Err(format!("skipped for reasons that docs/conformance.md does not have: {unknown:?}")),
    }
}

/// Checks a run: no failure, at least `at_least` tests, and no skip for an unknown reason.
fn judge(text: &str, at_least: usize, guest: bool) -> Result<()> {
    check_reasons(text, guest)?;
    // Python may print more lines at its exit.
    let last = text.lines().rfind(|l| l.starts_with("OK") || l.starts_with("FAILED")).unwrap_or_default();
    let all = text.lines().find_map(|l| number(l, "Ran ")).unwrap_or(0);
    let others = ["skipped=", "failures=", "errors="].iter().filter_map(|w| number(last, w)).sum();
    let passed = all.saturating_sub(others);
    println!("{passed} of {all} tests pass: {last}");
    if last.starts_with("OK") && passed >= at_least {
        return Ok(());
    }
    let from = text.find("======").unwrap_or(0);
    Err(format!("{passed} passed, {at_least} are expected: {last}\n{}", &text[from..]))
}

/// Runs the tests of this machine's own release.
///
/// # Errors
/// Tests that failed, or were skipped without a known reason.
pub fn debian_12(lab: &Lab) -> Result<()> {
    let _pages = HugePages::reserve();
    let dir = lab.dir.join("pyverbs");
    fs::create_dir_all(&dir).map_err(failed("pyverbs"))?;
    let tests = unpack(Path::new(TESTS), &dir)?;
    let script = format!("cd {} && exec /usr/bin/python3 {RUN}", tests.display());
    judge(&lab.spawn("a", &[], &format!("sh -c '{script}'"))?.finish().text, 140, false)
}

/// Copies the tests below `dir`; the package has them compressed. Returns the directory to run them in.
fn unpack(from: &Path, dir: &Path) -> Result<PathBuf> {
    let to = dir.join("tests");
    let (from, to) = (from.display().to_string(), to.display().to_string());
    run(&["cp", "-r", &from, &to])?;
    run(&["sh", "-c", &format!("gunzip -qf {to}/*.gz")])?;
    give_time(&format!("{to}/test_cq.py"))?;
    Ok(dir.to_path_buf())
}

/// Delays `test_resize_cq` by a second so that its sends can complete, as rdma-core's commit 197d1a40a of January 2026
/// does.
fn give_time(file: &str) -> Result<()> {
    let text = fs::read_to_string(file).map_err(failed(file))?;
    let (before, after) =
        text.split_once(SHRINKS).ok_or_else(|| format!("{file} has no test that makes a CQ smaller"))?;
    fs::write(file, format!("{before}__import__('time').sleep(1)\n        {SHRINKS}{after}")).map_err(failed(file))
}

/// The programs of Debian 13, in a directory of their own.
fn root_of_debian_13() -> Result<PathBuf> {
    let root = crate::root().join("target/trixie");
    if root.join("usr/bin/rdma").exists() {
        return Ok(root);
    }
    println!("downloading programs of Debian 13");
    let _ = fs::remove_dir_all(&root);
    packages::extract("trixie", "python3-pyverbs,python3,ibverbs-utils,iproute2,coreutils", &root)?;
    for d in ["bin", "sbin", "lib", "lib64"] {
        let at = root.join(d);
        if !at.exists() {
            symlink(format!("usr/{d}"), at).map_err(failed(d))?;
        }
    }
    for d in ["dev", "sys", "proc", "tmp", "run/unirdma", "opt/unirdma", "t"] {
        fs::create_dir_all(root.join(d)).map_err(failed(d))?;
    }
    // The tests ask this tool for network interfaces before they read sysfs, but the tool needs the kernel's RDMA.
    let tool = root.join("usr/bin/rdma");
    let _ = fs::remove_file(&tool);
    fs::write(&tool, "#!/usr/bin/python3\nprint('[]')\n").map_err(failed("rdma"))?;
    run(&["chmod", "755", &tool.display().to_string()])?;
    Ok(root)
}

/// Runs the tests of Debian 13, in a container whose root directory is that release.
///
/// # Errors
/// Tests that failed, or were skipped without a known reason.
pub fn debian_13(lab: &Lab) -> Result<()> {
    let _pages = HugePages::reserve();
    let root = root_of_debian_13()?;
    let dir = root.join("t");
    let _ = fs::remove_dir_all(dir.join("tests"));
    unpack(&root.join(TESTS.trim_start_matches('/')), &dir)?;
    let script = format!(
        "R={}; for d in dev sys proc; do mount --rbind /$d $R/$d || exit 9; done\n\
         mount --bind $UNIRDMA_DIR $R/run/unirdma && mount --rbind ${{LD_LIBRARY_PATH%%:*}} $R/opt/unirdma || exit 9\n\
         export LD_LIBRARY_PATH=/opt/unirdma UNIRDMA_DIR=/run/unirdma PATH=/usr/bin:/usr/sbin\n\
         exec chroot $R /usr/bin/env --chdir=/t python3 {RUN}\n",
        root.display()
    );
    let file = lab.dir.join("debian-13.sh");
    fs::write(&file, script).map_err(failed("debian-13.sh"))?;
    let binds = ["--bind", &root.display().to_string()];
    judge(&lab.spawn("a", &binds, &format!("sh {}", file.display()))?.finish().text, 150, false)
}

const RUN_RXE: &str = "tests/run_tests.py --dev rxe0 -v";
const KERNEL_OF_DEBIAN_13: &str = "6.12";
/// Least number of tests that must pass in a guest, with the older version of the tests.
const LEAST_IN_GUEST: usize = 104;
/// Longest time for all tests in a guest with emulated processors.
const IN_GUEST: Duration = Duration::from_secs(3600);
/// Parts of Python that the tests do not need.
const WITHOUT: &[&str] = &[
    "__pycache__",
    "ensurepip",
    "idlelib",
    "lib2to3",
    "pydoc_data",
    "site-packages",
    "sitecustomize.py",
    "test",
    "tkinter",
    "turtledemo",
];

/// Copies Python, pyverbs and the tests of the kernel's release into a guest's image.
pub(crate) fn add_tests(kernel: &Kernel, image: &mut Image<'_>) -> Result<()> {
    let python = fs::read_link(kernel.root.join("usr/bin/python3")).map_err(failed("python3"))?;
    let python = python.file_name().unwrap_or_default().to_string_lossy().into_owned();
    image.program(&python)?;
    symlink(&python, image.root().join("usr/bin/python3")).map_err(failed("python3"))?;
    image.tree(
        &format!("/usr/lib/{python}"),
        &[WITHOUT, &[&format!("config-{}-x86_64-linux-gnu", &python[6..])]].concat(),
    )?;
    image.tree("/usr/lib/python3/dist-packages/pyverbs", WITHOUT)?;
    let release = if kernel.root == Path::new("/") { PathBuf::from("/") } else { root_of_debian_13()? };
    let tests = release.join(TESTS.trim_start_matches('/'));
    let to = image.root().join("t");
    fs::create_dir_all(&to).map_err(failed("tests"))?;
    unpack(&tests, &to).map(drop)
}

/// As [`add_tests`], with the kernel's own soft RNIC.
fn add_tests_and_rxe(kernel: &Kernel, image: &mut Image<'_>) -> Result<()> {
    add_tests(kernel, image)?;
    image.rxe()
}

/// Runs tests in a guest. Returns their output.
fn run_in(guest: &Guest, tests: &str) -> Result<String> {
    let command = format!("echo {WANTED_PAGES} >{HUGE_PAGES}; cd /t && {tests}");
    Ok(guest.spawn(&command)?.finish_within(IN_GUEST).text)
}

/// Prints the outcome of a run of several files.
fn report(text: &str) {
    let sum = |begin: &str, word: &str| -> usize {
        text.lines().filter(|l| l.starts_with(begin)).filter_map(|l| number(l, word)).sum()
    };
    let both = |word: &str| sum("OK (", word) + sum("FAILED (", word);
    let (all, skipped) = (sum("Ran ", "Ran "), both("skipped="));
    let failed = both("failures=") + both("errors=");
    let without_end: Vec<&str> = text
        .split("\nfile ")
        .filter(|file| !file.contains("\nOK") && !file.contains("\nFAILED"))
        .filter_map(|file| file.lines().next())
        .collect();
    println!("{} of {all} tests pass, {failed} fail, {skipped} are skipped", all.saturating_sub(skipped + failed));
    println!("files that end Python: {without_end:?}");
}

fn in_guest(system: &System, only: Option<&str>, with_rxe: bool) -> Result<()> {
    let lab = Lab::start(None)?;
    lab.vrnic("guest", &["--ip", "10.0.0.1"])?;
    let guest = Guest::start(&lab, system, "guest", &Plan::default())?;
    let keep = |device: &str, text: &str| {
        let file = crate::root().join(format!("target/conformance-{}-{device}.txt", system.name));
        println!("kernel {}, {device}: {}", system.name, file.display());
        fs::write(file, text).map_err(failed("what the tests print"))
    };
    let only_these = only.map(|o| format!("-k {o}")).unwrap_or_default();
    let ours = run_in(&guest, &format!("exec python3 {RUN} {only_these}"))?;
    keep("unirdma0", &ours)?;
    let least = if only.is_some() { 0 } else { LEAST_IN_GUEST };
    let judged = check_reasons(&ours, true).and_then(|()| judge_in(&guest, &ours, least));
    if with_rxe {
        guest.unload()?;
        guest.run("rdma link add rxe0 type rxe netdev eth0")?;
        // Each file runs by itself, because some tests end Python.
        let each = "for f in tests/test_*.py; do f=${f##*/}; echo file $f";
        let theirs = run_in(&guest, &format!("{each}; python3 {RUN_RXE} -k \"tests.${{f%.py}}.*\"; done"))?;
        keep("rxe0", &theirs)?;
        report(&theirs);
    }
    judged.map_err(|e| guest.explain(&e))
}

/// As [`judge`], for a run in this guest, where a few failed tests are repeated.
fn judge_in(guest: &Guest, text: &str, at_least: usize) -> Result<()> {
    let failed = failed_tests(text);
    let names: String = failed.iter().map(|f| format!(" -k {f}")).collect();
    reruns::of_emulated(failed.len(), judge(text, at_least, true), || {
        println!("again:{names}");
        judge(&run_in(guest, &format!("exec python3 {RUN}{names}"))?, failed.len(), true)
    })
}

/// The names of the tests that failed.
fn failed_tests(text: &str) -> Vec<&str> {
    let failed = text.lines().filter(|l| l.starts_with("ERROR: ") || l.starts_with("FAIL: "));
    failed.filter_map(|l| l.split_once('(')?.1.strip_suffix(')')).collect()
}

/// Runs the tests in one guest, on our vRNIC.
///
/// # Errors
/// Tests that failed, or were skipped without a known reason.
pub fn in_a_guest(kernel: Option<&str>) -> Result<()> {
    let systems = Systems::make_with(Some(kernel.unwrap_or(KERNEL_OF_DEBIAN_13)), &add_tests_and_rxe)?;
    in_guest(systems.all.first().ok_or("no kernel")?, None, false)
}

/// Runs the tests in guests: on our vRNIC, and on the kernel's own soft RNIC. `only`: the tests whose names match.
///
/// # Errors
/// Tests that failed on the vRNIC, or were skipped without a known reason.
pub fn in_guests(kernel: Option<&str>, only: Option<&str>) -> Result<()> {
    crate::vm::prepare()?;
    let systems = Systems::make_with(kernel, &add_tests_and_rxe)?;
    systems.all.iter().try_for_each(|s| in_guest(s, only, only.is_none()))
}
