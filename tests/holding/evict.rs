//! Eviction: by whom, of exactly which epoch, and through `.leasefs/control` or the command.

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};

use libc::{LOCK_EX, O_WRONLY};
use nix::errno::Errno;
use serde_json::json;

use crate::common::agent::{Agent, count};
use crate::common::{Mount, assert_ok, set_mode, stdout};

/// One write to the control file.
pub fn control(mount: &Mount, agent: &Agent, command: &str) -> Result<u64, Errno> {
    let fd = agent.open(&mount.root().join(".leasefs/control"), O_WRONLY)?;
    let answer = agent.write(fd, command);
    agent.close(fd);
    answer
}

fn evict(key: &str, epoch: u64) -> String {
    json!({ "op": "evict", "key": key, "epoch": epoch, "reason": "it hung" }).to_string()
}

#[test]
fn an_evicted_key_goes_to_the_next_in_line_and_history_says_by_whom_and_why() {
    let mount = Mount::new();
    let path = mount.claim("k");
    let (holder, waiter, operator) = (Agent::new(), Agent::new(), Agent::new());
    let fd = holder.create(&path).expect("free key");
    let handle = waiter.handle(&path);
    waiter.begin_flock(handle, LOCK_EX);
    mount.wait_status("k", "one waiter", |status| count(status, "waiters") == 1);
    assert!(control(&mount, &operator, &evict("k", 1)).is_ok());
    waiter.answer().expect("granted");
    assert_eq!(waiter.epoch(handle), Ok(2));
    assert_eq!(holder.read(fd), Err(Errno::ESTALE));
    let history = stdout(&mount.leasefs(&["history", "k"]));
    assert!(history.contains("evicted") && history.contains("it hung"), "{history}");
    mount.verify();
}

#[test]
fn a_reason_is_as_long_as_a_note_at_most() {
    let mount = Mount::new();
    let holder = Agent::new();
    holder.create(&mount.claim("k")).expect("free key");
    for op in ["evict", "release"] {
        let order = |length| json!({ "op": op, "key": "k", "epoch": 1, "reason": "x".repeat(length) }).to_string();
        assert_eq!(control(&mount, &holder, &order(4_097)), Err(Errno::EFBIG), "{op}");
        assert_eq!(mount.status("k")["state"], "held", "{op}");
    }
    let order = json!({ "op": "release", "key": "k", "epoch": 1, "reason": "x".repeat(4_096) });
    assert!(control(&mount, &holder, &order.to_string()).is_ok());
    mount.verify();
}

/// One object in a write: what stands behind it is not passed over.
#[test]
fn an_order_is_one_object_and_nothing_else() {
    let mount = Mount::new();
    let holder = Agent::new();
    for key in ["a", "b"] {
        holder.create(&mount.claim(key)).expect("free key");
    }
    let [a, b] = ["a", "b"].map(|key| evict(key, 1));
    for order in [format!("{a}{b}"), format!("{a}\n{b}\n"), format!("{a} x"), a[..9].to_owned(), String::from("[]")] {
        assert_eq!(control(&mount, &holder, &order), Err(Errno::EINVAL), "{order}");
    }
    assert!(["a", "b"].iter().all(|key| mount.status(key)["state"] == "held"));
    mount.verify();
}

#[test]
fn the_command_evicts_and_says_so() {
    let mount = Mount::new();
    let agent = Agent::new();
    fs::create_dir(mount.claim("ns")).expect("mkdir");
    let fd = agent.create(&mount.claim("ns/k")).expect("free key");
    assert_ok(&mount.leasefs(&["evict", "ns/k", "--epoch", "1", "--reason", "stuck since noon"]));
    let status = mount.status("ns/k");
    assert_eq!((status["state"].as_str(), status["outcome"].as_str()), (Some("free"), Some("evicted")));
    assert_eq!(agent.write(fd, "x"), Err(Errno::ESTALE));
    assert!(stdout(&mount.leasefs(&["history", "ns/k"])).contains("stuck since noon"));
}

