//! What whoever has a holder handle can do with it, whichever process took the lease (contract §3, §4): an open
//! `claims/KEY` that was inherited, or came through a socket. A process that claims for itself has a [`super::Lease`].

use std::fs::File;
use std::io;

use rustix::fs::{FlockOperation, Timespec, Timestamps, UTIME_NOW, XattrFlags, flock, fsetxattr, ftruncate, futimens};
use rustix::io::{Errno, retry_on_intr};

use crate::ttl::Ttl;

/// Locks the key, if nobody else has it.
///
/// # Errors
/// Those of `flock(2)`: `EWOULDBLOCK` where it is held.
pub fn try_lock(handle: &File) -> io::Result<()> {
    Ok(flock(handle, FlockOperation::NonBlockingLockExclusive)?)
}

/// Waits in line for the key, as long as it takes.
///
/// # Errors
/// Those of `flock(2)`: `EINTR` when a signal came. The place in line is gone then.
pub fn lock(handle: &File) -> io::Result<()> {
    Ok(flock(handle, FlockOperation::LockExclusive)?)
}

/// The epoch that the handle tells: the first line of its record. From a holder handle it is never another attempt's.
///
/// # Errors
/// Those of `read(2)`: `ESTALE` once the handle lost its lease.
pub fn epoch(handle: &File) -> io::Result<u64> {
    let mut record = [0; 32];
    // No signal ends these calls. Where the kernel sends none again, the server's replacement does: the next one answers.
    let length = retry_on_intr(|| rustix::io::pread(handle, &mut record, 0))?;
    let line = record[..length].split(|byte| *byte == b'\n').next().unwrap_or_default();
    std::str::from_utf8(line)
        .ok()
        .and_then(|line| line.parse().ok())
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "the record does not begin with an epoch"))
}

/// Renews the lease: its TTL counts from now.
///
/// # Errors
/// Those of `futimens(2)`: `ESTALE` once the handle lost its lease.
pub fn renew(handle: &File) -> io::Result<()> {
    let now = Timespec { tv_sec: 0, tv_nsec: UTIME_NOW };
    match retry_on_intr(|| futimens(handle, &Timestamps { last_access: now, last_modification: now })) {
        // The kernel does not say through which handle, so that is for the process alone that took the lease. This may
        // be another, with a copy of the handle, or one that the server cannot see. Truncation comes with the handle.
        // Locking would not do: were the lease given back, it would take a new one.
        Err(Errno::ACCESS) => Ok(retry_on_intr(|| ftruncate(handle, 0))?),
        answer => Ok(answer?),
    }
}

/// Sets the time to live of the attempt that holds the file's key, counted from now.
///
/// # Errors
/// Those of `fsetxattr(2)`.
pub fn set_ttl(file: &File, ttl: Ttl) -> io::Result<()> {
    set(file, "user.lease.ttl", &ttl.to_string())
}

/// Names the agent that the holder works for: 1 to 255 bytes of text without control characters.
///
/// # Errors
/// Those of `fsetxattr(2)`: `EINVAL` for another name.
pub fn set_agent(handle: &File, name: &str) -> io::Result<()> {
    set(handle, "user.lease.agent", name)
}

fn set(file: &File, name: &str, value: &str) -> io::Result<()> {
    Ok(retry_on_intr(|| fsetxattr(file, name, value.as_bytes(), XattrFlags::empty()))?)
}
