//! Initial RAM file systems: a kernel's modules, programs of its release, and one script that starts everything.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use super::machine::{self, PORTS};
use super::{Kernel, run, write};
use crate::{Result, failed};

/// Script that waits for commands at a port of the virtual machine. It reads a line, and writes the output and a last
/// line with the exit code.
const SERVE: &str = "#!/bin/sh
exec 3<>$1 || exit
while :; do
    if read -r line <&3; then
        sh -c \"$line\" </dev/null >&3 2>&1 3>&-
        printf '\\001%d\\n' $? >&3
    else
        sleep 0.1
    fi
done
";
const LIBRARIES: &str = "/usr/lib/x86_64-linux-gnu";

/// A file system that is being made.
pub struct Image<'a> {
    kernel: &'a Kernel,
    root: PathBuf,
    /// Files of the modules that are loaded at boot, in order.
    modules: Vec<String>,
    /// See [`Image::takes_containers`].
    takes_containers: bool,
}

impl<'a> Image<'a> {
    /// Creates an image in directory `root`, with busybox and `/bin/sh`.
    ///
    /// # Errors
    /// The missing file.
    pub fn new(kernel: &'a Kernel, root: PathBuf) -> Result<Image<'a>> {
        for d in ["bin", "dev", "proc", "sys", "run", "tmp", "modules", "etc/libibverbs.d"] {
            fs::create_dir_all(root.join(d)).map_err(failed(d))?;
        }
        let mut image = Image { kernel, root, modules: Vec::new(), takes_containers: false };
        // Busybox's shell prefers its built-in programs, so it is not the shell.
        image.file(Path::new("/bin/busybox"), "bin/busybox")?;
        for applet in run(&image.root, &["/bin/busybox", "--list"])?.lines().filter(|a| !["busybox", "sh"].contains(a))
        {
            let _ = symlink("busybox", image.root.join("bin").join(applet));
        }
        image.program("dash")?;
        symlink("../usr/bin/dash", image.root.join("bin/sh")).map_err(failed("sh"))?;
        image.modules(&["virtio_pci", "virtio_net", "virtio_console"])?;
        Ok(image)
    }

    /// Path of a file of the kernel's release.
    fn theirs(&self, file: &str) -> PathBuf {
        self.kernel.root.join(file.trim_start_matches('/'))
    }

    /// Copies a file of this machine, following links.
    ///
    /// # Errors
    /// If it cannot be copied.
    pub fn file(&self, from: &Path, to: &str) -> Result<()> {
        let name = from.display().to_string();
        let to = self.root.join(to.trim_start_matches('/'));
        fs::create_dir_all(to.parent().unwrap_or(&self.root)).map_err(failed(&name))?;
        fs::copy(from, &to).map(|_| ()).map_err(failed(&name))
    }

    /// Writes a file.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn text(&self, to: &str, text: &str) -> Result<()> {
        write(self.root.join(to.trim_start_matches('/')), text, 0o755)
    }

    /// Copies the libraries that a file of the kernel's release needs.
    fn libraries_of(&self, file: &str) -> Result<()> {
        let root = self.kernel.root.display().to_string();
        // A static program needs none. The loader then fails.
        let list =
            run(&self.root, &["chroot", &root, "/lib64/ld-linux-x86-64.so.2", "--list", file]).unwrap_or_default();
        for library in list.split_whitespace().filter(|w| w.starts_with('/')) {
            if !self.root.join(library.trim_start_matches('/')).exists() {
                self.file(&self.theirs(library), library)?;
            }
        }
        Ok(())
    }

    /// Copies a program of the kernel's release with the libraries that it needs.
    ///
    /// # Errors
    /// If it does not exist.
    pub fn program(&self, name: &str) -> Result<()> {
        let file = self.find_program(name).ok_or_else(|| format!("there is no program {name}"))?;
        self.file(&self.theirs(&file), &format!("usr/bin/{name}"))?;
        self.libraries_of(&file)
    }

