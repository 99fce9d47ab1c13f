//! Mountpoints that cannot be used, and trees whose server died: one line that says what to do.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Stdio};

use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::common::agent::{Agent, has_ended};
use crate::common::{InTime, LEASEFS, assert_ok, wait_for};
use crate::place::{Place, assert_not_mounted, assert_refused};

#[test]
fn a_missing_one() {
    let place = Place::new();
    let mountpoint = place.path("nowhere");
    let output = place.mount_at(&mountpoint, &place.state(), &[]);
    assert_refused(&output, &mountpoint, &[&["no such", "does not exist", "missing"]]);
    assert!(!mountpoint.exists());
}

#[test]
fn one_that_is_not_empty() {
    let place = Place::new();
    fs::write(place.mnt().join("thesis.tex"), "precious").expect("file");
    let output = place.mount();
    assert_refused(&output, &place.mnt(), &[&["empty"]]);
    assert_not_mounted(&place.mnt());
    assert_eq!(fs::read_to_string(place.mnt().join("thesis.tex")).expect("file"), "precious");
}

#[test]
fn a_file() {
    let place = Place::new();
    let mountpoint = place.path("file");
    fs::write(&mountpoint, "").expect("file");
    let output = place.mount_at(&mountpoint, &place.state(), &[]);
    assert_refused(&output, &mountpoint, &[&["directory"]]);
    assert_not_mounted(&mountpoint);
}

#[test]
fn one_that_is_mounted_already() {
    let place = Place::new();
    assert_ok(&place.mount());
    let agent = Agent::new();
    let fd = agent.create(&place.mnt().join("claims/k")).expect("free key");
    for state in [place.state(), place.path("another-state")] {
        let output = place.mount_at(&place.mnt(), &state, &[]);
        assert_refused(&output, &place.path(""), &[&["already", "mounted"]]);
    }
    assert_eq!(agent.epoch(fd), Ok(1), "the first tree goes on");
    let mounts = fs::read_to_string("/proc/self/mounts").expect("mounts");
    let mnt = place.mnt();
    let times = mounts.lines().filter(|line| line.split(' ').nth(1) == mnt.to_str()).count();
    assert_eq!(times, 1, "nothing was mounted over it");
    drop(agent);
    place.assert_unmounts();
}

/// Kills the keeper of a tree like a crash would, and the server with it.
fn kill_server(mnt: &Path) {
    let text = fs::read_to_string(mnt.join(".leasefs/config")).expect("config");
    let config: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    let server = config["pid"].as_i64().expect("pid") as i32;
    let parent: i32 = fs::read_to_string(format!("/proc/{server}/stat"))
        .ok()
        .and_then(|stat| stat.rsplit_once(") ")?.1.split(' ').nth(1)?.parse().ok())
        .expect("the server's parent");
    let keeper = fs::read_to_string(format!("/proc/{parent}/comm")).is_ok_and(|comm| comm.starts_with("leasefs"));
    assert!(keeper, "process {parent} is its keeper");
    kill(Pid::from_raw(parent), Signal::SIGKILL).expect("it is there");
    // It takes the server along.
    for pid in [parent, server] {
        wait_for("the server's end", || has_ended(pid));
    }
}

#[test]
fn a_dead_one_is_told_of_and_can_be_cleared_as_it_says() {
    let place = Place::new();
    assert_ok(&place.mount());
    kill_server(&place.mnt());
    wait_for("ENOTCONN", || fs::read_dir(place.mnt()).is_err_and(|e| e.raw_os_error() == Some(libc::ENOTCONN)));
    assert_eq!(Agent::new().create(&place.mnt().join("claims/k")), Err(Errno::ENOTCONN));
    // It is another state's; that state's own mount takes it away (tests/orphans).
    let output = place.mount_at(&place.mnt(), &place.path("another-state"), &[]);
    assert_refused(&output, &place.mnt(), &[&["unmount", "umount"]]);
    // Other commands say it, too.
    let status = Command::new(LEASEFS).arg("ls").env("LEASEFS_ROOT", place.mnt()).output_in_time();
    assert_refused(&status, &place.mnt(), &[&["server are gone"], &["leasefs mount"]]);
    place.assert_unmounts();
    assert_not_mounted(&place.mnt());
    assert_ok(&place.mount());
    assert!(Agent::new().create(&place.mnt().join("claims/k")).is_ok(), "and all is well again");
    place.assert_unmounts();
}

