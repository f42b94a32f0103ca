//! Names of a hosted context. A program sees the vRNIC's GIDs, and gives the GIDs of others; the real library gets the
//! GIDs of VFs.

use std::collections::HashMap;
use std::ffi::c_void;
use std::net::Ipv6Addr;
use std::ptr::from_mut;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use unirdma_abi as abi;
use unirdma_abi::Command;
use unirdma_formats::{Gid, attr_mask as m};
use unirdma_verbs_abi::*;

use super::{Hosted, errno, of};
use crate::trace::trace;
use crate::{lock, set_errno};

/// `IBV_GID_TYPE_ROCE_V2` of `ibv_query_gid_ex`.
const ROCE_V2: u32 = 2;
const QPT_RC: u32 = 2;
const QPT_UD: u32 = 4;
/// Time for which an answer of RESOLVE is used again, so that a program with many QPs asks once for each peer.
const ANSWER_LIFE: Duration = Duration::from_secs(1);
/// Most answers that are kept.
const MAX_ANSWERS: usize = 4096;

/// The names that a program gave for a QP's path and alternate path, and the real GIDs.
#[derive(Clone, Copy, Default)]
pub(super) struct Paths {
    first: Option<Name>,
    alternate: Option<Name>,
}

#[derive(Clone, Copy)]
struct Name {
    dgid: [u8; 16],
    sgid_index: u8,
    real: [u8; 16],
}

/// A request of RESOLVE: the destination, the index of the own GID, and the type of the QP.
type Request = ([u8; 16], u8, u32);

/// The answers of RESOLVE in the last [`ANSWER_LIFE`].
#[derive(Default)]
pub(super) struct Answers(Mutex<HashMap<Request, (abi::ResolveResp, Instant)>>);

impl Answers {
    fn get(&self, request: Request, now: Instant) -> Option<abi::ResolveResp> {
        lock(&self.0).get(&request).filter(|(_, until)| now < *until).map(|(answer, _)| *answer)
    }

    fn put(&self, request: Request, answer: abi::ResolveResp, now: Instant) {
        let mut kept = lock(&self.0);
        if kept.len() >= MAX_ANSWERS {
            kept.retain(|_, (_, until)| now < *until);
        }
        if kept.len() < MAX_ANSWERS {
            kept.insert(request, (answer, now + ANSWER_LIFE));
        }
    }
}

/// A GID's bytes.
fn raw(gid: &ibv_gid) -> [u8; 16] {
    // SAFETY: both views of a GID are plain bytes.
    unsafe { gid.raw }
}

impl Hosted {
    /// The index of the lease's GID in the VF's table. The table changes with the addresses of the VF's interface,
    /// so it is looked up each time.
    fn sgid_index(&self, port: u8) -> Result<u8, i32> {
        for index in 0..=u8::MAX {
            let mut e = ibv_gid_entry {
                gid: ibv_gid { raw: [0; 16] },
                gid_index: 0,
                port_num: 0,
                gid_type: 0,
                ndev_ifindex: 0,
            };
            let size = size_of::<ibv_gid_entry>();
            // SAFETY: an open context, and room for an entry.
            let r =
                unsafe { (self.real.calls.query_gid_ex)(self.context, port.into(), index.into(), &raw mut e, 0, size) };
            match r {
                0 if e.gid_type == ROCE_V2 && raw(&e.gid) == self.gid => return Ok(index),
                0 | libc::ENODATA => {}
                _ => break,
            }
        }
        trace!("the VF does not have its GID {}", Gid(self.gid));
        Err(libc::EADDRNOTAVAIL)
    }

    /// Puts the VF's names into an address vector. Returns the names that it had, and the largest MTU.
    fn resolve(&self, a: &mut ibv_ah_attr, qp_type: u32) -> Result<(Name, u32), i32> {
        let (dgid, sgid_index) = (raw(&a.grh.dgid), a.grh.sgid_index);
        let (asked, now) = ((dgid, sgid_index, qp_type), Instant::now());
        let answer = match self.answers.get(asked, now) {
            Some(answer) => answer,
            None => {
                let request = abi::ResolveReq { dgid, sgid_index: sgid_index.into(), qp_type, reserved: 0 };
                let answer: Result<abi::ResolveResp, i32> = self.driver.command(Command::Resolve, &request);
                trace!("{} is reached by {:?}", Gid(dgid), answer.as_ref().map(|r| Gid(r.dgid)));
                let answer = answer?;
                self.answers.put(asked, answer, now);
                answer
            }
        };
        a.grh.sgid_index = self.sgid_index(a.port_num)?;
        a.grh.dgid = ibv_gid { raw: answer.dgid };
        Ok((Name { dgid, sgid_index, real: answer.dgid }, answer.max_mtu))
    }

