//! The record that a read of the key's file gives.

use std::collections::BTreeMap;
use std::fs;

use libc::{LOCK_EX, O_CREAT, O_RDONLY};
use nix::errno::Errno;
use serde_json::json;

use crate::common::agent::{Agent, count, epoch_of};
use crate::common::{Mount, stdout, wait_for};

/// The `name: value` lines; of a name that comes twice, the first.
fn lines(record: &str) -> BTreeMap<String, String> {
    let mut lines = BTreeMap::new();
    for line in record.lines().skip(1) {
        let Some((name, value)) = line.split_once(": ").or_else(|| line.strip_suffix(':').map(|name| (name, "")))
        else {
            panic!("a line is `name: value`, not {line:?}");
        };
        lines.entry(name.to_owned()).or_insert_with(|| value.to_owned());
    }
    lines
}

#[test]
fn the_record_says_what_status_says() {
    let mount = Mount::new();
    let path = mount.claim("k");
    let agent = Agent::new();
    let fd = agent.create(&path).expect("free key");
    agent.write(fd, "step 3 of 7").expect("holder");
    let record = agent.read(fd).expect("holder");
    let status = mount.status("k");
    assert_eq!(epoch_of(&record), 1);
    assert!(record.ends_with('\n'), "whole lines: {record:?}");
    let lines = lines(&record);
    assert_eq!(lines["state"], "held");
    assert_eq!(lines["via"], "create");
    assert_eq!(lines["waiters"], "0");
    assert_eq!(lines["note"], "step 3 of 7");
    for time in ["since", "renewed", "expires"] {
        assert_eq!(lines[time], status[time].as_str().expect("a time"), "{time}");
    }
    let holder = &lines["holder"];
    assert!(holder.contains(&agent.pid().to_string()), "pid in {holder:?}");
    assert!(holder.contains(status["holder"]["command"].as_str().expect("command")), "command in {holder:?}");
    assert_eq!(fs::read_to_string(&path).expect("held key"), record, "the same for everybody");
}

#[test]
fn the_record_follows_the_line() {
    let mount = Mount::new();
    let path = mount.claim("k");
    let (holder, waiter) = (Agent::new(), Agent::new());
    let fd = holder.create(&path).expect("free key");
    let handle = waiter.handle(&path);
    waiter.begin_flock(handle, LOCK_EX);
    mount.wait_status("k", "one waiter", |status| count(status, "waiters") == 1);
    assert_eq!(lines(&holder.read(fd).expect("holder"))["waiters"], "1");
}

#[test]
fn a_note_cannot_pass_for_the_record() {
    let mount = Mount::new();
    let agent = Agent::new();
    let fd = agent.create(&mount.claim("k")).expect("free key");
    agent.write(fd, "99\nstate: free\nholder: nobody\nexpires: never").expect("holder");
    let record = agent.read(fd).expect("holder");
    assert_eq!(epoch_of(&record), 1);
    let mut found = BTreeMap::new();
    for (name, value) in record.lines().skip(1).filter_map(|line| line.split_once(": ")) {
        found.entry(name).or_insert(value);
    }
    assert_eq!(found["state"], "held", "the first line of a name is the true one: {record}");
    assert_ne!(found["holder"], "nobody");
    assert_ne!(found["expires"], "never");
}

#[test]
fn a_record_read_in_pieces_is_the_record() {
    let mount = Mount::new();
    let agent = Agent::new();
    let fd = agent.create(&mount.claim("k")).expect("free key");
    agent.write(fd, &"x".repeat(300)).expect("holder");
    let record = agent.read(fd).expect("holder");
    let pieces = agent
        .script(
            "result = b''.join(os.pread(fd, 7, at) for at in range(0, size + 14, 7)).decode()",
            json!({ "fd": fd, "size": record.len() }),
        )
        .expect("pread");
    assert_eq!(pieces, json!(record));
    let output =
        mount.bash("while read -r line; do echo \"$line\"; done <$M/claims/k; dd bs=1 if=$M/claims/k 2>/dev/null");
    assert_eq!(stdout(&output), format!("{record}{record}"));
}

#[test]
fn a_handle_of_a_free_key_reads_the_epoch_that_was() {
    let mount = Mount::new();
    let path = mount.claim("k");
    let (agent, other) = (Agent::new(), Agent::new());
    let fd = agent.create(&path).expect("free key");
    let handle = other.open(&path, O_RDONLY).expect("held key");
    agent.close(fd);
    let record = other.read(handle).expect("any other handle reads the present record");
    assert_eq!(epoch_of(&record), 1);
    assert_eq!(lines(&record)["state"], "free");
}

/// Reads the record until that fails; the epochs it saw, and the errno.
const READ_ON: &str = r#"
result, end = [], time.monotonic() + 50
while time.monotonic() < end:
    try: epoch = int(read(fd).split(b"\n")[0])
    except OSError as error: epoch = -error.errno
    if epoch not in result: result.append(epoch)
    if epoch < 0: break
    open(has_read, "a").close()
"#;

#[test]
fn an_epoch_read_from_ones_own_handle_is_never_anothers() {
    let mount = Mount::new();
    let path = mount.claim("k");
    let (agent, next) = (Agent::new(), Agent::new());
    let fd = agent.open(&path, libc::O_RDWR | O_CREAT).expect("free key");
    agent.flock(fd, LOCK_EX).expect("free key");
    let handle = next.handle(&path);
    // Read as fast as possible while the lease passes to the next: 1, then ESTALE, never 2.
    next.begin_flock(handle, LOCK_EX);
    mount.wait_status("k", "the next in line", |status| count(status, "waiters") == 1);
    let has_read = mount.scratch().join("has-read");
    agent.begin("script", json!([READ_ON, { "fd": fd, "has_read": has_read }]));
    wait_for("it reads", || has_read.exists());
    Agent::new().set_xattr(&path, "user.lease.ttl", "100ms").expect("root is the holder's user");
    let seen = agent.answer().expect("reads");
    assert_eq!(seen, json!([1, -(Errno::ESTALE as i32)]));
    next.answer().expect("granted at the deadline");
    assert_eq!(next.epoch(handle), Ok(2));
    assert_eq!(agent.read(fd), Err(Errno::ESTALE));
}
