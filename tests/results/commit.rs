//! Commit: by `fsync` or the last close, once, and for ever.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

use libc::{LOCK_EX, O_APPEND, O_CREAT, O_EXCL, O_RDONLY, O_RDWR, O_TRUNC, O_WRONLY};
use nix::errno::Errno;
use serde_json::json;

use crate::common::agent::{Agent, Fd};
use crate::common::{Mount, assert_ok, stdout};

fn claimed(mount: &Mount, key: &str) -> (Agent, Fd) {
    let agent = Agent::new();
    let fd = agent.create(&mount.claim(key)).expect("free key");
    (agent, fd)
}

/// Publishes this result of this attempt.
fn publish(agent: &Agent, path: &Path, text: &str) {
    let draft = agent.open(path, O_WRONLY | O_CREAT).expect("registered attempt");
    agent.write(draft, text).expect("registered attempt");
    agent.close(draft);
}

#[test]
fn fsync_commits_and_its_error_is_the_answer() {
    let mount = Mount::new();
    let (agent, fd) = claimed(&mount, "k");
    let path = mount.result("k", 1);
    let draft = agent.handle(&path);
    agent.write(draft, "published").expect("registered attempt");
    assert!(!path.exists());
    assert_eq!(agent.fsync(draft), Ok(()));
    assert_eq!(fs::read_to_string(&path).expect("seen while the writer has it open"), "published");
    assert_eq!(agent.write(draft, " and more"), Err(Errno::EPERM), "immutable from here on");
    assert_eq!(agent.call("ftruncate", json!([draft, 0])), Err(Errno::EPERM));
    agent.close(draft);
    assert_eq!(fs::read_to_string(&path).expect("committed"), "published");
    agent.close(fd);
    let draft = agent.open(&mount.claim("k"), O_RDWR).expect("finished key");
    agent.flock(draft, LOCK_EX).expect("resumed");
    let late = agent.handle(&mount.result("k", 2));
    assert_ok(&mount.leasefs(&["evict", "k", "--epoch", "2"]));
    assert_eq!(agent.fsync(late), Err(Errno::ESTALE), "and it says when it cannot");
}

#[test]
fn fdatasync_is_a_commit_too() {
    let mount = Mount::new();
    let (agent, _fd) = claimed(&mount, "k");
    let draft = agent.handle(&mount.result("k", 1));
    agent.write(draft, "x").expect("registered attempt");
    assert_eq!(agent.call("fdatasync", json!([draft])).map(drop), Ok(()));
    assert_eq!(fs::read_to_string(mount.result("k", 1)).expect("committed"), "x");
}

#[test]
fn the_close_of_the_last_copy_commits_and_no_earlier_one() {
    let mount = Mount::new();
    let (agent, _fd) = claimed(&mount, "k");
    let path = mount.result("k", 1);
    let draft = agent.handle(&path);
    let copy = agent.call("dup", json!([draft])).expect("dup").as_i64().expect("a descriptor");
    let child = agent.fork();
    agent.write(draft, "one ").expect("registered attempt");
    agent.close(draft);
    assert!(!path.exists(), "a dup and a child have it");
    child.write(draft, "two ").expect("registered attempt");
    child.exit();
    assert!(!path.exists(), "a dup has it");
    agent.write(copy, "three").expect("registered attempt");
    agent.close(copy);
    assert_eq!(fs::read_to_string(&path).expect("committed"), "one two three");
}

#[test]
fn a_committed_result_is_seen_by_whoever_looks_after_the_close() {
    let mount = Mount::new();
    let (agent, other) = (Agent::new(), Agent::new());
    for epoch in 1..=300 {
        let fd = agent.handle(&mount.claim("k"));
        agent.flock(fd, LOCK_EX).expect("free or finished key");
        publish(&agent, &mount.result("k", epoch), &format!("result {epoch}"));
        let handle = other.open(&mount.result("k", epoch), O_RDONLY).expect("the close has returned");
        assert_eq!(other.read(handle), Ok(format!("result {epoch}")));
        other.close(handle);
        agent.close(fd);
        assert_eq!(other.create(&mount.claim("k")), Err(Errno::EEXIST), "finished");
    }
}

