//! A handle that lost its lease answers `ESTALE` for as long as it lives, and touches nothing of its successors.

use libc::{
    F_OFD_SETLK, F_OFD_SETLKW, F_RDLCK, F_SETLK, F_SETLKW, F_WRLCK, LOCK_EX, LOCK_NB, LOCK_SH, LOCK_UN, O_RDWR,
};
use nix::errno::Errno;

use crate::common::agent::{Agent, Fd};
use crate::common::{Mount, assert_ok};

/// Every operation on the handle, with its answer.
fn operations(agent: &Agent, fd: Fd) -> Vec<(&'static str, Result<(), Errno>)> {
    vec![
        ("read", agent.read(fd).map(drop)),
        ("write", agent.write(fd, "late").map(drop)),
        ("LOCK_EX", agent.flock(fd, LOCK_EX)),
        ("LOCK_EX|LOCK_NB", agent.flock(fd, LOCK_EX | LOCK_NB)),
        ("LOCK_SH", agent.flock(fd, LOCK_SH)),
        ("F_SETLK", agent.lock(fd, F_SETLK, F_WRLCK).map(drop)),
        ("F_SETLKW", agent.lock(fd, F_SETLKW, F_WRLCK).map(drop)),
        ("F_SETLK read", agent.lock(fd, F_SETLK, F_RDLCK).map(drop)),
        ("F_OFD_SETLK", agent.lock(fd, F_OFD_SETLK, F_WRLCK).map(drop)),
        ("F_OFD_SETLKW", agent.lock(fd, F_OFD_SETLKW, F_WRLCK).map(drop)),
    ]
}

fn assert_stale(agent: &Agent, fd: Fd, when: &str) {
    for (name, answer) in operations(agent, fd) {
        assert_eq!(answer, Err(Errno::ESTALE), "{name}, {when}");
    }
}

/// As [`assert_stale`], and for `futimens`, in which the kernel names the process and not the handle.
fn assert_stale_opener(agent: &Agent, fd: Fd, when: &str) {
    assert_stale(agent, fd, when);
    assert_eq!(agent.touch(fd), Err(Errno::ESTALE), "futimens, {when}");
}

/// Claims by create and by lock, loses the lease as told, and lives on beside its successors.
fn outlive(mount: &Mount, lose: impl Fn(&str)) {
    for (key, by_lock) in [("created", false), ("locked", true)] {
        let path = mount.claim(key);
        let (old, new) = (Agent::new(), Agent::new());
        let fd = if by_lock {
            let fd = old.handle(&path);
            old.flock(fd, LOCK_EX).expect("free key");
            fd
        } else {
            old.create(&path).expect("free key")
        };
        let child = old.fork();
        lose(key);
        assert_stale_opener(&old, fd, "key free");
        assert_stale(&child, fd, "a copy of the handle");
        let next = new.create(&path).expect("free again");
        assert_stale_opener(&old, fd, "held by a successor");
        let _ = old.flock(fd, LOCK_UN);
        assert_eq!(old.unlink(&path), Err(Errno::EBUSY), "it is the successor's now");
        assert_eq!((mount.state_of(key).as_str(), new.epoch(next)), ("held", Ok(2)));
        assert_stale_opener(&old, fd, "after an unlock");
        child.kill();
        old.close(fd);
        assert_eq!((mount.state_of(key).as_str(), new.epoch(next)), ("held", Ok(2)), "its close frees nothing");
        // A new open is a new handle.
        let fresh = old.open(&path, O_RDWR).expect("held key");
        assert_eq!(old.flock(fresh, LOCK_EX | LOCK_NB), Err(Errno::EAGAIN));
        new.close(next);
        assert_eq!(old.flock(fresh, LOCK_EX | LOCK_NB), Ok(()));
        assert_eq!(old.epoch(fresh), Ok(3));
        old.close(fresh);
    }
}

#[test]
fn an_expired_handle_is_stale_for_ever() {
    // Long enough for the steps between two losses, as only the old handle is to lose its lease.
    let mount = Mount::new();
    outlive(&mount, |key| {
        Agent::new().set_xattr(&mount.claim(key), "user.lease.ttl", "50ms").expect("root is the holder's user");
        mount.wait_status(key, "expired", |status| status["outcome"] == "expired");
        assert_eq!(mount.state_of(key), "free");
    });
    mount.verify();
}

#[test]
fn an_evicted_handle_is_stale_for_ever() {
    let mount = Mount::new();
    outlive(&mount, |key| {
        assert_ok(&mount.leasefs(&["evict", key, "--epoch", "1", "--reason", "test"]));
        assert_eq!(mount.status(key)["outcome"], "evicted");
    });
    mount.verify();
}

#[test]
fn a_stopped_holder_loses_its_lease_and_learns_it_when_it_goes_on() {
    use nix::sys::signal::Signal;
    let mount = Mount::new();
    let path = mount.claim("k");
    let (holder, next) = (Agent::new(), Agent::new());
    let fd = holder.create(&path).expect("free key");
    holder.signal(Signal::SIGSTOP);
    // Its own alone: the next has all the time it needs.
    next.set_xattr(&path, "user.lease.ttl", "300ms").expect("root is the holder's user");
    mount.wait_status("k", "expired", |status| status["outcome"] == "expired");
    let taken = next.create(&path).expect("free again");
    holder.signal(Signal::SIGCONT);
    assert_eq!(holder.write(fd, "still me?"), Err(Errno::ESTALE));
    assert_eq!(next.epoch(taken), Ok(2));
}

#[test]
fn a_share_outlives_nothing_it_should_not() {
    // A handle lost as holder cannot come back as a sharer either, while others can share.
    let mount = Mount::new();
    let path = mount.claim("k");
    let (old, other) = (Agent::new(), Agent::new());
    let fd = old.create(&path).expect("free key");
    assert_ok(&mount.leasefs(&["evict", "k", "--epoch", "1"]));
    let handle = other.handle(&path);
    other.flock(handle, LOCK_SH).expect("free key");
    assert_eq!(old.flock(fd, LOCK_SH | LOCK_NB), Err(Errno::ESTALE));
    assert_eq!(crate::common::agent::count(&mount.status("k"), "sharers"), 1);
}
