//! The control centre's web page. `cargo xtask page` makes the same checks alone.

use super::*;
use crate::page;

pub(super) fn run(s: &mut Suite<'_>) {
    let name = |check: &str| format!("page: {check}");
    let Some(first) = page::names().map(name).find(|n| s.wants(n)) else { return };
    let out = harness::root().join("target/page");
    let only = s.only();
    let wants = |check: &str| only.is_none_or(|o| name(check).contains(o));
    let done = page::checks(&out, wants, |check, done| s.check(&name(check), |_| done));
    // Otherwise each check has reported its own result.
    if let Err(e) = done {
        s.check(&first, |_| Err(e));
    }
}
