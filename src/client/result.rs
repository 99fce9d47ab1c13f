//! Leaving a result (contract §6).

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;

use rustix::io::Errno;

use super::{Error, Tree};
use crate::key::Key;

/// A result that is being written. Kept in memory until it is committed, because a closed result file is a committed
/// one: dropping the writer leaves nothing.
///
/// The attempt need not be held any more: a parent may record what a child of the same user did, by
/// [`ResultWriter::new`], until a newer attempt begins or the TTL is over.
#[derive(Debug)]
pub struct ResultWriter {
    tree: Tree,
    key: Key,
    epoch: u64,
    bytes: Vec<u8>,
}

impl ResultWriter {
    /// For the result of this attempt.
    pub fn new(tree: &Tree, key: &Key, epoch: u64) -> ResultWriter {
        ResultWriter { tree: tree.clone(), key: key.clone(), epoch, bytes: Vec::new() }
    }

    /// Commits what was written, at once and whole. An empty result counts. When this returns, readers see it, and it
    /// never changes.
    ///
    /// # Errors
    /// [`Error::Lost`] when a newer attempt has begun or the TTL is over; [`Error::NotAccepted`] when it has a result, or
    /// is another user's; [`Error::NotFound`] when it never was; [`Error::Io`] for a result that is too large (`EFBIG`)
    /// or cannot be stored. Nothing is committed then.
    pub fn commit(self) -> Result<(), Error> {
        let path = self.tree.result_path(&self.key, self.epoch);
        let commit = || {
            let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o666).open(&path)?;
            // Where this fails, the close that follows commits nothing (contract §6).
            file.write_all(&self.bytes)?;
            file.sync_all()
        };
        commit().map_err(|error| match error.raw_os_error().map(Errno::from_raw_os_error) {
            Some(Errno::STALE) => Error::Lost { key: self.key.clone(), epoch: self.epoch },
            Some(Errno::PERM | Errno::ACCESS) => Error::NotAccepted { key: self.key.clone(), epoch: self.epoch },
            Some(Errno::NOENT) => Error::NotFound(self.key.clone()),
            _ => Error::Io { path: path.clone(), source: error },
        })
    }
}

impl Write for ResultWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
