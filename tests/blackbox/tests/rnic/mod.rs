//! VFs of a real RNIC, in virtual machines whose network card has four VFs with the kernel's soft RNIC: what the kernel
//! does, the pool, its leases, programs on VFs, faults, and attacks.

mod attacks;
mod facts;
mod faults;
mod leases;
mod long;
mod pool;
mod suites;
mod two_hosts;
mod way_vf;

use harness::vm::Vfs;

use crate::support::*;

/// If this environment variable is set, there are also the tests that take too long for each push.
const LONG: &str = "BLACKBOX_LONG";

pub(crate) fn tests(t: &mut Tests) {
    t.topic(&[
        packages::RUN,
        packages::CONNECTING,
        packages::PYVERBS,
        packages::RELEASES,
        packages::NETWORK,
        packages::GUESTS,
    ]);
    t.need_root("programs for virtual machines are unpacked as root");
    facts::tests(t, &Shared::new(Vfs::start));
    let with_ours = &Shared::new(Vfs::start_without_vfs);
    pool::tests(t, with_ours);
    leases::tests(t, with_ours);
    way_vf::tests(t, with_ours);
    if std::env::var_os(LONG).is_some() {
        faults::tests(t, with_ours);
        attacks::tests(t, with_ours);
        long::tests(t, with_ours);
        suites::tests(t, &Shared::new(Vfs::start_with_suites));
        two_hosts::tests(t, &Shared::new(Vfs::start_two_hosts));
    }
}
