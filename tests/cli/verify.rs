//! `leasefs verify`: sound registries pass, also while they are served; each broken rule is found and named.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use super::common::{LEASEFS, Mount, assert_ok, stdout, wait_for};
use super::{assert_refused, hold, live_through_every_outcome, stderr, wait_free};
use crate::common::InTime;

/// A mount on which `job` was released (1), evicted (2), completed (3) and released (4), and `other` released (1).
fn used() -> Mount {
    let mount = Mount::new();
    live_through_every_outcome(&mount);
    drop(hold(&mount, "other"));
    wait_free(&mount, "other");
    mount
}

fn verify(state: &Path, options: &[&str]) -> Output {
    Command::new(LEASEFS).arg("verify").arg("--state").arg(state).args(options).output_in_time()
}

/// A copy of the state directory, to be broken.
fn copy_of(mount: &Mount, name: &str) -> PathBuf {
    let copy = mount.scratch().join(name);
    assert_ok(&Command::new("cp").arg("-a").arg(mount.state()).arg(&copy).output_in_time());
    copy
}

/// The file of the only result.
fn result_file(state: &Path) -> PathBuf {
    let files: Vec<_> =
        fs::read_dir(state.join("results")).expect("results").map(|entry| entry.expect("entry").path()).collect();
    let [file] = files.as_slice() else { panic!("one result is there: {files:?}") };
    file.clone()
}

#[test]
fn a_sound_registry_passes_while_mounted_and_after() {
    let mut mount = used();
    let held = hold(&mount, "held");
    for options in [&["verify"][..], &["verify", "--strict"]] {
        let output = mount.leasefs(options);
        assert_ok(&output);
        assert_eq!(stdout(&output), "ok: 3 keys, 6 attempts, 1 results\n");
    }
    let json: serde_json::Value = serde_json::from_str(&stdout(&mount.leasefs(&["verify", "--json"]))).expect("JSON");
    assert_eq!((json["ok"].as_bool(), json["attempts"].as_u64()), (Some(true), Some(6)));
    drop(held);
    mount.wait_status("held", "free", |status| status["state"] == "free");
    mount.unmount();
    let output = verify(&mount.state(), &["--strict"]);
    assert_ok(&output);
    assert_eq!(stdout(&output), "ok: 3 keys, 6 attempts, 1 results\n");
}

#[test]
fn verifying_changes_nothing() {
    let mut mount = used();
    mount.unmount();
    let bytes = || fs::read(mount.state().join("registry.db")).expect("registry");
    let before = bytes();
    assert_ok(&verify(&mount.state(), &[]));
    assert!(before == bytes(), "registry.db was written to");
}

#[test]
fn verify_keeps_up_with_a_busy_tree() {
    let mount = Mount::new();
    let mut busy = mount.spawn_bash(
        r#"for i in $(seq 300); do ( set -C; exec 9>"$M/claims/k$((i % 7))" && : > "$M/results/k$((i % 7))/1" ); rm -f "$M/claims/k$((i % 7))"; done 2>/dev/null"#,
    );
    wait_for("the end of the load", || {
        assert_ok(&mount.leasefs(&["verify"]));
        busy.0.try_wait().expect("wait").is_some()
    });
    // It was one: each of its claims was granted.
    let claims = (0..7).map(|key| mount.status(&format!("k{key}"))["epoch"].as_u64().expect("an epoch"));
    assert_eq!(claims.sum::<u64>(), 300);
    assert_ok(&mount.leasefs(&["verify"]));
}

