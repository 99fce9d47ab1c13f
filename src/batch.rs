//! What has been decided but not yet recorded: the writes, who waits for them, and the way back.
//!
//! A batch is one transaction. Until it is committed nobody is told of what it grants, nor refused because of it. If the
//! commit fails, each key goes back to where it was before the batch's first change that can be refused. What was asked
//! since is answered with the error as if it never was; what cannot be refused (a handle *was* closed) and who got into
//! line is applied again and recorded later. What came before that point stands.

use std::collections::HashSet;
use std::sync::Arc;

use foldhash::HashMap;

use crate::error::Error;
use crate::events::{Kind, Wait};
use crate::ids::{Epoch, Handle, KeyId, NamespaceId, WaiterId};
use crate::machine::{Input, KeyState, Reply};
use crate::metrics::Detail;
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
    /// The wait in line that it ends, where it does.
    pub waited: Option<Waited>,
}

/// A wait in line that is over.
pub(crate) struct Waited {
    pub who: Wait,
    pub ns: u64,
    /// When it was over.
    pub now: Now,
}

impl Waited {
    /// What is announced of it, unless it was granted.
    pub fn note(self, key: KeyId, epoch: Epoch, reply: &Result<Reply, Error>) -> Option<Note> {
        let Waited { who, ns, now } = self;
        let kind = Kind::of_wait(reply)?;
        let detail = Detail::Wait(Arc::new(Wait { waited_ms: ns / 1_000_000, ..who }));
        Some(Note { key, kind, epoch, detail, now })
    }
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
    pub detail: Detail,
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
    /// Bytes of drafts that have to reach the disk first.
    pub draft_bytes: u64,
    undo: Vec<Undo>,
}

impl Batch {
    pub fn new(number: u64) -> Batch {
        Batch { number, ..Batch::default() }
    }

