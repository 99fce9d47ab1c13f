//! `leasefs wait`: sleeps in `poll` until a key is not held, or until its result is there.
//!
//! Never claims anything and never takes a place in line. Every sleep begins with a look at the state through the very
//! handle (or after the very open) that will be woken by the next change, so no change is missed and none is polled for.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Result;
use leasefs::Key;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use serde::Deserialize;

use super::tree::{Status, Tree, TreeArgs, trouble};
use super::{EXIT_NO, complain};

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
    let tree = Tree::find(&args.tree, std::slice::from_ref(&args.key))?;
    let key = tree.key(&args.key)?;
    let deadline = args.wait.map(|wait| Instant::now() + wait);
    match until(&tree, &key, args.result, deadline)? {
        Done::Open => Ok(ExitCode::SUCCESS),
        Done::Result(epoch) => {
            writeln!(io::stdout().lock(), "{}", tree.result(&key, epoch).display())?;
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
        let last = status.map_or_else(|| "was never held".to_owned(), Status::in_the_way);
        let in_time = match seen {
            Some((file, status)) if status.epoch > 0 => sleep(&file, PollFlags::POLLPRI, deadline)?,
            // A key without an attempt has no lasting status to poll. Its events are heard from before the next look.
            _ => match &mut events {
                Some(events) => Events::wait_for(events, key, deadline)?,
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

/// Sleeps until the file has something to tell; false when the time is over.
fn sleep(file: &File, flags: PollFlags, deadline: Option<Instant>) -> Result<bool> {
    loop {
        let timeout = match deadline.map(|deadline| deadline.saturating_duration_since(Instant::now())) {
            None => PollTimeout::NONE,
            // Rounded up, or the last millisecond would be spent asking again and again.
            Some(left) => PollTimeout::try_from(left + Duration::from_micros(999)).unwrap_or(PollTimeout::MAX),
        };
        match poll(&mut [PollFd::new(file.as_fd(), flags)], timeout) {
            Ok(0) if deadline.is_some_and(|deadline| Instant::now() >= deadline) => return Ok(false),
            Ok(0) | Err(Errno::EINTR) => {}
            Ok(_) => return Ok(true),
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// `.leasefs/events`, from the moment of its opening on.
struct Events(File);

/// A line of it, as far as a wait needs it.
#[derive(Deserialize)]
struct Event {
    event: String,
    #[serde(default)]
    key: Option<String>,
}

impl Events {
    fn open(tree: &Tree) -> Result<Events> {
        let path = tree.control("events");
        let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(&path);
        Ok(Events(file.map_err(|error| trouble(path.display(), error))?))
    }

    /// Waits for an event of the key, or one that may have been; false when the time is over.
    fn wait_for(&mut self, key: &Key, deadline: Option<Instant>) -> Result<bool> {
        let mut buffer = vec![0; 64 * 1024];
        loop {
            if !sleep(&self.0, PollFlags::POLLIN, deadline)? {
                return Ok(false);
            }
            let length = match self.0.read(&mut buffer) {
                Ok(length) => length,
                Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {
                    continue;
                }
                Err(error) => return Err(trouble(".leasefs/events", error)),
            };
            if length == 0 || may_concern(&buffer[..length], key) {
                return Ok(true);
            }
        }
    }
}

/// A gap may have swallowed the key's event, and so may a line that is not understood.
fn may_concern(lines: &[u8], key: &Key) -> bool {
    lines.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()).any(|line| {
        match serde_json::from_slice::<Event>(line) {
            Ok(event) => event.event == "gap" || event.key.as_deref() == Some(key.as_str()),
            Err(_) => true,
        }
    })
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
