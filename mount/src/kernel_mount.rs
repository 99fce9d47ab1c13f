//! Mounting and unmounting: `mount(2)` as root, `fusermount3` otherwise.
//!
//! The mount is made here and not by fuser, because whoever holds `/dev/fuse` need not be the process that answers.

use std::fs::{File, OpenOptions};
use std::io::{self, IoSliceMut};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::socket::{ControlMessageOwned, MsgFlags, recvmsg};
use nix::unistd::{getegid, geteuid};

use crate::dead_mount::{self, Record};
use crate::failure::{self, Failure};
use crate::mountinfo::{FS_TYPE, is_automount, is_leasefs, mounts};

/// What a mount is of, where nothing else is said.
const SOURCE: &str = "leasefs";

/// How to mount.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub struct Options {
    /// Every uid may use the tree.
    pub allow_other: bool,
    /// What the mount is of, as `findmnt` shows it; `leasefs` unless said.
    #[serde(default)]
    pub source: Option<String>,
    /// Further options, as `-o` gives them.
    pub extra: Vec<String>,
}

/// Checks that a directory can be mounted on.
///
/// # Errors
/// What is wrong with it and what to do.
pub fn check_mountpoint(path: &Path) -> Result<PathBuf> {
    let shown = failure::shown(path);
    let metadata = match std::fs::metadata(path) {
        Ok(metadata) => metadata,
        Err(error) if error.raw_os_error() == Some(libc::ENOTCONN) => bail!(Failure::DeadMountpoint { path: shown }),
        Err(error) if error.kind() == io::ErrorKind::NotFound => bail!(Failure::NoMountpoint { path: shown }),
        Err(error) => bail!("{shown}: {error}"),
    };
    if !metadata.is_dir() {
        bail!(Failure::MountpointNoDirectory { path: shown });
    }
    let path = path.canonicalize().with_context(|| shown.clone())?;
    if is_leasefs(&path)? {
        // The kernel may have answered for a dead one what it knew.
        if dead_mount::is_dead(&path)? {
            bail!(Failure::DeadMountpoint { path: shown });
        }
        bail!(Failure::MountedAlready { path: shown });
    }
    let is_mountpoint = path
        .parent()
        .is_some_and(|parent| std::fs::metadata(parent).is_ok_and(|parent| parent.dev() != metadata.dev()));
    if is_mountpoint && mounts()?.iter().any(|mount| mount.path == path) && !is_automount(&path)? {
        bail!(Failure::MountpointTaken { path: shown });
    }
    let mut entries = std::fs::read_dir(&path).with_context(|| shown.clone())?;
    if entries.next().is_some() {
        // Since it was looked at above, another may have mounted here.
        if is_leasefs(&path)? {
            bail!(Failure::MountedAlready { path: shown });
        }
        bail!(Failure::MountpointNotEmpty { path: shown });
    }
    Ok(path)
}

/// How long another mount on the same directory is waited for: longer than mount(2) takes on a machine that has much to do.
const MOUNTED_WITHIN: Duration = Duration::from_secs(10);

/// Keeps every other leasefs from mounting on a directory for as long as the value lives, and checks that none has done so
/// since [`check_mountpoint`]: the later of two would hide the tree of the other, and take it for its own. None where the
/// filesystem has no such lock, or a stranger keeps it.
///
/// # Errors
/// As [`check_mountpoint`].
pub fn keep_others_off(mountpoint: &Path) -> Result<Option<Flock<File>>> {
    let until = Instant::now() + MOUNTED_WITHIN;
    let mut directory = File::open(mountpoint).with_context(|| failure::shown(mountpoint))?;
    let lock = loop {
        match Flock::lock(directory, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => break Some(lock),
            Err((back, Errno::EWOULDBLOCK)) if Instant::now() < until => directory = back,
            Err(_) => break None,
        }
        std::thread::sleep(Duration::from_millis(1));
    };
    check_mountpoint(mountpoint)?;
    Ok(lock)
}

/// Checks that `/proc` tells of the processes by the numbers that requests come with.
///
/// # Errors
/// What is wrong and what to do.
pub fn check_proc() -> Result<()> {
    let own = std::process::id().to_string();
    match std::fs::read_link("/proc/self") {
        Ok(number) if number.as_os_str() == own.as_str() => Ok(()),
        // Whoever has the number there is somebody else.
        _ => bail!("/proc is not that of this pid namespace: mount it here first (`mount -t proc proc /proc`)"),
    }
}

