//! Control commands (section 6 of the specification): one request and one response structure each.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

macro_rules! wire {
    ($($(#[$doc:meta])* $name:ident = $size:literal { $($(#[$fdoc:meta])* $f:ident: $t:ty),* $(,)? })*) => {
        $(
            $(#[$doc])*
            #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
            #[repr(C)]
            #[allow(missing_docs)]
            pub struct $name { $($(#[$fdoc])* pub $f: $t),* }
            const _: () = assert!(size_of::<$name>() == $size);
        )*
    };
}

pub(crate) use wire;

/// No bytes: a request or a response without data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Nothing {}

/// The table of all control commands. Calls the macro `$then` with a row for each: name, code, handler (a method of the
/// device), request and response. Codes 1 to 18 are the same as in seed 002.
#[macro_export]
macro_rules! for_each_command {
    ($then:ident) => {
        $then! {
            QueryPort = 1, query_port(QueryPortReq) -> QueryPortResp;
            CreateCq = 2, create_cq(CreateCqReq) -> HandleResp;
            DestroyCq = 3, destroy_cq(HandleReq) -> Nothing;
            CreatePd = 4, create_pd(Nothing) -> HandleResp;
            DestroyPd = 5, destroy_pd(HandleReq) -> Nothing;
            GetDmaMr = 6, get_dma_mr(GetDmaMrReq) -> MrResp;
            CreateMr = 7, create_mr(CreateMrReq) -> MrResp;
            MapMrSg = 8, map_mr_sg(MapMrSgReq) -> MapMrSgResp;
            RegUserMr = 9, reg_user_mr(RegUserMrReq) -> MrResp;
            DeregMr = 10, dereg_mr(HandleReq) -> Nothing;
            CreateQp = 11, create_qp(CreateQpReq) -> CreateQpResp;
            ModifyQp = 12, modify_qp(ModifyQpReq) -> Nothing;
            QueryQp = 13, query_qp(QueryQpReq) -> QueryQpResp;
            DestroyQp = 14, destroy_qp(HandleReq) -> Nothing;
            QueryPkey = 15, query_pkey(QueryPkeyReq) -> QueryPkeyResp;
            AddGid = 16, add_gid(AddGidReq) -> Nothing;
            DelGid = 17, del_gid(DelGidReq) -> Nothing;
            ReqNotifyCq = 18, req_notify_cq(ReqNotifyReq) -> Nothing;
            QueryDevice = 19, query_device(Nothing) -> QueryDeviceResp;
            QueryGid = 20, query_gid(QueryGidReq) -> QueryGidResp;
            SetDoorbell = 21, set_doorbell(SetDoorbellReq) -> Nothing;
            CreateAh = 22, create_ah(CreateAhReq) -> HandleResp;
            DestroyAh = 23, destroy_ah(HandleReq) -> Nothing;
            CreateSrq = 24, create_srq(CreateSrqReq) -> CreateSrqResp;
            DestroySrq = 25, destroy_srq(HandleReq) -> Nothing;
            ModifySrq = 26, modify_srq(ModifySrqReq) -> Nothing;
            QuerySrq = 27, query_srq(HandleReq) -> QuerySrqResp;
            ReregMr = 28, rereg_mr(ReregMrReq) -> Nothing;
            Cm = 29, cm(CmReq) -> CmResp;
            CmQpAttr = 30, cm_qp_attr(CmQpAttrReq) -> CmQpAttrResp;
            CmEvent = 31, cm_event(CmEventReq) -> CmEvent;
            AttachMcast = 32, attach_mcast(McastReq) -> Nothing;
            DetachMcast = 33, detach_mcast(McastReq) -> Nothing;
            AllocMw = 34, alloc_mw(AllocMwReq) -> MrResp;
            DeallocMw = 35, dealloc_mw(HandleReq) -> Nothing;
            ResizeCq = 36, resize_cq(ResizeCqReq) -> Nothing;
            CreateXrcd = 37, create_xrcd(CreateXrcdReq) -> HandleResp;
            DestroyXrcd = 38, destroy_xrcd(HandleReq) -> Nothing;
            ResizeSrq = 39, resize_srq(ResizeSrqReq) -> Nothing;
            ModifyCq = 40, modify_cq(ModifyCqReq) -> Nothing;
            AllocNullMr = 41, alloc_null_mr(HandleReq) -> MrResp;
            ResizeQp = 42, resize_qp(ResizeQpReq) -> Nothing;
            OpenQp = 43, open_qp(OpenQpReq) -> Nothing;
            SetStage = 44, set_stage(SetStageReq) -> Nothing;
            NewSession = 45, new_session(NewSessionReq) -> NewSessionResp;
            CreateDoorbell = 46, create_doorbell(SetDoorbellReq) -> HandleResp;
            DestroyDoorbell = 47, destroy_doorbell(HandleReq) -> Nothing;
            RegMrRuns = 48, reg_mr_runs(RegMrRunsReq) -> MrResp;
            ExtendMr = 49, extend_mr(ExtendMrReq) -> Nothing;
            MapRuns = 50, map_runs(MapRunsReq) -> MapRunsResp;
            UnmapRuns = 51, unmap_runs(HandleReq) -> Nothing;
            QueryCounters = 52, query_counters(Nothing) -> QueryCountersResp;
            QueryClock = 53, query_clock(Nothing) -> QueryClockResp;
            QueryMr = 54, query_mr(HandleReq) -> QueryMrResp;
            Resolve = 55, resolve(ResolveReq) -> ResolveResp;
            NameGid = 56, name_gid(NameGidReq) -> NameGidResp;
        }
    };
}

macro_rules! define_commands {
    (
        $($name:ident = $code:literal, $handler:ident($req:ident) -> $resp:ident;)*
    ) => {
        /// Command codes.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u8)]
        #[allow(missing_docs)]
        pub enum Command { $($name = $code,)* }

        impl Command {
            /// All commands, in the order of the table.
            pub const ALL: &[Command] = &[$(Command::$name,)*];

            /// The command of a raw code.
            pub fn from_raw(raw: u8) -> Option<Self> {
                Command::ALL.iter().copied().find(|c| *c as u8 == raw)
            }
        }
    };
}

for_each_command!(define_commands);

macro_rules! define_statuses {
    ($($(#[$doc:meta])* $name:ident = $code:literal, $errno:literal;)*) => {
        /// Response codes (erratum R84a): what went wrong.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u8)]
        pub enum Status { $($(#[$doc])* $name = $code,)* }

        impl Status {
            /// All response codes, in the order of their numbers.
            pub const ALL: &[Status] = &[$(Status::$name,)*];

            /// The errno that a verbs library returns for a raw code: a number of Linux, EIO for an unknown code.
            pub fn errno(raw: u8) -> i32 {
                match raw {
                    $($code => $errno,)*
                    _ => 5,
                }
            }
        }
    };
}

define_statuses! {
    /// Done.
    Ok = 0, 0;
    /// The command code is unknown, or the function is not offered. `EOPNOTSUPP`
    Unsupported = 1, 95;
    /// The request or the response buffer has the wrong length. `EINVAL`
    BadLength = 2, 22;
    /// No such object in this session. `ENOENT`
    BadHandle = 3, 2;
    /// A value is out of range. `EINVAL`
    BadValue = 4, 22;
    /// A quota or a limit of the device is reached. `ENOMEM`
    Exhausted = 5, 12;
    /// Other objects still use this one. `EBUSY`
    Busy = 6, 16;
    /// An address range is not covered by the session's memory. `EFAULT`
    BadAddress = 7, 14;
    /// The state of the object does not allow this. `EINVAL`
    BadState = 8, 22;
    /// No vRNIC of this group has the destination GID. `EHOSTUNREACH`
    Unreachable = 9, 113;
    /// Only the virtual layer may do this. `EPERM`
    Denied = 10, 1;
    /// Another identifier has this address. `EADDRINUSE`
    AddressInUse = 11, 98;
    /// No GID of the vRNIC is this address. `ENODEV`
    NoDevice = 12, 19;
}

/// Longest request or response, header included, in bytes.
pub const MAX_COMMAND_BYTES: usize = 1024;

wire! {
    /// Starts every request.
    ReqHeader = 8 { command: u8, reserved: [u8; 7] }
    /// Starts every response.
    RespHeader = 8 { status: u8, reserved: [u8; 7] }

    QueryPortReq = 8 { port: u32, reserved: u32 }
    QueryPortResp = 64 {
        state: u8, max_mtu: u8, active_mtu: u8, phys_state: u8,
        phys_mtu: u32, gid_tbl_len: u32, port_cap_flags: u32, max_msg_sz: u32,
        bad_pkey_cntr: u32, qkey_viol_cntr: u32,
        pkey_tbl_len: u16, active_speed: u16, active_width: u8, link_layer: u8, reserved: [u8; 30],
    }

    /// `ring_addr`: `entries` CQEs; `ctrl_addr`: a [`crate::CqCtrl`]. `comp_queue`: the completion event
    /// virtqueue counted from 0, or `u32::MAX` for none.
    CreateCqReq = 32 {
        cqe: u32, entries: u32, ring_addr: u64, ctrl_addr: u64, comp_queue: u32, reserved: u32,
    }
    /// New rings of a CQ, as in [`CreateCqReq`].
    ResizeCqReq = 32 { cqn: u32, cqe: u32, entries: u32, reserved: u32, ring_addr: u64, ctrl_addr: u64 }
    /// Completion events come after `count` completions or `period_us` microseconds; at once if one is 0.
    ModifyCqReq = 8 { cqn: u32, count: u16, period_us: u16 }
    /// A CQ, PD, MR, AH or SRQ handle, or a QPN, alone. Request of the DESTROY commands.
    HandleReq = 8 { handle: u32, reserved: u32 }
    /// A new CQ, PD or AH.
    HandleResp = 8 { handle: u32, reserved: u32 }

    GetDmaMrReq = 8 { pdn: u32, access_flags: u32 }
    /// `pages_addr` 0: [start, start + length) is one range of bus addresses. Else an array of
    /// `npages` 64-bit bus addresses of 4096-byte pages; `start` gives the offset in the first one. `note` is for the
    /// operator: [`mr_way`] and [`mr_why`].
    RegUserMrReq = 48 {
        pdn: u32, access_flags: u32, start: u64, length: u64, virt_addr: u64, pages_addr: u64,
        npages: u32, note: u32,
    }
    /// A new MR.
    MrResp = 16 { mrn: u32, lkey: u32, rkey: u32, reserved: u32 }
    /// Re-registration: MR `mrn` gets the range, PD and access of MR `by` and keeps its own keys. `by` is destroyed.
    ReregMrReq = 8 { mrn: u32, by: u32 }
    /// A memory window of type 1 or 2.
    AllocMwReq = 8 { pdn: u32, mw_type: u32 }
    /// An MR that work requests register. `access_flags`: the most access that it may grant. `max_num_sg`: its most
    /// pages.
    CreateMrReq = 16 { pdn: u32, access_flags: u32, max_num_sg: u32, reserved: u32 }
    MapMrSgReq = 32 { mrn: u32, npages: u32, start: u64, length: u64, pages: u64 }
    MapMrSgResp = 8 { npages: u32, reserved: u32 }

    QpCap = 20 {
        max_send_wr: u32, max_recv_wr: u32, max_send_sge: u32, max_recv_sge: u32,
        max_inline_data: u32,
    }
    /// The rings are the driver's memory; see [`crate::QpLayout`] for their sizes.
    CreateQpReq = 80 {
        pdn: u32, qp_type: u8, sq_sig_all: u8, has_srq: u8, reserved: u8,
        send_cqn: u32, recv_cqn: u32, cap: QpCap, srqn: u32,
        ctrl_addr: u64, sq_addr: u64, rq_addr: u64, xrcdn: u32,
        /// A doorbell page of CREATE_DOORBELL, or 0 for the page of SET_DOORBELL.
        doorbell: u32,
        reserved2: u64,
    }
    /// `db_slot`: the bit of this QP in its doorbell page.
    CreateQpResp = 32 { qpn: u32, db_slot: u32, cap: QpCap, reserved: u32 }

    /// New rings of a QP, with the same indices, WQE sizes and pending WQEs. The control block stays where it is.
    ResizeQpReq = 48 {
        qpn: u32, max_send_wr: u32, max_recv_wr: u32, reserved: u32, ctrl_addr: u64, sq_addr: u64, rq_addr: u64,
        reserved2: u64,
    }
    /// QP `qpn`, the target of an XRC connection in this domain, is this session's too.
    OpenQpReq = 8 { xrcdn: u32, qpn: u32 }

    /// The ring is the driver's memory, laid out as an RQ with these capabilities. `ctrl_addr`: a [`crate::QpCtrl`], of
    /// which only the RQ's part is used.
    CreateSrqReq = 48 {
        pdn: u32, max_wr: u32, max_sge: u32, limit: u32, ctrl_addr: u64, ring_addr: u64,
        is_xrc: u32, xrcdn: u32, cqn: u32, reserved: u32,
    }
    /// `max_wr` is the real capacity of the ring. `number` is the SRQ number that XRC requests carry.
    CreateSrqResp = 16 { srqn: u32, max_wr: u32, number: u32, reserved: u32 }
    /// An XRC domain; programs share it by device and inode of a file if `flags` has [`XRCD_SHARED`].
    CreateXrcdReq = 24 { dev: u64, ino: u64, flags: u32, reserved: u32 }
    /// A new ring of an SRQ, with the same indices and pending WQEs. The control block stays where it is.
    ResizeSrqReq = 32 { srqn: u32, max_wr: u32, ctrl_addr: u64, ring_addr: u64, reserved: u64 }
    ModifySrqReq = 16 { srqn: u32, limit: u32, reserved: [u32; 2] }
    QuerySrqResp = 16 { max_wr: u32, max_sge: u32, limit: u32, reserved: u32 }

    GlobalRoute = 24 {
        dgid: [u8; 16], flow_label: u32, sgid_index: u8, hop_limit: u8, traffic_class: u8, reserved: u8,
    }
    AhAttr = 32 {
        grh: GlobalRoute, dlid: u16, sl: u8, static_rate: u8, port_num: u8, is_global: u8, reserved: [u8; 2],
    }
    /// Request of ATTACH_MCAST and DETACH_MCAST.
    McastReq = 24 { qpn: u32, reserved: u32, gid: [u8; 16] }
    CreateAhReq = 40 { pdn: u32, reserved: u32, attr: AhAttr }
    QpAttr = 144 {
        qp_state: u8, cur_qp_state: u8, path_mtu: u8, path_mig_state: u8,
        qkey: u32, rq_psn: u32, sq_psn: u32, dest_qp_num: u32, qp_access_flags: u32,
        pkey_index: u16, alt_pkey_index: u16,
        en_sqd_async_notify: u8, sq_draining: u8, max_rd_atomic: u8, max_dest_rd_atomic: u8,
        min_rnr_timer: u8, port_num: u8, timeout: u8, retry_cnt: u8,
        rnr_retry: u8, alt_port_num: u8, alt_timeout: u8, reserved: u8,
        rate_limit: u32, cap: QpCap, ah_attr: AhAttr, alt_ah_attr: AhAttr, reserved2: [u32; 4],
    }
    ModifyQpReq = 152 { qpn: u32, attr_mask: u32, attr: QpAttr }
    QueryQpReq = 8 { qpn: u32, attr_mask: u32 }
    QueryQpResp = 144 { attr: QpAttr }

    QueryPkeyReq = 8 { port: u32, index: u16, reserved: u16 }
    QueryPkeyResp = 8 { pkey: u16, reserved: [u16; 3] }
    AddGidReq = 32 { gid: [u8; 16], gid_type: u32, port_num: u32, index: u16, reserved: [u16; 3] }
    DelGidReq = 8 { port: u32, index: u16, reserved: u16 }
    ReqNotifyReq = 8 { cqn: u32, flags: u32 }
    QueryGidReq = 8 { port: u32, index: u32 }
    QueryGidResp = 24 { gid: [u8; 16], gid_type: u32, reserved: u32 }
    /// Device attributes: the configuration space, followed by attributes that programs may query but drivers do not
    /// need before their first command.
    QueryDeviceResp = 256 {
        config: crate::Config, fw_ver: [u8; 32], name: [u8; 32],
        max_mw: u32, max_sge_rd: u32, max_res_rd_atom: u32, max_qp_init_rd_atom: u32,
        max_srq_wr: u32, max_srq_sge: u32, max_total_mcast_qp_attach: u32,
        /// QP types that heed `rate_limit`: bit *n* for type *n*.
        rate_limit_qp_types: u32,
        /// Of MODIFY_CQ.
        max_cq_count: u16,
        max_cq_period_us: u16,
        /// Most pages of an MR of CREATE_MR.
        max_fast_reg_pages: u32,
        /// [`WAY_VF`]: programs ask for a lease of a VF (see [`crate::lease`]) before they open the device.
        way: u32,
        reserved: [u32; 5],
    }
    /// Counters of the vRNIC since it was made. The second part has the names of rxe's `hw_counters`; counters of
    /// congestion have the names of mlx5's.
    QueryCountersResp = 384 {
        sent_wrs: u64, sent_bytes: u64, received_wrs: u64, received_bytes: u64, rnr_waits: u64, timeouts: u64,
        errors: u64, dropped: u64, qkey_violations: u64,
        sent_pkts: u64, send_err: u64, link_downed: u64, rcvd_pkts: u64, retransmitted_pkts: u64,
        duplicate_request: u64, out_of_seq_request: u64, ack_deferred: u64, send_rnr_err: u64, rcvd_rnr_err: u64,
        rcvd_seq_err: u64, implied_nak: u64, completer_retry_err: u64, rdma_sends: u64, rdma_recvs: u64,
        np_ecn_marked_roce_packets: u64, np_cnp_sent: u64, rp_cnp_handled: u64,
        retry_exceeded_err: u64, retry_rnr_exceeded_err: u64,
        reserved: [u64; 19],
    }
    /// The clock of the timestamps in CQEs.
    QueryClockResp = 8 { now_ns: u64 }
    /// Number of accesses by the key of an MR, and the approximate number of bytes that they have read and written.
    QueryMrResp = 16 { accesses: u64, bytes: u64 }
    /// How a destination GID is reached from a VF. `sgid_index`: of the vRNIC's own GID. `qp_type`: an `ibv_qp_type`.
    ResolveReq = 32 { dgid: [u8; 16], sgid_index: u32, qp_type: u32, reserved: u64 }
    /// `dgid`: the GID of the destination's VF. `max_mtu`: the largest MTU that it takes, an `ibv_mtu`.
    ResolveResp = 24 { dgid: [u8; 16], max_mtu: u32, reserved: u32 }
    /// The GID of a VF.
    NameGidReq = 16 { real: [u8; 16] }
    /// The GID of the vRNIC that has this VF.
    NameGidResp = 16 { gid: [u8; 16] }
    /// `addr`: a [`crate::DoorbellPage`], 4096-byte aligned. Request of SET_DOORBELL and CREATE_DOORBELL.
    SetDoorbellReq = 8 { addr: u64 }
    SetStageReq = 16 { addr: u64, length: u64 }
    /// `features`: `FEATURE_*` bits that the driver is going to use.
    NewSessionReq = 16 { features: u64, reserved: u64 }
    NewSessionResp = 16 { generation: u32, reserved: u32, features: u64 }
    /// Some memory by bus address.
    Run = 16 { addr: u64, length: u64 }
    /// `runs_addr`: `num_runs` [`Run`]s, which are the MR, in order.
    RegMrRunsReq = 48 {
        pdn: u32, access_flags: u32, length: u64, virt_addr: u64, runs_addr: u64, num_runs: u32, note: u32, reserved: u64,
    }
    /// More [`Run`]s at the end of an MR.
    ExtendMrReq = 24 { mrn: u32, num_runs: u32, runs_addr: u64, length: u64 }
    /// [`Run`]s of whole pages that get one range of bus addresses.
    MapRunsReq = 24 { runs_addr: u64, num_runs: u32, reserved: u32, length: u64 }
    /// `addr` has the bit [`MAPPED_RUNS`].
    MapRunsResp = 16 { handle: u32, reserved: u32, addr: u64 }

    /// Written by the device into a buffer of an event virtqueue. `kind` is an `ibv_event_type` or
    /// [`EVENT_COMPLETION`]; `handle` is the QPN, CQ handle or port that the event concerns.
    Event = 16 { kind: u32, handle: u32, reserved: u64 }
}

/// [`QueryDeviceResp::way`]: by the virtual layer's software RNIC.
pub const WAY_SOFT: u32 = 0;
/// [`QueryDeviceResp::way`]: by a VF of a real RNIC.
pub const WAY_VF: u32 = 1;
/// `Event::kind` on a completion event virtqueue.
pub const EVENT_COMPLETION: u32 = 0x100;
/// `Event::kind` on a completion event virtqueue: CM_EVENT has something.
pub const EVENT_CM: u32 = 0x101;
/// `CreateXrcdReq::flags`: the domain is identified by a file.
pub const XRCD_SHARED: u32 = 1;
/// The domain is created if it does not exist.
pub const XRCD_CREATE: u32 = 2;
/// The command fails if the domain exists already.
pub const XRCD_EXCLUSIVE: u32 = 4;
/// `CreateCqReq::comp_queue` of a CQ without events.
pub const NO_COMP_QUEUE: u32 = u32::MAX;
/// `CreateQpReq::qp_type` of the QP for the general services.
pub const QP_TYPE_GSI: u8 = 1;
/// This bit is set in all bus addresses that MAP_RUNS gives, and in no others.
pub const MAPPED_RUNS: u64 = 1 << 63;
/// Most runs of one command.
pub const MAX_RUNS: u32 = 65_536;
/// `ReqNotifyReq::flags` and the low bits of `CqCtrl::arm`: any completion.
pub const NOTIFY_NEXT: u32 = 2;
/// Only solicited completions and errors.
pub const NOTIFY_SOLICITED: u32 = 1;

/// The note of an MR: `way` is how its memory is reached (0 *direct*, 1 *share*, 2 *copy*), `why` the reason.
pub fn mr_note(way: u8, why: u8) -> u32 {
    u32::from(way) << 8 | u32::from(why)
}

/// The way in which an MR's memory is reached, according to [`RegUserMrReq::note`].
pub fn mr_way(note: u32) -> &'static str {
    match note >> 8 {
        0 => "direct",
        1 => "share",
        2 => "copy",
        _ => "unknown",
    }
}

/// The reason for the way, in words.
pub fn mr_why(note: u32) -> &'static str {
    match note & 0xff {
        0 => "as fast as it goes",
        1 => "UNIRDMA_MR asks for it",
        2 => "on-demand paging",
        3 => "the program has threads, and no full userfaultfd",
        4 => "in use by the registering thread, or watched by a userfaultfd of the program",
        5 => "the kernel holds pages of it",
        6 => "not private anonymous memory",
        7 => "moved by another copy of the library",
        8 => "registrations like it are brief",
        9 => "a limit of the process or of the virtual layer",
        _ => "unknown",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_has_every_code_once() {
        let codes: Vec<u8> = Command::ALL.iter().map(|c| *c as u8).collect();
        assert_eq!(codes, (1..=56).collect::<Vec<u8>>());
        assert!(
            (0..=u8::MAX).all(|raw| Command::from_raw(raw).map(|c| c as u8) == codes.contains(&raw).then_some(raw))
        );
        assert_eq!((Command::RegUserMr as u8, Command::ReqNotifyCq as u8), (9, 18));
    }

    #[test]
    fn what_query_device_adds_lies_as_specified() {
        use std::mem::offset_of;
        type R = QueryDeviceResp;
        assert_eq!((offset_of!(R, fw_ver), offset_of!(R, name), offset_of!(R, max_mw)), (128, 160, 192));
        assert_eq!(offset_of!(R, max_fast_reg_pages), 228);
        assert_eq!((offset_of!(R, max_srq_wr), offset_of!(R, max_cq_count), offset_of!(R, way)), (208, 224, 232));
    }

    #[test]
    fn every_status_has_an_errno() {
        assert_eq!(Status::ALL.iter().map(|s| *s as u8).collect::<Vec<u8>>(), (0..=12).collect::<Vec<u8>>());
        assert!(Status::ALL.iter().all(|s| (Status::errno(*s as u8) == 0) == (*s == Status::Ok)));
        assert_eq!((Status::errno(Status::Unreachable as u8), Status::errno(200)), (113, 5));
    }
}
