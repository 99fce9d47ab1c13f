//! Taking away what the registry keeps of ended attempts, while the tree is served or not.
//!
//! A step at a time, each short: the registry is ours for as long as one small transaction takes, and claims that come
//! meanwhile wait no longer than for any other. The order within a step is what makes a crash harmless:
//! 1. what is in use is passed over (an open draft, an attempt that is alive);
//! 2. rows go, synced, and the names of their results' files are noted in the same transaction;
//! 3. what is in memory follows, and is announced;
//! 4. the files go;
//! 5. the next step notes that they are gone. A server that starts goes on with those noted ([`Engine::sweep`]).
//!
//! Backups and checks read rows first and files after. They and a prune keep each other off: [`ResultsLock`].

use std::collections::HashSet;

use super::Engine;
use super::unread::Need;
use crate::error::Error;
use crate::events::{self, Kind};
use crate::ids::{Epoch, KeyId};
use crate::metrics::Detail;
use crate::registry::prune::{Bounds, Candidate, Limits, Place, Pruned};
use crate::registry::{Read, Registry};
use crate::results::{Results, ResultsLock};
use crate::time::Now;

/// What one step takes on. So many rows are deleted in about the time that a sync takes.
const STEP: Limits = Limits { candidates: 64, keys: 4_096 };

/// As how many transactions a step counts: it changes as many pages.
const COMMITS_PER_STEP: u64 = 20;
/// Steps between two checkpoints where nobody else does any.
const STEPS_PER_CHECKPOINT: usize = 64;

/// A result's file, by its key and attempt.
pub type ResultFile = (KeyId, Epoch);

/// One prune, from its beginning to its end.
pub struct Prune {
    bounds: Bounds,
    reader: Box<dyn Read>,
    place: Place,
    /// Files that an earlier prune left.
    left: Vec<ResultFile>,
    /// Files that are gone, which is not noted yet.
    files_gone: Vec<ResultFile>,
    /// What went of the key that was come to last: told of once the next is come to.
    last: Option<(KeyId, u64, u64)>,
    _lock: ResultsLock,
}

impl Engine {
    /// Begins a prune; [`Engine::prune_step`] does it.
    ///
    /// # Errors
    /// [`Error::Busy`] during another one, a backup or a check; [`Error::Storage`].
    pub fn begin_prune(&self, bounds: Bounds, now: Now) -> Result<Prune, Error> {
        let lock = self.results.lock_exclusive()?;
        // What ended a moment ago counts as well.
        self.flush(now);
        self.apply(now)?;
        let mut reader = self.registry.lock().reader()?;
        let left = reader.pruned_files()?;
        Ok(Prune { bounds, reader, place: Place::default(), left, files_gone: Vec::new(), last: None, _lock: lock })
    }

    /// Does the next part of a prune; true while there is more. To be called from a thread nobody waits for. `is_read`
    /// gives the results that are open for reading, by whoever began before it is called: their files stay until a later
    /// prune or start.
    ///
    /// # Errors
    /// [`Error::Storage`]; what went before it stays gone.
    pub fn prune_step(
        &self,
        prune: &mut Prune,
        is_read: impl Fn() -> HashSet<ResultFile>,
        now: Now,
    ) -> Result<bool, Error> {
        prune.files_gone.extend(remove_files(&self.results, std::mem::take(&mut prune.left), &is_read));
        let portion = prune.reader.prunable(prune.place, &prune.bounds, STEP)?;
        // Held until the state in memory has followed: nothing else is recorded in between, nor taken back.
        let mut registry = self.registry.lock();
        let candidates = self.not_in_use(portion.candidates)?;
        let nothing = candidates.is_empty() && prune.files_gone.is_empty();
        let pruned =
            if nothing { Vec::new() } else { registry.prune(&candidates, &std::mem::take(&mut prune.files_gone))? };
        crate::probe::at(crate::probe::PRUNED);
        self.follow(prune, &pruned, portion.next.is_none(), now);
        drop(registry);
        prune.files_gone = remove(&self.results, &pruned, is_read);
        if let Some(next) = portion.next {
            prune.place = next;
            return Ok(true);
        }
        // What has to be noted of the last files can be noted at once.
        if !prune.files_gone.is_empty() {
            self.registry.lock().prune(&[], &std::mem::take(&mut prune.files_gone))?;
        }
        Ok(false)
    }

