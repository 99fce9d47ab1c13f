//! The requests of the kernel, each to where it is answered.

use std::ffi::OsStr;
use std::path::Path;
use std::time::SystemTime;

use fuser::{
    BsdFileFlags, Errno, FileHandle, Filesystem, INodeNo, InitFlags, IoctlFlags, KernelConfig, LockOwner, OpenFlags,
    PollEvents, PollFlags, PollNotifier, RenameFlags, ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory, ReplyEmpty,
    ReplyEntry, ReplyIoctl, ReplyLock, ReplyLseek, ReplyOpen, ReplyPoll, ReplyStatfs, ReplyWrite, ReplyXattr, Request,
    TimeOrNow, WriteFlags,
};
use leasefs::{Error, KeyId};

use super::LeaseFs;
use super::claims::LockRequest;
use super::handles::Open;
use super::names::{Change, finish};
use crate::connection::MAX_WRITE;
use crate::errno::errno;
use crate::flight::opcode;
use crate::ino::{Control, Node, Tree};
use crate::ioctl::LEASEFS_IOC_HOLDS;

/// What an open handle is, without the lock on the table.
enum Kind {
    Claim(KeyId),
    Status(KeyId),
    Bytes,
    Text(Control),
    Events,
    Control,
}

impl LeaseFs {
    fn kind_of(&self, handle: FileHandle) -> Option<Kind> {
        self.with_handle(handle.0, |open| match open {
            Open::Claim { key, .. } => Kind::Claim(*key),
            Open::Status { key, .. } => Kind::Status(*key),
            Open::Draft(_) | Open::Result(..) => Kind::Bytes,
            Open::Text(file, _) => Kind::Text(*file),
            Open::Events { .. } => Kind::Events,
            Open::Control => Kind::Control,
        })
    }
}

impl Filesystem for LeaseFs {
    fn init(&mut self, _req: &Request, config: &mut KernelConfig) -> std::io::Result<()> {
        let needed = InitFlags::FUSE_FLOCK_LOCKS | InitFlags::FUSE_POSIX_LOCKS | InitFlags::FUSE_ATOMIC_O_TRUNC;
        config.add_capabilities(needed).map_err(|missing| {
            std::io::Error::other(format!("this kernel's FUSE lacks {missing:?}: Linux 4.20 or later is needed"))
        })?;
        // Lookups in a directory need not wait for each other.
        let _ = config.add_capabilities(InitFlags::FUSE_PARALLEL_DIROPS);
        let _ = config.set_max_write(MAX_WRITE);
        // RELEASE is a background request: with few of them at a time, leases would end late under load.
        let _ = config.set_max_background(u16::MAX);
        let _ = config.set_congestion_threshold(u16::MAX);
        Ok(())
    }

    // Also what has no answer, or needs no thought, may be the last that the kernel had to read.
    fn forget(&self, req: &Request, ino: INodeNo, _nlookup: u64) {
        let _handling = self.handling(req, opcode::FORGET, ino);
        self.settle();
    }

    fn opendir(&self, req: &Request, ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        let _handling = self.handling(req, opcode::OPENDIR, ino);
        reply.opened(FileHandle(0), fuser::FopenFlags::empty());
        self.settle();
    }

    fn releasedir(&self, req: &Request, ino: INodeNo, _: FileHandle, _: OpenFlags, reply: ReplyEmpty) {
        let _handling = self.handling(req, opcode::RELEASEDIR, ino);
        reply.ok();
        self.settle();
    }

    fn lookup(&self, req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let _handling = self.handling_name(req, opcode::LOOKUP, parent, name);
        self.do_lookup(&self.caller(req), parent, name, reply);
        self.settle();
    }

    fn getattr(&self, req: &Request, ino: INodeNo, fh: Option<FileHandle>, reply: ReplyAttr) {
        let _handling = self.handling(req, opcode::GETATTR, ino);
        self.do_getattr(&self.caller(req), ino, fh.map(|handle| handle.0), reply);
        self.settle();
    }

