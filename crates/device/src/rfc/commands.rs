//! Control commands of the RFC mode. Each is translated to the native command. Lengths are exact.

use unirdma_abi as abi;
use unirdma_abi::rfc::{self, Nothing};
use unirdma_abi::{Command, Status};
use unirdma_formats::{Gid, QpState, attr_mask};
use unirdma_link::{Resource, Ticket};
use unirdma_rnic::CreateQp;
use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::{Qp, Rfc, Served, convert, cq, qp};
use crate::commands::{Reply, Turn, parse};
use crate::memory_lookup::{Found, Outcome};
use crate::{Device, lock, now_ns};

type Answer<T> = Result<T, Status>;

/// Runs a handler on a request, which must have exactly the length of `Req`. `room` must suffice for the status and
/// `Resp`. `More` follows if there is room for it, too.
fn run<Req: FromBytes, Resp: IntoBytes + Immutable, More: IntoBytes + Immutable>(
    data: &[u8],
    room: usize,
    handler: impl FnOnce(Req) -> Answer<(Resp, More)>,
) -> Answer<Vec<u8>> {
    let least = 1 + size_of::<Resp>();
    if room < least {
        return Err(Status::BadLength);
    }
    let (resp, more) = handler(parse(data)?)?;
    let more = if room >= least + size_of::<More>() { more.as_bytes() } else { &[] };
    Ok([&[Status::Ok as u8], resp.as_bytes(), more].concat())
}

/// Dispatches a command to its handler. Each row has the command's name, request type and handler.
macro_rules! dispatch {
    ($c:expr, $data:expr, $room:expr, $($name:ident: $req:ty => $handler:expr;)*) => {
        match $c {
            $(Command::$name => run::<$req, _, _>($data, $room, $handler),)*
            _ => Err(Status::Unsupported),
        }
    };
}

fn done(r: Answer<()>) -> Answer<(Nothing, Nothing)> {
    r.map(|()| (Nothing {}, Nothing {}))
}

fn mr((mrn, key): (u32, u32)) -> (rfc::MrCreated, Nothing) {
    (rfc::MrCreated { mrn: mrn.into(), lkey: key.into(), rkey: key.into() }, Nothing {})
}

/// Access flags of an MR, without flags that are only hints.
fn access(flags: u32) -> Answer<u32> {
    use rfc::access as a;
    let known = a::BASIC | a::ZERO_BASED | a::HUGETLB | a::RELAXED_ORDERING;
    // ON_DEMAND is refused: the device does not support it, and listed pages stay in place.
    if flags & !known == 0 { Ok(flags & a::BASIC) } else { Err(Status::BadValue) }
}

impl Device {
    /// Takes WQEs and delivers completions; true if there were any.
    pub(crate) fn serve_queues(&self, rfc: &Rfc) -> bool {
        let began = now_ns();
        self.look_at_gids(rfc);
        let Some(served) = rfc.serve() else { return false };
        self.after_copies(&served, began);
        true
    }

    /// Updates the indices of the driver's GIDs if the vRNIC's table has changed.
    fn look_at_gids(&self, rfc: &Rfc) {
        if rfc.has_stale_gids() {
            let granted = self.rnic.lock().gids(self.identity.vrnic).to_vec();
            rfc.look_at_gids(&granted);
        }
    }

    /// Charges the vRNIC for the copying of WQEs, which began at `began`, and wakes the RNIC if necessary.
    fn after_copies(&self, served: &Served, began: u64) {
        let mut rnic = self.rnic.lock();
        let now = now_ns();
        rnic.charge_command(self.session, now.saturating_sub(began));
        if served.wakes {
            rnic.unpark(self.session, now);
        }
    }

