//! A shared lock outlives its connection as a lease does: whoever has one may be at work all the same.

use std::time::{Duration, Instant};

use nix::errno::Errno;

use crate::common::agent::{Agent, Answer, Fd, count};
use crate::common::luck::{in_luck, longer, shown};
use crate::common::{stdout, wait_for};
use crate::lost::{Lost, ON_ITS_WAY, SOON, can_see_everybody};

const EXCLUSIVE: i32 = libc::LOCK_EX | libc::LOCK_NB;
const SHARED: i32 = libc::LOCK_SH | libc::LOCK_NB;

fn sharer(tree: &Lost, key: &str) -> (Agent, Fd) {
    let agent = Agent::new();
    let fd = agent.handle(&tree.claim(key));
    agent.flock(fd, SHARED).expect("free");
    (agent, fd)
}

/// What another is told who asks for it exclusively, by either form, and then for a shared lock; and its state after that.
type Answers = (Answer<()>, Answer<Fd>, Answer<()>, String);

fn ask(tree: &Lost, key: &str) -> Answers {
    let other = Agent::new();
    let fd = other.handle(&tree.claim(key));
    let exclusive = (other.flock(fd, EXCLUSIVE), other.create(&tree.claim(key)));
    let shared = other.flock(fd, SHARED);
    other.flock(fd, libc::LOCK_UN).expect("unlock");
    (exclusive.0, exclusive.1, shared, tree.state_of(key))
}

/// Nobody gets it exclusively, by either form; others may share it.
fn kept() -> Answers {
    (Err(Errno::EWOULDBLOCK), Err(Errno::EEXIST), Ok(()), "shared".to_owned())
}

fn assert_kept(tree: &Lost, key: &str) {
    assert_eq!(ask(tree, key), kept(), "{key}");
}

fn wait_free(tree: &Lost, key: &str) {
    let agent = Agent::new();
    let mut held = None;
    wait_for("the key is free", || {
        held = agent.create(&tree.claim(key)).ok();
        held.is_some()
    });
    assert_eq!(agent.epoch(held.expect("held")), Ok(1), "shared locks take no number");
}

#[test]
fn it_keeps_exclusive_claims_out_until_every_holder_is_dead() {
    let mut tree = Lost::new();
    let (first, _) = sharer(&tree, "k");
    let (second, _) = sharer(&tree, "k");
    tree.lose_and_mount();
    assert_eq!(count(&tree.status("k"), "sharers"), 2);
    tree.wait_why("k", "still has it open");
    assert_kept(&tree, "k");
    let row = stdout(&tree.leasefs(&["ls"]));
    assert!(row.contains("shared") && row.contains("still has it open"), "{row}");
    first.kill();
    tree.wait_why("k", &format!("pid {} (", second.pid()));
    assert_kept(&tree, "k");
    second.kill();
    wait_free(&tree, "k");
    tree.verify();
}

#[test]
fn a_dead_sharers_key_is_free_at_once() {
    let _none = ON_ITS_WAY.read();
    in_luck("it was free late", |_| {
        let mut tree = Lost::new();
        let (dead, _) = sharer(&tree, "k");
        tree.lose_connection();
        dead.kill();
        tree.start(&[]);
        let began = Instant::now();
        wait_free(&tree, "k");
        (began.elapsed() < SOON).then_some(())
    });
}

#[test]
fn whoever_waits_for_it_gets_it_when_the_sharer_is_dead() {
    let mut tree = Lost::new();
    let (alive, _) = sharer(&tree, "k");
    // A second key keeps the dead tree in use, so that it takes a look through /proc.
    let (other, _) = sharer(&tree, "other");
    tree.lose_and_mount();
    let waiter = Agent::new();
    let fd = waiter.handle(&tree.claim("k"));
    waiter.begin_flock(fd, libc::LOCK_EX);
    tree.wait_status("k", "one waits", |status| status["waiters"] == 1);
    tree.wait_why("k", &format!("pid {} (", alive.pid()));
    alive.kill();
    if !can_see_everybody() {
        other.kill();
    }
    waiter.answer().expect("its turn");
    assert_eq!(waiter.epoch(fd), Ok(1));
}

#[test]
fn its_own_process_has_it_back() {
    let mut tree = Lost::new();
    let (shares_again, _) = sharer(&tree, "shared");
    let (upgrades, _) = sharer(&tree, "upgraded");
    let (creates, _) = sharer(&tree, "created");
    tree.lose_and_mount();
    let fd = shares_again.handle(&tree.claim("shared"));
    shares_again.flock(fd, SHARED).expect("its own");
    assert_eq!(count(&tree.status("shared"), "sharers"), 1, "in place of the old one");
    assert!(tree.status("shared")["orphaned_why"].is_null());
    shares_again.flock(fd, libc::LOCK_UN).expect("unlock");
    wait_free(&tree, "shared");
    let fd = upgrades.handle(&tree.claim("upgraded"));
    upgrades.flock(fd, EXCLUSIVE).expect("only its own is in the way");
    assert_eq!(upgrades.epoch(fd), Ok(1));
    let fd = creates.create(&tree.claim("created")).expect("only its own is in the way");
    assert_eq!(creates.epoch(fd), Ok(1));
    tree.verify();
}

#[test]
fn the_ttl_ends_it_counted_from_the_loss() {
    in_luck("the machine stood still for the TTL", |attempt| {
        let ttl = longer(Duration::from_millis(1500), attempt);
        let mut tree = Lost::with(&["--ttl", &shown(ttl)]);
        let (_alive, _) = sharer(&tree, "k");
        // So that it makes a difference what it is counted from.
        let shared = Instant::now();
        wait_for("a part of the TTL passes", || shared.elapsed() >= ttl / 4);
        let before = Instant::now();
        tree.lose_and_mount();
        let told = ask(&tree, "k");
        if before.elapsed() >= ttl {
            return None;
        }
        assert_eq!(told, kept());
        wait_free(&tree, "k");
        assert!(before.elapsed() >= ttl, "{:?}", before.elapsed());
        Some(())
    });
}

#[test]
fn a_second_loss_and_a_new_server_keep_it() {
    let mut tree = Lost::new();
    let (alive, _) = sharer(&tree, "k");
    tree.lose_and_mount();
    tree.lose_and_mount();
    let server = tree.server_pid().expect("a server");
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(server), nix::sys::signal::Signal::SIGKILL).expect("it is there");
    wait_for("the next server", || tree.server_pid().is_some_and(|pid| pid != server));
    assert_kept(&tree, "k");
    alive.kill();
    wait_free(&tree, "k");
}

#[test]
fn an_orderly_end_leaves_none() {
    let mut tree = Lost::new();
    let (agent, fd) = sharer(&tree, "k");
    agent.close(fd);
    tree.lose_and_mount();
    wait_free(&tree, "k");
}
