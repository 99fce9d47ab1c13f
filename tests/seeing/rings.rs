//! Processes that wait for each other in a ring are told of wherever somebody looks.

use std::fs::{self, File};

use libc::LOCK_EX;
use serde_json::json;

use crate::common::agent::{Agent, count, sleeps_in};
use crate::common::{Background, LEASEFS, Mount, Stopped, assert_ok, wait_for};
use crate::stderr;

/// Waits until so many are in line.
fn wait_line(mount: &Mount, key: &str, length: u64) {
    mount.wait_status(key, "the line", |status| count(status, "waiters") == length);
}

/// Agents of which each holds the key of its place and waits for that of the next.
fn ring(mount: &Mount, keys: &[&str]) -> Vec<Agent> {
    let agents: Vec<Agent> = keys.iter().map(|_| Agent::new()).collect();
    for (agent, key) in agents.iter().zip(keys) {
        agent.create(&mount.claim(key)).expect("free");
    }
    for (at, agent) in agents.iter().enumerate() {
        let next = keys[(at + 1) % keys.len()];
        let handle = agent.handle(&mount.claim(next));
        agent.begin_flock(handle, LOCK_EX);
        wait_line(mount, next, 1);
    }
    agents
}

/// What each command says of a key on stderr.
fn told(mount: &Mount, key: &str) -> Vec<String> {
    let commands: [&[&str]; 4] = [&["ls"], &["top", "--batch"], &["who", key], &["status", key]];
    let say = |args: &&[&str]| {
        let output = mount.leasefs(args);
        assert_ok(&output);
        stderr(&output)
    };
    commands.iter().map(say).collect()
}

#[test]
fn two_that_wait_for_each_other() {
    let mount = Mount::new();
    let agents = ring(&mount, &["a", "b"]);
    let (one, other) = (agents[0].pid(), agents[1].pid());
    for said in told(&mount, "a") {
        let words = [
            "leasefs: deadlock: ".to_owned(),
            format!("pid {one} (python3), which has a, waits for b"),
            format!("pid {other} (python3), which has b, waits for a"),
            "`leasefs evict a --epoch 1`".to_owned(),
        ];
        assert!(words.iter().all(|word| said.contains(word)), "{said}");
        assert_eq!(said.lines().count(), 1, "{said}");
    }
    // What it says to do resolves it.
    assert_ok(&mount.leasefs(&["evict", "a", "--epoch", "1"]));
    agents[1].answer().expect("granted");
    for said in told(&mount, "b") {
        assert_eq!(said, "");
    }
}

#[test]
fn three_in_a_ring_below_a_namespace() {
    let mount = Mount::new();
    std::fs::create_dir(mount.claim("team")).expect("a namespace");
    let agents = ring(&mount, &["team/a", "team/b", "c"]);
    for said in told(&mount, "team/b") {
        let order = ["which has c, waits for team/a", "has team/a, waits for team/b", "has team/b, waits for c"];
        assert!(order.iter().all(|part| said.contains(part)), "{said}");
    }
    agents[0].kill();
    wait_line(&mount, "team/b", 0);
    for said in told(&mount, "team/b") {
        assert_eq!(said, "", "no ring any more");
    }
}

#[test]
fn a_child_that_waits_for_its_parents_key() {
    let mount = Mount::new();
    let parent = Agent::new();
    parent.create(&mount.claim("k")).expect("free");
    let child = parent.fork();
    let handle = child.handle(&mount.claim("k"));
    child.begin_flock(handle, LOCK_EX);
    wait_line(&mount, "k", 1);
    for said in told(&mount, "k") {
        assert!(
            said.contains(&format!("deadlock: k of pid {} (python3) is waited for by itself", parent.pid())),
            "{said}"
        );
    }
}