#[test]
fn every_broken_rule_is_named() {
    let mut mount = used();
    mount.unmount();
    let job = "key_id = (SELECT id FROM keys WHERE path = 'job')";
    let breakages = [
        ("I-EPOCH-UNIQ: job epoch 2", format!("DELETE FROM attempts WHERE {job} AND epoch = 2")),
        ("I-EPOCH-UNIQ: job epoch 4", "UPDATE keys SET epoch = 3 WHERE path = 'job'".into()),
        ("I-EPOCH-UNIQ: job", "UPDATE keys SET pruned = 9 WHERE path = 'job'".into()),
        ("I-MUTEX: job epoch 3", format!("UPDATE attempts SET ended_ms = NULL WHERE {job} AND epoch = 3")),
        (
            "I-NO-GHOST-COMPLETE: job epoch 3",
            format!("UPDATE attempts SET outcome = 'expired' WHERE {job} AND epoch = 3"),
        ),
        (
            "I-NO-GHOST-COMPLETE: job epoch 3",
            format!("UPDATE attempts SET result_size = NULL, result_ms = NULL WHERE {job}"),
        ),
        ("I-REAP-SAFETY: job epoch 4", format!("UPDATE attempts SET outcome = NULL WHERE {job} AND epoch = 4")),
        ("I-REAP-SAFETY: job epoch 2", format!("UPDATE attempts SET reason = NULL WHERE {job}")),
        ("I-CAS-GUARDED: job epoch 2", format!("UPDATE attempts SET registered = 1 WHERE {job}")),
        ("I-TTL-BOUND: job epoch 1", format!("UPDATE attempts SET ttl_ms = 400 * 86400000 WHERE {job} AND epoch = 1")),
        ("I-RECLAIM-EPOCH: job epoch 4", format!("UPDATE attempts SET ended_ms = NULL WHERE {job} AND epoch = 4")),
        ("I-RECLAIM-EPOCH: job epoch 4", "UPDATE keys SET finished = 1 WHERE path = 'job'".into()),
        (
            "I-RENEWAL-STABLE: job epoch 3",
            format!("UPDATE attempts SET ended_ms = NULL, pid = 1, start_time = 1 WHERE {job} AND epoch >= 3"),
        ),
        ("I-ATOMIC-READ: job epoch 3", format!("UPDATE attempts SET result_size = 5 WHERE {job} AND epoch = 3")),
        ("I-CRASH-KEEP: #", "DELETE FROM keys WHERE path = 'other'".into()),
    ];
    for (number, (expected, sql)) in breakages.iter().enumerate() {
        let state = copy_of(&mount, &number.to_string());
        let registry = rusqlite::Connection::open(state.join("registry.db")).expect("registry");
        registry.execute_batch(sql).unwrap_or_else(|e| panic!("{sql}: {e}"));
        drop(registry);
        let output = verify(&state, &[]);
        assert_eq!(output.status.code(), Some(1), "{sql}: {}{}", stdout(&output), stderr(&output));
        let found = stdout(&output);
        assert!(found.lines().any(|line| line.starts_with(expected)), "{sql}: no `{expected}` in:\n{found}");
        assert!(!found.contains("ok:"), "{found}");
    }
}

#[test]
fn lost_and_torn_results_are_found() {
    let mut mount = used();
    mount.unmount();
    let state = copy_of(&mount, "torn");
    fs::OpenOptions::new().write(true).open(result_file(&state)).expect("result").set_len(3).expect("truncated");
    let output = verify(&state, &[]);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        stdout(&output).starts_with("I-ATOMIC-READ: job epoch 3: its result has 4 bytes, the file 3"),
        "{}",
        stdout(&output)
    );
    fs::remove_file(result_file(&state)).expect("removed");
    let output = verify(&state, &["--json"]);
    assert_eq!(output.status.code(), Some(1));
    let json: serde_json::Value = serde_json::from_str(&stdout(&output)).expect("JSON");
    assert_eq!(json["ok"], false);
    let violation = &json["violations"][0];
    assert_eq!((violation["invariant"].as_str(), violation["epoch"].as_u64()), (Some("I-CRASH-KEEP"), Some(3)));
}

#[test]
fn what_a_step_of_the_clock_explains_is_a_remark() {
    let mut mount = used();
    mount.unmount();
    let registry = rusqlite::Connection::open(mount.state().join("registry.db")).expect("registry");
    registry.execute_batch("UPDATE attempts SET ended_ms = ended_ms + 3600000 WHERE epoch = 1").expect("changed");
    drop(registry);
    let output = verify(&mount.state(), &[]);
    assert_ok(&output);
    assert!(
        stdout(&output).starts_with("remark: I-MUTEX: job epoch 1: ended after epoch 2 began"),
        "{}",
        stdout(&output)
    );
    let output = verify(&mount.state(), &["--strict"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stdout(&output).starts_with("I-MUTEX: job epoch 1"), "{}", stdout(&output));
}

#[test]
fn a_damaged_or_missing_registry_is_an_error() {
    let mut mount = used();
    mount.unmount();
    assert_refused(&verify(&mount.scratch(), &[]), 2, &["no registry is here", "--state"]);
    let state = copy_of(&mount, "damaged");
    let registry = rusqlite::Connection::open(state.join("registry.db")).expect("registry");
    registry.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(())).expect("all is in the main file");
    drop(registry);
    let file = fs::OpenOptions::new().write(true).open(state.join("registry.db")).expect("registry");
    let pages = file.metadata().expect("metadata").len() / 4096;
    for page in 1..pages {
        file.write_all_at(&[0xa5; 512], page * 4096).expect("damaged");
    }
    let output = verify(&state, &[]);
    assert!(matches!(output.status.code(), Some(1 | 2)), "{}", output.status);
    assert!(!stdout(&output).contains("ok:"), "{}", stdout(&output));
}
