//! Event channels and identifiers: created, bound, resolved, destroyed.

use std::ffi::c_void;
use std::sync::atomic::AtomicI32;

use unirdma_abi::{CM_XRC, CmOp, port_space};
use unirdma_verbs_abi::*;

use super::qp::default_pd;
use super::{EventChannelObj, IdObj, address, object, request, shared_context, with_device};
use crate::event::Outstanding;
use crate::trace::trace;
use crate::{done, null};

const QPT_RC: u32 = 2;
const QPT_UD: u32 = 4;
const QPT_XRC_SEND: u32 = 9;
const QPT_XRC_RECV: u32 = 10;
const OPTION_LEVEL_ID: i32 = 0;

pub unsafe extern "C" fn x_rdma_create_event_channel() -> *mut rdma_event_channel {
    trace!("rdma_create_event_channel()");
    create_channel().map_or_else(null, |c| c.cast())
}

fn create_channel() -> Result<*mut EventChannelObj, i32> {
    let (_, session) = shared_context()?;
    let events = session.open_channel()?;
    let c = rdma_event_channel { fd: events.raw_fd() };
    Ok(Box::into_raw(Box::new(EventChannelObj { c, session, events, stale: AtomicI32::new(0) })))
}

pub unsafe extern "C" fn x_rdma_destroy_event_channel(channel: *mut rdma_event_channel) {
    trace!("rdma_destroy_event_channel()");
    if !channel.is_null() {
        // SAFETY: boxed in create_channel, given back once.
        let obj = unsafe { Box::from_raw(channel.cast::<EventChannelObj>()) };
        obj.session.close_channel(obj.events);
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
    let slot = unsafe { &*channel.cast::<EventChannelObj>() }.events.number();
    let made = request(CmOp::Create, 0, |r| {
        (r.port_space, r.queue) = (u16::try_from(ps).unwrap_or(0), slot);
        r.option = if [QPT_XRC_SEND, QPT_XRC_RECV].contains(&qp_type) { CM_XRC } else { 0 };
    });
    match made {
        Ok(r) => Ok(wrap(r.id, channel, context, ps, qp_type, sync)),
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
    handle: u32,
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
        handle,
        sync,
        events: Outstanding::default(),
        template: None,
        connect_data: Vec::new(),
        own_send_cq: false,
        own_recv_cq: false,
        groups: Vec::new(),
        removed: false,
    }));
    let _ = with_device(|d| d.ids.insert(handle, obj));
    obj.cast()
}

pub unsafe extern "C" fn x_rdma_destroy_id(id: *mut rdma_cm_id) -> i32 {
    // SAFETY: the caller gives its identifier back.
    let obj = unsafe { object(id) };
    let r = request(CmOp::Destroy, obj.handle, |_| ());
    match r {
        // SAFETY: an identifier's channel lives as long as it.
        Ok(r) => unsafe { &*obj.c.channel.cast::<EventChannelObj>() }.discard(r.dropped),
        // An identifier ends with the virtual layer, and a forked child does not have its parent's identifiers.
        Err(libc::EIO | libc::ENOENT) => {}
        Err(e) => return done(Err(e)),
    }
    let _ = with_device(|d| d.ids.remove(&obj.handle));
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
    // SAFETY: a channel of this library.
    let slot = unsafe { &*new.cast::<EventChannelObj>() }.events.number();
    match request(CmOp::Migrate, obj.handle, |r| r.queue = slot) {
        // SAFETY: an identifier's channel lives as long as it.
        Ok(r) => unsafe { &*obj.c.channel.cast::<EventChannelObj>() }.discard(r.dropped),
        Err(e) => {
            if sync {
                // SAFETY: made above.
                unsafe { x_rdma_destroy_event_channel(new) };
            }
            return Err(e);
        }
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
        self.c.verbs = shared_context()?.0;
        self.c.port_num = 1;
        if self.c.pd.is_null() {
            self.c.pd = default_pd()?;
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
            let event = super::event::next(self.c.channel)?;
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
    let r = request(CmOp::Bind, obj.handle, |r| r.src = addr)?;
    // A program that has bound an IPv6 wildcard address reads it back.
    address::write(&r.src, &mut obj.c.route.addr.src);
    // A wildcard names no device, and neither does a loopback address, as with the kernel.
    let ip = unirdma_formats::Gid(r.src.ip).ip();
    if !ip.is_unspecified() && !ip.is_loopback() {
        obj.attach_device()?;
    }
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
    let r = request(CmOp::ResolveAddr, obj.handle, |r| {
        // The kernel takes a negative time for a very long time.
        (r.src, r.dst, r.value) = (src, dst, u32::try_from(timeout_ms).unwrap_or(u32::MAX));
    })?;
    address::write(&r.src, &mut obj.c.route.addr.src);
    obj.complete()
}

pub unsafe extern "C" fn x_rdma_resolve_route(id: *mut rdma_cm_id, _timeout_ms: i32) -> i32 {
    // SAFETY: the caller passes its identifier.
    done(unsafe { resolve_route(object(id)) })
}

pub(super) fn resolve_route(obj: &mut IdObj) -> Result<(), i32> {
    request(CmOp::ResolveRoute, obj.handle, |_| ())?;
    obj.complete()
}

pub unsafe extern "C" fn x_rdma_listen(id: *mut rdma_cm_id, backlog: i32) -> i32 {
    // SAFETY: the caller passes its identifier.
    let obj = unsafe { object(id) };
    let r = request(CmOp::Listen, obj.handle, |r| r.value = u32::try_from(backlog).unwrap_or(0));
    done(r.map(|r| address::write(&r.src, &mut obj.c.route.addr.src)))
}

/// Binds a datagram identifier to an address, and gives it a device, so that a QP can be made for it.
///
/// # Safety
/// `id` is an identifier of this library, `addr` an address of a program.
pub(crate) unsafe fn bind_to_device(id: *mut rdma_cm_id, addr: *const libc::sockaddr) -> Result<(), i32> {
    // SAFETY: by the contract.
    unsafe {
        bind(object(id), addr)?;
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
    let r = request(CmOp::Listen, obj.handle, |r| r.param.qpn = qpn)?;
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
    done(request(CmOp::SetOption, obj.handle, |r| (r.option, r.value) = (option, value)).map(|_| ()))
}

/// The devices, in a list that ends with NULL.
pub unsafe extern "C" fn x_rdma_get_devices(num: *mut i32) -> *mut *mut ibv_context {
    let mut list: Vec<*mut ibv_context> = shared_context().map(|(v, _)| v).into_iter().collect();
    if !num.is_null() {
        // SAFETY: room for a number.
        unsafe { *num = list.len() as i32 };
    }
    list.resize(2, std::ptr::null_mut());
    Box::into_raw(list.into_boxed_slice()).cast()
}

pub unsafe extern "C" fn x_rdma_free_devices(list: *mut *mut ibv_context) {
    if !list.is_null() {
        // SAFETY: a list of rdma_get_devices has two elements.
        unsafe { drop(Box::from_raw(std::ptr::slice_from_raw_parts_mut(list, 2))) };
    }
}
