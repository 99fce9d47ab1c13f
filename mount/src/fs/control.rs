//! `status/KEY` and `.leasefs/*`: what can be read, polled and ordered (§2, §4).

use std::collections::HashMap;

use fuser::{Errno, FileHandle, FopenFlags, PollEvents, PollNotifier, ReplyData, ReplyOpen, ReplyPoll, ReplyWrite};
use leasefs::engine::KeyEntry;
use leasefs::machine::{Input, Why};
use leasefs::namespaces::{Credentials, Namespaces};
use leasefs::{Epoch, Error, Handle, Key, KeyId, view};
use serde::Deserialize;

use super::handles::{Open, Snapshot};
use super::orders::Pruning;
use super::{Caller, LeaseFs, Shared};
use crate::clock;
use crate::errno::errno;
use crate::flight::Place;
use crate::ino::Control;
use crate::process;
use crate::watcher::Wait;

/// Who is to be woken when a key changes. A handle has one place, however often it polls.
#[derive(Default)]
pub struct Polls {
    keys: HashMap<KeyId, HashMap<u64, PollNotifier>>,
    events: HashMap<u64, PollNotifier>,
}

/// Reads of `.leasefs/events` that wait.
#[derive(Default)]
pub struct Parked {
    readers: HashMap<u64, Reader>,
    last: u64,
}

struct Reader {
    handle: u64,
    next: u64,
    size: usize,
    reply: ReplyData,
    place: Place,
}

/// An order written to `.leasefs/control`.
#[derive(Deserialize)]
#[serde(tag = "op", rename_all = "lowercase", deny_unknown_fields)]
enum Order {
    /// Takes the lease away from an attempt.
    Evict {
        key: String,
        epoch: u64,
        #[serde(default)]
        reason: String,
    },
    /// Gives back what an attempt of the caller's own holds.
    Release {
        key: String,
        epoch: u64,
        #[serde(default)]
        reason: String,
    },
    /// Renews an attempt of the caller's own.
    Renew { key: String, epoch: u64 },
    /// To prune what has ended: see [`super::orders`].
    Prune(Pruning),
    /// To look for proof that the holders of orphaned keys are dead, now.
    Reap {},
}

/// Most bytes of a reason, as of a note: it is kept with the attempt, and shown.
const MAX_REASON: usize = 4096;

/// What is recorded of an order: by whom, and what for.
fn because(by: String, reason: &str) -> Result<Why, Errno> {
    match reason.len() {
        0 => Ok(Why::from(by)),
        1..=MAX_REASON => Ok(Why::from(format!("{by}: {reason}"))),
        _ => Err(Errno::EFBIG),
    }
}

impl LeaseFs {
    pub(super) fn open_status(&self, req: &Caller, key: KeyId, flags: i32, reply: ReplyOpen) {
        if flags & libc::O_ACCMODE != libc::O_RDONLY {
            return reply.error(Errno::EACCES);
        }
        let Some(seen) = self.engine.view(key, |entry, _| entry.state.changes) else {
            return reply.error(Errno::ENOENT);
        };
        let handle = self.handle_for(req);
        self.open_handle(req, handle, Open::Status { key, seen, snapshot: Snapshot::default() });
        reply.opened(FileHandle(handle.0), FopenFlags::FOPEN_DIRECT_IO | FopenFlags::FOPEN_NOFLUSH);
    }

    pub(super) fn open_control(&self, req: &Caller, file: Control, flags: i32, reply: ReplyOpen) {
        let writes = flags & libc::O_ACCMODE != libc::O_RDONLY;
        if writes != (file == Control::Orders) {
            return reply.error(Errno::EACCES);
        }
        let handle = self.handle_for(req);
        let (open, flags) = match file {
            Control::Orders => (Open::Control, FopenFlags::empty()),
            Control::Events => {
                let who = Credentials { groups: process::groups(req.pid()), ..self.credentials(req) };
                let events = Open::Events { next: self.engine.next_event(), rest: Vec::new(), who };
                (events, FopenFlags::FOPEN_NONSEEKABLE)
            }
            text => (Open::Text(text, Snapshot::default()), FopenFlags::empty()),
        };
        self.open_handle(req, handle, open);
        let flags = flags | FopenFlags::FOPEN_DIRECT_IO | FopenFlags::FOPEN_NOFLUSH;
        reply.opened(FileHandle(handle.0), flags);
    }

