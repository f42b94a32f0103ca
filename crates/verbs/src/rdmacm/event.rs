//! Events of identifiers.

use std::ffi::{c_char, c_void};
use std::sync::atomic::Ordering;

use unirdma_abi as abi;
use unirdma_abi::{CmOp, Command};
use unirdma_verbs_abi::*;

use super::{ChannelPart, EventChannelObj, IdObj, Place, address, id, request, with_device};
use crate::ah::ah_out;
use crate::trace::trace;
use crate::{null, set_errno};

// enum rdma_cm_event_type
const ADDR_RESOLVED: u32 = 0;
const ROUTE_RESOLVED: u32 = 2;
const CONNECT_REQUEST: u32 = 4;
const CONNECT_RESPONSE: u32 = 5;
const CONNECT_ERROR: u32 = 6;
pub(super) const REJECTED: u32 = 8;
const ESTABLISHED: u32 = 9;
const DEVICE_REMOVAL: u32 = 11;
const MULTICAST_JOIN: u32 = 12;
const MULTICAST_ERROR: u32 = 13;

const QPT_UD: u32 = 4;

/// An event that a program holds, with its private data.
#[repr(C)]
struct EventObj {
    c: rdma_cm_event,
    private: [[u8; 32]; 7],
}

pub unsafe extern "C" fn x_rdma_get_cm_event(channel: *mut rdma_event_channel, event: *mut *mut rdma_cm_event) -> i32 {
    if channel.is_null() || event.is_null() {
        set_errno(libc::EINVAL);
        return -1;
    }
    // SAFETY: the caller passes its channel.
    match unsafe { next(channel, None) } {
        Ok(e) => {
            // SAFETY: room for the event.
            unsafe { *event = e };
            0
        }
        Err(e) => {
            set_errno(e);
            -1
        }
    }
}

/// Waits for the next event of a channel, unless its descriptor does not block. `of`: the device whose event the caller
/// needs, so that it does not wait for the others once this one is lost.
///
/// # Safety
/// `channel` is one of this library.
pub(super) unsafe fn next(channel: *mut rdma_event_channel, of: Option<usize>) -> Result<*mut rdma_cm_event, i32> {
    // SAFETY: by the contract.
    let ch = unsafe { EventChannelObj::of(channel) };
    loop {
        if of.is_some_and(|device| ch.part(device).is_ok_and(|part| part.events.is_silenced())) {
            return Err(libc::EIO);
        }
        let (part, told) = ch.next_message()?;
        let r: Result<abi::CmEvent, i32> = told.and_then(|()| {
            part.session.command(Command::CmEvent, &abi::CmEventReq { queue: part.events.number(), reserved: 0 })
        });
        match r {
            Err(libc::EIO) => {
                let (event, are_left) = removal(channel, part.device);
                if ch.all.is_some() && !are_left {
                    // The events of the other devices go on.
                    part.events.silence();
                }
                match event {
                    Some(event) => return Ok(event),
                    None if ch.all.is_none() => return Err(libc::EIO),
                    None => {}
                }
            }
            // The event has gone with its identifier, or to another channel.
            Err(libc::ENOENT) => _ = part.stale.fetch_sub(1, Ordering::AcqRel),
            Err(e) => return Err(e),
            Ok(e) => {
                if let Some(event) = take(channel, part, &e) {
                    return Ok(event);
                }
            }
        }
    }
}

