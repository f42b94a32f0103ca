//! The table: for each command a correct request, and for each further status a request that provokes it.

use std::mem::offset_of;

use unirdma_abi as abi;
use unirdma_abi::{CmOp, Command as C, Status};
use unirdma_formats::{QpState, QpType, access};
use zerocopy::{Immutable, IntoBytes};

use crate::world::{ENTRIES, Kind, MR_BYTES, NOBODY, NOWHERE, OWN, PEER, Side, World, cm_addr, gid, to};

type Request = fn(&World) -> Vec<u8>;

/// A command or one of its variants. Each request is made in a fresh world, for the session `me`.
pub struct Row {
    pub command: C,
    /// Name of the variant.
    pub what: &'static str,
    /// A correct request, and its status.
    pub good: Request,
    pub gives: Status,
    /// Offsets of handles in the request, and their kinds.
    pub handles: Vec<(usize, Kind)>,
    /// A status, its reason, and a request that gets it.
    pub refused: Vec<(Status, &'static str, Request)>,
    /// If the request is repeated, it gets EXHAUSTED in the end.
    pub ends: bool,
}

fn row(command: C, good: Request) -> Row {
    Row { command, what: "", good, gives: Status::Ok, handles: Vec::new(), refused: Vec::new(), ends: false }
}

impl Row {
    fn what(self, what: &'static str) -> Self {
        Row { what, ..self }
    }
    fn gives(self, gives: Status) -> Self {
        Row { gives, ..self }
    }
    fn handle(mut self, at: usize, kind: Kind) -> Self {
        self.handles.push((at, kind));
        self
    }
    fn refused(mut self, status: Status, why: &'static str, request: Request) -> Self {
        self.refused.push((status, why, request));
        self
    }
    fn ends(self) -> Self {
        Row { ends: true, ..self }
    }
}

fn bytes(request: impl IntoBytes + Immutable) -> Vec<u8> {
    request.as_bytes().to_vec()
}

fn handle(handle: u32) -> Vec<u8> {
    bytes(abi::HandleReq { handle, reserved: 0 })
}

fn cm(s: &Side, op: CmOp, id: u32) -> Vec<u8> {
    bytes(s.cm_request(op, id))
}

/// A CM operation with private data of this length.
fn cm_private(s: &Side, op: CmOp, id: u32, private_len: u8) -> Vec<u8> {
    let param = abi::CmParam { private_len, ..Default::default() };
    bytes(abi::CmReq { param, ..s.cm_request(op, id) })
}

/// An operation that a new identifier does not allow.
fn too_early(op: CmOp) -> Request {
    match op {
        CmOp::ResolveRoute => |w| cm(&w.me, CmOp::ResolveRoute, w.me.make(Kind::Id)),
        CmOp::Connect => |w| cm(&w.me, CmOp::Connect, w.me.make(Kind::Id)),
        CmOp::Accept => |w| cm(&w.me, CmOp::Accept, w.me.make(Kind::Id)),
        CmOp::Reject => |w| cm(&w.me, CmOp::Reject, w.me.make(Kind::Id)),
        CmOp::Establish => |w| cm(&w.me, CmOp::Establish, w.me.make(Kind::Id)),
        _ => |w| cm(&w.me, CmOp::Disconnect, w.me.make(Kind::Id)),
    }
}

/// Begins the session anew, without any feature.
fn decline(w: &World) {
    w.me.ok::<abi::NewSessionResp>(C::NewSession, &abi::NewSessionReq::default());
    w.me.forget_doorbell();
}

const HANDLE: usize = offset_of!(abi::HandleReq, handle);

pub fn rows() -> Vec<Row> {
    [queries(), vfs(), memory(), completion(), queue_pairs(), shared_receives(), datagrams(), connections()]
        .into_iter()
        .flatten()
        .collect()
}

fn queries() -> Vec<Row> {
    use Status::*;
    vec![
        row(C::QueryDevice, |_| Vec::new()),
        row(C::QueryCounters, |_| Vec::new()),
        row(C::QueryClock, |_| Vec::new()),
        row(C::QueryPort, |_| bytes(abi::QueryPortReq { port: 1, reserved: 0 }))
            .refused(BadValue, "port", |_| bytes(abi::QueryPortReq { port: 2, reserved: 0 })),
        row(C::QueryPkey, |_| bytes(abi::QueryPkeyReq { port: 1, ..Default::default() }))
            .refused(BadValue, "port", |_| bytes(abi::QueryPkeyReq::default()))
            .refused(BadValue, "index", |_| bytes(abi::QueryPkeyReq { port: 1, index: 1, reserved: 0 })),
        row(C::QueryGid, |_| bytes(abi::QueryGidReq { port: 1, index: 0 }))
            .refused(BadValue, "port", |_| bytes(abi::QueryGidReq { port: 0, index: 0 }))
            .refused(BadValue, "index", |_| bytes(abi::QueryGidReq { port: 1, index: 1 << 20 })),
        row(C::AddGid, |_| bytes(abi::AddGidReq { gid: gid(OWN), port_num: 1, ..Default::default() }))
            .refused(Denied, "port", |_| bytes(abi::AddGidReq { gid: gid(OWN), ..Default::default() }))
            .refused(Denied, "not its own", |_| {
                bytes(abi::AddGidReq { gid: gid(PEER), port_num: 1, ..Default::default() })
            }),
        row(C::DelGid, |_| bytes(abi::DelGidReq { port: 1, ..Default::default() })).gives(Denied),
        row(C::SetDoorbell, |w| bytes(abi::SetDoorbellReq { addr: w.me.take(4096) }))
            .refused(BadValue, "alignment", |w| bytes(abi::SetDoorbellReq { addr: w.me.take(8192) + 64 }))
            .refused(BadAddress, "no memory", |_| bytes(abi::SetDoorbellReq { addr: NOWHERE }))
            .refused(BadState, "there is one", |w| bytes(abi::SetDoorbellReq { addr: w.me.doorbell() })),
        row(C::SetStage, |w| bytes(abi::SetStageReq { addr: w.me.take(1 << 16), length: 1 << 16 }))
            .refused(BadValue, "too long", |w| {
                bytes(abi::SetStageReq { addr: w.me.take(4096), length: abi::MAX_STAGE + 1 })
            })
            .refused(BadAddress, "no memory", |_| bytes(abi::SetStageReq { addr: NOWHERE, length: 1 << 16 }))
            .refused(BadState, "there is one", |w| {
                let request = abi::SetStageReq { addr: w.me.take(1 << 16), length: 1 << 16 };
                w.me.ok::<abi::Nothing>(C::SetStage, &request);
                bytes(request)
            })
            .refused(Exhausted, "no room on the account", |w| {
                w.me.close_account();
                bytes(abi::SetStageReq { addr: w.me.take(1 << 16), length: 1 << 16 })
            }),
        row(C::NewSession, |_| bytes(abi::NewSessionReq { features: abi::FEATURE_INVALIDATE, reserved: 0 })).refused(
            BadValue,
            "no such feature",
            |_| bytes(abi::NewSessionReq { features: 1 << 63, reserved: 0 }),
        ),
        row(C::CreateDoorbell, |w| bytes(abi::SetDoorbellReq { addr: w.me.take(4096) }))
            .refused(BadValue, "alignment", |w| bytes(abi::SetDoorbellReq { addr: w.me.take(8192) + 64 }))
            .refused(BadAddress, "no memory", |_| bytes(abi::SetDoorbellReq { addr: NOWHERE }))
            .ends(),
        row(C::DestroyDoorbell, |w| handle(w.me.make(Kind::Doorbell))).handle(HANDLE, Kind::Doorbell).refused(
            Busy,
            "a QP has a bit of it",
            |w| {
                let doorbell = w.me.make(Kind::Doorbell);
                let request = abi::CreateQpReq { doorbell, ..w.me.qp_request(QpType::Rc) };
                w.me.ok::<abi::CreateQpResp>(C::CreateQp, &request);
                handle(doorbell)
            },
        ),
    ]
}

/// Addresses of two VFs.
pub const OWN_VF: &str = "10.50.0.10";
pub const PEER_VF: &str = "10.50.0.11";

pub fn resolve(dgid: &str, qp_type: QpType) -> abi::ResolveReq {
    abi::ResolveReq { dgid: gid(dgid), qp_type: qp_type as u32, ..Default::default() }
}

fn vfs() -> Vec<Row> {
    use Status::*;
    vec![
        row(C::Resolve, |w| {
            w.lend(Some(OWN_VF), Some(PEER_VF));
            bytes(resolve(PEER, QpType::Rc))
        })
        .refused(BadState, "no VF", |w| {
            w.lend(None, Some(PEER_VF));
            bytes(resolve(PEER, QpType::Rc))
        })
        .refused(BadValue, "no such QP type", |w| {
            w.lend(Some(OWN_VF), Some(PEER_VF));
            bytes(abi::ResolveReq { qp_type: 99, ..resolve(PEER, QpType::Rc) })
        })
        .refused(BadValue, "not its own GID", |w| {
            w.lend(Some(OWN_VF), Some(PEER_VF));
            bytes(abi::ResolveReq { sgid_index: 1, ..resolve(PEER, QpType::Rc) })
        })
        .refused(Unreachable, "the destination has no VF", |w| {
            w.lend(Some(OWN_VF), None);
            bytes(resolve(PEER, QpType::Rc))
        })
        .refused(Unreachable, "nobody", |w| {
            w.lend(Some(OWN_VF), Some(PEER_VF));
            bytes(resolve(NOBODY, QpType::Rc))
        })
        .refused(Unreachable, "a connection with a multicast group", |w| {
            w.lend(Some(OWN_VF), None);
            bytes(resolve("239.1.1.1", QpType::Rc))
        }),
        row(C::NameGid, |w| {
            w.lend(None, Some(PEER_VF));
            bytes(abi::NameGidReq { real: gid(PEER_VF) })
        })
        .refused(Unreachable, "nobody has it", |w| {
            w.lend(Some(OWN_VF), None);
            bytes(abi::NameGidReq { real: gid(PEER_VF) })
        }),
    ]
}

fn memory() -> Vec<Row> {
    use Status::*;
    /// A request for one page more than the MR may have.
    fn extend(w: &World, mrn: u32) -> abi::ExtendMrReq {
        let (runs_addr, length) = w.me.runs(&[(w.me.take(4096), 4096)]);
        abi::ExtendMrReq { mrn, num_runs: 1, runs_addr, length }
    }
    fn create(w: &World) -> abi::CreateMrReq {
        let pdn = w.me.make(Kind::Pd);
        abi::CreateMrReq { pdn, access_flags: access::FAST_SUPPORTED, max_num_sg: abi::MAX_FAST_PAGES, reserved: 0 }
    }
    /// An MR that work requests register.
    fn fast(w: &World) -> u32 {
        w.me.ok::<abi::MrResp>(C::CreateMr, &create(w)).mrn
    }
    vec![
        row(C::CreatePd, |_| Vec::new()).ends(),
        row(C::DestroyPd, |w| handle(w.me.make(Kind::Pd))).handle(HANDLE, Kind::Pd).refused(Busy, "an MR", |w| {
            let request = w.me.mr_request();
            w.me.ok::<abi::MrResp>(C::RegUserMr, &request);
            handle(request.pdn)
        }),
        row(C::GetDmaMr, |w| bytes(abi::GetDmaMrReq { pdn: w.me.make(Kind::Pd), access_flags: 1 }))
            .handle(offset_of!(abi::GetDmaMrReq, pdn), Kind::Pd)
            .refused(BadValue, "flags", |w| bytes(abi::GetDmaMrReq { pdn: w.me.make(Kind::Pd), access_flags: 2 }))
            .ends(),
        row(C::CreateMr, |w| bytes(create(w)))
            .handle(offset_of!(abi::CreateMrReq, pdn), Kind::Pd)
            .refused(BadValue, "flags", |w| bytes(abi::CreateMrReq { access_flags: access::MW_BIND, ..create(w) }))
            .refused(BadValue, "no page", |w| bytes(abi::CreateMrReq { max_num_sg: 0, ..create(w) }))
            .refused(BadValue, "too many pages", |w| {
                bytes(abi::CreateMrReq { max_num_sg: abi::MAX_FAST_PAGES + 1, ..create(w) })
            })
            .refused(Unsupported, "FAST_REG was declined", |w| {
                decline(w);
                bytes(create(w))
            })
            .ends(),
        row(C::MapMrSg, |w| bytes(abi::MapMrSgReq { mrn: w.me.make(Kind::Mr), ..Default::default() }))
            .gives(Unsupported),
        row(C::RegUserMr, |w| bytes(w.me.mr_request()))
            .handle(offset_of!(abi::RegUserMrReq, pdn), Kind::Pd)
            .refused(BadValue, "the range wraps", |w| bytes(abi::RegUserMrReq { start: u64::MAX, ..w.me.mr_request() }))
            .refused(BadValue, "its addresses wrap", |w| {
                bytes(abi::RegUserMrReq { virt_addr: u64::MAX, ..w.me.mr_request() })
            })
            .refused(BadValue, "flags", |w| {
                bytes(abi::RegUserMrReq { access_flags: access::REMOTE_WRITE, ..w.me.mr_request() })
            })
            .refused(BadAddress, "no memory", |w| bytes(abi::RegUserMrReq { start: NOWHERE, ..w.me.mr_request() }))
            .refused(Exhausted, "bytes", |w| {
                bytes(abi::RegUserMrReq {
                    length: MR_BYTES + 1,
                    start: w.me.take(MR_BYTES as usize + 1),
                    ..w.me.mr_request()
                })
            })
            .ends(),
        row(C::RegMrRuns, |w| bytes(w.me.runs_request()))
            .handle(offset_of!(abi::RegMrRunsReq, pdn), Kind::Pd)
            .refused(BadValue, "the runs are longer", |w| {
                bytes(abi::RegMrRunsReq { length: 4095, ..w.me.runs_request() })
            })
            .refused(BadValue, "the runs are shorter", |w| {
                bytes(abi::RegMrRunsReq { length: 4097, ..w.me.runs_request() })
            })
            .refused(BadValue, "too many runs", |w| {
                bytes(abi::RegMrRunsReq { num_runs: abi::MAX_RUNS + 1, ..w.me.runs_request() })
            })
            .refused(BadValue, "no run", |w| bytes(abi::RegMrRunsReq { num_runs: 0, ..w.me.runs_request() }))
            .refused(BadValue, "an empty run", |w| {
                let (runs_addr, _) = w.me.runs(&[(w.me.take(4096), 4096), (w.me.take(4096), 0)]);
                bytes(abi::RegMrRunsReq { runs_addr, ..w.me.runs_request() })
            })
            .refused(BadValue, "a run that ends within a page before the last", |w| {
                let (runs_addr, length) = w.me.runs(&[(w.me.take(4096), 3), (w.me.take(4096), 4096)]);
                bytes(abi::RegMrRunsReq { runs_addr, length, ..w.me.runs_request() })
            })
            .refused(BadValue, "a run that begins within a page after the first", |w| {
                let (runs_addr, length) = w.me.runs(&[(w.me.take(4096), 4096), (w.me.take(4096) + 8, 8)]);
                bytes(abi::RegMrRunsReq { runs_addr, length, ..w.me.runs_request() })
            })
            .refused(BadValue, "a run of all bytes", |w| {
                let (runs_addr, _) = w.me.runs(&[(w.me.take(4096), u64::MAX)]);
                bytes(abi::RegMrRunsReq { runs_addr, num_runs: 1, ..w.me.runs_request() })
            })
            .refused(BadValue, "its addresses wrap", |w| {
                bytes(abi::RegMrRunsReq { virt_addr: u64::MAX, ..w.me.runs_request() })
            })
            .refused(BadAddress, "no list", |w| bytes(abi::RegMrRunsReq { runs_addr: NOWHERE, ..w.me.runs_request() }))
            .refused(BadAddress, "no memory", |w| {
                let (runs_addr, length) = w.me.runs(&[(w.me.take(4096), 4096), (NOWHERE, 1)]);
                bytes(abi::RegMrRunsReq { runs_addr, length, ..w.me.runs_request() })
            })
            .ends(),
        row(C::ExtendMr, |w| bytes(extend(w, w.me.make(Kind::Mr))))
            .handle(offset_of!(abi::ExtendMrReq, mrn), Kind::Mr)
            .refused(BadValue, "the runs are longer", |w| {
                bytes(abi::ExtendMrReq { length: 1, ..extend(w, w.me.make(Kind::Mr)) })
            })
            .refused(BadValue, "a run that ends within a page before the last", |w| {
                let (runs_addr, length) = w.me.runs(&[(w.me.take(4096), 3), (w.me.take(4096), 4096)]);
                bytes(abi::ExtendMrReq { runs_addr, length, num_runs: 2, ..extend(w, w.me.make(Kind::Mr)) })
            })
            .refused(BadAddress, "no list", |w| {
                bytes(abi::ExtendMrReq { runs_addr: NOWHERE, ..extend(w, w.me.make(Kind::Mr)) })
            })
            .refused(BadState, "a window is bound to it", |w| bytes(extend(w, w.me.bound_mr())))
            .ends(),
        row(C::MapRuns, |w| bytes(w.me.map_request(&[(w.me.take(4096), 4096)])))
            .refused(BadValue, "a part of a page", |w| bytes(w.me.map_request(&[(w.me.take(4096), 4095)])))
            .refused(BadValue, "within a page", |w| bytes(w.me.map_request(&[(w.me.take(8192) + 64, 4096)])))
            .refused(BadValue, "nothing", |w| bytes(w.me.map_request(&[])))
            .refused(BadAddress, "no memory", |w| bytes(w.me.map_request(&[(NOWHERE, 4096)])))
            .ends(),
        row(C::UnmapRuns, |w| handle(w.me.make(Kind::Mapped))).handle(HANDLE, Kind::Mapped),
        row(C::RegUserMr, |w| {
            let request = w.me.mr_request();
            let pages_addr = w.me.take(16);
            for (i, page) in [request.start + 4096, request.start].into_iter().enumerate() {
                w.me.store(pages_addr + i as u64 * 8, page as u32);
                w.me.store(pages_addr + i as u64 * 8 + 4, (page >> 32) as u32);
            }
            bytes(abi::RegUserMrReq { pages_addr, npages: 2, ..request })
        })
        .what("of pages")
        .refused(BadValue, "number of pages", |w| {
            bytes(abi::RegUserMrReq { pages_addr: w.me.take(16), npages: 3, ..w.me.mr_request() })
        })
        .refused(BadAddress, "no list", |w| {
            bytes(abi::RegUserMrReq { pages_addr: NOWHERE, npages: 2, ..w.me.mr_request() })
        }),
        row(C::DeregMr, |w| handle(w.me.make(Kind::Mr)))
            .handle(HANDLE, Kind::Mr)
            .refused(BadHandle, "a window", |w| handle(w.me.make(Kind::Mw)))
            .refused(Busy, "a window is bound to it", |w| handle(w.me.bound_mr())),
        row(C::QueryMr, |w| handle(w.me.make(Kind::Mr)))
            .handle(HANDLE, Kind::Mr)
            .refused(BadHandle, "a window", |w| handle(w.me.make(Kind::Mw))),
        row(C::ReregMr, |w| bytes(abi::ReregMrReq { mrn: w.me.make(Kind::Mr), by: w.me.make(Kind::Mr) }))
            .handle(offset_of!(abi::ReregMrReq, mrn), Kind::Mr)
            .handle(offset_of!(abi::ReregMrReq, by), Kind::Mr)
            .refused(BadHandle, "both are one", |w| {
                let mrn = w.me.make(Kind::Mr);
                bytes(abi::ReregMrReq { mrn, by: mrn })
            })
            .refused(BadState, "work requests register it", |w| {
                bytes(abi::ReregMrReq { mrn: w.me.make(Kind::Mr), by: fast(w) })
            })
            .refused(Busy, "a window is bound to it", |w| {
                bytes(abi::ReregMrReq { mrn: w.me.bound_mr(), by: w.me.make(Kind::Mr) })
            }),
        row(C::AllocMw, |w| bytes(abi::AllocMwReq { pdn: w.me.make(Kind::Pd), mw_type: 2 }))
            .handle(offset_of!(abi::AllocMwReq, pdn), Kind::Pd)
            .refused(BadValue, "type", |w| bytes(abi::AllocMwReq { pdn: w.me.make(Kind::Pd), mw_type: 3 }))
            .refused(Unsupported, "INVALIDATE was declined", |w| {
                decline(w);
                bytes(abi::AllocMwReq { pdn: w.me.make(Kind::Pd), mw_type: 2 })
            })
            .ends(),
        row(C::DeallocMw, |w| handle(w.me.make(Kind::Mw)))
            .handle(HANDLE, Kind::Mw)
            .refused(BadHandle, "an MR", |w| handle(w.me.make(Kind::Mr))),
        row(C::AllocNullMr, |w| handle(w.me.make(Kind::Pd))).handle(HANDLE, Kind::Pd).ends(),
    ]
}

fn completion() -> Vec<Row> {
    use Status::*;
    fn resize(s: &Side, cqn: u32) -> abi::ResizeCqReq {
        let abi::CreateCqReq { cqe, entries, ring_addr, ctrl_addr, .. } = s.cq_request(2 * ENTRIES);
        abi::ResizeCqReq { cqn, cqe, entries, reserved: 0, ring_addr, ctrl_addr }
    }
    vec![
        row(C::CreateCq, |w| bytes(w.me.cq_request(ENTRIES)))
            .refused(BadValue, "no entries", |w| bytes(abi::CreateCqReq { cqe: 0, ..w.me.cq_request(ENTRIES) }))
            .refused(BadValue, "no power of two", |w| bytes(abi::CreateCqReq { cqe: 3, ..w.me.cq_request(3) }))
            .refused(BadValue, "alignment", |w| {
                let request = w.me.cq_request(ENTRIES);
                bytes(abi::CreateCqReq { ctrl_addr: request.ctrl_addr + 8, ..request })
            })
            .refused(BadValue, "event queue", |w| {
                bytes(abi::CreateCqReq { comp_queue: abi::MAX_CHANNELS, ..w.me.cq_request(ENTRIES) })
            })
            .refused(BadAddress, "no ring", |w| {
                bytes(abi::CreateCqReq { ring_addr: NOWHERE, ..w.me.cq_request(ENTRIES) })
            })
            .refused(BadAddress, "no control block", |w| {
                bytes(abi::CreateCqReq { ctrl_addr: NOWHERE, ..w.me.cq_request(ENTRIES) })
            })
            .ends(),
        row(C::DestroyCq, |w| handle(w.me.make(Kind::Cq))).handle(HANDLE, Kind::Cq).refused(Busy, "a QP", |w| {
            let request = w.me.qp_request(QpType::Rc);
            w.me.create_qp(request);
            handle(request.send_cqn)
        }),
        row(C::ResizeCq, |w| bytes(resize(&w.me, w.me.make(Kind::Cq))))
            .handle(offset_of!(abi::ResizeCqReq, cqn), Kind::Cq)
            .refused(BadValue, "no entries", |w| {
                bytes(abi::ResizeCqReq { cqe: 0, ..resize(&w.me, w.me.make(Kind::Cq)) })
            })
            .refused(BadAddress, "no ring", |w| {
                bytes(abi::ResizeCqReq { ring_addr: NOWHERE, ..resize(&w.me, w.me.make(Kind::Cq)) })
            })
            .refused(BadState, "overrun", |w| bytes(resize(&w.me, w.me.overrun_cq()))),
        row(C::ModifyCq, |w| bytes(abi::ModifyCqReq { cqn: w.me.make(Kind::Cq), count: 2, period_us: 2 }))
            .handle(offset_of!(abi::ModifyCqReq, cqn), Kind::Cq),
        row(C::ReqNotifyCq, |w| bytes(abi::ReqNotifyReq { cqn: w.me.make(Kind::Cq), flags: abi::NOTIFY_NEXT }))
            .handle(offset_of!(abi::ReqNotifyReq, cqn), Kind::Cq)
            .refused(BadValue, "no flag", |w| bytes(abi::ReqNotifyReq { cqn: w.me.make(Kind::Cq), flags: 0 }))
            .refused(BadValue, "another flag", |w| bytes(abi::ReqNotifyReq { cqn: w.me.make(Kind::Cq), flags: 4 }))
            .refused(BadState, "no event queue", |w| {
                let request = abi::CreateCqReq { comp_queue: abi::NO_COMP_QUEUE, ..w.me.cq_request(ENTRIES) };
                let cqn = w.me.ok::<abi::HandleResp>(C::CreateCq, &request).handle;
                bytes(abi::ReqNotifyReq { cqn, flags: abi::NOTIFY_NEXT })
            }),
    ]
}

fn queue_pairs() -> Vec<Row> {
    use Status::*;
    /// A request that makes a QP, for a session that has a doorbell page.
    fn create(s: &Side, typ: QpType) -> abi::CreateQpReq {
        s.doorbell();
        s.qp_request(typ)
    }
    fn resize(s: &Side, qpn: u32) -> abi::ResizeQpReq {
        let (ctrl_addr, sq_addr, rq_addr) = (s.take(128), s.take(4096), s.take(4096));
        abi::ResizeQpReq { qpn, max_send_wr: 8, max_recv_wr: 8, ctrl_addr, sq_addr, rq_addr, ..Default::default() }
    }
    fn cap(s: &Side, change: fn(&mut abi::QpCap)) -> Vec<u8> {
        let mut request = create(s, QpType::Rc);
        change(&mut request.cap);
        bytes(request)
    }
    use offset_of as at;
    vec![
        row(C::CreateQp, |w| bytes(create(&w.me, QpType::Rc)))
            .handle(at!(abi::CreateQpReq, pdn), Kind::Pd)
            .handle(at!(abi::CreateQpReq, send_cqn), Kind::Cq)
            .handle(at!(abi::CreateQpReq, recv_cqn), Kind::Cq)
            .refused(Unsupported, "type", |w| bytes(abi::CreateQpReq { qp_type: 8, ..create(&w.me, QpType::Rc) }))
            .refused(BadValue, "max_send_wr", |w| cap(&w.me, |c| c.max_send_wr = abi::MAX_QP_WR + 1))
            .refused(BadValue, "max_recv_wr", |w| cap(&w.me, |c| c.max_recv_wr = abi::MAX_QP_WR + 1))
            .refused(BadValue, "max_send_sge", |w| cap(&w.me, |c| c.max_send_sge = abi::MAX_SGE + 1))
            .refused(BadValue, "max_recv_sge", |w| cap(&w.me, |c| c.max_recv_sge = abi::MAX_SGE + 1))
            .refused(BadValue, "max_inline_data", |w| cap(&w.me, |c| c.max_inline_data = abi::MAX_INLINE + 1))
            .refused(BadAddress, "no SQ", |w| bytes(abi::CreateQpReq { sq_addr: NOWHERE, ..create(&w.me, QpType::Rc) }))
            .refused(BadAddress, "no RQ", |w| bytes(abi::CreateQpReq { rq_addr: NOWHERE, ..create(&w.me, QpType::Rc) }))
            .refused(BadAddress, "no control block", |w| {
                bytes(abi::CreateQpReq { ctrl_addr: NOWHERE, ..create(&w.me, QpType::Rc) })
            })
            .refused(BadState, "no doorbell page", |w| bytes(w.me.qp_request(QpType::Rc)))
            .ends(),
        row(C::CreateQp, |w| {
            bytes(abi::CreateQpReq { has_srq: 1, srqn: w.me.make(Kind::Srq), ..create(&w.me, QpType::Ud) })
        })
        .what("with an SRQ")
        .handle(at!(abi::CreateQpReq, srqn), Kind::Srq),
        row(C::CreateQp, |w| {
            bytes(abi::CreateQpReq { xrcdn: w.me.make(Kind::Xrcd), ..create(&w.me, QpType::XrcRecv) })
        })
        .what("XRC target")
        .handle(at!(abi::CreateQpReq, xrcdn), Kind::Xrcd),
        row(C::CreateQp, |w| bytes(abi::CreateQpReq { qp_type: abi::QP_TYPE_GSI, ..create(&w.me, QpType::Ud) }))
            .what("for the general services")
            .refused(Exhausted, "another session has it", |w| {
                let gsi = |s: &Side| abi::CreateQpReq { qp_type: abi::QP_TYPE_GSI, ..create(s, QpType::Ud) };
                w.other.ok::<abi::CreateQpResp>(C::CreateQp, &gsi(&w.other));
                bytes(gsi(&w.me))
            })
            .refused(Unsupported, "GSI was declined", |w| {
                decline(w);
                bytes(abi::CreateQpReq { qp_type: abi::QP_TYPE_GSI, ..create(&w.me, QpType::Ud) })
            }),
        row(C::ResizeQp, |w| bytes(resize(&w.me, w.me.make(Kind::Qp))))
            .handle(at!(abi::ResizeQpReq, qpn), Kind::Qp)
            .refused(BadValue, "too large", |w| {
                bytes(abi::ResizeQpReq { max_send_wr: abi::MAX_QP_WR + 1, ..resize(&w.me, w.me.make(Kind::Qp)) })
            })
            .refused(BadAddress, "no SQ", |w| {
                bytes(abi::ResizeQpReq { sq_addr: NOWHERE, ..resize(&w.me, w.me.make(Kind::Qp)) })
            })
            .refused(BadState, "lost", |w| {
                let (a, b) = (w.me.qp(QpType::Rc), w.me.qp(QpType::Rc));
                w.me.connect(a.qpn, b.qpn);
                w.me.jump(&a);
                bytes(resize(&w.me, a.qpn))
            }),
        row(C::ModifyQp, |w| bytes(w.me.modify(w.me.make(Kind::Qp), QpState::Init, OWN, 0)))
            .handle(at!(abi::ModifyQpReq, qpn), Kind::Qp)
            .refused(BadState, "no such transition", |w| bytes(w.me.modify(w.me.make(Kind::Qp), QpState::Rts, OWN, 0)))
            .refused(BadValue, "port", |w| {
                let mut request = w.me.modify(w.me.make(Kind::Qp), QpState::Init, OWN, 0);
                request.attr.port_num = 2;
                bytes(request)
            })
            .refused(Unreachable, "nobody has the address", |w| {
                let qpn = w.me.make(Kind::Qp);
                w.me.ok::<abi::Nothing>(C::ModifyQp, &w.me.modify(qpn, QpState::Init, OWN, 0));
                bytes(w.me.modify(qpn, QpState::Rtr, NOBODY, 5))
            }),
        row(C::QueryQp, |w| bytes(abi::QueryQpReq { qpn: w.me.make(Kind::Qp), attr_mask: 0 }))
            .handle(at!(abi::QueryQpReq, qpn), Kind::Qp),
        row(C::DestroyQp, |w| handle(w.me.make(Kind::Qp))).handle(HANDLE, Kind::Qp),
        row(C::CreateXrcd, |_| bytes(abi::CreateXrcdReq::default())).what("without a file").ends(),
        row(C::CreateXrcd, |_| {
            bytes(abi::CreateXrcdReq { dev: 1, ino: 7, flags: abi::XRCD_SHARED | abi::XRCD_CREATE, reserved: 0 })
        })
        .refused(BadHandle, "there is none", |_| {
            bytes(abi::CreateXrcdReq { dev: 1, ino: 7, flags: abi::XRCD_SHARED, reserved: 0 })
        })
        .refused(BadValue, "there is one", |w| {
            w.other.xrcd(7);
            let flags = abi::XRCD_SHARED | abi::XRCD_CREATE | abi::XRCD_EXCLUSIVE;
            bytes(abi::CreateXrcdReq { dev: 1, ino: 7, flags, reserved: 0 })
        })
        .ends(),
        row(C::DestroyXrcd, |w| handle(w.me.make(Kind::Xrcd))).handle(HANDLE, Kind::Xrcd).refused(Busy, "a QP", |w| {
            let xrcdn = w.me.make(Kind::Xrcd);
            w.me.create_qp(abi::CreateQpReq { xrcdn, ..w.me.qp_request(QpType::XrcRecv) });
            handle(xrcdn)
        }),
        row(C::OpenQp, |w| bytes(abi::OpenQpReq { xrcdn: w.me.xrcd(7), qpn: w.other.xrc_target() }))
            .handle(at!(abi::OpenQpReq, xrcdn), Kind::Xrcd)
            .refused(BadValue, "no target", |w| {
                bytes(abi::OpenQpReq { xrcdn: w.me.xrcd(7), qpn: w.other.make(Kind::Qp) })
            })
            .refused(BadValue, "another domain", |w| {
                bytes(abi::OpenQpReq { xrcdn: w.me.xrcd(8), qpn: w.other.xrc_target() })
            }),
    ]
}

fn shared_receives() -> Vec<Row> {
    use Status::*;
    fn resize(s: &Side, srqn: u32) -> abi::ResizeSrqReq {
        abi::ResizeSrqReq { srqn, max_wr: 8, ctrl_addr: s.take(128), ring_addr: s.take(4096), reserved: 0 }
    }
    fn xrc(s: &Side) -> abi::CreateSrqReq {
        let (xrcdn, cqn) = (s.make(Kind::Xrcd), s.make(Kind::Cq));
        abi::CreateSrqReq { is_xrc: 1, xrcdn, cqn, ..s.srq_request() }
    }
    use offset_of as at;
    vec![
        row(C::CreateSrq, |w| bytes(w.me.srq_request()))
            .handle(at!(abi::CreateSrqReq, pdn), Kind::Pd)
            .refused(BadValue, "limit", |w| bytes(abi::CreateSrqReq { limit: ENTRIES + 1, ..w.me.srq_request() }))
            .refused(BadValue, "max_sge", |w| bytes(abi::CreateSrqReq { max_sge: 33, ..w.me.srq_request() }))
            .refused(BadAddress, "no ring", |w| bytes(abi::CreateSrqReq { ring_addr: NOWHERE, ..w.me.srq_request() }))
            .ends(),
        row(C::CreateSrq, |w| bytes(xrc(&w.me)))
            .what("XRC")
            .handle(at!(abi::CreateSrqReq, xrcdn), Kind::Xrcd)
            .handle(at!(abi::CreateSrqReq, cqn), Kind::Cq),
        row(C::DestroySrq, |w| handle(w.me.make(Kind::Srq))).handle(HANDLE, Kind::Srq).refused(Busy, "a QP", |w| {
            let srqn = w.me.make(Kind::Srq);
            w.me.create_qp(abi::CreateQpReq { has_srq: 1, srqn, ..w.me.qp_request(QpType::Rc) });
            handle(srqn)
        }),
        row(C::ModifySrq, |w| bytes(abi::ModifySrqReq { srqn: w.me.make(Kind::Srq), limit: 1, reserved: [0; 2] }))
            .handle(at!(abi::ModifySrqReq, srqn), Kind::Srq)
            .refused(BadValue, "limit", |w| {
                bytes(abi::ModifySrqReq { srqn: w.me.make(Kind::Srq), limit: ENTRIES + 1, reserved: [0; 2] })
            }),
        row(C::QuerySrq, |w| handle(w.me.make(Kind::Srq))).handle(HANDLE, Kind::Srq),
        row(C::ResizeSrq, |w| bytes(resize(&w.me, w.me.make(Kind::Srq))))
            .handle(at!(abi::ResizeSrqReq, srqn), Kind::Srq)
            .refused(BadValue, "below the limit", |w| {
                let srqn =
                    w.me.ok::<abi::CreateSrqResp>(C::CreateSrq, &abi::CreateSrqReq { limit: 4, ..w.me.srq_request() });
                bytes(abi::ResizeSrqReq { max_wr: 2, ..resize(&w.me, srqn.srqn) })
            })
            .refused(BadAddress, "no ring", |w| {
                bytes(abi::ResizeSrqReq { ring_addr: NOWHERE, ..resize(&w.me, w.me.make(Kind::Srq)) })
            })
            .refused(BadState, "lost", |w| bytes(resize(&w.me, w.me.broken_srq()))),
    ]
}

fn datagrams() -> Vec<Row> {
    use Status::*;
    fn create_ah(s: &Side, attr: abi::AhAttr) -> Vec<u8> {
        bytes(abi::CreateAhReq { pdn: s.make(Kind::Pd), reserved: 0, attr })
    }
    fn mcast(qpn: u32, ip: &str) -> abi::McastReq {
        abi::McastReq { qpn, reserved: 0, gid: gid(ip) }
    }
    vec![
        row(C::CreateAh, |w| create_ah(&w.me, to(PEER)))
            .handle(offset_of!(abi::CreateAhReq, pdn), Kind::Pd)
            .refused(BadValue, "not global", |w| create_ah(&w.me, abi::AhAttr { is_global: 0, ..to(PEER) }))
            .refused(BadValue, "port", |w| create_ah(&w.me, abi::AhAttr { port_num: 2, ..to(PEER) }))
            .refused(Unreachable, "nobody has the address", |w| create_ah(&w.me, to(NOBODY)))
            .ends(),
        row(C::DestroyAh, |w| handle(w.me.make(Kind::Ah))).handle(HANDLE, Kind::Ah),
        row(C::AttachMcast, |w| bytes(mcast(w.me.qp(QpType::Ud).qpn, "239.1.1.1")))
            .handle(offset_of!(abi::McastReq, qpn), Kind::Qp)
            .refused(BadValue, "not UD", |w| bytes(mcast(w.me.make(Kind::Qp), "239.1.1.1")))
            .refused(BadValue, "no group", |w| bytes(mcast(w.me.qp(QpType::Ud).qpn, PEER)))
            .refused(Exhausted, "groups of a QP", |w| {
                let qpn = w.me.qp(QpType::Ud).qpn;
                for i in 0..64 {
                    w.me.ok::<abi::Nothing>(C::AttachMcast, &mcast(qpn, &format!("239.1.2.{i}")));
                }
                bytes(mcast(qpn, "239.1.1.1"))
            }),
        row(C::DetachMcast, |w| {
            let request = mcast(w.me.qp(QpType::Ud).qpn, "239.1.1.1");
            w.me.ok::<abi::Nothing>(C::AttachMcast, &request);
            bytes(request)
        })
        .handle(offset_of!(abi::McastReq, qpn), Kind::Qp)
        .refused(BadValue, "not attached", |w| bytes(mcast(w.me.qp(QpType::Ud).qpn, "239.1.1.1"))),
    ]
}

fn connections() -> Vec<Row> {
    use Status::*;
    const ID: usize = offset_of!(abi::CmReq, id);
    let op = |what, good: Request| row(C::Cm, good).what(what).handle(ID, Kind::Id);
    vec![
        row(C::Cm, |_| {
            bytes(abi::CmReq { op: CmOp::Create as u8, port_space: abi::port_space::TCP, ..Default::default() })
        })
        .what("CREATE")
        .refused(BadValue, "unknown operation", |_| bytes(abi::CmReq { op: 99, ..Default::default() }))
        .refused(BadValue, "event queue", |_| {
            let (op, port_space) = (CmOp::Create as u8, abi::port_space::TCP);
            bytes(abi::CmReq { op, port_space, queue: abi::MAX_CHANNELS, ..Default::default() })
        })
        .refused(Unsupported, "port space", |_| bytes(abi::CmReq { op: CmOp::Create as u8, ..Default::default() }))
        .ends(),
        op("DESTROY", |w| cm(&w.me, CmOp::Destroy, w.me.make(Kind::Id))),
        op("BIND", |w| cm(&w.me, CmOp::Bind, w.me.make(Kind::Id)))
            .refused(BadValue, "no address", |w| {
                bytes(abi::CmReq { src: Default::default(), ..w.me.cm_request(CmOp::Bind, w.me.make(Kind::Id)) })
            })
            .refused(BadState, "bound already", |w| {
                let id = w.me.make(Kind::Id);
                w.me.cm(CmOp::Bind, id);
                cm(&w.me, CmOp::Bind, id)
            })
            .refused(AddressInUse, "another has it", |w| {
                w.other.cm(CmOp::Bind, w.other.make(Kind::Id));
                cm(&w.me, CmOp::Bind, w.me.make(Kind::Id))
            })
            .refused(NoDevice, "an address of another vRNIC", |w| {
                let request = w.me.cm_request(CmOp::Bind, w.me.make(Kind::Id));
                bytes(abi::CmReq { src: cm_addr(PEER, 7000), ..request })
            }),
        op("RESOLVE_ADDR", |w| cm(&w.me, CmOp::ResolveAddr, w.me.make(Kind::Id)))
            .refused(BadValue, "no address", |w| {
                bytes(abi::CmReq { dst: Default::default(), ..w.me.cm_request(CmOp::ResolveAddr, w.me.make(Kind::Id)) })
            })
            .refused(BadState, "resolved already", |w| cm(&w.me, CmOp::ResolveAddr, w.me.resolved()))
            .refused(NoDevice, "no address of that family", |w| {
                let request = w.me.cm_request(CmOp::ResolveAddr, w.me.make(Kind::Id));
                bytes(abi::CmReq { dst: cm_addr("fd00::1", 1), ..request })
            }),
        op("RESOLVE_ROUTE", |w| {
            let id = w.me.make(Kind::Id);
            w.me.cm(CmOp::ResolveAddr, id);
            cm(&w.me, CmOp::ResolveRoute, id)
        })
        .refused(BadState, "no address", too_early(CmOp::ResolveRoute)),
        op("LISTEN", |w| cm(&w.me, CmOp::Listen, w.me.make(Kind::Id)))
            .refused(BadState, "asks for a connection", |w| cm(&w.me, CmOp::Listen, w.me.resolved()))
            .refused(BadHandle, "a QP of another session", |w| {
                let param = abi::CmParam { qpn: w.other.make(Kind::Qp), ..Default::default() };
                bytes(abi::CmReq { param, ..w.me.cm_request(CmOp::Listen, w.me.id(abi::port_space::UDP)) })
            })
            .refused(BadValue, "no datagrams", |w| {
                let param = abi::CmParam { qpn: w.me.make(Kind::Qp), ..Default::default() };
                bytes(abi::CmReq { param, ..w.me.cm_request(CmOp::Listen, w.me.make(Kind::Id)) })
            }),
        op("CONNECT", |w| cm(&w.me, CmOp::Connect, w.me.resolved()))
            .refused(BadState, "no route", too_early(CmOp::Connect))
            .refused(BadValue, "private data", |w| cm_private(&w.me, CmOp::Connect, w.me.resolved(), 57)),
        op("ACCEPT", |w| cm(&w.me, CmOp::Accept, w.me.asked().1))
            .refused(BadState, "no request", too_early(CmOp::Accept))
            .refused(BadValue, "private data", |w| cm_private(&w.me, CmOp::Accept, w.me.asked().1, 197)),
        op("REJECT", |w| cm(&w.me, CmOp::Reject, w.me.asked().1))
            .refused(BadState, "no request", too_early(CmOp::Reject))
            .refused(BadValue, "private data", |w| cm_private(&w.me, CmOp::Reject, w.me.asked().1, 149)),
        op("ESTABLISH", |w| cm(&w.me, CmOp::Establish, w.me.answered().0)).refused(
            BadState,
            "no answer",
            too_early(CmOp::Establish),
        ),
        op("DISCONNECT", |w| cm(&w.me, CmOp::Disconnect, w.me.answered().1)).refused(
            BadState,
            "not connected",
            too_early(CmOp::Disconnect),
        ),
        op("MIGRATE", |w| bytes(abi::CmReq { queue: 3, ..w.me.cm_request(CmOp::Migrate, w.me.make(Kind::Id)) }))
            .refused(BadValue, "event queue", |w| {
                let queue = abi::MAX_CHANNELS;
                bytes(abi::CmReq { queue, ..w.me.cm_request(CmOp::Migrate, w.me.make(Kind::Id)) })
            }),
        op("SET_OPTION", |w| {
            let request = w.me.cm_request(CmOp::SetOption, w.me.make(Kind::Id));
            bytes(abi::CmReq { option: abi::cm_option::ACK_TIMEOUT, value: 31, ..request })
        })
        .refused(BadValue, "timeout", |w| {
            let request = w.me.cm_request(CmOp::SetOption, w.me.make(Kind::Id));
            bytes(abi::CmReq { option: abi::cm_option::ACK_TIMEOUT, value: 32, ..request })
        })
        .refused(BadValue, "unknown option", |w| {
            bytes(abi::CmReq { option: 99, ..w.me.cm_request(CmOp::SetOption, w.me.make(Kind::Id)) })
        }),
        op("JOIN", |w| {
            let id = w.me.id(abi::port_space::UDP);
            w.me.cm(CmOp::Bind, id);
            cm(&w.me, CmOp::Join, id)
        })
        .refused(BadState, "not bound", |w| cm(&w.me, CmOp::Join, w.me.id(abi::port_space::UDP)))
        .refused(BadValue, "no group", |w| {
            let request = w.me.cm_request(CmOp::Join, w.me.id(abi::port_space::UDP));
            bytes(abi::CmReq { dst: cm_addr(PEER, 0), ..request })
        })
        .ends(),
        op("LEAVE", |w| cm(&w.me, CmOp::Leave, w.me.make(Kind::Id))),
        row(C::CmQpAttr, |w| bytes(abi::CmQpAttrReq { id: w.me.make(Kind::Id), state: QpState::Init as u32 }))
            .handle(offset_of!(abi::CmQpAttrReq, id), Kind::Id)
            .refused(BadState, "not connected", |w| {
                bytes(abi::CmQpAttrReq { id: w.me.make(Kind::Id), state: QpState::Rtr as u32 })
            })
            .refused(BadValue, "state", |w| bytes(abi::CmQpAttrReq { id: w.me.make(Kind::Id), state: 99 })),
        row(C::CmEvent, |w| {
            w.me.resolved();
            bytes(abi::CmEventReq::default())
        })
        .refused(BadHandle, "there is none", |_| bytes(abi::CmEventReq::default()))
        .refused(BadValue, "event queue", |_| bytes(abi::CmEventReq { queue: abi::MAX_CHANNELS, reserved: 0 })),
    ]
}
