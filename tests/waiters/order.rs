//! The line is first in, first out, shared and exclusive alike.

use std::fs;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use libc::{F_OFD_SETLKW, F_RDLCK, F_SETLKW, F_WRLCK, LOCK_EX, LOCK_NB, LOCK_SH};
use nix::errno::Errno;
use serde_json::json;

use crate::common::agent::{Agent, Fd, count};
use crate::common::{Background, InTime, Mount};

/// A `flock K CMD` that notes its number and the epoch it got.
fn command(mount: &Mount, number: usize) -> Background {
    let script = format!("read -r epoch <$M/claims/k; echo {number} $epoch >>{}/order", mount.scratch().display());
    let child: Child = mount
        .command("flock")
        .arg(mount.claim("k"))
        .args(["bash", "-c", &script])
        .stdout(Stdio::null())
        .spawn()
        .expect("flock runs");
    Background(child)
}

#[test]
fn two_hundred_blocked_flocks_are_granted_in_order_of_arrival() {
    let mount = Mount::new();
    let holder = Agent::new();
    let fd = holder.create(&mount.claim("k")).expect("free key");
    let mut waiters = Vec::new();
    for number in 1..=200 {
        waiters.push(command(&mount, number));
        mount.wait_status("k", "one more waiter", |status| count(status, "waiters") == number as u64);
    }
    assert_eq!(mount.status("k")["epoch"], 1);
    holder.close(fd);
    for waiter in &mut waiters {
        assert!(waiter.wait().success());
    }
    let expected: String = (1..=200).map(|number| format!("{number} {}\n", number + 1)).collect();
    assert_eq!(fs::read_to_string(mount.scratch().join("order")).expect("order"), expected);
    let status = mount.status("k");
    assert_eq!(
        (status["state"].as_str(), status["epoch"].as_u64(), count(&status, "waiters")),
        (Some("free"), Some(201), 0)
    );
    mount.verify();
}

/// Puts a waiter in line by one of the three kinds of lock and sees it there.
fn wait_in_line(mount: &Mount, kind: usize, shared: bool, place: u64) -> (Agent, Fd) {
    let agent = Agent::new();
    let fd = agent.handle(&mount.claim("k"));
    match kind % 3 {
        0 => agent.begin_flock(fd, if shared { LOCK_SH } else { LOCK_EX }),
        1 => agent.begin("lock", json!([fd, F_SETLKW, if shared { F_RDLCK } else { F_WRLCK }])),
        _ => agent.begin("lock", json!([fd, F_OFD_SETLKW, if shared { F_RDLCK } else { F_WRLCK }])),
    }
    mount.wait_status("k", "its place in line", |status| count(status, "waiters") == place);
    (agent, fd)
}

#[test]
fn every_kind_of_lock_stands_in_the_same_line() {
    let mount = Mount::new();
    let holder = Agent::new();
    let mut held = (holder, 0);
    held.1 = held.0.create(&mount.claim("k")).expect("free key");
    let waiters: Vec<(Agent, Fd)> = (0..9).map(|kind| wait_in_line(&mount, kind, false, kind as u64 + 1)).collect();
    for (number, (agent, fd)) in waiters.into_iter().enumerate() {
        held.0.close(held.1);
        agent.answer().expect("its turn");
        assert_eq!(agent.epoch(fd), Ok(number as u64 + 2));
        assert_eq!(count(&mount.status("k"), "waiters"), 8 - number as u64);
        held = (agent, fd);
    }
}

#[test]
fn a_waiting_exclusive_lock_is_not_overtaken_by_later_shared_ones() {
    let mount = Mount::new();
    let path = mount.claim("k");
    let sharer = Agent::new();
    let fd = sharer.handle(&path);
    sharer.flock(fd, LOCK_SH).expect("free key");
    let (exclusive, exclusive_fd) = wait_in_line(&mount, 0, false, 1);
    // The key is shared, and still a share is refused: someone waits before it.
    let late = Agent::new();
    let late_fd = late.handle(&path);
    assert_eq!(late.flock(late_fd, LOCK_SH | LOCK_NB), Err(Errno::EAGAIN));
    assert_eq!(late.lock(late_fd, libc::F_SETLK, F_RDLCK), Err(Errno::EAGAIN));
    let (shared, _shared_fd) = wait_in_line(&mount, 0, true, 2);
    assert_eq!(exclusive.answer_within(Duration::from_millis(100)), None);
    sharer.close(fd);
    exclusive.answer().expect("first in line");
    assert_eq!(exclusive.epoch(exclusive_fd), Ok(1));
    assert_eq!(shared.answer_within(Duration::from_millis(100)), None, "behind the exclusive one");
    exclusive.close(exclusive_fd);
    shared.answer().expect("its turn");
    assert_eq!(mount.state_of("k"), "shared");
}

