//! `leasefs evict`: it ends exactly the attempt that was named, for those who may.

use std::io::Read;

use super::common::{Mount, assert_ok, set_mode, stdout};
use super::{as_stranger, assert_refused, hold};

#[test]
fn the_named_attempt_loses_its_lease() {
    let mount = Mount::new();
    let mut held = hold(&mount, "job");
    assert_ok(&mount.leasefs(&["evict", "job", "--epoch", "1", "--reason", "hangs since \"noon\""]));
    assert_eq!(mount.state_of("job"), "free");
    let error = held.read_to_string(&mut String::new()).expect_err("the handle lost its lease");
    assert_eq!(error.raw_os_error(), Some(libc::ESTALE));
    let history = stdout(&mount.leasefs(&["history", "--json", "job"]));
    let attempt: serde_json::Value = serde_json::from_str(&history).expect("one attempt");
    assert_eq!(attempt["outcome"], "evicted");
    assert!(attempt["reason"].as_str().is_some_and(|why| why.contains("hangs since \"noon\"")), "{history}");
    mount.verify();
}

#[test]
fn another_epoch_is_not_touched() {
    let mount = Mount::new();
    drop(hold(&mount, "job"));
    mount.wait_status("job", "free", |status| status["state"] == "free");
    assert_refused(&mount.leasefs(&["evict", "job", "--epoch", "1"]), 1, &["epoch 1 does not hold it", "it is free"]);
    let _held = hold(&mount, "job");
    for epoch in ["0", "1", "3"] {
        let output = mount.leasefs(&["evict", "job", "--epoch", epoch]);
        assert_refused(&output, 1, &[&format!("epoch {epoch} does not hold it"), "epoch 2 is held by pid"]);
    }
    assert_eq!(mount.state_of("job"), "held");
}

#[test]
fn a_key_that_never_was_has_nobody_to_evict() {
    let mount = Mount::new();
    assert_refused(&mount.leasefs(&["evict", "job", "--epoch", "1"]), 1, &["job: was never held"]);
    let usage = mount.leasefs(&["evict", "job"]);
    assert_eq!(usage.status.code(), Some(2), "the epoch must be named");
}

#[test]
fn only_those_who_may_evict() {
    let mount = Mount::shared();
    let _held = hold(&mount, "job");
    assert_refused(&as_stranger(&mount, &["evict", "job", "--epoch", "1"]), 1, &["you may not evict"]);
    assert_eq!(mount.state_of("job"), "held");
    // The owner of the namespace may.
    std::fs::create_dir(mount.claim("theirs")).expect("namespace");
    std::os::unix::fs::chown(mount.claim("theirs"), Some(super::STRANGER), None).expect("chown");
    set_mode(&mount.claim("theirs"), 0o777);
    let _held = hold(&mount, "theirs/job");
    assert_ok(&as_stranger(&mount, &["evict", "theirs/job", "--epoch", "1"]));
    assert_eq!(mount.state_of("theirs/job"), "free");
}
