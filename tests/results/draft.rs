//! Drafts: each write handle has its own, written like a file, seen by nobody.

use std::fs;

use libc::{O_APPEND, O_CREAT, O_EXCL, O_RDONLY, O_RDWR, O_TRUNC, O_WRONLY};
use nix::errno::Errno;
use serde_json::json;

use crate::common::agent::{Agent, Fd};
use crate::common::{InTime, Mount, assert_ok};

/// A claimed key: the agent and its handle.
fn claimed(mount: &Mount, key: &str) -> (Agent, Fd) {
    let agent = Agent::new();
    let fd = agent.create(&mount.claim(key)).expect("free key");
    (agent, fd)
}

#[test]
fn nobody_sees_a_draft() {
    let mount = Mount::new();
    let (agent, _fd) = claimed(&mount, "k");
    let path = mount.result("k", 1);
    let directory = mount.root().join("results/k");
    let draft = agent.open(&path, O_WRONLY | O_CREAT).expect("registered attempt");
    agent.write(draft, "half a res").expect("registered attempt");
    let other = Agent::new();
    assert_eq!(other.open(&path, O_RDONLY), Err(Errno::ENOENT));
    assert_eq!(agent.open(&path, O_RDONLY), Err(Errno::ENOENT), "nor its own writer by another handle");
    assert_eq!(fs::metadata(&path).map(drop).map_err(|e| e.raw_os_error()), Err(Some(libc::ENOENT)));
    assert_eq!(fs::read_link(directory.join("latest")).map_err(|e| e.raw_os_error()), Err(Some(libc::ENOENT)));
    assert_eq!(fs::read_dir(&directory).expect("a key that was").count(), 0);
    assert!(mount.status("k")["result"].is_null());
}

#[test]
fn what_a_file_can_do_a_draft_can() {
    let mount = Mount::new();
    let cases: [(&str, &str); 6] = [
        ("os.write(fd, b'one '); os.write(fd, b'two')", "one two"),
        ("os.write(fd, b'xxxx'); os.pwrite(fd, b'AB', 1)", "xABx"),
        ("os.pwrite(fd, b'end', 5)", "\0\0\0\0\0end"),
        ("os.write(fd, b'0123456789'); os.ftruncate(fd, 4)", "0123"),
        ("os.write(fd, b'01'); os.ftruncate(fd, 4)", "01\0\0"),
        (
            "os.write(fd, b'first'); os.lseek(fd, 0, 0); os.write(fd, b'F'); os.lseek(fd, 0, 2); os.write(fd, b'!')",
            "First!",
        ),
    ];
    for (number, (writes, content)) in cases.into_iter().enumerate() {
        let key = format!("k{number}");
        let (agent, _fd) = claimed(&mount, &key);
        let draft = agent.open(&mount.result(&key, 1), O_RDWR | O_CREAT | O_TRUNC).expect("registered attempt");
        agent.script(writes, json!({ "fd": draft })).unwrap_or_else(|e| panic!("{writes}: {e}"));
        agent.close(draft);
        assert_eq!(fs::read_to_string(mount.result(&key, 1)).expect("committed"), content, "{writes}");
    }
}

#[test]
fn a_draft_of_many_megabytes_arrives_whole() {
    let mount = Mount::new();
    let (agent, _fd) = claimed(&mount, "k");
    let draft = agent.handle(&mount.result("k", 1));
    agent
        .script(
            "block = bytes(range(256)) * 4096\nfor n in range(20): assert os.write(fd, block) == len(block)\nos.close(fd)",
            json!({ "fd": draft }),
        )
        .expect("20 MiB");
    let content = fs::read(mount.result("k", 1)).expect("committed");
    assert_eq!(content.len(), 20 << 20);
    assert!(content.iter().enumerate().all(|(at, byte)| *byte == (at % 256) as u8));
}

