//! S2, epoch integrity: whole lives of attempts, with renewals, short TTLs, releases, kills and results, over and over.
//!
//! Every key's epochs are 1..n, each told to exactly one claimer; a renewal keeps the epoch; a handle that lost its lease
//! gets nothing more; a result exists only if it was committed by the attempt whose epoch it bears, whole.
use std::collections::HashMap;
use std::fs;

use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use serial_test::serial;

use crate::common::{Mount, wait_for};
use crate::fleet::{Chaos, Fleet};
use crate::history::{History, Lease, Violation};
use crate::record::{Form, Op, Renewal};
use crate::registry::{self, Books};
use crate::s1_contested::{epochs_grow, make_namespace, no_overlap, run};
use crate::settings::Settings;
use crate::sys::{self, Alarm};
use crate::worker::{Held, Job, Role, Worker};
use crate::{results, trace};

const PROCESSES: u64 = 8;
const KEYS: u64 = 6;
const TTL_MS: u64 = 800;

/// The workers have a uid each, so that a TTL set by path reaches nobody else's lease. The last two share one and set
/// none: they could stamp their results on each other's attempts if they were let.
const FIRST_UID: u32 = 20_000;
const SHARED_UID: u32 = FIRST_UID + PROCESSES as u32 - 2;

/// A worker of S2.
pub fn attempt(worker: &mut Worker) {
    // The last key is its own.
    let own = worker.job.keys.pop().expect("keys");
    while !worker.stopping() {
        if worker.once_in(60) {
            alone(worker, &own);
        }
        let key = worker.any_key();
        let (form, wait) = *[
            (Form::Create, false),
            (Form::Flock, false),
            (Form::Flock, true),
            (Form::Ofd, true),
            (Form::Posix, false),
            (Form::Posix, true),
        ]
        .choose(&mut worker.rng)
        .expect("not empty");
        let alarm_us = if worker.once_in(4) { worker.rng.random_range(100..50_000) } else { 0 };
        let Some(held) = worker.claim(&key, form, wait, alarm_us) else {
            if form == Form::Create && worker.once_in(3) {
                forget(worker, &key);
            }
            if worker.once_in(6) {
                worker.observe(&key);
            }
            let pause_us = worker.rng.random_range(0..500);
            sys::pause(pause_us);
            continue;
        };
        match worker.epoch(&key, &held) {
            Some(epoch) => {
                worker.claimed();
                live(worker, &key, held, epoch);
            }
            None => worker.close(&key, held),
        }
    }
}

/// Overstays on a key nobody else wants: nothing but the time ends the lease.
fn alone(worker: &mut Worker, key: &str) {
    let form = *[Form::Flock, Form::Ofd, Form::Posix].choose(&mut worker.rng).expect("not empty");
    let Some(held) = worker.claim(key, form, false, 0) else {
        worker.wrong(format!("{key}, which nobody else wants, was refused"));
        return;
    };
    let ttl_ms = *[40, 80].choose(&mut worker.rng).expect("not empty");
    if let Some(epoch) = worker.epoch(key, &held)
        && worker.set_ttl(key, &held, ttl_ms).is_ok()
    {
        worker.claimed();
        overstay(worker, key, held, epoch, ttl_ms);
    } else {
        worker.close(key, held);
    }
}

/// Forgets a finished key; refused while it is held.
fn forget(worker: &mut Worker, key: &str) {
    let path = worker.claim_path(key);
    let _ = worker.call(key, Op::Forget, || sys::on_path(libc::unlink, &path));
}

