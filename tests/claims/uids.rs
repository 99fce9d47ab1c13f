//! Two users: who may not create in a namespace gets the lease by no form at all.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};

use libc::{
    F_OFD_SETLK, F_OFD_SETLKW, F_RDLCK, F_SETLK, F_SETLKW, F_WRLCK, LOCK_EX, LOCK_NB, LOCK_SH, O_CREAT, O_RDONLY,
    O_RDWR,
};
use nix::errno::Errno;

use crate::common::agent::{Agent, Fd};
use crate::common::{InTime, Mount, set_mode, stdout};

const USER: u32 = 12_001;
const OTHER: u32 = 12_002;
const TEAM: u32 = 13_001;

/// A namespace of root's with this mode and group.
fn namespace(mount: &Mount, mode: u32, group: u32) -> std::path::PathBuf {
    let path = mount.claim("ns");
    fs::create_dir(&path).expect("mkdir");
    chown(&path, Some(0), Some(group)).expect("chgrp");
    set_mode(&path, mode);
    path
}

/// Claims by `setpriv` and a shell, as a user would; the exit code.
fn as_user(mount: &Mount, user: u32, groups: &str, script: &str) -> Option<i32> {
    let user = user.to_string();
    let output = mount
        .command("setpriv")
        .args(["--reuid", &user, "--regid", &user])
        .args(if groups.is_empty() { vec!["--clear-groups".to_owned()] } else { vec![format!("--groups={groups}")] })
        .args(["bash", "-c", script])
        .output_in_time();
    output.status.code()
}

#[test]
fn a_closed_namespace_refuses_every_form() {
    for mode in [0o770, 0o700] {
        let mount = Mount::shared();
        let path = namespace(&mount, mode, TEAM).join("k");
        let user = Agent::user(USER, USER, &[]);
        assert_eq!(user.create(&path), Err(Errno::EACCES));
        assert_eq!(user.open(&path, O_RDWR | O_CREAT), Err(Errno::EACCES));
        let root = Agent::new();
        root.create(&path).expect("root may always");
        for flags in [O_RDONLY, O_RDWR, O_RDWR | O_CREAT] {
            assert_eq!(user.open(&path, flags), Err(Errno::EACCES), "mode {mode:o}, held");
        }
        assert_eq!(as_user(&mount, USER, "", "set -C; (exec 9>$M/claims/ns/k) 2>/dev/null || exit 17"), Some(17));
        assert_eq!(as_user(&mount, USER, "", "flock -n $M/claims/ns/k true 2>/dev/null"), Some(66), "cannot open");
        assert_eq!(as_user(&mount, USER, "", "cat $M/status/ns/k 2>/dev/null"), Some(1), "nor look");
        assert_eq!(mount.status("ns/k")["epoch"], 1);
    }
}

/// Every lock a descriptor that was opened for reading can ask for.
fn reading_locks(agent: &Agent, fd: Fd) -> Vec<(&'static str, Result<(), Errno>)> {
    vec![
        ("LOCK_EX|LOCK_NB", agent.flock(fd, LOCK_EX | LOCK_NB)),
        ("LOCK_EX", agent.flock(fd, LOCK_EX)),
        ("LOCK_SH|LOCK_NB", agent.flock(fd, LOCK_SH | LOCK_NB)),
        ("LOCK_SH", agent.flock(fd, LOCK_SH)),
        ("F_SETLK", agent.lock(fd, F_SETLK, F_RDLCK).map(drop)),
        ("F_SETLKW", agent.lock(fd, F_SETLKW, F_RDLCK).map(drop)),
        ("F_OFD_SETLK", agent.lock(fd, F_OFD_SETLK, F_RDLCK).map(drop)),
        ("F_OFD_SETLKW", agent.lock(fd, F_OFD_SETLKW, F_RDLCK).map(drop)),
    ]
}

#[test]
fn a_readable_file_in_a_namespace_one_may_not_create_in_gives_no_lease() {
    let mount = Mount::shared();
    let path = namespace(&mount, 0o755, 0).join("k");
    let (root, user) = (Agent::new(), Agent::user(USER, USER, &[]));
    assert_eq!(user.create(&path), Err(Errno::EACCES));
    assert_eq!(user.open(&path, O_RDONLY | O_CREAT), Err(Errno::EACCES));
    let fd = root.create(&path).expect("root");
    assert_eq!(fs::metadata(&path).expect("held").permissions().mode() & 0o777, 0o644);
    let handle = user.open(&path, O_RDONLY).expect("the file is readable");
    assert_eq!(user.epoch(handle), Ok(1), "and may be read");
    assert_eq!(user.open(&path, O_RDWR), Err(Errno::EACCES));
    for (lock, answer) in reading_locks(&user, handle) {
        assert_eq!(answer, Err(Errno::EACCES), "{lock} while it is held: refused at once, without a place in line");
    }
    root.close(fd);
    for (lock, answer) in reading_locks(&user, handle) {
        assert_eq!(answer, Err(Errno::EACCES), "{lock} while it is free");
    }
    let status = mount.status("ns/k");
    assert_eq!((status["state"].as_str(), status["epoch"].as_u64()), (Some("free"), Some(1)));
    assert_eq!(as_user(&mount, USER, "", "flock -n -s $M/claims/ns/k true 2>/dev/null"), Some(66), "ENOENT or EACCES");
}

