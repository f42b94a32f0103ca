//! The QP state machine as a table: which transitions exist and which attributes each takes.
//! IBTA vol. 1, 10.3.1 and table 91; `ibv_modify_qp(3)`.

use unirdma_formats::QpState::{self, Err, Init, Reset, Rtr, Rts, Sqd, Sqe};
use unirdma_formats::QpType;
use unirdma_formats::attr_mask::*;

/// One transition of a QP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transition {
    /// Attributes that must be given.
    pub required: u32,
    /// Attributes that may be given.
    pub optional: u32,
}

const RTS_OPTIONAL: u32 = CUR_STATE | ALT_PATH | ACCESS_FLAGS | MIN_RNR_TIMER | PATH_MIG_STATE | RATE_LIMIT;

/// From state, to state, required attributes, optional attributes.
type Row = (QpState, QpState, u32, u32);

/// All transitions of an RC QP, except those to RESET and to ERR, which exist from every state.
const RC: &[Row] = &[
    (Reset, Init, PKEY_INDEX | PORT | ACCESS_FLAGS, 0),
    (Init, Init, 0, PKEY_INDEX | PORT | ACCESS_FLAGS),
    (
        Init,
        Rtr,
        AV | PATH_MTU | DEST_QPN | RQ_PSN | MAX_DEST_RD_ATOMIC | MIN_RNR_TIMER,
        ALT_PATH | ACCESS_FLAGS | PKEY_INDEX,
    ),
    (Rtr, Rts, TIMEOUT | RETRY_CNT | RNR_RETRY | SQ_PSN | MAX_QP_RD_ATOMIC, RTS_OPTIONAL),
    (Rts, Rts, 0, RTS_OPTIONAL),
    (Rts, Sqd, 0, EN_SQD_ASYNC_NOTIFY),
    (Sqd, Rts, 0, RTS_OPTIONAL & !RATE_LIMIT),
    (
        Sqd,
        Sqd,
        0,
        PORT | AV
            | TIMEOUT
            | RETRY_CNT
            | RNR_RETRY
            | MAX_QP_RD_ATOMIC
            | MAX_DEST_RD_ATOMIC
            | ALT_PATH
            | PKEY_INDEX
            | ACCESS_FLAGS
            | MIN_RNR_TIMER
            | PATH_MIG_STATE,
    ),
];

/// Like [`RC`], for the initiator of an XRC connection, which has no responder.
const XRC_SEND: &[Row] = &[
    (Reset, Init, PKEY_INDEX | PORT | ACCESS_FLAGS, 0),
    (Init, Init, 0, PKEY_INDEX | PORT | ACCESS_FLAGS),
    (
        Init,
        Rtr,
        AV | PATH_MTU | DEST_QPN | RQ_PSN,
        ALT_PATH | ACCESS_FLAGS | PKEY_INDEX | MAX_DEST_RD_ATOMIC | MIN_RNR_TIMER,
    ),
    (Rtr, Rts, TIMEOUT | RETRY_CNT | RNR_RETRY | SQ_PSN | MAX_QP_RD_ATOMIC, RTS_OPTIONAL),
    (Rts, Rts, 0, RTS_OPTIONAL),
    (Rts, Sqd, 0, EN_SQD_ASYNC_NOTIFY),
    (Sqd, Rts, 0, RTS_OPTIONAL & !RATE_LIMIT),
    (
        Sqd,
        Sqd,
        0,
        PORT | AV
            | TIMEOUT
            | RETRY_CNT
            | RNR_RETRY
            | MAX_QP_RD_ATOMIC
            | ALT_PATH
            | PKEY_INDEX
            | ACCESS_FLAGS
            | PATH_MIG_STATE,
    ),
];

/// Like [`RC`], for the target of an XRC connection, which has no requester.
const XRC_RECV: &[Row] = &[
    (Reset, Init, PKEY_INDEX | PORT | ACCESS_FLAGS, 0),
    (Init, Init, 0, PKEY_INDEX | PORT | ACCESS_FLAGS),
    (
        Init,
        Rtr,
        AV | PATH_MTU | DEST_QPN | RQ_PSN | MAX_DEST_RD_ATOMIC | MIN_RNR_TIMER,
        ALT_PATH | ACCESS_FLAGS | PKEY_INDEX,
    ),
    (Rtr, Rts, SQ_PSN, TIMEOUT | RETRY_CNT | RNR_RETRY | MAX_QP_RD_ATOMIC | RTS_OPTIONAL),
    (Rts, Rts, 0, RTS_OPTIONAL),
];

const UC_OPTIONAL: u32 = CUR_STATE | ALT_PATH | ACCESS_FLAGS | PATH_MIG_STATE | RATE_LIMIT;

/// Like [`RC`], for a UC QP.
const UC: &[Row] = &[
    (Reset, Init, PKEY_INDEX | PORT | ACCESS_FLAGS, 0),
    (Init, Init, 0, PKEY_INDEX | PORT | ACCESS_FLAGS),
    (Init, Rtr, AV | PATH_MTU | DEST_QPN | RQ_PSN, ALT_PATH | ACCESS_FLAGS | PKEY_INDEX),
    (Rtr, Rts, SQ_PSN, UC_OPTIONAL),
    (Rts, Rts, 0, UC_OPTIONAL),
    (Rts, Sqd, 0, EN_SQD_ASYNC_NOTIFY),
    (Sqd, Rts, 0, UC_OPTIONAL & !RATE_LIMIT),
    (Sqd, Sqd, 0, AV | PKEY_INDEX | ALT_PATH | ACCESS_FLAGS | PATH_MIG_STATE),
    (Sqe, Rts, 0, CUR_STATE | ACCESS_FLAGS),
];