#[test]
fn what_is_no_mount_cannot_be_unmounted() {
    let place = Place::new();
    assert_refused(
        &place.unmount(&place.mnt()),
        &place.mnt(),
        &[&["not mounted", "no leasefs", "not a leasefs", "nothing"]],
    );
    let nowhere = place.path("nowhere");
    assert_refused(
        &place.unmount(&nowhere),
        &nowhere,
        &[&["no such", "not mounted", "does not exist", "no leasefs", "not a leasefs"]],
    );
}

#[test]
fn a_busy_tree_is_not_unmounted_and_goes_on() {
    let place = Place::new();
    assert_ok(&place.mount());
    let agent = Agent::new();
    let fd = agent.create(&place.mnt().join("claims/k")).expect("free key");
    assert_refused(&place.unmount(&place.mnt()), &place.mnt(), &[&["busy", "in use"]]);
    assert_eq!(agent.epoch(fd), Ok(1));
    agent.write(fd, "still here").expect("holder");
    agent.close(fd);
    place.assert_unmounts();
    assert_not_mounted(&place.mnt());
}

#[test]
fn sigterm_to_the_server_is_an_orderly_unmount() {
    let place = Place::new();
    assert_ok(&place.mount());
    let text = fs::read_to_string(place.mnt().join(".leasefs/config")).expect("config");
    let config: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    let [server, keeper] = ["pid", "keeper_pid"].map(|field| config[field].as_i64().expect("pid") as i32);
    kill(Pid::from_raw(server), Signal::SIGTERM).expect("the server");
    for pid in [server, keeper] {
        wait_for("its end, and its keeper's", || has_ended(pid));
    }
    assert_not_mounted(&place.mnt());
    assert_ok(&place.mount());
    place.assert_unmounts();
}

#[test]
fn a_mountpoint_by_symlink_or_relative_path_is_the_same() {
    let place = Place::new();
    symlink(place.mnt(), place.path("link")).expect("symlink");
    assert_ok(&place.mount_at(&place.path("link"), &place.state(), &[]));
    assert!(place.mnt().join("claims").is_dir());
    let output = Command::new(LEASEFS)
        .args(["unmount", "mnt"])
        .current_dir(place.path(""))
        .stdin(Stdio::null())
        .output_in_time();
    assert_ok(&output);
    assert_not_mounted(&place.mnt());
    let output = Command::new(LEASEFS)
        .args(["mount", "mnt", "--state", "state", "--durability", "process"])
        .current_dir(place.path(""))
        .stdin(Stdio::null())
        .output_in_time();
    assert_ok(&output);
    assert!(place.mnt().join("claims").is_dir(), "a relative path means the caller's directory");
    place.assert_unmounts();
}

#[test]
fn a_server_in_the_foreground_ends_with_its_mount() {
    let place = Place::new();
    let mut server = Command::new(LEASEFS)
        .arg("mount")
        .arg(place.mnt())
        .arg("--state")
        .arg(place.state())
        .args(["--foreground", "--durability", "process"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("leasefs mount runs");
    wait_for("the tree", || place.mnt().join("claims").is_dir());
    assert!(server.try_wait().expect("wait").is_none(), "it stays in the foreground");
    place.assert_unmounts();
    wait_for("its end", || server.try_wait().expect("wait").is_some());
    assert!(server.wait().expect("wait").success());
}

#[test]
fn a_proc_of_another_pid_namespace() {
    let place = Place::new();
    let mut command = Command::new("timeout");
    // Without a /proc of its own: the numbers that requests come with are other processes' in this one.
    command.args(["60", "unshare", "--pid", "--fork", "--kill-child", LEASEFS, "mount"]).arg(place.mnt());
    let output = command.arg("--state").arg(place.state()).stdin(Stdio::null()).output_in_time();
    assert_refused(&output, Path::new("/proc"), &[&["pid namespace"], &["mount -t proc"]]);
    assert_not_mounted(&place.mnt());
    assert!(!place.state().exists());
}

#[test]
fn a_path_that_is_no_text() {
    use std::os::unix::ffi::OsStrExt;
    let place = Place::new();
    let odd = place.path("").join(std::ffi::OsStr::from_bytes(b"odd\xff"));
    fs::create_dir(&odd).expect("mkdir");
    for (mountpoint, state) in [(odd.clone(), place.state()), (place.mnt(), odd.join("state"))] {
        let output = place.mount_at(&mountpoint, &state, &[]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.lines().count() == 1 && said.contains("odd") && said.contains("is not UTF-8: give"), "{said}");
        let mounts = fs::read("/proc/self/mounts").expect("mounts");
        let here = place.path("");
        assert!(!String::from_utf8_lossy(&mounts).contains(here.to_str().expect("UTF-8")), "something is mounted");
        assert!(!state.exists(), "nothing was made");
    }
}
