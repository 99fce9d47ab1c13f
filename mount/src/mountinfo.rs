//! What is mounted where, as `/proc/self/mountinfo` lists it.

use std::ffi::{CString, OsString};
use std::io;
use std::mem::MaybeUninit;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

/// The filesystem type of a leasefs tree.
pub const FS_TYPE: &str = "fuse.leasefs";
/// That of a place where something is mounted when it is needed.
const AUTOFS: &str = "autofs";
/// `STATX_MNT_ID_UNIQUE`.
const MOUNT_ID_UNIQUE: u32 = 0x4000;

/// One mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mounted {
    /// Its number, which the kernel gives to another mount once this one is gone.
    pub id: u64,
    /// The device number of its filesystem, as `major:minor`; likewise.
    pub device: String,
    /// Where.
    pub path: PathBuf,
    /// Filesystem type.
    pub fs_type: String,
    /// It shows the whole filesystem, and not a directory of it, as a bind mount may.
    pub whole: bool,
    /// What is mounted below it here is mounted in other namespaces, too.
    pub shared: bool,
    /// What is mounted below it there is mounted here.
    pub slave: bool,
}

/// Every mount of this mount namespace, a later one after those it may hide.
///
/// # Errors
/// Where `/proc` cannot be read.
pub fn mounts() -> io::Result<Vec<Mounted>> {
    Ok(parse(&std::fs::read("/proc/self/mountinfo")?))
}

/// The number of the mount on a path that no other mount has or had; none before Linux 6.8.
pub fn unique_id(path: &Path) -> Option<u64> {
    let found = look_at(path, libc::AT_SYMLINK_NOFOLLOW, MOUNT_ID_UNIQUE).ok()?;
    (found.stx_mask & MOUNT_ID_UNIQUE != 0).then_some(found.stx_mnt_id)
}

/// The device number of the filesystem of a file that somebody has open, by its link in `/proc/PID/fd`, as `major:minor`.
///
/// # Errors
/// Where the link is gone, or may not be followed.
pub fn device_of(link: &Path) -> io::Result<String> {
    // Asked for nothing, a filesystem tells this even to those whom it tells nothing else.
    let found = look_at(link, 0, 0)?;
    Ok(format!("{}:{}", found.stx_dev_major, found.stx_dev_minor))
}

/// `statx(2)` without synchronising: the kernel answers from what it has, and the filesystem, which may be dead or hang, is
/// not asked.
fn look_at(path: &Path, flags: libc::c_int, mask: u32) -> io::Result<libc::statx> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let flags = flags | libc::AT_STATX_DONT_SYNC | libc::AT_NO_AUTOMOUNT;
    let mut found = MaybeUninit::<libc::statx>::zeroed();
    // SAFETY: the path ends with a NUL and the buffer has the size that statx(2) fills.
    let done = unsafe { libc::statx(libc::AT_FDCWD, path.as_ptr(), flags, mask, found.as_mut_ptr()) };
    if done != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: all zeroes is a value of this struct of numbers, and the kernel writes only numbers.
    Ok(unsafe { found.assume_init() })
}

/// Whether the leasefs tree, or a part of one, is mounted on this path.
///
/// # Errors
/// Where `/proc` cannot be read.
pub fn is_leasefs(path: &Path) -> io::Result<bool> {
    Ok(mounts()?.iter().any(|mount| mount.path == path && mount.fs_type == FS_TYPE))
}

/// Whether something is to be mounted on this path as soon as somebody looks into it (`x-systemd.automount`): until it is,
/// whoever looks waits for that, all but the processes of the group that is at it.
///
/// # Errors
/// Where `/proc` cannot be read.
pub fn is_automount(path: &Path) -> io::Result<bool> {
    Ok(mounts()?.iter().rfind(|mount| mount.path == path).is_some_and(|mount| mount.fs_type == AUTOFS))
}

/// The mountpoints of whole leasefs trees, each once.
///
/// # Errors
/// Where `/proc` cannot be read.
pub fn trees() -> io::Result<Vec<PathBuf>> {
    Ok(trees_among(mounts()?))
}

fn trees_among(mounts: Vec<Mounted>) -> Vec<PathBuf> {
    let whole = mounts.into_iter().filter(|mount| mount.whole && mount.fs_type == FS_TYPE);
    let mut found: Vec<PathBuf> = whole.map(|mount| mount.path).collect();
    found.sort();
    found.dedup();
    found
}

fn parse(text: &[u8]) -> Vec<Mounted> {
    text.split(|byte| *byte == b'\n').filter_map(parse_line).collect()
}

fn parse_line(line: &[u8]) -> Option<Mounted> {
    let mut fields = line.split(|byte| *byte == b' ');
    let text = |field: &[u8]| String::from_utf8(field.to_vec()).ok();
    let id = text(fields.next()?)?.parse().ok()?;
    let device = text(fields.nth(1)?)?;
    let whole = fields.next()? == b"/";
    let path = unescape(fields.next()?);
    let (mut shared, mut slave) = (false, false);
    // Options come first, then what may be there or not.
    for field in fields.by_ref().skip(1).take_while(|field| *field != b"-") {
        shared |= field.starts_with(b"shared:");
        slave |= field.starts_with(b"master:");
    }
    let fs_type = text(fields.next()?)?;
    Some(Mounted { id, device, path, fs_type, whole, shared, slave })
}

/// Undoes the kernel's `\040` for blank, tab, newline and backslash.
pub fn unescape(field: &[u8]) -> PathBuf {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((first, after)) = rest.split_first() {
        let octal = after.get(..3).filter(|_| *first == b'\\').and_then(|digits| std::str::from_utf8(digits).ok());
        match octal.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) => {
                bytes.push(byte);
                rest = &after[3..];
            }
            None => {
                bytes.push(*first);
                rest = after;
            }
        }
    }
    PathBuf::from(OsString::from_vec(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTINFO: &[u8] = b"\
22 1 0:21 / /proc rw,nosuid shared:5 - proc proc rw\n\
90 22 0:50 / /srv/with\\040blank\\134 rw,nosuid,nodev shared:7 master:2 - fuse.leasefs leasefs rw,user_id=0\n\
91 22 0:51 / /mnt/a rw - fuse.leasefs leasefs rw\n\
92 22 0:51 /claims/team /box/claims rw - fuse.leasefs leasefs rw\n\
93 22 0:52 / /mnt/other rw - fuse.sshfs host: rw\n\
94 22 0:51 / /mnt/a rw - fuse.leasefs leasefs rw\n";

    #[test]
    fn each_mount_is_read_as_it_is() {
        let mounts = parse(MOUNTINFO);
        assert_eq!(mounts.len(), 6);
        let (id, device, path, fs_type) = (92, "0:51".into(), "/box/claims".into(), FS_TYPE.into());
        assert_eq!(mounts[3], Mounted { id, device, path, fs_type, whole: false, shared: false, slave: false });
        assert_eq!((mounts[1].shared, mounts[1].slave, mounts[2].shared), (true, true, false));
        assert_eq!(mounts[1].fs_type, FS_TYPE);
        assert_eq!(parse(b"garbage\n\n1 2"), []);
    }

    #[test]
    fn whole_trees_are_found_among_the_mounts() {
        assert_eq!(trees_among(parse(MOUNTINFO)), [PathBuf::from("/mnt/a"), PathBuf::from(r"/srv/with blank\")]);
    }
}
