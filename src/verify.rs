//! The invariants of the contract's §7, checked over what a registry says. Pure: rows in, violations out.
//!
//! A row that breaks a rule proves a fault. Wall-clock times prove less: the rules count time on `CLOCK_BOOTTIME`, and a
//! step of the wall clock leaves rows that look just as wrong. What only they show is marked [`Violation::by_clock`].

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;

use crate::agent;
use crate::registry::{AttemptRow, KeyRow};

/// Longest TTL there can be, in milliseconds: 365 days.
const MAX_TTL_MS: u64 = 365 * 24 * 3_600_000;
/// Longest note, in bytes.
const MAX_NOTE_BYTES: usize = 4096;
/// Wall-clock times of one event, taken apart from each other, may differ by this much without a step of the clock…
const CLOCK_SLACK_MS: i64 = 1_000;
/// …and by this part of the time between them, since the clock is slewed.
const CLOCK_SLEW: i64 = 1_000;

/// A rule of §7.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Invariant {
    /// One live holder per key.
    Mutex,
    /// A claim that is no renewal takes a unique epoch, gapless 1..n.
    EpochUniq,
    /// A commit succeeds only for the registered attempt inside its TTL.
    NoGhostComplete,
    /// Nothing reaps a holder that is alive or not proven dead.
    ReapSafety,
    /// Remediation compares key and epoch, never state alone.
    CasGuarded,
    /// Every lease expires.
    TtlBound,
    /// A claim after release, expiry or completion takes a fresh epoch.
    ReclaimEpoch,
    /// A renewal keeps the epoch.
    RenewalStable,
    /// At most one result per attempt, never stamped on another.
    OneResult,
    /// No torn record, note or result.
    AtomicRead,
    /// No lease, committed byte or epoch is lost.
    CrashKeep,
}

impl Invariant {
    /// Its name in the contract.
    pub fn name(self) -> &'static str {
        match self {
            Invariant::Mutex => "I-MUTEX",
            Invariant::EpochUniq => "I-EPOCH-UNIQ",
            Invariant::NoGhostComplete => "I-NO-GHOST-COMPLETE",
            Invariant::ReapSafety => "I-REAP-SAFETY",
            Invariant::CasGuarded => "I-CAS-GUARDED",
            Invariant::TtlBound => "I-TTL-BOUND",
            Invariant::ReclaimEpoch => "I-RECLAIM-EPOCH",
            Invariant::RenewalStable => "I-RENEWAL-STABLE",
            Invariant::OneResult => "I-ONE-RESULT",
            Invariant::AtomicRead => "I-ATOMIC-READ",
            Invariant::CrashKeep => "I-CRASH-KEEP",
        }
    }
}

/// A rule that does not hold, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// The rule.
    pub invariant: Invariant,
    /// The key; `#N` for the key number of an attempt without a key.
    pub key: String,
    /// The attempt, if it is about one.
    pub epoch: Option<u64>,
    /// What is wrong.
    pub problem: String,
    /// Only wall-clock times show it, so a step of the clock may be the reason.
    pub by_clock: bool,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.invariant.name(), self.key)?;
        if let Some(epoch) = self.epoch {
            write!(f, " epoch {epoch}")?;
        }
        write!(f, ": {}", self.problem)
    }
}

/// Checks the rows of one registry, read at one moment. `results_present` gives the bytes of an attempt's result file.
///
/// Violations come in the order of keys and epochs as given.
pub fn check(
    keys: &[KeyRow],
    attempts: &[AttemptRow],
    results_present: impl Fn(&AttemptRow) -> Option<u64>,
) -> Vec<Violation> {
    let mut by_key: BTreeMap<u64, Vec<&AttemptRow>> = BTreeMap::new();
    for attempt in attempts {
        by_key.entry(attempt.key_id).or_default().push(attempt);
    }
    let mut found = Vec::new();
    let mut ids = HashSet::new();
    let mut names = HashSet::new();
    for key in keys {
        let mut checker = Checker { name: key.key.to_string(), found: &mut found };
        if !ids.insert(key.id) || !names.insert(&key.key) {
            checker.report(Invariant::EpochUniq, None, "is in the registry twice, so its epochs are counted twice");
            continue;
        }
        let mut rows = by_key.remove(&key.id).unwrap_or_default();
        rows.sort_by_key(|row| row.epoch);
        checker.key(key, &rows, &results_present);
    }
    for (id, rows) in by_key {
        let mut checker = Checker { name: format!("#{id}"), found: &mut found };
        for row in rows {
            checker.report(Invariant::CrashKeep, Some(row.epoch), "its key is missing from the registry");
        }
    }
    found
}

