//! One look through `/proc` for the open files of a key, grouped by open file.
//!
//! A file is known by its inode number in `/proc/PID/fdinfo/FD` and the device number of the tree, both of which the
//! kernel tells without asking the filesystem. Copies of one open file are told by kcmp(2). Which of them is the
//! holder's, the tree answers to an ioctl on it; for that a copy is taken by pidfd_getfd(2). While we have it it keeps the
//! lease alive, so it is closed at once; the lease ends a moment later than it would have, never earlier.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow};
use fuser::INodeNo;
use leasefs::client::Status;
use leasefs::{Epoch, Key};
use nix::errno::Errno;

use crate::cli::proc::{self, Pid, Stat};
use crate::cli::tree::{Tree, trouble};
use crate::ino::Node;
use crate::ioctl::LEASEFS_IOC_HOLDS;
use crate::mountinfo;

/// `KCMP_FILE`: whether two descriptors are of one open file.
const KCMP_FILE: libc::c_int = 0;
/// `KCMP_FILES`: whether two threads have one table of descriptors.
const KCMP_FILES: libc::c_int = 2;
/// Access mode of the flags in `fdinfo`.
const ACCESS_MODE: u64 = 3;

/// What an open file says of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// It holds the lease of this epoch.
    Holds(u64),
    /// It holds none.
    Nothing,
    /// It could not be asked.
    Unknown,
}

/// An open file of the key and those who have it.
#[derive(Clone, Debug)]
pub struct Handle {
    /// What it says.
    pub answer: Answer,
    /// Processes and their descriptors of it.
    pub open_in: BTreeMap<Pid, Vec<u32>>,
}

/// What was found.
#[derive(Debug, Default)]
pub struct Scan {
    /// The open files of the key.
    pub handles: Vec<Handle>,
    /// Who has the newest attempt's result open for writing.
    pub writers: BTreeMap<Pid, Vec<u32>>,
    /// Processes that may not be looked into.
    pub unseen: usize,
    /// Processes with descriptors on their way through one of their sockets: of which files, the kernel does not tell.
    pub in_flight: Vec<u32>,
}

/// One descriptor of the key's file. Descriptors belong to a thread's table; threads mostly share one.
#[derive(Clone, Copy, Debug)]
struct Copy {
    process: Pid,
    thread: u32,
    fd: u32,
}

/// Looks at every process.
///
/// # Errors
/// Where the tree cannot be read.
pub fn scan(tree: &Tree, key: &Key, status: &Status) -> Result<Scan> {
    let mut looking = Looking::of(tree, key, status)?;
    for pid in proc::all() {
        let Some(stat) = Stat::of(pid).filter(|stat| !stat.is_kernel) else { continue };
        if let Err(error) = looking.process(Pid { pid, start_time: stat.start_time })
            && error.kind() == io::ErrorKind::PermissionDenied
        {
            looking.scan.unseen += 1;
        }
    }
    let handles = looking.copies.iter().fold(Vec::<Vec<Copy>>::new(), |mut groups, copy| {
        match groups.iter_mut().find(|group| is_same_file(group[0], *copy)) {
            Some(group) => group.push(*copy),
            None => groups.push(vec![*copy]),
        }
        groups
    });
    looking.scan.in_flight.dedup();
    looking.scan.handles = handles.iter().map(|copies| handle(copies)).collect();
    Ok(looking.scan)
}

fn handle(copies: &[Copy]) -> Handle {
    let answers = copies.iter().map(|copy| ask(*copy));
    let answer = answers.into_iter().find(|answer| *answer != Answer::Unknown).unwrap_or(Answer::Unknown);
    let mut open_in: BTreeMap<Pid, Vec<u32>> = BTreeMap::new();
    for copy in copies {
        open_in.entry(copy.process).or_default().push(copy.fd);
    }
    Handle { answer, open_in }
}

struct Looking {
    /// Inode numbers of the key's file and of the newest attempt's result.
    claim: u64,
    result: u64,
    device: String,
    /// Of an orphaned key, the handle is of a tree that is no more: devices that it is not of.
    other_devices: Option<Vec<String>>,
    copies: Vec<Copy>,
    scan: Scan,
}

impl Looking {
    fn of(tree: &Tree, key: &Key, status: &Status) -> Result<Looking> {
        let path = tree.files.status_path(key);
        let ino = fs::symlink_metadata(&path).map_err(|error| trouble(key, error))?.ino();
        let Some(Node::Status(id)) = Node::of(INodeNo(ino)) else {
            return Err(anyhow!("{key}: its status has no number of a status file: use the `leasefs` that serves it"));
        };
        let device = mountinfo::device_of(tree.root()).with_context(|| tree.root().display().to_string())?;
        let other_devices = (status.state == "orphaned").then(|| {
            let mounts = mountinfo::mounts().unwrap_or_default();
            mounts.into_iter().filter(|mount| mount.device != device).map(|mount| mount.device).collect()
        });
        Ok(Looking {
            claim: Node::Claim(id).ino().0,
            result: Node::Result(id, Epoch(status.epoch)).ino().0,
            device,
            other_devices,
            copies: Vec::new(),
            scan: Scan::default(),
        })
    }

    /// Looks at each table of descriptors of a process once.
    fn process(&mut self, process: Pid) -> io::Result<()> {
        let mut looked_at: Vec<u32> = Vec::new();
        for task in fs::read_dir(format!("/proc/{}/task", process.pid))? {
            let Some(thread) = task?.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
            if looked_at.iter().any(|other| compare(*other, thread, KCMP_FILES, 0, 0) == Some(true)) {
                continue;
            }
            // Where the kernel does not compare tables, those of threads other than the first are taken for the same.
            if looked_at.is_empty() || compare(looked_at[0], thread, KCMP_FILES, 0, 0) == Some(false) {
                self.table(process, thread)?;
            }
            looked_at.push(thread);
        }
        Ok(())
    }

