//! The workers that live whole attempts: renewals, short TTLs, results early, late and cut short, every kind of end.
use rand::Rng;
use rand::seq::IndexedRandom;

use crate::record::{Form, Op, Renewal};
use crate::results;
use crate::sys::{self, Alarm};
use crate::worker::{Held, Worker};

/// Workers have a uid each, so that a TTL set by path reaches nobody else's lease. Those of this uid, and root, set none:
/// they could stamp their results on each other's attempts if they were let.
pub const SHARED_UID: u32 = 20_006;

/// A worker of S2.
pub fn attempt(worker: &mut Worker) {
    // The last key is its own.
    let own = worker.job.keys.pop().expect("keys");
    while !worker.stopping() {
        if worker.once_in(60) {
            alone(worker, &own);
        }
        once(worker);
    }
}

/// One life of an attempt, or the attempt to get one.
pub fn once(worker: &mut Worker) {
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
        if form == Form::Create && !worker.job.interrupted && worker.once_in(3) {
            forget(worker, &key);
        }
        if worker.once_in(6) {
            worker.observe(&key);
        }
        let pause_us = worker.rng.random_range(0..500);
        sys::pause(pause_us);
        return;
    };
    match worker.epoch(&key, &held) {
        Some(epoch) => {
            worker.claimed();
            live(worker, &key, held, epoch);
        }
        None => worker.close(&key, held),
    }
}

/// Overstays on a key nobody else wants: nothing but the time ends the lease.
pub fn alone(worker: &mut Worker, key: &str) {
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
    let mut ttl_ms = worker.job.ttl_ms;
    if ![0, SHARED_UID].contains(&worker.job.uid) && worker.once_in(3) {
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
        let _ = worker.close_draft(key, fd);
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

/// Opens a draft of the attempt.
pub fn draft(worker: &mut Worker, key: &str, epoch: u64) -> Option<std::os::fd::OwnedFd> {
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
                let _ = worker.close_draft(key, fd);
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
    let _ = worker.close_draft(key, fd);
}
