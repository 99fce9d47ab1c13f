//! The workers that race for keys: every form of claim, all that may be done with a handle, every way to let go.
use rand::Rng;
use rand::seq::IndexedRandom;

use crate::record::{Form, Renewal};
use crate::sys;
use crate::worker::{Held, Worker};

/// A worker of S1.
pub fn contend(worker: &mut Worker) {
    while !worker.stopping() {
        once(worker);
    }
}

/// One claim, and what becomes of it.
pub fn once(worker: &mut Worker) {
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
