//! `claims/KEY`: the three forms of claiming, and what a handle can do (§3, §4).

use std::collections::HashSet;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use fuser::{
    Errno, FileHandle, FopenFlags, Generation, INodeNo, ReplyAttr, ReplyCreate, ReplyData, ReplyEmpty, ReplyIoctl,
    ReplyLock, ReplyOpen, ReplyWrite,
};
use leasefs::machine::{Claimant, Input, Mode, Process, Why};
use leasefs::{Error, Handle, KeyId, NamespaceId, Now, Owner, view};

use super::handles::{Open, Snapshot};
use super::names::{Change, NEVER, finish};
use super::{Caller, LeaseFs, created};
use crate::clock;
use crate::errno::errno;
use crate::ino::Node;
use crate::process::{self, Seen};
use crate::watcher::Wait;

/// Most bytes in a note.
const MAX_NOTE: usize = 4096;
/// A lock over the whole file, as the kernel asks for it.
const WHOLE_FILE: (u64, u64) = (0, i64::MAX as u64);

/// What the kernel's number of a lock owner stands for.
pub struct KnownOwner {
    pub owner: Owner,
    pub process: Process,
    pub handles: HashSet<Handle>,
}

/// A lock request, decoded.
pub struct LockRequest {
    pub handle: u64,
    pub owner: u64,
    pub range: (u64, u64),
    pub kind: i32,
    pub sleep: bool,
}

fn claim_flags() -> FopenFlags {
    FopenFlags::FOPEN_DIRECT_IO | FopenFlags::FOPEN_NOFLUSH
}

impl LeaseFs {
    fn claimant(&self, req: &Caller, opener: &Seen, locker: &Seen) -> Claimant {
        // Whoever opened the handle keeps it; a flock(1) that locked it for its shell is gone a moment later.
        let by_other = !opener.process.is(locker.process) && self.processes.is_alive(opener.process);
        let shown = if by_other { opener } else { locker };
        Claimant {
            uid: req.uid(),
            gid: req.gid(),
            holder: shown.process,
            opener: opener.process,
            locker: locker.process,
            command: shown.command.clone(),
            request: req.request(),
        }
    }

    pub(super) fn create_claim(&self, req: &Caller, parent: NamespaceId, name: &OsStr, flags: i32, reply: ReplyCreate) {
        let now = clock::now();
        let seen = self.processes.identify(req.pid());
        let (key, handle) = match self.claim_given_to(req) {
            Some(given) => given,
            None => match self.engine.open_name(parent, name.as_bytes(), now) {
                Ok(key) => (key, self.open_new_claim(req, key, seen.clone())),
                Err(error) => return reply.error(errno(&error)),
            },
        };
        let (fs, unique) = (self.clone(), req.unique());
        let direct = self.direct.load(Ordering::Relaxed) && !req.is_repeated;
        let created = move |reply: ReplyCreate| {
            let Some(mut attr) = fs.attributes(Node::Claim(key), now) else { return reply.error(Errno::EIO) };
            // The kernel keeps this for an instant. Who locks the new handle within it must not take its file for one
            // that was unlinked.
            attr.nlink = 1;
            if direct {
                created::answer(&fs.device, unique, reply, &attr, FileHandle(handle.0), claim_flags());
            } else {
                reply.created(&NEVER, &attr, Generation(0), FileHandle(handle.0), claim_flags());
            }
        };
        if flags & libc::O_EXCL == 0 {
            // The inode number is told, so it has to be recorded; nothing else is.
            return self.engine.when_recorded(Box::new(move || created(reply)));
        }
        let claimant = self.claimant(req, &seen, &seen);
        let fs = self.clone();
        let done = move |result: Result<_, Error>| match result {
            Ok(_) => created(reply),
            Err(error) => {
                fs.handles.lock().remove(&handle.0);
                fs.forget_kept(handle.0);
                fs.engine.not_opened(key, now);
                reply.error(errno(&error));
            }
        };
        self.engine.submit(key, Input::Create { handle, claimant }, now, Box::new(done));
    }

    /// Whether the holder of an orphaned key is about to create it exclusively, which gives it its attempt back (§5).
    pub(super) fn creates_again(&self, req: &Caller, key: KeyId) -> bool {
        if !self.engine.has_orphans() {
            return false;
        }
        let seen = self.processes.identify(req.pid());
        self.engine.is_return(key, &self.claimant(req, &seen, &seen)) && process::is_creating(req.pid())
    }

    /// The key and handle that this very request was given before.
    fn claim_given_to(&self, req: &Caller) -> Option<(KeyId, Handle)> {
        let handle = self.handle_given_to(req)?;
        let key = self.with_handle(handle, |open| match open {
            Open::Claim { key, .. } => Some(*key),
            _ => None,
        });
        Some((key.flatten()?, Handle(handle)))
    }

