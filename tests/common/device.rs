//! A disk of a test's own making: an ext4 filesystem on a block device whose every write the test sees, fails or delays.
//!
//! The device is a loop over a file of a small FUSE filesystem in the test's own process, so what arrives here is what a
//! disk would get: blocks, and the flushes between them. Data counts as on disk once a flush came after it. A second file
//! beside it takes what clients were told, in its place among the writes.
#![allow(dead_code)]

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use fuser::{
    BackgroundSession, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo,
    KernelConfig, LockOwner, MountOption, OpenFlags, ReplyAttr, ReplyData, ReplyEmpty, ReplyEntry, ReplyOpen,
    ReplyWrite, Request, TimeOrNow, WriteFlags,
};
use parking_lot::Mutex;
use tempfile::TempDir;

use crate::common::{InTime, assert_ok, set_mode};

const DISK: INodeNo = INodeNo(2);
const TOLD: INodeNo = INodeNo(3);

/// What the device saw, in order.
pub enum Event {
    Write(u64, Vec<u8>),
    Flush,
    /// A flush that failed, and with it all that came since the last one.
    Lost,
    /// A line of a client.
    Told(String),
}

/// How the device is to behave.
#[derive(Clone, Copy, Default)]
pub struct Faults {
    /// Writes fail.
    pub write: bool,
    /// Flushes fail, and what came since the last one is as good as lost.
    pub flush: bool,
    /// A flush takes this long.
    pub flush_delay: Duration,
}

struct Media {
    bytes: Vec<u8>,
    log: Option<Vec<Event>>,
    told_bytes: u64,
    faults: Faults,
}

struct Backing(Arc<Mutex<Media>>);

impl Backing {
    fn attributes(&self, ino: INodeNo) -> FileAttr {
        let media = self.0.lock();
        let (size, kind) = match ino {
            DISK => (media.bytes.len() as u64, FileType::RegularFile),
            TOLD => (media.told_bytes, FileType::RegularFile),
            _ => (0, FileType::Directory),
        };
        let (perm, nlink) = if kind == FileType::Directory { (0o755, 2) } else { (0o666, 1) };
        let (atime, mtime, ctime, crtime) = (UNIX_EPOCH, UNIX_EPOCH, UNIX_EPOCH, UNIX_EPOCH);
        let (uid, gid, rdev, flags, blksize, blocks) = (0, 0, 0, 0, 4096, size / 512);
        FileAttr { ino, size, blocks, atime, mtime, ctime, crtime, kind, perm, nlink, uid, gid, rdev, flags, blksize }
    }
}

impl Filesystem for Backing {
    fn init(&mut self, _req: &Request, config: &mut KernelConfig) -> std::io::Result<()> {
        let _ = config.set_max_write(1 << 20);
        Ok(())
    }

    fn lookup(&self, _req: &Request, _parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let ino = match name.to_str() {
            Some("disk") => DISK,
            Some("told") => TOLD,
            _ => return reply.error(Errno::ENOENT),
        };
        reply.entry(&Duration::ZERO, &self.attributes(ino), Generation(0));
    }

    fn getattr(&self, _req: &Request, ino: INodeNo, _fh: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&Duration::ZERO, &self.attributes(ino));
    }

    fn setattr(
        &self,
        _req: &Request,
        ino: INodeNo,
        _mode: Option<u32>,
        _uid: Option<u32>,
        _gid: Option<u32>,
        _size: Option<u64>,
        _atime: Option<TimeOrNow>,
        _mtime: Option<TimeOrNow>,
        _ctime: Option<std::time::SystemTime>,
        _fh: Option<FileHandle>,
        _crtime: Option<std::time::SystemTime>,
        _chgtime: Option<std::time::SystemTime>,
        _bkuptime: Option<std::time::SystemTime>,
        _flags: Option<fuser::BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        reply.attr(&Duration::ZERO, &self.attributes(ino));
    }

    fn open(&self, _req: &Request, ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        let flags = if ino == TOLD { FopenFlags::FOPEN_DIRECT_IO } else { FopenFlags::empty() };
        reply.opened(FileHandle(0), flags);
    }

    fn read(
        &self,
        _req: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let media = self.0.lock();
        let bytes = if ino == DISK { media.bytes.as_slice() } else { &[] };
        let from = bytes.len().min(offset as usize);
        reply.data(&bytes[from..bytes.len().min(from + size as usize)]);
    }

    fn write(
        &self,
        _req: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        data: &[u8],
        _write_flags: WriteFlags,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let media = &mut *self.0.lock();
        if ino == TOLD {
            media.told_bytes += data.len() as u64;
            if let Some(log) = &mut media.log {
                log.push(Event::Told(String::from_utf8_lossy(data).into_owned()));
            }
            return reply.written(data.len() as u32);
        }
        let (from, to) = (offset as usize, offset as usize + data.len());
        if media.faults.write || to > media.bytes.len() {
            return reply.error(Errno::EIO);
        }
        media.bytes[from..to].copy_from_slice(data);
        if let Some(log) = &mut media.log {
            log.push(Event::Write(offset, data.to_vec()));
        }
        reply.written(data.len() as u32);
    }

    fn fsync(&self, _req: &Request, _ino: INodeNo, _fh: FileHandle, _datasync: bool, reply: ReplyEmpty) {
        let faults = self.0.lock().faults;
        std::thread::sleep(faults.flush_delay);
        if let Some(log) = &mut self.0.lock().log {
            log.push(if faults.flush { Event::Lost } else { Event::Flush });
        }
        if faults.flush {
            return reply.error(Errno::EIO);
        }
        reply.ok();
    }

    fn flush(&self, _req: &Request, _ino: INodeNo, _fh: FileHandle, _owner: LockOwner, reply: ReplyEmpty) {
        reply.ok();
    }
}

