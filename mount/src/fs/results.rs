//! `results/KEY/EPOCH`: a draft for each write handle, one commit, then only readers (§6).

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use fuser::{
    Errno, FileAttr, FileHandle, FileType, FopenFlags, Generation, ReplyAttr, ReplyCreate, ReplyData, ReplyEmpty,
    ReplyOpen, ReplyWrite,
};
use leasefs::machine::Input;
use leasefs::{Epoch, Error, Handle, KeyId};

use super::handles::{Draft, Open};
use super::names::{Change, NEVER, Times, attr, finish, namespace_of, parse_epoch};
use super::{Caller, LeaseFs};
use crate::clock;
use crate::errno::errno;
use crate::ino::Node;
use crate::process;

impl LeaseFs {
    pub(super) fn create_result(&self, req: &Caller, key: KeyId, name: &OsStr, flags: i32, reply: ReplyCreate) {
        let now = clock::now();
        if name.as_bytes() == b"latest" {
            return reply.error(Errno::EPERM);
        }
        let Some(epoch) = parse_epoch(name.as_bytes()) else { return reply.error(Errno::ENOENT) };
        if flags & libc::O_ACCMODE == libc::O_RDONLY {
            return reply.error(Errno::ENOENT);
        }
        match self.engine.result_of(key, epoch) {
            Ok(None) => {}
            Ok(Some(_)) => return reply.error(Errno::EPERM),
            Err(error) => return reply.error(errno(&error)),
        }
        let handle = self.handle_for(req);
        // Where this very request was answered before, its draft is there.
        let given = self.with_handle(handle.0, |open| match open {
            Open::Draft(draft) => Some(Arc::clone(&draft.file)),
            _ => None,
        });
        let file = match given.flatten().map_or_else(|| self.engine.results.create_draft(handle).map(Arc::new), Ok) {
            Ok(file) => file,
            Err(error) => return reply.error(errno(&Error::from(error))),
        };
        let opener = self.processes.identify(req.pid()).process;
        let (fs, caller) = (self.clone(), req.clone());
        let done = move |result: Result<_, Error>| {
            let refused = match result {
                Ok(_) => {
                    let draft = Draft::new(key, epoch, opener, file);
                    fs.open_handle(&caller, handle, Open::Draft(draft));
                    let node = Node::Result(key, epoch);
                    match fs.draft_attributes(node, handle.0) {
                        Some(attr) => {
                            let flags = FopenFlags::FOPEN_DIRECT_IO;
                            return reply.created(&NEVER, &attr, Generation(0), FileHandle(handle.0), flags);
                        }
                        None => Errno::EIO,
                    }
                }
                Err(error) => {
                    fs.handles.lock().remove(&handle.0);
                    fs.forget_kept(handle.0);
                    fs.engine.results.discard(handle);
                    errno(&error)
                }
            };
            reply.error(refused);
        };
        let input = Input::OpenDraft { handle, epoch, uid: req.uid() };
        self.engine.submit(key, input, now, Box::new(done));
    }

    pub(super) fn open_result(&self, req: &Caller, key: KeyId, epoch: Epoch, flags: i32, reply: ReplyOpen) {
        if flags & libc::O_ACCMODE != libc::O_RDONLY || flags & libc::O_TRUNC != 0 {
            return reply.error(Errno::EPERM);
        }
        let (fs, caller) = (self.clone(), req.clone());
        let answer = move || {
            // A prune that comes in between finds it among the open ones.
            let _opening = fs.opening.read();
            // The registry decides whether there is a result, not whether there is a file.
            let file = match fs.engine.result_of(key, epoch) {
                Ok(Some(_)) => fs.engine.results.read(key, epoch).map_err(Error::from),
                Ok(None) => Err(Error::NotFound),
                Err(error) => Err(error),
            };
            match file {
                Ok(file) => {
                    let handle = fs.handle_for(&caller);
                    fs.open_handle(&caller, handle, Open::Result(key, epoch, Arc::new(file)));
                    // It never changes, so the kernel may keep what it read, and may map it.
                    reply.opened(FileHandle(handle.0), FopenFlags::FOPEN_KEEP_CACHE | FopenFlags::FOPEN_NOFLUSH);
                }
                Err(error) => reply.error(errno(&error)),
            }
        };
        self.engine.when_settled(key, clock::now(), Box::new(answer));
    }

