//! What is stored: keys, attempts, namespaces, and the order in which they become durable.
//!
//! The embedded default is SQLite ([`sqlite`]; only the files of that name import rusqlite) behind a [`journal`]; an engine for
//! many hosts would implement the same [`Registry`]. A registry stores decisions, it takes none.

mod coalesce;
pub mod journal;
pub mod prune;
mod seal;
pub mod sqlite;
mod sqlite_fault;
mod sqlite_keys;
mod sqlite_prune;
mod sqlite_read;
mod sqlite_write;
mod tape;

use std::sync::Arc;

use crate::error::Error;
use crate::ids::{Epoch, Handle, KeyId, NamespaceId, Owner, RequestId};
use crate::key::Key;
use crate::machine::{Attempt, Outcome, ResultMeta, Share};
use crate::time::Now;
use prune::{Bounds, Candidate, Limits, Place, Portion, Pruned};

/// One write. A batch of them is applied in order, as a whole or not at all.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub enum Write {
    /// A key is seen for the first time.
    Key(KeyId, Key),
    /// A key that was opened and never claimed is in nobody's use any more.
    Forget(KeyId),
    /// A new attempt; refused unless the key's epoch is exactly one less.
    Claim(KeyId, Arc<Attempt>),
    /// Deadline, TTL, note, agent or handle of an attempt that has not ended.
    Renew(KeyId, Arc<Attempt>),
    /// The end of an attempt; refused unless exactly that attempt has not ended.
    End(KeyId, Arc<Attempt>),
    /// An ended attempt lives on by a draft; refused unless it is the newest and has ended without a result.
    Revive(KeyId, Arc<Attempt>),
    /// A result, and the draft it comes from; refused where the attempt has one.
    Commit(KeyId, Arc<Attempt>, Handle),
    /// Whether the key counts as finished.
    Finished(KeyId, bool),
    /// The last request about a key that must be recognised should it come again.
    Answered(KeyId, RequestId),
    /// A shared lock. It need not survive a power cut: no holder does.
    Share(KeyId, Box<Share>),
    /// The end of a shared lock.
    Unshare(KeyId, Handle, Owner),
    /// A namespace as it is now.
    Namespace(NamespaceRow),
}

impl Write {
    /// The key it is about.
    pub fn key(&self) -> Option<KeyId> {
        match self {
            Write::Key(key, _)
            | Write::Forget(key)
            | Write::Claim(key, _)
            | Write::Renew(key, _)
            | Write::End(key, _)
            | Write::Revive(key, _)
            | Write::Commit(key, ..)
            | Write::Answered(key, _)
            | Write::Share(key, _)
            | Write::Unshare(key, ..)
            | Write::Finished(key, _) => Some(*key),
            Write::Namespace(_) => None,
        }
    }

    /// The key it forgets, if it does.
    pub fn forgets(&self) -> Option<KeyId> {
        match self {
            Write::Forget(key) => Some(*key),
            _ => None,
        }
    }
}

/// A namespace as it is stored.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct NamespaceRow {
    /// Its number.
    pub id: NamespaceId,
    /// Path below `claims/`; empty for the root.
    pub path: String,
    /// False once it was removed; its keys keep their epochs.
    pub present: bool,
    /// How often it was made.
    pub made: u64,
    /// Permission bits with setuid, setgid and sticky.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Access time, nanoseconds since the Unix epoch.
    pub atime_ns: i64,
    /// Modification time, nanoseconds since the Unix epoch.
    pub mtime_ns: i64,
    /// Change time, nanoseconds since the Unix epoch.
    pub ctime_ns: i64,
    /// TTL of new leases below it, where it sets one.
    pub ttl_ms: Option<u64>,
    /// The request that made or removed it.
    pub request: RequestId,
}

