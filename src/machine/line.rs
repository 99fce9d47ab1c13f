//! Locks and the line of those who wait: first come, first served (§3).

use std::sync::Arc;

use super::attempt::{Attempt, Claimant, Via};
use super::state::{KeyState, Taken};
use super::{Change, Context, Effects, Notice, Reply};
use crate::error::Error;
use crate::ids::{Handle, Owner, RequestId, WaiterId};
use crate::time::Now;
use crate::ttl::Ttl;

/// What a lock keeps out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Everyone: a lease, with an epoch.
    Exclusive,
    /// Exclusive ones: no epoch.
    Shared,
}

/// A shared lock.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Share {
    /// The handle that was locked.
    pub handle: Handle,
    /// The lock owner.
    pub owner: Owner,
    /// Who holds it.
    pub claimant: Claimant,
    /// The TTL that a lease would have been given.
    pub ttl: Ttl,
    /// Set once its connection is gone and while its holder is not proven dead (§5): `CLOCK_BOOTTIME`, in nanoseconds, at
    /// which it ends all the same. Its TTL counts from then: nobody had to renew it before.
    pub until_ns: Option<u64>,
}

impl Share {
    /// Whether its connection is gone.
    pub fn is_orphaned(&self) -> bool {
        self.until_ns.is_some()
    }

    /// Whether handle or owner is the one that shares: no lock is in the way of its own. The numbers of a connection that
    /// is gone say nothing.
    pub fn is_of(&self, handle: Handle, owner: Owner) -> bool {
        !self.is_orphaned() && (self.handle == handle || self.owner == owner)
    }

    /// Whether a claim is made by whoever holds this orphaned lock (§5), as [`KeyState::is_return`] knows it.
    pub fn is_left_by(&self, claimant: &Claimant) -> bool {
        self.is_orphaned() && self.claimant.shares_a_process_with(claimant)
    }

    /// Whether its TTL has run out.
    pub fn is_due(&self, now: Now) -> bool {
        self.until_ns.is_some_and(|at| at <= now.boot_ns)
    }
}

/// A lock request in line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Waiter {
    /// Its number.
    pub id: WaiterId,
    /// The handle to be locked.
    pub handle: Handle,
    /// The lock owner.
    pub owner: Owner,
    /// Exclusive or shared.
    pub mode: Mode,
    /// Who waits.
    pub claimant: Claimant,
    /// Since when.
    pub since: Now,
}

impl Waiter {
    /// Whether a shared lock is its own: that is not in its way.
    fn owns(&self, share: &Share) -> bool {
        share.is_of(self.handle, self.owner) || share.is_left_by(&self.claimant)
    }
}

impl KeyState {
    /// Whether handle or owner is the one that holds the key: locks and exclusive create are one lease (§3).
    pub fn is_holder(&self, handle: Handle, owner: Owner) -> bool {
        self.attempt
            .as_ref()
            .is_some_and(|attempt| attempt.held && (attempt.handle == handle || attempt.owners.contains(&owner)))
    }

    /// Whether a lock request would have to wait now.
    pub fn would_wait(&self, waiter: &Waiter) -> bool {
        if self.is_holder(waiter.handle, waiter.owner) || self.lost.contains(&waiter.handle) {
            return false;
        }
        let in_the_way = match waiter.mode {
            Mode::Exclusive => self.is_shared_by_others(waiter),
            Mode::Shared if self.sharers.iter().any(|share| waiter.owns(share)) => return false,
            Mode::Shared => false,
        };
        self.live().is_some() || in_the_way || !self.line.is_empty()
    }

    fn is_shared_by_others(&self, waiter: &Waiter) -> bool {
        self.sharers.iter().any(|share| !waiter.owns(share))
    }

    /// Whether it is shared by a lock whose connection is gone.
    pub fn has_orphaned_share(&self) -> bool {
        self.sharers.iter().any(Share::is_orphaned)
    }

    /// Ends shared locks; whether there were any.
    pub(super) fn drop_shares(&mut self, which: impl Fn(&Share) -> bool, fx: &mut Effects) -> bool {
        let before = self.sharers.len();
        self.sharers.retain(|share| {
            let goes = which(share);
            if goes {
                fx.notices.push(Notice::Unshared);
                fx.changes.push(Change::Unshared(share.handle, share.owner));
            }
            !goes
        });
        self.sharers.len() < before
    }

