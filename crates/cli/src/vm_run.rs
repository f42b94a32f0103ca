//! `unirdma vm`: starts a virtual machine that has a vRNIC, to try it out.
//!
//! QEMU runs in the foreground, with the terminal as the machine's console, and ends with this program. It is in a
//! container of its own, with the files that the command line names. Stock QEMU has no name for the device's number; a
//! library that this program carries adds it.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use clap::{Args, Subcommand, ValueEnum};
use rustix::termios::{OptionalActions, Termios};
use rustix::thread::UnshareFlags;
use unirdma_abi::container::vrnic_dir;
use unirdma_ipc::vrnic::{VrnicInfo, Way};
use unirdma_supervisor::Client;

use crate::bind::{self, Bind};
use crate::home::{self, Show};
use crate::mounts::Host;
use crate::sandbox::{Sandbox, end_with_parent, fail};
use crate::vmm_files::{self, Scratch};
use crate::vrnics::show;
use crate::{container, process, vmm_args};

/// The library built from `guest/qemu/name.rs`.
const NAME_LIBRARY: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/name.so"));

const RUN_EXAMPLES: &str = "Examples:
  unirdma vm run --vrnic vm --image debian-13-generic-amd64.qcow2 --user-data me.yaml --nat
  unirdma vm run --vrnic vm --image disk.qcow2 --snapshot --memory 8G --cpus 4
  unirdma vm run --vrnic vm --kernel vmlinuz --initrd initrd.img --append 'console=ttyS0 quiet'
  unirdma vm run --vrnic vm --image disk.raw --format raw -- -drive file=/data/more.qcow2,if=virtio
  unirdma vm run --vrnic vm --image overlay.qcow2 --bind /data/base.qcow2:ro --bind /data/vm -- -qmp unix:/data/vm/qmp,server=on

The terminal is the machine's console: Ctrl-A X ends the machine, Ctrl-A C is QEMU's monitor, and Ctrl-C goes to the guest.
The guest sees the vRNIC as a virtio device, for which it needs a driver and a provider (docs/user/virtual-machines.md), and the vRNIC's
eth0 as a virtio network device with the vRNIC's MAC.
KVM is used if /dev/kvm can be, and else emulation (TCG), which is slow.

QEMU runs in a container of its own. It reaches this vRNIC's sockets, the files that these options and QEMU's arguments name, programs
and libraries of the host (/usr, /etc), which are read-only, and nothing else: no other vRNIC, home directory, or file of another
machine. Files that exist and that an argument names, alone or after `=` or `:`, are given to it. Give others by --bind: backing files of
an image, files named in JSON or in a file of options, the directory of a socket or a log that QEMU makes. It has the host's network with
--nat and with arguments of your own, which may need it, and else none. If root starts it, QEMU is an unprivileged user outside, with
root's rights on what it is given. What needs more, such as network helpers, devices that arguments only imply, or descriptors from
outside, works with --unconfined.

Exit code: that of QEMU, which is 0 when the guest has powered off; 128 and the signal if one ended it.";

const PRELOAD_EXAMPLES: &str = "Example:
  unirdma vm preload name.so
  LD_PRELOAD=./name.so qemu-system-x86_64 -enable-kvm $(unirdma vrnic show vm --qemu) disk.qcow2

QEMU starts no generic vhost-user device whose number it has no name for, and it has none for 42. `unirdma vm run` needs no such file.";

#[derive(Subcommand)]
pub(crate) enum VmCommand {
    /// Start a virtual machine that has a vRNIC, with the terminal as its console
    #[command(after_help = RUN_EXAMPLES)]
    Run(Box<RunArgs>),
    /// Write the library that stock QEMU needs preloaded, for those who start QEMU themselves
    #[command(after_help = PRELOAD_EXAMPLES)]
    Preload {
        /// Where to
        file: PathBuf,
    },
}