    /// Compiles one of our C programs for it.
    ///
    /// # Errors
    /// The compiler's output, if it fails.
    pub fn compile(&self, name: &str) -> Result<()> {
        let program = self.root.join("usr/bin").join(name).display().to_string();
        let source = format!("tests/c/{name}.c");
        run(&crate::root(), &["cc", "-O1", "-Wall", "-o", &program, &source, "-libverbs", "-pthread"]).map(|_| ())
    }

    /// True if the kernel's release on this machine has this program.
    pub fn has_program(&self, name: &str) -> bool {
        self.find_program(name).is_some()
    }

    fn find_program(&self, name: &str) -> Option<String> {
        let places = ["/usr/bin", "/usr/sbin", "/bin", "/sbin"].map(|d| format!("{d}/{name}"));
        places.into_iter().find(|f| self.theirs(f).exists())
    }

    /// Copies a directory of the kernel's release, without the entries of these names, and the libraries of its shared
    /// objects.
    ///
    /// # Errors
    /// If it does not exist.
    pub fn tree(&self, dir: &str, without: &[&str]) -> Result<()> {
        let entries = fs::read_dir(self.theirs(dir)).map_err(failed(dir))?.flatten();
        for name in entries.filter_map(|e| e.file_name().into_string().ok()).filter(|n| !without.contains(&n.as_str()))
        {
            let path = format!("{dir}/{name}");
            if self.theirs(&path).is_dir() {
                self.tree(&path, without)?;
                continue;
            }
            self.file(&self.theirs(&path), &path)?;
            if name.ends_with(".so") {
                self.libraries_of(&path)?;
            }
        }
        Ok(())
    }

    /// Copies rdma-core's provider for a kind of device, of the kernel's release.
    ///
    /// # Errors
    /// If it does not exist.
    pub fn provider(&self, kind: &str) -> Result<()> {
        let dir = format!("{LIBRARIES}/libibverbs");
        let all = fs::read_dir(self.theirs(&dir)).map_err(failed(&dir))?.flatten();
        let found =
            all.filter_map(|e| e.file_name().into_string().ok()).find(|n| n.starts_with(&format!("lib{kind}-")));
        let file = format!("{dir}/{}", found.ok_or_else(|| format!("no {kind} provider in {dir}"))?);
        self.file(&self.theirs(&file), &file)?;
        self.libraries_of(&file)?;
        let config = format!("/etc/libibverbs.d/{kind}.driver");
        self.file(&self.theirs(&config), &config)
    }

    /// Copies the libraries of programs that are built on this machine.
    ///
    /// # Errors
    /// If it does not exist.
    pub fn runtime(&self) -> Result<()> {
        let library = format!("{LIBRARIES}/libgcc_s.so.1");
        self.file(&self.theirs(&library), &library)
    }

    /// Copies our libraries to the directory in which `unirdma run` finds them.
    ///
    /// # Errors
    /// If they were not built.
    pub fn our_libraries(&self) -> Result<()> {
        const DIR: &str = "usr/lib/unirdma";
        let built = crate::unirdma().with_file_name("libibverbs.so");
        self.file(&built, &format!("{DIR}/libibverbs.so.1"))?;
        let preload = "libunirdma-preload.so";
        self.file(&crate::unirdma().with_file_name("dropin").join(preload), &format!("{DIR}/{preload}"))?;
        let link = self.root.join(DIR).join("librdmacm.so.1");
        std::os::unix::fs::symlink("libibverbs.so.1", link).map_err(failed("librdmacm.so.1"))
    }

    /// Lets `unirdma run` work in it. A container cannot leave the initial RAM file system, but it can leave a mount of
    /// it.
    pub fn takes_containers(&mut self) {
        self.takes_containers = true;
    }

    /// Directory of its files.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Copies modules and their dependencies. They are loaded at boot.
    ///
    /// # Errors
    /// If one does not exist.
    pub fn modules(&mut self, names: &[&str]) -> Result<()> {
        let more = self.copy_modules(names)?;
        self.modules.extend(more);
        Ok(())
    }

