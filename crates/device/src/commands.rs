//! Control commands: bytes in, bytes out. Lengths are exact, reserved fields are ignored.

use unirdma_abi as abi;
use unirdma_abi::{Command, Status};
use unirdma_formats::{Gid, QpType, access};
use unirdma_link::Memory;
use unirdma_mem::{Bell, CqRing, QpRings, Span};
use unirdma_rnic::{Backing, CreateQp, OpenXrcd, Rnic, SrqAttr, SrqInfo};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::{Device, lock};

type Answer = Result<Vec<u8>, Status>;

/// Pages that one REG_USER_MR may list.
const MAX_PAGES: u32 = 1 << 20;
const PAGE: u64 = 4096;

/// A response without data.
pub(crate) fn error(status: Status) -> Vec<u8> {
    abi::RespHeader { status: status as u8, ..Default::default() }.as_bytes().to_vec()
}

fn parse<T: FromBytes>(data: &[u8]) -> Result<T, Status> {
    T::read_from_bytes(data).map_err(|_| Status::BadLength)
}

fn answer<T: IntoBytes + Immutable>(resp: T) -> Answer {
    Ok(resp.as_bytes().to_vec())
}

fn nothing(r: Result<(), Status>) -> Answer {
    r.map(|()| Vec::new())
}

/// Bytes that the response of a command takes after its header.
fn response_bytes(c: Command) -> usize {
    match c {
        Command::QueryPort => size_of::<abi::QueryPortResp>(),
        Command::CreateCq | Command::CreatePd | Command::CreateAh | Command::CreateXrcd => size_of::<abi::HandleResp>(),
        Command::GetDmaMr | Command::AllocNullMr | Command::CreateMr | Command::RegUserMr | Command::AllocMw => {
            size_of::<abi::MrResp>()
        }
        Command::MapMrSg => 8,
        Command::CreateQp => size_of::<abi::CreateQpResp>(),
        Command::CreateSrq => size_of::<abi::CreateSrqResp>(),
        Command::QuerySrq => size_of::<abi::QuerySrqResp>(),
        Command::Cm => size_of::<abi::CmResp>(),
        Command::CmQpAttr => size_of::<abi::CmQpAttrResp>(),
        Command::CmEvent => size_of::<abi::CmEvent>(),
        Command::QueryQp => size_of::<abi::QueryQpResp>(),
        Command::QueryPkey => size_of::<abi::QueryPkeyResp>(),
        Command::QueryDevice => size_of::<abi::QueryDeviceResp>(),
        Command::QueryGid => size_of::<abi::QueryGidResp>(),
        _ => 0,
    }
}

impl Device {
    /// Executes one request; `room` is what its response may take. Nothing happens if that is too small.
    pub(crate) fn execute(&mut self, request: &[u8], room: usize) -> Vec<u8> {
        let Ok((head, data)) = abi::ReqHeader::read_from_prefix(request) else { return error(Status::BadLength) };
        let Some(c) = Command::from_raw(head.command) else { return error(Status::Unsupported) };
        if room < size_of::<abi::RespHeader>() + response_bytes(c) {
            return error(Status::BadLength);
        }
        match self.dispatch(c, data) {
            Ok(resp) => {
                // Who destroys an object, and knows that it is gone, finds all of its events.
                if takes_events_away(c, data) {
                    (self.settle)();
                }
                let mut bytes = error(Status::Ok);
                bytes.extend_from_slice(&resp);
                bytes
            }
            Err(status) => {
                tracing::debug!(vrnic = %self.identity.name, command = ?c, ?status, "control command refused");
                error(status)
            }
        }
    }

