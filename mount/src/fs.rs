//! The FUSE adapter: decodes a request, calls the engine, answers. No rule of a lease is here.
//!
//! | file | what it answers |
//! |---|---|
//! | [`names`] | lookup, attributes, listings, namespaces |
//! | [`claims`] | `claims/KEY`: create, open, lock, read, write, unlink |
//! | [`results`] | `results/KEY/EPOCH`: drafts, commit, reading |
//! | [`control`] | `status/KEY`, `.leasefs/*`, polling |
//! | [`orders`] | orders that take their time: prune, reap |
//! | [`xattrs`] | `user.lease.ttl`, `user.lease.agent` |
//! | [`handles`] | what an open file is |
//! | [`kept`] | what the next server has to know, should this one be killed |
//!
//! One thread reads requests, so that a close is seen before the open that follows it. Whatever it decided is recorded
//! once the kernel has nothing more to read, by that thread itself: see [`Shared::settle`].

mod claims;
mod control;
mod created;
mod dispatch;
mod handles;
mod kept;
mod names;
mod orders;
mod results;
mod xattrs;

use std::collections::HashMap;
use std::ffi::OsStr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use fuser::{FileHandle, INodeNo, PollEvents, Request};
use leasefs::namespaces::{Credentials, Namespace};
use leasefs::{Engine, KeyId, Now, RequestId};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use parking_lot::{Mutex, RwLock};

use crate::flight::{Flight, Handling, RESEND, Record, opcode};
use crate::openfiles::OpenFiles;
use crate::orphans::Reap;
use crate::process::{self, Processes};
use crate::timekeeper::Alarm;
use crate::watcher::{Wait, Watcher};
use crate::{clock, killpoint};
use claims::{KnownOwner, LockRequest};
use control::{Parked, Polls};
use handles::Open;
pub use kept::{Kept, any_open, survivors};
use orders::Orders;

/// Requests that may be gathered while the kernel has more to read, before what they decided is recorded.
const MAX_GATHERED: u32 = 64;

/// What the mount was started with, shown in `.leasefs/config`.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Settings {
    /// The program's version.
    pub version: &'static str,
    /// Where the tree is mounted.
    pub mountpoint: std::path::PathBuf,
    /// Where the registry is.
    pub state_dir: std::path::PathBuf,
    /// TTL where no namespace sets one, in milliseconds.
    pub ttl_ms: u64,
    /// What a success means for a power cut.
    pub durability: leasefs::engine::Durability,
    /// Most bytes in a result.
    pub max_result: u64,
    /// Most leases one uid may hold.
    pub max_keys: usize,
    /// Most lock requests of one uid that may wait.
    pub max_waiters: usize,
    /// Whether every uid may use the tree.
    pub allow_other: bool,
    /// Who mounted it.
    pub mount_owner: u32,
    /// The server's pid.
    pub pid: u32,
    /// The pid of the keeper, which starts another server when this one ends.
    pub keeper_pid: u32,
    /// How many servers this connection has had, with this one.
    pub starts: u32,
    /// A request a server left unanswered is sent again to the next; without that, it ends with `EINTR`.
    pub resend: bool,
}

/// Everything the server's threads share.
pub struct Shared {
    /// The engine.
    pub engine: Engine,
    /// The mount's settings.
    pub settings: Settings,
    /// Wakes at deadlines.
    pub timekeeper: Alarm,
    /// Does slow I/O.
    pub writer: Alarm,
    /// Ends waits on a signal.
    pub watcher: Watcher,
    /// What the next server needs to know, should this one be killed.
    pub flight: Arc<Flight>,
    /// Records each decision by itself, so that the one that kills the server is known.
    careful: AtomicBool,
    /// Requests come from the kernel itself, and answers go there.
    direct: AtomicBool,
    device: OwnedFd,
    files: Arc<OpenFiles>,
    salt: u64,
    /// Open files of a predecessor, by the request that opened them.
    repeated: Mutex<HashMap<u64, u64>>,
    processes: Processes,
    handles: Mutex<foldhash::HashMap<u64, Open>>,
    owners: Mutex<foldhash::HashMap<u64, KnownOwner>>,
    polls: Mutex<Polls>,
    parked: Mutex<Parked>,
    orders: Mutex<Orders>,
    /// Whoever looks up a result and opens it has this for reading.
    opening: RwLock<()>,
    /// Orders to look for proof of death.
    pub reap: Reap,
    gathered: AtomicU32,
    /// The writer was asked to record what was decided, and has not begun.
    handed: AtomicBool,
}

/// Who sent a request, and which.
#[derive(Clone)]
pub struct Caller {
    unique: u64,
    request: RequestId,
    is_repeated: bool,
    uid: u32,
    gid: u32,
    pid: u32,
}

impl Caller {
    fn of(req: &Request, salt: u64) -> Caller {
        let unique = req.unique().0;
        let is_repeated = unique & RESEND != 0;
        Caller { is_repeated, ..Caller::kept(unique & !RESEND, salt, req.uid(), req.gid(), req.pid()) }
    }

