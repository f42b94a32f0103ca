//! Compares the view that programs have of their own memory, with a vRNIC and without one. `cargo xtask test memory`
//! goes on with random sequences.
//!
//! Each case of the C programs `memory-*.c` runs on private memory without a vRNIC, with `UNIRDMA_MR=copy`, with
//! `UNIRDMA_MR=share`, and with the default. The lines that it prints must be the same, except for the differences that
//! [`ALLOWED`] lists. Then `memory-random` does random operations on memory of which it knows every byte, under several
//! allocators. All of this runs as root and as an ordinary user, because the ways of memory differ for them.

use std::path::Path;
use std::time::Instant;

use harness::compile_as;
use libtest_mimic::Arguments;

use crate::support::*;

/// Ways of registering memory: name, environment, and the vRNIC that the programs use.
const WAYS: [(&str, &str, &str); 3] = [
    ("copy", "UNIRDMA_MR=copy", "memory-copy"),
    ("share", "UNIRDMA_MR=share", "memory-share"),
    ("default", "UNIRDMA_MR=", "memory-default"),
];
/// The container of programs without a vRNIC.
const PRIVATE: &str = "memory-private";
/// The ways that may move pages.
const MOVED: &[&str] = &["share", "default"];

/// Programs with cases, and their libraries.
const PROGRAMS: [(&str, &[&str]); 5] = [
    ("memory-return", &["-libverbs", "-pthread"]),
    ("memory-registered", &["-libverbs", "-pthread"]),
    ("memory-fork", &["-libverbs", "-pthread", "-ldl"]),
    ("memory-writers", &["-libverbs", "-pthread", "-ldl"]),
    ("memory-limits", &["-libverbs", "-lrdmacm", "-pthread"]),
];

/// A line that may differ from the line on private memory.
struct Allowed {
    program: &'static str,
    case: &'static str,
    /// Names in [`WAYS`].
    ways: &'static [&'static str],
    /// Beginning of the line on private memory.
    private: &'static str,
    /// Beginning that it may have instead.
    instead: &'static str,
    /// The reason. ARCHITECTURE.md has it, too.
    reason: &'static str,
}

const NO_HANDLERS: &str = "A child that is made without fork handlers does not have its parent's registered memory: it crashes when \
                           it touches it, rather than share it.";
const PARTS: &str = "A mapping of which a part is registered is several mappings to the kernel, which refuses mremap(2) over all of \
                     them; realloc(3) copies then.";
const USER_MODE: &str = "Where there is a userfaultfd for user mode only, a peer's system call into a range that is just being moved \
                         fails with EFAULT.";
const WIPE: &str = "MADV_WIPEONFORK is for private memory; it works again after deregistration.";
const PINNED: &str = "Registered pages are pinned, and keep their content until the last region is gone.";

const MEANWHILE: &str = "The mapping of the memory file always has MADV_DONTFORK, so it does not show that the program gave it too meanwhile.";
const FUTEX: &str = "A thread that already waits at a futex which processes share, in memory that is just moved, is not woken: such a \
                     futex is known by the file that it lies in.";

