//! Attempts whose connection is gone: which there are, and why each is not free yet (§5).
//!
//! Whether a holder is dead is found out elsewhere; an attempt is ended by [`crate::machine::Input::Lose`].

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::Engine;
use crate::ids::{Epoch, KeyId};
use crate::machine::Claimant;

impl Engine {
    /// The keys that are held by an attempt whose connection is gone, with its epoch. None come to be while the engine
    /// is open.
    pub fn orphans(&self) -> Vec<(KeyId, Epoch)> {
        let inner = self.inner.lock();
        inner.orphans.iter().filter_map(|id| inner.keys.get(id).map(|entry| (*id, entry.state.epoch))).collect()
    }

    /// Says for people why an orphaned attempt is not free yet. Nothing happens where it is orphaned no longer.
    pub fn explain_orphan(&self, key: KeyId, epoch: Epoch, why: &str) {
        let mut inner = self.inner.lock();
        let entry = inner.keys.get_mut(&key).filter(|entry| entry.state.is_orphaned() && entry.state.epoch == epoch);
        if let Some(entry) = entry.filter(|entry| entry.orphaned_why.as_deref() != Some(why)) {
            entry.orphaned_why = Some(Arc::from(why));
        }
    }

    /// Whether there are any orphaned attempts: asked often, and seldom so.
    pub fn has_orphans(&self) -> bool {
        self.orphaned.load(Ordering::Acquire)
    }

    /// Whether a claim would give the orphaned attempt of a key back to its holder.
    pub fn is_return(&self, key: KeyId, claimant: &Claimant) -> bool {
        self.inner.lock().keys.get(&key).is_some_and(|entry| entry.state.is_return(claimant))
    }
}
