//! What outlives a server that is killed, besides what the registry keeps.
//!
//! The registry keeps leases, shared locks, epochs and results. Open files and the handles that lost their lease belong to
//! the connection: they end with it, and it lives on when the server is replaced. Whoever serves the connection keeps them
//! in a [`Memory`] and gives them back to the next engine as [`Survivors`].
//!
//! What is kept may be ahead of the registry by what was decided and never told, and is never behind: so the registry
//! decides, and what it knows nothing of was told to nobody.

use std::collections::HashMap;
use std::sync::Arc;

use super::Inner;
use crate::ids::{Epoch, Handle, KeyId};
use crate::machine::{KeyState, Outcome, Share};
use crate::registry::Write;
use crate::time::Now;

/// Keeps what a server's successor has to know. Called with the engine's lock held: it must not block, nor call back.
pub trait Memory: Send + Sync {
    /// A handle that is open lost the lease of an epoch. Kept before anybody is told.
    fn lost(&self, handle: Handle, epoch: Epoch);

    /// The number of the next event.
    fn next_event(&self, number: u64);
}

/// Remembers nothing: for an engine whose connection ends with it.
pub struct Oblivious;

impl Memory for Oblivious {
    fn lost(&self, _handle: Handle, _epoch: Epoch) {}

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
    drafts: Vec<(Handle, Epoch)>,
    complete_since: Option<Handle>,
}

impl Survivors {
    /// An open claim handle, and what was kept of it by [`Memory::lost`].
    pub fn claim(&mut self, key: KeyId, handle: Handle, lost: Option<Epoch>) {
        self.keys.entry(key).or_default().claims.push((handle, lost));
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
    /// a reboot (§5). So does a shared lock. A draft whose handle is gone keeps nothing alive.
    pub(super) fn adopt(&mut self, id: KeyId, state: &mut KeyState, shares: Vec<Share>, left: Left, now: Now) {
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
        for share in shares {
            let is_open = left.claims.iter().any(|(handle, _)| *handle == share.handle);
            let is_closed = !is_open && left.complete_since.is_some_and(|first| share.handle >= first);
            // Recorded by a commit that failed all the same, a share may be there beside a lease: nobody was told of it.
            if is_closed || holder.is_some() || state.lost.contains(&share.handle) {
                self.batch.writes.push(Write::Unshare(id, share.handle, share.owner));
            } else {
                let until_ns =
                    (!is_open).then(|| share.until_ns.unwrap_or(now.boot_ns.saturating_add(share.ttl.as_nanos())));
                let is_new = until_ns != share.until_ns;
                let share = Share { until_ns, ..share };
                if is_new {
                    self.batch.writes.push(Write::Share(id, Box::new(share.clone())));
                }
                state.sharers.push(share);
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
}
