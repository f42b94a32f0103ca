//! An executor that follows a test's script, and tests of the code that calls executors.

use std::sync::{Arc, Mutex};

use unirdma_abi as abi;
use unirdma_abi::Status;
use unirdma_formats::wire::Packet;
use unirdma_formats::{Gid, QpType, WcStatus, access, attr_mask as m};
use unirdma_mem::{Bell, CqRing, CqTail, QpRings, Span};

use crate::core::Core;
use crate::executor::{Executor, Object, Peer};
use crate::objects::{Backing, CreateQp, Limits, Qp, SessionId, VrnicConfig, VrnicId};
use crate::path::{Arrival, Route};
use crate::rnic::Rnic;
use crate::slab::Handle;

/// A call that an executor has received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Told {
    JobResult(Object),
    Gone(Object),
    Connect(Peer),
    Modified(u32),
    Reset,
    Sever,
    Step,
}

/// The state that a test and its executor share.
#[derive(Default)]
struct Script {
    told: Vec<Told>,
    /// The status with which the next object or connection is refused.
    refuses: Option<Status>,
    /// How each WQE ends.
    ends_with: Option<WcStatus>,
    /// The cost of a turn, nanoseconds.
    cost_ns: u64,
}

#[derive(Clone, Default)]
struct Scripted(Arc<Mutex<Script>>);

impl Scripted {
    fn script(&self) -> std::sync::MutexGuard<'_, Script> {
        self.0.lock().unwrap()
    }

    fn tell(&self, what: Told) -> Result<(), Status> {
        let mut s = self.script();
        s.told.push(what);
        s.refuses.take().map_or(Ok(()), Err)
    }

    /// The calls since this was asked last.
    fn told(&self) -> Vec<Told> {
        std::mem::take(&mut self.script().told)
    }
}

impl Executor<Core> for Scripted {
    fn made(&mut self, _: &mut Core, object: Object) -> Result<(), Status> {
        self.tell(Told::JobResult(object))
    }

    fn gone(&mut self, _: &mut Core, object: Object) {
        self.script().told.push(Told::Gone(object));
    }

    fn connect(&mut self, _: &mut Core, _: Handle<Qp>, peer: Peer) -> Result<(), Status> {
        self.tell(Told::Connect(peer))
    }

    fn modified(&mut self, _: &mut Core, _: Handle<Qp>, mask: u32) {
        self.script().told.push(Told::Modified(mask));
    }

    fn reset(&mut self, _: &mut Core, _: Handle<Qp>) {
        self.script().told.push(Told::Reset);
    }

    fn disconnect(&mut self, _: &mut Core, _: Handle<Qp>) {
        self.script().told.push(Told::Sever);
    }

    /// Ends one WQE a turn, as the script says, without executing it.
    fn step(&mut self, core: &mut Core, qp: Handle<Qp>, _: u64) -> (u64, bool) {
        let (status, cost_ns) = {
            let mut s = self.script();
            s.told.push(Told::Step);
            (s.ends_with, s.cost_ns)
        };
        let q = core.objects.qps.get(qp).unwrap();
        if status.is_none() || q.rings.sq_pending(q.sq_cons).unwrap() == 0 {
            return (cost_ns, false);
        }
        let mut work = core.objects.spare.work();
        let _ = crate::exec::load(q, q.sq_cons, &mut work);
        core.retire(qp, &work, status.unwrap());
        core.objects.spare.keep_work(work);
        (cost_ns, true)
    }

    fn timer(&mut self, _: &mut Core, _: Handle<Qp>) {}

