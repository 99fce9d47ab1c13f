//! Deadlines: where the TTL comes from, and that a lease ends at it, not before and not at the next touch.

use std::fs;
use std::os::unix::fs::chown;

use libc::LOCK_EX;
use nix::errno::Errno;
use serde_json::{Value, json};

use crate::common::agent::{Agent, count};
use crate::common::luck::in_luck;
use crate::common::{Mount, assert_ok, set_mode, stdout, wait_for};
use crate::millis;

const TTL: &str = "user.lease.ttl";

fn ttl_of(mount: &Mount, key: &str) -> u64 {
    let agent = Agent::new();
    let fd = agent.create(&mount.claim(key)).expect("free key");
    let status = mount.status(key);
    assert!(
        (millis(&status, "expires") - millis(&status, "since") - status["ttl_ms"].as_i64().expect("ttl_ms")).abs() <= 2
    );
    agent.close(fd);
    status["ttl_ms"].as_u64().expect("ttl_ms")
}

#[test]
fn a_lease_lasts_a_day_unless_the_mount_says_otherwise() {
    assert_eq!(ttl_of(&Mount::new(), "k"), 24 * 3_600_000);
    for (option, ttl_ms) in [("90s", 90_000), ("15m", 900_000), ("1h30m", 5_400_000), ("365d", 365 * 24 * 3_600_000)] {
        assert_eq!(ttl_of(&Mount::with(&["--ttl", option]), "k"), ttl_ms, "--ttl {option}");
    }
}

#[test]
fn the_nearest_namespace_that_has_a_ttl_wins_and_rules_new_leases() {
    let mount = Mount::with(&["--ttl", "1h"]);
    fs::create_dir_all(mount.claim("a/b/c")).expect("mkdir");
    let root = Agent::new();
    let before = Agent::new();
    before.create(&mount.claim("a/old")).expect("free key");
    root.set_xattr(&mount.claim("a"), TTL, "10m").expect("root");
    root.set_xattr(&mount.claim("a/b"), TTL, "5m").expect("root");
    assert_eq!(mount.status("a/old")["ttl_ms"], 3_600_000, "a lease that was there keeps its own");
    assert_eq!(ttl_of(&mount, "k"), 3_600_000);
    assert_eq!(ttl_of(&mount, "a/k"), 600_000);
    assert_eq!(ttl_of(&mount, "a/b/k"), 300_000);
    assert_eq!(ttl_of(&mount, "a/b/c/k"), 300_000);
    let fd = root.handle(&mount.claim("a/b/locked"));
    root.flock(fd, LOCK_EX).expect("free key");
    assert_eq!(mount.status("a/b/locked")["ttl_ms"], 300_000, "locks, too");
}

#[test]
fn a_namespaces_ttl_survives_a_remount() {
    let mut mount = Mount::new();
    fs::create_dir(mount.claim("ns")).expect("mkdir");
    Agent::new().set_xattr(&mount.claim("ns"), TTL, "7m").expect("root");
    mount.unmount();
    mount.start(&[]);
    assert_eq!(ttl_of(&mount, "ns/k"), 420_000);
}

#[test]
fn the_holders_user_sets_the_ttl_of_its_own_lease_and_no_one_else_does() {
    let mount = Mount::shared();
    let path = mount.claim("k");
    let (holder, other) = (Agent::user(12_001, 12_001, &[]), Agent::user(12_002, 12_002, &[]));
    let fd = holder.create(&path).expect("free key");
    holder.set_xattr(&path, TTL, "2m").expect("the holder's uid");
    let status = mount.status("k");
    assert_eq!(status["ttl_ms"], 120_000);
    let left = millis(&status, "expires") - jiff::Timestamp::now().as_millisecond();
    assert!((60_000..=120_001).contains(&left), "from now on: {left}");
    assert_eq!(holder.call("getxattr", json!([path, TTL])), Ok(json!("2m")));
    let refused = other.set_xattr(&path, TTL, "1ms").expect_err("another user");
    assert!([Errno::EACCES, Errno::EPERM].contains(&refused), "{refused}");
    assert_eq!(mount.status("k")["ttl_ms"], 120_000);
    // Renewals keep to it, the next attempt does not.
    holder.write(fd, "beat").expect("holder");
    let status = mount.status("k");
    assert_eq!(millis(&status, "expires") - millis(&status, "renewed"), 120_000);
    holder.close(fd);
    assert_eq!(ttl_of(&mount, "k"), 24 * 3_600_000);
}

