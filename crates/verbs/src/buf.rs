//! Registration with attributes (`ibv_reg_mr_ex`), and buffers of the library (`ibv_alloc_buf`).

use std::ffi::c_void;

use unirdma_driver as driver;
use unirdma_verbs_abi::{reg_mr_mask as mask, *};

use crate::trace::trace;
use crate::{hosted, null, set_errno};

/// Memory that is shared with the virtual layer from the start.
pub struct BufObj {
    pd: *mut ibv_pd,
    memory: driver::Buffer,
    len: usize,
}

pub unsafe extern "C" fn x_ibv_alloc_buf(pd: *mut ibv_pd, size: usize, buf: *mut *mut BufObj) -> *mut c_void {
    match driver::Buffer::new(size) {
        Ok(memory) => {
            let addr = memory.addr() as *mut c_void;
            trace!("ibv_alloc_buf({size}) = {addr:p}");
            // SAFETY: the caller passes room for the handle.
            unsafe { *buf = Box::into_raw(Box::new(BufObj { pd, memory, len: size })) };
            addr
        }
        Err(e) => null(e),
    }
}

pub unsafe extern "C" fn x_ibv_free_buf(buf: *mut BufObj) {
    trace!("ibv_free_buf()");
    if !buf.is_null() {
        // SAFETY: boxed in ibv_alloc_buf, given back once.
        unsafe { drop(Box::from_raw(buf)) };
    }
}

/// The memory is no dmabuf, as it is with rdma-core's own buffers.
pub unsafe extern "C" fn x_ibv_export_buf_dmabuf_fd(_buf: *mut BufObj) -> i32 {
    trace!("ibv_export_buf_dmabuf_fd(): not a dmabuf");
    set_errno(libc::ENODATA);
    -1
}

pub unsafe extern "C" fn x_ibv_reg_buf_mr(
    pd: *mut ibv_pd,
    buf: *mut BufObj,
    addr: *mut c_void,
    length: usize,
    access: i32,
) -> *mut ibv_mr {
    let comp_mask = mask::BUF | mask::ADDR;
    // SAFETY: integers and pointers.
    let zero: ibv_mr_init_attr = unsafe { std::mem::zeroed() };
    let mut attr = ibv_mr_init_attr { length, access, comp_mask, addr, buf: buf.cast(), ..zero };
    // SAFETY: by the contract.
    unsafe { x_ibv_reg_mr_ex(pd, &raw mut attr) }
}

/// The older function that does what the attributes say.
#[derive(Debug, PartialEq)]
enum Older {
    /// `ibv_reg_mr_iova2`, with this address for remote accesses.
    Memory { iova: u64 },
    /// `ibv_reg_dmabuf_mr`.
    Dmabuf,
}

/// Finds the older function, as rdma-core does for providers without a function of their own.
///
/// # Errors
/// `EOPNOTSUPP` for what no older function can do, `EINVAL` for fields that do not go together.
fn older(a: &ibv_mr_init_attr) -> Result<Older, i32> {
    let has = |bits| a.comp_mask & bits == bits;
    if a.comp_mask & !(mask::IOVA | mask::ADDR | mask::FD | mask::FD_OFFSET) != 0 {
        return Err(libc::EOPNOTSUPP);
    }
    if has(mask::FD) {
        let is_whole = has(mask::FD_OFFSET | mask::IOVA) && !has(mask::ADDR);
        return if is_whole { Ok(Older::Dmabuf) } else { Err(libc::EINVAL) };
    }
    if !has(mask::ADDR) || has(mask::FD_OFFSET) {
        return Err(libc::EINVAL);
    }
    Ok(Older::Memory { iova: if has(mask::IOVA) { a.iova } else { a.addr as u64 } })
}

/// Copies the attributes that count. A buffer becomes the memory that it is.
///
/// # Errors
/// `EINVAL` for a buffer of another PD, a range that is not in it, or a dmabuf beside it.
///
/// # Safety
/// The fields that `comp_mask` names, and those before it, can be read. A buffer is of `ibv_alloc_buf`.
unsafe fn without_buffer(pd: *mut ibv_pd, from: *const ibv_mr_init_attr) -> Result<ibv_mr_init_attr, i32> {
    // SAFETY: integers and pointers.
    let mut a: ibv_mr_init_attr = unsafe { std::mem::zeroed() };
    macro_rules! take {
        ($($bit:ident $field:ident),*) => {
            $(
                if a.comp_mask & mask::$bit != 0 {
                    // SAFETY: by the contract.
                    a.$field = unsafe { (*from).$field };
                }
            )*
        };
    }
    // SAFETY: by the contract.
    (a.length, a.access, a.comp_mask) = unsafe { ((*from).length, (*from).access, (*from).comp_mask) };
    take!(IOVA iova, ADDR addr, FD fd, FD_OFFSET fd_offset, DMAH dmah, BUF buf);
    if a.comp_mask & mask::BUF != 0 {
        // SAFETY: by the contract.
        let buf = unsafe { &*a.buf.cast::<BufObj>() };
        let off = (a.addr as usize).checked_sub(buf.memory.addr());
        let is_inside = off.is_some_and(|off| off <= buf.len && a.length <= buf.len - off);
        if pd != buf.pd
            || a.comp_mask & mask::ADDR == 0
            || !is_inside
            || a.comp_mask & (mask::FD | mask::FD_OFFSET) != 0
        {
            return Err(libc::EINVAL);
        }
        a.comp_mask &= !mask::BUF;
    }
    Ok(a)
}

