//! Queues against the device's half of the same rings.

use std::cell::RefCell;
use std::rc::Rc;

use unirdma_abi as abi;
use unirdma_formats::{QpType, WrOpcode, send_flags};
use unirdma_mem::{CqRing, CqTail, QpRings, Span};
use unirdma_queues::builder::{self, Builder, ExtendedQp};
use unirdma_queues::polling::{self, ExtendedCq, Poller};
use unirdma_queues::requests::{bind_request, completion, each_receive, each_send, post_send_request, sges};
use unirdma_queues::{Batch, Completions, SendWr, WorkQueue};
use unirdma_verbs_abi::*;
use zerocopy::FromBytes;

const MAX_INLINE: u32 = 64;
const MAX_SGE: u32 = 4;

/// Zeroed memory of `len` bytes at a multiple of 64.
fn memory(len: usize) -> Span {
    let s = Span::anonymous(len + 64);
    s.sub((64 - s.addr() as u64 % 64) % 64, len as u64).unwrap()
}

/// An SQ or RQ of `wr` requests.
fn queue(wr: u32) -> WorkQueue {
    let (max_send_sge, max_recv_sge, max_inline_data) = (MAX_SGE, MAX_SGE, MAX_INLINE);
    let cap = abi::QpCap { max_send_wr: wr, max_recv_wr: wr, max_send_sge, max_recv_sge, max_inline_data };
    let layout = abi::QpLayout::of(&cap).unwrap();
    let (sq, rq) = (memory(layout.sq_bytes()), memory(layout.rq_bytes()));
    WorkQueue::new(QpRings::new(memory(size_of::<abi::QpCtrl>()), sq, rq, layout).unwrap())
}

fn cq(entries: u32) -> (CqRing, CqTail) {
    let (ctrl, ring) = (memory(size_of::<abi::CqCtrl>()), memory(entries as usize * size_of::<abi::Cqe>()));
    (CqRing::new(ctrl.clone(), ring.clone(), entries).unwrap(), CqTail::new(ctrl, ring, entries).unwrap())
}

/// The SGEs of SQ WQE `i`, as the device reads them.
fn sges_of(rings: &QpRings, i: u32) -> Vec<abi::Sge> {
    let mut bytes = vec![0; usize::from(rings.sq_head(i).num_sge) * 16];
    assert!(rings.sq_data(i, &mut bytes));
    bytes.chunks(16).map(|b| abi::Sge::read_from_bytes(b).unwrap()).collect()
}

fn send_wr(opcode: WrOpcode, list: &mut [ibv_sge]) -> ibv_send_wr {
    // SAFETY: integers, pointers and unions of them.
    let mut wr: ibv_send_wr = unsafe { std::mem::zeroed() };
    (wr.opcode, wr.sg_list, wr.num_sge) = (opcode as u32, list.as_mut_ptr(), list.len() as i32);
    wr
}

/// Posts a list to an RC QP as both drivers do.
fn post(q: &mut WorkQueue, first: &mut ibv_send_wr) -> Result<bool, (i32, *mut ibv_send_wr)> {
    let mut bad = std::ptr::null_mut();
    // SAFETY: requests of the test.
    let r = unsafe {
        each_send(first, &mut bad, |wr| {
            let no_windows = |b: &ibv_send_wr_bind| Ok(bind_request(b.rkey, &b.bind_info));
            post_send_request(
                QpType::Rc,
                wr,
                |ah| (*ah).handle,
                no_windows,
                |head, data| {
                    let mut head = *head;
                    if !q.has_room_to_send() {
                        return Err(libc::ENOMEM);
                    }
                    q.put_data(&mut head, data, MAX_INLINE)?;
                    q.put_head(&head);
                    Ok(())
                },
            )
        })
    };
    let rings = q.rings.clone();
    let rung = q.post.publish_sends(&rings);
    r.map(|()| rung).map_err(|e| (e, bad))
}

