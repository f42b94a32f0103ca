//! Tests of the confinement with a real kernel. Each test starts this program anew, confines it, and lets it do what a
//! worker may and may not do. Root runs each test as root and as an ordinary user. If a container refuses a measure,
//! the confinement itself must report that.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::process::{DumpableBehavior, Gid, Pid, Resource, Uid, getpid, getrlimit};
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};
use unirdma_confine::{self as confine, CgroupLimits, Cgroups, InForce, Kind, Needs, Options, Plan};

/// Name and function of a test. The argument is true for root and false for an ordinary user.
type Test = (&'static str, fn(bool));

/// An ordinary user.
const NOBODY: u32 = 65534;
const EPERM: i32 = libc::EPERM;
const ENOSYS: i32 = libc::ENOSYS;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if arguments.first().is_some_and(|a| a == "child") {
        return child(&arguments[1..]);
    }
    const TESTS: [Test; 10] = [
        ("a call without an innocent reason ends the process, in each kind of thread", fatal),
        ("other calls that a kind of thread does not make fail", refused),
        ("threads of each kind live, log and end", allowed),
        ("a worker that fails aborts, and leaves no memory behind", aborts),
        ("the kernel says that a worker has no rights", no_rights),
        ("limits hold", limits),
        ("no file can be opened, and what is open stays so", files),
        ("what a container refuses is said, and nothing else changes", refusals),
        ("a worker's user", user),
        ("what a supervisor keeps", supervisor),
    ];
    let filter = arguments.iter().find(|a| !a.starts_with('-'));
    let both = TESTS.into_iter().flat_map(|t| [(t, true), (t, false)]).filter(|(_, root)| is_root() || !root);
    // A process that was root may still own its cgroup, so this test runs only as the user who runs the tests.
    for ((name, test), root) in both.chain([(("a cgroup holds its worker", cgroup as fn(bool)), is_root())]) {
        if filter.is_none_or(|f| name.contains(f.as_str())) {
            test(root);
            println!("test {name}, as {} ... ok", if root { "root" } else { "an ordinary user" });
        }
    }
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

// --- the program that is confined ---

/// Becomes an ordinary user if `who` is "user".
fn become_ordinary(who: &str) {
    if who == "user" && is_root() {
        let (uid, gid) = (Uid::from_raw(NOBODY), Gid::from_raw(NOBODY));
        rustix::thread::set_thread_groups(&[]).unwrap();
        rustix::thread::set_thread_res_gid(gid, gid, gid).unwrap();
        rustix::thread::set_thread_res_uid(uid, uid, uid).unwrap();
    }
}

fn plan() -> Plan {
    Plan::make(&Options::default()).unwrap()
}

fn child(arguments: &[String]) {
    let (who, what) = (arguments[0].as_str(), arguments[1].as_str());
    become_ordinary(who);
    match what {
        "call" => {
            let kind = Kind::ALL.into_iter().find(|k| format!("{k:?}") == arguments[2]).unwrap();
            confined(&plan());
            in_thread(kind, arguments[3].clone());
        }
        "live" => {
            unirdma_mem::guard::install().unwrap();
            confined(&plan());
            Kind::ALL.into_iter().for_each(live);
            confine::thread(Kind::Control);
            // Also kinds whose threads are started by a thread that has its filter already.
            live(Kind::Capture);
            live(Kind::Closer);
            println!("lived");
        }
        "wait" => {
            println!("{}", serde_json::to_string(&confined(&plan())).unwrap());
            wait();
        }
        "limited" => limited(),
        "files" => opens(),
        "contained" => contained(),
        "supervise" => supervise(),
        "hog" => hog(),
        "unknown user" => println!("{}", Plan::make(&Options { user: Some("no such user".into()) }).unwrap_err()),
        _ => panic!("{what}"),
    }
}

fn confined(plan: &Plan) -> InForce {
    confine::enter(plan)
}

/// Reports that it is ready, and waits until its standard input ends.
fn wait() {
    println!("ready");
    std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
}

/// Makes a system call in a thread of a kind, and exits with its error.
fn in_thread(kind: Kind, name: String) {
    let make = move || {
        confine::thread(kind);
        std::process::exit(call(&name));
    };
    if kind == Kind::Control { make() } else { std::thread::spawn(make).join().unwrap() }
}

/// The error of a system call; 0 if it succeeded.
fn call(name: &str) -> i32 {
    let (page, null) = (4096, std::ptr::null_mut::<libc::c_void>());
    let (read, exec) = (libc::PROT_READ, libc::PROT_READ | libc::PROT_EXEC);
    let private = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: each call has valid arguments, and refers to no memory or to memory that it has just made. Calls that
    // would change the process must not succeed.
    let result = unsafe {
        match name {
            "execve" => {
                libc::execve(c"/bin/true".as_ptr(), [std::ptr::null()].as_ptr(), [std::ptr::null()].as_ptr()).into()
            }
            "fork" => libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0),
            "ptrace" => libc::ptrace(libc::PTRACE_TRACEME, 0, 0, 0),
            "process_vm_readv" => libc::process_vm_readv(libc::getppid(), null.cast(), 0, null.cast(), 0, 0) as i64,
            "socket" => libc::socket(libc::AF_INET, libc::SOCK_DGRAM, 0).into(),
            "unix socket" => libc::socket(libc::AF_UNIX, libc::SOCK_STREAM, 0).into(),
            "open_by_handle_at" => libc::syscall(libc::SYS_open_by_handle_at, 0, 0, 0),
            "mount" => libc::mount(null.cast(), c"/".as_ptr(), null.cast(), libc::MS_REMOUNT, null).into(),
            "unshare" => libc::unshare(libc::CLONE_NEWUSER).into(),
            "setns" => libc::setns(0, 0).into(),
            "setuid" => libc::syscall(libc::SYS_setuid, 0),
            "bpf" => libc::syscall(libc::SYS_bpf, 0, 0, 0),
            "io_uring_setup" => libc::syscall(libc::SYS_io_uring_setup, 1, 0),
            "userfaultfd" => libc::syscall(libc::SYS_userfaultfd, 0),
            "keyctl" => libc::syscall(libc::SYS_keyctl, 0, 0, 0, 0, 0),
            "pidfd_getfd" => libc::syscall(libc::SYS_pidfd_getfd, 0, 0, 0),
            "mmap exec" => made(libc::mmap(null, page, exec, private, -1, 0)),
            "mprotect exec" => {
                let p = libc::mmap(null, page, read, private, -1, 0);
                libc::mprotect(p, page, exec).into()
            }
            "openat" => libc::open(c"/dev/null".as_ptr(), libc::O_RDONLY).into(),
            "kill" => libc::kill(libc::getppid(), 0).into(),
            "tgkill" => libc::syscall(libc::SYS_tgkill, libc::getppid(), libc::getppid(), libc::SIGABRT),
            "prctl" => libc::prctl(libc::PR_SET_DUMPABLE, 1).into(),
            "prlimit" => {
                let limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
                libc::syscall(libc::SYS_prlimit64, 0, libc::RLIMIT_CORE, &raw const limit, 0)
            }
            "setsockopt" => libc::setsockopt(0, libc::SOL_SOCKET, libc::SO_MARK, null, 0).into(),
            "mlockall" => libc::mlockall(libc::MCL_CURRENT).into(),
            "unlink" => libc::unlink(c"/no-such-file".as_ptr()).into(),
            "getdents" => libc::syscall(libc::SYS_getdents64, 0, 0, 0),
            "sigaction" => libc::signal(libc::SIGTERM, libc::SIG_IGN) as i64,
            "clone3" => libc::syscall(libc::SYS_clone3, 0, 0),
            "clone" => libc::syscall(libc::SYS_clone, libc::CLONE_THREAD | libc::CLONE_NEWNET, 0, 0, 0, 0),
            "memfd_create" => made_fd(libc::memfd_create(c"x".as_ptr(), 0)),
            "socketpair" => libc::socketpair(libc::AF_UNIX, libc::SOCK_STREAM, 0, [0; 2].as_mut_ptr()).into(),
            "accept4" => libc::accept4(-1, null.cast(), null.cast(), 0).into(),
            "pread" => libc::pread(-1, null, 0, 0) as i64,
            "epoll_wait" => libc::epoll_pwait(-1, null.cast(), 1, 0, null.cast()).into(),
            "sendmsg" => libc::sendmsg(-1, null.cast(), 0) as i64,
            "setpriority" => libc::setpriority(libc::PRIO_PROCESS, 0, 19).into(),
            "sched_setattr" => libc::syscall(libc::SYS_sched_setattr, 0, null, 0),
            "sched_setattr of another" => libc::syscall(libc::SYS_sched_setattr, libc::getppid(), null, 0),
            "seccomp" => libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, 0, 0),
            "abort" => std::process::abort(),
            _ => panic!("{name}"),
        }
    };
    if result < 0 { std::io::Error::last_os_error().raw_os_error().unwrap_or(-1) } else { 0 }
}

