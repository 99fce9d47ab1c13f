//! What the engine shows of itself: results of ended attempts, events, counters.

use std::time::Duration;

use super::*;
use crate::machine::State;

impl Engine {
    /// Size in bytes, commit time in Unix milliseconds and uid of an attempt's result.
    ///
    /// # Errors
    /// [`Error::Storage`].
    pub fn result_of(&self, key: KeyId, epoch: Epoch) -> Result<Option<StoredResult>, Error> {
        let newest = self.knowing(Need::Key(key))?.keys.get(&key).map(|entry| {
            let attempt = entry.state.attempt.as_ref().filter(|attempt| attempt.epoch == epoch);
            let known = attempt.map(|a| {
                a.result.map(|r| StoredResult { size: r.size, committed_ms: r.committed_ms, uid: a.claimant.uid })
            });
            (entry.state.epoch, known)
        });
        match newest {
            None => Ok(None),
            Some((last, _)) if epoch > last || epoch == Epoch(0) => Ok(None),
            Some((_, Some(known))) => Ok(known),
            Some((_, None)) => self.reader.lock().result(key, epoch),
        }
    }

    /// The epochs above `after` that have a result, lowest first.
    ///
    /// # Errors
    /// [`Error::Storage`].
    pub fn results_of(&self, key: KeyId, after: Epoch, limit: usize) -> Result<Vec<Epoch>, Error> {
        self.reader.lock().results(key, after, limit)
    }

    /// Counts and announces a refusal that the state machine did not see.
    pub fn note_stale(&self, key: KeyId, epoch: Epoch, now: Now) {
        // Of a key that cannot be read, nothing can be said.
        let Ok(mut inner) = self.knowing(Need::Key(key)) else { return };
        inner.note(now, Kind::Stale, key, epoch, Detail::None);
        self.publish_hints(&inner);
    }

    /// The number of the next event.
    pub fn next_event(&self) -> u64 {
        self.inner.lock().events.next()
    }

    /// Events from a number on, of the keys the caller may see: see [`Events::read`].
    pub fn events(&self, from: u64, limit: usize, who: &Credentials) -> (String, u64) {
        let inner = self.inner.lock();
        inner.events.read(from, limit, |key| inner.namespaces.may_see(who, key.split().0))
    }

    /// The keys whose state changed since the last call.
    pub fn take_changed(&self) -> Vec<KeyId> {
        std::mem::take(&mut self.inner.lock().changed)
    }

    /// `.leasefs/metrics`.
    ///
    /// # Errors
    /// [`Error::Storage`].
    pub fn metrics(&self, outside: &Outside, now: Now) -> Result<String, Error> {
        let free_bytes = self.results.free_bytes();
        let inner = self.knowing(Need::All)?;
        // Whatever is alive has a deadline: so this goes through those, not through all keys.
        let alive = inner.deadlines.iter().filter_map(|(_, key)| inner.keys.get(key));
        let oldest = inner.waiting.oldest_ns().map(|since_ns| now.boot_ns.saturating_sub(since_ns));
        let gauges = Gauges {
            held: inner.held,
            waiting: inner.waiting.len(),
            oldest_wait: Duration::from_nanos(oldest.unwrap_or(0)),
            orphaned: inner.orphans.len(),
            shared: inner.shared,
            reporting: alive.filter(|entry| entry.state.state(now) == State::Reporting).count(),
            keys: inner.keys.len(),
            free_bytes,
        };
        Ok(inner.metrics.render(&gauges, outside))
    }

    /// Keys that ever were.
    ///
    /// # Errors
    /// [`Error::Storage`].
    pub fn key_count(&self) -> Result<usize, Error> {
        Ok(self.knowing(Need::All)?.keys.len())
    }

    /// Most bytes in a result.
    pub fn max_result(&self) -> u64 {
        self.inner.lock().config.max_result
    }
}
