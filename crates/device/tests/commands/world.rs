//! Two sessions of one vRNIC, and functions that make objects as their drivers would.

use std::cell::Cell;
use std::collections::VecDeque;
use std::net::IpAddr;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use unirdma_abi as abi;
use unirdma_abi::{CmOp, Command, QpLayout};
use unirdma_device::{BackgroundLookup, Device, Identity, KeptByRnic, Pollers, SharedRnic};
use unirdma_formats::{Gid, QpState, QpType, attr_mask as m};
use unirdma_link::{BlockingFd, Handler, KINDS, Ledger, Memory, RegionDesc};
use unirdma_mem::{Bell, MemFd, Span};
use unirdma_rnic::{Account, Limits, Rnic, Route, SessionId, Share, VfPath, VfUse, VrnicConfig, VrnicId};
use zerocopy::{FromBytes, Immutable, IntoBytes};

const MEMORY: usize = 4 << 20;
const BUS: u64 = 1 << 50;
/// A bus address where there is no memory.
pub const NOWHERE: u64 = 1 << 49;
/// Every quota, for both sessions together.
const QUOTA: u32 = 16;
pub const MR_BYTES: u64 = 3 << 20;
pub const ENTRIES: u32 = 4;
pub const CAP: abi::QpCap =
    abi::QpCap { max_send_wr: 4, max_recv_wr: 4, max_send_sge: 1, max_recv_sge: 1, max_inline_data: 0 };
/// Address of the vRNIC, and of another one of its group.
pub const OWN: &str = "10.0.0.1";
pub const PEER: &str = "10.0.0.2";
pub const NOBODY: &str = "10.0.0.9";

pub fn gid(ip: &str) -> [u8; 16] {
    Gid::from_ip(ip.parse().expect("address")).0
}

/// An address vector to `ip`.
pub fn to(ip: &str) -> abi::AhAttr {
    let grh = abi::GlobalRoute { dgid: gid(ip), ..Default::default() };
    abi::AhAttr { grh, is_global: 1, port_num: 1, ..Default::default() }
}

pub fn cm_addr(ip: &str, port: u16) -> abi::CmAddr {
    let family = if ip.parse::<IpAddr>().expect("address").is_ipv4() { 4 } else { 6 };
    abi::CmAddr { ip: gid(ip), port, family, ..Default::default() }
}

/// The kind of object that a handle names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Pd,
    Cq,
    Qp,
    Mr,
    Mw,
    Ah,
    Srq,
    Xrcd,
    Id,
    Doorbell,
    Mapped,
}

/// A session and its memory.
pub struct Side {
    pub dev: Device,
    pub pollers: Arc<NoPollers>,
    rnic: Arc<SharedRnic>,
    memory: MemFd,
    used: Cell<u64>,
    doorbell: Cell<Option<u64>>,
}

/// A QP that can be posted to.
#[derive(Clone, Copy)]
pub struct Posting {
    pub qpn: u32,
    pub slot: u32,
    req: abi::CreateQpReq,
}

pub struct World {
    pub me: Side,
    pub other: Side,
    /// The vRNIC with the address [`PEER`].
    peer: VrnicId,
}

impl World {
    pub fn new() -> Self {
        Self::with_mrs(QUOTA)
    }

    /// A vRNIC that may have `max_mr` MRs.
    pub fn with_mrs(max_mr: u32) -> Self {
        Self::made(max_mr, |_| ())
    }

    /// A device with a changed configuration.
    pub fn with(change: impl FnOnce(&mut abi::Config)) -> Self {
        Self::made(QUOTA, change)
    }

