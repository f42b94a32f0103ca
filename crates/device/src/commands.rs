//! Control commands: bytes in, bytes out. Lengths are exact, reserved fields are ignored.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use unirdma_abi as abi;
use unirdma_abi::{Command, Nothing, Status};
use unirdma_formats::{Gid, QpType, access};
use unirdma_mem::{Bell, CqRing, QpRings, Span};
use unirdma_rnic::{Backing, CreateQp, MAX_TORN_DOWN, OpenXrcd, Rnic, SrqAttr, SrqInfo};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::memory_lookup::{Begun, Found, MemoryLookup, Outcome, PAGE, refused};
use crate::{Device, RnicGuard, lock, now_ns};

type Answer<T> = Result<T, Status>;

/// The header of a response. A response that refuses has nothing else.
pub(crate) fn head(status: Status) -> Vec<u8> {
    abi::RespHeader { status: status as u8, ..Default::default() }.as_bytes().to_vec()
}

pub(crate) fn parse<T: FromBytes>(data: &[u8]) -> Result<T, Status> {
    T::read_from_bytes(data).map_err(|_| Status::BadLength)
}

/// Runs a handler on a request, which must have exactly the length of `Req`. `room` must suffice for the response.
fn run<Req: FromBytes, Resp: IntoBytes + Immutable>(
    data: &[u8],
    room: usize,
    handler: impl FnOnce(Req) -> Answer<Resp>,
) -> Answer<Vec<u8>> {
    if room < size_of::<abi::RespHeader>() + size_of::<Resp>() {
        return Err(Status::BadLength);
    }
    let resp = handler(parse(data)?)?;
    let mut bytes = head(Status::Ok);
    bytes.extend_from_slice(resp.as_bytes());
    Ok(bytes)
}

/// The RNIC for one command. It is locked on first use, and the time under the lock is charged to the command's vRNIC.
pub(crate) struct Turn<'a> {
    device: &'a Device,
    guard: Option<RnicGuard<'a>>,
    /// Result of the search for the memory that the command names; `None` if it names no memory that needs a search.
    found: Option<Answer<Found>>,
}

impl<'a> Turn<'a> {
    pub(crate) fn new(device: &'a Device, found: Option<Answer<Found>>) -> Self {
        Turn { device, guard: None, found }
    }

    /// Locks the RNIC. Dead objects of the vRNIC count against its quotas until they are freed, so the command frees
    /// them first, in steps between which other threads get the RNIC.
    pub(crate) fn taken(&mut self) -> &mut RnicGuard<'a> {
        self.guard.get_or_insert_with(|| {
            loop {
                let mut rnic = self.device.rnic.lock();
                if !rnic.tear_down_of(self.device.identity.vrnic, MAX_TORN_DOWN) {
                    return rnic;
                }
            }
        })
    }

    /// The memory of an MR, as the search has found it.
    fn memory(&mut self) -> Answer<(Backing, Vec<u64>)> {
        match self.found.take() {
            Some(Ok(Found::Memory(backing, regions))) => Ok((backing, regions)),
            Some(Err(status)) => Err(status),
            _ => Err(Status::BadAddress),
        }
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        if let Some(rnic) = &mut self.guard {
            let took_ns = now_ns().saturating_sub(rnic.since_ns());
            rnic.charge_command(self.device.session, took_ns);
        }
    }
}

/// A handler receives either the locked RNIC or the [`Turn`] that locks it later.
trait Use<'a> {
    fn of<'b>(turn: &'b mut Turn<'a>) -> &'b mut Self;
}

impl<'a> Use<'a> for Rnic {
    fn of<'b>(turn: &'b mut Turn<'a>) -> &'b mut Self {
        turn.taken()
    }
}

impl<'a> Use<'a> for Turn<'a> {
    fn of<'b>(turn: &'b mut Turn<'a>) -> &'b mut Self {
        turn
    }
}

macro_rules! define_dispatch {
    (
        $($name:ident = $code:literal, $handler:ident($req:ident) -> $resp:ident;)*
    ) => {
        impl Device {
            fn dispatch(
                &self,
                c: Command,
                data: &[u8],
                room: usize,
                found: Option<Answer<Found>>,
            ) -> Answer<Vec<u8>> {
                let rnic = &mut Turn::new(self, found);
                match c {
                    $(Command::$name => {
                        run(data, room, |r: abi::$req| -> Answer<abi::$resp> { self.$handler(Use::of(rnic), r) })
                    })*
                }
            }
        }
    };
}

unirdma_abi::for_each_command!(define_dispatch);

/// Outcome of a request.
pub(crate) enum Reply {
    /// The response, and the command code if it is a known one.
    Now(Vec<u8>, Option<Command>),
    /// The request must be executed again, with the outcome of this search.
    After(MemoryLookup),
    /// The request must be executed again when another host has answered ([`unirdma_rnic::Core::is_asking`]).
    Asks,
}

