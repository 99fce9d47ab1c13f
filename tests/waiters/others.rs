//! While many wait, the rest of the tree goes on.

use std::fs;
use std::time::{Duration, Instant};

use libc::LOCK_EX;
use serde_json::json;

use crate::common::agent::{Agent, Fd, count};
use crate::common::{Mount, assert_ok};

const WAITERS: u64 = 100;

/// A held key with many in line.
fn crowd(mount: &Mount) -> (Agent, Vec<(Agent, Fd)>) {
    let path = mount.claim("crowded");
    let holder = Agent::new();
    holder.create(&path).expect("free key");
    let line: Vec<(Agent, Fd)> = (0..WAITERS)
        .map(|_| {
            let agent = Agent::new();
            let fd = agent.handle(&path);
            agent.begin_flock(fd, LOCK_EX);
            (agent, fd)
        })
        .collect();
    mount.wait_status("crowded", "all wait", |status| count(status, "waiters") == WAITERS);
    (holder, line)
}

#[test]
fn ls_stat_and_claims_of_other_keys_go_on_while_a_hundred_wait() {
    let mount = Mount::new();
    let (_holder, _line) = crowd(&mount);
    let agent = Agent::new();
    let start = Instant::now();
    let cycles = agent
        .script(
            "result = 0\nfor n in range(300):\n  fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)\n  os.write(fd, b'note'); os.stat(path); os.listdir(claims); os.close(fd)\n  result += 1",
            json!({ "path": mount.claim("other"), "claims": mount.root().join("claims") }),
        )
        .expect("claims go on");
    assert_eq!(cycles, 300);
    assert!(start.elapsed() < Duration::from_secs(60), "300 cycles took {:?}", start.elapsed());
    let start = Instant::now();
    assert_ok(&mount.bash("ls -la $M/claims $M/status $M/results && stat $M/claims/crowded && cat $M/claims/crowded $M/status/crowded && df $M"));
    assert_ok(&mount.bash(
        "flock -n $M/claims/third true && (set -C; exec 9>$M/claims/fourth) && flock -n -s $M/claims/fifth true",
    ));
    assert_ok(&mount.leasefs(&["ls"]));
    assert!(start.elapsed() < Duration::from_secs(60), "{:?}", start.elapsed());
    assert_eq!(count(&mount.status("crowded"), "waiters"), WAITERS, "they all wait still");
}

#[test]
fn the_holder_of_a_crowded_key_can_go_on_with_its_work() {
    let mount = Mount::new();
    let path = mount.claim("crowded");
    let holder = Agent::new();
    let held = holder.create(&path).expect("free key");
    let waiter = Agent::new();
    let fd = waiter.handle(&path);
    waiter.begin_flock(fd, LOCK_EX);
    mount.wait_status("crowded", "one waits", |status| count(status, "waiters") == 1);
    for beat in 0..50 {
        holder.write(held, &format!("beat {beat}")).expect("holder");
        assert_eq!(mount.status("crowded")["note"], format!("beat {beat}"));
    }
    let draft = holder.handle(&mount.result("crowded", 1));
    holder.write(draft, "done").expect("registered attempt");
    holder.close(draft);
    assert_eq!(fs::read_to_string(mount.result("crowded", 1)).expect("committed"), "done");
    assert_eq!(waiter.answer_within(Duration::from_millis(50)), None, "committed, but still held");
    holder.close(held);
    waiter.answer().expect("its turn");
    assert_eq!(waiter.epoch(fd), Ok(2));
}

#[test]
fn a_crowd_can_be_sent_home() {
    let mount = Mount::new();
    let (holder, line) = crowd(&mount);
    let start = Instant::now();
    for (agent, _) in &line {
        agent.signal(nix::sys::signal::Signal::SIGTERM);
    }
    for (agent, _) in &line {
        agent.wait_end();
    }
    assert!(start.elapsed() < Duration::from_secs(60), "{WAITERS} waiters took {:?} to end", start.elapsed());
    mount.wait_status("crowded", "nobody waits", |status| count(status, "waiters") == 0);
    assert_eq!(mount.status("crowded")["epoch"], 1);
    drop(holder);
    assert_eq!(mount.state_of("crowded"), "free");
}
