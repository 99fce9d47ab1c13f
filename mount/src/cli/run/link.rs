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
use crate::cli::tree::Status;

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
    /// Those of this lease, as of its last renewal. Renewals are dated from before they were asked for, so no lease ends
    /// earlier than it is taken to here.
    pub fn of(claim: &Claim) -> Limits {
        Limits::of_lease(claim.renewed_at(), claim.ttl())
    }

    /// The earlier of each.
    pub fn earliest(all: impl Iterator<Item = Limits>) -> Limits {
        all.fold(Limits { term_at: Duration::MAX, kill_at: Duration::MAX }, |first, next| Limits {
            term_at: first.term_at.min(next.term_at),
            kill_at: first.kill_at.min(next.kill_at),
        })
    }

    /// When to ask the tree whether somebody else has renewed: early enough for an answer before TERM.
    pub fn ask_at(self) -> Duration {
        self.term_at.saturating_sub(self.kill_at.saturating_sub(self.term_at) / 2)
    }

    /// Those of attempt `epoch` as the tree tells of its key; none where it is over.
    pub fn told(status: &Status, epoch: u64) -> Option<Limits> {
        let held = status.epoch == epoch && status.state == "held";
        let expires_ms = status.expires.as_deref().and_then(show::parse_ms).filter(|_| held)?;
        let left = Duration::from_millis(u64::try_from(expires_ms - show::now_ms()).ok()?);
        let ttl = Duration::from_millis(status.ttl_ms?);
        Some(Limits::of_lease((boot_now().ok()? + left.min(ttl)).checked_sub(ttl)?, ttl))
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
pub struct Shared {
    /// 0 while there is none.
    command: &'static AtomicI32,
    leases: &'static [Words],
}

/// What the runner knows of a lease; times on `CLOCK_BOOTTIME`, in nanoseconds.
struct Words {
    renewed_at: AtomicU64,
    term_at: AtomicU64,
    kill_at: AtomicU64,
}

impl Shared {
    /// Such memory, for this process and what it forks from now on.
    pub fn new(claims: &[Claim]) -> nix::Result<Shared> {
        // SAFETY: zero is an integer with nothing set, and a lease that ended long ago.
        let (command, leases) = unsafe { (zeroed::<AtomicI32>(1)?, zeroed::<Words>(claims.len())?) };
        let shared = Shared { command: &command[0], leases };
        shared.set_leases(claims);
        Ok(shared)
    }

    /// Says what the runner knows of the leases; the claims are those, and in the order, that the memory was made for.
    pub fn set_leases(self, claims: &[Claim]) {
        let nanos = |at: Duration| u64::try_from(at.as_nanos()).unwrap_or(u64::MAX);
        for (words, claim) in self.leases.iter().zip(claims) {
            let limits = Limits::of(claim);
            // Whoever sees an old TERM beside a new KILL is as late as one who looked a moment earlier. When it was comes
            // last: what is there is no older than that says.
            words.kill_at.store(nanos(limits.kill_at), Ordering::SeqCst);
            words.term_at.store(nanos(limits.term_at), Ordering::SeqCst);
            words.renewed_at.store(nanos(claim.renewed_at()), Ordering::SeqCst);
        }
    }

    /// When the runner last renewed each lease, and the limits that this gives it.
    pub fn leases(self) -> impl Iterator<Item = (Duration, Limits)> {
        let at = |word: &AtomicU64| Duration::from_nanos(word.load(Ordering::SeqCst));
        self.leases.iter().map(move |words| {
            let renewed_at = at(&words.renewed_at);
            (renewed_at, Limits { term_at: at(&words.term_at), kill_at: at(&words.kill_at) })
        })
    }

    /// The newest limits that the runner knows.
    pub fn limits(self) -> Limits {
        Limits::earliest(self.leases().map(|(_, limits)| limits))
    }

    /// Says which process the command is. May be called between fork and exec.
    pub fn set_command(self, command: Pid) {
        self.command.store(command.as_raw(), Ordering::SeqCst);
    }

    /// The command's process, once it is there.
    pub fn command(self) -> Option<Pid> {
        Some(self.command.load(Ordering::SeqCst)).filter(|pid| *pid != 0).map(Pid::from_raw)
    }
}

/// So many values in memory of which this process and what it forks have the same.
///
/// # Safety
/// All zeroes must be a value of the type, and others may only be stored in it through atomics.
unsafe fn zeroed<T>(count: usize) -> nix::Result<&'static [T]> {
    let length = NonZeroUsize::new(count * size_of::<T>()).ok_or(Errno::EINVAL)?;
    // SAFETY: a new anonymous mapping overlaps nothing.
    let memory =
        unsafe { mmap_anonymous(None, length, ProtFlags::PROT_READ | ProtFlags::PROT_WRITE, MapFlags::MAP_SHARED) }?;
    // SAFETY: the mapping is page-aligned, as long as that, never unmapped, and zeroed; nothing else looks at it.
    Ok(unsafe { std::slice::from_raw_parts(memory.cast().as_ptr(), count) })
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
        let file = || std::fs::File::open("/dev/null").expect("a file");
        let claim = |epoch, renewed_at, ttl| {
            let key = leasefs::Key::parse("job").expect("a key");
            Claim::new(key, epoch, file(), Duration::from_secs(ttl), Duration::from_secs(renewed_at))
        };
        let mut claims = [claim(1, 5, 60), claim(2, 40, 10)];
        let shared = Shared::new(&claims).expect("memory");
        assert_eq!(shared.command(), None);
        let limits = |claim: &Claim| (claim.renewed_at(), Limits::of(claim));
        assert_eq!(shared.leases().collect::<Vec<_>>(), claims.iter().map(limits).collect::<Vec<_>>());
        assert_eq!(shared.limits(), Limits::of(&claims[1]), "the earlier");
        claims[1] = claim(2, 58, 10);
        shared.set_leases(&claims);
        shared.set_command(Pid::from_raw(7));
        assert_eq!((shared.limits(), shared.command()), (Limits::of(&claims[0]), Some(Pid::from_raw(7))));
    }
}
