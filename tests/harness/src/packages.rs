//! Debian packages that the commands use. Missing ones are installed.

use std::path::Path;
use std::process::{Command, Stdio};

use crate::Result;
use crate::process::succeed;

/// Debian's library directory for this architecture.
#[cfg(target_arch = "aarch64")]
macro_rules! library {
    ($name:literal) => {
        concat!("/usr/lib/aarch64-linux-gnu/", $name)
    };
}
#[cfg(not(target_arch = "aarch64"))]
macro_rules! library {
    ($name:literal) => {
        concat!("/usr/lib/x86_64-linux-gnu/", $name)
    };
}

/// Packages, each after a file that shows that it is there.
pub type Needed = &'static [(&'static str, &'static str)];

/// Packages for running programs in containers.
pub const RUN: Needed = &[
    ("/usr/bin/ib_write_bw", "perftest"),
    ("/usr/bin/ibv_rc_pingpong", "ibverbs-utils"),
    ("/usr/include/infiniband/verbs.h", "libibverbs-dev"),
    ("/usr/bin/gcc", "gcc"),
    ("/usr/sbin/ip", "iproute2"),
    ("/usr/bin/setpriv", "util-linux"),
];

/// Programs that connect by address, and of other projects.
pub const CONNECTING: Needed = &[
    ("/usr/bin/rping", "rdmacm-utils"),
    ("/usr/bin/ucx_perftest", "ucx-utils"),
    ("/usr/bin/fi_pingpong", "libfabric-bin"),
    ("/usr/bin/fio", "fio"),
    ("/usr/bin/iperf3", "iperf3"),
];

/// Packages for our C programs.
pub const C_PROGRAMS: Needed = &[("/usr/include/rdma/rdma_cma.h", "librdmacm-dev"), ("/usr/bin/valgrind", "valgrind")];

/// Reads captured packets.
pub const CAPTURE: Needed = &[("/usr/bin/tshark", "tshark")];

/// Packages for rdma-core's own tests.
pub const PYVERBS: Needed = &[("/usr/lib/python3/dist-packages/pyverbs", "python3-pyverbs")];

/// Packages for programs and root directories of other releases.
pub const RELEASES: Needed = &[
    ("/usr/bin/mmdebstrap", "mmdebstrap"),
    ("/usr/share/keyrings/debian-archive-keyring.gpg", "debian-archive-keyring"),
];

/// Packages for what containers and hosts do with their network.
pub const NETWORK: Needed = &[("/usr/sbin/nft", "nftables"), ("/usr/bin/ping", "iputils-ping")];

/// The store of several control centres.
pub const ETCD: Needed = &[("/usr/bin/etcd", "etcd-server"), ("/usr/bin/etcdctl", "etcd-client")];

/// Further packages for virtual machines.
pub const GUESTS: Needed = &[
    ("/etc/libibverbs.d/rxe.driver", "ibverbs-providers"),
    ("/bin/busybox", "busybox-static"),
    ("/usr/bin/cpio", "cpio"),
    ("/usr/sbin/mkfs.ext4", "e2fsprogs"),
    ("/usr/bin/make", "make"),
    ("/usr/bin/zstd", "zstd"),
    ("/usr/sbin/modprobe", "kmod"),
    ("/usr/bin/xz", "xz-utils"),
];

/// Starts one virtual machine by libvirt, without its services.
pub const LIBVIRT: Needed = &[("/usr/bin/virt-qemu-run", "libvirt-daemon-driver-qemu")];

/// Programs that look at containers from inside and outside.
pub const SANDBOX: Needed = &[("/usr/bin/gdb", "gdb"), ("/usr/bin/pgrep", "procps"), ("/usr/bin/script", "bsdutils")];

/// Containers of LXC.
pub const LXC: Needed = &[("/usr/bin/lxc-start", "lxc")];

/// Containers of podman.
pub const PODMAN: Needed = &[("/usr/bin/podman", "podman"), ("/usr/sbin/runc", "runc")];

/// Programs in containers that bring libraries of their own, and what they ask the kernel.
pub const LOADER: Needed = &[("/usr/bin/python3", "python3"), ("/usr/bin/rdma", "iproute2")];

/// Packages for building the project's own.
pub const PACKAGE: Needed = &[
    ("/usr/lib/python3/dist-packages/wheel/__init__.py", "python3-wheel"),
    ("/usr/share/doc/python3-venv/copyright", "python3-venv"),
    ("/usr/lib/python3/dist-packages/pytest/__init__.py", "python3-pytest"),
    ("/usr/bin/strip", "binutils"),
    ("/usr/bin/pgrep", "procps"),
];

