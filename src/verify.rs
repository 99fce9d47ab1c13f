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
mod tests;
