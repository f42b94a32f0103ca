//! Devices, contexts, ports, GIDs, PDs.

use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_void};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Once};

use unirdma_abi as abi;
use unirdma_abi::Command;
use unirdma_driver as driver;
use unirdma_driver::fds::Known;
use unirdma_verbs_abi::*;

use crate::cq::CqObj;
use crate::hosted::{self, Hosted, Lease, Opened, return_if_hosted};
use crate::mr::MrObj;
use crate::qp::QpObj;
use crate::srq::SrqObj;
use crate::trace::trace;
use crate::{code, free_list, lock, new_list, null, set_errno};

/// A device. Once it was in a list it stays, as in rdma-core, so that pointers to it remain good.
#[repr(C)]
pub(crate) struct DeviceObj {
    c: verbs_device,
    guid: u64,
    name: String,
    /// Its number among the container's devices.
    number: usize,
    /// The vRNIC's socket.
    pub socket: PathBuf,
}

/// A device that stays.
struct Kept(*mut DeviceObj);
// SAFETY: nothing changes a device once it was made.
unsafe impl Send for Kept {}

static DEVICES: Mutex<Vec<Kept>> = Mutex::new(Vec::new());

/// The target of `ops` of our devices. Nobody reads it.
static DEVICE_OPS: usize = 0;
/// The name of a device that has none in `/sys`, without its number.
const NAME: &str = "unirdma";
/// Longest name of a device, bytes (`IBV_SYSFS_NAME_MAX` with its zero).
const MAX_NAME: usize = 63;

/// An open device. The C structure lies inside, at its end, where inline code expects it.
pub(crate) struct ContextObj {
    pub c: verbs_context,
    pub driver: Arc<driver::Context>,
    /// Of a vRNIC whose other programs may have VFs: keeps the decision that this one uses the software RNIC.
    _lease: Option<Lease>,
    /// Descriptor for `cmd_fd`. It leads nowhere: programs may pass it on to import the device from it, which is then
    /// refused.
    _cmd: Known,
    /// Objects by handle, for events.
    pub cqs: Mutex<HashMap<u32, *mut CqObj>>,
    pub qps: Mutex<HashMap<u32, *mut QpObj>>,
    pub srqs: Mutex<HashMap<u32, *mut SrqObj>>,
    /// MRs by key.
    pub mrs: Mutex<HashMap<u32, *mut MrObj>>,
    /// PDs, MRs, CQs, QPs and channels that refer to this context.
    objects: AtomicUsize,
}

