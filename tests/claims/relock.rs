//! Locking a handle again: the holder renews, an unlocked handle gets a new epoch, and a lease is one whatever the kind of lock.

use libc::{F_OFD_SETLK, F_OFD_SETLKW, F_SETLK, F_SETLKW, F_UNLCK, F_WRLCK, LOCK_EX, LOCK_NB, LOCK_UN};
use nix::errno::Errno;
use serde_json::{Value, json};

use crate::common::agent::{Agent, Fd};
use crate::common::{Mount, wait_for};

/// Waits until the clock of `renewed` has moved on, so that a renewal can be seen.
pub(crate) fn renewed_later(mount: &Mount, key: &str, act: impl FnOnce()) -> bool {
    let time =
        |status: &Value| -> jiff::Timestamp { status["renewed"].as_str().expect("renewed").parse().expect("RFC 3339") };
    let before = mount.status(key);
    let past = time(&before) + jiff::SignedDuration::from_millis(20);
    wait_for("20 ms later", || jiff::Timestamp::now() > past);
    act();
    let after = mount.status(key);
    assert_eq!(after["epoch"], before["epoch"], "a renewal keeps the epoch");
    assert_eq!(after["since"], before["since"], "a renewal keeps the beginning");
    time(&after) > time(&before)
}

type Relock = (&'static str, fn(&Agent, Fd) -> Result<(), Errno>);

const RELOCKS: [Relock; 6] = [
    ("flock", |agent, fd| agent.flock(fd, LOCK_EX)),
    ("flock -n", |agent, fd| agent.flock(fd, LOCK_EX | LOCK_NB)),
    ("F_SETLK", |agent, fd| agent.lock(fd, F_SETLK, F_WRLCK).map(drop)),
    ("F_SETLKW", |agent, fd| agent.lock(fd, F_SETLKW, F_WRLCK).map(drop)),
    ("F_OFD_SETLK", |agent, fd| agent.lock(fd, F_OFD_SETLK, F_WRLCK).map(drop)),
    ("F_OFD_SETLKW", |agent, fd| agent.lock(fd, F_OFD_SETLKW, F_WRLCK).map(drop)),
];

#[test]
fn every_lock_on_a_handle_that_holds_renews_it() {
    let mount = Mount::new();
    for (first, claim) in RELOCKS {
        for (second, relock) in RELOCKS {
            let key = format!("{first} then {second}");
            let agent = Agent::new();
            let fd = agent.handle(&mount.claim(&key));
            claim(&agent, fd).expect("free key");
            let renewed = renewed_later(&mount, &key, || assert_eq!(relock(&agent, fd), Ok(()), "{key}"));
            assert!(renewed, "{key}: not renewed");
            assert_eq!(agent.epoch(fd), Ok(1), "{key}");
        }
        let key = format!("create then {first}");
        let agent = Agent::new();
        let fd = agent.create(&mount.claim(&key)).expect("free key");
        assert!(renewed_later(&mount, &key, || assert_eq!(claim(&agent, fd), Ok(()), "{key}")), "{key}: not renewed");
        assert_eq!(agent.epoch(fd), Ok(1), "{key}");
    }
}

#[test]
fn every_unlock_frees_the_key_however_it_was_claimed() {
    let mount = Mount::new();
    let path = mount.claim("k");
    let unlocks: [Relock; 3] = [
        ("LOCK_UN", |agent, fd| agent.flock(fd, LOCK_UN)),
        ("F_SETLK F_UNLCK", |agent, fd| agent.lock(fd, F_SETLK, F_UNLCK).map(drop)),
        ("F_OFD_SETLK F_UNLCK", |agent, fd| agent.lock(fd, F_OFD_SETLK, F_UNLCK).map(drop)),
    ];
    // Each kind undoes its own, and each undoes an exclusive create.
    let claims = [RELOCKS[0], RELOCKS[2], RELOCKS[4]];
    for ((name, unlock), (_, claim)) in unlocks.into_iter().zip(claims) {
        let agent = Agent::new();
        let fd = agent.handle(&path);
        claim(&agent, fd).expect("free key");
        assert_eq!(unlock(&agent, fd), Ok(()));
        assert_eq!(mount.state_of("k"), "free", "{name}");
        let created = agent.create(&path).expect("free again");
        assert_eq!(unlock(&agent, created), Ok(()));
        assert_eq!(mount.state_of("k"), "free", "{name} of a created handle");
        assert!(!path.exists());
        assert_eq!(mount.status("k")["outcome"], "released");
    }
}

#[test]
fn an_unlocked_handle_may_lock_again_for_a_new_epoch() {
    let mount = Mount::new();
    let (agent, other) = (Agent::new(), Agent::new());
    let path = mount.claim("k");
    let fd = agent.create(&path).expect("free key");
    for round in 0..3 {
        assert_eq!(agent.epoch(fd), Ok(2 * round + 1));
        agent.flock(fd, LOCK_UN).expect("unlock");
        let between = other.create(&path).expect("the key is free");
        assert_eq!(agent.flock(fd, LOCK_EX | LOCK_NB), Err(Errno::EAGAIN), "held by another now");
        other.close(between);
        assert_eq!(agent.flock(fd, LOCK_EX | LOCK_NB), Ok(()));
    }
    assert_eq!(agent.epoch(fd), Ok(7));
}

#[test]
fn unlocking_what_is_not_locked_succeeds_and_frees_nothing_of_others() {
    let mount = Mount::new();
    let path = mount.claim("k");
    let (holder, other) = (Agent::new(), Agent::new());
    let fd = holder.create(&path).expect("free key");
    let handle = other.handle(&path);
    assert_eq!(other.flock(handle, LOCK_UN), Ok(()));
    assert_eq!(other.call("lock", json!([handle, F_SETLK, F_UNLCK])).map(drop), Ok(()));
    assert_eq!(other.call("lock", json!([handle, F_OFD_SETLK, F_UNLCK])).map(drop), Ok(()));
    assert_eq!(mount.state_of("k"), "held");
    assert_eq!(holder.epoch(fd), Ok(1));
}

#[test]
fn two_handles_of_one_process_are_two_claimers() {
    let mount = Mount::new();
    let path = mount.claim("k");
    let agent = Agent::new();
    let (first, second) = (agent.handle(&path), agent.handle(&path));
    agent.flock(first, LOCK_EX).expect("free key");
    assert_eq!(agent.flock(second, LOCK_EX | LOCK_NB), Err(Errno::EAGAIN));
    assert_eq!(agent.lock(second, F_OFD_SETLK, F_WRLCK), Err(Errno::EAGAIN));
    agent.close(first);
    assert_eq!(agent.flock(second, LOCK_EX | LOCK_NB), Ok(()));
    assert_eq!(agent.epoch(second), Ok(2));
}
