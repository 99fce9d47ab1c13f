//! The facade: owns the only lock, runs the state machines, and decides who is told what when.
//!
//! # Guarantees
//! - Whoever is told of a grant or a commit is told after it was recorded as durably as [`Config::durability`] says.
//! - A commit that fails grants nothing: see [`crate::batch`].
//! - Inputs of a key take effect in the order of the calls.
//!
//! Callbacks run without the lock held, on the thread that settled them. [`Engine::flush`] does the I/O; whoever calls
//! it decides which thread pays.

mod decide;
mod orphans;
mod prune;
mod record;
mod settle;
mod shown;
mod survivors;
mod tree;
mod unread;

pub use orphans::Orphaned;
pub use prune::{Prune, ResultFile, prune_unserved};
pub use survivors::{Memory, Oblivious, Survivors};
pub use tree::Asked;
use unread::{Need, Unread};

use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use foldhash::HashMap;
use parking_lot::Mutex;

use crate::batch::{Batch, Done, Waiting};
use crate::error::Error;
use crate::events::{Events, Kind};
use crate::ids::{Epoch, Handle, KeyId, NamespaceId, WaiterId};
use crate::key::Key;
use crate::machine::{Input, KeyState, Reply};
use crate::metrics::{Detail, Gauges, Metrics, Outside};
use crate::namespaces::{Credentials, Namespaces};
use crate::probe;
use crate::registry::{Checkpoint, NamespaceRow, Read, Registry, StoredResult, Which};
use crate::results::Results;
use crate::time::Now;
use crate::ttl::Ttl;

/// How long a write nobody waits for may stay in memory, in nanoseconds.
const LAZY_NS: u64 = 20_000_000;
/// Closes that may be unanswered; the kernel's own bound is at least 12.
const MAX_CLOSES: usize = 8;

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
    /// The batch with its newest change of any kind.
    changed: u64,
    armed_ns: Option<u64>,
    /// The uid that the live attempt counts against.
    counted: Option<u32>,
    /// It counts among the shared ones.
    shared: bool,
    /// Open claim handles.
    opens: usize,
    /// Why what is orphaned is not free yet, for people.
    pub(crate) orphaned_why: Option<Arc<str>>,
}

struct Inner {
    config: Config,
    namespaces: Namespaces,
    keys: HashMap<KeyId, KeyEntry>,
    last_key: u64,
    deadlines: BTreeSet<(u64, KeyId)>,
    /// Keys that are held by an attempt, or by shared locks, whose connection is gone.
    orphans: BTreeSet<KeyId>,
    waiting: Waiting,
    held_by_uid: HashMap<u32, usize>,
    held: usize,
    /// Keys with shared locks.
    shared: usize,
    batch: Batch,
    /// An empty one, for the memory it has.
    spare: Batch,
    /// Batches up to this one are settled.
    settled: u64,
    /// The newest batch that removes a namespace.
    removes: u64,
    retry_ns: Option<u64>,
    commits: u64,
    events: Events,
    metrics: Metrics,
    /// Empty: for the memory it has.
    details: Vec<(Epoch, Detail)>,
    changed: Vec<KeyId>,
    watched: bool,
    memory: Box<dyn Memory>,
    /// What was not read yet; none once all was.
    unread: Option<Unread>,
}

/// How an engine begins.
pub struct Start<'a> {
    /// Tells this boot from every other.
    pub boot_id: &'a str,
    /// When.
    pub now: Now,
    /// Keeps what a server that takes over has to know.
    pub memory: Box<dyn Memory>,
    /// What the last server left behind, where this one takes its connection over.
    pub survivors: Option<Survivors>,
}

