//! S1, contested keys: many processes race for few keys by every form of claim, and are stopped, killed and replaced meanwhile.
//!
//! Judged by the holders' own time stamps: no two holding times of a key overlap, every epoch has one winner, and the
//! epochs of a key grow with time. The register check and the books of [`registry`](crate::registry) come on top.
use std::fs;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use serial_test::serial;

use crate::common::{Mount, wait_for};
use crate::fleet::{Chaos, Fleet};
use crate::history::{History, Lease, Violation};
use crate::record::{Form, Op, Renewal};
use crate::settings::Settings;
use crate::sys::{self, Number};
use crate::worker::{Held, Job, Role, Worker};
use crate::{registry, trace};

const PROCESSES: u64 = 8;
const KEYS: u64 = 4;
const TTL_MS: u64 = 24 * 3_600_000;

/// A worker of S1.
pub fn contend(worker: &mut Worker) {
    while !worker.stopping() {
        let key = worker.any_key();
        let (form, wait) = *[
            (Form::Create, false),
            (Form::Create, false),
            (Form::Flock, false),
            (Form::Flock, true),
            (Form::Ofd, false),
            (Form::Ofd, true),
            (Form::Posix, false),
            (Form::Posix, true),
            (Form::Share, false),
        ]
        .choose(&mut worker.rng)
        .expect("not empty");
        let alarm_us = if worker.once_in(3) { worker.rng.random_range(50..20_000) } else { 0 };
        match worker.claim(&key, form, wait, alarm_us) {
            Some(held) if form == Form::Share => share(worker, &key, held),
            Some(held) => hold(worker, &key, held),
            None => {
                if worker.once_in(8) {
                    worker.observe(&key);
                }
                let pause_us = worker.rng.random_range(0..300);
                sys::pause(pause_us);
            }
        }
    }
}

/// Waits in line for the key, once, and holds it for a moment.
pub fn queue(worker: &mut Worker) {
    let key = worker.any_key();
    if let Some(held) = worker.claim(&key, Form::Flock, true, 0) {
        worker.epoch(&key, &held);
        worker.claimed();
        worker.close(&key, held);
    }
}

fn share(worker: &mut Worker, key: &str, held: Held) {
    let pause_us = worker.rng.random_range(0..500);
    sys::pause(pause_us);
    worker.beat();
    worker.close(key, held);
}

/// Holds for a moment: copies the handle in all ways, lets the copies go, and releases in one of the ways there are.
fn hold(worker: &mut Worker, key: &str, mut held: Held) {
    let Some(epoch) = worker.epoch(key, &held) else {
        worker.wrong(format!("a lease of {key} without end was lost"));
        return;
    };
    worker.claimed();
    if worker.once_in(50) {
        // Long enough that those in line are looked after, and interrupted.
        let pause_us = worker.rng.random_range(20_000..50_000);
        sys::pause(pause_us);
        worker.beat();
    }
    for _ in 0..worker.rng.random_range(0..4) {
        match worker.rng.random_range(0..12) {
            0 | 1 => sys::pause(0),
            2 | 3 => {
                let pause_us = worker.rng.random_range(1..2_000);
                sys::pause(pause_us);
            }
            4 => drop(held.fd.try_clone().expect("dup")),
            5 => {
                let copy = held.fd.try_clone().expect("dup");
                let _ = sys::close(std::mem::replace(&mut held.fd, copy));
            }
            6 => worker.fork_and_exit(),
            7 => {
                let _ = worker.renew(key, &held, Renewal::Relock, "");
            }
            8 => {
                let _ = worker.renew(key, &held, Renewal::Note, &format!("{key} {epoch}"));
            }
            _ => {}
        }
        worker.beat();
        if worker.epoch(key, &held).is_some_and(|now| now != epoch) {
            worker.wrong(format!("epoch {epoch} of {key} changed while held"));
        }
    }
    match worker.rng.random_range(0..24) {
        0..=9 => worker.close(key, held),
        10..=15 => {
            let _ = worker.unlock(key, &held);
            // The same handle may claim again, for a new epoch.
            if held.form != Form::Create
                && worker.once_in(2)
                && let Some(held) = worker.lock(key, held, false, 0)
            {
                if worker.epoch(key, &held).is_some_and(|now| now <= epoch) {
                    worker.wrong(format!("{key}: no new epoch after epoch {epoch} was unlocked"));
                }
                worker.claimed();
                worker.close(key, held);
            }
        }
        16..=19 => {
            let _ = worker.unlink(key);
            worker.close(key, held);
        }
        20..=22 => {
            let hold_us = worker.rng.random_range(0..1_000);
            worker.hand_over(key, held, hold_us);
        }
        _ => worker.exit_holding(key),
    }
}

