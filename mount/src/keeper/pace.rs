//! How soon the next server is started, and when to give up.

use std::time::Duration;

/// A server that lived this long could stay up.
const STAYED_UP: Duration = Duration::from_secs(10);
/// Ends that are not yet a pattern.
const FREE: u32 = 2;
/// The first pause; each is twice the one before.
const FIRST: Duration = Duration::from_millis(100);
/// The longest pause.
const LONGEST: Duration = Duration::from_secs(10);

/// Counts how servers ended.
#[derive(Debug)]
pub struct Pace {
    failures: u32,
    unready: u32,
    limit: u32,
}

impl Pace {
    /// Gives up after `limit` servers in a row that did not get ready.
    pub fn new(limit: u32) -> Pace {
        Pace { failures: 0, unready: 0, limit }
    }

    /// Servers in a row that did not get ready.
    pub fn unready(&self) -> u32 {
        self.unready
    }

    /// A server ended that lived so long, may have been ready, and may have been killed (by `SIGKILL`, which is no
    /// fault of its own): how long to wait before the next. None to give up.
    pub fn next(&mut self, was_ready: bool, killed: bool, lived: Duration) -> Option<Duration> {
        self.unready = if was_ready { 0 } else { self.unready + 1 };
        if self.unready >= self.limit {
            return None;
        }
        if lived >= STAYED_UP || was_ready && killed {
            self.failures = 0;
            if killed {
                return Some(Duration::ZERO);
            }
        }
        self.failures += 1;
        let doublings = match self.failures.checked_sub(FREE + 1) {
            None => return Some(Duration::ZERO),
            Some(doublings) => doublings.min(16),
        };
        Some((FIRST * 2_u32.pow(doublings)).min(LONGEST))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOON: Duration = Duration::from_millis(50);

    #[test]
    fn a_server_that_is_killed_is_replaced_at_once_however_often() {
        let mut pace = Pace::new(5);
        for _ in 0..1_000 {
            assert_eq!(pace.next(true, true, SOON), Some(Duration::ZERO));
        }
    }

    #[test]
    fn one_that_cannot_stay_up_is_waited_for_longer_and_longer() {
        let mut pace = Pace::new(5);
        let pauses: Vec<u128> =
            (0..12).map(|_| pace.next(true, false, SOON).expect("it gets ready").as_millis()).collect();
        assert_eq!(pauses, [0, 0, 100, 200, 400, 800, 1600, 3200, 6400, 10_000, 10_000, 10_000]);
        assert_eq!(pace.next(true, false, STAYED_UP), Some(Duration::ZERO), "it stayed up");
    }

    #[test]
    fn one_that_never_gets_ready_is_given_up() {
        let mut pace = Pace::new(3);
        assert_eq!(pace.next(false, true, SOON), Some(Duration::ZERO));
        assert_eq!(pace.next(false, false, SOON), Some(Duration::ZERO));
        assert_eq!(pace.next(true, false, SOON), Some(FIRST), "in a row");
        assert_eq!(pace.next(false, false, SOON), Some(FIRST * 2));
        assert_eq!(pace.next(false, false, SOON), Some(FIRST * 4));
        assert_eq!(pace.next(false, false, SOON), None);
        assert_eq!(pace.unready(), 3);
    }
}
