//! The only place where clocks are read.

use std::time::{SystemTime, UNIX_EPOCH};

use leasefs::Now;
use nix::time::{ClockId, clock_gettime};

/// Between the readings of two clocks that count as one.
const TOGETHER_NS: u64 = 500_000;
/// A machine on which they never do has to go on as well.
const TRIES: u32 = 8;

/// Reads both clocks, again where this process had to stop in between: what is shown of a lease would be off by that.
pub fn now() -> Now {
    let mut before = boot_ns();
    let mut tries = 1;
    loop {
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let boot_ns = boot_ns();
        if boot_ns.saturating_sub(before) <= TOGETHER_NS || tries == TRIES {
            return Now { boot_ns, wall_ms: i64::try_from(wall.as_millis()).unwrap_or(i64::MAX) };
        }
        before = boot_ns;
        tries += 1;
    }
}

/// `CLOCK_BOOTTIME` in nanoseconds: suspend counts, clock steps do not.
pub fn boot_ns() -> u64 {
    // The clock has existed since Linux 2.6.39; without it there is no lease time, and 0 would let none expire.
    let time = clock_gettime(ClockId::CLOCK_BOOTTIME)
        .map(|time| time.tv_sec().cast_unsigned() * 1_000_000_000 + time.tv_nsec().cast_unsigned());
    time.unwrap_or(0)
}

/// Tells this boot from every other.
pub fn boot_id() -> std::io::Result<String> {
    Ok(std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned())
}