    pub(super) fn read_status(&self, handle: u64, key: KeyId, offset: u64, size: u32, reply: ReplyData) {
        let now = clock::now();
        self.expire(key, now);
        let fs = self.clone();
        let answer = move || {
            let count = std::cell::Cell::new(None);
            let fresh = || {
                let (text, changes) =
                    fs.engine.view(key, |entry, _| (view::status(entry, now), entry.state.changes))?;
                count.set(Some(changes));
                Some(text)
            };
            let piece = fs.with_handle(handle, |open| match open {
                Open::Status { seen, snapshot, .. } => {
                    let piece = snapshot.read(offset, size, fresh);
                    *seen = count.get().unwrap_or(*seen);
                    let piece = piece?;
                    fs.keep_text(handle, snapshot, offset + piece.len() as u64);
                    Some(piece)
                }
                _ => None,
            });
            match piece.flatten() {
                Some(bytes) => reply.data(&bytes),
                None => reply.error(Errno::ESTALE),
            }
        };
        self.engine.when_lasting(key, now, Box::new(answer));
    }

    pub(super) fn read_text(&self, handle: u64, file: Control, offset: u64, size: u32, reply: ReplyData) {
        let fresh = || match file {
            Control::Version => Some(format!("{}\n", self.settings.version)),
            Control::Config => serde_json::to_string(&self.settings).ok().map(|json| json + "\n"),
            Control::Metrics => self.metrics().ok(),
            Control::Events | Control::Orders => None,
        };
        let text = if offset == 0 { fresh() } else { None };
        let piece = self.with_handle(handle, |open| match open {
            Open::Text(_, snapshot) => {
                let piece = snapshot.read(offset, size, || text.or_else(|| Some(String::new())))?;
                self.keep_text(handle, snapshot, offset + piece.len() as u64);
                Some(piece)
            }
            _ => None,
        });
        match piece.flatten() {
            Some(bytes) => reply.data(&bytes),
            None => reply.error(Errno::EBADF),
        }
    }

    pub(super) fn read_events(&self, req: &Caller, handle: u64, size: u32, nonblock: bool, reply: ReplyData) {
        let size = size as usize;
        self.with_handle(handle, |open| {
            if let Open::Events { next, rest, .. } = open
                && rest.is_empty()
            {
                *next = self.started_from(req, handle, *next);
            }
        });
        let (bytes, next) = self.take_events(handle, size);
        if !bytes.is_empty() {
            return reply.data(&bytes);
        }
        if nonblock {
            return reply.error(Errno::EAGAIN);
        }
        let Some((place, _)) = self.flight.park(req.unique(), clock::boot_ns()) else {
            return reply.error(Errno::ENOMEM);
        };
        {
            let mut parked = self.parked.lock();
            parked.last += 1;
            let number = parked.last;
            parked.readers.insert(number, Reader { handle, next, size, reply, place });
            self.engine.set_watched(true);
            self.watcher.add(Wait::Events(number), req.unique(), req.pid());
        }
        // What happened before it was parked woke nobody.
        self.answer_events();
    }

    pub(super) fn order(&self, req: &Caller, data: &[u8], reply: ReplyWrite) {
        let length = u32::try_from(data.len()).unwrap_or(0);
        let order = match serde_json::from_slice(data) {
            Ok(Order::Prune(pruning)) => return self.order_prune(req, pruning, length, reply),
            Ok(Order::Reap {}) => return self.order_reap(req, length, reply),
            Ok(order) => order,
            Err(_) => return reply.error(Errno::EINVAL),
        };
        let (key, input) = match self.plan(req, order) {
            Ok(planned) => planned,
            Err(refused) => return reply.error(refused),
        };
        let done = move |result: Result<_, Error>| match result {
            Ok(_) => reply.written(length),
            Err(error) => reply.error(errno(&error)),
        };
        self.engine.submit(key, input, clock::now(), Box::new(done));
    }