    /// As [`Hosted::resolve`], where the destination may be a multicast group. That has one name everywhere; it is the
    /// VLAN or the network of the vRNIC's group that keeps its datagrams apart.
    fn resolve_for_datagrams(&self, a: &mut ibv_ah_attr) -> Result<(), i32> {
        if is_multicast(raw(&a.grh.dgid)) {
            if is_v4(raw(&a.grh.dgid)) != is_v4(self.gid) {
                trace!("the VF's address is of another family than {}", Gid(raw(&a.grh.dgid)));
                return Err(libc::EAFNOSUPPORT);
            }
            a.grh.sgid_index = self.sgid_index(a.port_num)?;
            return Ok(());
        }
        self.resolve(a, QPT_UD).map(drop)
    }

    /// The GID of the vRNIC that has a VF, by the VF's GID.
    fn name(&self, real: [u8; 16]) -> Option<[u8; 16]> {
        let answer: Result<abi::NameGidResp, i32> = self.driver.command(Command::NameGid, &abi::NameGidReq { real });
        answer.ok().map(|r| r.gid)
    }

    /// The index of an own GID of the same family as `peer`.
    fn own_index(&self, port: u8, peer: [u8; 16]) -> u8 {
        let fits = |index: &u8| {
            let own = crate::device::gid(&self.driver, port.into(), i32::from(*index));
            own.is_ok_and(|g| g != [0; 16] && is_v4(g) == is_v4(peer))
        };
        (0..16).find(fits).unwrap_or(0)
    }

    /// Puts a program's names back into an address vector of the VF.
    fn rename_back(&self, a: &mut ibv_ah_attr, known: Option<Name>) {
        let real = raw(&a.grh.dgid);
        if a.is_global == 0 || real == [0; 16] {
            return;
        }
        let (dgid, sgid_index) = match known.filter(|n| n.real == real) {
            Some(n) => (n.dgid, n.sgid_index),
            None => {
                let Some(dgid) = self.name(real) else { return };
                (dgid, self.own_index(a.port_num, dgid))
            }
        };
        (a.grh.dgid, a.grh.sgid_index) = (ibv_gid { raw: dgid }, sgid_index);
    }

    /// The largest MTU of the VF's port, an `ibv_mtu`.
    fn port_mtu(&self, port: u8) -> Result<u32, i32> {
        let mut p = ibv_port_attr::default();
        // SAFETY: an open context, and room for the attributes.
        match unsafe { (self.real.calls.query_port)(self.context, port, &raw mut p) } {
            0 => Ok(p.active_mtu),
            e => Err(e),
        }
    }

    /// Takes the lengths of tables from the vRNIC.
    ///
    /// # Safety
    /// `a` points to the structure of any version.
    unsafe fn correct_port(&self, port: u8, a: *mut ibv_port_attr) {
        let own: Result<abi::QueryPortResp, i32> =
            self.driver.command(Command::QueryPort, &abi::QueryPortReq { port: port.into(), reserved: 0 });
        if let Ok(own) = own {
            // SAFETY: all versions of the structure have these fields.
            unsafe { ((*a).gid_tbl_len, (*a).pkey_tbl_len) = (own.gid_tbl_len as i32, own.pkey_tbl_len) };
        }
    }

    fn correct_device(&self, a: &mut ibv_device_attr) {
        let own = &self.driver.device.config;
        (a.node_guid, a.sys_image_guid) = (own.node_guid.to_be(), own.sys_image_guid.to_be());
    }
}

/// Changes a QP. `fits`: attributes that the VF does not support to that extent become those that it does, as
/// connection management negotiates them.
///
/// # Safety
/// As ibv_modify_qp(3), of a QP of this context.
pub(crate) unsafe fn modify_qp(h: &Hosted, qp: *mut ibv_qp, attr: &ibv_qp_attr, mask: i32, fits: bool) -> i32 {
    // SAFETY: attributes are integers; those outside the mask may be uninitialized, and are passed on as they are.
    let (mut a, qp_type) = unsafe { (std::ptr::read(attr), (*qp).qp_type) };
    let bits = mask as u32;
    let mut paths = lock(&h.paths).get(&(qp as usize)).copied().unwrap_or_default();
    let mut change = || {
        if bits & m::AV != 0 && a.ah_attr.is_global != 0 {
            let (name, max_mtu) = h.resolve(&mut a.ah_attr, qp_type)?;
            paths.first = Some(name);
            if bits & m::PATH_MTU != 0 {
                if fits {
                    a.path_mtu = a.path_mtu.min(max_mtu).min(h.port_mtu(a.ah_attr.port_num)?);
                } else if a.path_mtu > max_mtu {
                    // As an RNIC whose port has a smaller MTU.
                    return Err(libc::EINVAL);
                }
            }
        }
        if bits & m::ALT_PATH != 0 && a.alt_ah_attr.is_global != 0 {
            paths.alternate = Some(h.resolve(&mut a.alt_ah_attr, qp_type)?.0);
        }
        Ok(())
    };
    if let Err(e) = change() {
        // SAFETY: the caller's QP.
        trace!("ibv_modify_qp({:#x}, mask {mask:#x}) of a VF: errno {e}", unsafe { (*qp).qp_num });
        set_errno(e);
        return e;
    }
    // SAFETY: by the contract.
    let r = unsafe { (h.real.calls.modify_qp)(qp, &raw mut a, mask) };
    // SAFETY: the caller's QP.
    trace!("ibv_modify_qp({:#x}, mask {mask:#x}, state {}) of a VF = {r}", unsafe { (*qp).qp_num }, attr.qp_state);
    if r == 0 && bits & (m::AV | m::ALT_PATH) != 0 {
        lock(&h.paths).insert(qp as usize, paths);
    }
    r
}

