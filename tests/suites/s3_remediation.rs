//! S3, hostile remediation: evictors with no more than anybody's rights work all the time against holders of every kind.
//!
//! The holders: live, frozen past their TTL, newly started, in another pid namespace, under another uid. No live lease may end
//! early, whatever the evictors try, and none may outlive its TTL by more than 100 ms, measured at the next in line.
use std::collections::HashMap;
use std::fs;
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serial_test::serial;

use crate::common::{Mount, wait_for};
use crate::fleet::{Fleet, Freeze};
use crate::history::{History, Lease, Violation};
use crate::judge::{epochs_grow, no_overlap};
use crate::record::{Form, Op, Renewal};
use crate::roles::Role;
use crate::round::{finish, make_namespace};
use crate::settings::Settings;
use crate::sys::{self, Number};
use crate::worker::{Held, Job, Worker};
use crate::{registry, trace};

const TTL_MS: u64 = 300;
const PIN_TTL_MS: u64 = 3_600_000;

/// A holder that holds as long as it may: it waits for the key, renews it many times, and lets it go.
pub fn keep(worker: &mut Worker) {
    while !worker.stopping() {
        let key = worker.any_key();
        let form = [Form::Flock, Form::Ofd, Form::Posix][worker.rng.random_range(0..3)];
        let Some(held) = worker.claim(&key, form, true, 0) else {
            continue;
        };
        // Renewed at once: from here on the deadline is known exactly, however long the wait was.
        let _ = worker.renew(&key, &held, Renewal::Note, "starts");
        if worker.epoch(&key, &held).is_none() {
            stale(worker, &key, held);
            continue;
        }
        worker.claimed();
        let mut lost = false;
        for step in 0..worker.rng.random_range(4..40) {
            let pause_us = worker.rng.random_range(1_000..worker.job.ttl_ms * 300);
            sys::pause(pause_us);
            let how = [Renewal::Note, Renewal::Touch, Renewal::Relock][worker.rng.random_range(0..3)];
            let renewed = worker.renew(&key, &held, how, &format!("step {step}"));
            lost = renewed.is_err() || worker.epoch(&key, &held).is_none();
            if lost || worker.stopping() {
                break;
            }
        }
        if lost { stale(worker, &key, held) } else { worker.close(&key, held) }
    }
}

/// Lost: by evictor or TTL. Whatever is tried with the old handle, the next holder keeps the key.
fn stale(worker: &mut Worker, key: &str, held: Held) {
    for how in [Renewal::Note, Renewal::Relock] {
        let _ = worker.renew(key, &held, how, "stale");
    }
    let _ = worker.unlink(key);
    let _ = worker.unlock(key, &held);
    worker.close(key, held);
}

/// Holds one lease from the start of the run to its end.
pub fn pin(worker: &mut Worker) {
    let key = worker.any_key();
    let held = loop {
        let Some(held) = worker.claim(&key, Form::Create, false, 0) else {
            continue;
        };
        if worker.set_ttl(&key, &held, PIN_TTL_MS).is_ok() {
            break held;
        }
        worker.close(&key, held);
    };
    worker.epoch(&key, &held);
    worker.claimed();
    while !worker.stopping() {
        sys::pause(15_000);
        if worker.epoch(&key, &held).is_none() {
            worker.wrong(format!("the lease of {key}, good for an hour, was lost"));
            break;
        }
    }
    worker.close(&key, held);
}

/// A process that has hardly started: claims, holds for a moment, ends.
pub fn fresh(worker: &mut Worker) {
    let key = worker.any_key();
    let form = if worker.once_in(2) { Form::Flock } else { Form::Create };
    for _ in 0..50 {
        if let Some(held) = worker.claim(&key, form, form == Form::Flock, 0) {
            if worker.epoch(&key, &held).is_some() {
                worker.claimed();
                let pause_us = worker.rng.random_range(0..20_000);
                sys::pause(pause_us);
                worker.epoch(&key, &held);
            }
            worker.exit_holding(&key);
        }
        if worker.stopping() {
            break;
        }
        sys::pause(1_000);
    }
}

/// A holder that comes and goes all the time: most of what the evictors try meets a lease that has just begun or ended.
pub fn brief(worker: &mut Worker) {
    while !worker.stopping() {
        let key = worker.any_key();
        let (form, wait) = [(Form::Create, false), (Form::Flock, true), (Form::Ofd, true), (Form::Posix, true)]
            [worker.rng.random_range(0..4)];
        if let Some(held) = worker.claim(&key, form, wait, 0) {
            if worker.epoch(&key, &held).is_some() {
                worker.claimed();
            }
            let pause_us = worker.rng.random_range(0..3_000);
            sys::pause(pause_us);
            worker.epoch(&key, &held);
            worker.close(&key, held);
        }
        let pause_us = worker.rng.random_range(0..500);
        sys::pause(pause_us);
    }
}

