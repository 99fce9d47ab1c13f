//! `leasefs serve`: what the keeper starts. Not for people.

use std::fs::File;
use std::io::Write;
use std::process::ExitCode;

use anyhow::Result;

use crate::handover::{ABLE, Handover, READY};
use crate::{logfile, server};

/// Arguments of `leasefs serve`.
#[derive(clap::Args)]
pub struct Args {
    /// Only say whether this program can take over
    #[arg(long)]
    check: bool,
}

/// Serves, or says whether it could.
///
/// # Errors
/// Where the keeper did not start it.
pub fn run(args: Args) -> Result<ExitCode> {
    logfile::start();
    let (report, taken) = Handover::take()?;
    let mut report = Some(File::from(report));
    let mut say = |text: &str| {
        if let Some(mut report) = report.take() {
            let _ = report.write_all(text.as_bytes());
        }
    };
    let outcome = taken.and_then(|(handover, passed)| match args.check {
        true => server::check(&handover, passed).map(|()| say(&format!("{ABLE}{}", env!("CARGO_PKG_VERSION")))),
        false => {
            if handover.log_there {
                logfile::follow(&handover.plan.state_dir)?;
            }
            server::serve(&handover, passed, || say(READY))
        }
    });
    match outcome {
        Ok(()) => Ok(ExitCode::SUCCESS),
        Err(error) => {
            // The keeper passes the first on to whoever mounts; who was ready already has only the log.
            if report.is_none() {
                tracing::error!("{error:#}");
            } else if let Some(mut report) = report {
                let _ = report.write_all(format!("{error:#}").as_bytes());
            }
            Ok(ExitCode::FAILURE)
        }
    }
}
