//! The field's numbers and names: QPNs, keys, PSNs, GIDs, and the enumerations of verbs.
//!
//! This crate knows nothing of memory, devices or processes and depends on no other crate of the workspace. It must
//! never do I/O, allocate on a data path, or read a clock. Values are defined by the InfiniBand Architecture
//! Specification volume 1 and by `ibv_*(3)`.

pub mod cm;
pub mod frame;
mod ids;
pub mod net;
mod number;
mod path;
pub mod pcap;
mod verbs;
pub mod where_is;
pub mod wire;

pub use ids::{Gid, Guid, Lkey, Mac, NoMac, Psn, Qpn, Rkey};
pub use number::{ByNumber, NumberHash};
pub use path::{
    ECN, NO_CREDITS, RATES, ack_timeout_ns, class_of, credit_code, credits, mtu_bytes, psn_count, rate_kbps,
    rnr_timer_ns,
};
pub use verbs::{AsyncEvent, QpState, QpType, WcOpcode, WcStatus, WrOpcode, access, attr_mask, send_flags, wc_flags};

/// Length of a longest message, in bytes: 2 GiB (IBTA vol. 1, 9.7.2 limits an RC message to 2^31).
pub const MAX_MSG_BYTES: u64 = 1 << 31;
