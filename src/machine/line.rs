//! Locks and the line of those who wait: first come, first served (§3).

use super::attempt::{Claimant, Via};
use super::state::KeyState;
use super::{Context, Effects, Notice, Reply};
use crate::error::Error;
use crate::ids::{Handle, Owner, WaiterId};

/// What a lock keeps out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Everyone: a lease, with an epoch.
    Exclusive,
    /// Exclusive ones: no epoch.
    Shared,
}

/// A shared lock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Share {
    /// The handle that was locked.
    pub handle: Handle,
    /// The lock owner.
    pub owner: Owner,
    /// Who holds it.
    pub claimant: Claimant,
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
}

impl KeyState {
    /// Whether handle or owner is the one that holds the key: locks and exclusive create are one lease (§3).
    pub fn is_holder(&self, handle: Handle, owner: Owner) -> bool {
        self.attempt
            .as_ref()
            .is_some_and(|attempt| attempt.held && (attempt.handle == handle || attempt.owners.contains(&owner)))
    }

    /// Whether a lock request would have to wait now.
    pub fn would_wait(&self, handle: Handle, owner: Owner, mode: Mode) -> bool {
        if self.is_holder(handle, owner) || self.lost.contains(&handle) {
            return false;
        }
        let share = self.own_share(handle, owner);
        let in_the_way = match mode {
            Mode::Exclusive => self.sharers.len() > usize::from(share.is_some()),
            Mode::Shared if share.is_some() => return false,
            Mode::Shared => false,
        };
        self.live().is_some() || in_the_way || !self.line.is_empty()
    }

    fn own_share(&self, handle: Handle, owner: Owner) -> Option<usize> {
        self.sharers.iter().position(|share| share.handle == handle || share.owner == owner)
    }

    fn drop_share(&mut self, index: usize, fx: &mut Effects) {
        self.sharers.remove(index);
        fx.notices.push(Notice::Unshared);
    }

    fn add_share(&mut self, waiter: Waiter, fx: &mut Effects) {
        self.sharers.push(Share { handle: waiter.handle, owner: waiter.owner, claimant: waiter.claimant });
        fx.notices.push(Notice::Shared);
    }

    pub(super) fn lock_exclusive(
        &mut self,
        waiter: Waiter,
        wait: bool,
        context: Context,
        fx: &mut Effects,
    ) -> Result<Reply, Error> {
        if self.lost.contains(&waiter.handle) {
            return Err(Error::Stale);
        }
        if self.is_holder(waiter.handle, waiter.owner) {
            return self.relock(waiter.owner, context, fx);
        }
        let share = self.own_share(waiter.handle, waiter.owner);
        if !self.would_wait(waiter.handle, waiter.owner, Mode::Exclusive) {
            // Nobody else is in the way, so an upgrade loses nothing in between.
            if let Some(index) = share {
                self.drop_share(index, fx);
            }
            let Waiter { handle, owner, claimant, .. } = waiter;
            return self.begin(handle, Some(owner), Via::Lock, claimant, context, fx).map(Reply::Claimed);
        }
        if !wait {
            return Err(Error::WouldBlock);
        }
        // As flock(2) converts: the shared lock is given back first, so that two upgrades cannot wait for each other.
        if let Some(index) = share {
            self.drop_share(index, fx);
        }
        Ok(self.enqueue(waiter, context, fx))
    }

    pub(super) fn lock_shared(
        &mut self,
        waiter: Waiter,
        wait: bool,
        context: Context,
        fx: &mut Effects,
    ) -> Result<Reply, Error> {
        if self.lost.contains(&waiter.handle) {
            return Err(Error::Stale);
        }
        if self.is_holder(waiter.handle, waiter.owner) {
            // A downgrade: nothing exclusive may come in between, so the share is there before the line moves.
            self.release("unlocked".into(), context, fx);
            self.add_share(waiter, fx);
            self.advance(context, fx);
            return Ok(Reply::Shared);
        }
        if self.own_share(waiter.handle, waiter.owner).is_some() {
            return Ok(Reply::Shared);
        }
        if !self.would_wait(waiter.handle, waiter.owner, Mode::Shared) {
            self.add_share(waiter, fx);
            return Ok(Reply::Shared);
        }
        if wait { Ok(self.enqueue(waiter, context, fx)) } else { Err(Error::WouldBlock) }
    }

    fn relock(&mut self, owner: Owner, context: Context, fx: &mut Effects) -> Result<Reply, Error> {
        if let Some(attempt) = &mut self.attempt
            && !attempt.owners.contains(&owner)
        {
            attempt.owners.push(owner);
        }
        self.renew(None, context, fx)
    }

    fn enqueue(&mut self, waiter: Waiter, context: Context, fx: &mut Effects) -> Reply {
        self.line.push_back(waiter);
        fx.notices.push(Notice::Waiting);
        self.advance(context, fx);
        Reply::Queued
    }

    pub(super) fn cancel(&mut self, id: WaiterId, context: Context, fx: &mut Effects) -> Result<Reply, Error> {
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
        context: Context,
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
        if let Some(index) = self.sharers.iter().position(|share| share.owner == owner) {
            self.drop_share(index, fx);
        }
        self.advance(context, fx);
        Ok(Reply::Done)
    }

    /// Forgets whatever a closed handle shared or waited for.
    pub(super) fn drop_handle(&mut self, handle: Handle, fx: &mut Effects) {
        while let Some(index) = self.sharers.iter().position(|share| share.handle == handle) {
            self.drop_share(index, fx);
        }
        for waiter in self.line.iter().filter(|waiter| waiter.handle == handle) {
            fx.grants.push((waiter.id, Err(Error::Interrupted)));
        }
        self.line.retain(|waiter| waiter.handle != handle);
    }

    /// Grants from the head of the line as far as it can be granted: nobody waits for a key that is free.
    pub(super) fn advance(&mut self, context: Context, fx: &mut Effects) {
        while let Some(front) = self.line.front() {
            let blocked = self.live().is_some() || front.mode == Mode::Exclusive && !self.sharers.is_empty();
            if blocked {
                break;
            }
            let Some(waiter) = self.line.pop_front() else { break };
            let id = waiter.id;
            let reply = match waiter.mode {
                Mode::Shared => {
                    self.add_share(waiter, fx);
                    Ok(Reply::Shared)
                }
                Mode::Exclusive => {
                    let Waiter { handle, owner, claimant, .. } = waiter;
                    self.begin(handle, Some(owner), Via::Lock, claimant, context, fx).map(Reply::Claimed)
                }
            };
            fx.grants.push((id, reply));
        }
        self.answer_own_waiters(fx);
    }

    /// Another thread may wait with the very handle that now holds the key: it would wait for itself.
    fn answer_own_waiters(&mut self, fx: &mut Effects) {
        let Some(epoch) = self.attempt.as_ref().filter(|attempt| attempt.held).map(|attempt| attempt.epoch) else {
            return;
        };
        let own = |state: &KeyState, waiter: &Waiter| {
            waiter.mode == Mode::Exclusive && state.is_holder(waiter.handle, waiter.owner)
        };
        while let Some(index) = self.line.iter().position(|waiter| own(self, waiter)) {
            if let Some(waiter) = self.line.remove(index) {
                fx.grants.push((waiter.id, Ok(Reply::Renewed(epoch))));
            }
        }
    }
}
