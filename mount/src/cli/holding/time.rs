//! Time as leases count it: `CLOCK_BOOTTIME`, which steps of the wall clock do not move and in which suspend counts.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use nix::sys::time::TimeSpec;
use nix::sys::timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags};

/// The present time on `CLOCK_BOOTTIME`.
pub fn boot_now() -> nix::Result<Duration> {
    nix::time::clock_gettime(nix::time::ClockId::CLOCK_BOOTTIME).map(Duration::from)
}

/// A descriptor that becomes readable at a time on `CLOCK_BOOTTIME`.
pub struct Timer(TimerFd);

impl Timer {
    /// A timer that is not set.
    pub fn new() -> nix::Result<Timer> {
        TimerFd::new(ClockId::CLOCK_BOOTTIME, TimerFlags::TFD_CLOEXEC | TimerFlags::TFD_NONBLOCK).map(Timer)
    }

    /// Sets it to ring at this time, at once if that has passed. Setting makes it unreadable until then.
    pub fn ring_at(&self, at: Duration) -> nix::Result<()> {
        // Zero would switch the timer off.
        let at = at.max(Duration::from_nanos(1));
        self.0.set(Expiration::OneShot(TimeSpec::from_duration(at)), TimerSetTimeFlags::TFD_TIMER_ABSTIME)
    }

    /// Sets it to never ring.
    pub fn stop(&self) -> nix::Result<()> {
        self.0.unset()
    }
}

impl AsFd for Timer {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