    fn packet(&mut self, _: &mut Core, _: Handle<Qp>, _: &Arrival, _: &Packet<'_>, _: &[u8]) {}
}

/// Memory that begins at a multiple of 64.
fn aligned(len: usize) -> Span {
    let s = Span::anonymous(len + 64);
    s.sub((64 - s.addr() as u64 % 64) % 64, len as u64).unwrap()
}

fn gid(n: u8) -> Gid {
    Gid::from_ip([10, 0, 0, n].into())
}

/// A program on a vRNIC of its own.
struct Program {
    vrnic: VrnicId,
    session: SessionId,
    bell: Bell,
    pd: u32,
    cqn: u32,
    cq: CqTail,
    rings: QpRings,
}

impl Program {
    fn new(rnic: &mut Rnic, group: u32, n: u8) -> Program {
        let config = VrnicConfig { group, gids: vec![gid(n)], limits: Limits::default(), share: Default::default() };
        let vrnic = rnic.add_vrnic(config).unwrap();
        let session = rnic.add_session(vrnic).unwrap();
        let bell = Bell::new(aligned(4096)).unwrap();
        rnic.set_doorbell(session, bell.clone()).unwrap();
        rnic.unpark(session, 0);
        let pd = rnic.create_pd(session).unwrap();
        let (ctrl, ring) = (aligned(128), aligned(64 * 64));
        let cqn = rnic.create_cq(session, CqRing::new(ctrl.clone(), ring.clone(), 64).unwrap(), None).unwrap();
        let cq = CqTail::new(ctrl, ring, 64).unwrap();
        let layout = abi::QpLayout::of(&CAP).unwrap();
        let rings = QpRings::new(aligned(128), aligned(layout.sq_bytes()), aligned(layout.rq_bytes()), layout).unwrap();
        Program { vrnic, session, bell, pd, cqn, cq, rings }
    }

    fn create_qp(&self, rnic: &mut Rnic) -> Result<(u32, u32), Status> {
        let (pd, cq, rings) = (self.pd, self.cqn, self.rings.clone());
        let create =
            CreateQp { pd, send_cq: cq, recv_cq: cq, srq: None, xrcd: None, door: 0, sig_all: true, cap: CAP, rings };
        rnic.create_qp(self.session, QpType::Rc as u8, create)
    }

    fn reg_mr(&self, rnic: &mut Rnic) -> Result<(u32, u32), Status> {
        let memory = (Backing::Mapped(aligned(4096)), vec![1]);
        rnic.reg_mr(self.session, self.pd, access::LOCAL_WRITE, 0, 4096, memory)
    }

