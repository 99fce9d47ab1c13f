//! An engine on a directory of its own, over a registry that fails and delays to order.

use std::collections::VecDeque;
use std::sync::Arc;

use leasefs::engine::{Asked, Durability, Start};
use leasefs::machine::Reply;
use leasefs::namespaces::{Credentials, Node};
use leasefs::registry::sqlite::{Check, Reader, SqliteRegistry};
use leasefs::registry::{AttemptRow, Checkpoint, KeyRow, Loaded, NamespaceRow, Read, Registry, Write};
use leasefs::results::Results;
use leasefs::{Config, Engine, Epoch, Error, KeyId, NamespaceId, Now, verify};
use parking_lot::Mutex;
use tempfile::TempDir;

use crate::players::ttl;

/// A commit's fate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    Done,
    DiskFull,
    Broken,
}

/// Whether it was refused by an order, and not because something did not fit.
pub fn is_by_order(told: &Result<Reply, Error>) -> bool {
    matches!(told, Err(Error::Storage { message, .. }) if message.ends_with("by order"))
}

/// What happens while a commit is on its way to the disk.
type Meanwhile = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct Plan {
    fates: VecDeque<Fate>,
    /// Writes in the last commit that was asked for.
    writes: usize,
    meanwhile: Option<Meanwhile>,
}

/// The orders of a [`FaultyRegistry`]. Without any it is a faithful one.
#[derive(Clone, Default)]
pub struct Orders(Arc<Mutex<Plan>>);

impl Orders {
    /// The next commits end so.
    pub fn expect(&self, fates: impl IntoIterator<Item = Fate>) {
        self.0.lock().fates.extend(fates);
    }

    /// The next commit takes long enough for this to happen; it must not flush.
    pub fn meanwhile(&self, then: impl FnOnce() + Send + 'static) {
        self.0.lock().meanwhile = Some(Box::new(then));
    }

    /// How many writes the last commit was of.
    pub fn writes(&self) -> usize {
        self.0.lock().writes
    }

    /// Ends all faults.
    pub fn clear(&self) {
        self.0.lock().fates.clear();
    }

    /// Does now what no commit was slow enough for.
    pub fn catch_up(&self) {
        // Taken out first: it may give orders itself.
        let meanwhile = self.0.lock().meanwhile.take();
        if let Some(then) = meanwhile {
            then();
        }
    }

    fn fate(&self) -> Fate {
        self.catch_up();
        self.0.lock().fates.pop_front().unwrap_or(Fate::Done)
    }
}

/// SQLite's registry with faults put in.
struct FaultyRegistry(SqliteRegistry, Orders);

impl Registry for FaultyRegistry {
    fn load(&mut self, boot_id: &str, now: Now) -> Result<Loaded, Error> {
        self.0.load(boot_id, now)
    }

    fn commit(&mut self, writes: &[Write], durable: bool) -> Result<(), Error> {
        const ENOSPC: i32 = 28;
        self.1.0.lock().writes = writes.len();
        match self.1.fate() {
            Fate::Done => self.0.commit(writes, durable),
            Fate::DiskFull => Err(Error::storage(Some(ENOSPC), "no space left, by order")),
            Fate::Broken => Err(Error::storage(None, "broken, by order")),
        }
    }

    fn reader(&self) -> Result<Box<dyn Read>, Error> {
        self.0.reader()
    }

    fn checkpointer(&self) -> Result<Box<dyn Checkpoint>, Error> {
        self.0.checkpointer()
    }
}

/// An engine, its directory and its faults.
#[derive(Clone)]
pub struct Rig {
    dir: Arc<TempDir>,
    pub engine: Arc<Engine>,
    pub orders: Orders,
}

/// The TTL of leases where no namespace sets another, in milliseconds.
pub const TTL_MS: u64 = 1_000;

