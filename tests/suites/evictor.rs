//! The evictors of S3: all that anybody may try against a lease that is not theirs, over and over.
//!
//! Each attempt has its answers; any other is a violation on the spot. Whether a lease suffered is for the checkers to see, from
//! its holder's own log. A claim that succeeds because the key was free is a claim like any other, and logged as one.
use std::collections::BTreeMap;
use std::path::Path;

use rand::Rng;

use crate::record::{Form, Op};
use crate::sys::{self, Answer, errno_name};
use crate::worker::Worker;

/// An evictor of S3.
pub fn evict(worker: &mut Worker) {
    let mut tally: BTreeMap<String, u64> = BTreeMap::new();
    while !worker.stopping() {
        let key = worker.any_key();
        let (what, answer) = attack(worker, &key);
        let answer = answer.map_or_else(errno_name, |_| "ok".into());
        *tally.entry(format!("{what} {answer}")).or_default() += 1;
        let pause_us = worker.rng.random_range(200..1_500);
        sys::pause(pause_us);
    }
    let tally = tally.iter().map(|(what, times)| format!("{what} {times}")).collect::<Vec<_>>().join(", ");
    worker.note(&format!("tally of the evictor with uid {}: {tally}", worker.job.uid));
}

fn attack(worker: &mut Worker, key: &str) -> (&'static str, Answer) {
    let path = worker.claim_path(key);
    let other = worker.any_key();
    let other = worker.claim_path(&other);
    let aside = path.with_extension("aside");
    let namespace = path.parent().unwrap_or(Path::new("/")).to_owned();
    match worker.rng.random_range(0..20) {
        0 => ("create", claim(worker, key, Form::Create)),
        1 => ("flock", claim(worker, key, Form::Flock)),
        2 => ("ofd lock", claim(worker, key, Form::Ofd)),
        3 => ("posix lock", claim(worker, key, Form::Posix)),
        4 | 5 => {
            let answer = worker.call(key, Op::Forget, || sys::on_path(libc::unlink, &path));
            refused(worker, key, "unlink", answer, &[libc::EBUSY, libc::ENOENT])
        }
        6 => {
            let answer = sys::with_mode(libc::chmod, &path, 0);
            refused(worker, key, "chmod", answer, &[libc::EPERM, libc::EACCES, libc::ENOENT])
        }
        7 => {
            let answer = sys::chown(&path, 30_000, 30_000);
            refused(worker, key, "chown", answer, &[libc::EPERM, libc::EACCES, libc::ENOENT])
        }
        8 => refused(
            worker,
            key,
            "rename away",
            sys::on_paths(libc::rename, &path, &aside),
            &[libc::EPERM, libc::ENOENT],
        ),
        9 => {
            let answer = if path == other { Err(libc::EPERM) } else { sys::on_paths(libc::rename, &other, &path) };
            refused(worker, key, "rename over", answer, &[libc::EPERM, libc::ENOENT])
        }
        10 => {
            let answer = sys::on_paths(libc::link, &path, &aside);
            refused(worker, key, "link", answer, &[libc::EPERM, libc::ENOENT, libc::EACCES])
        }
        11 => {
            let answer = sys::on_paths(libc::symlink, Path::new("/dev/null"), &path);
            refused(worker, key, "symlink", answer, &[libc::EPERM, libc::EEXIST])
        }
        12 => {
            let answer = sys::with_mode(libc::mkfifo, &path, 0o666);
            refused(worker, key, "mkfifo", answer, &[libc::EPERM, libc::EEXIST])
        }
        13 => {
            // A key that ever was stays one, held or free.
            let answer = sys::with_mode(libc::mkdir, &path, 0o777);
            if answer.is_ok() {
                worker.wrong(format!("mkdir made the key {key} a namespace"));
            }
            ("mkdir", answer)
        }
        14 => {
            let answer = sys::on_path(libc::rmdir, if worker.once_in(2) { &path } else { &namespace });
            if answer.is_ok() {
                worker.wrong(format!("rmdir succeeded on {key} or its namespace"));
            }
            ("rmdir", answer)
        }
        // Whatever these answer, they may change nothing for the holder, its TTL included.
        15 => ("truncate", sys::truncate(&path)),
        16 => ("touch", sys::touch_path(&path)),
        17 => ("foreign handle", foreign_handle(worker, key)),
        18 if worker.job.uid != 0 => {
            let answer = sys::set_xattr_path(&path, "user.lease.ttl", if worker.once_in(2) { "1ms" } else { "365d" });
            refused(worker, key, "ttl", answer, &[libc::EACCES, libc::EPERM, libc::ENOENT, libc::ESTALE])
        }
        _ => ("evict", evict_wrongly(worker, key)),
    }
}

