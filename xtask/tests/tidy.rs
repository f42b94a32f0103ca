//! Rules of the repository that a program can hold: widths, paths and links in documents, where `unsafe` is, circles
//! between files, plain words.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

use regex::Regex;

/// The widest line, columns.
const WIDTH: usize = 120;
/// Comment lines with words of the patterns in [`DIALECT`], at most: some are right where they stand.
const MAX_DIALECT_LINES: usize = 40;
/// Functions whose error is a `String`, at most: those at the edge, where the text is for people.
const MAX_STRING_ERRORS: usize = 11;

static DIALECT: LazyLock<Regex> = LazyLock::new(|| {
    let words = r"\bso (many|long|much)\b|\bfor so\b|\bthat of\b|\bthose of\b|\bthe one that\b|\b[Ww]hoever\b|\bas far as\b|\bkeen\b|\bzeal|\bin vain\b|\bmute[sd]?\b";
    let begins = r"(What|Who|Of (those|these|them)|As (many|much|long|soon)|So does|None of|One of those)\b";
    Regex::new(&format!(r"//.*({words})|^\s*//[/!]?\s+{begins}")).unwrap()
});

/// Files that know each other in a circle, as prefixes of their paths, and why that may stay.
const HARMLESS_CIRCLES: &[(&str, &str)] = &[
    ("crates/verbs-abi/src/", "C structures that point at each other"),
    (
        "crates/verbs/src/",
        "the table of operations in device.rs names every file, and all need the context of their device",
    ),
    ("crates/rnic/src/objects/", "objects name each other by handles"),
    ("crates/rnic/src/job/", "a job and its end are one thing in two files"),
    ("crates/driver/src/", "the control queue is a part of the context; memory management needs both"),
    ("crates/fleet/src/", "the state, and what is implemented for it in files of its own"),
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// All files of the repository whose names end with one of `endings`, relative to its root.
fn files(endings: &[&str]) -> Vec<String> {
    let listed = Command::new("git")
        .args(["ls-files", "--cached", "--others", "--exclude-standard"])
        .current_dir(root())
        .output()
        .unwrap();
    assert!(listed.status.success(), "git ls-files: {}", String::from_utf8_lossy(&listed.stderr));
    let names = String::from_utf8(listed.stdout).unwrap();
    let wanted = |f: &&str| endings.iter().any(|e| f.ends_with(e)) && root().join(f).is_file();
    names.lines().filter(wanted).map(str::to_owned).collect()
}

fn read(file: &str) -> String {
    std::fs::read_to_string(root().join(file)).unwrap_or_else(|e| panic!("{file}: {e}"))
}

fn report(what: &str, found: &[String]) {
    assert!(found.is_empty(), "{what}:\n{}", found.join("\n"));
}

#[test]
fn lines_have_at_most_120_columns() {
    let mut found = Vec::new();
    for file in files(&[".rs", ".proto", ".md"]) {
        let is_document = file.ends_with(".md");
        let mut is_fenced = false;
        for (n, line) in read(&file).lines().enumerate() {
            let columns = line.chars().count();
            is_fenced ^= is_document && line.trim_start().starts_with("```");
            // rustfmt breaks lines of code, except texts and tables. A row of a table, a heading and a link of a
            // document are one line, and so is what a program prints.
            let is_prose = if is_document {
                !is_fenced
                    && !line.starts_with('`')
                    && !line.contains('|')
                    && !line.contains("](")
                    && !line.starts_with('#')
            } else {
                line.trim_start().starts_with("//") && !line.contains("://") && !line.contains('|')
            };
            if columns > WIDTH && is_prose {
                found.push(format!("{file}:{}: {columns} columns", n + 1));
            }
        }
    }
    report("too wide", &found);
}

#[test]
fn comments_are_in_plain_words() {
    let mut found = Vec::new();
    for file in files(&[".rs", ".c", ".h"]).into_iter().filter(|f| !f.ends_with("tests/tidy.rs")) {
        let text = read(&file);
        found.extend(
            text.lines()
                .enumerate()
                .filter(|(_, l)| DIALECT.is_match(l))
                .map(|(n, l)| format!("{file}:{}: {}", n + 1, l.trim())),
        );
    }
    assert!(
        found.len() <= MAX_DIALECT_LINES,
        "{} lines (see CONTRIBUTING.md, style):\n{}",
        found.len(),
        found.join("\n")
    );
}

#[test]
fn errors_are_types_and_not_texts() {
    let pattern = Regex::new(r"Result<.*, String>").unwrap();
    let count =
        |f: &String| read(f).lines().filter(|l| !l.trim_start().starts_with("//") && pattern.is_match(l)).count();
    let found: usize = files(&[".rs"]).iter().filter(|f| f.contains("/src/")).map(count).sum();
    assert!(found <= MAX_STRING_ERRORS, "{found} functions return a String as error");
}

/// The anchor that a heading gets: lower case, without punctuation, spaces as hyphens.
fn anchor(heading: &str) -> String {
    let kept = heading
        .trim()
        .to_lowercase()
        .chars()
        .filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'))
        .collect::<String>();
    kept.replace(' ', "-")
}

fn anchors(file: &Path) -> BTreeSet<String> {
    let text = std::fs::read_to_string(file).unwrap_or_default();
    text.lines().filter(|l| l.starts_with('#')).map(|l| anchor(l.trim_start_matches('#'))).collect()
}

#[test]
fn links_between_documents_lead_somewhere() {
    let link = Regex::new(r"\]\(([^)\s]+)\)").unwrap();
    let mut found = Vec::new();
    for file in files(&[".md"]) {
        for target in link.captures_iter(&read(&file)).map(|c| c[1].to_owned()) {
            if target.contains("://") || target.starts_with("mailto:") {
                continue;
            }
            let (path, heading) = target.split_once('#').unwrap_or((&target, ""));
            let to = if path.is_empty() { root().join(&file) } else { root().join(&file).parent().unwrap().join(path) };
            if !to.exists() {
                found.push(format!("{file}: no file {path}"));
            } else if !heading.is_empty() && !anchors(&to).contains(heading) {
                found.push(format!("{file}: no heading #{heading} in {}", if path.is_empty() { &file } else { path }));
            }
        }
    }
    report("dead links", &found);
}

/// Notes are dated: they keep the names of their day, and so does the table of what was renamed.
fn is_of_today(file: &String) -> bool {
    !file.starts_with("docs/notes/") && file != "docs/internals/renamed.md"
}

#[test]
fn documents_name_paths_that_exist() {
    let path = Regex::new(r"`((?:crates|xtask|tests|bench|docs|guest|fuzz)/[\w./-]+)`").unwrap();
    let mut found = Vec::new();
    for file in files(&[".md"]).into_iter().filter(is_of_today) {
        for named in path.captures_iter(&read(&file)).map(|c| c[1].to_owned()) {
            if !root().join(&named).exists() {
                found.push(format!("{file}: {named}"));
            }
        }
    }
    report("documents name paths that are not there", &found);
}

#[test]
fn documents_name_modules_that_exist() {
    let module = Regex::new(r"`([a-z_]+)((?:::\w+)+)(?:\(\))?`").unwrap();
    let mut sources: BTreeMap<String, String> = BTreeMap::new();
    for file in files(&[".rs"]).into_iter().filter(|f| f.starts_with("crates/") && f.contains("/src/")) {
        let name = file.split('/').nth(1).unwrap().replace('-', "_");
        *sources.entry(name).or_default() += &format!("{file}\n{}", read(&file));
    }
    let mut found = Vec::new();
    // The specification of the RFC mode names tests by their file in `crates/testkit/tests/rfc`.
    for file in files(&[".md"]).into_iter().filter(is_of_today).filter(|f| !f.ends_with("virtio-rdma-rfc.md")) {
        for c in module.captures_iter(&read(&file)) {
            let words = |text: &String| c[2].split("::").all(|w| text.contains(w));
            if !sources.get(c[1].trim_start_matches("unirdma_")).is_some_and(words) {
                found.push(format!("{file}: {}{}", &c[1], &c[2]));
            }
        }
    }
    report("documents name modules that are not there", &found);
}

/// The code of a file: comments and the tests at its end are left out.
fn code(file: &str) -> String {
    let text = read(file);
    let code = text.split("\n#[cfg(test)]\nmod ").next().unwrap_or_default();
    code.lines().filter(|l| !l.trim_start().starts_with("//")).flat_map(|l| [l, "\n"]).collect()
}

#[test]
fn unsafe_is_where_the_architecture_page_says() {
    let block = Regex::new(r"\bunsafe\s*(\{|fn\b|impl\b|extern\b)").unwrap();
    let has: BTreeSet<String> = files(&[".rs"])
        .into_iter()
        .filter(|f| f.starts_with("crates/") && f.contains("/src/") && block.is_match(&code(f)))
        .collect();
    let page = read("ARCHITECTURE.md");
    let section =
        page.split("\n## Where `unsafe` is\n").nth(1).expect("ARCHITECTURE.md has a section `Where unsafe is`");
    let section = section.split("\n## ").next().unwrap();
    // `a/{b,c}.rs` stands for two paths.
    let named = Regex::new(r"`([\w./-]+/)(?:\{([\w,]+)\}\.rs|([\w.-]+))`").unwrap();
    let named: Vec<String> = named
        .captures_iter(section)
        .flat_map(|c| match c.get(2) {
            Some(names) => names.as_str().split(',').map(|n| format!("{}{n}.rs", &c[1])).collect::<Vec<_>>(),
            None => vec![c[1].to_owned() + &c[3]],
        })
        .collect();
    let is_named = |f: &str| named.iter().any(|n| f == n || f.starts_with(&format!("{n}/")));
    report(
        "unsafe, and not named in ARCHITECTURE.md",
        &has.iter().filter(|f| !is_named(f)).cloned().collect::<Vec<_>>(),
    );
    let unused = named.iter().filter(|n| !has.iter().any(|f| f.starts_with(n.as_str()))).cloned().collect::<Vec<_>>();
    report("named in ARCHITECTURE.md as having unsafe, which they have not", &unused);
}

/// The modules of a crate by path (`["network", "bpf"]`), and their files.
fn modules(src: &str) -> BTreeMap<Vec<String>, String> {
    let below = files(&[".rs"]).into_iter().filter(|f| f.starts_with(&format!("{src}/")));
    let of = |f: String| {
        let mut path: Vec<String> = f[src.len() + 1..f.len() - 3].split('/').map(str::to_owned).collect();
        if path.last().is_some_and(|l| l == "mod") || path == ["lib"] || path == ["main"] {
            path.pop();
        }
        (path, f)
    };
    below.map(of).collect()
}

/// All paths that a `use` line names: `a::{b, c::d}` are `a::b` and `a::c::d`.
fn expand(tree: &str, before: &[String], to: &mut Vec<Vec<String>>) {
    let tree = tree.trim();
    let Some(open) = tree.find('{') else {
        let name = tree.split(" as ").next().unwrap_or_default();
        let parts = name.split("::").map(|p| p.trim().to_owned()).filter(|p| !p.is_empty());
        return to.push(before.iter().cloned().chain(parts).collect());
    };
    let mut head: Vec<String> = before.to_vec();
    head.extend(tree[..open].split("::").map(|p| p.trim().to_owned()).filter(|p| !p.is_empty()));
    let inner = &tree[open + 1..tree.rfind('}').unwrap_or(tree.len())];
    let (mut depth, mut begin) = (0, 0);
    for (at, c) in inner.char_indices().chain([(inner.len(), ',')]) {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                if !inner[begin..at].trim().is_empty() {
                    expand(&inner[begin..at], &head, to);
                }
                begin = at + 1;
            }
            _ => {}
        }
    }
}

