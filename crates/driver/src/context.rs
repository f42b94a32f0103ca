//! An open device: its link, its control queue and its doorbell.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use rustix::event::{PollFd, PollFlags};
use rustix::net::{RecvFlags, SendFlags};
use rustix::process::{Pid, getpid};
use rustix::time::Timespec;
use unirdma_abi as abi;
use unirdma_abi::Command;
use unirdma_link::{DriverQueue, Frontend, Segment};
use unirdma_mem::Bell;
use unirdma_mem::fds::Known;
use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::arena::{Arena, Block};
use crate::bounce::Bounce;
use crate::clock::clock_ns;
use crate::events::EventSource;
use crate::memory::{Regions, forks};
use crate::{Errno, HEAP, Result, errno, lock};

/// Descriptors of the control queue: one request, one response.
const CONTROL_SLOTS: u16 = 2;

struct Control {
    queue: DriverQueue,
    request: Block,
    response: Block,
    /// Notifies the device, and receives a message for each command that the device has done.
    channel: Known,
}

/// Allocates the numbers of event channels.
#[derive(Default)]
struct Numbers {
    next: u32,
    free: Vec<u32>,
}

impl Numbers {
    fn take(&mut self) -> Option<u32> {
        self.free.pop().or_else(|| {
            let new = self.next;
            (new < abi::MAX_CHANNELS).then(|| {
                self.next += 1;
                new
            })
        })
    }
}

/// An open vRNIC.
pub struct Context {
    pub(crate) frontend: Mutex<Frontend>,
    pub(crate) arena: Mutex<Arena>,
    /// True once the process's own memory was offered to the device for copying.
    pub(crate) process_offered: Mutex<bool>,
    /// Memory files of MRs.
    pub(crate) regions: Mutex<Regions>,
    /// Number of its door, by which the device learns of moved memory.
    pub(crate) id: u64,
    pub(crate) bounce: Bounce,
    /// The frontend's socket, to check whether the virtual layer is still there.
    socket: Arc<Known>,
    /// Value of [`forks`] when the context was opened.
    forks: u32,
    pid: Pid,
    control: Mutex<Control>,
    bell: Bell,
    /// Each wakes the device on a core of its own ([`abi::CHANNEL_WAKE`]).
    wakes: Vec<Arc<Known>>,
    kick: DeferredKick,
    dead: AtomicBool,
    fatal_told: AtomicBool,
    asyncs: EventSource,
    numbers: Mutex<Numbers>,
    empty_polls: AtomicU32,
    /// The device's answer to QUERY_DEVICE.
    pub device: abi::QueryDeviceResp,
}

/// Time for which a command's answer is polled before its caller sleeps, ns. Most answers come sooner than a sleeping
/// thread would be woken.
const CONTROL_SPIN_NS: u64 = 20_000;

