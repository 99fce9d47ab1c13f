//! The commands besides mount and unmount, as a person or a script meets them: output, effect, exit code.

#[path = "../common/mod.rs"]
mod common;

mod evict;
mod find;
mod run;
mod run_lost;
mod verify;
mod views;
mod wait;

use std::fs::{File, OpenOptions};
use std::io::ErrorKind;
use std::process::Stdio;

use common::{Background, LEASEFS, Mount, STRANGER, as_stranger, assert_refused, stderr};

/// Holds a key by exclusive create, as long as the file lives.
///
/// A child that another test is just starting has a copy of every handle until it executes its program, so a key that
/// was given back a moment ago may still be held.
fn hold(mount: &Mount, key: &str) -> File {
    let path = mount.claim(key);
    let mut held = None;
    common::wait_for(&format!("{key} is free to be held"), || {
        match OpenOptions::new().read(true).write(true).create_new(true).open(&path) {
            Ok(file) => held = Some(file),
            Err(error) => assert_eq!(error.kind(), ErrorKind::AlreadyExists, "hold {}: {error}", path.display()),
        }
        held.is_some()
    });
    held.expect("held")
}

/// Commits a result of an attempt.
fn commit(mount: &Mount, key: &str, epoch: u64, bytes: &str) {
    let path = mount.result(key, epoch);
    std::fs::write(&path, bytes).unwrap_or_else(|e| panic!("commit {}: {e}", path.display()));
    // As above: a child that is just being started may have the last copy.
    mount.wait_status(key, "committed", |status| status["result"]["epoch"] == epoch);
}

fn wait_free(mount: &Mount, key: &str) {
    mount.wait_status(key, "free", |status| status["state"] == "free");
}

/// Gives the key `job` a past: released (1), evicted (2), completed (3) and released (4).
fn live_through_every_outcome(mount: &Mount) {
    drop(hold(mount, "job"));
    wait_free(mount, "job");
    let held = hold(mount, "job");
    common::assert_ok(&mount.leasefs(&["evict", "job", "--epoch", "2", "--reason", "test"]));
    drop(held);
    let held = hold(mount, "job");
    commit(mount, "job", 3, "four");
    drop(held);
    mount.wait_status("job", "finished", |status| status["state"] == "finished");
    common::assert_ok(&mount.leasefs(&["run", "job", "--", "true"]));
    wait_free(mount, "job");
}

/// Starts `leasefs` with the mount named in the environment.
fn start(mount: &Mount, args: &[&str]) -> Background {
    let mut command = mount.command(LEASEFS);
    command.args(args).stdout(Stdio::piped()).stderr(Stdio::piped());
    Background(command.spawn().expect("leasefs starts"))
}

/// What a background command has printed on stdout, after its end.
fn rest_of_stdout(process: &mut Background) -> String {
    common::read_in_time(process.0.stdout.take())
}
