//! Gives the library the symbol versions of rdma-core.
//!
//! `data/ibverbs.tsv` and `data/rdmacm.tsv` list every (version, symbol, default or compat) of Debian 12, 13 and
//! unstable: one file is both libraries, so that a program has one state. For each symbol an assembly trampoline with
//! `.symver` is written: to `api::x_NAME` where the sources have such a function, else to a stub that reports
//! `EOPNOTSUPP`.
//!
//! Functions with objects of hosted contexts (`src/hosted`) go to the same symbol of the real libibverbs, by a table of
//! slots; `data/dispatch.tsv` says by which argument a function finds the context. Private symbols, which only
//! providers call, go there as soon as there is a real library.
//!
//! `preload.rs` builds the library that leads programs here which have a libibverbs of their own.
//!
//! The version script only declares the nodes; the exported symbols come from the assembly. Also sets the
//! soname, and links `libibverbs.so.1` and `librdmacm.so.1` into `target/<profile>/dropin`, a directory for
//! LD_LIBRARY_PATH.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::{env, fs};

mod preload;

/// The one exported variable: a byte that provider libraries read.
const DATA_SYMBOL: &str = "verbs_allow_disassociate_destroy";

/// The [`Kind`] of each public function of libibverbs.
const DISPATCH: &str = "data/dispatch.tsv";

/// How a symbol finds its function.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    /// Its first argument is a context.
    Context,
    /// Its first argument is an object whose first field is its context.
    Object,
    /// Providers call it. It goes to the real library, once there is one.
    Forward,
    /// Ours in any case. The function may ask whether its object is of a hosted context.
    Ours,
}

fn kinds() -> BTreeMap<String, Kind> {
    let text = fs::read_to_string(DISPATCH).expect(DISPATCH);
    let kind = |line: &str| {
        let (name, kind) = line.split_once('\t').expect("two columns");
        let kind = match kind {
            "context" => Kind::Context,
            "object" => Kind::Object,
            "renamed" | "ours" => Kind::Ours,
            other => panic!("{name}: unknown kind {other}"),
        };
        (name.to_string(), kind)
    };
    text.lines().map(kind).collect()
}

/// Instructions that go to `ours` if the context of the first argument is ours, or if there is none, and else to the
/// function in slot `slot`. Without a real library, or if that library does not have the symbol, they go to `missing`.
fn dispatch(arm: bool, kind: Kind, slot: usize, ours: &str, missing: &str) -> String {
    let at = slot * 8;
    if arm {
        let find = match kind {
            Kind::Context => "cbz x0, 1f\nldr x16, [x0, #{poll_cq_at}]\n",
            Kind::Object => "cbz x0, 1f\nldr x16, [x0]\ncbz x16, 1f\nldr x16, [x16, #{poll_cq_at}]\n",
            Kind::Forward | Kind::Ours => "",
        };
        let compare = match find {
            "" => "",
            _ => "adrp x17, {poll_cq}\nadd x17, x17, :lo12:{poll_cq}\ncmp x16, x17\nb.ne 2f\n1: ",
        };
        let ours = if find.is_empty() { String::new() } else { format!("{ours}\n") };
        let slot = format!(
            "2: adrp x16, {{slots}}\nadd x16, x16, :lo12:{{slots}}\nmov x17, #{at}\nldr x16, [x16, x17]\n\
             cbz x16, 3f\nbr x16\n3: {missing}"
        );
        return format!("{find}{compare}{ours}{slot}");
    }
    let find = match kind {
        Kind::Context => "test rdi, rdi\njz 5f\nlea r11, [rip + {poll_cq}]\ncmp [rdi + {poll_cq_at}], r11\njne 6f\n",
        Kind::Object => {
            "test rdi, rdi\njz 5f\nmov rax, [rdi]\ntest rax, rax\njz 5f\nlea r11, [rip + {poll_cq}]\n\
             cmp [rax + {poll_cq_at}], r11\njne 6f\n"
        }
        Kind::Forward | Kind::Ours => "",
    };
    let ours = if find.is_empty() { String::new() } else { format!("5: {ours}\n") };
    format!("{find}{ours}6: mov r11, [rip + {{slots}} + {at}]\ntest r11, r11\njz 7f\njmp r11\n7: {missing}")
}

/// A symbol for the preloaded library.
const OWN: &str = "UNIRDMA_1.0\tunirdma_answer_netlink\tdefault\n";

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