/// Gathers what is wrong with one key.
struct Checker<'a> {
    name: String,
    found: &'a mut Vec<Violation>,
}

impl Checker<'_> {
    fn report(&mut self, invariant: Invariant, epoch: Option<u64>, problem: impl Into<String>) {
        self.add(invariant, epoch, problem.into(), false);
    }

    fn remark(&mut self, invariant: Invariant, epoch: u64, problem: impl Into<String>) {
        self.add(invariant, Some(epoch), problem.into(), true);
    }

    fn add(&mut self, invariant: Invariant, epoch: Option<u64>, problem: String, by_clock: bool) {
        self.found.push(Violation { invariant, key: self.name.clone(), epoch, problem, by_clock });
    }

    fn key(&mut self, key: &KeyRow, rows: &[&AttemptRow], results_present: &impl Fn(&AttemptRow) -> Option<u64>) {
        self.epochs(key, rows);
        self.newest(key, rows);
        for row in rows {
            self.ending(row);
            self.result(row, results_present(row));
            self.bounds(row);
            self.times(row);
        }
        for pair in rows.windows(2) {
            self.succession(pair[0], pair[1]);
        }
    }

    /// The epochs are 1..n, each once. Of those up to `pruned` exactly as many are missing as were pruned; which ones, the
    /// registry does not keep. The newest is never pruned.
    fn epochs(&mut self, key: &KeyRow, rows: &[&AttemptRow]) {
        if key.pruned > 0 && key.pruned >= key.epoch {
            let problem = format!("pruned up to epoch {} of {}", key.pruned, key.epoch);
            self.report(Invariant::EpochUniq, None, problem);
        }
        let mut seen: HashMap<u64, u64> = HashMap::new();
        for row in rows {
            *seen.entry(row.epoch).or_default() += 1;
            if row.epoch == 0 || row.epoch > key.epoch {
                let problem = format!("is outside of 1..{}, the key's count", key.epoch);
                self.report(Invariant::EpochUniq, Some(row.epoch), problem);
            } else if seen[&row.epoch] == 2 {
                self.report(Invariant::EpochUniq, Some(row.epoch), "was given to more than one attempt");
                if rows.iter().filter(|other| other.epoch == row.epoch && other.result.is_some()).count() > 1 {
                    self.report(Invariant::OneResult, Some(row.epoch), "has more than one result");
                }
            }
        }
        let there = seen.keys().filter(|epoch| (1..=key.pruned).contains(*epoch)).count() as u64;
        let missing = key.pruned - there.min(key.pruned);
        if missing != key.pruned_attempts {
            let (pruned, of) = (key.pruned_attempts, key.pruned);
            let problem = format!("of epochs 1 to {of}, {missing} are missing, and {pruned} were pruned");
            self.report(Invariant::EpochUniq, None, problem);
        }
        let mut expected = key.pruned.saturating_add(1);
        let kept = rows.iter().map(|row| row.epoch).filter(|epoch| (expected..=key.epoch).contains(epoch));
        for epoch in kept.chain([key.epoch.saturating_add(1)]).collect::<Vec<_>>() {
            if epoch > expected {
                let problem = match epoch - expected {
                    1 => "is missing".to_owned(),
                    several => format!("and the {} after it are missing", several - 1),
                };
                self.report(Invariant::EpochUniq, Some(expected), problem);
            }
            expected = expected.max(epoch.saturating_add(1));
        }
    }

    /// Only the newest attempt may be live, and only its completion finishes the key.
    fn newest(&mut self, key: &KeyRow, rows: &[&AttemptRow]) {
        for row in rows.iter().filter(|row| row.epoch < key.epoch) {
            if row.ended_ms.is_none() {
                // The same process in two live attempts did not steal the key: it renewed, and was counted as new.
                let is_same =
                    rows.iter().any(|next| Some(next.epoch) == row.epoch.checked_add(1) && is_same_holder(row, next));
                let invariant = if is_same { Invariant::RenewalStable } else { Invariant::Mutex };
                let problem = format!("has not ended, and the key is at epoch {}", key.epoch);
                self.report(invariant, Some(row.epoch), problem);
            }
        }
        if !key.finished {
            return;
        }
        match rows.iter().find(|row| row.epoch == key.epoch) {
            Some(row) if row.outcome.as_deref() != Some("completed") => {
                let problem = format!("is {}, but its key counts as finished", outcome_of(row));
                self.report(Invariant::ReclaimEpoch, Some(row.epoch), problem);
            }
            None if key.epoch == 0 => {
                self.report(Invariant::NoGhostComplete, None, "counts as finished without an attempt");
            }
            _ => {}
        }
    }

    /// An attempt ends once, with a cause, and a remedy that ended it took its registration too.
    fn ending(&mut self, row: &AttemptRow) {
        let epoch = Some(row.epoch);
        match (row.outcome.as_deref(), row.ended_ms) {
            (None, Some(_)) => self.report(Invariant::ReapSafety, epoch, "has ended, and nothing says by what"),
            (None, None) if !row.registered => {
                self.report(Invariant::ReapSafety, epoch, "is live, but was struck off the register");
            }
            (Some("released" | "expired" | "evicted" | "lost"), None) => {
                let problem = format!("is {}, and live again without a fresh epoch", outcome_of(row));
                self.report(Invariant::ReclaimEpoch, epoch, problem);
            }
            (Some("released" | "completed" | "expired" | "evicted" | "lost") | None, _) => {}
            (Some(other), _) => {
                self.report(Invariant::ReapSafety, epoch, format!("ended by `{other}`, which is no outcome"));
            }
        }
        let ended_by_remedy = matches!(row.outcome.as_deref(), Some("expired" | "evicted"));
        if ended_by_remedy && row.registered {
            let problem = format!("is {}, and still registered", outcome_of(row));
            self.report(Invariant::CasGuarded, epoch, problem);
        }
        let needs_reason = matches!(row.outcome.as_deref(), Some("evicted" | "lost"));
        if needs_reason && row.reason.as_deref().unwrap_or_default().is_empty() {
            self.report(Invariant::ReapSafety, epoch, format!("is {}, without a reason", outcome_of(row)));
        }
    }

    /// A completed attempt, its result and the result's file are there together.
    fn result(&mut self, row: &AttemptRow, present: Option<u64>) {
        let epoch = Some(row.epoch);
        let completed = row.outcome.as_deref() == Some("completed");
        if row.result.is_some() && !completed {
            let problem = format!("has a result, but is {}", outcome_of(row));
            self.report(Invariant::NoGhostComplete, epoch, problem);
        } else if row.result.is_none() && completed && !row.result_pruned {
            self.report(Invariant::NoGhostComplete, epoch, "is completed, but has no result");
        }
        if row.result_pruned && (row.result.is_some() || row.registered || row.ended_ms.is_none()) {
            self.report(Invariant::OneResult, epoch, "its result was pruned, and it has, or could have, another");
        }
        match (row.result, present) {
            (Some((size, _)), None) => {
                self.report(Invariant::CrashKeep, epoch, format!("its result of {size} bytes has no file"));
            }
            (Some((size, _)), Some(bytes)) if size != bytes => {
                let problem = format!("its result has {size} bytes, the file {bytes}");
                self.report(Invariant::AtomicRead, epoch, problem);
            }
            _ => {}
        }
    }

    fn bounds(&mut self, row: &AttemptRow) {
        if row.ttl_ms == 0 || row.ttl_ms > MAX_TTL_MS {
            let problem = format!("its TTL is {} ms, not from 1 ms to 365 days", row.ttl_ms);
            self.report(Invariant::TtlBound, Some(row.epoch), problem);
        }
        if row.note.len() > MAX_NOTE_BYTES {
            let problem = format!("its note has {} bytes, more than any write can bring", row.note.len());
            self.report(Invariant::AtomicRead, Some(row.epoch), problem);
        }
        if row.agent.as_deref().is_some_and(|agent| agent::name(agent.as_bytes()).is_err()) {
            self.report(Invariant::AtomicRead, Some(row.epoch), "its agent has a name that none can be given");
        }
    }

    /// What the wall clock says about one attempt.
    fn times(&mut self, row: &AttemptRow) {
        let epoch = row.epoch;
        if is_after(row.since_ms, row.renewed_ms, 0) {
            self.remark(Invariant::RenewalStable, epoch, "was renewed before it began");
        }
        let renewed_ms = row.renewed_ms.max(row.since_ms);
        let last_end_ms = renewed_ms.saturating_add_unsigned(MAX_TTL_MS);
        if last_end_ms == i64::MAX || is_after(row.expires_ms, last_end_ms, MAX_TTL_MS as i64) {
            self.remark(Invariant::TtlBound, epoch, "expires more than 365 days after its renewal");
        }
        let span_ms = row.expires_ms.saturating_sub(row.since_ms);
        if let Some(ended_ms) = row.ended_ms {
            if row.outcome.as_deref() == Some("expired") && is_after(row.expires_ms, ended_ms, span_ms) {
                let problem = format!("expired {} ms before its TTL ran out", row.expires_ms.saturating_sub(ended_ms));
                self.remark(Invariant::ReapSafety, epoch, problem);
            }
            if row.outcome.as_deref() == Some("released") && is_after(ended_ms, row.expires_ms, span_ms) {
                let problem =
                    format!("was released {} ms after its TTL ran out", ended_ms.saturating_sub(row.expires_ms));
                self.remark(Invariant::TtlBound, epoch, problem);
            }
        }
        let Some((_, committed_ms)) = row.result else { return };
        if is_after(row.since_ms, committed_ms, 0) {
            self.remark(Invariant::OneResult, epoch, "its result came before it began, as if meant for another");
        }
        if is_after(committed_ms, row.expires_ms, span_ms) {
            let late_ms = committed_ms.saturating_sub(row.expires_ms);
            self.remark(
                Invariant::NoGhostComplete,
                epoch,
                format!("its result came {late_ms} ms after its TTL ran out"),
            );
        }
    }

    /// What the wall clock says about an attempt and the next that is kept.
    fn succession(&mut self, row: &AttemptRow, next: &AttemptRow) {
        if row.ended_ms.is_some_and(|ended_ms| is_after(ended_ms, next.since_ms, 0)) {
            self.remark(Invariant::Mutex, row.epoch, format!("ended after epoch {} began", next.epoch));
        }
        if row.result.is_some_and(|(_, committed_ms)| is_after(committed_ms, next.since_ms, 0)) {
            let problem = format!("its result came after epoch {} began", next.epoch);
            self.remark(Invariant::NoGhostComplete, row.epoch, problem);
        }
    }
}

