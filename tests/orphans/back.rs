//! A holder that opens or locks its key again has the same attempt back.

use nix::errno::Errno;
use serde_json::json;

use crate::common::agent::{Agent, Script};
use crate::common::{assert_ok, stdout};
use crate::lost::Lost;

const LOCK_NOW: i32 = libc::LOCK_EX | libc::LOCK_NB;

#[test]
fn by_locking_it() {
    let mut tree = Lost::new();
    let holder = Agent::new();
    let old = holder.handle(&tree.claim("k"));
    holder.flock(old, libc::LOCK_EX).expect("free");
    let before = tree.status("k");
    tree.lose_and_mount();

    let new = holder.handle(&tree.claim("k"));
    assert_eq!(tree.state_of("k"), "orphaned", "an open claims nothing");
    assert_eq!(holder.epoch(new), Ok(1), "and shows the record");
    holder.flock(new, LOCK_NOW).expect("its own");
    let after = tree.status("k");
    assert_eq!((after["state"].as_str(), after["epoch"].as_u64()), (Some("held"), Some(1)));
    assert!(after["orphaned_why"].is_null() && after["renewed"].as_str() > before["renewed"].as_str(), "{after}");
    assert_eq!((&after["since"], &after["holder"]), (&before["since"], &before["holder"]));
    assert_eq!(holder.write(new, "goes on"), Ok(7));

    // The old handle has no part in it any more.
    assert_eq!(holder.read(old), Err(Errno::ENOTCONN));
    holder.close(old);
    assert_eq!(tree.state_of("k"), "held");
    let other = Agent::new();
    let fd = other.handle(&tree.claim("k"));
    assert_eq!(other.flock(fd, LOCK_NOW), Err(Errno::EWOULDBLOCK));
    holder.close(new);
    other.flock(fd, LOCK_NOW).expect("free");
    assert_eq!(other.epoch(fd), Ok(2));
    tree.verify();
}

#[test]
fn by_creating_it_exclusively() {
    let mut tree = Lost::new();
    let (holder, _) = Agent::holding(&tree.claim("k"));
    tree.lose_and_mount();
    let other = Agent::new();
    assert_eq!(other.create(&tree.claim("k")), Err(Errno::EEXIST));
    // To everything but the exclusive create the file is there.
    assert!(holder.call("stat", json!([tree.claim("k")])).is_ok());
    assert_eq!(holder.epoch(holder.open(&tree.claim("k"), libc::O_RDONLY).expect("there")), Ok(1));
    let new = holder.create(&tree.claim("k")).expect("its own");
    assert_eq!(holder.epoch(new), Ok(1));
    assert_eq!(tree.state_of("k"), "held");
    assert_eq!(other.create(&tree.claim("k")), Err(Errno::EEXIST));
    assert_eq!(holder.create(&tree.claim("k")), Err(Errno::EEXIST), "once");
    holder.close(new);
    assert_eq!(other.epoch(other.create(&tree.claim("k")).expect("free")), Ok(2));
    tree.verify();
}

#[test]
fn a_lock_comes_back_by_create_and_a_create_by_lock() {
    let mut tree = Lost::new();
    let holder = Agent::new();
    let locked = holder.handle(&tree.claim("locked"));
    holder.flock(locked, libc::LOCK_EX).expect("free");
    holder.create(&tree.claim("created")).expect("free");
    tree.lose_and_mount();

    let created = holder.create(&tree.claim("locked")).expect("its own");
    assert_eq!(tree.status("locked")["via"], "create");
    holder.flock(created, libc::LOCK_UN).expect("unlock");
    assert_eq!(tree.state_of("locked"), "free");
    let locked = holder.handle(&tree.claim("created"));
    holder.lock(locked, libc::F_SETLK, libc::F_WRLCK).expect("its own");
    assert_eq!(tree.status("created")["via"], "lock");
    assert_eq!(tree.status("created")["epoch"], 1);
    holder.lock(locked, libc::F_SETLK, libc::F_UNLCK).expect("unlock");
    assert_eq!(tree.state_of("created"), "free");
    tree.verify();
}

#[test]
fn before_anybody_in_line() {
    let mut tree = Lost::new();
    let holder = Agent::new();
    let old = holder.handle(&tree.claim("k"));
    holder.flock(old, libc::LOCK_EX).expect("free");
    tree.lose_and_mount();
    let waiter = Agent::new();
    let fd = waiter.handle(&tree.claim("k"));
    waiter.begin_flock(fd, libc::LOCK_EX);
    tree.wait_status("k", "one waits", |status| status["waiters"] == 1);
    let new = holder.handle(&tree.claim("k"));
    holder.flock(new, libc::LOCK_EX).expect("its own");
    assert_eq!(holder.epoch(new), Ok(1));
    assert_eq!(tree.status("k")["waiters"], 1);
    holder.close(new);
    waiter.answer().expect("its turn");
    assert_eq!(waiter.epoch(fd), Ok(2));
}

/// It has the old handle open until it has the new one: without any the attempt is proven to be over.
#[test]
fn a_shell_whose_flock_command_is_gone() {
    let mut tree = Lost::new();
    let script = "
exec 9<>$M/claims/k; flock -n 9; read -r epoch <&9; echo $epoch
read -r go
exec 8<>$M/claims/k; flock -n 8 || echo refused; read -r epoch <&8; echo $epoch
read -r end
";
    let mut shell = Script::start(&tree, script);
    assert_eq!(shell.line().as_deref(), Some("1"));
    tree.lose_and_mount();
    shell.say("go");
    assert_eq!(shell.line().as_deref(), Some("1"), "the same attempt");
    assert_eq!(tree.state_of("k"), "held");
}

#[test]
fn its_result_is_recorded_under_the_same_epoch() {
    let mut tree = Lost::new();
    let (holder, _) = Agent::holding(&tree.claim("k"));
    tree.lose_and_mount();
    let new = holder.create(&tree.claim("k")).expect("its own");
    let result = holder.open(&tree.result("k", 1), libc::O_WRONLY | libc::O_CREAT).expect("its result");
    holder.write(result, "done").expect("written");
    holder.fsync(result).expect("committed");
    holder.close(result);
    holder.close(new);
    assert_eq!(tree.state_of("k"), "finished");
    let shown = tree.leasefs(&["status", "k"]);
    assert_ok(&shown);
    assert!(stdout(&shown).contains("finished"), "{}", stdout(&shown));
    tree.verify();
}

#[test]
fn a_child_that_only_inherited_the_handle_is_another_process() {
    let mut tree = Lost::new();
    let (holder, _) = Agent::holding(&tree.claim("k"));
    let child = holder.fork();
    tree.lose_and_mount();
    assert_eq!(child.create(&tree.claim("k")), Err(Errno::EEXIST));
    let fd = child.handle(&tree.claim("k"));
    assert_eq!(child.flock(fd, LOCK_NOW), Err(Errno::EWOULDBLOCK));
    holder.create(&tree.claim("k")).expect("its own");
}
