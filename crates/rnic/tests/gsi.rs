//! The QP for the general services: a driver that is its own communication manager, with peers that leave that to the
//! device, and with a peer like itself.

use unirdma_abi as abi;
use unirdma_formats::cm::{About, GSI_QKEY, GSI_QPN, MAD_BYTES, Mad, Message, reason};
use unirdma_formats::{QpType, WcStatus, WrOpcode, send_flags};
use unirdma_rnic::CmEventKind::*;
use unirdma_simkit::cm::*;
use unirdma_simkit::net::gid;
use unirdma_simkit::*;

/// Bytes before the data of a datagram.
const GRH: usize = 40;
/// Where a driver puts the messages that it sends.
const OUT: usize = 4096;

/// Sends a message from the services of `e` to the services of the vRNIC with the address of end `to`.
fn send(e: &mut End, to: usize, mad: &[u8]) {
    e.fill(OUT, mad);
    let mut w = abi::SqWqe { dest_qpn: GSI_QPN, qkey: GSI_QKEY, ..wqe(WrOpcode::Send, 5) };
    w.send_flags |= send_flags::ADDRESS;
    w.set_address(&address(gid(to)));
    let sge = e.sge(OUT as u64, mad.len() as u32);
    e.post(w, &[sge]);
}

/// The message that has come to the services of `e`.
fn received(e: &mut End) -> Mad {
    let c = e.done();
    assert_eq!((status(&c), c.byte_len, c.src_qp), (WcStatus::Success, (GRH + MAD_BYTES) as u32, GSI_QPN));
    Mad::parse(&e.bytes(GRH, MAD_BYTES)).expect("a message of connection management")
}

fn ready(e: &mut End) {
    let sge = e.sge(0, (GRH + MAD_BYTES) as u32);
    e.recv(1, &[sge]);
}

#[test]
fn a_drivers_own_manager_talks_to_that_of_the_device() {
    for (place, mut cm) in Cm::each() {
        let vrnic = cm.net.ends[1].vrnic;
        let mut e = End::of_services(cm.net.rnic(1), vrnic);
        ready(&mut e);
        cm.connect(b"hello");
        cm.net.run(SECOND / 100);
        let mad = received(&mut e);
        let Message::Req(req) = mad.message else { panic!("{place}: {mad:?}") };
        assert!(cm.events(0).is_empty() && cm.events(1).is_empty(), "{place}");
        let message = Message::Rej {
            local_id: 0,
            remote_id: req.local_id,
            about: About::Req,
            reason: reason::CONSUMER,
            info: Vec::new(),
            private: Vec::new(),
        };
        send(&mut e, 0, &Mad { tid: mad.tid, message }.bytes());
        cm.net.run(SECOND / 100);
        assert_eq!(status(&e.done()), WcStatus::Success, "{place}");
        assert_eq!(cm.event(0, Rejected).status, i32::from(reason::CONSUMER), "{place}");
    }
}

#[test]
fn two_managers_of_drivers_talk_and_nobody_else_hears() {
    for (place, mut cm) in Cm::each() {
        let vrnics = [0, 1].map(|i| cm.net.ends[i].vrnic);
        let mut ends = [0, 1].map(|i| End::of_services(cm.net.rnic(i), vrnics[i]));
        ready(&mut ends[1]);
        let message = Message::Drep { local_id: 3, remote_id: 4, private: Vec::new() };
        send(&mut ends[0], 1, &Mad { tid: 9, message }.bytes());
        cm.net.run(SECOND / 100);
        assert_eq!(received(&mut ends[1]).tid, 9, "{place}");
        assert_eq!(status(&ends[0].done()), WcStatus::Success, "{place}");
    }
}

#[test]
fn a_programs_datagram_to_the_services_is_not_believed() {
    for (place, mut cm) in Cm::each() {
        let vrnics = [0, 1].map(|i| cm.net.ends[i].vrnic);
        let mut e = End::of_services(cm.net.rnic(1), vrnics[1]);
        ready(&mut e);
        let mut program = End::of_vrnic(cm.net.rnic(0), vrnics[0], 64, QpType::Ud);
        for (mask, attr) in attrs_of(QpType::Ud, 0, gid(1)) {
            let attr = abi::QpAttr { qkey: GSI_QKEY, ..attr };
            cm.net.rnic(0).modify_qp(program.session, program.qpn, mask, &attr).unwrap();
        }
        send(&mut program, 1, &[0; MAD_BYTES]);
        cm.net.run(SECOND / 10);
        assert_eq!(status(&program.done()), WcStatus::Success, "{place}: it has left");
        assert!(e.poll().is_empty(), "{place}");
    }
}

#[test]
fn a_vrnic_has_one_until_it_is_destroyed_and_messages_go_to_the_device_again() {
    let (_, mut cm) = Cm::each().into_iter().next().unwrap();
    let vrnic = cm.net.ends[1].vrnic;
    let first = End::of_services(cm.net.rnic(1), vrnic);
    let s = cm.net.rnic(1).add_session(vrnic).unwrap();
    let rnic = cm.net.rnic(1);
    let pd = rnic.create_pd(s).unwrap();
    rnic.set_doorbell(s, unirdma_mem::Bell::new(aligned(4096)).unwrap()).unwrap();
    let ring = unirdma_mem::CqRing::new(aligned(128), aligned(4096), 64).unwrap();
    let cq = rnic.create_cq(s, ring, None).unwrap();
    let cap = abi::QpCap { max_send_wr: 1, max_recv_wr: 1, max_send_sge: 1, max_recv_sge: 1, max_inline_data: 0 };
    let mut create = || {
        let l = abi::QpLayout::of(&cap).unwrap();
        let rings = unirdma_mem::QpRings::new(aligned(128), aligned(l.sq_bytes()), aligned(l.rq_bytes()), l).unwrap();
        let (send_cq, recv_cq) = (cq, cq);
        let c =
            unirdma_rnic::CreateQp { pd, send_cq, recv_cq, srq: None, xrcd: None, door: 0, sig_all: false, cap, rings };
        cm.net.rnic(1).create_qp(s, abi::QP_TYPE_GSI, c).map(|c| c.0)
    };
    assert_eq!(create(), Err(abi::Status::Exhausted));
    cm.net.rnic(1).remove_session(first.session);
    cm.listen(1);
    cm.connect(b"");
    cm.net.run(SECOND / 10);
    cm.event(1, ConnectRequest);
}
