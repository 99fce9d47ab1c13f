//! `leasefs ls`: the keys and who holds them, read from `status/`.

use std::io::{self, Write};
use std::process::ExitCode;

use anstyle::{AnsiColor, Style};
use anyhow::Result;
use leasefs::client::Status;

use super::complain;
use super::deadlock;
use super::listing::{self, Listing};
use super::progress::Progress;
use super::show::{self, NOTHING};
use super::table::{Column, Look, Table};
use super::tree::{Tree, TreeArgs};

/// What to list.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
States: held, shared (by readers), reporting (only an open result keeps it), orphaned (held, but its connection is
gone), finished, free. AGE is the time since the state's attempt began, LONGEST how long the first in line has waited.
AGENT, LONGEST and HELD BECAUSE are there where some key has one; the last says why an orphaned key is not free yet.

On a terminal, long values are shortened to its width, what says less is left out where it is narrow, and states are
coloured (not with NO_COLOR set); a pipe gets everything. Processes that wait for each other in a ring are told on stderr.

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
    let progress = Progress::new("waiting for the tree", None);
    let tree = Tree::find(&args.tree, std::slice::from_ref(&args.prefix))?;
    let prefix = listing::prefix(&tree, &args.prefix)?;
    progress.next("reading keys", None);
    let walk = if args.all { listing::walk } else { listing::walk_used };
    let Listing { mut found, shut } = walk(&tree, &prefix, &mut |_| progress.add(1))?;
    drop(progress);
    found.retain(|status| args.all || status.state != "free" || status.waiters > 0);
    found.sort_by(|a, b| a.key.cmp(&b.key));

    let mut out = io::BufWriter::new(io::stdout().lock());
    if args.json {
        for status in &found {
            writeln!(out, "{}", status.json())?;
        }
    } else if !found.is_empty() {
        table(&found).write(&mut out, Look::of_stdout())?;
    }
    out.flush()?;
    for ring in deadlock::among(tree.root(), &found) {
        complain(ring.text);
    }
    if shut > 0 {
        complain(format_args!("{shut} namespaces may not be read by you: their keys are not listed"));
    }
    Ok(ExitCode::SUCCESS)
}

/// A column: which, whether a listing has it, and what it shows of a key.
struct Shown {
    column: Column,
    is_there: fn(&Status) -> bool,
    cell: fn(&Status, i64) -> String,
}

/// The columns, in order.
fn columns() -> [Shown; 12] {
    let always: fn(&Status) -> bool = |_| true;
    let shown = |column, is_there, cell| Shown { column, is_there, cell };
    [
        shown(Column::new("KEY").shrinks_to(12), always, |status, _| show::plain(&status.key)),
        shown(Column::new("STATE"), always, |status, _| status.state.clone()),
        shown(Column::new("EPOCH").spare(2), always, |status, _| status.epoch.to_string()),
        shown(Column::new("HOLDER").shrinks_to(8), always, |status, _| holder(status)),
        shown(Column::new("UID").spare(6), always, |status, _| {
            status.holder.as_ref().map_or_else(|| NOTHING.to_owned(), |holder| holder.uid.to_string())
        }),
        shown(
            Column::new("AGENT").shrinks_to(8).spare(1),
            |status| status.agent.is_some(),
            |status, _| show::cell(status.agent.as_deref().unwrap_or_default()),
        ),
        shown(Column::new("AGE"), always, |status, now_ms| or_nothing(age_ms(status, now_ms))),
        shown(Column::new("TTL-LEFT").spare(3), always, |status, now_ms| or_nothing(left_ms(status, now_ms))),
        shown(Column::new("WAITERS"), always, |status, _| status.waiters.to_string()),
        shown(
            Column::new("LONGEST").spare(4),
            |status| !status.line.is_empty(),
            |status, now_ms| or_nothing(longest_wait_ms(status, now_ms)),
        ),
        shown(Column::new("NOTE").shrinks_to(4).spare(5), always, |status, _| {
            show::cell(status.note.as_deref().unwrap_or_default())
        }),
        shown(
            Column::new("HELD BECAUSE").shrinks_to(20),
            |status| status.orphaned_why.is_some(),
            |status, _| status.orphaned_why.as_deref().map_or_else(|| NOTHING.to_owned(), show::plain),
        ),
    ]
}

/// The keys as a table, without the columns in which there would be nothing.
pub fn table(found: &[Status]) -> Table {
    let now_ms = show::now_ms();
    let columns: Vec<Shown> =
        columns().into_iter().filter(|column| found.iter().any(|status| (column.is_there)(status))).collect();
    let mut table = Table::new(columns.iter().map(|shown| shown.column));
    for status in found {
        let cells = columns.iter().map(|shown| (shown.cell)(status, now_ms));
        // The state is the second cell.
        table.push_styled(cells, state_style(status).map(|style| (1, style)));
    }
    table
}

/// How a state is coloured; none for those that need no attention.
fn state_style(status: &Status) -> Option<Style> {
    let colour = |colour: AnsiColor| Some(colour.on_default());
    match status.state.as_str() {
        "held" if status.waiters > 0 => colour(AnsiColor::Yellow),
        "held" => colour(AnsiColor::Green),
        "shared" => colour(AnsiColor::Cyan),
        "reporting" => colour(AnsiColor::Magenta),
        "orphaned" => colour(AnsiColor::Red),
        _ => Some(Style::new().dimmed()),
    }
}

/// Its process, or how many share it.
pub fn holder(status: &Status) -> String {
    match &status.holder {
        Some(holder) => format!("{} {}", holder.pid, show::cell(&holder.command)),
        None if status.sharers > 0 => format!("{} sharing", status.sharers),
        None => NOTHING.to_owned(),
    }
}

/// How long the present state's attempt is there, in milliseconds.
pub fn age_ms(status: &Status, now_ms: i64) -> Option<i64> {
    status.since.as_deref().and_then(show::parse_ms).map(|since_ms| now_ms - since_ms)
}

/// How long until the TTL is over, in milliseconds. A finished or free key still shows when its newest attempt would
/// have expired: that is no time left.
pub fn left_ms(status: &Status, now_ms: i64) -> Option<i64> {
    status.holder.as_ref()?;
    status.expires.as_deref().and_then(show::parse_ms).map(|expires_ms| expires_ms - now_ms)
}

/// How long the one in line that came first has waited, in milliseconds.
pub fn longest_wait_ms(status: &Status, now_ms: i64) -> Option<i64> {
    status.line.iter().filter_map(|waiting| show::parse_ms(&waiting.since)).min().map(|since_ms| now_ms - since_ms)
}

fn or_nothing(ms: Option<i64>) -> String {
    ms.map_or_else(|| NOTHING.to_owned(), show::span)
}
