//! The mount of one's own whose server is gone: told from all others, taken away, and remembered.
//!
//! The state directory keeps what identifies the mount it served last: path, mount number, device number, the kernel's
//! own number of the mount that is never used again (Linux 6.8), and the boot. A mount is taken away only where all of
//! them fit, nothing is mounted over it, no server has the state directory, and it answers `ENOTCONN`. It also keeps
//! which connections were lost since boot, by which their handles are known in `/proc`.
//!
//! # What must not be touched
//! A mount that may be alive may hang whoever looks at it. So nothing is asked of a mount before it is known to be the
//! one that was served from here; and what is asked then is asked by a process that can be killed.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::fcntl::{AtFlags, OFlag, open};
use nix::sys::stat::{Mode, fstatat};
use nix::sys::statfs::{FsType, fstatfs};
use serde::{Deserialize, Serialize};

use crate::failure::Failure;
use crate::mountinfo::{FS_TYPE, Mounted, mounts, unique_id};
use crate::{clock, keeper, kernel_mount};

/// File name in the state directory.
const FILE: &str = "mount.json";
/// More lost connections than this since boot are not told apart any more.
const MAX_LOST: usize = 256;
/// How long a dead mount may take to say that it is dead.
const PATIENCE: Duration = Duration::from_secs(5);
/// The filesystem type of the kernel's list of FUSE connections.
const FUSECTL: FsType = FsType(0x6573_5543);

/// What the state directory remembers of its mounts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    boot_id: String,
    mountpoint: PathBuf,
    mount_id: u64,
    /// Where the kernel tells it.
    unique_id: Option<u64>,
    connection: Connection,
    /// Connections lost since boot; none where there were too many to keep.
    lost: Option<Vec<Connection>>,
}

/// A connection to the kernel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Connection {
    /// The device number of its filesystem, as `major:minor`; another's once this one is gone.
    pub device: String,
    /// How the kernel listed it when it was made, where it did.
    listed: Option<Listed>,
}

/// An entry of the kernel's list of FUSE connections (fusectl).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Listed {
    /// The mounts of the list: for as long as one of them is there, entries keep their inode numbers.
    lists: Vec<u64>,
    ino: u64,
}

/// The connections of a state directory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Connections {
    /// The one that is served.
    pub live: Option<Connection>,
    /// Those that were lost since boot; none where it is not known.
    pub lost: Option<Vec<Connection>>,
}

impl Connections {
    /// Connections known by their device numbers alone.
    #[cfg(test)]
    pub fn of(live: &str, lost: &[&str]) -> Connections {
        let connection = |device: &&str| Connection { device: (*device).to_owned(), listed: None };
        Connections { live: Some(connection(&live)), lost: Some(lost.iter().map(connection).collect()) }
    }

    /// Whether a device number is that of the connection that is served.
    pub fn is_live(&self, device: &str) -> bool {
        self.live.as_ref().is_some_and(|live| live.device == device)
    }

    /// Whether a device number is, or may be, that of a connection that was lost.
    pub fn may_be_lost(&self, device: &str) -> bool {
        match self.lost.as_deref() {
            None | Some([]) => !self.is_live(device),
            Some(lost) => lost.iter().any(|lost| lost.device == device),
        }
    }

    /// Whether the kernel has let go of every connection that was lost: then every handle of theirs is gone, wherever it
    /// was. With none known to be lost, what is orphaned belongs to one that is not known.
    pub fn is_all_gone(&self) -> bool {
        let (Some(live), Some(lost)) = (&self.live, &self.lost) else { return false };
        // A list that does not have the one that is served is none to go by.
        let is_off_the_list = |lost: &Connection| live.is_there() == Some(true) && lost.is_there() == Some(false);
        // A device number is given again only when its filesystem is gone.
        let is_gone = |lost: &Connection| lost.device == live.device || is_off_the_list(lost);
        !lost.is_empty() && lost.iter().all(is_gone)
    }
}

impl Connection {
    fn new(device: String) -> Connection {
        let lists = lists();
        let ino = lists.iter().find_map(|(list, _)| entry(list, &device).ok()?);
        let listed = ino.map(|ino| Listed { lists: lists.iter().filter_map(|(_, id)| *id).collect(), ino });
        Connection { device, listed }
    }

    /// Whether the kernel still has it; none where it does not say.
    ///
    /// Its filesystem is there for as long as anything refers to it: an open file in any process, on its way through a
    /// socket, or in a ring.
    fn is_there(&self) -> Option<bool> {
        let lists = lists();
        let is_the_same = |id: Option<u64>| {
            let listed = self.listed.as_ref().zip(id);
            listed.is_some_and(|(listed, id)| listed.lists.contains(&id))
        };
        let (list, id) = lists.iter().find(|(_, id)| is_the_same(*id)).or(lists.first())?;
        let ino = entry(list, &self.device).ok()?;
        let is_another = |ino| is_the_same(*id) && self.listed.as_ref().is_some_and(|listed| listed.ino != ino);
        Some(ino.is_some_and(|ino| !is_another(ino)))
    }
}

