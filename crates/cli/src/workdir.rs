//! The working directory of a container's command, if it is given although the directory above it is not.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{AtFlags, CWD, FileType, FlockOperation, Mode, OFlags, flock, mknodat, openat, statat, unlinkat};
use rustix::process::geteuid;

use crate::home::{Home, Show};

/// Names that make the user's next shell, git or editor run something in a directory.
const GUARDED: [&str; 4] = [".git", ".envrc", ".vscode", ".idea"];
/// The name that, together with others, makes git take a directory without `.git` for a repository. All repositories
/// have it.
const HEAD: &str = "HEAD";

/// A working directory that the container gets.
pub(crate) struct Working {
    /// Without symbolic links.
    pub path: PathBuf,
    /// The guard that keeps the names in it from being changed, or the reason why the directory is read-only as a
    /// whole.
    pub guard: Result<Guard, Unguarded>,
}

/// Why a working directory cannot be guarded.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Unguarded {
    #[error("it belongs to {}, which git or an editor acts upon", .0.display())]
    Repository(PathBuf),
    #[error("{} leads there", .0.display())]
    Link(PathBuf),
    #[error("{0}")]
    Files(io::Error),
}

impl Working {
    /// Names in it that are read-only.
    pub fn guarded(&self) -> &[&'static str] {
        self.guard.as_ref().map_or(&[], |g| &g.names)
    }
}

/// The working directory, if the container gets it. It does if the directory is below a home directory that shows
/// read-only (not that directory itself), or if it belongs to this user and lies within `/tmp` or `/var/tmp`: a
/// container has its own `/tmp` and `/var/tmp`, in which files that the command names would be missing. `hidden`: the
/// virtual layer's directory, which may lie in one of them. Nothing within it is given, because it has the sockets of
/// other vRNICs.
pub(crate) fn find(hidden: &Path, homes: &[Home]) -> Option<Working> {
    let path = std::fs::canonicalize(".").ok()?;
    let top = given_within(&path, homes)?;
    if std::fs::canonicalize(hidden).is_ok_and(|h| path.starts_with(h)) {
        return None;
    }
    let guard = match (repository_of(&path, &top), link_into(&path, homes)) {
        (Some(dir), _) => Err(Unguarded::Repository(dir.into())),
        (None, Some(link)) => Err(Unguarded::Link(link)),
        (None, None) => Guard::take(hidden, &path).map_err(Unguarded::Files),
    };
    Some(Working { path, guard })
}

/// The directory below which `path` is given, or `None` if it is not given.
fn given_within(path: &Path, homes: &[Home]) -> Option<PathBuf> {
    let mut within = None;
    for home in homes {
        let Ok(rest) = path.strip_prefix(&home.path) else { continue };
        let shows = rest.as_os_str().as_encoded_bytes().first().is_some_and(|&b| b != b'.');
        if home.show != Show::Ro || !shows {
            return None;
        }
        within = home.own.then(|| home.path.clone()).or(within);
    }
    let is_own = std::fs::metadata(path).is_ok_and(|m| m.uid() == geteuid().as_raw());
    let temporary = ["/tmp", "/var/tmp"].into_iter().map(Path::new).find(|t| path.starts_with(t) && path != *t);
    within.or(temporary.filter(|_| is_own).map(Path::to_path_buf))
}

/// The guarded directory or repository below `top` that `path` is in or is.
fn repository_of<'a>(path: &'a Path, top: &Path) -> Option<&'a Path> {
    let below = path.ancestors().take_while(|a| a.starts_with(top) && *a != top);
    let is_guarded = |dir: &Path| {
        let name = dir.components().next_back();
        GUARDED.iter().any(|g| name == Some(Component::Normal(g.as_ref())))
            || [HEAD, "objects", "refs"].iter().all(|n| dir.join(n).exists())
    };
    below.into_iter().find(|dir| is_guarded(dir))
}

/// A symbolic link in a hidden part of a home directory by which the user's shell reads files in `path`. People who
/// keep their configuration in a repository have such links.
fn link_into(path: &Path, homes: &[Home]) -> Option<PathBuf> {
    let leads = |home: &Path, to: PathBuf| match home.starts_with(path) {
        // A home directory within the working directory shows there as it does elsewhere.
        true => to.starts_with(path) && !to.starts_with(home),
        false => to.starts_with(path) || path.starts_with(&to) && !home.starts_with(&to),
    };
    homes.iter().filter(|h| !h.by_variable).find_map(|h| {
        let links =
            ["", ".config", ".ssh"].iter().filter_map(|d| std::fs::read_dir(h.path.join(d)).ok()).flatten().flatten();
        let links = links.filter(|e| e.file_type().is_ok_and(|t| t.is_symlink())).map(|e| e.path());
        let hidden =
            |l: &PathBuf| l.strip_prefix(&h.path).is_ok_and(|l| l.as_os_str().as_encoded_bytes().starts_with(b"."));
        links.filter(hidden).find(|l| std::fs::canonicalize(l).is_ok_and(|to| leads(&h.path, to)))
    })
}

