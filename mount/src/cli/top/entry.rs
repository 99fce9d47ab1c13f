//! A key on `top`'s screen: what each column shows of it, and how keys are ordered by a column.

use std::cmp::Ordering;

use leasefs::client::Status;

use crate::cli::ls;
use crate::cli::show::{self, NOTHING};

/// What a column shows, and what keys can be sorted by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Column {
    /// The key.
    Key,
    /// Its state.
    State,
    /// The newest epoch.
    Epoch,
    /// The holder's process.
    Pid,
    /// The holder's command.
    Command,
    /// The container or service it is in.
    Container,
    /// The agent it works for.
    Agent,
    /// How long it holds.
    Age,
    /// How long the TTL still lasts.
    Ttl,
    /// How many wait.
    Line,
    /// How long the first of them has.
    Wait,
}

impl Column {
    /// All of them, in the order they are shown.
    pub const ALL: [Column; 11] = [
        Column::Key,
        Column::State,
        Column::Epoch,
        Column::Pid,
        Column::Command,
        Column::Container,
        Column::Agent,
        Column::Age,
        Column::Ttl,
        Column::Line,
        Column::Wait,
    ];

    /// What is above it.
    pub fn head(self) -> &'static str {
        match self {
            Column::Key => "KEY",
            Column::State => "STATE",
            Column::Epoch => "EPOCH",
            Column::Pid => "PID",
            Column::Command => "COMMAND",
            Column::Container => "CONTAINER",
            Column::Agent => "AGENT",
            Column::Age => "AGE",
            Column::Ttl => "LEFT",
            Column::Line => "LINE",
            Column::Wait => "WAIT",
        }
    }

    /// The letter that sorts by it.
    pub fn letter(self) -> char {
        match self {
            Column::Key => 'k',
            Column::State => 's',
            Column::Epoch => 'e',
            Column::Pid => 'p',
            Column::Command => 'c',
            Column::Container => 'n',
            Column::Agent => 'g',
            Column::Age => 'a',
            Column::Ttl => 't',
            Column::Line => 'l',
            Column::Wait => 'w',
        }
    }

    /// The column that a letter sorts by.
    pub fn of_letter(letter: char) -> Option<Column> {
        Column::ALL.into_iter().find(|column| column.letter() == letter)
    }
}

/// A key with what is worked out of its status once.
#[derive(Clone, Debug)]
pub struct Entry {
    /// What the tree says.
    pub status: Status,
    /// The container or service of its holder.
    pub container: Option<String>,
    since_ms: Option<i64>,
    expires_ms: Option<i64>,
    waiting_since_ms: Option<i64>,
}

impl Entry {
    /// A key as its status has it.
    pub fn new(status: Status, container: Option<String>) -> Entry {
        let (since_ms, expires_ms) = (ls::age_ms(&status, 0).map(|ms| -ms), ls::left_ms(&status, 0));
        let waiting_since_ms = ls::longest_wait_ms(&status, 0).map(|ms| -ms);
        Entry { status, container, since_ms, expires_ms, waiting_since_ms }
    }

    /// What a column shows of it.
    pub fn cell(&self, column: Column, now_ms: i64) -> String {
        let status = &self.status;
        let span = |ms: Option<i64>| ms.map_or_else(|| NOTHING.to_owned(), show::span);
        let holder = status.holder.as_ref();
        match column {
            Column::Key => show::plain(&status.key),
            Column::State => status.state.clone(),
            Column::Epoch => status.epoch.to_string(),
            Column::Pid => match holder {
                Some(holder) if holder.pid != 0 => holder.pid.to_string(),
                _ => NOTHING.to_owned(),
            },
            Column::Command => match holder {
                Some(holder) => show::cell(&holder.command),
                None if status.sharers > 0 => format!("{} sharing", status.sharers),
                None => NOTHING.to_owned(),
            },
            Column::Container => self.container.as_deref().map_or_else(|| NOTHING.to_owned(), show::cell),
            Column::Agent => show::cell(status.agent.as_deref().unwrap_or_default()),
            Column::Age => span(self.since_ms.map(|since_ms| now_ms - since_ms)),
            Column::Ttl => span(self.expires_ms.map(|expires_ms| expires_ms - now_ms)),
            Column::Line => status.waiters.to_string(),
            Column::Wait => span(self.waiting_since_ms.map(|since_ms| now_ms - since_ms)),
        }
    }

    /// Whether it is among the keys that are shown.
    pub fn is_shown(&self, shows_free: bool) -> bool {
        shows_free || self.status.state != "free" || self.status.waiters > 0
    }

    /// What a person looks for first comes first: the oldest, the longest wait, the longest line, the least time left.
    pub fn order(&self, other: &Entry, column: Column) -> Ordering {
        let (one, two) = (&self.status, &other.status);
        let holder = |status: &Status| status.holder.as_ref().map(|holder| (holder.pid, holder.command.clone()));
        let by = match column {
            Column::Key => Ordering::Equal,
            Column::State => rank(&one.state).cmp(&rank(&two.state)),
            Column::Epoch => two.epoch.cmp(&one.epoch),
            Column::Pid => none_last(holder(one).map(|(pid, _)| pid), holder(two).map(|(pid, _)| pid)),
            Column::Command => none_last(holder(one).map(|(_, name)| name), holder(two).map(|(_, name)| name)),
            Column::Container => none_last(self.container.as_ref(), other.container.as_ref()),
            Column::Agent => none_last(one.agent.as_ref(), two.agent.as_ref()),
            Column::Age => none_last(self.since_ms, other.since_ms),
            Column::Ttl => none_last(self.expires_ms, other.expires_ms),
            Column::Line => two.waiters.cmp(&one.waiters),
            Column::Wait => none_last(self.waiting_since_ms, other.waiting_since_ms),
        };
        by.then_with(|| one.key.cmp(&two.key))
    }
}

fn none_last<T: Ord>(one: Option<T>, two: Option<T>) -> Ordering {
    match (&one, &two) {
        (Some(one), Some(two)) => one.cmp(two),
        (None, None) => Ordering::Equal,
        (one, _) => {
            if one.is_some() {
                Ordering::Less
            } else {
                Ordering::Greater
            }
        }
    }
}

fn rank(state: &str) -> usize {
    let states = ["orphaned", "held", "reporting", "shared", "finished", "free"];
    states.iter().position(|known| *known == state).unwrap_or(states.len())
}
