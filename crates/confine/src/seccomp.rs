//! The system calls that each kind of thread may make, and the treatment of all others.
//!
//! Two filters apply to the whole process. One kills the process at calls that have no legitimate use here (execute,
//! trace, mount, change identity, make sockets, map executable memory); the other allows only calls that some kind of
//! thread makes. Each thread adds a filter for its own kind. Calls that are neither fatal nor allowed fail with EPERM.
//! Threads inherit the filters of the thread that starts them, so a kind that starts threads must be allowed the calls
//! of those threads.

use std::collections::BTreeMap;
use std::io;
use std::sync::OnceLock;

use libc::c_long;
use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule,
};

/// Kinds of threads of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// The first thread: sessions, control queues, and requests of the supervisor.
    Control,
    /// Runs the RNIC, copies, sends and receives packets.
    Poller,
    /// Checks the other threads, replaces pollers, and reports.
    Watcher,
    /// Moves Ethernet frames, and serves the tunnel.
    Switch,
    /// Delivers captured packets.
    Capture,
    /// Closes tenants' descriptors.
    Closer,
    /// Maps tenants' memory for commands.
    Background,
}

impl Kind {
    /// All kinds.
    pub const ALL: [Kind; 7] =
        [Kind::Control, Kind::Poller, Kind::Watcher, Kind::Switch, Kind::Capture, Kind::Closer, Kind::Background];

    fn tables(self) -> &'static [&'static [Call]] {
        match self {
            Kind::Control => &[EVERY, MEMORY, WAITS, NETWORK, SIGNALS, TIMERS, SESSIONS, STARTS, BACKGROUND],
            Kind::Poller => &[EVERY, MEMORY, WAITS, NETWORK, SIGNALS, TIMERS],
            Kind::Watcher => &[EVERY, MEMORY, WAITS, NETWORK, SIGNALS, STARTS],
            Kind::Switch => &[EVERY, WAITS, NETWORK, SIGNALS, TIMERS],
            Kind::Capture => &[EVERY, NETWORK, BACKGROUND],
            Kind::Closer => &[EVERY],
            Kind::Background => &[EVERY, MAPS],
        }
    }
}

/// A call. If there are tests, one of them must hold.
struct Call {
    number: c_long,
    tests: &'static [Test],
    /// The first argument must be this process.
    own: bool,
    /// The second argument must be SOL_SOCKET.
    of_sockets: bool,
}

/// A test of an argument's lower 32 bits: the bits of the mask must have the value.
#[derive(Clone, Copy)]
struct Test {
    argument: u8,
    mask: u32,
    value: u32,
}

const fn call(number: c_long) -> Call {
    Call { number, tests: &[], own: false, of_sockets: false }
}

const fn when(number: c_long, tests: &'static [Test]) -> Call {
    Call { number, tests, own: false, of_sockets: false }
}

const fn own(number: c_long, tests: &'static [Test]) -> Call {
    Call { number, tests, own: true, of_sockets: false }
}

const fn of_sockets(number: c_long, tests: &'static [Test]) -> Call {
    Call { number, tests, own: false, of_sockets: true }
}

const fn is(argument: u8, value: i32) -> Test {
    Test { argument, mask: u32::MAX, value: value as u32 }
}

const fn has(argument: u8, bits: i32) -> Test {
    Test { argument, mask: bits as u32, value: bits as u32 }
}

const fn lacks(argument: u8, bits: i32) -> Test {
    Test { argument, mask: bits as u32, value: 0 }
}

/// The clone flags of a thread with the memory and descriptors of its process, in no new namespace.
const IS_THREAD: Test = Test {
    argument: 0,
    mask: (libc::CLONE_THREAD | libc::CLONE_VM | libc::CLONE_FILES | NAMESPACES) as u32,
    value: (libc::CLONE_THREAD | libc::CLONE_VM | libc::CLONE_FILES) as u32,
};
const NAMESPACES: i32 = libc::CLONE_NEWNS
    | libc::CLONE_NEWCGROUP
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUSER
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET;