/// The device, and the filesystem on it while it is mounted.
pub struct Device {
    dir: TempDir,
    media: Arc<Mutex<Media>>,
    session: Option<BackgroundSession>,
    loop_device: Option<String>,
    mounted: bool,
}

impl Device {
    /// With an ext4 filesystem on it, mounted at [`Device::path`].
    pub fn new(bytes: usize) -> Device {
        Device::with(bytes, &["-J", "size=4"])
    }

    /// With one that has no journal, and so does not give up writing when a flush fails.
    pub fn without_journal(bytes: usize) -> Device {
        Device::with(bytes, &["-O", "^has_journal"])
    }

    fn with(bytes: usize, journal: &[&str]) -> Device {
        let dir = tempfile::Builder::new().prefix("leasefs-device-").tempdir().expect("temporary directory");
        set_mode(dir.path(), 0o755);
        for name in ["backing", "mnt"] {
            std::fs::create_dir(dir.path().join(name)).expect("mountpoint");
        }
        let media = Media { bytes: vec![0; bytes], log: None, told_bytes: 0, faults: Faults::default() };
        let media = Arc::new(Mutex::new(media));
        let mut config = fuser::Config::default();
        config.mount_options = vec![MountOption::FSName("leasefs-device".into())];
        let session = fuser::spawn_mount(Backing(Arc::clone(&media)), dir.path().join("backing"), &config);
        let session = Some(session.expect("a FUSE mount"));
        let mut device = Device { dir, media, session, loop_device: None, mounted: false };
        let output = Command::new("losetup").args(["--find", "--show"]).arg(device.backing("disk")).output_in_time();
        assert_ok(&output);
        device.loop_device = Some(String::from_utf8_lossy(&output.stdout).trim().to_owned());
        let format = ["-q", "-F", "-b", "4096", "-m", "0", "-E", "nodiscard,lazy_itable_init=0"];
        assert_ok(&Command::new("mkfs.ext4").args(format).args(journal).arg(device.node()).output_in_time());
        device.mount();
        device
    }

    fn backing(&self, name: &str) -> PathBuf {
        self.dir.path().join("backing").join(name)
    }

    fn node(&self) -> &str {
        self.loop_device.as_deref().expect("the loop device is there")
    }

    /// Where its filesystem is mounted.
    pub fn path(&self) -> PathBuf {
        self.dir.path().join("mnt")
    }

    /// The file that takes what clients were told.
    pub fn told(&self) -> PathBuf {
        self.backing("told")
    }

    /// A directory beside it, on the machine's own disk.
    pub fn aside(&self, name: &str) -> PathBuf {
        let path = self.dir.path().join(name);
        std::fs::create_dir_all(&path).expect("directory");
        path
    }

    /// Mounts the filesystem.
    pub fn mount(&mut self) {
        assert_ok(&Command::new("mount").args(["-t", "ext4", self.node()]).arg(self.path()).output_in_time());
        self.mounted = true;
    }

    /// Unmounts the filesystem.
    pub fn unmount(&mut self) {
        assert_ok(&Command::new("umount").arg(self.path()).output_in_time());
        self.mounted = false;
    }

    /// Repairs the filesystem, as after a fault.
    pub fn repair(&self) {
        let output = Command::new("fsck.ext4").args(["-f", "-y", self.node()]).output_in_time();
        assert!(output.status.code().is_some_and(|code| code <= 2), "{}", String::from_utf8_lossy(&output.stdout));
    }

    /// From now on it behaves like this.
    pub fn set(&self, faults: Faults) {
        self.media.lock().faults = faults;
    }

    /// Begins to keep what happens; what is on it now counts as on disk.
    pub fn record(&self) -> Vec<u8> {
        assert_ok(&Command::new("sync").arg("-f").arg(self.path()).output_in_time());
        let mut media = self.media.lock();
        media.log = Some(Vec::new());
        media.bytes.clone()
    }

    /// What happened since [`Device::record`].
    pub fn recorded(&self) -> Vec<Event> {
        self.media.lock().log.take().unwrap_or_default()
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        self.set(Faults::default());
        if self.mounted {
            detach(&self.path());
        }
        if let Some(node) = self.loop_device.take() {
            Command::new("losetup").args(["-d", &node]).quietly_in_time();
        }
        if let Some(session) = self.session.take() {
            let backing = self.dir.path().join("backing");
            detach(&backing);
            // Its thread ends with the connection; whatever still has the disk open keeps both, and is not waited for.
            drop(session);
        }
    }
}

/// Unmounts; what is busy is taken out of sight.
fn detach(path: &Path) {
    if !Command::new("umount").arg(path).quietly_in_time() {
        Command::new("umount").arg("-l").arg(path).quietly_in_time();
    }
}
