//! `leasefs renew`: starts an attempt's TTL anew, from any process of the one who holds it.

use std::process::ExitCode;

use anyhow::Result;

use super::holding::attempt::{OwnArgs, WHICH};

/// Which attempt.
#[derive(clap::Args, Debug)]
#[command(after_help = format!("\
{WHICH}

Exit codes: 0 renewed; 75 that attempt is over, nothing was changed; 2 bad usage, failure, or not proven to be yours."))]
pub struct Args {
    /// The attempt.
    #[command(flatten)]
    pub own: OwnArgs,
}

/// Carries the command out.
pub fn run(args: Args) -> Result<ExitCode> {
    args.own.find()?.order("renew", None)
}
