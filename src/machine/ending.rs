//! How an attempt ends, and the result that outlives it (§5, §6).
//!
//! Every ending goes through [`KeyState::end`], and every one that is not the holder's own compares the epoch first.

use std::sync::Arc;

use super::attempt::{Attempt, Outcome, Process, ResultMeta, Why};
use super::state::KeyState;
use super::{Change, Context, Effects, Notice, Reply};
use crate::error::Error;
use crate::ids::{Epoch, Handle};
use crate::time::Now;

impl KeyState {
    /// The holder gives the key back: closed, unlocked or unlinked. An open draft keeps the attempt alive (§6).
    pub(super) fn release(&mut self, why: Why, context: Context<'_>, fx: &mut Effects) {
        let Some(attempt) = self.attempt.as_mut().map(Arc::make_mut) else { return };
        attempt.held = false;
        attempt.orphaned = false;
        attempt.why = Some(why);
        self.end_unless_kept(Outcome::Released, context, fx);
    }

    fn end_unless_kept(&mut self, outcome: Outcome, context: Context<'_>, fx: &mut Effects) {
        if self.live().is_some() {
            fx.changes.extend(self.attempt.clone().map(Change::Renewed));
        } else {
            self.end(outcome, context, fx);
        }
    }

    /// Records the end of the newest attempt. A committed result outweighs any other outcome.
    fn end(&mut self, outcome: Outcome, context: Context<'_>, fx: &mut Effects) {
        let Some(attempt) = self.attempt.as_mut().map(Arc::make_mut) else { return };
        let outcome = if attempt.result.is_some() { Outcome::Completed } else { outcome };
        attempt.held = false;
        attempt.orphaned = false;
        attempt.outcome = Some(outcome);
        attempt.ended = Some(context.now);
        self.finished = outcome == Outcome::Completed;
        fx.notices.push(Notice::Ended(attempt.epoch, outcome));
        fx.changes.extend(self.attempt.clone().map(Change::Ended));
    }

    /// Ends the live attempt against its holder's will: its handle is told `ESTALE` from now on.
    fn cut_off(&mut self, outcome: Outcome, why: Why, context: Context<'_>, fx: &mut Effects) {
        self.disown(fx);
        let Some(attempt) = self.attempt.as_mut().map(Arc::make_mut) else { return };
        let handle = attempt.handle;
        attempt.registered = false;
        attempt.why = Some(why);
        self.end(outcome, context, fx);
        self.forsake(handle, context, fx);
    }

    /// The handle that holds the newest attempt has lost it.
    fn disown(&mut self, fx: &mut Effects) {
        let Some(attempt) = &self.attempt else { return };
        // An orphan's handle went with its connection.
        if attempt.held && !attempt.orphaned {
            self.lost.insert(attempt.handle);
            fx.lost.push((attempt.handle, attempt.epoch));
        }
    }

    /// A handle that lost its lease does not get another, also not by a request that is in line already.
    fn forsake(&mut self, handle: Handle, context: Context<'_>, fx: &mut Effects) {
        if self.lost.contains(&handle) {
            self.drop_waiters(handle, &Error::Stale, fx);
        }
        self.advance(context, fx);
    }

    pub(super) fn expire_if_due(&mut self, context: Context<'_>, fx: &mut Effects) {
        let unshared = self.drop_shares(|share| share.is_due(context.now), fx);
        if self.live().is_some_and(|attempt| attempt.is_due(context.now)) {
            self.cut_off(Outcome::Expired, "ttl ran out".into(), context, fx);
        } else if unshared {
            self.advance(context, fx);
        }
    }

    /// Ends attempt `epoch` if it is the one alive: a compare-and-set on the epoch (I-CAS-GUARDED).
    pub(super) fn evict(
        &mut self,
        epoch: Epoch,
        why: Why,
        context: Context<'_>,
        fx: &mut Effects,
    ) -> Result<Reply, Error> {
        if self.live().is_none_or(|attempt| attempt.epoch != epoch) {
            return Err(Error::Stale);
        }
        self.cut_off(Outcome::Evicted, why, context, fx);
        Ok(Reply::Done)
    }

    /// Gives attempt `epoch` back for its own user, if it is the one that is held: to all others it is as if its handle was
    /// unlocked, an open draft keeps it alive.
    pub(super) fn give_back(
        &mut self,
        epoch: Epoch,
        uid: u32,
        why: Why,
        context: Context<'_>,
        fx: &mut Effects,
    ) -> Result<Reply, Error> {
        let handle = self.held_as(epoch, uid)?.handle;
        self.disown(fx);
        self.release(why, context, fx);
        self.forsake(handle, context, fx);
        Ok(Reply::Done)
    }

