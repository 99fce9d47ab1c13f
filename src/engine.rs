//! The facade: owns the only lock, runs the state machines, and decides who is told what when.
//!
//! # Guarantees
//! - Whoever is told of a grant or a commit is told after it was recorded as durably as [`Config::durability`] says.
//! - A commit that fails grants nothing: see [`crate::batch`].
//! - Inputs of a key take effect in the order of the calls.
//!
//! Callbacks run without the lock held, on the thread that settled them. [`Engine::flush`] does the I/O; whoever calls
//! it decides which thread pays.

mod settle;

use std::collections::{BTreeSet, HashMap};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use parking_lot::Mutex;

use crate::batch::{Answer, Batch, Done, Logged, Note, Settled, Waiting};
use crate::error::Error;
use crate::events::{Events, Kind};
use crate::ids::{Epoch, Handle, KeyId, NamespaceId, WaiterId};
use crate::key::Key;
use crate::machine::{Change, Context, Input, KeyState, Mode, Reply, Step};
use crate::metrics::{Gauges, Metrics};
use crate::namespaces::{Credentials, Namespaces, Node};
use crate::registry::{Checkpoint, Loaded, NamespaceRow, Read, Registry, StoredResult, Write};
use crate::results::Results;
use crate::time::Now;
use crate::ttl::Ttl;

/// How long a write nobody waits for may stay in memory, in nanoseconds.
const LAZY_NS: u64 = 20_000_000;
/// Closes that may be unanswered; the kernel's own bound is at least 12.
const MAX_CLOSES: usize = 8;
/// Transactions between two checkpoints.
const COMMITS_PER_CHECKPOINT: u64 = 1_000;

/// What a success means for a power cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Durability {
    /// Grants and results are on disk before anyone is told.
    Full,
    /// They survive the end of the server's process, not of the machine.
    Process,
}

/// The engine's settings.
#[derive(Clone, Debug)]
pub struct Config {
    /// TTL of a lease where no namespace sets one.
    pub ttl: Ttl,
    /// What a success means for a power cut.
    pub durability: Durability,
    /// Most bytes in a result.
    pub max_result: u64,
    /// Most leases one uid may hold.
    pub max_keys: usize,
    /// Most lock requests of one uid that may wait.
    pub max_waiters: usize,
    /// The root namespace on a new state directory.
    pub root: NamespaceRow,
}

/// What the engine keeps of a key.
pub struct KeyEntry {
    /// The key.
    pub key: Key,
    /// The namespace it is in.
    pub namespace: NamespaceId,
    /// Its state.
    pub state: KeyState,
    /// The batch with its newest change that could still be taken back.
    unsettled: u64,
    armed_ns: Option<u64>,
    /// The uid that the live attempt counts against.
    counted: Option<u32>,
    /// Open claim handles.
    opens: usize,
}

struct Inner {
    config: Config,
    namespaces: Namespaces,
    keys: HashMap<KeyId, KeyEntry>,
    last_key: u64,
    deadlines: BTreeSet<(u64, KeyId)>,
    waiting: Waiting,
    held_by_uid: HashMap<u32, usize>,
    held: usize,
    batch: Batch,
    /// Batches up to this one are settled.
    settled: u64,
    /// The newest batch that removes a namespace.
    removes: u64,
    retry_ns: Option<u64>,
    commits: u64,
    events: Events,
    metrics: Metrics,
    changed: Vec<KeyId>,
    watched: bool,
}

/// Answers to give once the lock is free.
type Ready = Vec<(Done, Result<Reply, Error>)>;

/// The engine of one state directory.
pub struct Engine {
    inner: Mutex<Inner>,
    registry: Mutex<Box<dyn Registry>>,
    reader: Mutex<Box<dyn Read>>,
    checkpointer: Mutex<Box<dyn Checkpoint>>,
    /// Drafts and results.
    pub results: Results,
    next_handle: AtomicU64,
    next_waiter: AtomicU64,
    wake_ns: AtomicU64,
    deadline_ns: AtomicU64,
    urgent: AtomicBool,
    checkpoint_due: AtomicBool,
    /// Moving average of a commit, in nanoseconds.
    commit_ns: AtomicU64,
}