    fn made(max_mr: u32, change: impl FnOnce(&mut abi::Config)) -> Self {
        let mut rnic = Rnic::new(1, 0);
        let limits = Limits {
            max_qp: QUOTA,
            max_cq: QUOTA,
            max_mr,
            max_pd: QUOTA,
            max_ah: QUOTA,
            max_srq: QUOTA,
            max_mr_bytes: MR_BYTES,
            ..Limits::default()
        };
        let mut vrnic = |ip| {
            rnic.add_vrnic(VrnicConfig { group: 0, gids: vec![Gid(gid(ip))], limits, share: Share::default() })
                .expect("vRNIC")
        };
        let (vrnic, peer) = (vrnic(OWN), vrnic(PEER));
        let features = abi::FEATURE_INVALIDATE | abi::FEATURE_GSI | abi::FEATURE_FAST_REG;
        let mut config = abi::Config { features, max_qp: 3, max_mr: 5, max_qp_rd_atom: 128, ..Default::default() };
        change(&mut config);
        let identity = Identity { vrnic, config, origin: 5, name: "a".into(), active_mtu: 5, log: Arc::default() };
        let (rnic, identity) = (Arc::new(SharedRnic::new(rnic)), Arc::new(identity));
        let side = || Side::new(&rnic, &identity);
        World { me: side(), other: side(), peer }
    }

    /// Gives VFs with these addresses to the own vRNIC and to the other one.
    pub fn lend(&self, own: Option<&str>, peer: Option<&str>) {
        for (id, vf) in [(self.me.dev.vrnic(), own), (self.peer, peer)] {
            let vf = vf.map(|ip| VfPath { gid: gid(ip), mtu: 3 });
            self.me.rnic.lock().set_vf_use(id, VfUse { asks: true, vf });
        }
    }
}

impl World {
    /// The group has this address on another host, to which no packets get.
    pub fn route_elsewhere(&self, ip: &str) {
        let route = Route { host: [192, 168, 7, 2].into(), foreign: false, vni: 0 };
        self.me.rnic.lock().change_routes(0, [(Gid(gid(ip)), Some(route))]);
    }
}

/// No thread runs this RNIC, and the tests run the background lookups.
#[derive(Default)]
pub struct NoPollers(Mutex<VecDeque<BackgroundLookup>>);

impl NoPollers {
    /// The oldest waiting background lookup.
    pub fn lookup(&self) -> Option<BackgroundLookup> {
        self.0.lock().expect("no panic").pop_front()
    }
}

impl Pollers for NoPollers {
    fn settle(&self) {}
    fn catch_up(&self, _: SessionId, _: Option<u32>) {}
    fn run_in_background(&self, _: VrnicId, _: SessionId, lookup: BackgroundLookup) {
        self.0.lock().expect("no panic").push_back(lookup);
    }
}

impl Side {
    fn new(rnic: &Arc<SharedRnic>, identity: &Arc<Identity>) -> Self {
        let pollers = Arc::new(NoPollers::default());
        let dev = Device::new(rnic.clone(), identity.clone(), pollers.clone(), Ledger::default()).expect("session");
        let file = MemFd::new(c"commands", MEMORY).expect("memfd");
        let (used, doorbell) = (Cell::new(0), Cell::new(None));
        let mut side = Side { dev, pollers, rnic: rnic.clone(), memory: file, used, doorbell };
        let mut memory = Memory::default();
        side.add_own_region(&mut memory);
        side.dev.memory_changed(&memory, &[]);
        side
    }

    /// Adds the session's own memory file.
    pub fn add_own_region(&self, memory: &mut Memory) {
        let region = RegionDesc { bus_addr: BUS, size: MEMORY as u64, ..Default::default() };
        let fd = self.memory.fd().try_clone_to_owned().expect("descriptor");
        memory.add(region, BlockingFd::refused(fd, &Ledger::default())).expect("region");
    }

    /// The account refuses everything that the RNIC would keep for the vRNIC from now on.
    pub fn close_account(&self) {
        let account: Arc<dyn Account> = Arc::new(KeptByRnic(Ledger::of_host([0; KINDS]).for_vrnic([None; KINDS])));
        self.rnic.lock().set_account(self.dev.vrnic(), &account);
    }

