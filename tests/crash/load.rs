//! The load: what each of the sixteen workers does while the server dies under it.
//!
//! Most do everything at random, on keys all want and on keys of their own. A few do one thing from the start of the run to
//! its end, across every kill: hold a lease, share one, write one result, wait in line.
use rand::Rng;
use rand::seq::IndexedRandom;
use std::os::fd::AsRawFd;

use crate::record::{Form, Op, Renewal, Side};
use crate::sys::{self, Answer};
use crate::worker::{Held, Worker};
use crate::{attempt, calls, contend, results, side};

/// Everything, at random. The last two keys are one that is shared throughout, and its own.
pub fn work(worker: &mut Worker) {
    let own = worker.job.keys.pop().expect("an own key");
    let shared = worker.job.keys.pop().expect("a shared key");
    while !worker.stopping() {
        match worker.rng.random_range(0..100) {
            0..=34 => contend::once(worker),
            35..=64 => attempt::once(worker),
            65..=69 => long_result(worker, &own),
            70..=72 => refused(worker, &shared),
            _ => side::once(worker),
        }
    }
}

/// Holds one lease from start to end, reads its own epoch all the time, and renews it in every way.
pub fn pin(worker: &mut Worker) {
    let key = worker.job.keys[0].clone();
    let form = [Form::Create, Form::Flock, Form::Ofd, Form::Posix][worker.job.seed as usize % 4];
    let tries = if worker.job.interrupted { 100 } else { 1 };
    let Some(held) = (0..tries).find_map(|_| worker.claim(&key, form, false, 0)) else {
        return worker.wrong(format!("{key}, which nobody else has, was refused"));
    };
    let Some(epoch) = worker.epoch(&key, &held) else { return };
    worker.claimed();
    let mut step = 0;
    while !worker.stopping() {
        step += 1;
        let note = format!("{key}/{epoch}/{step}/{}", "n".repeat(worker.rng.random_range(0..3_000)));
        let how = *[Renewal::Note, Renewal::Touch, Renewal::Relock].choose(&mut worker.rng).expect("not empty");
        let renewed = worker.renew(&key, &held, how, &note);
        match worker.record(&key, &held) {
            Some((now, record)) if now == epoch => {
                if how == Renewal::Note && renewed.is_ok() && !record.contains(&note) {
                    worker.wrong(format!("{key}: the note of step {step} is not in the record"));
                }
            }
            now => return worker.wrong(format!("{key}: epoch {epoch}, good for a day, is now {now:?}")),
        }
        let pause_us = worker.rng.random_range(0..20_000);
        sys::pause(pause_us);
    }
    worker.close(&key, held);
}

/// Shares a key from start to end: nobody can claim it.
pub fn share(worker: &mut Worker) {
    let key = worker.job.keys[0].clone();
    let Some(held) = worker.claim(&key, Form::Share, true, 0) else {
        return worker.wrong(format!("{key}, which nobody claims, could not be shared"));
    };
    while !worker.stopping() {
        sys::pause(5_000);
        worker.beat();
    }
    worker.close(&key, held);
}

/// Writes one result from start to end, a piece at a time, and commits it.
pub fn report(worker: &mut Worker) {
    let key = worker.job.keys[0].clone();
    let Some(held) = worker.claim(&key, Form::Flock, false, 0) else {
        return worker.wrong(format!("{key}, which nobody else has, was refused"));
    };
    let Some(epoch) = worker.epoch(&key, &held) else { return };
    worker.claimed();
    let payload = results::payload(&key, epoch, std::process::id(), 400_000);
    let mut draft = attempt::draft(worker, &key, epoch);
    let Some(fd) = draft.take() else {
        return worker.wrong(format!("{key}: no draft for the registered attempt"));
    };
    let mut at = 0;
    while at < payload.len() {
        // At the end of the run what is left comes at once.
        let most = if worker.stopping() { payload.len() - at } else { 200.min(payload.len() - at) };
        let piece = &payload.as_bytes()[at..at + most];
        let answer = worker.call(&key, Op::Write, || calls::write_at(&fd, piece, at as u64));
        let Ok(written) = answer else {
            worker.wrong(format!("{key}: byte {at} of a draft was refused with {answer:?}"));
            break;
        };
        at += written as usize;
        let pause_us = worker.rng.random_range(0..60_000);
        sys::pause(pause_us);
    }
    let _ = worker.call(&key, Op::Commit, || sys::fsync(&fd));
    let _ = worker.close_draft(&key, fd);
    read_back(worker, &key, epoch, &payload);
    worker.close(&key, held);
}