/// Calls that every thread needs: memory, locks, time, logging, exit. `abort` raises SIGABRT; the handlers of SIGBUS
/// (ours) and SIGSEGV (the standard library's) restore the default action. A thread that touches a hole of a sparse
/// file allocates a page there. The thread that unmaps memory punches out pages that have replaced vanished memory.
const EVERY: &[Call] = &[
    call(libc::SYS_read),
    call(libc::SYS_write),
    call(libc::SYS_writev),
    call(libc::SYS_close),
    call(libc::SYS_futex),
    call(libc::SYS_sched_getaffinity),
    call(libc::SYS_getcpu),
    call(libc::SYS_clock_gettime),
    call(libc::SYS_clock_nanosleep),
    call(libc::SYS_nanosleep),
    call(libc::SYS_gettimeofday),
    call(libc::SYS_getrandom),
    call(libc::SYS_getpid),
    call(libc::SYS_gettid),
    when(libc::SYS_mmap, &[lacks(2, libc::PROT_EXEC)]),
    when(libc::SYS_mprotect, &[lacks(2, libc::PROT_EXEC)]),
    call(libc::SYS_mremap),
    call(libc::SYS_munmap),
    call(libc::SYS_madvise),
    call(libc::SYS_brk),
    when(libc::SYS_fallocate, &[is(1, libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE)]),
    when(libc::SYS_ioctl, &[is(1, unirdma_mem::holes::FILL_REQUEST.cast_signed())]),
    call(libc::SYS_rt_sigreturn),
    call(libc::SYS_rt_sigprocmask),
    when(libc::SYS_rt_sigaction, &[is(0, libc::SIGABRT), is(0, libc::SIGBUS), is(0, libc::SIGSEGV)]),
    call(libc::SYS_sigaltstack),
    own(libc::SYS_tgkill, &[is(2, libc::SIGABRT)]),
    call(libc::SYS_restart_syscall),
    call(libc::SYS_rseq),
    call(libc::SYS_set_robust_list),
    when(libc::SYS_prctl, &[is(0, libc::PR_SET_NAME)]),
    call(libc::SYS_exit),
    call(libc::SYS_exit_group),
];

/// Access to private memory of tenants by descriptors.
const MEMORY: &[Call] = &[call(libc::SYS_pread64), call(libc::SYS_pwrite64)];

/// Waiting for descriptors.
const WAITS: &[Call] = &[
    call(libc::SYS_epoll_pwait),
    call(SYS_EPOLL_PWAIT2),
    call(libc::SYS_epoll_ctl),
    call(libc::SYS_ppoll),
    #[cfg(target_arch = "x86_64")]
    call(libc::SYS_epoll_wait),
    #[cfg(target_arch = "x86_64")]
    call(libc::SYS_poll),
];

/// Missing in the libc crate for some architectures. The number is the same on all.
const SYS_EPOLL_PWAIT2: c_long = 441;

/// Sending and receiving by existing sockets.
const NETWORK: &[Call] = &[
    call(libc::SYS_sendto),
    call(libc::SYS_recvfrom),
    call(libc::SYS_sendmsg),
    call(libc::SYS_recvmsg),
    call(libc::SYS_sendmmsg),
    call(libc::SYS_recvmmsg),
    // Reads how much of a socket's buffer is used.
    when(libc::SYS_getsockopt, &[is(1, libc::SOL_SOCKET)]),
];

/// Signals to eventfds of tenants by asynchronous reads of an empty memory file; if there is no asynchronous I/O, by
/// non-blocking writes.
const SIGNALS: &[Call] = &[
    call(libc::SYS_memfd_create),
    call(libc::SYS_io_setup),
    call(libc::SYS_io_submit),
    call(libc::SYS_io_getevents),
    when(libc::SYS_fcntl, &[is(1, libc::F_GETFL), is(1, libc::F_SETFL)]),
];

/// Setting existing timers.
const TIMERS: &[Call] = &[call(libc::SYS_timerfd_settime)];

/// Sessions: they arrive by sockets and bring descriptors, whose kind is checked; they are given event channels.
const SESSIONS: &[Call] = &[
    call(libc::SYS_accept4),
    when(libc::SYS_socketpair, &[is(0, libc::AF_UNIX)]),
    when(libc::SYS_getsockopt, &[is(1, libc::SOL_SOCKET)]),
    call(libc::SYS_getsockname),
    of_sockets(libc::SYS_setsockopt, &[is(2, libc::SO_OOBINLINE)]),
    // Not SHUT_WR: the holder of a duplicate could end the socket for others.
    when(libc::SYS_shutdown, &[is(1, libc::SHUT_RD)]),
    call(libc::SYS_pidfd_open),
    call(libc::SYS_fstat),
    call(libc::SYS_fstatfs),
    // For a descriptor, or /proc/self/fd/NUMBER.
    call(libc::SYS_statx),
    call(libc::SYS_newfstatat),
    call(libc::SYS_readlinkat),
    #[cfg(target_arch = "x86_64")]
    call(libc::SYS_readlink),
    call(libc::SYS_lseek),
    when(
        libc::SYS_fcntl,
        &[
            is(1, libc::F_GETFD),
            is(1, libc::F_SETFD),
            is(1, libc::F_DUPFD_CLOEXEC),
            is(1, libc::F_GET_SEALS),
            is(1, libc::F_ADD_SEALS),
        ],
    ),
    when(libc::SYS_ioctl, &[is(1, libc::FIONBIO as i32), is(1, unirdma_mem::holes::WATCH_REQUEST.cast_signed())]),
    call(libc::SYS_ftruncate),
    call(libc::SYS_eventfd2),
    call(libc::SYS_epoll_create1),
];