impl ContextObj {
    /// Counts a new object of this context.
    pub fn born(&self) {
        self.objects.fetch_add(1, Ordering::Relaxed);
    }
    /// Counts an object of this context that was destroyed.
    pub fn gone(&self) {
        self.objects.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The object that contains a C context.
///
/// # Safety
/// `c` must be a context that `ibv_open_device` returned and that was not closed.
pub(crate) unsafe fn context<'a>(c: *mut ibv_context) -> &'a ContextObj {
    let off = std::mem::offset_of!(ContextObj, c) + std::mem::offset_of!(verbs_context, context);
    // SAFETY: every context of this library lies at that offset in a ContextObj.
    unsafe { &*c.cast::<u8>().sub(off).cast::<ContextObj>() }
}

/// The session of a context, ours or hosted.
///
/// # Safety
/// `c` is an open context.
pub(crate) unsafe fn session(c: *mut ibv_context) -> Result<Arc<driver::Context>, i32> {
    // SAFETY: by the contract.
    unsafe {
        match hosted_behind(c)? {
            Some(h) => Ok(h.driver.clone()),
            None => Ok(context(c).driver.clone()),
        }
    }
}

/// The hosted context behind `c`; `None` if `c` is ours.
///
/// # Errors
/// `EINVAL` for a context of which the library knows nothing.
///
/// # Safety
/// `c` is an open context.
pub(crate) unsafe fn hosted_behind(c: *mut ibv_context) -> Result<Option<Arc<Hosted>>, i32> {
    // SAFETY: by the contract.
    unsafe { if hosted::is_ours(c) { Ok(None) } else { hosted::of(c).map(Some).ok_or(libc::EINVAL) } }
}

/// The name under which `/sys` shows the device with this GUID, as `unirdma run --device-name` has chosen it.
fn name_of(guid: u64, number: usize) -> String {
    let [a, b, c, d] = [48, 32, 16, 0].map(|bits| guid >> bits & 0xffff);
    let guid = format!("{a:04x}:{b:04x}:{c:04x}:{d:04x}");
    let has = |name: &String| {
        let file = format!("/sys/class/infiniband/{name}/node_guid");
        name.len() <= MAX_NAME && std::fs::read_to_string(file).is_ok_and(|text| text.trim() == guid)
    };
    let entries = std::fs::read_dir("/sys/class/infiniband").into_iter().flatten().flatten();
    let mut names = entries.filter_map(|e| e.file_name().into_string().ok());
    names.find(has).unwrap_or_else(|| format!("{NAME}{number}"))
}

impl DeviceObj {
    fn new(socket: &Path, number: usize, guid: u64, name: String) -> Box<DeviceObj> {
        // SAFETY: all fields are integers, arrays or pointers, for which zero is valid.
        let c: verbs_device = unsafe { std::mem::zeroed() };
        let mut d = Box::new(DeviceObj { c, guid, name, number, socket: socket.into() });
        let put = |dst: &mut [u8], s: &str| dst[..s.len()].copy_from_slice(s.as_bytes());
        let dev = &mut d.c.device;
        (dev.node_type, dev.transport_type) = (1, 0);
        put(&mut dev.name, &d.name);
        put(&mut dev.dev_name, &format!("uverbs{number}"));
        put(&mut dev.dev_path, &format!("/sys/class/infiniband_verbs/uverbs{number}"));
        put(&mut dev.ibdev_path, &format!("/sys/class/infiniband/{}", d.name));
        d.c.ops = std::ptr::from_ref(&DEVICE_OPS).cast();
        d.c.refcount = 1;
        d
    }

    /// The device of the vRNIC at `socket`, the same one at each call.
    fn of(socket: &Path, number: usize, guid: u64) -> *mut DeviceObj {
        let name = name_of(guid, number);
        let mut devices = lock(&DEVICES);
        let is_it = |k: &&Kept| {
            // SAFETY: devices stay.
            let d = unsafe { &*k.0 };
            (d.guid, d.number) == (guid, number) && d.socket == socket && d.name == name
        };
        if let Some(known) = devices.iter().find(is_it) {
            return known.0;
        }
        let new = Box::into_raw(DeviceObj::new(socket, number, guid, name));
        devices.push(Kept(new));
        new
    }

    /// The name that programs see.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The device behind what a program has: a device of a list or of an open context, ours or hosted.
    ///
    /// # Safety
    /// `d` is such a device.
    unsafe fn behind(d: *mut ibv_device) -> Option<&'static DeviceObj> {
        // SAFETY: all devices, also the real library's, begin with the same structure.
        unsafe {
            if (*d.cast::<verbs_device>()).ops == std::ptr::from_ref(&DEVICE_OPS).cast() {
                Some(&*d.cast::<DeviceObj>())
            } else {
                hosted::device_behind(d)
            }
        }
    }
}

/// The list of devices, which ends with NULL. It is empty if there is no virtual layer.
pub unsafe extern "C" fn x_ibv_get_device_list(num: *mut i32) -> *mut *mut ibv_device {
    if let Err(e) = driver::HEAP.reserve() {
        return null(e);
    }
    let mut list: Vec<*mut ibv_device> = Vec::new();
    for (number, path) in driver::socket_paths().iter().enumerate() {
        match driver::device_config(path) {
            Ok(c) => list.push(DeviceObj::of(path, number, c.node_guid).cast()),
            Err(e) => {
                trace!("no vRNIC at {}: errno {e}", path.display());
                say_once_why(path, e);
            }
        }
    }
    if !num.is_null() {
        // SAFETY: the caller passes a valid pointer or NULL.
        unsafe { *num = list.len() as i32 };
    }
    trace!("ibv_get_device_list() = {}", list.len());
    new_list(list)
}

/// Says why there is no device, if the program was told where to look, or if there is a socket. Otherwise it is like a
/// machine without RDMA.
fn say_once_why(path: &Path, e: i32) {
    static SAID: Once = Once::new();
    if std::env::var_os("UNIRDMA_DIR").is_none() && !path.exists() {
        return;
    }
    let remedy = match e {
        libc::ENOENT => {
            "UNIRDMA_DIR must name a vRNIC's directory (unirdma vrnic show), and its virtual layer must run"
        }
        libc::ECONNREFUSED => "no virtual layer serves it (unirdma host)",
        libc::EACCES | libc::EPERM => "this user may not open it",
        _ => "is it a vRNIC's?",
    };
    let (at, why) = (path.display(), crate::words(e));
    SAID.call_once(|| crate::say(&format!("no RDMA device: cannot connect to {at}: {why}; {remedy}")));
}

pub unsafe extern "C" fn x_ibv_free_device_list(list: *mut *mut ibv_device) {
    trace!("ibv_free_device_list()");
    // SAFETY: the caller gives its list back. The devices stay.
    unsafe { free_list(list) };
}

pub unsafe extern "C" fn x_ibv_get_device_name(d: *mut ibv_device) -> *const c_char {
    // SAFETY: the caller passes a device of the list.
    unsafe { (*d).name.as_ptr().cast() }
}

pub unsafe extern "C" fn x_ibv_get_device_index(d: *mut ibv_device) -> i32 {
    // SAFETY: the caller passes a device of the list or of an open context.
    unsafe { DeviceObj::behind(d) }.map_or(-1, |d| d.number as i32)
}

pub unsafe extern "C" fn x_ibv_get_device_guid(d: *mut ibv_device) -> u64 {
    // SAFETY: the caller passes a device of the list or of an open context.
    unsafe { DeviceObj::behind(d) }.map_or(0, |d| d.guid.to_be())
}

pub unsafe extern "C" fn x_ibv_open_device(d: *mut ibv_device) -> *mut ibv_context {
    trace!("ibv_open_device()");
    // SAFETY: the caller passes a device of the list or of an open context.
    let Some(device) = (unsafe { DeviceObj::behind(d) }) else { return null(libc::ENODEV) };
    let driver = match driver::Context::open(&device.socket) {
        Ok(c) => c,
        Err(e) => {
            let why = if e == libc::EUSERS { ": as many programs use it as its administrator lets" } else { "" };
            trace!("ibv_open_device({}) = errno {e}{why}", device.name);
            return null(e);
        }
    };
    let mut lease = None;
    if driver.device.way == abi::WAY_VF {
        match hosted::open(&driver, device) {
            Ok(Opened::Hosted(c)) => return c,
            Ok(Opened::Soft(soft)) => lease = Some(soft),
            Err(e) => return null(e),
        }
    }
    // The vRNIC may have been made anew since the list was.
    let device = DeviceObj::of(&device.socket, device.number, driver.device.config.node_guid);
    let Ok(cmd) = Known::empty() else { return null(libc::EMFILE) };
    // SAFETY: all fields are integers, pointers, optional functions or zeroed pthread objects.
    let mut c: verbs_context = unsafe { std::mem::zeroed() };
    c.query_port = Some(query_port);
    c.query_device_ex = Some(query_device_ex);
    c.advise_mr = Some(crate::mr::advise_mr);
    c.alloc_dm = Some(crate::dm::alloc_dm);
    c.free_dm = Some(crate::dm::free_dm);
    c.reg_dm_mr = Some(crate::dm::reg_dm_mr);
    c.alloc_td = Some(crate::domain::alloc_td);
    c.dealloc_td = Some(crate::domain::dealloc_td);
    c.alloc_parent_domain = Some(crate::domain::alloc_parent_domain);
    c.alloc_null_mr = Some(crate::mr::alloc_null_mr);
    c.modify_cq = Some(crate::cq::modify_cq);
    c.query_rt_values = Some(crate::cq_ex::query_rt_values);
    c.create_cq_ex = Some(crate::cq_ex::create_cq_ex);
    c.get_srq_num = Some(crate::xrcd::get_srq_num);
    c.post_srq_ops = Some(crate::tm::post_srq_ops);
    c.create_srq_ex = Some(crate::xrcd::create_srq_ex);
    c.open_xrcd = Some(crate::xrcd::open_xrcd);
    c.close_xrcd = Some(crate::xrcd::close_xrcd);
    c.open_qp = Some(crate::xrcd::open_qp);
    c.modify_qp_rate_limit = Some(crate::qp::modify_qp_rate_limit);
    c.create_qp_ex = Some(crate::wr::create_qp_ex);
    c.sz = size_of::<verbs_context>();
    let ctx = &mut c.context;
    ctx.device = device.cast();
    ctx.ops._compat_query_device = Some(x_ibv_query_device);
    ctx.ops._compat_query_port = Some(compat_query_port);
    ctx.ops.alloc_mw = Some(crate::mw::alloc_mw);
    ctx.ops.bind_mw = Some(crate::mw::bind_mw);
    ctx.ops.dealloc_mw = Some(crate::mw::dealloc_mw);
    ctx.ops.poll_cq = Some(crate::cq::poll_cq);
    ctx.ops.req_notify_cq = Some(crate::cq::req_notify_cq);
    ctx.ops.post_send = Some(crate::qp::post_send);
    ctx.ops.post_recv = Some(crate::qp::post_recv);
    ctx.ops.post_srq_recv = Some(crate::srq::post_srq_recv);
    ctx.cmd_fd = cmd.as_raw_fd();
    ctx.async_fd = driver.async_fd();
    ctx.num_comp_vectors = 1;
    ctx.abi_compat = VERBS_ABI_IS_EXTENDED;
    let obj = Box::into_raw(Box::new(ContextObj {
        c,
        driver,
        _lease: lease,
        _cmd: cmd,
        cqs: Mutex::default(),
        qps: Mutex::default(),
        srqs: Mutex::default(),
        mrs: Mutex::default(),
        objects: AtomicUsize::new(0),
    }));
    // SAFETY: just allocated.
    unsafe { &raw mut (*obj).c.context }
}

pub unsafe extern "C" fn x_ibv_close_device(c: *mut ibv_context) -> i32 {
    return_if_hosted!(c, |e| code(Err(e)), |h| hosted::close(h));
    // SAFETY: the caller gives its context back.
    let ctx = unsafe { context(c) };
    let left = ctx.objects.load(Ordering::Relaxed);
    trace!("ibv_close_device(): {left} objects are left");
    // Some programs close a device before its objects, which they destroy afterwards. Then the context stays until the
    // process ends.
    if left == 0 {
        // SAFETY: it was boxed in ibv_open_device, and nothing refers to it any more.
        unsafe { drop(Box::from_raw(std::ptr::from_ref(ctx).cast_mut())) };
    }
    0
}

fn device_attr(d: &abi::QueryDeviceResp) -> ibv_device_attr {
    let c = &d.config;
    // SAFETY: integers and arrays of them only.
    let mut a: ibv_device_attr = unsafe { std::mem::zeroed() };
    a.fw_ver[..32].copy_from_slice(&d.fw_ver);
    a.node_guid = c.node_guid.to_be();
    a.sys_image_guid = c.sys_image_guid.to_be();
    a.max_mr_size = c.max_mr_size;
    a.page_size_cap = c.page_size_cap;
    a.vendor_id = c.vendor_id;
    a.vendor_part_id = c.vendor_part_id;
    a.hw_ver = c.hw_ver;
    let int = |v: u32| v.min(i32::MAX as u32) as i32;
    a.max_qp = int(c.max_qp);
    a.max_qp_wr = int(c.max_qp_wr);
    a.device_cap_flags = c.device_cap_flags as u32;
    // Verbs of user space have no fast registration. Programs read this flag to learn whether they may use LOCAL_INV
    // and SEND_WITH_INV (SPDK does, for one).
    if c.features & abi::FEATURE_INVALIDATE != 0 {
        a.device_cap_flags |= MEM_MGT_EXTENSIONS;
    }
    (a.max_sge, a.max_sge_rd) = (int(c.max_sge), int(d.max_sge_rd));
    a.max_cq = int(c.max_cq);
    a.max_cqe = int(c.max_cqe);
    (a.max_mr, a.max_mw) = (int(c.max_mr), int(d.max_mw));
    a.max_pd = int(c.max_pd);
    a.max_qp_rd_atom = int(c.max_qp_rd_atom);
    a.max_res_rd_atom = int(d.max_res_rd_atom);
    a.max_qp_init_rd_atom = int(d.max_qp_init_rd_atom);
    a.atomic_cap = c.atomic_cap.into();
    a.max_ah = int(c.max_ah);
    (a.max_srq, a.max_srq_wr, a.max_srq_sge) = (int(c.max_srq), int(d.max_srq_wr), int(d.max_srq_sge));
    (a.max_mcast_grp, a.max_mcast_qp_attach) = (int(c.max_mcast_grp), int(c.max_mcast_qp_attach));
    a.max_total_mcast_qp_attach = int(d.max_total_mcast_qp_attach);
    a.max_pkeys = c.max_pkeys;
    a.local_ca_ack_delay = c.local_ca_ack_delay;
    a.phys_port_cnt = c.phys_port_cnt;
    a
}

pub unsafe extern "C" fn x_ibv_query_device(c: *mut ibv_context, attr: *mut ibv_device_attr) -> i32 {
    trace!("ibv_query_device()");
    return_if_hosted!(c, |e| code(Err(e)), |h| hosted::query_device(&h, attr));
    // SAFETY: the caller passes its context and room for the attributes.
    unsafe { *attr = device_attr(&context(c).driver.device) };
    0
}

const MEM_MGT_EXTENSIONS: u32 = 1 << 21;
const ODP_SUPPORT: u64 = 1;
const ODP_IMPLICIT: u64 = 2;
/// SEND 1, RECV 2, WRITE 4, READ 8, ATOMIC 16, SRQ_RECV 32, FLUSH 64, ATOMIC_WRITE 128.
const ODP_RC: u32 = 0xff;
const ODP_UC: u32 = 0x27;
const ODP_UD: u32 = 0x23;

unsafe extern "C" fn query_device_ex(
    c: *mut ibv_context,
    input: *const c_void,
    attr: *mut ibv_device_attr_ex,
    size: usize,
) -> i32 {
    trace!("ibv_query_device_ex(size {size})");
    // SAFETY: input is NULL or a structure that begins with its comp_mask.
    if !input.is_null() && unsafe { *input.cast::<u32>() } != 0 {
        return libc::EINVAL;
    }
    if size < size_of::<ibv_device_attr>() {
        return libc::EINVAL;
    }
    // SAFETY: integers only.
    let mut a: ibv_device_attr_ex = unsafe { std::mem::zeroed() };
    // SAFETY: the caller passes its context and `size` bytes of room.
    unsafe {
        let device = &context(c).driver.device;
        a.orig_attr = device_attr(device);
        a.phys_port_cnt_ex = a.orig_attr.phys_port_cnt.into();
        a.device_cap_flags_ex = device.config.device_cap_flags | u64::from(a.orig_attr.device_cap_flags);
        // On-demand paging is possible with all operations of RC, UC and UD, because each access of such an MR looks
        // its pages up.
        a.odp_general_caps = ODP_SUPPORT | ODP_IMPLICIT;
        a.odp_per_transport = [ODP_RC, ODP_UC, ODP_UD];
        a.xrc_odp_caps = ODP_RC;
        a.tm_caps = crate::tm::CAPS;
        a.max_dm_size = crate::dm::MAX_BYTES;
        a.packet_pacing_caps = [1, u32::MAX, device.rate_limit_qp_types];
        a.cq_mod_caps = [device.max_cq_count, device.max_cq_period_us];
        // Completions carry nanoseconds.
        (a.completion_timestamp_mask, a.hca_core_clock) = (u64::MAX, 1_000_000);
        let n = size.min(size_of::<ibv_device_attr_ex>());
        std::ptr::copy_nonoverlapping(std::ptr::from_ref(&a).cast::<u8>(), attr.cast::<u8>(), n);
    }
    0
}

unsafe extern "C" fn query_port(c: *mut ibv_context, port: u8, attr: *mut ibv_port_attr, size: usize) -> i32 {
    trace!("ibv_query_port({port})");
    // SAFETY: the caller passes its context.
    let ctx = unsafe { context(c) };
    let resp: Result<abi::QueryPortResp, i32> =
        ctx.driver.command(Command::QueryPort, &abi::QueryPortReq { port: port.into(), reserved: 0 });
    let p = match resp {
        Ok(p) => p,
        Err(e) => return code(Err(e)),
    };
    let a = ibv_port_attr {
        state: p.state.into(),
        max_mtu: p.max_mtu.into(),
        active_mtu: p.active_mtu.into(),
        gid_tbl_len: p.gid_tbl_len as i32,
        port_cap_flags: p.port_cap_flags,
        max_msg_sz: p.max_msg_sz,
        bad_pkey_cntr: p.bad_pkey_cntr,
        qkey_viol_cntr: p.qkey_viol_cntr,
        pkey_tbl_len: p.pkey_tbl_len,
        max_vl_num: 1,
        active_width: p.active_width,
        active_speed: p.active_speed as u8,
        phys_state: p.phys_state,
        link_layer: p.link_layer,
        ..ibv_port_attr::default()
    };
    // SAFETY: the caller passes `size` bytes of room; a client of an older version has less.
    unsafe {
        std::ptr::copy_nonoverlapping(
            std::ptr::from_ref(&a).cast::<u8>(),
            attr.cast::<u8>(),
            size.min(size_of::<ibv_port_attr>()),
        )
    };
    0
}

/// Bytes of `struct ibv_port_attr` before extended operations existed.
const COMPAT_PORT_ATTR: usize = 48;

unsafe extern "C" fn compat_query_port(c: *mut ibv_context, port: u8, attr: *mut ibv_port_attr) -> i32 {
    // SAFETY: as query_port; the caller's structure has that many bytes.
    unsafe { query_port(c, port, attr, COMPAT_PORT_ATTR) }
}

pub unsafe extern "C" fn x_ibv_query_port(c: *mut ibv_context, port: u8, attr: *mut ibv_port_attr) -> i32 {
    return_if_hosted!(c, |e| code(Err(e)), |h| hosted::query_port(&h, port, attr));
    // SAFETY: as query_port.
    unsafe { query_port(c, port, attr, COMPAT_PORT_ATTR) }
}

pub(crate) fn gid(session: &driver::Context, port: u32, index: i32) -> Result<[u8; 16], i32> {
    let index = u32::try_from(index).map_err(|_| libc::EINVAL)?;
    session.command(Command::QueryGid, &abi::QueryGidReq { port, index }).map(|r: abi::QueryGidResp| r.gid)
}

pub unsafe extern "C" fn x_ibv_query_gid(c: *mut ibv_context, port: u8, index: i32, out: *mut ibv_gid) -> i32 {
    trace!("ibv_query_gid({port}, {index})");
    // SAFETY: the caller passes its context and room for a GID.
    match unsafe { session(c) }.and_then(|s| gid(&s, port.into(), index)) {
        Ok(raw) => {
            // SAFETY: as above.
            unsafe { *out = ibv_gid { raw } };
            0
        }
        Err(e) => {
            set_errno(e);
            -1
        }
    }
}

pub unsafe extern "C" fn x_ibv_query_gid_type(c: *mut ibv_context, port: u8, index: u32, out: *mut u32) -> i32 {
    // SAFETY: the caller passes its context.
    match unsafe { session(c) }.and_then(|s| gid(&s, port.into(), index as i32)) {
        Ok(_) => {
            // IBV_GID_TYPE_SYSFS_ROCE_V2 of the private interface.
            // SAFETY: room for the type.
            unsafe { *out = 1 };
            0
        }
        Err(e) => {
            set_errno(e);
            -1
        }
    }
}

fn gid_entry(ctx: &driver::Context, port: u32, index: u32, interfaces: &Interfaces) -> Result<ibv_gid_entry, i32> {
    let raw = gid(ctx, port, index as i32)?;
    if raw == [0; 16] {
        return Err(libc::ENODATA);
    }
    let ndev_ifindex = interfaces.of(ctx, &raw);
    Ok(ibv_gid_entry { gid: ibv_gid { raw }, gid_index: index, port_num: port, gid_type: 2, ndev_ifindex })
}

/// The addresses of this network namespace, as GIDs, and the indices of the interfaces that have them.
struct Interfaces(Vec<([u8; 16], u32)>);

impl Interfaces {
    fn read() -> Self {
        let mut all = Vec::new();
        let mut list: *mut libc::ifaddrs = std::ptr::null_mut();
        // SAFETY: room for the list.
        if unsafe { libc::getifaddrs(&mut list) } != 0 {
            return Interfaces(all);
        }
        let mut at = list;
        // SAFETY: the list ends with NULL; each entry has a name, and an address or NULL.
        while let Some(i) = unsafe { at.as_ref() } {
            at = i.ifa_next;
            // SAFETY: an address as long as its family's, or NULL. Other families than IP are errors.
            if let Ok(a) = unsafe { crate::rdmacm::address::read(i.ifa_addr) }
                && a.family != 0
            {
                // SAFETY: the entry's name.
                let index = unsafe { libc::if_nametoindex(i.ifa_name) };
                all.push((crate::rdmacm::address::gid(&a), index));
            }
        }
        // SAFETY: from getifaddrs, and not used any more.
        unsafe { libc::freeifaddrs(list) };
        Interfaces(all)
    }