/// Links by rate, Mbit/s: `active_speed` and `active_width` of InfiniBand (1: 1X, 2: 4X).
const LINKS: [(u64, u16, u8); 11] = [
    (2_500, 1, 1),
    (5_000, 2, 1),
    (10_000, 1, 2),
    (20_000, 2, 2),
    (25_000, 32, 1),
    (40_000, 4, 2),
    (50_000, 64, 1),
    (56_000, 16, 2),
    (100_000, 32, 2),
    (200_000, 64, 2),
    (400_000, 128, 2),
];
/// The link of a vRNIC without a limit: 100 Gbit/s, as no medium has a rate that could be told.
const NOMINAL: (u16, u8) = (32, 2);

/// The slowest link that carries the rate to which a vRNIC is limited, bits per second; 0: no limit.
fn link_of(rate_bps: u64) -> (u16, u8) {
    let carries = LINKS.iter().find(|(mbps, ..)| mbps * 1_000_000 >= rate_bps).filter(|_| rate_bps > 0);
    let fastest = if rate_bps > 0 { (128, 2) } else { NOMINAL };
    carries.map_or(fastest, |&(_, speed, width)| (speed, width))
}

impl Device {
    /// Executes one control request and returns its response, of at most `room` bytes. Nothing is executed if `room` is
    /// too small for the response. (A response that only refuses has the length of its header, whatever `room` is.) No
    /// answer of another host is waited for: what only that host knows is unreachable.
    pub fn execute(&self, request: &[u8], room: usize) -> Vec<u8> {
        match self.answer(request, room, None) {
            Reply::Now(response, _) => response,
            Reply::Asks => head(Status::Unreachable),
            Reply::After(search) => {
                let began = now_ns();
                let found = search.run();
                let outcome = Outcome { found, took_ns: now_ns().saturating_sub(began) };
                match self.answer(request, room, Some(outcome)) {
                    Reply::Now(response, _) => response,
                    Reply::After(_) | Reply::Asks => unreachable!("there is an outcome"),
                }
            }
        }
    }

    /// Executes one control request, unless it needs a long search and `outcome` is `None`.
    pub(crate) fn answer(&self, request: &[u8], room: usize, outcome: Option<Outcome>) -> Reply {
        let Ok((header, data)) = abi::ReqHeader::read_from_prefix(request) else {
            return Reply::Now(head(Status::BadLength), None);
        };
        let Some(c) = Command::from_raw(header.command) else { return Reply::Now(head(Status::Unsupported), None) };
        if self.asks_another_host(c, data) {
            return Reply::Asks;
        }
        match self.find(outcome, || self.search(c, data)) {
            Ok(found) => Reply::Now(self.perform(c, data, room, found), Some(c)),
            Err(search) => Reply::After(search),
        }
    }

    /// True if a command needs to know something of another host, which has been asked about it.
    fn asks_another_host(&self, c: Command, data: &[u8]) -> bool {
        match c {
            Command::Resolve => {
                parse::<abi::ResolveReq>(data).is_ok_and(|r| self.rnic.lock().ask_to_resolve(self.session, Gid(r.dgid)))
            }
            Command::NameGid => {
                parse::<abi::NameGidReq>(data).is_ok_and(|r| self.rnic.lock().ask_to_name(self.session, Gid(r.real)))
            }
            _ => false,
        }
    }

    /// Finds the memory that a command names: takes it from `outcome` if a background lookup has found it, else
    /// searches now. `None` if no search is needed.
    ///
    /// # Errors
    /// The search itself, if it is a long one.
    pub(crate) fn find(
        &self,
        outcome: Option<Outcome>,
        search: impl FnOnce() -> Option<Answer<MemoryLookup>>,
    ) -> Result<Option<Answer<Found>>, MemoryLookup> {
        if let Some(outcome) = outcome {
            return Ok(Some(self.take_outcome(outcome)));
        }
        match search().map(|search| search.and_then(MemoryLookup::begin)) {
            Some(Ok(Begun::Long(search))) => Err(search),
            Some(Ok(Begun::Found(found))) => Ok(Some(Ok(found))),
            Some(Err(status)) => Ok(Some(Err(status))),
            None => Ok(None),
        }
    }

    /// The result of a background lookup, if the memory regions that it found still exist. The time that it took is
    /// charged to the vRNIC.
    fn take_outcome(&self, outcome: Outcome) -> Answer<Found> {
        self.rnic.lock().charge_command(self.session, outcome.took_ns);
        self.lookup_ns.fetch_add(outcome.took_ns, Ordering::Relaxed);
        if let Ok(Found::Memory(_, regions)) = &outcome.found {
            let there: BTreeSet<u64> = self.memory.regions().iter().map(|r| r.id).collect();
            if !regions.iter().all(|id| there.contains(id)) {
                return Err(Status::BadAddress);
            }
        }
        outcome.found
    }

