//! What a slow machine can spoil is done again, and not checked less.
//!
//! Some things can be seen in time only: while a short lease lasts, or before somebody looks by itself. A machine may stand
//! still for seconds between any two steps. So such a test finds out whether it was in time, and where it was not, what it
//! saw proves nothing and is done again; every time that it was, the whole is checked.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::time::Duration;

use nix::time::{ClockId, clock_gettime};

use super::witness::Witness;

/// How often luck may be against a test.
const TRIES: u32 = 10;

/// What the first attempt gives that was in luck; `misfortune` is what came in the way of the others, which give none.
#[track_caller]
pub fn in_luck<T>(misfortune: &str, mut attempt: impl FnMut(u32) -> Option<T>) -> T {
    match (0..TRIES).find_map(&mut attempt) {
        Some(seen) => seen,
        None => panic!("{TRIES} times in a row: {misfortune}"),
    }
}

/// What holds as long as the machine does not stand still: shown by one of several tries. A fault of ours spoils each of them;
/// of one that was spoilt, the words say how.
#[track_caller]
pub fn shown_once(what: &str, mut attempt: impl FnMut() -> Result<(), String>) {
    let mut spoilt = Vec::new();
    for _ in 0..TRIES {
        match attempt() {
            Ok(()) => return,
            Err(how) => spoilt.push(how),
        }
    }
    panic!("{what}, in none of {TRIES} tries: {spoilt:?}");
}

/// Plays something in which leases of so long run out or are kept. Where it fails and the machine stood still meanwhile, for
/// so long that whoever has to end its work before the lease may have been late, it says nothing: then it is played again,
/// with leases of twice the time.
#[track_caller]
pub fn in_peace(mut ttl: Duration, play: impl Fn(Duration)) {
    for is_last in [false, false, false, true] {
        let witness = Witness::start(&std::env::temp_dir());
        let played = catch_unwind(AssertUnwindSafe(|| play(ttl)));
        let stood_still = Duration::from_nanos(witness.stop().iter().map(|(from, to)| to - from).sum());
        match played {
            Ok(()) => return,
            // `leasefs run` has its command dead by a tenth of the TTL before the end.
            Err(failure) if is_last || stood_still < ttl / 20 => resume_unwind(failure),
            Err(_) => eprintln!("the machine stood still for {stood_still:?}: once more with twice {ttl:?}"),
        }
        ttl *= 2;
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
