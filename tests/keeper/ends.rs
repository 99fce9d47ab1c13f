//! Servers that cannot live, and keepers that are told to end, or do.

use std::fs;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::signal::Signal;

use crate::common::agent::{Agent, has_ended};
use crate::common::{InTime, assert_ok, wait_for};
use crate::place::Place;

/// Makes the registry one that no server opens, or one again that each does.
fn set_version(place: &Place, version: u32) -> u32 {
    let registry = rusqlite::Connection::open(place.state().join("registry.db")).expect("registry");
    let before = registry.query_row("PRAGMA user_version", [], |row| row.get(0)).expect("version");
    registry.execute_batch(&format!("PRAGMA user_version = {version}")).expect("SQL");
    before
}

#[test]
fn the_server_ends_with_its_keeper_and_callers_are_told() {
    let mut place = Place::mount(&[], &[]);
    let server = place.server();
    let agent = Agent::new();
    let fd = agent.create(&place.claim("k")).expect("free key");
    place.signal(place.keeper(), Signal::SIGKILL);
    place.wait();
    // Whoever comes next waits for the server's end, and no longer.
    let next = place.path("next");
    fs::create_dir(&next).expect("mountpoint");
    let leasefs = |command: &str, options: &[&std::path::Path]| {
        let mut leasefs = std::process::Command::new(crate::common::LEASEFS);
        leasefs.arg(command).arg(&next).args(options).output_in_time()
    };
    assert_ok(&leasefs("mount", &["--state".as_ref(), &place.state()]));
    assert!(has_ended(server), "it could have written still");
    assert_ok(&leasefs("unmount", &[]));
    // Its dead mount was taken away by that one; the old handle is of it still.
    wait_for("the connection's end", || matches!(agent.epoch(fd), Err(Errno::ENOTCONN | Errno::ECONNABORTED)));
}

#[test]
fn a_server_that_cannot_start_is_waited_for() {
    let mut place = Place::mount(&[], &[]);
    let agent = Agent::new();
    agent.create(&place.claim("k")).expect("free key");
    let version = set_version(&place, 9999);
    let began = Instant::now();
    place.signal(place.server(), Signal::SIGKILL);
    wait_for("pauses", || place.log().contains("in 400 ms"));
    for pause in ["in 0 ms", "in 100 ms", "in 200 ms"] {
        assert!(place.log().contains(pause), "{pause}");
    }
    assert!(place.log().contains("newer leasefs (schema 9999"), "it says why");
    set_version(&place, version);
    assert!(place.mnt().join("claims/k").exists(), "the call that waited is answered");
    assert!(began.elapsed() > Duration::from_millis(700));
    assert_eq!(place.number("keeper_pid"), Some(place.keeper().into()));
    drop(agent);
    place.unmount();
}

#[test]
fn one_that_never_gets_ready_is_given_up_and_its_mount_stays_shut() {
    let mut place = Place::mount(&["--max-starts", "3"], &[]);
    let agent = Agent::new();
    let fd = agent.create(&place.claim("k")).expect("free key");
    set_version(&place, 9999);
    place.signal(place.server(), Signal::SIGKILL);
    // It waits for an answer meanwhile.
    assert!(matches!(agent.epoch(fd), Err(Errno::ENOTCONN | Errno::ECONNABORTED)));
    assert!(!place.wait().success());
    assert!(place.log().contains("3 servers in a row did not get ready"), "{}", place.log());
    assert!(place.is_mounted(), "or claims would be files of the directory below");
    let shut = Agent::new().create(&place.claim("other"));
    assert_eq!(shut, Err(Errno::ENOTCONN));
}

#[test]
fn a_first_server_that_cannot_start_leaves_nothing_mounted() {
    let mut place = Place::mount(&[], &[]);
    place.unmount();
    set_version(&place, 9999);
    let output = std::process::Command::new(crate::common::LEASEFS)
        .arg("mount")
        .arg(place.mnt())
        .arg("--state")
        .arg(place.state())
        .output_in_time();
    assert_eq!(output.status.code(), Some(1));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("schema 9999") && said.lines().count() == 1, "{said}");
    assert!(!place.is_mounted());
}

#[test]
fn an_orderly_stop_serves_open_files_to_the_end_whatever_server_does() {
    let mut place = Place::mount(&[], &[]);
    let server = place.server();
    let (agent, fd) = place.stop_while_held();
    assert_eq!(agent.epoch(fd), Ok(1));
    // Detached, it is kept as well as before.
    place.signal(server, Signal::SIGKILL);
    wait_for("the next server", || place.log().contains("took over"));
    assert!(!has_ended(place.keeper()));
    agent.close(fd);
    drop(agent);
    assert!(place.wait().success(), "{}", place.log());
}