impl EventChannelObj {
    /// Waits for a message of any device, unless the channel's descriptor does not block. Says which one it is of, and
    /// whether that device is lost (`EIO`). As `EventSource::next`, it is a cancellation point.
    ///
    /// # Errors
    /// `EAGAIN`; `EINTR`; `EIO` if all devices are lost, and the program was told.
    fn next_message(&self) -> Result<(&ChannelPart, Result<(), i32>), i32> {
        if self.all.is_none() {
            let part = &self.parts[0];
            return match part.events.next() {
                Err(e) if e != libc::EIO => Err(e),
                told => Ok((part, told.map(drop))),
            };
        }
        loop {
            let mut polled = [libc::pollfd { fd: -1, events: libc::POLLIN, revents: 0 }; abi::container::MAX_VRNICS];
            for (part, polled) in self.parts.iter().zip(&mut polled).filter(|(p, _)| !p.events.is_silenced()) {
                match part.events.take() {
                    Err(libc::EAGAIN) => polled.fd = part.events.raw_fd(),
                    told => return Ok((part, told.map(drop))),
                }
            }
            if polled.iter().all(|p| p.fd < 0) {
                return Err(libc::EIO);
            }
            // SAFETY: a number; if it is open no more, this fails.
            let flags = unsafe { libc::fcntl(self.c.fd, libc::F_GETFL) };
            if flags < 0 || flags & libc::O_NONBLOCK != 0 {
                return Err(libc::EAGAIN);
            }
            // SAFETY: as many descriptors as there are. This is the C library's function, so that it can be cancelled.
            if unsafe { libc::poll(polled.as_mut_ptr(), polled.len() as libc::nfds_t, -1) } < 0 {
                // SAFETY: this thread's own errno.
                return Err(unsafe { *libc::__errno_location() });
            }
        }
    }
}

/// Called when a device is lost. Returns a removal event for the next identifier of the channel that has it and was not
/// told yet, and whether others are left.
fn removal(channel: *mut rdma_event_channel, device: usize) -> (Option<*mut rdma_cm_event>, bool) {
    let found = with_device(device, |d| {
        // SAFETY: the table holds live identifiers.
        let ids = d.ids.values().map(|&at| unsafe { &mut *at });
        let mut untold = ids.filter(|o| o.c.channel == channel && !o.c.verbs.is_null() && !o.sync && !o.removed);
        let at = untold.next()?;
        at.removed = true;
        at.events.give();
        Some((std::ptr::from_mut(at), untold.next().is_some()))
    });
    let Some((at, are_left)) = found.ok().flatten() else { return (None, false) };
    // SAFETY: integers and pointers; destroying the identifier waits for this event.
    let mut c: rdma_cm_event = unsafe { std::mem::zeroed() };
    (c.id, c.event) = (at.cast(), DEVICE_REMOVAL);
    trace!("rdma_get_cm_event() = device removal");
    (Some(Box::into_raw(Box::new(EventObj { c, private: [[0; 32]; 7] })).cast()), are_left)
}

