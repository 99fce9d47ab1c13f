//! What is known of a key between two inputs, and how a new attempt begins and is renewed.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use super::attempt::{Attempt, Claimant, Outcome, ResultMeta, Via};
use super::line::{Share, Waiter};
use super::{Change, Context, Effects, Notice, Reply};
use crate::error::Error;
use crate::ids::{Epoch, Handle, Owner, RequestId};
use crate::time::Now;
use crate::ttl::Ttl;

/// A key's state as `status/KEY` names it (§2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// Nobody has it.
    Free,
    /// A handle holds it.
    Held,
    /// Shared locks are on it.
    Shared,
    /// Only a draft keeps its attempt alive.
    Reporting,
    /// Held, but its connection is gone.
    Orphaned,
    /// Its newest attempt committed a result.
    Finished,
}

impl std::fmt::Display for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            State::Free => "free",
            State::Held => "held",
            State::Shared => "shared",
            State::Reporting => "reporting",
            State::Orphaned => "orphaned",
            State::Finished => "finished",
        })
    }
}

/// What an attempt begins with.
pub(super) struct Taken {
    pub handle: Handle,
    pub owner: Option<Owner>,
    pub via: Via,
    pub claimant: Claimant,
    /// When it was asked for.
    pub asked: Now,
}

/// All there is to know of a key.
#[derive(Clone, Debug, Default)]
pub struct KeyState {
    /// The newest epoch; 0 before the first.
    pub epoch: Epoch,
    /// The newest attempt, live or ended. `None` before the first, and where its row was pruned. Shared with whoever
    /// records it: what was recorded stays as it was.
    pub attempt: Option<Arc<Attempt>>,
    /// The outcome of the newest attempt before `attempt` that ended.
    pub previous_outcome: Option<Outcome>,
    /// The newest attempt is completed, its handles are closed, and nobody unlinked the key since.
    pub finished: bool,
    /// Shared locks.
    pub sharers: Vec<Share>,
    /// Requests that wait, in order of arrival.
    pub line: VecDeque<Waiter>,
    /// Handles still open that lost their lease; `ESTALE` is all they get.
    pub lost: BTreeSet<Handle>,
    /// Open write handles on results, with the attempt each is for.
    pub drafts: BTreeMap<Handle, Epoch>,
    /// The newest committed result and its attempt.
    pub latest_result: Option<(Epoch, ResultMeta)>,
    /// Counts changes of state, epoch, newest result or TTL, for `POLLPRI`.
    pub changes: u64,
    /// When the state last changed.
    pub changed_at: Now,
    /// The last request that ended a lease, or made a finished key be forgotten, against a file name and not a handle:
    /// asked again, it is answered again.
    pub last_request: RequestId,
}

impl KeyState {
    /// The attempt that keeps everybody else out, if there is one: its handle or a draft is open.
    pub fn live(&self) -> Option<&Attempt> {
        self.attempt.as_deref().filter(|attempt| attempt.held || self.has_live_draft(attempt))
    }

    /// The newest attempt while it may still commit (§1: the registered attempt).
    pub fn registered(&self, now: Now) -> Option<&Attempt> {
        self.attempt.as_deref().filter(|attempt| attempt.is_registered(now))
    }

    /// The attempt held by this handle.
    pub fn held_by(&self, handle: Handle) -> Option<&Attempt> {
        self.attempt.as_deref().filter(|attempt| attempt.held && attempt.handle == handle)
    }

    /// The state by name. An attempt whose deadline has passed counts as ended even before its expiry was applied.
    pub fn state(&self, now: Now) -> State {
        let shared = self.sharers.iter().any(|share| !share.is_due(now));
        self.name(self.live().filter(|attempt| !attempt.is_due(now)), shared)
    }

    /// The state by name as it was last applied, whatever the time is now.
    pub(super) fn applied_state(&self) -> State {
        self.name(self.live(), !self.sharers.is_empty())
    }

    fn name(&self, live: Option<&Attempt>, shared: bool) -> State {
        match live {
            Some(attempt) if attempt.orphaned => State::Orphaned,
            Some(attempt) if attempt.held => State::Held,
            Some(_) => State::Reporting,
            None if shared => State::Shared,
            None if self.finished => State::Finished,
            None => State::Free,
        }
    }