    pub(super) fn draft_attributes(&self, node: Node, handle: u64) -> Option<FileAttr> {
        let (key, file) = self.with_handle(handle, |open| match open {
            Open::Draft(draft) => Some((draft.key, Arc::clone(&draft.file))),
            _ => None,
        })??;
        self.file_attributes(node, key, &file, 0o200)
    }

    /// The attributes of a result that was pruned while somebody reads it: who opened it reads it to its end.
    pub(super) fn pruned_attributes(&self, node: Node, key: KeyId, epoch: Epoch) -> Option<FileAttr> {
        let handles = self.handles.lock();
        let file = handles.values().find_map(|open| match open {
            Open::Result(of, attempt, file) if (*of, *attempt) == (key, epoch) => Some(Arc::clone(file)),
            _ => None,
        });
        drop(handles);
        self.file_attributes(node, key, file?.as_ref(), 0)
    }

    fn file_attributes(&self, node: Node, key: KeyId, file: &std::fs::File, more: u32) -> Option<FileAttr> {
        let metadata = file.metadata().ok()?;
        let modified = metadata.modified().ok()?;
        self.engine.view(key, |entry, tree| {
            let (mode, _, gid) = namespace_of(entry, tree);
            let times = Times { mtime: modified, ctime: modified };
            attr(node, FileType::RegularFile, mode & 0o444 | more, entry.file_uid(tree), gid, metadata.len(), times)
        })
    }

    /// Checks that a draft may still become the result, and then does `then` with its file.
    fn on_draft(
        &self,
        handle: u64,
        then: impl FnOnce(&std::fs::File) -> Result<(), Error>,
        done: impl FnOnce(Result<(), Error>) + Send + 'static,
    ) {
        let open = self.with_handle(handle, |open| match open {
            Open::Draft(draft) => Some((draft.key, Arc::clone(&draft.file))),
            _ => None,
        });
        let Some((key, file)) = open.flatten() else { return done(Err(Error::Denied)) };
        // A deadline may pass between the check and the write; the commit asks again.
        let now = clock::now();
        let checked = self.engine.view(key, |entry, _| entry.state.check_draft(Handle(handle), now));
        let result = checked.unwrap_or(Err(Error::Stale));
        if result == Err(Error::Stale) {
            self.note_stale(key, now);
        }
        done(result.and_then(|_| then(&file)));
    }

    pub(super) fn write_draft(
        &self,
        req: &Caller,
        handle: u64,
        offset: u64,
        data: &[u8],
        append: bool,
        reply: ReplyWrite,
    ) {
        let writer = self.processes.identify(req.pid()).process.pid;
        self.with_handle(handle, |open| {
            if let Open::Draft(draft) = open
                && draft.writers.insert(writer)
            {
                self.keep_draft(handle, draft);
            }
        });
        let max = self.engine.max_result();
        let write = |file: &std::fs::File| {
            // Sent again, it is written where it was written, not behind itself.
            let offset = if append { self.started_from(req, handle, file.metadata()?.len()) } else { offset };
            if offset.saturating_add(data.len() as u64) > max {
                return Err(Error::TooLarge("a result has at most as many bytes as --max-result says"));
            }
            Ok(file.write_all_at(data, offset)?)
        };
        let length = u32::try_from(data.len()).unwrap_or(0);
        let fs = self.clone();
        self.on_draft(handle, write, move |result| match result {
            Ok(()) => reply.written(length),
            Err(error) => {
                // What is cut short is published by nobody's mere close.
                fs.with_handle(handle, |open| {
                    if let Open::Draft(draft) = open {
                        draft.cut_short = true;
                        fs.keep_draft(handle, draft);
                    }
                });
                reply.error(errno(&error));
            }
        });
    }

    pub(super) fn change_result(&self, node: Node, change: Change, reply: ReplyAttr) {
        let (Some(handle), Some(size)) = (change.handle, change.size) else { return reply.error(Errno::EPERM) };
        if size > self.engine.max_result() {
            return reply.error(Errno::EFBIG);
        }
        let fs = self.clone();
        let done = move |result: Result<_, Error>| match result.map(|()| fs.draft_attributes(node, handle)) {
            Ok(Some(attr)) => reply.attr(&NEVER, &attr),
            Ok(None) => reply.error(Errno::EPERM),
            Err(error) => reply.error(errno(&error)),
        };
        self.on_draft(handle, |file| Ok(file.set_len(size)?), done);
    }