/// The one time is after the other, by more than an undisturbed clock could make it seem over a span.
fn is_after(late_ms: i64, early_ms: i64, span_ms: i64) -> bool {
    late_ms.saturating_sub(early_ms) > CLOCK_SLACK_MS + span_ms.max(0) / CLOCK_SLEW
}

fn is_same_holder(a: &AttemptRow, b: &AttemptRow) -> bool {
    (a.pid, a.start_time) == (b.pid, b.start_time) && b.ended_ms.is_none()
}

fn outcome_of(row: &AttemptRow) -> &str {
    row.outcome.as_deref().unwrap_or("live")
}

#[cfg(test)]
mod tests {
    use super::Invariant::*;
    use super::*;
    use crate::Key;

    const T: i64 = 1_700_000_000_000;

    fn key(epoch: u64) -> KeyRow {
        KeyRow { id: 1, key: Key::parse("a/b").expect("key"), epoch, finished: false, pruned: 0, pruned_attempts: 0 }
    }

    /// A released attempt; each epoch an hour after the one before.
    fn attempt(epoch: u64) -> AttemptRow {
        let since_ms = T + epoch as i64 * 3_600_000;
        AttemptRow {
            key_id: 1,
            epoch,
            pid: 100 + epoch as u32,
            start_time: 5,
            uid: 0,
            gid: 0,
            command: "sh".into(),
            via: "lock".into(),
            since_ms,
            renewed_ms: since_ms + 10,
            expires_ms: since_ms + 60_010,
            ttl_ms: 60_000,
            waited_ms: 0,
            note: String::new(),
            agent: None,
            outcome: Some("released".into()),
            reason: Some("closed".into()),
            ended_ms: Some(since_ms + 1_000),
            registered: false,
            result: None,
            result_pruned: false,
        }
    }

