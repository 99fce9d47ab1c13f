//! How each attempt ended, and why, where it can be known.

use libc::{LOCK_EX, LOCK_UN};
use nix::sys::signal::Signal;

use crate::common::agent::{Agent, Script};
use crate::common::{Mount, assert_ok, stdout, wait_for};

/// What history prints, and the outcome that status tells.
fn ended(mount: &Mount, key: &str) -> (String, String) {
    let output = mount.leasefs(&["history", key]);
    assert_ok(&output);
    let outcome = mount.status(key)["outcome"].as_str().expect("it ended").to_owned();
    (stdout(&output), outcome)
}

/// The tree says at once that it was released; the registry, which `history` reads, is a moment behind.
fn assert_released(mount: &Mount, key: &str, why: &str) {
    let (_, outcome) = ended(mount, key);
    assert_eq!(outcome, "released", "{key}");
    wait_for(&format!("history of {key}: released, {why}"), || {
        let (history, _) = ended(mount, key);
        history.contains("released") && history.contains(why)
    });
}

#[test]
fn a_release_says_whether_the_holder_closed_exited_or_was_killed() {
    let mount = Mount::new();
    let agent = Agent::new();
    let fd = agent.create(&mount.claim("closed")).expect("free key");
    agent.close(fd);
    assert_released(&mount, "closed", "closed");
    let agent = Agent::new();
    agent.create(&mount.claim("exited")).expect("free key");
    agent.exit();
    assert_released(&mount, "exited", "exited");
    for signal in [Signal::SIGKILL, Signal::SIGTERM, Signal::SIGSEGV, Signal::SIGINT] {
        let key = format!("killed{}", signal as i32);
        let agent = Agent::new();
        let fd = agent.handle(&mount.claim(&key));
        agent.flock(fd, LOCK_EX).expect("free key");
        agent.end_by(signal);
        assert_released(&mount, &key, &format!("killed by signal {}", signal as i32));
    }
}

#[test]
fn unlocking_and_unlinking_are_releases() {
    let mount = Mount::new();
    let agent = Agent::new();
    let fd = agent.create(&mount.claim("unlocked")).expect("free key");
    agent.flock(fd, LOCK_UN).expect("unlock");
    assert_eq!(ended(&mount, "unlocked").1, "released");
    agent.create(&mount.claim("unlinked")).expect("free key");
    agent.unlink(&mount.claim("unlinked")).expect("its own");
    assert_eq!(ended(&mount, "unlinked").1, "released");
}

#[test]
fn history_lists_every_attempt_with_its_own_outcome() {
    let mount = Mount::new();
    let path = mount.claim("k");
    let agent = Agent::new();
    let fd = agent.create(&path).expect("free key");
    agent.close(fd);
    agent.create(&path).expect("free key");
    agent.set_xattr(&path, "user.lease.ttl", "20ms").expect("holder's user");
    mount.wait_status("k", "expired", |status| status["outcome"] == "expired");
    agent.create(&path).expect("free key");
    assert_ok(&mount.leasefs(&["evict", "k", "--epoch", "3", "--reason", "because"]));
    let fd = agent.create(&path).expect("free key");
    let draft = agent.handle(&mount.result("k", 4));
    agent.close(draft);
    agent.close(fd);
    let (history, outcome) = ended(&mount, "k");
    assert_eq!(outcome, "completed");
    for outcome in ["released", "expired", "evicted", "completed"] {
        assert_eq!(history.lines().filter(|line| line.contains(outcome)).count(), 1, "{outcome}: {history}");
    }
    assert!(history.contains("because"), "{history}");
    mount.verify();
}

#[test]
fn a_shell_that_ends_is_told_from_one_that_is_killed() {
    let mount = Mount::new();
    let script = "exec 9>$M/claims/KEY; flock 9; echo held; read -r _; exit 0";
    // The test does not reap the second one before it has looked, so that its fate can be seen.
    let ends = Script::start(&mount, &script.replace("KEY", "ends"));
    assert_eq!(ends.line().as_deref(), Some("held"));
    assert!(ends.finish().success());
    assert_eq!(ended(&mount, "ends").1, "released");
    let dies = Script::start(&mount, &script.replace("KEY", "dies"));
    assert_eq!(dies.line().as_deref(), Some("held"));
    dies.signal(Signal::SIGKILL);
    crate::common::wait_for("its end", || crate::common::agent::has_ended(dies.pid()));
    assert_released(&mount, "dies", "killed by signal 9");
}
