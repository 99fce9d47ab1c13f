//! `leasefs ls`: the keys and who holds them, read from `status/`.

use std::fs;
use std::io::{self, Write};
use std::process::ExitCode;

use anyhow::Result;
use leasefs::Key;

use super::complain;
use super::show::{self, NOTHING};
use super::tree::{Status, Tree, TreeArgs, trouble};

/// What to list.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
States: held, shared (by readers), reporting (only an open result keeps it), orphaned (held, but its connection is
gone), finished, free. AGE is the time since the state's attempt began. HELD BECAUSE is there where a key is orphaned, and
says why it is not free yet.

Exit codes: 0 listed, also when there is nothing to list; 2 bad usage or failure.")]
pub struct Args {
    /// Only keys that begin with this; `team/` for the keys of a namespace
    #[arg(value_name = "PREFIX", default_value = "", hide_default_value = true)]
    pub prefix: String,
    /// Also keys that are free: every key that ever was
    #[arg(short, long)]
    pub all: bool,
    /// One JSON object per line, as in status/KEY
    #[arg(long)]
    pub json: bool,
    /// The tree.
    #[command(flatten)]
    pub tree: TreeArgs,
}

/// Carries the command out.
pub fn run(args: Args) -> Result<ExitCode> {
    let tree = Tree::find(&args.tree, std::slice::from_ref(&args.prefix))?;
    // An absolute path loses its last slash when it is taken apart, and that slash has a meaning here.
    let mut prefix = tree.relative(&args.prefix)?;
    if args.prefix.ends_with('/') && !prefix.is_empty() && !prefix.ends_with('/') {
        prefix.push('/');
    }
    let mut listing = Listing { tree: &tree, prefix: &prefix, found: Vec::new(), shut: 0 };
    listing.walk(prefix.rsplit_once('/').map_or("", |(namespace, _)| namespace), true)?;
    let Listing { mut found, shut, .. } = listing;
    found.retain(|status| args.all || status.state != "free");
    found.sort_by(|a, b| a.key.cmp(&b.key));

    let mut out = io::BufWriter::new(io::stdout().lock());
    if args.json {
        for status in &found {
            writeln!(out, "{}", status.json)?;
        }
    } else if !found.is_empty() {
        let rows: Vec<_> = found.iter().map(row).collect();
        let heads = ["KEY", "STATE", "EPOCH", "HOLDER", "UID", "AGE", "TTL-LEFT", "WAITERS", "NOTE"];
        if found.iter().any(|status| status.orphaned_why.is_some()) {
            let [key, state, epoch, holder, uid, age, left, waiters, note] = heads;
            let heads = [key, state, epoch, holder, uid, age, left, waiters, note, "HELD BECAUSE"];
            let rows: Vec<_> = rows.into_iter().zip(&found).map(|(row, status)| with_why(row, status)).collect();
            show::table(&mut out, heads, &rows)?;
        } else {
            show::table(&mut out, heads, &rows)?;
        }
    }
    out.flush()?;
    if shut > 0 {
        complain(format_args!("{shut} namespaces may not be read by you: their keys are not listed"));
    }
    Ok(ExitCode::SUCCESS)
}

/// Every key that may be seen, and how many namespaces may not be read.
pub(super) fn everything(tree: &Tree) -> Result<(Vec<Status>, usize)> {
    let mut listing = Listing { tree, prefix: "", found: Vec::new(), shut: 0 };
    listing.walk("", true)?;
    Ok((listing.found, listing.shut))
}

fn row(status: &Status) -> [String; 9] {
    let now_ms = show::now_ms();
    let span = |time: &Option<String>, sign: i64| {
        let at_ms = time.as_deref().and_then(show::parse_ms);
        at_ms.map_or_else(|| NOTHING.to_owned(), |at_ms| show::span((at_ms - now_ms) * sign))
    };
    let holder = status.holder.as_ref();
    // A finished or free key still shows when its newest attempt would have expired: that is no time left.
    let left = if holder.is_some() { span(&status.expires, 1) } else { NOTHING.to_owned() };
    [
        show::plain(&status.key),
        status.state.clone(),
        status.epoch.to_string(),
        match holder {
            Some(holder) => format!("{} {}", holder.pid, show::cell(&holder.command)),
            None if status.sharers > 0 => format!("{} sharing", status.sharers),
            None => NOTHING.to_owned(),
        },
        holder.map_or_else(|| NOTHING.to_owned(), |holder| holder.uid.to_string()),
        span(&status.since, -1),
        left,
        status.waiters.to_string(),
        show::cell(status.note.as_deref().unwrap_or_default()),
    ]
}

/// A row with why its key is not free yet.
fn with_why(row: [String; 9], status: &Status) -> [String; 10] {
    let [key, state, epoch, holder, uid, age, left, waiters, note] = row;
    let why = status.orphaned_why.as_deref().map_or_else(|| NOTHING.to_owned(), show::plain);
    [key, state, epoch, holder, uid, age, left, waiters, note, why]
}

/// A walk through `status/`, while keys come and namespaces go.
struct Listing<'a> {
    tree: &'a Tree,
    prefix: &'a str,
    found: Vec<Status>,
    /// Namespaces that may not be read.
    shut: usize,
}

impl Listing<'_> {
    fn walk(&mut self, namespace: &str, is_asked_for: bool) -> Result<()> {
        let entries = match fs::read_dir(self.tree.status_path(namespace)) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied && !is_asked_for => {
                self.shut += 1;
                return Ok(());
            }
            // Gone since its parent was read; or nothing begins with this prefix.
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
                return Ok(());
            }
            Err(error) => return Err(trouble(self.tree.status_path(namespace).display(), error)),
        };
        for entry in entries {
            let entry = entry?;
            let Ok(name) = entry.file_name().into_string() else { continue };
            let path = if namespace.is_empty() { name } else { format!("{namespace}/{name}") };
            let is_dir = entry.file_type().is_ok_and(|kind| kind.is_dir());
            if is_dir && (path.starts_with(self.prefix) || self.prefix.starts_with(&format!("{path}/"))) {
                self.walk(&path, false)?;
            } else if !is_dir && path.starts_with(self.prefix) {
                self.read(&path)?;
            }
        }
        Ok(())
    }

    fn read(&mut self, path: &str) -> Result<()> {
        match Key::parse(path).map(|key| self.tree.status(&key)) {
            Ok(status) => self.found.extend(status?),
            Err(bad) => complain(format_args!("{}: passed over: {bad}", show::plain(path))),
        }
        Ok(())
    }
}