    fn dispatch(&mut self, c: Command, data: &[u8]) -> Answer {
        let s = self.session;
        let rnic_arc = self.rnic.clone();
        let rnic = &mut *lock(&rnic_arc);
        match c {
            Command::QueryDevice => self.query_device(data),
            Command::QueryPort => self.query_port(rnic, data),
            Command::QueryPkey => {
                let r: abi::QueryPkeyReq = parse(data)?;
                if r.port != 1 || r.index != 0 {
                    return Err(Status::BadValue);
                }
                answer(abi::QueryPkeyResp { pkey: 0xffff, ..Default::default() })
            }
            Command::QueryGid => {
                let r: abi::QueryGidReq = parse(data)?;
                let gid = rnic.gid_at(self.identity.vnic, r.index as usize).filter(|_| r.port == 1);
                answer(abi::QueryGidResp { gid: gid.ok_or(Status::BadValue)?.0, gid_type: 2, reserved: 0 })
            }
            // GIDs come from the virtual layer; a driver may only name what it was given (R26).
            Command::AddGid => {
                let r: abi::AddGidReq = parse(data)?;
                let granted = {
                    let gids = rnic.gids(self.identity.vnic);
                    gids.get(usize::from(r.index)).is_some_and(|g| g.0 == r.gid && !g.is_zero())
                };
                if granted && r.port_num == 1 { Ok(Vec::new()) } else { Err(Status::Denied) }
            }
            Command::DelGid => {
                let _: abi::DelGidReq = parse(data)?;
                Err(Status::Denied)
            }
            Command::SetDoorbell => {
                let r: abi::SetDoorbellReq = parse(data)?;
                if r.addr % PAGE != 0 {
                    return Err(Status::BadValue);
                }
                let page = span(&self.memory, r.addr, PAGE)?;
                nothing(rnic.set_doorbell(s, Bell::new(page).ok_or(Status::BadAddress)?))
            }
            Command::SetStage => {
                let r: abi::SetStageReq = parse(data)?;
                if r.length > abi::MAX_STAGE {
                    return Err(Status::BadValue);
                }
                nothing(rnic.set_stage(s, span(&self.memory, r.addr, r.length)?))
            }
            Command::CreatePd => {
                if !data.is_empty() {
                    return Err(Status::BadLength);
                }
                answer(abi::HandleResp { handle: rnic.create_pd(s)?, reserved: 0 })
            }
            Command::DestroyPd => nothing(rnic.destroy_pd(s, handle(data)?)),
            Command::CreateCq => self.create_cq(rnic, data),
            Command::ResizeCq => self.resize_cq(rnic, data),
            Command::ModifyCq => {
                let r: abi::ModifyCqReq = parse(data)?;
                nothing(rnic.modify_cq(self.session, r.cqn, r.count, r.period_us))
            }
            Command::DestroyCq => nothing(rnic.destroy_cq(s, handle(data)?)),
            Command::ReqNotifyCq => {
                let r: abi::ReqNotifyReq = parse(data)?;
                nothing(rnic.req_notify_cq(s, r.cqn, r.flags))
            }
            Command::GetDmaMr => {
                let r: abi::GetDmaMrReq = parse(data)?;
                // All of this session's own memory, never anybody else's (X14).
                let mr = rnic.reg_mr(s, r.pdn, r.access_flags, 0, u64::MAX, Backing::Session, Vec::new())?;
                mr_answer(mr)
            }
            Command::AllocNullMr => {
                let pd = parse::<abi::HandleReq>(data)?.handle;
                let mr = rnic.reg_mr(s, pd, access::LOCAL_WRITE, 0, u64::MAX, Backing::Null, Vec::new())?;
                mr_answer(mr)
            }
            Command::RegUserMr => self.reg_user_mr(rnic, data),
            Command::ReregMr => {
                let r: abi::ReregMrReq = parse(data)?;
                nothing(rnic.rereg_mr(s, r.mrn, r.by))
            }
            Command::DeregMr => nothing(rnic.dereg_mr(s, handle(data)?)),
            Command::AllocMw => {
                let r: abi::AllocMwReq = parse(data)?;
                mr_answer(rnic.alloc_mw(s, r.pdn, r.mw_type)?)
            }
            Command::DeallocMw => nothing(rnic.dealloc_mw(s, handle(data)?)),
            // Both need MEM_MGT_EXTENSIONS, which this device does not offer (R34).
            Command::CreateMr | Command::MapMrSg => Err(Status::Unsupported),
            Command::CreateQp => self.create_qp(rnic, data),
            Command::ResizeQp => self.resize_qp(rnic, data),
            Command::OpenQp => {
                let r: abi::OpenQpReq = parse(data)?;
                nothing(rnic.open_qp(s, r.xrcdn, r.qpn))
            }
            Command::ModifyQp => {
                let r: abi::ModifyQpReq = parse(data)?;
                nothing(rnic.modify_qp(s, r.qpn, r.attr_mask, &r.attr))
            }
            Command::QueryQp => {
                let r: abi::QueryQpReq = parse(data)?;
                answer(abi::QueryQpResp { attr: rnic.query_qp(s, r.qpn)? })
            }
            Command::CreateXrcd => {
                let r: abi::CreateXrcdReq = parse(data)?;
                let flag = |bit: u32| r.flags & bit != 0;
                let open = OpenXrcd {
                    key: flag(abi::XRCD_SHARED).then_some((r.dev, r.ino)),
                    create: flag(abi::XRCD_CREATE),
                    exclusive: flag(abi::XRCD_EXCLUSIVE),
                };
                answer(abi::HandleResp { handle: rnic.create_xrcd(s, open)?, reserved: 0 })
            }
            Command::DestroyXrcd => nothing(rnic.destroy_xrcd(s, handle(data)?)),
            Command::CreateAh => {
                let r: abi::CreateAhReq = parse(data)?;
                answer(abi::HandleResp { handle: rnic.create_ah(s, r.pdn, &r.attr)?, reserved: 0 })
            }
            Command::DestroyAh => nothing(rnic.destroy_ah(s, handle(data)?)),
            Command::CreateSrq => self.create_srq(rnic, data),
            Command::ResizeSrq => self.resize_srq(rnic, data),
            Command::DestroySrq => nothing(rnic.destroy_srq(s, handle(data)?)),
            Command::ModifySrq => {
                let r: abi::ModifySrqReq = parse(data)?;
                nothing(rnic.modify_srq(s, r.srqn, r.limit))
            }
            Command::QuerySrq => {
                let SrqInfo { max_wr, max_sge, limit } = rnic.query_srq(s, handle(data)?)?;
                answer(abi::QuerySrqResp { max_wr, max_sge, limit, reserved: 0 })
            }
            Command::Cm => answer(rnic.cm(s, &parse::<abi::CmReq>(data)?)?),
            Command::CmQpAttr => {
                let r: abi::CmQpAttrReq = parse(data)?;
                let (attr_mask, attr) = rnic.cm_qp_attr(s, r.id, r.state)?;
                answer(abi::CmQpAttrResp { attr_mask, reserved: 0, attr })
            }
            Command::CmEvent => answer(rnic.cm_event(s, parse::<abi::CmEventReq>(data)?.queue)?),
            Command::AttachMcast => {
                let r: abi::McastReq = parse(data)?;
                nothing(rnic.attach_mcast(s, r.qpn, Gid(r.gid)))
            }
            Command::DetachMcast => {
                let r: abi::McastReq = parse(data)?;
                nothing(rnic.detach_mcast(s, r.qpn, Gid(r.gid)))
            }
            Command::DestroyQp => nothing(rnic.destroy_qp(s, handle(data)?)),
        }
    }