    /// What can go, of candidates that were found a moment ago.
    fn not_in_use(&self, candidates: Vec<Candidate>) -> Result<Vec<Candidate>, Error> {
        let mut free = Vec::with_capacity(candidates.len());
        for candidate in candidates {
            let inner = self.knowing(Need::Key(candidate.key_id))?;
            let state = inner.keys.get(&candidate.key_id).map(|entry| &entry.state);
            if !state.is_some_and(|state| state.is_in_use(candidate.epoch)) {
                free.push(candidate);
            }
        }
        Ok(free)
    }

    /// Has memory follow the registry, and tells of each key once all of it was come to.
    fn follow(&self, prune: &mut Prune, pruned: &[Pruned], is_end: bool, now: Now) {
        let mut inner = self.inner.lock();
        let mut told = Vec::new();
        for Pruned { key, attempts, results, latest } in pruned {
            let watched = inner.watched;
            if let Some(entry) = inner.keys.get_mut(key) {
                let changes = entry.state.changes;
                entry.state.forget_results(results, *latest);
                if watched && entry.state.changes != changes {
                    inner.changed.push(*key);
                }
            }
            // What is gathering may be taken back, to states that are not to bring back what is gone.
            inner.batch.amend(*key, |state| state.forget_results(results, *latest));
            let (attempts, results) = (*attempts, results.len() as u64);
            match &mut prune.last {
                Some((last, a, r)) if last == key => (*a, *r) = (*a + attempts, *r + results),
                last => told.extend(last.replace((*key, attempts, results))),
            }
        }
        if is_end {
            told.extend(prune.last.take());
        }
        for (key, attempts, results) in told.into_iter().filter(|(_, attempts, results)| attempts + results > 0) {
            let epoch = inner.keys.get(&key).map_or(Epoch(0), |entry| entry.state.epoch);
            inner.announce(now, Kind::Pruned, key, epoch, Detail::Pruned(events::Pruned { attempts, results }));
        }
        self.count_commits(&mut inner, if pruned.is_empty() { 0 } else { COMMITS_PER_STEP });
        self.publish_hints(&inner);
    }

    /// Deletes the files that an earlier prune left, but those that are open for reading. To be called once the open files
    /// of a server before are known. Nothing happens while somebody reads all of them: a later sweep does it.
    ///
    /// # Errors
    /// [`Error::Storage`].
    pub fn sweep(&self, is_read: impl FnOnce() -> HashSet<ResultFile>) -> Result<(), Error> {
        let left = self.reader.lock().pruned_files()?;
        if left.is_empty() {
            return Ok(());
        }
        let Ok(_lock) = self.results.lock_exclusive() else { return Ok(()) };
        let gone = remove_files(&self.results, left, is_read);
        self.registry.lock().prune(&[], &gone).map(drop)
    }
}

/// Prunes a state directory that nobody serves; the lock on its results was taken before the registry was opened.
///
/// # Errors
/// [`Error::Storage`]; what went before it stays gone.
pub fn prune_unserved(
    registry: &mut dyn Registry,
    results: &Results,
    bounds: &Bounds,
    _lock: &ResultsLock,
) -> Result<(), Error> {
    let mut reader = registry.reader()?;
    let mut files_gone = remove_files(results, reader.pruned_files()?, HashSet::new);
    let mut checkpointer = registry.checkpointer()?;
    let mut place = Place::default();
    for step in 1_usize.. {
        let portion = reader.prunable(place, bounds, STEP)?;
        let pruned = registry.prune(&portion.candidates, &files_gone)?;
        crate::probe::at(crate::probe::PRUNED);
        files_gone = remove(results, &pruned, HashSet::new);
        let Some(next) = portion.next else { break };
        place = next;
        if step % STEPS_PER_CHECKPOINT == 0 {
            checkpointer.run()?;
        }
    }
    registry.prune(&[], &files_gone)?;
    // A copy from before it is not to be taken for this one.
    checkpointer.run()
}

fn remove(results: &Results, pruned: &[Pruned], is_read: impl FnOnce() -> HashSet<ResultFile>) -> Vec<ResultFile> {
    let files = pruned.iter().flat_map(|of_key| of_key.results.iter().map(|(epoch, _)| (of_key.key, *epoch)));
    remove_files(results, files.collect(), is_read)
}

/// Deletes files; those that are gone.
fn remove_files(
    results: &Results,
    mut files: Vec<ResultFile>,
    is_read: impl FnOnce() -> HashSet<ResultFile>,
) -> Vec<ResultFile> {
    if files.is_empty() {
        return files;
    }
    let read = is_read();
    files.retain(|(key, epoch)| !read.contains(&(*key, *epoch)) && results.remove(*key, *epoch).is_ok());
    // Whatever is noted as gone must not come back with the power: nobody would delete it again.
    if results.sync_names().is_err() {
        files.clear();
    }
    files
}
