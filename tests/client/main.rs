//! `leasefs::client` on a real mount: each call of the library in a process of its own.

#[path = "../common/mod.rs"]
mod common;
mod user;

use std::fs;
use std::process::Command;

use common::{InTime, LEASEFS, Mount, assert_ok, wait_for};
use user::User;

fn two(mount: &Mount) -> (User, User) {
    (User::new(&mount.root()), User::new(&mount.root()))
}

#[test]
fn one_claims_and_the_other_is_refused_until_it_lets_go() {
    let mount = Mount::new();
    let (a, b) = two(&mount);
    assert_eq!(a.ask("claim k"), "1");
    assert_eq!(b.ask("claim k"), "Held");
    assert_eq!(b.ask("once k"), "Held");
    assert_eq!(mount.status("k")["holder"]["pid"], a.pid());
    assert_eq!(a.ask("release k"), "ok");
    assert_eq!(b.ask("once k"), "2");
    drop(b);
    wait_for("the end of the lease with its process", || mount.state_of("k") == "free");
    assert_eq!(a.ask("claim k"), "3");
}

#[test]
fn a_finished_key_is_refused_to_once_and_not_to_a_lock() {
    let mount = Mount::new();
    let (a, b) = two(&mount);
    assert_eq!(a.ask("once k"), "1");
    assert_eq!(a.ask("commit k done"), "ok");
    assert_eq!(b.ask("once k"), "Held", "held still, though its result is there");
    a.ask("release k");
    assert_eq!(b.ask("once k"), "Finished");
    assert_eq!(b.ask("result k 1"), "done");
    assert_eq!(b.ask("claim k"), "2");
    assert_eq!(b.ask("result k 2"), "none");
}

#[test]
fn waiting_is_in_line() {
    let mount = Mount::new();
    let (a, b) = two(&mount);
    let c = User::new(&mount.root());
    assert_eq!(a.ask("claim k"), "1");
    b.begin("wait k");
    mount.wait_status("k", "one waits", |status| status["waiters"] == 1);
    c.begin("wait k");
    mount.wait_status("k", "two wait", |status| status["waiters"] == 2);
    a.ask("release k");
    assert_eq!(b.answer(), "2");
    b.ask("release k");
    assert_eq!(c.answer(), "3");
}

#[test]
fn a_wait_with_a_limit_ends_with_the_key_or_at_the_limit() {
    let mount = Mount::new();
    let (a, b) = two(&mount);
    assert_eq!(a.ask("claim k"), "1");
    assert_eq!(b.ask("wait k 0"), "Held");
    assert_eq!(b.ask("wait k 50"), "Held");
    assert_eq!(mount.status("k")["epoch"], 1, "a refusal takes no epoch");
    b.begin("wait k 60000");
    a.ask("release k");
    assert_eq!(b.answer(), "2");
    assert_eq!(b.ask("wait never-claimed 0"), "1");
}

#[test]
fn a_lost_lease_says_so_at_every_call() {
    let mount = Mount::new();
    let (a, b) = two(&mount);
    assert_eq!(a.ask("claim k"), "1");
    assert_eq!((a.ask("renew k"), a.ask("lost k")), ("ok".into(), "false".into()));
    let evict = Command::new(LEASEFS).args(["evict", "k", "--epoch", "1", "--root"]).arg(mount.root()).output_in_time();
    assert_ok(&evict);
    assert_eq!(a.ask("lost k"), "true");
    for order in ["renew k", "note k x", "ttl k 1h", "commit k late"] {
        assert_eq!(a.ask(order), "Lost 1", "{order}");
    }
    assert_eq!(b.ask("claim k"), "2", "and what the old one does concerns it no longer");
    assert_eq!(a.ask("commit k late"), "Lost 1");
    a.ask("release k");
    assert_eq!(b.ask("lost k"), "false");
    assert_eq!(b.ask("result k 1"), "none");
}

