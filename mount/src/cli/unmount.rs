//! `leasefs unmount`: takes the tree away and waits until its server has ended.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::failure::{self, Failure};
use crate::{kernel_mount, mountinfo};

/// How long a server may take to record what is left and end.
const PATIENCE: Duration = Duration::from_secs(30);
/// How often an unmount is tried again while the tree is busy, and after how long: a file that is just being closed, as that
/// of a holder whose key was released a moment ago, keeps it so a little longer than its lease is there. Tries are counted,
/// and not the time: where the machine stands still, whoever closes does, too.
const TRIES: u32 = 100;
const PAUSE: Duration = Duration::from_millis(10);

/// Arguments of `leasefs unmount`.
#[derive(clap::Args)]
#[command(after_help = "\
A tree in which files are open is not unmounted, so no lease is cut short. A dead mount, which answers ENOTCONN, is taken
away.

Exit codes: 0 unmounted; 1 still mounted, or its server has not ended: stderr says why and what to do; 2 bad usage.")]
pub struct Args {
    /// Where the tree is mounted
    mountpoint: PathBuf,
}

/// Unmounts.
///
/// # Errors
/// What is wrong and what to do; then the tree is still mounted.
pub fn run(args: Args) -> Result<ExitCode> {
    let shown = args.mountpoint.display();
    let path = match resolve(&args.mountpoint) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            bail!(Failure::NothingThere { path: shown.to_string() })
        }
        resolved => resolved.with_context(|| format!("{shown}"))?,
    };
    if !mountinfo::is_leasefs(&path)? {
        bail!(Failure::NotMounted { path: shown.to_string() });
    }
    let keeper = keeper_of(&path);
    match disconnect(&path) {
        Ok(()) => {}
        // Somebody else was first, since it was looked at.
        Err(_) if !mountinfo::is_leasefs(&path)? => {}
        Err(error) if error.raw_os_error() == Some(libc::EBUSY) => bail!(Failure::InUse { path: shown.to_string() }),
        Err(error) if matches!(error.raw_os_error(), Some(libc::EPERM | libc::EINVAL)) => {
            bail!(Failure::UnmountNotPermitted { path: shown.to_string() })
        }
        Err(error) => bail!("cannot unmount {shown}: {error}"),
    }
    if let Some((pid, state_dir)) = keeper {
        wait_for_end(pid, &state_dir)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Unmounts, once what is being closed is closed.
fn disconnect(path: &Path) -> std::io::Result<()> {
    let mut disconnected = kernel_mount::disconnect(path, false);
    for _ in 0..TRIES {
        if !disconnected.as_ref().is_err_and(|error| error.raw_os_error() == Some(libc::EBUSY)) {
            break;
        }
        std::thread::sleep(PAUSE);
        disconnected = kernel_mount::disconnect(path, false);
    }
    disconnected
}

/// The absolute path, also of a mount whose server is gone: of that only the parent can be looked at.
fn resolve(path: &Path) -> std::io::Result<PathBuf> {
    match path.canonicalize() {
        Err(error) if error.raw_os_error() == Some(libc::ENOTCONN) => {
            let absolute = std::path::absolute(path)?;
            let (parent, name) = (absolute.parent(), absolute.file_name());
            match (parent, name) {
                (Some(parent), Some(name)) => Ok(parent.canonicalize()?.join(name)),
                _ => Err(error),
            }
        }
        result => result,
    }
}

/// The keeper's pid and the state directory, which the tree itself names.
fn keeper_of(mountpoint: &Path) -> Option<(u32, PathBuf)> {
    let text = std::fs::read_to_string(mountpoint.join(".leasefs/config")).ok()?;
    let config: serde_json::Value = serde_json::from_str(&text).ok()?;
    let pid = u32::try_from(config["keeper_pid"].as_u64()?).ok()?;
    Some((pid, PathBuf::from(config["state_dir"].as_str()?)))
}

/// Server and keeper end by themselves once the kernel has let go of the tree, in this order; until then the state
/// directory is in use.
fn wait_for_end(pid: u32, state_dir: &Path) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    let process = PathBuf::from(format!("/proc/{pid}/exe"));
    while std::fs::read_link(&process).is_ok() {
        if Instant::now() > deadline {
            bail!(Failure::KeeperStays { pid: pid.to_string(), path: failure::shown(state_dir) });
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    Ok(())
}