/// No two holding times of a key overlap, unless both are shared.
pub fn no_overlap(history: &History) -> Result<usize, Violation> {
    let mut checked = 0;
    for key in history.keys() {
        let leases = history.leases.iter().filter(|lease| lease.key == key);
        let mut held: Vec<(u64, u64, &Lease)> =
            leases.filter_map(|lease| history.held(lease).map(|(from, until)| (from, until, lease))).collect();
        held.sort_by_key(|&(from, ..)| from);
        // The latest end so far, of the exclusive leases and of the shared ones.
        let (mut exclusive, mut shared) = (None::<(u64, &Lease)>, None::<(u64, &Lease)>);
        for (from, until, lease) in held {
            let is_shared = lease.form == Form::Share;
            let against = [exclusive, shared.filter(|_| !is_shared)];
            if let Some((end, other)) = against.into_iter().flatten().find(|(end, _)| *end >= from) {
                let what = format!(
                    "pid {} (epoch {:?}) held from {from}, while pid {} (epoch {:?}) held until {end}",
                    lease.pid, lease.epoch, other.pid, other.epoch
                );
                return Err(history.violation("I-MUTEX", &key, from, what));
            }
            let latest = if is_shared { &mut shared } else { &mut exclusive };
            if latest.is_none_or(|(end, _)| end < until) {
                *latest = Some((until, lease));
            }
            checked += 1;
        }
    }
    Ok(checked)
}

/// Every (key, epoch) has one winner, and a later claim a greater epoch.
pub fn epochs_grow(history: &History) -> Result<(), Violation> {
    for key in history.keys() {
        let leases = history.leases.iter().filter(|lease| lease.key == key);
        let mut told: Vec<(u64, u64, u64, &Lease)> =
            leases.filter_map(|lease| Some((lease.epoch?, lease.asked, lease.granted?, lease))).collect();
        told.sort_by_key(|&(epoch, ..)| epoch);
        // The latest claim call so far that began, going up the epochs.
        let mut latest: Option<(u64, &Lease)> = None;
        for pair in told.windows(2) {
            if pair[0].0 == pair[1].0 {
                let what =
                    format!("epoch {} has two winners: pid {} and pid {}", pair[0].0, pair[0].3.pid, pair[1].3.pid);
                return Err(history.violation("I-EPOCH-UNIQ", &key, pair[1].2, what));
            }
        }
        for (epoch, asked, granted, lease) in told {
            if let Some((begun, other)) = latest
                && granted < begun
            {
                let what = format!(
                    "epoch {epoch} (pid {}) was granted before pid {} asked for what became epoch {:?}",
                    lease.pid, other.pid, other.epoch
                );
                return Err(history.violation("I-EPOCH-UNIQ", &key, granted, what));
            }
            if latest.is_none_or(|(begun, _)| begun < asked) {
                latest = Some((asked, lease));
            }
        }
    }
    Ok(())
}

#[test]
#[serial]
fn s1_contested_keys_have_one_holder_each() {
    let settings = Settings::read("S1");
    let mount = Mount::shared();
    for round in settings.rounds() {
        s1_round(&mount, &settings, round).unwrap_or_else(|e| panic!("S1 seed {} round {round}: {e}", settings.seed));
    }
    mount.verify();
}

