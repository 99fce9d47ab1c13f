//! A close or an exit that has returned happens before any later open or lock on this host.

use std::process::Command;

use libc::{LOCK_EX, LOCK_NB};
use serde_json::json;

use crate::common::agent::Agent;
use crate::common::{InTime, Mount, assert_ok};

/// What one process does with a key again and again; its answer is the epochs it read.
const CYCLES: &str = r#"
result = []
for round in range(n):
    if form == "create":
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    else:
        fd = os.open(path, os.O_RDWR | os.O_CREAT)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB) if form == "flock" else fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    result.append(int(os.pread(fd, 4096, 0).split(b"\n")[0]))
    os.close(fd)
"#;

#[test]
fn one_process_that_closes_and_claims_again_never_loses() {
    let mount = Mount::new();
    for form in ["create", "flock", "lockf"] {
        let agent = Agent::new();
        let epochs = agent
            .script(CYCLES, json!({ "path": mount.claim(form), "n": 500, "form": form }))
            .unwrap_or_else(|e| panic!("{form}: a claim right after a close lost: {e}"));
        assert_eq!(epochs, json!((1..=500).collect::<Vec<u64>>()), "{form}");
    }
    mount.verify();
}

#[test]
fn two_processes_that_hand_a_key_to_and_fro_never_lose() {
    let mount = Mount::new();
    let path = mount.claim("k");
    let agents = [Agent::new(), Agent::new()];
    for round in 1..=500 {
        let agent = &agents[round % 2];
        let fd = if round % 4 < 2 {
            agent.create(&path)
        } else {
            let fd = agent.handle(&path);
            agent.flock(fd, LOCK_EX | LOCK_NB).map(|()| fd)
        };
        let fd = fd.unwrap_or_else(|e| panic!("round {round}: the other's close had returned: {e}"));
        assert_eq!(agent.epoch(fd), Ok(round as u64));
        agent.close(fd);
    }
}

#[test]
fn an_exit_or_a_kill_that_was_waited_for_frees_the_key() {
    let mount = Mount::new();
    let path = mount.claim("k");
    let parent = Agent::new();
    for round in 1..=100 {
        let child = parent.fork();
        let fd = child.create(&path).unwrap_or_else(|e| panic!("round {round}: the last one's end was seen: {e}"));
        assert_eq!(child.epoch(fd), Ok(round));
        if round % 2 == 0 { child.kill() } else { child.exit() }
    }
}

#[test]
fn commands_one_after_the_other_never_meet() {
    let mount = Mount::new();
    let path = mount.claim("k");
    for round in 0..200 {
        let output = Command::new("flock").arg("-n").arg(&path).arg("true").output_in_time();
        assert!(output.status.success(), "round {round}: the last command had ended");
    }
    assert_eq!(mount.status("k")["epoch"], 200);
    assert_ok(&mount.bash("for i in $(seq 50); do (set -C; exec 9>$M/claims/c) || exit 1; done"));
    assert_eq!(mount.status("c")["epoch"], 50);
}