    fn open_new_claim(&self, req: &Caller, key: KeyId, opener: Seen) -> Handle {
        let handle = self.engine.new_handle();
        let open = Open::Claim { key, opener, snapshot: Snapshot::default(), owners: HashSet::new() };
        self.open_handle(req, handle, open);
        handle
    }

    pub(super) fn open_claim(&self, req: &Caller, key: KeyId, reply: ReplyOpen) {
        let handle = match self.claim_given_to(req) {
            Some((_, given)) => given,
            None => match self.engine.open_key(key) {
                Ok(()) => self.open_new_claim(req, key, self.processes.identify(req.pid())),
                Err(error) => return reply.error(errno(&error)),
            },
        };
        reply.opened(FileHandle(handle.0), claim_flags());
    }

    pub(super) fn close_claim(&self, handle: u64, key: KeyId, opener: Process, reply: ReplyEmpty) {
        let now = clock::now();
        let handle = Handle(handle);
        let holder = self.engine.view(key, |entry, _| entry.state.held_by(handle).map(|held| held.claimant.holder));
        let why: Why = match holder.flatten() {
            Some(holder) => match self.processes.why_gone(opener) {
                why if &*why == "closed" && !opener.is(holder) => self.processes.why_gone(holder),
                why => why,
            },
            None => Why::from("closed"),
        };
        let fs = self.clone();
        let done = move |result| {
            fs.forget_kept(handle.0);
            finish(reply, result);
        };
        self.engine.submit(key, Input::Close { handle, why }, now, Box::new(done));
    }

    /// The key that a lock request is about, and who opened its handle: only keys are locked, and only as a whole.
    fn lockable(&self, request: &LockRequest) -> Result<(KeyId, Seen), Errno> {
        let open = self.with_handle(request.handle, |open| match open {
            Open::Claim { key, opener, .. } => Some((*key, opener.clone())),
            _ => None,
        });
        let claim = open.flatten().ok_or(Errno::ENOLCK)?;
        if request.range == WHOLE_FILE { Ok(claim) } else { Err(Errno::EINVAL) }
    }

    pub(super) fn lock(&self, req: &Caller, request: &LockRequest, reply: ReplyEmpty) {
        let now = clock::now();
        let (key, opener) = match self.lockable(request) {
            Ok(claim) => claim,
            Err(refused) => return reply.error(refused),
        };
        let handle = Handle(request.handle);
        let owner = self.owner(request.owner, handle, || self.processes.identify(req.pid()).process);
        let mode = match request.kind {
            libc::F_WRLCK => Mode::Exclusive,
            libc::F_RDLCK => Mode::Shared,
            _ => {
                let input = Input::Unlock { handle, owner };
                return self.engine.submit(key, input, now, Box::new(|result| finish(reply, result)));
            }
        };
        let namespace_allows = self.engine.view(key, |entry, tree| {
            tree.get(entry.namespace).is_some_and(|namespace| self.allowed(req, namespace, 0o3))
        });
        if namespace_allows != Some(true) {
            return reply.error(Errno::EACCES);
        }
        let locker = self.processes.identify(req.pid());
        let claimant = self.claimant(req, &opener, &locker);
        let mut wait = None;
        if request.sleep {
            let Some((place, since_ns)) = self.flight.park(req.unique(), now.boot_ns) else {
                return reply.error(Errno::ENOLCK);
            };
            let waiter = self.engine.new_waiter();
            wait = Some((waiter, place, since_ns));
        }
        let fs = self.clone();
        let done = move |result| {
            if let Some((waiter, ..)) = wait {
                fs.watcher.remove(Wait::Lock(waiter));
            }
            finish(reply, result);
            if let Some((_, place, _)) = wait {
                fs.flight.unpark(place);
            }
        };
        let lock = Input::Lock { handle, owner, mode, wait: wait.map(|(waiter, ..)| waiter), claimant };
        self.engine.submit(key, lock, now, Box::new(done));
        if let Some((waiter, _, since_ns)) = wait.filter(|(waiter, ..)| self.engine.is_waiting(*waiter)) {
            if since_ns < now.boot_ns {
                self.engine.waits_since(waiter, Now { boot_ns: since_ns, wall_ms: now.wall_at(since_ns) });
            }
            self.watcher.add(Wait::Lock(waiter), req.unique(), req.pid());
            // Its answer may have come in between, and has found nothing to take off the watch.
            if !self.engine.is_waiting(waiter) {
                self.watcher.remove(Wait::Lock(waiter));
            }
        }
    }

