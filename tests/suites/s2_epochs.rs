//! S2, epoch integrity: whole lives of attempts, with renewals, short TTLs, releases, kills and results, over and over.
//!
//! Every key's epochs are 1..n, each told to exactly one claimer; a renewal keeps the epoch; a handle that lost its lease
//! gets nothing more; a result exists only if it was committed by the attempt whose epoch it bears, whole.
use std::collections::HashMap;
use std::fs;

use rand::SeedableRng;
use rand::rngs::StdRng;
use serial_test::serial;

use crate::attempt::SHARED_UID;
use crate::common::{Mount, wait_for};
use crate::fleet::{Chaos, Fleet};
use crate::history::{History, Lease, Violation};
use crate::judge::{epochs_grow, no_overlap};
use crate::record::Op;
use crate::registry::{self, Books};
use crate::roles::Role;
use crate::round::{make_namespace, run};
use crate::settings::Settings;
use crate::sys;
use crate::worker::Job;
use crate::{results, trace};

const PROCESSES: u64 = 8;
const KEYS: u64 = 6;
const TTL_MS: u64 = 800;

/// The workers have a uid each; the last two share one.
const FIRST_UID: u32 = SHARED_UID + 2 - PROCESSES as u32;

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
        let keys = (0..KEYS).chain([KEYS + slot]).map(|key| format!("{namespace}/k{key}")).collect();
        let job = Job::new(Role::Attempt, mount.root(), keys, seed.wrapping_add(slot + 1), TTL_MS);
        fleet.add(Job { uid: SHARED_UID.min(FIRST_UID + slot as u32), ..job }, true);
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
    mount.wait_applied();
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
        let committed = lease.calls.iter().any(|call| call.op == Op::Commit && call.ok());
        let right = match outcome {
            "completed" => row.result.is_some(),
            "released" => !committed,
            "expired" => !committed && history.may_expire_first(lease, lease.over.max(last_answer(lease))),
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

    use crate::history::testing::{call, made, with};
    use crate::record::{Form, Renewal};

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
    fn a_close_just_before_the_deadline_may_commit_nothing() {
        let closed = 59 * MS;
        let calls = [call(Op::Draft(1), 20 * MS, Ok(0)), call(Op::Finish, closed, Ok(0))];
        // Created anew: only what is not finished can be.
        let created_after = |ttl: Option<u64>| {
            let mut history = made(&[(10, 1, 100, 110, 60 * MS), (11, 2, 300 * MS, 300 * MS + 10, 800 * MS)]);
            let before_release = history.runs[0].calls.len() - 1;
            let calls = ttl.map(|ms| call(Op::Ttl(ms), 200, Ok(0))).into_iter().chain(calls.clone());
            history.runs[0].calls.splice(before_release..before_release, calls);
            history.runs[1].calls[0].op = Op::Claim { form: Form::Create, wait: false };
            history.find_leases();
            trace::check(&history)
        };
        created_after(Some(80)).expect("the server may have heard of it when the lease was over");
        created_after(Some(800)).expect_err("it heard of it long before");
        created_after(None).expect_err("it heard of it long before");
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