impl NamespaceRow {
    /// The root of a new state directory, made at this time in nanoseconds since the Unix epoch.
    pub fn root(mode: u32, uid: u32, gid: u32, made_ns: i64) -> NamespaceRow {
        NamespaceRow {
            id: NamespaceId::ROOT,
            path: String::new(),
            present: true,
            made: 1,
            mode,
            uid,
            gid,
            atime_ns: made_ns,
            mtime_ns: made_ns,
            ctime_ns: made_ns,
            ttl_ms: None,
            request: RequestId(0),
        }
    }
}

/// A key as it is stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyRow {
    /// Its number.
    pub id: u64,
    /// The key.
    pub key: Key,
    /// The newest epoch.
    pub epoch: u64,
    /// Whether it counts as finished.
    pub finished: bool,
    /// The rows of attempts up to this epoch may be gone, because they were pruned…
    pub pruned: u64,
    /// …and exactly so many are.
    pub pruned_attempts: u64,
}

/// An attempt as it is stored, for people and for checks. Times are Unix milliseconds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AttemptRow {
    /// Its key.
    pub key_id: u64,
    /// Its number.
    pub epoch: u64,
    /// Holder's pid.
    pub pid: u32,
    /// Holder's start time, in clock ticks since boot.
    pub start_time: u64,
    /// Holder's uid.
    pub uid: u32,
    /// Holder's gid.
    pub gid: u32,
    /// What the holder ran.
    pub command: String,
    /// `create` or `lock`.
    pub via: String,
    /// When it was claimed.
    pub since_ms: i64,
    /// When it was last renewed.
    pub renewed_ms: i64,
    /// When it expires or would have.
    pub expires_ms: i64,
    /// Its TTL in milliseconds.
    pub ttl_ms: u64,
    /// How long its claimer stood in line.
    pub waited_ms: u64,
    /// What the holder wrote.
    pub note: String,
    /// Who the holder works for.
    pub agent: Option<String>,
    /// How it ended; `completed` from the commit on.
    pub outcome: Option<String>,
    /// Why it ended.
    pub reason: Option<String>,
    /// When it ended; none while it is alive.
    pub ended_ms: Option<i64>,
    /// False once its TTL ran out or it was evicted.
    pub registered: bool,
    /// Size in bytes and time of its result.
    pub result: Option<(u64, i64)>,
    /// It had a result, which was pruned.
    pub result_pruned: bool,
}

/// What the engine begins with, as it was stored. The keys in nobody's use are read later, by [`Read::keys`].
#[derive(Debug, Default)]
pub struct Loaded {
    /// Counts the servers that ever ran on this state directory, this one included.
    pub generation: u64,
    /// Every namespace.
    pub namespaces: Vec<NamespaceRow>,
    /// The keys with an attempt that has not ended, or with shared locks.
    pub keys: Vec<LoadedKey>,
    /// The highest number of any key.
    pub last_key: KeyId,
}

/// Which keys to read.
#[derive(Clone, Copy, Debug)]
pub enum Which<'a> {
    /// Those with an attempt that has not ended, or with shared locks.
    Alive,
    /// That of this number.
    Number(KeyId),
    /// That of this path.
    Named(&'a str),
    /// All below the namespace of this path, and below those in it.
    Below(&'a str),
    /// The first ones above a number, lowest first, at most so many.
    After(KeyId, usize),
}

/// A key with its newest attempt.
#[derive(Debug)]
pub struct LoadedKey {
    /// The key.
    pub row: KeyRow,
    /// Its newest attempt.
    pub attempt: Option<Attempt>,
    /// The outcome of the attempt before.
    pub previous_outcome: Option<Outcome>,
    /// The newest attempt that has a result.
    pub latest_result: Option<(Epoch, ResultMeta)>,
    /// The last request about it that must be recognised should it come again.
    pub last_request: RequestId,
    /// Its shared locks, by handle; only in [`Loaded`], which has every key that has any.
    pub shares: Vec<Share>,
}

/// A committed result, as far as the registry knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoredResult {
    /// In bytes.
    pub size: u64,
    /// Unix milliseconds.
    pub committed_ms: i64,
    /// The uid of its attempt.
    pub uid: u32,
}