    /// A part of the session's own memory.
    pub fn span(&self, bus: u64, len: usize) -> Span {
        self.memory.span().sub(bus - BUS, len as u64).expect("own memory")
    }

    /// Bus address of fresh memory, of whole pages.
    pub fn take(&self, bytes: usize) -> u64 {
        let at = self.used.get();
        self.used.set(at + bytes.next_multiple_of(4096) as u64);
        assert!(self.used.get() <= MEMORY as u64);
        BUS + at
    }

    /// Writes a word into the memory.
    pub fn store(&self, bus: u64, value: u32) {
        self.memory.span().store32((bus - BUS) as usize, value, Ordering::Release);
    }

    /// Writes bytes into the memory.
    pub fn write(&self, bus: u64, bytes: &[u8]) {
        self.memory.span().write((bus - BUS) as usize, bytes);
    }

    /// All of the memory.
    pub fn image(&self) -> Vec<u8> {
        let mut all = vec![0; self.memory.span().len()];
        self.memory.span().read(0, &mut all);
        all
    }

    /// Changes the vRNIC's part of the RNIC.
    pub fn set_share(&self, share: Share) {
        self.rnic.lock().set_share(self.dev.vrnic(), share);
    }

    /// The session has no doorbell page any more.
    pub fn forget_doorbell(&self) {
        self.doorbell.set(None);
    }

    /// Rings a bit of a doorbell page.
    pub fn ring_at(&self, page: u64, slot: u32) {
        let page = self.memory.span().sub(page - BUS, 4096).expect("page");
        Bell::new(page).expect("doorbell").ring(slot);
    }

    /// Status and data of the response to a request.
    pub fn call(&self, c: Command, data: &[u8], room: usize) -> (u8, Vec<u8>) {
        let head = abi::ReqHeader { command: c as u8, ..Default::default() };
        let answer = self.dev.execute(&[head.as_bytes(), data].concat(), room);
        (answer[0], answer[8..].to_vec())
    }

    /// The response to a request that succeeds.
    pub fn ok<T: FromBytes>(&self, c: Command, request: &(impl IntoBytes + Immutable)) -> T {
        let (status, data) = self.call(c, request.as_bytes(), 1024);
        assert_eq!(status, 0, "{c:?}");
        T::read_from_bytes(&data).expect("the response's length")
    }

    /// True while dead objects are not freed.
    pub fn has_dead(&self) -> bool {
        self.rnic.lock().has_dead()
    }

    /// Lets three seconds pass, after which all questions to other hosts are over.
    pub fn wait_in_vain(&self) {
        let mut rnic = self.rnic.lock();
        let begun = rnic.since_ns();
        (0..30).for_each(|i| _ = rnic.poll(begun + i * 100_000_000));
    }

    /// Lets the RNIC work on what was posted.
    pub fn poll(&self) {
        let mut rnic = self.rnic.lock();
        rnic.unpark(self.dev.session(), 0);
        (0..100).for_each(|i| {
            rnic.poll(i * 1_000_000);
        });
    }

    /// A new object of each kind.
    pub fn make(&self, kind: Kind) -> u32 {
        match kind {
            Kind::Pd => self.ok::<abi::HandleResp>(Command::CreatePd, &abi::Nothing {}).handle,
            Kind::Cq => self.ok::<abi::HandleResp>(Command::CreateCq, &self.cq_request(ENTRIES)).handle,
            Kind::Qp => self.qp(QpType::Rc).qpn,
            Kind::Mr => self.ok::<abi::MrResp>(Command::RegUserMr, &self.mr_request()).mrn,
            Kind::Mw => self.mw(1).mrn,
            Kind::Ah => {
                let request = abi::CreateAhReq { pdn: self.make(Kind::Pd), attr: to(PEER), ..Default::default() };
                self.ok::<abi::HandleResp>(Command::CreateAh, &request).handle
            }
            Kind::Srq => self.ok::<abi::CreateSrqResp>(Command::CreateSrq, &self.srq_request()).srqn,
            Kind::Xrcd => self.xrcd(7),
            Kind::Id => self.id(abi::port_space::TCP),
            Kind::Doorbell => {
                let request = abi::SetDoorbellReq { addr: self.take(4096) };
                self.ok::<abi::HandleResp>(Command::CreateDoorbell, &request).handle
            }
            Kind::Mapped => self.map(&[(self.take(4096), 4096)]).handle,
        }
    }

