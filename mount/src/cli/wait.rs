//! `leasefs wait`: sleeps in `poll` until a key is not held, or until its result is there.
//!
//! Never claims anything and never takes a place in line. Every sleep begins with a look at the state through the very
//! handle (or after the very open) that will be woken by the next change, so no change is missed and none is polled for.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Result;
use leasefs::Key;
use leasefs::client::Status;
use nix::poll::PollFlags;

use super::events::{Events, parse, sleep};
use super::tree::{Tree, TreeArgs, trouble};
use super::{EXIT_NO, complain, show};

/// What to wait for.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
A key that never was is free, so without --result there is nothing to wait for. To wait *and* hold, use `leasefs run`.

Exit codes: 0 it came about; 1 the time was over first; 2 bad usage or failure.")]
pub struct Args {
    /// Key to wait for
    #[arg(value_name = "KEY")]
    pub key: String,
    /// Wait until the newest attempt has a committed result, and print the result's path
    #[arg(long)]
    pub result: bool,
    /// Wait at most this long
    #[arg(short = 'w', long = "wait", value_name = "SECS", value_parser = super::seconds)]
    pub wait: Option<Duration>,
    /// The tree.
    #[command(flatten)]
    pub tree: TreeArgs,
}

/// Carries the command out.
pub fn run(args: Args) -> Result<ExitCode> {
    let (tree, key) = Tree::find_with_key(&args.tree, &args.key)?;
    let deadline = args.wait.map(|wait| Instant::now() + wait);
    match until(&tree, &key, args.result, deadline)? {
        Done::Open => Ok(ExitCode::SUCCESS),
        Done::Result(epoch) => {
            writeln!(io::stdout().lock(), "{}", tree.files.result_path(&key, epoch).display())?;
            Ok(ExitCode::SUCCESS)
        }
        Done::TimeOver(last) => {
            let missing = if args.result { "no result yet, " } else { "" };
            let waited = args.wait.unwrap_or_default().as_secs_f64();
            complain(format_args!("{key}: {missing}{last}: waited {waited} s, give -w more to wait longer"));
            Ok(ExitCode::from(EXIT_NO))
        }
    }
}

/// How the wait ended.
enum Done {
    /// The key is not held.
    Open,
    /// This attempt, the newest, has a result.
    Result(u64),
    /// Neither in time; with what was the case at the last look.
    TimeOver(String),
}

fn until(tree: &Tree, key: &Key, for_result: bool, deadline: Option<Instant>) -> Result<Done> {
    let mut events = None;
    loop {
        let seen = look(tree, key)?;
        let status = seen.as_ref().map(|(_, status)| status);
        if let Some(done) = is_done(status, for_result) {
            return Ok(done);
        }
        let last = status.map_or_else(|| "was never held".to_owned(), show::in_the_way);
        let in_time = match seen {
            Some((file, status)) if status.epoch > 0 => sleep(file.as_fd(), PollFlags::POLLPRI, deadline)?,
            // A key without an attempt has no lasting status to poll. Its events are heard from before the next look.
            _ => match &mut events {
                Some(events) => hear_of(events, key, deadline)?,
                none => {
                    *none = Some(Events::open(tree)?);
                    true
                }
            },
        };
        if !in_time {
            return Ok(Done::TimeOver(last));
        }
    }
}

fn is_done(status: Option<&Status>, for_result: bool) -> Option<Done> {
    if for_result {
        let status = status?;
        let result = status.result.as_ref().filter(|result| result.epoch == status.epoch)?;
        return Some(Done::Result(result.epoch));
    }
    status.is_none_or(Status::is_open).then_some(Done::Open)
}

/// The key's status and the handle that will tell of its next change.
fn look(tree: &Tree, key: &Key) -> Result<Option<(File, Status)>> {
    let Some(file) = tree.open_status(key)? else { return Ok(None) };
    let status = Status::read(&file).map_err(|error| trouble(key, error))?;
    Ok(Some((file, status)))
}

/// Waits for an event of the key, or one that may have been; false when the time is over.
fn hear_of(events: &mut Events, key: &Key, deadline: Option<Instant>) -> Result<bool> {
    while let Some(lines) = events.wait(deadline)? {
        if may_concern(&lines, key) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// A gap may have swallowed the key's event, and so may a line that is not understood.
fn may_concern(lines: &[u8], key: &Key) -> bool {
    parse(lines)
        .any(|(_, event)| event.is_none_or(|event| event.is_gap() || event.key.as_deref() == Some(key.as_str())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_of_other_keys_wake_nobody() {
        let key = Key::parse("a/b").expect("key");
        assert!(!may_concern(b"{\"event\":\"granted\",\"key\":\"a\",\"epoch\":1}\n", &key));
        assert!(may_concern(b"{\"event\":\"granted\",\"key\":\"a\"}\n{\"event\":\"granted\",\"key\":\"a/b\"}\n", &key));
        assert!(may_concern(b"{\"event\":\"gap\",\"missed\":3}\n", &key));
        assert!(may_concern(b"{\"event\":\"gran", &key));
    }
}
