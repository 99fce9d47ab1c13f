//! Orders to the server: what is written to `.leasefs/control`, and how a refusal reads.
//!
//! Each order names key and epoch, so it hits the attempt that was looked at or none.

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::thread;
use std::time::Duration;

use leasefs::Key;
use serde::Serialize;

use super::show;
use super::tree::{self, Tree};

/// What `.leasefs/control` reads.
#[derive(Serialize)]
struct Order<'a> {
    op: &'static str,
    key: &'a str,
    epoch: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'a str>,
}

/// Sends an order about one attempt.
///
/// # Errors
/// `ESTALE` when that attempt does not hold the key, `ENOENT` for a key that never was, `EACCES` when it is not the
/// caller's to give; those of writing.
pub fn send(tree: &Tree, op: &'static str, key: &Key, epoch: u64, reason: Option<&str>) -> io::Result<()> {
    let order = serde_json::to_string(&Order { op, key: key.as_str(), epoch, reason })?;
    let mut is_again = false;
    loop {
        match send_text(tree, &order) {
            // The server was replaced, on a kernel that does not resend: it may have done it before, or not.
            Err(error) if error.kind() == io::ErrorKind::Interrupted => is_again = true,
            Err(error)
                if is_again && error.raw_os_error() == Some(libc::ESTALE) && was_ended_here(tree, key, epoch) =>
            {
                return Ok(());
            }
            sent => return sent,
        }
    }
}

/// Whether an attempt was ended by an order of this process.
fn was_ended_here(tree: &Tree, key: &Key, epoch: u64) -> bool {
    let history = || {
        let registry = tree::open_registry(&tree.config().ok()?.state_dir).ok()?;
        registry.history(key).ok()?.into_iter().find(|attempt| attempt.epoch == epoch)?.reason
    };
    history().is_some_and(|why| is_by(&why, std::process::id()))
}

/// Whether an attempt ended by an order of that process: `by pid P`, `by uid U (pid P)`, and then the reason that was given.
fn is_by(why: &str, pid: u32) -> bool {
    let by = why.split(": ").next().unwrap_or(why).trim_end_matches(')');
    by.starts_with("by ") && by.rsplit(' ').next() == Some(pid.to_string().as_str())
}

/// Sends an order that may be carried out twice.
///
/// # Errors
/// Those of writing, by which the server refuses.
pub fn send_repeatable(tree: &Tree, order: &str) -> io::Result<()> {
    const AGAIN: Duration = Duration::from_millis(20);
    let mut was_cut_off = false;
    loop {
        match send_text(tree, order) {
            // Nobody is told of a signal and lives, so the server was replaced: the next one is to do what is left.
            Err(error) if error.kind() == io::ErrorKind::Interrupted => was_cut_off = true,
            // It deletes what the one before it had noted, or a backup that waited came first. As where the kernel sends
            // the order again, nobody is to be told of that.
            Err(error) if was_cut_off && error.raw_os_error() == Some(libc::EBUSY) => thread::sleep(AGAIN),
            sent => return sent,
        }
    }
}

/// Sends any order. One order is one write, and its return is the answer.
fn send_text(tree: &Tree, order: &str) -> io::Result<()> {
    let mut control = OpenOptions::new().write(true).open(tree.files.control_path("control"))?;
    match control.write(format!("{order}\n").as_bytes())? {
        length if length > order.len() => Ok(()),
        _ => Err(io::Error::new(io::ErrorKind::WriteZero, "the order was cut short")),
    }
}

/// What the key is now, for whoever named an attempt that does not hold it.
pub fn not_holding(tree: &Tree, key: &Key, epoch: u64) -> String {
    let now = match tree.status(key) {
        Ok(Some(status)) if status.is_open() => format!("it is {}, its newest epoch is {}", status.state, status.epoch),
        Ok(Some(status)) => format!("epoch {} is {}", status.epoch, show::in_the_way(&status)),
        _ => "its holder is not known".to_owned(),
    };
    format!("{key}: epoch {epoch} does not hold it: {now}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_ended_an_attempt_is_known_by_its_pid() {
        for why in ["by pid 12", "by pid 12: done: by pid 7", "by uid 0 (pid 12)", "by uid 0 (pid 12): it hung"] {
            assert!(is_by(why, 12) && !is_by(why, 2) && !is_by(why, 7), "{why}");
        }
        assert!(!is_by("exited 12", 12));
    }
}