#[test]
fn appending_handles_append_to_their_own_drafts() {
    let mount = Mount::new();
    let (agent, _fd) = claimed(&mount, "k");
    let path = mount.result("k", 1);
    let other = Agent::new();
    let first = agent.open(&path, O_WRONLY | O_CREAT | O_APPEND).expect("registered attempt");
    let second = other.open(&path, O_WRONLY | O_CREAT | O_APPEND).expect("registered attempt");
    // Both have the same name, so an offset by the name's size would tear a hole.
    agent.write(first, "a long line of the first\n").expect("draft");
    other.write(second, "b").expect("draft");
    agent.write(first, "more\n").expect("draft");
    other.write(second, "c").expect("draft");
    assert_eq!(other.fsync(second), Ok(()));
    assert_eq!(fs::read_to_string(&path).expect("committed"), "bc");
    assert_eq!(agent.write(first, "late"), Err(Errno::EPERM), "the first commit won");
    agent.close(first);
    assert_eq!(fs::read_to_string(&path).expect("committed"), "bc");
}

#[test]
fn shells_redirect_into_a_result() {
    let mount = Mount::new();
    for (key, script, content) in [
        ("to", "echo done >$M/results/to/1", "done\n"),
        ("append", "{ echo a; echo b; } >>$M/results/append/1", "a\nb\n"),
        ("clobber", "set -C; echo done >$M/results/clobber/1", "done\n"),
        ("empty", ": >$M/results/empty/1", ""),
        ("tee", "echo x | tee $M/results/tee/1 >/dev/null", "x\n"),
        ("cp", "echo y >$S/y; cp $S/y $M/results/cp/1", "y\n"),
        ("dd", "echo z | dd of=$M/results/dd/1 2>/dev/null", "z\n"),
        (
            "python",
            "python3 -ISc 'import os; open(os.environ[\"M\"] + \"/results/python/1\", \"w\").write(\"p\\n\")'",
            "p\n",
        ),
    ] {
        let (_agent, _fd) = claimed(&mount, key);
        let output = mount.command("bash").env("S", mount.scratch()).args(["-c", script]).output_in_time();
        assert_ok(&output);
        assert_eq!(fs::read_to_string(mount.result(key, 1)).expect(key), content, "{script}");
        assert_eq!(mount.status(key)["outcome"], "completed", "{key}");
    }
}

#[test]
fn two_drafts_of_one_attempt_never_mix() {
    let mount = Mount::new();
    let (agent, _fd) = claimed(&mount, "k");
    let path = mount.result("k", 1);
    let second = Agent::new();
    let (a, b) = (agent.handle(&path), second.handle(&path));
    agent.write(a, "aaaaaaaaaa").expect("draft");
    second.write(b, "bbb").expect("draft");
    agent.write(a, "aaaaa").expect("draft");
    second.close(b);
    assert_eq!(fs::read_to_string(&path).expect("committed"), "bbb");
    assert_eq!(agent.write(a, "a"), Err(Errno::EPERM));
    assert_eq!(agent.fsync(a), Err(Errno::EPERM));
    agent.close(a);
    assert_eq!(fs::read_to_string(&path).expect("committed"), "bbb");
    assert_eq!(mount.status("k")["result"]["size"], 3);
}

#[test]
fn what_cannot_be_written_says_why() {
    let mount = Mount::new();
    let (agent, fd) = claimed(&mount, "k");
    let write = O_WRONLY | O_CREAT;
    for epoch in [2, 3, 1_000_000, u64::MAX] {
        assert_eq!(agent.open(&mount.result("k", epoch), write), Err(Errno::ENOENT), "epoch {epoch} was never claimed");
    }
    for name in ["0", "01", "-1", "+1", "1 ", "x", "latest.tmp", ".1.swp", "99999999999999999999999"] {
        let path = mount.root().join("results/k").join(name);
        assert_eq!(agent.open(&path, write), Err(Errno::ENOENT), "{name} is no epoch");
        assert_eq!(agent.call("mkdir", json!([path])), Err(Errno::EPERM), "{name}");
    }
    let latest = mount.root().join("results/k/latest");
    assert_eq!(agent.open(&latest, write), Err(Errno::EPERM), "latest follows, it is not written");
    assert_eq!(agent.open(&mount.result("never", 1), write), Err(Errno::ENOENT), "a key that never was");
    assert_eq!(agent.create(&mount.root().join("results/file")), Err(Errno::EPERM));
    agent.close(fd);
    agent.create(&mount.claim("k")).expect("free again");
    assert_eq!(agent.open(&mount.result("k", 1), write), Err(Errno::ESTALE), "superseded");
    assert_eq!(agent.open(&mount.result("k", 1), write | O_EXCL), Err(Errno::ESTALE), "superseded");
}

