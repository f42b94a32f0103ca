//! rdma-core's own tests, of two Debian releases.

use harness::conformance;

use crate::support::*;

pub(crate) fn tests(t: &mut Tests) {
    t.topic(&[packages::RUN, packages::PYVERBS, packages::RELEASES]);
    let abc = &Shared::new(abc);
    t.on(abc, "pyverbs: rdma-core's own tests, Debian 12", conformance::debian_12);
    t.need_root("the root directory of Debian 13 needs root");
    t.on(abc, "pyverbs: rdma-core's own tests, Debian 13", conformance::debian_13);
}
