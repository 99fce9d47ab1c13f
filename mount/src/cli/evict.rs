//! `leasefs evict`: takes a lease away from exactly one attempt.
//!
//! The epoch is demanded so that what is evicted is what was looked at: a newer attempt is never hit by mistake.

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::process::ExitCode;

use anyhow::Result;
use leasefs::Key;
use serde::Serialize;

use super::tree::{Tree, TreeArgs, trouble};
use super::{EXIT_NO, complain};

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

/// What `.leasefs/control` reads.
#[derive(Serialize)]
struct Order<'a> {
    op: &'static str,
    key: &'a str,
    epoch: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'a str>,
}

/// Carries the command out.
pub fn run(args: Args) -> Result<ExitCode> {
    let tree = Tree::find(&args.tree, std::slice::from_ref(&args.key))?;
    let key = tree.key(&args.key)?;
    let order = Order { op: "evict", key: key.as_str(), epoch: args.epoch, reason: args.reason.as_deref() };
    let Err(error) = send(&tree, &serde_json::to_string(&order)?) else {
        return Ok(ExitCode::SUCCESS);
    };
    match error.raw_os_error() {
        Some(libc::ESTALE) => complain(not_holding(&tree, &key, args.epoch)),
        Some(libc::ENOENT) => {
            complain(format_args!("{key}: was never held: check the name, or see `leasefs ls --all`"))
        }
        Some(libc::EACCES | libc::EPERM) => complain(format_args!(
            "{key}: you may not evict its holder: ask root, the mount's owner or the owner of its namespace"
        )),
        _ => return Err(trouble(key, error)),
    }
    Ok(ExitCode::from(EXIT_NO))
}

/// One order is one write.
pub(super) fn send(tree: &Tree, order: &str) -> io::Result<()> {
    let mut control = OpenOptions::new().write(true).open(tree.control("control"))?;
    match control.write(format!("{order}\n").as_bytes())? {
        length if length > order.len() => Ok(()),
        _ => Err(io::Error::new(io::ErrorKind::WriteZero, "the order was cut short")),
    }
}

fn not_holding(tree: &Tree, key: &Key, epoch: u64) -> String {
    let now = match tree.status(key) {
        Ok(Some(status)) if status.is_open() => format!("it is {}, its newest epoch is {}", status.state, status.epoch),
        Ok(Some(status)) => format!("epoch {} is {}", status.epoch, status.in_the_way()),
        _ => "its holder is not known".to_owned(),
    };
    format!("{key}: epoch {epoch} does not hold it: {now}; nothing was evicted")
}
