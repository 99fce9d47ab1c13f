//! Drafts and results as files of the state directory (§6).
//!
//! A write handle has a draft of its own in `drafts/`; a commit makes it the attempt's file in `results/`. Whether a
//! file there counts is decided by the registry alone: the rename comes before the registry's commit and is undone
//! when that fails, so a crash in between leaves at most a file that nobody is shown.

use std::collections::HashSet;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use parking_lot::Mutex;

use rustix::fs::FlockOperation;

use crate::error::Error;
use crate::ids::{Epoch, Handle, KeyId};

/// The errno of a device's fault.
const EIO: i32 = 5;

/// The results stay as they are, or are one's own, for as long as this lives: whoever reads rows and then their files must
/// not find that a prune came in between. The kernel ends it with its process.
#[derive(Debug)]
pub struct ResultsLock(#[expect(dead_code, reason = "held, and not looked at")] File);

/// The `drafts/` and `results/` of a state directory.
#[derive(Debug)]
pub struct Results {
    drafts: PathBuf,
    results: PathBuf,
    /// Drafts whose sync failed. The kernel takes what it could not write for written, so a second sync would succeed
    /// over bytes that are not on the disk.
    unsynced: Mutex<HashSet<Handle>>,
}

impl Results {
    /// Makes the two directories where they are missing.
    ///
    /// # Errors
    /// Those of the filesystem.
    pub fn open(state_dir: &Path) -> io::Result<Results> {
        let store = Results::at(state_dir);
        for dir in [&store.drafts, &store.results] {
            fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
        }
        // Else a power cut could take the directory along with the results that were synced into it.
        File::open(state_dir)?.sync_all()?;
        Ok(store)
    }

    /// Those of a state directory that somebody else may be serving; nothing is made or dropped.
    pub fn at(state_dir: &Path) -> Results {
        Results { drafts: state_dir.join("drafts"), results: state_dir.join("results"), unsynced: Mutex::default() }
    }

    /// Drops the drafts of servers that are gone, all but those that are still open. One that cannot be dropped costs
    /// room, nothing else.
    pub fn drop_drafts(&self, is_open: impl Fn(Handle) -> bool) {
        for draft in fs::read_dir(&self.drafts).into_iter().flatten().flatten() {
            let handle = draft.file_name().to_str().and_then(|name| u64::from_str_radix(name, 16).ok()).map(Handle);
            if !handle.is_some_and(&is_open) {
                let _ = fs::remove_file(draft.path());
            }
        }
    }

    /// Opens the draft that an earlier server made for a write handle. One that was on its way to become the result,
    /// where the registry knows of none (`has_result` is false), is a draft again.
    ///
    /// # Errors
    /// Those of the filesystem.
    pub fn resume(&self, handle: Handle, key: KeyId, epoch: Epoch, has_result: bool) -> io::Result<File> {
        let open = || OpenOptions::new().read(true).write(true).open(self.draft(handle));
        match open() {
            Err(error) if error.kind() == io::ErrorKind::NotFound && !has_result => {
                self.unpublish(handle, key, epoch)?;
                open()
            }
            other => other,
        }
    }

    /// Makes the draft of a write handle, empty.
    ///
    /// # Errors
    /// Those of the filesystem.
    pub fn create_draft(&self, handle: Handle) -> io::Result<File> {
        OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(self.draft(handle))
    }

    /// Drops a draft. One that became a result, or never was, is no error.
    pub fn discard(&self, handle: Handle) {
        self.unsynced.lock().remove(&handle);
        let _ = fs::remove_file(self.draft(handle));
    }

    /// Makes the draft the attempt's result file; with `durable` its bytes are on disk before it has that name.
    ///
    /// # Errors
    /// Those of the filesystem; then the draft is still a draft. One that could not be synced never becomes a result:
    /// what was written has to be written again, to another.
    pub fn publish(&self, handle: Handle, key: KeyId, epoch: Epoch, durable: bool) -> io::Result<()> {
        let draft = self.draft(handle);
        if durable {
            if self.unsynced.lock().contains(&handle) {
                return Err(io::Error::from_raw_os_error(EIO));
            }
            let file = File::open(&draft)?;
            if let Err(error) = file.sync_data() {
                self.unsynced.lock().insert(handle);
                return Err(error);
            }
        }
        fs::rename(draft, self.result(key, epoch))
    }

    /// Takes [`Results::publish`] back.
    ///
    /// # Errors
    /// Those of the filesystem.
    pub fn unpublish(&self, handle: Handle, key: KeyId, epoch: Epoch) -> io::Result<()> {
        fs::rename(self.result(key, epoch), self.draft(handle))
    }

    /// Makes the renames of published results durable.
    ///
    /// # Errors
    /// Those of the filesystem.
    pub fn sync_names(&self) -> io::Result<()> {
        File::open(&self.results)?.sync_all()
    }

    /// Opens a committed result for reading.
    ///
    /// # Errors
    /// Those of the filesystem.
    pub fn read(&self, key: KeyId, epoch: Epoch) -> io::Result<File> {
        File::open(self.result(key, epoch))
    }

    /// Deletes a result's file. One that is gone is no error.
    ///
    /// # Errors
    /// Those of the filesystem.
    pub fn remove(&self, key: KeyId, epoch: Epoch) -> io::Result<()> {
        match fs::remove_file(self.result(key, epoch)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// Keeps every other prune away, and whoever reads all results, for as long as the value lives.
    ///
    /// # Errors
    /// [`Error::Busy`] where one of them is at it; those of the filesystem.
    pub fn lock_exclusive(&self) -> Result<ResultsLock, Error> {
        let dir = File::open(&self.results)?;
        match rustix::fs::flock(&dir, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(ResultsLock(dir)),
            Err(rustix::io::Errno::WOULDBLOCK) => Err(Error::Busy),
            Err(errno) => Err(io::Error::from(errno).into()),
        }
    }

    /// Waits for the end of a prune, and keeps others from beginning while the value lives. None where there is no
    /// directory to lock, and so nothing to prune.
    pub fn lock_shared(&self) -> Option<ResultsLock> {
        let dir = File::open(&self.results).ok()?;
        while let Err(errno) = rustix::fs::flock(&dir, FlockOperation::LockShared) {
            if errno != rustix::io::Errno::INTR {
                return None;
            }
        }
        Some(ResultsLock(dir))
    }

    /// Bytes that may still be written where the results are; none where the filesystem does not say.
    pub fn free_bytes(&self) -> Option<u64> {
        let room = rustix::fs::statvfs(&self.results).ok()?;
        room.f_bavail.checked_mul(room.f_frsize)
    }

    /// Where the result of an attempt is kept.
    pub fn result(&self, key: KeyId, epoch: Epoch) -> PathBuf {
        self.results.join(format!("{key}-{epoch}"))
    }

    fn draft(&self, handle: Handle) -> PathBuf {
        self.drafts.join(format!("{:x}", handle.0))
    }
}
