//! The control centre's web page. `cargo xtask page` makes the same checks alone.

use page::{CHECKS, Visit};

use crate::support::*;

pub(crate) fn tests(t: &mut Tests) {
    t.topic(&[packages::RUN, packages::PAGE]);
    let begin = || Visit::start(&harness::root().join("target/page"));
    let visit = &Shared::new(begin);
    for check in &CHECKS {
        let own = check.changes_fleet.then(|| Shared::new(begin));
        let visit = own.as_ref().unwrap_or(visit);
        t.on_mut(visit, format!("page: {}", check.name), move |visit| visit.check(check));
    }
}
