//! The orders of those who keep no file open: `release` and `renew` of one's own attempt, by key and epoch.

use std::fs;
use std::os::unix::fs::chown;

use libc::{LOCK_EX, LOCK_NB, POLLHUP, POLLIN};
use nix::errno::Errno;
use serde_json::json;

use crate::common::agent::{Agent, count};
use crate::common::{Mount, set_mode, stdout};
use crate::evict::control;
use crate::millis;

fn release(key: &str, epoch: u64) -> String {
    json!({ "op": "release", "key": key, "epoch": epoch, "reason": "done" }).to_string()
}

fn renew(key: &str, epoch: u64) -> String {
    json!({ "op": "renew", "key": key, "epoch": epoch }).to_string()
}

#[test]
fn an_order_to_release_frees_the_key_and_its_handle_learns_of_it() {
    let mount = Mount::new();
    let path = mount.claim("k");
    let (holder, waiter, other) = (Agent::new(), Agent::new(), Agent::new());
    let fd = holder.create(&path).expect("free key");
    let handle = waiter.handle(&path);
    waiter.begin_flock(handle, LOCK_EX);
    mount.wait_status("k", "one waiter", |status| count(status, "waiters") == 1);
    holder.begin("poll", json!([fd, 0, 60_000]));
    let order = release("k", 1);
    assert_eq!(control(&mount, &other, &order), Ok(order.len() as u64));
    waiter.answer().expect("granted");
    assert_eq!(waiter.epoch(handle), Ok(2));
    let events = holder.answer().expect("poll").as_i64().expect("events");
    assert_ne!(events & i64::from(POLLHUP), 0, "{events:#x}");
    assert_eq!(holder.read(fd), Err(Errno::ESTALE));
    assert_eq!(holder.write(fd, "late"), Err(Errno::ESTALE));
    assert_eq!(holder.flock(fd, LOCK_EX | LOCK_NB), Err(Errno::ESTALE));
    holder.close(fd);
    assert_eq!(waiter.epoch(handle), Ok(2), "the old handle frees nothing");
    let history = stdout(&mount.leasefs(&["history", "k"]));
    assert!(history.contains("released") && history.contains(&format!("by pid {}: done", other.pid())), "{history}");
    mount.verify();
}

#[test]
fn only_the_epoch_that_is_held_is_released_or_renewed() {
    let mount = Mount::with(&["--ttl", "1h"]);
    let path = mount.claim("k");
    let (holder, other) = (Agent::new(), Agent::new());
    for order in [release("never", 1), renew("never", 1)] {
        assert_eq!(control(&mount, &other, &order), Err(Errno::ENOENT), "{order}");
    }
    let fd = holder.create(&path).expect("free key");
    holder.close(fd);
    let fd = holder.create(&path).expect("free key");
    let before = mount.status("k");
    for epoch in [0, 1, 3, u64::MAX] {
        for order in [release("k", epoch), renew("k", epoch)] {
            assert_eq!(control(&mount, &other, &order), Err(Errno::ESTALE), "{order}");
        }
    }
    assert_eq!(mount.status("k"), before, "nothing happened to the holder");
    assert!(control(&mount, &other, &release("k", 2)).is_ok());
    for order in [release("k", 2), renew("k", 2)] {
        assert_eq!(control(&mount, &other, &order), Err(Errno::ESTALE), "{order}: it is released");
    }
    assert_eq!(holder.read(fd), Err(Errno::ESTALE));
    holder.create(&path).expect("free key");
    assert!(control(&mount, &other, &json!({ "op": "evict", "key": "k", "epoch": 3 }).to_string()).is_ok());
    for order in [release("k", 3), renew("k", 3)] {
        assert_eq!(control(&mount, &other, &order), Err(Errno::ESTALE), "{order}: it was evicted");
    }
    mount.verify();
}

#[test]
fn an_order_to_renew_moves_the_deadline_and_keeps_the_epoch() {
    let mount = Mount::with(&["--ttl", "1h"]);
    let holder = Agent::new();
    let fd = holder.create(&mount.claim("k")).expect("free key");
    holder.write(fd, "a note").expect("holder");
    let before = mount.status("k");
    crate::wait_until(millis(&before, "renewed") + 2);
    assert!(control(&mount, &Agent::new(), &renew("k", 1)).is_ok());
    let after = mount.status("k");
    assert!(millis(&after, "renewed") > millis(&before, "renewed"));
    assert_eq!(millis(&after, "expires") - millis(&after, "renewed"), 3_600_000);
    assert_eq!((&after["epoch"], &after["note"], &after["since"]), (&json!(1), &json!("a note"), &before["since"]));
    assert_eq!(holder.epoch(fd), Ok(1));
}

