//! Connection management, fed by a peer that lies.
#![no_main]

#[path = "../../crates/rnic/tests/common/mod.rs"]
mod common;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    common::cm_peer::lying_cm_peer(data);
});
