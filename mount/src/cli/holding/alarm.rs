//! A signal at a time: what ends a `flock` that waits.

use std::time::Duration;

use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, SigmaskHow, Signal, pthread_sigmask, sigaction};

/// A signal that arrives before `flock` has begun to wait is missed by it, so the alarm goes on ringing.
const INTERVAL: Duration = Duration::from_millis(20);

/// `SIGALRM` as what ends a waiting `flock`, while it lives. Signal and timer belong to the process.
pub struct Alarm {
    action: SigAction,
    mask: SigSet,
}

impl Alarm {
    /// Has the signal end what the calling thread waits in.
    ///
    /// # Errors
    /// Those of `sigaction(2)`.
    pub fn install() -> nix::Result<Alarm> {
        extern "C" fn interrupt(_: libc::c_int) {}
        let handler = SigAction::new(SigHandler::Handler(interrupt), SaFlags::empty(), SigSet::empty());
        // SAFETY: the handler does nothing, so it is safe at any point of the program.
        let action = unsafe { sigaction(Signal::SIGALRM, &handler) }?;
        let mut mask = SigSet::empty();
        pthread_sigmask(SigmaskHow::SIG_UNBLOCK, Some(&SigSet::from(Signal::SIGALRM)), Some(&mut mask))?;
        Ok(Alarm { action, mask })
    }

    /// Sends the first `SIGALRM` after this long, and then one every [`INTERVAL`].
    pub fn ring_in(first: Duration) {
        set_interval_timer(first.max(Duration::from_micros(1)), INTERVAL);
    }
}

impl Drop for Alarm {
    fn drop(&mut self) {
        set_interval_timer(Duration::ZERO, Duration::ZERO);
        // Restoring what was there cannot fail: both values came from the kernel.
        // SAFETY: the action is the one that was in force before.
        let _ = unsafe { sigaction(Signal::SIGALRM, &self.action) };
        let _ = self.mask.thread_set_mask();
    }
}

fn set_interval_timer(first: Duration, interval: Duration) {
    let timeval = |duration: Duration| libc::timeval {
        tv_sec: duration.as_secs().try_into().unwrap_or(libc::time_t::MAX),
        tv_usec: duration.subsec_micros().into(),
    };
    let value = libc::itimerval { it_interval: timeval(interval), it_value: timeval(first) };
    // SAFETY: `value` is a valid itimerval that lives through the call, and the old value is not asked for.
    unsafe { libc::setitimer(libc::ITIMER_REAL, &raw const value, std::ptr::null_mut()) };
}