/// The writing side: one owner, one transaction at a time.
pub trait Registry: Send {
    /// Reads at start what cannot be read later. Attempts from before a reboot come back as `lost` and no longer registered.
    ///
    /// # Errors
    /// [`Error::Storage`] where the registry cannot be read.
    fn load(&mut self, boot_id: &str, now: Now) -> Result<Loaded, Error>;

    /// Applies the writes as one transaction. With `durable` they survive a power cut once it returns; without, the
    /// end of the process.
    ///
    /// # Errors
    /// [`Error::Storage`]; then none of them was applied.
    fn commit(&mut self, writes: &[Write], durable: bool) -> Result<(), Error>;

    /// Takes candidates away, as one transaction that survives a power cut once it returns, and notes that files whose
    /// rows went before are gone. Whatever was accepted so far is in its place first. Gives what went of each key.
    ///
    /// # Errors
    /// [`Error::Storage`]; then nothing went.
    fn prune(&mut self, candidates: &[Candidate], files_gone: &[(KeyId, Epoch)]) -> Result<Vec<Pruned>, Error>;

    /// What was accepted and is safe, but not yet where whoever reads the registry from outside finds it.
    fn backlog(&self) -> Backlog {
        Backlog::None
    }

    /// A reading side that never waits for a commit.
    ///
    /// # Errors
    /// [`Error::Storage`] where it cannot be opened.
    fn reader(&self) -> Result<Box<dyn Read>, Error>;

    /// Moves what the log has gathered into the main file, off the claim path. Safe to call at any time.
    ///
    /// # Errors
    /// [`Error::Storage`]; nothing is lost by it.
    fn checkpointer(&self) -> Result<Box<dyn Checkpoint>, Error>;
}

/// Looks up what the engine does not keep in memory: ended attempts, and keys that nobody has used yet.
pub trait Read: Send {
    /// The result of an attempt.
    ///
    /// # Errors
    /// [`Error::Storage`].
    fn result(&mut self, key: KeyId, epoch: Epoch) -> Result<Option<StoredResult>, Error>;

    /// The epochs above `after` that have a result, lowest first, at most `limit`.
    ///
    /// # Errors
    /// [`Error::Storage`].
    fn results(&mut self, key: KeyId, after: Epoch, limit: usize) -> Result<Vec<Epoch>, Error>;

    /// Keys as they were when the engine began. Of one that was written to since, it may give what was before that.
    ///
    /// # Errors
    /// [`Error::Storage`].
    fn keys(&mut self, which: Which<'_>) -> Result<Vec<LoadedKey>, Error>;

    /// What may be pruned, behind a place; what was accepted a moment ago may be missing.
    ///
    /// # Errors
    /// [`Error::Storage`].
    fn prunable(&mut self, after: Place, bounds: &Bounds, limits: Limits) -> Result<Portion, Error>;

    /// The files of results whose rows were pruned, as far as they are not known to be gone.
    ///
    /// # Errors
    /// [`Error::Storage`].
    fn pruned_files(&mut self) -> Result<Vec<(KeyId, Epoch)>, Error>;
}

/// What a registry has accepted but not yet put in its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backlog {
    /// Nothing.
    None,
    /// Some; it can stay for a moment.
    Some,
    /// So much that a commit may soon have to wait for it.
    Much,
}

/// Moves the log into the main file.
pub trait Checkpoint: Send {
    /// Puts what was accepted in its place: see [`Registry::backlog`].
    ///
    /// # Errors
    /// [`Error::Storage`]; nothing is lost by it.
    fn apply(&mut self) -> Result<(), Error> {
        Ok(())
    }

    /// Does as much as it can without making a commit wait.
    ///
    /// # Errors
    /// [`Error::Storage`]; nothing is lost by it.
    fn run(&mut self) -> Result<(), Error>;
}
