//! Requester and responder of every QP type, fed by a peer that lies.
#![no_main]

use unirdma_simkit::peer::lying_peer;

libfuzzer_sys::fuzz_target!(|data: &[u8]| lying_peer(data));
