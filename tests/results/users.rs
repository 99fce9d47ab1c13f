//! Results between users: who may write one, who may read it, and whose it is.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};

use libc::{O_CREAT, O_RDONLY, O_WRONLY};
use nix::errno::Errno;

use crate::common::agent::Agent;
use crate::common::{Mount, set_mode};

const WORKER: u32 = 12_001;
const OTHER: u32 = 12_002;
const TEAM: u32 = 13_001;

fn namespace(mount: &Mount, mode: u32) {
    let path = mount.claim("ns");
    fs::create_dir(&path).expect("mkdir");
    chown(&path, Some(0), Some(TEAM)).expect("chgrp");
    set_mode(&path, mode);
}

#[test]
fn only_the_attempts_user_and_root_may_write_its_result() {
    let mount = Mount::shared();
    namespace(&mount, 0o777);
    let worker = Agent::user(WORKER, WORKER, &[TEAM]);
    let same = Agent::user(WORKER, WORKER, &[]);
    let other = Agent::user(OTHER, OTHER, &[TEAM]);
    for (epoch, writer) in [(1, &same), (2, &Agent::new())] {
        let fd = worker.handle(&mount.claim("ns/k"));
        worker.flock(fd, libc::LOCK_EX).expect("free or finished key");
        let path = mount.result("ns/k", epoch);
        assert_eq!(other.open(&path, O_WRONLY | O_CREAT), Err(Errno::EACCES), "another user of the same team");
        let draft = writer.open(&path, O_WRONLY | O_CREAT).expect("the worker's user, or root");
        writer.write(draft, "done").expect("registered attempt");
        writer.close(draft);
        worker.close(fd);
        let stat = fs::metadata(&path).expect("committed");
        assert_eq!((stat.uid(), stat.gid()), (WORKER, TEAM), "the attempt's uid, the namespace's group");
        assert_eq!(stat.permissions().mode() & 0o7777, 0o444);
        let handle = other.open(&path, O_RDONLY).expect("readable as the namespace is");
        assert_eq!(other.read(handle).as_deref(), Ok("done"));
    }
}

#[test]
fn a_result_shows_the_namespaces_r_bits() {
    for (mode, shown) in [(0o770, 0o440), (0o750, 0o440), (0o700, 0o400), (0o711, 0o400), (0o775, 0o444)] {
        let mount = Mount::shared();
        namespace(&mount, mode);
        let (root, stranger) = (Agent::new(), Agent::user(OTHER, OTHER, &[]));
        let fd = root.create(&mount.claim("ns/k")).expect("root");
        let draft = root.handle(&mount.result("ns/k", 1));
        root.write(draft, "x").expect("registered attempt");
        root.close(draft);
        root.close(fd);
        let path = mount.result("ns/k", 1);
        assert_eq!(fs::metadata(&path).expect("committed").permissions().mode() & 0o7777, shown, "namespace {mode:o}");
        let expected = if mode & 0o005 == 0o005 { Ok(()) } else { Err(Errno::EACCES) };
        assert_eq!(stranger.open(&path, O_RDONLY).map(drop), expected, "namespace {mode:o}");
    }
}

#[test]
fn the_directory_of_a_keys_results_is_as_its_namespace() {
    let mount = Mount::shared();
    namespace(&mount, 0o770);
    let worker = Agent::user(WORKER, WORKER, &[TEAM]);
    worker.create(&mount.claim("ns/k")).expect("a member may create");
    let stat = fs::metadata(mount.root().join("results/ns/k")).expect("a key that was");
    assert!(stat.is_dir());
    assert_eq!((stat.gid(), stat.permissions().mode() & 0o777), (TEAM, 0o770));
    let draft = worker.open(&mount.result("ns/k", 1), O_WRONLY | O_CREAT).expect("registered attempt");
    worker.write(draft, "by a member").expect("registered attempt");
    worker.close(draft);
    assert_eq!(fs::read_to_string(mount.result("ns/k", 1)).expect("committed"), "by a member");
    assert_eq!(Agent::user(OTHER, OTHER, &[]).open(&mount.result("ns/k", 1), O_RDONLY), Err(Errno::EACCES));
}
