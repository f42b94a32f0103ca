//! The accounts of vRNICs, in the form that the RNIC uses.

use unirdma_link::Ledger;
use unirdma_rnic::Account;

/// The account that the RNIC charges for the memory that it keeps for a vRNIC.
pub struct KeptByRnic(pub Ledger);

impl Account for KeptByRnic {
    fn take(&self, bytes: usize) -> bool {
        self.0.keep(bytes as u64)
    }

    fn force(&self, bytes: usize) {
        self.0.keep_anyway(bytes as u64);
    }

    fn give(&self, bytes: usize) {
        self.0.let_go(bytes as u64);
    }
}
