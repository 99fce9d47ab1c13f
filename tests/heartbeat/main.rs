//! A heartbeat runs on it: of many that start at once exactly one owns the host, and a frozen owner stops by itself.

#[path = "../common/mod.rs"]
mod common;

use std::fs;
use std::os::unix::process::ExitStatusExt;

use nix::sys::signal::Signal;
use serde_json::{Value, json};

use common::Mount;
use common::agent::Script;

/// Starts the program with these arguments.
fn program(mount: &Mount, arguments: &[&str]) -> Script {
    let path = mount.scratch().join("heartbeat.py");
    if !path.exists() {
        fs::write(&path, include_str!("heartbeat.py")).expect("program");
    }
    let (path, root) = (path.display().to_string(), mount.root().display().to_string());
    let mut argv = vec!["python3", "-I", "-S", &path, arguments[0], &root, "host"];
    argv.extend(&arguments[1..]);
    Script::start_with(mount, &argv)
}

/// The next thing it says.
fn said(script: &Script) -> Value {
    let line = script.line().expect("it says something before it ends");
    serde_json::from_str(&line).unwrap_or_else(|e| panic!("{e}: {line}"))
}

/// A file that is not there until it is made.
fn signal_file(mount: &Mount, name: &str) -> String {
    mount.scratch().join(name).display().to_string()
}

#[test]
fn five_starters_two_hundred_rounds_one_owner_each_time_and_whole_records() {
    let mount = Mount::with(&["--ttl", "90s"]);
    let stop = signal_file(&mount, "stop");
    let readers = [program(&mount, &["read", &stop]), program(&mount, &["read", &stop])];
    let mut rounds = program(&mount, &["rounds", "5", "200"]);
    // Each round is told, so that it is none for whose end there is too little time.
    for round in 1..=200 {
        assert_eq!(said(&rounds), json!({ "pid": rounds.pid(), "right": round }));
    }
    let outcome = said(&rounds);
    assert_eq!(outcome["rounds"], 200, "{outcome}");
    assert!(outcome["beats"].as_u64() >= Some(200), "{outcome}");
    assert!(rounds.wait().success());
    fs::write(&stop, "").expect("stop");
    for reader in readers {
        let read = said(&reader);
        assert!(read["records"].as_u64() > Some(100), "{read}");
        assert!(read["different"].as_u64() > Some(20), "the readers saw beats come and go: {read}");
        assert!(reader.finish().success());
    }
    assert_eq!(mount.status("host")["epoch"], 200);
    mount.verify();
}

#[test]
fn programs_started_at_the_same_instant_agree_on_the_owner() {
    let mount = Mount::with(&["--ttl", "90s"]);
    for round in 1..=4u64 {
        let (gate, stop) = (signal_file(&mount, &format!("gate{round}")), signal_file(&mount, &format!("stop{round}")));
        let starters: Vec<Script> = (0..5).map(|_| program(&mount, &["start", "0.01", &gate, &stop])).collect();
        fs::write(&gate, "").expect("gate");
        let roles: Vec<Value> = starters.iter().map(said).collect();
        let owners: Vec<&Value> = roles.iter().filter(|role| role["role"] == "owner").collect();
        assert_eq!(owners.len(), 1, "round {round}: {roles:?}");
        assert_eq!(owners[0]["epoch"], round);
        assert!(roles.iter().all(|role| role["role"] == "owner" || role["owner"] == owners[0]["pid"]), "{roles:?}");
        assert_eq!(mount.status("host")["holder"]["pid"], owners[0]["pid"]);
        assert_eq!(mount.status("host")["ttl_ms"], 90_000);
        fs::write(&stop, "").expect("stop");
        for starter in starters {
            assert_eq!(starter.finish().code(), Some(0), "the owner was told to stop, the others left by themselves");
        }
    }
}

#[test]
fn a_frozen_owner_that_is_thawed_after_the_takeover_stops_at_its_next_beat() {
    let mount = Mount::with(&["--ttl", "90s"]);
    let (gate, stop) = (signal_file(&mount, "gate"), signal_file(&mount, "stop"));
    fs::write(&gate, "").expect("gate");
    let mut owner = program(&mount, &["start", "0.1", &gate, &stop]);
    assert_eq!(said(&owner)["epoch"], 1);
    for epoch in 2..=4 {
        let beaten = mount.status("host")["renewed"].clone();
        mount.wait_status("host", "it beats", |status| status["renewed"] != beaten);
        common::stop(owner.pid());
        mount.shorten("host");
        mount.wait_status("host", "its TTL ran out", |status| {
            status["outcome"] == "expired" && status["state"] == "free"
        });
        let next = program(&mount, &["start", "0.1", &gate, &stop]);
        assert_eq!(said(&next), json!({ "pid": next.pid(), "role": "owner", "epoch": epoch }));
        owner.signal(Signal::SIGCONT);
        assert_eq!(said(&owner)["role"], "lost", "ESTALE at its next beat");
        assert_eq!(owner.wait().code(), Some(3), "and it stopped by itself");
        let status = mount.status("host");
        assert_eq!(
            (status["epoch"].as_u64(), status["holder"]["pid"].as_i64()),
            (Some(epoch), Some(next.pid().into()))
        );
        assert!(
            status["note"].as_str().is_none_or(|note| note.is_empty() || note.starts_with(&next.pid().to_string())),
            "{status}"
        );
        owner = next;
    }
    fs::write(&stop, "").expect("stop");
    assert_eq!(said(&owner)["role"], "kept");
    assert!(owner.finish().success());
}

#[test]
fn a_killed_owner_is_followed_at_once_and_not_after_its_ttl() {
    let mount = Mount::with(&["--ttl", "90s"]);
    let (gate, stop) = (signal_file(&mount, "gate"), signal_file(&mount, "stop"));
    fs::write(&gate, "").expect("gate");
    for epoch in 1..=5 {
        let mut owner = program(&mount, &["start", "0.05", &gate, &stop]);
        assert_eq!(said(&owner)["epoch"], epoch, "the kernel released the dead owner's handle");
        owner.signal(Signal::SIGKILL);
        assert_eq!(owner.wait().signal(), Some(9));
        assert_eq!(mount.state_of("host"), "free");
    }
}
