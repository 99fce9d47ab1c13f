//! One keeper for a state directory.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};

use crate::failure::{self, Failure};

/// How often to try for a lock whose owner is ending. Tries are counted, and not the time: where the machine stands still,
/// whoever is ending does, too.
const TRIES: u32 = 100;
/// The same where its owner is known to be dead, and only the server it left has to be ended by the kernel.
const DEAD_TRIES: u32 = 2_000;
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
        let lives = owner.trim().parse::<u32>().is_ok_and(|pid| Path::new(&format!("/proc/{pid}")).exists());
        tries += 1;
        if tries > if lives { TRIES } else { DEAD_TRIES } {
            bail!(Failure::StateServed { path: failure::shown(state_dir) });
        }
        std::thread::sleep(PAUSE);
    }
}