/// How exactly the deadlines were kept.
#[derive(Clone, Copy, Debug, Default)]
struct Deadlines {
    /// Leases taken over while the holder had not let go.
    taken: usize,
    /// Those taken by one who was in line already: how late, from the latest possible deadline, in total and at most.
    in_line: usize,
    late_ns: u64,
    latest_ns: u64,
    /// Those for which the machine's own standing still had to be allowed for.
    allowed: usize,
}

/// The next lease of a key is never granted before the last one's deadline, and to one in line at most 100 ms after it.
fn deadlines_hold(history: &History, freezes: &[Freeze]) -> Result<Deadlines, Violation> {
    let mut found = Deadlines::default();
    let exclusive = history.leases.iter().filter(|lease| lease.form != Form::Share);
    let by_epoch: HashMap<(&str, u64), &Lease> =
        exclusive.filter_map(|lease| Some(((lease.key.as_str(), lease.epoch?), lease))).collect();
    for (&(key, epoch), &next) in &by_epoch {
        let Some(&last) = by_epoch.get(&(key, epoch - 1)) else {
            continue;
        };
        let Some(granted) = next.granted else {
            continue;
        };
        if history.evicted(last).is_some() {
            continue;
        }
        let (earliest, latest) = history.deadline(last);
        if granted < last.end {
            found.taken += 1;
            if granted < earliest {
                let early = (earliest - granted) as f64 / 1e6;
                let what = format!("epoch {epoch} was granted {early:.3} ms before epoch {} ran out", epoch - 1);
                return Err(history.violation("I-REAP-SAFETY", key, granted, what));
            }
        }
        let slot = history.runs[next.run].slot;
        let frozen =
            freezes.iter().any(|freeze| freeze.slot == slot && freeze.from <= granted && freeze.to >= earliest);
        let due = history.grace(latest);
        if next.asked > earliest || frozen || last.end <= due && granted >= last.end {
            continue;
        }
        if granted > due {
            let late = (granted - latest) as f64 / 1e6;
            let what = format!("epoch {} outlived its TTL by {late:.3} ms, with pid {} in line", epoch - 1, next.pid);
            return Err(history.violation("I-TTL-BOUND", key, granted, what));
        }
        found.in_line += 1;
        let late = granted.saturating_sub(latest);
        found.late_ns += late;
        found.latest_ns = found.latest_ns.max(late);
        found.allowed += usize::from(late > 100_000_000);
    }
    Ok(found)
}

#[test]
#[serial]
fn s3_no_lease_ends_early_or_late() {
    let settings = Settings::read("S3");
    let mount = Mount::shared();
    for round in settings.rounds() {
        s3_round(&mount, &settings, round).unwrap_or_else(|e| panic!("S3 seed {} round {round}: {e}", settings.seed));
    }
    mount.verify();
}

/// Who takes part: role, key, uid, in a pid namespace of its own, started again when it ends.
const HOLDERS: &[(Role, &str, u32, bool, bool)] = &[
    (Role::Keep, "live0", 0, false, true),
    (Role::Keep, "live1", 20_001, false, true),
    (Role::Keep, "live2", 0, true, true),
    (Role::Keep, "frozen0", 0, false, true),
    (Role::Keep, "frozen0", 20_002, false, true),
    (Role::Keep, "frozen0", 0, true, true),
    (Role::Keep, "frozen1", 20_003, false, true),
    (Role::Keep, "frozen1", 0, false, true),
    (Role::Keep, "prey", 20_004, false, true),
    (Role::Keep, "prey", 0, false, true),
    (Role::Fresh, "fresh", 0, false, true),
    (Role::Fresh, "fresh", 20_005, false, true),
    (Role::Brief, "brief", 0, false, true),
    (Role::Brief, "brief", 20_007, false, true),
    (Role::Pin, "pin0", 0, true, false),
    (Role::Pin, "pin1", 20_006, false, false),
];

/// The evictors: uid, in a pid namespace of its own.
const EVICTORS: &[(u32, bool)] = &[(0, false), (30_000, false), (0, true)];

