//! The parts of virtual machines, in `target/vm`: QEMU, programs and a kernel of Debian 13, this machine's own kernel,
//! on demand the kernel of Debian's unstable release, and the build environment of modules for them.
//!
//! Each part is made under another name and renamed when it is complete, so that a part with its final name is always
//! complete.

use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::{run, write};
use crate::{Result, failed, packages};

/// Debian's packages with its kernel and the build environment of its modules.
const KERNEL: &[&str] = &[
    "linux-image-amd64",
    "linux-headers-amd64",
    "gcc",
    "libc6-dev",
    "make",
    "bash",
    "coreutils",
    "dash",
    "diffutils",
    "findutils",
    "gawk",
    "grep",
    "sed",
];
/// Packages of Debian 13 apart from its kernel: QEMU, and the programs of all guests.
const PROGRAMS: &[&str] = &[
    "qemu-system-x86",
    "e2fsprogs",
    "fio",
    "ibverbs-utils",
    "iproute2",
    "iputils-ping",
    "kmod",
    "nfs-common",
    "nfs-kernel-server",
    "nvme-cli",
    "perftest",
    "procps",
    "python3-pyverbs",
    "rdmacm-utils",
    "ucx-utils",
    "util-linux",
];
/// Packages from Debian's backports: Debian 13's own QEMU has no vhost-user device of any kind.
const FROM_BACKPORTS: &str = "qemu-* seabios ipxe-qemu";
/// Name of the file that lists the packages of a root directory.
const RECIPE: &str = "recipe";

/// A kernel for guests.
pub struct Kernel {
    /// As `uname -r` prints it.
    pub version: String,
    /// The kernel as an ELF file, which starts faster under emulation than an image that unpacks itself.
    pub image: PathBuf,
    /// Directory that has its `lib/modules`.
    pub base: PathBuf,
    /// Root directory of the release whose programs its guests have.
    pub root: PathBuf,
    /// Root directory in which its modules are built.
    builder: PathBuf,
}

/// The parts of guests. Other processes that want parts wait while this value exists.
pub struct Parts {
    dir: PathBuf,
    /// Root directory of Debian 13.
    root: PathBuf,
    _lock: File,
}

fn lock(dir: &Path) -> Result<File> {
    let file = File::create(dir.join("lock")).map_err(failed("target/vm/lock"))?;
    // SAFETY: plain system calls on a descriptor of ours.
    unsafe {
        if libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) != 0 {
            println!("waiting for another process that makes parts of virtual machines");
            libc::flock(file.as_raw_fd(), libc::LOCK_EX);
        }
    }
    Ok(file)
}

fn remove(path: &Path) -> Result<()> {
    if path.is_dir() { fs::remove_dir_all(path).map_err(failed(&path.display().to_string())) } else { Ok(()) }
}

/// Makes `to`: calls `make` with a path beside it, and renames the result.
fn whole(to: &Path, make: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    let new = PathBuf::from(format!("{}.new", to.display()));
    remove(&new)?;
    make(&new)?;
    remove(to)?;
    fs::rename(&new, to).map_err(failed(&to.display().to_string()))
}

impl Parts {
    /// Makes the missing parts. The programs must have been built.
    ///
    /// # Errors
    /// The failed download or build.
    pub fn make() -> Result<Parts> {
        let parts = Parts::download()?;
        parts.preload()?;
        Ok(parts)
    }

    /// Downloads the missing parts of QEMU and Debian 13.
    ///
    /// # Errors
    /// The failed download.
    fn download() -> Result<Parts> {
        let dir = crate::root().join("target/vm");
        fs::create_dir_all(&dir).map_err(failed("target/vm"))?;
        let _lock = lock(&dir)?;
        let parts = Parts { root: dir.join("trixie"), dir, _lock };
        parts.debian_13()?;
        Ok(parts)
    }

    /// Downloads these and the two kernels, if they are missing, for later use.
    ///
    /// # Errors
    /// The failed download.
    pub fn fetch() -> Result<()> {
        let parts = Parts::download()?;
        parts.kernel_13()?;
        let version = parts.kernel_here()?.version;
        parts.headers_here(&version).map(drop)
    }

