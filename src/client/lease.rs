//! Holding a key: claiming it, and the lease as a value (contract §3, §4).

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::{Error, ResultWriter, Tree, handle};
use crate::key::Key;
use crate::ttl::Ttl;

/// A pause where there is nothing yet to wait on: a key that is being claimed for the first time.
const PAUSE: Duration = Duration::from_millis(5);

/// A lease that was granted to this process. Dropping it ends it, unless a forked child has a copy.
#[derive(Debug)]
pub struct Lease {
    tree: Tree,
    key: Key,
    epoch: u64,
    handle: File,
}

impl Lease {
    /// Takes the key now or not at all, by lock: also a finished key.
    ///
    /// # Errors
    /// [`Error::Held`]; [`Error::NotFound`] for a missing namespace; [`Error::Denied`]; [`Error::Io`].
    pub fn try_claim(tree: &Tree, key: &Key) -> Result<Lease, Error> {
        Lease::lock(tree, key, handle::try_lock)
    }

    /// Takes the key by exclusive create: once. A finished key is refused.
    ///
    /// # Errors
    /// As [`Lease::try_claim`], and [`Error::Finished`].
    pub fn try_claim_once(tree: &Tree, key: &Key) -> Result<Lease, Error> {
        let path = tree.claim_path(key);
        match OpenOptions::new().read(true).write(true).create_new(true).mode(0o666).open(&path) {
            Ok(handle) => Lease::granted(tree, key, handle),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                let is_finished = tree.status(key)?.is_some_and(|status| status.is_finished());
                Err(if is_finished { Error::Finished(key.clone()) } else { Error::Held(key.clone()) })
            }
            Err(error) => Err(refusal(key, path, error)),
        }
    }

    /// Waits in line for the key, first come, first served, as long as it takes.
    ///
    /// # Errors
    /// [`Error::Interrupted`] when a signal with a handler came: ask again for a new place. Others as
    /// [`Lease::try_claim`], but for [`Error::Held`].
    pub fn wait(tree: &Tree, key: &Key) -> Result<Lease, Error> {
        Lease::lock(tree, key, handle::lock)
    }

    /// Tries for the key at every change of its state, for this long. Not in line: whoever waits in line comes first.
    /// (A lock call has no time limit of its own; a signal could end it, and signals belong to the program.)
    ///
    /// # Errors
    /// [`Error::Held`] when the time is over; others as [`Lease::try_claim`].
    pub fn wait_timeout(tree: &Tree, key: &Key, limit: Duration) -> Result<Lease, Error> {
        let now = Instant::now();
        let end = now.checked_add(limit).unwrap_or_else(|| now + Ttl::MAX.as_duration());
        loop {
            // Watched before it is tried, so that no change in between is missed.
            let watched = tree.open_status(key)?;
            match Lease::try_claim(tree, key) {
                Err(Error::Held(_)) if Instant::now() < end => {}
                done => return done,
            }
            match watched {
                Some(watched) => tree.wait_for_change(key, &watched, end)?,
                None => std::thread::sleep(PAUSE),
            }
        }
    }

    fn lock(tree: &Tree, key: &Key, lock: fn(&File) -> io::Result<()>) -> Result<Lease, Error> {
        let path = tree.claim_path(key);
        let options = OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o666).to_owned();
        let handle = options.open(&path).map_err(|error| refusal(key, path.clone(), error))?;
        match lock(&handle) {
            Ok(()) => Lease::granted(tree, key, handle),
            Err(error) => Err(match error.kind() {
                io::ErrorKind::WouldBlock => Error::Held(key.clone()),
                io::ErrorKind::Interrupted => Error::Interrupted(key.clone()),
                _ => refusal(key, path, error),
            }),
        }
    }

    fn granted(tree: &Tree, key: &Key, handle: File) -> Result<Lease, Error> {
        match handle::epoch(&handle) {
            Ok(epoch) => Ok(Lease { tree: tree.clone(), key: key.clone(), epoch, handle }),
            // Evicted, or expired, since it was granted: as if it had come a moment later.
            Err(error) if is_stale(&error) => Err(Error::Held(key.clone())),
            Err(source) => Err(Error::Io { path: tree.claim_path(key), source }),
        }
    }

    /// The key.
    pub fn key(&self) -> &Key {
        &self.key
    }

    /// The number of this attempt: a fencing token, to be passed along to whatever is done under the lease.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Renews the lease: its TTL counts from now. The epoch stays.
    ///
    /// # Errors
    /// [`Error::Lost`]: stop. [`Error::Io`]: it may be held still; try again before the TTL is over.
    pub fn renew(&self) -> Result<(), Error> {
        handle::renew(&self.handle).map_err(|error| self.fault(error))
    }

    /// Replaces the note that others see, at most 4,096 bytes, and renews.
    ///
    /// # Errors
    /// As [`Lease::renew`]; [`Error::Io`] with `EFBIG` for a longer note.
    pub fn set_note(&self, note: &str) -> Result<(), Error> {
        match self.handle.write_at(note.as_bytes(), 0) {
            Ok(_) => Ok(()),
            Err(error) => Err(self.fault(error)),
        }
    }

    /// Sets this lease's TTL, counted from now.
    ///
    /// # Errors
    /// As [`Lease::renew`].
    pub fn set_ttl(&self, ttl: Ttl) -> Result<(), Error> {
        handle::set_ttl(&self.handle, ttl).map_err(|error| self.fault(error))
    }

    /// Sets the name under which people see this holder, 1 to 255 bytes without control characters.
    ///
    /// # Errors
    /// As [`Lease::renew`]; [`Error::Io`] with `EINVAL` for another name.
    pub fn set_agent(&self, name: &str) -> Result<(), Error> {
        handle::set_agent(&self.handle, name).map_err(|error| self.fault(error))
    }

    /// Whether the lease is lost: expired, evicted or released by order. A `false` was true when it was asked; `poll` on
    /// [`Lease::as_fd`] tells of the loss (`POLLERR | POLLHUP`).
    ///
    /// # Errors
    /// [`Error::Io`] where nobody can tell; it may be held still.
    pub fn lost(&self) -> Result<bool, Error> {
        match handle::epoch(&self.handle) {
            Ok(_) => Ok(false),
            Err(error) if is_stale(&error) => Ok(true),
            Err(source) => Err(Error::Io { path: self.tree.claim_path(&self.key), source }),
        }
    }

    /// Where this attempt's result is written. Nothing of it is seen, or checked, before [`ResultWriter::commit`].
    pub fn result_writer(&self) -> ResultWriter {
        ResultWriter::new(&self.tree, &self.key, self.epoch)
    }

    /// Ends the lease, as dropping it does. A key with a result is finished then, another is free.
    pub fn release(self) {}

    fn fault(&self, error: io::Error) -> Error {
        if is_stale(&error) {
            return Error::Lost { key: self.key.clone(), epoch: self.epoch };
        }
        Error::Io { path: self.tree.claim_path(&self.key), source: error }
    }
}

/// The holder handle: for `poll`, and for passing the lease to another process.
impl AsFd for Lease {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.handle.as_fd()
    }
}

fn is_stale(error: &io::Error) -> bool {
    error.raw_os_error() == Some(Errno::STALE.raw_os_error())
}

fn refusal(key: &Key, path: PathBuf, error: io::Error) -> Error {
    match error.kind() {
        io::ErrorKind::NotFound => Error::NotFound(key.clone()),
        io::ErrorKind::PermissionDenied => Error::Denied(key.clone()),
        _ => Error::Io { path, source: error },
    }
}