    /// What an order asks of which key, where it is for the caller to ask.
    fn plan(&self, req: &Caller, order: Order) -> Result<(KeyId, Input), Errno> {
        let (uid, request) = (req.uid(), req.request());
        let pid = || self.processes.identify(req.pid()).process.pid;
        Ok(match order {
            Order::Evict { key, epoch, reason } => {
                let key = self.evictable(req, &key)?;
                let why = because(format!("by uid {uid} (pid {})", pid()), &reason)?;
                (key, Input::Evict { epoch: Epoch(epoch), why, request })
            }
            Order::Release { key, epoch, reason } => {
                let key = self.own_key(req, &key)?;
                let why = because(format!("by pid {}", pid()), &reason)?;
                (key, Input::GiveBack { epoch: Epoch(epoch), uid, why, request })
            }
            Order::Renew { key, epoch } => {
                let key = self.own_key(req, &key)?;
                (key, Input::RenewAttempt { epoch: Epoch(epoch), uid })
            }
            // They are about no one key.
            Order::Prune(_) | Order::Reap {} => return Err(Errno::EINVAL),
        })
    }

    /// The key of that name. Whether there is one is not for everybody to know.
    fn named(&self, req: &Caller, key: &str) -> Result<KeyId, Errno> {
        let key = Key::parse(key).map_err(|error| errno(&error.into()))?;
        let absent = if self.is_operator(req) { Errno::ENOENT } else { Errno::EACCES };
        self.engine.find(&key).map_err(|error| errno(&error))?.ok_or(absent)
    }

    pub(super) fn is_operator(&self, req: &Caller) -> bool {
        req.uid() == 0 || req.uid() == self.settings.mount_owner
    }

    /// A key whose holder the caller may evict: root, the mount's owner and the namespace's (§4).
    fn evictable(&self, req: &Caller, key: &str) -> Result<KeyId, Errno> {
        let key = self.named(req, key)?;
        let owner = |tree: &Namespaces, id| tree.get(id).is_some_and(|namespace| namespace.row.uid == req.uid());
        let owns = || self.engine.view(key, |entry, tree| owner(tree, entry.namespace)) == Some(true);
        if self.is_operator(req) || owns() { Ok(key) } else { Err(Errno::EACCES) }
    }

    /// A key of whose attempts the caller may be told: its newest is the caller's own, or the key can be seen. Whose the
    /// one is that is meant, and whether it holds the key, is looked at when the order takes effect.
    fn own_key(&self, req: &Caller, key: &str) -> Result<KeyId, Errno> {
        let key = self.named(req, key)?;
        let uid = req.uid();
        let is_own = |entry: &KeyEntry| entry.state.attempt.as_ref().is_some_and(|attempt| attempt.claimant.uid == uid);
        let owns = self.engine.view(key, |entry, _| is_own(entry)) == Some(true);
        let sees = || {
            let who = Credentials { groups: process::groups(req.pid()), ..self.credentials(req) };
            self.engine.view(key, |entry, tree| tree.may_see(&who, entry.key.split().0)) == Some(true)
        };
        if uid == 0 || owns || sees() { Ok(key) } else { Err(Errno::EACCES) }
    }

    pub(super) fn do_poll(&self, handle: u64, notifier: PollNotifier, wants_notice: bool, reply: ReplyPoll) {
        let ready = PollEvents::POLLIN | PollEvents::POLLRDNORM | PollEvents::POLLOUT | PollEvents::POLLWRNORM;
        enum What {
            Claim(KeyId),
            Status(KeyId, u64),
            Events(u64),
            Other,
        }
        let what = self.with_handle(handle, |open| match open {
            Open::Claim { key, .. } => What::Claim(*key),
            Open::Status { key, seen, .. } => What::Status(*key, *seen),
            Open::Events { next, rest, .. } if rest.is_empty() => What::Events(*next),
            _ => What::Other,
        });
        // Entered before it is looked at, so that a change in between is not missed.
        if wants_notice {
            self.keep_poll(handle, notifier.handle().0);
            let mut polls = self.polls.lock();
            match what {
                Some(What::Claim(key) | What::Status(key, _)) => {
                    polls.keys.entry(key).or_default().insert(handle, notifier);
                }
                Some(What::Events(_)) => {
                    polls.events.insert(handle, notifier);
                }
                _ => {}
            }
            self.engine.set_watched(true);
        }
        let now = clock::now();
        let events = match what {
            // Who is told that the lease is lost must not find it again after a crash.
            Some(What::Claim(key)) => {
                self.expire(key, now);
                let fs = self.clone();
                let answer = move || {
                    let lost = fs.engine.view(key, |entry, _| entry.state.lost.contains(&Handle(handle)));
                    let hang_up = PollEvents::POLLHUP | PollEvents::POLLERR | PollEvents::POLLIN;
                    reply.poll(if lost == Some(false) { ready } else { hang_up });
                };
                return self.engine.when_lasting(key, now, Box::new(answer));
            }
            Some(What::Status(key, seen)) => {
                self.expire(key, now);
                let readable = PollEvents::POLLIN | PollEvents::POLLRDNORM;
                match self.engine.view(key, |entry, _| entry.state.changes) {
                    Some(changes) if changes == seen => readable,
                    _ => readable | PollEvents::POLLPRI,
                }
            }
            Some(What::Events(next)) if next < self.engine.next_event() => PollEvents::POLLIN | PollEvents::POLLRDNORM,
            Some(What::Events(_)) => PollEvents::empty(),
            _ => ready,
        };
        reply.poll(events);
    }
}

