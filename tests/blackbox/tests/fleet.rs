//! Three hosts and a control centre.

use harness::cluster;

use crate::support::*;

pub(crate) fn tests(t: &mut Tests) {
    t.topic(&[packages::RUN]);
    t.need_root("network namespaces need root");
    t.test("fleet: three hosts, three groups, all pairs, by the rules and after they change", || cluster::check(3));
}
