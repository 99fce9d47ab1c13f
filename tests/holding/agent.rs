//! `user.lease.agent`: whom a holder works for, as it says itself, for as long as it holds the key and in its history.

use std::fs;
use std::os::unix::fs::MetadataExt;

use libc::LOCK_EX;
use nix::errno::Errno;
use serde_json::{Value, json};

use crate::common::agent::{Agent, Fd};
use crate::common::{Mount, assert_ok, stdout, wait_for};

const AGENT: &str = "user.lease.agent";

fn held(mount: &Mount) -> (Agent, Fd) {
    let agent = Agent::new();
    let fd = agent.create(&mount.claim("k")).expect("free key");
    (agent, fd)
}

#[test]
fn an_agents_name_is_told_everywhere_and_renews_nothing() {
    let mount = Mount::new();
    let path = mount.claim("k");
    let (holder, fd) = held(&mount);
    let get = || holder.call("getxattr", json!([path, AGENT]));
    assert_eq!((get(), &mount.status("k")["agent"]), (Err(Errno::ENODATA), &Value::Null));
    assert!(!holder.read(fd).expect("holder").contains("agent"));
    let before = mount.status("k");
    holder.set_xattr(&path, AGENT, "coder 7/ü").expect("the holder's uid");
    let status = mount.status("k");
    assert_eq!(status["agent"], "coder 7/ü");
    for field in ["renewed", "expires", "epoch", "note"] {
        assert_eq!(status[field], before[field], "{field}");
    }
    let record = holder.read(fd).expect("holder");
    assert_eq!(record.lines().filter(|line| *line == "agent: coder 7/ü").count(), 1, "{record}");
    assert_eq!(fs::metadata(&path).expect("held").size(), record.len() as u64);
    assert_eq!(get(), Ok(json!("coder 7/ü")));
    assert_eq!(holder.call("listxattr", json!([path])), Ok(json!(["user.lease.ttl", AGENT])));
    let shown = stdout(&mount.leasefs(&["status", "k"]));
    assert!(shown.contains("agent    coder 7/ü\n"), "{shown}");
    // Whoever has the file open may say it by the handle, too.
    holder.call("setxattr", json!([fd, AGENT, { "hex": "62" }])).expect("the holder's uid");
    assert_eq!(get(), Ok(json!("b")));
    holder.call("removexattr", json!([path, AGENT])).expect("the holder's uid");
    assert_eq!((get(), &mount.status("k")["agent"]), (Err(Errno::ENODATA), &Value::Null));
    assert_eq!(holder.call("removexattr", json!([path, AGENT])), Err(Errno::ENODATA));
    assert_eq!(holder.epoch(fd), Ok(1));
}

#[test]
fn what_is_no_name_is_einval_and_changes_nothing() {
    let mount = Mount::new();
    let path = mount.claim("k");
    let (holder, _fd) = held(&mount);
    let set = |bytes: &[u8]| {
        let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        holder.call("setxattr", json!([path, AGENT, { "hex": hex }])).map(drop)
    };
    let longest = "ü".repeat(127) + "x";
    set(longest.as_bytes()).expect("255 bytes");
    let too_long = "x".repeat(256);
    for bad in [&b""[..], b"two\nlines", b"\0", b"\x1b[2J", "\u{85}".as_bytes(), b"\xff\xfe", too_long.as_bytes()] {
        assert_eq!(set(bad), Err(Errno::EINVAL), "{bad:?}");
        assert_eq!(mount.status("k")["agent"], longest, "{bad:?}");
    }
    mount.verify();
}

