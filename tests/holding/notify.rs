//! `poll`: a holder learns that it lost its lease, a watcher of `status/KEY` that the state changed.

use std::time::Duration;

use libc::{LOCK_EX, LOCK_SH, O_RDONLY, POLLERR, POLLHUP, POLLPRI};

use crate::common::agent::{Agent, Fd, count};
use crate::common::luck::{in_luck, longer, shown};
use crate::common::{Mount, assert_ok};

const LOST: i16 = POLLHUP | POLLERR;

#[test]
fn a_holder_that_waits_in_poll_is_woken_when_it_loses_its_lease() {
    for lose in ["expiry", "eviction"] {
        let mount = if lose == "expiry" { Mount::with(&["--ttl", "400ms"]) } else { Mount::new() };
        let agent = Agent::new();
        let fd = agent.create(&mount.claim("k")).expect("free key");
        if lose == "eviction" {
            assert_eq!(agent.poll(fd, 0, 100) & LOST, 0, "it has its lease");
        }
        agent.begin("poll", serde_json::json!([fd, 0, 30_000]));
        if lose == "eviction" {
            assert_eq!(agent.answer_within(Duration::from_millis(100)), None, "it sleeps");
            assert_ok(&mount.leasefs(&["evict", "k", "--epoch", "1"]));
        }
        let events = agent.answer_within(Duration::from_secs(25)).expect("woken").expect("poll");
        assert_eq!(events.as_i64().expect("events") as i16 & LOST, LOST, "{lose}");
        assert_eq!(agent.poll(fd, 0, 0) & LOST, LOST, "and again without a wait");
    }
}

#[test]
fn polling_a_live_lease_or_an_unlocked_handle_says_nothing_is_lost() {
    let mount = Mount::new();
    let path = mount.claim("k");
    let (holder, other) = (Agent::new(), Agent::new());
    let fd = holder.create(&path).expect("free key");
    let handle = other.handle(&path);
    assert_eq!(holder.poll(fd, 0, 0) & LOST, 0);
    assert_eq!(other.poll(handle, 0, 0) & LOST, 0);
    holder.flock(fd, libc::LOCK_UN).expect("unlock");
    assert_eq!(holder.poll(fd, 0, 0) & LOST, 0, "given back is not lost");
    other.flock(handle, LOCK_EX).expect("free key");
    assert_eq!(other.poll(handle, 0, 0) & LOST, 0);
}

/// Opens `status/KEY`, reads it and sleeps in poll.
fn watch(mount: &Mount, watcher: &Agent, key: &str) -> Fd {
    let fd = watcher.open(&mount.root().join("status").join(key), O_RDONLY).expect("a key that was");
    watcher.read(fd).expect("status");
    watcher.begin("poll", serde_json::json!([fd, POLLPRI, 30_000]));
    assert_eq!(watcher.answer_within(Duration::from_millis(100)), None, "no change, no event");
    fd
}

/// The watcher is woken, and reads this state.
fn assert_woken(watcher: &Agent, fd: Fd, state: &str) {
    let events = watcher.answer_within(Duration::from_secs(25)).unwrap_or_else(|| panic!("not woken for {state}"));
    assert_ne!(events.expect("poll").as_i64().expect("events") as i16 & POLLPRI, 0, "{state}");
    let status: serde_json::Value = serde_json::from_str(&watcher.read(fd).expect("status")).expect("JSON");
    assert_eq!(status["state"], state);
    watcher.begin("poll", serde_json::json!([fd, POLLPRI, 30_000]));
    assert_eq!(watcher.answer_within(Duration::from_millis(50)), None, "read, so quiet again ({state})");
}

#[test]
fn a_watcher_of_status_is_woken_by_each_change_of_state() {
    let mount = Mount::new();
    let path = mount.claim("k");
    let (agent, watcher) = (Agent::new(), Agent::new());
    let fd = agent.create(&path).expect("free key");
    agent.close(fd);
    let status = watch(&mount, &watcher, "k");
    let fd = agent.create(&path).expect("free key");
    assert_woken(&watcher, status, "held");
    let draft = agent.handle(&mount.result("k", 2));
    agent.close(fd);
    assert_woken(&watcher, status, "reporting");
    agent.close(draft);
    assert_woken(&watcher, status, "finished");
    agent.unlink(&path).expect("finished key");
    assert_woken(&watcher, status, "free");
    let fd = agent.handle(&path);
    agent.flock(fd, LOCK_SH).expect("free key");
    assert_woken(&watcher, status, "shared");
    agent.flock(fd, libc::LOCK_UN).expect("unlock");
    assert_woken(&watcher, status, "free");
}

