//! What pruning takes away, and what it leaves (contract §1: numbers go on, whatever is pruned).
//!
//! Only what has ended can go. The newest attempt that has ended always keeps its row, so that a key's count, how it
//! ended last and whose it was stay known; of that one only the result can go. A result that is gone never comes back:
//! its attempt is struck off the register along with it, so no other can be committed in its place.

use crate::ids::{Epoch, KeyId};
use crate::key::Key;
use crate::machine::ResultMeta;

/// How much history is kept. What either bound lets go, goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// Completed attempts that ended at this time or before go, with their results. Unix milliseconds.
    pub completed_by_ms: Option<i64>,
    /// Of each key, only so many of the newest attempts that have ended stay; at least 1.
    pub keep: Option<u64>,
}

impl Bounds {
    /// Whether there is any bound: without one there is nothing to prune by.
    pub fn is_none(&self) -> bool {
        self.completed_by_ms.is_none() && self.keep.is_none()
    }
}

/// Something that may go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// The number of its key.
    pub key_id: KeyId,
    /// Its key.
    pub key: Key,
    /// Which attempt.
    pub epoch: Epoch,
    /// Its row stays, only its result goes.
    pub keeps_row: bool,
    /// The bytes of its result, if it has one.
    pub result: Option<u64>,
}

/// A part of what may go, and where to look on.
#[derive(Clone, Debug, Default)]
pub struct Portion {
    /// In the order of key numbers and epochs.
    pub candidates: Vec<Candidate>,
    /// Behind what was looked at; none where that was all.
    pub next: Option<Place>,
}

/// A place in the history: everything up to this attempt of this key was looked at.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Place {
    /// The key.
    pub key: KeyId,
    /// The attempt; the highest number where the whole key was.
    pub epoch: Epoch,
}

/// How much is looked at in one go.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Most candidates.
    pub candidates: usize,
    /// Most keys.
    pub keys: usize,
}

/// What went of one key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pruned {
    /// The key.
    pub key: KeyId,
    /// Attempts whose rows went.
    pub attempts: u64,
    /// Results that went, with their bytes; their files are still there.
    pub results: Vec<(Epoch, u64)>,
    /// The newest result that is left.
    pub latest: Option<(Epoch, ResultMeta)>,
}
