//! Processes that have devices of VFs open.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use rustix::fs::{AtFlags, CWD, FileType, StatxFlags, statx};

use super::tree::{Number, entries};

/// The processes that have character devices open, by the numbers of the devices, without the processes in `except`.
///
/// Not seen are descriptors that a single thread has for itself, and those that were closed while their memory is still
/// mapped. The contexts of such programs are among the verbs objects of the device.
pub(super) fn users(
    proc: &Path,
    devices: &BTreeSet<Number>,
    except: &BTreeSet<u32>,
) -> BTreeMap<Number, BTreeSet<u32>> {
    let mut users: BTreeMap<Number, BTreeSet<u32>> = BTreeMap::new();
    if devices.is_empty() {
        return users;
    }
    for pid in entries(proc).into_iter().filter_map(|name| name.parse::<u32>().ok()) {
        if except.contains(&pid) {
            continue;
        }
        for number in open_devices(&proc.join(pid.to_string())) {
            if devices.contains(&number) {
                users.entry(number).or_default().insert(pid);
            }
        }
    }
    users
}

/// The character devices that a process has open. Its threads have one table of descriptors, which shows at another
/// thread after the first one has ended.
fn open_devices(process: &Path) -> Vec<Number> {
    let of = |task: &Path| -> Vec<Number> {
        let fds = task.join("fd");
        entries(&fds).into_iter().filter_map(|fd| device(&fds.join(fd))).collect()
    };
    if process.join("fd").read_dir().is_ok_and(|mut fds| fds.next().is_some()) {
        return of(process);
    }
    let tasks = process.join("task");
    entries(&tasks).into_iter().flat_map(|task| of(&tasks.join(task))).collect()
}

/// The numbers of the character device that is open as this descriptor.
fn device(descriptor: &Path) -> Option<Number> {
    // Without a question to a server, which may be away.
    let s = statx(CWD, descriptor, AtFlags::STATX_DONT_SYNC, StatxFlags::TYPE).ok()?;
    let is_device = FileType::from_raw_mode(s.stx_mode.into()) == FileType::CharacterDevice;
    is_device.then_some((s.stx_rdev_major, s.stx_rdev_minor))
}

#[cfg(test)]
mod tests {
    use super::super::tree::tests::Temporary;
    use super::*;

    #[test]
    fn descriptors_count_also_after_the_first_thread() {
        let tree = Temporary::new();
        let proc = &tree.0.proc;
        // Process 10 has /dev/null open (1:3), 11 has /dev/zero (1:5) in its second thread, and 12 has both.
        tree.link(&proc.join("10/fd/3"), Path::new("/dev/null"));
        tree.link(&proc.join("10/fd/4"), Path::new("/no-such-file"));
        tree.link(&proc.join("11/task/19/fd/4"), Path::new("/dev/zero"));
        tree.link(&proc.join("12/fd/0"), Path::new("/dev/null"));
        tree.link(&proc.join("12/fd/1"), Path::new("/dev/zero"));
        tree.link(&proc.join("self/fd/1"), Path::new("/dev/zero"));
        let of = |devices: &[Number], except: &[u32]| {
            let found = users(proc, &devices.iter().copied().collect(), &except.iter().copied().collect());
            found.into_iter().map(|(n, pids)| (n, pids.into_iter().collect::<Vec<_>>())).collect::<Vec<_>>()
        };
        assert_eq!(of(&[(1, 3), (1, 5), (9, 9)], &[]), [((1, 3), vec![10, 12]), ((1, 5), vec![11, 12])]);
        assert_eq!(of(&[(1, 3)], &[12]), [((1, 3), vec![10])]);
        assert_eq!(of(&[], &[]), []);
    }
}