fn s1_round(mount: &Mount, settings: &Settings, round: u64) -> Result<(), Violation> {
    let namespace = format!("s1-{round}");
    make_namespace(mount, &namespace);
    let logs = mount.scratch().join(&namespace);
    let mut fleet = Fleet::new(&logs);
    let seed = settings.seed.wrapping_add(round << 32);
    for slot in 0..PROCESSES {
        let job = Job {
            role: Role::Contend,
            root: mount.root(),
            keys: (0..KEYS).map(|key| format!("{namespace}/k{key}")).collect(),
            log: logs.clone(),
            board: logs.clone(),
            seed: seed.wrapping_add(slot + 1),
            uid: if slot % 2 == 0 { 0 } else { 20_000 + slot as u32 },
            nested: false,
            ttl_ms: TTL_MS,
        };
        fleet.add(job, true);
    }
    let rng = StdRng::seed_from_u64(seed);
    let mut chaos = Chaos { rng, freeze_once_in: 12, freeze_ms: (1, 40), kill_once_in: 40 };
    let history = run(&mut fleet, &mut chaos, settings.claims, TTL_MS)?;

    let intervals = no_overlap(&history)?;
    epochs_grow(&history)?;
    let report = trace::check(&history)?;
    // The end of the last processes is on its way to the server; a status answers behind it.
    for key in history.keys() {
        wait_for("all handles are closed", || mount.state_of(&key) == "free");
    }
    let (rows, keys) = registry::read_settled(&mount.state(), &namespace);
    let books = registry::balance(&history, &rows, &keys)?;
    let is_claim = |op: Op| matches!(op, Op::Claim { .. });
    println!(
        "S1 round {round}: {} claims, {} denials, {} waits, {} interrupted, {} kills, {} freezes; {} epochs ({} untold); \
         {intervals} holding times without overlap; {} register calls in order ({} denials explained, {} excused, widest {})",
        history.count(|call| is_claim(call.op) && call.ok()),
        history.count(|call| is_claim(call.op) && matches!(call.answer, Some(Err(libc::EEXIST | libc::EAGAIN)))),
        history.count(|call| matches!(call.op, Op::Claim { wait: true, .. })),
        history.count(|call| call.answer == Some(Err(libc::EINTR))),
        fleet.kills,
        fleet.freezes.len(),
        books.epochs,
        books.untold,
        report.checked.calls,
        report.denials,
        report.excused,
        report.checked.widest,
    );
    drop(fleet);
    fs::remove_dir_all(&logs).expect("logs can be removed");
    Ok(())
}

/// Runs a fleet until so many claims were told or something went wrong, ends it, and gives what it did.
pub fn run(fleet: &mut Fleet, chaos: &mut Chaos, claims: u64, ttl_ms: u64) -> Result<History, Violation> {
    let mut ran = Ok(());
    while ran.is_ok() && fleet.board.get(Number::Claims) < claims && fleet.board.get(Number::Wrong) == 0 {
        chaos.step(fleet);
        ran = fleet.tend();
        std::thread::sleep(Duration::from_millis(1));
    }
    finish(fleet, ran, ttl_ms)
}

/// Ends a fleet and reads what it wrote.
pub fn finish(fleet: &mut Fleet, ran: Result<(), String>, ttl_ms: u64) -> Result<History, Violation> {
    let ended = ran.and_then(|()| fleet.finish());
    let stalls = ended.as_ref().cloned().unwrap_or_default();
    let history = History::load(&fleet.gone, ttl_ms, stalls);
    match ended {
        Ok(_) => history,
        // What the workers saw explains more than that one of them is stuck.
        Err(trouble) => Err(history.err().unwrap_or_else(|| Violation {
            invariant: "LIVENESS",
            key: String::new(),
            what: trouble,
            history: String::new(),
        })),
    }
}

/// A namespace open to all.
pub fn make_namespace(mount: &Mount, namespace: &str) {
    let path = mount.claim(namespace);
    fs::create_dir(&path).expect("mkdir of a namespace");
    crate::common::set_mode(&path, 0o777);
}

