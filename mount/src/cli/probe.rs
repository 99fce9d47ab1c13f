//! `leasefs probe`: looks at a mounted root on the server's behalf, which must never touch its own mount.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;

/// Arguments of `leasefs probe`.
#[derive(clap::Args)]
pub struct Args {
    /// The directory to look at
    path: PathBuf,
}

/// Looks.
///
/// # Errors
/// Those of `stat(2)`.
pub fn run(args: Args) -> Result<ExitCode> {
    std::fs::metadata(args.path.join("claims"))?;
    Ok(ExitCode::SUCCESS)
}
