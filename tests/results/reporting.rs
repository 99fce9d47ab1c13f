//! An open draft keeps the attempt alive: between the worker's exit and its result nobody can claim the key.

use std::fs;
use std::time::Duration;

use libc::{LOCK_EX, LOCK_NB, LOCK_SH, LOCK_UN};
use nix::errno::Errno;

use crate::common::Mount;
use crate::common::agent::{Agent, Fd, count};

/// A worker that has exited and a parent that has the draft open.
fn reporting(mount: &Mount, key: &str) -> (Agent, Fd) {
    let (worker, parent) = (Agent::new(), Agent::new());
    worker.create(&mount.claim(key)).expect("free key");
    let draft = parent.handle(&mount.result(key, 1));
    worker.exit();
    (parent, draft)
}

#[test]
fn every_form_of_claim_is_refused_while_a_draft_is_open() {
    let mount = Mount::new();
    let path = mount.claim("k");
    let (parent, draft) = reporting(&mount, "k");
    assert_eq!(mount.state_of("k"), "reporting");
    let other = Agent::new();
    assert_eq!(other.create(&path), Err(Errno::EEXIST));
    let handle = other.handle(&path);
    assert_eq!(other.flock(handle, LOCK_EX | LOCK_NB), Err(Errno::EAGAIN));
    assert_eq!(other.flock(handle, LOCK_SH | LOCK_NB), Err(Errno::EAGAIN));
    assert_eq!(other.lock(handle, libc::F_SETLK, libc::F_WRLCK), Err(Errno::EAGAIN));
    assert_eq!(other.lock(handle, libc::F_OFD_SETLK, libc::F_WRLCK), Err(Errno::EAGAIN));
    assert_eq!(other.unlink(&path), Err(Errno::EBUSY), "nor does rm end it");
    parent.write(draft, "late, but in time").expect("registered attempt");
    parent.close(draft);
    assert_eq!(mount.state_of("k"), "finished");
    assert_eq!(fs::read_to_string(mount.result("k", 1)).expect("committed"), "late, but in time");
    assert_eq!(other.flock(handle, LOCK_EX | LOCK_NB), Ok(()));
    assert_eq!(other.epoch(handle), Ok(2));
}

#[test]
fn waiters_wait_for_the_commit_and_are_granted_then() {
    let mount = Mount::new();
    let path = mount.claim("k");
    let (worker, parent, waiter) = (Agent::new(), Agent::new(), Agent::new());
    worker.create(&path).expect("free key");
    let handle = waiter.handle(&path);
    waiter.begin_flock(handle, LOCK_EX);
    mount.wait_status("k", "one waiter", |status| count(status, "waiters") == 1);
    let draft = parent.handle(&mount.result("k", 1));
    worker.exit();
    assert_eq!(mount.state_of("k"), "reporting");
    assert_eq!(waiter.answer_within(Duration::from_millis(200)), None, "the result is not there yet");
    parent.write(draft, "result").expect("registered attempt");
    parent.close(draft);
    waiter.answer().expect("granted");
    assert_eq!(waiter.epoch(handle), Ok(2));
    assert_eq!(fs::read_to_string(mount.result("k", 1)).expect("committed"), "result");
}

#[test]
fn fsync_lets_the_next_in_only_once_the_draft_is_closed() {
    let mount = Mount::new();
    let (parent, draft) = reporting(&mount, "k");
    parent.write(draft, "x").expect("registered attempt");
    assert_eq!(parent.fsync(draft), Ok(()));
    assert_eq!(mount.status("k")["outcome"], "completed");
    // A finished key is one that anybody may lock.
    let next = Agent::new();
    let handle = next.handle(&mount.claim("k"));
    assert_eq!(next.flock(handle, LOCK_EX | LOCK_NB), Err(Errno::EAGAIN), "committed, but not closed");
    assert_eq!(mount.state_of("k"), "reporting");
    parent.close(draft);
    assert_eq!(mount.state_of("k"), "finished");
    assert_eq!(next.flock(handle, LOCK_EX | LOCK_NB), Ok(()));
    assert_eq!(next.epoch(handle), Ok(2));
}

