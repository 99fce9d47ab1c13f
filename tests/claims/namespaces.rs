//! Namespaces are directories: they keep mode, owner, group and times, and appear in all three subtrees.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::Path;

use nix::errno::Errno;
use serde_json::json;

use crate::common::agent::Agent;
use crate::common::{Mount, assert_ok, set_mode, stdout};

fn names(directory: &Path) -> BTreeSet<String> {
    let entries = fs::read_dir(directory).unwrap_or_else(|e| panic!("{}: {e}", directory.display()));
    entries.map(|entry| entry.expect("entry").file_name().into_string().expect("UTF-8")).collect()
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap_or_else(|e| panic!("{}: {e}", path.display())).permissions().mode() & 0o7777
}

#[test]
fn mkdir_makes_a_namespace_in_all_three_subtrees() {
    let mount = Mount::new();
    assert_ok(&mount.bash("mkdir -p $M/claims/team/nightly && mkdir $M/claims/team/weekly"));
    for subtree in ["claims", "results", "status"] {
        let root = mount.root().join(subtree);
        assert!(names(&root).contains("team"), "{subtree}");
        assert_eq!(names(&root.join("team")), BTreeSet::from(["nightly".to_owned(), "weekly".to_owned()]), "{subtree}");
        assert!(root.join("team/nightly").is_dir());
    }
    let agent = Agent::new();
    let fd = agent.create(&mount.claim("team/nightly/build")).expect("free key");
    assert_eq!(names(&mount.claim("team/nightly")), BTreeSet::from(["build".to_owned()]));
    assert_eq!(names(&mount.root().join("status/team/nightly")), BTreeSet::from(["build".to_owned()]));
    assert_eq!(mount.status("team/nightly/build")["key"], "team/nightly/build");
    agent.close(fd);
    assert_eq!(names(&mount.claim("team/nightly")), BTreeSet::new(), "a free key has no file");
    assert_eq!(
        names(&mount.root().join("status/team/nightly")),
        BTreeSet::from(["build".to_owned()]),
        "a key that was"
    );
}

#[test]
fn a_namespace_keeps_mode_owner_and_group_over_a_remount() {
    let mut mount = Mount::shared();
    let path = mount.claim("ns");
    fs::create_dir(&path).expect("mkdir");
    set_mode(&path, 0o2770);
    chown(&path, Some(12_001), Some(13_001)).expect("chown");
    set_mode(&path, 0o2770);
    for remounted in [false, true] {
        for subtree in ["claims", "results", "status"] {
            let stat = fs::metadata(mount.root().join(subtree).join("ns")).expect("namespace");
            assert_eq!((stat.uid(), stat.gid()), (12_001, 13_001), "{subtree}, remounted: {remounted}");
        }
        assert_eq!(mode(&path), 0o2770);
        if !remounted {
            mount.unmount();
            mount.start(&["--allow-other"]);
        }
    }
}

#[test]
fn mkdir_obeys_the_umask_and_the_setgid_bit() {
    let mount = Mount::new();
    let agent = Agent::with_umask(0o027);
    agent.call("mkdir", json!([mount.claim("masked"), 0o777])).expect("mkdir");
    assert_eq!(mode(&mount.claim("masked")), 0o750);
    let shared = mount.claim("setgid");
    fs::create_dir(&shared).expect("mkdir");
    chown(&shared, None, Some(13_001)).expect("chgrp");
    set_mode(&shared, 0o2775);
    fs::create_dir(shared.join("below")).expect("mkdir");
    let stat = fs::metadata(shared.join("below")).expect("namespace");
    assert_eq!(stat.gid(), 13_001, "the group comes down");
    assert_eq!(stat.mode() & 0o2000, 0o2000, "and so does the bit");
}

#[test]
fn times_set_on_a_namespace_are_kept() {
    let mount = Mount::new();
    let path = mount.claim("ns");
    fs::create_dir(&path).expect("mkdir");
    let agent = Agent::new();
    agent
        .script("os.utime(path, ns=(1234567890123456789, 1500000000987654321))", json!({ "path": path }))
        .expect("utimensat");
    let stat = fs::metadata(&path).expect("namespace");
    assert_eq!((stat.mtime(), stat.mtime_nsec()), (1_500_000_000, 987_654_321));
    assert_eq!((stat.atime(), stat.atime_nsec()), (1_234_567_890, 123_456_789));
    let before = stat.ctime();
    agent.script("os.utime(path)", json!({ "path": path })).expect("touch");
    let stat = fs::metadata(&path).expect("namespace");
    assert!(stat.mtime() >= before, "touched just now: {}", stat.mtime());
}