/// Shells that complete words, a terminal for them, and what checks manual pages.
pub const COMMAND_LINE: Needed = &[
    ("/usr/bin/zsh", "zsh"),
    ("/usr/bin/fish", "fish"),
    ("/usr/bin/script", "bsdutils"),
    ("/usr/bin/mandoc", "mandoc"),
];

/// Packages for building Debian's packages.
pub const DEB: Needed = &[
    ("/usr/bin/dh", "debhelper"),
    ("/usr/bin/dh_dkms", "dh-dkms"),
    ("/usr/bin/dpkg-buildpackage", "dpkg-dev"),
    ("/usr/bin/strip", "binutils"),
];

/// All packages of the tests.
pub const ALL: &[Needed] = &[
    RUN,
    LOADER,
    CONNECTING,
    C_PROGRAMS,
    CAPTURE,
    PYVERBS,
    RELEASES,
    NETWORK,
    ETCD,
    GUESTS,
    LIBVIRT,
    SANDBOX,
    PODMAN,
    LXC,
    MEMORY,
    PAGE,
    PACKAGE,
    COMMAND_LINE,
    DEB,
];

/// Packages for looking at the control centre's page.
pub const PAGE: Needed = &[
    ("/usr/bin/chromium", "chromium"),
    ("/usr/bin/certutil", "libnss3-tools"),
    ("/usr/share/fonts/truetype/dejavu/DejaVuSans.ttf", "fonts-dejavu-core"),
];

/// Packages for the comparison of memory.
pub const MEMORY: Needed = &[
    ("/usr/include/rdma/rdma_cma.h", "librdmacm-dev"),
    ("/usr/bin/valgrind", "valgrind"),
    ("/usr/bin/strace", "strace"),
    (library!("libjemalloc.so.2"), "libjemalloc2"),
    (library!("libtcmalloc_minimal.so.4"), "libtcmalloc-minimal4"),
    (library!("libmimalloc.so.2"), "libmimalloc2.0"),
];

/// OpenMPI with a bandwidth test.
pub const MPI: Needed = &[("/usr/bin/mpirun", "openmpi-bin"), ("/usr/bin/NPopenmpi", "netpipe-openmpi")];

/// Installs missing packages, through sudo unless this is root.
///
/// # Errors
/// The packages to install by hand.
pub fn ensure(needed: &[Needed]) -> Result<()> {
    let missing: Vec<&str> =
        needed.iter().copied().flatten().filter(|(f, _)| !std::path::Path::new(f).exists()).map(|p| p.1).collect();
    if missing.is_empty() {
        return Ok(());
    }
    eprintln!("installing from Debian: {}", missing.join(" "));
    let root = crate::uid() == 0;
    let apt = |args: &[&str]| {
        let mut c = if root { Command::new("apt-get") } else { Command::new("sudo") };
        if !root {
            c.arg("apt-get");
        }
        c.args(args).env("DEBIAN_FRONTEND", "noninteractive").stdout(Stdio::null());
        c.status().is_ok_and(|s| s.success())
    };
    apt(&["update", "-q"]);
    let mut args = vec!["install", "-y", "-q", "--no-install-recommends"];
    args.extend(&missing);
    if apt(&args) { Ok(()) } else { Err(format!("please install as root: apt-get install {}", missing.join(" "))) }
}

/// A release of Debian, as a line of apt's sources: from the mirror from which this machine gets its packages.
pub(crate) fn source(release: &str) -> String {
    format!("deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] {} {release} main", mirror())
}

/// Writes the files of packages of a release, separated by commas, and of all that they need, into a directory.
///
/// # Errors
/// The failed download.
pub(crate) fn extract(release: &str, packages: &str, to: &Path) -> Result<()> {
    let mut make = Command::new("mmdebstrap");
    make.args(["--quiet", "--variant=extract", &format!("--include={packages}"), release]).arg(to);
    succeed("mmdebstrap", make.arg(source(release)))
}

/// The mirror from which this machine gets Debian's packages.
fn mirror() -> String {
    let mut c = Command::new("apt-get");
    c.args(["indextargets", "--format", "$(REPO_URI)", "Created-By: Packages", "Origin: Debian", "Label: Debian"]);
    let text = c.output().map(|o| String::from_utf8_lossy(&o.stdout).into_owned()).unwrap_or_default();
    text.lines().next().unwrap_or("http://deb.debian.org/debian").to_string()
}