#[test]
#[serial]
fn s1_waiters_get_the_key_in_order_of_arrival() {
    let mount = Mount::new();
    make_namespace(&mount, "line");
    let logs = mount.scratch().join("line");
    let mut fleet = Fleet::new(&logs);
    let first = fs::File::create(mount.claim("line/k")).expect("open");
    first.lock().expect("a free key");
    let waiters = 12;
    for slot in 0..waiters {
        let job = Job {
            role: Role::Queue,
            root: mount.root(),
            keys: vec!["line/k".into()],
            log: logs.clone(),
            board: logs.clone(),
            seed: slot,
            uid: 0,
            nested: false,
            ttl_ms: TTL_MS,
        };
        fleet.add(job, false);
        wait_for("one more in line", || mount.status("line/k")["waiters"].as_u64() == Some(slot + 1));
    }
    drop(first);
    let history = finish(&mut fleet, Ok(()), TTL_MS).expect("the line moves");
    let mut leases: Vec<&Lease> = history.leases.iter().collect();
    leases.sort_by_key(|lease| lease.epoch);
    let order: Vec<usize> = leases.iter().map(|lease| history.runs[lease.run].slot).collect();
    let key = "line/k";
    if order != (0..waiters as usize).collect::<Vec<_>>() {
        let what = format!("workers waited in the order 0, 1, 2, … and were granted in the order {order:?}");
        panic!("{}", history.violation("FIFO", key, leases[0].asked, what));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::history::testing::made;

    #[test]
    fn accepts_holding_times_that_only_touch_the_calls_of_others() {
        // The second asked while the first held, and was granted after the first began its release.
        let history = made(&[(10, 1, 100, 110, 150), (11, 2, 120, 152, 170), (12, 3, 180, 190, 200)]);
        assert_eq!(no_overlap(&history).expect("right"), 3);
        epochs_grow(&history).expect("right");
        trace::check(&history).expect("right");
    }

    #[test]
    fn rejects_overlapping_holding_times() {
        let history = made(&[(10, 1, 100, 110, 150), (11, 2, 120, 140, 170)]);
        let violation = no_overlap(&history).expect_err("both held at 140");
        assert_eq!(violation.invariant, "I-MUTEX");
        assert!(violation.history.contains("pid 10") && violation.history.contains("pid 11"), "{violation}");
        trace::check(&history).expect_err("no order explains it");
        // An overlap with a lease further back than the one before.
        let history = made(&[(10, 1, 100, 110, 900), (11, 2, 120, 950, 960), (12, 3, 130, 500, 510)]);
        no_overlap(&history).expect_err("12 held inside 10");
    }

    #[test]
    fn a_killed_holder_held_until_its_last_sign_of_life_and_no_longer() {
        let mut history = made(&[(10, 1, 100, 110, 0), (11, 2, 120, 140, 170)]);
        history.runs[0].calls.truncate(2);
        history.runs[0].killed = true;
        history.runs[0].gone = 135;
        for (last, right) in [(130, true), (139, true), (141, false)] {
            history.runs[0].last = last;
            history.find_leases();
            assert_eq!(no_overlap(&history).is_ok(), right, "last sign at {last}");
        }
    }

    #[test]
    fn shares_overlap_each_other_and_nothing_else() {
        let mut history = made(&[(10, 1, 100, 110, 150), (11, 1, 120, 140, 170), (12, 1, 160, 180, 190)]);
        for lease in &mut history.leases[..2] {
            lease.form = Form::Share;
        }
        no_overlap(&history).expect("shares may overlap");
        history.leases[0].form = Form::Flock;
        no_overlap(&history).expect_err("a share beside an exclusive lease");
        history.leases[0].form = Form::Share;
        history.leases[2].granted = Some(165);
        no_overlap(&history).expect_err("an exclusive lease beside a share");
    }

    #[test]
    fn rejects_two_winners_of_an_epoch_and_epochs_that_fall() {
        let twice = made(&[(10, 1, 100, 110, 150), (11, 1, 160, 170, 180)]);
        assert_eq!(epochs_grow(&twice).expect_err("epoch 1 twice").invariant, "I-EPOCH-UNIQ");
        let falls = made(&[(10, 2, 100, 110, 150), (11, 1, 160, 170, 180)]);
        epochs_grow(&falls).expect_err("epoch 2 before epoch 1");
        let distant = made(&[(10, 3, 100, 110, 150), (11, 1, 160, 170, 180), (12, 2, 190, 200, 210)]);
        epochs_grow(&distant).expect_err("epoch 3 came first");
        trace::check(&twice).expect_err("no order explains it");
        trace::check(&falls).expect_err("no order explains it");
    }
}