fn live(worker: &mut Worker, key: &str, held: Held, epoch: u64) {
    let mut ttl_ms = TTL_MS;
    if worker.job.uid != SHARED_UID && worker.once_in(3) {
        let ms = *[40, 120, 300, 2_000].choose(&mut worker.rng).expect("not empty");
        if worker.set_ttl(key, &held, ms).is_ok() {
            ttl_ms = ms;
        }
    }
    for nth in 0..worker.rng.random_range(0..4) {
        renew(worker, key, &held, epoch, nth);
    }
    match worker.rng.random_range(0..100) {
        0..=29 => worker.close(key, held),
        30..=44 => {
            let _ = worker.unlock(key, &held);
            worker.close(key, held);
        }
        45..=54 => {
            let _ = worker.unlink(key);
            worker.close(key, held);
        }
        55..=57 => worker.exit_holding(key),
        58..=72 => {
            commit(worker, key, epoch, false);
            worker.close(key, held);
        }
        // The result comes after the end: it is right as long as nobody else came.
        73..=82 => {
            worker.close(key, held);
            let pause_us = worker.rng.random_range(0..1_500);
            sys::pause(pause_us);
            commit(worker, key, epoch, false);
        }
        83 => {
            commit(worker, key, epoch, true);
            worker.close(key, held);
        }
        84 => {
            worker.note("is to be killed reporting");
            let doom_us = worker.rng.random_range(1..1_000);
            let _doom = Alarm::every(doom_us, libc::SIGKILL);
            commit(worker, key, epoch, false);
            worker.close(key, held);
        }
        85..=89 if ttl_ms <= 300 => overstay(worker, key, held, epoch, ttl_ms),
        90 => worker.die("kills itself holding"),
        _ => {
            let hold_us = worker.rng.random_range(0..2_000);
            worker.hand_over(key, held, hold_us);
        }
    }
}

/// One renewal; the record must show the same epoch, and a note as it was written.
fn renew(worker: &mut Worker, key: &str, held: &Held, epoch: u64, nth: u32) {
    let how = *[Renewal::Note, Renewal::Touch, Renewal::Relock].choose(&mut worker.rng).expect("not empty");
    let note = format!("{key}/{epoch}/{nth}/{}", "n".repeat(worker.rng.random_range(0..200)));
    let renewed = worker.renew(key, held, how, &note);
    let Some((now, record)) = worker.record(key, held) else {
        return;
    };
    if now != epoch {
        worker.wrong(format!("a renewal of epoch {epoch} of {key} made it epoch {now}"));
    }
    if how == Renewal::Note && renewed.is_ok() && !record.contains(&note) {
        worker.wrong(format!("{key}: the note {note:?} is not in the record {record:?}"));
    }
}

/// Stays beyond the TTL, then tries all a holder could do; the register check knows when each of them is due to fail.
fn overstay(worker: &mut Worker, key: &str, held: Held, epoch: u64, ttl_ms: u64) {
    worker.note("overstays");
    let early_draft = worker.once_in(3).then(|| draft(worker, key, epoch)).flatten();
    let spare_ms = worker.rng.random_range(0..250);
    sys::pause((ttl_ms + spare_ms) * 1_000);
    if let Some(fd) = early_draft {
        let payload = results::payload(key, epoch, std::process::id(), 0);
        let _ = worker.call(key, Op::Write, || sys::write(&fd, payload.as_bytes()));
        let _ = worker.call(key, Op::Commit, || sys::fsync(&fd));
        let _ = worker.call(key, Op::Finish, || sys::close(fd));
    }
    worker.epoch(key, &held);
    for how in [Renewal::Note, Renewal::Touch, Renewal::Relock] {
        let _ = worker.renew(key, &held, how, "too late");
    }
    commit(worker, key, epoch, false);
    if worker.once_in(2) {
        let _ = worker.unlink(key);
    }
    if worker.once_in(2) {
        let _ = worker.unlock(key, &held);
    }
    worker.close(key, held);
}

fn draft(worker: &mut Worker, key: &str, epoch: u64) -> Option<std::os::fd::OwnedFd> {
    let path = worker.job.root.join("results").join(key).join(epoch.to_string());
    let mut made = None;
    let flags = libc::O_WRONLY | libc::O_CREAT | libc::O_TRUNC;
    let _ =
        worker.call(key, Op::Draft(epoch), || sys::open(&path, flags).map(|fd| u64::from(made.replace(fd).is_some())));
    made
}

