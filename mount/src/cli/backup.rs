//! `leasefs backup`: a copy of the state directory, mounted or not.
//!
//! The copying is [`leasefs::backup`]'s. Here is decided whether somebody serves the directory: if so, the server is asked
//! to record what it decided; if not, servers are kept off it meanwhile.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, anyhow, bail};
use leasefs::backup::{Step, backup};
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};

use super::progress::Progress;
use super::tree::{self, StateArgs};
use crate::mountinfo;

/// What the server has decided and not yet put into the registry, for a directory that was not left in order.
const JOURNAL: &str = "journal";

/// What to copy, and where to.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
DEST is a state directory of its own: mount it with `leasefs mount MOUNTPOINT --state DEST`, check it with `leasefs
verify --state DEST`. It holds every key, epoch, namespace, history and committed result as of one moment; open drafts
are not in it. While the tree is mounted nobody waits for it. Results are hard links where DEST is on the same
filesystem (they never change), so a backup against the loss of a disk belongs on another one.

Epochs given out after a backup was made are not in it. Whoever goes on from a backup while outsiders remember newer
epochs (a database that fences by them, a name of a file) gets those numbers a second time. So:
  - copying a backup's files over a state directory that has gone on is refused at the next mount;
  - mount the backup as a state directory of its own, only where the newer one is lost;
  - before that, end every process that held a key after the backup was made, and claim and release each key that
    outsiders fence by until its epoch is above the highest they have seen.

Exit codes: 0 the backup is whole and on disk; 2 there is none.")]
pub struct Args {
    /// A directory that does not exist, or is empty
    #[arg(value_name = "DEST")]
    pub dest: PathBuf,
    /// The state directory.
    #[command(flatten)]
    pub place: StateArgs,
}

/// Carries the command out.
pub fn run(args: Args) -> Result<ExitCode> {
    check_outside(&args.dest)?;
    let dir = args.place.dir()?;
    // Says what is wrong where there is no registry.
    drop(tree::open_registry(&dir)?);
    let kept_off = keep_servers_off(&dir)?;
    if kept_off.is_none() && args.place.state.is_some() {
        bail!("{}: it is being served: name its tree with --root, in place of --state", dir.display());
    }
    // Of a mounted tree, finding its state directory had the server put all of it into the registry.
    let extra: &[&str] = if kept_off.is_some() { &[JOURNAL] } else { &[] };
    let progress = Progress::new("copying", None);
    let told = |step| match step {
        Step::Registry => progress.next("copying the registry", None),
        Step::Results(count) => progress.next("copying results", Some(count as u64)),
        Step::Result => progress.add(1),
        Step::Sync => progress.next("waiting for the disk", None),
    };
    let made = backup(&dir, &args.dest, extra, &told).map_err(|error| match error {
        leasefs::Error::Storage { message, .. } => anyhow!(message),
        other => anyhow!(other),
    })?;
    drop(progress);
    drop(kept_off);
    writeln!(
        io::stdout(),
        "ok: {}: {} keys, {} attempts, {} results ({} bytes)",
        args.dest.display(),
        made.keys,
        made.attempts,
        made.results,
        made.result_bytes
    )?;
    Ok(ExitCode::SUCCESS)
}

/// The lock that a server takes, unless one has it.
pub(super) fn keep_servers_off(dir: &Path) -> Result<Option<Flock<File>>> {
    let path = dir.join("lock");
    // A backup that was never served has none yet.
    let file = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(&path);
    let file = match file {
        Err(error) if error.raw_os_error() == Some(libc::EROFS) => File::open(&path),
        other => other,
    };
    let file = file.map_err(|error| tree::trouble(path.display(), error))?;
    match Flock::lock(file, FlockArg::LockSharedNonblock) {
        Ok(lock) => Ok(Some(lock)),
        Err((_, Errno::EWOULDBLOCK)) => Ok(None),
        Err((_, errno)) => Err(tree::trouble(path.display(), errno.into())),
    }
}

/// In a tree, a copy would be keys.
fn check_outside(dest: &Path) -> Result<()> {
    let absolute = std::path::absolute(dest)?;
    let parent = absolute.parent().unwrap_or(&absolute);
    let real = parent.canonicalize().unwrap_or_else(|_| parent.to_owned());
    match mountinfo::trees().context("/proc/self/mountinfo")?.into_iter().find(|tree| real.starts_with(tree)) {
        Some(tree) => {
            bail!("{} is inside the leasefs tree {}: give a directory elsewhere", dest.display(), tree.display())
        }
        None => Ok(()),
    }
}
