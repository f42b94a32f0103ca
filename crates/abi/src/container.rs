//! Where programs in a container find its vRNICs.

/// Most vRNICs of a container.
pub const MAX_VRNICS: usize = 16;

/// Name of a vRNIC's vhost-user socket in its directory.
pub const SOCKET: &str = "vhost.sock";

/// The directory of one of a container's vRNICs, counted from 0. It contains the socket of the vRNIC.
pub fn vrnic_dir(number: usize) -> String {
    if number == 0 { "/run/unirdma".into() } else { format!("/run/unirdma-{number}") }
}
