//! `librdmacm`: connections by IP address and port (`rdma_cm(7)`). The virtual layer has the identifiers, talks to the
//! peers and keeps the timers. This module makes the C objects and changes the states of their QPs.

pub(crate) mod address;
mod addrinfo;
mod connect;
mod event;
mod id;
mod place;
mod qp;

use std::collections::HashMap;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Mutex};

use unirdma_abi as abi;
use unirdma_abi::{CmOp, Command};
use unirdma_driver as driver;
use unirdma_driver::fds::Known;
use unirdma_verbs_abi::*;

use crate::device::{session, x_ibv_close_device, x_ibv_free_device_list, x_ibv_get_device_list, x_ibv_open_device};
use crate::event::Outstanding;
use crate::lock;

pub use addrinfo::*;
pub use connect::*;
pub use event::*;
pub use id::*;
pub use qp::*;

/// A device as this process's identifiers use it.
struct Device {
    verbs: *mut ibv_context,
    session: Arc<driver::Context>,
    /// The PD of QPs that are created without one.
    pd: *mut ibv_pd,
    /// The XRC domain of QPs and SRQs that are created without one.
    xrcd: *mut ibv_xrcd,
    /// The identifiers that have a place on it.
    ids: HashMap<u32, *mut IdObj>,
}

// SAFETY: the pointers are to objects that any thread may use.
unsafe impl Send for Device {}

/// The devices of a process: one for each vRNIC of its container, all of which are in one group.
struct Devices {
    pid: u32,
    all: Vec<Device>,
}

static DEVICES: Mutex<Devices> = Mutex::new(Devices { pid: 0, all: Vec::new() });

/// Calls `f` with the devices, of which there is at least one. They are opened on first use, and again in a forked
/// child.
fn with_devices<R>(f: impl FnOnce(&mut [Device]) -> R) -> Result<R, i32> {
    let pid = std::process::id();
    let were_open = lock(&DEVICES).pid == pid;
    // Opening may wait for a VF, so no lock is held.
    let new = if were_open { Vec::new() } else { open()? };
    let mut devices = lock(&DEVICES);
    if devices.pid == pid {
        for surplus in new {
            // SAFETY: opened above, and nobody has seen it.
            unsafe { x_ibv_close_device(surplus.verbs) };
        }
    } else {
        *devices = Devices { pid, all: new };
    }
    Ok(f(&mut devices.all))
}

/// Calls `f` with one of the devices.
fn with_device<R>(number: usize, f: impl FnOnce(&mut Device) -> R) -> Result<R, i32> {
    with_devices(|all| all.get_mut(number).map(f))?.ok_or(libc::ENODEV)
}

/// Opens all devices that can be opened.
///
/// # Errors
/// `ENODEV` if there is none.
fn open() -> Result<Vec<Device>, i32> {
    let mut n = 0;
    // SAFETY: the list is given back before this function returns; it has `n` devices.
    let opened: Vec<_> = unsafe {
        let list = x_ibv_get_device_list(&mut n);
        if list.is_null() {
            return Err(libc::ENODEV);
        }
        let opened = (0..n as usize).map(|i| x_ibv_open_device(*list.add(i))).filter(|v| !v.is_null()).collect();
        x_ibv_free_device_list(list);
        opened
    };
    if opened.is_empty() {
        return Err(libc::ENODEV);
    }
    let device = |verbs| {
        // SAFETY: just opened.
        let session = unsafe { session(verbs) }?;
        Ok(Device { verbs, session, pd: std::ptr::null_mut(), xrcd: std::ptr::null_mut(), ids: HashMap::new() })
    };
    opened.into_iter().map(device).collect()
}

/// An event channel. Programs know only the C structure.
#[repr(C)]
pub(crate) struct EventChannelObj {
    c: rdma_event_channel,
    /// One for each device that was not lost when the channel was made; at least one.
    parts: Vec<ChannelPart>,
    /// Readable if one of several parts is. Then it is the channel's descriptor.
    all: Option<Known>,
}

/// The events of one device on a channel.
struct ChannelPart {
    device: usize,
    session: Arc<driver::Context>,
    events: driver::EventSource,
    /// Messages on `events` whose event has gone with its identifier, or to another channel.
    stale: AtomicI32,
}

impl ChannelPart {
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

impl EventChannelObj {
    /// The object that contains a channel.
    ///
    /// # Safety
    /// `channel` is a channel of this library.
    unsafe fn of<'a>(channel: *mut rdma_event_channel) -> &'a EventChannelObj {
        // SAFETY: by the contract.
        unsafe { &*channel.cast::<EventChannelObj>() }
    }

    /// The part of a device.
    fn part(&self, device: usize) -> Result<&ChannelPart, i32> {
        self.parts.iter().find(|p| p.device == device).ok_or(libc::EIO)
    }
}

/// Where an identifier is.
#[derive(Clone, Copy)]
struct Place {
    device: usize,
    /// Its number there; 0 if it is to be made.
    handle: u32,
}

/// An identifier.
#[repr(C)]
pub(crate) struct IdObj {
    c: rdma_cm_id,
    at: Place,
    /// Its places on the other devices, if it is bound to an address that names no device.
    others: Vec<Place>,
    /// The options that its program has set, for a place on another device.
    options: Vec<(u8, u32)>,
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
fn request(op: CmOp, at: Place, change: impl FnOnce(&mut abi::CmReq)) -> Result<abi::CmResp, i32> {
    let session = with_device(at.device, |d| d.session.clone())?;
    let mut r = abi::CmReq { op: op as u8, id: at.handle, ..Default::default() };
    change(&mut r);
    let result = session.command(Command::Cm, &r);
    crate::trace::trace!(
        "rdma_cm {op:?}({}:{:#x}) = {:?}",
        at.device,
        at.handle,
        result.as_ref().map(|r: &abi::CmResp| r.id)
    );
    result
}
