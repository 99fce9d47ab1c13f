//! `leasefs probe`: looks at a mounted root on the server's behalf, which must never touch its own mount, nor wait for one
//! that may be dead.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;

use super::EXIT_NO;

/// Arguments of `leasefs probe`.
#[derive(clap::Args)]
pub struct Args {
    /// Show its .leasefs/config, or the number of the error
    #[arg(long)]
    show: bool,
    /// Succeed where its connection is lost instead
    #[arg(long)]
    dead: bool,
    /// The directory to look at
    path: PathBuf,
}

/// Looks.
///
/// # Errors
/// Those of `stat(2)`.
pub fn run(args: Args) -> Result<ExitCode> {
    if args.dead {
        // Not stat(2): the kernel may still have the root's attributes. This is asked anew each time.
        return match nix::sys::statvfs::statvfs(&args.path) {
            Err(nix::Error::ENOTCONN) => Ok(ExitCode::SUCCESS),
            _ => Ok(ExitCode::from(EXIT_NO)),
        };
    }
    if args.show {
        return match std::fs::read_to_string(args.path.join(".leasefs/config")) {
            Ok(config) => {
                print!("{config}");
                Ok(ExitCode::SUCCESS)
            }
            Err(error) => {
                print!("{}", error.raw_os_error().unwrap_or(0));
                Ok(ExitCode::from(EXIT_NO))
            }
        };
    }
    std::fs::metadata(args.path.join("claims"))?;
    Ok(ExitCode::SUCCESS)
}