impl Engine {
    /// Builds the engine from what the registry holds.
    ///
    /// # Errors
    /// [`Error::Storage`] where the registry cannot be read or written.
    pub fn open(
        config: Config,
        mut registry: Box<dyn Registry>,
        results: Results,
        boot_id: &str,
        now: Now,
    ) -> Result<Engine, Error> {
        let loaded = registry.load(boot_id, now)?;
        let generation = loaded.generation;
        let (reader, checkpointer) = (registry.reader()?, registry.checkpointer()?);
        let mut inner = Inner::new(config, loaded, now);
        let writes = std::mem::take(&mut inner.batch.writes);
        registry.commit(&writes, false)?;
        inner.batch = Batch::new(1);
        let engine = Engine {
            inner: Mutex::new(inner),
            registry: Mutex::new(registry),
            reader: Mutex::new(reader),
            checkpointer: Mutex::new(checkpointer),
            results,
            // 24 bits of generation, 40 of handles: no two servers on a state directory share one.
            next_handle: AtomicU64::new(generation << 40 | 1),
            next_waiter: AtomicU64::new(1),
            wake_ns: AtomicU64::new(u64::MAX),
            deadline_ns: AtomicU64::new(u64::MAX),
            urgent: AtomicBool::new(false),
            checkpoint_due: AtomicBool::new(false),
            commit_ns: AtomicU64::new(0),
        };
        engine.publish_hints(&engine.inner.lock());
        Ok(engine)
    }

    /// A handle no other open file has or had.
    pub fn new_handle(&self) -> Handle {
        Handle(self.next_handle.fetch_add(1, Ordering::Relaxed))
    }

    /// A number for a request that may have to wait.
    pub fn new_waiter(&self) -> WaiterId {
        WaiterId(self.next_waiter.fetch_add(1, Ordering::Relaxed))
    }

    /// Applies an input to a key. `done` is called with the answer: at once, once it is recorded, or when its turn in
    /// line comes.
    pub fn submit(&self, key: KeyId, input: Input, now: Now, done: Done) {
        let mut ready = Ready::new();
        {
            let mut inner = self.inner.lock();
            inner.submit(key, input, now, done, &mut ready);
            self.publish_hints(&inner);
        }
        answer(ready);
    }

    /// Ends a waiting request with `EINTR`. Nothing happens where it is no longer waiting.
    pub fn interrupt(&self, waiter: WaiterId, now: Now) {
        let key = self.inner.lock().waiting.key(waiter);
        if let Some(key) = key {
            self.submit(key, Input::Cancel(waiter), now, Box::new(|_| ()));
        }
    }

    /// Applies the expiries that are due. True if a [`Engine::flush`] is due as well: somebody waits for it, or writes
    /// have waited long enough.
    #[must_use]
    pub fn tick(&self, now: Now) -> bool {
        let due: Vec<KeyId> = {
            let inner = self.inner.lock();
            inner.deadlines.range(..=(now.boot_ns, KeyId(u64::MAX))).map(|(_, key)| *key).collect()
        };
        for key in due {
            self.submit(key, Input::Tick, now, Box::new(|_| ()));
        }
        let inner = self.inner.lock();
        let waited = now.boot_ns.saturating_sub(inner.batch.since_ns) >= LAZY_NS;
        let may = inner.retry_ns.is_none_or(|at| at <= now.boot_ns);
        !inner.batch.is_empty() && (inner.batch.urgent || waited && may)
    }

    /// `CLOCK_BOOTTIME`, in nanoseconds, at which [`Engine::tick`] has something to do; `u64::MAX` for never.
    pub fn wake_ns(&self) -> u64 {
        self.wake_ns.load(Ordering::SeqCst)
    }

