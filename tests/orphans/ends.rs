//! Other ways a connection is lost, and other ways an orphaned lease ends.

use std::fs;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::mount::{MntFlags, umount2};

use crate::common::agent::{Agent, has_ended};
use crate::common::luck::{in_luck, longer, shown};
use crate::common::{assert_ok, wait_for};
use crate::lost::Lost;

/// The connection was cut under a living server: it ends, and the next mount finds what was held.
fn assert_kept(mut tree: Lost, holder: &Agent, [keeper, server]: [i32; 2]) {
    for pid in [server, keeper] {
        wait_for("the server's end, and its keeper's", || has_ended(pid));
    }
    let old = holder.handle_of("k");
    assert_eq!(holder.read(old), Err(Errno::ENOTCONN));
    tree.start(&[]);
    tree.wait_why("k", &format!("pid {} (", holder.pid()));
    tree.assert_refused("k");
    assert_eq!(holder.epoch(holder.create(&tree.claim("k")).expect("its own")), Ok(1));
}

fn processes(tree: &Lost) -> [i32; 2] {
    [tree.keeper_pid().expect("a keeper"), tree.server_pid().expect("a server")]
}

/// An agent's first descriptor of a key.
trait HandleOf {
    fn handle_of(&self, key: &str) -> i64;
}

impl HandleOf for Agent {
    fn handle_of(&self, key: &str) -> i64 {
        let source = "
fds = [int(fd) for fd in os.listdir('/proc/self/fd')]
result = next(fd for fd in fds if os.path.exists(f'/proc/self/fdinfo/{fd}') and f'/{key}' in os.readlink(f'/proc/self/fd/{fd}'))
";
        self.script(source, serde_json::json!({ "key": key })).expect("open").as_i64().expect("a descriptor")
    }
}

#[test]
fn an_abort() {
    let tree = Lost::new();
    let (holder, _) = Agent::holding(&tree.claim("k"));
    let processes = processes(&tree);
    fs::write(tree.abort_file(), "1").expect("aborted");
    assert_kept(tree, &holder, processes);
}

#[test]
fn a_forced_unmount() {
    let tree = Lost::new();
    let (holder, _) = Agent::holding(&tree.claim("k"));
    let processes = processes(&tree);
    // It cuts the connection, and then cannot unmount what is in use.
    let _ = umount2(&tree.root(), MntFlags::MNT_FORCE);
    assert_kept(tree, &holder, processes);
}

#[test]
fn the_ttl_ends_it() {
    let (tree, holder) = in_luck("the machine stood still for the TTL", |attempt| {
        let ttl = longer(Duration::from_millis(1500), attempt);
        let mut tree = Lost::with(&["--ttl", &shown(ttl)]);
        let began = Instant::now();
        let (holder, _) = Agent::holding(&tree.claim("k"));
        tree.lose_and_mount();
        let state = tree.state_of("k");
        if began.elapsed() >= ttl {
            return None;
        }
        assert_eq!(state, "orphaned");
        Some((tree, holder))
    });
    tree.wait_status("k", "expired", |status| status["state"] == "free" && status["outcome"] == "expired");
    assert!(tree.status("k")["orphaned_why"].is_null());
    let fd = holder.handle(&tree.claim("k"));
    holder.flock(fd, libc::LOCK_EX | libc::LOCK_NB).expect("free");
    assert_eq!(holder.epoch(fd), Ok(2), "what expired does not come back");
}

#[test]
fn an_operator_ends_it() {
    let mut tree = Lost::new();
    let (holder, _) = Agent::holding(&tree.claim("k"));
    tree.lose_and_mount();
    tree.wait_why("k", "still has it open");
    assert_ok(&tree.leasefs(&["evict", "k", "--epoch", "1"]));
    assert_eq!(tree.status("k")["outcome"], "evicted");
    assert_eq!(holder.epoch(holder.create(&tree.claim("k")).expect("free")), Ok(2));
    tree.verify();
}

#[test]
fn nothing_looks_through_proc_without_orphans() {
    let mut tree = Lost::new();
    let (holder, _) = Agent::holding(&tree.claim("k"));
    tree.lose_and_mount();
    let server = tree.server_pid().expect("a server");
    let looks = || {
        let tasks = fs::read_dir(format!("/proc/{server}/task")).expect("threads");
        let names = tasks.filter_map(|task| fs::read_to_string(task.ok()?.path().join("comm")).ok());
        names.into_iter().any(|name| name.trim_end() == "orphans")
    };
    wait_for("the thread that looks has its name", looks);
    holder.create(&tree.claim("k")).expect("its own");
    wait_for("the end of the thread that looks", || !looks());
}