    fn kept(unique: u64, salt: u64, uid: u32, gid: u32, pid: u32) -> Caller {
        // 24 bits for the connection and 40 for the request: no two of a state directory are the same.
        Caller { unique, request: RequestId(salt << 40 ^ unique), is_repeated: false, uid, gid, pid }
    }

    /// The kernel's number of the request, without the mark of one that is sent again.
    pub fn unique(&self) -> u64 {
        self.unique
    }

    /// The request's number over all connections.
    pub fn request(&self) -> RequestId {
        self.request
    }

    /// The caller's filesystem uid.
    pub fn uid(&self) -> u32 {
        self.uid
    }

    /// The caller's filesystem gid.
    pub fn gid(&self) -> u32 {
        self.gid
    }

    /// The calling thread; 0 where it is in a pid namespace that the server does not see.
    pub fn pid(&self) -> u32 {
        self.pid
    }
}

/// The filesystem as fuser sees it.
#[derive(Clone)]
pub struct LeaseFs(Arc<Shared>);

impl std::ops::Deref for LeaseFs {
    type Target = Shared;

    fn deref(&self) -> &Shared {
        &self.0
    }
}

impl LeaseFs {
    /// A filesystem on an engine. `device` is a copy of the connection, only asked whether there is more to read;
    /// `files` keeps what a later server of the same connection has to know.
    ///
    /// # Errors
    /// Those of making the alarms.
    pub fn new(
        engine: Engine,
        settings: Settings,
        device: OwnedFd,
        flight: Arc<Flight>,
        files: Arc<OpenFiles>,
    ) -> std::io::Result<LeaseFs> {
        let salt = files.salt(engine.generation());
        Ok(LeaseFs(Arc::new(Shared {
            engine,
            settings,
            timekeeper: Alarm::new()?,
            writer: Alarm::new()?,
            watcher: Watcher::default(),
            flight,
            careful: AtomicBool::new(false),
            direct: AtomicBool::new(false),
            device,
            files,
            salt,
            repeated: Mutex::default(),
            processes: Processes::default(),
            handles: Mutex::default(),
            owners: Mutex::default(),
            polls: Mutex::default(),
            parked: Mutex::default(),
            orders: Mutex::default(),
            opening: RwLock::default(),
            reap: Reap::default(),
            gathered: AtomicU32::new(0),
            handed: AtomicBool::new(false),
        })))
    }

    /// What the other threads need.
    pub fn shared(&self) -> &Arc<Shared> {
        &self.0
    }

    /// To be called before every request, and kept until it is settled: notes which one it is.
    fn handling(&self, req: &Request, opcode: u32, ino: INodeNo) -> Handling<'_> {
        self.flight.handling(req.unique().0, opcode, ino.0)
    }

    /// As [`LeaseFs::handling`], of a request that names a file.
    fn handling_name(&self, req: &Request, opcode: u32, parent: INodeNo, name: &OsStr) -> Handling<'_> {
        let handling = self.handling(req, opcode, parent);
        killpoint::kill_point(killpoint::HANDLING, name.as_encoded_bytes());
        handling
    }

    /// As [`LeaseFs::handling`], of a close, whose effect must not be lost.
    fn closing(&self, req: &Request, opcode: u32, ino: INodeNo, handle: FileHandle) -> Handling<'_> {
        self.flight.recording(Record { opcode, ino: ino.0, handle: handle.0, ..record_of(req) })
    }

    /// As [`LeaseFs::handling`], of a lock.
    fn locking(&self, req: &Request, ino: INodeNo, lock: &LockRequest) -> Handling<'_> {
        let &LockRequest { handle, owner, range, kind, sleep } = lock;
        let opcode = if sleep { opcode::SETLKW } else { opcode::SETLK };
        let kind = kind.cast_unsigned();
        self.flight.recording(Record { opcode, ino: ino.0, handle, owner, kind, range, ..record_of(req) })
    }

    /// As [`LeaseFs::handling`], of a poll, whose caller must not take being cut off for the loss of its lease.
    fn polling(
        &self,
        req: &Request,
        ino: INodeNo,
        handle: FileHandle,
        asked: (u64, fuser::PollFlags, PollEvents),
    ) -> Handling<'_> {
        let (owner, flags, events) = asked;
        let record = Record { opcode: opcode::POLL, ino: ino.0, handle: handle.0, owner, ..record_of(req) };
        self.flight.recording(Record { kind: flags.bits(), range: (events.bits().into(), 0), ..record })
    }

    fn caller(&self, req: &Request) -> Caller {
        Caller::of(req, self.salt)
    }

    /// The handles a server before gave out, by the number of the request that asked for each.
    pub fn given_out(&self) -> HashMap<u64, u64> {
        let number = |request: &u64| request ^ self.salt << 40;
        self.repeated.lock().iter().map(|(request, handle)| (number(request), *handle)).collect()
    }

    /// The handle that this very request was given before, where it comes again and its answer may have got lost.
    fn handle_given_to(&self, caller: &Caller) -> Option<u64> {
        self.repeated.lock().remove(&caller.request().0)
    }

    /// A handle for what a request opens: the one it was given before, where it comes again.
    fn handle_for(&self, caller: &Caller) -> leasefs::Handle {
        self.handle_given_to(caller).map_or_else(|| self.engine.new_handle(), leasefs::Handle)
    }

    fn credentials(&self, req: &Caller) -> Credentials {
        Credentials { uid: req.uid(), gid: req.gid(), groups: Vec::new() }
    }

    /// Whether the caller may do all of `want` in a namespace, supplementary groups counted.
    fn allowed(&self, req: &Caller, namespace: &Namespace, want: u32) -> bool {
        let mut who = self.credentials(req);
        if namespace.groups_matter(&who) {
            who.groups = process::groups(req.pid());
        }
        namespace.allows(&who, want)
    }

    /// Applies an expiry that is due but not yet applied, so that nobody is shown a lease past its deadline.
    fn expire(&self, key: KeyId, now: Now) {
        let due = self.engine.view(key, |entry, _| entry.state.deadline_ns().is_some_and(|at| at <= now.boot_ns));
        if due == Some(true) {
            self.engine.submit(key, leasefs::machine::Input::Tick, now, Box::new(|_| ()));
        }
    }
}