#[test]
fn only_the_holders_user_names_its_agent_and_only_while_it_holds() {
    let mount = Mount::shared();
    let path = mount.claim("k");
    let (holder, other) = (Agent::user(12_001, 12_001, &[]), Agent::user(12_002, 12_002, &[]));
    let fd = holder.create(&path).expect("free key");
    holder.set_xattr(&path, AGENT, "mine").expect("the holder's uid");
    let refused = [
        other.set_xattr(&path, AGENT, "stolen").expect_err("another user"),
        other.call("removexattr", json!([path, AGENT])).expect_err("another user"),
    ];
    assert!(refused.iter().all(|errno| [Errno::EACCES, Errno::EPERM].contains(errno)), "{refused:?}");
    assert_eq!(mount.status("k")["agent"], "mine");
    Agent::new().set_xattr(&path, AGENT, "root's word").expect("root");
    assert_eq!(mount.status("k")["agent"], "root's word");
    // A finished key has a file, and nobody holds it.
    let draft = holder.handle(&mount.result("k", 1));
    holder.fsync(draft).expect("the result is committed");
    holder.close(draft);
    holder.close(fd);
    mount.wait_status("k", "finished", |status| status["state"] == "finished");
    assert_eq!(holder.set_xattr(&path, AGENT, "late"), Err(Errno::ESTALE));
    assert_eq!(mount.status("k")["agent"], Value::Null);
    fs::create_dir(mount.claim("ns")).expect("mkdir");
    let root = Agent::new();
    assert_eq!(root.set_xattr(&mount.claim("ns"), AGENT, "a"), Err(Errno::EOPNOTSUPP), "a namespace has no holder");
    assert_eq!(root.set_xattr(&mount.root().join("status/k"), AGENT, "a"), Err(Errno::EOPNOTSUPP));
}

/// The attempts of `k` as `leasefs history --json` tells them.
fn history(mount: &Mount) -> Vec<Value> {
    let output = mount.leasefs(&["history", "--json", "k"]);
    assert_ok(&output);
    stdout(&output).lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

#[test]
fn history_keeps_the_agent_and_how_long_it_waited() {
    let mount = Mount::new();
    let path = mount.claim("k");
    let (holder, fd) = held(&mount);
    let table = || stdout(&mount.leasefs(&["history", "k"]));
    assert!(!table().contains("AGENT") && !table().contains("WAITED"), "{}", table());
    holder.set_xattr(&path, AGENT, "first").expect("the holder's uid");
    assert!(table().contains("AGENT") && !table().contains("WAITED"), "{}", table());
    let waiter = Agent::new();
    let handle = waiter.handle(&path);
    waiter.begin_flock(handle, LOCK_EX);
    mount.wait_status("k", "one waiter", |status| status["waiters"] == 1);
    let since = crate::millis(&mount.status("k")["line"][0], "since");
    crate::wait_until(since + 30);
    holder.close(fd);
    waiter.answer().expect("granted");
    let longest = jiff::Timestamp::now().as_millisecond() - since + 1;
    let attempts = history(&mount);
    assert_eq!((&attempts[0]["agent"], &attempts[0]["waited_ms"]), (&json!("first"), &json!(0)));
    assert_eq!(attempts[1]["agent"], Value::Null, "the next attempt has none");
    let waited = attempts[1]["waited_ms"].as_i64().expect("a number");
    assert!((29..=longest).contains(&waited), "{waited} of {longest}");
    assert!(table().contains("WAITED"), "{}", table());
    mount.verify();
}

#[test]
fn an_agents_name_outlives_the_server_and_the_connection() {
    let mut mount = Mount::new();
    let path = mount.claim("k");
    let (holder, fd) = held(&mount);
    holder.set_xattr(&path, AGENT, "steady").expect("the holder's uid");
    mount.kill_server();
    assert_eq!((&mount.status("k")["agent"], holder.epoch(fd)), (&json!("steady"), Ok(1)));
    holder.set_xattr(&path, AGENT, "steady still").expect("the holder's uid");
    mount.lose_connection();
    mount.start(&[]);
    let status = mount.status("k");
    assert_eq!((&status["state"], &status["agent"]), (&json!("orphaned"), &json!("steady still")));
    drop(holder);
    let mut why = Value::Null;
    wait_for("nobody has it any more", || {
        let status = mount.status("k");
        if status["orphaned_why"] != why {
            why = status["orphaned_why"].clone();
            eprintln!("held: {why}");
        }
        status["state"] == "free"
    });
    assert_eq!(history(&mount)[0]["agent"], "steady still");
    mount.verify();
}