    /// One share for each owner on each handle, so that none ends with another's. Whoever comes back by a new handle has
    /// it in place of one of those that went with the connection: with another, something else may still be at work.
    fn add_share(&mut self, waiter: Waiter, context: Context<'_>, fx: &mut Effects) {
        if self.sharers.iter().any(|share| share.handle == waiter.handle && share.owner == waiter.owner) {
            return;
        }
        let left = self.sharers.iter().find(|share| share.is_left_by(&waiter.claimant)).map(|share| share.handle);
        if let Some(left) = left {
            self.drop_shares(|share| share.is_orphaned() && share.handle == left, fx);
        }
        let Waiter { handle, owner, claimant, .. } = waiter;
        let share = Share { handle, owner, claimant, ttl: context.ttl, until_ns: None };
        fx.changes.push(Change::Shared(Box::new(share.clone())));
        self.sharers.push(share);
        fx.notices.push(Notice::Shared);
    }

    /// Nobody has a handle open that went with its connection, so whoever shared the key by one does so no longer.
    pub(super) fn lose_shares(&mut self, context: Context<'_>, fx: &mut Effects) -> Result<Reply, Error> {
        if !self.drop_shares(Share::is_orphaned, fx) {
            return Err(Error::Stale);
        }
        self.advance(context, fx);
        Ok(Reply::Done)
    }

    pub(super) fn lock_exclusive(
        &mut self,
        waiter: Waiter,
        wait: bool,
        context: Context<'_>,
        fx: &mut Effects,
    ) -> Result<Reply, Error> {
        // Asked again, the answer is the same, whatever became of the lease since.
        let request = waiter.claimant.request;
        let of_this = |attempt: &&Attempt| request != RequestId(0) && attempt.claimant.request == request;
        if let Some(attempt) = self.attempt.as_deref().filter(of_this) {
            return Ok(Reply::Claimed(attempt.epoch));
        }
        if self.lost.contains(&waiter.handle) {
            return Err(Error::Stale);
        }
        if self.is_return(&waiter.claimant) {
            let Waiter { handle, owner, .. } = waiter;
            return self.take_back(handle, Some(owner), Via::Lock, context, fx);
        }
        if self.is_holder(waiter.handle, waiter.owner) {
            let renewed = self.relock(waiter.owner, context, fx);
            self.answer_own_waiters(context, fx);
            return renewed;
        }
        if !self.would_wait(&waiter) {
            return self.begin_locked(waiter, context, fx);
        }
        if !wait {
            return Err(Error::WouldBlock);
        }
        // As flock(2) converts: the shared lock is given back first, so that two upgrades cannot wait for each other.
        self.drop_shares(|share| waiter.owns(share), fx);
        Ok(self.enqueue(waiter, context, fx))
    }

    /// Begins an attempt for a lock that only shares of its own could be in the way of. Nobody else comes in between, so
    /// an upgrade loses nothing.
    fn begin_locked(&mut self, waiter: Waiter, context: Context<'_>, fx: &mut Effects) -> Result<Reply, Error> {
        self.may_begin(waiter.claimant.uid, context)?;
        self.drop_shares(|share| waiter.owns(share), fx);
        let Waiter { handle, owner, claimant, since, .. } = waiter;
        let taken = Taken { handle, owner: Some(owner), via: Via::Lock, claimant, asked: since };
        Ok(Reply::Claimed(self.begin(taken, context, fx)))
    }

    pub(super) fn lock_shared(
        &mut self,
        waiter: Waiter,
        wait: bool,
        context: Context<'_>,
        fx: &mut Effects,
    ) -> Result<Reply, Error> {
        if self.lost.contains(&waiter.handle) {
            return Err(Error::Stale);
        }
        if self.is_return(&waiter.claimant) {
            self.take_back(waiter.handle, Some(waiter.owner), Via::Lock, context, fx)?;
        }
        if self.is_holder(waiter.handle, waiter.owner) {
            // A downgrade: nothing exclusive may come in between, so the share is there before the line moves.
            self.release("unlocked".into(), context, fx);
            self.add_share(waiter, context, fx);
            self.advance(context, fx);
            return Ok(Reply::Shared);
        }
        if !self.would_wait(&waiter) {
            self.add_share(waiter, context, fx);
            return Ok(Reply::Shared);
        }
        if wait { Ok(self.enqueue(waiter, context, fx)) } else { Err(Error::WouldBlock) }
    }

