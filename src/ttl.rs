//! How long a lease may stay without renewal: contract §5, "every lease has a finite TTL".

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// A lease's time to live: more than 0, at most 365 days.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub struct Ttl(Duration);

/// The text is no TTL; the message says what one looks like.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a TTL looks like 90s, 15m, 24h, 1h30m or 500ms, is more than 0 and at most 365d")]
pub struct BadTtl;

impl Ttl {
    /// 24 hours.
    pub const DEFAULT: Ttl = Ttl(Duration::from_secs(24 * 3600));
    /// 365 days.
    pub const MAX: Ttl = Ttl(Duration::from_secs(365 * 24 * 3600));

    /// Checks the bounds of §5.
    ///
    /// # Errors
    /// [`BadTtl`] for 0 or more than 365 days.
    pub fn new(duration: Duration) -> Result<Ttl, BadTtl> {
        if duration.is_zero() || duration > Self::MAX.0 { Err(BadTtl) } else { Ok(Ttl(duration)) }
    }

    /// From whole milliseconds, with the bounds of [`Ttl::new`].
    ///
    /// # Errors
    /// [`BadTtl`] for 0 or more than 365 days.
    pub fn from_millis(ms: u64) -> Result<Ttl, BadTtl> {
        Ttl::new(Duration::from_millis(ms))
    }

    /// In milliseconds.
    pub fn as_millis(self) -> u64 {
        u64::try_from(self.0.as_millis()).unwrap_or(u64::MAX)
    }

    /// In nanoseconds.
    pub fn as_nanos(self) -> u64 {
        u64::try_from(self.0.as_nanos()).unwrap_or(u64::MAX)
    }

    /// As a duration.
    pub fn as_duration(self) -> Duration {
        self.0
    }
}

impl Default for Ttl {
    fn default() -> Ttl {
        Ttl::DEFAULT
    }
}

impl FromStr for Ttl {
    type Err = BadTtl;

    /// Digits and a unit (`d`, `h`, `m`, `s`, `ms`), longest unit first, each at most once, nothing between.
    ///
    /// The form is narrower than `humantime`'s (no spaces, no `years`, no `15min`), which then does the arithmetic.
    fn from_str(text: &str) -> Result<Ttl, BadTtl> {
        let mut units = ["d", "h", "m", "s", "ms"].iter();
        let mut rest = text;
        while !rest.is_empty() {
            let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
            let (number, after) = rest.split_at(digits);
            let letters = after.bytes().take_while(u8::is_ascii_lowercase).count();
            let (unit, after) = after.split_at(letters);
            if number.is_empty() || !units.any(|known| *known == unit) {
                return Err(BadTtl);
            }
            rest = after;
        }
        Ttl::new(humantime::parse_duration(text).map_err(|_| BadTtl)?)
    }
}

impl fmt::Display for Ttl {
    /// In the form that [`Ttl::from_str`] reads.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut ms = self.as_millis();
        for (unit, size_ms) in [("h", 3_600_000), ("m", 60_000), ("s", 1_000), ("ms", 1)] {
            if ms >= size_ms {
                write!(f, "{}{unit}", ms / size_ms)?;
                ms %= size_ms;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_forms_of_the_contract_are_read() {
        for (text, ms) in [
            ("90s", 90_000),
            ("15m", 900_000),
            ("24h", 86_400_000),
            ("1h30m", 5_400_000),
            ("500ms", 500),
            ("365d", 31_536_000_000),
        ] {
            assert_eq!(text.parse::<Ttl>().map(Ttl::as_millis), Ok(ms), "{text}");
        }
    }

    #[test]
    fn anything_else_is_refused() {
        for text in [
            "",
            "0s",
            "0",
            "10",
            "-5s",
            "1.5h",
            "366d",
            "1h 30m",
            "30m1h",
            "1h1h",
            "s",
            "5x",
            "9999999999999999999h",
            " 1s",
            "1s ",
            "1S",
            "1y",
            "+1s",
            "1h-5m",
            "0h0m",
            "inf",
            "١s",
        ] {
            assert_eq!(text.parse::<Ttl>(), Err(BadTtl), "{text:?}");
        }
    }

    #[test]
    fn what_is_shown_can_be_read_again() {
        for ms in [1, 999, 1_000, 90_000, 5_400_000, 86_400_000, 31_536_000_000, 3_661_001] {
            let ttl = Ttl::from_millis(ms).unwrap();
            assert_eq!(ttl.to_string().parse(), Ok(ttl));
        }
    }
}