fn made(p: *mut libc::c_void) -> i64 {
    if p == libc::MAP_FAILED { -1 } else { 0 }
}

fn made_fd(fd: i32) -> i64 {
    fd.min(0).into()
}

/// An account with room for anything.
struct Room;

impl unirdma_mem::holes::Account for Room {
    fn take(&self, _: u64) -> unirdma_mem::holes::Room {
        unirdma_mem::holes::Room::Enough
    }
    fn end(&self, _: u64, _: u64) {}
}

/// Actions of every thread: it allocates, waits, logs, fills holes of sparse files, and ends.
fn live(kind: Kind) {
    let file = rustix::fs::memfd_create(c"sparse", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, 4096).unwrap();
    let sparse = unirdma_mem::map_pieces(&[(file.as_fd(), 0, 4096)], Box::new(()), Some(Arc::new(Room))).unwrap();
    let thread = std::thread::Builder::new().name(format!("{kind:?}")).spawn(move || {
        confine::thread(kind);
        sparse.store32(0, 7, Ordering::Relaxed);
        assert!(!sparse.is_broken());
        let mut block = vec![1u8; 64 << 20];
        block.extend_from_within(..1 << 20);
        let map: std::collections::HashMap<usize, u8> = block.iter().copied().enumerate().step_by(1 << 20).collect();
        assert_eq!(map.len(), 65);
        let lock = std::sync::Mutex::new(0);
        let waited = std::sync::Condvar::new()
            .wait_timeout(lock.lock().unwrap(), std::time::Duration::from_millis(1))
            .unwrap()
            .1;
        assert!(waited.timed_out());
        std::thread::sleep(std::time::Duration::from_millis(1));
        let starts = [Kind::Control, Kind::Watcher].contains(&kind);
        let started = std::thread::Builder::new().spawn(|| confine::thread(Kind::Poller));
        assert_eq!(started.is_ok(), starts, "{kind:?}");
        started.into_iter().for_each(|t| t.join().unwrap());
        let mut err = std::io::stderr();
        writeln!(err, "{kind:?} at {:?}", std::time::SystemTime::now()).unwrap();
    });
    thread.unwrap().join().unwrap();
}