pub unsafe extern "C" fn x_ibv_reg_mr_ex(pd: *mut ibv_pd, attr: *mut ibv_mr_init_attr) -> *mut ibv_mr {
    // SAFETY: by the contract.
    let mut a = match unsafe { without_buffer(pd, attr) } {
        Ok(a) => a,
        Err(e) => return null(e),
    };
    trace!("ibv_reg_mr_ex(comp_mask {:#x})", a.comp_mask);
    // SAFETY: by the contract, and as the functions that are called.
    unsafe {
        match older(&a) {
            Ok(Older::Memory { iova }) => crate::any::reg_mr_iova2(pd, a.addr, a.length, iova, a.access as u32),
            Ok(Older::Dmabuf) => crate::any::reg_dmabuf_mr(pd, a.fd_offset, a.length, a.iova, a.fd, a.access),
            // For instance a DMA handle, which only a VF can have.
            Err(libc::EOPNOTSUPP) if !hosted::is_ours((*pd).context) => hosted::reg_mr_ex(pd, &raw mut a),
            Err(e) => null(e),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ptr::{null_mut, without_provenance_mut};

    fn attr(comp_mask: u64) -> ibv_mr_init_attr {
        ibv_mr_init_attr {
            length: 100,
            access: 1,
            comp_mask,
            iova: 5,
            addr: without_provenance_mut(4096),
            fd: 3,
            fd_offset: 7,
            dmah: null_mut(),
            buf: null_mut(),
        }
    }

    #[test]
    fn attributes_become_an_older_call() {
        use mask::*;
        assert_eq!(older(&attr(ADDR)), Ok(Older::Memory { iova: 4096 }));
        assert_eq!(older(&attr(ADDR | IOVA)), Ok(Older::Memory { iova: 5 }));
        assert_eq!(older(&attr(FD | FD_OFFSET | IOVA)), Ok(Older::Dmabuf));
        for wrong in [0, IOVA, FD, FD | FD_OFFSET, FD | IOVA, FD | FD_OFFSET | IOVA | ADDR, ADDR | FD_OFFSET] {
            assert_eq!(older(&attr(wrong)), Err(libc::EINVAL), "{wrong:#x}");
        }
        for unknown in [ADDR | DMAH, DMAH, ADDR | BUF << 1] {
            assert_eq!(older(&attr(unknown)), Err(libc::EOPNOTSUPP), "{unknown:#x}");
        }
    }

    #[test]
    fn a_buffer_is_registered_in_its_own_pd_and_range() {
        use mask::*;
        let (pd, other): (*mut ibv_pd, *mut ibv_pd) = (without_provenance_mut(8), without_provenance_mut(16));
        let mut buf = null_mut();
        // SAFETY: room for the handle, which is given back; the PDs are only compared.
        unsafe {
            let addr = x_ibv_alloc_buf(pd, 5000, &raw mut buf);
            let check = |pd, comp_mask, skip: usize, length| {
                let a =
                    ibv_mr_init_attr { length, addr: addr.wrapping_byte_add(skip), buf: buf.cast(), ..attr(comp_mask) };
                without_buffer(pd, &raw const a).map(|a| (a.comp_mask, a.addr, a.fd))
            };
            assert_eq!(check(pd, BUF | ADDR, 0, 5000), Ok((ADDR, addr, 0)));
            assert_eq!(check(pd, BUF | ADDR | IOVA, 4999, 1), Ok((ADDR | IOVA, addr.wrapping_byte_add(4999), 0)));
            assert_eq!(check(pd, BUF | ADDR | DMAH, 5000, 0).map(|a| a.0), Ok(ADDR | DMAH));
            assert_eq!(check(other, BUF | ADDR, 0, 5000), Err(libc::EINVAL));
            for (comp_mask, skip, length) in [
                (BUF, 0, 5000),
                (BUF | ADDR | FD, 0, 1),
                (BUF | ADDR | FD_OFFSET, 0, 1),
                (BUF | ADDR, 0, 5001),
                (BUF | ADDR, 1, 5000),
                (BUF | ADDR, 5001, 0),
                (BUF | ADDR, 1, usize::MAX),
                (BUF | ADDR, usize::MAX, 1),
            ] {
                assert_eq!(check(pd, comp_mask, skip, length), Err(libc::EINVAL), "{comp_mask:#x} {skip} {length}");
            }
            assert_eq!(x_ibv_export_buf_dmabuf_fd(buf), -1);
            assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(libc::ENODATA));
            x_ibv_free_buf(buf);
        }
    }
}
