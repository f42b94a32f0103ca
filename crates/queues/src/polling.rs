//! The extended CQ (`ibv_create_cq_ex(3)`): completions one at a time, each field by a call.

use std::sync::atomic::{AtomicBool, Ordering};

use unirdma_abi as abi;
use unirdma_verbs_abi::*;

use crate::Result;

/// The lock of an extended CQ, which the thread that polls it holds.
#[derive(Debug)]
pub struct Poller {
    /// Held from `start_poll` to `end_poll`.
    polled: AtomicBool,
    /// The program promises to poll from one thread at a time.
    single_threaded: bool,
}

impl Poller {
    /// Not polled so far.
    pub fn new(single_threaded: bool) -> Self {
        Poller { polled: AtomicBool::new(false), single_threaded }
    }

    fn begin(&self) {
        while !self.single_threaded && self.polled.swap(true, Ordering::Acquire) {
            std::thread::sleep(std::time::Duration::from_micros(20));
        }
    }

    fn end(&self) {
        self.polled.store(false, Ordering::Release);
    }
}

/// The object of a CQ; for C an `ibv_cq_ex`.
///
/// # Safety
/// The functions must answer for every CQ that [`fill`] was called for.
pub unsafe trait ExtendedCq {
    /// The lock of the CQ.
    ///
    /// # Safety
    /// `cq` is such a CQ.
    unsafe fn poller<'a>(cq: *mut ibv_cq_ex) -> &'a Poller;

    /// Takes the next completion, which is then the current one. False if there is none.
    ///
    /// # Errors
    /// Why the next completion cannot be taken.
    ///
    /// # Safety
    /// `cq` is such a CQ, and this thread alone polls it.
    unsafe fn take(cq: *mut ibv_cq_ex) -> Result<bool>;

    /// The current completion.
    ///
    /// # Safety
    /// As of `take`.
    unsafe fn current<'a>(cq: *mut ibv_cq_ex) -> &'a abi::Cqe;
}

/// Puts the functions into a CQ.
pub fn fill<C: ExtendedCq>(x: &mut ibv_cq_ex) {
    x.start_poll = Some(start_poll::<C>);
    x.next_poll = Some(next_poll::<C>);
    x.end_poll = Some(end_poll::<C>);
    x.read_opcode = Some(read_opcode::<C>);
    x.read_vendor_err = Some(read_vendor_err::<C>);
    x.read_byte_len = Some(read_byte_len::<C>);
    x.read_imm_data = Some(read_imm_data::<C>);
    x.read_qp_num = Some(read_qp_num::<C>);
    x.read_src_qp = Some(read_src_qp::<C>);
    x.read_wc_flags = Some(read_wc_flags::<C>);
    x.read_slid = Some(read_slid::<C>);
    x.read_sl = Some(read_sl::<C>);
    x.read_dlid_path_bits = Some(read_dlid_path_bits::<C>);
    x.read_completion_ts = Some(read_completion_ts::<C>);
}

unsafe extern "C" fn start_poll<C: ExtendedCq>(cq: *mut ibv_cq_ex, attr: *mut ibv_poll_cq_attr) -> i32 {
    // SAFETY: NULL or attributes.
    if unsafe { attr.as_ref() }.is_some_and(|a| a.comp_mask != 0) {
        return libc::EINVAL;
    }
    // SAFETY: the caller passes its CQ.
    let poller = unsafe { C::poller(cq) };
    poller.begin();
    // SAFETY: the poller keeps other threads out.
    let r = unsafe { next_poll::<C>(cq) };
    if r != 0 {
        poller.end();
    }
    r
}

unsafe extern "C" fn next_poll<C: ExtendedCq>(cq: *mut ibv_cq_ex) -> i32 {
    // SAFETY: between start_poll and end_poll the CQ is this thread's.
    match unsafe { C::take(cq) } {
        Ok(false) => libc::ENOENT,
        Ok(true) => {
            // SAFETY: as above.
            unsafe {
                let c = C::current(cq);
                (*cq).status = c.status.into();
                (*cq).wr_id = c.wr_id;
            }
            0
        }
        Err(e) => e,
    }
}

unsafe extern "C" fn end_poll<C: ExtendedCq>(cq: *mut ibv_cq_ex) {
    // SAFETY: the caller passes its CQ.
    unsafe { C::poller(cq) }.end();
}

macro_rules! readers {
    ($($name:ident -> $t:ty = |$c:ident| $e:expr;)*) => {
        $(unsafe extern "C" fn $name<C: ExtendedCq>(cq: *mut ibv_cq_ex) -> $t {
            // SAFETY: called between start_poll and end_poll, by the thread that polls.
            let $c = unsafe { C::current(cq) };
            $e
        })*
    };
}
readers! {
    read_opcode -> u32 = |c| c.opcode.into();
    read_vendor_err -> u32 = |c| c.vendor_err;
    read_byte_len -> u32 = |c| c.byte_len;
    read_imm_data -> u32 = |c| c.imm;
    read_qp_num -> u32 = |c| c.qp_num;
    read_src_qp -> u32 = |c| c.src_qp;
    read_wc_flags -> u32 = |c| c.wc_flags.into();
    read_slid -> u32 = |_c| 0;
    read_sl -> u8 = |c| c.sl;
    read_dlid_path_bits -> u8 = |_c| 0;
    read_completion_ts -> u64 = |c| c.timestamp;
}