/// All differences that a program may see.
const ALLOWED: &[Allowed] = &[
    Allowed {
        program: "memory-fork",
        case: "no-handlers",
        ways: MOVED,
        private: "_Fork: child 3,",
        instead: "_Fork: child 1011, pages that it changed: 0, the peer wrote 1",
        reason: NO_HANDLERS,
    },
    Allowed {
        program: "memory-fork",
        case: "no-handlers",
        ways: MOVED,
        private: "raw fork: child 3,",
        instead: "raw fork: child 1011, pages that it changed: 0, the peer wrote 1",
        reason: NO_HANDLERS,
    },
    Allowed {
        program: "memory-fork",
        case: "no-handlers",
        ways: MOVED,
        private: "raw clone: child 3,",
        instead: "raw clone: child 1011, pages that it changed: 0, the peer wrote 1",
        reason: NO_HANDLERS,
    },
    Allowed {
        program: "memory-registered",
        case: "dontneed",
        ways: MOVED,
        private: "pages that are not zero: 0",
        instead: "pages that are not zero: 128",
        reason: PINNED,
    },
    Allowed {
        program: "memory-registered",
        case: "dontneed",
        ways: MOVED,
        private: "MADV_FREE while it is registered: 0",
        instead: "MADV_FREE while it is registered: -1",
        reason: PINNED,
    },
    Allowed {
        program: "memory-registered",
        case: "flags",
        ways: MOVED,
        private: "MADV_WIPEONFORK: 0",
        instead: "MADV_WIPEONFORK: -1",
        reason: WIPE,
    },
    Allowed {
        program: "memory-registered",
        case: "flags",
        ways: MOVED,
        private: "child has zeros there, not elsewhere: 3",
        instead: "child has zeros there, not elsewhere: 1",
        reason: WIPE,
    },
    Allowed {
        program: "memory-writers",
        case: "peer-process",
        ways: MOVED,
        private: "its calls that failed: 0",
        instead: "its calls that failed: ",
        reason: USER_MODE,
    },
    Allowed {
        program: "memory-registered",
        case: "grow-part",
        ways: MOVED,
        private: "mremap of a mapping with a registered part: done",
        instead: "mremap of a mapping with a registered part: Bad address",
        reason: PARTS,
    },
    Allowed {
        program: "memory-registered",
        case: "flags",
        ways: MOVED,
        private: "child has the part, the rest: 1",
        instead: "child has the part, the rest: 3",
        reason: MEANWHILE,
    },
    Allowed {
        program: "memory-registered",
        case: "futex",
        ways: MOVED,
        private: "FUTEX_WAIT, registered meanwhile: woken",
        instead: "FUTEX_WAIT, registered meanwhile: forgotten",
        reason: FUTEX,
    },
    Allowed {
        program: "memory-registered",
        case: "futex",
        ways: MOVED,
        private: "deregistered meanwhile: woken",
        instead: "deregistered meanwhile: forgotten",
        reason: FUTEX,
    },
    Allowed {
        program: "memory-fork",
        case: "parts",
        ways: MOVED,
        private: "child: 15",
        instead: "child: 13",
        reason: MEANWHILE,
    },
    Allowed {
        program: "memory-fork",
        case: "parts",
        ways: MOVED,
        private: "MADV_DONTFORK, not registered any more: 2",
        instead: "MADV_DONTFORK, not registered any more: 1",
        reason: MEANWHILE,
    },
];

/// Returns the lines that are wrong. Empty if there are none.
fn compare(program: &str, case: &str, way: &str, private: &str, seen: &str) -> String {
    let (mut a, mut b) = (private.lines(), seen.lines());
    let mut wrong = String::new();
    loop {
        let (expected, got) = match (a.next(), b.next()) {
            (None, None) => return wrong,
            (e, g) => (e.unwrap_or("(no line)"), g.unwrap_or("(no line)")),
        };
        let listed = |l: &&Allowed| {
            (l.program, l.case) == (program, case)
                && l.ways.contains(&way)
                && expected.starts_with(l.private)
                && got.starts_with(l.instead)
        };
        if expected != got && ALLOWED.iter().find(listed).is_none() {
            wrong += &format!("  {way}: {got}\n  private memory: {expected}\n");
        }
    }
}

/// Output of a case, and its exit status unless it succeeded.
fn lines(o: &Output) -> String {
    match o.code {
        Some(0) => o.text.clone(),
        Some(137) | None => format!("{}(took too long)\n", o.text),
        Some(c) => format!("{}(exit code {c})\n", o.text),
    }
}

/// Fails if `wrong` has any lines, with the first of them.
fn none(wrong: &str) -> Result<()> {
    const ENOUGH: usize = 30;
    let left = wrong.lines().count().saturating_sub(ENOUGH);
    match wrong.lines().take(ENOUGH).map(|l| format!("{l}\n")).collect::<String>() {
        w if w.is_empty() => Ok(()),
        w if left == 0 => Err(w),
        w => Err(format!("{w}  and {left} more lines\n")),
    }
}

