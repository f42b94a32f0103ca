//! The files that a confined VMM gets: those that its command line names, and no others.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::path::{Component, Path, PathBuf};

use crate::bind::Bind;
use crate::{loader, mounts};

/// Files that a container has of its own: files of the kernel, and names that mean another file in each process.
const NOT_GIVEN: [&str; 8] =
    ["/proc", "/sys", "/dev/pts", "/dev/ptmx", "/dev/fd", "/dev/stdin", "/dev/stdout", "/dev/stderr"];

/// A path from `/` on, without `..`.
pub(crate) fn place(path: &Path) -> PathBuf {
    let whole = std::path::absolute(path).unwrap_or_else(|_| path.into());
    if !whole.components().any(|c| c == Component::ParentDir) {
        return whole;
    }
    // The kernel goes up from what a symbolic link leads to.
    let real = match (whole.parent(), whole.file_name()) {
        (Some(parent), Some(name)) => fs::canonicalize(parent).map(|p| p.join(name)),
        _ => fs::canonicalize(&whole),
    };
    real.unwrap_or(whole)
}

/// Gives a file at its own place.
pub(crate) fn given(path: &Path, read_only: bool) -> Bind {
    let path = place(path);
    Bind { source: path.clone(), target: path, read_only }
}

/// The file of a program, if a container would not show it.
pub(crate) fn program(name: &Path) -> Option<Bind> {
    let path = match name.components().count() {
        1 => {
            let path = std::env::var_os("PATH").unwrap_or_default();
            std::env::split_paths(&path).map(|dir| dir.join(name)).find(|file| file.is_file())?
        }
        _ => name.into(),
    };
    Some(given(&path, true)).filter(|b| !mounts::is_of_system(&b.target))
}

/// Libraries that every program of the host preloads, if a container would not show them. `unirdma with` has one.
pub(crate) fn preloaded() -> Vec<Bind> {
    let names = loader::read(Path::new("/etc").join(loader::NAME_FILE));
    let names = String::from_utf8_lossy(&names);
    let files = names.split([' ', '\t', '\n', ':']).map(Path::new).filter(|file| file.is_absolute() && file.is_file());
    files.map(|file| given(file, true)).filter(|b| !mounts::is_of_system(&b.target)).collect()
}

/// Gives the files that arguments of QEMU name. A name is an argument itself, the value of `key=value`, or the text
/// after the last `:` of a value, if it is a path that exists. A name without `/` must be a file. Files of the system
/// are read-only. Nothing in `hidden`, the virtual layer's directory, is given.
pub(crate) fn named(arguments: &[OsString], hidden: &Path) -> Vec<Bind> {
    let hidden = fs::canonicalize(hidden).unwrap_or_else(|_| hidden.into());
    // The command line of a guest's kernel names files of the guest.
    let is_of_guest = |i: usize| i > 0 && [OsStr::new("-append"), OsStr::new("--append")].contains(&&*arguments[i - 1]);
    let arguments = arguments.iter().enumerate().filter(|&(i, _)| !is_of_guest(i));
    arguments.filter_map(|(_, a)| a.to_str()).flat_map(parts).filter_map(|part| file(&part, &hidden)).collect()
}

/// The parts of an argument between its commas. A doubled comma is one of a name.
fn parts(argument: &str) -> Vec<String> {
    argument.replace(",,", "\0").split(',').map(|part| part.replace('\0', ",")).collect()
}

/// The file that a part of an argument names.
fn file(part: &str, hidden: &Path) -> Option<Bind> {
    let value = part.split_once('=').map_or(part, |(_, value)| value);
    let rest = value.rsplit_once(':').map_or(value, |(_, rest)| rest);
    let exists = |text: &&str| match text.contains('/') {
        true => fs::metadata(text).is_ok(),
        false => fs::metadata(text).is_ok_and(|m| m.is_file()),
    };
    let path = Path::new([part, value, rest].into_iter().find(exists)?);
    let (bind, real) = (given(path, false), fs::canonicalize(path).ok()?);
    let stays = |path: &Path| path == Path::new("/") || NOT_GIVEN.iter().any(|n| path.starts_with(n));
    if stays(&real) || stays(&bind.target) || bind.target == Path::new("/dev") || real.starts_with(hidden) {
        return None;
    }
    if !mounts::is_of_system(&bind.target) {
        return Some(bind);
    }
    // Directories of the system show as they are.
    real.is_file().then_some(Bind { read_only: true, ..bind })
}