/// Writes the attempt's result and commits it, by `fsync` or by `close`; `dies`: kills itself halfway.
fn commit(worker: &mut Worker, key: &str, epoch: u64, dies: bool) {
    let Some(fd) = draft(worker, key, epoch) else {
        return;
    };
    let filler = worker.rng.random_range(0..12_000);
    let payload = results::payload(key, epoch, std::process::id(), filler);
    let pieces = worker.rng.random_range(1..4);
    for piece in payload.as_bytes().chunks(payload.len().div_ceil(pieces)) {
        match worker.call(key, Op::Write, || sys::write(&fd, piece)) {
            Ok(written) if written == piece.len() as u64 => {}
            Ok(written) => worker.wrong(format!("{written} of {} bytes written to a result of {key}", piece.len())),
            Err(_) => {
                // A superseded draft: its close must publish nothing.
                let _ = worker.call(key, Op::Finish, || sys::close(fd));
                return;
            }
        }
        if dies {
            worker.die("kills itself writing a result");
        }
    }
    if worker.once_in(2) {
        let _ = worker.call(key, Op::Commit, || sys::fsync(&fd));
    }
    let _ = worker.call(key, Op::Finish, || sys::close(fd));
}

#[test]
#[serial]
fn s2_epochs_are_gapless_and_told_once() {
    let settings = Settings::read("S2");
    let mount = Mount::shared();
    for round in settings.rounds() {
        s2_round(&mount, &settings, round).unwrap_or_else(|e| panic!("S2 seed {} round {round}: {e}", settings.seed));
    }
    mount.verify();
}

fn s2_round(mount: &Mount, settings: &Settings, round: u64) -> Result<(), Violation> {
    let namespace = format!("s2-{round}");
    make_namespace(mount, &namespace);
    let directory = sys::open(&mount.claim(&namespace), libc::O_RDONLY | libc::O_DIRECTORY).expect("namespace");
    sys::set_xattr(&directory, "user.lease.ttl", &format!("{TTL_MS}ms")).expect("TTL of the namespace");
    drop(directory);
    let logs = mount.scratch().join(&namespace);
    let mut fleet = Fleet::new(&logs);
    let seed = settings.seed.wrapping_add(round << 32);
    for slot in 0..PROCESSES {
        let job = Job {
            role: Role::Attempt,
            root: mount.root(),
            keys: (0..KEYS).chain([KEYS + slot]).map(|key| format!("{namespace}/k{key}")).collect(),
            log: logs.clone(),
            board: logs.clone(),
            seed: seed.wrapping_add(slot + 1),
            uid: SHARED_UID.min(FIRST_UID + slot as u32),
            nested: false,
            ttl_ms: TTL_MS,
        };
        fleet.add(job, true);
    }
    let rng = StdRng::seed_from_u64(!seed);
    let mut chaos = Chaos { rng, freeze_once_in: 30, freeze_ms: (1, 500), kill_once_in: 60 };
    let history = run(&mut fleet, &mut chaos, settings.claims, TTL_MS)?;

    no_overlap(&history)?;
    epochs_grow(&history)?;
    let report = trace::check(&history)?;
    // The end of the last processes is on its way to the server; a status answers behind it.
    for key in history.keys() {
        wait_for("all handles are closed", || ["free", "finished"].contains(&mount.state_of(&key).as_str()));
    }
    let results = results::are_their_own(&history, &results::read(mount, &history.keys()))?;
    let (rows, keys) = registry::read_settled(&mount.state(), &namespace);
    let books = registry::balance(&history, &rows, &keys)?;
    outcomes_match(&history, &rows)?;
    print_round(round, &history, &fleet, &books, &report, results);
    drop(fleet);
    fs::remove_dir_all(&logs).expect("logs can be removed");
    Ok(())
}

/// The registry's outcome of an attempt is one its holder can have seen.
fn outcomes_match(history: &History, rows: &[registry::Row]) -> Result<(), Violation> {
    let rows: HashMap<(&str, u64), &registry::Row> =
        rows.iter().map(|row| ((row.key.as_str(), row.epoch), row)).collect();
    for lease in &history.leases {
        let Some(row) = lease.epoch.and_then(|epoch| rows.get(&(lease.key.as_str(), epoch))) else {
            continue;
        };
        let outcome = row.outcome.as_deref().unwrap_or("none");
        let (earliest, _) = history.deadline(lease);
        let committed = lease.calls.iter().any(|call| call.op == Op::Commit && call.ok());
        let right = match outcome {
            "completed" => row.result.is_some(),
            "released" => !committed,
            "expired" => !committed && lease.over.max(last_answer(lease)) >= earliest,
            _ => false,
        };
        if !right {
            let what = format!("epoch {} has the outcome {outcome:?}, result {:?}", row.epoch, row.result);
            return Err(history.violation("I-CAS-GUARDED", &lease.key, lease.end, what));
        }
    }
    Ok(())
}

