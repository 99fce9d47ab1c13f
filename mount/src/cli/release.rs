//! `leasefs release`: gives a key back, from any process of the one who holds it.

use std::process::ExitCode;

use anyhow::Result;

use super::holding::attempt::{OwnArgs, WHICH};

/// Which attempt, and why it ends.
#[derive(clap::Args, Debug)]
#[command(after_help = format!("\
{WHICH}

Exit codes: 0 released; 75 that attempt is over, nothing was changed; 2 bad usage, failure, or not proven to be yours."))]
pub struct Args {
    /// The attempt.
    #[command(flatten)]
    pub own: OwnArgs,
    /// Why, for the key's history
    #[arg(long, value_name = "TEXT")]
    pub reason: Option<String>,
}

/// Carries the command out.
pub fn run(args: Args) -> Result<ExitCode> {
    args.own.find()?.order("release", args.reason.as_deref())
}