/// Mounts and gives the connection to the kernel.
///
/// # Errors
/// What is wrong and what to do.
pub fn connect(mountpoint: &Path, options: &Options) -> Result<OwnedFd> {
    if !Path::new("/dev/fuse").exists() {
        bail!(Failure::NoDevice);
    }
    if geteuid().is_root() { mount_direct(mountpoint, options) } else { mount_helper(mountpoint, options) }
}

fn mount_direct(mountpoint: &Path, options: &Options) -> Result<OwnedFd> {
    let device = OpenOptions::new().read(true).write(true).open("/dev/fuse");
    let device = device.map_err(|error| Failure::of_device(&error))?;
    let mode = std::fs::metadata(mountpoint)?.mode();
    let (flags, extra) = split_flags(&options.extra)?;
    let mut data = format!(
        "fd={},rootmode={:o},user_id={},group_id={},default_permissions",
        device.as_raw_fd(),
        mode & libc::S_IFMT,
        geteuid(),
        getegid()
    );
    if options.allow_other {
        data.push_str(",allow_other");
    }
    for option in extra {
        data.push(',');
        data.push_str(&quoted(option));
    }
    let source = options.source.as_deref().unwrap_or(SOURCE);
    mount(Some(source), mountpoint, Some(FS_TYPE), flags, Some(data.as_str())).map_err(|errno| match errno {
        nix::Error::EPERM => anyhow!(Failure::MountNotPermitted { path: failure::shown(mountpoint) }),
        nix::Error::EINVAL => anyhow!(Failure::OptionsRefused { options: options.extra.join(",") }),
        errno => anyhow!("cannot mount on {}: {errno}", mountpoint.display()),
    })?;
    Ok(device.into())
}

/// Splits `-o` options into flags of `mount(2)` and what fuse itself reads.
fn split_flags(options: &[String]) -> Result<(MsFlags, Vec<String>)> {
    let mut flags = MsFlags::MS_NODEV | MsFlags::MS_NOSUID;
    let mut rest = Vec::new();
    for option in options {
        match option.as_str() {
            "rw" | "async" | "exec" | "atime" | "nodev" | "nosuid" | "default_permissions" => {}
            "ro" => flags |= MsFlags::MS_RDONLY,
            "noexec" => flags |= MsFlags::MS_NOEXEC,
            "noatime" => flags |= MsFlags::MS_NOATIME,
            "sync" => flags |= MsFlags::MS_SYNCHRONOUS,
            "dirsync" => flags |= MsFlags::MS_DIRSYNC,
            "dev" => flags -= MsFlags::MS_NODEV,
            "suid" => flags -= MsFlags::MS_NOSUID,
            other if other.starts_with("max_read=") || other.starts_with("context=") => rest.push(other.to_owned()),
            other => bail!(Failure::UnknownOption { option: other.to_owned() }),
        }
    }
    Ok((flags, rest))
}

/// An option as the kernel reads it from a list: a value with a comma in it is quoted.
fn quoted(option: String) -> String {
    match option.split_once('=') {
        Some((name, value)) if value.contains(',') => format!("{name}=\"{value}\""),
        _ => option,
    }
}

fn mount_helper(mountpoint: &Path, options: &Options) -> Result<OwnedFd> {
    let (ours, theirs) = UnixStream::pair()?;
    split_flags(&options.extra)?;
    let source = options.source.as_deref().unwrap_or(SOURCE);
    // It takes a backslash before whatever means something in its list.
    let source = source.replace('\\', "\\\\").replace(',', "\\,");
    let mut list = vec![format!("fsname={source}"), "subtype=leasefs".into(), "default_permissions".into()];
    if options.allow_other {
        list.push("allow_other".into());
    }
    list.extend(options.extra.iter().cloned());
    let fd = theirs.as_raw_fd();
    let mut command = Command::new("fusermount3");
    command.arg("-o").arg(list.join(",")).arg("--").arg(mountpoint).env("_FUSE_COMMFD", fd.to_string());
    // SAFETY: between fork and exec only fcntl(2) is called, which is async-signal-safe.
    unsafe {
        command.pre_exec(
            move || {
                if libc::fcntl(fd, libc::F_SETFD, 0) < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
            },
        );
    }
    let output = match command.output() {
        Ok(output) => output,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            bail!(Failure::NoFusermount)
        }
        Err(error) => bail!("fusermount3: {error}"),
    };
    drop(theirs);
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        let said = said.trim().replace('\n', "; ");
        if said.contains("user_allow_other") {
            bail!(Failure::NoAllowOther);
        }
        if said.contains("failed to open /dev/fuse: Permission denied") {
            bail!(Failure::DeviceMode);
        }
        bail!("{said}");
    }
    receive_fd(&ours).context("fusermount3 passed no connection")
}

