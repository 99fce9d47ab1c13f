//! A journal in front of SQLite: what need not survive a power cut is written to a file and put in the database later,
//! many decisions at a time.
//!
//! # Guarantees
//! - What [`Journal::commit`] accepted survives the end of the server at any instruction: it is in the kernel's page
//!   cache ([`super::tape`]) or in the database.
//! - Each record is applied exactly once and in order: the transaction that applies it notes its number
//!   ([`Mark`]), and a server that starts applies what comes after. With each start the journal gets another number, so
//!   records of another state directory, of a backup's past or of a history that a power cut undid never count.
//! - A durable commit takes in all that is pending, in the same transaction: it rests on no byte of the journal.
//! - While the database refuses what is pending (a full disk), nothing is granted, and all that was granted stays in the
//!   journal. What has happened all the same is accepted while there is room.
//!
//! `db` is locked before `tail`, which is never held during I/O on the database: a commit does not wait for another
//! thread that applies, unless both segments are full.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::Arc;

use parking_lot::Mutex;

use super::coalesce::{Misfit, Op, coalesce};
use super::prune::{Bounds, Candidate, Limits, Place, Portion, Pruned};
use super::sqlite::{Check, SqliteRegistry};
use super::sqlite_read::Mark;
use super::sqlite_write::misfit;
use super::tape::{self, FORMAT, SEGMENT_BYTES, Tape};
use super::{Backlog, Checkpoint, Loaded, LoadedKey, Read, Registry, StoredResult, Which, Write};
use crate::error::Error;
use crate::ids::{Epoch, KeyId};
use crate::time::Now;

/// SQLite's registry behind a journal.
pub struct Journal(Arc<Shared>);

struct Shared {
    db: Mutex<SqliteRegistry>,
    tail: Mutex<Tail>,
}

/// What is in the journal and not yet in the database.
struct Tail {
    tape: Tape,
    /// What is in the journal, and is not being applied right now.
    pending: Vec<Write>,
    /// Results in the journal, with the number of their record.
    results: BTreeMap<(KeyId, Epoch), (StoredResult, u64)>,
    /// The newest record.
    last: u64,
    mark: Mark,
    segments: [Segment; 2],
    active: usize,
    /// Why the database refused what is pending.
    fault: Option<Error>,
}

#[derive(Clone, Copy, Default)]
struct Segment {
    used: usize,
    last: u64,
}

impl Journal {
    /// Opens the registry in a state directory, or makes one, and applies what an earlier server left in its journal.
    ///
    /// # Errors
    /// As [`SqliteRegistry::open`]; [`Error::Storage`] where the journal cannot be made or applied.
    pub fn open(state_dir: &Path, check: Check) -> Result<Journal, Error> {
        let left = read(state_dir)?;
        let mut db = SqliteRegistry::open(state_dir, check)?;
        let writes = left.map_or(Ok(Vec::new()), |left| left.after(db.mark()?))?;
        // Other records than these follow the database from here on.
        let mark = Mark { id: db.random()?, record: 0 };
        db.record(&plan(writes.iter())?, Some(mark), false)?;
        let tape = Tape::begin(state_dir, mark.id).map_err(|error| journal_fault(&error))?;
        let tail = Tail {
            tape,
            pending: Vec::new(),
            results: BTreeMap::new(),
            last: 0,
            mark,
            segments: [Segment::default(); 2],
            active: 0,
            fault: None,
        };
        Ok(Journal(Arc::new(Shared { db: Mutex::new(db), tail: Mutex::new(tail) })))
    }
}

impl Registry for Journal {
    fn load(&mut self, boot_id: &str, now: Now) -> Result<Loaded, Error> {
        self.0.record(&[], false)?;
        self.0.db.lock().load(boot_id, now)
    }

    fn commit(&mut self, writes: &[Write], durable: bool) -> Result<(), Error> {
        if writes.is_empty() {
            return Ok(());
        }
        if !durable {
            if self.0.tail.lock().fault.is_some() && writes.iter().any(grants) {
                self.0.record(&[], false)?;
            }
            if self.0.tail.lock().append(writes)? {
                return Ok(());
            }
        }
        self.0.record(writes, durable)
    }