fn record_of(req: &Request) -> Record {
    Record { unique: req.unique().0, pid: req.pid(), ids: (req.uid(), req.gid()), ..Record::default() }
}

impl Shared {
    /// To be called after every request: records what was decided unless the kernel has more to read right now.
    fn settle(&self) {
        if self.engine.is_urgent() {
            let gathered = self.gathered.fetch_add(1, Ordering::Relaxed);
            if gathered >= MAX_GATHERED
                || self.careful.load(Ordering::Relaxed)
                || self.engine.is_quick()
                || !self.has_more()
            {
                self.gathered.store(0, Ordering::Relaxed);
                self.flush(clock::now());
            }
        }
        self.timekeeper.need(self.next_ns());
        self.writer.need(self.engine.apply_ns());
        self.announce();
    }

    fn has_more(&self) -> bool {
        let mut fds = [PollFd::new(self.device.as_fd(), PollFlags::POLLIN)];
        poll(&mut fds, PollTimeout::ZERO).is_ok_and(|ready| ready > 0)
    }

    /// The kernel says that a signal came for whoever sent this request. To be called by the thread that reads requests.
    pub fn on_interrupt(&self, unique: u64) {
        killpoint::kill_point(killpoint::INTERRUPTED, b"");
        self.watcher.interrupted(unique);
        // Nothing may follow that the kernel has to read.
        self.settle();
    }

    /// Has each decision be recorded by itself, or not.
    pub fn set_careful(&self, careful: bool) {
        self.careful.store(careful, Ordering::Relaxed);
    }

    /// From here on requests come from the kernel itself, each for the first time, and answers go there.
    pub fn set_direct(&self) {
        self.direct.store(true, Ordering::Relaxed);
        self.repeated.lock().clear();
    }

    /// Records what was decided, on this thread or, where that may take long, on the writer's.
    pub fn flush(&self, now: Now) {
        if self.engine.is_slow() {
            self.handed.store(true, Ordering::SeqCst);
            self.writer.wake();
            return;
        }
        self.engine.flush(now);
        if self.engine.is_checkpoint_due() {
            self.writer.wake();
        }
    }

    /// When the timekeeper has something to do; what was handed to the writer is not its business.
    pub fn next_ns(&self) -> u64 {
        if self.handed.load(Ordering::SeqCst) { self.engine.deadline_ns() } else { self.engine.wake_ns() }
    }

    /// The timekeeper's work: expiries, writes nobody waited for, and telling those who poll.
    pub fn on_time(&self) {
        let now = clock::now();
        if self.engine.tick(now) {
            self.flush(now);
            self.writer.need(self.engine.apply_ns());
        }
        self.notify_polls();
        self.answer_events();
    }

    /// The writer's work: what would keep the reader from answering.
    pub fn on_write(&self) {
        if self.handed.swap(false, Ordering::SeqCst) {
            self.engine.flush(clock::now());
            self.timekeeper.need(self.next_ns());
        }
        let now = clock::now();
        if self.engine.apply_ns() <= now.boot_ns
            && let Err(error) = self.engine.apply(now)
        {
            tracing::warn!("the registry is behind its journal: {error}");
        }
        if self.engine.take_checkpoint_due()
            && let Err(error) = self.engine.checkpoint()
        {
            tracing::warn!("checkpoint: {error}");
        }
        self.notify_polls();
        self.answer_events();
    }

    /// A signal waits for somebody who waits for us.
    pub fn on_signal(&self, wait: Wait) {
        let now = clock::now();
        match wait {
            // Its answer takes it off the watch. Where it is not in line yet, it is looked at again.
            Wait::Lock(waiter) => self.engine.interrupt(waiter, now),
            Wait::Events(parked) => {
                self.interrupt_events(parked);
                self.watcher.remove(wait);
            }
            Wait::Order(number) => self.interrupt_order(number),
        }
        if self.engine.is_urgent() {
            self.flush(now);
            self.writer.need(self.engine.apply_ns());
        }
        self.timekeeper.need(self.next_ns());
        self.announce();
    }
}
