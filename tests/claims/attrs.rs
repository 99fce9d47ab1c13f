//! What `stat` says of a key: its holder, its namespace's group and mode, its record's length and times.

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};

use libc::LOCK_EX;
use nix::errno::Errno;
use serde_json::{Value, json};

use crate::common::agent::Agent;
use crate::common::{Mount, set_mode, wait_for};

fn millis(status: &Value, field: &str) -> i64 {
    let time: jiff::Timestamp = status[field].as_str().expect("a time").parse().expect("RFC 3339");
    time.as_millisecond()
}

#[test]
fn a_held_key_is_a_regular_file_with_the_holders_uid_and_the_namespaces_group_and_mode() {
    let mount = Mount::shared();
    for (mode, shown) in [(0o777, 0o666), (0o770, 0o660), (0o2775, 0o664), (0o750, 0o640), (0o700, 0o600)] {
        let namespace = mount.claim(&format!("ns{mode:o}"));
        fs::create_dir(&namespace).expect("mkdir");
        std::os::unix::fs::chown(&namespace, Some(12_001), Some(13_001)).expect("chown");
        set_mode(&namespace, mode);
        let holder = Agent::user(12_001, 12_009, &[]);
        let path = namespace.join("k");
        let fd = holder.create(&path).expect("free key");
        let stat = fs::symlink_metadata(&path).expect("held key");
        assert!(stat.file_type().is_file() && !stat.file_type().is_fifo());
        assert_eq!(stat.permissions().mode() & 0o7777, shown, "namespace {mode:o}");
        assert_eq!((stat.uid(), stat.gid()), (12_001, 13_001), "holder's uid, namespace's gid");
        assert_eq!(stat.len() as usize, holder.read(fd).expect("holder").len(), "st_size is the record's length");
        assert_eq!(stat.nlink(), 1);
        let seen = holder.call("fstat", json!([fd])).expect("fstat");
        assert_eq!(seen["st_ino"], stat.ino(), "stat and fstat agree");
        assert_eq!(seen["st_size"], stat.len());
    }
}

#[test]
fn mtime_is_the_last_renewal_and_ctime_the_last_change_of_state() {
    let mount = Mount::new();
    let path = mount.claim("k");
    let agent = Agent::new();
    let fd = agent.create(&path).expect("free key");
    let first = fs::metadata(&path).expect("held key");
    let status = mount.status("k");
    let mtime = |stat: &fs::Metadata| stat.mtime() * 1000 + stat.mtime_nsec() / 1_000_000;
    let ctime = |stat: &fs::Metadata| stat.ctime() * 1000 + stat.ctime_nsec() / 1_000_000;
    assert_eq!(mtime(&first), millis(&status, "renewed"));
    assert_eq!(ctime(&first), millis(&status, "since"));
    assert!(crate::relock::renewed_later(&mount, "k", || agent.flock(fd, LOCK_EX).expect("renews")));
    let second = fs::metadata(&path).expect("held key");
    assert_eq!(mtime(&second), millis(&mount.status("k"), "renewed"));
    assert!(mtime(&second) > mtime(&first), "renewed");
    assert_eq!(ctime(&second), ctime(&first), "a renewal is no change of state");
    agent.close(fd);
    wait_for("a millisecond", || jiff::Timestamp::now().as_millisecond() > ctime(&second));
    agent.create(&path).expect("free again");
    assert!(ctime(&fs::metadata(&path).expect("held key")) > ctime(&second), "held by a new attempt");
}

#[test]
fn the_size_follows_the_note() {
    let mount = Mount::new();
    let path = mount.claim("k");
    let agent = Agent::new();
    let fd = agent.create(&path).expect("free key");
    for note in ["", "short", &"long ".repeat(800), "short again"] {
        agent.write(fd, note).expect("holder");
        let record = agent.read(fd).expect("holder");
        assert_eq!(fs::metadata(&path).expect("held key").len() as usize, record.len());
        assert_eq!(fs::read_to_string(&path).expect("held key"), record, "cat reads it to its end");
    }
}

#[test]
fn mode_and_owner_of_a_key_cannot_be_changed() {
    let mount = Mount::new();
    let path = mount.claim("k");
    let agent = Agent::new();
    let fd = agent.create(&path).expect("free key");
    let before = fs::metadata(&path).expect("held key");
    assert_eq!(agent.call("chmod", json!([path, 0o600])), Err(Errno::EPERM));
    assert_eq!(agent.call("fchmod", json!([fd, 0o600])), Err(Errno::EPERM));
    assert_eq!(agent.call("chown", json!([path, 12_001, 12_001])), Err(Errno::EPERM));
    assert_eq!(agent.call("fchown", json!([fd, 12_001, 12_001])), Err(Errno::EPERM));
    let after = fs::metadata(&path).expect("held key");
    assert_eq!((after.mode(), after.uid(), after.gid()), (before.mode(), before.uid(), before.gid()));
}

#[test]
fn the_root_of_the_tree_is_open_to_all_only_when_it_is_shared() {
    let own = Mount::new();
    let shared = Mount::shared();
    let mode = fs::metadata(shared.root().join("claims")).expect("claims").permissions().mode() & 0o7777;
    assert_eq!(mode, 0o777, "no sticky bit");
    let fd = Agent::user(12_001, 12_001, &[]).create(&shared.claim("k"));
    assert!(fd.is_ok(), "any user may claim in a shared tree");
    assert_eq!(Agent::user(12_001, 12_001, &[]).create(&own.claim("k")), Err(Errno::EACCES));
}