#[test]
fn requests_are_wqes_as_the_device_reads_them() {
    let mut q = queue(8);
    let mut list = [ibv_sge { addr: 0x1000, length: 10, lkey: 7 }, ibv_sge { addr: 0x2000, length: 20, lkey: 8 }];
    let mut write = send_wr(WrOpcode::WriteImm, &mut list);
    (write.wr_id, write.imm_data, write.send_flags) = (5, 0x1234, send_flags::SIGNALED | send_flags::FENCE | 1 << 20);
    write.wr.rdma = ibv_send_wr_rdma { remote_addr: 0x9000, rkey: 9 };
    let mut swap = send_wr(WrOpcode::CmpSwap, &mut []);
    swap.wr.atomic = ibv_send_wr_atomic { remote_addr: 0x8000, compare_add: 1, swap: 2, rkey: 3 };
    write.next = &mut swap;
    assert_eq!(post(&mut q, &mut write), Ok(true));
    assert_eq!(q.rings.sq_pending(0), Ok(2));
    let head = q.rings.sq_head(0);
    let known = send_flags::SIGNALED | send_flags::FENCE;
    assert_eq!((head.wr_id, head.opcode, head.imm, head.send_flags), (5, WrOpcode::WriteImm as u8, 0x1234, known));
    assert_eq!((head.remote_addr, head.rkey, head.num_sge, head.inline_len), (0x9000, 9, 2, 0));
    assert_eq!(sges_of(&q.rings, 0)[1], abi::Sge { addr: 0x2000, length: 20, lkey: 8 });
    let head = q.rings.sq_head(1);
    assert_eq!((head.remote_addr, head.rkey, head.compare_add, head.swap), (0x8000, 3, 1, 2));
}

#[test]
fn inline_data_is_taken_when_it_is_posted() {
    let mut q = queue(8);
    let mut data = [*b"hello ", *b"world!"];
    let mut list = [0, 1].map(|i| ibv_sge { addr: data[i].as_ptr() as u64, length: 6, lkey: 0 });
    let mut wr = send_wr(WrOpcode::Send, &mut list);
    wr.send_flags = send_flags::INLINE;
    assert_eq!(post(&mut q, &mut wr), Ok(true));
    data = [[0; 6]; 2];
    assert_eq!(data, [[0; 6]; 2]);
    let (head, mut bytes) = (q.rings.sq_head(0), [0; 12]);
    assert!(q.rings.sq_data(0, &mut bytes));
    assert_eq!((&bytes, head.inline_len, head.num_sge), (b"hello world!", 12, 0));
    let long = [0u8; MAX_INLINE as usize + 1];
    let mut list = [ibv_sge { addr: long.as_ptr() as u64, length: long.len() as u32, lkey: 0 }];
    let mut wr = send_wr(WrOpcode::Send, &mut list);
    wr.send_flags = send_flags::INLINE;
    assert_eq!(post(&mut q, &mut wr).unwrap_err().0, libc::EINVAL);
    assert_eq!(q.rings.sq_pending(0), Ok(1));
}

#[test]
fn what_comes_before_a_bad_request_is_posted() {
    let mut q = queue(2);
    let mut wrs: Vec<ibv_send_wr> = (0..4).map(|_| send_wr(WrOpcode::Send, &mut [])).collect();
    for i in 0..3 {
        wrs[i].next = &raw mut wrs[i + 1];
    }
    let third = &raw mut wrs[2];
    assert_eq!(post(&mut q, &mut wrs[0]), Err((libc::ENOMEM, third)), "there is room for two");
    assert_eq!(q.rings.sq_pending(0), Ok(2));
    q.rings.set_sq_cons(1);
    let fourth = &raw mut wrs[3];
    // SAFETY: the third of the test's requests.
    assert_eq!(post(&mut q, unsafe { &mut *third }), Err((libc::ENOMEM, fourth)), "one was retired");
    q.rings.set_sq_cons(3);
    let mut unknown = send_wr(WrOpcode::Send, &mut []);
    unknown.opcode = 13;
    let bad = &raw mut unknown;
    assert_eq!(post(&mut q, &mut unknown), Err((libc::EINVAL, bad)));
    let mut negative = send_wr(WrOpcode::Send, &mut []);
    negative.num_sge = -1;
    assert_eq!(post(&mut q, &mut negative).unwrap_err().0, libc::EINVAL);
    assert_eq!(q.rings.sq_pending(3), Ok(0));
}

