//! What happened lately, for `.leasefs/events`: a bounded ring that readers follow by number.

use std::collections::VecDeque;
use std::sync::Arc;

use serde::Serialize;

use crate::error::Error;
use crate::ids::Epoch;
use crate::key::Key;
use crate::machine::{Claimant, Notice, Outcome, Reply};
use crate::time::{Now, rfc3339};

/// Most events kept for readers that are behind.
pub const CAPACITY: usize = 16_384;

/// One event. Kept small; it is written as JSON when it is read.
#[derive(Clone, Debug)]
pub struct Event {
    seq: u64,
    wall_ms: i64,
    kind: Kind,
    key: Key,
    epoch: Epoch,
    more: More,
}

/// What an event tells besides.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum More {
    /// Nothing.
    #[default]
    Nothing,
    /// How much was pruned.
    Pruned(Pruned),
    /// Who waited in vain.
    Wait(Arc<Wait>),
}

impl More {
    fn pruned(&self) -> Option<Pruned> {
        match self {
            More::Pruned(pruned) => Some(*pruned),
            _ => None,
        }
    }

    fn wait(&self) -> Option<&Wait> {
        match self {
            More::Wait(wait) => Some(wait),
            _ => None,
        }
    }
}

/// Whose lock request stood in line, and for how long.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Wait {
    /// The process, as `status/KEY` shows it in line.
    pub pid: u32,
    /// Its user.
    pub uid: u32,
    /// What it runs, for people.
    pub command: Arc<str>,
    /// Milliseconds in line.
    pub waited_ms: u64,
}

impl Wait {
    /// That of a claimant, of whom nothing is known yet but that it waits.
    pub fn of(claimant: &Claimant) -> Wait {
        Wait { pid: claimant.holder.pid, uid: claimant.uid, command: Arc::clone(&claimant.command), waited_ms: 0 }
    }
}

/// How much was pruned of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Pruned {
    /// Attempts that are gone from its history.
    pub attempts: u64,
    /// Results that are gone.
    pub results: u64,
}

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// An attempt began.
    Granted,
    /// An exclusive create or a lock that would not wait was refused.
    Denied,
    /// A lock request waits.
    Waiting,
    /// A signal ended its wait.
    Interrupted,
    /// Its wait ended with another error.
    Refused,
    /// A lease was renewed.
    Renewed,
    /// An attempt ended by its holder.
    Released,
    /// An attempt's TTL ran out.
    Expired,
    /// An operator ended an attempt.
    Evicted,
    /// A result was committed.
    Completed,
    /// The key of a completed attempt is finished: its handles are closed.
    Finished,
    /// An attempt was lost with its connection.
    Lost,
    /// A superseded or expired handle was refused.
    Stale,
    /// A shared lock was granted.
    Shared,
    /// A shared lock was given back.
    Unshared,
    /// A finished key was unlinked.
    Forgotten,
    /// Ended attempts of a key, or their results, were pruned.
    Pruned,
}

impl Kind {
    /// The event that the end of a wait in line is; a grant has one already.
    pub fn of_wait(reply: &Result<Reply, Error>) -> Option<Kind> {
        match reply {
            Ok(_) => None,
            Err(Error::Interrupted) => Some(Kind::Interrupted),
            Err(_) => Some(Kind::Refused),
        }
    }

    /// The event a notice of the state machine stands for, with its epoch.
    pub fn of(notice: Notice, newest: Epoch) -> (Kind, Epoch) {
        match notice {
            Notice::Granted(epoch) => (Kind::Granted, epoch),
            Notice::Renewed(epoch) => (Kind::Renewed, epoch),
            Notice::Completed(epoch) => (Kind::Completed, epoch),
            Notice::Forgotten(epoch) => (Kind::Forgotten, epoch),
            Notice::Waiting => (Kind::Waiting, newest),
            Notice::Shared => (Kind::Shared, newest),
            Notice::Unshared => (Kind::Unshared, newest),
            Notice::Ended(epoch, outcome) => {
                let kind = match outcome {
                    Outcome::Released => Kind::Released,
                    Outcome::Completed => Kind::Finished,
                    Outcome::Expired => Kind::Expired,
                    Outcome::Evicted => Kind::Evicted,
                    Outcome::Lost => Kind::Lost,
                };
                (kind, epoch)
            }
        }
    }
}

