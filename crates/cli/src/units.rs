//! Rates and times as people write them.

use std::time::Duration;

const MAX_BURST_S: u64 = unirdma_ipc::vrnic::MAX_BURST_US / 1_000_000;

/// Why a text is no number or time. Each text says what to write.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UnitError {
    #[error("write a number with K, M, G or T, as 500M or 2.5G, or `none`")]
    Rate,
    #[error("the range is 1 to 1000T; `none` is no limit")]
    RateRange,
    #[error("write a number, or `none`")]
    Most,
    #[error("write a time with us, ms or s, as 500us or 10ms")]
    Time,
    #[error("the longest time is {} s", MAX_BURST_S)]
    TimeRange,
    #[error("give seconds from 0.1 to 3600")]
    Interval,
    #[error("`{0}` is no time; write 90m, 12h or 30d")]
    Lifetime(String),
    #[error("`{0}` is no time; write 500ms, 5s or 2m, up to 1h")]
    Duration(String),
    #[error("`{0}` is no time; write 30, 500ms or 2m, up to 1h, or `none`")]
    Timeout(String),
}

/// A number with K, M, G or T for powers of 1000, or `none`, which is 0.
pub fn rate(s: &str) -> Result<u64, UnitError> {
    if s == "none" {
        return Ok(0);
    }
    let (digits, unit) = s.split_at(s.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(s.len()));
    let factor = match unit {
        "" => 1e0,
        "K" | "k" => 1e3,
        "M" => 1e6,
        "G" => 1e9,
        "T" => 1e12,
        _ => return Err(UnitError::Rate),
    };
    let n: f64 = digits.parse().map_err(|_| UnitError::Rate)?;
    let n = n * factor;
    if (1.0..=1e15).contains(&n) { Ok(n as u64) } else { Err(UnitError::RateRange) }
}

/// A rate in bits per second: as [`rate`], also with its unit, as `100 Mbit/s`.
pub fn bits(s: &str) -> Result<u64, UnitError> {
    let number = s.strip_suffix("bit/s").or_else(|| s.strip_suffix("bit")).or_else(|| s.strip_suffix("bps"));
    let number = number.unwrap_or(s);
    let (digits, unit) =
        number.split_at(number.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(number.len()));
    rate(&format!("{digits}{}", unit.trim()))
}

/// A number, or `none`, which is the largest number.
pub fn most(s: &str) -> Result<u64, UnitError> {
    if s == "none" { Ok(u64::MAX) } else { s.parse().map_err(|_| UnitError::Most) }
}

/// A whole number and its unit.
fn number_and_unit(s: &str) -> (Option<u64>, &str) {
    let (digits, unit) = s.split_at(s.find(|c: char| !c.is_ascii_digit()).unwrap_or(s.len()));
    (digits.parse().ok(), unit)
}

/// A time up to an hour, as `500ms`, `5s` or `2m`.
pub fn duration(s: &str) -> Result<Duration, UnitError> {
    const MAX_MS: u64 = 3_600_000;
    let (number, unit) = number_and_unit(s);
    let ms = match unit {
        "ms" => Some(1),
        "s" => Some(1_000),
        "m" => Some(60_000),
        "h" => Some(MAX_MS),
        _ => None,
    };
    let time = ms.zip(number).and_then(|(ms, n)| n.checked_mul(ms)).filter(|ms| *ms <= MAX_MS);
    time.map(Duration::from_millis).ok_or_else(|| UnitError::Duration(s.into()))
}

/// A limit of time: seconds, as [`duration`], or `none`, which is the longest time.
pub fn timeout(s: &str) -> Result<Duration, UnitError> {
    if s == "none" {
        return Ok(Duration::MAX);
    }
    let seconds = format!("{s}s");
    let is_number = s.bytes().all(|b| b.is_ascii_digit());
    duration(if is_number { &seconds } else { s }).map_err(|_| UnitError::Timeout(s.into()))
}

/// A time with us, ms or s, in microseconds.
pub fn micros(s: &str) -> Result<u64, UnitError> {
    let (number, unit) = number_and_unit(s);
    let factor = match unit {
        "us" => 1,
        "ms" => 1000,
        "s" => 1_000_000,
        _ => return Err(UnitError::Time),
    };
    let n = number.ok_or(UnitError::Time)?;
    let max = unirdma_ipc::vrnic::MAX_BURST_US;
    n.checked_mul(factor).filter(|n| *n <= max).ok_or(UnitError::TimeRange)
}

