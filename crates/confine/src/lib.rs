//! Confinement: restricts a worker, so that an attacker who takes it over through a bug gains as little as possible. It
//! may depend on `mem`, for the requests that its system calls have, and knows neither supervisor nor worker. It must
//! never fail because the kernel refuses a measure, nor widen what a process may do.
//!
//! The supervisor makes a [`Plan`] once, sends it to each worker, and puts workers into cgroups ([`Cgroups`]). A worker
//! calls [`enter`] when it has got the plan, while it has one thread, and [`thread`] at the start of each thread.
//! Measures that a kernel or a container refuses are skipped and reported in [`InForce`]; they cause no failure.

mod cgroup;
mod landlock;
mod limits;
mod privilege;
pub mod scheduling;
mod seccomp;

use std::fmt;
use std::io;

use serde::{Deserialize, Serialize};

pub use cgroup::{Cgroup, CgroupError, CgroupLimits, Cgroups, MAX_GROUP_WEIGHT, USUAL_GROUP_WEIGHT};
pub use limits::{Limits, raise_descriptors};
pub use privilege::{Needs, User, confine_supervisor, group_named};
pub use seccomp::Kind;

/// The operator's options for workers.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// The user that workers run as if the supervisor is root. `None`: `unirdma` if there is such a user, otherwise
    /// `nobody`.
    pub user: Option<String>,
}

/// The confinement of a worker. Made by the supervisor, while it may still read files.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// The user that the worker becomes, or the reason why it keeps the supervisor's user.
    pub user: Result<User, String>,
    /// Its resource limits.
    pub limits: Limits,
}

impl Plan {
    /// Determines the user and the limits of this supervisor's workers.
    ///
    /// # Errors
    /// One line: there is no such user, or the supervisor is not root and cannot change users.
    pub fn make(options: &Options) -> io::Result<Self> {
        Ok(Plan { user: privilege::user_of_workers(options.user.as_deref())?, limits: Limits::of_machine() })
    }
}

/// One measure of the confinement.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Measure {
    /// Name: `user`, `capabilities`, `no_new_privs`, `weight`, `core_dumps`, `limits`, `landlock`, `seccomp`, `cgroup`
    /// or `sparse_files`.
    pub name: String,
    /// True if it is in force.
    pub in_force: bool,
    /// Details of the measure, or the reason why it is not in force.
    pub detail: String,
}

impl Measure {
    /// A measure that is in force, or the reason why it is not.
    pub fn new(name: &str, result: Result<String, impl fmt::Display>) -> Self {
        let (in_force, detail) = (result.is_ok(), result.unwrap_or_else(|why| why.to_string()));
        Measure { name: name.into(), in_force, detail }
    }
}

/// The measures of a process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct InForce {
    /// All measures that were tried.
    pub measures: Vec<Measure>,
}

impl InForce {
    /// The measures that are not in force.
    pub fn missing(&self) -> impl Iterator<Item = &Measure> {
        self.measures.iter().filter(|m| !m.in_force)
    }
}

/// One line: the measures in force, then the missing ones with their reasons.
impl fmt::Display for InForce {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (mut holds, mut lacks) = (Vec::new(), Vec::new());
        for m in &self.measures {
            let list = if m.in_force { &mut holds } else { &mut lacks };
            list.push(format!("{} ({})", m.name, m.detail));
        }
        match (holds.is_empty(), lacks.is_empty()) {
            (_, true) => f.write_str(&holds.join(", ")),
            (true, false) => write!(f, "nothing; not in force: {}", lacks.join(", ")),
            (false, false) => write!(f, "{}; not in force: {}", holds.join(", "), lacks.join(", ")),
        }
    }
}

/// Confines this process, which must have one thread, for good. Afterwards the process opens no files and makes no
/// sockets. It gets its descriptors from the supervisor.
pub fn enter(plan: &Plan) -> InForce {
    // Limits come first, since a hard limit cannot be raised afterwards. Then the user, since only root can change it.
    // The filter comes last: it refuses the calls that the other measures need.
    let mut measures = vec![Measure::new("limits", plan.limits.set())];
    measures.extend(privilege::leave(plan.user.as_ref()));
    measures.push(Measure::new("landlock", landlock::restrict()));
    measures.push(Measure::new("seccomp", seccomp::enter()));
    InForce { measures }
}

/// Restricts the calling thread to the system calls of its kind. Called at the start of each thread; the first thread
/// calls it after it has started the others. Pollers keep their weight, and so does the watcher, because it starts new
/// ones; other threads give it up. There is no filter if the process has not called [`enter`].
pub fn thread(kind: Kind) {
    if !matches!(kind, Kind::Poller | Kind::Watcher) {
        scheduling::be_usual();
    }
    if let Err(error) = seccomp::narrow(kind) {
        tracing::warn!(?kind, %error, "this thread has the filter of system calls of the whole process");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_says_what_holds_and_what_does_not() {
        let seccomp = Measure::new("seccomp", Ok::<_, io::Error>("a filter for each kind of thread".into()));
        let landlock = Measure::new("landlock", Err("this kernel has none"));
        let line =
            |measures: &[&Measure]| InForce { measures: measures.iter().map(|&m| m.clone()).collect() }.to_string();
        assert_eq!(line(&[&seccomp]), "seccomp (a filter for each kind of thread)");
        assert_eq!(line(&[&landlock]), "nothing; not in force: landlock (this kernel has none)");
        let both = "seccomp (a filter for each kind of thread); not in force: landlock (this kernel has none)";
        assert_eq!(line(&[&landlock, &seccomp]), both);
    }
}
