//! Several control centres on one etcd, and the tests of that store.

use centres::Etcd;

use crate::support::*;

pub(crate) fn tests(t: &mut Tests) {
    t.topic(&[packages::RUN, packages::ETCD]);
    t.test("etcd: the tests of the store", || {
        let dir = std::env::temp_dir().join(format!("unirdma-etcd-{}", std::process::id()));
        std::fs::create_dir_all(&dir).map_err(|e| e.to_string())?;
        let tested = store_tests(&dir);
        let _ = std::fs::remove_dir_all(&dir);
        tested
    });
    t.test(
        "etcd: two centres, of which the allocating one is killed while vRNICs are made; then etcd is stopped",
        || centres::run(48, Duration::from_secs(3), false),
    );
    t.test(
        "etcd: a fleet goes there from a file; three members with TLS and passwords, of which each is killed",
        centres::move_to_etcd,
    );
}

/// Runs the tests of `crates/control/src/store/tests.rs` that need an etcd.
fn store_tests(dir: &std::path::Path) -> Check {
    let etcd = Etcd::start(dir)?;
    let mut c = harness::cargo();
    // The whole workspace, because a build for one package alone would rebuild its dependencies. Other packages have no
    // such tests; the black-box tests are these.
    c.args(["test", "--workspace", "--exclude", "blackbox", "--tests", "store::tests::etcd"]);
    c.args(["--", "--ignored"]);
    let o = Output::of(c.env("UNIRDMA_TEST_ETCD", etcd.address()));
    require(o.ok() && o.text.contains("4 passed"), o.text)
}
