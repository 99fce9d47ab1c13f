//! A linearizability check of a lease register: one key, many clients, one order that explains every answer.
//!
//! Wing and Gong's search with memoisation, in its just-in-time form: the events are walked in time, and the set of all
//! configurations (a state of the register, plus the calls in flight that took effect already) is kept. A call must have
//! taken effect when it returns; if no configuration allows that, no order explains the history. Where nothing is in
//! flight only states are left, so a history is split at its quiescent points by itself and the cost grows with its length only.
//!
//! Calls that change nothing take effect as soon as they can: their place is irrelevant to all others. So do those that
//! could only have changed what is over for good.
use std::collections::HashSet;
use std::fmt;

use crate::register::{Act, State};

/// A call with the interval in which it took effect.
#[derive(Clone, Debug)]
pub struct Timed {
    /// Not before.
    pub from: u64,
    /// Not after.
    pub to: u64,
    /// What.
    pub act: Act,
    /// The call that must take effect first (by its place in the list), where the times alone do not say it.
    pub after: Option<usize>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Config {
    state: State,
    /// Calls in flight that took effect, sorted.
    done: Vec<usize>,
}

impl Config {
    fn has(&self, call: usize) -> bool {
        self.done.binary_search(&call).is_ok()
    }

    fn with(mut self, call: usize) -> Config {
        if let Err(at) = self.done.binary_search(&call) {
            self.done.insert(at, call);
        }
        self
    }

    /// Whether what must come before this call has taken effect.
    fn is_ready(&self, call: &Timed, in_flight: &[usize]) -> bool {
        call.after.is_none_or(|first| self.has(first) || !in_flight.contains(&first))
    }

    /// Lets all of these calls take effect that can without changing anything.
    fn reading(mut self, history: &[Timed], in_flight: &[usize], calls: &[usize]) -> Config {
        for &call in calls {
            let timed = &history[call];
            let over = self.state.is_over(&timed.act) && self.is_ready(timed, in_flight);
            if over || self.state.reads(&timed.act) == Some(true) {
                self = self.with(call);
            }
        }
        self
    }
}

/// What a check looked at.
#[derive(Clone, Copy, Debug, Default)]
pub struct Checked {
    /// Calls.
    pub calls: usize,
    /// The most configurations there were at once.
    pub widest: usize,
    /// Instants at which nothing was in flight.
    pub quiescent: usize,
}

/// No order explains the history.
#[derive(Clone, Debug)]
pub struct NotLinearizable {
    /// The call that cannot have answered as it did, by its place in the list.
    pub call: usize,
    /// When it had to have taken effect.
    pub at: u64,
    /// What the register may have been then.
    pub states: String,
}

impl fmt::Display for NotLinearizable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "call {} has no place in any order; the register was one of: {}", self.call, self.states)
    }
}

/// Checks the history of one key, which starts with a key that never was.
pub fn check(history: &[Timed]) -> Result<Checked, NotLinearizable> {
    // At one instant all beginnings come before all ends: calls that touch overlap.
    let mut events: Vec<(u64, bool, usize)> = Vec::with_capacity(history.len() * 2);
    for (at, call) in history.iter().enumerate() {
        events.push((call.from, false, at));
        events.push((call.to.max(call.from), true, at));
    }
    events.sort_unstable();
    let mut checked = Checked { calls: history.len(), ..Checked::default() };
    let mut in_flight: Vec<usize> = Vec::new();
    let mut configs = HashSet::from([Config { state: State::default(), done: Vec::new() }]);
    for (time, is_end, call) in events {
        if !is_end {
            in_flight.push(call);
            configs = configs.into_iter().map(|config| config.reading(history, &in_flight, &[call])).collect();
            continue;
        }
        let next = take_effect(history, &in_flight, &configs, call);
        if next.is_empty() {
            let states: HashSet<String> = configs.iter().map(|config| format!("{:?}", config.state)).collect();
            let states = states.into_iter().take(4).collect::<Vec<_>>().join("; ");
            return Err(NotLinearizable { call, at: time, states });
        }
        in_flight.retain(|&other| other != call);
        checked.widest = checked.widest.max(next.len());
        checked.quiescent += usize::from(in_flight.is_empty());
        configs = next;
    }
    Ok(checked)
}

