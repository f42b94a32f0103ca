//! Inputs from fuzzing that are worth keeping.

#[test]
fn the_corpus_of_lying_peers_does_no_harm() {
    let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/corpus/rnic");
    let files = std::fs::read_dir(dir).unwrap();
    let count = files.map(|f| unirdma_simkit::peer::lying_peer(&std::fs::read(f.unwrap().path()).unwrap())).count();
    assert!(count > 20, "{count} files");
}

#[test]
fn the_corpus_of_peers_that_lie_about_connections_does_no_harm() {
    let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/corpus/cm");
    let files: Vec<_> = std::fs::read_dir(dir).unwrap().collect();
    assert!(files.len() > 20, "{} files", files.len());
    for f in files {
        unirdma_simkit::cm_peer::lying_cm_peer(&std::fs::read(f.unwrap().path()).unwrap());
    }
}

#[test]
fn peers_that_lie_about_connections_at_random_do_no_harm() {
    let mut rng = unirdma_rnic::Rng::new(5);
    let mut requests = 0;
    for _ in 0..200 {
        let data: Vec<u8> = (0..rng.next_u64() % 1500).map(|_| rng.next_u64() as u8).collect();
        requests += unirdma_simkit::cm_peer::lying_cm_peer(&data);
    }
    assert!(requests > 100, "{requests}: the lies were not heard");
}
