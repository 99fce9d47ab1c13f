//! The request that was read last, where the next server finds it: for kernels that send nothing again.
//!
//! A server that is killed while it waits for a request may still read one: the kernel hands it out before it looks at
//! the signal. Nothing of that request is known then but that somebody waits for its answer, and if it was a close, its
//! effect would be lost. So what [`crate::reading`] reads into is memory that the keeper holds.
//!
//! The buffer is there before it is read into. The kernel gives no memory to a process that a `SIGKILL` is on its way to,
//! and a request that it cannot hand out for that is answered with `EIO`: so every server reads into this buffer, also
//! where the kernel could resend.

use std::io;
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::ptr::NonNull;

use nix::sys::mman::{MapFlags, ProtFlags, mmap};

use crate::connection::MAX_WRITE;

/// The largest request: what the kernel wants there to be room for.
pub const LARGEST: usize = MAX_WRITE as usize + PAGE;
/// No page is smaller.
const PAGE: usize = 4096;

/// What the server before read last.
///
/// # Errors
/// Those of `pread(2)`.
pub fn load(memory: &OwnedFd) -> io::Result<Option<Vec<u8>>> {
    let file = std::fs::File::from(memory.try_clone()?);
    if file.metadata()?.len() < LARGEST as u64 {
        return Ok(None);
    }
    let mut length = [0; 4];
    file.read_exact_at(&mut length, 0)?;
    let length = u32::from_ne_bytes(length) as usize;
    // A request has its length in front; memory that was never read into has 0.
    if length == 0 || length > LARGEST {
        return Ok(None);
    }
    let mut message = vec![0; length];
    file.read_exact_at(&mut message, 0)?;
    Ok(Some(message))
}

/// Forgets what is there, and gives the [`LARGEST`] bytes to read into.
///
/// # Errors
/// Those of `ftruncate(2)` and `mmap(2)`.
pub fn buffer(memory: &OwnedFd) -> io::Result<NonNull<u8>> {
    nix::unistd::ftruncate(memory, LARGEST as i64)?;
    let size = NonZeroUsize::new(LARGEST).ok_or(io::ErrorKind::InvalidInput)?;
    // SAFETY: a new mapping at an address of the kernel's choice, of a file that has this length and keeps it.
    let at = unsafe {
        mmap(None, size, ProtFlags::PROT_READ | ProtFlags::PROT_WRITE, MapFlags::MAP_SHARED, memory.as_fd(), 0)
    };
    let at: NonNull<u8> = at?.cast();
    for page in (0..LARGEST).step_by(PAGE) {
        // SAFETY: within the mapping, which nobody else uses yet. The first of these is the length of what was there.
        unsafe { at.add(page).cast::<u32>().write_volatile(0) };
    }
    Ok(at)
}
