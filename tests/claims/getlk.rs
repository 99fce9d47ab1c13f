//! `F_GETLK` and part-file ranges: what programs ask before they lock, and what no lease can be.

use libc::{F_GETLK, F_OFD_GETLK, F_OFD_SETLK, F_OFD_SETLKW, F_RDLCK, F_SETLK, F_SETLKW, F_UNLCK, F_WRLCK, LOCK_SH};
use nix::errno::Errno;
use serde_json::json;

use crate::common::Mount;
use crate::common::agent::Agent;

#[test]
fn getlk_names_the_holder_whichever_form_it_used() {
    let mount = Mount::new();
    let path = mount.claim("k");
    let other = Agent::new();
    let handle = other.handle(&path);
    for form in ["create", "flock", "posix", "ofd"] {
        let holder = Agent::new();
        let fd = match form {
            "create" => holder.create(&path).expect("free key"),
            _ => holder.handle(&path),
        };
        match form {
            "create" => {}
            "flock" => holder.flock(fd, libc::LOCK_EX).expect("free key"),
            "posix" => drop(holder.lock(fd, F_SETLK, F_WRLCK).expect("free key")),
            _ => drop(holder.lock(fd, F_OFD_SETLK, F_WRLCK).expect("free key")),
        }
        let found = other.lock(handle, F_GETLK, F_RDLCK).expect("F_GETLK");
        assert_eq!(found["type"], F_WRLCK, "a lease by {form} is a write lock: {found}");
        assert_eq!(found["pid"], holder.pid(), "{form}: {found}");
        assert_eq!((found["start"].as_i64(), found["len"].as_i64()), (Some(0), Some(0)), "over the whole file");
        assert_eq!(other.lock(handle, F_OFD_GETLK, F_WRLCK).expect("F_OFD_GETLK")["type"], F_WRLCK, "{form}");
        holder.close(fd);
        assert_eq!(other.lock(handle, F_GETLK, F_WRLCK).expect("F_GETLK")["type"], F_UNLCK, "free after {form}");
    }
    assert_eq!(mount.status("k")["epoch"], 4, "asking claims nothing");
}

#[test]
fn getlk_says_that_a_share_hinders_writers_only() {
    let mount = Mount::new();
    let path = mount.claim("k");
    let (sharer, other) = (Agent::new(), Agent::new());
    let fd = sharer.handle(&path);
    sharer.flock(fd, LOCK_SH).expect("free key");
    let handle = other.handle(&path);
    assert_eq!(other.lock(handle, F_GETLK, F_WRLCK).expect("F_GETLK")["type"], F_RDLCK);
    assert_eq!(other.lock(handle, F_GETLK, F_RDLCK).expect("F_GETLK")["type"], F_UNLCK);
}

#[test]
fn a_lock_over_part_of_the_file_is_einval_and_grants_nothing() {
    let mount = Mount::new();
    let path = mount.claim("k");
    let agent = Agent::new();
    let fd = agent.handle(&path);
    for command in [F_SETLK, F_SETLKW, F_OFD_SETLK, F_OFD_SETLKW] {
        for kind in [F_WRLCK, F_RDLCK] {
            for (start, length) in [(0, 1), (0, 4096), (1, 0), (10, 10), (0, i64::MAX - 1)] {
                let answer = agent.call("lock", json!([fd, command, kind, start, length]));
                assert_eq!(answer, Err(Errno::EINVAL), "command {command} kind {kind} range {start}+{length}");
            }
        }
    }
    assert_eq!(mount.state_of("k"), "free");
    agent.lock(fd, F_SETLK, F_WRLCK).expect("the whole file");
    assert_eq!(agent.epoch(fd), Ok(1));
}

#[test]
fn a_part_file_lock_of_the_holder_is_refused_and_costs_it_nothing() {
    let mount = Mount::new();
    let agent = Agent::new();
    let fd = agent.create(&mount.claim("k")).expect("free key");
    assert_eq!(agent.call("lock", json!([fd, F_SETLK, F_WRLCK, 5, 5])), Err(Errno::EINVAL));
    assert_eq!(agent.epoch(fd), Ok(1));
    assert_eq!(mount.state_of("k"), "held");
}