/// The stub for a missing function. Errors are reported as -1, as NULL, or as an errno value. What returns a descriptor
/// is of the first kind.
fn stub(version: &str, name: &str) -> &'static str {
    const POINTERS: [&str; 7] = ["alloc", "create", "reg_", "open", "import", "_str", "get_"];
    if version.starts_with("RDMACM") || name.ends_with("_fd") {
        "stub_minus_one"
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
    println!("cargo::rerun-if-changed={DISPATCH}");
    for table in TABLES {
        println!("cargo::rerun-if-changed={table}");
    }
    let out = PathBuf::from(env::var("OUT_DIR").expect("OUT_DIR"));
    let arm = env::var("CARGO_CFG_TARGET_ARCH").expect("arch") == "aarch64";
    let jump = if arm { "b" } else { "jmp" };
    let mut have = BTreeSet::new();
    implemented(Path::new("src"), &mut have);
    let table = TABLES.map(|t| fs::read_to_string(t).expect(t)).concat() + OWN;
    let mut asm = String::from("core::arch::global_asm!(\n");
    let mut used = BTreeSet::new();
    let kinds = kinds();
    // Symbols of the real library that trampolines go to.
    let mut slots: Vec<(&str, &str)> = Vec::new();
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
            let missing = if arm {
                format!("adrp x0, .Lname{n}\nadd x0, x0, :lo12:.Lname{n}\nb {{{}}}", stub(version, name))
            } else {
                format!("lea rdi, [rip + .Lname{n}]\njmp {{{}}}", stub(version, name))
            };
            // Version 1.0 had other structures: its hidden symbols never reach the current functions.
            let old = version == "IBVERBS_1.0" && at == "@";
            let ours = if have.contains(name) && !old {
                used.insert(name);
                format!("{jump} {{{name}}}")
            } else {
                missing.clone()
            };
            let kind = match kinds.get(name) {
                _ if old || version.starts_with("RDMACM") => Kind::Ours,
                Some(&kind) => kind,
                None if version.contains("PRIVATE") && !have.contains(name) => Kind::Forward,
                None => Kind::Ours,
            };
            let body = if kind == Kind::Ours {
                ours
            } else {
                slots.push((name, version));
                dispatch(arm, kind, slots.len() - 1, &ours, &missing)
            };
            if matches!(kind, Kind::Context | Kind::Object) {
                // For our own calls.
                put(format!(".globl __unirdma_any_{name}\n.hidden __unirdma_any_{name}\n__unirdma_any_{name}:"));
            }
            put(format!(".globl {label}\n.type {label},@function\n{label}: {body}\n.size {label}, . - {label}"));
            put(format!(".Lname{n}: .asciz \"{name}@{version}\""));
        }
        put(format!(".symver {label}, {name}{at}{version}, remove\n.popsection"));
    }
    for name in used {
        writeln!(asm, "    {name} = sym crate::api::x_{name},").expect("string");
    }
    asm += "    poll_cq = sym crate::cq::poll_cq,\n";
    asm += "    poll_cq_at = const crate::hosted::POLL_CQ_AT,\n";
    asm += "    slots = sym SLOTS,\n";
    for s in ["stub_null", "stub_errno", "stub_minus_one"] {
        writeln!(asm, "    {s} = sym crate::stubs::{s},").expect("string");
    }
    asm += ");\n";
    let n = slots.len();
    writeln!(asm, "/// Addresses of the real library's functions; 0 while there are none.").expect("string");
    writeln!(asm, "pub(crate) static SLOTS: [std::sync::atomic::AtomicUsize; {n}] =").expect("string");
    writeln!(asm, "    [const {{ std::sync::atomic::AtomicUsize::new(0) }}; {n}];").expect("string");
    writeln!(asm, "/// Name and version of each.").expect("string");
    writeln!(asm, "pub(crate) static SLOT_NAMES: [(&std::ffi::CStr, &std::ffi::CStr); {n}] = [").expect("string");
    for (name, version) in slots {
        writeln!(asm, "    (c\"{name}\", c\"{version}\"),").expect("string");
    }
    asm += "];\n";
    fs::write(out.join("exports.rs"), asm).expect("exports.rs");
    let dropin = link(&out, &nodes);
    preload::build(&table, arm, &out, &dropin);
}

/// Declares symbol versions.
fn version_script(nodes: &[&str]) -> String {
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
    map
}

/// Tells the linker what it needs to know. Returns the directory with the links.
fn link(out: &Path, nodes: &[&str]) -> PathBuf {
    let script = out.join("nodes.map");
    fs::write(&script, version_script(nodes)).expect("nodes.map");
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
    dir
}
