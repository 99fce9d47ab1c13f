//! What has been decided but not yet recorded: the writes, who waits for them, and the way back.
//!
//! A batch is one transaction. Until it is committed nobody is told of what it grants, nor refused because of it. If the
//! commit fails, each key goes back to where it was before the batch's first change that can be refused. What was asked
//! since is answered with the error as if it never was; what cannot be refused (a handle *was* closed) and who got into
//! line is applied again and recorded later. What came before that point stands.

use std::collections::HashMap;

use crate::error::Error;
use crate::events::Kind;
use crate::ids::{Epoch, Handle, KeyId, NamespaceId, Owner, WaiterId};
use crate::machine::{Input, KeyState, Reply};
use crate::registry::{NamespaceRow, Write};
use crate::time::Now;

/// Called once with the answer to a request.
pub type Done = Box<dyn FnOnce(Result<Reply, Error>) + Send>;
/// Called once when a key's changes are recorded or taken back.
pub type Settled = Box<dyn FnOnce() + Send>;

/// What is told once the batch is recorded.
pub(crate) struct Answer {
    pub done: Done,
    pub reply: Result<Reply, Error>,
    /// The key it is about; none for a namespace.
    pub key: Option<KeyId>,
    /// What was asked has happened, whether or not it could be recorded yet.
    pub fact: bool,
}

/// An input that has to be applied again, as of its own time, if the key goes back to before it.
pub(crate) struct Logged {
    pub key: KeyId,
    pub input: Input,
    pub now: Now,
}

/// Something to announce once it is recorded.
pub(crate) struct Note {
    pub key: KeyId,
    pub kind: Kind,
    pub epoch: Epoch,
    pub now: Now,
}

/// A point in a batch: how much of it came before.
#[derive(Clone, Copy)]
pub(crate) struct Mark {
    pub writes: usize,
    pub answers: usize,
    pub log: usize,
    pub notes: usize,
}

/// How to put back what the batch changed.
pub(crate) enum Undo {
    /// A key's state, and the point in the batch at which it was that.
    Key(KeyId, Box<KeyState>, Mark),
    Namespace(NamespaceId, Option<NamespaceRow>),
}

/// One transaction in the making.
#[derive(Default)]
pub(crate) struct Batch {
    pub number: u64,
    pub writes: Vec<Write>,
    /// How many of the writes are left from a batch that failed, and not to be taken back.
    pub carried: usize,
    pub durable: bool,
    /// Somebody waits for it.
    pub urgent: bool,
    /// `CLOCK_BOOTTIME`, in nanoseconds, of its first write.
    pub since_ns: u64,
    pub answers: Vec<Answer>,
    pub settled: Vec<Settled>,
    pub log: Vec<Logged>,
    /// Kept in order with what is recorded: nobody hears of a grant that may still be taken back.
    pub notes: Vec<Note>,
    /// Closes that were not answered yet: the kernel sends only so many at a time.
    pub closes: usize,
    /// Shares given back for what is recorded with this batch: until then their handles have them.
    pub unshared: Vec<(KeyId, Handle, Owner)>,
    /// Bytes of drafts that have to reach the disk first.
    pub draft_bytes: u64,
    undo: Vec<Undo>,
}

impl Batch {
    pub fn new(number: u64) -> Batch {
        Batch { number, ..Batch::default() }
    }

    /// Whether there is nothing to do for it.
    pub fn is_empty(&self) -> bool {
        self.writes.is_empty() && self.answers.is_empty() && self.settled.is_empty() && self.notes.is_empty()
    }

    /// Keeps the state from before a key's first change that can be refused.
    pub fn remember(&mut self, key: KeyId, state: KeyState) {
        let (writes, answers) = (self.writes.len(), self.answers.len());
        let mark = Mark { writes, answers, log: self.log.len(), notes: self.notes.len() };
        self.undo.push(Undo::Key(key, Box::new(state), mark));
    }

    /// Keeps what a namespace was before this change.
    pub fn remember_namespace(&mut self, id: NamespaceId, before: Option<NamespaceRow>) {
        self.undo.push(Undo::Namespace(id, before));
    }

    /// The way back, newest change first.
    pub fn take_undo(&mut self) -> impl Iterator<Item = Undo> + use<> {
        std::mem::take(&mut self.undo).into_iter().rev()
    }

    /// The drafts that become results in this batch.
    pub fn drafts(&self) -> Vec<(Handle, KeyId, Epoch)> {
        let draft = |write: &Write| match write {
            Write::Commit(key, attempt, draft) => Some((*draft, *key, attempt.epoch)),
            _ => None,
        };
        self.writes.iter().filter_map(draft).collect()
    }
}

/// Requests in line, by their number.
#[derive(Default)]
pub(crate) struct Waiting {
    pending: HashMap<WaiterId, (KeyId, u32, Done)>,
    by_uid: HashMap<u32, usize>,
}

impl Waiting {
    pub fn insert(&mut self, id: WaiterId, key: KeyId, uid: u32, done: Done) {
        self.pending.insert(id, (key, uid, done));
        *self.by_uid.entry(uid).or_default() += 1;
    }

    pub fn remove(&mut self, id: WaiterId) -> Option<Done> {
        let (_, uid, done) = self.pending.remove(&id)?;
        if let Some(count) = self.by_uid.get_mut(&uid) {
            *count -= 1;
            if *count == 0 {
                self.by_uid.remove(&uid);
            }
        }
        Some(done)
    }

    pub fn key(&self, id: WaiterId) -> Option<KeyId> {
        self.pending.get(&id).map(|(key, ..)| *key)
    }

    pub fn of_uid(&self, uid: u32) -> usize {
        self.by_uid.get(&uid).copied().unwrap_or(0)
    }

    pub fn len(&self) -> usize {
        self.pending.len()
    }
}
