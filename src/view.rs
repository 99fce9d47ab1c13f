//! What is shown of a key: the JSON of `status/KEY` (§2) and the record read from `claims/KEY` (§4).

use std::fmt::Write;

use serde::Serialize;

use crate::engine::KeyEntry;
use crate::machine::{Attempt, Claimant, Mode, Outcome, State, Via, Waiter};
use crate::time::{Now, rfc3339};

#[derive(Serialize)]
struct Holder<'a> {
    pid: u32,
    start_time: u64,
    uid: u32,
    gid: u32,
    command: &'a str,
}

/// Most of those who wait, and of those who share, that are shown.
const MOST_SHOWN: usize = 100;

/// Somebody in line.
#[derive(Serialize)]
struct InLine<'a> {
    #[serde(flatten)]
    who: Who<'a>,
    since: String,
    mode: &'static str,
}

#[derive(Serialize)]
struct Who<'a> {
    pid: u32,
    start_time: u64,
    uid: u32,
    command: &'a str,
}

impl<'a> Who<'a> {
    fn of(claimant: &'a Claimant) -> Who<'a> {
        let process = claimant.holder;
        Who { pid: process.pid, start_time: process.start_time, uid: claimant.uid, command: &claimant.command }
    }
}

#[derive(Serialize)]
struct CommittedResult {
    epoch: u64,
    size: u64,
    committed: String,
}

#[derive(Serialize)]
struct Status<'a> {
    key: &'a str,
    state: State,
    epoch: u64,
    holder: Option<Holder<'a>>,
    since: Option<String>,
    renewed: Option<String>,
    expires: Option<String>,
    ttl_ms: Option<u64>,
    via: Option<Via>,
    waiters: usize,
    line: Vec<InLine<'a>>,
    sharers: usize,
    sharing: Vec<Who<'a>>,
    note: &'a str,
    agent: Option<&'a str>,
    outcome: Option<Outcome>,
    result: Option<CommittedResult>,
    #[serde(skip_serializing_if = "Option::is_none")]
    why: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    orphaned_why: Option<&'a str>,
}

/// The attempt that a reader is told about as the holder: none once its deadline has passed.
fn holding(entry: &KeyEntry, now: Now) -> Option<&Attempt> {
    entry.state.live().filter(|attempt| !attempt.is_due(now))
}

fn in_line(waiter: &Waiter) -> InLine<'_> {
    let mode = match waiter.mode {
        Mode::Exclusive => "exclusive",
        Mode::Shared => "shared",
    };
    InLine { who: Who::of(&waiter.claimant), since: rfc3339(waiter.since.wall_ms), mode }
}

/// One line of JSON, newline included.
pub fn status(entry: &KeyEntry, now: Now) -> String {
    let state = &entry.state;
    let live = holding(entry, now);
    let since = live.map_or(state.changed_at.wall_ms, |attempt| attempt.since.wall_ms);
    let left_share = state.sharers.iter().any(|share| share.is_orphaned() && !share.is_due(now));
    let is_orphaned = left_share || live.is_some_and(|attempt| attempt.orphaned);
    let shown = Status {
        key: entry.key.as_str(),
        state: state.state(now),
        epoch: state.epoch.0,
        holder: live.map(|attempt| Holder {
            pid: attempt.claimant.holder.pid,
            start_time: attempt.claimant.holder.start_time,
            uid: attempt.claimant.uid,
            gid: attempt.claimant.gid,
            command: &attempt.claimant.command,
        }),
        since: (since != 0).then(|| rfc3339(since)),
        renewed: live.map(|attempt| rfc3339(attempt.renewed.wall_ms)),
        expires: live.map(|attempt| rfc3339(attempt.expires_ms())),
        ttl_ms: live.map(|attempt| attempt.ttl.as_millis()),
        via: live.map(|attempt| attempt.via),
        waiters: state.line.len(),
        line: state.line.iter().take(MOST_SHOWN).map(in_line).collect(),
        sharers: state.sharers.len(),
        sharing: state.sharers.iter().take(MOST_SHOWN).map(|share| Who::of(&share.claimant)).collect(),
        note: live.map_or("", |attempt| &attempt.note),
        agent: live.and_then(|attempt| attempt.agent.as_deref()),
        outcome: state.last_outcome(),
        result: state.latest_result.map(|(epoch, result)| CommittedResult {
            epoch: epoch.0,
            size: result.size,
            committed: rfc3339(result.committed_ms),
        }),
        why: state.attempt.as_ref().and_then(|attempt| attempt.why.as_deref()),
        orphaned_why: is_orphaned
            .then(|| entry.orphaned_why.as_deref().unwrap_or("its holder has not been looked for yet")),
    };
    let mut line = serde_json::to_string(&shown).unwrap_or_default();
    line.push('\n');
    line
}

/// The record: the epoch alone on the first line, then `name: value` lines, the note last because it may have lines of
/// its own.
pub fn record(entry: &KeyEntry, now: Now) -> String {
    let mut text = String::new();
    // Writing to a string does not fail.
    let _ = write_record(&mut text, entry, now, rfc3339);
    text
}

/// The length of [`record`] in bytes. Every time in it is as long as any other, so none has to be worked out.
pub fn record_len(entry: &KeyEntry, now: Now) -> u64 {
    struct Count(u64);
    impl Write for Count {
        fn write_str(&mut self, text: &str) -> std::fmt::Result {
            self.0 += text.len() as u64;
            Ok(())
        }
    }
    let mut count = Count(0);
    let _ = write_record(&mut count, entry, now, |_| "0000-00-00T00:00:00.000Z");
    count.0
}

fn write_record<T: std::fmt::Display>(
    out: &mut impl Write,
    entry: &KeyEntry,
    now: Now,
    time: impl Fn(i64) -> T,
) -> std::fmt::Result {
    let state = &entry.state;
    let live = holding(entry, now);
    let none = "none";
    writeln!(out, "{}\nstate: {}", state.epoch, state.state(now))?;
    match live.map(|attempt| &attempt.claimant) {
        Some(who) => {
            writeln!(out, "holder: pid {}, command {}, uid {}", who.holder.pid, Printable(&who.command), who.uid)?;
        }
        None => writeln!(out, "holder: {none}")?,
    }
    if let Some(agent) = live.and_then(|attempt| attempt.agent.as_deref()) {
        writeln!(out, "agent: {agent}")?;
    }
    let times = [
        ("since", live.map(|attempt| attempt.since.wall_ms)),
        ("renewed", live.map(|attempt| attempt.renewed.wall_ms)),
        ("expires", live.map(Attempt::expires_ms)),
    ];
    for (name, at) in times {
        match at {
            Some(at) => writeln!(out, "{name}: {}", time(at))?,
            None => writeln!(out, "{name}: {none}")?,
        }
    }
    match live {
        Some(attempt) => writeln!(out, "via: {}", attempt.via)?,
        None => writeln!(out, "via: {none}")?,
    }
    writeln!(out, "waiters: {}", state.line.len())?;
    let note = live.map_or("", |attempt| &attempt.note);
    writeln!(out, "note: {}", note.strip_suffix('\n').unwrap_or(note))
}

/// A command as one line that no terminal takes for orders.
struct Printable<'a>(&'a str);

impl std::fmt::Display for Printable<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.chars().try_for_each(|c| f.write_char(if c.is_control() { '?' } else { c }))
    }
}
