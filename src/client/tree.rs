//! Where the tree is, and which file is what (contract §2).

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{Error, Status};
use crate::key::Key;

/// A mounted tree. Costs nothing to clone or to make anew.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tree {
    root: PathBuf,
}

impl Tree {
    /// The tree mounted at a directory.
    ///
    /// # Errors
    /// [`Error::NotATree`]; [`Error::Io`] where it cannot be looked at, `ENOTCONN` for a dead mount among it.
    pub fn at(root: impl Into<PathBuf>) -> Result<Tree, Error> {
        let root = root.into();
        match fs::metadata(root.join(".leasefs/version")) {
            Ok(_) => Ok(Tree { root }),
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
                Err(Error::NotATree(root))
            }
            Err(source) => Err(Error::Io { path: root, source }),
        }
    }

    /// The same tree by an absolute path without symlinks, for a program that changes its working directory.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn canonical(self) -> Result<Tree, Error> {
        match fs::canonicalize(&self.root) {
            Ok(root) => Ok(Tree { root }),
            Err(source) => Err(Error::Io { path: self.root, source }),
        }
    }

    /// The tree that `LEASEFS_ROOT` names, as for the command.
    ///
    /// # Errors
    /// As [`Tree::at`]; without the variable, [`Error::NotATree`] for the empty path.
    pub fn from_env() -> Result<Tree, Error> {
        Tree::at(std::env::var_os("LEASEFS_ROOT").unwrap_or_default())
    }

    /// The mountpoint.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// `claims/KEY`: the lease.
    pub fn claim_path(&self, key: &Key) -> PathBuf {
        self.root.join("claims").join(key.as_str())
    }

    /// `results/KEY/EPOCH`: the result of that attempt.
    pub fn result_path(&self, key: &Key, epoch: u64) -> PathBuf {
        self.root.join("results").join(key.as_str()).join(epoch.to_string())
    }

    /// `status/KEY`: one line of JSON.
    pub fn status_path(&self, key: &Key) -> PathBuf {
        self.root.join("status").join(key.as_str())
    }

    /// `.leasefs/NAME`: what the tree says of itself, and where it takes orders.
    pub fn control_path(&self, name: &str) -> PathBuf {
        self.root.join(".leasefs").join(name)
    }

    /// What the tree says of a key; none if there never was such a key.
    ///
    /// # Errors
    /// [`Error::Io`], `EISDIR` for a namespace among it.
    pub fn status(&self, key: &Key) -> Result<Option<Status>, Error> {
        let Some(file) = self.open_status(key)? else { return Ok(None) };
        Status::read(&file).map(Some).map_err(|source| Error::Io { path: self.status_path(key), source })
    }

    /// Opens `status/KEY`, for [`Status::read`]; none if there never was such a key. `poll` on it reports `POLLPRI` once
    /// the key's state has changed since it was opened, or read.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn open_status(&self, key: &Key) -> Result<Option<File>, Error> {
        let path = self.status_path(key);
        match File::open(&path) {
            Ok(file) => Ok(Some(file)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(source) => Err(Error::Io { path, source }),
        }
    }

    /// The committed result of an attempt; none if there is none, or not yet.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn result(&self, key: &Key, epoch: u64) -> Result<Option<Vec<u8>>, Error> {
        let path = self.result_path(key, epoch);
        match fs::read(&path) {
            Ok(bytes) => Ok(Some(bytes)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(source) => Err(Error::Io { path, source }),
        }
    }

    /// Sleeps until the key's state changes, or until the end. A signal ends the sleep, too.
    pub(super) fn wait_for_change(&self, key: &Key, watched: &File, end: Instant) -> Result<(), Error> {
        let left = end.saturating_duration_since(Instant::now());
        let mut fds = [PollFd::new(watched, PollFlags::PRI)];
        // Longer than the kernel can count is for ever.
        let timeout = Timespec::try_from(left).ok();
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(errno) => Err(Error::Io { path: self.status_path(key), source: errno.into() }),
        }
    }
}