#[test]
fn directory_based_lockers_work_as_on_any_filesystem() {
    let mount = Mount::new();
    let lock = mount.claim("dir.lock");
    let agent = Agent::new();
    agent.call("mkdir", json!([lock])).expect("free");
    assert_eq!(agent.call("mkdir", json!([lock])), Err(Errno::EEXIST));
    agent.script("os.utime(path, (1e9, 1e9))", json!({ "path": lock })).expect("a beat");
    assert_eq!(fs::metadata(&lock).expect("lock").mtime(), 1_000_000_000);
    agent.call("rmdir", json!([lock])).expect("empty");
    assert_eq!(agent.call("rmdir", json!([lock])), Err(Errno::ENOENT));
    assert_ok(&mount.bash("mkdir $M/claims/dir.lock"));
}

#[test]
fn rmdir_is_refused_while_a_key_is_there_and_epochs_outlive_it() {
    let mount = Mount::new();
    let (namespace, path) = (mount.claim("ns"), mount.claim("ns/k"));
    let agent = Agent::new();
    for epoch in 1..=3 {
        fs::create_dir(&namespace).expect("mkdir");
        let fd = agent.create(&path).expect("free key");
        assert_eq!(agent.epoch(fd), Ok(epoch), "the epoch goes on over rmdir");
        assert_eq!(agent.call("rmdir", json!([namespace])), Err(Errno::ENOTEMPTY), "a held key");
        agent.close(fd);
        assert_eq!(agent.call("rmdir", json!([namespace])).map(drop), Ok(()));
        for subtree in ["claims", "results", "status"] {
            assert!(!mount.root().join(subtree).join("ns").exists(), "{subtree}");
        }
    }
    fs::create_dir_all(mount.claim("ns/below")).expect("mkdir");
    assert_eq!(agent.call("rmdir", json!([namespace])), Err(Errno::ENOTEMPTY), "a namespace below");
    mount.verify();
}

#[test]
fn the_ttl_of_a_namespace_is_an_xattr_that_can_be_read_listed_and_removed() {
    let mount = Mount::new();
    let path = mount.claim("ns");
    fs::create_dir(&path).expect("mkdir");
    let agent = Agent::new();
    let name = "user.lease.ttl";
    assert_eq!(agent.call("getxattr", json!([path, name])), Err(Errno::ENODATA));
    agent.set_xattr(&path, name, "1h30m").expect("root");
    assert_eq!(agent.call("getxattr", json!([path, name])), Ok(json!("1h30m")));
    assert!(agent.call("listxattr", json!([path])).expect("list").as_array().expect("list").contains(&json!(name)));
    agent.set_xattr(&path, name, "90s").expect("again");
    let fd = agent.create(&path.join("k")).expect("free key");
    assert_eq!(mount.status("ns/k")["ttl_ms"], 90_000);
    agent.close(fd);
    agent.call("removexattr", json!([path, name])).expect("root");
    assert_eq!(agent.call("getxattr", json!([path, name])), Err(Errno::ENODATA));
    agent.create(&path.join("k")).expect("free key");
    assert_eq!(mount.status("ns/k")["ttl_ms"], 24 * 3600 * 1000);
}

#[test]
fn only_the_owner_changes_a_namespace() {
    let mount = Mount::shared();
    let path = mount.claim("ns");
    fs::create_dir(&path).expect("mkdir");
    chown(&path, Some(12_001), Some(12_001)).expect("chown");
    set_mode(&path, 0o777);
    let (owner, other) = (Agent::user(12_001, 12_001, &[]), Agent::user(12_002, 12_002, &[]));
    assert_eq!(other.call("chmod", json!([path, 0o700])), Err(Errno::EPERM));
    assert_eq!(other.call("chown", json!([path, 12_002, 12_002])), Err(Errno::EPERM));
    assert_eq!(
        other.set_xattr(&path, "user.lease.ttl", "1s").map_err(|e| e == Errno::EACCES || e == Errno::EPERM),
        Err(true)
    );
    assert_eq!(owner.call("chmod", json!([path, 0o750])).map(drop), Ok(()));
    assert_eq!(mode(&path), 0o750);
    assert_eq!(owner.set_xattr(&path, "user.lease.ttl", "1m"), Ok(()));
}

#[test]
fn find_and_ls_walk_the_tree() {
    let mount = Mount::new();
    assert_ok(&mount.bash("mkdir -p $M/claims/a/b/c"));
    let agent = Agent::new();
    agent.create(&mount.claim("a/b/k")).expect("free key");
    let output = mount.bash("cd $M/claims && find . | sort && ls -la a/b >/dev/null && ls -R . >/dev/null");
    assert_ok(&output);
    assert_eq!(stdout(&output), ".\n./a\n./a/b\n./a/b/c\n./a/b/k\n");
}