    fn setattr(
        &self,
        req: &Request,
        ino: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        atime: Option<TimeOrNow>,
        mtime: Option<TimeOrNow>,
        _ctime: Option<SystemTime>,
        fh: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let _handling = self.handling(req, opcode::SETATTR, ino);
        let change = Change { mode, uid, gid, size, atime, mtime, handle: fh.map(|handle| handle.0) };
        self.do_setattr(&self.caller(req), ino, change, reply);
        self.settle();
    }

    fn readlink(&self, req: &Request, ino: INodeNo, reply: ReplyData) {
        let _handling = self.handling(req, opcode::READLINK, ino);
        match Node::of(ino) {
            Some(Node::Latest(key)) => self.read_latest(key, reply),
            _ => reply.error(Errno::EINVAL),
        }
        self.settle();
    }

    fn mknod(&self, req: &Request, ino: INodeNo, _: &OsStr, _: u32, _: u32, _: u32, reply: ReplyEntry) {
        let _handling = self.handling(req, opcode::MKNOD, ino);
        reply.error(Errno::EPERM);
        self.settle();
    }

    fn mkdir(&self, req: &Request, parent: INodeNo, name: &OsStr, mode: u32, umask: u32, reply: ReplyEntry) {
        let _handling = self.handling_name(req, opcode::MKDIR, parent, name);
        self.do_mkdir(&self.caller(req), parent, name, mode & !umask, reply);
        self.settle();
    }

    fn unlink(&self, req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let _handling = self.handling_name(req, opcode::UNLINK, parent, name);
        match LeaseFs::parent_of(parent) {
            Some(parent) => self.unlink_claim(&self.caller(req), parent, name, reply),
            None => reply.error(Errno::EPERM),
        }
        self.settle();
    }

    fn rmdir(&self, req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let _handling = self.handling_name(req, opcode::RMDIR, parent, name);
        self.do_rmdir(&self.caller(req), parent, name, reply);
        self.settle();
    }

    fn symlink(&self, req: &Request, ino: INodeNo, _: &OsStr, _: &Path, reply: ReplyEntry) {
        let _handling = self.handling(req, opcode::SYMLINK, ino);
        reply.error(Errno::EPERM);
        self.settle();
    }

    fn rename(&self, req: &Request, ino: INodeNo, _: &OsStr, _: INodeNo, _: &OsStr, _: RenameFlags, reply: ReplyEmpty) {
        let _handling = self.handling(req, opcode::RENAME, ino);
        reply.error(Errno::EPERM);
        self.settle();
    }

    fn link(&self, req: &Request, ino: INodeNo, _: INodeNo, _: &OsStr, reply: ReplyEntry) {
        let _handling = self.handling(req, opcode::LINK, ino);
        reply.error(Errno::EPERM);
        self.settle();
    }

    fn create(
        &self,
        req: &Request,
        parent: INodeNo,
        name: &OsStr,
        _mode: u32,
        _umask: u32,
        flags: i32,
        reply: ReplyCreate,
    ) {
        let _handling = self.handling_name(req, opcode::CREATE, parent, name);
        match Node::of(parent) {
            Some(Node::Namespace(Tree::Claims, parent)) => {
                self.create_claim(&self.caller(req), parent, name, flags, reply)
            }
            Some(Node::ResultDir(key)) => self.create_result(&self.caller(req), key, name, flags, reply),
            _ => reply.error(Errno::EPERM),
        }
        self.settle();
    }

    fn open(&self, req: &Request, ino: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        let _handling = self.handling(req, opcode::OPEN, ino);
        match Node::of(ino) {
            Some(Node::Claim(key)) => self.open_claim(&self.caller(req), key, reply),
            Some(Node::Status(key)) => self.open_status(&self.caller(req), key, flags.0, reply),
            Some(Node::Result(key, epoch)) => self.open_result(&self.caller(req), key, epoch, flags.0, reply),
            Some(Node::Control(file)) => self.open_control(&self.caller(req), file, flags.0, reply),
            _ => reply.error(Errno::ENOENT),
        }
        self.settle();
    }

