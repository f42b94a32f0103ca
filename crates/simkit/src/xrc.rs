//! Extended reliable connections: shared receive queues that messages name, and targets.

use unirdma_abi as abi;
use unirdma_formats::QpType;
use unirdma_mem::QpRings;
use unirdma_rnic::{CreateQp, OpenXrcd, Rnic, SrqAttr};
use zerocopy::IntoBytes;

use crate::net::{Net, gid};
use crate::{End, aligned, attrs_of};

/// An XRC SRQ of a program.
pub struct XrcSrq {
    /// The XRC domain, as its session calls it.
    pub xrcd: u32,
    /// The SRQ, as its session calls it.
    pub srq: u32,
    /// The number by which messages name it.
    pub number: u32,
    rings: QpRings,
    prod: u32,
}

impl XrcSrq {
    /// Opens an XRC domain in the session of an end and makes an SRQ in it, with the end's CQ.
    pub fn new(rnic: &mut Rnic, e: &End, open: OpenXrcd) -> XrcSrq {
        let xrcd = rnic.create_xrcd(e.session, open).unwrap();
        let cap = abi::QpCap { max_recv_wr: 16, max_recv_sge: 2, ..Default::default() };
        let layout = abi::QpLayout::of(&cap).unwrap();
        let rings = QpRings::receive_only(aligned(128), aligned(layout.rq_bytes()), layout).unwrap();
        let attr = SrqAttr { max_wr: 16, max_sge: 2, limit: 0, xrc: Some((xrcd, e.cqn)) };
        let (srq, number) = rnic.create_srq(e.session, e.pd, attr, rings.clone()).unwrap();
        XrcSrq { xrcd, srq, number, rings, prod: 0 }
    }

    /// Posts a receive.
    pub fn recv(&mut self, wr_id: u64, sge: abi::Sge) {
        let head = abi::RqWqe { wr_id, num_sge: 1, reserved: 0 };
        self.rings.rq_put(self.prod, 0, head.as_bytes());
        self.rings.rq_put(self.prod, abi::RQ_DATA, [sge].as_bytes());
        self.prod += 1;
        self.rings.set_rq_prod(self.prod);
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
    let cap = abi::QpCap::default();
    let layout = abi::QpLayout::of(&cap).unwrap();
    let rings = QpRings::new(aligned(128), aligned(layout.sq_bytes()), aligned(layout.rq_bytes()), layout).unwrap();
    let create =
        CreateQp { pd: 0, send_cq: 0, recv_cq: 0, srq: None, xrcd: Some(xrcd), door: 0, sig_all: false, cap, rings };
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