#[test]
fn a_committed_result_never_changes() {
    let mount = Mount::shared();
    let (agent, fd) = claimed(&mount, "k");
    let path = mount.result("k", 1);
    publish(&agent, &path, "for ever");
    agent.close(fd);
    let before = fs::metadata(&path).expect("committed");
    assert_eq!(before.permissions().mode() & 0o777, 0o444, "the namespace's r bits: 0777");
    assert_eq!(before.len(), 8);
    let user = Agent::user(12_001, 12_001, &[]);
    for (who, agent, refusal) in [("root", &agent, Errno::EPERM), ("another user", &user, Errno::EACCES)] {
        for flags in
            [O_WRONLY, O_RDWR, O_WRONLY | O_TRUNC, O_WRONLY | O_CREAT | O_TRUNC, O_WRONLY | O_APPEND, O_RDWR | O_CREAT]
        {
            assert_eq!(agent.open(&path, flags), Err(refusal), "{who}, flags {flags:o}");
        }
        assert_eq!(agent.open(&path, O_WRONLY | O_CREAT | O_EXCL), Err(Errno::EEXIST), "{who}");
        assert_eq!(agent.call("truncate", json!([path, 0])), Err(refusal), "{who}");
        assert_eq!(agent.call("chmod", json!([path, 0o777])), Err(Errno::EPERM), "{who}");
        assert_eq!(agent.call("chown", json!([path, 12_001, 12_001])), Err(Errno::EPERM), "{who}");
        assert_eq!(agent.unlink(&path), Err(Errno::EPERM), "{who}");
        let names = json!({ "path": path });
        assert_eq!(agent.script("os.utime(path, (1, 1))", names), Err(Errno::EPERM), "{who}: nor its time");
        // Another user is refused by the kernel, as it may not write.
        let unknown = if who == "root" { Errno::EOPNOTSUPP } else { refusal };
        assert_eq!(agent.set_xattr(&path, "user.x", "y"), Err(unknown), "{who}");
    }
    // Not by a reader's descriptor either.
    let handle = agent.open(&path, O_RDONLY).expect("committed");
    assert_eq!(agent.write(handle, "x"), Err(Errno::EBADF));
    for script in ["echo no >$M/results/k/1", "echo no >>$M/results/k/1", "rm -f $M/results/k/1"] {
        assert_eq!(mount.bash(script).status.code(), Some(1), "{script}");
    }
    let after = fs::metadata(&path).expect("committed");
    assert_eq!(fs::read_to_string(&path).expect("committed"), "for ever");
    assert_eq!(
        (after.len(), after.mtime(), after.mtime_nsec(), after.mode()),
        (before.len(), before.mtime(), before.mtime_nsec(), before.mode())
    );
}

#[test]
fn a_result_outlives_later_attempts_and_a_remount() {
    let mut mount = Mount::new();
    let agent = Agent::new();
    let path = mount.claim("k");
    let mut times = Vec::new();
    for epoch in 1..=3 {
        let fd = agent.handle(&path);
        agent.flock(fd, LOCK_EX).expect("free or finished key");
        if epoch != 2 {
            publish(&agent, &mount.result("k", epoch), &format!("result {epoch}"));
            times.push(fs::metadata(mount.result("k", epoch)).expect("committed").mtime_nsec());
        }
        agent.close(fd);
    }
    for remounted in [false, true] {
        if remounted {
            mount.unmount();
            mount.start(&[]);
        }
        assert_eq!(
            stdout(&mount.bash("cd $M/results/k && ls && cat 1 && echo && cat latest")),
            "1\n3\nlatest\nresult 1\nresult 3"
        );
        assert_eq!(fs::read_link(mount.root().join("results/k/latest")).expect("latest").as_os_str(), "3");
        assert!(!mount.result("k", 2).exists(), "the second attempt had none");
        let now = [1, 3].map(|epoch| fs::metadata(mount.result("k", epoch)).expect("committed").mtime_nsec());
        assert_eq!(now.as_slice(), times);
    }
}

