//! What a keeper, and any command, has from whoever starts it.

use std::fs;
use std::process::Command;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::common::agent::has_ended;
use crate::common::luck::in_luck;
use crate::common::{InTime, LEASEFS, Mount, assert_ok, in_time, stdout, wait_for};

/// Starts a program that ignores these signals, as its starter does.
fn ignoring(signals: &str) -> Command {
    let mut command = Command::new("env");
    command.arg(format!("--ignore-signal={signals}")).arg(LEASEFS);
    command
}

/// A field of `.leasefs/config` that is a number. A tree that is not served any more does not answer.
fn number(mount: &Mount, field: &str) -> i32 {
    let config = mount.root().join(".leasefs/config");
    let text = in_time("an answer", || fs::read_to_string(config).expect("config"));
    let config: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    config[field].as_i64().expect("a number") as i32
}

#[test]
fn a_starter_that_ignores_signals_has_a_keeper_that_does_not() {
    let mut mount = Mount::unserved();
    mount.start_by(ignoring("CHLD,HUP,INT,TERM"), &[]);
    let (keeper, server) = (number(&mount, "keeper_pid"), number(&mount, "pid"));
    let log = fs::read_to_string(mount.state().join("leasefs.log")).expect("log");
    assert!(!log.contains("does not answer"), "{log}");
    kill(Pid::from_raw(server), Signal::SIGKILL).expect("the server");
    wait_for("its end", || has_ended(server));
    assert_eq!(number(&mount, "starts"), 2);
    kill(Pid::from_raw(keeper), Signal::SIGHUP).expect("the keeper");
    wait_for("an upgrade", || number(&mount, "starts") == 3);
    kill(Pid::from_raw(keeper), Signal::SIGTERM).expect("the keeper");
    wait_for("an orderly end", || has_ended(keeper));
    let mounts = fs::read_to_string("/proc/self/mounts").expect("mounts");
    assert!(!mounts.lines().any(|line| line.split(' ').nth(1) == mount.root().to_str()), "{mounts}");
}

#[test]
fn commands_of_a_starter_that_ignores_its_childrens_end_work_as_any() {
    let mut mount = Mount::unserved();
    mount.start_by(ignoring("CHLD"), &[]);
    let root = mount.root();
    for words in [
        "run -n k -- sh -c true",
        "claim other --agent a",
        "release other --epoch 1",
        "claim other --agent a --handoff -- true",
        "ls",
        "who --all other",
        "verify",
        "upgrade",
    ] {
        let output = ignoring("CHLD").args(words.split(' ')).env("LEASEFS_ROOT", &root).output_in_time();
        // Nobody is there to be told of any more, unless the holder process of the claim is slow to end.
        let is_told = words.starts_with("who") && output.status.code() == Some(1);
        assert!(output.status.success() || is_told, "{words}: {output:?}");
    }
    in_luck("a tree took too long to answer for the doctor", |_| {
        let output = ignoring("CHLD").arg("doctor").arg(&root).output_in_time();
        if stdout(&output).contains("does not answer within") {
            return None;
        }
        assert_ok(&output);
        Some(())
    });
    // A dead mount is looked at by a process of its own.
    mount.lose_connection();
    mount.start_by(ignoring("CHLD"), &[]);
    assert_eq!(mount.status("other")["epoch"], 2);
    assert_ok(&ignoring("CHLD").arg("unmount").arg(&root).output_in_time());
    mount.start(&[]);
}
