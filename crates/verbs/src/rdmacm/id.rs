//! Event channels and identifiers: created, bound, resolved, destroyed.

use std::ffi::c_void;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::AtomicI32;

use rustix::event::epoll;
use unirdma_abi as abi;
use unirdma_abi::{CmOp, port_space};
use unirdma_driver::fds::Known;
use unirdma_verbs_abi::*;

use super::place::{self, names_no_device};
use super::qp::default_pd;
use super::{ChannelPart, EventChannelObj, IdObj, Place, address, object, request, with_device, with_devices};
use crate::event::Outstanding;
use crate::trace::trace;
use crate::{done, free_list, new_list, null};

const QPT_RC: u32 = 2;
const QPT_UD: u32 = 4;
const OPTION_LEVEL_ID: i32 = 0;

pub unsafe extern "C" fn x_rdma_create_event_channel() -> *mut rdma_event_channel {
    trace!("rdma_create_event_channel()");
    create_channel().map_or_else(null, |c| c.cast())
}

fn create_channel() -> Result<*mut EventChannelObj, i32> {
    let sessions: Vec<_> = with_devices(|all| all.iter().map(|d| d.session.clone()).collect())?;
    let mut parts = Vec::new();
    let mut lost = libc::ENODEV;
    for (device, session) in sessions.into_iter().enumerate() {
        match session.open_channel() {
            Ok(events) => parts.push(ChannelPart { device, session, events, stale: AtomicI32::new(0) }),
            Err(libc::EIO) => lost = libc::EIO,
            Err(e) => return Err(close_parts(parts, e)),
        }
    }
    let (fd, all) = match &parts[..] {
        [] => return Err(lost),
        [only] => (only.events.raw_fd(), None),
        several => match any_of(several) {
            Ok(all) => (all.as_raw_fd(), Some(all)),
            Err(e) => return Err(close_parts(parts, e.raw_os_error().unwrap_or(libc::EMFILE))),
        },
    };
    Ok(Box::into_raw(Box::new(EventChannelObj { c: rdma_event_channel { fd }, parts, all })))
}