#[derive(Args)]
pub(crate) struct RunArgs {
    /// The vRNIC that the machine gets
    #[arg(long, value_name = "NAME")]
    vrnic: String,
    /// A disk image to start from
    #[arg(long, value_name = "FILE", required_unless_present = "kernel")]
    image: Option<PathBuf>,
    /// Format of the image, as QEMU calls it [default: QEMU looks]
    #[arg(long, requires = "image")]
    format: Option<String>,
    /// Leave the image as it is: changes by the guest are lost at the end
    #[arg(long, requires = "image")]
    snapshot: bool,
    /// Give an image with cloud-init this user data, and the vRNIC's addresses for its network interface
    #[arg(long, value_name = "FILE", requires = "image")]
    user_data: Option<PathBuf>,
    /// A kernel to start directly
    #[arg(long, value_name = "FILE")]
    kernel: Option<PathBuf>,
    /// Its initial RAM file system
    #[arg(long, value_name = "FILE", requires = "kernel")]
    initrd: Option<PathBuf>,
    /// Its command line [default: the console only]
    #[arg(long, value_name = "TEXT", requires = "kernel")]
    append: Option<String>,
    /// The machine's memory, as QEMU takes it
    #[arg(long, value_name = "SIZE", default_value = "2G")]
    memory: String,
    /// Its processors
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..))]
    cpus: u32,
    /// A second network interface, with QEMU's way out of this host
    #[arg(long)]
    nat: bool,
    /// How its processors run
    #[arg(long, value_enum, default_value_t = Accel::Auto)]
    accel: Accel,
    /// QEMU
    #[arg(long, value_name = "PROGRAM", default_value = QEMU)]
    qemu: PathBuf,
    /// Give QEMU a file, device or directory, at the same place or at DST; may be given more than once
    #[arg(long, value_name = "SRC[:DST][:ro]", value_parser = bind::parse, conflicts_with = "unconfined")]
    bind: Vec<Bind>,
    /// Start QEMU as an ordinary process with all rights of this user: who breaks out of the guest has them
    #[arg(long)]
    unconfined: bool,
    /// More arguments of QEMU
    #[arg(last = true, value_name = "QEMU ARGS")]
    more: Vec<OsString>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Accel {
    /// KVM if it can be used, and else TCG
    Auto,
    /// The processor's own virtualization
    Kvm,
    /// Emulation
    Tcg,
}

#[cfg(target_arch = "x86_64")]
const QEMU: &str = "qemu-system-x86_64";
#[cfg(target_arch = "x86_64")]
const MACHINE: &str = "q35";
#[cfg(target_arch = "x86_64")]
const CONSOLE: &str = "console=ttyS0";
#[cfg(target_arch = "aarch64")]
const QEMU: &str = "qemu-system-aarch64";
#[cfg(target_arch = "aarch64")]
const MACHINE: &str = "virt";
#[cfg(target_arch = "aarch64")]
const CONSOLE: &str = "console=ttyAMA0";

/// MAC of the interface of `--nat`. Each machine has its own network behind it.
const NAT_MAC: &str = "52:54:00:00:00:01";

pub(crate) fn vm(dir: &Path, command: VmCommand) -> io::Result<u8> {
    match command {
        VmCommand::Run(args) => run(dir, &args),
        VmCommand::Preload { file } => fs::write(&file, NAME_LIBRARY).map(|()| 0).map_err(about(&file)),
    }
}

/// Adds the name of the file to an error.
fn about(file: &Path) -> impl Fn(io::Error) -> io::Error {
    move |e| io::Error::new(e.kind(), format!("{}: {e}", file.display()))
}

fn run(dir: &Path, args: &RunArgs) -> io::Result<u8> {
    let info = show(&mut Client::connect(dir)?, &args.vrnic)?;
    if info.way.asked == Way::Vf {
        let text =
            "a virtual machine has the software RNIC, and this vRNIC has the way vf; make one with another --way";
        return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
    }
    for file in [&args.image, &args.user_data, &args.kernel, &args.initrd].into_iter().flatten() {
        File::open(file).map_err(about(file))?;
    }
    let qemu = check(&args.qemu)?;
    let (accel, why) = accelerator(args.accel)?;
    let scratch = Scratch::make(&info.name)?;
    let seed = scratch.seed();
    if let Some(user_data) = &args.user_data {
        fill_seed(&seed, &info, user_data, args.nat)?;
    }
    eprintln!("unirdma: {} with {why}; vRNIC {}, {}. Ctrl-A X ends it.", qemu.version, info.name, info.mac);
    let words = |info: &VrnicInfo| arguments(args, info, &qemu, accel, &seed);
    let terminal = Terminal::now();
    let code = if args.unconfined {
        run_unconfined(&args.qemu, &words(&info))
    } else {
        let inside = VrnicInfo { dir: vrnic_dir(0), ..info.clone() };
        run_confined(dir, args, &info, &words(&inside), accel, &scratch)
    };
    terminal.restore();
    code
}

fn run_unconfined(qemu: &Path, words: &[OsString]) -> io::Result<u8> {
    let child = match process::fork(UnshareFlags::empty())? {
        Some(child) => child,
        None => execute(qemu, words, None),
    };
    process::pass_signals_to(child, false);
    Ok(process::wait(child)?.code)
}

