//! Builds the library that stock QEMU needs preloaded (`guest/qemu/name.rs`), which `vm` embeds.

use std::env;
use std::path::Path;
use std::process::Command;

const SOURCE: &str = "../../guest/qemu/name.rs";

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
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