#[test]
fn only_the_owner_or_root_sets_a_namespaces_ttl() {
    let mount = Mount::shared();
    let path = mount.claim("ns");
    fs::create_dir(&path).expect("mkdir");
    set_mode(&path, 0o777);
    chown(&path, Some(12_001), None).expect("chown");
    let (owner, other) = (Agent::user(12_001, 12_001, &[]), Agent::user(12_002, 12_002, &[]));
    owner.set_xattr(&path, TTL, "3m").expect("the owner");
    let refused = other.set_xattr(&path, TTL, "1ms").expect_err("0777 lets one claim, not rule");
    assert!([Errno::EACCES, Errno::EPERM].contains(&refused), "{refused}");
    assert_eq!(ttl_of(&mount, "ns/k"), 180_000);
}

/// Opens, waits in line, and answers when it was granted.
const WAITER: &str = r#"
fd = os.open(path, os.O_RDWR | os.O_CREAT)
fcntl.flock(fd, fcntl.LOCK_EX)
result = time.time_ns() // 1000000
"#;

/// The attempts of a key as `leasefs history --json` tells them.
fn history(mount: &Mount, key: &str) -> Vec<Value> {
    let output = mount.leasefs(&["history", "--json", key]);
    assert_ok(&output);
    stdout(&output).lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

#[test]
fn the_line_moves_at_the_deadline_and_not_before() {
    in_luck("the machine stood still at a deadline, or before somebody was in line", |_| {
        let mount = Mount::with(&["--ttl", "1s"]);
        let path = mount.claim("k");
        let holder = Agent::new();
        holder.create(&path).expect("free key");
        // Nobody releases: each holder after the first expires as well.
        let waiters: Vec<Agent> = (0..3).map(|_| Agent::new()).collect();
        for (number, waiter) in waiters.iter().enumerate() {
            waiter.begin("script", json!([WAITER, { "path": path }]));
            wait_in_line(&mount, number as u64 + 1);
        }
        let granted: Vec<i64> =
            waiters.iter().map(|waiter| waiter.answer().expect("granted").as_i64().expect("a time")).collect();
        let attempts = history(&mount, "k");
        let mut late = 0;
        for (number, waiter) in waiters.iter().enumerate() {
            let (before, own) = (&attempts[number], &attempts[number + 1]);
            assert_eq!(own["holder"]["pid"], waiter.pid(), "in order of arrival");
            let after = granted[number] - millis(before, "expires");
            assert!(after >= -1, "granted {} ms before the deadline", -after);
            late = late.max(after);
            // It had come after the deadline, to a free key.
            if own["waited_ms"] == 0 {
                return None;
            }
        }
        (late <= 1_000).then_some(())
    });
}

/// Waits until this many have come to the line, those that were granted since included.
fn wait_in_line(mount: &Mount, arrived: u64) {
    mount.wait_status("k", "another waiter", |status| {
        count(status, "waiters") + status["epoch"].as_u64().expect("epoch") > arrived
    });
}

#[test]
fn a_key_nobody_looks_at_expires_as_well() {
    let mount = Mount::with(&["--ttl", "300ms"]);
    let agent = Agent::new();
    let fd = agent.create(&mount.claim("k")).expect("free key");
    // Poll is answered by the deadline itself; nothing else touches the tree.
    assert_ne!(agent.poll(fd, 0, 30_000), 0);
    wait_for("that it expired is recorded", || history(&mount, "k")[0]["outcome"] == "expired");
}

#[test]
fn a_thousand_deadlines_are_met() {
    in_luck("the last went 2 s after its deadline", |_| {
        let mount = Mount::with(&["--ttl", "1s"]);
        let agent = Agent::new();
        agent
            .script(
                "for n in range(1000): os.open(f'{claims}/{n}', os.O_RDWR | os.O_CREAT | os.O_EXCL)",
                json!({ "claims": mount.root().join("claims") }),
            )
            .expect("free keys");
        wait_for("every key expired", || fs::read_dir(mount.root().join("claims")).expect("claims").count() == 0);
        let gone = jiff::Timestamp::now().as_millisecond();
        for number in ["0", "500", "999"] {
            assert_eq!(mount.status(number)["outcome"], "expired");
        }
        mount.verify();
        let last = millis(&history(&mount, "999")[0], "expires");
        (gone - last < 2_000).then_some(())
    });
}
