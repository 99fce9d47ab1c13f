//! Waiting in line for a key by `flock`.
//!
//! A place in line is lost by any signal, so nothing may interrupt a waiting `flock` but its end: what happens
//! meanwhile (saying who holds the key, renewing keys already taken) is done by a thread beside it. The end of the
//! patience, and the loss of a key already taken, come as `SIGALRM`.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::thread;
use std::time::{Duration, Instant};

use leasefs::Key;
use leasefs::client::handle;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::SigSet;

use super::alarm::Alarm;
use super::claim::{Claim, renew_due};
use super::mention::Mention;
use super::time::{Timer, boot_now};
use crate::cli::tree::Tree;

/// A wait for one key.
pub struct Wait<'a> {
    /// The tree.
    pub tree: &'a Tree,
    /// The key.
    pub key: &'a Key,
    /// Keys that are taken already, and are renewed meanwhile.
    pub taken: &'a mut [Claim],
    /// Nobody wants the key any more when one of these becomes readable or hangs up.
    pub until: &'a [BorrowedFd<'a>],
}

/// How a wait ended.
pub enum Waited {
    /// The key is locked.
    Locked,
    /// The time was over.
    TimeOver,
    /// A key that was taken already is lost, or nobody wants this one any more: in words.
    Broken(String),
}

impl Wait<'_> {
    /// Waits until the file's key is locked, or until the end.
    ///
    /// # Errors
    /// Those of `flock(2)`, and of timers and descriptors.
    pub fn lock(mut self, file: &File, end: Option<Instant>) -> io::Result<Waited> {
        let alarm = Alarm::install()?;
        let (stop_seen, stop) = io::pipe()?;
        // Before the thread beside it, which may find a reason to ring at once: there is one timer.
        if let Some(end) = end {
            Alarm::ring_in(end.saturating_duration_since(Instant::now()));
        }
        let (locked, broken) = thread::scope(|scope| {
            let beside = scope.spawn(|| {
                let broken = self.watch_beside(stop_seen.as_fd(), end);
                if !matches!(broken, Ok(None)) {
                    Alarm::ring_in(Duration::ZERO);
                }
                broken
            });
            let locked = loop {
                match handle::lock(file) {
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {
                        let over = end.is_some_and(|end| Instant::now() >= end);
                        if over || beside.is_finished() {
                            break Ok(Waited::TimeOver);
                        }
                    }
                    done => break done.map(|()| Waited::Locked),
                }
            };
            drop(stop);
            (locked, beside.join())
        });
        drop(alarm);
        match broken {
            Ok(Ok(None)) => locked,
            Ok(Ok(Some(why))) => Ok(Waited::Broken(why)),
            Ok(Err(errno)) => Err(errno.into()),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }

    /// What is done while `flock` waits, until this instant if there is one. Ends when it is stopped, or with why there is
    /// no use in waiting.
    fn watch_beside(&mut self, stop: BorrowedFd<'_>, end: Option<Instant>) -> nix::Result<Option<String>> {
        // The alarm is for the thread that waits.
        SigSet::all().thread_block()?;
        let timer = Timer::new()?;
        let mut mention = Mention::new(self.tree, self.key, boot_now()?);
        loop {
            // Woken late, it has nothing more to say of a wait that is over.
            let is_over = || end.is_some_and(|end| Instant::now() >= end);
            let mentioned_at = (!is_over()).then(|| mention.next());
            match self.taken.iter().map(Claim::due_at).chain(mentioned_at).min() {
                Some(next) => timer.ring_at(next)?,
                None => timer.stop()?,
            }
            let watched = [stop, timer.as_fd()].into_iter().chain(self.until.iter().copied());
            let mut fds: Vec<PollFd> = watched.map(|fd| PollFd::new(fd, PollFlags::POLLIN)).collect();
            let first_news = fds.len();
            fds.extend(self.taken.iter().filter_map(Claim::news).map(|news| PollFd::new(news, PollFlags::POLLPRI)));
            match poll(&mut fds, PollTimeout::NONE) {
                Ok(_) | Err(Errno::EINTR) => {}
                Err(errno) => return Err(errno),
            }
            if fds[0].any() == Some(true) {
                return Ok(None);
            }
            if fds[2..first_news].iter().any(|fd| fd.any() == Some(true)) {
                return Ok(Some(format!("{}: no longer waited for", self.key)));
            }
            if fds[first_news..].iter().any(|fd| fd.any() == Some(true)) {
                drop(fds);
                self.taken.iter_mut().try_for_each(|claim| claim.take_notice(self.tree))?;
            }
            if !is_over() {
                mention.say(boot_now()?);
            }
            if let Some(lost) = renew_due(self.taken, self.tree)? {
                return Ok(Some(format!("{} (while waiting for {})", lost.loss(), self.key)));
            }
        }
    }
}
