//! The end of a batch: what was recorded is told, what could not be recorded is taken back.
//!
//! A refused commit leaves two batches to take back, the one that failed and the one that gathered meanwhile on top of
//! it. Each key goes back to its first change that can be refused, and from there
//! - whoever asked for something is answered with the error, as if they never had asked;
//! - what has happened all the same (a handle *was* closed) and who got into line is applied again, as of its own time;
//! - who was answered in the meantime is not in line again.
//!
//! What came before that point stands, recorded or not, and is told as it is.

use std::collections::{BTreeMap, BTreeSet};

use super::{Inner, Ready};
use crate::batch::{Answer, Batch, Logged, Mark, Note, Undo, Waited};
use crate::error::Error;
use crate::ids::KeyId;
use crate::machine::{Input, KeyState, Reply};
use crate::registry::{NamespaceRow, Write};
use crate::time::Now;

/// How long to leave a registry alone that just failed, in nanoseconds.
const RETRY_NS: u64 = 500_000_000;

/// What is left to do after a batch was taken back.
struct TakenBack {
    /// To be applied again.
    again: Vec<Logged>,
    /// The keys that were put back.
    undone: BTreeSet<KeyId>,
}

impl Inner {
    /// The end of a batch: success is told, failure is taken back.
    pub(super) fn settle(&mut self, mut batch: Batch, recorded: Result<(), Error>, now: Now, ready: &mut Ready) {
        self.settled = batch.number;
        match recorded {
            Ok(()) => {
                self.metrics.commits += u64::from(!batch.writes.is_empty());
                self.retry_ns = None;
                for Note { key, kind, epoch, detail, now } in batch.notes.drain(..) {
                    self.announce(now, kind, key, epoch, detail);
                }
                for Answer { done, reply, key, waited, .. } in batch.answers.drain(..) {
                    if let Some(Note { key, kind, epoch, detail, now }) = self.end_wait(key, waited, &reply) {
                        self.announce(now, kind, key, epoch, detail);
                    }
                    ready.push((done, reply));
                }
                self.spare = batch.emptied();
            }
            Err(error) => {
                self.metrics.commit_failures += 1;
                let next = Batch::new(self.batch.number + 1);
                let gathered = std::mem::replace(&mut self.batch, next);
                let taken = self.take_back(batch, gathered, &error, ready);
                // While a disk stays full, every refused claim of a new name would leave two writes behind.
                self.batch.cancel_out();
                self.batch.carried = self.batch.writes.len();
                self.batch.since_ns = now.boot_ns;
                self.batch.urgent = !self.batch.settled.is_empty();
                self.retry_ns = Some(now.boot_ns + RETRY_NS);
                self.removes = 0;
                self.redo(taken, now, ready);
            }
        }
    }

    /// Refuses what a batch on its way to the disk, and the one that gathers meanwhile, hold of one key; the rest goes on.
    pub(super) fn refuse(&mut self, batch: &mut Batch, key: KeyId, error: &Error, now: Now, ready: &mut Ready) {
        self.metrics.commit_failures += 1;
        self.touch_batch(now);
        let (apart, since) = (batch.split(key), self.batch.split(key));
        let taken = self.take_back(apart, since, error, ready);
        self.redo(taken, now, ready);
    }