    /// Directory of all parts.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    fn debian_13(&self) -> Result<()> {
        let pin = format!("Package: {FROM_BACKPORTS}\\nPin: release n=trixie-backports\\nPin-Priority: 990\\n");
        let hook = format!(
            "--setup-hook=mkdir -p \"$1/etc/apt/preferences.d\"; printf '{pin}' >\"$1/etc/apt/preferences.d/qemu\""
        );
        let what = "QEMU, a kernel and programs of Debian 13 for virtual machines (about 350 MB, once)";
        self.debian(&self.root, &["trixie", "trixie-backports"], &[KERNEL, PROGRAMS].concat(), &hook, what)
    }

    /// Makes a root directory with these packages of the first of these suites of Debian. `option`, of mmdebstrap, can
    /// take packages from the other suites.
    fn debian(&self, root: &Path, suites: &[&str], packages: &[&str], option: &str, what: &str) -> Result<()> {
        let recipe = format!("{}\n{option}\n", packages.join(" "));
        if fs::read_to_string(root.join(RECIPE)).is_ok_and(|r| r == recipe) {
            return Ok(());
        }
        println!("downloading {what}");
        whole(root, |new| {
            let path = new.display().to_string();
            let include = format!("--include={}", packages.join(","));
            let mut words: Vec<String> =
                ["mmdebstrap", "--quiet", "--variant=extract", option, &include, suites[0], &path]
                    .map(Into::into)
                    .into();
            words.extend(suites.iter().map(|suite| packages::source(suite)));
            run(&self.dir, &words.iter().map(String::as_str).collect::<Vec<_>>())?;
            for d in ["bin", "sbin", "lib", "lib64"] {
                if !new.join(d).exists() {
                    symlink(format!("usr/{d}"), new.join(d)).map_err(failed(d))?;
                }
            }
            for (link, to) in [("usr/bin/sh", "dash"), ("usr/bin/awk", "gawk")] {
                if !new.join(link).exists() {
                    symlink(to, new.join(link)).map_err(failed(link))?;
                }
            }
            for d in ["dev", "proc", "tmp", "build"] {
                fs::create_dir_all(new.join(d)).map_err(failed(d))?;
            }
            for d in ["usr/share/doc", "usr/share/locale", "usr/share/man", "var/cache/apt", "var/lib/apt"] {
                let _ = fs::remove_dir_all(new.join(d));
            }
            write(new.join(RECIPE), &recipe, 0o644)
        })
    }

    /// Builds the library that gives the device's number a name in QEMU.
    fn preload(&self) -> Result<()> {
        let (unirdma, to) = (crate::unirdma().display().to_string(), self.dir.join("name.so"));
        whole(&to, |new| run(&self.dir, &[&unirdma, "vm", "preload", &new.display().to_string()]).map(|_| ()))
    }

    /// The command that starts QEMU, without arguments for the machine. QEMU is started by the dynamic loader of its
    /// own release, and ends with the thread that starts it.
    pub fn qemu(&self) -> Vec<String> {
        let at = |p: &str| self.root.join(p).display().to_string();
        let libraries = ["", "/qemu", "/pulseaudio"].map(|d| at(&format!("usr/lib/x86_64-linux-gnu{d}"))).join(":");
        let mut words = ["setpriv", "--pdeathsig", "KILL", "env"].map(String::from).to_vec();
        words.push(format!("QEMU_MODULE_DIR={}", at("usr/lib/x86_64-linux-gnu/qemu")));
        words.push(at("lib64/ld-linux-x86-64.so.2"));
        words.extend(["--preload".into(), self.dir.join("name.so").display().to_string()]);
        words.extend(["--library-path".into(), libraries, at("usr/bin/qemu-system-x86_64")]);
        for firmware in ["usr/share/qemu", "usr/share/seabios", "usr/lib/ipxe/qemu"] {
            words.extend(["-L".into(), at(firmware)]);
        }
        words
    }

    /// Debian 13's kernel.
    ///
    /// # Errors
    /// If it cannot be unpacked.
    pub fn kernel_13(&self) -> Result<Kernel> {
        self.kernel_in(&self.root)
    }

    /// The kernel of Debian's unstable release.
    ///
    /// # Errors
    /// If it cannot be downloaded or unpacked.
    pub fn kernel_unstable(&self) -> Result<Kernel> {
        let root = self.dir.join("unstable");
        // The mirror may be some days behind. Its signature is checked nevertheless.
        let option = "--aptopt=Acquire::Check-Valid-Until \"false\"";
        let what = "the kernel of Debian's unstable release, and what builds its modules (about 250 MB, once)";
        self.debian(&root, &["sid"], KERNEL, option, what)?;
        self.kernel_in(&root)
    }

    /// The kernel that is installed in a root directory.
    fn kernel_in(&self, builder: &Path) -> Result<Kernel> {
        let modules = builder.join("usr/lib/modules");
        let all = fs::read_dir(&modules).map_err(failed("modules"))?.flatten();
        let found = all.filter(|e| e.path().join("kernel").exists()).map(|e| e.file_name().into_string()).next();
        let version = found.and_then(|n| n.ok()).ok_or_else(|| format!("no kernel is in {}", builder.display()))?;
        let (boot, base) = (builder.join("boot"), builder.join("usr"));
        self.kernel(version, boot, base, self.root.clone(), builder.into())
    }

    /// The kernel of this machine's release.
    ///
    /// # Errors
    /// If it cannot be downloaded or unpacked.
    pub fn kernel_here(&self) -> Result<Kernel> {
        let package = run(&self.dir, &["apt-cache", "depends", "linux-image-amd64"])?;
        let package = package.split_whitespace().find(|w| w.starts_with("linux-image-") && *w != "linux-image-amd64");
        let package = package.ok_or("apt knows no linux-image-amd64")?.to_string();
        let version = package.trim_start_matches("linux-image-").to_string();
        let to = self.dir.join(&package);
        if !to.join("boot").exists() {
            println!("downloading {package} for virtual machines (once)");
            whole(&to, |new| unpack(&self.dir, &[&package], new))?;
        }
        let base = if to.join("lib/modules").exists() { to.clone() } else { to.join("usr") };
        self.kernel(version, to.join("boot"), base, "/".into(), "/".into())
    }

    fn kernel(&self, version: String, boot: PathBuf, base: PathBuf, root: PathBuf, builder: PathBuf) -> Result<Kernel> {
        // The modules may be new ones of a version whose image is there already.
        if !base.join("lib/modules").join(&version).join("modules.dep").exists() {
            run(&self.dir, &["depmod", "-b", &base.display().to_string(), &version])?;
        }
        let image = self.dir.join(format!("vmlinux-{version}"));
        if !image.exists() {
            // Later releases have the kernel beside its modules.
            let places = [boot.join(format!("vmlinuz-{version}")), base.join(format!("lib/modules/{version}/vmlinuz"))];
            let packed = places.iter().find(|p| p.exists()).ok_or_else(|| format!("Linux {version} is not there"))?;
            whole(&image, |new| uncompress(packed, new))?;
        }
        Ok(Kernel { version, image, base, root, builder })
    }

    /// Directory in which `make` finds the build environment of modules for this machine's kernel.
    ///
    /// # Errors
    /// If it cannot be downloaded.
    pub fn headers_here(&self, version: &str) -> Result<PathBuf> {
        let to = self.dir.join(format!("headers-{version}"));
        let headers = format!("linux-headers-{version}");
        let build = to.join("usr/src").join(&headers);
        if build.exists() {
            return Ok(build);
        }
        println!("downloading {headers} (once)");
        // 6.1.0-56-amd64: release 6.1, flavour amd64.
        let release = version.split('.').take(2).collect::<Vec<_>>().join(".");
        let common = format!("linux-headers-{}-common", version.rsplit_once('-').map_or(version, |v| v.0));
        whole(&to, |new| {
            unpack(&self.dir, &[&headers, &common, &format!("linux-kbuild-{release}")], new)?;
            // The makefile has absolute paths of an installation.
            let makefile = new.join("usr/src").join(&headers).join("Makefile");
            let text = fs::read_to_string(&makefile).map_err(failed("the headers' makefile"))?;
            write(makefile, &text.replace("/usr/src/", &format!("{}/", to.join("usr/src").display())), 0o644)
        })?;
        Ok(build)
    }

    /// Builds a kernel module for a kernel from the sources in `from`. Returns the module's file.
    ///
    /// # Errors
    /// The output of make, if it fails.
    pub fn module(&self, kernel: &Kernel, from: &Path, name: &str) -> Result<PathBuf> {
        let is_here = kernel.builder == Path::new("/");
        let at = if is_here { self.dir.clone() } else { kernel.builder.join("build") };
        let at = at.join(format!("{name}-{}", kernel.version));
        fs::create_dir_all(&at).map_err(failed("a module's directory"))?;
        // make compares the times of files, so they are kept.
        run(from, &["sh", "-c", &format!("cp -a . {}", at.display())])?;
        if is_here {
            let headers = self.headers_here(&kernel.version)?;
            run(&at, &["make", &format!("KDIR={}", headers.display())])?;
        } else {
            let inside = Path::new("/").join(at.strip_prefix(&kernel.builder).unwrap_or(&at));
            let make = format!("make -C {} KDIR=/lib/modules/{}/build", inside.display(), kernel.version);
            run_in(&kernel.builder, &make)?;
        }
        Ok(at.join(format!("{name}.ko")))
    }
}

