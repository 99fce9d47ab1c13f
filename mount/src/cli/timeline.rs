//! `leasefs timeline`: the attempts of keys over time, drawn as one SVG.
//!
//! Attempts come from the registry, as for `history`, and those who wait now from the tree. [`plan`] decides what of it
//! is shown and where on the axis, [`svg`] draws it.

use std::collections::BTreeMap;
use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use leasefs::registry::AttemptRow;
use leasefs::{Key, Ttl};

use super::listing;
use super::progress::Progress;
use super::show;
use super::tree::{self, StateArgs, Tree};
use super::{EXIT_NO, complain};
use plan::{Bar, Plan, Row, Wait};

mod mark;
mod plan;
mod svg;
mod text;

/// Which keys, and how far back.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Writes one SVG: a row for each key, a bar for each attempt, coloured by how it ended, a thin bar below for the time it
waited before, and for those who wait now; marks for results, expiries, evictions and losses. Point at a bar for its
holder, agent, outcome and why. Without --since it shows the last hour, less where everything began later, and the last
hour in which something was held where that was longer ago.

Reads the registry, so it is for who may read the state directory. Who waits now, only a mounted tree tells.

  leasefs timeline > now.svg && xdg-open now.svg

Exit codes: 0 drawn; 1 there is nothing to draw; 2 bad usage or failure.")]
pub struct Args {
    /// Keys to draw; `team/` for the keys of a namespace; all without any
    #[arg(value_name = "KEY")]
    pub keys: Vec<String>,
    /// How far back, as in 90s or 24h
    #[arg(long, value_name = "D", value_parser = super::time_span)]
    pub since: Option<Ttl>,
    /// The state directory.
    #[command(flatten)]
    pub place: StateArgs,
}

/// Carries the command out.
pub fn run(args: Args) -> Result<ExitCode> {
    if io::stdout().is_terminal() {
        bail!("timeline: writes SVG, which no terminal shows: send it to a file, as in `leasefs timeline > now.svg`");
    }
    let progress = Progress::new("waiting for the tree", None);
    let (dir, tree) = match &args.place.state {
        Some(dir) => (dir.clone(), None),
        None => {
            let tree = Tree::find(&args.place.tree, &args.keys)?;
            (tree.config()?.state_dir, Some(tree))
        }
    };
    let wanted: Vec<String> = args.keys.iter().map(|text| selection(text, tree.as_ref())).collect::<Result<_>>()?;
    let is_wanted = |key: &str| {
        wanted.is_empty()
            || wanted
                .iter()
                .any(|text| text.is_empty() || key == text || (text.ends_with('/') && key.starts_with(text.as_str())))
    };
    progress.next("reading the history", None);
    let mut rows = attempts(&dir, is_wanted)?;
    if let Some(tree) = &tree {
        progress.next("reading who waits", None);
        add_waiting(tree, &wanted, &mut rows, &progress)?;
    }
    progress.next("drawing", None);
    let since_ms = args.since.map(|since| i64::try_from(since.as_millis()).unwrap_or(i64::MAX));
    let place = tree.as_ref().map_or_else(|| dir.display().to_string(), |tree| tree.root().display().to_string());
    let plan = plan::plan(&show::plain(&place), rows, show::now_ms(), since_ms);
    drop(progress);
    let Some(plan) = plan else {
        complain(nothing(&args));
        return Ok(ExitCode::from(EXIT_NO));
    };
    let mut out = io::BufWriter::new(io::stdout().lock());
    svg::write(&mut out, &plan)?;
    out.flush()?;
    tell_of_left_out(&plan);
    Ok(ExitCode::SUCCESS)
}

/// A key, or a namespace with its slash.
fn selection(text: &str, tree: Option<&Tree>) -> Result<String> {
    if text.ends_with('/') {
        return match tree {
            Some(tree) => listing::prefix(tree, text),
            None => Ok(text.to_owned()),
        };
    }
    match tree {
        Some(tree) => Ok(tree.key(text)?.as_str().to_owned()),
        None => {
            let key = Key::parse(text).with_context(|| format!("{}: not a key", show::plain(text)))?;
            Ok(key.as_str().to_owned())
        }
    }
}

fn nothing(args: &Args) -> String {
    let keys: Vec<String> = args.keys.iter().map(|key| show::plain(key)).collect();
    let of = if keys.is_empty() { "no key".to_owned() } else { format!("{}: none of these", keys.join(", ")) };
    match args.since {
        Some(since) => format!("{of} was held or waited for in the last {since}: give a longer --since"),
        None => format!("{of} was ever held: see `leasefs ls --all`"),
    }
}

fn tell_of_left_out(plan: &Plan) {
    if plan.keys_left_out > 0 {
        complain(format_args!(
            "{} keys are not drawn, of which nothing newer is known than of those that are: name the keys you want",
            plan.keys_left_out
        ));
    }
    if plan.bars_left_out > 0 {
        complain(format_args!("{} older attempts are not drawn: give a shorter --since", plan.bars_left_out));
    }
}

/// Every attempt of the keys that are wanted.
fn attempts(dir: &std::path::Path, is_wanted: impl Fn(&str) -> bool) -> Result<BTreeMap<String, Row>> {
    let reader = tree::open_registry(dir)?;
    let (keys, attempts) = reader.snapshot().with_context(|| dir.join("registry.db").display().to_string())?;
    let names: BTreeMap<u64, String> = keys
        .into_iter()
        .filter(|row| is_wanted(row.key.as_str()))
        .map(|row| (row.id, row.key.as_str().to_owned()))
        .collect();
    let mut rows: BTreeMap<String, Row> = BTreeMap::new();
    for attempt in &attempts {
        if let Some(name) = names.get(&attempt.key_id) {
            rows.entry(name.clone()).or_default().bars.push(bar(attempt));
        }
    }
    Ok(rows)
}

fn bar(attempt: &AttemptRow) -> Bar {
    Bar {
        epoch: attempt.epoch,
        since_ms: attempt.since_ms,
        ended_ms: attempt.ended_ms,
        waited_ms: i64::try_from(attempt.waited_ms).unwrap_or(i64::MAX),
        committed_ms: attempt.result.map(|(_, committed_ms)| committed_ms),
        outcome: attempt.outcome.clone(),
        why: attempt.reason.clone(),
        who: format!("pid {} ({}), uid {}", attempt.pid, show::cell(&attempt.command), attempt.uid),
        agent: attempt.agent.clone(),
        note: Some(attempt.note.clone()).filter(|note| !note.is_empty()),
    }
}

/// Adds those who wait now.
fn add_waiting(tree: &Tree, wanted: &[String], rows: &mut BTreeMap<String, Row>, progress: &Progress) -> Result<()> {
    let mut statuses = Vec::new();
    let everything = [String::new()];
    for text in if wanted.is_empty() { &everything } else { wanted } {
        if text.is_empty() || text.ends_with('/') {
            statuses.extend(listing::walk_used(tree, text, &mut |_| progress.add(1))?.found);
        } else {
            statuses.extend(tree.status(&Key::parse(text)?)?);
        }
    }
    for status in statuses.into_iter().filter(|status| !status.line.is_empty()) {
        let row = rows.entry(status.key.clone()).or_default();
        row.waiting = status
            .line
            .iter()
            .filter_map(|waiting| {
                let since_ms = show::parse_ms(&waiting.since)?;
                let who = format!("pid {} ({}), uid {}", waiting.pid, show::cell(&waiting.command), waiting.uid);
                Some(Wait { since_ms, who })
            })
            .collect();
    }
    Ok(())
}
