//! Many writes become few: what began and ended in between is one row, and a key's epoch is counted once.
//!
//! The outcome, and what is refused, is that of the writes one by one ([`super::sqlite_write`]); `tests/model/journal.rs`
//! compares the two. So [`merge`] changes exactly the columns that the statement of the same name does.

use std::collections::hash_map::Entry;
use std::sync::Arc;

use foldhash::HashMap;

use super::Write;
use crate::ids::{Epoch, Handle, KeyId, Owner};
use crate::machine::{Attempt, Outcome};

/// What is done to the database, in this order.
pub(super) enum Op<'a> {
    /// A write as it is.
    One(&'a Write),
    /// A key's epoch goes from one to another, refused unless it is the one.
    Count { key: KeyId, before: Epoch, after: Epoch, finished: bool },
    /// An attempt that was not there before, as it is after all of them.
    Insert(KeyId, Arc<Attempt>),
}

/// A write that does not fit those before it.
pub(super) struct Misfit {
    pub what: &'static str,
    pub key: KeyId,
    pub epoch: Epoch,
}

#[derive(Default)]
struct Plan<'a> {
    ops: Vec<Op<'a>>,
    /// Where the keys counted here are.
    counts: HashMap<KeyId, usize>,
    /// Where the attempts inserted here are.
    inserts: HashMap<(KeyId, Epoch), usize>,
    /// Where the renewals are that another may stand for.
    renewals: HashMap<KeyId, (Epoch, usize)>,
    /// Where the numbers of the newest requests are.
    answered: HashMap<KeyId, usize>,
    /// Where the shared locks are that are given here.
    shares: HashMap<(KeyId, Handle, Owner), usize>,
}

/// The same as the writes one by one, in fewer steps.
pub(super) fn coalesce<'a>(writes: impl Iterator<Item = &'a Write>) -> Result<Vec<Op<'a>>, Misfit> {
    let mut plan = Plan::default();
    for write in writes {
        plan.add(write)?;
    }
    Ok(plan.ops)
}

impl<'a> Plan<'a> {
    fn add(&mut self, write: &'a Write) -> Result<(), Misfit> {
        match write {
            Write::Claim(key, attempt) => self.claim(*key, attempt),
            Write::Renew(key, a) | Write::End(key, a) | Write::Revive(key, a) | Write::Commit(key, a, _) => {
                let Some(at) = self.inserts.get(&(*key, a.epoch)) else {
                    self.pass(*key, write);
                    return Ok(());
                };
                let newest = !self.inserts.contains_key(&(*key, a.epoch.next()));
                if let Some(Op::Insert(_, row)) = self.ops.get_mut(*at) {
                    merge(Arc::make_mut(row), write, newest).map_err(|what| Misfit {
                        what,
                        key: *key,
                        epoch: a.epoch,
                    })?;
                }
                if matches!(write, Write::End(..)) && a.outcome == Some(Outcome::Completed) {
                    self.finish(*key, true);
                }
                Ok(())
            }
            Write::Finished(key, finished) => {
                if !self.finish(*key, *finished) {
                    self.pass(*key, write);
                }
                Ok(())
            }
            Write::Answered(key, _) => {
                // Nothing else asks for it, so the newest can stand where the first was.
                match self.answered.entry(*key) {
                    Entry::Occupied(first) => self.ops[*first.get()] = Op::One(write),
                    Entry::Vacant(first) => {
                        first.insert(self.ops.len());
                        self.ops.push(Op::One(write));
                    }
                }
                Ok(())
            }
            Write::Share(key, share) => {
                self.shares.insert((*key, share.handle, share.owner), self.ops.len());
                self.ops.push(Op::One(write));
                Ok(())
            }
            Write::Unshare(key, handle, owner) => {
                // One that was given here and is given back is as if it was only given back.
                match self.shares.remove(&(*key, *handle, *owner)) {
                    Some(at) => self.ops[at] = Op::One(write),
                    None => self.ops.push(Op::One(write)),
                }
                Ok(())
            }
            Write::Key(key, _) | Write::Forget(key) => {
                self.pass(*key, write);
                Ok(())
            }
            Write::Namespace(_) => {
                self.ops.push(Op::One(write));
                Ok(())
            }
        }
    }