#[test]
fn a_child_that_has_the_handle_renews_as_well() {
    let mount = Mount::new();
    let user = User::new(&mount.root());
    assert_eq!(user.ask("status k"), "none");
    assert_eq!(user.ask("claim k"), "1");
    let before = mount.status("k")["renewed"].clone();
    wait_for("a later renewal", || {
        assert_eq!(user.ask("renew-in-a-child k"), "ok");
        mount.status("k")["renewed"] != before
    });
    assert_eq!(user.ask("status k"), "held 1");
    assert_eq!(user.ask("release k"), "ok");
    assert_eq!(user.ask("status k"), "free 1");
}

#[test]
fn a_lease_ends_at_the_ttl_that_was_set() {
    let mount = Mount::new();
    let (a, b) = two(&mount);
    assert_eq!(a.ask("claim k"), "1");
    assert_eq!(a.ask("ttl k 200ms"), "ok");
    b.begin("wait k");
    assert_eq!(b.answer(), "2");
    assert_eq!(a.ask("lost k"), "true");
    assert_eq!(mount.status("k")["outcome"], "expired");
}

#[test]
fn a_note_is_seen_by_others() {
    let mount = Mount::new();
    let a = User::new(&mount.root());
    assert_eq!(a.ask("claim k"), "1");
    assert_eq!(a.ask("note k halfway"), "ok");
    assert_eq!(mount.status("k")["note"], "halfway");
    let long = a.ask(&format!("note k {}", "x".repeat(4097)));
    assert!(long.contains("File too large"), "{long}");
    assert_eq!(mount.status("k")["note"], "halfway");
}

#[test]
fn a_result_is_there_when_committed_and_not_before() {
    let mount = Mount::new();
    let (a, b) = two(&mount);
    assert_eq!(a.ask("claim k"), "1");
    assert_eq!(a.ask("drop k half"), "ok");
    assert_eq!(b.ask("result k 1"), "none", "a writer that is dropped leaves nothing");
    // A parent records what its child did, after the child has let go.
    a.ask("release k");
    assert_eq!(b.ask("record k 1 whole"), "ok");
    assert_eq!(a.ask("result k 1"), "whole");
    assert_eq!(a.ask("record k 1 again"), "NotAccepted 1");
    assert_eq!(a.ask("record k 2 early"), "NotFound");
    assert_eq!(fs::read_to_string(mount.result("k", 1)).expect("a file like any other"), "whole");
}

#[test]
fn a_result_that_is_too_large_is_refused_whole() {
    let mount = Mount::with(&["--max-result", "8"]);
    let a = User::new(&mount.root());
    assert_eq!(a.ask("claim k"), "1");
    let answer = a.ask("commit k 123456789");
    assert!(answer.contains("File too large"), "{answer}");
    assert_eq!(a.ask("result k 1"), "none");
    assert_eq!(a.ask("commit k 12345678"), "ok");
}

#[test]
fn a_program_that_is_started_does_not_inherit_the_lease() {
    let mount = Mount::new();
    let (a, b) = two(&mount);
    assert_eq!(a.ask("claim k"), "1");
    assert_eq!(a.ask("start-a-child"), "ok");
    a.ask("release k");
    assert_eq!(b.ask("claim k"), "2");
}

#[test]
fn what_is_not_there_is_said_to_be_not_there() {
    let mount = Mount::new();
    let a = User::new(&mount.root());
    assert_eq!(a.ask("claim nowhere/k"), "NotFound");
    assert_eq!(a.ask("once nowhere/k"), "NotFound");
    let nowhere = User::new(&mount.scratch());
    assert_eq!(nowhere.ask("claim k"), "NotATree");
}

#[test]
fn the_servers_death_is_not_noticed() {
    let mount = Mount::new();
    let (a, b) = two(&mount);
    assert_eq!(a.ask("claim k"), "1");
    b.begin("wait k");
    mount.wait_status("k", "one waits", |status| status["waiters"] == 1);
    let server = mount.server_pid().expect("a server");
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(server), nix::sys::signal::Signal::SIGKILL).expect("kill");
    assert_eq!(a.ask("lost k"), "false");
    assert_eq!((a.ask("renew k"), a.ask("commit k done")), ("ok".into(), "ok".into()));
    a.ask("release k");
    assert_eq!(b.answer(), "2");
}