    /// The search for the memory that a command names; `None` if it names no memory in mapped regions.
    fn search(&self, c: Command, data: &[u8]) -> Option<Answer<MemoryLookup>> {
        let runs =
            |addr, count, length| MemoryLookup::runs(&self.memory, (addr, count, length), |at, n| self.span(at, n));
        match c {
            Command::RegUserMr => self.search_user_mr(&parse(data).ok()?),
            Command::RegMrRuns => {
                let r: abi::RegMrRunsReq = parse(data).ok()?;
                Some(runs(r.runs_addr, r.num_runs, r.length))
            }
            Command::ExtendMr => {
                let r: abi::ExtendMrReq = parse(data).ok()?;
                Some(runs(r.runs_addr, r.num_runs, r.length).map(MemoryLookup::for_part))
            }
            Command::MapRuns => {
                let r: abi::MapRunsReq = parse(data).ok()?;
                Some(runs(r.runs_addr, r.num_runs, r.length).map(MemoryLookup::for_window))
            }
            _ => None,
        }
    }

    /// The search for the memory of REG_USER_MR.
    pub(crate) fn search_user_mr(&self, r: &abi::RegUserMrReq) -> Option<Answer<MemoryLookup>> {
        let is_process = || self.memory.region_at(r.start).is_some_and(|m| m.process().is_some());
        if r.length == 0 || r.start.checked_add(r.length).is_none() {
            None
        } else if r.pages_addr != 0 {
            Some(MemoryLookup::pages(&self.memory, r, |addr, len| self.span(addr, len)))
        } else {
            (!is_process()).then(|| Ok(MemoryLookup::range(&self.memory, r.start, r.length)))
        }
    }

    fn perform(&self, c: Command, data: &[u8], room: usize, found: Option<Answer<Found>>) -> Vec<u8> {
        // WQEs that were posted before the command, and use the object that it destroys, are executed first.
        match (c, parse::<abi::HandleReq>(data)) {
            (Command::DestroyQp, Ok(qp)) => self.pollers.catch_up(self.session, Some(qp.handle)),
            (Command::DestroyAh, Ok(_)) => self.pollers.catch_up(self.session, None),
            _ => {}
        }
        match self.dispatch(c, data, room, found) {
            Ok(bytes) => {
                // After an object is destroyed, the driver can be sure that all of its events were delivered.
                if takes_events_away(c, data) {
                    self.pollers.settle();
                }
                if c == Command::NewSession {
                    self.events.forget_waiting();
                }
                bytes
            }
            Err(status) => {
                tracing::debug!(vrnic = %self.identity.name, command = ?c, ?status, "control command refused");
                head(status)
            }
        }
    }

    fn query_device(&self, rnic: &mut Rnic, _: Nothing) -> Answer<abi::QueryDeviceResp> {
        let c = self.identity.shown_config();
        let paced = [QpType::Rc, QpType::Uc, QpType::Ud, QpType::XrcSend];
        let mut resp = abi::QueryDeviceResp {
            config: c,
            // A window counts as an MR.
            max_mw: c.max_mr,
            max_sge_rd: c.max_sge,
            max_res_rd_atom: c.max_qp_rd_atom.saturating_mul(c.max_qp),
            max_qp_init_rd_atom: c.max_qp_rd_atom,
            max_srq_wr: c.max_qp_wr,
            max_srq_sge: c.max_sge,
            max_total_mcast_qp_attach: c.max_mcast_grp.saturating_mul(c.max_mcast_qp_attach),
            rate_limit_qp_types: paced.iter().map(|t| 1 << *t as u32).sum(),
            max_cq_count: u16::MAX,
            max_cq_period_us: u16::MAX,
            max_fast_reg_pages: abi::MAX_FAST_PAGES,
            way: if rnic.vf_use(self.identity.vrnic).asks { abi::WAY_VF } else { abi::WAY_SOFT },
            ..Default::default()
        };
        let put = |dst: &mut [u8; 32], text: &str| {
            let n = text.len().min(31);
            dst[..n].copy_from_slice(&text.as_bytes()[..n]);
        };
        put(&mut resp.fw_ver, env!("CARGO_PKG_VERSION"));
        put(&mut resp.name, &self.identity.name);
        Ok(resp)
    }