fn s3_round(mount: &Mount, settings: &Settings, round: u64) -> Result<(), Violation> {
    let namespace = format!("s3-{round}");
    make_namespace(mount, &namespace);
    let directory = sys::open(&mount.claim(&namespace), libc::O_RDONLY | libc::O_DIRECTORY).expect("namespace");
    sys::set_xattr(&directory, "user.lease.ttl", &format!("{TTL_MS}ms")).expect("TTL of the namespace");
    drop(directory);
    // Keeps the namespace from being empty, hence from being removed.
    let flags = libc::O_RDWR | libc::O_CREAT | libc::O_EXCL;
    let anchor = sys::open(&mount.claim(&format!("{namespace}/anchor")), flags).expect("anchor");
    sys::set_xattr(&anchor, "user.lease.ttl", "365d").expect("TTL of the anchor");

    let logs = mount.scratch().join(&namespace);
    let mut fleet = Fleet::new(&logs);
    let seed = settings.seed.wrapping_add(round << 32);
    let mut keys: Vec<String> = HOLDERS.iter().map(|(_, key, ..)| format!("{namespace}/{key}")).collect();
    let job = |role, keys: &[String], uid, nested, salt: usize| {
        let seed = seed.wrapping_add(salt as u64 + 1);
        Job { uid, nested, ..Job::new(role, mount.root(), keys.to_vec(), seed, TTL_MS) }
    };
    for (at, &(role, _, uid, nested, again)) in HOLDERS.iter().enumerate() {
        fleet.add(job(role, &keys[at..=at], uid, nested, at), again);
    }
    keys.sort();
    keys.dedup();
    // The evictors start when every key has had an epoch and the pins have their hour.
    for key in &keys {
        mount.wait_status(key, "claimed", |status| {
            let pinned = status["ttl_ms"].as_u64() == Some(PIN_TTL_MS);
            status["epoch"].as_u64() >= Some(1) && (pinned || !key.contains("/pin"))
        });
    }
    for (at, &(uid, nested)) in EVICTORS.iter().enumerate() {
        fleet.add(job(Role::Evict, &keys, uid, nested, HOLDERS.len() + at), false);
    }

    let mut rng = StdRng::seed_from_u64(seed);
    let until = Instant::now() + settings.hostile;
    let mut ran = Ok(());
    while ran.is_ok() && Instant::now() < until && fleet.board.get(Number::Wrong) == 0 {
        if rng.random_ratio(1, 40) {
            let frozen: Vec<usize> = (0..HOLDERS.len()).filter(|&at| HOLDERS[at].1.starts_with("frozen")).collect();
            let ms = rng.random_range(TTL_MS..TTL_MS + 350);
            fleet.freeze(frozen[rng.random_range(0..frozen.len())], ms);
        }
        if rng.random_ratio(1, 1_000) {
            // Never a pin: those hold all the time.
            let mortal = HOLDERS.iter().filter(|holder| holder.0 != Role::Pin).count();
            fleet.kill(rng.random_range(0..mortal), true);
        }
        ran = fleet.tend();
        std::thread::sleep(Duration::from_millis(1));
    }
    let history = finish(&mut fleet, ran, TTL_MS)?;
    sys::close(anchor).expect("close");

    no_overlap(&history)?;
    epochs_grow(&history)?;
    let deadlines = deadlines_hold(&history, &fleet.freezes)?;
    let report = trace::check(&history)?;
    for key in &keys {
        wait_for("all handles are closed", || mount.state_of(key) == "free");
    }
    mount.wait_applied();
    let (rows, epochs) = registry::read_settled(&mount.state(), &namespace);
    let books = registry::balance(&history, &rows, &epochs)?;
    print_round(round, &history, &fleet, &deadlines, &books, &report);
    drop(fleet);
    fs::remove_dir_all(&logs).expect("logs can be removed");
    Ok(())
}

