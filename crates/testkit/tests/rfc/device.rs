//! The device, its configuration space, and its initialization: R01 to R10.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use unirdma_abi::rfc::{self, cap};
use unirdma_abi::{Command, Status};
use unirdma_link::Segment;
use unirdma_testkit::TestHost;
use unirdma_testkit::rfc::{RfcDriver, qp_request, send};
use vhost::vhost_user::message::FrontendReq;
use zerocopy::{FromBytes, IntoBytes};

use crate::world::{IP, RC, Side, connect, one, two, wc};

#[derive(FromBytes)]
#[repr(C)]
struct Made {
    qp: rfc::QpCreated,
    caps: rfc::QpCaps,
}

/// Numbers of the virtqueues of a new CQ and a new QP.
fn numbers(d: &mut RfcDriver) -> [u32; 3] {
    let pd = d.pd();
    let cqn = d.cq(16).cqn;
    let made: Made = d.command(Command::CreateQp, &qp_request(pd, cqn, cqn, RC)).unwrap();
    assert!(made.qp.qpn.get() < 1 << 24);
    [cqn, made.caps.sq_vq.get(), made.caps.rq_vq.get()]
}

#[test]
fn r01_virtqueues_are_control_then_cqs_then_pairs() {
    let (_host, mut d) = one();
    assert_eq!((d.config.max_cq.get(), d.config.max_qp.get()), (127, 64));
    assert_eq!([numbers(&mut d), numbers(&mut d)], [[1, 128, 129], [2, 130, 131]]);
}

#[test]
fn r01_r06_r07_the_numbers_follow_from_max_cq_and_max_qp() {
    let host = TestHost::start();
    let socket = host.add_with("a", IP[0], |v| (v.max_cq, v.max_qp) = (Some(3), Some(2)));
    let mut d = RfcDriver::new(&socket.with_file_name("rfc.sock"), IP[0]);
    assert_eq!((d.config.max_cq.get(), d.config.max_qp.get()), (3, 2));
    assert_eq!([numbers(&mut d), numbers(&mut d)], [[1, 4, 5], [2, 6, 7]]);
    let large = host.add_with("b", IP[1], |v| (v.max_cq, v.max_qp) = (Some(100_000), Some(4096)));
    let c = RfcDriver::new(&large.with_file_name("rfc.sock"), IP[1]).config;
    assert!((1..=16384).contains(&c.max_cq.get()) && (1..=16384).contains(&c.max_qp.get()));
}

#[test]
fn r02_the_device_has_no_feature_bits_of_its_own() {
    let host = TestHost::start();
    let mut s = UnixStream::connect(host.add_rfc("a", IP[0])).unwrap();
    s.write_all([FrontendReq::GET_FEATURES as u32, 1, 0].as_bytes()).unwrap();
    let mut answer = [0; 20];
    s.read_exact(&mut answer).unwrap();
    let features = u64::from_le_bytes(answer[12..].try_into().unwrap());
    // Bits 0 to 23 and 50 and up are for device types (virtio 1.3, section 2.2).
    assert_eq!(features & (0xff_ffff | !0 << 50), 0, "{features:#x}");
    assert_ne!(features & 1 << 40, 0, "virtqueues can be reset");
}

#[test]
fn r03_r04_capabilities_are_those_of_the_rfc_and_true() {
    let (_host, d) = one();
    let known = cap::BAD_PKEY_CNTR
        | cap::BAD_QKEY_CNTR
        | cap::CHANGE_PHY_PORT
        | cap::UD_AV_PORT_ENFORCE
        | cap::SYS_IMAGE_GUID
        | cap::RC_RNR_NAK_GEN
        | cap::MEM_MGT_EXTENSIONS
        | cap::BLOCK_MULTICAST_LOOPBACK
        | cap::SG_GAPS_REG;
    let caps = d.config.device_cap_flags.get();
    assert_eq!(caps & !known, 0, "{caps:#x}");
    assert_eq!(caps & (cap::MEM_MGT_EXTENSIONS | cap::SG_GAPS_REG), 0);
    assert_ne!(caps & cap::RC_RNR_NAK_GEN, 0);
    assert_eq!(d.config.atomic_cap, 1, "atomic among the QPs of the device");
}

#[test]
fn r05_the_configuration_space_tells_what_there_is_and_ends_with_zeros() {
    let (_host, mut d) = one();
    let c = d.config;
    assert_eq!((c.phys_port_cnt.get(), c.max_pkeys.get(), c.page_size_cap.get()), (1, 1, 4096));
    assert_eq!((c.max_qp_wr.get(), c.max_cqe.get(), c.max_send_sge.get()), (1024, 4096, 32));
    assert_eq!((c.max_mw.get(), c.max_mcast_grp.get(), c.max_fast_reg_page_list_len.get()), (0, 0, 0));
    assert!(c.max_mr.get() > 0 && c.max_pd.get() > 0 && c.max_qp_rd_atom.get() > 0 && c.max_mr_size.get() > 0);
    // In network byte order the EUI-64 has ff fe in its middle.
    assert_eq!(c.sys_image_guid[3..5], [0xff, 0xfe]);
    let whole = d.frontend.config(256).unwrap();
    assert_eq!((&whole[..128], &whole[128..]), (c.as_bytes(), &[0; 128][..]));
}

