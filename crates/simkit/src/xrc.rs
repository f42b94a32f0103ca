//! Extended reliable connections: XRC SRQs, which messages name, and target QPs.

use std::ops::{Deref, DerefMut};

use unirdma_abi as abi;
use unirdma_formats::QpType;
use unirdma_mem::QpRings;
use unirdma_rnic::{CreateQp, OpenXrcd, Rnic, SrqAttr};
use zerocopy::IntoBytes;

use crate::net::{Net, gid};
use crate::{End, aligned, attrs_of, create_of};

/// A shared receive queue of a program.
pub struct SharedQueue {
    /// The session's handle of the SRQ.
    pub srq: u32,
    /// The number by which messages name it, if it is an XRC SRQ.
    pub number: u32,
    rings: QpRings,
    prod: u32,
}

impl SharedQueue {
    /// Makes an SRQ of 16 receives in the PD of an end; of an XRC domain and with a CQ, if it is an XRC SRQ.
    pub fn new(rnic: &mut Rnic, e: &End, xrc: Option<(u32, u32)>) -> SharedQueue {
        let cap = abi::QpCap { max_recv_wr: 16, max_recv_sge: 4, ..Default::default() };
        let layout = abi::QpLayout::of(&cap).unwrap();
        let rings = QpRings::receive_only(aligned(128), aligned(layout.rq_bytes()), layout).unwrap();
        let attr = SrqAttr { max_wr: 16, max_sge: 4, limit: 0, xrc };
        let (srq, number) = rnic.create_srq(e.session, e.pd, attr, rings.clone()).unwrap();
        SharedQueue { srq, number, rings, prod: 0 }
    }

    /// Posts a receive.
    pub fn recv(&mut self, wr_id: u64, sges: &[abi::Sge]) {
        self.recv_raw(abi::RqWqe { wr_id, num_sge: sges.len() as u32, reserved: 0 }, sges);
    }

    /// Posts a receive WQE with this header, which may be wrong.
    pub fn recv_raw(&mut self, head: abi::RqWqe, sges: &[abi::Sge]) {
        self.rings.rq_put(self.prod, 0, head.as_bytes());
        self.rings.rq_put(self.prod, abi::RQ_DATA, sges.as_bytes());
        self.prod += 1;
        self.rings.set_rq_prod(self.prod);
    }

    /// Number of free slots.
    pub fn free(&self) -> u32 {
        self.rings.rq_free(self.prod)
    }
}

/// An XRC SRQ of a program, and its domain.
pub struct XrcSrq {
    /// The session's handle of the XRC domain.
    pub xrcd: u32,
    /// The SRQ.
    pub queue: SharedQueue,
}

impl XrcSrq {
    /// Opens an XRC domain in the session of an end and makes an SRQ in it, with the end's CQ.
    pub fn new(rnic: &mut Rnic, e: &End, open: OpenXrcd) -> XrcSrq {
        let xrcd = rnic.create_xrcd(e.session, open).unwrap();
        XrcSrq { xrcd, queue: SharedQueue::new(rnic, e, Some((xrcd, e.cqn))) }
    }
}

impl Deref for XrcSrq {
    type Target = SharedQueue;

    fn deref(&self) -> &SharedQueue {
        &self.queue
    }
}

impl DerefMut for XrcSrq {
    fn deref_mut(&mut self) -> &mut SharedQueue {
        &mut self.queue
    }
}

/// Makes a target QP in the session of end `to`, connected to the initiator of end `from`. Returns its QPN.
pub fn connect_target(
    net: &mut Net,
    from: usize,
    to: usize,
    xrcd: u32,
    change: &impl Fn(abi::QpAttr) -> abi::QpAttr,
) -> u32 {
    let create = CreateQp { xrcd: Some(xrcd), ..create_of(0, 0, 0) };
    let session = net.session(to);
    let (target, _) = net.rnic(to).create_qp(session, QpType::XrcRecv as u8, create).unwrap();
    let (s, qpn) = (net.session(from), net.ends[from].qpn);
    for (mask, attr) in attrs_of(QpType::XrcSend, target, gid(to)) {
        net.rnic(from).modify_qp(s, qpn, mask, &change(attr)).unwrap();
    }
    for (mask, attr) in attrs_of(QpType::XrcRecv, qpn, gid(from)) {
        net.rnic(to).modify_qp(session, target, mask, &change(attr)).unwrap();
    }
    target
}
