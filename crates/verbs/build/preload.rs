//! Builds `libunirdma-preload.so` from `preload/lib.rs`, beside the links to the library: for each public symbol of
//! libibverbs and librdmacm it has a trampoline to that symbol of our library.
//!
//! Names that other libraries may have too (`rread`, `rpoll` and the like) are left out: in a preloaded library they
//! would be found first. So are private symbols, by which a provider registers itself at the libibverbs that has loaded
//! it, and the old symbols of version 1.0, which take other structures.

use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;
use std::{env, fs};

const SOURCE: &str = "preload/lib.rs";

/// Calls `preload::resolve` with the address of the symbol's record, with all registers of arguments saved, and jumps
/// to what it returns.
const RESOLVE_X86: &str = "__unirdma_resolve: push rax\npush rdi\npush rsi\npush rdx\npush rcx\npush r8\npush r9\n\
    sub rsp, 128\nmovups [rsp], xmm0\nmovups [rsp + 16], xmm1\nmovups [rsp + 32], xmm2\nmovups [rsp + 48], xmm3\n\
    movups [rsp + 64], xmm4\nmovups [rsp + 80], xmm5\nmovups [rsp + 96], xmm6\nmovups [rsp + 112], xmm7\n\
    mov rdi, r11\ncall {resolve}\nmov r11, rax\n\
    movups xmm0, [rsp]\nmovups xmm1, [rsp + 16]\nmovups xmm2, [rsp + 32]\nmovups xmm3, [rsp + 48]\n\
    movups xmm4, [rsp + 64]\nmovups xmm5, [rsp + 80]\nmovups xmm6, [rsp + 96]\nmovups xmm7, [rsp + 112]\n\
    add rsp, 128\npop r9\npop r8\npop rcx\npop rdx\npop rsi\npop rdi\npop rax\njmp r11";
const RESOLVE_ARM: &str = "__unirdma_resolve: stp x29, x30, [sp, #-224]!\nmov x29, sp\nstp x0, x1, [sp, #16]\n\
    stp x2, x3, [sp, #32]\nstp x4, x5, [sp, #48]\nstp x6, x7, [sp, #64]\nstr x8, [sp, #80]\nstp q0, q1, [sp, #96]\n\
    stp q2, q3, [sp, #128]\nstp q4, q5, [sp, #160]\nstp q6, q7, [sp, #192]\nmov x0, x17\nbl {resolve}\nmov x16, x0\n\
    ldp x0, x1, [sp, #16]\nldp x2, x3, [sp, #32]\nldp x4, x5, [sp, #48]\nldp x6, x7, [sp, #64]\nldr x8, [sp, #80]\n\
    ldp q0, q1, [sp, #96]\nldp q2, q3, [sp, #128]\nldp q4, q5, [sp, #160]\nldp q6, q7, [sp, #192]\n\
    ldp x29, x30, [sp], #224\nbr x16";

/// True if the preloaded library has a symbol.
fn covers(version: &str, name: &str, default: bool) -> bool {
    let public = (name.starts_with("ibv_") && name != "ibv_register_driver" || name.starts_with("rdma_"))
        || name.starts_with("_ibv_query_");
    public && !version.contains("PRIVATE") && (default || version != "IBVERBS_1.0")
}

/// The source of the trampolines, and the versions of their symbols.
fn exports(table: &str, arm: bool) -> (String, Vec<&str>) {
    let mut asm = String::from("core::arch::global_asm!(\n");
    let mut put = |s: &str| writeln!(asm, "    {s:?},").expect("string");
    put(&format!(".pushsection .text.unirdma,\"ax\",@progbits\n{}", if arm { RESOLVE_ARM } else { RESOLVE_X86 }));
    let (mut slots, mut nodes) = (0, Vec::new());
    for line in table.lines() {
        let f: Vec<&str> = line.split('\t').collect();
        let [version, name, kind] = f[..] else { panic!("three columns expected: {line}") };
        let default = kind == "default";
        if !covers(version, name, default) {
            continue;
        }
        if !nodes.contains(&version) {
            nodes.push(version);
        }
        let (at, label, n) = (slots * 8, format!("__unirdma_{slots}_{name}"), slots);
        let body = if arm {
            format!(
                "adrp x16, {{slots}}\nadd x16, x16, :lo12:{{slots}}\nldr x16, [x16, #{at}]\ncbz x16, 1f\nbr x16\n\
                 1: adrp x17, .Lrecord{n}\nadd x17, x17, :lo12:.Lrecord{n}\nb __unirdma_resolve"
            )
        } else {
            format!(
                "mov r11, [rip + {{slots}} + {at}]\ntest r11, r11\njz 1f\njmp r11\n\
                 1: lea r11, [rip + .Lrecord{n}]\njmp __unirdma_resolve"
            )
        };
        put(&format!(".globl {label}\n.type {label},@function\n{label}: {body}\n.size {label}, . - {label}"));
        // See `preload::resolve`.
        let (low, high, missing) = (n & 0xff, n >> 8, super::stub(version, name).as_bytes()["stub_".len()]);
        put(&format!(".Lrecord{n}: .byte {low}, {high}, {missing}\n.asciz \"{name}\"\n.asciz \"{version}\""));
        if arm {
            put(".balign 4");
        }
        put(&format!(".symver {label}, {name}{}{version}, remove", if default { "@@" } else { "@" }));
        slots += 1;
    }
    put(".popsection");
    asm += "    slots = sym SLOTS,\n    resolve = sym resolve,\n);\n";
    writeln!(asm, "/// Addresses of the functions; 0 until a function is called for the first time.").expect("string");
    writeln!(asm, "static SLOTS: [AtomicUsize; {slots}] = [const {{ AtomicUsize::new(0) }}; {slots}];")
        .expect("string");
    (asm, nodes)
}

/// Builds the library in the directory `dropin`.
pub(super) fn build(table: &str, arm: bool, out: &Path, dropin: &Path) {
    println!("cargo::rerun-if-changed=preload");
    let (asm, nodes) = exports(table, arm);
    let (trampolines, script) = (out.join("trampolines.rs"), out.join("preload.map"));
    fs::write(&trampolines, asm).expect("trampolines.rs");
    fs::write(&script, super::version_script(&nodes)).expect("preload.map");
    let mut rustc = Command::new(env::var("RUSTC").expect("RUSTC"));
    rustc.args(["--edition", "2024", "--crate-type", "cdylib", "--crate-name", "unirdma_preload"]);
    rustc.args(["-C", "panic=abort", "-C", "opt-level=s", "-C", "strip=symbols"]);
    rustc.args(["--target", &env::var("TARGET").expect("TARGET")]);
    if let Ok(linker) = env::var("RUSTC_LINKER") {
        rustc.arg("-C").arg(format!("linker={linker}"));
    }
    rustc.arg("-C").arg(format!("link-arg=-Wl,--version-script={}", script.display()));
    rustc.args(["-C", "link-arg=-Wl,-soname,libunirdma-preload.so", "-C", "link-arg=-Wl,-z,nodelete"]);
    let library = dropin.join("libunirdma-preload.so");
    let status = rustc.env("TRAMPOLINES", &trampolines).arg("-o").arg(&library).arg(SOURCE).status().expect("rustc");
    assert!(status.success(), "the library to preload could not be built");
}