    /// Takes back what a batch that could not be recorded granted, and what was granted since on top of it. What cannot
    /// be taken back is kept for the next batch.
    fn take_back(&mut self, mut failed: Batch, mut gathered: Batch, error: &Error, ready: &mut Ready) -> TakenBack {
        let (since, before) = (self.undo(&mut gathered), self.undo(&mut failed));
        let (mut again, mut announced) = (Vec::new(), Vec::new());
        let mut undone = BTreeSet::new();
        for (batch, marks) in [(failed, before), (gathered, since)] {
            // Whether the state that was put back has this in it: the key did not go back to before this batch, nor
            // within the batch to before this point.
            let stands = |key: KeyId, at: usize, of: fn(&Mark) -> usize| {
                !undone.contains(&key) && marks.get(&key).is_none_or(|mark| at < of(mark))
            };
            for (at, write) in batch.writes.into_iter().enumerate() {
                // A key is named before it is changed, and not forgotten while a change of it is on its way: so what gives
                // it its number, which clients have seen, always stands.
                let keep = write.key().map_or(at < batch.carried, |key| stands(key, at, |mark| mark.writes));
                if keep {
                    self.batch.writes.push(write);
                }
            }
            for (at, answer) in batch.answers.into_iter().enumerate() {
                let stands = answer.fact || answer.key.is_some_and(|key| stands(key, at, |mark| mark.answers));
                let reply = if stands { answer.reply } else { Err(error.clone()) };
                announced.extend(self.end_wait(answer.key, answer.waited, &reply));
                ready.push((answer.done, reply));
            }
            for (at, note) in batch.notes.into_iter().enumerate() {
                if stands(note.key, at, |mark| mark.notes) {
                    announced.push(note);
                }
            }
            let log = batch.log.into_iter().enumerate();
            again
                .extend(log.filter(|(at, logged)| !stands(logged.key, *at, |mark| mark.log)).map(|(_, logged)| logged));
            self.batch.settled.extend(batch.settled);
            undone.extend(marks.into_keys());
        }
        for Note { key, kind, epoch, detail, now } in announced {
            self.announce(now, kind, key, epoch, detail);
        }
        TakenBack { again, undone }
    }

    /// Counts a wait that an answer ends; what is to be announced of it.
    fn end_wait(&mut self, key: Option<KeyId>, waited: Option<Waited>, reply: &Result<Reply, Error>) -> Option<Note> {
        let (key, waited) = (key?, waited?);
        self.metrics.waited(reply, waited.ns);
        let epoch = self.keys.get(&key)?.state.epoch;
        waited.note(key, epoch, reply)
    }

    /// Applies again, to the keys that were put back, what has happened all the same.
    fn redo(&mut self, taken: TakenBack, now: Now, ready: &mut Ready) {
        let TakenBack { again, undone } = taken;
        for id in &undone {
            if let Some(entry) = self.keys.get_mut(id) {
                // Who was answered, refused now or interrupted before, is not in line again.
                entry.state.line.retain(|waiter| self.waiting.key(waiter.id).is_some());
            }
            // Nobody is refused a key for one that was taken back.
            self.refresh(*id);
        }
        for Logged { key, input, now: at } in again {
            self.repeat(key, input, at, ready);
        }
        // Whoever is in line for a key that is free again must not wait for the next request.
        for key in undone {
            self.repeat(key, Input::Tick, now, ready);
            self.forget_unused(key, now);
        }
    }

    /// Puts back what a batch changed; where in the batch each key was that.
    fn undo(&mut self, batch: &mut Batch) -> BTreeMap<KeyId, Mark> {
        let mut marks = BTreeMap::new();
        for undo in batch.take_undo() {
            match undo {
                Undo::Key(id, state, mark) => {
                    if let Some(entry) = self.keys.get_mut(&id) {
                        // Whoever polls has seen that count, so it does not go back.
                        let changes = entry.state.changes + 1;
                        entry.state = KeyState { changes, ..*state };
                        entry.unsettled = 0;
                    }
                    marks.insert(id, mark);
                }
                Undo::Namespace(_, Some(row)) => {
                    self.namespaces.set(row);
                }
                Undo::Namespace(id, None) if self.namespaces.has_children(id) => {
                    // A key below it has its number already and would be found nowhere: as if removed again.
                    if let Some(namespace) = self.namespaces.get(id) {
                        let row = NamespaceRow { present: false, ..namespace.row.clone() };
                        self.namespaces.set(row.clone());
                        self.batch.writes.push(Write::Namespace(row));
                    }
                }
                Undo::Namespace(id, None) => self.namespaces.remove(id),
            }
        }
        marks
    }

    /// Applies again what a key that was put back does not have in its state. Who waited and need not any more is
    /// answered; who was answered in the meantime is not put in line again.
    fn repeat(&mut self, key: KeyId, input: Input, now: Now, ready: &mut Ready) {
        let waiter = match &input {
            Input::Lock { wait, .. } => *wait,
            _ => None,
        };
        if waiter.is_some_and(|waiter| self.waiting.key(waiter).is_none()) {
            return;
        }
        let Some(mut step) = self.apply(key, input, now) else { return };
        if let Some(waiter) = waiter
            && step.reply != Ok(Reply::Queued)
        {
            step.grants.insert(0, (waiter, step.reply.clone()));
        }
        self.absorb(key, step, now, ready);
    }
}