    /// The lock owner that a request means. The kernel's number for a POSIX lock owner outlives the process it stood for
    /// and may stand for another one later: it counts for what it stood for only with the same handle or process.
    fn owner(&self, number: u64, handle: Handle, process: impl FnOnce() -> Process) -> Owner {
        let known = self.owners.lock().get(&number).filter(|known| known.handles.contains(&handle)).map(|it| it.owner);
        if let Some(owner) = known {
            return owner;
        }
        let process = process();
        let mut owners = self.owners.lock();
        let stranger = || KnownOwner { owner: Owner(self.engine.new_handle().0), process, handles: HashSet::new() };
        let known = owners.entry(number).or_insert_with(stranger);
        if !(known.process.is(process) || known.handles.contains(&handle)) {
            for handle in &known.handles {
                self.forget_owner(number, *handle);
            }
            *known = stranger();
        }
        if known.handles.insert(handle) {
            self.keep_owner(number, handle, known);
        }
        let owner = known.owner;
        drop(owners);
        self.with_handle(handle.0, |open| {
            if let Open::Claim { owners, .. } = open {
                owners.insert(number);
            }
        });
        owner
    }

    /// Forgets the owners that only a handle now closed told apart.
    pub(super) fn forget_owners(&self, numbers: &HashSet<u64>, handle: Handle) {
        if numbers.is_empty() {
            return;
        }
        let mut owners = self.owners.lock();
        for number in numbers {
            self.forget_owner(*number, handle);
            if let Some(known) = owners.get_mut(number) {
                known.handles.remove(&handle);
                if known.handles.is_empty() {
                    owners.remove(number);
                }
            }
        }
    }

    pub(super) fn test_lock(&self, req: &Caller, request: &LockRequest, reply: ReplyLock) {
        let (key, _) = match self.lockable(request) {
            Ok(claim) => claim,
            Err(refused) => return reply.error(refused),
        };
        let handle = Handle(request.handle);
        let owner = self.owner(request.owner, handle, || self.processes.identify(req.pid()).process);
        self.expire(key, clock::now());
        let in_the_way = self.engine.view(key, |entry, _| {
            let state = &entry.state;
            if let Some(attempt) = state.live().filter(|_| !state.is_holder(handle, owner)) {
                return Some((libc::F_WRLCK, attempt.claimant.holder.pid));
            }
            let other = state.sharers.iter().find(|share| !share.is_of(handle, owner));
            other.filter(|_| request.kind == libc::F_WRLCK).map(|share| (libc::F_RDLCK, share.claimant.holder.pid))
        });
        match in_the_way.flatten() {
            Some((kind, pid)) => reply.locked(WHOLE_FILE.0, WHOLE_FILE.1, kind, pid),
            None => reply.locked(request.range.0, request.range.1, libc::F_UNLCK, 0),
        }
    }

    pub(super) fn read_claim(&self, handle: u64, key: KeyId, offset: u64, size: u32, reply: ReplyData) {
        let now = clock::now();
        self.expire(key, now);
        let fs = self.clone();
        let answer = move || {
            // In one look: the lease may end, and another begin, between two.
            let record = fs.engine.view(key, |entry, _| {
                let lost = entry.state.lost.contains(&Handle(handle));
                (!lost).then(|| view::record(entry, now))
            });
            let Some(record) = record.flatten() else {
                fs.note_stale(key, now);
                return reply.error(Errno::ESTALE);
            };
            let piece = fs.with_handle(handle, |open| match open {
                Open::Claim { snapshot, .. } => {
                    let piece = snapshot.read(offset, size, || Some(record))?;
                    fs.keep_text(handle, snapshot, offset + piece.len() as u64);
                    Some(piece)
                }
                _ => None,
            });
            match piece.flatten() {
                Some(bytes) => reply.data(&bytes),
                None => reply.error(Errno::EBADF),
            }
        };
        self.engine.when_lasting(key, now, Box::new(answer));
    }

    pub(super) fn note_stale(&self, key: KeyId, now: Now) {
        if let Some(epoch) = self.engine.view(key, |entry, _| entry.state.epoch) {
            self.engine.note_stale(key, epoch, now);
        }
    }

    pub(super) fn write_note(&self, handle: u64, key: KeyId, data: &[u8], reply: ReplyWrite) {
        let now = clock::now();
        self.expire(key, now);
        let handle = Handle(handle);
        let standing = self.engine.view(key, |entry, _| {
            let state = &entry.state;
            if state.lost.contains(&handle) {
                Err(Error::Stale)
            } else {
                state.held_by(handle).map(drop).ok_or(Error::Denied)
            }
        });
        let checked = standing.unwrap_or(Err(Error::Stale)).and_then(|()| {
            if data.len() > MAX_NOTE {
                return Err(Error::TooLarge("a note has at most 4,096 bytes"));
            }
            std::str::from_utf8(data).map_err(|_| Error::Invalid("a note is UTF-8"))
        });
        let note: Arc<str> = match checked {
            Ok(text) => Arc::from(text),
            Err(error) => {
                if error == Error::Stale {
                    self.note_stale(key, now);
                }
                return reply.error(errno(&error));
            }
        };
        let length = u32::try_from(data.len()).unwrap_or(0);
        let done = move |result: Result<_, Error>| match result {
            Ok(_) => reply.written(length),
            Err(error) => reply.error(errno(&error)),
        };
        self.engine.submit(key, Input::Renew { handle, note: Some(note) }, now, Box::new(done));
    }

