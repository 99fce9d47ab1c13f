//! Rows of every kind, sound and not, and what is said of them.

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
    let rows = [attempt(1), ended_as("expired", 2), ended_as("evicted", 3), ended_as("lost", 4), completed(5), live(6)];
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