/// Runs a shell command in a root directory.
fn run_in(root: &Path, command: &str) -> Result<()> {
    let root = root.display();
    let script = format!(
        "mount --rbind /dev {root}/dev && mount -t proc proc {root}/proc && exec chroot {root} /bin/sh -c '{command}'"
    );
    let mut c = Command::new("unshare");
    c.args(["--mount", "--propagation", "private", "sh", "-c", &script]).stdin(Stdio::null());
    let o = c.env("PATH", "/usr/sbin:/usr/bin").output().map_err(failed("unshare"))?;
    if o.status.success() {
        return Ok(());
    }
    Err(format!("{command}: {}{}", String::from_utf8_lossy(&o.stdout), String::from_utf8_lossy(&o.stderr)))
}

/// Unpacks packages of this machine's release into `to`, without installing them.
fn unpack(dir: &Path, packages: &[&str], to: &Path) -> Result<()> {
    let debs = dir.join("debs");
    remove(&debs)?;
    for d in [&debs, to] {
        fs::create_dir_all(d).map_err(failed("packages"))?;
    }
    run(&debs, &[&["apt-get", "download", "-q"], packages].concat())?;
    run(&debs, &["sh", "-ec", &format!("for p in *.deb; do dpkg-deb -x $p {}; done", to.display())])?;
    remove(&debs)
}

