//! Connection management (section 6.4 of the specification): RDMA connections by IP address and port.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::command::wire;
use crate::{AhAttr, QpAttr};

/// Bytes of private data that a request or event has room for.
pub const CM_PRIVATE_BYTES: usize = 224;

wire! {
    /// An IP address and a port. IPv4 lies IPv4-mapped in `ip`; `family`: 0 none, 4, 6; `port` in the host's order.
    CmAddr = 24 { ip: [u8; 16], port: u16, family: u8, reserved: u8, reserved2: u32 }
    /// Connection parameters that the two ends exchange. `qkey` is for datagrams only.
    CmParam = 16 {
        qpn: u32, qkey: u32, responder_resources: u8, initiator_depth: u8, flow_control: u8, retry_count: u8,
        rnr_retry_count: u8, srq: u8, private_len: u8, reserved: u8,
    }
    /// Request of CM. `op` is a [`CmOp`], which determines the other fields that are used.
    CmReq = 320 {
        op: u8, option: u8, port_space: u16, id: u32, queue: u32, value: u32, src: CmAddr, dst: CmAddr, param: CmParam,
        private: [[u8; 32]; 7], reserved: [u64; 2],
    }
    /// Response of CM: the identifier, its local address, and the number of events that were removed from its queue
    /// when it was destroyed or migrated.
    CmResp = 32 { id: u32, dropped: u32, src: CmAddr }
    /// Request of CM_QP_ATTR: what a QP needs to go to `state` for this connection.
    CmQpAttrReq = 8 { id: u32, state: u32 }
    CmQpAttrResp = 152 { attr_mask: u32, reserved: u32, attr: QpAttr }
    /// Request of CM_EVENT: the next event of identifiers on this completion event queue.
    CmEventReq = 8 { queue: u32, reserved: u32 }
    /// `kind`: an `rdma_cm_event_type`; `status` its status, negative for an errno. For a request, `id` is new and
    /// `listen_id` listens. `ah` leads to the peer, for datagrams and multicast.
    CmEvent = 336 {
        id: u32, listen_id: u32, kind: u32, status: i32, src: CmAddr, dst: CmAddr, param: CmParam, ah: AhAttr,
        private: [[u8; 32]; 7],
    }
}

/// Operation of a CM request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum CmOp {
    /// A new identifier in `port_space`, with events on completion event queue `queue`; `option`: [`CM_XRC`] or 0.
    Create = 1,
    /// Destroys `id`. If it is connected, it is disconnected.
    Destroy = 2,
    /// Binds `id` to `src`; port 0: any free one.
    Bind = 3,
    /// Resolves the address `dst`, from `src` if the family of `src` is not 0.
    ResolveAddr = 4,
    /// Finds the route.
    ResolveRoute = 5,
    /// Listens for connection requests. `value`: the most requests that may wait.
    Listen = 6,
    /// Asks for a connection.
    Connect = 7,
    /// Accepts the connection request that `id` stands for.
    Accept = 8,
    /// Rejects the connection request that `id` stands for.
    Reject = 9,
    /// The QP is ready: the connection is established.
    Establish = 10,
    /// Ends the connection.
    Disconnect = 11,
    /// Further events come on queue `queue`.
    Migrate = 12,
    /// Sets `option` to `value`.
    SetOption = 13,
    /// Joins the multicast group `dst`; `value` is returned in the event.
    Join = 14,
    /// Leaves the multicast group `dst`.
    Leave = 15,
}

impl CmOp {
    /// The operation of a raw code.
    pub fn from_raw(raw: u8) -> Option<Self> {
        use CmOp::*;
        const ALL: [CmOp; 15] = [
            Create,
            Destroy,
            Bind,
            ResolveAddr,
            ResolveRoute,
            Listen,
            Connect,
            Accept,
            Reject,
            Establish,
            Disconnect,
            Migrate,
            SetOption,
            Join,
            Leave,
        ];
        ALL.get(usize::from(raw).wrapping_sub(1)).copied()
    }
}

/// `CmReq::option` of [`CmOp::Create`]: connections of XRC QPs.
pub const CM_XRC: u8 = 1;

/// Port spaces (`enum rdma_port_space`).
pub mod port_space {
    /// Connections.
    pub const TCP: u16 = 0x0106;
    /// Datagrams.
    pub const UDP: u16 = 0x0111;
    /// Connections, with InfiniBand addresses.
    pub const IB: u16 = 0x013f;
}

/// Options of an identifier (`RDMA_OPTION_ID_*`).
pub mod cm_option {
    /// Type of service of its packets.
    pub const TOS: u8 = 0;
    /// Another identifier may have the same address.
    pub const REUSE_ADDRESS: u8 = 1;
    /// An IPv6 wildcard does not take IPv4.
    pub const ONE_FAMILY: u8 = 2;
    /// ACK timeout of its QP, encoded.
    pub const ACK_TIMEOUT: u8 = 3;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_have_their_numbers() {
        for raw in 1..=15u8 {
            assert_eq!(CmOp::from_raw(raw).unwrap() as u8, raw);
        }
        assert_eq!((CmOp::from_raw(0), CmOp::from_raw(16)), (None, None));
    }

    #[test]
    fn requests_and_events_lie_as_specified() {
        use std::mem::offset_of;
        assert_eq!((offset_of!(CmReq, src), offset_of!(CmReq, param), offset_of!(CmReq, private)), (16, 64, 80));
        assert_eq!((offset_of!(CmEvent, param), offset_of!(CmEvent, ah), offset_of!(CmEvent, private)), (64, 80, 112));
    }
}