#[test]
fn what_is_closed_last_after_an_orderly_stop_is_recorded() {
    // The kernel ends a connection with its last user, and what it has not handed over by then it drops: not always.
    for round in 0..12 {
        let mut place = Place::mount(&[], &[]);
        let agent = Agent::new();
        let fd = agent.create(&place.claim("k")).expect("free key");
        let draft = agent.open(&place.mnt().join("results/k/1"), libc::O_WRONLY | libc::O_CREAT).expect("a draft");
        assert_eq!(agent.write(draft, "whole"), Ok(5));
        if round % 2 == 0 {
            // A service manager may tell every process.
            place.signal(place.server(), Signal::SIGTERM);
        }
        place.signal(place.keeper(), Signal::SIGTERM);
        wait_for("it is out of sight", || !place.is_mounted());
        agent.close(fd);
        agent.close(draft);
        assert!(place.wait().success(), "{}", place.log());
        place.mount_again();
        assert_eq!(fs::read_to_string(place.mnt().join("results/k/1")).ok().as_deref(), Some("whole"), "round {round}");
        let status = fs::read_to_string(place.mnt().join("status/k")).expect("status");
        assert!(status.contains("\"outcome\":\"completed\""), "round {round}: {status}");
        place.unmount();
    }
}

#[test]
fn a_second_signal_ends_at_once() {
    let mut place = Place::mount(&[], &[]);
    let agent = Agent::new();
    agent.create(&place.claim("k")).expect("free key");
    let server = place.server();
    place.signal(place.keeper(), Signal::SIGINT);
    wait_for("it is out of sight", || !place.is_mounted());
    place.signal(place.keeper(), Signal::SIGTERM);
    assert!(!place.wait().success());
    wait_for("the server's end", || has_ended(server));
}

#[test]
fn a_request_that_kills_is_refused_the_third_time_and_the_others_go_on() {
    let mut place = Place::mount(&[], &[("LEASEFS_TEST_ABORT", "handling=poison:1-")]);
    let (good, bad) = (Agent::new(), Agent::new());
    let fd = good.create(&place.claim("good")).expect("free key");
    let first = place.server();
    assert_eq!(bad.create(&place.claim("poison")), Err(Errno::EIO));
    assert!(has_ended(first));
    assert_eq!(place.number("starts"), Some(4), "three servers died of it");
    let log = place.log();
    let refusal = log.lines().find(|line| line.contains("answered EIO")).unwrap_or_else(|| panic!("{log}"));
    assert!(refusal.contains("ERROR") && refusal.contains("LOOKUP") && refusal.contains("namespace"), "{refusal}");
    assert!(good.create(&place.claim("another")).is_ok());
    assert!(place.claim("good").exists());
    good.close(fd);
    drop((good, bad));
    place.unmount();
}

#[test]
fn a_kill_point_in_a_file_kills_once() {
    for point in ["before-commit", "after-commit"] {
        let order = tempfile::NamedTempFile::new().expect("file");
        let path = order.path().to_str().expect("UTF-8").to_owned();
        let mut place = Place::mount(&[], &[("LEASEFS_TEST_ABORT", &path)]);
        fs::write(&path, point).expect("order");
        let agent = Agent::new();
        let fd = agent.create(&place.claim("k")).expect("its caller does not notice");
        assert_eq!(agent.epoch(fd), Ok(1), "{point}");
        assert!(!order.path().exists(), "{point} was reached");
        assert_eq!(place.number("starts"), Some(2));
        assert!(place.log().contains(&format!("kill point {point}")));
        let status = fs::read_to_string(place.mnt().join("status/k")).expect("status");
        assert!(status.contains("\"epoch\":1"), "{point}: {status}");
        drop(agent);
        place.unmount();
    }
}

#[test]
fn a_close_cut_off_is_handled_again_on_every_kernel() {
    for options in [&[][..], &["--no-resend"]] {
        let order = tempfile::NamedTempFile::new().expect("file");
        let path = order.path().to_str().expect("UTF-8").to_owned();
        let mut place = Place::mount(options, &[("LEASEFS_TEST_ABORT", &path)]);
        let agent = Agent::new();
        let fd = agent.create(&place.claim("k")).expect("free key");
        fs::write(&path, "before-commit").expect("order");
        agent.close(fd);
        wait_for("the server was killed with the release unanswered", || !order.path().exists());
        wait_for("another took over", || place.log().contains("handled again"));
        assert!(!place.log().contains("took over the connection: 0"), "{options:?}: {}", place.log());
        let other = Agent::new();
        let again = other.open(&place.claim("k"), libc::O_RDWR | libc::O_CREAT).expect("a handle");
        assert_eq!(other.flock(again, libc::LOCK_EX | libc::LOCK_NB), Ok(()), "{options:?}: it is free");
        assert_eq!(other.epoch(again), Ok(2));
        drop((agent, other));
        place.unmount();
    }
}

#[test]
fn a_first_server_killed_while_it_makes_its_tables_is_followed_by_another() {
    let mut place = Place::mount(&[], &[("LEASEFS_TEST_ABORT", "migration")]);
    assert_eq!(place.number("starts"), Some(2));
    assert!(place.log().contains("kill point migration"));
    place.unmount();
}
