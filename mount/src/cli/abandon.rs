//! `leasefs abandon`: gives a key back without a result, and says why.

use std::process::ExitCode;

use anyhow::{Result, bail};

use super::holding::attempt::{OwnArgs, WHICH};

/// Which attempt, and why it is given up.
#[derive(clap::Args, Debug)]
#[command(after_help = format!("\
The key is free for others at once; `leasefs history` shows the reason.

{WHICH}

Exit codes: 0 abandoned; 75 that attempt is over, nothing was changed; 2 bad usage, failure, or not proven to be yours."))]
pub struct Args {
    /// The attempt.
    #[command(flatten)]
    pub own: OwnArgs,
    /// Why, for the key's history
    #[arg(long, value_name = "TEXT", required = true)]
    pub reason: String,
}

/// Carries the command out.
pub fn run(args: Args) -> Result<ExitCode> {
    if args.reason.trim().is_empty() {
        bail!("{}: --reason is empty: say why it is abandoned", args.own.key);
    }
    args.own.find()?.order("release", Some(&format!("abandoned: {}", args.reason)))
}