/// Runs with low limits and checks their effect.
fn limited() {
    let mut plan = plan();
    (plan.limits.data, plan.limits.descriptors) = (256 << 20, 40);
    let spare = rustix::fs::memfd_create(c"spare", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&spare, 1 << 46).unwrap();
    confined(&plan);
    assert!(Vec::<u8>::new().try_reserve_exact(512 << 20).is_err(), "more memory than the limit");
    // Memory of tenants and address space do not count.
    let map = |len: usize, protection, flags, fd| {
        // SAFETY: a new mapping at an address of the kernel's choice, which nobody uses.
        made(unsafe { libc::mmap(std::ptr::null_mut(), len, protection, flags, fd, 0) }) == 0
    };
    let (shared, both) = (libc::MAP_SHARED | libc::MAP_NORESERVE, libc::PROT_READ | libc::PROT_WRITE);
    let reserved = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    assert!(map(1 << 45, both, shared, spare.as_raw_fd()));
    assert!(map(1 << 45, libc::PROT_NONE, reserved, -1));
    assert!(!map(1 << 46, libc::PROT_NONE, reserved, -1), "more addresses than the limit");
    let fds: Vec<OwnedFd> = (0..100).map_while(|_| rustix::event::epoll::create(EPOLL_FLAGS).ok()).collect();
    assert!((1..40).contains(&fds.len()), "{} descriptors", fds.len());
    println!("limited");
}

