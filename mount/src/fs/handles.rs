//! What an open file of the mount is.

use std::collections::HashSet;
use std::fs::File;
use std::sync::Arc;

use leasefs::machine::Process;
use leasefs::namespaces::Credentials;
use leasefs::{Epoch, Handle, KeyId};

use super::Shared;
use crate::ino::Control;
use crate::process::Seen;

/// Text read in pieces: taken anew by a read from the start, so that no reader sees half of one and half of another.
#[derive(Default)]
pub struct Snapshot {
    text: Option<Arc<str>>,
    /// The length of a text that was read by a server before, in bytes, where the text itself is not kept: whoever had
    /// all of it is to find its end, and not the tail of a newer one.
    before: u64,
    /// Taken by the last read.
    is_new: bool,
}

impl Snapshot {
    /// The snapshot that a handle had at a server before: its text, or only its length.
    pub fn restored(text: Option<String>, length: u64) -> Snapshot {
        Snapshot { text: text.map(Arc::from), before: length, is_new: false }
    }

    /// The piece at `offset`; `fresh` gives the text where a new one is wanted.
    pub fn read(&mut self, offset: u64, size: u32, fresh: impl FnOnce() -> Option<String>) -> Option<Vec<u8>> {
        self.is_new = false;
        if offset > 0 && self.text.is_none() && self.before > 0 && offset >= self.before {
            return Some(Vec::new());
        }
        if offset == 0 || self.text.is_none() {
            self.text = Some(Arc::from(fresh()?));
            self.is_new = true;
        }
        let bytes = self.text.as_deref().unwrap_or_default().as_bytes();
        let start = usize::try_from(offset).unwrap_or(usize::MAX).min(bytes.len());
        let end = start.saturating_add(size as usize).min(bytes.len());
        Some(bytes[start..end].to_vec())
    }

    /// The text, where the last read took a new one.
    pub fn new_text(&self) -> Option<Arc<str>> {
        self.text.clone().filter(|_| self.is_new)
    }
}

/// An open result that may still be written.
pub struct Draft {
    /// The key.
    pub key: KeyId,
    /// The attempt it is for.
    pub epoch: Epoch,
    /// Who opened it.
    pub opener: Process,
    /// Its bytes.
    pub file: Arc<File>,
    /// Processes that wrote to it.
    pub writers: HashSet<u32>,
    /// More wrote to it than could be kept when the server was replaced: whoever closes it may be one of them.
    pub any_writer: bool,
    /// One of them, or its opener, was killed by a signal: closing it commits nothing.
    pub killed: bool,
    /// A copy of it was closed, or was open when its process ended. One of which neither was told never reached the
    /// process that opened it: it was killed inside `open(2)`.
    pub flushed: bool,
    /// A write to it failed: closing it commits nothing, `fsync` still does.
    pub cut_short: bool,
    /// It became the result.
    pub committed: bool,
}

impl Draft {
    /// A draft just opened.
    pub fn new(key: KeyId, epoch: Epoch, opener: Process, file: Arc<File>) -> Draft {
        Draft {
            key,
            epoch,
            opener,
            file,
            writers: HashSet::new(),
            any_writer: false,
            killed: false,
            flushed: false,
            cut_short: false,
            committed: false,
        }
    }
}

/// What an open file is.
pub enum Open {
    /// `claims/KEY`
    Claim {
        /// The key.
        key: KeyId,
        /// Who opened it.
        opener: Seen,
        /// What is read from it.
        snapshot: Snapshot,
        /// The kernel's numbers of the owners that locked it.
        owners: HashSet<u64>,
    },
    /// `status/KEY`
    Status {
        /// The key.
        key: KeyId,
        /// The key's count of changes when it was last read.
        seen: u64,
        /// What is read from it.
        snapshot: Snapshot,
    },
    /// `results/KEY/EPOCH`, for writing.
    Draft(Draft),
    /// `results/KEY/EPOCH`, committed.
    Result(KeyId, Epoch, Arc<File>),
    /// A file of `.leasefs/` that is text.
    Text(Control, Snapshot),
    /// `.leasefs/events`
    Events {
        /// The number of the next event to be read.
        next: u64,
        /// What of the last line did not fit into the read.
        rest: Vec<u8>,
        /// Who opened it: told only of keys that they may see.
        who: Credentials,
    },
    /// `.leasefs/control`
    Control,
}

impl Shared {
    /// Looks at an open file.
    pub(super) fn with_handle<R>(&self, handle: u64, look: impl FnOnce(&mut Open) -> R) -> Option<R> {
        self.handles.lock().get_mut(&handle).map(look)
    }

    /// An open draft of an attempt: the caller's own where there is one, since the kernel does not say by which handle
    /// a file is looked at.
    pub(super) fn draft_of(&self, key: KeyId, epoch: Epoch, caller: Process) -> Option<u64> {
        let handles = self.handles.lock();
        let drafts = handles.iter().filter_map(|(handle, open)| match open {
            Open::Draft(draft) if draft.key == key && draft.epoch == epoch => Some((*handle, draft.opener.is(caller))),
            _ => None,
        });
        drafts.max_by_key(|(handle, own)| (*own, *handle)).map(|(handle, _)| handle)
    }

    /// The claim handles of a key that this process opened.
    pub(super) fn handles_of(&self, key: KeyId, process: Process) -> Vec<Handle> {
        let handles = self.handles.lock();
        let of_process = |(handle, open): (&u64, &Open)| match open {
            Open::Claim { key: of, opener, .. } if *of == key && opener.process.is(process) => Some(Handle(*handle)),
            _ => None,
        };
        handles.iter().filter_map(of_process).collect()
    }
}
