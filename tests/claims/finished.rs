//! A finished key: refused to do-once claims, taken up again by a lock, forgotten by `rm`.

use std::fs;
use std::os::unix::fs::chown;

use libc::{LOCK_EX, LOCK_NB, LOCK_SH};
use nix::errno::Errno;

use crate::common::agent::{Agent, Fd};
use crate::common::{Mount, assert_ok, set_mode, stdout};

/// Claims, records a result and lets go: the key is finished with this epoch.
fn finish(mount: &Mount, agent: &Agent, key: &str, lock: bool) -> u64 {
    let fd = if lock {
        let fd = agent.handle(&mount.claim(key));
        agent.flock(fd, LOCK_EX | LOCK_NB).expect("free or finished key");
        fd
    } else {
        agent.create(&mount.claim(key)).expect("free key")
    };
    let epoch = agent.epoch(fd).expect("holder");
    let draft: Fd = agent.handle(&mount.result(key, epoch));
    agent.write(draft, "done\n").expect("registered attempt");
    agent.close(draft);
    agent.close(fd);
    epoch
}

#[test]
fn a_finished_key_is_refused_to_creates_and_resumed_by_locks() {
    let mount = Mount::new();
    let path = mount.claim("k");
    let agent = Agent::new();
    assert_eq!(finish(&mount, &agent, "k", false), 1);
    let status = mount.status("k");
    assert_eq!((status["state"].as_str(), status["outcome"].as_str()), (Some("finished"), Some("completed")));
    assert!(status["holder"].is_null(), "{status}");
    assert!(path.exists(), "a finished key has a file");
    assert_eq!(agent.create(&path), Err(Errno::EEXIST));
    assert_eq!(mount.bash("set -C; { exec 9>$M/claims/k; } 2>/dev/null || exit 17").status.code(), Some(17));
    assert_eq!(mount.status("k")["epoch"], 1, "a denial takes no epoch");
    // An open without O_CREAT works, the file being there, and the lock is a new attempt.
    let fd = agent.open(&path, libc::O_RDWR).expect("finished key");
    assert_eq!(agent.flock(fd, LOCK_EX | LOCK_NB), Ok(()));
    assert_eq!(agent.epoch(fd), Ok(2));
    assert_eq!(mount.state_of("k"), "held");
    agent.close(fd);
    assert_eq!(finish(&mount, &agent, "k", true), 3);
    assert_eq!(mount.state_of("k"), "finished");
    mount.verify();
}

#[test]
fn a_key_that_was_resumed_and_released_without_a_result_is_free() {
    let mount = Mount::new();
    let agent = Agent::new();
    finish(&mount, &agent, "k", false);
    let fd = agent.open(&mount.claim("k"), libc::O_RDWR).expect("finished key");
    agent.flock(fd, LOCK_EX).expect("finished key");
    agent.close(fd);
    let status = mount.status("k");
    assert_eq!((status["state"].as_str(), status["outcome"].as_str()), (Some("free"), Some("released")));
    assert_eq!(status["result"]["epoch"], 1, "the older result is still the newest one");
    assert!(!mount.claim("k").exists(), "a free key has no file");
    let fd = agent.create(&mount.claim("k")).expect("free key");
    assert_eq!(agent.epoch(fd), Ok(3));
}

#[test]
fn a_finished_key_can_be_shared() {
    let mount = Mount::new();
    let agent = Agent::new();
    finish(&mount, &agent, "k", false);
    let fd = agent.open(&mount.claim("k"), libc::O_RDONLY).expect("finished key");
    assert_eq!(agent.flock(fd, LOCK_SH | LOCK_NB), Ok(()));
    let other = Agent::new();
    let handle = other.open(&mount.claim("k"), libc::O_RDWR).expect("a file is there");
    assert_eq!(other.flock(handle, LOCK_EX | LOCK_NB), Err(Errno::EAGAIN));
    agent.close(fd);
    assert_eq!(mount.state_of("k"), "finished", "sharing changes nothing");
    assert_eq!(mount.status("k")["epoch"], 1);
}

#[test]
fn rm_forgets_that_it_is_finished_and_the_epoch_goes_on() {
    let mount = Mount::new();
    let agent = Agent::new();
    finish(&mount, &agent, "k", false);
    assert_ok(&mount.bash("rm $M/claims/k"));
    assert_eq!(mount.state_of("k"), "free");
    assert!(!mount.claim("k").exists());
    assert_eq!(fs::read_to_string(mount.result("k", 1)).expect("the result stays"), "done\n");
    assert_eq!(finish(&mount, &agent, "k", false), 2);
    assert_eq!(fs::read_link(mount.root().join("results/k/latest")).expect("latest").as_os_str(), "2");
    mount.verify();
}

#[test]
fn only_the_last_attempts_user_the_namespaces_owner_or_root_may_forget() {
    let mount = Mount::shared();
    let namespace = mount.claim("ns");
    fs::create_dir(&namespace).expect("mkdir");
    set_mode(&namespace, 0o777);
    chown(&namespace, Some(12_003), None).expect("chown");
    let worker = Agent::user(12_001, 12_001, &[]);
    let stranger = Agent::user(12_002, 12_002, &[]);
    let owner = Agent::user(12_003, 12_003, &[]);
    let root = Agent::new();
    for (epoch, allowed) in [&worker, &owner, &root].into_iter().enumerate() {
        assert_eq!(finish(&mount, &worker, "ns/k", false), epoch as u64 + 1);
        assert_eq!(stranger.unlink(&namespace.join("k")), Err(Errno::EACCES));
        assert_eq!(mount.state_of("ns/k"), "finished");
        assert_eq!(allowed.unlink(&namespace.join("k")), Ok(()));
        assert_eq!(mount.state_of("ns/k"), "free");
    }
}

#[test]
fn the_record_of_a_finished_key_tells_its_last_attempt() {
    let mount = Mount::new();
    finish(&mount, &Agent::new(), "k", false);
    let output = mount.bash("read -r epoch <$M/claims/k && echo $epoch; grep '^state: ' $M/claims/k");
    assert_ok(&output);
    assert_eq!(stdout(&output), "1\nstate: finished\n");
}

#[test]
fn a_do_once_job_runs_once_however_often_it_is_started() {
    let mount = Mount::new();
    let job = "e=\"\"; (set -C; exec 9>$M/claims/migrate || exit 1; read -r e <$M/claims/migrate; echo ran >$M/results/migrate/$e; echo ran) 2>/dev/null";
    let runs: String = (0..5).map(|_| stdout(&mount.bash(job))).collect();
    assert_eq!(runs, "ran\n");
    assert_eq!(mount.status("migrate")["epoch"], 1);
}
