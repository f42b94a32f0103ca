//! Every parser of bytes from the network.
#![no_main]

#[path = "../../crates/formats/tests/common/mod.rs"]
mod common;

libfuzzer_sys::fuzz_target!(|data: &[u8]| common::parse_everything(data));
