//! Counters for `.leasefs/metrics`, as Prometheus text.
//!
//! What is counted is what was told: a grant that was taken back is none. Counts are of this server, and begin at 0 with
//! the next; Prometheus takes that for what it is, and `leasefs_server_restarts_total` says when.

mod histogram;
mod text;

use std::sync::Arc;
use std::time::Duration;

use crate::error::Error;
use crate::events::{Kind, More, Pruned, Wait};
use crate::ids::Epoch;
use crate::machine::{Change, Reply, Via};
pub use histogram::Histogram;
use histogram::{COMMITS, SPANS};

/// What belongs to an event and is counted with it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Detail {
    /// Nothing.
    None,
    /// By which form the attempt was claimed.
    Via(Via),
    /// How long the attempt lasted, in nanoseconds.
    Held(u64),
    /// The bytes of its result.
    Size(u64),
    /// What was pruned.
    Pruned(Pruned),
    /// Who waited in vain: counted by [`Metrics::waited`], as every wait is.
    Wait(Arc<Wait>),
}

impl Detail {
    /// What a change says of the attempt that it is about.
    pub fn of(change: &Change) -> Option<(Epoch, Detail)> {
        match change {
            Change::Claimed(attempt) => Some((attempt.epoch, Detail::Via(attempt.via))),
            Change::Ended(attempt) => {
                let ended = attempt.ended?;
                Some((attempt.epoch, Detail::Held(ended.boot_ns.saturating_sub(attempt.since.boot_ns))))
            }
            Change::Committed(attempt, _) => Some((attempt.epoch, Detail::Size(attempt.result?.size))),
            _ => None,
        }
    }

    /// Whether it belongs to events of a kind.
    pub fn is_for(&self, kind: Kind) -> bool {
        match self {
            Detail::None => false,
            Detail::Via(_) => kind == Kind::Granted,
            Detail::Size(_) => kind == Kind::Completed,
            Detail::Pruned(_) => kind == Kind::Pruned,
            Detail::Wait(_) => matches!(kind, Kind::Interrupted | Kind::Refused),
            Detail::Held(_) => {
                matches!(kind, Kind::Released | Kind::Finished | Kind::Expired | Kind::Evicted | Kind::Lost)
            }
        }
    }

    /// What of it the event tells.
    pub fn told(self) -> More {
        match self {
            Detail::Pruned(pruned) => More::Pruned(pruned),
            Detail::Wait(wait) => More::Wait(wait),
            _ => More::Nothing,
        }
    }
}

/// Everything counted since the server started.
#[derive(Clone, Debug)]
pub struct Metrics {
    /// Attempts begun by exclusive create.
    creates: u64,
    /// Attempts begun by a lock.
    locks: u64,
    denials: u64,
    waits: u64,
    renewals: u64,
    releases: u64,
    expiries: u64,
    evictions: u64,
    losses: u64,
    completions: u64,
    result_bytes: u64,
    stale: u64,
    pruned_attempts: u64,
    pruned_results: u64,
    /// Transactions committed.
    pub commits: u64,
    /// Transactions that failed.
    pub commit_failures: u64,
    /// Time in line of those who were granted what they waited for, of those a signal ended, and of those refused.
    waited: [Histogram; 3],
    held: Histogram,
    /// Transactions that were not synced, and those that were.
    committed: [Histogram; 2],
}

impl Default for Metrics {
    fn default() -> Metrics {
        Metrics {
            creates: 0,
            locks: 0,
            denials: 0,
            waits: 0,
            renewals: 0,
            releases: 0,
            expiries: 0,
            evictions: 0,
            losses: 0,
            completions: 0,
            result_bytes: 0,
            stale: 0,
            pruned_attempts: 0,
            pruned_results: 0,
            commits: 0,
            commit_failures: 0,
            waited: [const { Histogram::new(SPANS) }; 3],
            held: Histogram::new(SPANS),
            committed: [const { Histogram::new(COMMITS) }; 2],
        }
    }
}

/// What is so now, beside what was counted.
#[derive(Clone, Copy, Debug, Default)]
pub struct Gauges {
    /// Keys held, kept by a draft, or orphaned.
    pub held: usize,
    /// Lock requests in line.
    pub waiting: usize,
    /// How long the first of them waits.
    pub oldest_wait: Duration,
    /// Keys held or shared by whoever lost its connection.
    pub orphaned: usize,
    /// Keys that only a draft keeps.
    pub reporting: usize,
    /// Keys that ever were.
    pub keys: usize,
    /// Bytes that may still be written in the state directory.
    pub free_bytes: Option<u64>,
}

/// What only whoever serves the engine knows.
#[derive(Clone, Copy, Debug, Default)]
pub struct Outside {
    /// Results that are open for writing.
    pub drafts: usize,
    /// Servers that took over from another on this mount.
    pub restarts: u32,
}

impl Metrics {
    /// Counts an event.
    pub fn count(&mut self, kind: Kind, detail: &Detail) {
        match *detail {
            Detail::None | Detail::Via(_) | Detail::Wait(_) => {}
            Detail::Held(ns) => self.held.observe(ns),
            Detail::Size(bytes) => self.result_bytes += bytes,
            Detail::Pruned(Pruned { attempts, results }) => {
                self.pruned_attempts += attempts;
                self.pruned_results += results;
            }
        }
        let counter = match kind {
            Kind::Granted if *detail == Detail::Via(Via::Create) => &mut self.creates,
            Kind::Granted => &mut self.locks,
            Kind::Denied => &mut self.denials,
            Kind::Waiting => &mut self.waits,
            Kind::Renewed => &mut self.renewals,
            Kind::Released => &mut self.releases,
            Kind::Expired => &mut self.expiries,
            Kind::Evicted => &mut self.evictions,
            Kind::Lost => &mut self.losses,
            Kind::Completed => &mut self.completions,
            Kind::Stale => &mut self.stale,
            Kind::Finished | Kind::Shared | Kind::Unshared | Kind::Forgotten | Kind::Pruned => return,
            Kind::Interrupted | Kind::Refused => return,
        };
        *counter += 1;
    }

    /// Counts the end of a wait in line: what was answered, after how many nanoseconds.
    pub fn waited(&mut self, reply: &Result<Reply, Error>, ns: u64) {
        let how = match reply {
            Ok(_) => 0,
            Err(Error::Interrupted) => 1,
            Err(_) => 2,
        };
        self.waited[how].observe(ns);
    }

    /// Counts a transaction, however it went.
    pub fn committed(&mut self, synced: bool, took: Duration) {
        self.committed[usize::from(synced)].observe(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX));
    }
}
