//! Gives the library the symbol versions of rdma-core.
//!
//! `data/ibverbs.tsv` and `data/rdmacm.tsv` list every (version, symbol, default or compat) of Debian 12, 13 and
//! unstable: one file is both libraries, so that a program has one state. For each symbol an assembly trampoline with
//! `.symver` is written: to `api::x_NAME` where the sources have such a function, else to a stub that reports
//! `EOPNOTSUPP`. The version script only declares the nodes; the exported symbols come from the assembly. Also sets the
//! soname, and links `libibverbs.so.1` and `librdmacm.so.1` into `target/<profile>/dropin`, a directory for
//! LD_LIBRARY_PATH.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::{env, fs};

/// The one exported variable: a byte that provider libraries read.
const DATA_SYMBOL: &str = "verbs_allow_disassociate_destroy";

/// The lists of symbols.
const TABLES: [&str; 2] = ["data/ibverbs.tsv", "data/rdmacm.tsv"];

fn implemented(dir: &Path, names: &mut BTreeSet<String>) {
    for entry in fs::read_dir(dir).expect("sources").flatten() {
        if entry.path().is_dir() {
            implemented(&entry.path(), names);
            continue;
        }
        let text = fs::read_to_string(entry.path()).unwrap_or_default();
        for part in text.split("extern \"C\" fn x_").skip(1) {
            names.insert(part.split('(').next().unwrap_or_default().to_string());
        }
    }
}

/// The stub for a missing function. Errors are reported as -1, as NULL, as an errno value, or not at all.
fn stub(version: &str, name: &str) -> &'static str {
    const POINTERS: [&str; 7] = ["alloc", "create", "reg_", "open", "import", "_str", "get_"];
    if version.starts_with("RDMACM") {
        "stub_minus_one"
    } else if name.starts_with("verbs_register_driver") {
        "stub_void"
    } else if !name.starts_with("ibv_cmd")
        && POINTERS.iter().any(|p| name.contains(p))
        && !name.contains("unimport")
        && !name.contains("dealloc")
        && !name.contains("dereg")
    {
        "stub_null"
    } else {
        "stub_errno"
    }
}

fn main() {
    println!("cargo::rerun-if-changed=src");
    for table in TABLES {
        println!("cargo::rerun-if-changed={table}");
    }
    let out = PathBuf::from(env::var("OUT_DIR").expect("OUT_DIR"));
    let arm = env::var("CARGO_CFG_TARGET_ARCH").expect("arch") == "aarch64";
    let jump = if arm { "b" } else { "jmp" };
    let mut have = BTreeSet::new();
    implemented(Path::new("src"), &mut have);
    let table = TABLES.map(|t| fs::read_to_string(t).expect(t)).concat();
    let mut asm = String::from("core::arch::global_asm!(\n");
    let mut used = BTreeSet::new();
    let mut nodes: Vec<&str> = Vec::new();
    for (n, line) in table.lines().enumerate() {
        let f: Vec<&str> = line.split('\t').collect();
        let [version, name, kind] = f[..] else { panic!("line {} of the symbols: three columns expected", n + 1) };
        let at = if kind == "default" { "@@" } else { "@" };
        if !nodes.contains(&version) {
            nodes.push(version);
        }
        let label = format!("__unirdma_{n}_{name}");
        let mut put = |s: String| writeln!(asm, "    {s:?},").expect("string");
        if name == DATA_SYMBOL {
            put(".pushsection .data.unirdma,\"aw\",@progbits".into());
            put(format!(".globl {label}\n.type {label},@object\n{label}: .byte 0\n.size {label}, 1"));
        } else {
            put(format!(".pushsection .text.{label},\"ax\",@progbits"));
            // Version 1.0 had other structures: its hidden symbols never reach the current functions.
            let body = if have.contains(name) && !(version == "IBVERBS_1.0" && at == "@") {
                used.insert(name);
                format!("{jump} {{{name}}}")
            } else if arm {
                format!("adrp x0, .Lname{n}\nadd x0, x0, :lo12:.Lname{n}\nb {{{}}}", stub(version, name))
            } else {
                format!("lea rdi, [rip + .Lname{n}]\njmp {{{}}}", stub(version, name))
            };
            put(format!(".globl {label}\n.type {label},@function\n{label}: {body}\n.size {label}, . - {label}"));
            put(format!(".Lname{n}: .asciz \"{name}@{version}\""));
        }
        put(format!(".symver {label}, {name}{at}{version}, remove\n.popsection"));
    }
    for name in used {
        writeln!(asm, "    {name} = sym crate::api::x_{name},").expect("string");
    }
    for s in ["stub_void", "stub_null", "stub_errno", "stub_minus_one"] {
        writeln!(asm, "    {s} = sym crate::stubs::{s},").expect("string");
    }
    asm += ");\n";
    fs::write(out.join("exports.rs"), asm).expect("exports.rs");
    link(&out, &nodes);
}

fn link(out: &Path, nodes: &[&str]) {
    let mut map = String::new();
    let library = |v: &str| v.split('_').next().unwrap_or_default().to_string();
    let mut previous = "";
    for v in nodes {
        let private = v.contains("PRIVATE");
        // Each version of a library builds upon the one before.
        let parent = if private || library(v) != library(previous) { "" } else { previous };
        writeln!(map, "{v} {{ }} {parent};").expect("string");
        if !private {
            previous = v;
        }
    }
    let script = out.join("nodes.map");
    fs::write(&script, map).expect("nodes.map");
    println!("cargo::rustc-cdylib-link-arg=-Wl,--version-script={}", script.display());
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libibverbs.so.1");
    // Memory may be moved, and fork handlers are installed, so dlclose(3) must not unload the library.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
    let profile = out.ancestors().nth(3).expect("target/<profile>");
    let dir = profile.join("dropin");
    fs::create_dir_all(&dir).expect("dropin");
    for name in ["libibverbs.so.1", "libibverbs.so", "librdmacm.so.1", "librdmacm.so"] {
        let path = dir.join(name);
        let _ = fs::remove_file(&path);
        std::os::unix::fs::symlink("../libibverbs.so", &path).expect("symlink");
    }
}