#[test]
fn a_datagram_names_its_ah() {
    let mut ah = ibv_ah { context: std::ptr::null_mut(), pd: std::ptr::null_mut(), handle: 3 };
    let mut wr = send_wr(WrOpcode::Send, &mut []);
    wr.wr.ud = ibv_send_wr_ud { ah: &mut ah, remote_qpn: 11, remote_qkey: 12 };
    let heads = RefCell::new(vec![]);
    let post = |wr: &ibv_send_wr| {
        let push = |head: &abi::SqWqe, _: SendWr<'_>| {
            heads.borrow_mut().push(*head);
            Ok(())
        };
        // SAFETY: a request of the test.
        unsafe { post_send_request(QpType::Ud, wr, |ah| (*ah).handle + 100, |_| Err(libc::EINVAL), push) }
    };
    assert_eq!(post(&wr), Ok(()));
    wr.wr.ud.ah = std::ptr::null_mut();
    assert_eq!(post(&wr), Err(libc::EINVAL));
    wr.opcode = WrOpcode::Write as u32;
    assert_eq!(post(&wr), Err(libc::EINVAL));
    let head = heads.take()[0];
    assert_eq!((head.ah, head.dest_qpn, head.qkey), (103, 11, 12));
}

#[test]
fn receives_ask_for_the_bell_when_the_device_wants_it() {
    let mut q = queue(4);
    let mut list = [ibv_sge { addr: 0x1000, length: 10, lkey: 7 }];
    let mut wr = ibv_recv_wr { wr_id: 1, next: std::ptr::null_mut(), sg_list: list.as_mut_ptr(), num_sge: 1 };
    let mut post = |q: &mut WorkQueue| {
        // SAFETY: a request of the test.
        let r = unsafe {
            each_receive(&mut wr, std::ptr::null_mut(), |r| {
                q.put_receive(r.wr_id, sges(r.sg_list, r.num_sge)?, MAX_SGE)
            })
        };
        (r, q.publish_receives())
    };
    assert_eq!(post(&mut q), (Ok(()), false));
    q.rings.set_rq_notify(true);
    assert_eq!(post(&mut q), (Ok(()), true));
    assert_eq!((q.rings.rq_pending(0), q.rings.rq_head(1).num_sge), (Ok(2), 1));
    assert!(!q.publish_receives(), "there is nothing new");
    assert_eq!([post(&mut q).0, post(&mut q).0, post(&mut q).0], [Ok(()), Ok(()), Err(libc::ENOMEM)]);
    let too_many = [abi::Sge::default(); MAX_SGE as usize + 1];
    q.rings.set_rq_cons(4);
    assert_eq!(q.put_receive(1, &too_many, MAX_SGE), Err(libc::EINVAL));
}

#[test]
fn completions_of_the_rings_before_come_first() {
    let cqe = |wr_id, qp_num| abi::Cqe { wr_id, qp_num, ..Default::default() };
    let (mut old, tail) = cq(4);
    let mut cq_of = Completions::new(tail, "old");
    (0..3).for_each(|i| old.push(cqe(i, 1)).unwrap());
    let (mut new, tail) = cq(8);
    cq_of.replace(tail, "new");
    new.push(cqe(3, 2)).unwrap();
    new.push(cqe(4, 1)).unwrap();
    assert_eq!(cq_of.waiting(), 5);
    let freed = RefCell::new(vec![]);
    let pop = |cq: &mut Completions<_>| cq.pop(|_| (), |m| freed.borrow_mut().push(m)).map(|c| c.wr_id);
    assert_eq!(pop(&mut cq_of), Some(0));
    cq_of.forget(1);
    assert_eq!([pop(&mut cq_of), pop(&mut cq_of)], [Some(3), None], "those of a QP that is gone are passed over");
    cq_of.release();
    assert_eq!(freed.into_inner(), ["old"]);
    assert_eq!(cq_of.memory().map(|m| *m).collect::<Vec<_>>(), ["new"]);
}

