//! `status/KEY`: one line of JSON for every key that ever was, in every state, and looking claims nothing.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use libc::{LOCK_EX, LOCK_SH, LOCK_UN};
use nix::errno::Errno;
use serde_json::{Value, json};

use crate::common::Mount;
use crate::common::agent::{Agent, count};
use crate::millis;

const FIELDS: [&str; 17] = [
    "key", "state", "epoch", "holder", "since", "renewed", "expires", "ttl_ms", "via", "waiters", "sharers", "note",
    "outcome", "result", "agent", "line", "sharing",
];

#[test]
fn every_state_is_told_and_every_field_is_there() {
    let mount = Mount::new();
    let path = mount.claim("k");
    let agent = Agent::new();
    let check = |state: &str, epoch: u64| -> Value {
        let text = fs::read_to_string(mount.root().join("status/k")).expect("status");
        assert_eq!(text.matches('\n').count(), 1, "one line: {text:?}");
        let status: Value = serde_json::from_str(&text).expect("JSON");
        for field in FIELDS {
            assert!(status.get(field).is_some(), "{field} in {status}");
        }
        assert_eq!((&status["key"], &status["state"], &status["epoch"]), (&json!("k"), &json!(state), &json!(epoch)));
        status
    };
    assert_eq!(
        fs::metadata(mount.root().join("status/k")).map(drop).map_err(|e| e.raw_os_error()),
        Err(Some(libc::ENOENT))
    );

    let fd = agent.create(&path).expect("free key");
    let held = check("held", 1);
    let holder = &held["holder"];
    assert_eq!(holder["pid"], agent.pid());
    assert_eq!((&holder["uid"], &holder["gid"]), (&json!(0), &json!(0)));
    let start: u64 = start_time(agent.pid());
    assert_eq!(holder["start_time"].as_u64(), Some(start), "field 22 of /proc/PID/stat: {holder}");
    assert!(holder["command"].as_str().expect("command").contains("python3"), "{holder}");
    assert_eq!((&held["via"], &held["outcome"], &held["result"]), (&json!("create"), &Value::Null, &Value::Null));
    assert_eq!(millis(&held, "expires") - millis(&held, "renewed"), held["ttl_ms"].as_i64().expect("ttl_ms"));

    agent.close(fd);
    let free = check("free", 1);
    assert_eq!((&free["holder"], &free["outcome"]), (&Value::Null, &json!("released")));

    let fd = agent.handle(&path);
    agent.flock(fd, LOCK_SH).expect("free key");
    let shared = check("shared", 1);
    assert_eq!((count(&shared, "sharers"), &shared["holder"]), (1, &Value::Null));
    agent.flock(fd, LOCK_UN).expect("unlock");

    agent.flock(fd, LOCK_EX).expect("free key");
    assert_eq!(check("held", 2)["via"], "lock");
    let draft = agent.handle(&mount.result("k", 2));
    check("held", 2);
    agent.close(fd);
    let reporting = check("reporting", 2);
    assert_eq!(reporting["result"], Value::Null, "no result before commit");

    agent.write(draft, "hello").expect("registered");
    agent.close(draft);
    let finished = check("finished", 2);
    assert_eq!((&finished["holder"], &finished["outcome"]), (&Value::Null, &json!("completed")));
    assert_eq!((&finished["result"]["epoch"], &finished["result"]["size"]), (&json!(2), &json!(5)));
    let committed: jiff::Timestamp =
        finished["result"]["committed"].as_str().expect("a time").parse().expect("RFC 3339");
    assert!((jiff::Timestamp::now().as_millisecond() - committed.as_millisecond()).abs() < 60_000);
}

/// When the process started, in clock ticks since boot.
fn start_time(pid: i32) -> u64 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).expect("a live process");
    let rest = stat.rsplit_once(") ").expect("a command in brackets").1;
    rest.split(' ').nth(19).expect("22 fields").parse().expect("a number")
}

#[test]
fn times_are_rfc_3339_and_near_the_truth() {
    let mount = Mount::with(&["--ttl", "2h"]);
    let before = jiff::Timestamp::now().as_millisecond();
    let agent = Agent::new();
    agent.create(&mount.claim("k")).expect("free key");
    let after = jiff::Timestamp::now().as_millisecond();
    let status = mount.status("k");
    let since = millis(&status, "since");
    assert!((before - 1..=after + 1).contains(&since), "since {since} in {before}..{after}");
    assert_eq!(status["since"], status["renewed"]);
    assert_eq!(millis(&status, "expires"), since + 7_200_000);
}

#[test]
fn looking_at_status_claims_nothing_and_nothing_can_be_done_to_it() {
    let mount = Mount::new();
    let path = mount.root().join("status/k");
    let agent = Agent::new();
    for flags in [libc::O_RDONLY, libc::O_RDWR] {
        assert_eq!(agent.open(&path, flags), Err(Errno::ENOENT), "a key that never was");
    }
    assert_eq!(agent.create(&path), Err(Errno::EPERM));
    assert_eq!(agent.open(&path, libc::O_RDWR | libc::O_CREAT), Err(Errno::EPERM));
    assert_eq!(mount.state_of("k"), "free");
    assert_eq!(fs::read_dir(mount.root().join("status")).expect("status").count(), 0);
    let fd = agent.create(&mount.claim("k")).expect("free key");
    let mode = fs::metadata(&path).expect("status").permissions().mode();
    assert_eq!(mode & 0o222, 0, "read-only: {mode:o}");
    assert_eq!(agent.unlink(&path), Err(Errno::EPERM));
    assert_eq!(agent.open(&path, libc::O_WRONLY).and_then(|fd| agent.write(fd, "{}")), Err(Errno::EACCES));
    agent.close(fd);
    // A lock on the status file is no lease: whatever it answers, the key is free for others.
    let status = agent.open(&path, libc::O_RDONLY).expect("a key that was");
    let _ = agent.flock(status, LOCK_EX | libc::LOCK_NB);
    assert_eq!(mount.state_of("k"), "free");
    let other = Agent::new();
    assert_eq!(other.epoch(other.create(&mount.claim("k")).expect("free key")), Ok(2));
}

#[test]
fn a_key_that_was_is_told_of_after_a_remount() {
    let mut mount = Mount::new();
    let agent = Agent::new();
    let fd = agent.create(&mount.claim("k")).expect("free key");
    agent.close(fd);
    mount.unmount();
    mount.start(&[]);
    let status = mount.status("k");
    assert_eq!(
        (&status["state"], &status["epoch"], &status["outcome"]),
        (&json!("free"), &json!(1), &json!("released"))
    );
    let fd = agent.create(&mount.claim("k")).expect("free key");
    assert_eq!(agent.epoch(fd), Ok(2), "the epoch goes on");
}

#[test]
fn waiters_are_counted_while_they_wait() {
    let mount = Mount::new();
    let path = mount.claim("k");
    let holder = Agent::new();
    holder.create(&path).expect("free key");
    let waiters: Vec<Agent> = (0..5).map(|_| Agent::new()).collect();
    for (number, waiter) in waiters.iter().enumerate() {
        let fd = waiter.handle(&path);
        waiter.begin_flock(fd, if number % 2 == 0 { LOCK_EX } else { LOCK_SH });
        mount.wait_status("k", "one more waiter", |status| count(status, "waiters") == number as u64 + 1);
    }
    for (left, waiter) in waiters.iter().enumerate().rev() {
        waiter.kill();
        mount.wait_status("k", "one waiter less", |status| count(status, "waiters") == left as u64);
    }
    assert_eq!(mount.state_of("k"), "held");
}
