//! `leasefs complete`: records an attempt's result, from standard input, and gives the key back.
//!
//! All or nothing: the input is read to its end before the result is opened, and the answer to `fsync` is the answer.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::FileExt;
use std::process::ExitCode;

use anyhow::{Context, Result, anyhow, bail};

use super::holding::attempt::{Attempt, EXIT_OVER, OwnArgs, WHICH};
use super::tree::trouble;
use super::{complain, order};

/// Which attempt; the result comes from standard input.
#[derive(clap::Args, Debug)]
#[command(after_help = format!("\
The result is recorded whole or not at all: nothing is, if reading it fails or a signal ends this command before. An
empty one counts. The key is then finished: `leasefs claim --once` is refused.

{WHICH}

Exit codes: 0 recorded; 75 that attempt is over or has a result, nothing was recorded; 2 bad usage, failure, or not proven
to be yours."))]
pub struct Args {
    /// The attempt.
    #[command(flatten)]
    pub own: OwnArgs,
}

/// Carries the command out.
pub fn run(args: Args) -> Result<ExitCode> {
    let attempt = args.own.find()?;
    let Some(epoch) = attempt.epoch else { return Ok(ExitCode::from(EXIT_OVER)) };
    let limit = attempt.tree.config()?.max_result;
    let result = read_result(io::stdin().lock(), limit).with_context(|| "nothing was recorded")?;
    if let Err(error) = record(&attempt, epoch, &result) {
        return refused(&attempt, epoch, error);
    }
    match order::send(&attempt.tree, "release", &attempt.key, epoch, Some("completed")) {
        Ok(()) => Ok(ExitCode::SUCCESS),
        // Whoever held it has let go already.
        Err(error) if error.raw_os_error() == Some(libc::ESTALE) => Ok(ExitCode::SUCCESS),
        Err(error) => Err(anyhow!("{}: its result is recorded, but it cannot be given back: {error}", attempt.key)),
    }
}

/// Reads all of it.
fn read_result(input: impl Read, limit: Option<u64>) -> Result<Vec<u8>> {
    let mut result = Vec::new();
    let most = limit.unwrap_or(u64::MAX);
    input.take(most.saturating_add(1)).read_to_end(&mut result).context("standard input")?;
    if result.len() as u64 > most {
        bail!("the result has more than {most} bytes: shorten it, or mount with a larger --max-result");
    }
    Ok(result)
}

fn record(attempt: &Attempt, epoch: u64, result: &[u8]) -> io::Result<()> {
    let mut options = OpenOptions::new();
    let mut file =
        options.write(true).create(true).truncate(true).open(attempt.tree.files.result_path(&attempt.key, epoch))?;
    // A draft that could not be written whole is never published.
    file.write_all(result)?;
    file.sync_all().inspect_err(|_| spoil(&file))
}

/// Sees to it that closing the draft does not publish what was just refused: a draft that was cut short is not, and no
/// result may reach this far.
fn spoil(file: &File) {
    const BEYOND: u64 = 1 << 62;
    let _ = file.write_at(b"-", BEYOND);
}

fn refused(attempt: &Attempt, epoch: u64, error: io::Error) -> Result<ExitCode> {
    let Attempt { tree, key, .. } = attempt;
    let path = tree.files.result_path(key, epoch);
    let has_result = || path.metadata().is_ok_and(|meta| meta.permissions().readonly());
    match error.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) if has_result() => {
            complain(format_args!("{key}: epoch {epoch} has a result already, {}: the first counts", path.display()));
            Ok(ExitCode::from(EXIT_OVER))
        }
        Some(libc::ESTALE) => {
            complain(format_args!("{}; nothing was recorded", order::not_holding(tree, key, epoch)));
            Ok(ExitCode::from(EXIT_OVER))
        }
        Some(libc::ENOENT) => bail!("{key}: there was never an epoch {epoch}: give the one you were told"),
        Some(libc::EPERM | libc::EACCES) => {
            bail!("{key}: epoch {epoch} is another user's: only its own uid or root may complete it")
        }
        _ => Err(trouble(format_args!("{key}: nothing was recorded"), error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_result_is_read_whole_or_not_at_all() {
        assert_eq!(read_result(&b"four"[..], Some(4)).expect("fits"), b"four");
        assert!(read_result(&b"fives"[..], Some(4)).is_err());
        assert_eq!(read_result(&b""[..], None).expect("an empty one counts"), b"");
    }
}