#[test]
fn a_completion_has_what_the_device_wrote() {
    let c = abi::Cqe { wr_id: 1, status: 2, opcode: 128, byte_len: 3, imm: 4, qp_num: 5, ..Default::default() };
    let c = completion(&abi::Cqe { src_qp: 6, wc_flags: 7, vendor_err: 8, sl: 9, ..c });
    assert_eq!((c.wr_id, c.status, c.opcode, c.byte_len, c.imm_data, c.qp_num), (1, 2, 128, 3, 4, 5));
    assert_eq!((c.src_qp, c.wc_flags, c.vendor_err, c.sl), (6, 7, 8, 9));
}

/// Requests: heads, and addresses of SGEs or data.
type Requests = Rc<RefCell<Vec<(abi::SqWqe, Vec<u8>)>>>;

/// An extended QP whose batches only record the requests that were pushed.
#[repr(C)]
struct Qp {
    c: ibv_qp_ex,
    builder: Builder<Pushed>,
    done: Requests,
}

struct Pushed {
    wrs: Vec<(abi::SqWqe, Vec<u8>)>,
    done: Requests,
}

impl Batch for Pushed {
    unsafe fn push(&mut self, head: &abi::SqWqe, data: SendWr<'_>) -> Result<(), i32> {
        let bytes = match data {
            SendWr::Sges(s) => s.iter().flat_map(|s| s.addr.to_le_bytes()).collect(),
            SendWr::Inline(s) => {
                // SAFETY: data of the test.
                unsafe { std::slice::from_raw_parts(s[0].addr as *const u8, s[0].length as usize) }.to_vec()
            }
        };
        self.wrs.push((*head, bytes));
        Ok(())
    }

    fn abort(mut self) {
        self.wrs.clear();
    }
}

impl Drop for Pushed {
    fn drop(&mut self) {
        self.done.borrow_mut().append(&mut self.wrs);
    }
}

// SAFETY: there is one thread.
unsafe impl ExtendedQp for Qp {
    type Batch = Pushed;
    unsafe fn builder(qp: *mut ibv_qp_ex) -> *mut Builder<Pushed> {
        // SAFETY: the test's QP.
        unsafe { &raw mut (*qp.cast::<Qp>()).builder }
    }
    unsafe fn begin(qp: *mut ibv_qp_ex) -> (Pushed, Result<(), i32>) {
        // SAFETY: the test's QP.
        let qp = unsafe { &*qp.cast::<Qp>() };
        (Pushed { wrs: vec![], done: qp.done.clone() }, Ok(()))
    }
    unsafe fn typ(_: *mut ibv_qp_ex) -> QpType {
        QpType::Uc
    }
    unsafe fn ah(_: *mut ibv_ah) -> u32 {
        0
    }
}

