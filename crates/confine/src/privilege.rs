//! Privileges of a process: its user and its capabilities, which it cannot regain afterwards.

use std::ffi::CString;
use std::io;

use rustix::process::{DumpableBehavior, Gid, Resource, Uid, geteuid, getuid, set_dumpable_behavior};
use rustix::thread::{self, CapabilitySet, CapabilitySets};
use serde::{Deserialize, Serialize};

use super::{InForce, Measure, limits, scheduling};

/// Users that workers run as by default, in order of preference.
const DEFAULT_USERS: [&str; 2] = ["unirdma", "nobody"];

/// A user of this machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct User {
    /// Its name.
    pub name: String,
    /// Its id.
    pub uid: u32,
    /// Its group's id.
    pub gid: u32,
}

impl User {
    /// Looks up a user in the system's user databases.
    fn named(name: &str) -> io::Result<Option<Self>> {
        let c = CString::new(name)?;
        let mut room = vec![0u8; 1 << 16];
        // SAFETY: an all-zero passwd is valid: its pointers are null and never followed.
        let mut user: libc::passwd = unsafe { std::mem::zeroed() };
        let mut found = std::ptr::null_mut();
        // SAFETY: the name ends with a zero, and the structure, the room of the given length and the pointer are ours.
        let e = unsafe {
            libc::getpwnam_r(c.as_ptr(), &raw mut user, room.as_mut_ptr().cast(), room.len(), &raw mut found)
        };
        match (e, found.is_null()) {
            (0 | libc::ENOENT | libc::ESRCH, true) => Ok(None),
            (0, false) => Ok(Some(User { name: name.into(), uid: user.pw_uid, gid: user.pw_gid })),
            (e, _) => Err(io::Error::from_raw_os_error(e)),
        }
    }
}

/// The id of a group of users of this machine.
///
/// # Errors
/// One line, also if there is none of this name.
pub fn group_named(name: &str) -> io::Result<u32> {
    let c = CString::new(name)?;
    let mut room = vec![0u8; 1 << 16];
    // SAFETY: an all-zero group is valid: its pointers are null and never followed.
    let mut group: libc::group = unsafe { std::mem::zeroed() };
    let mut found = std::ptr::null_mut();
    // SAFETY: the name ends with a zero, and the structure, the room of the given length and the pointer are ours.
    let e =
        unsafe { libc::getgrnam_r(c.as_ptr(), &raw mut group, room.as_mut_ptr().cast(), room.len(), &raw mut found) };
    match (e, found.is_null()) {
        (0 | libc::ENOENT | libc::ESRCH, true) => Err(invalid(format!("there is no group of users {name:?}"))),
        (0, false) => Ok(group.gr_gid),
        (e, _) => Err(io::Error::from_raw_os_error(e)),
    }
}

fn invalid(text: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, text)
}

/// The user that workers run as, or the reason why they keep the supervisor's user.
pub(super) fn user_of_workers(name: Option<&str>) -> io::Result<Result<User, String>> {
    if !geteuid().is_root() {
        return match name {
            None => Ok(Err("the supervisor is not root, so workers have its user".into())),
            Some(_) => Err(invalid("only root can let workers run as another user (--user)".into())),
        };
    }
    let Some(name) = name else {
        for name in DEFAULT_USERS {
            if let Some(user) = User::named(name)?.filter(|u| u.uid != 0) {
                return Ok(Ok(user));
            }
        }
        return Ok(Err("there is neither a user unirdma nor nobody; --user names another one".into()));
    };
    match User::named(name)? {
        None => Err(invalid(format!("there is no user {name:?} (--user)"))),
        Some(user) if user.uid == 0 => Err(invalid(format!("workers cannot run as {name:?}, which is root (--user)"))),
        Some(user) => Ok(Ok(user)),
    }
}

/// Gives up, for good, all rights that a worker does not need.
pub(super) fn leave(user: Result<&User, &String>) -> [Measure; 5] {
    // Threads inherit the weight, and most give it up again (`confine::thread`).
    let weight = scheduling::take_weight();
    let bounded = keep_in_bounding_set(CapabilitySet::empty());
    let user = match user {
        // The limit on a user's threads would count the threads of all workers.
        Ok(u) => limits::raise(Resource::Nproc).and_then(|()| become_user(u)).map_err(|e| format!("{}: {e}", u.name)),
        Err(why) => Err(why.clone()),
    };
    let capabilities = keep(CapabilitySet::empty()).map(|()| match &bounded {
        Ok(()) => "none, and none to be had".to_string(),
        Err(_) => "none".to_string(),
    });
    let cores = limits::limit(Resource::Core, 0)
        .and_then(|()| Ok(set_dumpable_behavior(DumpableBehavior::NotDumpable)?))
        .map(|()| "none; nobody else of this user can read its memory".to_string());
    [
        Measure::new("user", user),
        Measure::new("capabilities", capabilities),
        no_new_privs(),
        Measure::new("weight", weight),
        Measure::new("core_dumps", cores),
    ]
}