    fn table(&mut self, process: Pid, thread: u32) -> io::Result<()> {
        let task = PathBuf::from(format!("/proc/{}/task/{thread}", process.pid));
        for entry in fs::read_dir(task.join("fd"))? {
            let Some(fd) = entry?.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
            let name = fd.to_string();
            // A pipe or a timer is passed over; a socket may carry what is looked for.
            let link = fs::read_link(task.join("fd").join(&name)).unwrap_or_default();
            let is_file = link.is_absolute();
            if !is_file && !link.as_os_str().as_encoded_bytes().starts_with(b"socket:") {
                continue;
            }
            // Closed meanwhile.
            let Ok(info) = fs::read_to_string(task.join("fdinfo").join(&name)) else { continue };
            if number(&info, "scm_fds:", 10).is_some_and(|count| count > 0) {
                self.scan.in_flight.push(process.pid);
            }
            let ino = number(&info, "ino:", 10).filter(|_| is_file);
            if ino == Some(self.claim) && self.is_ours(&task.join("fd").join(&name)) {
                self.copies.push(Copy { process, thread, fd });
            } else if ino == Some(self.result)
                && number(&info, "flags:", 8).is_some_and(|flags| flags & ACCESS_MODE != 0)
                && self.is_ours(&task.join("fd").join(&name))
            {
                self.scan.writers.entry(process).or_default().push(fd);
            }
        }
        Ok(())
    }

    /// Whether an open file is of this tree, or may be of the lost one that it was.
    fn is_ours(&self, link: &Path) -> bool {
        let Ok(device) = mountinfo::device_of(link) else { return false };
        let may_be_lost = self.other_devices.as_ref().is_some_and(|others| !others.contains(&device));
        device == self.device || may_be_lost
    }
}

/// A number of a line of `fdinfo`.
fn number(info: &str, name: &str, radix: u32) -> Option<u64> {
    u64::from_str_radix(info.lines().find_map(|line| line.strip_prefix(name))?.trim(), radix).ok()
}

/// Whether two descriptors are of one open file. Where the kernel does not say, copies of one process and number are.
fn is_same_file(one: Copy, other: Copy) -> bool {
    compare(one.thread, other.thread, KCMP_FILE, one.fd, other.fd).unwrap_or(false)
}

/// kcmp(2); none where it is refused.
fn compare(one: u32, other: u32, what: libc::c_int, first: u32, second: u32) -> Option<bool> {
    let (first, second) = (libc::c_ulong::from(first), libc::c_ulong::from(second));
    // SAFETY: kcmp(2) takes two thread ids and three numbers, and writes nothing.
    match unsafe { libc::syscall(libc::SYS_kcmp, one, other, what, first, second) } {
        0 => Some(true),
        order if order > 0 => Some(false),
        _ => None,
    }
}

nix::ioctl_read_bad!(holds, LEASEFS_IOC_HOLDS, u64);

/// Asks an open file what it holds, through a copy of it that lives as long as the question takes.
fn ask(copy: Copy) -> Answer {
    let Ok(file) = borrow(copy) else { return Answer::Unknown };
    let mut epoch = 0;
    // SAFETY: the descriptor is open, and the ioctl writes 8 bytes to `epoch`, which outlives the call.
    let answer = unsafe { holds(file.as_raw_fd(), &raw mut epoch) };
    drop(file);
    match answer {
        Ok(_) if epoch > 0 => Answer::Holds(epoch),
        Ok(_) | Err(Errno::ESTALE) => Answer::Nothing,
        Err(_) => Answer::Unknown,
    }
}

/// A copy of another process's descriptor.
fn borrow(copy: Copy) -> io::Result<OwnedFd> {
    let owned = |answer: libc::c_long| match i32::try_from(answer) {
        // SAFETY: the call has just made this descriptor, so nobody else owns it.
        Ok(fd) if fd >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
        _ => Err(io::Error::last_os_error()),
    };
    // SAFETY: takes two integers and touches no memory of ours.
    let pidfd = owned(unsafe { libc::syscall(libc::SYS_pidfd_open, copy.process.pid, 0) })?;
    // It may be a later process of this number by now.
    if copy.thread != copy.process.pid || !copy.process.is_there() {
        return Err(io::ErrorKind::NotFound.into());
    }
    // SAFETY: as above.
    owned(unsafe { libc::syscall(libc::SYS_pidfd_getfd, pidfd.as_raw_fd(), copy.fd, 0) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_a_descriptor_are_read() {
        let info = "pos:\t0\nflags:\t0100002\nmnt_id:\t42\nino:\t4611686018427387905\nscm_fds: 2\n";
        assert_eq!(number(info, "ino:", 10), Some((4 << 60) | 1));
        assert_eq!(number(info, "flags:", 8), Some(0o100_002));
        assert_eq!(number(info, "scm_fds:", 10), Some(2));
        assert_eq!(number(info, "nothing:", 10), None);
    }

    #[test]
    fn copies_of_an_open_file_are_told_from_another_open_file() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let copied = file.as_file().try_clone().expect("a copy");
        let again = fs::File::open(file.path()).expect("opened again");
        let process = Pid::of(std::process::id()).expect("it is there");
        let at = |fd: i32| Copy { process, thread: process.pid, fd: fd.cast_unsigned() };
        let (one, other, second) = (at(file.as_raw_fd()), at(copied.as_raw_fd()), at(again.as_raw_fd()));
        assert!(is_same_file(one, other) && !is_same_file(one, second));
    }
}
