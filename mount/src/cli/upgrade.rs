//! `leasefs upgrade`: has the program that is on disk now take over from the one that serves.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Result, bail};

use super::tree::{Tree, TreeArgs};
use crate::failure::{self, Failure};
use crate::keeper::control;

/// Arguments of `leasefs upgrade`.
#[derive(clap::Args)]
#[command(after_help = "\
The program found where the mount was started from takes over, and no client notices. It is asked first whether it can;
if it says no, the one that serves goes on, and this command ends with 1 and says why. The keeper, the process that
`leasefs mount` left behind, is not replaced: it holds the connection. It changes little; a new one comes with the next
mount. SIGHUP to the keeper does the same.

Exit codes: 0 upgraded; 1 not upgraded: stderr says why; 2 bad usage.")]
pub struct Args {
    /// Where the tree is mounted [default: the one around the working directory, else the only one]
    mountpoint: Option<PathBuf>,
}

/// Upgrades.
///
/// # Errors
/// Why it was refused.
pub fn run(args: Args) -> Result<ExitCode> {
    let root = args.mountpoint.or_else(|| std::env::var_os("LEASEFS_ROOT").map(PathBuf::from));
    let tree = Tree::find(&TreeArgs { root }, &[])?;
    let state_dir = tree.config()?.state_dir;
    let answer = control::upgrade(&state_dir)?;
    if let Some(why) = answer.strip_prefix(control::REFUSED) {
        bail!(Failure::NotUpgraded { why: why.to_owned() });
    }
    if !answer.starts_with(control::DONE) {
        bail!(Failure::KeeperSilent { log: failure::shown(&state_dir.join(crate::logfile::LOG)) });
    }
    // It is done, also where nobody reads of it.
    let _ = writeln!(std::io::stdout(), "{answer}");
    Ok(ExitCode::SUCCESS)
}
