//! The rules of one key, as a pure state machine: a state, an input and the time give a new state and its effects.
//!
//! No clock, no I/O, no lock: the same code serves the mount, the model tests and whoever wants to reason about it.
//! Invariants, each from contract §7, that hold between any two inputs:
//!
//! - at most one handle holds the key, and then nobody shares it (I-MUTEX);
//! - an epoch is given to one claim and never again; a renewal keeps it (I-EPOCH-UNIQ, I-RECLAIM-EPOCH, I-RENEWAL-STABLE);
//! - a result is committed only for the newest attempt, inside its TTL, once (I-NO-GHOST-COMPLETE, I-ONE-RESULT);
//! - nobody waits for a key that could be granted.
//!
//! It must not know how a state is stored, who is told of an effect, or what a process is beyond its number.

mod attempt;
mod ending;
mod line;
mod pruned;
mod room;
mod state;

pub use attempt::{Attempt, Claimant, Outcome, Process, ResultMeta, Via, Why};
pub use line::{Mode, Share, Waiter};
pub use room::Room;
pub use state::{KeyState, State};

use std::sync::Arc;

use crate::error::Error;
use crate::ids::{Epoch, Handle, Owner, RequestId, WaiterId};
use crate::time::Now;
use crate::ttl::Ttl;

/// What an input is judged by besides the state: the time, the TTL a new lease gets here, and who may hold one more key.
#[derive(Clone, Copy, Debug)]
pub struct Context<'a> {
    /// The time of the input.
    pub now: Now,
    /// The namespace's TTL for new leases.
    pub ttl: Ttl,
    /// Which users may be granted the key.
    pub room: Room<'a>,
}

/// Something that happens to a key.
#[derive(Clone, Debug)]
pub enum Input {
    /// Only time has passed: an expiry that is due takes place.
    Tick,
    /// Exclusive create (§3.1).
    Create {
        /// The handle that will hold the lease.
        handle: Handle,
        /// Who asks.
        claimant: Claimant,
    },
    /// A whole-file lock (§3.2).
    Lock {
        /// The handle that is locked.
        handle: Handle,
        /// The lock owner.
        owner: Owner,
        /// Exclusive or shared.
        mode: Mode,
        /// The place in line to take when it cannot be granted at once; `None` is "do not wait".
        wait: Option<WaiterId>,
        /// Who asks.
        claimant: Claimant,
    },
    /// `LOCK_UN` (§5).
    Unlock {
        /// The handle.
        handle: Handle,
        /// The lock owner.
        owner: Owner,
    },
    /// A waiter is gone or was interrupted.
    Cancel(WaiterId),
    /// The last copy of a claim handle was closed (§5).
    Close {
        /// The handle.
        handle: Handle,
        /// How, as far as it is known.
        why: Why,
    },
    /// `unlink` of the key's file (§4).
    Unlink {
        /// The calling process.
        process: Process,
        /// The caller may forget that the key is finished: root or the namespace's owner.
        may_forget: bool,
        /// The caller's uid.
        uid: u32,
        /// Recognises it when it comes again.
        request: RequestId,
    },
    /// `write`, `futimens` or relock on the holder handle (§4).
    Renew {
        /// The handle.
        handle: Handle,
        /// The new note, when it is a write.
        note: Option<Arc<str>>,
    },
    /// `user.lease.ttl` on the key's file (§5).
    SetTtl {
        /// The caller's uid.
        uid: u32,
        /// The new TTL, counted from now.
        ttl: Ttl,
    },
    /// `user.lease.agent` on the key's file: who the holder works for. No renewal.
    SetAgent {
        /// The caller's uid.
        uid: u32,
        /// The name; none takes it away.
        agent: Option<Arc<str>>,
    },
    /// An order to give the key back, by the attempt's own user and not by its handle: for those who keep no file open.
    /// The handle that held it is told `ESTALE` from now on, so that whoever has it open learns of it.
    GiveBack {
        /// The attempt meant: compared, never assumed.
        epoch: Epoch,
        /// The caller's uid.
        uid: u32,
        /// By whom and why.
        why: Why,
        /// Recognises it when it comes again.
        request: RequestId,
    },
    /// An order to renew, by the attempt's own user and not by its handle. It may come again: then it renews again.
    RenewAttempt {
        /// The attempt meant: compared, never assumed.
        epoch: Epoch,
        /// The caller's uid.
        uid: u32,
    },
    /// `leasefs evict` (§5); who may was judged before.
    Evict {
        /// The attempt meant: compared, never assumed.
        epoch: Epoch,
        /// By whom and why.
        why: Why,
        /// Recognises it when it comes again.
        request: RequestId,
    },
    /// The connection was lost and the holder is proven dead, or the machine was rebooted (§5). For an orphaned attempt.
    Lose {
        /// The attempt meant.
        epoch: Epoch,
        /// The proof.
        why: Why,
    },
    /// As [`Input::Lose`], for the shared locks whose connection was lost: no process has an old handle open.
    LoseShares,
    /// A result file is opened for writing (§6).
    OpenDraft {
        /// The write handle.
        handle: Handle,
        /// The attempt named by the path.
        epoch: Epoch,
        /// The caller's uid.
        uid: u32,
    },
    /// A draft becomes the result (§6).
    Commit {
        /// The write handle.
        handle: Handle,
        /// Its size in bytes.
        size: u64,
    },
    /// The last copy of a write handle was closed.
    CloseDraft {
        /// The write handle.
        handle: Handle,
    },
}

