//! The values that commands accept and refuse, as the drivers of NICs do, and data over the objects that they made.

use unirdma_abi as abi;
use unirdma_abi::Status::{self, BadState, BadValue};
use unirdma_formats::QpState::{Reset, Rts, Sqd};
use unirdma_formats::{QpState, QpType, WcStatus, WrOpcode, attr_mask as m};
use unirdma_rnic::Backing;
use unirdma_simkit::net::{Faults, Net};
use unirdma_simkit::*;

fn each(change: impl Fn(abi::QpAttr) -> abi::QpAttr) -> [(&'static str, Net); 2] {
    [("one host", 1), ("two hosts", 2)].map(|(place, hosts)| {
        let mut net = Net::hosts(hosts, &[QpType::Rc; 2], 3, Faults::default());
        net.connect(QpType::Rc, 0, 1, &change);
        net.connect(QpType::Rc, 1, 0, &change);
        (place, net)
    })
}

/// Moves the QP of end 0 to a state.
fn go(net: &mut Net, to: QpState) -> Result<(), Status> {
    let (s, qpn) = (net.ends[0].session, net.ends[0].qpn);
    net.rnic(0).modify_qp(s, qpn, m::STATE, &abi::QpAttr { qp_state: to as u8, ..Default::default() })
}

fn query(net: &mut Net) -> abi::QpAttr {
    let (s, qpn) = (net.ends[0].session, net.ends[0].qpn);
    net.rnic(0).query_qp(s, qpn).unwrap()
}

#[test]
fn a_send_queue_that_drains_does_not_go_on() {
    for (place, mut net) in each(|a| abi::QpAttr { rnr_retry: 7, ..a }) {
        let (from, room) = (net.ends[0].sge(0, 100), net.ends[1].sge(0, 100));
        net.ends[0].post(wqe(WrOpcode::Send, 1), &[from]);
        net.run(1_000_000);
        go(&mut net, Sqd).unwrap();
        net.run(1_000_000);
        assert_eq!(query(&mut net).sq_draining, 1, "{place}: it waits for a receive");
        assert_eq!([go(&mut net, Rts), go(&mut net, Sqd)], [Err(BadState); 2], "{place}");
        net.ends[1].recv(1, &[room]);
        net.run(SECOND);
        assert_eq!((net.ends[0].done().wr_id, query(&mut net).sq_draining), (1, 0), "{place}");
        assert_eq!([go(&mut net, Sqd), go(&mut net, Rts)], [Ok(()); 2], "{place}");
        // A QP that drains may fail, or start over.
        net.ends[0].post(wqe(WrOpcode::Send, 2), &[from]);
        net.run(1_000_000);
        go(&mut net, Sqd).unwrap();
        go(&mut net, Reset).unwrap();
    }
}

/// mlx5 puts these attributes into fields of its own, and rxe the timer into the field of its NAK: further bits are
/// lost.
#[test]
fn attributes_have_the_bits_of_their_fields() {
    let change = |a: abi::QpAttr| abi::QpAttr {
        min_rnr_timer: 0x2c,
        timeout: 14 | 0x20,
        retry_cnt: 3 | 0x78,
        rnr_retry: 0xff,
        dest_qp_num: a.dest_qp_num | 0x7700_0000,
        rq_psn: a.rq_psn | 0xff00_0000,
        sq_psn: a.sq_psn | 0x0100_0000,
        ..a
    };
    for (place, mut net) in each(change) {
        let (a, peer) = (query(&mut net), net.ends[1].qpn);
        assert_eq!((a.min_rnr_timer, a.timeout, a.retry_cnt, a.rnr_retry), (0xc, 14, 3, 7), "{place}");
        assert_eq!((a.dest_qp_num, a.rq_psn, a.sq_psn), (peer, 100, 100), "{place}");
        let (from, to) = (net.ends[0].sge(0, 100), net.remote(WrOpcode::Write, 1, 0));
        net.ends[0].post(to, &[from]);
        net.run(SECOND);
        assert_eq!(status(&net.ends[0].done()), WcStatus::Success, "{place}");
    }
}

#[test]
fn a_region_may_end_where_addresses_end() {
    for (place, mut net) in each(|a| a) {
        let (len, n) = (10_000, 10_000_u32);
        let first = 0_u64.wrapping_sub(len);
        let (s, pd, memory) = (net.ends[1].session, net.ends[1].pd, net.ends[1].memory.clone());
        let backing = || (Backing::Mapped(memory.clone()), vec![9]);
        let mut reg = |iova, len| net.rnic(1).reg_mr(s, pd, ALL, iova, len, backing());
        assert_eq!(reg(first, len + 1), Err(BadValue), "{place}: no byte beyond");
        let (_, rkey) = reg(first, len).unwrap();
        net.ends[0].fill(0, &pattern(10_000, 1));
        let (from, to) = (net.ends[0].sge(0, n), net.ends[0].sge(20_000, n));
        let request = |op, id, addr| abi::SqWqe { rkey, remote_addr: addr, ..wqe(op, id) };
        net.ends[0].post(request(WrOpcode::Write, 1, first), &[from]);
        net.ends[0].post(request(WrOpcode::Read, 2, first), &[to]);
        let last = net.ends[0].sge(30_000, 1);
        net.ends[0].post(request(WrOpcode::Read, 3, u64::MAX), &[last]);
        net.run(SECOND);
        assert_eq!(net.ends[0].poll().iter().map(status).collect::<Vec<_>>(), [WcStatus::Success; 3], "{place}");
        assert_eq!(net.ends[0].bytes(20_000, 10_000), pattern(10_000, 1), "{place}");
        assert_eq!(net.ends[0].bytes(30_000, 1), pattern(10_000, 1)[9999..], "{place}");
        let beyond = net.ends[0].sge(0, 2);
        net.ends[0].post(request(WrOpcode::Write, 4, u64::MAX), &[beyond]);
        net.run(SECOND);
        assert_eq!(status(&net.ends[0].done()), WcStatus::RemAccessErr, "{place}");
    }
}
