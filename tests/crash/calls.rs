//! More system calls as the workers need them, in the manner of [`sys`](crate::sys).
use std::os::fd::{AsRawFd, OwnedFd};

use crate::sys::{Answer, answer};

/// One `pwrite(2)` of the whole buffer.
pub fn write_at(fd: &OwnedFd, bytes: &[u8], offset: u64) -> Answer {
    // SAFETY: the buffer is readable for its whole length.
    let put = unsafe { libc::pwrite(fd.as_raw_fd(), bytes.as_ptr().cast(), bytes.len(), offset as i64) };
    answer(put as i64)
}

/// One `read(2)` of what comes next.
pub fn read_next(fd: &OwnedFd) -> Result<Vec<u8>, i32> {
    let mut buffer = vec![0; 64 << 10];
    // SAFETY: the buffer is writable for its whole length.
    let got = answer(unsafe { libc::read(fd.as_raw_fd(), buffer.as_mut_ptr().cast(), buffer.len()) } as i64)?;
    buffer.truncate(got as usize);
    Ok(buffer)
}

/// `poll(2)` of one descriptor; its events.
pub fn poll(fd: &OwnedFd, events: i16, timeout_ms: i32) -> Answer {
    let mut poll = libc::pollfd { fd: fd.as_raw_fd(), events, revents: 0 };
    // SAFETY: one entry, which outlives the call.
    answer(unsafe { libc::poll(&mut poll, 1, timeout_ms) }.into())?;
    Ok(poll.revents as u64)
}