/// Runs a command on private memory and in each of [`WAYS`], all at the same time.
fn each(lab: &Lab, command: &str) -> Result<(Output, Vec<(&'static str, Output)>)> {
    let private = lab.spawn(PRIVATE, &[], &format!("timeout -s KILL 60 {command} private"))?;
    let start = |(way, environment, vrnic): (&'static str, &str, &str)| {
        Ok((way, lab.spawn(vrnic, &[], &format!("env {environment} timeout -s KILL 60 {command}"))?))
    };
    let running = WAYS.into_iter().map(start).collect::<Result<Vec<_>>>()?;
    Ok((private.finish(), running.into_iter().map(|(way, r)| (way, r.finish())).collect()))
}

fn all_agree(lab: &Lab, program: &str, libraries: &[&str], case: &str) -> Result<()> {
    let exe = compiled(lab, program, libraries)?;
    let (private, others) = each(lab, &format!("{exe} {case}"))?;
    if !private.ok() || !private.text.ends_with("end\n") {
        return Err(format!("without a vRNIC: {}", lines(&private)));
    }
    let wrong: String = others.iter().map(|(way, o)| compare(program, case, way, &private.text, &lines(o))).collect();
    none(&wrong)
}

/// A program of a lab, compiled by the first test that needs it.
fn compiled(lab: &Lab, program: &str, libraries: &[&str]) -> Result<String> {
    let exe = lab.dir.join(program);
    if exe.exists() { Ok(exe.display().to_string()) } else { compile(lab, program, libraries) }
}

/// The names of a program's cases, as its table `cases` lists them.
fn cases(program: &str) -> Vec<String> {
    let source = std::fs::read_to_string(harness::root().join(format!("tests/c/{program}.c"))).unwrap_or_default();
    let table = source.split("struct a_case cases[]").nth(1).and_then(|s| s.split("};").next()).unwrap_or_default();
    table.split("{ \"").skip(1).filter_map(|entry| entry.split('"').next()).map(String::from).collect()
}

/// Users for whom all tests run: name in titles, and the lab that its programs run in.
fn places() -> [(&'static str, Shared<Lab>); 2] {
    let start = |user| {
        let lab = Lab::start(user)?;
        WAYS.iter().map(|w| w.2).chain([PRIVATE]).try_for_each(|v| lab.vrnic(v, &[]))?;
        Ok(lab)
    };
    [("root", Shared::new(move || start(None))), ("ordinary user", Shared::new(move || start(Some(own_user()))))]
}

/// Adds tests for each user that they can run as.
fn in_places(t: &mut Tests, places: &[(&'static str, Shared<Lab>)], add: impl Fn(&mut Tests, &str, &Shared<Lab>)) {
    for (name, lab) in places {
        t.need_no_root();
        if *name == "root" {
            t.need_root("this user is an ordinary one");
        }
        add(t, name, lab);
    }
}

/// Adds all cases of all programs.
fn compare_cases(t: &mut Tests, place: &str, lab: &Shared<Lab>) {
    for (program, libraries) in PROGRAMS {
        for case in cases(program) {
            t.on(lab, format!("memory, {place}: {program} {case}"), move |lab| {
                all_agree(lab, program, libraries, &case)
            });
        }
    }
    t.on(lab, format!("memory, {place}: sanitizers and valgrind"), sanitizers);
}

/// Output of a program, without valgrind's notes about system calls that it does not know.
fn without_notes(o: &Output) -> String {
    lines(o).lines().filter(|l| !l.starts_with("--")).map(|l| format!("{l}\n")).collect()
}

/// Builds and runs a small program with the tools by which programmers look for errors.
fn sanitizers(lab: &Lab) -> Result<()> {
    let libraries = ["-libverbs", "-pthread"];
    let plain = compile(lab, "memory-small", &libraries)?;
    let address = compile_as(lab, "memory-small", "memory-small-asan", &["-fsanitize=address", "-libverbs"])?;
    let thread = compile_as(lab, "memory-small", "memory-small-tsan", &["-fsanitize=thread", "-libverbs"])?;
    let suppressions = lab.dir.join("valgrind.supp");
    std::fs::copy(harness::root().join("tests/c/valgrind.supp"), &suppressions).map_err(|e| e.to_string())?;
    let valgrind = format!(
        "valgrind -q --error-exitcode=9 --leak-check=no \
         --suppressions={} {plain}",
        suppressions.display()
    );
    let mut wrong = String::new();
    for (name, exe) in
        [("plain", &plain), ("AddressSanitizer", &address), ("ThreadSanitizer", &thread), ("valgrind", &valgrind)]
    {
        let (private, others) = each(lab, &format!("{exe} small"))?;
        if !private.ok() {
            return Err(format!("{name}, without a vRNIC: {}", lines(&private)));
        }
        for (way, o) in &others {
            let diff = compare("memory-small", "small", way, &private.text, &without_notes(o));
            if !diff.is_empty() {
                wrong += &format!("{name}\n{diff}");
            }
        }
    }
    none(&wrong)
}

/// Allocators: name, and the library that is preloaded.
fn allocators() -> Vec<(&'static str, Option<String>)> {
    let file = |name: &str| Some(format!("/usr/lib/{}-linux-gnu/{name}", std::env::consts::ARCH));
    vec![
        ("glibc", None),
        ("jemalloc", file("libjemalloc.so.2")),
        ("tcmalloc", file("libtcmalloc_minimal.so.4")),
        ("mimalloc", file("libmimalloc.so.2")),
    ]
}

/// Adds one random sequence with each allocator, in each way.
fn random(t: &mut Tests, place: &str, lab: &Shared<Lab>, seed: u64) {
    for (allocator, library) in allocators() {
        t.on(lab, format!("memory, {place}: memory-random {seed} {STEPS}, {allocator}"), move |lab| {
            let exe = compiled(lab, "memory-random", &["-libverbs", "-pthread"])?;
            // Preloaded for the program only. Otherwise `timeout` would load it, too.
            let preload = library.map_or_else(String::new, |l| {
                if Path::new(&l).exists() { format!("env LD_PRELOAD={l} ") } else { "no-such-allocator ".into() }
            });
            let (private, others) = each(lab, &format!("{preload}{exe} {seed} {STEPS}"))?;
            for (way, o) in std::iter::once(("private memory", private)).chain(others) {
                if !o.ok() || !o.text.ends_with("end\n") {
                    return Err(format!("{way}: {}", lines(&o)));
                }
            }
            Ok(())
        });
    }
}

/// Seeds of the sequences that are part of every test run: with threads and without. And how long each sequence is.
const SEEDS: [u64; 2] = [1, 4];
const STEPS: u32 = 4000;
const PACKAGES: &[packages::Needed] = &[packages::RUN, packages::MEMORY];

/// How long random sequences go on, and the first of their seeds: parameters of `cargo xtask test memory`.
fn duration() -> Option<(Duration, u64)> {
    let number = |name: &str| std::env::var(name).ok()?.parse().ok();
    Some((Duration::from_secs(number("BLACKBOX_SECONDS")?), number("BLACKBOX_SEED").unwrap_or(SEEDS[0])))
}

pub(crate) fn tests(t: &mut Tests) {
    t.topic(PACKAGES);
    t.test("memory: a difference is wrong unless it is listed", || {
        a_difference_is_wrong_unless_it_is_listed();
        Ok(())
    });
    let seeds = duration().map_or(SEEDS.to_vec(), |(_, seed)| vec![seed]);
    in_places(t, &places(), |t, place, lab| {
        compare_cases(t, place, lab);
        seeds.iter().for_each(|&seed| random(t, place, lab, seed));
    });
}

/// For `cargo xtask test memory`, goes on with the next seeds until the time since `begin` is over. False if a test
/// failed.
pub(crate) fn go_on(args: &Arguments, begin: Instant) -> bool {
    let Some((duration, seed)) = duration() else { return true };
    let (mut ok, places) = (true, places());
    for seed in seed + 1.. {
        if begin.elapsed() >= duration {
            break;
        }
        let mut t = Tests::default();
        t.topic(PACKAGES);
        in_places(&mut t, &places, |t, place, lab| random(t, place, lab, seed));
        let trials: Vec<_> = t.into_list().into_iter().map(|t| t.trial).collect();
        if trials.iter().all(|t| args.is_filtered_out(t)) {
            break;
        }
        ok &= !libtest_mimic::run(args, trials).has_failed();
    }
    println!("\ndifferences from private memory that do not count:");
    for (i, l) in ALLOWED.iter().enumerate() {
        if ALLOWED[..i].iter().all(|before| before.reason != l.reason) {
            println!("* {} ({}, {})", l.reason, l.program, l.case);
        }
    }
    ok
}

fn a_difference_is_wrong_unless_it_is_listed() {
    assert!(compare("p", "c", "copy", "one\ntwo\n", "one\ntwo\n").is_empty());
    assert!(compare("p", "c", "copy", "one\ntwo\n", "one\nthree\n").contains("copy: three"));
    assert!(compare("p", "c", "copy", "one\ntwo\n", "one\n").contains("(no line)"));
    for l in ALLOWED {
        assert!(compare(l.program, l.case, l.ways[0], l.private, l.instead).is_empty(), "{}", l.reason);
        assert!(!compare(l.program, l.case, "copy", l.private, l.instead).is_empty());
        assert!(!compare(l.program, "another", l.ways[0], l.private, l.instead).is_empty());
    }
}
