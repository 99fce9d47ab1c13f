//! `fork`, `dup` and descriptor passing share one handle: the lease ends with the last copy and not before.

use libc::{LOCK_EX, LOCK_NB, LOCK_UN};
use nix::errno::Errno;
use nix::sys::signal::Signal;
use serde_json::json;

use crate::common::Mount;
use crate::common::agent::{Agent, Script, Stray};

/// Refused by both forms, so held.
fn assert_held(mount: &Mount, key: &str, when: &str) {
    let other = Agent::new();
    let path = mount.claim(key);
    assert_eq!(other.create(&path), Err(Errno::EEXIST), "{when}");
    let handle = other.handle(&path);
    assert_eq!(other.flock(handle, LOCK_EX | LOCK_NB), Err(Errno::EAGAIN), "{when}");
    assert_eq!(mount.state_of(key), "held", "{when}");
}

/// Claimed at once, with the epoch that is next.
fn assert_free(mount: &Mount, key: &str, next: u64) {
    let other = Agent::new();
    let fd = other.create(&mount.claim(key)).expect("the last copy is closed");
    assert_eq!(other.epoch(fd), Ok(next));
}

#[test]
fn a_forked_childs_copy_keeps_the_lease_after_the_parents_close() {
    let mount = Mount::new();
    let parent = Agent::new();
    let fd = parent.create(&mount.claim("k")).expect("free key");
    let child = parent.fork();
    parent.close(fd);
    assert_held(&mount, "k", "the child has a copy");
    assert_eq!(child.epoch(fd), Ok(1), "the copy is the same handle");
    assert_eq!(child.write(fd, "from the child"), Ok(14));
    assert_eq!(mount.status("k")["note"], "from the child");
    child.close(fd);
    assert_free(&mount, "k", 2);
}

#[test]
fn a_forked_childs_close_or_exit_does_not_end_the_parents_lease() {
    let mount = Mount::new();
    let parent = Agent::new();
    let fd = parent.create(&mount.claim("k")).expect("free key");
    let (closes, exits, dies) = (parent.fork(), parent.fork(), parent.fork());
    closes.close(fd);
    assert_held(&mount, "k", "one child closed its copy");
    exits.exit();
    assert_held(&mount, "k", "one child exited");
    dies.kill();
    assert_held(&mount, "k", "one child was killed");
    assert_eq!(parent.epoch(fd), Ok(1));
    parent.close(fd);
    assert_free(&mount, "k", 2);
}

#[test]
fn the_lease_outlives_the_process_that_claimed_while_a_child_has_it() {
    let mount = Mount::new();
    let parent = Agent::new();
    let fd = parent.create(&mount.claim("k")).expect("free key");
    let child = parent.fork();
    parent.kill();
    assert_held(&mount, "k", "the claimer was killed, its child lives");
    assert_eq!(child.flock(fd, LOCK_EX | LOCK_NB), Ok(()), "a copy renews");
    assert_eq!(child.epoch(fd), Ok(1));
    child.kill();
    assert_free(&mount, "k", 2);
}

#[test]
fn dup_makes_copies_and_the_last_close_counts() {
    let mount = Mount::new();
    let agent = Agent::new();
    let fd = agent.create(&mount.claim("k")).expect("free key");
    let copies: Vec<i64> =
        (0..3).map(|_| agent.call("dup", json!([fd])).expect("dup").as_i64().expect("a descriptor")).collect();
    agent.close(fd);
    for copy in &copies {
        assert_held(&mount, "k", "a dup is open");
        assert_eq!(agent.epoch(*copy), Ok(1));
        agent.close(*copy);
    }
    assert_free(&mount, "k", 2);
}

#[test]
fn a_passed_descriptor_carries_the_lease_to_another_process() {
    let mount = Mount::new();
    let name = format!("leasefs-test-{}", mount.root().display());
    let (giver, taker) = (Agent::new(), Agent::new());
    let fd = giver.create(&mount.claim("k")).expect("free key");
    taker.call("mailbox", json!([name])).expect("a socket");
    giver.call("send_fd", json!([name, fd])).expect("SCM_RIGHTS");
    // In flight, in no process: still a copy.
    giver.exit();
    assert_held(&mount, "k", "the descriptor is in flight");
    let received = taker.call("receive_fd", json!([name])).expect("SCM_RIGHTS").as_i64().expect("a descriptor");
    assert_eq!(taker.epoch(received), Ok(1));
    assert_eq!(taker.write(received, "handed over"), Ok(11), "it is the holder handle");
    assert_held(&mount, "k", "the receiver has it");
    taker.close(received);
    assert_free(&mount, "k", 2);
}

#[test]
fn a_descriptor_that_is_never_received_ends_with_its_socket() {
    let mount = Mount::new();
    let name = format!("leasefs-test-lost-{}", mount.root().display());
    let (giver, taker) = (Agent::new(), Agent::new());
    let fd = giver.create(&mount.claim("k")).expect("free key");
    taker.call("mailbox", json!([name])).expect("a socket");
    giver.call("send_fd", json!([name, fd])).expect("SCM_RIGHTS");
    giver.close(fd);
    assert_held(&mount, "k", "the descriptor is in flight");
    taker.kill();
    assert_free(&mount, "k", 2);
}

#[test]
fn unlocking_by_any_copy_ends_the_lease_for_all() {
    let mount = Mount::new();
    let parent = Agent::new();
    let fd = parent.handle(&mount.claim("k"));
    parent.flock(fd, LOCK_EX).expect("free key");
    let child = parent.fork();
    assert_eq!(child.flock(fd, LOCK_UN), Ok(()));
    assert_eq!(mount.state_of("k"), "free");
    assert_eq!(parent.write(fd, "late"), Err(Errno::EACCES), "an unlocked handle is not the holder's");
    assert_free(&mount, "k", 2);
}

#[test]
fn a_job_left_behind_by_a_shell_keeps_the_shells_lease() {
    let mount = Mount::new();
    let mut shell =
        Script::start(&mount, "exec 9>$M/claims/k; flock 9; sleep 1000 >/dev/null & echo $!; read -r _; exit 0");
    let job = Stray(shell.line().expect("the job's pid").parse().expect("a pid"));
    shell.signal(Signal::SIGKILL);
    shell.wait();
    assert_held(&mount, "k", "the job inherited descriptor 9");
    job.kill();
    assert_free(&mount, "k", 2);
}

#[test]
fn a_lock_taken_by_a_child_on_an_inherited_handle_lasts_as_long_as_the_parents_copy() {
    let mount = Mount::new();
    // `flock 9` is another process than the one that opened: it locks, and exits.
    let script = Script::start(&mount, "exec 9>$M/claims/k; flock 9; echo held; read -r _; exit 0");
    assert_eq!(script.line().as_deref(), Some("held"));
    let status = mount.status("k");
    assert_eq!(status["holder"]["pid"], script.pid(), "the holder is the shell, not the flock that is gone: {status}");
    assert_held(&mount, "k", "the shell has the handle");
    assert!(script.finish().success());
    assert_free(&mount, "k", 2);
}

#[test]
fn closing_another_descriptor_of_the_same_key_does_not_end_a_posix_lock() {
    let mount = Mount::new();
    let path = mount.claim("k");
    let agent = Agent::new();
    let fd = agent.handle(&path);
    agent.lock(fd, libc::F_SETLK, libc::F_WRLCK).expect("free key");
    let second = agent.open(&path, libc::O_RDONLY).expect("held key");
    agent.close(second);
    assert_held(&mount, "k", "only the holder handle counts");
    assert_eq!(agent.epoch(fd), Ok(1));
}
