//! A FUSE filesystem that does nothing: the least a claim through FUSE can cost.
//!
//! It answers every request at once and keeps nothing, under the flags and cache times leasefs uses: a name in `claims`
//! is never there until it is created, a create or a lock is always granted, to anyone. So it excludes nobody, and
//! where clients contend it is faster than anything that does the job could be.
//!
//! With a database it keeps a row for each claim there ([`Rows`]), and still nothing in the way of anyone.

use std::ffi::OsStr;
use std::io::{self, Read, Write};
use std::path::Path;
use std::sync::mpsc::Sender;
use std::time::{Duration, UNIX_EPOCH};

use anyhow::{Context, Result};
use fuser::{
    Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo, InitFlags,
    KernelConfig, LockOwner, MountOption, OpenFlags, ReplyAttr, ReplyCreate, ReplyEmpty, ReplyEntry, ReplyOpen,
    Request,
};

use crate::rows::{Row, Rows};

/// First argument that makes this program the filesystem; the mountpoint follows, and a database if there is to be one.
pub const WAY_IN: &str = "--serve-null";

/// What the program prints once the mount answers.
pub const MOUNTED: &str = "mounted";

const CLAIMS: INodeNo = INodeNo(2);
const LONG: Duration = Duration::from_secs(3600);
const HANDLE_FLAGS: FopenFlags = FopenFlags::FOPEN_DIRECT_IO.union(FopenFlags::FOPEN_NOFLUSH);

/// Serves until standard input ends, so that it never outlives the program that started it.
pub fn main(args: &[String]) -> Result<()> {
    let mountpoint = args.first().context("no mountpoint")?;
    let mut config = Config::default();
    config.mount_options = vec![
        MountOption::FSName("do-nothing".into()),
        MountOption::Subtype("null".into()),
        MountOption::DefaultPermissions,
        MountOption::NoAtime,
    ];
    let rows = args.get(1).map(|database| Rows::open(Path::new(database))).transpose()?;
    let null = Null { rows: rows.as_ref().map(Rows::sender) };
    let session =
        fuser::spawn_mount(null, mountpoint, &config).context("cannot mount the do-nothing FUSE filesystem")?;
    println!("{MOUNTED}");
    io::stdout().flush()?;
    io::stdin().read_to_end(&mut Vec::new())?;
    session.umount_and_join().context("cannot unmount the do-nothing FUSE filesystem")?;
    rows.map_or(Ok(()), Rows::close)
}

struct Null {
    /// Where claims are told.
    rows: Option<Sender<Row>>,
}

impl Null {
    fn claimed(&self, req: &Request, key: INodeNo) {
        if let Some(rows) = &self.rows {
            // Where it has failed, that is said at the end.
            let _ = rows.send(Row { key: key.0.cast_signed(), pid: req.pid(), uid: req.uid() });
        }
    }
}

fn attr(ino: INodeNo, kind: FileType) -> FileAttr {
    FileAttr {
        ino,
        size: 0,
        blocks: 0,
        atime: UNIX_EPOCH,
        mtime: UNIX_EPOCH,
        ctime: UNIX_EPOCH,
        crtime: UNIX_EPOCH,
        kind,
        perm: if kind == FileType::Directory { 0o777 } else { 0o666 },
        nlink: 1,
        uid: nix::unistd::getuid().as_raw(),
        gid: nix::unistd::getgid().as_raw(),
        rdev: 0,
        blksize: 4096,
        flags: 0,
    }
}

/// A number of its own for each name (FNV-1a), clear of the directories.
fn ino_of(name: &OsStr) -> INodeNo {
    let hash = name
        .as_encoded_bytes()
        .iter()
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3));
    INodeNo(hash | 1 << 32)
}

impl Filesystem for Null {
    fn init(&mut self, _req: &Request, config: &mut KernelConfig) -> io::Result<()> {
        config
            .add_capabilities(
                InitFlags::FUSE_FLOCK_LOCKS | InitFlags::FUSE_POSIX_LOCKS | InitFlags::FUSE_ATOMIC_O_TRUNC,
            )
            .map_err(|missing| io::Error::other(format!("the kernel lacks {missing:?}")))?;
        // Only zero is refused.
        let _ = config.set_max_background(1024);
        Ok(())
    }

    fn lookup(&self, _req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        if parent == INodeNo::ROOT && name == "claims" {
            reply.entry(&LONG, &attr(CLAIMS, FileType::Directory), Generation(0));
        } else {
            reply.error(Errno::ENOENT);
        }
    }

    fn getattr(&self, _req: &Request, ino: INodeNo, _fh: Option<FileHandle>, reply: ReplyAttr) {
        if ino == INodeNo::ROOT || ino == CLAIMS {
            reply.attr(&LONG, &attr(ino, FileType::Directory));
        } else {
            reply.attr(&Duration::ZERO, &attr(ino, FileType::RegularFile));
        }
    }

    fn create(
        &self,
        req: &Request,
        _parent: INodeNo,
        name: &OsStr,
        _mode: u32,
        _umask: u32,
        _flags: i32,
        reply: ReplyCreate,
    ) {
        let attr = attr(ino_of(name), FileType::RegularFile);
        self.claimed(req, attr.ino);
        reply.created(&Duration::ZERO, &attr, Generation(0), FileHandle(1), HANDLE_FLAGS);
    }

    fn open(&self, _req: &Request, _ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        reply.opened(FileHandle(1), HANDLE_FLAGS);
    }

    fn release(
        &self,
        _req: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        reply.ok();
    }

    fn setlk(
        &self,
        req: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        _lock_owner: LockOwner,
        _start: u64,
        _end: u64,
        typ: i32,
        _pid: u32,
        _sleep: bool,
        reply: ReplyEmpty,
    ) {
        if typ == libc::F_WRLCK {
            self.claimed(req, ino);
        }
        reply.ok();
    }
}
