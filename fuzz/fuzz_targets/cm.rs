//! Connection management, fed by a peer that lies.
#![no_main]

use unirdma_simkit::cm_peer::lying_cm_peer;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    lying_cm_peer(data);
});
