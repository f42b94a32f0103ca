//! A copy of the part of `/sys/class` that a program may see of its VF's verbs device, in the vRNIC's directory.
//!
//! A container sees that directory, and may write to it. So the copy is made in a directory of the supervisor and takes
//! its place in one step; no path inside of the vRNIC's directory is followed.

use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;
use unirdma_abi::lease::SYSFS;

use super::tree::{Roots, entries};

/// Most files of a copy. A table of GIDs and its attributes have the most.
const MAX_FILES: usize = 1024;
/// Longest file, bytes. The kernel's have one page at most.
const MAX_BYTES: usize = 4096;

const NODE_FILES: [&str; 3] = ["ibdev", "abi_version", "dev"];
const DEVICE_FILES: [&str; 8] =
    ["node_type", "node_guid", "sys_image_guid", "node_desc", "fw_ver", "hca_type", "hw_rev", "board_id"];
/// Files of the device that a verbs device belongs to, such as a PCI device.
const PARENT_FILES: [&str; 7] =
    ["vendor", "device", "subsystem_vendor", "subsystem_device", "modalias", "numa_node", "local_cpus"];
const PORT_FILES: [&str; 9] =
    ["state", "phys_state", "lid", "lid_mask_count", "sm_lid", "sm_sl", "rate", "link_layer", "cap_mask"];
const NO_GID: &str = "0000:0000:0000:0000:0000:0000:0000:0000";

/// The place of copies in the vRNIC's directory, and in the directory of the supervisor where they are made.
struct Places {
    shown: PathBuf,
    made: PathBuf,
}

impl Places {
    /// `vrnics` is the directory of all vRNICs' directories, of which only the supervisor sees the entries.
    fn of(vrnics: &Path, vrnic: &str) -> Places {
        let top = Path::new(SYSFS).components().next();
        let shown = top.map_or_else(|| vrnics.join(vrnic), |top| vrnics.join(vrnic).join(top));
        // No vRNIC's name begins so.
        Places { shown, made: vrnics.join(format!(".{vrnic}")) }
    }
}

/// Shows verbs device `device`, of which `node` is the device node's name, in the directory of a vRNIC.
///
/// # Errors
/// The copy cannot be made.
pub(super) fn show(roots: &Roots, vrnics: &Path, vrnic: &str, device: &str, node: &str) -> io::Result<()> {
    let places = Places::of(vrnics, vrnic);
    delete(&places.made)?;
    // The first part of the path is the copy itself.
    let below: PathBuf = Path::new(SYSFS).components().skip(1).collect();
    let mut copy = Copy { from: roots.sys.join("class"), to: places.made.join(below), files: 0 };
    fs::create_dir(&places.made)?;
    copy.all(device, node)?;
    open_to_all(&places.made)?;
    match renameat_with(CWD, &places.made, CWD, &places.shown, RenameFlags::EXCHANGE) {
        Err(Errno::NOENT) => fs::rename(&places.made, &places.shown),
        done => {
            done?;
            delete(&places.made)
        }
    }
}

/// Takes the copy away, if there is one.
pub(super) fn hide(vrnics: &Path, vrnic: &str) {
    let places = Places::of(vrnics, vrnic);
    let _ = delete(&places.made);
    if fs::rename(&places.shown, &places.made).is_ok() {
        let _ = delete(&places.made);
    }
}

fn delete(path: &Path) -> io::Result<()> {
    let done = match fs::symlink_metadata(path) {
        Ok(m) if m.is_dir() => fs::remove_dir_all(path),
        Ok(_) => fs::remove_file(path),
        Err(e) => Err(e),
    };
    match done {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        done => done,
    }
}

/// Lets everybody read a directory of the supervisor, whatever its mask of permissions is.
fn open_to_all(dir: &Path) -> io::Result<()> {
    fs::set_permissions(dir, PermissionsExt::from_mode(0o755))?;
    for name in entries(dir) {
        let path = dir.join(name);
        if fs::symlink_metadata(&path)?.is_dir() {
            open_to_all(&path)?;
        } else {
            fs::set_permissions(&path, PermissionsExt::from_mode(0o644))?;
        }
    }
    Ok(())
}

struct Copy {
    from: PathBuf,
    to: PathBuf,
    files: usize,
}

impl Copy {
    fn all(&mut self, device: &str, node: &str) -> io::Result<()> {
        let (verbs, ib) = (PathBuf::from("infiniband_verbs"), Path::new("infiniband").join(device));
        self.some(&verbs, &["abi_version"])?;
        self.some(&verbs.join(node), &NODE_FILES)?;
        self.some(&verbs.join(node).join("device"), &PARENT_FILES)?;
        self.some(&ib, &DEVICE_FILES)?;
        self.some(&ib.join("device"), &PARENT_FILES)?;
        let ports = ib.join("ports");
        for port in entries(&self.from.join(&ports)) {
            let port = ports.join(port);
            self.some(&port, &PORT_FILES)?;
            let pkeys = entries(&self.from.join(port.join("pkeys")));
            self.some(&port.join("pkeys"), &pkeys.iter().map(String::as_str).collect::<Vec<_>>())?;
            for index in entries(&self.from.join(port.join("gids"))) {
                let gid = self.text(&port.join("gids").join(&index));
                if gid.is_none_or(|gid| gid.starts_with(NO_GID.as_bytes())) {
                    continue;
                }
                for dir in ["gids", "gid_attrs/types", "gid_attrs/ndevs"] {
                    self.some(&port.join(dir), &[&index])?;
                }
            }
        }
        Ok(())
    }