    fn live(epoch: u64) -> AttemptRow {
        AttemptRow { outcome: None, reason: None, ended_ms: None, registered: true, ..attempt(epoch) }
    }

    fn completed(epoch: u64) -> AttemptRow {
        let base = attempt(epoch);
        AttemptRow { outcome: Some("completed".into()), result: Some((3, base.since_ms + 500)), ..base }
    }

    fn ended_as(outcome: &str, epoch: u64) -> AttemptRow {
        let base = attempt(epoch);
        AttemptRow { outcome: Some(outcome.into()), ended_ms: Some(base.expires_ms), ..base }
    }

    /// Result files are as the rows say.
    fn faithful(row: &AttemptRow) -> Option<u64> {
        row.result.map(|(size, _)| size)
    }

    /// What is found, as (rule, epoch, by clock).
    fn found(keys: &[KeyRow], attempts: &[AttemptRow]) -> Vec<(Invariant, Option<u64>, bool)> {
        found_with(keys, attempts, faithful)
    }

    fn found_with(
        keys: &[KeyRow],
        attempts: &[AttemptRow],
        files: impl Fn(&AttemptRow) -> Option<u64>,
    ) -> Vec<(Invariant, Option<u64>, bool)> {
        check(keys, attempts, files).into_iter().map(|v| (v.invariant, v.epoch, v.by_clock)).collect()
    }