    /// Whether `claims/KEY` exists (§2): held exclusively, kept by a draft, or finished.
    pub fn has_file(&self) -> bool {
        self.finished || self.live().is_some()
    }

    /// The outcome of the newest attempt that ended.
    pub fn last_outcome(&self) -> Option<Outcome> {
        self.attempt.as_ref().and_then(|attempt| attempt.outcome).or(self.previous_outcome)
    }

    /// The deadline at which the line has to move or a holder to lose, `CLOCK_BOOTTIME` in nanoseconds. A shared lock has
    /// one once its connection is gone.
    pub fn deadline_ns(&self) -> Option<u64> {
        let orphaned = self.sharers.iter().filter_map(|share| share.until_ns);
        orphaned.chain(self.live().map(|attempt| attempt.deadline_ns)).min()
    }

    pub(super) fn has_live_draft(&self, attempt: &Attempt) -> bool {
        attempt.registered && self.drafts.values().any(|epoch| *epoch == attempt.epoch)
    }

    pub(super) fn create(
        &mut self,
        handle: Handle,
        claimant: Claimant,
        context: Context<'_>,
        fx: &mut Effects,
    ) -> Result<Reply, Error> {
        // Asked again, the answer is the same: this handle was given the lease, whatever became of it since.
        if let Some(attempt) = self.attempt.as_ref().filter(|attempt| attempt.handle == handle) {
            return Ok(Reply::Claimed(attempt.epoch));
        }
        if self.lost.contains(&handle) {
            return Ok(Reply::Done);
        }
        if self.is_return(&claimant) {
            return self.take_back(handle, None, Via::Create, context, fx);
        }
        let promised = !self.line.is_empty();
        let shared = self.sharers.iter().any(|share| !share.is_left_by(&claimant));
        if self.live().is_some() || shared || self.finished || promised {
            return Err(Error::Taken);
        }
        self.may_begin(claimant.uid, context)?;
        self.drop_shares(|share| share.is_left_by(&claimant), fx);
        let taken = Taken { handle, owner: None, via: Via::Create, claimant, asked: context.now };
        Ok(Reply::Claimed(self.begin(taken, context, fx)))
    }

    /// Whether the next attempt may begin, for this user; to be asked before anything is changed for it.
    pub(super) fn may_begin(&self, uid: u32, context: Context<'_>) -> Result<(), Error> {
        if self.epoch >= Epoch::MAX {
            return Err(Error::Limit("this key has used all its epochs"));
        }
        context.room.check(uid)
    }

    /// Begins the next attempt. The caller has made sure that it may, and that nobody holds, shares or keeps the key.
    pub(super) fn begin(&mut self, taken: Taken, context: Context<'_>, fx: &mut Effects) -> Epoch {
        debug_assert!(self.live().is_none() && self.sharers.is_empty());
        self.previous_outcome = self.last_outcome();
        self.epoch = self.epoch.next();
        self.finished = false;
        let Taken { handle, owner, via, claimant, asked } = taken;
        let mut attempt = Attempt {
            epoch: self.epoch,
            via,
            claimant,
            handle,
            owners: owner.into_iter().collect(),
            ttl: context.ttl,
            since: context.now,
            renewed: context.now,
            deadline_ns: 0,
            waited_ms: context.now.boot_ns.saturating_sub(asked.boot_ns) / 1_000_000,
            note: Arc::from(""),
            agent: None,
            held: true,
            registered: true,
            orphaned: false,
            why: None,
            outcome: None,
            ended: None,
            result: None,
        };
        attempt.extend(context.now);
        let attempt = Arc::new(attempt);
        fx.changes.push(Change::Claimed(Arc::clone(&attempt)));
        fx.notices.push(Notice::Granted(self.epoch));
        self.attempt = Some(attempt);
        self.epoch
    }

    /// Whether it is held by an attempt whose connection is gone.
    pub fn is_orphaned(&self) -> bool {
        self.attempt.as_ref().is_some_and(|attempt| attempt.held && attempt.orphaned)
    }

    /// Whether a claim is made by the holder of an orphaned attempt (§5): a process that opened or locked the handle that
    /// went with the connection opened or locks this one.
    pub fn is_return(&self, claimant: &Claimant) -> bool {
        let attempt = self.attempt.as_ref().filter(|_| self.is_orphaned());
        attempt.is_some_and(|attempt| attempt.claimant.shares_a_process_with(claimant))
    }

