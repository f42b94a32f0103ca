//! The operations of the built library, with `kernel.c` in the place of libibverbs and the kernel. The test plays the
//! device: it maps the same memory. There is one test, because the library has one kernel.

mod common;

use std::ffi::{CString, c_void};
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::ptr::null_mut;

use unirdma_abi as abi;
use unirdma_formats::{WrOpcode, attr_mask, send_flags};
use unirdma_mem::{Bell, CqRing, QpRings, Span, map_device};
use unirdma_verbs_abi::*;

#[allow(dead_code, missing_docs)]
#[path = "../src/ibverbs.rs"]
mod ibverbs;
#[allow(dead_code, missing_docs)]
#[path = "../src/kernel.rs"]
mod kernel;

use ibverbs::{verbs_context_ops, verbs_device_ops, verbs_mr};

/// The stand-in for the kernel.
struct Kernel(*mut c_void);

impl Kernel {
    /// One of its variables.
    fn at<T>(&self, name: &str) -> *mut T {
        let name = CString::new(format!("fake_{name}")).unwrap();
        // SAFETY: a name, looked up in a library that is loaded.
        let p = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        assert!(!p.is_null());
        p.cast()
    }

    fn get(&self, name: &str) -> i32 {
        // SAFETY: an int of the library; there is one thread.
        unsafe { *self.at(name) }
    }

    fn set(&self, name: &str, v: i32) {
        // SAFETY: as above.
        unsafe { *self.at(name) = v }
    }

    /// Maps the last area that the process was given.
    fn area(&self, len: u64) -> Span {
        let n = self.get("num_areas") as usize;
        // SAFETY: the descriptor and the offsets of the areas so far.
        unsafe {
            let offset = *self.at::<u64>("areas").add(n - 1);
            map_device(BorrowedFd::borrow_raw(self.get("fd")), offset, len).unwrap()
        }
    }
}

fn errno() -> i32 {
    // SAFETY: this thread's own.
    unsafe { *libc::__errno_location() }
}

/// The rings of the QP that was made last.
fn device_qp(k: &Kernel) -> QpRings {
    let layout = abi::QpLayout { sq_entries: 16, sq_stride: 192, rq_entries: 16, rq_stride: 80 };
    let area = k.area(3 * 4096);
    let part = |at, len: usize| area.sub(at, len as u64).unwrap();
    QpRings::new(part(0, 128), part(4096, layout.sq_bytes()), part(8192, layout.rq_bytes()), layout).unwrap()
}

/// The ring of the CQ that was made last.
fn device_cq(k: &Kernel, entries: u32) -> CqRing {
    let area = k.area(4096 + u64::from(entries) * 64);
    CqRing::new(area.sub(0, 128).unwrap(), area.sub(4096, u64::from(entries) * 64).unwrap(), entries).unwrap()
}

fn send(opcode: WrOpcode, list: &mut [ibv_sge]) -> ibv_send_wr {
    // SAFETY: integers, pointers and unions of them.
    let mut wr: ibv_send_wr = unsafe { std::mem::zeroed() };
    (wr.opcode, wr.sg_list, wr.num_sge) = (opcode as u32, list.as_mut_ptr(), list.len() as i32);
    wr
}

#[test]
fn a_program_can_do_all_that_the_kernel_allows() {
    let out = Path::new(env!("CARGO_TARGET_TMPDIR")).join("libibverbs.so.1");
    let map = out.with_file_name("kernel.map");
    std::fs::write(&map, "IBVERBS_PRIVATE_34 { global: *; };\n").unwrap();
    let script = format!("-Wl,--version-script={}", map.display());
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/kernel.c");
    if !common::compile(&["-shared", "-Wl,-soname,libibverbs.so.1", &script], &source, &out) {
        return;
    }
    let k = Kernel(common::load(&out).unwrap());
    common::load(&common::provider()).unwrap();
    // SAFETY: the provider has registered its table, and the calls below are made as libibverbs makes them, with
    // objects of the test.
    unsafe { play(&k) }
}