#[test]
fn a_finished_key_in_such_a_namespace_cannot_be_resumed_either() {
    let mount = Mount::shared();
    let path = namespace(&mount, 0o755, 0).join("k");
    let (root, user) = (Agent::new(), Agent::user(USER, USER, &[]));
    let fd = root.create(&path).expect("root");
    let draft = root.handle(&mount.result("ns/k", 1));
    root.close(draft);
    root.close(fd);
    assert_eq!(mount.state_of("ns/k"), "finished");
    let handle = user.open(&path, O_RDONLY).expect("readable");
    for (lock, answer) in reading_locks(&user, handle) {
        assert_eq!(answer, Err(Errno::EACCES), "{lock}");
    }
    assert_eq!(mount.status("ns/k")["epoch"], 1);
}

#[test]
fn supplementary_groups_count_for_every_form() {
    let mount = Mount::shared();
    let path = namespace(&mount, 0o770, TEAM).join("k");
    let member = Agent::user(USER, USER, &[14_000, TEAM]);
    let mut epoch = 0;
    for form in ["create", "flock", "posix", "ofd"] {
        let fd = match form {
            "create" => member.create(&path).expect("a member may create"),
            _ => member.handle(&path),
        };
        match form {
            "create" => {}
            "flock" => member.flock(fd, LOCK_EX | LOCK_NB).expect("a member may lock"),
            "posix" => drop(member.lock(fd, F_SETLK, F_WRLCK).expect("a member may lock")),
            _ => drop(member.lock(fd, F_OFD_SETLK, F_WRLCK).expect("a member may lock")),
        }
        epoch += 1;
        assert_eq!(member.epoch(fd), Ok(epoch));
        let stat = fs::metadata(&path).expect("held");
        assert_eq!((stat.uid(), stat.gid(), stat.permissions().mode() & 0o777), (USER, TEAM, 0o660));
        let holder = mount.status("ns/k")["holder"].clone();
        assert_eq!((holder["uid"].as_u64(), holder["gid"].as_u64()), (Some(USER.into()), Some(USER.into())));
        member.close(fd);
    }
    let fd = member.handle(&path);
    assert_eq!(member.flock(fd, LOCK_SH | LOCK_NB), Ok(()), "shared, too");
    member.close(fd);
    let group = TEAM.to_string();
    assert_eq!(as_user(&mount, USER, &group, "set -C; exec 9>$M/claims/ns/k"), Some(0));
    assert_eq!(as_user(&mount, USER, &group, "flock -n $M/claims/ns/k true"), Some(0));
    assert_eq!(as_user(&mount, USER, "14000", "flock -n $M/claims/ns/k true 2>/dev/null"), Some(66));
    assert_eq!(mount.status("ns/k")["epoch"], 6);
}

#[test]
fn the_right_is_that_of_the_moment_of_the_lock() {
    let mount = Mount::shared();
    let namespace = namespace(&mount, 0o777, 0);
    let user = Agent::user(USER, USER, &[]);
    let handle = user.handle(&namespace.join("k"));
    set_mode(&namespace, 0o755);
    assert_eq!(user.flock(handle, LOCK_EX | LOCK_NB), Err(Errno::EACCES), "the namespace was closed in between");
    set_mode(&namespace, 0o777);
    assert_eq!(user.flock(handle, LOCK_EX | LOCK_NB), Ok(()));
    assert_eq!(user.epoch(handle), Ok(1));
}

#[test]
fn users_in_an_open_namespace_exclude_each_other_and_only_the_holder_writes() {
    let mount = Mount::shared();
    let path = mount.claim("k");
    let (user, other) = (Agent::user(USER, USER, &[]), Agent::user(OTHER, OTHER, &[]));
    let fd = user.create(&path).expect("free key");
    assert_eq!(other.create(&path), Err(Errno::EEXIST));
    let handle = other.open(&path, O_RDWR).expect("0666: who may claim may open");
    assert_eq!(other.flock(handle, LOCK_EX | LOCK_NB), Err(Errno::EAGAIN));
    assert_eq!(other.lock(handle, F_SETLK, F_WRLCK), Err(Errno::EAGAIN));
    assert_eq!(other.lock(handle, F_OFD_SETLK, F_WRLCK), Err(Errno::EAGAIN));
    assert_eq!(other.write(handle, "mine now"), Err(Errno::EACCES));
    assert_eq!(mount.status("k")["holder"]["uid"], USER);
    other.begin_flock(handle, LOCK_EX);
    mount.wait_status("k", "the other waits", |status| crate::common::agent::count(status, "waiters") == 1);
    user.close(fd);
    other.answer().expect("granted");
    let status = mount.status("k");
    assert_eq!((status["holder"]["uid"].as_u64(), status["epoch"].as_u64()), (Some(OTHER.into()), Some(2)));
    assert_eq!(fs::metadata(&path).expect("held").uid(), OTHER);
}

#[test]
fn root_may_claim_anywhere() {
    let mount = Mount::shared();
    let path = namespace(&mount, 0o700, TEAM);
    chown(&path, Some(USER), None).expect("chown");
    let root = Agent::new();
    let fd = root.create(&path.join("k")).expect("root");
    root.close(fd);
    let fd = root.handle(&path.join("k"));
    assert_eq!(root.flock(fd, LOCK_EX | LOCK_NB), Ok(()));
    let output = mount.bash("read -r epoch <$M/claims/ns/k && echo $epoch");
    assert_eq!(stdout(&output), "2\n");
}