/// Keeps guarded names of a directory from being made while containers have it as their working directory. A missing
/// name is a socket meanwhile, which git, shells and editors ignore. The last container removes the sockets.
pub(crate) struct Guard {
    dir: File,
    pub names: Vec<&'static str>,
    /// Locked (shared) by all containers of this virtual layer that have the directory.
    lock: File,
    lock_path: PathBuf,
}

impl Guard {
    fn take(lock_dir: &Path, path: &Path) -> io::Result<Guard> {
        let dir = File::open(path)?;
        let meta = dir.metadata()?;
        let lock_path = lock_dir.join(format!("working-{}-{}", meta.dev(), meta.ino()));
        let lock = share(&lock_path).map_err(crate::errors::context(lock_path.display().to_string()))?;
        let mut names = GUARDED.to_vec();
        // In a directory with a repository, git does not look at HEAD.
        if statat(&dir, ".git/HEAD", AtFlags::SYMLINK_NOFOLLOW).is_err() {
            names.push(HEAD);
        }
        let guard = Guard { dir, names, lock, lock_path };
        for name in &guard.names {
            match guard.keep(name) {
                Ok(FileType::Symlink) => {
                    return Err(io::Error::other(format!("{name} is a symbolic link, which cannot be kept as it is")));
                }
                Ok(_) => {}
                Err(e) => return Err(io::Error::other(format!("{name} cannot be kept from being made: {e}"))),
            }
        }
        Ok(guard)
    }

    /// Makes a socket of this name if there is nothing, and returns the type of the file that is there. Other
    /// containers may do so at the same time.
    fn keep(&self, name: &str) -> rustix::io::Result<FileType> {
        let made = mknodat(&self.dir, name, FileType::Socket, Mode::RUSR | Mode::WUSR, 0);
        made.or_else(|e| if e == rustix::io::Errno::EXIST { Ok(()) } else { Err(e) })?;
        Ok(FileType::from_raw_mode(statat(&self.dir, name, AtFlags::SYMLINK_NOFOLLOW)?.st_mode))
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if flock(&self.lock, FlockOperation::NonBlockingLockExclusive).is_err() {
            return;
        }
        for name in GUARDED.iter().chain(&[HEAD]) {
            let found = statat(&self.dir, *name, AtFlags::SYMLINK_NOFOLLOW);
            if found.is_ok_and(|s| FileType::from_raw_mode(s.st_mode) == FileType::Socket) {
                let _ = unlinkat(&self.dir, *name, AtFlags::empty());
            }
        }
        let _ = std::fs::remove_file(&self.lock_path);
    }
}