/// Directories of the host for what a machine needs while it runs. Removed on drop.
pub(crate) struct Scratch {
    pub dir: PathBuf,
}

impl Scratch {
    /// # Errors
    /// No directory can be made.
    pub fn make(name: &str) -> io::Result<Scratch> {
        use std::os::unix::fs::DirBuilderExt;
        // QEMU writes the changes of `--snapshot` there, which may be more than fits into memory.
        let on_disk = std::env::var_os("TMPDIR").map_or_else(|| "/var/tmp".into(), PathBuf::from);
        let parent = if on_disk.is_dir() { on_disk } else { std::env::temp_dir() };
        let dir = place(&parent).join(format!("unirdma-vm-{name}-{}", std::process::id()));
        let scratch = Scratch { dir };
        let directory = |dir: &Path| {
            let made = fs::DirBuilder::new().mode(0o700).create(dir);
            made.map_err(crate::errors::context(dir.display().to_string()))
        };
        directory(&scratch.dir)?;
        directory(&scratch.temporary())?;
        directory(&scratch.seed())?;
        Ok(scratch)
    }

    /// For temporary files of the VMM.
    pub fn temporary(&self) -> PathBuf {
        self.dir.join("tmp")
    }

    /// For files that the VMM shows its guest.
    pub fn seed(&self) -> PathBuf {
        self.dir.join("seed")
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.dir);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A directory with a virtual layer's directory, an image, a socket and a directory.
    fn directory() -> PathBuf {
        let dir = std::env::temp_dir().join(format!("unirdma-vmm-files-{}", std::process::id()));
        fs::create_dir_all(dir.join("layer/vrnics")).unwrap();
        fs::create_dir_all(dir.join("share")).unwrap();
        fs::write(dir.join("a,b.raw"), "").unwrap();
        fs::write(dir.join("layer/admin"), "").unwrap();
        drop(std::os::unix::net::UnixListener::bind(dir.join("sock")).unwrap());
        fs::canonicalize(dir).unwrap()
    }

    #[test]
    fn what_arguments_name_is_given() {
        let dir = directory();
        let d = dir.display();
        let all = |arguments: &[String]| {
            let words: Vec<OsString> = arguments.iter().map(OsString::from).collect();
            named(&words, &dir.join("layer")).into_iter().map(|b| (b.target, b.read_only)).collect::<Vec<_>>()
        };
        let one = |argument: String| all(&["-drive".into(), argument]);
        let image = [(dir.join("a,b.raw"), false)];
        assert_eq!(one(format!("{d}/a,,b.raw")), image);
        assert_eq!(one(format!("file={d}/a,,b.raw,if=virtio,format=raw")), image);
        assert_eq!(one(format!("if=none,file.filename={d}/share/../a,,b.raw")), image);
        assert_eq!(one(format!("socket,id=x,path={d}/sock,server=on")), [(dir.join("sock"), false)]);
        assert_eq!(one(format!("unix:{d}/sock,server=on")), [(dir.join("sock"), false)]);
        assert_eq!(one(format!("fat:rw:{d}/share")), [(dir.join("share"), false)]);
        assert_eq!(one("name=opt/x,file=/etc/passwd".into()), [("/etc/passwd".into(), true)]);
        for none in ["/", "/dev", "/dev/stdin", "/proc/self/maps", "/usr/share", "virtio-rng-pci", "/nonexistent/x"] {
            assert_eq!(one(format!("path={none}")), [], "{none}");
        }
        for hidden in ["layer", "layer/admin", "layer/vrnics"] {
            assert_eq!(one(format!("path={d}/{hidden}")), [], "{hidden}");
        }
        assert_eq!(all(&["-append".into(), format!("init={d}/share")]), []);
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn programs_of_the_system_show_anyway() {
        assert_eq!(program(Path::new("sh")), None);
        assert_eq!(program(Path::new("/bin/sh")), None);
        assert_eq!(program(Path::new("nonesuch")), None);
        assert_eq!(program(Path::new("./nonesuch")).unwrap().target, std::env::current_dir().unwrap().join("nonesuch"));
    }

    #[test]
    fn a_scratch_directory_ends_with_its_owner() {
        let scratch = Scratch::make("test").unwrap();
        let (dir, inside) = (scratch.dir.clone(), [scratch.temporary(), scratch.seed()]);
        assert!(inside.iter().all(|d| d.is_dir()));
        drop(scratch);
        assert!(!dir.exists());
    }
}