    fn claim(&mut self, key: KeyId, attempt: &Arc<Attempt>) -> Result<(), Misfit> {
        self.renewals.remove(&key);
        match self.counts.get(&key).and_then(|at| self.ops.get_mut(*at)) {
            Some(Op::Count { after, finished, .. }) => {
                if after.next() != attempt.epoch {
                    return Err(Misfit { what: "claim", key, epoch: attempt.epoch });
                }
                (*after, *finished) = (attempt.epoch, false);
            }
            _ => {
                let before = Epoch(attempt.epoch.0.saturating_sub(1));
                self.counts.insert(key, self.ops.len());
                self.ops.push(Op::Count { key, before, after: attempt.epoch, finished: false });
            }
        }
        self.inserts.insert((key, attempt.epoch), self.ops.len());
        self.ops.push(Op::Insert(key, Arc::clone(attempt)));
        Ok(())
    }

    /// Leaves a write as it is; a renewal right after one of the same attempt stands for both.
    fn pass(&mut self, key: KeyId, write: &'a Write) {
        let renewal = match write {
            Write::Renew(_, attempt) => Some(attempt.epoch),
            _ => None,
        };
        if let Some((epoch, at)) = self.renewals.remove(&key)
            && renewal == Some(epoch)
        {
            self.ops[at] = Op::One(write);
            self.renewals.insert(key, (epoch, at));
            return;
        }
        if let Some(epoch) = renewal {
            self.renewals.insert(key, (epoch, self.ops.len()));
        }
        self.ops.push(Op::One(write));
    }

    /// Says whether a key counted here is finished; false where none is.
    fn finish(&mut self, key: KeyId, value: bool) -> bool {
        match self.counts.get(&key).and_then(|at| self.ops.get_mut(*at)) {
            Some(Op::Count { finished, .. }) => {
                *finished = value;
                true
            }
            _ => false,
        }
    }
}

/// Does to an attempt what a write does to its row; the name of the write where it is refused.
fn merge(row: &mut Attempt, write: &Write, newest: bool) -> Result<(), &'static str> {
    match write {
        Write::Renew(_, a) if row.ended.is_none() => {
            (row.renewed, row.deadline_ns, row.ttl) = (a.renewed, a.deadline_ns, a.ttl);
            (row.note, row.agent) = (a.note.clone(), a.agent.clone());
            (row.held, row.why) = (a.held, a.why.clone());
            (row.handle, row.owners, row.via) = (a.handle, a.owners.clone(), a.via);
            Ok(())
        }
        Write::End(_, a) if row.ended.is_none() => {
            (row.outcome, row.why, row.ended) = (a.outcome, a.why.clone(), a.ended);
            (row.registered, row.held) = (a.registered, false);
            Ok(())
        }
        Write::Revive(..) if row.ended.is_some() && row.result.is_none() && newest => {
            (row.outcome, row.ended) = (None, None);
            Ok(())
        }
        Write::Commit(_, a, _) if row.ended.is_none() && row.result.is_none() && newest => {
            (row.result, row.outcome) = (a.result, Some(Outcome::Completed));
            Ok(())
        }
        Write::Renew(..) => Err("renew"),
        Write::End(..) => Err("end"),
        Write::Revive(..) => Err("revive"),
        Write::Commit(..) => Err("commit a result of"),
        Write::Key(..)
        | Write::Forget(_)
        | Write::Claim(..)
        | Write::Finished(..)
        | Write::Answered(..)
        | Write::Share(..)
        | Write::Unshare(..)
        | Write::Namespace(_) => Ok(()),
    }
}
