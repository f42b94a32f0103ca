//! Builds the library that stock QEMU needs preloaded (`guest/qemu/name.rs`), which `vm` embeds. Also tells the linker
//! in which order to place the functions that execute work requests (`link-order.txt`).

use std::env;
use std::path::Path;
use std::process::Command;

const SOURCE: &str = "../../guest/qemu/name.rs";
const ORDER: &str = "link-order.txt";

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    order_functions();
    println!("cargo::rerun-if-changed={SOURCE}");
    let library = Path::new(&env::var("OUT_DIR").expect("OUT_DIR")).join("name.so");
    let mut rustc = Command::new(env::var("RUSTC").expect("RUSTC"));
    rustc.args([
        "--edition",
        "2024",
        "--crate-type",
        "cdylib",
        "-C",
        "panic=abort",
        "-C",
        "opt-level=s",
        "-C",
        "strip=symbols",
    ]);
    rustc.args(["--target", &env::var("TARGET").expect("TARGET")]);
    if let Ok(linker) = env::var("RUSTC_LINKER") {
        rustc.arg("-C").arg(format!("linker={linker}"));
    }
    let status = rustc.arg("-o").arg(&library).arg(SOURCE).status().expect("rustc");
    assert!(status.success(), "the library that names the device in QEMU could not be built");
}

/// Passes the linker a script that places the functions listed in [`ORDER`], and their constants, before all others.
/// Only for release builds. Skipped if a linker was chosen by hand, because it may not know such scripts; GNU ld and
/// LLD add this script to their own.
fn order_functions() {
    println!("cargo::rerun-if-changed={ORDER}");
    let chosen = env::var("CARGO_ENCODED_RUSTFLAGS").is_ok_and(|f| f.contains("linker") || f.contains("fuse-ld"));
    if env::var("PROFILE").is_ok_and(|p| p != "release") || chosen {
        return;
    }
    let list = std::fs::read_to_string(ORDER).expect(ORDER);
    let names: Vec<&str> = list.lines().filter(|l| !l.is_empty() && !l.starts_with('#')).collect();
    let first = |section: &str| {
        let inputs: String = names.iter().map(|n| format!("    *({section}.*{n}*)\n")).collect();
        format!("SECTIONS {{\n  {section}.hot : ALIGN(4096) {{\n{inputs}  }}\n}}\nINSERT BEFORE {section};\n")
    };
    let script = Path::new(&env::var("OUT_DIR").expect("OUT_DIR")).join("hot.ld");
    std::fs::write(&script, first(".text") + &first(".rodata")).expect("the script for the linker");
    println!("cargo::rustc-link-arg-bin=unirdma=-Wl,-T,{}", script.display());
}