    fn find(&self, gid: &[u8; 16]) -> Option<u32> {
        self.0.iter().find(|(g, _)| g == gid).map(|&(_, index)| index)
    }

    /// The interface that has a GID's address; 0 if there is none. A link-local GID belongs to the interface of the
    /// port's first GID, even if IPv6 is off there.
    fn of(&self, ctx: &driver::Context, raw: &[u8; 16]) -> u32 {
        let first = || {
            let link_local = raw[0] == 0xfe && raw[1] & 0xc0 == 0x80;
            gid(ctx, 1, 0).ok().filter(|_| link_local).and_then(|g| self.find(&g))
        };
        self.find(raw).or_else(first).unwrap_or(0)
    }
}

pub unsafe extern "C" fn x__ibv_query_gid_ex(
    c: *mut ibv_context,
    port: u32,
    index: u32,
    entry: *mut ibv_gid_entry,
    flags: u32,
    size: usize,
) -> i32 {
    trace!("ibv_query_gid_ex({port}, {index})");
    if flags != 0 {
        return libc::EOPNOTSUPP;
    }
    // SAFETY: the caller passes its context and `size` bytes of room.
    match unsafe { session(c) }.and_then(|s| gid_entry(&s, port, index, &Interfaces::read())) {
        Ok(e) => {
            let n = size.min(size_of::<ibv_gid_entry>());
            // SAFETY: as above.
            unsafe { std::ptr::copy_nonoverlapping(std::ptr::from_ref(&e).cast::<u8>(), entry.cast::<u8>(), n) };
            0
        }
        Err(e) => code(Err(e)),
    }
}

pub unsafe extern "C" fn x__ibv_query_gid_table(
    c: *mut ibv_context,
    out: *mut ibv_gid_entry,
    max: usize,
    flags: u32,
    size: usize,
) -> isize {
    trace!("ibv_query_gid_table(max {max})");
    if flags != 0 {
        return -(libc::EOPNOTSUPP as isize);
    }
    if size < size_of::<ibv_gid_entry>() {
        return -(libc::EINVAL as isize);
    }
    // SAFETY: the caller passes its context.
    let ctx = match unsafe { session(c) } {
        Ok(s) => s,
        Err(e) => return -(e as isize),
    };
    let interfaces = Interfaces::read();
    let mut n = 0;
    for index in 0.. {
        let e = match gid_entry(&ctx, 1, index, &interfaces) {
            Ok(e) => e,
            // An address that was removed leaves a hole.
            Err(libc::ENODATA) => continue,
            Err(_) => break,
        };
        if n == max {
            return -(libc::EINVAL as isize);
        }
        // SAFETY: room for `max` entries of `size` bytes.
        unsafe { out.cast::<u8>().add(n * size).cast::<ibv_gid_entry>().write_unaligned(e) };
        n += 1;
    }
    n as isize
}

pub unsafe extern "C" fn x_ibv_query_pkey(c: *mut ibv_context, port: u8, index: i32, out: *mut u16) -> i32 {
    trace!("ibv_query_pkey({port}, {index})");
    let req = abi::QueryPkeyReq { port: port.into(), index: u16::try_from(index).unwrap_or(u16::MAX), reserved: 0 };
    // SAFETY: the caller passes its context.
    let r: Result<abi::QueryPkeyResp, i32> = unsafe { session(c) }.and_then(|s| s.command(Command::QueryPkey, &req));
    match r {
        Ok(r) => {
            // SAFETY: room for a P_Key, which is big-endian.
            unsafe { *out = r.pkey.to_be() };
            0
        }
        Err(e) => {
            set_errno(e);
            -1
        }
    }
}

pub unsafe extern "C" fn x_ibv_get_pkey_index(c: *mut ibv_context, port: u8, pkey: u16) -> i32 {
    let mut found = 0;
    // SAFETY: as ibv_query_pkey.
    if unsafe { x_ibv_query_pkey(c, port, 0, &raw mut found) } == 0 && found == pkey { 0 } else { -1 }
}

/// Always `/sys`; rdma-core lets the environment name another directory.
pub extern "C" fn x_ibv_get_sysfs_path() -> *const c_char {
    c"/sys".as_ptr()
}

/// Contents of the few files that programs read through the library; -1 for other files.
pub unsafe extern "C" fn x_ibv_read_sysfs_file(
    dir: *const c_char,
    file: *const c_char,
    buf: *mut c_char,
    size: usize,
) -> i32 {
    // SAFETY: the caller passes two strings.
    let (dir, file) = unsafe { (CStr::from_ptr(dir), CStr::from_ptr(file)) };
    let text: &str = match file.to_bytes() {
        b"board_id" => "uniRDMA vRNIC",
        b"fw_ver" => env!("CARGO_PKG_VERSION"),
        b"node_type" => "1: CA",
        _ => return -1,
    };
    trace!("ibv_read_sysfs_file({dir:?}, {file:?})");
    let n = text.len().min(size.saturating_sub(1));
    if size > 0 {
        // SAFETY: room for `size` bytes.
        unsafe {
            std::ptr::copy_nonoverlapping(text.as_ptr(), buf.cast::<u8>(), n);
            *buf.add(n) = 0;
        }
    }
    n as i32
}

/// Needs no address resolution: the virtual layer finds the peer by its GID.
pub unsafe extern "C" fn x_ibv_resolve_eth_l2_from_gid(
    c: *mut ibv_context,
    attr: *mut ibv_ah_attr,
    mac: *mut u8,
    vid: *mut u16,
) -> i32 {
    // SAFETY: the caller passes its context and attributes.
    if let Some(h) = unsafe { hosted::of(c) } {
        // SAFETY: as above.
        return unsafe { hosted::resolve_mac(&h, &*attr, mac, vid) };
    }
    // SAFETY: as above.
    unsafe { no_mac(mac, vid) };
    0
}

/// The answer that stands for any MAC.
///
/// # Safety
/// Room for a MAC and, unless NULL, a VLAN ID.
pub(crate) unsafe fn no_mac(mac: *mut u8, vid: *mut u16) {
    // SAFETY: by the contract.
    unsafe {
        std::ptr::write_bytes(mac, 0, 6);
        if !vid.is_null() {
            *vid = 0xffff;
        }
    }
}
