//! The kernel, and what it lets this user do.

use std::fs;
use std::io;
use std::path::Path;

use rustix::mount::{MountPropagationFlags, mount_change};
use rustix::process::{Resource, getrlimit};

use super::Finding;
use crate::check::{self, FULL_USERFAULTFD};
use crate::print::bytes;
use crate::{container, process};

/// The oldest kernel on which containers work.
const OLDEST: (u32, u32) = (5, 12);
/// Descriptors below which a worker serves few programs: each takes about ten, and each of its MRs may take one.
const FEW_DESCRIPTORS: u64 = 4096;
/// `CAP_SYS_PTRACE` of capabilities(7).
const SYS_PTRACE: u32 = 19;

pub(super) fn look() -> Vec<Finding> {
    vec![kernel(), namespaces(), userfaultfd(), fuse(), descriptors(), locked_memory(), clock()]
}

/// A file's text without the space around it.
fn read(path: &str) -> Option<String> {
    fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

fn kernel() -> Finding {
    let name = rustix::system::uname();
    let (release, machine) = (name.release().to_string_lossy(), name.machine().to_string_lossy());
    let fact = format!("Linux {release} on {machine}");
    let (major, minor) = OLDEST;
    if version(&release).is_some_and(|v| v < OLDEST) {
        return Finding::error("kernel", fact, format!("containers need Linux {major}.{minor} or later"));
    }
    match &*machine {
        "x86_64" => Finding::ok("kernel", fact),
        _ => Finding::warning("kernel", fact, "only x86-64 is tested"),
    }
}

/// The first two numbers of a version, such as `6.1` of `v6.1.0-rc1`.
pub(super) fn version(text: &str) -> Option<(u32, u32)> {
    let mut numbers = text.trim_start_matches('v').split(|c: char| !c.is_ascii_digit()).map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

/// Makes the namespaces of a container, and tries whether mounts can be changed in them, which AppArmor may forbid.
fn namespaces() -> Finding {
    const TOPIC: &str = "namespaces";
    let tried = container::fork().and_then(|(child, nested)| match child {
        None => {
            let kept = mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC);
            std::process::exit(i32::from(kept.is_err()))
        }
        Some(child) => Ok((process::wait(child)?.code == 0, nested)),
    });
    match tried {
        Ok((true, false)) => Finding::ok(TOPIC, "containers are made with this user's rights"),
        Ok((true, true)) => Finding::ok(TOPIC, "containers are made in user namespaces"),
        Ok((false, _)) if read("/proc/sys/kernel/apparmor_restrict_unprivileged_userns").as_deref() == Some("1") => {
            Finding::error(
                TOPIC,
                "AppArmor gives user namespaces of this user no rights, so `unirdma run` cannot make containers",
                "sysctl kernel.apparmor_restrict_unprivileged_userns=0",
            )
        }
        Ok((false, _)) => Finding::error(
            TOPIC,
            "namespaces have no rights over mounts, so `unirdma run` cannot make containers",
            "allow mount(2) in the seccomp or AppArmor profile; docker: --security-opt seccomp=unconfined",
        ),
        Err(e) => Finding::error(TOPIC, e.to_string(), "`unirdma with` works without namespaces"),
    }
}

/// Whether this process has a capability.
fn has_capability(number: u32) -> bool {
    let status = read("/proc/self/status").unwrap_or_default();
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    effective.and_then(|set| u64::from_str_radix(set.trim(), 16).ok()).is_some_and(|set| set >> number & 1 == 1)
}

/// Opens a device for reading and writing.
fn open(path: &str) -> io::Result<fs::File> {
    fs::File::options().read(true).write(true).open(path)
}

fn userfaultfd() -> Finding {
    const TOPIC: &str = "userfaultfd";
    let allowed = read("/proc/sys/vm/unprivileged_userfaultfd");
    let full = match &allowed {
        _ if has_capability(SYS_PTRACE) => Some("for this user, by CAP_SYS_PTRACE"),
        Some(all) if all == "1" => Some("for all users"),
        _ if open("/dev/userfaultfd").is_ok() => Some("by /dev/userfaultfd"),
        _ => None,
    };
    match (full, allowed) {
        (Some(how), _) => Finding::ok(TOPIC, format!("full, {how}")),
        (None, Some(_)) => Finding::warning(
            TOPIC,
            "not full for this user, so private memory of programs with threads is copied in and out",
            FULL_USERFAULTFD,
        ),
        (None, None) => Finding::warning(
            TOPIC,
            "the kernel has none, so private memory of programs with threads is copied in and out",
            "use a kernel with CONFIG_USERFAULTFD",
        ),
    }
}

fn fuse() -> Finding {
    const TOPIC: &str = "/dev/fuse";
    const FACT: &str = "so files of /sys/class/infiniband in containers keep the values of the start";
    match open("/dev/fuse") {
        Ok(_) => Finding::ok(TOPIC, "can be opened"),
        Err(e) if e.kind() == io::ErrorKind::PermissionDenied => Finding::warning(
            TOPIC,
            format!("this user may not open it, {FACT}"),
            "give this user the right to read and write it; most systems do",
        ),
        Err(e) => Finding::warning(
            TOPIC,
            format!("it cannot be opened ({e}), {FACT}"),
            "modprobe fuse; in a container of other software, --device /dev/fuse",
        ),
    }
}

fn descriptors() -> Finding {
    const TOPIC: &str = "descriptors";
    match getrlimit(Resource::Nofile).maximum {
        Some(most) if most < FEW_DESCRIPTORS => Finding::warning(
            TOPIC,
            format!("at most {most} for each process, which limits how many programs and MRs a group may have"),
            "raise the hard limit: `ulimit -Hn`, LimitNOFILE= of systemd, nofile in /etc/security/limits.conf",
        ),
        most => {
            Finding::ok(TOPIC, format!("at most {} for each process", most.map_or("any".into(), |n| n.to_string())))
        }
    }
}

fn locked_memory() -> Finding {
    const TOPIC: &str = "locked memory";
    let hardware = !check::names(Path::new(check::CLASS)).is_empty();
    match getrlimit(Resource::Memlock).maximum {
        None => Finding::ok(TOPIC, "not limited"),
        Some(most) if hardware => Finding::warning(
            TOPIC,
            format!("at most {} for each process; MRs of programs on a VF are pinned", bytes(most)),
            "raise the hard limit: `ulimit -Hl`, LimitMEMLOCK= of systemd, memlock in /etc/security/limits.conf",
        ),
        Some(most) => {
            Finding::ok(TOPIC, format!("at most {} for each process; the software RNIC pins none", bytes(most)))
        }
    }
}

fn clock() -> Finding {
    const TOPIC: &str = "clock";
    let source = read("/sys/devices/system/clocksource/clocksource0/current_clocksource");
    match source.as_deref() {
        // Read without a system call (arch/x86/include/asm/vdso/gettimeofday.h, arm64's `arch_sys_counter`).
        Some(source @ ("tsc" | "kvm-clock" | "arch_sys_counter" | "hyperv_clocksource_tsc_page")) => {
            Finding::ok(TOPIC, format!("{source}, which is read without a system call"))
        }
        Some(source) => Finding::warning(
            TOPIC,
            format!("{source}: each reading is a system call, which slows all RDMA"),
            "use tsc if the machine has a stable one: clocksource=tsc as a parameter of the kernel",
        ),
        None => Finding::warning(TOPIC, "not known: this machine has no clocksource in /sys", "mount /sys"),
    }
}

#[cfg(test)]
mod tests {
    use super::version;

    #[test]
    fn versions_are_two_numbers() {
        assert_eq!(version("6.1.0-37-amd64"), Some((6, 1)));
        assert_eq!(version("v2.1.9"), Some((2, 1)));
        assert_eq!(version("5.12-rc1"), Some((5, 12)));
        assert_eq!((version(""), version("6"), version("six.1")), (None, None, None));
        assert!(version("5.4.0") < Some(super::OLDEST) && version("5.12.0") == Some(super::OLDEST));
    }
}
