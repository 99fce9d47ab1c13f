//! Watches whoever waits for an answer, so that a signal ends the wait.
//!
//! The kernel says once that a signal came for whoever waits, and waits deafly for the answer then. Where the thread can be
//! seen, `/proc` tells whether the signal is one that ends the wait: another thread may take it, or it was a stop that is
//! over. So it is asked then, and from time to time besides: 20 ms after a wait began, then less often the longer it lasts,
//! never more than 80 ms apart. A thread that cannot be seen, in another pid namespace say, has the kernel's word alone.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use foldhash::HashMap;
use leasefs::WaiterId;
use parking_lot::{Condvar, Mutex};

use crate::clock;
use crate::process::{Pending, Watched};

const FIRST_NS: u64 = 20_000_000;
const LONGEST_NS: u64 = 80_000_000;
/// After a look that found what may be for another thread.
const AGAIN_NS: u64 = 10_000_000;
/// A thread that could not be seen is looked for again after this long: there may have been no room for another file.
const UNSEEN_NS: u64 = 1_000_000_000;

/// What waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Wait {
    /// A lock request in line.
    Lock(WaiterId),
    /// A read of `.leasefs/events`, by the number it was parked under.
    Events(u64),
    /// An order that takes its time, by the number it was parked under.
    Order(u64),
}

struct Entry {
    tid: u32,
    unique: u64,
    watched: Option<Watched>,
    /// The kernel said that a signal came.
    interrupted: bool,
    next_ns: u64,
    interval_ns: u64,
}

#[derive(Default)]
struct Entries {
    waits: HashMap<Wait, Entry>,
    by_unique: HashMap<u64, Wait>,
}

/// Everything that waits.
#[derive(Default)]
pub struct Watcher {
    entries: Mutex<Entries>,
    some: Condvar,
    sleeping: AtomicU64,
}

impl Watcher {
    /// Begins to watch a thread, which waits for the answer to the request of this number.
    pub fn add(&self, wait: Wait, unique: u64, tid: u32) {
        let next_ns = clock::boot_ns() + FIRST_NS;
        let entry = Entry { tid, unique, watched: None, interrupted: false, next_ns, interval_ns: FIRST_NS };
        let mut entries = self.entries.lock();
        entries.by_unique.insert(unique, wait);
        entries.waits.insert(wait, entry);
        drop(entries);
        if self.sleeping.load(Ordering::SeqCst) != 0 {
            self.some.notify_one();
        }
    }

    /// Stops watching: it was answered.
    pub fn remove(&self, wait: Wait) {
        let mut entries = self.entries.lock();
        if let Some(entry) = entries.waits.remove(&wait) {
            entries.by_unique.remove(&entry.unique);
        }
    }

    /// The kernel says that a signal came for whoever sent this request. Nothing happens where that does not wait.
    pub fn interrupted(&self, unique: u64) {
        let mut entries = self.entries.lock();
        let Some(wait) = entries.by_unique.get(&unique).copied() else { return };
        if let Some(entry) = entries.waits.get_mut(&wait) {
            (entry.interrupted, entry.next_ns) = (true, 0);
            self.some.notify_one();
        }
    }

    /// Looks after all of them for ever. `interrupted` is called for each that a signal waits for.
    pub fn run(&self, mut interrupted: impl FnMut(Wait)) {
        loop {
            let due = self.due();
            for wait in due {
                interrupted(wait);
            }
        }
    }

    /// Sleeps until something is to be looked at, and gives what has a signal.
    fn due(&self) -> Vec<Wait> {
        let mut entries = self.entries.lock();
        while entries.waits.is_empty() {
            self.sleeping.store(1, Ordering::SeqCst);
            self.some.wait(&mut entries);
            self.sleeping.store(0, Ordering::SeqCst);
        }
        let now_ns = clock::boot_ns();
        let soonest_ns = entries.waits.values().map(|entry| entry.next_ns).min().unwrap_or(now_ns);
        if soonest_ns > now_ns {
            // Whoever comes in the meantime is due no sooner than FIRST_NS from then.
            let pause_ns = (soonest_ns - now_ns).min(FIRST_NS);
            self.some.wait_for(&mut entries, Duration::from_nanos(pause_ns));
        }
        let now_ns = clock::boot_ns();
        let mut signalled = Vec::new();
        for (wait, entry) in entries.waits.iter_mut().filter(|(_, entry)| entry.next_ns <= now_ns) {
            if entry.look(now_ns) {
                signalled.push(*wait);
            }
        }
        signalled
    }
}

impl Entry {
    fn look(&mut self, now_ns: u64) -> bool {
        if self.watched.is_none() && self.tid != 0 {
            self.watched = Watched::open(self.tid).ok();
        }
        let Some(watched) = &mut self.watched else {
            // Not to be seen is no signal: told EINTR without one, a program would read errno 512. With one it would not,
            // whatever becomes of the signal: the kernel has marked the thread.
            self.next_ns = now_ns + if self.interrupted { AGAIN_NS } else { UNSEEN_NS };
            return self.interrupted;
        };
        let pending = watched.look();
        self.next_ns = if pending == Pending::Perhaps {
            now_ns + AGAIN_NS
        } else {
            self.interval_ns = (self.interval_ns * 3 / 2).min(LONGEST_NS);
            now_ns + self.interval_ns
        };
        pending == Pending::Signal
    }
}