    fn prune(&mut self, candidates: &[Candidate], files_gone: &[(KeyId, Epoch)]) -> Result<Vec<Pruned>, Error> {
        // A result that is in the journal only would be shown after its row is gone.
        self.0.record(&[], false)?;
        self.0.db.lock().prune(candidates, files_gone)
    }

    fn backlog(&self) -> Backlog {
        let tail = self.0.tail.lock();
        match tail.segments[tail.active].used {
            _ if tail.pending.is_empty() => Backlog::None,
            used if used > SEGMENT_BYTES / 2 => Backlog::Much,
            _ => Backlog::Some,
        }
    }

    fn reader(&self) -> Result<Box<dyn Read>, Error> {
        Ok(Box::new(JournalRead(self.0.db.lock().reader()?, Arc::clone(&self.0))))
    }

    fn checkpointer(&self) -> Result<Box<dyn Checkpoint>, Error> {
        Ok(Box::new(JournalCheckpoint(self.0.db.lock().checkpointer()?, Arc::clone(&self.0))))
    }
}

impl Drop for Journal {
    fn drop(&mut self) {
        // What cannot be applied now is in the journal when the next server starts.
        let _ = self.0.record(&[], false);
    }
}

impl Shared {
    /// Puts in the database what is pending and then this, as one transaction.
    fn record(&self, writes: &[Write], durable: bool) -> Result<(), Error> {
        let mut db = self.db.lock();
        let (pending, mark) = self.tail.lock().take();
        if pending.is_empty() && writes.is_empty() {
            return Ok(());
        }
        let mark = (!pending.is_empty()).then_some(mark);
        let done = plan(pending.iter().chain(writes)).and_then(|ops| db.record(&ops, mark, durable));
        self.tail.lock().settle(pending, mark, &done);
        done
    }
}

impl Tail {
    /// Writes a record; false where there is no room for it.
    fn append(&mut self, writes: &[Write]) -> Result<bool, Error> {
        let segment = &mut self.segments[self.active];
        let number = self.last + 1;
        let encode = |buffer| postcard::to_extend(writes, buffer).map_err(io::Error::other);
        let written = self.tape.write(self.active, segment.used, number, encode);
        let Some(used) = written.map_err(|error| journal_fault(&error))? else { return Ok(false) };
        *segment = Segment { used, last: number };
        self.last = number;
        self.pending.extend_from_slice(writes);
        for write in writes {
            if let Write::Commit(key, attempt, _) = write
                && let Some(result) = attempt.result
            {
                let (size, committed_ms, uid) = (result.size, result.committed_ms, attempt.claimant.uid);
                self.results.insert((*key, attempt.epoch), (StoredResult { size, committed_ms, uid }, number));
            }
        }
        Ok(true)
    }

    /// Takes out what is pending, to be applied; what comes meanwhile goes to the other segment if that is free.
    fn take(&mut self) -> (Vec<Write>, Mark) {
        let other = 1 - self.active;
        if self.segments[self.active].used > 0 && self.is_applied(other) {
            self.active = other;
            self.segments[other].used = 0;
        }
        (std::mem::take(&mut self.pending), Mark { record: self.last, ..self.mark })
    }

    fn settle(&mut self, mut taken: Vec<Write>, mark: Option<Mark>, done: &Result<(), Error>) {
        match done {
            Ok(()) => {
                self.fault = None;
                if let Some(mark) = mark {
                    self.mark = mark;
                    self.results.retain(|_, (_, number)| *number > mark.record);
                }
                if self.is_applied(self.active) {
                    self.segments[self.active].used = 0;
                }
            }
            Err(error) => {
                self.fault = Some(error.clone());
                taken.append(&mut self.pending);
                self.pending = taken;
            }
        }
    }

    /// Whether all of a segment is in the database, so that it may be written over.
    fn is_applied(&self, segment: usize) -> bool {
        self.segments[segment].last <= self.mark.record
    }
}

/// Whether somebody may do more after it than before. The rest has happened, whatever the disk says.
fn grants(write: &Write) -> bool {
    match write {
        Write::Claim(..) | Write::Renew(..) | Write::Revive(..) | Write::Commit(..) | Write::Share(..) => true,
        Write::Namespace(_) => true,
        Write::Key(..) | Write::Forget(_) | Write::End(..) | Write::Finished(..) | Write::Answered(..) => false,
        Write::Unshare(..) => false,
    }
}

