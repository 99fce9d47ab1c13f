//! What is held by whoever lost its connection: which keys, and why each is not free yet (§5).
//!
//! Whether a holder is dead is found out elsewhere; then [`crate::machine::Input::Lose`] ends an attempt, and
//! [`crate::machine::Input::LoseShares`] shared locks.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::Engine;
use crate::ids::{Epoch, KeyId};
use crate::machine::{Claimant, KeyState};

/// What keeps a key though its connection is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Orphaned {
    /// The attempt of this epoch.
    Attempt(Epoch),
    /// Shared locks.
    Shares,
}

impl Orphaned {
    fn of(state: &KeyState) -> Option<Orphaned> {
        if state.is_orphaned() {
            return Some(Orphaned::Attempt(state.epoch));
        }
        state.has_orphaned_share().then_some(Orphaned::Shares)
    }
}

impl Engine {
    /// The keys that are kept by what lost its connection. None come to be while the engine is open.
    pub fn orphans(&self) -> Vec<(KeyId, Orphaned)> {
        let inner = self.inner.lock();
        let orphaned = |id: &KeyId| Some((*id, Orphaned::of(&inner.keys.get(id)?.state)?));
        inner.orphans.iter().filter_map(orphaned).collect()
    }

    /// Says for people why an orphaned key is not free yet. Nothing happens where it is orphaned no longer.
    pub fn explain_orphan(&self, key: KeyId, orphaned: Orphaned, why: &str) {
        let mut inner = self.inner.lock();
        let entry = inner.keys.get_mut(&key).filter(|entry| Orphaned::of(&entry.state) == Some(orphaned));
        if let Some(entry) = entry.filter(|entry| entry.orphaned_why.as_deref() != Some(why)) {
            entry.orphaned_why = Some(Arc::from(why));
        }
    }

    /// Whether there are any orphaned keys: asked often, and seldom so.
    pub fn has_orphans(&self) -> bool {
        self.orphaned.load(Ordering::Acquire)
    }

    /// Whether a claim would give the orphaned attempt of a key back to its holder.
    pub fn is_return(&self, key: KeyId, claimant: &Claimant) -> bool {
        self.inner.lock().keys.get(&key).is_some_and(|entry| entry.state.is_return(claimant))
    }
}
