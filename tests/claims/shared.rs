//! Shared locks: many at once, never beside an exclusive one, and no epoch.

use libc::{F_OFD_SETLK, F_RDLCK, F_SETLK, F_UNLCK, F_WRLCK, LOCK_EX, LOCK_NB, LOCK_SH, LOCK_UN};
use nix::errno::Errno;

use crate::common::agent::{Agent, Fd, count};
use crate::common::{Mount, assert_ok};

/// Three processes that share the key by the three kinds of lock.
fn sharers(mount: &Mount, key: &str) -> Vec<(Agent, Fd)> {
    let path = mount.claim(key);
    let sharers: Vec<(Agent, Fd)> = (0..3)
        .map(|_| Agent::new())
        .map(|agent| {
            let fd = agent.handle(&path);
            (agent, fd)
        })
        .collect();
    sharers[0].0.flock(sharers[0].1, LOCK_SH | LOCK_NB).expect("flock -s of a free key");
    sharers[1].0.lock(sharers[1].1, F_SETLK, F_RDLCK).expect("a read lock beside a shared one");
    sharers[2].0.lock(sharers[2].1, F_OFD_SETLK, F_RDLCK).expect("an OFD read lock beside a shared one");
    sharers
}

#[test]
fn shared_locks_of_every_kind_stand_together_and_take_no_epoch() {
    let mount = Mount::new();
    let sharers = sharers(&mount, "k");
    let status = mount.status("k");
    assert_eq!(status["state"], "shared");
    assert_eq!(count(&status, "sharers"), 3);
    assert_eq!(status["epoch"], 0, "sharing takes no epoch");
    assert!(status["holder"].is_null(), "nobody holds it exclusively: {status}");
    assert_ok(&mount.bash("flock -n -s $M/claims/k true"));
    for (gone, (agent, fd)) in sharers.iter().enumerate() {
        assert_eq!(count(&mount.status("k"), "sharers"), 3 - gone as u64);
        agent.close(*fd);
    }
    assert_eq!(mount.state_of("k"), "free");
    let agent = Agent::new();
    let fd = agent.create(&mount.claim("k")).expect("free again");
    assert_eq!(agent.epoch(fd), Ok(1));
}

#[test]
fn a_shared_key_is_refused_to_every_exclusive_form_until_the_last_sharer_is_gone() {
    let mount = Mount::new();
    let path = mount.claim("k");
    let sharers = sharers(&mount, "k");
    for (agent, fd) in &sharers {
        let other = Agent::new();
        let handle = other.handle(&path);
        assert_eq!(other.create(&path), Err(Errno::EEXIST));
        assert_eq!(other.flock(handle, LOCK_EX | LOCK_NB), Err(Errno::EAGAIN));
        assert_eq!(other.lock(handle, F_SETLK, F_WRLCK), Err(Errno::EAGAIN));
        assert_eq!(other.lock(handle, F_OFD_SETLK, F_WRLCK), Err(Errno::EAGAIN));
        agent.close(*fd);
    }
    let other = Agent::new();
    let handle = other.handle(&path);
    assert_eq!(other.flock(handle, LOCK_EX | LOCK_NB), Ok(()));
    assert_eq!(other.epoch(handle), Ok(1), "the denials took no epoch");
}

#[test]
fn a_held_key_is_refused_to_every_shared_form() {
    let mount = Mount::new();
    let path = mount.claim("k");
    let holder = Agent::new();
    let fd = holder.create(&path).expect("free key");
    let other = Agent::new();
    let handle = other.handle(&path);
    assert_eq!(other.flock(handle, LOCK_SH | LOCK_NB), Err(Errno::EAGAIN));
    assert_eq!(other.lock(handle, F_SETLK, F_RDLCK), Err(Errno::EAGAIN));
    assert_eq!(other.lock(handle, F_OFD_SETLK, F_RDLCK), Err(Errno::EAGAIN));
    assert_eq!(mount.bash("flock -n -s -E 9 $M/claims/k true").status.code(), Some(9));
    assert_eq!(count(&mount.status("k"), "sharers"), 0);
    holder.close(fd);
    assert_eq!(other.flock(handle, LOCK_SH | LOCK_NB), Ok(()));
    assert_eq!(mount.state_of("k"), "shared");
}

