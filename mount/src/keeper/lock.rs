//! One keeper for a state directory.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};

use crate::dead_mount::Record;
use crate::failure::{self, Failure};

/// How often to try for a lock whose owner serves a tree, as far as can be seen. Tries are counted, and not the time: where
/// the machine stands still, whoever is ending does, too.
const TRIES: u32 = 100;
/// The same where its owner has ended, and only the server it left has to be ended by the kernel, or where its tree is not
/// mounted here any more, so that it is about to end.
const ENDING_TRIES: u32 = 2_000;
/// Between two tries.
const PAUSE: Duration = Duration::from_millis(5);

/// Keeps another keeper off the state directory for as long as this one or its server lives.
///
/// # Errors
/// Another one has it.
pub fn lock_state(state_dir: &Path) -> Result<Flock<File>> {
    let path = state_dir.join("lock");
    let mut tries = 0;
    loop {
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(&path);
        let mut file = file.with_context(|| format!("{}", path.display()))?;
        let mut owner = String::new();
        let _ = file.read_to_string(&mut owner);
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(mut lock) => {
                lock.set_len(0).with_context(|| format!("{}", path.display()))?;
                std::io::Seek::rewind(&mut *lock)?;
                writeln!(lock, "{}", std::process::id()).with_context(|| format!("{}", path.display()))?;
                return Ok(lock);
            }
            Err((_, Errno::EWOULDBLOCK)) => {}
            Err((_, errno)) => bail!("{}: {errno}", path.display()),
        }
        tries += 1;
        if tries > ENDING_TRIES || tries > TRIES && lives(&owner) && is_mounted(state_dir) {
            bail!(Failure::StateServed { path: failure::shown(state_dir) });
        }
        std::thread::sleep(PAUSE);
    }
}

/// Whether a process of this number is there and has not begun to end: then it has a program.
fn lives(owner: &str) -> bool {
    let program = |pid: u32| std::fs::read_link(format!("/proc/{pid}/exe"));
    owner.trim().parse().is_ok_and(|pid| !program(pid).is_err_and(|error| error.kind() == ErrorKind::NotFound))
}

/// Whether the tree that was mounted from a state directory last is mounted, as far as can be seen.
fn is_mounted(state_dir: &Path) -> bool {
    Record::read(state_dir).is_some_and(|record| record.is_there().unwrap_or(true))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The lock of a state directory, as a keeper has it that gives it back a little later than one that serves is waited for.
    fn kept_for_a_while(state_dir: &Path, owner: &str) -> std::thread::JoinHandle<()> {
        let path = state_dir.join("lock");
        std::fs::write(&path, owner).expect("written");
        let lock = Flock::lock(File::open(path).expect("a file"), FlockArg::LockExclusiveNonblock).expect("free");
        std::thread::spawn(move || {
            std::thread::sleep(PAUSE * TRIES * 2);
            drop(lock);
        })
    }

    #[test]
    fn the_lock_of_one_that_is_about_to_end_is_waited_for() {
        let mut ended = std::process::Command::new("true").spawn().expect("true runs");
        // Not reaped: its number is there, and it is not.
        let exe = format!("/proc/{}/exe", ended.id());
        while std::fs::read_link(&exe).is_ok() {
            std::thread::sleep(PAUSE);
        }
        for owner in [ended.id(), std::process::id()] {
            let dir = tempfile::tempdir().expect("directory");
            let kept = kept_for_a_while(dir.path(), &format!("{owner}\n"));
            // Nothing is mounted from there any more.
            lock_state(dir.path()).expect("it is given back");
            kept.join().expect("thread");
        }
        ended.wait().expect("it is reaped");
    }

    #[test]
    fn a_process_lives_until_it_has_no_program() {
        assert!(lives(&format!("{}\n", std::process::id())));
        assert!(!lives("") && !lives("0") && !lives("4294967295"));
    }
}
