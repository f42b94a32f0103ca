//! Guarantees that hold for a program while other programs take the cores from the pollers.
#![allow(missing_docs)]

use std::sync::atomic::{AtomicBool, Ordering};

use unirdma_abi as abi;
use unirdma_driver::{Context, Cq, Mr, Qp, QpInit, SendWr};
use unirdma_formats::{WrOpcode, access, attr_mask as m};
use unirdma_testkit::TestHost;

const QKEY: u32 = 5;
const BURST: u32 = 10;
const ROUNDS: usize = 50;

/// Makes the pollers run only when no other thread wants their cores.
fn starve_pollers() {
    let mut found = 0;
    for task in std::fs::read_dir("/proc/self/task").unwrap().flatten() {
        let name = std::fs::read_to_string(task.path().join("comm")).unwrap_or_default();
        if name.starts_with("poller") {
            let tid = task.file_name().to_str().unwrap().parse().unwrap();
            // SAFETY: plain bytes.
            let none: libc::sched_param = unsafe { std::mem::zeroed() };
            // SAFETY: the parameters live during the call.
            assert_eq!(unsafe { libc::sched_setscheduler(tid, libc::SCHED_IDLE, &raw const none) }, 0);
            found += 1;
        }
    }
    assert!(found > 0, "there are pollers");
}

/// A UD QP in RTS and its CQ.
fn datagram_qp(ctx: &std::sync::Arc<Context>, pdn: u32) -> (Qp, Cq) {
    let cq = Cq::create(ctx, 64, None, false).unwrap();
    let cap = abi::QpCap { max_send_wr: 16, max_recv_wr: 16, max_send_sge: 1, max_recv_sge: 1, max_inline_data: 64 };
    let init = QpInit {
        pdn,
        qp_type: 4,
        sig_all: false,
        send_cqn: cq.cqn,
        recv_cqn: cq.cqn,
        srqn: None,
        xrcdn: None,
        cap,
        alone: false,
    };
    let qp = Qp::create(ctx, &init).unwrap();
    let a = abi::QpAttr { port_num: 1, qkey: QKEY, ..Default::default() };
    for (state, mask) in [(1, m::PKEY_INDEX | m::PORT | m::QKEY), (2, 0), (3, m::SQ_PSN)] {
        qp.modify(m::STATE | mask, &abi::QpAttr { qp_state: state, ..a }).unwrap();
    }
    (qp, cq)
}

/// As `mckey` of librdmacm does: it sends unsignaled datagrams, and then destroys its AH and its QP.
#[test]
fn datagrams_posted_before_their_ah_and_qp_are_destroyed_arrive() {
    let host = TestHost::start();
    let (here, there) = (host.add("a", "10.0.0.1"), host.add("b", "10.0.0.2"));
    let (ctx, peer) = (Context::open(&here).unwrap(), Context::open(&there).unwrap());
    let pd = |c: &Context| c.command::<_, abi::HandleResp>(abi::Command::CreatePd, &[0u8; 0]).unwrap().handle;
    let (pdn, peer_pdn) = (pd(&ctx), pd(&peer));
    let gid: abi::QueryGidResp = peer.command(abi::Command::QueryGid, &abi::QueryGidReq { port: 1, index: 0 }).unwrap();
    let buf = vec![0u8; 4096].into_boxed_slice();
    let at = buf.as_ptr() as u64;
    let mr = Mr::register(&peer, peer_pdn, at, 4096, at, access::LOCAL_WRITE).unwrap();
    let (to, to_cq) = datagram_qp(&peer, peer_pdn);

    starve_pollers();
    let done = AtomicBool::new(false);
    let received = std::thread::scope(|s| {
        for _ in 0..std::thread::available_parallelism().map_or(1, |n| n.get()) {
            s.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
        }
        let mut received = Vec::new();
        for _ in 0..ROUNDS {
            for _ in 0..BURST {
                to.recv_batch().push(1, &[abi::Sge { addr: at, length: 4096, lkey: mr.key }]).unwrap();
            }
            let (qp, cq) = datagram_qp(&ctx, pdn);
            let grh = abi::GlobalRoute { dgid: gid.gid, ..Default::default() };
            let attr = abi::AhAttr { grh, is_global: 1, port_num: 1, ..Default::default() };
            let req = abi::CreateAhReq { pdn, reserved: 0, attr };
            let ah: abi::HandleResp = ctx.command(abi::Command::CreateAh, &req).unwrap();
            let opcode = WrOpcode::Send as u8;
            let wqe = abi::SqWqe { opcode, ah: ah.handle, dest_qpn: to.qpn, qkey: QKEY, ..Default::default() };
            for _ in 0..BURST {
                // SAFETY: the data is a list without entries, nothing is read here.
                unsafe { qp.send_batch().push(&wqe, SendWr::Sges(&[])) }.unwrap();
            }
            let handle = abi::HandleReq { handle: ah.handle, reserved: 0 };
            ctx.command_void(abi::Command::DestroyAh, &handle).unwrap();
            qp.destroy().unwrap();
            cq.destroy().unwrap();
            // All datagrams must have arrived: nothing is left to run for them.
            let mut n = 0;
            while to_cq.poll(16, |_, c| n += u32::from(c.status == 0)).unwrap() > 0 {}
            received.push(n);
            if n < BURST {
                break;
            }
        }
        done.store(true, Ordering::Relaxed);
        received
    });
    assert_eq!(received, [BURST; ROUNDS]);
}