    /// Executes one control request of this mode, unless it needs a long search and `outcome` is `None`. A response has
    /// at most `room` bytes.
    pub(crate) fn rfc_answer(&self, rfc: &Rfc, request: &[u8], room: usize, outcome: Option<Outcome>) -> Reply {
        let head = |status: Status| vec![status as u8];
        let Some((&code, data)) = request.split_first() else { return Reply::Now(head(Status::BadLength), None) };
        let Some(command) = Command::from_raw(code).filter(|&c| c as u8 <= Command::ReqNotifyCq as u8) else {
            return Reply::Now(head(Status::Unsupported), None);
        };
        let search = || match command {
            Command::RegUserMr => self.search_user_mr(&native(&parse(data).ok()?).ok()?),
            _ => None,
        };
        let found = match self.find(outcome, search) {
            Ok(found) => found,
            Err(search) => return Reply::After(search),
        };
        self.look_at_gids(rfc);
        self.take_earlier(rfc, command, data);
        let bytes = self.rfc_dispatch(rfc, command, data, (room, found)).unwrap_or_else(|status| {
            tracing::debug!(vrnic = %self.identity.name, ?command, ?status, "control command refused");
            head(status)
        });
        Reply::Now(bytes, Some(command))
    }

    /// Before a command changes or destroys a QP, copies the WQEs that were posted to the QP.
    fn take_earlier(&self, rfc: &Rfc, command: Command, data: &[u8]) {
        let qpn = match command {
            Command::ModifyQp => parse::<rfc::ModifyQp>(data).map(|r| r.qpn.get()),
            Command::DestroyQp => parse::<rfc::Handle>(data).map(|r| r.handle.get()),
            _ => return,
        };
        let Ok(qpn) = qpn else { return };
        let began = now_ns();
        self.after_copies(&rfc.take_all(qpn), began);
        if command == Command::DestroyQp {
            self.pollers.catch_up(self.session, Some(qpn));
        }
    }

    fn rfc_dispatch(
        &self,
        rfc: &Rfc,
        command: Command,
        data: &[u8],
        (room, found): (usize, Option<Answer<Found>>),
    ) -> Answer<Vec<u8>> {
        let (s, turn) = (self.session, &mut Turn::new(self, found));
        dispatch! { command, data, room,
            QueryPort: rfc::QueryPort => |r| self.rfc_query_port(turn, r.port);
            CreateCq: rfc::CreateCq => |r| self.rfc_create_cq(rfc, turn, r.cqe.get());
            DestroyCq: rfc::Handle => |r| {
                turn.taken().destroy_cq(s, rfc.cq_number(r.handle.get())?)?;
                done(rfc.remove_cq(r.handle.get()))
            };
            CreatePd: Nothing => |_| {
                turn.taken().create_pd(s).map(|pdn| (rfc::Handle { handle: pdn.into() }, Nothing {}))
            };
            DestroyPd: rfc::Handle => |r| done(turn.taken().destroy_pd(s, r.handle.get()));
            GetDmaMr: rfc::GetDmaMr => |r| {
                let access_flags = access(r.access_flags.get())?;
                let request = abi::GetDmaMrReq { pdn: r.pdn.get(), access_flags };
                self.get_dma_mr(turn.taken(), request).map(|m| mr((m.mrn, m.lkey)))
            };
            // Both commands need MEM_MGT_EXTENSIONS, which this mode does not offer (R34).
            CreateMr: rfc::CreateMr => |_| Err::<(rfc::MrCreated, Nothing), _>(Status::Unsupported);
            MapMrSg: rfc::MapMrSg => |_| Err::<(rfc::Handle, Nothing), _>(Status::Unsupported);
            RegUserMr: rfc::RegUserMr => |r| self.reg_user_mr(turn, native(&r)?).map(|m| mr((m.mrn, m.lkey)));
            DeregMr: rfc::Handle => |r| done(turn.taken().dereg_mr(s, r.handle.get()));
            CreateQp: rfc::CreateQp => |r| self.rfc_create_qp(rfc, turn, &r);
            ModifyQp: rfc::ModifyQp => |r| done(self.rfc_modify_qp(rfc, turn, &r));
            QueryQp: rfc::QueryQp => |r| self.rfc_query_qp(rfc, turn, r.qpn.get());
            DestroyQp: rfc::Handle => |r| {
                turn.taken().destroy_qp(s, r.handle.get())?;
                rfc.remove_qp(r.handle.get());
                done(Ok(()))
            };
            QueryPkey: rfc::QueryPkey => |r| match (r.port.get(), r.index.get()) {
                (1, 0) => Ok((rfc::Pkey { pkey: 0xffff.into() }, Nothing {})),
                _ => Err(Status::BadValue),
            };
            AddGid: rfc::AddGid => |r| done(self.rfc_add_gid(rfc, turn, &r));
            DelGid: rfc::DelGid => |r| match r.port.get() {
                1 => done(lock(&rfc.inner).gids.remove(r.index.get())),
                _ => Err(Status::BadValue),
            };
            ReqNotifyCq: rfc::ReqNotify => |r| {
                turn.taken().req_notify_cq(s, rfc.cq_number(r.cqn.get())?, r.flags.get())?;
                rfc.note_asked(r.cqn.get());
                done(Ok(()))
            };
        }
    }

