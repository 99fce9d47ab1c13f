//! One period of holding a key: who, since when, until when, and how it ended.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use crate::ids::{Epoch, Handle, Owner, RequestId};
use crate::time::Now;
use crate::ttl::Ttl;

/// A process, told from a later one with the same number by its start time (clock ticks since boot). 0 is unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub struct Process {
    /// Thread-group id in the server's pid namespace; 0 where it cannot be seen.
    pub pid: u32,
    /// Field 22 of `/proc/PID/stat`.
    pub start_time: u64,
}

impl Process {
    /// Whether both are known and the same process.
    pub fn is(self, other: Process) -> bool {
        self.pid != 0 && self == other
    }
}

/// Who asks for a lease.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Claimant {
    /// The caller's filesystem uid.
    pub uid: u32,
    /// The caller's filesystem gid.
    pub gid: u32,
    /// The process shown as the holder.
    pub holder: Process,
    /// The process that opened the handle.
    pub opener: Process,
    /// The process that locked it; the opener for an exclusive create.
    pub locker: Process,
    /// What the holder runs, for people.
    pub command: Arc<str>,
    /// The request by which it was asked for.
    pub request: RequestId,
}

impl Claimant {
    /// Whether this process opened or locked the handle.
    pub fn includes(&self, process: Process) -> bool {
        self.opener.is(process) || self.locker.is(process)
    }

    /// Whether one of the processes behind this claim is one of those behind the other.
    pub fn shares_a_process_with(&self, other: &Claimant) -> bool {
        let is_ours = |process: Process| self.holder.is(process) || self.includes(process);
        is_ours(other.opener) || is_ours(other.locker)
    }
}

/// By which form a lease was claimed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Via {
    /// Exclusive create.
    Create,
    /// A lock.
    Lock,
}

/// How an attempt ended: the table of §5.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    /// The handle was closed, unlocked or unlinked.
    Released,
    /// A result was committed.
    Completed,
    /// The TTL ran out.
    Expired,
    /// Ended by an operator.
    Evicted,
    /// The connection was lost and the holder is proven dead, or the machine was rebooted.
    Lost,
}

macro_rules! words {
    ($type:ident { $($variant:ident = $word:literal),* $(,)? }) => {
        impl $type {
            /// As the registry, JSON and records have it.
            pub fn word(self) -> &'static str {
                match self { $($type::$variant => $word),* }
            }
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.word())
            }
        }

        impl FromStr for $type {
            type Err = ();

            fn from_str(word: &str) -> Result<$type, ()> {
                match word { $($word => Ok($type::$variant),)* _ => Err(()) }
            }
        }
    };
}

words!(Via { Create = "create", Lock = "lock" });
words!(Outcome {
    Released = "released",
    Completed = "completed",
    Expired = "expired",
    Evicted = "evicted",
    Lost = "lost",
});

/// Why an attempt ended, in a few words: `closed`, `exited`, `killed by signal 9`, `evicted by uid 0: …`.
pub type Why = Arc<str>;

/// A committed result. Never changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct ResultMeta {
    /// In bytes.
    pub size: u64,
    /// When, in Unix milliseconds.
    pub committed_ms: i64,
    /// The draft it was.
    pub draft: Handle,
}

/// The newest attempt of a key.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Attempt {
    /// Its number.
    pub epoch: Epoch,
    /// By which form it was claimed.
    pub via: Via,
    /// Who claimed it.
    pub claimant: Claimant,
    /// The holder handle.
    pub handle: Handle,
    /// The lock owners that share the lease: one for a lock, more where a created handle was locked too.
    pub owners: Vec<Owner>,
    /// Its TTL.
    pub ttl: Ttl,
    /// When it was claimed.
    pub since: Now,
    /// When it was last renewed; `since` before the first renewal.
    pub renewed: Now,
    /// `CLOCK_BOOTTIME`, in nanoseconds, at which it expires.
    pub deadline_ns: u64,
    /// How long its claimer stood in line, in milliseconds; 0 when it was granted at once.
    pub waited_ms: u64,
    /// What the holder wrote.
    pub note: Arc<str>,
    /// Who the holder works for, as it said itself.
    pub agent: Option<Arc<str>>,
    /// Whether the holder handle holds it.
    pub held: bool,
    /// False once its TTL ran out or it was evicted: nothing may be committed for it any more.
    pub registered: bool,
    /// Its connection is gone, its holder is not proven dead (§5).
    pub orphaned: bool,
    /// How its handle went, where a draft kept it alive after that.
    pub why: Option<Why>,
    /// How it ended; `Completed` from the commit on, though it may be held still.
    pub outcome: Option<Outcome>,
    /// When it ended.
    pub ended: Option<Now>,
    /// Its result.
    pub result: Option<ResultMeta>,
}

impl Attempt {
    /// Whether its TTL has run out.
    pub fn is_due(&self, now: Now) -> bool {
        self.deadline_ns <= now.boot_ns
    }

    /// The deadline on the wall clock, in Unix milliseconds, as it stood at the last renewal.
    pub fn expires_ms(&self) -> i64 {
        self.renewed.wall_at(self.deadline_ns)
    }

    /// Whether it may still commit, as far as it alone is concerned.
    pub fn is_registered(&self, now: Now) -> bool {
        self.registered && !self.is_due(now)
    }

    /// Moves the deadline to one TTL from now.
    pub(super) fn extend(&mut self, now: Now) {
        self.deadline_ns = now.boot_ns.saturating_add(self.ttl.as_nanos());
    }
}
