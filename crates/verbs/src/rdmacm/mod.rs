//! `librdmacm`: connections by IP address and port (`rdma_cm(7)`). The virtual layer has the identifiers, talks to the
//! peers and keeps the timers. This module makes the C objects and changes the states of their QPs.

pub(crate) mod address;
mod addrinfo;
mod connect;
mod event;
mod id;
mod qp;

use std::collections::HashMap;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Mutex};

use unirdma_abi as abi;
use unirdma_abi::{CmOp, Command};
use unirdma_driver as driver;
use unirdma_verbs_abi::*;

use crate::device::{session, x_ibv_close_device, x_ibv_free_device_list, x_ibv_get_device_list, x_ibv_open_device};
use crate::event::Outstanding;
use crate::lock;

pub use addrinfo::*;
pub use connect::*;
pub use event::*;
pub use id::*;
pub use qp::*;

/// The device that all identifiers of this process share.
struct Device {
    verbs: *mut ibv_context,
    session: Arc<driver::Context>,
    /// The PD of QPs that are created without one.
    pd: *mut ibv_pd,
    /// The XRC domain of QPs and SRQs that are created without one.
    xrcd: *mut ibv_xrcd,
    pid: u32,
    ids: HashMap<u32, *mut IdObj>,
}

// SAFETY: the pointers are to objects that any thread may use.
unsafe impl Send for Device {}

static DEVICE: Mutex<Option<Device>> = Mutex::new(None);

/// Calls `f` with the device. The device is opened on first use, and again in a forked child.
fn with_device<R>(f: impl FnOnce(&mut Device) -> R) -> Result<R, i32> {
    let pid = std::process::id();
    let is_open = |slot: &Option<Device>| slot.as_ref().is_some_and(|d| d.pid == pid);
    let was_open = is_open(&lock(&DEVICE));
    // Opening may wait for a VF, so no lock is held.
    let new = if was_open { None } else { Some(open(pid)?) };
    let mut slot = lock(&DEVICE);
    if is_open(&slot) {
        if let Some(surplus) = new {
            // SAFETY: opened above, and nobody has seen it.
            unsafe { x_ibv_close_device(surplus.verbs) };
        }
    } else {
        *slot = new;
    }
    slot.as_mut().map(f).ok_or(libc::ENODEV)
}

fn open(pid: u32) -> Result<Device, i32> {
    let mut n = 0;
    // SAFETY: the list is given back before this function returns; the first device is in it.
    let verbs = unsafe {
        let list = x_ibv_get_device_list(&mut n);
        let verbs = if n > 0 { x_ibv_open_device(*list) } else { std::ptr::null_mut() };
        x_ibv_free_device_list(list);
        verbs
    };
    if verbs.is_null() {
        return Err(libc::ENODEV);
    }
    // SAFETY: just opened.
    let session = unsafe { session(verbs) }?;
    Ok(Device { verbs, session, pd: std::ptr::null_mut(), xrcd: std::ptr::null_mut(), pid, ids: HashMap::new() })
}

/// The context of the shared device.
fn shared_context() -> Result<(*mut ibv_context, Arc<driver::Context>), i32> {
    with_device(|d| (d.verbs, d.session.clone()))
}

/// An event channel. Programs know only the C structure.
#[repr(C)]
pub(crate) struct EventChannelObj {
    c: rdma_event_channel,
    session: Arc<driver::Context>,
    events: driver::EventSource,
    /// Messages on `events` whose event has gone with its identifier, or to another channel.
    stale: AtomicI32,
}

impl EventChannelObj {
    /// Takes the messages of `n` events that have left the queue, so that the descriptor does not announce them. A
    /// reader may be taking one of them at this moment, and one may still be on its way.
    fn discard(&self, n: u32) {
        self.stale.fetch_add(n as i32, Ordering::AcqRel);
        for _ in 0..1000 {
            if self.stale.load(Ordering::Acquire) <= 0 {
                break;
            }
            match self.events.try_next() {
                Some(_) => _ = self.stale.fetch_sub(1, Ordering::AcqRel),
                None => std::thread::sleep(std::time::Duration::from_micros(20)),
            }
        }
    }
}

/// An identifier.
#[repr(C)]
pub(crate) struct IdObj {
    c: rdma_cm_id,
    handle: u32,
    /// True if it has a channel for itself, so that its calls wait until they are done.
    sync: bool,
    /// Events that were handed out and not acknowledged.
    events: Outstanding,
    /// Attributes for QPs of its requests (`rdma_create_ep(3)`).
    template: Option<ibv_qp_init_attr>,
    /// Data to connect with (`rdma_getaddrinfo(3)`).
    connect_data: Vec<u8>,
    /// True if the completion queue was created with its QP.
    own_send_cq: bool,
    own_recv_cq: bool,
    groups: Vec<Group>,
    /// True once its program was told that the device is gone.
    removed: bool,
}

/// A multicast group that an identifier has joined.
struct Group {
    token: u32,
    mgid: ibv_gid,
    context: *mut std::ffi::c_void,
    attached: bool,
}

/// The object that contains an identifier of this library.
///
/// # Safety
/// `id` came from `rdma_create_id` or an event, and was not destroyed.
unsafe fn object<'a>(id: *mut rdma_cm_id) -> &'a mut IdObj {
    // SAFETY: by the contract.
    unsafe { &mut *id.cast::<IdObj>() }
}

/// Sends a request of connection management to the virtual layer.
fn request(op: CmOp, handle: u32, change: impl FnOnce(&mut abi::CmReq)) -> Result<abi::CmResp, i32> {
    let (_, session) = shared_context()?;
    let mut r = abi::CmReq { op: op as u8, id: handle, ..Default::default() };
    change(&mut r);
    let result = session.command(Command::Cm, &r);
    crate::trace::trace!("rdma_cm {op:?}({handle:#x}) = {:?}", result.as_ref().map(|r: &abi::CmResp| r.id));
    result
}
