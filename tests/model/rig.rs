//! An engine on a directory of its own, over a registry that fails and delays to order.

use std::collections::{BTreeMap, VecDeque};
use std::path::Path;
use std::sync::Arc;

use leasefs::engine::{Asked, Durability, Memory, Start, Survivors};
use leasefs::machine::Reply;
use leasefs::namespaces::{Credentials, Node};
use leasefs::registry::journal::Journal;
use leasefs::registry::prune::{Candidate, Pruned};
use leasefs::registry::sqlite::{Check, Reader, SqliteRegistry};
use leasefs::registry::{AttemptRow, Backlog, Checkpoint, KeyRow, Loaded, NamespaceRow, Read, Registry, Write};
use leasefs::results::Results;
use leasefs::{Config, Engine, Epoch, Error, Handle, KeyId, NamespaceId, Now, verify};
use parking_lot::Mutex;
use proptest::prelude::*;
use tempfile::TempDir;

use crate::players::ttl;

/// A commit's fate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    Done,
    DiskFull,
    Broken,
    /// It is done, and the server is killed before it knows.
    Killed,
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
    recorded: Vec<Vec<Write>>,
    refuses_prunes: bool,
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

    /// What was committed so far, batch by batch.
    pub fn recorded(&self) -> Vec<Vec<Write>> {
        self.0.lock().recorded.clone()
    }

    /// How many writes the last commit was of.
    pub fn writes(&self) -> usize {
        self.0.lock().writes
    }

    /// Whether the disk has no room for a prune.
    pub fn refuse_prunes(&self, refuse: bool) {
        self.0.lock().refuses_prunes = refuse;
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

/// What is under the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Storage {
    /// SQLite alone, and servers that end in good order.
    Plain,
    /// Behind a journal that takes everything, and servers that are killed.
    Process,
    /// Behind a journal that takes what need not survive a power cut, and servers that are killed.
    Full,
}

/// Any of them.
pub fn storage() -> impl Strategy<Value = Storage> {
    prop_oneof![Just(Storage::Plain), Just(Storage::Process), Just(Storage::Full)]
}

/// A registry with faults put in.
struct FaultyRegistry(Box<dyn Registry>, Orders);

impl Registry for FaultyRegistry {
    fn load(&mut self, boot_id: &str, now: Now) -> Result<Loaded, Error> {
        self.0.load(boot_id, now)
    }

    fn commit(&mut self, writes: &[Write], durable: bool) -> Result<(), Error> {
        const ENOSPC: i32 = 28;
        self.1.0.lock().writes = writes.len();
        match self.1.fate() {
            Fate::Done => {
                self.0.commit(writes, durable)?;
                self.1.0.lock().recorded.push(writes.to_vec());
                Ok(())
            }
            Fate::Killed => {
                self.0.commit(writes, durable)?;
                self.1.0.lock().recorded.push(writes.to_vec());
                // As a killed server, it comes to nothing more.
                std::panic::resume_unwind(Box::new("killed, by order"))
            }
            Fate::DiskFull => Err(Error::storage(Some(ENOSPC), "no space left, by order")),
            Fate::Broken => Err(Error::storage(None, "broken, by order")),
        }
    }

    fn prune(&mut self, candidates: &[Candidate], files_gone: &[(KeyId, Epoch)]) -> Result<Vec<Pruned>, Error> {
        const ENOSPC: i32 = 28;
        if self.1.0.lock().refuses_prunes {
            return Err(Error::storage(Some(ENOSPC), "no space left, by order"));
        }
        self.0.prune(candidates, files_gone)
    }

    fn backlog(&self) -> Backlog {
        self.0.backlog()
    }

    fn reader(&self) -> Result<Box<dyn Read>, Error> {
        self.0.reader()
    }

    fn checkpointer(&self) -> Result<Box<dyn Checkpoint>, Error> {
        self.0.checkpointer()
    }
}

/// A key's open claim handles, and its open drafts with the attempts they are for.
pub type OpenHandles = (KeyId, Vec<Handle>, Vec<(Handle, Epoch)>);

/// An engine, its directory and its faults.
#[derive(Clone)]
pub struct Rig {
    storage: Storage,
    dir: Arc<TempDir>,
    pub engine: Arc<Engine>,
    pub orders: Orders,
    recorder: Recorder,
    /// The first server's number of the connection.
    first: u64,
}

/// Keys one user may hold unless a test says otherwise.
const MAX_KEYS: usize = 1_000;

/// The TTL of leases where no namespace sets another, in milliseconds.
pub const TTL_MS: u64 = 1_000;

fn config(storage: Storage, max_keys: usize) -> Config {
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
    let (max_result, max_waiters) = (1 << 20, 1_000);
    let durability = if storage == Storage::Process { Durability::Process } else { Durability::Full };
    Config { ttl: ttl(TTL_MS), durability, max_result, max_keys, max_waiters, root }
}

/// What the engine keeps for its successor.
#[derive(Clone, Default)]
pub struct Recorder(Arc<Mutex<Recorded>>);

#[derive(Default)]
struct Recorded {
    lost: BTreeMap<Handle, Epoch>,
    next_event: u64,
}

