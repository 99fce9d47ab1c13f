//! What is mounted where, as `/proc/self/mountinfo` lists it.

use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

/// The filesystem type of a leasefs tree.
pub const FS_TYPE: &str = "fuse.leasefs";

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
}

/// Every mount of this mount namespace, a later one after those it may hide.
///
/// # Errors
/// Where `/proc` cannot be read.
pub fn mounts() -> io::Result<Vec<Mounted>> {
    mounts_of(Path::new("/proc/self"))
}

/// Every mount that a process sees, by its directory in `/proc`.
///
/// # Errors
/// Where it cannot be read.
pub fn mounts_of(process: &Path) -> io::Result<Vec<Mounted>> {
    Ok(parse(&std::fs::read(process.join("mountinfo"))?))
}

/// Whether the leasefs tree, or a part of one, is mounted on this path.
///
/// # Errors
/// Where `/proc` cannot be read.
pub fn is_leasefs(path: &Path) -> io::Result<bool> {
    Ok(mounts()?.iter().any(|mount| mount.path == path && mount.fs_type == FS_TYPE))
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
    let fs_type = text(fields.skip_while(|field| *field != b"-").nth(1)?)?;
    Some(Mounted { id, device, path, fs_type, whole })
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
        assert_eq!(mounts[3], Mounted { id, device, path, fs_type, whole: false });
        assert_eq!(parse(b"garbage\n\n1 2"), []);
    }

    #[test]
    fn whole_trees_are_found_among_the_mounts() {
        assert_eq!(trees_among(parse(MOUNTINFO)), [PathBuf::from("/mnt/a"), PathBuf::from(r"/srv/with blank\")]);
    }
}