/// Like [`RC`], for a UD QP.
const UD: &[Row] = &[
    (Reset, Init, PKEY_INDEX | PORT | QKEY, 0),
    (Init, Init, 0, PKEY_INDEX | PORT | QKEY),
    (Init, Rtr, 0, PKEY_INDEX | QKEY),
    (Rtr, Rts, SQ_PSN, CUR_STATE | QKEY | RATE_LIMIT),
    (Rts, Rts, 0, CUR_STATE | QKEY | RATE_LIMIT),
    (Rts, Sqd, 0, EN_SQD_ASYNC_NOTIFY),
    (Sqd, Rts, 0, CUR_STATE | QKEY),
    (Sqd, Sqd, 0, PKEY_INDEX | QKEY),
    (Sqe, Rts, 0, CUR_STATE | QKEY),
];

/// The transition of a QP from `from` to `to`; `None` if there is none.
pub fn transition(typ: QpType, from: QpState, to: QpState) -> Option<Transition> {
    if to == Reset || to == Err {
        return Some(Transition { required: 0, optional: 0 });
    }
    let rows = match typ {
        QpType::Rc => RC,
        QpType::Uc => UC,
        QpType::Ud => UD,
        QpType::XrcSend => XRC_SEND,
        QpType::XrcRecv => XRC_RECV,
    };
    rows.iter().find(|t| (t.0, t.1) == (from, to)).map(|t| Transition { required: t.2, optional: t.3 })
}

/// True if a QP may go `from` -> `to` with the attributes of `mask` ([`STATE`] aside).
pub(crate) fn allowed(typ: QpType, from: QpState, to: QpState, mask: u32) -> bool {
    let given = mask & !STATE;
    transition(typ, from, to)
        .is_some_and(|t| given & t.required == t.required && given & !(t.required | t.optional) == 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    /// A word for each bit of a mask; `ibv_modify_qp(3)`.
    const NAMES: &str = "state cur_state en_sqd_async_notify access_flags pkey_index port qkey av path_mtu timeout \
        retry_cnt rnr_retry rq_psn max_rd_atomic alt_path min_rnr_timer sq_psn max_dest_rd_atomic path_mig_state cap \
        dest_qpn - - - - rate_limit";

    /// IBTA vol. 1, table 91. Every state also leads to RESET and ERR, with no attributes.
    #[test]
    fn transitions_and_their_attributes_are_those_of_the_specification() {
        use std::fmt::Write;
        let names = |mask: u32| -> String {
            let given = NAMES.split(' ').enumerate().filter(|(bit, _)| mask >> bit & 1 == 1);
            given.map(|(_, name)| format!(" {name}")).collect()
        };
        let all = [Reset, Init, Rtr, Rts, Sqd, Sqe, Err];
        let mut text = String::new();
        for typ in [QpType::Rc, QpType::Uc, QpType::Ud, QpType::XrcSend, QpType::XrcRecv] {
            writeln!(text, "{typ:?}").unwrap();
            for (from, to) in all.iter().flat_map(|&from| all.iter().map(move |&to| (from, to))) {
                match transition(typ, from, to) {
                    Some(t) if to == Reset || to == Err => assert_eq!((t.required, t.optional), (0, 0)),
                    Some(t) => {
                        writeln!(text, "  {from:?} -> {to:?}").unwrap();
                        writeln!(text, "    required:{}", names(t.required)).unwrap();
                        writeln!(text, "    optional:{}", names(t.optional)).unwrap();
                    }
                    None => assert!(to != Reset && to != Err, "{typ:?}: {from:?} -> {to:?}"),
                }
            }
        }
        insta::assert_snapshot!(text);
    }

    /// The kernel's table for the drivers of NICs (`qp_state_table`) has the same rules.
    #[test]
    fn a_drained_queue_takes_no_current_state_and_goes_on_without_a_new_rate() {
        for typ in [QpType::Rc, QpType::Uc, QpType::Ud, QpType::XrcSend] {
            assert!(allowed(typ, Sqd, Sqd, STATE) && !allowed(typ, Sqd, Sqd, STATE | CUR_STATE), "{typ:?}");
            assert!(allowed(typ, Sqd, Rts, STATE | CUR_STATE), "{typ:?}");
            assert!(!allowed(typ, Sqd, Rts, STATE | RATE_LIMIT) && !allowed(typ, Sqd, Sqd, RATE_LIMIT), "{typ:?}");
            assert!(allowed(typ, Rts, Rts, RATE_LIMIT), "{typ:?}");
        }
    }

    #[test]
    fn a_missing_or_foreign_attribute_is_refused() {
        let rtr = AV | PATH_MTU | DEST_QPN | RQ_PSN | MAX_DEST_RD_ATOMIC | MIN_RNR_TIMER;
        assert!(allowed(QpType::Rc, Init, Rtr, STATE | rtr));
        for bit in 0..21 {
            let b = 1 << bit;
            if rtr & b != 0 {
                assert!(!allowed(QpType::Rc, Init, Rtr, STATE | rtr & !b), "without bit {bit}");
            } else if b != STATE && (ALT_PATH | ACCESS_FLAGS | PKEY_INDEX) & b == 0 {
                assert!(!allowed(QpType::Rc, Init, Rtr, STATE | rtr | b), "with bit {bit}");
            }
        }
        assert!(!allowed(QpType::Rc, Rts, Err, STATE | QKEY));
    }
}
