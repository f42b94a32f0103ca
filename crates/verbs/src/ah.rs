//! Address handles.

use unirdma_abi as abi;
use unirdma_abi::Command;
use unirdma_formats::Gid;
use unirdma_formats::net::{GRH_BYTES, parse_grh};
use unirdma_verbs_abi::*;

use crate::device::{context, gid};
use crate::hosted::{self, return_if_hosted};
use crate::trace::trace;
use crate::{code, null};

/// An address vector in the device's format.
pub(crate) fn ah_in(a: &ibv_ah_attr) -> abi::AhAttr {
    abi::AhAttr {
        grh: abi::GlobalRoute {
            // SAFETY: both views of a GID are plain bytes.
            dgid: unsafe { a.grh.dgid.raw },
            flow_label: a.grh.flow_label,
            sgid_index: a.grh.sgid_index,
            hop_limit: a.grh.hop_limit,
            traffic_class: a.grh.traffic_class,
            reserved: 0,
        },
        dlid: a.dlid,
        sl: a.sl,
        static_rate: a.static_rate,
        port_num: a.port_num,
        is_global: a.is_global,
        reserved: [0; 2],
    }
}

/// An address vector in the program's format.
pub(crate) fn ah_out(a: &abi::AhAttr) -> ibv_ah_attr {
    ibv_ah_attr {
        grh: ibv_global_route {
            dgid: ibv_gid { raw: a.grh.dgid },
            flow_label: a.grh.flow_label,
            sgid_index: a.grh.sgid_index,
            hop_limit: a.grh.hop_limit,
            traffic_class: a.grh.traffic_class,
        },
        dlid: a.dlid,
        sl: a.sl,
        src_path_bits: 0,
        static_rate: a.static_rate,
        is_global: a.is_global,
        port_num: a.port_num,
    }
}

pub unsafe extern "C" fn x_ibv_create_ah(pd: *mut ibv_pd, attr: *mut ibv_ah_attr) -> *mut ibv_ah {
    return_if_hosted!((*pd).context, null, |h| hosted::create_ah(&h, pd, &*attr));
    // SAFETY: the caller passes its PD and attributes.
    let (c, pdn, attr) = unsafe { ((*pd).context, (*pd).handle, ah_in(&*attr)) };
    // SAFETY: a PD's context is open.
    let ctx = unsafe { context(c) };
    let made: Result<abi::HandleResp, i32> =
        ctx.driver.command(Command::CreateAh, &abi::CreateAhReq { pdn, reserved: 0, attr });
    trace!("ibv_create_ah({}) = {made:?}", Gid(attr.grh.dgid));
    match made {
        Ok(r) => {
            ctx.born();
            // SAFETY: the caller's PD, which the object names.
            unsafe { crate::domain::hold(pd) };
            Box::into_raw(Box::new(ibv_ah { context: c, pd, handle: r.handle }))
        }
        Err(e) => null(e),
    }
}

pub unsafe extern "C" fn x_ibv_destroy_ah(ah: *mut ibv_ah) -> i32 {
    // SAFETY: the caller passes its AH; its context is open.
    let (ctx, handle) = unsafe { (context((*ah).context), (*ah).handle) };
    let r = ctx.driver.command_void(Command::DestroyAh, &abi::HandleReq { handle, reserved: 0 });
    trace!("ibv_destroy_ah({handle:#x}) = {r:?}");
    if r.is_err() && !ctx.driver.is_dead() {
        return code(r);
    }
    // SAFETY: boxed in ibv_create_ah; its PD lives.
    unsafe {
        crate::domain::release((*ah).pd);
        drop(Box::from_raw(ah));
    }
    ctx.gone();
    0
}

/// The address vector for an answer to the sender of a datagram, whose header is in the receive's first 40 bytes.
pub unsafe extern "C" fn x_ibv_init_ah_from_wc(
    c: *mut ibv_context,
    port: u8,
    wc: *mut ibv_wc,
    grh: *mut ibv_grh,
    attr: *mut ibv_ah_attr,
) -> i32 {
    const WC_GRH: u32 = unirdma_formats::wc_flags::GRH;
    return_if_hosted!(c, |e| crate::done(Err(e)), |h| hosted::init_ah_from_wc(&h, port, wc, grh, attr));
    // SAFETY: the caller passes its context and a completion.
    let (ctx, wc) = unsafe { (context(c), &*wc) };
    let failed = |e: i32| {
        crate::set_errno(e);
        -1
    };
    // RoCE has no datagram without a GRH (annex A17).
    if wc.wc_flags & WC_GRH == 0 || grh.is_null() {
        return failed(libc::EINVAL);
    }
    // SAFETY: with that flag the caller's buffer begins with 40 bytes of header.
    let bytes: [u8; GRH_BYTES] = unsafe { grh.cast::<[u8; GRH_BYTES]>().read_unaligned() };
    let Some((sender, own)) = parse_grh(&bytes) else { return failed(libc::EINVAL) };
    let index = (0..256).map_while(|i| gid(&ctx.driver, port.into(), i).ok()).position(|g| g == own.0);
    let Some(index) = index else { return failed(libc::EINVAL) };
    let v6 = bytes[0] >> 4 == 6;
    let traffic_class = if v6 { (u16::from_be_bytes([bytes[0], bytes[1]]) >> 4) as u8 } else { bytes[21] };
    let flow_label = if v6 { u32::from_be_bytes([0, bytes[1] & 0xf, bytes[2], bytes[3]]) } else { 0 };
    let route = ibv_global_route {
        dgid: ibv_gid { raw: sender.0 },
        flow_label,
        sgid_index: index as u8,
        hop_limit: 0xff,
        traffic_class,
    };
    let out = ibv_ah_attr {
        grh: route,
        dlid: wc.slid,
        // The SL of a datagram's completion says which header the datagram has.
        sl: 0,
        src_path_bits: wc.dlid_path_bits,
        static_rate: 0,
        is_global: 1,
        port_num: port,
    };
    // SAFETY: room for the attributes.
    unsafe { attr.write(out) };
    0
}

pub unsafe extern "C" fn x_ibv_create_ah_from_wc(
    pd: *mut ibv_pd,
    wc: *mut ibv_wc,
    grh: *mut ibv_grh,
    port: u8,
) -> *mut ibv_ah {
    // SAFETY: all zero is a valid value.
    let mut attr: ibv_ah_attr = unsafe { std::mem::zeroed() };
    // SAFETY: the caller passes its PD, a completion and its header.
    unsafe {
        if x_ibv_init_ah_from_wc((*pd).context, port, wc, grh, &mut attr) != 0 {
            return std::ptr::null_mut();
        }
        x_ibv_create_ah(pd, &mut attr)
    }
}