const EPOLL_FLAGS: rustix::event::epoll::CreateFlags = rustix::event::epoll::CreateFlags::CLOEXEC;

fn opens() {
    let passwd = std::fs::File::open("/etc/passwd").unwrap();
    let known = std::fs::read_link(format!("/proc/self/fd/{}", passwd.as_raw_fd())).unwrap();
    confined(&plan());
    assert!(std::fs::File::open("/etc/passwd").is_err());
    assert!(std::fs::File::create("/tmp/unirdma-confine").is_err());
    assert!(BufReader::new(&passwd).lines().any(|l| l.unwrap().starts_with("root:")));
    // The type of a descriptor is still known by its name.
    assert_eq!(std::fs::read_link(format!("/proc/self/fd/{}", passwd.as_raw_fd())).unwrap(), known);
    println!("opened");
}

/// As in a container that filters system calls itself, and has no other user.
fn contained() {
    let calls = [libc::SYS_landlock_create_ruleset, libc::SYS_seccomp, libc::SYS_setresuid];
    let refuse = SeccompAction::Errno(EPERM as u32);
    let calls = calls.map(|call| (call, Vec::new())).into();
    let arch = std::env::consts::ARCH.try_into().unwrap();
    let filter: BpfProgram = SeccompFilter::new(calls, SeccompAction::Allow, refuse, arch).unwrap().try_into().unwrap();
    seccompiler::apply_filter(&filter).unwrap();
    let says = confined(&plan());
    // Whether the weight can be raised depends on the user and on the container.
    let missing: Vec<&str> = says.missing().map(|m| m.name.as_str()).filter(|&name| name != "weight").collect();
    assert_eq!(missing, ["user", "landlock", "seccomp"], "{says}");
    Kind::ALL.into_iter().for_each(confine::thread);
    assert!(rustix::thread::capabilities(None).unwrap().effective.is_empty());
    println!("{says}");
}

/// A supervisor that starts and ends a worker.
fn supervise() {
    let kept = confine::confine_supervisor(Needs { workers: is_root(), ..Needs::default() });
    println!("{}", serde_json::to_string(&kept).unwrap());
    println!("{}", status(getpid(), "CapEff").unwrap());
    let mut worker = start("as it is", &["wait"]);
    let (uid, _) = (status(pid(&worker), "Uid"), line(&mut worker));
    assert_eq!(line(&mut worker), "ready");
    println!("{}", uid.and(status(pid(&worker), "Uid")).unwrap());
    worker.kill().unwrap();
    assert_eq!(worker.wait().unwrap().signal(), Some(libc::SIGKILL));
}

/// Allocates memory without end.
fn hog() {
    wait();
    let mut all = Vec::new();
    loop {
        all.push(vec![1u8; 1 << 20]);
    }
}

// --- checks from outside ---

/// Starts this program again, as root or as an ordinary user.
fn start(who: &str, arguments: &[&str]) -> Child {
    let mut c = Command::new("/proc/self/exe");
    c.arg("child").arg(who).args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    c.spawn().unwrap()
}

fn who(root: bool) -> &'static str {
    if root { "root" } else { "user" }
}

fn pid(c: &Child) -> Pid {
    Pid::from_child(c)
}

/// Runs the program to its end.
fn run(root: bool, arguments: &[&str]) -> (ExitStatus, String, String) {
    let out = start(who(root), arguments).wait_with_output().unwrap();
    (out.status, String::from_utf8_lossy(&out.stdout).into(), String::from_utf8_lossy(&out.stderr).into())
}