#[test]
fn a_child_with_an_inherited_handle_whose_claimer_is_gone() {
    let mount = Mount::new();
    let (claimer, other) = (Agent::new(), Agent::new());
    claimer.create(&mount.claim("a")).expect("free");
    let heir = claimer.fork();
    claimer.kill();
    other.create(&mount.claim("b")).expect("free");
    let handle = heir.handle(&mount.claim("b"));
    heir.begin_flock(handle, LOCK_EX);
    wait_line(&mount, "b", 1);
    let handle = other.handle(&mount.claim("a"));
    other.begin_flock(handle, LOCK_EX);
    wait_line(&mount, "a", 1);
    for said in told(&mount, "a") {
        assert!(said.contains("deadlock: ") && said.contains("has b, waits for a"), "{said}");
    }
}

/// Agents hold by way of a process of their own, which lets go when they end.
#[test]
fn two_agents_for_whom_keys_are_held() {
    let mount = Mount::new();
    let agents = [Agent::new(), Agent::new()];
    let keys = ["a", "b"];
    for (agent, key) in agents.iter().zip(keys) {
        let pid = agent.pid().to_string();
        assert_ok(&mount.leasefs(&["claim", key, "--agent", &format!("agent-{key}"), "--for", &pid]));
    }
    for (agent, key) in agents.iter().zip(["b", "a"]) {
        let handle = agent.handle(&mount.claim(key));
        agent.begin_flock(handle, LOCK_EX);
        wait_line(&mount, key, 1);
    }
    for said in told(&mount, "a") {
        assert!(said.contains("(leasefs), which has a, waits for b") && said.lines().count() == 1, "{said}");
    }
    agents[0].kill();
    agents[1].answer().expect("granted");
    for said in told(&mount, "a") {
        assert_eq!(said, "");
    }
}

/// Reading what an epoll waits for waits with it, and no signal ends that.
#[test]
fn one_who_cannot_be_looked_at_holds_up_nobody() {
    const WATCH: &str = "
open('/proc/self/comm', 'w').write('leasefs')
select.epoll().register(fd, select.EPOLLPRI)
result = 0
";
    let (mount, other) = (Mount::new(), Mount::new());
    let (holder, waiter) = (Agent::new(), Agent::new());
    holder.create(&mount.claim("k")).expect("free");
    assert_ok(&other.leasefs(&["run", "other", "--", "true"]));
    let status = holder.open(&other.root().join("status/other"), libc::O_RDONLY).expect("it was held");
    let handle = waiter.handle(&mount.claim("k"));
    waiter.begin_flock(handle, LOCK_EX);
    wait_line(&mount, "k", 1);
    let stopped = Stopped::these(&[other.server_pid().expect("a server")]);
    holder.begin("script", json!([WATCH, { "fd": status }]));
    wait_for("the other server is asked", || sleeps_in(holder.pid()) == "request_wait_answer");
    for said in told(&mount, "k") {
        assert_eq!(said, "");
    }
    drop(stopped);
    holder.answer().expect("the server goes on");
}

#[test]
fn a_run_that_waits_for_the_key_it_runs_under_says_so() {
    let mount = Mount::new();
    let errors = mount.scratch().join("errors");
    let mut command = mount.command(LEASEFS);
    command.args(["run", "k", "--", LEASEFS, "run", "k", "--", "true"]);
    command.stderr(File::create(&errors).expect("a file"));
    let mut run = Background(command.spawn().expect("leasefs runs"));
    wait_for("the warning", || {
        let said = fs::read_to_string(&errors).expect("text");
        said.contains("leasefs: deadlock: k of pid ") && said.contains("is waited for by itself")
    });
    run.signal("TERM");
    run.wait();
    mount.wait_status("k", "free", |status| status["state"] == "free");
}

#[test]
fn a_queue_is_no_ring() {
    let mount = Mount::new();
    let (first, second, third) = (Agent::new(), Agent::new(), Agent::new());
    first.create(&mount.claim("a")).expect("free");
    second.create(&mount.claim("b")).expect("free");
    for (agent, key, length) in [(&second, "a", 1), (&third, "a", 2)] {
        let handle = agent.handle(&mount.claim(key));
        agent.begin_flock(handle, LOCK_EX);
        wait_line(&mount, key, length);
    }
    for said in told(&mount, "a") {
        assert_eq!(said, "");
    }
}