    pub fn cq_request(&self, entries: u32) -> abi::CreateCqReq {
        let (ring_addr, ctrl_addr) = (self.take(entries as usize * 64), self.take(128));
        abi::CreateCqReq { cqe: entries, entries, ring_addr, ctrl_addr, comp_queue: 0, reserved: 0 }
    }

    pub fn mr_request(&self) -> abi::RegUserMrReq {
        let (pdn, start) = (self.make(Kind::Pd), self.take(8192));
        // LOCAL_WRITE and MW_BIND.
        abi::RegUserMrReq { pdn, access_flags: 1 | 16, start, length: 8192, virt_addr: start, ..Default::default() }
    }

    /// Writes a list of runs; returns its address, and the number of bytes in the runs.
    pub fn runs(&self, runs: &[(u64, u64)]) -> (u64, u64) {
        let addr = self.take(runs.len() * 16);
        for (i, &(at, len)) in runs.iter().enumerate() {
            let run = abi::Run { addr: at, length: len };
            self.memory.span().write((addr - BUS) as usize + i * 16, run.as_bytes());
        }
        (addr, runs.iter().map(|r| r.1).sum())
    }

    /// A request for an MR of two pages that lie apart.
    pub fn runs_request(&self) -> abi::RegMrRunsReq {
        let (pdn, at) = (self.make(Kind::Pd), self.take(3 * 4096));
        let (runs_addr, length) = self.runs(&[(at + 8192 + 16, 4080), (at, 16)]);
        abi::RegMrRunsReq { pdn, access_flags: 1, length, virt_addr: 77, runs_addr, num_runs: 2, ..Default::default() }
    }

    pub fn map_request(&self, runs: &[(u64, u64)]) -> abi::MapRunsReq {
        let (runs_addr, length) = self.runs(runs);
        abi::MapRunsReq { runs_addr, num_runs: runs.len() as u32, reserved: 0, length }
    }

    pub fn map(&self, runs: &[(u64, u64)]) -> abi::MapRunsResp {
        self.ok(Command::MapRuns, &self.map_request(runs))
    }

    pub fn mw(&self, mw_type: u32) -> abi::MrResp {
        self.ok(Command::AllocMw, &abi::AllocMwReq { pdn: self.make(Kind::Pd), mw_type })
    }

    pub fn srq_request(&self) -> abi::CreateSrqReq {
        let (ctrl_addr, ring_addr) = (self.take(128), self.take(4096));
        abi::CreateSrqReq {
            pdn: self.make(Kind::Pd),
            max_wr: ENTRIES,
            max_sge: 1,
            ctrl_addr,
            ring_addr,
            ..Default::default()
        }
    }

    /// The XRC domain of file `ino`.
    pub fn xrcd(&self, ino: u64) -> u32 {
        let flags = abi::XRCD_SHARED | abi::XRCD_CREATE;
        let request = abi::CreateXrcdReq { dev: 1, ino, flags, reserved: 0 };
        self.ok::<abi::HandleResp>(Command::CreateXrcd, &request).handle
    }

    /// The doorbell page, which the session gets with its first QP.
    pub fn doorbell(&self) -> u64 {
        self.doorbell.get().unwrap_or_else(|| {
            let addr = self.take(4096);
            self.doorbell.set(Some(addr));
            self.ok::<abi::Nothing>(Command::SetDoorbell, &abi::SetDoorbellReq { addr });
            addr
        })
    }