/// Waits in line for the key, once, and holds it for a moment.
pub fn queue(worker: &mut Worker) {
    let key = worker.job.keys[0].clone();
    let form = [Form::Flock, Form::Ofd, Form::Posix][worker.job.seed as usize % 3];
    if let Some(held) = worker.claim(&key, form, true, 0) {
        worker.epoch(&key, &held);
        worker.claimed();
        worker.close(&key, held);
    }
}

/// A key that is shared throughout refuses every exclusive claim.
fn refused(worker: &mut Worker, key: &str) {
    let form = *[Form::Create, Form::Flock, Form::Ofd, Form::Posix].choose(&mut worker.rng).expect("not empty");
    if let Some(held) = worker.claim(key, form, false, 0) {
        worker.epoch(key, &held);
        worker.close(key, held);
    }
}

/// On the key nobody else wants: a result in many pieces, appended or written in place, committed and read back; then the key is
/// forgotten and can be created again.
fn long_result(worker: &mut Worker, key: &str) {
    let form = *[Form::Flock, Form::Ofd, Form::Posix].choose(&mut worker.rng).expect("not empty");
    let Some(held) = worker.claim(key, form, worker.job.interrupted, 0) else {
        return worker.wrong(format!("{key}, which nobody else wants, was refused"));
    };
    let Some(epoch) = worker.epoch(key, &held) else {
        return worker.wrong(format!("{key}, which nobody else wants, was lost"));
    };
    worker.claimed();
    let appends = !worker.job.interrupted && worker.once_in(2);
    let path = side::result_path(worker, key, &epoch.to_string());
    let flags = libc::O_WRONLY | libc::O_CREAT | if appends { libc::O_APPEND } else { 0 };
    let mut made = None;
    let _ = worker.call(key, Op::Draft(epoch), || sys::open(&path, flags).map(|fd| made.insert(fd).as_raw_fd() as u64));
    let Some(fd) = made else {
        return worker.wrong(format!("{key}: no draft for the registered attempt"));
    };
    let filler = worker.rng.random_range(0..120_000);
    let payload = results::payload(key, epoch, std::process::id(), filler);
    let pieces = worker.rng.random_range(1..12);
    let mut at = 0;
    for piece in payload.as_bytes().chunks(payload.len().div_ceil(pieces)) {
        let answer = worker
            .call(key, Op::Write, || if appends { sys::write(&fd, piece) } else { calls::write_at(&fd, piece, at) });
        if answer != Ok(piece.len() as u64) {
            worker.wrong(format!("{key}: {answer:?} for {} bytes of a draft", piece.len()));
        }
        at += piece.len() as u64;
    }
    if worker.once_in(2) {
        let _ = worker.call(key, Op::Commit, || sys::fsync(&fd));
    }
    let _ = worker.close_draft(key, fd);
    read_back(worker, key, epoch, &payload);
    worker.close(key, held);
    if !worker.job.interrupted && worker.once_in(2) {
        forget(worker, key);
    }
}

/// A finished key is forgotten by its last holder, and free.
fn forget(worker: &mut Worker, key: &str) {
    let path = worker.claim_path(key);
    let answer: Answer = worker.call(key, Op::Forget, || sys::on_path(libc::unlink, &path));
    if answer.is_err() {
        worker.wrong(format!("{key}, finished, could not be forgotten: {answer:?}"));
    }
    if let Some(held) = worker.claim(key, Form::Create, false, 0) {
        let held: Held = held;
        worker.epoch(key, &held);
        worker.claimed();
        worker.close(key, held);
    } else {
        worker.wrong(format!("{key} was forgotten, and could not be created"));
    }
}

/// The result just committed is there, whole, and the latest.
fn read_back(worker: &Worker, key: &str, epoch: u64, payload: &str) {
    let text = side::read_file(worker, key, Side::Result, &side::result_path(worker, key, &epoch.to_string()));
    if text.as_deref() != Some(payload.as_bytes()) {
        worker.wrong(format!(
            "the result of epoch {epoch} of {key}, just committed, is {:?} bytes",
            text.map(|t| t.len())
        ));
    }
    let latest = side::latest(worker, key);
    if latest != Some(epoch) {
        worker.wrong(format!("epoch {epoch} of {key} was committed, and the latest is {latest:?}"));
    }
}