#[test]
fn latest_follows_the_newest_commit() {
    let mount = Mount::new();
    let latest = mount.root().join("results/k/latest");
    let agent = Agent::new();
    for epoch in 1..=5 {
        let fd = agent.handle(&mount.claim("k"));
        agent.flock(fd, LOCK_EX).expect("free or finished key");
        if epoch > 1 {
            assert_eq!(fs::read_to_string(&latest).expect("the one before"), (epoch - 1).to_string());
        }
        publish(&agent, &mount.result("k", epoch), &epoch.to_string());
        assert_eq!(fs::read_to_string(&latest).expect("latest"), epoch.to_string());
        assert_eq!(mount.status("k")["result"]["epoch"], epoch);
        agent.close(fd);
    }
    assert!(fs::symlink_metadata(&latest).expect("latest").file_type().is_symlink());
    assert_eq!(agent.unlink(&latest), Err(Errno::EPERM));
}

#[test]
fn an_empty_result_counts() {
    let mount = Mount::new();
    let (agent, fd) = claimed(&mount, "k");
    assert_ok(&mount.bash(": >$M/results/k/1"));
    assert_eq!(fs::metadata(mount.result("k", 1)).expect("committed").len(), 0);
    let status = mount.status("k");
    assert_eq!((status["outcome"].as_str(), status["result"]["size"].as_u64()), (Some("completed"), Some(0)));
    agent.close(fd);
    assert_eq!(mount.state_of("k"), "finished");
}

#[test]
fn a_second_result_of_an_attempt_is_refused_at_the_open() {
    let mount = Mount::new();
    let (agent, fd) = claimed(&mount, "k");
    let path = mount.result("k", 1);
    publish(&agent, &path, "the first");
    let other = Agent::new();
    for agent in [&agent, &other] {
        assert_eq!(agent.open(&path, O_WRONLY | O_CREAT | O_TRUNC), Err(Errno::EPERM));
    }
    assert_eq!(agent.epoch(fd), Ok(1), "the holder still has its key");
    assert_eq!(other.create(&mount.claim("k")), Err(Errno::EEXIST));
    agent.close(fd);
    assert_eq!(mount.state_of("k"), "finished", "finished once the handles are closed");
}

#[test]
fn readers_of_a_result_see_all_of_it_or_nothing() {
    let mount = Mount::new();
    let reader = Agent::new();
    let writer = Agent::new();
    reader.begin(
        "script",
        json!([
            "result = set()\nepoch, end = 1, time.monotonic() + 50\nwhile epoch <= 30 and time.monotonic() < end:\n  try: text = open(f'{results}/{epoch}', 'rb').read()\n  except FileNotFoundError: continue\n  result.add(len(text)); epoch += 1\nresult = [epoch, sorted(result)]",
            { "results": mount.root().join("results/k") }
        ]),
    );
    for epoch in 1..=30 {
        let fd = writer.handle(&mount.claim("k"));
        writer.flock(fd, LOCK_EX).expect("free or finished key");
        let draft = writer.handle(&mount.result("k", epoch));
        for _ in 0..10 {
            writer.write(draft, &"x".repeat(1000)).expect("registered attempt");
        }
        writer.close(draft);
        writer.close(fd);
    }
    assert_eq!(reader.answer(), Ok(json!([31, [10_000]])));
}

#[test]
fn a_claim_after_the_close_of_the_draft_never_loses() {
    let mount = Mount::new();
    let agents: Vec<Agent> = (0..3).map(|_| Agent::new()).collect();
    // Nothing comes between the close and the lock but what the neighbours do.
    let source = "
fds = [os.open(claim, os.O_RDWR | os.O_CREAT) for _ in range(2)]
result = []
for epoch in range(1, 301):
    fd = fds[epoch % 2]
    try: fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError: result.append(epoch); break
    draft = os.open(f'{results}/{epoch}', os.O_WRONLY | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(draft)";
    for (key, agent) in agents.iter().enumerate() {
        let results = mount.root().join(format!("results/k{key}"));
        agent.begin("script", json!([source, { "claim": mount.claim(&format!("k{key}")), "results": results }]));
    }
    for (key, agent) in agents.iter().enumerate() {
        assert_eq!(agent.answer(), Ok(json!([])), "k{key}: the epoch whose claim was refused");
        assert_eq!(mount.status(&format!("k{key}"))["result"]["epoch"], 300);
    }
}