impl<'a> Start<'a> {
    /// A start without a connection to take over, nor one to be taken over.
    pub fn alone(boot_id: &'a str, now: Now) -> Start<'a> {
        Start { boot_id, now, memory: Box::new(Oblivious), survivors: None }
    }
}

/// Called once when the registry's backlog is applied, or with why it could not be.
pub type Applied = Box<dyn FnOnce(Result<(), Error>) + Send>;

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
    orphaned: AtomicBool,
    apply_ns: AtomicU64,
    /// Who waits for the registry's backlog to be applied.
    applied: Mutex<Vec<Applied>>,
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
        start: Start<'_>,
    ) -> Result<Engine, Error> {
        let mut loaded = registry.load(start.boot_id, start.now)?;
        let generation = loaded.generation;
        let (mut reader, mut checkpointer) = (registry.reader()?, registry.checkpointer()?);
        let known: HashSet<u64> = loaded.keys.iter().map(|known| known.row.id).collect();
        for id in start.survivors.iter().flat_map(Survivors::keys).filter(|id| !known.contains(&id.0)) {
            loaded.keys.extend(reader.keys(Which::Number(id))?);
        }
        let unread = Unread::new(registry.reader()?, loaded.last_key, start.now);
        let mut inner = Inner::new(config, loaded, start);
        inner.unread = unread;
        let writes = std::mem::take(&mut inner.batch.writes);
        if !writes.is_empty() {
            registry.commit(&writes, false)?;
            checkpointer.apply()?;
        }
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
            orphaned: AtomicBool::new(false),
            apply_ns: AtomicU64::new(u64::MAX),
            applied: Mutex::default(),
            commit_ns: AtomicU64::new(0),
        };
        engine.publish_hints(&engine.inner.lock());
        Ok(engine)
    }

    /// A handle no other open file has or had.
    pub fn new_handle(&self) -> Handle {
        Handle(self.next_handle.fetch_add(1, Ordering::Relaxed))
    }

    /// The number of this server among those that ever ran on the state directory.
    pub fn generation(&self) -> u64 {
        self.next_handle.load(Ordering::Relaxed) >> 40
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
            match self.knowing(Need::Key(key)) {
                Ok(mut inner) => {
                    inner.submit(key, input, now, done, &mut ready);
                    self.publish_hints(&inner);
                }
                Err(error) => ready.push((done, Err(error))),
            }
        }
        answer(ready);
    }

    /// Whether a request is in line. One that is not is answered already, or once its answer is recorded.
    pub fn is_waiting(&self, waiter: WaiterId) -> bool {
        self.inner.lock().waiting.key(waiter).is_some()
    }

    /// A request in line waits for longer than since it was submitted: another server was asked first.
    pub fn waits_since(&self, waiter: WaiterId, since: Now) {
        let mut inner = self.inner.lock();
        let Some(key) = inner.waiting.waits_since(waiter, since.boot_ns) else { return };
        let line = inner.keys.get_mut(&key).map(|entry| entry.state.line.iter_mut());
        if let Some(waits) = line.into_iter().flatten().find(|waits| waits.id == waiter) {
            waits.since = since;
        }
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
            probe::at(probe::EXPIRY);
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

    fn publish_hints(&self, inner: &Inner) {
        self.urgent.store(inner.batch.urgent, Ordering::Release);
        self.orphaned.store(!inner.orphans.is_empty(), Ordering::Release);
        let deadline_ns = inner.deadlines.first().map_or(u64::MAX, |(at, _)| *at);
        let lazy_ns = match (inner.batch.is_empty(), inner.retry_ns) {
            (true, _) => u64::MAX,
            (false, Some(at)) => at,
            (false, None) => inner.batch.since_ns + LAZY_NS,
        };
        self.deadline_ns.store(deadline_ns, Ordering::SeqCst);
        self.wake_ns.store(deadline_ns.min(lazy_ns), Ordering::SeqCst);
    }
}

fn answer(ready: Ready) {
    let mut ready = ready.into_iter().peekable();
    while let Some((done, result)) = ready.next() {
        done(result);
        if ready.peek().is_some() {
            probe::at(probe::BETWEEN_ANSWERS);
        }
    }
}

impl KeyEntry {
    /// One that nobody has open, and of which all is recorded.
    fn new(key: Key, namespace: NamespaceId, state: KeyState) -> KeyEntry {
        KeyEntry {
            key,
            namespace,
            state,
            unsettled: 0,
            changed: 0,
            armed_ns: None,
            counted: None,
            shared: false,
            opens: 0,
            orphaned_why: None,
        }
    }

    /// The uid `claims/KEY` shows as its owner: the holder's, or of a finished key the last attempt's; the namespace's
    /// where the key is free and only a handle has it open.
    pub fn file_uid(&self, namespaces: &Namespaces) -> u32 {
        let attempt = self.state.attempt.as_ref().filter(|_| self.state.has_file());
        let owner = || namespaces.get(self.namespace).map_or(0, |namespace| namespace.row.uid);
        attempt.map_or_else(owner, |attempt| attempt.claimant.uid)
    }
}