#[test]
fn the_limit_on_a_result_is_efbig_and_what_was_written_before_stays_a_draft() {
    let mount = Mount::with(&["--max-result", "1MiB"]);
    let (agent, _fd) = claimed(&mount, "k");
    let path = mount.result("k", 1);
    let draft = agent.handle(&path);
    let fill = "for n in range(16): os.write(fd, b'x' * 65536)";
    agent.script(fill, json!({ "fd": draft })).expect("1 MiB is allowed");
    assert_eq!(agent.write(draft, "y"), Err(Errno::EFBIG));
    assert_eq!(agent.call("pwrite", json!([draft, { "hex": "79" }, 1 << 20])), Err(Errno::EFBIG));
    assert_eq!(agent.call("pwrite", json!([draft, { "hex": "79" }, 1i64 << 40])), Err(Errno::EFBIG), "far out as well");
    assert_eq!(agent.call("ftruncate", json!([draft, (1 << 20) + 1])), Err(Errno::EFBIG));
    assert!(!path.exists());
    assert_eq!(agent.call("ftruncate", json!([draft, 10])).map(drop), Ok(()));
    assert_eq!(agent.fsync(draft), Ok(()), "within the limit again");
    assert_eq!(fs::read_to_string(&path).expect("committed"), "xxxxxxxxxx");
}

#[test]
fn the_limit_is_64_mib_unless_told() {
    let mount = Mount::new();
    let (agent, _fd) = claimed(&mount, "k");
    let draft = agent.handle(&mount.result("k", 1));
    assert_eq!(agent.call("ftruncate", json!([draft, 64 << 20])).map(drop), Ok(()));
    assert_eq!(agent.call("pwrite", json!([draft, { "hex": "79" }, 64 << 20])), Err(Errno::EFBIG));
    assert_eq!(agent.call("pwrite", json!([draft, { "hex": "79" }, (64 << 20) - 1])), Ok(json!(1)));
}

#[test]
fn every_write_checks_that_the_attempt_is_registered() {
    let mount = Mount::new();
    for lose in ["eviction", "expiry"] {
        let (agent, fd) = claimed(&mount, lose);
        let path = mount.result(lose, 1);
        let draft = agent.handle(&path);
        agent.write(draft, "in time ").expect("registered attempt");
        if lose == "eviction" {
            assert_ok(&mount.leasefs(&["evict", lose, "--epoch", "1"]));
        } else {
            agent.set_xattr(&mount.claim(lose), "user.lease.ttl", "20ms").expect("holder's user");
            mount.wait_status(lose, "expired", |status| status["outcome"] == "expired");
        }
        assert_eq!(agent.write(draft, "too late"), Err(Errno::ESTALE), "{lose}");
        let next = agent.create(&mount.claim(lose)).expect("free again");
        assert_eq!(agent.write(draft, "too late"), Err(Errno::ESTALE), "{lose}, superseded");
        assert_eq!(agent.fsync(draft), Err(Errno::ESTALE), "{lose}");
        agent.close(draft);
        assert!(!path.exists(), "{lose}: nothing was published");
        assert!(!mount.result(lose, 2).exists(), "{lose}: nor on another attempt");
        agent.close(fd);
        assert_eq!(agent.epoch(next), Ok(2));
    }
}