    fn read(
        &self,
        req: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        size: u32,
        flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let _handling = self.handling(req, opcode::READ, ino);
        match self.kind_of(fh) {
            Some(Kind::Claim(key)) => self.read_claim(fh.0, key, offset, size, reply),
            Some(Kind::Status(key)) => self.read_status(fh.0, key, offset, size, reply),
            Some(Kind::Bytes) => self.read_bytes(fh.0, offset, size, reply),
            Some(Kind::Text(file)) => self.read_text(fh.0, file, offset, size, reply),
            Some(Kind::Events) => {
                self.read_events(&self.caller(req), fh.0, size, flags.0 & libc::O_NONBLOCK != 0, reply)
            }
            Some(Kind::Control) | None => reply.error(Errno::EBADF),
        }
        self.settle();
    }

    fn write(
        &self,
        req: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        data: &[u8],
        _write_flags: WriteFlags,
        flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let _handling = self.handling(req, opcode::WRITE, ino);
        match self.kind_of(fh) {
            Some(Kind::Claim(key)) => self.write_note(fh.0, key, data, reply),
            Some(Kind::Bytes) => {
                self.write_draft(&self.caller(req), fh.0, offset, data, flags.0 & libc::O_APPEND != 0, reply);
            }
            Some(Kind::Control) => self.order(&self.caller(req), data, reply),
            _ => reply.error(Errno::EBADF),
        }
        self.settle();
    }

    fn flush(&self, req: &Request, ino: INodeNo, fh: FileHandle, _lock_owner: LockOwner, reply: ReplyEmpty) {
        let _handling = self.closing(req, opcode::FLUSH, ino, fh);
        match self.kind_of(fh) {
            Some(Kind::Bytes) => self.flush_draft(&self.caller(req), fh.0, reply),
            _ => reply.ok(),
        }
        self.settle();
    }

    fn release(
        &self,
        req: &Request,
        ino: INodeNo,
        fh: FileHandle,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        let _handling = self.closing(req, opcode::RELEASE, ino, fh);
        let open = self.handles.lock().remove(&fh.0);
        self.forget_polls(fh.0);
        match open {
            Some(Open::Claim { key, opener, owners, .. }) => {
                self.forget_owners(&owners, leasefs::Handle(fh.0));
                self.close_claim(fh.0, key, opener.process, reply);
            }
            Some(Open::Draft(draft)) => self.close_draft(draft, fh.0, reply),
            _ => {
                self.forget_kept(fh.0);
                reply.ok();
            }
        }
        self.settle();
    }

    fn fsync(&self, req: &Request, ino: INodeNo, fh: FileHandle, _datasync: bool, reply: ReplyEmpty) {
        let _handling = self.handling(req, opcode::FSYNC, ino);
        match self.kind_of(fh) {
            Some(Kind::Bytes) => self.sync_draft(fh.0, reply),
            // Whatever was decided so far is in the registry, for whoever goes on to read that.
            Some(Kind::Text(_)) => {
                let fs = self.clone();
                let answer = move |applied: Result<(), Error>| finish(reply, applied);
                self.engine.when_recorded(Box::new(move || fs.engine.when_applied(Box::new(answer))));
            }
            // Anywhere else it says: whatever was decided so far is safe.
            _ => self.engine.when_recorded(Box::new(move || reply.ok())),
        }
        self.settle();
    }

    fn readdir(&self, req: &Request, ino: INodeNo, _fh: FileHandle, offset: u64, reply: ReplyDirectory) {
        let _handling = self.handling(req, opcode::READDIR, ino);
        self.do_readdir(ino, offset, reply);
        self.settle();
    }

    fn fsyncdir(&self, req: &Request, ino: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        let _handling = self.handling(req, opcode::FSYNCDIR, ino);
        reply.ok();
        self.settle();
    }

    fn statfs(&self, req: &Request, ino: INodeNo, reply: ReplyStatfs) {
        let _handling = self.handling(req, opcode::STATFS, ino);
        let keys = match self.engine.key_count() {
            Ok(count) => count as u64,
            Err(error) => return reply.error(errno(&error)),
        };
        // The state directory's disk is what can fill up.
        match nix::sys::statvfs::statvfs(&self.settings.state_dir) {
            Ok(disk) => reply.statfs(
                disk.blocks(),
                disk.blocks_free(),
                disk.blocks_available(),
                keys,
                KeyId::MAX.0 - keys,
                u32::try_from(disk.block_size()).unwrap_or(4096),
                255,
                u32::try_from(disk.fragment_size()).unwrap_or(4096),
            ),
            Err(_) => reply.error(Errno::EIO),
        }
        self.settle();
    }

