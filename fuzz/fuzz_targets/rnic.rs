//! Requester and responder of every QP type, fed by a peer that lies.
#![no_main]

#[path = "../../crates/rnic/tests/common/mod.rs"]
mod common;

libfuzzer_sys::fuzz_target!(|data: &[u8]| common::peer::lying_peer(data));