#[test]
fn a_downgrade_ends_the_attempt_and_lets_sharers_in() {
    let mount = Mount::new();
    let path = mount.claim("k");
    let holder = Agent::new();
    let fd = holder.create(&path).expect("free key");
    assert_eq!(holder.flock(fd, LOCK_SH), Ok(()));
    let status = mount.status("k");
    assert_eq!((status["state"].as_str(), status["outcome"].as_str()), (Some("shared"), Some("released")));
    let other = Agent::new();
    let handle = other.handle(&path);
    assert_eq!(other.flock(handle, LOCK_SH | LOCK_NB), Ok(()), "a second sharer");
    assert_eq!(count(&mount.status("k"), "sharers"), 2);
    // Back up again: a new attempt, once it is alone.
    assert_eq!(holder.flock(fd, LOCK_EX | LOCK_NB), Err(Errno::EAGAIN));
    assert_eq!(other.flock(handle, LOCK_UN), Ok(()));
    assert_eq!(holder.flock(fd, LOCK_EX | LOCK_NB), Ok(()));
    assert_eq!(holder.epoch(fd), Ok(2));
}

#[test]
fn an_upgrade_that_may_not_wait_keeps_the_share() {
    let mount = Mount::new();
    let sharers = sharers(&mount, "k");
    assert_eq!(sharers[0].0.flock(sharers[0].1, LOCK_EX | LOCK_NB), Err(Errno::EAGAIN));
    assert_eq!(sharers[1].0.lock(sharers[1].1, F_SETLK, F_WRLCK), Err(Errno::EAGAIN));
    assert_eq!(sharers[2].0.lock(sharers[2].1, F_OFD_SETLK, F_WRLCK), Err(Errno::EAGAIN));
    assert_eq!(count(&mount.status("k"), "sharers"), 3);
    sharers[1].0.lock(sharers[1].1, F_SETLK, F_UNLCK).expect("unlock");
    sharers[2].0.lock(sharers[2].1, F_OFD_SETLK, F_UNLCK).expect("unlock");
    assert_eq!(sharers[0].0.flock(sharers[0].1, LOCK_EX | LOCK_NB), Ok(()), "alone, it is upgraded at once");
    assert_eq!(sharers[0].0.epoch(sharers[0].1), Ok(1));
}

#[test]
fn two_sharers_that_both_upgrade_and_wait_are_served_one_after_the_other() {
    let mount = Mount::new();
    let sharers = sharers(&mount, "k");
    sharers[2].0.close(sharers[2].1);
    let ((first, fd), (second, other)) = (&sharers[0], &sharers[1]);
    second.lock(*other, F_SETLK, F_UNLCK).expect("unlock");
    second.flock(*other, LOCK_SH).expect("the same kind of lock");
    first.begin_flock(*fd, LOCK_EX);
    mount.wait_status("k", "the first waits", |status| count(status, "waiters") == 1);
    // As flock(2) does it, the second drops its share, so the first is granted: no deadlock.
    second.begin_flock(*other, LOCK_EX);
    assert_eq!(first.answer(), Ok(serde_json::Value::Null));
    assert_eq!(first.epoch(*fd), Ok(1));
    first.close(*fd);
    assert_eq!(second.answer(), Ok(serde_json::Value::Null));
    assert_eq!(second.epoch(*other), Ok(2));
}

#[test]
fn a_sharer_that_is_killed_leaves_the_key_to_others() {
    let mount = Mount::new();
    let sharers = sharers(&mount, "k");
    for (agent, _) in &sharers {
        agent.kill();
    }
    let other = Agent::new();
    let fd = other.create(&mount.claim("k")).expect("the kernel released the dead sharers' handles");
    assert_eq!(other.epoch(fd), Ok(1));
}