/// The database's reader, with the results that are still in the journal.
struct JournalRead(Box<dyn Read>, Arc<Shared>);

impl Read for JournalRead {
    fn result(&mut self, key: KeyId, epoch: Epoch) -> Result<Option<StoredResult>, Error> {
        // Looked for here first: what is not here any more is in the database.
        let pending = self.1.tail.lock().results.get(&(key, epoch)).map(|(result, _)| *result);
        pending.map_or_else(|| self.0.result(key, epoch), |result| Ok(Some(result)))
    }

    fn results(&mut self, key: KeyId, after: Epoch, limit: usize) -> Result<Vec<Epoch>, Error> {
        let range = (key, after.next())..=(key, Epoch(u64::MAX));
        let mut found: Vec<Epoch> =
            self.1.tail.lock().results.range(range).map(|((_, epoch), _)| *epoch).take(limit).collect();
        found.extend(self.0.results(key, after, limit)?);
        found.sort_unstable();
        found.dedup();
        found.truncate(limit);
        Ok(found)
    }

    fn keys(&mut self, which: Which<'_>) -> Result<Vec<LoadedKey>, Error> {
        // The journal was put in the database before anything was read, and has nothing of the keys asked for since.
        self.0.keys(which)
    }

    fn prunable(&mut self, after: Place, bounds: &Bounds, limits: Limits) -> Result<Portion, Error> {
        self.0.prunable(after, bounds, limits)
    }

    fn pruned_files(&mut self) -> Result<Vec<(KeyId, Epoch)>, Error> {
        self.0.pruned_files()
    }
}

struct JournalCheckpoint(Box<dyn Checkpoint>, Arc<Shared>);

impl Checkpoint for JournalCheckpoint {
    fn apply(&mut self) -> Result<(), Error> {
        self.1.record(&[], false)
    }

    fn run(&mut self) -> Result<(), Error> {
        self.0.run()
    }
}

/// What an earlier server left in the journal, or one that still runs has there now.
pub(super) struct Left(tape::Content);

/// Reads the journal of a state directory. To be called before the database is read: what is missing here is there.
pub(super) fn read(state_dir: &Path) -> Result<Option<Left>, Error> {
    tape::read(state_dir).map(|content| content.map(Left)).map_err(|error| journal_fault(&error))
}

impl Left {
    /// Whether all of it is in a database that is so far.
    pub(super) fn is_in(&self, mark: Option<Mark>) -> bool {
        let last = self.0.records.last().map_or(0, |(number, _)| *number);
        mark.is_none_or(|mark| mark.id != self.0.id || mark.record >= last)
    }

    /// What comes after what is in the database, in order, as far as it is whole.
    pub(super) fn after(self, mark: Option<Mark>) -> Result<Vec<Write>, Error> {
        let Left(content) = self;
        let Some(mark) = mark.filter(|mark| mark.id == content.id) else { return Ok(Vec::new()) };
        let after = content.records.into_iter().filter(|(number, _)| *number > mark.record);
        let whole = after.zip(mark.record + 1..).take_while(|((number, _), expected)| number == expected);
        let mut writes = Vec::new();
        for ((number, payload), _) in whole {
            if content.format != FORMAT {
                return Err(Error::storage(
                    None,
                    "the journal was written by another version of leasefs: start that one once, which puts it in the \
                     registry",
                ));
            }
            let decoded: Vec<Write> = postcard::from_bytes(&payload)
                .map_err(|error| Error::storage(None, format!("journal: record {number}: {error}")))?;
            writes.extend(decoded);
        }
        Ok(writes)
    }
}

/// The writes as they are done to the database.
pub(super) fn plan<'a>(writes: impl Iterator<Item = &'a Write>) -> Result<Vec<Op<'a>>, Error> {
    coalesce(writes).map_err(|Misfit { what, key, epoch }| Error::storage(None, misfit(what, key, epoch)))
}

fn journal_fault(error: &io::Error) -> Error {
    let errno = error.raw_os_error().filter(|_| {
        matches!(
            error.kind(),
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::ReadOnlyFilesystem
        )
    });
    Error::storage(errno, format!("journal: {error}"))
}
