//! `leasefs status`: everything the tree says about one key.

use std::io::{self, Write};
use std::process::ExitCode;

use anyhow::Result;
use leasefs::client::status::{Sharing, Status, Waiting};
use leasefs::{Key, Ttl};

use super::deadlock;
use super::show;
use super::tree::{Tree, TreeArgs};
use super::{EXIT_NO, complain};

/// Which key, and how to show it.
#[derive(clap::Args, Debug)]
#[command(after_help = "Exit codes: 0 shown; 1 there never was such a key; 2 bad usage or failure.")]
pub struct Args {
    /// Key to show
    #[arg(value_name = "KEY")]
    pub key: String,
    /// The JSON object of status/KEY, on one line
    #[arg(long)]
    pub json: bool,
    /// The tree.
    #[command(flatten)]
    pub tree: TreeArgs,
}

/// Carries the command out.
pub fn run(args: Args) -> Result<ExitCode> {
    let (tree, key) = Tree::find_with_key(&args.tree, &args.key)?;
    let Some(status) = tree.status_of_known(&key)? else { return Ok(ExitCode::from(EXIT_NO)) };
    let mut out = io::stdout().lock();
    if args.json {
        writeln!(out, "{}", status.json())?;
    } else {
        write_block(&mut out, &tree, &key, &status)?;
        if let Some(ring) = deadlock::ring_through(&tree, &key) {
            complain(ring);
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn write_block(out: &mut impl Write, tree: &Tree, key: &Key, status: &Status) -> io::Result<()> {
    let mut line = |name: &str, value: &str| writeln!(out, "{name:8} {value}");
    line("key", status.key.as_str())?;
    line("state", &status.state)?;
    line("epoch", &status.epoch.to_string())?;
    if let Some(why) = &status.orphaned_why {
        line("because", &show::plain(why))?;
    }
    if let Some(holder) = &status.holder {
        let command = show::plain(&holder.command);
        line("holder", &format!("pid {} ({command}), uid {}, gid {}", holder.pid, holder.uid, holder.gid))?;
    }
    if let Some(agent) = &status.agent {
        line("agent", &show::plain(agent))?;
    }
    for (name, time) in [("since", &status.since), ("renewed", &status.renewed), ("expires", &status.expires)] {
        if let Some(time) = time {
            line(name, &with_distance(time, show::now_ms()))?;
        }
    }
    if let Some(ttl) = status.ttl_ms.and_then(|ms| Ttl::from_millis(ms).ok()) {
        line("ttl", &ttl.to_string())?;
    }
    if let Some(via) = &status.via {
        line("via", via)?;
    }
    line("waiters", &status.waiters.to_string())?;
    for Waiting { pid, uid, command, since, mode, .. } in &status.line {
        let command = show::plain(command);
        let waited = show::parse_ms(since).map_or_else(|| since.clone(), |at_ms| show::span(show::now_ms() - at_ms));
        line("", &format!("pid {pid} ({command}), uid {uid}, {mode}, for {waited}"))?;
    }
    more(&mut line, status.waiters, status.line.len())?;
    line("sharers", &status.sharers.to_string())?;
    for Sharing { pid, uid, command, .. } in &status.sharing {
        line("", &format!("pid {pid} ({}), uid {uid}", show::plain(command)))?;
    }
    more(&mut line, status.sharers, status.sharing.len())?;
    if let Some(note) = status.note.as_deref().filter(|note| !note.is_empty()) {
        line("note", &show::plain(note.trim_end()))?;
    }
    if let Some(outcome) = &status.outcome {
        line("outcome", &format!("{outcome} (of the newest attempt that ended)"))?;
    }
    if let Some(result) = &status.result {
        let path = tree.files.result_path(key, result.epoch);
        line("result", &format!("{} ({} bytes, {})", path.display(), result.size, result.committed))?;
    }
    Ok(())
}

/// The lists of a status have the first 100 only: says how many are not in it.
fn more(line: &mut impl FnMut(&str, &str) -> io::Result<()>, all: u64, listed: usize) -> io::Result<()> {
    match all.saturating_sub(listed as u64) {
        0 => Ok(()),
        rest => line("", &format!("and {rest} more")),
    }
}

/// `2026-01-01T00:00:00Z (3s ago)`, or `(in 3s)`.
fn with_distance(time: &str, now_ms: i64) -> String {
    match show::parse_ms(time).map(|at_ms| at_ms - now_ms) {
        Some(ahead_ms) if ahead_ms > 0 => format!("{time} (in {})", show::span(ahead_ms)),
        Some(ahead_ms) => format!("{time} ({} ago)", show::span(-ahead_ms)),
        None => time.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_shown_with_their_distance() {
        assert_eq!(with_distance("1970-01-01T00:00:10.000Z", 7_000), "1970-01-01T00:00:10.000Z (in 3s)");
        assert_eq!(with_distance("1970-01-01T00:00:10.000Z", 12_000), "1970-01-01T00:00:10.000Z (2s ago)");
    }
}