/// Which files of a crate each of its files names, by `use` lines and by paths in the code. Parents and children of a
/// module do not count: they are parts of one thing.
fn arrows(src: &str) -> BTreeMap<String, BTreeSet<String>> {
    let modules = modules(src);
    let uses = Regex::new(r"(?m)^\s*(?:pub(?:\([^)]*\))?\s+)?use\s+([^;]+);").unwrap();
    let inline = Regex::new(r"\b((?:crate|super|self)(?:::\w+)+)").unwrap();
    let mut all = BTreeMap::new();
    for (module, file) in &modules {
        let code = code(file);
        let mut paths = Vec::new();
        uses.captures_iter(&code).for_each(|c| expand(&c[1], &[], &mut paths));
        paths.extend(inline.captures_iter(&code).map(|c| c[1].split("::").map(str::to_owned).collect()));
        let mut known = BTreeSet::new();
        for path in paths {
            let mut from = module.clone();
            let mut rest = &path[..];
            match rest.first().map(String::as_str) {
                Some("crate") => (from, rest) = (Vec::new(), &rest[1..]),
                Some("self") => rest = &rest[1..],
                Some("super") => {
                    while rest.first().is_some_and(|r| r == "super") {
                        from.pop();
                        rest = &rest[1..];
                    }
                }
                _ => {}
            }
            for part in rest {
                from.push(part.clone());
                if !modules.contains_key(&from) {
                    from.pop();
                    break;
                }
            }
            let is_own = from.starts_with(module) || module.starts_with(&from);
            if let Some(to) = modules.get(&from).filter(|_| !is_own) {
                known.insert(to.clone());
            }
        }
        all.insert(file.clone(), known);
    }
    all
}

#[test]
fn files_know_each_other_in_no_circle() {
    let sources: BTreeSet<String> =
        files(&["/src/lib.rs", "/src/main.rs"]).iter().map(|f| f.rsplit_once('/').unwrap().0.to_owned()).collect();
    let mut found = Vec::new();
    for src in sources.iter().filter(|s| !s.contains("examples")) {
        let arrows = arrows(src);
        // All files that a file knows, by way of others too. It is in a circle if it is one of them.
        let reached = |file: &String| {
            let (mut seen, mut next) = (BTreeSet::new(), vec![file]);
            while let Some(f) = next.pop() {
                next.extend(arrows.get(f).into_iter().flatten().filter(|t| seen.insert((*t).clone())));
            }
            seen
        };
        let left = arrows.iter().filter(|(file, _)| reached(file).contains(*file));
        let is_harmless = |f: &String| HARMLESS_CIRCLES.iter().any(|(files, _)| f.starts_with(files));
        found.extend(left.filter(|(f, _)| !is_harmless(f)).map(|(f, to)| format!("{f} -> {to:?}")));
    }
    report("circles", &found);
}