/// Runs QEMU in a container that has the vRNIC's directory and what the command line names.
fn run_confined(
    dir: &Path,
    args: &RunArgs,
    info: &VrnicInfo,
    words: &[OsString],
    accel: &str,
    scratch: &Scratch,
) -> io::Result<u8> {
    const TEMPORARY: &str = "/run/unirdma-vmm";
    home::forget_tokens();
    let sandbox = Sandbox {
        dir,
        host: Host::System,
        vrnics: &[Path::new(&info.dir)],
        devices: &[],
        libraries: None,
        own_net: !args.nat && args.more.is_empty(),
        homes: &home::all(Show::None)?,
        working: None,
        binds: &binds(dir, args, accel, scratch, Path::new(TEMPORARY)),
        preload: false,
        explain: false,
        execute: &|_| execute(&args.qemu, words, Some(TEMPORARY)),
    };
    let (code, _network) = container::contain(&sandbox, &mut Vec::new())
        .map_err(|e| io::Error::new(e.kind(), format!("{e}; --unconfined starts QEMU without a container")))?;
    if code == 1 {
        eprintln!(
            "unirdma: QEMU has only the files that the options name; give it others by --bind PATH, or start it with --unconfined"
        );
    }
    Ok(code)
}

/// The files that QEMU gets. `temporary`: the place of the directory for its temporary files.
fn binds(dir: &Path, args: &RunArgs, accel: &str, scratch: &Scratch, temporary: &Path) -> Vec<Bind> {
    let given = vmm_files::given;
    let mut all: Vec<Bind> = vmm_files::program(&args.qemu).into_iter().chain(vmm_files::preloaded()).collect();
    all.push(Bind { source: scratch.temporary(), target: temporary.into(), read_only: false });
    all.extend(args.user_data.iter().map(|_| given(&scratch.seed(), true)));
    all.extend(args.image.iter().map(|image| given(image, args.snapshot)));
    all.extend([&args.kernel, &args.initrd].into_iter().flatten().map(|file| given(file, true)));
    if accel == "kvm" {
        all.push(given(Path::new(KVM), false));
    }
    // A mount on a file would keep QEMU from replacing it in a directory that it is given.
    let is_given = |file: &Bind| args.bind.iter().any(|b| file.target.starts_with(&b.target));
    all.extend(vmm_files::named(&args.more, dir).into_iter().filter(|file| !is_given(file)));
    all.extend(args.bind.iter().cloned());
    // A directory comes before the files in it.
    all.sort_by_key(|b| b.target.as_os_str().len());
    all
}

/// Properties of a QEMU program.
struct Qemu {
    /// The version, as QEMU prints it.
    version: String,
    /// True if it connects again to a worker that was started again, which needs the patch in `guest/qemu`.
    reconnects: bool,
}

/// Asks QEMU whether it has the device.
fn check(qemu: &Path) -> io::Result<Qemu> {
    const INSTALL: &str =
        "install QEMU 11.1 or later (Debian 13: apt install -t trixie-backports qemu-system-x86), or name it by --qemu";
    let name = qemu.display();
    let ask = |args: &[&str]| {
        let o = Command::new(qemu).args(args).stdin(Stdio::null()).output().map_err(|e| match e.kind() {
            io::ErrorKind::NotFound => io::Error::other(format!("there is no {name}; {INSTALL}")),
            _ => about(qemu)(e),
        })?;
        Ok::<_, io::Error>(String::from_utf8_lossy(&o.stdout).into_owned())
    };
    let version = ask(&["--version"])?.lines().next().unwrap_or_default().to_string();
    let options = ask(&["-device", &format!("{},help", vmm_args::DEVICE)])?;
    let has = |option: &str| options.lines().any(|l| l.trim_start().starts_with(option));
    // The same patch gives the device this option.
    let reconnects = has("vectors=");
    // Older versions that have the device cannot take its number.
    if has("virtio-id=") && (reconnects || release(&version) >= 11) {
        return Ok(Qemu { version, reconnects });
    }
    Err(io::Error::other(format!("{name} ({version}) cannot have the device; {INSTALL}")))
}

/// The first number of what `qemu --version` prints, 0 if there is none.
fn release(version: &str) -> u32 {
    let number = |w: &str| w.split_once('.')?.0.parse().ok();
    version.split(' ').find_map(number).unwrap_or(0)
}

const KVM: &str = "/dev/kvm";