    fn query_counters(&self, rnic: &mut Rnic, _: Nothing) -> Answer<abi::QueryCountersResp> {
        let c = rnic.counters(self.identity.vrnic).unwrap_or_default();
        let w = c.wire;
        Ok(abi::QueryCountersResp {
            sent_wrs: c.sent_wrs,
            sent_bytes: c.sent_bytes,
            received_wrs: c.received_wrs,
            received_bytes: c.received_bytes,
            rnr_waits: c.rnr_waits,
            timeouts: c.timeouts,
            errors: c.errors,
            dropped: c.dropped,
            qkey_violations: c.qkey_violations,
            sent_pkts: w.sent_pkts,
            send_err: w.send_err,
            link_downed: w.link_downed,
            rcvd_pkts: w.rcvd_pkts,
            retransmitted_pkts: w.retransmitted_pkts,
            duplicate_request: w.duplicate_request,
            out_of_seq_request: w.out_of_seq_request,
            ack_deferred: w.ack_deferred,
            send_rnr_err: w.send_rnr_err,
            rcvd_rnr_err: w.rcvd_rnr_err,
            rcvd_seq_err: w.rcvd_seq_err,
            implied_nak: w.implied_nak,
            completer_retry_err: w.completer_retry_err,
            rdma_sends: w.rdma_sends,
            rdma_recvs: w.rdma_recvs,
            np_ecn_marked_roce_packets: w.np_ecn_marked_roce_packets,
            np_cnp_sent: w.np_cnp_sent,
            rp_cnp_handled: w.rp_cnp_handled,
            retry_exceeded_err: w.retry_exceeded_err,
            retry_rnr_exceeded_err: w.retry_rnr_exceeded_err,
            reserved: Default::default(),
        })
    }

    /// The clock of completions, which a guest cannot read otherwise.
    fn query_clock(&self, _: &mut Turn<'_>, _: Nothing) -> Answer<abi::QueryClockResp> {
        Ok(abi::QueryClockResp { now_ns: now_ns() })
    }

    pub(crate) fn query_port(&self, rnic: &mut Rnic, r: abi::QueryPortReq) -> Answer<abi::QueryPortResp> {
        if r.port != 1 {
            return Err(Status::BadValue);
        }
        let mtu = self.identity.active_mtu;
        let counters = rnic.counters(self.identity.vrnic).unwrap_or_default();
        let count = |n: u64| u32::try_from(n).unwrap_or(u32::MAX);
        let (active_speed, active_width) = link_of(rnic.share(self.identity.vrnic).rate_bps);
        // ACTIVE and LinkUp, or DOWN and Disabled.
        let (state, phys_state) = if rnic.is_up(self.identity.vrnic) { (4, 5) } else { (1, 3) };
        Ok(abi::QueryPortResp {
            state,
            max_mtu: 5,
            active_mtu: mtu,
            phys_state,
            phys_mtu: 128 << mtu,
            gid_tbl_len: rnic.gid_table_len(self.identity.vrnic) as u32,
            port_cap_flags: 1 << 16 | 1 << 26,
            max_msg_sz: unirdma_formats::MAX_MSG_BYTES as u32,
            bad_pkey_cntr: count(counters.pkey_violations),
            qkey_viol_cntr: count(counters.qkey_violations),
            pkey_tbl_len: 1,
            active_speed,
            active_width,
            link_layer: 2,
            ..Default::default()
        })
    }

    fn query_pkey(&self, _: &mut Rnic, r: abi::QueryPkeyReq) -> Answer<abi::QueryPkeyResp> {
        if r.port != 1 || r.index != 0 {
            return Err(Status::BadValue);
        }
        Ok(abi::QueryPkeyResp { pkey: 0xffff, ..Default::default() })
    }

    fn query_gid(&self, rnic: &mut Rnic, r: abi::QueryGidReq) -> Answer<abi::QueryGidResp> {
        let gid = rnic.gid_at(self.identity.vrnic, r.index as usize).filter(|_| r.port == 1);
        Ok(abi::QueryGidResp { gid: gid.ok_or(Status::BadValue)?.0, gid_type: 2, reserved: 0 })
    }

    /// GIDs come from the virtual layer; a driver may only name what it was given (R26).
    fn add_gid(&self, rnic: &mut Rnic, r: abi::AddGidReq) -> Answer<Nothing> {
        let gids = rnic.gids(self.identity.vrnic);
        let granted = gids.get(usize::from(r.index)).is_some_and(|g| g.0 == r.gid && !g.is_zero());
        if granted && r.port_num == 1 { Ok(Nothing {}) } else { Err(Status::Denied) }
    }

    fn del_gid(&self, _: &mut Rnic, _: abi::DelGidReq) -> Answer<Nothing> {
        Err(Status::Denied)
    }

    fn set_doorbell(&self, rnic: &mut Rnic, r: abi::SetDoorbellReq) -> Answer<Nothing> {
        done(rnic.set_doorbell(self.session, self.bell(r.addr)?))
    }

    fn set_stage(&self, rnic: &mut Rnic, r: abi::SetStageReq) -> Answer<Nothing> {
        if r.length > abi::MAX_STAGE {
            return Err(Status::BadValue);
        }
        done(rnic.set_stage(self.session, self.span(r.addr, r.length)?))
    }