    fn rfc_query_port(&self, turn: &mut Turn<'_>, port: u8) -> Answer<(rfc::PortAttr, Nothing)> {
        const CM_SUP: u32 = 1 << 16;
        let p = self.query_port(turn.taken(), abi::QueryPortReq { port: port.into(), reserved: 0 })?;
        let attr = rfc::PortAttr {
            state: p.state,
            max_mtu: p.max_mtu,
            active_mtu: p.active_mtu,
            phys_mtu: p.phys_mtu.into(),
            gid_tbl_len: (rfc::MAX_GIDS as u32).into(),
            port_cap_flags: (p.port_cap_flags & CM_SUP).into(),
            max_msg_sz: p.max_msg_sz.into(),
            bad_pkey_cntr: p.bad_pkey_cntr.into(),
            qkey_viol_cntr: p.qkey_viol_cntr.into(),
            pkey_tbl_len: p.pkey_tbl_len.into(),
            active_width: p.active_width,
            active_speed: p.active_speed.into(),
            phys_state: p.phys_state,
            ..rfc::PortAttr::default()
        };
        Ok((attr, Nothing {}))
    }

    fn rfc_create_cq(&self, rfc: &Rfc, turn: &mut Turn<'_>, cqe: u32) -> Answer<(rfc::CqCreated, rfc::CqCaps)> {
        if cqe == 0 || cqe > rfc::MAX_CQE {
            return Err(Status::BadValue);
        }
        let index = rfc.free_cq()?;
        let hold = rfc.hold(cq::bytes(cqe))?;
        let (ring, tail) = cq::ring(cqe).ok_or(Status::Exhausted)?;
        let number = turn.taken().create_cq(self.session, ring, Some(index as u16))?;
        rfc.add_cq(index, cq::Cq { number, tail, asked: false, _hold: hold });
        Ok((rfc::CqCreated { cqn: (index as u32).into() }, rfc::CqCaps { cqe: cq::entries(cqe).into() }))
    }

    fn rfc_create_qp(
        &self,
        rfc: &Rfc,
        turn: &mut Turn<'_>,
        r: &rfc::CreateQp,
    ) -> Answer<(rfc::QpCreated, rfc::QpCaps)> {
        let typ = match r.qp_type {
            rfc::qp_type::GSI => abi::QP_TYPE_GSI,
            rfc::qp_type::RC | rfc::qp_type::UC | rfc::qp_type::UD => r.qp_type,
            _ => return Err(Status::Unsupported),
        };
        let asked = convert::cap_of(r);
        if asked.max_send_wr > rfc::MAX_QP_WR || asked.max_recv_wr > rfc::MAX_QP_WR {
            return Err(Status::BadValue);
        }
        let plan = rfc.plan_qp(r.send_cqn.get(), r.recv_cqn.get())?;
        let layout = abi::QpLayout::of(&qp::held(asked)).ok_or(Status::BadValue)?;
        let cap = abi::QpCap { max_inline_data: layout.inline_room(), ..qp::held(asked) };
        let hold = rfc.hold(qp::bytes(&layout))?;
        let rings = qp::rings(layout).ok_or(Status::Exhausted)?;
        let create = CreateQp {
            pd: r.pdn.get(),
            send_cq: plan.cqs[0],
            recv_cq: plan.cqs[1],
            srq: None,
            xrcd: None,
            door: 0,
            sig_all: r.sq_sig_type == rfc::SIGNAL_ALL_WR,
            cap,
            rings: rings.clone(),
        };
        let made = turn.taken().create_qp(self.session, typ, create)?;
        let sq = rfc.add_qp(plan.pair, Qp::new(made, r.pdn.get(), r.qp_type, cap, rings, hold));
        let caps = rfc::QpCaps { sq_vq: sq.into(), rq_vq: (sq + 1).into(), cap: convert::to_cap(&cap) };
        Ok((rfc::QpCreated { qpn: made.0.into() }, caps))
    }

