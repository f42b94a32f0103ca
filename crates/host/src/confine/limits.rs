//! Limits of a worker by the size of the machine.

use std::io;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde::{Deserialize, Serialize};

/// Most descriptors that a worker may have, of those that the supervisor may.
const DESCRIPTORS: u64 = 1 << 20;
/// Least memory of its own that a worker may use, bytes.
const LEAST_DATA: u64 = 512 << 20;
/// Bytes of addresses: what the ledger gives to vRNICs (96 TiB), and 8 TiB for the worker itself. A process has 128 TiB.
const ADDRESSES: u64 = 104 << 40;

/// What a worker may use. There is no limit on processes, since it counts those of a user, and workers share one: a worker makes none
/// in any case, and the cgroup limits its threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// Descriptors.
    pub descriptors: u64,
    /// Bytes of the worker's own memory: heap and stacks. What it maps of its tenants does not count.
    pub data: u64,
    /// Bytes of addresses.
    pub addresses: u64,
}

impl Limits {
    /// By the limits of this process and the memory of this machine.
    pub fn of_machine() -> Self {
        let memory = memory();
        Limits {
            descriptors: getrlimit(Resource::Nofile).maximum.unwrap_or(u64::MAX).min(DESCRIPTORS),
            data: (memory / 2).max(LEAST_DATA),
            addresses: ADDRESSES,
        }
    }

    /// Sets them for this process; what they are.
    ///
    /// # Errors
    /// Which one the kernel refuses.
    pub(super) fn set(&self) -> Result<String, String> {
        let all = [
            ("descriptors", Resource::Nofile, self.descriptors),
            ("memory", Resource::Data, self.data),
            ("addresses", Resource::As, self.addresses),
        ];
        for (what, resource, wanted) in all {
            limit(resource, wanted).map_err(|e| format!("{what}: {e}"))?;
        }
        let (data, addresses) = (self.data >> 20, self.addresses >> 40);
        Ok(format!("{} descriptors, {data} MiB of own memory, {addresses} TiB of addresses", self.descriptors))
    }
}

/// Sets a limit to `wanted`, or leaves what is lower already.
pub(super) fn limit(resource: Resource, wanted: u64) -> io::Result<()> {
    let most = getrlimit(resource).maximum.map_or(wanted, |old| old.min(wanted));
    Ok(setrlimit(resource, Rlimit { current: Some(most), maximum: Some(most) })?)
}

/// Raises a limit as far as this process may.
pub(super) fn raise(resource: Resource) -> io::Result<()> {
    let maximum = getrlimit(resource).maximum;
    Ok(setrlimit(resource, Rlimit { current: maximum, maximum })?)
}

/// Bytes of memory of this machine.
pub(super) fn memory() -> u64 {
    let info = rustix::system::sysinfo();
    info.totalram as u64 * u64::from(info.mem_unit)
}
