//! The two clocks a lease needs, read together and passed in.

use jiff::Timestamp;

/// One reading of the clocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Now {
    /// `CLOCK_BOOTTIME` in nanoseconds: what deadlines are measured by. Clock steps do not move it, suspend counts.
    pub boot_ns: u64,
    /// Wall clock in milliseconds since the Unix epoch: what people are shown.
    pub wall_ms: i64,
}

impl Now {
    /// The wall-clock time, in Unix milliseconds, at which `CLOCK_BOOTTIME` will show `boot_ns`.
    pub fn wall_at(self, boot_ns: u64) -> i64 {
        let ahead_ns = i128::from(boot_ns) - i128::from(self.boot_ns);
        self.wall_ms + i64::try_from(ahead_ns / 1_000_000).unwrap_or(i64::MAX / 4)
    }
}

/// Unix milliseconds as RFC 3339 in UTC, with milliseconds.
pub fn rfc3339(wall_ms: i64) -> String {
    match Timestamp::from_millisecond(wall_ms) {
        Ok(at) => format!("{at:.3}"),
        Err(_) => Timestamp::UNIX_EPOCH.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wall_clock_is_shown_with_milliseconds() {
        assert_eq!(rfc3339(1_700_000_000_123), "2023-11-14T22:13:20.123Z");
    }

    #[test]
    fn a_deadline_is_shown_on_the_wall_clock() {
        let now = Now { boot_ns: 5_000_000_000, wall_ms: 1_000 };
        assert_eq!(now.wall_at(7_500_000_000), 3_500);
        assert_eq!(now.wall_at(4_000_000_000), 0);
    }
}