fn config() -> Config {
    let root = NamespaceRow {
        id: NamespaceId::ROOT,
        path: String::new(),
        present: true,
        made: 1,
        mode: 0o777,
        uid: 0,
        gid: 0,
        atime_ns: 0,
        mtime_ns: 0,
        ctime_ns: 0,
        ttl_ms: None,
        request: leasefs::RequestId(0),
    };
    let (max_result, max_keys, max_waiters) = (1 << 20, 1_000, 1_000);
    Config { ttl: ttl(TTL_MS), durability: Durability::Full, max_result, max_keys, max_waiters, root }
}

fn open(dir: &TempDir, orders: &Orders, boot_id: &str, now: Now) -> Arc<Engine> {
    let registry = FaultyRegistry(SqliteRegistry::open(dir.path(), Check::Full).expect("registry"), orders.clone());
    let results = Results::open(dir.path()).expect("results");
    Arc::new(Engine::open(config(), Box::new(registry), results, Start::alone(boot_id, now)).expect("engine"))
}

impl Rig {
    /// A new state directory; in memory where there is such a place.
    pub fn new(now: Now) -> Rig {
        let dir = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).expect("a directory");
        let orders = Orders::default();
        let engine = open(&dir, &orders, "boot-1", now);
        Rig { dir: Arc::new(dir), engine, orders }
    }

    /// Ends the server and starts the next on the same directory.
    pub fn restart(self, boot_id: &str, now: Now) -> Rig {
        let Rig { dir, engine, orders } = self;
        assert_eq!(Arc::strong_count(&engine), 1, "somebody still uses the old engine");
        drop(engine);
        let engine = open(&dir, &orders, boot_id, now);
        Rig { dir, engine, orders }
    }

    /// The registry's rows.
    pub fn rows(&self) -> (Vec<KeyRow>, Vec<AttemptRow>) {
        Reader::open(self.dir.path()).and_then(|reader| reader.snapshot()).expect("the registry can be read")
    }

    /// The bytes of a result's file.
    pub fn result(&self, key: KeyId, epoch: Epoch) -> Option<Vec<u8>> {
        std::fs::read(self.engine.results.result(key, epoch)).ok()
    }

    /// What `leasefs verify` finds wrong.
    pub fn violations(&self) -> Vec<verify::Violation> {
        let (keys, attempts) = self.rows();
        let size = |row: &AttemptRow| self.result(KeyId(row.key_id), Epoch(row.epoch)).map(|bytes| bytes.len() as u64);
        verify::check(&keys, &attempts, size)
    }

    /// Files in `results/`.
    pub fn result_files(&self) -> usize {
        std::fs::read_dir(self.dir.path().join("results")).map_or(0, Iterator::count)
    }

    /// Files in `drafts/`.
    pub fn draft_files(&self) -> usize {
        std::fs::read_dir(self.dir.path().join("drafts")).map_or(0, Iterator::count)
    }
}

/// Root asks, by a request that never comes again.
pub fn root_asks(who: &Credentials, now: Now) -> Asked<'_> {
    Asked { who, request: leasefs::RequestId(0), now }
}

/// Makes a namespace in the root that must be new.
pub fn mkdir(engine: &Engine, name: &[u8], now: Now) -> NamespaceId {
    let who = Credentials::default();
    engine.mkdir(NamespaceId::ROOT, name, 0o777, &root_asks(&who, now), Box::new(|_| ()));
    match engine.child(NamespaceId::ROOT, name) {
        Ok(Some(Node::Namespace(made))) => made,
        other => panic!("no new namespace but {other:?}"),
    }
}

/// Removes a namespace of the root that must be empty.
pub fn rmdir(engine: &Engine, name: &[u8], now: Now) {
    let who = Credentials::default();
    engine.rmdir(NamespaceId::ROOT, name, &root_asks(&who, now), Box::new(|_| ()));
    assert_eq!(engine.child(NamespaceId::ROOT, name), Ok(None));
}
