//! `leasefs prune`: takes ended attempts and their results away, by bounds that are given.
//!
//! The running server does it, so that nothing in use goes; a state directory that nobody serves is pruned here. What went
//! is found by looking at the registry before and after: the same look that `--dry-run` takes.

use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::io::{self, IsTerminal, Write};
use std::path::Path;
use std::process::ExitCode;
use std::sync::mpsc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use leasefs::Error;
use leasefs::engine::prune_unserved;
use leasefs::registry::journal::Journal;
use leasefs::registry::prune::{Bounds, Candidate};
use leasefs::registry::sqlite::Check;
use leasefs::results::Results;
use serde::Serialize;
use serde_json::json;

use super::backup::keep_servers_off;
use super::order;
use super::progress::Progress;
use super::show;
use super::table::{Column, Look, Table};
use super::tree::{self, StateArgs, Tree, trouble};
use super::{EXIT_NO, complain};

/// What to take away, and of which tree.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Never touched: numbers (the next attempt of a key has the next number, whatever is pruned); a key that is finished (it
stays finished, and no exclusive create gets it); an attempt that is held, reporting or orphaned, or whose result is open
for writing. The newest attempt of a key that has ended stays in its history; of that one only the result can go. An
attempt whose result is pruned takes no other. D is an age, as in 30d, 12h or 1h30m; 0s is everything completed so far.

For root and the mount's owner. Claims go on meanwhile. --dry-run looks into the registry and changes nothing; an attempt
whose result is just being written for a second time it lists, though it would stay. Interrupted, what went is gone, and
the rest goes by the next prune. A file that somebody reads stays until the next prune or start of the server. The
registry's own file does not shrink; its room is used again.

Exit codes: 0 pruned, or nothing was to be; 1 refused: you may not, or another prune, a backup or a verify is at work; 2 bad
usage or failure.")]
pub struct Args {
    /// Completed attempts that ended longer ago than this go, with their results
    #[arg(long, value_name = "D", value_parser = age)]
    pub completed_older: Option<Duration>,
    /// Of each key only the N newest attempts that have ended stay in the history; results go with their attempts
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub attempts_over: Option<u64>,
    /// Say what would go, and change nothing
    #[arg(long)]
    pub dry_run: bool,
    /// One JSON object
    #[arg(long)]
    pub json: bool,
    /// The state directory.
    #[command(flatten)]
    pub place: StateArgs,
}

/// What `.leasefs/control` reads.
#[derive(Serialize)]
struct Order {
    op: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    completed_older_ms: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    attempts_over: Option<u64>,
}

/// Carries the command out.
pub fn run(args: Args) -> Result<ExitCode> {
    let older_ms = args.completed_older.map(|age| u64::try_from(age.as_millis()).unwrap_or(u64::MAX));
    let bounds = Bounds {
        completed_by_ms: older_ms.map(|ms| show::now_ms().saturating_sub_unsigned(ms)),
        keep: args.attempts_over,
    };
    if bounds.is_none() {
        bail!("prune: no bound is given: say --completed-older D, --attempts-over N, or both");
    }
    let (listed, went) = match &args.place.state {
        Some(dir) => prune_directory(dir, &bounds, args.dry_run)?,
        None => {
            let tree = args.place.find_tree()?;
            let listed = look(&tree.config()?.state_dir, &bounds)?;
            if args.dry_run {
                (listed.clone(), listed)
            } else {
                let order = Order { op: "prune", completed_older_ms: older_ms, attempts_over: args.attempts_over };
                if let Err(error) = order_it(&tree, &serde_json::to_string(&order)?) {
                    return refused(&tree, error);
                }
                let went = without(&listed, &look(&tree.config()?.state_dir, &bounds)?);
                (listed, went)
            }
        }
    };
    let stayed = listed.len() - went.len();
    print(&went, args.dry_run, args.json)?;
    if stayed > 0 {
        complain(format_args!("{stayed} more stay for now: they are in use"));
    }
    Ok(ExitCode::SUCCESS)
}

/// Reads an age.
fn age(text: &str) -> Result<Duration, String> {
    humantime::parse_duration(text).map_err(|_| "give an age as in 30d, 12h, 1h30m or 0s".to_owned())
}

/// What a registry has that may go.
fn look(dir: &Path, bounds: &Bounds) -> Result<Vec<Candidate>> {
    let _progress = Progress::new("looking for what may go", None);
    let registry = tree::open_registry(dir)?;
    registry.prunable(bounds).with_context(|| dir.join("registry.db").display().to_string())
}

/// Those of the one that are not in the other.
fn without(listed: &[Candidate], left: &[Candidate]) -> Vec<Candidate> {
    let left: HashSet<_> = left.iter().map(|candidate| (candidate.key_id, candidate.epoch)).collect();
    listed.iter().filter(|candidate| !left.contains(&(candidate.key_id, candidate.epoch))).cloned().collect()
}