#[test]
fn a_watcher_is_woken_by_a_deadline_too() {
    in_luck("the deadline came before the watcher looked", |attempt| {
        let mount = Mount::with(&["--ttl", &shown(longer(Duration::from_secs(1), attempt))]);
        let (agent, watcher) = (Agent::new(), Agent::new());
        agent.create(&mount.claim("k")).expect("free key");
        let fd = watcher.open(&mount.root().join("status/k"), O_RDONLY).expect("held key");
        if watcher.read(fd).expect("status").contains("\"expired\"") {
            return None;
        }
        assert_ne!(watcher.poll(fd, POLLPRI, 50_000) & POLLPRI, 0);
        assert!(watcher.read(fd).expect("status").contains("\"expired\""));
        Some(())
    });
}

#[test]
fn a_watcher_is_woken_by_a_result_while_the_key_is_held() {
    let mount = Mount::new();
    let (agent, watcher) = (Agent::new(), Agent::new());
    let fd = agent.create(&mount.claim("k")).expect("free key");
    let status = watch(&mount, &watcher, "k");
    let draft = agent.handle(&mount.result("k", 1));
    agent.write(draft, "42").expect("registered attempt");
    agent.close(draft);
    assert_woken(&watcher, status, "held");
    assert_eq!(mount.status("k")["result"]["size"], 2);
    agent.close(fd);
    assert_woken(&watcher, status, "finished");
}

#[test]
fn many_watchers_are_all_woken() {
    let mount = Mount::new();
    let path = mount.claim("k");
    let agent = Agent::new();
    let fd = agent.create(&path).expect("free key");
    let watchers: Vec<(Agent, Fd)> = (0..20)
        .map(|_| {
            let watcher = Agent::new();
            let fd = watcher.open(&mount.root().join("status/k"), O_RDONLY).expect("held key");
            watcher.read(fd).expect("status");
            watcher.begin("poll", serde_json::json!([fd, POLLPRI, 30_000]));
            (watcher, fd)
        })
        .collect();
    assert_eq!(watchers[19].0.answer_within(Duration::from_millis(100)), None);
    agent.close(fd);
    for (watcher, fd) in &watchers {
        assert_woken(watcher, *fd, "free");
    }
}

#[test]
fn a_poll_that_is_interrupted_leaves_the_tree_working() {
    let mount = Mount::new();
    let path = mount.claim("k");
    let (holder, waiter) = (Agent::new(), Agent::new());
    let fd = holder.create(&path).expect("free key");
    holder.begin("poll", serde_json::json!([fd, 0, 30_000]));
    assert_eq!(holder.answer_within(Duration::from_millis(50)), None);
    let handle = waiter.handle(&path);
    waiter.begin_flock(handle, LOCK_EX);
    mount.wait_status("k", "one waiter", |status| count(status, "waiters") == 1);
    holder.kill();
    waiter.answer().expect("granted when the sleeper in poll was killed");
    assert_eq!(waiter.epoch(handle), Ok(2));
}

#[test]
fn a_reader_of_events_hears_of_the_share_that_an_interrupted_waiter_let_pass() {
    let mount = Mount::new();
    let path = mount.claim("k");
    let (first, upgrader, second, reader) = (Agent::new(), Agent::new(), Agent::new(), Agent::new());
    let fds = [&first, &upgrader, &second].map(|agent| agent.handle(&path));
    first.flock(fds[0], LOCK_SH).expect("free key");
    let usr1 = libc::SIGUSR1;
    upgrader.call("on_signal", serde_json::json!([usr1, "raise"])).expect("a handler");
    upgrader.begin_flock(fds[1], LOCK_EX);
    mount.wait_status("k", "one in line", |status| count(status, "waiters") == 1);
    second.begin_flock(fds[2], LOCK_SH);
    mount.wait_status("k", "two in line", |status| count(status, "waiters") == 2);
    let events = reader.open(&mount.root().join(".leasefs/events"), O_RDONLY).expect("events");
    reader.begin("os_read", serde_json::json!([events, 65_536]));
    assert_eq!(reader.answer_within(Duration::from_millis(100)), None, "nothing has happened");
    upgrader.signal(nix::sys::signal::Signal::SIGUSR1);
    assert_eq!(upgrader.answer().expect_err("interrupted"), nix::errno::Errno::EINTR);
    second.answer().expect("shared");
    // Together with the end of the wait, or right after it.
    let mut told = String::new();
    while !told.contains("shared") {
        let text = reader.answer_within(Duration::from_secs(30)).unwrap_or_else(|| panic!("not told: {told}"));
        told.push_str(text.expect("events").as_str().expect("text"));
        reader.begin("os_read", serde_json::json!([events, 65_536]));
    }
}