    /// One without anything in it, in the memory of this one.
    pub fn emptied(self) -> Batch {
        let Batch { mut writes, mut answers, mut settled, mut log, mut notes, mut undo, .. } = self;
        writes.clear();
        answers.clear();
        settled.clear();
        log.clear();
        notes.clear();
        undo.clear();
        Batch { writes, answers, settled, log, notes, undo, ..Batch::default() }
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

    /// Changes the states that a key may go back to: something is so now, whatever becomes of the batch.
    pub fn amend(&mut self, key: KeyId, change: impl Fn(&mut KeyState)) {
        for undo in &mut self.undo {
            if let Undo::Key(id, state, _) = undo
                && *id == key
            {
                change(state);
            }
        }
    }

    /// The way back, newest change first.
    pub fn take_undo(&mut self) -> impl Iterator<Item = Undo> + use<> {
        std::mem::take(&mut self.undo).into_iter().rev()
    }

    /// Takes out everything about one key, so that it can be refused by itself. Each key's changes are its own: what is
    /// left is what the batch would have been without it.
    pub fn split(&mut self, key: KeyId) -> Batch {
        let mut apart = Batch::new(self.number);
        let (writes, moved_writes) = part(&mut self.writes, &mut apart.writes, |write| write.key() == Some(key));
        let (answers, moved_answers) = part(&mut self.answers, &mut apart.answers, |answer| answer.key == Some(key));
        let (log, moved_log) = part(&mut self.log, &mut apart.log, |logged| logged.key == key);
        let (notes, moved_notes) = part(&mut self.notes, &mut apart.notes, |note| note.key == key);
        self.carried = writes[self.carried];
        for undo in std::mem::take(&mut self.undo) {
            match undo {
                Undo::Key(id, state, mark) if id == key => {
                    let mark = Mark {
                        writes: moved_writes[mark.writes],
                        answers: moved_answers[mark.answers],
                        log: moved_log[mark.log],
                        notes: moved_notes[mark.notes],
                    };
                    apart.undo.push(Undo::Key(id, state, mark));
                }
                Undo::Key(id, state, mark) => {
                    let mark = Mark {
                        writes: writes[mark.writes],
                        answers: answers[mark.answers],
                        log: log[mark.log],
                        notes: notes[mark.notes],
                    };
                    self.undo.push(Undo::Key(id, state, mark));
                }
                namespace @ Undo::Namespace(..) => self.undo.push(namespace),
            }
        }
        apart
    }

    /// Drops the keys that are named and forgotten again in it: nobody will ever ask for them. Only while there is no
    /// way back, whose marks count the writes.
    pub fn cancel_out(&mut self) {
        debug_assert!(self.undo.is_empty());
        let forgotten: HashSet<KeyId> = self.writes.iter().filter_map(Write::forgets).collect();
        let named = |write: &Write| match write {
            Write::Key(key, _) => Some(*key),
            _ => None,
        };
        let both: HashSet<KeyId> = self.writes.iter().filter_map(named).filter(|key| forgotten.contains(key)).collect();
        self.writes.retain(|write| write.key().is_none_or(|key| !both.contains(&key)));
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

/// Moves what belongs apart; for each place in the list as it was, how many of those that stay and of those that go came
/// before it.
fn part<T>(list: &mut Vec<T>, apart: &mut Vec<T>, goes: impl Fn(&T) -> bool) -> (Vec<usize>, Vec<usize>) {
    let (mut stayed_before, mut gone_before) = (vec![0], vec![0]);
    let mut stays = Vec::with_capacity(list.len());
    for entry in std::mem::take(list) {
        if goes(&entry) {
            apart.push(entry)
        } else {
            stays.push(entry)
        }
        stayed_before.push(stays.len());
        gone_before.push(apart.len());
    }
    *list = stays;
    (stayed_before, gone_before)
}

/// A request in line.
struct Pending {
    key: KeyId,
    who: Wait,
    /// `CLOCK_BOOTTIME`, in nanoseconds, at which it came.
    since_ns: u64,
    done: Done,
}

/// Requests in line, by their number.
#[derive(Default)]
pub(crate) struct Waiting {
    pending: HashMap<WaiterId, Pending>,
    by_uid: HashMap<u32, usize>,
}

impl Waiting {
    pub fn insert(&mut self, id: WaiterId, key: KeyId, who: Wait, now: Now, done: Done) {
        *self.by_uid.entry(who.uid).or_default() += 1;
        self.pending.insert(id, Pending { key, who, since_ns: now.boot_ns, done });
    }

    /// Takes it out of the line, whose wait is over now; whom to answer.
    pub fn remove(&mut self, id: WaiterId, now: Now) -> Option<(Done, Waited)> {
        let Pending { who, since_ns, done, .. } = self.pending.remove(&id)?;
        if let Some(count) = self.by_uid.get_mut(&who.uid) {
            *count -= 1;
            if *count == 0 {
                self.by_uid.remove(&who.uid);
            }
        }
        Some((done, Waited { who, ns: now.boot_ns.saturating_sub(since_ns), now }))
    }

    /// It waits for longer than since it was inserted; gives its key.
    pub fn waits_since(&mut self, id: WaiterId, since_ns: u64) -> Option<KeyId> {
        let pending = self.pending.get_mut(&id)?;
        pending.since_ns = since_ns;
        Some(pending.key)
    }

    pub fn key(&self, id: WaiterId) -> Option<KeyId> {
        self.pending.get(&id).map(|pending| pending.key)
    }

    pub fn of_uid(&self, uid: u32) -> usize {
        self.by_uid.get(&uid).copied().unwrap_or(0)
    }

    pub fn len(&self) -> usize {
        self.pending.len()
    }

    /// Since when the first in any line waits, by `CLOCK_BOOTTIME` in nanoseconds.
    pub fn oldest_ns(&self) -> Option<u64> {
        self.pending.values().map(|pending| pending.since_ns).min()
    }
}
