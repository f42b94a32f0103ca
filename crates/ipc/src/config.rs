//! The configuration of a worker's pollers.

use serde::{Deserialize, Serialize};

/// Configuration of the pollers.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct EngineConfig {
    /// Whether pollers share their cores with applications.
    pub polling: Polling,
    /// Least and most pollers; those beyond the least are started and stopped with the load. `None`: one for each core
    /// if pollers share cores, otherwise from one to half the number of cores.
    pub pollers: Option<(usize, usize)>,
    /// Time for which a session is polled after its last doorbell, us.
    pub spin_us: u64,
    /// Seed of QPNs and keys; `None`: a random one from the kernel.
    pub seed: Option<u64>,
}

impl Default for EngineConfig {
    fn default() -> Self {
        EngineConfig { polling: Polling::Auto, pollers: None, spin_us: 500, seed: None }
    }
}

impl EngineConfig {
    /// A warning if there are more pollers than cores, since they then wait for each other.
    pub fn too_many_pollers(&self) -> Option<String> {
        let (most, cores) = (self.pollers?.1, cores().len());
        (most > cores).then(|| format!("--pollers: {most} polling threads of each group take turns on {cores} cores"))
    }

    /// True if pollers share their cores with programs on this machine.
    pub fn shares_cores(&self) -> bool {
        match self.polling {
            Polling::Auto => cores().len() <= FEW_CORES,
            polling => polling == Polling::Shared,
        }
    }
}

/// Whether pollers share their cores with applications.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Polling {
    /// [`Polling::Shared`] on few cores, else [`Polling::Dedicated`].
    #[default]
    Auto,
    /// One poller for each core. It sleeps while there is nothing to do, and is woken by the programs that run on its
    /// core.
    Shared,
    /// Pollers have cores of their own, on which they spin.
    Dedicated,
}

/// With [`Polling::Auto`], pollers share cores on machines with at most this number of cores.
const FEW_CORES: usize = 3;

/// The cores on which this thread may run.
pub fn cores() -> Vec<usize> {
    let set = rustix::thread::sched_getaffinity(None).unwrap_or_else(|_| rustix::thread::CpuSet::new());
    let cores: Vec<usize> = (0..rustix::thread::CpuSet::MAX_CPU).filter(|&i| set.is_set(i)).collect();
    if cores.is_empty() { vec![0] } else { cores }
}
