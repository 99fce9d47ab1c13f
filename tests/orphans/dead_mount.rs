//! The dead mount that a lost connection leaves: the next mount takes its own away, and nobody else's.

use std::fs;
use std::path::Path;

use nix::mount::{MntFlags, umount2};

use crate::common::agent::Agent;
use crate::common::{InTime, LEASEFS, Mount, assert_ok};
use crate::lost::{Lost, Other, mount_by_hand};

/// How many trees are mounted on a path.
fn mounted_on(path: &Path) -> usize {
    let mounts = fs::read_to_string("/proc/self/mountinfo").expect("mounts");
    mounts.lines().filter(|line| line.split(' ').nth(4) == path.to_str()).count()
}

fn is_dead(path: &Path) -> bool {
    fs::read_dir(path).is_err_and(|e| e.raw_os_error() == Some(libc::ENOTCONN))
}

fn said(output: &std::process::Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn it_is_taken_away() {
    let mut tree = Lost::new();
    let (holder, _) = Agent::holding(&tree.claim("k"));
    tree.lose_connection();
    assert!(is_dead(&tree.root()));
    tree.start(&[]);
    assert_eq!(mounted_on(&tree.root()), 1);
    assert!(fs::read_dir(tree.root()).is_ok());
    // With nobody in it as well.
    holder.kill();
    tree.lose_and_mount();
    assert_eq!(mounted_on(&tree.root()), 1);
}

#[test]
fn it_is_taken_away_where_it_was_mounted_last() {
    let tree = Lost::new();
    let elsewhere = tree.scratch().join("elsewhere");
    fs::create_dir(&elsewhere).expect("mountpoint");
    tree.lose_connection();
    assert_ok(&mount_by_hand(&elsewhere, &tree.state()));
    let still_there = mounted_on(&tree.root());
    let output = std::process::Command::new(LEASEFS).arg("unmount").arg(&elsewhere).output_in_time();
    assert_ok(&output);
    assert_eq!(still_there, 0);
}

#[test]
fn another_states_is_refused() {
    let tree = Lost::new();
    let beside = tree.scratch();
    tree.lose_connection();
    let output = mount_by_hand(&tree.root(), &beside.join("other-state"));
    assert!(!output.status.success());
    let said = said(&output);
    assert!(said.contains("unmount") && said.trim_end().lines().count() == 1, "{said}");
    assert_eq!(mounted_on(&tree.root()), 1);
    assert!(is_dead(&tree.root()), "it is as it was");
}

#[test]
fn another_states_in_its_place_is_not_touched() {
    let mut tree = Lost::new();
    let other = Other::new(&tree.root(), &tree.scratch());
    tree.lose_connection();
    umount2(&tree.root(), MntFlags::MNT_DETACH).expect("the dead mount");
    // The kernel gives what it mounts now the very numbers that the dead mount had.
    other.mount();
    let holder = Agent::new();
    holder.create(&tree.claim("k")).expect("free in the other tree");
    let output = mount_by_hand(&tree.root(), &tree.state());
    assert!(!output.status.success() && said(&output).contains("is already a leasefs mount"), "{}", said(&output));
    assert_eq!(tree.state_of("k"), "held");

    tree.lose_connection();
    let output = mount_by_hand(&tree.root(), &tree.state());
    assert!(!output.status.success() && said(&output).contains("unmount"), "{}", said(&output));
    assert!(is_dead(&tree.root()) && mounted_on(&tree.root()) == 1);

    // Nor by a mount of ours elsewhere.
    let elsewhere = tree.scratch().join("elsewhere");
    fs::create_dir(&elsewhere).expect("mountpoint");
    assert_ok(&mount_by_hand(&elsewhere, &tree.state()));
    let there = mounted_on(&tree.root());
    let unmount = std::process::Command::new(LEASEFS).arg("unmount").arg(&elsewhere).output_in_time();
    assert_ok(&unmount);
    assert!(there == 1 && is_dead(&tree.root()));
    holder.kill();
    drop(other);
    tree.start(&[]);
}

#[test]
fn what_is_mounted_over_it_is_not_touched() {
    let mut tree = Lost::new();
    tree.lose_connection();
    nix::mount::mount(Some("none"), &tree.root(), Some("tmpfs"), nix::mount::MsFlags::empty(), None::<&str>)
        .expect("tmpfs");
    fs::write(tree.root().join("precious"), "").expect("written");
    let output = mount_by_hand(&tree.root(), &tree.state());
    let there = tree.root().join("precious").exists();
    umount2(&tree.root(), MntFlags::MNT_DETACH).expect("tmpfs");
    assert!(!output.status.success() && there, "{}", said(&output));
    tree.start(&[]);
    assert_eq!(mounted_on(&tree.root()), 1);
}

#[test]
fn a_living_one_is_not_touched() {
    let tree = Mount::new();
    let (holder, fd) = Agent::holding(&tree.claim("k"));
    let output = mount_by_hand(&tree.root(), &tree.state());
    assert!(!output.status.success() && said(&output).contains("is already a leasefs mount"), "{}", said(&output));
    assert_eq!(holder.epoch(fd), Ok(1));
    assert_eq!(mounted_on(&tree.root()), 1);
}