/// Handles an event. Returns the event that the program sees; `None` if the program need not see it.
fn take(channel: *mut rdma_event_channel, part: &ChannelPart, e: &abi::CmEvent) -> Option<*mut rdma_cm_event> {
    let of = if e.kind == CONNECT_REQUEST { e.listen_id } else { e.id };
    // From here on, destroying the identifier waits for this event.
    let place = Place { device: part.device, handle: e.id };
    let found = with_device(part.device, |d| {
        let at = d.ids.get(&of).copied()?;
        // SAFETY: the table holds live identifiers.
        unsafe { (*at).events.give() };
        Some(at)
    });
    let Some(at) = found.ok().flatten() else {
        // The listening identifier is gone.
        if let Ok(r) = request(CmOp::Destroy, place, |_| ()) {
            part.discard(r.dropped);
        }
        return None;
    };
    // SAFETY: live, see above.
    let obj = unsafe { &mut *at };
    let mut kind = e.kind;
    let mut status = e.status;
    let mut who = at;
    match e.kind {
        ADDR_RESOLVED => {
            let _ = obj.attach_device();
            address::write(&e.src, &mut obj.c.route.addr.src);
        }
        ROUTE_RESOLVED => obj.set_route(e),
        CONNECT_REQUEST => {
            let (l, context) = (&obj.c, obj.c.context);
            who = id::wrap(place, channel, context, l.ps, l.qp_type, obj.sync).cast();
            // SAFETY: just made.
            let new = unsafe { &mut *who };
            let _ = new.attach_device();
            address::write(&e.src, &mut new.c.route.addr.src);
            address::write(&e.dst, &mut new.c.route.addr.dst);
            new.set_route(e);
        }
        CONNECT_RESPONSE if !obj.c.qp.is_null() => match obj.to_rts(None) {
            Ok(()) => kind = ESTABLISHED,
            Err(error) => {
                trace!("rdma_cm: the QP cannot be connected: errno {error}");
                let _ = request(CmOp::Reject, obj.at, |_| ());
                (kind, status) = (CONNECT_ERROR, -error);
            }
        },
        REJECTED => obj.to_error(),
        _ => {}
    }
    let datagram = obj.c.qp_type == QPT_UD;
    let mut private: *const c_void = std::ptr::null();
    if e.kind == MULTICAST_JOIN {
        let joined = obj.on_joined(e.listen_id);
        private = joined.unwrap_or(std::ptr::null_mut());
        if joined.is_err() {
            (kind, status) = (MULTICAST_ERROR, -libc::EINVAL);
        }
    }
    let param = if datagram {
        let ud = rdma_ud_param {
            private_data: private,
            private_data_len: e.param.private_len,
            ah_attr: ah_out(&e.ah),
            qp_num: e.param.qpn,
            qkey: e.param.qkey,
        };
        rdma_event_param { ud }
    } else {
        // SAFETY: integers and a pointer; the other bytes of the union are zero.
        let mut p: rdma_event_param = unsafe { std::mem::zeroed() };
        p.conn = rdma_conn_param {
            private_data: private,
            private_data_len: e.param.private_len,
            responder_resources: e.param.responder_resources,
            initiator_depth: e.param.initiator_depth,
            flow_control: e.param.flow_control,
            retry_count: e.param.retry_count,
            rnr_retry_count: e.param.rnr_retry_count,
            srq: e.param.srq,
            qp_num: e.param.qpn,
        };
        p
    };
    let listen_id = if e.kind == CONNECT_REQUEST { at.cast() } else { std::ptr::null_mut() };
    let c = rdma_cm_event { id: who.cast(), listen_id, event: kind, status, param };
    let event = Box::into_raw(Box::new(EventObj { c, private: e.private }));
    if e.param.private_len > 0 {
        // SAFETY: just made; both kinds of parameters begin with the pointer.
        unsafe { (*event).c.param.conn.private_data = (&raw const (*event).private).cast() };
    }
    trace!("rdma_get_cm_event() = {kind} of {:#x}, status {status}", e.id);
    Some(event.cast())
}

impl IdObj {
    /// Fills in the only path.
    fn set_route(&mut self, e: &abi::CmEvent) {
        const MTU_4096: u8 = 5;
        let path = ibv_sa_path_rec {
            dgid: ibv_gid { raw: address::gid(&e.dst) },
            sgid: ibv_gid { raw: address::gid(&e.src) },
            dlid: 0,
            slid: 0,
            raw_traffic: 0,
            flow_label: 0,
            hop_limit: e.ah.grh.hop_limit,
            traffic_class: e.ah.grh.traffic_class,
            reversible: 1,
            numb_path: 1,
            pkey: 0xffff,
            sl: 0,
            mtu_selector: 2,
            mtu: MTU_4096,
            rate_selector: 2,
            rate: 0,
            packet_life_time_selector: 2,
            packet_life_time: 16,
            preference: 0,
        };
        let r = &mut self.c.route;
        r.addr.ibaddr = rdma_ib_addr { sgid: path.sgid, dgid: path.dgid, pkey: path.pkey };
        if r.path_rec.is_null() {
            r.path_rec = Box::into_raw(Box::new(path));
            r.num_paths = 1;
        }
    }
}