    fn rfc_modify_qp(&self, rfc: &Rfc, turn: &mut Turn<'_>, r: &rfc::ModifyQp) -> Answer<()> {
        let (qpn, mask, a) = (r.qpn.get(), r.attr_mask.get(), &r.attrs);
        let to = &a.ah_attr;
        let mut sgid_index = 0;
        if mask & attr_mask::AV != 0 {
            let inner = lock(&rfc.inner);
            inner.pair(qpn).ok_or(Status::BadHandle)?;
            sgid_index = inner.gids.native(to.grh.sgid_index).ok_or(Status::BadValue)?;
        }
        let attr = convert::attr(a, sgid_index);
        turn.taken().modify_qp(self.session, qpn, mask, &attr)?;
        if mask & attr_mask::AV != 0 {
            rfc.set_sgid_index(qpn, to.grh.sgid_index);
        }
        if mask & attr_mask::STATE != 0 && u32::from(a.qp_state) == QpState::Reset as u32 {
            rfc.reset_qp(qpn);
        }
        Ok(())
    }

    fn rfc_query_qp(&self, rfc: &Rfc, turn: &mut Turn<'_>, qpn: u32) -> Answer<(rfc::QpAttr, Nothing)> {
        let a = turn.taken().query_qp(self.session, qpn)?;
        let attr = convert::to_driver(&a, rfc.sgid_index(qpn));
        Ok((attr, Nothing {}))
    }

    fn rfc_add_gid(&self, rfc: &Rfc, turn: &mut Turn<'_>, r: &rfc::AddGid) -> Answer<()> {
        if r.port_num.get() != 1 || r.gid_type.get() != rfc::GID_TYPE_ROCE_V2 {
            return Err(Status::BadValue);
        }
        let granted = turn.taken().gids(self.identity.vrnic);
        lock(&rfc.inner).gids.add(r.index.get(), Gid(r.gid), granted)
    }
}

/// Translates REG_USER_MR to the native request. An MR is always a list of pages, which is empty if the MR has no
/// bytes.
fn native(r: &rfc::RegUserMr) -> Answer<abi::RegUserMrReq> {
    let (flags, length) = (r.access_flags.get(), r.length.get());
    if (r.pages.get() == 0 || r.npages.get() == 0) && length > 0 || length == 0 && r.npages.get() > 0 {
        return Err(Status::BadValue);
    }
    Ok(abi::RegUserMrReq {
        pdn: r.pdn.get(),
        access_flags: access(flags)?,
        start: r.start.get(),
        length,
        virt_addr: if flags & rfc::access::ZERO_BASED == 0 { r.virt_addr.get() } else { 0 },
        pages_addr: r.pages.get(),
        npages: r.npages.get(),
        note: 0,
    })
}

/// Place of a new QP: its pair, and the RNIC's handles of its CQs.
struct Plan {
    pair: usize,
    cqs: [u32; 2],
}

impl Rfc {
    /// Reserves `bytes` bytes on the account.
    fn hold(&self, bytes: usize) -> Answer<Ticket> {
        self.ledger.take(Resource::AddressSpace, bytes as u64).ok_or(Status::Exhausted)
    }

    /// The virtqueue of the first unused CQ.
    fn free_cq(&self) -> Answer<usize> {
        let inner = lock(&self.inner);
        let free = inner.cqs.iter().position(Option::is_none).ok_or(Status::Exhausted)?;
        Ok(inner.shape.cq(free))
    }