/// Lowers the MTU to what the VF and the destination take.
pub(crate) fn fit_mtu(h: &Hosted, attr: &mut ibv_qp_attr, mask: u32) -> Result<(), i32> {
    if mask & m::AV != 0 && mask & m::PATH_MTU != 0 {
        let mut path = attr.ah_attr;
        let (_, max_mtu) = h.resolve(&mut path, QPT_RC)?;
        attr.path_mtu = attr.path_mtu.min(max_mtu).min(h.port_mtu(path.port_num)?);
    }
    Ok(())
}

/// # Safety
/// As ibv_query_qp(3), of a QP of this context.
pub(crate) unsafe fn query_qp(
    h: &Hosted,
    qp: *mut ibv_qp,
    attr: *mut ibv_qp_attr,
    mask: i32,
    init: *mut ibv_qp_init_attr,
) -> i32 {
    // SAFETY: by the contract.
    let r = unsafe { (h.real.calls.query_qp)(qp, attr, mask, init) };
    if r == 0 {
        let paths = lock(&h.paths).get(&(qp as usize)).copied().unwrap_or_default();
        // SAFETY: the real library has filled it in.
        let a = unsafe { &mut *attr };
        h.rename_back(&mut a.ah_attr, paths.first);
        h.rename_back(&mut a.alt_ah_attr, paths.alternate);
    }
    r
}

/// # Safety
/// As ibv_destroy_qp(3), of a QP of this context.
pub(crate) unsafe fn destroy_qp(h: &Hosted, qp: *mut ibv_qp) -> i32 {
    // Before the memory of the QP can become another's.
    let paths = lock(&h.paths).remove(&(qp as usize));
    // SAFETY: by the contract.
    let r = unsafe { (h.real.calls.destroy_qp)(qp) };
    if let Some(paths) = paths.filter(|_| r != 0) {
        lock(&h.paths).insert(qp as usize, paths);
    }
    r
}

/// # Safety
/// As ibv_create_ah(3), with a PD of this context.
pub(crate) unsafe fn create_ah(h: &Hosted, pd: *mut ibv_pd, attr: &ibv_ah_attr) -> *mut ibv_ah {
    let mut a = *attr;
    if a.is_global != 0
        && let Err(e) = h.resolve_for_datagrams(&mut a)
    {
        return crate::null(e);
    }
    // SAFETY: by the contract.
    let ah = unsafe { (h.real.calls.create_ah)(pd, &raw mut a) };
    trace!("ibv_create_ah({}) of a VF = {ah:p}", Gid(raw(&attr.grh.dgid)));
    ah
}

/// True for the GID of an IPv4 address.
fn is_v4(gid: [u8; 16]) -> bool {
    Ipv6Addr::from(gid).to_ipv4_mapped().is_some()
}

/// True for the GID of a multicast group, also of an IPv4 one (IBTA, annex A17).
fn is_multicast(gid: [u8; 16]) -> bool {
    let address = Ipv6Addr::from(gid);
    address.to_ipv4_mapped().map_or(address.is_multicast(), |v4| v4.is_multicast())
}

/// # Safety
/// As ibv_init_ah_from_wc(3).
pub(crate) unsafe fn init_ah_from_wc(
    h: &Hosted,
    port: u8,
    wc: *mut ibv_wc,
    grh: *mut ibv_grh,
    attr: *mut ibv_ah_attr,
) -> i32 {
    // SAFETY: by the contract.
    let r = unsafe { (h.real.calls.init_ah_from_wc)(h.context, port, wc, grh, attr) };
    if r == 0 {
        // SAFETY: the real library has filled it in.
        h.rename_back(unsafe { &mut *attr }, None);
    }
    r
}