impl Shared {
    /// Answers and wakes whoever follows what happens. Wake-ups of pollers are left to the timekeeper: the kernel is
    /// not to be notified from inside a request.
    pub fn announce(&self) {
        if !self.parked.lock().readers.is_empty() {
            self.answer_events();
        }
        let polls = self.polls.lock();
        if !polls.keys.is_empty() || !polls.events.is_empty() {
            self.timekeeper.wake();
        }
    }

    /// What a reader of events is to be given now, at most `size` bytes, and the number it goes on from.
    fn take_events(&self, handle: u64, size: usize) -> (Vec<u8>, u64) {
        let taken = self.with_handle(handle, |open| {
            let Open::Events { next, rest, who } = open else { return None };
            if rest.is_empty() {
                let (text, after) = self.engine.events(*next, size, who);
                (*rest, *next) = (text.into_bytes(), after);
                self.keep_position(handle, after);
            }
            let later = rest.split_off(size.min(rest.len()));
            Some((std::mem::replace(rest, later), *next))
        });
        taken.flatten().unwrap_or_default()
    }

    /// Answers the reads of events that have something to read now.
    pub(super) fn answer_events(&self) {
        let mut parked = self.parked.lock();
        let newest = self.engine.next_event();
        let due: Vec<u64> =
            parked.readers.iter().filter(|(_, reader)| reader.next < newest).map(|(number, _)| *number).collect();
        for number in due {
            let Some(mut reader) = parked.readers.remove(&number) else { continue };
            let (bytes, next) = self.take_events(reader.handle, reader.size);
            if bytes.is_empty() {
                reader.next = next;
                parked.readers.insert(number, reader);
            } else {
                self.watcher.remove(Wait::Events(number));
                reader.reply.data(&bytes);
                self.flight.unpark(reader.place);
            }
        }
    }

    /// Ends a read of events with `EINTR`.
    pub(super) fn interrupt_events(&self, number: u64) {
        if let Some(reader) = self.parked.lock().readers.remove(&number) {
            reader.reply.error(Errno::EINTR);
            self.flight.unpark(reader.place);
        }
    }

    /// Wakes those who poll what has changed.
    pub(super) fn notify_polls(&self) {
        let changed = self.engine.take_changed();
        if changed.is_empty() {
            return;
        }
        let mut polls = self.polls.lock();
        let keys = changed.iter().filter_map(|key| polls.keys.remove(key)).flatten();
        let mut due: Vec<PollNotifier> = keys.map(|(_, notifier)| notifier).collect();
        due.extend(polls.events.drain().map(|(_, notifier)| notifier));
        // With both locks held, or it would be taken from somebody who just began to wait.
        let parked = self.parked.lock();
        if polls.keys.is_empty() && parked.readers.is_empty() {
            self.engine.set_watched(false);
        }
        drop((polls, parked));
        for notifier in due {
            // A poller that is gone is no error.
            let _ = notifier.notify();
        }
    }

    /// Forgets whoever polled by a handle that is gone.
    pub(super) fn forget_polls(&self, handle: u64) {
        self.forget_poll(handle);
        let mut polls = self.polls.lock();
        if polls.keys.is_empty() && polls.events.is_empty() {
            return;
        }
        polls.events.remove(&handle);
        polls.keys.retain(|_, handles| {
            handles.remove(&handle);
            !handles.is_empty()
        });
    }
}
