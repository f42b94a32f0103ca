//! `libunirdma-rdmav34.so`: the provider by which rdma-core's libibverbs uses a vRNIC in a virtual machine.
//!
//! Control commands go through libibverbs to the kernel driver, which makes the rings; posting and polling never enter
//! the kernel. The provider knows the private interface of rdma-core 44 to 56, the rings of `mem` and `queues`, and the
//! structures of libibverbs. It must never unwind or abort: answers of the kernel are checked before they are used, and
//! everything fails with an errno.
//!
//! Locks belong to queues: each SQ, RQ, SRQ and CQ has one. A thread takes the lock of a QP's SQ first, then its RQ's,
//! then a CQ's. A command that changes a queue is made with the lock of that queue, and so is the command that wakes
//! the device for a post.
#![allow(missing_docs)]

mod ah;
mod context;
mod cq;
mod domain;
mod ibverbs;
mod kernel;
mod memory;
mod mr;
mod mw;
mod qp;
mod srq;
mod xrc;

use ibverbs::*;

/// Patterns of our devices. The kernel driver has no driver ID of its own by which libibverbs would recognize them. The
/// parent of the RDMA device in sysfs is the virtio device or its PCI function; the last pattern is the device's name,
/// if udev has not changed it.
static MATCHES: [verbs_match_ent; 4] = [
    verbs_match_ent::modalias(c"virtio:d0000002Av*"),
    verbs_match_ent::pci(0x1af4, 0x106a),
    verbs_match_ent::modalias(c"rdma_device:*Nunirdma*"),
    verbs_match_ent::END,
];

static DEVICE: verbs_device_ops = verbs_device_ops {
    name: c"unirdma".as_ptr(),
    match_min_abi_version: 1,
    match_max_abi_version: 1,
    match_table: MATCHES.as_ptr(),
    static_providers: std::ptr::null(),
    match_device: None,
    alloc_context: context::alloc_context,
    import_context: None,
    alloc_device: context::alloc_device,
    uninit_device: context::uninit_device,
};

/// Runs when libibverbs loads the provider.
#[used]
#[unsafe(link_section = ".init_array")]
static LOADED: extern "C" fn() = {
    extern "C" fn loaded() {
        // SAFETY: the table lives as long as the library, which is never unloaded.
        unsafe { verbs_register_driver_34(&DEVICE) }
    }
    loaded
};

/// The functions of a context.
static OPERATIONS: verbs_context_ops = verbs_context_ops {
    alloc_mw: Some(mw::alloc),
    alloc_parent_domain: Some(domain::alloc_parent_domain),
    alloc_pd: Some(domain::alloc_pd),
    alloc_td: Some(domain::alloc_td),
    async_event: Some(context::async_event),
    attach_mcast: Some(ibv_cmd_attach_mcast),
    bind_mw: Some(mw::bind),
    close_xrcd: Some(xrc::close),
    create_ah: Some(ah::create),
    create_cq: Some(cq::create),
    create_cq_ex: Some(cq::create_ex),
    create_qp: Some(qp::create),
    create_qp_ex: Some(qp::create_ex),
    create_srq: Some(srq::create),
    create_srq_ex: Some(srq::create_ex),
    dealloc_mw: Some(mw::dealloc),
    dealloc_pd: Some(domain::dealloc_pd),
    dealloc_td: Some(domain::dealloc_td),
    dereg_mr: Some(mr::dereg),
    destroy_ah: Some(ah::destroy),
    destroy_cq: Some(cq::destroy),
    destroy_qp: Some(qp::destroy),
    destroy_srq: Some(srq::destroy),
    detach_mcast: Some(ibv_cmd_detach_mcast),
    free_context: Some(context::free_context),
    get_srq_num: Some(srq::number),
    modify_cq: Some(cq::modify),
    modify_qp: Some(qp::modify),
    modify_srq: Some(srq::modify),
    open_qp: Some(qp::open),
    open_xrcd: Some(xrc::open),
    poll_cq: Some(cq::poll),
    post_recv: Some(qp::post_recv),
    post_send: Some(qp::post_send),
    post_srq_recv: Some(srq::post_recv),
    query_device_ex: Some(context::query_device_ex),
    query_port: Some(context::query_port),
    query_qp: Some(qp::query),
    query_rt_values: Some(context::query_rt_values),
    query_srq: Some(srq::query),
    reg_mr: Some(mr::reg),
    req_notify_cq: Some(cq::req_notify),
    rereg_mr: Some(mr::rereg),
    resize_cq: Some(cq::resize),
    ..verbs_context_ops::NONE
};

/// NULL, after setting errno.
fn null<T>(e: i32) -> *mut T {
    code(Err(e));
    std::ptr::null_mut()
}

/// The errno value that most operations return, also put into errno.
fn code(r: Result<(), i32>) -> i32 {
    match r {
        Ok(()) => 0,
        Err(e) => {
            // SAFETY: the location is this thread's own.
            unsafe { *libc::__errno_location() = e };
            e
        }
    }
}

/// The result of a command of libibverbs, which is 0 or an errno value.
fn done(r: i32) -> Result<(), i32> {
    if r == 0 { Ok(()) } else { Err(r) }
}