fn receive_fd(socket: &UnixStream) -> Result<OwnedFd> {
    let mut byte = [0];
    let mut iov = [IoSliceMut::new(&mut byte)];
    let mut space = nix::cmsg_space!(RawFd);
    let message = recvmsg::<()>(socket.as_raw_fd(), &mut iov, Some(&mut space), MsgFlags::MSG_CMSG_CLOEXEC)?;
    for part in message.cmsgs()? {
        if let ControlMessageOwned::ScmRights(fds) = part
            && let Some(fd) = fds.first()
        {
            // SAFETY: the kernel just put this descriptor into our table, and nothing else owns it.
            return Ok(unsafe { OwnedFd::from_raw_fd(*fd) });
        }
    }
    bail!("no descriptor came with the message")
}

/// Unmounts. With `detach` the tree is taken out of the namespace at once and ends with its last open file.
///
/// # Errors
/// Those of `umount2(2)`, `EBUSY` above all.
pub fn disconnect(mountpoint: &Path, detach: bool) -> io::Result<()> {
    let flags = if detach { MntFlags::MNT_DETACH } else { MntFlags::UMOUNT_NOFOLLOW };
    match umount2(mountpoint, flags) {
        Err(nix::Error::EPERM) if !geteuid().is_root() => {
            let mut command = Command::new("fusermount3");
            command.arg(if detach { "-uz" } else { "-u" }).arg("--").arg(mountpoint);
            let output = command.output()?;
            if output.status.success() {
                return Ok(());
            }
            let said = String::from_utf8_lossy(&output.stderr);
            let errno = if said.contains("busy") { libc::EBUSY } else { libc::EPERM };
            Err(io::Error::from_raw_os_error(errno))
        }
        result => result.map_err(io::Error::from),
    }
}

/// How often it is looked whether files are still open.
const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// An orderly stop: unmounts; where files are open, the tree is taken out of sight and ends with the last of them, so
/// that no lease is cut short. Nothing happens where it is not mounted any more, whatever is mounted there by now. `is_open`
/// says whether the server knows of an open file, or of one whose close is not recorded yet.
///
/// With its last user the kernel ends a connection, and drops what it has not handed over by then: the last close itself,
/// and with it the result that it was to commit. So this is a user as well, until the server knows of no other.
pub fn stop(mount: &Record, is_open: impl Fn() -> bool) {
    let (mountpoint, is_there) = (mount.mountpoint(), || mount.is_there().is_ok_and(|there| there));
    if !is_there() || disconnect(mountpoint, false).is_ok() {
        return;
    }
    // Asks the server nothing, neither now nor when it is closed.
    let held = OpenOptions::new().read(true).custom_flags(libc::O_PATH | libc::O_DIRECTORY).open(mountpoint);
    if let Err(error) = &held {
        tracing::warn!("what is closed last may not be recorded: {}: {error}", mountpoint.display());
    }
    // Keeper and server may have been told both, and the other was first.
    if !is_there() {
        return;
    }
    match disconnect(mountpoint, true) {
        Ok(()) => tracing::info!("files are open: serving them until the last one is closed"),
        Err(error) => {
            tracing::error!("cannot unmount {}: {error}", mountpoint.display());
            return;
        }
    }
    while held.is_ok() && is_open() {
        std::thread::sleep(LOOK_AGAIN);
    }
}

/// Settings by which the kernel aborts a connection because one request waits for long (Linux 6.15 and later): a bound,
/// and what is taken where the server asks for none, as this one.
const REQUEST_TIMEOUTS: [&str; 2] = ["max_request_timeout", "default_request_timeout"];

/// The first of them that is set, if any, as what is wrong.
pub fn request_timeout() -> Option<Failure> {
    REQUEST_TIMEOUTS.into_iter().find_map(|name| {
        let text = std::fs::read_to_string(format!("/proc/sys/fs/fuse/{name}")).ok()?;
        let seconds = Some(text.trim().to_owned()).filter(|seconds| seconds != "0")?;
        Some(Failure::RequestTimeout { setting: format!("fs.fuse.{name}"), seconds })
    })
}
