//! Names to addresses (`rdma_getaddrinfo(3)`), and endpoints made from them (`rdma_create_ep(3)`).

use std::ffi::c_char;

use unirdma_abi::port_space;
use unirdma_verbs_abi::*;

use super::{id, object, qp};
use crate::done;

const PASSIVE: i32 = 1;
const NUMERIC_HOST: i32 = 2;
const FAMILY: i32 = 8;
const QPT_RC: i32 = 2;
const QPT_UD: i32 = 4;

/// Longest time to resolve the address of a peer, ms.
const RESOLVE_MS: i32 = 2000;

/// Copies a socket address into memory of malloc(3): programs put addresses of their own into the structure (libfabric
/// does), and `rdma_freeaddrinfo` passes all of them to free(3).
///
/// # Safety
/// `a` holds `len` bytes, or is NULL.
unsafe fn copy(a: *const libc::sockaddr, len: u32) -> *mut libc::sockaddr {
    if a.is_null() || len == 0 {
        return std::ptr::null_mut();
    }
    // SAFETY: zeroed memory for any address.
    let storage = unsafe { libc::calloc(1, size_of::<libc::sockaddr_storage>()) };
    let n = (len as usize).min(size_of::<libc::sockaddr_storage>());
    if !storage.is_null() {
        // SAFETY: by the contract, and there is room.
        unsafe { std::ptr::copy_nonoverlapping(a.cast::<u8>(), storage.cast(), n) };
    }
    storage.cast()
}

pub unsafe extern "C" fn x_rdma_getaddrinfo(
    node: *const c_char,
    service: *const c_char,
    hints: *const rdma_addrinfo,
    res: *mut *mut rdma_addrinfo,
) -> i32 {
    // SAFETY: the caller passes hints or NULL.
    let hints = unsafe { hints.as_ref() };
    let flags = hints.map_or(0, |h| h.ai_flags);
    if node.is_null() && service.is_null() && hints.is_none_or(|h| h.ai_src_len == 0 && h.ai_dst_len == 0) {
        return done(Err(libc::EINVAL));
    }
    // SAFETY: all zero is valid for a structure of integers and pointers.
    let mut ask: libc::addrinfo = unsafe { std::mem::zeroed() };
    ask.ai_flags = if flags & PASSIVE != 0 { libc::AI_PASSIVE } else { 0 };
    ask.ai_flags |= if flags & NUMERIC_HOST != 0 { libc::AI_NUMERICHOST } else { 0 };
    ask.ai_family = hints.filter(|h| flags & FAMILY != 0 || h.ai_family != 0).map_or(0, |h| h.ai_family);
    let datagram = hints.is_some_and(|h| h.ai_qp_type == QPT_UD || h.ai_port_space == i32::from(port_space::UDP));
    ask.ai_socktype = if datagram { libc::SOCK_DGRAM } else { libc::SOCK_STREAM };
    let mut list: *mut libc::addrinfo = std::ptr::null_mut();
    if !node.is_null() || !service.is_null() {
        // SAFETY: strings of the caller or NULL; the list is given back below.
        let e = unsafe { libc::getaddrinfo(node, service, &ask, &mut list) };
        if e != 0 {
            // The call's error numbers are not errno values.
            crate::set_errno(if e == libc::EAI_SYSTEM { libc::EIO } else { libc::EADDRNOTAVAIL });
            return e;
        }
    }
    let mut first: *mut rdma_addrinfo = std::ptr::null_mut();
    let mut link = &raw mut first;
    let mut at = list;
    loop {
        // SAFETY: an element of the list, or NULL at its end.
        let found = unsafe { at.as_ref() };
        if found.is_none() && !first.is_null() {
            break;
        }
        // SAFETY: all zero is valid; addresses are as long as they say.
        unsafe {
            let made = libc::calloc(1, size_of::<rdma_addrinfo>()).cast::<rdma_addrinfo>();
            let Some(new) = made.as_mut() else {
                x_rdma_freeaddrinfo(first);
                if !list.is_null() {
                    libc::freeaddrinfo(list);
                }
                return done(Err(libc::ENOMEM));
            };
            new.ai_flags = flags;
            new.ai_qp_type =
                hints.map(|h| h.ai_qp_type).filter(|t| *t != 0).unwrap_or(if datagram { QPT_UD } else { QPT_RC });
            let space = if datagram { port_space::UDP } else { port_space::TCP };
            new.ai_port_space = hints.map(|h| h.ai_port_space).filter(|s| *s != 0).unwrap_or(space.into());
            if let Some(h) = hints {
                (new.ai_src_addr, new.ai_src_len) = (copy(h.ai_src_addr, h.ai_src_len), h.ai_src_len);
                (new.ai_dst_addr, new.ai_dst_len) = (copy(h.ai_dst_addr, h.ai_dst_len), h.ai_dst_len);
                new.ai_family = h.ai_family;
            }
            if let Some(f) = found {
                let (to, len) = if flags & PASSIVE != 0 {
                    (&mut new.ai_src_addr, &mut new.ai_src_len)
                } else {
                    (&mut new.ai_dst_addr, &mut new.ai_dst_len)
                };
                libc::free(to.cast());
                (*to, *len) = (copy(f.ai_addr, f.ai_addrlen), f.ai_addrlen);
                new.ai_family = f.ai_family;
            }
            *link = made;
            link = &raw mut (**link).ai_next;
            match found {
                Some(f) => at = f.ai_next,
                None => break,
            }
        }
    }
    // SAFETY: the list of getaddrinfo, if there is one; room for the result.
    unsafe {
        if !list.is_null() {
            libc::freeaddrinfo(list);
        }
        *res = first;
    }
    0
}