fn runs_well(root: bool, what: &str, says: &str) {
    let (status, out, err) = run(root, &[what]);
    assert!(status.success() && out.contains(says), "{what}: {status}: {out}{err}");
}

/// The next output line of a child.
fn line(c: &mut Child) -> String {
    let mut bytes = Vec::new();
    let mut byte = [0];
    let out = c.stdout.as_mut().unwrap();
    while out.read(&mut byte).unwrap() == 1 && byte != *b"\n" {
        bytes.push(byte[0]);
    }
    String::from_utf8(bytes).unwrap()
}

/// A line of `/proc/PID/status`.
fn status(pid: Pid, name: &str) -> Option<String> {
    let text = std::fs::read_to_string(format!("/proc/{}/status", pid.as_raw_pid())).unwrap();
    text.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(':').map(|v| v.trim().to_string()))
}

/// True if the kernel filters system calls. A container may refuse that.
fn filters(root: bool) -> bool {
    let mut c = start(who(root), &["wait"]);
    let says: InForce = serde_json::from_str(&line(&mut c)).unwrap();
    drop(c.stdin.take());
    assert!(c.wait().unwrap().success());
    let seccomp = says.measures.iter().find(|m| m.name == "seccomp").unwrap();
    if !seccomp.in_force {
        println!("no system calls are filtered here: {}", seccomp.detail);
    }
    seccomp.in_force
}

fn fatal(root: bool) {
    const CALLS: [&str; 18] = [
        "execve",
        "fork",
        "ptrace",
        "process_vm_readv",
        "socket",
        "unix socket",
        "open_by_handle_at",
        "mount",
        "unshare",
        "setns",
        "setuid",
        "bpf",
        "io_uring_setup",
        "userfaultfd",
        "keyctl",
        "pidfd_getfd",
        "mmap exec",
        "mprotect exec",
    ];
    for kind in Kind::ALL.into_iter().filter(|_| filters(root)) {
        for name in CALLS {
            let (status, _, err) = run(root, &["call", &format!("{kind:?}"), name]);
            assert_eq!(status.signal(), Some(libc::SIGSYS), "{kind:?}: {name}: {status}: {err}");
            assert!(!status.core_dumped());
        }
    }
}

fn refused(root: bool) {
    use Kind::{Background, Capture, Closer, Control, Poller, Switch, Watcher};
    const CALLS: [&str; 11] = [
        "openat",
        "kill",
        "tgkill",
        "prctl",
        "prlimit",
        "setsockopt",
        "mlockall",
        "unlink",
        "getdents",
        "sigaction",
        "sched_setattr of another",
    ];
    const SOME: [(&str, i32, &[Kind]); 12] = [
        ("clone3", ENOSYS, &[Control, Watcher]),
        ("clone3", EPERM, &[Poller, Switch, Capture, Closer, Background]),
        ("clone", EPERM, &Kind::ALL),
        ("memfd_create", EPERM, &[Capture, Closer, Background]),
        ("socketpair", EPERM, &[Poller, Watcher, Switch, Capture, Closer, Background]),
        ("accept4", EPERM, &[Poller, Watcher, Switch, Capture, Closer, Background]),
        ("pread", EPERM, &[Switch, Capture, Closer, Background]),
        ("epoll_wait", EPERM, &[Capture, Closer, Background]),
        ("setpriority", EPERM, &[Poller, Watcher, Switch, Closer, Background]),
        ("sched_setattr", EPERM, &[Control, Poller, Watcher, Switch, Capture, Closer, Background]),
        ("seccomp", EPERM, &[Poller, Switch, Capture, Closer, Background]),
        ("sendmsg", EPERM, &[Closer, Background]),
    ];
    const DONE: [(&str, i32, &[Kind]); 6] = [
        ("memfd_create", 0, &[Control, Poller, Watcher, Switch]),
        ("socketpair", 0, &[Control]),
        ("accept4", libc::EBADF, &[Control]),
        ("pread", libc::EBADF, &[Control, Poller, Watcher]),
        ("epoll_wait", libc::EBADF, &[Control, Poller, Watcher, Switch]),
        ("sendmsg", libc::EBADF, &[Control, Poller, Watcher, Switch, Capture]),
    ];
    if !filters(root) {
        return;
    }
    let all = CALLS.map(|name| (name, EPERM, &Kind::ALL[..]));
    for (name, error, kinds) in all.into_iter().chain(SOME).chain(DONE) {
        for kind in kinds {
            let (status, _, err) = run(root, &["call", &format!("{kind:?}"), name]);
            assert_eq!(status.code(), Some(error), "{kind:?}: {name}: {status}: {err}");
        }
    }
}