fn last_answer(lease: &Lease) -> u64 {
    lease.calls.iter().filter_map(|call| call.returned).max().unwrap_or(0)
}

fn print_round(round: u64, history: &History, fleet: &Fleet, books: &Books, report: &trace::Report, results: usize) {
    let is = |op: fn(Op) -> bool, ok: bool| history.count(|call| op(call.op) && call.ok() == ok);
    let claim = |op| matches!(op, Op::Claim { .. });
    let renewal = |op| matches!(op, Op::Renew(_));
    println!(
        "S2 round {round}: {} claims, {} denials and interrupted waits, {} renewals, {} refused, {} commits by fsync, {} refused, \
         {} kills, {} freezes; {} epochs ({} untold, {} expired, {} with a result, {results} of them read back whole); \
         {} register calls in order (widest {})",
        is(claim, true),
        is(claim, false),
        is(renewal, true),
        is(renewal, false),
        is(|op| op == Op::Commit, true),
        is(|op| op == Op::Commit, false),
        fleet.kills,
        fleet.freezes.len(),
        books.epochs,
        books.untold,
        books.expired,
        books.completed,
        report.checked.calls,
        report.checked.widest,
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    use crate::history::testing::{call, with};

    const MS: u64 = 1_000_000;

    #[test]
    fn rejects_a_renewal_after_expiry_and_an_expiry_before_its_time() {
        let ttl = |ms| call(Op::Ttl(ms), 200, Ok(0));
        let renew = |at, answer| call(Op::Renew(Renewal::Note), at, answer);
        let stale = Err(libc::ESTALE);
        trace::check(&with(&[ttl(50), renew(40 * MS, Ok(1)), renew(400 * MS, stale)])).expect("right");
        // Due at 90 ms, with 100 ms of grace.
        trace::check(&with(&[ttl(50), renew(40 * MS, Ok(1)), renew(150 * MS, Ok(1)), renew(400 * MS, stale)]))
            .expect("still in grace");
        trace::check(&with(&[ttl(50), renew(400 * MS, Ok(1))])).expect_err("renewed 250 ms after expiry");
        trace::check(&with(&[ttl(50), renew(40 * MS, stale)])).expect_err("lost 10 ms before the deadline");
        trace::check(&with(&[ttl(50), call(Op::Epoch, 400 * MS, Ok(1))])).expect_err("read 250 ms after expiry");
    }

    #[test]
    fn rejects_a_commit_after_expiry() {
        let ttl = call(Op::Ttl(50), 200, Ok(0));
        let open = call(Op::Draft(1), 20 * MS, Ok(0));
        let commit = |at, answer| call(Op::Commit, at, answer);
        let close = call(Op::Finish, 500 * MS, Ok(0));
        let history = |commit| with(&[ttl.clone(), open.clone(), commit, close.clone()]);
        trace::check(&history(commit(30 * MS, Ok(0)))).expect("right");
        trace::check(&history(commit(400 * MS, Err(libc::ESTALE)))).expect("right");
        trace::check(&history(commit(400 * MS, Ok(0)))).expect_err("committed after expiry");
        trace::check(&history(commit(30 * MS, Err(libc::ESTALE)))).expect_err("refused before expiry");
    }

    #[test]
    fn rejects_outcomes_the_holder_cannot_have_seen() {
        let row = |outcome: &str, result| {
            vec![registry::Row { key: "n/k".into(), epoch: 1, pid: 10, outcome: Some(outcome.into()), result }]
        };
        let released = with(&[]);
        outcomes_match(&released, &row("released", None)).expect("right");
        outcomes_match(&released, &row("expired", None)).expect_err("its hour was not over");
        outcomes_match(&released, &row("evicted", None)).expect_err("nobody evicted it");
        outcomes_match(&released, &row("completed", None)).expect_err("completed without a result");
        let committed = with(&[call(Op::Draft(1), 200, Ok(0)), call(Op::Commit, 210, Ok(0))]);
        outcomes_match(&committed, &row("completed", Some(3))).expect("right");
        outcomes_match(&committed, &row("released", Some(3))).expect_err("a commit makes it completed");
    }
}
