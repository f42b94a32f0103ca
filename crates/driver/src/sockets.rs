//! Where a program finds the vRNICs of its container.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use unirdma_abi::container::{MAX_VRNICS, SOCKET, vrnic_dir};

/// The sockets of this container's vRNICs, at most [`MAX_VRNICS`]: in the directories that `$UNIRDMA_DIR` names,
/// separated by colons, else where `unirdma run` puts them ([`vrnic_dir`]).
pub fn socket_paths() -> Vec<PathBuf> {
    match std::env::var_os("UNIRDMA_DIR") {
        Some(named) => named_by(&named),
        None => numbered(Path::exists),
    }
}

fn named_by(variable: &OsStr) -> Vec<PathBuf> {
    let dirs = std::env::split_paths(variable).filter(|dir| !dir.as_os_str().is_empty());
    dirs.take(MAX_VRNICS).map(|dir| dir.join(SOCKET)).collect()
}

/// The first one, whether it exists or not, and those that exist after it.
fn numbered(exists: impl Fn(&Path) -> bool) -> Vec<PathBuf> {
    let socket = |number| Path::new(&vrnic_dir(number)).join(SOCKET);
    std::iter::once(socket(0)).chain((1..MAX_VRNICS).map(socket).take_while(|s| exists(s))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_variable_names_directories() {
        assert_eq!(named_by(OsStr::new("/a")), [PathBuf::from("/a/vhost.sock")]);
        assert_eq!(named_by(OsStr::new("/a::/b:")), [PathBuf::from("/a/vhost.sock"), "/b/vhost.sock".into()]);
        assert!(named_by(OsStr::new("")).is_empty());
        assert_eq!(named_by(OsStr::new(&"/a:".repeat(MAX_VRNICS + 1))).len(), MAX_VRNICS);
    }

    #[test]
    fn others_are_counted_until_one_is_missing() {
        let there = ["/run/unirdma-1/vhost.sock", "/run/unirdma-2/vhost.sock", "/run/unirdma-4/vhost.sock"];
        let found = numbered(|p| there.iter().any(|t| p == Path::new(t)));
        assert_eq!(found, ["/run/unirdma/vhost.sock", there[0], there[1]].map(PathBuf::from));
        assert_eq!(numbered(|_| false), [PathBuf::from("/run/unirdma/vhost.sock")]);
        assert_eq!(numbered(|_| true).len(), MAX_VRNICS);
    }
}