    /// Moves a QP to INIT, and on to RTR with this destination.
    fn connect(&self, rnic: &mut Rnic, qpn: u32, to: Gid) -> Result<(), Status> {
        let init = abi::QpAttr { qp_state: 1, port_num: 1, ..Default::default() };
        rnic.modify_qp(self.session, qpn, m::STATE | m::PKEY_INDEX | m::PORT | m::ACCESS_FLAGS, &init)?;
        let grh = abi::GlobalRoute { dgid: to.0, hop_limit: 1, ..Default::default() };
        let ah_attr = abi::AhAttr { grh, is_global: 1, port_num: 1, ..Default::default() };
        let rtr = abi::QpAttr { qp_state: 2, ah_attr, path_mtu: 3, dest_qp_num: 5, ..Default::default() };
        let mask = m::AV | m::PATH_MTU | m::DEST_QPN | m::RQ_PSN | m::MAX_DEST_RD_ATOMIC | m::MIN_RNR_TIMER;
        rnic.modify_qp(self.session, qpn, m::STATE | mask, &rtr)
    }
}

const CAP: abi::QpCap =
    abi::QpCap { max_send_wr: 16, max_recv_wr: 16, max_send_sge: 4, max_recv_sge: 4, max_inline_data: 64 };

fn rnic() -> (Rnic, Scripted) {
    let script = Scripted::default();
    (Rnic::with_executor(7, 0, Box::new(script.clone())), script)
}

#[test]
fn what_was_made_goes_once_and_after_what_uses_it() {
    let (mut rnic, script) = rnic();
    let p = Program::new(&mut rnic, 0, 1);
    p.reg_mr(&mut rnic).unwrap();
    p.create_qp(&mut rnic).unwrap();
    let made: Vec<Object> =
        script.told().into_iter().map(|t| if let Told::JobResult(o) = t { o } else { panic!("{t:?}") }).collect();
    assert!(matches!(made[..], [Object::Pd(_), Object::Cq(_), Object::Mr(_), Object::Qp(_)]), "{made:?}");
    rnic.remove_session(p.session);
    let told = script.told();
    let gone: Vec<Object> = told.iter().map(|t| if let Told::Gone(o) = t { *o } else { panic!("{t:?}") }).collect();
    assert_eq!(gone, [made[3], made[1], made[2], made[0]]);
    assert_eq!(rnic.usage(p.vrnic), crate::Usage::default());
}

#[test]
fn what_the_executor_refuses_leaves_nothing_behind() {
    let (mut rnic, script) = rnic();
    let p = Program::new(&mut rnic, 0, 1);
    let before = rnic.usage(p.vrnic);
    for _ in 0..3 {
        script.script().refuses = Some(Status::Exhausted);
        assert_eq!(p.reg_mr(&mut rnic), Err(Status::Exhausted));
        script.script().refuses = Some(Status::Unsupported);
        assert_eq!(p.create_qp(&mut rnic), Err(Status::Unsupported));
        script.script().refuses = Some(Status::Exhausted);
        assert_eq!(rnic.create_pd(p.session), Err(Status::Exhausted));
        assert_eq!(rnic.usage(p.vrnic), before);
    }
    let (qpn, _) = p.create_qp(&mut rnic).unwrap();
    rnic.destroy_qp(p.session, qpn).unwrap();
    rnic.destroy_cq(p.session, p.cqn).unwrap();
    rnic.destroy_pd(p.session, p.pd).unwrap();
}

#[test]
fn only_peers_of_the_group_are_connected_to() {
    let (mut rnic, script) = rnic();
    let (p, friend, other) =
        (Program::new(&mut rnic, 1, 1), Program::new(&mut rnic, 1, 2), Program::new(&mut rnic, 2, 3));
    let host = [192, 0, 2, 1].into();
    let route = Route { host, foreign: false, vni: 9 };
    rnic.set_routes([((1, gid(4)), route), ((2, gid(5)), route)].into());
    let connected = |rnic: &mut Rnic, to: Gid| {
        let (qpn, _) = p.create_qp(rnic).unwrap();
        script.told();
        let r = p.connect(rnic, qpn, to);
        let peers = script.told().into_iter().filter_map(|t| if let Told::Connect(p) = t { Some(p) } else { None });
        (r, peers.collect::<Vec<_>>())
    };
    assert_eq!(connected(&mut rnic, gid(2)), (Ok(()), vec![Peer::Here(friend.vrnic)]));
    let (r, there) = connected(&mut rnic, gid(4));
    assert!(r.is_ok() && matches!(there[..], [Peer::There(path)] if path.to == host), "{there:?}");
    assert!(other.vrnic != friend.vrnic);
    for stranger in [3, 5, 6] {
        assert_eq!(connected(&mut rnic, gid(stranger)), (Err(Status::Unreachable), vec![]));
    }
    script.script().refuses = None;
    let (qpn, _) = p.create_qp(&mut rnic).unwrap();
    script.script().refuses = Some(Status::Exhausted);
    // INIT names no peer, so the step to RTR is refused, and the QP stays where it was.
    assert_eq!(p.connect(&mut rnic, qpn, gid(2)), Err(Status::Exhausted));
    assert_eq!(rnic.query_qp(p.session, qpn).unwrap().qp_state, 1);
    let reset = abi::QpAttr::default();
    rnic.modify_qp(p.session, qpn, m::STATE, &reset).unwrap();
    assert_eq!(script.told().last(), Some(&Told::Reset));
}

#[test]
fn a_doorbell_gives_turns_which_are_paid_for_and_complete() {
    let (mut rnic, script) = rnic();
    let mut p = Program::new(&mut rnic, 0, 1);
    let (qpn, slot) = p.create_qp(&mut rnic).unwrap();
    (script.script().ends_with, script.script().cost_ns) = (Some(WcStatus::RemAccessErr), 1000);
    rnic.poll(1);
    assert!(!script.told().contains(&Told::Step), "nobody rang");
    for n in 1..=3 {
        let wqe = abi::SqWqe { wr_id: n, ..Default::default() };
        p.rings.sq_put(n as u32 - 1, 0, zerocopy::IntoBytes::as_bytes(&wqe));
    }
    p.rings.set_sq_prod(3);
    p.bell.ring(slot);
    let mut now = 1;
    while rnic.poll(now) {
        now += 1000;
    }
    let done: Vec<abi::Cqe> = std::iter::from_fn(|| p.cq.pop()).collect();
    let seen: Vec<_> = done.iter().map(|c| (c.wr_id, c.status, c.qp_num)).collect();
    let status = WcStatus::RemAccessErr as u8;
    assert_eq!(seen, [(1, status, qpn), (2, status, qpn), (3, status, qpn)]);
    let steps = script.told().into_iter().filter(|t| *t == Told::Step).count();
    assert_eq!(steps, 4, "three that complete, and one that finds nothing");
    assert!(rnic.busy_ns(p.vrnic) >= 4000, "{}", rnic.busy_ns(p.vrnic));
    assert_eq!(rnic.counters(p.vrnic).unwrap().errors, 3);
}