fn print_round(
    round: u64,
    history: &History,
    fleet: &Fleet,
    deadlines: &Deadlines,
    books: &registry::Books,
    report: &trace::Report,
) {
    let is = |op: fn(Op) -> bool, ok: bool| history.count(|call| op(call.op) && call.ok() == ok);
    println!(
        "S3 round {round}: {} claims, {} denials, {} renewals, {} refused, {} evictions, {} missed or refused, {} unlinks refused, \
         {} kills, {} freezes; {} epochs ({} untold, {} expired); {} leases taken at their TTL, {} by one in line: {:.1} ms late on \
         average, {:.1} ms at most ({} with the machine standing still); {} register calls in order (widest {})",
        is(|op| matches!(op, Op::Claim { .. }), true),
        is(|op| matches!(op, Op::Claim { .. }), false),
        is(|op| matches!(op, Op::Renew(_)), true),
        is(|op| matches!(op, Op::Renew(_)), false),
        is(|op| matches!(op, Op::Evict(_)), true),
        is(|op| matches!(op, Op::Evict(_)), false),
        is(|op| op == Op::Forget, false),
        fleet.kills,
        fleet.freezes.len(),
        books.epochs,
        books.untold,
        books.expired,
        deadlines.taken,
        deadlines.in_line,
        deadlines.late_ns as f64 / 1e6 / deadlines.in_line.max(1) as f64,
        deadlines.latest_ns as f64 / 1e6,
        deadlines.allowed,
        report.checked.calls,
        report.checked.widest,
    );
    for (_, tally) in history.runs.iter().flat_map(|run| &run.notes).filter(|(_, text)| text.starts_with("tally")) {
        println!("S3 round {round}: {tally}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::history::testing::made;

    const MS: u64 = 1_000_000;

    /// Epoch 1 claimed at 1 ms, with a TTL of 50 ms, and let go only at 900 ms; epoch 2 asked for at 20 ms, granted then.
    fn taken_at(granted_ms: u64) -> History {
        let mut history =
            made(&[(10, 1, MS, MS + 10, 900 * MS), (11, 2, 20 * MS, granted_ms * MS, granted_ms * MS + 5 * MS)]);
        history.ttl = 50 * MS;
        history
    }

    #[test]
    fn accepts_a_take_over_between_the_deadline_and_100_ms_later() {
        for granted in [52, 100, 150] {
            let found = deadlines_hold(&taken_at(granted), &[]).expect("in time");
            assert_eq!((found.taken, found.in_line), (1, 1));
        }
        trace::check(&taken_at(100)).expect("in order");
    }

    #[test]
    fn a_claimer_frozen_in_line_past_its_ttl_held_nothing() {
        // Granted in line, stopped for longer than the TTL, told of it while the next one holds.
        let mut history = made(&[(10, 0, MS, 300 * MS, 0), (11, 2, 20 * MS, 120 * MS, 500 * MS)]);
        history.ttl = 50 * MS;
        assert_eq!(history.held(&history.leases[0]), None);
        no_overlap(&history).expect("only the second held");
    }

    #[test]
    fn rejects_a_lease_that_ended_early_or_late() {
        assert_eq!(deadlines_hold(&taken_at(50), &[]).expect_err("1 ms early").invariant, "I-REAP-SAFETY");
        assert_eq!(deadlines_hold(&taken_at(152), &[]).expect_err("101 ms late").invariant, "I-TTL-BOUND");
        // Late also when the old holder had let go at last, long after its deadline.
        assert_eq!(deadlines_hold(&taken_at(902), &[]).expect_err("after the release").invariant, "I-TTL-BOUND");
        trace::check(&taken_at(50)).expect_err("no order explains it");
        no_overlap(&taken_at(50)).expect_err("both held");
    }

    #[test]
    fn allows_for_a_frozen_taker_and_a_machine_that_stood_still() {
        let frozen = Freeze { slot: 1, from: 40 * MS, to: 151 * MS };
        deadlines_hold(&taken_at(152), &[frozen]).expect("it could not have noticed");
        let elsewhere = Freeze { slot: 0, ..frozen };
        deadlines_hold(&taken_at(152), &[elsewhere]).expect_err("the taker was awake");
        let mut stalled = taken_at(152);
        stalled.stalls.push((100 * MS, 120 * MS));
        assert_eq!(deadlines_hold(&stalled, &[]).expect("20 ms more").allowed, 1);
        let mut too_late = taken_at(172);
        too_late.stalls.push((100 * MS, 120 * MS));
        deadlines_hold(&too_late, &[]).expect_err("not that late");
    }

    #[test]
    fn an_eviction_explains_an_early_end_of_its_epoch_alone() {
        let mut history = taken_at(40);
        let evict = |epoch| crate::history::Call {
            key: "n/k".into(),
            op: Op::Evict(epoch),
            asked: 30 * MS,
            returned: Some(31 * MS),
            answer: Some(Ok(0)),
        };
        let release = history.runs[1].calls.pop().expect("release");
        history.runs[1].calls.extend([release, evict(1)]);
        history.find_leases();
        deadlines_hold(&history, &[]).expect("evicted");
        trace::check(&history).expect("in order");
        history.runs[1].calls.pop();
        history.runs[1].calls.push(evict(2));
        history.find_leases();
        deadlines_hold(&history, &[]).expect_err("epoch 2 was evicted, not epoch 1");
    }
}
