//! Inputs from fuzzing that are worth keeping.
#![allow(missing_docs)]

mod common;

#[test]
fn the_corpus_of_packets_is_read_or_refused() {
    let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/corpus/packet");
    let files = std::fs::read_dir(dir).unwrap();
    let count = files.map(|f| common::parse_everything(&std::fs::read(f.unwrap().path()).unwrap())).count();
    assert!(count > 20, "{count} files");
}