    /// `CLOCK_BOOTTIME`, in nanoseconds, of the next expiry; `u64::MAX` for none.
    pub fn deadline_ns(&self) -> u64 {
        self.deadline_ns.load(Ordering::SeqCst)
    }

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
                let next = Batch::new(inner.batch.number + 1);
                let batch = std::mem::replace(&mut inner.batch, next);
                self.publish_hints(&inner);
                let durable = batch.durable && inner.config.durability == Durability::Full;
                (batch, durable)
            };
            let began = Instant::now();
            let recorded = self.record(registry.as_mut(), &batch, durable);
            let took = began.elapsed();
            let average = self.commit_ns.load(Ordering::Relaxed);
            let took_ns = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX / 8);
            self.commit_ns.store(average - average / 8 + took_ns / 8, Ordering::Relaxed);
            let settled = std::mem::take(&mut batch.settled);
            {
                let mut inner = self.inner.lock();
                inner.metrics.commit_time += took;
                inner.settle(batch, recorded, now, &mut ready);
                if inner.commits >= COMMITS_PER_CHECKPOINT {
                    inner.commits = 0;
                    self.checkpoint_due.store(true, Ordering::Release);
                }
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

    /// Files first, then the rows that make them count; the files are put back when the rows cannot be written.
    fn record(&self, registry: &mut dyn Registry, batch: &Batch, durable: bool) -> Result<(), Error> {
        let drafts = batch.drafts();
        let mut published = 0;
        let publish = || -> Result<(), Error> {
            for (draft, key, epoch) in &drafts {
                self.results.publish(*draft, *key, *epoch, durable).map_err(file_fault)?;
                published += 1;
            }
            if durable && !drafts.is_empty() {
                self.results.sync_names().map_err(file_fault)?;
            }
            if batch.writes.is_empty() { Ok(()) } else { registry.commit(&batch.writes, durable) }
        };
        let recorded = { publish }();
        if recorded.is_err() {
            for (draft, key, epoch) in &drafts[..published] {
                // Should this fail too, the file is one that no row counts.
                let _ = self.results.unpublish(*draft, *key, *epoch);
            }
        }
        recorded
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

    fn publish_hints(&self, inner: &Inner) {
        self.urgent.store(inner.batch.urgent, Ordering::Release);
        let deadline_ns = inner.deadlines.first().map_or(u64::MAX, |(at, _)| *at);
        let lazy_ns = match (inner.batch.is_empty(), inner.retry_ns) {
            (true, _) => u64::MAX,
            (false, Some(at)) => at,
            (false, None) => inner.batch.since_ns + LAZY_NS,
        };
        self.deadline_ns.store(deadline_ns, Ordering::SeqCst);
        self.wake_ns.store(deadline_ns.min(lazy_ns), Ordering::SeqCst);
    }

    // ---- naming -------------------------------------------------------------------------------------------------

    /// What a name in a namespace stands for; removed namespaces stand for nothing.
    ///
    /// # Errors
    /// [`Error::BadKey`] for a name §1 rules out.
    pub fn child(&self, parent: NamespaceId, name: &[u8]) -> Result<Option<Node>, Error> {
        let name = crate::key::part(name)?;
        let inner = self.inner.lock();
        Ok(inner.namespaces.child(parent, name).filter(|node| inner.is_present(*node)))
    }

    /// The number of a key that is about to be opened, given one on the first call for it. Each call is matched by an
    /// [`Input::Close`] or by [`Engine::not_opened`].
    ///
    /// # Errors
    /// [`Error::Exists`] where the path is a namespace, [`Error::BadKey`] for a path §1 rules out.
    pub fn open_name(&self, parent: NamespaceId, name: &[u8], now: Now) -> Result<KeyId, Error> {
        let mut inner = self.inner.lock();
        let id = inner.intern(parent, name, now)?;
        inner.opened(id);
        self.publish_hints(&inner);
        Ok(id)
    }

    /// As [`Engine::open_name`], for a key whose number is known.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    pub fn open_key(&self, key: KeyId) -> Result<(), Error> {
        if self.inner.lock().opened(key) { Ok(()) } else { Err(Error::NotFound) }
    }

    /// Takes [`Engine::open_name`] back: the open was refused.
    pub fn not_opened(&self, key: KeyId, now: Now) {
        let mut inner = self.inner.lock();
        inner.closed(key, now);
        self.publish_hints(&inner);
    }

    /// The number of a key by its path.
    pub fn find(&self, key: &Key) -> Option<KeyId> {
        let inner = self.inner.lock();
        let (above, name) = key.split();
        match inner.namespaces.child(inner.namespaces.find(above)?, name)? {
            Node::Key(id) => Some(id),
            Node::Namespace(_) => None,
        }
    }

    /// Looks at a key and the tree around it.
    pub fn view<R>(&self, key: KeyId, look: impl FnOnce(&KeyEntry, &Namespaces) -> R) -> Option<R> {
        let inner = self.inner.lock();
        inner.keys.get(&key).map(|entry| look(entry, &inner.namespaces))
    }

    /// Looks at the tree of namespaces, and at keys by their number.
    pub fn look<R>(&self, look: impl FnOnce(&Namespaces, &HashMap<KeyId, KeyEntry>) -> R) -> R {
        let inner = self.inner.lock();
        look(&inner.namespaces, &inner.keys)
    }

    /// Calls `then` when everything decided so far is recorded; at once where nothing is outstanding.
    pub fn when_recorded(&self, then: Settled) {
        let mut inner = self.inner.lock();
        if inner.batch.is_empty() && inner.settled + 1 == inner.batch.number {
            drop(inner);
            return then();
        }
        inner.batch.urgent = true;
        inner.batch.settled.push(then);
        self.publish_hints(&inner);
    }

    /// Whether anybody asks for [`Engine::take_changed`]; until then nothing is kept for it.
    pub fn set_watched(&self, watched: bool) {
        let mut inner = self.inner.lock();
        inner.watched = watched;
        if !watched {
            inner.changed.clear();
        }
    }

    /// Calls `then` when everything decided about a key so far is recorded or taken back; at once if it is.
    pub fn when_settled(&self, key: KeyId, now: Now, then: Settled) {
        let mut inner = self.inner.lock();
        if inner.keys.get(&key).is_none_or(|entry| entry.unsettled <= inner.settled) {
            drop(inner);
            return then();
        }
        inner.touch_batch(now);
        inner.batch.urgent = true;
        inner.batch.settled.push(then);
        self.publish_hints(&inner);
    }

    // ---- namespaces ---------------------------------------------------------------------------------------------

    /// Makes a namespace. `done` gets the row once it is recorded.
    ///
    /// # Errors
    /// [`Error::Exists`] where the name is taken, also by a key that ever was; [`Error::BadKey`].
    pub fn mkdir(
        &self,
        parent: NamespaceId,
        name: &[u8],
        mode: u32,
        who: &Credentials,
        now: Now,
        done: Done,
    ) -> Result<NamespaceId, Error> {
        let mut inner = self.inner.lock();
        let row = inner.namespaces.plan_mkdir(parent, name, mode, who, now.wall_ms * 1_000_000)?;
        let id = row.id;
        inner.set_namespace(row, now, done);
        inner.touch_mtime(parent, now);
        self.publish_hints(&inner);
        Ok(id)
    }

    /// Removes a namespace; its keys keep their epochs.
    ///
    /// # Errors
    /// [`Error::NotEmpty`] while a key in it is held or finished, or a namespace is in it; [`Error::NotPermitted`] for
    /// anybody but root and the owners of it and of the namespace above, once there were keys in it;
    /// [`Error::NotFound`].
    pub fn rmdir(
        &self,
        parent: NamespaceId,
        name: &[u8],
        who: &Credentials,
        now: Now,
        done: Done,
    ) -> Result<(), Error> {
        let mut inner = self.inner.lock();
        let Some(Node::Namespace(id)) = inner.namespaces.child(parent, crate::key::part(name)?) else {
            return Err(Error::NotFound);
        };
        let busy = !inner.namespaces.is_empty(id) || inner.is_in_use(id);
        let row = inner.namespaces.get(id).map(|namespace| namespace.row.clone()).ok_or(Error::NotFound)?;
        if !row.present {
            return Err(Error::NotFound);
        }
        if busy {
            return Err(Error::NotEmpty);
        }
        // Whoever makes it again owns it, with the results of the keys that were in it.
        let owner_above = inner.namespaces.get(parent).map(|above| above.row.uid);
        let owns = who.uid == 0 || who.uid == row.uid || owner_above == Some(who.uid);
        if inner.namespaces.has_children(id) && !owns {
            return Err(Error::NotPermitted);
        }
        inner.removes = inner.batch.number;
        inner.set_namespace(NamespaceRow { present: false, ttl_ms: None, ..row }, now, done);
        inner.touch_mtime(parent, now);
        self.publish_hints(&inner);
        Ok(())
    }

    /// Changes a namespace's attributes.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    pub fn change_namespace(
        &self,
        id: NamespaceId,
        now: Now,
        change: impl FnOnce(&mut NamespaceRow),
        done: Done,
    ) -> Result<(), Error> {
        let mut inner = self.inner.lock();
        let mut row = inner.namespaces.get(id).map(|namespace| namespace.row.clone()).ok_or(Error::NotFound)?;
        change(&mut row);
        row.ctime_ns = now.wall_ms * 1_000_000;
        inner.set_namespace(row, now, done);
        self.publish_hints(&inner);
        Ok(())
    }

    // ---- results of ended attempts ------------------------------------------------------------------------------

    /// Size in bytes, commit time in Unix milliseconds and uid of an attempt's result.
    ///
    /// # Errors
    /// [`Error::Storage`].
    pub fn result_of(&self, key: KeyId, epoch: Epoch) -> Result<Option<StoredResult>, Error> {
        let newest = self.view(key, |entry, _| {
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

    // ---- what others see ----------------------------------------------------------------------------------------

    /// Counts and announces a refusal that the state machine did not see.
    pub fn note_stale(&self, key: KeyId, epoch: Epoch, now: Now) {
        let mut inner = self.inner.lock();
        inner.note(now, Kind::Stale, key, epoch);
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
    pub fn metrics(&self) -> String {
        let inner = self.inner.lock();
        inner.metrics.render(Gauges { held: inner.held, waiting: inner.waiting.len(), keys: inner.keys.len() })
    }

    /// Keys that ever were.
    pub fn key_count(&self) -> usize {
        self.inner.lock().keys.len()
    }

    /// Most bytes in a result.
    pub fn max_result(&self) -> u64 {
        self.inner.lock().config.max_result
    }
}

fn answer(ready: Ready) {
    for (done, result) in ready {
        done(result);
    }
}

impl Inner {
    fn new(config: Config, loaded: Loaded, now: Now) -> Inner {
        let defaults = [0o777, 0o700];
        let root_is_new = !loaded.namespaces.iter().any(|row| row.id == NamespaceId::ROOT);
        let root = config.root.clone();
        let mut inner = Inner {
            namespaces: Namespaces::load(loaded.namespaces, root.clone()),
            config,
            keys: HashMap::new(),
            last_key: 0,
            deadlines: BTreeSet::new(),
            waiting: Waiting::default(),
            held_by_uid: HashMap::new(),
            held: 0,
            batch: Batch::new(1),
            settled: 0,
            removes: 0,
            retry_ns: None,
            commits: 0,
            events: Events::default(),
            metrics: Metrics::default(),
            changed: Vec::new(),
            watched: false,
        };
        let stored = inner.namespaces.get(NamespaceId::ROOT).map_or_else(|| root.clone(), |root| root.row.clone());
        // A mode nobody chose follows --allow-other.
        if root_is_new || stored.mode != root.mode && defaults.contains(&stored.mode) {
            let row = NamespaceRow { mode: root.mode, ..stored };
            inner.namespaces.set(row.clone());
            inner.batch.writes.push(Write::Namespace(row));
        }
        for known in loaded.keys {
            let id = KeyId(known.row.id);
            inner.last_key = inner.last_key.max(id.0);
            let (above, name) = known.row.key.split();
            let Some(namespace) = inner.namespaces.find(above) else { continue };
            inner.namespaces.link(namespace, name.into(), Node::Key(id));
            let mut state = KeyState {
                epoch: Epoch(known.row.epoch),
                attempt: known.attempt,
                previous_outcome: known.previous_outcome,
                finished: known.row.finished,
                latest_result: known.latest_result,
                ..KeyState::default()
            };
            inner.adopt(id, &mut state, now);
            let entry = KeyEntry {
                key: known.row.key,
                namespace,
                state,
                unsettled: 0,
                armed_ns: None,
                counted: None,
                opens: 0,
            };
            inner.keys.insert(id, entry);
            inner.refresh(id);
        }
        inner
    }

    /// An attempt that was alive when the last server went: its connection is gone with it. The holder may still be
    /// at work, so it stays held until its TTL, an eviction or a reboot (§5); a draft without its handle is dropped.
    fn adopt(&mut self, id: KeyId, state: &mut KeyState, now: Now) {
        let Some(attempt) = state.attempt.as_mut().filter(|attempt| attempt.ended.is_none()) else { return };
        state.changed_at = attempt.since;
        if attempt.held {
            attempt.orphaned = true;
            return;
        }
        let outcome = if attempt.result.is_some() {
            crate::machine::Outcome::Completed
        } else {
            crate::machine::Outcome::Released
        };
        attempt.outcome = Some(outcome);
        attempt.ended = Some(now);
        state.finished = attempt.result.is_some();
        self.batch.writes.push(Write::End(id, Box::new(attempt.clone())));
    }

    fn is_present(&self, node: Node) -> bool {
        match node {
            Node::Namespace(id) => self.namespaces.get(id).is_some_and(|namespace| namespace.row.present),
            Node::Key(_) => true,
        }
    }

    fn intern(&mut self, parent: NamespaceId, name: &[u8], now: Now) -> Result<KeyId, Error> {
        let above = self.namespaces.get(parent).filter(|namespace| namespace.row.present).ok_or(Error::NotFound)?;
        let key = Key::join(&above.row.path, name)?;
        let (_, name) = key.split();
        match self.namespaces.child(parent, name) {
            Some(Node::Key(id)) => return Ok(id),
            // A removed namespace that has had keys keeps its name: they would be found nowhere. So does one that may
            // come back because its removal is not recorded yet.
            Some(Node::Namespace(id))
                if self.is_present(Node::Namespace(id))
                    || self.namespaces.has_children(id)
                    || self.removes > self.settled =>
            {
                return Err(Error::Exists);
            }
            Some(Node::Namespace(_)) | None => {}
        }
        if self.last_key >= KeyId::MAX.0 {
            return Err(Error::Limit("no number is left for a new key"));
        }
        self.last_key += 1;
        let id = KeyId(self.last_key);
        self.namespaces.link(parent, name.into(), Node::Key(id));
        self.touch_batch(now);
        self.batch.writes.push(Write::Key(id, key.clone()));
        let entry = KeyEntry {
            key,
            namespace: parent,
            state: KeyState::default(),
            unsettled: 0,
            armed_ns: None,
            counted: None,
            opens: 0,
        };
        self.keys.insert(id, entry);
        Ok(id)
    }

    fn opened(&mut self, id: KeyId) -> bool {
        let entry = self.keys.get_mut(&id);
        entry.map(|entry| entry.opens += 1).is_some()
    }

    /// A handle of a key is gone. A key that was opened, never claimed, and is in nobody's use is forgotten.
    fn closed(&mut self, id: KeyId, now: Now) {
        if let Some(entry) = self.keys.get_mut(&id) {
            entry.opens = entry.opens.saturating_sub(1);
        }
        self.forget_unused(id, now);
    }

    fn forget_unused(&mut self, id: KeyId, now: Now) {
        let Some(entry) = self.keys.get(&id) else { return };
        if entry.opens > 0 || entry.state.epoch != Epoch(0) || entry.unsettled > self.settled {
            return;
        }
        let (namespace, name) = (entry.namespace, entry.key.split().1.to_owned());
        self.keys.remove(&id);
        self.namespaces.unlink(namespace, &name, Node::Key(id));
        self.touch_batch(now);
        self.batch.writes.push(Write::Forget(id));
    }

    /// Whether anybody shares or waits for a key of a namespace: it has no file, but it is in use.
    fn is_in_use(&self, id: NamespaceId) -> bool {
        self.namespaces.list(id, 0).any(|node| match node {
            Node::Key(key) => self.keys.get(&key).is_some_and(|entry| !entry.state.sharers.is_empty()),
            Node::Namespace(_) => false,
        })
    }

    fn touch_batch(&mut self, now: Now) {
        if self.batch.is_empty() {
            self.batch.since_ns = now.boot_ns;
        }
    }

    fn set_namespace(&mut self, row: NamespaceRow, now: Now, done: Done) {
        self.touch_batch(now);
        let id = row.id;
        self.batch.writes.push(Write::Namespace(row.clone()));
        let before = self.namespaces.set(row);
        self.batch.remember_namespace(id, before);
        self.batch.answers.push(Answer { done, reply: Ok(Reply::Done), key: None, fact: false });
        self.batch.urgent = true;
    }

    fn touch_mtime(&mut self, id: NamespaceId, now: Now) {
        if let Some(mut row) = self.namespaces.get(id).map(|namespace| namespace.row.clone()) {
            row.mtime_ns = now.wall_ms * 1_000_000;
            row.ctime_ns = row.mtime_ns;
            self.batch.writes.push(Write::Namespace(row.clone()));
            let before = self.namespaces.set(row);
            self.batch.remember_namespace(id, before);
        }
    }

    fn submit(&mut self, id: KeyId, input: Input, now: Now, done: Done, ready: &mut Ready) {
        let input = match self.check_limits(id, input) {
            Ok(input) => input,
            Err(error) => return ready.push((done, Err(error))),
        };
        let waiter = match &input {
            Input::Lock { wait: Some(waiter), claimant, .. } => Some((*waiter, claimant.uid)),
            _ => None,
        };
        let (closes, fact) = (matches!(input, Input::Close { .. }), input.is_fact());
        let Some(step) = self.apply(id, input, now) else {
            return ready.push((done, Err(Error::NotFound)));
        };
        let reply = step.reply.clone();
        let changed = !step.changes.is_empty();
        let mut done = Some(done);
        if reply == Ok(Reply::Queued)
            && let Some((waiter, uid)) = waiter
            && let Some(done) = done.take()
        {
            self.waiting.insert(waiter, id, uid, done);
        }
        self.absorb(id, step, now, ready);
        if closes {
            self.closed(id, now);
        }
        let Some(done) = done else { return };
        if let Err(error) = &reply {
            self.note_refusal(id, error, now);
        }
        let unsettled = self.is_unsettled(id);
        if !unsettled && (reply.is_err() || !changed) {
            return ready.push((done, reply));
        }
        // Nobody waits for the answer to a close, so it does not hurry the batch. But the kernel sends no more of them
        // than it was told to while they are unanswered, and a close it keeps back ends no lease.
        self.batch.closes += usize::from(closes);
        if !(closes && changed) || self.batch.closes >= MAX_CLOSES {
            self.touch_batch(now);
            self.batch.urgent = true;
        }
        self.batch.answers.push(Answer { done, reply, key: Some(id), fact });
    }

    fn is_unsettled(&self, id: KeyId) -> bool {
        self.keys.get(&id).is_some_and(|entry| entry.unsettled > self.settled)
    }

    /// Applies an input; keeps the way back where the step can be taken back, and what to repeat where one before can.
    fn apply(&mut self, id: KeyId, input: Input, now: Now) -> Option<Step> {
        let unsettled = self.is_unsettled(id);
        let entry = self.keys.get_mut(&id)?;
        let ttl = self.namespaces.ttl(entry.namespace).unwrap_or(self.config.ttl);
        let before = entry.state.clone();
        let fact = input.is_fact();
        let repeat = input.clone();
        let step = entry.state.apply(input, Context { now, ttl });
        if self.watched && entry.state.changes != before.changes {
            self.changed.push(id);
        }
        let refusable = step.changes.iter().any(Change::is_refusable);
        if refusable && entry.unsettled != self.batch.number {
            entry.unsettled = self.batch.number;
            self.batch.remember(id, before);
        }
        let stays = fact || step.reply == Ok(Reply::Queued);
        if stays && (unsettled || refusable) {
            self.batch.log.push(Logged { key: id, input: repeat, now });
        }
        Some(step)
    }

    fn check_limits(&mut self, id: KeyId, input: Input) -> Result<Input, Error> {
        let (claimant, renewal) = match &input {
            Input::Create { claimant, .. } => (claimant, false),
            Input::Lock { claimant, handle, owner, .. } => {
                let holds = self.keys.get(&id).is_some_and(|entry| entry.state.is_holder(*handle, *owner));
                (claimant, holds)
            }
            _ => return Ok(input),
        };
        let uid = claimant.uid;
        let taken = self.keys.get(&id).is_some_and(|entry| entry.state.has_file());
        let claims = matches!(&input, Input::Create { .. } | Input::Lock { mode: Mode::Exclusive, .. });
        let full = self.held_by_uid.get(&uid).copied().unwrap_or(0) >= self.config.max_keys;
        if full && claims && !renewal && !(taken && matches!(&input, Input::Create { .. })) {
            return Err(Error::Limit("this uid holds as many keys as --max-keys allows"));
        }
        if self.waiting.of_uid(uid) >= self.config.max_waiters
            && let Input::Lock { handle, owner, mode, wait: Some(_), claimant } = input
        {
            let blocked = self.keys.get(&id).is_some_and(|entry| entry.state.would_wait(handle, owner, mode));
            if blocked {
                return Err(Error::Limit("this uid has as many lock requests waiting as --max-waiters allows"));
            }
            return Ok(Input::Lock { handle, owner, mode, wait: None, claimant });
        }
        Ok(input)
    }

    /// Takes over a step's effects: what to record, whom to answer, what to announce.
    fn absorb(&mut self, id: KeyId, step: Step, now: Now, ready: &mut Ready) {
        let Step { changes, grants, notices, .. } = step;
        if !changes.is_empty() {
            self.touch_batch(now);
        }
        for change in changes {
            self.batch.durable |= change.is_durable();
            if let Change::Committed(attempt, _) = &change {
                self.batch.draft_bytes += attempt.result.map_or(0, |result| result.size);
            }
            self.batch.writes.push(match change {
                Change::Claimed(attempt) => Write::Claim(id, attempt),
                Change::Renewed(attempt) => Write::Renew(id, attempt),
                Change::Ended(attempt) => Write::End(id, attempt),
                Change::Revived(attempt) => Write::Revive(id, attempt),
                Change::Committed(attempt, draft) => Write::Commit(id, attempt, draft),
                Change::Finished(finished) => Write::Finished(id, finished),
            });
        }
        let unsettled = self.is_unsettled(id);
        for (waiter, reply) in grants {
            let Some(done) = self.waiting.remove(waiter) else { continue };
            if reply == Err(Error::Interrupted) || reply.is_err() && !unsettled {
                ready.push((done, reply));
                continue;
            }
            self.touch_batch(now);
            self.batch.answers.push(Answer { done, reply, key: Some(id), fact: false });
            self.batch.urgent = true;
        }
        let newest = self.keys.get(&id).map_or(Epoch(0), |entry| entry.state.epoch);
        for notice in notices {
            let (kind, epoch) = Kind::of(notice, newest);
            self.note(now, kind, id, epoch);
        }
        self.refresh(id);
    }

    /// Brings what is derived from a key's state up to date: its deadline, its file, whom it counts against.
    fn refresh(&mut self, id: KeyId) {
        let Some(entry) = self.keys.get_mut(&id) else { return };
        let deadline = entry.state.deadline_ns();
        if deadline != entry.armed_ns {
            if let Some(at) = entry.armed_ns {
                self.deadlines.remove(&(at, id));
            }
            if let Some(at) = deadline {
                self.deadlines.insert((at, id));
            }
            entry.armed_ns = deadline;
        }
        let uid = entry.state.live().map(|attempt| attempt.claimant.uid);
        if uid != entry.counted {
            if let Some(before) = entry.counted
                && let Some(count) = self.held_by_uid.get_mut(&before)
            {
                *count -= 1;
                self.held -= 1;
            }
            if let Some(uid) = uid {
                *self.held_by_uid.entry(uid).or_default() += 1;
                self.held += 1;
            }
            entry.counted = uid;
        }
        self.namespaces.set_file(entry.namespace, id, entry.state.has_file());
    }

    /// Announces an event, after what it rests on was recorded and after those before it.
    fn note(&mut self, now: Now, kind: Kind, id: KeyId, epoch: Epoch) {
        if self.is_unsettled(id) || !self.batch.notes.is_empty() {
            self.touch_batch(now);
            self.batch.notes.push(Note { key: id, kind, epoch, now });
        } else {
            self.announce(now, kind, id, epoch);
        }
    }

    fn announce(&mut self, now: Now, kind: Kind, id: KeyId, epoch: Epoch) {
        let Some(entry) = self.keys.get(&id) else { return };
        self.metrics.count(kind);
        self.events.push(now, kind, &entry.key, epoch);
        if self.watched {
            self.changed.push(id);
        }
    }

    fn note_refusal(&mut self, id: KeyId, error: &Error, now: Now) {
        let epoch = self.keys.get(&id).map_or(Epoch(0), |entry| entry.state.epoch);
        match error {
            Error::Taken | Error::WouldBlock => self.note(now, Kind::Denied, id, epoch),
            Error::Stale => self.note(now, Kind::Stale, id, epoch),
            _ => {}
        }
    }
}

/// A fault of a result's file, as everybody in its batch is told of it: a draft that is gone is no `ENOENT` to a claim.
fn file_fault(error: std::io::Error) -> Error {
    use std::io::ErrorKind::{QuotaExceeded, StorageFull};
    let errno = error.raw_os_error().filter(|_| matches!(error.kind(), StorageFull | QuotaExceeded));
    Error::storage(errno, format!("results: {error}"))
}

impl KeyEntry {
    /// The uid `claims/KEY` shows as its owner: the holder's, or of a finished key the last attempt's; the namespace's
    /// where the key is free and only a handle has it open.
    pub fn file_uid(&self, namespaces: &Namespaces) -> u32 {
        let attempt = self.state.attempt.as_ref().filter(|_| self.state.has_file());
        let owner = || namespaces.get(self.namespace).map_or(0, |namespace| namespace.row.uid);
        attempt.map_or_else(owner, |attempt| attempt.claimant.uid)
    }
}