    fn query_device(&self, data: &[u8]) -> Answer {
        if !data.is_empty() {
            return Err(Status::BadLength);
        }
        let mut resp = abi::QueryDeviceResp { config: self.identity.config, ..Default::default() };
        let put = |dst: &mut [u8; 32], text: &str| {
            let n = text.len().min(31);
            dst[..n].copy_from_slice(&text.as_bytes()[..n]);
        };
        put(&mut resp.fw_ver, env!("CARGO_PKG_VERSION"));
        put(&mut resp.name, &self.identity.name);
        answer(resp)
    }

    fn query_port(&self, rnic: &Rnic, data: &[u8]) -> Answer {
        let r: abi::QueryPortReq = parse(data)?;
        if r.port != 1 {
            return Err(Status::BadValue);
        }
        let mtu = self.identity.active_mtu;
        // ACTIVE and LinkUp, or DOWN and Disabled.
        let (state, phys_state) = if rnic.is_up(self.identity.vnic) { (4, 5) } else { (1, 3) };
        answer(abi::QueryPortResp {
            state,
            max_mtu: 5,
            active_mtu: mtu,
            phys_state,
            phys_mtu: 128 << mtu,
            gid_tbl_len: rnic.gid_table_len(self.identity.vnic) as u32,
            port_cap_flags: 1 << 16 | 1 << 26,
            max_msg_sz: unirdma_formats::MAX_MSG_BYTES as u32,
            qkey_viol_cntr: rnic.counters(self.identity.vnic).map_or(0, |c| c.qkey_violations as u32),
            pkey_tbl_len: 1,
            active_speed: 32,
            active_width: 2,
            link_layer: 2,
            ..Default::default()
        })
    }

    /// The rings of a CQ, checked.
    fn cq_ring(&self, cqe: u32, entries: u32, ring: u64, ctrl: u64) -> Result<CqRing, Status> {
        if cqe == 0 || cqe > abi::MAX_CQE || entries < cqe || entries > (abi::MAX_CQE + 1).next_power_of_two() {
            return Err(Status::BadValue);
        }
        let ring = span(&self.memory, ring, u64::from(entries) * size_of::<abi::Cqe>() as u64)?;
        let ctrl = span(&self.memory, ctrl, size_of::<abi::CqCtrl>() as u64)?;
        CqRing::new(ctrl, ring, entries).ok_or(Status::BadValue)
    }

