//! Resource limits of a worker, derived from the size of the machine.

use std::io;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde::{Deserialize, Serialize};

/// Most descriptors of a worker, if the supervisor may have as many.
const DESCRIPTORS: u64 = 1 << 20;
/// Smallest limit on a worker's own memory, bytes.
const LEAST_DATA: u64 = 512 << 20;
/// Bytes of address space: 96 TiB that the ledger gives to vRNICs, and 8 TiB for the worker itself. A process has 128
/// TiB.
const ADDRESSES: u64 = 104 << 40;

/// Resource limits of a worker. The number of processes is not limited, because that limit counts all processes of a
/// user, which workers share. A worker makes no processes anyway, and its cgroup limits its threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// Number of descriptors.
    pub descriptors: u64,
    /// Bytes of the worker's own memory: heap and stacks. Mapped memory of tenants does not count.
    pub data: u64,
    /// Bytes of address space.
    pub addresses: u64,
}

impl Limits {
    /// Limits derived from the limits of this process and the memory of this machine.
    pub fn of_machine() -> Self {
        let memory = memory();
        Limits {
            descriptors: getrlimit(Resource::Nofile).maximum.unwrap_or(u64::MAX).min(DESCRIPTORS),
            data: (memory / 2).max(LEAST_DATA),
            addresses: ADDRESSES,
        }
    }

    /// Sets the limits for this process; returns a description.
    ///
    /// # Errors
    /// The limit that the kernel refuses, and its error.
    pub(super) fn set(&self) -> io::Result<String> {
        let all = [
            ("descriptors", Resource::Nofile, self.descriptors),
            ("memory", Resource::Data, self.data),
            ("addresses", Resource::As, self.addresses),
        ];
        for (what, resource, wanted) in all {
            limit(resource, wanted).map_err(|e| io::Error::new(e.kind(), format!("{what}: {e}")))?;
        }
        let (data, addresses) = (self.data >> 20, self.addresses >> 40);
        Ok(format!("{} descriptors, {data} MiB of own memory, {addresses} TiB of addresses", self.descriptors))
    }
}

/// Sets a limit to `wanted`, unless it is lower already.
pub(super) fn limit(resource: Resource, wanted: u64) -> io::Result<()> {
    let most = getrlimit(resource).maximum.map_or(wanted, |old| old.min(wanted));
    Ok(setrlimit(resource, Rlimit { current: Some(most), maximum: Some(most) })?)
}

/// Raises the limit on descriptors of this process to its maximum.
pub fn raise_descriptors() {
    if let Err(error) = raise(Resource::Nofile) {
        tracing::debug!(%error, "the limit on descriptors stays as it is");
    }
}

/// Raises a limit to the maximum that this process may have.
pub(super) fn raise(resource: Resource) -> io::Result<()> {
    let maximum = getrlimit(resource).maximum;
    Ok(setrlimit(resource, Rlimit { current: maximum, maximum })?)
}

/// Bytes of memory of this machine.
pub(super) fn memory() -> u64 {
    let info = rustix::system::sysinfo();
    info.totalram as u64 * u64::from(info.mem_unit)
}
