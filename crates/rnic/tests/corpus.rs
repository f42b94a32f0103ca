//! What fuzzing has found worth keeping.
#![allow(missing_docs)]

mod common;

#[test]
fn the_corpus_of_lying_peers_does_no_harm() {
    let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/corpus/rnic");
    let files = std::fs::read_dir(dir).unwrap();
    let count = files.map(|f| common::peer::lying_peer(&std::fs::read(f.unwrap().path()).unwrap())).count();
    assert!(count > 20, "{count} files");
}
