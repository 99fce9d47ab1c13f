//! `ENOLCK`: limits on the waiters and the keys of one user.

use libc::{F_SETLKW, F_WRLCK, LOCK_EX, LOCK_NB, LOCK_SH};
use nix::errno::Errno;

use crate::common::Mount;
use crate::common::agent::{Agent, Fd, count};

#[test]
fn one_waiter_too_many_is_told_enolck_and_the_line_goes_on() {
    let mount = Mount::with(&["--allow-other", "--max-waiters", "3"]);
    let path = mount.claim("k");
    let holder = Agent::new();
    let held = holder.create(&path).expect("free key");
    let mut line: Vec<(Agent, Fd)> = Vec::new();
    for place in 1..=3 {
        let agent = Agent::new();
        let fd = agent.handle(&path);
        agent.begin_flock(fd, LOCK_EX);
        mount.wait_status("k", "its place", |status| count(status, "waiters") == place);
        line.push((agent, fd));
    }
    let late = Agent::new();
    let fd = late.handle(&path);
    assert_eq!(late.flock(fd, LOCK_EX), Err(Errno::ENOLCK));
    assert_eq!(late.flock(fd, LOCK_SH), Err(Errno::ENOLCK));
    assert_eq!(late.lock(fd, F_SETLKW, F_WRLCK), Err(Errno::ENOLCK));
    assert_eq!(late.flock(fd, LOCK_EX | LOCK_NB), Err(Errno::EAGAIN), "who does not wait is no waiter");
    // The limit is per user.
    let user = Agent::user(12_001, 12_001, &[]);
    let handle = user.open(&path, libc::O_RDWR).expect("0666");
    user.begin_flock(handle, LOCK_EX);
    mount.wait_status("k", "another user waits", |status| count(status, "waiters") == 4);
    // One place is free again.
    line[2].0.kill();
    mount.wait_status("k", "one is gone", |status| count(status, "waiters") == 3);
    late.begin_flock(fd, LOCK_EX);
    mount.wait_status("k", "the late one waits", |status| count(status, "waiters") == 4);
    holder.close(held);
    let survivors = [(&line[0].0, line[0].1), (&line[1].0, line[1].1), (&user, handle), (&late, fd)];
    for (place, (agent, fd)) in survivors.into_iter().enumerate() {
        agent.answer().expect("its turn");
        assert_eq!(agent.epoch(fd), Ok(place as u64 + 2), "the refusals took no epoch");
        agent.close(fd);
    }
}

#[test]
fn one_key_too_many_is_told_enolck_until_another_is_given_back() {
    let mount = Mount::with(&["--allow-other", "--max-keys", "5"]);
    let agent = Agent::new();
    let held: Vec<Fd> = (0..5).map(|n| agent.create(&mount.claim(&format!("k{n}"))).expect("free key")).collect();
    let other = Agent::new();
    assert_eq!(agent.create(&mount.claim("one-more")), Err(Errno::ENOLCK));
    assert_eq!(other.create(&mount.claim("one-more")), Err(Errno::ENOLCK), "per user, not per process");
    let refused = other.handle(&mount.claim("one-more"));
    assert_eq!(other.flock(refused, LOCK_EX | LOCK_NB), Err(Errno::ENOLCK));
    assert_eq!(other.flock(refused, LOCK_EX), Err(Errno::ENOLCK));
    assert_eq!(mount.state_of("one-more"), "free", "nothing was granted");
    let user = Agent::user(12_001, 12_001, &[]);
    let fd = user.create(&mount.claim("one-more")).expect("another user");
    assert_eq!(user.epoch(fd), Ok(1), "the refusals took no epoch");
    user.close(fd);
    agent.close(held[2]);
    assert_eq!(other.flock(refused, LOCK_EX | LOCK_NB), Ok(()));
    assert_eq!(other.epoch(refused), Ok(2));
    assert_eq!(agent.flock(held[0], LOCK_EX), Ok(()), "a renewal is no further key");
}

#[test]
fn whoever_may_hold_no_more_by_its_turn_is_told_enolck_and_the_next_gets_the_key() {
    let mount = Mount::with(&["--allow-other", "--max-keys", "2"]);
    let user = |group| Agent::user(12_001, group, &[]);
    let path = mount.claim("k");
    let holder = Agent::new();
    let held = holder.create(&path).expect("free key");
    let wait = |agent: &Agent, place: u64| {
        let fd = agent.open(&path, libc::O_RDWR).expect("0666");
        agent.begin_flock(fd, LOCK_EX);
        mount.wait_status("k", "its place", |status| count(status, "waiters") == place);
        fd
    };
    let (first, second, last) = (user(12_001), user(12_001), Agent::user(12_002, 12_002, &[]));
    wait(&first, 1);
    wait(&second, 2);
    let handle = wait(&last, 3);
    // Meanwhile it takes as many as it may; standing in line is no holding.
    let busy = user(12_001);
    let others: Vec<Fd> = ["a", "b"].into_iter().map(|key| busy.create(&mount.claim(key)).expect("free key")).collect();
    holder.close(held);
    for refused in [first, second] {
        assert_eq!(refused.answer(), Err(Errno::ENOLCK));
    }
    last.answer().expect("the next one's turn");
    assert_eq!(last.epoch(handle), Ok(2), "the refusals took no epoch");
    // Whoever waits for a key of its own user's holds no more by getting it.
    let next = user(12_001);
    let fd = next.open(&mount.claim("a"), libc::O_RDWR).expect("0666");
    next.begin_flock(fd, LOCK_EX);
    mount.wait_status("a", "in line", |status| count(status, "waiters") == 1);
    busy.close(others[0]);
    next.answer().expect("two keys as before");
    assert_eq!(next.epoch(fd), Ok(2));
    mount.verify();
}