/// QEMU's name of an accelerator, and a description for people.
fn accelerator(wanted: Accel) -> io::Result<(&'static str, String)> {
    const TCG: &str = "tcg,thread=multi";
    let usable = || OpenOptions::new().read(true).write(true).open(KVM);
    match wanted {
        Accel::Tcg => Ok((TCG, "TCG (emulation)".into())),
        Accel::Kvm => usable().map(|_| ("kvm", "KVM".into())).map_err(about(Path::new(KVM))),
        Accel::Auto => Ok(match usable() {
            Ok(_) => ("kvm", "KVM".into()),
            Err(e) => (TCG, format!("TCG (emulation), since {KVM} cannot be used: {e}")),
        }),
    }
}

/// A path as the value of an option of QEMU, with doubled commas. The path is absolute, so that QEMU takes no beginning
/// of it for the name of a protocol.
fn value(path: &Path) -> OsString {
    vmm_args::doubled(&vmm_files::place(path).to_string_lossy()).into()
}

/// `key=value` after `begin`.
fn option(begin: &str, path: &Path) -> OsString {
    let mut text = OsString::from(begin);
    text.push(value(path));
    text
}

fn arguments(args: &RunArgs, info: &VrnicInfo, qemu: &Qemu, accel: &str, seed: &Path) -> Vec<OsString> {
    let mut words: Vec<OsString> = Vec::new();
    let mut add = |more: &[&str]| words.extend(more.iter().map(OsString::from));
    // `max` has all features of the processor with KVM, and all features that can be emulated with TCG.
    add(&["-machine", MACHINE, "-accel", accel, "-cpu", "max", "-smp", &args.cpus.to_string()]);
    add(&["-nodefaults", "-display", "none", "-serial", "mon:stdio"]);
    let device = vmm_args::qemu(info, &args.memory, qemu.reconnects);
    add(&device.iter().map(String::as_str).collect::<Vec<_>>());
    if args.nat {
        add(&["-netdev", "user,id=nat", "-device", &format!("virtio-net-pci,netdev=nat,mac={NAT_MAC}")]);
    }
    if let Some(image) = &args.image {
        let mut drive = option("if=none,id=image,file=", image);
        if let Some(format) = &args.format {
            drive.push(format!(",format={}", vmm_args::doubled(format)));
        }
        if args.snapshot {
            drive.push(",snapshot=on");
        }
        words.extend(["-drive".into(), drive]);
        // A device of its own, so that the image is the first disk and the firmware starts from it: QEMU makes disks of
        // `if=virtio` after all others. A kernel that is started directly has index 0.
        words.extend(["-device".into(), "virtio-blk-pci,drive=image,bootindex=1".into()]);
    }
    if args.user_data.is_some() {
        words.extend(["-blockdev".into(), option("driver=vvfat,node-name=seed,read-only=on,label=CIDATA,dir=", seed)]);
        words.extend(["-device".into(), "virtio-blk-pci,drive=seed".into()]);
    }
    for (name, file) in [("-kernel", &args.kernel), ("-initrd", &args.initrd)] {
        words.extend(file.iter().flat_map(|f| [OsString::from(name), vmm_files::place(f).into()]));
    }
    if args.kernel.is_some() {
        words.extend(["-append".into(), args.append.as_deref().unwrap_or(CONSOLE).into()]);
    }
    words.extend(args.more.iter().cloned());
    words
}

/// A memfd with the library that names the device. QEMU inherits its descriptor.
fn library() -> io::Result<File> {
    let mut file = File::from(rustix::fs::memfd_create("unirdma-name", rustix::fs::MemfdFlags::empty())?);
    file.write_all(NAME_LIBRARY)?;
    Ok(file)
}

/// Replaces this process by QEMU. `temporary`: the directory for its temporary files, if it is not the usual one.
fn execute(qemu: &Path, words: &[OsString], temporary: Option<&str>) -> ! {
    let library = match end_with_parent().and_then(|()| library()) {
        Ok(library) => library,
        Err(e) => fail(&e),
    };
    let mut preload = OsString::from(format!("/proc/self/fd/{}", library.as_raw_fd()));
    if let Some(other) = std::env::var_os("LD_PRELOAD").filter(|v| !v.is_empty()) {
        preload.push(OsStr::new(":"));
        preload.push(other);
    }
    let variables = temporary.map(|dir| ("TMPDIR", dir));
    let e = Command::new(qemu).args(words).env("LD_PRELOAD", preload).envs(variables).exec();
    fail(&about(qemu)(e))
}

/// Writes data for cloud-init into a directory that QEMU shows as a disk (`NoCloud`).
fn fill_seed(seed: &Path, info: &VrnicInfo, user_data: &Path, nat: bool) -> io::Result<()> {
    fs::copy(user_data, seed.join("user-data")).map_err(about(user_data))?;
    fs::write(seed.join("meta-data"), format!("instance-id: unirdma-{}\n", info.name))?;
    fs::write(seed.join("network-config"), network(info, nat))
}