fn no_new_privs() -> Measure {
    let done = thread::set_no_new_privs(true);
    Measure::new("no_new_privs", done.map(|()| "for good".into()))
}

/// Changes to the ids of a user, for good. Each call affects this thread only, which must be the only one.
fn become_user(user: &User) -> io::Result<String> {
    let (uid, gid) = (Uid::from_raw(user.uid), Gid::from_raw(user.gid));
    if getuid() != uid {
        thread::set_thread_groups(&[])?;
        thread::set_thread_res_gid(gid, gid, gid)?;
        thread::set_thread_res_uid(uid, uid, uid)?;
    }
    Ok(format!("{}, uid {}", user.name, user.uid))
}

/// Drops all capabilities except these, of which the process keeps those that it has.
fn keep(capabilities: CapabilitySet) -> io::Result<()> {
    // Older kernels have no ambient set.
    let _ = thread::clear_ambient_capability_set();
    let kept = thread::capabilities(None)?.permitted & capabilities;
    let sets = CapabilitySets { effective: kept, permitted: kept, inheritable: CapabilitySet::empty() };
    Ok(thread::set_capabilities(None, sets)?)
}

/// Restricts the capabilities of programs that are executed later to these.
fn keep_in_bounding_set(capabilities: CapabilitySet) -> io::Result<()> {
    for capability in (0..u64::BITS).map(|bit| CapabilitySet::from_bits_retain(1 << bit)) {
        match thread::capability_is_in_bounding_set(capability) {
            Ok(true) if !capabilities.contains(capability) => thread::remove_capability_from_bounding_set(capability)?,
            Ok(_) => {}
            // The kernel has no more capabilities.
            Err(_) => break,
        }
    }
    Ok(())
}

/// Activities of the supervisor that need privileges.
#[derive(Clone, Copy, Debug, Default)]
pub struct Needs {
    /// It starts workers as another user, and ends them.
    pub workers: bool,
    /// It opens sockets with large buffers, marks packets, and runs `nft`.
    pub network: bool,
    /// It opens packet sockets (`--full-icrc`).
    pub packets: bool,
    /// It sets up VFs, makes device nodes for programs, and sees which processes of all users have VFs open.
    pub vfs: bool,
}

impl Needs {
    fn capabilities(self) -> CapabilitySet {
        let of = |needed: bool, set: CapabilitySet| if needed { set } else { CapabilitySet::empty() };
        // The worker drops its bounding set, for which it needs SETPCAP. The directory and the peers file may lie below
        // directories of another user, which needs DAC_READ_SEARCH.
        of(
            self.workers,
            CapabilitySet::SETUID
                | CapabilitySet::SETGID
                | CapabilitySet::SETPCAP
                | CapabilitySet::KILL
                | CapabilitySet::SYS_NICE,
        ) | of(self.network, CapabilitySet::NET_ADMIN)
            | of(self.packets, CapabilitySet::NET_RAW)
            | of(self.vfs, CapabilitySet::NET_ADMIN | CapabilitySet::SYS_PTRACE | CapabilitySet::MKNOD)
            | CapabilitySet::DAC_READ_SEARCH
    }
}

/// Restricts the supervisor, which must have one thread, to the capabilities that it needs. Its children inherit this.
pub fn confine_supervisor(needs: Needs) -> InForce {
    let kept = needs.capabilities();
    // Changing the bounding set needs a capability. Without it, the bounding set does not matter, since the process
    // could gain nothing.
    let _ = keep_in_bounding_set(kept);
    let capabilities = keep(kept).and_then(|()| Ok(thread::capabilities(None)?.permitted));
    let names = |set: CapabilitySet| {
        let names: Vec<String> = set.iter_names().map(|(name, _)| name.to_lowercase()).collect();
        if names.is_empty() { "none".to_string() } else { format!("only {}", names.join(", ")) }
    };
    InForce { measures: vec![Measure::new("capabilities", capabilities.map(names)), no_new_privs()] }
}
