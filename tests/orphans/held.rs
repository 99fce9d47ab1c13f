//! Nothing is given to a second holder while a first may be alive, and what is proven dead is free at once.

use std::collections::BTreeSet;
use std::process::Stdio;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use serde_json::json;

use crate::common::agent::Agent;
use crate::common::luck::in_luck;
use crate::common::{InTime, assert_ok, stdout, wait_for};
use crate::lost::{Lost, ON_ITS_WAY, SOON, can_see_everybody};

/// `pid N (` of an agent, as the status names it.
fn named(agent: &Agent) -> String {
    format!("pid {} (", agent.pid())
}

/// The key stays the holder's for this reason, until the holder is dead.
fn assert_kept_until_dead(tree: &Lost, holder: &Agent, why: &str) {
    tree.wait_why("k", why);
    tree.assert_refused("k");
    holder.kill();
    assert_eq!(tree.wait_lost("k"), 2);
}

#[test]
fn whoever_may_be_alive_keeps_the_key() {
    let mut tree = Lost::with(&["--allow-other"]);
    let (alive, fd_of_alive) = Agent::holding(&tree.claim("alive"));
    let (frozen, _) = Agent::holding(&tree.claim("frozen"));
    frozen.signal(Signal::SIGSTOP);
    let other_uid = Agent::user(1234, 1234, &[]);
    other_uid.create(&tree.claim("other-uid")).expect("free");
    let locker = Agent::new();
    let fd = locker.handle(&tree.claim("locked"));
    locker.flock(fd, libc::LOCK_EX).expect("free");
    // The holder and its child are gone, the child's child has the handle.
    let (holder, _) = Agent::holding(&tree.claim("inherited"));
    let child = holder.fork();
    let grandchild = child.fork();
    holder.kill();
    child.kill();
    let inside = tree.spawn_bash(
        "exec unshare --pid --fork --kill-child bash -c 'set -C; exec 9>$M/claims/other-namespace; exec sleep 1000'",
    );
    tree.wait_status("other-namespace", "held", |status| status["state"] == "held");

    tree.lose_and_mount();
    for (key, agent) in [
        ("alive", &alive),
        ("frozen", &frozen),
        ("other-uid", &other_uid),
        ("locked", &locker),
        ("inherited", &grandchild),
    ] {
        tree.wait_why(key, &named(agent));
        tree.assert_refused(key);
    }
    tree.wait_why("other-namespace", "(sleep) still has it open");
    tree.assert_refused("other-namespace");
    assert_eq!(tree.status("alive")["holder"]["pid"], alive.pid());

    let listed = tree.leasefs(&["ls"]);
    assert_ok(&listed);
    let row = stdout(&listed).lines().find(|line| line.starts_with("inherited ")).map(str::to_owned).expect("listed");
    assert!(row.contains("orphaned") && row.ends_with("still has it open"), "{row}");
    let status = stdout(&tree.leasefs(&["status", "alive"]));
    assert!(status.contains("orphaned") && status.contains(&named(&alive)), "{status}");

    // Whoever lets go of its handle by closing it, lets go of the key: it need not die.
    alive.close(fd_of_alive);
    for agent in [&frozen, &other_uid, &locker, &grandchild] {
        agent.kill();
    }
    drop(inside);
    for key in ["alive", "frozen", "other-uid", "locked", "inherited", "other-namespace"] {
        assert_eq!(tree.wait_lost(key), 2, "{key}");
    }
    assert!(alive.is_alive());
    tree.verify();
}

#[test]
fn a_dead_holders_key_is_free_at_once() {
    let _none = ON_ITS_WAY.read();
    in_luck("it was free late", |_| {
        let mut tree = Lost::new();
        let mut late = Duration::ZERO;
        for key in ["a", "b"] {
            let (holder, _) = Agent::holding(&tree.claim(key));
            tree.lose_connection();
            holder.kill();
            tree.start(&[]);
            let began = Instant::now();
            assert_eq!(tree.wait_lost(key), 2);
            late = late.max(began.elapsed());
        }
        let history = stdout(&tree.leasefs(&["history", "a"]));
        assert!(history.contains("lost"), "{history}");
        tree.verify();
        (late < SOON).then_some(())
    });
}

#[test]
fn a_dead_holder_is_told_from_a_living_one() {
    let _none = ON_ITS_WAY.read();
    in_luck("it was free late", |_| {
        let mut tree = Lost::new();
        let (dead, _) = Agent::holding(&tree.claim("dead"));
        let (alive, _) = Agent::holding(&tree.claim("alive"));
        tree.lose_connection();
        dead.kill();
        tree.start(&[]);
        let began = Instant::now();
        let mut late = Duration::ZERO;
        if can_see_everybody() {
            assert_eq!(tree.wait_lost("dead"), 2);
            late = began.elapsed();
        } else {
            tree.wait_why("dead", "cannot be looked into: Permission denied");
            tree.assert_refused("dead");
        }
        tree.wait_why("alive", &named(&alive));
        tree.assert_refused("alive");
        alive.kill();
        assert_eq!(tree.wait_lost("alive"), 2);
        (late < SOON).then_some(())
    });
}

#[test]
fn a_holder_that_closes_its_dead_handle_has_let_go() {
    let mut tree = Lost::new();
    let (holder, fd) = Agent::holding(&tree.claim("k"));
    tree.lose_and_mount();
    tree.wait_why("k", &named(&holder));
    holder.close(fd);
    assert_eq!(tree.wait_lost("k"), 2);
    assert!(holder.is_alive());
}