/// # Safety
/// The provider is loaded.
unsafe fn play(k: &Kernel) {
    // SAFETY: by the contract, and as the manual pages demand: all objects are the test's and live as long as they are
    // used.
    unsafe {
        let device = &**k.at::<*const verbs_device_ops>("device_ops");
        assert_eq!(std::ffi::CStr::from_ptr(device.name), c"unirdma");
        let dev = (device.alloc_device)(null_mut());

        // The first context fails, and leaves nothing behind.
        k.set("errno", libc::ENODEV);
        assert!((device.alloc_context)(dev.cast(), -1, null_mut()).is_null());
        assert_eq!((errno(), k.get("destroyed")), (libc::ENODEV, 1));
        let ctx = &raw mut (*(device.alloc_context)(dev.cast(), -1, null_mut())).context;
        let bell = Bell::new(k.area(4096)).unwrap();
        let ops = &**k.at::<*const verbs_context_ops>("context_ops");

        let mut attr: ibv_device_attr_ex = std::mem::zeroed();
        assert_eq!(ops.query_device_ex.unwrap()(ctx, null_mut(), &mut attr, size_of_val(&attr)), 0);
        assert_eq!((&attr.orig_attr.fw_ver[..6], attr.orig_attr.max_qp), (&b"1.2.3\0"[..], 17));
        let mut port = ibv_port_attr::default();
        assert_eq!((ops.query_port.unwrap()(ctx, 1, &mut port), port.lid), (0, 1));

        let pd = ops.alloc_pd.unwrap()(ctx);
        let mr = ops.reg_mr.unwrap()(pd, null_mut(), 10, 0, 7).cast::<verbs_mr>();
        assert_eq!(((*mr).ibv_mr.lkey, (*mr).access), (0x55, 7));
        k.set("errno", libc::ENOMEM);
        assert!(ops.reg_mr.unwrap()(pd, null_mut(), 10, 0, 7).is_null() && errno() == libc::ENOMEM);

        // Answers that make no sense are refused, and the objects that the kernel has made are destroyed.
        let gone = k.get("destroyed");
        k.set("nonsense", 1);
        let (create_cq, create_qp) = (ops.create_cq.unwrap(), ops.create_qp.unwrap());
        assert!(create_cq(ctx, 10, null_mut(), 0).is_null() && errno() == libc::EPROTO);
        k.set("nonsense", 0);
        let cq = create_cq(ctx, 10, null_mut(), 0);
        let mut cq_device = device_cq(k, 16);
        let mut init: ibv_qp_init_attr = std::mem::zeroed();
        (init.send_cq, init.recv_cq, init.qp_type) = (cq, cq, 2);
        k.set("nonsense", 1);
        assert!(create_qp(pd, &mut init).is_null() && errno() == libc::EPROTO);
        k.set("nonsense", 0);
        assert_eq!(k.get("destroyed"), gone + 2);
        init.qp_type = 8;
        assert!(create_qp(pd, &mut init).is_null() && errno() == libc::EOPNOTSUPP);
        init.qp_type = 2;
        let qp = create_qp(pd, &mut init);
        let rings = device_qp(k);
        assert_eq!(init.cap.max_inline_data, 128);

        // Posting: nothing may be posted in the first states.
        let mut bad = null_mut();
        let mut list = [ibv_sge { addr: 0x10, length: 5, lkey: 6 }];
        let mut wr = send(WrOpcode::Write, &mut list);
        let (post_send, post_recv) = (ops.post_send.unwrap(), ops.post_recv.unwrap());
        assert_eq!((post_send(qp, &mut wr, &mut bad), bad), (libc::EINVAL, &raw mut wr));
        (*qp).state = 3;
        assert!(bell.park(false));
        assert_eq!(post_send(qp, &mut wr, &mut bad), 0);
        assert_eq!((rings.sq_pending(0), k.get("notified")), (Ok(1), 1), "a device that sleeps is woken");
        bell.unpark();
        let mut rung = vec![];
        assert_eq!(bell.take_words(), 1 << (70 / 64));
        bell.take_bits(70 / 64, |s| rung.push(s));
        assert_eq!(rung, [70]);
        assert_eq!(post_send(qp, &mut wr, &mut bad), 0);
        assert_eq!((rings.sq_pending(0), k.get("notified")), (Ok(2), 1), "one that polls is not");
        let mut recv = ibv_recv_wr { wr_id: 8, next: null_mut(), sg_list: list.as_mut_ptr(), num_sge: 1 };
        assert_eq!(post_recv(qp, &mut recv, null_mut()), 0);
        assert_eq!((rings.rq_pending(0), rings.rq_head(0).wr_id), (Ok(1), 8));
        let long = [0u8; 129];
        let mut inline = [ibv_sge { addr: long.as_ptr() as u64, length: 129, lkey: 0 }];
        let mut too_long = send(WrOpcode::Send, &mut inline);
        too_long.send_flags = send_flags::INLINE;
        assert_eq!((post_send(qp, &mut too_long, &mut bad), bad), (libc::EINVAL, &raw mut too_long));
        let mut five = [list[0]; 5];
        assert_eq!(post_send(qp, &mut send(WrOpcode::Send, &mut five), &mut bad), libc::EINVAL);
        for i in 2..17 {
            assert_eq!(post_send(qp, &mut wr, &mut bad), if i < 16 { 0 } else { libc::ENOMEM });
        }

        // Polling, also after a resize, and of a QP that is reset.
        let poll = ops.poll_cq.unwrap();
        let mut wc = [ibv_wc::default(); 4];
        let qp_num = (*qp).qp_num;
        let cqe = |wr_id| abi::Cqe { wr_id, qp_num, ..Default::default() };
        (1..4).for_each(|i| cq_device.push(cqe(i)).unwrap());
        assert_eq!((poll(cq, 1, wc.as_mut_ptr()), wc[0].wr_id, wc[0].qp_num), (1, 1, qp_num));
        assert_eq!(ops.resize_cq.unwrap()(cq, 1), libc::EINVAL, "two wait");
        assert_eq!((ops.resize_cq.unwrap()(cq, 20), (*cq).cqe), (0, 32));
        let mut cq_device = device_cq(k, 32);
        cq_device.push(cqe(4)).unwrap();
        assert_eq!(poll(cq, 4, wc.as_mut_ptr()), 3);
        assert_eq!(wc[..3].iter().map(|w| w.wr_id).collect::<Vec<_>>(), [2, 3, 4]);
        assert!(!cq_device.take_event(true));
        assert_eq!(ops.req_notify_cq.unwrap()(cq, 0), 0);
        assert!(cq_device.take_event(false));
        cq_device.push(cqe(5)).unwrap();
        let mut reset: ibv_qp_attr = std::mem::zeroed();
        assert_eq!(ops.modify_qp.unwrap()(qp, &mut reset, attr_mask::STATE as i32), 0);
        assert_eq!(poll(cq, 4, wc.as_mut_ptr()), 0, "a QP that starts over has no completions");
        assert_eq!((rings.sq_pending(0), rings.rq_pending(0)), (Ok(0), Ok(0)));

        // A datagram names the AH by the device's handle.
        let ah = ops.create_ah.unwrap()(pd, &mut std::mem::zeroed());
        init.qp_type = 4;
        let ud = create_qp(pd, &mut init);
        let ud_rings = device_qp(k);
        (*ud).state = 3;
        let mut wr = send(WrOpcode::Send, &mut list);
        wr.wr.ud = ibv_send_wr_ud { ah, remote_qpn: 1, remote_qkey: 2 };
        assert_eq!(post_send(ud, &mut wr, &mut bad), 0);
        assert_eq!((ud_rings.sq_head(0).ah, (*ah).handle), (0x77, 1));
        assert_eq!(ops.destroy_ah.unwrap()(ah), 0);

        // A destroyed QP leaves no completions.
        let gone = (*ud).qp_num;
        cq_device.push(abi::Cqe { qp_num: gone, ..Default::default() }).unwrap();
        cq_device.push(cqe(6)).unwrap();
        k.set("errno", libc::EBUSY);
        assert_eq!(ops.destroy_qp.unwrap()(ud), libc::EBUSY);
        assert_eq!(ops.destroy_qp.unwrap()(ud), 0);
        assert_eq!((poll(cq, 4, wc.as_mut_ptr()), wc[0].wr_id), (1, 6));

        // Shared receives.
        let mut srq_init = ibv_srq_init_attr { srq_context: null_mut(), attr: ibv_srq_attr::default() };
        srq_init.attr.max_sge = 9;
        let srq = ops.create_srq.unwrap()(pd, &mut srq_init);
        assert_eq!((srq_init.attr.max_wr, srq_init.attr.max_sge), (4, 2), "as many SGEs as a slot has room for");
        for i in 0..5 {
            let r = ops.post_srq_recv.unwrap()(srq, &mut recv, null_mut());
            assert_eq!(r, if i < 4 { 0 } else { libc::ENOMEM });
        }
        // The new ring has the indices of the first, and more room.
        srq_init.attr.max_wr = 8;
        let modify_srq = ops.modify_srq.unwrap();
        assert_eq!(modify_srq(srq, &mut srq_init.attr, 4), libc::EINVAL);
        k.set("errno", libc::ENOMEM);
        assert_eq!(modify_srq(srq, &mut srq_init.attr, 3), libc::ENOMEM);
        assert_eq!(ops.post_srq_recv.unwrap()(srq, &mut recv, null_mut()), libc::ENOMEM, "it is as large as before");
        assert_eq!(modify_srq(srq, &mut srq_init.attr, 3), 0);
        for i in 0..5 {
            let r = ops.post_srq_recv.unwrap()(srq, &mut recv, null_mut());
            assert_eq!(r, if i < 4 { 0 } else { libc::ENOMEM });
        }
        init.srq = srq;
        init.qp_type = 2;
        let with_srq = create_qp(pd, &mut init);
        (*with_srq).state = 3;
        assert_eq!(post_recv(with_srq, &mut recv, null_mut()), libc::EINVAL);
        assert_eq!(ops.destroy_qp.unwrap()(with_srq), 0);
        assert_eq!(ops.destroy_srq.unwrap()(srq), 0);

        play_extended(k, ops, ctx, pd);
        play_xrc(k, ops, ctx, pd);
        play_windows(k, ops, pd, qp);

        // The device is gone, and the program was told.
        let mut fatal = ibv_async_event { element: null_mut(), event_type: 8 };
        ops.async_event.unwrap()(ctx, &mut fatal);
        (*qp).state = 3;
        assert_eq!(post_send(qp, &mut send(WrOpcode::Send, &mut list), &mut bad), libc::EIO);
        assert_eq!(post_recv(qp, &mut recv, null_mut()), libc::EIO);
        assert_eq!(poll(cq, 1, wc.as_mut_ptr()), -1);

        assert_eq!(ops.destroy_qp.unwrap()(qp), 0);
        assert_eq!(ops.destroy_cq.unwrap()(cq), 0);
        assert_eq!((ops.dereg_mr.unwrap()(mr), ops.dealloc_pd.unwrap()(pd)), (0, 0));
        ops.free_context.unwrap()(ctx);
        (device.uninit_device)(dev);
    }
}

