//! The only place where clocks are read.

use std::time::{SystemTime, UNIX_EPOCH};

use leasefs::Now;
use nix::time::{ClockId, clock_gettime};

/// Reads both clocks.
pub fn now() -> Now {
    let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Now { boot_ns: boot_ns(), wall_ms: i64::try_from(wall.as_millis()).unwrap_or(i64::MAX) }
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