/// Takes the ELF file out of a bzImage, by the offsets in its header (the kernel's Documentation/arch/x86/boot.rst).
fn uncompress(bzimage: &Path, to: &Path) -> Result<()> {
    let image = fs::read(bzimage).map_err(failed("vmlinuz"))?;
    let bad = || format!("{} is no compressed kernel", bzimage.display());
    let word =
        |at: usize| image.get(at..at + 4).and_then(|b| b.try_into().ok()).map(|b| u32::from_le_bytes(b) as usize);
    let sectors = image.get(0x1f1).copied().filter(|n| *n > 0).unwrap_or(4);
    let begin = (usize::from(sectors) + 1) * 512 + word(0x248).ok_or_else(bad)?;
    // The last four bytes are the length of the uncompressed file.
    let end = begin + word(0x24c).ok_or_else(bad)?.saturating_sub(4);
    let payload = image.get(begin..end).ok_or_else(bad)?;
    let program = match payload {
        [0xfd, b'7', b'z', b'X', b'Z', ..] => "xz",
        [0x28, 0xb5, 0x2f, 0xfd, ..] => "zstd",
        [0x1f, 0x8b, ..] => "gzip",
        _ => return Err(bad()),
    };
    let packed = to.with_extension("packed");
    fs::write(&packed, payload).map_err(failed("vmlinux"))?;
    let unpacked = File::create(to).map_err(failed("vmlinux"))?;
    let mut c = Command::new(program);
    let packed_in = File::open(&packed).map_err(failed("vmlinux"))?;
    let ok = c.arg("-dc").stdin(packed_in).stdout(unpacked).status().map_err(failed(program))?.success();
    let _ = fs::remove_file(&packed);
    if ok { Ok(()) } else { Err(bad()) }
}
