//! Recording what was decided: the batch becomes a transaction, and whoever waits for it is told. What may come later
//! (the registry's backlog, its log) is done by [`Engine::apply`] and [`Engine::checkpoint`].

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::time::Instant;

use super::{Applied, Durability, Engine, Inner, Ready, answer};
use crate::batch::Batch;
use crate::error::Error;
use crate::ids::{Epoch, Handle, KeyId};
use crate::probe;
use crate::registry::{Backlog, Registry};
use crate::time::Now;

/// Transactions between two checkpoints.
const COMMITS_PER_CHECKPOINT: u64 = 1_000;
/// As how many transactions it counts that the registry's backlog was applied.
const COMMITS_PER_APPLY: u64 = 200;
/// How long the registry may have a backlog, in nanoseconds.
const BACKLOG_NS: u64 = 100_000_000;
/// How long to leave a backlog alone that could not be applied, in nanoseconds.
const RETRY_APPLY_NS: u64 = 500_000_000;

impl Engine {
    /// Whether somebody waits for a [`Engine::flush`].
    pub fn is_urgent(&self) -> bool {
        self.urgent.load(Ordering::Acquire)
    }

    /// Whether the next flush may take long: the disk is slow, much has to be synced, or another flush is under way.
    /// Then another thread than the one that answers reads should do it.
    pub fn is_slow(&self) -> bool {
        const SLOW_NS: u64 = 5_000_000;
        const MUCH_BYTES: u64 = 256 * 1024;
        self.commit_ns.load(Ordering::Relaxed) > SLOW_NS
            || self.inner.lock().batch.draft_bytes > MUCH_BYTES
            || self.registry.is_locked()
    }

    /// Whether a flush costs less than finding out whether there is more to go with it.
    pub fn is_quick(&self) -> bool {
        const QUICK_NS: u64 = 20_000;
        self.commit_ns.load(Ordering::Relaxed) < QUICK_NS
    }