#[test]
fn a_thread_with_a_table_of_its_own_keeps_the_key() {
    let mut tree = Lost::new();
    let (holder, fd) = Agent::holding(&tree.claim("k"));
    // The thread takes copies of all descriptors with it; the rest of the process closes this one.
    let source = "
import threading
apart = threading.Event()
def keep():
    assert LIBC.unshare(0x400) == 0
    apart.set()
    time.sleep(3600)
threading.Thread(target=keep, daemon=True).start()
apart.wait()
os.close(fd)
";
    holder.script(source, json!({ "fd": fd })).expect("a thread");
    tree.lose_and_mount();
    assert_kept_until_dead(&tree, &holder, &named(&holder));
}

#[test]
fn a_handle_in_a_socket_keeps_the_key() {
    let _alone = ON_ITS_WAY.write();
    let mut tree = Lost::new();
    let (holder, fd) = Agent::holding(&tree.claim("k"));
    let source = "
MAILBOXES['pair'] = socket.socketpair()
socket.send_fds(MAILBOXES['pair'][0], [b'fd'], [fd])
os.close(fd)
";
    holder.script(source, json!({ "fd": fd })).expect("sent");
    tree.lose_and_mount();
    assert_kept_until_dead(&tree, &holder, "on its way through a socket of pid");
}

#[test]
fn a_handle_in_a_connection_that_nobody_accepted_keeps_the_key() {
    let _alone = ON_ITS_WAY.write();
    let mut tree = Lost::new();
    let (holder, fd) = Agent::holding(&tree.claim("k"));
    let source = "
MAILBOXES[name] = socket.socket(socket.AF_UNIX)
MAILBOXES[name].bind(chr(0) + name)
MAILBOXES[name].listen(1)
with socket.socket(socket.AF_UNIX) as sender:
    sender.connect(chr(0) + name)
    socket.send_fds(sender, [b'fd'], [fd])
os.close(fd)
";
    let name = format!("leasefs-orphans-{}", holder.pid());
    holder.script(source, json!({ "fd": fd, "name": name })).expect("sent");
    tree.lose_and_mount();
    assert_kept_until_dead(&tree, &holder, "on its way through a socket of pid");
}

#[test]
fn a_handle_that_is_passed_on_all_the_time_keeps_the_key() {
    let mut tree = Lost::new();
    // A chain of processes: each has the handle for a moment, starts the next and exits. It ends with the file.
    let chain = "
import os, sys, time
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT | os.O_EXCL)
while os.path.exists(sys.argv[2]):
    time.sleep(0.015)
    if os.fork():
        os._exit(0)
";
    let goes_on = tree.scratch().join("goes-on");
    std::fs::write(&goes_on, "").expect("written");
    // Its output is nobody's, or it would be read until the chain ends.
    let mut first = tree.command("python3");
    first.arg("-c").arg(chain).arg(tree.claim("k")).arg(&goes_on).stdout(Stdio::null()).stderr(Stdio::null());
    assert_ok(&first.output_in_time());
    tree.lose_and_mount();
    let mut seen = BTreeSet::new();
    wait_for("three of them are seen", || {
        let status = tree.status("k");
        assert_eq!(status["state"], "orphaned", "{status}");
        let why = status["orphaned_why"].as_str().unwrap_or_default();
        seen.extend(why.starts_with("pid ").then(|| why.to_owned()));
        seen.len() >= 3
    });
    std::fs::remove_file(&goes_on).expect("removed");
    assert_eq!(tree.wait_lost("k"), 2);
}

#[test]
fn a_second_loss_keeps_what_the_first_left() {
    let mut tree = Lost::new();
    let (first, _) = Agent::holding(&tree.claim("first"));
    tree.lose_and_mount();
    let (second, _) = Agent::holding(&tree.claim("second"));
    tree.lose_and_mount();
    tree.wait_why("first", &named(&first));
    tree.wait_why("second", &named(&second));
    first.kill();
    second.kill();
    for key in ["first", "second"] {
        assert_eq!(tree.wait_lost(key), 2);
    }
}

#[test]
fn a_new_server_on_a_living_connection_orphans_nothing_and_goes_on_looking() {
    let mut tree = Lost::new();
    let (lost, _) = Agent::holding(&tree.claim("lost"));
    tree.lose_and_mount();
    let (live, fd) = Agent::holding(&tree.claim("live"));
    tree.kill_server();
    assert_eq!(live.epoch(fd), Ok(1));
    assert_eq!(tree.state_of("live"), "held");
    tree.wait_why("lost", &named(&lost));
    tree.assert_refused("lost");
    lost.kill();
    assert_eq!(tree.wait_lost("lost"), 2);
    assert_eq!(live.write(fd, "still there"), Ok(11));
}

#[test]
fn what_came_back_is_not_orphaned_by_a_new_server() {
    let mut tree = Lost::new();
    let (holder, _) = Agent::holding(&tree.claim("k"));
    tree.lose_and_mount();
    let fd = holder.create(&tree.claim("k")).expect("its own");
    tree.kill_server();
    assert_eq!((tree.state_of("k").as_str(), holder.epoch(fd)), ("held", Ok(1)));
    holder.close(fd);
    assert_eq!(tree.state_of("k"), "free");
    tree.verify();
}

#[test]
fn another_trees_key_of_the_same_number_is_another_key() {
    let mut tree = Lost::new();
    let other = Lost::new();
    let (holder, _) = Agent::holding(&tree.claim("k"));
    let (_stranger, _) = Agent::holding(&other.claim("k"));
    let ino = |tree: &Lost| std::os::unix::fs::MetadataExt::ino(&std::fs::metadata(tree.claim("k")).expect("a key"));
    assert_eq!(ino(&tree), ino(&other), "they have the same number");
    tree.lose_and_mount();
    tree.wait_why("k", &named(&holder));
    holder.kill();
    assert_eq!(tree.wait_lost("k"), 2);
    assert_eq!(other.state_of("k"), "held", "the other's lease is not touched");
}