fn allowed(root: bool) {
    let (status, out, err) = run(root, &["live"]);
    assert!(status.success() && out.contains("lived"), "{status}: {out}{err}");
    assert_eq!(err.lines().count(), Kind::ALL.len() + 2, "{err}");
}

fn aborts(root: bool) {
    for kind in Kind::ALL {
        let (status, _, err) = run(root, &["call", &format!("{kind:?}"), "abort"]);
        assert_eq!(status.signal(), Some(libc::SIGABRT), "{kind:?}: {status}: {err}");
        assert!(!status.core_dumped());
    }
}

fn no_rights(root: bool) {
    let mut c = start(who(root), &["wait"]);
    let says: InForce = serde_json::from_str(&line(&mut c)).unwrap();
    assert_eq!(line(&mut c), "ready");
    let names: Vec<&str> = says.measures.iter().map(|m| m.name.as_str()).collect();
    let all = ["limits", "user", "capabilities", "no_new_privs", "weight", "core_dumps", "landlock", "seccomp"];
    assert_eq!(names, all);
    for m in says.missing() {
        // Only root can change its user. Kernels and containers may lack the other measures, and root of a container
        // may not raise weights.
        let may_lack = ["landlock", "seccomp", "weight"].contains(&m.name.as_str());
        assert!(m.name == "user" && !root || may_lack, "{says}");
        assert!(!m.detail.is_empty());
    }
    let of = |name| status(pid(&c), name).unwrap();
    let none = "0000000000000000";
    assert_eq!([of("CapInh"), of("CapPrm"), of("CapEff"), of("CapAmb")], [none; 4]);
    assert_eq!(of("NoNewPrivs"), "1");
    if says.measures.iter().any(|m| m.name == "seccomp" && m.in_force) {
        assert_eq!(of("Seccomp"), "2");
    }
    if is_root() {
        assert_eq!(
            of("Uid"),
            [NOBODY.to_string(), NOBODY.to_string(), NOBODY.to_string(), NOBODY.to_string()].join("\t")
        );
        assert_eq!(of("Groups"), "");
    }
    if root {
        assert_eq!(of("CapBnd"), none);
    }
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", c.id())).unwrap();
    let core = limits.lines().find(|l| l.starts_with("Max core file size")).unwrap();
    assert_eq!(core.split_whitespace().collect::<Vec<_>>()[4..6], ["0", "0"]);
    // The /proc files of a process that is not dumpable belong to root.
    use std::os::unix::fs::MetadataExt;
    assert_eq!(std::fs::metadata(format!("/proc/{}/mem", c.id())).unwrap().uid(), 0);
    drop(c.stdin.take());
    assert!(c.wait().unwrap().success());
    assert_eq!(rustix::process::dumpable_behavior().unwrap(), DumpableBehavior::Dumpable);
}

fn limits(root: bool) {
    runs_well(root, "limited", "limited");
    let limits = plan().limits;
    assert!(limits.descriptors <= getrlimit(Resource::Nofile).maximum.unwrap_or(u64::MAX));
    assert!(limits.data >= 512 << 20);
}

fn files(root: bool) {
    runs_well(root, "files", "opened");
}

fn refusals(root: bool) {
    runs_well(root, "contained", "not in force: user (");
}