/// The kernel's list of FUSE connections, with the number of its mount: wherever it is mounted, and where it is not, a
/// mount of it that nobody else sees, if this process may make one.
fn lists() -> Vec<(OwnedFd, Option<u64>)> {
    let mounted = mounts().unwrap_or_default().into_iter().filter(|mount| mount.fs_type == "fusectl");
    let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    let open = |mount: Mounted| Some((open(&mount.path, flags, Mode::empty()).ok()?, unique_id(&mount.path)));
    let mut lists: Vec<_> = mounted.filter_map(open).collect();
    // What was unmounted meanwhile must not be taken for an empty list.
    lists.retain(|(list, _)| fstatfs(list).is_ok_and(|found| found.filesystem_type() == FUSECTL));
    if lists.is_empty() {
        lists.extend(private_list().map(|list| (list, None)));
    }
    lists
}

/// A mount of the list that is attached nowhere.
fn private_list() -> Option<OwnedFd> {
    // SAFETY: the name ends with a NUL; the answer is a new descriptor that nothing else owns, or an error.
    let context = unsafe { new_fd(libc::syscall(libc::SYS_fsopen, c"fusectl".as_ptr(), libc::FSOPEN_CLOEXEC)) }?;
    let (number, nothing) = (context.as_raw_fd(), std::ptr::null::<libc::c_char>());
    // SAFETY: FSCONFIG_CMD_CREATE takes no key, no value and no number.
    let made = unsafe { libc::syscall(libc::SYS_fsconfig, number, libc::FSCONFIG_CMD_CREATE, nothing, nothing, 0) };
    // SAFETY: no pointer is passed; the answer is as above.
    unsafe { (made == 0).then(|| new_fd(libc::syscall(libc::SYS_fsmount, number, libc::FSMOUNT_CLOEXEC, 0)))? }
}

/// Takes what a system call answered for a new descriptor, unless it is an error.
///
/// # Safety
/// Nothing else owns the descriptor.
unsafe fn new_fd(answer: libc::c_long) -> Option<OwnedFd> {
    let number = RawFd::try_from(answer).ok().filter(|number| *number >= 0)?;
    // SAFETY: as the caller warrants.
    Some(unsafe { OwnedFd::from_raw_fd(number) })
}

/// The inode number of a connection's entry in the kernel's list; none where it has no entry.
fn entry(list: &OwnedFd, device: &str) -> nix::Result<Option<u64>> {
    let minor = device.strip_prefix("0:").ok_or(nix::Error::EINVAL)?;
    match fstatat(list, minor, AtFlags::AT_SYMLINK_NOFOLLOW) {
        Ok(found) => Ok(Some(found.st_ino)),
        Err(nix::Error::ENOENT) => Ok(None),
        Err(error) => Err(error),
    }
}

impl Record {
    /// That of a state directory; none where nothing was mounted from it since boot.
    pub fn read(state_dir: &Path) -> Option<Record> {
        let record: Record = serde_json::from_slice(&fs::read(state_dir.join(FILE)).ok()?).ok()?;
        (Some(record.boot_id.as_str()) == clock::boot_id().ok().as_deref()).then_some(record)
    }

    fn write(&self, state_dir: &Path) -> io::Result<()> {
        let new = state_dir.join("mount.json.new");
        let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&new)?;
        file.write_all(serde_json::to_string(self)?.as_bytes())?;
        fs::rename(new, state_dir.join(FILE))
    }

    /// Whether the mount is there, and nothing mounted over it: what it hides cannot be taken away. Not where another one is
    /// on its path by now.
    ///
    /// # Errors
    /// Where `/proc` cannot be read.
    pub fn is_there(&self) -> io::Result<bool> {
        Ok(mounts()?.into_iter().rfind(|mount| mount.path == self.mountpoint).is_some_and(|top| self.is(&top)))
    }

    /// Its path.
    pub fn mountpoint(&self) -> &Path {
        &self.mountpoint
    }

    /// Whether this is the mount that was recorded.
    fn is(&self, mount: &Mounted) -> bool {
        let plain =
            mount.path == self.mountpoint && mount.id == self.mount_id && mount.device == self.connection.device;
        // Only with the rest known to fit, though it asks nothing of the filesystem.
        plain && mount.fs_type == FS_TYPE && self.unique_id == unique_id(&mount.path)
    }
}

/// Takes away the dead mount that this state directory's last server left, at `mountpoint` or elsewhere. Nothing happens
/// where there is none; what is somebody else's is left alone, for [`kernel_mount::check_mountpoint`] to judge.
///
/// # Errors
/// It is there and dead, and cannot be taken away.
pub fn clean(state_dir: &Path, mountpoint: &Path) -> Result<()> {
    let Some(record) = Record::read(state_dir) else { return Ok(()) };
    if !record.is_there()? {
        return Ok(());
    }
    // Whoever has it serves the mount. It ends with them, so that it is looked for again.
    let Ok(_lock) = keeper::lock::lock_state(state_dir) else { return Ok(()) };
    if !record.is_there()? {
        return Ok(());
    }
    let shown = record.mountpoint.display();
    if !is_dead(&record.mountpoint)? {
        bail!(Failure::StillConnected { path: shown.to_string() });
    }
    kernel_mount::disconnect(&record.mountpoint, true)
        .with_context(|| format!("{shown} is a mount whose server is gone, and cannot be taken away"))?;
    let elsewhere = if record.mountpoint == mountpoint { "" } else { ", where this state was mounted last" };
    tracing::info!("took away the dead mount on {shown}{elsewhere}");
    Ok(())
}

