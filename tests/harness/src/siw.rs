//! The kernel's software iWARP device (siw), which Debian's kernels lack: built from Debian's source of the same
//! kernel. Nothing of it is installed.

use std::path::PathBuf;

use crate::vm::{Kernel, Parts, run};
use crate::{Result, failed};

/// The module for this machine's kernel, built if it is not there yet.
///
/// # Errors
/// The step that failed.
pub fn module(parts: &Parts, kernel: &Kernel) -> Result<PathBuf> {
    let headers = parts.headers_here(&kernel.version)?;
    let dir = parts.dir().join(format!("siw-{}", kernel.version));
    let module = dir.join("siw/siw.ko");
    if module.exists() {
        return Ok(module);
    }
    eprintln!("building the kernel's siw (downloads about 150 MB of Debian's packages)");
    std::fs::create_dir_all(dir.join("siw")).map_err(failed("siw"))?;
    // 6.1.0-56-amd64: release 6.1.
    let release = kernel.version.split('.').take(2).collect::<Vec<_>>().join(".");
    let source = format!("linux-source-{release}");
    run(&dir, &["apt-get", "download", "-q", &source])?;
    let script = format!(
        "dpkg-deb --fsys-tarfile {source}_*.deb | tar xO ./usr/src/{source}.tar.xz | \
         tar xJ --strip-components=5 -C siw {source}/drivers/infiniband/sw/siw; rm -f *.deb; \
         make -C {} M=$PWD/siw CONFIG_RDMA_SIW=m modules",
        headers.display()
    );
    run(&dir, &["bash", "-ec", &script])?;
    Ok(module)
}
