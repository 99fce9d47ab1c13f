//! Deadlines: where the TTL comes from, and that a lease ends at it, not before and not at the next touch.

use std::fs;
use std::os::unix::fs::chown;

use libc::LOCK_EX;
use nix::errno::Errno;
use serde_json::{Value, json};

use crate::common::agent::{Agent, count, epoch_of};
use crate::common::{Mount, set_mode};
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

/// Opens, waits in line, and answers when it was granted and its record.
const WAITER: &str = r#"
fd = os.open(path, os.O_RDWR | os.O_CREAT)
fcntl.flock(fd, fcntl.LOCK_EX)
result = [time.time_ns() // 1000000, read(fd).decode()]
"#;

#[test]
fn the_line_moves_at_the_deadline_and_not_before() {
    // Long enough for a waiter on a busy machine to read its record before its lease is over, too.
    let mount = Mount::with(&["--ttl", "1500ms"]);
    let path = mount.claim("k");
    let holder = Agent::new();
    holder.create(&path).expect("free key");
    let mut expires = millis(&mount.status("k"), "expires");
    // Nobody releases: each holder after the first expires as well.
    let waiters: Vec<Agent> = (0..3).map(|_| Agent::new()).collect();
    for (number, waiter) in waiters.iter().enumerate() {
        waiter.begin("script", json!([WAITER, { "path": path }]));
        wait_in_line(&mount, number as u64 + 1);
    }
    for (number, waiter) in waiters.iter().enumerate() {
        let answer: Value = waiter.answer().expect("granted");
        let (granted, record) = (answer[0].as_i64().expect("a time"), answer[1].as_str().expect("a record"));
        assert_eq!(epoch_of(record), number as u64 + 2, "in order of arrival");
        assert!(granted >= expires - 1, "granted {} ms before the deadline", expires - granted);
        assert!(granted <= expires + 1_000, "granted {} ms after the deadline", granted - expires);
        let own = record.lines().find_map(|line| line.strip_prefix("expires: ")).expect("an expires line");
        expires = own.parse::<jiff::Timestamp>().expect("RFC 3339").as_millisecond();
    }
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
    let output = mount.leasefs(&["history", "k"]);
    assert!(crate::common::stdout(&output).contains("expired"), "{}", crate::common::stdout(&output));
}

#[test]
fn a_thousand_deadlines_are_met() {
    let mount = Mount::with(&["--ttl", "1s"]);
    let agent = Agent::new();
    agent
        .script(
            "for n in range(1000): os.open(f'{claims}/{n}', os.O_RDWR | os.O_CREAT | os.O_EXCL)",
            json!({ "claims": mount.root().join("claims") }),
        )
        .expect("free keys");
    let last = millis(&mount.status("999"), "expires");
    crate::common::wait_for("every key expired", || {
        fs::read_dir(mount.root().join("claims")).expect("claims").count() == 0
    });
    let late = jiff::Timestamp::now().as_millisecond() - last;
    assert!(late < 2_000, "the last went {late} ms after its deadline");
    for number in [0, 500, 999] {
        assert_eq!(mount.status(&number.to_string())["outcome"], "expired");
    }
    mount.verify();
}