    pub(super) fn read_bytes(&self, handle: u64, offset: u64, size: u32, reply: ReplyData) {
        let file = self.with_handle(handle, |open| match open {
            Open::Draft(draft) => Some(Arc::clone(&draft.file)),
            Open::Result(_, _, file) => Some(Arc::clone(file)),
            _ => None,
        });
        let Some(file) = file.flatten() else { return reply.error(Errno::EBADF) };
        let mut buffer = vec![0; size as usize];
        let mut filled = 0;
        while filled < buffer.len() {
            match file.read_at(&mut buffer[filled..], offset + filled as u64) {
                Ok(0) => break,
                Ok(read) => filled += read,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => return reply.error(errno(&Error::from(error))),
            }
        }
        reply.data(&buffer[..filled]);
    }

    /// `fsync` commits, and its error is the answer.
    pub(super) fn sync_draft(&self, handle: u64, reply: ReplyEmpty) {
        self.commit_draft(handle, move |result| finish(reply, result));
    }

    fn commit_draft(&self, handle: u64, done: impl FnOnce(Result<(), Error>) + Send + 'static) {
        let open = self.with_handle(handle, |open| match open {
            Open::Draft(draft) => Some((draft.key, draft.committed, draft.file.metadata().map(|m| m.len()))),
            _ => None,
        });
        let (key, size) = match open.flatten() {
            // A second fsync of what is committed has nothing to do.
            Some((_, true, _)) => return done(Ok(())),
            Some((key, false, Ok(size))) => (key, size),
            Some((_, false, Err(error))) => return done(Err(Error::from(error))),
            None => return done(Err(Error::Denied)),
        };
        let fs = self.clone();
        let committed = move |result: Result<_, Error>| {
            if result.is_ok() {
                fs.with_handle(handle, |open| {
                    if let Open::Draft(draft) = open {
                        draft.committed = true;
                    }
                });
            }
            done(result.map(drop));
        };
        self.engine.submit(key, Input::Commit { handle: Handle(handle), size }, clock::now(), Box::new(committed));
    }

    /// One copy of a write handle is closed. Where a signal killed the process that opened it, or one that wrote to it,
    /// nothing is committed later; one that merely inherited it does no harm.
    pub(super) fn flush_draft(&self, req: &Caller, handle: u64, reply: ReplyEmpty) {
        let killed = process::is_killed(req.pid()).then(|| self.processes.identify(req.pid()).process.pid);
        self.with_handle(handle, |open| {
            if let Open::Draft(draft) = open {
                draft.flushed = true;
                let is_its_own = |pid| draft.any_writer || draft.opener.pid == pid || draft.writers.contains(&pid);
                draft.killed |= killed.is_some_and(is_its_own);
                self.keep_draft(handle, draft);
            }
        });
        reply.ok();
    }

    /// The last copy of a write handle is gone: what was not committed is, unless its writer was killed.
    ///
    /// Both take effect at once, so that whoever comes after the close finds the key as it leaves it; only the draft's
    /// file has to stay until it is recorded.
    pub(super) fn close_draft(&self, draft: Draft, handle: u64, reply: ReplyEmpty) {
        let now = clock::now();
        let handle = Handle(handle);
        let reached_somebody = draft.flushed || !draft.writers.is_empty();
        if reached_somebody
            && !draft.killed
            && !draft.cut_short
            && !draft.committed
            && let Ok(metadata) = draft.file.metadata()
        {
            let commit = Input::Commit { handle, size: metadata.len() };
            // Nobody is left to be told how it went.
            self.engine.submit(draft.key, commit, now, Box::new(|_| ()));
        }
        let fs = self.clone();
        let done = move |result| {
            fs.engine.results.discard(handle);
            fs.forget_kept(handle.0);
            finish(reply, result);
        };
        self.engine.submit(draft.key, Input::CloseDraft { handle }, now, Box::new(done));
    }

    pub(super) fn read_latest(&self, key: KeyId, reply: ReplyData) {
        let fs = self.clone();
        self.engine.when_settled(
            key,
            clock::now(),
            Box::new(move || match fs.engine.view(key, |entry, _| entry.state.latest_result).flatten() {
                Some((epoch, _)) => reply.data(epoch.to_string().as_bytes()),
                None => reply.error(Errno::ENOENT),
            }),
        );
    }
}