/// The extended CQ and QP.
///
/// # Safety
/// As of [`play`].
unsafe fn play_extended(k: &Kernel, ops: &verbs_context_ops, ctx: *mut ibv_context, pd: *mut ibv_pd) {
    // SAFETY: as in `play`.
    unsafe {
        let mut init: ibv_cq_init_attr_ex = std::mem::zeroed();
        (init.cqe, init.wc_flags) = (8, 1 << 12);
        let create = ops.create_cq_ex.unwrap();
        assert!(create(ctx, &mut init).is_null() && errno() == libc::EOPNOTSUPP, "tag matching");
        init.wc_flags = 0xff | 1 << 10 | 1 << 11;
        // A parent domain whose queues one thread uses.
        let mut parent = ibv_parent_domain_init_attr {
            pd,
            td: ops.alloc_td.unwrap()(ctx, &mut 0),
            comp_mask: 0,
            alloc: null_mut(),
            free: null_mut(),
            pd_context: null_mut(),
        };
        let domain = ops.alloc_parent_domain.unwrap()(ctx, &mut parent);
        assert_eq!(ops.dealloc_td.unwrap()(parent.td), libc::EBUSY);
        (init.comp_mask, init.parent_domain) = (2, domain);
        let cq = create(ctx, &mut init);
        assert!(!cq.is_null(), "errno {}", errno());
        let mut moderation = ibv_modify_cq_attr { attr_mask: 1, cq_count: 2, cq_period: 3 };
        assert_eq!(ops.modify_cq.unwrap()(cq.cast(), &mut moderation), 0);
        let mut device = device_cq(k, 8);
        device.push(abi::Cqe { wr_id: 4, byte_len: 9, timestamp: 1 << 40, ..Default::default() }).unwrap();
        assert_eq!((*cq).start_poll.unwrap()(cq, &mut ibv_poll_cq_attr { comp_mask: 0 }), 0);
        assert_eq!(((*cq).wr_id, (*cq).read_byte_len.unwrap()(cq)), (4, 9));
        assert_eq!((*cq).read_completion_ts.unwrap()(cq), 1 << 40);
        // The device's clock was at 5 << 32 | 7 when the CQ was made, by its own time.
        let mut values: ibv_values_ex = std::mem::zeroed();
        values.comp_mask = 3;
        assert_eq!((ops.query_rt_values.unwrap()(ctx, &mut values), values.comp_mask), (0, 1));
        assert_eq!(values.raw_clock.tv_nsec, 5 << 32 | 7);
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_nanos() as u64;
        let written = (*cq).read_completion_wallclock_ns.unwrap()(cq) - (1 << 40) + (5 << 32 | 7);
        assert!(now - written < 60_000_000_000, "{now} {written}");
        assert_eq!((*cq).next_poll.unwrap()(cq), libc::ENOENT);
        (*cq).end_poll.unwrap()(cq);

        let mut init: ibv_qp_init_attr_ex = std::mem::zeroed();
        (init.send_cq, init.recv_cq, init.qp_type, init.pd) = (cq.cast(), cq.cast(), 3, pd);
        (init.comp_mask, init.send_ops_flags) = (1 | 1 << 6, 1 << 4);
        let create = ops.create_qp_ex.unwrap();
        assert!(create(ctx, &mut init).is_null() && errno() == libc::EOPNOTSUPP, "UC does not read");
        init.send_ops_flags = 1 << 2 | 1;
        let qp = create(ctx, &mut init);
        let rings = device_qp(k);
        // The places of the mask in versions 44 and 56 of libibverbs.
        let mask = |at| *qp.cast::<u8>().add(at).cast::<u32>();
        assert_eq!((mask(352), mask(360)), (2, 2));
        let x = qp.cast::<ibv_qp_ex>();
        let (start, complete) = ((*x).wr_start.unwrap(), (*x).wr_complete.unwrap());
        start(x);
        (*x).wr_send.unwrap()(x);
        assert_eq!(complete(x), libc::EINVAL, "not before the state allows it");
        (*qp).state = 3;
        start(x);
        for i in 0..2 {
            (*x).wr_id = i;
            (*x).wr_rdma_write.unwrap()(x, 5, 0x50);
            (*x).wr_set_sge.unwrap()(x, 1, 2, 3);
        }
        assert_eq!((rings.sq_pending(0), complete(x), rings.sq_pending(0)), (Ok(0), 0, Ok(2)));
        assert_eq!((rings.sq_head(1).wr_id, rings.sq_head(1).remote_addr), (1, 0x50));
        start(x);
        (*x).wr_send.unwrap()(x);
        (*x).wr_abort.unwrap()(x);
        assert_eq!(rings.sq_pending(0), Ok(2));
        assert_eq!(ops.destroy_qp.unwrap()(qp), 0);
        // FLUSH takes the place in which older versions have the mask.
        (init.qp_type, init.send_ops_flags, init.pd) = (2, 1 << 11, domain);
        let qp = create(ctx, &mut init);
        let x = qp.cast::<ibv_qp_ex>();
        assert_eq!(*qp.cast::<u8>().add(360).cast::<u32>(), 2);
        let rings = device_qp(k);
        (*qp).state = 3;
        (*x).wr_start.unwrap()(x);
        (*x).wr_flush.unwrap()(x, 5, 0x50, 64, 1, 0);
        assert_eq!(((*x).wr_complete.unwrap()(x), rings.sq_head(0).opcode), (0, WrOpcode::Flush as u8));
        assert_eq!(ops.destroy_qp.unwrap()(qp), 0);
        assert_eq!(ops.destroy_cq.unwrap()(cq.cast()), 0);
        assert_eq!((ops.dealloc_pd.unwrap()(domain), ops.dealloc_td.unwrap()(parent.td)), (0, 0));
    }
}

