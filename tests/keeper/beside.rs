//! Two at the same place: mounts on one directory, unmounts of one tree, and what is mounted where another tree was.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use nix::sys::signal::Signal;

use crate::common::agent::has_ended;
use crate::common::{InTime, LEASEFS, assert_ok, read_in_time, wait_for};
use crate::place::{Place, mounts_on};

fn leasefs(command: &str, root: &Path, options: &[&str]) -> Command {
    let mut leasefs = Command::new(LEASEFS);
    leasefs.arg(command).arg(root).args(options).stdin(Stdio::null());
    leasefs
}

#[test]
fn a_keeper_that_ends_leaves_alone_what_is_mounted_in_the_place_of_its_tree() {
    let mut place = Place::mount(&[], &[]);
    let server = place.server();
    let (agent, fd) = place.stop_while_held();
    let other = place.path("other");
    let mount = leasefs("mount", &place.mnt(), &["--state", other.to_str().expect("UTF-8")]).output_in_time();
    assert_ok(&mount);
    let its_keeper = place.number("keeper_pid").expect("the other tree") as i32;
    // Told once more, it must not take that for its own either.
    place.signal(server, Signal::SIGTERM);
    agent.close(fd);
    drop(agent);
    assert!(place.wait().success(), "{}", place.log());
    assert_eq!(place.number("keeper_pid"), Some(its_keeper.into()), "the other tree is served");
    assert_ok(&leasefs("unmount", &place.mnt(), &[]).output_in_time());
    wait_for("its end", || has_ended(its_keeper));
}

/// What a command says, and how it ended.
fn end_of(mut child: Child) -> (Option<i32>, String) {
    let said = read_in_time(child.stderr.take());
    (child.wait().expect("it ended").code(), said)
}

#[test]
fn of_two_that_mount_on_one_directory_at_once_one_is_refused() {
    let dir = tempfile::tempdir().expect("directory");
    let root = dir.path().join("mnt");
    fs::create_dir(&root).expect("mountpoint");
    let start = |command: &str, options: &[&str]| {
        leasefs(command, &root, options).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("leasefs runs")
    };
    for round in 0..8 {
        let states = ["a", "b"].map(|name| dir.path().join(name).to_str().expect("UTF-8").to_owned());
        let mounting = states.map(|state| start("mount", &["--durability", "process", "--state", &state]));
        let ended = mounting.map(end_of);
        let mounts = mounts_on(&root);
        // And the same of those that take it away: whoever is later finds it done.
        let unmounted = [(); 2].map(|()| start("unmount", &[])).map(end_of);
        while mounts_on(&root) > 0 {
            nix::mount::umount2(&root, nix::mount::MntFlags::MNT_DETACH).expect("umount");
        }
        assert_eq!(mounts, 1, "round {round}: {ended:?}");
        let refused: Vec<_> = ended.iter().filter(|(code, _)| *code != Some(0)).collect();
        assert!(refused.len() == 1 && refused[0].1.contains("already a leasefs mount"), "round {round}: {ended:?}");
        let is_well =
            |(code, said): &(Option<i32>, String)| *code == Some(0) || said.contains("is not a leasefs mount");
        assert!(unmounted.iter().any(|(code, _)| *code == Some(0)), "round {round}: {unmounted:?}");
        assert!(unmounted.iter().all(is_well), "round {round}: {unmounted:?}");
    }
}
