//! State directories that cannot be served: each mount says so in one line and leaves everything as it was.

use std::fs;
use std::os::unix::fs::symlink;
use std::process::Command;

use crate::common::agent::Agent;
use crate::common::{InTime, Mount, assert_ok};
use crate::place::{Place, assert_not_mounted, assert_refused};

#[test]
fn a_missing_parent() {
    let place = Place::new();
    let state = place.path("no/such/place");
    let output = place.mount_at(&place.mnt(), &state, &[]);
    assert_refused(&output, &place.path("no"), &[&["no such", "does not exist", "missing", "create", "mkdir"]]);
    assert_not_mounted(&place.mnt());
    assert!(!place.path("no").exists(), "a typing error makes no directories");
}

#[test]
fn a_file_in_its_place() {
    let place = Place::new();
    fs::write(place.state(), "a file").expect("file");
    let output = place.mount();
    assert_refused(&output, &place.state(), &[&["not a directory", "directory"]]);
    assert_not_mounted(&place.mnt());
    assert_eq!(fs::read_to_string(place.state()).expect("file"), "a file");
}

#[test]
fn a_read_only_one_used_or_new() {
    let place = Place::new();
    let disk = place.tmpfs("disk", "16m");
    for used in [false, true] {
        let state = disk.join(if used { "used" } else { "new" });
        if used {
            assert_ok(&Command::new("mount").args(["-o", "remount,rw"]).arg(&disk).output_in_time());
            assert_ok(&place.mount_at(&place.mnt(), &state, &[]));
            place.assert_unmounts();
        }
        assert_ok(&Command::new("mount").args(["-o", "remount,ro"]).arg(&disk).output_in_time());
        let output = place.mount_at(&place.mnt(), &state, &[]);
        assert_refused(&output, &state, &[&["read-only", "readonly", "read only", "writable"]]);
        assert_not_mounted(&place.mnt());
    }
}

/// Changes the registry of a used state directory, and gives its bytes.
fn doctored(place: &Place, sql: &str) -> Vec<u8> {
    place.used_state();
    let registry = rusqlite::Connection::open(place.state().join("registry.db")).expect("registry");
    registry.execute_batch(sql).expect("SQL");
    registry.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(())).expect("checkpoint");
    drop(registry);
    fs::read(place.state().join("registry.db")).expect("registry")
}

#[test]
fn one_of_a_newer_version() {
    let place = Place::new();
    let before = doctored(&place, "PRAGMA user_version = 9999");
    let output = place.mount();
    assert_refused(&output, &place.state(), &[&["newer"], &["9999", "upgrade", "update", "version"]]);
    assert_not_mounted(&place.mnt());
    assert_eq!(fs::read(place.state().join("registry.db")).expect("registry"), before, "left as it was");
}

#[test]
fn a_database_of_another_program() {
    let place = Place::new();
    let before = doctored(&place, "PRAGMA application_id = 7");
    let output = place.mount();
    assert_refused(
        &output,
        &place.state(),
        &[&["not a leasefs", "another", "other", "not leasefs", "leasefs registry"]],
    );
    assert_not_mounted(&place.mnt());
    assert_eq!(fs::read(place.state().join("registry.db")).expect("registry"), before, "left as it was");
}

#[test]
fn a_corrupt_one() {
    // All of it, all but the header page, or its second half missing.
    for damage in ["all", "pages", "half"] {
        let place = Place::new();
        let mut bytes = doctored(&place, "");
        match damage {
            "all" => bytes.fill(0x5a),
            "pages" => bytes[4096..].fill(0x5a),
            _ => bytes.truncate(bytes.len() / 2),
        }
        fs::write(place.state().join("registry.db"), &bytes).expect("registry");
        let output = place.mount();
        assert_refused(&output, &place.state(), &[&["corrupt", "damaged", "malformed", "not a database"]]);
        assert_not_mounted(&place.mnt());
        assert_eq!(
            fs::read(place.state().join("registry.db")).expect("registry"),
            bytes,
            "{damage}: left for a repair"
        );
    }
}

#[test]
fn one_inside_the_mount() {
    let place = Place::new();
    let inside = place.mnt().join("state");
    let output = place.mount_at(&place.mnt(), &inside, &[]);
    assert_refused(&output, &inside, &[&["inside", "within", "below"]]);
    assert_not_mounted(&place.mnt());
    assert_eq!(fs::read_dir(place.mnt()).expect("mountpoint").count(), 0, "nothing was put there");
    let output = place.mount_at(&place.mnt(), &place.mnt(), &[]);
    assert_refused(&output, &place.mnt(), &[&["inside", "itself", "mountpoint"]]);
    assert_not_mounted(&place.mnt());
    // The same by another name.
    symlink(place.mnt(), place.path("link")).expect("symlink");
    let output = place.mount_at(&place.mnt(), &place.path("link/state"), &[]);
    assert_refused(&output, &place.path(""), &[&["inside", "within", "below"]]);
    assert_not_mounted(&place.mnt());
    assert_eq!(fs::read_dir(place.mnt()).expect("mountpoint").count(), 0, "nothing was put there");
}

#[test]
fn one_inside_another_tree() {
    let mount = Mount::new();
    let place = Place::new();
    for inside in [mount.claim("state"), mount.root().join("results/state"), mount.root().join("state")] {
        let output = place.mount_at(&place.mnt(), &inside, &[]);
        assert_refused(&output, &inside, &[&["leasefs", "inside"]]);
        assert_not_mounted(&place.mnt());
    }
    assert_eq!(fs::read_dir(mount.root().join("claims")).expect("claims").count(), 0, "no key came of it");
}

#[test]
fn one_that_is_served_already() {
    let mount = Mount::new();
    let agent = Agent::new();
    let fd = agent.create(&mount.claim("k")).expect("free key");
    let place = Place::new();
    let output = place.mount_at(&place.mnt(), &mount.state(), &[]);
    assert_refused(&output, &mount.state(), &[&["already", "in use", "another", "served"]]);
    assert_not_mounted(&place.mnt());
    // By another name as well.
    symlink(mount.state(), place.path("link")).expect("symlink");
    let output = place.mount_at(&place.mnt(), &place.path("link"), &[]);
    assert_refused(&output, &mount.state(), &[&["already", "in use", "another", "served"]]);
    assert_not_mounted(&place.mnt());
    assert_eq!(agent.epoch(fd), Ok(1), "the first server goes on");
    let other = Agent::new();
    assert!(other.create(&mount.claim("other")).is_ok());
    mount.verify();
}

#[test]
fn one_that_was_in_use_can_be_served_when_the_server_is_gone() {
    let place = Place::new();
    place.used_state();
    assert_ok(&place.mount());
    let status = fs::read_to_string(place.mnt().join("status/ns/k")).expect("a key that was");
    assert!(status.contains("\"epoch\":1"), "{status}");
    place.assert_unmounts();
    assert_not_mounted(&place.mnt());
}
