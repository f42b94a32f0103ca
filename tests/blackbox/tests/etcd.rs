//! Several control centres on one etcd, and the tests of that store.

use std::process::Command;

use super::*;
use crate::centres::{self, Etcd};

pub(super) fn run(s: &mut Suite<'_>) {
    s.check("etcd: the tests of the store", |_| {
        let dir = std::env::temp_dir().join(format!("unirdma-etcd-{}", std::process::id()));
        std::fs::create_dir_all(&dir).map_err(|e| e.to_string())?;
        let tested = store_tests(&dir);
        let _ = std::fs::remove_dir_all(&dir);
        tested
    });
    s.check(
        "etcd: two centres, of which the allocating one is killed while vRNICs are made; then etcd is stopped",
        |_| centres::run(48, Duration::from_secs(3), false),
    );
    s.check(
        "etcd: a fleet goes there from a file; three members with TLS and passwords, of which each is killed",
        |_| centres::move_to_etcd(),
    );
}

/// Runs the tests of `crates/control/src/store/tests.rs` that need an etcd.
fn store_tests(dir: &std::path::Path) -> Check {
    let etcd = Etcd::start(dir)?;
    let mut c = Command::new("timeout");
    // The whole workspace, because a build for one package alone would rebuild its dependencies. Other packages have no
    // such tests.
    c.args(["900", "cargo", "test", "--workspace", "--tests", "store::tests::etcd", "--", "--ignored"]);
    let o = Output::of(c.env("UNIRDMA_TEST_ETCD", etcd.address()).current_dir(harness::root()));
    require(o.ok() && o.text.contains("4 passed"), o.text)
}
