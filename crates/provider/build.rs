//! Lets the provider depend on `libibverbs.so.1` without having it: makes a library of that name with the symbols that
//! `src/ibverbs.rs` declares, and the version of rdma-core's private interface. Linking against it gives the provider
//! the same properties as Debian's own providers: the needed library and the version of each symbol.
//!
//! Also links the provider into `target/<profile>/provider` under the name that libibverbs looks for.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

const VERSION: &str = "IBVERBS_PRIVATE_34";

fn main() {
    const DECLARATIONS: &str = "src/ibverbs.rs";
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed={DECLARATIONS}");
    let out = PathBuf::from(env::var("OUT_DIR").expect("OUT_DIR"));
    let text = fs::read_to_string(DECLARATIONS).expect(DECLARATIONS);
    let (_, functions) = text.split_once("unsafe extern \"C\" {").expect("declarations");
    let names = functions.lines().filter_map(|l| l.trim().strip_prefix("pub fn ")?.split('(').next());
    let stub = make_stub(&out, names);
    println!("cargo::rustc-cdylib-link-arg={}", stub.display());
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libunirdma-rdmav34.so");
    // libibverbs keeps the registered table for ever, so the provider must not be unloaded.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
    let dir = out.ancestors().nth(3).expect("target/<profile>").join("provider");
    fs::create_dir_all(&dir).expect("provider");
    let path = dir.join("libunirdma-rdmav34.so");
    let _ = fs::remove_file(&path);
    std::os::unix::fs::symlink("../libunirdma_provider.so", &path).expect("symlink");
}

/// Makes a library with functions of these names, which do nothing.
fn make_stub<'a>(out: &Path, names: impl Iterator<Item = &'a str>) -> PathBuf {
    let mut code = String::from("#![no_std]\ncore::arch::global_asm!(\".text\",\n");
    for name in names {
        code += &format!("\".globl stub_{name}\", \".type stub_{name},@function\", \"stub_{name}: ret\",\n");
        code +=
            &format!("\".size stub_{name}, . - stub_{name}\", \".symver stub_{name}, {name}@@{VERSION}, remove\",\n");
    }
    code += ");\n#[panic_handler]\nfn panic(_: &core::panic::PanicInfo<'_>) -> ! {\n    loop {}\n}\n";
    let (source, map, stub) = (out.join("stub.rs"), out.join("stub.map"), out.join("libibverbs.so.1"));
    fs::write(&source, code).expect("stub.rs");
    fs::write(&map, format!("{VERSION} {{ }};\n")).expect("stub.map");
    let mut rustc = Command::new(env::var("RUSTC").expect("RUSTC"));
    rustc.args(["--edition", "2024", "--crate-type", "cdylib", "--crate-name", "ibverbs", "-C", "panic=abort"]);
    rustc.args(["--target", &env::var("TARGET").expect("TARGET")]);
    if let Ok(linker) = env::var("RUSTC_LINKER") {
        rustc.arg("-C").arg(format!("linker={linker}"));
    }
    // The flags may name another linker, for example.
    let flags = env::var("CARGO_ENCODED_RUSTFLAGS").unwrap_or_default();
    rustc.args(flags.split('\x1f').filter(|f| !f.is_empty()));
    for arg in ["-nostdlib", "-Wl,-soname,libibverbs.so.1", &format!("-Wl,--version-script={}", map.display())] {
        rustc.arg("-C").arg(format!("link-arg={arg}"));
    }
    let status = rustc.arg("-o").arg(&stub).arg(&source).status().expect("rustc");
    assert!(status.success(), "the stub of libibverbs could not be linked");
    stub
}