    pub fn qp_request(&self, typ: QpType) -> abi::CreateQpReq {
        let layout = QpLayout::of(&CAP).expect("capabilities");
        let cq = self.make(Kind::Cq);
        abi::CreateQpReq {
            pdn: self.make(Kind::Pd),
            qp_type: typ as u8,
            sq_sig_all: 1,
            send_cqn: cq,
            recv_cqn: cq,
            cap: CAP,
            ctrl_addr: self.take(128),
            sq_addr: self.take(layout.sq_bytes()),
            rq_addr: self.take(layout.rq_bytes()),
            ..Default::default()
        }
    }

    pub fn create_qp(&self, req: abi::CreateQpReq) -> Posting {
        self.doorbell();
        let made: abi::CreateQpResp = self.ok(Command::CreateQp, &req);
        Posting { qpn: made.qpn, slot: made.db_slot, req }
    }

    pub fn qp(&self, typ: QpType) -> Posting {
        self.create_qp(self.qp_request(typ))
    }

    /// The target of an XRC connection in the domain of file 7.
    pub fn xrc_target(&self) -> u32 {
        let xrcdn = self.xrcd(7);
        self.create_qp(abi::CreateQpReq { xrcdn, ..self.qp_request(QpType::XrcRecv) }).qpn
    }

    /// The MODIFY_QP that takes an RC QP to `state` from the one before, connected to QP `dest` at `ip`.
    pub fn modify(&self, qpn: u32, state: QpState, ip: &str, dest: u32) -> abi::ModifyQpReq {
        let attr = abi::QpAttr {
            qp_state: state as u8,
            port_num: 1,
            path_mtu: 5,
            dest_qp_num: dest,
            timeout: 10,
            retry_cnt: 1,
            ah_attr: to(ip),
            ..Default::default()
        };
        let mask = match state {
            QpState::Init => m::PKEY_INDEX | m::PORT | m::ACCESS_FLAGS,
            QpState::Rtr => m::AV | m::PATH_MTU | m::DEST_QPN | m::RQ_PSN | m::MAX_DEST_RD_ATOMIC | m::MIN_RNR_TIMER,
            QpState::Rts => m::TIMEOUT | m::RETRY_CNT | m::RNR_RETRY | m::SQ_PSN | m::MAX_QP_RD_ATOMIC,
            _ => 0,
        };
        abi::ModifyQpReq { qpn, attr_mask: m::STATE | mask, attr }
    }

    /// Connects two of this session's QPs.
    pub fn connect(&self, a: u32, b: u32) {
        for state in [QpState::Init, QpState::Rtr, QpState::Rts] {
            for (qpn, dest) in [(a, b), (b, a)] {
                self.ok::<abi::Nothing>(Command::ModifyQp, &self.modify(qpn, state, OWN, dest));
            }
        }
    }

    /// Posts the first send of a QP, and lets it be executed.
    pub fn post(&self, qp: &Posting, wqe: &abi::SqWqe) {
        self.memory.span().write((qp.req.sq_addr - BUS) as usize, wqe.as_bytes());
        self.store(qp.req.ctrl_addr, 1);
        self.ring(qp);
    }

    /// Sets a QP's producer index to more WQEs than its send queue can hold.
    pub fn jump(&self, qp: &Posting) {
        self.store(qp.req.ctrl_addr, 1000);
        self.ring(qp);
    }

    fn ring(&self, qp: &Posting) {
        let page = self.memory.span().sub(self.doorbell() - BUS, 4096).expect("doorbell page");
        Bell::new(page).expect("doorbell").ring(qp.slot);
        self.poll();
    }