/// Notifies the device of a command, by a channel.
///
/// # Errors
/// The program has closed the channel.
fn notify(channel: &Known) -> std::io::Result<()> {
    // A channel that is full has notified the device already.
    let _ = rustix::net::send(channel.get()?, &[1], SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
    Ok(())
}

/// Wakes the device by a wake channel.
///
/// # Errors
/// The program has closed the channel.
pub(crate) fn wake(channel: &Known) -> std::io::Result<()> {
    // A channel that is full has woken the device already.
    let _ = rustix::io::write(channel.get()?, &1u64.to_ne_bytes());
    Ok(())
}

/// A deferred kick. The device said at the last ring that it polls by itself, but it may be long until it has a core.
/// Several threads may use this at a time; a race can make a kick late, but does not lose it.
#[derive(Default)]
struct DeferredKick {
    /// True until the device is found to have taken the last ring.
    waits: AtomicBool,
    /// Empty polls left until the device is kicked.
    polls: AtomicU32,
    /// Rings since the last empty poll.
    rings: AtomicU32,
    /// The value last passed to [`Bell::set_bursts`]: whether this program rings often between two empty polls.
    bursts: AtomicBool,
}

/// Empty polls after a ring until the driver kicks a device that said that it polls by itself. They take as long as a
/// few requests.
const PATIENCE: u32 = 400;
/// Least number of rings between two empty polls that makes a burst. In a burst each kick would interrupt the next
/// request.
const BURST: u32 = 8;

/// Empty polls between two checks whether the virtual layer is still there.
const LIVENESS_POLLS: u32 = 4096;

/// Reads the configuration space of the vRNIC at `path` and closes the connection.
///
/// # Errors
/// The errno of the connection; `EPROTO` if the peer is something else.
pub fn device_config(path: &Path) -> Result<abi::Config> {
    let mut f = Frontend::connect(path).map_err(|e| errno(&e))?;
    let bytes = f.config(size_of::<abi::Config>()).map_err(|e| errno(&e))?;
    let config = abi::Config::read_from_bytes(&bytes).map_err(|_| libc::EPROTO)?;
    if config.magic != abi::CONFIG_MAGIC || config.version != abi::CONFIG_VERSION {
        return Err(libc::EPROTO);
    }
    Ok(config)
}

/// True for commands that create an object, for which the library then needs memory.
fn makes_something(c: Command) -> bool {
    use Command as C;
    matches!(
        c,
        C::CreatePd
            | C::CreateCq
            | C::CreateQp
            | C::OpenQp
            | C::CreateSrq
            | C::CreateAh
            | C::CreateXrcd
            | C::RegUserMr
            | C::GetDmaMr
            | C::AllocNullMr
            | C::AllocMw
    )
}

impl Context {
    /// Opens the vRNIC whose socket is `path`.
    ///
    /// # Errors
    /// The errno of the connection; `EPROTO` if the peer is something else.
    pub fn open(path: &Path) -> Result<Arc<Self>> {
        let io = |e: std::io::Error| errno(&e);
        HEAP.reserve()?;
        crate::memory::prepare();
        let mut f = Frontend::connect(path).map_err(io)?;
        let mut arena = Arena::new();
        let wake = |f: &mut Frontend, i| f.open_channel(abi::CHANNEL_WAKE + i).and_then(Known::marked).map_err(io);
        let ring = arena.alloc(&mut f, DriverQueue::bytes(CONTROL_SLOTS), 64)?;
        let control = Control {
            queue: DriverQueue::new(ring.span.clone(), CONTROL_SLOTS),
            request: arena.alloc(&mut f, abi::MAX_COMMAND_BYTES, 64)?,
            response: arena.alloc(&mut f, abi::MAX_COMMAND_BYTES, 64)?,
            channel: f.open_channel(abi::CHANNEL_CONTROL).and_then(Known::new).map_err(io)?,
        };
        control.queue.be_quiet();
        let (d, a, u) = control.queue.addresses();
        f.set_vring(abi::VQ_CONTROL, CONTROL_SLOTS, d, a, u).map_err(io)?;
        let asyncs = EventSource::new(abi::CHANNEL_ASYNC, f.open_channel(abi::CHANNEL_ASYNC).map_err(io)?)?;
        let first = Arc::new(wake(&mut f, 0)?);
        let page = arena.alloc(&mut f, size_of::<abi::DoorbellPage>(), 4096)?;
        let socket = f.socket().clone();
        let bell = Bell::new(page.span.clone()).ok_or(libc::EPROTO)?;
        let mut ctx = Context {
            id: crate::memory::share_manager().add_door(bell.clone(), first.clone(), socket.clone()),
            bell,
            frontend: Mutex::new(f),
            arena: Mutex::new(arena),
            process_offered: Mutex::new(false),
            regions: Mutex::default(),
            bounce: Bounce::default(),
            socket,
            forks: forks(),
            pid: getpid(),
            control: Mutex::new(control),
            wakes: vec![first],
            kick: DeferredKick::default(),
            dead: AtomicBool::new(false),
            fatal_told: AtomicBool::new(false),
            asyncs,
            numbers: Mutex::default(),
            empty_polls: AtomicU32::new(0),
            device: abi::QueryDeviceResp::default(),
        };
        ctx.device = ctx.command(Command::QueryDevice, &[0u8; 0])?;
        if ctx.device.config.magic != abi::CONFIG_MAGIC {
            return Err(libc::EPROTO);
        }
        let () = ctx.command_void(Command::SetDoorbell, &abi::SetDoorbellReq { addr: page.bus })?;
        for i in 1..ctx.bell.wakes().min(abi::MAX_WAKES) {
            let another = wake(&mut lock(&ctx.frontend), i)?;
            ctx.wakes.push(Arc::new(another));
        }
        Ok(Arc::new(ctx))
    }

    /// Executes a control command that has a response.
    ///
    /// # Errors
    /// The errno of the device's response code, `EIO` if the virtual layer is gone.
    pub fn command<Q: IntoBytes + Immutable + ?Sized, R: FromBytes + IntoBytes>(
        &self,
        c: Command,
        req: &Q,
    ) -> Result<R> {
        let mut resp = R::new_zeroed();
        self.run(c, req.as_bytes(), resp.as_mut_bytes())?;
        Ok(resp)
    }

    /// Executes a control command that has no response.
    ///
    /// # Errors
    /// As [`Context::command`].
    pub fn command_void<Q: IntoBytes + Immutable + ?Sized>(&self, c: Command, req: &Q) -> Result<()> {
        self.run(c, req.as_bytes(), &mut [])
    }

    fn run(&self, c: Command, req: &[u8], resp: &mut [u8]) -> Result<()> {
        // The queue is the parent's, even in a child in which no fork handler has run.
        if self.is_dead() || getpid() != self.pid {
            return Err(libc::EIO);
        }
        if makes_something(c) && HEAP.is_low() {
            return Err(libc::ENOMEM);
        }
        let control = &mut *lock(&self.control);
        let head = abi::ReqHeader { command: c as u8, ..Default::default() };
        control.request.span.write(0, head.as_bytes());
        control.request.span.write(size_of::<abi::ReqHeader>(), req);
        let out = (size_of::<abi::ReqHeader>() + req.len()) as u32;
        let back = (size_of::<abi::RespHeader>() + resp.len()) as u32;
        let kick = control.queue.publish(
            0,
            &[
                Segment { addr: control.request.bus, len: out, write: false },
                Segment { addr: control.response.bus, len: back, write: true },
            ],
        );
        if kick && notify(&control.channel).is_err() {
            return Err(self.lose());
        }
        let began = clock_ns();
        let written = loop {
            if let Some((_, len)) = control.queue.pop_used() {
                break len;
            }
            if clock_ns() - began < CONTROL_SPIN_NS {
                std::hint::spin_loop();
                continue;
            }
            if !control.queue.listen() {
                continue;
            }
            let channel = control.channel.get().map_err(|_| self.lose())?;
            match rustix::net::recv(channel, &mut [0u8; 64][..], RecvFlags::empty()) {
                Ok((1.., _)) | Err(rustix::io::Errno::INTR) => {}
                Ok((0, _)) | Err(_) => return Err(self.lose()),
            }
            control.queue.be_quiet();
        };
        let head: abi::RespHeader = control.response.span.read_obj(0);
        if head.status != 0 {
            return Err(abi::Status::errno(head.status));
        }
        if written < back {
            return Err(libc::EPROTO);
        }
        control.response.span.read(size_of::<abi::RespHeader>(), resp);
        Ok(())
    }

    /// Notes that the virtual layer is gone, or that the program has closed a descriptor that leads to it.
    #[cold]
    fn lose(&self) -> Errno {
        self.dead.store(true, Ordering::Relaxed);
        libc::EIO
    }

    /// True once the virtual layer is known to be gone, or in a forked child.
    #[inline]
    pub fn is_dead(&self) -> bool {
        self.dead.load(Ordering::Relaxed) || self.is_inherited()
    }

    /// True in a forked child, which shares the rings with its parent and must leave them alone.
    #[inline]
    pub(crate) fn is_inherited(&self) -> bool {
        self.forks != forks()
    }

    /// See [`Bell::expect_ring`].
    #[inline]
    pub(crate) fn expect_ring(&self, slot: u32) {
        self.bell.expect_ring(slot);
    }

    /// Rings for a QP; kicks the device if it sleeps.
    #[inline]
    pub(crate) fn ring(&self, slot: u32) {
        let device = self.bell.ring(slot);
        let kick = &self.kick;
        kick.rings.store(kick.rings.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
        if device == abi::ASLEEP {
            return self.wake_device();
        }
        kick.polls.store(if device == abi::AWAKE { PATIENCE } else { 0 }, Ordering::Relaxed);
        kick.waits.store(true, Ordering::Relaxed);
    }

    /// Wakes the device on the core where this thread runs, so that the device gets that core.
    #[cold]
    fn wake_device(&self) {
        self.kick.waits.store(false, Ordering::Relaxed);
        let core = rustix::thread::sched_getcpu();
        if wake(&self.wakes[core % self.wakes.len()]).is_err() {
            self.lose();
        }
    }

    /// Called after an empty poll. Performs the deferred kick, if it is due and the device still has not taken the last
    /// ring.
    #[inline]
    fn kick_late(&self) {
        let kick = &self.kick;
        if kick.waits.load(Ordering::Relaxed) {
            let polls = kick.polls.load(Ordering::Relaxed);
            if polls > 0 {
                // Reading the doorbell page would take its cache line from the device.
                kick.polls.store(polls - 1, Ordering::Relaxed);
            } else if self.bell.has_rung() {
                self.wake_device();
            } else {
                kick.waits.store(false, Ordering::Relaxed);
            }
        }
        let rings = kick.rings.load(Ordering::Relaxed);
        if rings > 0 {
            kick.rings.store(0, Ordering::Relaxed);
            let bursts = rings >= BURST;
            if bursts != kick.bursts.load(Ordering::Relaxed) {
                kick.bursts.store(bursts, Ordering::Relaxed);
                self.bell.set_bursts(bursts);
            }
        }
    }

    /// Called before the program waits without polling. Performs the deferred kick, if the device still has not taken
    /// the last ring.
    #[inline]
    pub(crate) fn kick_now(&self) {
        if self.kick.waits.load(Ordering::Relaxed) && self.bell.has_rung() {
            self.wake_device();
        }
    }

    /// Called after an empty poll. Makes sure that the device runs and, in every `LIVENESS_POLLS`th call, checks
    /// whether the device is still there. Returns true in such a call, so that the caller can do other rare work then.
    #[inline]
    pub fn relax(&self) -> bool {
        self.kick_late();
        std::hint::spin_loop();
        // A lost count does no harm: it only delays the check.
        let n = self.empty_polls.load(Ordering::Relaxed).wrapping_add(1);
        self.empty_polls.store(n, Ordering::Relaxed);
        let now_and_then = n % LIVENESS_POLLS == 0;
        if now_and_then {
            self.check_alive();
        }
        now_and_then
    }

    fn check_alive(&self) {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let hung_up = self.socket.get().map(|socket| {
            let mut fds = [PollFd::from_borrowed_fd(socket, PollFlags::RDHUP)];
            rustix::event::poll(&mut fds, Some(&now)).is_ok_and(|n| n > 0)
        });
        if hung_up.unwrap_or(true) {
            self.lose();
        }
    }

    /// The next asynchronous event; `DEVICE_FATAL` once, when the virtual layer is lost.
    ///
    /// # Errors
    /// `EAGAIN`, `EINTR`, and `EIO` after `DEVICE_FATAL` was returned.
    pub fn next_async(&self) -> Result<abi::Event> {
        match self.asyncs.next() {
            Err(libc::EIO) if !self.fatal_told.swap(true, Ordering::SeqCst) => {
                self.lose();
                self.asyncs.silence();
                Ok(abi::Event { kind: unirdma_formats::AsyncEvent::DeviceFatal as u32, handle: 0, reserved: 0 })
            }
            r => r,
        }
    }

    /// Drops waiting asynchronous events of an object that is gone.
    pub fn forget_async(&self, stale: impl Fn(&abi::Event) -> bool) {
        self.forget(&self.asyncs, stale);
    }

    /// Drops waiting events of a channel, so that its descriptor does not announce them any more.
    pub fn forget(&self, of: &EventSource, stale: impl Fn(&abi::Event) -> bool) {
        // A forked child leaves its parent's events alone.
        if !self.is_dead() {
            of.retain(|e| !stale(e), |kept| _ = lock(&self.frontend).return_events(of.number(), kept));
        }
    }

    /// The descriptor that becomes readable for asynchronous events.
    pub fn async_fd(&self) -> i32 {
        self.asyncs.raw_fd()
    }

    /// Opens an event channel, for completions or for connection management.
    ///
    /// # Errors
    /// `EMFILE` when there are too many channels, or too many descriptors in this process.
    pub fn open_channel(&self) -> Result<EventSource> {
        if self.is_dead() {
            return Err(libc::EIO);
        }
        let number = lock(&self.numbers).take().ok_or(libc::EMFILE)?;
        let opened = lock(&self.frontend).open_channel(number).map_err(|e| errno(&e));
        let made = opened.and_then(|socket| {
            let made = EventSource::new(number, socket);
            if made.is_err() {
                let _ = lock(&self.frontend).close_channel(number);
            }
            made
        });
        if made.is_err() {
            lock(&self.numbers).free.push(number);
        }
        made
    }

    /// Closes an event channel. A thread that waits on it goes on waiting, as with a kernel's descriptor.
    pub fn close_channel(&self, e: EventSource) {
        // A forked child only closes its descriptor.
        let number = e.number();
        drop(e);
        if !self.is_dead() && lock(&self.frontend).close_channel(number).is_ok() {
            lock(&self.numbers).free.push(number);
        }
    }

    pub(crate) fn alloc(&self, len: usize) -> Result<Block> {
        lock(&self.arena).alloc(&mut lock(&self.frontend), len, 64)
    }

    pub(crate) fn free(&self, b: Block) {
        if !self.is_inherited() {
            lock(&self.arena).free(b);
        }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        crate::memory::share_manager().remove_door(self.id);
    }
}