#[test]
fn after_expiry_an_order_is_too_late() {
    let mount = Mount::with(&["--ttl", "200ms"]);
    let holder = Agent::new();
    let fd = holder.create(&mount.claim("k")).expect("free key");
    assert_ne!(holder.poll(fd, 0, 30_000), 0, "woken by the deadline");
    for order in [renew("k", 1), release("k", 1)] {
        assert_eq!(control(&mount, &Agent::new(), &order), Err(Errno::ESTALE), "{order}");
    }
    assert_eq!(mount.status("k")["outcome"], "expired");
    mount.verify();
}

#[test]
fn orders_are_for_the_attempts_own_user_and_root() {
    let mount = Mount::shared();
    let namespace = mount.claim("ns");
    fs::create_dir(&namespace).expect("mkdir");
    set_mode(&namespace, 0o777);
    chown(&namespace, Some(12_003), None).expect("chown");
    let users = [12_001, 12_002, 12_003].map(|uid| Agent::user(uid, uid, &[]));
    let [holder, stranger, owner] = &users;
    let own = Agent::user(12_001, 12_001, &[]);
    let fd = holder.create(&namespace.join("k")).expect("free key");
    for other in [stranger, owner] {
        for order in [release("ns/k", 1), renew("ns/k", 1)] {
            assert_eq!(control(&mount, other, &order), Err(Errno::EACCES), "{order}");
        }
    }
    assert_eq!(control(&mount, stranger, &release("ns/none", 1)), Err(Errno::EACCES), "as an eviction");
    assert!(control(&mount, &own, &renew("ns/k", 1)).is_ok(), "another process of its user");
    assert_eq!(holder.epoch(fd), Ok(1));
    assert!(control(&mount, &own, &release("ns/k", 1)).is_ok());
    assert_eq!(holder.read(fd), Err(Errno::ESTALE));
    // Superseded by another user's attempt, it is told so; in a namespace that is shut it is told nothing.
    let fd = stranger.create(&namespace.join("k")).expect("free key");
    assert_eq!(control(&mount, holder, &release("ns/k", 1)), Err(Errno::ESTALE));
    assert_eq!(control(&mount, holder, &release("ns/k", 2)), Err(Errno::EACCES));
    set_mode(&namespace, 0o700);
    assert_eq!(control(&mount, holder, &release("ns/k", 1)), Err(Errno::EACCES));
    assert_eq!(stranger.epoch(fd), Ok(2));
    assert!(control(&mount, stranger, &renew("ns/k", 2)).is_ok(), "it is its own still");
    assert!(control(&mount, &Agent::new(), &release("ns/k", 2)).is_ok(), "root");
    assert_eq!(stranger.read(fd), Err(Errno::ESTALE));
    mount.verify();
}

#[test]
fn an_order_to_release_leaves_the_draft_its_time() {
    let mount = Mount::new();
    let (holder, other) = (Agent::new(), Agent::new());
    let fd = holder.create(&mount.claim("k")).expect("free key");
    let draft = holder.handle(&mount.result("k", 1));
    holder.write(draft, "half").expect("registered");
    assert!(control(&mount, &other, &release("k", 1)).is_ok());
    assert_eq!(mount.state_of("k"), "reporting");
    assert_eq!(holder.read(fd), Err(Errno::ESTALE));
    assert_ne!(holder.poll(fd, POLLIN, 0) & POLLHUP, 0);
    for order in [release("k", 1), renew("k", 1)] {
        assert_eq!(control(&mount, &other, &order), Err(Errno::ESTALE), "{order}: its handle holds nothing");
    }
    assert_eq!(other.create(&mount.claim("k")), Err(Errno::EEXIST));
    holder.write(draft, " and half").expect("registered");
    holder.close(draft);
    mount.wait_status("k", "finished", |status| status["state"] == "finished");
    assert_eq!(fs::read_to_string(mount.result("k", 1)).expect("the result"), "half and half");
    mount.verify();
}

#[test]
fn an_orphaned_attempt_is_released_by_its_user() {
    let mut mount = Mount::new();
    let holder = Agent::new();
    holder.create(&mount.claim("k")).expect("free key");
    mount.lose_connection();
    mount.start(&[]);
    assert_eq!(mount.state_of("k"), "orphaned");
    let other = Agent::new();
    assert!(control(&mount, &other, &renew("k", 1)).is_ok());
    assert_eq!(mount.state_of("k"), "orphaned");
    assert!(control(&mount, &other, &release("k", 1)).is_ok());
    assert_eq!((mount.state_of("k").as_str(), &mount.status("k")["outcome"]), ("free", &json!("released")));
    let fd = other.create(&mount.claim("k")).expect("free key");
    assert_eq!(other.epoch(fd), Ok(2));
    mount.verify();
}