    /// The driver begins anew. The response is delayed while jobs still access the driver's memory.
    fn new_session(&self, rnic: &mut Turn<'_>, r: abi::NewSessionReq) -> Answer<abi::NewSessionResp> {
        if r.features & !self.identity.config.features != 0 {
            return Err(Status::BadValue);
        }
        self.quiesce();
        self.features.store(r.features, Ordering::Relaxed);
        let rnic = rnic.taken();
        rnic.renew_session(self.session);
        rnic.drop_later(self.forget_ranges());
        Ok(abi::NewSessionResp { generation: self.generation(), reserved: 0, features: r.features })
    }

    /// Refuses a command for a feature that the driver has not said to use.
    fn needs(&self, feature: u64) -> Answer<()> {
        if self.features.load(Ordering::Relaxed) & feature != 0 { Ok(()) } else { Err(Status::Unsupported) }
    }

    fn create_doorbell(&self, rnic: &mut Rnic, r: abi::SetDoorbellReq) -> Answer<abi::HandleResp> {
        named(rnic.create_doorbell(self.session, self.bell(r.addr)?))
    }

    fn destroy_doorbell(&self, rnic: &mut Rnic, r: abi::HandleReq) -> Answer<Nothing> {
        done(rnic.destroy_doorbell(self.session, r.handle))
    }

    /// The doorbell page at a bus address.
    fn bell(&self, addr: u64) -> Answer<Bell> {
        if addr % PAGE != 0 {
            return Err(Status::BadValue);
        }
        Bell::new(self.span(addr, PAGE)?).ok_or(Status::BadAddress)
    }

    fn create_pd(&self, rnic: &mut Rnic, _: Nothing) -> Answer<abi::HandleResp> {
        named(rnic.create_pd(self.session))
    }

    fn destroy_pd(&self, rnic: &mut Turn<'_>, r: abi::HandleReq) -> Answer<Nothing> {
        while self.rnic.lock().remove_nulls(self.session, r.handle, MAX_TORN_DOWN) {}
        done(rnic.taken().destroy_pd(self.session, r.handle))
    }

    fn modify_cq(&self, rnic: &mut Rnic, r: abi::ModifyCqReq) -> Answer<Nothing> {
        done(rnic.modify_cq(self.session, r.cqn, r.count, r.period_us))
    }

    fn destroy_cq(&self, rnic: &mut Rnic, r: abi::HandleReq) -> Answer<Nothing> {
        done(rnic.destroy_cq(self.session, r.handle))
    }

    fn req_notify_cq(&self, rnic: &mut Rnic, r: abi::ReqNotifyReq) -> Answer<Nothing> {
        done(rnic.req_notify_cq(self.session, r.cqn, r.flags))
    }

    /// An MR for all memory of this session, and of no other one (X14).
    pub(crate) fn get_dma_mr(&self, rnic: &mut Rnic, r: abi::GetDmaMrReq) -> Answer<abi::MrResp> {
        mr(rnic.reg_mr(self.session, r.pdn, r.access_flags, 0, u64::MAX, (Backing::Session, Vec::new())))
    }

    fn alloc_null_mr(&self, rnic: &mut Rnic, r: abi::HandleReq) -> Answer<abi::MrResp> {
        let (pd, flags) = (r.handle, access::LOCAL_WRITE);
        mr(rnic.reg_mr(self.session, pd, flags, 0, u64::MAX, (Backing::Null, Vec::new())))
    }

    fn rereg_mr(&self, rnic: &mut Rnic, r: abi::ReregMrReq) -> Answer<Nothing> {
        done(rnic.rereg_mr(self.session, r.mrn, r.by))
    }

    fn dereg_mr(&self, rnic: &mut Rnic, r: abi::HandleReq) -> Answer<Nothing> {
        done(rnic.dereg_mr(self.session, r.handle))
    }

    fn query_mr(&self, rnic: &mut Rnic, r: abi::HandleReq) -> Answer<abi::QueryMrResp> {
        let served = rnic.query_mr(self.session, r.handle)?;
        Ok(abi::QueryMrResp { accesses: served.accesses(), bytes: served.bytes() })
    }

    fn create_mr(&self, rnic: &mut Rnic, r: abi::CreateMrReq) -> Answer<abi::MrResp> {
        self.needs(abi::FEATURE_FAST_REG)?;
        if r.max_num_sg > abi::MAX_FAST_PAGES {
            return Err(Status::BadValue);
        }
        let hold = Arc::new(self.memory.hold_list(r.max_num_sg).map_err(refused)?);
        mr(rnic.create_mr(self.session, r.pdn, r.access_flags, r.max_num_sg, hold))
    }

    /// Not offered: a REG_MR work request carries its page list, so no command is needed.
    fn map_mr_sg(&self, _: &mut Rnic, _: abi::MapMrSgReq) -> Answer<abi::MapMrSgResp> {
        Err(Status::Unsupported)
    }

    fn alloc_mw(&self, rnic: &mut Rnic, r: abi::AllocMwReq) -> Answer<abi::MrResp> {
        if r.mw_type == 2 {
            self.needs(abi::FEATURE_INVALIDATE)?;
        }
        mr(rnic.alloc_mw(self.session, r.pdn, r.mw_type))
    }