/// A descriptor that is readable if one of these is.
fn any_of(parts: &[ChannelPart]) -> std::io::Result<Known> {
    let all = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    for part in parts {
        // SAFETY: open, since the part has it.
        let events = unsafe { BorrowedFd::borrow_raw(part.events.raw_fd()) };
        epoll::add(&all, events, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
    }
    Known::new(all)
}

/// Closes parts of a channel. Returns the error.
fn close_parts(parts: Vec<ChannelPart>, e: i32) -> i32 {
    parts.into_iter().for_each(|part| part.session.close_channel(part.events));
    e
}

pub unsafe extern "C" fn x_rdma_destroy_event_channel(channel: *mut rdma_event_channel) {
    trace!("rdma_destroy_event_channel()");
    if !channel.is_null() {
        // SAFETY: boxed in create_channel, given back once.
        let obj = unsafe { Box::from_raw(channel.cast::<EventChannelObj>()) };
        close_parts(obj.parts, 0);
    }
}

pub unsafe extern "C" fn x_rdma_create_id(
    channel: *mut rdma_event_channel,
    id: *mut *mut rdma_cm_id,
    context: *mut c_void,
    ps: u32,
) -> i32 {
    let qp_type = if ps == u32::from(port_space::UDP) { QPT_UD } else { QPT_RC };
    // SAFETY: the caller passes its channel or NULL.
    let made = unsafe { create(channel, context, ps, qp_type) };
    done(made.map(|new| {
        // SAFETY: room for the identifier.
        unsafe { *id = new }
    }))
}

/// Makes an identifier. It gets a channel of its own if `channel` is NULL.
///
/// # Safety
/// `channel` is NULL or a channel of this library.
pub(super) unsafe fn create(
    channel: *mut rdma_event_channel,
    context: *mut c_void,
    ps: u32,
    qp_type: u32,
) -> Result<*mut rdma_cm_id, i32> {
    let sync = channel.is_null();
    let channel = if sync { create_channel()?.cast() } else { channel };
    // SAFETY: a channel of this library.
    match place::first(unsafe { EventChannelObj::of(channel) }, ps, qp_type) {
        Ok(at) => Ok(wrap(at, channel, context, ps, qp_type, sync)),
        Err(e) => {
            if sync {
                // SAFETY: made above.
                unsafe { x_rdma_destroy_event_channel(channel) };
            }
            Err(e)
        }
    }
}

/// Makes the C object for an identifier of the virtual layer.
pub(super) fn wrap(
    at: Place,
    channel: *mut rdma_event_channel,
    context: *mut c_void,
    ps: u32,
    qp_type: u32,
    sync: bool,
) -> *mut rdma_cm_id {
    // SAFETY: integers, pointers and addresses, for which zero is valid.
    let mut c: rdma_cm_id = unsafe { std::mem::zeroed() };
    (c.channel, c.context, c.ps, c.qp_type) = (channel, context, ps, qp_type);
    let obj = Box::into_raw(Box::new(IdObj {
        c,
        at,
        others: Vec::new(),
        options: Vec::new(),
        sync,
        events: Outstanding::default(),
        template: None,
        connect_data: Vec::new(),
        own_send_cq: false,
        own_recv_cq: false,
        groups: Vec::new(),
        removed: false,
    }));
    let _ = with_device(at.device, |d| d.ids.insert(at.handle, obj));
    obj.cast()
}

pub unsafe extern "C" fn x_rdma_destroy_id(id: *mut rdma_cm_id) -> i32 {
    // SAFETY: the caller gives its identifier back.
    let obj = unsafe { object(id) };
    if let Err(e) = obj.leave(obj.at) {
        return done(Err(e));
    }
    obj.leave_others();
    obj.give_back_event();
    obj.events.wait();
    // SAFETY: boxed in `wrap` and in `event`; out of the table, all events acknowledged.
    unsafe {
        let obj = Box::from_raw(id.cast::<IdObj>());
        if !obj.c.route.path_rec.is_null() {
            drop(Box::from_raw(obj.c.route.path_rec));
        }
        if obj.sync {
            x_rdma_destroy_event_channel(obj.c.channel);
        }
    }
    0
}

pub unsafe extern "C" fn x_rdma_migrate_id(id: *mut rdma_cm_id, channel: *mut rdma_event_channel) -> i32 {
    // SAFETY: the caller passes its identifier and a channel or NULL.
    done(unsafe { migrate(object(id), channel) })
}

/// # Safety
/// `channel` is NULL or a channel of this library.
pub(super) unsafe fn migrate(obj: &mut IdObj, channel: *mut rdma_event_channel) -> Result<(), i32> {
    let sync = channel.is_null();
    if sync && obj.sync {
        return Err(libc::EINVAL);
    }
    let new = if sync { create_channel()?.cast() } else { channel };
    if let Err(e) = obj.migrate_places(new) {
        if sync {
            // SAFETY: made above.
            unsafe { x_rdma_destroy_event_channel(new) };
        }
        return Err(e);
    }
    obj.give_back_event();
    obj.events.wait();
    let (old, was_sync) = (std::mem::replace(&mut obj.c.channel, new), std::mem::replace(&mut obj.sync, sync));
    if was_sync {
        // SAFETY: it was this identifier's own.
        unsafe { x_rdma_destroy_event_channel(old) };
    }
    Ok(())
}

impl IdObj {
    /// Gives the identifier the device and a PD.
    pub(super) fn attach_device(&mut self) -> Result<(), i32> {
        self.c.verbs = with_device(self.at.device, |d| d.verbs)?;
        self.c.port_num = 1;
        if self.c.pd.is_null() {
            self.c.pd = default_pd(self.at.device)?;
        }
        Ok(())
    }

    /// Acknowledges the event of the last call that waited.
    pub(super) fn give_back_event(&mut self) {
        let event = std::mem::replace(&mut self.c.event, std::ptr::null_mut());
        if !event.is_null() {
            // SAFETY: it is this library's, and nobody else gives it back.
            unsafe { super::x_rdma_ack_cm_event(event) };
        }
    }

    /// Waits for the outcome of a call, if the identifier's calls wait.
    pub(super) fn complete(&mut self) -> Result<(), i32> {
        if !self.sync {
            return Ok(());
        }
        // The present event is from an older call.
        self.give_back_event();
        // SAFETY: the identifier's own channel.
        unsafe {
            let event = super::event::next(self.c.channel, Some(self.at.device))?;
            self.c.event = event;
            match (*event).status {
                0 => Ok(()),
                _ if (*event).event == super::event::REJECTED => Err(libc::ECONNREFUSED),
                s => Err(s.abs()),
            }
        }
    }
}

pub unsafe extern "C" fn x_rdma_bind_addr(id: *mut rdma_cm_id, addr: *mut libc::sockaddr) -> i32 {
    // SAFETY: the caller passes its identifier and an address.
    done(unsafe { bind(object(id), addr) })
}

/// # Safety
/// `addr` is an address of a program.
pub(super) unsafe fn bind(obj: &mut IdObj, addr: *const libc::sockaddr) -> Result<(), i32> {
    // SAFETY: by the contract.
    let addr = unsafe { address::read(addr) }?;
    if addr.family == 0 {
        return Err(libc::EINVAL);
    }
    let r = obj.where_it_fits(|place| request(CmOp::Bind, place, |r| r.src = addr))?;
    if names_no_device(&r.src) {
        obj.spread(&r.src)?;
    } else {
        obj.attach_device()?;
    }
    // A program that has bound an IPv6 wildcard address reads it back.
    address::write(&r.src, &mut obj.c.route.addr.src);
    Ok(())
}

pub unsafe extern "C" fn x_rdma_resolve_addr(
    id: *mut rdma_cm_id,
    src: *mut libc::sockaddr,
    dst: *mut libc::sockaddr,
    timeout_ms: i32,
) -> i32 {
    // SAFETY: the caller passes its identifier and addresses.
    done(unsafe { resolve(object(id), src, dst, timeout_ms) })
}

/// # Safety
/// `src` is NULL or an address of a program, as `dst` is.
pub(super) unsafe fn resolve(
    obj: &mut IdObj,
    src: *const libc::sockaddr,
    dst: *const libc::sockaddr,
    timeout_ms: i32,
) -> Result<(), i32> {
    // SAFETY: by the contract.
    let (src, dst) = unsafe { (address::read(src)?, address::read(dst)?) };
    address::write(&dst, &mut obj.c.route.addr.dst);
    let ask = |r: &mut abi::CmReq| {
        // The kernel takes a negative time for a very long time.
        (r.src, r.dst, r.value) = (src, dst, u32::try_from(timeout_ms).unwrap_or(u32::MAX));
    };
    let r = obj.where_it_fits(|place| request(CmOp::ResolveAddr, place, ask))?;
    obj.leave_others();
    address::write(&r.src, &mut obj.c.route.addr.src);
    obj.complete()
}

pub unsafe extern "C" fn x_rdma_resolve_route(id: *mut rdma_cm_id, _timeout_ms: i32) -> i32 {
    // SAFETY: the caller passes its identifier.
    done(unsafe { resolve_route(object(id)) })
}

pub(super) fn resolve_route(obj: &mut IdObj) -> Result<(), i32> {
    request(CmOp::ResolveRoute, obj.at, |_| ())?;
    obj.complete()
}

pub unsafe extern "C" fn x_rdma_listen(id: *mut rdma_cm_id, backlog: i32) -> i32 {
    // SAFETY: the caller passes its identifier.
    let obj = unsafe { object(id) };
    done(listen(obj, u32::try_from(backlog).unwrap_or(0)))
}

fn listen(obj: &mut IdObj, backlog: u32) -> Result<(), i32> {
    let r = request(CmOp::Listen, obj.at, |r| r.value = backlog)?;
    // Without an address it is now bound to a free port of the wildcard.
    if names_no_device(&r.src) && obj.others.is_empty() {
        obj.spread(&r.src)?;
    }
    for &place in &obj.others {
        match request(CmOp::Listen, place, |r| r.value = backlog) {
            // Nobody comes by a device that is lost.
            Ok(_) | Err(libc::EIO) => {}
            Err(e) => return Err(e),
        }
    }
    address::write(&r.src, &mut obj.c.route.addr.src);
    Ok(())
}

/// Binds a datagram identifier to an address, and gives it a device, so that a QP can be made for it.
///
/// # Safety
/// `id` is an identifier of this library, `addr` an address of a program.
pub(crate) unsafe fn bind_to_device(id: *mut rdma_cm_id, addr: *const libc::sockaddr) -> Result<(), i32> {
    // SAFETY: by the contract.
    unsafe {
        bind(object(id), addr)?;
        // It has one QP, so one device.
        object(id).leave_others();
        object(id).attach_device()?;
        // A datagram's sender is known by the GID in its header, which is the VF's.
        if crate::hosted::is_ours((*id).verbs) { Ok(()) } else { Err(libc::EOPNOTSUPP) }
    }
}

/// Lets the device answer peers that look for the identifier's QP.
///
/// # Safety
/// As for [`bind_to_device`]; the identifier has a datagram QP.
pub(crate) unsafe fn answer_by_itself(id: *mut rdma_cm_id) -> Result<(), i32> {
    // SAFETY: by the contract.
    let obj = unsafe { object(id) };
    // SAFETY: as above.
    let qpn = unsafe { (*obj.c.qp).qp_num };
    let r = request(CmOp::Listen, obj.at, |r| r.param.qpn = qpn)?;
    address::write(&r.src, &mut obj.c.route.addr.src);
    Ok(())
}

pub unsafe extern "C" fn x_rdma_get_src_port(id: *mut rdma_cm_id) -> u16 {
    // SAFETY: the caller passes its identifier.
    address::port(unsafe { &(*id).route.addr.src })
}

pub unsafe extern "C" fn x_rdma_get_dst_port(id: *mut rdma_cm_id) -> u16 {
    // SAFETY: the caller passes its identifier.
    address::port(unsafe { &(*id).route.addr.dst })
}

pub unsafe extern "C" fn x_rdma_set_option(
    id: *mut rdma_cm_id,
    level: i32,
    option: i32,
    value: *mut c_void,
    len: usize,
) -> i32 {
    // SAFETY: the caller passes its identifier.
    let obj = unsafe { object(id) };
    let Some(option) = u8::try_from(option).ok().filter(|_| level == OPTION_LEVEL_ID) else {
        return done(Err(libc::ENOSYS));
    };
    // SAFETY: the caller's value is `len` bytes.
    let value = unsafe {
        match len {
            1 => u32::from(value.cast::<u8>().read()),
            4 => value.cast::<u32>().read_unaligned(),
            _ => return done(Err(libc::EINVAL)),
        }
    };
    let set = |place| request(CmOp::SetOption, place, |r| (r.option, r.value) = (option, value)).map(|_| ());
    let done_on_all = obj.places().try_for_each(set);
    if done_on_all.is_ok() {
        obj.options.retain(|o| o.0 != option);
        obj.options.push((option, value));
    }
    done(done_on_all)
}

/// The devices, in a list that ends with NULL.
pub unsafe extern "C" fn x_rdma_get_devices(num: *mut i32) -> *mut *mut ibv_context {
    let list: Vec<_> = with_devices(|all| all.iter().map(|d| d.verbs).collect()).unwrap_or_default();
    if !num.is_null() {
        // SAFETY: room for a number.
        unsafe { *num = list.len() as i32 };
    }
    new_list(list)
}

pub unsafe extern "C" fn x_rdma_free_devices(list: *mut *mut ibv_context) {
    // SAFETY: the caller gives its list back.
    unsafe { free_list(list) };
}
