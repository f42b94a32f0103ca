//! Encoded times and sizes of a path.

/// Bytes of a path MTU code 1..=5 (`IBV_MTU_256` .. `IBV_MTU_4096`); `None` for another code.
pub fn mtu_bytes(code: u8) -> Option<u32> {
    (1..=5).contains(&code).then(|| 128 << code)
}

/// Packets, and so PSNs, of a message of `len` bytes at `mtu` bytes a packet: at least 1.
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

/// The static rates of address vectors: `enum ibv_rate`, the multiple of 2.5 Gb/s, and Mb/s.
pub const RATES: [(i32, i32, i32); 23] = [
    (2, 1, 2500),
    (5, 2, 5000),
    (3, 4, 10_000),
    (6, 8, 20_000),
    (4, 12, 30_000),
    (7, 16, 40_000),
    (8, 24, 60_000),
    (9, 32, 80_000),
    (10, 48, 120_000),
    (11, 5, 14_062),
    (12, 22, 56_250),
    (13, 45, 112_500),
    (14, 67, 168_750),
    (15, 10, 25_781),
    (16, 41, 103_125),
    (17, 82, 206_250),
    (18, 123, 309_375),
    (19, 11, 28_125),
    (20, 20, 53_125),
    (21, 160, 425_000),
    (22, 240, 637_500),
    (23, 320, 850_000),
    (24, 480, 1_275_000),
];

/// Kilobits a second of a static rate; 0 for code 0, which is no limit. `None` if there is no such rate.
pub fn rate_kbps(rate: u8) -> Option<u32> {
    if rate == 0 {
        return Some(0);
    }
    RATES.iter().find(|r| r.0 == rate.into()).map(|r| r.2 as u32 * 1000)
}

/// The bits of a traffic class that select the treatment of a packet (RFC 2474).
const DSCP: u8 = 0xfc;
/// The other two bits, which report congestion (RFC 3168).
pub const ECN: u8 = 3;

/// The DSCP bits of packets to an address: those in its traffic class or, if they are 0, the class selector of its
/// service level (RFC 2474, 4.2.2), which stands for the priority of the level in the VLAN tags of Ethernet. Ethernet
/// has the levels 0 to 7.
pub fn class_of(traffic_class: u8, sl: u8) -> u8 {
    match traffic_class & DSCP {
        0 if sl < 8 => sl << 5,
        dscp => dscp,
    }
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

    #[test]
    fn rates_and_classes_are_those_of_the_field() {
        assert_eq!([0, 2, 7, 16].map(rate_kbps), [Some(0), Some(2_500_000), Some(40_000_000), Some(103_125_000)]);
        assert_eq!([1, 25, 255].map(rate_kbps), [None; 3]);
        // A traffic class comes first; its ECN bits are ignored; there are eight levels.
        assert_eq!([class_of(0, 0), class_of(0, 3), class_of(0, 7)], [0, 0x60, 0xe0]);
        assert_eq!([class_of(0x6a, 3), class_of(3, 3), class_of(0, 9)], [0x68, 0x60, 0]);
    }
}