#[test]
fn a_killed_reporter_lets_the_next_in() {
    let mount = Mount::new();
    let path = mount.claim("k");
    let (parent, draft) = reporting(&mount, "k");
    parent.write(draft, "half").expect("registered attempt");
    let waiter = Agent::new();
    let handle = waiter.handle(&path);
    waiter.begin_flock(handle, LOCK_EX);
    mount.wait_status("k", "one waiter", |status| count(status, "waiters") == 1);
    parent.kill();
    waiter.answer().expect("granted");
    assert_eq!(waiter.epoch(handle), Ok(2));
    assert!(!mount.result("k", 1).exists());
}

#[test]
fn a_reporter_that_never_comes_to_an_end_loses_at_the_ttl() {
    let mount = Mount::new();
    let path = mount.claim("k");
    let (worker, parent) = (Agent::new(), Agent::new());
    worker.create(&path).expect("free key");
    let draft = parent.handle(&mount.result("k", 1));
    // Of this attempt alone, and with the draft open already, however slow the machine is.
    worker.set_xattr(&path, "user.lease.ttl", "700ms").expect("holder's user");
    worker.exit();
    let waiter = Agent::new();
    let handle = waiter.handle(&path);
    waiter.begin_flock(handle, LOCK_EX);
    waiter.answer().expect("granted at the deadline");
    assert_eq!(waiter.epoch(handle), Ok(2));
    assert_eq!(parent.write(draft, "too late"), Err(Errno::ESTALE));
    assert_eq!(parent.fsync(draft), Err(Errno::ESTALE));
    parent.close(draft);
    assert!(!mount.result("k", 1).exists());
    let history = crate::common::stdout(&mount.leasefs(&["history", "k"]));
    assert!(history.lines().any(|line| line.contains("expired")), "{history}");
}

#[test]
fn unlocking_leaves_the_key_to_the_draft() {
    let mount = Mount::new();
    let agent = Agent::new();
    let fd = agent.create(&mount.claim("k")).expect("free key");
    let draft = agent.handle(&mount.result("k", 1));
    agent.flock(fd, LOCK_UN).expect("unlock");
    assert_eq!(mount.state_of("k"), "reporting");
    let other = Agent::new();
    assert_eq!(other.create(&mount.claim("k")), Err(Errno::EEXIST));
    agent.close(draft);
    assert_eq!(mount.state_of("k"), "finished");
}

#[test]
fn a_parent_may_report_after_the_worker_is_gone_until_someone_else_claims() {
    let mount = Mount::new();
    let path = mount.result("k", 1);
    let (worker, parent, next) = (Agent::new(), Agent::new(), Agent::new());
    worker.create(&mount.claim("k")).expect("free key");
    worker.kill();
    assert_eq!(mount.state_of("k"), "free");
    let draft = parent.handle(&path);
    assert_eq!(mount.state_of("k"), "reporting", "the draft keeps it from here on");
    assert_eq!(next.create(&mount.claim("k")), Err(Errno::EEXIST));
    parent.close(draft);
    assert_eq!(mount.state_of("k"), "finished");
    // The other way round: the next one came first.
    worker_exits(&mount, "other");
    next.create(&mount.claim("other")).expect("free again");
    assert_eq!(parent.open(&mount.result("other", 1), libc::O_WRONLY | libc::O_CREAT), Err(Errno::ESTALE));
}

fn worker_exits(mount: &Mount, key: &str) {
    let worker = Agent::new();
    worker.create(&mount.claim(key)).expect("free key");
    worker.exit();
}

#[test]
fn two_drafts_keep_it_until_the_last_is_gone_or_the_first_commits() {
    let mount = Mount::new();
    let (worker, first, second, other) = (Agent::new(), Agent::new(), Agent::new(), Agent::new());
    worker.create(&mount.claim("k")).expect("free key");
    let drafts = [first.handle(&mount.result("k", 1)), second.handle(&mount.result("k", 1))];
    worker.exit();
    first.write(drafts[0], "never seen").expect("registered attempt");
    first.kill();
    assert_eq!(mount.state_of("k"), "reporting", "the second draft keeps it");
    assert_eq!(other.create(&mount.claim("k")), Err(Errno::EEXIST));
    second.write(drafts[1], "the second's").expect("registered attempt");
    second.close(drafts[1]);
    assert_eq!(fs::read_to_string(mount.result("k", 1)).expect("committed"), "the second's");
    assert_eq!(mount.state_of("k"), "finished");
}