#[test]
fn neighbouring_sharers_are_granted_together() {
    let mount = Mount::new();
    let holder = Agent::new();
    let held = holder.create(&mount.claim("k")).expect("free key");
    // S S X S S X: two together, one, two together, one.
    let line: Vec<(Agent, Fd)> = [true, true, false, true, true, false]
        .into_iter()
        .enumerate()
        .map(|(place, shared)| wait_in_line(&mount, place, shared, place as u64 + 1))
        .collect();
    holder.close(held);
    let mut epoch = 1;
    for group in [&line[0..2], &line[2..3], &line[3..5], &line[5..6]] {
        for (agent, _) in group {
            agent.answer().expect("its turn");
        }
        let status = mount.status("k");
        if group.len() == 2 {
            assert_eq!((status["state"].as_str(), count(&status, "sharers")), (Some("shared"), 2));
        } else {
            epoch += 1;
            assert_eq!((status["state"].as_str(), status["epoch"].as_u64()), (Some("held"), Some(epoch)));
        }
        for (agent, fd) in group {
            agent.close(*fd);
        }
    }
    assert_eq!(mount.state_of("k"), "free");
}

#[test]
fn a_new_claim_does_not_overtake_the_line() {
    let mount = Mount::new();
    let path = mount.claim("k");
    let (holder, hasty) = (Agent::new(), Agent::new());
    let held = holder.create(&path).expect("free key");
    let (first, first_fd) = wait_in_line(&mount, 0, false, 1);
    let (second, second_fd) = wait_in_line(&mount, 1, false, 2);
    let handle = hasty.handle(&path);
    holder.close(held);
    assert_eq!(hasty.flock(handle, LOCK_EX | LOCK_NB), Err(Errno::EAGAIN), "promised to the first");
    assert_eq!(hasty.create(&path), Err(Errno::EEXIST));
    first.answer().expect("its turn");
    assert_eq!(first.epoch(first_fd), Ok(2));
    first.close(first_fd);
    assert_eq!(hasty.flock(handle, LOCK_EX | LOCK_NB), Err(Errno::EAGAIN), "promised to the second");
    second.answer().expect("its turn");
    assert_eq!(second.epoch(second_fd), Ok(3));
}

#[test]
fn the_old_holder_that_locks_again_goes_to_the_end_of_the_line() {
    let mount = Mount::new();
    let holder = Agent::new();
    let fd = holder.create(&mount.claim("k")).expect("free key");
    let (first, first_fd) = wait_in_line(&mount, 0, false, 1);
    holder.flock(fd, libc::LOCK_UN).expect("unlock");
    first.answer().expect("its turn");
    holder.begin_flock(fd, LOCK_EX);
    mount.wait_status("k", "the old holder waits", |status| count(status, "waiters") == 1);
    first.close(first_fd);
    holder.answer().expect("its turn");
    assert_eq!(holder.epoch(fd), Ok(3));
}

#[test]
fn waiting_for_several_keys_is_waiting_for_each() {
    let mount = Mount::new();
    let holder = Agent::new();
    let waiters: Vec<(Agent, Fd, Fd)> = (0..10)
        .map(|number| {
            let key = format!("k{number}");
            let held = holder.create(&mount.claim(&key)).expect("free key");
            let waiter = Agent::new();
            let fd = waiter.handle(&mount.claim(&key));
            waiter.begin_flock(fd, LOCK_EX);
            mount.wait_status(&key, "one waiter", |status| count(status, "waiters") == 1);
            (waiter, fd, held)
        })
        .collect();
    for (number, (waiter, fd, held)) in waiters.iter().enumerate().rev() {
        holder.close(*held);
        waiter.answer().unwrap_or_else(|e| panic!("k{number}: {e}"));
        assert_eq!(waiter.epoch(*fd), Ok(2));
    }
}

#[test]
fn a_shell_waits_its_turn() {
    let mount = Mount::new();
    let holder = Agent::new();
    let fd = holder.create(&mount.claim("k")).expect("free key");
    let mut shell = mount.spawn_bash("exec 9<>$M/claims/k; flock 9; read -r epoch <&9; [ $epoch = 2 ]");
    mount.wait_status("k", "the shell waits", |status| count(status, "waiters") == 1);
    holder.close(fd);
    assert!(shell.wait().success());
    let output = Command::new("flock").arg("-n").arg(mount.claim("k")).arg("true").output_in_time();
    assert!(output.status.success());
}
