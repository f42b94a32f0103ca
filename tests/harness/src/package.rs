//! Packages of the product. Each is a file in `target/package`.

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::process::succeed;
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

fn symlink(to: &str, at: &Path) -> Result<()> {
    std::os::unix::fs::symlink(to, at).map_err(of(at))
}

/// An empty directory.
fn fresh(dir: &Path) -> Result<()> {
    if dir.exists() {
        std::fs::remove_dir_all(dir).map_err(of(dir))?;
    }
    std::fs::create_dir_all(dir).map_err(of(dir))
}

/// Copies files and directories into a directory.
fn copy(from: &[PathBuf], to: &Path) -> Result<()> {
    std::fs::create_dir_all(to).map_err(of(to))?;
    succeed("cp", Command::new("cp").arg("-r").args(from).arg(to))
}

/// Writes the built product as it is installed: `bin`, `lib` and `share` belong below a prefix, `etc` below the root.
fn product(to: &Path) -> Result<()> {
    fresh(to)?;
    let (exe, tree) = (unirdma(), root());
    let put = |from: &Path, name: &str| write(&to.join(name), &stripped(from, to)?);
    put(&exe, "bin/unirdma")?;
    let program = to.join("bin/unirdma");
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).map_err(of(&program))?;
    for library in ["libibverbs.so.1", "libunirdma-preload.so"] {
        put(&exe.with_file_name("dropin").join(library), &format!("lib/unirdma/{library}"))?;
    }
    // One file, so that a program has one state.
    symlink("libibverbs.so.1", &to.join("lib/unirdma/librdmacm.so.1"))?;
    write(&to.join("etc/unirdma/host.toml"), said(&exe, &["host", "--print-config"])?.as_bytes())?;
    manual(&exe, &to.join("share/man/man1"))?;
    for (shell, file) in [
        ("bash", "bash-completion/completions/unirdma"),
        ("zsh", "zsh/vendor-completions/_unirdma"),
        ("fish", "fish/vendor_completions.d/unirdma.fish"),
    ] {
        write(&to.join("share").join(file), said(&exe, &["completion", shell])?.as_bytes())?;
    }
    copy(&[tree.join("README.md"), tree.join("docs/user")], &to.join("share/doc/unirdma"))?;
    copy(&[tree.join("docs/grafana")], &to.join("share/unirdma"))?;
    copy(&[tree.join("packaging/systemd")], to)
}

/// Lets the built program write its manual pages.
fn manual(exe: &Path, to: &Path) -> Result<()> {
    said(exe, &["man", &to.display().to_string()]).map(drop)
}

/// Writes the manual pages. Returns their directory, which has nothing else.
///
/// # Errors
/// The step that failed.
pub fn man() -> Result<PathBuf> {
    build()?;
    let dir = root().join("target/package/man");
    fresh(&dir)?;
    manual(&unirdma(), &dir)?;
    Ok(dir)
}

/// The output of a command of the built program.
fn said(exe: &Path, args: &[&str]) -> Result<String> {
    let o = Output::of(Command::new(exe).args(args).env_clear());
    if o.ok() { Ok(o.text) } else { Err(format!("unirdma {}: {}", args.join(" "), o.text)) }
}

/// Builds Debian's packages. Returns the files.
///
/// # Errors
/// The step that failed.
pub fn deb() -> Result<Vec<PathBuf>> {
    packages::ensure(&[packages::DEB])?;
    build()?;
    let changelog = root().join("debian/changelog");
    let first = std::fs::read_to_string(&changelog).map_err(of(&changelog))?;
    if !first.starts_with(&format!("unirdma ({VERSION})")) {
        return Err(format!("debian/changelog does not begin with version {VERSION}"));
    }
    let to = root().join("target/package");
    let all = to.join("deb");
    fresh(&all)?;
    let tree = all.join("unirdma");
    copy(&[root().join("debian")], &tree)?;
    copy(&[root().join("guest/linux")], &tree.join("guest"))?;
    let built = tree.join("built");
    product(&built)?;
    let provider = stripped(&unirdma().with_file_name("libunirdma_provider.so"), &built)?;
    write(&built.join("provider/libunirdma-rdmav34.so"), &provider)?;
    let mut pack = Command::new("dpkg-buildpackage");
    succeed("dpkg-buildpackage", pack.args(["-b", "-us", "-uc"]).current_dir(&tree))?;
    let mut made = Vec::new();
    for entry in std::fs::read_dir(&all).map_err(of(&all))? {
        let file = entry.map_err(of(&all))?.path();
        if file.extension().is_some_and(|e| e == "deb") {
            let name = file.file_name().unwrap_or_default();
            std::fs::rename(&file, to.join(name)).map_err(of(&file))?;
            made.push(to.join(name));
        }
    }
    made.sort();
    std::fs::remove_dir_all(&all).map_err(of(&all))?;
    Ok(made)
}

/// A root directory of this machine's release of Debian, with what every Debian has, and these packages, separated by
/// commas. It is downloaded once for each `name`, and must not be changed.
///
/// # Errors
/// The failed download.
pub fn bare_debian(name: &str, packages: &str) -> Result<PathBuf> {
    let release = std::fs::read_to_string("/etc/os-release").map_err(of(Path::new("/etc/os-release")))?;
    let release = release.lines().find_map(|l| l.strip_prefix("VERSION_CODENAME=")).unwrap_or("stable");
    let dir = root().join("target").join(format!("{name}-{release}"));
    if dir.exists() {
        return Ok(dir);
    }
    println!("downloading a Debian with {packages}");
    let new = dir.with_extension("new");
    fresh(&new)?;
    let unread = ["doc", "locale", "man"].map(|d| format!("--dpkgopt=path-exclude=/usr/share/{d}/*"));
    let mut make = Command::new("mmdebstrap");
    make.args(["--quiet", "--variant=essential", &format!("--include={packages}")]).args(unread).arg(release).arg(&new);
    succeed("mmdebstrap", make.arg(packages::source(release)))?;
    std::fs::rename(&new, &dir).map_err(of(&dir))?;
    Ok(dir)
}

/// Builds an archive with `install.sh`. Returns the file.
///
/// # Errors
/// The step that failed.
pub fn tar() -> Result<PathBuf> {
    packages::ensure(&[packages::PACKAGE])?;
    build()?;
    let to = root().join("target/package");
    let name = format!("unirdma-{VERSION}-{}-linux", std::env::consts::ARCH);
    let tree = to.join(&name);
    product(&tree)?;
    let own = ["packaging/tar/install.sh", "LICENSE-APACHE", "LICENSE-MIT"];
    copy(&own.map(|file| root().join(file)), &tree)?;
    let file = to.join(format!("{name}.tar.gz"));
    let mut pack = Command::new("tar");
    pack.args(["--owner=0", "--group=0", "--sort=name", "-czf"]).arg(&file).arg("-C").arg(&to).arg(&name);
    succeed("tar", &mut pack)?;
    std::fs::remove_dir_all(&tree).map_err(of(&tree))?;
    Ok(file)
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
