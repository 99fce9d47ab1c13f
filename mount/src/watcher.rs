//! Watches whoever waits for an answer, so that a signal ends the wait.
//!
//! fuser does not pass on the kernel's interrupts, and the kernel itself waits deafly for the answer: so `/proc` is
//! asked, 20 ms after a wait began, then less often the longer it lasts, never more than 80 ms apart.

use std::sync::atomic::{AtomicU64, Ordering};

use foldhash::HashMap;
use leasefs::WaiterId;
use parking_lot::{Condvar, Mutex};

use crate::clock;
use crate::process::{Pending, Watched};

const FIRST_NS: u64 = 20_000_000;
const LONGEST_NS: u64 = 80_000_000;
/// After a look that found what may be for another thread.
const AGAIN_NS: u64 = 10_000_000;
/// A thread that cannot be seen, in another pid namespace say, is looked for again after this long.
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
    watched: Option<Watched>,
    next_ns: u64,
    interval_ns: u64,
}

/// Everything that waits.
#[derive(Default)]
pub struct Watcher {
    entries: Mutex<HashMap<Wait, Entry>>,
    some: Condvar,
    sleeping: AtomicU64,
}

impl Watcher {
    /// Begins to watch a thread.
    pub fn add(&self, wait: Wait, tid: u32) {
        let next_ns = clock::boot_ns() + FIRST_NS;
        let entry = Entry { tid, watched: None, next_ns, interval_ns: FIRST_NS };
        self.entries.lock().insert(wait, entry);
        if self.sleeping.load(Ordering::SeqCst) != 0 {
            self.some.notify_one();
        }
    }

    /// Stops watching: it was answered.
    pub fn remove(&self, wait: Wait) {
        self.entries.lock().remove(&wait);
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
        while entries.is_empty() {
            self.sleeping.store(1, Ordering::SeqCst);
            self.some.wait(&mut entries);
            self.sleeping.store(0, Ordering::SeqCst);
        }
        let now_ns = clock::boot_ns();
        let soonest_ns = entries.values().map(|entry| entry.next_ns).min().unwrap_or(now_ns);
        if soonest_ns > now_ns {
            // Whoever comes in the meantime is due no sooner than FIRST_NS from then.
            let pause_ns = (soonest_ns - now_ns).min(FIRST_NS);
            drop(entries);
            std::thread::sleep(std::time::Duration::from_nanos(pause_ns));
            entries = self.entries.lock();
        }
        let now_ns = clock::boot_ns();
        let mut signalled = Vec::new();
        for (wait, entry) in entries.iter_mut().filter(|(_, entry)| entry.next_ns <= now_ns) {
            if entry.look(now_ns) {
                signalled.push(*wait);
            }
        }
        signalled
    }
}

impl Entry {
    fn look(&mut self, now_ns: u64) -> bool {
        if self.watched.is_none() {
            match Watched::open(self.tid) {
                Ok(watched) => self.watched = Some(watched),
                // Gone before it could be looked at.
                Err(error) if self.tid != 0 && error.kind() == std::io::ErrorKind::NotFound => return true,
                // Not to be seen, which is no signal: told EINTR without one, a program would read errno 512.
                Err(_) => {
                    self.next_ns = now_ns + UNSEEN_NS;
                    return false;
                }
            }
        }
        match &mut self.watched {
            Some(watched) => {
                let pending = watched.look();
                self.next_ns = if pending == Pending::Perhaps {
                    now_ns + AGAIN_NS
                } else {
                    self.interval_ns = (self.interval_ns * 3 / 2).min(LONGEST_NS);
                    now_ns + self.interval_ns
                };
                pending == Pending::Signal
            }
            None => false,
        }
    }
}