/// The machine's interfaces, in the format of cloud-init and netplan.
fn network(info: &VrnicInfo, nat: bool) -> String {
    let ips = info.ips.iter().map(|ip| format!("\"{ip}\"")).collect::<Vec<_>>().join(", ");
    let mut text = format!(
        "version: 2\nethernets:\n  vrnic:\n    match: {{macaddress: \"{}\"}}\n    addresses: [{ips}]\n    optional: true\n",
        info.mac
    );
    if nat {
        text += &format!("  nat:\n    match: {{macaddress: \"{NAT_MAC}\"}}\n    dhcp4: true\n");
    }
    text
}

/// The settings of the terminal, if there is one. A QEMU that is killed leaves the settings that it made for the guest.
struct Terminal(Option<Termios>);

impl Terminal {
    fn now() -> Terminal {
        Terminal(rustix::termios::tcgetattr(rustix::stdio::stdin()).ok())
    }

    fn restore(&self) {
        if let Some(was) = &self.0 {
            let _ = rustix::termios::tcsetattr(rustix::stdio::stdin(), OptionalActions::Drain, was);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: RunArgs,
    }

    fn words(line: &str) -> String {
        let line = Line::try_parse_from(std::iter::once("run").chain(line.split(' '))).unwrap();
        let info =
            VrnicInfo { dir: "/run/x".into(), mac: "02:00:0a:00:00:01".into(), mtu: 1500, ..VrnicInfo::default() };
        let qemu = Qemu { version: String::new(), reconnects: true };
        let words = arguments(&line.args, &info, &qemu, "tcg", Path::new("/seed"));
        words.iter().map(|w| w.to_string_lossy()).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn each_option_becomes_an_argument() {
        let text =
            words("--vrnic a --image /a,b.qcow2 --snapshot --user-data /seed --memory 3G --cpus 4 --nat -- -device x");
        for part in [
            "file=/a,,b.qcow2,snapshot=on",
            "dir=/seed",
            "size=3G,share=on",
            "-smp 4",
            "user,id=nat",
            "path=/run/x/vhost.sock",
            "path=/run/x/net.sock",
            "reconnect-ms=",
        ] {
            assert!(text.contains(part), "{part} in {text}");
        }
        assert!(text.ends_with("-device x"));
        let [image, seed] = ["drive=image,bootindex=1", "drive=seed"].map(|part| text.find(part).unwrap());
        assert!(image < seed, "the image is the first disk: {text}");
        assert!(!text.contains("-kernel"));
        let text = words("--vrnic a --kernel /k --initrd /i");
        assert!(text.ends_with(&format!("-kernel /k -initrd /i -append {CONSOLE}")), "{text}");
        assert!(words("--vrnic a --image i --format raw").contains(",format=raw -device"));
    }

    #[test]
    fn versions_are_read() {
        assert_eq!(release("QEMU emulator version 11.1.3 (Debian 1:11.1.3+ds-1~bpo13+1)"), 11);
        assert_eq!(release("QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7+deb12u18+b3)"), 7);
        assert_eq!(release(""), 0);
    }

    #[test]
    fn a_machine_needs_something_to_start() {
        for line in
            ["run --vrnic a", "run --vrnic a --initrd i", "run --vrnic a --kernel k --snapshot", "run --image i"]
        {
            assert!(Line::try_parse_from(line.split(' ')).is_err(), "{line}");
        }
    }

    #[test]
    fn the_guest_is_told_its_addresses() {
        let ips = ["10.0.0.7/16", "fd00::7/64"].map(|ip| ip.parse().unwrap()).to_vec();
        let info = VrnicInfo { mac: "02:00:0a:00:00:07".into(), ips, ..VrnicInfo::default() };
        let text = network(&info, false);
        assert!(text.contains("\"10.0.0.7/16\", \"fd00::7/64\"") && text.contains("02:00:0a:00:00:07"), "{text}");
        assert!(!text.contains("dhcp4") && network(&info, true).contains("dhcp4"));
    }

    #[test]
    fn the_library_does_nothing_to_other_programs() {
        let file = library().unwrap();
        let preload = format!("/proc/self/fd/{}", file.as_raw_fd());
        let o = Command::new("sh").args(["-c", "echo ran"]).env("LD_PRELOAD", preload).output().unwrap();
        assert_eq!((o.stdout.as_slice(), o.stderr.as_slice()), (&b"ran\n"[..], &b""[..]));
    }
}
