//! Enumerations and flag bits of the verbs, with the values of `infiniband/verbs.h`.

macro_rules! code {
    ($(#[$doc:meta])* $name:ident { $($(#[$vdoc:meta])* $var:ident = $val:expr),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u8)]
        pub enum $name { $($(#[$vdoc])* $var = $val),+ }
        impl $name {
            /// The variant of a raw code; `None` if there is none.
            pub fn from_raw(raw: u32) -> Option<Self> {
                match raw { $(x if x == $val => Some($name::$var),)+ _ => None }
            }
        }
    };
}

code!(
    /// State of a QP (`enum ibv_qp_state`).
    QpState {
        /// Created or reset.
        Reset = 0,
        /// May post receives.
        Init = 1,
        /// Ready to receive.
        Rtr = 2,
        /// Ready to send.
        Rts = 3,
        /// Send queue drained.
        Sqd = 4,
        /// Send queue error (not RC).
        Sqe = 5,
        /// Error: every work request is flushed.
        Err = 6,
    }
);

code!(
    /// Type of a QP (`enum ibv_qp_type`).
    QpType {
        /// Reliable connection.
        Rc = 2,
        /// Unreliable connection.
        Uc = 3,
        /// Unreliable datagram.
        Ud = 4,
        /// Initiator of an extended reliable connection.
        XrcSend = 9,
        /// Its target.
        XrcRecv = 10,
    }
);

code!(
    /// Operation of a send work request (`enum ibv_wr_opcode`).
    WrOpcode {
        /// RDMA WRITE.
        Write = 0,
        /// RDMA WRITE with immediate: consumes a receive at the peer.
        WriteImm = 1,
        /// SEND.
        Send = 2,
        /// SEND with immediate.
        SendImm = 3,
        /// RDMA READ.
        Read = 4,
        /// 8-byte compare and swap.
        CmpSwap = 5,
        /// 8-byte fetch and add.
        FetchAdd = 6,
        /// Takes back the grant of a memory window, or of an MR that was registered by a request.
        LocalInv = 7,
        /// Binds a memory window.
        BindMw = 8,
        /// SEND that takes the grant of a memory window or MR of the peer back.
        SendInv = 9,
        /// Waits until earlier writes are visible.
        Flush = 14,
        /// RDMA WRITE of 8 bytes at once.
        AtomicWrite = 15,
        /// Registers memory: a free MR gets pages and grants access to them. For kernels (`IB_WR_REG_MR`), not for
        /// programs.
        RegMr = 32,
    }
);

impl QpType {
    /// True if the responder answers, and requests are retried.
    pub fn is_reliable(self) -> bool {
        matches!(self, QpType::Rc | QpType::XrcSend | QpType::XrcRecv)
    }
    /// The type of the QPs that a QP of this type is connected to.
    pub fn peer(self) -> QpType {
        match self {
            QpType::XrcSend => QpType::XrcRecv,
            QpType::XrcRecv => QpType::XrcSend,
            same => same,
        }
    }
    /// True if a QP of this type may be asked to do `op` (IBTA vol. 1, table 33).
    pub fn allows(self, op: WrOpcode) -> bool {
        match self {
            QpType::Rc | QpType::XrcSend => true,
            QpType::XrcRecv => false,
            QpType::Uc => !op.returns_data() && op != WrOpcode::SendInv,
            QpType::Ud => matches!(op, WrOpcode::Send | WrOpcode::SendImm),
        }
    }
}

impl WrOpcode {
    /// The opcode of this request's send completion.
    pub fn wc(self) -> WcOpcode {
        match self {
            WrOpcode::Write | WrOpcode::WriteImm => WcOpcode::Write,
            WrOpcode::Send | WrOpcode::SendImm | WrOpcode::SendInv => WcOpcode::Send,
            WrOpcode::Read => WcOpcode::Read,
            WrOpcode::CmpSwap => WcOpcode::CmpSwap,
            WrOpcode::FetchAdd => WcOpcode::FetchAdd,
            WrOpcode::LocalInv => WcOpcode::LocalInv,
            WrOpcode::BindMw => WcOpcode::BindMw,
            WrOpcode::AtomicWrite => WcOpcode::AtomicWrite,
            WrOpcode::Flush => WcOpcode::Flush,
            WrOpcode::RegMr => WcOpcode::RegMr,
        }
    }
    /// Bytes that may be in its WQE, at a QP that allows `most`; the value of an atomic WRITE is always in the WQE.
    pub fn inline_bytes(self, most: u32) -> u32 {
        if self == WrOpcode::AtomicWrite { most.max(8) } else { most }
    }
    /// True if the peer must have a receive work request posted.
    pub fn consumes_recv(self) -> bool {
        self.is_send() || self == WrOpcode::WriteImm
    }
    /// True for the SENDs.
    pub fn is_send(self) -> bool {
        matches!(self, WrOpcode::Send | WrOpcode::SendImm | WrOpcode::SendInv)
    }
    /// True if nothing of it is sent.
    pub fn is_local(self) -> bool {
        matches!(self, WrOpcode::LocalInv | WrOpcode::BindMw | WrOpcode::RegMr)
    }
    /// True if it carries immediate data.
    pub fn has_imm(self) -> bool {
        matches!(self, WrOpcode::SendImm | WrOpcode::WriteImm)
    }
    /// True if the responder answers with more than an ACK, as to a READ. It holds a limited number of such answers.
    pub fn returns_data(self) -> bool {
        self.stores_locally() || matches!(self, WrOpcode::AtomicWrite | WrOpcode::Flush)
    }
    /// True if the responder's answer is put into the requester's memory: READ and the atomics that fetch.
    pub fn stores_locally(self) -> bool {
        self == WrOpcode::Read || self.is_atomic()
    }
    /// True for the two 8-byte atomics that fetch.
    pub fn is_atomic(self) -> bool {
        matches!(self, WrOpcode::CmpSwap | WrOpcode::FetchAdd)
    }
}

code!(
    /// Opcode in a completion (`enum ibv_wc_opcode`).
    WcOpcode {
        /// A SEND was sent.
        Send = 0,
        /// An RDMA WRITE.
        Write = 1,
        /// An RDMA READ.
        Read = 2,
        /// A compare and swap.
        CmpSwap = 3,
        /// A fetch and add.
        FetchAdd = 4,
        /// A memory window was bound.
        BindMw = 5,
        /// The grant of a memory window or an MR was taken back.
        LocalInv = 6,
        /// A flush.
        Flush = 8,
        /// An atomic WRITE.
        AtomicWrite = 9,
        /// Memory was registered. Its number differs from kernel to kernel, so this is the opcode of the request.
        RegMr = 32,
        /// A SEND was received.
        Recv = 128,
        /// A WRITE with immediate was received.
        RecvWriteImm = 129,
    }
);

code!(
    /// Status of a completion (`enum ibv_wc_status`); the variants that this device reports.
    WcStatus {
        /// Done.
        Success = 0,
        /// A message is longer than the receive buffer or than 2 GiB.
        LocLenErr = 1,
        /// The WQE or the QP's use is malformed.
        LocQpOpErr = 2,
        /// An SGE names memory it may not use.
        LocProtErr = 4,
        /// The QP went to ERR before this request was executed.
        WrFlushErr = 5,
        /// A memory window could not be bound, or memory not be registered, or a grant not be taken back.
        MwBindErr = 6,
        /// The peer's answer was wrong.
        BadRespErr = 7,
        /// The peer found the request invalid.
        RemInvReqErr = 9,
        /// The request may not access the peer's memory.
        RemAccessErr = 10,
        /// The peer could not complete the request.
        RemOpErr = 11,
        /// The peer never answered.
        RetryExcErr = 12,
        /// The peer never had a receive ready.
        RnrRetryExcErr = 13,
        /// A fatal transport error.
        FatalErr = 19,
    }
);

code!(
    /// Asynchronous events (`enum ibv_event_type`) that this device raises.
    AsyncEvent {
        /// The CQ overran.
        CqErr = 0,
        /// The QP failed.
        QpFatal = 1,
        /// The peer sent an invalid request.
        QpReqErr = 2,
        /// The peer accessed memory that it may not.
        QpAccessErr = 3,
        /// The first message came in while the QP was in RTR.
        CommEst = 4,
        /// The SQ has drained.
        SqDrained = 5,
        /// The device is gone.
        DeviceFatal = 8,
        /// The port came up.
        PortActive = 9,
        /// The port went down.
        PortErr = 10,
        /// The SRQ failed.
        SrqErr = 14,
        /// The SRQ has fewer receives than its limit.
        SrqLimitReached = 15,
        /// A QP with an SRQ failed and takes no more of its receives.
        QpLastWqeReached = 16,
        /// The GID table has changed.
        GidChange = 18,
    }
);

impl AsyncEvent {
    /// True if it concerns a QP.
    pub fn is_of_qp(self) -> bool {
        use AsyncEvent::*;
        matches!(self, QpFatal | QpReqErr | QpAccessErr | CommEst | SqDrained | QpLastWqeReached)
    }
}

/// Access flags (`enum ibv_access_flags`).
pub mod access {
    /// The owner's own receives and READ responses may write here.
    pub const LOCAL_WRITE: u32 = 1;
    /// Peers may WRITE.
    pub const REMOTE_WRITE: u32 = 2;
    /// Peers may READ.
    pub const REMOTE_READ: u32 = 4;
    /// Peers may use atomics.
    pub const REMOTE_ATOMIC: u32 = 8;
    /// Every flag that a memory region of this device may carry.
    pub const MR_SUPPORTED: u32 =
        LOCAL_WRITE | REMOTE_WRITE | REMOTE_READ | REMOTE_ATOMIC | MW_BIND | FLUSH_GLOBAL | STAGE;
    /// Flags for memory that work requests register.
    pub const FAST_SUPPORTED: u32 = LOCAL_WRITE | REMOTE_WRITE | REMOTE_READ | REMOTE_ATOMIC;
    /// Flags that the grant of a memory window may carry. Local access means nothing there.
    pub const MW_SUPPORTED: u32 = LOCAL_WRITE | REMOTE_WRITE | REMOTE_READ | REMOTE_ATOMIC | ZERO_BASED;
    /// Memory windows may be bound to it.
    pub const MW_BIND: u32 = 1 << 4;
    /// Its addresses begin at 0.
    pub const ZERO_BASED: u32 = 1 << 5;
    /// Pages come and go while the region lives.
    pub const ON_DEMAND: u32 = 1 << 6;
    /// The memory is in huge pages.
    pub const HUGETLB: u32 = 1 << 7;
    /// Peers may flush, so that everybody sees what they wrote.
    pub const FLUSH_GLOBAL: u32 = 1 << 8;
    /// Peers may flush to memory that outlives power failures. No such memory is supported.
    pub const FLUSH_PERSISTENT: u32 = 1 << 9;
    /// Flags that a QP may be given. The flags of memory mean nothing to it.
    pub const QP_ACCEPTED: u32 = 0x3ff | OPTIONAL_RANGE;
    /// Flags that a device may ignore (`IBV_ACCESS_OPTIONAL_RANGE`).
    pub const OPTIONAL_RANGE: u32 = 0x3ff0_0000;
    /// Of the device, not of verbs: messages to this memory may go through the stage.
    pub const STAGE: u32 = 1 << 31;
}

/// Send flags (`enum ibv_send_flags`).
pub mod send_flags {
    /// Wait for earlier READs and atomics.
    pub const FENCE: u32 = 1;
    /// Write a completion.
    pub const SIGNALED: u32 = 2;
    /// Raise the peer's solicited event.
    pub const SOLICITED: u32 = 4;
    /// The data is in the WQE.
    pub const INLINE: u32 = 8;
    /// Every flag that an RC WQE of this device may carry.
    pub const SUPPORTED: u32 = FENCE | SIGNALED | SOLICITED | INLINE;
    /// Of WQEs, not of verbs: the SGEs name memory of the session by bus address, and their keys are ignored.
    pub const STAGED: u32 = 1 << 31;
    /// A datagram whose WQE contains the address itself instead of a handle.
    pub const ADDRESS: u32 = 1 << 30;
}

/// Completion flags (`enum ibv_wc_flags`).
pub mod wc_flags {
    /// A GRH is in the first 40 bytes (UD).
    pub const GRH: u32 = 1;
    /// `imm_data` is valid.
    pub const WITH_IMM: u32 = 2;
    /// `invalidated_rkey` is valid.
    pub const WITH_INV: u32 = 8;
}

/// Bits of `attr_mask` (`enum ibv_qp_attr_mask`).
#[allow(missing_docs)]
pub mod attr_mask {
    pub const STATE: u32 = 1;
    pub const CUR_STATE: u32 = 1 << 1;
    pub const EN_SQD_ASYNC_NOTIFY: u32 = 1 << 2;
    pub const ACCESS_FLAGS: u32 = 1 << 3;
    pub const PKEY_INDEX: u32 = 1 << 4;
    pub const PORT: u32 = 1 << 5;
    pub const QKEY: u32 = 1 << 6;
    pub const AV: u32 = 1 << 7;
    pub const PATH_MTU: u32 = 1 << 8;
    pub const TIMEOUT: u32 = 1 << 9;
    pub const RETRY_CNT: u32 = 1 << 10;
    pub const RNR_RETRY: u32 = 1 << 11;
    pub const RQ_PSN: u32 = 1 << 12;
    pub const MAX_QP_RD_ATOMIC: u32 = 1 << 13;
    pub const ALT_PATH: u32 = 1 << 14;
    pub const MIN_RNR_TIMER: u32 = 1 << 15;
    pub const SQ_PSN: u32 = 1 << 16;
    pub const MAX_DEST_RD_ATOMIC: u32 = 1 << 17;
    pub const PATH_MIG_STATE: u32 = 1 << 18;
    pub const CAP: u32 = 1 << 19;
    pub const DEST_QPN: u32 = 1 << 20;
    pub const RATE_LIMIT: u32 = 1 << 25;
}
