//! The threads beside the reader: one that wakes at deadlines, one that does slow I/O.
//!
//! Waking another CPU costs more than most requests, so neither is woken for what the reader can do itself, and both
//! sleep without a timer while there is nothing to wait for.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::time::TimeSpec;
use nix::sys::timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags};

use crate::clock;

/// A sleeping thread that can be woken early.
pub struct Alarm {
    timer: TimerFd,
    kick: EventFd,
    /// When it will wake by itself; 0 while it is awake, `u64::MAX` when it will not.
    armed_ns: AtomicU64,
}

impl Alarm {
    /// Makes an alarm nobody sleeps on yet.
    ///
    /// # Errors
    /// Those of `timerfd_create(2)` and `eventfd(2)`.
    pub fn new() -> nix::Result<Alarm> {
        Ok(Alarm {
            timer: TimerFd::new(ClockId::CLOCK_BOOTTIME, TimerFlags::TFD_CLOEXEC | TimerFlags::TFD_NONBLOCK)?,
            kick: EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?,
            armed_ns: AtomicU64::new(0),
        })
    }

    /// Sees to it that the sleeper is awake at `at_ns` of `CLOCK_BOOTTIME`.
    pub fn need(&self, at_ns: u64) {
        if at_ns < self.armed_ns.load(Ordering::SeqCst) {
            self.wake();
        }
    }

    /// Wakes the sleeper now.
    pub fn wake(&self) {
        let _ = self.kick.write(1);
    }

    /// Runs `work` whenever it is needed, which is at the times `next` gives, for ever.
    pub fn run(&self, next: impl Fn() -> u64, mut work: impl FnMut()) {
        loop {
            self.armed_ns.store(0, Ordering::SeqCst);
            work();
            let at_ns = next();
            self.armed_ns.store(at_ns, Ordering::SeqCst);
            // Whoever changed its mind before it saw when we are armed did not wake us.
            if next() < at_ns || at_ns <= clock::boot_ns() {
                continue;
            }
            self.sleep(at_ns);
        }
    }

    fn sleep(&self, at_ns: u64) {
        if at_ns == u64::MAX {
            let _ = self.timer.unset();
        } else {
            let at = TimeSpec::new((at_ns / 1_000_000_000).cast_signed(), (at_ns % 1_000_000_000).cast_signed());
            let _ = self.timer.set(Expiration::OneShot(at), TimerSetTimeFlags::TFD_TIMER_ABSTIME);
        }
        let mut fds =
            [PollFd::new(self.timer.as_fd(), PollFlags::POLLIN), PollFd::new(self.kick.as_fd(), PollFlags::POLLIN)];
        while poll(&mut fds, PollTimeout::NONE) == Err(Errno::EINTR) {}
        let _ = self.kick.read();
    }
}

/// Starts a thread that lives as long as the process.
///
/// # Errors
/// Those of `pthread_create(3)`.
pub fn spawn<T: Send + Sync + 'static>(
    name: &str,
    shared: &Arc<T>,
    body: impl FnOnce(&T) + Send + 'static,
) -> std::io::Result<()> {
    let shared = Arc::clone(shared);
    std::thread::Builder::new().name(name.to_owned()).spawn(move || body(&shared)).map(drop)
}