    fn resize_cq(&self, rnic: &mut Rnic, data: &[u8]) -> Answer {
        let r: abi::ResizeCqReq = parse(data)?;
        let ring = self.cq_ring(r.cqe, r.entries, r.ring_addr, r.ctrl_addr)?;
        nothing(rnic.resize_cq(self.session, r.cqn, ring))
    }

    fn create_cq(&self, rnic: &mut Rnic, data: &[u8]) -> Answer {
        let r: abi::CreateCqReq = parse(data)?;
        let comp_queue = match r.comp_queue {
            abi::NO_COMP_QUEUE => None,
            q if q < abi::MAX_CHANNELS => Some(q as u16),
            _ => return Err(Status::BadValue),
        };
        let ring = self.cq_ring(r.cqe, r.entries, r.ring_addr, r.ctrl_addr)?;
        answer(abi::HandleResp { handle: rnic.create_cq(self.session, ring, comp_queue)?, reserved: 0 })
    }

    /// The rings of a QP, checked.
    fn qp_rings(&self, cap: &abi::QpCap, ctrl: u64, sq: u64, rq: u64) -> Result<QpRings, Status> {
        let layout = abi::QpLayout::of(cap).ok_or(Status::BadValue)?;
        let ctrl = span(&self.memory, ctrl, size_of::<abi::QpCtrl>() as u64)?;
        let sq = span(&self.memory, sq, layout.sq_bytes() as u64)?;
        let rq = span(&self.memory, rq, layout.rq_bytes() as u64)?;
        QpRings::new(ctrl, sq, rq, layout).ok_or(Status::BadAddress)
    }

    fn resize_qp(&self, rnic: &mut Rnic, data: &[u8]) -> Answer {
        let r: abi::ResizeQpReq = parse(data)?;
        let cap = rnic.query_qp(self.session, r.qpn)?.cap;
        let cap = abi::QpCap { max_send_wr: r.max_send_wr, max_recv_wr: r.max_recv_wr, ..cap };
        let rings = self.qp_rings(&cap, r.ctrl_addr, r.sq_addr, r.rq_addr)?;
        nothing(rnic.resize_qp(self.session, r.qpn, rings))
    }

    fn create_qp(&self, rnic: &mut Rnic, data: &[u8]) -> Answer {
        let r: abi::CreateQpReq = parse(data)?;
        let rings = self.qp_rings(&r.cap, r.ctrl_addr, r.sq_addr, r.rq_addr)?;
        let layout = *rings.layout();
        // What the rings really hold (R84p).
        let cap = abi::QpCap {
            max_send_wr: layout.sq_entries,
            max_recv_wr: layout.rq_entries,
            max_inline_data: layout.inline_room(),
            ..r.cap
        };
        let create = CreateQp {
            pd: r.pdn,
            send_cq: r.send_cqn,
            recv_cq: r.recv_cqn,
            srq: (r.has_srq != 0).then_some(r.srqn),
            xrcd: (u32::from(r.qp_type) == QpType::XrcRecv as u32).then_some(r.xrcdn),
            sig_all: r.sq_sig_all != 0,
            cap,
            rings,
        };
        let (qpn, db_slot) = rnic.create_qp(self.session, r.qp_type, create)?;
        answer(abi::CreateQpResp { qpn, db_slot, cap, reserved: 0 })
    }

    /// The ring of an SRQ, checked.
    fn srq_ring(&self, max_wr: u32, max_sge: u32, ctrl: u64, ring: u64) -> Result<QpRings, Status> {
        let cap = abi::QpCap { max_recv_wr: max_wr, max_recv_sge: max_sge, ..Default::default() };
        let layout = abi::QpLayout::of(&cap).ok_or(Status::BadValue)?;
        let ctrl = span(&self.memory, ctrl, size_of::<abi::QpCtrl>() as u64)?;
        let ring = span(&self.memory, ring, layout.rq_bytes() as u64)?;
        QpRings::receive_only(ctrl, ring, layout).ok_or(Status::BadAddress)
    }

    fn resize_srq(&self, rnic: &mut Rnic, data: &[u8]) -> Answer {
        let r: abi::ResizeSrqReq = parse(data)?;
        let max_sge = rnic.query_srq(self.session, r.srqn)?.max_sge;
        let rings = self.srq_ring(r.max_wr, max_sge, r.ctrl_addr, r.ring_addr)?;
        nothing(rnic.resize_srq(self.session, r.srqn, rings))
    }