    fn dealloc_mw(&self, rnic: &mut Rnic, r: abi::HandleReq) -> Answer<Nothing> {
        done(rnic.dealloc_mw(self.session, r.handle))
    }

    fn open_qp(&self, rnic: &mut Rnic, r: abi::OpenQpReq) -> Answer<Nothing> {
        done(rnic.open_qp(self.session, r.xrcdn, r.qpn))
    }

    fn modify_qp(&self, rnic: &mut Rnic, r: abi::ModifyQpReq) -> Answer<Nothing> {
        done(rnic.modify_qp(self.session, r.qpn, r.attr_mask, &r.attr))
    }

    fn query_qp(&self, rnic: &mut Rnic, r: abi::QueryQpReq) -> Answer<abi::QueryQpResp> {
        Ok(abi::QueryQpResp { attr: rnic.query_qp(self.session, r.qpn)? })
    }

    fn destroy_qp(&self, rnic: &mut Rnic, r: abi::HandleReq) -> Answer<Nothing> {
        done(rnic.destroy_qp(self.session, r.handle))
    }

    fn create_xrcd(&self, rnic: &mut Rnic, r: abi::CreateXrcdReq) -> Answer<abi::HandleResp> {
        let flag = |bit: u32| r.flags & bit != 0;
        let open = OpenXrcd {
            key: flag(abi::XRCD_SHARED).then_some((r.dev, r.ino)),
            create: flag(abi::XRCD_CREATE),
            exclusive: flag(abi::XRCD_EXCLUSIVE),
        };
        named(rnic.create_xrcd(self.session, open))
    }

    fn destroy_xrcd(&self, rnic: &mut Rnic, r: abi::HandleReq) -> Answer<Nothing> {
        done(rnic.destroy_xrcd(self.session, r.handle))
    }

    fn create_ah(&self, rnic: &mut Rnic, r: abi::CreateAhReq) -> Answer<abi::HandleResp> {
        named(rnic.create_ah(self.session, r.pdn, &r.attr))
    }

    fn destroy_ah(&self, rnic: &mut Rnic, r: abi::HandleReq) -> Answer<Nothing> {
        done(rnic.destroy_ah(self.session, r.handle))
    }

    fn destroy_srq(&self, rnic: &mut Rnic, r: abi::HandleReq) -> Answer<Nothing> {
        done(rnic.destroy_srq(self.session, r.handle))
    }

    fn modify_srq(&self, rnic: &mut Rnic, r: abi::ModifySrqReq) -> Answer<Nothing> {
        done(rnic.modify_srq(self.session, r.srqn, r.limit))
    }

    fn query_srq(&self, rnic: &mut Rnic, r: abi::HandleReq) -> Answer<abi::QuerySrqResp> {
        let SrqInfo { max_wr, max_sge, limit } = rnic.query_srq(self.session, r.handle)?;
        Ok(abi::QuerySrqResp { max_wr, max_sge, limit, reserved: 0 })
    }

    fn cm(&self, rnic: &mut Rnic, r: abi::CmReq) -> Answer<abi::CmResp> {
        rnic.cm(self.session, &r)
    }

    fn cm_qp_attr(&self, rnic: &mut Rnic, r: abi::CmQpAttrReq) -> Answer<abi::CmQpAttrResp> {
        let (attr_mask, attr) = rnic.cm_qp_attr(self.session, r.id, r.state)?;
        Ok(abi::CmQpAttrResp { attr_mask, reserved: 0, attr })
    }

    fn cm_event(&self, rnic: &mut Rnic, r: abi::CmEventReq) -> Answer<abi::CmEvent> {
        rnic.cm_event(self.session, r.queue)
    }

    fn resolve(&self, rnic: &mut Rnic, r: abi::ResolveReq) -> Answer<abi::ResolveResp> {
        let typ = QpType::from_raw(r.qp_type).ok_or(Status::BadValue)?;
        let path = rnic.resolve_by_vf(self.session, r.sgid_index, Gid(r.dgid), typ)?;
        Ok(abi::ResolveResp { dgid: path.gid, max_mtu: path.mtu.into(), reserved: 0 })
    }

    fn name_gid(&self, rnic: &mut Rnic, r: abi::NameGidReq) -> Answer<abi::NameGidResp> {
        Ok(abi::NameGidResp { gid: rnic.name_of_vf(self.session, Gid(r.real))?.0 })
    }

    fn attach_mcast(&self, rnic: &mut Rnic, r: abi::McastReq) -> Answer<Nothing> {
        done(rnic.attach_mcast(self.session, r.qpn, Gid(r.gid)))
    }

    fn detach_mcast(&self, rnic: &mut Rnic, r: abi::McastReq) -> Answer<Nothing> {
        done(rnic.detach_mcast(self.session, r.qpn, Gid(r.gid)))
    }