impl Input {
    /// Whether it has happened whatever the registry says: it cannot be refused, only recorded.
    pub fn is_fact(&self) -> bool {
        matches!(
            self,
            Input::Tick
                | Input::Unlock { .. }
                | Input::Cancel(_)
                | Input::Close { .. }
                | Input::CloseDraft { .. }
                | Input::Lose { .. }
                | Input::LoseShares
        )
    }
}

/// What the caller is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reply {
    /// Done, nothing more to say.
    Done,
    /// The handle now holds this new attempt.
    Claimed(Epoch),
    /// The handle held this attempt already; its deadline has moved.
    Renewed(Epoch),
    /// The handle shares the key.
    Shared,
    /// In line; the answer comes as a grant.
    Queued,
}

/// What has to be recorded. In the order given; each names the attempt it is about.
#[derive(Clone, Debug)]
pub enum Change {
    /// A new attempt; must be durable before its claimer is told.
    Claimed(Arc<Attempt>),
    /// TTL, deadline, note or agent of a live attempt, or the handle that holds it.
    Renewed(Arc<Attempt>),
    /// An attempt ended.
    Ended(Arc<Attempt>),
    /// A draft was opened for an attempt whose handle is gone: it lives on.
    Revived(Arc<Attempt>),
    /// A result was committed from this draft; must be durable before its writer is told.
    Committed(Arc<Attempt>, Handle),
    /// Whether the key counts as finished.
    Finished(bool),
    /// A shared lock; must be recorded before its owner is told, so that it keeps others out whatever becomes of the
    /// connection.
    Shared(Box<Share>),
    /// A shared lock was given back.
    Unshared(Handle, Owner),
    /// The last request that must be recognised should it come again.
    Answered(RequestId),
}

impl Change {
    /// Whether it can be taken back while nobody was told. The end of an attempt or a lock cannot: it has happened.
    pub fn is_refusable(&self) -> bool {
        !matches!(self, Change::Ended(_) | Change::Unshared(..) | Change::Answered(_))
    }

    /// Whether it must survive a power cut before anyone is told (§3, §6).
    pub fn is_durable(&self) -> bool {
        matches!(self, Change::Claimed(_) | Change::Committed(..))
    }
}

/// What others should hear of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notice {
    /// An attempt began.
    Granted(Epoch),
    /// A lease's deadline moved.
    Renewed(Epoch),
    /// An attempt ended, with this outcome.
    Ended(Epoch, Outcome),
    /// A result was committed.
    Completed(Epoch),
    /// A request waits in line.
    Waiting,
    /// A shared lock was granted.
    Shared,
    /// A shared lock was given back.
    Unshared,
    /// A finished key was unlinked.
    Forgotten(Epoch),
}

/// The answer to a waiter.
pub type Grant = (WaiterId, Result<Reply, Error>);

