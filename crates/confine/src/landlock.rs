//! Landlock: the worker cannot open, create, remove or execute files by path, use TCP ports, signal processes outside,
//! or connect to abstract sockets outside. Open descriptors stay usable.

use std::error::Error;
use std::io;

use landlock::{ABI, Access, AccessFs, AccessNet, LandlockStatus, Ruleset, RulesetAttr, RulesetCreatedAttr, Scope};

/// The version whose rights are refused, as far as the kernel knows them. Later versions also refuse UDP sockets
/// (version 10), which a worker needs.
const RIGHTS: ABI = ABI::V6;

/// Refuses everything that the kernel can refuse, for this thread and all threads that it starts later. Needs
/// `no_new_privs`.
///
/// # Errors
/// The reason, in words.
pub(super) fn restrict() -> Result<String, String> {
    let ruleset = Ruleset::default();
    // The error of the call by which the line above asks for the kernel's version. `LandlockStatus` has no place for
    // errors such as EPERM, which comes from a container's filter.
    let no_version = io::Error::last_os_error();
    let status = ruleset
        .handle_access(AccessFs::from_all(RIGHTS))
        .and_then(|r| r.handle_access(AccessNet::from_all(RIGHTS)))
        .and_then(|r| r.scope(Scope::from_all(RIGHTS)))
        .and_then(|r| r.create())
        .and_then(|r| r.no_new_privs(false).restrict_self())
        .map_err(|e| cause(&e).to_string())?;
    match (status.landlock, no_version.raw_os_error()) {
        (LandlockStatus::Available { effective_abi, kernel_abi }, _) => {
            Ok(format!("version {}, no access to files by path", kernel_abi.unwrap_or(effective_abi as i32)))
        }
        (_, Some(libc::ENOSYS | libc::EOPNOTSUPP)) => Err("this kernel has none, or it is switched off".into()),
        _ => Err(no_version.to_string()),
    }
}

/// The error at the end of the chain of sources: the system call's.
fn cause(error: &dyn Error) -> &dyn Error {
    error.source().map_or(error, cause)
}