    /// Checks the memory of a CQ's rings.
    fn cq_ring(&self, cqe: u32, entries: u32, ring: u64, ctrl: u64) -> Result<CqRing, Status> {
        if cqe == 0 || cqe > abi::MAX_CQE || entries < cqe || entries > (abi::MAX_CQE + 1).next_power_of_two() {
            return Err(Status::BadValue);
        }
        let ring = self.span(ring, u64::from(entries) * size_of::<abi::Cqe>() as u64)?;
        let ctrl = self.span(ctrl, size_of::<abi::CqCtrl>() as u64)?;
        CqRing::new(ctrl, ring, entries).ok_or(Status::BadValue)
    }

    fn resize_cq(&self, rnic: &mut Rnic, r: abi::ResizeCqReq) -> Answer<Nothing> {
        let ring = self.cq_ring(r.cqe, r.entries, r.ring_addr, r.ctrl_addr)?;
        done(rnic.resize_cq(self.session, r.cqn, ring))
    }

    fn create_cq(&self, rnic: &mut Rnic, r: abi::CreateCqReq) -> Answer<abi::HandleResp> {
        let comp_queue = match r.comp_queue {
            abi::NO_COMP_QUEUE => None,
            q if q < abi::MAX_CHANNELS => Some(q as u16),
            _ => return Err(Status::BadValue),
        };
        let ring = self.cq_ring(r.cqe, r.entries, r.ring_addr, r.ctrl_addr)?;
        named(rnic.create_cq(self.session, ring, comp_queue))
    }

    /// Checks the memory of a QP's rings.
    fn qp_rings(&self, cap: &abi::QpCap, ctrl: u64, sq: u64, rq: u64) -> Result<QpRings, Status> {
        let layout = abi::QpLayout::of(cap).ok_or(Status::BadValue)?;
        let ctrl = self.span(ctrl, size_of::<abi::QpCtrl>() as u64)?;
        let sq = self.span(sq, layout.sq_bytes() as u64)?;
        let rq = self.span(rq, layout.rq_bytes() as u64)?;
        QpRings::new(ctrl, sq, rq, layout).ok_or(Status::BadAddress)
    }

    fn resize_qp(&self, rnic: &mut Rnic, r: abi::ResizeQpReq) -> Answer<Nothing> {
        let cap = rnic.query_qp(self.session, r.qpn)?.cap;
        let cap = abi::QpCap { max_send_wr: r.max_send_wr, max_recv_wr: r.max_recv_wr, ..cap };
        let rings = self.qp_rings(&cap, r.ctrl_addr, r.sq_addr, r.rq_addr)?;
        done(rnic.resize_qp(self.session, r.qpn, rings))
    }

