//! `unlink` of a held key releases it for who opened or locked it, and is `EBUSY` for everybody else.

use libc::{LOCK_EX, LOCK_NB, LOCK_SH, LOCK_UN, O_RDWR};
use nix::errno::Errno;
use serde_json::json;

use crate::common::agent::{Agent, Script};
use crate::common::{Mount, stdout, wait_for};

#[test]
fn the_opener_may_unlink_and_that_releases() {
    let mount = Mount::new();
    let path = mount.claim("k");
    let agent = Agent::new();
    for round in 0..3 {
        let fd = match round {
            0 => agent.create(&path).expect("free key"),
            _ => {
                let fd = agent.handle(&path);
                agent.flock(fd, LOCK_EX).expect("free key");
                fd
            }
        };
        assert_eq!(agent.epoch(fd), Ok(round + 1));
        assert_eq!(agent.unlink(&path), Ok(()));
        assert!(!path.exists());
        let status = mount.status("k");
        assert_eq!((status["state"].as_str(), status["outcome"].as_str()), (Some("free"), Some("released")));
        assert_eq!(agent.write(fd, "late").map_err(|e| e == Errno::EACCES || e == Errno::ESTALE), Err(true));
    }
    assert_eq!(agent.unlink(&path), Err(Errno::ENOENT), "a free key has no file");
}

/// Lockers that unlink their file ask after each lock whether they got the one that was unlinked meanwhile.
#[test]
fn a_handle_of_a_free_key_is_of_an_unlinked_file() {
    let mount = Mount::new();
    let path = mount.claim("k");
    let agent = Agent::new();
    let fd = agent.handle(&path);
    let seen = || agent.call("fstat", json!([fd])).expect("fstat")["st_nlink"].as_u64();
    let links = |when: &str, expected: u64| assert_eq!(seen(), Some(expected), "{when}");
    // The kernel keeps what it was told at the create for an instant.
    wait_for("a free key's file to be gone", || seen() == Some(0));
    for lock in [LOCK_SH, LOCK_EX] {
        agent.flock(fd, lock | LOCK_NB).expect("free key");
        links("locked", 1);
        agent.flock(fd, LOCK_UN).expect("unlock");
        links("unlocked", 0);
    }
    agent.flock(fd, LOCK_EX | LOCK_NB).expect("free key");
    assert_eq!(agent.unlink(&path), Ok(()));
    links("unlinked, and so released", 0);
    let other = Agent::new();
    let held = other.create(&path).expect("free key");
    links("held by another", 1);
    other.close(held);
    wait_for("the file to be gone again", || seen() == Some(0));
    // Nor is a file new that is locked at once: who found it unlinked would open and lock it again, and so for ever.
    for lock in [LOCK_SH, LOCK_EX].repeat(50) {
        let fd = agent.handle(&path);
        agent.flock(fd, lock | LOCK_NB).expect("free key");
        assert_eq!(agent.call("fstat", json!([fd])).expect("fstat")["st_nlink"], 1, "locked right after its open");
        agent.close(fd);
    }
}

#[test]
fn nobody_else_may_unlink_a_held_key_not_even_root() {
    let mount = Mount::shared();
    let path = mount.claim("k");
    let holder = Agent::user(12_001, 12_001, &[]);
    let fd = holder.create(&path).expect("free key");
    holder.write(fd, "precious").expect("holder");
    let record = holder.read(fd).expect("holder");
    // Root, another process of the holder's own user, and another user.
    let (root, same, other) = (Agent::new(), Agent::user(12_001, 12_001, &[]), Agent::user(12_002, 12_002, &[]));
    for agent in [&root, &same, &other] {
        assert_eq!(agent.unlink(&path), Err(Errno::EBUSY));
    }
    // Having it open makes no difference, nor does a lock that was refused.
    let handle = same.open(&path, O_RDWR).expect("held key");
    assert_eq!(same.flock(handle, LOCK_EX | libc::LOCK_NB), Err(Errno::EAGAIN));
    assert_eq!(same.unlink(&path), Err(Errno::EBUSY));
    let output = mount.bash("rm -f $M/claims/k 2>&1; LC_ALL=C rm -rf $M/claims/k 2>&1");
    assert!(stdout(&output).contains("Device or resource busy"), "{}", stdout(&output));
    assert_eq!(holder.read(fd), Ok(record), "nothing happened to the holder");
    assert_eq!(mount.state_of("k"), "held");
}

#[test]
fn the_process_that_locked_an_inherited_handle_may_unlink_as_well() {
    let mount = Mount::new();
    let path = mount.claim("k");
    for unlinker in ["opener", "locker"] {
        let opener = Agent::new();
        let fd = opener.handle(&path);
        let locker = opener.fork();
        let bystander = opener.fork();
        locker.flock(fd, LOCK_EX).expect("free key");
        assert_eq!(bystander.unlink(&path), Err(Errno::EBUSY), "a copy alone gives no right");
        let agent = if unlinker == "opener" { &opener } else { &locker };
        assert_eq!(agent.unlink(&path), Ok(()), "the {unlinker}");
        assert_eq!(mount.state_of("k"), "free");
    }
    assert_eq!(mount.status("k")["epoch"], 2);
}

#[test]
fn a_shell_that_removes_its_lock_file_does_no_harm() {
    let mount = Mount::new();
    // The habit of lock-file users: `rm` is another process, so it is refused and the lease goes on.
    let script =
        Script::start(&mount, "exec 9>$M/claims/k; flock 9; rm -f $M/claims/k 2>/dev/null; echo $?; read -r _; exit 0");
    assert_eq!(script.line().as_deref(), Some("1"));
    assert_eq!(mount.state_of("k"), "held");
    assert_eq!(mount.bash("flock -n $M/claims/k true").status.code(), Some(1));
    assert!(script.finish().success());
    assert_eq!(mount.state_of("k"), "free");
}

#[test]
fn an_unlink_with_waiters_in_line_grants_the_first_of_them() {
    let mount = Mount::new();
    let path = mount.claim("k");
    let (holder, first, second) = (Agent::new(), Agent::new(), Agent::new());
    holder.create(&path).expect("free key");
    let fds = [first.handle(&path), second.handle(&path)];
    first.begin_flock(fds[0], LOCK_EX);
    mount.wait_status("k", "one waiter", |status| crate::common::agent::count(status, "waiters") == 1);
    second.begin_flock(fds[1], LOCK_EX);
    mount.wait_status("k", "two waiters", |status| crate::common::agent::count(status, "waiters") == 2);
    assert_eq!(holder.unlink(&path), Ok(()));
    first.answer().expect("granted");
    assert_eq!(first.epoch(fds[0]), Ok(2));
    assert!(path.exists(), "the key is held again");
    assert_eq!(second.answer_within(std::time::Duration::from_millis(100)), None, "one holder at a time");
    // What was unlinked is gone for its old holder: it may not unlink the new one's.
    assert_eq!(holder.unlink(&path), Err(Errno::EBUSY));
    first.kill();
    second.answer().expect("granted");
    assert_eq!(second.epoch(fds[1]), Ok(3));
}
