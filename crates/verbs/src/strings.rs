//! Names of enumerators and conversions of rates.

use std::ffi::c_char;

use unirdma_formats::RATES;

fn text(table: &[&'static std::ffi::CStr], i: i32, other: &'static std::ffi::CStr) -> *const c_char {
    usize::try_from(i).ok().and_then(|i| table.get(i)).unwrap_or(&other).as_ptr()
}

pub extern "C" fn x_ibv_node_type_str(t: i32) -> *const c_char {
    let table = [
        c"unknown",
        c"InfiniBand channel adapter",
        c"InfiniBand switch",
        c"InfiniBand router",
        c"iWARP NIC",
        c"usNIC",
        c"usNIC UDP",
        c"unspecified",
    ];
    text(&table, t, c"unknown")
}

pub extern "C" fn x_ibv_port_state_str(s: i32) -> *const c_char {
    let table = [c"no state change (NOP)", c"down", c"init", c"armed", c"active", c"active defer"];
    text(&table, s, c"invalid state")
}

pub extern "C" fn x_ibv_event_type_str(e: i32) -> *const c_char {
    let table = [
        c"CQ error",
        c"local work queue catastrophic error",
        c"invalid request local work queue error",
        c"local access violation work queue error",
        c"communication established",
        c"send queue drained",
        c"path migrated",
        c"path migration request error",
        c"local catastrophic error",
        c"port active",
        c"port error",
        c"LID change",
        c"P_Key change",
        c"SM change",
        c"SRQ catastrophic error",
        c"SRQ limit reached",
        c"last WQE reached",
        c"client reregistration",
        c"GID table change",
        c"WQ fatal",
        c"Device link speed change",
    ];
    text(&table, e, c"unknown")
}

pub extern "C" fn x_ibv_wc_status_str(s: i32) -> *const c_char {
    let table = [
        c"success",
        c"local length error",
        c"local QP operation error",
        c"local EE context operation error",
        c"local protection error",
        c"Work Request Flushed Error",
        c"memory management operation error",
        c"bad response error",
        c"local access error",
        c"remote invalid request error",
        c"remote access error",
        c"remote operation error",
        c"transport retry counter exceeded",
        c"RNR retry counter exceeded",
        c"local RDD violation error",
        c"remote invalid RD request",
        c"aborted error",
        c"invalid EE context number",
        c"invalid EE context state",
        c"fatal error",
        c"response timeout error",
        c"general error",
        c"TM error",
        c"TM software rendezvous",
    ];
    text(&table, s, c"unknown")
}

fn convert(v: i32, from: impl Fn(&(i32, i32, i32)) -> i32, to: impl Fn(&(i32, i32, i32)) -> i32, other: i32) -> i32 {
    RATES.iter().find(|r| from(r) == v).map_or(other, to)
}

pub extern "C" fn x_ibv_rate_to_mult(rate: i32) -> i32 {
    convert(rate, |r| r.0, |r| r.1, -1)
}

pub extern "C" fn x_mult_to_ibv_rate(mult: i32) -> i32 {
    convert(mult, |r| r.1, |r| r.0, 0)
}

pub extern "C" fn x_ibv_rate_to_mbps(rate: i32) -> i32 {
    convert(rate, |r| r.0, |r| r.2, -1)
}

pub extern "C" fn x_mbps_to_ibv_rate(mbps: i32) -> i32 {
    convert(mbps, |r| r.2, |r| r.0, 0)
}
