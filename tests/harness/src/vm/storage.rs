//! Programs and modules by which guests serve and use storage over RDMA in their kernel, and use disks. Nothing is
//! loaded before a test asks for it.

use super::image::Image;
use crate::Result;

/// Programs of Debian 13's root directory. Guests with this machine's kernel have them only if they are installed here.
const PROGRAMS: &[&str] = &["nvme", "fio", "exportfs", "rpc.mountd"];
/// Modules by purpose. `/load-NAME` and `/unload-NAME` are programs of the guest.
const MODULES: &[(&str, &[&str])] = &[
    ("disk", &["brd"]),
    ("nvme-target", &["nvmet-rdma"]),
    ("nvme-host", &["nvme-rdma"]),
    ("nfs-server", &["nfsd", "rpcrdma"]),
    ("nfs-client", &["nfsv4", "rpcrdma"]),
    ("vm-disks", &["virtio_blk", "ext4", "vfat", "nls_cp437", "nls_ascii"]),
];

pub(super) fn add(image: &mut Image<'_>) -> Result<()> {
    for p in PROGRAMS.iter().filter(|p| image.has_program(p)) {
        image.program(p)?;
    }
    MODULES.iter().try_for_each(|(name, modules)| image.modules_for(name, modules))
}
