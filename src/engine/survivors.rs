//! What outlives a server that is killed, besides what the registry keeps.
//!
//! The registry keeps leases, epochs and results. Open files, shared locks and the handles that lost their lease belong
//! to the connection: they end with it, and it lives on when the server is replaced. Whoever serves the connection keeps
//! them in a [`Memory`] and gives them back to the next engine as [`Survivors`].
//!
//! What is kept may be ahead of the registry by what was decided and never told, and is never behind: so the registry
//! decides, and what it knows nothing of was told to nobody.

use std::collections::HashMap;
use std::sync::Arc;

use super::Inner;
use crate::ids::{Epoch, Handle, KeyId, Owner};
use crate::machine::{KeyState, Outcome, Share, Standing};
use crate::registry::Write;
use crate::time::Now;

/// Keeps what a server's successor has to know. Called with the engine's lock held: it must not block, nor call back.
pub trait Memory: Send + Sync {
    /// What a handle of a key has become. Kept before anybody is told.
    fn keep(&self, key: KeyId, standing: &Standing);

    /// The number of the next event.
    fn next_event(&self, number: u64);
}

/// Remembers nothing: for an engine whose connection ends with it.
pub struct Oblivious;

impl Memory for Oblivious {
    fn keep(&self, _key: KeyId, _standing: &Standing) {}

    fn next_event(&self, _number: u64) {}
}

/// What the last server of the same connection left behind.
#[derive(Debug, Default)]
pub struct Survivors {
    keys: HashMap<KeyId, Left>,
    /// The number of the next event.
    pub next_event: u64,
    /// Every handle from this one on that is open is among the survivors: what is not is open nowhere.
    pub complete_since: Option<Handle>,
}

/// What was left behind of one key.
#[derive(Debug, Default)]
pub(super) struct Left {
    /// Open claim handles, with the epoch of the lease that they lost, or were about to lose.
    pub claims: Vec<(Handle, Option<Epoch>)>,
    shares: Vec<Share>,
    drafts: Vec<(Handle, Epoch)>,
    complete_since: Option<Handle>,
}

impl Survivors {
    /// An open claim handle, and what was kept of it as [`Standing::Lost`].
    pub fn claim(&mut self, key: KeyId, handle: Handle, lost: Option<Epoch>) {
        self.keys.entry(key).or_default().claims.push((handle, lost));
    }

    /// A shared lock.
    pub fn share(&mut self, key: KeyId, share: Share) {
        self.keys.entry(key).or_default().shares.push(share);
    }

    /// An open write handle on the result of an attempt.
    pub fn draft(&mut self, key: KeyId, handle: Handle, epoch: Epoch) {
        self.keys.entry(key).or_default().drafts.push((handle, epoch));
    }

    /// The keys of which anything was left.
    pub(super) fn keys(&self) -> impl Iterator<Item = KeyId> {
        self.keys.keys().copied()
    }

    pub(super) fn take(&mut self, key: KeyId) -> Left {
        Left { complete_since: self.complete_since, ..self.keys.remove(&key).unwrap_or_default() }
    }
}

impl Inner {
    /// Puts into a key's state what the registry does not keep of it.
    ///
    /// An attempt that was alive goes on if its handle, or a draft of it, is still open. If its handle is gone with the
    /// connection, the holder may be at work all the same: it stays held until its TTL, an eviction, a proof of death or
    /// a reboot (§5). A draft whose handle is gone keeps nothing alive.
    pub(super) fn adopt(&mut self, id: KeyId, state: &mut KeyState, left: Left, now: Now) {
        state.changed_at = state.attempt.as_ref().map_or(now, |attempt| attempt.ended.unwrap_or(attempt.since));
        // Opening a draft revives an attempt that has ended: where it has ended all the same, the end of its last draft
        // is recorded, and only the answer to that is missing.
        let ended = state.attempt.as_ref().filter(|a| a.registered && a.ended.is_some()).map(|attempt| attempt.epoch);
        state.drafts.extend(left.drafts.into_iter().filter(|(_, epoch)| Some(*epoch) != ended));
        let holder = state.attempt.as_ref().filter(|attempt| attempt.held).map(|attempt| attempt.handle);
        // A lease that is held still, or that was never recorded, was lost in memory only.
        let has_lost = |(handle, lost): &&(Handle, Option<Epoch>)| {
            lost.is_some_and(|epoch| epoch <= state.epoch) && Some(*handle) != holder
        };
        state.lost.extend(left.claims.iter().filter(has_lost).map(|(handle, _)| *handle));
        if holder.is_none() {
            // One that lost a lease gave its share back for it.
            let shares = left.shares.into_iter().filter(|share| !state.lost.contains(&share.handle));
            state.sharers = shares.collect();
        } else {
            // The end of the lease is not recorded, so nobody was told that it made room for a share.
            for share in left.shares {
                self.memory.keep(id, &Standing::Unshared(share.handle, share.owner));
            }
        }
        let kept = state.live().is_some();
        let Some(attempt) = state.attempt.as_mut().filter(|attempt| attempt.ended.is_none()).map(Arc::make_mut) else {
            return;
        };
        if let Some(holder) = holder {
            let is_open = left.claims.iter().any(|(handle, _)| *handle == holder);
            if !is_open && left.complete_since.is_some_and(|first| holder >= first) {
                // Recorded by a commit that failed all the same, after the fault of a disk, so nobody was told of it.
                attempt.held = false;
                attempt.why = Some("nobody was told of it".into());
                attempt.outcome = Some(Outcome::Lost);
                attempt.ended = Some(now);
                self.batch.writes.extend(state.attempt.clone().map(|attempt| Write::End(id, attempt)));
                return;
            }
            attempt.orphaned = !is_open;
        } else if !kept {
            let completed = attempt.result.is_some();
            let due = attempt.is_due(now);
            attempt.registered &= !due;
            attempt.outcome = Some(match (completed, due) {
                (true, _) => Outcome::Completed,
                (false, true) => Outcome::Expired,
                (false, false) => Outcome::Released,
            });
            attempt.ended = Some(now);
            state.finished = completed;
            self.batch.writes.extend(state.attempt.clone().map(|attempt| Write::End(id, attempt)));
        }
    }

    /// Keeps that a handle does not share a key any more, unless it does again.
    pub(super) fn keep_unshared(&mut self, id: KeyId, handle: Handle, owner: Owner) {
        let is_it = |share: &Share| share.handle == handle && share.owner == owner;
        if !self.keys.get(&id).is_some_and(|entry| entry.state.sharers.iter().any(is_it)) {
            self.memory.keep(id, &Standing::Unshared(handle, owner));
        }
    }

    /// Keeps what handles are, after a key was put back to what it was before.
    pub(super) fn keep_again(&mut self, id: KeyId, undone: &KeyState) {
        for share in &undone.sharers {
            self.keep_unshared(id, share.handle, share.owner);
        }
        let Some(entry) = self.keys.get(&id) else { return };
        for share in entry.state.sharers.iter().filter(|share| !undone.sharers.contains(share)) {
            self.memory.keep(id, &Standing::Shared(Box::new(share.clone())));
        }
    }
}