/// Mapping memory files: checking their kind, and registering for page faults in their holes.
const MAPS: &[Call] = &[
    call(libc::SYS_fstat),
    call(libc::SYS_fstatfs),
    call(libc::SYS_statx),
    call(libc::SYS_newfstatat),
    when(libc::SYS_fcntl, &[is(1, libc::F_GET_SEALS)]),
    when(libc::SYS_ioctl, &[is(1, unirdma_mem::holes::WATCH_REQUEST.cast_signed())]),
];

/// Starting threads, and giving them a core and a filter, which can only be narrower.
const STARTS: &[Call] = &[
    when(libc::SYS_clone, &[IS_THREAD]),
    call(libc::SYS_clone3),
    call(libc::SYS_sched_setaffinity),
    when(libc::SYS_seccomp, &[is(0, libc::SECCOMP_SET_MODE_FILTER as i32)]),
];

/// Lowering the thread's own priority.
const BACKGROUND: &[Call] = &[call(libc::SYS_setpriority)];

/// Calls of a worker's start, before its first thread gets the filter of its kind: it reads its own limits, and starts
/// threads that run only while their core would be idle.
const BEGINS: &[Call] = &[
    call(libc::SYS_timerfd_create),
    when(libc::SYS_prlimit64, &[is(0, 0)]),
    when(libc::SYS_sched_getattr, &[is(0, 0)]),
    when(libc::SYS_sched_setattr, &[is(0, 0)]),
];

/// Calls that kill the process.
const FATAL: &[Call] = &[
    call(libc::SYS_execve),
    call(libc::SYS_execveat),
    when(libc::SYS_clone, &[lacks(0, libc::CLONE_THREAD)]),
    #[cfg(target_arch = "x86_64")]
    call(libc::SYS_fork),
    #[cfg(target_arch = "x86_64")]
    call(libc::SYS_vfork),
    when(libc::SYS_mmap, &[has(2, libc::PROT_EXEC)]),
    when(libc::SYS_mprotect, &[has(2, libc::PROT_EXEC)]),
    when(libc::SYS_pkey_mprotect, &[has(2, libc::PROT_EXEC)]),
    call(libc::SYS_ptrace),
    call(libc::SYS_process_vm_readv),
    call(libc::SYS_process_vm_writev),
    call(libc::SYS_process_madvise),
    call(libc::SYS_kcmp),
    call(libc::SYS_pidfd_getfd),
    call(libc::SYS_socket),
    call(libc::SYS_connect),
    call(libc::SYS_bind),
    call(libc::SYS_listen),
    call(libc::SYS_open_by_handle_at),
    call(libc::SYS_name_to_handle_at),
    call(libc::SYS_mount),
    call(libc::SYS_umount2),
    call(libc::SYS_pivot_root),
    call(libc::SYS_chroot),
    call(libc::SYS_open_tree),
    call(libc::SYS_move_mount),
    call(libc::SYS_fsopen),
    call(libc::SYS_fsconfig),
    call(libc::SYS_fsmount),
    call(libc::SYS_fspick),
    call(libc::SYS_mount_setattr),
    call(libc::SYS_unshare),
    call(libc::SYS_setns),
    call(libc::SYS_setuid),
    call(libc::SYS_setgid),
    call(libc::SYS_setreuid),
    call(libc::SYS_setregid),
    call(libc::SYS_setresuid),
    call(libc::SYS_setresgid),
    call(libc::SYS_setfsuid),
    call(libc::SYS_setfsgid),
    call(libc::SYS_setgroups),
    call(libc::SYS_capset),
    call(libc::SYS_personality),
    call(libc::SYS_bpf),
    call(libc::SYS_perf_event_open),
    call(libc::SYS_userfaultfd),
    call(libc::SYS_io_uring_setup),
    call(libc::SYS_io_uring_enter),
    call(libc::SYS_io_uring_register),
    call(libc::SYS_add_key),
    call(libc::SYS_request_key),
    call(libc::SYS_keyctl),
    call(libc::SYS_init_module),
    call(libc::SYS_finit_module),
    call(libc::SYS_delete_module),
    call(libc::SYS_kexec_load),
    call(libc::SYS_reboot),
    call(libc::SYS_swapon),
    call(libc::SYS_swapoff),
    #[cfg(target_arch = "x86_64")]
    call(libc::SYS_ioperm),
    #[cfg(target_arch = "x86_64")]
    call(libc::SYS_iopl),
    #[cfg(target_arch = "x86_64")]
    call(libc::SYS_modify_ldt),
];

