//! Packages of the product. Each is a file in `target/package`.

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::{Output, Result, build, packages, root, unirdma};

const VERSION: &str = env!("CARGO_PKG_VERSION");
/// The end of a program that carries its libraries (`crates/cli/src/carried.rs`).
const MARK: &[u8] = b"unirdma carries\n";

fn of(file: &Path) -> impl FnOnce(std::io::Error) -> String {
    let file = file.display().to_string();
    move |e| format!("{file}: {e}")
}

fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    let parent = path.parent().unwrap_or(path);
    std::fs::create_dir_all(parent).map_err(of(parent))?;
    std::fs::write(path, bytes).map_err(of(path))
}

/// A file of a release without symbols and lines.
fn stripped(file: &Path, dir: &Path) -> Result<Vec<u8>> {
    let to = dir.join("stripped");
    let o = Output::of(Command::new("strip").arg("-o").arg(&to).arg(file));
    if !o.ok() {
        return Err(format!("strip: {}", o.text));
    }
    let bytes = std::fs::read(&to).map_err(of(&to))?;
    std::fs::remove_file(&to).map_err(of(&to))?;
    Ok(bytes)
}

/// The program with the libraries at its end: one file that is the whole installation.
fn whole_program(dir: &Path) -> Result<Vec<u8>> {
    let exe = unirdma();
    let libraries = exe.with_file_name("dropin");
    let parts = ["libibverbs.so.1", "libunirdma-preload.so"].map(|name| stripped(&libraries.join(name), dir));
    let [library, preload] = parts;
    let (library, preload) = (library?, preload?);
    let mut number = DefaultHasher::new();
    (VERSION, &library, &preload).hash(&mut number);
    let numbers = [library.len() as u64, preload.len() as u64, number.finish()];
    let end: Vec<u8> = numbers.iter().flat_map(|n| n.to_le_bytes()).collect();
    Ok([&*stripped(&exe, dir)?, &library, &preload, &end, MARK].concat())
}

/// The newest version of the C library whose symbols a program asks for, as `2_34`.
fn glibc(program: &[u8]) -> u32 {
    const NAME: &[u8] = b"GLIBC_2.";
    let places = program.windows(NAME.len()).enumerate().filter(|(_, w)| *w == NAME).map(|(at, _)| at + NAME.len());
    let number = |at: usize| {
        let digits: String = program[at..].iter().map(|&b| char::from(b)).take_while(char::is_ascii_digit).collect();
        digits.parse::<u32>().ok()
    };
    places.filter_map(number).max().unwrap_or(17)
}

/// Builds the package of Python (a wheel). Returns the file.
///
/// # Errors
/// The step that failed.
pub fn wheel() -> Result<PathBuf> {
    packages::ensure(&[packages::PACKAGE])?;
    build()?;
    let to = root().join("target/package");
    let tree = to.join("wheel");
    if tree.exists() {
        std::fs::remove_dir_all(&tree).map_err(of(&tree))?;
    }
    std::fs::create_dir_all(&tree).map_err(of(&tree))?;
    let program = whole_program(&tree)?;
    let script = tree.join(format!("unirdma-{VERSION}.data/scripts/unirdma"));
    write(&script, &program)?;
    std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).map_err(of(&script))?;
    let modules = root().join("packaging/python/unirdma");
    for module in ["__init__.py", "pytest_plugin.py"] {
        let from = modules.join(module);
        write(&tree.join("unirdma").join(module), &std::fs::read(&from).map_err(of(&from))?)?;
    }
    let info =
        |name: &str, text: &str| write(&tree.join(format!("unirdma-{VERSION}.dist-info/{name}")), text.as_bytes());
    let tag = format!("py3-none-manylinux_2_{}_{}", glibc(&program), std::env::consts::ARCH);
    info("WHEEL", &format!("Wheel-Version: 1.0\nGenerator: unirdma\nRoot-Is-Purelib: false\nTag: {tag}\n"))?;
    info(
        "METADATA",
        &format!(
            "Metadata-Version: 2.1\nName: unirdma\nVersion: {VERSION}\nSummary: Virtual RDMA NICs for containers and \
             tests, without RDMA hardware or a kernel module\nLicense: Apache-2.0 OR MIT\nRequires-Python: >=3.8\n\
             Classifier: Framework :: Pytest\nClassifier: Operating System :: POSIX :: Linux\n\
             Description-Content-Type: text/markdown\n\nUnmodified RDMA programs run in\n\n    unirdma with 2 -- \
             pytest\n"
        ),
    )?;
    info("entry_points.txt", "[pytest11]\nunirdma = unirdma.pytest_plugin\n")?;
    let file = to.join(format!("unirdma-{VERSION}-{tag}.whl"));
    let mut pack = Command::new("/usr/bin/python3");
    let o = Output::of(pack.args(["-m", "wheel", "pack"]).arg(&tree).arg("-d").arg(&to));
    std::fs::remove_dir_all(&tree).map_err(of(&tree))?;
    if o.ok() && file.exists() { Ok(file) } else { Err(format!("wheel: {}", o.text)) }
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_newest_version_of_the_c_library_is_found() {
        assert_eq!(super::glibc(b"..GLIBC_2.2.5\0GLIBC_2.34\0GLIBC_2.9\0GLIBC_PRIVATE"), 34);
        assert_eq!(super::glibc(b"GLIBC_2."), 17);
    }
}
