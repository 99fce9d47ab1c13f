//! What an operator does between the alarms: pruning what has ended, and metrics that say when to look.

#[path = "../common/mod.rs"]
mod common;

mod crash;
mod metrics;
mod prune;
mod unserved;

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use common::agent::Agent;
use common::{InTime, LEASEFS, Mount};

/// Attempts of a key, each completed with a result of so many bytes; epochs from the first to the last.
fn complete(mount: &Mount, key: &str, results: &[usize]) {
    let agent = Agent::new();
    for bytes in results {
        let fd = agent.handle(&mount.claim(key));
        agent.flock(fd, libc::LOCK_EX).expect("free or finished");
        let epoch = agent.epoch(fd).expect("held");
        let draft = agent.handle(&mount.result(key, epoch));
        if *bytes > 0 {
            agent.write(draft, &"x".repeat(*bytes)).expect("registered");
        }
        agent.fsync(draft).expect("commits");
        agent.close(draft);
        agent.close(fd);
    }
    mount.wait_status(key, "finished", |status| status["state"] == "finished");
}

/// Attempts of a key that were claimed and released.
fn release(mount: &Mount, key: &str, times: usize) {
    let agent = Agent::new();
    for _ in 0..times {
        let fd = agent.handle(&mount.claim(key));
        agent.flock(fd, libc::LOCK_EX).expect("free or finished");
        agent.close(fd);
    }
    mount.wait_status(key, "free", |status| status["state"] == "free");
}

/// The epochs in `leasefs history`.
fn history(mount: &Mount, key: &str) -> Vec<u64> {
    let output = mount.leasefs(&["history", "--json", key]);
    let text = common::stdout(&output);
    let epoch =
        |line| serde_json::from_str::<serde_json::Value>(line).expect("JSON")["epoch"].as_u64().expect("a number");
    text.lines().map(epoch).collect()
}

/// Files in `results/` of the state directory.
fn result_files(state: &Path) -> usize {
    fs::read_dir(state.join("results")).expect("results").count()
}

fn verify(state: &Path) -> Output {
    Command::new(LEASEFS).arg("verify").arg("--state").arg(state).output_in_time()
}