/// Records the mount just made on `mountpoint`, for whoever is to take it away to know it by. The connection before it, where
/// there was one since boot, is lost.
///
/// # Errors
/// Where the mount is not to be found, or the state directory cannot be written.
pub fn record(state_dir: &Path, mountpoint: &Path) -> Result<Record> {
    let mount = mounts()?.into_iter().rfind(|mount| mount.path == mountpoint && mount.fs_type == FS_TYPE);
    let mount = mount.with_context(|| format!("{} is not mounted", mountpoint.display()))?;
    let connection = Connection::new(mount.device);
    let lost = match Record::read(state_dir) {
        Some(before) => before.lost.map(|lost| still_there(lost, before.connection, &connection)),
        None => Some(Vec::new()),
    };
    let record = Record {
        boot_id: clock::boot_id()?,
        unique_id: unique_id(mountpoint),
        mountpoint: mount.path,
        mount_id: mount.id,
        connection,
        lost: lost.filter(|lost| lost.len() <= MAX_LOST),
    };
    record.write(state_dir).with_context(|| format!("{}", state_dir.join(FILE).display()))?;
    Ok(record)
}

/// The connections of the state directory, as far as they are known.
pub fn connections(state_dir: &Path) -> Connections {
    match Record::read(state_dir) {
        Some(Record { connection, lost, .. }) => Connections { live: Some(connection), lost },
        None => Connections::default(),
    }
}

/// The lost connections by which handles may still be known; the last one in any case, so that it is known that there
/// was one.
fn still_there(mut lost: Vec<Connection>, last: Connection, now: &Connection) -> Vec<Connection> {
    // A device number in use again has been let go of.
    lost.retain(|before| before.device != last.device && before.device != now.device);
    lost.retain(|before| before.is_there() != Some(false));
    lost.push(last);
    lost
}

/// Whether the mount on a path has lost its connection. Asked by a process that is killed where it gets no answer.
///
/// # Errors
/// Where no process can be started.
pub fn is_dead(path: &Path) -> Result<bool> {
    let mut probe = Command::new("/proc/self/exe");
    probe.arg("probe").arg("--dead").arg(path).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let mut probe = probe.spawn().context("cannot look at the dead mount")?;
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(status) = probe.try_wait()? {
            return Ok(status.success());
        }
        if Instant::now() > deadline {
            // Not waited for: a call that a stopped server has taken is not ended by a signal.
            probe.kill()?;
            return Ok(false);
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn connection(minor: u32) -> Connection {
        Connection { device: format!("0:{minor}"), listed: None }
    }

    #[test]
    fn a_device_number_in_use_again_is_not_kept() {
        let before = vec![connection(7_000_001), connection(7_000_002)];
        let lost = still_there(before, connection(7_000_003), &connection(7_000_002));
        assert_eq!(lost.last(), Some(&connection(7_000_003)));
        assert!(!lost.contains(&connection(7_000_002)));
    }

    #[test]
    fn what_was_recorded_in_another_boot_is_nobodys() {
        let dir = tempfile::tempdir().expect("directory");
        let record = Record {
            boot_id: clock::boot_id().expect("/proc"),
            mountpoint: "/mnt".into(),
            mount_id: 1,
            unique_id: None,
            connection: connection(50),
            lost: Some(vec![connection(49)]),
        };
        record.write(dir.path()).expect("written");
        assert_eq!(Record::read(dir.path()), Some(record.clone()));
        let before = Record { boot_id: "another".into(), ..record };
        before.write(dir.path()).expect("written");
        assert_eq!(Record::read(dir.path()), None);
        assert_eq!(connections(dir.path()), Connections::default());
    }

    #[test]
    fn where_nothing_is_known_to_be_lost_every_other_tree_may_be() {
        let unknown = Connections { live: Some(connection(50)), lost: Some(Vec::new()) };
        assert!(unknown.may_be_lost("0:51") && !unknown.may_be_lost("0:50") && !unknown.is_all_gone());
        let known = Connections { lost: Some(vec![connection(49)]), ..unknown };
        assert!(known.may_be_lost("0:49") && !known.may_be_lost("0:51"));
        let taken = Connections { lost: Some(vec![connection(50)]), ..known.clone() };
        assert!(taken.is_all_gone(), "its number is the served one's by now");
        let both = Connections { lost: Some(vec![connection(50), connection(49)]), ..known };
        assert!(!both.is_all_gone(), "a list without the one that is served proves nothing");
    }
}