/// The interval of a display in seconds, as `0.5`.
pub fn interval(s: &str) -> Result<Duration, UnitError> {
    let seconds = s.parse().ok().filter(|s| (0.1..=3600.0).contains(s));
    seconds.map(Duration::from_secs_f64).ok_or(UnitError::Interval)
}

/// A lifetime, as `90m`, `12h` or `30d`, in seconds.
pub fn lifetime(s: &str) -> Result<u64, UnitError> {
    let wrong = || UnitError::Lifetime(s.into());
    let unit = match s.chars().last() {
        Some('m') => 60,
        Some('h') => 3_600,
        Some('d') => 86_400,
        _ => return Err(wrong()),
    };
    let number: u64 = s[..s.len() - 1].parse().map_err(|_| wrong())?;
    number.checked_mul(unit).filter(|s| (1..=u64::from(u32::MAX)).contains(s)).ok_or_else(wrong)
}

/// A count with a prefix for a power of 1000, and a space: `2.5 G`.
pub fn decimal(n: u64) -> String {
    for (factor, unit) in [(1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "K")] {
        if n as f64 >= factor {
            return format!("{} {unit}", (n as f64 / factor * 1000.0).round() / 1000.0);
        }
    }
    format!("{n} ")
}

/// Nanoseconds as text with a unit.
pub fn seconds(ns: u64) -> String {
    match ns {
        0..1_000_000 => format!("{} us", ns / 1000),
        1_000_000..1_000_000_000 => format!("{:.1} ms", ns as f64 / 1e6),
        _ => format!("{:.2} s", ns as f64 / 1e9),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_people_write_is_understood_or_refused() {
        for (text, n) in [("none", 0), ("1", 1), ("500M", 500_000_000), ("2.5G", 2_500_000_000), ("10k", 10_000)] {
            assert_eq!(rate(text), Ok(n), "{text}");
        }
        for text in ["", "0", "-1", "5X", "1e9", "M", "2000T", "1.2.3G", "10 G"] {
            assert!(rate(text).is_err(), "{text}");
        }
        for (text, n) in
            [("10G", 10_000_000_000), ("100 Mbit/s", 100_000_000), ("2.5 Gbit", 2_500_000_000), ("1kbps", 1_000)]
        {
            assert_eq!(bits(text), Ok(n), "{text}");
        }
        assert_eq!((bits("none"), bits("64 bit/s")), (Ok(0), Ok(64)));
        for text in ["", "bit/s", "10 GB/s", "10 G x", "G bit/s", "Mbit/s"] {
            assert!(bits(text).is_err(), "{text}");
        }
        for (text, n) in [("500us", 500), ("10ms", 10_000), ("1s", 1_000_000), ("0us", 0)] {
            assert_eq!(micros(text), Ok(n), "{text}");
        }
        for text in ["", "5", "ms", "1h", "99999999999999999999s", "11s"] {
            assert!(micros(text).is_err(), "{text}");
        }
        assert_eq!((most("none"), most("7")), (Ok(u64::MAX), Ok(7)));
        assert!(most("").is_err() && most("-1").is_err() && most("1K").is_err());
        assert_eq!((decimal(2_500_000_000), decimal(7)), ("2.5 G".into(), "7 ".into()));
    }

    #[test]
    fn limits_of_time_are_seconds_or_have_units() {
        for (text, ms) in [("0", 0), ("30", 30_000), ("500ms", 500), ("2m", 120_000), ("3600", 3_600_000)] {
            assert_eq!(timeout(text), Ok(Duration::from_millis(ms)), "{text}");
        }
        assert_eq!(timeout("none"), Ok(Duration::MAX));
        for bad in ["", "-1", "1.5", "3601", "2h", "s", "99999999999999999999"] {
            assert!(timeout(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn intervals_are_seconds() {
        assert_eq!(interval("0.5"), Ok(Duration::from_millis(500)));
        for bad in ["", "0", "-1", "x", "1e9", "nan", "inf"] {
            assert!(interval(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn lifetimes_have_units() {
        assert_eq!((lifetime("90m"), lifetime("2h"), lifetime("30d")), (Ok(5_400), Ok(7_200), Ok(2_592_000)));
        for bad in ["", "5", "d", "-1d", "1y", "99999999999999999d", "0m", "é"] {
            assert!(lifetime(bad).is_err(), "{bad}");
        }
    }
}