/// What was listed, and what of it went, of a directory that nobody serves.
fn prune_directory(dir: &Path, bounds: &Bounds, dry_run: bool) -> Result<(Vec<Candidate>, Vec<Candidate>)> {
    let listed = look(dir, bounds)?;
    if dry_run {
        return Ok((listed.clone(), listed));
    }
    let dir = dir.canonicalize().with_context(|| dir.display().to_string())?;
    let explain = |error: Error| match error {
        Error::Storage { message, .. } => anyhow!("{}: {message}", dir.display()),
        Error::Busy => anyhow!("{}: {AT_WORK}", dir.display()),
        other => anyhow!("{}: {other}", dir.display()),
    };
    let Some(kept_off) = keep_servers_off(&dir)? else {
        bail!("{}: it is being served: name its tree with --root, in place of --state", dir.display());
    };
    let results = Results::open(&dir).map_err(|error| explain(error.into()))?;
    // Before the journal is put into the registry, which a backup copies one after the other.
    let lock = results.lock_exclusive().map_err(explain)?;
    let mut registry = Journal::open(&dir, Check::Full).map_err(explain)?;
    prune_unserved(&mut registry, &results, bounds, &lock).map_err(explain)?;
    drop((registry, lock, kept_off));
    let went = without(&listed, &look(&dir, bounds)?);
    Ok((listed, went))
}

const AT_WORK: &str = "another prune, a backup or a verify is at work: try again when it is done";

/// Gives the order, and says how far it is once it takes over a second.
fn order_it(tree: &Tree, order: &str) -> io::Result<()> {
    std::thread::scope(|scope| {
        let (done, is_done) = mpsc::channel::<()>();
        if io::stderr().is_terminal() {
            scope.spawn(move || {
                let (progress, began) = (Progress::new("attempts that are gone", None), pruned_so_far(tree));
                while is_done.recv_timeout(Duration::from_secs(1)) == Err(mpsc::RecvTimeoutError::Timeout) {
                    progress.set(pruned_so_far(tree).saturating_sub(began));
                }
            });
        }
        let sent = order::send_repeatable(tree, order);
        drop(done);
        sent
    })
}

fn pruned_so_far(tree: &Tree) -> u64 {
    let metrics = fs::read_to_string(tree.files.control_path("metrics")).unwrap_or_default();
    let value = metrics.lines().find_map(|line| line.strip_prefix("leasefs_pruned_attempts_total "));
    value.and_then(|value| value.parse().ok()).unwrap_or(0)
}

fn refused(tree: &Tree, error: io::Error) -> Result<ExitCode> {
    let root = tree.root().display();
    match error.raw_os_error() {
        Some(libc::EACCES | libc::EPERM) => {
            complain(format_args!("{root}: you may not prune it: ask root or the mount's owner"))
        }
        Some(libc::EBUSY) => complain(format_args!("{root}: {AT_WORK}")),
        Some(libc::EINVAL) => bail!("{root}: its server does not know this order: `leasefs upgrade` it"),
        _ => return Err(trouble(root, error)),
    }
    Ok(ExitCode::from(EXIT_NO))
}

/// What goes of one key.
#[derive(Default)]
struct Sum {
    attempts: u64,
    results: u64,
    bytes: u64,
}

impl Sum {
    fn add(&mut self, candidate: &Candidate) {
        self.attempts += u64::from(!candidate.keeps_row);
        self.results += u64::from(candidate.result.is_some());
        self.bytes += candidate.result.unwrap_or(0);
    }
}

fn print(went: &[Candidate], dry_run: bool, json: bool) -> Result<()> {
    let (mut keys, mut total): (BTreeMap<&str, Sum>, Sum) = Default::default();
    for candidate in went {
        keys.entry(candidate.key.as_str()).or_default().add(candidate);
        total.add(candidate);
    }
    let Sum { attempts, results, bytes } = total;
    let mut out = io::BufWriter::new(io::stdout().lock());
    if json {
        let of_key = |(key, sum): (&&str, &Sum)| json!({ "key": key, "attempts": sum.attempts, "results": sum.results, "bytes": sum.bytes });
        let keys: Vec<_> = keys.iter().map(of_key).collect();
        let all = json!({ "dry_run": dry_run, "attempts": attempts, "results": results, "bytes": bytes, "keys": keys });
        writeln!(out, "{all}")?;
    } else {
        if !keys.is_empty() {
            let mut table = Table::new(["KEY", "ATTEMPTS", "RESULTS", "BYTES"].map(Column::new));
            for (key, sum) in &keys {
                let numbers = [sum.attempts, sum.results, sum.bytes].map(|number| number.to_string());
                table.push([show::plain(key)].into_iter().chain(numbers));
            }
            table.write(&mut out, Look::plain())?;
        }
        let how = if dry_run { "would go" } else { "gone" };
        writeln!(out, "{how}: {attempts} attempts, {results} results ({bytes} bytes), of {} keys", keys.len())?;
    }
    out.flush()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_age_has_a_unit() {
        assert_eq!(age("0s"), Ok(Duration::ZERO));
        assert_eq!(age("30d"), Ok(Duration::from_secs(30 * 86_400)));
        assert_eq!(age("1h30m"), Ok(Duration::from_secs(5_400)));
        for text in ["", "5", "-1s", "soon"] {
            assert!(age(text).is_err(), "{text:?}");
        }
    }
}