    #[test]
    fn a_sound_registry_has_no_violations() {
        let rows =
            [attempt(1), ended_as("expired", 2), ended_as("evicted", 3), ended_as("lost", 4), completed(5), live(6)];
        assert_eq!(check(&[key(6)], &rows, faithful), []);
        // Never claimed; free but still registered; completed with the handle still open; finished; finished and held again.
        assert_eq!(check(&[key(0)], &[], faithful), []);
        let registered = AttemptRow { registered: true, ..attempt(1) };
        assert_eq!(check(&[key(1)], std::slice::from_ref(&registered), faithful), []);
        assert_eq!(check(&[key(2)], &[registered, live(2)], faithful), []);
        let open = AttemptRow { ended_ms: None, registered: true, ..completed(1) };
        assert_eq!(check(&[key(1)], &[open], faithful), []);
        assert_eq!(check(&[KeyRow { finished: true, ..key(1) }], &[completed(1)], faithful), []);
        assert_eq!(check(&[key(2)], &[completed(1), live(2)], faithful), []);
    }

    #[test]
    fn pruned_attempts_may_be_missing_and_no_others() {
        let pruned = |pruned, pruned_attempts, epoch| [KeyRow { pruned, pruned_attempts, ..key(epoch) }];
        assert_eq!(found(&pruned(2, 2, 4), &[attempt(3), attempt(4)]), []);
        assert_eq!(found(&pruned(2, 1, 4), &[attempt(1), attempt(3), attempt(4)]), []);
        assert_eq!(found(&pruned(3, 2, 4), &[attempt(2), attempt(4)]), []);
        // One more is missing than was pruned, before and behind; or one less.
        assert_eq!(found(&pruned(3, 2, 4), &[attempt(4)]), [(EpochUniq, None, false)]);
        assert_eq!(found(&pruned(2, 2, 4), &[attempt(4)]), [(EpochUniq, Some(3), false)]);
        assert_eq!(found(&pruned(2, 2, 4), &[attempt(2), attempt(3), attempt(4)]), [(EpochUniq, None, false)]);
        assert_eq!(found(&pruned(0, 1, 2), &[attempt(1), attempt(2)]), [(EpochUniq, None, false)]);
        // The newest is never pruned.
        assert_eq!(found(&pruned(4, 4, 4), &[]), [(EpochUniq, None, false)]);
    }

    #[test]
    fn a_pruned_result_may_be_missing_and_never_comes_back() {
        let gone = AttemptRow { result: None, result_pruned: true, ..completed(1) };
        let finished = KeyRow { finished: true, ..key(1) };
        assert_eq!(found(&[finished], std::slice::from_ref(&gone)), []);
        let registered = AttemptRow { registered: true, ..gone.clone() };
        assert_eq!(found(&[key(1)], &[registered]), [(OneResult, Some(1), false)]);
        let again = AttemptRow { result: completed(1).result, ..gone };
        assert_eq!(found(&[key(1)], &[again]), [(OneResult, Some(1), false)]);
    }