#[test]
fn requests_are_built_call_by_call_and_published_together() {
    let done = Requests::default();
    // SAFETY: integers, pointers and optional functions.
    let c: ibv_qp_ex = unsafe { std::mem::zeroed() };
    let mut obj = Box::new(Qp { c, builder: Builder::new(), done: done.clone() });
    builder::fill::<Qp>(&mut obj.c);
    let qp: *mut ibv_qp_ex = (&raw mut *obj).cast();
    // SAFETY: the functions of this QP, in the order that ibv_wr_post(3) demands.
    unsafe {
        let f = &(*qp);
        let (start, complete, abort) = (f.wr_start.unwrap(), f.wr_complete.unwrap(), f.wr_abort.unwrap());
        let (send, write, read) = (f.wr_send.unwrap(), f.wr_rdma_write.unwrap(), f.wr_rdma_read.unwrap());
        let (set_sge, set_inline) = (f.wr_set_sge.unwrap(), f.wr_set_inline_data.unwrap());
        start(qp);
        (*qp).wr_id = 1;
        send(qp);
        set_sge(qp, 5, 0x10, 1);
        (*qp).wr_id = 2;
        write(qp, 6, 0x20);
        set_inline(qp, b"data".as_ptr().cast_mut().cast(), 4);
        assert!(done.borrow().is_empty());
        assert_eq!(complete(qp), 0);
        let wrs = done.take();
        assert_eq!((wrs[0].0.wr_id, &wrs[0].1[..]), (1, &0x10u64.to_le_bytes()[..]));
        assert_eq!((wrs[1].0.wr_id, wrs[1].0.remote_addr, &wrs[1].1[..]), (2, 0x20, &b"data"[..]));
        start(qp);
        send(qp);
        abort(qp);
        start(qp);
        send(qp);
        // A UC QP does not read.
        read(qp, 0, 0);
        assert_eq!(complete(qp), libc::EINVAL);
        assert!(done.borrow().is_empty(), "all or none");
    }
}

#[repr(C)]
struct Cq {
    c: ibv_cq_ex,
    poller: Poller,
    rings: Completions<()>,
    current: abi::Cqe,
}

// SAFETY: there is one thread.
unsafe impl ExtendedCq for Cq {
    unsafe fn poller<'a>(cq: *mut ibv_cq_ex) -> &'a Poller {
        // SAFETY: the test's CQ.
        unsafe { &(*cq.cast::<Cq>()).poller }
    }
    unsafe fn take(cq: *mut ibv_cq_ex) -> Result<bool, i32> {
        // SAFETY: the test's CQ.
        let cq = unsafe { &mut *cq.cast::<Cq>() };
        let got = cq.rings.pop(|_| (), |()| ());
        cq.current = got.unwrap_or_default();
        Ok(got.is_some())
    }
    unsafe fn current<'a>(cq: *mut ibv_cq_ex) -> &'a abi::Cqe {
        // SAFETY: the test's CQ.
        unsafe { &(*cq.cast::<Cq>()).current }
    }
}

#[test]
fn completions_are_read_call_by_call() {
    let (mut device, tail) = cq(4);
    // SAFETY: integers, pointers, optional functions and zeroed pthread objects.
    let c: ibv_cq_ex = unsafe { std::mem::zeroed() };
    let (poller, rings, current) = (Poller::new(false), Completions::new(tail, ()), abi::Cqe::default());
    let mut obj = Box::new(Cq { c, poller, rings, current });
    polling::fill::<Cq>(&mut obj.c);
    let cq: *mut ibv_cq_ex = (&raw mut *obj).cast();
    // SAFETY: the functions of this CQ, in the order that ibv_create_cq_ex(3) demands.
    unsafe {
        let (start, next, end) = ((*cq).start_poll.unwrap(), (*cq).next_poll.unwrap(), (*cq).end_poll.unwrap());
        assert_eq!(start(cq, std::ptr::null_mut()), libc::ENOENT);
        for i in 0..2 {
            device.push(abi::Cqe { wr_id: i, status: 4, byte_len: 77, ..Default::default() }).unwrap();
        }
        assert_eq!(start(cq, std::ptr::null_mut()), 0);
        assert_eq!(((*cq).wr_id, (*cq).status, (*cq).read_byte_len.unwrap()(cq)), (0, 4, 77));
        assert_eq!((next(cq), (*cq).wr_id), (0, 1));
        assert_eq!(next(cq), libc::ENOENT);
        end(cq);
        assert_eq!(start(cq, std::ptr::null_mut()), libc::ENOENT, "the next poll may begin");
    }
}
