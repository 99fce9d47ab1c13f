//! `leasefs history`: every attempt of a key, read from the registry.

use std::io::{self, Write};
use std::process::ExitCode;

use anyhow::{Context, Result};
use leasefs::Key;
use leasefs::registry::AttemptRow;
use leasefs::registry::sqlite::Reader;
use leasefs::time::rfc3339;
use serde_json::{Value, json};

use super::show::{self, NOTHING};
use super::table::{Column, Look, Table};
use super::tree::{self, StateArgs, Tree};
use super::{EXIT_NO, complain};

/// Which key, and how to show it.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Outcomes: released, completed (its result was committed), expired, evicted, lost (its connection was lost and the holder
is proven dead). An attempt without one has not ended. On a terminal, ENDED says how long it lasted, and long values are
shortened. Reads the registry, so it is for who may read the state directory.

Exit codes: 0 shown; 1 there never was such a key; 2 bad usage or failure.")]
pub struct Args {
    /// Key to show
    #[arg(value_name = "KEY")]
    pub key: String,
    /// One JSON object per attempt
    #[arg(long)]
    pub json: bool,
    /// The state directory.
    #[command(flatten)]
    pub place: StateArgs,
}

/// Carries the command out.
pub fn run(args: Args) -> Result<ExitCode> {
    let (dir, key) = match &args.place.state {
        Some(dir) => {
            let key = Key::parse(&args.key).with_context(|| format!("{}: not a key", show::plain(&args.key)))?;
            (dir.clone(), key)
        }
        None => {
            let (tree, key) = Tree::find_with_key(&args.place.tree, &args.key)?;
            (tree.config()?.state_dir, key)
        }
    };
    let reader = tree::open_registry(&dir)?;
    let attempts = history(&reader, &key)?;
    if attempts.is_empty() {
        complain(tree::never_held(&key));
        return Ok(ExitCode::from(EXIT_NO));
    }
    let mut out = io::BufWriter::new(io::stdout().lock());
    if args.json {
        for attempt in &attempts {
            writeln!(out, "{}", object(&key, attempt))?;
        }
    } else {
        write_table(&mut out, &attempts, Look::of_stdout())?;
        match reader.key(&key).with_context(|| key.to_string())?.map_or(0, |row| row.pruned_attempts) {
            0 => {}
            1 => writeln!(out, "(1 earlier attempt pruned)")?,
            pruned => writeln!(out, "({pruned} earlier attempts pruned)")?,
        }
    }
    out.flush()?;
    Ok(ExitCode::SUCCESS)
}

/// The attempts the registry keeps, by epoch.
fn history(reader: &Reader, key: &Key) -> Result<Vec<AttemptRow>> {
    let mut attempts = reader.history(key).with_context(|| key.to_string())?;
    attempts.sort_by_key(|attempt| attempt.epoch);
    Ok(attempts)
}

/// Who it was for, and how long it was waited for, are columns where there is something to tell. A terminal has no room
/// for two whole times: there it is told how long an attempt lasted.
fn write_table(out: &mut impl Write, attempts: &[AttemptRow], look: Look) -> io::Result<()> {
    let agent = |attempt: &AttemptRow| show::cell(attempt.agent.as_deref().unwrap_or_default());
    let waited = |attempt: &AttemptRow| match i64::try_from(attempt.waited_ms) {
        Ok(ms @ 1..) => show::span(ms),
        _ => NOTHING.to_owned(),
    };
    let (agents, waits) = (attempts.iter().any(|a| a.agent.is_some()), attempts.iter().any(|a| a.waited_ms > 0));
    let mut columns = vec![
        Column::new("EPOCH"),
        Column::new("OUTCOME"),
        Column::new("WHY").shrinks_to(9),
        Column::new("HOLDER").shrinks_to(10).spare(1),
        Column::new("UID").spare(6),
    ];
    columns.extend(agents.then(|| Column::new("AGENT").shrinks_to(8).spare(2)));
    columns.extend(waits.then(|| Column::new("WAITED").spare(4)));
    columns.extend([
        Column::new("SINCE"),
        Column::new("ENDED"),
        Column::new("RESULT").spare(3),
        Column::new("NOTE").shrinks_to(4).spare(5),
    ]);
    let on_terminal = look.width.is_some();
    let since = |ms| match rfc3339(ms).split_once('.') {
        Some((whole, _)) if on_terminal => format!("{whole}Z"),
        _ => rfc3339(ms),
    };
    let row = |attempt: &AttemptRow| {
        let mut row = vec![
            attempt.epoch.to_string(),
            attempt.outcome.clone().unwrap_or_else(|| NOTHING.to_owned()),
            show::cell(attempt.reason.as_deref().unwrap_or_default()),
            format!("{} {}", attempt.pid, show::cell(&attempt.command)),
            attempt.uid.to_string(),
        ];
        row.extend(agents.then(|| agent(attempt)));
        row.extend(waits.then(|| waited(attempt)));
        row.extend([
            since(attempt.since_ms),
            match attempt.ended_ms {
                Some(ended_ms) if on_terminal => format!("after {}", show::span(ended_ms - attempt.since_ms)),
                Some(ended_ms) => rfc3339(ended_ms),
                None => NOTHING.to_owned(),
            },
            match attempt.result {
                Some((size, _)) => format!("{size} B"),
                None if attempt.result_pruned => "pruned".to_owned(),
                None => NOTHING.to_owned(),
            },
            show::cell(&attempt.note),
        ]);
        row
    };
    let mut table = Table::new(columns);
    attempts.iter().for_each(|attempt| table.push(row(attempt)));
    table.write(out, look)
}

/// Names as in `status/KEY`, where the same thing is meant.
fn object(key: &Key, attempt: &AttemptRow) -> Value {
    json!({
        "key": key.as_str(),
        "epoch": attempt.epoch,
        "outcome": attempt.outcome,
        "reason": attempt.reason,
        "holder": {
            "pid": attempt.pid,
            "start_time": attempt.start_time,
            "uid": attempt.uid,
            "gid": attempt.gid,
            "command": attempt.command,
        },
        "via": attempt.via,
        "since": rfc3339(attempt.since_ms),
        "renewed": rfc3339(attempt.renewed_ms),
        "expires": rfc3339(attempt.expires_ms),
        "ended": attempt.ended_ms.map(rfc3339),
        "ttl_ms": attempt.ttl_ms,
        "waited_ms": attempt.waited_ms,
        "note": attempt.note,
        "agent": attempt.agent,
        "registered": attempt.registered,
        "result": attempt.result.map(|(size, committed_ms)| json!({
            "epoch": attempt.epoch,
            "size": size,
            "committed": rfc3339(committed_ms),
        })),
        "result_pruned": attempt.result_pruned,
    })
}
