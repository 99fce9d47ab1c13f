//! An ordinary open never claims, never waits, never changes anything, and gives a handle that can be locked later.

use std::fs;

use libc::{LOCK_EX, LOCK_NB, O_APPEND, O_CREAT, O_RDONLY, O_RDWR, O_TRUNC, O_WRONLY};
use nix::errno::Errno;

use crate::common::agent::{Agent, epoch_of};
use crate::common::{Mount, assert_ok, stdout};

#[test]
fn an_ordinary_open_of_a_held_key_succeeds_at_once_and_truncates_nothing() {
    let mount = Mount::new();
    let path = mount.claim("k");
    let (holder, other) = (Agent::new(), Agent::new());
    let fd = holder.create(&path).expect("free key");
    holder.write(fd, "the note stays").expect("holder");
    let (record, status) = (holder.read(fd).expect("holder"), mount.status("k"));
    for access in [O_RDONLY, O_WRONLY, O_RDWR] {
        for flags in [0, O_CREAT, O_TRUNC, O_CREAT | O_TRUNC, O_APPEND, O_CREAT | O_APPEND] {
            let handle = other.open(&path, access | flags).unwrap_or_else(|e| panic!("flags {flags:o}: {e}"));
            if access != O_WRONLY {
                assert_eq!(other.read(handle), Ok(record.clone()), "any handle reads the present record");
            }
            other.close(handle);
        }
    }
    assert_ok(&mount.bash(": >$M/claims/k && : >>$M/claims/k && cat $M/claims/k >/dev/null && test -s $M/claims/k"));
    assert_eq!(holder.read(fd), Ok(record), "nothing changed");
    assert_eq!(mount.status("k"), status);
}

#[test]
fn an_open_without_o_creat_says_that_the_key_is_free() {
    let mount = Mount::new();
    let path = mount.claim("k");
    let agent = Agent::new();
    for flags in [O_RDONLY, O_WRONLY, O_RDWR, O_RDWR | O_TRUNC] {
        assert_eq!(agent.open(&path, flags), Err(Errno::ENOENT));
    }
    let fd = agent.create(&path).expect("free key");
    agent.close(fd);
    assert_eq!(agent.open(&path, O_RDONLY), Err(Errno::ENOENT), "free again");
    assert_eq!(fs::metadata(&path).map(drop).map_err(|e| e.raw_os_error()), Err(Some(libc::ENOENT)));
    assert_eq!(fs::read_dir(mount.root().join("claims")).expect("claims").count(), 0);
}

#[test]
fn an_open_with_o_creat_claims_nothing_and_leaves_nothing() {
    let mount = Mount::new();
    let path = mount.claim("k");
    let (agent, other) = (Agent::new(), Agent::new());
    let handle = agent.handle(&path);
    assert!(!path.exists(), "a free key has no file, whoever has a handle to lock");
    assert_eq!(mount.state_of("k"), "free");
    let fd = other.create(&path).expect("an open handle does not hold the key");
    assert_eq!(other.epoch(fd), Ok(1));
    // The handle from before reads what is now, and may not write it.
    assert_eq!(agent.epoch(handle), Ok(1));
    assert_eq!(agent.write(handle, "mine"), Err(Errno::EACCES));
    other.close(fd);
    assert_eq!(agent.flock(handle, LOCK_EX | LOCK_NB), Ok(()), "opened first, locked later");
    assert_eq!(agent.epoch(handle), Ok(2));
}

#[test]
fn a_shell_that_only_redirects_claims_nothing() {
    let mount = Mount::new();
    assert_ok(&mount.bash("for i in 1 2 3; do : >$M/claims/k; done; exec 9>$M/claims/k; exec 8>>$M/claims/k"));
    assert_eq!(mount.state_of("k"), "free");
    let output = mount.bash("exec 9<>$M/claims/k; flock 9; read -r e <&9; echo $e");
    assert_eq!(stdout(&output), "1\n");
}

#[test]
fn the_record_that_others_read_is_the_present_one() {
    let mount = Mount::new();
    let path = mount.claim("k");
    let (reader, first, second) = (Agent::new(), Agent::new(), Agent::new());
    let fd = first.create(&path).expect("free key");
    let handle = reader.open(&path, O_RDONLY).expect("held key");
    assert_eq!(reader.epoch(handle), Ok(1));
    first.close(fd);
    second.create(&path).expect("free again");
    assert_eq!(reader.epoch(handle), Ok(2), "the same descriptor, the present record");
    assert_eq!(epoch_of(&fs::read_to_string(&path).expect("held key")), 2);
}

#[test]
fn truncating_a_held_key_changes_nothing() {
    let mount = Mount::new();
    let path = mount.claim("k");
    let (holder, other) = (Agent::new(), Agent::new());
    let fd = holder.create(&path).expect("free key");
    holder.write(fd, "kept").expect("holder");
    let record = holder.read(fd).expect("holder");
    let handle = other.open(&path, O_RDWR).expect("held key");
    // Whatever these answer, the record stays.
    let _ = other.call("truncate", serde_json::json!([path, 0]));
    let _ = other.call("ftruncate", serde_json::json!([handle, 0]));
    let _ = other.call("truncate", serde_json::json!([path, 100_000]));
    assert_eq!(holder.read(fd), Ok(record));
    assert_eq!(mount.status("k")["note"], "kept");
}