    fn create_srq(&self, rnic: &mut Rnic, data: &[u8]) -> Answer {
        let r: abi::CreateSrqReq = parse(data)?;
        let rings = self.srq_ring(r.max_wr, r.max_sge, r.ctrl_addr, r.ring_addr)?;
        let xrc = (r.is_xrc != 0).then_some((r.xrcdn, r.cqn));
        let attr = SrqAttr { max_wr: rings.layout().rq_entries, max_sge: r.max_sge, limit: r.limit, xrc };
        let (srqn, number) = rnic.create_srq(self.session, r.pdn, attr, rings)?;
        answer(abi::CreateSrqResp { srqn, max_wr: attr.max_wr, number, reserved: 0 })
    }

    fn reg_user_mr(&self, rnic: &mut Rnic, data: &[u8]) -> Answer {
        let r: abi::RegUserMrReq = parse(data)?;
        r.start.checked_add(r.length).ok_or(Status::BadValue)?;
        let (backing, regions) = if r.length == 0 {
            (Backing::Mapped(Span::anonymous(0)), Vec::new())
        } else if r.pages_addr != 0 {
            self.gather(&self.page_list(&r)?)?
        } else if let Some(region) = self.memory.region_at(r.start).filter(|m| m.process().is_some()) {
            let inside = r.start + r.length <= region.desc.bus_addr + region.desc.size;
            let mem = region.process().filter(|_| inside).ok_or(Status::BadAddress)?;
            (Backing::Process(mem.clone(), r.start), vec![region.id])
        } else {
            self.gather(&[(r.start, r.length)])?
        };
        let made = rnic.reg_mr(self.session, r.pdn, r.access_flags, r.virt_addr, r.length, backing, regions)?;
        rnic.note_mr(self.session, made.0, r.note);
        mr_answer(made)
    }

    fn gather(&self, ranges: &[(u64, u64)]) -> Result<(Backing, Vec<u64>), Status> {
        let (span, regions) = self.memory.gather(ranges).map_err(|_| Status::BadAddress)?;
        Ok((Backing::Mapped(span), regions))
    }

    /// The ranges of an MR that is given as a list of pages; the list itself is read once.
    fn page_list(&self, r: &abi::RegUserMrReq) -> Result<Vec<(u64, u64)>, Status> {
        let first = r.start % PAGE;
        let end = first.checked_add(r.length).ok_or(Status::BadValue)?;
        if r.npages > MAX_PAGES || u64::from(r.npages) != end.div_ceil(PAGE) || r.pages_addr % 8 != 0 {
            return Err(Status::BadValue);
        }
        let table = span(&self.memory, r.pages_addr, u64::from(r.npages) * 8)?;
        let mut bytes = vec![0; r.npages as usize * 8];
        table.read(0, &mut bytes);
        let mut ranges: Vec<(u64, u64)> = Vec::new();
        for (i, raw) in bytes.chunks_exact(8).enumerate() {
            let page = u64::from_le_bytes(raw.try_into().unwrap_or_default());
            if page % PAGE != 0 {
                return Err(Status::BadValue);
            }
            let skip = if i == 0 { first } else { 0 };
            let len = (end - i as u64 * PAGE).min(PAGE) - skip;
            match ranges.last_mut() {
                Some((addr, n)) if *addr + *n == page + skip => *n += len,
                _ => ranges.push((page + skip, len)),
            }
        }
        Ok(ranges)
    }
}

/// True of commands after which a driver looks for events that are of no use any more.
fn takes_events_away(c: Command, data: &[u8]) -> bool {
    match c {
        Command::DestroyCq | Command::DestroyQp | Command::DestroySrq => true,
        Command::Cm => parse::<abi::CmReq>(data)
            .is_ok_and(|r| [abi::CmOp::Destroy as u8, abi::CmOp::Migrate as u8].contains(&r.op)),
        _ => false,
    }
}

fn handle(data: &[u8]) -> Result<u32, Status> {
    parse::<abi::HandleReq>(data).map(|r| r.handle)
}

fn span(memory: &Memory, addr: u64, len: u64) -> Result<Span, Status> {
    memory.span(addr, len).ok_or(Status::BadAddress)
}

fn mr_answer((mrn, key): (u32, u32)) -> Answer {
    answer(abi::MrResp { mrn, lkey: key, rkey: key, reserved: 0 })
}
