//! The kernel's software iWARP device (siw), which Debian's kernels lack: built from Debian's source of the same kernel. Nothing
//! of it is installed.

use std::path::{Path, PathBuf};

use crate::Result;
use crate::vm::{failed, run};

/// The module for a kernel, built in `dir` if it is not there yet.
///
/// # Errors
/// What could not be downloaded or built.
pub(crate) fn module(version: &str, dir: &Path) -> Result<PathBuf> {
    let dir = dir.join(format!("siw-{version}"));
    let module = dir.join("siw/siw.ko");
    if module.exists() {
        return Ok(module);
    }
    eprintln!("building the kernel's siw (downloads about 160 MB of Debian's packages)");
    std::fs::create_dir_all(dir.join("siw")).map_err(failed("siw"))?;
    // 6.1.0-56-amd64: release 6.1, flavour amd64.
    let mut numbers = version.split('.');
    let release = [numbers.next(), numbers.next()].map(Option::unwrap_or_default).join(".");
    let common = version.rsplit_once('-').map_or(version, |v| v.0);
    let [headers, shared] = [version, &format!("{common}-common")].map(|v| format!("linux-headers-{v}"));
    let (kbuild, source) = (format!("linux-kbuild-{release}"), format!("linux-source-{release}"));
    run(&dir, &["apt-get", "download", "-q", &headers, &shared, &kbuild, &source])?;
    let shell = |script: &str| run(&dir, &["bash", "-ec", script]);
    shell(&format!(
        "for p in {headers} {shared} {kbuild}; do dpkg-deb -x ${{p}}_*.deb .; done; \
         sed -i \"s#/usr/src/#$PWD/usr/src/#\" usr/src/{headers}/Makefile; \
         dpkg-deb --fsys-tarfile {source}_*.deb | tar xO ./usr/src/{source}.tar.xz | \
         tar xJ --strip-components=5 -C siw {source}/drivers/infiniband/sw/siw; rm -f *.deb; \
         make -C usr/src/{headers} M=$PWD/siw CONFIG_RDMA_SIW=m modules"
    ))?;
    Ok(module)
}