    /// Records what was decided and answers whoever waits for it, until nobody does.
    pub fn flush(&self, now: Now) {
        loop {
            let mut ready = Ready::new();
            let mut registry = self.registry.lock();
            let (mut batch, durable) = {
                let mut inner = self.inner.lock();
                if inner.batch.is_empty() {
                    return;
                }
                let mut next = std::mem::take(&mut inner.spare);
                next.number = inner.batch.number + 1;
                let batch = std::mem::replace(&mut inner.batch, next);
                self.publish_hints(&inner);
                let durable = batch.durable && inner.config.durability == Durability::Full;
                (batch, durable)
            };
            let began = Instant::now();
            self.publish(&mut batch, durable, now, &mut ready);
            let recorded = self.record(registry.as_mut(), &batch, durable);
            let took = began.elapsed();
            let backlog = registry.backlog();
            self.expect_apply(backlog, now);
            let average = self.commit_ns.load(Ordering::Relaxed);
            let took_ns = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX / 8);
            self.commit_ns.store(average - average / 8 + took_ns / 8, Ordering::Relaxed);
            let settled = std::mem::take(&mut batch.settled);
            {
                let mut inner = self.inner.lock();
                inner.metrics.committed(durable, took);
                self.count_commits(&mut inner, u64::from(recorded.is_ok() && backlog == Backlog::None));
                inner.settle(batch, recorded, now, &mut ready);
                self.publish_hints(&inner);
            }
            drop(registry);
            answer(ready);
            for then in settled {
                then();
            }
            if !self.is_urgent() {
                return;
            }
        }
    }

    /// Makes the drafts of a batch results, files first: the rows make them count. A key whose draft cannot become one is
    /// refused by itself; it goes out of the batch, and the others in it never hear of it.
    fn publish(&self, batch: &mut Batch, durable: bool, now: Now, ready: &mut Ready) {
        let drafts = batch.drafts();
        let mut refused: BTreeMap<KeyId, Error> = BTreeMap::new();
        let mut published = Vec::new();
        for (draft, key, epoch) in drafts {
            match self.results.publish(draft, key, epoch, durable) {
                Ok(()) => {
                    published.push((draft, key, epoch));
                    probe::at(probe::PUBLISH);
                }
                Err(error) => drop(refused.insert(key, file_fault(error))),
            }
        }
        if durable
            && !published.is_empty()
            && let Err(error) = self.results.sync_names()
        {
            let error = file_fault(error);
            refused.extend(published.iter().map(|(_, key, _)| (*key, error.clone())));
        }
        if refused.is_empty() {
            return;
        }
        self.unpublish(published.into_iter().filter(|(_, key, _)| refused.contains_key(key)));
        let mut inner = self.inner.lock();
        for (key, error) in refused {
            inner.refuse(batch, key, &error, now, ready);
        }
    }

    /// Takes [`Engine::publish`] back. Where this fails too, the file is one that no row counts.
    fn unpublish(&self, drafts: impl IntoIterator<Item = (Handle, KeyId, Epoch)>) {
        for (draft, key, epoch) in drafts {
            let _ = self.results.unpublish(draft, key, epoch);
        }
    }

    /// Writes the rows; the results' files are put back when that fails.
    fn record(&self, registry: &mut dyn Registry, batch: &Batch, durable: bool) -> Result<(), Error> {
        if batch.writes.is_empty() {
            return Ok(());
        }
        probe::at(probe::BEFORE_COMMIT);
        registry.commit(&batch.writes, durable).inspect_err(|_| self.unpublish(batch.drafts()))?;
        probe::at(probe::AFTER_COMMIT);
        Ok(())
    }

    pub(super) fn count_commits(&self, inner: &mut Inner, commits: u64) {
        inner.commits += commits;
        if inner.commits >= COMMITS_PER_CHECKPOINT {
            inner.commits = 0;
            self.checkpoint_due.store(true, Ordering::Release);
        }
    }

    fn expect_apply(&self, backlog: Backlog, now: Now) {
        let by_ns = match backlog {
            Backlog::None => return,
            Backlog::Some => now.boot_ns + BACKLOG_NS,
            Backlog::Much => now.boot_ns,
        };
        self.apply_ns.fetch_min(by_ns, Ordering::SeqCst);
    }

    /// `CLOCK_BOOTTIME`, in nanoseconds, at which [`Engine::apply`] is due; `u64::MAX` for never.
    pub fn apply_ns(&self) -> u64 {
        self.apply_ns.load(Ordering::SeqCst)
    }

    /// Has `then` called once all that is recorded so far can be read from the registry by others too: by the next
    /// [`Engine::apply`], which is due.
    pub fn when_applied(&self, then: Applied) {
        self.applied.lock().push(then);
        self.apply_ns.store(0, Ordering::SeqCst);
    }

    /// Puts what the registry accepted where others read it; to be called from a thread nobody waits for. Where that
    /// fails, it is due again later.
    ///
    /// # Errors
    /// [`Error::Storage`]; nothing is lost by it.
    pub fn apply(&self, now: Now) -> Result<(), Error> {
        // What is accepted from here on may miss this one.
        self.apply_ns.store(u64::MAX, Ordering::SeqCst);
        let waiting = std::mem::take(&mut *self.applied.lock());
        let applied = self.checkpointer.lock().apply();
        match &applied {
            Ok(()) => self.count_commits(&mut self.inner.lock(), COMMITS_PER_APPLY),
            Err(_) => drop(self.apply_ns.fetch_min(now.boot_ns + RETRY_APPLY_NS, Ordering::SeqCst)),
        }
        for then in waiting {
            then(applied.clone());
        }
        applied
    }

    /// Whether the log wants [`Engine::checkpoint`].
    pub fn is_checkpoint_due(&self) -> bool {
        self.checkpoint_due.load(Ordering::Relaxed)
    }

    /// As [`Engine::is_checkpoint_due`], and says so once.
    pub fn take_checkpoint_due(&self) -> bool {
        self.checkpoint_due.swap(false, Ordering::AcqRel)
    }

    /// Moves the registry's log into its main file; to be called from a thread nobody waits for.
    ///
    /// # Errors
    /// [`Error::Storage`]; nothing is lost by it.
    pub fn checkpoint(&self) -> Result<(), Error> {
        self.checkpointer.lock().run()
    }
}

/// A fault of a result's file, as everybody in its batch is told of it: a draft that is gone is no `ENOENT` to a claim.
fn file_fault(error: std::io::Error) -> Error {
    use std::io::ErrorKind::{QuotaExceeded, StorageFull};
    let errno = error.raw_os_error().filter(|_| matches!(error.kind(), StorageFull | QuotaExceeded));
    Error::storage(errno, format!("results: {error}"))
}
