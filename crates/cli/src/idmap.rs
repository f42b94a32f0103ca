//! The ids that a container's user has outside of the container.
//!
//! Root inside must not be root outside: a file that belongs to root may be written by any process with root's user id,
//! whatever capabilities that process lacks. So if root starts a container, its ids 0 to 65535 are mapped to a range
//! that nobody else has. A container of an ordinary user has only that user's id.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::fs::{Mode, OFlags};
use rustix::process::{getegid, geteuid};
use rustix::thread::UnshareFlags;

use crate::errors::context;
use crate::process;

/// Number of ids of a container that root starts.
const COUNT: u32 = 65_536;
/// First id of the range if /etc/subuid gives none. Distributions assign no ids from here on.
const BASE: u32 = 0x7000_0000;
/// The only id of a container of root if there are too few ids for a range, as in a container of other software.
const NOBODY: u32 = 65_534;

/// Namespaces of a container that exist before its tree of mounts does.
pub(crate) struct Namespaces {
    pub users: OwnedFd,
    /// The network namespace, which belongs to the user namespace; `None` if the container shares the host's.
    pub network: Option<OwnedFd>,
}

/// The ids of a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ids {
    /// User and group id outside to which the first user and group inside are mapped.
    pub outside: (u32, u32),
    pub inside: (u32, u32),
    pub count: u32,
}

/// True if a file like /proc/PID/uid_map has all of these ids inside.
fn has(map: &str, first: u32, count: u32) -> bool {
    let line = |l: &str| {
        let mut n = l.split_whitespace().map(|w| w.parse::<u64>().unwrap_or(0));
        (n.next().unwrap_or(0), n.nth(1).unwrap_or(0))
    };
    let (first, end) = (u64::from(first), u64::from(first) + u64::from(count));
    map.lines().map(line).any(|(from, n)| from <= first && end <= from + n)
}

/// Root's range in a file like /etc/subuid, if it is large enough.
fn subordinate(file: &str) -> Option<u32> {
    let root = file.lines().filter_map(|l| l.strip_prefix("root:").or_else(|| l.strip_prefix("0:")));
    let ranges =
        root.filter_map(|r| r.split_once(':')).filter_map(|(b, n)| Some((b.parse().ok()?, n.parse::<u32>().ok()?)));
    ranges.into_iter().find(|&(base, n)| base >= COUNT && n >= COUNT).map(|r| r.0)
}

/// The user and the group of this process.
pub(crate) fn user() -> (u32, u32) {
    (geteuid().as_raw(), getegid().as_raw())
}

/// Writes a file of a process that describes its user namespace. `process`: its PID, or `self`.
///
/// # Errors
/// The kernel refuses.
pub(crate) fn write(process: &str, file: &str, text: &str) -> io::Result<()> {
    let path = format!("/proc/{process}/{file}");
    std::fs::write(&path, text).map_err(context(format!("cannot write {path}")))
}

/// Maps one user and one group of outside to themselves in the user namespace of a process.
///
/// # Errors
/// The kernel refuses.
pub(crate) fn map_only(process: &str, (uid, gid): (u32, u32)) -> io::Result<()> {
    write(process, "uid_map", &format!("{uid} {uid} 1"))?;
    write(process, "setgroups", "deny")?;
    write(process, "gid_map", &format!("{gid} {gid} 1"))
}

impl Ids {
    /// True if the ids inside differ from the ids outside.
    pub fn are_mapped(&self) -> bool {
        self.inside != self.outside
    }

    /// The ids of a container that this process starts.
    pub fn choose() -> Ids {
        let read = |f: &str| std::fs::read_to_string(f).unwrap_or_default();
        let me = user();
        let own = Ids { outside: me, inside: me, count: 1 };
        if me.0 != 0 {
            return own;
        }
        let (uids, gids) = (read("/proc/self/uid_map"), read("/proc/self/gid_map"));
        let from_files = subordinate(&read("/etc/subuid")).zip(subordinate(&read("/etc/subgid")));
        let ranges =
            from_files.into_iter().chain([(BASE, BASE)]).map(|base| (base, COUNT)).chain([((NOBODY, NOBODY), 1)]);
        let fits = |&((u, g), n): &((u32, u32), u32)| has(&uids, u, n) && has(&gids, g, n);
        let found = ranges.into_iter().find(fits);
        found.map_or(own, |(outside, count)| Ids { outside, inside: (0, 0), count })
    }

