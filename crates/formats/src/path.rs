//! Encoded times and sizes of a path.

/// Bytes of a path MTU code 1..=5 (`IBV_MTU_256` .. `IBV_MTU_4096`); `None` for another code.
pub fn mtu_bytes(code: u8) -> Option<u32> {
    (1..=5).contains(&code).then(|| 128 << code)
}

/// Packets, and so PSNs, that a message of `len` bytes takes at `mtu` bytes a packet: at least 1.
pub fn psn_count(len: u64, mtu: u32) -> u32 {
    (len.div_ceil(u64::from(mtu)) as u32).max(1)
}

/// Local ACK timeout of code 0..=31, in nanoseconds: 4.096 us x 2^code; code 0 waits forever.
/// IBTA vol. 1, 9.9.2.1.1; `ibv_modify_qp(3)` field `timeout`.
pub fn ack_timeout_ns(code: u8) -> Option<u64> {
    (code != 0).then(|| 4096u64 << (code & 31))
}

/// RNR NAK timer of code 0..=31, in nanoseconds. IBTA vol. 1, table 46.
pub fn rnr_timer_ns(code: u8) -> u64 {
    const HUNDREDTH_MS: [u32; 32] = [
        65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072,
        4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
    ];
    u64::from(HUNDREDTH_MS[usize::from(code & 31)]) * 10_000
}

/// Credits of each code but [`NO_CREDITS`]. IBTA vol. 1, table 47.
const CREDITS: [u16; 31] = [
    0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144,
    8192, 12288, 16384, 24576, 32768,
];
/// The code of a responder that gives no credits: requesters need none.
pub const NO_CREDITS: u8 = 31;

/// Code of the end-to-end credits for `receives` posted receives, rounded down.
pub fn credit_code(receives: u32) -> u8 {
    CREDITS.partition_point(|&c| u32::from(c) <= receives) as u8 - 1
}

/// Receives that a credit code promises; `None`: none are promised and none are needed.
pub fn credits(code: u8) -> Option<u32> {
    CREDITS.get(usize::from(code & 31)).map(|&c| c.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_mean_what_the_specification_says() {
        assert_eq!(mtu_bytes(1), Some(256));
        assert_eq!(mtu_bytes(5), Some(4096));
        assert_eq!((mtu_bytes(0), mtu_bytes(6)), (None, None));
        assert_eq!(ack_timeout_ns(0), None);
        assert_eq!(ack_timeout_ns(14), Some(67_108_864));
        assert_eq!(rnr_timer_ns(0), 655_360_000);
        assert_eq!(rnr_timer_ns(12), 640_000);
        assert_eq!(rnr_timer_ns(31), 491_520_000);
    }

    #[test]
    fn credits_are_rounded_down() {
        for n in [0, 1, 4, 5, 6, 7, 500, 32_768, 100_000] {
            let code = credit_code(n);
            assert!(credits(code).is_some_and(|c| c <= n));
            assert!(credits(code + 1).is_none_or(|c| c > n), "{n}");
        }
        assert_eq!(credits(NO_CREDITS), None);
    }

    #[test]
    fn an_empty_message_takes_one_packet() {
        assert_eq!((psn_count(0, 1024), psn_count(1024, 1024), psn_count(1025, 1024)), (1, 1, 2));
    }
}
