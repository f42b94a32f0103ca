//! The documents as a book: `docs/SUMMARY.md` lists its pages, and mdBook makes it.
//!
//! Pages keep the places that they have in the repository, so that their links lead where they lead there.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Component, Path, PathBuf};
use std::process::Command;

use crate::process::succeed;
use crate::{Result, failed, packages, root};

/// Files outside of `docs` that the book has, too.
const OUTSIDE: [&str; 7] = [
    "README.md",
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "LICENSE-APACHE",
    "LICENSE-MIT",
    "guest/linux/README.md",
    "guest/qemu/README.md",
];

/// Makes the book, and checks its links.
///
/// # Errors
/// A page that the list lacks, a link that leads nowhere, or what mdBook says.
pub fn make() -> Result<PathBuf> {
    let dir = root().join("target/book");
    let (from, src) = (root().join("docs"), dir.join("src"));
    let _ = fs::remove_dir_all(&src);
    let _ = fs::remove_dir_all(dir.join("book"));
    fs::create_dir_all(&src).map_err(failed("target/book"))?;
    succeed("cp", Command::new("cp").arg("-r").arg(&from).arg(src.join("docs")))?;
    for file in OUTSIDE.map(Path::new) {
        let (name, to) = (file.display().to_string(), src.join(file));
        fs::create_dir_all(to.parent().unwrap_or(&src)).map_err(failed(&name))?;
        fs::copy(root().join(file), to).map_err(failed(&name))?;
    }
    fs::copy(from.join("book.toml"), dir.join("book.toml")).map_err(failed("docs/book.toml"))?;
    let list = fs::read_to_string(from.join("SUMMARY.md")).map_err(failed("docs/SUMMARY.md"))?;
    fs::remove_file(src.join("docs/SUMMARY.md")).map_err(failed("docs/SUMMARY.md"))?;
    let mut listed = BTreeSet::new();
    let mut text = String::new();
    for line in list.lines() {
        match line.split_once("](").and_then(|(title, rest)| Some((title, rest.strip_suffix(')')?))) {
            Some((title, link)) => {
                let page = normal(&Path::new("docs").join(link));
                text += &format!("{title}]({})\n", page.display());
                listed.insert(page);
            }
            None => text += &format!("{line}\n"),
        }
    }
    let pages = files_of(&src, "md")?;
    let pages = pages.iter().filter_map(|page| page.strip_prefix(&src).ok());
    let missing: Vec<_> = pages.filter(|p| !listed.contains(*p)).map(|p| p.display().to_string()).collect();
    if !missing.is_empty() {
        return Err(format!("docs/SUMMARY.md does not list {}", missing.join(", ")));
    }
    fs::write(src.join("SUMMARY.md"), text).map_err(failed("SUMMARY.md"))?;
    succeed("mdbook", mdbook()?.args(["build", "."]).current_dir(&dir))?;
    let html = dir.join("book");
    check(&html)?;
    Ok(html.join("index.html"))
}

/// mdBook: the machine's, or Debian 13's, which is downloaded once.
fn mdbook() -> Result<Command> {
    if Command::new("mdbook").arg("--version").output().is_ok() {
        return Ok(Command::new("mdbook"));
    }
    let parts = root().join("target/mdbook");
    if !parts.join("usr/bin/mdbook").exists() {
        println!("downloading mdBook");
        let _ = fs::remove_dir_all(&parts);
        packages::extract("trixie", "mdbook", &parts)?;
    }
    let library = format!("usr/lib/{}-linux-gnu", std::env::consts::ARCH);
    let loader = if cfg!(target_arch = "aarch64") { "ld-linux-aarch64.so.1" } else { "ld-linux-x86-64.so.2" };
    let mut c = Command::new(parts.join(&library).join(loader));
    c.arg("--library-path").arg(parts.join(library)).arg(parts.join("usr/bin/mdbook"));
    Ok(c)
}

/// A path without `..`.
fn normal(path: &Path) -> PathBuf {
    let mut all = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => drop(all.pop()),
            Component::CurDir => {}
            other => all.push(other),
        }
    }
    all
}

/// The files in a directory and below whose names end so.
fn files_of(dir: &Path, kind: &str) -> Result<Vec<PathBuf>> {
    Ok(files(dir)?.into_iter().filter(|f| f.extension().is_some_and(|e| e == kind)).collect())
}

/// All files in a directory and below.
fn files(dir: &Path) -> Result<Vec<PathBuf>> {
    let mut all = Vec::new();
    for entry in fs::read_dir(dir).map_err(failed(&dir.display().to_string()))?.flatten() {
        let path = entry.path();
        if path.is_dir() { all.extend(files(&path)?) } else { all.push(path) }
    }
    Ok(all)
}

/// Checks that links within the book lead to files and places in them.
fn check(html: &Path) -> Result<()> {
    let mut texts = BTreeMap::new();
    for file in files_of(html, "html")? {
        let text = fs::read_to_string(&file).map_err(failed(&file.display().to_string()))?;
        texts.insert(file, text);
    }
    let mut dead = BTreeSet::new();
    for (file, text) in &texts {
        // mdBook's own parts of a page are not ours to check.
        let page = text.split_once("<main>").map_or("", |(_, page)| page);
        for link in page.split("href=\"").skip(1).filter_map(|l| l.split('"').next()) {
            if link.contains(':') || link.is_empty() {
                continue;
            }
            let (path, place) = link.split_once('#').unwrap_or((link, ""));
            let to = if path.is_empty() { file.clone() } else { normal(&file.parent().unwrap_or(html).join(path)) };
            let leads = match texts.get(&to) {
                Some(text) => place.is_empty() || text.contains(&format!("id=\"{place}\"")),
                None => place.is_empty() && to.exists(),
            };
            if !leads {
                dead.insert(format!("{}: {link}", file.strip_prefix(html).unwrap_or(file).display()));
            }
        }
    }
    if dead.is_empty() {
        Ok(())
    } else {
        Err(format!("links that lead nowhere:\n{}", dead.into_iter().collect::<Vec<_>>().join("\n")))
    }
}