#[test]
fn only_the_epoch_that_holds_is_evicted() {
    let mount = Mount::new();
    let path = mount.claim("k");
    let (agent, operator) = (Agent::new(), Agent::new());
    assert_eq!(control(&mount, &operator, &evict("never", 1)), Err(Errno::ENOENT));
    let fd = agent.create(&path).expect("free key");
    agent.close(fd);
    assert_eq!(control(&mount, &operator, &evict("k", 1)), Err(Errno::ESTALE), "free");
    let fd = agent.create(&path).expect("free key");
    for epoch in [0, 1, 3, u64::MAX] {
        assert_eq!(control(&mount, &operator, &evict("k", epoch)), Err(Errno::ESTALE), "{epoch}");
    }
    let output = mount.leasefs(&["evict", "k", "--epoch", "1"]);
    assert!(!output.status.success());
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(said.trim_end().lines().count(), 1, "{said}");
    assert_eq!(agent.epoch(fd), Ok(2), "nothing happened to the holder");
    assert_eq!(mount.state_of("k"), "held");
    assert!(control(&mount, &operator, &evict("k", 2)).is_ok());
    assert_eq!(control(&mount, &operator, &evict("k", 2)), Err(Errno::ESTALE), "only once");
}

#[test]
fn root_and_the_namespaces_owner_may_evict_and_nobody_else() {
    let mount = Mount::shared();
    let namespace = mount.claim("ns");
    fs::create_dir(&namespace).expect("mkdir");
    set_mode(&namespace, 0o777);
    chown(&namespace, Some(12_003), None).expect("chown");
    let holder = Agent::user(12_001, 12_001, &[]);
    let stranger = Agent::user(12_002, 12_002, &[]);
    let owner = Agent::user(12_003, 12_003, &[]);
    let fd = holder.create(&namespace.join("k")).expect("free key");
    assert_eq!(control(&mount, &stranger, &evict("ns/k", 1)), Err(Errno::EACCES));
    assert_eq!(control(&mount, &holder, &evict("ns/k", 1)), Err(Errno::EACCES), "it can close its handle");
    assert_eq!(holder.epoch(fd), Ok(1));
    assert!(control(&mount, &owner, &evict("ns/k", 1)).is_ok());
    assert_eq!(holder.read(fd), Err(Errno::ESTALE));
    // Outside its namespace the owner is a stranger; root is not.
    holder.create(&mount.claim("k")).expect("free key");
    assert_eq!(control(&mount, &owner, &evict("k", 1)), Err(Errno::EACCES));
    assert!(control(&mount, &Agent::new(), &evict("k", 1)).is_ok());
}

#[test]
fn what_is_no_command_is_einval_and_control_cannot_be_read() {
    let mount = Mount::new();
    let path = mount.root().join(".leasefs/control");
    assert_eq!(fs::metadata(&path).expect("control").permissions().mode() & 0o777, 0o222);
    let agent = Agent::new();
    let fd = agent.create(&mount.claim("k")).expect("free key");
    for command in [
        "evict k 1",
        "{}",
        "[]",
        "{\"op\":\"evict\"",
        "{\"op\":\"evict\",\"key\":\"k\"}",
        "{\"op\":\"evict\",\"epoch\":1}",
        "{\"op\":\"evict\",\"key\":\"k\",\"epoch\":-1}",
        "{\"op\":\"evict\",\"key\":\"k\",\"epoch\":\"1\"}",
        "{\"op\":\"free\",\"key\":\"k\",\"epoch\":1}",
        "{\"op\":\"release\",\"key\":\"k\"}",
        "{\"op\":\"release\",\"key\":\"k\",\"epoch\":1,\"force\":true}",
        "{\"op\":\"renew\",\"key\":\"k\"}",
        "{\"op\":\"renew\",\"key\":\"k\",\"epoch\":1,\"reason\":\"none is kept\"}",
        "{\"op\":\"evict\",\"key\":\"../k\",\"epoch\":1}",
    ] {
        assert_eq!(control(&mount, &agent, command), Err(Errno::EINVAL), "{command}");
    }
    assert_eq!(agent.epoch(fd), Ok(1));
    let reader = Agent::user(12_001, 12_001, &[]);
    assert_eq!(
        reader.open(&path, libc::O_RDONLY),
        Err(Errno::EACCES),
        "the tree is not shared, nor is the file readable"
    );
}

#[test]
fn a_draft_that_reports_is_evicted_like_a_holder() {
    let mount = Mount::new();
    let agent = Agent::new();
    let fd = agent.create(&mount.claim("k")).expect("free key");
    let draft = agent.handle(&mount.result("k", 1));
    agent.close(fd);
    assert_eq!(mount.state_of("k"), "reporting");
    assert!(control(&mount, &Agent::new(), &evict("k", 1)).is_ok());
    assert_eq!(mount.state_of("k"), "free");
    assert_eq!(agent.write(draft, "late"), Err(Errno::ESTALE));
    assert_eq!(agent.fsync(draft), Err(Errno::ESTALE));
    agent.close(draft);
    assert!(!mount.result("k", 1).exists());
}
