//! A path is a key or a namespace, never both.

use std::fs;

use libc::{LOCK_SH, O_CREAT, O_EXCL, O_RDONLY, O_RDWR, O_WRONLY};
use nix::errno::Errno;
use serde_json::json;

use crate::common::Mount;
use crate::common::agent::Agent;

#[test]
fn a_held_key_is_no_directory() {
    let mount = Mount::new();
    let path = mount.claim("k");
    let agent = Agent::new();
    let fd = agent.create(&path).expect("free key");
    assert_eq!(agent.call("mkdir", json!([path])), Err(Errno::EEXIST));
    assert_eq!(agent.call("mkdir", json!([path.join("below")])), Err(Errno::ENOTDIR));
    assert_eq!(agent.create(&path.join("below")), Err(Errno::ENOTDIR));
    assert_eq!(agent.call("rmdir", json!([path])), Err(Errno::ENOTDIR));
    assert_eq!(agent.epoch(fd), Ok(1));
    assert_eq!(mount.state_of("k"), "held");
}

#[test]
fn a_key_that_was_cannot_become_a_namespace() {
    let mount = Mount::new();
    let path = mount.claim("k");
    let agent = Agent::new();
    let fd = agent.create(&path).expect("free key");
    agent.close(fd);
    assert_eq!(agent.call("mkdir", json!([path])), Err(Errno::EEXIST), "its status and its epochs are there");
    assert!(!path.exists());
    assert_eq!(mount.status("k")["epoch"], 1);
    let fd = agent.create(&path).expect("still a key");
    assert_eq!(agent.epoch(fd), Ok(2));
}

#[test]
fn a_shared_key_cannot_become_a_namespace() {
    let mount = Mount::new();
    let path = mount.claim("k");
    let agent = Agent::new();
    let fd = agent.handle(&path);
    agent.flock(fd, LOCK_SH).expect("free key");
    assert_eq!(agent.call("mkdir", json!([path])), Err(Errno::EEXIST));
    assert_eq!(mount.state_of("k"), "shared");
}

#[test]
fn a_namespace_is_no_key() {
    let mount = Mount::new();
    let path = mount.claim("ns");
    fs::create_dir(&path).expect("mkdir");
    let agent = Agent::new();
    assert_eq!(agent.open(&path, O_RDWR | O_CREAT | O_EXCL), Err(Errno::EEXIST));
    assert_eq!(agent.open(&path, O_RDWR | O_CREAT), Err(Errno::EISDIR));
    assert_eq!(agent.open(&path, O_WRONLY), Err(Errno::EISDIR));
    assert_eq!(agent.unlink(&path), Err(Errno::EISDIR));
    assert_eq!(agent.call("mkdir", json!([path])), Err(Errno::EEXIST));
    let result = agent.open(&mount.root().join("results/ns/1"), O_WRONLY | O_CREAT);
    assert_eq!(result, Err(Errno::EPERM), "a namespace has no results");
    assert!(mount.root().join("status/ns").is_dir());
    // Reading a directory as a file fails, and a lock on it is the kernel's own and no lease.
    let fd = agent.open(&path, O_RDONLY).expect("a directory");
    assert_eq!(agent.read(fd), Err(Errno::EISDIR));
    let _ = agent.flock(fd, libc::LOCK_EX | libc::LOCK_NB);
    assert_eq!(fs::read_dir(mount.root().join("status")).expect("status").count(), 1, "only the namespace");
}

#[test]
fn racing_mkdirs_and_claims_of_one_name_have_one_winner() {
    let mount = Mount::new();
    let (maker, claimer) = (Agent::new(), Agent::new());
    let names = json!({ "claims": mount.root().join("claims"), "n": 200 });
    let race = |agent: &Agent, act: &str| {
        let source = format!(
            "result = []\nfor i in range(n):\n  try: {act}; result.append(True)\n  except OSError: result.append(False)"
        );
        agent.begin("script", json!([source, names]));
    };
    race(&maker, "os.mkdir(f'{claims}/x{i}')");
    race(&claimer, "os.open(f'{claims}/x{i}', os.O_RDWR | os.O_CREAT | os.O_EXCL)");
    let made = maker.answer().expect("mkdirs");
    let claimed = claimer.answer().expect("claims");
    for number in 0..200 {
        let (made, claimed) = (made[number] == true, claimed[number] == true);
        assert!(made != claimed, "x{number}: made {made}, claimed {claimed}");
        assert_eq!(mount.claim(&format!("x{number}")).is_dir(), made, "x{number}");
    }
}