#[test]
fn r08_the_configuration_space_cannot_be_written() {
    let (_host, mut d) = one();
    let before = d.frontend.config(256).unwrap();
    let mut payload = [0u32, 4, 0].as_bytes().to_vec();
    payload.extend_from_slice(&[0xff; 4]);
    assert!(d.frontend.tell(FrontendReq::SET_CONFIG, &payload, &[], true).is_err());
    assert_eq!(d.frontend.config(256).unwrap(), before);
}

#[test]
fn r09_all_virtqueues_may_be_set_up_before_there_is_an_object() {
    let (_host, [mut a, b]) = two();
    let mut b = Side::new(b, RC);
    let mut queues: Vec<_> = (1..=255).map(|i| a.new_queue(i, 4, 256)).collect();
    for vq in &mut queues {
        a.start(vq).unwrap();
        if vq.index <= 127 {
            vq.fill(38);
        }
    }
    let pd = a.pd();
    let made: rfc::CqCreated = a.command(Command::CreateCq, &rfc::CreateCq { cqe: 8.into() }).unwrap();
    // The send is posted, and the queue kicked, before its QP exists.
    let mr = a.mr(pd, 4096, 15);
    let mut r = send(rfc::opcode::RDMA_WRITE, 3);
    r.num_sge = 1.into();
    r.set_part(&b.mr.remote(0));
    a.write(&mr, 0, b"early");
    assert!(queues[127].post(&[r.as_bytes(), mr.sge(0, 5).as_bytes()].concat()));
    queues[127].kick();
    let cqn = made.cqn.get();
    let qp: Made = a.command(Command::CreateQp, &qp_request(pd, cqn, cqn, RC)).unwrap();
    assert_eq!((cqn, qp.caps.sq_vq.get()), (1, 128));
    let qpn = qp.qp.qpn.get();
    a.connect(qpn, RC, b.d.gid, b.qp.qpn).unwrap();
    b.d.connect(b.qp.qpn, RC, a.gid, qpn).unwrap();
    let cq = &mut queues[0];
    let (head, len) = unirdma_testkit::rfc::wait_for("a completion", || cq.queue.pop_used());
    let mut cqe = [0; 38];
    a.memory().read((cq.buffer(head) - unirdma_testkit::rfc::BUS) as usize, &mut cqe);
    let cqe = rfc::Cqe::read_from_bytes(&cqe).unwrap();
    assert_eq!((len, cqe.wr_id.get(), cqe.status, b.bytes(0, 5)), (38, 3, wc::SUCCESS, b"early".to_vec()));
}

#[test]
fn r09_the_network_interface_lies_beside_the_device() {
    let host = TestHost::start();
    let rfc = host.add_rfc("a", IP[0]);
    let mut net = UnixStream::connect(rfc.with_file_name("net.sock")).unwrap();
    net.write_all([FrontendReq::GET_QUEUE_NUM as u32, 1, 0].as_bytes()).unwrap();
    net.read_exact(&mut [0; 20]).unwrap();
}

#[test]
fn r10_a_request_is_a_command_and_data_and_a_response_a_status_and_data() {
    let (_host, mut d) = one();
    assert_eq!(d.request(&[Command::QueryPort as u8, 1], 162).len(), 162);
    assert_eq!(d.request(&[Command::QueryPort as u8, 1], 4096 - 2048).len(), 162, "room for more is not used");
    for code in [0, 19, 20, 45, 255] {
        assert_eq!(d.request(&[code, 0, 0], 64), [Status::Unsupported as u8], "{code}");
    }
    assert_eq!(d.request(&[], 64), [Status::BadLength as u8]);
    assert_eq!(d.request(&[0; 2000], 64), [Status::BadLength as u8]);
    assert!(d.request(&[Command::CreatePd as u8], 0).is_empty());
    // The descriptor boundaries may lie anywhere (virtio 1.3, section 2.6.4).
    let at = d.take(4096);
    d.memory().write((at - unirdma_testkit::rfc::BUS) as usize, &[Command::QueryPkey as u8, 1, 0, 0, 0, 0, 0]);
    let part = |off, len, write| Segment { addr: at + off, len, write };
    let chain = [part(0, 3, false), part(3, 4, false), part(64, 1, true), part(65, 2, true)];
    assert_eq!(d.chain(&chain), 3);
    let mut answer = [9; 3];
    d.memory().read((at + 64 - unirdma_testkit::rfc::BUS) as usize, &mut answer);
    assert_eq!(answer, [0, 0xff, 0xff]);
}

#[test]
fn r09_a_device_that_was_reset_begins_anew() {
    let (_host, mut a, mut b) = crate::world::pair(RC);
    a.d.reset();
    a.d.add_gid(0, a.d.gid).unwrap();
    let old = rfc::Handle { handle: a.qp.qpn.into() };
    let gone: Result<rfc::Nothing, u8> = a.d.command(Command::DestroyQp, &old);
    assert_eq!(gone, Err(Status::BadHandle as u8));
    let mut a = Side::new(a.d, RC);
    assert_eq!(a.cq.cqn, 1);
    b.d.move_to(b.qp.qpn, 0).unwrap();
    connect(&mut a, &mut b, RC);
    let remote = b.mr.remote(0);
    a.rdma(rfc::opcode::RDMA_WRITE, 1, (0, 8), remote);
    assert_eq!(a.cq.wait().status, wc::SUCCESS);
}