    /// Copies the kernel's soft RNIC and its provider. It is loaded at boot.
    ///
    /// # Errors
    /// If one does not exist.
    pub fn rxe(&mut self) -> Result<()> {
        // The module that computes its CRCs, which is not among its dependencies. Later kernels have it built in.
        let (crc, list) = ("crc32_generic", format!("lib/modules/{}/modules.dep", self.kernel.version));
        let list = self.kernel.base.join(list);
        let all = fs::read_to_string(&list).map_err(failed(&list.display().to_string()))?;
        if all.contains(&format!("/{crc}.ko")) {
            self.modules(&[crc])?;
        }
        self.modules(&["rdma_rxe"])?;
        self.provider("rxe")
    }

    /// Copies modules and their dependencies that are not loaded at boot. `/load-NAME` loads them, `/unload-NAME`
    /// unloads them.
    ///
    /// # Errors
    /// If one does not exist.
    pub fn modules_for(&self, name: &str, names: &[&str]) -> Result<()> {
        let all = self.copy_modules(names)?;
        let load: String = all.iter().map(|m| format!("insmod /modules/{m} || exit\n")).collect();
        // The users of a module may need a moment to release it.
        let unload = |m: &String| {
            let module = m.trim_end_matches(".ko");
            format!("n=0; until rmmod {module}; do n=$((n + 1)); [ $n -lt 100 ] || exit; sleep 0.1; done\n")
        };
        let unload: String = all.iter().rev().map(unload).collect();
        self.text(&format!("load-{name}"), &format!("#!/bin/sh\n{load}"))?;
        self.text(&format!("unload-{name}"), &format!("#!/bin/sh\n{unload}"))
    }

    /// Copies modules and their dependencies. Returns the files of those that are not loaded at boot, in order.
    fn copy_modules(&self, names: &[&str]) -> Result<Vec<String>> {
        let base = self.kernel.base.display().to_string();
        let mut all = Vec::new();
        for m in names {
            let chain = run(&self.root, &["modprobe", "-d", &base, "-S", &self.kernel.version, "--show-depends", m])?;
            for file in chain.lines().filter_map(|l| l.strip_prefix("insmod ")).map(str::trim) {
                let file = Path::new(file.split(' ').next().unwrap_or_default());
                let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
                let plain = name.trim_end_matches(".xz").to_string();
                if self.modules.contains(&plain) || all.contains(&plain) {
                    continue;
                }
                if !self.root.join("modules").join(&plain).exists() {
                    self.file(file, &format!("modules/{name}"))?;
                    if name != plain {
                        run(&self.root.join("modules"), &["xz", "-d", &name])?;
                    }
                }
                all.push(plain);
            }
        }
        Ok(all)
    }

    /// Packs it into `to`. The script `then` runs after modules are loaded and before commands are served.
    ///
    /// # Errors
    /// If it cannot be packed.
    pub fn pack(self, then: &str, to: &Path) -> Result<()> {
        let load: String = self.modules.iter().map(|m| format!("insmod /modules/{m}\n")).collect();
        let last = machine::port_in_guest(PORTS);
        let serve: String = (1..=PORTS).map(|n| format!("/serve {} &\n", machine::port_in_guest(n))).collect();
        let begin = if self.takes_containers {
            "[ \"$AGAIN\" ] || { export AGAIN=1; mkdir /again; mount --bind / /again; cd /again; mount --move . /\n\
             exec chroot . /init; }\n"
        } else {
            ""
        };
        let init = format!(
            "#!/bin/sh\nexport PATH=/usr/bin:/bin HOME=/\n{begin}mount -t proc proc /proc\nmount -t sysfs sys /sys\n\
             mount -t devtmpfs dev /dev\nmkdir -p /dev/shm\nmount -t tmpfs shm /dev/shm\nulimit -l unlimited\n{load}\
             ip link set lo up\n{then}until [ -e {last} ]; do sleep 0.05; done\n{serve}setsid cttyhack /bin/sh\npoweroff -f\n"
        );
        self.text("init", &init)?;
        self.text("serve", SERVE)?;
        run(&self.root, &["sh", "-c", &format!("find . | cpio -o -H newc --quiet >{}", to.display())])?;
        fs::remove_dir_all(&self.root).map_err(failed("initial RAM file system"))
    }
}