#[derive(Serialize)]
struct Line<'a> {
    seq: u64,
    time: String,
    event: Kind,
    key: &'a str,
    epoch: u64,
    #[serde(flatten)]
    pruned: Option<Pruned>,
    #[serde(flatten)]
    wait: Option<&'a Wait>,
}

/// The ring.
#[derive(Debug, Default)]
pub struct Events {
    ring: VecDeque<Event>,
    next: u64,
}

impl Events {
    /// A ring that goes on from another of which only the number of the next event is left.
    pub fn starting_at(next: u64) -> Events {
        Events { ring: VecDeque::new(), next }
    }

    /// Appends an event.
    pub fn push(&mut self, now: Now, kind: Kind, key: &Key, epoch: Epoch, more: More) {
        if self.ring.len() == CAPACITY {
            self.ring.pop_front();
        }
        self.ring.push_back(Event { seq: self.next, wall_ms: now.wall_ms, kind, key: key.clone(), epoch, more });
        self.next += 1;
    }

    /// The number the next event will have: where a new reader starts.
    pub fn next(&self) -> u64 {
        self.next
    }

    /// Whole JSON lines from number `from` on, at most `limit` bytes of them, and where to go on. A reader that fell
    /// behind is told how many it missed. Empty when there is nothing new that it `may_see`.
    pub fn read(&self, from: u64, limit: usize, may_see: impl Fn(&Key) -> bool) -> (String, u64) {
        let mut text = String::new();
        let first = self.next - self.ring.len() as u64;
        let mut at = from;
        if at < first {
            text = format!("{{\"event\":\"gap\",\"missed\":{}}}\n", first - at);
            at = first;
        }
        let skip = usize::try_from(at - first).unwrap_or(usize::MAX);
        for event in self.ring.iter().skip(skip) {
            if !may_see(&event.key) {
                at += 1;
                continue;
            }
            let line = Line {
                seq: event.seq,
                time: rfc3339(event.wall_ms),
                event: event.kind,
                key: event.key.as_str(),
                epoch: event.epoch.0,
                pruned: event.more.pruned(),
                wait: event.more.wait(),
            };
            let json = serde_json::to_string(&line).unwrap_or_default();
            if !text.is_empty() && text.len() + json.len() + 1 > limit {
                break;
            }
            text.push_str(&json);
            text.push('\n');
            at += 1;
        }
        (text, at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reader_that_fell_behind_is_told() {
        let mut events = Events::default();
        let key = Key::parse("k").unwrap();
        for _ in 0..CAPACITY + 5 {
            events.push(Now::default(), Kind::Granted, &key, Epoch(1), More::Nothing);
        }
        let (text, at) = events.read(0, 100, |_| true);
        assert_eq!(text.lines().next(), Some("{\"event\":\"gap\",\"missed\":5}"));
        let (rest, end) = events.read(at, usize::MAX, |_| true);
        assert_eq!((rest.lines().count() as u64 + at, end), (events.next(), events.next()));
    }

    #[test]
    fn lines_are_never_cut() {
        let mut events = Events::default();
        let key = Key::parse("k").unwrap();
        for epoch in 1..=10 {
            events.push(Now::default(), Kind::Released, &key, Epoch(epoch), More::Nothing);
        }
        let mut at = 0;
        let mut seen = 0;
        while at < events.next() {
            let (text, next) = events.read(at, 150, |_| true);
            assert!(text.ends_with("}\n"));
            seen += text.lines().count();
            at = next;
        }
        assert_eq!(seen, 10);
    }
}
