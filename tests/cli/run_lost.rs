//! `leasefs run` when something comes in between: signals, a lease that is lost, a run that is killed.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::common::agent::has_ended;
use super::common::{Background, Mount, assert_ok, read_in_time, shown_once, wait_for};
use super::start;

/// Starts a run whose command sets itself up, says so with its pid in a file, and goes on.
fn start_run(mount: &Mount, options: &[&str], setup: &str, body: &str) -> (Background, PathBuf) {
    let ready = mount.scratch().join("ready");
    let script = format!("{setup}\necho $$ > {0}.new; mv {0}.new {0}\n{body}", ready.display());
    let run = start(mount, &[&["run"], options, &["job", "--", "sh", "-c", &script]].concat());
    wait_for("the command is ready", || ready.exists());
    (run, ready)
}

/// Whether the process that wrote the file lives; one that nobody has waited for yet does not.
fn is_alive(ready: &Path) -> bool {
    !has_ended(fs::read_to_string(ready).expect("pid").trim().parse().expect("a pid"))
}

fn said(run: &mut Background) -> String {
    read_in_time(run.0.stderr.take())
}

#[test]
fn signals_are_passed_on_to_the_command() {
    let mount = Mount::new();
    for (signal, code) in [("HUP", 11), ("INT", 12), ("QUIT", 13), ("TERM", 14), ("USR1", 15), ("USR2", 16)] {
        let trap = format!("trap 'exit {code}' {signal}");
        let (mut run, ready) = start_run(&mount, &[], &trap, "while :; do sleep 0.05; done");
        run.signal(signal);
        assert_eq!(run.wait().code(), Some(code), "SIG{signal}");
        mount.wait_status("job", "free", |status| status["state"] == "free");
        fs::remove_file(ready).expect("marker");
    }
}

#[test]
fn the_key_is_held_until_a_signalled_command_has_ended() {
    let mount = Mount::new();
    let tidy_up = "trap 'sleep 0.5; touch \"$LEASEFS_ROOT/../scratch/tidy\"; exit 0' TERM";
    let (mut run, _) = start_run(&mount, &[], tidy_up, "while :; do sleep 0.05; done");
    run.signal("TERM");
    wait_for("the command has tidied up", || {
        let state = mount.state_of("job");
        let tidy = mount.scratch().join("tidy").exists();
        assert!(tidy || state == "held", "{state} before the command ended");
        tidy
    });
    assert_eq!(run.wait().code(), Some(0));
}

#[test]
fn a_killed_run_takes_its_command_along() {
    let mount = Mount::new();
    let (mut run, ready) = start_run(&mount, &[], "", "exec sleep 60");
    run.signal("KILL");
    run.wait();
    mount.wait_status("job", "free", |status| status["state"] == "free");
    wait_for("the command is gone", || !is_alive(&ready));
}

#[test]
fn an_evicted_run_ends_its_command_at_once() {
    let mount = Mount::new();
    // A TTL of a day: it is the handle that tells, not a renewal.
    let mut epoch = 0;
    shown_once("the command ends at once", || {
        epoch += 1;
        let (mut run, ready) = start_run(&mount, &[], "", "exec sleep 60");
        let began = Instant::now();
        assert_ok(&mount.leasefs(&["evict", "job", "--epoch", &epoch.to_string(), "--reason", "test"]));
        assert_eq!(run.wait().code(), Some(75));
        let took = began.elapsed();
        assert!(!is_alive(&ready));
        let said = said(&mut run);
        assert!(said.starts_with(&format!("leasefs: job: epoch {epoch} lost its lease")), "{said}");
        assert_eq!(said.lines().count(), 1, "{said}");
        fs::remove_file(ready).expect("marker");
        if took < Duration::from_secs(4) { Ok(()) } else { Err(format!("{took:?}")) }
    });
}

#[test]
fn a_command_deaf_to_term_is_killed() {
    let mount = Mount::new();
    let (mut run, ready) = start_run(&mount, &[], "trap '' TERM", "exec sleep 60");
    let began = Instant::now();
    assert_ok(&mount.leasefs(&["evict", "job", "--epoch", "1"]));
    assert_eq!(run.wait().code(), Some(75));
    let took = began.elapsed();
    assert!(took >= Duration::from_secs(5), "took {took:?}");
    assert!(!is_alive(&ready));
}

#[test]
fn a_run_frozen_past_its_ttl_gives_up_when_it_thaws() {
    let mount = Mount::new();
    let (mut run, ready) = start_run(&mount, &["--ttl", "6s"], "", "exec sleep 60");
    run.signal("STOP");
    mount.wait_status("job", "expired", |status| status["state"] == "free" && status["outcome"] == "expired");
    let successor = super::hold(&mount, "job");
    run.signal("CONT");
    assert_eq!(run.wait().code(), Some(75));
    assert!(!is_alive(&ready));
    assert_eq!((mount.state_of("job").as_str(), mount.status("job")["epoch"].as_u64()), ("held", Some(2)));
    drop(successor);
    mount.verify();
}

#[test]
fn a_loss_is_told_even_when_the_command_ends_first() {
    let mount = Mount::new();
    // The command itself evicts its lease and ends at once.
    let script = format!("{} evict job --epoch 1", super::common::LEASEFS);
    let output = mount.leasefs(&["run", "job", "--", "sh", "-c", &script]);
    assert_eq!(output.status.code(), Some(75), "{}", super::stderr(&output));
}