    /// The holder of the orphaned attempt `epoch` is dead. As after its exit, the attempt stays registered: what it did may
    /// still be recorded, and an open draft keeps it (§6). The proof is about the handle that went with its connection: an
    /// attempt that its holder took back in the meantime is not touched.
    pub(super) fn lose(
        &mut self,
        epoch: Epoch,
        why: Why,
        context: Context<'_>,
        fx: &mut Effects,
    ) -> Result<Reply, Error> {
        let orphan = |attempt: &&mut Attempt| attempt.epoch == epoch && attempt.held && attempt.orphaned;
        let Some(attempt) = self.attempt.as_mut().map(Arc::make_mut).filter(orphan) else { return Err(Error::Stale) };
        attempt.held = false;
        attempt.orphaned = false;
        attempt.why = Some(why);
        self.end_unless_kept(Outcome::Lost, context, fx);
        self.advance(context, fx);
        Ok(Reply::Done)
    }

    pub(super) fn close(
        &mut self,
        handle: Handle,
        why: Why,
        context: Context<'_>,
        fx: &mut Effects,
    ) -> Result<Reply, Error> {
        self.lost.remove(&handle);
        self.drop_handle(handle, fx);
        if self.held_by(handle).is_some() {
            self.release(why, context, fx);
        }
        self.advance(context, fx);
        Ok(Reply::Done)
    }

    pub(super) fn unlink(
        &mut self,
        process: Process,
        may_forget: bool,
        uid: u32,
        context: Context<'_>,
        fx: &mut Effects,
    ) -> Result<Reply, Error> {
        if let Some(attempt) = self.live() {
            if !(attempt.held && attempt.claimant.includes(process)) {
                return Err(Error::Busy);
            }
            self.release("unlinked".into(), context, fx);
            self.advance(context, fx);
            return Ok(Reply::Done);
        }
        if !self.finished {
            return Err(Error::NotFound);
        }
        if !may_forget && self.attempt.as_ref().is_none_or(|attempt| attempt.claimant.uid != uid) {
            return Err(Error::Denied);
        }
        self.finished = false;
        fx.changes.push(Change::Finished(false));
        fx.notices.push(Notice::Forgotten(self.epoch));
        Ok(Reply::Done)
    }

    pub(super) fn open_draft(
        &mut self,
        handle: Handle,
        epoch: Epoch,
        uid: u32,
        context: Context<'_>,
        fx: &mut Effects,
    ) -> Result<Reply, Error> {
        if epoch == Epoch(0) || epoch > self.epoch {
            return Err(Error::NotFound);
        }
        let was_live = self.live().is_some();
        let Some(attempt) = self.attempt.as_mut().map(Arc::make_mut).filter(|attempt| attempt.epoch == epoch) else {
            return Err(Error::Stale);
        };
        if attempt.result.is_some() {
            return Err(Error::NotPermitted);
        }
        if !attempt.is_registered(context.now) {
            return Err(Error::Stale);
        }
        if uid != 0 && uid != attempt.claimant.uid {
            return Err(Error::Denied);
        }
        self.drafts.insert(handle, epoch);
        if !was_live {
            attempt.outcome = None;
            attempt.ended = None;
            fx.changes.extend(self.attempt.clone().map(Change::Revived));
        }
        Ok(Reply::Done)
    }

    /// Whether a draft may still become the result: asked before every write and at the commit (§6).
    ///
    /// # Errors
    /// [`Error::Stale`] once the attempt is superseded, expired or evicted; [`Error::NotPermitted`] once it has a result.
    pub fn check_draft(&self, handle: Handle, now: Now) -> Result<Epoch, Error> {
        let epoch = self.drafts.get(&handle).copied().ok_or(Error::Stale)?;
        let attempt = self.attempt.as_ref().filter(|attempt| attempt.epoch == epoch).ok_or(Error::Stale)?;
        if attempt.result.is_some() {
            return Err(Error::NotPermitted);
        }
        if attempt.is_registered(now) { Ok(epoch) } else { Err(Error::Stale) }
    }

    /// Whether this draft became the result of the newest attempt.
    pub fn is_result(&self, draft: Handle) -> bool {
        self.attempt.as_ref().and_then(|attempt| attempt.result).is_some_and(|result| result.draft == draft)
    }

    pub(super) fn commit(
        &mut self,
        handle: Handle,
        size: u64,
        context: Context<'_>,
        fx: &mut Effects,
    ) -> Result<Reply, Error> {
        // Once more by the draft that became the result: what was asked for is so.
        if self.is_result(handle) {
            return Ok(Reply::Done);
        }
        let epoch = self.check_draft(handle, context.now)?;
        let attempt = self.attempt.as_mut().map(Arc::make_mut).ok_or(Error::Stale)?;
        let result = ResultMeta { size, committed_ms: context.now.wall_ms, draft: handle };
        attempt.result = Some(result);
        attempt.outcome = Some(Outcome::Completed);
        fx.notices.push(Notice::Completed(attempt.epoch));
        fx.changes.extend(self.attempt.clone().map(|attempt| Change::Committed(attempt, handle)));
        self.latest_result = Some((epoch, result));
        Ok(Reply::Done)
    }

    pub(super) fn close_draft(
        &mut self,
        handle: Handle,
        context: Context<'_>,
        fx: &mut Effects,
    ) -> Result<Reply, Error> {
        let was_live = self.live().is_some();
        self.drafts.remove(&handle);
        if was_live && self.live().is_none() {
            self.end(Outcome::Released, context, fx);
        }
        self.advance(context, fx);
        Ok(Reply::Done)
    }
}
