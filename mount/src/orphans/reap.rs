//! Orders to look for proof of death now, and when they can be answered: once every orphan was judged by looks that began
//! after the order. An order proves nothing by itself; it only spares the wait for the next look.

use std::time::Duration;

use parking_lot::{Condvar, Mutex};

/// The orders, by their numbers.
#[derive(Default)]
pub struct Reap {
    state: Mutex<State>,
    ordered: Condvar,
}

#[derive(Default)]
struct State {
    /// Came since the last look began.
    new: Vec<u64>,
    /// Came before it.
    looked_for: Vec<u64>,
    /// There are no orphans any more.
    ended: bool,
}

impl Reap {
    /// An order came; false where there is nothing to look for, so that it can be answered at once.
    pub fn order(&self, number: u64) -> bool {
        let mut state = self.state.lock();
        if !state.ended {
            state.new.push(number);
            self.ordered.notify_all();
        }
        !state.ended
    }

    /// A look begins; whether any order is new.
    pub(super) fn begin_look(&self) -> bool {
        let mut state = self.state.lock();
        let new = std::mem::take(&mut state.new);
        let is_any = !new.is_empty();
        state.looked_for.extend(new);
        is_any
    }

    /// Every orphan was judged; the orders that this answers.
    pub(super) fn looked(&self) -> Vec<u64> {
        std::mem::take(&mut self.state.lock().looked_for)
    }

    /// There are no orphans, and none come to be; the orders that this answers.
    pub(super) fn end(&self) -> Vec<u64> {
        let mut state = self.state.lock();
        state.ended = true;
        let State { new, looked_for, .. } = &mut *state;
        looked_for.drain(..).chain(new.drain(..)).collect()
    }

    /// Sleeps for so long, or until an order comes.
    pub(super) fn sleep(&self, pause: Duration) {
        let mut state = self.state.lock();
        if state.new.is_empty() {
            self.ordered.wait_for(&mut state, pause);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_is_answered_by_a_look_that_began_after_it() {
        let reap = Reap::default();
        assert!(!reap.begin_look());
        assert!(reap.order(1));
        assert!(reap.looked().is_empty(), "it came in the middle of the look");
        assert!(reap.begin_look());
        assert!(reap.order(2));
        assert_eq!(reap.looked(), [1]);
        assert_eq!(reap.end(), [2]);
        assert!(!reap.order(3), "there is nothing to look for");
    }

    #[test]
    fn an_order_ends_the_sleep() {
        let reap = Reap::default();
        reap.order(1);
        // Would outlast any test.
        reap.sleep(Duration::from_secs(1_000_000));
    }
}