    /// Copies files. Some devices do not have all of them.
    fn some(&mut self, dir: &Path, names: &[&str]) -> io::Result<()> {
        fs::create_dir_all(self.to.join(dir))?;
        for name in names.iter().filter(|n| !n.contains('/')) {
            let file = dir.join(name);
            let Some(text) = self.text(&file).filter(|_| self.files < MAX_FILES) else { continue };
            self.files += 1;
            fs::write(self.to.join(file), text)?;
        }
        Ok(())
    }

    fn text(&self, file: &Path) -> Option<Vec<u8>> {
        let text = fs::read(self.from.join(file)).ok()?;
        (text.len() <= MAX_BYTES).then_some(text)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::super::tree::tests::Temporary;
    use super::*;

    /// A device with two GIDs, in a tree that has a directory `vrnics/a`, too.
    fn tree() -> (Temporary, PathBuf) {
        let tree = Temporary::new().with_pf(1);
        let sys = tree.0.sys.clone();
        let pci = sys.join("devices/0000:01:10.0");
        tree.write(&pci.join("vendor"), "0x15b3\n");
        tree.write(&pci.join("serial"), "secret\n");
        tree.link(&sys.join("class/infiniband_verbs/uverbs4/device"), &pci);
        tree.write(&sys.join("class/infiniband_verbs/abi_version"), "6\n");
        let ib = pci.join("infiniband/mlx5_7");
        tree.link(&sys.join("class/infiniband/mlx5_7"), &ib);
        tree.link(&ib.join("device"), &pci);
        for (index, gid) in ["fe80:0000:0000:0000:0056:0aff:fe32:000a", NO_GID].iter().enumerate() {
            tree.write(&ib.join(format!("ports/1/gids/{index}")), &format!("{gid}\n"));
            tree.write(&ib.join(format!("ports/1/gid_attrs/types/{index}")), "RoCE v2\n");
        }
        tree.write(&ib.join("ports/1/state"), "4: ACTIVE\n");
        let vrnics = sys.parent().unwrap().join("vrnics");
        fs::create_dir_all(vrnics.join("a")).unwrap();
        (tree, vrnics)
    }

    fn files(dir: &Path) -> Vec<String> {
        let below = |name: String| {
            let inner = files(&dir.join(&name));
            let is_dir = fs::symlink_metadata(dir.join(&name)).unwrap().is_dir();
            if is_dir { inner.iter().map(|i| format!("{name}/{i}")).collect() } else { vec![name] }
        };
        entries(dir).into_iter().flat_map(below).collect()
    }

    #[test]
    fn a_program_sees_its_device_only() {
        let (tree, vrnics) = tree();
        show(&tree.0, &vrnics, "a", "mlx5_7", "uverbs4").unwrap();
        let class = vrnics.join("a").join(SYSFS);
        assert_eq!(
            files(&class),
            [
                "infiniband/mlx5_7/device/vendor",
                "infiniband/mlx5_7/node_type",
                "infiniband/mlx5_7/ports/1/gid_attrs/types/0",
                "infiniband/mlx5_7/ports/1/gids/0",
                "infiniband/mlx5_7/ports/1/state",
                "infiniband_verbs/abi_version",
                "infiniband_verbs/uverbs4/dev",
                "infiniband_verbs/uverbs4/device/vendor",
                "infiniband_verbs/uverbs4/ibdev",
            ]
        );
        assert_eq!(fs::read_to_string(class.join("infiniband_verbs/uverbs4/device/vendor")).unwrap(), "0x15b3\n");
        hide(&vrnics, "a");
        assert_eq!((entries(&vrnics), entries(&vrnics.join("a"))), (vec!["a".to_owned()], vec![]));
    }

    /// A container may write to the vRNIC's directory.
    #[test]
    fn nothing_in_the_way_of_a_copy_is_followed() {
        let (tree, vrnics) = tree();
        let (shown, other) = (vrnics.join("a/vf"), vrnics.parent().unwrap().join("other"));
        let see = || show(&tree.0, &vrnics, "a", "mlx5_7", "uverbs4").unwrap();
        let is_right = || vrnics.join("a").join(SYSFS).join("infiniband_verbs/abi_version").is_file();
        fs::create_dir(&other).unwrap();
        for link in [shown.clone(), shown.join("sys"), shown.join("sys/class")] {
            fs::create_dir_all(link.parent().unwrap()).unwrap();
            symlink(&other, &link).unwrap();
            see();
            assert!(is_right());
            delete(&shown).unwrap();
        }
        fs::write(&shown, "a file").unwrap();
        see();
        assert!(is_right());
        see();
        assert!(is_right());
        delete(&shown).unwrap();
        symlink(&other, &shown).unwrap();
        hide(&vrnics, "a");
        assert_eq!((files(&other), entries(&vrnics.join("a")), entries(&vrnics).len()), (vec![], vec![], 1));
    }
}
