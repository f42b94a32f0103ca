//! The attributes with which QPs are connected.

use unirdma_abi as abi;
use unirdma_formats::{Gid, QpState, QpType, attr_mask as m};

use crate::{ALL, End};

/// The Q_Key of all datagrams.
pub const QKEY: u32 = 0x1234_5678;

/// Masks and attributes of the three steps from RESET to RTS of an RC QP.
pub fn attrs(peer: &End, gid: Gid) -> [(u32, abi::QpAttr); 3] {
    attrs_of(QpType::Rc, peer.qpn, gid)
}

/// Masks and attributes of the three steps from RESET to RTS.
pub fn attrs_of(typ: QpType, peer_qpn: u32, gid: Gid) -> [(u32, abi::QpAttr); 3] {
    let a = abi::QpAttr {
        port_num: 1,
        qp_access_flags: ALL,
        path_mtu: 3,
        qkey: QKEY,
        dest_qp_num: peer_qpn,
        rq_psn: 100,
        sq_psn: 100,
        max_dest_rd_atomic: 4,
        max_rd_atomic: 4,
        min_rnr_timer: 12,
        timeout: 14,
        retry_cnt: 3,
        rnr_retry: 3,
        ah_attr: address(gid),
        ..Default::default()
    };
    let address = m::AV | m::PATH_MTU | m::DEST_QPN | m::RQ_PSN;
    let (init, rtr, rts) = match typ {
        QpType::Rc => (
            m::ACCESS_FLAGS,
            address | m::MAX_DEST_RD_ATOMIC | m::MIN_RNR_TIMER,
            m::TIMEOUT | m::RETRY_CNT | m::RNR_RETRY | m::SQ_PSN | m::MAX_QP_RD_ATOMIC,
        ),
        QpType::XrcSend => {
            (m::ACCESS_FLAGS, address, m::TIMEOUT | m::RETRY_CNT | m::RNR_RETRY | m::SQ_PSN | m::MAX_QP_RD_ATOMIC)
        }
        QpType::XrcRecv => (m::ACCESS_FLAGS, address | m::MAX_DEST_RD_ATOMIC | m::MIN_RNR_TIMER, m::SQ_PSN),
        QpType::Uc => (m::ACCESS_FLAGS, address, m::SQ_PSN),
        QpType::Ud => (m::QKEY, 0, m::SQ_PSN),
    };
    let step = |mask, state: QpState| (m::STATE | mask, abi::QpAttr { qp_state: state as u8, ..a });
    [step(m::PKEY_INDEX | m::PORT | init, QpState::Init), step(rtr, QpState::Rtr), step(rts, QpState::Rts)]
}

/// An address vector that leads to `gid`.
pub fn address(gid: Gid) -> abi::AhAttr {
    abi::AhAttr {
        grh: abi::GlobalRoute { dgid: gid.0, ..Default::default() },
        is_global: 1,
        port_num: 1,
        ..Default::default()
    }
}
