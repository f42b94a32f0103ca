//! The QP state machine as a table: which transitions exist and which attributes each takes.
//! IBTA vol. 1, 10.3.1 and table 91; `ibv_modify_qp(3)`.

use unirdma_formats::QpState::{self, Err, Init, Reset, Rtr, Rts, Sqd};
use unirdma_formats::attr_mask::*;

/// One transition of an RC QP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transition {
    /// Attributes that must be given.
    pub required: u32,
    /// Attributes that may be given.
    pub optional: u32,
}

const RTS_OPTIONAL: u32 = CUR_STATE | ALT_PATH | ACCESS_FLAGS | MIN_RNR_TIMER | PATH_MIG_STATE | RATE_LIMIT;

/// (from, to, required, optional) of every transition but those to RESET and ERR, which every state has.
const RC: &[(QpState, QpState, u32, u32)] = &[
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
    (Sqd, Rts, 0, RTS_OPTIONAL),
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
            | CUR_STATE
            | PKEY_INDEX
            | ACCESS_FLAGS
            | MIN_RNR_TIMER
            | PATH_MIG_STATE,
    ),
];

/// The transition of an RC QP from `from` to `to`; `None` if there is none.
pub fn transition(from: QpState, to: QpState) -> Option<Transition> {
    if to == Reset || to == Err {
        return Some(Transition { required: 0, optional: 0 });
    }
    RC.iter().find(|t| (t.0, t.1) == (from, to)).map(|t| Transition { required: t.2, optional: t.3 })
}

/// True if an RC QP may go `from` -> `to` with the attributes of `mask` ([`STATE`] aside).
pub(crate) fn allowed(from: QpState, to: QpState, mask: u32) -> bool {
    let given = mask & !STATE;
    transition(from, to).is_some_and(|t| given & t.required == t.required && given & !(t.required | t.optional) == 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use unirdma_formats::QpState::Sqe;

    /// The whole matrix: a letter for each pair, `.` where there is no transition.
    #[test]
    fn the_matrix_is_that_of_the_specification() {
        let all = [Reset, Init, Rtr, Rts, Sqd, Sqe, Err];
        let matrix: Vec<String> = all
            .iter()
            .map(|&from| all.iter().map(|&to| if transition(from, to).is_some() { 'x' } else { '.' }).collect())
            .collect();
        #[rustfmt::skip]
        let expected = [
            // Reset Init Rtr Rts Sqd Sqe Err
            "xx....x", // Reset
            "xxx...x", // Init
            "x..x..x", // Rtr
            "x..xx.x", // Rts
            "x..xx.x", // Sqd
            "x.....x", // Sqe
            "x.....x", // Err
        ];
        assert_eq!(matrix, expected);
    }

    #[test]
    fn a_missing_or_foreign_attribute_is_refused() {
        let rtr = AV | PATH_MTU | DEST_QPN | RQ_PSN | MAX_DEST_RD_ATOMIC | MIN_RNR_TIMER;
        assert!(allowed(Init, Rtr, STATE | rtr));
        for bit in 0..21 {
            let b = 1 << bit;
            if rtr & b != 0 {
                assert!(!allowed(Init, Rtr, STATE | rtr & !b), "without bit {bit}");
            } else if b != STATE && (ALT_PATH | ACCESS_FLAGS | PKEY_INDEX) & b == 0 {
                assert!(!allowed(Init, Rtr, STATE | rtr | b), "with bit {bit}");
            }
        }
        assert!(!allowed(Rts, Err, STATE | QKEY));
    }
}