impl Memory for Recorder {
    fn lost(&self, handle: Handle, epoch: Epoch) {
        self.0.lock().lost.insert(handle, epoch);
    }

    fn next_event(&self, number: u64) {
        self.0.lock().next_event = number;
    }
}

fn open(storage: Storage, dir: &TempDir, orders: &Orders, start: Start<'_>) -> Arc<Engine> {
    open_with(config(storage, MAX_KEYS), storage, dir, orders, start)
}

fn open_with(config: Config, storage: Storage, dir: &TempDir, orders: &Orders, start: Start<'_>) -> Arc<Engine> {
    let registry: Box<dyn Registry> = match storage {
        Storage::Plain => Box::new(SqliteRegistry::open(dir.path(), Check::Full).expect("registry")),
        Storage::Process | Storage::Full => Box::new(Journal::open(dir.path(), Check::Full).expect("registry")),
    };
    let registry = FaultyRegistry(registry, orders.clone());
    let results = Results::open(dir.path()).expect("results");
    if start.survivors.is_none() {
        results.drop_drafts(|_| false);
    }
    Arc::new(Engine::open(config, Box::new(registry), results, start).expect("engine"))
}

/// A new directory; in memory where there is such a place.
pub fn new_dir() -> TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).expect("a directory")
}

/// What a server leaves that is killed now.
pub fn image(dir: &Path) -> TempDir {
    let copy = new_dir();
    copy_files(dir, copy.path());
    copy
}

fn copy_files(from: &Path, to: &Path) {
    for entry in std::fs::read_dir(from).expect("a directory").map(|entry| entry.expect("a directory")) {
        let (path, copy) = (entry.path(), to.join(entry.file_name()));
        if path.is_dir() {
            std::fs::create_dir(&copy).expect("a directory");
            copy_files(&path, &copy);
        } else if path.extension().is_none_or(|extension| extension != "db-shm") {
            // The one left out is shared memory, which the first to open the database makes anew.
            std::fs::copy(&path, &copy).expect("a copy");
        }
    }
}

impl Rig {
    /// A new state directory.
    pub fn new(now: Now) -> Rig {
        Rig::on(Storage::Plain, now)
    }

    /// A new state directory whose users may hold so many keys.
    pub fn with_max_keys(max_keys: usize, now: Now) -> Rig {
        let (storage, dir, orders, recorder) = (Storage::Plain, new_dir(), Orders::default(), Recorder::default());
        let start = Start { memory: Box::new(recorder.clone()), ..Start::alone("boot-1", now) };
        let engine = open_with(config(storage, max_keys), storage, &dir, &orders, start);
        let first = engine.generation();
        Rig { storage, dir: Arc::new(dir), engine, orders, recorder, first }
    }

    /// A new state directory with this storage.
    pub fn on(storage: Storage, now: Now) -> Rig {
        let (dir, orders, recorder) = (new_dir(), Orders::default(), Recorder::default());
        let memory = Box::new(recorder.clone());
        let engine = open(storage, &dir, &orders, Start { memory, ..Start::alone("boot-1", now) });
        let first = engine.generation();
        Rig { storage, dir: Arc::new(dir), engine, orders, recorder, first }
    }

    /// Ends the server and starts the next where it left off. One with a journal is killed.
    pub fn restart(self, boot_id: &str, now: Now) -> Rig {
        let Rig { storage, mut dir, engine, orders, .. } = self;
        assert_eq!(Arc::strong_count(&engine), 1, "somebody still uses the old engine");
        if storage != Storage::Plain {
            dir = Arc::new(image(dir.path()));
        }
        drop(engine);
        let recorder = Recorder::default();
        let memory = Box::new(recorder.clone());
        let engine = open(storage, &dir, &orders, Start { memory, ..Start::alone(boot_id, now) });
        let first = engine.generation();
        Rig { storage, dir, engine, orders, recorder, first }
    }

    /// The server is killed and another takes its connection over: with the handles that are open, by key.
    pub fn take_over(self, boot_id: &str, now: Now, open_handles: &[OpenHandles]) -> Rig {
        let Rig { storage, mut dir, engine, orders, recorder, first } = self;
        assert_eq!(Arc::strong_count(&engine), 1, "somebody still uses the old engine");
        if storage != Storage::Plain {
            dir = Arc::new(image(dir.path()));
        }
        drop(engine);
        let mut survivors = Survivors::default();
        {
            let kept = recorder.0.lock();
            survivors.next_event = kept.next_event;
            survivors.complete_since = Some(Handle(first << 40));
            for (key, claims, drafts) in open_handles {
                for handle in claims {
                    survivors.claim(*key, *handle, kept.lost.get(handle).copied());
                }
                for (draft, epoch) in drafts {
                    survivors.draft(*key, *draft, *epoch);
                }
            }
        }
        let (memory, survivors) = (Box::new(recorder.clone()), Some(survivors));
        let engine = open(storage, &dir, &orders, Start { boot_id, now, memory, survivors });
        Rig { storage, dir, engine, orders, recorder, first }
    }

    /// Applies the backlog if that is due, as the server's writer does.
    pub fn write(&self, now: Now) {
        if self.engine.apply_ns() <= now.boot_ns {
            self.engine.apply(now).expect("the registry takes what it accepted");
        }
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
