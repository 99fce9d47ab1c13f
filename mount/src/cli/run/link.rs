//! What the runner and its guard tell each other: messages over a socket pair, and the leases' ends in memory that both
//! have.
//!
//! The ends are not messages: whoever was stopped for a while must see the newest one, and the runner must never wait for
//! a guard that does not read.

use std::io;
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::mman::{MapFlags, ProtFlags, mmap_anonymous};
use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockType, recv, send, socketpair};
use serde::Deserialize;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::program::Missing;
use crate::cli::holding::claim::Claim;

/// Longest message, in bytes.
const LONGEST: usize = 256;
/// A command is ended at most this long before its lease.
const MARGIN: Duration = Duration::from_secs(10);

/// From the runner to its guard.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Order {
    /// Pass this signal on to the command.
    Signal(i32),
    /// A lease is lost: end the command.
    End,
}

/// From the guard to its runner.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum News {
    /// The command runs as this process.
    Started(i32),
    /// It could not be started after all.
    NotStarted(Missing),
    /// It has ended with this wait status, none where it could not be ended; the guard ends, too.
    Ended(Option<i32>, Reason),
}

/// Why a command ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reason {
    /// By itself.
    Itself,
    /// A lease is lost.
    LeaseLost,
    /// A lease was about to run out.
    LeaseRunsOut,
    /// The runner is gone.
    RunnerGone,
}

/// What came.
#[derive(Debug, PartialEq, Eq)]
pub enum Received<T> {
    /// A message.
    Message(T),
    /// None so far.
    Nothing,
    /// The other side is gone, and all that it sent is read.
    Closed,
}

/// One end of the socket pair.
pub struct Link(OwnedFd);

impl Link {
    /// Both ends.
    pub fn pair() -> nix::Result<(Link, Link)> {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let (one, other) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, flags)?;
        Ok((Link(one), Link(other)))
    }

    /// Sends a message; one to a side that is gone, or has not read hundreds, is dropped.
    pub fn send(&self, message: &impl Serialize) {
        if let Ok(text) = serde_json::to_vec(message) {
            let _ = send(self.0.as_raw_fd(), &text, MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT);
        }
    }

    /// The next message.
    ///
    /// # Errors
    /// Those of `recv(2)`, and a message that cannot be read.
    pub fn receive<T: DeserializeOwned>(&self) -> io::Result<Received<T>> {
        let mut text = [0; LONGEST];
        loop {
            match recv(self.0.as_raw_fd(), &mut text, MsgFlags::MSG_DONTWAIT) {
                Ok(0) => return Ok(Received::Closed),
                Ok(length) => return Ok(Received::Message(serde_json::from_slice(&text[..length])?)),
                Err(Errno::EAGAIN) => return Ok(Received::Nothing),
                // The other side went without having read all: told once, and what it sent comes after.
                Err(Errno::EINTR | Errno::ECONNRESET) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }
}

impl AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// When a command is ended whose leases are not renewed any more; times on `CLOCK_BOOTTIME`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// It gets TERM.
    pub term_at: Duration,
    /// It gets KILL, so that it is dead when the first lease ends.
    pub kill_at: Duration,
}

impl Limits {
    /// Those of these leases, as of their last renewal. Renewals are dated from before they were asked for, so no lease
    /// ends earlier than it is taken to here.
    pub fn of(claims: &[Claim]) -> Limits {
        claims.iter().map(|claim| Limits::of_lease(claim.renewed_at(), claim.ttl())).fold(
            Limits { term_at: Duration::MAX, kill_at: Duration::MAX },
            |first, next| Limits { term_at: first.term_at.min(next.term_at), kill_at: first.kill_at.min(next.kill_at) },
        )
    }

    fn of_lease(renewed_at: Duration, ttl: Duration) -> Limits {
        let margin = MARGIN.min(ttl / 5);
        let end = renewed_at + ttl;
        Limits { term_at: end - margin, kill_at: end - margin / 2 }
    }

    /// About when the first lease ends.
    pub fn end(self) -> Duration {
        self.kill_at.saturating_add(self.kill_at.saturating_sub(self.term_at))
    }
}

/// The limits, in memory that the runner writes and its guard reads.
#[derive(Clone, Copy)]
pub struct SharedLimits(&'static [AtomicU64; 2]);

impl SharedLimits {
    /// Memory that a forked child has in common with this process.
    pub fn new() -> nix::Result<SharedLimits> {
        let length = const { NonZeroUsize::new(size_of::<[AtomicU64; 2]>()).expect("two words are more than nothing") };
        // SAFETY: a new anonymous mapping overlaps nothing.
        let memory = unsafe {
            mmap_anonymous(None, length, ProtFlags::PROT_READ | ProtFlags::PROT_WRITE, MapFlags::MAP_SHARED)
        }?;
        // SAFETY: the mapping is page-aligned, zeroed, at least as long as two words, and is never unmapped; only atomics
        // look at it.
        Ok(SharedLimits(unsafe { memory.cast().as_ref() }))
    }

    /// Sets them.
    pub fn set(self, limits: Limits) {
        let nanos = |at: Duration| u64::try_from(at.as_nanos()).unwrap_or(u64::MAX);
        // Whoever sees an old TERM beside a new KILL is as late as one who looked a moment earlier.
        self.0[1].store(nanos(limits.kill_at), Ordering::SeqCst);
        self.0[0].store(nanos(limits.term_at), Ordering::SeqCst);
    }

    /// The newest.
    pub fn get(self) -> Limits {
        let at = |index: usize| Duration::from_nanos(self.0[index].load(Ordering::SeqCst));
        Limits { term_at: at(0), kill_at: at(1) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_is_dead_before_its_lease_ends_and_not_long_before() {
        let limits = |ttl| Limits::of_lease(Duration::from_secs(100), Duration::from_secs(ttl));
        let at = |term_ms, kill_ms| Limits {
            term_at: Duration::from_millis(term_ms),
            kill_at: Duration::from_millis(kill_ms),
        };
        assert_eq!(limits(1), at(100_800, 100_900));
        assert_eq!(limits(60), at(150_000, 155_000));
        assert_eq!(limits(60).end(), Duration::from_secs(160));
    }

    #[test]
    fn what_a_side_sent_before_it_went_is_still_read() {
        let (ours, theirs) = Link::pair().expect("socket pair");
        assert_eq!(ours.receive::<News>().expect("open"), Received::Nothing);
        ours.send(&Order::End);
        theirs.send(&News::Started(7));
        drop(theirs);
        assert_eq!(ours.receive().expect("sent"), Received::Message(News::Started(7)));
        assert_eq!(ours.receive::<News>().expect("closed"), Received::Closed);
    }

    #[test]
    fn limits_are_read_as_they_were_set() {
        let shared = SharedLimits::new().expect("memory");
        let limits = Limits::of_lease(Duration::from_secs(5), Duration::from_secs(60));
        shared.set(limits);
        assert_eq!(shared.get(), limits);
    }
}
