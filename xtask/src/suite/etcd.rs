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
}

/// Those of `crates/control/src/store/tests.rs` that need an etcd.
fn store_tests(dir: &std::path::Path) -> Check {
    let etcd = Etcd::start(dir)?;
    let mut c = Command::new("timeout");
    c.args(["400", "cargo", "test", "--package", "unirdma-control", "--lib", "store::tests::etcd", "--", "--ignored"]);
    let o = c.env("UNIRDMA_TEST_ETCD", etcd.address()).current_dir(lab::root()).output().map_err(|e| e.to_string())?;
    let text = String::from_utf8_lossy(&[o.stdout, o.stderr].concat()).into_owned();
    require(o.status.success() && text.contains("4 passed"), text)
}
