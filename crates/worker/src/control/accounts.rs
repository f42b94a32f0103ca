//! The resources that all vRNICs of a worker may hold, derived from the limits of its process.

use rustix::process::{Resource, getrlimit};
use unirdma_link::Ledger;

/// Descriptors that a worker keeps for itself: listeners, its supervisor, sockets to other hosts, pollers.
const OWN_DESCRIPTORS: u64 = 512;
/// Mappings that it keeps for itself: code, threads, heaps.
const OWN_MAPPINGS: u64 = 4096;
/// Default of vm.max_map_count, if it cannot be read.
const MAP_COUNT: u64 = 65_530;
/// Bytes of address space for all vRNICs, of the 2^47 that a process has.
const ADDRESSES: u64 = 96 << 40;
/// Bytes for a piece of an MR's list, including temporary memory while the list is made; and the part of the machine's
/// memory (1/n) that such lists may take.
const PIECE: u64 = 64;
const PART_FOR_PIECES: u64 = 64;
/// The part of the machine's memory (1/n) that pages allocated in sparse files may take. A worker's cgroup allows more,
/// so that the kernel does not kill a worker whose programs use all that they may.
const PART_FOR_HOLES: u64 = 2;
/// The part of the machine's memory (1/n) for kept data: waiting events, datagrams, and the like.
const PART_FOR_KEPT: u64 = 32;

/// Limits of the machine, read before confinement, since a confined worker cannot read them.
pub(super) struct Machine {
    mappings: u64,
    /// Bytes.
    memory: u64,
}

impl Machine {
    pub fn look() -> Self {
        let allowed = std::fs::read_to_string("/proc/sys/vm/max_map_count").ok().and_then(|s| s.trim().parse().ok());
        let machine = rustix::system::sysinfo();
        let memory = (machine.totalram as u64).saturating_mul(machine.mem_unit.into());
        Machine { mappings: allowed.unwrap_or(MAP_COUNT), memory }
    }

    /// The account of this worker, according to the present limits.
    pub fn ledger(&self) -> Ledger {
        let descriptors = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let left = |all: u64, own: u64| all.saturating_sub(own).max(all / 2);
        let mappings = left(self.mappings, OWN_MAPPINGS).min(unirdma_mem::guard::MAX_MAPPINGS as u64);
        let pieces = self.memory / PART_FOR_PIECES / PIECE;
        let descriptors = left(descriptors, OWN_DESCRIPTORS);
        let (filled, kept) = (self.memory / PART_FOR_HOLES, self.memory / PART_FOR_KEPT);
        Ledger::of_host([descriptors, mappings, ADDRESSES, pieces, filled, kept])
    }
}
