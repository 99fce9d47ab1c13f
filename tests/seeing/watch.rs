//! `leasefs watch`: what happens, as it happens.

use std::process::Command;
use std::time::{Duration, Instant};

use libc::{LOCK_EX, LOCK_NB};
use nix::errno::Errno;
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::common::agent::{Agent, Script};
use crate::common::{InTime, LEASEFS, Mount, assert_ok, stdout, stop, wait_for};
use crate::has_open;

/// A `leasefs watch` that listens already.
fn watch(mount: &Mount, args: &[&str]) -> Script {
    let script = Script::start_with(mount, &[&[LEASEFS, "watch"], args].concat());
    wait_for("the watch listens", || has_open(script.pid(), ".leasefs/events"));
    script
}

fn cycle(agent: &Agent, mount: &Mount, key: &str) {
    let fd = agent.create(&mount.claim(key)).expect("free");
    agent.close(fd);
    wait_for("free", || mount.state_of(key) == "free");
}

#[test]
fn a_person_reads_what_happens_to_whom() {
    let mount = Mount::new();
    let agent = Agent::new();
    let script = watch(&mount, &["--count", "3"]);
    let fd = agent.create(&mount.claim("job")).expect("free");
    let line = script.line().expect("a grant");
    let words: Vec<&str> = line.split_whitespace().collect();
    assert_eq!(words[1..5], ["granted", "job", "epoch", "1"], "{line}");
    assert!(line.ends_with(&format!("pid {} (python3), uid 0", agent.pid())), "{line}");
    assert_eq!(words[0].len(), "12:00:00.000".len(), "{line}");
    assert_ok(&mount.leasefs(&["evict", "job", "--epoch", "1"]));
    assert!(script.line().is_some_and(|line| line.contains("evicted      job  epoch 1")));
    assert_eq!(agent.write(fd, "late"), Err(Errno::ESTALE));
    assert!(script.line().is_some_and(|line| line.contains("stale        job")));
    let mut script = script;
    assert!(script.wait().success(), "after three");
}

#[test]
fn a_person_reads_who_gave_up_waiting_and_after_how_long() {
    let mount = Mount::new();
    let (holder, waiter) = (Agent::new(), Agent::new());
    holder.create(&mount.claim("job")).expect("free");
    let mut script = watch(&mount, &["--count", "2"]);
    waiter.begin_flock(waiter.handle(&mount.claim("job")), LOCK_EX);
    mount.wait_status("job", "in line", |status| status["waiters"] == 1);
    waiter.signal(Signal::SIGKILL);
    assert!(script.line().is_some_and(|line| line.contains("waiting      job  epoch 1")));
    let line = script.line().expect("a line");
    let words: Vec<&str> = line.split_whitespace().collect();
    let pid = waiter.pid().to_string();
    let told = ["interrupted", "job", "epoch", "1", "pid", &pid, "(python3),", "uid", "0,", "after"];
    assert_eq!(words[1..11], told, "{line}");
    assert_eq!(words[12..], ["in", "line"], "{line}");
    assert!(script.wait().success());
}

#[test]
fn json_is_the_events_as_they_are_below_a_prefix() {
    let mount = Mount::new();
    std::fs::create_dir(mount.claim("team")).expect("a namespace");
    let agent = Agent::new();
    let mut script = watch(&mount, &["--json", "team/", "--count", "2"]);
    cycle(&agent, &mount, "other");
    cycle(&agent, &mount, "team/a");
    let events: Vec<Value> =
        (0..2).map(|_| serde_json::from_str(&script.line().expect("a line")).expect("JSON")).collect();
    let told: Vec<_> = events.iter().map(|event| (event["event"].as_str(), event["key"].as_str())).collect();
    assert_eq!(told, [(Some("granted"), Some("team/a")), (Some("released"), Some("team/a"))]);
    assert!(events[0]["seq"].is_u64() && events[0]["time"].is_string());
    assert!(script.wait().success());
}

#[test]
fn it_goes_on_when_the_server_is_killed() {
    let mount = Mount::new();
    let agent = Agent::new();
    let script = watch(&mount, &[]);
    for epoch in 1..=3 {
        cycle(&agent, &mount, "k");
        for event in ["granted", "released"] {
            let line = script.line().expect("a line");
            assert!(line.contains(event) && line.contains(&format!("k  epoch {epoch}")), "{line}");
        }
        mount.kill_server();
    }
}

#[test]
fn a_reader_that_was_too_slow_is_told_how_much_it_missed() {
    let mount = Mount::new();
    let (holder, other) = (Agent::new(), Agent::new());
    let script = watch(&mount, &[]);
    holder.create(&mount.claim("k")).expect("free");
    assert!(script.line().is_some_and(|line| line.contains("granted")));
    stop(script.pid());
    let refused = "
for _ in range(17000):
    try: fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError: pass
";
    let fd = other.handle(&mount.claim("k"));
    assert_eq!(other.flock(fd, LOCK_EX | LOCK_NB), Err(Errno::EAGAIN));
    other.script(refused, json!({ "fd": fd })).expect("refused each time");
    script.signal(Signal::SIGCONT);
    let line = script.line().expect("a line");
    assert!(line.contains("gap ") && line.contains("events were missed: see `leasefs ls`"), "{line}");
    assert!(script.line().is_some_and(|line| line.contains("denied")));
}

#[test]
fn it_ends_when_it_should() {
    let mount = Mount::new();
    let agent = Agent::new();
    // In time, with nothing or too little to tell.
    assert_ok(&mount.leasefs(&["watch", "-w", "0.05"]));
    crate::assert_refused(&mount.leasefs(&["watch", "-w", "0.05", "--count", "2"]), 1, &["before 2 more events came"]);
    // By Ctrl-C, at once.
    let mut script = watch(&mount, &[]);
    let began = Instant::now();
    script.signal(Signal::SIGINT);
    assert!(!script.wait().success() && began.elapsed() < Duration::from_secs(30));
    // When its reader has seen enough.
    let mut pipe = mount.spawn_bash(&format!("set -o pipefail; {LEASEFS} watch --json | head -n 1"));
    wait_for("the pipe ends", || {
        cycle(&agent, &mount, "k");
        pipe.0.try_wait().expect("it can be waited for").is_some()
    });
    assert!(pipe.wait().success());
    let bad = Command::new(LEASEFS).args(["watch", "--root", "/"]).output_in_time();
    crate::assert_refused(&bad, 2, &["no leasefs tree is mounted here"]);
    assert_eq!(stdout(&bad), "");
}