/// Notes an answer that is not among those the contract gives.
fn refused(worker: &Worker, key: &str, what: &'static str, answer: Answer, errnos: &[i32]) -> (&'static str, Answer) {
    if !answer.is_err_and(|errno| errnos.contains(&errno)) {
        let answer = answer.map_or_else(errno_name, |_| "success".into());
        worker.wrong(format!("{what} of {key} by uid {} answered {answer}", worker.job.uid));
    }
    (what, answer)
}

/// Claims without waiting, and lets go at once if the key was free.
fn claim(worker: &mut Worker, key: &str, form: Form) -> Answer {
    let Some(held) = worker.claim(key, form, false, 0) else {
        return Err(if form == Form::Create { libc::EEXIST } else { libc::EAGAIN });
    };
    worker.epoch(key, &held);
    worker.close(key, held);
    Ok(0)
}

/// Opens the key as anybody may, and does with the handle what only its holder may do with its own.
fn foreign_handle(worker: &Worker, key: &str) -> Answer {
    let fd = sys::open(&worker.claim_path(key), libc::O_RDWR | libc::O_TRUNC)?;
    let _ = sys::read(&fd);
    let _ = sys::flock(&fd, libc::LOCK_UN);
    let _ = sys::fcntl_lock(&fd, libc::F_SETLK, libc::F_UNLCK);
    let _ = sys::fcntl_lock(&fd, libc::F_OFD_SETLK, libc::F_UNLCK);
    let _ = sys::touch(&fd);
    let answer = sys::write(&fd, b"stolen");
    if answer != Err(libc::EACCES) {
        worker.wrong(format!("a write by another handle to {key} answered {answer:?}"));
    }
    let _ = sys::fsync(&fd);
    let _ = sys::close(fd);
    answer
}

/// Evictions that must miss, or that this uid may not do; and on `prey`, by root, those that hit exactly their epoch.
fn evict_wrongly(worker: &mut Worker, key: &str) -> Answer {
    let Some(epoch) = worker.observe(key) else {
        return Ok(0);
    };
    let root = worker.job.uid == 0;
    let target = match worker.rng.random_range(0..3) {
        0 => epoch.saturating_sub(1),
        // The next epoch: a holder that never changes cannot have reached it; elsewhere one that is far off.
        1 if key.contains("/pin") => epoch + 1,
        1 => epoch + 1_000_000,
        _ if !root || (key.ends_with("/prey") && worker.once_in(4)) => epoch,
        _ => 0,
    };
    let control = worker.job.root.join(".leasefs/control");
    let command = serde_json::json!({"op": "evict", "key": key, "epoch": target, "reason": "hostile"}).to_string();
    let answer = worker.call(key, Op::Evict(target), || {
        let fd = sys::open(&control, libc::O_WRONLY)?;
        sys::write(&fd, command.as_bytes())
    });
    let may_hit = root && key.ends_with("/prey") && target == epoch;
    if answer.is_ok() && !may_hit {
        worker.wrong(format!("uid {} evicted epoch {target} of {key}, newest {epoch}", worker.job.uid));
    }
    answer
}