pub unsafe extern "C" fn x_rdma_ack_cm_event(event: *mut rdma_cm_event) -> i32 {
    if event.is_null() {
        set_errno(libc::EINVAL);
        return -1;
    }
    // SAFETY: the caller gives back an event that it got; the identifier lives until then.
    unsafe {
        let e = Box::from_raw(event.cast::<EventObj>());
        let of = if e.c.event == CONNECT_REQUEST { e.c.listen_id } else { e.c.id };
        super::object(of).events.ack(1);
    }
    0
}

pub extern "C" fn x_rdma_event_str(event: u32) -> *const c_char {
    let name = match event {
        0 => c"RDMA_CM_EVENT_ADDR_RESOLVED",
        1 => c"RDMA_CM_EVENT_ADDR_ERROR",
        2 => c"RDMA_CM_EVENT_ROUTE_RESOLVED",
        3 => c"RDMA_CM_EVENT_ROUTE_ERROR",
        4 => c"RDMA_CM_EVENT_CONNECT_REQUEST",
        5 => c"RDMA_CM_EVENT_CONNECT_RESPONSE",
        6 => c"RDMA_CM_EVENT_CONNECT_ERROR",
        7 => c"RDMA_CM_EVENT_UNREACHABLE",
        8 => c"RDMA_CM_EVENT_REJECTED",
        9 => c"RDMA_CM_EVENT_ESTABLISHED",
        10 => c"RDMA_CM_EVENT_DISCONNECTED",
        11 => c"RDMA_CM_EVENT_DEVICE_REMOVAL",
        12 => c"RDMA_CM_EVENT_MULTICAST_JOIN",
        13 => c"RDMA_CM_EVENT_MULTICAST_ERROR",
        14 => c"RDMA_CM_EVENT_ADDR_CHANGE",
        15 => c"RDMA_CM_EVENT_TIMEWAIT_EXIT",
        _ => c"UNKNOWN EVENT",
    };
    name.as_ptr()
}

/// The next request of a listening identifier whose calls wait.
pub unsafe extern "C" fn x_rdma_get_request(listen: *mut rdma_cm_id, id: *mut *mut rdma_cm_id) -> i32 {
    // SAFETY: the caller passes its identifier.
    match unsafe { get_request(listen) } {
        Ok(new) => {
            // SAFETY: room for the identifier.
            unsafe { *id = new };
            0
        }
        Err(e) => {
            let _: *mut c_void = null(e);
            -1
        }
    }
}

/// # Safety
/// `listen` is an identifier of this library.
unsafe fn get_request(listen: *mut rdma_cm_id) -> Result<*mut rdma_cm_id, i32> {
    // SAFETY: by the contract.
    let l = unsafe { super::object(listen) };
    if !l.sync {
        return Err(libc::EINVAL);
    }
    l.give_back_event();
    // SAFETY: the identifier's own channel and events; what comes is from this library.
    unsafe {
        let event = next(l.c.channel, l.others.is_empty().then_some(l.at.device))?;
        if (*event).status != 0 || (*event).event != CONNECT_REQUEST {
            let e = if (*event).status != 0 { (*event).status.abs() } else { libc::EINVAL };
            x_rdma_ack_cm_event(event);
            return Err(e);
        }
        let new = (*event).id;
        let made = if let Some(mut attr) = l.template {
            attr.qp_type = l.c.qp_type;
            super::qp::create(super::object(new), l.c.pd, &mut attr)
        } else {
            Ok(())
        };
        // The new identifier gets a channel of its own, and keeps the event until its next call.
        let obj = super::object(new);
        obj.sync = false;
        let moved = made.and_then(|()| id::migrate(obj, std::ptr::null_mut()));
        if let Err(e) = moved {
            x_rdma_ack_cm_event(event);
            destroy_with_qp(new);
            return Err(e);
        }
        obj.c.event = event;
        Ok(new)
    }
}

/// # Safety
/// As `rdma_destroy_id(3)`, with its QP.
unsafe fn destroy_with_qp(id: *mut rdma_cm_id) {
    // SAFETY: by the contract.
    unsafe {
        super::x_rdma_destroy_qp(id);
        super::x_rdma_destroy_id(id);
    }
}