    /// A lock of a handle or an owner that has the lease already: one more owner of it, and a renewal.
    fn relock(&mut self, owner: Owner, context: Context<'_>, fx: &mut Effects) -> Result<Reply, Error> {
        if let Some(attempt) = self.attempt.as_mut().map(Arc::make_mut)
            && !attempt.owners.contains(&owner)
        {
            attempt.owners.push(owner);
        }
        self.renew(None, context, fx)
    }

    fn enqueue(&mut self, waiter: Waiter, context: Context<'_>, fx: &mut Effects) -> Reply {
        self.line.push_back(waiter);
        fx.notices.push(Notice::Waiting);
        self.advance(context, fx);
        Reply::Queued
    }

    pub(super) fn cancel(&mut self, id: WaiterId, context: Context<'_>, fx: &mut Effects) -> Result<Reply, Error> {
        let index = self.line.iter().position(|waiter| waiter.id == id).ok_or(Error::NotFound)?;
        self.line.remove(index);
        fx.grants.push((id, Err(Error::Interrupted)));
        self.advance(context, fx);
        Ok(Reply::Done)
    }

    pub(super) fn unlock(
        &mut self,
        handle: Handle,
        owner: Owner,
        context: Context<'_>,
        fx: &mut Effects,
    ) -> Result<Reply, Error> {
        if self.lost.contains(&handle) {
            return Err(Error::Stale);
        }
        let holds = self.attempt.as_ref().is_some_and(|attempt| {
            let created_here = attempt.via == Via::Create && attempt.handle == handle;
            attempt.held && (created_here || attempt.owners.contains(&owner))
        });
        if holds {
            self.release("unlocked".into(), context, fx);
        }
        self.drop_shares(|share| !share.is_orphaned() && share.owner == owner, fx);
        self.advance(context, fx);
        Ok(Reply::Done)
    }

    /// Forgets whatever a closed handle shared or waited for.
    pub(super) fn drop_handle(&mut self, handle: Handle, fx: &mut Effects) {
        self.drop_shares(|share| share.handle == handle, fx);
        self.drop_waiters(handle, &Error::Interrupted, fx);
    }

    /// Ends the wait of whoever waits with this handle.
    pub(super) fn drop_waiters(&mut self, handle: Handle, error: &Error, fx: &mut Effects) {
        let gone = self.line.iter().filter(|waiter| waiter.handle == handle);
        fx.grants.extend(gone.map(|waiter| (waiter.id, Err(error.clone()))));
        self.line.retain(|waiter| waiter.handle != handle);
    }

    /// Grants from the head of the line as far as it can be granted: nobody waits for a key that is free. Who may not hold
    /// one more key by now is refused at its turn, and it is the next one's.
    pub(super) fn advance(&mut self, context: Context<'_>, fx: &mut Effects) {
        while let Some(front) = self.line.front() {
            let shared = front.mode == Mode::Exclusive && self.is_shared_by_others(front);
            let blocked = self.live().is_some() || shared;
            if blocked {
                break;
            }
            let Some(waiter) = self.line.pop_front() else { break };
            let id = waiter.id;
            let reply = match waiter.mode {
                Mode::Shared => {
                    self.add_share(waiter, context, fx);
                    Ok(Reply::Shared)
                }
                Mode::Exclusive => self.begin_locked(waiter, context, fx),
            };
            fx.grants.push((id, reply));
        }
        self.answer_own_waiters(context, fx);
    }

    /// Another thread may wait with the very handle that now holds the key, or as its owner: it would wait for itself.
    pub(super) fn answer_own_waiters(&mut self, context: Context<'_>, fx: &mut Effects) {
        let own = |state: &KeyState, waiter: &Waiter| {
            waiter.mode == Mode::Exclusive && state.is_holder(waiter.handle, waiter.owner)
        };
        while let Some(index) = self.line.iter().position(|waiter| own(self, waiter)) {
            if let Some(waiter) = self.line.remove(index) {
                let renewed = self.relock(waiter.owner, context, fx);
                fx.grants.push((waiter.id, renewed));
            }
        }
    }
}