    #[test]
    fn epochs_are_gapless_and_unique() {
        assert_eq!(found(&[key(3)], &[attempt(1), attempt(3)]), [(EpochUniq, Some(2), false)]);
        assert_eq!(found(&[key(3)], &[attempt(1)]), [(EpochUniq, Some(2), false)]);
        assert_eq!(found(&[key(2)], &[]), [(EpochUniq, Some(1), false)]);
        assert_eq!(found(&[key(1)], &[attempt(1), attempt(2)]), [(EpochUniq, Some(2), false)]);
        assert_eq!(found(&[key(1)], &[attempt(0), attempt(1)]), [(EpochUniq, Some(0), false)]);
        assert_eq!(found(&[key(1)], &[attempt(1), attempt(1)]), [(EpochUniq, Some(1), false)]);
        assert_eq!(found(&[key(1), key(1)], &[attempt(1)]), [(EpochUniq, None, false)]);
        let same_path = KeyRow { id: 2, ..key(0) };
        assert_eq!(found(&[key(1), same_path], &[attempt(1)]), [(EpochUniq, None, false)]);
    }

    #[test]
    fn two_live_attempts_break_the_mutex() {
        let first = AttemptRow { ended_ms: None, ..completed(1) };
        assert_eq!(found(&[key(2)], &[first, live(2)]), [(Mutex, Some(1), false)]);
        let late = AttemptRow { ended_ms: Some(T + 3 * 3_600_000), expires_ms: T + 4 * 3_600_000, ..attempt(1) };
        assert_eq!(found(&[key(2)], &[late, live(2)]), [(Mutex, Some(1), true)]);
    }

    #[test]
    fn a_renewal_that_took_an_epoch_is_found() {
        let first = AttemptRow { ended_ms: None, ..completed(1) };
        let second = AttemptRow { pid: first.pid, ..live(2) };
        assert_eq!(found(&[key(2)], &[first, second]), [(RenewalStable, Some(1), false)]);
        let early = AttemptRow { renewed_ms: T - 3_600_000, ..live(1) };
        assert_eq!(found(&[key(1)], &[early]), [(RenewalStable, Some(1), true)]);
    }

    #[test]
    fn only_the_registered_attempt_completes() {
        let stamped = AttemptRow { result: completed(1).result, ..ended_as("expired", 1) };
        assert_eq!(found(&[key(1)], &[stamped]), [(NoGhostComplete, Some(1), false)]);
        let empty = AttemptRow { result: None, ..completed(1) };
        assert_eq!(found(&[key(1)], &[empty]), [(NoGhostComplete, Some(1), false)]);
        assert_eq!(found(&[KeyRow { finished: true, ..key(0) }], &[]), [(NoGhostComplete, None, false)]);
        let base = completed(1);
        let late = AttemptRow { result: Some((3, base.expires_ms + 5_000)), ..base };
        assert_eq!(found(&[key(1)], std::slice::from_ref(&late)), [(NoGhostComplete, Some(1), true)]);
        let after_next = AttemptRow { expires_ms: T + 9 * 3_600_000, result: Some((3, T + 8 * 3_600_000)), ..late };
        assert_eq!(found(&[key(2)], &[after_next, live(2)]), [(NoGhostComplete, Some(1), true)]);
    }

    #[test]
    fn every_end_has_a_cause() {
        let unexplained = AttemptRow { outcome: None, registered: true, ..attempt(1) };
        assert_eq!(found(&[key(1)], &[unexplained]), [(ReapSafety, Some(1), false)]);
        let struck_off = AttemptRow { registered: false, ..live(1) };
        assert_eq!(found(&[key(1)], &[struck_off]), [(ReapSafety, Some(1), false)]);
        for outcome in ["evicted", "lost"] {
            let silent = AttemptRow { reason: None, ..ended_as(outcome, 1) };
            assert_eq!(found(&[key(1)], &[silent]), [(ReapSafety, Some(1), false)], "{outcome}");
        }
        assert_eq!(found(&[key(1)], &[ended_as("reaped", 1)]), [(ReapSafety, Some(1), false)]);
        let early = AttemptRow { ended_ms: Some(T + 3_600_000 + 2_000), ..ended_as("expired", 1) };
        assert_eq!(found(&[key(1)], &[early]), [(ReapSafety, Some(1), true)]);
    }

    #[test]
    fn a_remedy_ends_the_registration_of_what_it_ended() {
        for outcome in ["expired", "evicted"] {
            let row = AttemptRow { registered: true, ..ended_as(outcome, 1) };
            assert_eq!(found(&[key(1)], &[row]), [(CasGuarded, Some(1), false)], "{outcome}");
        }
    }