/// # Safety
/// As ibv_query_device(3).
pub(crate) unsafe fn query_device(h: &Hosted, attr: *mut ibv_device_attr) -> i32 {
    // SAFETY: by the contract.
    let r = unsafe { (h.real.calls.query_device)(h.context, attr) };
    if r == 0 {
        // SAFETY: the real library has filled it in.
        h.correct_device(unsafe { &mut *attr });
    }
    r
}

/// # Safety
/// As ibv_query_port(3).
pub(crate) unsafe fn query_port(h: &Hosted, port: u8, attr: *mut ibv_port_attr) -> i32 {
    // SAFETY: by the contract.
    let r = unsafe { (h.real.calls.query_port)(h.context, port, attr) };
    if r == 0 {
        // SAFETY: the real library has filled it in.
        unsafe { h.correct_port(port, attr) };
    }
    r
}

/// In the place of `verbs_context::query_port`.
pub(super) unsafe extern "C" fn query_port_inline(
    c: *mut ibv_context,
    port: u8,
    attr: *mut ibv_port_attr,
    size: usize,
) -> i32 {
    // SAFETY: the caller passes its context.
    let Some((h, real)) = unsafe { of(c) }.and_then(|h| Some((h.clone(), h.query_port?))) else { return libc::EINVAL };
    // SAFETY: room for `size` bytes; a client of an older version has less than the newest structure.
    let r = unsafe { real(c, port, attr, size) };
    if r == 0 {
        // SAFETY: as `query_port`.
        unsafe { h.correct_port(port, attr) };
    }
    r
}

/// In the place of `verbs_context::query_device_ex`.
pub(super) unsafe extern "C" fn query_device_ex_inline(
    c: *mut ibv_context,
    input: *const c_void,
    attr: *mut ibv_device_attr_ex,
    size: usize,
) -> i32 {
    // SAFETY: the caller passes its context.
    let found = unsafe { of(c) }.and_then(|h| Some((h.clone(), h.query_device_ex?)));
    let Some((h, real)) = found else { return libc::EINVAL };
    // SAFETY: room for `size` bytes.
    let r = unsafe { real(c, input, attr, size) };
    if r == 0 {
        // SAFETY: the structure begins with the attributes of ibv_query_device(3).
        h.correct_device(unsafe { &mut *attr.cast::<ibv_device_attr>() });
    }
    r
}

/// # Safety
/// As ibv_resolve_eth_l2_from_gid(3).
pub(crate) unsafe fn resolve_mac(h: &Hosted, attr: &ibv_ah_attr, mac: *mut u8, vid: *mut u16) -> i32 {
    let mut a = *attr;
    if let Err(e) = h.resolve_for_datagrams(&mut a) {
        set_errno(e);
        return -e;
    }
    // SAFETY: by the contract.
    let r = unsafe { (h.real.calls.resolve_mac)(h.context, from_mut(&mut a), mac, vid) };
    if r != 0 {
        set_errno(errno());
    }
    r
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gids_of_multicast_groups() {
        let of = |text: &str| is_multicast(text.parse::<Ipv6Addr>().unwrap().octets());
        assert!(["::ffff:224.0.0.1", "::ffff:239.1.2.3", "ff0e::1"].into_iter().all(of));
        assert!(!["::ffff:10.0.0.1", "::ffff:240.0.0.1", "fe80::1", "::", "::224.0.0.1"].into_iter().any(of));
    }

    #[test]
    fn answers_are_kept_for_their_life_and_never_too_many() {
        let (answers, now) = (Answers::default(), Instant::now());
        let answer = |max_mtu| abi::ResolveResp { dgid: [7; 16], max_mtu, reserved: 0 };
        answers.put(([1; 16], 0, QPT_RC), answer(3), now);
        let just_before = now + ANSWER_LIFE - Duration::from_nanos(1);
        assert_eq!(answers.get(([1; 16], 0, QPT_RC), just_before).map(|a| a.max_mtu), Some(3));
        assert!(answers.get(([1; 16], 0, QPT_RC), now + ANSWER_LIFE).is_none());
        for other in [([2; 16], 0, QPT_RC), ([1; 16], 1, QPT_RC), ([1; 16], 0, QPT_UD)] {
            assert!(answers.get(other, now).is_none());
        }
        let gid = |n: u32| {
            let mut gid = [0; 16];
            gid[..4].copy_from_slice(&n.to_ne_bytes());
            gid
        };
        for n in 0..2 * MAX_ANSWERS as u32 {
            answers.put((gid(n), 0, QPT_RC), answer(n), now);
        }
        assert_eq!(lock(&answers.0).len(), MAX_ANSWERS);
        // Those that are too old make room.
        answers.put((gid(u32::MAX), 0, QPT_RC), answer(1), now + ANSWER_LIFE);
        assert_eq!(lock(&answers.0).len(), 1);
    }
}
