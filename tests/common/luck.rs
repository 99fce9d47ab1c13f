//! What a slow machine can spoil is done again, and not checked less.
//!
//! Some things can be seen in time only: while a short lease lasts, or before somebody looks by itself. A machine may stand
//! still for seconds between any two steps. So such a test finds out whether it was in time, and where it was not, what it
//! saw proves nothing and is done again; every time that it was, the whole is checked.

use std::time::Duration;

use nix::time::{ClockId, clock_gettime};

/// How often luck may be against a test.
const TRIES: u32 = 6;

/// What the first attempt gives that was in luck; `misfortune` is what came in the way of the others, which give none.
#[track_caller]
pub fn in_luck<T>(misfortune: &str, mut attempt: impl FnMut(u32) -> Option<T>) -> T {
    match (0..TRIES).find_map(&mut attempt) {
        Some(seen) => seen,
        None => panic!("{TRIES} times in a row: {misfortune}"),
    }
}

/// A time to live for an attempt: longer with each, as the machine was too slow for the one before.
pub fn longer(ttl: Duration, attempt: u32) -> Duration {
    ttl * 2_u32.pow(attempt)
}

/// As an option or an attribute is given it.
pub fn shown(ttl: Duration) -> String {
    format!("{}ms", ttl.as_millis())
}

/// Seconds on the clock that Python's `time.monotonic` reads.
pub fn monotonic() -> f64 {
    let time = clock_gettime(ClockId::CLOCK_MONOTONIC).expect("a clock");
    Duration::from(time).as_secs_f64()
}
