//! What the runner and its guard tell each other: messages over a socket pair, and what must not get lost in memory that
//! both have.
//!
//! The leases' ends are no messages: whoever was stopped for a while must see the newest one, and the runner must never
//! wait for a guard that does not read. Nor is the command's process id, which must not go with a guard that is killed.

use std::io;
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::time::Duration;

use leasefs::Key;
use nix::errno::Errno;
use nix::sys::mman::{MapFlags, ProtFlags, mmap_anonymous};
use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockType, recv, send, socketpair};
use nix::unistd::Pid;
use serde::Deserialize;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::program::Missing;
use crate::cli::holding::claim::Claim;
use crate::cli::holding::time::boot_now;
use crate::cli::show;
use crate::cli::tree::Tree;

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
        Limits::earliest(claims.iter().map(|claim| Limits::of_lease(claim.renewed_at(), claim.ttl())))
    }

    /// When to ask the tree whether somebody else has renewed: early enough for an answer before TERM.
    pub fn ask_at(self) -> Duration {
        self.term_at.saturating_sub(self.kill_at.saturating_sub(self.term_at) / 2)
    }

    /// The earlier of each.
    fn earliest(all: impl Iterator<Item = Limits>) -> Limits {
        all.fold(Limits { term_at: Duration::MAX, kill_at: Duration::MAX }, |first, next| Limits {
            term_at: first.term_at.min(next.term_at),
            kill_at: first.kill_at.min(next.kill_at),
        })
    }

    /// Those of these attempts as the tree knows them; none where it does not answer, or one is over.
    pub fn asked(tree: &Tree, attempts: &[(Key, u64)]) -> Option<Limits> {
        let of_attempt = |(key, epoch): &(Key, u64)| {
            let status = tree.status(key).ok()??;
            let held = status.epoch == *epoch && status.state == "held";
            let expires_ms = status.expires.as_deref().and_then(show::parse_ms).filter(|_| held)?;
            let left = Duration::from_millis(u64::try_from(expires_ms - show::now_ms()).ok()?);
            let ttl = Duration::from_millis(status.ttl_ms?);
            Some(Limits::of_lease((boot_now().ok()? + left.min(ttl)).checked_sub(ttl)?, ttl))
        };
        let all: Option<Vec<Limits>> = attempts.iter().map(of_attempt).collect();
        all.map(|all| Limits::earliest(all.into_iter()))
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

/// Memory that runner, guard and, until it executes its program, command have in common.
#[derive(Clone, Copy)]
pub struct Shared(&'static Words);

struct Words {
    term_at: AtomicU64,
    kill_at: AtomicU64,
    /// 0 while there is none.
    command: AtomicI32,
}

impl Shared {
    /// Such memory, for this process and what it forks from now on.
    pub fn new() -> nix::Result<Shared> {
        let length = const { NonZeroUsize::new(size_of::<Words>()).expect("words are more than nothing") };
        // SAFETY: a new anonymous mapping overlaps nothing.
        let memory = unsafe {
            mmap_anonymous(None, length, ProtFlags::PROT_READ | ProtFlags::PROT_WRITE, MapFlags::MAP_SHARED)
        }?;
        // SAFETY: the mapping is page-aligned, long enough, never unmapped, and zeroed, which is what these atomics start
        // with; nothing else looks at it.
        Ok(Shared(unsafe { memory.cast().as_ref() }))
    }

    /// Sets the limits.
    pub fn set_limits(self, limits: Limits) {
        let nanos = |at: Duration| u64::try_from(at.as_nanos()).unwrap_or(u64::MAX);
        // Whoever sees an old TERM beside a new KILL is as late as one who looked a moment earlier.
        self.0.kill_at.store(nanos(limits.kill_at), Ordering::SeqCst);
        self.0.term_at.store(nanos(limits.term_at), Ordering::SeqCst);
    }

    /// The newest limits.
    pub fn limits(self) -> Limits {
        let at = |word: &AtomicU64| Duration::from_nanos(word.load(Ordering::SeqCst));
        Limits { term_at: at(&self.0.term_at), kill_at: at(&self.0.kill_at) }
    }

    /// Says which process the command is. May be called between fork and exec.
    pub fn set_command(self, command: Pid) {
        self.0.command.store(command.as_raw(), Ordering::SeqCst);
    }

    /// The command's process, once it is there.
    pub fn command(self) -> Option<Pid> {
        Some(self.0.command.load(Ordering::SeqCst)).filter(|pid| *pid != 0).map(Pid::from_raw)
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
        theirs.send(&News::Ended(Some(7), Reason::Itself));
        drop(theirs);
        assert_eq!(ours.receive().expect("sent"), Received::Message(News::Ended(Some(7), Reason::Itself)));
        assert_eq!(ours.receive::<News>().expect("closed"), Received::Closed);
    }

    #[test]
    fn what_is_shared_is_read_as_it_was_set() {
        let shared = Shared::new().expect("memory");
        assert_eq!(shared.command(), None);
        let limits = Limits::of_lease(Duration::from_secs(5), Duration::from_secs(60));
        shared.set_limits(limits);
        shared.set_command(Pid::from_raw(7));
        assert_eq!((shared.limits(), shared.command()), (limits, Some(Pid::from_raw(7))));
    }
}