    #[test]
    fn every_lease_expires() {
        for ttl_ms in [0, MAX_TTL_MS + 1] {
            let row = AttemptRow { ttl_ms, ..live(1) };
            assert_eq!(found(&[key(1)], &[row]), [(TtlBound, Some(1), false)], "{ttl_ms}");
        }
        for expires_ms in [i64::MAX, T + 800 * 24 * 3_600_000] {
            let row = AttemptRow { expires_ms, ..live(1) };
            assert_eq!(found(&[key(1)], &[row]), [(TtlBound, Some(1), true)], "{expires_ms}");
        }
        let endless = AttemptRow { renewed_ms: i64::MAX, ..live(1) };
        assert_eq!(found(&[key(1)], &[endless]), [(TtlBound, Some(1), true)]);
        let overdue = AttemptRow { ended_ms: Some(T + 2 * 3_600_000), ..attempt(1) };
        assert_eq!(found(&[key(1)], &[overdue]), [(TtlBound, Some(1), true)]);
    }

    #[test]
    fn a_claim_after_an_end_takes_a_fresh_epoch() {
        for outcome in ["released", "expired", "evicted", "lost"] {
            let again = AttemptRow { ended_ms: None, ..ended_as(outcome, 1) };
            assert_eq!(found(&[key(1)], &[again]), [(ReclaimEpoch, Some(1), false)], "{outcome}");
        }
        let finished = KeyRow { finished: true, ..key(1) };
        assert_eq!(found(std::slice::from_ref(&finished), &[live(1)]), [(ReclaimEpoch, Some(1), false)]);
        assert_eq!(found(&[finished], &[attempt(1)]), [(ReclaimEpoch, Some(1), false)]);
    }

    #[test]
    fn an_attempt_has_one_result() {
        let early = AttemptRow { result: Some((3, T)), ..completed(1) };
        assert_eq!(found(&[key(1)], &[early]), [(OneResult, Some(1), true)]);
        let twice = found(&[key(1)], &[completed(1), completed(1)]);
        assert_eq!(twice, [(EpochUniq, Some(1), false), (OneResult, Some(1), false)]);
        // A file whose commit did not come about is shown to nobody.
        assert_eq!(found_with(&[key(1)], &[ended_as("expired", 1)], |_| Some(3)), []);
    }

    #[test]
    fn notes_names_and_results_are_whole() {
        let torn = found_with(&[key(1)], &[completed(1)], |_| Some(2));
        assert_eq!(torn, [(AtomicRead, Some(1), false)]);
        let long = AttemptRow { note: "x".repeat(4097), ..live(1) };
        assert_eq!(found(&[key(1)], &[long]), [(AtomicRead, Some(1), false)]);
        assert_eq!(found(&[key(1)], &[AttemptRow { note: "x".repeat(4096), ..live(1) }]), []);
        let named = |agent: &str| AttemptRow { agent: Some(agent.to_owned()), ..live(1) };
        assert_eq!(found(&[key(1)], &[named("coder 7")]), []);
        for agent in ["", "two\nlines", &"x".repeat(256)] {
            assert_eq!(found(&[key(1)], &[named(agent)]), [(AtomicRead, Some(1), false)], "{agent:?}");
        }
    }

    #[test]
    fn nothing_committed_is_lost() {
        assert_eq!(found_with(&[key(1)], &[completed(1)], |_| None), [(CrashKeep, Some(1), false)]);
        assert_eq!(found(&[], &[attempt(1)]), [(CrashKeep, Some(1), false)]);
    }

    #[test]
    fn absurd_numbers_do_not_overflow() {
        for value in [i64::MIN, -1, 0, i64::MAX] {
            let row = AttemptRow {
                since_ms: value,
                renewed_ms: value,
                expires_ms: value,
                ended_ms: Some(value),
                result: Some((u64::MAX, value)),
                ..completed(1)
            };
            let opposite = AttemptRow { since_ms: !value, ..row.clone() };
            check(&[KeyRow { pruned: u64::MAX, pruned_attempts: 1, ..key(u64::MAX) }], &[row, opposite], faithful);
        }
    }

    #[test]
    fn a_violation_names_rule_key_and_epoch() {
        let shown: Vec<_> = check(&[key(2)], &[attempt(1)], faithful).iter().map(ToString::to_string).collect();
        assert_eq!(shown, ["I-EPOCH-UNIQ: a/b epoch 2: is missing"]);
    }
}
