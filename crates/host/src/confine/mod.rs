//! Confinement: what a worker may do, so that whoever takes it over by an error of ours has gained as little as possible.
//!
//! The supervisor makes a [`Plan`] once, sends it to each worker, and puts workers into cgroups ([`Cgroups`]). A worker calls [`enter`]
//! as soon as it has the plan, while it has one thread, and [`thread`] at the start of each thread. What a kernel or a container refuses is left
//! out, and [`InForce`] says so; nothing here fails for that reason.

mod cgroup;
mod landlock;
mod limits;
mod privilege;
mod seccomp;
pub(crate) mod standing;

use std::fmt;
use std::io;

use serde::{Deserialize, Serialize};

pub use cgroup::{Cgroup, CgroupLimits, Cgroups, MAX_GROUP_WEIGHT, USUAL_GROUP_WEIGHT};
pub use limits::Limits;
pub use privilege::{Needs, User, confine_supervisor};
pub use seccomp::Kind;

/// What an operator says about workers.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// The user that workers run as if the supervisor is root; `None`: `unirdma` if there is such a user, else `nobody`.
    pub user: Option<String>,
}

/// How a worker confines itself. Made by the supervisor, while it may still read files.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// Whose id it takes; or why it keeps the supervisor's.
    pub user: Result<User, String>,
    /// What it may use.
    pub limits: Limits,
}

impl Plan {
    /// Finds out what workers of this supervisor run as, and what they may use.
    ///
    /// # Errors
    /// One line: there is no such user, or only root can take another user's id.
    pub fn make(options: &Options) -> io::Result<Self> {
        Ok(Plan { user: privilege::user_of_workers(options.user.as_deref())?, limits: Limits::of_machine() })
    }
}

/// One measure of the confinement.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Measure {
    /// Its name: `user`, `capabilities`, `no_new_privs`, `weight`, `core_dumps`, `limits`, `landlock`, `seccomp`, `cgroup`, `sparse_files`.
    pub name: String,
    /// Whether it holds.
    pub in_force: bool,
    /// What it is, or why it does not hold.
    pub detail: String,
}

impl Measure {
    /// A measure that holds, or the reason why it does not.
    pub fn new(name: &str, result: Result<String, String>) -> Self {
        let (in_force, detail) = (result.is_ok(), result.unwrap_or_else(|why| why));
        Measure { name: name.into(), in_force, detail }
    }
}

/// Which measures hold in a process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct InForce {
    /// All that were tried.
    pub measures: Vec<Measure>,
}

impl InForce {
    /// The measures that do not hold.
    pub fn missing(&self) -> impl Iterator<Item = &Measure> {
        self.measures.iter().filter(|m| !m.in_force)
    }
}

/// One line: what holds, then what does not and why.
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

/// Confines this process, which must have one thread, for good. Afterwards it opens no file and makes no socket; it gets its
/// descriptors from the supervisor.
pub fn enter(plan: &Plan) -> InForce {
    // Limits first, as a hard limit cannot be raised afterwards. Then the user, since only root can change it. The filter is the last
    // one: it refuses the calls of all others.
    let mut measures = vec![Measure::new("limits", plan.limits.set())];
    measures.extend(privilege::leave(plan.user.as_ref()));
    measures.push(Measure::new("landlock", landlock::restrict()));
    measures.push(Measure::new("seccomp", seccomp::enter()));
    InForce { measures }
}

/// Leaves the calling thread only the system calls that its kind makes. Called at the start of the thread, and by the first thread once
/// it has started the others. All but pollers, and the watcher that starts new ones, give up their weight. Nothing else happens in a process that has not called [`enter`].
pub fn thread(kind: Kind) {
    if !matches!(kind, Kind::Poller | Kind::Watcher) {
        standing::be_usual();
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
        let seccomp = Measure::new("seccomp", Ok("a filter for each kind of thread".into()));
        let landlock = Measure::new("landlock", Err("this kernel has none".into()));
        let line =
            |measures: &[&Measure]| InForce { measures: measures.iter().map(|&m| m.clone()).collect() }.to_string();
        assert_eq!(line(&[&seccomp]), "seccomp (a filter for each kind of thread)");
        assert_eq!(line(&[&landlock]), "nothing; not in force: landlock (this kernel has none)");
        let both = "seccomp (a filter for each kind of thread); not in force: landlock (this kernel has none)";
        assert_eq!(line(&[&landlock, &seccomp]), both);
    }
}