    /// An MR that a window is bound to.
    pub fn bound_mr(&self) -> u32 {
        let (a, b) = (self.qp(QpType::Rc), self.qp(QpType::Rc));
        self.connect(a.qpn, b.qpn);
        let request = abi::RegUserMrReq { pdn: a.req.pdn, ..self.mr_request() };
        let mr: abi::MrResp = self.ok(Command::RegUserMr, &request);
        let mw: abi::MrResp = self.ok(Command::AllocMw, &abi::AllocMwReq { pdn: a.req.pdn, mw_type: 1 });
        let wqe = abi::SqWqe {
            opcode: unirdma_formats::WrOpcode::BindMw as u8,
            rkey: mw.rkey,
            remote_addr: request.start,
            compare_add: 64,
            // The lkey, and REMOTE_READ.
            swap: u64::from(mr.lkey) | 4 << 32,
            ..Default::default()
        };
        self.post(&a, &wqe);
        mr.mrn
    }

    /// A CQ of one entry that two flushed receives have overrun.
    pub fn overrun_cq(&self) -> u32 {
        let cq = self.ok::<abi::HandleResp>(Command::CreateCq, &self.cq_request(1)).handle;
        let req = abi::CreateQpReq { recv_cqn: cq, ..self.qp_request(QpType::Rc) };
        let qp = self.create_qp(req);
        self.store(req.ctrl_addr + abi::QP_RQ_PROD as u64, 2);
        self.ok::<abi::Nothing>(Command::ModifyQp, &self.modify(qp.qpn, QpState::Err, OWN, 0));
        self.poll();
        cq
    }

    /// An SRQ with an invalid producer index, which an incoming message has detected.
    pub fn broken_srq(&self) -> u32 {
        let request = self.srq_request();
        let srqn = self.ok::<abi::CreateSrqResp>(Command::CreateSrq, &request).srqn;
        let (a, b) = (self.qp(QpType::Rc), abi::CreateQpReq { has_srq: 1, srqn, ..self.qp_request(QpType::Rc) });
        let b = self.create_qp(b);
        self.connect(a.qpn, b.qpn);
        self.store(request.ctrl_addr + abi::QP_RQ_PROD as u64, 1000);
        self.post(&a, &abi::SqWqe { opcode: unirdma_formats::WrOpcode::Send as u8, ..Default::default() });
        srqn
    }

    /// Makes a CM identifier.
    pub fn id(&self, port_space: u16) -> u32 {
        self.ok::<abi::CmResp>(Command::Cm, &abi::CmReq { op: CmOp::Create as u8, port_space, ..Default::default() }).id
    }

    pub fn cm(&self, op: CmOp, id: u32) -> abi::CmResp {
        self.ok(Command::Cm, &self.cm_request(op, id))
    }

    /// The request that does `op` to an identifier, with addresses of this vRNIC.
    pub fn cm_request(&self, op: CmOp, id: u32) -> abi::CmReq {
        let (src, dst) = match op {
            CmOp::Bind => (cm_addr(OWN, 7000), abi::CmAddr::default()),
            CmOp::ResolveAddr => (abi::CmAddr::default(), cm_addr(OWN, 7000)),
            CmOp::Join | CmOp::Leave => (abi::CmAddr::default(), cm_addr("239.1.2.3", 0)),
            _ => Default::default(),
        };
        abi::CmReq { op: op as u8, id, src, dst, ..Default::default() }
    }

    pub fn resolved(&self) -> u32 {
        let id = self.make(Kind::Id);
        self.cm(CmOp::ResolveAddr, id);
        self.cm(CmOp::ResolveRoute, id);
        id
    }

    /// A client identifier that asks for a connection, and the identifier of its request on the listening side.
    pub fn asked(&self) -> (u32, u32) {
        let listener = self.make(Kind::Id);
        self.cm(CmOp::Bind, listener);
        self.cm(CmOp::Listen, listener);
        let client = self.resolved();
        self.cm(CmOp::Connect, client);
        loop {
            let event: abi::CmEvent = self.ok(Command::CmEvent, &abi::CmEventReq::default());
            if event.listen_id == listener {
                return (client, event.id);
            }
        }
    }

    /// As [`Side::asked`], with the request accepted.
    pub fn answered(&self) -> (u32, u32) {
        let (client, server) = self.asked();
        self.cm(CmOp::Accept, server);
        (client, server)
    }
}