    /// The holder of an orphaned attempt has it back, by another handle: a renewal, so it waits for nobody. Whose attempt
    /// it is stays as it was; what held it before belonged to a connection that is gone.
    pub(super) fn take_back(
        &mut self,
        handle: Handle,
        owner: Option<Owner>,
        via: Via,
        context: Context<'_>,
        fx: &mut Effects,
    ) -> Result<Reply, Error> {
        if let Some(attempt) = self.attempt.as_mut().map(Arc::make_mut) {
            attempt.handle = handle;
            attempt.owners = owner.into_iter().collect();
            attempt.via = via;
            attempt.orphaned = false;
        }
        let renewed = self.renew(None, context, fx);
        self.answer_own_waiters(context, fx);
        renewed
    }

    pub(super) fn renew_handle(
        &mut self,
        handle: Handle,
        note: Option<Arc<str>>,
        context: Context<'_>,
        fx: &mut Effects,
    ) -> Result<Reply, Error> {
        if self.lost.contains(&handle) {
            return Err(Error::Stale);
        }
        if self.held_by(handle).is_none() {
            return Err(Error::Denied);
        }
        self.renew(note, context, fx)
    }

    /// Renews the attempt that is held; the caller has made sure whose it is.
    pub(super) fn renew(
        &mut self,
        note: Option<Arc<str>>,
        context: Context<'_>,
        fx: &mut Effects,
    ) -> Result<Reply, Error> {
        let attempt = self.attempt.as_mut().map(Arc::make_mut).ok_or(Error::Stale)?;
        attempt.renewed = context.now;
        attempt.extend(context.now);
        if let Some(note) = note {
            attempt.note = note;
        }
        let epoch = attempt.epoch;
        fx.notices.push(Notice::Renewed(epoch));
        fx.changes.extend(self.attempt.clone().map(Change::Renewed));
        Ok(Reply::Renewed(epoch))
    }

    /// Renews attempt `epoch` if it is the one that is held; its own user may, whichever handle holds it.
    pub(super) fn renew_attempt(
        &mut self,
        epoch: Epoch,
        uid: u32,
        context: Context<'_>,
        fx: &mut Effects,
    ) -> Result<Reply, Error> {
        self.held_as(epoch, uid)?;
        self.renew(None, context, fx)
    }

    /// Attempt `epoch`, while its handle holds it, for its own user and root.
    pub(super) fn held_as(&self, epoch: Epoch, uid: u32) -> Result<&Attempt, Error> {
        let held = self.attempt.as_deref().filter(|attempt| attempt.held && attempt.epoch == epoch);
        let attempt = held.ok_or(Error::Stale)?;
        if uid == 0 || uid == attempt.claimant.uid { Ok(attempt) } else { Err(Error::Denied) }
    }

    pub(super) fn set_ttl(
        &mut self,
        uid: u32,
        ttl: Ttl,
        context: Context<'_>,
        fx: &mut Effects,
    ) -> Result<Reply, Error> {
        let attempt = self.own(uid)?;
        let before = std::mem::replace(&mut attempt.ttl, ttl);
        attempt.extend(context.now);
        // Whoever renews the lease has to do so sooner now: it is told.
        self.changes += u64::from(before != ttl);
        fx.changes.extend(self.attempt.clone().map(Change::Renewed));
        Ok(Reply::Done)
    }

    pub(super) fn set_agent(&mut self, uid: u32, agent: Option<Arc<str>>, fx: &mut Effects) -> Result<Reply, Error> {
        self.own(uid)?.agent = agent;
        fx.changes.extend(self.attempt.clone().map(Change::Renewed));
        Ok(Reply::Done)
    }

    /// The live attempt, for whoever may set its attributes: its own user and root (§5).
    fn own(&mut self, uid: u32) -> Result<&mut Attempt, Error> {
        if self.live().is_none() {
            return Err(Error::Stale);
        }
        let attempt = self.attempt.as_mut().map(Arc::make_mut).ok_or(Error::Stale)?;
        if uid != 0 && uid != attempt.claimant.uid {
            return Err(Error::NotPermitted);
        }
        Ok(attempt)
    }
}