    pub(super) fn unlink_claim(&self, req: &Caller, parent: NamespaceId, name: &OsStr, reply: ReplyEmpty) {
        let key = match self.engine.child(parent, name.as_bytes()) {
            Ok(Some(leasefs::namespaces::Node::Key(key))) => key,
            Ok(Some(leasefs::namespaces::Node::Namespace(_))) => return reply.error(Errno::EISDIR),
            Ok(None) => return reply.error(Errno::ENOENT),
            Err(error) => return reply.error(errno(&error)),
        };
        let process = self.processes.identify(req.pid()).process;
        let uid = req.uid();
        let owns = |tree: &leasefs::namespaces::Namespaces| tree.get(parent).is_some_and(|ns| ns.row.uid == uid);
        let may_forget = uid == 0 || self.engine.look(|tree| owns(tree));
        let input = Input::Unlink { process, may_forget, uid, request: req.request() };
        self.engine.submit(key, input, clock::now(), Box::new(|result| finish(reply, result)));
    }

    /// `futimens` renews; nothing else about a key's file can be set (§4). The kernel does not say by which handle
    /// times are set, so the process tells: it opened or locked the handle that holds the key.
    pub(super) fn change_claim(&self, req: &Caller, node: Node, key: KeyId, change: Change, reply: ReplyAttr) {
        let now = clock::now();
        if change.mode.is_some() || change.uid.is_some() || change.gid.is_some() {
            return reply.error(Errno::EPERM);
        }
        let handle = match change.handle {
            Some(handle) => Ok(Handle(handle)),
            None => self.handle_of_caller(req, key, now),
        };
        let handle = match handle {
            Ok(handle) => handle,
            Err(error) => return reply.error(errno(&error)),
        };
        let fs = self.clone();
        let done = move |result: Result<_, Error>| match result.map(|_| fs.attributes(node, now)) {
            Ok(Some(attr)) => reply.attr(&NEVER, &attr),
            Ok(None) => reply.error(Errno::ESTALE),
            Err(error) => reply.error(errno(&error)),
        };
        // A record is as long as it is: truncating it, as lock files often are, says that the holder is at work.
        self.engine.submit(key, Input::Renew { handle, note: None }, now, Box::new(done));
    }

    fn handle_of_caller(&self, req: &Caller, key: KeyId, now: Now) -> Result<Handle, Error> {
        let process = self.processes.identify(req.pid()).process;
        self.expire(key, now);
        let opened = self.handles_of(key, process);
        let found = self.engine.view(key, |entry, _| {
            // It may be meant for the handle that lost its lease, which must never renew what a later one holds.
            if opened.iter().any(|handle| entry.state.lost.contains(handle)) {
                return Err(Error::Stale);
            }
            let held = entry.state.attempt.as_ref().filter(|a| a.held && a.claimant.includes(process));
            held.map(|attempt| attempt.handle).ok_or(Error::Denied)
        });
        found.unwrap_or(Err(Error::Stale))
    }

    /// Answers [`LEASEFS_IOC_HOLDS`]. In one look, as a read: the lease may end, and another begin, between two.
    pub(super) fn tell_holds(&self, handle: u64, key: KeyId, reply: ReplyIoctl) {
        let now = clock::now();
        self.expire(key, now);
        let fs = self.clone();
        let answer = move || {
            let held = fs.engine.view(key, |entry, _| {
                let (state, handle) = (&entry.state, Handle(handle));
                (!state.lost.contains(&handle)).then(|| state.held_by(handle).map_or(0, |attempt| attempt.epoch.0))
            });
            match held.flatten() {
                Some(epoch) => reply.ioctl(0, &epoch.to_ne_bytes()),
                None => reply.error(Errno::ESTALE),
            }
        };
        self.engine.when_lasting(key, now, Box::new(answer));
    }

    /// The key of a claims inode in this parent, for requests that name a file.
    pub(super) fn parent_of(ino: INodeNo) -> Option<NamespaceId> {
        match Node::of(ino) {
            Some(Node::Namespace(crate::ino::Tree::Claims, id)) => Some(id),
            _ => None,
        }
    }
}