/// Opens a file with a shared lock. The holder of an exclusive lock removes the file, so its path is looked up again.
fn share(path: &Path) -> io::Result<File> {
    loop {
        let flags = OFlags::CREATE | OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let file = File::from(openat(CWD, path, flags, Mode::RUSR | Mode::WUSR)?);
        flock(&file, FlockOperation::LockShared)?;
        let here = file.metadata()?.ino();
        if std::fs::symlink_metadata(path).is_ok_and(|m| m.ino() == here) {
            return Ok(file);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn home(path: &Path, show: Show, own: bool) -> Home {
        Home { path: path.into(), show, own, by_variable: false }
    }

    #[test]
    fn below_a_home_a_working_directory_is_given_but_in_what_does_not_show() {
        let h = Path::new("/nonexistent/u");
        let given = |rest: &str, homes: &[Home]| given_within(&h.join(rest), homes).is_some();
        let ro = home(h, Show::Ro, true);
        assert!(given("work", std::slice::from_ref(&ro)) && given("a/.b/c", std::slice::from_ref(&ro)));
        for not in ["", ".ssh", ".local/bin", ".config/x"] {
            assert!(!given(not, std::slice::from_ref(&ro)), "{not}");
        }
        assert!(!given("work", &[home(h, Show::Ro, false)]), "somebody else's");
        assert!(!given("work", &[home(h, Show::Rw, true)]), "it is given with the home");
        assert!(!given("work", &[home(h, Show::None, true)]));
        // A home directory within another: both must allow it.
        let inner = home(&h.join("x"), Show::Ro, true);
        let both = [ro, inner];
        assert!(given("x/work", &both) && given("y", &both));
        assert!(!given("x", &both) && !given("x/.ssh", &both) && !given(".y/x", &both));
    }

    #[test]
    fn what_belongs_to_a_repository_is_not_written_to() {
        let top = std::env::temp_dir().join(format!("unirdma-working-{}", std::process::id()));
        for dir in ["p/.git/hooks", "p/src", "bare/objects", "bare/refs", "bare/hooks", "p/.vscode"] {
            std::fs::create_dir_all(top.join(dir)).unwrap();
        }
        std::fs::write(top.join("bare/HEAD"), "ref: refs/heads/main\n").unwrap();
        let part = |rest: &str| repository_of(&top.join(rest), &top).is_some();
        assert!(part("p/.git/hooks") && part("p/.git") && part("bare") && part("bare/hooks") && part("p/.vscode"));
        assert!(!part("p") && !part("p/src"));
        std::fs::remove_dir_all(&top).unwrap();
    }

    #[test]
    fn what_a_hidden_link_leads_to_is_not_written_to() {
        use std::os::unix::fs::symlink;
        let top = std::env::temp_dir().join(format!("unirdma-links-{}", std::process::id()));
        for dir in [".config", "dots/fish", "work", "big"] {
            std::fs::create_dir_all(top.join(dir)).unwrap();
        }
        let top = std::fs::canonicalize(top).unwrap();
        std::fs::write(top.join("dots/bashrc"), "").unwrap();
        for (to, link) in
            [("dots/bashrc", ".bashrc"), ("../dots/fish", ".config/fish"), (".", ".self"), ("big", "shown")]
        {
            symlink(to, top.join(link)).unwrap();
        }
        let homes = [home(&top, Show::Ro, true)];
        let link = |rest: &str| link_into(&top.join(rest), &homes).is_some();
        assert!(link("dots") && link("dots/fish") && link("dots/fish/functions"));
        assert!(!link("work") && !link("big"));
        // The home directory lies below this directory, where it is covered.
        assert!(link_into(&std::env::temp_dir(), &homes).is_none());
        std::fs::remove_dir_all(&top).unwrap();
    }

    #[test]
    fn names_that_are_missing_are_there_until_the_last_container_ends() {
        let top = std::env::temp_dir().join(format!("unirdma-guard-{}", std::process::id()));
        let dir = top.join("work");
        std::fs::create_dir_all(dir.join(".idea")).unwrap();
        let names = || {
            let mut all: Vec<_> =
                std::fs::read_dir(&dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
            all.sort();
            all
        };
        let (a, b) = (Guard::take(&top, &dir).unwrap(), Guard::take(&top, &dir).unwrap());
        assert_eq!(names(), [".envrc", ".git", ".idea", ".vscode", "HEAD"]);
        drop(a);
        assert_eq!(names(), [".envrc", ".git", ".idea", ".vscode", "HEAD"]);
        drop(b);
        assert_eq!(names(), [".idea"]);
        // Containers that begin at the same time do not take each other's sockets for files of the user.
        let many: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(|| Guard::take(&top, &dir))).collect();
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        });
        assert!(many.iter().all(Result::is_ok));
        drop(many);
        assert_eq!(names(), [".idea"]);
        // A repository has its own HEAD. A file that the user makes in the place of a socket stays.
        std::fs::create_dir(dir.join(".git")).unwrap();
        std::fs::write(dir.join(".git/HEAD"), "ref: refs/heads/main\n").unwrap();
        let c = Guard::take(&top, &dir).unwrap();
        assert_eq!(names(), [".envrc", ".git", ".idea", ".vscode"]);
        std::fs::remove_file(dir.join(".envrc")).unwrap();
        std::fs::write(dir.join(".envrc"), "").unwrap();
        drop(c);
        assert_eq!(names(), [".envrc", ".git", ".idea"]);
        assert_eq!(std::fs::read_dir(&top).unwrap().count(), 1, "the lock is gone");
        // A link could be replaced by another program.
        std::os::unix::fs::symlink("elsewhere", dir.join(".vscode")).unwrap();
        assert!(Guard::take(&top, &dir).is_err_and(|e| e.to_string().contains(".vscode is a symbolic link")));
        assert_eq!(names(), [".envrc", ".git", ".idea", ".vscode"]);
        std::fs::remove_dir_all(&top).unwrap();
    }
}