fn user(root: bool) {
    let (status, out, err) = run(root, &["unknown user"]);
    assert!(status.success(), "{err}");
    let says = if root {
        "there is no user \"no such user\" (--user)"
    } else {
        "only root can let workers run as another user"
    };
    assert!(out.starts_with(says) && out.lines().count() == 1, "{out}");
    let (user, text) = (plan().user, serde_json::to_string(&plan()).unwrap());
    assert_eq!(user.is_ok(), is_root());
    assert_eq!(serde_json::from_str::<Plan>(&text).unwrap(), plan());
}

fn supervisor(root: bool) {
    let (status, out, err) = run(root, &["supervise"]);
    assert!(status.success(), "{out}{err}");
    let lines: Vec<&str> = out.lines().collect();
    let says: InForce = serde_json::from_str(lines[0]).unwrap();
    assert_eq!(says.missing().count(), 0, "{says}");
    // DAC_READ_SEARCH, KILL, SETGID, SETUID, SETPCAP are bits 2, 5, 6, 7 and 8. Bit 23 is SYS_NICE, which the root of a
    // container may lack.
    let kept = if root { 0x1e4 } else { 0 };
    assert_eq!(u64::from_str_radix(lines[1], 16).map(|k| k & !(u64::from(root) << 23)), Ok(kept), "{says}");
    let uid = if is_root() { NOBODY } else { rustix::process::getuid().as_raw() };
    assert_eq!(lines[2], [uid.to_string(), uid.to_string(), uid.to_string(), uid.to_string()].join("\t"));
}

/// CPU weights of a process in its cgroups, in hundredths of the usual weight. `of` is the text of its
/// `/proc/PID/cgroup`.
fn weights(of: &str) -> Vec<u32> {
    let weight = |line: &str| {
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, path) = (fields.next()?, fields.next()?);
        let (file, usual) = match controllers {
            "" => (format!("/sys/fs/cgroup{path}/cpu.weight"), 100),
            c => (format!("/sys/fs/cgroup/{c}{path}/cpu.shares"), 1024),
        };
        let n: u32 = std::fs::read_to_string(file).ok()?.trim().parse().ok()?;
        Some(n * 100 / usual)
    };
    of.lines().filter(|l| l.contains("/worker-")).filter_map(weight).collect()
}

fn cgroup(root: bool) {
    let dir = std::env::temp_dir().join(format!("unirdma confine.{}", std::process::id()));
    let cgroups = match Cgroups::open(&dir, true) {
        Ok(c) => c,
        Err(why) => {
            assert_eq!(why.to_string().lines().count(), 1, "{why}");
            return println!("no cgroups: {why}");
        }
    };
    let limits = CgroupLimits { memory: 64 << 20, weight: 300, ..CgroupLimits::of_machine() };
    // Twice, like a supervisor that finds its workers again.
    for _ in 0..2 {
        let cgroup = cgroups.make("a/b group", &limits).unwrap();
        assert_eq!(cgroups.make("a/b group", &limits).unwrap(), cgroup);
        let mut c = start(who(root), &["hog"]);
        assert_eq!(line(&mut c), "ready");
        cgroup.enter(pid(&c)).unwrap();
        let of = std::fs::read_to_string(format!("/proc/{}/cgroup", c.id())).unwrap();
        assert!(of.contains("/worker-a_2fb_20group"), "{of}");
        match cgroups.why_no_weights() {
            Some(why) => println!("no weights: {why}"),
            None => {
                let set = |weight| cgroups.make("a/b group", &CgroupLimits { weight, ..limits }).map(drop);
                assert_eq!(weights(&of), [300]);
                set(50).unwrap();
                assert_eq!(weights(&of), [50]);
                set(300).unwrap();
            }
        }
        drop(c.stdin.take());
        assert_eq!(c.wait().unwrap().signal(), Some(libc::SIGKILL), "it was killed for its memory");
        cgroup.remove();
        assert!(cgroup.enter(getpid()).is_err(), "it is gone");
    }
    cgroups.remove();
}