/// The configurations in which this call took effect, reached from those by letting calls in flight take effect.
fn take_effect(history: &[Timed], in_flight: &[usize], from: &HashSet<Config>, call: usize) -> HashSet<Config> {
    let mut seen: HashSet<Config> = HashSet::new();
    let mut todo: Vec<Config> = from.iter().cloned().collect();
    let mut reached = HashSet::new();
    while let Some(config) = todo.pop() {
        if config.has(call) {
            let done = config.done.iter().copied().filter(|&other| other != call).collect();
            reached.insert(Config { state: config.state, done });
            continue;
        }
        for &other in in_flight {
            let timed = &history[other];
            if config.has(other) || !config.is_ready(timed, in_flight) || config.state.reads(&timed.act).is_some() {
                continue;
            }
            for state in config.state.after(&timed.act) {
                let done = config.done.clone();
                let next = Config { state, done }.with(other).reading(history, in_flight, in_flight);
                if seen.insert(next.clone()) {
                    todo.push(next);
                }
            }
        }
    }
    reached
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::register::{Commits, LeaseId};

    fn timed(from: u64, to: u64, act: Act) -> Timed {
        Timed { from, to, act, after: None }
    }

    fn grant(from: u64, to: u64, lease: LeaseId, known: u64) -> Timed {
        timed(from, to, Act::Grant { lease, known, create: false, maybe: false })
    }

    fn create(from: u64, to: u64, lease: LeaseId, known: u64) -> Timed {
        timed(from, to, Act::Grant { lease, known, create: true, maybe: false })
    }

    fn release(from: u64, to: u64, lease: LeaseId) -> Timed {
        timed(from, to, Act::Release { lease })
    }

    fn deny(from: u64, to: u64) -> Timed {
        timed(from, to, Act::Deny { create: false, share: false })
    }

    fn accepted(history: &[Timed]) {
        check(history).unwrap_or_else(|e| panic!("{e}"));
    }

    fn rejected(history: &[Timed], call: usize) {
        let error = check(history).expect_err("this history is wrong");
        assert_eq!(error.call, call, "{error}");
    }

    #[test]
    fn accepts_claims_one_after_another() {
        accepted(&[grant(0, 2, 1, 1), deny(3, 4), release(5, 6, 1), grant(7, 8, 2, 2), release(9, 10, 2)]);
    }

    #[test]
    fn accepts_what_overlap_explains() {
        // The denial and the second grant both began before the release returned.
        accepted(&[grant(0, 2, 1, 1), release(5, 9, 1), deny(4, 10), grant(6, 8, 2, 2), release(11, 12, 2)]);
    }

    #[test]
    fn rejects_a_double_grant() {
        rejected(&[grant(0, 2, 1, 1), grant(3, 4, 2, 2), release(5, 6, 1)], 1);
        // Also when the first holder was only proven by a later read of its handle.
        let own = timed(6, 7, Act::Own { lease: 1, epoch: 1 });
        rejected(&[grant(0, 2, 1, 1), grant(3, 5, 2, 2), own, release(8, 9, 1)], 1);
    }

    #[test]
    fn rejects_an_epoch_told_twice_or_skipped() {
        rejected(&[grant(0, 1, 1, 1), release(2, 3, 1), grant(4, 5, 2, 1)], 2);
        rejected(&[grant(0, 1, 1, 1), release(2, 3, 1), grant(4, 5, 2, 3)], 2);
        rejected(&[grant(0, 1, 1, 2)], 0);
    }

    #[test]
    fn rejects_a_denial_of_a_free_key() {
        rejected(&[grant(0, 1, 1, 1), release(2, 3, 1), deny(4, 5)], 2);
        rejected(&[deny(0, 1)], 0);
        // Shares refuse an exclusive claim, and not another share.
        let share = timed(0, 1, Act::Share { lease: 1, maybe: false });
        accepted(&[share.clone(), deny(2, 3)]);
        rejected(&[share, timed(2, 3, Act::Deny { create: false, share: true })], 1);
    }

    #[test]
    fn rejects_a_changed_epoch() {
        let renewed = timed(2, 3, Act::Own { lease: 1, epoch: 2 });
        rejected(&[grant(0, 1, 1, 1), renewed], 1);
        rejected(&[grant(0, 1, 1, 1), timed(2, 3, Act::Observe { epoch: 0 })], 1);
    }

    #[test]
    fn a_killed_claimer_may_have_got_it_or_not() {
        let killed = timed(0, 9, Act::Grant { lease: 1, known: 0, create: false, maybe: true });
        let gone = Timed { after: Some(0), ..release(0, 9, 1) };
        accepted(&[killed.clone(), gone.clone(), deny(3, 4), grant(10, 11, 2, 2), release(12, 13, 2)]);
        accepted(&[killed.clone(), gone.clone(), grant(10, 11, 2, 1), release(12, 13, 2)]);
        // Its lease ends with it.
        rejected(&[killed, gone, deny(10, 11)], 2);
    }

    #[test]
    fn expiry_happens_in_its_window_and_not_later() {
        let expire = Timed { after: Some(0), ..timed(100, 200, Act::Expire { lease: 1 }) };
        let late = |from, to| timed(from, to, Act::Own { lease: 1, epoch: 1 });
        let lost = |from, to| timed(from, to, Act::Lost { lease: 1 });
        accepted(&[grant(0, 1, 1, 1), expire.clone(), late(150, 151), lost(152, 153)]);
        accepted(&[grant(0, 1, 1, 1), expire.clone(), grant(2, 150, 2, 2), lost(152, 153), release(154, 155, 2)]);
        rejected(&[grant(0, 1, 1, 1), expire.clone(), lost(98, 99)], 2);
        rejected(&[grant(0, 1, 1, 1), expire.clone(), late(201, 202)], 2);
        rejected(&[grant(0, 1, 1, 1), expire.clone(), grant(2, 99, 2, 2)], 2);
        rejected(&[grant(0, 1, 1, 1), expire, deny(201, 202)], 2);
    }

    #[test]
    fn rejects_a_stale_commit() {
        let draft = |from, to| timed(from, to, Act::Draft { lease: 1, maybe: false });
        let commit = |from, to| timed(from, to, Act::Commit { lease: 1, maybe: false });
        let end = |from, to| timed(from, to, Act::DraftEnd { lease: 1, commits: Commits::No });
        let expire = Timed { after: Some(0), ..timed(100, 200, Act::Expire { lease: 1 }) };
        accepted(&[grant(0, 1, 1, 1), draft(2, 3), commit(4, 5), end(6, 7), release(8, 9, 1)]);
        // Late, but nobody came in between: the parent may record it.
        accepted(&[grant(0, 1, 1, 1), release(2, 3, 1), draft(4, 5), commit(6, 7), end(8, 9)]);
        // The draft keeps the key.
        rejected(&[grant(0, 1, 1, 1), release(2, 3, 1), draft(4, 5), grant(6, 7, 2, 2), end(8, 9)], 3);
        accepted(&[grant(0, 1, 1, 1), release(2, 3, 1), draft(4, 5), deny(6, 7), end(8, 9)]);
        // Superseded, expired, or done twice.
        rejected(&[grant(0, 1, 1, 1), release(2, 3, 1), grant(4, 5, 2, 2), draft(6, 7)], 3);
        rejected(&[grant(0, 1, 1, 1), release(2, 3, 1), grant(4, 5, 2, 2), commit(6, 7)], 3);
        rejected(&[grant(0, 1, 1, 1), expire, draft(2, 3), commit(201, 202), end(203, 204)], 3);
        rejected(&[grant(0, 1, 1, 1), draft(2, 3), commit(4, 5), end(6, 7), commit(8, 9)], 4);
    }

    #[test]
    fn a_finished_key_refuses_create_and_takes_a_lock() {
        let draft = timed(2, 3, Act::Draft { lease: 1, maybe: false });
        let end = timed(4, 5, Act::DraftEnd { lease: 1, commits: Commits::Yes });
        let done = [grant(0, 1, 1, 1), draft, end, release(6, 7, 1)];
        let then = |more: &[Timed]| [&done[..], more].concat();
        accepted(&then(&[timed(8, 9, Act::Deny { create: true, share: false })]));
        accepted(&then(&[grant(8, 9, 2, 2), release(10, 11, 2)]));
        accepted(&then(&[timed(8, 9, Act::Forget), create(10, 11, 2, 2), release(12, 13, 2)]));
        rejected(&then(&[create(8, 9, 2, 2)]), 4);
        rejected(&then(&[deny(8, 9)]), 4);
        rejected(&then(&[timed(8, 9, Act::ForgetBusy)]), 4);
    }

    #[test]
    fn an_eviction_hits_its_epoch_alone() {
        let evict = |from, to, epoch| timed(from, to, Act::Evict { epoch });
        let missed = |from, to, epoch| timed(from, to, Act::EvictMissed { epoch });
        let lost = timed(4, 5, Act::Lost { lease: 1 });
        accepted(&[grant(0, 1, 1, 1), evict(2, 3, 1), lost, grant(6, 7, 2, 2), missed(8, 9, 1)]);
        rejected(&[grant(0, 1, 1, 1), release(2, 3, 1), grant(4, 5, 2, 2), evict(6, 7, 1)], 3);
        rejected(&[grant(0, 1, 1, 1), evict(2, 3, 0)], 1);
        rejected(&[grant(0, 1, 1, 1), missed(2, 3, 1)], 1);
        rejected(&[grant(0, 1, 1, 1), evict(2, 3, 1), timed(4, 5, Act::Own { lease: 1, epoch: 1 })], 2);
    }

    #[test]
    fn a_long_history_of_many_clients_is_checked_in_no_time() {
        let mut history = Vec::new();
        for round in 0..20_000u64 {
            let (t, lease) = (round * 10, round as u32);
            history.push(grant(t.saturating_sub(55), t + 2, lease, round + 1));
            history.push(deny(t + 1, t + 6));
            history.push(release(t + 5, t + 8, lease));
        }
        let checked = check(&history).expect("right");
        assert!(checked.widest < 100, "{checked:?}");
    }
}
