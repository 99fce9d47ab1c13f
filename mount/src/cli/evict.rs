//! `leasefs evict`: takes a lease away from exactly one attempt.
//!
//! The epoch is demanded so that what is evicted is what was looked at: a newer attempt is never hit by mistake.

use std::process::ExitCode;

use anyhow::Result;

use super::tree::{Tree, TreeArgs, never_held, trouble};
use super::{EXIT_NO, complain, order};

/// Which attempt, and why.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
For root, the mount's owner and the namespace's owner. The evicted holder is not killed: it gets ESTALE at its next read,
write or renewal, and its result is refused.

Exit codes: 0 evicted; 1 refused: that attempt does not hold the key, or you may not; 2 bad usage or failure.")]
pub struct Args {
    /// Key whose lease is taken away
    #[arg(value_name = "KEY")]
    pub key: String,
    /// Epoch of the attempt that is to lose it (see `leasefs status KEY`)
    #[arg(long, value_name = "N")]
    pub epoch: u64,
    /// Why, for the key's history
    #[arg(long, value_name = "TEXT")]
    pub reason: Option<String>,
    /// The tree.
    #[command(flatten)]
    pub tree: TreeArgs,
}

/// Carries the command out.
pub fn run(args: Args) -> Result<ExitCode> {
    let (tree, key) = Tree::find_with_key(&args.tree, &args.key)?;
    let Err(error) = order::send(&tree, "evict", &key, args.epoch, args.reason.as_deref()) else {
        return Ok(ExitCode::SUCCESS);
    };
    match error.raw_os_error() {
        Some(libc::ESTALE) => {
            complain(format_args!("{}; nothing was evicted", order::not_holding(&tree, &key, args.epoch)))
        }
        Some(libc::ENOENT) => complain(never_held(&key)),
        Some(libc::EACCES | libc::EPERM) => complain(format_args!(
            "{key}: you may not evict its holder: ask root, the mount's owner or the owner of its namespace"
        )),
        _ => return Err(trouble(key, error)),
    }
    Ok(ExitCode::from(EXIT_NO))
}