/// XRC domains and their objects.
///
/// # Safety
/// As of [`play`].
unsafe fn play_xrc(k: &Kernel, ops: &verbs_context_ops, ctx: *mut ibv_context, pd: *mut ibv_pd) {
    // SAFETY: as in `play`.
    unsafe {
        let mut attr = ibv_xrcd_init_attr { comp_mask: 3, fd: -1, oflags: libc::O_CREAT };
        k.set("errno", libc::ENOMEM);
        assert!(ops.open_xrcd.unwrap()(ctx, &mut attr).is_null() && errno() == libc::ENOMEM);
        let xrcd = ops.open_xrcd.unwrap()(ctx, &mut attr);
        let cq = ops.create_cq.unwrap()(ctx, 4, null_mut(), 0);

        let mut init: ibv_srq_init_attr_ex = std::mem::zeroed();
        (init.comp_mask, init.srq_type, init.pd, init.attr.max_wr) = (1 | 2, 1, pd, 4);
        let create_srq = ops.create_srq_ex.unwrap();
        assert!(create_srq(ctx, &mut init).is_null() && errno() == libc::EINVAL, "no domain");
        (init.comp_mask, init.xrcd, init.cq) = (1 | 2 | 4 | 8, xrcd, cq);
        let srq = create_srq(ctx, &mut init);
        let mut number = 0;
        assert_eq!((ops.get_srq_num.unwrap()(srq, &mut number), number), (0, 0x33));

        let mut init: ibv_qp_init_attr_ex = std::mem::zeroed();
        (init.qp_type, init.comp_mask, init.cap.max_send_wr) = (10, 2, 16);
        let create = ops.create_qp_ex.unwrap();
        assert!(create(ctx, &mut init).is_null() && errno() == libc::EINVAL, "no domain");
        init.xrcd = xrcd;
        let target = create(ctx, &mut init);
        assert_eq!(init.cap.max_send_wr, 0, "nothing is posted to a target");
        (*target).state = 3;
        let (mut bad, mut list) = (null_mut(), [ibv_sge { addr: 0x10, length: 5, lkey: 6 }]);
        let mut recv = ibv_recv_wr { wr_id: 8, next: null_mut(), sg_list: list.as_mut_ptr(), num_sge: 1 };
        assert_eq!(ops.post_recv.unwrap()(target, &mut recv, null_mut()), libc::EINVAL);
        assert_eq!(ops.post_send.unwrap()(target, &mut send(WrOpcode::Send, &mut list), &mut bad), libc::EINVAL);
        let mut opened: ibv_qp_open_attr = std::mem::zeroed();
        (opened.comp_mask, opened.qp_num, opened.xrcd, opened.qp_type) = (1 | 2 | 8, 0x77, xrcd, 10);
        let same = ops.open_qp.unwrap()(ctx, &mut opened);
        assert_eq!((*same).qp_num, 0x77);
        assert_eq!((ops.destroy_qp.unwrap()(same), ops.destroy_qp.unwrap()(target)), (0, 0));

        // An initiator names the SRQ of each request.
        (init.qp_type, init.comp_mask, init.pd, init.send_cq) = (9, 1, pd, cq);
        let initiator = create(ctx, &mut init);
        let rings = device_qp(k);
        (*initiator).state = 3;
        let mut wr = send(WrOpcode::Send, &mut list);
        wr.remote_srqn = number;
        assert_eq!((ops.post_send.unwrap()(initiator, &mut wr, &mut bad), rings.sq_head(0).dest_qpn), (0, 0x33));
        assert_eq!(ops.destroy_qp.unwrap()(initiator), 0);
        assert_eq!((ops.destroy_srq.unwrap()(srq), ops.destroy_cq.unwrap()(cq)), (0, 0));
        assert_eq!(ops.close_xrcd.unwrap()(xrcd), 0);
    }
}

/// Memory windows.
///
/// # Safety
/// As of [`play`].
unsafe fn play_windows(k: &Kernel, ops: &verbs_context_ops, pd: *mut ibv_pd, qp: *mut ibv_qp) {
    // SAFETY: as in `play`.
    unsafe {
        let alloc = ops.alloc_mw.unwrap();
        assert!(alloc(pd, 3).is_null() && errno() == libc::EINVAL);
        k.set("errno", libc::ENOMEM);
        assert!(alloc(pd, 1).is_null() && errno() == libc::ENOMEM);
        let mw = alloc(pd, 1);
        let mut bind: ibv_mw_bind = std::mem::zeroed();
        bind.wr_id = 9;
        (*qp).state = 0;
        assert_eq!(ops.bind_mw.unwrap()(qp, mw, &mut bind), libc::EINVAL, "not before the state allows it");
        assert_eq!((*mw).rkey, 0x1ff);
        (*qp).state = 3;
        assert_eq!((ops.bind_mw.unwrap()(qp, mw, &mut bind), (*mw).rkey), (0, 0x100), "another key");
        assert_eq!(ops.dealloc_mw.unwrap()(mw), 0);
    }
}
