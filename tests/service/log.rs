//! The log of a background mount is bounded, and whoever puts it aside, keeper and servers go on in the new one. Where no
//! line can be written, they go on without.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::process::Command;

use nix::fcntl::{Flock, FlockArg};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::common::agent::has_ended;
use crate::common::{InTime, LEASEFS, Mount, assert_ok, assert_refused, wait_for};

const LIMIT: u64 = 1 << 20;

fn log(mount: &Mount) -> PathBuf {
    mount.state().join("leasefs.log")
}

/// Makes the log as long as it may be, but for a few bytes; gives the number of its file.
fn fill(mount: &Mount) -> u64 {
    let file = fs::OpenOptions::new().append(true).open(log(mount)).expect("the log");
    // Keeper and server write under the same lock.
    let file = Flock::lock(file, FlockArg::LockExclusive).expect("the log's lock");
    let found = file.metadata().expect("stat");
    let line = vec![b'.'; usize::try_from(LIMIT - 10 - found.len()).expect("room")];
    std::io::Write::write_all(&mut &*file, &line).expect("written");
    found.ino()
}

/// Kills the server, and waits until the next one has said that it serves.
fn kill_server(mount: &Mount) {
    let pid = mount.server_pid().expect("a server");
    kill(Pid::from_raw(pid), Signal::SIGKILL).expect("it is there");
    wait_for("its end", || has_ended(pid));
    let next = mount.server_pid().expect("the next server");
    assert_ne!(next, pid);
}

/// Two ways in which no line can be written, and neither keeper nor server may end for that.
#[test]
fn a_log_that_cannot_be_written_stops_nobody() {
    let mut mount = Mount::unserved();
    fs::create_dir_all(mount.state()).expect("state");
    std::os::unix::fs::symlink("/dev/full", log(&mount)).expect("symlink");
    mount.start(&[]);
    for _ in 0..2 {
        kill_server(&mount);
        assert_ok(&mount.command("flock").arg("-n").arg(mount.claim("k")).arg("true").output_in_time());
    }
    mount.unmount();

    let (root, state) = (mount.root(), mount.state());
    let script = format!("exec {LEASEFS} mount --foreground --state {} {}", state.display(), root.display());
    let mut keeper = mount.spawn_bash(&format!("{script} >/dev/full 2>&1"));
    wait_for("the tree", || root.join("claims").is_dir());
    kill_server(&mount);
    // As when its terminal is gone: it is told, takes the program on the disk, and has nobody to tell what came of it.
    kill(Pid::from_raw(keeper.pid()), Signal::SIGHUP).expect("it is there");
    wait_for("the third server", || {
        let text = fs::read_to_string(root.join(".leasefs/config")).unwrap_or_default();
        text.contains("\"starts\":3")
    });
    mount.unmount();
    assert!(keeper.wait().success());
}

#[test]
fn a_log_that_cannot_be_opened_is_told_of_with_what_to_do() {
    let mount = Mount::unserved();
    fs::create_dir_all(log(&mount)).expect("mkdir");
    let output =
        Command::new(LEASEFS).arg("mount").arg(mount.root()).arg("--state").arg(mount.state()).output_in_time();
    assert_refused(&output, 1, &[&log(&mount).display().to_string(), "Is a directory", "--foreground"]);
}

#[test]
fn a_full_log_is_put_aside_and_all_go_on_in_the_new_one() {
    let mount = Mount::new();
    let old = mount.state().join("leasefs.log.old");
    for round in 1..=3 {
        let full = fill(&mount);
        kill_server(&mount);
        // There is none for a moment, after the full one was put aside.
        let text = || fs::read_to_string(log(&mount)).unwrap_or_default();
        // Of the keeper, and of the new server, which inherited the descriptor of the old file.
        wait_for("the keeper's word", || text().contains("starting another"));
        wait_for("the server's word", || text().contains("took over"));
        assert_eq!(fs::metadata(&old).expect("the old log").ino(), full, "round {round}");
        for file in [&old, &log(&mount)] {
            assert!(fs::metadata(file).expect("stat").len() <= LIMIT, "round {round}: {}", file.display());
        }
    }
    let logs = fs::read_dir(mount.state()).expect("state").flatten();
    let logs = logs.filter(|entry| entry.file_name().to_string_lossy().starts_with("leasefs.log")).count();
    assert_eq!(logs, 2, "no more than two are kept");
}
