//! SIGKILL of a holder and of waiters in every combination leaves the line right.

use libc::LOCK_EX;

use crate::common::Mount;
use crate::common::agent::{Agent, Fd, count};

/// A holder and three in line, each seen there before the next came.
fn line(mount: &Mount, key: &str) -> Vec<(Agent, Fd)> {
    let mut line = Vec::new();
    for place in 0..4u64 {
        let agent = Agent::new();
        let fd = agent.handle(&mount.claim(key));
        agent.begin_flock(fd, LOCK_EX);
        if place == 0 {
            agent.answer().expect("free key");
        } else {
            mount.wait_status(key, "its place", |status| count(status, "waiters") == place);
        }
        line.push((agent, fd));
    }
    line
}

/// Every subset of the four, in every order of killing.
fn killings() -> Vec<Vec<usize>> {
    let mut all: Vec<Vec<usize>> = vec![Vec::new()];
    let mut last = 0;
    while last < all.len() {
        let done = all[last].clone();
        all.extend((0..4).filter(|who| !done.contains(who)).map(|who| [done.as_slice(), &[who]].concat()));
        last += 1;
    }
    all
}

#[test]
fn every_order_of_killing_the_holder_and_its_waiters_leaves_the_line_right() {
    let mount = Mount::new();
    let killings = killings();
    assert_eq!(killings.len(), 1 + 4 + 12 + 24 + 24);
    for (number, killed) in killings.iter().enumerate() {
        let key = format!("k{number}");
        let line = line(&mount, &key);
        // What is expected: who is alive, in order, and the epochs that were told.
        let mut alive: Vec<usize> = (0..4).collect();
        let mut epoch = 1;
        for who in killed {
            let held_it = alive[0] == *who;
            line[*who].0.kill();
            alive.retain(|other| other != who);
            let context = format!("killed {killed:?}, at {who}");
            if held_it && !alive.is_empty() {
                line[alive[0]].0.answer().unwrap_or_else(|e| panic!("{context}: {e}"));
                epoch += 1;
                assert_eq!(line[alive[0]].0.epoch(line[alive[0]].1), Ok(epoch), "{context}");
            }
            let waiting = alive.len().saturating_sub(1) as u64;
            mount.wait_status(&key, &context, |status| count(status, "waiters") == waiting);
            assert_eq!(mount.status(&key)["epoch"], epoch, "{context}: the dead take no epoch");
        }
        // The survivors are served in the order in which they came.
        while let Some((first, rest)) = alive.split_first() {
            let (agent, fd) = &line[*first];
            assert_eq!(agent.epoch(*fd), Ok(epoch), "killed {killed:?}, {first} holds");
            assert!(
                rest.iter().all(|who| line[*who].0.answer_within(std::time::Duration::ZERO).is_none()),
                "two holders"
            );
            agent.close(*fd);
            if let Some(next) = rest.first() {
                line[*next].0.answer().unwrap_or_else(|e| panic!("killed {killed:?}, next {next}: {e}"));
                epoch += 1;
            }
            alive.remove(0);
        }
        let status = mount.status(&key);
        assert_eq!(
            (status["state"].as_str(), status["epoch"].as_u64()),
            (Some("free"), Some(epoch)),
            "killed {killed:?}"
        );
    }
    mount.verify();
}

#[test]
fn all_killed_at_once_leave_a_free_key() {
    let mount = Mount::new();
    for round in 1..=10 {
        let line = line_of_twenty(&mount);
        for (agent, _) in &line {
            agent.signal(nix::sys::signal::Signal::SIGKILL);
        }
        for (agent, _) in &line {
            agent.wait_end();
        }
        mount.wait_status("k", "nobody is left", |status| status["state"] == "free" && count(status, "waiters") == 0);
        // Some may have been granted before their own signal; whatever the number, there is no gap.
        let last = mount.status("k")["epoch"].as_u64().expect("epoch");
        let next = Agent::new();
        let fd =
            next.create(&mount.claim("k")).unwrap_or_else(|e| panic!("round {round}: a phantom holds the key: {e}"));
        assert_eq!(next.epoch(fd), Ok(last + 1));
    }
    mount.verify();
}

fn line_of_twenty(mount: &Mount) -> Vec<(Agent, Fd)> {
    let holder = Agent::new();
    let fd = holder.create(&mount.claim("k")).expect("free key");
    let mut line = vec![(holder, fd)];
    for place in 1..20u64 {
        let agent = Agent::new();
        let fd = agent.handle(&mount.claim("k"));
        agent.begin_flock(fd, LOCK_EX);
        mount.wait_status("k", "its place", |status| count(status, "waiters") == place);
        line.push((agent, fd));
    }
    line
}

#[test]
fn a_waiter_killed_at_the_moment_of_its_grant_passes_the_key_on() {
    let mount = Mount::new();
    let path = mount.claim("k");
    for round in 0..60 {
        let (holder, doomed, last) = (Agent::new(), Agent::new(), Agent::new());
        let fd = holder.create(&path).unwrap_or_else(|e| panic!("round {round}: {e}"));
        let first = mount.status("k")["epoch"].as_u64().expect("epoch");
        let handles = [doomed.handle(&path), last.handle(&path)];
        doomed.begin_flock(handles[0], LOCK_EX);
        mount.wait_status("k", "the doomed waits", |status| count(status, "waiters") == 1);
        last.begin_flock(handles[1], LOCK_EX);
        mount.wait_status("k", "the last waits", |status| count(status, "waiters") == 2);
        // Close and kill as near to each other as two system calls can be, in both orders.
        if round % 2 == 0 {
            holder.begin("close", serde_json::json!([fd]));
            doomed.signal(nix::sys::signal::Signal::SIGKILL);
            holder.answer().expect("close");
        } else {
            doomed.signal(nix::sys::signal::Signal::SIGKILL);
            holder.close(fd);
        }
        doomed.wait_end();
        last.answer().unwrap_or_else(|e| panic!("round {round}: {e}"));
        let epoch = last.epoch(handles[1]).expect("holder");
        assert!(epoch == first + 1 || epoch == first + 2, "round {round}: epoch {epoch} after {first}");
        last.close(handles[1]);
    }
    mount.verify();
}

#[test]
fn a_holder_that_exits_without_closing_passes_the_key_on() {
    let mount = Mount::new();
    let line = line(&mount, "k");
    for (place, (agent, fd)) in line.iter().enumerate() {
        if place > 0 {
            agent.answer().expect("its turn");
        }
        assert_eq!(agent.epoch(*fd), Ok(place as u64 + 1));
        agent.exit();
    }
    assert_eq!(mount.state_of("k"), "free");
}