/// The C library first tries to start threads by this call, whose arguments a filter cannot see. If it does not exist,
/// `clone` is used.
const UNKNOWN: &[Call] = &[call(libc::SYS_clone3)];

/// The filters of the whole process and of each kind of thread. They are compiled in advance, since a thread may start
/// when compiling could fail.
struct Filters {
    process: [BpfProgram; 3],
    kinds: [BpfProgram; Kind::ALL.len()],
}

/// Set when the process is confined.
static FILTERS: OnceLock<Filters> = OnceLock::new();

impl Filters {
    fn compile() -> Result<Self, BackendError> {
        let refuse = |e: i32| SeccompAction::Errno(e as u32);
        let every = Kind::ALL.iter().flat_map(|k| k.tables()).chain([&BEGINS]);
        let mut kinds = [const { Vec::new() }; Kind::ALL.len()];
        for kind in Kind::ALL {
            kinds[kind as usize] = program(kind.tables().iter().copied(), SeccompAction::Allow, refuse(libc::EPERM))?;
        }
        // If several filters refuse a call, the error of the one installed last is returned.
        let process = [
            program([FATAL], SeccompAction::KillProcess, SeccompAction::Allow)?,
            program(every.copied(), SeccompAction::Allow, refuse(libc::EPERM))?,
            program([UNKNOWN], refuse(libc::ENOSYS), SeccompAction::Allow)?,
        ];
        Ok(Filters { process, kinds })
    }
}

/// Compiles a filter that takes action `found` at the calls in the tables, and `otherwise` at all others.
fn program<'a>(
    tables: impl IntoIterator<Item = &'a [Call]>,
    found: SeccompAction,
    otherwise: SeccompAction,
) -> Result<BpfProgram, BackendError> {
    // A call that is in several tables, in one of them without tests, always matches. An empty list of rules means
    // that.
    let condition = |t: Test| {
        let masked = SeccompCmpOp::MaskedEq(t.mask.into());
        SeccompCondition::new(t.argument, SeccompCmpArgLen::Dword, masked, t.value.into())
    };
    let myself = is(0, rustix::process::getpid().as_raw_pid());
    let mut calls = BTreeMap::<i64, Vec<SeccompRule>>::new();
    for call in tables.into_iter().flatten() {
        let mut rules = Vec::new();
        for &test in call.tests {
            let also = [(call.own, myself), (call.of_sockets, is(1, libc::SOL_SOCKET))];
            let all = [(true, test)].into_iter().chain(also).filter(|a| a.0).map(|a| condition(a.1));
            rules.push(SeccompRule::new(all.collect::<Result<_, _>>()?)?);
        }
        match calls.entry(call.number) {
            std::collections::btree_map::Entry::Vacant(v) => _ = v.insert(rules),
            std::collections::btree_map::Entry::Occupied(mut o) if rules.is_empty() || o.get().is_empty() => {
                o.get_mut().clear();
            }
            std::collections::btree_map::Entry::Occupied(mut o) => o.get_mut().append(&mut rules),
        }
    }
    SeccompFilter::new(calls, otherwise, found, std::env::consts::ARCH.try_into()?)?.try_into()
}

/// Installs a filter for this thread and for threads that it starts later. Needs `no_new_privs`.
fn install(program: &BpfProgram) -> io::Result<()> {
    let filter =
        libc::sock_fprog { len: program.len() as u16, filter: program.as_ptr().cast::<libc::sock_filter>().cast_mut() };
    // Without this flag, some kernels make every load wait for the stores before it. A worker runs no code of tenants.
    let flags = libc::SECCOMP_FILTER_FLAG_SPEC_ALLOW;
    // SAFETY: the program has the kernel's layout and lives until the call returns; the kernel copies it.
    let r =
        unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, flags, std::ptr::from_ref(&filter)) };
    if r == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Installs the filters of the process.
///
/// # Errors
/// Errors of `seccomp(2)`, or of the compiler of filters.
pub(super) fn enter() -> io::Result<String> {
    let filters = Filters::compile().map_err(io::Error::other)?;
    for program in &filters.process {
        install(program)?;
    }
    let _ = FILTERS.set(filters);
    Ok("a filter of system calls for each kind of thread".into())
}

/// Adds the filter of a kind to this thread, if the process has filters.
///
/// # Errors
/// Errors of `seccomp(2)`.
pub(super) fn narrow(kind: Kind) -> io::Result<()> {
    FILTERS.get().map_or(Ok(()), |f| install(&f.kinds[kind as usize]))
}