    fn create_qp(&self, rnic: &mut Rnic, r: abi::CreateQpReq) -> Answer<abi::CreateQpResp> {
        if r.qp_type == abi::QP_TYPE_GSI {
            self.needs(abi::FEATURE_GSI)?;
        }
        let rings = self.qp_rings(&r.cap, r.ctrl_addr, r.sq_addr, r.rq_addr)?;
        let layout = *rings.layout();
        // The real capacity of the rings (R84p).
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
            door: r.doorbell,
            sig_all: r.sq_sig_all != 0,
            cap,
            rings,
        };
        let (qpn, db_slot) = rnic.create_qp(self.session, r.qp_type, create)?;
        Ok(abi::CreateQpResp { qpn, db_slot, cap, reserved: 0 })
    }

    /// Checks the memory of an SRQ's ring.
    fn srq_ring(&self, max_wr: u32, max_sge: u32, ctrl: u64, ring: u64) -> Result<QpRings, Status> {
        let cap = abi::QpCap { max_recv_wr: max_wr, max_recv_sge: max_sge, ..Default::default() };
        let layout = abi::QpLayout::of(&cap).ok_or(Status::BadValue)?;
        let ctrl = self.span(ctrl, size_of::<abi::QpCtrl>() as u64)?;
        let ring = self.span(ring, layout.rq_bytes() as u64)?;
        QpRings::receive_only(ctrl, ring, layout).ok_or(Status::BadAddress)
    }

    fn resize_srq(&self, rnic: &mut Rnic, r: abi::ResizeSrqReq) -> Answer<Nothing> {
        let max_sge = rnic.query_srq(self.session, r.srqn)?.max_sge;
        let rings = self.srq_ring(r.max_wr, max_sge, r.ctrl_addr, r.ring_addr)?;
        done(rnic.resize_srq(self.session, r.srqn, rings))
    }

    fn create_srq(&self, rnic: &mut Rnic, r: abi::CreateSrqReq) -> Answer<abi::CreateSrqResp> {
        let rings = self.srq_ring(r.max_wr, r.max_sge, r.ctrl_addr, r.ring_addr)?;
        let xrc = (r.is_xrc != 0).then_some((r.xrcdn, r.cqn));
        let attr = SrqAttr { max_wr: rings.layout().rq_entries, max_sge: r.max_sge, limit: r.limit, xrc };
        let (srqn, number) = rnic.create_srq(self.session, r.pdn, attr, rings)?;
        Ok(abi::CreateSrqResp { srqn, max_wr: attr.max_wr, number, reserved: 0 })
    }

    /// The memory was searched for before the RNIC is locked, because the search takes longer.
    pub(crate) fn reg_user_mr(&self, rnic: &mut Turn<'_>, r: abi::RegUserMrReq) -> Answer<abi::MrResp> {
        r.start.checked_add(r.length).ok_or(Status::BadValue)?;
        let memory = if r.length == 0 {
            (Backing::Mapped(Span::anonymous(0)), Vec::new())
        } else if rnic.found.is_some() {
            rnic.memory()?
        } else {
            let region = self.memory.region_at(r.start).ok_or(Status::BadAddress)?;
            let inside = r.start + r.length <= region.desc.bus_addr + region.desc.size;
            let mem = region.process().filter(|_| inside).ok_or(Status::BadAddress)?;
            (Backing::Process(mem.clone(), r.start), vec![region.id])
        };
        let rnic = rnic.taken();
        let made = rnic.reg_mr(self.session, r.pdn, r.access_flags, r.virt_addr, r.length, memory)?;
        rnic.note_mr(self.session, made.0, r.note);
        mr(Ok(made))
    }

    fn reg_mr_runs(&self, rnic: &mut Turn<'_>, r: abi::RegMrRunsReq) -> Answer<abi::MrResp> {
        let memory = rnic.memory()?;
        let rnic = rnic.taken();
        let made = rnic.reg_mr(self.session, r.pdn, r.access_flags, r.virt_addr, r.length, memory)?;
        rnic.note_mr(self.session, made.0, r.note);
        mr(Ok(made))
    }

    fn extend_mr(&self, rnic: &mut Turn<'_>, r: abi::ExtendMrReq) -> Answer<Nothing> {
        let memory = rnic.memory()?;
        done(rnic.taken().extend_mr(self.session, r.mrn, r.length, memory))
    }

    fn map_runs(&self, rnic: &mut Turn<'_>, r: abi::MapRunsReq) -> Answer<abi::MapRunsResp> {
        let queues = rnic.taken().queues_of(self.session);
        let handle = rnic.taken().new_number(self.session)?;
        let mapped = &mut *lock(&self.mapped);
        // If the command is refused, the span that was found is dropped after the RNIC is unlocked.
        if !mapped.has_room(r.length, queues) {
            return Err(Status::Exhausted);
        }
        let Some(Found::Window(span)) = rnic.found.take().transpose()? else { return Err(Status::BadAddress) };
        Ok(abi::MapRunsResp { handle, reserved: 0, addr: mapped.add(handle, span) })
    }

    fn unmap_runs(&self, _: &mut Turn<'_>, r: abi::HandleReq) -> Answer<Nothing> {
        if lock(&self.mapped).remove(r.handle) { Ok(Nothing {}) } else { Err(Status::BadHandle) }
    }

    /// Memory at a bus address of the session, or in a range of MAP_RUNS.
    fn span(&self, addr: u64, len: u64) -> Answer<Span> {
        let span = match addr & abi::MAPPED_RUNS {
            0 => self.memory.span(addr, len),
            _ => lock(&self.mapped).span(addr, len),
        };
        span.ok_or(Status::BadAddress)
    }
}

/// True for commands after which the RNIC must not access some memory that it could access before.
pub(crate) fn takes_memory_away(c: Command) -> bool {
    matches!(
        c,
        Command::DestroyQp
            | Command::ModifyQp
            | Command::DeregMr
            | Command::ReregMr
            | Command::DeallocMw
            | Command::NewSession
    )
}

/// True for commands after which a driver discards events of the destroyed object that are still queued.
fn takes_events_away(c: Command, data: &[u8]) -> bool {
    match c {
        Command::DestroyCq | Command::DestroyQp | Command::DestroySrq | Command::NewSession => true,
        Command::Cm => parse::<abi::CmReq>(data)
            .is_ok_and(|r| [abi::CmOp::Destroy as u8, abi::CmOp::Migrate as u8].contains(&r.op)),
        _ => false,
    }
}

fn done(r: Result<(), Status>) -> Answer<Nothing> {
    r.map(|()| Nothing {})
}

fn named(handle: Result<u32, Status>) -> Answer<abi::HandleResp> {
    handle.map(|handle| abi::HandleResp { handle, reserved: 0 })
}

fn mr(made: Result<(u32, u32), Status>) -> Answer<abi::MrResp> {
    made.map(|(mrn, key)| abi::MrResp { mrn, lkey: key, rkey: key, reserved: 0 })
}