    fn add_cq(&self, index: usize, cq: cq::Cq) {
        lock(&self.inner).cqs[index - 1] = Some(cq);
    }

    fn cq_number(&self, cqn: u32) -> Answer<u32> {
        lock(&self.inner).cq(cqn).map(|(_, number)| number)
    }

    /// Called when the RNIC has destroyed a CQ: returns the CQ's buffers.
    fn remove_cq(&self, cqn: u32) -> Answer<()> {
        let inner = &mut *lock(&self.inner);
        let (at, _) = inner.cq(cqn)?;
        inner.cqs[at] = None;
        let index = inner.shape.cq(at);
        inner.vqs[index].give_all_back(inner.guest.as_ref());
        Ok(())
    }

    /// REQ_NOTIFY_CQ. Completions that wait for buffers count as later than the request.
    fn note_asked(&self, cqn: u32) {
        let inner = &mut *lock(&self.inner);
        if let Ok((at, _)) = inner.cq(cqn)
            && let Some(cq) = inner.cqs[at].as_mut().filter(|cq| cq.tail.waiting() > 0)
        {
            cq.asked = true;
        }
    }

    fn plan_qp(&self, send_cqn: u32, recv_cqn: u32) -> Answer<Plan> {
        let inner = lock(&self.inner);
        let cqs = [inner.cq(send_cqn)?.1, inner.cq(recv_cqn)?.1];
        let pair = inner.qps.iter().position(Option::is_none).ok_or(Status::Exhausted)?;
        Ok(Plan { pair, cqs })
    }

    /// Called when the RNIC has made a QP; returns the virtqueue of its SQ.
    fn add_qp(&self, pair: usize, qp: Qp) -> u32 {
        let inner = &mut *lock(&self.inner);
        inner.qps[pair] = Some(qp);
        let sq = inner.shape.sq(pair);
        // WQEs may be waiting already.
        inner.activate(sq);
        inner.activate(sq + 1);
        sq as u32
    }

    /// Copies all WQEs of a QP for which there is room.
    fn take_all(&self, qpn: u32) -> Served {
        let inner = &mut *lock(&self.inner);
        let Some(pair) = inner.pair(qpn) else { return Served { wakes: false } };
        let sq = inner.shape.sq(pair);
        let wakes = [sq, sq + 1].map(|index| inner.take(index, u32::MAX).1);
        Served { wakes: wakes.contains(&true) }
    }

    /// Called when the RNIC has destroyed a QP: returns its chains and drops its completions.
    fn remove_qp(&self, qpn: u32) {
        let inner = &mut *lock(&self.inner);
        if let Some(pair) = inner.pair(qpn) {
            inner.forget(pair);
            inner.qps[pair] = None;
        }
    }

    /// Called when the RNIC has reset a QP and dropped its WQEs.
    fn reset_qp(&self, qpn: u32) {
        let inner = &mut *lock(&self.inner);
        if let Some(pair) = inner.pair(qpn) {
            inner.forget(pair);
            inner.qps[pair].iter_mut().for_each(Qp::reset);
        }
    }

    fn set_sgid_index(&self, qpn: u32, index: u8) {
        let inner = &mut *lock(&self.inner);
        if let Some(pair) = inner.pair(qpn) {
            inner.qps[pair].iter_mut().for_each(|q| q.sgid_index = index);
        }
    }

    fn sgid_index(&self, qpn: u32) -> u8 {
        let inner = lock(&self.inner);
        inner.pair(qpn).and_then(|pair| inner.qps[pair].as_ref()).map_or(0, |q| q.sgid_index)
    }
}

impl super::Inner {
    /// Returns the chains of a pair's QP, and drops its completions that wait for buffers.
    fn forget(&mut self, pair: usize) {
        let Some(qpn) = self.qps[pair].as_ref().map(|q| q.qpn) else { return };
        self.cqs.iter_mut().flatten().for_each(|cq| cq.tail.forget(qpn));
        let sq = self.shape.sq(pair);
        self.vqs[sq..sq + 2].iter_mut().for_each(|vq| vq.give_all_back(self.guest.as_ref()));
    }
}