pub unsafe extern "C" fn x_rdma_freeaddrinfo(mut res: *mut rdma_addrinfo) {
    while !res.is_null() {
        // SAFETY: a list of rdma_getaddrinfo, given back once; all that it points to is of malloc(3).
        unsafe {
            let a = res.read();
            libc::free(a.ai_src_addr.cast());
            libc::free(a.ai_dst_addr.cast());
            libc::free(a.ai_src_canonname.cast());
            libc::free(a.ai_dst_canonname.cast());
            libc::free(a.ai_route);
            libc::free(a.ai_connect);
            libc::free(res.cast());
            res = a.ai_next;
        }
    }
}

pub unsafe extern "C" fn x_rdma_create_ep(
    out: *mut *mut rdma_cm_id,
    res: *mut rdma_addrinfo,
    pd: *mut ibv_pd,
    init: *mut ibv_qp_init_attr,
) -> i32 {
    // SAFETY: the caller passes a result of rdma_getaddrinfo, and attributes or NULL.
    let (res, init) = unsafe { (&*res, init.as_mut()) };
    // SAFETY: no channel: the identifier gets its own, and its calls wait.
    let made = unsafe {
        id::create(std::ptr::null_mut(), std::ptr::null_mut(), res.ai_port_space as u32, res.ai_qp_type as u32)
    };
    let new = match made {
        Ok(new) => new,
        Err(e) => return done(Err(e)),
    };
    // SAFETY: just made; the addresses are the result's.
    let r = unsafe {
        let obj = object(new);
        if res.ai_flags & PASSIVE != 0 {
            id::bind(obj, res.ai_src_addr).map(|()| {
                obj.template = init.map(|i| *i);
                obj.c.pd = pd;
            })
        } else {
            id::resolve(obj, res.ai_src_addr, res.ai_dst_addr, RESOLVE_MS)
                .and_then(|()| id::resolve_route(obj))
                .and_then(|()| {
                    if res.ai_connect_len > 0 && !res.ai_connect.is_null() {
                        let data = std::slice::from_raw_parts(res.ai_connect.cast::<u8>(), res.ai_connect_len.min(255));
                        obj.connect_data = data.to_vec();
                    }
                    match init {
                        Some(init) => {
                            init.qp_type = res.ai_qp_type as u32;
                            qp::create(obj, pd, init)
                        }
                        None => Ok(()),
                    }
                })
        }
    };
    // SAFETY: just made; room for the identifier.
    unsafe {
        match r {
            Ok(()) => *out = new,
            Err(_) => x_rdma_destroy_ep(new),
        }
    }
    done(r)
}

pub unsafe extern "C" fn x_rdma_destroy_ep(id: *mut rdma_cm_id) {
    // SAFETY: the caller gives its identifier back.
    unsafe {
        super::x_rdma_destroy_qp(id);
        super::x_rdma_destroy_srq(id);
        super::x_rdma_destroy_id(id);
    }
}