    fn setxattr(
        &self,
        req: &Request,
        ino: INodeNo,
        name: &OsStr,
        value: &[u8],
        flags: i32,
        _position: u32,
        reply: ReplyEmpty,
    ) {
        let _handling = self.handling(req, opcode::SETXATTR, ino);
        let caller = self.caller(req);
        match self.check_flags(&caller, ino, name, flags) {
            Ok(()) => self.set_xattr(&caller, ino, name, Some(value), reply),
            Err(refused) => reply.error(refused),
        }
        self.settle();
    }

    fn getxattr(&self, req: &Request, ino: INodeNo, name: &OsStr, size: u32, reply: ReplyXattr) {
        let _handling = self.handling(req, opcode::GETXATTR, ino);
        self.get_xattr(ino, name, size, reply);
        self.settle();
    }

    fn listxattr(&self, req: &Request, ino: INodeNo, size: u32, reply: ReplyXattr) {
        let _handling = self.handling(req, opcode::LISTXATTR, ino);
        self.list_xattrs(ino, size, reply);
        self.settle();
    }

    fn removexattr(&self, req: &Request, ino: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let _handling = self.handling(req, opcode::REMOVEXATTR, ino);
        self.set_xattr(&self.caller(req), ino, name, None, reply);
        self.settle();
    }

    fn getlk(
        &self,
        req: &Request,
        ino: INodeNo,
        fh: FileHandle,
        lock_owner: LockOwner,
        start: u64,
        end: u64,
        typ: i32,
        _pid: u32,
        reply: ReplyLock,
    ) {
        let _handling = self.handling(req, opcode::GETLK, ino);
        let range = (start, end);
        let request = LockRequest { handle: fh.0, owner: lock_owner.0, range, kind: typ, sleep: false };
        self.test_lock(&self.caller(req), &request, reply);
        self.settle();
    }

    fn setlk(
        &self,
        req: &Request,
        ino: INodeNo,
        fh: FileHandle,
        lock_owner: LockOwner,
        start: u64,
        end: u64,
        typ: i32,
        _pid: u32,
        sleep: bool,
        reply: ReplyEmpty,
    ) {
        let range = (start, end);
        let request = LockRequest { handle: fh.0, owner: lock_owner.0, range, kind: typ, sleep };
        let _handling = self.locking(req, ino, &request);
        self.lock(&self.caller(req), &request, reply);
        self.settle();
    }

    fn ioctl(
        &self,
        req: &Request,
        ino: INodeNo,
        fh: FileHandle,
        _: IoctlFlags,
        command: u32,
        _: &[u8],
        _: u32,
        reply: ReplyIoctl,
    ) {
        let _handling = self.handling(req, opcode::IOCTL, ino);
        match self.kind_of(fh) {
            Some(Kind::Claim(key)) if command == LEASEFS_IOC_HOLDS => self.tell_holds(fh.0, key, reply),
            _ => reply.error(Errno::ENOTTY),
        }
        self.settle();
    }

    fn poll(
        &self,
        req: &Request,
        ino: INodeNo,
        fh: FileHandle,
        ph: PollNotifier,
        events: PollEvents,
        flags: PollFlags,
        reply: ReplyPoll,
    ) {
        let _handling = self.polling(req, ino, fh, (ph.handle().0, flags, events));
        self.do_poll(fh.0, ph, flags.contains(PollFlags::FUSE_POLL_SCHEDULE_NOTIFY), reply);
        self.settle();
    }

    fn fallocate(&self, req: &Request, ino: INodeNo, _: FileHandle, _: u64, _: u64, _: i32, reply: ReplyEmpty) {
        let _handling = self.handling(req, opcode::FALLOCATE, ino);
        reply.error(Errno::EOPNOTSUPP);
        self.settle();
    }

    fn lseek(&self, req: &Request, ino: INodeNo, _: FileHandle, _: i64, _: i32, reply: ReplyLseek) {
        let _handling = self.handling(req, opcode::LSEEK, ino);
        // The kernel then seeks by the file's size.
        reply.error(Errno::ENOSYS);
        self.settle();
    }
}