/// What an input did.
#[derive(Debug)]
pub struct Step {
    /// The answer to the caller.
    pub reply: Result<Reply, Error>,
    /// What has to be recorded, in order.
    pub changes: Vec<Change>,
    /// Waiters whose wait is over, in order.
    pub grants: Vec<Grant>,
    /// What others should hear of.
    pub notices: Vec<Notice>,
    /// Open handles that lost the lease of an epoch: the registry does not keep that.
    pub lost: Vec<(Handle, Epoch)>,
}

/// Effects gathered while an input is applied.
#[derive(Default)]
struct Effects {
    changes: Vec<Change>,
    grants: Vec<Grant>,
    notices: Vec<Notice>,
    lost: Vec<(Handle, Epoch)>,
}

impl KeyState {
    /// Applies an input. A refused input changes nothing but what time alone changes.
    pub fn apply(&mut self, input: Input, context: Context<'_>) -> Step {
        let mut fx = Effects::default();
        let before = self.told();
        self.expire_if_due(context, &mut fx);
        let reply = match input {
            Input::Tick => {
                self.advance(context, &mut fx);
                Ok(Reply::Done)
            }
            Input::Create { handle, claimant } => self.create(handle, claimant, context, &mut fx),
            Input::Lock { handle, owner, mode, wait, claimant } => {
                let id = wait.unwrap_or_default();
                let waiter = Waiter { id, handle, owner, mode, claimant, since: context.now };
                match mode {
                    Mode::Exclusive => self.lock_exclusive(waiter, wait.is_some(), context, &mut fx),
                    Mode::Shared => self.lock_shared(waiter, wait.is_some(), context, &mut fx),
                }
            }
            Input::Unlock { handle, owner } => self.unlock(handle, owner, context, &mut fx),
            Input::Cancel(waiter) => self.cancel(waiter, context, &mut fx),
            Input::Close { handle, why } => self.close(handle, why, context, &mut fx),
            Input::Unlink { process, may_forget, uid, request } => {
                self.once(request, &mut fx, |state, fx| state.unlink(process, may_forget, uid, context, fx))
            }
            Input::Renew { handle, note } => self.renew_handle(handle, note, context, &mut fx),
            Input::SetTtl { uid, ttl } => self.set_ttl(uid, ttl, context, &mut fx),
            Input::SetAgent { uid, agent } => self.set_agent(uid, agent, &mut fx),
            Input::GiveBack { epoch, uid, why, request } => {
                self.once(request, &mut fx, |state, fx| state.give_back(epoch, uid, why, context, fx))
            }
            Input::RenewAttempt { epoch, uid } => self.renew_attempt(epoch, uid, context, &mut fx),
            Input::Evict { epoch, why, request } => {
                self.once(request, &mut fx, |state, fx| state.evict(epoch, why, context, fx))
            }
            Input::LoseShares => self.lose_shares(context, &mut fx),
            Input::Lose { epoch, why } => self.lose(epoch, why, context, &mut fx),
            Input::OpenDraft { handle, epoch, uid } => self.open_draft(handle, epoch, uid, context, &mut fx),
            Input::Commit { handle, size } => self.commit(handle, size, context, &mut fx),
            Input::CloseDraft { handle } => self.close_draft(handle, context, &mut fx),
        };
        if before != self.told() {
            self.changes += 1;
            self.changed_at = context.now;
        }
        let Effects { changes, grants, notices, lost } = fx;
        Step { reply, changes, grants, notices, lost }
    }

    /// Does what a request asks for unless it was done already: its answer may not have reached whoever asked.
    fn once(
        &mut self,
        request: RequestId,
        fx: &mut Effects,
        what: impl FnOnce(&mut KeyState, &mut Effects) -> Result<Reply, Error>,
    ) -> Result<Reply, Error> {
        if request != RequestId(0) && request == self.last_request {
            return Ok(Reply::Done);
        }
        let reply = what(self, fx)?;
        self.last_request = request;
        fx.changes.push(Change::Answered(request));
        Ok(reply)
    }

    /// What those who poll the status are woken for: the state, whose it is, and the result that came.
    fn told(&self) -> (State, Epoch, Option<Epoch>) {
        (self.applied_state(), self.epoch, self.latest_result.map(|(epoch, _)| epoch))
    }
}

#[cfg(test)]
mod tests;
