//! What is shown of a key: the JSON of `status/KEY` (§2) and the record read from `claims/KEY` (§4).

use std::fmt::Write;

use serde::Serialize;

use crate::engine::KeyEntry;
use crate::machine::{Attempt, Outcome, State, Via};
use crate::time::{Now, rfc3339};

#[derive(Serialize)]
struct Holder<'a> {
    pid: u32,
    start_time: u64,
    uid: u32,
    gid: u32,
    command: &'a str,
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
    sharers: usize,
    note: &'a str,
    outcome: Option<Outcome>,
    result: Option<CommittedResult>,
    #[serde(skip_serializing_if = "Option::is_none")]
    why: Option<&'a str>,
}

/// The attempt that a reader is told about as the holder: none once its deadline has passed.
fn holding<'a>(entry: &'a KeyEntry, now: Now) -> Option<&'a Attempt> {
    entry.state.live().filter(|attempt| !attempt.is_due(now))
}

/// One line of JSON, newline included.
pub fn status(entry: &KeyEntry, now: Now) -> String {
    let state = &entry.state;
    let live = holding(entry, now);
    let (since, _) = (live.map_or(state.changed_at.wall_ms, |attempt| attempt.since.wall_ms), ());
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
        expires: live.map(|attempt| rfc3339(now.wall_at(attempt.deadline_ns))),
        ttl_ms: live.map(|attempt| attempt.ttl.as_millis()),
        via: live.map(|attempt| attempt.via),
        waiters: state.line.len(),
        sharers: state.sharers.len(),
        note: live.map_or("", |attempt| &attempt.note),
        outcome: state.last_outcome(),
        result: state.latest_result.map(|(epoch, result)| CommittedResult {
            epoch: epoch.0,
            size: result.size,
            committed: rfc3339(result.committed_ms),
        }),
        why: state.attempt.as_ref().and_then(|attempt| attempt.why.as_deref()),
    };
    let mut line = serde_json::to_string(&shown).unwrap_or_default();
    line.push('\n');
    line
}

/// The record: the epoch alone on the first line, then `name: value` lines, the note last because it may have lines of
/// its own.
pub fn record(entry: &KeyEntry, now: Now) -> String {
    let state = &entry.state;
    let live = holding(entry, now);
    let name = serde_json::to_value(state.state(now)).ok();
    let name = name.as_ref().and_then(|name| name.as_str()).unwrap_or_default();
    let mut text = format!("{}\nstate: {name}\n", state.epoch);
    if let Some(attempt) = live {
        let who = &attempt.claimant;
        let _ = writeln!(text, "holder: pid {}, command {}, uid {}", who.holder.pid, printable(&who.command), who.uid);
        let _ = writeln!(text, "since: {}", rfc3339(attempt.since.wall_ms));
        let _ = writeln!(text, "renewed: {}", rfc3339(attempt.renewed.wall_ms));
        let _ = writeln!(text, "expires: {}", rfc3339(now.wall_at(attempt.deadline_ns)));
        let _ = writeln!(text, "via: {}", attempt.via);
    }
    let _ = writeln!(text, "waiters: {}", state.line.len());
    let _ = writeln!(text, "note: {}", live.map_or("", |attempt| &attempt.note));
    text
}

/// A command as one line that no terminal takes for orders.
fn printable(command: &str) -> String {
    command.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}