    /// Makes a user namespace with these ids, below this process's own, and in it a network namespace if `own_net` says
    /// so. `proc`: a /proc of this process's PID namespace.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn namespaces(&self, proc: BorrowedFd<'_>, own_net: bool) -> io::Result<Namespaces> {
        let (mut ours, mut theirs) = UnixStream::pair()?;
        let Some(pid) = process::fork(UnshareFlags::empty())? else {
            drop(ours);
            let network = if own_net { UnshareFlags::NEWNET } else { UnshareFlags::empty() };
            // SAFETY: the process has one thread and shares no descriptor table with another.
            let made = unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWUSER | network) };
            let _ = theirs.write_all(&[u8::from(made.is_ok())]);
            let _ = theirs.read(&mut [0]);
            std::process::exit(0);
        };
        drop(theirs);
        let mut made = [0];
        let done = ours.read_exact(&mut made).and_then(|()| match made {
            [1] => self.write(proc, pid).and_then(|()| {
                let open = |kind: &str| {
                    let path = format!("{pid}/ns/{kind}");
                    rustix::fs::openat(proc, path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
                };
                Ok(Namespaces { users: open("user")?, network: own_net.then(|| open("net")).transpose()? })
            }),
            _ => Err(io::Error::other(
                "cannot make namespaces (sysctl user.max_user_namespaces, user.max_net_namespaces)",
            )),
        });
        drop(ours);
        process::wait(pid)?;
        done
    }

    /// Maps these ids in the user namespace of a process.
    fn write(&self, proc: BorrowedFd<'_>, pid: i32) -> io::Result<()> {
        let put = |file: &str, text: String| {
            let f = rustix::fs::openat(proc, format!("{pid}/{file}"), OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty());
            f.and_then(|f| rustix::io::write(&f, text.as_bytes())).map_err(|e| {
                io::Error::new(io::Error::from(e).kind(), format!("cannot write {file} of the container: {e}"))
            })
        };
        put("uid_map", format!("{} {} {}", self.inside.0, self.outside.0, self.count))?;
        if !self.are_mapped() {
            put("setgroups", "deny".into())?;
        }
        put("gid_map", format!("{} {} {}", self.inside.1, self.outside.1, self.count)).map(|_| ())
    }

    /// Becomes the container's user, in its user namespace.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn enter(&self, namespace: &OwnedFd) -> io::Result<()> {
        let kind = Some(rustix::thread::LinkNameSpaceType::User);
        rustix::thread::move_into_link_name_space(namespace.as_fd(), kind)?;
        if !self.are_mapped() {
            return Ok(());
        }
        rustix::thread::set_thread_groups(&[])?;
        become_user(self.inside)
    }
}

/// Becomes this user and group of this process's user namespace.
fn become_user((uid, gid): (u32, u32)) -> io::Result<()> {
    let (uid, gid) = (rustix::process::Uid::from_raw(uid), rustix::process::Gid::from_raw(gid));
    rustix::thread::set_thread_res_gid(gid, gid, gid)?;
    Ok(rustix::thread::set_thread_res_uid(uid, uid, uid)?)
}

/// Gives up the groups that would still count in a container of another user, if this process is root's.
pub(crate) fn leave_groups() {
    if geteuid().is_root() {
        // An error means a user namespace without groups, which has none to give up.
        let _ = rustix::thread::set_thread_groups(&[]);
    }
}

/// Becomes the first user of this process's user namespace: root, or the only user that is mapped.
///
/// # Errors
/// The kernel refuses.
pub(crate) fn become_first_user() -> io::Result<()> {
    let first = |file: &str| {
        let map = std::fs::read_to_string(file)?;
        let id = map.split_whitespace().next().and_then(|w| w.parse::<u32>().ok());
        id.ok_or_else(|| io::Error::other(format!("{file} is empty")))
    };
    become_user((first("/proc/self/uid_map")?, first("/proc/self/gid_map")?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_must_be_mapped_whole() {
        let all = "         0          0 4294967295\n";
        let some = "0 1000 1\n1 100000 65536\n";
        assert!(has(all, BASE, COUNT) && has(some, NOBODY, 1));
        assert!(!has(some, BASE, COUNT) && !has(some, 0, COUNT) && !has("0 1000 1\n", NOBODY, 1) && !has("", 0, 1));
    }

    #[test]
    fn roots_subordinate_ids_are_used() {
        assert_eq!(subordinate("user:100000:65536\nroot:231072:65536\n"), Some(231_072));
        assert_eq!(subordinate("0:300000:131072\n"), Some(300_000));
        assert_eq!(subordinate("root:100000:1000\nroot:1000:65536\nuser:100000:65536\n"), None);
    }
}
